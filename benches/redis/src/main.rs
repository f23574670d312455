//! Calls that miss every cache: `RedisStore` against bare redis-rs, on loopback; and adds of one
//! counter that travel together against a command for each.
//!
//! Servers of the tests, 64 tasks that call one after the other. Each pair is one run of either
//! side, in alternating order; the ratio of a pair is heatsink's calls over the bare client's. The
//! interval is that of the mean of the ratios' logarithms at 95 %.
//!
//! `cargo run --release` here; `-- --test` for a smoke run, `-- --pairs 100` for more.

#[path = "../../../examples/servers/mod.rs"]
mod servers;

use heatsink::store::{RedisStore, Store};
use heatsink::{Counter, Heatsink, Key};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TASKS: usize = 64;
const KEYS: usize = 1024;
/// Tasks that add to one counter.
const ADDERS: usize = 256;

#[derive(Clone, Copy, PartialEq)]
enum Op {
    Add,
    Get,
    /// With the expiry, as for a value that may be cached.
    GetTtl,
}

/// One side of a pair.
trait Side: Clone + Send + 'static {
    fn call(&mut self, op: Op, key: &Key) -> impl Future<Output = ()> + Send;
}

impl Side for RedisStore {
    async fn call(&mut self, op: Op, key: &Key) {
        match op {
            Op::Add => drop(self.add(key, 1).await.expect("add")),
            Op::Get => drop(self.get_uncached(key).await.expect("get")),
            Op::GetTtl => drop(self.get(key).await.expect("get")),
        }
    }
}

/// Whatever the key: there is one counter.
impl Side for Counter {
    async fn call(&mut self, _: Op, _: &Key) {
        self.add(1).await.expect("add");
    }
}

async fn bare(conn: &mut (impl ConnectionLike + Send), op: Op, key: &Key) {
    match op {
        Op::Add => {
            let mut cmd = redis::cmd("INCRBY");
            cmd.arg(key.as_bytes()).arg(1);
            let _: i64 = cmd.query_async(conn).await.expect("add");
        }
        Op::Get | Op::GetTtl => {
            let mut cmd = redis::cmd("GET");
            cmd.arg(key.as_bytes());
            let _: Option<Vec<u8>> = cmd.query_async(conn).await.expect("get");
        }
    }
}

impl Side for MultiplexedConnection {
    async fn call(&mut self, op: Op, key: &Key) {
        bare(self, op, key).await;
    }
}

impl Side for ClusterConnection {
    async fn call(&mut self, op: Op, key: &Key) {
        bare(self, op, key).await;
    }
}

/// Calls a second.
async fn rate(
    side: &impl Side,
    op: Op,
    (keys, tasks): (&Arc<Vec<Key>>, usize),
    time: Duration,
) -> f64 {
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let start = Instant::now();
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let (mut side, keys) = (side.clone(), keys.clone());
            let (stop, calls) = (stop.clone(), calls.clone());
            tokio::spawn(async move {
                let mut n = 0;
                while !stop.load(Ordering::Relaxed) {
                    side.call(op, &keys[(task * 17 + n) % keys.len()]).await;
                    n += 1;
                }
                calls.fetch_add(n as u64, Ordering::Relaxed);
            })
        })
        .collect();
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("a task");
    }
    calls.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()
}

/// Student's t at 97.5 % for n - 1 degrees of freedom, to 0.01 from 5 pairs on.
fn t_975(n: usize) -> f64 {
    let df = (n - 1) as f64;
    1.96 + 2.4 / df + 2.8 / (df * df)
}

async fn compare(
    name: &str,
    heat: &impl Side,
    bare: &impl Side,
    (op, keys, tasks): (Op, usize, usize),
    pairs: usize,
    time: Duration,
) {
    let keys = Arc::new((0..keys).map(|i| Key::from(format!("bench:{i}"))).collect());
    let on = (&keys, tasks);
    rate(heat, op, on, time).await;
    rate(bare, op, on, time).await;
    let (mut logs, mut heats, mut bares) = (Vec::new(), 0.0, 0.0);
    for pair in 0..pairs {
        let (h, b) = if pair % 2 == 0 {
            let h = rate(heat, op, on, time).await;
            (h, rate(bare, op, on, time).await)
        } else {
            let b = rate(bare, op, on, time).await;
            (rate(heat, op, on, time).await, b)
        };
        logs.push((h / b).ln());
        (heats, bares) = (heats + h, bares + b);
    }
    let n = logs.len() as f64;
    let mean = logs.iter().sum::<f64>() / n;
    let variance = logs.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let half = t_975(logs.len()) * (variance / n).sqrt();
    println!(
        "{name:<34} {:>8.0} {:>8.0} calls/s   x {:.3}  [{:.3}, {:.3}]",
        heats / n,
        bares / n,
        mean.exp(),
        (mean - half).exp(),
        (mean + half).exp(),
    );
}

/// Processor seconds that this process and the server have used.
fn cpu(server: &servers::Server) -> (f64, f64) {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("procfs");
    let fields: Vec<f64> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0.0))
        .collect();
    // Fields 14 and 15 of the line, in hundredths of a second.
    let ours = (fields[11] + fields[12]) / 100.0;
    let info: String = server.control().ask("INFO cpu");
    let of = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|seconds| seconds.trim().parse::<f64>().ok()).unwrap_or(0.0)
    };
    (ours, of("used_cpu_user:") + of("used_cpu_sys:"))
}

/// What bounds adds that combine: how long a command takes while all callers run, how long it takes
/// alone, and what an add costs in processor time.
async fn bounds(
    server: &servers::Server,
    hs: &Heatsink,
    conn: &MultiplexedConnection,
    time: Duration,
) {
    let keys = Arc::new(vec![Key::from("likes")]);
    let alone = rate(conn, Op::Add, (&keys, 1), time).await;
    let (stats, used) = (hs.add_stats(), cpu(server));
    let per_sec = rate(&hs.counter("likes"), Op::Add, (&keys, ADDERS), time * 10).await;
    let (after, now) = (hs.add_stats(), cpu(server));
    let adds = (after.adds - stats.adds) as f64;
    let batch = adds / (after.batches - stats.batches) as f64;
    println!(
        "  {batch:.0} adds a command; a command every {:.0} us, alone {:.0} us; an add takes {:.0} ns of \
         processor here and {:.0} ns in the server",
        batch / per_sec * 1e6,
        1e6 / alone,
        (now.0 - used.0) / adds * 1e9,
        (now.1 - used.1) / adds * 1e9,
    );
}

async fn all(pairs: usize, time: Duration) {
    println!("{:<34} {:>8} {:>8}", "", "heatsink", "bare");
    let server = servers::Server::start(&[]);
    let client = redis::Client::open(server.url()).expect("a client");
    let conn = client.get_multiplexed_async_connection().await.expect("a connection");
    let store = RedisStore::connect(&server.url()).await.expect("a store");
    let of = |op| (op, KEYS, TASKS);
    compare("one node, add", &store, &conn, of(Op::Add), pairs, time).await;
    compare("one node, get", &store, &conn, of(Op::Get), pairs, time).await;
    compare("one node, get with expiry", &store, &conn, of(Op::GetTtl), pairs, time).await;
    let hs = Heatsink::new(store).expect("an instance");
    let likes = hs.counter("likes");
    let one = (Op::Add, 1, ADDERS);
    compare("one key, adds that combine", &likes, &conn, one, pairs, time).await;
    bounds(&server, &hs, &conn, time).await;
    drop(server);
    let cluster = servers::cluster::Cluster::start();
    let client = ClusterClient::new(vec![cluster.url(0)]).expect("a client");
    let conn = client.get_async_connection().await.expect("a connection");
    let store = RedisStore::cluster(&[&cluster.url(0)]).await.expect("a store");
    compare("cluster, add", &store, &conn, of(Op::Add), pairs, time).await;
    compare("cluster, get", &store, &conn, of(Op::Get), pairs, time).await;
    compare("cluster, get with expiry", &store, &conn, of(Op::GetTtl), pairs, time).await;
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut pairs = 40;
    let mut time = Duration::from_millis(150);
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => {}
        ["--test"] => (pairs, time) = (2, Duration::from_millis(20)),
        ["--pairs", n] if n.parse::<usize>().is_ok_and(|n| n > 1) => {
            pairs = n.parse().unwrap_or(pairs);
        }
        _ => {
            eprintln!("usage: heatsink-bench-redis [--test | --pairs N]");
            std::process::exit(2);
        }
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(all(pairs, time));
}
