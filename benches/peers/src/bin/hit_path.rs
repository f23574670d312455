//! Hot reads: heatsink next to the caches of the Rust world and a map under a lock.
//!
//! One value of 256 bytes (as `Bytes`) under one key, or 64 of them that take turns; ours with age,
//! expiry, sampling and the write gate. `cargo run --release --bin hit_path [-- --json | --test]`

#[path = "../../../common/mod.rs"]
mod common;

use bytes::Bytes;
use common::{own_work, poll_once, rate};
use heatsink::{Heatsink, NearCache, Treatment, blocking, store::MemoryStore};
use heatsink_bench_peers::report::{self, Args, Figure};
use parking_lot::RwLock;
use std::cell::Cell;
use std::collections::HashMap;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

const KEYS: usize = 64;
const WINDOW: Duration = Duration::from_millis(40);
/// Windows of warming up: by then the sampling has adapted to the rate.
const WARM: u32 = 4;
const ROUNDS: usize = 3;

const NAMES: [&str; 9] = [
    "control",
    "heatsink read_with",
    "heatsink try_read_with",
    "heatsink get",
    "moka::sync get",
    "moka::future get",
    "quick_cache get",
    "foyer get",
    "RwLock<HashMap>",
];

struct Subjects {
    keys: Vec<String>,
    hs: Heatsink,
    moka: moka::sync::Cache<String, Bytes>,
    future: moka::future::Cache<String, Bytes>,
    quick: quick_cache::sync::Cache<String, Bytes>,
    foyer: foyer_memory::Cache<String, Bytes>,
    map: RwLock<HashMap<String, Bytes, ahash::RandomState>>,
}

fn look(bytes: &[u8]) -> u64 {
    u64::from(bytes[0]) + bytes.len() as u64
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        let hour = Duration::from_secs(3600);
        let keys: Vec<String> = (0..KEYS).map(|i| format!("post:{}", 9 + i)).collect();
        let store = MemoryStore::new(8);
        let near = NearCache::new().fresh(hour).stale(hour);
        let hs = Heatsink::builder(store.clone()).near(near).build()?;
        hs.control().pin_all(&keys, Treatment::near())?;
        let reads = blocking::Heatsink::from(hs.clone());
        let moka = moka::sync::Cache::builder().max_capacity(10_000).time_to_live(hour).build();
        let future = moka::future::Cache::builder().max_capacity(10_000).time_to_live(hour).build();
        let quick = quick_cache::sync::Cache::new(10_000);
        let foyer = foyer_memory::CacheBuilder::new(10_000).build();
        let map = RwLock::new(HashMap::default());
        for key in &keys {
            let value = Bytes::from(vec![7u8; 256]);
            store.put_now(key.as_str(), value.clone())?;
            reads.get(key)?;
            moka.insert(key.clone(), value.clone());
            poll_once(future.insert(key.clone(), value.clone()));
            quick.insert(key.clone(), value.clone());
            foyer.insert(key.clone(), value.clone());
            map.write().insert(key.clone(), value);
        }
        Ok(Subjects { keys, hs, moka, future, quick, foyer, map })
    }

    /// The key of this thread's next turn among `keys`.
    fn turn(&self, keys: usize) -> &str {
        thread_local! { static TURN: Cell<usize> = const { Cell::new(0) } }
        TURN.set(TURN.get() + 1);
        black_box(&self.keys[TURN.get() % keys])
    }

    /// Millions of operations per second.
    fn measure(&self, row: usize, keys: usize, threads: usize, window: Duration) -> f64 {
        const HOT: &str = "the hot key is cached";
        let Subjects { hs, moka, future, quick, foyer, map, .. } = self;
        let key = || self.turn(keys);
        match row {
            0 => rate(threads, window, WARM, own_work),
            1 => rate(threads, window, WARM, || {
                poll_once(hs.read_with(key(), look)).expect(HOT).expect(HOT)
            }),
            2 => rate(threads, window, WARM, || hs.try_read_with(key(), look).expect(HOT)),
            3 => rate(threads, window, WARM, || {
                look(&poll_once(hs.get(key())).expect(HOT).expect(HOT))
            }),
            4 => rate(threads, window, WARM, || look(&moka.get(key()).expect(HOT))),
            5 => rate(threads, window, WARM, || look(&poll_once(future.get(key())).expect(HOT))),
            6 => rate(threads, window, WARM, || look(&quick.get(key()).expect(HOT))),
            7 => rate(threads, window, WARM, || look(foyer.get(key()).expect(HOT).value())),
            _ => rate(threads, window, WARM, || {
                let value = map.read().get(key()).expect(HOT).clone();
                look(&value)
            }),
        }
    }

    /// One run: medians of interleaved rounds.
    fn run(&self, rounds: usize, window: Duration) -> (Vec<Figure>, f64) {
        let mut seen: Vec<(usize, usize, usize, Vec<f64>)> = Vec::new();
        for keys in [1, KEYS] {
            for row in 0..NAMES.len() {
                // The control has no key.
                if row > 0 || keys == 1 {
                    seen.extend([1, 2].map(|threads| (row, keys, threads, Vec::new())));
                }
            }
        }
        for _ in 0..rounds {
            for (row, keys, threads, values) in &mut seen {
                values.push(self.measure(*row, *keys, *threads, window));
            }
        }
        let name = |row: usize, keys: usize| {
            if row == 0 { NAMES[0].into() } else { format!("{}, {keys} hot", NAMES[row]) }
        };
        let figures: Vec<Figure> = seen
            .iter()
            .map(|(row, keys, threads, values)| {
                let value = common::median(values.iter().copied());
                Figure::new(name(*row, *keys), *threads, value).over(name(1, *keys))
            })
            .collect();
        let scaling = figures[1].value / figures[0].value;
        (figures, scaling)
    }
}

fn main() -> ExitCode {
    let args = match Args::parse("hit_path", "") {
        Ok(args) => args,
        Err(code) => return code,
    };
    let subjects = Subjects::new().expect("a store in memory and valid options");
    let (rounds, window) =
        if args.smoke { (1, Duration::from_millis(1)) } else { (ROUNDS, WINDOW) };
    report::run(&args, "Mops/s; ratio: over heatsink read_with", || subjects.run(rounds, window))
}
