//! The same handle for plain threads.
//!
//! Not a second implementation: each call runs the async one on the calling thread and parks it
//! while it waits. Loads in the background run on heatsink's own two worker threads.

mod counters;
mod joined;
mod stock;

pub use counters::{Approximate, Buffered, Counter, GrowOnly};
pub use joined::{Extreme, Union};
pub use stock::{Balance, Reconciler, Stock, Tokens, WaitingRoom, WaitingTicket};

use crate::error::Result;
use crate::heatsink::Heatsink as Async;
use crate::read::{Loadable, Read};
use crate::value::Value;
use crate::write::Put;
use bytes::Bytes;
use std::error::Error as StdError;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// [`crate::Heatsink`] for plain threads. Derefs to nothing; [`as_async`](Heatsink::as_async)
/// gives the handle inside.
///
/// # Example
/// ```
/// use heatsink::{blocking, store::MemoryStore};
/// let hs = blocking::Heatsink::new(MemoryStore::new(8))?;
/// hs.put("post:9", "hello")?;
/// assert_eq!(hs.get("post:9")?.unwrap(), b"hello");
/// # Ok::<(), heatsink::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Heatsink(Async);

impl From<Async> for Heatsink {
    fn from(hs: Async) -> Heatsink {
        Heatsink(hs)
    }
}

impl Heatsink {
    /// Wraps `store` with all defaults; `Heatsink::from(builder.build()?)` for the rest.
    ///
    /// # Errors
    /// As [`crate::Heatsink::new`].
    pub fn new(store: impl crate::store::Store) -> Result<Heatsink> {
        Async::new(store).map(Heatsink)
    }

    /// The handle inside: everything that does not wait is called there.
    #[must_use]
    pub fn as_async(&self) -> &Async {
        &self.0
    }

    /// See [`crate::Heatsink::get`].
    ///
    /// # Errors
    /// As there.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        block_on(self.0.get(key))
    }

    /// See [`crate::Heatsink::get_with`].
    ///
    /// # Errors
    /// As there.
    pub fn get_with(&self, key: impl AsRef<[u8]>, read: Read) -> Result<Option<Value>> {
        block_on(self.0.get_with(key, read))
    }

    /// See [`crate::Heatsink::get_many`].
    pub fn get_many<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Vec<Result<Option<Value>>> {
        block_on(self.0.get_many(keys))
    }

    /// See [`crate::Heatsink::get_many_with`].
    pub fn get_many_with<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
        read: Read,
    ) -> Vec<Result<Option<Value>>> {
        block_on(self.0.get_many_with(keys, read))
    }

    /// See [`crate::Heatsink::load`]; the loader may block.
    ///
    /// # Errors
    /// As there.
    pub fn load<T, E>(
        &self,
        key: impl AsRef<[u8]>,
        loader: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T::Out>
    where
        T: Loadable,
        E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    {
        block_on(self.0.load(key, || async move { loader() }))
    }

    /// See [`crate::Heatsink::read_with`].
    ///
    /// # Errors
    /// As there.
    pub fn read_with<R>(
        &self,
        key: impl AsRef<[u8]>,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>> {
        block_on(self.0.read_with(key, f))
    }

    /// See [`crate::Heatsink::put`].
    ///
    /// # Errors
    /// As there.
    pub fn put(&self, key: impl AsRef<[u8]>, value: impl Into<Bytes>) -> Result<()> {
        block_on(self.0.put(key, value))
    }

    /// See [`crate::Heatsink::put_with`].
    ///
    /// # Errors
    /// As there.
    pub fn put_with(&self, key: impl AsRef<[u8]>, value: impl Into<Bytes>, put: Put) -> Result<()> {
        block_on(self.0.put_with(key, value, put))
    }

    /// See [`crate::Heatsink::delete`].
    ///
    /// # Errors
    /// As there.
    pub fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        block_on(self.0.delete(key))
    }

    /// See [`crate::Heatsink::shutdown`].
    pub fn shutdown(&self) {
        block_on(self.0.shutdown());
    }
}

struct Parked(Thread);

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn waker() -> Waker {
    Waker::from(Arc::new(Parked(std::thread::current())))
}

/// Runs `future` on this thread, parking it while it waits. The wake of an earlier call that comes
/// late costs one more poll.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    // Made once: a call that is done at once, as an add to a buffer, allocates nothing.
    thread_local!(static WAKER: Waker = waker());
    let mut future = pin!(future);
    // A thread that ends may still call, from a drop.
    let waker = WAKER.try_with(Waker::clone).unwrap_or_else(|_| waker());
    let mut cx = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(out) => return out,
            Poll::Pending => std::thread::park(),
        }
    }
}
