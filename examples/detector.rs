//! One second of the article's traffic through heatsink's detector.
//!
//! A million requests, Zipf-shaped over 100,000 keys, with one viral key at a fifth of everything.
//! One request in 100 is sampled, and keys that are certainly above 10,000 a second are printed
//! beside their true rates.

use heatsink::engine::control::detect::{Detector, Options, Sample};
use heatsink::engine::control::sampling::Sampling;
use heatsink::engine::control::verdict::Estimate;
use heatsink::engine::time::Tick;
use std::collections::HashMap;

const HELP: &str = "\
Finds the hot keys in one second of synthetic traffic and prints them beside the truth.

usage: detector [--json]
  --json   one JSON object on stdout, nothing else
  --help   this text";

const REQUESTS: u64 = 1_000_000;
const KEYS: usize = 100_000;
const ONE_IN: u32 = 100;
const COUNTERS: usize = 256;
const THRESHOLD_PER_SEC: f64 = 10_000.0;
const SECOND: Tick = Tick(1_000_000_000);

/// Marsaglia's 32-bit generator, as in the article, so that its traffic comes out again.
struct XorShift32(u32);

impl XorShift32 {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    /// In [0, 1), from the upper 24 bits.
    fn uniform(&mut self) -> f64 {
        f64::from(self.next() >> 8) / 16_777_216.0
    }
}

struct Traffic {
    rng: XorShift32,
    cumulative: Vec<f64>,
    total: f64,
}

impl Traffic {
    fn new(seed: u32) -> Traffic {
        let mut total = 0.0;
        let ranks = (1..=KEYS).map(|rank| {
            total += 1.0 / rank as f64;
            total
        });
        let cumulative = ranks.collect();
        Traffic { rng: XorShift32(seed), cumulative, total }
    }

    fn next_key(&mut self) -> String {
        if self.rng.uniform() < 0.2 {
            return "video:viral".into();
        }
        let at = self.rng.uniform() * self.total;
        format!("video:{}", self.cumulative.partition_point(|c| *c < at) + 1)
    }
}

/// Any hash will do; a service uses the one that its cells are found by.
fn hash(key: &str) -> u64 {
    key.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

struct Row {
    key: String,
    found: Estimate,
    truth: u64,
}

fn run() -> (Vec<Row>, Detector) {
    let mut traffic = Traffic::new(2_463_534_242);
    let mut sampler = XorShift32(88_675_123);
    let mut truth: HashMap<String, u64> = HashMap::new();
    let options = Options {
        promote_per_sec: THRESHOLD_PER_SEC,
        counters: COUNTERS,
        sampling: Sampling::Fixed(ONE_IN),
        ..Options::default()
    };
    let mut detector = Detector::new(options, 1);
    detector.handle_start(Tick::ZERO);
    for i in 0..REQUESTS {
        let now = Tick(i * SECOND.0 / REQUESTS);
        while let Some(due) = detector.poll_timeout().filter(|due| *due <= now) {
            detector.handle_timeout(due);
        }
        let key = traffic.next_key();
        // The article draws for every request; heatsink counts down to the next sample instead.
        if sampler.next().is_multiple_of(ONE_IN) {
            let sample = Sample {
                hash: hash(&key),
                key: key.as_bytes(),
                write: false,
                weight: 1,
                loaded: true,
                one_in: ONE_IN,
            };
            detector.handle_sample(now, &sample);
        }
        *truth.entry(key).or_default() += 1;
    }
    detector.handle_timeout(SECOND);
    let certain = |e: &Estimate| e.lower_bound_per_sec >= THRESHOLD_PER_SEC;
    let rows = detector.top(COUNTERS).into_iter().filter(certain).map(|found| {
        let key = String::from_utf8_lossy(&found.key).into_owned();
        let truth = truth.get(&key).copied().unwrap_or(0);
        Row { key, found, truth }
    });
    (rows.collect(), detector)
}

/// A rate with a comma before every third digit.
fn commas(rate: f64) -> String {
    let digits = format!("{rate:.0}");
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn print_json(rows: &[Row], detector: &Detector) {
    let top: Vec<serde_json::Value> = rows
        .iter()
        .map(|row| {
            serde_json::json!({
                "key": row.key,
                "estimate": row.found.estimate_per_sec,
                "lower_bound": row.found.lower_bound_per_sec,
                "margin": row.found.margin_per_sec,
                "exact": row.truth,
            })
        })
        .collect();
    let record = detector.window_record();
    let object = serde_json::json!({
        "requests": REQUESTS,
        "samples": record.map(|r| r.samples),
        "one_in": ONE_IN,
        "counters": COUNTERS,
        "threshold_per_sec": THRESHOLD_PER_SEC,
        "window_s": record.map(|r| r.duration.as_secs_f64()),
        "floor_per_sec": detector.floor_per_sec(),
        "top": top,
    });
    println!("{object}");
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let json = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--json"] => true,
        ["--help" | "-h"] => return println!("{HELP}"),
        _ => {
            eprintln!("{HELP}");
            std::process::exit(2);
        }
    };
    let (rows, detector) = run();
    if json {
        return print_json(&rows, &detector);
    }
    for Row { key, found, truth } in &rows {
        println!(
            "{key:<12} estimated {:>9}/s at least {:>9}/s true {:>9}/s",
            commas(found.estimate_per_sec),
            commas(found.lower_bound_per_sec),
            commas(*truth as f64),
        );
    }
}
