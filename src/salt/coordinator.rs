//! The steps of rotations: one task a key at a time, begun by the driver when one is due.
//!
//! Any process may take any step. The one that began a rotation takes its steps as soon as they
//! are due; the others wait a little longer, and only look if it is done already.

use super::{PART, Salted, count};
use crate::adds::Cell;
use crate::engine::control::registry::{Record, Stamp};
use crate::engine::control::rotation::{Step, Want, Watch};
use crate::engine::control::salt::{self as plan, Fold, Gen, Kind};
use crate::engine::control::spread::Spread;
use crate::engine::time::Tick;
use crate::error::{ErrorKind, Result};
use crate::key::Key;
use crate::registry::lease_clock;
use crate::shared::Shared;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Steps that one task takes in a row.
const STEPS_MAX: usize = 8;

/// Keys that have something to be done for them, per instance.
const JOBS_MAX: usize = 4096;

/// A step that failed is tried again after this long, and the drawn part of as much again.
const AGAIN: Duration = Duration::from_millis(50);

/// What is to be done, by key.
#[derive(Default)]
pub(super) struct Jobs(BTreeMap<Key, Job>);

#[derive(Default)]
struct Job {
    want: Want,
    /// By an operator's word: it is not taken back by what the traffic says.
    pinned: bool,
    watch: Watch,
    /// The record that `watch` has seen published.
    seen: Stamp,
    /// This process began the rotation that is under way.
    own: bool,
    running: bool,
    due: Tick,
    /// By what its traffic says: not before then again.
    traffic: Option<Traffic>,
    /// The bare key has no expiry of its own any more, under a record that expires then.
    kept: Option<u64>,
}

/// What the traffic of a counter says.
pub(super) struct Automatic {
    /// What it asks for.
    pub(super) want: Option<Want>,
    /// It would do with one place.
    pub(super) cold: bool,
    /// The arithmetic, where there is traffic.
    pub(super) spread: Option<Spread>,
}

/// What is remembered of the traffic of a counter.
#[derive(Clone, Copy, Default)]
struct Traffic {
    /// Adds and writes, and when they were counted.
    weight: Option<([u64; 2], Tick)>,
    cold_looks: u32,
    /// The last change of mind.
    changed: Option<Tick>,
    /// Slots were asked for.
    asked: bool,
    spread: Option<Spread>,
}

impl Salted {
    /// One turn of the driver.
    pub(crate) fn turn(&self, shared: &Arc<Shared>) {
        let now = lease_clock(&shared.clock);
        let paused = Tick(self.paused_until.load(Ordering::Relaxed));
        if self.registrar.with(|c| c.is_due(now))
            && now >= paused
            && !self.renewing.swap(true, Ordering::AcqRel)
        {
            let shared = shared.clone();
            let runtime = shared.runtime.clone();
            runtime.spawn(Box::pin(async move {
                let done = Renewing(&shared);
                if let Some(salted) = &shared.salted {
                    drop(salted.renew(&shared).await);
                    salted.look_for_work(&shared);
                }
                drop(done);
            }));
        }
        self.keep_schedules(shared, now);
        self.look_at_traffic(shared);
        self.keep_totals(shared, now);
        let due = self.jobs.lock().begin(now);
        for key in due {
            let shared = shared.clone();
            let runtime = shared.runtime.clone();
            runtime.spawn(Box::pin(async move {
                let mut running = Running { shared: &shared, key, again: None };
                if let Some(salted) = &shared.salted {
                    running.again = Some(salted.work(&shared, &running.key).await);
                }
            }));
        }
    }

    /// Rotations that are under way are this process's affair too.
    pub(super) fn look_for_work(&self, shared: &Arc<Shared>) {
        let open: Vec<(Key, Stamp, bool)> = self.registrar.with(|catalog| {
            let open = catalog.list().keys().filter_map(|key| {
                let record = catalog.record(key)?;
                let folds = |plan: &plan::Salt| self.waits.fold.is_some() && plan.may_fold();
                let plan = self.plan_of(record).ok()?;
                let over = plan.is_expired(shared.clock.wall_ms());
                let open = plan.is_under_way() || plan.is_plain() || folds(&plan) || over;
                open.then(|| (key.clone(), record.stamp(), over))
            });
            open.collect()
        });
        let now = lease_clock(&shared.clock);
        let mut jobs = self.jobs.lock();
        for (key, stamp, over) in open {
            if over || jobs.0.get(&key).is_none_or(|job| job.seen != stamp) {
                jobs.add(&key, now);
            }
        }
    }

    /// From now on this process wants `want` of `key`.
    pub(crate) fn want(&self, shared: &Arc<Shared>, key: &Key, want: Want, pinned: bool) {
        let now = lease_clock(&shared.clock);
        let want = want.at_most(Salted::op_of(shared, key).slots_max());
        let mut jobs = self.jobs.lock();
        jobs.add(key, now);
        if let Some(job) = jobs.0.get_mut(key) {
            (job.want, job.pinned, job.due) = (want, pinned, Tick::ZERO);
        }
    }

    /// What this process wants of `key`, and whether by an operator's word.
    pub(crate) fn wanted(&self, key: &Key) -> (Want, bool) {
        self.jobs.lock().0.get(key).map_or((Want::Nothing, false), |job| (job.want, job.pinned))
    }

    /// An operator wants `slots` of `key`; none: one place again. Whether that changes anything.
    pub(crate) fn pin(&self, shared: &Arc<Shared>, key: &Key, slots: Option<u16>) -> bool {
        let (_, pinned) = self.wanted(key);
        let want = match slots {
            Some(k) => Want::Pinned { k, at_once: self.may_seal_home() },
            None if !pinned => return false,
            None => Want::Home,
        };
        self.want(shared, key, want, slots.is_some());
        true
    }

    /// Adds, and the writes that carry them, a second since the last look; `None` at the first.
    pub(super) fn rates_of(&self, cell: &Cell, now: Tick) -> Option<[f64; 2]> {
        let weight = [0, 1].map(|i| cell.weight[i].load(Ordering::Relaxed));
        let mut jobs = self.jobs.lock();
        jobs.add(&cell.key, Tick::MAX);
        let traffic = jobs.0.get_mut(&cell.key)?.traffic.get_or_insert_default();
        let (before, at) = traffic.weight.replace((weight, now))?;
        let secs = now.since(at).as_secs_f64();
        (secs > 0.0).then(|| [0, 1].map(|i| weight[i].saturating_sub(before[i]) as f64 / secs))
    }

    /// What the traffic of a counter comes to, when it was last looked at.
    pub(crate) fn spread_of(&self, key: &Key) -> Option<Spread> {
        self.jobs.lock().0.get(key)?.traffic?.spread
    }

    /// Keys that are salted since their traffic asked for it.
    pub(super) fn automatic_keys(&self) -> Vec<Key> {
        let jobs = self.jobs.lock();
        let asked = |job: &Job| job.traffic.is_some_and(|traffic| traffic.asked);
        jobs.0.iter().filter(|(_, job)| asked(job)).map(|(key, _)| key.clone()).collect()
    }

    /// What the traffic of a counter asks for; an operator's word is stronger.
    pub(super) fn automatic(&self, shared: &Arc<Shared>, key: &Key, now: Tick, says: Automatic) {
        let want = {
            let mut jobs = self.jobs.lock();
            let Some(job) = jobs.0.get_mut(key) else { return };
            let traffic = job.traffic.get_or_insert_default();
            traffic.spread = says.spread;
            if job.pinned {
                return;
            }
            traffic.cold_looks = if says.cold { traffic.cold_looks + 1 } else { 0 };
            let over = traffic.asked && Salted::is_over(traffic.cold_looks);
            let want = if over { Some(Want::Home) } else { says.want };
            let Some(want) = want.filter(|want| *want != job.want) else { return };
            // From ready to in use is no change of mind; nor is a little less than before. More is
            // asked for as soon as that is seen, less after a pause.
            let ready = matches!(job.want, Want::Ready(_)) && !matches!(want, Want::Ready(_));
            let less = want.slots() <= job.want.slots() && want != Want::Home && !ready;
            let lease = self.options.lease;
            let pause = if want == Want::Home { self.options.cooldown } else { lease };
            let rests = traffic.changed.is_some_and(|at| now.since(at) < pause);
            if less || (rests && traffic.asked && !ready) {
                return;
            }
            traffic.changed = Some(now);
            traffic.asked = want != Want::Home;
            traffic.cold_looks = 0;
            want
        };
        self.want(shared, key, want, false);
    }

    /// Takes the steps that are due; when to look again.
    async fn work(&self, shared: &Arc<Shared>, key: &Key) -> Tick {
        let now = || lease_clock(&shared.clock);
        for _ in 0..STEPS_MAX {
            let mut tried = None;
            match self.step(shared, key, &mut tried).await {
                Ok(None) => {}
                Ok(Some(due)) => return due,
                Err(error) => {
                    count(&self.tallies.steps_failed, 1);
                    if error.kind() != ErrorKind::Limit {
                        break;
                    }
                    count(&self.tallies.refused, 1);
                    match tried {
                        Some(Step::Announce { .. }) => {
                            self.want(shared, key, Want::Nothing, false);
                            return Tick::MAX;
                        }
                        // What is in use does not fit into one place: it stays, and is left by the
                        // long way.
                        Some(Step::Replace(_)) if self.takes_time(key) => {}
                        // What was begun is not given up. There may be room later.
                        _ => return now().after(self.options.grave),
                    }
                }
            }
        }
        let drawn = u32::try_from(shared.roll() % 1000).unwrap_or(0);
        now().after(AGAIN + AGAIN * drawn / 1000)
    }

    /// What is wanted of `key` is not wanted at once any more; whether it was.
    fn takes_time(&self, key: &Key) -> bool {
        let mut jobs = self.jobs.lock();
        let Some(job) = jobs.0.get_mut(key) else { return false };
        let before = job.want;
        job.want = before.in_time();
        job.want != before
    }

    /// One step, which is `tried`; `Some` says when to look again, for there is nothing to do
    /// before.
    async fn step(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        tried: &mut Option<Step>,
    ) -> Result<Option<Tick>> {
        let record = self.registrar.load(shared, key).await?;
        let mut plan = match &record {
            Some(record) => self.plan_of(record)?,
            None => self.first_plan(shared, key),
        };
        if plan.is_expired(shared.clock.wall_ms()) {
            self.expire(shared, key).await?;
            return Ok(None);
        }
        if plan.is_plain() {
            plan.op = Salted::op_of(shared, key);
        }
        if let Some(record) = &record {
            if plan.is_plain()
                && !record.has_other_than(PART)
                && self.wanted(key).0.slots().is_none()
            {
                // Readers that still have the record find the same as those that have none.
                if self.registrar.with(|catalog| catalog.list().get(key).is_some()) {
                    self.registrar.unlist(shared, key, record.stamp()).await?;
                }
                if let Some(job) = self.jobs.lock().0.get_mut(key)
                    && job.want == Want::Home
                {
                    job.want = Want::Nothing;
                }
                return Ok(Some(Tick::MAX));
            }
            self.see_published(shared, key, record, &plan).await?;
        }
        let kept = self.is_bare_kept(shared, key, &plan).await;
        let now = lease_clock(&shared.clock);
        let (step, own) = {
            let jobs = self.jobs.lock();
            let Some(job) = jobs.0.get(key) else { return Ok(Some(Tick::MAX)) };
            let lease = self.options.lease;
            let drawn = u32::try_from(shared.roll() % 1000).unwrap_or(0);
            let patience =
                if job.own { Duration::ZERO } else { lease / 3 + lease / 3 * drawn / 1000 };
            (job.watch.next(now, &plan, job.want, &self.waits_of(&plan), patience), job.own)
        };
        *tried = Some(step);
        let took = match step {
            Step::Wait(due) if kept => return Ok(Some(due)),
            Step::Wait(due) => return Ok(Some(due.min(now.after(self.options.lease / 4)))),
            step => self.take(shared, key, record.as_ref(), &plan, step).await?,
        };
        if took
            && !own
            && matches!(step, Step::Announce { .. } | Step::Replace(_))
            && let Some(job) = self.jobs.lock().0.get_mut(key)
        {
            job.own = true;
        }
        if !took {
            count(&self.tallies.steps_failed, 1);
        }
        Ok(None)
    }

    /// Takes the expiry off the bare key of a counter that expires, once its adds go to slots and it
    /// is quiet. False when that is to be tried again.
    async fn is_bare_kept(&self, shared: &Arc<Shared>, key: &Key, plan: &plan::Salt) -> bool {
        let Some(at) = plan.expires else { return true };
        let kept = |jobs: &Jobs| jobs.0.get(key).is_some_and(|job| job.kept == Some(at));
        if kept(&self.jobs.lock()) {
            return true;
        }
        // Before the switch it may be as busy as it ever was, and then the switch is what helps.
        let done = self.keep_bare(shared, key).await.is_ok();
        if done && let Some(job) = self.jobs.lock().0.get_mut(key) {
            job.kept = Some(at);
        }
        done || plan.cur.kind == Kind::Home
    }

    /// Makes sure that the record is published, and remembers since when it is known to be.
    async fn see_published(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: &Record,
        plan: &plan::Salt,
    ) -> Result<()> {
        let known = self.registrar.with(|catalog| catalog.is_published(key, record.stamp()));
        let seen = self.jobs.lock().0.get(key).map_or_else(Stamp::default, |job| job.seen);
        if known && seen == record.stamp() {
            return Ok(());
        }
        let (at, before) = self.registrar.publish(shared, key, record.stamp()).await?;
        if let Some(job) = self.jobs.lock().0.get_mut(key) {
            if !before && seen == record.stamp() {
                // It was published, and that was lost: everybody has to learn it again.
                job.watch = Watch::default();
            }
            job.watch.see(at, plan);
            job.seen = record.stamp();
            job.own &= plan.is_under_way();
        }
        Ok(())
    }

    /// What was published is not, and everybody has to learn it again.
    pub(super) fn watch_again(&self, key: &Key, at: Tick, plan: &plan::Salt) {
        if let Some(job) = self.jobs.lock().0.get_mut(key) {
            job.watch = Watch::default();
            job.watch.see(at, plan);
        }
    }

    /// Whether a fold is in the bare key now.
    pub(super) fn watch_folded(&self, shared: &Shared, key: &Key, fold: Fold, there: bool) {
        let at = lease_clock(&shared.clock).after(shared.clock.resolution());
        if let Some(job) = self.jobs.lock().0.get_mut(key) {
            job.watch.folded(fold, there.then_some(at));
        }
    }

    /// A retired generation was compared with what is in its slots.
    pub(super) fn watch_swept(&self, key: &Key, old: Gen, at: Tick) {
        if let Some(job) = self.jobs.lock().0.get_mut(key) {
            job.watch.swept(&old, at);
        }
    }
}

impl Jobs {
    fn add(&mut self, key: &Key, now: Tick) {
        if self.0.len() < JOBS_MAX || self.0.contains_key(key) {
            let job =
                self.0.entry(key.clone()).or_insert_with(|| Job { due: now, ..Job::default() });
            job.due = job.due.min(now);
        }
    }

    /// The keys whose time has come, each of them begun.
    fn begin(&mut self, now: Tick) -> Vec<Key> {
        self.0.retain(|_, job| {
            let idle = job.due == Tick::MAX && job.want == Want::Nothing && job.traffic.is_none();
            job.running || !idle
        });
        let due = self.0.iter_mut().filter(|(_, job)| !job.running && job.due <= now);
        due.map(|(key, job)| {
            job.running = true;
            // Who changes its mind meanwhile sets it to zero.
            job.due = Tick::MAX;
            key.clone()
        })
        .collect()
    }
}

/// A task of one key; its end, in whatever way, lets the next begin.
struct Running<'a> {
    shared: &'a Arc<Shared>,
    key: Key,
    again: Option<Tick>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let Some(salted) = &self.shared.salted else { return };
        let dropped = || lease_clock(&self.shared.clock).after(AGAIN);
        let again = self.again.unwrap_or_else(dropped);
        if let Some(job) = salted.jobs.lock().0.get_mut(&self.key) {
            job.running = false;
            job.due = job.due.min(again);
        }
    }
}

struct Renewing<'a>(&'a Arc<Shared>);

impl Drop for Renewing<'_> {
    fn drop(&mut self) {
        if let Some(salted) = &self.0.salted {
            salted.renewing.store(false, Ordering::Release);
        }
    }
}
