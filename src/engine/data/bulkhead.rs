//! How many calls are under way to one shard, and who waits for a place.
//!
//! - **What**: a number of places and a queue for them.
//! - **Invariant**: never more inside than there are places; a place that is left goes to who has
//!   waited longest, so nobody who comes later is inside first.
//! - **Time and units**: none; the shell ends waits that take too long.
//! - **Bounds**: places and queue are capped by [`Limits`].
//! - **Source**: the bulkhead of Nygard, *Release It!*; counts in place of thread pools.

use std::collections::VecDeque;

/// Names one waiting call of one shard.
pub type WaitId = u64;

/// How many at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Calls under way.
    pub in_flight: usize,
    /// Calls that wait.
    pub queue: usize,
}

/// The calls to one shard. `W` is the letter box of a waiting call.
#[derive(Clone, Debug)]
pub struct Bulkhead<W> {
    in_flight: usize,
    queue: VecDeque<(WaitId, W)>,
    waits: WaitId,
}

/// What becomes of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// It has a place.
    Inside,
    /// It waits for one.
    Waits(WaitId),
    /// The queue is full.
    Full,
}

impl<W> Default for Bulkhead<W> {
    fn default() -> Self {
        Bulkhead { in_flight: 0, queue: VecDeque::new(), waits: 0 }
    }
}

impl<W> Bulkhead<W> {
    /// A call has come.
    pub fn enter(&mut self, limits: Limits, waiter: impl FnOnce() -> W) -> Entry {
        if self.in_flight < limits.in_flight {
            self.in_flight += 1;
            return Entry::Inside;
        }
        if self.queue.len() >= limits.queue {
            return Entry::Full;
        }
        self.waits += 1;
        self.queue.push_back((self.waits, waiter()));
        Entry::Waits(self.waits)
    }

    /// A place is left: who has it from now on, if anybody waits.
    pub fn leave(&mut self) -> Option<W> {
        let next = self.queue.pop_front();
        if next.is_none() {
            self.in_flight -= 1;
        }
        next.map(|(_, waiter)| waiter)
    }

    /// A waiting call gives up. `None` when it does not wait any more: it has a place, and must
    /// leave it.
    pub fn give_up(&mut self, id: WaitId) -> Option<W> {
        // Numbers rise along the queue.
        let at = self.queue.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.queue.remove(at).map(|(_, waiter)| waiter)
    }

    /// Calls under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Calls that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// Against a list of who is inside and who waits.
        #[test]
        fn places_are_never_exceeded_and_go_to_who_has_waited_longest(
            steps in proptest::collection::vec((0u8..3, any::<u8>()), 0..300),
        ) {
            let limits = Limits { in_flight: 3, queue: 4 };
            let mut room: Bulkhead<u64> = Bulkhead::default();
            let (mut inside, mut queue, mut calls) = (Vec::new(), VecDeque::new(), 0u64);
            for (step, pick) in steps {
                match step {
                    0 => {
                        calls += 1;
                        match room.enter(limits, || calls) {
                            Entry::Inside => inside.push(calls),
                            Entry::Waits(id) => queue.push_back((id, calls)),
                            Entry::Full => prop_assert!(inside.len() == 3 && queue.len() == 4),
                        }
                    }
                    1 if !inside.is_empty() => {
                        inside.swap_remove(usize::from(pick) % inside.len());
                        let next = queue.pop_front().map(|(_, call)| call);
                        prop_assert_eq!(room.leave(), next);
                        inside.extend(next);
                    }
                    2 if !queue.is_empty() => {
                        let (id, call) = queue.remove(usize::from(pick) % queue.len()).unwrap();
                        prop_assert_eq!(room.give_up(id), Some(call));
                        prop_assert_eq!(room.give_up(id), None);
                    }
                    _ => {}
                }
                prop_assert!(inside.len() <= 3);
                prop_assert!(queue.is_empty() || inside.len() == 3);
                prop_assert_eq!((room.in_flight(), room.waiting()), (inside.len(), queue.len()));
            }
        }
    }
}
