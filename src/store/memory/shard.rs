//! What one shard of the embedded store holds, and every operation on it as a plain function of
//! the shard and the time.

use super::ids::{HoldState, Ids, Known, OnceState, room};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::store::{End, Ended, Hold, Holds, Id, Once, Popped, Stored, Take, Version};
use bytes::Bytes;
use hashbrown::HashMap;
use std::collections::VecDeque;
use std::ops::Bound;
use std::time::Duration;

/// Bytes that an entry costs beside its key and value: the map slot and two buffers' heads.
const ENTRY_OVERHEAD: usize = 128;
/// Holds told at once.
const HOLDS_PAGE: usize = 512;
/// Past states of one key kept for a lagging replica.
const PAST_MAX: usize = 64;
/// Keys per shard whose operations are counted one by one.
const COUNTED_KEYS_MAX: usize = 1 << 16;

pub(super) type Map<V> = HashMap<Key, V, ahash::RandomState>;

/// One value with what the store knows about it.
#[derive(Clone, Debug)]
struct Entry {
    bytes: Bytes,
    expires: Option<Tick>,
    version: Version,
    /// `version` was given by `put_if_newer` or `claim_lane`; otherwise it only counts writes, and
    /// every version is newer.
    ordered: bool,
    /// The tag of the seal, where the counter is closed.
    sealed: Option<u64>,
}

impl Entry {
    fn live(&self, now: Tick) -> bool {
        self.expires.is_none_or(|at| at > now)
    }

    fn stored(&self, now: Tick, can: Shows) -> Stored {
        Stored {
            bytes: self.bytes.clone(),
            ttl_left: self.expires.filter(|_| can.ttl).map(|at| at.since(now)),
            version: Some(self.version).filter(|_| can.version),
            sealed: self.sealed.is_some(),
        }
    }
}

/// Which of the optional fields of a [`Stored`] are filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shows {
    pub(super) ttl: bool,
    pub(super) version: bool,
}

/// How often a key was asked for.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct KeyCount {
    pub(super) reads: u64,
    pub(super) writes: u64,
}

/// The operations of one shard since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ShardCounts {
    /// Operations that arrived, one per key of a multi-key call.
    pub offered: u64,
    /// Operations that were executed.
    pub served: u64,
    /// Operations refused by the ceiling.
    pub throttled: u64,
    /// Reads among `offered`.
    pub reads: u64,
    /// Writes among `offered`.
    pub writes: u64,
}

/// The contents of one shard.
#[derive(Debug)]
pub(super) struct Shard {
    entries: Map<Entry>,
    ids: Map<Ids>,
    past: Map<VecDeque<(Tick, Option<Entry>)>>,
    lag: Duration,
    seq: u64,
    bytes: usize,
    bytes_max: usize,
    pub(super) counts: ShardCounts,
    counted: Map<KeyCount>,
    /// When the virtual queue of this shard is empty again.
    pub(super) free_at: Tick,
    pub(super) down: bool,
}

/// A hasher with fixed keys: the order of a map must not differ between two runs of one seed.
pub(super) fn map<V>() -> Map<V> {
    Map::with_hasher(ahash::RandomState::with_seeds(1, 2, 3, 4))
}

impl Shard {
    pub(super) fn new(bytes_max: usize, lag: Duration) -> Shard {
        Shard {
            entries: map(),
            ids: map(),
            past: map(),
            lag,
            seq: 0,
            bytes: 0,
            bytes_max,
            counts: ShardCounts::default(),
            counted: map(),
            free_at: Tick::ZERO,
            down: false,
        }
    }

    pub(super) fn count(&mut self, key: &Key, read: bool, per_key: bool) {
        self.counts.offered += 1;
        *(if read { &mut self.counts.reads } else { &mut self.counts.writes }) += 1;
        if !per_key {
            return;
        }
        if !self.counted.contains_key(key) && self.counted.len() >= COUNTED_KEYS_MAX {
            return;
        }
        let count = self.counted.entry_ref(key).or_default();
        *(if read { &mut count.reads } else { &mut count.writes }) += 1;
    }

    pub(super) fn key_count(&self, key: &Key) -> KeyCount {
        self.counted.get(key).copied().unwrap_or_default()
    }

    fn live(&mut self, key: &Key, now: Tick) -> Option<&mut Entry> {
        if !self.entries.get(key)?.live(now) {
            self.remove(key, now);
            return None;
        }
        self.entries.get_mut(key)
    }

    pub(super) fn get(&mut self, key: &Key, now: Tick, shows: Shows) -> Option<Stored> {
        self.live(key, now).map(|e| e.stored(now, shows))
    }

    /// The value as it stood `lag` ago.
    pub(super) fn get_replica(&mut self, key: &Key, now: Tick, shows: Shows) -> Option<Stored> {
        if self.lag.is_zero() {
            return self.get(key, now, shows);
        }
        let then = now.before(self.lag);
        let past = self.past.get(key)?;
        let (_, state) = past.iter().rev().find(|(at, _)| *at <= then)?;
        state.as_ref().filter(|e| e.live(now)).map(|e| e.stored(now, shows))
    }

    pub(super) fn put(
        &mut self,
        key: &Key,
        bytes: Bytes,
        ttl: Option<Duration>,
        now: Tick,
    ) -> Result<()> {
        self.seq += 1;
        let version = Version::seq(self.seq);
        self.set(
            key,
            Entry { bytes, expires: expiry(ttl, now), version, ordered: false, sealed: None },
            now,
        )
    }

    fn set(&mut self, key: &Key, entry: Entry, now: Tick) -> Result<()> {
        let size = |e: &Entry| key.len() + e.bytes.len() + ENTRY_OVERHEAD;
        let old = self.entries.get(key).map_or(0, size);
        if self.bytes - old + size(&entry) > self.bytes_max {
            self.sweep(now);
        }
        let old = self.entries.get(key).map_or(0, size);
        if self.bytes - old + size(&entry) > self.bytes_max {
            return Err(Error::not_applied(ErrorKind::Store, "the shard is full")
                .with_retry(crate::Retry::Never)
                .with_key(key));
        }
        self.bytes = self.bytes - old + size(&entry);
        self.remember(key, Some(&entry), now);
        self.entries.insert(key.clone(), entry);
        Ok(())
    }

    fn remove(&mut self, key: &Key, now: Tick) -> bool {
        let Some(old) = self.entries.remove(key) else { return false };
        self.bytes -= key.len() + old.bytes.len() + ENTRY_OVERHEAD;
        self.remember(key, None, now);
        true
    }

    /// Frees what has expired; run when the shard is full.
    fn sweep(&mut self, now: Tick) {
        let dead: Vec<Key> =
            self.entries.iter().filter(|(_, e)| !e.live(now)).map(|(k, _)| k.clone()).collect();
        for key in dead {
            self.remove(&key, now);
        }
    }

    fn remember(&mut self, key: &Key, state: Option<&Entry>, now: Tick) {
        if self.lag.is_zero() {
            return;
        }
        let past = self.past.entry_ref(key).or_default();
        let then = now.before(self.lag);
        while past.len() >= PAST_MAX || past.get(1).is_some_and(|(at, _)| *at <= then) {
            past.pop_front();
        }
        past.push_back((now, state.cloned()));
    }

    pub(super) fn delete(&mut self, key: &Key, now: Tick) -> bool {
        let tokens = self.ids.get_mut(key).map(|ids| std::mem::take(&mut ids.tokens));
        let list = tokens.is_some_and(|tokens| !tokens.is_empty());
        (self.live(key, now).is_some() && self.remove(key, now)) || list
    }

    /// The integer under `key`; zero when absent, refused when sealed.
    fn integer(&mut self, key: &Key, now: Tick) -> Result<i64> {
        let Some(entry) = self.live(key, now) else { return Ok(0) };
        if entry.sealed.is_some() {
            return Err(
                Error::not_applied(ErrorKind::Sealed, "the counter is sealed").with_key(key)
            );
        }
        parse_integer(&entry.bytes).ok_or_else(|| {
            Error::not_applied(ErrorKind::WrongType, "the value is not a 64-bit integer")
                .with_key(key)
        })
    }

    pub(super) fn add(&mut self, key: &Key, amount: i64, now: Tick) -> Result<i64> {
        let total = self.integer(key, now)?.checked_add(amount).ok_or_else(|| {
            Error::not_applied(ErrorKind::Overflow, "the sum does not fit into 64 bits")
                .with_key(key)
        })?;
        self.store_integer(key, total, None, now)?;
        Ok(total)
    }

    /// Writes a number in place of another; its expiry stays.
    fn store_integer(
        &mut self,
        key: &Key,
        total: i64,
        sealed: Option<u64>,
        now: Tick,
    ) -> Result<()> {
        let expires = self.live(key, now).and_then(|e| e.expires);
        self.seq += 1;
        let version = Version::seq(self.seq);
        let bytes = Bytes::from(total.to_string());
        self.set(key, Entry { bytes, expires, version, ordered: false, sealed }, now)
    }

    pub(super) fn compare_and_set(
        &mut self,
        key: &Key,
        expected: Option<&Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
        now: Tick,
    ) -> Result<bool> {
        let present = self.live(key, now);
        let same = match (&present, expected) {
            (None, None) => true,
            (Some(entry), Some(expected)) => entry.sealed.is_none() && entry.bytes == *expected,
            _ => false,
        };
        if same {
            self.put(key, value, ttl, now)?;
        }
        Ok(same)
    }

    pub(super) fn put_if_newer(
        &mut self,
        key: &Key,
        version: Version,
        bytes: Bytes,
        ttl: Option<Duration>,
        now: Tick,
    ) -> Result<bool> {
        if self.live(key, now).is_some_and(|e| e.ordered && e.version >= version) {
            return Ok(false);
        }
        let expires = expiry(ttl, now);
        let entry = Entry { bytes, expires, version, ordered: true, sealed: None };
        self.set(key, entry, now)?;
        Ok(true)
    }

    pub(super) fn claim_lane(&mut self, key: &Key, now: Tick) -> Result<Stored> {
        let (bytes, expires, incarnation) = match self.live(key, now) {
            Some(e) => {
                let raised = if e.ordered { e.version.incarnation + 1 } else { 1 };
                (e.bytes.clone(), e.expires, raised)
            }
            None => (Bytes::new(), None, 1),
        };
        let version = Version { incarnation, seq: 0 };
        let entry = Entry { bytes, expires, version, ordered: true, sealed: None };
        let mut stored = entry.stored(now, Shows { ttl: true, version: true });
        stored.version = Some(version);
        self.set(key, entry, now)?;
        Ok(stored)
    }

    pub(super) fn seal(&mut self, key: &Key, tag: u64, now: Tick) -> Result<i64> {
        if let Some(entry) = self.live(key, now)
            && entry.sealed == Some(tag)
        {
            return Ok(parse_integer(&entry.bytes).unwrap_or(0));
        }
        let total = self.integer(key, now)?;
        self.store_integer(key, total, Some(tag), now)?;
        Ok(total)
    }

    pub(super) fn open(&mut self, key: &Key, tag: u64, now: Tick) -> bool {
        match self.live(key, now) {
            Some(entry) if entry.sealed == Some(tag) => {
                entry.sealed = None;
                true
            }
            _ => false,
        }
    }

    pub(super) fn add_once(&mut self, key: &Key, id: &Id, amount: i64, now: Tick) -> Result<Once> {
        match self.ids(key).state(id) {
            Known::Now(OnceState::Applied) | Known::Over => return Ok(Once::Duplicate),
            Known::Now(OnceState::Poisoned) => return Ok(Once::Poisoned),
            Known::Nothing => self.ids(key).room(key, id)?,
        }
        let total = self.add(key, amount, now)?;
        self.ids(key).remember(id, OnceState::Applied);
        Ok(Once::Applied(total))
    }

    pub(super) fn poison_once(&mut self, key: &Key, id: &Id) -> Result<Once> {
        let ids = self.ids(key);
        match ids.state(id) {
            Known::Now(OnceState::Applied) => return Ok(Once::Duplicate),
            Known::Now(OnceState::Poisoned) | Known::Over => return Ok(Once::Poisoned),
            Known::Nothing => ids.room(key, id)?,
        }
        ids.remember(id, OnceState::Poisoned);
        Ok(Once::Poisoned)
    }

    pub(super) fn fold(&mut self, key: &Key, id: &Key, amount: i64, now: Tick) -> Result<bool> {
        if self.folded(key, id) {
            return Ok(false);
        }
        room(self.ids(key).folds.len(), key)?;
        self.add(key, amount, now)?;
        Ok(self.ids(key).folds.insert(id.clone()))
    }

    pub(super) fn folded(&self, key: &Key, id: &Key) -> bool {
        self.ids.get(key).is_some_and(|ids| ids.folds.contains(id))
    }

    pub(super) fn unfold(&mut self, key: &Key, id: &Key) -> bool {
        self.ids.get_mut(key).is_some_and(|ids| ids.folds.remove(id))
    }

    pub(super) fn take(&mut self, key: &Key, amount: u64, hold: &Id, now: Tick) -> Result<Take> {
        match self.ids(key).hold(hold) {
            Known::Over => return Ok(Take::Ended { amount: 0 }),
            Known::Now(HoldState { ended: Some(End::Back), amount, .. }) => {
                return Ok(Take::Ended { amount });
            }
            Known::Now(HoldState { left, .. }) => return Ok(Take::Taken { left }),
            Known::Nothing => {}
        }
        let have = self.integer(key, now)?;
        let left = i64::try_from(amount).ok().and_then(|n| have.checked_sub(n));
        let Some(left) = left.filter(|left| *left >= 0) else {
            return Ok(Take::Short { left: have });
        };
        self.ids(key).room_to_hold(key, hold)?;
        self.store_integer(key, left, None, now)?;
        self.ids(key).set_hold(hold, HoldState { amount, left, ended: None, token: None });
        Ok(Take::Taken { left })
    }

    pub(super) fn push_tokens(
        &mut self,
        key: &Key,
        batch: &Id,
        tokens: Vec<Bytes>,
    ) -> Result<bool> {
        let ids = self.ids(key);
        let Known::Nothing = ids.state(batch) else { return Ok(false) };
        ids.room(key, batch)?;
        room((ids.tokens.len() + tokens.len()).saturating_sub(1), key)?;
        ids.tokens.extend(tokens);
        ids.remember(batch, OnceState::Applied);
        Ok(true)
    }

    pub(super) fn pop_token(&mut self, key: &Key, hold: &Id) -> Result<Popped> {
        let ids = self.ids(key);
        match ids.hold(hold) {
            Known::Over => return Ok(Popped::Ended { held: false }),
            Known::Now(HoldState { ended: Some(End::Back), amount, .. }) => {
                return Ok(Popped::Ended { held: amount > 0 });
            }
            Known::Now(HoldState { token: Some(token), left, .. }) => {
                return Ok(Popped::Token { token, left: left.unsigned_abs() });
            }
            _ => ids.room_to_hold(key, hold)?,
        }
        let Some(token) = ids.tokens.pop_front() else { return Ok(Popped::Empty) };
        let left = ids.tokens.len();
        let state =
            HoldState { amount: 1, left: left as i64, ended: None, token: Some(token.clone()) };
        ids.set_hold(hold, state);
        Ok(Popped::Token { token, left: left as u64 })
    }

    pub(super) fn count_tokens(&mut self, key: &Key) -> u64 {
        self.ids.get(key).map_or(0, |ids| ids.tokens.len() as u64)
    }

    pub(super) fn end_hold(&mut self, key: &Key, hold: &Id, end: End, now: Tick) -> Result<Ended> {
        let ids = self.ids(key);
        let state = match ids.hold(hold) {
            Known::Over => return Ok(Ended::Before { end, amount: 0 }),
            Known::Now(HoldState { amount, ended: Some(end), .. }) => {
                return Ok(Ended::Before { end, amount });
            }
            Known::Now(open) => open,
            Known::Nothing if end == End::Sold => return Ok(Ended::Never),
            Known::Nothing => {
                ids.room_to_hold(key, hold)?;
                HoldState { amount: 0, left: 0, ended: None, token: None }
            }
        };
        let amount = state.amount;
        let token = match (end, state.token) {
            (End::Back, Some(token)) => {
                self.ids(key).tokens.push_back(token);
                None
            }
            (End::Back, None) if amount > 0 => {
                // What was taken from a 64-bit integer fits into one.
                self.add(key, i64::try_from(amount).unwrap_or(i64::MAX), now)?;
                None
            }
            (_, token) => token,
        };
        let ended = HoldState { ended: Some(end), token, ..state };
        self.ids(key).set_hold(hold, ended);
        Ok(Ended::Now { amount })
    }

    pub(super) fn holds(&mut self, key: &Key, page: Option<Bytes>) -> Holds {
        let from = match page {
            Some(last) => Bound::Excluded(Key::from(last)),
            None => Bound::Unbounded,
        };
        let ids = self.ids(key);
        let mut rest = ids.holds.range((from, Bound::Unbounded));
        let of = |(id, h): (&Key, &HoldState)| {
            let (id, token) = (id.clone(), h.token.clone());
            Hold { id, amount: h.amount, ended: h.ended, token }
        };
        let mut page: Vec<Hold> = rest.by_ref().take(HOLDS_PAGE).map(of).collect();
        let next = page.last().filter(|_| rest.next().is_some());
        let next = next.map(|last| Bytes::copy_from_slice(last.id.as_bytes()));
        if next.is_none() {
            // A few: the last turn of each.
            page.extend(ids.step_holds.iter().map(|(id, (_, h))| of((id, h))));
        }
        Holds { page, next }
    }

    fn ids(&mut self, key: &Key) -> &mut Ids {
        self.ids.entry_ref(key).or_default()
    }

    /// Everything that is there now, without its bookkeeping.
    pub(super) fn contents(&self, now: Tick) -> impl Iterator<Item = (Key, Bytes)> {
        self.entries
            .iter()
            .filter(move |(_, e)| e.live(now))
            .map(|(k, e)| (k.clone(), e.bytes.clone()))
    }
}

fn expiry(ttl: Option<Duration>, now: Tick) -> Option<Tick> {
    ttl.map(|ttl| now.after(ttl))
}

/// A 64-bit integer in the one form in which `add` writes it: no sign for zero, no leading zeros,
/// no spaces.
fn parse_integer(bytes: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(bytes).ok()?;
    let n: i64 = text.parse().ok()?;
    (n.to_string() == text).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_canonical_form_is_an_integer() {
        for (text, want) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("9223372036854775807", Some(i64::MAX)),
            ("9223372036854775808", None),
            ("", None),
            ("+1", None),
            ("-0", None),
            ("007", None),
            (" 1", None),
        ] {
            assert_eq!(parse_integer(text.as_bytes()), want, "{text:?}");
        }
    }

    #[test]
    fn a_full_shard_refuses_and_forgets_what_has_expired_first() {
        let mut shard = Shard::new(1000, Duration::ZERO);
        let (a, b, ttl) = (Key::from("a"), Key::from("b"), Some(Duration::from_secs(1)));
        let big = Bytes::from(vec![0u8; 600]);
        shard.put(&a, big.clone(), ttl, Tick(0)).unwrap();
        let refused = shard.put(&b, big.clone(), None, Tick(1)).unwrap_err();
        assert_eq!(refused.outcome(), crate::Outcome::NotApplied);
        shard.put(&b, big, None, Tick(2_000_000_000)).unwrap();
        assert!(shard.bytes <= 1000);
    }
}
