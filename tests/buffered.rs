//! What buffered counters promise, one test per promise.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use heatsink::store::memory::{Fault, On, Op};
use heatsink::store::{Capability, MemoryStore};
use heatsink::testing::SimRuntime;
use heatsink::{Adds, AtCap, Buffered, ErrorKind, Heatsink, Key, Loads, Outcome};
use std::future::Future;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

struct Rig {
    rt: SimRuntime,
    store: MemoryStore,
    lost: Arc<Mutex<Vec<(Key, i64)>>>,
}

impl Rig {
    fn new(seed: u64) -> Rig {
        Rig::with(seed, Capability::all())
    }

    fn with(seed: u64, capability: Capability) -> Rig {
        let rt = SimRuntime::new(seed);
        let store = MemoryStore::builder().latency(4 * MS).runtime(rt.clone());
        let store = store.capability(capability).build();
        Rig { rt, store, lost: Arc::default() }
    }

    /// A process of that name.
    fn process(&self, name: &str) -> Heatsink {
        self.process_with(name, &self.rt, Adds::new())
    }

    fn process_with(&self, name: &str, rt: &SimRuntime, adds: Adds) -> Heatsink {
        let lost = self.lost.clone();
        let adds = adds.writer(name).on_lost(move |key, amount| {
            lost.lock().unwrap().push((key.clone(), amount));
        });
        let hs = Heatsink::builder(self.store.clone()).runtime(rt.clone()).adds(adds);
        let seed = name.bytes().map(u64::from).sum();
        let cores = NonZeroUsize::new(2).unwrap();
        hs.loads(Loads::new().timeout(2 * SEC)).seed(seed).cores(cores).build().unwrap()
    }

    fn add(&self, counter: &Buffered, n: i64) {
        self.rt.block_on(counter.add(n)).unwrap();
    }

    fn sum(&self, counter: &Buffered) -> i64 {
        self.rt.block_on(counter.sum_with(Duration::ZERO)).unwrap().total()
    }

    fn lost(&self) -> i64 {
        self.lost.lock().unwrap().iter().map(|(_, n)| n).sum()
    }

    /// Writes that arrived at any shard.
    fn writes(&self) -> u64 {
        self.store.counts().iter().map(|c| c.writes).sum()
    }
}

fn ready<T>(future: impl Future<Output = T>) -> T {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut cx) {
        std::task::Poll::Ready(out) => out,
        std::task::Poll::Pending => panic!("an add waited"),
    }
}

#[test]
fn an_add_costs_memory_only_and_is_stored_an_interval_later() {
    let rig = Rig::new(1);
    let likes = rig.process("a").buffered("k").unwrap();
    for _ in 0..1000 {
        ready(likes.add(1)).unwrap();
    }
    assert_eq!((likes.pending(), rig.writes()), (1000, 0));
    rig.rt.run_for(520 * MS);
    assert_eq!((likes.pending(), rig.sum(&likes)), (0, 1000));
    let claimed = rig.writes();
    for n in 1..=10 {
        ready(likes.add(n)).unwrap();
        rig.rt.run_for(500 * MS);
    }
    rig.rt.run_for(10 * MS);
    assert_eq!(rig.sum(&likes), 1055);
    assert_eq!(rig.writes() - claimed, 10, "one write per interval");
}

#[test]
fn fifty_services_reach_the_owner_as_fifty_writes_per_interval() {
    let rig = Rig::new(2);
    let all: Vec<Buffered> =
        (0..50).map(|i| rig.process(&format!("s{i}")).buffered("k").unwrap()).collect();
    let tick = |secs: u64| {
        for _ in 0..secs * 100 {
            for likes in &all {
                for _ in 0..8 {
                    ready(likes.add(1)).unwrap();
                }
            }
            rig.rt.run_for(10 * MS);
        }
    };
    tick(2);
    let before = rig.writes();
    tick(5);
    let per_interval = (rig.writes() - before) as f64 / 10.0;
    assert!(per_interval <= 50.0, "{per_interval}");
    rig.rt.run_for(SEC);
    assert_eq!(rig.sum(&all[0]), 50 * 800 * 7);
}

#[test]
fn a_flush_is_acknowledged_when_it_is_stored() {
    let rig = Rig::new(3);
    let likes = rig.process("a").buffered("k").unwrap();
    rig.rt.block_on(likes.flush()).unwrap();
    assert_eq!(rig.writes(), 0, "nothing to flush, nothing written");
    rig.add(&likes, 7);
    rig.rt.block_on(likes.flush()).unwrap();
    assert_eq!((rig.sum(&likes), likes.pending()), (7, 0));
    let start = rig.rt.now();
    rig.rt.block_on(likes.add_durable(-2)).unwrap();
    assert!(rig.rt.now().since(start) <= 510 * MS);
    assert_eq!((rig.sum(&likes), likes.pending()), (5, 0));
}

#[test]
fn a_flush_that_is_lost_late_or_repeated_changes_nothing() {
    let rig = Rig::new(4);
    let likes = rig.process("a").buffered("k").unwrap();
    rig.add(&likes, 1);
    rig.rt.block_on(likes.flush()).unwrap();
    let faults = rig.store.faults();
    let flush = On::Only(Op::PutIfNewer);
    // Ten flushes in a row whose answers are lost, some applied, some not, some later.
    for i in 0..10 {
        faults.next(flush, [Fault::UnknownApplied, Fault::UnknownNotApplied][i % 2]);
        faults.next(flush, Fault::UnknownLater(1700 * MS));
    }
    for _ in 0..40 {
        rig.add(&likes, 1);
        rig.rt.run_for(500 * MS);
        assert!(rig.sum(&likes) + likes.pending() >= 1);
        assert!(rig.sum(&likes) <= 41);
    }
    rig.rt.run_for(5 * SEC);
    assert_eq!((rig.sum(&likes), likes.pending(), rig.lost()), (41, 0, 0));
}

#[test]
fn a_restart_goes_on_with_its_lane_and_a_crash_loses_what_was_not_flushed() {
    let rig = Rig::new(5);
    let dying = SimRuntime::with_clock(6, rig.rt.clock());
    let hs = rig.process_with("a", &dying, Adds::new());
    let likes = hs.buffered("k").unwrap();
    ready(likes.add(100)).unwrap();
    for _ in 0..600 {
        while dying.step() || dying.jump(rig.rt.now()) {}
        rig.rt.run_for(MS);
    }
    assert_eq!((rig.sum(&likes), likes.pending()), (100, 0));
    ready(likes.add(11)).unwrap();
    // The process is killed: its tasks are gone, and nobody drops anything in an orderly way.
    dying.shutdown();
    std::mem::forget((hs, likes));
    let likes = rig.process("a").buffered("k").unwrap();
    rig.add(&likes, 1000);
    rig.rt.block_on(likes.flush()).unwrap();
    assert_eq!(rig.sum(&likes), 1100, "short by what was in the buffer, and nothing else");
    let lanes = rig.store.snapshot().keys().filter(|k| k.to_string().contains("lane.")).count();
    assert_eq!(lanes, 1);
}

#[test]
fn a_zombie_is_refused_and_goes_on_in_a_lane_of_its_own() {
    let rig = Rig::new(7);
    let zombie = rig.process("a").buffered("k").unwrap();
    rig.add(&zombie, 1);
    rig.rt.block_on(zombie.flush()).unwrap();
    let hs = rig.process("a");
    let successor = hs.buffered("k").unwrap();
    rig.add(&successor, 10);
    rig.rt.block_on(successor.flush()).unwrap();
    for _ in 0..5 {
        rig.add(&zombie, 100);
        rig.add(&successor, 1000);
        rig.rt.block_on(zombie.flush()).unwrap();
        rig.rt.block_on(successor.flush()).unwrap();
    }
    assert_eq!((rig.sum(&zombie), rig.lost()), (5511, 0));
    assert_eq!(hs.add_stats().lanes_taken_over, 0, "they do not go round in circles");
}

#[test]
fn an_error_while_a_lane_is_read_back_is_not_zero() {
    let rig = Rig::new(8);
    let likes = rig.process("a").buffered("k").unwrap();
    rig.add(&likes, 50);
    rig.rt.block_on(likes.flush()).unwrap();
    let likes = rig.process("a").buffered("k").unwrap();
    rig.store.faults().next_n(On::Only(Op::ClaimLane), 3, Fault::NotApplied);
    rig.add(&likes, 1);
    rig.rt.run_for(400 * MS);
    assert_eq!(rig.sum(&likes), 50);
    rig.rt.run_for(3 * SEC);
    assert_eq!(rig.sum(&likes), 51);
}

#[test]
fn what_lies_in_a_lane_and_is_no_lane_is_an_error_and_stays() {
    let rig = Rig::new(9);
    let likes = rig.process("a").buffered("k").unwrap();
    rig.add(&likes, 50);
    rig.rt.block_on(likes.flush()).unwrap();
    let lane = rig.store.snapshot().into_keys().find(|k| k.to_string().contains("lane.")).unwrap();
    rig.store.put_now(lane.clone(), "fifty").unwrap();
    let error = rig.rt.block_on(likes.sum_with(Duration::ZERO)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Codec);
    let likes = rig.process("a").buffered("k").unwrap();
    rig.add(&likes, 1);
    let error = rig.rt.block_on(likes.flush()).unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (ErrorKind::Timeout, Outcome::Unknown));
    assert_eq!(rig.store.get_now(lane).unwrap().bytes, "fifty");
    assert_eq!(likes.pending(), 1);
}

#[test]
fn writers_without_a_lane_add_through_and_the_sum_has_them() {
    let rig = Rig::new(10);
    let adds = || Adds::new().lanes_max(2);
    let all: Vec<Buffered> = (0..4)
        .map(|i| rig.process_with(&format!("s{i}"), &rig.rt, adds()).buffered("k").unwrap())
        .collect();
    for round in 0..10 {
        for likes in &all {
            rig.add(likes, 1);
        }
        rig.rt.run_for(600 * MS);
        assert_eq!(rig.sum(&all[0]), 4 * (round + 1));
    }
    let parts = rig.rt.block_on(all[0].parts()).unwrap();
    assert_eq!((parts.lanes, parts.counter, parts.total()), (20, 20, Some(40)));
}

#[test]
fn lanes_of_the_dead_are_compacted_and_the_living_move() {
    let rig = Rig::new(11);
    let adds = || Adds::new().lanes_max(3);
    for i in 0..2 {
        let hs = rig.process_with(&format!("dead{i}"), &rig.rt, adds());
        let likes = hs.buffered("k").unwrap();
        rig.add(&likes, 100);
        rig.rt.block_on(hs.shutdown());
    }
    let old = rig.process_with("old", &rig.rt, adds());
    let old_likes = old.buffered("k").unwrap();
    rig.add(&old_likes, 1000);
    rig.rt.run_for(SEC);
    let new = rig.process_with("new", &rig.rt, adds());
    let likes = new.buffered("k").unwrap();
    let mut given = 1200;
    for _ in 0..80 {
        rig.add(&likes, 1);
        rig.add(&old_likes, 1);
        given += 2;
        rig.rt.run_for(SEC);
        assert_eq!(rig.sum(&likes), given);
    }
    assert_eq!((new.add_stats().compactions, rig.lost()), (1, 0));
    let parts = rig.rt.block_on(likes.parts()).unwrap();
    assert!(parts.retired >= 1200, "{parts:?}");
    let writes = rig.store.writes_of("k");
    rig.add(&likes, 1);
    rig.rt.run_for(SEC);
    assert_eq!(rig.store.writes_of("k"), writes, "it has a lane now");
}

#[test]
fn at_the_cap_an_add_goes_through_or_is_refused_as_told() {
    for policy in [AtCap::Through, AtCap::Refuse] {
        let rig = Rig::new(12);
        let adds = Adds::new().pending_max(100).at_cap(policy);
        let hs = rig.process_with("a", &rig.rt, adds);
        let likes = hs.buffered("k").unwrap();
        rig.store.faults().chance(On::Only(Op::PutIfNewer), 1.0, Fault::NotApplied);
        let (mut stored, mut refused) = (0, 0);
        for _ in 0..300 {
            match rig.rt.block_on(likes.add(1)) {
                Ok(()) => stored += 1,
                Err(e) => {
                    assert_eq!((e.kind(), e.outcome()), (ErrorKind::Shed, Outcome::NotApplied));
                    assert!(matches!(e.retry(), heatsink::Retry::After(_)));
                    refused += 1;
                }
            }
        }
        assert!(likes.pending() <= 100, "{likes:?}");
        let stats = hs.add_stats();
        match policy {
            AtCap::Through => assert!(refused == 0 && stats.through >= 200, "{stats:?}"),
            AtCap::Refuse => assert!(refused >= 200 && stats.refused == refused, "{stats:?}"),
        }
        rig.store.faults().clear();
        rig.rt.run_for(2 * SEC);
        assert_eq!((rig.sum(&likes), likes.pending()), (stored, 0));
        ready(likes.add(1)).unwrap();
    }
}

#[test]
fn buffers_take_no_more_bytes_than_allowed_and_give_room_back() {
    let rig = Rig::new(13);
    let hs = rig.process_with("a", &rig.rt, Adds::new().bytes_max(64 * 1024));
    let mut kept = Vec::new();
    let error = loop {
        match hs.buffered(format!("k{}", kept.len())) {
            Ok(likes) => kept.push(likes),
            Err(error) => break error,
        }
        assert!(kept.len() < 100);
    };
    assert_eq!(error.kind(), ErrorKind::Limit);
    assert!(kept.len() > 20);
    rig.add(&kept[0], 1);
    drop(kept);
    // The one that holds something back stays, until its task has ended.
    hs.buffered("another").unwrap();
    rig.rt.run_for(20 * SEC);
    assert_eq!(rig.sum(&hs.buffered("k0").unwrap()), 1);
    let long = vec![b'k'; heatsink::key::KEY_BYTES_MAX + 1];
    assert_eq!(hs.buffered(long).unwrap_err().kind(), ErrorKind::Limit);
}

#[test]
fn shutdown_drains_and_adds_go_through_after_it() {
    let rig = Rig::new(14);
    let hs = rig.process("a");
    let (likes, views) = (hs.buffered("k").unwrap(), hs.buffered("v").unwrap());
    rig.add(&likes, 5);
    rig.add(&views, 6);
    rig.rt.block_on(hs.shutdown());
    assert_eq!((rig.sum(&likes), rig.sum(&views), rig.lost()), (5, 6, 0));
    rig.add(&likes, 1);
    assert_eq!((rig.sum(&likes), likes.pending()), (6, 0));
    rig.rt.block_on(likes.add_durable(1)).unwrap();
    assert_eq!(rig.sum(&hs.buffered("k").unwrap()), 7);
}

#[test]
fn what_shutdown_cannot_flush_is_said() {
    let rig = Rig::new(15);
    let hs = rig.process("a");
    let likes = hs.buffered("k").unwrap();
    rig.store.faults().chance(On::Writes, 1.0, Fault::NotApplied);
    rig.add(&likes, 5);
    let start = rig.rt.now();
    rig.rt.block_on(hs.shutdown());
    assert!(rig.rt.now().since(start) <= 3 * SEC);
    assert_eq!(*rig.lost.lock().unwrap(), [(Key::from("k"), 5)]);
    assert_eq!(hs.add_stats().lost, 5);
}

#[test]
fn dropping_the_last_handle_flushes_what_it_can_and_says_what_it_could_not() {
    for works in [true, false] {
        let rig = Rig::new(16);
        let hs = rig.process("a");
        let likes = hs.buffered("k").unwrap();
        rig.add(&likes, 5);
        if !works {
            rig.store.faults().chance(On::Writes, 1.0, Fault::NotApplied);
        }
        drop(hs);
        drop(likes);
        rig.rt.run_for(3 * SEC);
        rig.store.faults().clear();
        let sum = rig.sum(&rig.process("b").buffered("k").unwrap());
        assert_eq!((sum, rig.lost()), if works { (5, 0) } else { (0, 5) });
    }
}

#[test]
fn dropping_a_handle_of_one_counter_loses_nothing() {
    let rig = Rig::new(17);
    let hs = rig.process("a");
    rig.add(&hs.buffered("k").unwrap(), 5);
    rig.rt.run_for(SEC);
    assert_eq!(rig.sum(&hs.buffered("k").unwrap()), 5);
    // The task has ended by now; the next add starts another.
    rig.rt.run_for(60 * SEC);
    rig.add(&hs.buffered("k").unwrap(), 5);
    rig.rt.run_for(SEC);
    assert_eq!(rig.sum(&hs.buffered("k").unwrap()), 10);
}

#[test]
fn when_the_runtime_of_the_task_dies_the_next_add_starts_another() {
    let rig = Rig::new(18);
    let dying = SimRuntime::with_clock(19, rig.rt.clock());
    let hs = rig.process_with("a", &dying, Adds::new());
    let likes = hs.buffered("k").unwrap();
    dying.block_on(likes.add(5)).unwrap();
    dying.shutdown();
    assert_eq!(likes.pending(), 5, "nothing is lost while the process lives");
    drop((hs, likes));
    assert_eq!(rig.lost(), 5, "and what is lost is said");
}

#[test]
fn without_lanes_a_flush_is_an_add_and_what_is_unknown_is_lost_and_said() {
    let mut can = Capability::all();
    can.put_if_newer = false;
    let rig = Rig::with(20, can);
    let hs = rig.process("a");
    let likes = hs.buffered("k").unwrap();
    rig.add(&likes, 5);
    rig.rt.block_on(likes.flush()).unwrap();
    rig.store.faults().next(On::Only(Op::Add), Fault::NotApplied);
    rig.add(&likes, 10);
    rig.rt.run_for(2 * SEC);
    assert_eq!((rig.sum(&likes), rig.lost()), (15, 0), "what was not applied is sent again");
    rig.store.faults().next(On::Only(Op::Add), Fault::UnknownApplied);
    rig.add(&likes, 100);
    let error = rig.rt.block_on(likes.flush()).unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    rig.rt.run_for(2 * SEC);
    assert_eq!((rig.sum(&likes), rig.lost(), likes.pending()), (115, 100, 0));
}

#[test]
fn a_correction_counts_once_per_epoch() {
    let rig = Rig::new(21);
    let likes = rig.process("a").buffered("k").unwrap();
    rig.add(&likes, 100);
    rig.rt.block_on(likes.flush()).unwrap();
    let correct = |epoch, amount| rig.rt.block_on(likes.correct(epoch, amount)).unwrap();
    assert!(correct(7, 11));
    assert_eq!(rig.sum(&likes), 111);
    assert!(!correct(7, 11) && !correct(6, 500), "repeated and older jobs change nothing");
    assert_eq!(rig.sum(&likes), 111);
    assert!(correct(8, 12));
    let parts = rig.rt.block_on(likes.parts()).unwrap();
    assert_eq!((parts.counted(), parts.total()), (Some(100), Some(112)));
}

#[test]
fn what_was_counted_before_the_counter_was_buffered_counts() {
    let rig = Rig::new(22);
    let hs = rig.process("a");
    rig.rt.block_on(hs.counter("k").add(40)).unwrap();
    let likes = hs.buffered("k").unwrap();
    assert_eq!(rig.sum(&likes), 40);
    rig.add(&likes, 2);
    rig.rt.block_on(likes.flush()).unwrap();
    rig.rt.block_on(hs.counter("k").add(3)).unwrap();
    assert_eq!(rig.sum(&likes), 45);
}

#[test]
fn a_sum_of_a_buffered_counter_is_cached_and_knows_its_age() {
    let rig = Rig::new(23);
    let hs = rig.process("a");
    let likes = hs.buffered("k").unwrap();
    rig.add(&likes, 2);
    rig.rt.block_on(likes.flush()).unwrap();
    let before = rig.store.reads_of("k");
    for _ in 0..100 {
        let sum = rig.rt.block_on(likes.sum()).unwrap();
        assert_eq!(sum.total(), 2);
        assert!(sum.age() <= SEC);
        rig.rt.run_for(50 * MS);
    }
    assert!((5..=6).contains(&(rig.store.reads_of("k") - before)));
}

#[test]
fn options_that_make_no_sense_are_refused() {
    for adds in [
        Adds::new().flush_every(Duration::ZERO),
        Adds::new().pending_max(0),
        Adds::new().lanes_max(0),
        Adds::new().lanes_max(257),
        Adds::new().writer("two words"),
        Adds::new().writer(""),
    ] {
        let error = Heatsink::builder(MemoryStore::new(1)).adds(adds).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

/// Real threads on the stripes while a task collects them: nothing is lost and nothing doubled.
#[test]
fn adds_of_many_threads_are_all_there() {
    let store = MemoryStore::new(2);
    let adds = Adds::new().flush_every(2 * MS).pending_max(1 << 40);
    let hs = Heatsink::builder(store).adds(adds).build().unwrap();
    let likes = hs.buffered("k").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..200_000).for_each(|_| ready(likes.add(1)).unwrap()));
        }
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let sum = runtime.block_on(async {
        likes.flush().await.unwrap();
        likes.sum_with(Duration::ZERO).await.unwrap().total()
    });
    assert_eq!((sum, likes.pending()), (800_000, 0));
}

/// A task that ends for want of work and starts again comes at another phase.
#[test]
fn a_counter_in_use_keeps_its_task_and_its_phase() {
    let rig = Rig::new(24);
    let likes = rig.process("a").buffered("k").unwrap();
    ready(likes.add(1)).unwrap();
    rig.rt.run_for(SEC);
    let before = rig.writes();
    for _ in 0..2_000 {
        ready(likes.add(1)).unwrap();
        rig.rt.run_for(50 * MS);
    }
    assert_eq!(rig.writes() - before, 200);
}
