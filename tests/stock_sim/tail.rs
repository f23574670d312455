//! How fast the last units sell: not slower, by much, than the first.

use heatsink::engine::time::Tick;
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Loads, Stock, Taken};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const UNITS: u64 = 4_000;
const BUCKETS: usize = 16;
/// Of one row.
const ROW_PER_SEC: u32 = 1_000;
/// Half of what sixteen rows take. The buyers themselves keep this pace, from the first on, so that
/// the first hundred show how fast a full stock sells.
const BUYERS_PER_SEC: u64 = 8_000;

struct Process {
    rt: SimRuntime,
    stock: Stock,
}

fn processes(n: u64, store: &MemoryStore, clock: &SimRuntime) -> Vec<Process> {
    let spawn = |seed| {
        let rt = SimRuntime::with_clock(seed, clock.clock());
        let hs = Heatsink::builder(store.clone())
            .runtime(rt.clone())
            .seed(seed)
            .loads(Loads::new().timeout(Duration::from_secs(1)))
            .build()
            .unwrap();
        Process { rt, stock: hs.stock("sku").unwrap() }
    };
    (1..=n).map(spawn).collect()
}

/// Lets everybody run until then.
fn drive(clock: &SimRuntime, all: &[Process], until: Tick) {
    loop {
        let now = clock.now();
        let mut moved = clock.step();
        for process in all {
            while process.rt.jump(now) {}
            moved |= process.rt.step();
        }
        if moved {
            continue;
        }
        if now >= until {
            return;
        }
        let next = now.after(Duration::from_micros(125)).min(until);
        while clock.jump(next) {}
        clock.clock().set(next);
    }
}

/// The time of each sale, in order.
fn sell(n: u64) -> Vec<Tick> {
    let clock = SimRuntime::new(7);
    let store = MemoryStore::builder()
        .shards(64)
        .ceiling(ROW_PER_SEC)
        .queue_max(Duration::from_millis(100))
        .latency(Duration::from_millis(1))
        .runtime(clock.clone())
        .seed(42)
        .build();
    let all = processes(n, &store, &clock);
    let stock = all[0].stock.clone();
    all[0].rt.spawn(async move { assert!(stock.create(UNITS, BUCKETS).await.unwrap()) });
    drive(&clock, &all, clock.now().after(Duration::from_secs(1)));
    let sold = Arc::new(Mutex::new(Vec::new()));
    let began = clock.now();
    for buyer in 0..UNITS + 400 {
        let at = began.after(Duration::from_nanos(buyer * 1_000_000_000 / BUYERS_PER_SEC));
        drive(&clock, &all, at);
        let process = &all[(buyer % n) as usize];
        let (stock, rt, sold) = (process.stock.clone(), process.rt.clone(), sold.clone());
        process.rt.spawn(async move {
            if let Ok(Taken::Held(_)) = stock.take(1, format!("order:{buyer}")).await {
                sold.lock().unwrap().push(rt.now());
            }
        });
    }
    drive(&clock, &all, clock.now().after(Duration::from_secs(2)));
    let mut sold = std::mem::take(&mut *sold.lock().unwrap());
    sold.sort_unstable();
    all.iter().for_each(|p| p.rt.shutdown());
    clock.shutdown();
    sold
}

#[test]
fn the_last_hundred_units_sell_in_at_most_three_times_the_time_of_the_first() {
    for n in [1, 4] {
        let sold = sell(n);
        assert_eq!(sold.len() as u64, UNITS, "all of it is sold, and no unit twice");
        let time = |units: &[Tick]| units.last().unwrap().since(units[0]).as_secs_f64() * 1e3;
        let hundreds: Vec<f64> = sold.chunks(100).map(time).collect();
        let (first, last) = (hundreds[0], hundreds[hundreds.len() - 1]);
        println!("{n} processes: first hundred {first:.1} ms, last {last:.1} ms: {hundreds:.0?}");
        assert!(last <= 3.0 * first, "{n} processes: {hundreds:.1?}");
    }
}
