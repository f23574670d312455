//! A transport whose traffic is counted: names and values, either way.

use super::{Shown, Transport};
use crate::error::Result;
use crate::feed::stats::count;
use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::store::{Delivery, Subscription};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// See the module's description.
pub(super) struct Metered {
    pub(super) inner: Arc<dyn Transport>,
    pub(super) shown: Arc<Shown>,
}

impl Metered {
    fn sent(&self, bytes: usize) {
        count(&self.shown.counters.bytes_out, bytes);
    }
}

impl Transport for Metered {
    fn get_many(&self, slots: Vec<Key>) -> BoxFuture<'_, Vec<Result<Option<Bytes>>>> {
        self.sent(slots.iter().map(|slot| slot.len()).sum());
        Box::pin(async move {
            let all = self.inner.get_many(slots).await;
            let bytes = all.iter().flatten().flatten().map(Bytes::len).sum();
            count(&self.shown.counters.bytes_in, bytes);
            all
        })
    }

    fn put(&self, slot: Key, value: Bytes, ttl: Duration) -> BoxFuture<'_, Result<()>> {
        self.sent(slot.len() + value.len());
        self.inner.put(slot, value, ttl)
    }

    fn compare_and_set(
        &self,
        slot: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'_, Result<bool>> {
        self.sent(slot.len() + expected.as_ref().map_or(0, Bytes::len) + value.len());
        self.inner.compare_and_set(slot, expected, value, ttl)
    }

    fn publish(&self, channel: Key, message: Bytes) -> BoxFuture<'_, Result<()>> {
        self.sent(channel.len() + message.len());
        self.inner.publish(channel, message)
    }

    fn subscribe(&self, channel: Key) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        self.sent(channel.len());
        Box::pin(async move {
            let inner = self.inner.subscribe(channel.clone()).await?;
            let name_bytes = channel.len();
            Ok(Box::new(Heard { inner, name_bytes, shown: self.shown.clone() }) as Box<_>)
        })
    }
}

struct Heard {
    inner: Box<dyn Subscription>,
    name_bytes: usize,
    shown: Arc<Shown>,
}

impl Subscription for Heard {
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>> {
        Box::pin(async move {
            let delivery = self.inner.next().await;
            if let Some(Delivery::Message(message)) = &delivery {
                count(&self.shown.counters.bytes_in, self.name_bytes + message.len());
            }
            delivery
        })
    }
}
