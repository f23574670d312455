//! The object-safe twin of [`Store`]: one box per call, no type parameter on the handle.
//!
//! It takes `Arc<Self>` and owned arguments, so that a load can outlive the caller who started it.

use super::{Store, Stored};
use crate::error::Result;
use crate::key::Key;
use crate::runtime::BoxFuture;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

pub(crate) trait DynStore: Send + Sync + 'static {
    fn get(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>>;
    fn get_many(self: Arc<Self>, keys: Vec<Key>)
    -> BoxFuture<'static, Vec<Result<Option<Stored>>>>;
    fn put(
        self: Arc<Self>,
        key: Key,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'static, Result<()>>;
    fn delete_many(self: Arc<Self>, keys: Vec<Key>) -> BoxFuture<'static, Vec<Result<bool>>>;
    fn add(self: Arc<Self>, key: Key, amount: i64) -> BoxFuture<'static, Result<i64>>;
    fn shard_of(&self, key: &[u8]) -> Option<u32>;
    fn max_in_flight_time(&self) -> Duration;
}

impl<S: Store> DynStore for S {
    fn get(self: Arc<Self>, key: Key) -> BoxFuture<'static, Result<Option<Stored>>> {
        Box::pin(async move { Store::get(&*self, &key).await })
    }

    fn get_many(
        self: Arc<Self>,
        keys: Vec<Key>,
    ) -> BoxFuture<'static, Vec<Result<Option<Stored>>>> {
        Box::pin(async move { Store::get_many(&*self, &keys).await })
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

    fn add(self: Arc<Self>, key: Key, amount: i64) -> BoxFuture<'static, Result<i64>> {
        Box::pin(async move { Store::add(&*self, &key, amount).await })
    }

    fn shard_of(&self, key: &[u8]) -> Option<u32> {
        Store::shard_of(self, key)
    }

    fn max_in_flight_time(&self) -> Duration {
        Store::max_in_flight_time(self)
    }
}
