//! Values: bytes whose clones do not share a line of memory between threads.

use crate::cell::{Entry, Handle};
use crate::engine::data::near::Freshness;
use crate::engine::time::Tick;
use crate::store::Version;
use bytes::Bytes;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// Where a value came from.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// The near cache, within its fresh time.
    Fresh,
    /// The near cache, past its fresh time and within its stale limit; a load is under way.
    Stale,
    /// A load: this call's own, or one that it joined.
    Load,
    /// The last known value, in place of a refusal. See [`Admission::freeze`](crate::Admission::freeze).
    Frozen,
}

/// A value as it was read: its bytes, how old they are, where they came from.
///
/// It derefs to `[u8]`. Cloning is cheap; the clones that different threads hold of one hot value
/// do not share a reference count, so that a hot key does not become a hot line of memory.
///
/// # Example
/// ```
/// # use heatsink::{Heatsink, store::MemoryStore};
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let hs = Heatsink::new(MemoryStore::new(8))?;
/// hs.put("post:9", "hello").await?;
/// let post = hs.get("post:9").await?.expect("just written");
/// assert_eq!(&post[..], b"hello");
/// assert!(post.age() < std::time::Duration::from_secs(1));
/// # Ok::<(), heatsink::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Value {
    repr: Repr,
    served: Tick,
    source: Source,
}

#[derive(Clone)]
enum Repr {
    /// This thread's own handle of a hot entry.
    Hot(Arc<Handle>),
    /// A value that is not in the hot tier, shared by those who joined its load.
    Own(Arc<Entry>),
}

impl Value {
    pub(crate) fn hot(handle: Arc<Handle>, served: Tick, freshness: Freshness) -> Value {
        let source = if freshness == Freshness::Fresh { Source::Fresh } else { Source::Stale };
        Value { repr: Repr::Hot(handle), served, source }
    }

    pub(crate) fn loaded(entry: Arc<Entry>, served: Tick) -> Value {
        Value { repr: Repr::Own(entry), served, source: Source::Load }
    }

    pub(crate) fn frozen(entry: Arc<Entry>, served: Tick) -> Value {
        Value { source: Source::Frozen, ..Value::loaded(entry, served) }
    }

    pub(crate) fn entry(&self) -> &Entry {
        match &self.repr {
            Repr::Hot(handle) => handle.entry(),
            Repr::Own(entry) => entry,
        }
    }

    /// The bytes as a shared buffer.
    ///
    /// This clones the one buffer that all threads share; on a hot path use the slice.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        self.entry().bytes.clone()
    }

    /// How old the value was when it was served, counted from the start of its load.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.served.since(self.entry().ages.started)
    }

    /// Where the value came from.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// How long the store would still have kept the value when it was served, where it said so. A
    /// store that charges for the answer is asked for the values of hot keys only.
    #[must_use]
    pub fn ttl_left(&self) -> Option<Duration> {
        self.entry().ttl_left.map(|ttl| ttl.saturating_sub(self.age()))
    }

    /// The store's version of the value, where it has one.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.entry().rank.version
    }
}

impl Deref for Value {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.entry().bytes
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl PartialEq<[u8]> for Value {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}

impl PartialEq<&[u8]> for Value {
    fn eq(&self, other: &&[u8]) -> bool {
        **self == **other
    }
}

impl<const N: usize> PartialEq<&[u8; N]> for Value {
    fn eq(&self, other: &&[u8; N]) -> bool {
        **self == other[..]
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Value")
            .field("bytes", &self.len())
            .field("age", &self.age())
            .field("source", &self.source)
            .finish()
    }
}
