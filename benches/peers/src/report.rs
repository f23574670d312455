//! Five valid runs of a bench, and what they come to.

use crate::common::{MIN_CONTROL, median, own_work, rate};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;

/// Runs whose figures count.
const VALID: usize = 5;
/// Runs that are tried, for each that has to be valid.
const TRIES: usize = 4;
const CONTROL_WINDOW: Duration = Duration::from_millis(60);

/// One figure of one run.
#[derive(Clone, Debug)]
pub struct Figure {
    pub name: String,
    pub threads: usize,
    pub value: f64,
    /// The row that `ratio` is over, if it says anything.
    pub over: Option<String>,
}

impl Figure {
    #[must_use]
    pub fn new(name: impl Into<String>, threads: usize, value: f64) -> Figure {
        Figure { name: name.into(), threads, value, over: None }
    }

    /// The ratio of this row is its value over that of `row` at as many threads.
    #[must_use]
    pub fn over(mut self, row: impl Into<String>) -> Figure {
        self.over = Some(row.into());
        self
    }
}

/// How a bench was asked to run.
#[derive(Clone, Debug)]
pub struct Args {
    pub json: bool,
    /// One short run, and no judgement.
    pub smoke: bool,
    /// What else stood there.
    pub rest: Vec<String>,
}

impl Args {
    /// The arguments of this process; `extra` says what a bench takes beyond these.
    ///
    /// # Errors
    /// The status to exit with, after the usage was printed.
    pub fn parse(name: &str, extra: &str) -> Result<Args, ExitCode> {
        let mut args = Args { json: false, smoke: false, rest: Vec::new() };
        for arg in std::env::args().skip(1) {
            match arg.as_str() {
                "--json" => args.json = true,
                "--test" => args.smoke = true,
                "--help" => {
                    println!("usage: {name} [--json] [--test] {extra}");
                    return Err(ExitCode::SUCCESS);
                }
                other if !extra.is_empty() => args.rest.push(other.into()),
                other => {
                    eprintln!("{name}: unknown argument {other}; there are --json, --test, --help");
                    return Err(ExitCode::from(2));
                }
            }
        }
        Ok(args)
    }
}

/// How much the control gains from a second thread.
#[must_use]
pub fn control_scaling() -> f64 {
    let gain = || rate(2, CONTROL_WINDOW, 0, own_work) / rate(1, CONTROL_WINDOW, 0, own_work);
    median((0..3).map(|_| gain()))
}

/// Runs `take` until five runs are valid: those that are, and whether there were enough. `take`
/// returns what it measured and how the control scaled around it.
pub fn valid_runs<T>(args: &Args, take: impl FnMut() -> (T, f64)) -> (Vec<T>, bool) {
    let mut take = take;
    if args.smoke {
        eprintln!("smoke run: one short run, valid or not");
        return (vec![take().0], true);
    }
    let mut runs = Vec::new();
    for _ in 0..VALID * TRIES {
        let (run, scaling) = take();
        if scaling >= MIN_CONTROL {
            runs.push(run);
        } else {
            eprintln!("void: the control scaled by {scaling:.2}, not {MIN_CONTROL}; once more");
        }
        if runs.len() == VALID {
            return (runs, true);
        }
    }
    eprintln!("only {} of {VALID} runs were valid: the machine is too busy", runs.len());
    (runs, false)
}

/// A row of the table: the median over the runs, half the distance between the outermost, and the
/// median of the ratios within each run.
struct Line {
    name: String,
    threads: usize,
    median: f64,
    spread: f64,
    ratio: Option<f64>,
}

fn lines(runs: &[Vec<Figure>]) -> Vec<Line> {
    let Some(first) = runs.first() else { return Vec::new() };
    let find = |run: &[Figure], name: &str, threads: usize| {
        let figure = run.iter().find(|f| f.name == name && f.threads == threads);
        figure.map_or(f64::NAN, |f| f.value)
    };
    let line = |figure: &Figure| {
        let (name, threads) = (&figure.name, figure.threads);
        let values: Vec<f64> = runs.iter().map(|run| find(run, name, threads)).collect();
        let (low, high) = values
            .iter()
            .fold((f64::INFINITY, 0.0_f64), |(low, high), v| (low.min(*v), high.max(*v)));
        let ratio = figure.over.as_ref().map(|over| {
            median(runs.iter().map(|r| find(r, name, threads) / find(r, over, threads)))
        });
        let median = median(values.iter().copied());
        Line { name: name.clone(), threads, median, spread: (high - low) / 2.0, ratio }
    };
    first.iter().map(line).collect()
}

/// Runs a bench of figures, prints its table and says with which status to exit.
pub fn run(args: &Args, unit: &str, take: impl FnMut() -> (Vec<Figure>, f64)) -> ExitCode {
    let (runs, valid) = valid_runs(args, take);
    let lines = lines(&runs);
    if args.json {
        let row = |l: &Line| {
            json!({
                "name": l.name, "threads": l.threads, "median": round(l.median),
                "spread": round(l.spread), "ratio": l.ratio.map(round),
            })
        };
        let rows: Vec<Value> = lines.iter().map(row).collect();
        println!("{}", json!({ "unit": unit, "rows": rows, "runs": runs.len(), "valid": valid }));
    } else {
        println!("{:<52}{:>8}{:>12}{:>10}{:>9}", unit, "threads", "median", "+-", "ratio");
        for l in &lines {
            let ratio = l.ratio.map_or_else(String::new, |r| format!("{r:.2}"));
            println!(
                "{:<52}{:>8}{:>12.2}{:>10.2}{ratio:>9}",
                l.name, l.threads, l.median, l.spread
            );
        }
        println!("{} valid runs", runs.len());
    }
    if valid { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn round(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}
