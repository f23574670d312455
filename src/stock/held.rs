//! Units that a hold has, and the two ways in which it ends.

use super::{Stock, no_stock};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::lanes::ask;
use crate::store::{End, Ended};
use std::fmt;

/// Attempts at an operation that may be repeated.
const TRIES: u32 = 3;

/// Units that a hold has: sell them or put them back. Dropping it does neither; what nobody ends is
/// ended by a [`Reconciler`](super::Reconciler).
#[derive(Clone)]
pub struct Held {
    stock: Stock,
    hold: Key,
    bucket: usize,
}

impl Held {
    pub(super) fn new(stock: Stock, hold: Key, bucket: usize) -> Held {
        Held { stock, hold, bucket }
    }

    /// The hold's id.
    #[must_use]
    pub fn hold(&self) -> &[u8] {
        &self.hold.as_bytes()[2..]
    }

    /// Sells the units: they never come back.
    ///
    /// # Cost
    /// Store operations: 1.
    ///
    /// # Cancel safety
    /// A dropped call may have had its effect; repeat it.
    ///
    /// # Errors
    /// Those of the store; repeating is harmless. [`Closed`](ErrorKind::Closed): the hold was put
    /// back.
    pub async fn confirm(&self) -> Result<()> {
        match self.end(End::Sold).await? {
            Ended::Now { .. } | Ended::Before { end: End::Sold, .. } => Ok(()),
            Ended::Before { end: End::Back, .. } | Ended::Never => Err(self.ended("put back")),
        }
    }

    /// Puts the units back, once. Where the store has forgotten the hold meanwhile (`RedisStore`: 24
    /// hours after the bucket's last hold) nothing comes back; a `Reconciler` ends holds in time.
    ///
    /// # Cost, Cancel safety
    /// As [`confirm`](Held::confirm).
    ///
    /// # Errors
    /// Those of the store; repeating is harmless. [`Closed`](ErrorKind::Closed): the units are sold.
    pub async fn put_back(&self) -> Result<()> {
        match self.end(End::Back).await? {
            Ended::Before { end: End::Sold, .. } => Err(self.ended("sold")),
            _ => Ok(()),
        }
    }

    fn ended(&self, how: &str) -> Error {
        let text = format!("the hold was {how} before");
        Error::not_applied(ErrorKind::Closed, text).with_key(self.hold())
    }

    async fn end(&self, end: End) -> Result<Ended> {
        let names = self.stock.names().await?;
        let name = names.get(self.bucket).ok_or_else(|| no_stock(&self.stock.core.key))?;
        self.stock.end_in(name, &self.hold, end).await
    }
}

impl Stock {
    /// Ends a hold in the bucket `name`, asking again where an answer is lost.
    pub(super) async fn end_in(&self, name: &Key, id: &Key, end: End) -> Result<Ended> {
        let shared = self.shared();
        let mut tries = 0;
        loop {
            let asked = shared.store.clone().end_hold(name.clone(), id.clone().into(), end);
            match ask(shared, asked).await {
                Err(error) if error.is_unknown() && tries + 1 < TRIES => tries += 1,
                answer => {
                    return answer.map_err(|e| e.after(tries > 0).with_key(&self.core.key));
                }
            }
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("hold", &self.hold).field("bucket", &self.bucket).finish()
    }
}
