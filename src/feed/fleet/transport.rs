//! How the processes of a fleet reach each other: a few small values, and messages that may be
//! lost.

use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::store::{Store, Subscription};
use bytes::Bytes;
use std::fmt;
use std::time::Duration;

/// What a fleet's feed needs of a store or of anything else that all its processes reach.
///
/// [`ThroughStore`] carries it over any store with `compare_and_set` and `publish`: Redis, and
/// [`MemoryStore`](crate::store::MemoryStore) for processes that are one.
///
/// # Cancel safety
/// The feed drops these futures when they take too long.
pub trait Transport: Send + Sync + 'static {
    /// The values under `slots`, one result each, in their order.
    fn get_many(&self, slots: Vec<Key>) -> BoxFuture<'_, Vec<Result<Option<Bytes>>>>;

    /// Sets `slot`, to expire after `ttl`.
    fn put(&self, slot: Key, value: Bytes, ttl: Duration) -> BoxFuture<'_, Result<()>>;

    /// Sets `slot` if it holds exactly `expected` (`None`: is absent); whether it did.
    fn compare_and_set(
        &self,
        slot: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'_, Result<bool>>;

    /// Sends `message` to all present subscribers of `channel`, at most once.
    fn publish(&self, channel: Key, message: Bytes) -> BoxFuture<'_, Result<()>>;

    /// Subscribes to `channel`.
    fn subscribe(&self, channel: Key) -> BoxFuture<'_, Result<Box<dyn Subscription>>>;
}

impl fmt::Debug for dyn Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transport")
    }
}

/// The store that the service has already, as the way between its processes.
#[derive(Clone, Debug)]
pub struct ThroughStore<S>(S);

impl<S: Store> ThroughStore<S> {
    /// Goes through `store`.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) where the store lacks `compare_and_set` or
    /// `publish`.
    pub fn new(store: S) -> Result<ThroughStore<S>> {
        let can = store.capability();
        if can.compare_and_set && can.publish {
            return Ok(ThroughStore(store));
        }
        let text = "a fleet's feed needs a store with compare_and_set and publish";
        Err(Error::not_applied(ErrorKind::Unsupported, text))
    }
}

impl<S: Store> Transport for ThroughStore<S> {
    fn get_many(&self, slots: Vec<Key>) -> BoxFuture<'_, Vec<Result<Option<Bytes>>>> {
        Box::pin(async move {
            let all = self.0.get_many(&slots).await;
            all.into_iter().map(|got| got.map(|stored| stored.map(|s| s.bytes))).collect()
        })
    }

    fn put(&self, slot: Key, value: Bytes, ttl: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.0.put(&slot, value, Some(ttl)).await })
    }

    fn compare_and_set(
        &self,
        slot: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move { self.0.compare_and_set(&slot, expected, value, Some(ttl)).await })
    }

    fn publish(&self, channel: Key, message: Bytes) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.0.publish(&channel, message).await })
    }

    fn subscribe(&self, channel: Key) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move { self.0.subscribe(&channel).await })
    }
}
