//! A whole fleet on virtual time: handles, their drivers, the store, the lease, the pushes.

use bytes::Bytes;
use heatsink::feed::{Fleet, Membership, Order, ThroughStore, Transport};
use heatsink::runtime::BoxFuture;
use heatsink::store::{Delivery, MemoryStore, Store, Subscription};
use heatsink::testing::SimRuntime;
use heatsink::{Error, ErrorKind, Heatsink, Key, Result, Salt, Treatment};
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
    /// Nothing can be written, and the lease cannot be read.
    writes: Arc<AtomicBool>,
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
        if n == 1 && self.faults.writes.load(SeqCst) {
            return Box::pin(async { vec![Err(down())] });
        }
        let call = self.call(Box::pin(async move { Ok(self.through.get_many(slots).await) }));
        Box::pin(async move { call.await.unwrap_or_else(|_| vec![Err(down()); n]) })
    }

    fn put(&self, slot: Key, value: Bytes, ttl: Duration) -> BoxFuture<'_, Result<()>> {
        if self.faults.writes.load(SeqCst) {
            return Box::pin(async { Err(down()) });
        }
        self.call(self.through.put(slot, value, ttl))
    }

    fn compare_and_set(
        &self,
        slot: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'_, Result<bool>> {
        if self.faults.writes.load(SeqCst) {
            return Box::pin(async { Err(down()) });
        }
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
    store: MemoryStore,
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
    Rig { rt, store, processes }
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
    // The member itself may wait for calls that fail; the driver does not.
    rig.until(5 * S, "it is counted", || rig.processes[0].member.stats().lists.expired == 1);
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
fn what_an_operator_orders_in_one_process_every_process_of_the_fleet_obeys_until_it_ends() {
    let mut rig = rig(19, 4);
    rig.rt.run_for(3 * S);
    let order = |rig: &Rig, key: &str, order: Order| {
        rig.rt.block_on(rig.processes[0].member.order(key, order)).unwrap()
    };
    let all = |rig: &Rig, key: &str| {
        let treats = |p: &Process| p.hs.control().treated().contains(&key.into());
        rig.processes.iter().map(treats).collect::<Vec<_>>()
    };
    order(&rig, "launch", Order::pin().lasts(60 * S));
    order(&rig, "show", Order::pin());
    let from = rig.rt.now();
    let took = rig.until(2 * S, "all treat it", || !all(&rig, "launch").contains(&false));
    println!("an order is obeyed by all after {took:?}");
    let told = rig.processes[3].hs.explain("launch").to_string();
    assert!(told.contains("pinned by an operator"), "{told}");
    // A denial outranks it, and is taken back.
    order(&rig, "launch", Order::deny());
    rig.until(2 * S, "nobody treats it", || !all(&rig, "launch").contains(&true));
    assert!(order(&rig, "launch", Order::allow()) && !order(&rig, "launch", Order::allow()));
    rig.until(2 * S, "all treat it", || !all(&rig, "launch").contains(&false));
    // It outlives the aggregator.
    let dead = rig.leader().unwrap();
    let dead = rig.processes.remove(dead);
    drop(dead);
    while rig.rt.now().since(from) < 58 * S {
        rig.rt.run_for(100 * MS);
        assert_eq!(all(&rig, "launch"), [true; 3]);
    }
    rig.until(6 * S, "its time is over", || !all(&rig, "launch").contains(&true));
    assert_eq!(all(&rig, "show"), [true; 3], "this one lasts for a day");
    assert!(order(&rig, "show", Order::unpin()));
    rig.until(2 * S, "taken back", || !all(&rig, "show").contains(&true));
    let long = "x".repeat(2_000);
    let refused = rig.rt.block_on(rig.processes[0].member.order(&long, Order::pin()));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Limit);
}

#[test]
fn slots_and_ages_that_an_operator_orders_are_obeyed_where_they_are_switched_on() {
    let rt = SimRuntime::new(23);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).seed(23).build();
    store.put_now("page", "v").unwrap();
    let process = |salt: Option<Salt>, seed: u64| {
        let builder = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed);
        let builder = salt.into_iter().fold(builder, heatsink::Builder::salt);
        let hs = builder.build().unwrap();
        let member = hs.join_fleet(Fleet::over(store.clone()).unwrap()).unwrap();
        (hs, member)
    };
    let salted = || Some(Salt::new().lease(2 * S));
    let all = [process(salted(), 1), process(salted(), 2), process(None, 3)];
    rt.run_for(3 * S);
    let slots = |i: usize| {
        let (hs, _): &(Heatsink, Membership) = &all[i];
        hs.explain("likes").salting.map_or(1, |s| s.slots)
    };
    let order = |key, order| rt.block_on(all[0].1.order(key, order)).unwrap();
    for (hs, _) in &all[..2] {
        rt.block_on(hs.counter("likes").add(1)).unwrap();
    }
    order("likes", Order::set(Treatment::Salt { slots: 8 }));
    order("page", Order::set(Treatment::near()).ttl(200 * MS));
    order("copied", Order::set(Treatment::Copies { copies: 3 }));
    rt.run_for(30 * S);
    assert_eq!([slots(0), slots(1)], [8, 8]);
    assert!(all[2].0.explain("likes").salting.is_none(), "nobody asked for it there");
    let unobeyed: Vec<u64> = all.iter().map(|(_, m)| m.stats().unobeyed).collect();
    assert_eq!(unobeyed, [1, 1, 2], "copies nowhere; slots not in the last");
    // A value of the key is served for 200 ms, not for the second and the stale time beside it.
    let (hs, _) = &all[1];
    let mut oldest = Duration::ZERO;
    for _ in 0..300 {
        let value = rt.block_on(hs.get("page")).unwrap().unwrap();
        oldest = oldest.max(value.age());
        rt.run_for(10 * MS);
    }
    assert!(oldest > 100 * MS && oldest <= 200 * MS, "{oldest:?}");
    order("likes", Order::unpin());
    order("page", Order::set(Treatment::near()));
    rt.run_for(40 * S);
    assert_eq!([slots(0), slots(1)], [1, 1]);
    for _ in 0..300 {
        let value = rt.block_on(hs.get("page")).unwrap().unwrap();
        oldest = oldest.max(value.age());
        rt.run_for(10 * MS);
    }
    assert!(oldest > 500 * MS, "its own limit again: {oldest:?}");
    assert_eq!(rt.block_on(hs.counter("likes").sum_with(Duration::ZERO)).unwrap().total(), 2);
}

/// One process is a whole fleet here.
fn alone(seed: u64, build: impl FnOnce(heatsink::Builder) -> heatsink::Builder) -> Rig {
    let rt = SimRuntime::new(seed);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).seed(seed).build();
    store.put_now("viral", "v").unwrap();
    let faults = Faults::default();
    let builder = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed);
    let hs = build(builder).build().unwrap();
    let through = ThroughStore::new(store.clone()).unwrap();
    let way = Way { through, rt: rt.clone(), faults: faults.clone() };
    let member = hs.join_fleet(Fleet::by(way)).unwrap();
    rt.run_for(3 * S);
    Rig { rt, store, processes: vec![Process { hs, member, faults }] }
}

impl Process {
    fn slots(&self, key: &str) -> u32 {
        self.hs.explain(key).salting.map_or(1, |s| u32::from(s.slots))
    }

    fn is_pinned(&self, key: &str) -> bool {
        self.hs.explain(key).salting.is_some_and(|s| s.to_string().contains("pinned"))
    }
}

#[test]
fn slots_from_the_list_leave_what_this_processes_own_operator_has_said_alone() {
    let rig = alone(41, |b| b.salt(Salt::new().lease(2 * S)));
    let process = &rig.processes[0];
    let (hs, salt) = (&process.hs, |slots| Treatment::Salt { slots });
    let order = |key, order| rig.rt.block_on(process.member.order(key, order)).unwrap();
    for key in ["denied", "before", "after", "later", "free"] {
        rig.rt.block_on(hs.counter(key).add(1)).unwrap();
    }
    hs.control().deny("denied").unwrap();
    hs.control().pin("before", salt(4)).unwrap();
    for key in ["denied", "before", "after", "later", "free"] {
        order(key, Order::set(salt(8)));
    }
    rig.rt.run_for(20 * S);
    let slots = || ["denied", "before", "after", "later", "free"].map(|key| process.slots(key));
    assert_eq!(slots(), [1, 4, 8, 8, 8]);
    hs.control().pin("after", salt(4)).unwrap();
    hs.control().deny("later").unwrap();
    rig.rt.run_for(40 * S);
    assert_eq!(slots(), [1, 4, 4, 1, 8]);
    // The list runs out: nothing is moved, and nothing asked for any more.
    process.faults.all.store(true, SeqCst);
    rig.rt.run_for(20 * S);
    assert!(process.member.list().is_none());
    assert_eq!(slots()[4], 8);
    assert!(!process.is_pinned("free") && process.is_pinned("before"));
    process.faults.all.store(false, SeqCst);
    rig.until(20 * S, "it is pinned again", || process.is_pinned("free"));
    for key in ["denied", "before", "after", "later", "free"] {
        order(key, Order::unpin());
    }
    rig.rt.run_for(40 * S);
    assert_eq!(slots(), [1, 4, 4, 1, 1], "only the list's own is taken back");
}

#[test]
fn a_process_that_only_observes_salts_nothing_by_a_list() {
    let rig = alone(43, |b| {
        b.salt(Salt::new().lease(2 * S)).detect(heatsink::Detect::new().observe_only())
    });
    let process = &rig.processes[0];
    rig.rt.block_on(process.hs.counter("likes").add(1)).unwrap();
    let order = Order::set(Treatment::Salt { slots: 8 });
    rig.rt.block_on(process.member.order("likes", order)).unwrap();
    rig.rt.run_for(20 * S);
    assert!(process.member.list().unwrap().get("likes").is_some());
    assert_eq!((process.slots("likes"), process.is_pinned("likes")), (1, false));
}

#[test]
fn a_key_that_an_operator_sets_to_something_else_is_not_kept_near_where_it_was_found() {
    let rig = alone(47, |b| b);
    let hs = &rig.processes[0].hs;
    let (reader, rt) = (hs.clone(), rig.rt.clone());
    rig.rt.spawn(async move {
        loop {
            reader.get("viral").await.unwrap();
            rt.sleep(S / 200).await;
        }
    });
    rig.until(5 * S, "found here", || rig.treated()[0]);
    let order = |order| rig.rt.block_on(rig.processes[0].member.order("viral", order)).unwrap();
    order(Order::set(Treatment::Shed));
    rig.until(3 * S, "not kept near any more", || !rig.treated()[0]);
    rig.rt.run_for(10 * S);
    assert!(!rig.treated()[0]);
    hs.control().pin("viral", Treatment::near()).unwrap();
    assert!(rig.treated()[0], "what its own operator says goes first");
    hs.control().unpin("viral");
    order(Order::unpin());
    rig.until(3 * S, "found here", || rig.treated()[0]);
}

#[test]
fn a_member_whose_runtime_stands_still_or_is_gone_leaves_nothing_in_force() {
    use crate::sockets::{LONG, until};
    let store = MemoryStore::new(1);
    for gone in [false, true] {
        let hs = Heatsink::new(store.clone()).unwrap();
        let treats = || hs.control().treated().contains(&"launch".into());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let prefix = format!("hs:feed:{gone}:");
        let member = runtime.block_on(async {
            let fleet = Fleet::over(store.clone()).unwrap().prefix(prefix).ttl(3 * S);
            let member = hs.join_fleet(fleet).unwrap();
            member.order("launch", Order::pin()).await.unwrap();
            tokio::time::timeout(LONG, async {
                while !treats() {
                    tokio::time::sleep(10 * MS).await;
                }
            })
            .await
            .unwrap();
            member
        });
        if gone {
            drop(runtime);
            assert!(!treats() && member.list().is_none());
            continue;
        }
        until(LONG, "its list has run out", || !treats());
    }
}

#[test]
fn a_change_that_meets_a_failed_renewal_is_told_as_soon_as_the_store_answers() {
    for seed in [53, 59, 61] {
        let rig = rig(seed, 3);
        rig.rt.run_for(3 * S);
        let leader = rig.leader().unwrap();
        let faults = &rig.processes[leader].faults;
        faults.writes.store(true, SeqCst);
        let other = &rig.processes[(leader + 1) % 3].member;
        rig.rt.block_on(other.order("launch", Order::pin())).unwrap();
        rig.rt.run_for(700 * MS);
        faults.writes.store(false, SeqCst);
        let treats = |p: &Process| p.hs.control().treated().contains(&"launch".into());
        rig.until(2 * S, "all treat it", || rig.processes.iter().all(treats));
        assert_eq!(rig.leader(), Some(leader));
    }
}

#[test]
fn other_orders_with_the_number_of_the_last_ones_are_obeyed() {
    let rig = alone(67, |b| b);
    let process = &rig.processes[0];
    let treated = || process.hs.control().treated();
    rig.rt.block_on(process.member.order("first", Order::pin())).unwrap();
    rig.until(2 * S, "the order is obeyed", || treated() == ["first".into()]);
    // A store that fails over lost it, and another one took its number.
    let slot = Key::from("hs:feed:orders");
    rig.rt.block_on(async {
        let stored = rig.store.get(&slot).await.unwrap().unwrap();
        let text = String::from_utf8(stored.bytes.to_vec()).unwrap().replace("first", "other");
        rig.store.put(&slot, Bytes::from(text), None).await.unwrap();
    });
    rig.until(4 * S, "the other one is", || treated() == ["other".into()]);
}

#[test]
fn a_fleet_within_itself_is_refused() {
    let store = MemoryStore::new(1);
    let hs = Heatsink::new(store.clone()).unwrap();
    let fleet = |prefix: &str| Fleet::over(store.clone()).unwrap().prefix(prefix);
    let chain = fleet("a:").within("x", fleet("b:").within("y", fleet("a:")));
    for circle in [fleet("a:").within("x", fleet("a:")), chain] {
        let refused = hs.join_fleet(circle).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Config);
        assert!(refused.to_string().contains("prefix"), "{refused}");
    }
}

#[test]
fn a_region_that_only_watches_the_fleet_above_neither_obeys_nor_reports() {
    let rt = SimRuntime::new(71);
    let store = || MemoryStore::builder().shards(1).runtime(rt.clone()).build();
    let (regional, global) = (store(), store());
    let process = |store: &MemoryStore, seed| {
        Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed).build().unwrap()
    };
    let (inside, outside) = (process(&regional, 1), process(&global, 2));
    let all = || Fleet::over(global.clone()).unwrap().prefix("hs:feed:all:");
    let watches = all().never_lead().watch_only().report_nothing();
    let region = Fleet::over(regional.clone()).unwrap().within("europe", watches);
    let _region = inside.join_fleet(region).unwrap();
    let above = outside.join_fleet(all()).unwrap();
    rt.run_for(6 * S);
    rt.block_on(above.order("launch", Order::pin())).unwrap();
    rt.run_for(6 * S);
    assert_eq!(outside.control().treated(), ["launch".into()]);
    assert!(inside.control().treated().is_empty());
    assert_eq!(above.stats().reporters, 1);
}

/// Two regions with a store each, and a third store for the list of both.
struct Regions {
    rt: SimRuntime,
    /// Which region, and what its processes can no longer reach above.
    processes: Vec<(usize, Heatsink, Membership)>,
    above: Faults,
}

impl Regions {
    fn new(seed: u64) -> Regions {
        let rt = SimRuntime::new(seed);
        let store = || MemoryStore::builder().shards(2).runtime(rt.clone()).seed(seed).build();
        let (stores, global, above) = ([store(), store()], store(), Faults::default());
        let process = |i: usize| {
            let (region, seed) = (i % 2, seed + i as u64);
            let own = stores[region].clone();
            own.put_now("viral", "v").unwrap();
            let builder = Heatsink::builder(own.clone()).runtime(rt.clone()).seed(seed);
            let hs = builder.build().unwrap();
            let through = ThroughStore::new(global.clone()).unwrap();
            let all = Fleet::by(Way { through, rt: rt.clone(), faults: above.clone() });
            let all = all.prefix("hs:feed:all:").promote_at(100.0);
            let fleet = Fleet::over(own).unwrap().promote_at(200.0);
            let fleet = fleet.within(if region == 0 { "europe" } else { "asia" }, all);
            (region, hs.clone(), hs.join_fleet(fleet).unwrap())
        };
        let processes = (0..6).map(process).collect();
        Regions { rt, processes, above }
    }

    fn treated(&self) -> usize {
        let treats = |hs: &Heatsink| hs.control().treated().contains(&"viral".into());
        self.processes.iter().filter(|(_, hs, _)| treats(hs)).count()
    }

    #[track_caller]
    fn until(&self, limit: Duration, what: &str, done: impl Fn() -> bool) -> Duration {
        let from = self.rt.now();
        while !done() {
            assert!(self.rt.now().since(from) < limit, "not within {limit:?}: {what}");
            self.rt.run_for(10 * MS);
        }
        self.rt.now().since(from)
    }
}

#[test]
fn a_key_that_is_hot_in_no_region_alone_is_treated_in_all_by_the_list_above_them() {
    for seed in [29, 31, 37] {
        let mut regions = Regions::new(seed);
        regions.rt.run_for(6 * S);
        let leaders = |r: &Regions| -> Vec<usize> {
            let leads = r.processes.iter().filter(|(_, _, m)| m.stats().leads);
            leads.map(|(region, _, _)| *region).collect()
        };
        let mut both = leaders(&regions);
        both.sort_unstable();
        assert_eq!(both, [0, 1], "one aggregator in each region");
        for (_, hs, _) in &regions.processes {
            let (hs, rt) = (hs.clone(), regions.rt.clone());
            regions.rt.spawn(async move {
                loop {
                    hs.get("viral").await.unwrap();
                    rt.sleep(S / 30).await;
                }
            });
        }
        // 90 a second in each region, of 200; 180 in both, of 100. Later 150, and so still hot.
        let took = regions.until(4 * S, "all treat it", || regions.treated() == 6);
        println!("treated in both regions after {took:?}");
        let told = regions.processes[0].2.list().unwrap().get("viral").unwrap().to_string();
        assert!(told.contains("from 2 reporters"), "one for each region: {told}");
        // The aggregator of one region dies; its successor reports in its place, not beside it.
        let dead = regions.processes.iter().position(|(_, _, m)| m.stats().leads).unwrap();
        let dead = regions.processes.remove(dead);
        let region = dead.0;
        drop(dead);
        let from = regions.rt.now();
        while regions.rt.now().since(from) < 12 * S {
            regions.rt.run_for(50 * MS);
            assert_eq!(regions.treated(), 5, "no treatment is lost");
        }
        assert!(leaders(&regions).contains(&region), "another leads the region");
        let told = regions.processes[0].2.list().unwrap().get("viral").unwrap().to_string();
        assert!(told.contains("from 2 reporters"), "{told}");
        // Without the store above, each region goes by what it has itself.
        regions.above.all.store(true, SeqCst);
        regions.until(30 * S, "the list from above has run out", || regions.treated() == 0);
        assert_eq!(leaders(&regions).len(), 2, "the regions lead themselves");
        regions.above.all.store(false, SeqCst);
        regions.until(40 * S, "all treat it again", || regions.treated() == 5);
    }
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
