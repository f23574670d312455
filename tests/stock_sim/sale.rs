//! A seeded simulation of a sale: processes that take, confirm, put back and even out, crash and
//! sleep in the middle, and a store whose operations fail, are lost, late and applied without a
//! reply.
//!
//! After every few steps: what is in buckets and what buyers are known to have is never more than
//! was filled in; sold out is never said while a unit lies in a bucket throughout the call. At rest:
//! every unit is accounted for, in one place; no hold has units twice.

use crate::env;
use heatsink::engine::control::stock::Mutant;
use heatsink::engine::time::Tick;
use heatsink::store::MemoryStore;
use heatsink::store::memory::{Fault, On, Op};
use heatsink::testing::SimRuntime;
use heatsink::{Fate, Heatsink, Key, Loads, Outcome, Stock, Taken};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const PROCESSES: usize = 3;
/// Longer than any operation is late.
const LATE_MAX: u64 = 2_000;

/// What one seed derives.
#[derive(Clone, Debug)]
struct Options {
    units: u64,
    buckets: usize,
    buyers: u64,
    latency: Duration,
    timeout: Duration,
    fault_permille: u64,
    late: bool,
    hangs: bool,
    crashes: bool,
    mutant: Option<Mutant>,
}

impl Options {
    fn derive(rt: &SimRuntime, mutant: Option<Mutant>) -> Options {
        Options {
            units: 5 + rt.draw(120),
            buckets: [1, 2, 3, 8][rt.draw(4) as usize],
            buyers: 1 + rt.draw(4),
            latency: MS * (1 + rt.draw(8) as u32),
            timeout: MS * (50 + rt.draw(200) as u32),
            fault_permille: [0, 20, 80, 200][rt.draw(4) as usize],
            late: rt.draw(2) == 0,
            hangs: rt.draw(2) == 0,
            crashes: rt.draw(3) > 0,
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
            let by = MS * (1 + rt.draw(LATE_MAX)) as u32;
            faults.chance(On::Writes, p, Fault::UnknownLater(by));
        }
        if self.hangs {
            for op in [Op::Take, Op::EndHold, Op::AddOnce, Op::CompareAndSet] {
                faults.chance(On::Only(op), p / 2.0, Fault::LostReply);
            }
        }
    }
}

/// What is known from outside, in units.
#[derive(Default, Debug)]
struct Books {
    /// Filled in, or perhaps filled in.
    filled_most: AtomicU64,
    filled_least: AtomicU64,
    /// Units of holds that were acknowledged and that nobody has begun to put back.
    out: AtomicU64,
    /// Units whose sale was acknowledged.
    sold_least: AtomicU64,
    /// Units whose sale was tried.
    sold_most: AtomicU64,
}

/// How often the interesting things happened.
#[derive(Default, Debug)]
struct Seen {
    held: AtomicU64,
    sold_out: AtomicU64,
    short: AtomicU64,
    unknown: AtomicU64,
    resolved: AtomicU64,
    put_back: AtomicU64,
    moved: AtomicU64,
    crashes: AtomicU64,
    sleeps: AtomicU64,
}

struct Process {
    rt: SimRuntime,
    asleep: Tick,
    /// Keeps the driver and what it shares alive.
    _hs: Heatsink,
}

struct World {
    rt: SimRuntime,
    store: MemoryStore,
    options: Options,
    books: Books,
    seen: Seen,
    /// Counts steps.
    step: AtomicU64,
    /// Of each bucket, the last step at which it had no unit.
    last_empty: Mutex<BTreeMap<Key, u64>>,
    buckets: Mutex<Vec<Key>>,
    next_hold: AtomicU64,
    left: AtomicU64,
    stop: AtomicBool,
    failure: Mutex<Option<String>>,
}

fn add(n: &AtomicU64, by: u64) {
    n.fetch_add(by, Ordering::Relaxed);
}

fn get(n: &AtomicU64) -> u64 {
    n.load(Ordering::Relaxed)
}

impl World {
    fn new(seed: u64, takes: u64, mutant: Option<Mutant>) -> Arc<World> {
        let rt = SimRuntime::new(seed);
        let options = Options::derive(&rt, mutant);
        let store = MemoryStore::builder().shards(3).runtime(rt.clone()).seed(seed);
        let store = store.latency(options.latency).count_keys(false).build();
        Arc::new(World {
            rt,
            store,
            options,
            books: Books::default(),
            seen: Seen::default(),
            step: AtomicU64::new(1),
            last_empty: Mutex::default(),
            buckets: Mutex::default(),
            next_hold: AtomicU64::new(0),
            left: AtomicU64::new(takes),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
        })
    }

    fn fail(&self, text: String) {
        self.failure.lock().unwrap().get_or_insert(text);
    }

    /// Units in each bucket now.
    fn levels(&self) -> Vec<(Key, u64)> {
        let level = |key: &Key| {
            let stored = self.store.get_now(key.clone()).map(|s| s.bytes);
            let units = stored.map_or(0, |b| std::str::from_utf8(&b).unwrap().parse().unwrap());
            (key.clone(), units)
        };
        self.buckets.lock().unwrap().iter().map(level).collect()
    }

    /// Units in buckets now.
    fn free(&self) -> u64 {
        self.levels().iter().map(|(_, units)| units).sum()
    }

    /// Whether every bucket had no unit at some time since step `began`. Buckets are not read at one
    /// time: a unit that is put back behind a look, and one that is sold before it, are not seen.
    fn each_was_empty(&self, began: u64) -> bool {
        let last = self.last_empty.lock().unwrap();
        self.levels().iter().all(|(key, _)| last.get(key).is_some_and(|step| *step >= began))
    }

    fn check(&self) {
        add(&self.step, 1);
        let mut free = 0;
        for (key, units) in self.levels() {
            free += units;
            if units == 0 {
                self.last_empty.lock().unwrap().insert(key, get(&self.step));
            }
        }
        let (out, most) = (get(&self.books.out), get(&self.books.filled_most));
        if free + out > most {
            self.fail(format!("oversold: {free} free and {out} out, of {most}"));
        }
    }

    fn stock(&self, hs: &Heatsink) -> Stock {
        let stock = hs.stock("sku").unwrap();
        if let Some(mutant) = self.options.mutant {
            stock.break_by(mutant);
        }
        stock
    }

    fn spawn(self: &Arc<Self>) -> Process {
        let seed = self.rt.draw(u64::MAX);
        let rt = SimRuntime::with_clock(seed, self.rt.clock());
        let hs = Heatsink::builder(self.store.clone())
            .runtime(rt.clone())
            .seed(seed)
            .cores(2.try_into().unwrap())
            .loads(Loads::new().timeout(self.options.timeout))
            .build()
            .unwrap();
        let stock = self.stock(&hs);
        for _ in 0..self.options.buyers {
            let (world, stock, own) = (self.clone(), stock.clone(), rt.clone());
            rt.spawn(async move { world.buyer(stock, own).await });
        }
        Process { rt, asleep: Tick::ZERO, _hs: hs }
    }

    async fn buyer(self: Arc<Self>, stock: Stock, rt: SimRuntime) {
        while !self.stop.load(Ordering::Relaxed) && get(&self.left) > 0 {
            match self.rt.draw(24) {
                0 => match stock.rebalance().await {
                    Ok(moved) => add(&self.seen.moved, moved),
                    Err(_) => add(&self.seen.unknown, 1),
                },
                1 if self.rt.draw(4) == 0 => drop(stock.gather().await),
                2 if self.rt.draw(6) == 0 => self.restock(&stock).await,
                _ => self.buy(&stock).await,
            }
            if self.rt.draw(3) == 0 {
                rt.sleep(MS * self.rt.draw(40) as u32).await;
            }
        }
    }

    async fn restock(&self, stock: &Stock) {
        let n = 1 + self.rt.draw(20);
        add(&self.books.filled_most, n);
        match stock.restock(n).await {
            Ok(()) => add(&self.books.filled_least, n),
            Err(_) => add(&self.seen.unknown, 1),
        }
    }

    async fn buy(&self, stock: &Stock) {
        self.left.fetch_sub(1.min(get(&self.left)), Ordering::Relaxed);
        let hold = format!("b{}", self.next_hold.fetch_add(1, Ordering::Relaxed));
        let amount = 1 + self.rt.draw(10) / 9;
        let mut asked = 0;
        let held = loop {
            let began = get(&self.step);
            match stock.take(amount, &hold).await {
                Ok(Taken::Held(held)) => {
                    if asked > 0 {
                        add(&self.seen.resolved, 1);
                    }
                    break held;
                }
                Ok(Taken::SoldOut) => {
                    add(&self.seen.sold_out, 1);
                    if !self.each_was_empty(began) && self.free() > 0 {
                        self.fail(format!("{hold}: sold out, with {} units free", self.free()));
                    }
                    return;
                }
                Ok(Taken::Short { .. }) => return add(&self.seen.short, 1),
                // Given up in every bucket, after answers were lost: to a fault, or to a sleep beyond
                // the timeout.
                Ok(Taken::Ended)
                    if self.options.fault_permille > 0 || get(&self.seen.sleeps) > 0 =>
                {
                    return;
                }
                Ok(Taken::Ended) => return self.fail(format!("{hold} was never put back")),
                Err(e) if e.outcome() == Outcome::Unknown && asked < 3 => {
                    add(&self.seen.unknown, 1);
                    asked += 1;
                    if self.rt.draw(4) == 0 {
                        return;
                    }
                }
                Err(_) => return,
            }
        };
        add(&self.seen.held, 1);
        add(&self.books.out, amount);
        if self.rt.draw(6) == 0 {
            // Delivered twice: the same hold finds what it has.
            match stock.take(amount, &hold).await {
                Ok(Taken::Held(_)) | Err(_) => {}
                other => self.fail(format!("{hold} has units and is told {other:?}")),
            }
        }
        match self.rt.draw(10) {
            0..5 => {
                add(&self.books.sold_most, amount);
                if held.confirm().await.is_ok() {
                    add(&self.books.sold_least, amount);
                }
            }
            5..8 => {
                self.books.out.fetch_sub(amount, Ordering::Relaxed);
                for _ in 0..1 + self.rt.draw(3) {
                    if held.put_back().await.is_ok() {
                        add(&self.seen.put_back, 1);
                    }
                }
            }
            // Abandoned.
            _ => {}
        }
    }

    /// Lets everybody run until then, one poll of one process at a time.
    fn drive(&self, all: &mut [Process], until: Tick) {
        loop {
            let now = self.rt.now();
            let mut moved = self.rt.step();
            for process in all.iter_mut().filter(|p| p.asleep <= now) {
                while process.rt.jump(now) {}
                moved |= process.rt.step();
            }
            self.check();
            if moved {
                continue;
            }
            let next = now.after(MS).min(until);
            while self.rt.jump(next) {}
            self.rt.clock().set(next);
            if now >= until || self.failure.lock().unwrap().is_some() {
                return;
            }
        }
    }

    /// Opens the sale: no fault strikes yet.
    fn open(self: &Arc<Self>) -> bool {
        let process = self.spawn();
        let (world, stock) = (self.clone(), self.stock(&process._hs));
        add(&self.books.filled_most, self.options.units);
        add(&self.books.filled_least, self.options.units);
        let done = Arc::new(AtomicBool::new(false));
        let told = done.clone();
        process.rt.spawn(async move {
            let (units, buckets) = (world.options.units, world.options.buckets);
            assert!(stock.create(units, buckets).await.unwrap());
            assert!(!stock.create(7, 3).await.unwrap(), "a stock is made once");
            told.store(true, Ordering::Relaxed);
        });
        let left = self.left.swap(0, Ordering::Relaxed);
        self.drive(&mut [process], self.rt.now().after(Duration::from_secs(2)));
        self.left.store(left, Ordering::Relaxed);
        let buckets = self.store.snapshot().into_keys();
        let buckets = buckets.filter(|key| key.to_string().contains("}units."));
        *self.buckets.lock().unwrap() = buckets.collect();
        self.options.arm(&self.store, &self.rt);
        done.load(Ordering::Relaxed) && self.free() == self.options.units
    }

    fn sale(self: &Arc<Self>) -> Vec<Process> {
        let mut all: Vec<Process> = (0..PROCESSES).map(|_| self.spawn()).collect();
        while get(&self.left) > 0 && self.failure.lock().unwrap().is_none() {
            let until = self.rt.now().after(MS * (5 + self.rt.draw(200)) as u32);
            self.drive(&mut all, until);
            let at = self.rt.draw(all.len() as u64) as usize;
            match self.rt.draw(6) {
                0 if self.options.crashes => {
                    add(&self.seen.crashes, 1);
                    let dead = all.swap_remove(at);
                    dead.rt.shutdown();
                    drop(dead);
                    all.push(self.spawn());
                }
                1 => {
                    add(&self.seen.sleeps, 1);
                    all[at].asleep = self.rt.now().after(MS * self.rt.draw(1_500) as u32);
                }
                _ => {}
            }
        }
        all
    }

    /// Nothing goes wrong any more: every unit is somewhere, in one place.
    fn rest(self: &Arc<Self>, mut all: Vec<Process>) {
        self.stop.store(true, Ordering::Relaxed);
        self.store.faults().clear();
        all.iter_mut().for_each(|p| p.asleep = Tick::ZERO);
        let until = self.rt.now().after(Duration::from_secs(4));
        self.drive(&mut all, until);
        // Whatever still hangs is killed.
        all.drain(..).for_each(|p| p.rt.shutdown());
        let process = self.spawn();
        let (world, stock) = (self.clone(), self.stock(&process._hs));
        let done = Arc::new(AtomicBool::new(false));
        let told = done.clone();
        process.rt.spawn(async move {
            let before = stock.accounts().await.unwrap();
            let books = stock.reconciler().pass(|_| Fate::Keep).await.unwrap();
            let (least, most) = (get(&world.books.filled_least), get(&world.books.filled_most));
            if !books.balance() || books.in_transit > 0 {
                world.fail(format!("after reconcile: {books}; before it: {before}"));
            }
            if before.doubled + books.doubled > 0 {
                world.fail(format!("before: {before}; after: {books}"));
            }
            if books.initial < least || books.initial > most {
                world.fail(format!("{books}; {least} to {most} were filled in"));
            }
            let (least, most) = (get(&world.books.sold_least), get(&world.books.sold_most));
            if books.sold < least || books.sold > most {
                world.fail(format!("{books}; {least} to {most} were confirmed"));
            }
            if books.free != world.free() {
                world.fail(format!("{books}; {} in buckets", world.free()));
            }
            // Whoever had a hold and said nothing more gives it back, and all of it can be sold.
            world.books.out.store(0, Ordering::Relaxed);
            let books = stock.reconciler().pass(|_| Fate::Back).await.unwrap();
            if books.held > 0 || books.free + books.sold != books.initial {
                world.fail(format!("after all was put back: {books}"));
            }
            for n in 0..books.free {
                let taken = stock.take(1, format!("last{n}")).await.unwrap();
                if !matches!(taken, Taken::Held(_)) {
                    world.fail(format!("{n} of {} could be sold: {taken:?}", books.free));
                    return;
                }
            }
            let taken = stock.take(1, "nobody").await.unwrap();
            if !matches!(taken, Taken::SoldOut) {
                world.fail(format!("nothing is left, and {taken:?}"));
            }
            told.store(true, Ordering::Relaxed);
        });
        self.drive(&mut [process], self.rt.now().after(Duration::from_secs(60)));
        if !done.load(Ordering::Relaxed) {
            self.fail("the books were never closed".into());
        }
    }
}

fn run(seed: u64, takes: u64, mutant: Option<Mutant>) -> Result<(u64, Arc<World>), String> {
    let world = World::new(seed, takes, mutant);
    if !world.open() {
        world.fail("the sale did not open".into());
    } else {
        let all = world.sale();
        if world.failure.lock().unwrap().is_none() {
            world.rest(all);
        }
    }
    world.rt.record(get(&world.seen.held));
    let trace = world.rt.trace_hash();
    world.rt.shutdown();
    let failure = world.failure.lock().unwrap().take();
    match failure {
        None => Ok((trace, world)),
        Some(what) => Err(format!(
            "seed {seed}: {what}\n{:?}\n{:?}\nHEATSINK_SEED={seed} cargo test --release --features \
             testing --test stock_sim",
            world.options, world.seen
        )),
    }
}

const TAKES: u64 = 300;

#[test]
fn every_unit_is_sold_once_or_is_still_there() {
    if let Some(seed) = env("HEATSINK_SEED") {
        let (trace, world) = run(seed, TAKES, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        println!("seed {seed}: trace {trace:016x}, {:?}", world.seen);
        return;
    }
    let sum = Seen::default();
    let mut faults = 0;
    for seed in 0..env("HEATSINK_SEEDS").unwrap_or(150) {
        let (_, world) = run(seed, TAKES, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        let seen = &world.seen;
        for (to, from) in [
            (&sum.held, &seen.held),
            (&sum.sold_out, &seen.sold_out),
            (&sum.short, &seen.short),
            (&sum.unknown, &seen.unknown),
            (&sum.resolved, &seen.resolved),
            (&sum.put_back, &seen.put_back),
            (&sum.moved, &seen.moved),
            (&sum.crashes, &seen.crashes),
            (&sum.sleeps, &seen.sleeps),
        ] {
            add(to, get(from));
        }
        faults += world.store.faults().struck();
    }
    println!("{sum:?}, {faults} faults");
    // A simulation in which these do not happen proves nothing about them.
    let all = [&sum.held, &sum.sold_out, &sum.short, &sum.unknown, &sum.resolved, &sum.moved];
    assert!(all.iter().chain(&[&sum.put_back, &sum.crashes]).all(|n| get(n) > 0), "{sum:?}");
    assert!(faults > 0);
}

#[test]
fn the_same_seed_is_the_same_sale() {
    let trace = |seed| run(seed, 100, None).unwrap_or_else(|wrong| panic!("{wrong}")).0;
    for seed in 0..5 {
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
    }
}

#[test]
fn each_way_to_get_it_wrong_is_caught() {
    for mutant in [Mutant::PutsFirst, Mutant::ProbesOn, Mutant::SoldOutFromMemory] {
        let caught = (0..60).filter(|seed| run(*seed, TAKES, Some(mutant)).is_err()).count();
        println!("{mutant:?}: caught in {caught} of 60 seeds");
        assert!(caught > 0, "{mutant:?}");
    }
}
