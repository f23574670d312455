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

    /// This list is in force from now on, until then; or none.
    fn apply(&self, list: Option<(&Arc<FleetList>, Tick)>);

    /// The list in force stays so until then.
    fn keep(&self, _until: Tick) {}

    /// The time of the list in force is over, whether or not the feed has noticed.
    fn lapse(&self) {}

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
    obeyed: Mutex<Obeyed>,
    unobeyed: AtomicU64,
    released: AtomicBool,
}

/// What the feed has done here besides which keys to keep near. No code of a user's runs under its
/// lock.
#[derive(Default)]
struct Obeyed {
    /// The feed has ended: nothing more is done for it.
    released: bool,
    /// The list in force, if it names counters to salt, and until when.
    salts: Option<Arc<FleetList>>,
    until: Tick,
    /// Counters that it has this process salt.
    salted: BTreeMap<Key, Salting>,
}

/// Into how many slots, and what was wanted of the counter when the feed had said so: if it is
/// something else now, somebody of this process's own has spoken.
struct Salting {
    slots: u16,
    set: (Want, bool),
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
        let (obeyed, unobeyed) = (Mutex::default(), AtomicU64::new(0));
        Ok(Handle { shared, clock, feed, report, obey, obeyed, unobeyed, released })
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

    fn apply(&self, list: Option<(&Arc<FleetList>, Tick)>) {
        if let Some(shared) = self.shared().filter(|_| self.obey) {
            shared.obey(self.feed, list.map(|(list, until)| (&**list, until)));
            self.obey_rest(&shared, list, false);
        }
    }

    fn keep(&self, until: Tick) {
        let Some(shared) = self.shared().filter(|_| self.obey) else { return };
        shared.steering.lock().keep(self.feed, until);
        let mut obeyed = self.obeyed.lock();
        obeyed.until = obeyed.until.max(until);
        // An operator here may have denied or unpinned one since.
        if let Some(list) = obeyed.salts.clone().filter(|_| !obeyed.released) {
            salt(&shared, &mut obeyed.salted, Some(&list));
        }
    }

    fn lapse(&self) {
        if let Some(shared) = self.shared().filter(|_| self.obey) {
            self.obey_rest(&shared, None, true);
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
        let shared = self.shared.upgrade();
        let mut obeyed = self.obeyed.lock();
        if std::mem::replace(&mut obeyed.released, true) {
            return;
        }
        self.released.store(true, Ordering::Release);
        let Some(shared) = shared else { return };
        salt(&shared, &mut obeyed.salted, None);
        (obeyed.salts, obeyed.salted) = (None, BTreeMap::new());
        shared.limit_ages(None);
        drop(obeyed);
        *shared.feed.lock() = None;
        // The last step: after it another feed may begin.
        shared.steer(|steering, now| steering.end_feed(now, self.feed));
    }
}

impl Handle {
    /// What the list says besides which keys to keep near. `late`: nothing, if there is a list again
    /// whose time is not over.
    fn obey_rest(&self, shared: &Arc<Shared>, list: Option<(&Arc<FleetList>, Tick)>, late: bool) {
        let mut obeyed = self.obeyed.lock();
        if obeyed.released || (late && self.clock.now() < obeyed.until) {
            return;
        }
        obeyed.until = list.map_or(Tick::ZERO, |(_, until)| until);
        let list = list.map(|(list, _)| list);
        let salts = |e: &FleetKey| matches!(e.treatment, Some(Treatment::Salt { .. }));
        obeyed.salts = list.filter(|list| list.entries.iter().any(salts)).cloned();
        salt(shared, &mut obeyed.salted, list.map(|l| &**l));
        let cut = shared.limit_ages(list.map(|l| &**l));
        let done = |e: &&FleetKey| match e.treatment {
            Some(Treatment::Salt { .. }) => shared.salted.is_some(),
            Some(Treatment::Copies { .. }) => false,
            Some(Treatment::Shed) => shared.shed.is_on(),
            Some(Treatment::Near) | None => true,
        };
        let entries = list.map_or(&[][..], |list| &list.entries);
        let undone = entries.iter().filter(|e| !done(e)).count();
        self.unobeyed.store(undone as u64, Ordering::Relaxed);
        drop(obeyed);
        cut.iter().for_each(|(hash, key)| shared.invalidate(*hash, key));
    }
}

/// Salts what the list says, through the door that an operator's pin takes. What this process's own
/// operator has pinned, unpinned or denied stays as it is, and nothing is salted where only
/// observed. A list that has run out says nothing: a counter stays where it is, and goes back to one
/// place only when a later list leaves it out.
fn salt(shared: &Arc<Shared>, ours: &mut BTreeMap<Key, Salting>, list: Option<&FleetList>) {
    let Some(salted) = shared.salted.as_deref() else { return };
    if shared.options.steering.observe_only {
        return;
    }
    let Some(list) = list else {
        for (key, ours) in ours.iter_mut().filter(|(key, ours)| salted.wanted(key) == ours.set) {
            salted.want(shared, key, Want::Nothing, false);
            ours.set = salted.wanted(key);
        }
        return;
    };
    let steering = shared.steering.lock();
    let asked = list.entries.iter().filter_map(|e| match e.treatment {
        Some(Treatment::Salt { slots }) => Some((e.key.clone(), u16::try_from(slots).ok()?)),
        _ => None,
    });
    let may = |key: &Key, slots: &u16| (1..=SLOTS_MAX).contains(slots) && !steering.denies(key);
    let asked: BTreeMap<Key, u16> = asked.filter(|(key, slots)| may(key, slots)).collect();
    drop(steering);
    ours.retain(|key, ours| {
        let stays = asked.contains_key(key);
        if !stays && salted.wanted(key) == ours.set {
            salted.want(shared, key, Want::Home, false);
        }
        stays
    });
    for (key, slots) in asked {
        let (known, wanted) = (ours.get(&key), salted.wanted(&key));
        let own = wanted.1 && known.is_none_or(|ours| ours.set != wanted);
        // Held since the last list ran out, it is pinned again.
        let again = known.is_none_or(|ours| ours.slots != slots || !ours.set.1);
        if again && !own {
            salted.pin(shared, &key, Some(slots));
            let set = salted.wanted(&key);
            ours.insert(key, Salting { slots, set });
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.release();
    }
}

impl Shared {
    /// Obeys `list` until its time is over, or none. In force when this returns.
    fn obey(&self, feed: u64, list: Option<(&FleetList, Tick)>) {
        self.steer(|steering, now| steering.obey(now, feed, list, |key| self.hash(key)));
    }

    /// The driver has let a list go whose time was over.
    pub(crate) fn lapse(&self) {
        let feed = self.feed.lock().as_ref().and_then(Weak::upgrade);
        if let Some(feed) = feed {
            feed.lapse();
        }
    }

    /// Values of these keys are served for no longer than the list says. Returns the keys whose
    /// time has been cut: what is cached of them is to be forgotten.
    fn limit_ages(&self, list: Option<&FleetList>) -> Vec<(u64, Key)> {
        let entries = list.map_or(&[][..], |list| &list.entries);
        let limited = |e: &FleetKey| Some((self.hash(&e.key), (e.key.clone(), e.ttl?)));
        let next: BTreeMap<u64, (Key, Duration)> = entries.iter().filter_map(limited).collect();
        let ttls: BTreeMap<u64, Duration> = next.iter().map(|(h, (_, ttl))| (*h, *ttl)).collect();
        let new = if ttls.is_empty() { None } else { Some(Arc::new(ttls)) };
        let old = self.fed_ttls.swap(new);
        let was = |hash: &u64| old.as_ref().and_then(|old| old.get(hash));
        let cut = next.into_iter().filter(|(hash, (_, ttl))| was(hash).is_none_or(|was| was > ttl));
        cut.map(|(hash, (key, _))| (hash, key)).collect()
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
