//! The fleet: reports and the list through the store that the service has already.
//!
//! One process is the *aggregator*: it holds a lease that it renews by compare-and-set, merges
//! reports as they arrive, and pushes the list. The lease's incarnation stands in every list and
//! fences off an earlier holder. Who hears nothing looks at the lease; where it does not move any
//! more, somebody else takes it, and goes on from the list in force. If nobody can, the list runs
//! out, and every process goes by its own detection, as before it joined.
//!
//! # What it costs the store
//!
//! With `R` reporters (one for a host whose processes share a sibling feed), every interval below
//! is the larger of its default (0.5 s) and `R / 500` s, so that neither reports nor heartbeats
//! exceed 500 a second in all, whatever the size of the fleet. Operations a second, where a
//! delivery to a subscriber is counted like an operation:
//!
//! | | 20 processes (1 host) | 2,000 (100 hosts) | 20,000 (1,000 hosts) |
//! |---|---|---|---|
//! | reporters | 1 | 100 | 1,000 |
//! | interval | 0.5 s | 0.5 s | 2 s |
//! | reports: published + delivered | 2 + 2 | 200 + 200 | 500 + 500 |
//! | heartbeats: published + delivered | 2 + 0 | 2 + 198 | 0.5 + 500 |
//! | lease renewed | 2 | 2 | 0.5 |
//! | operators' orders, and who could not publish: 5 keys read | 2.5 | 2.5 | 0.6 |
//! | all channels and keys together | 10.5 | 604.5 | 1,501 |
//! | the busiest key or channel | 4 | 200 | 500 |
//!
//! 1 % of a Redis shard is 1,000 operations a second. Channels (from 64 reporters on 4 for reports,
//! else one, and one for the list) and keys each have a hash slot of their own, so on a cluster of
//! two nodes and more no shard is above it; one node that serves 20,000 processes alone spends
//! 1.5 %. The list itself is pushed when a verdict changes only, and no sooner after the last one
//! than its bytes times `R` make 8 MiB a second: 20 keys (5 KiB) at once, and 4,096 keys (1 MiB) to
//! 1,000 hosts every two minutes; what changes within is conflated. While nothing is asked for, each
//! process of a fleet of any size, its aggregator included, sends and hears less than 1 KiB/s.
//!
//! A simulation counts the same with 1, 100 and 1,000 relays:
//! `cargo test --release --features feed,testing --lib feed::fleet::budget -- --nocapture`.
//!
//! What else processes tell each other goes past the feed, from each process by itself, and grows
//! with their number. Operations a second at the busiest name
//! (`cargo test --release --features feed --test feed budget -- --nocapture`):
//!
//! | | 20 processes | 2,000 | 20,000 |
//! |---|---|---|---|
//! | registry of salted counters, [`Salt::lease`](crate::Salt::lease) of 2 s | 30 | 3,000 | 30,000 |
//! | the same, of a minute | 1 | 100 | 1,000 |
//! | the same, read once for each host of 20 by [`serve_feed`](crate::Heatsink::serve_feed), lease of 2 s | 2.5 | 250 | 2,500 |
//! | the same, of a minute | 0.1 | 8.4 | 84 |
//! | announced writes while nothing is written, [`Invalidations::silence`](crate::Invalidations::silence) of 3 s | 22 | 2,101 | 21,001 |
//! | the same, of a minute | 2 | 200 | 2,000 |
//! | each announced write: 1.5 messages | 31 | 3,000 | 30,000 |
//!
//! So from some 600 processes on, 1 % asks for a longer silence, and for a longer lease unless hosts
//! have a feed: with one from 400 hosts on, where 5 s will do for 1,000. Announced writes, which are
//! delivered to each process, ask from 10,000 on for a node of their own.
//!
//! A process that is in a fleet without a feed of its host reads the registry by itself. That the
//! aggregator read it for the hosts too would spare little: in a fleet of 1,000 its rounds are 2 s
//! apart, too long for a lease of 2 s, and a lease of a minute costs 84 reads a second without it.

#[cfg(test)]
mod budget;
mod lead;
mod member;
mod metered;
mod region;
mod transport;
mod words;

pub use transport::{ThroughStore, Transport};

use super::group::Group;
use super::local::{Handle, Local};
use super::order::Order;
use super::stats::{Counters, FeedStats, Numbers};
use super::wire::{self, Message};
use crate::Ceiling;
use crate::engine::control::aggregate;
use crate::engine::control::fleet::FleetList;
use crate::engine::control::follow::{Caps, Follower};
use crate::engine::control::merge::Report;
use crate::engine::control::salt::{fnv1a_64, mix};
use crate::engine::control::treat;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::key::Key;
use crate::runtime::{self, Clock, Runtime};
use crate::store::Store;
use bytes::Bytes;
use member::{Member, read_beat};
use metered::Metered;
use parking_lot::Mutex;
use region::Above;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;
use words::{STORED_FOR, Words};

/// How a process, or a host's serving process, takes part in a fleet.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, store::MemoryStore};
/// use heatsink::feed::Fleet;
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let store = MemoryStore::new(8); // or a RedisStore
/// let hs = Heatsink::new(store.clone())?;
/// let fleet = hs.join_fleet(Fleet::over(store)?.promote_at(500.0))?;
/// assert!(fleet.list().is_none(), "nothing has been decided yet");
/// # Ok::<(), heatsink::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
#[must_use]
pub struct Fleet {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) prefix: String,
    pub(super) promote_at: f64,
    pub(super) ceiling: Option<Ceiling>,
    pub(super) ttl: Duration,
    pub(super) interval: Duration,
    pub(super) caps: Caps,
    pub(super) lead: bool,
    pub(super) report: bool,
    pub(super) obey: bool,
    above: Option<Arc<Above>>,
}

impl Fleet {
    /// A fleet whose processes meet in `store`. Nothing is written to it before
    /// [`join_fleet`](Heatsink::join_fleet).
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) where the store lacks `compare_and_set` or
    /// `publish`.
    pub fn over(store: impl Store) -> Result<Fleet> {
        Ok(Fleet::by(ThroughStore::new(store)?))
    }

    /// A fleet whose processes meet in another way.
    pub fn by(transport: impl Transport) -> Fleet {
        Fleet {
            transport: Arc::new(transport),
            prefix: "hs:feed:".into(),
            promote_at: 1_000.0,
            ceiling: None,
            ttl: Duration::from_secs(5),
            interval: Duration::from_millis(500),
            caps: Caps::default(),
            lead: true,
            report: true,
            obey: true,
            above: None,
        }
    }

    /// What all names of this fleet in the store begin with. Fleets with other prefixes know
    /// nothing of each other. Default: `hs:feed:`; grant access to `hs:feed:*`, keys and channels.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Fleet {
        self.prefix = prefix.into();
        self
    }

    /// A key that all processes together ask for this many times a second is hot for each of them.
    /// Default: 1,000.
    pub fn promote_at(mut self, per_sec: f64) -> Fleet {
        self.promote_at = per_sec;
        self
    }

    /// What one shard can serve; with it, the list advises copies, slots or shedding.
    /// Default: not known.
    pub fn ceiling(mut self, ceiling: Ceiling) -> Fleet {
        self.ceiling = Some(ceiling);
        self
    }

    /// How long a list stays in force without a heartbeat. Default: 5 s.
    pub fn ttl(mut self, ttl: Duration) -> Fleet {
        self.ttl = ttl;
        self
    }

    /// What is accepted of a list, whoever sends it.
    pub fn caps(mut self, caps: Caps) -> Fleet {
        self.caps = caps;
        self
    }

    /// Never becomes the aggregator.
    pub fn never_lead(mut self) -> Fleet {
        self.lead = false;
        self
    }

    /// Follows and shows the list, and obeys nothing.
    pub fn watch_only(mut self) -> Fleet {
        self.obey = false;
        self
    }

    /// Obeys, and reports nothing.
    pub fn report_nothing(mut self) -> Fleet {
        self.report = false;
        self
    }

    /// This fleet is one region of a larger one. Whoever leads the region joins `above` for it: all
    /// that the region asks for is one report there, and the list from there goes before what the
    /// region has found, on the region's own list. So every process meets its own region's store
    /// only. `name` tells the regions apart.
    ///
    /// Each fleet of such a chain has a prefix of its own, also where their stores are apart. Fleets
    /// that are within each other in a circle cannot be told from others here: what one of them
    /// finds would stay on all lists for good.
    ///
    /// The two thresholds are apart. Among three regions and more, one alone counts for half of
    /// the threshold above, so that of a region is best no higher than that.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore, feed::Fleet};
    /// # let (regional, global) = (MemoryStore::new(8), MemoryStore::new(8));
    /// # let rt = tokio::runtime::Runtime::new().unwrap();
    /// # let _in = rt.enter();
    /// # let hs = Heatsink::new(regional.clone())?;
    /// let all = Fleet::over(global)?.prefix("hs:feed:all:").promote_at(2_000.0);
    /// let europe = Fleet::over(regional)?.promote_at(1_000.0).within("europe", all);
    /// let member = hs.join_fleet(europe)?;
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn within(mut self, name: &str, above: Fleet) -> Fleet {
        // Any language can hold 53 bits.
        let reporter = mix(fnv1a_64(name.as_bytes())) >> 11;
        self.above = Some(Arc::new(Above { fleet: above, reporter }));
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        self.above.as_ref().map_or(Ok(()), |above| above.fleet.check())?;
        // Its leader would contend with itself for one lease.
        let above = || std::iter::successors(self.above.as_deref(), |a| a.fleet.above.as_deref());
        if above().any(|above| above.fleet.prefix == self.prefix) {
            return Err(Error::config("a fleet within another needs a prefix of its own"));
        }
        let wrong = if !self.promote_at.is_finite() || self.promote_at <= 0.0 {
            "Fleet::promote_at must be above zero"
        } else if self.ttl < Duration::from_secs(3) || self.ttl > self.caps.ttl_max {
            "Fleet::ttl must be from 3 s to Caps::ttl_max"
        } else {
            return Ok(());
        };
        Err(Error::config(wrong))
    }

    fn aggregate(&self) -> aggregate::Options {
        aggregate::Options {
            promote_per_sec: self.promote_at,
            entries_max: self.caps.entries_max,
            treat: treat::Options { ceiling: self.ceiling, ..treat::Options::default() },
            ..aggregate::Options::default()
        }
    }

    fn name(&self, part: &str) -> Key {
        Key::from(format!("{}{part}", self.prefix))
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// What a membership shows to who holds it.
pub(super) struct Shown {
    pub(super) alive: AtomicBool,
    pub(super) follower: Mutex<Follower>,
    pub(super) counters: Counters,
    pub(super) reports: Mutex<(aggregate::Counts, usize)>,
    pub(super) list: watch::Sender<Option<Arc<FleetList>>>,
}

impl Shown {
    fn new(caps: Caps) -> Shown {
        Shown {
            alive: AtomicBool::new(true),
            follower: Mutex::new(Follower::new(caps)),
            counters: Counters::default(),
            reports: Mutex::default(),
            list: watch::Sender::new(None),
        }
    }

    fn stats(&self, local: &dyn Local) -> FeedStats {
        let follower = self.follower.lock();
        let (reports, reporters) = *self.reports.lock();
        FeedStats {
            edition: follower.list().map(|l| l.edition),
            lists: follower.counts(),
            reports,
            reporters: reporters as u64,
            unobeyed: local.unobeyed(),
            keys_too_long: local.too_long(),
            ..self.counters.read()
        }
    }
}

/// A process's part in a fleet. Dropping it leaves: the process goes by its own detection again.
#[must_use = "dropping it leaves the fleet"]
pub struct Membership {
    shown: Arc<Shown>,
    local: Arc<dyn Local>,
    fleet: Fleet,
    /// Lives as long as the membership does.
    _told: Arc<Told>,
}

struct Told(Arc<Shown>, Weak<dyn Local>);

impl Numbers for Told {
    fn numbers(&self) -> FeedStats {
        self.1.upgrade().map(|local| self.0.stats(&*local)).unwrap_or_default()
    }

    fn lapse(&self) {
        if let Some(local) = self.1.upgrade() {
            local.lapse();
        }
    }
}

impl Membership {
    /// The list in force.
    #[must_use]
    pub fn list(&self) -> Option<Arc<FleetList>> {
        self.shown.list.borrow().clone()
    }

    /// Plain numbers about it.
    #[must_use]
    pub fn stats(&self) -> FeedStats {
        self.shown.stats(&*self.local)
    }

    /// Orders something in the whole fleet: every process obeys as soon as the aggregator has put
    /// it on the list, within two seconds where reports come twice a second. It holds for a day, or
    /// as long as the order says, while a list is in force. Whether there was something to take
    /// back.
    ///
    /// # Cost
    /// Store operations: two reads, a compare-and-set and a publish; up to eight of each where others
    /// give orders at the same time.
    ///
    /// # Cancel safety
    /// Dropped before its end, the order may have been given or not.
    ///
    /// # Errors
    /// [`Limit`](crate::ErrorKind::Limit) for a key that is longer than the fleet's
    /// [`Caps`], too many parts, or more than 1,024 orders;
    /// [`Config`](crate::ErrorKind::Config) when this host's clock and the aggregator's differ by
    /// more than [`Caps::skew`](super::Caps::skew), since orders end by the clock; those of the
    /// transport.
    pub async fn order(&self, key: impl AsRef<[u8]>, order: Order) -> Result<bool> {
        let key = Key::copy(key.as_ref());
        let caps = &self.fleet.caps;
        order.check(&key, caps).map_err(|text| Error::not_applied(ErrorKind::Limit, text))?;
        let (slot, transport) = (self.fleet.name("orders"), &self.fleet.transport);
        for _ in 0..8 {
            let slots = vec![slot.clone(), self.fleet.name("lease")];
            let mut got = transport.get_many(slots).await.into_iter();
            let orders = got.next().unwrap_or(Ok(None))?;
            let lease = got.next().unwrap_or(Ok(None))?;
            let wall = self.local.clock().wall_ms();
            agree(wall, lease.as_deref(), caps.skew)?;
            let mut words = Words::read(orders.as_deref())?;
            let was = words.follow(wall, caps.skew, &key, &order)?;
            words.version += 1;
            let next = Bytes::from(words.write());
            if transport.compare_and_set(slot.clone(), orders, next, STORED_FOR).await? {
                let line = wire::line(&Message::Ordered(words.version)).into();
                // Only a hint: the aggregator looks by itself too.
                let _ = transport.publish(self.fleet.name("reports.0"), line).await;
                return Ok(was);
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "too many give orders at once"))
    }
}

/// An order is not given by a clock that is far from the aggregator's: it would end at another
/// time than was meant, and end others'.
fn agree(wall_ms: u64, lease: Option<&[u8]>, skew: Duration) -> Result<()> {
    let Some(beat) = lease.and_then(read_beat) else { return Ok(()) };
    let apart = Duration::from_millis(wall_ms.abs_diff(beat.sent_ms));
    if apart <= skew {
        return Ok(());
    }
    let side = if wall_ms > beat.sent_ms { "ahead of" } else { "behind" };
    let secs = apart.as_secs();
    let text = format!("this host's clock is {secs} s {side} the fleet's aggregator's");
    Err(Error::not_applied(ErrorKind::Config, text))
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shown.alive.store(false, Ordering::Release);
        self.local.release();
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Membership({})", self.stats())
    }
}

impl Heatsink {
    /// Reports what this process asks its store for, and obeys the list that the fleet makes of
    /// all reports. Runs until the membership or the last handle is dropped.
    ///
    /// # Cost
    /// See the [module's description](crate::feed). Store operations on the way of a request: 0.
    ///
    /// # Errors
    /// [`Config`](crate::ErrorKind::Config), also when this handle has a feed already. The store
    /// need not be reachable yet.
    pub fn join_fleet(&self, fleet: Fleet) -> Result<Membership> {
        fleet.check()?;
        let shared = self.shared();
        let local = Arc::new(Handle::new(shared, fleet.report, fleet.obey)?);
        Ok(start(fleet, local, shared.runtime.clone(), shared.roll(), None))
    }
}

fn start(
    mut fleet: Fleet,
    local: Arc<dyn Local>,
    runtime: Arc<dyn Runtime>,
    roll: u64,
    reporter: Option<u64>,
) -> Membership {
    let shown = Arc::new(Shown::new(fleet.caps));
    fleet.transport = Arc::new(Metered { inner: fleet.transport, shown: shown.clone() });
    // Any language can hold 53 bits.
    let (id, own) = (roll >> 11, fleet.clone());
    let ids = (id, reporter.unwrap_or(id));
    let member = Member::new(fleet, local.clone(), runtime.clone(), shown.clone(), ids);
    runtime.spawn(Box::pin(member.run()));
    let told = Arc::new(Told(shown.clone(), Arc::downgrade(&local)));
    let numbers: Weak<Told> = Arc::downgrade(&told);
    local.is_told_by(numbers);
    Membership { shown, local, fleet: own, _told: told }
}

/// A host's serving process as the relay of its siblings.
pub(super) fn relay(group: &Arc<Group>, local: &Arc<dyn Local>, fleet: Fleet) -> Membership {
    let (report, obey) = (fleet.report, fleet.obey);
    let relay = Arc::new(Relay { group: group.clone(), local: local.clone(), report, obey });
    start(fleet, relay, runtime::ambient(), runtime::wall_seed(), None)
}

struct Relay {
    group: Arc<Group>,
    local: Arc<dyn Local>,
    report: bool,
    obey: bool,
}

impl Local for Relay {
    fn clock(&self) -> Clock {
        self.local.clock()
    }

    fn take_report(&self, _: Tick, floor_per_sec: f64) -> Option<Report> {
        let most = crate::engine::control::reporter::ENTRIES_MAX;
        self.report.then(|| self.group.host_report(most, floor_per_sec))
    }

    fn apply(&self, list: Option<(&Arc<FleetList>, Tick)>) {
        if self.obey {
            self.group.upstream(list.map(|(list, _)| list.clone()));
        }
    }

    fn explain(&self, key: &[u8]) -> Option<String> {
        self.local.explain(key)
    }

    fn alive(&self) -> bool {
        self.local.alive()
    }

    fn unobeyed(&self) -> u64 {
        self.local.unobeyed()
    }

    fn release(&self) {
        self.group.upstream(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::control::fleet::{Edition, Heartbeat};

    #[test]
    fn an_order_is_refused_where_the_clock_is_far_from_the_aggregators() {
        let (now, skew) = (1_796_061_600_000_u64, Duration::from_secs(60));
        let every = Duration::from_secs(1);
        let beat = Heartbeat {
            issuer: 1,
            edition: Edition { incarnation: now, version: 1 },
            ttl: every,
            sent_ms: now,
            canary_ms: now,
            interval: every,
            report_every: every,
            quiet_every: every,
            floor_per_sec: 0.0,
            reports_stored: false,
            channels: 1,
        };
        let lease = wire::line(&Message::Lease(wire::Lease::of(&beat)));
        let half_an_hour = 30 * 60_000;
        for wall in [now - 60_000, now, now + 60_000] {
            assert!(agree(wall, Some(&lease), skew).is_ok());
        }
        let told = agree(now + half_an_hour, Some(&lease), skew).unwrap_err();
        assert!(told.to_string().contains("1800 s ahead of the fleet's"), "{told}");
        assert_eq!(told.kind(), ErrorKind::Config);
        assert!(agree(now - half_an_hour, Some(&lease), skew).is_err());
        assert!(agree(now + half_an_hour, None, skew).is_ok(), "nobody leads yet");
    }
}
