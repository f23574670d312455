//! Shedding: what one key or one tenant may cost the store, and what is served in its place.
//!
//! A budget counts store operations, not requests: it is asked where a call is about to cost the
//! store something. So a hit is free, a call that joins a load or a batch is free, and only what
//! the near cache and combining have left is shed. Off unless [`Builder::admission`] is called;
//! then a hit still pays nothing, since it never comes here.
//!
//! The buckets are our own, of a few lines in [`admit`]; their tests hold them against governor.
//! What governor lacks for this: a check of two limiters that charges both or none, a cap on the
//! number of its keys, and time as an argument.
//!
//! [`Builder::admission`]: crate::Builder::admission

mod frozen;
pub(crate) mod guard;
mod guarded;
pub(crate) mod limit;
pub(crate) mod options;

use crate::adds::{Cell, count};
use crate::config::Options;
use crate::counter::Sum;
use crate::engine::control::steering::Steering;
use crate::engine::data::admit::{self, Ask, Budget, Refused, Set};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::heatsink::Heatsink;
use crate::names;
use crate::runtime::Clock;
use crate::shared::Shared;
use crate::sync::Mutex;
use crate::value::Value;
use arc_swap::ArcSwap;
use frozen::Frozen;
use options::{Admission, Tenant};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A budget with so many steps of the clock in its burst can go by the coarse clock.
const COARSE_STEPS: u32 = 16;

/// What sheds, of one instance.
#[derive(Default)]
pub(crate) struct Shed {
    admission: Option<Box<Admit>>,
    /// What is served in place of what was refused.
    pub(crate) frozen: Option<Box<Frozen>>,
}

/// The budgets of one instance.
struct Admit {
    options: Admission,
    keys: Table,
    tenants: Table,
    /// Reading the clock to the nanosecond costs more; small bursts need it.
    precise: bool,
    /// Refuses nothing, counts what it would refuse.
    observe_only: bool,
    /// Hashes of the keys on the hot list, in order.
    hot: ArcSwap<Vec<u64>>,
    refused_by_key: AtomicU64,
    refused_by_tenant: AtomicU64,
}

/// The buckets of all keys, or of all tenants.
struct Table(Box<[Mutex<Set>]>);

impl Table {
    fn new(ids_max: usize) -> Table {
        let sets = (ids_max / admit::WAYS).max(1);
        Table((0..sets).map(|_| Mutex::new(Set::default())).collect())
    }

    #[inline]
    fn set(&self, id: u64) -> &Mutex<Set> {
        // The high half of the product: any number of sets, and the high bits of the hash.
        &self.0[((u128::from(id) * self.0.len() as u128) >> 64) as usize]
    }

    fn sum(&self, of: impl Fn(&Set) -> u64) -> u64 {
        self.0.iter().map(|set| of(&set.lock())).sum()
    }
}

/// What has been shed, since the instance was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ShedStats {
    /// Calls that were admitted, where a budget per key is set; else by their tenant.
    pub admitted: u64,
    /// Calls that were refused because their key had used up its budget. In observe-only mode,
    /// calls that would have been.
    pub refused_by_key: u64,
    /// The same for tenants.
    pub refused_by_tenant: u64,
    /// Keys whose budget is not whole now.
    pub keys_tracked: u64,
    /// Bytes that the buckets take; fixed when the instance is built.
    pub buckets_bytes: u64,
    /// Last known values that were served in place of a refusal.
    pub frozen_served: u64,
    /// Bytes that last known values take.
    pub frozen_bytes: u64,
    /// Retries that heatsink made.
    pub retries: u64,
    /// Retries that it did not make because their budget was spent.
    pub retries_refused: u64,
    /// Calls that waited for a place in front of a shard.
    pub queued: u64,
    /// Calls that were refused in front of a shard: its queue was full, or they waited too long.
    pub refused_by_shard: u64,
}

impl Shed {
    pub(crate) fn new(options: &Options, clock: &Clock) -> Shed {
        let Some(chosen) = &options.admission else { return Shed::default() };
        let step = clock.resolution() * COARSE_STEPS;
        let budgets = [chosen.key, chosen.tenant];
        let admission = Admit {
            keys: Table::new(if chosen.key.is_some() { chosen.keys_max } else { 0 }),
            tenants: Table::new(if chosen.tenant.is_some() { chosen.tenants_max } else { 0 }),
            precise: budgets.iter().flatten().any(|budget| budget.span() < step),
            observe_only: options.steering.observe_only,
            hot: ArcSwap::default(),
            refused_by_key: AtomicU64::new(0),
            refused_by_tenant: AtomicU64::new(0),
            options: chosen.clone(),
        };
        let frozen = chosen.freeze.map(|age| Box::new(Frozen::new(age)));
        Shed { admission: Some(Box::new(admission)), frozen }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.admission.is_some()
    }

    /// The hot list has changed.
    pub(crate) fn follow(&self, steering: &Steering, hash: impl Fn(&[u8]) -> u64) {
        let Some(admission) = self.admission.as_ref().filter(|a| a.options.hot_only) else {
            return;
        };
        let mut hot: Vec<u64> = steering.listed().map(|key| hash(key)).collect();
        hot.sort_unstable();
        admission.hot.store(Arc::new(hot));
    }
}

impl Admit {
    fn check(&self, clock: &Clock, (id, key): (u64, &[u8]), tenant: Option<u64>) -> Result<()> {
        let by_key = self.options.key.as_ref().filter(|_| self.applies(id));
        let by_tenant = self.options.tenant.as_ref().zip(tenant);
        let refused = match self.charge(clock, by_key.map(|b| (b, id)), by_tenant) {
            Ok(()) => return Ok(()),
            Err(refused) => refused,
        };
        let (tally, text, wait) = match refused {
            Refused::Key(wait) => (&self.refused_by_key, "the key is above its budget", wait),
            Refused::Tenant(wait) => {
                (&self.refused_by_tenant, "the tenant is above its budget", wait)
            }
        };
        count(tally, 1);
        if self.observe_only {
            return Ok(());
        }
        let error = Error::not_applied(ErrorKind::Shed, text).with_key(key);
        Err(error.with_retry(Retry::After(wait)))
    }

    /// Locks the set of the key, then that of the tenant: never two of one table.
    #[inline]
    fn charge(
        &self,
        clock: &Clock,
        key: Option<(&Budget, u64)>,
        tenant: Option<(&Budget, u64)>,
    ) -> Result<(), Refused> {
        let mut of_key = key.map(|(_, id)| self.keys.set(id).lock());
        let mut of_tenant = tenant.map(|(_, id)| self.tenants.set(id).lock());
        let key = key.zip(of_key.as_deref_mut());
        let tenant = tenant.zip(of_tenant.as_deref_mut());
        // Not before: a thread that is put aside in between would be held to an old time.
        let now = if self.precise { clock.precise() } else { clock.now() };
        let ask = |((budget, id), set)| Ask { set, id, budget };
        admit::admit(now, 1, key.map(ask), tenant.map(ask))
    }

    fn applies(&self, id: u64) -> bool {
        !self.options.hot_only || self.hot.load().binary_search(&id).is_ok()
    }
}

impl Shared {
    /// Asks the budgets whether a call for `key` may cost the store an operation, and charges them.
    pub(crate) fn admit(
        &self,
        hash: impl FnOnce() -> u64,
        key: &[u8],
        tenant: Option<Tenant>,
    ) -> Result<()> {
        let Some(admission) = &self.shed.admission else { return Ok(()) };
        // What heatsink stores beside a key is that key's.
        let of = names::user_key(key);
        let id = if of.len() == key.len() { hash() } else { self.hash(of) };
        let tenant = tenant.or_else(|| admission.options.tenant(of));
        admission.check(&self.clock, (id, of), tenant.map(Tenant::id))
    }

    /// The last known value in place of an error of overload, where that is allowed and there is
    /// one young enough.
    pub(crate) fn last_known(
        &self,
        (hash, key): (u64, &[u8]),
        max_age: Option<Duration>,
        error: Error,
    ) -> Result<Value> {
        let Some(frozen) = self.shed.frozen.as_ref().filter(|_| is_overload(&error)) else {
            return Err(error);
        };
        let now = self.clock.now();
        match frozen.serve((hash, key), (now, self.epoch()), max_age) {
            Some(entry) => Ok(Value::frozen(entry, now)),
            None => Err(error),
        }
    }

    /// The same for the sum of a counter.
    pub(crate) fn last_sum(&self, cell: &Cell, sum: Result<Sum>) -> Result<Sum> {
        let Some(frozen) = &self.shed.frozen else { return sum };
        let error = match sum {
            Err(error) if is_overload(&error) => error,
            other => return other,
        };
        let now = self.clock.now();
        let known = cell.known.lock().serve(now, frozen.age_max());
        let Some((total, started)) = known else { return Err(error) };
        frozen.count_served();
        Ok(Sum::known(total, now.since(started)))
    }
}

/// Refused by a budget, by the bulkhead, or by the store itself.
fn is_overload(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Shed | ErrorKind::Throttled)
}

impl Heatsink {
    /// Charges the budgets of `key` for work of your own that costs the store as much as one
    /// operation: a query that does not go through heatsink. Loads, puts, deletes and adds are
    /// charged by themselves. Without [`Builder::admission`](crate::Builder::admission) it admits
    /// everything.
    ///
    /// # Cost
    /// Store operations: 0. At most two short locks.
    ///
    /// # Errors
    /// [`Shed`](ErrorKind::Shed) with [`Retry::After`]; nothing was charged.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Admission, Budget, ErrorKind, Heatsink, store::MemoryStore};
    /// let admission = Admission::new().per_key(Budget::per_sec(100).burst(2));
    /// let hs = Heatsink::builder(MemoryStore::new(8)).admission(admission).build()?;
    /// hs.admit("post:9")?;
    /// hs.admit("post:9")?;
    /// assert_eq!(hs.admit("post:9").unwrap_err().kind(), ErrorKind::Shed);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn admit(&self, key: impl AsRef<[u8]>) -> Result<()> {
        let key = key.as_ref();
        self.shared().admit(|| self.shared().hash(key), key, None)
    }

    /// Like [`admit`](Heatsink::admit), for a tenant that the caller names.
    ///
    /// # Errors
    /// As [`admit`](Heatsink::admit).
    pub fn admit_for(&self, key: impl AsRef<[u8]>, tenant: impl AsRef<[u8]>) -> Result<()> {
        let key = key.as_ref();
        let tenant = Tenant::named(tenant.as_ref());
        self.shared().admit(|| self.shared().hash(key), key, Some(tenant))
    }

    /// Plain numbers about what was shed.
    #[must_use]
    pub fn shed_stats(&self) -> ShedStats {
        let shared = self.shared();
        let mut stats = ShedStats::default();
        if let Some(guard) = &shared.options.guard {
            guard.tell(&mut stats);
        }
        if let Some(frozen) = &shared.shed.frozen {
            frozen.tell(&mut stats);
        }
        if let Some(admission) = &shared.shed.admission {
            let now = shared.clock.now();
            let counted = if admission.options.key.is_some() && !admission.options.hot_only {
                &admission.keys
            } else {
                &admission.tenants
            };
            stats.admitted = counted.sum(Set::charged);
            stats.refused_by_key = admission.refused_by_key.load(Relaxed);
            stats.refused_by_tenant = admission.refused_by_tenant.load(Relaxed);
            stats.keys_tracked = admission.keys.sum(|set| set.tracked(now) as u64);
            let sets = admission.keys.0.len() + admission.tenants.0.len();
            stats.buckets_bytes = (sets * size_of::<Mutex<Set>>()) as u64;
        }
        stats
    }
}

impl std::fmt::Debug for Shed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shed").field("admission", &self.is_on()).finish()
    }
}
