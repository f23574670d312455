//! The store behind a bulkhead per shard, with retries within a budget.
//!
//! A wrapper that is only there when one of the two was asked for: without it calls go to the
//! user's store directly.

use super::ShedStats;
use super::options::{Bulkhead, Retries};
use crate::adds::count;
use crate::engine::control::shards::SHARDS_MAX;
use crate::engine::data::bulkhead::{self, Entry, WaitId};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::key::Key;
use crate::runtime::{BoxFuture, Runtime};
use crate::store::DynStore;
use crate::sync::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The first pause before a retry is drawn from this.
const PAUSE: Duration = Duration::from_millis(10);

/// A refusal at a bulkhead may be tried again after this.
const REFUSED_FOR: Duration = Duration::from_millis(50);

/// See the module's description.
pub(crate) struct Guard {
    pub(super) store: Arc<dyn DynStore>,
    runtime: Arc<dyn Runtime>,
    retries: Option<Retries>,
    bulkhead: Option<Bulkhead>,
    /// Thousandths of a retry that this instance has left.
    kept: AtomicU64,
    /// The first is for what has no known shard.
    doors: Box<[OnceLock<Box<Door>>]>,
    dice: AtomicU64,
    made: AtomicU64,
    refused: AtomicU64,
    queued: AtomicU64,
    shut_out: AtomicU64,
}

/// What stands in front of one shard.
struct Door {
    kept: AtomicU64,
    room: Mutex<bulkhead::Bulkhead<Arc<Letter>>>,
}

/// Where a door stands in [`Guard::doors`].
type At = usize;

/// One key of a batch: its place in the batch, its door.
type Item = (usize, At, Key);

/// A store call for several keys.
type Many<T> =
    Arc<dyn Fn(Arc<dyn DynStore>, Vec<Key>) -> BoxFuture<'static, Vec<Result<T>>> + Send + Sync>;

/// A call for some keys of a batch, under way.
type Round<T> = BoxFuture<'static, Vec<(Item, Result<T>)>>;

/// Whether heatsink itself may repeat a call that was not applied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    Yes,
    /// Never an `add`; whether its caller should is drawn from the same budget.
    No,
}

impl Guard {
    pub(crate) fn new(
        store: Arc<dyn DynStore>,
        runtime: Arc<dyn Runtime>,
        retries: Option<Retries>,
        bulkhead: Option<Bulkhead>,
        seed: u64,
    ) -> Guard {
        let kept = retries.as_ref().map_or(0, |r| r.terms().full());
        Guard {
            store,
            runtime,
            retries,
            bulkhead,
            kept: AtomicU64::new(kept),
            doors: (0..=SHARDS_MAX).map(|_| OnceLock::new()).collect(),
            dice: AtomicU64::new(seed),
            made: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            shut_out: AtomicU64::new(0),
        }
    }

    fn at(&self, key: &[u8]) -> At {
        // Shards beyond the number that is told apart share the last door.
        self.store.shard_of(key).map_or(0, |shard| (shard as usize).min(SHARDS_MAX - 1) + 1)
    }

    fn door(&self, at: At) -> &Door {
        self.doors[at].get_or_init(|| {
            let kept = self.retries.as_ref().map_or(0, |r| r.terms().full());
            Box::new(Door { kept: AtomicU64::new(kept), room: Mutex::default() })
        })
    }

    /// A call pays into the budget of the instance and into that of its shard.
    fn deposit(&self, at: At) {
        let Some(terms) = self.retries.as_ref().map(Retries::terms) else { return };
        let pay =
            |kept: &AtomicU64| kept.fetch_update(Relaxed, Relaxed, |k| Some(terms.deposit(k)));
        let _ = pay(&self.kept);
        if at > 0 {
            let _ = pay(&self.door(at).kept);
        }
    }

    /// Takes a retry out of both budgets, or out of none.
    fn withdraw(&self, at: At) -> bool {
        let Some(terms) = self.retries.as_ref().map(Retries::terms) else { return false };
        let take = |kept: &AtomicU64| kept.fetch_update(Relaxed, Relaxed, |k| terms.withdraw(k));
        let of_shard = (at > 0).then(|| &self.door(at).kept);
        if of_shard.is_some_and(|kept| take(kept).is_err()) {
            return false;
        }
        if take(&self.kept).is_ok() {
            return true;
        }
        if let Some(kept) = of_shard {
            let _ = kept.fetch_update(Relaxed, Relaxed, |k| Some(terms.give_back(k)));
        }
        false
    }

    /// How long to wait before the call that failed is made again; or the error as its caller gets
    /// it.
    fn again(&self, error: Error, at: At, tries: u32, repeat: Repeat) -> Result<Duration> {
        let Some(retries) = &self.retries else { return Err(error) };
        let Some(asked) = self.wait(&error).filter(|_| !error.is_unknown()) else {
            return Err(error);
        };
        if tries >= retries.attempts {
            return Err(error.with_retry(Retry::Never));
        }
        if !self.withdraw(at) {
            count(&self.refused, 1);
            return Err(error.with_retry(Retry::Never));
        }
        if repeat == Repeat::No {
            return Err(error);
        }
        count(&self.made, 1);
        let span = (PAUSE * (1 << tries.min(10))).min(retries.wait_max);
        let drawn = span.mul_f64(self.unit());
        Ok(asked.max(drawn))
    }

    /// How long the store asks to wait before the call is repeated; `None` where it is not.
    fn wait(&self, error: &Error) -> Option<Duration> {
        let wait_max = self.retries.as_ref()?.wait_max;
        // A refusal protects the store: repeating it is for the caller, and later.
        match error.retry() {
            _ if error.kind() == ErrorKind::Shed => None,
            Retry::Now => Some(Duration::ZERO),
            Retry::After(wait) => (wait <= wait_max).then_some(wait),
            Retry::Never => None,
        }
    }

    /// In [0, 1).
    fn unit(&self) -> f64 {
        let mut z = self.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A place at the shard of `at`, or in its queue.
    fn enter(self: &Arc<Self>, at: At) -> Entered {
        let Some(options) = &self.bulkhead else { return Entered::Inside(Permit(None)) };
        let mut letter = None;
        let entry = self
            .door(at)
            .room
            .lock()
            .enter(options.limits(), || letter.insert(Arc::new(Letter::default())).clone());
        match (entry, letter) {
            (Entry::Inside, _) => Entered::Inside(Permit(Some((self.clone(), at)))),
            (Entry::Waits(id), Some(letter)) => {
                count(&self.queued, 1);
                let timer = self.runtime.sleep(options.wait_max);
                Entered::Waits(Waiting { guard: self.clone(), at, id, letter, timer, ended: false })
            }
            _ => Entered::Full(self.shut_out("too many calls wait for the shard")),
        }
    }

    fn shut_out(&self, text: &'static str) -> Error {
        count(&self.shut_out, 1);
        Error::not_applied(ErrorKind::Shed, text).with_retry(Retry::After(REFUSED_FOR))
    }

    fn leave(&self, at: At) {
        let next = self.door(at).room.lock().leave();
        if let Some(letter) = next {
            letter.grant();
        }
    }

    pub(super) fn call<T: Send + 'static>(
        self: Arc<Self>,
        key: &[u8],
        repeat: Repeat,
        op: impl Fn(Arc<dyn DynStore>) -> BoxFuture<'static, Result<T>> + Send + Sync + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        let at = self.at(key);
        Box::pin(async move {
            self.deposit(at);
            let mut tries = 0;
            loop {
                let permit = self.enter(at).place().await?;
                let outcome = op(self.store.clone()).await;
                drop(permit);
                let Err(error) = outcome else { return outcome };
                let pause = self.again(error, at, tries, repeat)?;
                tries += 1;
                self.runtime.sleep(pause).await;
            }
        })
    }

    /// Like [`call`](Guard::call), with a result per key.
    pub(super) fn call_many<T: Send + 'static>(
        self: Arc<Self>,
        keys: Vec<Key>,
        op: Many<T>,
    ) -> BoxFuture<'static, Vec<Result<T>>> {
        Box::pin(async move {
            let mut out: Vec<Option<Result<T>>> = keys.iter().map(|_| None).collect();
            let item = |(i, key): (usize, Key)| (i, self.at(&key), key);
            let mut left: Vec<Item> = keys.into_iter().enumerate().map(item).collect();
            left.iter()
                .map(|(_, at, _)| *at)
                .collect::<std::collections::BTreeSet<_>>()
                .iter()
                .for_each(|at| self.deposit(*at));
            let mut tries = 0;
            loop {
                let round = self.round(&op, left.clone()).await;
                let (again, pause) = self.sort(round, &mut out, tries);
                left.retain(|(i, ..)| again.contains(i));
                if left.is_empty() {
                    return out.into_iter().map(|r| r.unwrap_or_else(|| Err(missing()))).collect();
                }
                tries += 1;
                self.runtime.sleep(pause).await;
            }
        })
    }

    /// Which keys of a round are asked for again, and after what pause. Those of one shard are one
    /// retry.
    fn sort<T>(
        &self,
        round: Vec<(Item, Result<T>)>,
        out: &mut [Option<Result<T>>],
        tries: u32,
    ) -> (Vec<usize>, Duration) {
        let (mut again, mut longest) = (Vec::new(), Duration::ZERO);
        let mut granted: BTreeMap<At, bool> = BTreeMap::new();
        for ((i, at, _), result) in round {
            let error = match result {
                Ok(value) => {
                    out[i] = Some(Ok(value));
                    continue;
                }
                Err(error) => error,
            };
            let verdict = match granted.get(&at) {
                // The retry of its shard is paid for.
                Some(true) if !error.is_unknown() => {
                    self.wait(&error).map(|asked| asked.max(PAUSE)).ok_or_else(|| error.clone())
                }
                Some(false) => Err(error.clone().with_retry(Retry::Never)),
                _ => self.again(error.clone(), at, tries, Repeat::Yes),
            };
            match verdict {
                Ok(pause) => {
                    granted.insert(at, true);
                    longest = longest.max(pause);
                    again.push(i);
                }
                Err(e) => {
                    if e.retry() == Retry::Never && error.retry() != Retry::Never {
                        granted.insert(at, false);
                    }
                    out[i] = Some(Err(e));
                }
            }
        }
        (again, longest)
    }

    /// Asks once for all of `items`; where shards have places, for those of each in a call of their
    /// own: so the places of a fast shard are not held for as long as a slow one takes.
    async fn round<T: Send + 'static>(
        self: &Arc<Self>,
        op: &Many<T>,
        items: Vec<Item>,
    ) -> Vec<(Item, Result<T>)> {
        if self.bulkhead.is_none() {
            return ask(self.store.clone(), op.clone(), items, Permit(None)).await;
        }
        let mut by_door: BTreeMap<At, Vec<Item>> = BTreeMap::new();
        for item in items {
            by_door.entry(item.1).or_default().push(item);
        }
        let mut done = Vec::new();
        let mut calls: Vec<Round<T>> = Vec::new();
        for (at, items) in by_door {
            match self.enter(at) {
                Entered::Inside(permit) => {
                    calls.push(Box::pin(ask(self.store.clone(), op.clone(), items, permit)));
                }
                Entered::Full(e) => done.extend(items.into_iter().map(|i| (i, Err(e.clone())))),
                Entered::Waits(waiting) => {
                    let (store, op) = (self.store.clone(), op.clone());
                    calls.push(Box::pin(async move {
                        match waiting.await {
                            Ok(permit) => ask(store, op, items, permit).await,
                            Err(e) => items.into_iter().map(|i| (i, Err(e.clone()))).collect(),
                        }
                    }));
                }
            }
        }
        done.extend(join(calls).await.into_iter().flatten());
        done
    }

    pub(super) fn tell(&self, stats: &mut ShedStats) {
        stats.retries = self.made.load(Relaxed);
        stats.retries_refused = self.refused.load(Relaxed);
        stats.queued = self.queued.load(Relaxed);
        stats.refused_by_shard = self.shut_out.load(Relaxed);
    }
}

async fn ask<T>(
    store: Arc<dyn DynStore>,
    op: Many<T>,
    items: Vec<Item>,
    permit: Permit,
) -> Vec<(Item, Result<T>)> {
    let keys = items.iter().map(|(_, _, key)| key.clone()).collect();
    let mut results = op(store, keys).await.into_iter();
    drop(permit);
    items.into_iter().map(|i| (i, results.next().unwrap_or_else(|| Err(missing())))).collect()
}

fn missing() -> Error {
    Error::unknown(ErrorKind::Store, "the store answered fewer keys than it was asked for")
        .with_retry(Retry::Never)
}

/// Waits for all, in order.
async fn join<T>(mut calls: Vec<BoxFuture<'static, T>>) -> Vec<T> {
    let mut out: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (call, out) in calls.iter_mut().zip(&mut out).filter(|(_, out)| out.is_none()) {
            if let Poll::Ready(done) = call.as_mut().poll(cx) {
                *out = Some(done);
            }
        }
        if out.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    out.into_iter().flatten().collect()
}

enum Entered {
    Inside(Permit),
    Waits(Waiting),
    Full(Error),
}

impl Entered {
    /// The place, when there is one.
    async fn place(self) -> Result<Permit> {
        match self {
            Entered::Inside(permit) => Ok(permit),
            Entered::Waits(waiting) => waiting.await,
            Entered::Full(error) => Err(error),
        }
    }
}

/// A place at a shard, left when it is dropped. Nothing, where there is no bulkhead.
struct Permit(Option<(Arc<Guard>, At)>);

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some((guard, at)) = self.0.take() {
            guard.leave(at);
        }
    }
}

/// A waiting call's letter box.
#[derive(Default)]
struct Letter(Mutex<(bool, Option<Waker>)>);

impl Letter {
    /// The call has a place. Called outside all locks.
    fn grant(&self) {
        let mut contents = self.0.lock();
        contents.0 = true;
        let waker = contents.1.take();
        drop(contents);
        // A place may be left while a panic unwinds; a waker that panics then must not end the
        // process.
        let _ = catch_unwind(AssertUnwindSafe(|| waker.map(Waker::wake)));
    }

    fn is_granted(&self, waker: &Waker) -> bool {
        let mut contents = self.0.lock();
        if contents.0 {
            return true;
        }
        if contents.1.as_ref().is_some_and(|w| w.will_wake(waker)) {
            return false;
        }
        let old = contents.1.replace(waker.clone());
        drop(contents);
        drop(old);
        false
    }
}

/// The wait for a place. Dropped, it leaves the queue, or the place that it was just given.
struct Waiting {
    guard: Arc<Guard>,
    at: At,
    id: WaitId,
    letter: Arc<Letter>,
    timer: BoxFuture<'static, ()>,
    ended: bool,
}

impl Waiting {
    /// True when it still waited.
    fn give_up(&self) -> bool {
        let letter = self.guard.door(self.at).room.lock().give_up(self.id);
        letter.is_some()
    }
}

impl Future for Waiting {
    type Output = Result<Permit>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Permit>> {
        let this = &mut *self;
        let granted = this.letter.is_granted(cx.waker());
        if !granted && this.timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        // Its time may have run out while the place was on its way.
        let outcome = if granted || !this.give_up() {
            Ok(Permit(Some((this.guard.clone(), this.at))))
        } else {
            Err(this.guard.shut_out("no place at the shard became free in time"))
        };
        this.ended = true;
        Poll::Ready(outcome)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.ended && !self.give_up() {
            self.guard.leave(self.at);
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("retries", &self.retries)
            .field("bulkhead", &self.bulkhead)
            .finish_non_exhaustive()
    }
}
