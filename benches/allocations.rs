//! What the hot paths allocate, and what an instance and its hot keys take in memory. Counted, not
//! timed, so that a busy machine does not matter. Exit status 1: a target is missed. With `--test` it
//! is 1 only when something has become worse than it is known to be.
//!
//! `cargo bench --bench allocations [-- --json | --test]`

mod common;

use common::paths::{NAMES, Subjects};
use common::store::Nothing;
use heatsink::{Heatsink, NearCache, Treatment, blocking};
use std::process::ExitCode;
use std::time::Duration;

const TIMES: u32 = 10_000;
const HOT: usize = 4_096;
const KEY_BYTES: usize = 9;
/// An instance at its defaults, without hot keys.
const MAX_CONTROL_BYTES: f64 = (1 << 20) as f64;

/// Paths that allocate nothing.
const NONE: [&str; 5] = ["observe", "try_read_with", "read_with", "get", "buffered add"];
/// What a cold get may allocate more than a bare one: the target, and what it does now.
const ADDED: (f64, f64) = (2.0, 7.0);
/// Bytes of a hot key beside its value, as it is now.
const KEY_BYTES_NOW: f64 = 1_200.0;

/// Of a hot key beside its value: the key, a line per core, and what the tables keep of it.
fn max_key_bytes() -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (256 + KEY_BYTES + 64 * cores) as f64
}

/// Bytes of an instance at its defaults, and of each of its hot keys beside the value.
fn memory() -> heatsink::Result<(f64, f64)> {
    let hour = Duration::from_secs(3600);
    let keys: Vec<String> = (0..HOT).map(|i| format!("post:{i:04}")).collect();
    let mut hs = None;
    // One value for all keys, so that it is not counted.
    let store = Nothing::holding(256);
    let control = allocation_counter::measure(|| {
        let near = NearCache::new().fresh(hour).stale(hour);
        hs = Some(Heatsink::builder(store).near(near).build());
    });
    let hs = hs.expect("it was built")?;
    let reads = blocking::Heatsink::from(hs.clone());
    let mut filled = Ok(());
    let hot = allocation_counter::measure(|| {
        filled = hs
            .control()
            .pin_all(&keys, Treatment::near())
            .and_then(|()| keys.iter().try_for_each(|key| reads.get(key).map(drop)));
    });
    filled?;
    Ok((control.bytes_current as f64, hot.bytes_current as f64 / HOT as f64))
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let (json, smoke) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => (false, false),
        ["--test"] => (false, true),
        ["--json"] => (true, false),
        _ => {
            eprintln!("usage: allocations [--json | --test]");
            return ExitCode::from(2);
        }
    };
    let subjects = Subjects::new().expect("a store in memory and a valid configuration");
    let per_call = |name: &&str| {
        // By then what is made once is there.
        subjects.run(name, 1_000);
        let counted = allocation_counter::measure(|| subjects.run(name, TIMES));
        counted.count_total as f64 / f64::from(TIMES)
    };
    let rows: Vec<f64> = NAMES.iter().map(per_call).collect();
    let of = |name: &str| NAMES.iter().position(|n| *n == name).map_or(f64::NAN, |at| rows[at]);
    let added = of("cold get") - of("bare get");
    let (control, key) = memory().expect("room for the pins");
    let promised = NONE.iter().all(|name| of(name) == 0.0) && control <= MAX_CONTROL_BYTES;
    let met = promised && added <= ADDED.0 && key <= max_key_bytes();
    let no_worse = promised && added <= ADDED.1 && key <= KEY_BYTES_NOW;
    if json {
        let row = |(name, n): (&&str, &f64)| format!(r#"{{"name":"{name}","allocations":{n:.3}}}"#);
        let rows: Vec<String> = NAMES.iter().zip(&rows).map(row).collect();
        println!(
            r#"{{"rows":[{}],"added_to_a_cold_get":{added:.3},"control_bytes":{control:.0},"key_bytes":{key:.0},"met":{met}}}"#,
            rows.join(",")
        );
    } else {
        println!("{:<24}{:>12}", "allocations of a call", "mean");
        for (name, n) in NAMES.iter().zip(&rows) {
            println!("{name:<24}{n:>12.3}");
        }
        println!("added to a cold get: {added:.2}; to meet: {}", ADDED.0);
        println!(
            "an instance: {:.0} KiB; to meet: {:.0}",
            control / 1024.0,
            MAX_CONTROL_BYTES / 1024.0
        );
        println!("a hot key, beside its value: {key:.0} bytes; to meet: {:.0}", max_key_bytes());
    }
    if !met {
        eprintln!("a target is missed");
    }
    if smoke && !no_worse {
        eprintln!("and it is worse than it was");
    }
    if met || (smoke && no_worse) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
