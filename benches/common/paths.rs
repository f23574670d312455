//! The hot paths one by one, for the benches that count: instructions and allocations.

use super::store::Nothing;
use super::{countdown, poll_once};
use heatsink::store::Store;
use heatsink::{
    Adds, Buffered, Counter, Detect, Heatsink, Key, NearCache, Treatment, blocking,
    store::MemoryStore,
};
use std::hint::black_box;
use std::time::Duration;

const KEY: &str = "post:9";
const COLD: &str = "post:10";
pub(crate) const NAMES: [&str; 10] = [
    "empty",
    "countdown",
    "observe",
    "try_read_with",
    "read_with",
    "get",
    "bare get",
    "cold get",
    "coalesced add",
    "buffered add",
];

pub(crate) struct Subjects {
    store: Nothing,
    hs: Heatsink,
    likes: Counter,
    buffered: Buffered,
}

impl Subjects {
    /// One sample a second: what is counted are the others.
    pub(crate) fn new() -> heatsink::Result<Subjects> {
        let store = Nothing::holding(256);
        let hour = Duration::from_secs(3600);
        let (near, detect) = (NearCache::new().fresh(hour).stale(hour), Detect::pins_only());
        let hs = Heatsink::builder(store.clone())
            .near(near)
            .detect(detect.samples_per_sec(1))
            .build()?;
        hs.control().pin(KEY, Treatment::near())?;
        let _ = blocking::Heatsink::from(hs.clone()).get(KEY)?;
        let adds = Adds::new().pending_max(1 << 60);
        let held = Heatsink::builder(MemoryStore::new(8)).adds(adds).build()?;
        let (likes, buffered) = (hs.counter("likes"), held.buffered("likes")?);
        Ok(Subjects { store, hs, likes, buffered })
    }

    /// Runs one path so many times.
    pub(crate) fn run(&self, name: &str, times: u32) {
        let Subjects { store, hs, likes, buffered } = self;
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
            "bare get" => counted(times, || {
                // A service has its key as text; the bare client makes its command from it, too.
                let key = Key::from(black_box(COLD));
                look(&poll_once(store.get(&key)).expect("it answers").expect("a value").bytes)
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

/// What is counted: everything inside, on this thread.
#[inline(never)]
pub(crate) fn counted(times: u32, op: impl Fn() -> u64) {
    for _ in 0..times {
        black_box(op());
    }
}
