//! Who waits to be let in, and who is next.
//!
//! - **What**: a queue that lets callers in at a fixed rate, first come, first served.
//! - **Invariant**: nobody is let in before somebody who came earlier and still waits; from the
//!   first on never more than the rate allows: a pause earns nothing, since the rows behind are as
//!   slow after it; whoever leaves moves the others up.
//! - **Time and units**: ticks; one caller per interval. What was let in too late, while somebody
//!   waited, is made up for: so many at once as came to be due within `late`.
//! - **Bounds**: a capacity; a position costs the logarithm of it.
//! - **Source**: the generic cell rate algorithm (ITU-T I.371) for the rate; a Fenwick tree (1994)
//!   over the places for the positions.

use crate::engine::time::Tick;
use std::time::Duration;

/// The waiting places. `W` is whatever wakes a caller.
#[derive(Debug)]
pub struct Room<W> {
    /// A ring: ticket `t` waits at `t % capacity`.
    places: Box<[Place<W>]>,
    /// How many wait, as a Fenwick tree over the ring.
    tree: Box<[u32]>,
    /// The oldest ticket that has a place, and the next to be given out.
    oldest: u64,
    /// No ticket before this one waits.
    first: u64,
    next: u64,
    waiting: usize,
    interval: Duration,
    /// How much of a delay is made up for.
    late: Duration,
    /// When the next may go in.
    due: Tick,
}

#[derive(Clone, Debug)]
enum Place<W> {
    Empty,
    Waiting(Option<W>),
    /// Let in; it has not been told yet.
    LetIn,
}

/// What became of somebody who came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Came {
    /// Let in at once.
    In,
    /// Waits, under this ticket.
    Waits(u64),
    /// All places are taken; so many wait before it.
    Full(usize),
}

impl<W> Room<W> {
    /// A room of `capacity` places that lets one in per `interval`; where [`admit`](Room::admit)
    /// was called late, up to `late` of that is made up for.
    #[must_use]
    pub fn new(capacity: usize, interval: Duration, late: Duration) -> Room<W> {
        let capacity = capacity.max(1);
        Room {
            places: (0..capacity).map(|_| Place::Empty).collect(),
            tree: vec![0; capacity + 1].into(),
            oldest: 0,
            first: 0,
            next: 0,
            waiting: 0,
            interval,
            late,
            due: Tick::ZERO,
        }
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Somebody comes.
    pub fn come(&mut self, now: Tick) -> Came {
        if self.waiting == 0 && self.due <= now {
            self.due = now.after(self.interval);
            return Came::In;
        }
        self.forget();
        if self.next - self.oldest >= self.places.len() as u64 {
            return Came::Full(self.waiting);
        }
        let ticket = self.next;
        self.next += 1;
        let at = self.at(ticket);
        self.places[at] = Place::Waiting(None);
        self.count(at, true);
        self.waiting += 1;
        Came::Waits(ticket)
    }

    /// Lets in whoever may go in now; what wakes them.
    pub fn admit(&mut self, now: Tick) -> Vec<W> {
        let mut woken = Vec::new();
        while self.waiting > 0
            && self.due <= now
            && let Some(front) = self.front()
        {
            self.due = self.due.max(now.before(self.late)).after(self.interval);
            let at = self.at(front);
            if let Place::Waiting(waker) = std::mem::replace(&mut self.places[at], Place::LetIn) {
                woken.extend(waker);
            }
            self.count(at, false);
            self.waiting -= 1;
        }
        woken
    }

    /// When the next may go in; `None` when nobody waits.
    #[must_use]
    pub fn next_at(&self) -> Option<Tick> {
        (self.waiting > 0).then_some(self.due)
    }

    /// How many wait before `ticket`; `None` when it does not wait.
    #[must_use]
    pub fn position(&self, ticket: u64) -> Option<usize> {
        let at = self.place(ticket).filter(|at| matches!(self.places[*at], Place::Waiting(_)))?;
        let from = self.at(self.oldest);
        let before = |n: usize| self.sum(n);
        // Those from the oldest on, around the ring.
        let all_around = |past: usize| self.waiting - past;
        Some(if from <= at {
            before(at) - before(from)
        } else {
            all_around(before(from) - before(at))
        })
    }

    /// How long somebody with so many before it will wait, at least.
    #[must_use]
    pub fn estimate(&self, before: usize, now: Tick) -> Duration {
        let before = u32::try_from(before).unwrap_or(u32::MAX);
        self.due.since(now).saturating_add(self.interval.saturating_mul(before))
    }

    /// Whether `ticket` was let in, which it is told once; else `waker` will be woken. And the waker
    /// that is not needed any more.
    pub fn poll(&mut self, ticket: u64, waker: W) -> (bool, Option<W>) {
        let Some(at) = self.place(ticket) else { return (true, Some(waker)) };
        match &mut self.places[at] {
            Place::Waiting(slot) => (false, slot.replace(waker)),
            let_in => {
                *let_in = Place::Empty;
                (true, Some(waker))
            }
        }
    }

    /// `ticket` leaves; its waker is not needed any more. One that was let in and leaves before it
    /// was told gives its permit back.
    pub fn leave(&mut self, ticket: u64) -> Option<W> {
        let at = self.place(ticket)?;
        match std::mem::replace(&mut self.places[at], Place::Empty) {
            Place::Waiting(waker) => {
                self.count(at, false);
                self.waiting -= 1;
                waker
            }
            Place::LetIn => {
                self.due = self.due.before(self.interval);
                None
            }
            Place::Empty => None,
        }
    }

    fn at(&self, ticket: u64) -> usize {
        (ticket % self.places.len() as u64) as usize
    }

    fn place(&self, ticket: u64) -> Option<usize> {
        (self.oldest..self.next).contains(&ticket).then(|| self.at(ticket))
    }

    /// The first that waits. Those before it were let in or have left: none is looked at twice.
    fn front(&mut self) -> Option<u64> {
        // A place before the oldest ticket belongs to a newer one by now.
        self.first = self.first.max(self.oldest);
        while self.first < self.next {
            if matches!(self.places[self.at(self.first)], Place::Waiting(_)) {
                return Some(self.first);
            }
            self.first += 1;
        }
        None
    }

    /// Frees the places of those who are gone.
    fn forget(&mut self) {
        while self.oldest < self.next && matches!(self.places[self.at(self.oldest)], Place::Empty) {
            self.oldest += 1;
        }
    }

    fn count(&mut self, at: usize, comes: bool) {
        let mut i = at + 1;
        while i < self.tree.len() {
            self.tree[i] = if comes { self.tree[i] + 1 } else { self.tree[i] - 1 };
            i += i & i.wrapping_neg();
        }
    }

    /// How many wait at the first `n` places of the ring.
    fn sum(&self, n: usize) -> usize {
        let (mut i, mut sum) = (n, 0);
        while i > 0 {
            sum += self.tree[i] as usize;
            i &= i - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_first_come_first_and_no_faster_than_the_rate() {
        let mut room: Room<u32> = Room::new(10, MS, MS);
        let t = |ms: u64| Tick(1_000_000_000 + ms * 1_000_000);
        assert_eq!([0; 3].map(|_| room.come(t(0))), [Came::In, Came::Waits(0), Came::Waits(1)]);
        assert_eq!((room.position(0), room.position(1)), (Some(0), Some(1)));
        assert_eq!(room.next_at(), Some(t(1)));
        assert_eq!(room.estimate(1, t(0)), 2 * MS);
        assert!(!room.poll(0, 10).0 && !room.poll(1, 11).0);
        assert!(room.admit(t(0)).is_empty());
        assert_eq!(room.admit(t(1)), [10]);
        assert!(room.poll(0, 0).0 && !room.poll(1, 12).0);
        room.leave(1);
        assert_eq!((room.waiting(), room.next_at()), (0, None));
    }

    #[test]
    fn a_delay_is_made_up_for_and_a_pause_is_not() {
        let mut room: Room<u32> = Room::new(10, MS, 2 * MS);
        let t = |ms: u64| Tick(1_000_000_000 + ms * 1_000_000);
        assert_eq!(room.come(t(0)), Came::In);
        (0..8).for_each(|n| assert_eq!(room.come(t(0)), Came::Waits(n)));
        (0..8).for_each(|n| assert!(!room.poll(n, n as u32).0));
        assert_eq!(room.admit(t(3)), [0, 1, 2], "due at 1, 2 and 3");
        assert_eq!(room.admit(t(100)), [3, 4, 5], "two intervals of a long delay");
        assert_eq!(room.admit(t(102)), [6, 7]);
        assert_eq!(room.come(t(500)), Came::In);
        assert_eq!(room.come(t(500)), Came::Waits(8), "nobody came for long: one goes in");
    }

    #[test]
    fn one_that_leaves_after_it_was_let_in_gives_its_permit_to_the_next() {
        let mut room: Room<u32> = Room::new(10, MS, Duration::ZERO);
        let t = |ms: u64| Tick(1_000_000_000 + ms * 1_000_000);
        assert_eq!(room.come(t(0)), Came::In);
        assert_eq!([room.come(t(0)), room.come(t(0))], [Came::Waits(0), Came::Waits(1)]);
        assert!(!room.poll(1, 11).0);
        assert!(room.admit(t(1)).is_empty());
        assert!(room.position(0).is_none(), "let in, not yet told");
        room.leave(0);
        assert_eq!(room.admit(t(1)), [11]);
        assert!(room.poll(1, 0).0);
    }

    proptest! {
        /// Against a plain list: the same are let in, in the same order, with the same positions.
        #[test]
        fn it_does_what_a_list_does(
            capacity in 1usize..9,
            late in 0u32..4,
            steps in prop::collection::vec((0u8..4, 0u64..8, 0u64..4), 0..300)
        ) {
            let mut room: Room<u64> = Room::new(capacity, MS, MS * late);
            let mut list: Vec<u64> = Vec::new();
            let mut now = Tick(1_000_000_000);
            let mut let_in: Vec<u64> = Vec::new();
            let (mut come, mut first) = (0u64, now);
            for (what, which, pass) in steps {
                now = now.after(MS * pass as u32 / 2);
                match what {
                    0 | 1 => match room.come(now) {
                        Came::In => { prop_assert!(list.is_empty()); come += 1; first = first.min(now); }
                        Came::Waits(t) => { prop_assert!(!room.poll(t, t).0); list.push(t); }
                        Came::Full(n) => { prop_assert_eq!(n, list.len()); }
                    },
                    2 => {
                        let woken = room.admit(now);
                        let n = woken.len();
                        prop_assert_eq!(&woken[..], &list[..n]);
                        for t in list.drain(..n) {
                            prop_assert!(room.poll(t, 0).0);
                            let_in.push(t);
                        }
                    }
                    _ => if let Some(&t) = list.get(which as usize) {
                        room.leave(t);
                        list.retain(|x| *x != t);
                    },
                }
                prop_assert_eq!(room.waiting(), list.len());
                for (i, t) in list.iter().enumerate() {
                    prop_assert_eq!(room.position(*t), Some(i));
                }
                let most = 1 + now.since(first).as_nanos() / MS.as_nanos();
                prop_assert!(u128::from(come) + let_in.len() as u128 <= most);
            }
            prop_assert!(let_in.is_sorted());
        }
    }
}
