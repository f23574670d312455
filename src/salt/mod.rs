//! Salted counters: where an add goes, what a sum reads, and the rotations that change it. What is
//! safe when is decided in `engine/control/{salt,registry,rotation}`.

mod automatic;
mod coordinator;
mod event;
mod expiry;
mod join;
mod joins;
#[cfg(feature = "testing")]
mod mutants;
mod options;
mod schedule;
mod steps;
mod sums;
mod totals;

pub(crate) use event::add_event;
pub use event::{Counted, Redelivery};
pub(crate) use joins::{add_plain, read_plain};
#[cfg(feature = "testing")]
pub use mutants::{SaltMutant, record_name, slot_name};
pub use options::{Salt, SaltStats};

use crate::adds::Cell;
use crate::batch::bounded;
use crate::call;
use crate::counter::{integer, not_a_number};
#[cfg(feature = "feed")]
use crate::engine::control::registry::Root;
use crate::engine::control::registry::{Lookup, Record, SALT as PART};
use crate::engine::control::rotation::{Waits, Want};
use crate::engine::control::salt::{self as plan, Gen, Kind, Pick, Slot};
use crate::engine::data::joined::Op;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::names;
use crate::registry::{InStore, Registrar, lease_clock};
use crate::shared::Shared;
use crate::store::DynStore;
use crate::sync::Mutex;
use coordinator::Jobs;
use expiry::Begun;
use options::Tallies;
use schedule::Planned;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use totals::Totals;

/// An add that meets sealed slots is sent this often at most; each time it was not applied.
const ADD_TRIES: u32 = 12;

/// From the third refusal under one record on, the caller finishes what another has begun.
const HELP_AFTER: u32 = 3;

/// Sums that change under the reader are begun again this often.
const SUM_TRIES: usize = 16;

/// The salted counters of one instance.
pub(crate) struct Salted {
    pub(crate) options: Salt,
    pub(crate) registrar: Registrar,
    waits: Waits,
    jobs: Mutex<Jobs>,
    planned: Mutex<Planned>,
    totals: Mutex<Totals>,
    /// Counters whose time is over, of which one task of this process lets each begin again.
    expiring: Mutex<BTreeMap<Key, Begun>>,
    renewing: AtomicBool,
    /// When the hot list was last looked at, in nanoseconds of the lease clock.
    looked: AtomicU64,
    /// No renewal before then, in nanoseconds of the lease clock: the last one failed.
    paused_until: AtomicU64,
    pub(crate) tallies: Tallies,
    #[cfg(feature = "testing")]
    pub(crate) broken: std::sync::atomic::AtomicU8,
}

fn count(tally: &AtomicU64, n: u64) {
    tally.fetch_add(n, Ordering::Relaxed);
}

/// What a sum goes by.
#[derive(Clone, PartialEq, Eq, Debug)]
enum View {
    /// A plain counter, until then.
    Plain(Tick),
    /// A salted one, by the record of this version and nonce, until then.
    Salted(plan::Salt, (u64, u64), Tick),
}

impl Salted {
    pub(crate) fn new(options: &Salt, store: &Arc<dyn DynStore>) -> Salted {
        let can = store.capability();
        let timing = options.timing(store.max_in_flight_time());
        let in_store =
            || -> Arc<dyn crate::registry::Registry> { Arc::new(InStore(store.clone())) };
        let registry = options.registry.clone().unwrap_or_else(in_store);
        Salted {
            registrar: Registrar::new(registry, timing, options.listed_max, options.timeout),
            waits: options.waits(&timing, &can),
            options: options.clone(),
            jobs: Mutex::new(Jobs::default()),
            planned: Mutex::new(Planned::default()),
            totals: Mutex::new(Totals::default()),
            expiring: Mutex::new(BTreeMap::new()),
            renewing: AtomicBool::new(false),
            looked: AtomicU64::new(0),
            paused_until: AtomicU64::new(0),
            tallies: Tallies::default(),
            #[cfg(feature = "testing")]
            broken: std::sync::atomic::AtomicU8::new(0),
        }
    }

    /// Whether a counter can be salted without waiting for anybody.
    fn may_seal_home(&self) -> bool {
        self.waits.seal && self.options.exclusive
    }

    /// What a record says of the counter; a record without that part is of a plain one.
    fn plan_of(&self, record: &Record) -> Result<plan::Salt> {
        self.known_plan(record).map(Arc::unwrap_or_clone)
    }

    /// The same without a copy.
    fn known_plan(&self, record: &Record) -> Result<Arc<plan::Salt>> {
        match record.salt() {
            Some(plan) => Ok(plan.clone()),
            None if record.part(PART).is_none() => {
                Ok(Arc::new(plan::Salt::new(self.options.exclusive)))
            }
            None => {
                let text = "the record of the counter is unreadable";
                Err(Error::not_applied(ErrorKind::Codec, text))
            }
        }
    }

    /// Renews the lease unless that is being done; a failure is counted, and tried again later.
    async fn renew(&self, shared: &Arc<Shared>) -> Result<()> {
        count(&self.tallies.renewals, 1);
        let renewed = self.registrar.renew(shared).await;
        if renewed.is_err() {
            count(&self.tallies.renewals_failed, 1);
            let pause = self.options.lease / 12;
            let until = lease_clock(&shared.clock).after(pause);
            self.paused_until.store(until.0, Ordering::Relaxed);
        }
        renewed
    }

    /// Reads the root for this process and for others.
    #[cfg(feature = "feed")]
    pub(crate) async fn read_for_all(&self, shared: &Arc<Shared>) -> Result<Root> {
        count(&self.tallies.renewals, 1);
        let read = self.registrar.read_for_all(shared).await;
        count(&self.tallies.renewals_failed, u64::from(read.is_err()));
        self.look_for_work(shared);
        read
    }

    /// Another process has read the root, after this one asked it to at `sent`.
    #[cfg(feature = "feed")]
    pub(crate) fn carried(&self, shared: &Arc<Shared>, sent: Tick, root: Root) {
        let now = lease_clock(&shared.clock);
        let renewed = self.registrar.with(|catalog| catalog.handle_carried(now, sent, root));
        if renewed {
            count(&self.tallies.renewals_carried, 1);
            self.look_for_work(shared);
        }
    }

    /// What is known of `key` for a reader; asks where nothing is.
    async fn view(&self, shared: &Arc<Shared>, key: &Key, op: Op) -> Result<View> {
        let mut begun = false;
        for _ in 0..SUM_TRIES {
            let now = lease_clock(&shared.clock).after(shared.clock.resolution());
            let (stale, known) = self.registrar.with(|catalog| match catalog.lookup(now, key) {
                Lookup::Absent(until) => (false, Some(Ok(View::Plain(until)))),
                Lookup::Record(record, until) => {
                    let view = |salt| View::Salted(salt, (record.version, record.nonce), until);
                    (false, Some(self.plan_of(record).map(view)))
                }
                Lookup::Stale(_) => (true, None),
                Lookup::Lapsed(_) => (false, None),
            });
            match known {
                Some(view) => {
                    let view = view?;
                    if let View::Salted(plan, ..) = &view {
                        Salted::check_op(plan, key, op)?;
                        if plan.is_expired(shared.clock.wall_ms()) {
                            let now = self.expire(shared, key).await?;
                            if !std::mem::replace(&mut begun, true) {
                                continue;
                            }
                            // The registry has lost what is known here. What it says now is looked
                            // at again after the sum.
                            let record = now.ok_or_else(gone)?;
                            let by = (record.version, record.nonce);
                            return Ok(View::Salted(self.plan_of(&record)?, by, Tick::ZERO));
                        }
                    }
                    return Ok(view);
                }
                None if stale => {
                    if self.registrar.load(shared, key).await?.is_none() {
                        return Err(gone());
                    }
                }
                None => self.renew(shared).await?,
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "the registry changes faster than it can be read"))
    }

    /// Where the next add goes. Whoever cannot tell adds to the bare key, which is always read; that
    /// of an exclusive counter is sealed, and says so.
    async fn target(
        &self,
        shared: &Arc<Shared>,
        (key, op): (&Key, Op),
        pick: Pick<'_>,
    ) -> Result<Slot> {
        let home = Slot { of: plan::HOME, index: 0 };
        let seals = self.waits.seal || op.joins();
        let (mut attempt, mut begun) = (0, None);
        while attempt < 2 {
            let now = lease_clock(&shared.clock).after(shared.clock.resolution());
            // Without seals an add must have ended before the lease does.
            let margin = if seals { Duration::ZERO } else { self.options.timeout };
            let (plan, valid, stale) = self.registrar.with(|catalog| {
                let (record, valid, stale) = match catalog.lookup(now, key) {
                    Lookup::Absent(_) => (None, true, false),
                    Lookup::Record(record, until) => {
                        (Some(record), self.ignores_leases() || now.after(margin) < until, false)
                    }
                    Lookup::Stale(record) => (record, false, true),
                    Lookup::Lapsed(record) => {
                        // A seal refuses whoever is behind, for as long as the slots are there.
                        let late = now.since(catalog.until());
                        let sealed = seals && late < self.options.grave / 2;
                        (record, self.ignores_leases() || (record.is_some() && sealed), false)
                    }
                };
                // A seal refuses whoever is behind; slots of a key that has left may be gone.
                let sealed = stale && seals && !catalog.has_left(key);
                (record.map(|record| self.known_plan(record)).transpose(), valid || sealed, stale)
            });
            let mut plan = plan?;
            if let Some(known) = &plan {
                Salted::check_op(known, key, op)?;
                if known.is_expired(shared.clock.wall_ms()) {
                    // What is written from now on is not to go with what was there.
                    let Some(now) = &begun else {
                        begun = Some(self.expire(shared, key).await?);
                        continue;
                    };
                    // The registry has lost what is known here: what it says now is in force.
                    plan = now.as_ref().map(|record| self.known_plan(record)).transpose()?;
                }
            }
            attempt += 1;
            match plan {
                _ if stale && attempt == 1 => {
                    // What cannot be read leaves what is known.
                    drop(self.registrar.load(shared, key).await);
                }
                Some(plan) if valid => {
                    return Ok(plan.write_target(pick));
                }
                None => return Ok(home),
                Some(_) if !self.options.exclusive || op.joins() => {
                    count(&self.tallies.bare, 1);
                    return Ok(home);
                }
                Some(_) if attempt == 1 => self.renew(shared).await?,
                Some(_) => break,
            }
        }
        let text = "the registry of salted counters cannot be reached";
        Err(Error::not_applied(ErrorKind::Store, text).with_key(key))
    }

    /// Adds an amount, made of so many adds, to the counter of `cell`, wherever it is now.
    pub(crate) async fn add(
        &self,
        shared: &Arc<Shared>,
        cell: &Arc<Cell>,
        (amount, adds): (i64, u64),
    ) -> Result<()> {
        cell.weigh(adds);
        let store = shared.store.clone();
        let send = |name: Key, _, _| -> crate::runtime::BoxFuture<'static, Result<i64>> {
            store.clone().add(name, amount)
        };
        self.sent(shared, (&cell.key, Op::Sum), |_| Pick::Random(shared.roll()), send)
            .await
            .map(drop)
    }

    /// One write to the slot that `pick` chooses, sent again only where it was surely not applied:
    /// the slot is sealed. `send` is told whether it is the bare key, and whether it was refused
    /// before.
    async fn sent<'a, T>(
        &self,
        shared: &Arc<Shared>,
        of: (&Key, Op),
        pick: impl Fn(u32) -> Pick<'a>,
        send: impl Fn(Key, bool, bool) -> crate::runtime::BoxFuture<'static, Result<T>>,
    ) -> Result<T> {
        let mut doubt = false;
        let answer = self.sent_on(shared, of, pick, send, &mut doubt).await;
        answer.map_err(|error| error.after(doubt))
    }

    /// The same; an earlier attempt may have been applied if `doubt`.
    async fn sent_on<'a, T>(
        &self,
        shared: &Arc<Shared>,
        (key, op): (&Key, Op),
        pick: impl Fn(u32) -> Pick<'a>,
        send: impl Fn(Key, bool, bool) -> crate::runtime::BoxFuture<'static, Result<T>>,
        doubt: &mut bool,
    ) -> Result<T> {
        let mut refused_under = None;
        for attempt in 0..ADD_TRIES {
            let slot = self.target(shared, (key, op), pick(attempt)).await?;
            let bare = slot.of.kind == Kind::Home;
            let limit = if bare { shared.options.loads.timeout } else { self.options.timeout };
            let call = send(self.name(key, slot), bare, refused_under.is_some());
            let answer = match bounded(shared, limit, call::catch(call)).await {
                Some(Ok(answer)) => answer,
                Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
                None => {
                    let text = "the store did not answer in time";
                    Err(Error::unknown(ErrorKind::Timeout, text))
                }
            };
            match answer {
                // What joins may have been stored before the seal: once more is the same.
                Err(e) if e.kind() == ErrorKind::Sealed && (op.joins() || !e.is_unknown()) => {
                    *doubt |= e.is_unknown();
                }
                #[cfg(feature = "testing")]
                Err(e) if e.is_unknown() && self.is_broken(SaltMutant::AddsAgain) => continue,
                answer => return answer,
            }
            count(&self.tallies.resent, 1);
            let now = self.registrar.load(shared, key).await?;
            let version = now.map(|record| record.version);
            if refused_under != Some(version) {
                refused_under = Some(version);
                continue;
            }
            // Somebody has sealed what is in use, and is about to say where to go.
            if attempt >= HELP_AFTER {
                self.finish(shared, key).await?;
            } else {
                shared.runtime.sleep(Duration::from_millis(1 << attempt.min(6))).await;
            }
        }
        let text = "the counter is sealed, and nobody has said where it goes on";
        Err(Error::not_applied(ErrorKind::Sealed, text).with_key(key))
    }

    /// The physical name of a slot.
    fn name(&self, key: &Key, slot: Slot) -> Key {
        let kind = if self.options.parity { Kind::Parity } else { slot.of.kind };
        names::slot(key, Slot { of: Gen { kind, ..slot.of }, ..slot })
    }

    /// What is known of `key` now, for people; nobody is asked.
    pub(crate) fn known(&self, shared: &Shared, key: &Key) -> Option<plan::Salt> {
        let now = lease_clock(&shared.clock);
        self.registrar.with(|catalog| match catalog.lookup(now, key) {
            Lookup::Absent(_) => None,
            Lookup::Record(record, _) => self.plan_of(record).ok(),
            Lookup::Stale(record) | Lookup::Lapsed(record) => {
                record.and_then(|record| self.plan_of(record).ok())
            }
        })
    }

    /// How `key` is salted, for people; `None` for a plain counter that nobody wants to be more.
    pub(crate) fn salting(&self, shared: &Shared, key: &Key) -> Option<Salting> {
        let plan = self.known(shared, key);
        let (want, pinned) = self.wanted(key);
        let wanted = if want == Want::Home { Some(1) } else { want.slots() };
        if plan.as_ref().is_none_or(plan::Salt::is_plain) && want.slots().is_none() {
            return None;
        }
        let plan = plan.unwrap_or_else(|| self.first_plan(shared, key));
        let version = self.registrar.with(|c| c.record(key).map_or(0, |record| record.version));
        let others = |s: &Slot| s.of.id != plan.cur.id && s.of.kind != Kind::Home;
        Some(Salting {
            slots: plan.cur.k,
            generation: plan.cur.id,
            in_rotation: plan.read_set().filter(others).count(),
            retired: plan.retired,
            version,
            wanted,
            pinned,
        })
    }

    /// Whether `key` is known to be a salted counter.
    pub(crate) fn is_salted(&self, shared: &Shared, key: &Key) -> bool {
        let listed = self.registrar.with(|catalog| catalog.list().get(key).is_some());
        listed && self.known(shared, key).is_none_or(|plan| !plan.is_plain())
    }

    pub(crate) fn stats(&self) -> SaltStats {
        SaltStats { registry_regressed: self.registrar.regressed(), ..self.tallies.read() }
    }
}

/// Starts a counter again from zero.
pub(crate) async fn reset(shared: &Arc<Shared>, key: &Key) -> Result<()> {
    if let Some(salted) = &shared.salted
        && matches!(salted.view(shared, key, Op::Sum).await?, View::Salted(..))
    {
        return salted.reset(shared, key).await;
    }
    let store = &shared.store;
    for _ in 0..SUM_TRIES {
        let Some(stored) = store.clone().get(key.clone()).await? else { return Ok(()) };
        integer(&stored.bytes).ok_or_else(|| not_a_number(key))?;
        let (was, zero) = (Some(stored.bytes), bytes::Bytes::from_static(b"0"));
        if store.clone().compare_and_set(key.clone(), was, zero, stored.ttl_left).await? {
            return Ok(());
        }
    }
    Err(Error::not_applied(ErrorKind::Store, "the counter changes faster than it can be reset"))
}

/// The error of a raw call on a key that is a salted counter; `None` for any other key.
pub(crate) fn refused(shared: &Shared, key: &Key, call: &str) -> Option<Error> {
    let salted = shared.salted.as_ref()?;
    salted.is_salted(shared, key).then(|| {
        let op = salted.known(shared, key).map_or(Op::Sum, |plan| plan.op);
        let text = if op.joins() {
            format!("the key is salted as a {}: call {}", op.word(), joins::call_of(op))
        } else {
            format!("the key is a salted counter: call Heatsink::counter(key).{call}()")
        };
        Error::not_applied(ErrorKind::WrongType, text).with_key(key)
    })
}

/// How a counter is salted, as this process knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Salting {
    /// Slots that are written to; 1 is a counter in one place.
    pub slots: u16,
    /// The number of their generation; 0 is the bare key before it was ever salted.
    pub generation: u32,
    /// Slots that are announced, or were and are not retired yet.
    pub in_rotation: usize,
    /// What retired generations came to.
    pub retired: i64,
    /// The version of the record; 0 for none.
    pub version: u64,
    /// The slots that this process wants, and 1 where it wants one place again.
    pub wanted: Option<u16>,
    /// By an operator's word.
    pub pinned: bool,
}

impl fmt::Display for Salting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "written to {} slots (generation {})", self.slots, self.generation)?;
        if self.in_rotation > 0 {
            write!(f, ", {} others are read too", self.in_rotation)?;
        }
        match self.wanted {
            Some(slots) if self.pinned => write!(f, ", pinned to {slots}"),
            Some(slots) => write!(f, ", its traffic asks for {slots}"),
            None => Ok(()),
        }
    }
}

fn gone() -> Error {
    Error::not_applied(ErrorKind::Store, "the list names a record that is not there")
}

/// The tag under which the slots of one generation are sealed, whoever does it.
fn tag(key: &Key, of: Gen) -> u64 {
    plan::mix(plan::fnv1a_64(key) ^ u64::from(of.id))
}

#[cfg(not(feature = "testing"))]
impl Salted {
    #[expect(clippy::unused_self, reason = "tests switch it")]
    fn ignores_leases(&self) -> bool {
        false
    }

    fn waits(&self) -> Waits {
        self.waits
    }

    #[expect(clippy::unused_self, reason = "tests switch it")]
    fn trusts_what_it_reads(&self) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "tests switch it")]
    fn ignores_marks(&self) -> bool {
        false
    }
}
