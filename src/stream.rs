//! Writes announced from process to process, so that a takedown does not wait for a value to grow
//! stale.
//!
//! A process that has written a key says so on a channel, once the write was acknowledged; the
//! others forget the key and void its loads. It is said only of keys that some process holds:
//! each says, every few seconds and only where nobody else has, which keys those are.
//!
//! The channel may lose messages. Announcements are numbered, so a listener finds out, and then
//! everything that it holds is unreadable at once; the same when the channel is connected again or
//! has been silent for [`Invalidations::silence`]. While it is cut, values are as old as
//! [`NearCache::stale`](crate::NearCache::stale) allows, as without it.
//!
//! A write of unknown outcome is announced when it is given up. One that is applied later than that
//! is seen within the stale limit.
//!
//! Whoever can publish to the channel can make its listeners load keys again, and nothing else.

use crate::engine::data::announce::{Effect, Inbox, Message, Outbox, Said, digest};
use crate::engine::time::Tick;
use crate::error::Result;
use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use crate::store::{Delivery, MemoryStore, Store, Subscription};
use bytes::Bytes;
use parking_lot::Mutex;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

/// For how long it counts that a process may hold a key.
const INTEREST_LEASE: Duration = Duration::from_secs(30);
/// How often a process looks at what it holds, and whether it must give a sign of life.
const TURN: Duration = Duration::from_millis(250);
const BACK_OFF_FIRST: Duration = Duration::from_millis(50);
const BACK_OFF_MAX: Duration = Duration::from_secs(2);

/// A way from every process to every other. Messages may be lost, if that is told as a
/// [`Delivery::Gap`] or shows as silence; they need not keep their order.
pub trait Transport: Send + Sync + 'static {
    /// Sends `message` to all who listen, this process included, at most once.
    fn send(&self, message: Bytes) -> BoxFuture<'static, Result<()>>;

    /// Listens from now on.
    fn listen(&self) -> BoxFuture<'static, Result<Box<dyn Subscription>>>;
}

/// The transport over a store that can publish: `PUBLISH` on one Redis node, `SPUBLISH` in a
/// cluster, a queue in [`MemoryStore`].
#[derive(Clone, Debug)]
pub struct Channel<S> {
    store: S,
    name: Key,
}

impl<S: Store + Clone> Channel<S> {
    /// The channel of this name.
    pub fn new(store: S, name: impl Into<Key>) -> Channel<S> {
        Channel { store, name: name.into() }
    }
}

impl Channel<MemoryStore> {
    /// A channel between handles of one process. Clones are ends of the same one.
    #[must_use]
    pub fn in_process() -> Channel<MemoryStore> {
        Channel::new(MemoryStore::new(1), "invalidations")
    }
}

impl<S: Store + Clone> Transport for Channel<S> {
    fn send(&self, message: Bytes) -> BoxFuture<'static, Result<()>> {
        let Channel { store, name } = self.clone();
        Box::pin(async move { store.publish(&name, message).await })
    }

    fn listen(&self) -> BoxFuture<'static, Result<Box<dyn Subscription>>> {
        let Channel { store, name } = self.clone();
        Box::pin(async move { store.subscribe(&name).await })
    }
}

/// How writes are announced and heard. See [`Builder::invalidations`](crate::Builder::invalidations).
///
/// # Cost
/// One message per write of a key that some process holds (writes that come together share one),
/// and about one a second in the whole fleet when nothing is written. A write of any other key
/// costs nothing.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, Invalidations, store::MemoryStore};
/// let store = MemoryStore::new(8); // or RedisStore
/// let hs = Heatsink::builder(store.clone())
///     .invalidations(Invalidations::through(store, "shop:invalidations"))
///     .build()?;
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct Invalidations {
    transport: Arc<dyn Transport>,
    silence: Duration,
    every_write: bool,
}

impl Invalidations {
    /// Over a transport.
    pub fn over(transport: impl Transport) -> Invalidations {
        let silence = Duration::from_secs(3);
        Invalidations { transport: Arc::new(transport), silence, every_write: false }
    }

    /// Over a channel of a store that can publish.
    pub fn through(store: impl Store + Clone, channel: impl Into<Key>) -> Invalidations {
        Invalidations::over(Channel::new(store, channel))
    }

    /// A stream on which nothing is heard for so long, not even this process itself, is cut.
    /// Default: 3 s.
    pub fn silence(mut self, silence: Duration) -> Invalidations {
        self.silence = silence;
        self
    }

    /// Announces every write, whether or not somebody has said that he holds the key. A key is
    /// then announced from its first moment in a near cache on, not only from when the writer has
    /// heard of that; each write costs a message.
    pub fn every_write(mut self) -> Invalidations {
        self.every_write = true;
        self
    }
}

impl fmt::Debug for Invalidations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidations").field("silence", &self.silence).finish_non_exhaustive()
    }
}

/// What one instance says and hears.
pub(crate) struct Stream {
    options: Invalidations,
    outbox: Mutex<Outbox>,
    inbox: Mutex<Inbox>,
    /// Of the task that sends.
    sender: Mutex<Option<Waker>>,
    announced: AtomicU64,
    heard: AtomicU64,
}

/// For the statistics.
#[derive(Clone, Copy, Default)]
pub(crate) struct StreamCounts {
    pub(crate) announced: u64,
    pub(crate) heard: u64,
    pub(crate) gaps: u64,
}

impl Stream {
    pub(crate) fn new(options: Invalidations, seed: u64, now: Tick) -> Stream {
        // The seed differs from process to process and from life to life; a life after this one
        // is another writer, so one epoch will do.
        Stream {
            options,
            outbox: Mutex::new(Outbox::new(seed, 1)),
            inbox: Mutex::new(Inbox::new(seed, now)),
            sender: Mutex::new(None),
            announced: AtomicU64::new(0),
            heard: AtomicU64::new(0),
        }
    }

    pub(crate) fn counts(&self) -> StreamCounts {
        StreamCounts {
            announced: self.announced.load(Relaxed),
            heard: self.heard.load(Relaxed),
            gaps: self.inbox.lock().gaps(),
        }
    }

    /// A write has ended, and may have been applied.
    pub(crate) fn wrote(&self, now: Tick, key: &Key) {
        if !self.options.every_write && !self.inbox.lock().wants(now, digest(key)) {
            return;
        }
        self.outbox.lock().announce(key.clone());
        self.announced.fetch_add(1, Relaxed);
        let waker = self.sender.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn take(&self, now: Tick, message: Bytes) -> Effect {
        // What is no message of ours says nothing, not even that the stream is alive.
        let Some(message) = Message::decode(message) else { return Effect::None };
        self.inbox.lock().handle(now, message, INTEREST_LEASE)
    }

    /// Waits until something is to be sent, or `limit` has passed.
    async fn to_send(&self, limit: BoxFuture<'static, ()>) {
        let mut limit = limit;
        poll_fn(|cx| {
            let old = self.sender.lock().replace(cx.waker().clone());
            drop(old);
            if !self.outbox.lock().is_empty() {
                return Poll::Ready(());
            }
            limit.as_mut().poll(cx)
        })
        .await;
    }
}

/// Starts the two tasks of an instance that has a stream. They end with it.
pub(crate) fn start(shared: &Arc<Shared>) {
    if shared.stream.is_some() {
        shared.runtime.spawn(Box::pin(listen(Arc::downgrade(shared))));
        shared.runtime.spawn(Box::pin(speak(Arc::downgrade(shared))));
    }
}

/// Carries out what follows from what was heard.
fn carry_out(shared: &Shared, stream: &Stream, effect: Effect) {
    match effect {
        Effect::None => {}
        Effect::VoidAll => shared.invalidate_all(),
        Effect::Void(keys) => {
            stream.heard.fetch_add(keys.len() as u64, Relaxed);
            for key in keys {
                shared.invalidate(shared.hash(&key), &key);
            }
        }
    }
}

/// Listens, and listens again when the stream is cut.
async fn listen(weak: Weak<Shared>) {
    let mut wait = BACK_OFF_FIRST;
    loop {
        let Some((connecting, limit)) = ({
            weak.upgrade().and_then(|shared| {
                let stream = shared.stream.as_ref()?;
                Some((stream.options.transport.listen(), shared.runtime.sleep(INTEREST_LEASE)))
            })
        }) else {
            return;
        };
        if let Some(Ok(subscription)) = first(connecting, limit).await {
            wait = BACK_OFF_FIRST;
            hear(&weak, subscription).await;
        }
        let Some(pause) = weak.upgrade().map(|shared| shared.runtime.sleep(wait)) else { return };
        pause.await;
        wait = (wait * 2).min(BACK_OFF_MAX);
    }
}

/// Hears one subscription to its end.
async fn hear(weak: &Weak<Shared>, mut subscription: Box<dyn Subscription>) {
    let gap = |shared: &Shared, stream: &Stream| {
        let effect = stream.inbox.lock().gap(shared.clock.now());
        carry_out(shared, stream, effect);
    };
    let begun = weak.upgrade();
    if let Some((shared, stream)) = begun.as_ref().and_then(|s| Some((s, s.stream.as_ref()?))) {
        gap(shared, stream);
    }
    drop(begun);
    loop {
        let Some(limit) = weak.upgrade().map(|shared| shared.runtime.sleep(TURN)) else { return };
        let delivery = first(subscription.next(), limit).await;
        let Some(shared) = weak.upgrade() else { return };
        let Some(stream) = shared.stream.as_ref() else { return };
        let now = shared.clock.now();
        match delivery {
            Some(Some(Delivery::Message(message))) => {
                let effect = stream.take(now, message);
                carry_out(&shared, stream, effect);
            }
            Some(Some(Delivery::Gap)) => gap(&shared, stream),
            Some(None) => return gap(&shared, stream),
            None => {
                let heard = stream.inbox.lock().heard();
                if now.since(heard) >= stream.options.silence {
                    return gap(&shared, stream);
                }
            }
        }
    }
}

/// Sends what is announced, what is held, and signs of life.
async fn speak(weak: Weak<Shared>) {
    // Whether the last announcements have been followed by a sign of life, which shows their loss.
    let mut followed = true;
    loop {
        let Some(shared) = weak.upgrade() else { return };
        let Some(stream) = shared.stream.as_ref() else { return };
        let now = shared.clock.now();
        let message = {
            let mut outbox = stream.outbox.lock();
            let silent = now.since(stream.inbox.lock().heard()) >= stream.options.silence / 3;
            if !outbox.is_empty() {
                followed = false;
                Some(outbox.message())
            } else if !followed || silent {
                followed = true;
                Some(outbox.message())
            } else {
                let held = shared.index.load();
                let held = held.iter().map(|cell| digest(&cell.key));
                let unsaid = stream.inbox.lock().unsaid(now, INTEREST_LEASE, held);
                (!unsaid.is_empty()).then(|| outbox.holds(unsaid))
            }
        };
        let more = message.as_ref().is_some_and(|m| matches!(m.said, Said::Wrote(_)));
        if let Some(message) = message {
            let sending = stream.options.transport.send(message.encode());
            let limit = shared.runtime.sleep(stream.options.silence);
            // Keeping the instance alive while it waits would keep it for ever on a dead store.
            drop(shared);
            // A failure leaves a gap in the numbers, which the listeners find.
            let _ = first(sending, limit).await;
            let again = weak.upgrade();
            let waiting = again.as_ref().and_then(|s| s.stream.as_ref());
            if more && waiting.is_some_and(|stream| !stream.outbox.lock().is_empty()) {
                continue;
            }
        } else {
            drop(shared);
        }
        wait_to_speak(&weak).await;
    }
}

async fn wait_to_speak(weak: &Weak<Shared>) {
    let Some(shared) = weak.upgrade() else { return };
    let limit = shared.runtime.sleep(TURN);
    let Some(stream) = shared.stream.as_ref() else { return };
    // The instance is held for one turn at most.
    stream.to_send(limit).await;
}

/// What `work` brings, or `None` when `limit` ends before it.
async fn first<T>(work: impl Future<Output = T>, mut limit: BoxFuture<'static, ()>) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|cx| {
        if let Poll::Ready(out) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(out));
        }
        limit.as_mut().poll(cx).map(|()| None)
    })
    .await
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} announced)", self.announced.load(Relaxed))
    }
}
