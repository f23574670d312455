//! Finding the frequent keys: heatsink's sketch next to the sketch crates.
//!
//! A million keys by Zipf's law (exponent 1.0, 100,000 keys), into 256 counters each. `recall`: of
//! the 100 most frequent keys, the share that is among the 100 largest counters. `proven`: of the
//! keys above a thousandth, the share whose lower bound says so; crates that have no lower bound
//! are not asked. `cargo run --release --bin sketch [-- --json | --test]`

#[path = "../../../common/mod.rs"]
mod common;

use common::median;
use datasketches::frequencies::{ErrorType, FrequentItemsSketch};
use heatsink::engine::control::sketch::{Observation, Sketch};
use heatsink_bench_peers::report::{self, Args, Figure, control_scaling};
use heatsink_bench_peers::zipf::Zipf;
use heavykeeper::{CuckooTopK, TopK};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher};
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;
use topk::FilteredSpaceSaving;

const COUNTERS: usize = 256;
const RANKS: u32 = 100_000;
const TOP: usize = 100;

/// A stream of keys, and what is true of it.
struct Stream {
    keys: Vec<String>,
    top: HashSet<String>,
    /// Keys above a thousandth of the stream, and that thousandth.
    frequent: HashSet<String>,
    line: u64,
}

impl Stream {
    fn new(updates: usize) -> Stream {
        let mut zipf = Zipf::new(RANKS, 1);
        let keys: Vec<String> = (0..updates).map(|_| format!("post:{}", zipf.draw())).collect();
        let mut counts: HashMap<&String, u64> = HashMap::new();
        keys.iter().for_each(|key| *counts.entry(key).or_default() += 1);
        let mut all: Vec<(&String, u64)> = counts.into_iter().collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        let line = updates as u64 / 1_000;
        let top = all.iter().take(TOP).map(|(key, _)| (*key).clone()).collect();
        let frequent = all.iter().filter(|a| a.1 >= line).map(|(key, _)| (*key).clone()).collect();
        Stream { keys, top, frequent, line }
    }
}

/// What a sketch made of a stream: the largest first, with a lower bound where there is one.
struct Found {
    nanos: f64,
    largest: Vec<(String, Option<u64>)>,
}

fn timed<S>(stream: &Stream, mut sketch: S, update: impl Fn(&mut S, &String)) -> (S, f64) {
    let begun = Instant::now();
    for key in &stream.keys {
        update(&mut sketch, black_box(key));
    }
    (sketch, begun.elapsed().as_nanos() as f64 / stream.keys.len() as f64)
}

fn ours(stream: &Stream) -> Found {
    let hasher = ahash::RandomState::with_seeds(1, 2, 3, 4);
    let update = |sketch: &mut Sketch, key: &String| {
        let key = key.as_bytes();
        let mut state = hasher.build_hasher();
        state.write(key);
        let hash = state.finish();
        sketch.observe(&Observation { hash, key, weight: 1, write: false, loaded: true });
    };
    let (sketch, nanos) = timed(stream, Sketch::new(COUNTERS, 1), update);
    let name = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
    let top = sketch.top(COUNTERS);
    let largest = top.into_iter().map(|e| (name(e.key()), Some(e.lower_bound()))).collect();
    Found { nanos, largest }
}

fn topk(stream: &Stream) -> Found {
    let update = |sketch: &mut FilteredSpaceSaving<String>, key: &String| {
        sketch.insert(key.clone(), 1);
    };
    let (sketch, nanos) = timed(stream, FilteredSpaceSaving::new(COUNTERS), update);
    let bound = |e: topk::ElementCounter| e.estimated_count() - e.associated_error();
    let sorted = sketch.into_sorted_iter();
    Found { nanos, largest: sorted.map(|(key, e)| (key, Some(bound(e)))).collect() }
}

fn datasketches(stream: &Stream) -> Found {
    // Its map is filled to three quarters: the next power of two above the counters.
    let sketch = FrequentItemsSketch::<String>::new(2 * COUNTERS).expect("a power of two");
    let update = |sketch: &mut FrequentItemsSketch<String>, key: &String| {
        sketch.update(key.clone());
    };
    let (sketch, nanos) = timed(stream, sketch, update);
    let mut rows = sketch.frequent_items(ErrorType::NoFalseNegatives);
    rows.sort_by_key(|row| std::cmp::Reverse(row.estimate()));
    let largest = rows.iter().map(|r| (r.item().clone(), Some(r.lower_bound()))).collect();
    Found { nanos, largest }
}

fn heavykeeper(stream: &Stream) -> Found {
    let sketch = TopK::<String>::new(COUNTERS, 4_096, 4, 0.9);
    let (sketch, nanos) = timed(stream, sketch, |sketch, key| sketch.add(key, 1));
    Found { nanos, largest: sketch.list().into_iter().map(|n| (n.item, None)).collect() }
}

fn cuckoo(stream: &Stream) -> Found {
    let sketch = CuckooTopK::<String>::new(COUNTERS, 4_096, 4, 0.9);
    let (sketch, nanos) = timed(stream, sketch, |sketch, key| sketch.add(key, 1));
    Found { nanos, largest: sketch.list().into_iter().map(|n| (n.item, None)).collect() }
}

type Make = fn(&Stream) -> Found;
const NAMES: [(&str, Make); 5] = [
    ("heatsink", ours),
    ("topk", topk),
    ("datasketches", datasketches),
    ("heavykeeper", heavykeeper),
    ("heavykeeper, cuckoo", cuckoo),
];

fn figures(stream: &Stream, rounds: usize) -> Vec<Figure> {
    let mut nanos = vec![Vec::new(); NAMES.len()];
    let mut found = Vec::new();
    for round in 0..rounds {
        for (at, (_, make)) in NAMES.iter().enumerate() {
            let one = make(stream);
            nanos[at].push(one.nanos);
            if round == 0 {
                found.push(one.largest);
            }
        }
    }
    let mut figures = Vec::new();
    for (at, (name, _)) in NAMES.iter().enumerate() {
        let nanos = median(nanos[at].iter().copied());
        figures.push(
            Figure::new(format!("{name}: ns an update"), 1, nanos).over("topk: ns an update"),
        );
    }
    for (at, (name, _)) in NAMES.iter().enumerate() {
        let hits = found[at].iter().take(TOP).filter(|(key, _)| stream.top.contains(key)).count();
        figures.push(Figure::new(format!("{name}: recall"), 1, hits as f64 / TOP as f64));
        if found[at].iter().all(|(_, bound)| bound.is_some()) {
            let proven = |(key, bound): &&(String, Option<u64>)| {
                stream.frequent.contains(key) && bound.is_some_and(|b| b >= stream.line)
            };
            let share =
                found[at].iter().filter(proven).count() as f64 / stream.frequent.len() as f64;
            figures.push(Figure::new(format!("{name}: proven"), 1, share));
        }
    }
    figures
}

fn main() -> ExitCode {
    let args = match Args::parse("sketch", "") {
        Ok(args) => args,
        Err(code) => return code,
    };
    let (updates, rounds) = if args.smoke { (20_000, 1) } else { (1_000_000, 3) };
    let stream = Stream::new(updates);
    report::run(&args, "k = 256; ratio: over topk", || {
        let figures = figures(&stream, rounds);
        (figures, control_scaling())
    })
}
