//! Tasks and timers on threads of our own, for services without an async runtime.

use super::{BoxFuture, Clock, Runtime, spawn_thread};
use parking_lot::{Condvar, Mutex};
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::engine::time::Tick;

/// Worker threads of a pool. Loads wait, they do not compute; two keep one slow poll from
/// blocking the next.
const WORKERS: usize = 2;

/// A small executor: two workers and a timer thread, started when first needed, ended when the
/// last handle is dropped.
#[derive(Clone, Default)]
pub struct ThreadRuntime {
    pool: Arc<Lazy>,
}

#[derive(Default)]
struct Lazy {
    shared: Arc<Shared>,
    started: AtomicBool,
}

#[derive(Default)]
struct Shared {
    work: Mutex<Work>,
    ready: Condvar,
    timers: Mutex<Timers>,
    earlier: Condvar,
}

#[derive(Default)]
struct Work {
    queue: VecDeque<Arc<Task>>,
    closed: bool,
}

#[derive(Default)]
struct Timers {
    heap: BinaryHeap<Timer>,
    next_id: u64,
    /// Timers of dropped sleeps are swept when the heap has grown to this many.
    sweep_at: usize,
    closed: bool,
}

impl Timers {
    /// The fewest timers worth a sweep.
    const SWEEP_MIN: usize = 1024;

    fn push(&mut self, at: Tick, sleep: &Arc<Mutex<SleepState>>) -> bool {
        if self.heap.len() >= self.sweep_at.max(Self::SWEEP_MIN) {
            self.heap.retain(|t| t.sleep.strong_count() > 0);
            self.sweep_at = 2 * self.heap.len();
        }
        self.next_id += 1;
        let id = self.next_id;
        self.heap.push(Timer { at, id, sleep: Arc::downgrade(sleep) });
        self.heap.peek().is_some_and(|t| t.id == id)
    }
}

struct Timer {
    at: Tick,
    id: u64,
    sleep: Weak<Mutex<SleepState>>,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Timer) -> bool {
        self.id == other.id
    }
}
impl Eq for Timer {}
impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Timer) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timer {
    /// Reversed, so that the heap's top is the earliest.
    fn cmp(&self, other: &Timer) -> std::cmp::Ordering {
        (other.at, other.id).cmp(&(self.at, self.id))
    }
}

#[derive(Default)]
struct SleepState {
    done: bool,
    waker: Option<Waker>,
}

impl ThreadRuntime {
    /// A runtime that starts its threads when the first task or timer comes.
    #[must_use]
    pub fn new() -> ThreadRuntime {
        ThreadRuntime::default()
    }

    fn start(&self) -> &Arc<Shared> {
        let shared = &self.pool.shared;
        if !self.pool.started.swap(true, Ordering::AcqRel) {
            for _ in 0..WORKERS {
                let shared = shared.clone();
                let _ = spawn_thread("heatsink-worker", move || shared.run_tasks());
            }
            let shared = shared.clone();
            let _ = spawn_thread("heatsink-timer", move || shared.run_timers());
        }
        shared
    }
}

impl Drop for Lazy {
    fn drop(&mut self) {
        self.shared.work.lock().closed = true;
        self.shared.timers.lock().closed = true;
        self.shared.ready.notify_all();
        self.shared.earlier.notify_all();
    }
}

impl Runtime for ThreadRuntime {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        let shared = self.start();
        let task =
            Arc::new(Task { future: Mutex::new(Some(task)), shared: Arc::downgrade(shared) });
        shared.push(task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        let shared = self.start().clone();
        let at = Clock::system().precise().after(duration);
        let state = Arc::new(Mutex::new(SleepState::default()));
        let first = shared.timers.lock().push(at, &state);
        if first {
            shared.earlier.notify_one();
        }
        // The handle keeps the timer thread alive for as long as somebody waits.
        Box::pin(Sleep { state, _pool: self.pool.clone() })
    }

    fn clock(&self) -> Clock {
        Clock::system()
    }
}

struct Sleep {
    state: Arc<Mutex<SleepState>>,
    _pool: Arc<Lazy>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.done {
            return Poll::Ready(());
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

struct Task {
    future: Mutex<Option<BoxFuture<'static, ()>>>,
    shared: Weak<Shared>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.push(self);
        }
    }
}

impl Task {
    /// Polls once. A wake during the poll queues the task again; the lock keeps two workers from
    /// polling it together.
    fn run(self: Arc<Self>) {
        let waker = Waker::from(self.clone());
        let mut slot = self.future.lock();
        let Some(future) = slot.as_mut() else { return };
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            future.as_mut().poll(&mut Context::from_waker(&waker))
        }));
        if !matches!(polled, Ok(Poll::Pending)) {
            *slot = None;
        }
    }
}

impl Shared {
    fn push(&self, task: Arc<Task>) {
        let mut work = self.work.lock();
        if !work.closed {
            work.queue.push_back(task);
            drop(work);
            self.ready.notify_one();
        }
    }

    fn run_tasks(&self) {
        loop {
            let mut work = self.work.lock();
            let task = loop {
                if work.closed {
                    let left = std::mem::take(&mut work.queue);
                    drop(work);
                    return drop(left);
                }
                match work.queue.pop_front() {
                    Some(task) => break task,
                    None => self.ready.wait(&mut work),
                }
            };
            drop(work);
            task.run();
        }
    }

    fn run_timers(&self) {
        let clock = Clock::system();
        let mut due = Vec::new();
        let mut timers = self.timers.lock();
        while !timers.closed {
            let now = clock.precise();
            while timers.heap.peek().is_some_and(|t| t.at <= now) {
                due.extend(timers.heap.pop());
            }
            if due.is_empty() {
                match timers.heap.peek().map(|t| t.at.since(now)) {
                    Some(wait) => drop(self.earlier.wait_for(&mut timers, wait)),
                    None => self.earlier.wait(&mut timers),
                }
                continue;
            }
            parking_lot::MutexGuard::unlocked(&mut timers, || {
                due.drain(..).for_each(|t: Timer| fire(&t));
            });
        }
    }
}

fn fire(timer: &Timer) {
    let Some(sleep) = timer.sleep.upgrade() else { return };
    let mut state = sleep.lock();
    state.done = true;
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl fmt::Debug for ThreadRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadRuntime")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn tasks_run_timers_fire_in_order_and_a_panicking_task_harms_nobody() {
        let rt = ThreadRuntime::new();
        let (tx, rx) = mpsc::channel();
        rt.spawn(Box::pin(async { panic!("a task of somebody's") }));
        for ms in [30u64, 10, 20] {
            let (tx, sleep) = (tx.clone(), rt.sleep(Duration::from_millis(ms)));
            rt.spawn(Box::pin(async move {
                sleep.await;
                let _ = tx.send(ms);
            }));
        }
        let got: Vec<u64> = (0..3).map(|_| rx.recv().unwrap()).collect();
        assert_eq!(got, [10, 20, 30]);
    }

    #[test]
    fn timers_of_dropped_sleeps_do_not_pile_up() {
        let rt = ThreadRuntime::new();
        for _ in 0..100_000 {
            drop(rt.sleep(Duration::from_secs(3600)));
        }
        assert!(rt.pool.shared.timers.lock().heap.len() <= 2 * Timers::SWEEP_MIN);
    }

    #[test]
    fn a_dropped_runtime_drops_its_queued_tasks() {
        let rt = ThreadRuntime::new();
        let token = Arc::new(());
        let held = token.clone();
        let sleep = rt.sleep(Duration::from_secs(3600));
        rt.spawn(Box::pin(async move {
            let _held = held;
            sleep.await;
        }));
        drop(rt);
        assert!(Arc::strong_count(&token) <= 2, "nothing but the task itself holds the token");
    }
}
