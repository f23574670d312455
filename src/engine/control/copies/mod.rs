//! Copies of one read-hot key on several shards.
//!
//! - **What**: which store operations a put, a delete, a get and a change of the set consist of,
//!   so that any copy may be read and no reader goes back in time.
//! - **Invariant**: a copy is labelled with a version and a digest such that the base key held
//!   exactly these bytes while its version cell had that number; a write is complete only when no
//!   copy that anybody may read is older; every writer's set holds every reader's.
//! - **Time and units**: ticks; [`Plan::fill`] and [`Plan::in_flight`] must together stay below
//!   [`Plan::ttl`], or a late fill can land on a copy that has expired.
//! - **Bounds**: [`COPIES_MAX`] copies; [`Plan::rounds_max`] attempts of one operation.
//! - **Source**: `research/copies.md`, rules W1 to W8, R1 to R6, L1 to L5, and its checked model.
//!
//! The base key is the truth and stays plain: other programs may read it. Beside it, in its hash
//! slot, stands a counter per generation, the *cell*. A write changes the base, bumps the cell and
//! then takes a **snapshot**, "the base held these bytes while the cell was v", which it puts on
//! every copy that is not newer. It never labels its own bytes: between its put and its bump
//! another writer may have come.
//!
//! A reader holds each copy against the **floor** of its process ([`read::Floor`]), the label of
//! the newest value that any of its reads has returned.
//!
//! # Forms
//!
//! | form | the store must | operations a put adds | promise |
//! |---|---|---|---|
//! | [`Form::Sandwich`] | put only if newer | N + 3 | all of it |
//! | [`Form::Joint`] | and read two keys at one instant | N + 2 | all of it |
//! | [`Form::Pair`] | and write and count in one step | N + 1 | all of it |
//! | [`Form::DeleteTwice`] | nothing more than get, put, delete | 2 N deletes | a process's reads never go back; a put is seen everywhere once [`Plan::fill`] + [`Plan::in_flight`] after it the copies are deleted again |
//! | [`Form::TtlOnly`] | the same | 0 | a process's reads never go back; a value is stale for `fill + in_flight + ttl` at most |
//!
//! "All of it": a process's reads never go back, its own writes included; a get that begins after
//! a put or delete has returned [`Reach::All`] returns that or newer, in every process; a deleted
//! value does not come back. What is not covered (a crashed writer, a write behind heatsink's
//! back, [`Reach::Ttl`]) is stale for `fill + in_flight + ttl` at most.

pub mod life;
pub mod read;
pub mod size;
pub mod snapshot;
pub mod write;

use super::super::time::Tick;
use bytes::{BufMut, Bytes, BytesMut};
use std::time::Duration;

/// Copies of one key at most.
pub const COPIES_MAX: u16 = 256;

/// The set of copies of a key, as its record carries it. Writers learn of a copy before readers
/// do, and forget it after them: `writers >= readers`, always.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Set {
    /// The life of the set: part of all names, never used again.
    pub generation: u64,
    /// Copies 0 to here, exclusive, are written.
    pub writers: u16,
    /// Copies 0 to here, exclusive, are read.
    pub readers: u16,
}

/// Which operations the store offers, and so how a snapshot is taken. See the module's table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Form {
    /// Cell, base, cell again, until the cell has not moved.
    Sandwich,
    /// Base and cell are read at one instant.
    Joint,
    /// As `Joint`; and a put of the base bumps the cell in the same step.
    Pair,
    /// A write deletes all copies, at once and once more when no fill can be under way.
    DeleteTwice,
    /// A write leaves the copies to their time to live.
    TtlOnly,
}

impl Form {
    /// Copies carry versions, and are put only where they are newer.
    #[must_use]
    pub fn versioned(self) -> bool {
        matches!(self, Form::Sandwich | Form::Joint | Form::Pair)
    }
}

/// The form and the times that all machines of one key work with.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How the store is used.
    pub form: Form,
    /// The greatest age of a snapshot at the moment when a copy is written from it.
    pub fill: Duration,
    /// How long after it was given up a call may still be applied.
    pub in_flight: Duration,
    /// How long a copy lives after it was written.
    pub ttl: Duration,
    /// Attempts of one operation before it gives up.
    pub rounds_max: u32,
    /// A rule left out, for tests that must notice it.
    #[doc(hidden)]
    pub mutant: Option<Mutant>,
}

impl Plan {
    /// A plan with a time to live that outlasts every fill: the sum of the two, and a quarter.
    #[must_use]
    pub fn new(form: Form, fill: Duration, in_flight: Duration) -> Plan {
        let least = fill.saturating_add(in_flight);
        let ttl = least.saturating_add(least / 4);
        Plan { form, fill, in_flight, ttl, rounds_max: 64, mutant: None }
    }

    pub(crate) fn broken(&self, by: Mutant) -> bool {
        self.mutant == Some(by)
    }
}

/// The label of a value: the number of the cell and the digest of the bytes.
///
/// Both are needed. Between a put of the base and the bump that follows it, two values stand
/// under one number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Label {
    /// The number of the cell; zero when there is none.
    pub version: u64,
    /// See [`digest`].
    pub digest: u64,
}

/// A 64-bit digest of a value; zero stands for "there is none". The same in every process.
///
/// Source: FNV-1a, finished by the mixer of splitmix64.
#[must_use]
pub fn digest(bytes: Option<&[u8]>) -> u64 {
    let Some(bytes) = bytes else { return 0 };
    let fnv = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h: u64, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut z = fnv ^ (bytes.len() as u64);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).max(1)
}

/// What the base held while the cell had the label's number; what a copy holds.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Image {
    /// Number and digest.
    pub label: Label,
    /// The bytes; `None`: the key was absent. On a copy that is a tombstone.
    pub bytes: Option<Bytes>,
    /// When the base read was sent; zero for what came from a copy.
    pub taken: Tick,
}

/// What every copy begins with, so that a user's value in its place is not taken for one.
const MAGIC: [u8; 4] = *b"hsc1";
const HEADER_BYTES: usize = 4 + 1 + 8 + 8;

impl Image {
    /// The image of `bytes` under `version`.
    #[must_use]
    pub fn new(version: u64, bytes: Option<Bytes>, taken: Tick) -> Image {
        Image { label: Label { version, digest: digest(bytes.as_deref()) }, bytes, taken }
    }

    /// As a copy holds it: a header and the bytes.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let body = self.bytes.as_deref().unwrap_or_default();
        let mut out = BytesMut::with_capacity(HEADER_BYTES + body.len());
        out.put_slice(&MAGIC);
        out.put_u8(u8::from(self.bytes.is_none()));
        out.put_u64(self.label.version);
        out.put_u64(self.label.digest);
        out.put_slice(body);
        out.freeze()
    }

    /// Reads a copy; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn decode(copy: &Bytes) -> Option<Image> {
        let head = copy.get(..HEADER_BYTES)?;
        let number = |at: usize| head[at..at + 8].iter().fold(0, |n, &b| n << 8 | u64::from(b));
        let (absent, body) = (head[4], copy.slice(HEADER_BYTES..));
        let bytes = (absent == 0).then(|| body.clone());
        let label = Label { version: number(5), digest: number(13) };
        let sound = head[..4] == MAGIC
            && absent <= 1
            && (absent == 0 || body.is_empty())
            && label.digest == digest(bytes.as_deref());
        sound.then_some(Image { label, bytes, taken: Tick::ZERO })
    }

    /// Whether a copy may be written from it at `now`.
    #[must_use]
    pub fn young(&self, plan: &Plan, now: Tick) -> bool {
        now.since(self.taken) < plan.fill
    }
}

/// How far a write has come when it returns.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reach {
    /// Whoever reads from now on, in any process, gets this value or a newer one.
    All,
    /// The base holds it. A copy may show an older one until its time to live has passed.
    Ttl,
}

/// What came of an operation on one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer<T> {
    /// It was applied.
    Applied(T),
    /// It was not and will not be.
    NotApplied,
    /// Nobody knows, and it may still be.
    Unknown,
}

/// Rules of the protocol, each of which a test leaves out to see that it is missed. The names in
/// brackets are those of the checked model.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mutant {
    /// Labels its own bytes instead of taking a snapshot (C1).
    NoReread,
    /// Bumps before the put, and takes a refusal for success (C2).
    BumpFirst,
    /// Leaves the copies to whoever bumped after it (C8).
    Skip,
    /// A copy write without an answer counts (C12).
    UnackedCounts,
    /// Does not settle after an unknown put (C17).
    NoSettle,
    /// Puts copies whatever is there (C18).
    PlainPut,
    /// Takes every refusal for success (F6, F7).
    RefusedIsDone,
    /// Holds what refused it against the cell only (F8).
    RefusedAgainstCell,
    /// Deletes the copies instead of leaving tombstones (C9).
    PhysicalDelete,
    /// A delete takes the cell with it (C10).
    DropCell,
    /// Tombstones have the highest version (C11).
    TombstoneMax,
    /// Reads are held against nothing (C3).
    NoFloor,
    /// The floor is a version alone (C4, C19, C20, G7).
    NoDigest,
    /// A copy is held against the floor as it was when the read began (C5).
    FloorAtStart,
    /// A base read is not held against the floor (C6).
    BaseUnchecked,
    /// The cell is not read a second time (C7).
    LooseLabel,
    /// Copies are read as soon as the record is known (E7).
    JoinOff,
    /// Joined by a snapshot that overlaps a plain read (E8).
    JoinOverlapping,
    /// Joined by a snapshot sent before the record was loaded (E9).
    JoinStale,
    /// A copy read of one generation is held against the floor of another (E17).
    FloorOfAnother,
    /// A base result is lost when the record has moved on (E15).
    BaseResultLost,
    /// Copies expire under a fill (C13, C14).
    ShortTtl,
    /// Fills read a replica (C15).
    FromReplica,
    /// Fills read another copy (C16).
    FromCopy,
    /// Nobody helps where a writer has crashed (C21).
    NoHelper,
    /// Announced and opened in one step (E1).
    OneStep,
    /// Opened without waiting for the writers, at the first announcement (E2) or a growth (E3).
    NoWriterWait,
    /// Readers do not join again when the set grows (E4).
    NoRejoin,
    /// The same, the copies warmed before the wait instead of after it (E5).
    WarmBeforeWait,
    /// The lease is looked at before the put instead of after its acknowledgement (E6).
    LeaseBeforeAck,
    /// Writers leave before the readers (E10).
    WritersLeaveFirst,
    /// Writers leave without waiting for the readers (E11).
    NoReaderWait,
    /// The next life uses the names of the last (E12, E14).
    SameNames,
    /// The same, and the cell was dropped (E13).
    SameNamesNoCell,
    /// Opened without warming (E16).
    NoWarm,
    /// The copies are deleted once only (G5).
    OneDelete,
    /// The reduced form writes the copies (G6).
    ReducedWrites,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_copy_reads_back_as_it_was_written(
            version: u64, bytes in proptest::option::of(any::<Vec<u8>>()),
        ) {
            let image = Image::new(version, bytes.map(Bytes::from), Tick::ZERO);
            prop_assert_eq!(Image::decode(&image.encode()), Some(image));
        }

        #[test]
        fn bytes_from_anywhere_are_no_copy(bytes: Vec<u8>, at in 0usize..40, bit in 0u8..8) {
            prop_assert_eq!(Image::decode(&bytes.into()), None);
            // Nor is a copy with one bit turned, unless it is one of the version's.
            let mut copy = Image::new(7, Some("some bytes of a value".into()), Tick::ZERO)
                .encode().to_vec();
            copy[at] ^= 1 << bit;
            prop_assert!((5..13).contains(&at) || Image::decode(&copy.into()).is_none());
        }
    }

    #[test]
    fn an_empty_value_and_no_value_differ() {
        assert_ne!(digest(Some(b"")), digest(None));
        let tombstone = Image::new(3, None, Tick::ZERO);
        assert_eq!(Image::decode(&tombstone.encode()).unwrap().bytes, None);
    }

    /// Stable across processes, machines and versions: it stands in the store.
    #[test]
    fn a_digest_never_changes() {
        assert_eq!(digest(Some(b"hello")), 3_653_398_781_487_292_943);
    }
}
