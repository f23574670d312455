//! The same story on real Redis: `viral_post --redis URL`, or `--redis cluster` for three masters
//! and their replicas that are started here and stopped with this process.
//!
//! Redis says itself how many reads reached each shard.

#[path = "../servers/mod.rs"]
mod servers;

use super::{Fail, Meter, Service, Traffic, VIRAL, hottest, rates, round};
use heatsink::store::{RedisStore, Store};
use heatsink::{Heatsink, Key, NearCache};
use serde_json::json;
use servers::cluster::{Cluster, MASTERS};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Reads a second: a fifth of what two cores carry with the servers beside the services.
const RATE: f64 = 16_000.0;
const SERVICES: usize = 4;
const SECONDS: f64 = 5.0;
/// The measured part begins after the services have found the post.
const FROM: f64 = 1.0;

struct Outcome {
    rates: Vec<f64>,
    errors: u64,
    requests: u64,
    p50_us: u64,
    p99_us: u64,
}

impl Outcome {
    fn json(&self) -> serde_json::Value {
        json!({
            "hottest_reads_per_sec": round(hottest(&self.rates).0),
            "hottest_over_mean": round(hottest(&self.rates).1),
            "errors": self.errors,
            "requests": self.requests,
            "p50_us": self.p50_us,
            "p99_us": self.p99_us,
        })
    }
}

/// Where the servers are, and how their reads are counted.
struct Place {
    urls: Vec<String>,
    cluster: Option<Cluster>,
}

impl Place {
    fn find(url: &str) -> Place {
        if url != "cluster" {
            return Place { urls: vec![url.into()], cluster: None };
        }
        let cluster = Cluster::start();
        let urls = (0..MASTERS).map(|i| cluster.url(i)).collect();
        Place { urls, cluster: Some(cluster) }
    }

    async fn store(&self) -> heatsink::Result<RedisStore> {
        RedisStore::builder(&self.urls[0]).cluster(self.cluster.is_some()).connect().await
    }

    /// GETs that each node has served.
    fn reads(&self) -> Result<Vec<u64>, Fail> {
        let reads = |url: &String| {
            let mut conn = redis::Client::open(url.as_str())?.get_connection()?;
            let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut conn)?;
            let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_get:calls="));
            Ok(line.and_then(|l| l.split(',').next()?.parse().ok()).unwrap_or(0))
        };
        self.urls.iter().map(reads).collect()
    }
}

async fn run(place: &Place, wrapped: bool) -> Result<Outcome, Fail> {
    let mut services = Vec::new();
    for _ in 0..SERVICES {
        let store = place.store().await?;
        services.push(if wrapped {
            let near = NearCache::new().fresh(Duration::from_millis(1_200)).jitter_permille(0);
            let hs = Heatsink::builder(store).near(near).build()?;
            Service::Heatsink(hs)
        } else {
            Service::Bare(store)
        });
    }
    let (services, meter) = (Arc::new(services), Arc::new(Meter::new()));
    let mut traffic = Traffic::new();
    let (start, mut sent, mut from) = (Instant::now(), 0_u64, None);
    while start.elapsed().as_secs_f64() < SECONDS {
        if from.is_none() && start.elapsed().as_secs_f64() > FROM {
            from = Some((start.elapsed().as_secs_f64(), place.reads()?));
        }
        let due = (start.elapsed().as_secs_f64() * RATE) as u64;
        while sent < due {
            let at = Duration::from_secs_f64(sent as f64 / RATE);
            let (key, service) = (traffic.next(true), sent as usize % SERVICES);
            let (services, meter) = (services.clone(), meter.clone());
            tokio::spawn(async move {
                let ok = services[service].read(&key).await;
                meter.add(ok, start.elapsed().saturating_sub(at));
            });
            sent += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (since, before) = from.ok_or("the measured part did not begin")?;
    let rates = rates(&before, &place.reads()?, start.elapsed().as_secs_f64() - since);
    tokio::time::sleep(Duration::from_millis(300)).await; // the last answers
    Ok(Outcome {
        rates,
        errors: meter.errors.load(Relaxed),
        requests: meter.requests.load(Relaxed),
        p50_us: meter.quantile(0.5),
        p99_us: meter.quantile(0.99),
    })
}

async fn both(place: &Place, as_json: bool) -> Result<ExitCode, Fail> {
    let store = place.store().await?;
    for i in 0..2_000 {
        store.put(&Key::from(format!("post:{i}")), vec![b'x'; 200].into(), None).await?;
    }
    store.put(&Key::from(VIRAL), vec![b'v'; 200].into(), None).await?;
    let (bare, heat) = (run(place, false).await?, run(place, true).await?);
    if as_json {
        println!("{}", json!({ "bare": bare.json(), "heatsink": heat.json() }));
    } else {
        println!("{:<34}{:>12}{:>12}", "one post takes a fifth of the reads", "bare", "heatsink");
        for (i, (bare, heat)) in bare.rates.iter().zip(&heat.rates).enumerate() {
            println!("{:<34}{bare:>12.0}{heat:>12.0}", format!("shard {i}, reads/s"));
        }
        let row = |name: &str, f: &dyn Fn(&Outcome) -> u64| {
            println!("{name:<34}{:>12}{:>12}", f(&bare), f(&heat));
        };
        row("requests", &|o| o.requests);
        row("errors", &|o| o.errors);
        row("p50, us", &|o| o.p50_us);
        row("p99, us", &|o| o.p99_us);
    }
    let sum = |o: &Outcome| o.rates.iter().sum::<f64>();
    // A fifth of the reads is the post's; half of that saved is far beyond what chance does.
    let kept = heat.errors == 0 && bare.errors == 0 && sum(&heat) < 0.9 * sum(&bare);
    if !kept {
        eprintln!("viral_post: heatsink did not keep its promise");
    }
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(super) fn main(url: &str, as_json: bool) -> Result<ExitCode, Fail> {
    let place = Place::find(url);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(both(&place, as_json))
}
