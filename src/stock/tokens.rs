//! Tokens: one for each unit, minted before the sale, each handed out to one hold.

use super::kind::Kind;
use super::{Accounts, Held, Reconciler, Stock, Taken, hold_id};
use crate::counter::Sum;
use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::store::End;
use std::fmt;
use std::time::Duration;

impl Heatsink {
    /// The tokens under `key`: numbered units (seats, voucher codes, numbers of a raffle) in lists
    /// on different shards, each handed out once.
    ///
    /// Where units are alike, a [`stock`](Heatsink::stock) does the same and evens out its buckets;
    /// tokens stay in the list that they were minted into.
    ///
    /// Keep the handle: all that one process knows of the lists is in it and its clones.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported): the store lacks one of the capabilities `tokens`,
    /// `take` and `compare_and_set`. [`Limit`](ErrorKind::Limit): the key is too long.
    ///
    /// # Example
    /// ```
    /// use heatsink::{Heatsink, Popping, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let seats = hs.tokens("hall:7")?;
    /// seats.mint(200, 4).await?; // once; the seats 0 to 199 in four lists
    /// match seats.pop("order:77").await? {
    ///     Popping::Token(seat) => {
    ///         println!("seat {}", seat.number());
    ///         seat.confirm().await?; // or seat.put_back()
    ///     }
    ///     Popping::NoneLeft => println!("sold out"),
    ///     Popping::Ended => println!("order:77 was given up"),
    /// }
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn tokens(&self, key: impl AsRef<[u8]>) -> Result<Tokens> {
        Stock::new(self, Kind::Tokens, key.as_ref()).map(Tokens)
    }
}

/// A pool of tokens. Made by [`Heatsink::tokens`]; clones are handles to the same one.
///
/// Each token is in its list, with one hold, or used: in one place, whoever crashes and whatever
/// reply is lost, as long as the store loses nothing.
#[derive(Clone)]
pub struct Tokens(Stock);

/// What came of [`Tokens::pop`].
#[derive(Clone, Debug)]
pub enum Popping {
    /// The hold has this token.
    Token(HeldToken),
    /// Every list was found empty during the call.
    NoneLeft,
    /// This hold has ended: it was put back, or given up by a call that could not learn what had
    /// become of it. It has no token and gets none. Ask again under another id.
    Ended,
}

/// A token that a hold has: use it up or put it back. Dropping it does neither; what nobody ends is
/// ended by a [`Reconciler`].
#[derive(Clone)]
pub struct HeldToken {
    held: Held,
    number: u64,
}

impl Tokens {
    /// Mints the tokens 0 to `count` − 1 into `lists` lists, spread over the shards where the store
    /// knows them. False when they are there already, however many.
    ///
    /// # Cost
    /// Store operations: 4, and one per list and 512 tokens.
    ///
    /// # Cancel safety
    /// A dropped call leaves lists that are being filled; whoever needs them next finishes that.
    ///
    /// # Errors
    /// As [`Stock::create`].
    pub async fn mint(&self, count: u64, lists: usize) -> Result<bool> {
        self.0.create(count, lists).await
    }

    /// Mints `count` more; their numbers follow the last one.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`Stock::restock`].
    pub async fn mint_more(&self, count: u64) -> Result<()> {
        self.0.restock(count).await
    }

    /// Hands out a token to `hold`, an id of the caller's, such as that of an order.
    ///
    /// The same hold asked again in this process hears the same token. Another process that is given
    /// a hold which may have been asked for before should [`find`](Tokens::find) it first.
    ///
    /// # Cost
    /// Store operations: 1 while most lists have tokens; one more for each list that turns out to be
    /// empty, and once all are, the record twice and one count per list, shared by all who wait.
    ///
    /// # Cancel safety
    /// A dropped call may have taken one. The same hold asked again finds out.
    ///
    /// # Errors
    /// As [`Stock::take`].
    pub async fn pop(&self, hold: impl AsRef<[u8]>) -> Result<Popping> {
        let (taken, token) = self.0.taken(1, hold.as_ref()).await?;
        match (taken, token) {
            (Taken::Held(held), Some(token)) => {
                Ok(Popping::Token(HeldToken { number: self.number(&token)?, held }))
            }
            // Barred after it was used: it is found by its hold.
            (Taken::Held(_), None) => match self.find(hold).await? {
                Some(token) => Ok(Popping::Token(token)),
                None => Ok(Popping::Ended),
            },
            (Taken::SoldOut | Taken::Short { .. }, _) => Ok(Popping::NoneLeft),
            (Taken::Ended, _) => Ok(Popping::Ended),
        }
    }

    fn number(&self, token: &[u8]) -> Result<u64> {
        let number = std::str::from_utf8(token).ok().and_then(|text| text.parse().ok());
        let text = "what was in the list is no token";
        number.ok_or_else(|| {
            Error::not_applied(ErrorKind::WrongType, text).with_key(&self.0.core.key)
        })
    }

    /// The token of a hold, if it has one that was not put back.
    ///
    /// # Cost
    /// Store operations: up to one per list and 512 holds.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    ///
    /// # Errors
    /// Those of the store: a list that cannot be asked may have it.
    pub async fn find(&self, hold: impl AsRef<[u8]>) -> Result<Option<HeldToken>> {
        let id = hold_id(hold.as_ref());
        for (list, name) in self.0.names().await?.iter().enumerate() {
            let holds = self.0.holds_of(name).await?;
            let found = holds.get(&id).filter(|hold| hold.ended != Some(End::Back));
            if let Some(token) = found.and_then(|hold| hold.token.as_ref()) {
                self.0.core.recent.lock().set(&id, list);
                let number = self.number(token)?;
                return Ok(Some(HeldToken { held: self.0.held(id, list), number }));
            }
        }
        Ok(None)
    }

    /// Tokens that can be had, at most a second old.
    ///
    /// # Staleness, Cost, Cancel safety, Errors
    /// As [`Stock::remaining`].
    pub async fn remaining(&self) -> Result<Sum> {
        self.0.remaining().await
    }

    /// Like [`remaining`](Tokens::remaining), at most `max_age` old; zero asks after the call.
    ///
    /// # Cancel safety, Errors
    /// As [`remaining`](Tokens::remaining).
    pub async fn remaining_with(&self, max_age: Duration) -> Result<Sum> {
        self.0.remaining_with(max_age).await
    }

    /// Where the tokens are. None is ever in transit.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`Stock::accounts`].
    pub async fn accounts(&self) -> Result<Accounts> {
        self.0.accounts().await
    }

    /// A job that ends the holds that nobody ended.
    #[must_use]
    pub fn reconciler(&self) -> Reconciler {
        self.0.reconciler()
    }

    /// For tests: gets it wrong in one way.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn break_by(&self, mutant: crate::engine::control::stock::Mutant) {
        self.0.break_by(mutant);
    }
}

impl HeldToken {
    /// The token's number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The hold's id.
    #[must_use]
    pub fn hold(&self) -> &[u8] {
        self.held.hold()
    }

    /// Uses the token up: it never comes back.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`Held::confirm`].
    pub async fn confirm(&self) -> Result<()> {
        self.held.confirm().await
    }

    /// Puts the token back, once, at the end of its list.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`Held::put_back`].
    pub async fn put_back(&self) -> Result<()> {
        self.held.put_back().await
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("key", &self.0.core.key).finish()
    }
}

impl fmt::Debug for HeldToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldToken").field("number", &self.number).field("held", &self.held).finish()
    }
}
