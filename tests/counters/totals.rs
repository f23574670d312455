//! Totals that one process writes for all.

use super::MS;
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Salt, Treatment};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SEC: Duration = Duration::from_secs(1);

fn build(store: &MemoryStore, rt: &SimRuntime, salt: Salt, seed: u64) -> Heatsink {
    let hs = Heatsink::builder(store.clone()).salt(salt).runtime(rt.clone()).seed(seed);
    hs.cores(2.try_into().unwrap()).build().unwrap()
}

/// The name of the total, where one is written.
fn total_name(store: &MemoryStore) -> Option<String> {
    let names = store.snapshot().into_keys().map(|name| name.to_string());
    names.into_iter().find(|name| name.contains("}total:"))
}

#[test]
fn no_total_is_written_unasked_and_the_call_is_a_sum_then() {
    let rt = SimRuntime::new(3);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).build();
    let hs = build(&store, &rt, Salt::new(), 1);
    rt.block_on(hs.counter("likes").add(5)).unwrap();
    hs.control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    rt.run_for(30 * SEC);
    assert_eq!(total_name(&store), None);
    assert_eq!(rt.block_on(hs.counter("likes").total()).unwrap().total(), 5);
}

#[test]
fn one_process_writes_the_total_another_takes_over_and_it_never_goes_back() {
    let rt = SimRuntime::new(3);
    let store = MemoryStore::builder().shards(4).latency(MS).runtime(rt.clone()).build();
    let writes = || Salt::new().totals(SEC);
    let mut writers: Vec<Heatsink> = (0..3).map(|i| build(&store, &rt, writes(), 10 + i)).collect();
    let reader = build(&store, &rt, Salt::new(), 1);
    let (counter, likes) = (reader.counter("likes"), reader.grow_only("likes"));
    reader.control().pin("likes", Treatment::Salt { slots: 16 }).unwrap();
    rt.run_for(10 * SEC);
    let name = total_name(&store).unwrap();
    let (own, stop) = (rt.clone(), rt.now().after(60 * SEC));
    let adds = reader.counter("likes");
    rt.spawn(async move {
        while own.now() < stop {
            adds.add(1).await.unwrap();
            own.sleep(10 * MS).await;
        }
    });
    let total = || rt.block_on(counter.total()).unwrap();
    let (mut last, began) = (0, store.writes_of(name.as_str()));
    for tick in 0..200 {
        if tick == 80 {
            // Whoever writes is among those that end.
            drop(writers.drain(..2));
        }
        rt.run_for(200 * MS);
        let before = store.reads_of(name.as_str());
        let now = total();
        assert!(
            store.reads_of(name.as_str()) - before <= 1 && now.total() >= last,
            "{now:?} after {last}"
        );
        // One interval, four when the writer has died, and the time that a process keeps a sum.
        let most = if (80..120).contains(&tick) { 6 * SEC } else { 2 * SEC + 200 * MS };
        assert!(now.age() <= most, "tick {tick}: {now:?}");
        assert!(rt.block_on(likes.total()).unwrap().total() >= now.total());
        last = now.total();
    }
    let written = store.writes_of(name.as_str()) - began;
    assert!((30..=42).contains(&written), "{written} writes in 40 s");
    rt.run_for(30 * SEC);
    let sum = rt.block_on(counter.sum_with(Duration::ZERO)).unwrap().total();
    rt.run_for(3 * SEC);
    assert_eq!(total().total(), sum);
    // Nobody is left to write it: it expires, and a sum is read.
    writers.clear();
    rt.run_for(5 * SEC);
    assert_eq!(total_name(&store), None);
    assert_eq!(total().total(), sum);
    // That is remembered too.
    let before = store.reads_of(name.as_str());
    for _ in 0..30 {
        rt.run_for(10 * MS);
        assert_eq!(total().total(), sum);
    }
    let read = store.reads_of(name.as_str()) - before;
    assert!(read <= 1, "{read} reads of a total that is not there");
}

#[test]
fn after_a_reset_no_total_from_before_is_shown() {
    let rt = SimRuntime::new(3);
    let store = MemoryStore::builder().shards(4).latency(MS).runtime(rt.clone()).build();
    let writer = build(&store, &rt, Salt::new().totals(SEC), 10);
    let reader = build(&store, &rt, Salt::new(), 1);
    let (counter, likes) = (reader.counter("likes"), reader.grow_only("likes"));
    reader.control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    rt.block_on(counter.add(500)).unwrap();
    rt.run_for(10 * SEC);
    assert_eq!(rt.block_on(counter.total()).unwrap().total(), 500);
    rt.block_on(counter.reset()).unwrap();
    assert_eq!(total_name(&store), None);
    assert_eq!(rt.block_on(counter.total()).unwrap().total(), 0);
    rt.block_on(counter.add(3)).unwrap();
    for _ in 0..50 {
        rt.run_for(100 * MS);
        for total in [rt.block_on(counter.total()), rt.block_on(likes.total())] {
            assert!(total.unwrap().total() <= 3);
        }
    }
    assert_eq!(rt.block_on(likes.total()).unwrap().total(), 3);
    assert!(total_name(&store).is_some());
    assert_eq!(rt.block_on(writer.counter("likes").total()).unwrap().total(), 3);
}

#[test]
fn after_an_expiry_no_total_from_before_is_shown() {
    let rt = SimRuntime::new(4);
    let store = MemoryStore::builder().shards(4).latency(MS).runtime(rt.clone()).build();
    let key = heatsink::Key::from("likes");
    rt.block_on(heatsink::store::Store::put(&store, &key, "7".into(), Some(30 * SEC))).unwrap();
    let end = rt.now().after(30 * SEC);
    let writer = build(&store, &rt, Salt::new().totals(SEC), 10);
    let reader = build(&store, &rt, Salt::new(), 1);
    reader.control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    rt.run_for(end.since(rt.now()) - 100 * MS);
    let total = |hs: &Heatsink| rt.block_on(hs.counter("likes").total()).unwrap().total();
    assert_eq!((total(&reader), total(&writer)), (7, 7));
    rt.run_for(end.since(rt.now()));
    for _ in 0..30 {
        assert_eq!((total(&reader), total(&writer)), (0, 0));
        rt.run_for(100 * MS);
    }
}

/// On a store that takes its time, between the begin of a sum and its total.
#[test]
fn a_total_is_of_a_count_within_its_age() {
    let rt = SimRuntime::new(5);
    let store = MemoryStore::builder().shards(4).latency(100 * MS).runtime(rt.clone()).build();
    let _writer = build(&store, &rt, Salt::new().totals(2 * SEC), 10);
    let reader = build(&store, &rt, Salt::new(), 1);
    reader.control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    rt.run_for(20 * SEC);
    let acked = Arc::new(Mutex::new(Vec::new()));
    let (own, books, adds) = (rt.clone(), acked.clone(), reader.counter("likes"));
    rt.spawn(async move {
        for n in 1.. {
            adds.add(1).await.unwrap();
            books.lock().unwrap().push((own.now(), n));
        }
    });
    let counter = reader.counter("likes");
    for _ in 0..100 {
        rt.run_for(150 * MS);
        let total = rt.block_on(counter.total()).unwrap();
        let from = rt.now().before(total.age());
        let books = acked.lock().unwrap();
        let least = books.iter().rev().find(|(at, _)| *at < from).map_or(0, |(_, n)| *n);
        assert!(total.total() >= least, "{total:?}, and {least} had been acknowledged");
    }
}
