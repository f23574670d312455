//! How a value is read: a caller's limits, where the value comes from, waiting for several.

use crate::call::{self, Ticket};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::key::Key;
use crate::runtime::{BoxFuture, Runtime};
use crate::shared::{Loaded, Shared};
use crate::shed::options::Tenant;
use crate::store::Stored;
use crate::value::Value;
use bytes::Bytes;
use std::fmt;
use std::future::{Future, poll_fn};
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// What a caller accepts.
///
/// # Example
/// ```
/// # use heatsink::Read;
/// # use std::time::Duration;
/// let read = Read::new().deadline(Duration::from_millis(50)).max_age(Duration::from_millis(200));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Read {
    pub(crate) deadline: Option<Duration>,
    pub(crate) max_age: Option<Duration>,
    pub(crate) tenant: Option<Tenant>,
    cost: Option<NonZeroU32>,
}

impl Read {
    /// Whatever the near cache allows, without a deadline.
    #[must_use]
    pub fn new() -> Read {
        Read::default()
    }

    /// A value whose load began after the call: nothing from the cache, no load that was under way
    /// already. Calls that come together still share one load.
    #[must_use]
    pub fn latest() -> Read {
        Read::new().max_age(Duration::ZERO)
    }

    /// Gives up waiting after this long. The load goes on and fills the cache.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Read {
        self.deadline = Some(deadline);
        self
    }

    /// What this read costs the store, for the detection of hot keys: read units, kilobytes.
    /// Default: 1.
    #[must_use]
    pub fn costs(mut self, units: NonZeroU32) -> Read {
        self.cost = Some(units);
        self
    }

    /// Whose budget this read is held against, if it costs the store a load. Default: what
    /// [`Admission::tenant_of`](crate::Admission::tenant_of) says.
    #[must_use]
    pub fn tenant(mut self, name: impl AsRef<[u8]>) -> Read {
        self.tenant = Some(Tenant::named(name.as_ref()));
        self
    }

    pub(crate) fn cost(&self) -> u32 {
        self.cost.map_or(1, NonZeroU32::get)
    }

    /// Accepts no value whose load began longer ago than this when the call is made.
    #[must_use]
    pub fn max_age(mut self, age: Duration) -> Read {
        self.max_age = Some(age);
        self
    }
}

/// What a loader may return, and what its caller gets for it.
///
/// Bytes in any of the usual types give a [`Value`]; an `Option` of them gives `Option<Value>`.
#[diagnostic::on_unimplemented(
    note = "for a type of your own: `hs.typed::<T, _>(Json).load(key, loader)` (feature `json`)"
)]
pub trait Loadable: IntoStored {
    /// What the caller gets.
    type Out;
    /// From what is cached to what the caller gets.
    ///
    /// # Errors
    /// [`Loader`](ErrorKind::Loader) when the key is known to be absent and the type has no room
    /// for that.
    fn out(value: Option<Value>) -> Result<Self::Out>;
}

/// Bytes on their way into the cache.
pub trait IntoStored: Send {
    /// The value, or `None` for "there is none".
    fn into_stored(self) -> Option<Stored>;
}

macro_rules! loadable {
    ($($t:ty),*) => {$(
        impl IntoStored for $t {
            fn into_stored(self) -> Option<Stored> {
                Some(Stored::new(self))
            }
        }
        impl Loadable for $t {
            type Out = Value;
            fn out(value: Option<Value>) -> Result<Value> {
                value.ok_or_else(absent)
            }
        }
    )*};
}
loadable!(Bytes, Vec<u8>, String);

// For every lifetime: the compiler cannot prove `'static` inside the future of a load.
impl IntoStored for &str {
    fn into_stored(self) -> Option<Stored> {
        Some(Stored::new(Bytes::copy_from_slice(self.as_bytes())))
    }
}

impl Loadable for &str {
    type Out = Value;
    fn out(value: Option<Value>) -> Result<Value> {
        value.ok_or_else(absent)
    }
}

impl IntoStored for Stored {
    fn into_stored(self) -> Option<Stored> {
        Some(self)
    }
}

impl Loadable for Stored {
    type Out = Value;
    fn out(value: Option<Value>) -> Result<Value> {
        value.ok_or_else(absent)
    }
}

impl<T: IntoStored> IntoStored for Option<T> {
    fn into_stored(self) -> Option<Stored> {
        self.and_then(T::into_stored)
    }
}

impl<T: IntoStored> Loadable for Option<T> {
    type Out = Option<Value>;
    fn out(value: Option<Value>) -> Result<Option<Value>> {
        Ok(value)
    }
}

pub(crate) fn absent() -> Error {
    Error::not_applied(
        ErrorKind::Loader,
        "another loader of this key found no value; return an Option to allow for that",
    )
    .with_retry(Retry::Never)
}

impl Error {
    /// An error of a caller's loader. One of our own passes through unchanged.
    pub(crate) fn loader(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        match error.into().downcast::<Error>() {
            Ok(own) => *own,
            Err(other) => {
                let text = format!("the loader failed: {other}");
                Error::not_applied(ErrorKind::Loader, text).with_source(other)
            }
        }
    }
}

impl Loaded {
    pub(crate) fn from_store(stored: Option<Stored>) -> Loaded {
        Loaded { stored, by_loader: false, uncached: false, decoded: None }
    }

    /// From a read that did not ask for the expiry.
    pub(crate) fn uncached(stored: Option<Stored>) -> Loaded {
        Loaded { uncached: true, ..Loaded::from_store(stored) }
    }
}

/// Where a value comes from.
pub(crate) enum From {
    Store,
    Loader(Box<dyn FnOnce() -> BoxFuture<'static, Result<Loaded>> + Send>),
    /// One of the two, for a tenant that the caller named.
    For(Tenant, Box<From>),
    /// One of them, as a part of a call that its budgets have admitted already.
    Paid(Box<From>),
}

impl From {
    pub(crate) fn loader<F>(load: impl FnOnce() -> F + Send + 'static) -> From
    where
        F: Future<Output = Result<Loaded>> + Send + 'static,
    {
        From::Loader(Box::new(move || Box::pin(load())))
    }

    /// The same for a tenant that the caller named, if it did.
    pub(crate) fn of(self, tenant: Option<Tenant>) -> From {
        match tenant {
            Some(tenant) => From::For(tenant, Box::new(self)),
            None => self,
        }
    }

    pub(crate) fn is_loader(&self) -> bool {
        match self {
            From::Store => false,
            From::Loader(_) => true,
            From::For(_, from) | From::Paid(from) => from.is_loader(),
        }
    }

    /// Asks the budgets of the caller whether it may cost the store a load.
    pub(crate) fn admit(&self, shared: &Shared, key: &[u8]) -> Result<()> {
        let tenant = match self {
            From::Paid(_) => return Ok(()),
            From::For(tenant, _) => Some(*tenant),
            From::Store | From::Loader(_) => None,
        };
        shared.admit(|| shared.hash(key), key, tenant)
    }

    /// The load itself, once it is admitted. `cached`: its value may be cached.
    pub(crate) fn load(
        self,
        shared: &Arc<Shared>,
        key: Key,
        cached: bool,
    ) -> BoxFuture<'static, Result<Loaded>> {
        let store = shared.store.clone();
        match self {
            From::Store if !cached && store.capability().uncached => {
                Box::pin(async move { store.get_uncached(key).await.map(Loaded::uncached) })
            }
            // Inside the future, so that a panic of the closure itself is caught too.
            From::Loader(load) => Box::pin(async move { load().await }),
            From::Store => Box::pin(async move { store.get(key).await.map(Loaded::from_store) }),
            From::For(_, from) | From::Paid(from) => from.load(shared, key, cached),
        }
    }

    /// The load as one that ends a flight; admitted, as above.
    pub(crate) fn job(self, shared: &Arc<Shared>, ticket: Ticket) -> BoxFuture<'static, ()> {
        // A key that turns hot meanwhile has its value cached by the next load.
        // A value that may be frozen must know its expiry too.
        let cached = shared.is_hot(ticket.hash(), ticket.key()) || shared.shed.frozen.is_some();
        let key = ticket.key().clone();
        if let From::Store = self {
            // The usual load, without a box around the store's own.
            let store = shared.store.clone();
            return if !cached && store.capability().uncached {
                call::job(ticket, store.get_uncached(key), Loaded::uncached)
            } else {
                call::job(ticket, store.get(key), Loaded::from_store)
            };
        }
        let load = self.load(shared, key, cached);
        call::job(ticket, load, |loaded| loaded)
    }
}

/// Runs `work`, giving up after `deadline`.
pub(crate) async fn within<T>(
    runtime: Arc<dyn Runtime>,
    deadline: Option<Duration>,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let Some(deadline) = deadline else { return work.await };
    let mut work = pin!(work);
    let mut sleep = runtime.sleep(deadline);
    poll_fn(|cx| {
        if let Poll::Ready(out) = work.as_mut().poll(cx) {
            return Poll::Ready(out);
        }
        sleep.as_mut().poll(cx).map(|()| Err(too_late(deadline)))
    })
    .await
}

/// The caller's deadline has passed.
pub(crate) fn too_late(deadline: Duration) -> Error {
    let text = format!("the caller's deadline of {deadline:?} passed");
    Error::not_applied(ErrorKind::Deadline, text)
}

impl fmt::Debug for From {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_loader() { "Loader" } else { "Store" })
    }
}
