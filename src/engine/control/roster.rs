//! Who holds which lane of a counter.
//!
//! - **What**: one record a key, replaced by compare-and-set only: the generation of lanes that is
//!   written to, the names of their writers, the generation that is being retired, and what the
//!   retired ones came to.
//! - **Invariant**: a lane has one name within its generation; every lane that a writer may write
//!   to is in the read set of the same record.
//! - **Time and units**: none.
//! - **Bounds**: 256 lanes, names of 64 bytes; a record of at most 17 KiB.
//! - **Source**: epoch-fenced single writers (Chubby's lock generations); compaction as one
//!   rotation of generations that are never used again.
//!
//! A writer *claims, then confirms*: it takes a lane here, raises the lane's incarnation, and reads
//! this record once more. Retiring a generation replaces the record first and raises the
//! incarnation of its lanes then. So a writer either sees the new record when it confirms, or its
//! claim came before the fence, which ends it.

use std::fmt::Write;

/// Lanes of one generation at most.
pub const LANES_MAX: usize = 256;

/// The longest name of a writer, in bytes.
pub const NAME_BYTES_MAX: usize = 64;

/// Longer records are not read: names and numbers of every allowed size fit.
const RECORD_BYTES_MAX: usize = LANES_MAX * (NAME_BYTES_MAX + 1) + 256;

/// The record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Roster {
    /// Raised by every change.
    pub version: u64,
    /// The generation that is written to.
    pub generation: u64,
    /// Lanes of a generation at most.
    pub lanes_max: usize,
    /// The writer of each lane taken so far.
    pub names: Vec<String>,
    /// A generation that is being retired, and how many lanes it has.
    pub draining: Option<(u64, usize)>,
    /// What the retired generations came to.
    pub retired: i64,
}

/// How a writer stands to the roster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// It holds this lane.
    Mine(usize),
    /// There is a lane left.
    Free,
    /// There is none.
    Full,
}

/// Whether a writer may have this name.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-:".contains(&b);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

impl Roster {
    /// The first record of a key: its only writer is `name`.
    #[must_use]
    pub fn first(name: &str, lanes_max: usize) -> Roster {
        Roster {
            version: 1,
            generation: 1,
            lanes_max: lanes_max.clamp(1, LANES_MAX),
            names: vec![name.into()],
            draining: None,
            retired: 0,
        }
    }

    /// How `name` stands.
    #[must_use]
    pub fn place(&self, name: &str) -> Place {
        match self.names.iter().position(|n| n == name) {
            Some(lane) => Place::Mine(lane),
            None if self.names.len() < self.lanes_max => Place::Free,
            None => Place::Full,
        }
    }

    /// The record with a lane for `name`.
    #[must_use]
    pub fn with(&self, name: &str) -> Roster {
        let mut next = self.clone();
        next.version += 1;
        next.names.push(name.into());
        next
    }

    /// The record with a new generation, whose first lane is for `name`; `None` while an older one
    /// is being retired.
    #[must_use]
    pub fn rotated(&self, name: &str) -> Option<Roster> {
        if self.draining.is_some() {
            return None;
        }
        let mut next = self.clone();
        next.version += 1;
        next.generation += 1;
        next.draining = Some((self.generation, self.names.len()));
        next.names = vec![name.into()];
        Some(next)
    }

    /// The record without the draining generation, which came to `total`; `None` when the sum does
    /// not fit into 64 bits.
    #[must_use]
    pub fn retired(&self, total: i64) -> Option<Roster> {
        let retired = self.retired.checked_add(total)?;
        Some(Roster { version: self.version + 1, draining: None, retired, ..self.clone() })
    }

    /// Every lane that a sum reads, as (generation, lane).
    pub fn lanes(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let draining = self.draining.into_iter();
        let old = draining.flat_map(|(generation, lanes)| (0..lanes).map(move |l| (generation, l)));
        (0..self.names.len()).map(|lane| (self.generation, lane)).chain(old)
    }

    /// The record as bytes.
    #[must_use]
    pub fn encode(&self) -> String {
        let (old, lanes) = self.draining.unwrap_or((0, 0));
        let mut text = format!(
            "hs1 {} {} {} {} {old} {lanes}",
            self.version, self.generation, self.lanes_max, self.retired
        );
        for name in &self.names {
            // Writing to a string does not fail.
            let _ = write!(text, " {name}");
        }
        text
    }

    /// Reads a record; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Roster> {
        if bytes.len() > RECORD_BYTES_MAX {
            return None;
        }
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        if words.next()? != "hs1" {
            return None;
        }
        let version = words.next()?.parse().ok()?;
        let generation = words.next()?.parse().ok()?;
        let lanes_max = words.next()?.parse().ok()?;
        let retired = words.next()?.parse().ok()?;
        let old: u64 = words.next()?.parse().ok()?;
        let lanes: usize = words.next()?.parse().ok()?;
        let names: Vec<String> = words.map(str::to_owned).collect();
        let draining = (old > 0).then_some((old, lanes));
        let sound = (1..=LANES_MAX).contains(&lanes_max)
            && names.len() <= lanes_max
            && lanes <= LANES_MAX
            && old < generation
            && names.iter().all(|n| is_name(n));
        sound.then_some(Roster { version, generation, lanes_max, names, draining, retired })
    }
}

/// Whether compacting is worth while: of the lanes seen at two points in time, at least a quarter
/// have not moved in between. To retire the lane of a writer that lives does no harm, it claims
/// another; but were all of them alive, it would only go round in circles.
#[must_use]
pub fn worth_compacting<T: PartialEq>(before: &[T], after: &[T]) -> bool {
    let still = before.iter().zip(after).filter(|(a, b)| a == b).count();
    before.len() == after.len() && 4 * still >= before.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        With(u8),
        Rotate(u8),
        Retire(i32),
    }

    proptest! {
        /// K: what a writer may write to is always in what a reader reads, and no generation
        /// comes twice.
        #[test]
        fn every_record_reads_what_it_lets_write(steps in proptest::collection::vec(
            prop_oneof![
                3 => any::<u8>().prop_map(Step::With),
                1 => any::<u8>().prop_map(Step::Rotate),
                1 => any::<i32>().prop_map(Step::Retire),
            ], 0..60))
        {
            let mut roster = Roster::first("w", 4);
            let (mut retired, mut newest) = (0i64, 1);
            for step in steps {
                let before = roster.clone();
                match step {
                    Step::With(n) => {
                        let name = format!("w{n}");
                        if roster.place(&name) == Place::Free {
                            roster = roster.with(&name);
                        }
                    }
                    Step::Rotate(n) => {
                        if let Some(next) = roster.rotated(&format!("w{n}")) {
                            roster = next;
                            newest += 1;
                        }
                    }
                    Step::Retire(n) => {
                        if roster.draining.is_some() {
                            roster = roster.retired(n.into()).unwrap();
                            retired += i64::from(n);
                        }
                    }
                }
                prop_assert!(roster == before || roster.version == before.version + 1);
                prop_assert_eq!((roster.generation, roster.retired), (newest, retired));
                for name in &roster.names {
                    let Place::Mine(lane) = roster.place(name) else { panic!() };
                    prop_assert!(roster.lanes().any(|l| l == (roster.generation, lane)));
                }
                if let Some((old, lanes)) = roster.draining {
                    prop_assert!((0..lanes).all(|l| roster.lanes().any(|x| x == (old, l))));
                }
                prop_assert_eq!(Roster::parse(roster.encode().as_bytes()), Some(roster.clone()));
            }
        }

        #[test]
        fn bytes_from_anywhere_do_not_panic_and_are_never_an_empty_roster(bytes: Vec<u8>) {
            prop_assert_eq!(Roster::parse(&bytes), None);
        }
    }

    #[test]
    fn a_record_that_was_not_written_by_encode_is_refused() {
        for text in [
            "",
            "hs1",
            "hs2 1 1 4 0 0 0 a",
            "hs1 1 1 4 0 0 0 a b c d e",
            "hs1 1 1 4 0 0 0 a  b",
            "hs1 1 1 4 0 1 3 a",
            "hs1 1 2 4 0 1 9999 a",
            "hs1 1 1 9999 0 0 0 a",
        ] {
            assert_eq!(Roster::parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn compaction_waits_for_a_quarter_of_still_lanes() {
        assert!(worth_compacting(&[1, 2, 3, 4], &[1, 9, 9, 9]));
        assert!(!worth_compacting(&[1, 2, 3, 4], &[9, 9, 9, 9]));
        assert!(!worth_compacting(&[1, 2, 3, 4], &[1, 2, 3]));
    }
}
