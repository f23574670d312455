//! What maxima, minima and sets promise, plain and in slots, one test per promise.

use super::MS;
use heatsink::store::memory::{Fault, Faults, On};
use heatsink::store::{Capability, MemoryStore};
use heatsink::testing::SimRuntime;
use heatsink::{
    Error, ErrorKind, Extreme, Heatsink, Key, Members, Reading, Salt, SaltMutant, Treatment, Union,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SEC: Duration = Duration::from_secs(1);

/// Some processes on one store that can do no more than compare-and-set.
struct Fleet {
    rt: SimRuntime,
    store: MemoryStore,
    all: Vec<Heatsink>,
}

impl Fleet {
    fn new(seed: u64, processes: u64, salt: &Salt) -> Fleet {
        let rt = SimRuntime::new(seed);
        let mut can = Capability::default();
        can.compare_and_set = true;
        let store = MemoryStore::builder().shards(4).capability(can).runtime(rt.clone());
        let store = store.latency(MS).build();
        let build = |i| {
            let hs = Heatsink::builder(store.clone()).salt(salt.clone()).runtime(rt.clone());
            hs.seed(100 * seed + i).cores(2.try_into().unwrap()).build().unwrap()
        };
        let all = (0..processes).map(build).collect();
        Fleet { rt, store, all }
    }

    fn bare(&self, key: &str) -> Option<String> {
        let stored = self.store.get_now(key)?;
        Some(String::from_utf8(stored.bytes.to_vec()).unwrap())
    }

    fn value(&self, of: &Extreme) -> Option<i64> {
        self.rt.block_on(of.value_with(Duration::ZERO)).unwrap().value()
    }

    fn members(&self, of: &Union) -> Vec<String> {
        let found = self.rt.block_on(of.members_with(Duration::ZERO)).unwrap();
        found.iter().map(|m| String::from_utf8(m.to_vec()).unwrap()).collect()
    }

    /// Runs until the key is written to so many slots, and nothing else is read.
    fn settle(&self, key: &str, slots: u16) {
        for _ in 0..4000 {
            self.rt.run_for(10 * MS);
            let now = self.all[0].explain(key).salting;
            if now.map_or((1, 0), |s| (s.slots, s.in_rotation)) == (slots, 0) {
                return;
            }
        }
        panic!("{}", self.all[0].explain(key));
    }

    fn salt(&self, key: &str, slots: u16) {
        self.all[0].control().pin(key, Treatment::Salt { slots: slots.into() }).unwrap();
        self.settle(key, slots);
    }

    fn slots_left(&self) -> usize {
        self.store.snapshot().keys().filter(|name| name.to_string().contains("slot.")).count()
    }
}

#[test]
fn the_greatest_and_the_least_stay_and_nothing_is_written_for_the_others() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().runtime(rt.clone()).build();
    let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).build().unwrap();
    let (max, min) = (hs.max("max"), hs.min("min"));
    let value = |of: &Extreme| rt.block_on(of.value_with(Duration::ZERO)).unwrap().value();
    assert_eq!((value(&max), value(&min)), (None, None));
    for n in [3, -7, 9, 4] {
        rt.block_on(max.offer(n)).unwrap();
        rt.block_on(min.offer(n)).unwrap();
    }
    assert_eq!((value(&max), value(&min)), (Some(9), Some(-7)));
    assert_eq!((store.writes_of("max"), store.writes_of("min")), (2, 2));
    // Any program reads it, and may have written it.
    assert_eq!(store.get_now("max").unwrap().bytes, "9");
    store.put_now("max", "12").unwrap();
    rt.block_on(max.offer(10)).unwrap();
    assert_eq!(value(&max), Some(12));
}

#[test]
fn offers_that_come_together_travel_together() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().latency(10 * MS).runtime(rt.clone()).build();
    let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).build().unwrap();
    for n in 0..100 {
        let max = hs.max("k");
        rt.spawn(async move { max.offer((n * 37) % 100).await.unwrap() });
    }
    rt.run_for(SEC);
    assert_eq!(store.get_now("k").unwrap().bytes, "99");
    assert!(store.writes_of("k") <= 3, "{} writes", store.writes_of("k"));
}

#[test]
fn a_maximum_grows_shrinks_and_goes_home_on_a_store_that_cannot_seal() {
    let fleet = Fleet::new(1, 1, &Salt::new().grave(5 * SEC));
    let (max, min, set) =
        (fleet.all[0].max("max"), fleet.all[0].min("min"), fleet.all[0].union("set"));
    let mut want = BTreeSet::new();
    for (round, slots) in [8u16, 16, 4, 2].into_iter().enumerate() {
        for n in 0..30 {
            let n = 100 * round as i64 + n;
            fleet.rt.block_on(max.offer(n)).unwrap();
            fleet.rt.block_on(min.offer(-n)).unwrap();
            fleet.rt.block_on(set.insert(n.to_string())).unwrap();
            want.insert(n.to_string());
        }
        ["max", "min", "set"].iter().for_each(|key| fleet.salt(key, slots));
        let greatest = 100 * round as i64 + 29;
        assert_eq!(fleet.value(&max), Some(greatest));
        assert_eq!(fleet.value(&min), Some(-greatest));
        assert!(fleet.members(&set).iter().eq(&want));
    }
    fleet.rt.block_on(max.offer(1000)).unwrap();
    fleet.rt.block_on(set.insert("last")).unwrap();
    want.insert("last".into());
    for key in ["max", "min", "set"] {
        fleet.all[0].control().unpin(key);
        fleet.settle(key, 1);
    }
    fleet.rt.run_for(20 * SEC);
    assert_eq!((fleet.bare("max"), fleet.bare("min")), (Some("1000".into()), Some("-329".into())));
    assert!(fleet.members(&set).iter().eq(&want));
    assert_eq!(fleet.slots_left(), 0);
    assert_eq!(fleet.all[0].explain("max").salting, None, "a plain key again");
    assert_eq!(fleet.all[0].salt_stats().late, 0);
}

#[test]
fn what_does_not_combine_as_the_key_does_is_refused_with_the_right_call() {
    let fleet = Fleet::new(1, 2, &Salt::new());
    fleet.rt.block_on(fleet.all[0].max("k").offer(7)).unwrap();
    fleet.salt("k", 4);
    let other = &fleet.all[1];
    fleet.rt.run_for(3 * SEC);
    let refused = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::WrongType);
        assert!(error.to_string().contains("Heatsink::max(key)"), "{error}");
    };
    refused(fleet.rt.block_on(other.counter("k").add(1)).unwrap_err());
    refused(fleet.rt.block_on(other.counter("k").reset()).unwrap_err());
    refused(fleet.rt.block_on(other.min("k").offer(1)).unwrap_err());
    refused(fleet.rt.block_on(other.get("k")).unwrap_err());
    assert_eq!(fleet.value(&other.max("k")), Some(7));
}

#[test]
fn a_set_that_is_full_refuses_a_new_member_and_keeps_those_it_has() {
    let fleet = Fleet::new(1, 1, &Salt::new());
    let set = fleet.all[0].union("set");
    for n in 0..1024 {
        fleet.rt.block_on(set.insert(n.to_string())).unwrap();
    }
    let refused = fleet.rt.block_on(set.insert("one more")).unwrap_err();
    assert_eq!((refused.kind(), refused.is_unknown()), (ErrorKind::Limit, false));
    fleet.rt.block_on(set.insert("7")).unwrap();
    assert_eq!(fleet.members(&set).len(), 1024);
    let long = fleet.rt.block_on(set.insert(vec![b'x'; 1025])).unwrap_err();
    assert_eq!(long.kind(), ErrorKind::Limit);
}

#[test]
fn a_set_beyond_one_mebibyte_is_read_and_is_not_brought_home_again_and_again() {
    let fleet = Fleet::new(1, 1, &Salt::new().grave(5 * SEC));
    let set = fleet.all[0].union("set");
    let mut want = BTreeSet::new();
    let insert = |want: &mut BTreeSet<String>, n: usize| {
        let member = format!("{n:01000}");
        match fleet.rt.block_on(set.insert(&member)) {
            Ok(()) => drop(want.insert(member)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Limit),
        }
    };
    (0..64).for_each(|n| insert(&mut want, n));
    fleet.salt("set", 16);
    (100..3000).for_each(|n| insert(&mut want, n));
    assert!(want.len() * 1005 > 1 << 20, "{} members", want.len());
    let is_whole = |want| assert!(fleet.members(&set).iter().eq(want), "what was acknowledged");
    is_whole(&want);
    fleet.all[0].control().unpin("set");
    fleet.rt.run_for(30 * SEC);
    let stats = fleet.all[0].salt_stats();
    assert!((1..=6).contains(&stats.refused), "{stats:?}");
    is_whole(&want);
}

#[test]
fn an_offer_of_unknown_outcome_stays_unknown_when_the_next_attempt_fails() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().runtime(rt.clone()).build();
    let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).build().unwrap();
    let cas = On::Only(heatsink::store::memory::Op::CompareAndSet);
    store.faults().next(cas, Fault::UnknownNotApplied);
    store.faults().next(cas, Fault::NotApplied);
    let error = rt.block_on(hs.max("k").offer(5)).unwrap_err();
    assert!(error.is_unknown(), "the first may be applied yet: {error}");
    store.faults().next(cas, Fault::NotApplied);
    assert!(!rt.block_on(hs.max("k").offer(5)).unwrap_err().is_unknown());
}

#[test]
fn a_shard_that_does_not_answer_leaves_a_maximum_that_says_so() {
    let fleet = Fleet::new(1, 1, &Salt::new());
    let max = fleet.all[0].max("max");
    fleet.rt.block_on(max.offer(50)).unwrap();
    fleet.salt("max", 8);
    assert_eq!(fleet.value(&max), Some(50));
    let record = heatsink::record_name(&Key::from("max"));
    let registry = [&b"{hs:registry}root"[..], b"{hs:registry}list", &record];
    let needed = registry.map(|name| fleet.store.place(name));
    let sick = (0..4).find(|shard| !needed.contains(shard)).unwrap();
    fleet.store.set_down(sick, true);
    let seen = fleet.rt.block_on(max.value_with(Duration::ZERO)).unwrap();
    assert!(seen.behind() > 0 && seen.value() == Some(50), "{seen:?}");
}

/// What was offered, and what was acknowledged.
#[derive(Default)]
struct Books {
    given: BTreeSet<i64>,
    acked: BTreeSet<i64>,
}

fn arm(faults: &Faults) {
    for (on, p, fault) in [
        (On::Any, 0.02, Fault::NotApplied),
        (On::Writes, 0.03, Fault::UnknownApplied),
        (On::Writes, 0.03, Fault::UnknownNotApplied),
        (On::Writes, 0.02, Fault::UnknownLater(150 * MS)),
        (On::Any, 0.02, Fault::Delay(60 * MS)),
    ] {
        faults.chance(on, p, fault);
    }
}

/// Whole answers have all of what was acknowledged `before`, and nothing but what was `given`.
fn check(
    seed: u64,
    (before, given): (&BTreeSet<i64>, &BTreeSet<i64>),
    found: (heatsink::Result<Reading>, heatsink::Result<Members>),
) {
    if let Some(seen) = found.0.ok().filter(|seen| seen.behind() == 0) {
        let value = seen.value();
        assert!(value >= before.last().copied(), "seed {seed}: {value:?} < {before:?}");
        assert!(value.is_none_or(|n| given.contains(&n)), "seed {seed}: {value:?}");
    }
    if let Some(seen) = found.1.ok().filter(|seen| seen.behind() == 0) {
        let number = |m: &[u8]| std::str::from_utf8(m).unwrap().parse::<i64>().unwrap();
        let seen: BTreeSet<i64> = seen.iter().map(number).collect();
        let lost: Vec<_> = before.difference(&seen).collect();
        assert!(lost.is_empty(), "seed {seed}: {lost:?} are gone");
        assert!(seen.is_subset(given), "seed {seed}: never given");
    }
}

/// Everybody offers and inserts the same numbers while slots come and go and calls fail in every
/// way; each call that failed is made again. Every read has all that was acknowledged before it
/// began and nothing that was never given.
fn torture(seed: u64, mutant: Option<SaltMutant>) {
    let salt = Salt::new().lease(400 * MS).timeout(100 * MS).grave(2 * SEC);
    let fleet = Fleet::new(seed, 3, &salt);
    mutant.iter().for_each(|by| fleet.all.iter().for_each(|hs| hs.break_salt(*by)));
    let faults = fleet.store.faults();
    arm(&faults);
    let books = Arc::new(Mutex::new(Books::default()));
    let stop = fleet.rt.now().after(12 * SEC);
    for (i, hs) in fleet.all.iter().enumerate() {
        let (rt, books2, max, set) = (fleet.rt.clone(), books.clone(), hs.max("m"), hs.union("u"));
        fleet.rt.spawn(async move {
            let books = books2;
            let mut n = i as i64;
            while rt.now() < stop {
                n += 3;
                books.lock().unwrap().given.insert(n);
                while max.offer(n).await.is_err() || set.insert(n.to_string()).await.is_err() {
                    rt.sleep(5 * MS).await;
                }
                books.lock().unwrap().acked.insert(n);
                rt.sleep(MS * (10 + rt.draw(60) as u32)).await;
            }
        });
        let (rt, books, max, set) = (fleet.rt.clone(), books.clone(), hs.max("m"), hs.union("u"));
        fleet.rt.spawn(async move {
            while rt.now() < stop {
                let before = books.lock().unwrap().acked.clone();
                let found =
                    (max.value_with(Duration::ZERO).await, set.members_with(Duration::ZERO).await);
                let given = books.lock().unwrap().given.clone();
                check(seed, (&before, &given), found);
                rt.sleep(MS * (1 + rt.draw(80) as u32)).await;
            }
        });
    }
    while fleet.rt.now() < stop {
        let operator = &fleet.all[fleet.rt.draw(3) as usize];
        for key in ["m", "u"] {
            match fleet.rt.draw(6) as u32 {
                0 => drop(operator.control().unpin(key)),
                k => operator.control().pin(key, Treatment::Salt { slots: 1 << k }).unwrap(),
            }
        }
        fleet.rt.run_for(MS * (200 + fleet.rt.draw(900)) as u32);
    }
    faults.clear();
    for key in ["m", "u"] {
        for hs in &fleet.all {
            hs.control().pin(key, Treatment::Salt { slots: 2 }).unwrap();
            hs.control().unpin(key);
        }
    }
    fleet.rt.run_for(40 * SEC);
    let books = books.lock().unwrap();
    assert!(books.acked.len() > 100, "seed {seed}: {} were acknowledged", books.acked.len());
    assert_eq!(fleet.bare("m"), books.acked.last().map(i64::to_string), "seed {seed}");
    assert_eq!(fleet.members(&fleet.all[0].union("u")).len(), books.acked.len(), "seed {seed}");
    let salted = ["m", "u"].map(|key| fleet.all[0].explain(key).salting);
    assert_eq!(salted, [None, None], "seed {seed}");
    let retired: u64 = fleet.all.iter().map(|hs| hs.salt_stats().retired).sum();
    assert!(retired > 4, "seed {seed}: {retired} generations were retired");
}

#[test]
fn nothing_acknowledged_is_missing_while_slots_come_and_go_and_calls_fail() {
    let seeds = std::env::var("HEATSINK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    (0..seeds).for_each(|seed| torture(seed, None));
}

#[test]
fn that_nobody_waits_for_readers_is_found_out() {
    let caught = |seed| {
        let run = || torture(seed, Some(SaltMutant::NoWaitForReaders));
        std::panic::catch_unwind(run).is_err()
    };
    assert!((0..20).any(caught));
}
