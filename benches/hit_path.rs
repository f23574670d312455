//! What a read of a hot key costs, and whether two threads get in each other's way.
//!
//! All rows are measured in one run, in interleaved rounds, next to a control that shares nothing
//! between threads. If even the control does not scale, the machine was busy: the run is void and
//! is repeated. Exit status 1: a ratio was missed, or no run was valid. Next to other caches:
//! `benches/peers`.
//!
//! `cargo bench --bench hit_path [-- --json | --test]`

mod common;

use bytes::Bytes;
use common::{MIN_CONTROL, Measured, Row, json_rows, own_work, poll_once, print_rows, rate, rows};
use heatsink::{Heatsink, NearCache, Treatment, blocking, store::MemoryStore};
use moka::sync::Cache;
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

const KEY: &str = "post:9";
/// Hot keys that take turns in the rows of many keys.
const KEYS: usize = 64;
const VALUE_BYTES: usize = 256;
/// As many windows are run before one is measured: by then the sampling has adapted to the rate.
const WARM: u32 = 4;
/// Hot read at one thread, as a multiple of `moka::sync` `get`.
const MIN_OVER_MOKA: f64 = 4.0;
/// Gain from the second thread, as a share of the control's gain.
const MIN_SCALING: f64 = 0.92;

const NAMES: [&str; 8] = [
    "control",
    "try_read_with",
    "read_with",
    "get (owned value)",
    "read_with, 64 hot keys",
    "get, 64 hot keys",
    "moka::sync get",
    "moka::sync get, ahash",
];
const CONTROL: usize = 0;
const HEATSINK: [usize; 5] = [1, 2, 3, 4, 5];
const TRY_READ: usize = 1;
const READ_WITH: usize = 2;
const GET: usize = 3;
const MOKA: usize = 6;

/// What every row does with the bytes it got.
#[inline]
fn look(bytes: &[u8]) -> u64 {
    u64::from(bytes[0]) + bytes.len() as u64
}

struct Subjects {
    hs: Heatsink,
    keys: Vec<String>,
    moka: Cache<String, Bytes>,
    moka_ahash: Cache<String, Bytes, ahash::RandomState>,
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        let value = Bytes::from(vec![7u8; VALUE_BYTES]);
        let hour = Duration::from_secs(3600);
        let store = MemoryStore::new(8);
        let keys: Vec<String> = (0..KEYS).map(|i| format!("post:{}", 9 + i)).collect();
        keys.iter().try_for_each(|key| store.put_now(key.as_str(), value.clone()))?;
        let near = NearCache::new().fresh(hour).stale(hour);
        let hs = Heatsink::builder(store).near(near).build()?;
        hs.control().pin_all(&keys, Treatment::near())?;
        let blocking = blocking::Heatsink::from(hs.clone());
        keys.iter().try_for_each(|key| blocking.get(key).map(drop))?;
        let moka = Cache::new(10_000);
        moka.insert(KEY.to_owned(), value.clone());
        let moka_ahash = Cache::builder()
            .max_capacity(10_000)
            .build_with_hasher(ahash::RandomState::with_seeds(1, 2, 3, 4));
        moka_ahash.insert(KEY.to_owned(), value);
        Ok(Subjects { hs, keys, moka, moka_ahash })
    }

    fn read_with(&self, key: &str) -> u64 {
        let read = poll_once(self.hs.read_with(black_box(key), look));
        read.expect("no load").expect("the hot key is cached")
    }

    fn get(&self, key: &str) -> u64 {
        look(&poll_once(self.hs.get(black_box(key))).expect("no load").expect("it is cached"))
    }

    /// The key of this thread's next turn.
    fn turn(&self) -> &str {
        thread_local! { static TURN: Cell<usize> = const { Cell::new(0) } }
        TURN.with(|turn| {
            turn.set(turn.get() + 1);
            &self.keys[turn.get() % KEYS]
        })
    }

    /// Millions of operations per second of one row.
    fn measure(&self, row: usize, threads: usize, window: Duration) -> f64 {
        let Subjects { hs, moka, moka_ahash, .. } = self;
        let hot = "the hot key is cached";
        match row {
            CONTROL => rate(threads, window, WARM, own_work),
            TRY_READ => {
                rate(threads, window, WARM, || hs.try_read_with(black_box(KEY), look).expect(hot))
            }
            READ_WITH => rate(threads, window, WARM, || self.read_with(KEY)),
            GET => rate(threads, window, WARM, || self.get(KEY)),
            4 => rate(threads, window, WARM, || self.read_with(self.turn())),
            5 => rate(threads, window, WARM, || self.get(self.turn())),
            MOKA => rate(threads, window, WARM, || look(&moka.get(black_box(KEY)).expect(hot))),
            _ => rate(threads, window, WARM, || look(&moka_ahash.get(black_box(KEY)).expect(hot))),
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

    fn over_moka(&self, row: usize) -> f64 {
        self.rows[row].one / self.rows[MOKA].one
    }

    fn scaling_of_control(&self, row: usize) -> f64 {
        self.rows[row].scaling / self.rows[CONTROL].scaling
    }
}

impl Measured for Run {
    fn control(&self) -> (f64, f64) {
        (self.rows[CONTROL].scaling, MIN_CONTROL)
    }

    fn met(&self) -> bool {
        [TRY_READ, READ_WITH].iter().all(|&row| self.over_moka(row) >= MIN_OVER_MOKA)
            && [TRY_READ, READ_WITH, GET]
                .iter()
                .all(|&row| self.scaling_of_control(row) >= MIN_SCALING)
    }

    fn print(&self) {
        print_rows(&NAMES, &self.rows);
        for row in HEATSINK {
            println!(
                "{:<24} {:.2} x moka::sync get at one thread; {:.3} x the control's scaling",
                NAMES[row],
                self.over_moka(row),
                self.scaling_of_control(row),
            );
        }
        println!("to meet with one key: {MIN_OVER_MOKA} x (borrowed reads) and {MIN_SCALING} x");
    }

    fn print_json(&self) {
        println!(
            r#"{{"rows":{},"read_over_moka":{:.3},"get_over_moka":{:.3},"scaling_over_control":{:.3},"valid":{},"met":{}}}"#,
            json_rows(&NAMES, &self.rows),
            self.over_moka(READ_WITH),
            self.over_moka(GET),
            self.scaling_of_control(READ_WITH),
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
