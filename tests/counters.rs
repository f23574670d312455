//! What coalesced adds and sums promise, one test per promise.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "counters/expiring.rs"]
mod expiring;
#[path = "counters/grow_only.rs"]
mod grow_only;
#[path = "counters/joined.rs"]
mod joined;
#[path = "counters/rollback.rs"]
mod rollback;
#[path = "counters/salted.rs"]
mod salted;
#[path = "counters/totals.rs"]
mod totals;

use heatsink::store::memory::{Fault, On, Op};
use heatsink::store::{MemoryStore, Store};
use heatsink::testing::SimRuntime;
use heatsink::{Adds, ErrorKind, Heatsink, Key, Loads, Outcome, Read, Treatment};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

struct Rig {
    rt: SimRuntime,
    store: MemoryStore,
    hs: Heatsink,
}

type Answers = Arc<Mutex<Vec<heatsink::Result<()>>>>;

impl Rig {
    fn new(seed: u64) -> Rig {
        Rig::with(seed, Loads::new())
    }

    fn with(seed: u64, loads: Loads) -> Rig {
        let rt = SimRuntime::new(seed);
        let store = MemoryStore::builder().latency(10 * MS).runtime(rt.clone()).build();
        let adds = Adds::new().sum_ttl(200 * MS);
        let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed).loads(loads);
        let hs = hs.adds(adds).build().unwrap();
        Rig { rt, store, hs }
    }

    /// Each amount by a task of its own.
    fn spawn(&self, rt: &SimRuntime, amounts: &[i64]) -> Answers {
        let answers = Answers::default();
        for &n in amounts {
            let (hs, answers) = (self.hs.clone(), answers.clone());
            rt.spawn(async move {
                let answer = hs.counter("k").add(n).await;
                answers.lock().unwrap().push(answer);
            });
        }
        answers
    }

    fn total(&self) -> i64 {
        let stored = self.store.get_now("k");
        stored.map_or(0, |s| std::str::from_utf8(&s.bytes).unwrap().parse().unwrap())
    }
}

#[test]
fn adds_that_come_while_one_is_under_way_travel_together() {
    let rig = Rig::new(1);
    let first = rig.spawn(&rig.rt, &[1]);
    rig.rt.run_for(MS);
    let others = rig.spawn(&rig.rt, &[5, -2, 100, 7]);
    rig.rt.run_for(6 * MS);
    assert_eq!(rig.total(), 1);
    assert!(others.lock().unwrap().is_empty(), "acknowledged means stored");
    rig.rt.run_for(100 * MS);
    assert_eq!(rig.total(), 111);
    assert_eq!(rig.store.writes_of("k"), 2);
    assert_eq!((first.lock().unwrap().len(), others.lock().unwrap().len()), (1, 4));
    assert!(others.lock().unwrap().iter().all(Result::is_ok));
    let stats = rig.hs.add_stats();
    assert_eq!((stats.adds, stats.batches), (5, 2));
}

#[test]
fn at_most_one_add_per_round_trip_whatever_the_number_of_callers() {
    let rig = Rig::new(2);
    for _ in 0..256 {
        let (hs, rt) = (rig.hs.clone(), rig.rt.clone());
        rig.rt.spawn(async move {
            let counter = hs.counter("k");
            let end = rt.now().after(Duration::from_secs(1));
            while rt.now() < end {
                counter.add(1).await.unwrap();
            }
        });
    }
    rig.rt.run_for(Duration::from_secs(2));
    let stats = rig.hs.add_stats();
    assert_eq!(rig.total() as u64, stats.adds);
    assert!(stats.batches <= 102, "{stats:?}");
    assert!(stats.adds >= 190 * 100, "{stats:?}");
}

#[test]
fn an_outcome_is_that_of_exactly_the_adds_that_the_operation_carried() {
    for (fault, outcome, left) in [
        (Fault::UnknownApplied, Outcome::Unknown, 1111),
        (Fault::UnknownNotApplied, Outcome::Unknown, 1001),
        (Fault::NotApplied, Outcome::NotApplied, 1001),
        (Fault::Panic, Outcome::Unknown, 1001),
    ] {
        let rig = Rig::new(3);
        let first = rig.spawn(&rig.rt, &[1]);
        rig.rt.run_for(MS);
        let second = rig.spawn(&rig.rt, &[10, 100]);
        rig.store.faults().next(On::Only(Op::Add), fault);
        rig.rt.run_for(12 * MS);
        let third = rig.spawn(&rig.rt, &[1000]);
        rig.rt.run_for(100 * MS);
        assert!(first.lock().unwrap()[0].is_ok());
        for answer in second.lock().unwrap().iter() {
            assert_eq!(answer.as_ref().unwrap_err().outcome(), outcome);
        }
        assert_eq!(second.lock().unwrap().len(), 2);
        assert!(third.lock().unwrap()[0].is_ok());
        assert_eq!((rig.total(), rig.store.writes_of("k")), (left, 3), "never retried");
    }
}

#[test]
fn a_store_that_never_answers_holds_the_adds_up_until_the_time_limit_only() {
    let rig = Rig::with(4, Loads::new().timeout(300 * MS));
    rig.store.faults().next(On::Only(Op::Add), Fault::LostReply);
    let lost = rig.spawn(&rig.rt, &[1]);
    rig.rt.run_for(50 * MS);
    let next = rig.spawn(&rig.rt, &[10]);
    rig.rt.run_for(200 * MS);
    assert!(next.lock().unwrap().is_empty());
    rig.rt.run_for(100 * MS);
    let error = lost.lock().unwrap()[0].clone().unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (ErrorKind::Timeout, Outcome::Unknown));
    assert!(next.lock().unwrap()[0].is_ok());
    assert_eq!(rig.total(), 11);
    assert_eq!(rig.hs.add_stats().adds_unknown, 1);
}

#[test]
fn callers_that_are_dropped_stay_in_the_sum_the_leader_too() {
    for wait in [0, 1, 4, 9] {
        let rig = Rig::new(5);
        let other = SimRuntime::with_clock(6, rig.rt.clock());
        let gone = rig.spawn(&other, &[1, 10, 100]);
        while other.step() {}
        rig.rt.run_for(MS * wait);
        let stay = rig.spawn(&rig.rt, &[1000]);
        rig.rt.run_for(MS);
        other.shutdown();
        rig.rt.run_for(100 * MS);
        assert!(gone.lock().unwrap().is_empty());
        assert!(stay.lock().unwrap()[0].is_ok());
        assert_eq!((rig.total(), rig.store.writes_of("k")), (1111, 2));
    }
}

#[test]
fn callers_that_are_all_dropped_are_still_added() {
    let rig = Rig::new(7);
    let other = SimRuntime::with_clock(8, rig.rt.clock());
    rig.spawn(&rig.rt, &[1]);
    rig.rt.run_for(MS);
    rig.spawn(&other, &[10, 100]);
    while other.step() {}
    other.shutdown();
    rig.rt.run_for(100 * MS);
    assert_eq!(rig.total(), 111);
}

/// The whole runtime dies under a batch that is under way and one that waits.
#[test]
fn when_the_runtime_dies_what_was_sent_is_unknown_and_the_next_caller_goes_on() {
    let rig = Rig::new(9);
    let dying = SimRuntime::with_clock(10, rig.rt.clock());
    let hs = Heatsink::builder(rig.store.clone()).runtime(dying.clone()).seed(9).build().unwrap();
    let (a, b) = (hs.clone(), hs.clone());
    dying.spawn(async move { drop(a.counter("k").add(1).await) });
    while dying.step() {}
    let answers = Answers::default();
    let kept = answers.clone();
    rig.rt.spawn(async move {
        let answer = b.counter("k").add(10).await;
        kept.lock().unwrap().push(answer);
    });
    rig.rt.run_for(MS);
    dying.shutdown();
    rig.rt.run_for(100 * MS);
    assert!(answers.lock().unwrap()[0].is_ok());
    assert!(matches!(rig.total(), 10 | 11));
}

#[test]
fn a_sum_that_does_not_fit_is_refused_and_changes_nothing() {
    let rig = Rig::new(11);
    let first = rig.spawn(&rig.rt, &[i64::MAX]);
    rig.rt.run_for(50 * MS);
    let second = rig.spawn(&rig.rt, &[1]);
    rig.rt.run_for(50 * MS);
    assert!(first.lock().unwrap()[0].is_ok());
    let error = second.lock().unwrap()[0].clone().unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (ErrorKind::Overflow, Outcome::NotApplied));
    assert_eq!(rig.total(), i64::MAX);
    let error = rig.rt.block_on(rig.hs.grow_only("k").add(u64::MAX)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overflow);
}

/// The near cache never shows a counter as it was before an add that this process has finished.
#[test]
fn a_near_cached_read_of_a_counter_stays_exact() {
    let rig = Rig::new(12);
    rig.hs.control().pin("k", Treatment::near()).unwrap();
    let hs = rig.hs.clone();
    let cached = rig.rt.block_on(async move {
        let counter = hs.counter("k");
        let mut cached = 0;
        for n in 1..50 {
            counter.add(1).await.unwrap();
            for _ in 0..3 {
                let value = hs.get("k").await.unwrap().unwrap();
                cached += u64::from(value.source() != heatsink::Source::Load);
                assert_eq!(value, n.to_string().as_bytes());
            }
        }
        cached
    });
    assert!(cached > 50, "{cached}");
}

#[test]
fn a_sum_is_loaded_once_per_ttl_whatever_the_number_of_readers_and_adds() {
    let rig = Rig::new(13);
    for task in 0..20 {
        let (hs, rt) = (rig.hs.clone(), rig.rt.clone());
        rig.rt.spawn(async move {
            let counter = hs.counter("k");
            let end = rt.now().after(Duration::from_secs(2));
            while rt.now() < end {
                if task < 5 {
                    counter.add(1).await.unwrap();
                } else {
                    let sum = counter.sum().await.unwrap();
                    assert!(sum.age() <= 210 * MS, "{sum:?}");
                }
                rt.sleep(MS).await;
            }
        });
    }
    rig.rt.run_for(Duration::from_secs(3));
    assert!((9..=12).contains(&rig.store.reads_of("k")), "{}", rig.store.reads_of("k"));
}

#[test]
fn a_sum_with_no_age_has_every_add_that_was_acknowledged_before() {
    let rig = Rig::new(14);
    let hs = rig.hs.clone();
    rig.rt.block_on(async move {
        let counter = hs.counter("k");
        for n in 1..20 {
            counter.add(1).await.unwrap();
            let old = counter.sum().await.unwrap();
            assert!(old.total() <= n);
            assert_eq!(counter.sum_with(Duration::ZERO).await.unwrap().total(), n);
        }
    });
}

#[test]
fn a_counter_that_only_grows_never_shows_less_than_before() {
    let rig = Rig::new(15);
    let hs = rig.hs.clone();
    let views = hs.grow_only("k");
    rig.rt.block_on(views.add(10)).unwrap();
    assert_eq!(rig.rt.block_on(views.sum_with(Duration::ZERO)).unwrap().total(), 10);
    // The store was restored from a backup.
    rig.store.put_now("k", "4").unwrap();
    assert_eq!(rig.rt.block_on(hs.grow_only("k").sum_with(Duration::ZERO)).unwrap().total(), 10);
    assert_eq!(rig.rt.block_on(hs.counter("k").sum_with(Duration::ZERO)).unwrap().total(), 4);
}

#[test]
fn what_is_no_integer_is_an_error() {
    let rig = Rig::new(16);
    rig.store.put_now("k", "many").unwrap();
    let hs = rig.hs.clone();
    let (add, sum) = rig.rt.block_on(async move {
        (hs.counter("k").add(1).await.unwrap_err(), hs.counter("k").sum().await.unwrap_err())
    });
    assert_eq!((add.kind(), sum.kind()), (ErrorKind::WrongType, ErrorKind::WrongType));
    let long = vec![b'k'; heatsink::key::KEY_BYTES_MAX + 1];
    let error = rig.rt.block_on(rig.hs.counter(&long).add(1)).unwrap_err();
    assert_eq!((error.kind(), error.outcome()), (ErrorKind::Limit, Outcome::NotApplied));
}

#[test]
fn where_too_many_wait_an_add_goes_by_itself() {
    let rig = Rig::with(17, Loads::new().waiters_max(4));
    let answers = rig.spawn(&rig.rt, &[1; 20]);
    rig.rt.run_for(200 * MS);
    assert_eq!(answers.lock().unwrap().iter().filter(|a| a.is_ok()).count(), 20);
    assert_eq!(rig.total(), 20);
    assert!(rig.hs.add_stats().bypassed > 0);
}

/// An add of unknown outcome may still land: until it cannot, the key is not cached.
#[test]
fn an_add_of_unknown_outcome_keeps_the_key_uncached() {
    let rig = Rig::new(18);
    rig.hs.control().pin("k", Treatment::near()).unwrap();
    rig.store.faults().next(On::Only(Op::Add), Fault::UnknownLater(500 * MS));
    let hs = rig.hs.clone();
    let store = rig.store.clone();
    let rt = rig.rt.clone();
    rig.rt.block_on(async move {
        assert!(hs.counter("k").add(1).await.unwrap_err().is_unknown());
        assert!(hs.get("k").await.unwrap().is_none());
        rt.sleep(600 * MS).await;
        let now = store.get(&Key::from("k")).await.unwrap().unwrap();
        assert_eq!(hs.get_with("k", Read::new()).await.unwrap().unwrap(), &now.bytes[..]);
    });
}

#[test]
fn plain_threads_count_as_tasks_do() {
    let hs = heatsink::blocking::Heatsink::new(MemoryStore::new(8)).unwrap();
    let (likes, views) = (hs.counter("likes"), hs.grow_only("views"));
    let (plays, shares) = (hs.approximate("plays", 4), hs.buffered("shares").unwrap());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    likes.add(3).unwrap();
                    likes.add(-1).unwrap();
                    views.add(2).unwrap();
                    plays.add().unwrap();
                    shares.add(1).unwrap();
                }
            });
        }
    });
    assert_eq!(likes.sum_with(Duration::ZERO).unwrap().total(), 4000);
    assert_eq!(views.sum_with(Duration::ZERO).unwrap().total(), 4000);
    let about = plays.sum().unwrap();
    assert!((about.total() as f64 - 2000.0).abs() < 6.0 * about.standard_error(), "{about:?}");
    shares.flush().unwrap();
    shares.add_durable(5).unwrap();
    assert_eq!((shares.sum_with(Duration::ZERO).unwrap().total(), shares.pending()), (2005, 0));
    // A recount found five too many.
    assert_eq!(shares.parts().unwrap().counted(), Some(2005));
    assert!(shares.correct(1, -5).unwrap() && !shares.correct(1, -9).unwrap());
    assert_eq!(shares.sum_with(Duration::ZERO).unwrap().total(), 2000);
    let stats = hs.as_async().stats().adds;
    assert!(stats.batches <= stats.adds && stats.flushes >= 2, "{stats:?}");
    hs.shutdown();
}
