//! The sum of one counter, as this process knows it.
//!
//! - **What**: the newest sum that was loaded, and the greatest one that was shown.
//! - **Invariant**: a sum is served only within the age that the caller accepts, counted from the
//!   start of its load; with a floor, no caller is shown less than an earlier one was.
//! - **Time and units**: ticks.
//! - **Bounds**: a few words.
//! - **Source**: intermediate-value linearizability (Rinberg and Keidar, 2020): a sum is any value
//!   between the count at its start and the count at its end.

use crate::engine::time::Tick;
use std::time::Duration;

/// What is known of one sum.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Known {
    newest: Option<(i64, Tick)>,
    floor: Option<i64>,
}

impl Known {
    /// The sum and when its load started, if it is younger than `max_age`.
    #[must_use]
    pub fn serve(&self, now: Tick, max_age: Duration) -> Option<(i64, Tick)> {
        self.newest.filter(|(_, started)| now.since(*started) < max_age)
    }

    /// A load that started at `started` brought `total`. The newest start wins.
    pub fn learn(&mut self, total: i64, started: Tick) {
        if self.newest.is_none_or(|(_, newest)| started >= newest) {
            self.newest = Some((total, started));
        }
    }

    /// The counter begins again from zero.
    pub fn forget(&mut self) {
        *self = Known::default();
    }

    /// What a counter that only grows shows when it was given `total`: never less than before.
    pub fn raise(&mut self, total: i64) -> i64 {
        let shown = self.floor.map_or(total, |floor| floor.max(total));
        self.floor = Some(shown);
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_started_earlier_and_ended_later_changes_nothing() {
        let mut known = Known::default();
        known.learn(7, Tick(20));
        known.learn(5, Tick(10));
        assert_eq!(known.serve(Tick(21), Duration::from_nanos(2)), Some((7, Tick(20))));
        assert_eq!(known.serve(Tick(22), Duration::from_nanos(2)), None);
    }

    #[test]
    fn a_floor_never_sinks() {
        let mut known = Known::default();
        let shown: Vec<i64> = [5, 9, 7, 12].map(|total| known.raise(total)).to_vec();
        assert_eq!(shown, [5, 9, 9, 12]);
    }
}
