//! A whole fleet on virtual time: handles, their drivers, the store, the lease, the pushes.

use bytes::Bytes;
use heatsink::feed::{Fleet, Membership, ThroughStore, Transport};
use heatsink::runtime::BoxFuture;
use heatsink::store::{Delivery, MemoryStore, Subscription};
use heatsink::testing::SimRuntime;
use heatsink::{Error, ErrorKind, Heatsink, Key, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

/// What is broken now.
#[derive(Clone, Default)]
struct Faults {
    pub_sub: Arc<AtomicBool>,
    all: Arc<AtomicBool>,
}

/// The way through the store, with what a test breaks of it. One for each process.
struct Way {
    through: ThroughStore<MemoryStore>,
    rt: SimRuntime,
    faults: Faults,
}

struct Deaf(Box<dyn Subscription>, Faults);

impl Subscription for Deaf {
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>> {
        Box::pin(async move {
            loop {
                let delivery = self.0.next().await;
                if !self.1.pub_sub.load(SeqCst) && !self.1.all.load(SeqCst) {
                    return delivery;
                }
            }
        })
    }
}

fn down() -> Error {
    Error::not_applied(ErrorKind::Store, "down")
}

impl Way {
    /// A call to a store that is gone takes its time to fail.
    fn call<'a, T: Send + 'a>(
        &'a self,
        call: BoxFuture<'a, Result<T>>,
    ) -> BoxFuture<'a, Result<T>> {
        Box::pin(async move {
            self.rt.sleep(MS).await;
            if self.faults.all.load(SeqCst) {
                self.rt.sleep(10 * S).await;
                return Err(down());
            }
            call.await
        })
    }
}

impl Transport for Way {
    fn get_many(&self, slots: Vec<Key>) -> BoxFuture<'_, Vec<Result<Option<Bytes>>>> {
        let n = slots.len();
        let call = self.call(Box::pin(async move { Ok(self.through.get_many(slots).await) }));
        Box::pin(async move { call.await.unwrap_or_else(|_| vec![Err(down()); n]) })
    }

    fn put(&self, slot: Key, value: Bytes, ttl: Duration) -> BoxFuture<'_, Result<()>> {
        self.call(self.through.put(slot, value, ttl))
    }

    fn compare_and_set(
        &self,
        slot: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'_, Result<bool>> {
        self.call(self.through.compare_and_set(slot, expected, value, ttl))
    }

    fn publish(&self, channel: Key, message: Bytes) -> BoxFuture<'_, Result<()>> {
        if self.faults.pub_sub.load(SeqCst) {
            return Box::pin(async { Err(down()) });
        }
        self.call(self.through.publish(channel, message))
    }

    fn subscribe(&self, channel: Key) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            if self.faults.pub_sub.load(SeqCst) {
                return Err(down());
            }
            let inner = self.through.subscribe(channel).await?;
            Ok(Box::new(Deaf(inner, self.faults.clone())) as Box<dyn Subscription>)
        })
    }
}

struct Process {
    hs: Heatsink,
    member: Membership,
    /// What this process alone suffers.
    faults: Faults,
}

struct Rig {
    rt: SimRuntime,
    processes: Vec<Process>,
}

fn rig(seed: u64, n: usize) -> Rig {
    let rt = SimRuntime::new(seed);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).seed(seed).build();
    store.put_now("viral", "v").unwrap();
    let process = |i: usize| {
        let (faults, seed) = (Faults::default(), seed + i as u64);
        let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed).build().unwrap();
        let through = ThroughStore::new(store.clone()).unwrap();
        let way = Way { through, rt: rt.clone(), faults: faults.clone() };
        let member = hs.join_fleet(Fleet::by(way).promote_at(80.0)).unwrap();
        Process { hs, member, faults }
    };
    let processes = (0..n).map(process).collect();
    Rig { rt, processes }
}

impl Rig {
    /// Each process reads the key 30 times a second: too rarely for any of them alone.
    fn read(&self) {
        for process in &self.processes {
            let (hs, rt) = (process.hs.clone(), self.rt.clone());
            self.rt.spawn(async move {
                loop {
                    hs.get("viral").await.unwrap();
                    rt.sleep(S / 30).await;
                }
            });
        }
    }

    fn treated(&self) -> Vec<bool> {
        let treats = |p: &Process| p.hs.control().treated().contains(&"viral".into());
        self.processes.iter().map(treats).collect()
    }

    /// Runs until `done`, at most `limit`; how long it took.
    #[track_caller]
    fn until(&self, limit: Duration, what: &str, mut done: impl FnMut() -> bool) -> Duration {
        let from = self.rt.now();
        while !done() {
            let took = self.rt.now().since(from);
            assert!(took < limit, "not within {limit:?}: {what}: {:?}", self.treated());
            self.rt.run_for(10 * MS);
        }
        self.rt.now().since(from)
    }

    fn leader(&self) -> Option<usize> {
        self.processes.iter().position(|p| p.member.stats().leads)
    }

    fn hot(seed: u64, n: usize) -> Rig {
        let rig = rig(seed, n);
        rig.rt.run_for(3 * S);
        assert!(rig.leader().is_some(), "an aggregator after 3 s");
        rig.read();
        let took = rig.until(2 * S, "all treat the key", || rig.treated().iter().all(|t| *t));
        println!("treated by {n} processes after {took:?}");
        rig
    }
}

#[test]
fn a_key_that_is_hot_for_no_process_alone_is_treated_by_all_within_two_seconds() {
    for seed in 0..8 {
        let rig = Rig::hot(100 * seed, 4);
        let told = rig.processes[1].hs.explain("viral").to_string();
        assert!(told.contains("hot for all processes together"), "{told}");
        let list = rig.processes[0].hs.hot_list();
        assert!(list.get("viral").unwrap().fleet_per_sec.unwrap() > 60.0, "{list}");
        let delay = rig.processes[2].member.stats().delay;
        assert!(delay < 2 * S, "{delay:?}");
    }
}

#[test]
fn a_dead_aggregator_is_replaced_within_three_seconds_and_no_treatment_is_lost() {
    for seed in 0..8 {
        let mut rig = Rig::hot(7 + 100 * seed, 4);
        let dead = rig.leader().unwrap();
        // No good-bye: what it held is still in the store.
        drop(rig.processes.remove(dead));
        let took = rig.until(3 * S, "another leads", || {
            assert_eq!(rig.treated(), [true; 3], "no treatment is lost");
            rig.leader().is_some()
        });
        println!("taken over after {took:?}");
        rig.until(10 * S, "forever", || {
            assert_eq!(rig.treated(), [true; 3], "no treatment is lost");
            rig.rt.now().since(heatsink::engine::time::Tick::ZERO) > 3_612 * S
        });
    }
}

#[test]
fn without_publish_and_subscribe_reports_and_the_list_go_by_the_store() {
    let rig = Rig::hot(3, 4);
    rig.processes.iter().for_each(|p| p.faults.pub_sub.store(true, SeqCst));
    for _ in 0..2_000 {
        rig.rt.run_for(10 * MS);
        assert_eq!(rig.treated(), [true; 4]);
    }
    let merged = |rig: &Rig| {
        let leader = &rig.processes[rig.leader().unwrap()].member;
        (leader.stats().reporters, leader.stats().reports.merged)
    };
    let (reporters, before) = merged(&rig);
    rig.rt.run_for(5 * S);
    assert!(reporters == 4 && merged(&rig).1 > before + 20, "{reporters} {before}");
    rig.processes.iter().for_each(|p| p.faults.pub_sub.store(false, SeqCst));
    rig.rt.run_for(5 * S);
    assert_eq!(rig.treated(), [true; 4]);
}

#[test]
fn where_nobody_can_lead_the_list_runs_out_and_each_process_goes_by_itself() {
    let rig = Rig::hot(5, 4);
    rig.processes.iter().for_each(|p| p.faults.all.store(true, SeqCst));
    let took = rig.until(8 * S, "the list has run out", || !rig.treated().contains(&true));
    assert!(took > 3 * S, "not before its time: {took:?}");
    assert_eq!(rig.processes[0].member.stats().lists.expired, 1);
    rig.processes.iter().for_each(|p| p.faults.all.store(false, SeqCst));
    rig.until(20 * S, "all treat it again", || rig.treated().iter().all(|t| *t));
}

#[test]
fn an_aggregator_that_was_away_puts_no_old_list_back() {
    let rig = Rig::hot(11, 4);
    let away = rig.leader().unwrap();
    rig.processes[away].faults.all.store(true, SeqCst);
    rig.until(6 * S, "another leads", || {
        rig.processes.iter().enumerate().any(|(i, p)| i != away && p.member.stats().leads)
    });
    let term = |i: usize| rig.processes[i].member.list().map(|l| l.edition.incarnation);
    let other = (away + 1) % 4;
    rig.until(3 * S, "its list is in force", || term(other) > term(away) || term(away).is_none());
    let new = term(other).unwrap();
    rig.processes[away].faults.all.store(false, SeqCst);
    for _ in 0..500 {
        rig.rt.run_for(10 * MS);
        assert!(term(other).unwrap() >= new, "editions only rise");
    }
    assert_eq!(rig.processes.iter().filter(|p| p.member.stats().leads).count(), 1);
    assert_eq!(term(away), term(other));
    assert_eq!(rig.treated(), [true; 4]);
}

#[test]
fn an_idle_member_and_an_idle_aggregator_send_and_hear_less_than_a_kibibyte_a_second() {
    idle(4);
    idle(48);
}

fn idle(processes: usize) {
    let rig = rig(13, processes);
    rig.rt.run_for(60 * S);
    let bytes = |p: &Process| p.member.stats().bytes_in + p.member.stats().bytes_out;
    let before: Vec<u64> = rig.processes.iter().map(bytes).collect();
    rig.rt.run_for(20 * S);
    let mut most = [0, 0];
    for (p, before) in rig.processes.iter().zip(before) {
        let at = &mut most[usize::from(p.member.stats().leads)];
        *at = (*at).max((bytes(p) - before) / 20);
    }
    println!("{processes} processes: member {} bytes/s, aggregator {} bytes/s", most[0], most[1]);
    assert!(most[1] > 0 && most.iter().all(|per_sec| *per_sec < 1_024), "{most:?}");
}

#[test]
fn a_fleet_replays_from_its_seed() {
    let hash = |seed| {
        let rig = Rig::hot(seed, 4);
        rig.rt.trace_hash()
    };
    assert_eq!(hash(17), hash(17));
    assert_ne!(hash(17), hash(18));
}
