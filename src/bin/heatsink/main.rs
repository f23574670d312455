//! `heatsink`: looks at a feed, and steers it.
#![allow(
    clippy::disallowed_methods,
    clippy::allow_attributes,
    reason = "a program of its own: it waits on real clocks"
)]

mod top;

use heatsink::feed::{self, FleetList, Following, Known, Operator, Order};
use heatsink::{Error, Treatment};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "\
Looks at the hot list that the processes of this host share, and steers it.

Usage: heatsink [--dir DIR] COMMAND

  top            a live view: keys, reads/s, writes/s, saved/s, share, treatment, since
  list [--json]  the list now
  watch [--json] every change of the list, for pipes
  explain KEY    what is done with KEY, why, and what was decided in the last hour
  pin KEY        has every process keep KEY near    unpin KEY   takes it back
  override KEY HOW [--ttl TIME]
                 has every process treat KEY so, and no other way: near, salt:SLOTS, copies:N or
                 shed; near for TIME at most          unpin KEY   takes it back
  deny KEY       has no process treat KEY           allow KEY   takes it back
  check FILE     whether FILE is a list of known keys that can be read

An order is the whole fleet's where the host is part of one, else the host's; --host makes it the
host's alone. It lasts for --lasts TIME: by default a day in a fleet, and for good on a host. A TIME is
a number and ms, s, m, h or d.

DIR is the directory that the processes called serve_feed with. Without --dir it is
$HEATSINK_DIR, or heatsink below $XDG_RUNTIME_DIR.
Exit status: 0, or 1 when nothing listens or the command was refused, or 2 for a wrong call.";

/// What was asked for on the command line.
#[derive(Default)]
struct Call {
    dir: Option<PathBuf>,
    json: bool,
    command: String,
    what: Option<String>,
    how: Option<String>,
    host: bool,
    lasts: Option<Duration>,
    ttl: Option<Duration>,
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
    let mut call = Call::default();
    let mut args = args.peekable();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "-h" | "--help" => call.command = "help".into(),
            "--json" => call.json = true,
            "--dir" => {
                let dir = args.next().ok_or_else(|| Stop::Usage("--dir needs a path".into()))?;
                call.dir = Some(dir.into());
            }
            "--host" => call.host = true,
            "--lasts" => call.lasts = Some(time("--lasts", args.next())?),
            "--ttl" => call.ttl = Some(time("--ttl", args.next())?),
            _ if arg.starts_with("--") => return Err(Stop::Usage(format!("unknown: {arg}"))),
            _ if call.command.is_empty() => call.command = arg,
            _ if call.what.is_none() => call.what = Some(arg),
            _ if call.how.is_none() && call.command == "override" => call.how = Some(arg),
            _ => return Err(Stop::Usage(format!("one too many: {arg}"))),
        }
    }
    Ok(call)
}

/// A number with its unit.
fn time(of: &str, text: Option<String>) -> Result<Duration, Stop> {
    let wrong = || Stop::Usage(format!("{of} needs a time: 200ms, 5s, 10m, 6h or 2d"));
    let text = text.ok_or_else(wrong)?;
    let at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let number: u64 = text[..at].parse().map_err(|_| wrong())?;
    let unit_ms = match &text[at..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    number.checked_mul(unit_ms).map(Duration::from_millis).ok_or_else(wrong)
}

/// What an override says.
fn treatment(how: Option<&str>) -> Result<Treatment, Stop> {
    let wrong = || Stop::Usage("override needs near, salt:SLOTS, copies:N or shed".into());
    let how = how.ok_or_else(wrong)?;
    let (name, parts) = how.split_once(':').unwrap_or((how, ""));
    Ok(match name {
        "near" if parts.is_empty() => Treatment::Near,
        "shed" if parts.is_empty() => Treatment::Shed,
        "salt" => Treatment::Salt { slots: parts.parse().map_err(|_| wrong())? },
        "copies" => Treatment::Copies { copies: parts.parse().map_err(|_| wrong())? },
        _ => return Err(wrong()),
    })
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
            "saved_per_sec": e.saved_per_sec,
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
        "explain" => {
            let key = what()?;
            done(&Operator::connect(dir()?)?.explain(key)?.join("\n"))?;
        }
        "pin" | "override" | "deny" | "unpin" | "allow" => done(order(&call, what()?, dir()?)?)?,
        "" => return Err(Stop::Usage("a command is needed; see --help".into())),
        other => return Err(Stop::Usage(format!("unknown command: {other}; see --help"))),
    }
    Ok(())
}

/// Gives an order; what came of it.
fn order(call: &Call, key: &str, dir: PathBuf) -> Result<&'static str, Stop> {
    let (order, [done, nothing]) = match call.command.as_str() {
        "pin" => (Order::pin(), ["pinned"; 2]),
        "override" => (Order::set(treatment(call.how.as_deref())?), ["set"; 2]),
        "deny" => (Order::deny(), ["denied"; 2]),
        "unpin" => (Order::unpin(), ["unpinned", "was not pinned"]),
        _ => (Order::allow(), ["allowed", "was not denied"]),
    };
    let order = call.ttl.map_or(order, |ttl| order.ttl(ttl));
    let order = call.lasts.map_or(order, |span| order.lasts(span));
    let mut operator = Operator::connect(dir)?;
    let host = call.host;
    let was = if host { operator.order_host(key, order) } else { operator.order(key, order) };
    Ok(if was? { done } else { nothing })
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
