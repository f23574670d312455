//! One load and the callers that wait for it.
//!
//! - **What**: a flight is a load under way; a group is callers whose load has not begun.
//! - **Invariant**: a caller gets the outcome of a load that it was allowed to join when it
//!   arrived, or it leads one; it never waits for a load that nobody runs.
//! - **Time and units**: ticks.
//! - **Bounds**: waiters per flight and per group are capped by the gate.
//! - **Source**: lease tokens of the Facebook memcache paper; FIFO hand-over as in quick_cache;
//!   a waiter sees only its own deadline (tailscale#18919).

use crate::engine::time::Tick;
use std::collections::{BTreeMap, btree_map};
use std::iter::Chain;
use std::option;

/// Names one flight of one gate; later flights have higher numbers.
pub type FlightId = u64;

/// Names one waiting caller of one gate, in the order of arrival.
pub type WaiterId = u64;

/// Callers that wait, in the order in which they came. One waiter, which is what nearly all loads
/// have, takes no memory of its own.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Waiters<W> {
    /// Whoever came first; nobody waits where there is none.
    first: Option<(WaiterId, W)>,
    rest: BTreeMap<WaiterId, W>,
}

impl<W> Default for Waiters<W> {
    fn default() -> Self {
        Waiters { first: None, rest: BTreeMap::new() }
    }
}

impl<W: Clone> Waiters<W> {
    /// Adds the latest arrival.
    pub fn push(&mut self, id: WaiterId, waiter: W) {
        if self.first.is_none() {
            self.first = Some((id, waiter));
        } else {
            self.rest.insert(id, waiter);
        }
    }

    /// Removes a caller that gave up; whether it was here.
    pub fn leave(&mut self, id: WaiterId) -> bool {
        if self.first.take_if(|(first, _)| *first == id).is_some() {
            self.first = self.rest.pop_first();
            return true;
        }
        self.rest.remove(&id).is_some()
    }

    /// The caller that came first.
    #[must_use]
    pub fn first(&self) -> Option<W> {
        self.first.as_ref().map(|(_, w)| w.clone())
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    /// True when nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

/// All of them, in order.
impl<W> IntoIterator for Waiters<W> {
    type Item = W;
    type IntoIter = Chain<option::IntoIter<W>, btree_map::IntoValues<WaiterId, W>>;
    fn into_iter(self) -> Self::IntoIter {
        self.first.map(|(_, w)| w).into_iter().chain(self.rest.into_values())
    }
}

#[cfg(test)]
impl<W> Waiters<W> {
    pub(super) fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.first.iter().map(|(id, _)| *id).chain(self.rest.keys().copied())
    }

    pub(super) fn renumber(&mut self, rename: &dyn Fn(u64) -> u64) {
        self.first = self.first.take().map(|(id, w)| (rename(id), w));
        self.rest =
            std::mem::take(&mut self.rest).into_iter().map(|(id, w)| (rename(id), w)).collect();
    }
}

/// A load under way.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Flight<W> {
    /// Its name.
    pub id: FlightId,
    /// When it started: the age of its value counts from here.
    pub started: Tick,
    /// The epoch of the cache when it started.
    pub epoch: u64,
    /// False once a write or an invalidation has overlapped it: whoever comes now must not get
    /// its value.
    pub joinable: bool,
    /// False when a write was under way, or of unknown outcome, when it started.
    pub cacheable: bool,
    /// Who gets its outcome; the leader is one of them.
    pub waiters: Waiters<W>,
}
