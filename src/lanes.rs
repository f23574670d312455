//! Lanes in the store: claimed, retired, summed up. What each step means is decided in
//! `engine/control/lanes` and `engine/control/roster`.

use crate::adds::count;
use crate::batch::bounded;
use crate::call;
use crate::counter::{integer, not_a_number};
use crate::engine::control::lanes::LaneValue;
use crate::engine::control::roster::{Place, Roster, worth_compacting};
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::names::Part;
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use crate::store::{Stored, Version};
use crate::sync::Mutex;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// Attempts to replace a record that others replace too.
const TRIES: usize = 16;

/// A retired lane is kept for as long as any sum may take that began before it was retired.
const GRAVE_TIME: Duration = Duration::from_secs(3600);

/// Under this incarnation a retired lane refuses every writer. A claim still fits above it.
const RETIRED: Version = Version { incarnation: 1 << 62, seq: 0 };

/// Sums whose record changed under them are begun again this often.
const SUM_TRIES: usize = 8;

/// A lane just claimed.
pub(crate) struct Claim {
    pub(crate) generation: u64,
    pub(crate) lane: usize,
    pub(crate) incarnation: u64,
    pub(crate) value: LaneValue,
}

/// What the sum of a buffered counter is made of.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Parts {
    /// The plain counter under the key: what it held before it was buffered, and the adds of
    /// writers without a lane.
    pub counter: i64,
    /// The lanes of the writers.
    pub lanes: i64,
    /// What retired lanes came to.
    pub retired: i64,
    /// The correction of the last recount.
    pub correction: i64,
}

impl Parts {
    /// The sum; `None` when it does not fit into 64 bits.
    #[must_use]
    pub fn total(&self) -> Option<i64> {
        self.counted()?.checked_add(self.correction)
    }

    /// The sum without the correction: what a recount compares its own count with.
    #[must_use]
    pub fn counted(&self) -> Option<i64> {
        self.counter.checked_add(self.lanes)?.checked_add(self.retired)
    }
}

/// The lanes of one counter, as this process knows them.
pub(crate) struct Lanes {
    key: Key,
    /// The newest record seen, with the bytes that a compare-and-set expects.
    roster: Mutex<Option<(Bytes, Roster)>>,
    /// The lanes as they were when this process last found all of them taken.
    full: Mutex<Vec<Option<Bytes>>>,
}

/// One call of the store; a panic and silence are of unknown outcome.
pub(crate) async fn ask<T>(shared: &Arc<Shared>, work: BoxFuture<'static, Result<T>>) -> Result<T> {
    match bounded(shared, shared.options.loads.timeout, call::catch(work)).await {
        Some(Ok(answer)) => answer,
        Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
        None => Err(Error::unknown(ErrorKind::Timeout, "the store did not answer in time")),
    }
}

fn unreadable(what: &'static str) -> Error {
    Error::not_applied(ErrorKind::Codec, what)
}

impl Lanes {
    pub(crate) fn new(key: Key) -> Lanes {
        Lanes { key, roster: Mutex::new(None), full: Mutex::new(Vec::new()) }
    }

    pub(crate) fn name(&self, generation: u64, lane: usize) -> Key {
        Part::Lane { generation, lane }.of(&self.key)
    }

    /// The generation written to, and how `writer` stands in it.
    pub(crate) async fn place_of(
        &self,
        shared: &Arc<Shared>,
        writer: &str,
    ) -> Result<Option<(u64, Place)>> {
        let now = self.load(shared).await?;
        Ok(now.map(|(_, roster)| (roster.generation, roster.place(writer))))
    }

    fn remember(&self, bytes: Bytes) -> Result<Roster> {
        let roster = Roster::parse(&bytes).ok_or_else(|| unreadable("the roster is unreadable"))?;
        let mut known = self.roster.lock();
        // An answer that was overtaken on its way must not bring an old record back.
        if known.as_ref().is_none_or(|(_, k)| k.version <= roster.version) {
            *known = Some((bytes, roster.clone()));
        }
        Ok(roster)
    }

    /// The record as the store has it now.
    async fn load(&self, shared: &Arc<Shared>) -> Result<Option<(Bytes, Roster)>> {
        let get = shared.store.clone().get(Part::Roster.of(&self.key));
        let Some(stored) = ask(shared, get).await? else { return Ok(None) };
        let roster = self.remember(stored.bytes.clone())?;
        Ok(Some((stored.bytes, roster)))
    }

    /// Replaces the record; whether it did, as far as is known. Who is not sure reads it again.
    async fn replace(&self, shared: &Arc<Shared>, old: Option<Bytes>, new: &Roster) -> Result<()> {
        let name = Part::Roster.of(&self.key);
        let cas = shared.store.clone().compare_and_set(name, old, new.encode().into(), None);
        match ask(shared, cas).await {
            Err(error) if !error.is_unknown() => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes a lane for `writer` and reads back what it holds; `None` when all lanes are taken.
    pub(crate) async fn claim(
        &self,
        shared: &Arc<Shared>,
        writer: &str,
        compact: bool,
    ) -> Result<Option<Claim>> {
        for _ in 0..TRIES {
            let Some((bytes, roster)) = self.load(shared).await? else {
                let first = Roster::first(writer, shared.options.adds.lanes_max);
                self.replace(shared, None, &first).await?;
                continue;
            };
            if roster.draining.is_some() {
                self.drain(shared, bytes, &roster).await?;
                continue;
            }
            match roster.place(writer) {
                Place::Mine(lane) => {
                    if let Some(claim) = self.take(shared, &roster, lane, writer).await? {
                        return Ok(Some(claim));
                    }
                }
                Place::Free => self.replace(shared, Some(bytes), &roster.with(writer)).await?,
                Place::Full if compact && self.may_compact(shared, &roster).await? => {
                    if let Some(next) = roster.rotated(writer) {
                        self.replace(shared, Some(bytes), &next).await?;
                        count(&shared.counters.tallies.compactions, 1);
                    }
                }
                Place::Full => {
                    if self.full.lock().is_empty() {
                        let seen = self.look(shared, &roster).await?;
                        *self.full.lock() = seen;
                    }
                    return Ok(None);
                }
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "the roster changes faster than it can be read"))
    }

    /// Raises the incarnation of a lane, and confirms that it is still the writer's.
    async fn take(
        &self,
        shared: &Arc<Shared>,
        roster: &Roster,
        lane: usize,
        writer: &str,
    ) -> Result<Option<Claim>> {
        let name = self.name(roster.generation, lane);
        let claim = ask(shared, shared.store.clone().claim_lane(name)).await;
        #[cfg(feature = "testing")]
        let claim = shared.counters.misread(claim);
        // An error is never a total of zero.
        let stored = claim?;
        let version = stored.version.ok_or_else(|| unreadable("a claimed lane has no version"))?;
        let value = LaneValue::parse(&stored.bytes);
        let value = value.ok_or_else(|| unreadable("the lane holds something else"))?;
        let confirmed = self.load(shared).await?.is_some_and(|(_, now)| {
            now.generation == roster.generation && now.place(writer) == Place::Mine(lane)
        });
        Ok(confirmed.then_some(Claim {
            generation: roster.generation,
            lane,
            incarnation: version.incarnation,
            value,
        }))
    }

    /// Fences every lane of the generation that is being retired, and puts what they came to into
    /// the record. Any process may do it, and several may at once.
    async fn drain(&self, shared: &Arc<Shared>, bytes: Bytes, roster: &Roster) -> Result<()> {
        let Some((generation, lanes)) = roster.draining else { return Ok(()) };
        let mut values = Vec::with_capacity(lanes);
        let mut total = 0i64;
        for lane in 0..lanes {
            let claim = shared.store.clone().claim_lane(self.name(generation, lane));
            let stored = ask(shared, claim).await?;
            let value = LaneValue::parse(&stored.bytes);
            let value = value.ok_or_else(|| unreadable("a lane holds something else"))?;
            total = total.checked_add(value.total()).ok_or_else(overflow)?;
            values.push(stored.bytes);
        }
        let next = roster.retired(total).ok_or_else(overflow)?;
        self.replace(shared, Some(bytes), &next).await?;
        let retired = self.load(shared).await?.is_some_and(|(_, now)| now.draining.is_none());
        if retired {
            for (lane, bytes) in values.into_iter().enumerate() {
                let (name, ttl) = (self.name(generation, lane), Some(GRAVE_TIME));
                // Tidiness only: what fails here stays where nobody reads it.
                let put = shared.store.clone().put_if_newer(name, RETIRED, bytes, ttl);
                drop(ask(shared, put).await);
            }
        }
        Ok(())
    }

    /// Whether a new look at the lanes, compared with the last, says that compacting pays.
    async fn may_compact(&self, shared: &Arc<Shared>, roster: &Roster) -> Result<bool> {
        let now = self.look(shared, roster).await?;
        let mut seen = self.full.lock();
        let before = std::mem::replace(&mut *seen, now);
        Ok(!before.is_empty() && worth_compacting(&before, &seen))
    }

    async fn look(&self, shared: &Arc<Shared>, roster: &Roster) -> Result<Vec<Option<Bytes>>> {
        let names = (0..roster.names.len()).map(|lane| self.name(roster.generation, lane));
        let found = self.get_many(shared, names.collect()).await?;
        Ok(found.into_iter().map(|s| s.map(|s| s.bytes)).collect())
    }

    async fn get_many(&self, shared: &Arc<Shared>, keys: Vec<Key>) -> Result<Vec<Option<Stored>>> {
        let asked = keys.len();
        let store = shared.store.clone();
        let work = Box::pin(async move { Ok(store.get_many(keys).await) });
        let answers: Vec<Option<Stored>> =
            ask(shared, work).await?.into_iter().collect::<Result<_>>()?;
        if answers.len() == asked {
            return Ok(answers);
        }
        Err(Error::not_applied(ErrorKind::Store, "the store answered fewer keys than it was asked"))
    }

    /// What a lane holds, if it can be read.
    pub(crate) async fn read_lane(
        &self,
        shared: &Arc<Shared>,
        generation: u64,
        lane: usize,
    ) -> Result<Option<LaneValue>> {
        let get = shared.store.clone().get(self.name(generation, lane));
        let stored = ask(shared, get).await?;
        Ok(stored.and_then(|s| LaneValue::parse(&s.bytes)))
    }

    /// Everything that the sum is made of, as it stood at some point during the call.
    ///
    /// One read of all parts with the record among them: if the record is the one whose lanes were
    /// read, every flush that was acknowledged before the call is in one of them.
    pub(crate) async fn parts(&self, shared: &Arc<Shared>) -> Result<Parts> {
        let mut known = self.roster.lock().as_ref().map(|(_, roster)| roster.clone());
        for _ in 0..SUM_TRIES {
            let mut keys =
                vec![self.key.clone(), Part::Correction.of(&self.key), Part::Roster.of(&self.key)];
            let lanes = known.iter().flat_map(Roster::lanes);
            keys.extend(lanes.map(|(generation, lane)| self.name(generation, lane)));
            let mut found = self.get_many(shared, keys).await?.into_iter();
            let counter = number(found.next().flatten(), &self.key)?;
            let correction = number(found.next().flatten(), &self.key)?;
            let now = match found.next().flatten() {
                Some(stored) => Some(self.remember(stored.bytes)?),
                None => None,
            };
            if now != known {
                known = now;
                continue;
            }
            let mut lanes = 0i64;
            for stored in found {
                let value = LaneValue::parse(stored.as_ref().map_or(b"", |s| &s.bytes));
                let value = value.ok_or_else(|| unreadable("a lane holds something else"))?;
                lanes = lanes.checked_add(value.total()).ok_or_else(overflow)?;
            }
            let retired = known.as_ref().map_or(0, |roster| roster.retired);
            return Ok(Parts { counter, lanes, retired, correction });
        }
        Err(Error::not_applied(ErrorKind::Store, "the roster changes faster than it can be read"))
    }

    /// Writes the correction of a recount, unless one of the same or a later epoch is there.
    pub(crate) async fn correct(
        &self,
        shared: &Arc<Shared>,
        epoch: u64,
        amount: i64,
    ) -> Result<bool> {
        let version = Version { incarnation: epoch, seq: 0 };
        let name = Part::Correction.of(&self.key);
        let put = shared.store.clone().put_if_newer(name, version, amount.to_string().into(), None);
        ask(shared, put).await
    }
}

fn number(stored: Option<Stored>, key: &[u8]) -> Result<i64> {
    match stored {
        None => Ok(0),
        Some(stored) => integer(&stored.bytes).ok_or_else(|| not_a_number(key)),
    }
}

pub(crate) fn overflow() -> Error {
    Error::not_applied(ErrorKind::Overflow, "the sum does not fit into 64 bits")
}
