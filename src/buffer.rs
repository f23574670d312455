//! The buffer of one counter in this process, and the task that flushes it.
//!
//! An add touches the stripe of its thread and reads one line that is seldom written. Everything
//! else takes the lock: the task collects the stripes, hands them to the engine's writer, and sends
//! what that decides. The task belongs to the runtime of whoever started it; when it dies with it,
//! or ends because there was nothing to do, the next add starts another.

use crate::adds::{Cell, count};
use crate::batch::{self, Letter, bounded};
use crate::buffered::Admitted;
use crate::cell::thread_ordinal;
use crate::engine::control::lanes::{Ended, Flush, Writer};
use crate::engine::control::roster::Place;
use crate::engine::time::{Tick, nanos};
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::lanes::{Lanes, ask, overflow};
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use crate::sync::Mutex;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

/// Intervals without an add after which the task ends.
const IDLE_INTERVALS: u32 = 20;

/// Attempts to flush after the last handle of the instance is gone.
const LAST_ATTEMPTS: u32 = 3;

/// Lanes that one flush tries in a row.
const REFUSALS: u32 = 3;

/// A writer without a lane looks for one this often.
const SEARCH_AGAIN: Duration = Duration::from_secs(30);

/// Adds go to the stripes.
const OPEN: u8 = 0;
/// So they do, and whoever adds starts the task.
const ASLEEP: u8 = 1;
/// Adds take the lock: no lane, no room, or closed.
const LOCKED: u8 = 2;

/// One thread's part of the buffer, on a line of its own.
#[repr(align(128))]
#[derive(Default)]
struct Stripe(AtomicI64);

/// Read by every add, written when the mode changes.
#[repr(align(128))]
struct Mode(AtomicU8);

pub(crate) struct Buffer {
    pub(crate) hash: u64,
    pub(crate) key: Key,
    mode: Mode,
    stripes: Box<[Stripe]>,
    /// A stripe that holds more is collected at once.
    stripe_max: u64,
    pub(crate) lanes: Arc<Lanes>,
    /// What is known of the sum.
    pub(crate) sums: Arc<Cell>,
    core: Mutex<Core>,
}

struct Core {
    writer: Writer,
    waiters: Vec<(u64, Arc<Letter>)>,
    name: String,
    /// The store can keep lanes.
    laned: bool,
    /// A task runs.
    running: bool,
    /// Somebody wants a flush now.
    kicked: bool,
    waker: Option<Waker>,
    /// More is pending than the cap allows.
    full: bool,
    /// No lane was left: when that was found out.
    laneless: Option<Tick>,
    /// Shut down: adds go through.
    closed: bool,
    /// The last handle of the instance is gone.
    released: bool,
    attempts: u32,
}

impl Buffer {
    /// Bytes that the buffer of a key takes.
    pub(crate) fn cost(key: &[u8], stripes: usize) -> usize {
        // The structs and the names of the key, measured on a 64-bit machine.
        1024 + 4 * key.len() + stripes * size_of::<Stripe>()
    }

    pub(crate) fn new(shared: &Arc<Shared>, hash: u64, key: Key, closed: bool) -> Buffer {
        let stripes = shared.options.stripes;
        let adds = &shared.options.adds;
        // Half of the cap for the stripes, half for what the writer holds.
        let stripe_max = (adds.pending_max / 2 / stripes as u64).max(1);
        let can = shared.store.capability();
        Buffer {
            hash,
            mode: Mode(AtomicU8::new(if closed { LOCKED } else { ASLEEP })),
            stripes: (0..stripes).map(|_| Stripe::default()).collect(),
            stripe_max,
            lanes: Arc::new(Lanes::new(key.clone())),
            sums: Cell::new(hash, key.clone()),
            core: Mutex::new(Core {
                writer: Writer::default(),
                waiters: Vec::new(),
                name: shared.counters.writer.clone(),
                laned: can.compare_and_set && can.claim_lane && can.put_if_newer,
                running: false,
                kicked: false,
                waker: None,
                full: false,
                laneless: None,
                closed,
                released: false,
                attempts: 0,
            }),
            key,
        }
    }

    /// Adds `n` to this thread's stripe; false when it must take the lock, and nothing was added.
    #[inline]
    pub(crate) fn add(self: &Arc<Self>, shared: &Arc<Shared>, n: i64) -> bool {
        if self.mode.0.load(Ordering::Relaxed) == LOCKED || n.unsigned_abs() > self.stripe_max {
            return false;
        }
        // The number of stripes is a power of two.
        let stripe = &self.stripes[thread_ordinal() & (self.stripes.len() - 1)].0;
        let held = stripe.fetch_add(n, Ordering::SeqCst).wrapping_add(n);
        // The task that ends says so before it looks at the stripes for the last time: either it
        // finds this add, or this load finds that it is gone.
        if held.unsigned_abs() > self.stripe_max || self.mode.0.load(Ordering::SeqCst) != OPEN {
            self.look_after(shared);
        }
        true
    }

    #[cold]
    fn look_after(self: &Arc<Self>, shared: &Arc<Shared>) {
        let mut core = self.core.lock();
        let starts = self.collect(shared, &mut core).is_some_and(|_| !core.running);
        let waker = if core.full { core.kick() } else { None };
        let starts = starts && core.start();
        self.publish(&core);
        drop(core);
        wake(waker);
        self.start(shared, starts);
    }

    /// Moves the stripes to the writer; the flush that will carry them, if there is anything to
    /// flush.
    fn collect(&self, shared: &Arc<Shared>, core: &mut Core) -> Option<u64> {
        for stripe in &self.stripes {
            if stripe.0.load(Ordering::SeqCst) == 0 {
                continue;
            }
            let amount = stripe.0.swap(0, Ordering::SeqCst);
            if core.writer.take_in(amount).is_err() {
                // It does not fit: it waits where it was, and whoever adds more is told.
                stripe.0.fetch_add(amount, Ordering::SeqCst);
                core.full = true;
                return core.writer.unsettled();
            }
        }
        let cap = shared.options.adds.pending_max / 2;
        core.full = core.writer.pending().unsigned_abs() > cap;
        core.writer.unsettled()
    }

    fn publish(&self, core: &Core) {
        let locked = core.full || core.laneless.is_some() || core.closed;
        let mode = if locked {
            LOCKED
        } else if core.running {
            OPEN
        } else {
            ASLEEP
        };
        self.mode.0.store(mode, Ordering::SeqCst);
    }

    fn start(self: &Arc<Self>, shared: &Arc<Shared>, starts: bool) {
        if starts {
            let task = Running { shared: shared.clone(), buffer: self.clone() };
            shared.runtime.spawn(task.run());
        }
    }

    /// An add that takes the lock.
    pub(crate) fn admit(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        n: i64,
        durable: bool,
    ) -> Result<Admitted> {
        let mut core = self.core.lock();
        if core.closed || core.laneless.is_some() {
            // The task looks for a lane from time to time, for as long as adds come.
            let starts = !core.closed && core.start();
            drop(core);
            self.start(shared, starts);
            return Ok(Admitted::Through);
        }
        self.collect(shared, &mut core);
        if core.full {
            let waker = core.kick();
            let starts = core.start();
            self.publish(&core);
            drop(core);
            wake(waker);
            self.start(shared, starts);
            return Ok(shared.options.adds.at_cap.admitted());
        }
        if durable && !core.room(shared.options.loads.waiters_max) {
            let text = "too many wait for a flush of the counter";
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(&self.key));
        }
        let taken = core.writer.take_in(n);
        let number = taken.map_err(|_| overflow().with_key(&self.key))?;
        let admitted = if durable { core.wait_for(number) } else { Admitted::Buffered };
        #[cfg(feature = "testing")]
        if durable && shared.counters.is_broken(crate::adds::Mutant::AckBeforeStore) {
            core.waiters.pop().into_iter().for_each(|(_, letter)| letter.deliver(Ok(())));
        }
        let starts = core.start();
        self.publish(&core);
        drop(core);
        self.start(shared, starts);
        Ok(admitted)
    }

    /// Asks for a flush of everything added so far; `None` when all of it is stored.
    pub(crate) fn want_flush(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
    ) -> Result<Option<Arc<Letter>>> {
        let mut core = self.core.lock();
        let Some(number) = self.collect(shared, &mut core) else { return Ok(None) };
        if !core.room(shared.options.loads.waiters_max) {
            let text = "too many wait for a flush of the counter";
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(&self.key));
        }
        let Admitted::Wait(letter) = core.wait_for(number) else { return Ok(None) };
        let waker = core.kick();
        let starts = core.start();
        self.publish(&core);
        drop(core);
        wake(waker);
        self.start(shared, starts);
        Ok(Some(letter))
    }

    /// Waits for the flush that a letter is about.
    pub(crate) async fn wait(&self, shared: &Arc<Shared>, letter: Arc<Letter>) -> Result<()> {
        let answer = poll_fn(|cx| letter.poll(cx.waker()));
        match bounded(shared, shared.options.loads.timeout, answer).await {
            Some(answer) => answer,
            None => {
                let text = "no flush of the counter succeeded in time; the amount stays in memory";
                Err(Error::unknown(ErrorKind::Timeout, text).with_key(&self.key))
            }
        }
    }

    pub(crate) fn pending(&self) -> i64 {
        let core = self.core.lock();
        let stripes = self.stripes.iter().map(|s| s.0.load(Ordering::SeqCst));
        stripes.fold(core.writer.pending(), i64::saturating_add)
    }

    /// Whether the table may forget it.
    pub(crate) fn is_idle(&self) -> bool {
        let core = self.core.lock();
        !core.running
            && core.writer.unsettled().is_none()
            && self.stripes.iter().all(|s| s.0.load(Ordering::SeqCst) == 0)
    }

    /// From here on adds go through to the store.
    pub(crate) fn close(&self) {
        let mut core = self.core.lock();
        core.closed = true;
        self.publish(&core);
    }

    /// The last handle of the instance is gone: what is left is flushed now, or lost.
    pub(crate) fn release(self: &Arc<Self>, shared: &Arc<Shared>) {
        let mut core = self.core.lock();
        (core.released, core.closed) = (true, true);
        let left = self.collect(shared, &mut core).is_some();
        let waker = core.kick();
        let starts = left && core.start();
        self.publish(&core);
        drop(core);
        wake(waker);
        self.start(shared, starts);
    }

    /// Gives up what is pending, and says so.
    pub(crate) fn give_up(&self, shared: &Arc<Shared>) {
        let mut core = self.core.lock();
        self.collect(shared, &mut core);
        let lost = core.writer.pending();
        core.writer = Writer::default();
        let waiters = std::mem::take(&mut core.waiters);
        drop(core);
        for (_, letter) in waiters {
            let text = "the instance was shut down before a flush succeeded";
            letter.deliver(Err(Error::unknown(ErrorKind::Closed, text).with_key(&self.key)));
        }
        self.lose(shared, lost);
    }

    fn lose(&self, shared: &Arc<Shared>, amount: i64) {
        if amount != 0 {
            count(&shared.counters.tallies.lost, amount.unsigned_abs());
            if let Some(on_lost) = &shared.options.adds.on_lost {
                on_lost(&self.key, amount);
            }
        }
    }

    /// Tells those whose flush has ended.
    fn tell(&self, shared: &Arc<Shared>) {
        let mut core = self.core.lock();
        let Core { writer, waiters, .. } = &mut *core;
        let mut told = Vec::new();
        waiters.retain(|(number, letter)| match writer.fate(*number) {
            None => true,
            Some(stored) => {
                told.push((letter.clone(), stored));
                false
            }
        });
        self.collect(shared, &mut core);
        self.publish(&core);
        drop(core);
        for (letter, stored) in told {
            letter.deliver(if stored { Ok(()) } else { Err(self.doubtful()) });
        }
    }

    fn doubtful(&self) -> Error {
        let text = "it cannot be told whether the flush that carried the add was stored";
        Error::unknown(ErrorKind::Store, text).with_key(&self.key)
    }

    /// One flush, with whatever has to come before it; whether there is nothing left to flush. A
    /// lane that was taken away is replaced at once.
    async fn flush(self: &Arc<Self>, shared: &Arc<Shared>) -> bool {
        for _ in 0..REFUSALS {
            let clean = self.flush_once(shared).await;
            if clean || self.core.lock().writer.fenced().is_none() {
                return clean;
            }
        }
        false
    }

    async fn flush_once(self: &Arc<Self>, shared: &Arc<Shared>) -> bool {
        let (dirty, laned, held) = {
            let mut core = self.core.lock();
            core.kicked = false;
            let dirty = self.collect(shared, &mut core).is_some();
            self.publish(&core);
            (dirty, core.laned, core.writer.held().is_some())
        };
        if !dirty && (self.core.lock().laneless.is_none() || !self.search_due(shared)) {
            return true;
        }
        if !laned {
            return self.flush_by_add(shared).await;
        }
        if !held {
            match self.find_lane(shared).await {
                Ok(true) => {}
                Ok(false) => return self.flush_by_add(shared).await,
                Err(_) => {
                    count(&shared.counters.tallies.flushes_failed, 1);
                    return false;
                }
            }
        }
        let begun = self.core.lock().writer.begin();
        let Some(flush) = begun else { return !dirty };
        let ended = self.send(shared, flush).await;
        if ended != Ended::Applied {
            count(&shared.counters.tallies.flushes_failed, 1);
        }
        self.tell(shared);
        self.core.lock().writer.unsettled().is_none()
    }

    async fn send(self: &Arc<Self>, shared: &Arc<Shared>, flush: Flush) -> Ended {
        let mut under_way = UnderWay { buffer: self, ended: Ended::Unknown };
        let name = self.lanes.name(flush.held.generation, flush.held.lane);
        count(&shared.counters.tallies.flushes, 1);
        #[cfg(feature = "testing")]
        if let Some(ended) = shared.counters.send_broken(shared, &flush, (&self.key, &name)).await {
            under_way.ended = ended;
            return ended;
        }
        let bytes = flush.value.encode().into();
        let put = shared.store.clone().put_if_newer(name, flush.version, bytes, None);
        under_way.ended = match ask(shared, put).await {
            Ok(true) => Ended::Applied,
            Ok(false) => Ended::Refused,
            Err(error) if error.is_unknown() => Ended::Unknown,
            Err(_) => Ended::NotApplied,
        };
        under_way.ended
    }

    fn search_due(&self, shared: &Arc<Shared>) -> bool {
        let laneless = self.core.lock().laneless;
        laneless.is_none_or(|since| shared.clock.now().since(since) >= SEARCH_AGAIN)
    }

    /// Sees to it that this writer holds a lane; false when there is none.
    async fn find_lane(self: &Arc<Self>, shared: &Arc<Shared>) -> Result<bool> {
        let fenced = self.core.lock().writer.fenced().copied();
        if let Some(held) = fenced {
            let value = self.lanes.read_lane(shared, held.generation, held.lane).await?;
            let unknown = self.core.lock().writer.resolve(value.as_ref());
            self.lose(shared, unknown);
            self.tell(shared);
            let name = self.core.lock().name.clone();
            let place = self.lanes.place_of(&name);
            if place == Some((held.generation, Place::Mine(held.lane))) {
                // Somebody else goes by this writer's name. Two that take one lane from each other
                // would go on for ever.
                self.core.lock().name = shared.counters.another_name(shared);
                count(&shared.counters.tallies.lanes_taken_over, 1);
            }
        }
        if !self.search_due(shared) {
            return Ok(false);
        }
        let (name, again) = {
            let core = self.core.lock();
            (core.name.clone(), core.laneless.is_some())
        };
        let claim = self.lanes.claim(shared, &name, again).await?;
        let mut core = self.core.lock();
        match &claim {
            Some(c) => {
                core.writer.claimed(c.generation, c.lane, c.incarnation, &c.value);
                core.laneless = None;
            }
            None => core.laneless = Some(shared.clock.now()),
        }
        self.publish(&core);
        Ok(claim.is_some())
    }

    /// Everything pending as one add to the plain counter under the key.
    async fn flush_by_add(self: &Arc<Self>, shared: &Arc<Shared>) -> bool {
        let begun = self.core.lock().writer.begin_add();
        let Some(amount) = begun else { return true };
        let mut under_way = AddUnderWay { buffer: self, shared, ended: Ended::Unknown };
        count(&shared.counters.tallies.flushes, 1);
        let cell = shared.counters.cell(self.hash, &self.key);
        under_way.ended = match batch::add(shared, &cell, amount).await {
            Ok(()) => Ended::Applied,
            Err(error) if error.outcome() == Outcome::Unknown => Ended::Unknown,
            Err(_) => Ended::NotApplied,
        };
        drop(under_way);
        self.tell(shared);
        self.core.lock().writer.unsettled().is_none()
    }
}

/// Ends the flush under way, also when its task is dropped.
struct UnderWay<'a> {
    buffer: &'a Buffer,
    ended: Ended,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.buffer.core.lock().writer.end(self.ended);
    }
}

struct AddUnderWay<'a> {
    buffer: &'a Buffer,
    shared: &'a Arc<Shared>,
    ended: Ended,
}

impl Drop for AddUnderWay<'_> {
    fn drop(&mut self) {
        let unknown = self.buffer.core.lock().writer.end_add(self.ended);
        self.buffer.lose(self.shared, unknown);
    }
}

impl Core {
    /// Wants a flush now; whom to wake.
    fn kick(&mut self) -> Option<Waker> {
        self.kicked = true;
        self.waker.take()
    }

    /// Whether a task has to be started.
    fn start(&mut self) -> bool {
        !std::mem::replace(&mut self.running, true)
    }

    fn room(&mut self, waiters_max: usize) -> bool {
        if self.waiters.len() >= waiters_max {
            // Callers that gave up leave their letters behind.
            self.waiters.retain(|(_, letter)| Arc::strong_count(letter) > 1);
        }
        self.waiters.len() < waiters_max
    }

    fn wait_for(&mut self, number: u64) -> Admitted {
        let letter = Arc::new(Letter::default());
        self.waiters.push((number, letter.clone()));
        Admitted::Wait(letter)
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// The task of one buffer.
struct Running {
    shared: Arc<Shared>,
    buffer: Arc<Buffer>,
}

impl Running {
    fn run(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let shared = &self.shared;
            let every = shared.options.adds.flush_every;
            // A phase of its own: the flushes of a fleet do not come together, also when all of
            // its processes were started at once. A jitter of each interval would add nothing but
            // delay.
            let phase = (u128::from(shared.roll()) * u128::from(nanos(every))) >> 64;
            let mut next = shared.clock.now().after(Duration::from_nanos(phase as u64 + 1));
            let mut idle = 0;
            loop {
                self.sleep_until(next).await;
                let now = shared.clock.now();
                if now >= next {
                    let late = nanos(now.since(next)) / nanos(every).max(1) + 1;
                    next =
                        next.after(every.saturating_mul(u32::try_from(late).unwrap_or(u32::MAX)));
                }
                let clean = self.buffer.flush(shared).await;
                idle = if clean { idle + 1 } else { 0 };
                if self.ends(clean, idle) {
                    return;
                }
            }
        })
    }

    /// Until then, or until somebody wants a flush.
    async fn sleep_until(&self, until: Tick) {
        let wait = until.since(self.shared.clock.now());
        let mut sleep = self.shared.runtime.sleep(wait);
        poll_fn(|cx| {
            let mut core = self.buffer.core.lock();
            if core.kicked {
                return Poll::Ready(());
            }
            core.waker = Some(cx.waker().clone());
            drop(core);
            sleep.as_mut().poll(cx)
        })
        .await;
    }

    fn ends(&self, clean: bool, idle: u32) -> bool {
        let mut core = self.buffer.core.lock();
        if core.released {
            core.attempts += 1;
            return clean || core.attempts >= LAST_ATTEMPTS;
        }
        if idle < IDLE_INTERVALS && !(core.closed && clean) {
            return false;
        }
        core.running = false;
        self.buffer.publish(&core);
        if self.buffer.collect(&self.shared, &mut core).is_none() {
            return true;
        }
        // An add came just now.
        core.running = true;
        self.buffer.publish(&core);
        false
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut core = self.buffer.core.lock();
        core.running = false;
        let released = core.released;
        self.buffer.publish(&core);
        drop(core);
        if released {
            self.buffer.give_up(&self.shared);
        }
    }
}
