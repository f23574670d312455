//! The replay itself: handles, store and clock.

use crate::check::Checker;
use crate::detection::{Detection, LOOK};
use crate::trace::{Row, Trace};
use crate::{Args, Treat};
use heatsink::engine::time::Tick;
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Detect, Heatsink, Key, Treatment};
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
    /// Where keys were found and not pinned.
    pub(crate) detection: Option<Detection>,
}

struct World {
    rt: SimRuntime,
    servers: Vec<Heatsink>,
    keys: Vec<Key>,
    checker: Mutex<Checker>,
    detection: Option<Mutex<Detection>>,
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
    let (pins, detection) = plan(trace, args);
    let detect = detection.as_ref().map_or_else(Detect::pins_only, Detection::options);
    let servers = (0..args.servers).map(|i| server(&store, &rt, i as u64, &pins, &detect));
    let servers = servers.collect::<heatsink::Result<Vec<_>>>().map_err(|e| e.to_string())?;
    let keys = trace.keys.clone();
    let (checker, detection) = (Mutex::default(), detection.map(Mutex::new));
    let world = Arc::new(World { rt, servers, keys, checker, detection });
    let begun = world.rt.now();
    let total = trace.rows.len() as u64;
    for at in 0..args.servers {
        follow(&world, at).map_err(|e| e.to_string())?;
    }
    world.rt.block_on(feed(&world, std::mem::take(&mut trace.rows), progress));
    drain(&world, total, begun);
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
        detection: world.detection.as_ref().map(|d| {
            let empty = Detection::new(&Trace::default(), 0, 1.0);
            std::mem::replace(&mut *d.lock(), empty)
        }),
    })
}

/// The keys to pin, or how keys are to be found.
fn plan(trace: &Trace, args: &Args) -> (Vec<Key>, Option<Detection>) {
    let threshold = match args.treat {
        Treat::PinTop(n) => {
            let top = trace.top(n, |u| u.reads).into_iter();
            return (top.map(|k| trace.keys[k].clone()).collect(), None);
        }
        Treat::PromoteAt(rate) => rate,
        Treat::HotShare(share) => {
            let span_s = trace.rows.last().map_or(0.0, |row| row.at_ns() as f64 / 1e9);
            share * trace.rows.len() as f64 / args.servers as f64 / span_s.max(1e-9)
        }
    };
    (Vec::new(), Some(Detection::new(trace, args.servers, threshold.max(1e-3))))
}

/// Notes every change of a server's list, and how it stands at the end of each window.
fn follow(world: &Arc<World>, server: usize) -> heatsink::Result<()> {
    let Some(detection) = &world.detection else { return Ok(()) };
    let (window, windows) = detection.lock().windows();
    let begun = world.rt.now();
    let mut changes = world.servers[server].follow_hot_list()?;
    let at = world.clone();
    world.rt.spawn(async move {
        while let Some(list) = changes.next().await {
            let Some(detection) = &at.detection else { return };
            let at_ns = at.rt.now().since(begun).as_nanos() as u64;
            detection.lock().changed(server, at_ns, &list);
        }
    });
    let world = world.clone();
    world.rt.clone().spawn(async move {
        for ended in 0..windows {
            let due = begun.after(window * (ended as u32 + 1)).after(LOOK);
            world.rt.sleep(due.since(world.rt.now())).await;
            let Some(detection) = &world.detection else { return };
            let list = world.servers[server].hot_list();
            detection.lock().window_ended(server, ended, &list);
        }
    });
    Ok(())
}

fn server(
    store: &MemoryStore,
    rt: &SimRuntime,
    i: u64,
    pins: &[Key],
    detect: &Detect,
) -> heatsink::Result<Heatsink> {
    let builder = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(SEED + i);
    let hs = builder.detect(detect.clone()).cores(NonZeroUsize::MIN).build()?;
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
pub(crate) fn scatter(row: u64) -> u64 {
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

/// Lets everything end that was begun, and the last window of the detection too.
fn drain(world: &World, total: u64, begun: Tick) {
    if let Some(detection) = &world.detection {
        let (window, windows) = detection.lock().windows();
        world.rt.run_until(begun.after(window * windows as u32).after(2 * LOOK));
    }
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
