//! What the other traffic between processes costs, for the table of the whole: the registry of
//! salted counters, and announced writes. Both grow with the number of processes, so they are
//! counted at two sizes and drawn on from there.

use bytes::Bytes;
use heatsink::runtime::BoxFuture;
use heatsink::store::{MemoryStore, Store, Subscription};
use heatsink::stream::Transport;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Invalidations, Key, Registry, Result, Salt, Treatment};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

const S: Duration = Duration::from_secs(1);

/// 1 % of what a Redis shard serves a second.
const BUDGET: f64 = 1_000.0;

#[derive(Clone)]
struct Counting {
    store: MemoryStore,
    count: Arc<AtomicU64>,
}

impl Counting {
    fn new(store: &MemoryStore) -> Counting {
        Counting { store: store.clone(), count: Arc::default() }
    }
}

impl Registry for Counting {
    fn read(&self, name: &Key) -> BoxFuture<'static, Result<Option<Bytes>>> {
        self.count.fetch_add(1, Relaxed);
        let (store, name) = (self.store.clone(), name.clone());
        Box::pin(async move { Ok(store.get(&name).await?.map(|stored| stored.bytes)) })
    }

    fn replace(
        &self,
        name: &Key,
        expected: Option<Bytes>,
        value: Bytes,
    ) -> BoxFuture<'static, Result<bool>> {
        self.count.fetch_add(1, Relaxed);
        let (store, name) = (self.store.clone(), name.clone());
        Box::pin(async move { store.compare_and_set(&name, expected, value, None).await })
    }
}

impl Transport for Counting {
    fn send(&self, message: Bytes) -> BoxFuture<'static, Result<()>> {
        self.count.fetch_add(1, Relaxed);
        let store = self.store.clone();
        Box::pin(async move { store.publish(&"stream".into(), message).await })
    }

    fn listen(&self) -> BoxFuture<'static, Result<Box<dyn Subscription>>> {
        let store = self.store.clone();
        Box::pin(async move { store.subscribe(&"stream".into()).await })
    }
}

/// Reads of the registry a second, and announcements a second: of a fleet of so many processes with
/// one salted counter and one key that all hold and one writes so many times a second.
fn run(processes: u64, lease: Duration, silence: Duration, writes_per_sec: u32) -> [f64; 2] {
    let rt = SimRuntime::new(processes);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).build();
    store.put_now("page", "v").unwrap();
    let (registry, stream) = (Counting::new(&store), Counting::new(&store));
    let all: Vec<Heatsink> = (0..processes)
        .map(|seed| {
            let salt = Salt::new().lease(lease).registry(registry.clone());
            let stream = Invalidations::over(stream.clone()).silence(silence);
            let builder = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed);
            let hs = builder.salt(salt).invalidations(stream).build().unwrap();
            hs.control().pin("page", Treatment::near()).unwrap();
            hs
        })
        .collect();
    for hs in &all {
        rt.block_on(hs.counter("likes").add(1)).unwrap();
        rt.block_on(hs.get("page")).unwrap();
    }
    rt.run_for(5 * S);
    let secs = 2 * lease.max(silence).max(10 * S).as_secs() as u32;
    let before = [&registry, &stream].map(|c| c.count.load(Relaxed));
    for _ in 0..secs {
        for _ in 0..writes_per_sec {
            rt.block_on(all[0].put("page", "w")).unwrap();
            rt.run_for(S / 4 / writes_per_sec);
        }
        rt.run_for(if writes_per_sec > 0 { S * 3 / 4 } else { S });
    }
    let after = [&registry, &stream].map(|c| c.count.load(Relaxed));
    [0, 1].map(|i| (after[i] - before[i]) as f64 / f64::from(secs))
}

#[test]
fn what_registry_and_announcements_cost_at_twenty_thousand_processes_is_known() {
    let minute = 60 * S;
    println!("operations a second at the busiest name, by processes:   20    2,000   20,000");
    for (what, lease, silence) in [("by default", 2 * S, 3 * S), ("with a minute", minute, minute)]
    {
        let [few, many] = [10, 40].map(|n| run(n, lease, silence, 0));
        let each = [few[0] / 10.0, many[0] / 40.0];
        assert!((each[0] - each[1]).abs() <= 0.1 * each[0].max(0.01), "not linear: {each:?}");
        let at = |n: f64| (each[1] * n, many[1] * (1.0 + n));
        let [a, b, c] = [20.0, 2_000.0, 20_000.0].map(at);
        println!("  registry of salted counters, {what}: {:.1} {:.0} {:.0}", a.0, b.0, c.0);
        println!("  announcements, nothing written, {what}: {:.1} {:.0} {:.0}", a.1, b.1, c.1);
        if silence == minute {
            // That of announcements is twice what it should be: who holds what is said, too.
            assert!(c.0 <= 1.1 * BUDGET && c.1 <= 2.2 * BUDGET, "{c:?}");
        }
    }
    // A write is one message, whatever the size of the fleet, and is delivered to each process.
    let [quiet, busy] = [0, 2].map(|writes| run(20, minute, minute, writes)[1]);
    println!("  a write of a key that is held: {:.2} messages", (busy - quiet) / 2.0);
    assert!((0.5..=2.1).contains(&((busy - quiet) / 2.0)), "{busy} {quiet}");
}
