//! What an admitted call costs, next to governor's own check.
//!
//! All rows are measured in one run, in interleaved rounds, next to a control that shares nothing.
//! If that does not scale, the machine was busy: the run is void and is repeated. 1,024 keys take
//! turns, so that each row looks its key up. Exit status 1: the cost was missed, or no run was
//! valid.
//!
//! `cargo bench --bench admit [-- --json | --test]`
#![expect(clippy::disallowed_methods, reason = "a benchmark times the machine")]

mod common;

use common::{Measured, Row, rows};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use heatsink::{Admission, Budget, Heatsink, store::MemoryStore};
use std::cell::Cell;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const KEYS: usize = 1_024;

/// An admitted call costs no more than this, or no more than so many of governor's checks.
const MAX_NANOS: f64 = 60.0;
const MAX_OVER_GOVERNOR: f64 = 1.5;
/// A run in which the control gains less than this from a second thread says nothing.
const MIN_CONTROL: f64 = 1.7;

const NAMES: [&str; 6] = [
    "control",
    "governor, keyed",
    "per key",
    "per key, small burst",
    "per key and tenant",
    "admission off",
];
const CONTROL: usize = 0;
const GOVERNOR: usize = 1;
const KEY: usize = 2;
const TENANT: usize = 4;

thread_local! {
    static COUNTER: Cell<u64> = const { Cell::new(1) };
}

/// Work of about the cost of a call that touches nothing but this thread's own counter.
fn own_work() {
    COUNTER.with(|counter| {
        let mut x = counter.get();
        for _ in 0..10 {
            x = (x ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(29);
        }
        counter.set(black_box(x));
    });
}

struct Subjects {
    keys: Vec<String>,
    governor: DefaultKeyedRateLimiter<String>,
    key: Heatsink,
    precise: Heatsink,
    tenant: Heatsink,
    off: Heatsink,
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        // Out of reach, so that every call is admitted.
        let budget = Budget::per_sec(1_000_000_000).burst(4_000_000_000);
        let build = |admission: Option<Admission>| {
            let builder = Heatsink::builder(MemoryStore::new(8));
            match admission {
                Some(admission) => builder.admission(admission).build(),
                None => builder.build(),
            }
        };
        let both = Admission::new().per_key(budget).per_tenant(budget);
        let both = both.tenant_of(|key| key.split(|byte| *byte == b':').next());
        // A burst that comes back within 10 ms goes by the clock that reads to the nanosecond.
        let small = Admission::new()
            .per_key(Budget::new(u32::MAX, Duration::from_nanos(1)).burst(10_000_000));
        let most = NonZeroU32::new(1_000_000_000).expect("not zero");
        Ok(Subjects {
            keys: (0..KEYS).map(|i| format!("acme:post:{i}")).collect(),
            governor: RateLimiter::keyed(Quota::per_second(most)),
            key: build(Some(Admission::new().per_key(budget)))?,
            precise: build(Some(small))?,
            tenant: build(Some(both))?,
            off: build(None)?,
        })
    }

    /// Millions of operations per second of one row.
    fn measure(&self, row: usize, threads: usize, window: Duration) -> f64 {
        let admit = |hs: &Heatsink, key: &str| {
            let admitted = black_box(hs).admit(key).is_ok();
            assert!(admitted, "the budget is out of reach");
        };
        match row {
            CONTROL => self.rate(threads, window, |_| own_work()),
            GOVERNOR => self.rate(threads, window, |key| {
                black_box(&self.governor).check_key(key).expect("out of reach");
            }),
            KEY => self.rate(threads, window, |key| admit(&self.key, key)),
            TENANT => self.rate(threads, window, |key| admit(&self.tenant, key)),
            3 => self.rate(threads, window, |key| admit(&self.precise, key)),
            _ => self.rate(threads, window, |key| admit(&self.off, key)),
        }
    }

    /// The threads' rates, added up; each thread takes its own time, after a window of warming up.
    fn rate(&self, threads: usize, window: Duration, op: impl Fn(&String) + Sync) -> f64 {
        let start = Barrier::new(threads);
        let one = || {
            let warm = Instant::now();
            while warm.elapsed() < window {
                self.keys.iter().for_each(&op);
            }
            start.wait();
            let begun = Instant::now();
            let mut ops = 0u32;
            loop {
                self.keys.iter().for_each(&op);
                ops += KEYS as u32;
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

    fn over_governor(&self) -> f64 {
        self.nanos(KEY) / self.nanos(GOVERNOR)
    }
}

impl Measured for Run {
    fn control(&self) -> (f64, f64) {
        (self.rows[CONTROL].scaling, MIN_CONTROL)
    }

    fn met(&self) -> bool {
        self.nanos(KEY) <= MAX_NANOS || self.over_governor() <= MAX_OVER_GOVERNOR
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
            "per key: {:.2} ns, {:.2} x governor's check; to meet: {MAX_NANOS} ns or \
             {MAX_OVER_GOVERNOR} x",
            self.nanos(KEY),
            self.over_governor(),
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
            r#"{{"rows":[{}],"admit_ns":{:.3},"admit_over_governor":{:.3},"valid":{},"met":{}}}"#,
            rows.join(","),
            self.nanos(KEY),
            self.over_governor(),
            self.valid(),
            self.met(),
        );
    }
}

fn main() -> ExitCode {
    let subjects = Subjects::new().expect("a store in memory and valid options");
    common::run("admit", "the cost was missed", |rounds, window| {
        Run::take(&subjects, rounds, window)
    })
}
