//! What the benches share: rows measured in interleaved rounds at one thread and at two, next to a
//! control that shares nothing.
#![allow(
    clippy::allow_attributes,
    clippy::disallowed_methods,
    dead_code,
    reason = "each bench uses its part; it times the machine"
)]

pub(crate) mod paths;
pub(crate) mod store;

use std::cell::Cell;
use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Barrier;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Rounds of a full run, the span of one measurement, and runs until a valid one.
const ROUNDS: usize = 9;
const WINDOW: Duration = Duration::from_millis(60);
const TRIES: usize = 5;

/// A run in which the control gains less than this from a second thread says nothing.
pub(crate) const MIN_CONTROL: f64 = 1.8;

thread_local! {
    static COUNTER: Cell<u64> = const { Cell::new(1) };
    static LEFT: Cell<u32> = const { Cell::new(1) };
}

/// Work of about the cost of a hit that touches nothing but this thread's own counter.
#[inline]
pub(crate) fn own_work() -> u64 {
    COUNTER.with(|counter| {
        let mut x = counter.get();
        for _ in 0..4 {
            x = (x ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(29);
        }
        counter.set(black_box(x));
        x
    })
}

/// One request in 1,000 does something, the others count down.
#[inline]
pub(crate) fn countdown() -> u64 {
    LEFT.with(|left| {
        // In a service there is other work between two requests: nothing stays in a register.
        let left = black_box(left);
        let n = left.get() - 1;
        left.set(if n == 0 { black_box(1_000) } else { n });
        u64::from(n)
    })
}

/// The output of a future that is ready at once, as a hit and a buffered add are.
#[inline]
pub(crate) fn poll_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => out,
        Poll::Pending => panic!("what is measured had to wait"),
    }
}

/// Millions of operations per second, the threads' rates added up. Each thread takes its own time,
/// after `warm` windows of warming up.
pub(crate) fn rate<T>(
    threads: usize,
    window: Duration,
    warm: u32,
    op: impl Fn() -> T + Sync,
) -> f64 {
    let start = Barrier::new(threads);
    let one = || {
        let begun = Instant::now();
        while begun.elapsed() < warm * window {
            (0..1024).for_each(|_| drop(black_box(op())));
        }
        start.wait();
        let begun = Instant::now();
        let mut ops = 0u32;
        loop {
            (0..1024).for_each(|_| drop(black_box(op())));
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

/// Millions of operations per second of one row, medians of the rounds.
pub(crate) struct Row {
    pub(crate) one: f64,
    pub(crate) two: f64,
    /// Two threads together over one thread, round by round.
    pub(crate) scaling: f64,
}

impl Row {
    pub(crate) fn nanos(&self) -> f64 {
        1e3 / self.one
    }
}

/// Measures `rows` rows in interleaved rounds; `measure` takes a row and a number of threads.
pub(crate) fn rows(rows: usize, rounds: usize, measure: impl Fn(usize, usize) -> f64) -> Vec<Row> {
    let mut seen = vec![Vec::new(); rows];
    for _ in 0..rounds {
        for (row, seen) in seen.iter_mut().enumerate() {
            let one = measure(row, 1);
            seen.push((one, measure(row, 2)));
        }
    }
    let row = |seen: &Vec<(f64, f64)>| Row {
        one: median(seen.iter().map(|s| s.0)),
        two: median(seen.iter().map(|s| s.1)),
        scaling: median(seen.iter().map(|s| s.1 / s.0)),
    };
    seen.iter().map(row).collect()
}

pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The rows as a table.
pub(crate) fn print_rows(names: &[&str], rows: &[Row]) {
    println!("{:<28}{:>10}{:>12}{:>12}{:>9}", "median", "ns", "Mops/s, 1", "Mops/s, 2", "scaling");
    for (name, row) in names.iter().zip(rows) {
        let (ns, one, two, scaling) = (row.nanos(), row.one, row.two, row.scaling);
        println!("{name:<28}{ns:>10.2}{one:>12.2}{two:>12.2}{scaling:>9.2}");
    }
}

/// The rows as a JSON array.
pub(crate) fn json_rows(names: &[&str], rows: &[Row]) -> String {
    let one = |(name, row): (&&str, &Row)| {
        let (one, two, scaling) = (row.one, row.two, row.scaling);
        format!(r#"{{"name":"{name}","mops_1":{one:.3},"mops_2":{two:.3},"scaling":{scaling:.3}}}"#)
    };
    let rows: Vec<String> = names.iter().zip(rows).map(one).collect();
    format!("[{}]", rows.join(","))
}

/// What a bench has measured, and what it makes of that.
pub(crate) trait Measured {
    /// How the control scaled, and how it has to.
    fn control(&self) -> (f64, f64);
    /// Whether every ratio was met.
    fn met(&self) -> bool;
    fn print(&self);
    fn print_json(&self);

    fn valid(&self) -> bool {
        let (scaling, least) = self.control();
        scaling >= least
    }
}
/// Runs the bench `name` until a run is valid, and prints it. `missed` is said of a ratio.
pub(crate) fn run<M: Measured>(
    name: &str,
    missed: &str,
    take: impl Fn(usize, Duration) -> M,
) -> ExitCode {
    // A row that panics would leave its twin waiting at the barrier.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        std::process::exit(101);
    }));
    let (mut json, mut smoke) = (false, false);
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--json" => json = true,
            "--test" => smoke = true,
            "--bench" => {}
            "--help" => {
                println!("usage: {name} [--json | --test]");
                return ExitCode::SUCCESS;
            }
            other => {
                eprintln!("{name}: unknown argument {other}; there are --json, --test and --help");
                return ExitCode::from(2);
            }
        }
    }
    let (rounds, window) = if smoke { (1, Duration::from_millis(1)) } else { (ROUNDS, WINDOW) };
    let tries = if smoke { 1 } else { TRIES };
    for left in (0..tries).rev() {
        let run = take(rounds, window);
        if !smoke && !run.valid() && left > 0 {
            let (scaling, least) = run.control();
            eprintln!("void: the control scaled by {scaling:.2}, not {least}; once more");
            continue;
        }
        if json {
            run.print_json()
        } else {
            run.print()
        }
        if smoke {
            eprintln!("smoke run: no ratio was checked");
            return ExitCode::SUCCESS;
        }
        if !run.valid() {
            eprintln!("void: the control never scaled; this machine is too busy to measure on");
        } else if !run.met() {
            eprintln!("{missed}");
        }
        return if run.valid() && run.met() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    ExitCode::FAILURE
}
