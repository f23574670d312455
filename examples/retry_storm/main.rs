//! One client writes one key as fast as it can, and again at once when it is refused. What do the
//! neighbours on the shard feel of it?
//!
//! Three runs a round: without the storm, with it, and with it under a budget for its key. The
//! neighbours are an open loop of reads of cold keys on the storm's shard. Embedded: 4 shards with
//! a ceiling of 4,000 operations a second each. With `--redis`: one node that is started here. The
//! storm has a core of its own where there are two.
#![expect(clippy::disallowed_methods, reason = "a load generator lives by the real clock")]

#[cfg(feature = "redis")]
#[path = "../servers/mod.rs"]
mod servers;

use heatsink::store::{MemoryStore, Store};
use heatsink::{Admission, Budget, Heatsink};
use serde_json::json;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const HELP: &str = "\
One client retries as fast as it can: what its neighbours feel, without and with a budget.
Exit status 1 when the budget or the neighbours' p99 is exceeded.

usage: retry_storm [--json] [--redis] [--rounds N]
  --json    one JSON object on stdout, nothing else
  --redis   on a Redis node that is started for it (feature redis)
  --rounds  median of so many rounds, 5 s each; default 3
  --help    this text";

const STORM: &str = "storm";
/// Tasks of the client, each of which waits for one answer at a time.
const TASKS: usize = 128;
const RATE: u64 = 200;
const BURST: u64 = 20;
/// Reads a second by the neighbours.
const READS: f64 = 1_000.0;
const WARM: Duration = Duration::from_millis(300);
const SPAN: Duration = Duration::from_millis(1_300);
/// The neighbours' p99 under a storm with a budget, over that without a storm.
const RATIO_MAX: f64 = 1.2;

type Fail = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Arm {
    Quiet,
    Storm,
    Budget,
}

/// Where the keys are.
enum Place {
    Memory,
    #[cfg(feature = "redis")]
    Redis(servers::Server),
}

/// What one run came to.
#[derive(Clone, Copy, Default)]
struct Outcome {
    p99_us: u64,
    failed: u64,
    /// Writes of the storm that reached the store, and how many it tried.
    stored: u64,
    tried: u64,
}

/// Puts the calling thread on one core, where there are several.
fn pin(core: usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let Ok(thread) = std::fs::read_link("/proc/thread-self") else { return };
    let Some(id) = thread.file_name().map(|name| name.to_string_lossy().into_owned()) else {
        return;
    };
    if cores > 1 {
        let _ = Command::new("taskset").args(["-pc", &core.to_string(), &id]).output();
    }
}

/// Writes, and writes again, from `TASKS` tasks on a thread of its own.
fn storm(hs: Heatsink, stop: Arc<AtomicBool>, tried: Arc<AtomicU64>) {
    pin(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let client = async move {
        let one = |_| {
            let (hs, stop, tried) = (hs.clone(), stop.clone(), tried.clone());
            tokio::spawn(async move {
                while !stop.load(Relaxed) {
                    tried.fetch_add(1, Relaxed);
                    if hs.put(STORM, "x").await.is_err() {
                        tokio::task::yield_now().await;
                    }
                }
            })
        };
        for task in (0..TASKS).map(one).collect::<Vec<_>>() {
            let _ = task.await;
        }
    };
    if let Ok(runtime) = runtime {
        runtime.block_on(client);
    }
}

/// The open loop of the neighbours; latencies from when each read was sent.
async fn neighbours(hs: &Heatsink, keys: &[String]) -> Result<(u64, u64), Fail> {
    let latencies = Arc::new(Mutex::new(Vec::new()));
    let failed = Arc::new(AtomicU64::new(0));
    let (start, mut sent) = (Instant::now(), 0usize);
    while start.elapsed() < WARM + SPAN {
        let due = (start.elapsed().as_secs_f64() * READS) as usize;
        while sent < due {
            let (hs, key) = (hs.clone(), keys[sent % keys.len()].clone());
            let (latencies, failed) = (latencies.clone(), failed.clone());
            tokio::spawn(async move {
                let began = Instant::now();
                let ok = hs.get(&key).await.is_ok();
                let took = began.elapsed();
                if start.elapsed() > WARM {
                    failed.fetch_add(u64::from(!ok), Relaxed);
                    latencies.lock().unwrap_or_else(|e| e.into_inner()).push(took);
                }
            });
            sent += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::sleep(Duration::from_millis(150)).await;
    let mut all = latencies.lock().map_err(|_| "a read panicked")?.clone();
    all.sort_unstable();
    let p99 = all.get(all.len() * 99 / 100).ok_or("no read was made")?;
    Ok((p99.as_micros() as u64, failed.load(Relaxed)))
}

fn build(store: impl Store, arm: Arm) -> heatsink::Result<Heatsink> {
    let budget = Budget::per_sec(RATE as u32).burst(BURST as u32);
    let builder = Heatsink::builder(store);
    match arm {
        Arm::Budget => builder.admission(Admission::new().per_key(budget)).build(),
        _ => builder.build(),
    }
}

/// One run; `stored` counts the writes that the store has seen of the storm's key.
async fn drive(
    hs: Heatsink,
    keys: &[String],
    arm: Arm,
    stored: impl Fn() -> u64,
) -> Result<(Outcome, Duration), Fail> {
    let (stop, tried) = (Arc::new(AtomicBool::new(arm == Arm::Quiet)), Arc::new(AtomicU64::new(0)));
    let (before, began) = (stored(), Instant::now());
    let client = {
        let (hs, stop, tried) = (hs.clone(), stop.clone(), tried.clone());
        std::thread::spawn(move || storm(hs, stop, tried))
    };
    let felt = neighbours(&hs, keys).await;
    stop.store(true, Relaxed);
    let lasted = began.elapsed();
    while !client.is_finished() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (p99_us, failed) = felt?;
    let outcome = Outcome { p99_us, failed, stored: stored() - before, tried: tried.load(Relaxed) };
    hs.shutdown().await;
    Ok((outcome, lasted))
}

async fn run(place: &Place, arm: Arm) -> Result<(Outcome, Duration), Fail> {
    match place {
        Place::Memory => {
            let latency = Duration::from_millis(10);
            let store = MemoryStore::builder().shards(4).ceiling(4_000).latency(latency).build();
            let shard = store.shard_of(STORM.as_bytes());
            let keys: Vec<String> = (0..)
                .map(|i| format!("post:{i}"))
                .filter(|key| store.shard_of(key.as_bytes()) == shard)
                .take(400)
                .collect();
            let hs = build(store.clone(), arm)?;
            drive(hs, &keys, arm, || store.writes_of(STORM)).await
        }
        #[cfg(feature = "redis")]
        Place::Redis(server) => {
            let keys: Vec<String> = (0..400).map(|i| format!("post:{i}")).collect();
            let store = heatsink::store::RedisStore::connect(&server.url()).await?;
            let sets = || {
                let stats: String = server.control().ask("INFO commandstats");
                let line = stats.lines().find_map(|l| l.strip_prefix("cmdstat_set:calls="));
                line.and_then(|l| l.split(',').next()?.parse().ok()).unwrap_or(0)
            };
            drive(build(store, arm)?, &keys, arm, sets).await
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(feature = "redis")]
fn redis() -> Result<Place, Fail> {
    let server = servers::Server::start(&[]);
    let _ = Command::new("taskset").args(["-apc", "0", &server.pid().to_string()]).output();
    Ok(Place::Redis(server))
}

#[cfg(not(feature = "redis"))]
fn redis() -> Result<Place, Fail> {
    Err("built without the feature redis".into())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Fail> {
    let (mut as_json, mut rounds, mut place) = (false, 3, Place::Memory);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => as_json = true,
            "--redis" => place = redis()?,
            "--rounds" => rounds = args.next().and_then(|n| n.parse().ok()).unwrap_or(0).max(1),
            "--help" => {
                println!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            other => {
                eprintln!("retry_storm: unknown argument {other}\n{HELP}");
                return Ok(ExitCode::from(2));
            }
        }
    }
    pin(0);
    let (mut ratios, mut bare_ratios, mut within) = (Vec::new(), Vec::new(), true);
    let mut last = [Outcome::default(); 3];
    for _ in 0..rounds {
        for (arm, last) in [Arm::Quiet, Arm::Storm, Arm::Budget].into_iter().zip(&mut last) {
            let (outcome, lasted) = run(&place, arm).await?;
            let budget = (lasted.as_secs_f64() * RATE as f64) as u64 + BURST + 1;
            within &= arm != Arm::Budget || outcome.stored <= budget;
            *last = outcome;
        }
        let [quiet, bare, budget] = last;
        bare_ratios.push(bare.p99_us as f64 / quiet.p99_us as f64);
        ratios.push(budget.p99_us as f64 / quiet.p99_us as f64);
    }
    let (ratio, bare_ratio) = (median(ratios), median(bare_ratios));
    let kept = within && ratio <= RATIO_MAX && last[2].failed == 0;
    let names = ["quiet", "storm", "budget"];
    if as_json {
        let arms: serde_json::Map<_, _> = names
            .iter()
            .zip(last)
            .map(|(name, o)| {
                let row = json!({"neighbours_p99_us": o.p99_us, "neighbours_failed": o.failed,
                    "storm_tried": o.tried, "storm_reached_the_store": o.stored});
                ((*name).to_string(), row)
            })
            .collect();
        println!(
            "{}",
            json!({"last_round": arms, "p99_ratio": ratio, "p99_ratio_without_budget": bare_ratio,
                "within_budget": within, "kept": kept})
        );
    } else {
        println!("{:<8}{:>12}{:>9}{:>14}{:>16}", "", "p99, us", "failed", "storm tried", "it got");
        for (name, o) in names.iter().zip(last) {
            println!("{name:<8}{:>12}{:>9}{:>14}{:>16}", o.p99_us, o.failed, o.tried, o.stored);
        }
        println!(
            "neighbours' p99 over that without a storm: {bare_ratio:.2} bare, {ratio:.2} with a \
             budget of {RATE}/s (to keep: {RATIO_MAX}); medians of {rounds} rounds"
        );
    }
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
