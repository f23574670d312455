//! Replays a trace of a real service through real handles, under virtual time, and reports what
//! heatsink would have done: which reads never reach the store, what that does to the hottest
//! shard, and whether anybody got a value that is older than promised.
//!
//! ```sh
//! cargo run --release --example replay -- FILE [--pin-top N] [--json]
//! ```

mod check;
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

  --pin-top N    the N most read keys are pinned in every server (default 10, at most 4096)
  --shards N     shards of the store (default 8, at most 16384)
  --servers N    processes with a handle each; rows are dealt to them at random from a fixed
                 seed (default 4, at most 256)
  --speed X      divides the trace's times: 10 is ten times as fast (default 1)
  --json         one JSON object on stdout and nothing else
  --help         this text

TIME: rows of one second are spread evenly inside it. Rows out of time order are sorted, those of
one time in the order of the file. Idle stretches of more than 10 s are cut to 10 s: by then no
cached value is served any more.

STALE READS are values older than 3 s, or older than a write of the same server that had returned
before the read began, or than a write of another server that had returned 3 s before that.

EXIT STATUS: 0; 1 when there were stale reads or failed requests; 2 for bad arguments or a file
that cannot be read (missing, a directory, a broken gzip stream, not UTF-8). Malformed rows are
left out, counted, and the first ten are shown on stderr with their line numbers.";

/// What was asked for.
pub(crate) struct Args {
    file: PathBuf,
    pin_top: usize,
    shards: usize,
    servers: usize,
    speed: f64,
    json: bool,
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

fn speed(text: Option<String>) -> Result<f64, String> {
    let text = text.ok_or("--speed wants a number")?;
    match text.parse() {
        Ok(x) if (1e-6..=1e9).contains(&x) => Ok(x),
        _ => Err(format!("--speed wants a number from 0.000001 to 1000000000, not {text:?}")),
    }
}

fn parse() -> Result<Asked, String> {
    let mut file = None;
    let (mut pin_top, mut shards, mut servers, mut rate, mut json) = (10, 8, 4, 1.0, false);
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
        if glued.is_some() && !matches!(name, "--pin-top" | "--shards" | "--servers" | "--speed") {
            return Err(format!("unknown option {option}"));
        }
        let mut value = || glued.clone().or_else(|| rest.next().and_then(|v| v.into_string().ok()));
        match name {
            "--help" | "-h" => return Ok(Asked::Help),
            "--json" => json = true,
            "--" => plain = true,
            "--pin-top" => pin_top = number(name, value(), 0, 4096)?,
            "--shards" => shards = number(name, value(), 1, 16_384)?,
            "--servers" => servers = number(name, value(), 1, 256)?,
            "--speed" => rate = speed(value())?,
            _ => return Err(format!("unknown option {option}")),
        }
    }
    let file = file.ok_or("no FILE given")?;
    Ok(Asked::Replay(Args { file, pin_top, shards, servers, speed: rate, json }))
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
