//! The total of a salted counter under a key of its own: one process writes it, the others read it
//! with one get. Who writes is decided in `engine/control/totals`.

use super::{Salted, View};
use crate::adds::Cell;
use crate::counter::Sum;
use crate::engine::control::totals::{LIVES, Turn, Written, turn};
use crate::engine::data::joined::Op;
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
            totals.due.retain(|key, _| catalog.list().get(key).is_some());
            catalog.list().keys().cloned().collect()
        });
        let mut begun = Vec::new();
        for key in keys {
            // Not all processes at once, and not all keys.
            let drawn = u32::try_from(shared.roll() % 1000).unwrap_or(0);
            let due =
                totals.due.entry(key.clone()).or_insert_with(|| now.after(every * drawn / 1000));
            if *due <= now && begun.len() < TOTALS_A_TURN {
                *due = now.after(every);
                begun.push(key);
            }
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
        if total.behind > 0 || lease_clock(&shared.clock).since(began) >= every {
            return Ok(());
        }
        let text = Written { sum: total.sum, by: me, every }.encode();
        let (was, lives) = (before.map(|stored| stored.bytes), Some(every * LIVES));
        let written = store.clone().compare_and_set(name, was, text.into(), lives);
        self.ask(shared, written).await.map(drop)
    }
}

/// The total of a salted counter, with one read; `None` where there is none.
pub(crate) async fn written_total(hs: &Heatsink, cell: &Arc<Cell>) -> Result<Option<Sum>> {
    let shared = hs.shared();
    if !shared.salted.as_ref().is_some_and(|salted| salted.is_salted(shared, &cell.key)) {
        return Ok(None);
    }
    let now = shared.clock.now();
    let limit = shared.options.adds.sum_ttl.saturating_sub(shared.options.policy.resolution);
    let known = *cell.written.lock();
    if let Some((total, loaded, age)) = known.filter(|known| now.since(known.1) < limit) {
        return Ok(Some(Sum::new(total, age + now.since(loaded))));
    }
    let name = Part::Total.of(&cell.key);
    let (store, of) = (shared.store.clone(), name.clone());
    let from = From::loader(|| async move {
        let stored = store.get(of).await?;
        let found = stored.and_then(|s| Some((Written::parse(&s.bytes)?, s.ttl_left)));
        let text = found.map_or_else(String::new, |(written, left)| {
            format!("{} {}", written.sum, written.age(left).as_millis())
        });
        let stored = Some(Stored::new(text));
        Ok(Loaded { stored, by_loader: true, uncached: false, decoded: None })
    });
    let loaded = match hs.join_or_lead((shared.hash(&name), name), Some(limit), from, 0).await {
        Ok(loaded) => loaded,
        // A shard that does not answer has one key of many; the sum says what it can.
        Err(error) if error.kind() != ErrorKind::Shed => return Ok(None),
        Err(error) => return Err(error.with_key(&cell.key)),
    };
    let text = std::str::from_utf8(&loaded).unwrap_or_default();
    let Some((sum, age)) = text.split_once(' ') else { return Ok(None) };
    let (Ok(sum), Ok(age)) = (sum.parse(), age.parse()) else { return Ok(None) };
    let age = Duration::from_millis(age);
    *cell.written.lock() = Some((sum, loaded.entry().ages.started, age));
    Ok(Some(Sum::new(sum, age + loaded.age())))
}
