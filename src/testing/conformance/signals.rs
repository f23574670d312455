//! Publishing, replicas, placement.

use super::optional::clean;
use super::{Cx, Seen, ok, same};
use crate::store::{Delivery, Store};
use bytes::Bytes;
use std::time::Duration;

pub(super) async fn publish_order<S: Store>(cx: Cx<S>) -> Seen {
    let (channel, other) = (cx.key("order"), cx.key("order2"));
    let mut sub = ok("subscribe", cx.store.subscribe(&channel).await)?;
    ok("publish", cx.store.publish(&other, "not mine".into()).await)?;
    for i in 0..20u8 {
        ok("publish", cx.store.publish(&channel, vec![i, 0, 255].into()).await)?;
    }
    for i in 0..20u8 {
        let want = Some(Delivery::Message(vec![i, 0, 255].into()));
        same("delivery", &sub.next().await, &want)?;
    }
    Ok(())
}

pub(super) async fn publish_all<S: Store>(cx: Cx<S>) -> Seen {
    let channel = cx.key("all");
    let mut first = ok("subscribe", cx.store.subscribe(&channel).await)?;
    ok("publish", cx.store.publish(&channel, "1".into()).await)?;
    same("first", &first.next().await, &Some(Delivery::Message("1".into())))?;
    let mut second = ok("subscribe", cx.store.subscribe(&channel).await)?;
    ok("publish", cx.store.publish(&channel, "2".into()).await)?;
    for sub in [&mut first, &mut second] {
        same("both", &sub.next().await, &Some(Delivery::Message("2".into())))?;
    }
    drop(first);
    ok("publish to one that left", cx.store.publish(&channel, "3".into()).await)?;
    same("second", &second.next().await, &Some(Delivery::Message("3".into())))
}

pub(super) async fn publish_cancel<S: Store>(cx: Cx<S>) -> Seen {
    let channel = cx.key("cancel");
    let mut sub = ok("subscribe", cx.store.subscribe(&channel).await)?;
    for i in 0..10 {
        let waker = std::future::poll_fn(|cx| std::task::Poll::Ready(cx.waker().clone())).await;
        let pending =
            sub.next().as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending();
        same("nothing yet", &pending, &true)?;
        let message = Bytes::from(i.to_string());
        ok("publish", cx.store.publish(&channel, message.clone()).await)?;
        same("delivery", &sub.next().await, &Some(Delivery::Message(message)))?;
    }
    Ok(())
}

pub(super) async fn replica_catches_up<S: Store>(cx: Cx<S>) -> Seen {
    let key = cx.key("catches-up");
    ok("put", cx.store.put(&key, "x".into(), None).await)?;
    for _ in 0..100 {
        // A replica that cannot be reached yet is no broken promise; one that never can be is.
        if let Ok(Some(got)) = cx.store.get_replica(&key).await {
            clean(&cx, &key).await;
            return same("get_replica", &got.bytes, &"x".into());
        }
        cx.sleep(Duration::from_millis(50)).await;
    }
    Err("no replica showed the value within 5 s".into())
}

pub(super) async fn shard_stable<S: Store>(cx: Cx<S>) -> Seen {
    for i in 0..100 {
        let key = cx.key(&i.to_string());
        let shard = cx.store.shard_of(&key).ok_or("shard_of has no answer")?;
        ok("add", cx.store.add(&key, 1).await)?;
        same("shard_of", &cx.store.shard_of(&key), &Some(shard))?;
        clean(&cx, &key).await;
    }
    Ok(())
}
