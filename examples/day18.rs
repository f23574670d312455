//! The lab "Day 18": one hot key among 100,000, and what each remedy leaves for the hottest node.
//!
//! A million reads, Zipf 1.2, keys `key:1` to `key:100000`, routed by their 32-bit FNV-1a modulo
//! the number of nodes. Ranks are drawn with xorshift32 from a fixed seed, so every run prints the
//! same numbers. First by hand: more nodes, ten keys copied to all nodes, ten keys kept in the
//! process. Then heatsink over the embedded store, which is told nothing.

use heatsink::key::fnv1a_32;
use heatsink::store::MemoryStore;
use heatsink::store::memory::Placement;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Key};
use serde_json::json;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "\
One key takes a fifth of a million reads: what more nodes, copies, a cache in the process and
heatsink leave for the hottest of 8 nodes. Takes some seconds.
Exit status 1 when heatsink leaves more than the better of the two remedies by hand.

usage: day18 [--json]
  --json   one JSON object on stdout, nothing else
  --help   this text";

const KEYS: usize = 100_000;
const READS: usize = 1_000_000;
const SKEW: f64 = 1.2;
const NODES: usize = 8;
const SEED: u32 = 2_463_534_242;
/// Keys that are copied or kept by hand.
const HOTTEST: usize = 10;
/// Reads per millisecond of virtual time when heatsink serves them: 50,000 a second.
const READS_PER_MS: usize = 50;

/// Marsaglia's 32-bit generator.
struct XorShift32(u32);

impl XorShift32 {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }
}

/// The ranks, from 1, that are read, in order.
fn ranks(rng: &mut XorShift32) -> Vec<usize> {
    let mut total = 0.0;
    let cumulative: Vec<f64> = (1..=KEYS)
        .map(|rank| {
            total += (rank as f64).powf(-SKEW);
            total
        })
        .collect();
    let draw = |_| {
        let at = f64::from(rng.next()) / 4_294_967_296.0 * total;
        cumulative.partition_point(|c| *c <= at).min(KEYS - 1) + 1
    };
    (0..READS).map(draw).collect()
}

fn key(rank: usize) -> String {
    format!("key:{rank}")
}

/// The hottest node's part of all reads.
fn hottest(loads: &[u64]) -> f64 {
    loads.iter().copied().max().unwrap_or(0) as f64 / READS as f64
}

/// Every read goes to the node of its key, but for those that `elsewhere` sends to another node
/// (`Some(Some(node))`) or serves without any (`Some(None)`).
fn by_hand(
    reads: &[usize],
    hashes: &[u32],
    nodes: usize,
    mut elsewhere: impl FnMut(usize) -> Option<Option<usize>>,
) -> Vec<u64> {
    let mut loads = vec![0; nodes];
    for &rank in reads {
        let own = hashes[rank - 1] as usize % nodes;
        if let Some(node) = elsewhere(rank).unwrap_or(Some(own)) {
            loads[node] += 1;
        }
    }
    loads
}

struct Auto {
    loads: Vec<u64>,
    absorbed: f64,
    hot_keys: usize,
    told: String,
}

/// The same reads through heatsink, which finds the hot keys in them.
fn by_heatsink(reads: &[usize]) -> heatsink::Result<Auto> {
    let rt = SimRuntime::new(u64::from(SEED));
    let store = MemoryStore::builder()
        .shards(NODES)
        .placement(Placement::Fnv1a)
        .runtime(rt.clone())
        .seed(u64::from(SEED))
        .build();
    let keys: Vec<Key> = (1..=KEYS).map(|rank| Key::from(key(rank))).collect();
    for key in &keys {
        store.put_now(key.clone(), "value")?;
    }
    let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(u64::from(SEED)).build()?;
    for (n, &rank) in reads.iter().enumerate() {
        let key = &keys[rank - 1];
        if hs.try_read_with(key, |_| ()).is_none() {
            rt.block_on(hs.get(key))?;
        }
        if n % READS_PER_MS == 0 {
            rt.run_for(Duration::from_millis(1));
        }
    }
    let loads: Vec<u64> = store.counts().iter().map(|c| c.reads).collect();
    let reached: u64 = loads.iter().sum();
    Ok(Auto {
        absorbed: 1.0 - reached as f64 / READS as f64,
        loads,
        hot_keys: hs.stats().hot_keys,
        told: hs.explain(key(1)).to_string(),
    })
}

fn percent(share: f64) -> String {
    format!("{:5.2} %", 100.0 * share)
}

/// Whether JSON is wanted; or how it ends at once.
fn asked() -> Result<bool, ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Ok(false),
        ["--json"] => Ok(true),
        ["--help"] => {
            println!("{HELP}");
            Err(ExitCode::SUCCESS)
        }
        _ => {
            eprintln!("{HELP}");
            Err(ExitCode::from(2))
        }
    }
}

fn main() -> ExitCode {
    let as_json = match asked() {
        Ok(as_json) => as_json,
        Err(code) => return code,
    };
    let mut rng = XorShift32(SEED);
    let reads = ranks(&mut rng);
    let hashes: Vec<u32> = (1..=KEYS).map(|rank| fnv1a_32(key(rank).as_bytes())).collect();
    let top_share = reads.iter().filter(|rank| **rank == 1).count() as f64 / READS as f64;
    let bare: Vec<(usize, f64)> = [8, 64, 256]
        .into_iter()
        .map(|nodes| (nodes, hottest(&by_hand(&reads, &hashes, nodes, |_| None))))
        .collect();
    let any = |rank| (rank <= HOTTEST).then(|| Some(rng.next() as usize % NODES));
    let copied = hottest(&by_hand(&reads, &hashes, NODES, any));
    let near = by_hand(&reads, &hashes, NODES, |rank| (rank <= HOTTEST).then_some(None));
    let absorbed = 1.0 - near.iter().sum::<u64>() as f64 / READS as f64;
    let near = hottest(&near);
    let auto = match by_heatsink(&reads) {
        Ok(auto) => auto,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let auto_hottest = hottest(&auto.loads);
    if as_json {
        let bare: serde_json::Map<String, serde_json::Value> =
            bare.iter().map(|(nodes, share)| (nodes.to_string(), json!(share))).collect();
        println!(
            "{}",
            json!({
                "top_share": top_share,
                "bare": bare,
                "copied_hottest": copied,
                "absorbed": absorbed,
                "near_hottest": near,
                "auto_hottest": auto_hottest,
                "auto_absorbed": auto.absorbed,
                "auto_hot_keys": auto.hot_keys,
            })
        );
    } else {
        println!(
            "{READS} reads over {KEYS} keys, Zipf {SKEW}; the top key: {}\n",
            percent(top_share)
        );
        println!("nodes   hottest   hottest ÷ even");
        for (nodes, share) in &bare {
            println!("{nodes:5}   {}   {:5.1}", percent(*share), share * *nodes as f64);
        }
        println!("\nhottest of {NODES} nodes, as a part of all reads");
        println!("  bare                         {}", percent(bare[0].1));
        println!("  ten keys copied to all       {}", percent(copied));
        println!(
            "  ten keys kept in the process {}   ({} of all reads absorbed)",
            percent(near),
            percent(absorbed).trim()
        );
        println!(
            "  heatsink, told nothing       {}   ({} absorbed, {} hot keys found)",
            percent(auto_hottest),
            percent(auto.absorbed).trim(),
            auto.hot_keys
        );
        println!("\n{}", auto.told);
    }
    if auto_hottest <= copied.min(near) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
