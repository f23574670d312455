//! Reads of several keys in one call: those that are not cached share one operation of the store.

use crate::call::{self, Call, Step, Ticket};
use crate::error::Result;
use crate::heatsink::{Heatsink, present};
use crate::key::Key;
use crate::read::{From, Read, too_late};
use crate::runtime::BoxFuture;
use crate::salt;
use crate::shared::{Begin, Loaded, Shared};
use crate::value::Value;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

impl Heatsink {
    /// The values under `keys`, one result per key, in their order.
    ///
    /// # Staleness
    /// Of each value as of [`get`](Heatsink::get). Values of one call need not be of one moment.
    ///
    /// # Cost
    /// Store operations: one `get_many` for the keys that nobody is loading already.
    ///
    /// # Cancel safety
    /// As [`get`](Heatsink::get).
    ///
    /// # Errors
    /// Per key: a failing shard fails its own keys only.
    pub async fn get_many<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Vec<Result<Option<Value>>> {
        self.get_many_with(keys, Read::new()).await
    }

    /// Like [`get_many`](Heatsink::get_many), with limits that hold for each key.
    ///
    /// # Errors
    /// Per key those of [`get_many`](Heatsink::get_many), and
    /// [`Deadline`](crate::ErrorKind::Deadline) for what has not come in time; what has is there.
    pub async fn get_many_with<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
        read: Read,
    ) -> Vec<Result<Option<Value>>> {
        let shared = self.shared();
        // All of them first: the caller's iterator may take its time, and others may join.
        let keys: Vec<K> = keys.into_iter().collect();
        let mut all = JoinAll::new(self, read);
        let mut tickets = Vec::new();
        let from = From::Store.of(read.tenant);
        for key in keys {
            let key = key.as_ref();
            let due = self.observe(read.cost());
            if let Some(value) = self.hot(key, &read, due) {
                all.ready(Ok(value));
                continue;
            }
            let (hash, key) = (shared.hash(key), Key::copy(key));
            let begun = if let Some(error) = salt::refused(shared, &key, "sum") {
                Err(error)
            } else if Shared::untracked(&key) {
                Ok(Begin::Bypass)
            } else {
                shared.begin(hash, &key, read.max_age, false)
            };
            if let Ok(begun) = &begun {
                self.sampled(due, &key, begun.seen());
            }
            match begun {
                Err(error) => all.ready(Err(error)),
                Ok(Begin::Hit(value, due)) => {
                    all.ready(Ok(value));
                    if due {
                        self.refresh(&key, From::Store.of(read.tenant));
                    }
                }
                Ok(Begin::Bypass) => {
                    let from = From::Store.of(read.tenant);
                    all.alone(self.alone(key, read.max_age, from));
                }
                Ok(Begin::Wait(waiter, id, ticket)) => {
                    let mut call = Call::new(shared.clone(), (hash, key), waiter, id);
                    match ticket.map(|ticket| call.admit(&from, ticket)) {
                        Some(Err(refused)) => all.ready(call.value(Err(refused), read.max_age)),
                        Some(Ok(ticket)) => {
                            all.wait(call);
                            tickets.push(ticket);
                        }
                        None => all.wait(call),
                    }
                }
            }
        }
        if !tickets.is_empty() {
            all.job = Some(self.batch(tickets));
        }
        all.await.into_iter().map(|r| r.map(present)).collect()
    }

    fn batch(&self, tickets: Vec<Ticket>) -> BoxFuture<'static, ()> {
        let (shared, store) = (self.shared(), self.shared().store.clone());
        // One hot key among them comes once a TTL: then the expiry of all is asked for, which costs
        // less than a second operation. A value that may be frozen must know its expiry too.
        let hot = tickets.iter().any(|ticket| shared.is_hot(ticket.hash(), ticket.key()));
        let cached = hot || shared.shed.frozen.is_some();
        let keys: Vec<Key> = tickets.iter().map(|t| t.key().clone()).collect();
        let load: BoxFuture<'static, Vec<Result<Loaded>>> = Box::pin(async move {
            if !cached && store.capability().uncached {
                let all = store.get_many_uncached(keys).await;
                return all.into_iter().map(|one| one.map(Loaded::uncached)).collect();
            }
            let all = store.get_many(keys).await;
            all.into_iter().map(|one| one.map(Loaded::from_store)).collect()
        });
        call::batch_job(shared, tickets, load)
    }
}

/// Waits for several keys; results stand in the order in which they were added.
struct JoinAll {
    slots: Vec<Slot>,
    /// The load of those that this batch leads. It is nobody's own: it outlives the wait for one of
    /// its keys.
    job: Option<BoxFuture<'static, ()>>,
    shared: Arc<Shared>,
    read: Read,
    deadline: Option<(Duration, BoxFuture<'static, ()>)>,
}

enum Slot {
    Ready(Option<Result<Value>>),
    Wait(Box<Call>),
    Alone(BoxFuture<'static, Result<Value>>),
}

impl JoinAll {
    fn new(hs: &Heatsink, read: Read) -> JoinAll {
        let timer = |limit| (limit, hs.shared().runtime.sleep(limit));
        let deadline = read.deadline.map(timer);
        JoinAll { slots: Vec::new(), job: None, shared: hs.shared().clone(), read, deadline }
    }

    fn ready(&mut self, result: Result<Value>) {
        self.slots.push(Slot::Ready(Some(result)));
    }

    fn alone(&mut self, load: BoxFuture<'static, Result<Value>>) {
        self.slots.push(Slot::Alone(load));
    }

    fn wait(&mut self, call: Call) {
        self.slots.push(Slot::Wait(Box::new(call)));
    }

    /// Runs the load a step further. Taken out while it is polled: after a panic nobody must poll
    /// it again.
    fn step(&mut self, cx: &mut Context<'_>) {
        let Some(mut job) = self.job.take() else { return };
        if job.as_mut().poll(cx).is_pending() {
            self.job = Some(job);
        }
    }

    /// How long the caller waits, when that is over.
    fn too_late(&mut self, cx: &mut Context<'_>) -> Option<Duration> {
        let (limit, timer) = self.deadline.as_mut()?;
        timer.as_mut().poll(cx).is_ready().then_some(*limit)
    }
}

impl Drop for JoinAll {
    fn drop(&mut self) {
        // Where every key has its answer the load is for nobody: a time limit has ended it.
        let waits = |slot: &Slot| !matches!(slot, Slot::Ready(_));
        if let Some(job) = self.job.take()
            && self.slots.iter().any(waits)
        {
            self.shared.runtime.clone().spawn(job);
        }
    }
}

impl Slot {
    fn poll(&mut self, shared: &Arc<Shared>, read: Read, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let result = match self {
                Slot::Ready(_) => return Poll::Ready(()),
                Slot::Alone(load) => match load.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(result) => result,
                },
                Slot::Wait(call) => match Pin::new(&mut **call).poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Step::Done(outcome)) => call.value(outcome, read.max_age),
                    Poll::Ready(Step::Lead(ticket)) => {
                        let from = From::Store.of(read.tenant);
                        match call.admit(&from, ticket) {
                            Ok(ticket) => {
                                call.run(from.job(shared, ticket));
                                continue;
                            }
                            Err(refused) => call.value(Err(refused), read.max_age),
                        }
                    }
                },
            };
            *self = Slot::Ready(Some(result));
        }
    }
}

impl Future for JoinAll {
    type Output = Vec<Result<Value>>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.step(cx);
        let mut all = true;
        let JoinAll { slots, shared, read, .. } = &mut *self;
        for slot in slots {
            all &= slot.poll(shared, *read, cx).is_ready();
        }
        let late = if all { None } else { self.too_late(cx) };
        if !all && late.is_none() {
            return Poll::Pending;
        }
        let take = |slot: &mut Slot| match (slot, late) {
            (Slot::Ready(result), _) => result.take(),
            (_, Some(limit)) => Some(Err(too_late(limit))),
            _ => None,
        };
        Poll::Ready(self.slots.iter_mut().filter_map(take).collect())
    }
}
