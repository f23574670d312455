//! Values that combine without being counted: a maximum, a minimum, the union of a set.

use crate::adds::{self, Cell, Read, count};
use crate::batch;
use crate::counter::not_a_number;
use crate::engine::data::joined::{Joined, MEMBER_BYTES_MAX, Op};
use crate::error::{Error, ErrorKind, Result};
use crate::heatsink::Heatsink;
use crate::names::Part;
use crate::read::From;
use crate::salt;
use crate::sample::Seen;
use crate::shared::Loaded;
use crate::store::Stored;
use bytes::Bytes;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

impl Heatsink {
    /// The greatest 64-bit integer that was ever [offered](Extreme::offer) under `key`: a high
    /// score, the last time that somebody was seen.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let best = hs.max("game:7:best");
    /// best.offer(40).await?;
    /// best.offer(25).await?; // less: nothing is written
    /// assert_eq!(best.value().await?.value(), Some(40));
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn max(&self, key: impl AsRef<[u8]>) -> Extreme {
        Extreme { hs: self.clone(), cell: self.joining(key.as_ref(), Op::Max) }
    }

    /// The least 64-bit integer that was ever [offered](Extreme::offer) under `key`.
    pub fn min(&self, key: impl AsRef<[u8]>) -> Extreme {
        Extreme { hs: self.clone(), cell: self.joining(key.as_ref(), Op::Min) }
    }

    /// A small set under `key`, to which members are only ever added.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let badges = hs.union("user:9:badges");
    /// badges.insert("early").await?;
    /// badges.insert("early").await?; // once more is the same
    /// badges.insert("helpful").await?;
    /// let now = badges.members().await?;
    /// assert_eq!((now.len(), now.contains("early")), (2, true));
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn union(&self, key: impl AsRef<[u8]>) -> Union {
        Union { hs: self.clone(), cell: self.joining(key.as_ref(), Op::Union) }
    }

    fn joining(&self, key: &[u8], op: Op) -> Arc<Cell> {
        self.shared().counters.cell_of(self.shared().hash(key), key, op)
    }

    /// What is joined under the key of `cell`, at most `max_age` old, by one load that all who ask
    /// meanwhile share; how old it is, and how many slots did not answer.
    async fn joined_of(
        &self,
        cell: &Arc<Cell>,
        max_age: Duration,
    ) -> Result<(Joined, Duration, u16)> {
        let shared = self.shared();
        let now = shared.clock.now();
        // The clock lags behind by up to its resolution.
        let limit = max_age.saturating_sub(shared.options.policy.resolution);
        let known = cell.joined.lock().clone().filter(|known| now.since(known.started) < limit);
        if let Some(Read { value, started }) = known {
            count(&shared.counters.tallies.sums_cached, 1);
            return Ok((value, now.since(started), 0));
        }
        adds::check_key(&cell.key)?;
        count(&shared.counters.tallies.sums_loaded, 1);
        self.sampled(self.observe(1), &cell.key, Seen::Load);
        let name = Part::Sum.of(&cell.key);
        let (of, asked) = (shared.clone(), cell.clone());
        let from = From::loader(|| async move {
            let (value, behind) = match &of.salted {
                Some(salted) => salted.joined(&of, &asked).await?,
                None => (salt::read_plain(of.store.clone(), &asked.key, asked.op).await?, 0),
            };
            let bytes = [&behind.to_be_bytes()[..], &value.encode_slot(false)].concat();
            let stored = Some(Stored::new(bytes));
            Ok(Loaded { stored, by_loader: true, uncached: false, decoded: None })
        });
        let hash = shared.hash(&name);
        let loaded = self.join_or_lead((hash, name), Some(limit), from, 0).await;
        let loaded = loaded.map_err(|e| e.with_key(&cell.key))?;
        let text = Bytes::copy_from_slice(loaded.get(2..).unwrap_or_default());
        let place = Joined::parse_own(cell.op, &text);
        let value = place.ok_or_else(|| not_a_number(&cell.key))?.value;
        let behind = u16::from_be_bytes([loaded[0], loaded[1]]);
        let started = loaded.entry().ages.started;
        let mut known = cell.joined.lock();
        if behind == 0 && known.as_ref().is_none_or(|known| known.started <= started) {
            *known = Some(Read { value: value.clone(), started });
        }
        drop(known);
        Ok((value, loaded.age(), behind))
    }
}

/// The greatest or the least of all numbers that were offered. Made by [`Heatsink::max`] and
/// [`Heatsink::min`]; clones are handles to the same one.
///
/// The bare key holds the number in decimal digits. It is [salted](crate::Salt) like a counter, by a
/// pin, a schedule or by its traffic, and reads the same before, during and after: of each slot the
/// greatest (least) counts. The process that pins a key makes the handle first, so that heatsink
/// knows how its slots combine. There is no call that takes a number back.
///
/// Needs [`compare_and_set`](crate::Capability::compare_and_set) of the store, and nothing else: in
/// this way slots are sealed in every such store, whatever the table in [`Salt`](crate::Salt) says
/// of counters. With [`Salt::exclusive`](crate::Salt::exclusive) the bare key is used all the same.
#[derive(Clone)]
pub struct Extreme {
    hs: Heatsink,
    cell: Arc<Cell>,
}

/// An extreme, and how old it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reading {
    value: Option<i64>,
    age: Duration,
    behind: u16,
}

impl Reading {
    /// The number; `None` before the first was offered.
    #[must_use]
    pub fn value(&self) -> Option<i64> {
        self.value
    }

    /// How old it was when it was served, counted from the start of its load.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.age
    }

    /// As [`Sum::behind`](crate::Sum::behind).
    #[must_use]
    pub fn behind(&self) -> u16 {
        self.behind
    }
}

impl Extreme {
    /// Offers `n`; returns when that, or a greater (lesser) number, is stored.
    ///
    /// # Cost
    /// Store operations: a read, and a write where `n` is better than what is there; shared by all
    /// offers of this process that come while another is under way.
    ///
    /// # Cancel safety
    /// A dropped offer may have been stored.
    ///
    /// # Errors
    /// Those of the store. Whatever the outcome, the same offer may be made again: it never counts
    /// twice. [`WrongType`](ErrorKind::WrongType) when the key holds something else, or is salted as
    /// something else. [`Unsupported`](ErrorKind::Unsupported) where the store has no
    /// `compare_and_set`. [`Limit`](ErrorKind::Limit): the key is too long.
    pub async fn offer(&self, n: i64) -> Result<()> {
        self.hs.sampled(self.hs.observe(1), &self.cell.key, Seen::Write);
        adds::check_key(&self.cell.key)?;
        batch::add(self.hs.shared(), &self.cell, n).await
    }

    /// The extreme, at most [`Adds::sum_ttl`](crate::Adds::sum_ttl) old.
    ///
    /// # Staleness
    /// As [`Counter::sum`](crate::Counter::sum).
    ///
    /// # Cost
    /// As [`Counter::sum`](crate::Counter::sum).
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`Heatsink::get`]; [`WrongType`](ErrorKind::WrongType) when the key holds something else.
    pub async fn value(&self) -> Result<Reading> {
        self.value_with(self.hs.shared().options.adds.sum_ttl).await
    }

    /// Like [`value`](Extreme::value), at most `max_age` old; zero asks the store after the call.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`value`](Extreme::value).
    pub async fn value_with(&self, max_age: Duration) -> Result<Reading> {
        let (joined, age, behind) = self.hs.joined_of(&self.cell, max_age).await?;
        let value = match joined {
            Joined::Max(n) | Joined::Min(n) => n,
            Joined::Union(_) => None,
        };
        Ok(Reading { value, age, behind })
    }
}

impl fmt::Debug for Extreme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = self.cell.op.word();
        f.debug_struct("Extreme").field("key", &self.cell.key).field("op", &op).finish()
    }
}

/// A set that only grows. Made by [`Heatsink::union`]; clones are handles to the same one.
///
/// The set is one value, read and replaced as a whole, so it is for what is small: who inserts may
/// not leave more than 1,024 members or 64 KiB in one place, and a member has at most 1,024 bytes.
/// A [salted](crate::Salt) set has at most 16 slots; each member has one of them, by its hash. While
/// it is spread it can grow to that much in each slot, and what is brought home may then have more
/// than who inserts is allowed: up to 1 MiB, beyond which it stays spread. Otherwise as [`Extreme`].
#[derive(Clone)]
pub struct Union {
    hs: Heatsink,
    cell: Arc<Cell>,
}

/// The members of a set, and how old that is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Members {
    set: BTreeSet<Bytes>,
    age: Duration,
    behind: u16,
}

impl Members {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.set.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.set.is_empty()
    }

    /// Whether this is one.
    #[must_use]
    pub fn contains(&self, member: impl AsRef<[u8]>) -> bool {
        self.set.contains(member.as_ref())
    }

    /// All of them, in the order of their bytes.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.set.iter().map(|member| &member[..])
    }

    /// How old the set was when it was served, counted from the start of its load.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.age
    }

    /// As [`Sum::behind`](crate::Sum::behind).
    #[must_use]
    pub fn behind(&self) -> u16 {
        self.behind
    }
}

impl Union {
    /// Adds a member; returns when it is stored.
    ///
    /// # Cost
    /// Store operations: a read, and a write where the member is new.
    ///
    /// # Cancel safety
    /// A dropped insert may have been stored.
    ///
    /// # Errors
    /// As [`Extreme::offer`]; [`Limit`](ErrorKind::Limit) when the member or the set is too large.
    pub async fn insert(&self, member: impl AsRef<[u8]>) -> Result<()> {
        let (shared, cell, member) = (self.hs.shared(), &self.cell, member.as_ref());
        self.hs.sampled(self.hs.observe(1), &cell.key, Seen::Write);
        adds::check_key(&cell.key)?;
        if member.len() > MEMBER_BYTES_MAX {
            let text = format!("a member has {} bytes", member.len());
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(&cell.key));
        }
        shared.admit(|| cell.hash, &cell.key, None)?;
        let value = Joined::Union([Bytes::copy_from_slice(member)].into());
        let slot = shared.begin_write(cell.hash, &cell.key);
        let guard = batch::WriteGuard::new(shared, cell, slot);
        let answer = match &shared.salted {
            Some(salted) => salted.join(shared, cell, (value, 1)).await,
            None => salt::add_plain(shared, &cell.key, value).await,
        };
        guard.end(answer.as_ref().err().map(Error::outcome));
        answer.map_err(|e| e.with_key(&cell.key))
    }

    /// The members, at most [`Adds::sum_ttl`](crate::Adds::sum_ttl) old.
    ///
    /// # Staleness, Cost
    /// As [`Counter::sum`](crate::Counter::sum).
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`Extreme::value`].
    pub async fn members(&self) -> Result<Members> {
        self.members_with(self.hs.shared().options.adds.sum_ttl).await
    }

    /// Like [`members`](Union::members), at most `max_age` old; zero asks the store after the call.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`Extreme::value`].
    pub async fn members_with(&self, max_age: Duration) -> Result<Members> {
        let (joined, age, behind) = self.hs.joined_of(&self.cell, max_age).await?;
        let set = match joined {
            Joined::Union(set) => set,
            Joined::Max(_) | Joined::Min(_) => BTreeSet::new(),
        };
        Ok(Members { set, age, behind })
    }
}

impl fmt::Debug for Union {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Union").field("key", &self.cell.key).finish()
    }
}
