//! The life of a set of copies: announced, opened, grown, narrowed, closed.
//!
//! - **What**: the next change of a key's set towards the number of copies wanted, and when it may
//!   be made.
//! - **Invariant**: whoever may read a copy, every writer with a valid lease writes it: writers
//!   learn first, readers leave first, and between the two a lease passes.
//! - **Time and units**: ticks; the wait is `L(1 + 2ρ)` from the acknowledgement of the change
//!   before, L the length of a lease and ρ the greatest drift of a clock.
//! - **Bounds**: [`COPIES_MAX`].
//! - **Source**: `research/copies.md`, rules L1 to L5: the mirror of reader-first salting.
//!
//! Every step is one compare-and-set of the record or harmless when repeated, so any process may
//! take any step, and a crash anywhere leaves a set that another can carry on. A set with fewer
//! readers than writers needs no direction and no owner: after the wait it may be opened or closed.

use super::super::super::time::Tick;
use super::{COPIES_MAX, Mutant, Plan, Set};
use std::time::Duration;

/// What is to be done about a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// It is as wanted.
    Rest,
    /// Replace the set in the record; `None` removes it.
    Change(Option<Set>),
    /// Nothing before this.
    WaitUntil(Tick),
    /// Repair all copies ([`Write::repair`](super::write::Write::repair)), then ask again.
    Warm(Set),
}

/// How long a change must be known before the next relies on it.
#[must_use]
pub fn wait(lease: Duration, drift_permille: u32) -> Duration {
    lease.saturating_add(lease * (2 * drift_permille) / 1_000)
}

/// What a process knows when it asks for the next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct At {
    /// The set in the record.
    pub set: Option<Set>,
    /// When the record was acknowledged in this form, or first seen in it.
    pub since: Tick,
    /// This process has repaired all copies of this set since the wait was over.
    pub warmed: bool,
    /// Now.
    pub now: Tick,
    /// See [`wait`].
    pub wait: Duration,
    /// A number that has never been a generation of this key: 64 random bits.
    pub nonce: u64,
}

/// The next step towards `want` copies.
#[must_use]
pub fn next(plan: &Plan, at: &At, want: u16) -> Step {
    let want = want.min(COPIES_MAX);
    let over = at.since.after(at.wait);
    let Some(set) = at.set else {
        let readers = if plan.broken(Mutant::OneStep) { want } else { 0 };
        let set = Set { generation: at.nonce, writers: want, readers };
        return if want == 0 { Step::Rest } else { Step::Change(Some(set)) };
    };
    let to = |writers, readers| {
        let set = Set { writers, readers, ..set };
        Step::Change(Some(set).filter(|set| set.writers > 0))
    };
    if set.readers < set.writers {
        let opening = want > set.readers;
        let wait_for = if opening { Mutant::NoWriterWait } else { Mutant::NoReaderWait };
        let early = opening && plan.broken(Mutant::WarmBeforeWait);
        if early && !at.warmed {
            return Step::Warm(set);
        }
        if at.now < over && !plan.broken(wait_for) {
            return Step::WaitUntil(over);
        }
        let unwarmed =
            [Mutant::NoWarm, Mutant::NoRejoin, Mutant::SameNames, Mutant::SameNamesNoCell]
                .into_iter()
                .any(|mutant| plan.broken(mutant));
        return match (opening, at.warmed || unwarmed) {
            (false, _) => to(set.readers, set.readers),
            (true, false) => Step::Warm(set),
            (true, true) => to(set.writers, set.writers),
        };
    }
    if set.readers > set.writers {
        // Only where writers have left first, which is the mutant.
        return to(set.writers, set.writers);
    }
    match want.cmp(&set.writers) {
        std::cmp::Ordering::Equal => Step::Rest,
        std::cmp::Ordering::Greater => to(want, set.readers),
        std::cmp::Ordering::Less if plan.broken(Mutant::WritersLeaveFirst) => {
            Step::Change(Some(Set { writers: want, ..set }))
        }
        std::cmp::Ordering::Less => to(set.writers, want),
    }
}
