//! One read of a key that has copies, and the floor that its process's reads are held against.
//!
//! - **What**: a random copy, accepted or not; else a snapshot of the base; and which copy is to
//!   be filled or repaired afterwards.
//! - **Invariant**: within a generation the floor never falls, except to what the base itself
//!   says; no value below it is returned.
//! - **Time and units**: ticks.
//! - **Bounds**: constant space; [`Plan::rounds_max`] snapshots.
//! - **Source**: `research/copies.md`, rules R1 to R6 and section 10.

use super::super::super::time::Tick;
use super::snapshot::{Look, Progress, Seen, Snapshot};
use super::{Image, Label, Mutant, Plan, Set};
use bytes::Bytes;

/// The newest value that any read of this process has returned, of one key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Floor {
    generation: u64,
    label: Label,
    /// Something has been returned in this generation.
    set: bool,
    /// Raised by every change, so that a base read knows whether another one has moved it.
    moves: u64,
    readers: u16,
    joined: bool,
    /// A snapshot sent from here on joins.
    join_from: Tick,
    /// How often the base was behind what it once said.
    regressed: u64,
}

impl Floor {
    /// Nothing is known.
    #[must_use]
    pub fn new() -> Floor {
        Floor::default()
    }

    /// A record has been loaded. Reads sent plainly before that have ended by `plain_until`, so a
    /// snapshot sent from then on is newer than all of them (R6).
    pub fn learn(&mut self, plan: &Plan, set: Option<Set>, plain_until: Tick) {
        let Some(set) = set.filter(|set| set.readers > 0) else {
            (self.joined, self.readers) = (false, 0);
            return;
        };
        let other = set.generation != self.generation;
        if other && !plan.broken(Mutant::FloorOfAnother) {
            (self.label, self.set) = (Label::default(), false);
            self.moves += 1;
        }
        let no_rejoin = plan.broken(Mutant::NoRejoin) || plan.broken(Mutant::WarmBeforeWait);
        let grown = set.readers > self.readers && !(no_rejoin && self.readers > 0 && !other);
        if other || grown {
            (self.joined, self.join_from) = (false, plain_until);
        }
        (self.generation, self.readers) = (set.generation, set.readers);
        self.joined |= plan.broken(Mutant::JoinOff);
    }

    /// The lease has lapsed: what is read until the next record is read plainly.
    pub fn lapse(&mut self) {
        (self.joined, self.readers) = (false, 0);
    }

    /// Copies may be read.
    #[must_use]
    pub fn joined(&self) -> bool {
        self.joined
    }

    /// How often the base was found behind what it once said: its shard had lost operations.
    #[must_use]
    pub fn regressed(&self) -> u64 {
        self.regressed
    }

    /// The label that copies are held against, and its generation.
    #[must_use]
    pub fn label(&self) -> (u64, Label) {
        (self.generation, self.label)
    }

    /// R2: whether what copy of `generation` holds may be returned; the floor rises to it.
    pub fn take_copy(&mut self, plan: &Plan, generation: u64, label: Label, start: Mark) -> bool {
        if plan.broken(Mutant::NoFloor) {
            return true;
        }
        let floor = if plan.broken(Mutant::FloorAtStart) { start.label } else { self.label };
        let same = generation == self.generation;
        if !same && !plan.broken(Mutant::FloorOfAnother) {
            return false;
        }
        let by_version = plan.broken(Mutant::NoDigest);
        let equal = label.version == floor.version && (by_version || label.digest == floor.digest);
        let newer = plan.form.versioned() && label.version > floor.version;
        let accepted = newer || (equal && self.set);
        if accepted && label.version > self.label.version {
            self.raise_to(label);
        }
        accepted
    }

    /// R3: whether what the base holds may be returned; the floor becomes it.
    ///
    /// A read whose generation is over is returned as it is: the base was read after the read
    /// began. A mark that is not the floor's any more means that another read has moved it.
    pub fn take_base(&mut self, plan: &Plan, generation: u64, label: Label, mark: Mark) -> bool {
        if generation != self.generation || self.readers == 0 {
            return true;
        }
        if plan.broken(Mutant::BaseResultLost) && mark.readers != self.readers {
            return true;
        }
        let versioned = plan.form.versioned();
        let equal = self.set && label == self.label;
        let newer = versioned && label.version > self.label.version;
        let unmoved = mark.moves == self.moves || plan.broken(Mutant::BaseUnchecked);
        if !(newer || equal || unmoved) {
            return false;
        }
        let behind = versioned && self.set && label.version < self.label.version;
        self.regressed += u64::from(behind && mark.moves == self.moves);
        self.raise_to(label);
        let fresh = mark.sent >= self.join_from || plan.broken(Mutant::JoinStale);
        self.joined |= fresh || plan.broken(Mutant::JoinOverlapping);
        true
    }

    /// W7: a write of this process has spread `label`.
    pub fn raise(&mut self, generation: u64, label: Label) {
        if generation == self.generation && label.version > self.label.version {
            self.raise_to(label);
        }
    }

    /// A write of this process, in a form without versions: the next read asks the base.
    pub fn forget(&mut self) {
        (self.label, self.set) = (Label::default(), false);
        self.moves += 1;
    }

    fn raise_to(&mut self, label: Label) {
        self.moves += u64::from(!self.set || self.label != label);
        (self.label, self.set) = (label, true);
    }

    /// Where a read begins.
    #[must_use]
    pub fn mark(&self, now: Tick) -> Mark {
        Mark { moves: self.moves, sent: now, label: self.label, readers: self.readers }
    }
}

/// The floor as it was when a read was sent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mark {
    moves: u64,
    sent: Tick,
    label: Label,
    readers: u16,
}

/// What is to be done next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Read this copy of this generation.
    Copy(u64, u16),
    /// Read, of this generation's cell and of the base.
    Look(u64, Look),
    /// Read the base as if there were no copies.
    Plain,
    /// It is over: the bytes, or none.
    Done(Option<Bytes>),
    /// The base does not stand still, or cannot be read.
    Failed,
}

/// What was found in the place of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Copy {
    /// A copy.
    Image(Image),
    /// Nothing, or no copy of ours.
    Missing,
    /// It could not be read.
    Failed,
}

/// One read.
#[derive(Clone, Debug)]
pub struct Get {
    set: Option<Set>,
    at: At,
    mark: Mark,
    snapshot: Snapshot,
    asked: Option<u16>,
    found: Option<Label>,
    missing: bool,
    rounds: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum At {
    Copy(u16),
    Snapshot,
    Plain,
    Done(Image),
    Failed,
}

impl Get {
    /// A read that begins at `now`; `set` is that of a lease that is valid now, `dice` any random
    /// bits.
    #[must_use]
    pub fn new(floor: &Floor, set: Option<Set>, now: Tick, dice: u64) -> Get {
        let set = set.filter(|set| set.readers > 0);
        let at = match set {
            None => At::Plain,
            Some(set) if floor.joined => {
                let i = (u128::from(dice) * u128::from(set.readers)) >> 64;
                At::Copy(u16::try_from(i).unwrap_or(0))
            }
            Some(_) => At::Snapshot,
        };
        let mark = floor.mark(now);
        let asked = if let At::Copy(i) = at { Some(i) } else { None };
        let snapshot = Snapshot::new();
        Get { set, at, mark, snapshot, asked, found: None, missing: false, rounds: 0 }
    }

    fn generation(&self) -> u64 {
        self.set.map_or(0, |set| set.generation)
    }

    /// What is to be done next.
    pub fn poll(&mut self, plan: &Plan, now: Tick) -> Step {
        match &self.at {
            At::Copy(i) => Step::Copy(self.generation(), *i),
            At::Snapshot => Step::Look(self.generation(), self.snapshot.poll(plan, now)),
            At::Plain => Step::Plain,
            At::Done(image) => Step::Done(image.bytes.clone()),
            At::Failed => Step::Failed,
        }
    }

    /// What was found in the place of the copy. `set` is that of a lease that is valid now: the
    /// base is read by its cell if the copy will not do.
    pub fn handle_copy(
        &mut self,
        plan: &Plan,
        floor: &mut Floor,
        (now, set): (Tick, Option<Set>),
        copy: Copy,
    ) {
        match copy {
            Copy::Image(image) => {
                self.found = Some(image.label);
                if floor.take_copy(plan, self.generation(), image.label, self.mark) {
                    self.at = At::Done(image);
                    return;
                }
            }
            Copy::Missing => self.missing = true,
            Copy::Failed => {}
        }
        self.look(floor, now, set);
    }

    /// What was read for [`Step::Look`]; `set` as in [`Get::handle_copy`].
    pub fn handle_look(
        &mut self,
        plan: &Plan,
        floor: &mut Floor,
        (now, set): (Tick, Option<Set>),
        seen: Seen,
    ) {
        match self.snapshot.handle(plan, seen) {
            Progress::More => {}
            Progress::Moved | Progress::GaveUp => self.at = At::Failed,
            Progress::Image(image) => {
                if floor.take_base(plan, self.generation(), image.label, self.mark) {
                    self.at = At::Done(image);
                    return;
                }
                self.rounds += 1;
                if self.rounds >= plan.rounds_max {
                    self.at = At::Failed;
                    return;
                }
                self.look(floor, now, set);
            }
        }
    }

    fn look(&mut self, floor: &Floor, now: Tick, set: Option<Set>) {
        let set = set.filter(|set| set.readers > 0);
        // A copy found in another generation says nothing of this one's.
        if set.map(|s| s.generation) != self.set.map(|s| s.generation) {
            (self.asked, self.found, self.missing) = (None, None, false);
        }
        self.set = set;
        self.at = if set.is_some() { At::Snapshot } else { At::Plain };
        (self.snapshot, self.mark) = (Snapshot::new(), floor.mark(now));
    }

    /// R4: the copy that is to be written from the snapshot that was returned, if any: one that
    /// was missing, or older. The snapshot's age is looked at again when it is sent. A snapshot
    /// without a cell fills nothing: the generation has lost its order.
    #[must_use]
    pub fn fill(&self, plan: &Plan) -> Option<(u64, u16, &Image)> {
        let (At::Done(image), Some(set), Some(i)) = (&self.at, self.set, self.asked) else {
            return None;
        };
        let sound = !plan.form.versioned() || image.label.version > 0;
        let older = self.found.is_some_and(|found| {
            found.version < image.label.version
                || (!plan.form.versioned() && found.digest != image.label.digest)
        });
        (sound && i < set.readers && (self.missing || older)).then_some((set.generation, i, image))
    }

    /// R5: the set whose copies a helper must repair: one of them held other bytes under the
    /// version of the snapshot. A writer crashed between its put and its bump, or somebody wrote
    /// behind heatsink's back.
    #[must_use]
    pub fn wants_help(&self, plan: &Plan) -> Option<Set> {
        let (At::Done(image), Some(found)) = (&self.at, self.found) else { return None };
        let tie = found.version == image.label.version && found.digest != image.label.digest;
        self.set.filter(|_| plan.form.versioned() && tie && !plan.broken(Mutant::NoHelper))
    }
}
