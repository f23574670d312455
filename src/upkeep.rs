//! What the driver and the operator do to an instance: replace the index, end loads that take too
//! long, clear what nobody can read any more, add up what has been counted.

use crate::cell::{Cell, Index, Spread};
use crate::engine::control::shards::SHARDS_MAX;
use crate::engine::control::steering::Steering;
use crate::engine::data::gate::Tally;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind};
use crate::key::Key;
use crate::shared::Shared;
use crate::sync::Ordering;
use std::sync::Arc;

/// Loads under way.
#[derive(Default)]
pub(crate) struct InFlight {
    pub(crate) all: usize,
    pub(crate) by_shard: Vec<usize>,
}

impl InFlight {
    fn add(&mut self, shard: Option<u32>, n: usize) {
        self.all += n;
        let Some(shard) = shard.map(|s| s as usize).filter(|s| *s < SHARDS_MAX) else { return };
        if self.by_shard.len() <= shard {
            self.by_shard.resize(shard + 1, 0);
        }
        self.by_shard[shard] += n;
    }
}

impl Shared {
    /// What was sampled since the last call goes into the books and to the detector.
    pub(crate) fn take_samples(&self, steering: &mut Steering, now: Tick) {
        let mut books = self.books.lock();
        for sample in self.sampler.drain() {
            books.enter(&sample);
            let seen = sample.observation();
            let shard = if seen.loaded { self.store.shard_of(seen.key) } else { None };
            steering.handle_sample(now, &seen, shard);
        }
    }

    /// Publishes the set of hot keys. Keys that leave it show nothing any more before the new
    /// index is in force; keys that stay keep their cells. Callers hold the control lock, and drop
    /// what is returned after it: the drop of a user's type may call heatsink.
    #[must_use]
    pub(crate) fn publish_index(&self, keys: &[Key]) -> Vec<Arc<Spread>> {
        // What an operator, a feed or a late turn of the driver says of an ended instance is void.
        let keys = if self.has_ended() { &[] } else { keys };
        let old = self.index.load_full();
        let mut next = Index::default();
        for key in keys {
            let hash = self.hash(key);
            if next.find(hash, key).is_some() {
                continue;
            }
            let kept = old.find(hash, key).cloned();
            next.insert(kept.unwrap_or_else(|| Arc::new(Cell::new(hash, key.clone()))));
        }
        let mut garbage = Vec::new();
        for cell in old.iter().filter(|c| next.find(c.hash, &c.key).is_none()) {
            let _gate = self.stripe(cell.hash).lock();
            garbage.extend(cell.close(&self.used));
        }
        self.index.store(Arc::new(next));
        garbage
    }

    /// The instance has ended: nothing is served any more, and nothing kept.
    pub(crate) fn close(&self) {
        self.extend_index(Tick::ZERO);
        let steering = self.steering.lock();
        let garbage = self.publish_index(&[]);
        self.ended.store(true, Ordering::Release);
        drop(steering);
        drop(garbage);
        self.followers.close();
    }

    /// Whether nothing is served any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The driver is alive: the index holds until `until`.
    pub(crate) fn extend_index(&self, until: Tick) {
        self.hot.index_until.store(until.0, Ordering::Relaxed);
    }

    /// Closes loads that have run into the time limit.
    pub(crate) fn time_out(self: &Arc<Self>) {
        let limit = self.options.loads.timeout;
        for at in self.busy_stripes() {
            let mut told = Vec::new();
            let mut gate = self.stripes[at].lock();
            if gate.is_empty() {
                self.busy[at / 64].fetch_and(!(1 << (at % 64)), Ordering::Relaxed);
                continue;
            }
            let now = self.clock.now();
            gate.time_out((now, self.epoch()), limit, |key, landing| {
                told.push((key.clone(), landing));
            });
            gate.sweep(now);
            drop(gate);
            for (key, landing) in told {
                let hash = self.hash(&key);
                self.pause_refresh(hash, &key, now);
                let text = format!("the load took longer than {limit:?}");
                let error = Error::not_applied(ErrorKind::Timeout, text).with_key(&key);
                self.deliver(hash, &key, landing, Err(error));
            }
        }
    }

    /// Clears cells whose value cannot be served any more: what nobody can read must not hold the
    /// room, nor the rank, against what is loaded next.
    pub(crate) fn clear_dead(&self) {
        let dead = |cell: &Cell| {
            let (now, epoch) = (self.clock.now(), self.epoch());
            cell.with(|shown| Some(shown.serve(now, epoch, None).is_none())).unwrap_or(false)
        };
        for cell in self.index.load_full().iter().filter(|cell| dead(cell)) {
            let gate = self.stripe(cell.hash).lock();
            // A newer value may have taken its place meanwhile.
            let garbage = if dead(cell) { cell.clear(&self.used) } else { None };
            drop(gate);
            drop(garbage);
        }
    }

    /// The stripes on which something may be under way.
    fn busy_stripes(&self) -> impl Iterator<Item = usize> {
        self.busy.iter().enumerate().flat_map(|(i, word)| {
            let mut bits = word.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(64 * i + bit)
            })
        })
    }

    /// What all gates have seen; keys and loads under way.
    pub(crate) fn tally(&self) -> (Tally, usize, InFlight) {
        let mut sum = Tally::default();
        let mut keys = 0;
        let mut loads = InFlight::default();
        for stripe in &self.stripes {
            let gate = stripe.lock();
            sum += gate.tally();
            keys += gate.len();
            gate.loading().for_each(|(key, n)| loads.add(self.store.shard_of(key), n));
        }
        (sum, keys, loads)
    }

    pub(crate) fn refused(&self) -> (u64, u64) {
        (self.refused_full.load(Ordering::Relaxed), self.refused_older.load(Ordering::Relaxed))
    }
}
