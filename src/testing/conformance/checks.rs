//! The required operations.

use super::{Cx, Report, Seen, ok, refused, same};
use crate::store::Store;
use crate::{ErrorKind, Key};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

pub(super) async fn run<S: Store>(cx: &Cx<S>, report: &mut Report) {
    checks!(report, cx, "get":
        "an absent key is none" => absent,
        "the latest put wins" => latest,
        "an empty value is a value" => empty_value,
        "a value of 1 MiB comes back whole" => large,
        "keys and values may hold any byte" => binary,
    );
    checks!(report, cx, "get_many":
        "one result per key, in order, absent ones too" => many_in_order,
        "a key asked for twice is answered twice" => many_twice,
        "an empty batch is an empty answer" => many_empty,
        "500 keys come back in order" => many_large,
    );
    checks!(report, cx, "put":
        "a value with a ttl expires, and not early" => expires,
        "a put without ttl ends the old expiry" => ttl_cleared,
    );
    checks!(report, cx, "delete_many":
        "says of each key whether it was there" => delete_says,
        "a deleted key is absent and can be put again" => delete_put,
    );
    checks!(report, cx, "add":
        "an absent key counts as zero" => add_absent,
        "negative amounts and zero" => add_negative,
        "the total reads back as decimal digits" => add_digits,
        "adds to digits that were put" => add_to_put,
        "an overflow changes nothing" => add_overflow,
        "a value that is no number is refused and kept" => add_wrong_type,
        "concurrent adds are all counted, each total seen once" => add_concurrent,
    );
    checks!(report, cx, "cancel":
        "dropped calls leave the store usable" => dropped_calls,
    );
}

async fn clean<S: Store>(cx: &Cx<S>, keys: &[Key]) {
    drop(cx.store.delete_many(keys).await);
}

async fn absent<S: Store>(cx: Cx<S>) -> Seen {
    same("get", &cx.bytes(&cx.key("nobody")).await?, &None)
}

async fn latest<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("latest");
    for value in ["1", "two", "3"] {
        ok("put", cx.store.put(&key, value.into(), None).await)?;
        same("get", &cx.bytes(&key).await?, &Some(value.into()))?;
    }
    clean(&cx, &[key]).await;
    Ok(())
}

async fn empty_value<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("empty");
    ok("put", cx.store.put(&key, Bytes::new(), None).await)?;
    same("get", &cx.bytes(&key).await?, &Some(Bytes::new()))?;
    clean(&cx, &[key]).await;
    Ok(())
}

/// A store with a smaller limit passes when it says so and keeps nothing.
async fn large<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("large");
    let value: Bytes = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect::<Vec<u8>>().into();
    match cx.store.put(&key, value.clone(), None).await {
        Err(e) if e.kind() == ErrorKind::Limit => {
            return same("get after Limit", &cx.bytes(&key).await?, &None);
        }
        put => ok("put", put)?,
    }
    let whole = cx.bytes(&key).await? == Some(value);
    same("the bytes are equal", &whole, &true)?;
    clean(&cx, &[key]).await;
    Ok(())
}

async fn binary<S: Store>(cx: Cx<S>) -> Seen {
    let mut name = cx.key("binary").to_vec();
    name.extend(0..=255u8);
    let (key, longer) = (Key::copy(&name), Key::copy(&[&name[..], b"\0"].concat()));
    let value = Bytes::from((0..=255u8).rev().collect::<Vec<u8>>());
    ok("put", cx.store.put(&key, value.clone(), None).await)?;
    ok("put", cx.store.put(&longer, "other".into(), None).await)?;
    same("get", &cx.bytes(&key).await?, &Some(value))?;
    clean(&cx, &[key, longer]).await;
    Ok(())
}

async fn many_in_order<S: Store>(cx: Cx<S>) -> Seen {
    let keys: Vec<Key> = (0..9).map(|i| cx.key(&format!("order{i}"))).collect();
    for (i, key) in keys.iter().enumerate().filter(|(i, _)| i % 3 != 1) {
        ok("put", cx.store.put(key, i.to_string().into(), None).await)?;
    }
    let got = cx.store.get_many(&keys).await;
    same("results", &got.len(), &9)?;
    for (i, one) in got.into_iter().enumerate() {
        let want = (i % 3 != 1).then(|| Bytes::from(i.to_string()));
        same("a result", &ok("get_many", one)?.map(|s| s.bytes), &want)?;
    }
    clean(&cx, &keys).await;
    Ok(())
}

async fn many_twice<S: Store>(cx: Cx<S>) -> Seen {
    let (a, b) = (cx.key("a"), cx.key("b"));
    ok("put", cx.store.put(&a, "a".into(), None).await)?;
    let got = cx.store.get_many(&[a.clone(), b.clone(), a.clone(), b]).await;
    let mut bytes = Vec::new();
    for one in got {
        bytes.push(ok("get_many", one)?.map(|s| s.bytes));
    }
    let (some, none) = (Some(Bytes::from("a")), None);
    same("results", &bytes, &vec![some.clone(), none.clone(), some, none])?;
    clean(&cx, &[a]).await;
    Ok(())
}

async fn many_empty<S: Store>(cx: Cx<S>) -> Seen {
    same("get_many", &cx.store.get_many(&[]).await.len(), &0)?;
    same("delete_many", &cx.store.delete_many(&[]).await.len(), &0)
}

async fn many_large<S: Store>(cx: Cx<S>) -> Seen {
    let keys: Vec<Key> = (0..500).map(|i| cx.key(&format!("large{i}"))).collect();
    for (i, key) in keys.iter().enumerate() {
        ok("put", cx.store.put(key, i.to_string().into(), None).await)?;
    }
    for (i, one) in cx.store.get_many(&keys).await.into_iter().enumerate() {
        let bytes = ok("get_many", one)?.map(|s| s.bytes);
        same("a result", &bytes, &Some(i.to_string().into()))?;
    }
    let gone = cx.store.delete_many(&keys).await;
    same("deleted", &gone.iter().filter(|r| matches!(r, Ok(true))).count(), &500)
}

async fn expires<S: Store>(cx: Cx<S>) -> Seen {
    let (key, ttl) = (cx.key("expires"), cx.ttl);
    let clock = cx.runtime.clock();
    let start = clock.precise();
    ok("put", cx.store.put(&key, "x".into(), Some(ttl)).await)?;
    let got = ok("get", cx.store.get(&key).await)?;
    if cx.store.capability().uncached {
        let past = ok("get_uncached", cx.store.get_uncached(&key).await)?.map(|s| s.bytes);
        if clock.precise().since(start) < ttl {
            same("get_uncached", &past, &Some("x".into()))?;
        }
        let past = cx.store.get_many_uncached(std::slice::from_ref(&key)).await.remove(0);
        let past = ok("get_many_uncached", past)?.map(|s| s.bytes);
        if clock.precise().since(start) < ttl {
            same("get_many_uncached", &past, &Some("x".into()))?;
        }
    }
    if clock.precise().since(start) < ttl {
        let Some(got) = got else { return Err("the value expired early".into()) };
        if cx.store.capability().ttl {
            let left = got.ttl_left.ok_or("ttl_left is missing")?;
            same("0 < ttl_left ≤ ttl", &(!left.is_zero() && left <= ttl), &true)?;
        }
    }
    cx.sleep(ttl + ttl / 2).await;
    same("after its ttl", &cx.bytes(&key).await?, &None)
}

async fn ttl_cleared<S: Store>(cx: Cx<S>) -> Seen {
    let (key, ttl) = (cx.key("cleared"), cx.ttl);
    ok("put", cx.store.put(&key, "x".into(), Some(ttl)).await)?;
    ok("put", cx.store.put(&key, "y".into(), None).await)?;
    let left = ok("get", cx.store.get(&key).await)?.and_then(|s| s.ttl_left);
    same("ttl_left", &left, &None)?;
    cx.sleep(ttl + ttl / 2).await;
    same("after the old ttl", &cx.bytes(&key).await?, &Some("y".into()))?;
    clean(&cx, &[key]).await;
    Ok(())
}

async fn delete_says<S: Store>(cx: Cx<S>) -> Seen {
    let keys: Vec<Key> = (0..6).map(|i| cx.key(&format!("d{i}"))).collect();
    for key in keys.iter().step_by(2) {
        ok("put", cx.store.put(key, "x".into(), None).await)?;
    }
    for (i, one) in cx.store.delete_many(&keys).await.into_iter().enumerate() {
        same("was there", &ok("delete_many", one)?, &(i % 2 == 0))?;
    }
    Ok(())
}

async fn delete_put<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("again");
    let keys = [key.clone()];
    ok("put", cx.store.put(&key, "x".into(), None).await)?;
    clean(&cx, &keys).await;
    same("get", &cx.bytes(&key).await?, &None)?;
    ok("put", cx.store.put(&key, "y".into(), None).await)?;
    same("get", &cx.bytes(&key).await?, &Some("y".into()))?;
    clean(&cx, &keys).await;
    Ok(())
}

async fn add_absent<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("absent");
    same("add 5", &ok("add", cx.store.add(&key, 5).await)?, &5)?;
    same("add 2", &ok("add", cx.store.add(&key, 2).await)?, &7)?;
    clean(&cx, &[key]).await;
    Ok(())
}

async fn add_negative<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("negative");
    for (amount, want) in [(-3, -3), (0, -3), (i64::MIN + 3, i64::MIN), (i64::MAX, -1)] {
        same("total", &ok("add", cx.store.add(&key, amount).await)?, &want)?;
    }
    clean(&cx, &[key]).await;
    Ok(())
}

async fn add_digits<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("digits");
    ok("add", cx.store.add(&key, -1234).await)?;
    same("get", &cx.bytes(&key).await?, &Some("-1234".into()))?;
    clean(&cx, &[key]).await;
    Ok(())
}

async fn add_to_put<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("put");
    ok("put", cx.store.put(&key, "40".into(), None).await)?;
    same("total", &ok("add", cx.store.add(&key, 2).await)?, &42)?;
    clean(&cx, &[key]).await;
    Ok(())
}

async fn add_overflow<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("overflow");
    ok("add", cx.store.add(&key, i64::MAX).await)?;
    refused("add 1", cx.store.add(&key, 1).await, ErrorKind::Overflow)?;
    same("get", &cx.bytes(&key).await?, &Some(i64::MAX.to_string().into()))?;
    clean(&cx, &[key]).await;
    Ok(())
}

async fn add_wrong_type<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("wrong");
    for value in ["hello", "1.5", "12x"] {
        ok("put", cx.store.put(&key, value.into(), None).await)?;
        refused("add", cx.store.add(&key, 1).await, ErrorKind::WrongType)?;
        same("get", &cx.bytes(&key).await?, &Some(value.into()))?;
    }
    clean(&cx, &[key]).await;
    Ok(())
}

async fn add_concurrent<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("concurrent");
    let of = key.clone();
    let totals = cx
        .together(8, move |cx, _| {
            let key = of.clone();
            async move {
                let mut totals = Vec::new();
                for _ in 0..25 {
                    totals.push(cx.store.add(&key, 1).await);
                }
                totals
            }
        })
        .await?;
    let mut seen = BTreeSet::new();
    for total in totals.into_iter().flatten() {
        seen.insert(ok("add", total)?);
    }
    same("the totals", &seen, &(1..=200).collect())?;
    same("get", &cx.bytes(&key).await?, &Some("200".into()))?;
    clean(&cx, &[key]).await;
    Ok(())
}

/// Drops calls unpolled and after one poll; then a call must still find its own answer.
async fn dropped_calls<S: Store>(cx: Cx<S>) -> Seen {
    let (key, other) = (cx.key("mine"), cx.key("other"));
    ok("put", cx.store.put(&key, "mine".into(), None).await)?;
    ok("put", cx.store.put(&other, "other".into(), None).await)?;
    for _ in 0..50 {
        drop(cx.store.get(&other));
        // The waker must be a real one: some clients start their work on the first wake.
        let waker = std::future::poll_fn(|cx| std::task::Poll::Ready(cx.waker().clone())).await;
        poll_once(cx.store.get(&other), &waker);
        poll_once(cx.store.add(&cx.key("n"), 1), &waker);
        same("get", &cx.bytes(&key).await?, &Some("mine".into()))?;
    }
    cx.sleep(Duration::from_millis(50)).await;
    clean(&cx, &[key, other, cx.key("n")]).await;
    Ok(())
}

fn poll_once<T>(future: impl Future<Output = T>, waker: &Waker) {
    let _ = pin!(future).poll(&mut Context::from_waker(waker)).is_ready();
}
