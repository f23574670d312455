//! Counters that expire: the time is in the record, and whoever finds it over lets the counter begin
//! again before it does anything else. The bare key keeps no expiry of its own meanwhile, so that it
//! does not vanish under somebody who sums it up.

use super::{SUM_TRIES, Salted, View, count};
use crate::engine::data::joined::Op;
use crate::engine::data::sums::Parts;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::lanes::overflow;
use crate::shared::Shared;
use std::sync::Arc;

impl Salted {
    /// When the bare key expires, in milliseconds since 1970; refused where the counter would not be
    /// known to everybody by then.
    pub(super) async fn expiry_of_bare(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        op: Op,
    ) -> Result<Option<u64>> {
        let bare = self.ask(shared, shared.store.clone().get(key.clone())).await?;
        let now_ms = shared.clock.wall_ms();
        let Some(left) = bare.and_then(|stored| stored.ttl_left) else { return Ok(None) };
        if op.joins() || left < 2 * self.waits.readers {
            let text = "a key that expires soon, or is not a counter, is not salted";
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(key));
        }
        Ok(u64::try_from(left.as_millis()).ok().and_then(|left| now_ms.checked_add(left)))
    }

    /// Takes the expiry off the bare key: the record has it.
    pub(super) async fn keep_bare(&self, shared: &Arc<Shared>, key: &Key) -> Result<()> {
        let store = &shared.store;
        for _ in 0..SUM_TRIES {
            let bare = self.ask(shared, store.clone().get(key.clone())).await?;
            let Some(bare) = bare.filter(|b| b.ttl_left.is_some() && !b.sealed) else {
                return Ok(());
            };
            let (was, same) = (Some(bare.bytes.clone()), bare.bytes);
            let kept = store.clone().compare_and_set(key.clone(), was, same, None);
            match self.ask(shared, kept).await {
                Ok(true) => return Ok(()),
                // What became of it is read.
                Err(error) if !error.is_unknown() => return Err(error),
                Ok(false) | Err(_) => {}
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "the bare key changes faster than it can be kept"))
    }

    /// Lets a counter begin again whose time is over, unless somebody has done so.
    pub(super) async fn expire(&self, shared: &Arc<Shared>, key: &Key) -> Result<()> {
        for _ in 0..SUM_TRIES {
            let Some(record) = self.registrar.load(shared, key).await? else { return Ok(()) };
            let plan = self.plan_of(&record)?;
            if !plan.is_expired(shared.clock.wall_ms()) {
                return Ok(());
            }
            self.keep_bare(shared, key).await?;
            let view = View::Salted(plan.clone(), (record.version, record.nonce), Tick::ZERO);
            let Some(found) = self.sum_by(shared, key, &view, &Parts::default()).await? else {
                continue;
            };
            let next = plan.expired(found.total.sum).ok_or_else(overflow)?;
            if self.put(shared, key, Some(&record), &next).await? {
                count(&self.tallies.expired, 1);
                // Others know the time as well.
                drop(self.tell(shared, key).await);
                return Ok(());
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "the counter changes faster than it can be read"))
    }
}
