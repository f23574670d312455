//! The options of what sheds.

use crate::engine::data::admit::Budget;
use crate::engine::data::bulkhead;
use crate::engine::data::retry::Terms;
use crate::error::{Error, Result};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A tenant, by the hash of its name. The same name is the same tenant within one process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tenant(u64);

impl Tenant {
    pub(crate) fn named(name: &[u8]) -> Tenant {
        // Seeded: nobody can choose a name that falls on another tenant.
        static SECRET: OnceLock<RandomState> = OnceLock::new();
        Tenant(SECRET.get_or_init(RandomState::new).hash_one(name))
    }

    pub(crate) fn id(self) -> u64 {
        self.0
    }
}

type TenantOf = Arc<dyn for<'a> Fn(&'a [u8]) -> Option<&'a [u8]> + Send + Sync>;

/// What one key and one tenant may cost the store.
///
/// A call that is about to cost the store an operation is held against the budget of its key, then
/// against that of its tenant, and then both are charged, or neither: a refused call consumes
/// nothing. Hits, and callers who share a load or a batch of adds of somebody else, are free.
///
/// # Example
/// ```
/// # use heatsink::{Admission, Budget, Heatsink, store::MemoryStore};
/// # use std::time::Duration;
/// let admission = Admission::new()
///     .per_key(Budget::per_sec(500).burst(100))
///     .per_tenant(Budget::per_sec(2_000))
///     // "acme:post:9" belongs to "acme".
///     .tenant_of(|key| key.split(|byte| *byte == b':').next())
///     .freeze(Duration::from_secs(60));
/// let hs = Heatsink::builder(MemoryStore::new(8)).admission(admission).build()?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Admission {
    pub(crate) key: Option<Budget>,
    pub(crate) tenant: Option<Budget>,
    tenant_of: Option<TenantOf>,
    pub(crate) keys_max: usize,
    pub(crate) tenants_max: usize,
    pub(crate) hot_only: bool,
    pub(crate) freeze: Option<Duration>,
}

impl Default for Admission {
    fn default() -> Admission {
        Admission {
            key: None,
            tenant: None,
            tenant_of: None,
            keys_max: 65_536,
            tenants_max: 16_384,
            hot_only: false,
            freeze: None,
        }
    }
}

impl Admission {
    /// No budget yet.
    #[must_use]
    pub fn new() -> Admission {
        Admission::default()
    }

    /// What one key may cost the store through this instance. Default: no limit.
    #[must_use]
    pub fn per_key(mut self, budget: Budget) -> Admission {
        self.key = Some(budget);
        self
    }

    /// What one tenant may cost the store through this instance. Default: no limit. A call whose
    /// tenant is not known is held against its key only.
    #[must_use]
    pub fn per_tenant(mut self, budget: Budget) -> Admission {
        self.tenant = Some(budget);
        self
    }

    /// The part of a key that names its tenant, if it has one. [`Read::tenant`](crate::Read::tenant)
    /// and [`Put::tenant`](crate::Put::tenant) have precedence. Default: none.
    #[must_use]
    pub fn tenant_of(
        mut self,
        f: impl for<'a> Fn(&'a [u8]) -> Option<&'a [u8]> + Send + Sync + 'static,
    ) -> Admission {
        self.tenant_of = Some(Arc::new(f));
        self
    }

    /// Keys with a bucket of their own at most; about 18 bytes each, taken at once. Beyond it keys
    /// share buckets by their hash: none of them gets more than its own budget, and together they
    /// may get less. Only keys whose budget is not whole count. Default: 65,536.
    #[must_use]
    pub fn keys_max(mut self, keys: usize) -> Admission {
        self.keys_max = keys;
        self
    }

    /// The same for tenants. Default: 16,384.
    #[must_use]
    pub fn tenants_max(mut self, tenants: usize) -> Admission {
        self.tenants_max = tenants;
        self
    }

    /// Only keys on the hot list are held against the budget per key: found, pinned or scheduled.
    /// A key is above its budget for as long as it takes to find it. Tenants are always held to
    /// theirs.
    #[must_use]
    pub fn hot_keys_only(mut self) -> Admission {
        self.hot_only = true;
        self
    }

    /// Under overload (a refusal by a budget, a bulkhead or the store itself) serves the last value
    /// of a key, or the last sum of a counter, that this process has loaded, if it is younger than
    /// `age`. Its source is [`Source::Frozen`](crate::Source::Frozen) and it knows its age. It is
    /// never older than a write or an invalidation that this process has begun, and never older
    /// than the store would have kept it. Up to 64 MiB of values of at most 64 KiB. Default: off.
    #[must_use]
    pub fn freeze(mut self, age: Duration) -> Admission {
        self.freeze = Some(age);
        self
    }

    pub(crate) fn tenant(&self, key: &[u8]) -> Option<Tenant> {
        self.tenant.and(self.tenant_of.as_ref())?(key).map(Tenant::named)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let wrong = if self.key.is_none() && self.tenant.is_none() {
            "Admission has no budget; set Admission::per_key or Admission::per_tenant"
        } else if self.hot_only && self.key.is_none() {
            "Admission::hot_keys_only needs Admission::per_key"
        } else if !(15..=1 << 24).contains(&self.keys_max) {
            "Admission::keys_max must be 15 to 16777216"
        } else if !(15..=1 << 24).contains(&self.tenants_max) {
            "Admission::tenants_max must be 15 to 16777216"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission")
            .field("key", &self.key)
            .field("tenant", &self.tenant)
            .field("keys_max", &self.keys_max)
            .field("tenants_max", &self.tenants_max)
            .field("hot_only", &self.hot_only)
            .field("freeze", &self.freeze)
            .finish_non_exhaustive()
    }
}

/// Retries of store calls by heatsink itself, within a budget.
///
/// Every store call pays in a part of a retry, every retry takes out a whole one, from the budget
/// of the instance and from that of the shard (where the store knows its shards). So retries
/// add at most that part to the load, whatever fails and however often.
///
/// Retried are calls that the store did not apply and that may succeed: never an `add`, never a
/// write of [`Unknown`](crate::Outcome::Unknown) outcome. When the budget is spent, or the attempts
/// are, the error's hint says [`Never`](crate::Retry::Never), so that layers outside do not
/// multiply the load.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, Retries, store::MemoryStore};
/// let hs = Heatsink::builder(MemoryStore::new(8)).retries(Retries::new()).build()?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Retries {
    permille: u16,
    burst: u32,
    pub(crate) attempts: u32,
    pub(crate) wait_max: Duration,
}

impl Default for Retries {
    fn default() -> Retries {
        Retries { permille: 100, burst: 10, attempts: 2, wait_max: Duration::from_millis(250) }
    }
}

impl Retries {
    /// The defaults.
    #[must_use]
    pub fn new() -> Retries {
        Retries::default()
    }

    /// Retries per thousand calls. Default: 100.
    #[must_use]
    pub fn permille(mut self, permille: u16) -> Retries {
        self.permille = permille;
        self
    }

    /// Retries beyond that part, over any span of time. Default: 10.
    #[must_use]
    pub fn burst(mut self, retries: u32) -> Retries {
        self.burst = retries;
        self
    }

    /// Retries of one call. Default: 2.
    #[must_use]
    pub fn attempts(mut self, retries: u32) -> Retries {
        self.attempts = retries;
        self
    }

    /// The longest pause before a retry. The first is at most 10 ms, drawn at random, and each
    /// further one may be twice as long; a store that asks for a longer one is not retried.
    /// Default: 250 ms.
    #[must_use]
    pub fn wait_max(mut self, pause: Duration) -> Retries {
        self.wait_max = pause;
        self
    }

    pub(crate) fn terms(&self) -> Terms {
        Terms { permille: self.permille, burst: self.burst }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let wrong = if self.permille > 1_000 {
            "Retries::permille is above 1000"
        } else if self.attempts == 0 || self.attempts > 16 {
            "Retries::attempts must be 1 to 16; for none, do not call Builder::retries"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }
}

/// How many calls of this instance may be under way to one shard.
///
/// A shard that has become slow then holds up so many calls and no more; calls to its neighbours
/// never wait for it. Where the store does not know its shards there is one bulkhead for all of it.
///
/// # Example
/// ```
/// # use heatsink::{Bulkhead, Heatsink, store::MemoryStore};
/// let bulkhead = Bulkhead::new().in_flight_max(64).queue_max(256);
/// let hs = Heatsink::builder(MemoryStore::new(8)).bulkhead(bulkhead).build()?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Bulkhead {
    in_flight_max: usize,
    queue_max: usize,
    pub(crate) wait_max: Duration,
}

impl Default for Bulkhead {
    fn default() -> Bulkhead {
        Bulkhead { in_flight_max: 128, queue_max: 1_024, wait_max: Duration::from_millis(100) }
    }
}

impl Bulkhead {
    /// The defaults.
    #[must_use]
    pub fn new() -> Bulkhead {
        Bulkhead::default()
    }

    /// Calls under way to one shard. Default: 128.
    #[must_use]
    pub fn in_flight_max(mut self, calls: usize) -> Bulkhead {
        self.in_flight_max = calls;
        self
    }

    /// Calls that wait for one shard; one more is refused. Default: 1,024.
    #[must_use]
    pub fn queue_max(mut self, calls: usize) -> Bulkhead {
        self.queue_max = calls;
        self
    }

    /// A call that has waited this long is refused. Default: 100 ms.
    #[must_use]
    pub fn wait_max(mut self, wait: Duration) -> Bulkhead {
        self.wait_max = wait;
        self
    }

    pub(crate) fn limits(&self) -> bulkhead::Limits {
        bulkhead::Limits { in_flight: self.in_flight_max, queue: self.queue_max }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let wrong = if self.in_flight_max == 0 {
            "Bulkhead::in_flight_max is zero; nothing would reach the store"
        } else if self.queue_max > 1 << 20 {
            "Bulkhead::queue_max is above 1048576"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }
}
