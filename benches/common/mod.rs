//! What the benches share: rows measured in interleaved rounds at one thread and at two.

use std::future::Future;
use std::pin::pin;
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Rounds of a full run, the span of one measurement, and runs until a valid one.
const ROUNDS: usize = 9;
const WINDOW: Duration = Duration::from_millis(60);
const TRIES: usize = 5;

/// The output of a future that is ready at once, as a hit and a buffered add are.
#[inline]
#[allow(clippy::allow_attributes, dead_code, reason = "each bench uses its part")]
pub(crate) fn poll_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => out,
        Poll::Pending => panic!("what is measured had to wait"),
    }
}

/// Millions of operations per second of one row, medians of the rounds.
pub(crate) struct Row {
    pub(crate) one: f64,
    pub(crate) two: f64,
    /// Two threads together over one thread, round by round.
    pub(crate) scaling: f64,
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

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
