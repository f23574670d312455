//! Points in time of the engine.
//!
//! - **What**: a tick is a point on the clock that the shell passes in.
//! - **Invariant**: arithmetic saturates, so a far deadline never wraps into the past.
//! - **Time and units**: nanoseconds since an origin that the clock chooses.
//! - **Bounds**: 584 years.
//! - **Source**: quinn-proto's rule that a state machine never asks what time it is.

use std::time::Duration;

/// A point in time, in nanoseconds since the origin of the clock that produced it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Tick(pub u64);

impl Tick {
    /// The origin of the clock.
    pub const ZERO: Tick = Tick(0);
    /// Later than every point that a clock reaches.
    pub const MAX: Tick = Tick(u64::MAX);

    /// This point moved later by `by`, saturating.
    #[must_use]
    pub const fn after(self, by: Duration) -> Tick {
        Tick(self.0.saturating_add(nanos(by)))
    }

    /// This point moved earlier by `by`, saturating at the origin.
    #[must_use]
    pub const fn before(self, by: Duration) -> Tick {
        Tick(self.0.saturating_sub(nanos(by)))
    }

    /// How long after `earlier` this point lies; zero when it does not.
    #[must_use]
    pub const fn since(self, earlier: Tick) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Seconds since the origin.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

/// A duration in nanoseconds, saturating at 584 years.
#[must_use]
pub const fn nanos(d: Duration) -> u64 {
    let n = d.as_nanos();
    if n > u64::MAX as u128 { u64::MAX } else { n as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_far_deadline_does_not_wrap_into_the_past() {
        assert_eq!(Tick(5).after(Duration::MAX), Tick::MAX);
        assert_eq!(Tick(5).before(Duration::MAX), Tick::ZERO);
        assert_eq!(Tick(5).since(Tick(9)), Duration::ZERO);
    }
}
