//! Work that is written down before it begins: filling in units, moving them between buckets.

use super::kind::{Kind, mint};
use super::{Stock, no_stock};
use crate::engine::control::stock::{Answer, Ask, Record, Step, Work, evened, gathered};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::key::Key;
use crate::lanes::ask;
use crate::runtime::BoxFuture;
use crate::store::Once;
use bytes::Bytes;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Attempts at one question of a step.
const STEP_TRIES: u32 = 6;

/// The first pause between two of them; it doubles.
const STEP_PAUSE: Duration = Duration::from_millis(5);

/// Attempts to write down work while others write theirs.
const WRITE_TRIES: u32 = 8;

/// Placements that are tried for the one that spreads the buckets best.
const SEEDS: u64 = 64;

/// All results, in order.
pub(super) async fn all<T: Unpin>(mut work: Vec<BoxFuture<'static, T>>) -> Vec<T> {
    let mut done: Vec<Option<T>> = work.iter().map(|_| None).collect();
    poll_fn(|cx| {
        let mut waiting = false;
        for (slot, job) in done.iter_mut().zip(&mut work) {
            if slot.is_none() {
                match Pin::new(job).poll(cx) {
                    Poll::Ready(out) => *slot = Some(out),
                    Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    done.into_iter().flatten().collect()
}

impl Stock {
    /// Makes the stock: `units` in `buckets`, spread over the shards where the store knows them.
    /// False when it is there already, with whatever it has.
    ///
    /// # Cost
    /// Store operations: 2 and one per bucket.
    ///
    /// # Cancel safety
    /// A dropped call leaves a stock that is being filled; whoever needs it next finishes that.
    ///
    /// # Errors
    /// Those of the store; call it again. [`Limit`](ErrorKind::Limit): no buckets, more than 256,
    /// or more units than 63 bits hold.
    pub async fn create(&self, units: u64, buckets: usize) -> Result<bool> {
        self.check_buckets(buckets)?;
        let first = |seed, nonce| Record::first(units, buckets, seed, nonce);
        self.begun(buckets, first).await?.ok_or_else(|| self.too_many(units))
    }

    /// Writes the first record, unless there is one, and fills in what it says; whether it did.
    /// `None` without a record to write.
    pub(super) async fn begun(
        &self,
        buckets: usize,
        first: impl FnOnce(u64, u64) -> Option<Record>,
    ) -> Result<Option<bool>> {
        let nonce = self.shared().roll();
        let Some(first) = first(self.seed(buckets), nonce) else { return Ok(None) };
        let made = match self.replace(None, &first).await {
            // Nobody knows: the record says whose it is.
            Err(error) if !error.is_unknown() => return Err(error),
            _ => match self.load().await? {
                // Drawn once, and the same for as long as the record lives.
                Some((_, record)) => record.seed == first.seed,
                None => return Err(self.crowded()),
            },
        };
        self.finish().await?;
        Ok(Some(made))
    }

    /// Fills in `units` more, in equal parts.
    ///
    /// # Cost
    /// Store operations: 4 and one per bucket.
    ///
    /// # Cancel safety
    /// A dropped call may have had its effect: [`Accounts::initial`](super::Accounts::initial) says.
    ///
    /// # Errors
    /// Those of the store; of unknown outcome, [`Accounts::initial`](super::Accounts::initial) says
    /// whether they are in. [`Throttled`](ErrorKind::Throttled): others write work of theirs all
    /// the time.
    pub async fn restock(&self, units: u64) -> Result<()> {
        let grown = |record: &Record, nonce| record.grown(units, nonce);
        match self.write(grown).await? {
            // They are written down, and whoever needs them fills them in.
            true => self.finish().await.map(drop).map_err(|e| e.after(true)),
            false => Err(self.too_many(units)),
        }
    }

    /// Evens out the buckets, so that the last units sell as fast as the first; how many units were
    /// moved. A process does it by itself when it finds a bucket empty.
    ///
    /// # Cost
    /// Store operations: 2 and one per bucket to see; then 4, and 3 per move.
    ///
    /// # Cancel safety
    /// A dropped call leaves moves that whoever needs them finishes.
    ///
    /// # Errors
    /// Those of the store. [`Throttled`](ErrorKind::Throttled) as for [`restock`](Stock::restock).
    pub async fn rebalance(&self) -> Result<u64> {
        self.finish().await?;
        let (picture, _) = self.look(Duration::ZERO).await?;
        let moves = evened(&picture.levels);
        if moves.is_empty() || !picture.still {
            return Ok(0);
        }
        let work = |record: &Record, nonce| record.moving(moves.clone(), nonce);
        if self.write(work).await? { self.finish().await } else { Ok(0) }
    }

    /// Moves all units into the fullest bucket, for holds of more units than any bucket has; how
    /// many were moved.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`rebalance`](Stock::rebalance).
    pub async fn gather(&self) -> Result<u64> {
        self.gather_into(None).await
    }

    /// Moves all units into bucket `to`, or into the fullest.
    pub(super) async fn gather_into(&self, to: Option<usize>) -> Result<u64> {
        self.finish().await?;
        let (picture, _) = self.look(Duration::ZERO).await?;
        let fullest = || picture.levels.iter().enumerate().max_by_key(|(_, n)| **n);
        let to = to.or_else(|| fullest().map(|(bucket, _)| bucket)).unwrap_or(0);
        let moves = gathered(&picture.levels, to);
        if moves.is_empty() || !picture.still {
            return Ok(0);
        }
        let work = |record: &Record, nonce| record.moving(moves.clone(), nonce);
        if self.write(work).await? { self.finish().await } else { Ok(0) }
    }

    /// Carries out whatever work is written down, this process's or another's; units moved.
    pub(super) async fn finish(&self) -> Result<u64> {
        let Some((bytes, record)) = self.load().await? else {
            return Err(no_stock(&self.core.key));
        };
        if record.work == Work::None {
            return Ok(0);
        }
        let names: Arc<[Key]> = (0..record.buckets)
            .map(|bucket| self.core.kind.bucket(&self.core.key, record.seed, bucket))
            .collect();
        let mut steps = record.steps();
        let broken = *self.core.broken.lock();
        steps.iter_mut().for_each(|step| step.break_by(broken));
        let run = |(i, step)| -> BoxFuture<'static, Result<u64>> {
            // Fillings have one step a bucket, in their order.
            Box::pin(self.clone().carry_out(names.clone(), step, record.first_number(i)))
        };
        let done = all(steps.into_iter().enumerate().map(run).collect()).await;
        let moved = done.into_iter().sum::<Result<u64>>()?;
        // Lost or unknown: another has done it, or the next one will.
        match self.replace(Some(bytes), &record.rested(self.shared().roll())).await {
            Err(error) if !error.is_unknown() => return Err(error),
            _ => drop(self.load().await?),
        }
        Ok(moved)
    }

    /// One step, from wherever another may have left it; units moved.
    async fn carry_out(self, names: Arc<[Key]>, mut step: Step, first: u64) -> Result<u64> {
        let shared = self.shared();
        let id = step.id.clone();
        let mut tries = 0;
        while let Some(question) = step.ask() {
            let store = shared.store.clone();
            let name = |bucket: usize| names[bucket].clone();
            let answer = match question {
                Ask::Take(bucket, amount) => {
                    let took = store.take(name(bucket), amount, id.clone());
                    ask(shared, took).await.map(Answer::Took)
                }
                Ask::Add(bucket, amount) if self.core.kind == Kind::Tokens => {
                    let numbers = first..first.saturating_add(amount);
                    let minted = mint(shared, &names[bucket], &id, numbers).await;
                    minted.map(|()| Answer::Once(Once::Duplicate))
                }
                Ask::Add(bucket, amount) => {
                    // What was taken from a 64-bit integer fits into one.
                    let amount = i64::try_from(amount).unwrap_or(i64::MAX);
                    let added = store.add_once(name(bucket), id.clone(), amount);
                    ask(shared, added).await.map(Answer::Once)
                }
                Ask::Poison(bucket) => {
                    let poisoned = store.poison_once(name(bucket), id.clone());
                    ask(shared, poisoned).await.map(Answer::Once)
                }
                Ask::End(bucket, end) => {
                    let ended = store.end_hold(name(bucket), id.clone(), end);
                    ask(shared, ended).await.map(Answer::Ended)
                }
            };
            match answer {
                Ok(answer) => {
                    step.heard(answer);
                    tries = 0;
                }
                // It will not fit the next time either.
                Err(error) if error.kind() == ErrorKind::Overflow && step.refused() => tries = 0,
                Err(error) => {
                    tries += 1;
                    if tries == STEP_TRIES {
                        // The work stays written down: whoever needs it goes on.
                        return Err(error.with_key(&self.core.key));
                    }
                    shared.runtime.sleep(STEP_PAUSE * (1 << tries)).await;
                }
            }
        }
        Ok(step.moved())
    }

    /// Writes down work once none is under way; false when `next` has none to write.
    async fn write(&self, next: impl Fn(&Record, u64) -> Option<Record>) -> Result<bool> {
        let nonce = self.shared().roll();
        // A write of unknown outcome, and the epoch that it was to replace: it may land late.
        let mut doubt: Option<(u64, Error)> = None;
        for _ in 0..WRITE_TRIES {
            let found = self.load().await.map_err(|e| e.after(doubt.is_some()))?;
            let Some((bytes, record)) = found else {
                return Err(no_stock(&self.core.key).after(doubt.is_some()));
            };
            match &doubt {
                Some(_) if record.nonce == nonce => return Ok(true),
                // Work that is done already has raised the epoch, and took another nonce.
                Some((epoch, error)) if record.epoch != *epoch => return Err(error.clone()),
                _ => {}
            }
            if record.work != Work::None {
                self.finish().await?;
                continue;
            }
            let Some(next) = next(&record, nonce) else { return Ok(false) };
            match self.replace(Some(bytes), &next).await {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) if error.is_unknown() => doubt = Some((record.epoch, error)),
                Err(error) => return Err(error.after(doubt.is_some())),
            }
        }
        Err(doubt.map_or_else(|| self.crowded(), |(_, error)| error))
    }

    /// Replaces the record; whether it did.
    async fn replace(&self, old: Option<Bytes>, new: &Record) -> Result<bool> {
        let (shared, name) = (self.shared(), self.core.kind.record().of(&self.core.key));
        let set = shared.store.clone().compare_and_set(name, old, new.encode().into(), None);
        ask(shared, set).await.map_err(|e| e.with_key(&self.core.key))
    }

    /// The placement that puts the fewest buckets on one shard.
    fn seed(&self, buckets: usize) -> u64 {
        let store = &self.shared().store;
        let busiest = |seed: u64| {
            let mut shards: HashMap<Option<u32>, usize> = HashMap::new();
            for bucket in 0..buckets {
                let name = self.core.kind.bucket(&self.core.key, seed, bucket);
                *shards.entry(store.shard_of(&name)).or_default() += 1;
            }
            shards.into_values().max().unwrap_or(0)
        };
        let drawn = self.shared().roll() >> 16;
        let seeds = drawn..drawn + if store.capability().shard_of { SEEDS } else { 1 };
        seeds.min_by_key(|seed| busiest(*seed)).unwrap_or(drawn)
    }

    pub(super) fn too_many(&self, units: u64) -> Error {
        let text = format!("{units} more units do not fit into 63 bits");
        Error::not_applied(ErrorKind::Limit, text).with_key(&self.core.key)
    }

    fn crowded(&self) -> Error {
        let text = "the stock's record could not be written: others write it all the time";
        Error::not_applied(ErrorKind::Throttled, text)
            .with_retry(Retry::After(Duration::from_millis(50)))
            .with_key(&self.core.key)
    }
}
