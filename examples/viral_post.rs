//! One post goes viral: eight shards, four services, twice: bare and with heatsink.
//!
//! Prints one line a second and a closing table; `--json` prints one object and nothing else.
#![expect(clippy::disallowed_methods, reason = "an example times the machine")]

use heatsink::store::{MemoryStore, Store};
use heatsink::{Heatsink, Key, NearCache, Treatment};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SHARDS: usize = 8;
const CEILING: u32 = 6_000;
const SERVICES: usize = 4;
const READS_PER_SEC: u64 = 32_000;
const POSTS: usize = 100_000;
const VIRAL: &str = "post:viral";
const CALM: Duration = Duration::from_secs(3);
const SETTLE: Duration = Duration::from_secs(2);
const MEASURED: Duration = Duration::from_secs(6);
/// Buckets of the latency histogram: eight to a doubling.
const BUCKETS: usize = 256;

const HELP: &str = "\
viral_post: one post takes 20 % of 32,000 reads a second; bare, then with heatsink

  --json   one JSON object on stdout and nothing else
  --help   this text

Exit status: 0 when heatsink kept every promise, 1 when not, 2 for wrong arguments.";

#[derive(Default)]
struct Meter {
    requests: AtomicU64,
    errors: AtomicU64,
    latency: Vec<AtomicU64>,
}

impl Meter {
    fn new() -> Meter {
        Meter { latency: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(), ..Meter::default() }
    }

    fn enter(&self, took: Duration, failed: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.errors.fetch_add(u64::from(failed), Ordering::Relaxed);
        let us = took.as_micros().max(1) as f64;
        let bucket = (us.log2() * 8.0) as usize;
        self.latency[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// The latency, in microseconds, that this share of the requests stayed below.
    fn quantile(&self, share: f64) -> u64 {
        let counts: Vec<u64> = self.latency.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        let mut left = (counts.iter().sum::<u64>() as f64 * share) as u64;
        for (bucket, n) in counts.iter().enumerate() {
            if left < *n {
                return 2f64.powf((bucket + 1) as f64 / 8.0) as u64;
            }
            left -= n;
        }
        0
    }
}

struct Run {
    hottest_over_mean: f64,
    hottest_over_ceiling: f64,
    errors: u64,
    p50_us: u64,
    p99_us: u64,
    requests: u64,
    viral_per_service: f64,
    detected_after_ms: u64,
}

/// Draws posts by Zipf's law with exponent 1, by a table of cumulative weights.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new() -> Zipf {
        let mut sum = 0.0;
        let mut table: Vec<f64> = (1..=POSTS)
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        table.iter_mut().for_each(|w| *w /= sum);
        Zipf(table)
    }

    fn draw(&self, rng: &mut Xoshiro256PlusPlus) -> usize {
        let u = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        self.0.partition_point(|&w| w < u) + 1
    }
}

async fn read(store: &MemoryStore, service: Option<&Heatsink>, key: String) -> bool {
    match service {
        Some(hs) => hs.get(&key).await.is_err(),
        None => Store::get(store, &Key::from(key)).await.is_err(),
    }
}

async fn generate(
    store: MemoryStore,
    services: Arc<Vec<Heatsink>>,
    meter: Arc<Meter>,
    start: Instant,
    zipf: Arc<Zipf>,
) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(42);
    let mut timer = tokio::time::interval(Duration::from_millis(1));
    let mut sent = 0;
    while start.elapsed() < CALM + SETTLE + MEASURED {
        timer.tick().await;
        let elapsed = start.elapsed();
        let viral = elapsed >= CALM;
        let measured = elapsed >= CALM + SETTLE;
        let due = (elapsed.as_secs_f64() * READS_PER_SEC as f64) as u64;
        while sent < due {
            sent += 1;
            let key = if viral && rng.next_u64().is_multiple_of(5) {
                VIRAL.to_owned()
            } else {
                format!("post:{}", zipf.draw(&mut rng))
            };
            let (store, services, meter) = (store.clone(), services.clone(), meter.clone());
            let at = sent as usize % SERVICES;
            tokio::spawn(async move {
                let sent_at = Instant::now();
                let failed = read(&store, services.get(at), key).await;
                if measured {
                    meter.enter(sent_at.elapsed(), failed);
                }
            });
        }
    }
}

fn offered(store: &MemoryStore) -> Vec<u64> {
    store.counts().iter().map(|shard| shard.offered).collect()
}

/// The moment at which all services serve the post from their near cache, after it was posted.
async fn watch(services: &[Heatsink], posted: Instant) -> u64 {
    let mut poll = tokio::time::interval(Duration::from_millis(1));
    while services.iter().any(|hs| hs.try_read_with(VIRAL, |_| ()).is_none()) {
        poll.tick().await;
        if posted.elapsed() > SETTLE {
            break;
        }
    }
    posted.elapsed().as_millis() as u64
}

async fn run(cooled: bool, zipf: &Arc<Zipf>, quiet: bool) -> heatsink::Result<Run> {
    let store = MemoryStore::builder()
        .shards(SHARDS)
        .ceiling(CEILING)
        .latency(Duration::from_millis(1))
        .count_keys(true)
        .build();
    for rank in 1..=POSTS {
        store.put_now(format!("post:{rank}"), "a post")?;
    }
    store.put_now(VIRAL, "the post")?;
    // A little over a second, so that the jitter keeps every service below one read a second.
    let near = || NearCache::new().fresh(Duration::from_millis(1200));
    let services = if cooled { SERVICES } else { 0 };
    let services: heatsink::Result<Vec<Heatsink>> =
        (0..services).map(|_| Heatsink::builder(store.clone()).near(near()).build()).collect();
    let services = Arc::new(services?);
    let meter = Arc::new(Meter::new());
    let start = Instant::now();
    let load = generate(store.clone(), services.clone(), meter.clone(), start, zipf.clone());
    let load = tokio::spawn(load);
    tokio::time::sleep(CALM).await;
    let posted = Instant::now();
    for hs in services.iter() {
        hs.control().pin(VIRAL, Treatment::near())?;
    }
    let detected_after_ms = if cooled { watch(&services, posted).await } else { 0 };
    tokio::time::sleep(SETTLE.saturating_sub(posted.elapsed())).await;
    let (before, viral_before) = (offered(&store), store.reads_of(VIRAL));
    let from = Instant::now();
    while from.elapsed() < MEASURED {
        let second = offered(&store);
        tokio::time::sleep(Duration::from_secs(1)).await;
        if !quiet {
            line(cooled, &second, &offered(&store), &meter);
        }
    }
    let seconds = from.elapsed().as_secs_f64();
    let rates: Vec<f64> = offered(&store)
        .iter()
        .zip(&before)
        .map(|(after, before)| (after - before) as f64 / seconds)
        .collect();
    let viral = (store.reads_of(VIRAL) - viral_before) as f64 / seconds / SERVICES as f64;
    let _ = load.await;
    let hottest = rates.iter().copied().fold(0.0, f64::max);
    Ok(Run {
        hottest_over_mean: hottest / (rates.iter().sum::<f64>() / SHARDS as f64),
        hottest_over_ceiling: hottest / f64::from(CEILING),
        errors: meter.errors.load(Ordering::Relaxed),
        p50_us: meter.quantile(0.5),
        p99_us: meter.quantile(0.99),
        requests: meter.requests.load(Ordering::Relaxed),
        viral_per_service: viral,
        detected_after_ms,
    })
}

/// One line a second: a bar per shard, tenths of its ceiling.
fn line(cooled: bool, before: &[u64], after: &[u64], meter: &Meter) {
    let bars: Vec<String> = before
        .iter()
        .zip(after)
        .map(|(b, a)| format!("{:>3}%", (a - b) * 100 / u64::from(CEILING)))
        .collect();
    println!(
        "{:<9} shards {}  p50 {:>6} us  p99 {:>6} us  errors {}",
        if cooled { "heatsink" } else { "bare" },
        bars.join(" "),
        meter.quantile(0.5),
        meter.quantile(0.99),
        meter.errors.load(Ordering::Relaxed),
    );
}

fn json(run: &Run) -> serde_json::Value {
    serde_json::json!({
        "hottest_over_mean": run.hottest_over_mean,
        "hottest_over_ceiling": run.hottest_over_ceiling,
        "errors": run.errors,
        "p99_us": run.p99_us,
        "requests": run.requests,
    })
}

fn table(bare: &Run, cooled: &Run) {
    println!("\n{:<36}{:>12}{:>12}", "", "bare", "heatsink");
    let row = |name: &str, a: String, b: String| println!("{name:<36}{a:>12}{b:>12}");
    let two = |x: f64| format!("{x:.2}");
    row("hottest shard over mean", two(bare.hottest_over_mean), two(cooled.hottest_over_mean));
    let (a, b) = (bare.hottest_over_ceiling, cooled.hottest_over_ceiling);
    row("hottest shard over ceiling", two(a), two(b));
    row("errors", bare.errors.to_string(), cooled.errors.to_string());
    row("p50, microseconds", bare.p50_us.to_string(), cooled.p50_us.to_string());
    row("p99, microseconds", bare.p99_us.to_string(), cooled.p99_us.to_string());
    row("requests", bare.requests.to_string(), cooled.requests.to_string());
    let (a, b) = (bare.viral_per_service, cooled.viral_per_service);
    row("store reads of the post/service/s", two(a), two(b));
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|a| a == "--help") {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    if let Some(wrong) = args.iter().find(|a| *a != "--json") {
        eprintln!("viral_post: unknown argument {wrong}; --help lists them");
        return ExitCode::from(2);
    }
    let as_json = !args.is_empty();
    let Ok(rt) = tokio::runtime::Runtime::new() else { return ExitCode::FAILURE };
    let zipf = Arc::new(Zipf::new());
    let both = rt.block_on(async {
        let bare = run(false, &zipf, as_json).await?;
        Ok::<_, heatsink::Error>((bare, run(true, &zipf, as_json).await?))
    });
    let (bare, cooled) = match both {
        Ok(both) => both,
        Err(error) => {
            eprintln!("viral_post: {error}");
            return ExitCode::FAILURE;
        }
    };
    if as_json {
        let mut with = json(&cooled);
        with["viral_store_reads_per_service_per_sec"] = cooled.viral_per_service.into();
        with["detected_after_ms"] = cooled.detected_after_ms.into();
        println!("{}", serde_json::json!({ "bare": json(&bare), "heatsink": with }));
    } else {
        table(&bare, &cooled);
    }
    let kept = bare.hottest_over_ceiling > 1.0
        && bare.errors > 0
        && cooled.errors == 0
        && cooled.hottest_over_ceiling <= 1.0
        && cooled.viral_per_service <= 1.0;
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
