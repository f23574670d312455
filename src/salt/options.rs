//! How counters are salted: the options, and plain numbers about it.

use crate::engine::control::registry::{LISTED_MAX, Timing};
use crate::engine::control::rotation::Waits;
use crate::engine::control::salt::SLOTS_MAX;
use crate::error::{Error, Result};
use crate::registry::Registry;
use crate::store::Capability;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How counters whose writers are too many are spread over slots. Passing it to
/// [`Builder::salt`](crate::Builder::salt) switches it on; without it nothing of this is done, and
/// nothing is written.
///
/// Every process that reads salted counters must have it on, with the same durations: a process
/// without it reads the bare key only, and misses what is in slots. What it adds is counted.
///
/// Needs [`compare_and_set`](crate::Capability::compare_and_set) of the registry.
///
/// # What holds on which store
/// | | can [`seal`](crate::Store::seal) (memory, Redis) | cannot |
/// |---|---|---|
/// | what keeps sums exact | a sealed slot refuses every add; leases only spare waits | leases: clocks that differ in rate by less than 2 %, adds that are applied within [`in_flight`](Salt::in_flight) or never |
/// | an add that is applied later | is refused, and sent to another slot | is missing from sums until the next [`sweep`](Salt::sweep), and counted as [`SaltStats::late`] |
/// | from the wish to the first write in other slots | at once for slots, and for the bare key if [`exclusive`](Salt::exclusive); else a lease | a lease |
/// | a counter's time is over, and the registry or a shard of its cannot be reached | adds and sums fail, and nothing was applied, until both can be: what was there cannot be taken off | the same |
/// | the registry cannot be reached | adds go on to the slots that are known for half of [`grave`](Salt::grave), then to the bare key | adds go to the bare key, which is always read |
///
/// That the bare key of a counter that is not exclusive is never sealed has a price: from the bare key
/// to slots the first write waits a lease, whatever the store can do; from slots to others it does not.
///
/// An add of unknown outcome is counted once or not at all, and never sent again; of an
/// [event](crate::Counter::add_event) it is settled by sending it again.
///
/// A failover of the store loses what its replica had not heard of: those adds and no others. A
/// counter that [only grows](crate::GrowOnly) tells of it. A failover of the registry may lose its
/// last change: of the list if it is younger than a lease, of a record if it is younger than half
/// of `grave`; then no add is lost, and [`SaltStats::registry_regressed`] tells of it. Where the store
/// may lose more than that, keep the [`registry`](Salt::registry) in another.
///
/// When a counter is back at its bare key, what its slots came to is added there, where the store can
/// [`fold`](crate::Store::fold), and its record goes: three times `grave` later it is a plain counter
/// again, for programs without heatsink too. Elsewhere the record stays for ever, and counts
/// towards [`listed_max`](Salt::listed_max).
///
/// # Counters that expire
/// A bare key that has an expiry when it is salted ([`ttl`](crate::Capability::ttl) of the store)
/// gives it to the record, as a time by the machines' clocks, and keeps none itself. From that time on
/// whoever looks at the counter lets it begin again from zero before it does anything else: its slots,
/// what is retired and what comes late vanish together, in one change of the record. An add that began
/// after that time counts; one that was under way may count before or after. After it the counter does
/// not expire any more, as with a key that an add makes anew; a [`reset`](crate::Counter::reset) leaves
/// the expiry as it is.
///
/// The clocks of machines tell different times: by as much one process sees the end earlier than
/// another. What a program without heatsink adds to the bare key between that time and the first look
/// is gone with the rest. A registry that loses the change does it again. To begin again takes an
/// answer of the registry and of every shard that has a slot; of all calls of a process that wait for
/// it, one asks. A counter that its adds keep busy keeps the expiry of the bare key beside that of the
/// record, until it is in slots. A counter that would expire
/// within two leases is not salted, nor is a maximum or a set that expires; a counter that
/// [only grows](crate::GrowOnly) takes an expiry for a loss.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, Salt, Treatment, store::MemoryStore};
/// let hs = Heatsink::builder(MemoryStore::new(8)).salt(Salt::new()).build()?;
/// hs.control().pin("post:9:likes", Treatment::Salt { slots: 32 })?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Salt {
    pub(crate) lease: Duration,
    pub(crate) in_flight: Option<Duration>,
    pub(crate) timeout: Duration,
    pub(crate) grave: Duration,
    pub(crate) sweep: Duration,
    pub(crate) cooldown: Duration,
    pub(crate) listed_max: usize,
    pub(crate) slots_max: u16,
    pub(crate) processes: u32,
    pub(crate) exclusive: bool,
    pub(crate) parity: bool,
    pub(crate) automatic: bool,
    pub(crate) totals: Option<Duration>,
    pub(crate) registry: Option<Arc<dyn Registry>>,
}

/// The rates of two clocks differ by less.
const DRIFT_PERMILLE: u32 = 20;

impl Default for Salt {
    fn default() -> Salt {
        Salt {
            lease: Duration::from_secs(2),
            in_flight: None,
            timeout: Duration::from_millis(500),
            grave: Duration::from_secs(900),
            sweep: Duration::from_secs(60),
            cooldown: Duration::from_secs(60),
            listed_max: 256,
            slots_max: SLOTS_MAX,
            processes: 1,
            exclusive: false,
            parity: false,
            automatic: true,
            totals: None,
            registry: None,
        }
    }
}

impl Salt {
    /// The defaults.
    #[must_use]
    pub fn new() -> Salt {
        Salt::default()
    }

    /// How long what was read of the registry holds. A change takes effect after this long, and
    /// each process reads one small value every third of it. Processes of a host that share a
    /// [feed](crate::Heatsink) have one of them read it for all, every fifth of it from a second on,
    /// and read nothing themselves; each does again where no answer comes for half of it. A registry
    /// that fails over must not lose a change that is older. Default: 2 s.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Salt {
        self.lease = lease;
        self
    }

    /// How long after it was sent an add may still be applied. Matters where the store cannot seal.
    /// Default: [`Store::max_in_flight_time`](crate::Store::max_in_flight_time).
    #[must_use]
    pub fn in_flight(mut self, longest: Duration) -> Salt {
        self.in_flight = Some(longest);
        self
    }

    /// An add to a slot, or a call of the registry, that takes longer is of unknown outcome. At
    /// most a third of the lease. Default: 500 ms.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Salt {
        self.timeout = timeout;
        self
    }

    /// How long slots that are not used any more are kept. Within it the ids of
    /// [`add_event`](crate::Counter::add_event) count once; an add, or a failover of the registry,
    /// that comes back after it may be lost. Default: 15 min.
    #[must_use]
    pub fn grave(mut self, kept: Duration) -> Salt {
        self.grave = kept;
        self
    }

    /// How often retired slots are compared with what was retired, where the store cannot seal.
    /// Default: 60 s.
    #[must_use]
    pub fn sweep(mut self, interval: Duration) -> Salt {
        self.sweep = interval;
        self
    }

    /// Between two changes of one counter that heatsink chooses by itself. Default: 60 s.
    #[must_use]
    pub fn cooldown(mut self, pause: Duration) -> Salt {
        self.cooldown = pause;
        self
    }

    /// Salted counters of the fleet at most; one more is refused. Default: 256.
    #[must_use]
    pub fn listed_max(mut self, keys: usize) -> Salt {
        self.listed_max = keys;
        self
    }

    /// Slots of a counter at most, when heatsink chooses. Default: 1,024.
    #[must_use]
    pub fn slots_max(mut self, slots: u16) -> Salt {
        self.slots_max = slots;
        self
    }

    /// How many processes of the fleet write as this one does: the rate of a counter is taken for
    /// this many times this process's, or for as many as a feed has heard name the key, if those are
    /// more. Few writers that combine need no slots, many do;
    /// [`explain`](crate::Heatsink::explain) says how many one place bears. Default: 1.
    #[must_use]
    pub fn processes(mut self, processes: u32) -> Salt {
        self.processes = processes;
        self
    }

    /// Nobody but heatsink, with this option, reads or writes the bare keys of counters. Then they
    /// are sealed too, so that a counter can be salted without waiting for anybody. Needs
    /// [`seal`](crate::Capability::seal). Default: others may use them, and are counted at once.
    #[must_use]
    pub fn exclusive(mut self) -> Salt {
        self.exclusive = true;
        self
    }

    /// Names slots `key#i` and chooses among them as the program of the article on hot keys does:
    /// 32-bit FNV-1a of the event's id, modulo the number of slots. Default: names that fall on
    /// different shards, and a choice without bias.
    #[must_use]
    pub fn parity(mut self) -> Salt {
        self.parity = true;
        self
    }

    /// Salts only what is pinned or scheduled. Default: with a
    /// [`ceiling`](crate::Detect::ceiling), also what is too hot for one shard.
    #[must_use]
    pub fn pins_only(mut self) -> Salt {
        self.automatic = false;
        self
    }

    /// One of the processes that have this writes the sum of every salted counter to a key of its own
    /// this often, so that [`Counter::total`](crate::Counter::total) of any process is one read
    /// however many slots there are. Who writes goes on for as long as it lives; when it does not, the
    /// value expires after four intervals, and another takes over. Needs
    /// [`compare_and_set`](crate::Capability::compare_and_set) of the store.
    ///
    /// Costs a sum and two operations an interval and counter, and each other process one read in three
    /// intervals. Default: nothing is written.
    #[must_use]
    pub fn totals(mut self, interval: Duration) -> Salt {
        self.totals = Some(interval);
        self
    }

    /// Where the list of salted counters and their records are kept. Default: in the store.
    #[must_use]
    pub fn registry(mut self, registry: impl Registry) -> Salt {
        self.registry = Some(Arc::new(registry));
        self
    }

    pub(crate) fn check(&self, can: &Capability) -> Result<()> {
        let ms = Duration::from_millis;
        let wrong = if self.registry.is_none() && !can.compare_and_set {
            "Salt needs a registry, and the store has no capability `compare_and_set`; pass one to \
             Salt::registry"
        } else if self.exclusive && !can.seal {
            "Salt::exclusive needs the capability `seal`, which the store does not have"
        } else if self.lease < ms(100) || self.lease > Duration::from_secs(600) {
            "Salt::lease must be 100 ms to 10 min"
        } else if self.timeout.is_zero() || self.timeout > self.lease / 3 {
            "Salt::timeout must be above zero, and at most a third of Salt::lease"
        } else if self.totals.is_some() && !can.compare_and_set {
            "Salt::totals needs the capability `compare_and_set`, which the store does not have"
        } else if self.totals.is_some_and(|every| every < ms(100) || every > ms(1 << 30)) {
            "Salt::totals must be at least 100 ms, and below 12 days"
        } else if self.grave < 2 * self.lease || self.sweep.is_zero() {
            "Salt::grave must be at least twice Salt::lease, and Salt::sweep above zero"
        } else if self.listed_max == 0 || self.listed_max > LISTED_MAX {
            "Salt::listed_max must be 1 to 4096"
        } else if self.slots_max == 0 || self.slots_max > SLOTS_MAX || self.processes == 0 {
            "Salt::slots_max must be 1 to 1024, and Salt::processes above zero"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }

    pub(crate) fn timing(&self, store_in_flight: Duration) -> Timing {
        Timing {
            lease: self.lease,
            drift_permille: DRIFT_PERMILLE,
            in_flight: self.in_flight.unwrap_or(store_in_flight),
        }
    }

    pub(crate) fn waits(&self, timing: &Timing, can: &Capability) -> Waits {
        Waits {
            readers: timing.everybody_knows(),
            writers: timing.writes_have_landed(),
            grave: self.grave,
            sweep: self.sweep,
            seal: can.seal,
            fold: can.fold.then_some(self.grave),
        }
    }
}

impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Salt")
            .field("lease", &self.lease)
            .field("grave", &self.grave)
            .field("exclusive", &self.exclusive)
            .finish_non_exhaustive()
    }
}

macro_rules! tallies {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Plain numbers about the salted counters of one instance, since it was built.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct SaltStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The same, being counted.
        #[derive(Default)]
        pub(crate) struct Tallies {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Tallies {
            pub(crate) fn read(&self) -> SaltStats {
                SaltStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

tallies! {
    /// Reads of the registry's root that renewed the lease, or tried to.
    renewals,
    /// Those that failed.
    renewals_failed,
    /// Times that a sibling's read of the root, which a [feed](crate::Heatsink) carried, renewed it.
    renewals_carried,
    /// Generations that this process announced.
    announced,
    /// Times that this process let writes go to what was announced.
    switched,
    /// Generations that this process retired.
    retired,
    /// Generations whose slots this process deleted.
    forgotten,
    /// Retired sums that this process brought back to the bare key.
    folded,
    /// Counters whose time was over, and which this process let begin again.
    expired,
    /// Steps of a rotation that failed, or that another process took first; they are tried again.
    steps_failed,
    /// Keys that were not salted: the registry is full, or the key expires and cannot be salted.
    refused,
    /// Adds that met a sealed slot and went to another.
    resent,
    /// Adds to a salted counter that went to its bare key, for want of a lease.
    bare,
    /// Sums that were begun again, since the counter changed under them.
    sums_again,
    /// Slots that were gone: evicted, or deleted by somebody.
    slots_missing,
    /// The amount that came to retired slots later than any add should, and was added by a sweep.
    late,
    /// The amount by which retired slots had gone down: the store has lost something.
    lost,
    /// The amount by which slots of a counter that [only grows](crate::GrowOnly) had gone down between
    /// two sums: the store has lost something.
    slots_lost,
    /// Times that the registry told of something older than it had before.
    registry_regressed,
}
