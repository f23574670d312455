//! A region as one reporter of the fleet above it: its aggregator reports what all of the region
//! ask for, and puts the list from above on its own.

use super::{Fleet, Membership, start};
use crate::engine::control::aggregate::Aggregator;
use crate::engine::control::fleet::FleetList;
use crate::engine::control::merge::Report;
use crate::engine::control::reporter::ENTRIES_MAX;
use crate::engine::time::Tick;
use crate::feed::local::Local;
use crate::runtime::{Clock, Runtime};
use parking_lot::Mutex;
use std::sync::Arc;

/// The fleet above, and as what to report to it.
#[derive(Clone)]
pub(super) struct Above {
    pub(super) fleet: Fleet,
    /// The same whoever leads the region: a new aggregator's report replaces the last one's.
    pub(super) reporter: u64,
}

/// The part that the region's aggregator, for as long as it leads, has in the fleet above.
pub(super) struct Region {
    between: Arc<Between>,
    _membership: Membership,
}

/// What goes up and what comes down.
struct Between {
    clock: Clock,
    state: Mutex<State>,
    report: bool,
    obey: bool,
}

#[derive(Default)]
struct State {
    report: Option<Report>,
    floor_per_sec: Option<f64>,
    list: Option<Arc<FleetList>>,
    /// Until when that is in force, whether or not somebody lets it go.
    until: Tick,
    changed: bool,
}

impl State {
    fn expire(&mut self, now: Tick) {
        if self.until <= now && self.list.take().is_some() {
            self.changed = true;
        }
    }
}

impl Region {
    pub(super) fn join(
        above: &Above,
        clock: &Clock,
        runtime: &Arc<dyn Runtime>,
        id: u64,
    ) -> Region {
        let (clock, state) = (clock.clone(), Mutex::default());
        let (report, obey) = (above.fleet.report, above.fleet.obey);
        let between = Arc::new(Between { clock, state, report, obey });
        let reporter = Some(above.reporter);
        // The region's own id begins with other bits, and may be the same there.
        let roll = id << 11;
        let membership =
            start(above.fleet.clone(), between.clone(), runtime.clone(), roll, reporter);
        Region { between, _membership: membership }
    }

    /// The region's traffic goes up.
    pub(super) fn report(&self, region: &Aggregator) {
        let mut state = self.between.state.lock();
        let floor = state.floor_per_sec.unwrap_or(0.0);
        state.report = Some(region.report(ENTRIES_MAX, floor));
    }

    /// What one reporter of the region need not name for the fleet above.
    pub(super) fn floor_per_sec(&self, reporters: u32) -> f64 {
        let floor = self.between.state.lock().floor_per_sec;
        floor.map_or(f64::INFINITY, |floor| floor / f64::from(reporters.max(1)))
    }

    /// Whether there is another list than when this was last asked.
    pub(super) fn take_change(&self) -> bool {
        let mut state = self.between.state.lock();
        state.expire(self.between.clock.now());
        std::mem::take(&mut state.changed)
    }

    /// The list from above.
    pub(super) fn list(&self) -> Option<Arc<FleetList>> {
        let mut state = self.between.state.lock();
        state.expire(self.between.clock.now());
        state.list.clone()
    }
}

impl Local for Between {
    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn take_report(&self, _: Tick, floor_per_sec: f64) -> Option<Report> {
        if !self.report {
            return None;
        }
        let mut state = self.state.lock();
        state.floor_per_sec = Some(floor_per_sec);
        // Asked again before there is a new one, it is the last one: silence would say that nothing
        // is asked for any more.
        state.report.clone()
    }

    fn apply(&self, list: Option<(&Arc<FleetList>, Tick)>) {
        if !self.obey {
            return;
        }
        let mut state = self.state.lock();
        state.until = list.map_or(Tick::ZERO, |(_, until)| until);
        (state.list, state.changed) = (list.map(|(list, _)| list.clone()), true);
    }

    fn keep(&self, until: Tick) {
        let mut state = self.state.lock();
        state.until = state.until.max(until);
    }

    fn explain(&self, _: &[u8]) -> Option<String> {
        None
    }

    fn alive(&self) -> bool {
        true
    }

    fn release(&self) {}
}
