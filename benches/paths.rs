//! The hot paths one by one, each as often as it is told, for `benches/instructions` to count the
//! instructions of. Nothing is timed here.
//!
//! `cargo bench --bench paths -- NAME TIMES`, or `-- --names`, or `-- --test`

mod common;

use common::store::Nothing;
use common::{countdown, poll_once};
use heatsink::{
    Adds, Buffered, Counter, Detect, Heatsink, NearCache, Treatment, blocking, store::MemoryStore,
};
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

const KEY: &str = "post:9";
const COLD: &str = "post:10";
const NAMES: [&str; 9] = [
    "empty",
    "countdown",
    "observe",
    "try_read_with",
    "read_with",
    "get",
    "cold get",
    "coalesced add",
    "buffered add",
];

struct Subjects {
    hs: Heatsink,
    likes: Counter,
    buffered: Buffered,
}

impl Subjects {
    /// One sample a second: what is counted are the others.
    fn new() -> heatsink::Result<Subjects> {
        let hour = Duration::from_secs(3600);
        let (near, detect) = (NearCache::new().fresh(hour).stale(hour), Detect::pins_only());
        let hs = Heatsink::builder(Nothing::holding(256))
            .near(near)
            .detect(detect.samples_per_sec(1))
            .build()?;
        hs.control().pin(KEY, Treatment::near())?;
        let _ = blocking::Heatsink::from(hs.clone()).get(KEY)?;
        let adds = Adds::new().pending_max(1 << 60);
        let held = Heatsink::builder(MemoryStore::new(8)).adds(adds).build()?;
        let (likes, buffered) = (hs.counter("likes"), held.buffered("likes")?);
        Ok(Subjects { hs, likes, buffered })
    }

    fn run(&self, name: &str, times: u32) {
        let Subjects { hs, likes, buffered } = self;
        match name {
            "empty" => counted(times, || 0),
            "countdown" => counted(times, countdown),
            "observe" => counted(times, || {
                hs.observe_only_this(black_box(KEY).as_bytes());
                0
            }),
            "try_read_with" => {
                counted(times, || hs.try_read_with(black_box(KEY), look).unwrap_or_default());
            }
            "read_with" => counted(times, || {
                let read = poll_once(hs.read_with(black_box(KEY), look));
                read.expect("no load").unwrap_or_default()
            }),
            "get" => counted(times, || {
                look(&poll_once(hs.get(black_box(KEY))).expect("no load").expect("a value"))
            }),
            "cold get" => counted(times, || {
                look(&poll_once(hs.get(black_box(COLD))).expect("a load").expect("a value"))
            }),
            "coalesced add" => counted(times, || {
                poll_once(black_box(likes).add(1)).expect("it is stored");
                0
            }),
            _ => counted(times, || {
                poll_once(black_box(buffered).add(1)).expect("the cap is out of reach");
                0
            }),
        }
    }
}

fn look(bytes: &[u8]) -> u64 {
    u64::from(bytes[0]) + bytes.len() as u64
}

/// What callgrind counts: everything inside, on this thread.
#[inline(never)]
fn counted(times: u32, op: impl Fn() -> u64) {
    for _ in 0..times {
        black_box(op());
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (names, times) = match args[..] {
        ["--names"] => {
            NAMES.iter().for_each(|name| println!("{name}"));
            return ExitCode::SUCCESS;
        }
        ["--test"] => (NAMES.to_vec(), 100),
        [name, times] if NAMES.contains(&name) && times.parse::<u32>().is_ok() => {
            (vec![name], times.parse().unwrap_or_default())
        }
        _ => {
            eprintln!("usage: paths NAME TIMES | --names | --test");
            return ExitCode::from(2);
        }
    };
    let subjects = Subjects::new().expect("a store in memory and a valid configuration");
    for name in names {
        subjects.run(name, times);
    }
    ExitCode::SUCCESS
}
