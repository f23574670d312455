//! What a feed is for: the traffic that it reports, and what obeys the list.

use crate::engine::control::fleet::FleetList;
use crate::engine::control::merge::Report;
use crate::engine::time::Tick;
use crate::explain::Explanation;
use crate::runtime::Clock;
use crate::shared::Shared;
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
}

/// A handle of heatsink. The feed does not keep it alive.
pub(crate) struct Handle {
    shared: Weak<Shared>,
    clock: Clock,
    report: bool,
    obey: bool,
}

impl Handle {
    pub(crate) fn new(shared: &Arc<Shared>, report: bool, obey: bool) -> Handle {
        let clock = shared.clock.clone();
        if report {
            shared.steering.lock().start_reports(clock.now(), shared.roll());
        }
        Handle { shared: Arc::downgrade(shared), clock, report, obey }
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
        let shared = self.shared.upgrade()?;
        let mut steering = shared.steering.lock();
        shared.take_samples(&mut steering, now);
        steering.take_report(now, floor_per_sec)
    }

    fn apply(&self, list: Option<&Arc<FleetList>>) {
        if let Some(shared) = self.shared.upgrade().filter(|_| self.obey) {
            shared.obey(list.map(|l| &**l));
        }
    }

    fn explain(&self, key: &[u8]) -> Option<String> {
        let shared = self.shared.upgrade()?;
        Some(Explanation::of(&shared, key).to_string())
    }

    fn alive(&self) -> bool {
        self.shared.strong_count() > 0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.apply(None);
        if let Some(shared) = self.shared.upgrade().filter(|_| self.report) {
            shared.steering.lock().stop_reports();
        }
    }
}

impl Shared {
    /// Obeys `list`, or none. In force when this returns.
    fn obey(&self, list: Option<&FleetList>) {
        let mut steering = self.steering.lock();
        steering.obey(self.clock.now(), list, |key| self.hash(key));
        let changed = steering.take_change();
        let garbage = changed.then(|| self.publish_index(&steering.treated()));
        drop(steering);
        drop(garbage);
        if changed {
            self.followers.wake();
        }
    }
}
