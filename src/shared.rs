//! What all handles of one instance share, and the decisions of the data engine carried out on it.
//!
//! 4,096 stripes, each a gate under a small lock; the index of hot cells; the epoch. A hit touches
//! the index, its cell and the `hot` line, all of them read-only. Everything else goes through the
//! lock of the key's stripe: so what the gate decides and what the cell shows change together.

use crate::adds::Counters;
use crate::call::{Outcome, Ticket, Waiter};
use crate::cell::{Cell, Entry, Index, Refused, Shown, Used};
use crate::config::Options;
use crate::control::Steering;
use crate::driver::SharedBooks;
use crate::engine::data::flight::{FlightId, WaiterId};
use crate::engine::data::gate::{Arrival, Gate, Landing, Limits, Tally, Want, WriteSlot};
use crate::engine::data::near::{Freshness, Rank};
use crate::engine::time::Tick;
use crate::error::{self, Error, ErrorKind, Result};
use crate::key::Key;
use crate::runtime::{Clock, Runtime};
use crate::sample::Sampler;
use crate::store::{DynStore, Stored};
use crate::sync::{ArcSwap, AtomicU64, Mutex, Ordering};
use ahash::RandomState;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Stripes of the gate. A power of two. Two keys of one stripe share a lock, never a decision.
const STRIPES: usize = 4096;

/// Keys with something under way, per stripe. 256 × 4,096 is a million loads and writes in flight.
const RECORDS_PER_STRIPE: usize = 256;

/// What every hit reads and almost nobody writes, on a line of its own.
#[repr(align(128))]
pub(crate) struct HotLine {
    /// Entries of another epoch are not served.
    epoch: AtomicU64,
    /// The index expires here unless the driver extends it.
    index_until: AtomicU64,
}

pub(crate) struct Shared {
    pub(crate) hot: HotLine,
    pub(crate) index: ArcSwap<Index>,
    pub(crate) clock: Clock,
    pub(crate) hasher: RandomState,
    pub(crate) sampler: Sampler,
    stripes: Box<[Mutex<Gate<Arc<Waiter>>>]>,
    pub(crate) options: Options,
    limits: Limits,
    pub(crate) store: Arc<dyn DynStore>,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) used: Used,
    pub(crate) books: SharedBooks,
    /// What the operator has said; also the lock under which the index is replaced.
    pub(crate) steering: parking_lot::Mutex<Steering>,
    pub(crate) counters: Counters,
    dice: AtomicU64,
    /// How many values were not cached because the hot tier had no room.
    refused_full: AtomicU64,
    refused_older: AtomicU64,
}

/// What a loader or the store brought.
pub(crate) struct Loaded {
    pub(crate) stored: Option<Stored>,
    pub(crate) by_loader: bool,
    pub(crate) decoded: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

/// What becomes of a caller that found nothing on the fast path.
pub(crate) enum Begin {
    /// Somebody filled the cell meanwhile.
    Hit(crate::value::Value, bool),
    /// It waits; with a ticket, it runs the load too.
    Wait(Arc<Waiter>, WaiterId, Option<Ticket>),
    /// It asks the store by itself.
    Bypass,
}

impl Shared {
    pub(crate) fn new(
        options: Options,
        store: Arc<dyn DynStore>,
        runtime: Arc<dyn Runtime>,
    ) -> Shared {
        let clock = runtime.clock();
        let seed = options.seed;
        let counters = Counters::new(seed, options.adds.writer.as_deref());
        Shared {
            hot: HotLine { epoch: AtomicU64::new(0), index_until: AtomicU64::new(0) },
            index: ArcSwap::from_pointee(Index::default()),
            clock,
            hasher: RandomState::with_seeds(seed, !seed, seed.rotate_left(32), 0x5eed),
            sampler: Sampler::new(seed),
            stripes: (0..STRIPES).map(|_| Mutex::new(Gate::default())).collect(),
            limits: Limits { records: RECORDS_PER_STRIPE, waiters: options.loads.waiters_max },
            used: Used::new(options.near.bytes_max as u64),
            options,
            store,
            runtime,
            books: SharedBooks::default(),
            steering: parking_lot::Mutex::default(),
            counters,
            dice: AtomicU64::new(seed),
            refused_full: AtomicU64::new(0),
            refused_older: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn hash(&self, key: &[u8]) -> u64 {
        self.hasher.hash_one(key)
    }

    /// Too long to be tracked: such a key goes straight to the store.
    pub(crate) fn untracked(key: &[u8]) -> bool {
        key.len() > crate::key::KEY_BYTES_MAX
    }

    fn stripe(&self, hash: u64) -> &Mutex<Gate<Arc<Waiter>>> {
        // The index table uses the low and the top bits of the hash; take others.
        &self.stripes[(hash >> 20) as usize & (STRIPES - 1)]
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.hot.epoch.load(Ordering::Acquire)
    }

    /// 64 bits that differ from call to call, drawn from the seed (splitmix64).
    pub(crate) fn roll(&self) -> u64 {
        let mut z = self.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Runs `f` on the cached value of `key`, if there is one that may be served.
    ///
    /// No lock, no allocation, no line written that another thread writes.
    #[inline]
    pub(crate) fn hit<R>(
        &self,
        hash: u64,
        key: &[u8],
        max_age: Option<Duration>,
        f: impl FnOnce(&Shown, Tick, Freshness) -> R,
    ) -> Option<R> {
        let index = self.index.load();
        let cell = index.find(hash, key)?;
        let now = self.clock.now();
        if now.0 >= self.hot.index_until.load(Ordering::Relaxed) {
            return None;
        }
        cell.with(|shown| {
            let freshness = shown.serve(now, self.epoch(), max_age)?;
            Some(f(shown, now, freshness))
        })
    }

    /// A caller that found nothing joins a load, leads one, or goes alone.
    pub(crate) fn begin(
        self: &Arc<Self>,
        hash: u64,
        key: &Key,
        max_age: Option<Duration>,
        loader: bool,
    ) -> Result<Begin> {
        if crate::call::is_loading(self, key) {
            return Err(Error::not_applied(
                ErrorKind::Recursive,
                "a load of this key asked for the key itself",
            )
            .with_key(key));
        }
        let waiter = Arc::new(Waiter::default());
        let mut gate = self.stripe(hash).lock();
        let now = self.clock.now();
        let latest = max_age == Some(Duration::ZERO);
        if !latest
            && let Some(hit) = self.hit(hash, key, max_age, |shown, now, freshness| {
                let due = shown.take_refresh(freshness, loader, now);
                (crate::value::Value::hot(shown.handle(), now, freshness), due)
            })
        {
            drop(gate);
            return Ok(Begin::Hit(hit.0, hit.1));
        }
        let not_before = match max_age {
            None => Tick::ZERO,
            Some(_) if latest => Tick::MAX,
            Some(max) => now.before(max),
        };
        let when = (now, self.epoch());
        let want = Want { not_before };
        let arrival = gate.arrive((hash, key), when, want, waiter.clone(), &self.limits);
        drop(gate);
        Ok(match arrival {
            Arrival::Lead(flight, id) => {
                let ticket = Ticket::new(self.clone(), hash, key.clone(), flight, now);
                Begin::Wait(waiter, id, Some(ticket))
            }
            Arrival::Wait(id) => Begin::Wait(waiter, id, None),
            Arrival::Bypass => Begin::Bypass,
        })
    }

    /// Starts a load in the background for a stale value, unless one runs.
    pub(crate) fn begin_refresh(
        self: &Arc<Self>,
        hash: u64,
        key: &Key,
    ) -> Option<(Arc<Waiter>, WaiterId, Ticket)> {
        let waiter = Arc::new(Waiter::default());
        let mut gate = self.stripe(hash).lock();
        let now = self.clock.now();
        let when = (now, self.epoch());
        let (flight, id) = gate.refresh((hash, key), when, waiter.clone(), &self.limits)?;
        drop(gate);
        let ticket = Ticket::new(self.clone(), hash, key.clone(), flight, now);
        Some((waiter, id, ticket))
    }

    /// A load has ended: close its flight, cache its value where that is allowed, and only then
    /// tell those who waited, outside the lock.
    pub(crate) fn land(
        self: &Arc<Self>,
        (hash, key): (u64, &Key),
        (flight, started): (FlightId, Tick),
        outcome: Result<Loaded>,
    ) {
        let entry = outcome.map(|loaded| Arc::new(self.entry(loaded, flight, started)));
        let mut gate = self.stripe(hash).lock();
        let when = (self.clock.now(), self.epoch());
        let landing = gate.land(hash, key, flight, when);
        let garbage = match (&landing, &entry) {
            (Some(landing), Ok(entry)) if landing.publish => self.publish(hash, key, entry),
            (_, Err(_)) => {
                self.pause_refresh(hash, key, when.0);
                None
            }
            _ => None,
        };
        drop(gate);
        drop(garbage);
        let outcome = entry.map_err(|e| e.with_key(key));
        if let Some(landing) = landing {
            self.deliver(hash, key, landing, outcome);
        }
    }

    pub(crate) fn entry(&self, loaded: Loaded, flight: FlightId, started: Tick) -> Entry {
        let absent = loaded.stored.is_none();
        let stored = loaded.stored.unwrap_or_default();
        let decoded = OnceLock::new();
        if let Some(value) = loaded.decoded {
            let _ = decoded.set(value);
        }
        let policy = &self.options.policy;
        Entry {
            ages: policy.ages(started, stored.ttl_left, absent, self.roll()),
            bytes: stored.bytes,
            absent,
            by_loader: loaded.by_loader,
            ttl_left: stored.ttl_left,
            rank: Rank { flight, version: stored.version },
            epoch: self.epoch(),
            decoded,
        }
    }

    /// Shows `entry` in the cell of its key, if it has one. The stripe's lock is held.
    fn publish(&self, hash: u64, key: &Key, entry: &Arc<Entry>) -> Option<Arc<Shown>> {
        let index = self.index.load();
        let cell = index.find(hash, key)?;
        if entry.bytes.len() > self.options.near.value_bytes_max {
            self.refused_full.fetch_add(1, Ordering::Relaxed);
            return cell.clear(&self.used);
        }
        match cell.show(Shown::new(entry.clone(), key.len(), self.options.stripes), &self.used) {
            Ok(old) => old,
            Err(Refused::Full) => {
                self.refused_full.fetch_add(1, Ordering::Relaxed);
                cell.clear(&self.used)
            }
            Err(Refused::Older) => {
                self.refused_older.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(Refused::Closed) => None,
        }
    }

    /// A refresh failed: while a stale value can be served, wait before the next.
    fn pause_refresh(&self, hash: u64, key: &Key, now: Tick) {
        let index = self.index.load();
        if let Some(cell) = index.find(hash, key) {
            cell.with(|shown| {
                shown.refresh_again(self.options.policy.refresh_again(now));
                Some(())
            });
        }
    }

    fn deliver(
        self: &Arc<Self>,
        hash: u64,
        key: &Key,
        landing: Landing<Arc<Waiter>>,
        outcome: Outcome,
    ) {
        for waiter in landing.waiters {
            waiter.deliver(outcome.clone());
        }
        self.tell_to_lead(hash, key, landing.next);
    }

    fn tell_to_lead(self: &Arc<Self>, hash: u64, key: &Key, next: Option<(FlightId, Arc<Waiter>)>) {
        if let Some((flight, waiter)) = next {
            // The load starts when the waiter runs; counting its age from here is the safe side.
            let now = self.clock.now();
            waiter.lead(Ticket::new(self.clone(), hash, key.clone(), flight, now));
        }
    }

    /// A load was dropped without an outcome.
    pub(crate) fn abandon(self: &Arc<Self>, hash: u64, key: &Key, flight: FlightId) {
        let when = (self.clock.now(), self.epoch());
        let next = self.stripe(hash).lock().abandon(hash, key, flight, when);
        self.pause_refresh(hash, key, when.0);
        self.tell_to_lead(hash, key, next);
    }

    /// A caller gave up.
    pub(crate) fn leave(&self, hash: u64, key: &Key, waiter: WaiterId) {
        let now = self.clock.now();
        self.stripe(hash).lock().leave(hash, key, waiter, now);
    }

    /// A write is about to be sent: nobody who comes from here on gets what was loaded before.
    pub(crate) fn begin_write(&self, hash: u64, key: &Key) -> WriteSlot {
        let mut gate = self.stripe(hash).lock();
        let slot = gate.begin_write(hash, key, self.clock.now(), &self.limits);
        let garbage = self.clear_cell(hash, key);
        drop(gate);
        drop(garbage);
        slot
    }

    /// The write has ended; `outcome` is `None` when it was acknowledged.
    pub(crate) fn end_write(
        &self,
        hash: u64,
        key: &Key,
        slot: WriteSlot,
        outcome: Option<error::Outcome>,
    ) {
        let quarantine = self.store.max_in_flight_time();
        let mut gate = self.stripe(hash).lock();
        gate.end_write((hash, key), slot, outcome, self.clock.now(), quarantine);
    }

    pub(crate) fn invalidate(&self, hash: u64, key: &Key) {
        let mut gate = self.stripe(hash).lock();
        gate.invalidate(hash, key);
        let garbage = self.clear_cell(hash, key);
        drop(gate);
        drop(garbage);
    }

    /// Voids what is cached and what is being loaded under all keys that begin with `prefix`.
    pub(crate) fn invalidate_prefix(&self, prefix: &[u8]) {
        for stripe in &self.stripes {
            stripe.lock().invalidate_where(|key| key.starts_with(prefix));
        }
        // A load that began before this call is void by now, so nothing older can be shown after
        // its cell is cleared.
        let index = self.index.load_full();
        for cell in index.iter().filter(|c| c.key.starts_with(prefix)) {
            let gate = self.stripe(cell.hash).lock();
            let garbage = cell.clear(&self.used);
            drop(gate);
            drop(garbage);
        }
    }

    /// Makes everything cached or being loaded so far unreadable, in one step.
    pub(crate) fn invalidate_all(&self) {
        self.hot.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Clears cells whose value cannot be served any more: what nobody can read must not hold the
    /// room, nor the rank, against what is loaded next.
    pub(crate) fn clear_dead(&self) {
        let dead = |cell: &Cell| {
            let (now, epoch) = (self.clock.now(), self.epoch());
            cell.with(|shown| Some(shown.serve(now, epoch, None).is_none())).unwrap_or(false)
        };
        for cell in self.index.load_full().iter().filter(|cell| dead(cell)) {
            let gate = self.stripe(cell.hash).lock();
            // A newer value may have taken its place meanwhile.
            let garbage = if dead(cell) { cell.clear(&self.used) } else { None };
            drop(gate);
            drop(garbage);
        }
    }

    fn clear_cell(&self, hash: u64, key: &[u8]) -> Option<Arc<Shown>> {
        self.index.load().find(hash, key)?.clear(&self.used)
    }

    /// Publishes the set of hot keys. Keys that leave it show nothing any more before the new
    /// index is in force; keys that stay keep their cells. Callers hold the control lock.
    pub(crate) fn publish_index(&self, keys: &[Key]) {
        let old = self.index.load_full();
        let mut next = Index::default();
        for key in keys {
            let hash = self.hash(key);
            if next.find(hash, key).is_some() {
                continue;
            }
            let kept = old.find(hash, key).cloned();
            next.insert(kept.unwrap_or_else(|| Arc::new(Cell::new(hash, key.clone()))));
        }
        for cell in old.iter().filter(|c| next.find(c.hash, &c.key).is_none()) {
            let gate = self.stripe(cell.hash).lock();
            let garbage = cell.close(&self.used);
            drop(gate);
            drop(garbage);
        }
        self.index.store(Arc::new(next));
    }

    /// The driver is alive: the index holds until `until`.
    pub(crate) fn extend_index(&self, until: Tick) {
        self.hot.index_until.store(until.0, Ordering::Relaxed);
    }

    /// Closes loads that have run into the time limit.
    pub(crate) fn time_out(self: &Arc<Self>) {
        let limit = self.options.loads.timeout;
        for stripe in &self.stripes {
            let mut told = Vec::new();
            let mut gate = stripe.lock();
            if gate.is_empty() {
                continue;
            }
            let now = self.clock.now();
            gate.time_out((now, self.epoch()), limit, |key, landing| {
                told.push((key.clone(), landing));
            });
            gate.sweep(now);
            drop(gate);
            for (key, landing) in told {
                let hash = self.hash(&key);
                self.pause_refresh(hash, &key, now);
                let text = format!("the load took longer than {limit:?}");
                let error = Error::not_applied(ErrorKind::Timeout, text).with_key(&key);
                self.deliver(hash, &key, landing, Err(error));
            }
        }
    }

    /// Writes under way and the end of the quarantine of one key.
    pub(crate) fn writes_of(&self, hash: u64, key: &[u8]) -> (u32, Tick) {
        self.stripe(hash).lock().writes_of(hash, key)
    }

    /// What all gates have seen; keys and loads under way; refusals of the hot tier.
    pub(crate) fn tally(&self) -> (Tally, usize, usize) {
        let mut sum = Tally::default();
        let (mut keys, mut loads) = (0, 0);
        for stripe in &self.stripes {
            let gate = stripe.lock();
            sum += gate.tally();
            keys += gate.len();
            loads += gate.in_flight();
        }
        (sum, keys, loads)
    }

    pub(crate) fn refused(&self) -> (u64, u64) {
        (self.refused_full.load(Ordering::Relaxed), self.refused_older.load(Ordering::Relaxed))
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("hot_keys", &self.index.load().len()).finish()
    }
}
