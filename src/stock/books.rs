//! The books of a stock: every unit accounted for, and holds that nobody ended brought to an end.

use super::{Stock, hold_id, no_stock};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::lanes::ask;
use crate::store::{End, Ended, Hold};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

/// Pages of holds that one walk reads of a bucket.
const PAGES_MAX: usize = 1 << 16;

/// Where the units of a stock are.
///
/// Exact while nobody takes, ends a hold or moves units; else each number is one that held at some
/// point of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Accounts {
    /// Units ever filled in.
    pub initial: u64,
    /// Units in buckets.
    pub free: u64,
    /// Units of open holds.
    pub held: u64,
    /// Units of holds that were confirmed.
    pub sold: u64,
    /// Units between buckets.
    pub in_transit: u64,
    /// Holds with units in more than one bucket: one id was asked for by two processes at a time.
    pub doubled: u64,
}

impl Accounts {
    /// Whether every unit is accounted for, and none twice.
    #[must_use]
    pub fn balance(&self) -> bool {
        self.free + self.held + self.sold + self.in_transit == self.initial
    }
}

impl fmt::Display for Accounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Accounts { initial, free, held, sold, in_transit, doubled } = self;
        write!(
            f,
            "{initial} units: {sold} sold, {held} held, {free} free, {in_transit} in transit"
        )?;
        if *doubled > 0 { write!(f, "; {doubled} holds have units twice") } else { Ok(()) }
    }
}

/// What becomes of an open hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It stays open.
    Keep,
    /// Its units are sold.
    Sold,
    /// Its units go back.
    Back,
}

/// An open hold, as a [`Reconciler`] found it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenHold<'a> {
    /// The id that was given to [`Stock::take`].
    pub id: &'a [u8],
    /// Its units.
    pub amount: u64,
    /// For how long this reconciler has seen it open, on its own clock: zero at first sight.
    pub open_for: Duration,
}

/// Brings holds to an end that nobody ended: their process died, the buyer never paid. Made by
/// [`Stock::reconciler`]; keep it from pass to pass, since it is what knows for how long a hold has
/// been open.
///
/// # Example
/// ```
/// # use heatsink::{Fate, Heatsink, store::MemoryStore};
/// # use std::time::Duration;
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let hs = Heatsink::new(MemoryStore::new(8))?;
/// # let shoes = hs.stock("sku:AJ1")?;
/// # shoes.create(10, 2).await?;
/// # fn is_paid(_: &[u8]) -> bool { false }
/// shoes.take(1, "order:77").await?; // and its process is gone
/// let mut job = shoes.reconciler();
/// // once a minute:
/// let books = job.pass(|hold| match is_paid(hold.id) {
///     true => Fate::Sold,
///     false if hold.open_for > Duration::from_secs(600) => Fate::Back,
///     false => Fate::Keep,
/// }).await?;
/// assert!(books.balance());
/// # Ok::<(), heatsink::Error>(()) }).unwrap();
/// ```
pub struct Reconciler {
    stock: Stock,
    seen: HashMap<Key, Tick>,
}

/// The id that a user gave, of a hold as the store has it; `None` for a move's.
fn of_user(hold: &Hold) -> Option<&[u8]> {
    hold.id.as_bytes().strip_prefix(b"h:")
}

impl Stock {
    /// Where the units are.
    ///
    /// # Cost
    /// Store operations: 1, three per bucket, and one per 512 holds.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    ///
    /// # Errors
    /// Those of the store. [`Config`](ErrorKind::Config): there is no such stock.
    pub async fn accounts(&self) -> Result<Accounts> {
        let (accounts, _) = self.walk().await?;
        Ok(accounts)
    }

    /// A job that ends the holds that nobody ended.
    #[must_use]
    pub fn reconciler(&self) -> Reconciler {
        Reconciler { stock: self.clone(), seen: HashMap::new() }
    }

    /// The books, and every open hold of a user's with its bucket and whether another bucket has
    /// units of the same hold.
    async fn walk(&self) -> Result<(Accounts, Vec<(usize, Hold, bool)>)> {
        let Some((_, record)) = self.load().await? else {
            return Err(no_stock(&self.core.key));
        };
        let mut books = Accounts { initial: record.initial, ..Accounts::default() };
        let names = self.names().await?;
        let mut owners: HashMap<Key, bool> = HashMap::new();
        let mut open: Vec<(usize, Hold)> = Vec::new();
        let mut kept: HashSet<Key> = HashSet::new();
        for (bucket, name) in names.iter().enumerate() {
            for (_, hold) in self.holds_of(name).await? {
                let moves = of_user(&hold).is_none();
                match hold.ended {
                    Some(End::Back) => continue,
                    Some(End::Sold) if moves => continue,
                    None if moves => books.in_transit += hold.amount,
                    Some(End::Sold) => {
                        books.sold += hold.amount;
                        // Units of the same hold in another bucket are too many.
                        kept.insert(hold.id.clone());
                    }
                    None => books.held += hold.amount,
                }
                if !moves {
                    let twice = owners.contains_key(&hold.id);
                    owners.insert(hold.id.clone(), twice);
                    if hold.ended.is_none() {
                        open.push((bucket, hold));
                    }
                }
            }
        }
        let shared = self.shared();
        let levels = self.core.kind.levels(shared, &names).await;
        for (name, level) in names.iter().zip(levels) {
            let units = level.map_err(|e| e.with_key(&self.core.key))?.unwrap_or(0);
            debug_assert!(units >= 0, "a bucket below zero: {name}");
            books.free += units.max(0).unsigned_abs();
        }
        books.doubled = owners.values().filter(|twice| **twice).count() as u64;
        let open = open.into_iter().map(|(bucket, hold)| {
            let twice = owners[&hold.id];
            let extra = twice && !kept.insert(hold.id.clone());
            (bucket, hold, extra)
        });
        Ok((books, open.collect()))
    }

    /// Every hold of one bucket, each once.
    pub(super) async fn holds_of(&self, name: &Key) -> Result<HashMap<Key, Hold>> {
        let shared = self.shared();
        let (mut found, mut page) = (HashMap::new(), None);
        for _ in 0..PAGES_MAX {
            let holds = ask(shared, shared.store.clone().holds(name.clone(), page)).await;
            let holds = holds.map_err(|e| e.with_key(&self.core.key))?;
            found.extend(holds.page.into_iter().map(|hold| (hold.id.clone(), hold)));
            page = holds.next;
            if page.is_none() {
                return Ok(found);
            }
        }
        let text = "the holds of a bucket do not come to an end";
        Err(Error::not_applied(ErrorKind::Limit, text).with_key(&self.core.key))
    }
}

impl Reconciler {
    /// Finishes moves that were left, asks `decide` about every open hold, ends those that it says,
    /// and returns the books after that. Of a hold with units in two buckets, one keeps its own.
    ///
    /// # Cost
    /// Store operations: two walks (see [`Stock::accounts`]) and 1 per hold that ends.
    ///
    /// # Cancel safety
    /// A dropped pass has ended some holds; the next one goes on.
    ///
    /// # Errors
    /// Those of the store; the next pass goes on.
    pub async fn pass(&mut self, mut decide: impl FnMut(OpenHold<'_>) -> Fate) -> Result<Accounts> {
        let stock = self.stock.clone();
        stock.finish().await?;
        let (_, open) = stock.walk().await?;
        let now = stock.shared().clock.now();
        let names = stock.names().await?;
        let mut seen = HashMap::with_capacity(open.len());
        for (bucket, hold, extra) in open {
            let since = *self.seen.get(&hold.id).unwrap_or(&now);
            let id = of_user(&hold).unwrap_or_default();
            let fate = match extra {
                true => Fate::Back,
                false => decide(OpenHold { id, amount: hold.amount, open_for: now.since(since) }),
            };
            let end = match fate {
                Fate::Keep => {
                    seen.insert(hold.id, since);
                    continue;
                }
                Fate::Sold => End::Sold,
                Fate::Back => End::Back,
            };
            stock.end_in(&names[bucket], &hold.id, end).await?;
        }
        self.seen = seen;
        let (books, _) = stock.walk().await?;
        Ok(books)
    }

    /// Ends one hold wherever it has units, and bars it in every bucket: what of it may still be on
    /// its way takes nothing. For a hold whose process died while its `take` was under way.
    ///
    /// # Cost
    /// Store operations: one per bucket.
    ///
    /// # Cancel safety
    /// A dropped call has barred some buckets; repeat it.
    ///
    /// # Errors
    /// Those of the store; repeat it.
    pub async fn give_up(&mut self, hold: impl AsRef<[u8]>) -> Result<u64> {
        let id = hold_id(hold.as_ref());
        let names = self.stock.names().await?;
        let mut back = 0;
        for name in names.iter() {
            if let Ended::Now { amount } = self.stock.end_in(name, &id, End::Back).await? {
                back += amount;
            }
        }
        Ok(back)
    }
}

impl fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.seen.len();
        f.debug_struct("Reconciler").field("stock", &self.stock).field("open", &seen).finish()
    }
}
