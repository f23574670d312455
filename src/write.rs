//! Writes: one through the store, or one of the user's own, between its two announcements.

use crate::call;
use crate::engine::data::gate::WriteSlot;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::heatsink::Heatsink;
use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::salt;
use crate::sample::Seen;
use crate::shared::Shared;
use crate::shed::options::Tenant;
use crate::store::DynStore;
use bytes::Bytes;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// How a value is written.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Put {
    pub(crate) ttl: Option<Duration>,
    cost: Option<NonZeroU32>,
    tenant: Option<Tenant>,
}

impl Put {
    /// A value that does not expire.
    #[must_use]
    pub fn new() -> Put {
        Put::default()
    }

    /// A value that expires after `ttl`.
    #[must_use]
    pub fn ttl(ttl: Duration) -> Put {
        Put { ttl: Some(ttl), ..Put::default() }
    }

    /// What this write costs the store, for the detection of hot keys: write units, kilobytes.
    /// Default: 1.
    #[must_use]
    pub fn costs(mut self, units: NonZeroU32) -> Put {
        self.cost = Some(units);
        self
    }

    /// Whose budget this write is held against. Default: what
    /// [`Admission::tenant_of`](crate::Admission::tenant_of) says.
    #[must_use]
    pub fn tenant(mut self, name: impl AsRef<[u8]>) -> Put {
        self.tenant = Some(Tenant::named(name.as_ref()));
        self
    }

    fn cost(&self) -> u32 {
        self.cost.map_or(1, NonZeroU32::get)
    }
}

impl Heatsink {
    /// Writes `value` under `key`; the latest put wins.
    ///
    /// # Cost
    /// Store operations: 1.
    ///
    /// # Cancel safety
    /// A dropped put counts as one of unknown outcome: the key is not cached until the store's
    /// maximum in-flight time has passed.
    ///
    /// # Errors
    /// Those of the store. [`Error::outcome`] says whether the write may have been applied.
    /// [`Shed`](ErrorKind::Shed) where a budget or a bulkhead was asked for: it was not.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl Into<Bytes>) -> Result<()> {
        self.put_with(key, value, Put::new()).await
    }

    /// Like [`put`](Heatsink::put), with a time to live.
    ///
    /// # Errors
    /// As [`put`](Heatsink::put).
    pub async fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        value: impl Into<Bytes>,
        put: Put,
    ) -> Result<()> {
        let key = Key::copy(key.as_ref());
        let (what, ttl) = ((put.cost(), put.tenant), put.ttl);
        self.store_write(&key, what, |store, key| store.put(key, value.into(), ttl)).await
    }

    /// Deletes `key`; whether it was there.
    ///
    /// # Cost, Cancel safety, Errors
    /// As [`put`](Heatsink::put).
    #[expect(clippy::missing_errors_doc, reason = "the heading names three")]
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        let key = Key::copy(key.as_ref());
        let write = self.store_write(&key, (1, None), |store, key| {
            Box::pin(async move {
                let mut answers = store.delete_many(vec![key]).await;
                answers.pop().unwrap_or_else(|| {
                    Err(Error::unknown(ErrorKind::Store, "the store gave no answer to a delete"))
                })
            })
        });
        write.await
    }

    /// A write through the store, between its two announcements.
    async fn store_write<T>(
        &self,
        key: &Key,
        (cost, tenant): (u32, Option<Tenant>),
        send: impl FnOnce(Arc<dyn DynStore>, Key) -> BoxFuture<'static, Result<T>>,
    ) -> Result<T> {
        if let Some(error) = salt::refused(self.shared(), key, "delete") {
            return Err(error);
        }
        self.sampled(self.observe(cost), key, Seen::Write);
        // Before it is announced: a refused write voids nothing.
        self.shared().admit(|| self.shared().hash(key), key, tenant)?;
        let guard = self.announce(key.clone());
        let store = self.shared().store.clone();
        let answer = call::catch(send(store, key.clone())).await;
        let answer = answer.unwrap_or_else(|panic| Err(panic.with_outcome(Outcome::Unknown)));
        guard.end(answer.as_ref().err().map(Error::outcome));
        answer.map_err(|e| e.with_key(key))
    }

    /// Announces a write of the user's own (SQL, another service) to `key`: from here until
    /// [`done`](Writing::done), nothing that is loaded is cached, and no caller that comes later
    /// gets what was loaded before.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # fn execute() {}
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let write = hs.writing("post:9");
    /// execute(); // UPDATE posts SET … WHERE id = 9
    /// write.done(); // dropped instead, its outcome counts as unknown
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn writing(&self, key: impl AsRef<[u8]>) -> Writing {
        let key = Key::copy(key.as_ref());
        self.sampled(self.observe(1), &key, Seen::Write);
        self.announce(key)
    }

    fn announce(&self, key: Key) -> Writing {
        let shared = self.shared().clone();
        let hash = shared.hash(&key);
        let slot = (!Shared::untracked(&key)).then(|| shared.begin_write(hash, &key));
        Writing { shared, hash, key, slot }
    }
}

/// A write of the user's own under way. See [`Heatsink::writing`].
#[must_use = "dropping it says that the outcome of the write is unknown"]
pub struct Writing {
    shared: Arc<Shared>,
    hash: u64,
    key: Key,
    slot: Option<WriteSlot>,
}

impl Writing {
    /// The write has been applied.
    pub fn done(self) {
        self.end(None);
    }

    /// The write has not been applied and will not be.
    pub fn not_applied(self) {
        self.end(Some(Outcome::NotApplied));
    }

    fn end(mut self, outcome: Option<Outcome>) {
        if let Some(slot) = self.slot.take() {
            self.shared.end_write(self.hash, &self.key, slot, outcome);
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.shared.end_write(self.hash, &self.key, slot, Some(Outcome::Unknown));
        }
    }
}

impl fmt::Debug for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writing").field("key", &self.key).finish()
    }
}
