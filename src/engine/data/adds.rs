//! Adds of one counter that travel together.
//!
//! - **What**: at most one batch is under way; adds that come meanwhile are summed into the next.
//! - **Invariant**: every add is in exactly one batch, and a batch is sent at most once; a caller
//!   that gave up stays in its sum.
//! - **Time and units**: none; amounts are whole numbers of the user's own unit.
//! - **Bounds**: two batches a counter; waiters per batch are capped by the caller's limit.
//! - **Source**: group commit (`DeWitt` et al. 1984), applied to one counter.

use super::flight::{WaiterId, Waiters};

/// Names one batch of one counter; later batches have higher numbers.
pub type BatchId = u64;

/// The adds of one counter. `W` is the letter box of a waiting caller.
#[derive(Clone, Debug)]
pub struct Adds<W> {
    flying: Option<Batch<W>>,
    open: Option<Batch<W>>,
    batches: BatchId,
    waiters: WaiterId,
    /// The newest batch that was sent carried more than one add.
    shared: bool,
}

#[derive(Clone, Debug)]
struct Batch<W> {
    id: BatchId,
    amount: i64,
    adds: u64,
    waiters: Waiters<W>,
}

/// What becomes of an add.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// It is in this batch, and its caller sends the batch.
    Lead(BatchId, WaiterId),
    /// It is in a batch that somebody else sends.
    Wait(WaiterId),
    /// Nothing was taken in: too many wait. The caller sends its add by itself.
    Bypass,
    /// Nothing was taken in: the sum of the batch would not fit into 64 bits.
    Overflow,
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
pub enum Next<W> {
    /// There is none, or its leader is known.
    Nobody,
    /// The caller that has waited longest.
    Lead(BatchId, W),
    /// All of its callers gave up; whoever asked must see to it.
    Orphan(BatchId),
}

impl<W> Default for Adds<W> {
    fn default() -> Self {
        Adds { flying: None, open: None, batches: 0, waiters: 0, shared: false }
    }
}

impl<W: Clone> Adds<W> {
    /// An add has come.
    pub fn arrive(&mut self, amount: i64, waiter: W, waiters_max: usize) -> Arrival {
        let id = self.waiters + 1;
        if let Some(open) = &mut self.open {
            if open.waiters.len() >= waiters_max {
                return Arrival::Bypass;
            }
            let Some(sum) = open.amount.checked_add(amount) else { return Arrival::Overflow };
            open.amount = sum;
            open.adds += 1;
            open.waiters.push(id, waiter);
            self.waiters = id;
            return Arrival::Wait(id);
        }
        self.waiters = id;
        self.batches += 1;
        let mut waiters = Waiters::default();
        waiters.push(id, waiter);
        self.open = Some(Batch { id: self.batches, amount, adds: 1, waiters });
        if self.flying.is_some() { Arrival::Wait(id) } else { Arrival::Lead(self.batches, id) }
    }

    /// The leader of `batch` sends it now: from here on nobody joins it. `None` when it is not
    /// there to be sent, which includes that another batch is under way.
    pub fn send(&mut self, batch: BatchId) -> Option<Sending> {
        if self.flying.is_some() || self.open.as_ref()?.id != batch {
            return None;
        }
        let open = self.open.take()?;
        let sending = Sending { amount: open.amount, adds: open.adds };
        self.shared = open.adds > 1;
        self.flying = Some(open);
        Some(sending)
    }

    /// The batch under way has ended, in whatever way: who is told, and who sends the next one.
    pub fn land(&mut self, batch: BatchId) -> (Vec<W>, Next<W>) {
        if self.flying.as_ref().is_none_or(|f| f.id != batch) {
            return (Vec::new(), Next::Nobody);
        }
        let told = self.flying.take().map(|f| f.waiters.into_vec()).unwrap_or_default();
        (told, self.successor())
    }

    /// The leader of a batch that is not sent gave up: who sends it instead.
    pub fn abandon(&mut self, batch: BatchId) -> Next<W> {
        if self.flying.is_some() || self.open.as_ref().is_none_or(|o| o.id != batch) {
            return Next::Nobody;
        }
        self.successor()
    }

    /// Gives up a batch that was never sent: who is told so, and how many adds were in it.
    pub fn give_up(&mut self, batch: BatchId) -> (Vec<W>, u64) {
        match self.open.take_if(|open| open.id == batch) {
            Some(open) => (open.waiters.into_vec(), open.adds),
            None => (Vec::new(), 0),
        }
    }

    /// A caller gave up. Its add stays.
    pub fn leave(&mut self, waiter: WaiterId) {
        for batch in [&mut self.flying, &mut self.open].into_iter().flatten() {
            if batch.waiters.leave(waiter) {
                return;
            }
        }
    }

    /// Whether a leader does well to let others go first before it sends: the newest batch had
    /// company, so its callers are likely to be back at once. Sent without waiting, the first of
    /// them would travel alone and all others one round trip later.
    #[must_use]
    pub fn expects_company(&self) -> bool {
        self.shared
    }

    /// True when nothing is under way and nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.flying.is_none() && self.open.is_none()
    }

    fn successor(&self) -> Next<W> {
        let Some(open) = &self.open else { return Next::Nobody };
        open.waiters.first().map_or(Next::Orphan(open.id), |w| Next::Lead(open.id, w))
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
        Send,
        Land,
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            4 => any::<i8>().prop_map(Event::Add),
            2 => any::<u8>().prop_map(Event::Leave),
            2 => Just(Event::Send),
            2 => Just(Event::Land),
        ];
        proptest::collection::vec(event, 0..80)
    }

    proptest! {
        /// Against a list of all adds: what was sent is what was taken in, each once, and who is
        /// told is who stayed.
        #[test]
        fn every_add_is_sent_once_and_every_caller_that_stayed_is_told(events in events()) {
            let mut adds: Adds<u64> = Adds::default();
            let (mut given, mut sent, mut calls) = (0i64, 0i64, 0u64);
            let (mut waiting, mut told) = (Vec::new(), Vec::new());
            let mut lead = None;
            let mut flying = None;
            for event in events {
                match event {
                    Event::Add(n) => {
                        calls += 1;
                        match adds.arrive(n.into(), calls, 8) {
                            Arrival::Lead(batch, id) => {
                                prop_assert!(lead.is_none() && flying.is_none());
                                lead = Some(batch);
                                waiting.push((id, calls));
                            }
                            Arrival::Wait(id) => waiting.push((id, calls)),
                            other => {
                                prop_assert_eq!(other, Arrival::Bypass);
                                continue;
                            }
                        }
                        given += i64::from(n);
                    }
                    Event::Leave(i) if !waiting.is_empty() => {
                        let (id, _) = waiting.remove(i as usize % waiting.len());
                        adds.leave(id);
                    }
                    Event::Leave(_) => {}
                    Event::Send => {
                        if let Some(batch) = lead.take() {
                            sent += adds.send(batch).unwrap().amount;
                            prop_assert!(adds.send(batch).is_none(), "sent once");
                            flying = Some(batch);
                        }
                    }
                    Event::Land => {
                        if let Some(batch) = flying.take() {
                            let (now, next) = adds.land(batch);
                            waiting.retain(|(_, c)| !now.contains(c));
                            told.extend(now);
                            lead = match next {
                                Next::Nobody => None,
                                Next::Lead(b, _) | Next::Orphan(b) => Some(b),
                            };
                        }
                    }
                }
            }
            // The end: everything that is left is sent and lands.
            for _ in 0..3 {
                if let Some(batch) = lead.take() {
                    sent += adds.send(batch).unwrap().amount;
                    flying = Some(batch);
                }
                if let Some(batch) = flying.take() {
                    let (now, next) = adds.land(batch);
                    waiting.retain(|(_, c)| !now.contains(c));
                    told.extend(now);
                    if let Next::Lead(b, _) | Next::Orphan(b) = next {
                        lead = Some(b);
                    }
                }
            }
            prop_assert!(adds.is_idle() && waiting.is_empty());
            prop_assert_eq!(given, sent);
            let mut once = told.clone();
            once.sort_unstable();
            once.dedup();
            prop_assert_eq!(once.len(), told.len());
        }
    }

    #[test]
    fn a_sum_that_does_not_fit_refuses_the_add_that_would_break_it() {
        let mut adds: Adds<u8> = Adds::default();
        assert_eq!(adds.arrive(i64::MAX, 0, 8), Arrival::Lead(1, 1));
        assert_eq!(adds.arrive(1, 0, 8), Arrival::Overflow);
        assert_eq!(adds.arrive(-1, 0, 8), Arrival::Wait(2));
        assert_eq!(adds.send(1), Some(Sending { amount: i64::MAX - 1, adds: 2 }));
    }

    #[test]
    fn a_leader_that_gives_up_hands_the_batch_to_who_has_waited_longest() {
        let mut adds: Adds<u8> = Adds::default();
        let Arrival::Lead(batch, first) = adds.arrive(1, 10, 8) else { panic!() };
        let Arrival::Wait(second) = adds.arrive(2, 20, 8) else { panic!() };
        adds.leave(first);
        assert_eq!(adds.abandon(batch), Next::Lead(batch, 20));
        adds.leave(second);
        assert_eq!(adds.abandon(batch), Next::Orphan(batch));
        assert_eq!(adds.give_up(batch), (Vec::new(), 2));
        assert!(adds.is_idle());
    }
}
