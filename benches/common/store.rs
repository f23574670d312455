//! A store that does nothing: what is left is the client.

use bytes::Bytes;
use heatsink::store::{Store, Stored};
use heatsink::{Key, Result};
use std::time::Duration;

/// Every answer is ready at once; there is one value, all sevens, and no counter ever grows.
#[derive(Clone)]
pub(crate) struct Nothing(Bytes);

impl Nothing {
    pub(crate) fn holding(bytes: usize) -> Nothing {
        Nothing(Bytes::from(vec![b'7'; bytes]))
    }
}

impl Store for Nothing {
    async fn get(&self, _: &Key) -> Result<Option<Stored>> {
        Ok(Some(Stored::new(self.0.clone())))
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        keys.iter().map(|_| Ok(Some(Stored::new(self.0.clone())))).collect()
    }

    async fn put(&self, _: &Key, _: Bytes, _: Option<Duration>) -> Result<()> {
        Ok(())
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        keys.iter().map(|_| Ok(false)).collect()
    }

    async fn add(&self, _: &Key, amount: i64) -> Result<i64> {
        Ok(amount)
    }
}
