//! The object-safe twin of [`Store`]: one box per call, no type parameter on the handle.
//!
//! It takes `Arc<Self>` and owned arguments, so that a load can outlive the caller who started it.

use super::{Capability, End, Ended, Holds, Id, Once, Popped, Store, Stored, Take, Version};
use crate::error::Result;
use crate::key::Key;
use crate::runtime::BoxFuture;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

pub(crate) trait DynStore: Send + Sync + 'static {
    fn get(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>>;
    fn get_uncached(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>>;
    fn get_many(self: Arc<Self>, keys: Vec<Key>)
    -> BoxFuture<'static, Vec<Result<Option<Stored>>>>;
    fn get_many_uncached(
        self: Arc<Self>,
        keys: Vec<Key>,
    ) -> BoxFuture<'static, Vec<Result<Option<Stored>>>>;
    fn put(
        self: Arc<Self>,
        key: Key,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<()>>;
    fn delete_many(self: Arc<Self>, keys: Vec<Key>) -> BoxFuture<'static, Vec<Result<bool>>>;
    fn capability(&self) -> Capability;
    fn add(self: Arc<Self>, key: Key, amount: i64) -> BoxFuture<'static, Result<i64>>;
    fn compare_and_set(
        self: Arc<Self>,
        key: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<bool>>;
    fn put_if_newer(
        self: Arc<Self>,
        key: Key,
        version: Version,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<bool>>;
    fn claim_lane(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Stored>>;
    fn seal(self: Arc<Self>, key: Key, tag: u64) -> BoxFuture<'static, Result<i64>>;
    fn add_once(self: Arc<Self>, key: Key, id: Id, amount: i64)
    -> BoxFuture<'static, Result<Once>>;
    fn poison_once(self: Arc<Self>, key: Key, id: Id) -> BoxFuture<'static, Result<Once>>;
    fn fold(self: Arc<Self>, key: Key, id: Key, amount: i64) -> BoxFuture<'static, Result<bool>>;
    fn folded(self: Arc<Self>, key: Key, id: Key) -> BoxFuture<'static, Result<bool>>;
    fn unfold(self: Arc<Self>, key: Key, id: Key) -> BoxFuture<'static, Result<bool>>;
    fn take(self: Arc<Self>, key: Key, amount: u64, hold: Id) -> BoxFuture<'static, Result<Take>>;
    fn end_hold(self: Arc<Self>, key: Key, hold: Id, end: End)
    -> BoxFuture<'static, Result<Ended>>;
    fn holds(self: Arc<Self>, key: Key, page: Option<Bytes>) -> BoxFuture<'static, Result<Holds>>;
    fn push_tokens(
        self: Arc<Self>,
        key: Key,
        batch: Id,
        tokens: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<bool>>;
    fn pop_token(self: Arc<Self>, key: Key, hold: Id) -> BoxFuture<'static, Result<Popped>>;
    fn count_tokens(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<u64>>;
    fn shard_of(&self, key: &[u8]) -> Option<u32>;
    fn max_in_flight_time(&self) -> Duration;
}

impl<S: Store> DynStore for S {
    fn get(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>> {
        Box::pin(async move { Store::get(&*self, &key).await })
    }

    fn get_uncached(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>> {
        Box::pin(async move { Store::get_uncached(&*self, &key).await })
    }

    fn get_many(
        self: Arc<Self>,
        keys: Vec<Key>,
    ) -> BoxFuture<'static, Vec<Result<Option<Stored>>>> {
        Box::pin(async move { Store::get_many(&*self, &keys).await })
    }

    fn get_many_uncached(
        self: Arc<Self>,
        keys: Vec<Key>,
    ) -> BoxFuture<'static, Vec<Result<Option<Stored>>>> {
        Box::pin(async move { Store::get_many_uncached(&*self, &keys).await })
    }

    fn put(
        self: Arc<Self>,
        key: Key,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move { Store::put(&*self, &key, value, ttl).await })
    }

    fn delete_many(self: Arc<Self>, keys: Vec<Key>) -> BoxFuture<'static, Vec<Result<bool>>> {
        Box::pin(async move { Store::delete_many(&*self, &keys).await })
    }

    fn capability(&self) -> Capability {
        Store::capability(self)
    }

    fn compare_and_set(
        self: Arc<Self>,
        key: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<bool>> {
        Box::pin(async move { Store::compare_and_set(&*self, &key, expected, value, ttl).await })
    }

    fn put_if_newer(
        self: Arc<Self>,
        key: Key,
        version: Version,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<bool>> {
        Box::pin(async move { Store::put_if_newer(&*self, &key, version, value, ttl).await })
    }

    fn claim_lane(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Stored>> {
        Box::pin(async move { Store::claim_lane(&*self, &key).await })
    }

    fn seal(self: Arc<Self>, key: Key, tag: u64) -> BoxFuture<'static, Result<i64>> {
        Box::pin(async move { Store::seal(&*self, &key, tag).await })
    }

    fn add_once(
        self: Arc<Self>,
        key: Key,
        id: Id,
        amount: i64,
    ) -> BoxFuture<'static, Result<Once>> {
        Box::pin(async move { Store::add_once(&*self, &key, &id, amount).await })
    }

    fn poison_once(self: Arc<Self>, key: Key, id: Id) -> BoxFuture<'static, Result<Once>> {
        Box::pin(async move { Store::poison_once(&*self, &key, &id).await })
    }

    fn fold(self: Arc<Self>, key: Key, id: Key, amount: i64) -> BoxFuture<'static, Result<bool>> {
        Box::pin(async move { Store::fold(&*self, &key, &id, amount).await })
    }

    fn folded(self: Arc<Self>, key: Key, id: Key) -> BoxFuture<'static, Result<bool>> {
        Box::pin(async move { Store::folded(&*self, &key, &id).await })
    }

    fn unfold(self: Arc<Self>, key: Key, id: Key) -> BoxFuture<'static, Result<bool>> {
        Box::pin(async move { Store::unfold(&*self, &key, &id).await })
    }

    fn add(self: Arc<Self>, key: Key, amount: i64) -> BoxFuture<'static, Result<i64>> {
        Box::pin(async move { Store::add(&*self, &key, amount).await })
    }

    fn take(self: Arc<Self>, key: Key, amount: u64, hold: Id) -> BoxFuture<'static, Result<Take>> {
        Box::pin(async move { Store::take(&*self, &key, amount, &hold).await })
    }

    fn end_hold(
        self: Arc<Self>,
        key: Key,
        hold: Id,
        end: End,
    ) -> BoxFuture<'static, Result<Ended>> {
        Box::pin(async move { Store::end_hold(&*self, &key, &hold, end).await })
    }

    fn holds(self: Arc<Self>, key: Key, page: Option<Bytes>) -> BoxFuture<'static, Result<Holds>> {
        Box::pin(async move { Store::holds(&*self, &key, page).await })
    }

    fn push_tokens(
        self: Arc<Self>,
        key: Key,
        batch: Id,
        tokens: Vec<Bytes>,
    ) -> BoxFuture<'static, Result<bool>> {
        Box::pin(async move { Store::push_tokens(&*self, &key, &batch, tokens).await })
    }

    fn pop_token(self: Arc<Self>, key: Key, hold: Id) -> BoxFuture<'static, Result<Popped>> {
        Box::pin(async move { Store::pop_token(&*self, &key, &hold).await })
    }

    fn count_tokens(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<u64>> {
        Box::pin(async move { Store::count_tokens(&*self, &key).await })
    }

    fn shard_of(&self, key: &[u8]) -> Option<u32> {
        Store::shard_of(self, key)
    }

    fn max_in_flight_time(&self) -> Duration {
        Store::max_in_flight_time(self)
    }
}
