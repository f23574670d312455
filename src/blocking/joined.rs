//! Maxima, minima and sets for plain threads.

use super::{Heatsink, block_on};
use crate::error::Result;
use crate::joined::{Members, Reading};
use std::time::Duration;

impl Heatsink {
    /// See [`crate::Heatsink::max`].
    ///
    /// # Example
    /// ```
    /// use heatsink::{blocking, store::MemoryStore};
    /// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
    /// let best = hs.max("game:7:best");
    /// best.offer(40)?;
    /// best.offer(25)?;
    /// assert_eq!(best.value()?.value(), Some(40));
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn max(&self, key: impl AsRef<[u8]>) -> Extreme {
        Extreme(self.0.max(key))
    }

    /// See [`crate::Heatsink::min`].
    pub fn min(&self, key: impl AsRef<[u8]>) -> Extreme {
        Extreme(self.0.min(key))
    }

    /// See [`crate::Heatsink::union`].
    pub fn union(&self, key: impl AsRef<[u8]>) -> Union {
        Union(self.0.union(key))
    }
}

/// [`crate::Extreme`] for plain threads.
#[derive(Clone, Debug)]
pub struct Extreme(crate::Extreme);

impl Extreme {
    /// See [`crate::Extreme::offer`].
    ///
    /// # Errors
    /// As there.
    pub fn offer(&self, n: i64) -> Result<()> {
        block_on(self.0.offer(n))
    }

    /// See [`crate::Extreme::value`].
    ///
    /// # Errors
    /// As there.
    pub fn value(&self) -> Result<Reading> {
        block_on(self.0.value())
    }

    /// See [`crate::Extreme::value_with`].
    ///
    /// # Errors
    /// As there.
    pub fn value_with(&self, max_age: Duration) -> Result<Reading> {
        block_on(self.0.value_with(max_age))
    }
}

/// [`crate::Union`] for plain threads.
#[derive(Clone, Debug)]
pub struct Union(crate::Union);

impl Union {
    /// See [`crate::Union::insert`].
    ///
    /// # Errors
    /// As there.
    pub fn insert(&self, member: impl AsRef<[u8]>) -> Result<()> {
        block_on(self.0.insert(member))
    }

    /// See [`crate::Union::members`].
    ///
    /// # Errors
    /// As there.
    pub fn members(&self) -> Result<Members> {
        block_on(self.0.members())
    }

    /// See [`crate::Union::members_with`].
    ///
    /// # Errors
    /// As there.
    pub fn members_with(&self, max_age: Duration) -> Result<Members> {
        block_on(self.0.members_with(max_age))
    }
}
