//! Adds of one counter that travel together.
//!
//! - **What**: at most one batch is under way; adds that come meanwhile are summed into the next.
//! - **Invariant**: every add is in exactly one batch, and a batch is sent at most once; a caller
//!   that gave up stays in its sum; a batch that is not sent and may be has one leader, or is an
//!   orphan that was given to somebody.
//! - **Time and units**: none; amounts are whole numbers of the user's own unit.
//! - **Bounds**: two batches a counter; waiters per batch are capped by the caller's limit.
//! - **Source**: group commit (`DeWitt` et al. 1984), applied to one counter.

use super::joined::Op;

/// Names one batch of one counter; later batches have higher numbers.
pub type BatchId = u64;

/// The adds of one counter. `W` is how a waiting caller is woken, `N` where it reads what became
/// of its batch.
#[derive(Clone, Debug)]
pub struct Adds<W, N> {
    flying: Option<Batch<W, N>>,
    open: Option<Batch<W, N>>,
    batches: BatchId,
    /// How many adds the newest batch that was sent carried.
    company: usize,
    /// How amounts combine.
    op: Op,
}

#[derive(Clone, Debug)]
struct Batch<W, N> {
    id: BatchId,
    amount: i64,
    news: N,
    /// All that ever joined, in their order.
    waiters: Vec<Waiter<W>>,
    /// Those who still wait, and before which place nobody does.
    here: usize,
    first: usize,
    lead: Lead,
}

#[derive(Clone, Debug)]
enum Waiter<W> {
    Here(W),
    /// Has been woken to lead.
    Woken,
    Gone,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lead {
    /// Another batch is under way.
    Nobody,
    /// Was told to lead, and has not taken it up.
    Named(usize),
    Taken,
}

/// A caller's place in its batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The batch that its add is in.
    pub batch: BatchId,
    at: usize,
}

/// What becomes of an add.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival<W, N> {
    /// It is in this batch, and its caller sends the batch.
    Lead(Place, N),
    /// It is in a batch that somebody else sends.
    Wait(Place, N),
    /// Nothing was taken in: too many wait. The caller sends its add by itself.
    Bypass(W),
    /// Nothing was taken in: the sum of the batch would not fit into 64 bits.
    Overflow(W),
}

/// What is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sending {
    /// The sum.
    pub amount: i64,
    /// How many adds it is made of.
    pub adds: u64,
}

/// Who sends the next batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next<W, N> {
    /// There is none, or its leader is known.
    Nobody,
    /// The caller that has waited longest; woken, it asks with [`Adds::woken`].
    Lead(W),
    /// All of its callers gave up; whoever asked must see to it.
    Orphan(BatchId, N),
}

/// What a caller is to do that was woken and has no news of its batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Woken<W> {
    /// Send the batch.
    Lead,
    /// Wait on; how it was woken before.
    Wait(Option<W>),
    /// The batch has ended: there are news now.
    Ended(W),
}

impl<W, N> Default for Adds<W, N> {
    fn default() -> Self {
        Adds { flying: None, open: None, batches: 0, company: 0, op: Op::Sum }
    }
}

impl<W, N: Clone + Default> Adds<W, N> {
    /// Of amounts that combine like this.
    #[must_use]
    pub fn of(op: Op) -> Self {
        Adds { op, ..Adds::default() }
    }

    /// An add has come.
    pub fn arrive(&mut self, amount: i64, waiter: W, waiters_max: usize) -> Arrival<W, N> {
        if let Some(open) = &mut self.open {
            if open.here >= waiters_max {
                return Arrival::Bypass(waiter);
            }
            let Some(sum) = self.op.combine(open.amount, amount) else {
                return Arrival::Overflow(waiter);
            };
            open.amount = sum;
            let place = open.join(waiter);
            return Arrival::Wait(place, open.news.clone());
        }
        self.batches += 1;
        let lead = if self.flying.is_some() { Lead::Nobody } else { Lead::Taken };
        let mut open = Batch {
            id: self.batches,
            amount,
            news: N::default(),
            // As many as came last time.
            waiters: Vec::with_capacity(self.company.min(waiters_max)),
            here: 0,
            first: 0,
            lead,
        };
        let (place, news) = (open.join(waiter), open.news.clone());
        self.open = Some(open);
        if lead == Lead::Taken { Arrival::Lead(place, news) } else { Arrival::Wait(place, news) }
    }

    /// The leader of `batch` sends it now: from here on nobody joins it. `None` when it is not
    /// there to be sent, which includes that another batch is under way.
    pub fn send(&mut self, batch: BatchId) -> Option<Sending> {
        if self.flying.is_some() || self.open.as_ref()?.id != batch {
            return None;
        }
        let open = self.open.take()?;
        self.company = open.waiters.len();
        let sending = Sending { amount: open.amount, adds: open.waiters.len() as u64 };
        self.flying = Some(open);
        Some(sending)
    }

    /// The batch under way has ended, in whatever way: who is told, and who sends the next one.
    pub fn land(&mut self, batch: BatchId) -> (Told<W>, Next<W, N>) {
        match self.flying.take_if(|f| f.id == batch) {
            Some(flying) => (Told(flying.waiters), self.successor()),
            None => (Told(Vec::new()), Next::Nobody),
        }
    }

    /// The leader of a batch that is not sent gave up: who sends it instead.
    pub fn abandon(&mut self, batch: BatchId) -> Next<W, N> {
        if self.flying.is_some() || self.open.as_ref().is_none_or(|o| o.id != batch) {
            return Next::Nobody;
        }
        self.successor()
    }

    /// Gives up an orphan: how many adds were in it.
    pub fn give_up(&mut self, batch: BatchId) -> u64 {
        let open = self.open.take_if(|open| open.id == batch && open.here == 0);
        open.map_or(0, |open| open.waiters.len() as u64)
    }

    /// A caller was woken and has no news: whether it leads now. From here on it is woken by
    /// `waiter`.
    pub fn woken(&mut self, place: Place, waiter: W) -> Woken<W> {
        let all = [&mut self.flying, &mut self.open];
        let Some(batch) = all.into_iter().flatten().find(|b| b.id == place.batch) else {
            return Woken::Ended(waiter);
        };
        let before = batch.waiters.get_mut(place.at);
        let before = before.map(|w| std::mem::replace(w, Waiter::Here(waiter)));
        if batch.lead == Lead::Named(place.at) {
            batch.lead = Lead::Taken;
            return Woken::Lead;
        }
        Woken::Wait(match before {
            Some(Waiter::Here(before)) => Some(before),
            _ => None,
        })
    }

    /// A caller gave up. Its add stays. How it was woken; and who leads, if it was to.
    pub fn leave(&mut self, place: Place) -> (Option<W>, Next<W, N>) {
        let all = [&mut self.flying, &mut self.open];
        let Some(batch) = all.into_iter().flatten().find(|b| b.id == place.batch) else {
            return (None, Next::Nobody);
        };
        let Some(slot) = batch.waiters.get_mut(place.at) else { return (None, Next::Nobody) };
        let was = match std::mem::replace(slot, Waiter::Gone) {
            Waiter::Gone => return (None, Next::Nobody),
            Waiter::Woken => None,
            Waiter::Here(waiter) => Some(waiter),
        };
        batch.here -= 1;
        let named = batch.lead == Lead::Named(place.at);
        (was, if named { self.successor() } else { Next::Nobody })
    }

    /// Whether a leader does well to let others go first before it sends: the newest batch had
    /// company, so its callers are likely to be back at once. Sent without waiting, the first of
    /// them would travel alone and all others one round trip later.
    #[must_use]
    pub fn expects_company(&self) -> bool {
        self.company > 1
    }

    /// True when nothing is under way and nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.flying.is_none() && self.open.is_none()
    }

    /// Names the leader of the open batch.
    fn successor(&mut self) -> Next<W, N> {
        let Some(open) = &mut self.open else { return Next::Nobody };
        while let Some(slot) = open.waiters.get_mut(open.first) {
            if let Waiter::Here(_) = slot
                && let Waiter::Here(waiter) = std::mem::replace(slot, Waiter::Woken)
            {
                open.lead = Lead::Named(open.first);
                return Next::Lead(waiter);
            }
            open.first += 1;
        }
        open.lead = Lead::Taken;
        Next::Orphan(open.id, open.news.clone())
    }
}

impl<W, N> Batch<W, N> {
    fn join(&mut self, waiter: W) -> Place {
        self.here += 1;
        self.waiters.push(Waiter::Here(waiter));
        Place { batch: self.id, at: self.waiters.len() - 1 }
    }
}

/// Those who are told what became of their batch, in the order in which they came.
#[derive(Clone, Debug)]
pub struct Told<W>(Vec<Waiter<W>>);

impl<W> Told<W> {
    /// How each of them is woken.
    pub fn wakers(self) -> impl Iterator<Item = W> {
        self.0.into_iter().filter_map(|waiter| match waiter {
            Waiter::Here(waker) => Some(waker),
            Waiter::Woken | Waiter::Gone => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Event {
        Add(i8),
        Leave(u8),
        /// A caller is polled without news.
        Poll(u8),
        Send,
        Abandon,
        Land,
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            4 => any::<i8>().prop_map(Event::Add),
            2 => any::<u8>().prop_map(Event::Leave),
            2 => any::<u8>().prop_map(Event::Poll),
            2 => Just(Event::Send),
            1 => Just(Event::Abandon),
            2 => Just(Event::Land),
        ];
        proptest::collection::vec(event, 0..80)
    }

    /// Callers by their number, which is also how they are woken.
    #[derive(Default)]
    struct Model {
        adds: Adds<u64, ()>,
        calls: u64,
        given: i64,
        sent: i64,
        waiting: Vec<(Place, u64)>,
        told: Vec<u64>,
        /// Was woken to lead.
        named: Option<u64>,
        /// Somebody may send this.
        lead: Option<BatchId>,
        flying: Option<BatchId>,
    }

    impl Model {
        fn next(&mut self, next: Next<u64, ()>) {
            match next {
                Next::Nobody => {}
                Next::Lead(call) => {
                    assert!(self.lead.is_none() && self.named.is_none());
                    assert!(self.waiting.iter().any(|(_, c)| *c == call), "who left is not woken");
                    self.named = Some(call);
                }
                Next::Orphan(batch, ()) => {
                    assert!(self.lead.is_none() && self.named.is_none());
                    self.lead = Some(batch);
                }
            }
        }

        fn add(&mut self, n: i64) {
            self.calls += 1;
            match self.adds.arrive(n, self.calls, 8) {
                Arrival::Lead(place, ()) => {
                    assert!(self.lead.is_none() && self.named.is_none() && self.flying.is_none());
                    self.lead = Some(place.batch);
                    self.waiting.push((place, self.calls));
                }
                Arrival::Wait(place, ()) => self.waiting.push((place, self.calls)),
                other => {
                    assert_eq!(other, Arrival::Bypass(self.calls));
                    return;
                }
            }
            self.given += n;
        }

        fn leave(&mut self, i: usize) {
            if self.waiting.is_empty() {
                return;
            }
            let (place, call) = self.waiting.remove(i % self.waiting.len());
            let (was, next) = self.adds.leave(place);
            if self.named == Some(call) {
                assert_eq!(was, None);
                self.named = None;
            }
            self.next(next);
        }

        fn poll(&mut self, i: usize) {
            if self.waiting.is_empty() {
                return;
            }
            let (place, call) = self.waiting[i % self.waiting.len()];
            match self.adds.woken(place, call) {
                Woken::Lead => {
                    assert_eq!((self.named.take(), self.lead), (Some(call), None));
                    self.lead = Some(place.batch);
                }
                Woken::Wait(before) => assert_eq!(before, Some(call)),
                Woken::Ended(_) => panic!("its batch has not landed"),
            }
        }

        fn send(&mut self) {
            if self.flying.is_none()
                && let Some(batch) = self.lead.take()
            {
                self.sent += self.adds.send(batch).unwrap().amount;
                assert!(self.adds.send(batch).is_none(), "sent once");
                self.flying = Some(batch);
            }
        }

        fn abandon(&mut self) {
            if let Some(batch) = self.lead.take() {
                let next = self.adds.abandon(batch);
                self.next(next);
            }
        }

        fn land(&mut self) {
            if let Some(batch) = self.flying.take() {
                let (now, next) = self.adds.land(batch);
                let now: Vec<u64> = now.wakers().collect();
                self.waiting.retain(|(_, c)| !now.contains(c));
                self.told.extend(now);
                self.next(next);
            }
        }
    }

    proptest! {
        /// Against a list of all adds: what was sent is what was taken in, each once, and who is
        /// told is who stayed.
        #[test]
        fn every_add_is_sent_once_and_every_caller_that_stayed_is_told(events in events()) {
            let mut model = Model::default();
            for event in events {
                match event {
                    Event::Add(n) => model.add(n.into()),
                    Event::Leave(i) => model.leave(i.into()),
                    Event::Poll(i) => model.poll(i.into()),
                    Event::Send => model.send(),
                    Event::Abandon => model.abandon(),
                    Event::Land => model.land(),
                }
            }
            // The end: everything that is left is sent and lands.
            for _ in 0..3 {
                (0..model.waiting.len()).for_each(|i| model.poll(i));
                model.send();
                model.land();
            }
            prop_assert!(model.adds.is_idle() && model.waiting.is_empty());
            prop_assert_eq!(model.given, model.sent);
            let mut once = model.told.clone();
            once.sort_unstable();
            once.dedup();
            prop_assert_eq!(once.len(), model.told.len());
        }
    }

    #[test]
    fn a_sum_that_does_not_fit_refuses_the_add_that_would_break_it() {
        let mut adds: Adds<u8, ()> = Adds::default();
        let Arrival::Lead(Place { batch: 1, .. }, ()) = adds.arrive(i64::MAX, 0, 8) else {
            panic!()
        };
        assert_eq!(adds.arrive(1, 0, 8), Arrival::Overflow(0));
        let Arrival::Wait(..) = adds.arrive(-1, 0, 8) else { panic!() };
        assert_eq!(adds.send(1), Some(Sending { amount: i64::MAX - 1, adds: 2 }));
    }

    #[test]
    fn a_leader_that_gives_up_hands_the_batch_to_who_has_waited_longest() {
        let mut adds: Adds<u8, ()> = Adds::default();
        let Arrival::Lead(first, ()) = adds.arrive(1, 10, 8) else { panic!() };
        let Arrival::Wait(second, ()) = adds.arrive(2, 20, 8) else { panic!() };
        let Arrival::Wait(third, ()) = adds.arrive(3, 30, 8) else { panic!() };
        assert_eq!(adds.leave(first), (Some(10), Next::Nobody));
        assert_eq!(adds.abandon(first.batch), Next::Lead(20));
        assert_eq!(adds.leave(second), (None, Next::Lead(30)), "it had not taken it up");
        assert_eq!(adds.give_up(first.batch), 0, "somebody waits for it");
        assert_eq!(adds.woken(third, 31), Woken::Lead);
        assert_eq!(adds.leave(third), (Some(31), Next::Nobody));
        assert_eq!(adds.abandon(first.batch), Next::Orphan(first.batch, ()));
        assert_eq!(adds.give_up(first.batch), 3);
        assert!(adds.is_idle());
        assert_eq!(adds.woken(third, 31), Woken::Ended(31));
    }
}
