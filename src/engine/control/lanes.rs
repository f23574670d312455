//! One writer's lane of a counter that is added up in memory first.
//!
//! - **What**: a lane holds one writer's absolute total, with the version that wrote it; the writer
//!   sends the newest total, applied only if newer, and needs no rollback when that fails.
//! - **Invariant**: a lane's total never exceeds what its writers were given, and is never below
//!   what an acknowledged flush wrote; an amount is in a lane once or not at all.
//! - **Time and units**: none; a flush has a number, counted by the writer.
//! - **Bounds**: a few words, whatever the number of adds.
//! - **Source**: single-writer cumulative sums of the OpenTelemetry metrics data model; the
//!   incarnation of a G-counter replica after a crash; riak issue 679 for the read back.
//!
//! The bytes of a lane name the flush that wrote them and the last flush of the incarnation before.
//! So a writer that finds itself refused can tell, in all cases but one, which of its flushes of
//! unknown outcome are in the total. The one: two successors have written since. Then what is in
//! doubt is given up as unknown, never added a second time.

use crate::store::Version;

/// What the bytes of a lane say.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct LaneValue {
    /// The newest flush; `None` when there was none.
    pub last: Option<Applied>,
    /// The last flush of the incarnation before that.
    pub before: Option<Applied>,
}

/// A flush that was applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Applied {
    /// Who wrote it, and which of its flushes it was.
    pub version: Version,
    /// The absolute total that it left.
    pub total: i64,
}

impl Applied {
    fn parse(text: &str) -> Option<Applied> {
        let (total, version) = text.split_once('@')?;
        let (incarnation, seq) = version.split_once('.')?;
        let version = Version { incarnation: incarnation.parse().ok()?, seq: seq.parse().ok()? };
        Some(Applied { version, total: total.parse().ok()? })
    }

    fn encode(&self) -> String {
        format!("{}@{}.{}", self.total, self.version.incarnation, self.version.seq)
    }
}

impl LaneValue {
    /// The total.
    #[must_use]
    pub fn total(&self) -> i64 {
        self.last.map_or(0, |last| last.total)
    }

    /// Reads the bytes of a lane; empty bytes are a lane that nobody has flushed to. `None` when
    /// they are something else: that is never a total of zero.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<LaneValue> {
        if bytes.is_empty() {
            return Some(LaneValue::default());
        }
        let text = std::str::from_utf8(bytes).ok()?;
        let (last, before) = match text.split_once(' ') {
            None => (text, None),
            Some((last, before)) => (last, Some(Applied::parse(before)?)),
        };
        Some(LaneValue { last: Some(Applied::parse(last)?), before })
    }

    /// The bytes of a lane.
    #[must_use]
    pub fn encode(&self) -> String {
        match (&self.last, &self.before) {
            (None, _) => String::new(),
            (Some(last), None) => last.encode(),
            (Some(last), Some(before)) => format!("{} {}", last.encode(), before.encode()),
        }
    }
}

/// A lane that a writer holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// Its generation.
    pub generation: u64,
    /// Its number within the generation.
    pub lane: usize,
    /// The incarnation under which this writer writes.
    pub incarnation: u64,
    /// The flush that the lane held when this writer claimed it.
    before: Option<Applied>,
    /// The lane's total as far as it is known to be stored.
    stored: i64,
    /// The number of the last flush before this writer's first to this lane.
    first: u64,
    /// The newest flush of unknown outcome: its number and its total.
    doubt: Option<(u64, i64)>,
}

impl Held {
    /// The lane's total as far as it is known to be stored.
    #[must_use]
    pub fn stored(&self) -> i64 {
        self.stored
    }
}

/// A flush to be sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Flush {
    /// Its number.
    pub number: u64,
    /// Where to.
    pub held: Held,
    /// The version under which it is sent.
    pub version: Version,
    /// The bytes.
    pub value: LaneValue,
}

/// How a flush ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The lane holds it.
    Applied,
    /// The lane holds something newer: another incarnation has it.
    Refused,
    /// It was not applied.
    NotApplied,
    /// It may have been applied, or may still be.
    Unknown,
}

/// What a writer knows: what it was given, and what of it is stored.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    /// Given, and not known to be stored.
    pending: i64,
    held: Option<Held>,
    /// A lane that refused a flush, until its bytes have been looked at.
    fenced: Option<Held>,
    /// The number of the newest flush.
    number: u64,
    /// Under way; an additive one has no lane.
    under_way: Option<(u64, i64)>,
    /// The flush that must end well before everything given so far is stored.
    wanted: u64,
    /// Everything that flushes up to this number carried is stored, or given up.
    settled: u64,
    /// Flushes up to this number carried something that was given up.
    given_up: u64,
}

/// That a sum would not fit into 64 bits; nothing was taken in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overflow;

impl Writer {
    /// Takes `amount` in; the number of the flush that will carry it.
    ///
    /// # Errors
    /// The sum would not fit into 64 bits.
    pub fn take_in(&mut self, amount: i64) -> Result<u64, Overflow> {
        let pending = self.pending.checked_add(amount).ok_or(Overflow)?;
        let stored = self.held.map_or(0, |held| held.stored);
        stored.checked_add(pending).ok_or(Overflow)?;
        self.pending = pending;
        self.wanted = self.number + 1;
        Ok(self.wanted)
    }

    /// Given, and not known to be stored.
    #[must_use]
    pub fn pending(&self) -> i64 {
        self.pending
    }

    /// How many flushes have begun so far.
    #[must_use]
    pub fn flushes(&self) -> u64 {
        self.number
    }

    /// The flush whose end settles everything given so far; `None` when that is settled.
    #[must_use]
    pub fn unsettled(&self) -> Option<u64> {
        (self.wanted > self.settled).then_some(self.wanted)
    }

    /// What has become of the flush with this number: `None` while it is open, else whether all it
    /// carried is stored; otherwise some of it is of unknown outcome.
    #[must_use]
    pub fn fate(&self, number: u64) -> Option<bool> {
        (number <= self.settled).then_some(number > self.given_up)
    }

    /// The lane that this writer holds.
    #[must_use]
    pub fn held(&self) -> Option<&Held> {
        self.held.as_ref()
    }

    /// The lane whose bytes must be looked at before another is claimed.
    #[must_use]
    pub fn fenced(&self) -> Option<&Held> {
        self.fenced.as_ref()
    }

    /// A lane was claimed under `incarnation`, and `value` was read back from it.
    pub fn claimed(&mut self, generation: u64, lane: usize, incarnation: u64, value: &LaneValue) {
        self.held = Some(Held {
            generation,
            lane,
            incarnation,
            before: value.last,
            stored: value.total(),
            first: self.number,
            doubt: None,
        });
    }

    /// The next flush, if there is something to send, a lane to send it to, and none under way.
    pub fn begin(&mut self) -> Option<Flush> {
        if self.under_way.is_some() || self.unsettled().is_none() {
            return None;
        }
        let held = self.held?;
        let total = held.stored.checked_add(self.pending)?;
        self.number += 1;
        self.under_way = Some((self.number, total));
        let seq = self.number - held.first;
        let version = Version { incarnation: held.incarnation, seq };
        let value = LaneValue { last: Some(Applied { version, total }), before: held.before };
        Some(Flush { number: self.number, held, version, value })
    }

    /// The flush under way has ended.
    pub fn end(&mut self, ended: Ended) {
        let Some((number, total)) = self.under_way.take() else { return };
        let Some(held) = &mut self.held else { return };
        match ended {
            Ended::Applied => {
                self.pending -= total - held.stored;
                held.stored = total;
                held.doubt = None;
                self.settled = number;
            }
            Ended::Refused => self.fenced = self.held.take(),
            Ended::NotApplied => {}
            Ended::Unknown => held.doubt = Some((number, total)),
        }
    }

    /// The bytes of the lane that refused this writer: what of its doubtful flushes is in it.
    /// `None` is a lane that is gone or cannot be read. Returns what is given up as unknown.
    pub fn resolve(&mut self, value: Option<&LaneValue>) -> i64 {
        let Some(held) = self.fenced.take() else { return 0 };
        // Without a flush of unknown outcome, what is known to be stored is all that is stored.
        let Some((number, doubtful)) = held.doubt else { return 0 };
        let last_of_mine = match value {
            None => None,
            Some(value) => value.last_of(held.incarnation),
        };
        match last_of_mine {
            Some(applied) => {
                let total = applied.map_or(held.stored, |a| a.total);
                self.pending -= total - held.stored;
                let number = applied.map_or(0, |a| held.first + a.version.seq);
                self.settled = self.settled.max(number);
                0
            }
            None => {
                let unknown = doubtful - held.stored;
                self.pending -= unknown;
                self.settled = self.settled.max(number);
                self.given_up = self.given_up.max(number);
                unknown
            }
        }
    }

    /// Everything pending as one add, for a writer without a lane.
    pub fn begin_add(&mut self) -> Option<i64> {
        if self.under_way.is_some() || self.held.is_some() || self.fenced.is_some() {
            return None;
        }
        self.unsettled()?;
        self.number += 1;
        self.under_way = Some((self.number, self.pending));
        Some(self.pending)
    }

    /// The add under way has ended. Returns what is given up as unknown: an add is not repeated.
    pub fn end_add(&mut self, ended: Ended) -> i64 {
        let Some((number, amount)) = self.under_way.take() else { return 0 };
        match ended {
            Ended::NotApplied | Ended::Refused => 0,
            Ended::Applied | Ended::Unknown => {
                self.pending -= amount;
                self.settled = number;
                if ended == Ended::Applied {
                    return 0;
                }
                self.given_up = number;
                amount
            }
        }
    }
}

impl LaneValue {
    /// The last flush that a fenced incarnation has in this lane: `Some(None)` when surely none,
    /// `None` when the bytes do not say.
    fn last_of(&self, incarnation: u64) -> Option<Option<Applied>> {
        let mine = |applied: &Applied| applied.version.incarnation == incarnation;
        let older = |applied: &Applied| applied.version.incarnation < incarnation;
        match (&self.last, &self.before) {
            (Some(last), _) if mine(last) => Some(Some(*last)),
            (None, _) => Some(None),
            (Some(last), _) if older(last) => Some(None),
            (Some(_), Some(before)) if mine(before) => Some(Some(*before)),
            (Some(_), None) => Some(None),
            (Some(_), Some(before)) if older(before) => Some(None),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A lane as a store keeps it.
    #[derive(Clone, Default)]
    struct Lane {
        version: Version,
        value: LaneValue,
    }

    impl Lane {
        fn put(&mut self, flush: &Flush) -> bool {
            let newer = flush.version > self.version;
            if newer {
                *self = Lane { version: flush.version, value: flush.value };
            }
            newer
        }

        fn claim(&mut self) -> u64 {
            self.version = Version { incarnation: self.version.incarnation + 1, seq: 0 };
            self.version.incarnation
        }
    }

    /// One process: what it knows, and its flushes that are still on the wire.
    #[derive(Default)]
    struct Process {
        writer: Writer,
        wire: Vec<Flush>,
    }

    #[derive(Clone, Debug)]
    enum Event {
        Add(usize, u8),
        Flush(usize),
        /// The flush arrives and so does its answer.
        Deliver(usize, usize),
        /// The answer is lost; the flush arrives, or stays on the wire.
        Lose(usize, usize, bool),
        /// The lane is fenced, as a restart under the same name does.
        Fence,
        Crash(usize),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let (who, which) = (0..2usize, 0..4usize);
        let event = prop_oneof![
            4 => (who.clone(), any::<u8>()).prop_map(|(p, n)| Event::Add(p, n)),
            4 => who.clone().prop_map(Event::Flush),
            3 => (who.clone(), which.clone()).prop_map(|(p, i)| Event::Deliver(p, i)),
            3 => (who.clone(), which, any::<bool>()).prop_map(|(p, i, a)| Event::Lose(p, i, a)),
            1 => Just(Event::Fence),
            1 => who.prop_map(Event::Crash),
        ];
        proptest::collection::vec(event, 0..120)
    }

    impl Process {
        /// Sends what there is to send, over a lane claimed anew if need be; what is given up.
        fn flush(&mut self, lane: &mut Lane) -> i64 {
            let mut unknown = 0;
            if self.writer.held().is_none() {
                unknown = self.writer.resolve(Some(&lane.value));
                let incarnation = lane.claim();
                self.writer.claimed(1, 0, incarnation, &lane.value);
            }
            self.wire.extend(self.writer.begin());
            unknown
        }

        fn answer(&mut self, flush: &Flush, ended: Ended) {
            if self.writer.under_way.is_some_and(|(n, _)| n == flush.number) {
                self.writer.end(ended);
            }
        }
    }

    proptest! {
        /// Two processes that take one lane from each other, crash, and whose flushes are lost,
        /// late and repeated: nothing is in the lane twice, and nothing is missing but what a
        /// crash took with it and what was given up as unknown.
        #[test]
        fn a_lane_holds_what_was_given_once(events in events()) {
            let mut lane = Lane::default();
            let mut all = [Process::default(), Process::default()];
            let (mut given, mut crashed, mut unknown) = (0i64, 0i64, 0i64);
            for event in events {
                match event {
                    Event::Add(p, n) => {
                        all[p].writer.take_in(n.into()).unwrap();
                        given += i64::from(n);
                    }
                    Event::Flush(p) => unknown += all[p].flush(&mut lane),
                    Event::Deliver(p, i) if i < all[p].wire.len() => {
                        let flush = all[p].wire.remove(i);
                        let applied = lane.put(&flush);
                        let ended = if applied { Ended::Applied } else { Ended::Refused };
                        all[p].answer(&flush, ended);
                    }
                    Event::Lose(p, i, arrives) if i < all[p].wire.len() => {
                        let flush = all[p].wire[i].clone();
                        if arrives {
                            lane.put(&flush);
                        }
                        all[p].answer(&flush, Ended::Unknown);
                    }
                    Event::Deliver(..) | Event::Lose(..) => {}
                    Event::Fence => drop(lane.claim()),
                    Event::Crash(p) => {
                        crashed += all[p].writer.pending();
                        all[p].writer = Writer::default();
                    }
                }
                prop_assert!(lane.value.total() <= given, "more than was given");
            }
            for process in &mut all {
                for flush in std::mem::take(&mut process.wire) {
                    lane.put(&flush);
                    process.answer(&flush, Ended::Unknown);
                }
            }
            for process in &mut all {
                for _ in 0..3 {
                    unknown += process.flush(&mut lane);
                    for flush in std::mem::take(&mut process.wire) {
                        let applied = lane.put(&flush);
                        process.answer(&flush, if applied { Ended::Applied } else { Ended::Refused });
                    }
                }
                prop_assert_eq!((process.writer.pending(), process.writer.unsettled()), (0, None));
            }
            let total = lane.value.total();
            prop_assert!(total <= given && total >= given - crashed - unknown, "{total} of {given}");
        }

        #[test]
        fn the_bytes_of_a_lane_read_back(a: (i64, u64, u64), b: Option<(i64, u64, u64)>) {
            let applied = |(total, incarnation, seq)| Applied {
                version: Version { incarnation, seq },
                total,
            };
            let value = LaneValue { last: Some(applied(a)), before: b.map(applied) };
            prop_assert_eq!(LaneValue::parse(value.encode().as_bytes()), Some(value));
        }

        #[test]
        fn bytes_from_anywhere_do_not_panic(bytes: Vec<u8>) {
            let _ = LaneValue::parse(&bytes);
        }
    }

    #[test]
    fn what_cannot_be_read_is_not_zero() {
        for text in ["0", "x", " ", "7@1", "7@1.", "7@1.2 ", "7@1.2 8", "7@1.2 8@1.1 9@1.0", "\n"] {
            assert_eq!(LaneValue::parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(LaneValue::parse(b"").map(|v| v.total()), Some(0));
    }

    fn writer(incarnation: u64, value: &LaneValue) -> Writer {
        let mut writer = Writer::default();
        writer.claimed(1, 0, incarnation, value);
        writer
    }

    #[test]
    fn a_flush_of_unknown_outcome_is_superseded_by_the_next() {
        let mut lane = Lane::default();
        let mut w = writer(lane.claim(), &LaneValue::default());
        w.take_in(5).unwrap();
        let late = w.begin().unwrap();
        w.end(Ended::Unknown);
        w.take_in(2).unwrap();
        let next = w.begin().unwrap();
        assert!(lane.put(&next));
        w.end(Ended::Applied);
        assert_eq!((lane.value.total(), w.pending(), w.unsettled()), (7, 0, None));
        assert!(!lane.put(&late) && !lane.put(&next), "late and repeated flushes change nothing");
        assert_eq!(lane.value.total(), 7);
    }

    #[test]
    fn a_zombie_finds_out_what_of_its_doubtful_flush_is_stored() {
        for arrived in [false, true] {
            for successor_flushed in [false, true] {
                let mut lane = Lane::default();
                let mut zombie = writer(lane.claim(), &LaneValue::default());
                zombie.take_in(5).unwrap();
                let flush = zombie.begin().unwrap();
                zombie.end(Ended::Unknown);
                if arrived {
                    lane.put(&flush);
                }
                let incarnation = lane.claim();
                let mut successor = writer(incarnation, &lane.value);
                if successor_flushed {
                    successor.take_in(100).unwrap();
                    assert!(lane.put(&successor.begin().unwrap()));
                }
                zombie.take_in(1).unwrap();
                assert!(!lane.put(&zombie.begin().unwrap()));
                zombie.end(Ended::Refused);
                assert_eq!(zombie.resolve(Some(&lane.value)), 0, "nothing is in doubt");
                assert_eq!(zombie.pending(), if arrived { 1 } else { 6 });
            }
        }
    }

    #[test]
    fn after_two_successors_what_is_in_doubt_is_given_up_and_the_rest_is_kept() {
        let mut lane = Lane::default();
        let mut zombie = writer(lane.claim(), &LaneValue::default());
        zombie.take_in(5).unwrap();
        let flush = zombie.begin().unwrap();
        let doubtful = flush.number;
        lane.put(&flush);
        zombie.end(Ended::Unknown);
        for _ in 0..2 {
            let incarnation = lane.claim();
            let mut next = writer(incarnation, &lane.value);
            next.take_in(10).unwrap();
            assert!(lane.put(&next.begin().unwrap()));
        }
        let later = zombie.take_in(1).unwrap();
        assert!(!lane.put(&zombie.begin().unwrap()));
        zombie.end(Ended::Refused);
        assert_eq!(zombie.resolve(Some(&lane.value)), 5);
        assert_eq!(zombie.pending(), 1);
        assert_eq!((zombie.fate(doubtful), zombie.fate(later)), (Some(false), None));
    }

    #[test]
    fn one_flush_at_a_time_and_none_without_need() {
        let mut w = writer(1, &LaneValue::default());
        assert_eq!(w.begin(), None);
        w.take_in(1).unwrap();
        assert!(w.begin().is_some());
        w.take_in(1).unwrap();
        assert_eq!(w.begin(), None);
        w.end(Ended::Applied);
        assert!(w.unsettled().is_some(), "what came during the flush is for the next");
        // A change that adds up to nothing is still flushed: the first half may be stored.
        w.take_in(-1).unwrap();
        assert!(w.begin().is_some());
    }

    #[test]
    fn what_would_not_fit_is_not_taken_in() {
        let mut w = Writer::default();
        w.take_in(i64::MAX).unwrap();
        assert_eq!(w.take_in(1), Err(Overflow));
        assert_eq!(w.pending(), i64::MAX);
        let version = Version { incarnation: 1, seq: 1 };
        let last = Some(Applied { version, total: i64::MAX - 5 });
        let mut w = writer(2, &LaneValue { last, before: None });
        assert_eq!(w.take_in(6), Err(Overflow));
        w.take_in(5).unwrap();
    }

    #[test]
    fn a_writer_without_a_lane_repeats_no_add_of_unknown_outcome() {
        let mut w = Writer::default();
        let first = w.take_in(5).unwrap();
        assert_eq!(w.begin_add(), Some(5));
        assert_eq!(w.end_add(Ended::NotApplied), 0);
        assert_eq!((w.pending(), w.fate(first)), (5, None));
        let second = w.take_in(1).unwrap();
        assert_eq!(w.begin_add(), Some(6));
        assert_eq!(w.end_add(Ended::Unknown), 6);
        assert_eq!((w.pending(), w.fate(second), w.unsettled()), (0, Some(false), None));
    }
}
