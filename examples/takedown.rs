//! A takedown: how long a deleted value can still be read in other processes.
//!
//! Starts a Redis Cluster of three masters (or uses the one named) and four processes that read
//! one key all the time. This process puts the key, waits until all four serve it from memory,
//! deletes it, and each of the four says when it first read nothing. So many times; then the same
//! with the stream of invalidations cut, when only the stale limit is left.
#![expect(clippy::disallowed_methods, reason = "it measures on the real clock")]
#![expect(clippy::unwrap_used, reason = "an example fails by panicking")]

#[path = "servers/mod.rs"]
mod servers;

use heatsink::runtime::BoxFuture;
use heatsink::store::{Delivery, RedisStore, Subscription};
use heatsink::stream::{Channel, Transport};
use heatsink::{Heatsink, Invalidations, NearCache, Source};
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const HELP: &str = "\
How long a deleted value can still be read in four other processes, on a Redis Cluster that is
started for it: with the stream of invalidations, and with the stream cut. Takes 30 s.
Exit status 1 when the promise is not kept (50 ms at the median, 250 ms at p99; cut: the stale
limit).

usage: takedown [--json] [--rounds N]
  --json      one JSON object on stdout, nothing else
  --rounds N  takedowns; default 100
  --help      this text";

const KEY: &str = "post:9";
const CHANNEL: &str = "takedown:invalidations";
const PROCESSES: usize = 4;
const ROUNDS_CUT: usize = 5;
const FRESH: Duration = Duration::from_millis(800);
const STALE: Duration = Duration::from_secs(2);
/// Reads a second in each of the four processes.
const PACE: Duration = Duration::from_micros(500);

fn unix_us() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()
}

/// The channel, and a way to cut it for what is heard.
struct Wire {
    channel: Channel<RedisStore>,
    cut: Arc<AtomicBool>,
}

struct Hearing {
    inner: Box<dyn Subscription>,
    cut: Arc<AtomicBool>,
}

impl Subscription for Hearing {
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>> {
        Box::pin(async move {
            loop {
                let delivery = self.inner.next().await;
                if !self.cut.load(Relaxed) {
                    return delivery;
                }
            }
        })
    }
}

impl Transport for Wire {
    fn send(&self, message: bytes::Bytes) -> BoxFuture<'static, heatsink::Result<()>> {
        self.channel.send(message)
    }

    fn listen(&self) -> BoxFuture<'static, heatsink::Result<Box<dyn Subscription>>> {
        let (listening, cut) = (self.channel.listen(), self.cut.clone());
        Box::pin(async move {
            let inner = listening.await?;
            Ok(Box::new(Hearing { inner, cut }) as Box<dyn Subscription>)
        })
    }
}

async fn connect(urls: &[&str], cut: &Arc<AtomicBool>) -> Heatsink {
    let store = RedisStore::cluster(urls).await.unwrap();
    let wire = Wire { channel: Channel::new(store.clone(), CHANNEL), cut: cut.clone() };
    // What is silent for longer than a value may be stale says nothing in time.
    let stream = Invalidations::over(wire).silence(STALE * 10);
    let near = NearCache::new().fresh(FRESH).stale(STALE);
    Heatsink::builder(store).near(near).invalidations(stream).build().unwrap()
}

/// One of the four: reads as fast as its pace allows, and says when the value comes and goes.
async fn child(urls: &str) {
    let cut = Arc::new(AtomicBool::new(false));
    let urls: Vec<&str> = urls.split(',').collect();
    let hs = connect(&urls, &cut).await;
    let hearing = cut.clone();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            hearing.store(line == "cut", Relaxed);
        }
        // The parent has gone.
        std::process::exit(0);
    });
    let mut held = false;
    let mut pace = tokio::time::interval(PACE);
    loop {
        pace.tick().await;
        let got = hs.get(KEY).await;
        let at = unix_us();
        match got {
            Ok(Some(value)) if !held && value.source() != Source::Load => {
                held = true;
                println!("holds {at}");
            }
            Ok(None) if held => {
                held = false;
                println!("gone {at}");
            }
            _ => {}
        }
        std::io::stdout().flush().unwrap();
    }
}

struct Reader {
    process: Child,
    says: mpsc::Receiver<(String, u128)>,
}

fn reader(urls: &str) -> Reader {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--child", urls])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(process.stdout.take().unwrap());
    let (tell, says) = mpsc::channel();
    std::thread::spawn(move || {
        for line in out.lines().map_while(Result::ok) {
            if let Some((word, at)) = line.split_once(' ') {
                drop(tell.send((word.to_owned(), at.parse().unwrap())));
            }
        }
    });
    Reader { process, says }
}

impl Reader {
    /// When it next says this.
    fn wait(&self, word: &str) -> u128 {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            let left = limit.saturating_duration_since(Instant::now());
            let (said, at) = self.says.recv_timeout(left).expect("a reader has fallen silent");
            if said == word {
                return at;
            }
        }
    }

    fn say(&mut self, word: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{word}").unwrap();
    }
}

/// Milliseconds from the start of a delete until each reader has read nothing.
async fn rounds(hs: &Heatsink, readers: &[Reader], n: usize) -> Vec<f64> {
    let mut took = Vec::new();
    for round in 0..n {
        hs.put(KEY, format!("value {round}")).await.unwrap();
        for reader in readers {
            reader.wait("holds");
        }
        // So that a delete falls anywhere into the life of a cached value, and after the readers
        // have said what they hold.
        let pause = 350 + (round as u64 * 37) % 400;
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let from = unix_us();
        hs.delete(KEY).await.unwrap();
        let gone = readers.iter().map(|r| r.wait("gone").saturating_sub(from) as f64 / 1e3);
        took.extend(gone);
    }
    took.sort_by(f64::total_cmp);
    took
}

fn at(sorted: &[f64], permille: usize) -> f64 {
    sorted[(sorted.len() * permille / 1_000).min(sorted.len() - 1)]
}

async fn measure(as_json: bool, n: usize) -> bool {
    let cluster = servers::cluster::Cluster::start();
    let urls: Vec<String> = (0..servers::cluster::MASTERS).map(|node| cluster.url(node)).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let hs = connect(&urls, &Arc::default()).await;
    let mut readers: Vec<Reader> = (0..PROCESSES).map(|_| reader(&urls.join(","))).collect();
    let with = rounds(&hs, &readers, n).await;
    readers.iter_mut().for_each(|reader| reader.say("cut"));
    let cut = rounds(&hs, &readers, ROUNDS_CUT).await;
    for reader in &mut readers {
        reader.process.kill().unwrap();
        reader.process.wait().unwrap();
    }
    let (p50, p99, cut_max) = (at(&with, 500), at(&with, 990), at(&cut, 1_000));
    let kept = p50 <= 50.0 && p99 <= 250.0 && cut_max <= STALE.as_secs_f64() * 1e3 + 50.0;
    if as_json {
        let out = json!({
            "processes": PROCESSES,
            "takedowns": n,
            "p50_ms": p50,
            "p99_ms": p99,
            "max_ms": at(&with, 1_000),
            "cut_p50_ms": at(&cut, 500),
            "cut_max_ms": cut_max,
            "stale_limit_ms": STALE.as_millis() as u64,
            "kept": kept,
        });
        println!("{out}");
    } else {
        println!("{n} takedowns, {PROCESSES} processes, a Redis Cluster of three masters");
        println!(
            "  with the stream   p50 {p50:.1} ms, p99 {p99:.1} ms, max {:.1} ms",
            at(&with, 1_000)
        );
        println!("  stream cut        p50 {:.0} ms, max {cut_max:.0} ms", at(&cut, 500));
        println!("  stale limit       {} ms", STALE.as_millis());
    }
    kept
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (as_json, rest) = match args.split_first() {
        Some((&"--json", rest)) => (true, rest),
        _ => (false, &args[..]),
    };
    let rounds = match rest {
        ["--child", urls] => {
            runtime.block_on(child(urls));
            return ExitCode::SUCCESS;
        }
        ["--help"] => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        [] => Some(100),
        ["--rounds", n] => n.parse().ok().filter(|n| *n > 0),
        _ => None,
    };
    let Some(rounds) = rounds else {
        eprintln!("{HELP}");
        return ExitCode::from(2);
    };
    if runtime.block_on(measure(as_json, rounds)) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
