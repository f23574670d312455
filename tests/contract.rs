//! The contract of the near cache, single flight and write gate, one test per line of it.
//!
//! C12 and C16 are property tests beside the code they check (`near.rs`, `cell.rs`); C6, C9 and
//! C19 are searched exhaustively in `engine/data/search.rs` too.

mod common;

use common::{Rig, Source, bytes_of};
use heatsink::engine::data::near::Freshness;
use heatsink::testing::SimRuntime;
use heatsink::{ErrorKind, Heatsink, NearCache, Put, Read, Source as From, Stats, Treatment};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

/// A load that takes 80 ms is overlapped, at 40 ms, by what `overlap` does; then a second caller
/// comes. Returns what the first caller got, what the second got, and whether the first's value
/// was cached.
fn overlapped(overlap: impl FnOnce(&Heatsink) + Send + 'static) -> (String, String, bool) {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let first = rig.spawn_load(&source);
    rig.rt.run_for(40 * MS);
    source.set(1);
    overlap(&rig.hs);
    let second = rig.spawn_load(&source);
    // By now the first load has ended and the second, if there is one, has not.
    rig.rt.run_for(60 * MS);
    let cached = rig.hs.try_read_with("k", |_| ()).is_some();
    rig.rt.run_for(100 * MS);
    (first.take(), second.take(), cached)
}

#[test]
fn c1_a_load_overlapped_by_a_write_is_not_seen_by_who_comes_after_it() {
    let (first, second, cached) = overlapped(|hs| hs.writing("k").done());
    assert_eq!((first.as_str(), second.as_str(), cached), ("0", "1", false));
}

#[test]
fn c1_a_load_overlapped_by_an_invalidation_is_not_seen_by_who_comes_after_it() {
    let (first, second, cached) = overlapped(|hs| hs.invalidate("k"));
    assert_eq!((first.as_str(), second.as_str(), cached), ("0", "1", false));
}

#[test]
fn a_value_whose_load_did_not_ask_for_its_expiry_is_not_shown_beyond_it() {
    let rig = Rig::slow(1, 80 * MS);
    rig.hs.control().unpin("k");
    rig.rt.block_on(rig.hs.put_with("k", "v", Put::ttl(300 * MS))).unwrap();
    let hs = rig.hs.clone();
    rig.rt.spawn(async move {
        assert_eq!(hs.get("k").await.unwrap().unwrap().ttl_left(), None, "nobody asked");
    });
    rig.rt.run_for(40 * MS);
    // The key turns hot under a load that began when it was not.
    rig.hs.control().pin("k", Treatment::near()).unwrap();
    rig.rt.run_for(60 * MS);
    assert_eq!(rig.hs.try_read_with("k", |_| ()), None);
    // The next load asks, and its value is cached to the end of its life.
    let value = rig.rt.block_on(rig.hs.get("k")).unwrap().unwrap();
    assert!(value.ttl_left().is_some());
    assert_eq!(rig.hs.try_read_with("k", |_| ()), Some(()));
    rig.rt.run_for(150 * MS);
    assert_eq!(rig.hs.try_read_with("k", |_| ()), None);
    assert!(rig.rt.block_on(rig.hs.get("k")).unwrap().is_none());
}

#[test]
fn a_batch_asks_for_expiries_when_a_value_of_it_may_be_cached_only() {
    let rig = Rig::slow(1, 10 * MS);
    for key in ["k", "l", "m"] {
        rig.rt.block_on(rig.hs.put_with(key, "v", Put::ttl(300 * MS))).unwrap();
    }
    let lives = |keys: [&'static str; 2]| {
        let all = rig.rt.block_on(rig.hs.get_many(keys));
        let known = all.into_iter().map(|one| one.unwrap().unwrap().ttl_left().is_some());
        known.collect::<Vec<_>>()
    };
    assert_eq!(lives(["l", "m"]), [false, false]);
    // "k" is hot.
    assert_eq!(lives(["l", "k"]), [true, true]);
    assert!(rig.hs.try_read_with("k", |_| ()).is_some());
}

#[test]
fn a_batch_whose_deadline_passes_brings_what_has_come_by_then() {
    let rig = Rig::slow(1, 80 * MS);
    for key in ["k", "l"] {
        rig.rt.block_on(rig.hs.put(key, "v")).unwrap();
    }
    assert_eq!(bytes_of(rig.rt.block_on(rig.hs.get("k"))), "v");
    let late = rig.spawn({
        let hs = rig.hs.clone();
        async move {
            let all = hs.get_many_with(["l", "k"], Read::new().deadline(50 * MS)).await;
            all.into_iter().map(|one| one.map(|v| v.is_some()).map_err(|e| e.kind())).collect()
        }
    });
    rig.rt.run_for(60 * MS);
    let late: Vec<Result<bool, ErrorKind>> = late.take();
    assert_eq!(late, [Err(ErrorKind::Deadline), Ok(true)]);
    rig.rt.run_for(60 * MS);
    assert_eq!(rig.hs.stats().keys_under_way, 0, "the load went on");
}

#[test]
fn a_batch_accepts_no_value_older_than_its_caller_does() {
    let rig = Rig::slow(1, 10 * MS);
    rig.rt.block_on(rig.hs.put("k", "old")).unwrap();
    assert_eq!(bytes_of(rig.rt.block_on(rig.hs.get("k"))), "old");
    // Behind the back of the instance.
    rig.rt
        .block_on(heatsink::store::Store::put(&rig.store, &"k".into(), "new".into(), None))
        .unwrap();
    let many = |read| bytes_of(rig.rt.block_on(rig.hs.get_many_with(["k"], read)).remove(0));
    assert_eq!(many(Read::new()), "old");
    assert_eq!(many(Read::latest()), "new");
}

#[test]
fn c2_nor_by_the_writer() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        for v in 0..50 {
            hs.put("k", v.to_string()).await.unwrap();
            assert_eq!(bytes_of(hs.get("k").await), v.to_string());
        }
    });
}

#[test]
fn c3_invalidating_a_key_without_an_entry_voids_its_flight() {
    for overlap in [
        (|hs: &Heatsink| hs.invalidate("k")) as fn(&Heatsink),
        |hs| hs.invalidate_prefix("k"),
        |hs| hs.invalidate_prefix(""),
        |hs| hs.invalidate_all(),
    ] {
        let (first, second, cached) = overlapped(overlap);
        assert_eq!((first.as_str(), second.as_str(), cached), ("0", "1", false));
    }
}

#[test]
fn c4_a_completion_touches_only_its_own_flight() {
    // The first load is voided and still running when the second starts; its end must neither
    // close the second flight nor let a third caller start another.
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let first = rig.spawn_load(&source);
    rig.rt.run_for(40 * MS);
    source.set(1);
    rig.hs.invalidate("k");
    let second = rig.spawn_load(&source);
    rig.rt.run_for(60 * MS);
    let third = rig.spawn_load(&source);
    rig.rt.run_for(200 * MS);
    assert_eq!([first.take(), second.take(), third.take()], ["0", "1", "1"]);
    assert_eq!(source.runs(), 2);
}

#[test]
fn c5_the_flight_is_closed_and_the_entry_published_before_waiters_wake() {
    let rig = Rig::new(3);
    let source = Source::new(&rig.rt, 80 * MS);
    let seen = Arc::new(AtomicU64::new(0));
    for _ in 0..10 {
        let (hs, source, seen) = (rig.hs.clone(), source.clone(), seen.clone());
        rig.rt.spawn(async move {
            hs.load("k", source.loader()).await.unwrap();
            // Whoever wakes finds the value, and no flight to rejoin.
            assert!(hs.try_read_with("k", |_| ()).is_some());
            assert_eq!(hs.stats().loads_in_flight, 0);
            seen.fetch_add(1, Ordering::Relaxed);
        });
    }
    rig.rt.run_for(200 * MS);
    assert_eq!((seen.load(Ordering::Relaxed), source.runs()), (10, 1));
}

/// A waker that calls back into the handle deadlocks if it is woken under the stripe's lock.
#[test]
fn c6_waiters_are_woken_outside_locks() {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Wake, Waker};
    struct CallsBack(Heatsink, AtomicU64);
    impl Wake for CallsBack {
        fn wake(self: Arc<Self>) {
            self.0.invalidate("k");
            self.0.writing("k").done();
            let _ = self.0.try_read_with("k", |_| ());
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let leader = rig.spawn_load(&source);
    rig.rt.run_for(10 * MS);
    let waker = Arc::new(CallsBack(rig.hs.clone(), AtomicU64::new(0)));
    let mut waiting = pin!(rig.hs.load("k", source.loader()));
    let std_waker = Waker::from(waker.clone());
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&std_waker)).is_pending());
    rig.rt.run_for(100 * MS);
    assert_eq!(leader.take(), "0");
    assert_eq!(waker.1.load(Ordering::Relaxed), 1);
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&std_waker)).is_ready());
}

#[test]
fn c7_a_panic_in_a_load_is_an_error_for_every_waiter_and_the_next_call_starts_afresh() {
    let rig = Rig::new(1);
    let runs = Arc::new(AtomicU64::new(0));
    let outs: Vec<_> = (0..8)
        .map(|_| {
            let (hs, rt, runs) = (rig.hs.clone(), rig.rt.clone(), runs.clone());
            rig.spawn(async move {
                hs.load("k", move || async move {
                    runs.fetch_add(1, Ordering::Relaxed);
                    rt.sleep(10 * MS).await;
                    if runs.load(Ordering::Relaxed) > 0 {
                        panic!("on purpose");
                    }
                    Ok::<_, std::io::Error>("never")
                })
                .await
                .map_err(|e| e.kind())
                .err()
            })
        })
        .collect();
    rig.rt.run_for(50 * MS);
    for out in outs {
        assert_eq!(out.take(), Some(ErrorKind::Panicked));
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(rig.hs.stats().keys_under_way, 0, "nothing leaks");
    let source = Source::new(&rig.rt, 10 * MS);
    let next = rig.spawn_load(&source);
    rig.rt.run_for(50 * MS);
    assert_eq!(next.take(), "0");
}

#[test]
fn c7_a_panic_before_the_first_await_is_caught_too() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    let error = rig.rt.block_on(async move {
        let load = hs.load("k", || -> std::future::Ready<Result<String, std::io::Error>> {
            panic!("in the closure")
        });
        load.await.unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Panicked);
    assert!(error.to_string().contains("in the closure"), "{error}");
}

/// The case of the issue: 40 callers, a deadline of 50 ms, a load of 80 ms.
#[test]
fn c8_a_deadline_ends_the_wait_and_not_the_load() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let outs: Vec<_> = (0..40)
        .map(|_| {
            let (hs, source) = (rig.hs.clone(), source.clone());
            rig.spawn(async move {
                let read = Read::new().deadline(50 * MS);
                hs.load_with("k", read, source.loader()).await.map_err(|e| e.kind()).err()
            })
        })
        .collect();
    rig.rt.run_for(60 * MS);
    for out in outs {
        assert_eq!(out.take(), Some(ErrorKind::Deadline));
    }
    rig.rt.run_for(40 * MS);
    assert_eq!(source.runs(), 1);
    assert_eq!(rig.hs.try_read_with("k", |b| b.to_vec()), Some(b"0".to_vec()), "filled");
    assert_eq!(rig.hs.stats().keys_under_way, 0);
}

/// The case of the issue: 1,000 callers on a cold key.
#[test]
fn c9_a_thousand_callers_on_a_cold_key_are_one_load() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let outs: Vec<_> = (0..1000).map(|_| rig.spawn_load(&source)).collect();
    rig.rt.run_for(200 * MS);
    assert!(outs.iter().all(|out| out.take() == "0"));
    assert_eq!((source.runs(), rig.hs.stats().joined), (1, 999));
}

#[test]
fn c9_a_dead_runtime_hands_its_load_to_exactly_one_waiter() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    // Everything that this handle spawns goes to a runtime that is about to die, as when
    // `#[tokio::test]` ends while other threads use the same handle.
    let doomed = SimRuntime::with_clock(2, rig.rt.clock());
    let hs = Heatsink::builder(rig.store.clone()).runtime(doomed.clone()).build().unwrap();
    let (leader, on_doomed) = (hs.clone(), source.clone());
    doomed.spawn(async move {
        let _ = leader.load("k", on_doomed.loader()).await;
    });
    while doomed.step() {}
    let outs: Vec<_> = (0..10)
        .map(|_| {
            let (hs, source) = (hs.clone(), source.clone());
            rig.spawn(async move { hs.load("k", source.loader()).await.unwrap().to_bytes() })
        })
        .collect();
    rig.rt.run_for(20 * MS);
    assert_eq!(source.runs(), 1);
    doomed.shutdown();
    rig.rt.run_for(200 * MS);
    assert!(outs.iter().all(|out| out.take() == "0"));
    assert_eq!((source.runs(), hs.stats().handed_over), (2, 1));
    assert_eq!(hs.stats().keys_under_way, 0);
}

#[test]
fn c9_a_load_whose_caller_dies_moves_to_a_task_and_goes_on() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let doomed = SimRuntime::with_clock(2, rig.rt.clock());
    let (leader, on_doomed) = (rig.hs.clone(), source.clone());
    doomed.spawn(async move {
        let _ = leader.load("k", on_doomed.loader()).await;
    });
    while doomed.step() {}
    let waiter = rig.spawn_load(&source);
    rig.rt.run_for(20 * MS);
    doomed.shutdown();
    assert_eq!(waiter.after(&rig.rt, 70 * MS), "0");
    assert_eq!(source.runs(), 1);
}

/// The case of the issue: a loader that always fails.
#[test]
fn c10_a_failing_load_costs_one_load_at_a_time() {
    let rig = Rig::new(1);
    let [running, most, runs]: [Arc<AtomicU64>; 3] = Default::default();
    let outs: Vec<_> = (0..300u64)
        .map(|i| {
            let (hs, rt) = (rig.hs.clone(), rig.rt.clone());
            let (running, most, runs) = (running.clone(), most.clone(), runs.clone());
            rig.spawn(async move {
                rt.sleep(u32::try_from(i).unwrap() * MS).await;
                let rt = rt.clone();
                hs.load("k", move || async move {
                    runs.fetch_add(1, Ordering::Relaxed);
                    let now = 1 + running.fetch_add(1, Ordering::Relaxed);
                    most.fetch_max(now, Ordering::Relaxed);
                    rt.sleep(80 * MS).await;
                    running.fetch_sub(1, Ordering::Relaxed);
                    Err::<String, _>(std::io::Error::other("down"))
                })
                .await
                .map_err(|e| e.kind())
                .err()
            })
        })
        .collect();
    rig.rt.run_for(Duration::from_secs(1));
    assert!(outs.iter().all(|out| out.take() == Some(ErrorKind::Loader)));
    assert_eq!(most.load(Ordering::Relaxed), 1);
    assert!(runs.load(Ordering::Relaxed) <= 5, "{runs:?} loads in 380 ms of 80 ms each");
}

#[test]
fn c10_a_failing_refresh_pauses_while_a_stale_value_is_served() {
    let rig = Rig::with(1, NearCache::new().jitter_permille(0));
    let source = Source::new(&rig.rt, 10 * MS);
    let fill = rig.spawn_load(&source);
    rig.rt.run_for(Duration::from_secs(1));
    assert_eq!(fill.take(), "0");
    source.fail(true);
    // One second of stale reads, one a millisecond: a pause of 200 ms allows five refreshes.
    for _ in 0..1000 {
        let read = rig.spawn_load(&source);
        rig.rt.run_for(MS);
        assert_eq!(read.take(), "0", "stale is served");
    }
    assert!((4..=6).contains(&(source.runs() - 1)), "{} refreshes", source.runs() - 1);
}

#[test]
fn c11_nothing_older_than_the_stale_limit_is_served() {
    let rig = Rig::with(1, NearCache::new().fresh(100 * MS).stale(300 * MS).absent(50 * MS));
    let source = Source::new(&rig.rt, 80 * MS);
    let fill = rig.spawn_load(&source);
    rig.rt.run_for(100 * MS);
    assert_eq!(fill.take(), "0");
    source.fail(true);
    let hs = &rig.hs;
    // The age counts from the start of the load, 100 ms ago.
    let served = |hs: &Heatsink| hs.try_read_with("k", |_| ()).is_some();
    assert!(served(hs));
    rig.rt.run_for(199 * MS);
    assert!(served(hs));
    rig.rt.run_for(MS);
    assert!(!served(hs), "300 ms after its load started");
}

#[test]
fn c11_the_stores_own_expiry_bounds_the_age() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        hs.put_with("k", "v", heatsink::Put::ttl(150 * MS)).await.unwrap();
        assert_eq!(bytes_of(hs.get("k").await), "v");
    });
    rig.rt.run_for(140 * MS);
    assert!(rig.hs.try_read_with("k", |_| ()).is_some());
    rig.rt.run_for(10 * MS);
    assert!(rig.hs.try_read_with("k", |_| ()).is_none());
}

#[test]
fn c13_one_refresh_is_in_flight_and_the_stale_value_is_served_meanwhile() {
    let rig = Rig::with(1, NearCache::new().jitter_permille(0));
    let source = Source::new(&rig.rt, 80 * MS);
    let fill = rig.spawn_load(&source);
    rig.rt.run_for(Duration::from_secs(1));
    assert_eq!(fill.take(), "0");
    source.set(1);
    let reads: Vec<_> = (0..100).map(|_| rig.spawn_load(&source)).collect();
    rig.rt.run_for(MS);
    assert!(reads.iter().all(|read| read.take() == "0"));
    assert_eq!(source.runs(), 2);
    rig.rt.run_for(100 * MS);
    assert_eq!(rig.spawn_load(&source).after(&rig.rt, MS), "1");
}

#[test]
fn c13_hard_expiry_wins_over_stale_while_revalidate() {
    let rig = Rig::with(1, NearCache::new().jitter_permille(0));
    let source = Source::new(&rig.rt, 5000 * MS);
    let fill = rig.spawn_load(&source);
    rig.rt.run_for(2000 * MS);
    drop(fill);
    // The load takes longer than the stale limit: its value is for those who waited, nobody else.
    rig.rt.run_for(4000 * MS);
    assert!(rig.hs.try_read_with("k", |_| ()).is_none());
}

#[test]
fn c14_a_gap_of_an_invalidation_stream_makes_everything_older_unreadable_at_once() {
    let rig = Rig::new(1);
    let keys: Vec<String> = (0..100).map(|i| format!("key:{i}")).collect();
    rig.hs.control().pin_all(&keys, Treatment::near()).unwrap();
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        for key in &keys {
            hs.put(key, "v").await.unwrap();
            hs.get(key).await.unwrap();
        }
    });
    let readable = || keys.iter().filter(|k| rig.hs.try_read_with(k, |_| ()).is_some()).count();
    assert_eq!(readable(), 100);
    rig.hs.invalidate_all();
    assert_eq!(readable(), 0);
}

#[test]
fn c15_an_older_version_never_replaces_a_newer_one() {
    // The first load reads version 1 and is slow; a later one reads version 2 and is fast.
    let rig = Rig::new(1);
    let store = rig.store.clone();
    store.put_now("k", "one").unwrap();
    let hs = rig.hs.clone();
    let version = |hs: &Heatsink| {
        let hs = hs.clone();
        async move { hs.get("k").await.unwrap().unwrap().version().unwrap() }
    };
    let before = rig.rt.block_on(version(&hs));
    store.put_now("k", "two").unwrap();
    let latest = rig.rt.block_on(async {
        hs.get_with("k", Read::latest()).await.unwrap().unwrap().version().unwrap()
    });
    assert!(latest > before);
    assert_eq!(rig.rt.block_on(version(&hs)), latest, "the newer value took its place");
    // (`near.rs` and `cell.rs` hold the refusal of the older one.)
}

#[test]
fn c17_loading_a_key_inside_its_own_load_is_an_error() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    let inner = rig.hs.clone();
    let error = rig.rt.block_on(async move {
        hs.load("k", move || async move {
            inner
                .load("k", || async { Ok::<_, std::io::Error>("inner") })
                .await
                .map(|v| v.to_bytes())
        })
        .await
        .unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Recursive);
}

#[test]
fn c17_loading_another_key_inside_a_load_is_fine() {
    let rig = Rig::new(1);
    let (hs, inner) = (rig.hs.clone(), rig.hs.clone());
    let got = rig.rt.block_on(async move {
        hs.load("k", move || async move {
            let other = inner.load("other", || async { Ok::<_, std::io::Error>("inner") }).await?;
            Ok::<_, heatsink::Error>(other.to_bytes())
        })
        .await
    });
    assert_eq!(got.unwrap(), b"inner");
}

#[test]
fn c17_two_loads_that_wait_for_each_other_end_at_the_time_limit() {
    let rig = Rig::new(1);
    let outs: Vec<_> = [("a", "b"), ("b", "a")]
        .into_iter()
        .map(|(mine, other)| {
            let (hs, inner, rt) = (rig.hs.clone(), rig.hs.clone(), rig.rt.clone());
            rig.spawn(async move {
                hs.load(mine, move || async move {
                    rt.sleep(MS).await;
                    inner.get(other).await.map(|_| "never")
                })
                .await
                .map_err(|e| e.kind())
                .err()
            })
        })
        .collect();
    rig.rt.run_for(Duration::from_secs(12));
    for out in outs {
        assert_eq!(out.take(), Some(ErrorKind::Timeout));
    }
    rig.rt.run_for(Duration::from_secs(12));
    assert_eq!(rig.hs.stats().keys_under_way, 0);
}

/// The other half, that throughput scales, is `benches/hit_path`.
#[test]
fn c18_one_key_read_by_many_threads_has_no_misses() {
    let store = heatsink::store::MemoryStore::new(1);
    store.put_now("k", "v").unwrap();
    let near = NearCache::new().fresh(Duration::from_secs(60)).stale(Duration::from_secs(60));
    let hs = Heatsink::builder(store.clone()).near(near).build().unwrap();
    hs.control().pin("k", Treatment::near()).unwrap();
    let blocking = heatsink::blocking::Heatsink::from(hs.clone());
    blocking.get("k").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100_000 {
                    assert_eq!(hs.try_read_with("k", <[u8]>::len), Some(1), "a miss");
                }
            });
        }
    });
    assert_eq!(hs.stats().loads, 1);
}

#[test]
fn c19_a_write_storm_leaves_at_most_two_loads_in_flight() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let mut outs = Vec::new();
    let mut most = 0;
    for i in 0..1000u64 {
        source.set(i);
        rig.hs.writing("k").done();
        outs.push((i, rig.spawn_load(&source)));
        rig.rt.run_for(MS);
        most = most.max(rig.hs.stats().loads_in_flight);
    }
    rig.rt.run_for(Duration::from_secs(1));
    assert_eq!(most, 2);
    for (floor, out) in outs {
        assert!(out.take().parse::<u64>().unwrap() >= floor, "older than its caller's write");
    }
    // 1,000 callers in a second, loads of 80 ms: about 25, not 1,000.
    assert!(source.runs() < 40, "{} loads", source.runs());
}

#[test]
fn c20_nothing_is_cached_while_a_write_is_under_way() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 10 * MS);
    let write = rig.hs.writing("k");
    let read = rig.spawn_load(&source);
    rig.rt.run_for(20 * MS);
    assert_eq!(read.take(), "0");
    assert!(rig.hs.try_read_with("k", |_| ()).is_none());
    write.done();
    let read = rig.spawn_load(&source);
    rig.rt.run_for(20 * MS);
    assert_eq!(read.take(), "0");
    assert!(rig.hs.try_read_with("k", |_| ()).is_some());
}

#[test]
fn c20_a_write_of_unknown_outcome_keeps_the_key_uncacheable_until_it_cannot_land_any_more() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 10 * MS);
    drop(rig.hs.writing("k"));
    for _ in 0..100 {
        let read = rig.spawn_load(&source);
        rig.rt.run_for(99 * MS);
        assert_eq!(read.take(), "0");
        assert!(rig.hs.try_read_with("k", |_| ()).is_none());
    }
    // The store says that a write lands within 10 s or never.
    rig.rt.run_for(200 * MS);
    let read = rig.spawn_load(&source);
    rig.rt.run_for(20 * MS);
    assert_eq!(read.take(), "0");
    assert!(rig.hs.try_read_with("k", |_| ()).is_some());
}

#[test]
fn c20_a_key_promoted_during_a_write_is_not_cached_either() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 10 * MS);
    rig.hs.control().unpin("k");
    let write = rig.hs.writing("k");
    rig.hs.control().pin("k", Treatment::near()).unwrap();
    let read = rig.spawn_load(&source);
    rig.rt.run_for(20 * MS);
    assert_eq!(read.take(), "0");
    assert!(rig.hs.try_read_with("k", |_| ()).is_none());
    write.done();
}

#[test]
fn latest_reads_share_a_load_that_began_after_they_came_and_nothing_else() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 80 * MS);
    let running = rig.spawn_load(&source);
    rig.rt.run_for(40 * MS);
    source.set(1);
    let latest: Vec<_> = (0..10)
        .map(|_| {
            let (hs, source) = (rig.hs.clone(), source.clone());
            rig.spawn(async move {
                let value = hs.load_with("k", Read::latest(), source.loader()).await.unwrap();
                assert_eq!(value.source(), From::Load);
                String::from_utf8(value.to_vec()).unwrap()
            })
        })
        .collect();
    rig.rt.run_for(300 * MS);
    assert_eq!(running.take(), "0");
    assert!(latest.iter().all(|l| l.take() == "1"));
    assert!(source.runs() <= 3, "{} loads", source.runs());
}

#[test]
fn only_hot_keys_are_cached_and_every_key_has_single_flight() {
    let rig = Rig::new(1);
    let source = Source::new(&rig.rt, 10 * MS);
    rig.hs.control().unpin("k");
    let reads: Vec<_> = (0..10).map(|_| rig.spawn_load(&source)).collect();
    rig.rt.run_for(20 * MS);
    assert!(reads.iter().all(|r| r.take() == "0"));
    assert_eq!(source.runs(), 1);
    assert!(rig.hs.try_read_with("k", |_| ()).is_none());
}

#[test]
fn an_absent_value_is_cached_for_a_shorter_time() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        for _ in 0..100 {
            assert!(hs.get("k").await.unwrap().is_none());
        }
    });
    assert_eq!(rig.hs.stats().loads, 1);
    rig.rt.run_for(800 * MS);
    let hs = rig.hs.clone();
    rig.rt.block_on(async { assert!(hs.get("k").await.unwrap().is_none()) });
    assert_eq!(rig.hs.stats().loads, 2);
    let cached = rig.hs.explain("k").cached.unwrap();
    assert_eq!((cached.bytes, cached.freshness), (None, Freshness::Fresh));
}

#[test]
fn a_stalled_driver_makes_the_handle_behave_like_the_bare_client() {
    let rig = Rig::with(1, NearCache::new().fresh(60_000 * MS).stale(60_000 * MS));
    let hs = rig.hs.clone();
    rig.store.put_now("k", "v").unwrap();
    rig.rt.block_on(async { hs.get("k").await.unwrap() });
    assert!(rig.hs.try_read_with("k", |_| ()).is_some());
    rig.hs.stall_driver(true);
    rig.rt.run_for(Duration::from_secs(3));
    assert!(rig.hs.try_read_with("k", |_| ()).is_none(), "the index has expired");
    let hs = rig.hs.clone();
    assert_eq!(bytes_of(rig.rt.block_on(async move { hs.get("k").await })), "v");
    rig.hs.stall_driver(false);
    rig.rt.run_for(100 * MS);
    assert!(rig.hs.try_read_with("k", |_| ()).is_some());
}

#[test]
fn served_ages_and_counts_are_reported() {
    let rig = Rig::with(1, NearCache::new().jitter_permille(0));
    let source = Source::new(&rig.rt, 10 * MS);
    for _ in 0..200 {
        let read = rig.spawn_load(&source);
        rig.rt.run_for(20 * MS);
        read.take();
    }
    let Stats { hits_fresh, hits_stale, misses, loads, served_age_max, .. } = rig.hs.stats();
    assert_eq!(hits_fresh + hits_stale + misses, 200);
    assert!(misses == 1 && hits_stale >= 3 && loads >= 4, "{:?}", rig.hs.stats());
    assert!(served_age_max >= 1000 * MS && served_age_max < 1100 * MS, "{served_age_max:?}");
}
