//! Bad input and bad stores: a clear error or the behaviour of the bare client, bounded memory,
//! never a hang.

mod common;

use common::{Rig, bytes_of};
use heatsink::store::memory::{Fault, On};
use heatsink::{ErrorKind, Heatsink, Loads, Outcome, Treatment};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

#[test]
fn keys_of_no_byte_and_of_a_mebibyte_behave_like_with_the_bare_client() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        for key in [vec![], vec![b'k'; 1 << 20]] {
            assert!(hs.get(&key).await.unwrap().is_none());
            hs.put(&key, "v").await.unwrap();
            assert_eq!(bytes_of(hs.get(&key).await), "v");
            assert_eq!(bytes_of(hs.get_many([&key]).await.remove(0)), "v");
            hs.writing(&key).done();
            hs.invalidate(&key);
            assert!(hs.delete(&key).await.unwrap());
            assert!(hs.get(&key).await.unwrap().is_none());
        }
    });
    assert!(hs.control().pin([], Treatment::near()).is_ok());
    let long = hs.control().pin(vec![0; 1 << 20], Treatment::near()).unwrap_err();
    assert_eq!(long.kind(), ErrorKind::Limit);
    let long = vec![0; 1 << 20];
    assert_eq!(hs.control().deny(&long).unwrap_err().kind(), ErrorKind::Limit);
    let prefix = heatsink::Schedule::prefix(&long);
    assert_eq!(hs.control().schedule(prefix).unwrap_err().kind(), ErrorKind::Limit);
    assert!(format!("{}", hs.explain(long)).len() < 400);
}

#[test]
fn values_of_no_byte_and_of_64_mebibytes_are_served_and_only_the_small_one_is_cached() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    hs.control().pin("large", Treatment::near()).unwrap();
    rig.rt.block_on(async {
        hs.put("k", "").await.unwrap();
        assert_eq!(bytes_of(hs.get("k").await), "");
        hs.load("large", || async { Ok::<_, std::io::Error>(vec![7; 64 << 20]) }).await.unwrap();
    });
    assert_eq!(hs.try_read_with("k", <[u8]>::len), Some(0));
    assert_eq!(hs.try_read_with("large", <[u8]>::len), None);
    let stats = hs.stats();
    assert!(stats.refused_full == 1 && stats.near_bytes < 4096, "{stats:?}");
}

#[test]
fn more_hot_values_than_the_tier_has_room_for_stay_inside_it() {
    let near = heatsink::NearCache::new().bytes_max(100_000);
    let rig = Rig::with(1, near);
    let keys: Vec<String> = (0..4000).map(|i| format!("key:{i}")).collect();
    rig.hs.control().pin_all(&keys, Treatment::near()).unwrap();
    assert_eq!(
        rig.hs
            .control()
            .pin_all((0..200).map(|i| format!("more:{i}")), Treatment::near())
            .unwrap_err()
            .kind(),
        ErrorKind::Limit
    );
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        for key in &keys {
            hs.load(key, || async { Ok::<_, std::io::Error>(vec![0; 1000]) }).await.unwrap();
        }
    });
    let stats = rig.hs.stats();
    assert!(stats.near_bytes <= 100_000 && stats.refused_full > 3000, "{stats:?}");
}

#[test]
fn a_store_that_always_fails_gives_its_error_and_keeps_nothing() {
    let rig = Rig::new(1);
    rig.store.faults().chance(On::Any, 1.0, Fault::NotApplied);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        assert_eq!(hs.get("k").await.unwrap_err().key(), Some("k"));
        assert!(hs.get_many(["k", "l"]).await.iter().all(Result::is_err));
        assert_eq!(hs.put("k", "v").await.unwrap_err().outcome(), Outcome::NotApplied);
        assert_eq!(hs.delete("k").await.unwrap_err().outcome(), Outcome::NotApplied);
    });
    assert_eq!(rig.hs.stats().keys_under_way, 0);
    assert!(rig.hs.explain("k").uncacheable_for.is_zero());
}

#[test]
fn a_store_that_hangs_ends_reads_at_the_time_limit_and_callers_at_their_deadline() {
    let rig = Rig::new(1);
    rig.store.faults().chance(On::Reads, 1.0, Fault::Hang);
    let outs: Vec<_> = (0..100)
        .map(|_| {
            let hs = rig.hs.clone();
            rig.spawn(async move { hs.get("k").await.unwrap_err().kind() })
        })
        .collect();
    let hs = rig.hs.clone();
    let impatient = rig.spawn(async move {
        let read = heatsink::Read::new().deadline(20 * MS);
        hs.get_with("k", read).await.unwrap_err().kind()
    });
    rig.rt.run_for(30 * MS);
    assert_eq!(impatient.take(), ErrorKind::Deadline);
    rig.rt.run_for(Duration::from_secs(11));
    assert!(outs.iter().all(|out| out.take() == ErrorKind::Timeout));
    let stats = rig.hs.stats();
    assert_eq!((stats.keys_under_way, stats.timed_out), (0, 1));
}

#[test]
fn a_store_that_panics_is_an_error_and_a_panicking_write_is_of_unknown_outcome() {
    let rig = Rig::new(1);
    rig.store.faults().chance(On::Any, 1.0, Fault::Panic);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        assert_eq!(hs.get("k").await.unwrap_err().kind(), ErrorKind::Panicked);
        assert!(hs.get_many(["k", "l"]).await.iter().all(Result::is_err));
        let put = hs.put("k", "v").await.unwrap_err();
        assert_eq!((put.kind(), put.outcome()), (ErrorKind::Panicked, Outcome::Unknown));
    });
    assert!(!rig.hs.explain("k").uncacheable_for.is_zero());
    assert_eq!(rig.hs.stats().loads_in_flight, 0);
}

#[test]
fn callers_beyond_the_cap_of_waiters_go_to_the_store_by_themselves() {
    let rig = Rig::slow(1, 5 * MS);
    let hs = Heatsink::builder(rig.store.clone())
        .runtime(rig.rt.clone())
        .loads(Loads::new().waiters_max(10))
        .build()
        .unwrap();
    let outs: Vec<_> = (0..25)
        .map(|_| {
            let hs = hs.clone();
            rig.spawn(async move { hs.get("k").await.unwrap().is_none() })
        })
        .collect();
    rig.rt.run_for(50 * MS);
    assert!(outs.iter().all(|out| out.take()));
    assert_eq!((hs.stats().loads, hs.stats().bypassed), (1, 15));
}

#[test]
fn contradicting_options_are_named_and_never_panic() {
    let build = |near: heatsink::NearCache| {
        Heatsink::builder(heatsink::store::MemoryStore::new(1)).near(near).build().unwrap_err()
    };
    let near = heatsink::NearCache::new;
    for (options, name) in [
        (near().fresh(Duration::ZERO), "fresh"),
        (near().stale(MS), "stale"),
        (near().absent(Duration::from_secs(9)), "absent"),
        (near().jitter_permille(1001), "jitter_permille"),
        (near().keys_max(1 << 20), "keys_max"),
    ] {
        let error = build(options);
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_handle_outlives_the_runtime_of_one_test_or_worker() {
    let hs = Heatsink::new(heatsink::store::MemoryStore::new(2)).unwrap();
    for i in 0..3 {
        let rt = tokio::runtime::Builder::new_current_thread().build().unwrap();
        rt.block_on(async {
            hs.put("k", format!("{i}")).await.unwrap();
            assert_eq!(bytes_of(hs.get("k").await), format!("{i}"));
        });
    }
    let blocking = heatsink::blocking::Heatsink::from(hs.clone());
    assert_eq!(bytes_of(blocking.get("k")), "2");
    blocking.shutdown();
    assert_eq!(bytes_of(blocking.get("k")), "2", "bare from here on");
}

#[test]
fn instances_in_one_process_do_not_see_each_other() {
    let (a, b) = (Rig::new(1), Rig::new(2));
    a.rt.block_on(async { a.hs.put("k", "a").await.unwrap() });
    b.rt.block_on(async { assert!(b.hs.get("k").await.unwrap().is_none()) });
}

#[test]
fn a_deny_outranks_a_pin_and_explain_says_so() {
    let rig = Rig::new(1);
    rig.hs.control().deny("k").unwrap();
    assert!(rig.hs.control().treated().is_empty());
    assert!(rig.hs.explain("k").to_string().contains("denied"));
    assert!(rig.hs.control().allow("k"));
    assert_eq!(rig.hs.control().treated().len(), 1);
}

/// What a closure does while it holds the cached bytes must not disturb the read around it.
#[test]
fn a_closure_may_read_write_and_panic_in_the_middle_of_a_read() {
    let rig = Rig::new(1);
    let hs = rig.hs.clone();
    rig.rt.block_on(async {
        hs.put("k", "old").await.unwrap();
        hs.get("k").await.unwrap();
    });
    for _ in 0..3 {
        let nested = hs.try_read_with("k", |outer| {
            let inner = hs.try_read_with("k", |inner| inner == outer);
            (inner, outer.to_vec())
        });
        assert_eq!(nested, Some((Some(true), b"old".to_vec())));
    }
    let during = hs.try_read_with("k", |old| {
        hs.invalidate("k");
        (old.to_vec(), hs.try_read_with("k", |_| ()))
    });
    assert_eq!(during, Some((b"old".to_vec(), None)), "invalidated for the inner read already");
    assert_eq!(hs.try_read_with("k", |_| ()), None, "and for whoever comes later");
    rig.rt.block_on(async { hs.get("k").await.unwrap() });
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        hs.try_read_with("k", |_| panic!("in the middle"))
    }));
    assert!(panicked.is_err());
    assert_eq!(hs.try_read_with("k", <[u8]>::len), Some(3));
    let last = hs.try_read_with("k", |old| {
        hs.control().unpin("k");
        old.len()
    });
    assert_eq!((last, hs.try_read_with("k", |_| ())), (Some(3), None));
}

/// A thread keeps handles of what it read; of more instances than it has slots, too.
#[test]
fn many_instances_on_one_thread_keep_their_values_apart() {
    let rigs: Vec<Rig> = (0..40).map(|_| Rig::new(1)).collect();
    for round in 0..3 {
        for (i, rig) in rigs.iter().enumerate() {
            let value = format!("{i}:{round}");
            rig.rt.block_on(async {
                rig.hs.put("k", value.clone()).await.unwrap();
                rig.hs.get("k").await.unwrap();
            });
            assert_eq!(rig.hs.try_read_with("k", <[u8]>::to_vec), Some(value.into_bytes()));
        }
        for (i, rig) in rigs.iter().enumerate() {
            let value = format!("{i}:{round}").into_bytes();
            assert_eq!(rig.hs.try_read_with("k", <[u8]>::to_vec), Some(value));
        }
    }
}
