//! One key goes viral on a real Redis Cluster: bare redis-rs, redis-rs with its client-side cache,
//! heatsink.
//!
//! Three masters with a replica each, started here on free loopback ports and stopped with this
//! process. The servers run on the first core, the calls come from the last. Keys by Zipf's law
//! (exponent 1.0, 10,000 keys); a fifth of all calls is for one more key. Every mix is run with
//! calls at a fixed rate (for the latencies, and how the operations spread over the masters) and
//! then by 64 tasks that call one after the other (for the throughput). The control is run on both
//! cores, before each run. `cargo run --release --bin redis [-- --json | --test] [MIX …]` with the
//! mixes `100`, `95`, `50` (per cent of reads) and `counters`; all of them unless named.

#[path = "../../../common/mod.rs"]
mod common;
#[path = "../../../../examples/servers/mod.rs"]
mod servers;

use heatsink::store::RedisStore;
use heatsink::{Heatsink, Key};
use heatsink_bench_peers::report::{self, Args, Figure, control_scaling};
use heatsink_bench_peers::zipf::Zipf;
use redis::caching::CacheConfig;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use servers::cluster::{Cluster, MASTERS, home_of};
use std::cell::{Cell, RefCell};
use std::process::{Command, ExitCode, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

const VIRAL: &str = "post:viral";
const VIRAL_SHARE: f64 = 0.2;
const KEYS: u32 = 10_000;
const VALUE_BYTES: usize = 200;
/// Calls a second where they come at a fixed rate: far below what one core of servers carries.
const RATE: f64 = 8_000.0;
/// Before it is measured: the key is found, the client-side cache is filled.
const WARM: Duration = Duration::from_millis(500);
const TASKS: usize = 64;

const CLIENTS: [&str; 3] = ["redis-rs", "redis-rs, client-side cache", "heatsink"];
/// What the calls are: the name, the share of reads, and whether the rest are adds.
const MIXES: [(&str, f64, bool); 4] =
    [("100", 1.0, false), ("95", 0.95, false), ("50", 0.5, false), ("counters", 0.0, true)];

#[derive(Clone)]
enum Client {
    Bare(ClusterConnection),
    Heat(Heatsink),
}

#[derive(Clone, Copy, PartialEq)]
enum Op {
    Get,
    Put,
    Add,
}

impl Client {
    async fn open(which: usize, cluster: &Cluster) -> Client {
        if which == 2 {
            let store = RedisStore::cluster(&[&cluster.url(0)]).await.expect("a store");
            return Client::Heat(Heatsink::new(store).expect("valid options"));
        }
        let builder = ClusterClientBuilder::new(vec![cluster.url(0)]);
        let builder = builder.use_protocol(redis::ProtocolVersion::RESP3);
        let cached = which == 1;
        let builder = if cached { builder.cache_config(CacheConfig::new()) } else { builder };
        let client = builder.build().expect("a client");
        Client::Bare(client.get_async_connection().await.expect("a connection"))
    }

    async fn call(&mut self, op: Op, key: &str) {
        match (self, op) {
            (Client::Heat(hs), Op::Get) => drop(hs.get(key).await.expect("get")),
            (Client::Heat(hs), Op::Put) => hs.put(key, vec![7u8; VALUE_BYTES]).await.expect("put"),
            (Client::Heat(hs), Op::Add) => hs.counter(key).add(1).await.expect("add"),
            (Client::Bare(conn), Op::Get) => {
                let get = redis::cmd("GET").arg(key).to_owned();
                let _: Option<Vec<u8>> = get.query_async(conn).await.expect("get");
            }
            (Client::Bare(conn), Op::Put) => {
                let put = redis::cmd("SET").arg(key).arg(&[7u8; VALUE_BYTES][..]).to_owned();
                let _: () = put.query_async(conn).await.expect("put");
            }
            (Client::Bare(conn), Op::Add) => {
                let add = redis::cmd("INCRBY").arg(key).arg(1).to_owned();
                let _: i64 = add.query_async(conn).await.expect("add");
            }
        }
    }
}

/// The calls, one after the other.
struct Traffic {
    zipf: Zipf,
    reads: f64,
    adds: bool,
}

impl Traffic {
    fn new((_, reads, adds): (&str, f64, bool), seed: u64) -> Traffic {
        Traffic { zipf: Zipf::new(KEYS, seed), reads, adds }
    }

    fn next(&mut self) -> (Op, String) {
        let op = match self.zipf.uniform() < self.reads {
            _ if self.adds => Op::Add,
            true => Op::Get,
            false => Op::Put,
        };
        let viral = self.zipf.uniform() < VIRAL_SHARE;
        let name = if viral { VIRAL.into() } else { format!("post:{}", self.zipf.draw()) };
        // A counter is a key of another kind.
        (op, if self.adds { format!("{name}:likes") } else { name })
    }
}

/// What a part at a fixed rate has shown.
struct Paced {
    hottest_over_mean: f64,
    /// All calls, and those for other keys of the viral key's shard, in microseconds, sorted.
    all: Vec<f64>,
    others: Vec<f64>,
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted.get((sorted.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN)
}

/// Commands that each master has processed.
fn processed(cluster: &Cluster) -> Vec<f64> {
    let count = |node: &servers::Server| {
        let stats: String = node.control().ask("INFO stats");
        let line = stats.lines().find_map(|l| l.strip_prefix("total_commands_processed:"));
        line.and_then(|l| l.trim().parse().ok()).expect("Redis counts its commands")
    };
    cluster.nodes[..MASTERS].iter().map(count).collect()
}

fn shard(key: &str) -> usize {
    home_of(Key::from(key).cluster_slot())
}

/// Calls at a fixed rate. Without the viral key its calls are left out, the others stay.
async fn paced(
    cluster: &Cluster,
    client: &Client,
    traffic: &mut Traffic,
    (with_viral, time): (bool, Duration),
) -> Paced {
    let seen = Rc::new(RefCell::new((Vec::new(), Vec::new())));
    let (start, mut sent, mut before) = (Instant::now(), 0_u64, None);
    let viral = if traffic.adds { format!("{VIRAL}:likes") } else { VIRAL.to_owned() };
    let hot = shard(&viral);
    while start.elapsed() < WARM + time {
        if before.is_none() && start.elapsed() > WARM {
            before = Some(processed(cluster));
        }
        let due = (start.elapsed().as_secs_f64() * RATE) as u64;
        while sent < due {
            sent += 1;
            let (op, key) = traffic.next();
            if !with_viral && key == viral {
                continue;
            }
            let (mut client, seen, counts) = (client.clone(), seen.clone(), before.is_some());
            let other = key != viral && shard(&key) == hot;
            let called = Instant::now();
            tokio::task::spawn_local(async move {
                client.call(op, &key).await;
                let took = called.elapsed().as_secs_f64() * 1e6;
                if counts {
                    let mut seen = seen.borrow_mut();
                    seen.0.push(took);
                    if other {
                        seen.1.push(took);
                    }
                }
            });
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (before, after) = (before.expect("it was measured"), processed(cluster));
    tokio::time::sleep(Duration::from_millis(50)).await; // the last answers
    let ops: Vec<f64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
    let mean = ops.iter().sum::<f64>() / ops.len() as f64;
    let hottest_over_mean = ops.iter().copied().fold(0.0, f64::max) / mean;
    let (mut all, mut others) = seen.take();
    all.sort_by(f64::total_cmp);
    others.sort_by(f64::total_cmp);
    Paced { hottest_over_mean, all, others }
}

/// Calls a second of tasks that call one after the other.
async fn throughput(client: &Client, mix: (&'static str, f64, bool), time: Duration) -> f64 {
    let (calls, start) = (Rc::new(Cell::new(0_u32)), Instant::now());
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (mut client, calls) = (client.clone(), calls.clone());
            tokio::task::spawn_local(async move {
                let mut traffic = Traffic::new(mix, 100 + task as u64);
                while start.elapsed() < time {
                    let (op, key) = traffic.next();
                    client.call(op, &key).await;
                    calls.set(calls.get() + 1);
                    // A hit never waits, and the others of this one thread want their turn.
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a task");
    }
    f64::from(calls.get()) / start.elapsed().as_secs_f64()
}

async fn fill(cluster: &Cluster) {
    let mut client = Client::open(0, cluster).await;
    client.call(Op::Put, VIRAL).await;
    for i in 0..KEYS {
        client.call(Op::Put, &format!("post:{i}")).await;
    }
}

async fn figures(
    cluster: &Cluster,
    mixes: &[(&'static str, f64, bool)],
    scale: f64,
) -> Vec<Figure> {
    let (time, short) = (Duration::from_secs_f64(scale), Duration::from_secs_f64(0.4 * scale));
    let mut figures = Vec::new();
    for &mix in mixes {
        for (which, name) in CLIENTS.iter().enumerate() {
            let client = Client::open(which, cluster).await;
            let mut traffic = Traffic::new(mix, 1);
            let mut row = |what: &str, value: f64| {
                let over = format!("{}, {}: {what}", mix.0, CLIENTS[0]);
                figures
                    .push(Figure::new(format!("{}, {name}: {what}", mix.0), 1, value).over(over));
            };
            let seen = paced(cluster, &client, &mut traffic, (true, time)).await;
            row("hottest master / mean", seen.hottest_over_mean);
            row("p50, us", quantile(&seen.all, 0.5));
            row("p99, us", quantile(&seen.all, 0.99));
            row("calls/s", throughput(&client, mix, short).await);
            if mix.0 == "100" {
                let calm = paced(cluster, &client, &mut traffic, (false, time)).await;
                let with = quantile(&seen.others, 0.99);
                let without = quantile(&calm.others, 0.99);
                row("p99 of others on the hot shard, us", with);
                row("the same without the viral key, us", without);
                row("p99 of others, with over without", with / without);
            }
        }
    }
    figures
}

/// Binds a process to cores; with `all`, every thread that it has. What the main thread starts from
/// then on is where it is.
fn pin(pid: u32, all: bool, cores: &str) {
    let status = Command::new("taskset")
        .args(if all { &["-a", "-p", "-c"][..] } else { &["-p", "-c"] })
        .args([cores, &pid.to_string()])
        .stdout(Stdio::null())
        .status();
    assert!(status.is_ok_and(|s| s.success()), "taskset could not bind {pid} to {cores}");
}

/// The cores that this process may run on.
fn cores() -> Vec<u32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse::<u32>().ok().zip(last.parse().ok()).map_or(0..=0, |(a, b)| a..=b)
    };
    list.unwrap_or("0").trim().split(',').flat_map(range).collect()
}

fn main() -> ExitCode {
    let args = match Args::parse("redis", "[100] [95] [50] [counters]") {
        Ok(args) => args,
        Err(code) => return code,
    };
    if let Some(unknown) = args.rest.iter().find(|a| MIXES.iter().all(|m| m.0 != a.as_str())) {
        eprintln!("redis: unknown mix {unknown}; there are 100, 95, 50 and counters");
        return ExitCode::from(2);
    }
    let asked =
        |mix: &&(&str, f64, bool)| args.rest.is_empty() || args.rest.iter().any(|a| a == mix.0);
    let mixes: Vec<_> = MIXES.iter().filter(asked).copied().collect();
    let cores = cores();
    let (Some(first), Some(last)) = (cores.first(), cores.last()) else { return ExitCode::from(2) };
    if first == last || Command::new("taskset").arg("--version").output().is_err() {
        eprintln!("redis: needs two cores, and taskset (apt-get install util-linux)");
        return ExitCode::from(2);
    }
    let cluster = Cluster::start();
    cluster.nodes.iter().for_each(|node| pin(node.pid(), true, &first.to_string()));
    let scale = if args.smoke { 0.1 } else { 1.0 };
    let (own, both) = (std::process::id(), format!("{first},{last}"));
    let local = |work: &mut dyn FnMut() -> Vec<Figure>| {
        pin(own, false, &last.to_string());
        let figures = work();
        pin(own, false, &both);
        figures
    };
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    let run = |filled: &mut bool| {
        let scaling = control_scaling();
        let figures = local(&mut || {
            let (runtime, tasks) = (runtime().expect("a runtime"), tokio::task::LocalSet::new());
            tasks.block_on(&runtime, async {
                if !std::mem::replace(filled, true) {
                    fill(&cluster).await;
                }
                figures(&cluster, &mixes, scale).await
            })
        });
        (figures, scaling)
    };
    let mut filled = false;
    report::run(&args, "ratio: over redis-rs", || run(&mut filled))
}
