//! The hot tier: cells that hold one cached value each, and the index that finds them.
//!
//! The index is an immutable snapshot; cells are mutable. A hit loads two guards and writes no
//! line that another thread writes. All changes of a cell are made under the lock of its stripe.

use crate::engine::data::near::{self, Ages, Freshness, Rank};
use crate::engine::time::Tick;
use crate::key::Key;
use crate::sync::{ArcSwapOption, AtomicBool, AtomicU64, Ordering, thread_local};
use bytes::Bytes;
use hashbrown::HashTable;
use std::any::Any;
use std::cell::Cell as StdCell;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A loaded value.
pub(crate) struct Entry {
    pub(crate) bytes: Bytes,
    /// The load found no value; `bytes` is empty.
    pub(crate) absent: bool,
    /// A loader of the user's brought it, so only a loader can refresh it.
    pub(crate) by_loader: bool,
    pub(crate) ages: Ages,
    pub(crate) ttl_left: Option<Duration>,
    pub(crate) rank: Rank,
    pub(crate) epoch: u64,
    /// The decoded value, once somebody has decoded it.
    pub(crate) decoded: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// What a cell shows: an entry, and what goes with its being cached.
#[repr(align(64))]
pub(crate) struct Shown {
    pub(crate) entry: Arc<Entry>,
    /// Of which instance, under which key.
    of: (u64, Key),
    /// From here on a reader may claim the refresh by setting it to `u64::MAX`.
    refresh_at: AtomicU64,
    /// Set, under the stripe's lock, when the cell shows something else or nothing.
    retired: AtomicBool,
}

/// One thread stripe's own reference to what is shown, on a line of its own, so that no two counts
/// share one.
#[repr(align(64))]
pub(crate) struct Handle {
    shown: Arc<Shown>,
    entry: Arc<Entry>,
}

impl Handle {
    #[inline]
    pub(crate) fn entry(&self) -> &Entry {
        &self.entry
    }

    #[inline]
    pub(crate) fn shown(&self) -> &Shown {
        &self.shown
    }

    /// Whether its cell shows something else by now, or nothing.
    #[inline]
    pub(crate) fn is_retired(&self) -> bool {
        self.shown.retired.load(Ordering::Acquire)
    }

    /// Whether this is what the cell of `key` shows now.
    #[inline(always)]
    pub(crate) fn stands_for(&self, instance: u64, key: &[u8]) -> bool {
        let (of_instance, of_key) = &self.shown.of;
        *of_instance == instance && same(of_key.as_bytes(), key) && !self.is_retired()
    }
}

/// Something shown, with a handle for each stripe of threads.
pub(crate) struct Spread {
    shown: Arc<Shown>,
    handles: Box<[Arc<Handle>]>,
    charge: usize,
}

impl Spread {
    pub(crate) fn new(entry: Arc<Entry>, of: (u64, Key), stripes: usize) -> Spread {
        let charge = near::charge(of.1.len(), entry.bytes.len(), stripes);
        let refresh_at = AtomicU64::new(entry.ages.fresh_until.0);
        let retired = AtomicBool::new(false);
        let shown = Arc::new(Shown { entry: entry.clone(), of, refresh_at, retired });
        let handle = || Arc::new(Handle { shown: shown.clone(), entry: entry.clone() });
        let handles = (0..stripes).map(|_| handle()).collect();
        Spread { shown, handles, charge }
    }

    /// This thread's handle.
    #[inline]
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        // The number of handles is a power of two.
        &self.handles[thread_ordinal() & (self.handles.len() - 1)]
    }
}

impl Shown {
    /// How the value stands, if a caller that accepts `max_age` may have it at all.
    #[inline]
    pub(crate) fn serve(
        &self,
        now: Tick,
        epoch: u64,
        max_age: Option<Duration>,
    ) -> Option<Freshness> {
        let entry = &*self.entry;
        if now >= entry.ages.stale_until || entry.epoch != epoch {
            return None;
        }
        if let Some(max) = max_age
            && now.since(entry.ages.started) >= max
        {
            return None;
        }
        Some(entry.ages.at(now))
    }

    /// True when the value is stale, the caller can load it again (`loader`: it brings one; what a
    /// loader brought, only a loader can), and no other reader has taken the refresh: the caller
    /// must start it.
    #[inline]
    pub(crate) fn take_refresh(&self, freshness: Freshness, loader: bool, now: Tick) -> bool {
        freshness == Freshness::Stale
            && (loader || !self.entry.by_loader)
            && self.claim_refresh(now)
    }

    /// Claims the refresh if it is due and no other reader has it.
    #[inline]
    fn claim_refresh(&self, now: Tick) -> bool {
        let at = self.refresh_at.load(Ordering::Relaxed);
        now.0 >= at
            && self
                .refresh_at
                .compare_exchange(at, u64::MAX, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// A claimed refresh failed: the next may start at `at`.
    pub(crate) fn refresh_again(&self, at: Tick) {
        self.refresh_at.store(at.0, Ordering::Relaxed);
    }
}

/// The place of one hot key.
pub(crate) struct Cell {
    pub(crate) hash: u64,
    pub(crate) key: Key,
    shown: ArcSwapOption<Spread>,
    /// Set, under the stripe's lock, before the cell leaves the index: nothing is shown again.
    closed: AtomicBool,
}

impl Cell {
    pub(crate) fn new(hash: u64, key: Key) -> Cell {
        Cell { hash, key, shown: ArcSwapOption::empty(), closed: AtomicBool::new(false) }
    }

    /// Runs `f` on what is shown.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Shown) -> Option<R>) -> Option<R> {
        self.spread(|spread| f(&spread.shown))
    }

    /// Runs `f` on what is shown and its handles, without writing a line that another thread
    /// writes.
    #[inline]
    pub(crate) fn spread<R>(&self, f: impl FnOnce(&Spread) -> Option<R>) -> Option<R> {
        let guard = self.shown.load();
        f(guard.as_ref()?)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Shows `next` if it may stand where the present value stands. The stripe's lock is held.
    /// Returns what is to be dropped after it is released.
    pub(crate) fn show(&self, next: Spread, used: &Used) -> Result<Option<Arc<Spread>>, Refused> {
        if self.is_closed() {
            return Err(Refused::Closed);
        }
        let (older, freed) = self
            .spread(|now| {
                let older = !next.shown.entry.rank.may_replace(&now.shown.entry.rank);
                Some((older, now.charge))
            })
            .unwrap_or((false, 0));
        if older {
            return Err(Refused::Older);
        }
        if !used.exchange(freed, next.charge) {
            return Err(Refused::Full);
        }
        Ok(self.replace(Some(Arc::new(next))))
    }

    /// Shows nothing any more. The stripe's lock is held; drop the result after it is released.
    pub(crate) fn clear(&self, used: &Used) -> Option<Arc<Spread>> {
        // To swap nothing for nothing costs a walk over all threads' guards. The lock is held:
        // what is not there now does not come meanwhile.
        self.shown.load().as_ref()?;
        let old = self.replace(None);
        if let Some(old) = &old {
            used.release(old.charge);
        }
        old
    }

    /// The one place where what is shown changes: the old must be known as retired everywhere
    /// before the lock is released.
    fn replace(&self, next: Option<Arc<Spread>>) -> Option<Arc<Spread>> {
        let old = self.shown.swap(next);
        if let Some(old) = &old {
            old.shown.retired.store(true, Ordering::Release);
        }
        old
    }

    /// Shows nothing ever again: the key is being demoted. The stripe's lock is held.
    pub(crate) fn close(&self, used: &Used) -> Option<Arc<Spread>> {
        self.closed.store(true, Ordering::Relaxed);
        self.clear(used)
    }
}

/// Why a value was not cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// The cell is leaving the index.
    Closed,
    /// A newer value is there.
    Older,
    /// The hot tier has no room.
    Full,
}

/// Bytes in use by the hot tier.
pub(crate) struct Used {
    bytes: AtomicU64,
    max: u64,
}

impl Used {
    pub(crate) fn new(max: u64) -> Used {
        Used { bytes: AtomicU64::new(0), max }
    }

    pub(crate) fn get(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes `add` and gives back `sub`, if that fits.
    fn exchange(&self, sub: usize, add: usize) -> bool {
        let fit = |used: u64| {
            let next = used - sub as u64 + add as u64;
            (next <= self.max).then_some(next)
        };
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fit).is_ok()
    }

    fn release(&self, sub: usize) {
        self.bytes.fetch_sub(sub as u64, Ordering::Relaxed);
    }
}

/// The hot keys, as one immutable snapshot.
#[derive(Default)]
pub(crate) struct Index {
    table: HashTable<Arc<Cell>>,
}

impl Index {
    #[inline]
    pub(crate) fn find(&self, hash: u64, key: &[u8]) -> Option<&Arc<Cell>> {
        self.table.find(hash, |c| c.hash == hash && same(c.key.as_bytes(), key))
    }

    pub(crate) fn insert(&mut self, cell: Arc<Cell>) {
        self.table.insert_unique(cell.hash, cell, |c| c.hash);
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Cell>> {
        self.table.iter()
    }
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Index({})", self.len())
    }
}

/// Equality without a call for keys of the usual lengths.
#[inline]
fn same(a: &[u8], b: &[u8]) -> bool {
    match a.len() {
        len if len != b.len() => false,
        8..=16 => a.first_chunk::<8>() == b.first_chunk() && a.last_chunk::<8>() == b.last_chunk(),
        4..=7 => a.first_chunk::<4>() == b.first_chunk() && a.last_chunk::<4>() == b.last_chunk(),
        _ => a == b,
    }
}

thread_local! {
    static ORDINAL: StdCell<usize> = const { StdCell::new(usize::MAX) };
}

/// A small number for this thread; neighbours in age get neighbouring numbers.
#[inline]
pub(crate) fn thread_ordinal() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    ORDINAL.with(|cell| {
        if cell.get() == usize::MAX {
            cell.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) & (usize::MAX >> 1));
        }
        cell.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Version;
    use proptest::prelude::*;

    fn entry(flight: u64, len: usize, version: Option<u64>) -> Arc<Entry> {
        Arc::new(Entry {
            bytes: vec![0u8; len].into(),
            absent: false,
            by_loader: false,
            ages: Ages { started: Tick(0), fresh_until: Tick(10), stale_until: Tick(20) },
            ttl_left: None,
            rank: Rank { flight, version: version.map(Version::seq) },
            epoch: 0,
            decoded: OnceLock::new(),
        })
    }

    fn spread(entry: Arc<Entry>) -> Spread {
        Spread::new(entry, (1, Key::from("k")), 2)
    }

    proptest! {
        /// C16.
        #[test]
        fn c16_the_byte_account_of_the_hot_tier_holds_after_every_operation(
            ops in proptest::collection::vec((0usize..4, 0u8..4, 0usize..5000), 1..200)
        ) {
            let used = Used::new(9000);
            let cells: Vec<Cell> = (0..4).map(|i| Cell::new(i, Key::from("k"))).collect();
            let mut flight = 0;
            for (at, op, len) in ops {
                flight += 1;
                match op {
                    0 | 1 => drop(cells[at].show(spread(entry(flight, len, None)), &used)),
                    2 => drop(cells[at].clear(&used)),
                    _ => drop(cells[at].close(&used)),
                }
                let sum: usize =
                    cells.iter().filter_map(|c| c.spread(|s| Some(s.charge))).sum();
                prop_assert_eq!(sum as u64, used.get());
                prop_assert!(used.get() <= 9000);
            }
        }
    }

    /// C15, at the cell.
    #[test]
    fn c15_an_older_version_does_not_replace_a_newer_one_in_a_cell() {
        let used = Used::new(1 << 20);
        let cell = Cell::new(1, Key::from("k"));
        assert!(cell.show(spread(entry(1, 1, Some(9))), &used).is_ok());
        let older = cell.show(spread(entry(2, 1, Some(8))), &used);
        assert_eq!(older.err(), Some(Refused::Older));
        assert!(cell.show(spread(entry(3, 1, Some(10))), &used).is_ok());
    }

    /// C13: one reader claims a refresh; a failed one may be claimed again after its pause.
    #[test]
    fn c13_a_refresh_is_claimed_once() {
        let shown = spread(entry(1, 1, None)).shown;
        assert!(!shown.claim_refresh(Tick(9)));
        assert!(shown.claim_refresh(Tick(10)));
        assert!(!shown.claim_refresh(Tick(11)));
        shown.refresh_again(Tick(15));
        assert!(!shown.claim_refresh(Tick(14)) && shown.claim_refresh(Tick(15)));
        assert_eq!(shown.serve(Tick(20), 0, None), None, "hard expiry wins");
    }

    /// A thread may have kept the handle: it must not outlive what the cell shows.
    #[test]
    fn a_handle_is_retired_by_whatever_takes_its_place() {
        let used = Used::new(1 << 20);
        let stands = |handle: &Handle| handle.stands_for(1, b"k");
        let cell = Cell::new(1, Key::from("k"));
        let mut flight = 0;
        let mut show = || {
            flight += 1;
            assert!(cell.show(spread(entry(flight, 1, None)), &used).is_ok());
            cell.spread(|s| Some(s.handle().clone())).unwrap()
        };
        let first = show();
        assert!(stands(&first));
        assert!(!first.stands_for(2, b"k") && !first.stands_for(1, b"l"));
        let second = show();
        assert!(!stands(&first) && stands(&second), "replaced");
        drop(cell.clear(&used));
        assert!(!stands(&second), "cleared");
        let third = show();
        drop(cell.close(&used));
        assert!(!stands(&third), "closed");
    }

    #[test]
    fn keys_are_compared_byte_by_byte() {
        for len in 0..40 {
            let a: Vec<u8> = (0..len).collect();
            assert!(same(&a, &a.clone()));
            for at in 0..a.len() {
                let mut b = a.clone();
                b[at] ^= 1;
                assert!(!same(&a, &b), "{len} {at}");
            }
            assert!(!same(&a, &[a.clone(), vec![0]].concat()));
        }
    }

    #[test]
    fn the_charge_covers_what_a_handle_really_takes() {
        // The counts stand before the aligned contents.
        assert!(size_of::<Handle>() + align_of::<Handle>() + size_of::<usize>() <= 136);
    }
}
