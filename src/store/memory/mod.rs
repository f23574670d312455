//! An embedded store of several shards, for examples, tests and simulations.
//!
//! Each shard may have a ceiling of operations per second. Below it operations queue, as they do
//! in front of a real shard: the nearer the ceiling, the longer they take. When the wait would
//! exceed a bound, the shard refuses with [`ErrorKind::Throttled`]. So a hot key shows here what
//! it shows in production: one shard melts while its neighbours are idle.
//!
//! Time comes from the [`Runtime`] given. On a `SimRuntime` everything, the [`Faults`] too, follows
//! from the seed.

mod builder;
mod channels;
mod faults;
mod ids;
mod shard;

pub use builder::MemoryStoreBuilder;
pub use faults::{Fault, Faults, On, Op};
pub use shard::ShardCounts;

use super::{
    Capability, End, Ended, Holds, Id, Once, Popped, Store, Stored, Subscription, Take, Version,
};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::key::{self, Key};
use crate::runtime::{Clock, Runtime, ambient};
use bytes::Bytes;
use channels::Channels;
use parking_lot::Mutex;
use shard::{Shard, Shows};
use std::collections::BTreeMap;
use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

/// Shards of one store: as many as Redis Cluster has slots.
const SHARDS_MAX: usize = 16_384;

/// On a real clock shorter waits are not slept: timers that fine cost more than they model.
const REAL_SLEEP_MIN: Duration = Duration::from_micros(500);

/// How keys are placed on shards.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Placement {
    /// Redis Cluster: CRC16 of the hash tag gives one of 16,384 slots, and each shard owns a range
    /// of slots.
    #[default]
    ClusterSlots,
    /// 32-bit FNV-1a of the whole key, modulo the number of shards.
    Fnv1a,
}

/// An embedded store of several shards. Clones are handles to the same store.
///
/// # Example
/// ```
/// # use heatsink::store::{MemoryStore, Store};
/// # use heatsink::Key;
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = MemoryStore::new(8);
/// store.put(&Key::from("post:9"), "hello".into(), None).await?;
/// assert_eq!(store.get_now("post:9").unwrap().bytes, "hello");
/// # heatsink::Result::<()>::Ok(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

struct Inner {
    shards: Box<[Mutex<Shard>]>,
    channels: Channels,
    faults: Faults,
    runtime: Arc<dyn Runtime>,
    clock: Clock,
    options: Options,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    placement: Placement,
    capability: Capability,
    service: Option<Duration>,
    queue_max: Duration,
    latency: Duration,
    replica_lag: Duration,
    count_keys: bool,
    shard_bytes_max: usize,
    max_in_flight_time: Duration,
    seed: u64,
}

impl MemoryStore {
    /// A store of that many shards that can do everything, at once and without limits.
    #[must_use]
    pub fn new(shards: usize) -> MemoryStore {
        MemoryStore::builder().shards(shards).build()
    }

    /// A store of other properties.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder {
            shards: 1,
            runtime: None,
            options: Options {
                placement: Placement::default(),
                capability: Capability::all(),
                service: None,
                queue_max: Duration::from_millis(100),
                latency: Duration::ZERO,
                replica_lag: Duration::ZERO,
                count_keys: true,
                shard_bytes_max: 1 << 30,
                max_in_flight_time: Duration::from_secs(10),
                seed: 0,
            },
        }
    }

    /// The script of what goes wrong.
    #[must_use]
    pub fn faults(&self) -> Faults {
        self.inner.faults.clone()
    }

    /// How many shards there are.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.inner.shards.len()
    }

    /// The shard that holds a key, whatever the capability says.
    #[must_use]
    pub fn place(&self, key: &[u8]) -> usize {
        self.inner.place(key)
    }

    /// The operations of each shard so far.
    #[must_use]
    pub fn counts(&self) -> Vec<ShardCounts> {
        self.inner.shards.iter().map(|s| s.lock().counts).collect()
    }

    /// How many reads of this key have reached its shard.
    #[must_use]
    pub fn reads_of(&self, key: impl Into<Key>) -> u64 {
        let key = key.into();
        self.inner.shard(&key).lock().key_count(&key).reads
    }

    /// How many writes of this key have reached its shard.
    #[must_use]
    pub fn writes_of(&self, key: impl Into<Key>) -> u64 {
        let key = key.into();
        self.inner.shard(&key).lock().key_count(&key).writes
    }

    /// The value under a key now: a look inside, neither counted nor delayed.
    #[must_use]
    pub fn get_now(&self, key: impl Into<Key>) -> Option<Stored> {
        let key = key.into();
        let now = self.inner.clock.precise();
        self.inner.shard(&key).lock().get(&key, now, self.inner.shows())
    }

    /// Whether [`fold`](Store::fold) has left a mark: a look inside, neither counted nor delayed.
    #[must_use]
    pub fn folded_now(&self, key: impl Into<Key>, id: impl Into<Key>) -> bool {
        let key = key.into();
        self.inner.shard(&key).lock().folded(&key, &id.into())
    }

    /// Sets a value now: for filling a store before a run, neither counted nor delayed.
    ///
    /// # Errors
    /// The shard is full.
    pub fn put_now(&self, key: impl Into<Key>, value: impl Into<Bytes>) -> Result<()> {
        let key = key.into();
        let now = self.inner.clock.precise();
        self.inner.shard(&key).lock().put(&key, value.into(), None, now)
    }

    /// All keys and values, in order. The picture is exact per shard.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<Key, Bytes> {
        let now = self.inner.clock.precise();
        let mut all = BTreeMap::new();
        for shard in &self.inner.shards {
            all.extend(shard.lock().contents(now));
        }
        all
    }

    /// Takes a shard down or up again. While it is down its operations fail, not applied.
    pub fn set_down(&self, shard: usize, down: bool) {
        if let Some(shard) = self.inner.shards.get(shard) {
            shard.lock().down = down;
        }
    }

    /// Tells every subscriber that messages may have been lost, as a reconnect does.
    pub fn gap(&self) {
        self.inner.channels.gap();
    }
}

/// How long an admitted operation takes before and after it is applied.
#[derive(Clone, Copy, Default)]
struct Trip {
    there: Duration,
    back: Duration,
}

impl Inner {
    fn place(&self, key: &[u8]) -> usize {
        let n = self.shards.len();
        match self.options.placement {
            Placement::ClusterSlots => usize::from(key::cluster_slot(key)) * n / SHARDS_MAX,
            Placement::Fnv1a => key::fnv1a_32(key) as usize % n,
        }
    }

    fn shard(&self, key: &[u8]) -> &Mutex<Shard> {
        &self.shards[self.place(key)]
    }

    fn shows(&self) -> Shows {
        let can = &self.options.capability;
        Shows { ttl: can.ttl, version: can.version }
    }

    /// Counts an operation and lines it up in its shard's queue, or refuses it.
    fn admit(&self, key: &Key, op: Op) -> Result<Trip> {
        let o = &self.options;
        let mut shard = self.shard(key).lock();
        shard.count(key, op.is_read(), o.count_keys);
        if shard.down {
            return Err(Error::not_applied(ErrorKind::Store, "the shard is down").with_key(key));
        }
        let mut trip = Trip { there: o.latency - o.latency / 2, back: o.latency / 2 };
        // A replica has a ceiling of its own, far away from the traffic modelled here.
        let Some(service) = o.service.filter(|_| op != Op::GetReplica) else { return Ok(trip) };
        let now = self.clock.precise();
        let start = shard.free_at.max(now);
        let wait = start.since(now);
        if wait > o.queue_max {
            shard.counts.throttled += 1;
            return Err(Error::not_applied(ErrorKind::Throttled, "the shard is at its ceiling")
                .with_retry(Retry::After((wait - o.queue_max).max(service)))
                .with_key(key));
        }
        shard.free_at = start.after(service);
        trip.there += wait + service;
        Ok(trip)
    }

    fn apply<T>(&self, key: &Key, work: impl FnOnce(&mut Shard, Tick) -> Result<T>) -> Result<T> {
        let mut shard = self.shard(key).lock();
        if shard.down {
            return Err(Error::not_applied(ErrorKind::Store, "the shard is down").with_key(key));
        }
        shard.counts.served += 1;
        work(&mut shard, self.clock.precise())
    }

    async fn pause(&self, duration: Duration) {
        let real = !self.clock.resolution().is_zero();
        if duration.is_zero() || (real && duration < REAL_SLEEP_MIN) {
            return;
        }
        self.runtime.sleep(duration).await;
    }
}

/// The error of a scripted fault. A read changes nothing, so nothing about it is unknown.
fn injected(op: Op, unknown: bool, key: &Key) -> Error {
    if unknown && !op.is_read() {
        return Error::unknown(ErrorKind::Store, "injected: the reply was lost").with_key(key);
    }
    Error::not_applied(ErrorKind::Store, "injected: the store failed").with_key(key)
}

impl MemoryStore {
    /// One operation on the shard of one key.
    async fn call<T: Send + 'static>(
        &self,
        op: Op,
        key: &Key,
        work: impl FnOnce(&mut Shard, Tick) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run(op, key, move |inner, key| inner.apply(key, work)).await
    }

    /// One operation: admitted, delayed, struck by its fault, applied.
    async fn run<T: Send + 'static>(
        &self,
        op: Op,
        key: &Key,
        apply: impl FnOnce(&Inner, &Key) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let fault = self.inner.faults.draw(op);
        let trip = self.inner.admit(key, op)?;
        self.inner.pause(trip.there).await;
        let done = match fault {
            None => apply(&self.inner, key),
            Some(fault) => self.strike(op, key.clone(), fault, apply).await,
        };
        self.inner.pause(trip.back).await;
        done
    }

    /// One operation on many keys, each admitted and answered for itself; a fault strikes all.
    async fn many<T: Send + 'static>(
        &self,
        op: Op,
        keys: &[Key],
        work: impl Fn(&mut Shard, &Key, Tick) -> T + Clone + Send + 'static,
    ) -> Vec<Result<T>> {
        let fault = self.inner.faults.draw(op);
        let admitted: Vec<Result<Trip>> = keys.iter().map(|k| self.inner.admit(k, op)).collect();
        let trips = || admitted.iter().flatten();
        self.inner.pause(trips().map(|t| t.there).max().unwrap_or_default()).await;
        let back = trips().map(|t| t.back).max().unwrap_or_default();
        let mut results = Vec::with_capacity(keys.len());
        for (key, admitted) in keys.iter().zip(admitted) {
            let (work, of) = (work.clone(), key.clone());
            let apply = move |inner: &Inner, key: &Key| {
                inner.apply(key, move |shard, now| Ok(work(shard, &of, now)))
            };
            results.push(match (admitted, fault) {
                (Err(refused), _) => Err(refused),
                (Ok(_), None) => apply(&self.inner, key),
                (Ok(_), Some(fault)) => self.strike(op, key.clone(), fault, apply).await,
            });
        }
        self.inner.pause(back).await;
        results
    }

    async fn strike<T: Send + 'static>(
        &self,
        op: Op,
        key: Key,
        fault: Fault,
        apply: impl FnOnce(&Inner, &Key) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = &self.inner;
        match fault {
            Fault::Delay(by) => {
                inner.runtime.sleep(by).await;
                apply(inner, &key)
            }
            Fault::NotApplied => Err(injected(op, false, &key)),
            Fault::UnknownNotApplied => Err(injected(op, true, &key)),
            Fault::UnknownApplied => {
                drop(apply(inner, &key));
                Err(injected(op, true, &key))
            }
            Fault::UnknownLater(by) => {
                let (later, of) = (inner.clone(), key.clone());
                inner.runtime.spawn(Box::pin(async move {
                    later.runtime.sleep(by).await;
                    drop(apply(&later, &of));
                }));
                Err(injected(op, true, &key))
            }
            Fault::LostReply => {
                drop(apply(inner, &key));
                pending().await
            }
            Fault::Hang => pending().await,
            Fault::Panic => panic!("injected: the store panicked"),
        }
    }

    fn can(&self, has: impl Fn(&Capability) -> bool, what: &'static str) -> Result<()> {
        if has(&self.inner.options.capability) { Ok(()) } else { Err(Error::unsupported(what)) }
    }
}

impl MemoryStore {
    /// Without what a store that named `uncached` may leave out.
    fn brief(&self, stored: Stored) -> Stored {
        let brief = self.inner.options.capability.uncached;
        Stored { ttl_left: stored.ttl_left.filter(|_| !brief), ..stored }
    }
}

impl Store for MemoryStore {
    fn capability(&self) -> Capability {
        self.inner.options.capability
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>> {
        let (of, shows) = (key.clone(), self.inner.shows());
        self.call(Op::Get, key, move |shard, now| Ok(shard.get(&of, now, shows))).await
    }

    async fn get_uncached(&self, key: &Key) -> Result<Option<Stored>> {
        let stored = self.get(key).await?;
        Ok(stored.map(|s| self.brief(s)))
    }

    async fn get_many_uncached(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        let all = self.get_many(keys).await;
        all.into_iter().map(|one| one.map(|found| found.map(|s| self.brief(s)))).collect()
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        let shows = self.inner.shows();
        self.many(Op::GetMany, keys, move |shard, key, now| shard.get(key, now, shows)).await
    }

    async fn put(&self, key: &Key, value: Bytes, ttl: Option<Duration>) -> Result<()> {
        let of = key.clone();
        self.call(Op::Put, key, move |shard, now| shard.put(&of, value, ttl, now)).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        self.many(Op::DeleteMany, keys, Shard::delete).await
    }

    async fn add(&self, key: &Key, amount: i64) -> Result<i64> {
        let of = key.clone();
        self.call(Op::Add, key, move |shard, now| shard.add(&of, amount, now)).await
    }

    async fn compare_and_set(
        &self,
        key: &Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> Result<bool> {
        self.can(|c| c.compare_and_set, "compare_and_set")?;
        let of = key.clone();
        let work = move |shard: &mut Shard, now| {
            shard.compare_and_set(&of, expected.as_ref(), value, ttl, now)
        };
        self.call(Op::CompareAndSet, key, work).await
    }

    async fn put_if_newer(
        &self,
        key: &Key,
        version: Version,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> Result<bool> {
        self.can(|c| c.put_if_newer, "put_if_newer")?;
        let of = key.clone();
        let work = move |shard: &mut Shard, now| shard.put_if_newer(&of, version, value, ttl, now);
        self.call(Op::PutIfNewer, key, work).await
    }

    async fn seal(&self, key: &Key, tag: u64) -> Result<i64> {
        self.can(|c| c.seal, "seal")?;
        let of = key.clone();
        self.call(Op::Seal, key, move |shard, now| shard.seal(&of, tag, now)).await
    }

    async fn open(&self, key: &Key, tag: u64) -> Result<bool> {
        self.can(|c| c.seal, "seal")?;
        let of = key.clone();
        self.call(Op::Open, key, move |shard, now| Ok(shard.open(&of, tag, now))).await
    }

    async fn add_once(&self, key: &Key, id: &Id, amount: i64) -> Result<Once> {
        self.can(|c| c.add_once, "add_once")?;
        let (of, id) = (key.clone(), id.clone());
        self.call(Op::AddOnce, key, move |shard, now| shard.add_once(&of, &id, amount, now)).await
    }

    async fn poison_once(&self, key: &Key, id: &Id) -> Result<Once> {
        self.can(|c| c.add_once, "add_once")?;
        let (of, id) = (key.clone(), id.clone());
        self.call(Op::PoisonOnce, key, move |shard, _| shard.poison_once(&of, &id)).await
    }

    async fn fold(&self, key: &Key, id: &Key, amount: i64) -> Result<bool> {
        self.can(|c| c.fold, "fold")?;
        let (of, id) = (key.clone(), id.clone());
        self.call(Op::Fold, key, move |shard, now| shard.fold(&of, &id, amount, now)).await
    }

    async fn folded(&self, key: &Key, id: &Key) -> Result<bool> {
        self.can(|c| c.fold, "fold")?;
        let (of, id) = (key.clone(), id.clone());
        self.call(Op::Folded, key, move |shard, _| Ok(shard.folded(&of, &id))).await
    }

    async fn unfold(&self, key: &Key, id: &Key) -> Result<bool> {
        self.can(|c| c.fold, "fold")?;
        let (of, id) = (key.clone(), id.clone());
        self.call(Op::Unfold, key, move |shard, _| Ok(shard.unfold(&of, &id))).await
    }

    async fn claim_lane(&self, key: &Key) -> Result<Stored> {
        self.can(|c| c.claim_lane, "claim_lane")?;
        let of = key.clone();
        self.call(Op::ClaimLane, key, move |shard, now| shard.claim_lane(&of, now)).await
    }

    async fn take(&self, key: &Key, amount: u64, hold: &Id) -> Result<Take> {
        self.can(|c| c.take, "take")?;
        let (of, hold) = (key.clone(), hold.clone());
        self.call(Op::Take, key, move |shard, now| shard.take(&of, amount, &hold, now)).await
    }

    async fn end_hold(&self, key: &Key, hold: &Id, end: End) -> Result<Ended> {
        self.can(|c| c.take, "take")?;
        let (of, hold) = (key.clone(), hold.clone());
        self.call(Op::EndHold, key, move |shard, now| shard.end_hold(&of, &hold, end, now)).await
    }

    async fn holds(&self, key: &Key, page: Option<Bytes>) -> Result<Holds> {
        self.can(|c| c.take, "take")?;
        let of = key.clone();
        self.call(Op::Holds, key, move |shard, _| Ok(shard.holds(&of, page))).await
    }

    async fn push_tokens(&self, key: &Key, batch: &Id, tokens: Vec<Bytes>) -> Result<bool> {
        self.can(|c| c.tokens, "tokens")?;
        let (of, batch) = (key.clone(), batch.clone());
        self.call(Op::PushTokens, key, move |shard, _| shard.push_tokens(&of, &batch, tokens)).await
    }

    async fn pop_token(&self, key: &Key, hold: &Id) -> Result<Popped> {
        self.can(|c| c.tokens, "tokens")?;
        let (of, hold) = (key.clone(), hold.clone());
        self.call(Op::PopToken, key, move |shard, _| shard.pop_token(&of, &hold)).await
    }

    async fn count_tokens(&self, key: &Key) -> Result<u64> {
        self.can(|c| c.tokens, "tokens")?;
        let of = key.clone();
        self.call(Op::CountTokens, key, move |shard, _| Ok(shard.count_tokens(&of))).await
    }

    async fn publish(&self, channel: &Key, message: Bytes) -> Result<()> {
        self.can(|c| c.publish, "publish")?;
        let apply = move |inner: &Inner, channel: &Key| {
            inner.apply(channel, |_, _| Ok(()))?;
            inner.channels.publish(channel, &message);
            Ok(())
        };
        self.run(Op::Publish, channel, apply).await
    }

    async fn subscribe(&self, channel: &Key) -> Result<Box<dyn Subscription>> {
        self.can(|c| c.publish, "publish")?;
        self.call(Op::Subscribe, channel, |_, _| Ok(())).await?;
        Ok(self.inner.channels.subscribe(channel))
    }

    async fn get_replica(&self, key: &Key) -> Result<Option<Stored>> {
        self.can(|c| c.replicas, "replicas")?;
        let (of, shows) = (key.clone(), self.inner.shows());
        let work = move |shard: &mut Shard, now| Ok(shard.get_replica(&of, now, shows));
        self.call(Op::GetReplica, key, work).await
    }

    fn shard_of(&self, key: &[u8]) -> Option<u32> {
        self.inner.options.capability.shard_of.then(|| self.inner.place(key) as u32)
    }

    fn max_in_flight_time(&self) -> Duration {
        self.inner.options.max_in_flight_time
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("shards", &self.shards())
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests;
