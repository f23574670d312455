//! The likes of one post, added up by six routers: on virtual time, with a crash and a recount.
//!
//! 2,400 likes a second come in over six routers. Each like is first written to a table of its own
//! (durable, one row per like, spread over the table), and then added to the post's counter. The
//! routers buffer the counter: a flush each half a second in place of a write per like. One router
//! is killed with 211 likes in its buffer and comes back under its name; the sum is short by 211
//! until a job recounts the table. Then the same traffic through plain coalesced adds.

use heatsink::engine::time::Tick;
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Adds, Buffered, Heatsink, rounded};
use serde_json::json;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const HELP: &str = "\
2,400 likes a second over six routers, one of which is killed: on virtual time, in a second or two.
Exit status 1 when heatsink does not keep its promise.

usage: likes [--json]
  --json   one JSON object on stdout, nothing else
  --help   this text";

const KEY: &str = "post:9:likes";
const MS: Duration = Duration::from_millis(1);
/// Likes a second of each router. The fifth has a little more: at 400 a second, no buffer would
/// ever hold 211.
const RATES: [u64; 6] = [390, 390, 390, 390, 450, 390];
const KILLED: usize = 4;
const IN_ITS_BUFFER: i64 = 211;
const ROUND_TRIP: Duration = Duration::from_millis(2);
/// The steps of the clock: a router's likes come 2.2 ms apart.
const STEP: Duration = Duration::from_micros(500);

type Fail = Box<dyn std::error::Error + Send + Sync>;

/// One process: it dies when its runtime does.
struct Router {
    rt: SimRuntime,
    likes: Buffered,
}

impl Router {
    fn start(
        at: usize,
        life: u64,
        world: &SimRuntime,
        store: &MemoryStore,
    ) -> Result<Router, Fail> {
        let seed = at as u64 + 100 * life;
        let rt = SimRuntime::with_clock(seed, world.clock());
        // The same name in every life, so that a restart goes on with the same lane.
        let adds = Adds::new().writer(format!("router-{at}"));
        let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed).adds(adds);
        Ok(Router { rt, likes: hs.build()?.buffered(KEY)? })
    }
}

/// The routers, the store of the counter, and the durable table of likes.
struct World {
    rt: SimRuntime,
    store: MemoryStore,
    table: MemoryStore,
    routers: Vec<Option<Router>>,
    /// Likes so far, by router.
    liked: [u64; 6],
    /// Thousandths of a like that are due and not yet whole.
    due: [u64; 6],
}

impl World {
    fn new() -> Result<World, Fail> {
        let rt = SimRuntime::new(9);
        let store =
            MemoryStore::builder().shards(4).latency(ROUND_TRIP).runtime(rt.clone()).build();
        let start = |at| Router::start(at, 0, &rt, &store).map(Some);
        let routers = (0..RATES.len()).map(start).collect::<Result<_, Fail>>()?;
        let table = MemoryStore::builder().shards(4).runtime(rt.clone()).build();
        Ok(World { rt, store, table, routers, liked: [0; 6], due: [0; 6] })
    }

    /// One step of the clock, with or without likes.
    fn step(&mut self, likes: bool) -> Result<(), Fail> {
        for (at, router) in self.routers.iter().enumerate() {
            let Some(router) = router else { continue };
            if likes {
                self.due[at] += RATES[at];
            }
            // The steps of a second are 2,000.
            while self.due[at] >= 2_000 {
                self.due[at] -= 2_000;
                let user = format!("liked:{at}:{}", self.liked[at]);
                self.table.put_now(user, KEY)?;
                now(router.likes.add(1)).ok_or("an add to the buffer waited")??;
                self.liked[at] += 1;
            }
        }
        let until = self.rt.now().after(STEP);
        loop {
            let mut moved = self.rt.step();
            for router in self.routers.iter().flatten() {
                while router.rt.jump(self.rt.now()) {}
                moved |= router.rt.step();
            }
            if !moved && !self.rt.jump(until) {
                break;
            }
        }
        self.rt.clock().set(until);
        Ok(())
    }

    fn run(&mut self, time: Duration, likes: bool) -> Result<(), Fail> {
        let end = self.rt.now().after(time);
        while self.rt.now() < end {
            self.step(likes)?;
        }
        Ok(())
    }

    /// Writes that have reached the store of the counter: all of them are for the one post.
    fn writes(&self) -> u64 {
        self.store.counts().iter().map(|c| c.writes).sum()
    }

    fn liked(&self) -> u64 {
        self.liked.iter().sum()
    }

    /// Runs something of a process that is not one of the routers.
    fn job<T>(&self, work: impl AsyncFnOnce(Buffered) -> heatsink::Result<T>) -> Result<T, Fail> {
        let hs = Heatsink::builder(self.store.clone()).runtime(self.rt.clone()).seed(7).build()?;
        let likes = hs.buffered(KEY)?;
        Ok(self.rt.block_on(work(likes))?)
    }

    fn sum(&self) -> Result<i64, Fail> {
        self.job(async |likes| Ok(likes.sum_with(Duration::ZERO).await?.total()))
    }

    fn short(&self) -> Result<i64, Fail> {
        Ok(self.liked() as i64 - self.sum()?)
    }
}

/// The output of a future that is ready at once.
fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => Some(out),
        Poll::Pending => None,
    }
}

/// What the buffered counter came to.
struct Story {
    likes_per_sec: f64,
    writes_per_sec: f64,
    short_at_rest: i64,
    short_after_crash: i64,
    short_after_recount: i64,
    liked: u64,
}

fn story() -> Result<Story, Fail> {
    const SECONDS: u32 = 10;
    let mut world = World::new()?;
    world.run(2_000 * MS, true)?;
    let (writes, liked) = (world.writes(), world.liked());
    world.run(1_000 * MS * SECONDS, true)?;
    let per_sec = |n: u64| n as f64 / f64::from(SECONDS);
    let writes_per_sec = per_sec(world.writes() - writes);
    let likes_per_sec = per_sec(world.liked() - liked);
    // One interval later, and the way to the store, everything is in the sum.
    world.run(500 * MS + ROUND_TRIP, false)?;
    let short_at_rest = world.short()?;

    world.run(1_000 * MS, true)?;
    let held = |world: &World| world.routers[KILLED].as_ref().map_or(0, |r| r.likes.pending());
    let patience = world.rt.now().after(5_000 * MS);
    while held(&world) != IN_ITS_BUFFER {
        if world.rt.now() > patience {
            return Err("the buffer never held 211 likes".into());
        }
        world.step(true)?;
    }
    if let Some(router) = world.routers[KILLED].take() {
        router.rt.shutdown();
    }
    world.run(1_000 * MS, true)?;
    world.routers[KILLED] = Some(Router::start(KILLED, 1, &world.rt, &world.store)?);
    world.run(2_000 * MS, true)?;
    world.run(500 * MS + ROUND_TRIP, false)?;
    let short_after_crash = world.short()?;

    // The recount: all routers have flushed, so what the table holds and what the lanes hold are
    // the same likes, but for those that the crash took.
    let rows = world.table.snapshot().len() as i64;
    world.job(async |likes| {
        let counted = likes.parts().await?.counted().unwrap_or(0);
        likes.correct(1, rows - counted).await
    })?;
    let short_after_recount = world.short()?;
    Ok(Story {
        likes_per_sec,
        writes_per_sec,
        short_at_rest,
        short_after_crash,
        short_after_recount,
        liked: world.liked(),
    })
}

/// The same traffic through plain coalesced adds: writes a second, and whether the count is exact.
fn coalesced(round_trip: Duration) -> Result<(f64, bool), Fail> {
    const SECONDS: u32 = 5;
    let rt = SimRuntime::new(9);
    let store = MemoryStore::builder().shards(4).latency(round_trip).runtime(rt.clone()).build();
    let acked = Arc::new(AtomicU64::new(0));
    let end: Tick = rt.now().after(1_000 * MS * SECONDS);
    for (at, rate) in RATES.into_iter().enumerate() {
        let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(at as u64).build()?;
        let (rt2, acked) = (rt.clone(), acked.clone());
        rt.spawn(async move {
            let likes = hs.counter(KEY);
            while rt2.now() < end {
                let (likes, acked) = (likes.clone(), acked.clone());
                rt2.spawn(async move {
                    if likes.add(1).await.is_ok() {
                        acked.fetch_add(1, Relaxed);
                    }
                });
                // Likes come when they come: half to one and a half times the mean apart.
                let mean = 1_000_000_000 / rate;
                rt2.sleep(Duration::from_nanos(mean / 2 + rt2.draw(mean))).await;
            }
        });
    }
    rt.run_until(end);
    let writes = store.writes_of(KEY);
    rt.run_for(2_000 * MS);
    let stored = store.get_now(KEY).ok_or("nothing was stored")?;
    let exact = std::str::from_utf8(&stored.bytes)?.parse::<u64>()? == acked.load(Relaxed);
    Ok((writes as f64 / f64::from(SECONDS), exact))
}

fn start(json: bool) -> Result<ExitCode, Fail> {
    let story = story()?;
    let mut rates = Vec::new();
    let mut exact = true;
    for ms in [1, 5, 20] {
        let (writes, is_exact) = coalesced(MS * ms)?;
        exact &= is_exact;
        rates.push((format!("{ms}ms"), writes));
    }
    if json {
        let out = json!({
            "counter_writes_per_sec": story.writes_per_sec,
            "likes_per_sec": story.likes_per_sec,
            "short_after_half_a_second": story.short_at_rest,
            "short_after_crash": story.short_after_crash,
            "short_after_recount": story.short_after_recount,
            "coalesced_writes_per_sec": rates.into_iter().collect::<BTreeMap<_, _>>(),
        });
        println!("{out}");
    } else {
        print(&story, &rates);
    }
    let kept = story.writes_per_sec <= 12.0
        && story.likes_per_sec >= 2_399.0
        && (story.short_at_rest, story.short_after_recount) == (0, 0)
        && story.short_after_crash == IN_ITS_BUFFER
        && exact;
    if !kept {
        eprintln!("likes: heatsink did not keep its promise");
    }
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(story: &Story, coalesced: &[(String, f64)]) {
    let row = |what: &str, value: String| println!("{what:<58}{value:>12}");
    println!("six routers, one post, buffered:");
    row("  likes a second", format!("{:.0}", story.likes_per_sec));
    row("  writes of the counter a second", format!("{:.0}", story.writes_per_sec));
    row("  likes missing half a second after the last", story.short_at_rest.to_string());
    row("  missing after one router was killed and came back", story.short_after_crash.to_string());
    row("  missing after the recount", story.short_after_recount.to_string());
    row("  likes in all", format!("{} ({})", story.liked, rounded(story.liked as i64)));
    println!("the same traffic through coalesced adds, each acknowledged when stored:");
    for (round_trip, writes) in coalesced {
        row(&format!("  writes a second at a round trip of {round_trip}"), format!("{writes:.0}"));
    }
}

fn main() -> ExitCode {
    let mut json = false;
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--json" => json = true,
            "--help" => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            other => {
                eprintln!("likes: unknown argument {other:?}\n\n{HELP}");
                return ExitCode::from(2);
            }
        }
    }
    start(json).unwrap_or_else(|error| {
        eprintln!("likes: {error}");
        ExitCode::FAILURE
    })
}
