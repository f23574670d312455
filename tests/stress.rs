//! Real threads, real time: a hit is never older than a write that had returned before the read.
//!
//! One second by default. The long run is
//! `HEATSINK_STRESS_SECS=8 cargo test --release --test stress -- --nocapture`.
#![expect(clippy::disallowed_methods, reason = "a stress runs against the machine's clock")]

use heatsink::{Heatsink, NearCache, Treatment, blocking, store::MemoryStore};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const KEY: &str = "post:9";
const READERS: usize = 2;

/// Between two writes: most reads are hits, and every write still meets both readers.
const PAUSE: Duration = Duration::from_micros(500);

#[derive(Clone, Copy, PartialEq)]
enum Writer {
    /// Says what it does before and after, as the contract asks.
    Announces,
    /// The mutant: the gate never hears of the write.
    Silent,
}

#[derive(Default, Debug)]
struct Seen {
    hits: u64,
    misses: u64,
    stale: u64,
}

struct Stress {
    store: MemoryStore,
    hs: Heatsink,
    blocking: blocking::Heatsink,
    /// The newest version whose write has returned.
    acked: AtomicU64,
    over: AtomicBool,
}

impl Stress {
    fn new() -> Stress {
        let hour = Duration::from_secs(3600);
        let store = MemoryStore::new(8);
        store.put_now(KEY, version(0)).expect("a step of the stress");
        let near = NearCache::new().fresh(hour).stale(hour);
        let hs = Heatsink::builder(store.clone()).near(near).build().expect("a step of the stress");
        hs.control().pin(KEY, Treatment::near()).expect("a step of the stress");
        let blocking = blocking::Heatsink::from(hs.clone());
        blocking.get(KEY).expect("a step of the stress");
        Stress { store, hs, blocking, acked: AtomicU64::new(0), over: AtomicBool::new(false) }
    }

    fn run(&self, writer: Writer, time: Duration) -> (Seen, u64, u64) {
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(|| self.read())).collect();
            let (writes, own_stale) = self.write(writer, time);
            self.over.store(true, Ordering::Relaxed);
            let mut sum = Seen::default();
            for reader in readers {
                let seen = reader.join().expect("a step of the stress");
                sum.hits += seen.hits;
                sum.misses += seen.misses;
                sum.stale += seen.stale;
            }
            (sum, writes, own_stale)
        })
    }

    /// Writes and re-reads until the time is up: how often, and how often the re-read was older.
    fn write(&self, writer: Writer, time: Duration) -> (u64, u64) {
        let until = Instant::now() + time;
        let (mut last, mut stale) = (0, 0);
        while Instant::now() < until {
            last += 1;
            let announced = (writer == Writer::Announces).then(|| self.hs.writing(KEY));
            self.store.put_now(KEY, version(last)).expect("a step of the stress");
            if let Some(write) = announced {
                write.done();
            }
            self.acked.store(last, Ordering::SeqCst);
            let own =
                self.blocking.get(KEY).expect("a step of the stress").expect("the key is there");
            stale += u64::from(number(&own) < last);
            std::thread::sleep(PAUSE);
        }
        (last, stale)
    }

    fn read(&self) -> Seen {
        let mut seen = Seen::default();
        while !self.over.load(Ordering::Relaxed) {
            for _ in 0..256 {
                let acked = self.acked.load(Ordering::SeqCst);
                let got = if let Some(hit) = self.hs.try_read_with(KEY, number) {
                    seen.hits += 1;
                    hit
                } else {
                    seen.misses += 1;
                    number(
                        &self
                            .blocking
                            .get(KEY)
                            .expect("a step of the stress")
                            .expect("the key is there"),
                    )
                };
                seen.stale += u64::from(got < acked);
            }
        }
        seen
    }
}

fn version(n: u64) -> Vec<u8> {
    n.to_le_bytes().to_vec()
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// C1 on the machine's own threads: no hit and no load is older than an acknowledged write.
#[test]
fn no_read_is_older_than_a_write_that_had_returned() {
    let secs = std::env::var("HEATSINK_STRESS_SECS").ok().and_then(|s| s.parse().ok());
    let (seen, writes, own_stale) =
        Stress::new().run(Writer::Announces, Duration::from_secs(secs.unwrap_or(1)));
    println!("{seen:?}, {writes} writes, {own_stale} stale re-reads");
    assert_eq!((seen.stale, own_stale), (0, 0), "stale reads, stale re-reads of the writer");
    assert!(writes > 100, "the writer starved: {writes} writes");
    let enough = if secs.is_some_and(|s| s >= 8) && !cfg!(debug_assertions) {
        100_000_000
    } else {
        1_000_000
    };
    assert!(seen.hits >= enough, "{} hits are too few to tell anything", seen.hits);
}

/// The same stress sees the fault it is there for.
#[test]
fn the_stress_catches_a_write_that_passes_the_gate_by() {
    let (seen, writes, own_stale) = Stress::new().run(Writer::Silent, Duration::from_millis(200));
    println!("{seen:?}, {writes} writes, {own_stale} stale re-reads");
    assert!(seen.stale > 0 && own_stale > 0, "an unannounced write went unnoticed");
}
