//! Counters: adds that travel together, and sums that know their age.

use crate::adds::{self, AddStats, Cell, count};
use crate::batch;
use crate::engine::control::rotation::Want;
use crate::engine::data::approx;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::key::Key;
use crate::names::Part;
use crate::read::From;
use crate::runtime::BoxFuture;
use crate::salt::{self, Counted, Redelivery, SaltStats};
use crate::sample::Seen;
use crate::shared::Loaded;
use crate::store::{DynStore, Stored};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The sum of a counter, and how old it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sum {
    total: i64,
    age: Duration,
    lost: u64,
    behind: u16,
}

impl Sum {
    /// A whole sum.
    pub(crate) fn new(total: i64, age: Duration) -> Sum {
        Sum { total, age, lost: 0, behind: 0 }
    }

    /// The sum.
    #[must_use]
    pub fn total(&self) -> i64 {
        self.total
    }

    /// How old it was when it was served, counted from the start of its load. It is the value that
    /// the counter had at some point within that time.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.age
    }

    /// Of a counter that [only grows](GrowOnly): by how much the store has less now than it had. It
    /// has lost what it had acknowledged, in a failover for example. 0 for any other counter.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Of a [salted](crate::Salt) counter: how many of its slots did not answer in time, and are
    /// counted as they were when last seen. 0 for a whole sum.
    #[must_use]
    pub fn behind(&self) -> u16 {
        self.behind
    }
}

/// What a load of a sum came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Total {
    pub(crate) sum: i64,
    /// Parts that are older than the load.
    pub(crate) behind: u16,
}

impl Total {
    pub(crate) fn whole(sum: i64) -> Total {
        Total { sum, behind: 0 }
    }

    fn encode(self) -> String {
        match self.behind {
            0 => self.sum.to_string(),
            behind => format!("{} {behind}", self.sum),
        }
    }

    fn parse(bytes: &[u8]) -> Option<Total> {
        let text = std::str::from_utf8(bytes).ok()?;
        match text.split_once(' ') {
            None => text.parse().ok().map(Total::whole),
            Some((sum, behind)) => {
                Some(Total { sum: sum.parse().ok()?, behind: behind.parse().ok()? })
            }
        }
    }
}

impl Heatsink {
    /// The counter under `key`: a 64-bit integer of the store, absent counting as zero.
    ///
    /// Keeping the handle spares the look-up; all handles of one key combine their adds.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # use std::time::Duration;
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let likes = hs.counter("post:9:likes");
    /// likes.add(1).await?; // returns when it is stored
    /// likes.add(-1).await?;
    /// likes.add(5).await?;
    /// assert_eq!(likes.sum().await?.total(), 5);
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn counter(&self, key: impl AsRef<[u8]>) -> Counter {
        let key = key.as_ref();
        let hash = self.shared().hash(key);
        Counter { hs: self.clone(), cell: self.shared().counters.cell(hash, key) }
    }

    /// The counter under `key` as one that only grows.
    pub fn grow_only(&self, key: impl AsRef<[u8]>) -> GrowOnly {
        let counter = self.counter(key);
        counter.cell.only_grows.store(true, Ordering::Relaxed);
        GrowOnly(counter)
    }

    /// The counter under `key`, counted for display: one add in `one_in` is made, by `one_in`.
    pub fn approximate(&self, key: impl AsRef<[u8]>, one_in: u32) -> Approximate {
        Approximate { counter: self.counter(key), one_in: one_in.max(1) }
    }

    /// Plain numbers about the counters of this instance.
    #[must_use]
    pub fn add_stats(&self) -> AddStats {
        self.shared().counters.tallies.read()
    }

    /// Plain numbers about the salted counters of this instance.
    #[must_use]
    pub fn salt_stats(&self) -> SaltStats {
        self.shared().salted.as_ref().map(|salted| salted.stats()).unwrap_or_default()
    }

    /// The sum of the counter of `cell`, from memory if it is younger than `max_age`, else by one
    /// load that all who ask meanwhile share; and when that load began.
    pub(crate) async fn sum_of(
        &self,
        cell: &Arc<Cell>,
        part: Part,
        max_age: Duration,
        load: impl FnOnce() -> BoxFuture<'static, Result<Total>> + Send + 'static,
    ) -> Result<(Sum, Tick)> {
        let shared = self.shared();
        let now = shared.clock.now();
        // The clock lags behind by up to its resolution.
        let limit = max_age.saturating_sub(shared.options.policy.resolution);
        if let Some((total, started)) = cell.known.lock().serve(now, limit) {
            count(&shared.counters.tallies.sums_cached, 1);
            return Ok((Sum::new(total, now.since(started)), started));
        }
        adds::check_key(&cell.key)?;
        count(&shared.counters.tallies.sums_loaded, 1);
        self.sampled(self.observe(1), &cell.key, Seen::Load);
        // A name of its own: adds go on all the time, and void no load of the sum.
        let name = part.of(&cell.key);
        let from = From::loader(|| async move {
            let total = load().await?;
            let stored = Some(Stored::new(total.encode()));
            Ok(Loaded { stored, by_loader: true, uncached: false, decoded: None })
        });
        let hash = shared.hash(&name);
        let value = self.join_or_lead((hash, name), Some(limit), from, 0).await;
        let value = value.map_err(|e| e.with_key(&cell.key))?;
        let Total { sum, behind } = Total::parse(&value).ok_or_else(|| not_a_number(&cell.key))?;
        let (age, started) = (value.age(), value.entry().ages.started);
        if behind > 0 {
            // Of an age that nobody knows: the next one asks again, and none takes it for a loss.
            return Ok((Sum { behind, ..Sum::new(sum, age) }, Tick::ZERO));
        }
        cell.known.lock().learn(sum, started);
        Ok((Sum::new(sum, age), started))
    }
}

/// A decimal 64-bit integer.
pub(crate) fn integer(bytes: &[u8]) -> Option<i64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

pub(crate) fn not_a_number(key: &[u8]) -> Error {
    Error::not_applied(ErrorKind::WrongType, "the value is not a 64-bit integer").with_key(key)
}

/// Reads one counter of the store.
pub(crate) async fn load_integer(store: Arc<dyn DynStore>, key: Key) -> Result<i64> {
    match store.get(key.clone()).await? {
        None => Ok(0),
        Some(stored) => integer(&stored.bytes).ok_or_else(|| not_a_number(&key)),
    }
}

/// A counter. Made by [`Heatsink::counter`]; clones are handles to the same one.
///
/// At most one `add` per key and process is under way at the store; adds that come meanwhile are
/// summed into the next. So the slower the store, the more adds one operation carries.
#[derive(Clone)]
pub struct Counter {
    pub(crate) hs: Heatsink,
    pub(crate) cell: Arc<Cell>,
}

impl Counter {
    /// Adds `n`, which may be negative; returns when it is stored.
    ///
    /// # Cost
    /// Store operations: 1, shared by all adds of this process that come while another is under
    /// way.
    ///
    /// # Cancel safety
    /// A dropped add stays in the sum that it was put into, and counts as of unknown outcome.
    ///
    /// # Errors
    /// Those of the store, for exactly the adds that the operation carried;
    /// [`Error::outcome`] says whether they may have been applied, and nothing is retried.
    /// [`Overflow`](ErrorKind::Overflow) when a sum does not fit into 64 bits: nothing was added.
    /// [`Timeout`](ErrorKind::Timeout), of unknown outcome, when the store took longer than
    /// [`Loads::timeout`](crate::Loads::timeout). [`Limit`](ErrorKind::Limit): the key is too long.
    pub async fn add(&self, n: i64) -> Result<()> {
        let shared = self.hs.shared();
        self.hs.sampled(self.hs.observe(1), &self.cell.key, Seen::Write);
        adds::check_key(&self.cell.key)?;
        batch::add(shared, &self.cell, n).await
    }

    /// The sum, at most [`Adds::sum_ttl`](crate::Adds::sum_ttl) old.
    ///
    /// # Staleness
    /// The value that the counter had at some point between [`Sum::age`] before the call's end and
    /// that end. An add of one's own may be missing for as long; `sum_with(Duration::ZERO)` has
    /// it.
    ///
    /// # Cost
    /// Store operations: 0 while the last sum is young enough, else 1, shared by all who wait; for a
    /// [salted](crate::Salt) counter 1 batch for each shard that has a slot. A shard that takes longer
    /// than [`Salt::timeout`](crate::Salt::timeout) or fails is left out: what its slots held when last
    /// seen counts, and [`Sum::behind`] says so.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`Heatsink::get`]; [`WrongType`](ErrorKind::WrongType) when the value is not an integer. Of
    /// a salted counter that [expires](crate::Salt#counters-that-expire), the first call after that
    /// time fails while a shard that has a slot, or the registry, does not answer.
    pub async fn sum(&self) -> Result<Sum> {
        self.young_sum().await.map(|(sum, _)| sum)
    }

    pub(crate) async fn young_sum(&self) -> Result<(Sum, Tick)> {
        let shared = self.hs.shared();
        let sum = self.load_sum(shared.options.adds.sum_ttl).await;
        shared.last_sum(&self.cell, sum)
    }

    /// Like [`sum`](Counter::sum), at most `max_age` old; zero asks the store after the call.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`sum`](Counter::sum).
    pub async fn sum_with(&self, max_age: Duration) -> Result<Sum> {
        self.load_sum(max_age).await.map(|(sum, _)| sum)
    }

    pub(crate) async fn load_sum(&self, max_age: Duration) -> Result<(Sum, Tick)> {
        let (store, cell) = (self.hs.shared().store.clone(), self.cell.clone());
        let shared = self.hs.shared().clone();
        let load = move || -> BoxFuture<'static, _> {
            Box::pin(async move {
                match &shared.salted {
                    Some(salted) => salted.sum(&shared, &cell).await,
                    None => load_integer(store, cell.key.clone()).await.map(Total::whole),
                }
            })
        };
        self.hs.sum_of(&self.cell, Part::Sum, max_age, load).await
    }
}

impl Counter {
    /// Adds `n` once, however often the event with this `id` is delivered: by this process or
    /// another, before or after the counter is [salted](crate::Salt). The id chooses the slot, so
    /// events do not combine.
    ///
    /// # Cost
    /// Store operations: 1; and for a salted counter 1 more for each older generation of slots that
    /// is still kept.
    ///
    /// # Cancel safety
    /// A dropped event may have been counted; delivered again, it counts once.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) where the store cannot
    /// [`add_once`](crate::Store::add_once); choose what to do without it with
    /// [`add_event_with`](Counter::add_event_with). Those of the store; after one of unknown
    /// outcome, deliver the event again.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Counted, Heatsink, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let likes = hs.counter("post:9:likes");
    /// assert_eq!(likes.add_event("like:41", 1).await?, Counted::Now);
    /// assert_eq!(likes.add_event("like:41", 1).await?, Counted::Before);
    /// assert_eq!(likes.sum().await?.total(), 1);
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub async fn add_event(&self, id: impl AsRef<[u8]>, n: i64) -> Result<Counted> {
        self.add_event_with(id, n, Redelivery::CountsOnce).await
    }

    /// Like [`add_event`](Counter::add_event), with what becomes of a second delivery.
    ///
    /// # Cancel safety
    /// A dropped event counts as of unknown outcome.
    ///
    /// # Errors
    /// As [`add_event`](Counter::add_event); [`Error::outcome`] says whether it may have been
    /// counted.
    pub async fn add_event_with(
        &self,
        id: impl AsRef<[u8]>,
        n: i64,
        redelivery: Redelivery,
    ) -> Result<Counted> {
        let shared = self.hs.shared();
        self.hs.sampled(self.hs.observe(1), &self.cell.key, Seen::Write);
        adds::check_key(&self.cell.key)?;
        adds::check_key(id.as_ref())?;
        shared.admit(|| self.cell.hash, &self.cell.key, None)?;
        let event = (Key::copy(id.as_ref()), n);
        let slot = shared.begin_write(self.cell.hash, &self.cell.key);
        let guard = batch::WriteGuard::new(shared, &self.cell, slot);
        let answer = salt::add_event(shared, &self.cell, event, redelivery).await;
        guard.end(answer.as_ref().err().map(Error::outcome));
        answer.map_err(|e| e.with_key(&self.cell.key))
    }

    /// Starts the count again from zero: what was acknowledged before the call is taken off, what
    /// comes later stays.
    ///
    /// # Cost
    /// Store operations: a sum and a write; for a salted counter some more, so that others know.
    ///
    /// # Cancel safety
    /// A dropped reset may have been applied.
    ///
    /// # Errors
    /// Those of the store; [`Unsupported`](ErrorKind::Unsupported) where it has no
    /// [`compare_and_set`](crate::Capability::compare_and_set);
    /// [`Store`](ErrorKind::Store) when the counter changes faster than it can be reset, which a
    /// salted one does not.
    pub async fn reset(&self) -> Result<()> {
        let shared = self.hs.shared();
        adds::check_key(&self.cell.key)?;
        shared.admit(|| self.cell.hash, &self.cell.key, None)?;
        let slot = shared.begin_write(self.cell.hash, &self.cell.key);
        let guard = batch::WriteGuard::new(shared, &self.cell, slot);
        let answer = salt::reset(shared, &self.cell.key).await;
        guard.end(answer.as_ref().err().map(Error::outcome));
        let now = shared.clock.now();
        self.cell.known.lock().forget(now);
        self.cell.written.lock().forget(now);
        answer.map_err(|e| e.with_key(&self.cell.key))
    }

    /// Starts the count again from zero, and lets the slots of a salted counter go. The bare key
    /// stays: somebody may add to it at any time.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`reset`](Counter::reset).
    #[expect(clippy::missing_errors_doc, reason = "the heading names three")]
    pub async fn delete(&self) -> Result<()> {
        self.reset().await?;
        let shared = self.hs.shared();
        if let Some(salted) = &shared.salted {
            salted.want(shared, &self.cell.key, Want::Home, false);
        }
        Ok(())
    }
}

impl fmt::Debug for Counter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counter").field("key", &self.cell.key).finish()
    }
}

/// A counter for display: views, plays. Made by [`Heatsink::approximate`].
///
/// The store gets one add in `one_in`, so its sum is off by some hundredths, as
/// [`Estimate::standard_error`] says, and a small count may read zero. Whoever adds to the key must
/// use the same `one_in` for that error to hold.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, rounded, store::MemoryStore};
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let hs = Heatsink::builder(MemoryStore::new(8)).seed(1).build()?;
/// let views = hs.approximate("post:9:views", 10);
/// for _ in 0..10_000 {
///     views.add().await?;
/// }
/// let about = views.sum().await?;
/// assert!((about.total() as f64 - 10_000.0).abs() < 5.0 * about.standard_error());
/// println!("{} views", rounded(about.total()));
/// # Ok::<(), heatsink::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Approximate {
    counter: Counter,
    one_in: u32,
}

/// An approximate sum, and how far off it may be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    sum: Sum,
    standard_error: f64,
}

impl Estimate {
    /// The best guess.
    #[must_use]
    pub fn total(&self) -> i64 {
        self.sum.total
    }

    /// The standard error: the true count is within one of it two times in three, within two of it
    /// nineteen times in twenty.
    #[must_use]
    pub fn standard_error(&self) -> f64 {
        self.standard_error
    }

    /// How old it was when it was served, counted from the start of its load.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.sum.age
    }
}

impl Approximate {
    /// Counts one.
    ///
    /// # Cost
    /// Store operations: 1 in `one_in`, combined as those of [`Counter::add`]; else 0.
    ///
    /// # Cancel safety
    /// As [`Counter::add`].
    ///
    /// # Errors
    /// As [`Counter::add`].
    pub async fn add(&self) -> Result<()> {
        match approx::draw(self.one_in, self.counter.hs.shared().roll()) {
            Some(n) => self.counter.add(n).await,
            None => Ok(()),
        }
    }

    /// The estimated count, with its error.
    ///
    /// # Staleness, Cost, Cancel safety
    /// As [`Counter::sum`].
    ///
    /// # Errors
    /// As [`Counter::sum`].
    pub async fn sum(&self) -> Result<Estimate> {
        let sum = self.counter.sum().await?;
        Ok(Estimate { sum, standard_error: approx::standard_error(sum.total, self.one_in) })
    }
}

/// A counter that only grows. Made by [`Heatsink::grow_only`].
///
/// Its sums never go backwards within a process, whichever load ends first and whatever a replica
/// or a restored backup says. A store that has less than it had has lost something: the greater
/// sum is shown, [`Sum::lost`] says by how much it is short, and
/// [`AddStats::sums_regressed`](crate::AddStats::sums_regressed) counts it. Of a salted counter each
/// slot is watched: [`SaltStats::slots_lost`](crate::SaltStats::slots_lost) tells what one has lost while others
/// grew by more. That holds for as long
/// as a handle of the key is kept or the process uses no more than 65,536 counters; a
/// [`reset`](Counter::reset) by another process looks like a loss.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, store::MemoryStore};
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let hs = Heatsink::new(MemoryStore::new(8))?;
/// let views = hs.grow_only("post:9:views");
/// views.add(3).await?;
/// assert_eq!(views.sum().await?.total(), 3);
/// # Ok::<(), heatsink::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct GrowOnly(Counter);

impl GrowOnly {
    /// Adds `n`; returns when it is stored. A negative amount is not expressible.
    ///
    /// # Cost, Cancel safety
    /// As [`Counter::add`].
    ///
    /// # Errors
    /// As [`Counter::add`].
    pub async fn add(&self, n: u64) -> Result<()> {
        let n = i64::try_from(n).map_err(|_| {
            let text = "the amount does not fit into 63 bits";
            Error::not_applied(ErrorKind::Overflow, text).with_key(&self.0.cell.key)
        })?;
        self.0.add(n).await
    }

    /// The sum, never less than an earlier call of this process returned.
    ///
    /// # Staleness, Cost, Cancel safety
    /// As [`Counter::sum`].
    ///
    /// # Errors
    /// As [`Counter::sum`].
    pub async fn sum(&self) -> Result<Sum> {
        self.0.young_sum().await.map(|sum| self.raised(sum))
    }

    /// Like [`sum`](GrowOnly::sum), at most `max_age` old.
    ///
    /// # Cancel safety
    /// As [`Counter::sum`].
    ///
    /// # Errors
    /// As [`Counter::sum`].
    pub async fn sum_with(&self, max_age: Duration) -> Result<Sum> {
        self.0.load_sum(max_age).await.map(|sum| self.raised(sum))
    }

    /// As [`Counter::total`], never less than an earlier call of this process returned.
    ///
    /// # Errors
    /// As [`Counter::sum`].
    pub async fn total(&self) -> Result<Sum> {
        self.0.latest_total().await.map(|total| self.raised(total))
    }

    fn raised(&self, (sum, started): (Sum, Tick)) -> Sum {
        let shared = self.0.hs.shared();
        let now = shared.clock.now();
        let shown = self.0.cell.known.lock().raise(sum.total, started, now);
        count(&shared.counters.tallies.sums_regressed, u64::from(shown.lost > 0));
        Sum { total: shown.total, lost: shown.lost, ..sum }
    }
}
