//! The buffer of one counter in this process.
//!
//! An add touches the stripe of its thread and reads one line that is seldom written. Everything
//! else takes the lock.

use crate::adds::{Cell, count};
use crate::batch::bounded;
use crate::buffered::Admitted;
use crate::cell::thread_ordinal;
use crate::engine::control::lanes::Writer;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::flusher;
use crate::key::Key;
use crate::lanes::{Lanes, overflow};
use crate::shared::Shared;
use crate::sync::Mutex;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, Ordering};
use std::task::{Poll, Waker};

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

/// The letter box of a caller that waits for a flush.
#[derive(Default)]
pub(crate) struct Letter(Mutex<Contents>);

#[derive(Default)]
struct Contents {
    outcome: Option<Result<()>>,
    waker: Option<Waker>,
}

impl Letter {
    /// Called outside all locks.
    fn deliver(&self, outcome: Result<()>) {
        let mut contents = self.0.lock();
        contents.outcome = Some(outcome);
        let waker = contents.waker.take();
        drop(contents);
        wake(waker);
    }

    fn poll(&self, waker: &Waker) -> Poll<Result<()>> {
        let new = waker.clone();
        let mut contents = self.0.lock();
        if let Some(outcome) = contents.outcome.take() {
            return Poll::Ready(outcome);
        }
        let old = contents.waker.replace(new);
        drop(contents);
        drop(old);
        Poll::Pending
    }
}

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
    pub(crate) core: Mutex<Core>,
}

pub(crate) struct Core {
    pub(crate) writer: Writer,
    pub(crate) waiters: Vec<(u64, Arc<Letter>)>,
    pub(crate) name: String,
    /// The store can keep lanes.
    pub(crate) laned: bool,
    /// A task runs.
    pub(crate) running: bool,
    /// Somebody wants a flush now.
    pub(crate) kicked: bool,
    pub(crate) waker: Option<Waker>,
    /// More is pending than the cap allows.
    full: bool,
    /// No lane was left: when that was found out.
    pub(crate) laneless: Option<Tick>,
    /// Shut down: adds go through.
    pub(crate) closed: bool,
    /// The last handle of the instance is gone.
    pub(crate) released: bool,
    pub(crate) attempts: u32,
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
    pub(crate) fn collect(&self, shared: &Arc<Shared>, core: &mut Core) -> Option<u64> {
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

    pub(crate) fn publish(&self, core: &Core) {
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
            shared.runtime.spawn(flusher::run(shared.clone(), self.clone()));
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

    pub(crate) fn lose(&self, shared: &Arc<Shared>, amount: i64) {
        if amount != 0 {
            count(&shared.counters.tallies.lost, amount.unsigned_abs());
            if let Some(on_lost) = &shared.options.adds.on_lost {
                on_lost(&self.key, amount);
            }
        }
    }

    /// Tells those whose flush has ended.
    pub(crate) fn tell(&self, shared: &Arc<Shared>) {
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
