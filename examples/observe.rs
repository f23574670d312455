//! How a service starts: heatsink looks on, says what it would do, and serves nothing from memory.
//!
//! An axum service over an embedded store. Without options it plays its own traffic for six
//! seconds: 4,000 requests a second, of which every fifth asks for `post:viral` from the second
//! second on, and a counter is written 300 times a second. Every second it prints what heatsink
//! would do. With `--listen` it serves yours, until it is stopped.
#![expect(clippy::disallowed_methods, reason = "a load generator lives by the real clock")]

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{Request, StatusCode};
use axum::routing::get;
use heatsink::store::MemoryStore;
use heatsink::{Ceiling, Detect, Heatsink};
use serde_json::json;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tower::ServiceExt;

const HELP: &str = "\
A service with heatsink in observe-only mode: it prints what heatsink would do.

usage: observe [--json] [--listen ADDRESS]
  --listen ADDRESS   serves GET and PUT /keys/{key}, GET /hot and GET /stats, until it is stopped
  --json             plays the built-in traffic and prints one JSON object, nothing else
  --help             this text
Exit status 1 when a value was served from memory, or the viral post was not seen.";

const RATE: f64 = 4_000.0;
const SECONDS: f64 = 6.0;
const POSTED: f64 = 1.0;
const POSTS: u64 = 2_000;
const VIRAL: &str = "post:viral";
const COUNTER: &str = "post:viral:likes";

type Fail = Box<dyn std::error::Error + Send + Sync>;

async fn read(State(hs): State<Heatsink>, Path(key): Path<String>) -> Result<Bytes, StatusCode> {
    match hs.get(key).await {
        Ok(Some(value)) => Ok(value.to_bytes()),
        Ok(None) => Err(StatusCode::NOT_FOUND),
        Err(_) => Err(StatusCode::BAD_GATEWAY),
    }
}

async fn write(State(hs): State<Heatsink>, Path(key): Path<String>, body: Bytes) -> StatusCode {
    match hs.put(key, body).await {
        Ok(()) => StatusCode::NO_CONTENT,
        Err(_) => StatusCode::BAD_GATEWAY,
    }
}

fn service(hs: &Heatsink) -> Router {
    Router::new()
        .route("/keys/{key}", get(read).put(write))
        .route("/hot", get(|State(hs): State<Heatsink>| async move { hs.hot_list().to_string() }))
        .route("/stats", get(|State(hs): State<Heatsink>| async move { hs.stats().to_string() }))
        .with_state(hs.clone())
}

/// The built-in traffic, request by request through the router.
async fn play(service: Router) -> Result<u64, Fail> {
    let start = Instant::now();
    let (mut sent, mut random) = (0_u64, 0x9E37_79B9_7F4A_7C15_u64);
    while start.elapsed().as_secs_f64() < SECONDS {
        let due = (start.elapsed().as_secs_f64() * RATE) as u64;
        while sent < due {
            let at = sent as f64 / RATE;
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let request = if at >= POSTED && sent.is_multiple_of(13) {
                Request::put(format!("/keys/{COUNTER}")).body(Body::from(sent.to_string()))?
            } else if at >= POSTED && random.is_multiple_of(5) {
                Request::get(format!("/keys/{VIRAL}")).body(Body::empty())?
            } else {
                Request::get(format!("/keys/post:{}", random % POSTS)).body(Body::empty())?
            };
            let service = service.clone();
            tokio::spawn(async move { service.oneshot(request).await.map(|r| r.status()) });
            sent += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(sent)
}

async fn tell_every_second(hs: Heatsink) {
    for second in 1.. {
        tokio::time::sleep(Duration::from_secs(1)).await;
        println!("after {second} s heatsink would do this: {}", hs.hot_list());
    }
}

async fn run(listen: Option<String>, json: bool) -> Result<ExitCode, Fail> {
    let store = MemoryStore::builder().shards(8).latency(Duration::from_millis(1)).build();
    for i in 0..POSTS {
        store.put_now(format!("post:{i}"), format!("post number {i}"))?;
    }
    store.put_now(VIRAL, "everybody reads this")?;
    let detect = Detect::new().ceiling(Ceiling::FIRESTORE).observe_only();
    let hs = Heatsink::builder(store.clone()).detect(detect).build()?;
    if let Some(address) = listen {
        let listener = tokio::net::TcpListener::bind(address).await?;
        println!("http://{}/keys/post:1, /hot, /stats", listener.local_addr()?);
        tokio::spawn(tell_every_second(hs.clone()));
        axum::serve(listener, service(&hs)).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let telling = (!json).then(|| tokio::spawn(tell_every_second(hs.clone())));
    let requests = play(service(&hs)).await?;
    tokio::time::sleep(Duration::from_millis(100)).await; // the last answers
    let (list, stats) = (hs.hot_list(), hs.stats());
    let viral = list.get(VIRAL);
    let counter = list.get(COUNTER);
    let advice = counter.and_then(|c| c.writes_advice).map(|a| a.to_string());
    let touched = stats.hot_keys > 0 || stats.hits_fresh + stats.hits_stale > 0;
    if json {
        let out = json!({
            "requests": requests,
            "store_reads_of_the_post": store.reads_of(VIRAL),
            "near_cache_hits": stats.hits_fresh + stats.hits_stale,
            "hot_keys_in_force": stats.hot_keys,
            "would_treat": viral.and_then(|v| v.treatment).map(|t| t.to_string()),
            "post_reads_per_sec": viral.map(|v| v.reads_per_sec.round()),
            "counter_writes_per_sec": counter.map(|c| c.writes_per_sec.round()),
            "counter_advice": advice,
        });
        println!("{out}");
    } else {
        println!("\n{}\n{}", hs.explain(VIRAL), hs.explain(COUNTER));
        println!("{requests} requests, {stats}");
    }
    if let Some(telling) = telling {
        telling.abort();
    }
    let seen = viral.is_some_and(|v| v.treatment.is_some() && !v.in_force) && counter.is_some();
    Ok(if seen && !touched { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    let (mut listen, mut json) = (None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match (arg.as_str(), args.len()) {
            ("--json", _) => json = true,
            ("--listen", 1..) => listen = args.next(),
            ("--help", _) => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            (other, _) => {
                eprintln!("observe: {other:?} is unknown or lacks its address\n\n{HELP}");
                return ExitCode::from(2);
            }
        }
    }
    let done = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let done = done.map_err(Fail::from).and_then(|rt| rt.block_on(run(listen, json)));
    done.unwrap_or_else(|error| {
        eprintln!("observe: {error}");
        ExitCode::FAILURE
    })
}
