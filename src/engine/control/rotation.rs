//! What is to be done next about one salted counter, and when.
//!
//! - **What**: a process looks at the record of a key, at what it wants of the key, and at how long
//!   each thing has been published; out comes one step, or the time to look again.
//! - **Invariant**: no step is taken before the wait that makes it safe has passed since this
//!   process first saw its reason published. A process that comes new to a record waits in full.
//! - **Time and units**: [`Tick`] at each call.
//! - **Bounds**: a few words for each generation of one record.
//! - **Source**: the rotation protocol of [`super::salt`].
//!
//! Every step is one compare-and-set, or may be repeated. So any process may take it, several may
//! at once, and one that stops in between leaves nothing that another cannot go on with.

use super::super::time::Tick;
use super::salt::{Fold, Gen, Kind, Salt};
use std::collections::BTreeMap;
use std::time::Duration;

/// The waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waits {
    /// From the announcement to the first write.
    pub readers: Duration,
    /// From the last write to the sum, where the slots cannot be sealed.
    pub writers: Duration,
    /// From the sum to the end of the slots.
    pub grave: Duration,
    /// Between two looks at slots that are retired and not sealed.
    pub sweep: Duration,
    /// The slots can be sealed.
    pub seal: bool,
    /// From each step of a fold to the next; `None` where the store cannot fold. Until then the
    /// registry may lose a change, and the store what it has just added.
    pub fold: Option<Duration>,
}

/// What this process wants of a key. What the traffic asks for is met by more slots too, so that
/// processes which see different rates do not undo each other's choice.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Want {
    /// Whatever it is.
    #[default]
    Nothing,
    /// At least so many slots soon: they are announced, so that the switch can come at once.
    Ready(u16),
    /// At least so many slots.
    Slots(u16),
    /// The same without any wait, where the slots in use can be sealed.
    AtOnce(u16),
    /// Exactly so many.
    Pinned {
        /// How many.
        k: u16,
        /// Without any wait, where the slots in use can be sealed.
        at_once: bool,
    },
    /// One place again.
    Home,
}

impl Want {
    /// The slots asked for, if any are.
    #[must_use]
    pub fn slots(&self) -> Option<u16> {
        match self {
            Want::Nothing | Want::Home => None,
            Want::Ready(k) | Want::Slots(k) | Want::AtOnce(k) | Want::Pinned { k, .. } => Some(*k),
        }
    }

    /// The same, of no more slots than this.
    #[must_use]
    pub fn at_most(self, max: u16) -> Want {
        match self {
            Want::Ready(k) => Want::Ready(k.min(max)),
            Want::Slots(k) => Want::Slots(k.min(max)),
            Want::AtOnce(k) => Want::AtOnce(k.min(max)),
            Want::Pinned { k, at_once } => Want::Pinned { k: k.min(max), at_once },
            Want::Nothing | Want::Home => self,
        }
    }

    /// The same with every wait.
    #[must_use]
    pub fn in_time(self) -> Want {
        match self {
            Want::AtOnce(k) => Want::Slots(k),
            Want::Pinned { k, .. } => Want::Pinned { k, at_once: false },
            Want::Nothing | Want::Ready(_) | Want::Slots(_) | Want::Home => self,
        }
    }

    /// Whether `cur` is what is wanted.
    fn is_met(&self, cur: Gen) -> bool {
        let slots = cur.kind != Kind::Home;
        match self {
            Want::Nothing => true,
            Want::Ready(k) | Want::Slots(k) | Want::AtOnce(k) => slots && cur.k >= *k,
            Want::Pinned { k, .. } => slots && cur.k == *k,
            Want::Home => !slots,
        }
    }

    /// Whether it is wanted now, and not only soon.
    fn is_now(&self) -> bool {
        matches!(self, Want::Slots(_) | Want::AtOnce(_) | Want::Pinned { .. })
    }
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing before then.
    Wait(Tick),
    /// Announce so many slots, or the bare key.
    Announce {
        /// Slots.
        k: u16,
        /// Slots of heatsink's own or the bare key.
        home: bool,
        /// Anybody may switch.
        armed: bool,
    },
    /// Let anybody switch.
    Arm,
    /// Write to what was announced.
    Switch,
    /// Seal what is in use, and replace it by what was announced.
    Replace(Gen),
    /// Seal (where that can be done), sum and retire.
    Retire(Gen),
    /// Add what came late to a retired generation.
    Sweep(Gen),
    /// Delete the slots and forget the generation.
    Forget(Gen),
    /// Say that what is retired goes back to the bare key.
    BeginFold,
    /// Add it there, and leave the mark.
    Fold(Fold),
    /// See that it is still there, and say so.
    EndFold(Fold),
    /// Remove the mark.
    ForgetFold(Fold),
}

/// What waits: a generation, by id and seed, and the mark of what it waits for. A registry that has
/// lost a change gives the id again, and what waited for the change waits anew.
type Name = (u32, u32, u32);

/// Since when.
type Since = BTreeMap<Name, Tick>;

/// How long this process has seen what a record says published.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    announced: Since,
    draining: Since,
    buried: Since,
    swept: Since,
    /// The fold that the record tells of.
    folding: Option<(Fold, Tick)>,
    /// The fold that this process knows to be in the bare key, and since when.
    folded: Option<(Fold, Tick)>,
}

impl Watch {
    /// `salt` is the record that was published, at the latest at `at`.
    pub fn see(&mut self, at: Tick, salt: &Salt) {
        let names = |role| -> Vec<Name> {
            let all = salt.since().filter(|(r, ..)| *r == role);
            all.map(|(_, of, mark)| (of.id, of.seed, mark)).collect()
        };
        keep(&mut self.announced, &names(0), at);
        keep(&mut self.draining, &names(1), at);
        keep(&mut self.buried, &names(2), at);
        keep(&mut self.swept, &names(2), at);
        let told = |known: &(Fold, Tick)| salt.fold == Some(known.0);
        self.folding = self.folding.filter(told).or_else(|| salt.fold.map(|fold| (fold, at)));
        self.folded = self.folded.filter(told);
    }

    /// At `at` the fold was in the bare key; `None`: it is not.
    pub fn folded(&mut self, fold: Fold, at: Option<Tick>) {
        self.folded = at.map(|at| (fold, at));
    }

    /// A retired generation was compared with what is in its slots.
    pub fn swept(&mut self, of: &Gen, at: Tick) {
        let all =
            self.swept.iter_mut().filter(|((id, seed, _), _)| (*id, *seed) == (of.id, of.seed));
        all.for_each(|(_, since)| *since = at);
    }

    /// The next step. `patience` is added to every wait by a process that did not begin the
    /// rotation, so that not all of them act at once.
    #[must_use]
    pub fn next(
        &self,
        now: Tick,
        salt: &Salt,
        want: Want,
        waits: &Waits,
        patience: Duration,
    ) -> Step {
        let mut due = Tick::MAX;
        let mut ripe = |since: Option<&Tick>, wait: Duration| {
            let Some(at) = since.map(|t| t.after(wait).after(patience)) else { return false };
            due = due.min(at);
            now >= at
        };
        if let Some(step) = emergency(salt, want, waits) {
            return step;
        }
        let name = |role, of: &Gen| {
            let mark = salt.since().find(|(r, g, _)| (*r, g) == (role, of)).map_or(0, |s| s.2);
            (of.id, of.seed, mark)
        };
        if let Some(g) = salt.drain.first() {
            let wait = if waits.seal { waits.readers } else { waits.writers };
            if ripe(self.draining.get(&name(1, g)), wait) {
                return Step::Retire(*g);
            }
        }
        if let Some(g) = &salt.next
            && (salt.armed || want.is_now())
            && ripe(self.announced.get(&name(0, g)), waits.readers)
        {
            return Step::Switch;
        }
        for grave in &salt.graves {
            let id = name(2, &grave.slots);
            // What is deleted is compared one last time.
            let over = ripe(self.buried.get(&id), waits.grave);
            if grave.is_swept() && ripe(self.swept.get(&id), waits.sweep) {
                return Step::Sweep(grave.slots);
            }
            if over {
                return Step::Forget(grave.slots);
            }
        }
        if let (Some(fold), Some(wait)) = (salt.fold, waits.fold) {
            let of = |known: &Option<(Fold, Tick)>| known.filter(|(f, _)| *f == fold).map(|k| k.1);
            let (told, there) = (of(&self.folding), of(&self.folded));
            let since = if fold.done { told } else { there.or(told) };
            if ripe(since.as_ref(), wait) {
                return match (fold.done, there) {
                    (true, _) => Step::ForgetFold(fold),
                    (false, Some(_)) => Step::EndFold(fold),
                    (false, None) => Step::Fold(fold),
                };
            }
        }
        let fold = waits.fold.is_some() && want.slots().is_none() && salt.may_fold();
        let fold = fold.then_some(Step::BeginFold);
        wish(salt, want).or(fold).unwrap_or(Step::Wait(due))
    }
}

/// Remembers since when each of `ids` is there.
fn keep(since: &mut Since, names: &[Name], at: Tick) {
    since.retain(|name, _| names.contains(name));
    for name in names {
        since.entry(*name).or_insert(at);
    }
}

/// What needs no wait, because the slots in use can be sealed.
fn emergency(salt: &Salt, want: Want, waits: &Waits) -> Option<Step> {
    let at_once = matches!(want, Want::AtOnce(_) | Want::Pinned { at_once: true, .. });
    let sealable = waits.seal && salt.may_replace();
    if !at_once || !sealable || want.is_met(salt.cur) {
        return None;
    }
    match salt.next {
        Some(_) => Some(Step::Replace(salt.cur)),
        None => wish(salt, want),
    }
}

/// What is announced because this process wants it.
fn wish(salt: &Salt, want: Want) -> Option<Step> {
    let step = match (want, want.slots(), salt.next) {
        (_, Some(k), None) if !want.is_met(salt.cur) => {
            Step::Announce { k, home: false, armed: want.is_now() }
        }
        (_, Some(_), Some(_)) if want.is_now() && !salt.armed => Step::Arm,
        // The bare key of an exclusive counter is sealed: its home has one slot.
        (Want::Home, _, None) if salt.exclusive && salt.cur.k > 1 => {
            Step::Announce { k: 1, home: false, armed: true }
        }
        (Want::Home, _, None) if !salt.exclusive && !want.is_met(salt.cur) => {
            Step::Announce { k: 1, home: true, armed: true }
        }
        (Want::Home, _, Some(_)) if !salt.armed => Step::Arm,
        _ => return None,
    };
    let room = match step {
        Step::Announce { k, home, armed } => {
            let kind = if home { Kind::Home } else { Kind::Slots };
            salt.announced(k, kind, 0, armed).is_some()
        }
        _ => true,
    };
    room.then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const WAITS: Waits = Waits {
        readers: Duration::from_millis(1000),
        writers: Duration::from_millis(3000),
        grave: Duration::from_millis(9000),
        sweep: Duration::from_millis(500),
        seal: false,
        fold: Some(Duration::from_millis(2000)),
    };

    fn at(ms: u64) -> Tick {
        Tick(3_600_000_000_000).after(Duration::from_millis(ms))
    }

    fn next(watch: &Watch, ms: u64, salt: &Salt, want: Want, waits: &Waits) -> Step {
        watch.next(at(ms), salt, want, waits, Duration::ZERO)
    }

    #[test]
    fn readers_learn_before_the_first_write_and_writes_end_before_the_sum() {
        let (mut watch, salt) = (Watch::default(), Salt::new(false));
        let want = Want::Slots(8);
        let announce = Step::Announce { k: 8, home: false, armed: true };
        assert_eq!(next(&watch, 0, &salt, want, &WAITS), announce);
        let salt = salt.announced(8, Kind::Slots, 1, true).unwrap();
        assert_eq!(next(&watch, 0, &salt, want, &WAITS), Step::Wait(Tick::MAX), "not published");
        watch.see(at(100), &salt);
        assert_eq!(next(&watch, 1099, &salt, want, &WAITS), Step::Wait(at(1100)));
        assert_eq!(next(&watch, 1100, &salt, want, &WAITS), Step::Switch);
        let salt = salt.switched().unwrap();
        watch.see(at(1110), &salt);
        assert_eq!(salt.cur.k, 8);
        // And again: now there is something to drain.
        let salt = salt.announced(4, Kind::Slots, 1, true).unwrap();
        watch.see(at(1200), &salt);
        let want = Want::Slots(4);
        assert_eq!(next(&watch, 2200, &salt, want, &WAITS), Step::Switch);
        let salt = salt.switched().unwrap();
        watch.see(at(2300), &salt);
        assert_eq!(next(&watch, 5299, &salt, want, &WAITS), Step::Wait(at(5300)));
        assert_eq!(next(&watch, 5300, &salt, want, &WAITS), Step::Retire(salt.drain[0]));
        let sealing = Waits { seal: true, ..WAITS };
        assert_eq!(next(&watch, 3300, &salt, want, &sealing), Step::Retire(salt.drain[0]));
        let salt = salt.retired(1, 5, false).unwrap();
        watch.see(at(5400), &salt);
        let old = salt.graves.iter().find(|g| g.slots.id == 1).unwrap().slots;
        assert_eq!(next(&watch, 5900, &salt, want, &WAITS), Step::Sweep(old));
        watch.swept(&old, at(14_390));
        assert_eq!(next(&watch, 14_400, &salt, want, &WAITS), Step::Forget(salt.graves[0].slots));
    }

    #[test]
    fn whoever_comes_later_waits_in_full_and_helpers_longer() {
        let salt = Salt::new(false).announced(8, Kind::Slots, 1, true).unwrap();
        let mut late = Watch::default();
        late.see(at(900), &salt);
        let step = |ms, patience| late.next(at(ms), &salt, Want::Nothing, &WAITS, patience);
        assert_eq!(step(1899, Duration::ZERO), Step::Wait(at(1900)));
        assert_eq!(step(1900, Duration::ZERO), Step::Switch);
        assert_eq!(step(1900, 300 * MS), Step::Wait(at(2200)));
    }

    #[test]
    fn what_a_registry_has_lost_and_is_said_again_is_waited_for_again() {
        let before = Salt::new(false)
            .announced(8, Kind::Slots, 1, true)
            .unwrap()
            .marked(&Salt::new(false), 1);
        let old = before.clone().switched().unwrap().marked(&before, 2);
        let old = old.announced(4, Kind::Slots, 2, true).unwrap().marked(&old, 3);
        let switched = |mark| old.switched().unwrap().marked(&old, mark);
        let mut watch = Watch::default();
        watch.see(at(0), &switched(4));
        assert!(matches!(next(&watch, 3000, &switched(4), Want::Nothing, &WAITS), Step::Retire(_)));
        // This process has not seen that the switch was lost, and is told of the second one.
        let again = switched(5);
        watch.see(at(2900), &again);
        let step = next(&watch, 3000, &again, Want::Nothing, &WAITS);
        assert!(matches!(step, Step::Wait(_)), "{step:?}");
        // A change of something else takes no wait back.
        let home = again.announced(1, Kind::Home, 0, true).unwrap().marked(&again, 6);
        watch.see(at(5000), &home);
        assert_eq!(next(&watch, 5900, &home, Want::Nothing, &WAITS), Step::Retire(again.drain[0]));
    }

    #[test]
    fn what_is_retired_goes_back_to_the_bare_key_a_wait_after_each_step() {
        let salt = Salt::new(false).announced(4, Kind::Slots, 1, true).unwrap();
        let salt = salt.switched().unwrap().announced(1, Kind::Home, 0, true).unwrap();
        let salt = salt.switched().unwrap().retired(1, 41, true).unwrap();
        let mut watch = Watch::default();
        watch.see(at(0), &salt);
        assert_eq!(next(&watch, 1, &salt, Want::Home, &WAITS), Step::BeginFold);
        assert!(matches!(next(&watch, 1, &salt, Want::Slots(4), &WAITS), Step::Announce { .. }));
        let cannot = Waits { fold: None, ..WAITS };
        assert!(matches!(next(&watch, 1, &salt, Want::Home, &cannot), Step::Wait(_)));
        let salt = salt.folding(7).unwrap();
        let fold = salt.fold.unwrap();
        assert_eq!((fold.amount, salt.retired, salt.is_plain()), (41, 0, false));
        watch.see(at(100), &salt);
        let step = |watch: &Watch, salt: &Salt, ms| {
            let graves = Waits { grave: Duration::from_secs(900), sweep: Duration::MAX, ..WAITS };
            next(watch, ms, salt, Want::Home, &graves)
        };
        assert_eq!(step(&watch, &salt, 2099), Step::Wait(at(2100)));
        assert_eq!(step(&watch, &salt, 2100), Step::Fold(fold));
        watch.folded(fold, Some(at(2110)));
        assert_eq!(step(&watch, &salt, 4109), Step::Wait(at(4110)));
        assert_eq!(step(&watch, &salt, 4110), Step::EndFold(fold));
        watch.folded(fold, None);
        assert_eq!(step(&watch, &salt, 4110), Step::Fold(fold), "the store has lost it");
        let salt = salt.folded().unwrap();
        watch.see(at(5000), &salt);
        assert_eq!(salt.carried(), None);
        assert_eq!(step(&watch, &salt, 6999), Step::Wait(at(7000)));
        assert_eq!(step(&watch, &salt, 7000), Step::ForgetFold(salt.fold.unwrap()));
        assert_eq!(salt.unfolded().unwrap().fold, None);
    }

    #[test]
    fn what_is_only_made_ready_is_not_switched_to() {
        let mut watch = Watch::default();
        let salt = Salt::new(false).announced(8, Kind::Slots, 1, false).unwrap();
        watch.see(at(0), &salt);
        assert_eq!(next(&watch, 9000, &salt, Want::Ready(8), &WAITS), Step::Wait(Tick::MAX));
        assert_eq!(next(&watch, 9000, &salt, Want::Slots(8), &WAITS), Step::Switch);
        assert_eq!(next(&watch, 900, &salt, Want::Slots(8), &WAITS), Step::Arm);
    }

    #[test]
    fn at_once_waits_for_nobody_where_it_may_seal() {
        let watch = Watch::default();
        let sealing = Waits { seal: true, ..WAITS };
        let mine = Salt::new(true).announced(8, Kind::Slots, 1, true).unwrap();
        let want = Want::AtOnce(8);
        assert_eq!(next(&watch, 0, &mine, want, &sealing), Step::Replace(mine.cur));
        assert_eq!(next(&watch, 0, &mine, want, &WAITS), Step::Wait(Tick::MAX));
        // The bare key that others use is not sealed.
        let shared = Salt::new(false).announced(8, Kind::Slots, 1, true).unwrap();
        assert_eq!(next(&watch, 0, &shared, want, &sealing), Step::Wait(Tick::MAX));
    }
}
