//! One look at all buckets, shared by all who want one at the time.

use super::{Stock, no_stock};
use crate::counter::Sum;
use crate::engine::control::stock::Work;
use crate::engine::data::probe::Picture;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::read::From;
use crate::shared::Loaded;
use crate::store::Stored;
use crate::value::Value;
use std::time::Duration;

/// Between two looks at all buckets: a row has more to do than to be looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// By default a number of units left is this old at most.
const REMAINING_TTL: Duration = Duration::from_secs(1);

impl Stock {
    /// All buckets, at most `max_age` old, by one load that all who ask meanwhile share; and when
    /// that began.
    pub(super) async fn look(&self, max_age: Duration) -> Result<(Picture, Value)> {
        self.names().await?;
        let (shared, core) = (self.shared().clone(), self.core.clone());
        let name = core.kind.look().of(&core.key);
        let from = From::loader(|| async move {
            let ended = core.known.lock().as_ref().map_or(Tick::ZERO, |k| k.looked);
            let since = shared.clock.precise().since(ended);
            if since < LOOK_EVERY {
                shared.runtime.sleep(LOOK_EVERY - since).await;
            }
            let record = core.kind.record().of(&core.key);
            let before = core.learn(shared.store.clone().get(record.clone()).await?)?;
            let names = core.known.lock().as_ref().map(|k| k.names.clone());
            let Some((names, (_, before))) = names.zip(before) else {
                return Err(no_stock(&core.key));
            };
            let buckets = core.kind.levels(&shared, &names).await;
            let after = core.learn(shared.store.clone().get(record).await?)?;
            let still = before.work == Work::None
                && after.is_some_and(|(_, r)| (r.epoch, r.seed) == (before.epoch, before.seed));
            let mut text = format!("{} {}", u8::from(still), before.epoch);
            for (name, bucket) in names.iter().zip(buckets) {
                let level = match bucket? {
                    Some(level) => level,
                    None if matches!(before.work, Work::Fill(_)) => 0,
                    None => {
                        let text = "a bucket of the stock is gone: the store has lost it";
                        return Err(Error::not_applied(ErrorKind::Store, text).with_key(name));
                    }
                };
                text = format!("{text} {level}");
            }
            if let Some(known) = core.known.lock().as_mut() {
                known.looked = shared.clock.precise();
            }
            let stored = Some(Stored::new(text));
            Ok(Loaded { stored, by_loader: true, uncached: false, decoded: None })
        });
        let hash = self.shared().hash(&name);
        // A look is a part of the call that needs it, and of all that wait for one.
        let from = From::Paid(Box::new(from));
        let value = self.hs.join_or_lead((hash, name), Some(max_age), from, 0).await;
        let value = value.map_err(|e| e.with_key(&self.core.key))?;
        let mut words = std::str::from_utf8(&value).unwrap_or_default().split(' ');
        let still = words.next() == Some("1");
        let epoch = words.next().and_then(|w| w.parse().ok()).unwrap_or(0);
        let levels = words.map_while(|w| w.parse().ok()).collect();
        Ok((Picture { still, epoch, levels }, value))
    }

    /// Units that can be taken, at most a second old.
    ///
    /// # Staleness
    /// Between [`Sum::age`] before the call's end and that end. Units between buckets are missing.
    ///
    /// # Cost
    /// Store operations: 0 while the last count is young enough, else 2 and one per bucket, shared
    /// by all who wait.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`](crate::Heatsink::get).
    ///
    /// # Errors
    /// As [`Heatsink::get`](crate::Heatsink::get); [`Config`](ErrorKind::Config): there is no such stock.
    pub async fn remaining(&self) -> Result<Sum> {
        self.remaining_with(REMAINING_TTL).await
    }

    /// Like [`remaining`](Stock::remaining), at most `max_age` old; zero asks after the call.
    ///
    /// # Cancel safety
    /// As [`Heatsink::get`](crate::Heatsink::get).
    ///
    /// # Errors
    /// As [`remaining`](Stock::remaining).
    pub async fn remaining_with(&self, max_age: Duration) -> Result<Sum> {
        let (picture, value) = self.look(max_age).await?;
        Ok(Sum::new(picture.levels.iter().sum(), value.age()))
    }
}
