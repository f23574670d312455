//! One snapshot: which bytes the base held while the cell had which number.
//!
//! - **What**: the reads of cell and base that make an exact label, and what they add up to.
//! - **Invariant**: the cell had the label's number at the instant when the base held the bytes.
//! - **Time and units**: ticks; an image counts its age from when the base read was sent.
//! - **Bounds**: one image; [`Plan::rounds_max`] attempts.
//! - **Source**: `research/copies.md`, step S and hole H3.

use super::super::super::time::Tick;
use super::{Form, Image, Mutant, Plan};
use bytes::Bytes;

/// What is to be read next.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Look {
    /// The cell.
    Cell,
    /// The base.
    Base,
    /// Base and cell at one instant.
    Both,
}

/// What was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// The cell's number; zero when there is none.
    Cell(u64),
    /// The base.
    Base(Option<Bytes>),
    /// The cell's number, the base.
    Both(u64, Option<Bytes>),
    /// An error or a redirect.
    Failed,
}

/// What a read has brought.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Progress {
    /// More is to be read.
    More,
    /// The snapshot.
    Image(Image),
    /// The cell has moved and the snapshot was not to wait for it (a mutant's).
    Moved,
    /// It does not stand still; given up.
    GaveUp,
}

/// A snapshot under way.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Snapshot {
    cell: Option<u64>,
    base: Option<Option<Bytes>>,
    taken: Tick,
    rounds: u32,
}

impl Snapshot {
    /// Nothing has been read.
    #[must_use]
    pub fn new() -> Snapshot {
        Snapshot { cell: None, base: None, taken: Tick::ZERO, rounds: 0 }
    }

    /// The cell was at `cell` after all that counts: a bump's answer is the first look at it.
    #[must_use]
    pub fn from_cell(cell: u64) -> Snapshot {
        Snapshot { cell: Some(cell), ..Snapshot::new() }
    }

    /// What is to be read next; sent at `now`.
    pub fn poll(&mut self, plan: &Plan, now: Tick) -> Look {
        match plan.form {
            Form::Joint | Form::Pair => {
                self.taken = now;
                Look::Both
            }
            Form::DeleteTwice | Form::TtlOnly => {
                self.taken = now;
                Look::Base
            }
            Form::Sandwich if self.cell.is_none() || self.base.is_some() => Look::Cell,
            Form::Sandwich => {
                self.taken = now;
                Look::Base
            }
        }
    }

    /// Takes an answer.
    pub fn handle(&mut self, plan: &Plan, seen: Seen) -> Progress {
        match seen {
            Seen::Failed => self.again(plan, None),
            Seen::Both(cell, base) => Progress::Image(Image::new(cell, base, self.taken)),
            Seen::Base(base) if !plan.form.versioned() => {
                Progress::Image(Image::new(0, base, self.taken))
            }
            Seen::Base(base) if plan.broken(Mutant::LooseLabel) => {
                Progress::Image(Image::new(self.cell.unwrap_or(0), base, self.taken))
            }
            Seen::Base(base) => {
                self.base = Some(base);
                Progress::More
            }
            Seen::Cell(cell) => match (self.cell, self.base.take()) {
                (Some(first), Some(base)) if first == cell => {
                    Progress::Image(Image::new(cell, base, self.taken))
                }
                (Some(_), Some(_)) if plan.broken(Mutant::Skip) => Progress::Moved,
                (Some(_), Some(_)) => self.again(plan, Some(cell)),
                _ => {
                    self.cell = Some(cell);
                    Progress::More
                }
            },
        }
    }

    fn again(&mut self, plan: &Plan, cell: Option<u64>) -> Progress {
        self.rounds += 1;
        (self.cell, self.base) = (cell, None);
        if self.rounds >= plan.rounds_max { Progress::GaveUp } else { Progress::More }
    }
}

impl Default for Snapshot {
    fn default() -> Snapshot {
        Snapshot::new()
    }
}
