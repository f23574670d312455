//! Clocks and threads: the lines of the crate that touch the machine.

use crate::engine::time::Tick;
use rustix::time::{ClockId, clock_getres, clock_gettime};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Where ticks come from: the machine's coarse monotonic clock, or a hand that turns it.
///
/// The coarse clock costs 5 ns where the precise one costs 40, and lags behind by up to
/// [`resolution`](Clock::resolution) (4 ms on most kernels), which every age limit subtracts.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    Coarse,
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's coarse monotonic clock.
    #[must_use]
    pub fn system() -> Clock {
        Clock(Source::Coarse)
    }

    /// A clock that stands still until [`Clock::set`] moves it. It starts one hour after its
    /// origin, so that points before now exist.
    #[must_use]
    pub fn manual() -> Clock {
        Clock(Source::Manual(Arc::new(AtomicU64::new(3_600_000_000_000))))
    }

    /// The present tick.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Tick {
        match &self.0 {
            Source::Coarse => read(ClockId::MonotonicCoarse),
            Source::Manual(t) => Tick(t.load(Ordering::Acquire)),
        }
    }

    /// The present tick without the coarse clock's lag; for measuring, not for hits.
    #[must_use]
    pub fn precise(&self) -> Tick {
        match &self.0 {
            Source::Coarse => read(ClockId::Monotonic),
            Source::Manual(t) => Tick(t.load(Ordering::Acquire)),
        }
    }

    /// True for a clock that [`Clock::set`] moves.
    #[must_use]
    pub fn is_manual(&self) -> bool {
        matches!(self.0, Source::Manual(_))
    }

    /// How long this machine was suspended since it booted; zero for a manual clock. The monotonic
    /// clock stands still while a machine sleeps, the values in a cache do not.
    #[must_use]
    pub(crate) fn suspended(&self) -> Duration {
        match &self.0 {
            Source::Coarse => read(ClockId::Boottime).since(read(ClockId::Monotonic)),
            Source::Manual(_) => Duration::ZERO,
        }
    }

    /// What this thread has worked so far; of a manual clock, nothing.
    #[cfg(feature = "feed")]
    #[must_use]
    pub(crate) fn worked(&self) -> Tick {
        match &self.0 {
            Source::Coarse => read(ClockId::ThreadCPUTime),
            Source::Manual(_) => Tick::ZERO,
        }
    }

    /// Milliseconds since 1970, as far as the machine knows; of a manual clock, since its origin.
    /// For what other machines are to compare; never for measuring.
    #[must_use]
    pub(crate) fn wall_ms(&self) -> u64 {
        match &self.0 {
            Source::Coarse => read(ClockId::Realtime).0 / 1_000_000,
            Source::Manual(t) => t.load(Ordering::Acquire) / 1_000_000,
        }
    }

    /// By how much [`now`](Clock::now) may lag behind.
    #[must_use]
    pub fn resolution(&self) -> Duration {
        match &self.0 {
            Source::Coarse => {
                let r = clock_getres(ClockId::MonotonicCoarse);
                Duration::new(u64::try_from(r.tv_sec).unwrap_or(0), r.tv_nsec as u32)
            }
            Source::Manual(_) => Duration::ZERO,
        }
    }

    /// Moves a manual clock to `to`; it never goes back. No effect on the machine's clock.
    pub fn set(&self, to: Tick) {
        if let Source::Manual(t) = &self.0 {
            t.fetch_max(to.0, Ordering::AcqRel);
        }
    }

    /// Moves a manual clock on by `by`. No effect on the machine's clock.
    pub fn advance(&self, by: Duration) {
        self.set(self.now().after(by));
    }
}

#[inline]
fn read(id: ClockId) -> Tick {
    let t = clock_gettime(id);
    Tick((t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64))
}

/// A seed that differs from process to process and from call to call.
pub(crate) fn wall_seed() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    read(ClockId::Realtime).0
        ^ read(ClockId::Monotonic).0.rotate_left(32)
        ^ u64::from(std::process::id()).rotate_left(17)
        ^ call
}

/// Starts a named thread.
#[expect(clippy::disallowed_methods, reason = "the place that starts threads")]
pub(crate) fn spawn_thread(
    name: &str,
    f: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(f)
}
