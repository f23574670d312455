//! Striped balances: credits land on stripes, debits leave the main account only.
//!
//! What each answer to a debit means is decided in `engine/data/debit`; a sweep is a move of units
//! like that of a stock (`engine/control/stock`), from the stripes to the main account.

use super::kind::Kind;
use super::{PAUSE, Stock, Turn, hold_id, mix, no_stock};
use crate::adds::check_key;
use crate::counter::Sum;
use crate::engine::control::stock::{BUCKETS_MAX, Mutant, Record};
use crate::engine::data::debit::{Debit, Found, Heard, Next};
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::heatsink::Heatsink;
use crate::key::Key;
use crate::lanes::ask;
use crate::store::{End, Ended, Once};
use std::fmt;
use std::time::Duration;

/// The main account is the first bucket.
const MAIN: usize = 0;

/// Attempts at one question whose answer is lost.
const TRIES: u32 = 3;

/// Ways that one call goes while credits come and go, or are being swept.
const WAYS: u32 = 8;

/// Between two sweeps that one process begins by itself.
const SWEPT_EVERY: Duration = Duration::from_secs(1);

impl Heatsink {
    /// The balance under `key`: an amount that many credit and debit at a time, exact and never
    /// below its floor.
    ///
    /// Credits go to stripes on different shards, so that a hot account takes as many a second as
    /// its stripes together. Debits need the check against the floor, so they go through one row,
    /// the main account, to which the stripes are swept.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported): the store lacks one of the capabilities `take`,
    /// `add_once` and `compare_and_set`. [`Limit`](ErrorKind::Limit): the key is too long.
    ///
    /// # Example
    /// ```
    /// use heatsink::{Debited, Heatsink, store::MemoryStore};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let wallet = hs.balance("creator:7")?;
    /// wallet.open(100, 0, 4).await?; // once: 100 cents, never below 0, four stripes
    /// wallet.credit(250, "gift:1").await?;
    /// wallet.credit(250, "gift:1").await?; // delivered twice, counts once
    /// assert_eq!(wallet.debit(300, "payout:1").await?, Debited::Made);
    /// assert_eq!(wallet.debit(300, "payout:2").await?, Debited::Short { balance: 50 });
    /// assert_eq!(wallet.total().await?.total(), 50);
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn balance(&self, key: impl AsRef<[u8]>) -> Result<Balance> {
        Stock::new(self, Kind::Account, key.as_ref()).map(Balance)
    }
}

/// A striped balance. Made by [`Heatsink::balance`]; clones are handles to the same one.
///
/// Every credit and every debit has an id and counts once, whoever crashes and whatever reply is
/// lost, for as long as the store remembers ids. `RedisStore`: 24 hours after a row's last *new* id,
/// and a million ids per row, beyond which the row refuses; both are set there. An id that may be
/// redelivered later than that is to be remembered elsewhere. So many a busy account makes per
/// `ids_kept`: its credits ÷ stripes, and in the main account its debits. Sweeps need none: of each
/// stripe the last one is remembered, without end.
#[derive(Clone)]
pub struct Balance(Stock);

/// What came of [`Balance::debit`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Debited {
    /// It is made.
    Made,
    /// It would have gone below the floor; nothing was taken by this process. Where another one died
    /// over the same id, what it had sent may still land: reverse the id to be sure.
    Short {
        /// The balance at that moment; less where credits have landed since.
        balance: i64,
    },
    /// A debit of this id was reversed, or given up by a call that could not learn what had become of
    /// it. Nothing is taken under this id. Ask again under another.
    Ended,
}

impl Balance {
    /// Makes the balance: `opening` in the main account, never below `floor` (which may be
    /// negative), with `stripes` for credits. False when it is there already, whatever it is.
    ///
    /// # Cost
    /// Store operations: 5 and one per stripe.
    ///
    /// # Cancel safety
    /// A dropped call leaves a balance that is being opened; whoever needs it next finishes that.
    ///
    /// # Errors
    /// Those of the store; call it again. [`Limit`](ErrorKind::Limit): an opening below the floor,
    /// no stripes or more than 255, or amounts beyond 63 bits.
    pub async fn open(&self, opening: i64, floor: i64, stripes: usize) -> Result<bool> {
        self.0.check_buckets(stripes.saturating_add(1).max(2))?;
        let first = |seed, nonce| Record::account(opening, floor, stripes, seed, nonce);
        self.0.begun(stripes + 1, first).await?.ok_or_else(|| {
            let text = format!(
                "an account opens at or above its floor, within 63 bits of it, with 1 to {} stripes",
                BUCKETS_MAX - 1
            );
            Error::not_applied(ErrorKind::Limit, text).with_key(&self.0.core.key)
        })
    }

    /// Credits `amount` under `id`, once; whether it was this call that did.
    ///
    /// # Cost
    /// Store operations: 1. Once a second a process sweeps the stripes after a credit, in the
    /// background.
    ///
    /// # Cancel safety
    /// A dropped call may have credited; the same id asked again counts once.
    ///
    /// # Errors
    /// Those of the store; of unknown outcome, ask again with the same id.
    /// [`Limit`](ErrorKind::Limit): more than 63 bits, or an id too long.
    /// [`Config`](ErrorKind::Config): there is no such balance.
    pub async fn credit(&self, amount: u64, id: impl AsRef<[u8]>) -> Result<bool> {
        let (stock, core) = (&self.0, &self.0.core);
        let id = stock.begin(amount, id.as_ref())?;
        let n = i64::try_from(amount).map_err(|_| stock.too_many(amount))?;
        let names = stock.names().await?;
        let mut at = mix(&id);
        let mut tries = 0;
        let applied = loop {
            // The id pins the stripe: asked again, it meets what it has left there.
            let stripe = MAIN + 1 + (at % (names.len() as u64 - 1)) as usize;
            let added =
                stock.shared().store.clone().add_once(names[stripe].clone(), id.clone().into(), n);
            match ask(stock.shared(), added).await {
                Ok(Once::Applied(_)) => break true,
                Ok(Once::Duplicate | Once::Poisoned) => break false,
                Err(error) if error.is_unknown() && tries + 1 < TRIES => tries += 1,
                Err(error) => return Err(error.after(tries > 0).with_key(&core.key)),
            }
            if *core.broken.lock() == Some(Mutant::CreditsElsewhere) {
                at = at.wrapping_add(1);
            }
        };
        self.sweep_in_time();
        Ok(applied)
    }

    /// Debits `amount` under `id`, once. Sweeps the stripes when the main account has too little.
    ///
    /// # Cost
    /// Store operations: 1 while the main account has enough. Else also a sweep, or before a refusal
    /// two pictures of all rows.
    ///
    /// # Cancel safety
    /// A dropped call may have debited; the same id asked again finds out.
    ///
    /// # Errors
    /// Those of the store; of unknown outcome, ask again with the same id.
    /// [`Throttled`](ErrorKind::Throttled): credits and sweeps kept it from being told whether there
    /// is enough. [`Limit`](ErrorKind::Limit): nothing, or an id too long.
    /// [`Config`](ErrorKind::Config): there is no such balance.
    pub async fn debit(&self, amount: u64, id: impl AsRef<[u8]>) -> Result<Debited> {
        let id = self.0.begin(amount, id.as_ref())?;
        for way in 0..WAYS {
            if way > 0 {
                self.0.shared().runtime.sleep(PAUSE * way).await;
            }
            let doubt = self.0.core.recent.lock().bucket(&id).is_some();
            match self.go(amount, &id, doubt).await? {
                Found::Made => return Ok(Debited::Made),
                Found::Short(above) => {
                    let balance = above.saturating_add(self.floor().await?);
                    return Ok(Debited::Short { balance });
                }
                Found::Ended => return Ok(Debited::Ended),
                Found::Crowded => {}
                Found::Unknown | Found::Failed => break,
            }
        }
        Err(self.0.busy())
    }

    async fn go(&self, amount: u64, id: &Key, doubt: bool) -> Result<Found> {
        let (stock, shared, core) = (&self.0, self.0.shared(), &self.0.core);
        let main = stock.names().await?[MAIN].clone();
        let mut debit = Debit::new(amount, doubt).broken_by(*core.broken.lock());
        let mut error: Option<Error> = None;
        loop {
            let next = debit.next();
            let answer = match next {
                Next::Take => {
                    // Before it is sent: a call that is dropped here may have taken.
                    core.recent.lock().set(id, MAIN);
                    let take = core.kind.take(shared, main.clone(), amount, id.clone()).await;
                    take.map(|(take, _)| Heard::Took(take))
                }
                Next::Bar => stock.end_in(&main, id, End::Back).await.map(Heard::Barred),
                Next::Look => stock.look(Duration::ZERO).await.map(|(picture, _)| Heard::Saw {
                    still: picture.still,
                    epoch: picture.epoch,
                    stripes: sum(&picture.levels[MAIN + 1..]),
                }),
                Next::Sweep => self.sweep().await.map(|_| Heard::Swept),
                Next::End(found) => {
                    if !debit.in_doubt() {
                        // Nothing of it is under way.
                        core.recent.lock().forget(id);
                    }
                    return match (found, error) {
                        (Found::Failed, Some(e)) => Err(e.with_outcome(Outcome::NotApplied)),
                        (Found::Unknown, Some(e)) => Err(e.after(true)),
                        (found, _) => Ok(found),
                    };
                }
            };
            debit.heard(answer.unwrap_or_else(|e: Error| {
                let unknown = e.is_unknown() && matches!(next, Next::Take | Next::Bar);
                error = Some(e.with_key(&core.key));
                if unknown { Heard::Unknown } else { Heard::NotApplied }
            }));
        }
    }

    /// Reverses the debit of `id`, once: its amount goes back to the main account. False when no
    /// debit of this id was made; then none can be any more.
    ///
    /// # Cost
    /// Store operations: 1.
    ///
    /// # Cancel safety
    /// A dropped call may have reversed it; repeat it.
    ///
    /// # Errors
    /// Those of the store; repeating is harmless. [`Config`](ErrorKind::Config): there is no such
    /// balance.
    pub async fn reverse(&self, id: impl AsRef<[u8]>) -> Result<bool> {
        check_key(id.as_ref())?;
        let id = hold_id(id.as_ref());
        let main = self.0.names().await?[MAIN].clone();
        match self.0.end_in(&main, &id, End::Back).await? {
            Ended::Now { amount } | Ended::Before { amount, .. } => Ok(amount > 0),
            Ended::Never => Ok(false),
        }
    }

    /// Brings what lies on the stripes to the main account; how much. Zero too while another call of
    /// this process is at it.
    ///
    /// # Cost
    /// Store operations: 3 and one per stripe to see; then 4, and 3 per stripe that had something.
    ///
    /// # Cancel safety
    /// A dropped call leaves a sweep that whoever needs it finishes.
    ///
    /// # Errors
    /// As [`Stock::rebalance`].
    pub async fn sweep(&self) -> Result<u64> {
        let Some(_turn) = Turn::of(&self.0.core) else {
            // Another call of this process is at it.
            self.0.shared().runtime.sleep(PAUSE).await;
            return Ok(0);
        };
        self.0.gather_into(Some(MAIN)).await
    }

    /// Begins a sweep in the background, unless this process has begun one within a second.
    fn sweep_in_time(&self) {
        let now = self.0.shared().clock.now();
        {
            let mut known = self.0.core.known.lock();
            let Some(known) = known.as_mut() else { return };
            let due = known.evened == Tick::ZERO || now.since(known.evened) >= SWEPT_EVERY;
            if !due {
                return;
            }
            known.evened = now;
        }
        let balance = self.clone();
        self.0.shared().runtime.spawn(Box::pin(async move {
            // Another will try it again.
            drop(balance.sweep().await);
        }));
    }

    async fn floor(&self) -> Result<i64> {
        self.0.names().await?;
        let known = self.0.core.known.lock();
        let floor = known.as_ref().and_then(|known| known.record.floor);
        floor.ok_or_else(|| no_stock(&self.0.core.key))
    }

    /// The balance: the main account and all stripes.
    ///
    /// # Staleness
    /// Of the time of the call. The rows are read one by one, so it counts each credit and debit that
    /// passes meanwhile or does not; without any it is exact.
    ///
    /// # Cost
    /// Store operations: 2 and one per row, shared by all who wait; again while a sweep is under way.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing but that a sweep goes on.
    ///
    /// # Errors
    /// Those of the store. [`Throttled`](ErrorKind::Throttled): the stripes are swept all the time.
    pub async fn total(&self) -> Result<Sum> {
        for way in 0..WAYS {
            if way > 0 {
                // Whoever began the sweep may be gone.
                if let Some(_turn) = Turn::of(&self.0.core) {
                    self.0.finish().await?;
                }
                self.0.shared().runtime.sleep(PAUSE * (way - 1)).await;
            }
            let (picture, value) = self.0.look(Duration::ZERO).await?;
            if picture.still {
                let above = sum(&picture.levels);
                return Ok(Sum::new(above.saturating_add(self.floor().await?), value.age()));
            }
        }
        Err(self.0.busy())
    }

    /// For tests: gets it wrong in one way.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn break_by(&self, mutant: Mutant) {
        self.0.break_by(mutant);
    }
}

/// Of rows whose sum may need more than 63 bits.
fn sum(levels: &[i64]) -> i64 {
    levels.iter().fold(0, |sum: i64, level| sum.saturating_add(*level))
}

impl fmt::Debug for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Balance").field("key", &self.0.core.key).finish()
    }
}
