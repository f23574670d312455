//! The shell's glue under random schedules: locks, swaps and thread-locals are shuttle's.
//!
//! Runs only as `RUSTFLAGS="--cfg heatsink_shuttle" cargo test --test shuttle` (`tests/run` does);
//! a failing schedule is printed by shuttle and can be replayed from that string.
#![cfg(heatsink_shuttle)]

use bytes::Bytes;
use heatsink::runtime::{BoxFuture, Clock, Runtime};
use heatsink::store::{Store, Stored};
use heatsink::{Heatsink, Key, Result, Treatment};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
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
