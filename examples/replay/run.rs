//! The replay itself: handles, store and clock.

use crate::Args;
use crate::check::Checker;
use crate::trace::{Row, Trace};
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Key, Treatment};
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

/// What the store takes there and back, so that loads and writes overlap as they do in life.
const LATENCY: Duration = Duration::from_millis(1);
/// After the last request everything has ended long before this.
const DRAIN_SECS: u32 = 60;
const SEED: u64 = 1;

pub(crate) struct Outcome {
    pub(crate) checker: Checker,
    pub(crate) pinned: usize,
    pub(crate) before: Vec<u64>,
    pub(crate) after: Vec<u64>,
    pub(crate) reads_to_store: u64,
    pub(crate) writes_to_store: u64,
    /// The ten most used keys, and how many reads of each reached the store.
    pub(crate) top: Vec<(usize, u64)>,
    pub(crate) virtual_s: f64,
}

struct World {
    rt: SimRuntime,
    servers: Vec<Heatsink>,
    keys: Vec<Key>,
    checker: Mutex<Checker>,
}

pub(crate) fn run(trace: &mut Trace, args: &Args, progress: bool) -> Result<Outcome, String> {
    let rt = SimRuntime::new(SEED);
    let store = MemoryStore::builder()
        .shards(args.shards)
        .latency(LATENCY)
        .runtime(rt.clone())
        .seed(SEED)
        .build();
    let mut before = vec![0; args.shards];
    for (key, uses) in trace.keys.iter().zip(&trace.uses) {
        before[store.place(key)] += uses.reads + uses.writes;
        store.put_now(key.clone(), "0:trace").map_err(|e| format!("filling the store: {e}"))?;
    }
    let pins: Vec<Key> =
        trace.top(args.pin_top, |u| u.reads).into_iter().map(|k| trace.keys[k].clone()).collect();
    let servers = (0..args.servers).map(|i| server(&store, &rt, i as u64, &pins));
    let servers = servers.collect::<heatsink::Result<Vec<_>>>().map_err(|e| e.to_string())?;
    let world =
        Arc::new(World { rt, servers, keys: trace.keys.clone(), checker: Mutex::default() });
    let begun = world.rt.now();
    let total = trace.rows.len() as u64;
    world.rt.block_on(feed(&world, std::mem::take(&mut trace.rows), progress));
    drain(&world, total);
    let counts = store.counts();
    let top = trace.top(10, |u| u.reads + u.writes).into_iter();
    Ok(Outcome {
        pinned: pins.len(),
        before,
        after: counts.iter().map(|c| c.reads + c.writes).collect(),
        reads_to_store: counts.iter().map(|c| c.reads).sum(),
        writes_to_store: counts.iter().map(|c| c.writes).sum(),
        top: top.map(|k| (k, store.reads_of(trace.keys[k].clone()))).collect(),
        virtual_s: world.rt.now().since(begun).as_secs_f64(),
        checker: std::mem::take(&mut *world.checker.lock()),
    })
}

fn server(
    store: &MemoryStore,
    rt: &SimRuntime,
    i: u64,
    pins: &[Key],
) -> heatsink::Result<Heatsink> {
    let builder = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(SEED + i);
    let hs = builder.cores(NonZeroUsize::MIN).build()?;
    hs.control().pin_all(pins, Treatment::near())?;
    Ok(hs)
}

/// Sends every row at its time, whatever has become of those before.
async fn feed(world: &Arc<World>, rows: Vec<Row>, progress: bool) {
    let start = world.rt.now();
    let step = (rows.len() / 100).max(1);
    for (i, row) in rows.iter().enumerate() {
        let due = start.after(Duration::from_nanos(row.at_ns()));
        let wait = due.since(world.rt.now());
        if !wait.is_zero() {
            world.rt.sleep(wait).await;
        }
        let server = (scatter(i as u64) % world.servers.len() as u64) as usize;
        let (world, key) = (world.clone(), row.key());
        let rt = world.rt.clone();
        if row.is_write() {
            rt.spawn(async move { write(&world, server, key).await });
        } else {
            rt.spawn(async move { read(&world, server, key).await });
        }
        if progress && i % step == 0 {
            eprint!("\rreplaying {:3} %", i / step);
        }
    }
    if progress {
        eprint!("\r               \r");
    }
}

/// Which server takes a row must not follow a pattern of the trace.
fn scatter(row: u64) -> u64 {
    let mut x = row.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

async fn read(world: &World, server: usize, key: usize) {
    let floor = world.checker.lock().floor(key, server, world.rt.now().0);
    let got = world.servers[server].get(&world.keys[key]).await;
    let mut checker = world.checker.lock();
    match got {
        Ok(Some(value)) => checker.read(floor, &value, value.age()),
        Ok(None) => {
            checker.failed(format!("{}: a key that is there was not found", world.keys[key]))
        }
        Err(error) => checker.failed(error.to_string()),
    }
}

async fn write(world: &World, server: usize, key: usize) {
    let version = world.checker.lock().send(key);
    let value = format!("{version}:{server}");
    let put = world.servers[server].put(&world.keys[key], value).await;
    let mut checker = world.checker.lock();
    match put {
        Ok(()) => checker.returned(key, server, version, world.rt.now().0),
        Err(error) => checker.failed(error.to_string()),
    }
}

fn drain(world: &World, total: u64) {
    let ended = || {
        let checker = world.checker.lock();
        checker.reads + checker.writes + checker.errors
    };
    for _ in 0..DRAIN_SECS * 100 {
        if ended() >= total {
            return;
        }
        world.rt.run_for(Duration::from_millis(10));
    }
    let missing = total.saturating_sub(ended());
    for _ in 0..missing {
        world.checker.lock().failed("a request has not ended".into());
    }
}
