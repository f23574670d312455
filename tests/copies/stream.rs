//! Announced writes between handles of one process, on virtual time.

use heatsink::store::{Delivery, MemoryStore, Store, Subscription};
use heatsink::stream::{Channel, Transport};
use heatsink::testing::SimRuntime;
use heatsink::{Detect, Heatsink, Invalidations, NearCache, Treatment};
use heatsink::{Key, Result, runtime::BoxFuture};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const STALE: Duration = Duration::from_secs(20);

/// A channel that can be cut.
#[derive(Clone)]
struct Wire {
    channel: Channel<MemoryStore>,
    cut: Arc<AtomicBool>,
}

struct CutOff {
    inner: Box<dyn Subscription>,
    cut: Arc<AtomicBool>,
}

impl Subscription for CutOff {
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>> {
        Box::pin(async move {
            loop {
                let delivery = self.inner.next().await;
                if !self.cut.load(Relaxed) {
                    return delivery;
                }
            }
        })
    }
}

impl Transport for Wire {
    fn send(&self, message: bytes::Bytes) -> BoxFuture<'static, Result<()>> {
        self.channel.send(message)
    }

    fn listen(&self) -> BoxFuture<'static, Result<Box<dyn Subscription>>> {
        let (listening, cut) = (self.channel.listen(), self.cut.clone());
        Box::pin(async move {
            let inner = listening.await?;
            Ok(Box::new(CutOff { inner, cut }) as Box<dyn Subscription>)
        })
    }
}

struct World {
    rt: SimRuntime,
    store: MemoryStore,
    bus: MemoryStore,
    wires: Vec<Arc<AtomicBool>>,
    hs: Vec<Heatsink>,
}

fn world(n: usize, every_write: bool) -> World {
    let rt = SimRuntime::new(5);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).latency(2 * MS).build();
    let bus = MemoryStore::builder().runtime(rt.clone()).latency(MS).build();
    let wires: Vec<Arc<AtomicBool>> = (0..n).map(|_| Arc::default()).collect();
    let build = |(i, cut): (usize, &Arc<AtomicBool>)| {
        let wire = Wire { channel: Channel::new(bus.clone(), "inv"), cut: cut.clone() };
        let mut stream = Invalidations::over(wire);
        if every_write {
            stream = stream.every_write();
        }
        let hs = Heatsink::builder(store.clone())
            .runtime(rt.clone())
            .near(NearCache::new().fresh(STALE / 2).stale(STALE).jitter_permille(0))
            .detect(Detect::pins_only())
            .seed(i as u64 + 1)
            .invalidations(stream)
            .build()
            .unwrap();
        hs.control().pin("post:9", Treatment::near()).unwrap();
        hs
    };
    let hs = wires.iter().enumerate().map(build).collect();
    rt.run_for(2_000 * MS);
    World { rt, store, bus, wires, hs }
}

impl World {
    fn put(&self, by: usize, value: &'static str) {
        self.rt.block_on(self.hs[by].put("post:9", value)).unwrap();
    }

    /// Puts, and lets the others hear of it.
    fn put_and_tell(&self, by: usize, value: &'static str) {
        self.put(by, value);
        self.rt.run_for(10 * MS);
    }

    fn read(&self, by: usize) -> Vec<u8> {
        self.rt.block_on(self.hs[by].get("post:9")).unwrap().map_or(Vec::new(), |v| v.to_vec())
    }
}

#[test]
fn a_write_in_one_process_is_seen_by_the_others_in_milliseconds() {
    let w = world(3, false);
    w.put(0, "one");
    assert!((0..3).all(|i| w.read(i) == b"one"));
    w.rt.run_for(1_000 * MS);
    w.put(0, "two");
    w.rt.run_for(10 * MS);
    assert_eq!((w.read(1), w.read(2)), (b"two".to_vec(), b"two".to_vec()));
    w.rt.block_on(w.hs[2].delete("post:9")).unwrap();
    w.rt.run_for(10 * MS);
    assert!((0..3).all(|i| w.read(i).is_empty()), "a takedown");
    let gaps: Vec<u64> = w.hs.iter().map(|hs| hs.stats().stream_gaps).collect();
    assert_eq!(gaps, [1, 1, 1], "the start of the stream only");
    assert!(w.hs[1].stats().announcements_heard >= 2);
}

#[test]
fn a_write_that_nobody_holds_is_not_announced_and_one_without_a_stream_costs_one_operation() {
    let w = world(2, false);
    let before = w.bus.counts()[0].writes;
    for i in 0..100 {
        w.rt.block_on(w.hs[0].put(format!("other:{i}"), "x")).unwrap();
    }
    assert_eq!(w.hs[0].stats().announced, 0);
    // Signs of life go on.
    assert!(w.bus.counts()[0].writes - before <= 5);
    let store = MemoryStore::builder().runtime(w.rt.clone()).build();
    let hs = Heatsink::builder(store.clone()).runtime(w.rt.clone()).build().unwrap();
    for i in 0..100 {
        w.rt.block_on(hs.put(format!("other:{i}"), "x")).unwrap();
    }
    w.rt.run_for(10_000 * MS);
    assert_eq!(store.counts()[0].offered, 100, "one operation a put, and none of heatsink's own");
}

#[test]
fn a_cut_stream_is_noticed_and_values_are_no_older_than_the_stale_limit() {
    let w = world(2, false);
    w.put_and_tell(0, "one");
    assert_eq!(w.read(1), b"one");
    w.wires[1].store(true, Relaxed);
    w.put(0, "two");
    w.rt.run_for(10 * MS);
    assert_eq!(w.read(1), b"one", "it cannot know");
    // Silent for its time, the stream counts as cut: what is older is not read any more.
    w.rt.run_for(4_000 * MS);
    assert_eq!(w.read(1), b"two");
    // Cut for good, the stale limit is what is left.
    w.put(0, "three");
    w.rt.run_for(STALE);
    assert_eq!(w.read(1), b"three");
    assert!(w.hs[1].stats().served_age_max <= STALE);
    // And back again.
    w.wires[1].store(false, Relaxed);
    w.rt.run_for(5_000 * MS);
    assert_eq!(w.read(1), b"three");
    w.put(0, "four");
    w.rt.run_for(10 * MS);
    assert_eq!(w.read(1), b"four");
}

#[test]
fn a_gap_makes_everything_older_unreadable_at_once() {
    let w = world(2, false);
    w.put_and_tell(0, "one");
    assert_eq!(w.read(1), b"one");
    // Behind everybody's back, and then the transport says that it lost something.
    w.store.put_now("post:9", "two").unwrap();
    assert_eq!(w.read(1), b"one");
    w.bus.gap();
    w.rt.run_for(10 * MS);
    assert_eq!(w.read(1), b"two");
}

#[test]
fn a_load_that_an_announcement_overlaps_is_not_cached() {
    let w = world(2, true);
    w.put_and_tell(0, "one");
    // The reader's load has reached the store when the other process writes.
    let hs = w.hs[1].clone();
    hs.invalidate("post:9");
    w.rt.spawn(async move { drop(hs.get("post:9").await) });
    w.rt.run_for(MS);
    w.put(0, "two");
    w.rt.run_for(10 * MS);
    assert_eq!(w.read(1), b"two");
}

#[test]
fn bytes_of_others_on_the_channel_do_no_harm() {
    let w = world(2, false);
    w.put_and_tell(0, "one");
    let channel = Key::from("inv");
    for text in [
        "",
        "hello",
        "hsa1",
        "hsa1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x7f\x7f\x7f\x7f",
    ] {
        w.rt.block_on(w.bus.publish(&channel, text.into())).unwrap();
    }
    w.rt.run_for(10 * MS);
    assert_eq!(w.read(1), b"one");
    assert_eq!(w.hs[1].stats().stream_gaps, 1);
}
