//! Random operation sequences against a naive model: one process, so every read must be exact.
//!
//! `cargo run --release -- [SEEDS]` runs that many seeds (default 20) and prints the one that
//! fails.

use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Read, Treatment};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::time::Duration;

fn key(n: u64) -> Vec<u8> {
    match n % 8 {
        0 => Vec::new(),
        7 => vec![b'k'; 1 << 20],
        n => format!("key:{n}").into_bytes(),
    }
}

fn run(seed: u64) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let rt = SimRuntime::new(seed);
    let store = MemoryStore::builder().shards(3).runtime(rt.clone()).seed(seed).build();
    let hs = Heatsink::builder(store).runtime(rt.clone()).seed(seed).build().expect("defaults");
    let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    rt.block_on(async {
        for step in 0..400u32 {
            let k = key(rng.next_u64());
            match rng.next_u64() % 10 {
                0 | 1 => {
                    let value = step.to_le_bytes().to_vec();
                    hs.put(&k, value.clone()).await.expect("no faults here");
                    model.insert(k, value);
                }
                2 => {
                    let was = hs.delete(&k).await.expect("no faults here");
                    assert_eq!(was, model.remove(&k).is_some(), "delete at step {step}");
                }
                3 => drop(hs.control().pin(&k, Treatment::near())),
                4 => drop(hs.control().unpin(&k)),
                5 => hs.invalidate_prefix(&k[..k.len().min(3)]),
                6 => rt.sleep(Duration::from_millis(rng.next_u64() % 900)).await,
                7 => {
                    let keys: Vec<_> = (0..8).map(key).collect();
                    let got = hs.get_many(&keys).await;
                    for (k, got) in keys.iter().zip(got) {
                        let got = got.expect("no faults here").map(|v| v.to_vec());
                        assert_eq!(got.as_ref(), model.get(k), "get_many at step {step}");
                    }
                }
                n => {
                    let read = if n == 8 { Read::latest() } else { Read::new() };
                    let got = hs.get_with(&k, read).await.expect("no faults here");
                    let got = got.map(|v| v.to_vec());
                    assert_eq!(got.as_ref(), model.get(&k), "get at step {step}");
                }
            }
        }
    });
    // A refresh may still be under way.
    rt.run_for(Duration::from_secs(1));
    assert_eq!(hs.stats().keys_under_way, 0, "something leaked");
}

fn main() {
    let seeds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(20u64);
    for seed in 0..seeds {
        if std::panic::catch_unwind(|| run(seed)).is_err() {
            eprintln!("seed {seed} failed; only this one: see `run({seed})`");
            std::process::exit(1);
        }
    }
    println!("{seeds} seeds of 400 operations passed");
}
