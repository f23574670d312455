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

/// The entries and the denied keys of both, no more than `most` of each.
#[must_use]
pub fn blend(
    own: Vec<FleetKey>,
    own_denied: Vec<Key>,
    above: Option<&FleetList>,
    most: usize,
) -> (Vec<FleetKey>, Vec<Key>) {
    let (ordered, found): (Vec<FleetKey>, Vec<FleetKey>) =
        own.into_iter().partition(|e| e.rule == Rule::Pinned);
    let mut denied: BTreeSet<Key> = own_denied.into_iter().collect();
    denied.extend(above.iter().flat_map(|list| list.denied.iter().cloned()));
    let mut seen = BTreeSet::new();
    let above = above.into_iter().flat_map(|list| list.entries.iter().cloned());
    let entries = ordered.into_iter().chain(above).chain(found);
    let entries = entries.filter(|e| !denied.contains(&e.key) && seen.insert(e.key.clone()));
    (entries.take(most).collect(), denied.iter().take(most).cloned().collect())
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
        let (entries, denied) = blend(own.clone(), vec!["y".into()], Some(&above), 9);
        let told: Vec<_> = entries.iter().map(|e| (e.key.to_string(), e.reads_per_sec)).collect();
        let expected = [("ordered", 1.0), ("both", 7.0), ("own", 2.0)];
        assert_eq!(told, expected.map(|(k, n)| (k.to_string(), n)));
        assert_eq!(denied, ["x".into(), "y".into()]);
        assert_eq!(blend(own, Vec::new(), Some(&above), 1).0.len(), 1);
    }
}
