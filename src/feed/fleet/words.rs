//! What operators have ordered in a whole fleet: one small document in the store, with a version.
//!
//! Any host's relay changes it by compare-and-set; the aggregator reads it, and puts what it says
//! on the list, which everybody obeys already. So an order holds where the fleet's list is in
//! force, and no longer than its own time, on whichever host it was given.

use crate::engine::control::orders::Orders;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::feed::order::{Order, Stored};
use crate::feed::wire::{WireKey, ms};
use crate::key::Key;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Orders to treat a key, and denials, that a fleet keeps, each.
const ORDERS_MAX: usize = 1_024;

/// A longer document is not read.
const BYTES_MAX: usize = 2 << 20;

/// How long an order lasts that does not say so, and at most.
const LASTS: Duration = Duration::from_secs(24 * 3_600);
const LASTS_MAX: Duration = Duration::from_secs(7 * 24 * 3_600);

/// The document outlives every order in it.
pub(super) const STORED_FOR: Duration = Duration::from_secs(8 * 24 * 3_600);

/// See the module's description.
#[derive(Serialize, Deserialize, Default, Debug)]
pub(super) struct Words {
    pub(super) version: u64,
    #[serde(default)]
    treat: Vec<(WireKey, Stored)>,
    #[serde(default)]
    deny: Vec<(WireKey, Stored)>,
}

impl Words {
    /// What is in the store; an empty document where there is none.
    ///
    /// # Errors
    /// [`Codec`](ErrorKind::Codec) for what is no such document.
    pub(super) fn read(value: Option<&[u8]>) -> Result<Words> {
        let Some(value) = value else { return Ok(Words::default()) };
        let read = if value.len() <= BYTES_MAX { serde_json::from_slice(value).ok() } else { None };
        let sound = |words: &Words| words.treat.len().max(words.deny.len()) <= ORDERS_MAX;
        read.filter(sound).ok_or_else(|| {
            Error::not_applied(ErrorKind::Codec, "what the fleet's operators ordered is unreadable")
        })
    }

    pub(super) fn write(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Follows `order`; whether there was something to take back.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit) when there is no room.
    pub(super) fn follow(
        &mut self,
        wall_ms: u64,
        skew: Duration,
        key: &Key,
        order: &Order,
    ) -> Result<bool> {
        // Others' orders ended by their clocks.
        let over = wall_ms.saturating_sub(ms(skew));
        for of in [&mut self.treat, &mut self.deny] {
            of.retain(|(_, stored)| stored.until_ms > over);
        }
        let of = if order.is_about_denial() { &mut self.deny } else { &mut self.treat };
        let before = of.len();
        of.retain(|(known, _)| known.0 != key.as_bytes());
        let was = of.len() < before;
        let lasts = order.span().unwrap_or(LASTS).min(LASTS_MAX);
        let until_ms = wall_ms.saturating_add(lasts.as_millis() as u64);
        let Some(stored) = order.stored(wall_ms, until_ms) else { return Ok(was) };
        if of.len() >= ORDERS_MAX {
            return Err(Error::not_applied(
                ErrorKind::Limit,
                "no more room for the fleet's orders",
            ));
        }
        of.push((WireKey(key.to_vec()), stored));
        Ok(true)
    }

    /// The orders as they stand at `now`, which is `wall_ms`.
    pub(super) fn orders(&self, now: Tick, wall_ms: u64) -> Orders {
        let mut orders = Orders::new(ORDERS_MAX);
        let alive = |stored: &Stored| {
            let most = wall_ms.saturating_add(2 * LASTS_MAX.as_millis() as u64);
            stored.until_ms > wall_ms && stored.until_ms < most
        };
        for (key, stored) in self.treat.iter().filter(|(_, stored)| alive(stored)) {
            if let Some(treat) = stored.treat(now, wall_ms) {
                orders.treat(Key::copy(&key.0), treat);
            }
        }
        for (key, stored) in self.deny.iter().filter(|(_, stored)| alive(stored)) {
            orders.deny(Key::copy(&key.0), Some(stored.until(now, wall_ms)));
        }
        orders
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::control::treat::Treatment;

    const SKEW: Duration = Duration::from_secs(60);

    #[test]
    fn an_order_is_not_swept_away_by_a_clock_that_is_a_little_ahead() {
        let (wall, mut words) = (1_796_061_600_000, Words::default());
        let short = Order::pin().lasts(Duration::from_secs(30));
        words.follow(wall, SKEW, &"a".into(), &short).unwrap();
        words.follow(wall + 80_000, SKEW, &"b".into(), &Order::pin()).unwrap();
        assert!(words.orders(Tick(1 << 50), wall).get(&"a".into()).is_some());
        words.follow(wall + 95_000, SKEW, &"c".into(), &Order::pin()).unwrap();
        assert!(words.orders(Tick(1 << 50), wall).get(&"a".into()).is_none());
    }

    #[test]
    fn an_order_reads_back_until_it_ends_and_what_is_unreadable_is_an_error() {
        let (now, wall, key) = (Tick(1 << 50), 1_796_061_600_000, Key::from("a"));
        let mut words = Words::default();
        let salt = Order::set(Treatment::Salt { slots: 8 }).lasts(Duration::from_secs(9));
        assert!(words.follow(wall, SKEW, &key, &salt).unwrap());
        assert!(words.follow(wall, SKEW, &"x".into(), &Order::deny()).unwrap());
        let words = Words::read(Some(&words.write())).unwrap();
        let orders = words.orders(now, wall + 1_000);
        let treat = orders.get(&key).unwrap();
        assert_eq!(treat.treatment, Treatment::Salt { slots: 8 });
        assert_eq!(treat.since, now.before(Duration::from_secs(1)));
        assert_eq!(treat.until, Some(now.after(Duration::from_secs(8))));
        assert!(orders.denies(&"x".into()));
        let later = words.orders(now, wall + 9_000);
        assert!(later.get(&key).is_none() && later.denies(&"x".into()));
        let week = LASTS_MAX.as_millis() as u64;
        assert!(
            !words.orders(now, wall + week).denies(&"x".into()),
            "a day, since nothing was said"
        );
        let many = format!("{{\"version\":1,\"deny\":[{}]}}", vec!["[\"k\",{}]"; 1_025].join(","));
        for text in ["", "[]", "{\"version\":-1}", &many] {
            assert!(Words::read(Some(text.as_bytes())).is_err(), "{text:.40}");
        }
    }

    #[test]
    fn no_more_orders_are_kept_than_there_is_room_for() {
        let mut words = Words::default();
        for i in 0..ORDERS_MAX {
            words.follow(1, SKEW, &format!("k{i}").into(), &Order::pin()).unwrap();
        }
        assert!(words.follow(1, SKEW, &"one more".into(), &Order::pin()).is_err());
        assert!(words.follow(1, SKEW, &"k1".into(), &Order::unpin()).unwrap());
        assert!(!words.follow(1, SKEW, &"k1".into(), &Order::unpin()).unwrap());
        assert!(words.follow(1, SKEW, &"one more".into(), &Order::pin()).unwrap());
        assert!(words.write().len() < BYTES_MAX);
    }
}
