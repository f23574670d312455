//! Units taken by holds: never more than there are, each hold once, each end once.

use super::optional::clean;
use super::{Cx, Seen, ok, same};
use crate::Error;
use crate::error::Result;
use crate::key::Key;
use crate::store::{End, Ended, Hold, Holds, Store, Take};
use std::collections::BTreeMap;

pub(super) async fn take_short<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("short");
    let empty = ok("take", cx.store.take(&key, 1, &cx.id("h0")).await)?;
    same("of an absent stock", &empty, &Take::Short { left: 0 })?;
    ok("put", cx.store.put(&key, "5".into(), None).await)?;
    for (hold, amount, want) in [
        ("h1", 3, Take::Taken { left: 2 }),
        ("h2", 3, Take::Short { left: 2 }),
        ("h3", u64::MAX, Take::Short { left: 2 }),
        ("h4", 2, Take::Taken { left: 0 }),
        ("h5", 1, Take::Short { left: 0 }),
    ] {
        let got = ok("take", cx.store.take(&key, amount, &cx.id(hold)).await)?;
        same("take", &got, &want)?;
    }
    same("get", &cx.bytes(&key).await?, &Some("0".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn take_hold<S: Store>(cx: Cx<S>) -> Seen {
    let (key, hold) = (cx.key("hold"), cx.id("h"));
    ok("put", cx.store.put(&key, "5".into(), None).await)?;
    for _ in 0..3 {
        let got = ok("take", cx.store.take(&key, 3, &hold).await)?;
        same("take", &got, &Take::Taken { left: 2 })?;
    }
    same("get", &cx.bytes(&key).await?, &Some("2".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn end_once<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("end");
    let (a, b) = (cx.id("a"), cx.id("b"));
    ok("put", cx.store.put(&key, "5".into(), None).await)?;
    let never = ok("end_hold", cx.store.end_hold(&key, &a, End::Sold).await)?;
    same("selling without a hold", &never, &Ended::Never)?;
    ok("take", cx.store.take(&key, 2, &a).await)?;
    ok("take", cx.store.take(&key, 1, &b).await)?;
    for (hold, end, want) in [
        (&a, End::Back, Ended::Now { amount: 2 }),
        (&a, End::Back, Ended::Before { end: End::Back, amount: 2 }),
        (&a, End::Sold, Ended::Before { end: End::Back, amount: 2 }),
        (&b, End::Sold, Ended::Now { amount: 1 }),
        (&b, End::Back, Ended::Before { end: End::Sold, amount: 1 }),
    ] {
        same("end_hold", &ok("end_hold", cx.store.end_hold(&key, hold, end).await)?, &want)?;
    }
    same("get", &cx.bytes(&key).await?, &Some("4".into()))?;
    let sold = ok("take", cx.store.take(&key, 1, &b).await)?;
    same("take of a hold that is sold", &sold, &Take::Taken { left: 2 })?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn end_bars<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("bar");
    let (early, late) = (cx.id("early"), cx.id("late"));
    ok("put", cx.store.put(&key, "5".into(), None).await)?;
    ok("take", cx.store.take(&key, 3, &early).await)?;
    for (hold, amount) in [(&early, 3), (&late, 0)] {
        let ended = ok("end_hold", cx.store.end_hold(&key, hold, End::Back).await)?;
        same("end_hold", &ended, &Ended::Now { amount })?;
        let got = ok("take", cx.store.take(&key, 1, hold).await)?;
        same("take after it", &got, &Take::Ended { amount })?;
    }
    same("get", &cx.bytes(&key).await?, &Some("5".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn holds_all<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("all");
    same("holds of an absent stock", &all(&cx, &key).await?.len(), &0)?;
    ok("put", cx.store.put(&key, "5000".into(), None).await)?;
    let mut want = BTreeMap::new();
    for n in 0..700u64 {
        let id = cx.id(&format!("h{n}"));
        ok("take", cx.store.take(&key, n % 3 + 1, &id).await)?;
        let ended = [None, Some(End::Sold), Some(End::Back)][n as usize % 3];
        if let Some(end) = ended {
            ok("end_hold", cx.store.end_hold(&key, &id, end).await)?;
        }
        want.insert(id.name, (n % 3 + 1, ended));
    }
    let told = all(&cx, &key).await?.into_iter().map(|h| (h.id, (h.amount, h.ended))).collect();
    same("holds", &told, &want)?;
    clean(&cx, &key).await;
    Ok(())
}

/// Every hold under `key`, some of them possibly twice.
pub(super) async fn all<S: Store>(cx: &Cx<S>, key: &Key) -> std::result::Result<Vec<Hold>, String> {
    let (mut told, mut page) = (Vec::new(), None);
    for _ in 0..1_000 {
        let Holds { page: found, next } = ok("holds", cx.store.holds(key, page).await)?;
        told.extend(found);
        page = next;
        if page.is_none() {
            return Ok(told);
        }
    }
    Err("the walk has no end".into())
}

pub(super) async fn take_race<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("race");
    ok("put", cx.store.put(&key, "10".into(), None).await)?;
    let of = key.clone();
    let takes = cx
        .together(8, move |cx, i| {
            let key = of.clone();
            async move {
                let mut taken = 0;
                for n in 0..4 {
                    let hold = cx.id(&format!("r{i}.{n}"));
                    let got = cx.store.take(&key, 1, &hold).await?;
                    taken += usize::from(matches!(got, Take::Taken { .. }));
                }
                Ok(taken)
            }
        })
        .await?;
    let taken = ok("take", takes.into_iter().sum::<Result<usize, Error>>())?;
    clean(&cx, &key).await;
    same("units taken", &taken, &10)
}
