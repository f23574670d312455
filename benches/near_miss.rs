//! What heatsink adds to the read of a key that is not hot: single flight, the gate, the detection.
//!
//! Over a store that does nothing, so that what is left is the client. Next to the bare store and a
//! control that shares nothing. If even the control does not scale, the machine was busy: the run
//! is void and is repeated. Exit status 1: a limit was missed, or no run was valid.
//!
//! `cargo bench --bench near_miss [-- --json | --test]`

mod common;

use common::store::Nothing;
use common::{MIN_CONTROL, Measured, Row, json_rows, own_work, poll_once, print_rows, rate, rows};
use heatsink::store::Store;
use heatsink::{Detect, Heatsink, Key};
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// As many windows are run before one is measured: by then the sampling has adapted to the rate.
const WARM: u32 = 4;
/// Keys that take turns; none is ever hot.
const KEYS: usize = 1 << 12;
const VALUE_BYTES: usize = 256;
const MAX_NANOS: f64 = 150.0;

const NAMES: [&str; 4] =
    ["control", "bare store, get", "get of a cold key", "read_with of a cold key"];
const CONTROL: usize = 0;
const BARE: usize = 1;
const GET: usize = 2;

struct Subjects {
    store: Nothing,
    hs: Heatsink,
    keys: Vec<String>,
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        let store = Nothing::holding(VALUE_BYTES);
        let hs = Heatsink::builder(store.clone()).detect(Detect::pins_only()).build()?;
        Ok(Subjects { store, hs, keys: (0..KEYS).map(|i| format!("post:{i:04}")).collect() })
    }

    /// The key of this thread's next turn. Two threads that run together have no key in common, so
    /// that none waits for the other's load.
    fn turn(&self) -> &str {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static TURN: Cell<usize> = Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) % 2);
        }
        TURN.set(TURN.get() + 2);
        black_box(&self.keys[TURN.get() % KEYS])
    }

    /// A service has its key as a string: the bare client makes its command from it, too.
    fn bare(&self) -> usize {
        let key = Key::from(self.turn());
        let found = poll_once(self.store.get(&key)).expect("it answers").expect("a value");
        found.bytes.len()
    }

    fn get(&self) -> usize {
        poll_once(self.hs.get(self.turn())).expect("it answers").expect("a value").len()
    }

    fn read_with(&self) -> usize {
        let read = self.hs.read_with(self.turn(), <[u8]>::len);
        poll_once(read).expect("it answers").expect("a value")
    }

    /// Millions of operations per second of one row.
    fn measure(&self, row: usize, threads: usize, window: Duration) -> f64 {
        match row {
            CONTROL => rate(threads, window, WARM, own_work),
            BARE => rate(threads, window, WARM, || self.bare()),
            GET => rate(threads, window, WARM, || self.get()),
            _ => rate(threads, window, WARM, || self.read_with()),
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
        self.rows[GET].nanos() - self.rows[BARE].nanos()
    }
}

impl Measured for Run {
    fn control(&self) -> (f64, f64) {
        (self.rows[CONTROL].scaling, MIN_CONTROL)
    }

    fn met(&self) -> bool {
        self.added() <= MAX_NANOS
    }

    fn print(&self) {
        print_rows(&NAMES, &self.rows);
        println!(
            "added to a get of a cold key: {:.0} ns; to meet: at most {MAX_NANOS}",
            self.added(),
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
    common::run("near_miss", "a limit was missed", |rounds, window| {
        Run::take(&subjects, rounds, window)
    })
}
