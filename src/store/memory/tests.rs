use super::*;
use crate::Outcome;
use crate::store::Delivery;
use crate::testing::SimRuntime;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

fn sim(builder: MemoryStoreBuilder, seed: u64) -> (SimRuntime, MemoryStore) {
    let rt = SimRuntime::new(seed);
    let store = builder.runtime(rt.clone()).build();
    (rt, store)
}

fn first_poll<T>(future: impl Future<Output = T>) -> Poll<T> {
    std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn without_limits_an_operation_completes_on_its_first_poll() {
    let store = MemoryStore::new(4);
    let key = Key::from("a");
    assert!(matches!(first_poll(store.put(&key, "1".into(), None)), Poll::Ready(Ok(()))));
    assert!(matches!(first_poll(store.add(&key, 2)), Poll::Ready(Ok(3))));
    assert!(matches!(first_poll(store.get(&key)), Poll::Ready(Ok(Some(_)))));
    assert_eq!((store.reads_of("a"), store.writes_of("a")), (1, 2));
}

/// Offers `rate` reads a second of one key for `secs` seconds.
fn offer(rt: &SimRuntime, store: &MemoryStore, rate: u64, secs: u64) {
    let (rt2, store) = (rt.clone(), store.clone());
    rt.spawn(async move {
        for _ in 0..rate * secs {
            let store = store.clone();
            rt2.spawn(async move { drop(store.get(&Key::from("hot")).await) });
            rt2.sleep(Duration::from_nanos(1_000_000_000 / rate)).await;
        }
    });
    rt.run_for(Duration::from_secs(secs));
}

#[test]
fn offered_twice_its_ceiling_a_shard_serves_its_ceiling() {
    let (rt, store) = sim(MemoryStore::builder().ceiling(6_000), 1);
    offer(&rt, &store, 12_000, 1);
    let before = store.counts()[0];
    offer(&rt, &store, 12_000, 5);
    let after = store.counts()[0];
    let served = (after.served - before.served) as f64 / 5.0;
    assert!((served / 6_000.0 - 1.0).abs() < 0.02, "served {served} a second");
    assert_eq!(after.offered, 72_000);
    let waiting = after.offered - after.served - after.throttled;
    assert!(waiting <= 602, "100 ms of queue at most, {waiting} wait");
}

#[test]
fn below_its_ceiling_a_shard_refuses_nobody() {
    let (rt, store) = sim(MemoryStore::builder().shards(8).ceiling(6_000), 1);
    offer(&rt, &store, 5_900, 3);
    let all = store.counts();
    assert_eq!(all.iter().map(|c| c.throttled).sum::<u64>(), 0);
    assert_eq!(all.iter().filter(|c| c.offered > 0).count(), 1, "one key, one shard");
}

#[test]
fn the_nearer_the_ceiling_the_longer_the_wait_and_never_beyond_the_bound() {
    let (rt, store) = sim(MemoryStore::builder().ceiling(1_000), 1);
    let longest = Arc::new(AtomicU64::new(0));
    let refused = Arc::new(AtomicU64::new(0));
    for _ in 0..500 {
        let (rt2, store) = (rt.clone(), store.clone());
        let (longest, refused) = (longest.clone(), refused.clone());
        rt.spawn(async move {
            let start = rt2.now();
            match store.add(&Key::from("n"), 1).await {
                Ok(_) => {
                    let took = rt2.now().since(start).as_millis() as u64;
                    longest.fetch_max(took, Ordering::Relaxed);
                }
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::Throttled);
                    assert_eq!(e.outcome(), Outcome::NotApplied);
                    assert!(matches!(e.retry(), Retry::After(d) if !d.is_zero()));
                    refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    rt.run_for(Duration::from_secs(1));
    assert_eq!(longest.load(Ordering::Relaxed), 101);
    let applied: u64 =
        std::str::from_utf8(&store.get_now("n").unwrap().bytes).unwrap().parse().unwrap();
    assert_eq!(applied + refused.load(Ordering::Relaxed), 500, "a refused add never applies");
}

#[test]
fn a_failing_shard_fails_its_own_keys_only() {
    let (rt, store) = sim(MemoryStore::builder().shards(2), 1);
    let keys: Vec<Key> = (0..20).map(|i| Key::from(format!("k{i}"))).collect();
    store.set_down(0, true);
    let got = rt.block_on(store.get_many(&keys));
    for (key, result) in keys.iter().zip(&got) {
        assert_eq!(result.is_err(), store.place(key) == 0);
    }
    assert!(got.iter().any(Result::is_err) && got.iter().any(Result::is_ok));
}

#[test]
fn a_fault_of_unknown_outcome_is_applied_or_not_or_later_as_scripted() {
    let (rt, store) = sim(MemoryStore::builder(), 1);
    let (key, faults) = (Key::from("n"), store.faults());
    let now = |store: &MemoryStore| store.get_now("n").map(|s| s.bytes);
    for (fault, after) in [
        (Fault::NotApplied, None),
        (Fault::UnknownNotApplied, None),
        (Fault::UnknownLater(Duration::from_secs(1)), None),
    ] {
        faults.next(On::Writes, fault);
        let e = rt.block_on(store.add(&key, 1)).unwrap_err();
        assert_eq!(e.is_unknown(), fault != Fault::NotApplied);
        assert_eq!(now(&store), after);
    }
    rt.run_for(Duration::from_secs(2));
    assert_eq!(now(&store).unwrap(), "1");
    faults.next(On::Only(Op::Add), Fault::UnknownApplied);
    assert!(rt.block_on(store.add(&key, 1)).unwrap_err().is_unknown());
    assert_eq!(now(&store).unwrap(), "2");
    assert_eq!(faults.struck(), 4);
}

#[test]
fn a_lost_reply_was_applied_and_a_hang_was_not_and_neither_returns() {
    let store = MemoryStore::new(1);
    let key = Key::from("n");
    store.faults().next(On::Any, Fault::LostReply);
    assert!(first_poll(store.add(&key, 1)).is_pending());
    store.faults().next(On::Any, Fault::Hang);
    assert!(first_poll(store.add(&key, 1)).is_pending());
    assert_eq!(store.get_now("n").unwrap().bytes, "1");
}

#[test]
#[should_panic(expected = "injected")]
fn a_scripted_panic_panics() {
    let store = MemoryStore::new(1);
    store.faults().next(On::Reads, Fault::Panic);
    let _ = first_poll(store.get(&Key::from("a")));
}

#[test]
fn a_fault_of_a_read_is_never_unknown() {
    let store = MemoryStore::new(1);
    store.faults().next_n(On::Reads, 2, Fault::UnknownApplied);
    let Poll::Ready(Err(e)) = first_poll(store.get(&Key::from("a"))) else { panic!() };
    assert_eq!(e.outcome(), Outcome::NotApplied);
}

#[test]
fn a_lagging_replica_shows_the_past() {
    let lag = Duration::from_millis(100);
    let (rt, store) = sim(MemoryStore::builder().replica_lag(lag), 1);
    let key = Key::from("a");
    let replica = |rt: &SimRuntime| rt.block_on(store.get_replica(&key)).unwrap().map(|s| s.bytes);
    rt.block_on(store.put(&key, "1".into(), None)).unwrap();
    assert_eq!(replica(&rt), None);
    rt.run_for(lag);
    rt.block_on(store.put(&key, "2".into(), None)).unwrap();
    assert_eq!(replica(&rt).unwrap(), "1");
    rt.run_for(lag);
    assert_eq!(replica(&rt).unwrap(), "2");
}

#[test]
fn values_expire_by_the_clock_of_the_runtime() {
    let (rt, store) = sim(MemoryStore::builder(), 1);
    let key = Key::from("a");
    rt.block_on(store.put(&key, "1".into(), Some(Duration::from_secs(60)))).unwrap();
    rt.run_for(Duration::from_secs(59));
    let left = rt.block_on(store.get(&key)).unwrap().unwrap().ttl_left;
    assert_eq!(left, Some(Duration::from_secs(1)));
    rt.run_for(Duration::from_secs(1));
    assert_eq!(rt.block_on(store.get(&key)).unwrap(), None);
    assert!(store.snapshot().is_empty());
}

#[test]
fn a_slow_subscriber_gets_a_gap_and_bounded_memory() {
    let (rt, store) = sim(MemoryStore::builder(), 1);
    let channel = Key::from("c");
    let mut sub = rt.block_on(store.subscribe(&channel)).unwrap();
    for _ in 0..5_000 {
        rt.block_on(store.publish(&channel, "m".into())).unwrap();
    }
    assert_eq!(rt.block_on(sub.next()), Some(Delivery::Gap));
    assert_eq!(rt.block_on(sub.next()), Some(Delivery::Message("m".into())));
}

#[test]
fn fnv_placement_is_modulo_and_cluster_placement_follows_hash_tags() {
    let fnv = MemoryStore::builder().shards(7).placement(Placement::Fnv1a).build();
    assert_eq!(fnv.place(b"foobar"), (0xbf9c_f968_u32 % 7) as usize);
    let slots = MemoryStore::new(64);
    assert_eq!(slots.place(b"{post:9}a"), slots.place(b"{post:9}b"));
}
