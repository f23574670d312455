//! The steps of rotations: one task a key at a time, begun by the driver when one is due.
//!
//! Any process may take any step. The one that began a rotation takes its steps as soon as they
//! are due; the others wait a little longer, and only look if it is done already.

use super::{PART, Salted, count, join, tag};
use crate::batch::bounded;
use crate::call;
use crate::counter::{integer, not_a_number};
use crate::engine::control::registry::Record;
use crate::engine::control::rotation::{Step, Want, Watch};
use crate::engine::control::salt::{self as plan, Gen, Kind, Slot};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::lanes::overflow;
use crate::registry::{Replaced, lease_clock};
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Steps that one task takes in a row.
const STEPS_MAX: usize = 8;

/// Keys that have something to be done for them, per instance.
const JOBS_MAX: usize = 4096;

/// A step that failed is tried again after this long, and the drawn part of as much again.
const AGAIN: Duration = Duration::from_millis(50);

/// Seeds that are tried for names that fall on different shards.
const SEEDS: u32 = 1 << 18;

/// Names that are looked at for them: some tenths of a second, once in a rotation.
const NAMES_MAX: u32 = 1 << 21;

/// Seeds after which the shards are taken for known.
const SEEDS_MIN: u32 = 16;

/// Names that are looked at between two turns of the scheduler.
const NAMES_A_TURN: u32 = 1 << 14;

/// What is to be done, by key.
#[derive(Default)]
pub(super) struct Jobs(BTreeMap<Key, Job>);

#[derive(Default)]
struct Job {
    want: Want,
    /// By an operator's word: it is not taken back by what the traffic says.
    pinned: bool,
    watch: Watch,
    /// The version of the record that `watch` has seen published.
    seen: u64,
    /// This process began the rotation that is under way.
    own: bool,
    running: bool,
    due: Tick,
    /// By what its traffic says: not before then again.
    traffic: Option<Traffic>,
}

/// What the traffic of a counter says.
pub(super) struct Automatic {
    /// What it asks for.
    pub(super) want: Option<Want>,
    /// It would do with one place.
    pub(super) cold: bool,
}

/// What is remembered of the traffic of a counter.
#[derive(Clone, Copy, Default)]
struct Traffic {
    /// Store operations, and when they were counted.
    sent: Option<(u64, Tick)>,
    cold_looks: u32,
    /// The last change of mind.
    changed: Option<Tick>,
    /// Slots were asked for.
    asked: bool,
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
        self.look_at_traffic(shared);
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
    fn look_for_work(&self, shared: &Arc<Shared>) {
        let open: Vec<(Key, u64)> = self.registrar.with(|catalog| {
            let open = catalog.list().keys().filter_map(|key| {
                let record = catalog.record(key)?;
                let open = self.plan_of(record).is_ok_and(|plan| plan.is_under_way());
                open.then(|| (key.clone(), record.version))
            });
            open.collect()
        });
        let now = lease_clock(&shared.clock);
        let mut jobs = self.jobs.lock();
        for (key, version) in open {
            if jobs.0.get(&key).is_none_or(|job| job.seen != version) {
                jobs.add(&key, now);
            }
        }
    }

    /// From now on this process wants `want` of `key`.
    pub(crate) fn want(&self, shared: &Arc<Shared>, key: &Key, want: Want, pinned: bool) {
        let now = lease_clock(&shared.clock);
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

    /// Store operations a second since the last look; `None` at the first.
    pub(super) fn load_of(&self, key: &Key, sent: u64, now: Tick) -> Option<f64> {
        let mut jobs = self.jobs.lock();
        jobs.add(key, Tick::MAX);
        let traffic = jobs.0.get_mut(key)?.traffic.get_or_insert_default();
        let (before, at) = traffic.sent.replace((sent, now))?;
        let secs = now.since(at).as_secs_f64();
        (secs > 0.0).then(|| sent.saturating_sub(before) as f64 / secs)
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
            let Some(job) = jobs.0.get_mut(key).filter(|job| !job.pinned) else { return };
            let traffic = job.traffic.get_or_insert_default();
            traffic.cold_looks = if says.cold { traffic.cold_looks + 1 } else { 0 };
            let over = traffic.asked && Salted::is_over(traffic.cold_looks);
            let want = if over { Some(Want::Home) } else { says.want };
            let Some(want) = want.filter(|want| *want != job.want) else { return };
            // From ready to in use is no change of mind; nor is a little less than before.
            let first = !traffic.asked;
            let ready = matches!(job.want, Want::Ready(_)) && !matches!(want, Want::Ready(_));
            let less = want.slots() <= job.want.slots() && want != Want::Home && !ready;
            let rests = traffic.changed.is_some_and(|at| now.since(at) < self.options.cooldown);
            if less || (rests && !first && !ready) {
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
            match self.step(shared, key).await {
                Ok(None) => {}
                Ok(Some(due)) => return due,
                Err(error) => {
                    count(&self.tallies.steps_failed, 1);
                    if error.kind() == ErrorKind::Limit {
                        count(&self.tallies.refused, 1);
                        self.want(shared, key, Want::Nothing, false);
                        return Tick::MAX;
                    }
                    break;
                }
            }
        }
        let drawn = u32::try_from(shared.roll() % 1000).unwrap_or(0);
        now().after(AGAIN + AGAIN * drawn / 1000)
    }

    /// One step; `Some` says when to look again, for there is nothing to do before.
    async fn step(&self, shared: &Arc<Shared>, key: &Key) -> Result<Option<Tick>> {
        let record = self.registrar.load(shared, key).await?;
        let plan = match &record {
            Some(record) => self.plan_of(record)?,
            None => plan::Salt::new(self.options.exclusive),
        };
        if let Some(record) = &record {
            self.see_published(shared, key, record, &plan).await?;
        }
        let now = lease_clock(&shared.clock);
        let (step, own) = {
            let jobs = self.jobs.lock();
            let Some(job) = jobs.0.get(key) else { return Ok(Some(Tick::MAX)) };
            let lease = self.options.lease;
            let drawn = u32::try_from(shared.roll() % 1000).unwrap_or(0);
            let patience =
                if job.own { Duration::ZERO } else { lease / 3 + lease / 3 * drawn / 1000 };
            (job.watch.next(now, &plan, job.want, &self.waits(), patience), job.own)
        };
        let took = match step {
            Step::Wait(due) => return Ok(Some(due)),
            step => self.take(shared, key, record.as_ref(), &plan, step).await?,
        };
        if took && !own && matches!(step, Step::Announce { .. } | Step::Replace(_)) {
            if let Some(job) = self.jobs.lock().0.get_mut(key) {
                job.own = true;
            }
        }
        if !took {
            count(&self.tallies.steps_failed, 1);
        }
        Ok(None)
    }

    /// Makes sure that the record is published, and remembers since when it is known to be.
    async fn see_published(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: &Record,
        plan: &plan::Salt,
    ) -> Result<()> {
        let known = self.registrar.with(|catalog| catalog.is_published(key, record.version));
        let seen = self.jobs.lock().0.get(key).map_or(0, |job| job.seen);
        if known && seen == record.version {
            return Ok(());
        }
        let (at, before) = self.registrar.publish(shared, key, record.version).await?;
        if let Some(job) = self.jobs.lock().0.get_mut(key) {
            if !before && seen == record.version {
                // It was published, and that was lost: everybody has to learn it again.
                job.watch = Watch::default();
            }
            job.watch.see(at, plan);
            job.seen = record.version;
            job.own &= plan.is_under_way();
        }
        Ok(())
    }

    /// Takes a step; false when the record had changed.
    async fn take(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: Option<&Record>,
        plan: &plan::Salt,
        step: Step,
    ) -> Result<bool> {
        #[cfg(feature = "testing")]
        if let Some(took) = self.take_broken(shared, key, record, plan, step).await? {
            return Ok(took);
        }
        let (next, tally) = match step {
            Step::Wait(_) => return Ok(true),
            Step::Announce { k, home, armed } => {
                let next = self.announce(shared, key, record, plan, (k, home, armed)).await?;
                (next, &self.tallies.announced)
            }
            Step::Arm => (plan.armed(), &self.tallies.announced),
            Step::Switch => {
                // The last moment to find that the announcement was lost.
                let version = record.map_or(0, |record| record.version);
                let (at, before) = self.registrar.publish(shared, key, version).await?;
                if !before {
                    self.watch_again(key, at, plan);
                    return Ok(false);
                }
                (plan.switched(), &self.tallies.switched)
            }
            Step::Replace(old) => {
                let total = self.seal(shared, key, old).await?;
                (plan.replaced(total), &self.tallies.switched)
            }
            Step::Retire(old) => {
                let total = if self.waits.seal {
                    self.seal(shared, key, old).await?
                } else {
                    self.total(shared, key, old).await?
                };
                (plan.retired(old.id, total, self.waits.seal), &self.tallies.retired)
            }
            Step::Sweep(old) => return self.sweep(shared, key, record, plan, old).await,
            Step::Forget(old) => {
                if !self.bury(shared, key, record, plan, old).await? {
                    return Ok(false);
                }
                (plan.forgotten(old.id), &self.tallies.forgotten)
            }
        };
        let next = next.ok_or_else(overflow)?;
        let won = self.put(shared, key, record, &next).await?;
        count(tally, u64::from(won));
        if !won && matches!(step, Step::Announce { .. }) {
            self.take_back(shared, key, next.next).await;
        }
        if won && next.is_plain() {
            // Readers that still have the record find the same as those that have none.
            let version = record.map_or(1, |record| record.version) + 1;
            self.registrar.unlist(shared, key, version).await?;
        }
        Ok(won)
    }

    /// Replaces the record; whether this process did.
    pub(super) async fn put(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: Option<&Record>,
        next: &plan::Salt,
    ) -> Result<bool> {
        let nonce = shared.roll() ^ shared.options.seed;
        let empty = Record::first(nonce);
        let new = record.unwrap_or(&empty).with(nonce, PART, Some(&next.encode()));
        let replaced = self.registrar.put(shared, key, record, &new).await?;
        #[cfg(feature = "testing")]
        if let Replaced::Lost(Some(now)) = &replaced
            && self.is_broken(super::SaltMutant::KeepsTheSum)
        {
            let new = now.with(nonce, PART, Some(&next.encode()));
            return Ok(self.registrar.put(shared, key, Some(now), &new).await? == Replaced::Won);
        }
        Ok(replaced == Replaced::Won)
    }

    fn watch_again(&self, key: &Key, at: Tick, plan: &plan::Salt) {
        if let Some(job) = self.jobs.lock().0.get_mut(key) {
            job.watch = Watch::default();
            job.watch.see(at, plan);
        }
    }

    /// Chooses names and makes the slots.
    async fn announce(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: Option<&Record>,
        plan: &plan::Salt,
        (k, home, armed): (u16, bool, bool),
    ) -> Result<Option<plan::Salt>> {
        let full = self.registrar.with(|catalog| {
            catalog.list().get(key).is_none() && catalog.list().len() >= self.options.listed_max
        });
        if full {
            return Err(Error::not_applied(ErrorKind::Limit, "the registry is full").with_key(key));
        }
        if record.is_none() {
            let bare = self.ask(shared, shared.store.clone().get(key.clone())).await?;
            if bare.is_some_and(|stored| stored.ttl_left.is_some()) {
                let text = "a counter that expires is not salted";
                return Err(Error::not_applied(ErrorKind::Limit, text).with_key(key));
            }
        }
        let kind = match (home, self.options.parity) {
            (true, _) => Kind::Home,
            (false, true) => Kind::Parity,
            (false, false) => Kind::Slots,
        };
        let id = plan.last.saturating_add(1);
        let seed = if kind == Kind::Slots { self.seed(shared, key, id, k).await } else { 0 };
        let next = plan.announced(k, kind, seed, armed);
        if let Some(of) = next.as_ref().and_then(|next| next.next).filter(|_| kind != Kind::Home) {
            let open = |index| -> BoxFuture<'static, Result<i64>> {
                shared.store.clone().add(self.name(key, Slot { of, index }), 0)
            };
            let opened = join::all((0..of.k).map(|i| self.asking(shared, open(i)))).await;
            opened.into_iter().collect::<Result<Vec<_>>>()?;
        }
        Ok(next)
    }

    /// Another process has announced something else: the slots made for nothing go. Tidiness only;
    /// what fails here stays where nobody reads it.
    async fn take_back(&self, shared: &Arc<Shared>, key: &Key, made: Option<Gen>) {
        let there = self.registrar.with(|c| c.record(key).map(|record| self.plan_of(record)));
        let Some(of) = made.filter(|of| of.kind == Kind::Slots) else { return };
        let used = there
            .is_none_or(|plan| plan.map_or(true, |plan| plan.read_set().any(|slot| slot.of == of)));
        if !used {
            let names = (0..of.k).map(|index| self.name(key, Slot { of, index })).collect();
            drop(self.ask(shared, delete(shared, names)).await);
        }
    }

    /// The seed whose names share shards the least, of those that are tried.
    async fn seed(&self, shared: &Arc<Shared>, key: &Key, id: u32, k: u16) -> u32 {
        let first = shared.roll() as u32;
        let place = |seed: u32, index: u16| {
            let of = Gen { id, k, kind: Kind::Slots, seed };
            shared.store.shard_of(&self.name(key, Slot { of, index }))
        };
        if place(first, 0).is_none() || k == 1 {
            return first;
        }
        let (mut best, mut looked) = ((usize::MAX, first), 0);
        let mut loads: BTreeMap<u32, usize> = BTreeMap::new();
        let mut shards = BTreeSet::new();
        for n in 0..SEEDS {
            let seed = first.wrapping_add(n);
            loads.clear();
            let mut busiest = 0;
            for index in 0..k {
                looked += 1;
                let shard = place(seed, index).unwrap_or(0);
                shards.insert(shard);
                let load = loads.entry(shard).or_default();
                *load += 1;
                busiest = busiest.max(*load);
                if busiest >= best.0 {
                    break;
                }
            }
            if busiest < best.0 {
                best = (busiest, seed);
            }
            // No shard can have less than its share.
            let best_of_all = usize::from(k).div_ceil(shards.len());
            if (n >= SEEDS_MIN && best.0 <= best_of_all) || looked > NAMES_MAX {
                break;
            }
            if looked % NAMES_A_TURN < u32::from(k) {
                shared.runtime.sleep(Duration::ZERO).await;
            }
        }
        best.1
    }

    /// Seals every slot of a generation; what they came to, for good.
    pub(super) async fn seal(&self, shared: &Arc<Shared>, key: &Key, of: Gen) -> Result<i64> {
        let seal = |index| -> BoxFuture<'static, Result<i64>> {
            shared.store.clone().seal(self.name(key, Slot { of, index }), tag(key, of))
        };
        let totals = join::all((0..of.k).map(|i| self.asking(shared, seal(i)))).await;
        totals.into_iter().try_fold(0i64, |sum, total| sum.checked_add(total?).ok_or_else(overflow))
    }

    /// What the slots of a generation hold.
    async fn total(&self, shared: &Arc<Shared>, key: &Key, of: Gen) -> Result<i64> {
        let slots: Vec<Slot> = (0..of.k).map(|index| Slot { of, index }).collect();
        let mut total = 0i64;
        for stored in self.slots_of(shared, key, &slots).await? {
            let Some(stored) = stored else {
                count(&self.tallies.slots_missing, 1);
                continue;
            };
            let n = integer(&stored.bytes).ok_or_else(|| not_a_number(key))?;
            total = total.checked_add(n).ok_or_else(overflow)?;
        }
        Ok(total)
    }

    /// Adds to the retired sum what came late to the slots of a retired generation.
    async fn sweep(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: Option<&Record>,
        plan: &plan::Salt,
        old: Gen,
    ) -> Result<bool> {
        let Some(grave) = plan.graves.iter().find(|g| g.slots.id == old.id) else {
            return Ok(false);
        };
        let began = lease_clock(&shared.clock);
        let late = self.total(shared, key, old).await?.saturating_sub(grave.absorbed);
        if late > 0 {
            let next = plan.swept(old.id, grave.absorbed + late).ok_or_else(overflow)?;
            if !self.put(shared, key, record, &next).await? {
                return Ok(false);
            }
            count(&self.tallies.late, late.unsigned_abs());
        } else if late < 0 {
            // Nobody takes away from a retired slot: the store has lost something.
            self.tallies.lost.fetch_max(late.unsigned_abs(), Ordering::Relaxed);
        }
        if let Some(job) = self.jobs.lock().0.get_mut(key) {
            job.watch.swept(old.id, began);
        }
        Ok(true)
    }

    /// Deletes the slots of a retired generation, after a last look; false when something came
    /// late. The bare key is never deleted.
    async fn bury(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: Option<&Record>,
        plan: &plan::Salt,
        old: Gen,
    ) -> Result<bool> {
        let Some(grave) = plan.graves.iter().find(|g| g.slots.id == old.id) else {
            return Ok(false);
        };
        if old.kind == Kind::Home {
            return Ok(true);
        }
        if grave.is_swept() {
            let slots: Vec<Slot> = (0..old.k).map(|index| Slot { of: old, index }).collect();
            let found = self.slots_of(shared, key, &slots).await?;
            // Where some are deleted already, the last look was taken before.
            if found.iter().all(Option::is_some)
                && self.total(shared, key, old).await? > grave.absorbed
            {
                self.sweep(shared, key, record, plan, old).await?;
                return Ok(false);
            }
        }
        let names: Vec<Key> =
            (0..old.k).map(|index| self.name(key, Slot { of: old, index })).collect();
        let gone = self.ask(shared, delete(shared, names)).await?;
        gone.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(true)
    }

    /// Ends what somebody has begun by sealing the slots in use.
    pub(super) async fn finish(&self, shared: &Arc<Shared>, key: &Key) -> Result<()> {
        let Some(record) = self.registrar.load(shared, key).await? else { return Ok(()) };
        let plan = self.plan_of(&record)?;
        if plan.next.is_some() && self.waits.seal {
            self.take(shared, key, Some(&record), &plan, Step::Replace(plan.cur)).await?;
        }
        Ok(())
    }

    async fn ask<T>(&self, shared: &Arc<Shared>, work: BoxFuture<'static, Result<T>>) -> Result<T> {
        let limit = shared.options.loads.timeout;
        match bounded(shared, limit, call::catch(work)).await {
            Some(Ok(answer)) => answer,
            Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
            None => Err(Error::unknown(ErrorKind::Timeout, "the store did not answer in time")),
        }
    }

    fn asking<T: Send + 'static>(
        &self,
        shared: &Arc<Shared>,
        work: BoxFuture<'static, Result<T>>,
    ) -> BoxFuture<'static, Result<T>> {
        let shared = shared.clone();
        Box::pin(async move {
            match &shared.salted {
                Some(salted) => salted.ask(&shared, work).await,
                None => work.await,
            }
        })
    }
}

fn delete(shared: &Arc<Shared>, names: Vec<Key>) -> BoxFuture<'static, Result<Vec<Result<bool>>>> {
    let store = shared.store.clone();
    Box::pin(async move { Ok(store.delete_many(names).await) })
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
