//! The total of a salted counter under a key of its own: one process writes it, the others read it
//! with one get. Who writes is decided in `engine/control/totals`.

use super::{Salted, View};
use crate::adds::Cell;
use crate::counter::{Counter, Sum};
use crate::engine::control::registry::Record;
use crate::engine::control::totals::{Turn, Written, lives, overdue, turn};
use crate::engine::data::joined::Op;
use crate::engine::data::sums::Serve;
use crate::engine::time::Tick;
use crate::error::{ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::key::Key;
use crate::names::Part;
use crate::read::From;
use crate::registry::lease_clock;
use crate::shared::{Loaded, Shared};
use crate::store::Stored;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Totals that are begun in one turn of the driver; the others have the next.
const TOTALS_A_TURN: usize = 32;

/// When this process looks at which total again.
#[derive(Default)]
pub(super) struct Totals {
    due: BTreeMap<Key, Tick>,
    look: Tick,
}

impl Salted {
    /// Writes the totals that are due, if this process is to.
    pub(super) fn keep_totals(&self, shared: &Arc<Shared>, now: Tick) {
        let Some(every) = self.options.totals else { return };
        let mut totals = self.totals.lock();
        if now < totals.look || shared.options.steering.observe_only {
            return;
        }
        totals.look = now.after(every / 10);
        let keys: Vec<Key> = self.registrar.with(|catalog| {
            let joins = |key: &Key| {
                let plan = catalog.record(key).and_then(Record::salt);
                plan.is_some_and(|plan| plan.op.joins())
            };
            totals.due.retain(|key, _| catalog.list().get(key).is_some() && !joins(key));
            catalog.list().keys().filter(|key| !joins(key)).cloned().collect()
        });
        for key in keys {
            // Not all processes at once, and not all keys.
            let drawn = u32::try_from(shared.roll() % 1000).unwrap_or(0);
            totals.due.entry(key).or_insert_with(|| now.after(every * drawn / 1000));
        }
        let begun = overdue(&totals.due, now, TOTALS_A_TURN);
        for key in &begun {
            totals.due.insert(key.clone(), now.after(every));
        }
        drop(totals);
        for key in begun {
            let shared = shared.clone();
            let runtime = shared.runtime.clone();
            runtime.spawn(Box::pin(async move {
                if let Some(salted) = &shared.salted {
                    // One that is not written expires, and readers sum up.
                    drop(salted.write_total(&shared, &key, every).await);
                }
            }));
        }
    }

    async fn write_total(&self, shared: &Arc<Shared>, key: &Key, every: Duration) -> Result<()> {
        let (store, name, began) = (&shared.store, Part::Total.of(key), lease_clock(&shared.clock));
        let before = self.ask(shared, store.clone().get(name.clone())).await?;
        let found = before.as_ref().map(|stored| Written::parse(&stored.bytes));
        let me = shared.options.seed;
        if let Turn::Rest(pause) = turn(found.as_ref().map(Option::as_ref), me, every) {
            self.totals.lock().due.insert(key.clone(), began.after(pause));
            return Ok(());
        }
        if matches!(self.view(shared, key, Op::Sum).await?, View::Plain(_)) {
            return Ok(());
        }
        let cell = shared.counters.cell(shared.hash(key), key);
        let total = self.sum(shared, &cell).await?;
        // One with parts from before may be less than the last; so may one that took very long.
        let elapsed = lease_clock(&shared.clock).since(began) + shared.clock.resolution();
        if total.behind > 0 || elapsed >= every {
            return Ok(());
        }
        let text = Written { sum: total.sum, by: me, every }.encode();
        let (was, lives) = (before.map(|stored| stored.bytes), Some(lives(every, elapsed)));
        let written = store.clone().compare_and_set(name, was, text.into(), lives);
        self.ask(shared, written).await.map(drop)
    }

    /// The counter has begun again from zero: the total is of what was before, and so is one that is
    /// being written and replaces it. What cannot be deleted expires.
    pub(super) async fn drop_total(&self, shared: &Arc<Shared>, key: &Key) {
        forget_total(shared, key);
        let names = vec![Part::Total.of(key)];
        let store = shared.store.clone();
        drop(self.ask(shared, Box::pin(async move { Ok(store.delete_many(names).await) })).await);
    }
}

/// From now on this process serves no total of `key` from before.
pub(super) fn forget_total(shared: &Arc<Shared>, key: &Key) {
    if let Some(cell) = shared.counters.known_cell(shared.hash(key), key) {
        cell.written.lock().forget(shared.clock.now());
    }
}

impl Counter {
    /// The sum as one process of the fleet writes it for all, where one does
    /// ([`Salt::totals`](crate::Salt::totals)) and the counter is salted; else [`sum`](Counter::sum).
    ///
    /// # Staleness
    /// [`Sum::age`]: one interval of the writer, four when it has just died, and
    /// [`Adds::sum_ttl`](crate::Adds::sum_ttl); it counts from the begin of the sum, less the time that
    /// the total took on its way to the store. No total of this process is of an older count than
    /// one before, but for a sum of which slots are [`behind`](Sum::behind). After a
    /// [`reset`](Counter::reset) or an expiry none is of the count before, in the process that did
    /// it; in others it may be for as long as the age says.
    ///
    /// # Cost
    /// Store operations: 0 while the last total is young enough, else 1, shared by all who wait.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`sum`](Counter::sum).
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, Salt, store::MemoryStore};
    /// # use std::time::Duration;
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let salt = Salt::new().totals(Duration::from_secs(1));
    /// let hs = Heatsink::builder(MemoryStore::new(8)).salt(salt).build()?;
    /// hs.counter("post:9:likes").add(3).await?;
    /// assert_eq!(hs.counter("post:9:likes").total().await?.total(), 3);
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub async fn total(&self) -> Result<Sum> {
        self.latest_total().await.map(|(sum, _)| sum)
    }

    /// The total, and when its load began where that tells of a loss.
    pub(crate) async fn latest_total(&self) -> Result<(Sum, Tick)> {
        let shared = self.hs.shared();
        let served = |total, began| Sum::new(total, shared.clock.now().since(began));
        let ttl = shared.options.adds.sum_ttl;
        let after = match written_total(&self.hs, &self.cell).await? {
            // Older than its load: none takes it for a loss.
            Some(Serve::Total(total, began)) => return Ok((served(total, began), Tick::ZERO)),
            Some(Serve::Sum(after)) => after,
            Some(Serve::Look) | None => return self.young_sum().await,
        };
        let max_age = ttl.min(shared.clock.now().since(after));
        let (sum, started) = shared.last_sum(&self.cell, self.load_sum(max_age).await)?;
        if sum.behind() == 0 {
            self.cell.written.lock().learn_sum(sum.total(), started, shared.clock.now());
        }
        Ok((sum, started))
    }
}

/// The total of a salted counter, with one read; where there is none, a sum that began after what is
/// given is right. `None`: whatever sum.
async fn written_total(hs: &Heatsink, cell: &Arc<Cell>) -> Result<Option<Serve>> {
    let shared = hs.shared();
    let Some(salted) = &shared.salted else { return Ok(None) };
    // Whoever sums up a counter whose time is over lets it begin again.
    let is_over = || {
        let now_ms = shared.clock.wall_ms();
        salted.registrar.with(|catalog| {
            let plan = catalog.record(&cell.key).and_then(Record::salt);
            plan.is_some_and(|plan| plan.is_expired(now_ms))
        })
    };
    if !salted.is_salted(shared, &cell.key) || is_over() {
        return Ok(None);
    }
    let limit = shared.options.adds.sum_ttl.saturating_sub(shared.options.policy.resolution);
    let known = cell.written.lock().serve(shared.clock.now(), limit);
    if known != Serve::Look {
        return Ok(Some(known));
    }
    let looked = shared.clock.now();
    let (found, looked) = match read_total(hs, cell, limit).await {
        Ok(read) => read,
        // A shard that does not answer has one key of many; the sum says what it can.
        Err(error) if error.kind() != ErrorKind::Shed => (None, looked),
        Err(error) => return Err(error.with_key(&cell.key)),
    };
    let mut written = cell.written.lock();
    written.learn(found, looked, shared.clock.now());
    Ok(Some(written.serve(looked, limit.max(Duration::from_nanos(1)))))
}

/// The total that is stored, with when its sum began; and when the read began.
async fn read_total(
    hs: &Heatsink,
    cell: &Arc<Cell>,
    limit: Duration,
) -> Result<(Option<(i64, Tick)>, Tick)> {
    let shared = hs.shared();
    let name = Part::Total.of(&cell.key);
    let (store, of) = (shared.store.clone(), name.clone());
    let from = From::loader(|| async move {
        let stored = store.get(of).await?;
        let found = stored.and_then(|s| Some((Written::parse(&s.bytes)?, s.ttl_left)));
        let text = found.map_or_else(String::new, |(written, left)| {
            format!("{} {}", written.sum, written.age(left).as_nanos())
        });
        let stored = Some(Stored::new(text));
        Ok(Loaded { stored, by_loader: true, uncached: false, decoded: None })
    });
    let loaded = hs.join_or_lead((shared.hash(&name), name), Some(limit), from, 0).await?;
    let looked = loaded.entry().ages.started;
    let text = std::str::from_utf8(&loaded).unwrap_or_default();
    let found = text.split_once(' ').and_then(|(sum, age)| {
        let age = Duration::from_nanos(age.parse().ok()?);
        Some((sum.parse().ok()?, looked.before(age)))
    });
    Ok((found, looked))
}
