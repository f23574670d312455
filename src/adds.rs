//! Counters of one instance: their options, their numbers, and the table that lets all handles of
//! one key share its batches and its sum.

use crate::batch::Letter;
use crate::engine::data::adds::Adds as Batches;
use crate::engine::data::sums::Known;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::sync::Mutex;
use hashbrown::HashTable;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Stripes of the table. A power of two.
const STRIPES: usize = 64;

/// Counters per stripe. 64 × 1,024 is 65,536 counters at 200 bytes each.
const COUNTERS_PER_STRIPE: usize = 1024;

/// How counters behave.
///
/// # Example
/// ```
/// # use heatsink::{Adds, Heatsink, store::MemoryStore};
/// # use std::time::Duration;
/// let hs = Heatsink::builder(MemoryStore::new(8))
///     .adds(Adds::new().sum_ttl(Duration::from_millis(200)))
///     .build()?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Adds {
    pub(crate) sum_ttl: Duration,
}

impl Default for Adds {
    fn default() -> Adds {
        Adds { sum_ttl: Duration::from_secs(1) }
    }
}

impl Adds {
    /// The defaults.
    #[must_use]
    pub fn new() -> Adds {
        Adds::default()
    }

    /// Age, from the start of its load, up to which the sum of a counter is served from memory.
    /// Default: 1 s.
    #[must_use]
    pub fn sum_ttl(mut self, ttl: Duration) -> Adds {
        self.sum_ttl = ttl;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Adds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adds").field("sum_ttl", &self.sum_ttl).finish_non_exhaustive()
    }
}

macro_rules! tallies {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Plain numbers about the counters of one instance, since it was built.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct AddStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The same, being counted.
        #[derive(Default)]
        pub(crate) struct Tallies {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Tallies {
            pub(crate) fn read(&self) -> AddStats {
                AddStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

tallies! {
    /// Adds that were sent to the store, alone or in a batch.
    adds,
    /// Store operations that carried them.
    batches,
    /// Adds whose outcome is unknown.
    adds_unknown,
    /// Adds that went to the store by themselves because too many waited.
    bypassed,
    /// Adds that were never sent: their callers had given up, and so had the runtime.
    adds_given_up,
    /// Sums that were served from memory.
    sums_cached,
    /// Sums that were asked of the store, or joined a load that was.
    sums_loaded,
}

/// Adds `n` to a tally.
pub(crate) fn count(tally: &AtomicU64, n: u64) {
    tally.fetch_add(n, Ordering::Relaxed);
}

/// What all handles of one counter share.
pub(crate) struct Cell {
    pub(crate) hash: u64,
    pub(crate) key: Key,
    pub(crate) batches: Mutex<Batches<Arc<Letter>>>,
    pub(crate) known: Mutex<Known>,
}

impl Cell {
    fn new(hash: u64, key: Key) -> Arc<Cell> {
        let (batches, known) = (Mutex::new(Batches::default()), Mutex::new(Known::default()));
        Arc::new(Cell { hash, key, batches, known })
    }
}

/// The counters of one instance.
pub(crate) struct Counters {
    stripes: Box<[Mutex<HashTable<Arc<Cell>>>]>,
    pub(crate) tallies: Tallies,
}

impl Counters {
    pub(crate) fn new() -> Counters {
        let stripes = (0..STRIPES).map(|_| Mutex::new(HashTable::new())).collect();
        Counters { stripes, tallies: Tallies::default() }
    }

    /// The place of one counter. Where the table is full of counters in use, a place of its own:
    /// its adds do not combine with those of other handles, and nothing else changes.
    pub(crate) fn cell(&self, hash: u64, key: &[u8]) -> Arc<Cell> {
        let mut stripe = self.stripes[(hash >> 20) as usize & (STRIPES - 1)].lock();
        if let Some(cell) = stripe.find(hash, |c| c.hash == hash && *c.key == *key) {
            return cell.clone();
        }
        let cell = Cell::new(hash, Key::copy(key));
        if stripe.len() >= COUNTERS_PER_STRIPE {
            // Whoever holds a handle, or has an add under way, holds a second reference.
            stripe.retain(|c| Arc::strong_count(c) > 1);
        }
        if stripe.len() < COUNTERS_PER_STRIPE {
            stripe.insert_unique(hash, cell.clone(), |c| c.hash);
        }
        cell
    }
}

/// Whether a counter may have this key.
pub(crate) fn check_key(key: &[u8]) -> Result<()> {
    if key.len() <= crate::key::KEY_BYTES_MAX {
        return Ok(());
    }
    let text = format!("the key has {} bytes", key.len());
    Err(Error::not_applied(crate::ErrorKind::Limit, text).with_key(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_one_key_share_a_place_and_a_full_table_forgets_the_idle_only() {
        let table = Counters::new();
        let kept: Vec<_> = (0..10u64).map(|i| table.cell(i, &i.to_le_bytes())).collect();
        for i in 100..200_000u64 {
            // All in one stripe: the bits that choose it are zero.
            drop(table.cell(i & 0xf_ffff, &i.to_le_bytes()));
        }
        for (i, cell) in kept.iter().enumerate() {
            assert!(Arc::ptr_eq(cell, &table.cell(i as u64, &(i as u64).to_le_bytes())));
        }
        assert!(table.stripes[0].lock().len() <= COUNTERS_PER_STRIPE);
    }

    #[test]
    fn a_table_full_of_counters_in_use_still_serves() {
        let table = Counters::new();
        let all: Vec<_> = (0..2000u64).map(|i| table.cell(i, &i.to_le_bytes())).collect();
        assert_eq!(table.stripes[0].lock().len(), COUNTERS_PER_STRIPE);
        assert_eq!(*all[1999].key, 1999u64.to_le_bytes());
    }
}
