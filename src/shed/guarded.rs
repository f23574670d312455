//! The calls of a store, each passed on through its bulkhead; what may be repeated is said here.

use super::guard::{Guard, Repeat};
use crate::error::Result;
use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::store::{
    Capability, DynStore, End, Ended, Holds, Id, Once, Popped, Stored, Take, Version,
};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

impl DynStore for Guard {
    fn get(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.get(key.clone()))
    }

    fn get_many(
        self: Arc<Self>,
        keys: Vec<Key>,
    ) -> BoxFuture<'static, Vec<Result<Option<Stored>>>> {
        self.call_many(keys, Arc::new(|store, keys| store.get_many(keys)))
    }

    fn get_many_uncached(
        self: Arc<Self>,
        keys: Vec<Key>,
    ) -> BoxFuture<'static, Vec<Result<Option<Stored>>>> {
        self.call_many(keys, Arc::new(|store, keys| store.get_many_uncached(keys)))
    }

    fn put(
        self: Arc<Self>,
        key: Key,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<()>> {
        let op = move |store: Arc<dyn DynStore>, key: Key| store.put(key, value.clone(), ttl);
        self.call(&key.clone(), Repeat::Yes, move |store| op(store, key.clone()))
    }

    fn delete_many(self: Arc<Self>, keys: Vec<Key>) -> BoxFuture<'static, Vec<Result<bool>>> {
        self.call_many(keys, Arc::new(|store, keys| store.delete_many(keys)))
    }

    fn capability(&self) -> Capability {
        self.store.capability()
    }

    fn add(self: Arc<Self>, key: Key, amount: i64) -> BoxFuture<'static, Result<i64>> {
        self.call(&key.clone(), Repeat::No, move |store| store.add(key.clone(), amount))
    }

    fn compare_and_set(
        self: Arc<Self>,
        key: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<bool>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.compare_and_set(key.clone(), expected.clone(), value.clone(), ttl)
        })
    }

    fn put_if_newer(
        self: Arc<Self>,
        key: Key,
        version: Version,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<bool>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.put_if_newer(key.clone(), version, value.clone(), ttl)
        })
    }

    fn claim_lane(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Stored>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.claim_lane(key.clone()))
    }

    fn seal(self: Arc<Self>, key: Key, tag: u64) -> BoxFuture<'static, Result<i64>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.seal(key.clone(), tag))
    }

    fn get_uncached(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.get_uncached(key.clone()))
    }

    fn add_once(
        self: Arc<Self>,
        key: Key,
        id: Id,
        amount: i64,
    ) -> BoxFuture<'static, Result<Once>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.add_once(key.clone(), id.clone(), amount)
        })
    }

    fn poison_once(self: Arc<Self>, key: Key, id: Id) -> BoxFuture<'static, Result<Once>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.poison_once(key.clone(), id.clone())
        })
    }

    fn fold(self: Arc<Self>, key: Key, id: Key, amount: i64) -> BoxFuture<'static, Result<bool>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.fold(key.clone(), id.clone(), amount)
        })
    }

    fn folded(self: Arc<Self>, key: Key, id: Key) -> BoxFuture<'static, Result<bool>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.folded(key.clone(), id.clone()))
    }

    fn unfold(self: Arc<Self>, key: Key, id: Key) -> BoxFuture<'static, Result<bool>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.unfold(key.clone(), id.clone()))
    }

    fn take(self: Arc<Self>, key: Key, amount: u64, hold: Id) -> BoxFuture<'static, Result<Take>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.take(key.clone(), amount, hold.clone())
        })
    }

    fn end_hold(
        self: Arc<Self>,
        key: Key,
        hold: Id,
        end: End,
    ) -> BoxFuture<'static, Result<Ended>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.end_hold(key.clone(), hold.clone(), end)
        })
    }

    fn holds(self: Arc<Self>, key: Key, page: Option<Bytes>) -> BoxFuture<'static, Result<Holds>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.holds(key.clone(), page.clone()))
    }

    fn push_tokens(
        self: Arc<Self>,
        key: Key,
        batch: Id,
        tokens: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<bool>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.push_tokens(key.clone(), batch.clone(), tokens.clone())
        })
    }

    fn pop_token(self: Arc<Self>, key: Key, hold: Id) -> BoxFuture<'static, Result<Popped>> {
        self.call(&key.clone(), Repeat::Yes, move |store| {
            store.pop_token(key.clone(), hold.clone())
        })
    }

    fn count_tokens(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<u64>> {
        self.call(&key.clone(), Repeat::Yes, move |store| store.count_tokens(key.clone()))
    }

    fn shard_of(&self, key: &[u8]) -> Option<u32> {
        self.store.shard_of(key)
    }

    fn max_in_flight_time(&self) -> Duration {
        self.store.max_in_flight_time()
    }
}
