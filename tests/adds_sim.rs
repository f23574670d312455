//! A seeded simulation of counters: processes that add, flush, crash, are restarted under their
//! names while the one before still lives, and a store whose writes are lost, late and refused.
//!
//! Amounts are positive, so that every bound is sharp:
//!
//! - coalesced adds: acknowledged ≤ total ≤ acknowledged + unknown, after every step;
//! - buffered adds: acknowledged ≤ total ≤ given, after every step; a lane never exceeds what was
//!   given; at rest the total is what was given, less what crashes took from buffers (an interval's
//!   worth each) and what was said to be lost.
//!
//! `HEATSINK_SEEDS=N` runs more seeds than the default 150, `HEATSINK_OPS=N` more adds per seed
//! than 1,500, `HEATSINK_SEED=S` one seed. The 10^7 adds over 2,000 seeds:
//!
//! `HEATSINK_SEEDS=2000 HEATSINK_OPS=5000 cargo test --release --features testing --test adds_sim`

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use heatsink::engine::time::Tick;
use heatsink::store::MemoryStore;
use heatsink::store::memory::{Fault, On, Op};
use heatsink::testing::SimRuntime;
use heatsink::{Adds, AtCap, Heatsink, Loads, Mutant, Outcome};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const NAMES: usize = 3;

/// What one seed derives.
#[derive(Clone, Debug)]
struct Options {
    latency: Duration,
    every: Duration,
    timeout: Duration,
    fault_permille: u64,
    late: bool,
    hangs: bool,
    adders: u64,
    crashes: bool,
    zombies: bool,
    lanes: usize,
    pending_max: u64,
    at_cap: AtCap,
    mutant: Option<Mutant>,
}

impl Options {
    fn derive(rt: &SimRuntime, mutant: Option<Mutant>) -> Options {
        Options {
            latency: MS * (1 + rt.draw(20) as u32),
            every: MS * [500, 500, 20][rt.draw(3) as usize],
            timeout: MS * (100 + rt.draw(400) as u32),
            fault_permille: [0, 20, 80, 200][rt.draw(4) as usize],
            late: rt.draw(2) == 0,
            hangs: rt.draw(2) == 0,
            adders: 1 + rt.draw(5),
            crashes: rt.draw(3) > 0,
            zombies: rt.draw(2) == 0,
            lanes: [2, 4, 16][rt.draw(3) as usize],
            pending_max: [200, 1 << 20][rt.draw(2) as usize],
            at_cap: [AtCap::Through, AtCap::Refuse][rt.draw(2) as usize],
            mutant,
        }
    }

    fn arm(&self, store: &MemoryStore, rt: &SimRuntime) {
        let p = self.fault_permille as f64 / 1000.0;
        let faults = store.faults();
        faults.chance(On::Any, p, Fault::NotApplied);
        faults.chance(On::Any, p, Fault::Delay(MS * (1 + rt.draw(60)) as u32));
        faults.chance(On::Writes, p, Fault::UnknownApplied);
        faults.chance(On::Writes, p, Fault::UnknownNotApplied);
        if self.late {
            faults.chance(On::Writes, p, Fault::UnknownLater(MS * (1 + rt.draw(3000)) as u32));
        }
        if self.hangs {
            faults.chance(On::Only(Op::PutIfNewer), p / 2.0, Fault::LostReply);
            faults.chance(On::Only(Op::Add), p / 2.0, Fault::LostReply);
        }
    }
}

/// What has become of one counter's adds, seen from outside.
#[derive(Default, Debug)]
struct Books {
    /// Every amount that a call was made with and that was not refused.
    given: AtomicI64,
    /// Those known to be stored.
    acked: AtomicI64,
    /// Those whose call ended with an unknown outcome, or was dropped.
    unknown: AtomicI64,
}

impl Books {
    /// Until the call ends, and for ever if it is dropped, its outcome is unknown.
    fn begin(&self, n: i64) {
        self.given.fetch_add(n, Ordering::Relaxed);
        self.unknown.fetch_add(n, Ordering::Relaxed);
    }

    /// The call has ended; `stored` says that success means stored.
    fn end(&self, n: i64, answer: &heatsink::Result<()>, stored: bool) {
        match answer {
            Ok(()) if stored => {
                self.acked.fetch_add(n, Ordering::Relaxed);
            }
            Ok(()) => {}
            Err(e) if e.outcome() == Outcome::NotApplied => {
                self.given.fetch_sub(n, Ordering::Relaxed);
            }
            Err(_) => return,
        }
        self.unknown.fetch_sub(n, Ordering::Relaxed);
    }
}

/// What one process knows of its buffered adds.
#[derive(Default)]
struct Ledger {
    /// Those whose call ended well.
    done: AtomicI64,
    /// Those that an acknowledged flush covers.
    flushed: AtomicI64,
    /// Those that were acknowledged one by one.
    durable: AtomicI64,
}

impl Ledger {
    fn acked(&self) -> i64 {
        self.flushed.load(Ordering::Relaxed).max(self.durable.load(Ordering::Relaxed))
    }
}

/// How often the interesting things happened.
#[derive(Default, Debug)]
struct Seen {
    adds: u64,
    batches: u64,
    flushes: u64,
    flushes_failed: u64,
    through: u64,
    refused: u64,
    taken_over: u64,
    compactions: u64,
    crashes: u64,
    zombies: u64,
    lost: u64,
    faults: u64,
}

/// One process: a runtime that can be killed, and what runs on it.
struct Process {
    rt: SimRuntime,
    hs: Heatsink,
    name: usize,
    born: u64,
    slept: bool,
    /// Not scheduled before then: a stopped process, whose tasks hold what they hold.
    asleep: Tick,
}

struct World {
    rt: SimRuntime,
    store: MemoryStore,
    options: Options,
    plain: Books,
    buffered: Books,
    /// What `on_lost` was told by processes that live.
    said: Arc<AtomicI64>,
    /// What crashes took out of buffers.
    crashed: AtomicI64,
    left: AtomicI64,
    stop: AtomicBool,
    ledgers: Mutex<Vec<Arc<Ledger>>>,
    /// Recent adds to the buffered counter: when, by whom, how much.
    recent: Mutex<Vec<(Tick, u64, i64)>>,
    failure: Mutex<Option<String>>,
}

impl World {
    fn new(seed: u64, ops: i64, mutant: Option<Mutant>) -> Arc<World> {
        let rt = SimRuntime::new(seed);
        let options = Options::derive(&rt, mutant);
        let store = MemoryStore::builder().shards(2).runtime(rt.clone()).seed(seed);
        let store = store.latency(options.latency).count_keys(false).build();
        options.arm(&store, &rt);
        Arc::new(World {
            rt,
            store,
            options,
            plain: Books::default(),
            buffered: Books::default(),
            said: Arc::default(),
            crashed: AtomicI64::new(0),
            left: AtomicI64::new(ops),
            stop: AtomicBool::new(false),
            ledgers: Mutex::default(),
            recent: Mutex::new(Vec::new()),
            failure: Mutex::new(None),
        })
    }

    fn fail(&self, text: String) {
        self.failure.lock().unwrap().get_or_insert(text);
    }

    fn number(&self, key: &str) -> i64 {
        let stored = self.store.get_now(key);
        stored.map_or(0, |s| std::str::from_utf8(&s.bytes).unwrap().parse().unwrap())
    }

    /// The parts of the buffered counter as they lie in the store: the plain counter, and the lanes
    /// with what was retired.
    fn buffered_now(&self) -> i64 {
        let mut sum = self.number("b");
        let snapshot = self.store.snapshot();
        let roster = snapshot.iter().find(|(k, _)| k.to_string().contains("}roster:"));
        let Some((_, roster)) = roster else { return sum };
        let roster = heatsink::engine::control::roster::Roster::parse(roster).unwrap();
        sum += roster.retired;
        for (generation, lane) in roster.lanes() {
            let name = format!("}}lane.{generation}.{lane}:b");
            let held = snapshot.iter().find(|(k, _)| k.to_string().ends_with(&name));
            let value = held.map(|(_, bytes)| {
                heatsink::engine::control::lanes::LaneValue::parse(bytes).unwrap().total()
            });
            let value = value.unwrap_or(0);
            if value > self.buffered.given.load(Ordering::Relaxed) {
                self.fail(format!("lane {generation}.{lane} holds {value}: more than was given"));
            }
            sum += value;
        }
        sum
    }

    /// The invariants that hold at every moment.
    fn check(&self) {
        let load = |n: &AtomicI64| n.load(Ordering::Relaxed);
        let plain = self.number("p");
        let (acked, given) = (load(&self.plain.acked), load(&self.plain.given));
        if plain < acked || plain > given {
            self.fail(format!("coalesced: acked {acked} <= total {plain} <= given {given}"));
        }
        let total = self.buffered_now();
        let acked: i64 = self.ledgers.lock().unwrap().iter().map(|l| l.acked()).sum();
        // What a process gave up as in doubt may be missing from what it flushed later.
        let (acked, given) = (acked - load(&self.said), load(&self.buffered.given));
        if total < acked || total > given {
            self.fail(format!("buffered: acked {acked} <= total {total} <= given {given}"));
        }
    }

    fn spawn(self: &Arc<Self>, name: usize) -> Process {
        let ledger = Arc::new(Ledger::default());
        let born = {
            let mut ledgers = self.ledgers.lock().unwrap();
            ledgers.push(ledger.clone());
            ledgers.len() as u64
        };
        let seed = self.rt.draw(u64::MAX);
        let rt = SimRuntime::with_clock(seed, self.rt.clock());
        let said = self.said.clone();
        let options = &self.options;
        let adds = Adds::new()
            .flush_every(options.every)
            .lanes_max(options.lanes)
            .pending_max(options.pending_max)
            .at_cap(options.at_cap)
            .writer(format!("w{name}"))
            .on_lost(move |_, amount| {
                said.fetch_add(amount, Ordering::Relaxed);
            });
        let hs = Heatsink::builder(self.store.clone())
            .runtime(rt.clone())
            .seed(seed ^ born)
            .cores(2.try_into().unwrap())
            .loads(Loads::new().timeout(options.timeout))
            .adds(adds)
            .build()
            .unwrap();
        if let Some(mutant) = options.mutant {
            hs.break_counters(mutant);
        }
        for _ in 0..options.adders {
            let (world, hs, own) = (self.clone(), hs.clone(), rt.clone());
            let ledger = ledger.clone();
            rt.spawn(async move { world.adder(hs, own, (born, ledger)).await });
        }
        Process { rt, hs, name, born, slept: false, asleep: Tick::ZERO }
    }

    async fn adder(self: Arc<Self>, hs: Heatsink, rt: SimRuntime, me: (u64, Arc<Ledger>)) {
        let (born, ledger) = me;
        let plain = hs.counter("p");
        let Ok(buffered) = hs.buffered("b") else { return };
        while !self.stop.load(Ordering::Relaxed) {
            if self.left.fetch_sub(1, Ordering::Relaxed) <= 0 {
                return;
            }
            let n = 1 + self.rt.draw(9) as i64;
            match self.rt.draw(20) {
                0..4 => {
                    self.plain.begin(n);
                    let answer = plain.add(n).await;
                    self.plain.end(n, &answer, true);
                }
                4 => {
                    self.gave(born, n);
                    let answer = buffered.add_durable(n).await;
                    self.buffered.end(n, &answer, true);
                    if answer.is_ok() {
                        ledger.done.fetch_add(n, Ordering::Relaxed);
                        ledger.durable.fetch_add(n, Ordering::Relaxed);
                    }
                }
                5 => {
                    let done = ledger.done.load(Ordering::Relaxed);
                    if buffered.flush().await.is_ok() {
                        ledger.flushed.fetch_max(done, Ordering::Relaxed);
                    }
                }
                6 if self.rt.draw(4) == 0 => {
                    if let Ok(sum) = buffered.sum_with(Duration::ZERO).await
                        && sum.total() > self.buffered.given.load(Ordering::Relaxed)
                    {
                        self.fail(format!("a sum of {} is more than was given", sum.total()));
                    }
                }
                _ => {
                    self.gave(born, n);
                    let answer = buffered.add(n).await;
                    self.buffered.end(n, &answer, false);
                    if answer.is_ok() {
                        ledger.done.fetch_add(n, Ordering::Relaxed);
                    }
                }
            }
            if self.rt.draw(8) == 0 {
                rt.sleep(MS * self.rt.draw(60) as u32).await;
            }
        }
    }

    /// A process is about to add `n` to the buffered counter.
    fn gave(&self, born: u64, n: i64) {
        self.buffered.begin(n);
        if self.options.fault_permille == 0 {
            self.recent.lock().unwrap().push((self.rt.now(), born, n));
        }
    }

    /// Without faults, what a process holds back is what it was given within the last interval,
    /// and the few round trips of a first flush.
    fn check_interval(&self, process: &Process, held: i64) {
        let now = self.rt.now();
        if self.options.fault_permille > 0 || process.slept {
            return;
        }
        let since = now.before(self.options.every + 10 * self.options.latency);
        let mut recent = self.recent.lock().unwrap();
        recent.retain(|(at, ..)| *at >= since);
        let mine = recent.iter().filter(|(_, born, _)| *born == process.born);
        let given: i64 = mine.map(|(.., n)| n).sum();
        if held > given {
            self.fail(format!("a crash takes {held}, and one interval brought {given}"));
        }
    }

    /// Lets everybody run until then, one poll of one process at a time.
    fn drive(&self, all: &mut [Process], until: Tick) {
        let mut steps = 0u32;
        loop {
            let now = self.rt.now();
            let mut moved = self.rt.step();
            for process in all.iter_mut().filter(|p| p.asleep <= now) {
                while process.rt.jump(now) {}
                moved |= process.rt.step();
            }
            steps += 1;
            if steps.is_multiple_of(64) {
                self.check();
            }
            if moved {
                continue;
            }
            self.check();
            // Time goes on to the next timer of any of them, at most a millisecond.
            let next = now.after(MS).min(until);
            while self.rt.jump(next) {}
            self.rt.clock().set(next);
            if now >= until {
                return;
            }
        }
    }

    fn kill(&self, process: Process, seen: &mut Seen) {
        seen.crashes += 1;
        self.tally(&process, seen);
        let held = process.hs.buffered("b").map_or(0, |b| b.pending());
        self.crashed.fetch_add(held, Ordering::Relaxed);
        self.check_interval(&process, held);
        // Nothing is dropped in an orderly way, so nobody says what is lost: it was killed.
        let said = self.said.load(Ordering::Relaxed);
        process.rt.shutdown();
        drop(process);
        self.said.store(said, Ordering::Relaxed);
    }

    fn tally(&self, process: &Process, seen: &mut Seen) {
        let stats = process.hs.add_stats();
        seen.batches += stats.batches;
        seen.flushes += stats.flushes;
        seen.flushes_failed += stats.flushes_failed;
        seen.through += stats.through;
        seen.refused += stats.refused;
        seen.taken_over += stats.lanes_taken_over;
        seen.compactions += stats.compactions;
    }
}

/// Everything goes wrong.
fn safety(world: &Arc<World>, seen: &mut Seen) -> Vec<Process> {
    let mut all: Vec<Process> = (0..NAMES).map(|name| world.spawn(name)).collect();
    while world.left.load(Ordering::Relaxed) > 0 {
        let until = world.rt.now().after(MS * (20 + world.rt.draw(400)) as u32);
        world.drive(&mut all, until);
        if world.failure.lock().unwrap().is_some() {
            return all;
        }
        let at = world.rt.draw(all.len() as u64) as usize;
        let name = all[at].name;
        match world.rt.draw(8) {
            0 if world.options.crashes => {
                let dead = all.swap_remove(at);
                world.kill(dead, seen);
                all.push(world.spawn(name));
            }
            // A second process under the same name, while the first sleeps and then goes on.
            1 if world.options.zombies && all.len() < 2 * NAMES => {
                all[at].asleep = world.rt.now().after(MS * world.rt.draw(2000) as u32);
                all.push(world.spawn(name));
                all[at].slept = true;
                seen.zombies += 1;
            }
            _ => {}
        }
    }
    all
}

/// Nothing goes wrong any more: everything given is there, but what is known to be lost.
fn liveness(world: &Arc<World>, mut all: Vec<Process>, seen: &mut Seen) {
    world.stop.store(true, Ordering::Relaxed);
    world.store.faults().clear();
    all.iter_mut().for_each(|p| p.asleep = Tick::ZERO);
    // Late writes land, calls time out, and every buffer is flushed.
    let until = world.rt.now().after(Duration::from_secs(5));
    world.drive(&mut all, until);
    let load = |n: &AtomicI64| n.load(Ordering::Relaxed);
    for process in &all {
        let pending = process.hs.buffered("b").unwrap().pending();
        if pending != 0 {
            world.fail(format!("at rest: process {} still holds {pending}", process.name));
        }
        world.tally(process, seen);
    }
    let (total, given) = (world.buffered_now(), load(&world.buffered.given));
    let (crashed, said) = (load(&world.crashed), load(&world.said));
    // What was in doubt may or may not be stored.
    let missing = given - total;
    let doubtful = crashed + said + load(&world.buffered.unknown);
    if missing < 0 || missing > doubtful {
        world.fail(format!(
            "at rest: {total} of {given} given; crashes took {crashed}, {said} was said to be lost"
        ));
    }
    let (plain, acked) = (world.number("p"), load(&world.plain.acked));
    if plain < acked || plain > acked + load(&world.plain.unknown) {
        world.fail(format!("at rest: {plain}, {acked} acknowledged"));
    }
    seen.lost += (crashed + said) as u64;
}

/// One seed: its trace and what it has seen, or what was wrong.
fn run(seed: u64, ops: i64, mutant: Option<Mutant>) -> Result<(u64, Seen), String> {
    let world = World::new(seed, ops, mutant);
    let mut seen = Seen { adds: ops as u64, ..Seen::default() };
    let all = safety(&world, &mut seen);
    if world.failure.lock().unwrap().is_none() {
        liveness(&world, all, &mut seen);
    }
    seen.faults = world.store.faults().struck();
    world.rt.record(world.buffered_now() as u64);
    world.rt.record(world.number("p") as u64);
    let trace = world.rt.trace_hash();
    world.rt.shutdown();
    match world.failure.lock().unwrap().take() {
        None => Ok((trace, seen)),
        Some(what) => Err(format!(
            "seed {seed}: {what}\n{:?}\nHEATSINK_SEED={seed} HEATSINK_OPS={ops} cargo test \
             --release --features testing --test adds_sim",
            world.options
        )),
    }
}

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn nothing_is_lost_or_doubled_under_faults_crashes_and_zombies() {
    let ops = env("HEATSINK_OPS").unwrap_or(1_500) as i64;
    if let Some(seed) = env("HEATSINK_SEED") {
        let (trace, seen) = run(seed, ops, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        println!("seed {seed}: trace {trace:016x}, {seen:?}");
        return;
    }
    let mut sum = Seen::default();
    for seed in 0..env("HEATSINK_SEEDS").unwrap_or(150) {
        let (_, seen) = run(seed, ops, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        sum.adds += seen.adds;
        sum.batches += seen.batches;
        sum.flushes += seen.flushes;
        sum.flushes_failed += seen.flushes_failed;
        sum.through += seen.through;
        sum.refused += seen.refused;
        sum.taken_over += seen.taken_over;
        sum.compactions += seen.compactions;
        sum.crashes += seen.crashes;
        sum.zombies += seen.zombies;
        sum.lost += seen.lost;
        sum.faults += seen.faults;
    }
    println!("{sum:?}");
    // A simulation in which these do not happen proves nothing about them.
    let all = [
        sum.batches,
        sum.flushes_failed,
        sum.through,
        sum.refused,
        sum.taken_over,
        sum.compactions,
        sum.crashes,
        sum.zombies,
        sum.lost,
        sum.faults,
    ];
    assert!(all.iter().all(|n| *n > 0), "{sum:?}");
}

#[test]
fn the_same_seed_is_the_same_run_and_another_seed_another() {
    let trace = |seed| run(seed, 500, None).unwrap_or_else(|wrong| panic!("{wrong}")).0;
    for seed in 0..5 {
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
    }
    assert_ne!(trace(1), trace(2));
}

#[test]
fn each_way_to_get_it_wrong_is_caught() {
    for mutant in [
        Mutant::DeltaFlush,
        Mutant::NoIncarnation,
        Mutant::ReadBackErrorIsZero,
        Mutant::AckBeforeStore,
    ] {
        let caught = (0..60).filter(|seed| run(*seed, 1_000, Some(mutant)).is_err()).count();
        println!("{mutant:?}: caught in {caught} of 60 seeds");
        assert!(caught > 0, "{mutant:?}");
    }
}
