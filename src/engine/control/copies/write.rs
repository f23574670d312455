//! One write of a key that may have copies: a put, a delete, or a helper's repair.
//!
//! - **What**: which store operations it consists of, one after the other, and how far it got.
//! - **Invariant**: [`Reach::All`] is said only when the base operation was acknowledged, a lease
//!   was valid after that, and every copy of that lease's set holds an exactly labelled value
//!   that is not older.
//! - **Time and units**: ticks.
//! - **Bounds**: one image, a flag per copy, [`Plan::rounds_max`] attempts.
//! - **Source**: `research/copies.md`, rules W1 to W8 and section 10.

use super::super::super::time::Tick;
use super::snapshot::{Look, Progress, Seen, Snapshot};
use super::{Answer, Form, Image, Label, Mutant, Plan, Reach, Set};
use bytes::Bytes;
use std::collections::BTreeSet;

/// What is to be done next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send the base operation.
    Base,
    /// Send the base operation and a bump of this generation's cell, in one step.
    BaseAndBump(u64),
    /// Say which set the record names, under a lease that is valid now.
    Lease,
    /// Add to this generation's cell.
    Bump(u64, u64),
    /// Read, of this generation's cell and of the base.
    Look(u64, Look),
    /// Put [`Write::image`] on the copies [`Write::todo`] of this generation, where it is newer.
    Spread(u64),
    /// Delete the copies [`Write::todo`] of this generation.
    Erase(u64),
    /// Nothing before this. The caller has its answer already.
    WaitUntil(Tick),
    /// It is over.
    Done,
}

/// What a lease says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// The record names this set, or none.
    Leased(Option<Set>),
    /// The registry cannot be reached; this was the last set known.
    Unreachable(Option<Set>),
}

/// What a copy did with a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// It holds it.
    This,
    /// It holds one that is not older.
    Refused(Label),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Kind {
    Write,
    Repair,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    Base,
    Lease,
    Bump(u64),
    Snapshot,
    Spread,
    /// Only for [`Mutant::RefusedAgainstCell`].
    Check,
    Erase,
    Wait(Tick),
    Done,
}

/// See the module's description.
#[derive(Clone, Debug)]
pub struct Write {
    kind: Kind,
    /// The value, for the form that labels it at once; a delete's is `None`.
    value: Option<Bytes>,
    sent_under: Option<Set>,
    set: Option<Set>,
    at: At,
    snapshot: Snapshot,
    image: Option<Image>,
    todo: BTreeSet<u16>,
    /// A version that refused this write: the cell must get beyond it.
    above: u64,
    bumped: bool,
    applied: bool,
    unknown_at: Option<Tick>,
    second: bool,
    bounded: bool,
    rounds: u32,
}

impl Write {
    /// A put of `value`, or a delete. `under` is the set of a lease that is valid now.
    #[must_use]
    pub fn new(value: Option<Bytes>, under: Option<Set>) -> Write {
        Write {
            kind: Kind::Write,
            value,
            sent_under: under,
            set: None,
            at: At::Base,
            snapshot: Snapshot::new(),
            image: None,
            todo: BTreeSet::new(),
            above: 0,
            bumped: false,
            applied: false,
            unknown_at: None,
            second: false,
            bounded: false,
            rounds: 0,
        }
    }

    /// A repair: makes all copies of `set` hold what the base holds. For a helper who has found
    /// two values under one version, and for warming copies before they are read.
    #[must_use]
    pub fn repair(set: Set) -> Write {
        let mut write = Write::new(None, Some(set));
        (write.kind, write.applied) = (Kind::Repair, true);
        (write.set, write.at) = (Some(set), At::Bump(1));
        write
    }

    /// What the copies get.
    #[must_use]
    pub fn image(&self) -> Option<&Image> {
        self.image.as_ref()
    }

    /// The copies that have not acknowledged yet.
    pub fn todo(&self) -> impl Iterator<Item = u16> + '_ {
        self.todo.iter().copied()
    }

    /// What the caller is told: how far it got, or that nobody knows whether it was applied.
    #[must_use]
    pub fn outcome(&self) -> Answer<Reach> {
        if !self.applied {
            return match self.unknown_at {
                Some(_) => Answer::Unknown,
                None => Answer::NotApplied,
            };
        }
        let far = self.at == At::Done && !self.bounded;
        Answer::Applied(if far { Reach::All } else { Reach::Ttl })
    }

    /// The generation and label to raise the process's own floor to, once it is over (W7).
    #[must_use]
    pub fn label(&self) -> Option<(u64, Label)> {
        self.set.zip(self.image.as_ref()).map(|(set, image)| (set.generation, image.label))
    }

    /// The caller waits no longer.
    pub fn give_up(&mut self, plan: &Plan, now: Tick) {
        if !matches!(self.at, At::Base | At::Wait(_) | At::Done) {
            self.bounded = true;
            self.finish_pass(plan, now);
        }
    }

    /// What is to be done next.
    pub fn poll(&mut self, plan: &Plan, now: Tick) -> Step {
        if let At::Wait(until) = self.at
            && now >= until
        {
            (self.at, self.second) = (At::Lease, true);
        }
        if self.at == At::Spread && !self.image.as_ref().is_some_and(|i| i.young(plan, now)) {
            self.look_again(plan, now);
        }
        let generation = self.set.map_or(0, |set| set.generation);
        match self.at {
            At::Base => match self.sent_under {
                Some(set) if plan.broken(Mutant::BumpFirst) && !self.bumped => {
                    Step::Bump(set.generation, 1)
                }
                Some(set) if plan.form == Form::Pair && set.writers > 0 => {
                    Step::BaseAndBump(set.generation)
                }
                _ => Step::Base,
            },
            At::Lease => Step::Lease,
            At::Bump(by) => Step::Bump(generation, by),
            At::Snapshot => Step::Look(generation, self.snapshot.poll(plan, now)),
            At::Spread => Step::Spread(generation),
            At::Check => Step::Look(generation, Look::Cell),
            At::Erase => Step::Erase(generation),
            At::Wait(until) => Step::WaitUntil(until),
            At::Done => Step::Done,
        }
    }

    /// The base operation has an answer; with [`Step::BaseAndBump`], the cell's new number.
    pub fn handle_base(&mut self, plan: &Plan, now: Tick, answer: Answer<Option<u64>>) {
        match answer {
            Answer::NotApplied => {
                self.at = At::Done;
                return;
            }
            Answer::Unknown => self.unknown_at = Some(now),
            Answer::Applied(cell) => {
                self.applied = true;
                let value = self.value.clone();
                self.image = cell.map(|cell| Image::new(cell, value, now));
            }
        }
        self.at = At::Lease;
        if plan.broken(Mutant::LeaseBeforeAck) || plan.broken(Mutant::BumpFirst) {
            self.choose(plan, now, self.sent_under);
        }
    }

    /// The record, for [`Step::Lease`]: asked for after the acknowledgement, since a set may have
    /// been opened while the put was under way (H11).
    pub fn handle_lease(&mut self, plan: &Plan, now: Tick, known: Known) {
        let set = match known {
            Known::Leased(set) => set,
            Known::Unreachable(set) => {
                self.bounded = true;
                set
            }
        };
        self.choose(plan, now, set);
    }

    /// The copies to write are known now.
    fn choose(&mut self, plan: &Plan, now: Tick, set: Option<Set>) {
        let exact = self.image.take().filter(|_| set == self.sent_under && !self.second);
        self.set = set.filter(|set| set.writers > 0);
        let Some(set) = self.set else { return self.finish_pass(plan, now) };
        if plan.form == Form::TtlOnly {
            self.bounded = true;
            return self.finish_pass(plan, now);
        }
        self.todo = (0..set.writers).collect();
        if plan.form == Form::DeleteTwice {
            self.at = At::Erase;
            if plan.broken(Mutant::ReducedWrites) {
                (self.image, self.at) = (Some(Image::new(0, self.value.clone(), now)), At::Spread);
            }
        } else if exact.is_some() {
            (self.image, self.at) = (exact, At::Spread);
        } else if plan.broken(Mutant::BumpFirst) {
            self.at = At::Snapshot;
        } else {
            self.at = At::Bump(1);
        }
    }

    /// The bump has an answer: the cell's number. More bumps than needed do no harm.
    pub fn handle_bump(&mut self, plan: &Plan, now: Tick, answer: Answer<u64>) {
        let Answer::Applied(cell) = answer else { return self.count_round(plan, now) };
        self.snapshot = Snapshot::from_cell(cell);
        if self.at == At::Base {
            self.bumped = true;
        } else if plan.broken(Mutant::NoReread) && self.kind == Kind::Write {
            self.image = Some(Image::new(cell, self.value.clone(), now));
            self.at = At::Spread;
        } else {
            self.at = At::Snapshot;
        }
    }

    /// What was read for [`Step::Look`].
    pub fn handle_look(&mut self, plan: &Plan, now: Tick, seen: Seen) {
        if self.at == At::Check {
            let Seen::Cell(cell) = seen else { return };
            if cell < self.above {
                self.at = At::Bump(self.above - cell + 1);
                self.todo = self.all();
            } else {
                self.finish_pass(plan, now);
            }
            self.above = 0;
            return;
        }
        match self.snapshot.handle(plan, seen) {
            Progress::More => {}
            Progress::Moved => self.finish_pass(plan, now),
            Progress::GaveUp => self.give_up(plan, now),
            Progress::Image(image) if image.label.version < self.above => {
                // The cell is behind what it once gave out: its shard has lost operations.
                self.at = At::Bump(self.above - image.label.version + 1);
                self.count_round(plan, now);
            }
            Progress::Image(image) => {
                (self.image, self.at, self.above) = (Some(image), At::Spread, 0);
                self.todo = self.all();
            }
        }
    }

    /// What came of copy `i`, for [`Step::Spread`] and [`Step::Erase`] (where `Kept::This` means
    /// that it is gone). After the first answer that changes the step the others are for nobody.
    pub fn handle_copy(&mut self, plan: &Plan, now: Tick, i: u16, answer: Answer<Kept>) {
        let label = self.image.as_ref().map_or_else(Label::default, |i| i.label);
        if !matches!(self.at, At::Spread | At::Erase) {
            return;
        }
        let forgiving = plan.broken(Mutant::RefusedIsDone) || plan.broken(Mutant::BumpFirst);
        match answer {
            Answer::Applied(Kept::This) => {}
            Answer::Applied(Kept::Refused(other)) if other == label || forgiving => {}
            Answer::Applied(Kept::Refused(other)) if other.version == label.version => {
                self.at = At::Bump(1);
                return self.count_round(plan, now);
            }
            Answer::Applied(Kept::Refused(other)) if other.version > label.version => {
                self.above = self.above.max(other.version);
                if !plan.broken(Mutant::RefusedAgainstCell) {
                    return self.look_again(plan, now);
                }
            }
            Answer::Unknown if plan.broken(Mutant::UnackedCounts) => {}
            // An older one refuses nothing; it came after this call had been decided.
            Answer::Applied(Kept::Refused(_)) | Answer::NotApplied | Answer::Unknown => {
                return self.count_round(plan, now);
            }
        }
        self.todo.remove(&i);
        if self.todo.is_empty() {
            if plan.broken(Mutant::RefusedAgainstCell) && self.above > 0 {
                self.at = At::Check;
            } else {
                self.finish_pass(plan, now);
            }
        }
    }

    fn all(&self) -> BTreeSet<u16> {
        (0..self.set.map_or(0, |set| set.writers)).collect()
    }

    /// Something newer stands on a copy, or the snapshot has grown old (W5, W6).
    fn look_again(&mut self, plan: &Plan, now: Tick) {
        self.snapshot = Snapshot::new();
        self.at = At::Snapshot;
        self.count_round(plan, now);
    }

    fn count_round(&mut self, plan: &Plan, now: Tick) {
        self.rounds += 1;
        if self.rounds >= plan.rounds_max {
            self.give_up(plan, now);
        }
    }

    /// All copies of this pass have what they need, or will not get it.
    fn finish_pass(&mut self, plan: &Plan, now: Tick) {
        self.rounds = 0;
        let settle = self.unknown_at.filter(|_| !self.second && !plan.broken(Mutant::NoSettle));
        let twice = plan.form == Form::DeleteTwice && !plan.broken(Mutant::OneDelete);
        self.at = match settle {
            Some(at) if twice => At::Wait(at.max(now).after(plan.in_flight * 2).after(plan.fill)),
            Some(at) => At::Wait(at.after(plan.in_flight)),
            None if twice && !self.second && self.set.is_some() => {
                At::Wait(now.after(plan.in_flight).after(plan.fill))
            }
            None => At::Done,
        };
    }
}
