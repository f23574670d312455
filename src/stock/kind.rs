//! What lies in the buckets: units of a stock, tokens in lists, or the parts of a balance. Here the
//! store is asked for them; what each answer means does not depend on it.

use super::unreadable;
use crate::counter::integer;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::lanes::ask;
use crate::names::Part;
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use crate::store::{Capability, Id, Popped, Stored, Take};
use bytes::Bytes;
use std::sync::Arc;

/// Tokens of one push: they travel in one command.
const BATCH: u64 = 512;

/// See the module's description.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Units,
    Tokens,
    Account,
}

impl Kind {
    /// Under which name the record is.
    pub(super) fn record(self) -> Part {
        match self {
            Kind::Units => Part::Stock,
            Kind::Tokens => Part::Tokens,
            Kind::Account => Part::Account,
        }
    }

    /// Under which name looks at it are shared.
    pub(super) fn look(self) -> Part {
        match self {
            Kind::Units => Part::StockLook,
            Kind::Tokens => Part::TokensLook,
            Kind::Account => Part::AccountLook,
        }
    }

    /// Where bucket `bucket` of `key` is.
    pub(super) fn bucket(self, key: &Key, seed: u64, bucket: usize) -> Key {
        let part = match self {
            Kind::Units => Part::Bucket { seed, bucket },
            Kind::Tokens => Part::List { seed, bucket },
            Kind::Account => Part::Stripe { seed, bucket },
        };
        part.of(key)
    }

    /// What the store lacks for it.
    pub(super) fn lacks(self, can: Capability) -> Option<&'static str> {
        let needed = [
            (can.take, "take"),
            (can.tokens || self != Kind::Tokens, "tokens"),
            (can.add_once || self == Kind::Tokens, "add_once"),
            (can.compare_and_set, "compare_and_set"),
        ];
        needed.iter().find(|(has, _)| !has).map(|(_, lacks)| *lacks)
    }

    /// Takes from one bucket; and the token, if it is one.
    pub(super) async fn take(
        self,
        shared: &Arc<Shared>,
        name: Key,
        amount: u64,
        id: Key,
    ) -> Result<(Take, Option<Bytes>)> {
        let store = shared.store.clone();
        if self != Kind::Tokens {
            return ask(shared, store.take(name, amount, id.into())).await.map(|take| (take, None));
        }
        Ok(match ask(shared, store.pop_token(name, id.into())).await? {
            Popped::Token { token, left } => {
                let left = i64::try_from(left).unwrap_or(i64::MAX);
                (Take::Taken { left }, Some(token))
            }
            Popped::Empty => (Take::Short { left: 0 }, None),
            Popped::Ended { held } => (Take::Ended { amount: u64::from(held) }, None),
        })
    }

    /// What each bucket has; `None` where there is no such bucket.
    pub(super) async fn levels(
        self,
        shared: &Arc<Shared>,
        names: &[Key],
    ) -> Vec<Result<Option<i64>>> {
        let store = &shared.store;
        if self == Kind::Tokens {
            let count =
                |name: &Key| -> BoxFuture<'static, _> { store.clone().count_tokens(name.clone()) };
            let counts = super::work::all(names.iter().map(count).collect()).await;
            let level = |n: u64| Some(i64::try_from(n).unwrap_or(i64::MAX));
            return counts.into_iter().map(|n: Result<u64>| n.map(level)).collect();
        }
        let stored = store.clone().get_many(names.to_vec()).await;
        let level = |(name, stored): (&Key, Result<Option<Stored>>)| {
            stored?.map(|s| integer(&s.bytes).ok_or_else(|| unreadable(name))).transpose()
        };
        names.iter().zip(stored).map(level).collect()
    }
}

/// Puts the tokens with these numbers into the list `name`, each batch of them once: the first of
/// them under `id`, with its place behind it.
pub(super) async fn mint(
    shared: &Arc<Shared>,
    name: &Key,
    id: &Id,
    numbers: std::ops::Range<u64>,
) -> Result<()> {
    let (mut from, mut place) = (numbers.start, 0_u64);
    while from < numbers.end {
        let to = from.saturating_add(BATCH).min(numbers.end);
        let tokens = (from..to).map(|n| Bytes::from(n.to_string())).collect();
        let of = [id.name.as_bytes(), b".", place.to_string().as_bytes()].concat();
        let batch = Id { name: of.into(), turn: id.turn };
        let pushed = shared.store.clone().push_tokens(name.clone(), batch, tokens);
        ask(shared, pushed).await.map_err(|e: Error| e.with_key(name))?;
        (from, place) = (to, place + 1);
    }
    Ok(())
}
