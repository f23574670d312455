//! The operator's surface: what is treated, by whose word, and why.

use crate::engine::data::near::Freshness;
use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::key::{KEY_BYTES_MAX, Key};
use crate::shared::Shared;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// What is done for a hot key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Treatment {
    /// Its value is kept in the process.
    Near,
}

impl Treatment {
    /// The near cache.
    #[must_use]
    pub fn near() -> Treatment {
        Treatment::Near
    }
}

/// What the operator has said. Denials outrank pins.
#[derive(Debug, Default)]
pub(crate) struct Steering {
    pins: BTreeMap<Key, Treatment>,
    denied: BTreeSet<Key>,
}

/// Keys that an operator may deny; a cap like every other.
const DENIED_MAX: usize = 65_536;

impl Steering {
    /// The keys to be treated, in order.
    fn treated(&self) -> Vec<Key> {
        self.pins.keys().filter(|k| !self.denied.contains(*k)).cloned().collect()
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
        let shared = self.shared();
        let max = shared.options.near.keys_max;
        let mut new = Vec::new();
        for key in keys {
            let key = key.as_ref();
            if key.len() > KEY_BYTES_MAX {
                let text = format!("a key of {} bytes cannot be pinned", key.len());
                return Err(Error::not_applied(ErrorKind::Limit, text));
            }
            new.push(Key::copy(key));
        }
        let mut steering = shared.steering.lock();
        let added: BTreeSet<&Key> =
            new.iter().filter(|k| !steering.pins.contains_key(*k)).collect();
        if steering.pins.len() + added.len() > max {
            let text = format!("no more than {max} keys can be pinned (NearCache::keys_max)");
            return Err(Error::not_applied(ErrorKind::Limit, text));
        }
        steering.pins.extend(new.into_iter().map(|k| (k, treatment)));
        shared.publish_index(&steering.treated());
        Ok(())
    }

    /// Takes a pin back; whether there was one.
    pub fn unpin(&self, key: impl AsRef<[u8]>) -> bool {
        let mut steering = self.shared().steering.lock();
        let was = steering.pins.remove(&Key::copy(key.as_ref())).is_some();
        if was {
            self.shared().publish_index(&steering.treated());
        }
        was
    }

    /// Never treats `key`, whatever its traffic and whoever pinned it.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit) when 65,536 keys are denied already.
    pub fn deny(&self, key: impl AsRef<[u8]>) -> Result<()> {
        let mut steering = self.shared().steering.lock();
        if steering.denied.len() >= DENIED_MAX {
            let text = format!("no more than {DENIED_MAX} keys can be denied");
            return Err(Error::not_applied(ErrorKind::Limit, text));
        }
        steering.denied.insert(Key::copy(key.as_ref()));
        self.shared().publish_index(&steering.treated());
        Ok(())
    }

    /// Takes a denial back; whether there was one.
    pub fn allow(&self, key: impl AsRef<[u8]>) -> bool {
        let mut steering = self.shared().steering.lock();
        let was = steering.denied.remove(&Key::copy(key.as_ref()));
        if was {
            self.shared().publish_index(&steering.treated());
        }
        was
    }

    /// The keys in force, in order.
    #[must_use]
    pub fn treated(&self) -> Vec<Key> {
        let mut keys: Vec<Key> = self.shared().index.load().iter().map(|c| c.key.clone()).collect();
        keys.sort();
        keys
    }

    pub(crate) fn explain(&self, key: &[u8]) -> Explanation {
        let shared = self.shared();
        let hash = shared.hash(key);
        let now = shared.clock.now();
        let steering = shared.steering.lock();
        let owned = Key::copy(key);
        let rule = match (steering.denied.contains(&owned), steering.pins.get(&owned)) {
            (true, _) => Rule::Denied,
            (false, Some(_)) => Rule::Pinned,
            (false, None) => Rule::None,
        };
        drop(steering);
        let index = shared.index.load();
        let cell = index.find(hash, key);
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
        Explanation {
            key: owned,
            treatment: cell.map(|_| Treatment::Near),
            rule,
            cached,
            writes_active,
            uncacheable_for: until.since(now),
            shard: shared.store.shard_of(key),
        }
    }
}

/// By whose word a key is treated, or not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// Nobody has said anything.
    None,
    /// An operator pinned it.
    Pinned,
    /// An operator denied it.
    Denied,
}

/// What the near cache holds of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CachedValue {
    /// Age, counted from the start of the load.
    pub age: Duration,
    /// Whether it is fresh or stale.
    pub freshness: Freshness,
    /// The size of the value; `None` for a cached absence.
    pub bytes: Option<usize>,
}

/// What heatsink does with a key, and why. Its `Display` is meant for people.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// The key.
    pub key: Key,
    /// What is done for it; `None`: it is served like by the bare client, with single flight.
    pub treatment: Option<Treatment>,
    /// By whose word.
    pub rule: Rule,
    /// What the near cache holds of it now.
    pub cached: Option<CachedValue>,
    /// Writes of it under way in this process.
    pub writes_active: u32,
    /// For how long a write of unknown outcome still keeps it from being cached.
    pub uncacheable_for: Duration,
    /// The shard that owns it, where the store knows.
    pub shard: Option<u32>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let treatment = match self.treatment {
            Some(Treatment::Near) => "near cache",
            None => "none: single flight only",
        };
        let rule = match self.rule {
            Rule::None => "no rule",
            Rule::Pinned => "pinned by an operator",
            Rule::Denied => "denied by an operator",
        };
        write!(f, "{}: {treatment} ({rule})", self.key)?;
        if let Some(shard) = self.shard {
            write!(f, "; on shard {shard}")?;
        }
        match &self.cached {
            Some(CachedValue { age, freshness, bytes: Some(bytes) }) => {
                write!(f, "; holds {bytes} bytes, {freshness:?}, {} ms old", age.as_millis())?;
            }
            Some(CachedValue { age, .. }) => {
                write!(f, "; known to be absent for {} ms", age.as_millis())?;
            }
            None => write!(f, "; holds nothing")?,
        }
        if self.writes_active > 0 {
            write!(f, "; {} writes under way", self.writes_active)?;
        }
        if !self.uncacheable_for.is_zero() {
            let ms = self.uncacheable_for.as_millis();
            write!(f, "; not cacheable for {ms} ms: a write of unknown outcome may still land")?;
        }
        Ok(())
    }
}
