//! What salted counters promise, one test per promise.

use super::MS;
use heatsink::engine::time::Tick;
use heatsink::store::memory::Placement;
use heatsink::store::{Capability, MemoryStore, Store};
use heatsink::testing::SimRuntime;
use heatsink::{
    Builder, Ceiling, Counted, Detect, ErrorKind, Heatsink, Key, Loads, Redelivery, Result, Salt,
    Schedule, Treatment,
};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SEC: Duration = Duration::from_secs(1);

struct Rig {
    rt: SimRuntime,
    store: MemoryStore,
    hs: Heatsink,
}

impl Rig {
    fn new(salt: Salt) -> Rig {
        let rt = SimRuntime::new(7);
        let store = MemoryStore::builder().shards(8).runtime(rt.clone()).build();
        let hs = build(Heatsink::builder(store.clone()).salt(salt), &rt, 7);
        Rig { rt, store, hs }
    }

    fn number(&self, key: &str) -> i64 {
        let stored = self.store.get_now(key);
        stored.map_or(0, |s| std::str::from_utf8(&s.bytes).unwrap().parse().unwrap())
    }

    fn sum(&self, key: &str) -> i64 {
        let counter = self.hs.counter(key);
        self.rt.block_on(counter.sum_with(Duration::ZERO)).unwrap().total()
    }

    /// Runs until the counter is written to so many slots, and nothing else is read.
    fn settle(&self, key: &str, slots: u16) {
        for _ in 0..2000 {
            self.rt.run_for(10 * MS);
            let now = self.hs.explain(key).salting;
            let (at, others) = now.map_or((1, 0), |s| (s.slots, s.in_rotation));
            if (at, others) == (slots, 0) {
                return;
            }
        }
        panic!("{}", self.hs.explain(key));
    }

    fn salt(&self, key: &str, slots: u16) {
        self.hs.control().pin(key, Treatment::Salt { slots: slots.into() }).unwrap();
        self.settle(key, slots);
    }
}

fn build(builder: Builder, rt: &SimRuntime, seed: u64) -> Heatsink {
    builder.runtime(rt.clone()).seed(seed).cores(2.try_into().unwrap()).build().unwrap()
}

#[test]
fn a_service_that_salts_nothing_writes_nothing_and_reads_one_small_value_per_third_of_a_lease() {
    let rig = Rig::new(Salt::new().lease(3 * SEC));
    let counter = rig.hs.counter("k");
    for _ in 0..60 {
        rig.rt.block_on(counter.add(1)).unwrap();
        rig.rt.block_on(counter.sum_with(Duration::ZERO)).unwrap();
        rig.rt.run_for(SEC);
    }
    let keys: Vec<Key> = rig.store.snapshot().into_keys().collect();
    assert_eq!(keys, [Key::from("k")]);
    assert_eq!((rig.store.writes_of("k"), rig.store.reads_of("k")), (60, 60));
    let all: u64 = rig.store.counts().iter().map(|c| c.offered).sum();
    let root = rig.store.reads_of("{hs:registry}root");
    assert!((50..=62).contains(&root), "{root} reads of the root");
    // What a missing root means is asked once.
    assert!(all - root - 120 <= 1, "{all} operations");
}

#[test]
fn a_service_that_did_not_switch_it_on_pays_nothing() {
    let rt = SimRuntime::new(7);
    let store = MemoryStore::builder().shards(8).runtime(rt.clone()).build();
    let hs = build(Heatsink::builder(store.clone()), &rt, 7);
    for _ in 0..20 {
        rt.block_on(hs.counter("k").add(1)).unwrap();
        rt.block_on(hs.counter("k").sum_with(Duration::ZERO)).unwrap();
        rt.run_for(SEC);
    }
    let all: u64 = store.counts().iter().map(|c| c.offered).sum();
    assert_eq!(all, 40);
    let refused = hs.control().pin("k", Treatment::Salt { slots: 8 }).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
}

#[test]
fn a_counter_grows_shrinks_and_folds_and_keeps_its_sum() {
    let rig = Rig::new(Salt::new().grave(5 * SEC));
    let counter = rig.hs.counter("likes");
    let mut want = 0;
    for slots in [8u16, 32, 4, 2] {
        for n in 0..100 {
            rig.rt.block_on(counter.add(n)).unwrap();
            want += n;
        }
        rig.salt("likes", slots);
        assert_eq!(rig.sum("likes"), want);
    }
    rig.hs.control().unpin("likes");
    rig.settle("likes", 1);
    rig.rt.block_on(counter.add(5)).unwrap();
    assert_eq!(rig.sum("likes"), want + 5);
    rig.rt.run_for(20 * SEC);
    let left: Vec<String> = rig.store.snapshot().keys().map(Key::to_string).collect();
    assert!(!left.iter().any(|name| name.contains("slot.")), "{left:?}");
    assert_eq!(rig.hs.salt_stats().lost, 0);
}

#[test]
fn what_is_retired_goes_back_to_the_bare_key_and_leaves_the_registry() {
    let rig = Rig::new(Salt::new().grave(5 * SEC).listed_max(1));
    rig.store.put_now("likes", "41").unwrap();
    let counter = rig.hs.counter("likes");
    rig.salt("likes", 8);
    for _ in 0..100 {
        rig.rt.block_on(counter.add(1)).unwrap();
    }
    rig.hs.control().unpin("likes");
    rig.settle("likes", 1);
    // On its way the sum is the same at every moment, and whoever adds to the bare key is counted.
    for n in 0..300 {
        rig.rt.run_for(100 * MS);
        if n % 50 == 0 {
            rig.rt.block_on(rig.store.add(&Key::from("likes"), 1)).unwrap();
        }
        assert_eq!(rig.sum("likes"), 142 + n / 50, "after {n} looks");
    }
    assert_eq!(rig.hs.salt_stats().folded, 1);
    assert_eq!(rig.number("likes"), 147, "a program without heatsink reads all of it");
    assert_eq!(rig.hs.explain("likes").salting, None);
    assert!(rig.rt.block_on(rig.hs.get("likes")).is_ok(), "a plain key again");
    // There is room for another key, and for this one again.
    rig.salt("other", 4);
    rig.hs.control().unpin("other");
    rig.settle("other", 1);
    rig.rt.run_for(30 * SEC);
    rig.salt("likes", 4);
    rig.rt.block_on(counter.add(3)).unwrap();
    assert_eq!(rig.sum("likes"), 150);
}

#[test]
fn a_store_that_cannot_fold_keeps_the_record_and_the_sum() {
    let rt = SimRuntime::new(7);
    let mut can = Capability::all();
    can.fold = false;
    let store = MemoryStore::builder().capability(can).runtime(rt.clone()).build();
    let salt = Salt::new().grave(5 * SEC);
    let hs = build(Heatsink::builder(store.clone()).salt(salt), &rt, 7);
    let rig = Rig { rt, store, hs };
    rig.salt("likes", 4);
    for _ in 0..40 {
        rig.rt.block_on(rig.hs.counter("likes").add(1)).unwrap();
    }
    rig.hs.control().unpin("likes");
    rig.settle("likes", 1);
    rig.rt.run_for(60 * SEC);
    assert_eq!((rig.sum("likes"), rig.number("likes")), (40, 0));
}

#[test]
fn a_shard_that_does_not_answer_leaves_a_sum_that_says_so() {
    let rig = Rig::new(Salt::new());
    rig.salt("likes", 8);
    let (counter, grows) = (rig.hs.counter("likes"), rig.hs.grow_only("likes"));
    for _ in 0..80 {
        rig.rt.block_on(counter.add(1)).unwrap();
    }
    assert_eq!(rig.sum("likes"), 80);
    let registry = [b"{hs:registry}root".as_slice(), b"{hs:registry}list"];
    let record = heatsink::record_name(&Key::from("likes"));
    let needed: Vec<usize> = registry.iter().map(|name| rig.store.place(name)).collect();
    let sick = (0..8).find(|s| !needed.contains(s) && rig.store.place(&record) != *s).unwrap();
    rig.store.set_down(sick, true);
    let mut given = 80;
    for _ in 0..40 {
        // Those to the slot that is down say that they were not applied.
        given += i64::from(rig.rt.block_on(counter.add(1)).is_ok());
    }
    let sum =
        |counter: &heatsink::Counter| rig.rt.block_on(counter.sum_with(Duration::ZERO)).unwrap();
    let seen = sum(&counter);
    // One slot a shard, and the bare key on one of them.
    assert!((1..=2).contains(&seen.behind()) && given > 80, "{seen:?}, {given} given");
    assert_eq!(seen.total(), given, "what a slot that is down held is known");
    let grown = rig.rt.block_on(grows.sum_with(Duration::ZERO)).unwrap();
    assert_eq!((grown.total(), grown.lost()), (given, 0));
    rig.store.set_down(sick, false);
    assert_eq!((sum(&counter).total(), sum(&counter).behind()), (given, 0));
    assert_eq!(rig.hs.add_stats().sums_regressed, 0);
}

#[test]
fn a_schedule_salts_before_the_push_and_folds_after_it() {
    let rig = Rig::new(Salt::new());
    let push = Schedule::keys(["likes"]).salted(16).starts_in(60 * SEC).lasts(600 * SEC);
    let id = rig.hs.control().schedule(push).unwrap();
    rig.rt.run_for(59 * SEC);
    assert_eq!(rig.hs.explain("likes").salting, None);
    rig.rt.run_for(10 * SEC);
    assert_eq!(rig.hs.explain("likes").salting.unwrap().slots, 16);
    rig.rt.block_on(rig.hs.counter("likes").add(3)).unwrap();
    rig.rt.run_for(600 * SEC);
    rig.settle("likes", 1);
    assert_eq!(rig.sum("likes"), 3);
    assert!(!rig.hs.control().cancel(id), "it is over");
}

#[test]
fn a_program_without_heatsink_is_counted_at_once() {
    let rig = Rig::new(Salt::new());
    rig.store.put_now("likes", "41").unwrap();
    rig.salt("likes", 8);
    rig.rt.block_on(rig.hs.counter("likes").add(1)).unwrap();
    assert_eq!(rig.sum("likes"), 42);
    rig.rt.block_on(rig.store.add(&Key::from("likes"), 100)).unwrap();
    assert_eq!(rig.sum("likes"), 142);
    assert_eq!(rig.number("likes"), 141, "the bare key is never moved or deleted");
}

#[test]
fn raw_calls_on_a_salted_key_name_the_right_one() {
    let rig = Rig::new(Salt::new());
    rig.salt("likes", 8);
    let text = |error: heatsink::Error| {
        assert_eq!(error.kind(), ErrorKind::WrongType);
        error.to_string()
    };
    let get = text(rig.rt.block_on(rig.hs.get("likes")).unwrap_err());
    assert!(get.contains("counter(key).sum()"), "{get}");
    let many = rig.rt.block_on(rig.hs.get_many(["likes", "other"]));
    assert!(many[0].is_err() && many[1].is_ok());
    let delete = text(rig.rt.block_on(rig.hs.delete("likes")).unwrap_err());
    assert!(delete.contains("counter(key).delete()"), "{delete}");
    text(rig.rt.block_on(rig.hs.put("likes", "7")).unwrap_err());
    assert!(rig.rt.block_on(rig.hs.put("other", "7")).is_ok());
}

#[test]
fn an_event_counts_once_before_and_after_a_rotation() {
    let rig = Rig::new(Salt::new());
    let counter = rig.hs.counter("likes");
    let event = |id: &str| rig.rt.block_on(counter.add_event(id, 1)).unwrap();
    assert_eq!(event("like:1"), Counted::Now);
    rig.salt("likes", 8);
    assert_eq!((event("like:1"), event("like:2")), (Counted::Before, Counted::Now));
    rig.salt("likes", 4);
    assert_eq!((event("like:2"), event("like:3")), (Counted::Before, Counted::Now));
    rig.hs.control().unpin("likes");
    rig.settle("likes", 1);
    let again = ["like:1", "like:2", "like:3", "like:4"].map(event);
    assert_eq!(again, [Counted::Before, Counted::Before, Counted::Before, Counted::Now]);
    assert_eq!(rig.sum("likes"), 4);
}

#[test]
fn without_add_once_the_caller_chooses_what_a_second_delivery_does() {
    let rt = SimRuntime::new(7);
    let mut can = Capability::all();
    can.add_once = false;
    let store = MemoryStore::builder().capability(can).runtime(rt.clone()).build();
    let hs = build(Heatsink::builder(store), &rt, 7);
    let counter = hs.counter("k");
    let refused = rt.block_on(counter.add_event("e", 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    for way in [Redelivery::SentOnce, Redelivery::SentUntilStored] {
        assert_eq!(rt.block_on(counter.add_event_with("e", 1, way)).unwrap(), Counted::Now);
    }
    assert_eq!(rt.block_on(counter.sum_with(Duration::ZERO)).unwrap().total(), 2);
}

#[test]
fn a_reset_takes_off_what_was_counted_and_a_delete_lets_the_slots_go() {
    let rig = Rig::new(Salt::new().grave(5 * SEC));
    let counter = rig.hs.counter("likes");
    rig.rt.block_on(counter.add(7)).unwrap();
    rig.rt.block_on(counter.reset()).unwrap();
    assert_eq!(rig.sum("likes"), 0);
    rig.rt.block_on(counter.add(5)).unwrap();
    rig.salt("likes", 8);
    rig.rt.block_on(counter.add(6)).unwrap();
    rig.rt.block_on(counter.reset()).unwrap();
    rig.rt.block_on(counter.add(3)).unwrap();
    assert_eq!(rig.sum("likes"), 3);
    rig.hs.control().unpin("likes");
    rig.rt.block_on(counter.delete()).unwrap();
    assert_eq!(rig.sum("likes"), 0);
    rig.settle("likes", 1);
    assert_eq!(rig.sum("likes"), 0);
}

#[test]
fn a_full_registry_and_a_counter_that_expires_soon_are_refused_and_said() {
    let rig = Rig::new(Salt::new().listed_max(1));
    rig.salt("a", 4);
    rig.hs.control().pin("b", Treatment::Salt { slots: 4 }).unwrap();
    rig.rt.run_for(10 * SEC);
    assert_eq!(rig.hs.salt_stats().refused, 1);
    assert_eq!(rig.hs.explain("b").salting, None);
    rig.rt.block_on(rig.hs.counter("b").add(1)).unwrap();
    assert_eq!(rig.number("b"), 1);

    let rig = Rig::new(Salt::new());
    rig.rt.block_on(rig.store.put(&Key::from("c"), "9".into(), Some(4 * SEC))).unwrap();
    rig.hs.control().pin("c", Treatment::Salt { slots: 4 }).unwrap();
    rig.rt.run_for(3 * SEC);
    assert_eq!((rig.hs.salt_stats().refused, rig.sum("c")), (1, 9));
}

#[test]
fn an_exclusive_counter_is_salted_without_waiting_for_anybody() {
    let rig = Rig::new(Salt::new().exclusive());
    let other =
        build(Heatsink::builder(rig.store.clone()).salt(Salt::new().exclusive()), &rig.rt, 8);
    rig.rt.block_on(other.counter("likes").add(41)).unwrap();
    rig.hs.control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    rig.rt.run_for(30 * MS);
    assert_eq!(rig.hs.explain("likes").salting.unwrap().slots, 8);
    // Nobody has told the other process; the seal does.
    rig.rt.block_on(other.counter("likes").add(1)).unwrap();
    assert_eq!(rig.sum("likes"), 42);
    let sum = rig.rt.block_on(other.counter("likes").sum_with(Duration::ZERO)).unwrap();
    assert_eq!((sum.total(), other.salt_stats().resent), (42, 1));
}

#[test]
fn a_process_that_loses_the_registry_goes_back_to_the_bare_key() {
    let rig = Rig::new(Salt::new());
    let mut can = Capability::all();
    can.seal = false;
    let store = MemoryStore::builder().shards(8).runtime(rig.rt.clone()).capability(can).build();
    let hs = build(Heatsink::builder(store.clone()).salt(Salt::new()), &rig.rt, 9);
    hs.control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    rig.rt.run_for(5 * SEC);
    store.set_down(store.place(b"{hs:registry}root"), true);
    rig.rt.run_for(5 * SEC);
    let counter = hs.counter("likes");
    for _ in 0..10 {
        rig.rt.block_on(counter.add(1)).unwrap();
    }
    assert_eq!(hs.salt_stats().bare, 10);
    store.set_down(store.place(b"{hs:registry}root"), false);
    rig.rt.run_for(SEC);
    assert_eq!(rig.rt.block_on(counter.sum_with(Duration::ZERO)).unwrap().total(), 10);
}

#[test]
fn slots_fall_on_different_shards_where_the_store_knows_them() {
    for placement in [Placement::ClusterSlots, Placement::Fnv1a] {
        let rt = SimRuntime::new(7);
        let store = MemoryStore::builder().shards(8).placement(placement).runtime(rt.clone());
        let store = store.build();
        let hs = build(Heatsink::builder(store.clone()).salt(Salt::new()), &rt, 7);
        hs.control().pin("{tag}:likes", Treatment::Salt { slots: 32 }).unwrap();
        rt.run_for(5 * SEC);
        let mut on = [0; 8];
        for name in store.snapshot().into_keys().filter(|n| n.to_string().contains("slot.")) {
            on[store.place(&name)] += 1;
        }
        assert_eq!(on, [4; 8], "{placement:?}");
    }
}

#[test]
fn options_that_the_store_cannot_carry_are_named_at_build() {
    let build = |can: Capability, salt: Salt| -> Result<Heatsink> {
        Heatsink::builder(MemoryStore::builder().capability(can).build()).salt(salt).build()
    };
    let none = Capability::default();
    let wrong = build(none, Salt::new()).unwrap_err().to_string();
    assert!(wrong.contains("compare_and_set"), "{wrong}");
    let mut can = Capability::all();
    can.seal = false;
    let wrong = build(can, Salt::new().exclusive()).unwrap_err().to_string();
    assert!(wrong.contains("seal"), "{wrong}");
    let wrong = build(Capability::all(), Salt::new().timeout(SEC)).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Config);
}

/// A counter that goes viral: 20,000 adds a second over eight processes, on a store of eight
/// shards that take 5,000 each, with another counter on the same shard.
struct Viral {
    spread_after: Duration,
    acked: i64,
    total: i64,
    bystander_longest: Duration,
    bystander_failed: u64,
    failed: u64,
}

/// 2,500 adds a second until then, each a task of its own.
fn flood(
    rt: &SimRuntime,
    hs: &Heatsink,
    stop: Tick,
    (acked, failed): (&Arc<AtomicI64>, &Arc<AtomicU64>),
) {
    let (own, counter) = (rt.clone(), hs.counter("viral"));
    let (acked, failed) = (acked.clone(), failed.clone());
    rt.spawn(async move {
        while own.now() < stop {
            let (counter, acked, failed) = (counter.clone(), acked.clone(), failed.clone());
            own.spawn(async move {
                match counter.add(1).await {
                    Ok(()) => drop(acked.fetch_add(1, Ordering::Relaxed)),
                    Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
                }
            });
            own.sleep(Duration::from_micros(400)).await;
        }
    });
}

fn viral(salt: impl Fn() -> Salt, seal: bool) -> Viral {
    let rt = SimRuntime::new(11);
    let mut can = Capability::all();
    can.seal = seal;
    let store = MemoryStore::builder().shards(8).ceiling(5_000).latency(Duration::from_micros(500));
    let store = store.capability(can).runtime(rt.clone()).build();
    let ceiling = Ceiling { reads_per_sec: 5e3, writes_per_sec: 5e3, shared: true };
    let processes: Vec<Heatsink> = (0..8)
        .map(|i| {
            let builder = Heatsink::builder(store.clone()).salt(salt().processes(8));
            let builder = builder.detect(Detect::new().ceiling(ceiling));
            build(builder.loads(Loads::new().timeout(250 * MS)), &rt, i)
        })
        .collect();
    rt.run_for(2 * SEC);
    let (acked, failed) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicU64::new(0)));
    let stop = rt.now().after(6 * SEC);
    processes.iter().for_each(|hs| flood(&rt, hs, stop, (&acked, &failed)));
    let home = store.place(b"viral");
    let other = (0..).map(|i| format!("other:{i}")).find(|k| store.place(k.as_bytes()) == home);
    let waits = Arc::new(Mutex::new((Duration::ZERO, 0)));
    let (rt2, bystander, waited) =
        (rt.clone(), processes[0].counter(other.unwrap()), waits.clone());
    rt.spawn(async move {
        while rt2.now() < stop {
            let began = rt2.now();
            let answer = bystander.add(1).await;
            {
                let mut waited = waited.lock().unwrap();
                waited.0 = waited.0.max(rt2.now().since(began));
                waited.1 += u64::from(answer.is_err());
            }
            rt2.sleep(20 * MS).await;
        }
    });
    let began = rt.now();
    let mut spread_after = Duration::MAX;
    while rt.now() < stop {
        let before = store.counts();
        rt.run_for(100 * MS);
        let writes: Vec<u64> =
            store.counts().iter().zip(before).map(|(a, b)| a.writes - b.writes).collect();
        let (busiest, all) = (writes.iter().max().unwrap(), writes.iter().sum::<u64>());
        if *busiest * 3 <= all && spread_after == Duration::MAX {
            spread_after = rt.now().since(began);
        }
    }
    rt.run_for(2 * SEC);
    let sum = rt.block_on(processes[3].counter("viral").sum_with(Duration::ZERO)).unwrap();
    let (bystander_longest, bystander_failed) = *waits.lock().unwrap();
    Viral {
        spread_after,
        acked: acked.load(Ordering::Relaxed),
        total: sum.total(),
        bystander_longest,
        bystander_failed,
        failed: failed.load(Ordering::Relaxed),
    }
}

#[test]
fn a_viral_counter_is_spread_within_a_second_with_seals_and_four_with_leases() {
    for (name, seal, limit) in [("seal", true, SEC), ("leases", false, 4 * SEC)] {
        let salt = || if seal { Salt::new().exclusive() } else { Salt::new() };
        let seen = viral(salt, seal);
        println!(
            "{name}: spread after {:?}, {} acknowledged, {} failed, another key waits {:?} at most",
            seen.spread_after, seen.acked, seen.failed, seen.bystander_longest
        );
        assert!(seen.spread_after <= limit, "{name}: {:?}", seen.spread_after);
        assert_eq!(seen.total, seen.acked, "{name}");
        assert!(seen.acked > 100_000 && seen.failed == 0, "{name}: {}", seen.failed);
        assert_eq!(seen.bystander_failed, 0, "{name}: another key timed out");
        assert!(seen.bystander_longest < 50 * MS, "{name}: {:?}", seen.bystander_longest);
    }
}
