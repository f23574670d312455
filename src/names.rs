//! Physical names: what heatsink stores beside a key of the user's.
//!
//! Each begins with a hash tag of its own, so that everything that belongs to one key lies in one
//! hash slot of a Redis Cluster, whatever tags the key itself holds; buckets and slots, which are
//! there to be spread, have one each. The prefix `{hs:` is
//! reserved: a key of the user's that begins with it could collide.

use crate::engine::control::salt::{Gen, Kind, Slot, fnv1a_64, mix};
use crate::key::{self, Key};

/// What a physical name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// Never stored: the flight that loads the sum of a counter.
    Sum,
    /// The sum of a salted counter, written by one process.
    Total,
    /// Never stored: the flight that loads the sum of a buffered counter.
    LaneSum,
    /// Who holds which lane.
    Roster,
    /// The lane with this number, of this generation.
    Lane { generation: u64, lane: usize },
    /// What a recount has found the lanes to be short of.
    Correction,
    /// Over which names the key is spread.
    Record,
    /// The record of a stock.
    Stock,
    /// Never stored: the flight that reads all buckets of a stock.
    StockLook,
    /// A bucket of a stock. Unlike the others it lies in a hash slot of its own, which `seed`
    /// chooses.
    Bucket { seed: u64, bucket: usize },
    /// The record of a pool of tokens.
    Tokens,
    /// Never stored: the flight that counts all lists of a pool.
    TokensLook,
    /// A list of tokens, spread like a bucket.
    List { seed: u64, bucket: usize },
    /// The record of a striped balance.
    Account,
    /// Never stored: the flight that reads all rows of a balance.
    AccountLook,
    /// A row of a balance, spread like a bucket: the main account first, then the stripes.
    Stripe { seed: u64, bucket: usize },
    /// The bucket of a shared limit.
    Limit,
}

impl Part {
    /// The name of this part of `key`. Stable across processes, machines and versions.
    pub(crate) fn of(self, key: &[u8]) -> Key {
        let tag = match self {
            Part::Bucket { seed, bucket }
            | Part::List { seed, bucket }
            | Part::Stripe { seed, bucket } => {
                mix(fnv1a_64(key) ^ mix(seed.wrapping_add(bucket as u64)))
            }
            _ => mix(fnv1a_64(key)),
        };
        let head = match self {
            Part::Sum => format!("{{hs:{tag:016x}}}sum:"),
            Part::Total => format!("{{hs:{tag:016x}}}total:"),
            Part::LaneSum => format!("{{hs:{tag:016x}}}lanes:"),
            Part::Roster => format!("{{hs:{tag:016x}}}roster:"),
            Part::Lane { generation, lane } => {
                format!("{{hs:{tag:016x}}}lane.{generation}.{lane}:")
            }
            Part::Correction => format!("{{hs:{tag:016x}}}fix:"),
            Part::Record => format!("{{hs:{tag:016x}}}record:"),
            Part::Stock => format!("{{hs:{tag:016x}}}stock:"),
            Part::StockLook => format!("{{hs:{tag:016x}}}look:"),
            Part::Bucket { seed, bucket } => {
                format!("{{hs:{tag:016x}}}units.{seed}.{bucket}:")
            }
            Part::Tokens => format!("{{hs:{tag:016x}}}tokens:"),
            Part::TokensLook => format!("{{hs:{tag:016x}}}tokens.look:"),
            Part::List { seed, bucket } => format!("{{hs:{tag:016x}}}list.{seed}.{bucket}:"),
            Part::Account => format!("{{hs:{tag:016x}}}account:"),
            Part::AccountLook => format!("{{hs:{tag:016x}}}account.look:"),
            Part::Stripe { seed, bucket } => format!("{{hs:{tag:016x}}}stripe.{seed}.{bucket}:"),
            Part::Limit => format!("{{hs:{tag:016x}}}limit:"),
        };
        let mut name = head.into_bytes();
        name.extend_from_slice(key);
        Key::from(name)
    }
}

/// The key of the user's that a name belongs to: itself, unless it is one of ours.
pub(crate) fn user_key(name: &[u8]) -> &[u8] {
    let Some(rest) = name.strip_prefix(b"{hs:") else { return name };
    let tag = rest.iter().position(|&byte| byte == b'}');
    let head =
        tag.and_then(|tag| rest[tag..].iter().position(|&byte| byte == b':').map(|at| tag + at));
    head.map_or(name, |head| &rest[head + 1..])
}

/// The copy with this number: in a hash slot of its own, whatever tags the key holds. A tag made of
/// the whole name would put all copies of a key with a tag into one slot.
pub(crate) fn copy(key: &[u8], generation: u64, i: u16) -> Key {
    let tag = mix(fnv1a_64(key) ^ mix(generation.wrapping_add(u64::from(i) + 1)));
    let head = format!("{{hs:{tag:016x}}}copy.{generation:x}.{i}:");
    Key::from([head.as_bytes(), key].concat())
}

/// The version cell of a generation of copies: in the hash slot of the key itself, so that both
/// fail over together.
pub(crate) fn cell(key: &[u8], generation: u64) -> Key {
    Key::from(beside(key, &format!("cell.{generation:x}")))
}

/// The key that stands beside `key` in its slot and holds what is remembered of it: ids, holds.
///
/// It is `{tag}\x01hs:what`, followed by the key where that is more than its tag. A key whose tag
/// cannot be repeated in braces gets the first number that falls into its slot for a tag.
pub(crate) fn beside(key: &[u8], what: &str) -> Vec<u8> {
    let slot = key::cluster_slot(key);
    let named = |tag: &[u8]| {
        let (colon, rest): (&[u8], _) = if tag == key { (b"", &b""[..]) } else { (b":", key) };
        [b"{", tag, b"}\x01hs:", what.as_bytes(), colon, rest].concat()
    };
    let plain = named(key::hash_tag(key));
    if key::cluster_slot(&plain) == slot {
        return plain;
    }
    // One in 16,384 numbers falls into a slot; a hundred times as many miss it with e^-100.
    let mut tags = (0..1_638_400u32).map(|n| n.to_string());
    let tag = tags.find(|tag| key::cluster_slot(tag.as_bytes()) == slot).unwrap_or_default();
    named(tag.as_bytes())
}

/// The list of all keys that have a record.
pub(crate) fn list() -> Key {
    Key::from("{hs:registry}list")
}

/// Which list is in force.
pub(crate) fn root() -> Key {
    Key::from("{hs:registry}root")
}

/// Where one slot of a salted counter is kept: in a hash slot of its own, whatever tags the key
/// holds.
pub(crate) fn slot(key: &Key, slot: Slot) -> Key {
    let Slot { of: Gen { id, seed, kind, .. }, index } = slot;
    let head = match kind {
        Kind::Home => return key.clone(),
        Kind::Parity => return Key::from([key, &b"#"[..], index.to_string().as_bytes()].concat()),
        Kind::Slots => {
            let of = (u64::from(seed) << 32) | u64::from(id);
            let tag = mix(mix(fnv1a_64(key) ^ of).wrapping_add(u64::from(index)));
            format!("{{hs:{tag:016x}}}slot.{id}.{index}:")
        }
    };
    Key::from([head.as_bytes(), key].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::cluster_slot;

    #[test]
    fn the_parts_of_one_key_share_a_slot_and_differ() {
        for key in ["likes", "{post:9}likes", "{}", "}{", ""] {
            let parts = [
                Part::Sum,
                Part::LaneSum,
                Part::Roster,
                Part::Lane { generation: 1, lane: 0 },
                Part::Lane { generation: 1, lane: 10 },
                Part::Lane { generation: 11, lane: 0 },
                Part::Correction,
                Part::Record,
                Part::Stock,
                Part::StockLook,
                Part::Tokens,
                Part::TokensLook,
                Part::Account,
                Part::AccountLook,
                Part::Limit,
            ];
            let names: std::collections::BTreeSet<_> =
                parts.iter().map(|p| p.of(key.as_bytes())).collect();
            assert_eq!(names.len(), parts.len());
            let slots: std::collections::BTreeSet<_> =
                names.iter().map(|n| cluster_slot(n)).collect();
            assert_eq!(slots.len(), 1, "{names:?}");
            assert!(names.iter().all(|name| user_key(name) == key.as_bytes()), "{names:?}");
            assert_eq!(user_key(key.as_bytes()), key.as_bytes());
        }
    }

    #[test]
    fn buckets_lie_in_slots_of_their_own() {
        let slots: std::collections::BTreeSet<_> = (0..256)
            .map(|b| cluster_slot(&Part::Bucket { seed: 1, bucket: b }.of(b"sku")))
            .collect();
        assert!(slots.len() > 250, "{} slots", slots.len());
    }

    #[test]
    fn copies_lie_in_slots_of_their_own_and_the_cell_in_its_keys() {
        for name in ["post:9", "{u1}:post", "a}b{", "{}", ""] {
            let key = name.as_bytes();
            let slots: std::collections::BTreeSet<_> =
                (0..8).map(|i| cluster_slot(&copy(key, 7, i))).collect();
            assert!(slots.len() >= 7, "{name}: {slots:?}");
            assert_eq!(cluster_slot(&cell(key, 7)), cluster_slot(key), "{name}");
            assert_ne!(copy(key, 1, 11), copy(key, 11, 1));
            assert_ne!(cell(key, 1), cell(key, 2));
        }
    }

    #[test]
    fn names_do_not_change_from_version_to_version() {
        assert_eq!(Part::Roster.of(b"likes"), Key::from("{hs:f69eede185513cdf}roster:likes"));
    }
}
