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
    slot: usize,
    seed: u64,
    tx: Sender<Sample>,
    rx: Receiver<Sample>,
    dropped: AtomicU64,
}

struct Slot {
    /// The instance in the upper half, what is left to count down in the lower: one comparison
    /// tells whether the slot is this instance's and whether to go on counting.
    word: Cell<u64>,
    rng: Cell<u64>,
}

thread_local! {
    static COUNTDOWNS: [Slot; SLOTS] = const {
        [const { Slot { word: Cell::new(0), rng: Cell::new(0) } }; SLOTS]
    };
}

impl Sampler {
    pub(crate) fn new(seed: u64) -> Sampler {
        static IDS: AtomicU32 = AtomicU32::new(1);
        let (tx, rx) = bounded(QUEUE);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let (one_in, dropped) = (AtomicU32::new(1), AtomicU64::new(0));
        Sampler { one_in, tag: u64::from(id) << 32, slot: id as usize, seed, tx, rx, dropped }
    }

    /// Counts one request; true for one in N.
    #[inline]
    pub(crate) fn due(&self) -> bool {
        COUNTDOWNS.with(|slots| {
            let slot = &slots[self.slot % SLOTS];
            let word = slot.word.get();
            // From 2 up to what fits into the lower half; another instance's word is far off.
            if word.wrapping_sub(self.tag).wrapping_sub(2) < u64::from(u32::MAX) - 1 {
                slot.word.set(word - 1);
                return false;
            }
            self.draw(slot)
        })
    }

    #[cold]
    fn draw(&self, slot: &Slot) -> bool {
        let n = self.one_in.load(Ordering::Relaxed);
        let mine = slot.word.get() >> 32 == self.tag >> 32;
        if !mine {
            slot.rng.set((self.seed ^ 0x9e37_79b9_7f4a_7c15) | 1);
        }
        if n <= 1 {
            slot.word.set(self.tag | 1);
            return true;
        }
        let left = u64::from(self.geometric(slot, n));
        slot.word.set(self.tag | left);
        if mine {
            return true;
        }
        // The slot belonged to another instance: this request gets a wait of its own.
        slot.word.set(self.tag | left.saturating_sub(1).max(1));
        left == 1
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
