//! A flash sale on virtual time: 200,000 buyers within one second, 10,000 pairs of shoes.
//!
//! Each row of the store takes a thousand conditional decrements a second. Bare, all buyers go for
//! one row; those that are refused try twice more. With heatsink the units lie in 16 buckets on
//! different shards, and a waiting room lets buyers in at the rate that the buckets can take.

use heatsink::engine::time::Tick;
use heatsink::store::{Id, MemoryStore, Store, Take};
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, Key, Loads, Retry, Stock, Taken, WaitingRoom};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const HELP: &str = "\
200,000 buyers in one second, 10,000 units: on virtual time, in a few seconds.
Exit status 1 when a unit is sold twice or not at all, or when the last 100 units take more than
3 times as long as the first 100 or as the median hundred.

usage: flash_sale [--json]
  --json   one JSON object on stdout, nothing else
  --help   this text";

const BUYERS: u64 = 200_000;
const UNITS: u64 = 10_000;
const BUCKETS: usize = 16;
/// Conditional decrements a second of one row.
const ROW_PER_SEC: u32 = 1_000;
/// What the waiting room lets in: half of what the buckets can take, since near the end a sale asks
/// more than one of them.
const LET_IN_PER_SEC: u32 = 8_000;
const PLACES: usize = 20_000;
const ROUND_TRIP: Duration = Duration::from_millis(1);
/// Attempts of a buyer whom a bare row refuses.
const BARE_TRIES: u32 = 3;

/// By how much the last units may be slower.
const SLOWER_MAX: f64 = 3.0;

type Fail = Box<dyn std::error::Error + Send + Sync>;

/// What the buyers came to.
#[derive(Default)]
struct Sale {
    /// How long each sold unit took, and when it was sold, in ticks.
    took: Mutex<Vec<(u64, u64)>>,
    sold_out_at: Mutex<Option<Tick>>,
    /// Told that nothing is left.
    sold_out: AtomicU64,
    /// Refused, with a position or a time to come back.
    refused: AtomicU64,
    /// What the last of them was told.
    refusal: Mutex<Option<String>>,
    /// Neither a unit nor an answer.
    failed: AtomicU64,
}

impl Sale {
    fn sold(&self, came: Tick, now: Tick) {
        if let Ok(mut took) = self.took.lock() {
            took.push((now.since(came).as_nanos() as u64, now.0));
        }
    }

    fn none_left(&self, now: Tick) {
        self.sold_out.fetch_add(1, Relaxed);
        if let Ok(mut at) = self.sold_out_at.lock() {
            at.get_or_insert(now);
        }
    }
}

/// What one way of selling came to.
struct Outcome {
    sold: u64,
    store_ops: u64,
    p50: Duration,
    p99: Duration,
    sold_out_after: Option<Duration>,
    sold_out: u64,
    refused: u64,
    refusal: Option<String>,
    failed: u64,
    /// Milliseconds in which each hundred units were sold.
    hundreds: Vec<f64>,
}

impl Outcome {
    fn of(sale: &Sale, store_ops: u64, began: Tick) -> Result<Outcome, Fail> {
        let took = sale.took.lock().map_err(|_| "a buyer panicked")?;
        let mut waits: Vec<u64> = took.iter().map(|t| t.0).collect();
        let mut at: Vec<u64> = took.iter().map(|t| t.1).collect();
        waits.sort_unstable();
        at.sort_unstable();
        let rank = |p: usize| waits.get((waits.len() * p / 100).min(waits.len().max(1) - 1));
        let wait = |p| Duration::from_nanos(rank(p).copied().unwrap_or(0));
        // Between 100 sales there are 99 gaps, in every hundred.
        let time = |units: &[u64]| (units[99] - units[0]) as f64 / 1e6;
        Ok(Outcome {
            sold: took.len() as u64,
            store_ops,
            p50: wait(50),
            p99: wait(99),
            sold_out_after: sale
                .sold_out_at
                .lock()
                .map_err(|_| "a buyer panicked")?
                .map(|t| t.since(began)),
            sold_out: sale.sold_out.load(Relaxed),
            refused: sale.refused.load(Relaxed),
            refusal: sale.refusal.lock().map_err(|_| "a buyer panicked")?.take(),
            failed: sale.failed.load(Relaxed),
            hundreds: at.chunks_exact(100).map(time).collect(),
        })
    }

    /// Time per unit of the last 100 units, over that of the first 100 and over that of the median
    /// hundred, which no slow opening can flatter.
    fn last_over(&self) -> Option<(f64, f64)> {
        let (first, last) = self.hundreds.first().zip(self.hundreds.last())?;
        let mut sorted = self.hundreds.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        let ratio = |over: f64| (last / over * 100.0).round() / 100.0;
        Some((ratio(*first), ratio(median)))
    }

    fn oversold(&self) -> u64 {
        self.sold.saturating_sub(UNITS)
    }

    fn json(&self) -> Value {
        let last_over = self.last_over();
        json!({
            "units": UNITS,
            "sold": self.sold,
            "oversold": self.oversold(),
            "store_ops": self.store_ops,
            "p50_us": self.p50.as_micros() as u64,
            "p99_us": self.p99.as_micros() as u64,
            "sold_out_ms": self.sold_out_after.map(|t| t.as_millis() as u64),
            "told_sold_out": self.sold_out,
            "refused": self.refused,
            "failed": self.failed,
            "last_over_first": last_over.map(|(first, _)| first),
            "last_over_median": last_over.map(|(_, median)| median),
        })
    }
}

fn store(rt: &SimRuntime) -> MemoryStore {
    MemoryStore::builder()
        .shards(64)
        .ceiling(ROW_PER_SEC)
        .queue_max(Duration::from_millis(100))
        .latency(ROUND_TRIP)
        .runtime(rt.clone())
        .seed(42)
        .build()
}

fn operations(store: &MemoryStore) -> u64 {
    store.counts().iter().map(|shard| shard.offered).sum()
}

/// Sends the buyers, spread over one second, and waits until all have their answer.
fn send<F>(rt: &SimRuntime, buy: impl Fn(u64) -> F) -> Tick
where
    F: Future<Output = ()> + Send + 'static,
{
    let began = rt.now();
    for n in 0..BUYERS {
        let at = began.after(Duration::from_nanos(n * 1_000_000_000 / BUYERS));
        rt.run_until(at);
        rt.spawn(buy(n));
    }
    rt.run_for(Duration::from_secs(10));
    began
}

/// One row, and everybody at once.
fn bare() -> Result<Outcome, Fail> {
    let rt = SimRuntime::new(1);
    let (store, sale) = (store(&rt), Arc::new(Sale::default()));
    let row = Key::from("sku:AJ1");
    store.put_now(row.clone(), UNITS.to_string())?;
    let began = send(&rt, |n| {
        let (rt, store, sale, row) = (rt.clone(), store.clone(), sale.clone(), row.clone());
        async move {
            let came = rt.now();
            let hold = Id::from(&*format!("order:{n}"));
            for _ in 0..BARE_TRIES {
                match store.take(&row, 1, &hold).await {
                    Ok(Take::Taken { .. }) => return sale.sold(came, rt.now()),
                    Ok(_) => return sale.none_left(rt.now()),
                    Err(error) => match error.retry() {
                        Retry::After(wait) => rt.sleep(wait).await,
                        _ => break,
                    },
                }
            }
            sale.failed.fetch_add(1, Relaxed);
        }
    });
    Outcome::of(&sale, operations(&store), began)
}

/// Buckets behind a waiting room.
fn heatsink() -> Result<Outcome, Fail> {
    let rt = SimRuntime::new(2);
    let (store, sale) = (store(&rt), Arc::new(Sale::default()));
    let hs = Heatsink::builder(store.clone())
        .runtime(rt.clone())
        .seed(2)
        .loads(Loads::new().timeout(Duration::from_secs(1)))
        .build()?;
    let shoes = hs.stock("sku:AJ1")?;
    rt.block_on(shoes.create(UNITS, BUCKETS))?;
    let room = hs.waiting_room(LET_IN_PER_SEC, PLACES)?;
    let before = operations(&store);
    let began = send(&rt, |n| buyer(rt.clone(), shoes.clone(), room.clone(), sale.clone(), n));
    let ops = operations(&store) - before;
    let books = rt.block_on(shoes.accounts())?;
    if !books.balance() || books.sold + books.free != UNITS {
        return Err(format!("the books do not balance: {books}").into());
    }
    Outcome::of(&sale, ops, began)
}

async fn buyer(rt: SimRuntime, shoes: Stock, room: WaitingRoom, sale: Arc<Sale>, n: u64) {
    let came = rt.now();
    let mut ticket = match room.enter() {
        Ok(ticket) => ticket,
        Err(error) => {
            sale.refused.fetch_add(1, Relaxed);
            if let Ok(mut refusal) = sale.refusal.lock() {
                *refusal = Some(error.to_string());
            }
            return;
        }
    };
    ticket.admitted().await;
    match shoes.take(1, format!("order:{n}")).await {
        Ok(Taken::Held(held)) => {
            sale.sold(came, rt.now());
            // The buyer pays.
            rt.sleep(Duration::from_millis(2_000 + n % 3_000)).await;
            if held.confirm().await.is_err() {
                sale.failed.fetch_add(1, Relaxed);
            }
        }
        Ok(Taken::SoldOut) => sale.none_left(rt.now()),
        _ => drop(sale.failed.fetch_add(1, Relaxed)),
    }
}

fn show(name: &str, o: &Outcome) {
    let out = o.sold_out_after.map_or_else(|| "never".into(), |t| format!("{} ms", t.as_millis()));
    println!(
        "{name:<9} {:>6} {:>9} {:>10} {:>9.1?} {:>9.1?} {:>9} {:>9} {:>9} {:>7}",
        o.sold,
        o.oversold(),
        o.store_ops,
        o.p50,
        o.p99,
        out,
        o.sold_out,
        o.refused,
        o.failed
    );
}

fn run(as_json: bool) -> Result<bool, Fail> {
    let bare = bare()?;
    let with = heatsink()?;
    if as_json {
        let mut out = with.json();
        out["bare"] = bare.json();
        println!("{out}");
    } else {
        println!(
            "{BUYERS} buyers in one second, {UNITS} units, {ROW_PER_SEC} decrements/s a row\n"
        );
        println!(
            "{:<9} {:>6} {:>9} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7}",
            "",
            "sold",
            "oversold",
            "store ops",
            "p50",
            "p99",
            "sold out",
            "told so",
            "refused",
            "failed"
        );
        show("bare", &bare);
        show("heatsink", &with);
        let (first, median) = with.last_over().unwrap_or_default();
        println!(
            "\n{} buyers were refused at the door. The last of them was told: {}\n\
             The last 100 units took {first:.1} times as long as the first 100, and {median:.1} times \
             as long as the median hundred.",
            with.refused,
            with.refusal.as_deref().unwrap_or("nothing"),
        );
    }
    let fast = with.last_over().is_some_and(|(a, b)| a <= SLOWER_MAX && b <= SLOWER_MAX);
    Ok(with.sold == UNITS && with.failed == 0 && fast)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let json = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--json"] => true,
        ["--help" | "-h"] => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("flash_sale: unknown arguments {args:?} (--help says more)");
            return ExitCode::from(2);
        }
    };
    match run(json) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("flash_sale: {error}");
            ExitCode::FAILURE
        }
    }
}
