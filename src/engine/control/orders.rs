//! What operators have ordered a group of processes to do.
//!
//! - **What**: which keys are to be treated whatever their traffic, and how; which never. A pin is
//!   an order to keep a key near; an override says how else, or for how long a value may be served.
//! - **Invariant**: a denial outranks every other order; of two orders to treat a key the later one
//!   holds.
//! - **Time and units**: [`Tick`]; an order without an end holds until it is taken back.
//! - **Bounds**: the cap on keys given at the start, on orders to treat and on denials each.
//! - **Source**: precedence as in [`super::operator`]: deny, order, find.

use super::super::time::Tick;
use super::treat::Treatment;
use crate::key::Key;
use std::collections::BTreeMap;
use std::time::Duration;

/// How a key is to be treated.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Treat {
    /// What every process is to do about it.
    pub treatment: Treatment,
    /// How long a value may be served from a near cache; `None` leaves it to the process.
    pub ttl: Option<Duration>,
    /// Since when.
    pub since: Tick,
    /// Until when; `None`: until it is taken back.
    pub until: Option<Tick>,
}

/// See the module's description.
#[derive(Clone, PartialEq, Debug)]
pub struct Orders {
    keys_max: usize,
    treats: BTreeMap<Key, Treat>,
    denied: BTreeMap<Key, Option<Tick>>,
}

impl Treat {
    /// Kept near since `now`, until it is taken back.
    #[must_use]
    pub fn near(now: Tick) -> Treat {
        Treat { treatment: Treatment::Near, ttl: None, since: now, until: None }
    }

    /// What was ordered, for people.
    #[must_use]
    pub fn what(&self) -> String {
        match (self.treatment, self.ttl) {
            (Treatment::Near, None) => "pinned by an operator".into(),
            (treatment, None) => format!("set to {treatment} by an operator"),
            (treatment, Some(ttl)) => {
                format!("set to {treatment}, values for {} ms, by an operator", ttl.as_millis())
            }
        }
    }

    /// The same order, whenever it was given.
    fn same(&self, other: &Treat) -> bool {
        (self.treatment, self.ttl) == (other.treatment, other.ttl)
    }
}

impl Orders {
    /// Nothing has been ordered.
    #[must_use]
    pub fn new(keys_max: usize) -> Orders {
        Orders { keys_max, treats: BTreeMap::new(), denied: BTreeMap::new() }
    }

    /// Has `key` treated; whether there was room.
    pub fn treat(&mut self, key: Key, order: Treat) -> bool {
        let room = self.treats.len() < self.keys_max || self.treats.contains_key(&key);
        if room {
            self.treats.insert(key, order);
        }
        room
    }

    /// Takes an order to treat `key` back; whether there was one.
    pub fn untreat(&mut self, key: &Key) -> bool {
        self.treats.remove(key).is_some()
    }

    /// Has nobody treat `key`; whether there was room.
    pub fn deny(&mut self, key: Key, until: Option<Tick>) -> bool {
        let room = self.denied.len() < self.keys_max || self.denied.contains_key(&key);
        if room {
            self.denied.insert(key, until);
        }
        room
    }

    /// Takes a denial back; whether there was one.
    pub fn allow(&mut self, key: &Key) -> bool {
        self.denied.remove(key).is_some()
    }

    /// Lets go of what has ended; which keys, and what ended.
    pub fn handle_timeout(&mut self, now: Tick) -> Vec<(Key, &'static str)> {
        let over = |until: Option<Tick>| until.is_some_and(|until| until <= now);
        let mut ended = Vec::new();
        self.treats.retain(|key, order| {
            if over(order.until) {
                ended.push((key.clone(), "the operator's order has ended"));
            }
            !over(order.until)
        });
        self.denied.retain(|key, until| {
            if over(*until) {
                ended.push((key.clone(), "the operator's denial has ended"));
            }
            !over(*until)
        });
        ended
    }

    /// These orders in place of the present ones; for which keys that is news, and what.
    pub fn replace(&mut self, next: Orders) -> Vec<(Key, String)> {
        let mut news = Vec::new();
        for (key, order) in &next.treats {
            if !self.treats.get(key).is_some_and(|old| old.same(order)) {
                news.push((key.clone(), order.what()));
            }
        }
        let gone = self.treats.keys().filter(|key| !next.treats.contains_key(*key));
        news.extend(gone.map(|key| (key.clone(), "the operator's order is no more".into())));
        let new = next.denied.keys().filter(|key| !self.denied.contains_key(*key));
        news.extend(new.map(|key| (key.clone(), "denied by an operator".into())));
        let gone = self.denied.keys().filter(|key| !next.denied.contains_key(*key));
        news.extend(gone.map(|key| (key.clone(), "the operator's denial is no more".into())));
        *self = next;
        news
    }

    /// What is ordered for `key`, denied or not.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Treat> {
        self.treats.get(key)
    }

    /// The keys to be treated, in their order.
    pub fn treats(&self) -> impl Iterator<Item = (&Key, &Treat)> {
        self.treats.iter()
    }

    /// Whether nobody may treat `key`.
    #[must_use]
    pub fn denies(&self, key: &Key) -> bool {
        self.denied.contains_key(key)
    }

    /// When the denial of `key` ends, if there is one that does.
    #[must_use]
    pub fn denied_until(&self, key: &Key) -> Option<Tick> {
        self.denied.get(key).copied().flatten()
    }

    /// The keys that nobody may treat.
    pub fn denied(&self) -> impl Iterator<Item = &Key> {
        self.denied.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_holds_until_its_end_and_no_more_are_kept_than_the_cap() {
        let mut orders = Orders::new(2);
        let salt = Treat { treatment: Treatment::Salt { slots: 8 }, ..Treat::near(Tick(1)) };
        assert!(orders.treat("a".into(), Treat { until: Some(Tick(9)), ..salt }));
        assert!(orders.treat("b".into(), Treat::near(Tick(1))));
        assert!(!orders.treat("c".into(), salt) && orders.treat("b".into(), salt));
        assert!(orders.deny("x".into(), Some(Tick(5))) && orders.deny("y".into(), None));
        assert!(!orders.deny("z".into(), None));
        assert_eq!(orders.handle_timeout(Tick(4)), []);
        let ended: Vec<Key> = orders.handle_timeout(Tick(9)).into_iter().map(|e| e.0).collect();
        assert_eq!(ended, ["a".into(), "x".into()]);
        assert!(orders.denies(&"y".into()) && orders.get(&"b".into()) == Some(&salt));
    }

    #[test]
    fn a_replacement_names_exactly_what_has_changed() {
        let mut orders = Orders::new(9);
        orders.treat("a".into(), Treat::near(Tick(1)));
        orders.treat("b".into(), Treat::near(Tick(1)));
        orders.deny("x".into(), None);
        let mut next = Orders::new(9);
        next.treat("a".into(), Treat::near(Tick(7)));
        let ttl = Some(Duration::from_millis(200));
        next.treat("c".into(), Treat { ttl, ..Treat::near(Tick(7)) });
        let news = orders.replace(next);
        let text: Vec<String> = news.iter().map(|(key, what)| format!("{key}: {what}")).collect();
        assert_eq!(
            text,
            [
                "c: set to near cache, values for 200 ms, by an operator",
                "b: the operator's order is no more",
                "x: the operator's denial is no more",
            ]
        );
    }
}
