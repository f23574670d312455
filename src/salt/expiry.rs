//! Counters that expire: the time is in the record, and whoever finds it over lets the counter begin
//! again before it does anything else. The bare key keeps no expiry of its own meanwhile, so that it
//! does not vanish under somebody who sums it up.

use super::totals::forget_total;
use super::{SUM_TRIES, Salted, View, count};
use crate::engine::control::registry::Record;
use crate::engine::control::salt as plan;
use crate::engine::data::joined::Op;
use crate::engine::data::sums::Parts;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::lanes::overflow;
use crate::shared::Shared;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Who waits for a counter to begin again looks this often.
const PAUSE_MAX: Duration = Duration::from_millis(8);

/// What came of an expiry: the record that is in force after it.
pub(super) type Begun = Arc<OnceLock<Result<Option<Record>>>>;

/// An expiry under way; its end, in whatever way, lets the next begin.
struct Beginning {
    shared: Arc<Shared>,
    key: Key,
    begun: Begun,
}

impl Drop for Beginning {
    fn drop(&mut self) {
        let text = "the task that lets the counter begin again was dropped";
        let _ = self.begun.set(Err(Error::not_applied(ErrorKind::Store, text)));
        if let Some(salted) = &self.shared.salted {
            let gone = salted.expiring.lock().remove(&self.key);
            drop(gone);
        }
    }
}

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

    /// The bare key of a counter that expires soon is to stay. Before that, whoever adds to it may
    /// change it faster than it can be replaced, and nothing waits for it.
    pub(super) async fn keep_bare_if_near(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        plan: &plan::Salt,
    ) -> Result<()> {
        let Some(at) = plan.expires else { return Ok(()) };
        let left = Duration::from_millis(at.saturating_sub(shared.clock.wall_ms()));
        if left >= 2 * self.options.lease {
            return Ok(());
        }
        self.keep_bare(shared, key).await
    }

    /// Lets a counter begin again whose time is over, unless somebody has done so: once at a time,
    /// whoever asks meanwhile. What it comes to is as of [`begin_again`](Salted::begin_again).
    pub(super) async fn expire(&self, shared: &Arc<Shared>, key: &Key) -> Result<Option<Record>> {
        let (begun, leads) = {
            let mut all = self.expiring.lock();
            match all.get(key) {
                Some(begun) => (begun.clone(), false),
                None => (all.entry(key.clone()).or_default().clone(), true),
            }
        };
        if leads {
            let own = Beginning { shared: shared.clone(), key: key.clone(), begun: begun.clone() };
            let runtime = shared.runtime.clone();
            runtime.spawn(Box::pin(async move {
                if let Some(salted) = &own.shared.salted {
                    let answer = salted.begin_again(&own.shared, &own.key).await;
                    forget_total(&own.shared, &own.key);
                    let _ = own.begun.set(answer);
                }
                drop(own);
            }));
        }
        let until = shared.clock.now().after(shared.options.loads.timeout);
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(answer) = begun.get() {
                // Of the caller's own call nothing was sent.
                return answer.clone().map_err(|e| e.with_outcome(Outcome::NotApplied));
            }
            if shared.clock.now() >= until {
                let text = "the counter expires, and did not begin again in time";
                return Err(Error::not_applied(ErrorKind::Timeout, text).with_key(key));
            }
            shared.runtime.sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// Lets a counter begin again. The record that
    /// is in force then, which may be older than the one that is known here: a registry may lose a
    /// change, or all of them.
    async fn begin_again(&self, shared: &Arc<Shared>, key: &Key) -> Result<Option<Record>> {
        for _ in 0..SUM_TRIES {
            let Some(record) = self.registrar.load(shared, key).await? else { return Ok(None) };
            let plan = self.plan_of(&record)?;
            if !plan.is_expired(shared.clock.wall_ms()) {
                return Ok(Some(record));
            }
            self.keep_bare(shared, key).await?;
            let view = View::Salted(plan.clone(), (record.version, record.nonce), Tick::ZERO);
            let Some(found) = self.sum_by(shared, key, &view, &Parts::default()).await? else {
                continue;
            };
            let next = plan.expired(found.total.sum).ok_or_else(overflow)?;
            if self.put(shared, key, Some(&record), &next).await? {
                count(&self.tallies.expired, 1);
                self.drop_total(shared, key).await;
                // Others know the time as well.
                drop(self.tell(shared, key).await);
                // It is loaded, and nothing is left to do.
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "the counter changes faster than it can be read"))
    }
}
