//! How many slots a hot counter needs where slots fall on shards at random.

use heatsink::engine::control::sizing::{K_MAX, Row, row, smallest};
use serde_json::json;
use std::process::ExitCode;

const HELP: &str = "\
For each number of slots: how many different shards they are expected to fall on, how many of them
the busiest shard gets, and its load; exact. Then the smallest number whose busiest shard stays
below the target with a probability of 95 %.

usage: sizing --rate PER_SEC --shards N --ceiling PER_SEC [--target PART] [--json]
  --rate     writes of the key, a second
  --shards   shards of the store, at least 2
  --ceiling  writes that one shard takes, a second
  --target   the part of the ceiling that is planned with, up to 1 (default 0.8)
  --json     one JSON object on stdout, nothing else
  --help     this text";

struct Asked {
    rate: f64,
    shards: u32,
    ceiling: f64,
    target: f64,
    json: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Asked>, String> {
    let (mut rate, mut shards, mut ceiling) = (None, None, None);
    let (mut target, mut json) = (0.8, false);
    while let Some(arg) = args.next() {
        let mut number = || -> Result<f64, String> {
            let text = args.next().ok_or_else(|| format!("{arg} needs a number"))?;
            let n: f64 = text.parse().map_err(|_| format!("{arg}: {text:?} is no number"))?;
            if n.is_finite() && n > 0.0 { Ok(n) } else { Err(format!("{arg} must be above zero")) }
        };
        match arg.as_str() {
            "--rate" => rate = Some(number()?),
            "--shards" => shards = Some(number()?),
            "--ceiling" => ceiling = Some(number()?),
            "--target" => target = number()?,
            "--json" => json = true,
            "--help" => return Ok(None),
            other => return Err(format!("unknown argument {other:?}")),
        }
    }
    let need = |n: Option<f64>, what: &str| n.ok_or_else(|| format!("{what} is missing"));
    let (rate, ceiling) = (need(rate, "--rate")?, need(ceiling, "--ceiling")?);
    let shards = need(shards, "--shards")?;
    if !(2.0..=1e6).contains(&shards) || shards.fract() != 0.0 || target > 1.0 {
        return Err("--shards must be a whole number from 2, --target at most 1".into());
    }
    Ok(Some(Asked { rate, shards: shards as u32, ceiling, target, json }))
}

fn print(asked: &Asked, rows: &[Row], k: Option<u32>) {
    println!("slots  distinct shards  busiest shard's slots   its load at the");
    println!("              expected      median     95th     95th percentile");
    for r in rows {
        let mark = if Some(r.k) == k { "  <- the smallest" } else { "" };
        let Row { k, distinct, median, p95, load_per_sec } = r;
        println!("{k:>5}  {distinct:>15.1}  {median:>10}  {p95:>7}  {load_per_sec:>14.0}/s{mark}");
    }
    let limit = asked.ceiling * asked.target;
    match k {
        Some(k) => println!("the smallest below {limit:.0}/s: {k} slots"),
        None => println!("no number of slots up to {K_MAX} stays below {limit:.0}/s"),
    }
}

fn main() -> ExitCode {
    let asked = match parse(std::env::args().skip(1)) {
        Ok(Some(asked)) => asked,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(wrong) => {
            eprintln!("sizing: {wrong}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    let k = smallest(asked.rate, asked.shards, asked.ceiling * asked.target);
    let mut ks: Vec<u32> = (0..=10).map(|i| 1 << i).chain([20, 40, 80, 160, 320, 640]).collect();
    ks.extend(k);
    ks.sort_unstable();
    ks.dedup();
    let rows: Vec<Row> = ks.into_iter().map(|k| row(k, asked.rate, asked.shards)).collect();
    if asked.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|r| {
                json!({
                    "k": r.k, "distinct": r.distinct, "median": r.median, "p95": r.p95,
                    "load_per_sec": r.load_per_sec,
                })
            })
            .collect();
        println!("{}", json!({ "rows": rows, "smallest": k }));
    } else {
        print(&asked, &rows, k);
    }
    ExitCode::SUCCESS
}
