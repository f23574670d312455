//! When a count proves a key hot, and when it proves it cool.
//!
//! - **What**: two lines with a gap between them, a margin on either side, and a switch that
//!   remembers for how many windows a hot key has been cool.
//! - **Invariant**: no count proves a key hot and cool at once; a switch goes off only after
//!   `windows` cool windows in a row.
//! - **Time and units**: rates per second, spans in seconds, counts in requests (or in cost).
//! - **Bounds**: a switch is a few words.
//! - **Source**: TiKV's placement driver (degrees and counters for hot regions); the margin is the
//!   normal approximation of a Poisson count.
//!
//! The margin is `z` standard deviations of the *arrivals*, not only of the sampling: even where
//! every request is counted, a key of a constant rate brings now more and now fewer in a window,
//! and a decision that takes each window at its word flaps. So it does not shrink to nothing at
//! `N = 1`; where a window holds thousands of requests it is a percent or two.

use super::super::time::Tick;

/// The two lines, and how sure a count must be.
#[derive(Clone, Copy, Debug)]
pub struct Band {
    /// A key proven to be at or above this rate is hot.
    pub up_per_sec: f64,
    /// A hot key proven to be below this rate is cool.
    pub down_per_sec: f64,
    /// Standard deviations between a count and what it proves.
    pub z: f64,
    /// Cool windows in a row before a switch goes off.
    pub windows: u8,
}

impl Band {
    /// Whether at least `lower` in `span_secs` proves the upper line. `squares` is the sum of the
    /// squared weights behind `lower`.
    #[must_use]
    pub fn proves_hot(&self, lower: f64, squares: f64, span_secs: f64) -> bool {
        lower - self.z * squares.sqrt() >= self.up_per_sec * span_secs
    }

    /// Whether at most `upper` in `span_secs` proves the lower line. `unit` is the weight of one
    /// more sample: that none came does not prove that none was sent.
    #[must_use]
    pub fn proves_cool(&self, upper: f64, squares: f64, unit: f64, span_secs: f64) -> bool {
        self.upper(upper, squares, unit) < self.down_per_sec * span_secs
    }

    /// `upper` with its margin.
    #[must_use]
    pub fn upper(&self, upper: f64, squares: f64, unit: f64) -> f64 {
        upper + self.z * (squares + unit * unit).sqrt()
    }
}

/// On or off, with a memory of cool windows.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Switch {
    since: Option<Tick>,
    cool: u8,
}

impl Switch {
    /// Since when the switch is on.
    #[must_use]
    pub fn since(&self) -> Option<Tick> {
        self.since
    }

    /// Whether the switch is on.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// Cool windows in a row so far.
    #[must_use]
    pub fn cool_windows(&self) -> u8 {
        self.cool
    }

    /// Turns the switch on.
    pub fn turn_on(&mut self, now: Tick) {
        *self = Switch { since: Some(now), cool: 0 };
    }

    /// Takes note of a finished window. Returns true if this window turned the switch off.
    pub fn finish_window(&mut self, cool: bool, band: &Band) -> bool {
        self.cool = if cool { self.cool.saturating_add(1) } else { 0 };
        if !self.is_on() || self.cool < band.windows {
            return false;
        }
        *self = Switch::default();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BAND: Band = Band { up_per_sec: 100.0, down_per_sec: 80.0, z: 1.75, windows: 5 };

    #[test]
    fn promotion_needs_the_margin_above_the_line() {
        assert!(!BAND.proves_hot(119.0, 119.0, 1.0));
        assert!(BAND.proves_hot(120.0, 120.0, 1.0));
        assert!(!BAND.proves_hot(120.0, 120.0, 1.1));
        let loud = Band { up_per_sec: 10_000.0, ..BAND };
        assert!(loud.proves_hot(10_180.0, 10_180.0, 1.0));
    }

    #[test]
    fn one_warm_window_starts_the_count_of_cool_ones_again() {
        let mut switch = Switch::default();
        switch.turn_on(Tick(7));
        for window in 0..9 {
            assert!(!switch.finish_window(window != 4, &BAND), "window {window}");
        }
        assert!(switch.finish_window(true, &BAND));
        assert!(!switch.is_on());
    }

    #[test]
    fn a_switch_that_is_off_does_not_go_off() {
        let mut switch = Switch::default();
        assert!((0..20).all(|_| !switch.finish_window(true, &BAND)));
    }

    #[test]
    fn no_sample_at_a_coarse_rate_proves_nothing() {
        assert!(BAND.proves_cool(0.0, 0.0, 1.0, 1.0));
        assert!(!BAND.proves_cool(0.0, 0.0, 100.0, 1.0));
    }

    proptest! {
        #[test]
        fn no_count_is_hot_and_cool(
            lower in 0.0f64..1e6, error in 0.0f64..1e3, unit in 1.0f64..1e3, span in 0.01f64..10.0,
        ) {
            let (squares, upper) = (lower * unit, lower + error);
            let hot = BAND.proves_hot(lower, squares, span);
            prop_assert!(!(hot && BAND.proves_cool(upper, squares, unit, span)));
        }
    }
}
