//! Dropping any future at any await loses nothing and hangs nobody.
//!
//! Each scenario is polled by hand, with virtual time moved one step between polls, and dropped
//! after 0, 1, 2, … polls until it ends by itself: so every await of it is met. After each drop
//! somebody else reads and writes the same key, and nothing may be left behind.

mod common;

use common::{Rig, Source, bytes_of};
use heatsink::runtime::BoxFuture;
use heatsink::{Read, Text};
use std::future::Future;
use std::task::{Context, Waker};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

type Scenario = fn(Rig, Source) -> BoxFuture<'static, ()>;

/// Drops `scenario` after each possible number of polls; returns how many there were.
fn at_every_await(scenario: Scenario) -> usize {
    for polls in 0.. {
        let rig = Rig::slow(polls as u64, 3 * MS);
        let source = Source::new(&rig.rt, 5 * MS);
        let (hs, rt) = (rig.hs.clone(), rig.rt.clone());
        // Somebody else waits for the same key meanwhile.
        let mut future = scenario(rig, source.clone());
        let mut ended = false;
        for at in 0..polls {
            let mut cx = Context::from_waker(Waker::noop());
            ended = future.as_mut().poll(&mut cx).is_ready();
            if ended {
                break;
            }
            if at == 0 {
                let (hs, source) = (hs.clone(), source.clone());
                rt.spawn(async move { drop(hs.load("k", source.loader()).await) });
            }
            rt.run_for(MS);
        }
        drop(future);
        // Past every load and every quarantine: nothing under way, and the key is as good as new.
        rt.run_for(Duration::from_secs(11));
        assert_eq!(hs.stats().keys_under_way, 0, "left behind after {polls} polls");
        rt.block_on(async {
            hs.put("k", "after").await.expect("a put of a store without faults");
            assert_eq!(bytes_of(hs.get("k").await), "after");
        });
        assert!(hs.try_read_with("k", |_| ()).is_some(), "cacheable again");
        if ended {
            return polls;
        }
    }
    unreachable!("the loop ends when the scenario does")
}

#[test]
fn a_get_may_be_dropped_at_every_await() {
    let polls =
        at_every_await(|rig, _| Box::pin(async move { drop(rig.hs.get("k").await.unwrap()) }));
    assert!(polls > 2, "{polls} polls");
}

#[test]
fn a_load_may_be_dropped_at_every_await() {
    let polls = at_every_await(|rig, source| {
        Box::pin(async move { drop(rig.hs.load("k", source.loader()).await.unwrap()) })
    });
    assert!(polls > 4, "{polls} polls");
}

#[test]
fn a_read_with_a_deadline_may_be_dropped_at_every_await() {
    let polls = at_every_await(|rig, source| {
        Box::pin(async move {
            let read = Read::latest().deadline(4 * MS);
            drop(rig.hs.load_with("k", read, source.loader()).await);
        })
    });
    assert!(polls > 3, "{polls} polls");
}

#[test]
fn a_get_many_may_be_dropped_at_every_await() {
    let polls = at_every_await(|rig, _| {
        Box::pin(async move {
            let all = rig.hs.get_many(["k", "l", "k", "m"]).await;
            assert_eq!(all.len(), 4);
        })
    });
    assert!(polls > 2, "{polls} polls");
}

#[test]
fn a_put_may_be_dropped_at_every_await() {
    let polls =
        at_every_await(|rig, _| Box::pin(async move { rig.hs.put("k", "v").await.unwrap() }));
    assert!(polls > 2, "{polls} polls");
}

#[test]
fn a_delete_may_be_dropped_at_every_await() {
    let polls = at_every_await(|rig, _| {
        Box::pin(async move {
            let _: bool = rig.hs.delete("k").await.unwrap();
        })
    });
    assert!(polls > 2, "{polls} polls");
}

#[test]
fn a_typed_read_may_be_dropped_at_every_await() {
    let polls = at_every_await(|rig, source| {
        Box::pin(async move {
            let typed = rig.hs.typed::<String, _>(Text);
            let load = source.loader();
            drop(typed.load("k", load).await.unwrap());
            drop(typed.get("k").await.unwrap());
        })
    });
    assert!(polls > 4, "{polls} polls");
}

#[test]
fn a_dropped_put_keeps_the_key_uncacheable_as_long_as_it_may_land() {
    let rig = Rig::slow(1, 3 * MS);
    let hs = rig.hs.clone();
    let mut put = Box::pin(async move { hs.put("k", "late").await });
    assert!(put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(put);
    assert_eq!(rig.hs.stats().writes_unknown, 1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async move { drop(hs.get("k").await.unwrap()) });
    assert!(rig.hs.try_read_with("k", |_| ()).is_none());
    assert!(!rig.hs.explain("k").uncacheable_for.is_zero());
}
