//! The shell's glue under random schedules: locks, swaps and thread-locals are shuttle's.
//!
//! Runs only as `RUSTFLAGS="--cfg heatsink_shuttle" cargo test --test shuttle` (`tests/run` does);
//! a failing schedule is printed by shuttle and can be replayed from that string.
#![cfg(heatsink_shuttle)]

use bytes::Bytes;
use heatsink::runtime::{BoxFuture, Clock, Runtime};
use heatsink::store::{Store, Stored};
use heatsink::{Admission, Budget, Bulkhead, Heatsink, Key, Result, Retries, Treatment};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use std::future::Future;
use std::time::Duration;

/// How many schedules are tried.
const SCHEDULES: usize = 2_000;

struct Tasks(Clock);

impl Runtime for Tasks {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        drop(shuttle::future::spawn(task));
    }

    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }

    fn clock(&self) -> Clock {
        self.0.clone()
    }
}

/// One register, with a step of the scheduler before and after each operation.
struct Register(Arc<AtomicU64>);

impl Store for Register {
    async fn get(&self, _: &Key) -> Result<Option<Stored>> {
        shuttle::future::yield_now().await;
        let value = self.0.load(Ordering::SeqCst);
        shuttle::future::yield_now().await;
        Ok(Some(Stored::new(value.to_le_bytes().to_vec())))
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        let mut all = Vec::new();
        for key in keys {
            all.push(self.get(key).await);
        }
        all
    }

    async fn put(&self, _: &Key, value: Bytes, _: Option<Duration>) -> Result<()> {
        shuttle::future::yield_now().await;
        self.0.store(number(&value), Ordering::SeqCst);
        shuttle::future::yield_now().await;
        Ok(())
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        keys.iter().map(|_| Ok(false)).collect()
    }

    async fn add(&self, _: &Key, _: i64) -> Result<i64> {
        Ok(0)
    }
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap_or_default())
}

/// Two readers and a writer; the operator pins and unpins meanwhile. `announced`: the writer goes
/// through the handle.
fn race(announced: bool) {
    let register = Arc::new(AtomicU64::new(0));
    let hs = Heatsink::builder(Register(register.clone()))
        .runtime(Tasks(Clock::manual()))
        .seed(1)
        .build()
        .unwrap();
    hs.control().pin("k", Treatment::near()).unwrap();
    let acked = Arc::new(AtomicU64::new(0));
    let mut threads = Vec::new();
    for _ in 0..2 {
        let (hs, acked) = (hs.clone(), acked.clone());
        threads.push(shuttle::thread::spawn(move || {
            for _ in 0..4 {
                let floor = acked.load(Ordering::SeqCst);
                let value = shuttle::future::block_on(hs.get("k")).unwrap().unwrap();
                assert!(number(&value) >= floor, "stale: {} < {floor}", number(&value));
            }
        }));
    }
    let (writer, to) = (hs.clone(), acked.clone());
    threads.push(shuttle::thread::spawn(move || {
        for v in 1..=2u64 {
            // A random scheduler would otherwise let the writer finish before the first load has.
            for _ in 0..30 {
                shuttle::thread::yield_now();
            }
            if announced {
                let put = writer.put("k", v.to_le_bytes().to_vec());
                shuttle::future::block_on(put).unwrap();
            } else {
                register.store(v, Ordering::SeqCst);
            }
            to.store(v, Ordering::SeqCst);
        }
    }));
    threads.push(shuttle::thread::spawn(move || {
        hs.control().unpin("k");
        hs.control().pin("k", Treatment::near()).unwrap();
        hs.invalidate("k");
    }));
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn no_schedule_of_the_shell_shows_a_value_from_before_an_acknowledged_write() {
    shuttle::check_random(|| race(true), SCHEDULES);
}

#[test]
#[should_panic(expected = "stale")]
fn a_write_that_is_not_announced_is_caught() {
    shuttle::check_random(|| race(false), SCHEDULES);
}

#[test]
fn hits_happen_under_the_shim_too() {
    shuttle::check_random(
        || {
            let register = Arc::new(AtomicU64::new(7));
            let hs = Heatsink::builder(Register(register)).runtime(Tasks(Clock::manual()));
            let hs = hs.seed(1).build().unwrap();
            hs.control().pin("k", Treatment::near()).unwrap();
            shuttle::future::block_on(hs.get("k")).unwrap().unwrap();
            assert_eq!(hs.try_read_with("k", number), Some(7), "{}", hs.explain("k"));
        },
        10,
    );
}

/// A store with room for one call, that says so when a second comes in.
struct Narrow(Arc<AtomicU64>);

/// One call inside, until it is dropped.
struct Inside<'a>(&'a AtomicU64);

impl Inside<'_> {
    fn enter(narrow: &Narrow) -> Inside<'_> {
        assert_eq!(narrow.0.fetch_add(1, Ordering::SeqCst), 0, "two calls inside");
        Inside(&narrow.0)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Store for Narrow {
    async fn get(&self, _: &Key) -> Result<Option<Stored>> {
        let _inside = Inside::enter(self);
        shuttle::future::yield_now().await;
        Ok(None)
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        keys.iter().map(|_| Ok(None)).collect()
    }

    async fn put(&self, _: &Key, _: Bytes, _: Option<Duration>) -> Result<()> {
        let _inside = Inside::enter(self);
        shuttle::future::yield_now().await;
        Ok(())
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        keys.iter().map(|_| Ok(false)).collect()
    }

    async fn add(&self, _: &Key, _: i64) -> Result<i64> {
        Ok(0)
    }
}

#[test]
fn no_schedule_lets_two_calls_through_a_bulkhead_of_one_or_loses_its_place() {
    shuttle::check_random(
        || {
            let budget = Budget::per_sec(1_000_000);
            let hs = Heatsink::builder(Narrow(Arc::new(AtomicU64::new(0))))
                .runtime(Tasks(Clock::manual()))
                .seed(1)
                .bulkhead(Bulkhead::new().in_flight_max(1).queue_max(8))
                .retries(Retries::new())
                .admission(Admission::new().per_key(budget).freeze(Duration::from_secs(1)))
                .build()
                .unwrap();
            let mut threads = Vec::new();
            for name in ["a", "b"] {
                let hs = hs.clone();
                threads.push(shuttle::thread::spawn(move || {
                    shuttle::future::block_on(hs.get(name)).unwrap();
                    shuttle::future::block_on(hs.put(name, "x")).unwrap();
                }));
            }
            // Gives up wherever it is: before the queue, in it, with the place on its way, inside.
            threads.push(shuttle::thread::spawn(move || {
                for polls in 0..3 {
                    let mut put = Box::pin(hs.put("c", "x"));
                    for _ in 0..polls {
                        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                        if put.as_mut().poll(&mut cx).is_ready() {
                            break;
                        }
                        shuttle::thread::yield_now();
                    }
                }
            }));
            for thread in threads {
                thread.join().unwrap();
            }
        },
        SCHEDULES,
    );
}
