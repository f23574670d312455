//! Whether requests feel that the set of 4,096 hot keys is replaced under them.
//!
//! One thread reads hot keys and takes the time of every read. Meanwhile the other stands idle, or
//! replaces the index a hundred times a second (every turn of the driver, the most that happens),
//! or does as much work that has nothing to do with it. The three take turns; what is compared is
//! the 99th percentile. If the control, which shares nothing, does not scale, the machine was busy:
//! the run is void and is repeated. Exit status 1: the requests felt it, or no run was valid.
//!
//! `cargo bench --bench hot_list_swap [-- --json | --test]`
#![expect(clippy::disallowed_methods, reason = "a benchmark times the machine")]

mod common;

use common::store::Nothing;
use common::{MIN_CONTROL, Measured, Row, median, own_work, rate, rows};
use heatsink::{Heatsink, NearCache, Treatment, blocking};
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const HOT: usize = 4_096;
/// Hot keys that the requests ask for: more than a thread keeps, so that the index is read.
const ASKED: usize = 256;
/// Between two swaps.
const PAUSE: Duration = Duration::from_millis(10);
/// The 99th percentile with swaps, over that beside other work; above what noise makes of it.
const MAX_RATIO: f64 = 1.25;

#[derive(Clone, Copy)]
enum Beside {
    Nothing,
    OtherWork,
    Swaps,
}

struct Subjects {
    hs: Heatsink,
    keys: Vec<String>,
}

/// Nanoseconds of a read: the median and the 99th percentile; and swaps that were made.
#[derive(Clone, Copy)]
struct Taken {
    p50: f64,
    p99: f64,
    swaps: f64,
}

impl Subjects {
    fn new() -> heatsink::Result<Subjects> {
        let hour = Duration::from_secs(3600);
        let keys: Vec<String> = (0..HOT).map(|i| format!("post:{i:04}")).collect();
        let near = NearCache::new().fresh(hour).stale(hour);
        let hs = Heatsink::builder(Nothing::holding(256)).near(near).build()?;
        hs.control().pin_all(&keys, Treatment::near())?;
        let reads = blocking::Heatsink::from(hs.clone());
        keys.iter().try_for_each(|key| reads.get(key).map(drop))?;
        Ok(Subjects { hs, keys })
    }

    /// One key leaves, or comes back; the others stay.
    fn swap(&self, leave: bool) {
        let (control, last) = (self.hs.control(), &self.keys[HOT - 1]);
        if leave {
            assert!(control.unpin(last), "it was pinned");
        } else {
            control.pin(last, Treatment::near()).expect("there is room for it");
        }
    }

    fn take(&self, beside: Beside, window: Duration) -> Taken {
        let (stop, mut swaps) = (AtomicBool::new(false), 0);
        let mut times = Vec::with_capacity(1 << 20);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut swaps = 0;
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    match beside {
                        Beside::Nothing => {}
                        Beside::Swaps => {
                            self.swap(swaps % 2 == 0);
                            swaps += 1;
                        }
                        // About as long as a swap takes.
                        Beside::OtherWork => {
                            while begun.elapsed() < Duration::from_micros(400) {
                                black_box(own_work());
                            }
                        }
                    }
                    std::thread::sleep(PAUSE.saturating_sub(begun.elapsed()));
                }
                if swaps % 2 == 1 {
                    self.swap(false);
                }
                swaps
            });
            let begun = Instant::now();
            let mut at = begun;
            'window: loop {
                for key in &self.keys[..ASKED] {
                    let read = self.hs.try_read_with(black_box(key), <[u8]>::len);
                    black_box(read.expect("the hot key is cached"));
                    let now = Instant::now();
                    times.push(now.duration_since(at).as_nanos() as u32);
                    at = now;
                    if now.duration_since(begun) >= window {
                        break 'window;
                    }
                }
            }
            stop.store(true, Ordering::Relaxed);
            swaps = other.join().expect("the other thread panicked");
        });
        times.sort_unstable();
        let at = |share: f64| f64::from(times[(times.len() as f64 * share) as usize]);
        Taken { p50: at(0.5), p99: at(0.99), swaps: f64::from(swaps) / window.as_secs_f64() }
    }
}

struct Run {
    control: Row,
    /// Idle, beside other work, beside swaps.
    taken: [Taken; 3],
    ratio: f64,
    noise: f64,
}

const NAMES: [&str; 3] = ["nothing beside it", "other work beside it", "swaps beside it"];

impl Run {
    fn take(subjects: &Subjects, rounds: usize, window: Duration) -> Run {
        let control = rows(1, rounds, |_, threads| rate(threads, window, 1, own_work)).remove(0);
        let kinds = [Beside::Nothing, Beside::OtherWork, Beside::Swaps];
        let rounds: Vec<[Taken; 3]> =
            (0..rounds).map(|_| kinds.map(|kind| subjects.take(kind, window))).collect();
        let of = |kind: usize| Taken {
            p50: median(rounds.iter().map(|r| r[kind].p50)),
            p99: median(rounds.iter().map(|r| r[kind].p99)),
            swaps: median(rounds.iter().map(|r| r[kind].swaps)),
        };
        let ratio = median(rounds.iter().map(|r| r[2].p99 / r[1].p99));
        let quiet: Vec<f64> = rounds.iter().map(|r| r[0].p99).collect();
        let noise = quiet.iter().copied().fold(0.0, f64::max) / median(quiet.iter().copied());
        Run { control, taken: [of(0), of(1), of(2)], ratio, noise }
    }
}

impl Measured for Run {
    fn control(&self) -> (f64, f64) {
        (self.control.scaling, MIN_CONTROL)
    }

    fn met(&self) -> bool {
        self.ratio <= MAX_RATIO
    }

    fn print(&self) {
        println!("{:<24}{:>10}{:>10}{:>12}", "ns of a read", "p50", "p99", "swaps/s");
        for (name, taken) in NAMES.iter().zip(&self.taken) {
            println!("{name:<24}{:>10.0}{:>10.0}{:>12.0}", taken.p50, taken.p99, taken.swaps);
        }
        println!(
            "p99 beside swaps: {:.2} x that beside other work; to meet: at most {MAX_RATIO}; the \
             quiet rounds vary by {:.2} x; the control scales by {:.2}",
            self.ratio, self.noise, self.control.scaling
        );
    }

    fn print_json(&self) {
        let row = |(name, t): (&&str, &Taken)| {
            let (p50, p99, swaps) = (t.p50, t.p99, t.swaps);
            format!(r#"{{"name":"{name}","p50_ns":{p50},"p99_ns":{p99},"swaps":{swaps:.0}}}"#)
        };
        let rows: Vec<String> = NAMES.iter().zip(&self.taken).map(row).collect();
        println!(
            r#"{{"rows":[{}],"ratio":{:.3},"noise":{:.3},"valid":{},"met":{}}}"#,
            rows.join(","),
            self.ratio,
            self.noise,
            self.valid(),
            self.met(),
        );
    }
}

fn main() -> ExitCode {
    let subjects = Subjects::new().expect("a store in memory and a valid configuration");
    common::run("hot_list_swap", "the requests felt the swaps", |rounds, window| {
        Run::take(&subjects, rounds, window)
    })
}
