//! The keys that are frequent in a window, in fixed memory.
//!
//! - **What**: Filtered Space-Saving: `k` counters with keys, and a filter of `6 k` cells without
//!   keys. A key outside the counters is counted in its filter cell until it might be larger than
//!   the smallest counter, and only then takes that counter over. The filter is what lets
//!   256 counters find keys far below 1/256 of the traffic: the tail no longer evicts.
//! - **Invariant**: for every key, `count - error <= true <= count` where it has a counter, and
//!   `true <= floor()` where it has none.
//! - **Time and units**: no time. Counts are weights: the caller decides what one stands for.
//! - **Bounds**: 80 bytes a counter, 8 bytes a filter cell, allocated once; keys are cut to
//!   [`KEY_PREFIX_BYTES`]. One observation costs a look-up and at most log2(k) swaps.
//! - **Source**: Homem and Carvalho 2010 (filtered space-saving); Metwally 2005 (space-saving).

use super::index::{Index, SLOTS_MAX};

/// As many bytes of a key are kept. A longer key is known by this prefix and its hash.
pub const KEY_PREFIX_BYTES: usize = 128;

/// Filter cells per counter. Six is where the paper's error stops falling for the same memory.
const FILTER_PER_COUNTER: usize = 6;

/// One thing that was seen, weighed.
#[derive(Clone, Copy, Debug)]
pub struct Observation<'a> {
    /// A hash of the whole key; equal keys must come with equal hashes.
    pub hash: u64,
    /// The key, or at least its first [`KEY_PREFIX_BYTES`] bytes.
    pub key: &'a [u8],
    /// How much it counts.
    pub weight: u64,
    /// A write, or else a read.
    pub write: bool,
    /// Whether it reached the store, or else was served before it.
    pub loaded: bool,
}

/// What the sketch knows of one key.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    hash: u64,
    key: Vec<u8>,
    count: u64,
    error: u64,
    writes: u64,
    loads: u64,
    squares: f64,
    stamp: u32,
    place: u16,
}

impl Entry {
    /// The hash that the key came with.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The key, cut to [`KEY_PREFIX_BYTES`].
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// No less than the key's true weight.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// By how much `count` may exceed the truth.
    #[must_use]
    pub fn error(&self) -> u64 {
        self.error
    }

    /// No more than the key's true weight: what was seen since the key holds this counter.
    #[must_use]
    pub fn lower_bound(&self) -> u64 {
        self.count.saturating_sub(self.error)
    }

    /// The part of the lower bound that was reads.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.lower_bound().saturating_sub(self.writes)
    }

    /// The part of the lower bound that was writes.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// The part of the lower bound that reached the store; the rest was served before it.
    #[must_use]
    pub fn loads(&self) -> u64 {
        self.loads
    }

    /// The sum of the squared weights behind the lower bound: its variance, if arrivals are random.
    #[must_use]
    pub fn squares(&self) -> f64 {
        self.squares
    }

    /// The sketch's stamp when this key took its counter: nothing of the lower bound is older.
    #[must_use]
    pub fn stamp(&self) -> u32 {
        self.stamp
    }

    fn is(&self, hash: u64, key: &[u8]) -> bool {
        self.hash == hash && self.key == key
    }

    fn add(&mut self, seen: &Observation<'_>) {
        self.count = self.count.saturating_add(seen.weight);
        if seen.write {
            self.writes = self.writes.saturating_add(seen.weight);
        }
        if seen.loaded {
            self.loads = self.loads.saturating_add(seen.weight);
        }
        self.squares += seen.weight as f64 * seen.weight as f64;
    }

    /// Hands the counter to another key. The buffer of the key is used again.
    fn take_over(&mut self, seen: &Observation<'_>, error: u64, stamp: u32) {
        self.hash = seen.hash;
        self.key.clear();
        self.key.extend_from_slice(prefix(seen.key));
        (self.count, self.error) = (error, error);
        (self.writes, self.loads, self.squares) = (0, 0, 0.0);
        self.stamp = stamp;
    }
}

/// The part of a key that is kept.
#[must_use]
pub fn prefix(key: &[u8]) -> &[u8] {
    &key[..key.len().min(KEY_PREFIX_BYTES)]
}

/// Filtered Space-Saving over keys.
#[derive(Clone, Debug)]
pub struct Sketch {
    /// Counters in use come first; the rest keep their key buffers for the next window.
    entries: Vec<Entry>,
    used: usize,
    /// Slot numbers as a binary heap, smallest count at the root.
    heap: Vec<u16>,
    index: Index,
    filter: Vec<u64>,
    filter_max: u64,
    total: u64,
    stamp: u32,
    seed: u64,
    capacity: usize,
}

impl Sketch {
    /// A sketch of `counters` counters, of 1 to 32,768. `seed` decides which keys share a filter
    /// cell, so that nobody outside can choose keys that do.
    #[must_use]
    pub fn new(counters: usize, seed: u64) -> Sketch {
        let capacity = counters.clamp(1, SLOTS_MAX);
        Sketch {
            entries: Vec::with_capacity(capacity),
            used: 0,
            heap: Vec::with_capacity(capacity),
            index: Index::new(capacity, seed),
            filter: vec![0; capacity * FILTER_PER_COUNTER],
            filter_max: 0,
            total: 0,
            stamp: 0,
            seed: seed.wrapping_mul(0xd134_2543_de82_ef95) | 1,
            capacity,
        }
    }

    /// Counts one observation. Returns the key's counter, or `None` where the filter counted it.
    pub fn observe(&mut self, seen: &Observation<'_>) -> Option<&Entry> {
        self.total = self.total.saturating_add(seen.weight);
        let key = prefix(seen.key);
        let found = self.index.find(seen.hash, |s| self.entries[usize::from(s)].is(seen.hash, key));
        let slot = match found {
            Some(slot) => slot,
            None if self.used < self.capacity => self.take_free(seen),
            None => self.take_smallest(seen)?,
        };
        let entry = &mut self.entries[usize::from(slot)];
        entry.add(seen);
        let place = usize::from(entry.place);
        self.sink(place);
        Some(&self.entries[usize::from(slot)])
    }

    /// The counter of a key, if it has one.
    #[must_use]
    pub fn entry(&self, hash: u64, key: &[u8]) -> Option<&Entry> {
        let key = prefix(key);
        let slot = self.index.find(hash, |s| self.entries[usize::from(s)].is(hash, key))?;
        Some(&self.entries[usize::from(slot)])
    }

    /// The counter of a key of which only the hash is known.
    #[must_use]
    pub fn entry_by_hash(&self, hash: u64) -> Option<&Entry> {
        let slot = self.index.find(hash, |s| self.entries[usize::from(s)].hash == hash)?;
        Some(&self.entries[usize::from(slot)])
    }

    /// All counters in use, in no meaningful order.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries[..self.used].iter()
    }

    /// The `n` largest counters; equal counts in the order of their keys.
    #[must_use]
    pub fn top(&self, n: usize) -> Vec<&Entry> {
        let mut all: Vec<&Entry> = self.entries().collect();
        all.sort_unstable_by(|a, b| {
            b.count.cmp(&a.count).then_with(|| a.key.cmp(&b.key)).then(a.hash.cmp(&b.hash))
        });
        all.truncate(n);
        all
    }

    /// No key without a counter has a larger true weight than this. Zero until a key was refused
    /// or evicted.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.filter_max
    }

    /// The weight of everything that was observed.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The number of counters.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Counters that change hands from now on carry this stamp.
    pub fn set_stamp(&mut self, stamp: u32) {
        self.stamp = stamp;
    }

    /// Forgets everything and keeps the memory, for the next window.
    pub fn clear(&mut self) {
        self.used = 0;
        self.heap.clear();
        self.index.clear();
        self.filter.fill(0);
        self.filter_max = 0;
        self.total = 0;
        self.stamp = 0;
    }

    /// The memory that the sketch holds beside the bytes of its keys.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        size_of::<Sketch>()
            + self.entries.capacity() * size_of::<Entry>()
            + self.heap.capacity() * size_of::<u16>()
            + self.filter.capacity() * size_of::<u64>()
            + self.index.size_bytes()
    }

    fn take_free(&mut self, seen: &Observation<'_>) -> u16 {
        let slot = self.used;
        if slot == self.entries.len() {
            self.entries.push(Entry::default());
        }
        self.used += 1;
        self.entries[slot].take_over(seen, 0, self.stamp);
        let slot = slot as u16;
        self.index.insert(seen.hash, slot);
        self.heap.push(slot);
        self.rise(self.heap.len() - 1);
        slot
    }

    /// Gives the smallest counter to a key that may have overtaken it, or counts the key in the
    /// filter. A filter cell never exceeds the smallest counter, so the floor is its largest.
    fn take_smallest(&mut self, seen: &Observation<'_>) -> Option<u16> {
        let smallest = self.heap[0];
        let cell = self.cell(seen.hash);
        let before = self.filter[cell];
        let after = before.saturating_add(seen.weight);
        let victim = &self.entries[usize::from(smallest)];
        if after < victim.count {
            self.filter[cell] = after;
            self.filter_max = self.filter_max.max(after);
            return None;
        }
        let (victim_hash, victim_count) = (victim.hash, victim.count);
        self.index.remove(victim_hash, smallest, |s| self.entries[usize::from(s)].hash);
        let victim_cell = self.cell(victim_hash);
        self.filter[victim_cell] = self.filter[victim_cell].max(victim_count);
        self.filter_max = self.filter_max.max(victim_count);
        self.entries[usize::from(smallest)].take_over(seen, before, self.stamp);
        self.index.insert(seen.hash, smallest);
        Some(smallest)
    }

    fn cell(&self, hash: u64) -> usize {
        let mixed = (hash ^ (hash >> 32)).wrapping_mul(self.seed);
        ((u128::from(mixed) * self.filter.len() as u128) >> 64) as usize
    }

    fn count_at(&self, place: usize) -> u64 {
        self.entries[usize::from(self.heap[place])].count
    }

    fn settle(&mut self, place: usize, slot: u16) {
        self.heap[place] = slot;
        self.entries[usize::from(slot)].place = place as u16;
    }

    /// Moves the slot at `place` towards the leaves while a child is smaller.
    fn sink(&mut self, mut place: usize) {
        let slot = self.heap[place];
        let count = self.entries[usize::from(slot)].count;
        loop {
            let mut child = 2 * place + 1;
            if child >= self.heap.len() {
                break;
            }
            if child + 1 < self.heap.len() && self.count_at(child + 1) < self.count_at(child) {
                child += 1;
            }
            if count <= self.count_at(child) {
                break;
            }
            self.settle(place, self.heap[child]);
            place = child;
        }
        self.settle(place, slot);
    }

    /// Moves the slot at `place` towards the root while its parent is larger.
    fn rise(&mut self, mut place: usize) {
        let slot = self.heap[place];
        let count = self.entries[usize::from(slot)].count;
        while place > 0 {
            let parent = (place - 1) / 2;
            if self.count_at(parent) <= count {
                break;
            }
            self.settle(place, self.heap[parent]);
            place = parent;
        }
        self.settle(place, slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Space-Saving without a filter and without any cleverness: the oracle.
    struct Naive {
        capacity: usize,
        counts: BTreeMap<u64, (u64, u64)>,
    }

    impl Naive {
        fn observe(&mut self, key: u64, weight: u64) {
            if let Some((count, _)) = self.counts.get_mut(&key) {
                *count += weight;
            } else if self.counts.len() < self.capacity {
                self.counts.insert(key, (weight, 0));
            } else {
                let (&victim, &(floor, _)) =
                    self.counts.iter().min_by_key(|(key, (count, _))| (*count, **key)).unwrap();
                self.counts.remove(&victim);
                self.counts.insert(key, (floor + weight, floor));
            }
        }
    }

    fn see(key: &[u8], weight: u64) -> Observation<'_> {
        let hash = key.iter().fold(17u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(*b)));
        Observation { hash, key, weight, write: false, loaded: true }
    }

    fn check_heap(sketch: &Sketch) {
        for place in 1..sketch.heap.len() {
            assert!(sketch.count_at((place - 1) / 2) <= sketch.count_at(place));
        }
        for (place, slot) in sketch.heap.iter().enumerate() {
            assert_eq!(usize::from(sketch.entries[usize::from(*slot)].place), place);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn bounds_hold_for_every_key(
            capacity in 1usize..12,
            seed in any::<u64>(),
            trace in prop::collection::vec((0u8..40, 1u64..9), 0..400),
        ) {
            let mut sketch = Sketch::new(capacity, seed);
            let mut exact: BTreeMap<u8, u64> = BTreeMap::new();
            let mut naive = Naive { capacity, counts: BTreeMap::new() };
            for (key, weight) in trace {
                sketch.observe(&see(&[key], weight));
                naive.observe(u64::from(key), weight);
                *exact.entry(key).or_default() += weight;
            }
            check_heap(&sketch);
            let smallest = sketch.entries().map(Entry::count).min().unwrap_or(0);
            prop_assert!(sketch.floor() <= smallest);
            for (key, truth) in &exact {
                let bytes = [*key];
                let seen = see(&bytes, 1);
                if let Some(entry) = sketch.entry(seen.hash, seen.key) {
                    prop_assert!(entry.lower_bound() <= *truth && *truth <= entry.count());
                    prop_assert!(entry.error() <= sketch.floor());
                } else {
                    prop_assert!(*truth <= sketch.floor());
                }
            }
            // The filter only ever makes the smallest counter smaller than plain Space-Saving's.
            let naive_smallest = naive.counts.values().map(|(count, _)| *count).min().unwrap_or(0);
            prop_assert!(smallest <= naive_smallest);
        }

        #[test]
        fn without_eviction_it_equals_the_naive_sketch(
            trace in prop::collection::vec((0u8..30, 1u64..9), 0..200),
        ) {
            let mut sketch = Sketch::new(30, 1);
            let mut naive = Naive { capacity: 30, counts: BTreeMap::new() };
            for (key, weight) in trace {
                sketch.observe(&see(&[key], weight));
                naive.observe(u64::from(key), weight);
            }
            prop_assert_eq!(sketch.floor(), 0);
            for (key, (count, error)) in naive.counts {
                let bytes = [key as u8];
                let entry = sketch.entry(see(&bytes, 1).hash, &bytes);
                prop_assert_eq!(entry.map(|e| (e.count(), e.error())), Some((count, error)));
            }
        }
    }

    #[test]
    fn reads_writes_and_loads_stand_apart_in_one_entry() {
        let mut sketch = Sketch::new(4, 0);
        for i in 0..10u64 {
            sketch.observe(&Observation { write: i < 3, loaded: i < 5, ..see(b"a", 2) });
        }
        let seen = see(b"a", 1);
        let entry = sketch.entry(seen.hash, b"a").unwrap();
        assert_eq!((entry.reads(), entry.writes(), entry.loads()), (14, 6, 10));
        assert_eq!((entry.count(), entry.error()), (20, 0));
        assert!((entry.squares() - 40.0).abs() < 1e-9);
    }

    #[test]
    fn a_cleared_sketch_starts_afresh_without_new_memory() {
        let mut sketch = Sketch::new(8, 3);
        for i in 0..100u8 {
            sketch.observe(&see(&[i], 1));
        }
        let size = sketch.size_bytes();
        sketch.clear();
        assert_eq!((sketch.entries().count(), sketch.floor(), sketch.total()), (0, 0, 0));
        for i in 100..200u8 {
            sketch.observe(&see(&[i], 1));
        }
        assert_eq!(sketch.size_bytes(), size);
        assert_eq!(sketch.entries().count(), 8);
    }

    #[test]
    fn a_long_key_is_known_by_prefix_and_hash() {
        let (a, b) = ([7u8; 4_000], [7u8; 5_000]);
        let mut sketch = Sketch::new(4, 3);
        sketch.observe(&Observation { hash: 1, ..see(&a, 1) });
        sketch.observe(&Observation { hash: 2, ..see(&b, 1) });
        assert_eq!(sketch.entries().count(), 2);
        assert!(sketch.entries().all(|e| e.key().len() == KEY_PREFIX_BYTES));
        assert_eq!(sketch.entry(2, &b).map(Entry::count), Some(1));
    }

    #[test]
    fn the_same_observations_give_the_same_sketch() {
        let run = || {
            let mut sketch = Sketch::new(16, 99);
            for i in 0..5_000u32 {
                sketch.observe(&see(&(i * i % 211).to_le_bytes(), 1 + u64::from(i % 3)));
            }
            format!("{:?}", sketch.top(16))
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn two_hundred_fifty_six_counters_fit_in_forty_kibibytes() {
        let mut sketch = Sketch::new(256, 0);
        for i in 0..10_000u32 {
            sketch.observe(&see(&i.to_le_bytes(), 1));
        }
        assert!(sketch.size_bytes() <= 40 * 1024, "{}", sketch.size_bytes());
    }
}
