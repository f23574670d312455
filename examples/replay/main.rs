//! Replays a trace of a real service through real handles, under virtual time, and reports what
//! heatsink would have done: which reads never reach the store, what that does to the hottest
//! shard, and whether anybody got a value that is older than promised.
//!
//! ```sh
//! cargo run --release --example replay -- FILE [--pin-top N | --promote-at R | --hot-share S] [--json]
//! ```

mod check;
mod detection;
mod report;
mod run;
mod trace;

use report::Report;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use trace::Trace;

const HELP: &str = "replay: what heatsink would have done with a trace, under virtual time

USAGE: cargo run --release --example replay -- FILE [OPTIONS]

FILE is CSV `seconds,op,key[,bytes]`, plain or gzip, UTF-8, with or without a header row.
`op` is `r` or `w`; a key with a comma or a quote in it is quoted. `bytes` must be a number and is
otherwise not used: the values written are version numbers, which is how staleness is seen.

  --pin-top N    the N most read keys are pinned in every server (default 10, at most 4096);
                 nothing is detected
  --promote-at R nothing is pinned: each server finds the keys that it is asked for R times a
                 second or more, in windows of at least 1 s that grow until R means 100 requests
  --hot-share S  the same with R = S x the mean rate of the replay (0.01: a hundredth)
  --shards N     shards of the store (default 8, at most 16384)
  --servers N    processes with a handle each; rows are dealt to them at random from a fixed
                 seed (default 4 with pins, 1 with detection; at most 256)
  --speed X      divides the trace's times: 10 is ten times as fast (default 1)
  --json         one JSON object on stdout and nothing else
  --help         this text

TIME: rows of one second are spread evenly inside it. Rows out of time order are sorted, those of
one time in the order of the file. Idle stretches of more than 10 s are cut to 10 s: by then no
cached value is served any more.

STALE READS are values older than 3 s, or older than a write of the same server that had returned
before the read began, or than a write of another server that had returned 3 s before that.

DETECTION is held against exact counts, per server and window: a key-window is hot when its exact
rate reaches the threshold; missed when it reaches 1.5 times the threshold and the key was not on
the list by its end; a promotion is false when the key's exact rate stayed below 0.7 times the
threshold in the window of the promotion and the one before. The driver looks at its samples every
10 ms, so what happened by the end of a window is read one look later.

EXIT STATUS: 0; 1 when there were stale reads or failed requests; 2 for bad arguments or a file
that cannot be read (missing, a directory, a broken gzip stream, not UTF-8). Malformed rows are
left out, counted, and the first ten are shown on stderr with their line numbers.";

/// What was asked for.
pub(crate) struct Args {
    file: PathBuf,
    treat: Treat,
    shards: usize,
    servers: usize,
    speed: f64,
    json: bool,
}

/// Which keys are treated.
#[derive(Clone, Copy)]
pub(crate) enum Treat {
    PinTop(usize),
    PromoteAt(f64),
    HotShare(f64),
}

enum Asked {
    Help,
    Replay(Args),
}

fn number(name: &str, text: Option<String>, min: usize, max: usize) -> Result<usize, String> {
    let text = text.ok_or_else(|| format!("{name} wants a number"))?;
    match text.parse() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!("{name} wants a number from {min} to {max}, not {text:?}")),
    }
}

fn real(name: &str, text: Option<String>, min: f64, max: f64) -> Result<f64, String> {
    let text = text.ok_or_else(|| format!("{name} wants a number"))?;
    match text.parse() {
        Ok(x) if (min..=max).contains(&x) => Ok(x),
        _ => Err(format!("{name} wants a number from {min} to {max}, not {text:?}")),
    }
}

fn parse() -> Result<Asked, String> {
    let mut file = None;
    let (mut treat, mut servers) = (None, None);
    let (mut shards, mut rate, mut json) = (8, 1.0, false);
    let mut plain = false;
    let mut rest = std::env::args_os().skip(1);
    while let Some(arg) = rest.next() {
        let option = arg.to_str().filter(|a| !plain && a.len() > 1 && a.starts_with('-'));
        let Some(option) = option else {
            if file.replace(PathBuf::from(arg)).is_some() {
                return Err("more than one FILE".into());
            }
            continue;
        };
        let (name, glued) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (option, None),
        };
        if glued.is_some() && matches!(name, "--json" | "--help") {
            return Err(format!("unknown option {option}"));
        }
        let mut value = || glued.clone().or_else(|| rest.next().and_then(|v| v.into_string().ok()));
        match name {
            "--help" | "-h" => return Ok(Asked::Help),
            "--json" => json = true,
            "--" => plain = true,
            "--pin-top" | "--promote-at" | "--hot-share" => {
                let one = match name {
                    "--pin-top" => Treat::PinTop(number(name, value(), 0, 4096)?),
                    "--promote-at" => Treat::PromoteAt(real(name, value(), 1e-3, 1e9)?),
                    _ => Treat::HotShare(real(name, value(), 1e-6, 1.0)?),
                };
                if treat.replace(one).is_some() {
                    return Err("one of --pin-top, --promote-at and --hot-share, once".into());
                }
            }
            "--shards" => shards = number(name, value(), 1, 16_384)?,
            "--servers" => servers = Some(number(name, value(), 1, 256)?),
            "--speed" => rate = real(name, value(), 1e-6, 1e9)?,
            _ => return Err(format!("unknown option {option}")),
        }
    }
    let file = file.ok_or("no FILE given")?;
    let treat = treat.unwrap_or(Treat::PinTop(10));
    let servers = servers.unwrap_or(if matches!(treat, Treat::PinTop(_)) { 4 } else { 1 });
    Ok(Asked::Replay(Args { file, treat, shards, servers, speed: rate, json }))
}

fn complain(trace: &Trace) {
    for (line, why) in &trace.malformed_first {
        eprintln!("replay: line {line}: {why}");
    }
    let more = trace.malformed - trace.malformed_first.len() as u64;
    if more > 0 {
        eprintln!("replay: and {more} more malformed rows");
    }
    if trace.out_of_order > 0 {
        eprintln!(
            "replay: {} rows were out of time order and have been sorted",
            trace.out_of_order
        );
    }
    if trace.rows.is_empty() {
        eprintln!("replay: the file has no usable row");
    }
}

fn replay(args: &Args) -> Result<Report, String> {
    let mut trace =
        trace::read(&args.file).map_err(|why| format!("{}: {why}", args.file.display()))?;
    complain(&trace);
    let skipped_s = trace.schedule(args.speed);
    let outcome = run::run(&mut trace, args, std::io::stderr().is_terminal())?;
    Ok(Report::new(&trace, outcome, skipped_s))
}

fn main() -> ExitCode {
    let args = match parse() {
        Ok(Asked::Replay(args)) => args,
        Ok(Asked::Help) => {
            let _ = writeln!(std::io::stdout(), "{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("replay: {why} (--help says more)");
            return ExitCode::from(2);
        }
    };
    let report = match replay(&args) {
        Ok(report) => report,
        Err(why) => {
            eprintln!("replay: {why}");
            return ExitCode::from(2);
        }
    };
    let text = if args.json { report.json() } else { report.to_string() };
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
    if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
