//! `heatsink`: looks at a feed, and steers it.
#![allow(
    clippy::disallowed_methods,
    clippy::allow_attributes,
    reason = "a program of its own: it waits on real clocks"
)]

mod top;

use heatsink::feed::{self, Following, Known, Operator};
use heatsink::{Error, feed::FleetList};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

const HELP: &str = "\
Looks at the hot list that the processes of this host share, and steers it.

Usage: heatsink [--dir DIR] COMMAND

  top            a live view: keys, reads/s, writes/s, share, treatment, since
  list [--json]  the list now
  watch [--json] every change of the list, for pipes
  explain KEY    what is done with KEY, why, and what was decided in the last hour
  pin KEY        has every process treat KEY        unpin KEY   takes it back
  deny KEY       has no process treat KEY           allow KEY   takes it back
  check FILE     whether FILE is a list of known keys that can be read

DIR is the directory that the processes called serve_feed with. Without --dir it is
$HEATSINK_DIR, or heatsink below $XDG_RUNTIME_DIR.
Exit status: 0, or 1 when nothing listens or the command was refused, or 2 for a wrong call.";

/// What was asked for on the command line.
struct Call {
    dir: Option<PathBuf>,
    json: bool,
    command: String,
    what: Option<String>,
}

enum Stop {
    Usage(String),
    Failed(Error),
    /// Nobody reads any more.
    Quiet,
}

impl From<Error> for Stop {
    fn from(e: Error) -> Stop {
        Stop::Failed(e)
    }
}

impl From<std::io::Error> for Stop {
    fn from(_: std::io::Error) -> Stop {
        Stop::Quiet
    }
}

fn parse(args: impl Iterator<Item = String>) -> Result<Call, Stop> {
    let mut call = Call { dir: None, json: false, command: String::new(), what: None };
    let mut args = args.peekable();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "-h" | "--help" => call.command = "help".into(),
            "--json" => call.json = true,
            "--dir" => {
                let dir = args.next().ok_or_else(|| Stop::Usage("--dir needs a path".into()))?;
                call.dir = Some(dir.into());
            }
            _ if arg.starts_with("--") => return Err(Stop::Usage(format!("unknown: {arg}"))),
            _ if call.command.is_empty() => call.command = arg,
            _ if call.what.is_none() => call.what = Some(arg),
            _ => return Err(Stop::Usage(format!("one too many: {arg}"))),
        }
    }
    Ok(call)
}

fn default_dir() -> Result<PathBuf, Stop> {
    let below_run = || Some(PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?).join("heatsink"));
    let dir = std::env::var_os("HEATSINK_DIR").map(PathBuf::from).or_else(below_run);
    dir.ok_or_else(|| Stop::Usage("--dir DIR, or $HEATSINK_DIR, is needed".into()))
}

fn as_json(list: &FleetList) -> serde_json::Value {
    let entries = list.entries.iter().map(|e| {
        json!({
            "key": String::from_utf8_lossy(&e.key),
            "reads_per_sec": e.reads_per_sec,
            "writes_per_sec": e.writes_per_sec,
            "lower_bound_per_sec": e.lower_bound_per_sec,
            "share": e.share,
            "treatment": e.treatment.map(|t| t.to_string()),
            "advice": e.advice.map(|t| t.to_string()),
            "rule": e.rule.to_string(),
            "reporters": e.reporters,
            "hot_for_ms": e.hot_for.as_millis() as u64,
            "reason": e.reason,
        })
    });
    let denied: Vec<_> = list.denied.iter().map(|k| String::from_utf8_lossy(k)).collect();
    json!({
        "version": list.edition.to_string(),
        "entries": entries.collect::<Vec<_>>(),
        "denied": denied,
    })
}

fn show(list: &FleetList, json: bool) -> Result<(), Stop> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", as_json(list))?
    } else {
        writeln!(out, "{list}")?
    }
    Ok(out.flush()?)
}

fn watch(mut following: Following, json: bool) -> Result<(), Stop> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        while let Some(list) = following.next().await {
            show(&list, json)?;
        }
        Ok(())
    })
}

fn run() -> Result<(), Stop> {
    let call = parse(std::env::args().skip(1))?;
    let what = || {
        let text = format!("{} of what?", call.command);
        call.what.as_deref().ok_or(Stop::Usage(text))
    };
    if call.command == "help" {
        writeln!(std::io::stdout(), "{HELP}")?;
        return Ok(());
    }
    if call.command == "check" {
        let file = what()?;
        let text = std::fs::read_to_string(file)
            .map_err(|e| Stop::Usage(format!("{file} cannot be read: {e}")))?;
        let known = Known::parse(&text)?;
        let prefixes = known.iter().filter(|k| k.prefix.is_some()).count();
        let keys = known.len() - prefixes;
        writeln!(std::io::stdout(), "{file}: {keys} keys, {prefixes} prefixes")?;
        return Ok(());
    }
    let dir = || call.dir.clone().map_or_else(default_dir, Ok);
    let done = |text: &str| writeln!(std::io::stdout(), "{text}");
    match call.command.as_str() {
        "top" => {
            // Said before the screen is taken.
            drop(Operator::connect(dir()?)?);
            top::run(&feed::follow(dir()?)?)?;
        }
        "list" => show(&Operator::connect(dir()?)?.list()?, call.json)?,
        "watch" => {
            drop(Operator::connect(dir()?)?);
            watch(feed::follow(dir()?)?, call.json)?;
        }
        "explain" => done(&Operator::connect(dir()?)?.explain(what()?)?.join("\n"))?,
        "pin" => {
            Operator::connect(dir()?)?.pin(what()?)?;
            done("pinned")?;
        }
        "deny" => {
            Operator::connect(dir()?)?.deny(what()?)?;
            done("denied")?;
        }
        "unpin" => {
            let was = Operator::connect(dir()?)?.unpin(what()?)?;
            done(if was { "unpinned" } else { "was not pinned" })?;
        }
        "allow" => {
            let was = Operator::connect(dir()?)?.allow(what()?)?;
            done(if was { "allowed" } else { "was not denied" })?;
        }
        "" => return Err(Stop::Usage("a command is needed; see --help".into())),
        other => return Err(Stop::Usage(format!("unknown command: {other}; see --help"))),
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) | Err(Stop::Quiet) => ExitCode::SUCCESS,
        Err(Stop::Usage(text)) => {
            eprintln!("heatsink: {text}");
            ExitCode::from(2)
        }
        Err(Stop::Failed(e)) => {
            eprint!("heatsink: {e}");
            match std::error::Error::source(&e) {
                Some(source) => eprintln!(" ({source})"),
                None => eprintln!(),
            }
            ExitCode::FAILURE
        }
    }
}
