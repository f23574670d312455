//! Two lists as one: what a group decides by itself, and what the group above it has decided.
//!
//! - **What**: a host below its fleet, a region below the whole. What operators of the lower group
//!   have ordered comes first, then the list from above, which knows of more traffic, then what the
//!   lower group has found.
//! - **Invariant**: a key stands in it once; a key that either denies does not stand in it.
//! - **Time and units**: none.
//! - **Bounds**: the cap given with each call, on keys and on denials each.
//! - **Source**: none; bookkeeping.

use super::fleet::{FleetKey, FleetList};
use super::hotlist::Rule;
use crate::key::Key;
use std::collections::BTreeSet;

/// A list with the entries and the denied keys of both, no more than `most` of each.
#[must_use]
pub fn blend(
    own: Vec<FleetKey>,
    own_denied: Vec<Key>,
    above: Option<&FleetList>,
    most: usize,
) -> FleetList {
    let (ordered, found): (Vec<FleetKey>, Vec<FleetKey>) =
        own.into_iter().partition(|e| e.rule == Rule::Pinned);
    let mut denied: BTreeSet<Key> = own_denied.into_iter().collect();
    denied.extend(above.iter().flat_map(|list| list.denied.iter().cloned()));
    let mut seen = BTreeSet::new();
    let denied_above = above.map_or_else(Vec::new, |list| list.denied.clone());
    let above = above.into_iter().flat_map(|list| list.entries.iter().cloned());
    let above = above.map(|entry| FleetKey { above: true, ..entry });
    let entries = ordered.into_iter().chain(above).chain(found);
    let entries = entries.filter(|e| !denied.contains(&e.key) && seen.insert(e.key.clone()));
    FleetList {
        entries: entries.take(most).collect(),
        denied: denied.iter().take(most).cloned().collect(),
        denied_above: denied_above.into_iter().take(most).collect(),
        ..FleetList::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::treat::Treatment;
    use super::*;

    #[test]
    fn own_orders_come_first_then_the_list_from_above_and_denials_of_either_hold() {
        let key = |key: &str, rule, per_sec| FleetKey {
            reads_per_sec: per_sec,
            ..FleetKey::named(key.into(), rule, Treatment::Near)
        };
        let own = vec![
            key("ordered", Rule::Pinned, 1.0),
            key("both", Rule::Detected, 2.0),
            key("own", Rule::Detected, 2.0),
            key("x", Rule::Detected, 9.0),
        ];
        let entries = vec![
            key("ordered", Rule::Detected, 5.0),
            key("both", Rule::Detected, 7.0),
            key("y", Rule::Pinned, 7.0),
        ];
        let above = FleetList { entries, denied: vec!["x".into()], ..FleetList::default() };
        let list = blend(own.clone(), vec!["y".into()], Some(&above), 9);
        let told: Vec<_> =
            list.entries.iter().map(|e| (e.key.to_string(), e.reads_per_sec)).collect();
        let expected = [("ordered", 1.0), ("both", 7.0), ("own", 2.0)];
        assert_eq!(told, expected.map(|(k, n)| (k.to_string(), n)));
        assert_eq!(list.denied, ["x".into(), "y".into()]);
        // Whoever goes on from this list can tell what was its own.
        let from_above = list.from_above();
        assert_eq!(from_above.entries.len(), 1);
        assert_eq!(
            (from_above.entries[0].key.to_string(), from_above.denied),
            ("both".into(), vec!["x".into()])
        );
        assert_eq!(blend(own, Vec::new(), Some(&above), 1).entries.len(), 1);
    }
}
