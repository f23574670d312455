//! One batch of adds on its way to the store, and the callers that wait for it.
//!
//! The leader polls the store's future inline. When it is dropped, the batch moves to a task and
//! goes on for the others; when that task's runtime dies, a batch that was sent is of unknown
//! outcome and one that was not is led by the caller that has waited longest. Every end is a
//! `Drop`: nothing here can be forgotten.

use crate::adds::{Cell, count};
use crate::call;
use crate::engine::data::adds::{Adds, Arrival, BatchId, Next, Place, Woken};
use crate::engine::data::gate::WriteSlot;
use crate::engine::data::joined::Joined;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::runtime::BoxFuture;
use crate::salt;
use crate::shared::Shared;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Where the callers of one batch read what became of it.
pub(crate) type News = Arc<OnceLock<Result<()>>>;

/// How a waiting caller is woken.
pub(crate) type Batches = Adds<Waker, News>;

/// The right and the duty to send one batch and to end it.
struct Ticket {
    shared: Arc<Shared>,
    cell: Arc<Cell>,
    batch: BatchId,
    news: News,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not sent; dropped, it goes to another caller of the batch.
    Open,
    /// Not sent, and when it was made nobody waited for it any more.
    Orphan,
    /// On its way.
    Sent(WriteSlot),
    Ended,
}

impl Ticket {
    fn new(shared: &Arc<Shared>, cell: &Arc<Cell>, batch: BatchId, news: &News) -> Ticket {
        let (shared, cell) = (shared.clone(), cell.clone());
        Ticket { shared, cell, batch, news: news.clone(), stage: Stage::Open }
    }

    /// Announces the write and closes the batch: how much is sent.
    fn send(&mut self) -> Option<(i64, u64)> {
        // Announced first: a load that begins from here on is overlapped by this write.
        let slot = self.shared.begin_write(self.cell.hash, &self.cell.key);
        let Some(sending) = self.cell.batches.lock().send(self.batch) else {
            self.stage = Stage::Ended;
            let outcome = Some(Outcome::NotApplied);
            self.shared.end_write(self.cell.hash, &self.cell.key, slot, outcome);
            return None;
        };
        self.stage = Stage::Sent(slot);
        let tallies = &self.shared.counters.tallies;
        count(&tallies.adds, sending.adds);
        count(&tallies.batches, 1);
        Some((sending.amount, sending.adds))
    }

    fn land(&mut self, outcome: &Result<()>) {
        if let Stage::Sent(slot) = self.stage {
            let end = outcome.as_ref().err().map(Error::outcome);
            self.shared.end_write(self.cell.hash, &self.cell.key, slot, end);
        }
        self.stage = Stage::Ended;
        // Before the batch is gone: who finds it gone finds the news.
        let _ = self.news.set(outcome.clone());
        let (told, next) = self.cell.batches.lock().land(self.batch);
        // The next leader first; each of them is woken, whatever becomes of the others.
        let all = std::iter::once(next).chain(told.wakers().map(Next::Lead));
        call::each(all, |next| pass_on(&self.shared, &self.cell, next));
    }
}

/// Sees to the next batch.
fn pass_on(shared: &Arc<Shared>, cell: &Arc<Cell>, next: Next<Waker, News>) {
    match next {
        Next::Nobody => {}
        Next::Lead(waker) => waker.wake(),
        Next::Orphan(batch, news) => {
            let mut ticket = Ticket::new(shared, cell, batch, &news);
            ticket.stage = Stage::Orphan;
            let runtime = shared.runtime.clone();
            runtime.spawn(job(ticket));
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        match self.stage {
            Stage::Ended => {}
            Stage::Sent(_) => {
                let text = "the task that sent the add was dropped";
                self.land(&Err(Error::unknown(ErrorKind::Store, text).with_key(&self.cell.key)));
            }
            Stage::Open => {
                let next = self.cell.batches.lock().abandon(self.batch);
                pass_on(&self.shared, &self.cell, next);
            }
            Stage::Orphan => {
                let mut batches = self.cell.batches.lock();
                // Somebody may have joined since.
                let next = batches.abandon(self.batch);
                if matches!(next, Next::Orphan(..)) {
                    let adds = batches.give_up(self.batch);
                    drop(batches);
                    return count(&self.shared.counters.tallies.adds_given_up, adds);
                }
                drop(batches);
                pass_on(&self.shared, &self.cell, next);
            }
        }
    }
}

/// Sends the batch of `ticket` and tells its callers.
fn job(mut ticket: Ticket) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let Some((amount, adds)) = ticket.send() else {
            let text = "the add was not there to be sent";
            let _ = ticket.news.set(Err(Error::not_applied(ErrorKind::Store, text)));
            return;
        };
        let outcome = send(&ticket.shared, &ticket.cell, amount, adds).await;
        ticket.land(&outcome);
    })
}

/// One `add` of the store, its panic and its silence turned into errors of unknown outcome.
async fn send(shared: &Arc<Shared>, cell: &Arc<Cell>, amount: i64, adds: u64) -> Result<()> {
    shared.admit(|| cell.hash, &cell.key, None)?;
    let answer = match (&shared.salted, Joined::number(cell.op, amount)) {
        (Some(salted), None) => salted.add(shared, cell, (amount, adds)).await,
        (Some(salted), Some(value)) => salted.join(shared, cell, (value, adds)).await,
        (None, Some(value)) => salt::add_plain(shared, &cell.key, value).await,
        (None, None) => {
            let add = shared.store.clone().add(cell.key.clone(), amount);
            match bounded(shared, shared.options.loads.timeout, call::catch(add)).await {
                Some(Ok(answer)) => answer.map(drop),
                Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
                None => Err(Error::unknown(ErrorKind::Timeout, "the store did not answer in time")),
            }
        }
    };
    if answer.as_ref().is_err_and(Error::is_unknown) {
        count(&shared.counters.tallies.adds_unknown, adds);
    }
    answer.map_err(|e| e.with_key(&cell.key))
}

/// What `work` comes to, or `None` when that takes longer than `limit`. The timer starts with the
/// first wait: what is ready at once sets none.
pub(crate) async fn bounded<T>(
    shared: &Arc<Shared>,
    limit: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = std::pin::pin!(work);
    let mut timer = None;
    poll_fn(|cx| {
        if let Poll::Ready(out) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(out));
        }
        let timer = timer.get_or_insert_with(|| shared.runtime.sleep(limit));
        timer.as_mut().poll(cx).map(|()| None)
    })
    .await
}

/// Adds `amount` to the counter of `cell`, together with whatever comes meanwhile.
pub(crate) async fn add(shared: &Arc<Shared>, cell: &Arc<Cell>, amount: i64) -> Result<()> {
    let begin = poll_fn(|cx| Poll::Ready(AddCall::new(shared, cell, amount, cx.waker())));
    match begin.await {
        Ok(Some(call)) => call.await,
        Ok(None) => alone(shared.clone(), cell.clone(), amount).await,
        Err(error) => Err(error),
    }
}

/// A caller's wait for its add, and the batch if this caller leads.
struct AddCall<'a> {
    shared: &'a Arc<Shared>,
    cell: &'a Arc<Cell>,
    place: Place,
    news: News,
    job: Option<BoxFuture<'static, ()>>,
    /// Before it sends, it lets other tasks of its runtime run once.
    gives_way: bool,
    /// It is polled with the waker that it came with.
    fresh: bool,
    finished: bool,
}

impl<'a> AddCall<'a> {
    /// `None` when too many wait already.
    fn new(
        shared: &'a Arc<Shared>,
        cell: &'a Arc<Cell>,
        amount: i64,
        waker: &Waker,
    ) -> Result<Option<AddCall<'a>>> {
        let (waker, limit) = (waker.clone(), shared.options.loads.waiters_max);
        let mut batches = cell.batches.lock();
        let arrival = batches.arrive(amount, waker, limit);
        let company = batches.expects_company();
        drop(batches);
        let (place, news, leads) = match arrival {
            Arrival::Lead(place, news) => (place, news, true),
            Arrival::Wait(place, news) => (place, news, false),
            Arrival::Bypass(_) => return Ok(None),
            Arrival::Overflow(_) => {
                let text = "the adds that are under way would not fit into 64 bits with this one";
                return Err(Error::not_applied(ErrorKind::Overflow, text).with_key(&cell.key));
            }
        };
        let job = leads.then(|| job(Ticket::new(shared, cell, place.batch, &news)));
        let gives_way = company || !leads;
        Ok(Some(AddCall {
            shared,
            cell,
            place,
            news,
            job,
            gives_way,
            fresh: true,
            finished: false,
        }))
    }

    /// Woken without news: to lead, or for nothing. False when there are news by now.
    fn woken(&mut self, waker: &Waker) -> bool {
        let waker = waker.clone();
        let woken = self.cell.batches.lock().woken(self.place, waker);
        if matches!(woken, Woken::Lead) {
            let ticket = Ticket::new(self.shared, self.cell, self.place.batch, &self.news);
            self.job = Some(job(ticket));
        }
        !matches!(woken, Woken::Ended(_))
    }
}

/// An add for this caller only: too many wait already.
fn alone(shared: Arc<Shared>, cell: Arc<Cell>, amount: i64) -> BoxFuture<'static, Result<()>> {
    count(&shared.counters.tallies.bypassed, 1);
    Box::pin(async move {
        let slot = shared.begin_write(cell.hash, &cell.key);
        let guard = WriteGuard::new(&shared, &cell, slot);
        count(&shared.counters.tallies.adds, 1);
        count(&shared.counters.tallies.batches, 1);
        let outcome = send(&shared, &cell, amount, 1).await;
        guard.end(outcome.as_ref().err().map(Error::outcome));
        outcome
    })
}

/// A write under way; dropped, it is of unknown outcome.
pub(crate) struct WriteGuard<'a> {
    shared: &'a Arc<Shared>,
    cell: &'a Arc<Cell>,
    slot: Option<WriteSlot>,
}

impl<'a> WriteGuard<'a> {
    pub(crate) fn new(
        shared: &'a Arc<Shared>,
        cell: &'a Arc<Cell>,
        slot: WriteSlot,
    ) -> WriteGuard<'a> {
        WriteGuard { shared, cell, slot: Some(slot) }
    }

    pub(crate) fn end(mut self, outcome: Option<Outcome>) {
        self.close(outcome);
    }

    fn close(&mut self, outcome: Option<Outcome>) {
        if let Some(slot) = self.slot.take() {
            self.shared.end_write(self.cell.hash, &self.cell.key, slot, outcome);
        }
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        self.close(Some(Outcome::Unknown));
    }
}

impl Future for AddCall<'_> {
    type Output = Result<()>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        loop {
            if let Some(outcome) = this.news.get() {
                this.finished = true;
                return Poll::Ready(outcome.clone());
            }
            let fresh = std::mem::take(&mut this.fresh);
            if this.job.is_none() && !fresh && !this.woken(cx.waker()) {
                continue;
            }
            if this.job.is_some() && std::mem::take(&mut this.gives_way) {
                // One turn of the scheduler, not a wait: who is ready to add joins this batch.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            match this.job.as_mut().map(|job| job.as_mut().poll(cx)) {
                // Its end brought the news.
                Some(Poll::Ready(())) => this.job = None,
                Some(Poll::Pending) | None => return Poll::Pending,
            }
        }
    }
}

impl Drop for AddCall<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // A lead that was not taken up goes to the next caller.
        let (waker, next) = self.cell.batches.lock().leave(self.place);
        pass_on(self.shared, self.cell, next);
        if let Some(job) = self.job.take() {
            self.shared.runtime.spawn(job);
        }
        drop(waker);
    }
}
