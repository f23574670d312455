//! Symptoms that users of other caches have reported, each as a test that fails where it shows.
//!
//! The numbers are those of the list of 36 reports that this crate was designed against.
//!
//! Covered elsewhere, as reported: 1 by `c1_…_an_invalidation_…`, 3 by `c3_…`, 12 by `c4_…`,
//! 14 by `c9_a_load_whose_caller_dies_…`, 15 and 16 by `c7_…`, 21 by `c9_a_dead_runtime_…`,
//! 35 by `c18_…` (`contract.rs`); 34 by the properties of `Policy::ages` (`near.rs`).
//!
//! Not yet applicable: 6 and 9 (there is no feed of remote writes), 7 (no reservation is kept in
//! the store), 30 and 31 (no feed that could have a gap; what a gap must do is `c14_…`).

mod common;

use common::{Out, Rig, Source, bytes_of};
use heatsink::runtime::BoxFuture;
use heatsink::testing::SimRuntime;
use heatsink::{ErrorKind, Heatsink, NearCache, Put, Read, Text, Treatment};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

/// Fresh for 100 ms, gone after 150 ms, without jitter.
fn brief() -> NearCache {
    NearCache::new().fresh(100 * MS).stale(150 * MS).absent(50 * MS).jitter_permille(0)
}

fn cached(hs: &Heatsink) -> Option<String> {
    hs.try_read_with("k", |b| String::from_utf8_lossy(b).into_owned())
}

/// Fills `k`, lets it grow stale and starts its refresh, which takes 80 ms.
fn refreshing(near: NearCache, stale_at: Duration) -> (Rig, Source) {
    let rig = Rig::with(1, near);
    let source = Source::new(&rig.rt, 80 * MS);
    let fill = rig.spawn_load(&source);
    rig.rt.run_for(stale_at);
    assert_eq!(fill.take(), "0");
    assert_eq!(rig.spawn_load(&source).after(&rig.rt, MS), "0", "the stale value");
    assert_eq!((source.runs(), rig.hs.stats().loads_in_flight), (2, 1), "a refresh is under way");
    (rig, source)
}

/// A load of `k` that the test polls itself, so that it can be dropped.
fn by_hand(rig: &Rig, source: &Source, read: Read) -> BoxFuture<'static, heatsink::Result<String>> {
    let (hs, source) = (rig.hs.clone(), source.clone());
    Box::pin(async move {
        let value = hs.load_with("k", read, source.loader()).await?;
        Ok(String::from_utf8_lossy(&value).into_owned())
    })
}

fn is_pending<T>(future: &mut BoxFuture<'static, T>) -> bool {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

fn spawn_kind(rig: &Rig, source: &Source) -> Out<Result<String, ErrorKind>> {
    let load = by_hand(rig, source, Read::new());
    rig.spawn(async move { load.await.map_err(|e| e.kind()) })
}

/// Case 2.
#[test]
fn an_invalidation_or_a_write_voids_the_refresh_under_way() {
    for overlap in [(|hs| hs.invalidate("k")) as fn(&Heatsink), |hs| hs.writing("k").done()] {
        let (rig, source) = refreshing(NearCache::new().jitter_permille(0), 1200 * MS);
        source.set(1);
        overlap(&rig.hs);
        rig.rt.run_for(100 * MS);
        assert_eq!(cached(&rig.hs), None, "the refresh had read 0");
        assert_eq!(rig.spawn_load(&source).after(&rig.rt, 100 * MS), "1");
    }
}

/// Case 4.
#[test]
fn an_invalidation_of_an_absent_key_voids_its_refresh() {
    let (rig, source) = refreshing(brief(), 110 * MS);
    rig.rt.run_for(50 * MS);
    assert!(rig.hs.try_read_with("k", |_| ()).is_none(), "the entry is gone, its refresh is not");
    source.set(1);
    rig.hs.invalidate("k");
    rig.rt.run_for(40 * MS);
    assert_eq!(rig.hs.stats().loads_in_flight, 0, "the refresh has landed");
    assert_eq!(cached(&rig.hs), None);
    assert_eq!(rig.spawn_load(&source).after(&rig.rt, 100 * MS), "1");
}

/// Case 5.
#[test]
fn a_slow_load_does_not_clobber_a_newer_put() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let load = rig.spawn_load(&source);
    rig.rt.run_for(40 * MS);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        hs.put("k", "9").await.unwrap();
        assert_eq!(bytes_of(hs.get("k").await), "9");
    });
    assert_eq!(load.after(&rig.rt, 100 * MS), "0");
    assert_eq!(cached(&rig.hs).as_deref(), Some("9"));
}

/// Case 8.
#[test]
fn a_get_after_ones_own_delete_finds_nothing() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        for i in 0..50 {
            hs.put("k", i.to_string()).await.unwrap();
            assert_eq!(bytes_of(hs.get("k").await), i.to_string());
            assert!(hs.delete("k").await.unwrap());
            assert!(hs.get("k").await.unwrap().is_none());
        }
    });
}

/// Case 10.
#[test]
fn a_fill_during_a_delete_does_not_bring_the_value_back() {
    for read_at in [0, 10, 40, 60, 79] {
        let rig = Rig::slow(1, 80 * MS);
        rig.store.put_now("k", "old").unwrap();
        let hs = rig.hs.clone();
        rig.rt.block_on(async move { assert_eq!(bytes_of(hs.get("k").await), "old") });
        let hs = rig.hs.clone();
        let delete = rig.spawn(async move { hs.delete("k").await.unwrap() });
        rig.rt.run_for(MS);
        assert_eq!(cached(&rig.hs), None, "evicted before the store is told");
        rig.rt.run_for(read_at * MS);
        let hs = rig.hs.clone();
        let read = rig.spawn(async move { drop(hs.get("k").await.unwrap()) });
        rig.rt.run_for(200 * MS);
        read.take();
        assert!(delete.take());
        let left = rig.hs.explain("k").cached;
        assert!(left.is_none() || read_at == 79, "read {read_at} ms into the delete: {left:?}");
        assert!(left.is_none_or(|left| left.bytes.is_none()), "at most that it is gone");
        let hs = rig.hs.clone();
        assert!(rig.rt.block_on(async move { hs.get("k").await.unwrap() }).is_none());
    }
}

/// Case 11: a load counts from its first poll, before anything can suspend it.
#[test]
fn a_write_right_after_the_first_poll_of_a_load_is_not_lost() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let [mut polled, unpolled] = [0, 1].map(|_| by_hand(&rig, &source, Read::new()));
    assert!(is_pending(&mut polled));
    source.set(1);
    rig.hs.writing("k").done();
    assert_eq!(rig.rt.block_on(polled).unwrap(), "0");
    assert_eq!(cached(&rig.hs), None);
    assert_eq!(rig.rt.block_on(unpolled).unwrap(), "1", "it came after the write");
    assert_eq!(cached(&rig.hs).as_deref(), Some("1"));
}

/// Case 13.
#[test]
fn no_way_of_writing_bypasses_the_fence() {
    type Way = fn(Heatsink) -> BoxFuture<'static, ()>;
    let ways: [Way; 9] = [
        |hs| Box::pin(async move { hs.put("k", "w").await.unwrap() }),
        |hs| Box::pin(async move { hs.put_with("k", "w", Put::ttl(MS)).await.unwrap() }),
        |hs| Box::pin(async move { assert!(!hs.delete("k").await.unwrap()) }),
        |hs| Box::pin(async move { hs.typed(Text).put("k", &"w".to_owned()).await.unwrap() }),
        |hs| Box::pin(async move { hs.writing("k").done() }),
        |hs| Box::pin(async move { drop(hs.writing("k")) }),
        |hs| Box::pin(async move { hs.invalidate("k") }),
        |hs| Box::pin(async move { hs.invalidate_prefix("k") }),
        |hs| Box::pin(async move { hs.invalidate_all() }),
    ];
    for (i, way) in ways.into_iter().enumerate() {
        let rig = Rig::new(1);
        let source = Source::new(&rig.rt, 80 * MS);
        let load = rig.spawn_load(&source);
        rig.rt.run_for(40 * MS);
        rig.rt.block_on(way(rig.hs.clone()));
        assert_eq!(load.after(&rig.rt, 50 * MS), "0");
        assert_eq!(cached(&rig.hs), None, "way {i}");
    }
}

/// Case 17.
#[test]
fn a_cancelled_first_caller_does_not_cancel_those_who_joined() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let mut first = by_hand(&rig, &source, Read::new());
    assert!(is_pending(&mut first));
    let joined = rig.spawn_load(&source);
    rig.rt.run_for(20 * MS);
    drop(first);
    assert_eq!(joined.after(&rig.rt, 70 * MS), "0");
    assert_eq!(source.runs(), 1);
    assert_eq!(cached(&rig.hs).as_deref(), Some("0"));
}

/// Case 17.
#[test]
fn a_first_callers_deadline_is_not_the_deadline_of_those_who_joined() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let first = by_hand(&rig, &source, Read::new().deadline(10 * MS));
    let first = rig.spawn(async move { first.await.map_err(|e| e.kind()) });
    rig.rt.run_for(MS);
    let joined = rig.spawn_load(&source);
    assert_eq!(first.after(&rig.rt, 20 * MS), Err(ErrorKind::Deadline));
    assert_eq!(joined.after(&rig.rt, 70 * MS), "0");
    assert_eq!(source.runs(), 1);
}

/// Case 18.
#[test]
fn a_cancelled_waiter_does_not_make_the_next_caller_start_another_load() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let first = rig.spawn_load(&source);
    rig.rt.run_for(10 * MS);
    for _ in 0..20 {
        assert!(is_pending(&mut by_hand(&rig, &source, Read::new())));
    }
    let last = rig.spawn_load(&source);
    rig.rt.run_for(100 * MS);
    assert_eq!([first.take(), last.take()], ["0", "0"]);
    assert_eq!(source.runs(), 1);
}

/// Case 19.
#[test]
fn a_storm_of_cancellations_and_panics_leaves_nothing_behind() {
    let rig = Rig::new(7);
    let runs = Arc::new(AtomicU64::new(0));
    let mut calls: Vec<BoxFuture<'static, bool>> = Vec::new();
    for i in 0..2000u64 {
        let (hs, rt, runs) = (rig.hs.clone(), rig.rt.clone(), runs.clone());
        let (takes, panics) = (rig.rt.draw(20) as u32, rig.rt.draw(4) == 0);
        let mut call: BoxFuture<'static, bool> = Box::pin(async move {
            let load = hs.load(format!("key:{}", i % 300), move || async move {
                runs.fetch_add(1, Ordering::Relaxed);
                rt.sleep(takes * MS).await;
                assert!(!panics, "on purpose");
                Ok::<_, std::io::Error>("v")
            });
            load.await.is_ok()
        });
        if is_pending(&mut call) {
            calls.push(call);
        }
        if rig.rt.draw(2) == 0 && !calls.is_empty() {
            drop(calls.swap_remove(rig.rt.draw(calls.len() as u64) as usize));
        }
        rig.rt.run_for(MS / 4);
    }
    drop(calls);
    rig.rt.run_for(Duration::from_secs(1));
    let stats = rig.hs.stats();
    assert!(runs.load(Ordering::Relaxed) > 300);
    assert_eq!((stats.keys_under_way, stats.loads_in_flight), (0, 0));
}

/// Case 20: a key that is not hot, so nothing but the flight could hold the value.
#[test]
fn a_load_that_ended_without_its_caller_cannot_be_joined() {
    let rig = Rig::new(1);
    rig.hs.control().unpin("k");
    let source = Source::new(&rig.rt, 80 * MS);
    assert!(is_pending(&mut by_hand(&rig, &source, Read::new())));
    rig.rt.run_for(100 * MS);
    source.set(1);
    assert_eq!(rig.spawn_load(&source).after(&rig.rt, 100 * MS), "1");
}

/// Case 22.
#[test]
fn a_write_at_the_moment_a_load_ends_breaks_no_waiter() {
    for seed in 0..200 {
        let rig = Rig::new(seed);
        let source = Source::new(&rig.rt, 10 * MS);
        let (hs, rt) = (rig.hs.clone(), rig.rt.clone());
        let put = rig.spawn(async move {
            rt.sleep(10 * MS).await;
            hs.put("k", "9").await.unwrap();
            bytes_of(hs.get("k").await)
        });
        let loads: Vec<_> = (0..5).map(|_| rig.spawn_load(&source)).collect();
        rig.rt.run_for(50 * MS);
        assert!(loads.iter().all(|l| l.take() == "0"), "seed {seed}");
        assert_eq!(put.take(), "9", "seed {seed}");
        assert_eq!(cached(&rig.hs).as_deref(), Some("9"), "seed {seed}");
    }
}

/// Case 23.
#[test]
fn every_waiter_gets_the_outcome_of_the_run_it_joined() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    source.fail(true);
    let old: Vec<_> = (0..10).map(|_| spawn_kind(&rig, &source)).collect();
    rig.rt.run_for(40 * MS);
    source.set(1);
    rig.hs.invalidate("k");
    let new: Vec<_> = (0..10).map(|_| spawn_kind(&rig, &source)).collect();
    rig.rt.run_for(50 * MS);
    source.fail(false);
    rig.rt.run_for(50 * MS);
    assert!(old.iter().all(|o| o.take() == Err(ErrorKind::Loader)));
    assert!(new.iter().all(|o| o.take() == Ok("1".to_owned())));
    assert_eq!(source.runs(), 2);
}

/// Case 24: a value too large to cache, and a key that is being written.
#[test]
fn uncacheable_values_do_not_serialise_those_who_wait() {
    for written in [false, true] {
        let rig = Rig::with(1, NearCache::new().value_bytes_max(if written { 99 } else { 0 }));
        let write = written.then(|| rig.hs.writing("k"));
        let source = Source::new(&rig.rt, 80 * MS);
        for round in 1..4 {
            let outs: Vec<_> = (0..50).map(|_| rig.spawn_load(&source)).collect();
            rig.rt.run_for(161 * MS);
            assert!(outs.iter().all(|out| out.take() == "0"));
            assert_eq!(cached(&rig.hs), None);
            assert!(source.runs() <= 2 * round, "{} loads", source.runs());
        }
        if let Some(write) = write {
            write.done();
        }
    }
}

/// Case 25.
#[test]
fn a_refresh_that_keeps_failing_ends_in_an_error_and_heals() {
    let (rig, source) = refreshing(brief(), 110 * MS);
    source.fail(true);
    rig.rt.run_for(300 * MS);
    assert_eq!(cached(&rig.hs), None);
    let fails = |_| spawn_kind(&rig, &source).after(&rig.rt, 81 * MS) == Err(ErrorKind::Loader);
    assert!((0..3).all(fails), "not the stale value, not for ever");
    source.fail(false);
    assert_eq!(spawn_kind(&rig, &source).after(&rig.rt, 81 * MS), Ok("0".to_owned()));
    assert_eq!(cached(&rig.hs).as_deref(), Some("0"));
}

/// Case 26.
#[test]
fn loads_slower_than_the_fresh_time_still_move_the_value_on() {
    let near = NearCache::new().fresh(20 * MS).stale(1000 * MS).absent(20 * MS);
    let rig = Rig::with(1, near);
    let source = Source::new(&rig.rt, 80 * MS);
    rig.spawn_load(&source).after(&rig.rt, 81 * MS);
    for ms in 0..2000u64 {
        source.set(ms);
        let served: u64 = rig.spawn_load(&source).after(&rig.rt, MS).parse().unwrap();
        assert!(ms - served < 170, "at {ms} ms a value of {served} ms: two loads old at most");
    }
    assert_eq!(rig.hs.stats().overlapped, 0);
}

/// Case 27.
#[test]
fn a_refresh_under_way_does_not_make_an_expired_value_visible() {
    let (rig, source) = refreshing(brief(), 110 * MS);
    rig.rt.run_for(45 * MS);
    assert_eq!(cached(&rig.hs), None, "past its limit, with the refresh under way");
    source.set(1);
    let reader = rig.spawn_load(&source);
    assert_eq!(reader.after(&rig.rt, 40 * MS), "0");
    assert_eq!(source.runs(), 2, "the reader waited for the refresh");
}

/// Case 28: readers only, so nothing may look like a write.
#[test]
fn a_second_reader_is_not_mistaken_for_a_write() {
    for seed in 0..100 {
        let rig = Rig::with(seed, NearCache::new().jitter_permille(0));
        let runs = Arc::new(AtomicU64::new(0));
        for _ in 0..40 {
            let (hs, rt, runs) = (rig.hs.clone(), rig.rt.clone(), runs.clone());
            let at = rig.rt.draw(1900) as u32;
            rig.rt.spawn(async move {
                rt.sleep(at * MS).await;
                let load = hs.load("k", move || async move {
                    let run = 1 + runs.fetch_add(1, Ordering::SeqCst);
                    rt.sleep(30 * MS).await;
                    Ok::<_, std::io::Error>(run.to_string())
                });
                drop(load.await.unwrap());
            });
        }
        rig.rt.run_for(1950 * MS);
        let runs = runs.load(Ordering::SeqCst);
        assert!((1..=2).contains(&runs), "seed {seed}: {runs} loads");
        assert_eq!(cached(&rig.hs), Some(runs.to_string()), "seed {seed}: a load was discarded");
        assert_eq!(rig.hs.stats().overlapped, 0);
    }
}

/// Case 29.
#[test]
fn a_retry_right_after_a_failure_does_not_rejoin_the_failure() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    source.fail(true);
    let outs: Vec<_> = (0..10)
        .map(|_| {
            let [first, retry] = [0, 1].map(|_| by_hand(&rig, &source, Read::new()));
            let source = source.clone();
            rig.spawn(async move {
                assert_eq!(first.await.unwrap_err().kind(), ErrorKind::Loader);
                source.fail(false);
                retry.await.unwrap()
            })
        })
        .collect();
    rig.rt.run_for(170 * MS);
    assert!(outs.iter().all(|out| out.take() == "0"));
    assert_eq!(source.runs(), 2, "all retries share one new load");
}

/// Case 32.
#[test]
fn invalidating_all_does_not_miss_what_was_just_filled_and_stops_nothing_after_it() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 10 * MS);
    for i in 0..20 {
        source.set(i);
        let load = rig.spawn_load(&source);
        assert_eq!(load.after(&rig.rt, 10 * MS), i.to_string());
        assert_eq!(cached(&rig.hs), Some(i.to_string()));
        rig.hs.invalidate_all();
        assert_eq!(cached(&rig.hs), None);
    }
}

/// Case 33.
#[test]
fn the_expiry_of_an_old_value_does_not_remove_the_new_one() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        hs.put_with("k", "old", Put::ttl(50 * MS)).await.unwrap();
        assert_eq!(bytes_of(hs.get("k").await), "old");
        hs.put("k", "new").await.unwrap();
        assert_eq!(bytes_of(hs.get("k").await), "new");
    });
    for _ in 0..80 {
        rig.rt.run_for(10 * MS);
        assert_eq!(cached(&rig.hs).as_deref(), Some("new"));
    }
}

/// Loads ten keys of 1,000 bytes each.
fn load_ten(rig: &Rig, name: &str) {
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        for i in 0..10 {
            let key = format!("{name}:{i}");
            hs.control().pin(&key, Treatment::near()).expect("room for a pin");
            hs.load(&key, || async { Ok::<_, std::io::Error>(vec![0; 1000]) })
                .await
                .expect("a load");
        }
    });
}

/// Case 36.
#[test]
fn what_is_cleared_gives_its_room_back() {
    let ways: [fn(&Heatsink, &SimRuntime); 4] = [
        |hs, _| (0..10).for_each(|i| hs.invalidate(format!("a:{i}"))),
        |hs, _| hs.invalidate_prefix("a:"),
        |hs, _| hs.invalidate_all(),
        |_, rt| rt.run_for(Duration::from_secs(4)),
    ];
    let ten = {
        let rig = Rig::new(1);
        load_ten(&rig, "a");
        rig.hs.stats().near_bytes
    };
    for (i, way) in ways.into_iter().enumerate() {
        // Room for ten values and no eleventh.
        let rig = Rig::with(1, NearCache::new().bytes_max(ten as usize));
        load_ten(&rig, "a");
        assert_eq!(rig.hs.stats().near_bytes, ten);
        way(&rig.hs, &rig.rt);
        rig.rt.run_for(200 * MS);
        assert_eq!(rig.hs.stats().near_bytes, 0, "way {i}");
        load_ten(&rig, "b");
        assert_eq!(rig.hs.try_read_with("b:9", <[u8]>::len), Some(1000), "way {i}");
    }
}
