//! The handle: what a service calls.

use crate::call::{self, Call, Step};
use crate::cell::{Entry, Handle as Hot};
use crate::config::{Builder, Options};
use crate::control::Control;
use crate::driver::DriverHandle;
use crate::engine::data::near::Freshness;
use crate::error::{Error, Result};
use crate::explain::Explanation;
use crate::key::Key;
use crate::read::{From, Loadable, Read, within};
use crate::runtime::{BoxFuture, Runtime};
use crate::salt;
use crate::sample::Seen;
use crate::shared::{Begin, Loaded, Shared};
use crate::stats::Stats;
use crate::store::{DynStore, Store};
use crate::stream;
use crate::typed::{Codec, Typed};
use crate::value::Value;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// A store with the heat taken out of it. Cheap to clone; one word; no type parameters.
///
/// Once a key is hot, a read of it may be up to [`NearCache::stale`](crate::NearCache::stale) old
/// (by default 1 s, and up to 3 s while it is being loaded again), and never older than a write
/// that this process has finished. Every other key is read from the store, by one load at a time.
///
/// # Example
/// ```
/// use heatsink::{Heatsink, store::MemoryStore};
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let hs = Heatsink::new(MemoryStore::new(8))?;
/// hs.put("post:9", "hello").await?;
/// assert_eq!(hs.get("post:9").await?.unwrap(), b"hello");
/// assert!(hs.get("post:10").await?.is_none());
/// # Ok::<(), heatsink::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Heatsink(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
    driver: DriverHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // What threads have kept of it is retired.
        self.shared.close();
        self.shared.counters.release(&self.shared);
    }
}

impl Heatsink {
    /// Wraps `store` with all defaults.
    ///
    /// # Errors
    /// None with the defaults of this version; see [`Builder::build`].
    pub fn new(store: impl Store) -> Result<Heatsink> {
        Heatsink::builder(store).build()
    }

    /// Wraps `store` with options.
    pub fn builder(store: impl Store) -> Builder {
        Builder::new(store)
    }

    pub(crate) fn start(
        options: Options,
        store: Arc<dyn DynStore>,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Heatsink> {
        let shared = Arc::new(Shared::new(options, store, runtime));
        let driver = DriverHandle::start(&shared)?;
        stream::start(&shared);
        Ok(Heatsink(Arc::new(Handle { shared, driver })))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// The value under `key`, or `None`.
    ///
    /// # Staleness
    /// A hot key: as old as [`NearCache`](crate::NearCache) allows. Any other: a value that the
    /// store held at some point during a load that this call started or joined.
    ///
    /// # Cost
    /// Store operations: 0 on a hit; at most 1 otherwise, shared by all who wait.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: a load that this call runs goes on for the others.
    ///
    /// # Errors
    /// Those of the store; [`Timeout`](crate::ErrorKind::Timeout), [`Panicked`](crate::ErrorKind::Panicked),
    /// [`Recursive`](crate::ErrorKind::Recursive); [`Shed`](crate::ErrorKind::Shed) where a budget or a
    /// bulkhead was asked for.
    #[inline]
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        let key = key.as_ref();
        let due = self.observe(1);
        if due == 0 {
            let value = |handle: &Arc<Hot>, now| Value::hot(handle.clone(), now, Freshness::Fresh);
            if let Some(value) = self.0.shared.fresh(key, &mut Some(value)) {
                return Ok(Some(value));
            }
        }
        if let Some(value) = self.hot(key, &Read::new(), due) {
            return Ok(present(value));
        }
        self.read(key, Read::new(), From::Store, due).await.map(present)
    }

    /// Like [`get`](Heatsink::get), with a deadline or a limit on the age.
    ///
    /// # Errors
    /// Those of [`get`](Heatsink::get), and [`Deadline`](crate::ErrorKind::Deadline): the load that the
    /// call waited for goes on and fills the cache.
    pub async fn get_with(&self, key: impl AsRef<[u8]>, read: Read) -> Result<Option<Value>> {
        let key = key.as_ref();
        let due = self.observe(read.cost());
        if let Some(value) = self.hot(key, &read, due) {
            return Ok(present(value));
        }
        self.read(key, read, From::Store, due).await.map(present)
    }

    /// The value of `key` as `loader` brings it: a SQL query, a gRPC call, an `HGETALL`. Callers
    /// that come while it runs share it, and a hot key's value is cached, exactly as for
    /// [`get`](Heatsink::get). A key belongs either to the store or to one loader.
    ///
    /// The loader returns bytes (or `Option` of them, for values that may be absent); for other
    /// types see [`typed`](Heatsink::typed). It must be `'static`, since it outlives its caller.
    ///
    /// # Cost
    /// At most one run of one caller's loader, shared by all who wait.
    ///
    /// # Cancel safety
    /// As [`get`](Heatsink::get).
    ///
    /// # Errors
    /// [`Loader`](crate::ErrorKind::Loader) with the loader's error as its source, for every caller that
    /// joined; those of [`get`](Heatsink::get).
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// # async fn query(id: u64) -> Result<String, std::io::Error> { Ok(format!("post {id}")) }
    /// let post = hs.load("post:9", || async { query(9).await }).await?;
    /// assert_eq!(post, b"post 9");
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub async fn load<T, E, Fut>(
        &self,
        key: impl AsRef<[u8]>,
        loader: impl FnOnce() -> Fut + Send + 'static,
    ) -> Result<T::Out>
    where
        T: Loadable,
        E: Into<Box<dyn StdError + Send + Sync>>,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        self.load_with(key, Read::new(), loader).await
    }

    /// Like [`load`](Heatsink::load), with a deadline or a limit on the age.
    ///
    /// # Errors
    /// Those of [`load`](Heatsink::load) and [`Deadline`](crate::ErrorKind::Deadline).
    pub async fn load_with<T, E, Fut>(
        &self,
        key: impl AsRef<[u8]>,
        read: Read,
        loader: impl FnOnce() -> Fut + Send + 'static,
    ) -> Result<T::Out>
    where
        T: Loadable,
        E: Into<Box<dyn StdError + Send + Sync>>,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        let key = key.as_ref();
        let from = From::loader(|| async move {
            let loaded = loader().await.map_err(Error::loader)?;
            Ok(Loaded {
                stored: loaded.into_stored(),
                by_loader: true,
                uncached: false,
                decoded: None,
            })
        });
        let value = self.load_raw(key, read, from).await?;
        T::out(present(value)).map_err(|e| e.with_key(key))
    }

    pub(crate) async fn load_raw(&self, key: &[u8], read: Read, from: From) -> Result<Value> {
        let due = self.observe(read.cost());
        if let Some((value, stale)) = self.cached(key, read.max_age, due, true) {
            if stale {
                self.refresh(&Key::copy(key), from.of(read.tenant));
            }
            return Ok(value);
        }
        self.read(key, read, from, due).await
    }

    /// Runs `f` on the cached bytes of a hot key, without awaiting; `None` when there are none.
    ///
    /// # Staleness
    /// As [`get`](Heatsink::get).
    ///
    /// # Cost
    /// Store operations: 0, except that a stale value starts one load in the background. No lock,
    /// no allocation.
    #[inline]
    pub fn try_read_with<R>(&self, key: impl AsRef<[u8]>, f: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let key = key.as_ref();
        let due = self.observe(1);
        let mut f = Some(f);
        if let Some(out) = self.fresh_with(key, due, &mut f) {
            return Some(out);
        }
        self.peek(key, due, |bytes| Some(f.take()?(bytes?))).flatten()
    }

    /// Runs `f` on the bytes under `key`, loading them if needed; `None` when there are none.
    /// The fastest read of a hot key: nothing is cloned.
    ///
    /// # Staleness, Cost, Cancel safety, Errors
    /// As [`get`](Heatsink::get).
    #[inline]
    pub async fn read_with<R>(
        &self,
        key: impl AsRef<[u8]>,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>> {
        let key = key.as_ref();
        let due = self.observe(1);
        let mut f = Some(f);
        if let Some(out) = self.fresh_with(key, due, &mut f) {
            return Ok(Some(out));
        }
        let hit = self.peek(key, due, |bytes| bytes.and_then(|b| f.take().map(|f| f(b))));
        if let Some(out) = hit {
            return Ok(out);
        }
        let value = self.read(key, Read::new(), From::Store, due).await?;
        Ok(present(value).and_then(|v| f.take().map(|f| f(&v))))
    }

    /// Forgets `key`: a caller that comes after this returns gets a value whose load began after
    /// this was called.
    pub fn invalidate(&self, key: impl AsRef<[u8]>) {
        let key = Key::copy(key.as_ref());
        self.0.shared.invalidate(self.0.shared.hash(&key), &key);
    }

    /// Like [`invalidate`](Heatsink::invalidate) for all keys that begin with `prefix`. Walks all
    /// 4,096 stripes: about 0.1 ms.
    pub fn invalidate_prefix(&self, prefix: impl AsRef<[u8]>) {
        self.0.shared.invalidate_prefix(prefix.as_ref());
    }

    /// Like [`invalidate`](Heatsink::invalidate) for all keys, in one step. Call it when a stream
    /// of invalidations has had a gap.
    pub fn invalidate_all(&self) {
        self.0.shared.invalidate_all();
    }

    /// A view of this handle that reads and writes values of type `T`: encoded once per write,
    /// decoded once per load, not once per hit. `Json` (feature `json`) takes every type that
    /// serde can carry; [`Text`](crate::Text) takes strings; for others implement [`Codec`].
    ///
    /// # Example
    /// ```
    /// use heatsink::{Heatsink, Text, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let names = Heatsink::new(MemoryStore::new(8))?.typed::<String, _>(Text);
    /// names.put("user:9:name", &"nova".to_owned()).await?;
    /// assert_eq!(*names.get("user:9:name").await?.unwrap(), "nova");
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn typed<T, C: Codec<T>>(&self, codec: C) -> Typed<T, C> {
        Typed::new(self.clone(), codec)
    }

    /// The operator's surface: pins and denials.
    #[must_use]
    pub fn control(&self) -> Control<'_> {
        Control::new(self)
    }

    /// What heatsink does with `key`, and why.
    pub fn explain(&self, key: impl AsRef<[u8]>) -> Explanation {
        self.control().explain(key.as_ref())
    }

    /// Plain numbers about this instance.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::collect(&self.0.shared)
    }

    /// Flushes what buffered counters hold, and stops the driver. Handles that are left behave
    /// like the bare client. What cannot be flushed within
    /// [`Loads::timeout`](crate::Loads::timeout) is lost, and
    /// [`Adds::on_lost`](crate::Adds::on_lost) is told so.
    ///
    /// # Cancel safety
    /// Dropped before its end, it has stopped nothing but buffering; call it again.
    pub async fn shutdown(&self) {
        self.0.shared.counters.drain(&self.0.shared).await;
        self.0.driver.stop(&self.0.shared);
    }

    /// For benches: what the detection of hot keys adds to a request.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    #[inline]
    pub fn observe_only_this(&self, key: &[u8]) {
        self.sampled(self.observe(1), key, Seen::Load);
    }

    /// For tests: makes the driver stand still, as a starved thread would.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn stall_driver(&self, stalled: bool) {
        self.0.driver.stall(stalled);
    }

    /// What a request is to be sampled with: its cost, or zero where it is not to be sampled.
    #[inline]
    pub(crate) fn observe(&self, cost: u32) -> u32 {
        if self.0.shared.sampler.due() { cost } else { 0 }
    }

    #[inline]
    pub(crate) fn sampled(&self, due: u32, key: &[u8], seen: Seen) {
        if due > 0 {
            self.0.shared.sample(key, seen, due);
        }
    }

    /// The cached value, and whether this caller must start its refresh.
    #[inline]
    fn cached(
        &self,
        key: &[u8],
        max_age: Option<Duration>,
        due: u32,
        loader: bool,
    ) -> Option<(Value, bool)> {
        let hit = self.0.shared.hit(key, max_age, |handle, now, freshness| {
            let stale = handle.shown().take_refresh(freshness, loader, now);
            (Value::hot(handle.clone(), now, freshness), stale)
        })?;
        if due > 0 {
            self.sampled(due, key, Seen::hit(&hit.0));
        }
        Some(hit)
    }

    /// The cached value, for callers whose values the store can load again. Not inlined, so that
    /// what a fresh hit runs stays short.
    #[inline(never)]
    pub(crate) fn hot(&self, key: &[u8], read: &Read, due: u32) -> Option<Value> {
        let (value, stale) = self.cached(key, read.max_age, due, false)?;
        if stale {
            self.refresh(&Key::copy(key), From::Store.of(read.tenant));
        }
        Some(value)
    }

    /// Runs `f` on the bytes of a fresh value that this thread keeps.
    #[inline(always)]
    fn fresh_with<R, F>(&self, key: &[u8], due: u32, f: &mut Option<F>) -> Option<R>
    where
        F: FnOnce(&[u8]) -> R,
    {
        if due > 0 {
            return None;
        }
        let mut on_bytes = Some(|handle: &Arc<Hot>, _| Some(f.take()?(&handle.entry().bytes)));
        self.0.shared.fresh(key, &mut on_bytes).flatten()
    }

    /// Runs `f` on the cached bytes in place; `f` gets `None` for a cached absence.
    #[inline(never)]
    fn peek<R>(&self, key: &[u8], due: u32, f: impl FnOnce(Option<&[u8]>) -> R) -> Option<R> {
        let shared = &self.0.shared;
        let mut refresh = false;
        let out = shared.hit(key, None, |handle, now, freshness| {
            let entry: &Entry = handle.entry();
            if due > 0 {
                let age = now.since(entry.ages.started);
                shared.sample(key, Seen::Hit(freshness, age), due);
            }
            let out = f((!entry.absent).then_some(&entry.bytes[..]));
            // Claimed after `f`: its panic must not take the claim with it.
            refresh = handle.shown().take_refresh(freshness, false, now);
            out
        });
        if refresh {
            self.refresh(&Key::copy(key), From::Store);
        }
        out
    }

    /// The way of a caller that found nothing: join, lead, or go alone. Boxed, so that the future
    /// of a hit stays small.
    fn read(
        &self,
        key: &[u8],
        read: Read,
        from: From,
        due: u32,
    ) -> BoxFuture<'static, Result<Value>> {
        let (this, hash, key) = (self.clone(), self.0.shared.hash(key), Key::copy(key));
        let refused =
            if from.is_loader() { None } else { salt::refused(&self.0.shared, &key, "sum") };
        if let Some(error) = refused {
            return Box::pin(std::future::ready(Err(error)));
        }
        let from = from.of(read.tenant);
        let load = async move { this.join_or_lead((hash, key), read.max_age, from, due).await };
        match read.deadline {
            None => Box::pin(load),
            deadline => Box::pin(within(self.0.shared.runtime.clone(), deadline, load)),
        }
    }

    pub(crate) async fn join_or_lead(
        &self,
        (hash, key): (u64, Key),
        max_age: Option<Duration>,
        from: From,
        due: u32,
    ) -> Result<Value> {
        let shared = &self.0.shared;
        if Shared::untracked(&key) {
            return self.alone(key, max_age, from).await;
        }
        let begun = shared.begin(hash, &key, max_age, from.is_loader())?;
        self.sampled(due, &key, begun.seen());
        match begun {
            Begin::Hit(value, due) => {
                if due {
                    self.refresh(&key, from);
                }
                Ok(value)
            }
            Begin::Bypass => self.alone(key, max_age, from).await,
            Begin::Wait(waiter, id, ticket) => {
                let mut call = Call::new(shared.clone(), (hash, key), waiter, id);
                let mut from = Some(from);
                let mut next = ticket;
                loop {
                    if let Some(ticket) = next.take()
                        && let Some(from) = from.take()
                    {
                        match call.admit(&from, ticket) {
                            Ok(ticket) => call.run(from.job(shared, ticket)),
                            Err(refused) => return call.value(Err(refused), max_age),
                        }
                    }
                    match (&mut call).await {
                        Step::Done(outcome) => return call.value(outcome, max_age),
                        Step::Lead(ticket) => next = Some(ticket),
                    }
                }
            }
        }
    }

    /// A load for this caller only: its key is too long to be tracked, or a table is full.
    pub(crate) fn alone(
        &self,
        key: Key,
        max_age: Option<Duration>,
        from: From,
    ) -> BoxFuture<'static, Result<Value>> {
        let shared = self.0.shared.clone();
        Box::pin(async move {
            let started = shared.clock.now();
            let load = async {
                from.admit(&shared, &key)?;
                call::catch(from.load(&shared, key.clone(), false)).await.and_then(|r| r)
            };
            let loaded = match load.await {
                Ok(loaded) => loaded,
                Err(e) => {
                    return shared.last_known((shared.hash(&key), &key), max_age, e.with_key(&key));
                }
            };
            let entry = Arc::new(shared.entry(loaded, 0, started, 0));
            Ok(Value::loaded(entry, shared.clock.now()))
        })
    }

    /// Starts the load of a stale value in the background.
    pub(crate) fn refresh(&self, key: &Key, from: From) {
        let shared = &self.0.shared;
        let hash = shared.hash(key);
        if let Some((waiter, id, ticket)) = shared.begin_refresh(hash, key) {
            let mut call = Call::new(shared.clone(), (hash, key.clone()), waiter, id);
            if let Ok(ticket) = call.admit(&from, ticket) {
                call.run(from.job(shared, ticket));
                return call.detach();
            }
        }
        // A load runs already, or there is no room or no budget: the claim goes back.
        shared.pause_refresh(hash, key, shared.clock.now());
    }
}

/// The value, unless it stands for "there is none".
pub(crate) fn present(value: Value) -> Option<Value> {
    (!value.entry().absent).then_some(value)
}

impl fmt::Debug for Heatsink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heatsink").field("hot_keys", &self.0.shared.index.load().len()).finish()
    }
}
