//! The driver: a thread of our own that takes samples and timers and carries out what the engine
//! decides. No request ever waits for it; if it stalls, the index expires and every handle behaves
//! like the bare client.

use crate::bridge;
use crate::engine::control::steering::Event;
use crate::engine::time::Tick;
use crate::error::{Error, Result};
use crate::runtime::{self, Runtime};
use crate::shared::Shared;
use crate::stats::Books;
#[cfg(feature = "metrics")]
use crate::stats::Stats;
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two turns: a verdict waits this long at most, and an idle process wakes this often.
const TURN: Duration = Duration::from_millis(10);

/// Between two walks over the gates for loads that have run into the time limit.
const SWEEP: Duration = Duration::from_millis(100);

/// The index outlives the driver's last turn by this much.
const INDEX_LEASE: Duration = Duration::from_secs(2);

/// A difference between two clocks that cannot be anything but a suspended machine.
const SUSPENDED: Duration = Duration::from_millis(500);

/// The running driver of one instance.
pub(crate) struct DriverHandle {
    stopped: Arc<AtomicBool>,
    #[cfg(feature = "testing")]
    stalled: Arc<AtomicBool>,
    /// Dropping it wakes the thread.
    wake: Mutex<Option<Sender<()>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DriverHandle {
    pub(crate) fn start(shared: &Arc<Shared>) -> Result<DriverHandle> {
        let stopped = Arc::new(AtomicBool::new(false));
        let stalled = Arc::new(AtomicBool::new(false));
        let (wake, woken) = bounded(0);
        let mut driver = Driver::new(shared, stopped.clone(), stalled.clone());
        let thread = if cfg!(heatsink_shuttle) {
            shared.extend_index(Tick::MAX);
            None
        } else if shared.clock.is_manual() {
            driver.turn();
            let runtime = shared.runtime.clone();
            shared.runtime.spawn(Box::pin(driver.run_on(runtime)));
            None
        } else {
            driver.turn();
            let run = move || {
                while driver.guarded_turn()
                    && woken.recv_timeout(TURN) == Err(RecvTimeoutError::Timeout)
                {}
            };
            let thread = runtime::spawn_thread("heatsink-driver", run);
            Some(
                thread
                    .map_err(|e| Error::config("the driver thread did not start").with_source(e))?,
            )
        };
        let (wake, thread) = (Mutex::new(Some(wake)), Mutex::new(thread));
        Ok(DriverHandle {
            stopped,
            #[cfg(feature = "testing")]
            stalled,
            wake,
            thread,
        })
    }

    pub(crate) fn stop(&self, shared: &Shared) {
        self.stopped.store(true, Ordering::Release);
        self.wake.lock().take();
        let thread = self.thread.lock().take();
        // Called on the driver's own thread (by a waker that runs its task in place), it cannot wait
        // for itself; the thread ends after this turn.
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
        shared.close();
    }

    #[cfg(feature = "testing")]
    pub(crate) fn stall(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Release);
    }
}

impl Drop for DriverHandle {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        self.wake.lock().take();
    }
}

struct Driver {
    shared: Weak<Shared>,
    stopped: Arc<AtomicBool>,
    stalled: Arc<AtomicBool>,
    swept: Tick,
    suspended: Duration,
    /// Samples that had found the queue full when this was last looked at.
    dropped: u64,
    #[cfg(feature = "metrics")]
    reported: u64,
}

impl Driver {
    fn new(shared: &Arc<Shared>, stopped: Arc<AtomicBool>, stalled: Arc<AtomicBool>) -> Driver {
        Driver {
            shared: Arc::downgrade(shared),
            stopped,
            stalled,
            swept: Tick::ZERO,
            suspended: shared.clock.suspended(),
            dropped: 0,
            #[cfg(feature = "metrics")]
            reported: 0,
        }
    }

    async fn run_on(mut self, runtime: Arc<dyn Runtime>) {
        while self.guarded_turn() {
            runtime.sleep(TURN).await;
        }
    }

    /// One turn. A panic of what it calls (the store's `shard_of`, a waker, a recorder, the drop of
    /// a user's type) costs the rest of the turn and is counted; the next comes as if nothing had
    /// been.
    fn guarded_turn(&mut self) -> bool {
        match catch_unwind(AssertUnwindSafe(|| self.turn())) {
            Ok(more) => more,
            Err(_) => {
                if let Some(shared) = self.shared.upgrade() {
                    shared.driver_panics.fetch_add(1, Ordering::Relaxed);
                }
                true
            }
        }
    }

    /// One turn; false when the instance is gone.
    fn turn(&mut self) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        if self.stopped.load(Ordering::Acquire) {
            return false;
        }
        if self.stalled.load(Ordering::Acquire) {
            return true;
        }
        let now = shared.clock.now();
        self.steer(&shared, now);
        self.watch_for_suspend(&shared);
        if let Some(salted) = &shared.salted {
            salted.turn(&shared);
        }
        if now.since(self.swept) >= SWEEP {
            self.swept = now;
            shared.time_out();
            shared.clear_dead();
        }
        shared.extend_index(now.after(INDEX_LEASE));
        true
    }

    /// Samples in, verdicts out, the index replaced where they say so.
    fn steer(&mut self, shared: &Shared, now: Tick) {
        let mut steering = shared.steering.lock();
        shared.take_samples(&mut steering, now);
        let dropped = shared.sampler.dropped();
        let new = u32::try_from(dropped - self.dropped).unwrap_or(u32::MAX);
        self.dropped = dropped;
        steering.handle_dropped(now, new);
        if steering.poll_timeout().is_some_and(|due| due <= now) {
            steering.handle_timeout(now);
        }
        shared.sampler.set_one_in(steering.sampling());
        let changed = steering.take_change();
        let garbage = changed.then(|| shared.publish_index(&steering.treated()));
        if changed {
            shared.shed.follow(&steering, |key| shared.hash(key));
        }
        let events: Vec<Event> = std::iter::from_fn(|| steering.poll_event()).collect();
        #[cfg(feature = "metrics")]
        let windows = steering.counts().windows;
        #[cfg(feature = "feed")]
        let lapsed = steering.take_lapse();
        drop(steering);
        drop(garbage);
        #[cfg(feature = "feed")]
        if lapsed {
            shared.lapse();
        }
        events.iter().for_each(bridge::event);
        if changed {
            shared.followers.wake();
        }
        #[cfg(feature = "metrics")]
        if self.reported != windows {
            self.reported = windows;
            bridge::publish(&Stats::collect(shared));
        }
    }

    /// The monotonic clock stands still while a machine sleeps; the cached values grow old.
    fn watch_for_suspend(&mut self, shared: &Shared) {
        let suspended = shared.clock.suspended();
        if suspended.saturating_sub(self.suspended) > SUSPENDED {
            shared.invalidate_all();
        }
        self.suspended = suspended;
    }
}

impl std::fmt::Debug for DriverHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DriverHandle")
    }
}

/// What the samples add up to.
pub(crate) type SharedBooks = Mutex<Books>;
