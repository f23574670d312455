//! Values that combine without being counted: a maximum, a minimum, the union of a set.
//!
//! - **What**: how two of them are joined, and how one is written in a place of the store.
//! - **Invariant**: joining is commutative, associative and idempotent, so that a value may be
//!   copied from place to place, sent again and delivered twice: [`Joined::join`] of what is there
//!   already changes nothing. What is written reads back, and nothing else is read.
//! - **Time and units**: none.
//! - **Bounds**: [`MEMBERS_MAX`] members and [`SET_BYTES_MAX`] bytes of a set for who adds to it, a
//!   member of [`MEMBER_BYTES_MAX`] bytes; what is joined from several places to one
//!   holds [`JOINED_BYTES_MAX`] bytes.
//! - **Source**: state-based replicated data types over a join semilattice (Shapiro, Preguiça,
//!   Baquero and Zawirski 2011).
//!
//! The bare key holds a maximum as the decimal digits that any program writes. A slot begins with a
//! mark that says whether it is sealed: who replaces a value by compare-and-set can seal it so, in
//! any store.

use bytes::Bytes;
use std::collections::BTreeSet;

/// Members of a set, for who adds one.
pub const MEMBERS_MAX: usize = 1024;

/// Bytes of a set as it is written, for who adds to it.
pub const SET_BYTES_MAX: usize = 64 << 10;

/// Bytes of a member.
pub const MEMBER_BYTES_MAX: usize = 1024;

/// Bytes of what is joined from several places to one.
pub const JOINED_BYTES_MAX: usize = 1 << 20;

/// How the values of one key combine.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Op {
    /// They add up.
    #[default]
    Sum,
    /// The greatest stays.
    Max,
    /// The least stays.
    Min,
    /// All members of all sets.
    Union,
}

impl Op {
    /// Whether combining a value twice is the same as combining it once.
    #[must_use]
    pub fn joins(self) -> bool {
        self != Op::Sum
    }

    /// Two numbers combined; `None` when they do not fit into 64 bits.
    #[must_use]
    pub fn combine(self, a: i64, b: i64) -> Option<i64> {
        match self {
            Op::Sum => a.checked_add(b),
            Op::Max => Some(a.max(b)),
            Op::Min => Some(a.min(b)),
            // Sets are not numbers, and nobody combines them so.
            Op::Union => None,
        }
    }

    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Op::Sum => "sum",
            Op::Max => "max",
            Op::Min => "min",
            Op::Union => "union",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Op> {
        [Op::Sum, Op::Max, Op::Min, Op::Union].into_iter().find(|op| op.word() == word)
    }

    /// Slots at most: the sets of all slots are read together.
    #[must_use]
    pub fn slots_max(self) -> u16 {
        if self == Op::Union { 16 } else { u16::MAX }
    }
}

/// A value that joins with others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Joined {
    /// The greatest number so far.
    Max(Option<i64>),
    /// The least number so far.
    Min(Option<i64>),
    /// The members so far.
    Union(BTreeSet<Bytes>),
}

/// What a place holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The value.
    pub value: Joined,
    /// Nothing is joined to it any more.
    pub sealed: bool,
}

impl Joined {
    /// Nothing yet; `None` for sums, which do not join.
    #[must_use]
    pub fn empty(op: Op) -> Option<Joined> {
        match op {
            Op::Sum => None,
            Op::Max => Some(Joined::Max(None)),
            Op::Min => Some(Joined::Min(None)),
            Op::Union => Some(Joined::Union(BTreeSet::new())),
        }
    }

    /// One number; `None` for what is not made of numbers.
    #[must_use]
    pub fn number(op: Op, n: i64) -> Option<Joined> {
        match op {
            Op::Max => Some(Joined::Max(Some(n))),
            Op::Min => Some(Joined::Min(Some(n))),
            Op::Sum | Op::Union => None,
        }
    }

    /// How it combines.
    #[must_use]
    pub fn op(&self) -> Op {
        match self {
            Joined::Max(_) => Op::Max,
            Joined::Min(_) => Op::Min,
            Joined::Union(_) => Op::Union,
        }
    }

    /// Joins `other` to it; whether it is more now. What combines in another way changes nothing.
    pub fn join(&mut self, other: &Joined) -> bool {
        match (self, other) {
            (Joined::Max(own), Joined::Max(n)) => replace_if(own, *n, |own, n| n > own),
            (Joined::Min(own), Joined::Min(n)) => replace_if(own, *n, |own, n| n < own),
            (Joined::Union(own), Joined::Union(more)) => {
                let before = own.len();
                own.extend(more.iter().cloned());
                own.len() > before
            }
            _ => false,
        }
    }

    /// Whether who adds to it may leave it like this.
    #[must_use]
    pub fn has_room(&self) -> bool {
        match self {
            Joined::Union(set) => set.len() <= MEMBERS_MAX && self.size() <= SET_BYTES_MAX,
            Joined::Max(_) | Joined::Min(_) => true,
        }
    }

    /// Bytes as it is written, about.
    #[must_use]
    pub fn size(&self) -> usize {
        match self {
            Joined::Union(set) => set.iter().map(|member| member.len() + 5).sum::<usize>() + 1,
            Joined::Max(_) | Joined::Min(_) => 21,
        }
    }

    /// As the bare key holds it; `None` where there is nothing to hold.
    #[must_use]
    pub fn encode(&self) -> Option<Bytes> {
        match self {
            Joined::Max(n) | Joined::Min(n) => n.map(|n| n.to_string().into()),
            Joined::Union(set) if set.is_empty() => None,
            Joined::Union(_) => Some(self.marked(b'=')),
        }
    }

    /// As a slot holds it.
    #[must_use]
    pub fn encode_slot(&self, sealed: bool) -> Bytes {
        self.marked(if sealed { b'!' } else { b'=' })
    }

    fn marked(&self, mark: u8) -> Bytes {
        let mut out = vec![mark];
        match self {
            Joined::Max(n) | Joined::Min(n) => {
                out.extend(n.iter().flat_map(|n| n.to_string().into_bytes()));
            }
            Joined::Union(set) => {
                for member in set {
                    out.extend_from_slice(member.len().to_string().as_bytes());
                    out.push(b':');
                    out.extend_from_slice(member);
                }
            }
        }
        out.into()
    }

    /// Reads what the bare key holds; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn parse(op: Op, bytes: &Bytes) -> Option<Joined> {
        match op {
            Op::Union => Joined::parse_slot(op, bytes).filter(|at| !at.sealed).map(|at| at.value),
            _ => Joined::number(op, number(bytes)?),
        }
    }

    /// Reads what a slot holds; `None` for anything that `encode_slot` does not write, or that is
    /// beyond the bounds.
    #[must_use]
    pub fn parse_slot(op: Op, bytes: &Bytes) -> Option<Place> {
        (bytes.len() <= JOINED_BYTES_MAX + 1).then(|| Joined::parse_own(op, bytes))?
    }

    /// The same of what this process has written itself: all places of a set together may hold
    /// more than one of them may.
    #[must_use]
    pub fn parse_own(op: Op, bytes: &Bytes) -> Option<Place> {
        let sealed = match bytes.first()? {
            b'=' => false,
            b'!' => true,
            _ => return None,
        };
        let rest = bytes.slice(1..);
        let value = match op {
            Op::Sum => return None,
            Op::Union => Joined::Union(members(&rest)?),
            _ if rest.is_empty() => Joined::empty(op)?,
            _ => Joined::number(op, number(&rest)?)?,
        };
        Some(Place { value, sealed })
    }
}

fn replace_if(own: &mut Option<i64>, n: Option<i64>, better: fn(i64, i64) -> bool) -> bool {
    let Some(n) = n.filter(|n| own.is_none_or(|own| better(own, *n))) else { return false };
    *own = Some(n);
    true
}

fn number(bytes: &[u8]) -> Option<i64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// Members in their order, each once.
fn members(bytes: &Bytes) -> Option<BTreeSet<Bytes>> {
    let (mut at, mut set) = (0, BTreeSet::new());
    while at < bytes.len() {
        let colon = bytes[at..].iter().take(6).position(|b| *b == b':')? + at;
        let len = number(&bytes[at..colon]).and_then(|n| usize::try_from(n).ok())?;
        let end = (colon + 1).checked_add(len).filter(|end| *end <= bytes.len())?;
        if len > MEMBER_BYTES_MAX || !set.insert(bytes.slice(colon + 1..end)) {
            return None;
        }
        at = end;
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers() -> impl Strategy<Value = Option<i64>> {
        proptest::option::of(-3i64..3)
    }

    fn sets() -> impl Strategy<Value = Joined> {
        let member = proptest::collection::vec(0u8..4, 0..3).prop_map(Bytes::from);
        proptest::collection::btree_set(member, 0..5).prop_map(Joined::Union)
    }

    fn value() -> impl Strategy<Value = Joined> {
        let (max, min) = (numbers().prop_map(Joined::Max), numbers().prop_map(Joined::Min));
        prop_oneof![max, min, sets()]
    }

    /// Three that combine in the same way.
    fn three() -> impl Strategy<Value = [Joined; 3]> {
        prop_oneof![
            [numbers(), numbers(), numbers()].prop_map(|all| all.map(Joined::Max)),
            [numbers(), numbers(), numbers()].prop_map(|all| all.map(Joined::Min)),
            [sets(), sets(), sets()],
        ]
    }

    fn joined(mut a: Joined, b: &Joined) -> Joined {
        a.join(b);
        a
    }

    proptest! {
        #[test]
        fn joining_is_commutative_associative_and_idempotent([a, b, c] in three()) {
            let ab = joined(a.clone(), &b);
            prop_assert_eq!(&ab, &joined(b.clone(), &a));
            prop_assert_eq!(joined(ab.clone(), &c), joined(a.clone(), &joined(b.clone(), &c)));
            prop_assert!(!ab.clone().join(&a) && !ab.clone().join(&b));
        }

        #[test]
        fn what_is_written_reads_back_and_nothing_else_does(
            a in value(), sealed: bool, noise: Vec<u8>,
        ) {
            let slot = a.encode_slot(sealed);
            let place = Some(Place { value: a.clone(), sealed });
            prop_assert_eq!(Joined::parse_slot(a.op(), &slot), place);
            if let Some(bare) = a.encode() {
                prop_assert_eq!(Joined::parse(a.op(), &bare), Some(a.clone()));
            }
            let noise = Bytes::from(noise);
            if let Some(place) = Joined::parse_slot(Op::Union, &noise) {
                prop_assert!(place.value.size() >= noise.len() / 2);
            }
        }
    }

    #[test]
    fn what_combines_in_another_way_changes_nothing() {
        let mut max = Joined::Max(Some(3));
        assert!(!max.join(&Joined::Min(Some(9))));
        assert_eq!((max, Joined::empty(Op::Sum)), (Joined::Max(Some(3)), None));
        assert_eq!(Op::Sum.combine(i64::MAX, 1), None);
        assert_eq!((Op::Max.combine(-4, 2), Op::Min.combine(-4, 2)), (Some(2), Some(-4)));
    }

    #[test]
    fn a_set_beyond_its_bounds_has_no_room_and_is_still_read() {
        let set = (0..=MEMBERS_MAX).map(|i| Bytes::from(i.to_string())).collect();
        let set = Joined::Union(set);
        assert!(!set.has_room());
        let slot = set.encode_slot(false);
        assert_eq!(Joined::parse_slot(Op::Union, &slot).map(|p| p.value), Some(set));
        let huge = (0..1100).map(|i| Bytes::from(format!("{i:01000}"))).collect();
        let huge = Joined::Union(huge);
        let written = huge.encode_slot(false);
        assert_eq!(Joined::parse_slot(Op::Union, &written), None);
        assert_eq!(Joined::parse_own(Op::Union, &written).map(|p| p.value), Some(huge));
        let long = Bytes::from(vec![b'x'; MEMBER_BYTES_MAX + 1]);
        let long = Joined::Union([long].into()).encode_slot(false);
        assert_eq!(Joined::parse_slot(Op::Union, &long), None);
    }
}
