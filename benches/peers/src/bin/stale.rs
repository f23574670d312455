//! Who shows a value that was already replaced? One program, the same cases, each really run.
//!
//! In every case the loads and the calls between them are held at barriers, so that they happen in
//! the order that the case names. `old` is what the source held before the write, `new` what it
//! holds since. `cargo run --release --bin stale [-- --json | --test]`; the table is Markdown.

#[path = "../../../common/mod.rs"]
mod common;

use heatsink_bench_peers::caches::{
    Foyer, Heat, KEY, Load, Moka, Peer, Quick, ROOM, Source, fresh, runtime,
};
use heatsink_bench_peers::report::{Args, control_scaling, valid_runs};
use redis::AsyncConnectionConfig;
use redis::caching::CacheConfig;
use serde_json::json;
use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// Time for tasks to come to their barriers.
const SETTLE: Duration = Duration::from_millis(20);
const NAMES: [&str; 5] = [Heat::NAME, Moka::NAME, Quick::NAME, Foyer::NAME, "redis-rs"];
/// What redis-rs has no call for.
const NONE: &str = "-";

const CASES: [&str; 14] = [
    "load, removal meanwhile: who comes after the removal gets",
    "the same: a reader after the load has ended gets",
    "load, write of a new value meanwhile: a later reader gets",
    "load, removal of everything meanwhile: a later reader gets",
    "load, removal by a condition meanwhile: a later reader gets",
    "a write times out, is called off, and lands: a later reader gets",
    "oldest value served, time to live 100 ms, load 80 ms",
    "40 callers 10 ms apart, deadline 50 ms, load 80 ms",
    "8 callers, the load panics",
    "50 callers, the load fails",
    "100 calls, one after the other, no such value",
    "two forms of call, one key",
    "a load that reads its own key",
    "100 entries, everything removed, 100 again: entries there",
];

/// A pause that begins when it is first polled, as the load around it does.
async fn pause(time: Duration) {
    sleep(time).await;
}

/// A load that reads the source and then waits for `go`; `begun` is told when it has read.
fn held(source: &Source, begun: &Arc<Notify>, go: &Arc<Notify>) -> Load {
    let (source, begun, go) = (source.clone(), begun.clone(), go.clone());
    Box::pin(async move {
        let value = source.begin();
        begun.notify_one();
        go.notified().await;
        Ok(value)
    })
}

/// A load begins, `meanwhile` happens, a second caller comes, the load ends, a third caller comes.
/// What the second and the third get.
async fn overlapped<P: Peer, F: Future<Output = bool> + Send>(
    meanwhile: impl FnOnce(P) -> F,
) -> Option<(String, String)> {
    let (peer, source) = (fresh::<P>(), Source::holding("old"));
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let first = {
        let (peer, load) = (peer.clone(), held(&source, &begun, &go));
        tokio::spawn(async move { peer.read(load).await })
    };
    begun.notified().await;
    source.set("new");
    let possible = meanwhile(peer.clone()).await;
    let second = {
        let (peer, load) = (peer.clone(), source.load());
        tokio::spawn(async move { peer.read(load).await })
    };
    sleep(SETTLE).await;
    go.notify_one();
    first.await.ok()?.ok()?;
    let second = second.await.ok()?.unwrap_or_else(|e| e);
    let third = peer.read(source.load()).await.unwrap_or_else(|e| e);
    possible.then_some((second, third))
}

async fn later<P: Peer, F: Future<Output = bool> + Send>(meanwhile: impl FnOnce(P) -> F) -> String {
    overlapped(meanwhile).await.map_or_else(|| NONE.into(), |(_, third)| third)
}

/// The writer hears nothing in time and calls the write off; a reader comes; the write lands.
async fn unknown_write<P: Peer>() -> String {
    let (peer, source) = (fresh::<P>(), Source::holding("old"));
    peer.write_unknown().await;
    let _ = peer.read(source.load()).await;
    source.set("new");
    sleep(SETTLE).await;
    peer.read(source.load()).await.unwrap_or_else(|e| e)
}

/// The age of the oldest value that was served, counted from the start of its load.
async fn oldest<P: Peer>() -> String {
    if !P::HAS_TTL {
        return "no time to live".into();
    }
    let (ttl, load) = (Duration::from_millis(100), Duration::from_millis(80));
    let (peer, source) = (P::new(ttl), Source::holding("v"));
    let start = Instant::now();
    let _ = peer.read(source.load_then(pause(load))).await;
    let mut oldest = Duration::ZERO;
    while start.elapsed() < 3 * ttl {
        let asked = start.elapsed();
        let _ = peer.read(source.load()).await;
        if source.loads() > 1 {
            break;
        }
        oldest = asked;
        sleep(Duration::from_millis(1)).await;
    }
    if oldest <= ttl { "within 100 ms".into() } else { "older than 100 ms".into() }
}

async fn deadlines<P: Peer>() -> String {
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    let mut callers = Vec::new();
    for _ in 0..40 {
        let (peer, load) = (peer.clone(), source.load_then(pause(Duration::from_millis(80))));
        let call = async move { timeout(Duration::from_millis(50), peer.read(load)).await };
        callers.push(tokio::spawn(call));
        sleep(Duration::from_millis(10)).await;
    }
    let mut served = 0;
    for caller in callers {
        served += u32::from(matches!(caller.await, Ok(Ok(Ok(_)))));
    }
    // Those who came before the first load could have ended are nobody's fault.
    let verdict = if served >= 30 { "most served" } else { "none served" };
    let verdict = if (1..30).contains(&served) { "some served" } else { verdict };
    let loads = source.loads();
    format!("{verdict}, {}", if loads == 1 { "1 load" } else { "many loads" })
}

async fn together<P: Peer>(n: usize, load: impl Fn(&Source) -> Load) -> (u32, String) {
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    let mut callers = Vec::new();
    for _ in 0..n {
        let (peer, load) = (peer.clone(), load(&source));
        callers.push(tokio::spawn(async move { peer.read(load).await }));
    }
    for caller in callers {
        let _ = caller.await;
    }
    let after = timeout(Duration::from_millis(500), peer.read(source.load())).await;
    let after = if matches!(after, Ok(Ok(_))) { "" } else { ", then stuck" };
    (source.loads() - u32::from(after.is_empty()), after.into())
}

fn loads((loads, after): (u32, String)) -> String {
    format!("{loads} load{}{after}", if loads == 1 { "" } else { "s" })
}

async fn absent<P: Peer>() -> String {
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    for _ in 0..100 {
        let _ = peer.read(source.failing(Duration::ZERO)).await;
    }
    loads((source.loads(), String::new()))
}

async fn forms<P: Peer>() -> String {
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    let both = peer.two_forms(|| source.load_then(pause(SETTLE))).await;
    both.map_or_else(|| "one form only".into(), |()| loads((source.loads(), String::new())))
}

async fn recursive<P: Peer>() -> String {
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    let inner = {
        let (peer, inner) = (peer.clone(), source.load());
        Box::pin(async move { peer.read(inner).await })
    };
    match timeout(Duration::from_millis(500), peer.read(inner)).await {
        Err(_) => "hangs".into(),
        Ok(Err(_)) => "an error".into(),
        Ok(Ok(_)) => "served".into(),
    }
}

async fn room<P: Peer>() -> String {
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    for round in 0..2 {
        for i in 0..ROOM {
            let _ = peer.read_key(&format!("{KEY}{i}"), source.load()).await;
        }
        if round == 0 {
            peer.clear();
        }
    }
    let before = source.loads();
    for i in 0..ROOM {
        let _ = peer.read_key(&format!("{KEY}{i}"), source.load()).await;
    }
    let there = ROOM as u32 - (source.loads() - before).min(ROOM as u32);
    // A capacity that is divided among shards evicts some.
    let verdict = if there >= 70 { "most or all" } else { "few" };
    if there <= 1 { format!("{there}") } else { verdict.into() }
}

async fn column<P: Peer>() -> Vec<String> {
    let removed = overlapped::<P, _>(|p| async move {
        p.remove().await;
        true
    });
    let (joined, after) = removed.await.unwrap_or_else(|| (NONE.into(), NONE.into()));
    vec![
        joined,
        after,
        later::<P, _>(|p| async move {
            p.insert("new").await;
            true
        })
        .await,
        later::<P, _>(|p| async move {
            p.clear();
            true
        })
        .await,
        later::<P, _>(|p| async move { p.remove_where() }).await,
        unknown_write::<P>().await,
        oldest::<P>().await,
        deadlines::<P>().await,
        loads(together::<P>(8, |s| s.panicking(Duration::from_millis(10))).await),
        loads(together::<P>(50, |s| s.failing(Duration::from_millis(10))).await),
        absent::<P>().await,
        forms::<P>().await,
        recursive::<P>().await,
        room::<P>().await,
    ]
}

/// A server that speaks as much RESP3 as the client needs. Whoever gets the value is told in the
/// same segment that it is not valid any more.
async fn serve(listener: TcpListener) {
    let (mut stream, _) = listener.accept().await.expect("the client");
    let (mut buffer, mut gets) = (vec![0; 4096], 0);
    loop {
        let n = stream.read(&mut buffer).await.unwrap_or(0);
        if n == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&buffer[..n]).to_uppercase();
        let mut reply = String::new();
        let mut told = "";
        // Every command is an array of bulk strings; its name is the first.
        for command in text.split('*').skip(1) {
            match command.lines().nth(2) {
                Some("HELLO") => reply.push_str("%1\r\n+proto\r\n:3\r\n"),
                Some("GET") => {
                    gets += 1;
                    reply.push_str(if gets == 1 { "$3\r\nold\r\n" } else { "$3\r\nnew\r\n" });
                    told = ">2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n";
                }
                Some("PTTL") => reply.push_str(":-1\r\n"),
                _ => reply.push_str("+OK\r\n"),
            }
        }
        reply.push_str(told);
        if stream.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// The reply to a GET, with the invalidation right behind it: what a later GET of redis-rs with its
/// client-side cache gets.
async fn client_side() -> Result<String, Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("redis://{}/?protocol=resp3", listener.local_addr()?);
    let server = tokio::spawn(serve(listener));
    let config = AsyncConnectionConfig::new().set_cache_config(CacheConfig::new());
    let client = redis::Client::open(url)?;
    let mut conn = client.get_multiplexed_async_connection_with_config(&config).await?;
    let mut get = redis::cmd("GET");
    get.arg(KEY);
    let _: String = get.query_async(&mut conn).await?;
    sleep(SETTLE).await;
    let later = get.query_async(&mut conn).await?;
    server.abort();
    Ok(later)
}

/// One run: a column of answers for each.
async fn run() -> Vec<Vec<String>> {
    let mut redis = vec![NONE.to_owned(); CASES.len()];
    redis[1] = client_side().await.unwrap_or_else(|e| format!("no answer: {e}"));
    let ours = column::<Heat>().await;
    vec![ours, column::<Moka>().await, column::<Quick>().await, column::<Foyer>().await, redis]
}

fn main() -> ExitCode {
    let args = match Args::parse("stale", "") {
        Ok(args) => args,
        Err(code) => return code,
    };
    // Loads panic here because a case wants it.
    std::panic::set_hook(Box::new(|_| {}));
    let runtime = runtime();
    let (runs, valid) = valid_runs(&args, || (runtime.block_on(run()), control_scaling()));
    // What all runs said; where they differ, everything that was said.
    let answer = |case: usize, peer: usize| {
        let said: BTreeSet<&str> = runs.iter().map(|run| run[peer][case].as_str()).collect();
        said.into_iter().collect::<Vec<_>>().join(" or ")
    };
    if args.json {
        let row = |case: usize| {
            let answers: serde_json::Map<_, _> = NAMES
                .iter()
                .enumerate()
                .map(|(peer, name)| ((*name).into(), answer(case, peer).into()))
                .collect();
            json!({ "name": CASES[case], "threads": 2, "answers": answers })
        };
        let rows: Vec<_> = (0..CASES.len()).map(row).collect();
        println!("{}", json!({ "rows": rows, "runs": runs.len(), "valid": valid }));
    } else {
        println!("| case | {} |", NAMES.join(" | "));
        println!("|---{}|", "|---".repeat(NAMES.len()));
        for (case, name) in CASES.iter().enumerate() {
            let answers: Vec<String> = (0..NAMES.len()).map(|peer| answer(case, peer)).collect();
            println!("| {name} | {} |", answers.join(" | "));
        }
    }
    if valid { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
