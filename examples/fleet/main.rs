//! Four processes, one Redis of their own, a key that is hot for none of them alone.
//!
//! `cargo run --release --features redis,feed --example fleet [-- --json]`
//!
//! Each process reads the key 30 times a second; a process by itself would treat it from 50 on.
//! Together they ask for it 120 times a second, and the fleet's list has every one treat it. Then
//! the aggregator is killed, publish and subscribe are taken away, and in the end all processes
//! but one, which may not lead: its list runs out, and it goes by its own detection.

mod process;
#[path = "../servers/mod.rs"]
mod servers;

use serde_json::json;
use servers::Server;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const HELP: &str = "\
Four processes over one Redis, which is started here: one hot list for all.

  --json   one JSON object on standard output, and nothing else";

/// Processes; the last one never leads.
const PROCESSES: usize = 4;

/// What a process has just said.
struct Said {
    who: usize,
    what: String,
    at: Instant,
}

struct Fleet {
    children: Vec<Option<(Child, ChildStdin)>>,
    said: Receiver<Said>,
    /// By process: whether it treats the key, and whether it leads.
    treats: [bool; PROCESSES],
    leads: [bool; PROCESSES],
    lost: u64,
    quiet: bool,
}

impl Fleet {
    fn start(url: &str, quiet: bool) -> std::io::Result<Fleet> {
        let (tell, said) = channel();
        let own = std::env::current_exe()?;
        let mut children = Vec::new();
        for who in 0..PROCESSES {
            let mut command = Command::new(&own);
            command.args(["--process", url]);
            if who == PROCESSES - 1 {
                command.arg("--never-lead");
            }
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let stdin = child.stdin.take().ok_or_else(|| std::io::Error::other("no pipe"))?;
            let out = child.stdout.take().ok_or_else(|| std::io::Error::other("no pipe"))?;
            let tell = tell.clone();
            std::thread::spawn(move || {
                for what in BufReader::new(out).lines().map_while(Result::ok) {
                    let _ = tell.send(Said { who, what, at: Instant::now() });
                }
            });
            children.push(Some((child, stdin)));
        }
        let (treats, leads) = ([false; PROCESSES], [false; PROCESSES]);
        Ok(Fleet { children, said, treats, leads, lost: 0, quiet })
    }

    fn tell(&mut self, word: &str) {
        for (_, stdin) in self.children.iter_mut().flatten() {
            let _ = writeln!(stdin, "{word}");
        }
    }

    fn kill(&mut self, who: usize) {
        if let Some((mut child, _stdin)) = self.children[who].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        (self.treats[who], self.leads[who]) = (false, false);
    }

    /// Listens until `done`, or until `limit` has passed; how long it took.
    fn until(&mut self, limit: Duration, done: impl Fn(&Fleet) -> bool) -> Option<Duration> {
        let from = Instant::now();
        let mut last = from;
        while !done(self) {
            let left = limit.saturating_sub(from.elapsed());
            match self.said.recv_timeout(left) {
                Ok(said) => {
                    last = said.at;
                    self.take(&said);
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
        Some(last.saturating_duration_since(from))
    }

    fn take(&mut self, said: &Said) {
        let who = said.who;
        if self.children[who].is_none() {
            return;
        }
        if !self.quiet {
            println!("  process {who}: {}", said.what);
        }
        match said.what.as_str() {
            "treats the key" => self.treats[who] = true,
            "treats it no more" => {
                self.treats[who] = false;
                self.lost += 1;
            }
            "leads" => self.leads[who] = true,
            "follows" => self.leads[who] = false,
            _ => {}
        }
    }

    fn leader(&self) -> Option<usize> {
        self.leads.iter().position(|leads| *leads)
    }

    fn step(&self, text: &str) {
        if !self.quiet {
            println!("{text}");
        }
    }
}

fn ms(took: Option<Duration>) -> Option<u64> {
    took.map(|t| t.as_millis() as u64)
}

fn story(quiet: bool) -> Result<bool, Box<dyn std::error::Error>> {
    let long = Duration::from_secs(15);
    let server = Server::start(&[]);
    let mut fleet = Fleet::start(&server.url(), quiet)?;
    fleet.step("four processes start");
    fleet.until(long, |f| f.leader().is_some()).ok_or("nobody leads")?;
    std::thread::sleep(Duration::from_secs(1));

    fleet.step("each reads one key 30 times a second");
    fleet.tell("read 30");
    let from = Instant::now();
    let mut after = [None; PROCESSES];
    while after.contains(&None) && from.elapsed() < long {
        let before = fleet.treats;
        fleet.until(Duration::from_secs(1), |f| f.treats != before);
        for who in 0..PROCESSES {
            if fleet.treats[who] && after[who].is_none() {
                after[who] = ms(Some(from.elapsed()));
            }
        }
    }
    fleet.until(Duration::from_secs(2), |_| false);

    let dead = fleet.leader().ok_or("nobody leads")?;
    fleet.step(&format!("the aggregator, process {dead}, is killed"));
    fleet.lost = 0;
    fleet.kill(dead);
    let takeover = fleet.until(long, |f| f.leader().is_some());
    fleet.until(Duration::from_secs(6), |_| false);
    let lost = fleet.lost;

    fleet.step("publish and subscribe are taken away");
    let _: () = server.control().ask("ACL SETUSER default resetchannels");
    fleet.lost = 0;
    fleet.until(Duration::from_secs(8), |_| false);
    let lost_without = fleet.lost;
    let _: () = server.control().ask("ACL SETUSER default allchannels");
    fleet.until(Duration::from_secs(2), |_| false);

    let last = PROCESSES - 1;
    fleet.step(&format!("all are killed but process {last}, which may not lead"));
    (0..last).for_each(|who| fleet.kill(who));
    let expired = fleet.until(long, |f| !f.treats[last]);
    fleet.step("it reads the key 200 times a second");
    fleet.tell("read 200");
    let local = fleet.until(long, |f| f.treats[last]);

    let within = |took: Option<Duration>, limit| took.is_some_and(|t| t <= limit);
    let kept = after.iter().all(|a| a.is_some_and(|ms| ms <= 2_000))
        && within(takeover, Duration::from_secs(3))
        && lost == 0
        && lost_without == 0
        && expired.is_some()
        && within(local, Duration::from_secs(2));
    let figures = json!({
        "treated_after_ms": after,
        "takeover_ms": ms(takeover),
        "treatments_lost": lost,
        "treatments_lost_without_pub_sub": lost_without,
        "expired_after_ms": ms(expired),
        "local_verdict_after_ms": ms(local),
    });
    if quiet {
        println!("{figures}");
    } else {
        println!("{figures:#}");
    }
    Ok(kept)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| args.iter().any(|a| a == name);
    let done = if has("--help") {
        println!("{HELP}");
        Ok(true)
    } else if has("--process") {
        process::run(&args).map(|()| true)
    } else {
        story(has("--json"))
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("fleet: heatsink did not keep its promise");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("fleet: {e}");
            ExitCode::FAILURE
        }
    }
}
