//! One request in N leaves a sample for the driver; the others only count down.
//!
//! The countdown is geometric, drawn per thread: a fixed stride would never see a key that comes
//! once in every N requests. Redrawing when another instance used the slot in between changes
//! nothing, since a geometric wait has no memory.

use crate::engine::control::detect;
use crate::engine::data::near::Freshness;
use crate::key::Key;
use crate::sync::thread_local;
use crate::value::{Source, Value};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Samples that wait for the driver: fetched every 10 ms, they take a burst of 400,000 a second.
/// About 450 KiB.
const QUEUE: usize = 4096;

/// Keys up to this length travel inside the sample.
const INLINE: usize = 62;

/// Longer keys than this are not sampled: no key is worth a kilobyte of control state.
const SAMPLED_KEY_MAX: usize = 1024;

/// Instances per thread whose countdowns do not share a slot.
const SLOTS: usize = 8;

/// What a sampled request was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen {
    /// Served by the near cache at this age.
    Hit(Freshness, Duration),
    /// Waited for a load that another caller had begun.
    Joined,
    /// Went to the store.
    Load,
    /// A write to the store.
    Write,
    /// A write that was taken into memory, to be flushed with others.
    Held,
}

impl Seen {
    /// A value that the near cache served.
    pub(crate) fn hit(value: &Value) -> Seen {
        let stale = value.source() == Source::Stale;
        Seen::Hit(if stale { Freshness::Stale } else { Freshness::Fresh }, value.age())
    }
}

/// One request, standing for `one_in`.
#[derive(Debug)]
pub(crate) struct Sample {
    hash: u64,
    pub(crate) seen: Seen,
    pub(crate) one_in: u32,
    weight: u32,
    key: SampleKey,
}

impl Sample {
    /// As the detector wants it, with the whole key.
    pub(crate) fn observation(&self) -> detect::Sample<'_> {
        detect::Sample {
            hash: self.hash,
            key: match &self.key {
                SampleKey::Inline(len, bytes) => &bytes[..usize::from(*len)],
                SampleKey::Long(key) => key,
            },
            write: matches!(self.seen, Seen::Write | Seen::Held),
            weight: self.weight,
            loaded: matches!(self.seen, Seen::Load | Seen::Write),
            one_in: self.one_in,
        }
    }
}

#[derive(Debug)]
enum SampleKey {
    Inline(u8, [u8; INLINE]),
    Long(Key),
}

pub(crate) struct Sampler {
    one_in: AtomicU32,
    /// The number of the instance, as it stands in a slot.
    tag: u64,
    seed: u64,
    /// Moved on whenever a thread begins to count for this instance: no two begin alike.
    turns: AtomicU64,
    tx: Sender<Sample>,
    rx: Receiver<Sample>,
    dropped: AtomicU64,
}

/// A countdown: the instance in the upper half, what is left in the lower. One comparison tells
/// whether it is this instance's and whether to go on counting.
type Word = Cell<u64>;

struct Slot {
    word: Word,
    rng: Cell<u64>,
}

thread_local! {
    /// The countdown of the instance that was sampled last on this thread, at a fixed address.
    static FIRST: Word = const { Cell::new(0) };
    /// Those of the others, and the state of the randomness of all.
    static OTHERS: [Slot; SLOTS] = const {
        [const { Slot { word: Cell::new(0), rng: Cell::new(0) } }; SLOTS]
    };
}

impl Sampler {
    pub(crate) fn new(seed: u64) -> Sampler {
        static IDS: AtomicU32 = AtomicU32::new(1);
        let (tx, rx) = bounded(QUEUE);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let (one_in, dropped) = (AtomicU32::new(1), AtomicU64::new(0));
        let (tag, turns) = (u64::from(id) << 32, AtomicU64::new(1));
        Sampler { one_in, tag, seed, turns, tx, rx, dropped }
    }

    /// Counts one request; true for one in N.
    #[inline]
    pub(crate) fn due(&self) -> bool {
        !FIRST.with(|word| self.count_down(word)) && self.due_elsewhere()
    }

    /// Counts down in `word`, if it is this instance's and more than one is left.
    #[inline]
    fn count_down(&self, word: &Word) -> bool {
        let now = word.get();
        // From 2 up to what fits into the lower half; another instance's word is far off.
        let counts = now.wrapping_sub(self.tag).wrapping_sub(2) < u64::from(u32::MAX) - 1;
        if counts {
            word.set(now - 1);
        }
        counts
    }

    fn owns(&self, word: &Word) -> bool {
        word.get() >> 32 == self.tag >> 32
    }

    #[cold]
    #[inline(never)]
    fn due_elsewhere(&self) -> bool {
        OTHERS.with(|slots| {
            let slot = &slots[(self.tag >> 32) as usize % SLOTS];
            if self.count_down(&slot.word) {
                return false;
            }
            if self.owns(&slot.word) || FIRST.with(|first| self.owns(first)) {
                // A wait of this instance's is over: the next is at the front.
                if self.owns(&slot.word) {
                    slot.word.set(0);
                }
                FIRST.with(|first| first.set(self.tag | self.wait(slot)));
                return true;
            }
            // No wait of its own is known: this request gets one, and may be the last of it.
            let turn = self.turns.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
            slot.rng.set((self.seed ^ turn).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1);
            let left = self.wait(slot);
            slot.word.set(self.tag | left.saturating_sub(1).max(1));
            left == 1
        })
    }

    /// Requests until the next sample, counting the sampled one.
    fn wait(&self, slot: &Slot) -> u64 {
        match self.one_in.load(Ordering::Relaxed) {
            0 | 1 => 1,
            n => u64::from(self.geometric(slot, n)),
        }
    }

    /// Requests until the next sample: geometric with mean `n`, at least 1.
    fn geometric(&self, slot: &Slot, n: u32) -> u32 {
        let mut x = slot.rng.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        slot.rng.set(x);
        let u = ((x >> 11) as f64 + 1.0) / (1u64 << 53) as f64;
        let wait = (u.ln() / (1.0 - 1.0 / f64::from(n)).ln()).ceil();
        wait.clamp(1.0, 1e9) as u32
    }

    /// Leaves a sample for the driver; a full queue drops and counts it.
    #[cold]
    pub(crate) fn push(&self, hash: u64, key: &[u8], seen: Seen, weight: u32) {
        let one_in = self.one_in.load(Ordering::Relaxed).max(1);
        let key = if key.len() <= INLINE {
            let mut bytes = [0; INLINE];
            bytes[..key.len()].copy_from_slice(key);
            SampleKey::Inline(key.len() as u8, bytes)
        } else if key.len() <= SAMPLED_KEY_MAX {
            SampleKey::Long(Key::copy(key))
        } else {
            return;
        };
        if let Err(TrySendError::Full(_)) =
            self.tx.try_send(Sample { hash, seen, one_in, weight, key })
        {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What has come since the last call, oldest first.
    pub(crate) fn drain(&self) -> impl Iterator<Item = Sample> + '_ {
        self.rx.try_iter().take(QUEUE)
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(crate) fn one_in(&self) -> u32 {
        self.one_in.load(Ordering::Relaxed)
    }

    pub(crate) fn set_one_in(&self, n: u32) {
        self.one_in.store(n.max(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_n_is_sampled_on_average_and_no_stride_aliases() {
        let sampler = Sampler::new(7);
        sampler.set_one_in(100);
        let _ = sampler.due();
        let mut by_phase = [0u32; 100];
        for i in 0..1_000_000 {
            by_phase[i % 100] += u32::from(sampler.due());
        }
        let total: u32 = by_phase.iter().sum();
        assert!((9_500..10_500).contains(&total), "{total}");
        assert!(by_phase.iter().all(|&n| n > 40), "a key once in 100 requests is seen");
    }

    #[test]
    fn instances_that_take_turns_in_one_slot_are_each_sampled_one_in_n() {
        let slot = |sampler: &Sampler| (sampler.tag >> 32) as usize % SLOTS;
        let one = Sampler::new(1);
        let other = (2..).map(Sampler::new).find(|other| slot(other) == slot(&one)).unwrap();
        let mut sampled = [0u32; 2];
        [&one, &other].into_iter().for_each(|sampler| sampler.set_one_in(20));
        for _ in 0..40_000 {
            sampled[0] += u32::from(one.due());
            sampled[1] += u32::from(other.due());
        }
        assert!(sampled.iter().all(|n| (1_700..2_300).contains(n)), "{sampled:?}");
    }

    #[test]
    fn below_the_budget_every_request_is_a_sample() {
        let sampler = Sampler::new(1);
        assert!((0..1000).all(|_| sampler.due()));
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let sampler = Sampler::new(1);
        for _ in 0..QUEUE + 10 {
            sampler.push(1, b"k", Seen::Load, 1);
        }
        assert_eq!((sampler.drain().count(), sampler.dropped()), (QUEUE, 10));
    }
}
