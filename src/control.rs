//! The operator's surface: what is treated, by whose word, and why.

use crate::engine::control::operator::{DENIED_MAX, Full, Operator, SCHEDULES_MAX, Scheduled};
use crate::engine::control::salt::SLOTS_MAX;
use crate::engine::control::treat::Treatment;
use crate::error::{Error, ErrorKind, Result};
use crate::explain::{CachedValue, Explanation};
use crate::heatsink::Heatsink;
use crate::key::{KEY_BYTES_MAX, Key};
use crate::salt::Salted;
use crate::shared::Shared;
use std::time::Duration;

/// Keys that are known beforehand: a launch, a match, a sale.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, Schedule, store::MemoryStore};
/// # use std::time::Duration;
/// # let hs = Heatsink::new(MemoryStore::new(8))?;
/// let match_night = Schedule::prefix("match:77:")
///     .starts_in(Duration::from_secs(3600))
///     .lasts(Duration::from_secs(3 * 3600));
/// let id = hs.control().schedule(match_night)?;
/// assert!(hs.control().cancel(id));
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Schedule {
    keys: Vec<Key>,
    prefix: Option<Key>,
    starts_in: Duration,
    lasts: Duration,
    slots: Option<u32>,
}

impl Schedule {
    /// Treats `keys` whatever their traffic.
    pub fn keys<K: AsRef<[u8]>>(keys: impl IntoIterator<Item = K>) -> Schedule {
        let keys = keys.into_iter().map(|k| Key::copy(k.as_ref())).collect();
        let (starts_in, lasts) = (Duration::ZERO, Duration::MAX);
        Schedule { keys, prefix: None, starts_in, lasts, slots: None }
    }

    /// Treats keys that begin with `prefix` as soon as their traffic comes within reach of the
    /// threshold (a tenth of it), each at its own time. No request looks at prefixes.
    pub fn prefix(prefix: impl AsRef<[u8]>) -> Schedule {
        let prefix = Some(Key::copy(prefix.as_ref()));
        Schedule { prefix, ..Schedule::keys([[0; 0]; 0]) }
    }

    /// Salts the keys, which are counters, in place of caching them: before the push goes out. They
    /// go back to one place at the end. Not for a prefix.
    pub fn salted(mut self, slots: u32) -> Schedule {
        self.slots = Some(slots);
        self
    }

    /// Starts later. Default: now.
    pub fn starts_in(mut self, delay: Duration) -> Schedule {
        self.starts_in = delay;
        self
    }

    /// Ends after this long, counted from its start. Default: never.
    pub fn lasts(mut self, span: Duration) -> Schedule {
        self.lasts = span;
        self
    }
}

/// The operator's surface of one handle. See [`Heatsink::control`].
#[derive(Clone, Copy, Debug)]
pub struct Control<'a>(&'a Heatsink);

impl<'a> Control<'a> {
    pub(crate) fn new(hs: &'a Heatsink) -> Control<'a> {
        Control(hs)
    }

    fn shared(&self) -> &Shared {
        self.0.shared()
    }

    #[cfg(feature = "feed")]
    pub(crate) fn wall_ms(&self) -> u64 {
        self.shared().clock.wall_ms()
    }

    /// Treats `key` from now on, whatever its traffic. In force when this returns.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit) when there are [`NearCache::keys_max`](crate::NearCache::keys_max)
    /// pins already, or the key is longer than [`KEY_BYTES_MAX`].
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, Treatment, store::MemoryStore};
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// hs.control().pin("post:9", Treatment::near())?;
    /// println!("{}", hs.explain("post:9"));
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn pin(&self, key: impl AsRef<[u8]>, treatment: Treatment) -> Result<()> {
        self.pin_all([key], treatment)
    }

    /// Like [`pin`](Control::pin) for many keys in one step: all of them or none.
    ///
    /// # Errors
    /// As [`pin`](Control::pin).
    pub fn pin_all<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
        treatment: Treatment,
    ) -> Result<()> {
        if let Treatment::Salt { slots } = treatment {
            return self.pin_salted(keys, slots);
        }
        if treatment != Treatment::Near {
            let text =
                format!("a pin to {treatment} is not acted on in this version; pin to near()");
            return Err(Error::not_applied(ErrorKind::Unsupported, text));
        }
        let keys: Vec<Key> = keys.into_iter().map(|k| Key::copy(k.as_ref())).collect();
        let keys = self.with_hashes(keys)?;
        let (now, max) = (self.shared().clock.now(), self.shared().options.near.keys_max);
        self.steer(|operator| operator.pin(now, keys, treatment)).map_err(|full| refused(full, max))
    }

    /// Salts counters before, or whatever, their traffic. In force when the fleet knows of it:
    /// after a lease, see [`explain`](Control::explain).
    fn pin_salted<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
        slots: u32,
    ) -> Result<()> {
        let (salted, slots) = (self.salted()?, slot_count(slots)?);
        for key in keys {
            check_len(key.as_ref())?;
            salted.pin(self.0.shared(), &Key::copy(key.as_ref()), Some(slots));
        }
        Ok(())
    }

    fn salted(&self) -> Result<&Salted> {
        self.shared().salted.as_deref().ok_or_else(|| {
            let text = "salting is not switched on: pass a Salt to Builder::salt";
            Error::not_applied(ErrorKind::Unsupported, text)
        })
    }

    /// Takes a pin back; whether there was one. A counter that was pinned to slots goes back to
    /// one place.
    pub fn unpin(&self, key: impl AsRef<[u8]>) -> bool {
        let unsalted = self
            .shared()
            .salted
            .as_ref()
            .is_some_and(|salted| salted.pin(self.0.shared(), &Key::copy(key.as_ref()), None));
        unsalted | self.steer(|operator| operator.unpin(&Key::copy(key.as_ref())))
    }

    /// Never treats `key`, whatever its traffic and whoever pinned it.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit) when 65,536 keys are denied already, or the key is longer than
    /// [`KEY_BYTES_MAX`].
    pub fn deny(&self, key: impl AsRef<[u8]>) -> Result<()> {
        check_len(key.as_ref())?;
        let denied = self.steer(|operator| operator.deny(Key::copy(key.as_ref())));
        denied.map_err(|full| refused(full, 0))
    }

    /// Takes a denial back; whether there was one.
    pub fn allow(&self, key: impl AsRef<[u8]>) -> bool {
        self.steer(|operator| operator.allow(&Key::copy(key.as_ref())))
    }

    /// Treats what is known beforehand, from its start to its end. The number takes it back.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit) when 1,024 schedules are there already, or when more keys would
    /// be pinned and scheduled than [`NearCache::keys_max`](crate::NearCache::keys_max).
    pub fn schedule(&self, schedule: Schedule) -> Result<u64> {
        let shared = self.shared();
        if let Some(slots) = schedule.slots {
            let salted = self.salted()?;
            if schedule.prefix.is_some() {
                let text = "a schedule of salted counters names keys, not a prefix";
                return Err(Error::not_applied(ErrorKind::Unsupported, text));
            }
            schedule.keys.iter().try_for_each(|key| check_len(key))?;
            let what = (schedule.keys, slot_count(slots)?);
            return salted.schedule(shared, what, schedule.starts_in, schedule.lasts);
        }
        let now = shared.clock.now();
        let from = now.after(schedule.starts_in);
        let until = from.after(schedule.lasts);
        let what = match schedule.prefix {
            Some(prefix) => {
                check_len(&prefix)?;
                Scheduled::Prefix(prefix)
            }
            None => Scheduled::Keys(self.with_hashes(schedule.keys)?),
        };
        let max = shared.options.near.keys_max;
        self.steer(|operator| operator.schedule(what, from, until))
            .map_err(|full| refused(full, max))
    }

    /// Takes a schedule back; whether it was there still.
    #[expect(clippy::must_use_candidate, reason = "taking back is what it is called for")]
    pub fn cancel(&self, schedule: u64) -> bool {
        let salted = self.shared().salted.as_ref();
        salted.is_some_and(|salted| salted.cancel(self.0.shared(), schedule))
            || self.steer(|operator| operator.cancel(schedule))
    }

    fn with_hashes(&self, keys: Vec<Key>) -> Result<Vec<(Key, u64)>> {
        keys.iter().try_for_each(|key| check_len(key))?;
        Ok(keys.into_iter().map(|k| (self.shared().hash(&k), k)).map(|(h, k)| (k, h)).collect())
    }

    /// Changes who is treated; in force when this returns.
    fn steer<R>(&self, say: impl FnOnce(&mut Operator) -> R) -> R {
        let shared = self.shared();
        let mut steering = shared.steering.lock();
        let out = steering.operate(shared.clock.now(), say);
        let changed = steering.take_change();
        let garbage = changed.then(|| shared.publish_index(&steering.treated()));
        if changed {
            shared.shed.follow(&steering, |key| shared.hash(key));
        }
        drop(steering);
        drop(garbage);
        if changed {
            shared.followers.wake();
        }
        out
    }

    /// The keys in force, in order.
    #[must_use]
    pub fn treated(&self) -> Vec<Key> {
        let mut keys: Vec<Key> = self.shared().index.load().iter().map(|c| c.key.clone()).collect();
        keys.sort();
        keys
    }

    pub(crate) fn explain(&self, key: &[u8]) -> Explanation {
        Explanation::of(self.shared(), key)
    }
}

impl Explanation {
    pub(crate) fn of(shared: &Shared, key: &[u8]) -> Explanation {
        let hash = shared.hash(key);
        let now = shared.clock.now();
        let owned = Key::copy(key);
        let mut steering = shared.steering.lock();
        // What has been sampled by now counts.
        shared.take_samples(&mut steering, now);
        let rule = steering.rule(&owned, hash);
        let detected = steering.explain(hash);
        let index = shared.index.load();
        let cell = index.find(hash, key);
        let hot = steering.hot_key(now, &owned, hash, cell.is_some());
        let of_key = steering.history(now).filter(|d| d.key == owned);
        let decided = of_key.map(|d| (now.since(d.at), d.what.clone())).collect();
        drop(steering);
        let cached = cell.and_then(|cell| {
            cell.with(|shown| {
                let freshness = shown.serve(now, shared.epoch(), None)?;
                let entry = &shown.entry;
                let age = now.since(entry.ages.started);
                let bytes = (!entry.absent).then_some(entry.bytes.len());
                Some(CachedValue { age, freshness, bytes })
            })
        });
        let (writes_active, until) = shared.writes_of(hash, key);
        let salting = shared.salted.as_ref().and_then(|salted| salted.salting(shared, &owned));
        let spread = shared.salted.as_ref().and_then(|salted| salted.spread_of(&owned));
        Explanation {
            key: owned,
            salting,
            spread,
            treatment: cell.map(|_| Treatment::Near),
            rule,
            hot,
            detected,
            cached,
            writes_active,
            uncacheable_for: until.since(now),
            shard: shared.store.shard_of(key),
            decided,
        }
    }
}

fn slot_count(slots: u32) -> Result<u16> {
    let slots = u16::try_from(slots).ok().filter(|k| (1..=SLOTS_MAX).contains(k));
    let text = "a counter has 1 to 1024 slots";
    slots.ok_or_else(|| Error::not_applied(ErrorKind::Limit, text))
}

fn check_len(key: &[u8]) -> Result<()> {
    if key.len() <= KEY_BYTES_MAX {
        return Ok(());
    }
    let text = format!("a key of {} bytes cannot be treated", key.len());
    Err(Error::not_applied(ErrorKind::Limit, text))
}

fn refused(full: Full, keys_max: usize) -> Error {
    let text = match full {
        Full::Keys => {
            format!("no more than {keys_max} keys can be pinned (NearCache::keys_max)")
        }
        Full::Denied => format!("no more than {DENIED_MAX} keys can be denied"),
        Full::Schedules => format!("no more than {SCHEDULES_MAX} schedules can wait"),
    };
    Error::not_applied(ErrorKind::Limit, text)
}
