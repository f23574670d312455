//! Salted counters that expire: at one moment everything is gone, and what comes later counts.

use super::MS;
use heatsink::engine::time::Tick;
use heatsink::store::memory::{Fault, Faults, On};
use heatsink::store::{Capability, MemoryStore, Store};
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Key, Salt, Treatment};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

const SEC: Duration = Duration::from_secs(1);

/// Some processes, and a counter of 9 that expires.
struct Fleet {
    rt: SimRuntime,
    store: MemoryStore,
    all: Vec<Heatsink>,
    end: Tick,
}

impl Fleet {
    fn new(seed: u64, can: Capability, salt: &Salt, lives: Duration) -> Fleet {
        let rt = SimRuntime::new(seed);
        let store = MemoryStore::builder().shards(4).capability(can).runtime(rt.clone());
        let store = store.latency(MS).max_in_flight_time(300 * MS).build();
        let build = |i| {
            let hs = Heatsink::builder(store.clone()).salt(salt.clone()).runtime(rt.clone());
            hs.seed(100 * seed + i).cores(2.try_into().unwrap()).build().unwrap()
        };
        let all = (0..3).map(build).collect();
        rt.block_on(store.put(&Key::from("c"), "9".into(), Some(lives))).unwrap();
        let end = rt.now().after(lives);
        Fleet { rt, store, all, end }
    }

    fn sum(&self, process: usize) -> i64 {
        let counter = self.all[process].counter("c");
        self.rt.block_on(counter.sum_with(Duration::ZERO)).unwrap().total()
    }

    fn until(&self, tick: Tick) {
        self.rt.run_for(tick.since(self.rt.now()));
    }

    fn pin(&self, process: u64, slots: u32) {
        self.all[process as usize].control().pin("c", Treatment::Salt { slots }).unwrap();
    }
}

#[test]
fn a_counter_that_expires_does_so_in_slots_too_and_everything_of_it_at_once() {
    let salt = Salt::new().grave(5 * SEC);
    let fleet = Fleet::new(1, Capability::all(), &salt, 60 * SEC);
    fleet.pin(0, 8);
    fleet.rt.run_for(10 * SEC);
    // One generation is retired, and one is in use.
    for _ in 0..20 {
        fleet.rt.block_on(fleet.all[1].counter("c").add(1)).unwrap();
    }
    fleet.pin(0, 4);
    fleet.rt.run_for(10 * SEC);
    for _ in 0..20 {
        fleet.rt.block_on(fleet.all[2].counter("c").add(1)).unwrap();
    }
    assert!(fleet.all[0].explain("c").salting.unwrap().retired == 20);
    assert_eq!(fleet.store.get_now("c").unwrap().ttl_left, None, "the record has it");
    fleet.until(Tick(fleet.end.0 - 20_000_000));
    assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [49; 3]);
    fleet.until(fleet.end);
    fleet.rt.block_on(fleet.all[1].counter("c").add(5)).unwrap();
    assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [5; 3]);
    let expired: u64 = fleet.all.iter().map(|hs| hs.salt_stats().expired).sum();
    assert_eq!(expired, 1);
    // What counts from then on does not expire, and goes home.
    fleet.all[0].control().unpin("c");
    fleet.rt.run_for(60 * SEC);
    assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [5; 3]);
    assert_eq!(fleet.store.get_now("c").unwrap().bytes, "5");
}

#[test]
fn nobody_needs_to_look_for_a_counter_to_expire() {
    let salt = Salt::new().grave(5 * SEC);
    let fleet = Fleet::new(1, Capability::all(), &salt, 20 * SEC);
    fleet.pin(0, 8);
    fleet.rt.run_for(5 * SEC);
    fleet.all[0].control().unpin("c");
    fleet.rt.run_for(10 * SEC);
    assert!(fleet.all[0].explain("c").salting.is_some(), "it is kept for the expiry");
    fleet.rt.run_for(60 * SEC);
    assert_eq!(fleet.store.get_now("c").unwrap().bytes, "0");
    assert_eq!(fleet.all[0].explain("c").salting, None);
}

#[test]
fn a_reset_is_known_to_every_process_and_leaves_the_expiry() {
    let fleet = Fleet::new(1, Capability::all(), &Salt::new(), 60 * SEC);
    fleet.pin(0, 8);
    fleet.rt.run_for(10 * SEC);
    assert_eq!(fleet.sum(2), 9);
    fleet.rt.block_on(fleet.all[1].counter("c").reset()).unwrap();
    fleet.rt.run_for(3 * SEC);
    assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [0; 3]);
    fleet.rt.block_on(fleet.all[1].counter("c").add(4)).unwrap();
    fleet.until(fleet.end);
    assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [0; 3]);
}

#[test]
fn calls_that_find_a_counter_over_at_once_let_it_begin_again_once() {
    let fleet = Fleet::new(1, Capability::all(), &Salt::new(), 30 * SEC);
    fleet.pin(0, 8);
    fleet.rt.run_for(10 * SEC);
    assert_eq!(fleet.sum(1), 9);
    fleet.until(fleet.end);
    let record = heatsink::record_name(&Key::from("c"));
    let reads = || fleet.store.reads_of(record.clone());
    let (before, writes) = (reads(), fleet.store.writes_of(record.clone()));
    for id in 0..200 {
        let counter = fleet.all[1].counter("c");
        fleet.rt.spawn(async move {
            counter.add_event(format!("event {id}"), 1).await.unwrap();
        });
    }
    fleet.rt.run_for(300 * MS);
    assert_eq!(fleet.sum(1), 200);
    let read = reads() - before;
    assert!(read <= 20, "{read} reads of the record by 200 calls");
    assert_eq!(fleet.store.writes_of(record.clone()) - writes, 1);
}

#[test]
fn a_counter_that_expires_is_switched_to_slots_while_ten_processes_add_to_it() {
    let fleet = Fleet::new(1, Capability::all(), &Salt::new().grave(5 * SEC), 60 * SEC);
    let build = |i: u64| {
        let hs = Heatsink::builder(fleet.store.clone()).salt(Salt::new().grave(5 * SEC));
        hs.runtime(fleet.rt.clone()).seed(500 + i).cores(2.try_into().unwrap()).build().unwrap()
    };
    let writers: Vec<Heatsink> = (0..10).map(build).collect();
    let stop = fleet.rt.now().after(20 * SEC);
    let added = Arc::new(AtomicI64::new(0));
    for hs in &writers {
        let (rt, counter, added) = (fleet.rt.clone(), hs.counter("c"), added.clone());
        fleet.rt.spawn(async move {
            while rt.now() < stop {
                counter.add(1).await.unwrap();
                added.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    fleet.pin(0, 8);
    fleet.until(stop);
    assert_eq!(fleet.all[0].explain("c").salting.unwrap().slots, 8);
    assert_eq!(fleet.store.get_now("c").unwrap().ttl_left, None, "the record has it");
    fleet.rt.run_for(SEC);
    assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [9 + load(&added); 3]);
    fleet.until(fleet.end);
    assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [0; 3]);
}

/// The registry has lost the record that is known to be over: all of it, or its last changes.
#[test]
fn a_call_ends_when_the_registry_has_lost_the_record_of_a_counter_whose_time_is_over() {
    for evicted in [true, false] {
        let fleet = Fleet::new(1, Capability::all(), &Salt::new().grave(5 * SEC), 30 * SEC);
        let record = heatsink::record_name(&Key::from("c"));
        fleet.pin(0, 8);
        while fleet.store.get_now(record.clone()).is_none() {
            fleet.rt.run_for(MS);
        }
        let first = fleet.store.get_now(record.clone()).unwrap().bytes;
        fleet.rt.run_for(20 * SEC);
        assert!(first != fleet.store.get_now(record.clone()).unwrap().bytes);
        assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [9; 3], "everybody knows the record");
        fleet.until(fleet.end);
        if evicted {
            let gone = fleet.rt.block_on(fleet.store.delete_many(std::slice::from_ref(&record)));
            assert_eq!(gone.len(), 1);
        } else {
            fleet.store.put_now(record.clone(), first).unwrap();
        }
        let ended = Arc::new(AtomicI64::new(0));
        for hs in &fleet.all {
            let (counter, ended) = (hs.counter("c"), ended.clone());
            fleet.rt.spawn(async move {
                counter.add(5).await.unwrap();
                let sum = counter.sum_with(Duration::ZERO).await;
                assert!(sum.is_err() == evicted, "{sum:?}");
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        let before = fleet.store.reads_of(record.clone());
        fleet.rt.run_for(2 * SEC);
        assert_eq!(load(&ended), 3);
        let reads = fleet.store.reads_of(record) - before;
        assert!(reads < 200, "{reads} reads of the record in 2 s");
        if !evicted {
            fleet.rt.run_for(5 * SEC);
            assert_eq!([0, 1, 2].map(|i| fleet.sum(i)), [15; 3]);
        }
    }
}

/// What was given and acknowledged before the end, and after it.
#[derive(Default)]
struct Books {
    given: [AtomicI64; 2],
    acked: [AtomicI64; 2],
    /// Adds that began before the end and ended after it, or of which that is not known.
    either: AtomicI64,
}

fn load(n: &AtomicI64) -> i64 {
    n.load(Ordering::Relaxed)
}

fn arm(faults: &Faults) {
    for (on, p, fault) in [
        (On::Any, 0.02, Fault::NotApplied),
        (On::Writes, 0.02, Fault::UnknownApplied),
        (On::Writes, 0.02, Fault::UnknownNotApplied),
        (On::Any, 0.02, Fault::Delay(60 * MS)),
    ] {
        faults.chance(on, p, fault);
    }
}

/// Adds, sums and rotations go on through the end, and calls fail in every way.
fn torture(seed: u64) {
    let salt = Salt::new().lease(400 * MS).timeout(100 * MS).grave(2 * SEC).sweep(300 * MS);
    let mut can = Capability::all();
    can.seal = !seed.is_multiple_of(3);
    let fleet = Fleet::new(seed, can, &salt, 6 * SEC);
    let faults = fleet.store.faults();
    arm(&faults);
    let (books, end, stop) = (Arc::new(Books::default()), fleet.end, fleet.end.after(6 * SEC));
    for hs in &fleet.all {
        let (rt, own, counter) = (fleet.rt.clone(), books.clone(), hs.counter("c"));
        fleet.rt.spawn(async move {
            while rt.now() < stop {
                let n = 1 + rt.draw(4) as i64;
                let late = usize::from(rt.now() >= end);
                own.given[late].fetch_add(n, Ordering::Relaxed);
                let answer = counter.add(n).await;
                let over = rt.now() >= end;
                match answer {
                    Ok(()) if late == 1 || !over => {
                        own.acked[late].fetch_add(n, Ordering::Relaxed);
                    }
                    Err(e) if !e.is_unknown() => {}
                    // It may land at any time.
                    _ if late == 0 => drop(own.either.fetch_add(n, Ordering::Relaxed)),
                    _ => {}
                }
                rt.sleep(MS * (1 + rt.draw(30) as u32)).await;
            }
        });
        let (rt, own, counter) = (fleet.rt.clone(), books.clone(), hs.counter("c"));
        fleet.rt.spawn(async move {
            while rt.now() < stop {
                let (began, acked) = (rt.now(), [0, 1].map(|i| load(&own.acked[i])));
                // One of which a part is older says so.
                let seen = counter.sum_with(Duration::ZERO).await;
                let seen = seen.ok().filter(|sum| sum.behind() == 0).map(|sum| sum.total());
                let (ended, given) = (rt.now(), [0, 1].map(|i| load(&own.given[i])));
                match seen {
                    Some(n) if ended < end => {
                        let (least, most) = (9 + acked[0], 9 + given[0]);
                        assert!(least <= n && n <= most, "seed {seed}: {least} <= {n} <= {most}");
                    }
                    Some(n) if began >= end => {
                        let most = given[1] + load(&own.either) + 12;
                        assert!(acked[1] <= n && n <= most, "seed {seed}: {n}, {acked:?}, {most}");
                    }
                    _ => {}
                }
                rt.sleep(MS * (1 + rt.draw(40) as u32)).await;
            }
        });
    }
    while fleet.rt.now() < stop {
        match fleet.rt.draw(5) as u32 {
            0 => drop(fleet.all[fleet.rt.draw(3) as usize].control().unpin("c")),
            k => fleet.pin(fleet.rt.draw(3), 1 << k),
        }
        fleet.rt.run_for(MS * (200 + fleet.rt.draw(900)) as u32);
    }
    faults.clear();
    fleet.rt.run_for(30 * SEC);
    let (least, most) = (load(&books.acked[1]), load(&books.given[1]) + load(&books.either));
    assert!(least > 100, "seed {seed}: {least} were acknowledged");
    for process in 0..3 {
        let sum = fleet.sum(process);
        assert!(least <= sum && sum <= most, "seed {seed}: {least} <= {sum} <= {most}");
    }
}

#[test]
fn sums_are_exact_before_and_after_the_end_while_slots_come_and_go_and_calls_fail() {
    let seeds = std::env::var("HEATSINK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    (0..seeds).for_each(torture);
}
