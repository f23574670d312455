//! What an add to a buffered hot counter costs, and whether two threads get in each other's way.
//!
//! All rows are measured in one run, in interleaved rounds, next to two controls: an uncontended
//! `AtomicI64` of each thread's own, for the cost, and work that shares nothing, for the scaling. If
//! even the second does not scale, the machine was busy: the run is void and is repeated. One
//! `AtomicI64` for all threads stands there to show what the stripes spare. Exit status 1: a ratio
//! was missed, or no run was valid.
//!
//! `cargo bench --bench add [-- --json | --test]`
#![expect(clippy::disallowed_methods, reason = "a benchmark times the machine")]

mod common;

use common::{Measured, Row, poll_once, rows};
use heatsink::{Adds, Buffered, Heatsink, store::MemoryStore};
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

/// An add at one thread costs no more than this, or no more than `MAX_OVER_ATOMIC` atomics.
const MAX_NANOS: f64 = 15.0;
const MAX_OVER_ATOMIC: f64 = 2.0;
/// Gain from the second thread, as a share of the control's gain.
const MIN_SCALING: f64 = 0.92;
/// A run in which the control gains less than this says nothing.
const MIN_CONTROL: f64 = 1.8;

const NAMES: [&str; 4] = ["control", "own AtomicI64", "buffered add", "one AtomicI64 for all"];
const CONTROL: usize = 0;
const ATOMIC: usize = 1;
const ADD: usize = 2;

thread_local! {
    static COUNTER: Cell<u64> = const { Cell::new(1) };
}

/// Work of about the cost of an add that touches nothing but this thread's own counter.
#[inline]
fn own_work() {
    COUNTER.with(|counter| {
        let mut x = counter.get();
        for _ in 0..4 {
            x = (x ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(29);
        }
        counter.set(black_box(x));
    });
}

/// A counter on a line of its own.
#[repr(align(128))]
#[derive(Default)]
struct Own(AtomicI64);

struct Subjects {
    likes: Buffered,
    shared: Own,
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        // The cap is out of reach, so that every add is the common one.
        let adds = Adds::new().pending_max(1 << 60);
        let hs = Heatsink::builder(MemoryStore::new(8)).adds(adds).build()?;
        Ok(Subjects { likes: hs.buffered("post:9:likes")?, shared: Own::default() })
    }

    /// Millions of operations per second of one row.
    fn measure(&self, row: usize, threads: usize, window: Duration) -> f64 {
        match row {
            CONTROL => rate(threads, window, |_| own_work()),
            ATOMIC => rate(threads, window, |own| {
                black_box(own).fetch_add(1, Ordering::Relaxed);
            }),
            ADD => rate(threads, window, |_| {
                poll_once(black_box(&self.likes).add(1)).expect("the cap is out of reach");
            }),
            _ => rate(threads, window, |_| {
                black_box(&self.shared.0).fetch_add(1, Ordering::Relaxed);
            }),
        }
    }
}

/// The threads' rates, added up; each thread takes its own time, after a window of warming up.
fn rate(threads: usize, window: Duration, op: impl Fn(&AtomicI64) + Sync) -> f64 {
    let start = Barrier::new(threads);
    let one = || {
        let own = Own::default();
        let warm = Instant::now();
        while warm.elapsed() < window {
            (0..1024).for_each(|_| op(&own.0));
        }
        start.wait();
        let begun = Instant::now();
        let mut ops = 0u32;
        loop {
            (0..1024).for_each(|_| op(&own.0));
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

    fn nanos(&self, row: usize) -> f64 {
        1e3 / self.rows[row].one
    }

    fn over_atomic(&self) -> f64 {
        self.nanos(ADD) / self.nanos(ATOMIC)
    }

    fn scaling_over_control(&self) -> f64 {
        self.rows[ADD].scaling / self.rows[CONTROL].scaling
    }
}

impl Measured for Run {
    fn control(&self) -> (f64, f64) {
        (self.rows[CONTROL].scaling, MIN_CONTROL)
    }

    fn met(&self) -> bool {
        let cheap = self.nanos(ADD) <= MAX_NANOS || self.over_atomic() <= MAX_OVER_ATOMIC;
        cheap && self.scaling_over_control() >= MIN_SCALING
    }

    fn print(&self) {
        println!(
            "{:<24}{:>10}{:>12}{:>12}{:>9}",
            "median", "ns", "Mops/s, 1", "Mops/s, 2", "scaling"
        );
        for (i, (name, row)) in NAMES.iter().zip(&self.rows).enumerate() {
            println!(
                "{name:<24}{:>10.2}{:>12.2}{:>12.2}{:>9.2}",
                self.nanos(i),
                row.one,
                row.two,
                row.scaling
            );
        }
        println!(
            "buffered add: {:.2} ns, {:.2} x an atomic of one's own; {:.3} x the control's scaling",
            self.nanos(ADD),
            self.over_atomic(),
            self.scaling_over_control(),
        );
        println!("to meet: {MAX_NANOS} ns or {MAX_OVER_ATOMIC} x, and {MIN_SCALING} x");
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
            r#"{{"rows":[{}],"add_ns":{:.3},"add_over_atomic":{:.3},"scaling_over_control":{:.3},"valid":{},"met":{}}}"#,
            rows.join(","),
            self.nanos(ADD),
            self.over_atomic(),
            self.scaling_over_control(),
            self.valid(),
            self.met(),
        );
    }
}

fn main() -> ExitCode {
    let subjects = Subjects::new().expect("a store in memory and a valid configuration");
    common::run("add", "a ratio was missed", |rounds, window| Run::take(&subjects, rounds, window))
}
