//! Physical names: what heatsink stores beside a key of the user's.
//!
//! Each begins with a hash tag of its own, so that everything that belongs to one key lies in one
//! hash slot of a Redis Cluster, whatever tags the key itself holds. The prefix `{hs:` is
//! reserved: a key of the user's that begins with it could collide.

use crate::engine::control::salt::{Gen, Kind, Slot, fnv1a_64, mix};
use crate::key::Key;

/// What a physical name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// Never stored: the flight that loads the sum of a counter.
    Sum,
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
}

impl Part {
    /// The name of this part of `key`. Stable across processes, machines and versions.
    pub(crate) fn of(self, key: &[u8]) -> Key {
        let tag = mix(fnv1a_64(key));
        let head = match self {
            Part::Sum => format!("{{hs:{tag:016x}}}sum:"),
            Part::LaneSum => format!("{{hs:{tag:016x}}}lanes:"),
            Part::Roster => format!("{{hs:{tag:016x}}}roster:"),
            Part::Lane { generation, lane } => {
                format!("{{hs:{tag:016x}}}lane.{generation}.{lane}:")
            }
            Part::Correction => format!("{{hs:{tag:016x}}}fix:"),
            Part::Record => format!("{{hs:{tag:016x}}}record:"),
        };
        let mut name = head.into_bytes();
        name.extend_from_slice(key);
        Key::from(name)
    }
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
            ];
            let names: std::collections::BTreeSet<_> =
                parts.iter().map(|p| p.of(key.as_bytes())).collect();
            assert_eq!(names.len(), parts.len());
            let slots: std::collections::BTreeSet<_> =
                names.iter().map(|n| cluster_slot(n)).collect();
            assert_eq!(slots.len(), 1, "{names:?}");
        }
    }

    #[test]
    fn names_do_not_change_from_version_to_version() {
        assert_eq!(Part::Roster.of(b"likes"), Key::from("{hs:f69eede185513cdf}roster:likes"));
    }
}
