//! How a handle is built: one options struct per mechanism, checked when everything is known.

use crate::adds::Adds;
use crate::engine::control::sampling::Sampling;
use crate::engine::control::treat::{self, Ceiling};
use crate::engine::control::{detect, steering};
use crate::engine::data::near::Policy;
use crate::error::{Error, Result};
use crate::heatsink::Heatsink;
use crate::runtime::{self, Runtime};
use crate::salt::Salt;
use crate::shed::guard::Guard;
use crate::shed::options::{Admission, Bulkhead, Retries};
use crate::store::{DynStore, Store};
use crate::stream::Invalidations;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

/// How long and how much the near cache keeps.
///
/// # Example
/// ```
/// # use heatsink::NearCache;
/// # use std::time::Duration;
/// let near = NearCache::new().fresh(Duration::from_millis(500)).stale(Duration::from_secs(2));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NearCache {
    pub(crate) fresh: Duration,
    pub(crate) stale: Duration,
    pub(crate) absent: Duration,
    pub(crate) jitter_permille: u16,
    pub(crate) cool_down: Duration,
    pub(crate) bytes_max: usize,
    pub(crate) value_bytes_max: usize,
    pub(crate) keys_max: usize,
    early: bool,
    phased: bool,
}

impl Default for NearCache {
    fn default() -> NearCache {
        NearCache {
            fresh: Duration::from_secs(1),
            stale: Duration::from_secs(3),
            absent: Duration::from_millis(250),
            jitter_permille: 100,
            cool_down: Duration::from_millis(200),
            bytes_max: 64 << 20,
            value_bytes_max: 1 << 20,
            keys_max: 4096,
            early: false,
            phased: false,
        }
    }
}

/// No age limit is longer.
const AGE_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);

impl NearCache {
    /// The defaults.
    #[must_use]
    pub fn new() -> NearCache {
        NearCache::default()
    }

    /// Age, from the start of its load, up to which a hot value is served as it is.
    /// Default: 1 s.
    #[must_use]
    pub fn fresh(mut self, fresh: Duration) -> NearCache {
        self.fresh = fresh;
        self
    }

    /// Age up to which a hot value may be served while it is loaded again. Nothing older is ever
    /// served. Default: 3 s.
    #[must_use]
    pub fn stale(mut self, stale: Duration) -> NearCache {
        self.stale = stale;
        self
    }

    /// The fresh time of "there is no such key". Default: 250 ms.
    #[must_use]
    pub fn absent(mut self, absent: Duration) -> NearCache {
        self.absent = absent;
        self
    }

    /// By how many thousandths the fresh time varies in both directions, drawn once per load.
    /// Default: 100.
    #[must_use]
    pub fn jitter_permille(mut self, permille: u16) -> NearCache {
        self.jitter_permille = permille;
        self
    }

    /// Pause between two failing refreshes of one key, while a stale value can be served.
    /// Default: 200 ms.
    #[must_use]
    pub fn cool_down(mut self, pause: Duration) -> NearCache {
        self.cool_down = pause;
        self
    }

    /// Bytes that all hot values, their keys and their bookkeeping may take together; a value that
    /// does not fit is not cached. Default: 64 MiB.
    #[must_use]
    pub fn bytes_max(mut self, bytes: usize) -> NearCache {
        self.bytes_max = bytes;
        self
    }

    /// Larger values are not cached. Default: 1 MiB.
    #[must_use]
    pub fn value_bytes_max(mut self, bytes: usize) -> NearCache {
        self.value_bytes_max = bytes;
        self
    }

    /// Hot keys at most. Default: 4,096.
    #[must_use]
    pub fn keys_max(mut self, keys: usize) -> NearCache {
        self.keys_max = keys;
        self
    }

    /// Begins each refresh earlier by as long as the load of the value took (at most half the fresh
    /// time), so that the next value is there when this one stops being fresh. Default: no.
    #[must_use]
    pub fn early_refresh(mut self, early: bool) -> NearCache {
        self.early = early;
        self
    }

    /// Gives each process a phase of its own at which it refreshes a key, in place of the jitter:
    /// processes that have all forgotten it at one instant (an invalidation, a reconnect) load it
    /// together once, and from then on spread over the fresh time. For fleets of many processes.
    /// Default: no.
    #[must_use]
    pub fn phased_refresh(mut self, phased: bool) -> NearCache {
        self.phased = phased;
        self
    }

    fn check(&self) -> Result<()> {
        let wrong = if self.fresh.is_zero() {
            "NearCache::fresh is zero; to cache nothing, pin nothing and use Read::latest()"
        } else if self.stale < self.fresh {
            "NearCache::stale is below NearCache::fresh"
        } else if self.absent > self.stale {
            "NearCache::absent is above NearCache::stale"
        } else if self.stale > AGE_MAX {
            "NearCache::stale is above ten years"
        } else if self.jitter_permille > 1000 {
            "NearCache::jitter_permille is above 1000"
        } else if self.keys_max > 65_536 {
            "NearCache::keys_max is above 65536"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }
}

/// Limits of loads and of those who wait for them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Loads {
    pub(crate) timeout: Duration,
    pub(crate) waiters_max: usize,
}

impl Default for Loads {
    fn default() -> Loads {
        Loads { timeout: Duration::from_secs(10), waiters_max: 100_000 }
    }
}

impl Loads {
    /// The defaults.
    #[must_use]
    pub fn new() -> Loads {
        Loads::default()
    }

    /// A load that takes longer ends with an error for all who wait for it. Checked ten times a
    /// second. Default: 10 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Loads {
        self.timeout = timeout;
        self
    }

    /// Callers that wait for one load at most; one more goes to the store by itself.
    /// Default: 100,000.
    #[must_use]
    pub fn waiters_max(mut self, waiters: usize) -> Loads {
        self.waiters_max = waiters;
        self
    }
}

/// How hot keys are found, and what counts as hot.
///
/// # Example
/// ```
/// # use heatsink::{Ceiling, Detect};
/// let careful = Detect::new().promote_at(200.0).ceiling(Ceiling::DYNAMODB).observe_only();
/// ```
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Detect {
    promote_at: f64,
    demote_permille: u32,
    demote_windows: u8,
    window_min: Duration,
    window_max: Duration,
    samples_per_sec: u32,
    found_max: usize,
    ceiling: Option<Ceiling>,
    processes: u32,
    observe_only: bool,
}

impl Default for Detect {
    fn default() -> Detect {
        let defaults = detect::Options::default();
        Detect {
            promote_at: defaults.promote_per_sec,
            demote_permille: defaults.demote_permille,
            demote_windows: defaults.demote_windows,
            window_min: defaults.window_min,
            window_max: defaults.window_max,
            samples_per_sec: 20_000,
            found_max: defaults.watched_max,
            ceiling: None,
            processes: 1,
            observe_only: false,
        }
    }
}

impl Detect {
    /// The defaults.
    #[must_use]
    pub fn new() -> Detect {
        Detect::default()
    }

    /// Finds nothing by itself: only what is pinned or scheduled is treated.
    #[must_use]
    pub fn pins_only() -> Detect {
        Detect::new().promote_at(f64::INFINITY)
    }

    /// A key that this process asks for this many times a second is hot; its reads, if they alone
    /// are as many, are served by the near cache. Default: 50, which at a fresh time of 1 s saves
    /// 49 reads of 50.
    #[must_use]
    pub fn promote_at(mut self, per_sec: f64) -> Detect {
        self.promote_at = per_sec;
        self
    }

    /// A hot key below this part of the threshold, in thousandths, is cool. Default: 800.
    #[must_use]
    pub fn demote_permille(mut self, permille: u32) -> Detect {
        self.demote_permille = permille;
        self
    }

    /// Cool windows in a row before a hot key is demoted. Default: 5.
    #[must_use]
    pub fn demote_windows(mut self, windows: u8) -> Detect {
        self.demote_windows = windows;
        self
    }

    /// The shortest and the longest window. Within these limits a window grows until the threshold
    /// means 100 samples; hot keys are found before their window ends. Default: 1 s and 10 s.
    #[must_use]
    pub fn window(mut self, shortest: Duration, longest: Duration) -> Detect {
        (self.window_min, self.window_max) = (shortest, longest);
        self
    }

    /// Samples a second at most, on average; below it every request is one. More traffic makes
    /// the threshold in force rise with [`Stats::threshold_per_sec`](crate::Stats). Default: 20,000.
    #[must_use]
    pub fn samples_per_sec(mut self, samples: u32) -> Detect {
        self.samples_per_sec = samples;
        self
    }

    /// Keys that may be hot, or near it, at a time. Default: 512.
    #[must_use]
    pub fn found_max(mut self, keys: usize) -> Detect {
        self.found_max = keys;
        self
    }

    /// What one shard can serve; with it, the hot list advises copies, slots or shedding where the
    /// near cache is not enough. Default: not known.
    #[must_use]
    pub fn ceiling(mut self, ceiling: Ceiling) -> Detect {
        self.ceiling = Some(ceiling);
        self
    }

    /// How many processes like this one read the same store. With it and
    /// [`ceiling`](Detect::ceiling), the advice on copies and slots counts the whole fleet: its
    /// demand is taken as this many times the process's own. Default: 1.
    #[must_use]
    pub fn processes(mut self, processes: u32) -> Detect {
        self.processes = processes.max(1);
        self
    }

    /// Finds, explains and tells what it would do, and treats no key, pinned ones included: no value
    /// is served from memory. Reads that come together still share a load, and adds a round trip.
    /// How a service starts.
    #[must_use]
    pub fn observe_only(mut self) -> Detect {
        self.observe_only = true;
        self
    }

    fn check(&self) -> Result<()> {
        let wrong = if self.promote_at.is_nan() || self.promote_at <= 0.0 {
            "Detect::promote_at must be above zero"
        } else if self.demote_permille > 1_000 {
            "Detect::demote_permille is above 1000"
        } else if self.window_min < Duration::from_millis(8) || self.window_max < self.window_min {
            "Detect::window must be at least 8 ms, and its longest no shorter than its shortest"
        } else if self.samples_per_sec == 0 {
            "Detect::samples_per_sec is zero; to find nothing, use Detect::pins_only()"
        } else if self.found_max == 0 || self.found_max > 32_768 {
            "Detect::found_max must be from 1 to 32768"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }

    /// As the engine takes them.
    fn options(&self, near: &NearCache) -> steering::Options {
        steering::Options {
            detect: detect::Options {
                promote_per_sec: self.promote_at,
                demote_permille: self.demote_permille,
                demote_windows: self.demote_windows,
                window_min: self.window_min,
                window_max: self.window_max,
                watched_max: self.found_max,
                sampling: Sampling::Budget { per_sec: self.samples_per_sec },
                treat: treat::Options {
                    near_reads_per_sec: self.promote_at,
                    near_ttl: near.fresh,
                    ceiling: self.ceiling,
                    processes: self.processes,
                    ..treat::Options::default()
                },
                ..detect::Options::default()
            },
            keys_max: near.keys_max,
            observe_only: self.observe_only,
        }
    }
}

/// The checked options, as the shell uses them.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) near: NearCache,
    pub(crate) loads: Loads,
    pub(crate) adds: Adds,
    pub(crate) salt: Option<Salt>,
    pub(crate) invalidations: Option<Invalidations>,
    pub(crate) policy: Policy,
    pub(crate) steering: steering::Options,
    pub(crate) admission: Option<Admission>,
    /// The store behind its bulkheads, where there are any.
    pub(crate) guard: Option<Arc<Guard>>,
    pub(crate) seed: u64,
    /// Handles per hot entry: a power of two, at least the number of cores.
    pub(crate) stripes: usize,
}

/// Builds a [`Heatsink`]. Start with [`Heatsink::builder`].
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, NearCache, store::MemoryStore};
/// # use std::time::Duration;
/// let hs = Heatsink::builder(MemoryStore::new(8))
///     .near(NearCache::new().fresh(Duration::from_millis(500)))
///     .build()?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[must_use]
pub struct Builder {
    store: Arc<dyn DynStore>,
    near: NearCache,
    loads: Loads,
    detect: Detect,
    adds: Adds,
    salt: Option<Salt>,
    admission: Option<Admission>,
    retries: Option<Retries>,
    bulkhead: Option<Bulkhead>,
    invalidations: Option<Invalidations>,
    runtime: Option<Arc<dyn Runtime>>,
    seed: Option<u64>,
    cores: Option<NonZeroUsize>,
}

impl Builder {
    pub(crate) fn new(store: impl Store) -> Builder {
        Builder {
            store: Arc::new(store),
            near: NearCache::default(),
            loads: Loads::default(),
            detect: Detect::default(),
            adds: Adds::default(),
            salt: None,
            admission: None,
            retries: None,
            bulkhead: None,
            invalidations: None,
            runtime: None,
            seed: None,
            cores: None,
        }
    }

    /// How long and how much the near cache keeps.
    pub fn near(mut self, near: NearCache) -> Builder {
        self.near = near;
        self
    }

    /// Limits of loads.
    pub fn loads(mut self, loads: Loads) -> Builder {
        self.loads = loads;
        self
    }

    /// How hot keys are found.
    pub fn detect(mut self, detect: Detect) -> Builder {
        self.detect = detect;
        self
    }

    /// How counters behave.
    pub fn adds(mut self, adds: Adds) -> Builder {
        self.adds = adds;
        self
    }

    /// Refuses what one key or one tenant asks of the store beyond its budget. Default: off.
    pub fn admission(mut self, admission: Admission) -> Builder {
        self.admission = Some(admission);
        self
    }

    /// Repeats store calls that were not applied, within a budget. Default: off.
    pub fn retries(mut self, retries: Retries) -> Builder {
        self.retries = Some(retries);
        self
    }

    /// Caps the calls that are under way to one shard. Default: off.
    pub fn bulkhead(mut self, bulkhead: Bulkhead) -> Builder {
        self.bulkhead = Some(bulkhead);
        self
    }

    /// Announces this process's writes to the others and hears theirs, so that a value that was
    /// changed or deleted elsewhere does not have to grow stale first. Default: none.
    pub fn invalidations(mut self, invalidations: Invalidations) -> Builder {
        self.invalidations = Some(invalidations);
        self
    }

    /// Where tasks run and what the time is. Default: follows the caller (tokio where one is
    /// running, else threads of heatsink's own).
    pub fn runtime(mut self, runtime: impl Runtime) -> Builder {
        self.runtime = Some(Arc::new(runtime));
        self
    }

    /// Spreads counters whose writers are too many over slots. Default: none is.
    pub fn salt(mut self, salt: Salt) -> Builder {
        self.salt = Some(salt);
        self
    }

    /// The seed of all randomness, for tests. Default: differs from process to process.
    pub fn seed(mut self, seed: u64) -> Builder {
        self.seed = Some(seed);
        self
    }

    /// How many threads are expected to read hot keys at the same time. Default: the number of
    /// cores.
    pub fn cores(mut self, cores: NonZeroUsize) -> Builder {
        self.cores = Some(cores);
        self
    }

    /// Checks the options and starts the handle. Opens no connection and never panics.
    ///
    /// # Errors
    /// [`Config`](crate::ErrorKind::Config) names the options that contradict each other.
    pub fn build(self) -> Result<Heatsink> {
        self.near.check()?;
        self.detect.check()?;
        self.adds.check()?;
        self.salt.as_ref().map_or(Ok(()), |salt| salt.check(&self.store.capability()))?;
        self.admission.as_ref().map_or(Ok(()), Admission::check)?;
        self.retries.as_ref().map_or(Ok(()), Retries::check)?;
        self.bulkhead.as_ref().map_or(Ok(()), Bulkhead::check)?;
        if self.loads.timeout.is_zero() || self.loads.waiters_max == 0 {
            return Err(Error::config("Loads::timeout and Loads::waiters_max must not be zero"));
        }
        let runtime = self.runtime.unwrap_or_else(runtime::ambient);
        let cores = self.cores.or_else(|| std::thread::available_parallelism().ok());
        let cores = cores.map_or(4, NonZeroUsize::get);
        let near = &self.near;
        let policy = Policy {
            fresh: near.fresh,
            stale: near.stale,
            absent_fresh: near.absent,
            jitter_permille: near.jitter_permille,
            cool_down: near.cool_down,
            resolution: runtime.clock().resolution(),
            early: near.early,
            phased: near.phased,
        };
        let seed = self.seed.unwrap_or_else(runtime::wall_seed);
        let (mut store, mut guard) = (self.store, None);
        if self.retries.is_some() || self.bulkhead.is_some() {
            let inner = (store, runtime.clone());
            let made = Arc::new(Guard::new(inner.0, inner.1, self.retries, self.bulkhead, seed));
            (store, guard) = (made.clone(), Some(made));
        }
        let options = Options {
            policy,
            steering: self.detect.options(&self.near),
            near: self.near,
            loads: self.loads,
            adds: self.adds,
            salt: self.salt,
            admission: self.admission,
            guard,
            seed,
            invalidations: self.invalidations,
            stripes: cores.next_power_of_two().min(64),
        };
        Heatsink::start(options, store, runtime)
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("near", &self.near).field("loads", &self.loads).finish()
    }
}
