//! The steps of a rotation, carried out: each is one compare-and-set, or may be repeated.

use super::{PART, Salted, count, join, tag};
use crate::batch::bounded;
use crate::call;
use crate::counter::{integer, not_a_number};
use crate::engine::control::registry::Record;
use crate::engine::control::rotation::{Step, Waits};
use crate::engine::control::salt::{self as plan, Gen, Kind, Slot};
use crate::engine::data::joined::Op;
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

/// Seeds that are tried for names that fall on different shards.
const SEEDS: u32 = 1 << 18;

/// Names that are looked at for them: some tenths of a second, once in a rotation.
const NAMES_MAX: u32 = 1 << 21;

/// Seeds after which the shards are taken for known.
const SEEDS_MIN: u32 = 16;

/// Names that are looked at between two turns of the scheduler.
const NAMES_A_TURN: u32 = 1 << 14;

impl Salted {
    /// Takes a step; false when the record had changed.
    pub(super) async fn take(
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
        if !self.is_ready(shared, key, record, plan, step).await? {
            return Ok(false);
        }
        let (next, tally) = match step {
            Step::Wait(_) => return Ok(true),
            Step::Announce { k, home, armed } => {
                let next = self.announce(shared, key, record, plan, (k, home, armed)).await?;
                (next, Some(&self.tallies.announced))
            }
            Step::Arm => (plan.armed(), Some(&self.tallies.announced)),
            Step::Switch => (plan.switched(), Some(&self.tallies.switched)),
            // The bare key that others use is never sealed, whoever asks.
            Step::Replace(_) if !plan.may_replace() => return Ok(false),
            Step::Replace(old) => {
                self.fits_home(shared, key, (plan.op, old)).await?;
                let total = self.end(shared, key, (plan.op, old)).await?;
                (plan.replaced(total), Some(&self.tallies.switched))
            }
            Step::Retire(old) => {
                let sealed = self.waits.seal || plan.op.joins();
                let total = self.end(shared, key, (plan.op, old)).await?;
                (plan.retired(old.id, total, sealed), Some(&self.tallies.retired))
            }
            Step::Sweep(old) => return self.sweep(shared, key, record, plan, old).await,
            Step::Forget(old) => {
                if !self.bury(shared, key, record, plan, old).await? {
                    return Ok(false);
                }
                (plan.forgotten(old.id), Some(&self.tallies.forgotten))
            }
            Step::BeginFold => (plan.folding(shared.roll() as u32), None),
            Step::Fold(fold) => {
                let work = shared.store.clone().fold(key.clone(), fold.mark(), fold.amount);
                self.ask(shared, work).await?;
                self.watch_folded(shared, key, fold, true);
                return Ok(true);
            }
            Step::EndFold(fold) => {
                let there = shared.store.clone().folded(key.clone(), fold.mark());
                if !self.ask(shared, there).await? {
                    // The store has lost it, and the mark with it.
                    self.watch_folded(shared, key, fold, false);
                    return Ok(false);
                }
                (plan.folded(), Some(&self.tallies.folded))
            }
            Step::ForgetFold(fold) => {
                self.ask(shared, shared.store.clone().unfold(key.clone(), fold.mark())).await?;
                (plan.unfolded(), None)
            }
        };
        let next = next.ok_or_else(overflow)?;
        let won = self.put(shared, key, record, &next).await?;
        tally.into_iter().for_each(|tally| count(tally, u64::from(won)));
        if !won && matches!(step, Step::Announce { .. }) {
            self.take_back(shared, key, next.next).await;
        }
        Ok(won)
    }

    /// The last moment before a step: what everybody was given time to learn is still published, and
    /// the bare key of a counter that soon expires does not go by itself.
    async fn is_ready(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: Option<&Record>,
        plan: &plan::Salt,
        step: Step,
    ) -> Result<bool> {
        let waited = matches!(step, Step::Switch | Step::Retire(_) | Step::Forget(_));
        if waited || matches!(step, Step::Fold(_) | Step::EndFold(_) | Step::ForgetFold(_)) {
            let stamp = record.map(Record::stamp).unwrap_or_default();
            let (at, before) = self.registrar.publish(shared, key, stamp).await?;
            if !before {
                self.watch_again(key, at, plan);
                return Ok(false);
            }
        }
        if matches!(step, Step::Switch | Step::Replace(_)) {
            self.keep_bare_if_near(shared, key, plan).await?;
        }
        Ok(true)
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
        let before = record.map(|record| self.plan_of(record)).transpose()?;
        let next =
            &next.clone().marked(&before.unwrap_or_else(|| plan::Salt::new(false)), nonce as u32);
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
        let mut expires = plan.expires;
        if record.is_none() || plan.is_plain() {
            expires = self.expiry_of_bare(shared, key, plan.op).await?;
        }
        if plan.op.joins() && self.options.parity {
            let text = "Salt::parity is for counters";
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(key));
        }
        let kind = match (home, self.options.parity) {
            (true, _) => Kind::Home,
            (false, true) => Kind::Parity,
            (false, false) => Kind::Slots,
        };
        let id = plan.last.saturating_add(1);
        let seed = if kind == Kind::Slots { self.seed(shared, key, id, k).await } else { 0 };
        let next = plan.announced(k, kind, seed, armed);
        let next = next.map(|next| plan::Salt { expires, ..next });
        if let Some(of) = next.as_ref().and_then(|next| next.next).filter(|_| kind != Kind::Home) {
            if plan.op.joins() {
                if let Err(error) = self.open_places(shared, key, (plan.op, of)).await {
                    drop(self.delete_slots(shared, key, of).await);
                    return Err(error);
                }
                return Ok(next);
            }
            let open = |index| -> BoxFuture<'static, Result<i64>> {
                shared.store.clone().add(self.name(key, Slot { of, index }), 0)
            };
            let opened = join::all((0..of.k).map(|i| self.asking(shared, open(i)))).await;
            if let Err(error) = opened.into_iter().collect::<Result<Vec<_>>>() {
                // The next attempt has other names; those of the article are also the home's.
                if kind == Kind::Slots {
                    drop(self.delete_slots(shared, key, of).await);
                }
                return Err(error);
            }
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

    /// What the slots of a generation came to: for good, where they can be sealed. Of what joins
    /// it is in the bare key now, and zero is left.
    async fn end(&self, shared: &Arc<Shared>, key: &Key, (op, of): (Op, Gen)) -> Result<i64> {
        if op.joins() {
            return self.bring_home(shared, key, (op, of)).await.map(|()| 0);
        }
        if self.waits.seal {
            return self.seal(shared, key, of).await;
        }
        self.total(shared, key, of).await
    }

    /// The waits of one counter: what joins is always sealed, and is in the bare key already.
    pub(super) fn waits_of(&self, plan: &plan::Salt) -> Waits {
        let waits = self.waits();
        if plan.op.joins() { Waits { seal: true, fold: None, ..waits } } else { waits }
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
        let Some(grave) = plan.grave(old.id) else { return Ok(false) };
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
        self.watch_swept(key, old, began);
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
        let Some(grave) = plan.grave(old.id) else { return Ok(false) };
        if old.kind == Kind::Home {
            return Ok(true);
        }
        // Sealed slots too: a store that fails over may have lost the seal.
        if plan.op.joins() {
            if !self.is_home(shared, key, (plan.op, old)).await? {
                return Ok(false);
            }
            return self.delete_slots(shared, key, old).await;
        }
        let slots: Vec<Slot> = (0..old.k).map(|index| Slot { of: old, index }).collect();
        let found = self.slots_of(shared, key, &slots).await?.into_iter();
        let mut found = found.map(|stored| stored.and_then(|stored| integer(&stored.bytes)));
        // Where some are deleted already, the last look was taken before.
        let total = found.try_fold(0i64, |sum, n| sum.checked_add(n?));
        if total.is_some_and(|total| total > grave.absorbed) {
            self.sweep(shared, key, record, plan, old).await?;
            return Ok(false);
        }
        self.delete_slots(shared, key, old).await
    }

    async fn delete_slots(&self, shared: &Arc<Shared>, key: &Key, old: Gen) -> Result<bool> {
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
        if !self.waits_of(&plan).seal {
            return Ok(());
        }
        let step = match plan.next {
            Some(_) if plan.may_replace() => Step::Replace(plan.cur),
            // The registry has lost what was announced before the slots were sealed.
            None if plan.cur.kind == Kind::Slots || plan.exclusive => {
                Step::Announce { k: plan.cur.k, home: false, armed: true }
            }
            _ => return Ok(()),
        };
        self.take(shared, key, Some(&record), &plan, step).await.map(drop)
    }

    pub(super) async fn ask<T>(
        &self,
        shared: &Arc<Shared>,
        work: BoxFuture<'static, Result<T>>,
    ) -> Result<T> {
        let limit = shared.options.loads.timeout;
        match bounded(shared, limit, call::catch(work)).await {
            Some(Ok(answer)) => answer,
            Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
            None => Err(Error::unknown(ErrorKind::Timeout, "the store did not answer in time")),
        }
    }

    pub(super) fn asking<T: Send + 'static>(
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

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;
    use crate::store::MemoryStore;
    use crate::testing::SimRuntime;
    use crate::{Heatsink, Salt};

    #[test]
    fn the_bare_key_that_others_use_is_not_sealed_whoever_asks_for_it() {
        let rt = SimRuntime::new(1);
        let store = MemoryStore::builder().runtime(rt.clone()).build();
        store.put_now("c", "9").unwrap();
        let hs = Heatsink::builder(store.clone()).salt(Salt::new()).runtime(rt.clone());
        let hs = hs.build().unwrap();
        let (shared, key) = (hs.shared(), Key::from("c"));
        let salted = shared.salted.as_ref().unwrap();
        let plan = plan::Salt::new(false).announced(8, Kind::Slots, 1, true).unwrap();
        assert!(rt.block_on(salted.put(shared, &key, None, &plan)).unwrap());
        rt.block_on(salted.finish(shared, &key)).unwrap();
        let step = Step::Replace(plan.cur);
        assert!(!rt.block_on(salted.take(shared, &key, None, &plan, step)).unwrap());
        assert!(!store.get_now("c").unwrap().sealed);
    }
}
