//! Counters for plain threads.

use super::{Heatsink, block_on};
use crate::counter::{Estimate, Sum};
use crate::error::Result;
use crate::lanes::Parts;
use crate::salt::{Counted, Redelivery};
use std::time::Duration;

impl Heatsink {
    /// See [`crate::Heatsink::counter`].
    ///
    /// # Example
    /// ```
    /// use heatsink::{blocking, store::MemoryStore};
    /// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
    /// let likes = hs.counter("post:9:likes");
    /// likes.add(1)?; // returns when it is stored
    /// assert_eq!(likes.sum()?.total(), 1);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn counter(&self, key: impl AsRef<[u8]>) -> Counter {
        Counter(self.0.counter(key))
    }

    /// See [`crate::Heatsink::grow_only`].
    pub fn grow_only(&self, key: impl AsRef<[u8]>) -> GrowOnly {
        GrowOnly(self.0.grow_only(key))
    }

    /// See [`crate::Heatsink::approximate`].
    pub fn approximate(&self, key: impl AsRef<[u8]>, one_in: u32) -> Approximate {
        Approximate(self.0.approximate(key, one_in))
    }

    /// See [`crate::Heatsink::buffered`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Example
    /// ```
    /// use heatsink::{blocking, store::MemoryStore};
    /// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
    /// let likes = hs.buffered("post:9:likes")?;
    /// likes.add(1)?; // memory only
    /// likes.flush()?; // or wait half a second
    /// assert_eq!(likes.sum()?.total(), 1);
    /// hs.shutdown();
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn buffered(&self, key: impl AsRef<[u8]>) -> Result<Buffered> {
        self.0.buffered(key).map(Buffered)
    }
}

/// [`crate::Counter`] for plain threads: adds of many threads combine.
#[derive(Clone, Debug)]
pub struct Counter(crate::Counter);

impl Counter {
    /// See [`crate::Counter::add`].
    ///
    /// # Errors
    /// As there.
    pub fn add(&self, n: i64) -> Result<()> {
        block_on(self.0.add(n))
    }

    /// See [`crate::Counter::sum`].
    ///
    /// # Errors
    /// As there.
    pub fn sum(&self) -> Result<Sum> {
        block_on(self.0.sum())
    }

    /// See [`crate::Counter::total`].
    ///
    /// # Errors
    /// As there.
    pub fn total(&self) -> Result<Sum> {
        block_on(self.0.total())
    }

    /// See [`crate::Counter::sum_with`].
    ///
    /// # Errors
    /// As there.
    pub fn sum_with(&self, max_age: Duration) -> Result<Sum> {
        block_on(self.0.sum_with(max_age))
    }

    /// See [`crate::Counter::add_event`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Example
    /// ```
    /// use heatsink::{Counted, blocking, store::MemoryStore};
    /// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
    /// let likes = hs.counter("post:9:likes");
    /// assert_eq!(likes.add_event("like:41", 1)?, Counted::Now);
    /// assert_eq!(likes.add_event("like:41", 1)?, Counted::Before);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn add_event(&self, id: impl AsRef<[u8]>, n: i64) -> Result<Counted> {
        block_on(self.0.add_event(id, n))
    }

    /// See [`crate::Counter::add_event_with`].
    ///
    /// # Errors
    /// As there.
    pub fn add_event_with(
        &self,
        id: impl AsRef<[u8]>,
        n: i64,
        redelivery: Redelivery,
    ) -> Result<Counted> {
        block_on(self.0.add_event_with(id, n, redelivery))
    }

    /// See [`crate::Counter::reset`].
    ///
    /// # Errors
    /// As there.
    pub fn reset(&self) -> Result<()> {
        block_on(self.0.reset())
    }

    /// See [`crate::Counter::delete`].
    ///
    /// # Errors
    /// As there.
    pub fn delete(&self) -> Result<()> {
        block_on(self.0.delete())
    }
}

/// [`crate::GrowOnly`] for plain threads.
#[derive(Clone, Debug)]
pub struct GrowOnly(crate::GrowOnly);

impl GrowOnly {
    /// See [`crate::GrowOnly::add`].
    ///
    /// # Errors
    /// As there.
    pub fn add(&self, n: u64) -> Result<()> {
        block_on(self.0.add(n))
    }

    /// See [`crate::GrowOnly::sum`].
    ///
    /// # Errors
    /// As there.
    pub fn sum(&self) -> Result<Sum> {
        block_on(self.0.sum())
    }

    /// See [`crate::GrowOnly::total`].
    ///
    /// # Errors
    /// As there.
    pub fn total(&self) -> Result<Sum> {
        block_on(self.0.total())
    }

    /// See [`crate::GrowOnly::sum_with`].
    ///
    /// # Errors
    /// As there.
    pub fn sum_with(&self, max_age: Duration) -> Result<Sum> {
        block_on(self.0.sum_with(max_age))
    }
}

/// [`crate::Approximate`] for plain threads.
#[derive(Clone, Debug)]
pub struct Approximate(crate::Approximate);

impl Approximate {
    /// See [`crate::Approximate::add`].
    ///
    /// # Errors
    /// As there.
    pub fn add(&self) -> Result<()> {
        block_on(self.0.add())
    }

    /// See [`crate::Approximate::sum`].
    ///
    /// # Errors
    /// As there.
    pub fn sum(&self) -> Result<Estimate> {
        block_on(self.0.sum())
    }
}

/// [`crate::Buffered`] for plain threads. Flushes run on heatsink's own threads.
#[derive(Clone, Debug)]
pub struct Buffered(crate::Buffered);

impl Buffered {
    /// See [`crate::Buffered::add`].
    ///
    /// # Errors
    /// As there.
    pub fn add(&self, n: i64) -> Result<()> {
        block_on(self.0.add(n))
    }

    /// See [`crate::Buffered::add_durable`].
    ///
    /// # Errors
    /// As there.
    pub fn add_durable(&self, n: i64) -> Result<()> {
        block_on(self.0.add_durable(n))
    }

    /// See [`crate::Buffered::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&self) -> Result<()> {
        block_on(self.0.flush())
    }

    /// See [`crate::Buffered::pending`].
    #[must_use]
    pub fn pending(&self) -> i64 {
        self.0.pending()
    }

    /// See [`crate::Buffered::sum`].
    ///
    /// # Errors
    /// As there.
    pub fn sum(&self) -> Result<Sum> {
        block_on(self.0.sum())
    }

    /// See [`crate::Buffered::sum_with`].
    ///
    /// # Errors
    /// As there.
    pub fn sum_with(&self, max_age: Duration) -> Result<Sum> {
        block_on(self.0.sum_with(max_age))
    }

    /// See [`crate::Buffered::parts`].
    ///
    /// # Errors
    /// As there.
    pub fn parts(&self) -> Result<Parts> {
        block_on(self.0.parts())
    }

    /// See [`crate::Buffered::correct`].
    ///
    /// # Errors
    /// As there.
    pub fn correct(&self, epoch: u64, amount: i64) -> Result<bool> {
        block_on(self.0.correct(epoch, amount))
    }
}
