//! Many callers of one missing value: loads that reach the store, and how long the callers wait.
//!
//! Cold: 1,000 callers within 2 ms, a load takes 20 ms. Expiring: a caller every 0.2 ms for a
//! second while values live 100 ms; one load per period and no more would be 1 / (0.1 + 0.02) a
//! second. Down: 200 callers of a load that takes 10 ms and fails.
//! `cargo run --release --bin herd [-- --json | --test]`

#[path = "../../../common/mod.rs"]
mod common;

use heatsink_bench_peers::caches::{Foyer, Heat, Load, Moka, Peer, Quick, Source, fresh, runtime};
use heatsink_bench_peers::report::{self, Args, Figure, control_scaling};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const LOAD: Duration = Duration::from_millis(20);

struct Scale {
    cold: usize,
    expiring: Duration,
    down: usize,
}

/// A pause that begins when it is first polled, as the load around it does.
async fn sleep(time: Duration) {
    tokio::time::sleep(time).await;
}

/// Waits of callers that come one `gap` after another, in milliseconds, sorted.
async fn callers<P: Peer>(
    peer: &P,
    (n, gap): (usize, Duration),
    load: impl Fn() -> Load,
) -> Vec<f64> {
    let begun = Instant::now();
    let mut tasks = Vec::with_capacity(n);
    for i in 0..n {
        let due = gap * i as u32;
        if due > begun.elapsed() + Duration::from_millis(1) {
            tokio::time::sleep(due.saturating_sub(begun.elapsed())).await;
        }
        let (peer, load) = (peer.clone(), load());
        tasks.push(tokio::spawn(async move {
            let called = Instant::now();
            let _ = peer.read(load).await;
            called.elapsed().as_secs_f64() * 1e3
        }));
    }
    let mut waits = Vec::with_capacity(n);
    for task in tasks {
        waits.push(task.await.expect("a caller"));
    }
    waits.sort_by(f64::total_cmp);
    waits
}

fn p99(waits: &[f64]) -> f64 {
    waits[(waits.len() - 1) * 99 / 100]
}

async fn ask<P: Peer>(scale: &Scale, into: &mut Vec<Figure>) {
    let mut row = |what: &str, value: f64| {
        let over = format!("{}: {what}", Heat::NAME);
        into.push(Figure::new(format!("{}: {what}", P::NAME), 2, value).over(over));
    };
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    let load = || source.load_then(sleep(LOAD));
    let gap = Duration::from_millis(2) / scale.cold as u32;
    let waits = callers(&peer, (scale.cold, gap), load).await;
    row("cold, loads", f64::from(source.loads()));
    row("cold, p99 ms", p99(&waits));
    if P::HAS_TTL {
        let (peer, source) = (P::new(Duration::from_millis(100)), Source::holding("v"));
        let load = || source.load_then(sleep(LOAD));
        let gap = Duration::from_micros(200);
        let n = (scale.expiring.as_secs_f64() / gap.as_secs_f64()) as usize;
        let waits = callers(&peer, (n, gap), load).await;
        row("expiring, loads a second", f64::from(source.loads()) / scale.expiring.as_secs_f64());
        row("expiring, p99 ms", p99(&waits));
    }
    let (peer, source) = (fresh::<P>(), Source::holding("v"));
    let load = || source.failing(Duration::from_millis(10));
    let waits = callers(&peer, (scale.down, Duration::ZERO), load).await;
    row("down, loads", f64::from(source.loads()));
    row("down, p99 ms", p99(&waits));
}

fn main() -> ExitCode {
    let args = match Args::parse("herd", "") {
        Ok(args) => args,
        Err(code) => return code,
    };
    let scale = if args.smoke {
        Scale { cold: 50, expiring: Duration::from_millis(250), down: 10 }
    } else {
        Scale { cold: 1_000, expiring: Duration::from_secs(1), down: 200 }
    };
    let runtime = runtime();
    report::run(&args, "ratio: over heatsink", || {
        let figures = runtime.block_on(async {
            let mut figures = Vec::new();
            ask::<Heat>(&scale, &mut figures).await;
            ask::<Moka>(&scale, &mut figures).await;
            ask::<Quick>(&scale, &mut figures).await;
            ask::<Foyer>(&scale, &mut figures).await;
            figures
        });
        (figures, control_scaling())
    })
}
