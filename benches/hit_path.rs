//! What a read of a hot key costs, whether two threads get in each other's way, and what the
//! detection of hot keys adds to every request.
//!
//! All rows are measured in one run, in interleaved rounds, next to a control that shares nothing
//! between threads. If even the control does not scale, the machine was busy: the run is void and
//! is repeated. Exit status 1: a ratio was missed, or no run was valid.
//!
//! `cargo bench --bench hit_path [-- --json | --test]`
#![expect(clippy::disallowed_methods, reason = "a benchmark times the machine")]

mod common;

use bytes::Bytes;
use common::{Measured, Row, poll_once, rows};
use heatsink::{Heatsink, NearCache, Treatment, blocking, store::MemoryStore};
use moka::sync::Cache;
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const KEY: &str = "post:9";
const VALUE_BYTES: usize = 256;
/// As many windows are run before one is measured: by then the sampling has adapted to the rate.
const WARM: u32 = 4;
/// Hot read at one thread, as a multiple of `moka::sync` `get`.
const MIN_OVER_MOKA: f64 = 4.0;
/// Gain from the second thread, as a share of the control's gain.
const MIN_SCALING: f64 = 0.92;
/// What the detection adds to a request, as a multiple of a bare thread-local countdown.
const MAX_OBSERVE: f64 = 1.5;
/// A run in which the control gains less than this says nothing.
const MIN_CONTROL: f64 = 1.8;

const NAMES: [&str; 8] = [
    "control",
    "try_read_with",
    "read_with",
    "get (owned value)",
    "moka::sync get",
    "moka::sync get, ahash",
    "bare countdown",
    "detection of a request",
];
const CONTROL: usize = 0;
const HEATSINK: [usize; 3] = [1, 2, 3];
const TRY_READ: usize = 1;
const READ_WITH: usize = 2;
const MOKA: usize = 4;
const COUNTDOWN: usize = 6;
const OBSERVE: usize = 7;

thread_local! {
    static COUNTER: Cell<u64> = const { Cell::new(1) };
    static LEFT: Cell<u32> = const { Cell::new(1) };
}

/// One request in 1,000 does something, the others count down.
#[inline]
fn countdown() -> u64 {
    LEFT.with(|left| {
        // In a service there is other work between two requests: nothing stays in a register.
        let left = black_box(left);
        let n = left.get() - 1;
        left.set(if n == 0 { black_box(1_000) } else { n });
        u64::from(n)
    })
}

/// Work of about the cost of a hit that touches nothing but this thread's own counter.
#[inline]
fn own_work() -> u64 {
    COUNTER.with(|counter| {
        let mut x = counter.get();
        for _ in 0..4 {
            x = (x ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(29);
        }
        counter.set(x);
        x
    })
}

/// What every row does with the bytes it got.
#[inline]
fn look(bytes: &[u8]) -> u64 {
    u64::from(bytes[0]) + bytes.len() as u64
}

struct Subjects {
    hs: Heatsink,
    moka: Cache<String, Bytes>,
    moka_ahash: Cache<String, Bytes, ahash::RandomState>,
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        let value = Bytes::from(vec![7u8; VALUE_BYTES]);
        let hour = Duration::from_secs(3600);
        let store = MemoryStore::new(8);
        store.put_now(KEY, value.clone())?;
        let near = NearCache::new().fresh(hour).stale(hour);
        let hs = Heatsink::builder(store).near(near).build()?;
        hs.control().pin(KEY, Treatment::near())?;
        let _ = blocking::Heatsink::from(hs.clone()).get(KEY)?;
        let moka = Cache::new(10_000);
        moka.insert(KEY.to_owned(), value.clone());
        let moka_ahash = Cache::builder()
            .max_capacity(10_000)
            .build_with_hasher(ahash::RandomState::with_seeds(1, 2, 3, 4));
        moka_ahash.insert(KEY.to_owned(), value);
        Ok(Subjects { hs, moka, moka_ahash })
    }

    /// Millions of operations per second of one row.
    fn measure(&self, row: usize, threads: usize, window: Duration) -> f64 {
        let Subjects { hs, moka, moka_ahash } = self;
        let hot = "the hot key is cached";
        match row {
            0 => rate(threads, window, own_work),
            1 => rate(threads, window, || hs.try_read_with(black_box(KEY), look).expect(hot)),
            2 => rate(threads, window, || {
                poll_once(hs.read_with(black_box(KEY), look)).expect(hot).expect(hot)
            }),
            3 => rate(threads, window, || {
                look(&poll_once(hs.get(black_box(KEY))).expect(hot).expect(hot))
            }),
            4 => rate(threads, window, || look(&moka.get(black_box(KEY)).expect(hot))),
            5 => rate(threads, window, || look(&moka_ahash.get(black_box(KEY)).expect(hot))),
            6 => rate(threads, window, countdown),
            _ => rate(threads, window, || {
                hs.observe_only_this(KEY.as_bytes());
                0
            }),
        }
    }
}

/// The threads' rates, added up; each thread takes its own time, after some windows of warming up:
/// the sampling adapts to the rate of requests, and a row must not pay for the silence before it.
fn rate(threads: usize, window: Duration, op: impl Fn() -> u64 + Sync) -> f64 {
    let start = Barrier::new(threads);
    let one = || {
        let warm = Instant::now();
        while warm.elapsed() < WARM * window {
            for _ in 0..1024 {
                black_box(op());
            }
        }
        start.wait();
        let begun = Instant::now();
        let mut ops = 0u32;
        loop {
            for _ in 0..1024 {
                black_box(op());
            }
            ops += 1024;
            let took = begun.elapsed();
            if took >= window {
                return f64::from(ops) / took.as_secs_f64() / 1e6;
            }
        }
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        all.into_iter().map(|t| t.join().expect("a row panicked")).sum()
    })
}

struct Run {
    rows: Vec<Row>,
}

impl Run {
    fn take(subjects: &Subjects, rounds: usize, window: Duration) -> Run {
        let measure = |row, threads| subjects.measure(row, threads, window);
        Run { rows: rows(NAMES.len(), rounds, measure) }
    }

    fn over_moka(&self, row: usize) -> f64 {
        self.rows[row].one / self.rows[MOKA].one
    }

    fn scaling_of_control(&self, row: usize) -> f64 {
        self.rows[row].scaling / self.rows[CONTROL].scaling
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

    /// The ratios that are promised are those of the borrowed reads, and the detection's.
    fn met(&self) -> bool {
        self.observe() <= MAX_OBSERVE
            && [TRY_READ, READ_WITH].iter().all(|&row| {
                self.over_moka(row) >= MIN_OVER_MOKA && self.scaling_of_control(row) >= MIN_SCALING
            })
    }

    fn print(&self) {
        println!("{:<24}{:>12}{:>12}{:>9}", "Mops/s, median", "1 thread", "2 threads", "scaling");
        for (name, row) in NAMES.iter().zip(&self.rows) {
            println!("{name:<24}{:>12.2}{:>12.2}{:>9.2}", row.one, row.two, row.scaling);
        }
        for row in HEATSINK {
            println!(
                "{:<18} {:.2} x moka::sync get at one thread; {:.3} x the control's scaling",
                NAMES[row],
                self.over_moka(row),
                self.scaling_of_control(row),
            );
        }
        println!("to meet, read_with and try_read_with: {MIN_OVER_MOKA} x and {MIN_SCALING} x");
        println!(
            "detection of a request: {:.2} x a bare countdown; to meet: at most {MAX_OBSERVE} x",
            self.observe()
        );
    }

    fn print_json(&self) {
        let rows: Vec<String> = NAMES
            .iter()
            .zip(&self.rows)
            .map(|(name, row)| {
                format!(
                    r#"{{"name":"{name}","mops_1":{:.3},"mops_2":{:.3},"scaling":{:.3}}}"#,
                    row.one, row.two, row.scaling
                )
            })
            .collect();
        println!(
            r#"{{"rows":[{}],"read_over_moka":{:.3},"scaling_over_control":{:.3},"observe_over_countdown":{:.3},"valid":{},"met":{}}}"#,
            rows.join(","),
            self.over_moka(READ_WITH),
            self.scaling_of_control(READ_WITH),
            self.observe(),
            self.valid(),
            self.met(),
        );
    }
}

fn main() -> ExitCode {
    let subjects = Subjects::new().expect("a store in memory and a valid configuration");
    common::run("hit_path", "a ratio was missed", |rounds, window| {
        Run::take(&subjects, rounds, window)
    })
}
