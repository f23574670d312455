//! A caller's wait, and the load that one of the callers runs.
//!
//! The leader polls the load inline. When it is dropped before the load has ended, the load moves
//! to a task and goes on for the others; when that task's runtime dies, the caller that has waited
//! longest leads a new load. Every end is a `Drop`: nothing here can be forgotten.

use crate::cell::Entry;
use crate::engine::data::flight::{FlightId, WaiterId};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::read::From;
use crate::runtime::BoxFuture;
use crate::shared::{Loaded, Shared};
use crate::sync::{Mutex, thread_local};
use crate::value::Value;
use std::any::Any;
use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// What a load brings to those who wait for it.
pub(crate) type Outcome = Result<Arc<Entry>>;

/// A waiting caller's letter box.
#[derive(Default)]
pub(crate) struct Waiter(Mutex<Letters>);

#[derive(Default)]
struct Letters {
    outcome: Option<Outcome>,
    lead: Option<Ticket>,
    waker: Option<Waker>,
}

impl Waiter {
    /// Hands over the outcome. Called outside all locks.
    pub(crate) fn deliver(&self, outcome: Outcome) {
        self.post(|letters| letters.outcome = Some(outcome));
    }

    /// Tells the caller to run a load. Called outside all locks.
    pub(crate) fn lead(&self, ticket: Ticket) {
        self.post(|letters| letters.lead = Some(ticket));
    }

    fn post(&self, write: impl FnOnce(&mut Letters)) {
        let mut letters = self.0.lock();
        write(&mut letters);
        let waker = letters.waker.take();
        drop(letters);
        if let Some(waker) = waker {
            // A waker that panics must cost nobody else his news, nor a flight its leader.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }

    fn poll(&self, waker: Option<&Waker>) -> Option<Step> {
        let mut letters = self.0.lock();
        if let Some(outcome) = letters.outcome.take() {
            return Some(Step::Done(outcome));
        }
        if let Some(ticket) = letters.lead.take() {
            return Some(Step::Lead(ticket));
        }
        if let Some(waker) = waker
            && !letters.waker.as_ref().is_some_and(|w| w.will_wake(waker))
        {
            letters.waker = Some(waker.clone());
        }
        None
    }
}

/// What a caller does next.
pub(crate) enum Step {
    Done(Outcome),
    Lead(Ticket),
}

/// The right and the duty to end one flight. Dropped without an outcome, it hands the flight on.
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    hash: u64,
    key: Key,
    flight: FlightId,
    started: Tick,
    done: bool,
}

impl Ticket {
    pub(crate) fn new(
        shared: Arc<Shared>,
        hash: u64,
        key: Key,
        flight: FlightId,
        started: Tick,
    ) -> Ticket {
        Ticket { shared, hash, key, flight, started, done: false }
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// Ends the flight.
    pub(crate) fn land(mut self, outcome: Result<Loaded>) {
        self.done = true;
        self.shared.land((self.hash, &self.key), (self.flight, self.started), outcome);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.done {
            self.shared.abandon(self.hash, &self.key, self.flight);
        }
    }
}

/// One load: runs `load`, turns a panic into an error, and ends the flight with what `into` makes
/// of its value.
pub(crate) fn job<T: Send + 'static>(
    ticket: Ticket,
    load: BoxFuture<'static, Result<T>>,
    into: impl FnOnce(T) -> Loaded + Send + 'static,
) -> BoxFuture<'static, ()> {
    let load = Guarded::new(&ticket.shared, [ticket.key.clone()], load);
    Box::pin(async move {
        let outcome = load.await.and_then(|loaded| loaded).map(into);
        ticket.land(outcome);
    })
}

/// Several loads that one store call answers.
pub(crate) fn batch_job(
    shared: &Arc<Shared>,
    tickets: Vec<Ticket>,
    load: BoxFuture<'static, Vec<Result<Loaded>>>,
) -> BoxFuture<'static, ()> {
    let keys: Vec<Key> = tickets.iter().map(|t| t.key.clone()).collect();
    let load = Guarded::new(shared, keys, load);
    Box::pin(async move {
        match load.await {
            Ok(outcomes) => {
                let mut outcomes = outcomes.into_iter();
                for ticket in tickets {
                    let outcome = outcomes.next().unwrap_or_else(|| {
                        Err(Error::not_applied(
                            ErrorKind::Store,
                            "the store answered fewer keys than it was asked for",
                        ))
                    });
                    ticket.land(outcome);
                }
            }
            Err(panic) => tickets.into_iter().for_each(|t| t.land(Err(panic.clone()))),
        }
    })
}

/// A store call for one caller, its panic turned into an error.
pub(crate) async fn catch<T>(call: BoxFuture<'static, T>) -> Result<T> {
    Guarded { instance: 0, keys: [], load: Some(call) }.await
}

/// Polls a load under two guards: a panic becomes an error, and a read of one of `keys` from
/// inside the load is recognised.
struct Guarded<T, K> {
    instance: usize,
    keys: K,
    load: Option<BoxFuture<'static, T>>,
}

impl<T, K> Guarded<T, K> {
    fn new(shared: &Arc<Shared>, keys: K, load: BoxFuture<'static, T>) -> Guarded<T, K> {
        Guarded { instance: Arc::as_ptr(shared) as usize, keys, load: Some(load) }
    }
}

impl<T, K: AsRef<[Key]> + Unpin> Future for Guarded<T, K> {
    type Output = Result<T>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(load) = this.load.as_mut() else { return Poll::Pending };
        // A thread that is ending has no place to note it: recursion is not recognised there.
        let depth = LOADING.try_with(|l| {
            let mut l = l.borrow_mut();
            let depth = l.len();
            l.extend(this.keys.as_ref().iter().map(|k| (this.instance, k.clone())));
            depth
        });
        let polled = catch_unwind(AssertUnwindSafe(|| load.as_mut().poll(cx)));
        if let Ok(depth) = depth {
            let _ = LOADING.try_with(|l| l.borrow_mut().truncate(depth));
        }
        match polled {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(out)) => {
                this.load = None;
                Poll::Ready(Ok(out))
            }
            Err(panic) => {
                let load = this.load.take();
                let _ = catch_unwind(AssertUnwindSafe(|| drop(load)));
                Poll::Ready(Err(panicked(&*panic)))
            }
        }
    }
}

thread_local! {
    /// The keys whose loads this thread is polling right now, innermost last.
    static LOADING: RefCell<Vec<(usize, Key)>> = const { RefCell::new(Vec::new()) };
}

/// True inside a poll of a load of `key`: waiting for that load would be waiting for oneself.
pub(crate) fn is_loading(shared: &Arc<Shared>, key: &Key) -> bool {
    let instance = Arc::as_ptr(shared) as usize;
    let known = LOADING.try_with(|l| l.borrow().iter().any(|(i, k)| *i == instance && k == key));
    known.unwrap_or(false)
}

/// Runs `f` on all of `items`, also when it panics on one (a waker may): the others must not wait
/// for ever for that. The first panic goes on when all have been served.
pub(crate) fn each<T>(items: impl IntoIterator<Item = T>, f: impl Fn(T)) {
    let mut first = None;
    for item in items {
        let served = catch_unwind(AssertUnwindSafe(|| f(item)));
        first = first.or_else(|| served.err());
    }
    if let Some(panic) = first {
        std::panic::resume_unwind(panic);
    }
}

/// The error of a load or a store call that panicked.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    Error::not_applied(ErrorKind::Panicked, format!("the load panicked: {text}"))
}

/// A caller's wait for one key, and the load if this caller leads.
pub(crate) struct Call {
    shared: Arc<Shared>,
    hash: u64,
    key: Key,
    waiter: Arc<Waiter>,
    id: WaiterId,
    job: Option<BoxFuture<'static, ()>>,
    /// Runs as a task already: there is nobody left to move the load to.
    detached: bool,
    finished: bool,
}

impl Call {
    pub(crate) fn new(
        shared: Arc<Shared>,
        (hash, key): (u64, Key),
        waiter: Arc<Waiter>,
        id: WaiterId,
    ) -> Call {
        Call { shared, hash, key, waiter, id, job: None, detached: false, finished: false }
    }

    /// What the caller gets for an outcome.
    pub(crate) fn value(&self, outcome: Outcome, max_age: Option<Duration>) -> Result<Value> {
        match outcome {
            Ok(entry) => Ok(Value::loaded(entry, self.shared.clock.now())),
            Err(error) => self.shared.last_known((self.hash, &self.key), max_age, error),
        }
    }

    /// The ticket, if the caller's own budgets allow a load; else leaves, and hands the lead on to
    /// whoever waits: nobody is refused for another's budget.
    ///
    /// # Errors
    /// The refusal, for the caller.
    pub(crate) fn admit(&mut self, from: &From, ticket: Ticket) -> Result<Ticket> {
        let refused = match from.admit(&self.shared, &self.key) {
            Ok(()) => return Ok(ticket),
            Err(refused) => refused.with_key(&self.key),
        };
        self.leave();
        drop(ticket);
        Err(refused)
    }

    fn leave(&mut self) {
        self.finished = true;
        self.shared.leave(self.hash, &self.key, self.id);
    }

    /// Gives this caller the load to run.
    pub(crate) fn run(&mut self, job: BoxFuture<'static, ()>) {
        self.job = Some(job);
    }

    /// Moves this wait, with its load, to a task.
    pub(crate) fn detach(mut self) {
        self.detached = true;
        let runtime = self.shared.runtime.clone();
        runtime.spawn(Box::pin(async move {
            // A task never leads: it drops the ticket, which hands the flight on.
            let _ = (&mut self).await;
        }));
    }
}

impl Future for Call {
    type Output = Step;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Step> {
        let this = &mut *self;
        loop {
            // Only when there is no load to poll does the caller have to be woken from outside.
            if let Some(step) = this.waiter.poll(None) {
                this.finished = matches!(step, Step::Done(_));
                return Poll::Ready(step);
            }
            // Taken out while it is polled: after a panic nobody must poll it again.
            if let Some(mut job) = this.job.take() {
                if job.as_mut().poll(cx).is_ready() {
                    continue;
                }
                this.job = Some(job);
            }
            if let Some(step) = this.waiter.poll(Some(cx.waker())) {
                this.finished = matches!(step, Step::Done(_));
                return Poll::Ready(step);
            }
            return Poll::Pending;
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let job = self.job.take();
        if self.finished {
            // A time limit closed the flight while the load still ran: the load is for nobody.
            return drop(job);
        }
        if !self.detached && job.is_some() {
            let call = Call {
                shared: self.shared.clone(),
                hash: self.hash,
                key: self.key.clone(),
                waiter: self.waiter.clone(),
                id: self.id,
                job,
                detached: true,
                finished: false,
            };
            return call.detach();
        }
        self.leave();
        drop(job);
    }
}
