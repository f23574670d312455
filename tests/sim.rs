//! A seeded simulation of the read path: two processes over one store, with faults, cancelled
//! callers, a runtime that dies and a driver that stalls; every read is checked against the
//! store's own history.
//!
//! `HEATSINK_SEEDS=N` runs more seeds than the default 200, `HEATSINK_SEED=S` runs one.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "sim/salt.rs"]
mod salt;

use bytes::Bytes;
use heatsink::engine::time::Tick;
use heatsink::store::memory::{Fault, On};
use heatsink::store::{MemoryStore, Store};
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Key, Loads, NearCache, Outcome, Read, Source, Treatment, Value};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const STALL_MAX_MS: u64 = 300;
/// No caller waits longer for a write: one whose reply is lost would never end.
const WRITE_LIMIT: Duration = Duration::from_millis(500);
const OLDER_THAN_OWN: &str = "older than an acknowledged write of the same process";

/// What one seed derives.
#[derive(Clone, Debug)]
struct Options {
    latency: Duration,
    fresh: Duration,
    stale: Duration,
    timeout: Duration,
    in_flight: Duration,
    fault_permille: u64,
    late_writes: bool,
    readers: u64,
    writers: u64,
    pause_ms: u64,
    cancels: bool,
    stalls: bool,
    dies: bool,
    /// A writer goes to the store unannounced: a wrong program that the checkers must catch.
    mutant: bool,
}

impl Options {
    fn derive(rt: &SimRuntime, mutant: bool) -> Options {
        let fresh = 20 + rt.draw(600);
        Options {
            latency: MS * (2 + rt.draw(12) as u32),
            fresh: MS * fresh as u32,
            stale: MS * (1000 + rt.draw(1500)) as u32,
            // With the driver's sweep and its longest stall, below every stale limit.
            timeout: MS * (100 + rt.draw(300)) as u32,
            in_flight: MS * (600 + rt.draw(1000)) as u32,
            fault_permille: [0, 20, 60, 150][rt.draw(4) as usize],
            late_writes: rt.draw(2) == 0,
            readers: 2 + rt.draw(4),
            writers: 1 + rt.draw(2),
            pause_ms: 5 + rt.draw(200),
            cancels: rt.draw(2) == 0,
            stalls: rt.draw(3) == 0,
            dies: rt.draw(2) == 0,
            mutant,
        }
    }

    fn arm(&self, store: &MemoryStore, rt: &SimRuntime) {
        let p = self.fault_permille as f64 / 1000.0;
        let faults = store.faults();
        faults.chance(On::Any, p, Fault::Delay(MS * (1 + rt.draw(200)) as u32));
        faults.chance(On::Any, p, Fault::NotApplied);
        faults.chance(On::Any, p / 2.0, Fault::LostReply);
        faults.chance(On::Any, p / 2.0, Fault::Hang);
        faults.chance(On::Writes, p, Fault::UnknownApplied);
        faults.chance(On::Writes, p, Fault::UnknownNotApplied);
        if self.late_writes {
            let by = MS * (1 + rt.draw(self.in_flight.as_millis() as u64 - 1)) as u32;
            faults.chance(On::Writes, p, Fault::UnknownLater(by));
        }
    }
}

/// How often the interesting things happened.
#[derive(Default, Debug)]
struct Seen {
    reads: u64,
    cached: u64,
    overlapped: u64,
    handed_over: u64,
    late: u64,
    timed_out: u64,
    unknown: u64,
    faults: u64,
}

struct World {
    rt: SimRuntime,
    store: MemoryStore,
    hs: [Heatsink; 2],
    options: Options,
    /// What the store held, from when on; looked at after every poll.
    history: Mutex<Vec<(Tick, Option<u64>)>>,
    /// For each process: the entry of the history that its newest acknowledged write made.
    floor: [AtomicUsize; 2],
    versions: AtomicU64,
    stop: AtomicBool,
    /// Tasks of the first runtime that have not ended.
    running: AtomicUsize,
    reads: AtomicU64,
    cached: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// What a read may return, fixed when it begins.
struct Before {
    process: usize,
    at: Tick,
    floor: usize,
    entries: usize,
    latest: bool,
}

impl World {
    fn new(seed: u64, mutant: bool) -> Arc<World> {
        let rt = SimRuntime::new(seed);
        let options = Options::derive(&rt, mutant);
        let store = MemoryStore::builder().shards(2).runtime(rt.clone()).seed(seed);
        let store = store.latency(options.latency).max_in_flight_time(options.in_flight).build();
        options.arm(&store, &rt);
        let process = |n: u64| {
            let near = NearCache::new().fresh(options.fresh).stale(options.stale);
            let hs = Heatsink::builder(store.clone())
                .runtime(rt.clone())
                .seed(seed.wrapping_mul(2) + n)
                .near(near.absent(options.fresh.min(250 * MS)).cool_down(50 * MS))
                .loads(Loads::new().timeout(options.timeout))
                .build()
                .unwrap();
            hs.control().pin("k", Treatment::near()).unwrap();
            hs
        };
        Arc::new(World {
            hs: [process(0), process(1)],
            history: Mutex::new(vec![(rt.now(), None)]),
            rt,
            store,
            options,
            floor: Default::default(),
            versions: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            reads: AtomicU64::new(0),
            cached: AtomicU64::new(0),
            failure: Mutex::new(None),
        })
    }

    fn draw(&self, bound: u64) -> u64 {
        self.rt.draw(bound)
    }

    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn fail(&self, text: String) {
        self.failure.lock().unwrap().get_or_insert(text);
    }

    fn current(&self) -> Option<u64> {
        self.store.get_now("k").map(|stored| number(&stored.bytes))
    }

    fn look(&self) {
        let now = self.current();
        let mut history = self.history.lock().unwrap();
        if history.last().is_some_and(|(_, held)| *held != now) {
            history.push((self.rt.now(), now));
        }
    }

    fn before(&self, process: usize, latest: bool) -> Before {
        Before {
            process,
            at: self.rt.now(),
            floor: self.floor[process].load(Ordering::Relaxed),
            entries: self.history.lock().unwrap().len(),
            latest,
        }
    }

    /// The checkers. A value is right if the store held it at some point that is not before the
    /// process's own last acknowledged write, and not before the load that the value claims.
    fn check(&self, before: &Before, value: Option<&Value>) {
        let got = value.map(|v| number(v));
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.rt.record(got.map_or(u64::MAX, |n| n ^ (before.process as u64) << 60));
        let age = value.map_or(self.options.stale, Value::age);
        let cached = value.is_some_and(|v| v.source() != Source::Load);
        self.cached.fetch_add(u64::from(cached), Ordering::Relaxed);
        let history = self.history.lock().unwrap();
        let not_before = before.at.before(age);
        let held = || history.iter().enumerate().filter(|(_, (_, held))| *held == got);
        let until = |i: usize| history.get(i + 1).map_or(Tick::MAX, |(at, _)| *at);
        let wrong = if age > self.options.stale {
            "older than the stale limit"
        } else if held().next().is_none() {
            "what the store never held"
        } else if held().all(|(i, _)| i < before.floor) {
            OLDER_THAN_OWN
        } else if held().all(|(i, _)| i < before.floor || until(i) < not_before) {
            "older than its own age says"
        } else if before.latest && (cached || held().all(|(i, _)| i + 1 < before.entries)) {
            "not the latest"
        } else {
            return;
        };
        let tail = &history[history.len().saturating_sub(8)..];
        self.fail(format!(
            "process {} read {got:?} (age {age:?}, cached {cached}) from {:?}: {wrong}; the store's \
             last values: {tail:?}",
            before.process, before.at,
        ));
    }

    /// A put or delete was acknowledged: `since` is the length of the history when it began.
    fn acknowledged(&self, process: usize, wrote: Option<u64>, since: usize) {
        let history = self.history.lock().unwrap();
        let from = since - 1;
        match history[from..].iter().position(|(_, held)| *held == wrote) {
            Some(at) => drop(self.floor[process].fetch_max(from + at, Ordering::Relaxed)),
            None => {
                drop(history);
                self.fail(format!("a write of {wrote:?} was acknowledged and not applied"));
            }
        }
    }

    async fn read(&self, process: usize) {
        let hs = &self.hs[process];
        let kind = self.draw(10);
        let before = self.before(process, kind == 0);
        let store = self.store.clone();
        let result = match kind {
            0 => hs.get_with("k", Read::latest()).await,
            1 => hs.get_with("k", Read::new().deadline(MS * 20)).await,
            2 => hs.get_with("k", Read::new().max_age(MS * 100)).await,
            3 | 4 => hs.load("k", move || async move { store.get(&Key::copy(b"k")).await }).await,
            _ => hs.get("k").await,
        };
        if let Ok(value) = result {
            self.check(&before, value.as_ref());
        }
    }

    async fn write(&self, process: usize) {
        let hs = &self.hs[process];
        let since = self.history.lock().unwrap().len();
        let kind = self.draw(12);
        if kind < 2 {
            if hs.delete("k").await.is_ok() {
                self.acknowledged(process, None, since);
            }
            return;
        }
        let version = self.versions.fetch_add(1, Ordering::Relaxed) + 1;
        let (key, text) = (Key::copy(b"k"), Bytes::from(version.to_string()));
        let result = if self.options.mutant {
            self.store.put(&key, text, None).await
        } else if kind < 5 {
            let writing = hs.writing("k");
            let result = self.store.put(&key, text, None).await;
            match &result {
                Ok(()) => writing.done(),
                Err(e) if e.outcome() == Outcome::NotApplied => writing.not_applied(),
                Err(_) => drop(writing),
            }
            result
        } else {
            hs.put("k", text).await
        };
        if result.is_ok() {
            self.acknowledged(process, Some(version), since);
        }
    }

    /// Lets tasks run until then, one poll at a time, and looks at the store after each.
    fn drive(&self, other: Option<&SimRuntime>, until: Tick) {
        loop {
            while other.is_some_and(|o| o.jump(self.rt.now())) {}
            let other_first = self.draw(2) == 0 && other.is_some_and(SimRuntime::step);
            let moved = other_first || self.rt.step() || other.is_some_and(SimRuntime::step);
            self.look();
            if !moved && !self.rt.jump(until) {
                break;
            }
        }
        self.rt.clock().set(until);
    }

    fn drive_for(&self, other: Option<&SimRuntime>, time: Duration) {
        self.drive(other, self.rt.now().after(time));
    }
}

fn number(bytes: &[u8]) -> u64 {
    std::str::from_utf8(bytes).unwrap().parse().unwrap()
}

/// The future's result, or `None` when it was dropped after `limit`.
async fn within<T>(rt: &SimRuntime, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let (mut work, mut sleep) = (pin!(work), rt.sleep(limit));
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(out) => Poll::Ready(Some(out)),
        Poll::Pending => sleep.as_mut().poll(cx).map(|()| None),
    })
    .await
}

async fn reader(world: Arc<World>, rt: SimRuntime, process: usize) {
    while world.running() {
        if world.options.cancels && world.draw(4) == 0 {
            let limit = MS * world.draw(30) as u32;
            let _ = within(&rt, limit, world.read(process)).await;
        } else {
            world.read(process).await;
        }
        rt.sleep(MS * world.draw(20) as u32 + MS / 2).await;
    }
}

async fn writer(world: Arc<World>, rt: SimRuntime, process: usize) {
    while world.running() {
        let cancelled = world.options.cancels && world.draw(6) == 0;
        let limit = if cancelled { MS * world.draw(30) as u32 } else { WRITE_LIMIT };
        let _ = within(&rt, limit, world.write(process)).await;
        match world.draw(30) {
            0 => world.hs[process].invalidate("k"),
            1 => world.hs[process].invalidate_prefix(""),
            2 => world.hs[process].invalidate_all(),
            _ => {}
        }
        rt.sleep(MS * (1 + world.draw(world.options.pause_ms)) as u32).await;
    }
}

fn start(world: &Arc<World>, other: &SimRuntime) {
    let spawn = |task: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>| {
        let world = world.clone();
        world.running.fetch_add(1, Ordering::Relaxed);
        world.rt.clone().spawn(async move {
            task.await;
            world.running.fetch_sub(1, Ordering::Relaxed);
        });
    };
    for process in 0..2 {
        for _ in 0..world.options.readers {
            spawn(Box::pin(reader(world.clone(), world.rt.clone(), process)));
        }
        if world.options.dies {
            other.spawn(reader(world.clone(), other.clone(), process));
            other.spawn(reader(world.clone(), other.clone(), process));
            other.spawn(writer(world.clone(), other.clone(), process));
        }
    }
    for n in 0..world.options.writers {
        spawn(Box::pin(writer(world.clone(), world.rt.clone(), n as usize)));
    }
}

/// Everything goes wrong, and no read is wrong.
fn safety(world: &Arc<World>, other: &SimRuntime) {
    let mut alive = Some(other);
    for round in 0..10 {
        if world.options.stalls && world.draw(3) == 0 {
            let stalled = &world.hs[world.draw(2) as usize];
            stalled.stall_driver(true);
            world.drive_for(alive, MS * (1 + world.draw(STALL_MAX_MS)) as u32);
            stalled.stall_driver(false);
        }
        world.drive_for(alive, MS * (100 + world.draw(300)) as u32);
        if round == 5 && alive.take().is_some() {
            // For a while its tasks hold what they hold and are not polled; then they are gone.
            world.drive_for(None, MS * world.draw(80) as u32);
            other.shutdown();
        }
    }
}

/// Nothing goes wrong any more: all ends, all reads are current, nothing is left behind.
fn liveness(world: &Arc<World>) {
    world.stop.store(true, Ordering::Relaxed);
    world.store.faults().clear();
    let options = &world.options;
    world.drive_for(None, options.in_flight + options.stale + options.timeout + WRITE_LIMIT);
    let left = world.running.load(Ordering::Relaxed);
    if left > 0 {
        world.fail(format!("{left} callers hang"));
    }
    let done = Arc::new(AtomicUsize::new(0));
    for process in 0..2 {
        for round in 0..3 {
            let (world, done) = (world.clone(), done.clone());
            world.rt.clone().spawn(async move {
                world.rt.sleep(MS * 40 * round).await;
                let got = world.hs[process].get("k").await.map(|v| v.map(|v| number(&v)));
                let want = world.current();
                match got {
                    Ok(got) if got == want => drop(done.fetch_add(1, Ordering::Relaxed)),
                    got => world.fail(format!("at rest: {got:?} read, the store has {want:?}")),
                }
            });
        }
    }
    world.drive_for(None, options.timeout + 500 * MS);
    if done.load(Ordering::Relaxed) != 6 {
        world.fail("at rest: a read failed or hangs".into());
    }
    for hs in &world.hs {
        let stats = hs.stats();
        if (stats.keys_under_way, stats.loads_in_flight) != (0, 0) {
            world.fail(format!("at rest: something is left under way: {stats:?}"));
        }
    }
}

/// One seed: its trace and what it has seen, or what was wrong.
fn run(seed: u64, mutant: bool) -> Result<(u64, Seen), String> {
    let world = World::new(seed, mutant);
    let other = SimRuntime::with_clock(seed ^ 0x5eed, world.rt.clock());
    start(&world, &other);
    safety(&world, &other);
    liveness(&world);
    let mut seen = Seen {
        reads: world.reads.load(Ordering::Relaxed),
        cached: world.cached.load(Ordering::Relaxed),
        faults: world.store.faults().struck(),
        ..Seen::default()
    };
    for stats in world.hs.iter().map(Heatsink::stats) {
        seen.overlapped += stats.overlapped;
        seen.handed_over += stats.handed_over;
        seen.late += stats.late;
        seen.timed_out += stats.timed_out;
        seen.unknown += stats.writes_unknown;
    }
    let trace = world.rt.trace_hash() ^ other.trace_hash().rotate_left(1);
    world.rt.shutdown();
    match world.failure.lock().unwrap().take() {
        None => Ok((trace, seen)),
        Some(what) => Err(format!(
            "seed {seed}: {what}\n{:?}\nHEATSINK_SEED={seed} cargo test --release --features \
             testing --test sim",
            world.options
        )),
    }
}

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn no_read_is_wrong_under_faults_and_all_is_well_after_them() {
    if let Some(seed) = env("HEATSINK_SEED") {
        let (trace, seen) = run(seed, false).unwrap_or_else(|wrong| panic!("{wrong}"));
        println!("seed {seed}: trace {trace:016x}, {seen:?}");
        return;
    }
    let mut sum = Seen::default();
    for seed in 0..env("HEATSINK_SEEDS").unwrap_or(200) {
        let (_, seen) = run(seed, false).unwrap_or_else(|wrong| panic!("{wrong}"));
        sum.reads += seen.reads;
        sum.cached += seen.cached;
        sum.overlapped += seen.overlapped;
        sum.handed_over += seen.handed_over;
        sum.late += seen.late;
        sum.timed_out += seen.timed_out;
        sum.unknown += seen.unknown;
        sum.faults += seen.faults;
    }
    println!("{sum:?}");
    // A simulation in which these do not happen proves nothing about them.
    let all = [sum.cached, sum.overlapped, sum.timed_out, sum.unknown, sum.faults];
    assert!(all.iter().all(|n| *n > 0), "{sum:?}");
}

#[test]
fn the_same_seed_is_the_same_run_and_another_seed_another() {
    let trace = |seed| run(seed, false).unwrap_or_else(|wrong| panic!("{wrong}")).0;
    for seed in 0..10 {
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
    }
    assert_ne!(trace(1), trace(2));
}

#[test]
fn a_write_that_is_not_announced_is_caught() {
    let caught = (0..50).filter_map(|seed| run(seed, true).err());
    assert!(caught.into_iter().any(|wrong| wrong.contains(OLDER_THAN_OWN)));
}
