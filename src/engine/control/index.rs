//! Where a key's slot is.
//!
//! - **What**: an open-addressing table from a 64-bit hash to a slot number. The slots themselves
//!   live with the caller, who compares keys.
//! - **Invariant**: every inserted slot is reached from its home cell without crossing an empty one.
//! - **Time and units**: none.
//! - **Bounds**: four cells of two bytes per slot, allocated once; a probe ends at the first empty
//!   cell, and three quarters of the cells are empty.
//! - **Source**: linear probing with backward-shift deletion (Knuth, volume 3, 6.4, algorithm R).

const EMPTY: u16 = u16::MAX;

/// More slots than this cannot be numbered: the last value of a `u16` marks an empty cell.
pub(crate) const SLOTS_MAX: usize = 32_768;

/// A table from hash to slot number that never allocates after it was made.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    cells: Vec<u16>,
    shift: u32,
    seed: u64,
}

impl Index {
    /// Room for `slots` slots. `seed` moves the home cells, so that keys that collide in one
    /// process do not in the next.
    pub(crate) fn new(slots: usize, seed: u64) -> Index {
        let cells = (slots.clamp(1, SLOTS_MAX) * 4).next_power_of_two();
        Index { cells: vec![EMPTY; cells], shift: 64 - cells.trailing_zeros(), seed }
    }

    /// The slot of `hash` that satisfies `is_it`.
    pub(crate) fn find(&self, hash: u64, is_it: impl Fn(u16) -> bool) -> Option<u16> {
        let mut cell = self.home(hash);
        loop {
            let slot = self.cells[cell];
            if slot == EMPTY {
                return None;
            }
            if is_it(slot) {
                return Some(slot);
            }
            cell = self.next(cell);
        }
    }

    /// Notes that `slot` holds a key of `hash`. The slot must not be in the table yet.
    pub(crate) fn insert(&mut self, hash: u64, slot: u16) {
        let mut cell = self.home(hash);
        while self.cells[cell] != EMPTY {
            cell = self.next(cell);
        }
        self.cells[cell] = slot;
    }

    /// Forgets `slot`, which holds a key of `hash`. `hash_of` names the hash of any other slot, to
    /// move those that were displaced by it closer to their homes.
    pub(crate) fn remove(&mut self, hash: u64, slot: u16, hash_of: impl Fn(u16) -> u64) {
        let mut hole = self.home(hash);
        while self.cells[hole] != slot {
            if self.cells[hole] == EMPTY {
                return;
            }
            hole = self.next(hole);
        }
        let mut cell = self.next(hole);
        while self.cells[cell] != EMPTY {
            let home = self.home(hash_of(self.cells[cell]));
            // The entry may move into the hole only if its home does not lie behind the hole.
            if self.distance(home, cell) >= self.distance(hole, cell) {
                self.cells[hole] = self.cells[cell];
                hole = cell;
            }
            cell = self.next(cell);
        }
        self.cells[hole] = EMPTY;
    }

    pub(crate) fn clear(&mut self) {
        self.cells.fill(EMPTY);
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.cells.capacity() * size_of::<u16>()
    }

    fn home(&self, hash: u64) -> usize {
        ((hash ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    fn next(&self, cell: usize) -> usize {
        (cell + 1) & (self.cells.len() - 1)
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.cells.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn every_inserted_slot_is_found_and_no_other(
            steps in prop::collection::vec((any::<bool>(), 0u64..40), 1..400),
        ) {
            let mut index = Index::new(16, 7);
            let mut model: BTreeMap<u64, u16> = BTreeMap::new();
            let mut hashes = [0u64; 16];
            for (put, hash) in steps {
                if put && model.len() < 16 && !model.contains_key(&hash) {
                    let slot = (0..16).find(|s| !model.values().any(|v| v == s)).unwrap();
                    hashes[slot as usize] = hash;
                    index.insert(hash, slot);
                    model.insert(hash, slot);
                } else if let Some(slot) = model.remove(&hash) {
                    index.remove(hash, slot, |s| hashes[s as usize]);
                }
                for hash in 0..40 {
                    let found = index.find(hash, |s| hashes[s as usize] == hash);
                    prop_assert_eq!(found, model.get(&hash).copied());
                }
            }
        }
    }
}
