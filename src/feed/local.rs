//! What a feed is for: the traffic that it reports, and what obeys the list.

use crate::engine::control::fleet::{FleetKey, FleetList};
use crate::engine::control::merge::Report;
use crate::engine::control::registry::Root;
use crate::engine::control::rotation::Want;
use crate::engine::control::salt::SLOTS_MAX;
use crate::engine::control::steering::Steering;
use crate::engine::control::treat::Treatment;
use crate::engine::time::Tick;
use crate::error::{Error, Result};
use crate::explain::Explanation;
use crate::feed::stats::Numbers;
use crate::key::Key;
use crate::registry::lease_clock;
use crate::runtime::Clock;
use crate::shared::Shared;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// One process, as its feed sees it.
pub(crate) trait Local: Send + Sync + 'static {
    fn clock(&self) -> Clock;

    /// What was asked for since the last report. `None` without a reporter, or when all is over.
    fn take_report(&self, now: Tick, floor_per_sec: f64) -> Option<Report>;

    /// Keys that were left out of reports for their length.
    fn too_long(&self) -> u64 {
        0
    }

    /// This list is in force from now on, or none.
    fn apply(&self, list: Option<&Arc<FleetList>>);

    fn explain(&self, key: &[u8]) -> Option<String>;

    /// The lease on the registry of salted counters, and what its clock says now; `None` without.
    fn lease(&self) -> Option<(Tick, Duration)> {
        None
    }

    /// Reads the root of the registry, for this process and for others. An answer that does not
    /// come is a read that has failed.
    fn read_root(&self) -> Option<oneshot::Receiver<Root>> {
        None
    }

    /// Another process has read the root, after this one asked it to at `sent`.
    fn carry(&self, _sent: Tick, _root: Root) {}

    /// Keys of the list in force whose treatment this process is not set up for.
    fn unobeyed(&self) -> u64 {
        0
    }

    /// Who can tell of the feed from now on.
    fn is_told_by(&self, _: Weak<dyn Numbers>) {}

    /// False when the process needs no feed any more.
    fn alive(&self) -> bool;

    /// The feed has ended: nothing of it is in force, and another one may begin.
    fn release(&self);
}

/// A handle of heatsink. The feed does not keep it alive.
pub(crate) struct Handle {
    shared: Weak<Shared>,
    clock: Clock,
    /// Which feed of the handle's.
    feed: u64,
    report: bool,
    obey: bool,
    /// Counters that the list has this process salt, and into how many slots.
    salted: Mutex<BTreeMap<Key, u16>>,
    unobeyed: AtomicU64,
    released: AtomicBool,
}

impl Handle {
    /// # Errors
    /// A handle has one feed: two would each hear half of its traffic.
    pub(crate) fn new(shared: &Arc<Shared>, report: bool, obey: bool) -> Result<Handle> {
        let clock = shared.clock.clone();
        let mut steering = shared.steering.lock();
        let Some(feed) = steering.begin_feed() else {
            let text = "this handle has a feed already; serve_feed_with takes a fleet too";
            return Err(Error::config(text));
        };
        if report {
            steering.start_reports(clock.now(), shared.roll());
        }
        let (shared, released) = (Arc::downgrade(shared), AtomicBool::new(false));
        let (salted, unobeyed) = (Mutex::default(), AtomicU64::new(0));
        Ok(Handle { shared, clock, feed, report, obey, salted, unobeyed, released })
    }

    /// The instance, until the feed has ended.
    fn shared(&self) -> Option<Arc<Shared>> {
        let over = self.released.load(Ordering::Acquire);
        if over { None } else { self.shared.upgrade() }
    }
}

impl Local for Handle {
    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn too_long(&self) -> u64 {
        self.shared.upgrade().map_or(0, |shared| shared.steering.lock().too_long())
    }

    fn take_report(&self, now: Tick, floor_per_sec: f64) -> Option<Report> {
        if !self.report {
            return None;
        }
        let shared = self.shared()?;
        let mut steering = shared.steering.lock();
        shared.take_samples(&mut steering, now);
        steering.take_report(now, floor_per_sec)
    }

    fn apply(&self, list: Option<&Arc<FleetList>>) {
        if let Some(shared) = self.shared().filter(|_| self.obey) {
            shared.obey(self.feed, list.map(|l| &**l));
            self.obey_rest(&shared, list.map(|l| &**l));
        }
    }

    fn is_told_by(&self, numbers: Weak<dyn Numbers>) {
        if let Some(shared) = self.shared() {
            *shared.feed.lock() = Some(numbers);
        }
    }

    fn unobeyed(&self) -> u64 {
        self.unobeyed.load(Ordering::Relaxed)
    }

    fn explain(&self, key: &[u8]) -> Option<String> {
        let shared = self.shared.upgrade()?;
        Some(Explanation::of(&shared, key).to_string())
    }

    fn lease(&self) -> Option<(Tick, Duration)> {
        let shared = self.shared()?;
        let lease = shared.salted.as_ref()?.options.lease;
        Some((lease_clock(&shared.clock), lease))
    }

    fn read_root(&self) -> Option<oneshot::Receiver<Root>> {
        let shared = self.shared().filter(|shared| shared.salted.is_some())?;
        let (tell, told) = oneshot::channel();
        let runtime = shared.runtime.clone();
        runtime.spawn(Box::pin(async move {
            if let Some(salted) = &shared.salted
                && let Ok(root) = salted.read_for_all(&shared).await
            {
                // Whoever waits may be gone.
                let _ = tell.send(root);
            }
        }));
        Some(told)
    }

    fn carry(&self, sent: Tick, root: Root) {
        if let Some(shared) = self.shared()
            && let Some(salted) = &shared.salted
        {
            salted.carried(&shared, sent, root);
        }
    }

    fn alive(&self) -> bool {
        self.shared().is_some_and(|shared| !shared.has_ended())
    }

    fn release(&self) {
        if self.released.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            shared.steer(|steering, now| steering.end_feed(now, self.feed));
            *shared.feed.lock() = None;
            shared.limit_ages(None);
            self.salt(&shared, None);
        }
    }
}

impl Handle {
    /// What the list says besides which keys to keep near.
    fn obey_rest(&self, shared: &Arc<Shared>, list: Option<&FleetList>) {
        shared.limit_ages(list);
        self.salt(shared, list);
        let done = |e: &&FleetKey| match e.treatment {
            Some(Treatment::Salt { .. }) => shared.salted.is_some(),
            Some(Treatment::Copies { .. }) => false,
            Some(Treatment::Shed) => shared.shed.is_on(),
            Some(Treatment::Near) | None => true,
        };
        let entries = list.map_or(&[][..], |list| &list.entries);
        let undone = entries.iter().filter(|e| !done(e)).count();
        self.unobeyed.store(undone as u64, Ordering::Relaxed);
    }

    /// Salts what the list says, through the door that an operator's pin takes; what this
    /// process's own operator has pinned stays as it is. A list that has run out says nothing: a
    /// counter goes back to one place only when a later one leaves it out. A feed that has ended
    /// wants neither.
    fn salt(&self, shared: &Arc<Shared>, list: Option<&FleetList>) {
        let Some(salted) = shared.salted.as_deref() else { return };
        let mut ours = self.salted.lock();
        let Some(list) = list else {
            if self.released.load(Ordering::Acquire) {
                for (key, _) in std::mem::take(&mut *ours) {
                    salted.want(shared, &key, Want::Nothing, false);
                }
            }
            return;
        };
        let asked = list.entries.iter().filter_map(|e| match e.treatment {
            Some(Treatment::Salt { slots }) => Some((e.key.clone(), u16::try_from(slots).ok()?)),
            _ => None,
        });
        let asked: BTreeMap<Key, u16> =
            asked.filter(|(_, k)| (1..=SLOTS_MAX).contains(k)).collect();
        let gone: Vec<Key> = ours.keys().filter(|key| !asked.contains_key(*key)).cloned().collect();
        for key in gone {
            ours.remove(&key);
            salted.pin(shared, &key, None);
        }
        for (key, slots) in asked {
            let own = !ours.contains_key(&key) && salted.wanted(&key).1;
            if !own && ours.insert(key.clone(), slots) != Some(slots) {
                salted.pin(shared, &key, Some(slots));
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.release();
    }
}

impl Shared {
    /// Obeys `list`, or none. In force when this returns.
    fn obey(&self, feed: u64, list: Option<&FleetList>) {
        self.steer(|steering, now| steering.obey(now, feed, list, |key| self.hash(key)));
    }

    /// Values of these keys are served for no longer than the list says. What is cached of a key
    /// whose time has been cut is forgotten.
    fn limit_ages(&self, list: Option<&FleetList>) {
        let entries = list.map_or(&[][..], |list| &list.entries);
        let limited = |e: &FleetKey| Some((self.hash(&e.key), (e.key.clone(), e.ttl?)));
        let next: BTreeMap<u64, (Key, Duration)> = entries.iter().filter_map(limited).collect();
        let ttls: BTreeMap<u64, Duration> = next.iter().map(|(h, (_, ttl))| (*h, *ttl)).collect();
        let new = if ttls.is_empty() { None } else { Some(Arc::new(ttls)) };
        let old = self.fed_ttls.swap(new);
        for (hash, (key, ttl)) in next {
            if old.as_ref().and_then(|old| old.get(&hash)).is_none_or(|was| *was > ttl) {
                self.invalidate(hash, &key);
            }
        }
    }

    pub(super) fn steer<R>(&self, change: impl FnOnce(&mut Steering, Tick) -> R) -> R {
        let mut steering = self.steering.lock();
        let out = change(&mut steering, self.clock.now());
        let changed = steering.take_change();
        let garbage = changed.then(|| self.publish_index(&steering.treated()));
        if changed {
            self.shed.follow(&steering, |key| self.hash(key));
        }
        drop(steering);
        drop(garbage);
        if changed {
            self.followers.wake();
        }
        out
    }
}
