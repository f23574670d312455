//! One process of the fleet: reads as it is told, and says what changes.

use heatsink::feed::Fleet;
use heatsink::store::RedisStore;
use heatsink::{Heatsink, Key};
use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// All processes together must ask for it this many times a second.
const PROMOTE_AT: f64 = 80.0;

/// What three processes ask for is still above four fifths of it.
const KEY: &str = "post:9";

pub(crate) fn run(args: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let url = args.iter().position(|a| a == "--process").and_then(|at| args.get(at + 1));
    let url = url.ok_or("--process needs the address of a Redis")?;
    let never_lead = args.iter().any(|a| a == "--never-lead");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let per_sec = Arc::new(AtomicU64::new(0));
    let told = per_sec.clone();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let rate = line.strip_prefix("read ").and_then(|n| n.parse().ok());
            told.store(rate.unwrap_or(0), Relaxed);
        }
        // Whoever started this process has ended.
        std::process::exit(0);
    });
    runtime.block_on(serve(url, never_lead, per_sec))
}

async fn serve(
    url: &str,
    never_lead: bool,
    per_sec: Arc<AtomicU64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let store = RedisStore::connect(url).await?;
    let hs = Heatsink::new(store.clone())?;
    hs.put(KEY, "hello").await?;
    let mut fleet = Fleet::over(store)?.promote_at(PROMOTE_AT);
    if never_lead {
        fleet = fleet.never_lead();
    }
    let member = hs.join_fleet(fleet)?;
    let reader = hs.clone();
    tokio::spawn(async move {
        loop {
            let rate = per_sec.load(Relaxed);
            if rate > 0 {
                let _ = reader.get(KEY).await;
            }
            tokio::time::sleep(Duration::from_secs(1) / rate.clamp(20, 1_000) as u32).await;
        }
    });
    let (mut treats, mut leads) = (false, false);
    loop {
        let now = (hs.control().treated().contains(&Key::from(KEY)), member.stats().leads);
        if now.0 != treats {
            println!("{}", if now.0 { "treats the key" } else { "treats it no more" });
        }
        if now.1 != leads {
            println!("{}", if now.1 { "leads" } else { "follows" });
        }
        (treats, leads) = now;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
