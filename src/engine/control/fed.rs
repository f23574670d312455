//! What the list of the host or the fleet has a process do.
//!
//! - **What**: the keys of the list in force, and those that it denies, next to what this process
//!   has found by itself.
//! - **Invariant**: a key that stays on the list keeps since when, and what it saved.
//! - **Time and units**: [`Tick`]; rates per second of all processes together.
//! - **Bounds**: those of the list, which [`super::follow::Caps`] has checked.
//! - **Source**: none; bookkeeping.

use super::super::time::Tick;
use super::fleet::FleetList;
use super::hotlist::Rule;
use super::operator::Named;
use super::treat::Treatment;
use crate::key::Key;
use std::collections::{BTreeMap, BTreeSet};

/// See the module's description.
#[derive(Clone, Debug, Default)]
pub struct Fed {
    keys: BTreeMap<Key, FedKey>,
    denied: BTreeSet<Key>,
    /// Nothing of it is in force from then on.
    pub(crate) until: Tick,
}

/// A key of the list.
#[derive(Clone, Debug)]
pub(crate) struct FedKey {
    pub(crate) rule: Rule,
    pub(crate) treatment: Option<Treatment>,
    pub(crate) total_per_sec: f64,
    pub(crate) reporters: u32,
    /// Its hash, since when, and what it saved.
    pub(crate) named: Named,
}

impl Fed {
    /// The list in place of the last one. `hash` hashes keys as samples are.
    #[must_use]
    pub fn next(&self, now: Tick, list: &FleetList, hash: impl Fn(&Key) -> u64) -> Fed {
        let keys = list.entries.iter().map(|entry| {
            let known = self.keys.get(&entry.key);
            let named = known.map_or_else(
                || Named {
                    hash: hash(&entry.key),
                    treatment: Treatment::Near,
                    since: now.before(entry.hot_for),
                    saved: 0.0,
                },
                |k| k.named.clone(),
            );
            let key = FedKey {
                rule: if entry.rule == Rule::Pinned { Rule::Pinned } else { Rule::Fed },
                treatment: entry.treatment,
                total_per_sec: entry.total_per_sec(),
                reporters: entry.reporters,
                named,
            };
            (entry.key.clone(), key)
        });
        let denied = list.denied.iter().cloned().collect();
        Fed { keys: keys.collect(), denied, until: self.until }
    }

    /// Whether the list denies `key`.
    #[must_use]
    pub fn denies(&self, key: &Key) -> bool {
        self.denied.contains(key)
    }

    /// By whose word the list treats `key`, if it stands on it.
    #[must_use]
    pub fn rule(&self, key: &Key) -> Option<Rule> {
        self.keys.get(key).map(|k| k.rule)
    }

    /// Requests a second of all processes together.
    #[must_use]
    pub fn rate(&self, key: &Key) -> Option<f64> {
        self.keys.get(key).map(|k| k.total_per_sec)
    }

    /// How many processes (or relays of a host) have named it.
    #[must_use]
    pub fn reporters(&self, key: &Key) -> Option<u32> {
        self.keys.get(key).map(|k| k.reporters)
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&FedKey> {
        self.keys.get(key)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = (&Key, &FedKey)> {
        self.keys.iter()
    }

    pub(crate) fn keys_mut(&mut self) -> impl Iterator<Item = (&Key, &mut FedKey)> {
        self.keys.iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::super::detect;
    use super::super::fleet::FleetKey;
    use super::super::steering::{Options, Steering};
    use super::*;

    #[test]
    fn nothing_of_a_list_is_in_force_after_its_time_whoever_has_stopped() {
        let detect = detect::Options::default();
        let mut steering = Steering::new(Options { detect, keys_max: 9, observe_only: false }, 1);
        let feed = steering.begin_feed().unwrap();
        let near = FleetKey::named("a".into(), Rule::Pinned, Treatment::Near);
        let list =
            FleetList { entries: vec![near], denied: vec!["x".into()], ..FleetList::default() };
        steering.obey(Tick(1), feed, Some((&list, Tick(100))), |_| 7);
        steering.keep(feed, Tick(200));
        steering.keep(feed + 1, Tick(900));
        assert_eq!(steering.poll_timeout(), Some(Tick(200)));
        steering.handle_timeout(Tick(199));
        assert!(steering.treated() == ["a".into()] && !steering.take_lapse());
        assert!(steering.denies(&"x".into()) && steering.take_change());
        steering.handle_timeout(Tick(200));
        assert!(steering.treated().is_empty() && !steering.denies(&"x".into()));
        assert!(steering.take_change() && steering.take_lapse() && !steering.take_lapse());
        assert_ne!(steering.poll_timeout(), Some(Tick(200)));
    }
}
