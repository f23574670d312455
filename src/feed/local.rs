//! What a feed is for: the traffic that it reports, and what obeys the list.

use crate::engine::control::fleet::FleetList;
use crate::engine::control::merge::Report;
use crate::engine::control::steering::Steering;
use crate::engine::time::Tick;
use crate::error::{Error, Result};
use crate::explain::Explanation;
use crate::runtime::Clock;
use crate::shared::Shared;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// One process, as its feed sees it.
pub(crate) trait Local: Send + Sync + 'static {
    fn clock(&self) -> Clock;

    /// What was asked for since the last report. `None` without a reporter, or when all is over.
    fn take_report(&self, now: Tick, floor_per_sec: f64) -> Option<Report>;

    /// This list is in force from now on, or none.
    fn apply(&self, list: Option<&Arc<FleetList>>);

    fn explain(&self, key: &[u8]) -> Option<String>;

    /// False when the process needs no feed any more.
    fn alive(&self) -> bool;

    /// The feed has ended: nothing of it is in force, and another one may begin.
    fn release(&self);
}

/// A handle of heatsink. The feed does not keep it alive.
pub(crate) struct Handle {
    shared: Weak<Shared>,
    clock: Clock,
    /// Which feed of the handle's.
    feed: u64,
    report: bool,
    obey: bool,
    released: AtomicBool,
}

impl Handle {
    /// # Errors
    /// A handle has one feed: two would each hear half of its traffic.
    pub(crate) fn new(shared: &Arc<Shared>, report: bool, obey: bool) -> Result<Handle> {
        let clock = shared.clock.clone();
        let mut steering = shared.steering.lock();
        let Some(feed) = steering.begin_feed() else {
            let text = "this handle has a feed already; serve_feed_with takes a fleet too";
            return Err(Error::config(text));
        };
        if report {
            steering.start_reports(clock.now(), shared.roll());
        }
        let (shared, released) = (Arc::downgrade(shared), AtomicBool::new(false));
        Ok(Handle { shared, clock, feed, report, obey, released })
    }

    /// The instance, until the feed has ended.
    fn shared(&self) -> Option<Arc<Shared>> {
        let over = self.released.load(Ordering::Acquire);
        if over { None } else { self.shared.upgrade() }
    }
}

impl Local for Handle {
    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn take_report(&self, now: Tick, floor_per_sec: f64) -> Option<Report> {
        if !self.report {
            return None;
        }
        let shared = self.shared()?;
        let mut steering = shared.steering.lock();
        shared.take_samples(&mut steering, now);
        steering.take_report(now, floor_per_sec)
    }

    fn apply(&self, list: Option<&Arc<FleetList>>) {
        if let Some(shared) = self.shared().filter(|_| self.obey) {
            shared.obey(self.feed, list.map(|l| &**l));
        }
    }

    fn explain(&self, key: &[u8]) -> Option<String> {
        let shared = self.shared.upgrade()?;
        Some(Explanation::of(&shared, key).to_string())
    }

    fn alive(&self) -> bool {
        self.shared().is_some_and(|shared| !shared.has_ended())
    }

    fn release(&self) {
        if self.released.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            shared.steer(|steering, now| steering.end_feed(now, self.feed));
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.release();
    }
}

impl Shared {
    /// Obeys `list`, or none. In force when this returns.
    fn obey(&self, feed: u64, list: Option<&FleetList>) {
        self.steer(|steering, now| steering.obey(now, feed, list, |key| self.hash(key)));
    }

    fn steer(&self, change: impl FnOnce(&mut Steering, Tick)) {
        let mut steering = self.steering.lock();
        change(&mut steering, self.clock.now());
        let changed = steering.take_change();
        let garbage = changed.then(|| self.publish_index(&steering.treated()));
        if changed {
            self.shed.follow(&steering, |key| self.hash(key));
        }
        drop(steering);
        drop(garbage);
        if changed {
            self.followers.wake();
        }
    }
}
