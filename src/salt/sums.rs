//! Sums of salted counters: what is read, and what it comes to.

use super::{SUM_TRIES, Salted, View, count, gone, join};
use crate::adds::Cell;
use crate::batch::bounded;
use crate::call;
use crate::counter::{Total, integer, not_a_number};
use crate::engine::control::registry::Record;
use crate::engine::control::salt::{self as plan, Kind, Slot};
use crate::engine::data::joined::Op;
use crate::engine::data::sums::Parts;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::lanes::overflow;
use crate::registry::lease_clock;
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use crate::store::Stored;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What a sum came to.
pub(super) struct Found {
    pub(super) total: Total,
    /// By generation and number; `None` for a slot that did not answer.
    parts: Vec<((u32, u16), Option<i64>)>,
}

/// What each of some slots answered.
type Answers = Vec<Result<Option<Stored>>>;

impl Salted {
    /// The sum of the counter: every add that was acknowledged before this was called is in it,
    /// once; but for what came to slots that do not answer since they were last seen.
    pub(crate) async fn sum(&self, shared: &Arc<Shared>, cell: &Cell) -> Result<Total> {
        for _ in 0..SUM_TRIES {
            let view = self.view(shared, &cell.key, Op::Sum).await?;
            let started = shared.clock.now();
            let known = cell.parts.lock().clone();
            if let Some(found) = self.sum_by(shared, &cell.key, &view, &known).await? {
                let lost = cell.parts.lock().see(started, shared.clock.now(), &found.parts);
                if cell.only_grows.load(Ordering::Relaxed) {
                    count(&self.tallies.slots_lost, lost);
                }
                return Ok(found.total);
            }
            count(&self.tallies.sums_again, 1);
        }
        Err(Error::not_applied(ErrorKind::Store, "the counter changes faster than it can be read"))
    }

    /// Lets the others know of the record that this process has just made.
    pub(super) async fn tell(&self, shared: &Arc<Shared>, key: &Key) -> Result<()> {
        let Some(stamp) = self.registrar.with(|c| c.record(key).map(Record::stamp)) else {
            return Ok(());
        };
        let told = self.registrar.publish(shared, key, stamp).await;
        told.map(drop).map_err(|e| e.with_outcome(Outcome::Unknown))
    }

    /// The sum under a record; `None` when that is not in force any more. Slots that do not answer
    /// count as they are `known`.
    pub(super) async fn sum_by(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        view: &View,
        known: &Parts,
    ) -> Result<Option<Found>> {
        let home = || vec![Slot { of: plan::HOME, index: 0 }];
        let (slots, retired, fold, by, until) = match view {
            View::Plain(until) => (home(), 0, None, None, *until),
            View::Salted(plan, by, until) => {
                (plan.read_set().collect(), plan.retired, plan.carried(), Some(*by), *until)
            }
        };
        let Some((read, carried)) = self.read_beside(shared, key, &slots, (fold, known)).await?
        else {
            return Ok(None);
        };
        let mut sum = retired.checked_add(carried).ok_or_else(overflow)?;
        let (mut sealed, mut missing, mut behind) = (false, 0, 0u16);
        let mut parts = Vec::with_capacity(slots.len());
        for (slot, answer) in slots.iter().zip(read) {
            let name = (slot.of.id, slot.index);
            let stored = match (answer, known.value(name)) {
                (Ok(stored), _) => stored,
                // Whether the fold is in an older value of the bare key is not known; and a sum of
                // nothing that answers is none.
                (Err(_), Some(n))
                    if (fold.is_none() || slot.of.kind != Kind::Home)
                        && usize::from(behind) + 1 < slots.len() =>
                {
                    sum = sum.checked_add(n).ok_or_else(overflow)?;
                    behind += 1;
                    parts.push((name, None));
                    continue;
                }
                (Err(error), _) => return Err(error),
            };
            // An absent bare key counts as zero. A slot was made when it was announced.
            missing += u64::from(stored.is_none() && slot.of.kind != Kind::Home);
            sealed |= stored.as_ref().is_some_and(|stored| stored.sealed);
            let n = match stored {
                None => 0,
                Some(stored) => integer(&stored.bytes).ok_or_else(|| not_a_number(key))?,
            };
            sum = sum.checked_add(n).ok_or_else(overflow)?;
            parts.push((name, Some(n)));
        }
        let found = Found { total: Total { sum, behind }, parts };
        let now = lease_clock(&shared.clock).after(shared.clock.resolution());
        let doubtful = (sealed || missing > 0) && !self.trusts_what_it_reads();
        if now < until && !doubtful {
            return Ok(Some(found));
        }
        // The record is the same before and after: it was so all the time.
        let after = self.registrar.load(shared, key).await?;
        if by.is_none() || after.map(|record| (record.version, record.nonce)) != by {
            return Ok(None);
        }
        // What a slot held that is gone counts as zero.
        count(&self.tallies.slots_missing, missing);
        Ok(Some(found))
    }

    /// The slots, and what of the fold is not among them; `None` when it came there meanwhile.
    async fn read_beside(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        slots: &[Slot],
        (fold, known): (Option<plan::Fold>, &Parts),
    ) -> Result<Option<(Answers, i64)>> {
        // Who can do without some slots waits for none of them for long.
        let all_known = slots.len() > 1
            && slots.iter().all(|slot| known.value((slot.of.id, slot.index)).is_some());
        let longest = shared.options.loads.timeout;
        let limit = if all_known { longest.min(self.options.timeout) } else { longest };
        let Some(fold) = fold else {
            return Ok(Some((self.answers_of(shared, key, slots, limit).await, 0)));
        };
        let mark = || self.ask(shared, shared.store.clone().folded(key.clone(), fold.mark()));
        let before = mark().await?;
        let read = self.answers_of(shared, key, slots, limit).await;
        let after = before || self.ignores_marks() || mark().await?;
        let carried = if before && !self.ignores_marks() { 0 } else { fold.amount };
        let same = before == after || self.ignores_marks();
        Ok(same.then_some((read, carried)))
    }

    /// All of some slots, or an error.
    pub(super) async fn slots_of(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        slots: &[Slot],
    ) -> Result<Vec<Option<Stored>>> {
        let limit = shared.options.loads.timeout;
        self.answers_of(shared, key, slots, limit).await.into_iter().collect()
    }

    /// One read a shard, each with this limit.
    pub(super) async fn answers_of(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        slots: &[Slot],
        limit: Duration,
    ) -> Answers {
        let names: Vec<Key> = slots.iter().map(|slot| self.name(key, *slot)).collect();
        let mut by_shard: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
        for (at, name) in names.iter().enumerate() {
            by_shard.entry(shared.store.shard_of(name)).or_default().push(at);
        }
        let reads = by_shard.values().map(|at| {
            let names = at.iter().map(|at| names[*at].clone()).collect();
            some_of(shared.clone(), names, limit)
        });
        let late = || Err(Error::not_applied(ErrorKind::Store, "the store did not answer"));
        let mut answers: Answers = names.iter().map(|_| late()).collect();
        let read = join::all(reads).await;
        for (at, answer) in by_shard.values().flatten().zip(read.into_iter().flatten()) {
            answers[*at] = answer;
        }
        answers
    }

    /// Starts the count again from zero. Adds that were acknowledged before are taken off, those
    /// that come later stay.
    pub(crate) async fn reset(&self, shared: &Arc<Shared>, key: &Key) -> Result<()> {
        for _ in 0..SUM_TRIES {
            let Some(record) = self.registrar.load(shared, key).await? else { return Err(gone()) };
            let plan = self.plan_of(&record)?;
            Salted::check_op(&plan, key, Op::Sum)?;
            let view = View::Salted(plan.clone(), (record.version, record.nonce), Tick::ZERO);
            let Some(found) = self.sum_by(shared, key, &view, &Parts::default()).await? else {
                continue;
            };
            let next = plan.reset(found.total.sum).ok_or_else(overflow)?;
            if self.put(shared, key, Some(&record), &next).await? {
                self.drop_total(shared, key).await;
                return self.tell(shared, key).await;
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "the counter changes faster than it can be read"))
    }
}

/// One read of some keys, each with an answer.
fn some_of(shared: Arc<Shared>, names: Vec<Key>, limit: Duration) -> BoxFuture<'static, Answers> {
    Box::pin(async move {
        let asked = names.len();
        let work = call::catch(shared.store.clone().get_many(names));
        let failed = match bounded(&shared, limit, work).await {
            Some(Ok(answers)) if answers.len() == asked => return answers,
            Some(Ok(_)) => {
                let text = "the store answered fewer keys than it was asked";
                Error::not_applied(ErrorKind::Store, text)
            }
            Some(Err(panic)) => panic,
            None => Error::not_applied(ErrorKind::Timeout, "the store did not answer in time"),
        };
        (0..asked).map(|_| Err(failed.clone())).collect()
    })
}
