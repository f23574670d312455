//! The write gate and single flight of the keys of one stripe.
//!
//! - **What**: loads and writes of a key announce their beginning and their end here; the gate
//!   says which load a caller joins and which value may be cached.
//! - **Invariant**: a value is cached only if no write or invalidation of its key was active when
//!   its load began, none began before it was published, and no write of unknown outcome can still
//!   land; a caller never joins a load that began before a write which returned before the call.
//! - **Time and units**: ticks; the quarantine is the store's maximum in-flight time.
//! - **Bounds**: [`Limits::records`] keys with something under way per stripe, two loads and one
//!   waiting group per key, [`Limits::waiters`] callers each. Beyond them a caller goes to the
//!   store by itself and a write closes the whole stripe.
//! - **Source**: `research/nearcache.md` sections 4 A, 5.1 to 5.3 and contract C1 to C20.

use super::flight::{Flight, FlightId, WaiterId, Waiters};
use crate::engine::time::Tick;
use crate::error::Outcome;
use crate::key::Key;
use std::time::Duration;

/// Loads of one key that run side by side at most: one that a write overlapped and the one that
/// those who came later wait for. Further callers form a group that waits for either to end.
pub const FLIGHTS_PER_KEY: usize = 2;

/// What one gate may hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Keys with a load, a write or a quarantine under way.
    pub records: usize,
    /// Callers that wait for one flight, and in one group.
    pub waiters: usize,
}

/// What a caller wants to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Want {
    /// The earliest start of a load that the caller accepts; [`Tick::MAX`]: only one that starts
    /// after the call.
    pub not_before: Tick,
}

/// What an arriving caller does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// It runs the load and waits for its outcome like everybody else.
    Lead(FlightId, WaiterId),
    /// It waits for a load that somebody else runs or will run.
    Wait(WaiterId),
    /// The gate is full: it asks the store by itself, and nothing is cached.
    Bypass,
}

/// What follows from the end of a flight.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Landing<W> {
    /// The value may be cached.
    pub publish: bool,
    /// When the load had started.
    pub started: Tick,
    /// Who gets the outcome, in the order of arrival.
    pub waiters: Waiters<W>,
    /// A caller that must now lead a load of its group, if one was waiting.
    pub next: Option<(FlightId, W)>,
}

/// Plain counts of what a gate has seen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Tally {
    /// Loads that were started.
    pub loads: u64,
    /// Callers that joined a load of somebody else.
    pub joined: u64,
    /// Loads whose value was not cached because a write or an invalidation overlapped them.
    pub overlapped: u64,
    /// Loads that were given up and handed to a waiter.
    pub handed_over: u64,
    /// Outcomes that came after their flight had been closed.
    pub late: u64,
    /// Callers that went to the store by themselves because a table was full.
    pub bypassed: u64,
    /// Writes that began.
    pub writes: u64,
    /// Writes that ended with an unknown outcome.
    pub unknown: u64,
    /// Loads that ran into the time limit.
    pub timed_out: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.loads += other.loads;
        self.joined += other.joined;
        self.overlapped += other.overlapped;
        self.handed_over += other.handed_over;
        self.late += other.late;
        self.bypassed += other.bypassed;
        self.writes += other.writes;
        self.unknown += other.unknown;
        self.timed_out += other.timed_out;
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Record<W> {
    hash: u64,
    key: Key,
    writes: u32,
    /// No value may be cached before this: a write of unknown outcome may still land.
    unknown_until: Tick,
    flights: Vec<Flight<W>>,
    group: Waiters<W>,
}

impl<W: Clone> Record<W> {
    fn new(hash: u64, key: Key) -> Record<W> {
        Record {
            hash,
            key,
            writes: 0,
            unknown_until: Tick::ZERO,
            flights: Vec::new(),
            group: Waiters::default(),
        }
    }

    fn idle(&self, now: Tick) -> bool {
        self.writes == 0
            && self.flights.is_empty()
            && self.group.is_empty()
            && self.unknown_until <= now
    }

    fn void_flights(&mut self) {
        for flight in &mut self.flights {
            flight.joinable = false;
        }
    }
}

/// The gate of one stripe. `W` is a waiting caller as the shell knows it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Gate<W> {
    records: Vec<Record<W>>,
    last_id: u64,
    /// Writes under way that found no room for a record: while there are any, nothing of this
    /// stripe is cached.
    crowded_writes: u32,
    /// The same for quarantines that found no room.
    crowded_until: Tick,
    tally: Tally,
}

impl<W> Default for Gate<W> {
    fn default() -> Self {
        Gate {
            records: Vec::new(),
            last_id: 0,
            crowded_writes: 0,
            crowded_until: Tick::ZERO,
            tally: Tally::default(),
        }
    }
}

impl<W: Clone> Gate<W> {
    /// Writes of `key` under way, and until when a write of unknown outcome keeps it uncacheable.
    #[must_use]
    pub fn writes_of(&self, hash: u64, key: &[u8]) -> (u32, Tick) {
        let own = self.find(hash, key).map(|at| &self.records[at]);
        let (writes, until) = own.map_or((0, Tick::ZERO), |r| (r.writes, r.unknown_until));
        (writes + self.crowded_writes, until.max(self.crowded_until))
    }

    /// What this gate has seen.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Keys with something under way.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True when nothing is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The keys with loads under way, each with their number.
    pub fn loading(&self) -> impl Iterator<Item = (&Key, usize)> {
        self.records.iter().map(|r| (&r.key, r.flights.len())).filter(|(_, n)| *n > 0)
    }

    fn find(&self, hash: u64, key: &[u8]) -> Option<usize> {
        self.records.iter().position(|r| r.hash == hash && r.key.as_bytes() == key)
    }

    fn find_or_insert(
        &mut self,
        hash: u64,
        key: &Key,
        now: Tick,
        limits: &Limits,
    ) -> Option<usize> {
        if let Some(at) = self.find(hash, key) {
            return Some(at);
        }
        if self.records.len() >= limits.records {
            self.sweep(now);
        }
        if self.records.len() >= limits.records {
            return None;
        }
        self.records.push(Record::new(hash, key.clone()));
        Some(self.records.len() - 1)
    }

    /// Forgets keys with nothing under way. Called when a table is full and by the driver.
    pub fn sweep(&mut self, now: Tick) {
        self.records.retain(|r| !r.idle(now));
        if self.records.capacity() > 16 && self.records.len() < self.records.capacity() / 4 {
            self.records.shrink_to(16);
        }
    }

    fn forget_if_idle(&mut self, at: usize, now: Tick) {
        if self.records[at].idle(now) {
            self.records.swap_remove(at);
        }
    }

    fn fresh_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// A caller asks for `key` and found nothing to serve.
    pub fn arrive(
        &mut self,
        (hash, key): (u64, &Key),
        (now, epoch): (Tick, u64),
        want: Want,
        waiter: W,
        limits: &Limits,
    ) -> Arrival {
        let Some(at) = self.find_or_insert(hash, key, now, limits) else {
            self.tally.bypassed += 1;
            return Arrival::Bypass;
        };
        let id = self.fresh_id();
        let record = &mut self.records[at];
        let joinable = record
            .flights
            .iter_mut()
            .rev()
            .find(|f| f.joinable && f.epoch == epoch && f.started >= want.not_before);
        if let Some(flight) = joinable {
            if flight.waiters.len() >= limits.waiters {
                self.tally.bypassed += 1;
                return Arrival::Bypass;
            }
            flight.waiters.push(id, waiter);
            self.tally.joined += 1;
            return Arrival::Wait(id);
        }
        if record.flights.len() < FLIGHTS_PER_KEY {
            let mut waiters = Waiters::default();
            waiters.push(id, waiter);
            return Arrival::Lead(self.launch(at, now, epoch, waiters), id);
        }
        if record.group.len() >= limits.waiters {
            self.tally.bypassed += 1;
            return Arrival::Bypass;
        }
        record.group.push(id, waiter);
        self.tally.joined += 1;
        Arrival::Wait(id)
    }

    /// A load in the background, to replace a value that has become stale; `None` when one runs
    /// already or the table is full. `waiter` is the task that runs it: it must learn of a time
    /// limit.
    pub fn refresh(
        &mut self,
        (hash, key): (u64, &Key),
        (now, epoch): (Tick, u64),
        waiter: W,
        limits: &Limits,
    ) -> Option<(FlightId, WaiterId)> {
        let at = self.find_or_insert(hash, key, now, limits)?;
        let record = &self.records[at];
        let running = record.flights.iter().any(|f| f.joinable && f.epoch == epoch);
        if running || record.flights.len() >= FLIGHTS_PER_KEY {
            return None;
        }
        let id = self.fresh_id();
        let mut waiters = Waiters::default();
        waiters.push(id, waiter);
        Some((self.launch(at, now, epoch, waiters), id))
    }

    fn launch(&mut self, at: usize, now: Tick, epoch: u64, waiters: Waiters<W>) -> FlightId {
        let id = self.fresh_id();
        self.tally.loads += 1;
        let open = self.crowded_writes == 0 && self.crowded_until <= now;
        let record = &mut self.records[at];
        let cacheable = open && record.writes == 0 && record.unknown_until <= now;
        record.flights.push(Flight { id, started: now, epoch, joinable: true, cacheable, waiters });
        id
    }

    /// A caller gave up. Its load, if it ran one, goes on or is [abandoned](Gate::abandon).
    pub fn leave(&mut self, hash: u64, key: &[u8], waiter: WaiterId, now: Tick) {
        let Some(at) = self.find(hash, key) else { return };
        let record = &mut self.records[at];
        let _ = record.group.leave(waiter)
            || record.flights.iter_mut().any(|f| f.waiters.leave(waiter));
        self.forget_if_idle(at, now);
    }

    /// A load has an outcome. `None` when its flight had been closed before (a time limit): the
    /// outcome is for nobody.
    pub fn land(
        &mut self,
        hash: u64,
        key: &[u8],
        id: FlightId,
        (now, epoch): (Tick, u64),
    ) -> Option<Landing<W>> {
        let found = self.find(hash, key).and_then(|at| {
            let slot = self.records[at].flights.iter().position(|f| f.id == id)?;
            Some((at, slot))
        });
        let Some((at, slot)) = found else {
            self.tally.late += 1;
            return None;
        };
        let record = &mut self.records[at];
        let flight = record.flights.remove(slot);
        let quiet = record.writes == 0 && record.unknown_until <= now;
        let publish = flight.joinable
            && flight.cacheable
            && flight.epoch == epoch
            && quiet
            && self.crowded_writes == 0
            && self.crowded_until <= now;
        self.tally.overlapped += u64::from(!publish);
        let next = self.start_group(at, now, epoch);
        self.forget_if_idle(at, now);
        Some(Landing { publish, started: flight.started, waiters: flight.waiters, next })
    }

    /// A load was dropped without an outcome: its runtime died. The caller that has waited longest
    /// leads a new one; nobody else has to do anything.
    pub fn abandon(
        &mut self,
        hash: u64,
        key: &[u8],
        id: FlightId,
        (now, epoch): (Tick, u64),
    ) -> Option<(FlightId, W)> {
        let at = self.find(hash, key)?;
        let slot = self.records[at].flights.iter().position(|f| f.id == id)?;
        let flight = self.records[at].flights.remove(slot);
        let next = match flight.waiters.first() {
            Some(leader) => {
                self.tally.handed_over += 1;
                Some((self.launch(at, now, epoch, flight.waiters), leader))
            }
            None => self.start_group(at, now, epoch),
        };
        self.forget_if_idle(at, now);
        next
    }

    /// Starts the waiting group where there is room for a flight.
    fn start_group(&mut self, at: usize, now: Tick, epoch: u64) -> Option<(FlightId, W)> {
        let record = &mut self.records[at];
        if record.flights.len() >= FLIGHTS_PER_KEY {
            return None;
        }
        let leader = record.group.first()?;
        let group = std::mem::take(&mut record.group);
        Some((self.launch(at, now, epoch, group), leader))
    }

    /// Closes the flights that have run for `limit` or longer; who must be told so, and who leads
    /// next.
    pub fn time_out(
        &mut self,
        (now, epoch): (Tick, u64),
        limit: Duration,
        mut tell: impl FnMut(&Key, Landing<W>),
    ) {
        for at in (0..self.records.len()).rev() {
            while let Some(slot) =
                self.records[at].flights.iter().position(|f| now.since(f.started) >= limit)
            {
                let flight = self.records[at].flights.remove(slot);
                self.tally.timed_out += 1;
                let next = self.start_group(at, now, epoch);
                let waiters = flight.waiters;
                let started = flight.started;
                let key = &self.records[at].key;
                tell(key, Landing { publish: false, started, waiters, next });
            }
            self.forget_if_idle(at, now);
        }
    }

    /// A write of `key` is about to be sent. Whoever comes from here on does not get a value that
    /// was loaded before.
    pub fn begin_write(&mut self, hash: u64, key: &Key, now: Tick, limits: &Limits) -> WriteSlot {
        self.tally.writes += 1;
        if let Some(at) = self.find_or_insert(hash, key, now, limits) {
            let record = &mut self.records[at];
            record.writes += 1;
            record.void_flights();
            return WriteSlot::Own;
        }
        self.crowded_writes += 1;
        self.void_all();
        WriteSlot::Crowded
    }

    /// A write of `key` has ended; `now + quarantine` is the last moment at which one of unknown
    /// outcome may still land.
    pub fn end_write(
        &mut self,
        (hash, key): (u64, &[u8]),
        slot: WriteSlot,
        outcome: Option<Outcome>,
        now: Tick,
        quarantine: Duration,
    ) {
        let unknown = outcome == Some(Outcome::Unknown);
        self.tally.unknown += u64::from(unknown);
        let until = if unknown { now.after(quarantine) } else { Tick::ZERO };
        if slot == WriteSlot::Crowded {
            self.crowded_writes -= 1;
            self.crowded_until = self.crowded_until.max(until);
            return self.void_all();
        }
        let Some(at) = self.find(hash, key) else { return };
        let record = &mut self.records[at];
        record.writes = record.writes.saturating_sub(1);
        record.unknown_until = record.unknown_until.max(until);
        record.void_flights();
        self.forget_if_idle(at, now);
    }

    /// Voids the flights of `key`: a value that is being loaded is not cached and not joined.
    pub fn invalidate(&mut self, hash: u64, key: &[u8]) {
        if let Some(at) = self.find(hash, key) {
            self.records[at].void_flights();
        }
    }

    /// Voids the flights of all keys that `which` picks.
    pub fn invalidate_where(&mut self, mut which: impl FnMut(&Key) -> bool) {
        self.records.iter_mut().filter(|r| which(&r.key)).for_each(Record::void_flights);
    }

    fn void_all(&mut self) {
        self.records.iter_mut().for_each(Record::void_flights);
    }
}

#[cfg(test)]
impl<W: Clone> Gate<W> {
    /// The ids in use, in order.
    pub(super) fn ids(&self) -> Vec<u64> {
        let mut ids: Vec<u64> = self
            .records
            .iter()
            .flat_map(|r| {
                let flights = r.flights.iter().flat_map(|f| f.waiters.ids().chain([f.id]));
                flights.chain(r.group.ids())
            })
            .collect();
        ids.sort_unstable();
        ids
    }

    /// The same gate with other names for its flights and waiters, in the same order, and without
    /// its counts: states that differ in nothing else are one state of the search.
    pub(super) fn renumber(&mut self, rename: &dyn Fn(u64) -> u64, last_id: u64) {
        self.last_id = last_id;
        self.tally = Tally::default();
        for record in &mut self.records {
            record.group.renumber(rename);
            for flight in &mut record.flights {
                flight.id = rename(flight.id);
                flight.waiters.renumber(rename);
            }
        }
    }
}

/// Where a write is registered; hand it back to [`Gate::end_write`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WriteSlot {
    /// In the key's own record.
    Own,
    /// In the stripe as a whole, since its table was full.
    Crowded,
}
