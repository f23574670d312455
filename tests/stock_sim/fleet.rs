//! Processes on virtual time over a store with faults, for tokens and balances: they crash, sleep
//! and lose replies until their work is done, and then nothing goes wrong any more.

use heatsink::engine::time::Tick;
use heatsink::store::MemoryStore;
use heatsink::store::memory::{Fault, On, Op};
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Loads};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) const MS: Duration = Duration::from_millis(1);
const PROCESSES: usize = 3;
/// Longer than any operation is late.
const LATE_MAX: u64 = 2_000;

pub(crate) fn add(n: &AtomicU64, by: u64) {
    n.fetch_add(by, Ordering::Relaxed);
}

pub(crate) fn get(n: &AtomicU64) -> u64 {
    n.load(Ordering::Relaxed)
}

/// What is shared by all processes of one seed.
pub(crate) struct Fleet {
    pub(crate) rt: SimRuntime,
    pub(crate) store: MemoryStore,
    timeout: Duration,
    fault_permille: u64,
    late: bool,
    hangs: bool,
    crashes: bool,
    /// Calls that are still to be made.
    left: AtomicU64,
    pub(crate) stop: AtomicBool,
    pub(crate) next_id: AtomicU64,
    pub(crate) deaths: AtomicU64,
    sleeps: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// One process: it is killed by dropping its runtime.
pub(crate) struct Process {
    pub(crate) rt: SimRuntime,
    pub(crate) hs: Heatsink,
    asleep: Tick,
}

impl Fleet {
    pub(crate) fn new(seed: u64, calls: u64) -> Arc<Fleet> {
        let rt = SimRuntime::new(seed);
        let store = MemoryStore::builder().shards(3).runtime(rt.clone()).seed(seed);
        let store = store.latency(MS * (1 + rt.draw(8) as u32)).count_keys(false).build();
        Arc::new(Fleet {
            timeout: MS * (50 + rt.draw(200) as u32),
            fault_permille: [0, 20, 80, 200][rt.draw(4) as usize],
            late: rt.draw(2) == 0,
            hangs: rt.draw(2) == 0,
            crashes: rt.draw(3) > 0,
            left: AtomicU64::new(calls),
            stop: AtomicBool::new(false),
            next_id: AtomicU64::new(0),
            deaths: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            failure: Mutex::new(None),
            store,
            rt,
        })
    }

    pub(crate) fn fail(&self, text: String) {
        self.failure.lock().unwrap().get_or_insert(text);
    }

    /// Whether an answer may have been lost so far: to a fault, or to a sleep beyond the timeout.
    pub(crate) fn disturbed(&self) -> bool {
        self.fault_permille > 0 || get(&self.sleeps) > 0
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure.lock().unwrap().is_some()
    }

    /// Faults from here on.
    pub(crate) fn arm(&self) {
        let p = self.fault_permille as f64 / 1000.0;
        let faults = self.store.faults();
        faults.chance(On::Any, p, Fault::NotApplied);
        faults.chance(On::Any, p, Fault::Delay(MS * (1 + self.rt.draw(60)) as u32));
        faults.chance(On::Writes, p, Fault::UnknownApplied);
        faults.chance(On::Writes, p, Fault::UnknownNotApplied);
        if self.late {
            let by = MS * (1 + self.rt.draw(LATE_MAX)) as u32;
            faults.chance(On::Writes, p, Fault::UnknownLater(by));
        }
        if self.hangs {
            let ops = [Op::Take, Op::PopToken, Op::PushTokens, Op::EndHold, Op::AddOnce];
            for op in ops.into_iter().chain([Op::CompareAndSet]) {
                faults.chance(On::Only(op), p / 2.0, Fault::LostReply);
            }
        }
    }

    pub(crate) fn spawn(&self) -> Process {
        let seed = self.rt.draw(u64::MAX);
        let rt = SimRuntime::with_clock(seed, self.rt.clock());
        let hs = Heatsink::builder(self.store.clone())
            .runtime(rt.clone())
            .seed(seed)
            .cores(2.try_into().unwrap())
            .loads(Loads::new().timeout(self.timeout))
            .build()
            .unwrap();
        Process { rt, hs, asleep: Tick::ZERO }
    }

    /// Whether there is more to do; counts one call.
    pub(crate) fn more(&self) -> bool {
        let left = get(&self.left);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left > 0 && !self.stop.load(Ordering::Relaxed)
    }

    /// Lets everybody run until then, one poll of one process at a time.
    pub(crate) fn drive(&self, all: &mut [Process], until: Tick, check: &dyn Fn()) {
        loop {
            let now = self.rt.now();
            let mut moved = self.rt.step();
            for process in all.iter_mut().filter(|p| p.asleep <= now) {
                while process.rt.jump(now) {}
                moved |= process.rt.step();
            }
            check();
            if moved {
                continue;
            }
            let next = now.after(MS).min(until);
            while self.rt.jump(next) {}
            self.rt.clock().set(next);
            if now >= until || self.failed() {
                return;
            }
        }
    }

    /// Runs processes until all calls are made, with crashes and sleeps; then lets what is left of
    /// them come to rest, without faults.
    pub(crate) fn storm(&self, spawn: &dyn Fn() -> Process, check: &dyn Fn()) {
        let mut all: Vec<Process> = (0..PROCESSES).map(|_| spawn()).collect();
        while get(&self.left) > 0 && !self.failed() {
            let until = self.rt.now().after(MS * (5 + self.rt.draw(200)) as u32);
            self.drive(&mut all, until, check);
            let at = self.rt.draw(all.len() as u64) as usize;
            match self.rt.draw(6) {
                0 if self.crashes => {
                    add(&self.deaths, 1);
                    let dead = all.swap_remove(at);
                    dead.rt.shutdown();
                    drop(dead);
                    all.push(spawn());
                }
                1 => {
                    add(&self.sleeps, 1);
                    all[at].asleep = self.rt.now().after(MS * self.rt.draw(1_500) as u32);
                }
                _ => {}
            }
        }
        self.stop.store(true, Ordering::Relaxed);
        self.store.faults().clear();
        all.iter_mut().for_each(|p| p.asleep = Tick::ZERO);
        self.drive(&mut all, self.rt.now().after(Duration::from_secs(4)), check);
        // Whatever still hangs is killed.
        all.drain(..).for_each(|p| p.rt.shutdown());
    }

    /// Runs one task of one new process to its end.
    pub(crate) fn alone<F>(&self, task: impl FnOnce(Heatsink) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let process = self.spawn();
        let done = Arc::new(AtomicBool::new(false));
        let (told, task) = (done.clone(), task(process.hs.clone()));
        process.rt.spawn(async move {
            task.await;
            told.store(true, Ordering::Relaxed);
        });
        let rt = process.rt.clone();
        let mut all = [process];
        for _ in 0..120 {
            self.drive(&mut all, self.rt.now().after(Duration::from_millis(500)), &|| {});
            if done.load(Ordering::Relaxed) || self.failed() {
                break;
            }
        }
        if !done.load(Ordering::Relaxed) {
            self.fail("it does not come to an end".into());
        }
        rt.shutdown();
    }

    /// What went wrong, with the command that shows it again.
    pub(crate) fn verdict(&self, seed: u64, test: &str) -> Result<(), String> {
        self.rt.shutdown();
        match self.failure.lock().unwrap().take() {
            None => Ok(()),
            Some(what) => Err(format!(
                "seed {seed}: {what}\nHEATSINK_SEED={seed} cargo test --release --features testing \
                 --test stock_sim {test}"
            )),
        }
    }
}

/// The seeds to run: one, or so many.
pub(crate) fn seeds(default: u64) -> std::ops::Range<u64> {
    match crate::env("HEATSINK_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..crate::env("HEATSINK_SEEDS").unwrap_or(default),
    }
}
