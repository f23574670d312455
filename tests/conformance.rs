//! The conformance suite on the embedded store, and on stores that break their promises.
#![cfg(feature = "testing")]

use bytes::Bytes;
use heatsink::runtime::ThreadRuntime;
use heatsink::store::memory::{Fault, MemoryStoreBuilder, On, Op, Placement};
use heatsink::store::{Capability, MemoryStore, Store, Stored};
use heatsink::testing::{Report, SimRuntime, Suite, conformance};
use heatsink::{ErrorKind, Key, Result};
use std::time::Duration;

fn in_sim(builder: MemoryStoreBuilder, seed: u64) -> Report {
    let rt = SimRuntime::new(seed);
    let store = builder.runtime(rt.clone()).build();
    rt.block_on(Suite::new(store, "t:").runtime(rt.clone()).run())
}

#[test]
fn the_embedded_store_passes_under_virtual_time() {
    for seed in 0..20 {
        let latency = Duration::from_micros(300 * (seed % 3));
        in_sim(MemoryStore::builder().shards(8).latency(latency), seed).assert_passed();
    }
}

#[test]
fn it_passes_with_a_ceiling_a_lagging_replica_and_fnv_placement() {
    let ceiling = MemoryStore::builder()
        .shards(3)
        .placement(Placement::Fnv1a)
        .ceiling(20_000)
        .queue_max(Duration::from_secs(5))
        .replica_lag(Duration::from_millis(200));
    in_sim(ceiling, 1).assert_passed();
}

#[test]
fn it_passes_with_each_capability_off_and_with_none() {
    let switches: [fn(&mut Capability); 14] = [
        |c| c.compare_and_set = false,
        |c| c.put_if_newer = false,
        |c| c.seal = false,
        |c| c.add_once = false,
        |c| c.fold = false,
        |c| c.claim_lane = false,
        |c| c.take = false,
        |c| c.tokens = false,
        |c| c.publish = false,
        |c| c.replicas = false,
        |c| c.shard_of = false,
        |c| c.ttl = false,
        |c| c.version = false,
        |c| c.uncached = false,
    ];
    let mut none = Capability::all();
    for off in switches {
        let mut can = Capability::all();
        off(&mut can);
        off(&mut none);
        in_sim(MemoryStore::builder().capability(can), 3).assert_passed();
    }
    assert_eq!(none, Capability::default());
    in_sim(MemoryStore::builder().capability(none), 3).assert_passed();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_passes_on_real_threads() {
    conformance(MemoryStore::new(8), "t:").await.assert_passed();
    let store = MemoryStore::builder().latency(Duration::from_millis(1)).build();
    Suite::new(store, "t:").runtime(ThreadRuntime::new()).run().await.assert_passed();
}

#[test]
fn a_store_that_throttles_fails_or_hangs_is_caught_and_the_suite_ends() {
    for fault in [Fault::NotApplied, Fault::UnknownApplied, Fault::LostReply, Fault::Panic] {
        let rt = SimRuntime::new(1);
        let store = MemoryStore::builder().runtime(rt.clone()).build();
        store.faults().next_n(On::Only(Op::Put), 5, fault);
        let report = rt.block_on(Suite::new(store, "t:").runtime(rt.clone()).run());
        assert!(!report.passed(), "{fault:?}");
        assert!(report.to_string().contains("FAILED"));
    }
}

/// A store with one broken promise.
struct Broken {
    inner: MemoryStore,
    how: How,
}

#[derive(Clone, Copy, Debug)]
enum How {
    EmptyIsAbsent,
    ManySorted,
    DeleteAlwaysTrue,
    AddNotAtomic,
    WrongTypeIsUnknown,
    TtlForgotten,
}

impl Store for Broken {
    fn capability(&self) -> Capability {
        self.inner.capability()
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>> {
        let got = self.inner.get(key).await?;
        let empty = |s: &Stored| s.bytes.is_empty() && matches!(self.how, How::EmptyIsAbsent);
        Ok(got.filter(|s| !empty(s)))
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        let mut got = self.inner.get_many(keys).await;
        if matches!(self.how, How::ManySorted) {
            got.sort_by_key(|r| r.as_ref().is_ok_and(Option::is_none));
        }
        got
    }

    async fn put(&self, key: &Key, value: Bytes, ttl: Option<Duration>) -> Result<()> {
        let ttl = ttl.filter(|_| !matches!(self.how, How::TtlForgotten));
        self.inner.put(key, value, ttl).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        let mut gone = self.inner.delete_many(keys).await;
        if matches!(self.how, How::DeleteAlwaysTrue) {
            gone.iter_mut().for_each(|r| *r = Ok(true));
        }
        gone
    }

    async fn add(&self, key: &Key, amount: i64) -> Result<i64> {
        if matches!(self.how, How::AddNotAtomic) {
            let old = self.get(key).await?.map(|s| s.bytes).unwrap_or_else(|| "0".into());
            let old: i64 = String::from_utf8_lossy(&old).parse().unwrap_or(0);
            self.put(key, (old + amount).to_string().into(), None).await?;
            return Ok(old + amount);
        }
        self.inner.add(key, amount).await.map_err(|e| match self.how {
            How::WrongTypeIsUnknown => heatsink::Error::unknown(ErrorKind::Store, "no idea"),
            _ => e,
        })
    }
}

#[test]
fn each_broken_promise_is_caught() {
    for how in [
        How::EmptyIsAbsent,
        How::ManySorted,
        How::DeleteAlwaysTrue,
        How::AddNotAtomic,
        How::WrongTypeIsUnknown,
        How::TtlForgotten,
    ] {
        let rt = SimRuntime::new(1);
        let latency = Duration::from_micros(100);
        let mut can = Capability::default();
        can.ttl = true;
        let inner =
            MemoryStore::builder().runtime(rt.clone()).latency(latency).capability(can).build();
        let suite = Suite::new(Broken { inner, how }, "t:").runtime(rt.clone());
        let report = rt.block_on(suite.run());
        assert!(!report.passed(), "{how:?} was not caught:\n{report}");
    }
}

#[test]
fn a_capability_that_is_named_and_missing_is_caught() {
    let rt = SimRuntime::new(1);
    let inner = MemoryStore::builder().runtime(rt.clone()).build();
    // `Broken` forwards the required operations only.
    let suite = Suite::new(Broken { inner, how: How::EmptyIsAbsent }, "t:").runtime(rt.clone());
    let report = rt.block_on(suite.run());
    for area in ["compare_and_set", "put_if_newer", "seal", "add_once", "take", "publish"] {
        assert!(report.failures().any(|c| c.area == area), "{area}");
    }
}
