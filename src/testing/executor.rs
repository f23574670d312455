//! A single-threaded executor on virtual time.
//!
//! Time moves only when nothing can run: then it jumps to the next timer. Which ready task runs
//! next is drawn from the seed, so that one seed is one interleaving and another seed another.
//! The same seed twice gives the same [`trace_hash`](SimRuntime::trace_hash).

use crate::engine::time::Tick;
use crate::runtime::{BoxFuture, Clock, Runtime};
use parking_lot::Mutex;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// A runtime on virtual time. Clones are handles to the same one.
#[derive(Clone)]
pub struct SimRuntime(Arc<Inner>);

struct Inner {
    clock: Clock,
    state: Mutex<State>,
}

struct State {
    ready: Vec<Arc<Task>>,
    timers: BTreeMap<(Tick, u64), Waker>,
    live: HashMap<u64, Arc<Task>>,
    next_id: u64,
    rng: Xoshiro256PlusPlus,
    trace: u64,
    steps: u64,
    /// Tasks spawned after a shutdown are dropped at once, like those of a dead tokio runtime.
    down: bool,
}

struct Task {
    id: u64,
    future: Mutex<Option<BoxFuture<'static, ()>>>,
    queued: AtomicBool,
    runtime: std::sync::Weak<Inner>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let Some(inner) = self.runtime.upgrade() else { return };
        if !self.queued.swap(true, Ordering::AcqRel) {
            inner.state.lock().ready.push(self);
        }
    }
}

impl SimRuntime {
    /// A runtime whose interleavings are drawn from `seed`, on a clock of its own.
    #[must_use]
    pub fn new(seed: u64) -> SimRuntime {
        SimRuntime::with_clock(seed, Clock::manual())
    }

    /// A runtime on a given manual clock: several "runtimes" of one process share a clock.
    #[must_use]
    pub fn with_clock(seed: u64, clock: Clock) -> SimRuntime {
        SimRuntime(Arc::new(Inner {
            clock,
            state: Mutex::new(State {
                ready: Vec::new(),
                timers: BTreeMap::new(),
                live: HashMap::new(),
                next_id: 0,
                rng: Xoshiro256PlusPlus::seed_from_u64(seed),
                trace: 0xcbf2_9ce4_8422_2325,
                steps: 0,
                down: false,
            }),
        }))
    }

    /// Spawns a task.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        Runtime::spawn(self, Box::pin(task));
    }

    /// Completes `duration` of virtual time from now.
    #[must_use]
    pub fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Runtime::sleep(self, duration)
    }

    /// The present of virtual time.
    #[must_use]
    pub fn now(&self) -> Tick {
        self.0.clock.now()
    }

    /// The clock that this runtime moves.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.0.clock.clone()
    }

    /// A hash over every step so far: which task, when. Equal for equal seeds and programs.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.0.state.lock().trace
    }

    /// Folds something observed into the trace, so that a difference in results shows too.
    pub fn record(&self, event: u64) {
        self.0.state.lock().fold(event);
    }

    /// How many polls have been made.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.0.state.lock().steps
    }

    /// A number drawn from the seed, below `bound` (which is at least 1).
    #[must_use]
    pub fn draw(&self, bound: u64) -> u64 {
        let x = self.0.state.lock().rng.next_u64();
        ((u128::from(x) * u128::from(bound.max(1))) >> 64) as u64
    }

    /// Drops all tasks and every one spawned later, as a tokio runtime does when it goes.
    pub fn shutdown(&self) {
        let mut state = self.0.state.lock();
        state.down = true;
        state.ready.clear();
        let mut tasks: Vec<_> = std::mem::take(&mut state.live).into_values().collect();
        tasks.sort_by_key(|t| t.id);
        drop(state);
        for task in tasks {
            let future = task.future.lock().take();
            drop(future);
        }
    }

    /// Runs everything until `future` is done. Panics when nothing can run any more and it is not:
    /// a hang, which a test must see.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let flag = Arc::new(Flag(AtomicBool::new(true)));
        let waker = Waker::from(flag.clone());
        let mut future = pin!(future);
        loop {
            if flag.0.swap(false, Ordering::AcqRel)
                && let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(&waker))
            {
                return out;
            }
            if flag.0.load(Ordering::Acquire) || self.step() || self.jump(Tick::MAX) {
                continue;
            }
            panic!("hang: no task can run, no timer is set, and the awaited future is not done");
        }
    }

    /// Runs until virtual time has reached `to`, or nothing is left to run.
    pub fn run_until(&self, to: Tick) {
        while self.step() || self.jump(to) {}
        self.0.clock.set(to);
    }

    /// Runs for `duration` of virtual time.
    pub fn run_for(&self, duration: Duration) {
        self.run_until(self.now().after(duration));
    }

    /// Polls one ready task; false when there is none.
    #[expect(clippy::must_use_candidate, reason = "a step is taken for its effect")]
    pub fn step(&self) -> bool {
        let mut state = self.0.state.lock();
        if state.ready.is_empty() {
            return false;
        }
        let pick = (state.rng.next_u64() % state.ready.len() as u64) as usize;
        let task = state.ready.swap_remove(pick);
        state.steps += 1;
        let now = self.0.clock.now();
        state.fold(task.id ^ now.0.rotate_left(20));
        drop(state);
        task.queued.store(false, Ordering::Release);
        let waker = Waker::from(task.clone());
        let mut slot = task.future.lock();
        let Some(future) = slot.as_mut() else { return true };
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            let done = slot.take();
            drop(slot);
            drop(done);
            self.0.state.lock().live.remove(&task.id);
        }
        true
    }

    /// Moves time to the next timer that is not after `limit`; false when there is none. With
    /// [`step`](SimRuntime::step) it lets a test look at the world after every single poll.
    #[expect(clippy::must_use_candidate, reason = "time is moved for its effect")]
    pub fn jump(&self, limit: Tick) -> bool {
        let mut state = self.0.state.lock();
        let Some((&(at, id), _)) = state.timers.first_key_value() else { return false };
        if at > limit {
            return false;
        }
        let waker = state.timers.remove(&(at, id));
        drop(state);
        self.0.clock.set(at);
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }
}

impl State {
    fn fold(&mut self, event: u64) {
        self.trace = (self.trace ^ event).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

impl Runtime for SimRuntime {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        let mut state = self.0.state.lock();
        if state.down {
            drop(state);
            return drop(task);
        }
        state.next_id += 1;
        let task = Arc::new(Task {
            id: state.next_id,
            future: Mutex::new(Some(task)),
            queued: AtomicBool::new(true),
            runtime: Arc::downgrade(&self.0),
        });
        state.live.insert(task.id, task.clone());
        state.ready.push(task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        let at = self.now().after(duration);
        Box::pin(Sleep { runtime: self.clone(), at, id: None })
    }

    fn clock(&self) -> Clock {
        self.0.clock.clone()
    }
}

struct Sleep {
    runtime: SimRuntime,
    at: Tick,
    id: Option<u64>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.runtime.now() >= self.at {
            return Poll::Ready(());
        }
        let inner = self.runtime.0.clone();
        let mut state = inner.state.lock();
        let id = *self.id.get_or_insert_with(|| {
            state.next_id += 1;
            state.next_id
        });
        state.timers.insert((self.at, id), cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let timer = self.runtime.0.state.lock().timers.remove(&(self.at, id));
            drop(timer);
        }
    }
}

impl fmt::Debug for SimRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimRuntime at {:.6} s", self.now().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(seed: u64) -> (u64, Vec<u64>) {
        let rt = SimRuntime::new(seed);
        let log = Arc::new(Mutex::new(Vec::new()));
        for i in 0..8u64 {
            let (rt2, log) = (rt.clone(), log.clone());
            rt.spawn(async move {
                for _ in 0..3 {
                    rt2.sleep(Duration::from_millis(10)).await;
                    log.lock().push(i);
                }
            });
        }
        rt.run_for(Duration::from_secs(1));
        let order = log.lock().clone();
        (rt.trace_hash(), order)
    }

    #[test]
    fn the_same_seed_twice_gives_the_same_trace_and_another_seed_another() {
        assert_eq!(program(7), program(7));
        assert_ne!(program(7).1, program(8).1);
    }

    #[test]
    fn time_jumps_to_the_next_timer() {
        let rt = SimRuntime::new(1);
        let start = rt.now();
        rt.block_on(rt.sleep(Duration::from_secs(86_400)));
        assert_eq!(rt.now().since(start), Duration::from_secs(86_400));
    }

    #[test]
    #[should_panic(expected = "hang")]
    fn a_hang_is_seen() {
        SimRuntime::new(1).block_on(std::future::pending::<()>());
    }
}
