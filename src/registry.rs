//! The registry in a store: what is read and written there, in which order. What it means is
//! decided in `engine/control/registry`.
//!
//! A change goes record, list, root, each by compare-and-set. Whoever finds the list or the root
//! behind brings it up. A lease is renewed by one read of the root; the list is read when the root
//! has moved, a record when the list says so.

use crate::batch::bounded;
use crate::call;
use crate::engine::control::registry::{Catalog, KEY_BYTES_MAX, List, Record, Root, Stamp, Timing};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::names::{self, Part};
use crate::runtime::{BoxFuture, Clock};
use crate::shared::Shared;
use crate::store::DynStore;
use crate::sync::Mutex;
use bytes::Bytes;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Attempts to replace what others replace too.
const TRIES: usize = 16;

/// Between two attempts to give a registry its first list.
#[cfg(feature = "feed")]
const FOUNDED_LEASES: u32 = 10;

/// Where heatsink keeps which keys it has spread over several names: small values that are read
/// and replaced one at a time.
///
/// By default it is the store itself. Another store may be better: one that loses nothing when it
/// fails over, or that does not share a shard with the keys that are hot. Both calls must be
/// linearizable: no replica answers them.
pub trait Registry: Send + Sync + 'static {
    /// The bytes under `name`.
    ///
    /// # Errors
    /// Whatever the registry reports.
    fn read(&self, name: &Key) -> BoxFuture<'static, Result<Option<Bytes>>>;

    /// Sets `name` to `value` if it holds exactly `expected` (`None`: is absent); whether it did.
    ///
    /// # Errors
    /// One that cannot tell whether it did says [`Unknown`](Outcome::Unknown); it is read back.
    fn replace(
        &self,
        name: &Key,
        expected: Option<Bytes>,
        value: Bytes,
    ) -> BoxFuture<'static, Result<bool>>;
}

impl fmt::Debug for dyn Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registry")
    }
}

/// A registry in a store with `compare_and_set`.
pub(crate) struct InStore(pub(crate) Arc<dyn DynStore>);

impl Registry for InStore {
    fn read(&self, name: &Key) -> BoxFuture<'static, Result<Option<Bytes>>> {
        let get = self.0.clone().get(name.clone());
        Box::pin(async move { Ok(get.await?.map(|stored| stored.bytes)) })
    }

    fn replace(
        &self,
        name: &Key,
        expected: Option<Bytes>,
        value: Bytes,
    ) -> BoxFuture<'static, Result<bool>> {
        self.0.clone().compare_and_set(name.clone(), expected, value, None)
    }
}

/// What came of an attempt to replace a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Replaced {
    /// It is the one that was given.
    Won,
    /// Somebody else was first; this is there now.
    Lost(Option<Record>),
}

/// This process and the registry.
pub(crate) struct Registrar {
    registry: Arc<dyn Registry>,
    catalog: Mutex<Catalog>,
    /// Keys that may be listed.
    listed_max: usize,
    /// A call takes this long at most.
    timeout: Duration,
    regressed: AtomicU64,
    /// Not before then is a registry without a list given one again, in nanoseconds of the lease
    /// clock.
    #[cfg(feature = "feed")]
    founded: AtomicU64,
}

impl Registrar {
    pub(crate) fn new(
        registry: Arc<dyn Registry>,
        timing: Timing,
        listed_max: usize,
        timeout: Duration,
    ) -> Registrar {
        let catalog = Mutex::new(Catalog::new(timing));
        Registrar {
            registry,
            catalog,
            listed_max,
            timeout,
            regressed: AtomicU64::new(0),
            #[cfg(feature = "feed")]
            founded: AtomicU64::new(0),
        }
    }

    /// Times that the registry told of something older than it had before.
    pub(crate) fn regressed(&self) -> u64 {
        self.regressed.load(Ordering::Relaxed)
    }

    /// Looks at what is known, without asking anybody.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&mut Catalog) -> R) -> R {
        look(&mut self.catalog.lock())
    }

    async fn ask<T>(&self, shared: &Arc<Shared>, work: BoxFuture<'static, Result<T>>) -> Result<T> {
        match bounded(shared, self.timeout, call::catch(work)).await {
            Some(Ok(answer)) => answer,
            Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
            None => Err(Error::unknown(ErrorKind::Timeout, "the registry did not answer in time")),
        }
    }

    async fn read(&self, shared: &Arc<Shared>, name: &Key) -> Result<Option<Bytes>> {
        let read = self.registry.read(name);
        self.ask(shared, read).await.map_err(|e| e.with_outcome(Outcome::NotApplied))
    }

    /// Replaces a small value; whether it is there now. Of unknown outcome: `None`.
    async fn replace(
        &self,
        shared: &Arc<Shared>,
        name: &Key,
        expected: Option<Bytes>,
        value: Bytes,
    ) -> Result<Option<bool>> {
        let replace = self.registry.replace(name, expected, value);
        match self.ask(shared, replace).await {
            Ok(did) => Ok(Some(did)),
            Err(error) if error.is_unknown() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Renews the lease, by one read of the root where nothing has changed.
    pub(crate) async fn renew(&self, shared: &Arc<Shared>) -> Result<()> {
        let sent = lease_clock(&shared.clock);
        let lapsed = self.with(|catalog| sent >= catalog.until() && catalog.has_records());
        let root = self.root(shared).await?;
        if self.with(|catalog| catalog.handle_root(sent, root)) && !lapsed {
            return Ok(());
        }
        let list = self.list(shared).await?.1;
        if list.version < root.version {
            // The list is written first: what the root tells of is lost.
            self.regressed.fetch_add(1, Ordering::Relaxed);
            self.raise_root(shared, list.root()).await?;
        }
        let root = if list.version < root.version { list.root() } else { root };
        self.with(|catalog| catalog.handle_list(sent, root, list));
        // Whoever was away looks at everything again: the list may have gone back meanwhile.
        let stale: Vec<Key> = self.with(|catalog| catalog.stale(lapsed).cloned().collect());
        for key in stale {
            self.load(shared, &key).await?;
        }
        Ok(())
    }

    /// Reads the root for this process and others. All of them must have asked before.
    ///
    /// # Errors
    /// Also where there is none: it would not tell this registry from another.
    #[cfg(feature = "feed")]
    pub(crate) async fn read_for_all(&self, shared: &Arc<Shared>) -> Result<Root> {
        let sent = lease_clock(&shared.clock);
        let mut root = self.root(shared).await?;
        if root == Root::default() && self.founded.load(Ordering::Relaxed) <= sent.0 {
            let lease = self.with(|catalog| catalog.timing().lease);
            self.founded.store(sent.after(lease * FOUNDED_LEASES).0, Ordering::Relaxed);
            root = self.found(shared).await?;
        }
        if root == Root::default() {
            return Err(Error::not_applied(ErrorKind::Store, "the registry has no list yet"));
        }
        let now = lease_clock(&shared.clock);
        self.with(|catalog| catalog.handle_carried(now, sent, root));
        Ok(root)
    }

    /// Gives a registry its first list, should it have none.
    #[cfg(feature = "feed")]
    async fn found(&self, shared: &Arc<Shared>) -> Result<Root> {
        if self.list(shared).await?.0.is_none() {
            let first = List::first(shared.roll()).encode().into();
            self.replace(shared, &names::list(), None, first).await?;
        }
        let list = self.list(shared).await?.1;
        self.raise_root(shared, list.root()).await?;
        self.root(shared).await
    }

    async fn root(&self, shared: &Arc<Shared>) -> Result<Root> {
        match self.read(shared, &names::root()).await? {
            None => Ok(Root::default()),
            Some(bytes) => Root::parse(&bytes).ok_or_else(|| unreadable("root of the registry")),
        }
    }

    async fn list(&self, shared: &Arc<Shared>) -> Result<(Option<Bytes>, List)> {
        match self.read(shared, &names::list()).await? {
            None => Ok((None, List::default())),
            Some(bytes) => {
                let list = List::parse(&bytes).ok_or_else(|| unreadable("list of the registry"))?;
                Ok((Some(bytes), list))
            }
        }
    }

    /// The record of `key` as it is now.
    pub(crate) async fn load(&self, shared: &Arc<Shared>, key: &Key) -> Result<Option<Record>> {
        Ok(self.load_raw(shared, key).await?.map(|(_, record)| record))
    }

    async fn load_raw(&self, shared: &Arc<Shared>, key: &Key) -> Result<Option<(Bytes, Record)>> {
        let seen = self.with(|catalog| catalog.record(key).map_or(0, |record| record.version));
        let bytes = self.read(shared, &Part::Record.of(key)).await?;
        let Some(bytes) = bytes else { return Ok(None) };
        let record = Record::parse(&bytes).ok_or_else(|| unreadable("record of the key"))?;
        if record.version < seen {
            // Not overtaken on its way: the newer one was known before this was asked for.
            self.regressed.fetch_add(1, Ordering::Relaxed);
        }
        self.with(|catalog| catalog.handle_record(key, record.clone()));
        Ok(Some((bytes, record)))
    }

    /// Replaces the record that was read as `old` by `new`, which carries a nonce of its own.
    pub(crate) async fn put(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        old: Option<&Record>,
        new: &Record,
    ) -> Result<Replaced> {
        if key.len() > KEY_BYTES_MAX {
            let text = format!("a key of {} bytes cannot be spread", key.len());
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(key));
        }
        let text = |record: &Record| {
            let text = record.encode().map(Bytes::from);
            text.ok_or_else(|| Error::not_applied(ErrorKind::Limit, "the record is too long"))
        };
        let (name, value) = (Part::Record.of(key), text(new)?);
        let expected = old.map(text).transpose()?;
        for _ in 0..TRIES {
            let did = self.replace(shared, &name, expected.clone(), value.clone()).await?;
            if did == Some(true) {
                self.with(|catalog| catalog.handle_record(key, new.clone()));
                return Ok(Replaced::Won);
            }
            // A refusal may be the echo of an earlier attempt of ours that was applied.
            let now = self.load(shared, key).await?;
            if now.as_ref().is_some_and(|now| now.nonce == new.nonce) {
                return Ok(Replaced::Won);
            }
            if now.as_ref() != old || did == Some(false) {
                return Ok(Replaced::Lost(now));
            }
            // Not known to be applied, and not there yet: the same once more.
        }
        Err(Error::not_applied(
            ErrorKind::Store,
            "the registry cannot tell what became of a change",
        ))
    }

    /// Makes the change of a record known: the list, then the root. Returns when that had surely
    /// happened, and whether it had before.
    pub(crate) async fn publish(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        stamp: Stamp,
    ) -> Result<(Tick, bool)> {
        let mut before = true;
        for _ in 0..TRIES {
            let sent = lease_clock(&shared.clock);
            let (bytes, list) = self.list(shared).await?;
            if list.get(key).is_some_and(|listed| listed.covers(&stamp)) {
                let Some(unmoved) = self.raise_root(shared, list.root()).await? else { continue };
                before &= unmoved;
                // The granter counts from after, and the clock lags behind.
                let done = lease_clock(&shared.clock).after(shared.clock.resolution());
                self.with(|catalog| catalog.handle_list(sent, list.root(), list));
                return Ok((done, before));
            }
            before = false;
            let Some(next) = list.with(shared.roll(), key, stamp, self.listed_max) else {
                let text = format!("the registry lists {} keys already", list.len());
                return Err(Error::not_applied(ErrorKind::Limit, text).with_key(key));
            };
            self.replace(shared, &names::list(), bytes, next.encode().into()).await?;
        }
        Err(Error::not_applied(ErrorKind::Store, "the registry changes faster than it can be read"))
    }

    /// Takes a key off the list, whose record with this stamp says no more than that it is plain.
    pub(crate) async fn unlist(&self, shared: &Arc<Shared>, key: &Key, stamp: Stamp) -> Result<()> {
        for _ in 0..TRIES {
            let (bytes, list) = self.list(shared).await?;
            // Another record may say anything, one of the same version too: a registry that has lost
            // a change gives its version again.
            let other = |listed: Stamp| listed.version >= stamp.version && listed != stamp;
            if list.get(key).is_none_or(other) {
                self.raise_root(shared, list.root()).await?;
                return Ok(());
            }
            let next = list.without(shared.roll(), key);
            self.replace(shared, &names::list(), bytes, next.encode().into()).await?;
        }
        Ok(())
    }

    /// Brings the root up to `wanted`; whether it was there already. `None` when another list is in
    /// force by now.
    async fn raise_root(&self, shared: &Arc<Shared>, wanted: Root) -> Result<Option<bool>> {
        let mut unmoved = true;
        for _ in 0..TRIES {
            let bytes = self.read(shared, &names::root()).await?;
            let root = match &bytes {
                None => Root::default(),
                Some(bytes) => {
                    Root::parse(bytes).ok_or_else(|| unreadable("root of the registry"))?
                }
            };
            if root == wanted {
                return Ok(Some(unmoved));
            }
            unmoved = false;
            if root.version > wanted.version {
                // Either the list has moved on, or it has lost what the root tells of.
                let now = self.list(shared).await?.1;
                if now.version > wanted.version {
                    return Ok(None);
                }
            }
            self.replace(shared, &names::root(), bytes, wanted.encode().into()).await?;
        }
        Err(Error::not_applied(ErrorKind::Store, "the registry changes faster than it can be read"))
    }
}

/// The clock of leases: it counts the time that the machine was suspended.
pub(crate) fn lease_clock(clock: &Clock) -> Tick {
    clock.now().after(clock.suspended())
}

fn unreadable(what: &str) -> Error {
    Error::not_applied(ErrorKind::Codec, format!("the {what} is unreadable"))
}

impl fmt::Debug for Registrar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = self.catalog.lock().list().len();
        f.debug_struct("Registrar").field("listed", &listed).finish_non_exhaustive()
    }
}
