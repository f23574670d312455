//! Stock: units that are sold once each, fast.
//!
//! What each answer means is decided in `engine/data/probe` and `engine/control/stock`; here it is
//! asked. A stock is a record and some buckets, each in a hash slot of its own.

mod balance;
mod books;
mod held;
mod kind;
mod look;
mod room;
mod tokens;
mod work;

pub use balance::{Balance, Debited};
pub use books::{Accounts, Fate, OpenHold, Reconciler};
pub use held::Held;
pub use room::{WaitingRoom, WaitingTicket};
pub use tokens::{HeldToken, Popping, Tokens};

use crate::adds::check_key;
use crate::engine::control::stock::{BUCKETS_MAX, Mutant, Record, Work, evened};
use crate::engine::data::probe::{Found, Heard, Levels, Next, Probe};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::heatsink::Heatsink;
use crate::key::{Key, fnv1a_32};
use crate::lanes::ask;
use crate::runtime::BoxFuture;
use crate::sample::Seen;
use crate::shared::Shared;
use crate::store::{End, Stored, Take};
use crate::sync::Mutex;
use bytes::Bytes;
use kind::Kind;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use work::all;

/// Holds of this process whose bucket is remembered. An older one is looked for like a new one.
const RECENT_MAX: usize = 1 << 16;

/// Ways that one call goes while others are faster or units move.
const WAYS: u32 = 8;

/// The pause before a way is gone again.
const PAUSE: Duration = Duration::from_millis(10);

/// Between two times that one process evens out the buckets by itself.
const EVENED_EVERY: Duration = Duration::from_millis(20);

impl Heatsink {
    /// The stock under `key`: units of one thing in buckets on different shards, each sold once.
    ///
    /// Keep the handle: all that one process knows of its buckets is in it and its clones.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported): the store lacks one of the capabilities `take`,
    /// `add_once` and `compare_and_set`. [`Limit`](ErrorKind::Limit): the key is too long.
    ///
    /// # Example
    /// ```
    /// use heatsink::{Heatsink, Taken, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let shoes = hs.stock("sku:AJ1")?;
    /// shoes.create(10_000, 16).await?; // once; 16 buckets of 625
    /// match shoes.take(1, "order:77").await? {
    ///     Taken::Held(held) => held.confirm().await?, // or held.put_back()
    ///     Taken::SoldOut => println!("sold out"),
    ///     other => println!("{other:?}"),
    /// }
    /// assert_eq!(shoes.remaining_with(std::time::Duration::ZERO).await?.total(), 9_999);
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn stock(&self, key: impl AsRef<[u8]>) -> Result<Stock> {
        Stock::new(self, Kind::Units, key.as_ref())
    }
}

impl Stock {
    pub(super) fn new(hs: &Heatsink, kind: Kind, key: &[u8]) -> Result<Stock> {
        check_key(key)?;
        if let Some(lacks) = kind.lacks(hs.shared().store.capability()) {
            return Err(Error::unsupported(lacks));
        }
        let core = Core {
            kind,
            key: Key::copy(key),
            known: Mutex::new(None),
            recent: Mutex::new(Recent::default()),
            finishing: AtomicBool::new(false),
            broken: Mutex::new(None),
        };
        Ok(Stock { hs: hs.clone(), core: Arc::new(core) })
    }
}

/// A stock. Made by [`Heatsink::stock`]; clones are handles to the same one.
///
/// `free + held + sold + in transit` never exceeds what was filled in, whoever crashes and whatever
/// reply is lost, as long as the store loses nothing.
#[derive(Clone)]
pub struct Stock {
    pub(super) hs: Heatsink,
    pub(super) core: Arc<Core>,
}

pub(super) struct Core {
    pub(super) kind: Kind,
    pub(super) key: Key,
    pub(super) known: Mutex<Option<Known>>,
    pub(super) recent: Mutex<Recent>,
    finishing: AtomicBool,
    /// Only to show that the tests notice.
    pub(super) broken: Mutex<Option<Mutant>>,
}

/// What this process knows of the stock.
pub(super) struct Known {
    /// The record as last read, with the bytes that a compare-and-set expects.
    pub(super) bytes: Bytes,
    pub(super) record: Record,
    pub(super) names: Arc<[Key]>,
    levels: Levels,
    /// When this process last evened out the buckets by itself.
    evened: Tick,
    /// When its last look ended.
    pub(super) looked: Tick,
}

/// In which bucket a hold of this process has its units, or may have them.
#[derive(Default)]
pub(super) struct Recent {
    buckets: HashMap<Key, (usize, u64)>,
    order: VecDeque<(Key, u64)>,
    turn: u64,
}

impl Recent {
    pub(super) fn set(&mut self, hold: &Key, bucket: usize) {
        let turn = match self.buckets.get(hold) {
            Some((_, turn)) => *turn,
            None => {
                self.turn += 1;
                self.order.push_back((hold.clone(), self.turn));
                self.turn
            }
        };
        self.buckets.insert(hold.clone(), (bucket, turn));
        // Those that were forgotten by name leave the order here, and not what came for it since.
        while self.order.len() > RECENT_MAX
            && let Some((oldest, turn)) = self.order.pop_front()
        {
            if self.buckets.get(&oldest).is_some_and(|(_, of)| *of == turn) {
                self.buckets.remove(&oldest);
            }
        }
    }

    pub(super) fn bucket(&self, hold: &Key) -> Option<usize> {
        self.buckets.get(hold).map(|(bucket, _)| *bucket)
    }

    /// Nothing of this hold is under way.
    pub(super) fn forget(&mut self, hold: &Key) {
        self.buckets.remove(hold);
    }
}

/// What came of [`Stock::take`].
#[derive(Clone, Debug)]
pub enum Taken {
    /// The hold has its units.
    Held(Held),
    /// Every bucket was found empty during the call, and nothing was between buckets.
    SoldOut,
    /// Units are left, but no bucket has as many as were asked for. [`Stock::gather`] brings them
    /// together; or ask for fewer.
    Short {
        /// Units left.
        remaining: u64,
    },
    /// This hold has ended: it was put back, or given up by a call that could not learn what had
    /// become of it. It has no units and takes none. Buy again under another id.
    Ended,
}

/// How a user's hold is called in the store. Moves between buckets have ids of another form.
pub(super) fn hold_id(hold: &[u8]) -> Key {
    Key::from([b"h:", hold].concat())
}

pub(super) fn no_stock(key: &Key) -> Error {
    let text = "there is no stock under this key: Stock::create makes one";
    Error::not_applied(ErrorKind::Config, text).with_key(key)
}

pub(super) fn unreadable(key: &Key) -> Error {
    Error::not_applied(ErrorKind::WrongType, "this is not the record of a stock").with_key(key)
}

impl Stock {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        self.hs.shared()
    }

    /// Takes `amount` units for `hold`, an id of the caller's, such as that of an order.
    ///
    /// The same hold asked again in this process finds what it has. Another process that is given
    /// a hold which may have been asked for before should [`find`](Stock::find) it first.
    ///
    /// # Cost
    /// Store operations: 1 while most buckets have units; one more for each bucket that turns out to
    /// be empty, and once all are, the record twice and one read per bucket, shared by all who wait.
    ///
    /// # Cancel safety
    /// A dropped call may have taken. The same hold asked again finds out.
    ///
    /// # Errors
    /// Those of the store. Of unknown outcome: a bucket may have given, and none other was asked
    /// for this hold; ask again with the same hold. [`Throttled`](ErrorKind::Throttled): others have
    /// asked for the units that are left, or they are being moved. [`Limit`](ErrorKind::Limit): no units, or an id too long.
    /// [`Config`](ErrorKind::Config): there is no such stock.
    pub async fn take(&self, amount: u64, hold: impl AsRef<[u8]>) -> Result<Taken> {
        let (taken, _) = self.taken(amount, hold.as_ref()).await?;
        Ok(taken)
    }

    /// What came of a call; and the token, where there are tokens.
    pub(super) async fn taken(&self, amount: u64, hold: &[u8]) -> Result<(Taken, Option<Bytes>)> {
        let id = self.begin(amount, hold)?;
        let mut token = None;
        for way in 0..WAYS {
            if way > 0 {
                self.shared().runtime.sleep(PAUSE * way).await;
            }
            match self.go(amount, &id, &mut token).await? {
                Found::Held(bucket) => return Ok((Taken::Held(self.held(id, bucket)), token)),
                Found::SoldOut => return Ok((Taken::SoldOut, None)),
                Found::Short(remaining) => return Ok((Taken::Short { remaining }, None)),
                Found::Ended => return Ok((Taken::Ended, None)),
                // Whoever began the move may be gone. It is finished by whoever needs it.
                Found::Busy => {
                    if let Some(_turn) = Turn::of(&self.core) {
                        self.finish().await?;
                    }
                }
                Found::Crowded => {}
                Found::Unknown(_) | Found::Failed => break,
            }
        }
        Err(self.busy())
    }

    pub(super) fn busy(&self) -> Error {
        let text = "others have asked for the units that are left, or they are being moved";
        let retry = Retry::After(PAUSE * WAYS);
        Error::not_applied(ErrorKind::Throttled, text).with_retry(retry).with_key(&self.core.key)
    }

    /// Before anything is asked: the id, the sample, the budgets.
    pub(super) fn begin(&self, amount: u64, hold: &[u8]) -> Result<Key> {
        check_key(hold)?;
        let (shared, key) = (self.shared(), &self.core.key);
        if amount == 0 {
            return Err(Error::not_applied(ErrorKind::Limit, "no units").with_key(key));
        }
        self.hs.sampled(self.hs.observe(1), key, Seen::Write);
        shared.admit(|| shared.hash(key), key, None)?;
        Ok(hold_id(hold))
    }

    pub(super) fn held(&self, hold: Key, bucket: usize) -> Held {
        Held::new(self.clone(), hold, bucket)
    }

    /// One way through the buckets; the error of the question that it ended on, if it did.
    async fn go(&self, amount: u64, id: &Key, token: &mut Option<Bytes>) -> Result<Found> {
        let names = self.names().await?;
        let (shared, core) = (self.shared(), &self.core);
        let hash = mix(id);
        let doubt = core.recent.lock().bucket(id);
        let broken = *core.broken.lock();
        let mut probe = match &*core.known.lock() {
            Some(known) => Probe::new(hash, amount, &known.levels, doubt),
            None => return Ok(Found::Busy),
        }
        .broken_by(broken);
        let mut error: Option<Error> = None;
        loop {
            let next = probe.next();
            let answer = match next {
                Next::Take(bucket) => {
                    // Before it is sent: a call that is dropped here may have taken.
                    core.recent.lock().set(id, bucket);
                    let _asking = Asking::new(core, bucket, amount);
                    let name = names[bucket].clone();
                    let took = core.kind.take(shared, name, amount, id.clone()).await;
                    took.map(|(take, popped)| {
                        *token = popped;
                        Heard::Took(take)
                    })
                }
                Next::Bar(bucket) => {
                    let name = names[bucket].clone();
                    let end = shared.store.clone().end_hold(name, id.clone().into(), End::Back);
                    ask(shared, end).await.map(Heard::Barred)
                }
                Next::Look => self.look(Duration::ZERO).await.map(|(p, _)| Heard::Saw(Some(p))),
                Next::End(found) => {
                    // Else the next way would bar the hold in a bucket that has said no for sure.
                    if !probe.in_doubt() && !matches!(found, Found::Held(_) | Found::Ended) {
                        core.recent.lock().forget(id);
                    }
                    return match (found, error) {
                        (Found::Unknown(_), Some(error)) => Err(error.after(true)),
                        (Found::Failed, Some(error)) => Err(error),
                        (found, _) => Ok(found),
                    };
                }
            };
            let heard = answer.unwrap_or_else(|e: Error| {
                let unknown = e.is_unknown();
                error = Some(e.with_key(&core.key));
                if next == Next::Look {
                    Heard::Saw(None)
                } else if unknown {
                    Heard::Unknown
                } else {
                    Heard::NotApplied
                }
            });
            let short = matches!(heard, Heard::Took(Take::Short { .. }));
            let now = shared.clock.now();
            let mut known = core.known.lock();
            let Some(known) = known.as_mut() else { return Ok(Found::Busy) };
            probe.heard(heard, &mut known.levels, now);
            let uneven = short && core.kind == Kind::Units && known.uneven(now);
            if uneven {
                self.even_out();
            }
        }
    }

    /// Begins to even out the buckets, in the background.
    fn even_out(&self) {
        let stock = self.clone();
        self.shared().runtime.spawn(Box::pin(async move {
            // Another will try it again.
            drop(stock.rebalance().await);
        }));
    }

    /// Where the buckets are, by the record as last read.
    pub(super) async fn names(&self) -> Result<Arc<[Key]>> {
        if let Some(known) = &*self.core.known.lock() {
            return Ok(known.names.clone());
        }
        match self.load().await? {
            Some(_) => {
                let known = self.core.known.lock();
                known.as_ref().map(|k| k.names.clone()).ok_or_else(|| no_stock(&self.core.key))
            }
            None => Err(no_stock(&self.core.key)),
        }
    }

    /// The record as the store has it now.
    pub(super) async fn load(&self) -> Result<Option<(Bytes, Record)>> {
        let get = self.shared().store.clone().get(self.core.kind.record().of(&self.core.key));
        self.core.learn(ask(self.shared(), get).await?)
    }

    /// The units of a hold, if it has some that were not put back.
    ///
    /// # Cost
    /// Store operations: one per bucket.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    ///
    /// # Errors
    /// Those of the store: a bucket that cannot be asked may have them.
    pub async fn find(&self, hold: impl AsRef<[u8]>) -> Result<Option<Held>> {
        let id = hold_id(hold.as_ref());
        check_key(&id)?;
        let names = self.names().await?;
        let shared = self.shared();
        // More than there can be: whoever has no hold is told so, and gets none.
        let asks = names.iter().map(|name| {
            let (shared, name, id) = (shared.clone(), name.clone(), id.clone());
            let asked: BoxFuture<'static, _> = Box::pin(async move {
                ask(&shared, shared.store.clone().take(name, u64::MAX, id.into())).await
            });
            asked
        });
        for (bucket, answer) in all(asks.collect()).await.into_iter().enumerate() {
            if let Take::Taken { .. } = answer.map_err(|e| e.with_key(&self.core.key))? {
                self.core.recent.lock().set(&id, bucket);
                return Ok(Some(self.held(id, bucket)));
            }
        }
        Ok(None)
    }

    /// For tests: gets it wrong in one way.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn break_by(&self, mutant: Mutant) {
        *self.core.broken.lock() = Some(mutant);
    }
}

/// One call of this process at a time finishes what another has begun; those who find it busy come
/// back.
struct Turn<'a>(&'a Core);

impl Turn<'_> {
    fn of(core: &Core) -> Option<Turn<'_>> {
        (!core.finishing.swap(true, Ordering::AcqRel)).then_some(Turn(core))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.finishing.store(false, Ordering::Release);
    }
}

/// A question on its way to a bucket, also when its call is dropped.
struct Asking<'a> {
    core: &'a Core,
    bucket: usize,
    amount: u64,
}

impl Asking<'_> {
    fn new(core: &Core, bucket: usize, amount: u64) -> Asking<'_> {
        if let Some(known) = core.known.lock().as_mut() {
            known.levels.asking(bucket, amount);
        }
        Asking { core, bucket, amount }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(known) = self.core.known.lock().as_mut() {
            known.levels.answered(self.bucket, self.amount);
        }
    }
}

impl Core {
    /// What a read of the record brought.
    pub(super) fn learn(&self, stored: Option<Stored>) -> Result<Option<(Bytes, Record)>> {
        let Some(stored) = stored else { return Ok(None) };
        let record = Record::parse(&stored.bytes).ok_or_else(|| unreadable(&self.key))?;
        let mut known = self.known.lock();
        match &mut *known {
            Some(known) if known.record.seed == record.seed => {
                // An answer that was overtaken on its way must not bring an old record back.
                if record.epoch >= known.record.epoch {
                    (known.bytes, known.record) = (stored.bytes.clone(), record.clone());
                }
            }
            known => {
                let at = |b| self.kind.bucket(&self.key, record.seed, b);
                let names = (0..record.buckets).map(at);
                *known = Some(Known {
                    bytes: stored.bytes.clone(),
                    record: record.clone(),
                    names: names.collect(),
                    levels: Levels::new(record.buckets),
                    evened: Tick::ZERO,
                    looked: Tick::ZERO,
                });
            }
        }
        Ok(Some((stored.bytes, record)))
    }
}

impl Known {
    /// Whether it is time for this process to even out the buckets.
    fn uneven(&mut self, now: Tick) -> bool {
        if self.record.work != Work::None || now.since(self.evened) < EVENED_EVERY {
            return false;
        }
        // A bucket of which nothing has been heard counts as full enough.
        let heard = self.levels.known(now).flatten();
        let most = heard.max().unwrap_or(0);
        let levels: Vec<i64> = self.levels.known(now).map(|n| n.unwrap_or(most)).collect();
        let uneven = !evened(&levels).is_empty();
        if uneven {
            self.evened = now;
        }
        uneven
    }
}

/// A hash of a hold's id that is the same in every process and version.
pub(super) fn mix(id: &[u8]) -> u64 {
    let low = u64::from(fnv1a_32(id));
    let mut z = (low << 32 | low).wrapping_add(id.len() as u64);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Stock {
    pub(super) fn check_buckets(&self, buckets: usize) -> Result<()> {
        if (1..=BUCKETS_MAX).contains(&buckets) {
            return Ok(());
        }
        let text = format!("{buckets} buckets: a stock has 1 to {BUCKETS_MAX}");
        Err(Error::not_applied(ErrorKind::Limit, text).with_key(&self.core.key))
    }
}

impl fmt::Debug for Stock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stock").field("key", &self.core.key).finish()
    }
}
