//! The last known values, for times of overload.
//!
//! A value comes in where a load may be cached, and goes where a write or an invalidation begins,
//! both under the lock of the key's stripe: so what the gate forbids to cache is not kept here
//! either.

use super::ShedStats;
use crate::cell::Entry;
use crate::engine::time::Tick;
use crate::key::Key;
use crate::sync::Mutex;
use hashbrown::HashTable;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A power of two.
const STRIPES: usize = 64;
/// Values per stripe: a stripe that is full is searched for its oldest.
const VALUES_MAX: usize = 128;
/// Bytes per stripe: 64 MiB in all.
const BYTES_MAX: usize = 1 << 20;
const VALUE_BYTES_MAX: usize = 64 << 10;

pub(crate) struct Frozen {
    age_max: Duration,
    stripes: Box<[Mutex<Stripe>]>,
    served: AtomicU64,
}

#[derive(Default)]
struct Stripe {
    values: HashTable<Known>,
    size_bytes: usize,
}

struct Known {
    hash: u64,
    key: Key,
    entry: Arc<Entry>,
}

impl Known {
    fn size_bytes(&self) -> usize {
        self.key.len() + self.entry.bytes.len() + size_of::<(Known, Entry)>()
    }
}

/// What is to be dropped outside all locks: a value may hold a user's type.
pub(crate) type Garbage = Vec<Arc<Entry>>;

impl Known {
    fn is_newer(&self, entry: &Entry) -> bool {
        self.entry.epoch == entry.epoch && !entry.rank.may_replace(&self.entry.rank)
    }
}

impl Stripe {
    fn find(&self, hash: u64, key: &[u8]) -> Option<&Known> {
        self.values.find(hash, |k| k.hash == hash && *k.key == *key)
    }

    fn take(&mut self, hash: u64, key: &[u8]) -> Option<Known> {
        let found = self.values.find_entry(hash, |k| k.hash == hash && *k.key == *key).ok()?;
        let known = found.remove().0;
        self.size_bytes -= known.size_bytes();
        Some(known)
    }

    fn take_oldest(&mut self) -> Option<Known> {
        let oldest = self.values.iter().min_by_key(|k| k.entry.ages.started)?;
        let (hash, key) = (oldest.hash, oldest.key.clone());
        self.take(hash, &key)
    }
}

impl Frozen {
    pub(super) fn new(age_max: Duration) -> Frozen {
        let stripes = (0..STRIPES).map(|_| Mutex::new(Stripe::default())).collect();
        Frozen { age_max, stripes, served: AtomicU64::new(0) }
    }

    fn stripe(&self, hash: u64) -> &Mutex<Stripe> {
        &self.stripes[(hash >> 32) as usize & (STRIPES - 1)]
    }

    pub(super) fn age_max(&self) -> Duration {
        self.age_max
    }

    pub(super) fn count_served(&self) {
        self.served.fetch_add(1, Relaxed);
    }

    /// A load that may be cached has brought `entry`.
    #[must_use]
    pub(crate) fn remember(&self, hash: u64, key: &Key, entry: &Arc<Entry>) -> Garbage {
        let mut stripe = self.stripe(hash).lock();
        if stripe.find(hash, key).is_some_and(|known| known.is_newer(entry)) {
            // A load that began earlier has ended later.
            return Garbage::new();
        }
        let mut garbage: Garbage = stripe.take(hash, key).map(|k| k.entry).into_iter().collect();
        if entry.bytes.len() > VALUE_BYTES_MAX {
            return garbage;
        }
        let known = Known { hash, key: key.clone(), entry: entry.clone() };
        while stripe.values.len() >= VALUES_MAX
            || stripe.size_bytes + known.size_bytes() > BYTES_MAX
        {
            let Some(oldest) = stripe.take_oldest() else { break };
            garbage.push(oldest.entry);
        }
        stripe.size_bytes += known.size_bytes();
        stripe.values.insert_unique(hash, known, |k| k.hash);
        garbage
    }

    /// A write or an invalidation of `key` begins.
    #[must_use]
    pub(crate) fn forget(&self, hash: u64, key: &[u8]) -> Option<Arc<Entry>> {
        self.stripe(hash).lock().take(hash, key).map(|known| known.entry)
    }

    /// An invalidation of all keys that begin with `prefix`.
    pub(crate) fn forget_prefix(&self, prefix: &[u8]) {
        for stripe in &self.stripes {
            let mut stripe = stripe.lock();
            let Stripe { values, size_bytes } = &mut *stripe;
            let gone: Vec<Known> = values.extract_if(|k| k.key.starts_with(prefix)).collect();
            *size_bytes -= gone.iter().map(Known::size_bytes).sum::<usize>();
            drop(stripe);
            drop(gone);
        }
    }

    /// The last known value, if it is younger than both limits and the store would still have it.
    pub(super) fn serve(
        &self,
        (hash, key): (u64, &[u8]),
        (now, epoch): (Tick, u64),
        max_age: Option<Duration>,
    ) -> Option<Arc<Entry>> {
        let stripe = self.stripe(hash).lock();
        let known = stripe.values.find(hash, |k| k.hash == hash && *k.key == *key)?;
        let (entry, age) = (&known.entry, now.since(known.entry.ages.started));
        let kept = entry.ttl_left.is_none_or(|ttl| age < ttl);
        let young = age < self.age_max && max_age.is_none_or(|max| age < max);
        if !(kept && young && entry.epoch == epoch) {
            return None;
        }
        self.count_served();
        Some(entry.clone())
    }

    pub(super) fn tell(&self, stats: &mut ShedStats) {
        stats.frozen_served = self.served.load(Relaxed);
        stats.frozen_bytes = self.stripes.iter().map(|s| s.lock().size_bytes as u64).sum();
    }
}
