//! The hot list, and the entry of one key.
//!
//! - **What**: what is known of the keys that stand out, as plain numbers.
//! - **Invariant**: the entry of one key is the one that the whole list has of it.
//! - **Time and units**: as in [`super::super::hotlist`].
//! - **Bounds**: found, ordered and fed keys, all of which are capped.
//! - **Source**: none; bookkeeping.

use super::super::super::time::Tick;
use super::super::hotlist::{HotKey, HotList, Rule};
use super::super::operator::Named;
use super::super::treat::{Rates, Treatment};
use super::{Found, Steering, id};
use crate::key::Key;
use std::collections::BTreeSet;

impl Steering {
    /// The list at `now`.
    #[must_use]
    pub fn hot_list(&self, now: Tick) -> HotList {
        let treated: BTreeSet<Key> = self.treated().into_iter().collect();
        let mut entries: Vec<HotKey> = self
            .found
            .iter()
            .map(|(id, f)| self.entry_of_found(now, id.0, f, treated.contains(&f.key)))
            .collect();
        let mut on_it: BTreeSet<&Key> = self.found.values().map(|f| &f.key).collect();
        for (key, named) in self.operator.treated() {
            if on_it.insert(key) {
                entries.push(self.entry_of_named(now, key, &named, treated.contains(key)));
            }
        }
        for (key, fed) in self.fed.iter().flat_map(|fed| fed.keys()) {
            if on_it.insert(key) {
                let entry = self.entry_of_named(now, key, &fed.named, treated.contains(key));
                entries.push(HotKey { treatment: fed.treatment, ..entry });
            }
        }
        entries.sort_by(|a, b| {
            b.total_per_sec().total_cmp(&a.total_per_sec()).then_with(|| a.key.cmp(&b.key))
        });
        HotList {
            version: self.version,
            observe_only: self.options.observe_only,
            threshold_per_sec: self.detector.threshold_per_sec(),
            floor_per_sec: self.detector.floor_per_sec(),
            window: self.detector.window_record(),
            entries,
        }
    }

    /// The entry of one key, which is `treated` now or not, without making the whole list.
    #[must_use]
    pub fn hot_key(&self, now: Tick, key: &Key, hash: u64, treated: bool) -> Option<HotKey> {
        if let Some(found) = self.found.get(&id(hash, key)) {
            return Some(self.entry_of_found(now, hash, found, treated));
        }
        let scheduled = || self.operator.treated().find(|(k, _)| *k == key).map(|(_, named)| named);
        if let Some(named) = self.operator.pinned(key).cloned().or_else(scheduled) {
            return Some(self.entry_of_named(now, key, &named, treated));
        }
        let fed = self.fed.as_ref()?.get(key)?;
        let entry = self.entry_of_named(now, key, &fed.named, treated);
        Some(HotKey { treatment: fed.treatment, ..entry })
    }

    fn entry_of_found(&self, now: Tick, hash: u64, f: &Found, treated: bool) -> HotKey {
        let pinned = self.operator.pinned(&f.key);
        let fed = self.fed.as_ref().and_then(|fed| fed.get(&f.key));
        let ordered = fed.filter(|fed| fed.rule == Rule::Pinned && !treated);
        let near = f.near || fed.is_some_and(|fed| fed.treatment == Some(Treatment::Near));
        let treatment = match ordered {
            _ if pinned.is_some() => Some(Treatment::Near),
            Some(fed) => fed.treatment,
            None => near.then_some(Treatment::Near),
        };
        HotKey {
            key: f.key.clone(),
            rule: self.rule(&f.key, hash),
            treatment,
            in_force: treatment.is_some() && treated,
            hot_for: now.since(f.since),
            reads_per_sec: f.demand.reads_per_sec,
            writes_per_sec: f.demand.writes_per_sec,
            lower_bound_per_sec: f.lower_bound_per_sec,
            load_per_sec: f.load_per_sec,
            settled: f.settled,
            share: f.settled.then(|| self.share(f.demand)),
            reason: Some(f.decision.reason),
            reads_advice: f.decision.reads,
            writes_advice: f.decision.writes,
            saved: f.saved.max(pinned.map_or(0.0, |p| p.saved)) as u64,
            fleet_per_sec: self.fed_rate(&f.key),
        }
    }

    fn entry_of_named(&self, now: Tick, key: &Key, pin: &Named, treated: bool) -> HotKey {
        let estimate = self.detector.explain(pin.hash).and_then(|e| e.estimate);
        let demand = estimate.as_ref().map_or_else(Rates::default, |e| e.demand);
        HotKey {
            key: key.clone(),
            rule: self.rule(key, pin.hash),
            treatment: Some(pin.treatment),
            in_force: treated,
            hot_for: now.since(pin.since),
            reads_per_sec: demand.reads_per_sec,
            writes_per_sec: demand.writes_per_sec,
            lower_bound_per_sec: estimate
                .as_ref()
                .map_or(0.0, |e| (e.lower_bound_per_sec - e.margin_per_sec).max(0.0)),
            load_per_sec: estimate.as_ref().map_or(0.0, |e| e.load_per_sec),
            settled: estimate.is_some(),
            share: estimate.is_some().then(|| self.share(demand)),
            reason: None,
            reads_advice: None,
            writes_advice: None,
            saved: pin.saved as u64,
            fleet_per_sec: self.fed_rate(key),
        }
    }

    /// The part of all requests, by the last finished window.
    fn share(&self, demand: Rates) -> f64 {
        let Some(record) = self.detector.window_record() else { return 0.0 };
        let all = record.requests as f64 / record.duration.as_secs_f64().max(1e-9);
        if all > 0.0 { (demand.total() / all).min(1.0) } else { 0.0 }
    }
}
