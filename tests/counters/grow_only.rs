//! What a counter that only grows promises: it never shows less than before, and a store that has
//! lost something is told from a load that was overtaken.

use super::MS;
use bytes::Bytes;
use heatsink::store::{MemoryStore, Store, Stored};
use heatsink::testing::SimRuntime;
use heatsink::{GrowOnly, Heatsink, Key, Result, Salt, Sum, Treatment};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A store whose answers to reads may take a while to come back.
struct Slow {
    inner: MemoryStore,
    rt: SimRuntime,
    back: Arc<Mutex<VecDeque<Duration>>>,
}

impl Store for Slow {
    async fn get(&self, key: &Key) -> Result<Option<Stored>> {
        let back = self.back.lock().unwrap().pop_front().unwrap_or_default();
        let found = self.inner.get(key).await;
        self.rt.sleep(back).await;
        found
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        self.inner.get_many(keys).await
    }

    async fn put(&self, key: &Key, value: Bytes, ttl: Option<Duration>) -> Result<()> {
        self.inner.put(key, value, ttl).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        self.inner.delete_many(keys).await
    }

    async fn add(&self, key: &Key, amount: i64) -> Result<i64> {
        self.inner.add(key, amount).await
    }
}

fn sum(rt: &SimRuntime, views: &GrowOnly) -> (i64, u64) {
    let sum = rt.block_on(views.sum_with(Duration::ZERO)).unwrap();
    (sum.total(), sum.lost())
}

#[test]
fn less_is_reported_as_lost_only_if_it_was_asked_for_after_more_was_shown() {
    let rt = SimRuntime::new(3);
    let inner = MemoryStore::builder().latency(MS).runtime(rt.clone()).build();
    let back = Arc::new(Mutex::new(VecDeque::new()));
    let store = Slow { inner: inner.clone(), rt: rt.clone(), back: back.clone() };
    let hs = Heatsink::builder(store).runtime(rt.clone()).seed(3).build().unwrap();
    let views = hs.grow_only("views");
    rt.block_on(views.add(10)).unwrap();
    // A load that has read 10 and is long on its way back.
    back.lock().unwrap().push_back(100 * MS);
    let overtaken = Arc::new(Mutex::new(None::<Sum>));
    let (of, to) = (views.clone(), overtaken.clone());
    rt.spawn(async move {
        let sum = of.sum_with(Duration::ZERO).await.unwrap();
        *to.lock().unwrap() = Some(sum);
    });
    rt.run_for(10 * MS);
    rt.block_on(views.add(5)).unwrap();
    assert_eq!(sum(&rt, &views), (15, 0));
    assert_eq!(*overtaken.lock().unwrap(), None);
    rt.run_for(200 * MS);
    let overtaken = overtaken.lock().unwrap().expect("it has ended");
    assert_eq!((overtaken.total(), overtaken.lost()), (15, 0), "it never goes back");
    assert_eq!(hs.add_stats().sums_regressed, 0, "and nothing was lost");
    // The store was restored from a backup.
    inner.put_now("views", "4").unwrap();
    assert_eq!(sum(&rt, &views), (15, 11));
    assert_eq!(hs.add_stats().sums_regressed, 1);
    // What the store has now counts from there on.
    rt.block_on(views.add(20)).unwrap();
    assert_eq!(sum(&rt, &views), (24, 0));
    assert_eq!(hs.add_stats().sums_regressed, 1);
}

#[test]
fn a_salted_counter_grows_over_rotations_and_says_what_a_shard_has_lost() {
    let rt = SimRuntime::new(5);
    let store = MemoryStore::builder().shards(8).latency(MS).runtime(rt.clone()).build();
    let salt = || Salt::new().lease(500 * MS).timeout(100 * MS).grave(Duration::from_secs(2));
    let build = |seed| {
        let builder = Heatsink::builder(store.clone()).salt(salt()).runtime(rt.clone());
        builder.seed(seed).build().unwrap()
    };
    let (hs, other) = (build(5), build(6));
    let (views, writer) = (hs.grow_only("views"), other.counter("views"));
    let (mut shown, mut given) = (0, 0);
    for slots in [4u32, 8, 2, 1, 4] {
        if slots == 1 {
            hs.control().unpin("views");
        } else {
            hs.control().pin("views", Treatment::Salt { slots }).unwrap();
        }
        for _ in 0..300 {
            rt.block_on(writer.add(3)).unwrap();
            given += 3;
            let (total, lost) = sum(&rt, &views);
            assert!(total >= shown && total == given, "{total} after {shown}, {given} given");
            assert_eq!(lost, 0);
            shown = total;
            rt.run_for(5 * MS);
        }
    }
    assert_eq!(hs.explain("views").salting.unwrap().slots, 4);
    // A shard has failed over to a replica that had heard of nothing in one of the slots.
    let generation = hs.explain("views").salting.unwrap().generation;
    let of_it = format!("slot.{generation}.");
    let mut slots = store.snapshot().into_iter();
    let (name, held) =
        slots.find(|(name, held)| name.to_string().contains(&of_it) && held != "0").unwrap();
    let held: u64 = std::str::from_utf8(&held).unwrap().parse().unwrap();
    store.put_now(name, "0").unwrap();
    assert_eq!(sum(&rt, &views), (shown, held));
    assert_eq!((hs.add_stats().sums_regressed, hs.salt_stats().slots_lost), (1, held));
    // What others add meanwhile hides the loss in the sum, and not in the slots.
    let mut slots = store.snapshot().into_iter();
    let (name, held) =
        slots.find(|(name, held)| name.to_string().contains(&of_it) && held != "0").unwrap();
    let held: u64 = std::str::from_utf8(&held).unwrap().parse().unwrap();
    store.put_now(name, "0").unwrap();
    let sum = rt.block_on(async {
        for _ in 0..10 {
            writer.add(10_000).await.unwrap();
        }
        views.sum_with(Duration::ZERO).await.unwrap()
    });
    assert!(sum.total() > shown && sum.lost() == 0);
    assert!(hs.salt_stats().slots_lost > 0 && held > 0);
}
