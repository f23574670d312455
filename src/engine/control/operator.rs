//! What the operator has said: pins, denials and schedules.
//!
//! - **What**: which keys are to be treated whatever their traffic, which never, and which keys
//!   or prefixes from when until when.
//! - **Invariant**: pinned and scheduled keys together never exceed the cap given at the start; a
//!   call that would is refused whole.
//! - **Time and units**: [`Tick`]; a schedule is in force from its start up to, not including, its
//!   end.
//! - **Bounds**: the cap on keys, [`DENIED_MAX`], [`SCHEDULES_MAX`].
//! - **Source**: precedence as in the operators' tools of the articles: deny, pin, schedule, find.

use super::super::time::Tick;
use super::hotlist::Rule;
use super::treat::Treatment;
use crate::key::Key;
use std::collections::{BTreeMap, BTreeSet};

/// Keys that may be denied.
pub const DENIED_MAX: usize = 65_536;

/// Schedules that may wait or be in force.
pub const SCHEDULES_MAX: usize = 1_024;

/// Why the operator's word was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
    /// As many keys are pinned and scheduled as may be treated.
    Keys,
    /// As many keys are denied as may be.
    Denied,
    /// As many schedules wait as may.
    Schedules,
}

/// What a schedule names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scheduled {
    /// These keys, each with its hash, from the first moment on, whatever their traffic.
    Keys(Vec<(Key, u64)>),
    /// Keys that begin with this, each as soon as its traffic is within reach of the threshold.
    Prefix(Key),
}

/// A key that the operator has named.
#[derive(Clone, Debug)]
pub struct Named {
    /// Its hash.
    pub hash: u64,
    /// What is to be done.
    pub treatment: Treatment,
    /// Since when.
    pub since: Tick,
    /// Store operations saved since then.
    pub saved: f64,
}

#[derive(Clone, Debug)]
struct Schedule {
    id: u64,
    what: Scheduled,
    from: Tick,
    until: Tick,
    in_force: bool,
}

/// See the module's description.
#[derive(Clone, Debug)]
pub struct Operator {
    keys_max: usize,
    pins: BTreeMap<Key, Named>,
    denied: BTreeSet<Key>,
    schedules: Vec<Schedule>,
    schedules_made: u64,
}

impl Operator {
    /// Nothing has been said. At most `keys_max` keys can be pinned and scheduled.
    #[must_use]
    pub fn new(keys_max: usize) -> Operator {
        Operator {
            keys_max,
            pins: BTreeMap::new(),
            denied: BTreeSet::new(),
            schedules: Vec::new(),
            schedules_made: 0,
        }
    }

    /// Pins `keys`, each with its hash: all or none.
    ///
    /// # Errors
    /// [`Full::Keys`].
    pub fn pin(
        &mut self,
        now: Tick,
        keys: Vec<(Key, u64)>,
        treatment: Treatment,
    ) -> Result<(), Full> {
        let new: BTreeSet<&Key> =
            keys.iter().map(|(k, _)| k).filter(|k| !self.pins.contains_key(*k)).collect();
        if self.named() + new.len() > self.keys_max {
            return Err(Full::Keys);
        }
        for (key, hash) in keys {
            let fresh = Named { hash, treatment, since: now, saved: 0.0 };
            self.pins.entry(key).or_insert(fresh).treatment = treatment;
        }
        Ok(())
    }

    /// Takes a pin back; whether there was one.
    pub fn unpin(&mut self, key: &Key) -> bool {
        self.pins.remove(key).is_some()
    }

    /// Never treats `key`.
    ///
    /// # Errors
    /// [`Full::Denied`].
    pub fn deny(&mut self, key: Key) -> Result<(), Full> {
        if self.denied.len() >= DENIED_MAX && !self.denied.contains(&key) {
            return Err(Full::Denied);
        }
        self.denied.insert(key);
        Ok(())
    }

    /// Takes a denial back; whether there was one.
    pub fn allow(&mut self, key: &Key) -> bool {
        self.denied.remove(key)
    }

    /// Treats what `what` names from `from` until `until`. The id takes it back.
    ///
    /// # Errors
    /// [`Full::Schedules`], [`Full::Keys`].
    pub fn schedule(&mut self, what: Scheduled, from: Tick, until: Tick) -> Result<u64, Full> {
        if self.schedules.len() >= SCHEDULES_MAX {
            return Err(Full::Schedules);
        }
        if self.named() + what.keys().len() > self.keys_max {
            return Err(Full::Keys);
        }
        self.schedules_made += 1;
        let id = self.schedules_made;
        self.schedules.push(Schedule { id, what, from, until, in_force: false });
        Ok(id)
    }

    /// Takes a schedule back; whether it was there still.
    pub fn cancel(&mut self, id: u64) -> bool {
        let before = self.schedules.len();
        self.schedules.retain(|s| s.id != id);
        self.schedules.len() < before
    }

    /// Starts and ends the schedules that are due; whether there were any.
    pub fn handle_timeout(&mut self, now: Tick) -> bool {
        let mut moved = false;
        self.schedules.retain_mut(|s| {
            let in_force = s.from <= now && now < s.until;
            let over = now >= s.until;
            moved |= in_force != s.in_force || over;
            s.in_force = in_force;
            !over
        });
        moved
    }

    /// When the next schedule starts or ends.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Tick> {
        self.schedules.iter().map(|s| if s.in_force { s.until } else { s.from }).min()
    }

    /// Whether `key` is denied.
    #[must_use]
    pub fn denies(&self, key: &Key) -> bool {
        self.denied.contains(key)
    }

    /// Whether a scheduled prefix in force names `key`.
    #[must_use]
    pub fn expects(&self, key: &[u8]) -> bool {
        self.schedules
            .iter()
            .any(|s| matches!(&s.what, Scheduled::Prefix(p) if s.in_force && key.starts_with(p)))
    }

    /// What has been said of `key`.
    #[must_use]
    pub fn rule(&self, key: &Key) -> Rule {
        if self.denied.contains(key) {
            Rule::Denied
        } else if self.pins.contains_key(key) {
            Rule::Pinned
        } else if self.scheduled().any(|(k, _)| k == key) {
            Rule::Scheduled
        } else {
            Rule::None
        }
    }

    /// The pinned keys, then those of schedules in force. A key may come twice.
    pub fn treated(&self) -> impl Iterator<Item = (&Key, Named)> {
        self.pins.iter().map(|(key, pin)| (key, pin.clone())).chain(self.scheduled())
    }

    /// What is noted of a pinned key.
    #[must_use]
    pub fn pinned(&self, key: &Key) -> Option<&Named> {
        self.pins.get(key)
    }

    /// The pins, to note what they saved.
    pub fn pins_mut(&mut self) -> impl Iterator<Item = &mut Named> {
        self.pins.values_mut()
    }

    /// Keys that have been named.
    fn named(&self) -> usize {
        self.pins.len() + self.schedules.iter().map(|s| s.what.keys().len()).sum::<usize>()
    }

    fn scheduled(&self) -> impl Iterator<Item = (&Key, Named)> {
        self.schedules.iter().filter(|s| s.in_force).flat_map(|s| {
            let named =
                |hash| Named { hash, treatment: Treatment::Near, since: s.from, saved: 0.0 };
            s.what.keys().iter().map(move |(key, hash)| (key, named(*hash)))
        })
    }
}

impl Scheduled {
    fn keys(&self) -> &[(Key, u64)] {
        match self {
            Scheduled::Keys(keys) => keys,
            Scheduled::Prefix(_) => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(range: std::ops::Range<u64>) -> Vec<(Key, u64)> {
        range.map(|i| (Key::from(format!("k{i}")), i)).collect()
    }

    #[test]
    fn more_keys_than_allowed_are_refused_whole() {
        let mut operator = Operator::new(4);
        operator.pin(Tick(1), keys(0..2), Treatment::Near).unwrap();
        assert_eq!(operator.pin(Tick(1), keys(1..5), Treatment::Near), Err(Full::Keys));
        assert_eq!(operator.treated().count(), 2);
        let two = Scheduled::Keys(keys(5..7));
        operator.schedule(two.clone(), Tick(5), Tick(9)).unwrap();
        assert_eq!(operator.schedule(two, Tick(5), Tick(9)), Err(Full::Keys));
        assert_eq!(operator.pin(Tick(1), keys(1..2), Treatment::Near), Ok(()), "not a new one");
        assert!(operator.unpin(&"k0".into()) && !operator.unpin(&"k0".into()));
    }

    #[test]
    fn a_schedule_is_in_force_from_its_start_up_to_its_end() {
        let mut operator = Operator::new(4);
        operator.schedule(Scheduled::Keys(keys(0..1)), Tick(5), Tick(9)).unwrap();
        operator.schedule(Scheduled::Prefix("m:".into()), Tick(7), Tick(8)).unwrap();
        let key = Key::from("k0");
        let mut moves = Vec::new();
        for now in 4..11 {
            let moved = operator.handle_timeout(Tick(now));
            let rule = operator.rule(&key) == Rule::Scheduled;
            moves.push((now, moved, rule, operator.expects(b"m:1")));
        }
        let expected = [
            (4, false, false, false),
            (5, true, true, false),
            (6, false, true, false),
            (7, true, true, true),
            (8, true, true, false),
            (9, true, false, false),
            (10, false, false, false),
        ];
        assert_eq!(moves, expected);
        assert_eq!(operator.poll_timeout(), None);
    }

    #[test]
    fn a_denial_outranks_a_pin_and_a_pin_a_schedule() {
        let mut operator = Operator::new(4);
        let key = Key::from("k0");
        operator.schedule(Scheduled::Keys(keys(0..1)), Tick(0), Tick(9)).unwrap();
        operator.handle_timeout(Tick(1));
        assert_eq!(operator.rule(&key), Rule::Scheduled);
        operator.pin(Tick(1), keys(0..1), Treatment::Near).unwrap();
        assert_eq!(operator.rule(&key), Rule::Pinned);
        operator.deny(key.clone()).unwrap();
        assert_eq!(operator.rule(&key), Rule::Denied);
        assert!(operator.allow(&key) && !operator.allow(&key));
        assert_eq!(operator.rule(&key), Rule::Pinned);
    }
}
