//! Copies of one read-hot key on several shards, over any store.
//!
//! [`Copied`] is for a key that is known to be hot: every process is told that it has copies, and
//! how many. What makes reading any of them safe is decided in
//! [`engine::control::copies`](crate::engine::control::copies); here its steps are carried out.
//!
//! # Example
//! ```
//! # use heatsink::{Heatsink, copies::Copied, store::MemoryStore};
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let store = MemoryStore::new(8);
//! let page = Copied::new(store.clone(), "page:home", 1, 5)?;
//! page.put("<h1>hello</h1>").await?;
//! // With the near cache and single flight before the copies:
//! let hs = Heatsink::new(store)?;
//! let source = page.clone();
//! let html = hs.load("page:home", move || async move { source.get().await }).await?;
//! assert_eq!(html.unwrap(), b"<h1>hello</h1>");
//! # Ok::<(), heatsink::Error>(()) }).unwrap();
//! ```

use crate::call;
use crate::engine::control::copies::read::{self, Copy, Floor, Get};
use crate::engine::control::copies::snapshot::{Look, Seen};
use crate::engine::control::copies::write::{self, Kept, Known, Write};
use crate::engine::control::copies::{Answer, COPIES_MAX, Image, Plan, Set};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::names;
use crate::runtime::{BoxFuture, Clock, Runtime, ambient, wall_seed};
use crate::store::{DynStore, Store, Version};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

pub use crate::engine::control::copies::{Form, Reach};

/// How old a snapshot may be when a copy is written from it.
const FILL: Duration = Duration::from_secs(1);
/// Between two attempts of one step that failed.
const PAUSE: Duration = Duration::from_millis(10);
/// Attempts of a step of a write; with the pauses, about a second.
const ROUNDS_MAX: u32 = 96;
/// A write gives up on copies that have not answered by then.
const LIMIT: Duration = Duration::from_secs(5);
/// Errors of the base that one read sees before it gives up.
const ERRORS_MAX: u32 = 3;

/// One key with copies. Clones are handles to the same one; a process has one for each key.
///
/// All processes must be told the same number and generation, for as long as the key is written:
/// a writer that does not know a copy leaves it as old as its lifetime allows. To change the
/// number, stop the readers first, or take another key.
#[derive(Clone)]
pub struct Copied(Arc<Inner>);

struct Inner {
    store: Arc<dyn DynStore>,
    runtime: Arc<dyn Runtime>,
    clock: Clock,
    key: Key,
    cell: Key,
    names: Vec<Key>,
    set: Set,
    plan: Plan,
    floor: Mutex<Floor>,
    filling: Mutex<BTreeSet<u16>>,
    repairing: AtomicBool,
    dice: AtomicU64,
}

impl Copied {
    /// `key` with `copies` copies, on `store`. `generation` is part of their names: raise it when
    /// the number has been changed. The form is [`Form::Sandwich`] where the store can put only if
    /// newer, else [`Form::TtlOnly`].
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config) for no copy or more than 256.
    pub fn new(
        store: impl Store,
        key: impl Into<Key>,
        generation: u64,
        copies: u16,
    ) -> Result<Copied> {
        let newer = store.capability().put_if_newer;
        let form = if newer { Form::Sandwich } else { Form::TtlOnly };
        Copied::with(store, key, generation, copies, form, ambient())
    }

    /// Like [`new`](Copied::new) with a form and a runtime.
    ///
    /// # Errors
    /// As [`new`](Copied::new), and for a form that the store cannot carry.
    pub fn with(
        store: impl Store,
        key: impl Into<Key>,
        generation: u64,
        copies: u16,
        form: Form,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Copied> {
        if copies == 0 || copies > COPIES_MAX {
            return Err(Error::config(format!("{copies} copies: from 1 to {COPIES_MAX} are kept")));
        }
        if matches!(form, Form::Joint | Form::Pair) {
            return Err(Error::config("no store of this version reads two keys at one instant"));
        }
        if form.versioned() && !store.capability().put_if_newer {
            return Err(Error::config("the store has no put_if_newer, which this form needs"));
        }
        let store: Arc<dyn DynStore> = Arc::new(store);
        let key = key.into();
        let mut plan = Plan::new(form, FILL, store.max_in_flight_time());
        plan.rounds_max = ROUNDS_MAX;
        let set = Set { generation, writers: copies, readers: copies };
        let clock = runtime.clock();
        let mut floor = Floor::new();
        floor.learn(&plan, Some(set), clock.now());
        Ok(Copied(Arc::new(Inner {
            cell: names::cell(&key, generation),
            names: (0..copies).map(|i| names::copy(&key, generation, i)).collect(),
            filling: Mutex::default(),
            repairing: AtomicBool::new(false),
            dice: AtomicU64::new(wall_seed()),
            floor: Mutex::new(floor),
            store,
            runtime,
            clock,
            key,
            set,
            plan,
        })))
    }

    /// The names of the copies.
    #[must_use]
    pub fn names(&self) -> &[Key] {
        &self.0.names
    }

    /// The value, or `None`.
    ///
    /// # Staleness
    /// Never older than what a read of this handle has returned before, nor than a put of it that
    /// has returned; after a put that has returned [`Reach::All`], no process reads anything
    /// older. Beyond that see the table of forms in
    /// [`engine::control::copies`](crate::engine::control::copies).
    ///
    /// # Cost
    /// Store operations: 1, on the shard of a copy chosen at random. Where the copy is missing or
    /// older: 3 more on the base's, and 1 to fill it.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    ///
    /// # Errors
    /// Those of the store, when neither a copy nor the base could be read.
    pub async fn get(&self) -> Result<Option<Bytes>> {
        let this = &*self.0;
        let mut get = Get::new(&this.floor.lock(), Some(this.set), this.clock.now(), self.roll());
        let (mut errors, mut ttl_left) = (0, None);
        loop {
            let now = this.clock.now();
            match get.poll(&this.plan, now) {
                read::Step::Copy(_, i) => {
                    let copy = match self.load(&this.names[usize::from(i)]).await {
                        Err(_) => Copy::Failed,
                        Ok(None) => Copy::Missing,
                        Ok(Some((bytes, _))) => {
                            Image::decode(&bytes).map_or(Copy::Missing, Copy::Image)
                        }
                    };
                    let at = (this.clock.now(), Some(this.set));
                    get.handle_copy(&this.plan, &mut this.floor.lock(), at, copy);
                }
                read::Step::Look(_, look) => {
                    let seen = match self.look(look, &mut ttl_left).await {
                        Ok(seen) => seen,
                        Err(error) => {
                            errors += 1;
                            if errors >= ERRORS_MAX {
                                return Err(error.with_key(&this.key));
                            }
                            this.runtime.sleep(PAUSE).await;
                            Seen::Failed
                        }
                    };
                    let at = (this.clock.now(), Some(this.set));
                    get.handle_look(&this.plan, &mut this.floor.lock(), at, seen);
                }
                read::Step::Plain => return Ok(self.load(&this.key).await?.map(|(b, _)| b)),
                read::Step::Done(value) => {
                    self.follow_up(&get, ttl_left);
                    return Ok(value);
                }
                read::Step::Failed => {
                    let text = "the base changes faster than it can be read with its version";
                    return Err(Error::not_applied(ErrorKind::Store, text).with_key(&this.key));
                }
            }
        }
    }

    /// Writes the value, to expire after `ttl` if there is one, and brings the copies up to it.
    ///
    /// # Cost
    /// Store operations: 4 on the base's shard and 1 on that of each copy ([`Form::Sandwich`]).
    ///
    /// # Cancel safety
    /// A dropped put may have been applied, and its copies are as old as their lifetime allows.
    ///
    /// # Errors
    /// Those of the base's put. One of unknown outcome is settled in the background, when it can
    /// no longer be applied.
    pub async fn put_with(&self, value: impl Into<Bytes>, ttl: Option<Duration>) -> Result<Reach> {
        self.write(Some(value.into()), ttl).await
    }

    /// Like [`put_with`](Copied::put_with), without expiry.
    ///
    /// # Errors
    /// As [`put_with`](Copied::put_with).
    pub async fn put(&self, value: impl Into<Bytes>) -> Result<Reach> {
        self.put_with(value, None).await
    }

    /// Deletes the value. Copies hold tombstones, so that it does not come back.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`put_with`](Copied::put_with).
    #[expect(clippy::missing_errors_doc, reason = "the heading names three")]
    pub async fn delete(&self) -> Result<Reach> {
        self.write(None, None).await
    }

    /// Brings all copies up to the base: after a write behind heatsink's back. A read that finds
    /// two values under one version does so by itself.
    pub async fn repair(&self) -> Reach {
        let mut write = Write::repair(self.0.set);
        let mut failed = None;
        self.carry_out(&mut write, None, &mut failed).await;
        match write.outcome() {
            Answer::Applied(reach) => reach,
            _ => Reach::Ttl,
        }
    }

    async fn write(&self, value: Option<Bytes>, ttl: Option<Duration>) -> Result<Reach> {
        let this = &*self.0;
        let mut write = Write::new(value.clone(), Some(this.set));
        let mut failed = None;
        self.carry_out(&mut write, Some((value, ttl)), &mut failed).await;
        let outcome = write.outcome();
        if let Answer::Applied(_) = outcome {
            let mut floor = this.floor.lock();
            if !this.plan.form.versioned() {
                floor.forget();
            } else if let Some((generation, label)) = write.label() {
                floor.raise(generation, label);
            }
        }
        if let write::Step::WaitUntil(until) = write.poll(&this.plan, this.clock.now()) {
            let (later, wait) = (self.clone(), until.since(this.clock.now()));
            this.runtime.spawn(Box::pin(async move {
                later.0.runtime.sleep(wait).await;
                later.carry_out(&mut write, None, &mut None).await;
            }));
        }
        let lost = || Error::unknown(ErrorKind::Store, "the store gave no answer to a write");
        match outcome {
            Answer::Applied(reach) => Ok(reach),
            _ => Err(failed.unwrap_or_else(lost).with_key(&this.key)),
        }
    }

    /// Carries out a write up to its end, or to where it waits.
    async fn carry_out(
        &self,
        write: &mut Write,
        mut base: Option<(Option<Bytes>, Option<Duration>)>,
        failed: &mut Option<Error>,
    ) {
        let (this, mut ttl_left) = (&*self.0, None);
        let until = this.clock.now().after(LIMIT);
        loop {
            let (plan, now) = (&this.plan, this.clock.now());
            if now >= until {
                write.give_up(plan, now);
            }
            match write.poll(plan, now) {
                write::Step::Base | write::Step::BaseAndBump(_) => {
                    let answer = self.send_base(base.take(), failed).await;
                    write.handle_base(plan, this.clock.now(), answer);
                }
                write::Step::Lease => {
                    write.handle_lease(plan, this.clock.now(), Known::Leased(Some(this.set)));
                }
                write::Step::Bump(_, by) => {
                    let by = i64::try_from(by).unwrap_or(i64::MAX);
                    let bump = call::catch(this.store.clone().add(this.cell.clone(), by)).await;
                    let answer = match bump.and_then(|answer| answer) {
                        Ok(cell) => Answer::Applied(cell.unsigned_abs()),
                        Err(error) => self.pause(&error).await,
                    };
                    write.handle_bump(plan, this.clock.now(), answer);
                }
                write::Step::Look(_, look) => {
                    let seen = match self.look(look, &mut ttl_left).await {
                        Ok(seen) => seen,
                        Err(error) => {
                            let _: Answer<()> = self.pause(&error).await;
                            Seen::Failed
                        }
                    };
                    write.handle_look(plan, this.clock.now(), seen);
                }
                write::Step::Spread(_) => self.spread(write, ttl_left).await,
                write::Step::Erase(_) => self.erase(write).await,
                write::Step::WaitUntil(_) | write::Step::Done => return,
            }
        }
    }

    async fn send_base(
        &self,
        base: Option<(Option<Bytes>, Option<Duration>)>,
        failed: &mut Option<Error>,
    ) -> Answer<Option<u64>> {
        let (store, key) = (self.0.store.clone(), self.0.key.clone());
        let Some((value, ttl)) = base else { return Answer::NotApplied };
        let sent: BoxFuture<'static, Result<()>> = match value {
            Some(value) => store.put(key, value, ttl),
            None => Box::pin(async move {
                let lost = || Error::unknown(ErrorKind::Store, "no answer to a delete");
                store.delete_many(vec![key]).await.pop().unwrap_or_else(|| Err(lost())).map(drop)
            }),
        };
        let answer = call::catch(sent).await;
        match answer.unwrap_or_else(|panic| Err(panic.with_outcome(Outcome::Unknown))) {
            Ok(()) => Answer::Applied(None),
            Err(error) => {
                let answer = answer_of(&error);
                *failed = Some(error);
                answer
            }
        }
    }

    /// Puts the image on all copies that have not acknowledged it, at the same time.
    async fn spread(&self, write: &mut Write, ttl_left: Option<(Tick, Duration)>) {
        let Some(image) = write.image().cloned() else { return };
        let todo: Vec<u16> = write.todo().collect();
        let puts = todo.iter().map(|i| {
            let (this, image, i) = (self.clone(), image.clone(), *i);
            let put: BoxFuture<'static, Answer<Kept>> =
                Box::pin(async move { this.put_copy(i, &image, ttl_left).await });
            put
        });
        let answers = all(puts.collect()).await;
        for (i, answer) in todo.into_iter().zip(answers) {
            write.handle_copy(&self.0.plan, self.0.clock.now(), i, answer);
        }
    }

    async fn put_copy(
        &self,
        i: u16,
        image: &Image,
        ttl_left: Option<(Tick, Duration)>,
    ) -> Answer<Kept> {
        let this = &*self.0;
        let name = this.names[usize::from(i)].clone();
        let (bytes, ttl) = (image.encode(), self.lifetime(ttl_left));
        if ttl.is_zero() {
            return Answer::Applied(Kept::This);
        }
        if !this.plan.form.versioned() {
            let put = call::catch(this.store.clone().put(name, bytes, Some(ttl))).await;
            return match put.and_then(|answer| answer) {
                Ok(()) => Answer::Applied(Kept::This),
                Err(error) => self.pause(&error).await,
            };
        }
        let version = Version::seq(image.label.version);
        let put = this.store.clone().put_if_newer(name.clone(), version, bytes, Some(ttl));
        match call::catch(put).await.and_then(|answer| answer) {
            Ok(true) => Answer::Applied(Kept::This),
            Ok(false) => match self.load(&name).await {
                Ok(Some((bytes, _))) => match Image::decode(&bytes) {
                    Some(there) => Answer::Applied(Kept::Refused(there.label)),
                    None => Answer::NotApplied,
                },
                // It has expired meanwhile, or cannot be read: once more.
                Ok(None) => Answer::NotApplied,
                Err(error) => self.pause(&error).await,
            },
            Err(error) => self.pause(&error).await,
        }
    }

    /// A copy lives no longer than the base does.
    fn lifetime(&self, ttl_left: Option<(Tick, Duration)>) -> Duration {
        let now = self.0.clock.now();
        let base = ttl_left.map(|(at, left)| left.saturating_sub(now.since(at)));
        base.map_or(self.0.plan.ttl, |left| left.min(self.0.plan.ttl))
    }

    async fn erase(&self, write: &mut Write) {
        let this = &*self.0;
        let todo: Vec<u16> = write.todo().collect();
        let names = todo.iter().map(|i| this.names[usize::from(*i)].clone()).collect();
        let answers = call::catch(this.store.clone().delete_many(names)).await.unwrap_or_default();
        let mut answers = answers.into_iter();
        for i in todo {
            let answer = match answers.next() {
                Some(Ok(_)) => Answer::Applied(Kept::This),
                Some(Err(error)) => self.pause(&error).await,
                None => Answer::Unknown,
            };
            write.handle_copy(&this.plan, this.clock.now(), i, answer);
        }
    }

    /// What a failed step says, after a pause.
    async fn pause<T>(&self, error: &Error) -> Answer<T> {
        self.0.runtime.sleep(PAUSE).await;
        answer_of(error)
    }

    async fn load(&self, name: &Key) -> Result<Option<(Bytes, Option<Duration>)>> {
        let get = call::catch(self.0.store.clone().get(name.clone())).await;
        Ok(get.and_then(|answer| answer)?.map(|stored| (stored.bytes, stored.ttl_left)))
    }

    /// One look at the cell or the base; of the base also how long it lives, from when on.
    async fn look(&self, look: Look, ttl_left: &mut Option<(Tick, Duration)>) -> Result<Seen> {
        if look == Look::Cell {
            let cell = self.load(&self.0.cell).await?;
            let digits = cell.as_ref().and_then(|(bytes, _)| std::str::from_utf8(bytes).ok());
            return Ok(Seen::Cell(digits.and_then(|text| text.parse().ok()).unwrap_or(0)));
        }
        let sent = self.0.clock.now();
        let base = self.load(&self.0.key).await?;
        *ttl_left = base.as_ref().and_then(|(_, left)| left.map(|left| (sent, left)));
        Ok(Seen::Base(base.map(|(bytes, _)| bytes)))
    }

    /// Fills the copy that was missing, and repairs where one version has two values.
    fn follow_up(&self, get: &Get, ttl_left: Option<(Tick, Duration)>) {
        let this = &*self.0;
        if let Some((_, i, image)) = get.fill(&this.plan)
            && this.filling.lock().insert(i)
        {
            let (later, image) = (self.clone(), image.clone());
            this.runtime.spawn(Box::pin(async move {
                if image.young(&later.0.plan, later.0.clock.now()) {
                    let _ = later.put_copy(i, &image, ttl_left).await;
                }
                later.0.filling.lock().remove(&i);
            }));
        }
        if get.wants_help(&this.plan).is_some() && !this.repairing.swap(true, Relaxed) {
            let later = self.clone();
            this.runtime.spawn(Box::pin(async move {
                let _ = later.repair().await;
                // One a second at most: somebody may write behind our back all the time.
                later.0.runtime.sleep(FILL).await;
                later.0.repairing.store(false, Relaxed);
            }));
        }
    }

    fn roll(&self) -> u64 {
        let mut z = self.0.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn answer_of<T>(error: &Error) -> Answer<T> {
    if error.is_unknown() { Answer::Unknown } else { Answer::NotApplied }
}

/// Polls all of them until each has ended.
async fn all<T>(mut work: Vec<BoxFuture<'static, T>>) -> Vec<T> {
    let mut done: Vec<Option<T>> = work.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, slot) in work.iter_mut().zip(&mut done) {
            if slot.is_none()
                && let Poll::Ready(out) = future.as_mut().poll(cx)
            {
                *slot = Some(out);
            }
        }
        if done.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

impl fmt::Debug for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copied")
            .field("key", &self.0.key)
            .field("copies", &self.0.names.len())
            .finish_non_exhaustive()
    }
}
