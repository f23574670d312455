//! Counters of one instance: their options, their numbers, and the table that lets all handles of
//! one key share its batches and its sum.

use crate::batch::Batches;
use crate::buffer::Buffer;
#[cfg(feature = "testing")]
use crate::engine::control::lanes::{Ended, Flush};
use crate::engine::control::roster;
use crate::engine::data::joined::{Joined, Op};
use crate::engine::data::sums::{Known, Latest, Parts};
use crate::engine::time::Tick;
use crate::error::{Error, Result};
use crate::key::Key;
#[cfg(feature = "testing")]
use crate::lanes::ask;
use crate::shared::Shared;
#[cfg(feature = "testing")]
use crate::store::{Stored, Version};
use crate::sync::Mutex;
use hashbrown::HashTable;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Stripes of the table. A power of two.
const STRIPES: usize = 64;

/// Counters per stripe. 64 × 1,024 is 65,536 counters at 200 bytes each.
const COUNTERS_PER_STRIPE: usize = 1024;

/// What a buffered counter does with an add when it holds back as much as it may.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum AtCap {
    /// The add goes to the store, together with others, and its caller waits for it.
    #[default]
    Through,
    /// The add is refused with [`Shed`](crate::ErrorKind::Shed).
    Refuse,
}

/// Is told what was lost: of which counter, and how much.
type OnLost = Arc<dyn Fn(&Key, i64) + Send + Sync>;

/// How counters behave.
///
/// # Example
/// ```
/// # use heatsink::{Adds, Heatsink, store::MemoryStore};
/// # use std::time::Duration;
/// let adds = Adds::new().sum_ttl(Duration::from_millis(200)).writer("router-3");
/// let hs = Heatsink::builder(MemoryStore::new(8)).adds(adds).build()?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Adds {
    pub(crate) sum_ttl: Duration,
    pub(crate) flush_every: Duration,
    pub(crate) pending_max: u64,
    pub(crate) bytes_max: usize,
    pub(crate) at_cap: AtCap,
    pub(crate) lanes_max: usize,
    pub(crate) writer: Option<String>,
    pub(crate) on_lost: Option<OnLost>,
}

impl Default for Adds {
    fn default() -> Adds {
        Adds {
            sum_ttl: Duration::from_secs(1),
            flush_every: Duration::from_millis(500),
            pending_max: 1 << 20,
            bytes_max: 64 << 20,
            at_cap: AtCap::Through,
            lanes_max: 64,
            writer: None,
            on_lost: None,
        }
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

    /// How often a buffered counter is flushed, at a phase of its own. Default: 500 ms.
    #[must_use]
    pub fn flush_every(mut self, interval: Duration) -> Adds {
        self.flush_every = interval;
        self
    }

    /// The amount, up or down, that a buffered counter holds back at most; adds in flight while
    /// the cap is reached may exceed it by one each. From half of it on adds may be held to
    /// [`at_cap`](Adds::at_cap). Default: 1,048,576.
    #[must_use]
    pub fn pending_max(mut self, amount: u64) -> Adds {
        self.pending_max = amount;
        self
    }

    /// Bytes that all buffers take together; then [`buffered`](crate::Heatsink::buffered) refuses
    /// another key. Default: 64 MiB.
    #[must_use]
    pub fn bytes_max(mut self, size_bytes: usize) -> Adds {
        self.bytes_max = size_bytes;
        self
    }

    /// What becomes of an add at the cap. Default: through.
    #[must_use]
    pub fn at_cap(mut self, policy: AtCap) -> Adds {
        self.at_cap = policy;
        self
    }

    /// Lanes of a buffered counter, which is how many processes flush to it without compacting.
    /// Counts for counters that this process is the first to buffer. Default: 64.
    #[must_use]
    pub fn lanes_max(mut self, lanes: usize) -> Adds {
        self.lanes_max = lanes;
        self
    }

    /// The name under which this process holds its lanes: unique in the fleet, and the same after a
    /// restart, which then goes on with the lane. Default: another one for every instance, so that
    /// every restart takes a new lane.
    #[must_use]
    pub fn writer(mut self, name: impl Into<String>) -> Adds {
        self.writer = Some(name.into());
        self
    }

    /// Is called with a counter and an amount when that amount is given up: it could not be flushed
    /// before the end of the instance, or it cannot be told whether it was stored. Default: none.
    #[must_use]
    pub fn on_lost(mut self, f: impl Fn(&Key, i64) + Send + Sync + 'static) -> Adds {
        self.on_lost = Some(Arc::new(f));
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let wrong = if self.flush_every.is_zero() {
            "Adds::flush_every is zero; to store each add at once, use Heatsink::counter"
        } else if self.pending_max == 0 || self.pending_max > 1 << 62 {
            "Adds::pending_max must be 1 to 2^62"
        } else if !(1..=roster::LANES_MAX).contains(&self.lanes_max) {
            "Adds::lanes_max must be 1 to 256"
        } else if self.writer.as_deref().is_some_and(|name| !roster::is_name(name)) {
            "Adds::writer must be 1 to 64 letters, digits and . _ - :"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }
}

impl fmt::Debug for Adds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adds")
            .field("sum_ttl", &self.sum_ttl)
            .field("flush_every", &self.flush_every)
            .field("pending_max", &self.pending_max)
            .field("bytes_max", &self.bytes_max)
            .field("at_cap", &self.at_cap)
            .field("lanes_max", &self.lanes_max)
            .field("writer", &self.writer)
            .finish_non_exhaustive()
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
    /// Sums of counters that only grow which were asked for after a greater one was shown: the
    /// store has lost something. The greater one was shown, with [`Sum::lost`](crate::Sum::lost).
    sums_regressed,
    /// Flushes of buffered counters that were sent.
    flushes,
    /// Those that were not stored, or not known to be; what they carried stays in the buffer.
    flushes_failed,
    /// Adds to a buffered counter that went to the store: at the cap, or without a lane.
    through,
    /// Adds to a buffered counter that were refused at the cap.
    refused,
    /// The amount that was given up: not flushed before the end, or of unknown outcome.
    lost,
    /// Lanes that another process took over under this one's name.
    lanes_taken_over,
    /// Times that this process retired a generation of lanes.
    compactions,
}

/// Adds `n` to a tally.
pub(crate) fn count(tally: &AtomicU64, n: u64) {
    tally.fetch_add(n, Ordering::Relaxed);
}

/// What all handles of one counter share.
pub(crate) struct Cell {
    pub(crate) hash: u64,
    pub(crate) key: Key,
    /// How what is given to it combines.
    pub(crate) op: Op,
    /// Of what joins: as it was last read.
    pub(crate) joined: Mutex<Option<Read>>,
    pub(crate) batches: Mutex<Batches>,
    pub(crate) known: Mutex<Known>,
    /// Adds that were sent, and the writes that carried them, where counters may be salted.
    pub(crate) weight: [AtomicU64; 2],
    /// Somebody has said that it only grows.
    pub(crate) only_grows: AtomicBool,
    /// Of a salted one: the total that one process writes.
    pub(crate) written: Mutex<Latest>,
    /// Its slots, of one that only grows.
    pub(crate) parts: Mutex<Parts>,
}

/// A value that joins, as it was read.
#[derive(Clone)]
pub(crate) struct Read {
    pub(crate) value: Joined,
    /// When the load began.
    pub(crate) started: Tick,
}

impl Cell {
    pub(crate) fn new(hash: u64, key: Key) -> Arc<Cell> {
        Cell::of(hash, key, Op::Sum)
    }

    pub(crate) fn of(hash: u64, key: Key, op: Op) -> Arc<Cell> {
        Arc::new(Cell {
            hash,
            key,
            op,
            joined: Mutex::new(None),
            batches: Mutex::new(Batches::of(op)),
            known: Mutex::new(Known::default()),
            weight: Default::default(),
            only_grows: AtomicBool::new(false),
            written: Mutex::new(Latest::default()),
            parts: Mutex::new(Parts::default()),
        })
    }

    /// One write that carries so many adds is sent.
    pub(crate) fn weigh(&self, adds: u64) {
        count(&self.weight[0], adds);
        count(&self.weight[1], 1);
    }
}

/// The counters of one instance.
pub(crate) struct Counters {
    stripes: Box<[Mutex<HashTable<Arc<Cell>>>]>,
    buffers: Mutex<Buffers>,
    /// The name under which this instance holds its lanes.
    pub(crate) writer: String,
    pub(crate) tallies: Tallies,
    #[cfg(feature = "testing")]
    broken: std::sync::atomic::AtomicU8,
}

#[derive(Default)]
struct Buffers {
    by_key: HashTable<Arc<Buffer>>,
    size_bytes: usize,
    closed: bool,
}

impl Counters {
    pub(crate) fn new(seed: u64, writer: Option<&str>) -> Counters {
        let stripes = (0..STRIPES).map(|_| Mutex::new(HashTable::new())).collect();
        Counters {
            stripes,
            buffers: Mutex::new(Buffers::default()),
            writer: writer.map_or_else(|| format!("w{seed:016x}"), str::to_owned),
            tallies: Tallies::default(),
            #[cfg(feature = "testing")]
            broken: std::sync::atomic::AtomicU8::new(0),
        }
    }

    /// A name for a writer whose own is taken.
    pub(crate) fn another_name(&self, shared: &Shared) -> String {
        format!("w{:016x}{:016x}", shared.roll(), shared.options.seed)
    }

    /// The buffer of one counter.
    pub(crate) fn buffer(
        &self,
        shared: &Arc<Shared>,
        hash: u64,
        key: &[u8],
    ) -> Result<Arc<Buffer>> {
        let mut buffers = self.buffers.lock();
        let found = buffers.by_key.find(hash, |b| b.hash == hash && *b.key == *key);
        if let Some(buffer) = found {
            return Ok(buffer.clone());
        }
        let stripes = shared.options.stripes;
        let (cost, max) = (Buffer::cost(key, stripes), shared.options.adds.bytes_max);
        if buffers.size_bytes + cost > max {
            let Buffers { by_key, size_bytes, .. } = &mut *buffers;
            by_key.retain(|b| {
                let used = Arc::strong_count(b) > 1 || !b.is_idle();
                *size_bytes -= if used { 0 } else { Buffer::cost(&b.key, stripes) };
                used
            });
        }
        if buffers.size_bytes + cost > max {
            let text = format!("the buffers of counters take {} bytes", buffers.size_bytes);
            return Err(Error::not_applied(crate::ErrorKind::Limit, text).with_key(key));
        }
        buffers.size_bytes += cost;
        let buffer = Arc::new(Buffer::new(shared, hash, Key::copy(key), buffers.closed));
        buffers.by_key.insert_unique(hash, buffer.clone(), |b| b.hash);
        Ok(buffer)
    }

    fn all_buffers(&self) -> Vec<Arc<Buffer>> {
        self.buffers.lock().by_key.iter().cloned().collect()
    }

    /// Flushes every buffer, and gives up what cannot be flushed in time. Adds go through from
    /// here on.
    pub(crate) async fn drain(&self, shared: &Arc<Shared>) {
        self.buffers.lock().closed = true;
        let all = self.all_buffers();
        all.iter().for_each(|b| b.close());
        let wanted: Vec<_> = all.iter().map(|b| b.want_flush(shared)).collect();
        for (buffer, wanted) in all.iter().zip(wanted) {
            let stored = match wanted {
                Ok(None) => true,
                Ok(Some(letter)) => buffer.wait(shared, letter).await.is_ok(),
                Err(_) => false,
            };
            if !stored {
                buffer.give_up(shared);
            }
        }
    }

    /// The last handle of the instance is gone.
    pub(crate) fn release(&self, shared: &Arc<Shared>) {
        self.all_buffers().iter().for_each(|b| b.release(shared));
        // The tasks that still flush hold their own buffer.
        let left = std::mem::take(&mut self.buffers.lock().by_key);
        drop(left);
    }

    /// The place of one counter, if it has one.
    pub(crate) fn known_cell(&self, hash: u64, key: &[u8]) -> Option<Arc<Cell>> {
        let stripe = self.stripes[(hash >> 20) as usize & (STRIPES - 1)].lock();
        stripe.find(hash, |c| c.hash == hash && *c.key == *key).cloned()
    }

    /// The place of one counter. Where the table is full of counters in use, a place of its own:
    /// its adds do not combine with those of other handles, and nothing else changes.
    pub(crate) fn cell(&self, hash: u64, key: &[u8]) -> Arc<Cell> {
        self.cell_of(hash, key, Op::Sum)
    }

    /// The same, of one whose values combine like this.
    pub(crate) fn cell_of(&self, hash: u64, key: &[u8], op: Op) -> Arc<Cell> {
        let mut stripe = self.stripes[(hash >> 20) as usize & (STRIPES - 1)].lock();
        let same = |c: &Arc<Cell>| c.hash == hash && c.op == op && *c.key == *key;
        if let Some(cell) = stripe.find(hash, same) {
            return cell.clone();
        }
        let cell = Cell::of(hash, Key::copy(key), op);
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

/// A way to get it wrong, switched on by a test that proves that it is caught.
#[cfg(feature = "testing")]
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mutant {
    /// A flush adds what came since the last one, and is repeated when its outcome is unknown.
    DeltaFlush = 1,
    /// Flushes carry no incarnation: the latest to be sent wins.
    NoIncarnation,
    /// An error while a lane is read back counts as a total of zero.
    ReadBackErrorIsZero,
    /// A durable add is acknowledged before its flush.
    AckBeforeStore,
}

#[cfg(feature = "testing")]
impl Counters {
    pub(crate) fn break_by(&self, mutant: Mutant) {
        self.broken.store(mutant as u8, Ordering::Relaxed);
    }

    pub(crate) fn is_broken(&self, by: Mutant) -> bool {
        self.broken.load(Ordering::Relaxed) == by as u8
    }

    pub(crate) fn misread(&self, claim: Result<Stored>) -> Result<Stored> {
        if claim.is_err() && self.is_broken(Mutant::ReadBackErrorIsZero) {
            let version = Some(Version { incarnation: 1 << 32, seq: 0 });
            return Ok(Stored { version, ..Stored::default() });
        }
        claim
    }

    pub(crate) async fn send_broken(
        &self,
        shared: &Arc<Shared>,
        flush: &Flush,
        (key, name): (&Key, &Key),
    ) -> Option<Ended> {
        let store = shared.store.clone();
        let answer = if self.is_broken(Mutant::DeltaFlush) {
            let delta = flush.value.total() - flush.held.stored();
            ask(shared, store.add(key.clone(), delta)).await.map(|_| true)
        } else if self.is_broken(Mutant::NoIncarnation) {
            let version = Version { incarnation: (1 << 50) + shared.clock.now().0, seq: 0 };
            let bytes = flush.value.encode().into();
            ask(shared, store.put_if_newer(name.clone(), version, bytes, None)).await
        } else {
            return None;
        };
        Some(match answer {
            Ok(true) => Ended::Applied,
            Ok(false) => Ended::Refused,
            Err(_) => Ended::NotApplied,
        })
    }
}

#[cfg(feature = "testing")]
impl crate::Heatsink {
    /// For tests: gets counters wrong in one way.
    #[doc(hidden)]
    pub fn break_counters(&self, mutant: Mutant) {
        self.shared().counters.break_by(mutant);
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
        let table = Counters::new(1, None);
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
        let table = Counters::new(1, None);
        let all: Vec<_> = (0..2000u64).map(|i| table.cell(i, &i.to_le_bytes())).collect();
        assert_eq!(table.stripes[0].lock().len(), COUNTERS_PER_STRIPE);
        assert_eq!(*all[1999].key, 1999u64.to_le_bytes());
    }
}
