//! Counters that are added up in memory and flushed by a timer.

use crate::adds::{AtCap, Cell, count};
use crate::batch;
use crate::buffer::{Buffer, Letter};
use crate::counter::{Sum, Total};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::heatsink::Heatsink;
use crate::lanes::{Parts, overflow};
use crate::names::Part;
use crate::runtime::BoxFuture;
use crate::sample::Seen;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

impl Heatsink {
    /// The counter under `key`, added up in this process's memory and flushed by a timer: for a
    /// counter that is added to thousands of times a second, where half a second of delay and the
    /// loss of half a second in a crash are acceptable.
    ///
    /// Whoever adds to the key must do it through `buffered` or [`counter`](Heatsink::counter);
    /// its sum is that of the handle returned here. A flush carries an absolute total and is
    /// applied only if newer, so one that is repeated or late changes nothing. That needs a store
    /// with `compare_and_set`, `claim_lane` and `put_if_newer`; with any other, a flush is one add,
    /// and what it carried counts as lost when its outcome is unknown.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit): the key is too long, or buffers would take more than
    /// [`Adds::bytes_max`](crate::Adds::bytes_max).
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # use std::time::Duration;
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let likes = hs.buffered("post:9:likes")?;
    /// likes.add(1).await?; // memory only
    /// likes.add(1).await?;
    /// likes.flush().await?; // or wait half a second
    /// assert_eq!(likes.sum_with(Duration::ZERO).await?.total(), 2);
    /// # hs.shutdown().await;
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn buffered(&self, key: impl AsRef<[u8]>) -> Result<Buffered> {
        let key = key.as_ref();
        crate::adds::check_key(key)?;
        let shared = self.shared();
        let hash = shared.hash(key);
        let buffer = shared.counters.buffer(shared, hash, key)?;
        Ok(Buffered { hs: self.clone(), buffer })
    }
}

/// A counter that is added up in memory. Made by [`Heatsink::buffered`]; clones are handles to the
/// same one.
///
/// A crash loses at most what was added since the last flush, an interval's worth, and nothing is
/// ever counted twice. Dropping a handle loses nothing: the timer goes on. When the last handle of
/// the instance is dropped without [`shutdown`](Heatsink::shutdown), what is left is flushed on a
/// best-effort basis, and [`Adds::on_lost`](crate::Adds::on_lost) is told what could not be.
#[derive(Clone)]
pub struct Buffered {
    hs: Heatsink,
    buffer: Arc<Buffer>,
}

impl Buffered {
    /// Adds `n`, which may be negative, to the buffer of this process. No lock, and no line of
    /// memory that another thread writes.
    ///
    /// At the cap of [`Adds::pending_max`](crate::Adds::pending_max), and for a writer that found
    /// no lane, it goes through to the store and returns when it is stored, like
    /// [`Counter::add`](crate::Counter::add).
    ///
    /// # Cost
    /// Store operations: 0; one flush per interval and process, whatever the number of adds.
    ///
    /// # Cancel safety
    /// Done on the first poll, except where it goes through: then as `Counter::add`.
    ///
    /// # Errors
    /// [`Shed`](ErrorKind::Shed) at the cap under [`AtCap::Refuse`]; [`Overflow`](ErrorKind::Overflow);
    /// where it goes through, those of [`Counter::add`](crate::Counter::add).
    #[inline]
    pub async fn add(&self, n: i64) -> Result<()> {
        let shared = self.hs.shared();
        self.hs.sampled(self.hs.observe(1), &self.buffer.key, Seen::Held);
        if self.buffer.add(shared, n) {
            return Ok(());
        }
        self.slow(n, false).await
    }

    /// Adds `n` and returns when a flush has stored it: within an interval.
    ///
    /// # Cost
    /// Store operations: as [`add`](Buffered::add). Takes the lock of the buffer.
    ///
    /// # Cancel safety
    /// A dropped call has added `n` to the buffer, from its first poll on.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout), of unknown outcome: no flush succeeded within
    /// [`Loads::timeout`](crate::Loads::timeout); the amount stays in the buffer.
    /// [`Store`](ErrorKind::Store), of unknown outcome: another process took the lane over and it
    /// can no longer be told what had been stored. [`Limit`](ErrorKind::Limit): too many wait.
    /// Else as [`add`](Buffered::add).
    pub async fn add_durable(&self, n: i64) -> Result<()> {
        self.hs.sampled(self.hs.observe(1), &self.buffer.key, Seen::Held);
        self.slow(n, true).await
    }

    /// The way of an add that does not fit into a stripe, or that waits for its flush.
    fn slow(&self, n: i64, durable: bool) -> BoxFuture<'static, Result<()>> {
        let (shared, buffer) = (self.hs.shared().clone(), self.buffer.clone());
        Box::pin(async move {
            match buffer.admit(&shared, n, durable)? {
                Admitted::Buffered => Ok(()),
                Admitted::Wait(letter) => buffer.wait(&shared, letter).await,
                Admitted::Through => {
                    count(&shared.counters.tallies.through, 1);
                    let cell = shared.counters.cell(buffer.hash, &buffer.key);
                    batch::add(&shared, &cell, n).await
                }
                Admitted::Refused => {
                    count(&shared.counters.tallies.refused, 1);
                    let text = "the buffer of the counter is full";
                    let retry = Retry::After(shared.options.adds.flush_every);
                    let error = Error::not_applied(ErrorKind::Shed, text).with_retry(retry);
                    Err(error.with_key(&buffer.key))
                }
            }
        })
    }

    /// Flushes everything added so far, and returns when it is stored.
    ///
    /// # Cost
    /// Store operations: at most 1 for all who flush at the same time, and those of claiming a lane
    /// when this process has none.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the flush goes on.
    ///
    /// # Errors
    /// As [`add_durable`](Buffered::add_durable).
    pub async fn flush(&self) -> Result<()> {
        let shared = self.hs.shared();
        match self.buffer.want_flush(shared)? {
            None => Ok(()),
            Some(letter) => self.buffer.wait(shared, letter).await,
        }
    }

    /// What this process was given and does not know to be stored.
    #[must_use]
    pub fn pending(&self) -> i64 {
        self.buffer.pending()
    }

    /// The sum over all processes, at most [`Adds::sum_ttl`](crate::Adds::sum_ttl) old.
    ///
    /// # Staleness
    /// As [`Counter::sum`](crate::Counter::sum), of what has been flushed: an add of half a second
    /// ago is in it, one of just now need not be.
    ///
    /// # Cost
    /// Store operations: 0 while the last sum is young enough, else one `get_many` of the key, its
    /// lanes and their record, shared by all who wait; a second one when the record has changed.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`Heatsink::get`]; [`WrongType`](ErrorKind::WrongType) and [`Codec`](ErrorKind::Codec)
    /// when something else lies under one of the keys; [`Overflow`](ErrorKind::Overflow).
    pub async fn sum(&self) -> Result<Sum> {
        self.sum_with(self.hs.shared().options.adds.sum_ttl).await
    }

    /// Like [`sum`](Buffered::sum), at most `max_age` old; zero asks the store after the call.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`].
    ///
    /// # Errors
    /// As [`sum`](Buffered::sum).
    pub async fn sum_with(&self, max_age: Duration) -> Result<Sum> {
        let (shared, buffer) = (self.hs.shared().clone(), self.buffer.clone());
        let load = move || -> BoxFuture<'static, _> {
            Box::pin(async move {
                let parts = buffer.lanes.parts(&shared).await?;
                parts.total().map(Total::whole).ok_or_else(overflow)
            })
        };
        let cell: &Arc<Cell> = &self.buffer.sums;
        self.hs.sum_of(cell, Part::LaneSum, max_age, load).await.map(|(sum, _)| sum)
    }

    /// What the sum is made of now: for a recount, and for those who want to know.
    ///
    /// # Cost
    /// Store operations: one `get_many`; a second one when the record of lanes has changed.
    ///
    /// # Cancel safety
    /// A read: dropping the future changes nothing.
    ///
    /// # Errors
    /// As [`sum`](Buffered::sum).
    pub async fn parts(&self) -> Result<Parts> {
        let parts = self.buffer.lanes.parts(self.hs.shared()).await;
        parts.map_err(|e| e.with_key(&self.buffer.key))
    }

    /// Writes the correction of a recount job: an absolute amount that every sum includes. Whether
    /// it was written: the correction of the same or a later `epoch` stays.
    ///
    /// The amount is the job's own count of durable events less [`Parts::counted`], both of the
    /// same events: adders that are not at rest have flushed what the job counts, or the job counts
    /// only what they have flushed. Repeating the call is harmless, so an outcome that is unknown
    /// is resolved by calling again.
    ///
    /// # Cost
    /// Store operations: 1. Needs capability `put_if_newer`.
    ///
    /// # Cancel safety
    /// A dropped call may or may not have written; call again with the same `epoch` and amount.
    ///
    /// # Errors
    /// Those of the store; [`Unsupported`](ErrorKind::Unsupported).
    pub async fn correct(&self, epoch: u64, amount: i64) -> Result<bool> {
        let written = self.buffer.lanes.correct(self.hs.shared(), epoch, amount).await;
        written.map_err(|e| e.with_key(&self.buffer.key))
    }
}

/// What becomes of an add that takes the lock.
pub(crate) enum Admitted {
    Buffered,
    Wait(Arc<Letter>),
    Through,
    Refused,
}

impl AtCap {
    pub(crate) fn admitted(self) -> Admitted {
        match self {
            AtCap::Through => Admitted::Through,
            AtCap::Refuse => Admitted::Refused,
        }
    }
}

impl fmt::Debug for Buffered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffered")
            .field("key", &self.buffer.key)
            .field("pending", &self.pending())
            .finish()
    }
}
