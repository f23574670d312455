//! Totals that one process writes for all.

use super::MS;
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Salt, Treatment};
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
}
