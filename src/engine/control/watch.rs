//! Keys near the threshold, counted exactly over a sliding window.
//!
//! - **What**: a small table of keys that the sketch found to be within reach of the threshold, and
//!   of all hot keys. Each has a ring of sub-windows, so that its count does not start from nothing
//!   whenever a window of the sketch ends, and so that hot keys go on being counted whatever
//!   happens in the sketch.
//! - **Invariant**: the sum over the ring is a lower bound of what came since [`Watches::start`],
//!   and exact for keys watched since then.
//! - **Time and units**: [`Tick`]; counts in requests (or in cost), samples scaled by what each
//!   stands for.
//! - **Bounds**: a capacity given at the start; a full table replaces the coldest key that is not
//!   hot, or refuses and counts it. About 280 bytes a key.
//! - **Source**: Sentinel's leap array, with one clock for all keys.

use super::super::time::Tick;
use super::hysteresis::Switch;
use super::index::{Index, SLOTS_MAX};
use super::sketch::{Entry, prefix};

/// Sub-windows of a window, the running one included: the sliding window is between seven and
/// eight eighths of a window long. One eighth more on the ring would make it longer than a window,
/// and a key at twice the threshold would be found a tenth of a window later for it.
pub const SUBS: usize = 8;

/// A full table may be searched for its coldest key as often as this in a sub-window.
const SEARCHES_MAX: u32 = 64;

/// What came in a span, saturating.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Tally {
    /// Reads.
    pub reads: u32,
    /// Writes.
    pub writes: u32,
    /// The part of both that reached the store.
    pub loads: u32,
    /// The sum of the squared weights.
    pub squares: f32,
}

impl Tally {
    /// One observation.
    #[must_use]
    pub fn one(weight: u64, write: bool, loaded: bool) -> Tally {
        let w = u32::try_from(weight).unwrap_or(u32::MAX);
        Tally {
            reads: if write { 0 } else { w },
            writes: if write { w } else { 0 },
            loads: if loaded { w } else { 0 },
            squares: w as f32 * w as f32,
        }
    }

    /// What a sketch knows for certain.
    #[must_use]
    pub fn proven(entry: &Entry) -> Tally {
        let cut = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Tally {
            reads: cut(entry.reads()),
            writes: cut(entry.writes()),
            loads: cut(entry.loads()),
            squares: entry.squares() as f32,
        }
    }

    /// Reads and writes together.
    #[must_use]
    pub fn total(&self) -> f64 {
        f64::from(self.reads) + f64::from(self.writes)
    }

    fn add(&mut self, more: Tally) {
        self.reads = self.reads.saturating_add(more.reads);
        self.writes = self.writes.saturating_add(more.writes);
        self.loads = self.loads.saturating_add(more.loads);
        self.squares += more.squares;
    }
}

/// One watched key.
#[derive(Clone, Debug)]
pub struct Watch {
    hash: u64,
    key: Vec<u8>,
    used: bool,
    ring: [Tally; SUBS],
    sliding: Tally,
    window: Tally,
    since: Tick,
    /// Hot or not.
    pub hot: Switch,
    /// Whether its reads are worth a near cache.
    pub near: Switch,
}

impl Watch {
    /// The hash that the key came with.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The key, cut as in the sketch.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// What came within the sliding window.
    #[must_use]
    pub fn sliding(&self) -> Tally {
        self.sliding
    }

    /// What came within the running window of the sketch.
    #[must_use]
    pub fn window(&self) -> Tally {
        self.window
    }

    /// Since when the key is watched.
    #[must_use]
    pub fn since(&self) -> Tick {
        self.since
    }

    fn is(&self, hash: u64, key: &[u8]) -> bool {
        self.used && self.hash == hash && self.key == key
    }
}

/// The watched keys.
#[derive(Clone, Debug)]
pub struct Watches {
    slots: Vec<Watch>,
    free: Vec<u16>,
    index: Index,
    capacity: usize,
    /// When each sub-window of the ring began; the running one is at `cursor`.
    starts: [Tick; SUBS],
    cursor: usize,
    /// Sub-windows of the ring that have begun, the running one included.
    begun: usize,
    searches: u32,
    refused: u64,
}

impl Watches {
    /// Room for `capacity` keys.
    #[must_use]
    pub fn new(capacity: usize, seed: u64) -> Watches {
        let capacity = capacity.clamp(1, SLOTS_MAX);
        Watches {
            slots: Vec::new(),
            free: Vec::new(),
            index: Index::new(capacity, seed),
            capacity,
            starts: [Tick::ZERO; SUBS],
            cursor: 0,
            begun: 1,
            searches: 0,
            refused: 0,
        }
    }

    /// Counts one observation of a key, if it is watched.
    pub fn observe(&mut self, hash: u64, key: &[u8], seen: Tally) -> Option<&mut Watch> {
        let slot = self.find(hash, key)?;
        let cursor = self.cursor;
        let watch = &mut self.slots[usize::from(slot)];
        watch.ring[cursor].add(seen);
        watch.sliding.add(seen);
        watch.window.add(seen);
        Some(watch)
    }

    /// A watched key, to turn its switches.
    pub fn get_mut(&mut self, hash: u64, key: &[u8]) -> Option<&mut Watch> {
        let slot = self.find(hash, key)?;
        Some(&mut self.slots[usize::from(slot)])
    }

    /// Watches a key of which the sketch has proven `so_far`, none of it longer than `subs_ago`
    /// sub-windows ago. All of it counts from there: it leaves the ring too early rather than too
    /// late.
    pub fn admit(
        &mut self,
        now: Tick,
        hash: u64,
        key: &[u8],
        so_far: Tally,
        subs_ago: usize,
    ) -> Option<&mut Watch> {
        let slot = self.take_slot(so_far.total())?;
        let oldest = (self.cursor + SUBS - subs_ago.min(SUBS - 1)) % SUBS;
        let watch = &mut self.slots[usize::from(slot)];
        watch.hash = hash;
        watch.key.clear();
        watch.key.extend_from_slice(prefix(key));
        watch.used = true;
        watch.ring = [Tally::default(); SUBS];
        watch.ring[oldest] = so_far;
        watch.sliding = so_far;
        watch.window = so_far;
        watch.since = now;
        (watch.hot, watch.near) = (Switch::default(), Switch::default());
        self.index.insert(hash, slot);
        Some(&mut self.slots[usize::from(slot)])
    }

    /// Ends the running sub-window, and forgets keys that are not hot and below `keep`.
    pub fn roll(&mut self, now: Tick, keep: f64) {
        self.cursor = (self.cursor + 1) % SUBS;
        self.begun = (self.begun + 1).min(SUBS);
        self.starts[self.cursor] = now;
        self.searches = 0;
        for slot in 0..self.slots.len() {
            let watch = &mut self.slots[slot];
            if !watch.used {
                continue;
            }
            watch.ring[self.cursor] = Tally::default();
            // Summed afresh, so that rounding of the squares does not pile up.
            let mut sum = Tally::default();
            watch.ring.iter().for_each(|sub| sum.add(*sub));
            watch.sliding = sum;
            if !watch.hot.is_on() && sum.total() < keep {
                self.forget(slot as u16);
            }
        }
    }

    /// Starts the window of the sketch again, for every key.
    pub fn start_window(&mut self) {
        self.slots.iter_mut().for_each(|watch| watch.window = Tally::default());
    }

    /// Starts the ring again after a time without traffic.
    pub fn restart(&mut self, now: Tick) {
        self.starts = [now; SUBS];
        self.begun = 1;
        for watch in &mut self.slots {
            watch.ring = [Tally::default(); SUBS];
            (watch.sliding, watch.window) = (Tally::default(), Tally::default());
        }
    }

    /// When the sliding window began.
    #[must_use]
    pub fn start(&self) -> Tick {
        self.starts[(self.cursor + SUBS + 1 - self.begun) % SUBS]
    }

    /// The watched keys, in the order of their slots.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Watch> {
        self.slots.iter_mut().filter(|watch| watch.used)
    }

    /// The watched keys, in the order of their slots.
    pub fn iter(&self) -> impl Iterator<Item = &Watch> {
        self.slots.iter().filter(|watch| watch.used)
    }

    /// A watched key of which only the hash is known.
    #[must_use]
    pub fn by_hash(&self, hash: u64) -> Option<&Watch> {
        let slot = self.index.find(hash, |s| self.slots[usize::from(s)].hash == hash)?;
        Some(&self.slots[usize::from(slot)])
    }

    /// How often a key found no room because all that are watched are hot.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    fn find(&self, hash: u64, key: &[u8]) -> Option<u16> {
        let key = prefix(key);
        self.index.find(hash, |s| self.slots[usize::from(s)].is(hash, key))
    }

    fn take_slot(&mut self, rank: f64) -> Option<u16> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.slots.len() < self.capacity {
            self.slots.push(Watch {
                hash: 0,
                key: Vec::new(),
                used: false,
                ring: [Tally::default(); SUBS],
                sliding: Tally::default(),
                window: Tally::default(),
                since: Tick::ZERO,
                hot: Switch::default(),
                near: Switch::default(),
            });
            return Some((self.slots.len() - 1) as u16);
        }
        self.searches += 1;
        let coldest = (self.searches <= SEARCHES_MAX).then(|| self.coldest(rank)).flatten();
        if coldest.is_none() {
            self.refused += 1;
        }
        self.forget(coldest?);
        self.free.pop()
    }

    /// The coldest key below `rank` that is not hot.
    fn coldest(&self, rank: f64) -> Option<u16> {
        let mut coldest = None;
        let mut below = rank;
        for (slot, watch) in self.slots.iter().enumerate() {
            if !watch.hot.is_on() && watch.sliding.total() < below {
                below = watch.sliding.total();
                coldest = Some(slot as u16);
            }
        }
        coldest
    }

    fn forget(&mut self, slot: u16) {
        let watch = &mut self.slots[usize::from(slot)];
        watch.used = false;
        let hash = watch.hash;
        self.index.remove(hash, slot, |s| self.slots[usize::from(s)].hash);
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const SUB: Duration = Duration::from_millis(125);

    fn at(sub: u64) -> Tick {
        Tick::ZERO.after(SUB * sub as u32)
    }

    #[test]
    fn the_sliding_sum_forgets_after_a_window() {
        let mut watches = Watches::new(4, 0);
        watches.admit(at(0), 1, b"a", Tally::one(100, false, true), 0).unwrap();
        for sub in 1..SUBS as u64 {
            watches.roll(at(sub), 0.0);
            assert_eq!(watches.by_hash(1).unwrap().sliding().reads, 100, "sub {sub}");
            assert_eq!(watches.start(), at(0));
        }
        watches.roll(at(8), 0.0);
        assert_eq!(watches.by_hash(1).unwrap().sliding().reads, 0);
        assert_eq!(watches.start(), at(1));
    }

    #[test]
    fn what_the_sketch_proved_leaves_with_the_window_it_came_from() {
        let mut watches = Watches::new(4, 0);
        (1..=5).for_each(|sub| watches.roll(at(sub), 0.0));
        watches.admit(at(5), 1, b"a", Tally::one(30, true, true), 5).unwrap();
        (6..=7).for_each(|sub| watches.roll(at(sub), 0.0));
        assert_eq!(watches.by_hash(1).unwrap().sliding().writes, 30);
        watches.roll(at(8), 0.0);
        assert_eq!(watches.by_hash(1).unwrap().sliding().writes, 0);
    }

    #[test]
    fn a_full_table_replaces_the_coldest_that_is_not_hot() {
        let mut watches = Watches::new(2, 0);
        watches.admit(at(0), 1, b"a", Tally::one(5, false, true), 0).unwrap().hot.turn_on(at(0));
        watches.admit(at(0), 2, b"b", Tally::one(50, false, true), 0).unwrap();
        assert!(watches.admit(at(0), 3, b"c", Tally::one(50, false, true), 0).is_none());
        assert_eq!(watches.refused(), 1);
        assert!(watches.admit(at(0), 3, b"c", Tally::one(51, false, true), 0).is_some());
        let keys: Vec<&[u8]> = watches.iter().map(Watch::key).collect();
        assert_eq!(keys, [b"a", b"c"]);
    }

    #[test]
    fn cold_keys_are_forgotten_and_hot_ones_kept() {
        let mut watches = Watches::new(4, 0);
        watches.admit(at(0), 1, b"a", Tally::one(5, false, true), 0).unwrap();
        watches.admit(at(0), 2, b"b", Tally::one(5, false, true), 0).unwrap().hot.turn_on(at(0));
        watches.roll(at(1), 6.0);
        assert!(watches.by_hash(1).is_none());
        assert!(watches.observe(1, b"a", Tally::one(1, false, true)).is_none());
        assert_eq!(watches.iter().count(), 1);
        assert_eq!(watches.observe(2, b"b", Tally::one(1, false, true)).unwrap().window().reads, 6);
    }
}
