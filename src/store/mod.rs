//! What heatsink needs from a store, and the stores it brings.
//!
//! A [`Store`] is whatever a service keeps its values in. Its author writes `async fn`s with
//! `&self`; five are required. What else the store can do it names in its [`Capability`]; a
//! mechanism that needs more than that is refused at build time when the user asked for it, and
//! otherwise not chosen.
//!
//! The rule that everything rests on: **every failure of a write says
//! [`NotApplied`](crate::Outcome::NotApplied) or [`Unknown`](crate::Outcome::Unknown)**. A store
//! that cannot tell says `Unknown`. A write whose future is dropped counts as `Unknown` too.
//! heatsink never retries an `add` behind the caller's back.
//!
//! `heatsink::testing::conformance` (feature `testing`) proves a store in one test.

mod dynamic;
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
mod stock;

pub(crate) use dynamic::DynStore;
pub use memory::MemoryStore;
#[cfg(feature = "redis")]
pub use redis::RedisStore;
pub use stock::{End, Ended, Hold, Holds, Popped, Take};

use crate::error::{Error, Result};
use crate::key::Key;
use crate::runtime::BoxFuture;
use bytes::Bytes;
use std::fmt;
use std::future::Future;
use std::time::Duration;

/// A version of a stored value: ordered first by incarnation, then by sequence number.
///
/// A store that only counts writes uses [`Version::seq`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Version {
    /// The life of the writer that wrote it: raised by every restart.
    pub incarnation: u64,
    /// The writer's own count within that life.
    pub seq: u64,
}

impl Version {
    /// A version of a store that only counts.
    #[must_use]
    pub const fn seq(seq: u64) -> Version {
        Version { incarnation: 0, seq }
    }
}

/// A value as the store returned it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Stored {
    /// The bytes.
    pub bytes: Bytes,
    /// How long the store will still keep them; `None` when they do not expire or it is not known.
    pub ttl_left: Option<Duration>,
    /// The version, where the store has one.
    pub version: Option<Version>,
    /// It is a counter that is [sealed](Store::seal). Always told where the store can seal.
    pub sealed: bool,
}

impl Stored {
    /// A value without expiry and version.
    pub fn new(bytes: impl Into<Bytes>) -> Stored {
        Stored { bytes: bytes.into(), ttl_left: None, version: None, sealed: false }
    }
}

/// The id under which something counts once. Most ids are a name alone: made from a [`Key`].
///
/// An id with a turn is one of a row of ids of the same name, of which only the last can still be
/// under way: whoever begins a turn has seen all smaller ones come to their end. So a store needs to
/// remember one turn of each name, and it remembers that without end, where a name alone may be
/// forgotten after a time that the store documents. A smaller turn than the last one is over:
/// [`Once::Duplicate`] of an add, [`Once::Poisoned`] of a poison, [`Take::Ended`] of a take, and of
/// [`Store::end_hold`] what was asked for, as of before. A hold that is still open when a greater
/// turn of its name begins (the store lost its end) stays among the [`Store::holds`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Id {
    /// Its name.
    pub name: Key,
    /// Its turn, where the name is used again and again.
    pub turn: Option<u64>,
}

impl Id {
    /// The id of `name` in its turn `turn`.
    #[must_use]
    pub fn in_turn(name: impl Into<Key>, turn: u64) -> Id {
        Id { name: name.into(), turn: Some(turn) }
    }
}

impl From<Key> for Id {
    fn from(name: Key) -> Id {
        Id { name, turn: None }
    }
}

impl From<&str> for Id {
    fn from(name: &str) -> Id {
        Key::from(name).into()
    }
}

/// What came of an operation that counts once per id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Once {
    /// This call applied it; the total after it.
    Applied(i64),
    /// The id had been applied before; nothing changed.
    Duplicate,
    /// The id is poisoned here: it counts in another place or not at all.
    Poisoned,
}

/// What a store can do beyond the five required operations.
///
/// # Example
/// ```
/// # use heatsink::store::Capability;
/// let mut can = Capability::default();
/// can.compare_and_set = true;
/// assert!(!can.seal);
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Capability {
    /// [`Store::compare_and_set`].
    pub compare_and_set: bool,
    /// [`Store::put_if_newer`].
    pub put_if_newer: bool,
    /// [`Store::seal`] and [`Store::open`].
    pub seal: bool,
    /// [`Store::add_once`] and [`Store::poison_once`].
    pub add_once: bool,
    /// [`Store::fold`], [`Store::folded`] and [`Store::unfold`].
    pub fold: bool,
    /// [`Store::claim_lane`].
    pub claim_lane: bool,
    /// [`Store::take`], [`Store::end_hold`] and [`Store::holds`].
    pub take: bool,
    /// [`Store::push_tokens`], [`Store::pop_token`] and [`Store::count_tokens`], and of `take` what
    /// ends and tells holds.
    pub tokens: bool,
    /// [`Store::publish`] and [`Store::subscribe`].
    pub publish: bool,
    /// [`Store::get_replica`].
    pub replicas: bool,
    /// [`Store::shard_of`] answers.
    pub shard_of: bool,
    /// [`Stored::ttl_left`] is filled for values that expire.
    pub ttl: bool,
    /// [`Stored::version`] is filled.
    pub version: bool,
    /// [`Store::get_uncached`] and [`Store::get_many_uncached`] cost less than [`Store::get`] and
    /// [`Store::get_many`].
    pub uncached: bool,
}

impl Capability {
    /// Everything that the trait names.
    #[must_use]
    pub const fn all() -> Capability {
        Capability {
            compare_and_set: true,
            put_if_newer: true,
            seal: true,
            add_once: true,
            fold: true,
            claim_lane: true,
            take: true,
            tokens: true,
            publish: true,
            replicas: true,
            shard_of: true,
            ttl: true,
            version: true,
            uncached: true,
        }
    }
}

/// One delivery of a subscription.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Delivery {
    /// A message, as published.
    Message(Bytes),
    /// Messages may have been lost: a reconnect, an overflow. Everything older is in doubt.
    Gap,
}

/// A running subscription. Dropping it ends it.
pub trait Subscription: Send + 'static {
    /// The next delivery; `None` when the subscription has ended for good.
    ///
    /// # Cancel safety
    /// Dropping the future loses no message.
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>>;
}

impl fmt::Debug for dyn Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Subscription")
    }
}

/// A store: where a service keeps its values.
///
/// Adapters clone their connection inside; every method takes `&self`. All futures are `Send`.
/// Write the methods as plain `async fn`. See `examples/custom_store.rs` for a whole adapter.
///
/// # Cancel safety
/// heatsink may drop any of these futures. A dropped read changes nothing; a dropped write is
/// treated as [`Outcome::Unknown`](crate::Outcome::Unknown) for
/// [`max_in_flight_time`](Store::max_in_flight_time).
pub trait Store: Send + Sync + 'static {
    /// What this store can do. Constant over its life.
    fn capability(&self) -> Capability {
        Capability::default()
    }

    /// The value under `key`, or `None` when there is none (or it has expired).
    ///
    /// # Errors
    /// Whatever the store reports; a read is never `Unknown`.
    fn get(&self, key: &Key) -> impl Future<Output = Result<Option<Stored>>> + Send;

    /// The values under `keys`, **one result per key**, in their order: a failing shard fails its
    /// own keys only.
    fn get_many(&self, keys: &[Key]) -> impl Future<Output = Vec<Result<Option<Stored>>>> + Send;

    /// Like [`get`](Store::get), for a value that will not be cached: [`Stored::ttl_left`] need not
    /// be filled. To be written where the expiry costs a command of its own, and named as
    /// capability `uncached`. Default: as `get`.
    ///
    /// # Errors
    /// As `get`.
    fn get_uncached(&self, key: &Key) -> impl Future<Output = Result<Option<Stored>>> + Send {
        self.get(key)
    }

    /// Like [`get_many`](Store::get_many), for values that will not be cached; see
    /// [`get_uncached`](Store::get_uncached). Default: as `get_many`.
    ///
    /// # Errors
    /// As `get_many`.
    fn get_many_uncached(
        &self,
        keys: &[Key],
    ) -> impl Future<Output = Vec<Result<Option<Stored>>>> + Send {
        self.get_many(keys)
    }

    /// Sets `key` to `value`, to expire after `ttl` if there is one. The latest put wins.
    ///
    /// # Errors
    /// Says `NotApplied` only when sure.
    fn put(
        &self,
        key: &Key,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Deletes `keys`; for each, whether it was there.
    fn delete_many(&self, keys: &[Key]) -> impl Future<Output = Vec<Result<bool>>> + Send;

    /// Adds `amount` to the 64-bit integer under `key` (absent counts as zero), in one step; the
    /// total after it. The value reads back as decimal digits.
    ///
    /// # Errors
    /// [`Overflow`](crate::ErrorKind::Overflow) and [`WrongType`](crate::ErrorKind::WrongType)
    /// change nothing. Never retried by heatsink.
    fn add(&self, key: &Key, amount: i64) -> impl Future<Output = Result<i64>> + Send;

    /// Sets `key` to `value` if it now holds exactly `expected` (`None`: is absent); whether it
    /// did. Capability `compare_and_set`.
    ///
    /// # Errors
    /// An `Unknown` is resolved by reading back.
    fn compare_and_set(
        &self,
        key: &Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> impl Future<Output = Result<bool>> + Send {
        let _ = (key, expected, value, ttl);
        async { Err(Error::unsupported("compare_and_set")) }
    }

    /// Sets `key` to `value` at `version` if the version there is older or absent; whether it was.
    /// Repeating it is harmless. Capability `put_if_newer`.
    ///
    /// Only this and [`claim_lane`](Store::claim_lane) give a value a place in the order. What any
    /// other operation wrote (a put, an add, a compare-and-set) has none and is older than every
    /// version, whatever [`Stored::version`] shows for it; a put over a versioned value ends its
    /// order. So a store needs to keep nothing beside a plain value.
    fn put_if_newer(
        &self,
        key: &Key,
        version: Version,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> impl Future<Output = Result<bool>> + Send {
        let _ = (key, version, value, ttl);
        async { Err(Error::unsupported("put_if_newer")) }
    }

    /// Closes the counter under `key` for [`add`](Store::add), keeping its value readable; the
    /// total, final from here on. Sealing twice with one tag is harmless. Capability `seal`.
    fn seal(&self, key: &Key, tag: u64) -> impl Future<Output = Result<i64>> + Send {
        let _ = (key, tag);
        async { Err(Error::unsupported("seal")) }
    }

    /// Opens a counter that was sealed with `tag`; whether it was. Capability `seal`.
    fn open(&self, key: &Key, tag: u64) -> impl Future<Output = Result<bool>> + Send {
        let _ = (key, tag);
        async { Err(Error::unsupported("seal")) }
    }

    /// Like [`add`](Store::add), but counts once per `id`. Capability `add_once`.
    fn add_once(
        &self,
        key: &Key,
        id: &Id,
        amount: i64,
    ) -> impl Future<Output = Result<Once>> + Send {
        let _ = (key, id, amount);
        async { Err(Error::unsupported("add_once")) }
    }

    /// Makes every later [`add_once`](Store::add_once) of `id` under `key` refuse;
    /// [`Once::Duplicate`] when it had been applied already. Capability `add_once`.
    fn poison_once(&self, key: &Key, id: &Id) -> impl Future<Output = Result<Once>> + Send {
        let _ = (key, id);
        async { Err(Error::unsupported("add_once")) }
    }

    /// Like [`add`](Store::add), but counts once per `id`, and leaves a mark beside the key in the
    /// same step, which stays for as long as it takes to [`unfold`](Store::unfold) it; whether it
    /// counted now. Capability `fold`.
    fn fold(&self, key: &Key, id: &Key, amount: i64) -> impl Future<Output = Result<bool>> + Send {
        let _ = (key, id, amount);
        async { Err(Error::unsupported("fold")) }
    }

    /// Whether the mark of `id` stands beside `key`. Capability `fold`.
    ///
    /// # Errors
    /// Whatever the store reports; a read is never `Unknown`.
    fn folded(&self, key: &Key, id: &Key) -> impl Future<Output = Result<bool>> + Send {
        let _ = (key, id);
        async { Err(Error::unsupported("fold")) }
    }

    /// Removes the mark of `id` beside `key`; whether it was there. Capability `fold`.
    fn unfold(&self, key: &Key, id: &Key) -> impl Future<Output = Result<bool>> + Send {
        let _ = (key, id);
        async { Err(Error::unsupported("fold")) }
    }

    /// Raises the incarnation under `key` by one in one step, keeping the bytes; what is there
    /// after it. A writer of an older incarnation is refused by
    /// [`put_if_newer`](Store::put_if_newer) from then on. Capability `claim_lane`.
    fn claim_lane(&self, key: &Key) -> impl Future<Output = Result<Stored>> + Send {
        let _ = key;
        async { Err(Error::unsupported("claim_lane")) }
    }

    /// Takes `amount` units from the integer under `key` if that many are there, once per `hold`:
    /// a hold that has taken hears the same again, one that was put back takes nothing any more.
    /// Capability `take`.
    fn take(&self, key: &Key, amount: u64, hold: &Id) -> impl Future<Output = Result<Take>> + Send {
        let _ = (key, amount, hold);
        async { Err(Error::unsupported("take")) }
    }

    /// Ends `hold` under `key`, once: its units are sold, or go back in the same step. Putting back
    /// a hold that never took bars it, so that a [`take`](Store::take) that is still under way
    /// takes nothing. Capability `take`.
    fn end_hold(
        &self,
        key: &Key,
        hold: &Id,
        end: End,
    ) -> impl Future<Output = Result<Ended>> + Send {
        let _ = (key, hold, end);
        async { Err(Error::unsupported("take")) }
    }

    /// The holds under `key`, open and ended, a page at a time: `None` begins, then whatever
    /// [`Holds::next`] said. Capability `take`.
    fn holds(&self, key: &Key, page: Option<Bytes>) -> impl Future<Output = Result<Holds>> + Send {
        let _ = (key, page);
        async { Err(Error::unsupported("take")) }
    }

    /// Appends `tokens` to the list under `key`, once per `batch`; whether this call did.
    /// Capability `tokens`.
    fn push_tokens(
        &self,
        key: &Key,
        batch: &Id,
        tokens: Vec<Bytes>,
    ) -> impl Future<Output = Result<bool>> + Send {
        let _ = (key, batch, tokens);
        async { Err(Error::unsupported("tokens")) }
    }

    /// Takes the first token off the list under `key`, once per `hold`: a hold that has one hears
    /// the same again, one that was put back gets none any more. The hold is ended by
    /// [`end_hold`](Store::end_hold), which puts the token back at the list's end, and is told by
    /// [`holds`](Store::holds) as one unit. Capability `tokens`.
    fn pop_token(&self, key: &Key, hold: &Id) -> impl Future<Output = Result<Popped>> + Send {
        let _ = (key, hold);
        async { Err(Error::unsupported("tokens")) }
    }

    /// Tokens in the list under `key`; none where there is no list. Capability `tokens`.
    fn count_tokens(&self, key: &Key) -> impl Future<Output = Result<u64>> + Send {
        let _ = key;
        async { Err(Error::unsupported("tokens")) }
    }

    /// Sends `message` to all present subscribers of `channel`, at most once. Capability `publish`.
    fn publish(&self, channel: &Key, message: Bytes) -> impl Future<Output = Result<()>> + Send {
        let _ = (channel, message);
        async { Err(Error::unsupported("publish")) }
    }

    /// Subscribes to `channel`: every message published after this returns is delivered, or a
    /// [`Delivery::Gap`] is. Capability `publish`.
    fn subscribe(
        &self,
        channel: &Key,
    ) -> impl Future<Output = Result<Box<dyn Subscription>>> + Send {
        let _ = channel;
        async { Err(Error::unsupported("publish")) }
    }

    /// Like [`get`](Store::get) from a replica, which may be behind. Capability `replicas`.
    fn get_replica(&self, key: &Key) -> impl Future<Output = Result<Option<Stored>>> + Send {
        let _ = key;
        async { Err(Error::unsupported("replicas")) }
    }

    /// The shard that owns `key`, as a small number, where the client knows. Capability `shard_of`.
    fn shard_of(&self, key: &[u8]) -> Option<u32> {
        let _ = key;
        None
    }

    /// How long after it was sent a write of unknown outcome may still be applied. Until it has
    /// passed, heatsink does not cache the key. Default: 10 s.
    fn max_in_flight_time(&self) -> Duration {
        Duration::from_secs(10)
    }
}
