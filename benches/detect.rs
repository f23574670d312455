//! What the detection of hot keys adds to every request, and what a sampled one costs the driver.
//!
//! Next to a bare thread-local countdown, which every sampling costs, and a control that shares
//! nothing between threads. If even the control does not scale, the machine was busy: the run is
//! void and is repeated. Exit status 1: a ratio was missed, or no run was valid.
//!
//! `cargo bench --bench detect [-- --json | --test]`

mod common;

use common::{MIN_CONTROL, Measured, Row, countdown, json_rows, own_work, print_rows, rate, rows};
use heatsink::engine::control::sketch::{Observation, Sketch};
use heatsink::{Heatsink, store::MemoryStore};
use std::cell::{Cell, RefCell};
use std::hash::{BuildHasher, Hasher};
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

const KEY: &str = "post:9";
/// As many windows are run before one is measured: by then the sampling has adapted to the rate.
const WARM: u32 = 4;
/// What the detection adds to a request, as a multiple of a bare thread-local countdown.
const MAX_OBSERVE: f64 = 1.5;
/// A sketch update of a key of usual length, hash included.
const MAX_UPDATE_NANOS: f64 = 80.0;
const COUNTERS: usize = 256;
/// Keys of the stream, drawn beforehand.
const DRAWN: usize = 1 << 16;

const NAMES: [&str; 4] =
    ["control", "bare countdown", "detection of a request", "sketch update, k = 256"];
const CONTROL: usize = 0;
const COUNTDOWN: usize = 1;
const OBSERVE: usize = 2;
const UPDATE: usize = 3;

struct Subjects {
    hs: Heatsink,
    stream: Vec<String>,
    hasher: ahash::RandomState,
}

/// Keys as Zipf's law has them: the n-th of 100,000 comes 1/n times as often as the first.
fn zipf() -> Vec<String> {
    let mut sum = 0.0;
    let below: Vec<f64> = (1..=100_000)
        .map(|n| {
            sum += 1.0 / f64::from(n);
            sum
        })
        .collect();
    let mut x = 1_u64;
    let mut draw = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (x >> 11) as f64 / (1_u64 << 53) as f64 * sum;
        format!("post:{}", below.partition_point(|b| *b < at))
    };
    (0..DRAWN).map(|_| draw()).collect()
}

thread_local! {
    static SKETCH: RefCell<Sketch> = RefCell::new(Sketch::new(COUNTERS, 1));
    static TURN: Cell<usize> = const { Cell::new(0) };
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        let hasher = ahash::RandomState::with_seeds(1, 2, 3, 4);
        Ok(Subjects { hs: Heatsink::new(MemoryStore::new(8))?, stream: zipf(), hasher })
    }

    /// One key of the stream into this thread's own sketch, as the driver does it.
    fn update(&self) {
        let turn = TURN.get();
        TURN.set((turn + 1) % DRAWN);
        let key = self.stream[turn].as_bytes();
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key);
        let hash = hasher.finish();
        let seen = Observation { hash, key, weight: 1, write: false, loaded: true };
        SKETCH.with_borrow_mut(|sketch| black_box(sketch.observe(&seen).is_some()));
    }

    /// Millions of operations per second of one row.
    fn measure(&self, row: usize, threads: usize, window: Duration) -> f64 {
        match row {
            CONTROL => rate(threads, window, WARM, own_work),
            COUNTDOWN => rate(threads, window, WARM, countdown),
            OBSERVE => rate(threads, window, WARM, || self.hs.observe_only_this(KEY.as_bytes())),
            _ => rate(threads, window, WARM, || self.update()),
        }
    }
}

struct Run {
    rows: Vec<Row>,
}

impl Run {
    fn take(subjects: &Subjects, rounds: usize, window: Duration) -> Run {
        let measure = |row, threads| subjects.measure(row, threads, window);
        Run { rows: rows(NAMES.len(), rounds, measure) }
    }

    /// Time of the detection over that of a bare countdown, each with the loop around it.
    fn observe(&self) -> f64 {
        self.rows[COUNTDOWN].one / self.rows[OBSERVE].one
    }
}

impl Measured for Run {
    fn control(&self) -> (f64, f64) {
        (self.rows[CONTROL].scaling, MIN_CONTROL)
    }

    fn met(&self) -> bool {
        self.observe() <= MAX_OBSERVE && self.rows[UPDATE].nanos() <= MAX_UPDATE_NANOS
    }

    fn print(&self) {
        print_rows(&NAMES, &self.rows);
        println!(
            "detection of a request: {:.2} x a bare countdown; to meet: at most {MAX_OBSERVE} x",
            self.observe()
        );
        println!("sketch update: to meet: at most {MAX_UPDATE_NANOS} ns");
    }

    fn print_json(&self) {
        println!(
            r#"{{"rows":{},"observe_over_countdown":{:.3},"update_ns":{:.3},"valid":{},"met":{}}}"#,
            json_rows(&NAMES, &self.rows),
            self.observe(),
            self.rows[UPDATE].nanos(),
            self.valid(),
            self.met(),
        );
    }
}

fn main() -> ExitCode {
    let subjects = Subjects::new().expect("a store in memory and a valid configuration");
    common::run("detect", "a ratio was missed", |rounds, window| {
        Run::take(&subjects, rounds, window)
    })
}
