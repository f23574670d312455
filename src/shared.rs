//! What all handles of one instance share, and the decisions of the data engine carried out on it.
//!
//! 4,096 stripes, each a gate under a small lock; the index of hot cells; the epoch. A hit touches
//! what its thread keeps (or the index and a cell) and the `hot` line, all of them read-only.
//! Everything else goes through the lock of the key's stripe: so what the gate decides and what
//! the cell shows change together.

use crate::adds::Counters;
use crate::call::{self, Outcome, Ticket, Waiter};
use crate::cell::{Entry, Handle, Index, Refused, Spread, Used};
use crate::config::Options;
use crate::driver::SharedBooks;
use crate::engine::control::steering::Steering;
use crate::engine::data::flight::{FlightId, WaiterId};
use crate::engine::data::gate::{Arrival, Gate, Landing, Limits, Want, WriteSlot};
use crate::engine::data::near::{Freshness, Rank};
use crate::engine::time::Tick;
use crate::error::{self, Error, ErrorKind, Result};
use crate::hotlist::Followers;
use crate::kept;
use crate::key::Key;
use crate::runtime::{Clock, Runtime};
use crate::salt::Salted;
use crate::sample::{Sampler, Seen};
use crate::shed::Shed;
use crate::store::{DynStore, Stored};
use crate::stream::Stream;
use crate::sync::{ArcSwap, AtomicU64, Mutex, Ordering};
use ahash::RandomState;
use arc_swap::ArcSwapOption;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
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
    pub(crate) index_until: AtomicU64,
}

pub(crate) struct Shared {
    pub(crate) hot: HotLine,
    pub(crate) index: ArcSwap<Index>,
    /// Tells the handles that a thread has kept apart by their instance.
    instance: u64,
    pub(crate) clock: Clock,
    pub(crate) hasher: RandomState,
    pub(crate) sampler: Sampler,
    pub(crate) stripes: Box<[Mutex<Gate<Arc<Waiter>>>]>,
    /// A bit per stripe, set while something may be under way there: what the driver has to visit.
    pub(crate) busy: Box<[AtomicU64]>,
    pub(crate) options: Options,
    limits: Limits,
    pub(crate) store: Arc<dyn DynStore>,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) used: Used,
    pub(crate) books: SharedBooks,
    /// Who is treated; also the lock under which the index is replaced. Taken before `books`.
    pub(crate) steering: parking_lot::Mutex<Steering>,
    /// Those who wait for the next hot list.
    pub(crate) followers: Followers,
    pub(crate) counters: Counters,
    /// Only where the user asked for it.
    pub(crate) salted: Option<Box<Salted>>,
    pub(crate) shed: Shed,
    /// Where writes are announced, if they are.
    pub(crate) stream: Option<Stream>,
    dice: AtomicU64,
    /// How many values were not cached because the hot tier had no room.
    pub(crate) refused_full: AtomicU64,
    pub(crate) refused_older: AtomicU64,
    /// Turns of the driver that ended in a panic.
    pub(crate) driver_panics: AtomicU64,
    /// The feed that this handle takes part in.
    #[cfg(feature = "feed")]
    pub(crate) feed: parking_lot::Mutex<Option<std::sync::Weak<dyn crate::feed::Numbers>>>,
    /// How long values of these keys, by their hash, may be served at most, by the word of the list
    /// that a feed follows.
    pub(crate) fed_ttls: ArcSwapOption<BTreeMap<u64, Duration>>,
    /// The instance has ended; written under the lock of `steering`.
    pub(crate) ended: std::sync::atomic::AtomicBool,
}

/// What a loader or the store brought.
pub(crate) struct Loaded {
    pub(crate) stored: Option<Stored>,
    pub(crate) by_loader: bool,
    /// Read past the cache: its expiry is not known, so it may be shown to nobody who comes later.
    pub(crate) uncached: bool,
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

fn stripe_of(hash: u64) -> usize {
    // The index table uses the low and the top bits of the hash; take others.
    (hash >> 20) as usize & (STRIPES - 1)
}

impl Begin {
    /// What the request was, for the detector.
    pub(crate) fn seen(&self) -> Seen {
        match self {
            Begin::Hit(value, _) => Seen::hit(value),
            Begin::Wait(_, _, None) => Seen::Joined,
            Begin::Wait(_, _, Some(_)) | Begin::Bypass => Seen::Load,
        }
    }
}

impl Shared {
    pub(crate) fn new(
        options: Options,
        store: Arc<dyn DynStore>,
        runtime: Arc<dyn Runtime>,
    ) -> Shared {
        static INSTANCES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let clock = runtime.clock();
        let seed = options.seed;
        let steering = options.steering.clone();
        let counters = Counters::new(seed, options.adds.writer.as_deref());
        let salted = options.salt.as_ref().map(|salt| Box::new(Salted::new(salt, &store)));
        let shed = Shed::new(&options, &clock);
        let stream = options.invalidations.clone().map(|i| Stream::new(i, seed, clock.now()));
        Shared {
            hot: HotLine { epoch: AtomicU64::new(0), index_until: AtomicU64::new(0) },
            index: ArcSwap::from_pointee(Index::default()),
            instance: INSTANCES.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            clock,
            hasher: RandomState::with_seeds(seed, !seed, seed.rotate_left(32), 0x5eed),
            sampler: Sampler::new(seed),
            stripes: (0..STRIPES).map(|_| Mutex::new(Gate::default())).collect(),
            busy: (0..STRIPES / 64).map(|_| AtomicU64::new(0)).collect(),
            limits: Limits { records: RECORDS_PER_STRIPE, waiters: options.loads.waiters_max },
            used: Used::new(options.near.bytes_max as u64),
            options,
            store,
            runtime,
            books: SharedBooks::default(),
            steering: parking_lot::Mutex::new(Steering::new(steering, seed)),
            followers: Followers::default(),
            counters,
            salted,
            shed,
            stream,
            dice: AtomicU64::new(seed),
            refused_full: AtomicU64::new(0),
            refused_older: AtomicU64::new(0),
            driver_panics: AtomicU64::new(0),
            #[cfg(feature = "feed")]
            feed: parking_lot::Mutex::default(),
            fed_ttls: ArcSwapOption::empty(),
            ended: std::sync::atomic::AtomicBool::new(false),
        }
    }

    #[inline]
    pub(crate) fn hash(&self, key: &[u8]) -> u64 {
        // `hash_one` would mix in the length once more.
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key);
        hasher.finish()
    }

    /// Leaves a sample of a request for the driver.
    #[cold]
    pub(crate) fn sample(&self, key: &[u8], seen: Seen, cost: u32) {
        self.sampler.push(self.hash(key), key, seen, cost);
    }

    /// Too long to be tracked: such a key goes straight to the store.
    pub(crate) fn untracked(key: &[u8]) -> bool {
        key.len() > crate::key::KEY_BYTES_MAX
    }

    pub(crate) fn stripe(&self, hash: u64) -> &Mutex<Gate<Arc<Waiter>>> {
        &self.stripes[stripe_of(hash)]
    }

    /// Something has begun on the stripe of `hash`. Its lock is held, so a visit of the driver
    /// that finds the stripe empty and clears the bit comes before or after, not in between.
    fn mark_busy(&self, hash: u64) {
        let at = stripe_of(hash);
        let (word, bit) = (&self.busy[at / 64], 1 << (at % 64));
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
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
        key: &[u8],
        max_age: Option<Duration>,
        f: impl FnOnce(&Arc<Handle>, Tick, Freshness) -> R,
    ) -> Option<R> {
        let mut f = Some(f);
        let kept = kept::with(key, |handle| {
            let stands = handle.stands_for(self.instance, key);
            stands.then(|| {
                self.serve(handle, max_age, |h, now, fresh| Some(f.take()?(h, now, fresh)))
            })
        });
        match kept {
            Some(out) => out.flatten(),
            None => self.find(key, max_age, true, f?),
        }
    }

    /// Runs `f` on what this thread keeps of `key`, if there is a value and it is fresh: nearly all
    /// hits, with nothing left to decide. Everything else is for [`hit`](Shared::hit).
    #[inline(always)]
    pub(crate) fn fresh<R>(
        &self,
        key: &[u8],
        f: &mut Option<impl FnOnce(&Arc<Handle>, Tick) -> R>,
    ) -> Option<R> {
        kept::with(key, |handle| {
            if !handle.stands_for(self.instance, key) {
                return None;
            }
            let (entry, now) = (handle.entry(), self.clock.now());
            let fresh = now < entry.ages.fresh_until
                && now.0 < self.hot.index_until.load(Ordering::Relaxed)
                && entry.epoch == self.epoch()
                && !entry.absent;
            if fresh { Some(f.take()?(handle, now)) } else { None }
        })
    }

    /// Like [`hit`](Shared::hit), by way of the index.
    #[cold]
    #[inline(never)]
    fn find<R>(
        &self,
        key: &[u8],
        max_age: Option<Duration>,
        keep: bool,
        f: impl FnOnce(&Arc<Handle>, Tick, Freshness) -> R,
    ) -> Option<R> {
        let index = self.index.load();
        index.find(self.hash(key), key)?.spread(|spread| {
            let handle = spread.handle();
            let out = self.serve(handle, max_age, f)?;
            if keep && handle.entry().bytes.len() <= kept::BYTES_MAX {
                kept::keep(key, handle.clone());
            }
            Some(out)
        })
    }

    #[inline(always)]
    fn serve<R>(
        &self,
        handle: &Arc<Handle>,
        max_age: Option<Duration>,
        f: impl FnOnce(&Arc<Handle>, Tick, Freshness) -> R,
    ) -> Option<R> {
        let now = self.clock.now();
        if now.0 >= self.hot.index_until.load(Ordering::Relaxed) {
            return None;
        }
        let freshness = handle.shown().serve(now, self.epoch(), max_age)?;
        Some(f(handle, now, freshness))
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
            // Not kept: what goes for it may be the last of a user's type, and the lock is held.
            && let Some(hit) = self.find(key, max_age, false, |handle, now, freshness| {
                let due = handle.shown().take_refresh(freshness, loader, now);
                (crate::value::Value::hot(handle.clone(), now, freshness), due)
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
        self.mark_busy(hash);
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
        self.mark_busy(hash);
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
        let entry = outcome.map(|loaded| Arc::new(self.entry(loaded, flight, started, hash)));
        let mut gate = self.stripe(hash).lock();
        let when = (self.clock.now(), self.epoch());
        let landing = gate.land(hash, key, flight, when);
        let garbage = match (&landing, &entry) {
            (Some(landing), Ok(entry)) if landing.publish => self.publish(hash, key, entry),
            // The failure of a load that was voided says nothing of the value shown now.
            (Some(landing), Err(_)) if landing.publish => {
                self.pause_refresh(hash, key, when.0);
                None
            }
            _ => None,
        };
        let thawed = match (&landing, &entry, &self.shed.frozen) {
            (Some(landing), Ok(entry), Some(frozen)) if landing.publish => {
                frozen.remember(hash, key, entry)
            }
            _ => Vec::new(),
        };
        drop(gate);
        drop((garbage, thawed));
        let outcome = entry.map_err(|e| e.with_key(key));
        if let Some(landing) = landing {
            self.deliver(hash, key, landing, outcome);
        }
    }

    pub(crate) fn entry(
        &self,
        loaded: Loaded,
        flight: FlightId,
        started: Tick,
        phase: u64,
    ) -> Entry {
        let absent = loaded.stored.is_none();
        let stored = loaded.stored.unwrap_or_default();
        let decoded = OnceLock::new();
        if let Some(value) = loaded.decoded {
            let _ = decoded.set(value);
        }
        let policy = &self.options.policy;
        let lives = if loaded.uncached { Some(Duration::ZERO) } else { stored.ttl_left };
        let fed = self.fed_ttls.load().as_ref().and_then(|ttls| ttls.get(&phase).copied());
        let lives = lives.into_iter().chain(fed).min();
        let ages = policy.ages(started, lives, absent, self.roll());
        let took = self.clock.now().since(started);
        Entry {
            // The hash is seeded, so one key has another phase in every process.
            ages: policy.timed(ages, took, phase),
            bytes: stored.bytes,
            absent,
            by_loader: loaded.by_loader,
            ttl_left: stored.ttl_left,
            rank: Rank { flight, version: stored.version },
            epoch: self.epoch(),
            decoded,
        }
    }

    /// Whether values of the key are cached now.
    pub(crate) fn is_hot(&self, hash: u64, key: &Key) -> bool {
        self.index.load().find(hash, key).is_some()
    }

    /// Shows `entry` in the cell of its key, if it has one. The stripe's lock is held.
    fn publish(&self, hash: u64, key: &Key, entry: &Arc<Entry>) -> Option<Arc<Spread>> {
        let index = self.index.load();
        let cell = index.find(hash, key)?;
        if entry.bytes.len() > self.options.near.value_bytes_max {
            self.refused_full.fetch_add(1, Ordering::Relaxed);
            return cell.clear(&self.used);
        }
        let of = (self.instance, key.clone());
        match cell.show(Spread::new(entry.clone(), of, self.options.stripes), &self.used) {
            Ok(old) => old,
            Err(Refused::Full) => {
                self.refused_full.fetch_add(1, Ordering::Relaxed);
                cell.clear(&self.used)
            }
            Err(Refused::Older) => {
                self.refused_older.fetch_add(1, Ordering::Relaxed);
                // The value that stays may be refreshed again.
                self.pause_refresh(hash, key, self.clock.now());
                None
            }
            Err(Refused::Closed) => None,
        }
    }

    /// A refresh failed: while a stale value can be served, wait before the next.
    pub(crate) fn pause_refresh(&self, hash: u64, key: &Key, now: Tick) {
        let index = self.index.load();
        if let Some(cell) = index.find(hash, key) {
            cell.with(|shown| {
                shown.refresh_again(self.options.policy.refresh_again(now));
                Some(())
            });
        }
    }

    pub(crate) fn deliver(
        self: &Arc<Self>,
        hash: u64,
        key: &Key,
        landing: Landing<Arc<Waiter>>,
        outcome: Outcome,
    ) {
        call::each(landing.waiters, |waiter| waiter.deliver(outcome.clone()));
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
        self.mark_busy(hash);
        let slot = gate.begin_write(hash, key, self.clock.now(), &self.limits);
        let garbage = (self.clear_cell(hash, key), self.forget(hash, key));
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
        drop(gate);
        if let Some(stream) = &self.stream
            && outcome != Some(error::Outcome::NotApplied)
        {
            stream.wrote(self.clock.now(), key);
        }
    }

    pub(crate) fn invalidate(&self, hash: u64, key: &Key) {
        let mut gate = self.stripe(hash).lock();
        gate.invalidate(hash, key);
        let garbage = (self.clear_cell(hash, key), self.forget(hash, key));
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
        if let Some(frozen) = &self.shed.frozen {
            frozen.forget_prefix(prefix);
        }
    }

    /// Makes everything cached or being loaded so far unreadable, in one step.
    pub(crate) fn invalidate_all(&self) {
        self.hot.epoch.fetch_add(1, Ordering::AcqRel);
    }

    fn clear_cell(&self, hash: u64, key: &[u8]) -> Option<Arc<Spread>> {
        self.index.load().find(hash, key)?.clear(&self.used)
    }

    /// The last known value goes too. The lock of the key's stripe is held.
    fn forget(&self, hash: u64, key: &[u8]) -> Option<Arc<Entry>> {
        self.shed.frozen.as_ref().and_then(|frozen| frozen.forget(hash, key))
    }

    /// Writes under way and the end of the quarantine of one key.
    pub(crate) fn writes_of(&self, hash: u64, key: &[u8]) -> (u32, Tick) {
        self.stripe(hash).lock().writes_of(hash, key)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("hot_keys", &self.index.load().len()).finish()
    }
}
