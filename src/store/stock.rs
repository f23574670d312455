//! Units that a hold takes once: what a store is asked and what it answers.

use crate::key::Key;
use bytes::Bytes;

/// What came of taking units from a stock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Take {
    /// Taken by this hold (now or by an earlier call of the same hold); how many are left.
    Taken {
        /// Units left under this key when they were taken.
        left: i64,
    },
    /// Fewer than asked for are there; nothing was taken.
    Short {
        /// Units left under this key.
        left: i64,
    },
    /// The hold was put back before; nothing was taken.
    Ended {
        /// What it had held; zero when it was barred before it could take anything.
        amount: u64,
    },
}

/// What came of taking a token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Popped {
    /// Taken by this hold (now or by an earlier call of the same hold).
    Token {
        /// The token.
        token: Bytes,
        /// Tokens left in the list when it was taken.
        left: u64,
    },
    /// The list is empty; nothing was taken.
    Empty,
    /// The hold was put back before; nothing was taken.
    Ended {
        /// Whether it had held a token. If not, it was barred before it could take one.
        held: bool,
    },
}

/// How a hold ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum End {
    /// Its units are sold: they never come back.
    Sold,
    /// Its units go back to the stock.
    Back,
}

/// What came of ending a hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// It ended now.
    Now {
        /// What it had held; zero when there was no hold and none can take any more.
        amount: u64,
    },
    /// It had ended before; nothing changed.
    Before {
        /// How.
        end: End,
        /// What it had held.
        amount: u64,
    },
    /// There is no such hold, so nothing can be sold.
    Never,
}

/// One hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hold {
    /// Its id.
    pub id: Key,
    /// Units it took.
    pub amount: u64,
    /// How it ended, unless it is open.
    pub ended: Option<End>,
    /// The token, if it holds or has used one.
    pub token: Option<Bytes>,
}

/// Some of the holds under a key.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Holds {
    /// The holds. One that is there throughout a walk is in at least one page, possibly in two.
    pub page: Vec<Hold>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<Bytes>,
}
