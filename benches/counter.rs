//! What heatsink adds to an add that travels, and what a cached sum costs.
//!
//! Over a store that does nothing, so that what is left is the client; each thread has a counter of
//! its own. Next to the bare store and a control that shares nothing. If even the control does not
//! scale, the machine was busy: the run is void and is repeated. Exit status 1: a limit was missed,
//! or no run was valid. What stays in memory is measured by the bench `add`, what goes over the
//! network by `benches/redis`.
//!
//! `cargo bench --bench counter [-- --json | --test]`

mod common;

use common::store::Nothing;
use common::{MIN_CONTROL, Measured, Row, json_rows, own_work, poll_once, print_rows, rate, rows};
use heatsink::store::Store;
use heatsink::{Counter, Heatsink, Key};
use std::cell::OnceCell;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What a coalesced add costs beyond the bare store's: some of the bare client's own work.
const MAX_ADDED_NANOS: f64 = 400.0;

const NAMES: [&str; 4] = ["control", "bare store, add", "coalesced add", "cached sum"];
const CONTROL: usize = 0;
const BARE: usize = 1;
const ADD: usize = 2;

struct Subjects {
    store: Nothing,
    hs: Heatsink,
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        let store = Nothing::holding(1);
        Ok(Subjects { hs: Heatsink::new(store.clone())?, store })
    }

    /// On this thread's own counter.
    fn with_counter<T>(&self, f: impl FnOnce(&Counter) -> T) -> T {
        static THREADS: AtomicU32 = AtomicU32::new(0);
        thread_local! { static OWN: OnceCell<Counter> = const { OnceCell::new() } }
        OWN.with(|own| {
            f(own.get_or_init(|| {
                let thread = THREADS.fetch_add(1, Ordering::Relaxed);
                self.hs.counter(format!("post:{thread}:likes"))
            }))
        })
    }

    fn add(&self) {
        self.with_counter(|likes| poll_once(black_box(likes).add(1)).expect("it is stored"));
    }

    fn bare(&self) {
        let key = black_box(Key::from("post:9:likes"));
        poll_once(self.store.add(&key, 1)).expect("it is stored");
    }

    fn sum(&self) -> i64 {
        self.with_counter(|likes| poll_once(black_box(likes).sum()).expect("a sum").total())
    }

    /// Millions of operations per second of one row.
    fn measure(&self, row: usize, threads: usize, window: Duration) -> f64 {
        match row {
            CONTROL => rate(threads, window, 1, own_work),
            BARE => rate(threads, window, 1, || self.bare()),
            ADD => rate(threads, window, 1, || self.add()),
            _ => rate(threads, window, 1, || self.sum()),
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

    fn added(&self) -> f64 {
        self.rows[ADD].nanos() - self.rows[BARE].nanos()
    }
}

impl Measured for Run {
    fn control(&self) -> (f64, f64) {
        (self.rows[CONTROL].scaling, MIN_CONTROL)
    }

    fn met(&self) -> bool {
        self.added() <= MAX_ADDED_NANOS
    }

    fn print(&self) {
        print_rows(&NAMES, &self.rows);
        println!(
            "a coalesced add costs {:.0} ns more than the bare store's; to meet: at most \
             {MAX_ADDED_NANOS}",
            self.added()
        );
    }

    fn print_json(&self) {
        println!(
            r#"{{"rows":{},"added_ns":{:.1},"valid":{},"met":{}}}"#,
            json_rows(&NAMES, &self.rows),
            self.added(),
            self.valid(),
            self.met(),
        );
    }
}

fn main() -> ExitCode {
    let subjects = Subjects::new().expect("a valid configuration");
    common::run("counter", "a limit was missed", |rounds, window| {
        Run::take(&subjects, rounds, window)
    })
}
