//! A store that heatsink has never heard of, adapted and proven.
//!
//! `legacy` below stands for a client that a service already has: it blocks nobody, but answers
//! by callback on a thread of its own. The adapter is the `impl Store` in the middle.
//!
//! ```sh
//! cargo run --example custom_store
//! ```

use bytes::Bytes;
use heatsink::store::{Capability, Store, Stored};
use heatsink::testing::{Verdict, conformance};
use heatsink::{Error, ErrorKind, Key, Result};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

const HELP: &str = "custom_store: wraps a callback client as a heatsink store and proves it

USAGE: cargo run --example custom_store [-- OPTIONS]

  --json   one JSON object on stdout: checks, failed, results
  --help   this text";

/// The adapter. A real one holds the client that the service already has.
struct LegacyStore(Arc<legacy::Client>);

impl LegacyStore {
    /// Sends one command and waits for its callback. When the client dies with a command under
    /// way, nobody knows whether it was executed, so a write is `Unknown`.
    async fn ask(&self, command: legacy::Command) -> Result<legacy::Reply> {
        let write = !matches!(command, legacy::Command::Get(_));
        let (tx, rx) = oneshot::channel();
        self.0.send(command, move |reply| drop(tx.send(reply)));
        match rx.await {
            Ok(legacy::Reply::NotANumber) => {
                Err(Error::not_applied(ErrorKind::WrongType, "not a number"))
            }
            Ok(legacy::Reply::TooLarge) => {
                Err(Error::not_applied(ErrorKind::Overflow, "the sum does not fit"))
            }
            Ok(reply) => Ok(reply),
            Err(_) if write => Err(Error::unknown(ErrorKind::Store, "the client has died")),
            Err(_) => Err(Error::not_applied(ErrorKind::Store, "the client has died")),
        }
    }
}

impl Store for LegacyStore {
    /// What the client can do beyond the required operations: here only to tell expiry times.
    fn capability(&self) -> Capability {
        let mut can = Capability::default();
        can.ttl = true;
        can
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>> {
        let legacy::Reply::Value(found) = self.ask(legacy::Command::Get(key.to_vec())).await?
        else {
            return Ok(None);
        };
        let (bytes, ttl_left) = found;
        Ok(Some(Stored { ttl_left, ..Stored::new(bytes) }))
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        let mut all = Vec::with_capacity(keys.len());
        for key in keys {
            all.push(self.get(key).await);
        }
        all
    }

    async fn put(&self, key: &Key, value: Bytes, ttl: Option<Duration>) -> Result<()> {
        let command = legacy::Command::Set(key.to_vec(), value.to_vec(), ttl);
        self.ask(command).await.map(drop)
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        let mut all = Vec::with_capacity(keys.len());
        for key in keys {
            let reply = self.ask(legacy::Command::Remove(key.to_vec())).await;
            all.push(reply.map(|reply| matches!(reply, legacy::Reply::Done)));
        }
        all
    }

    async fn add(&self, key: &Key, amount: i64) -> Result<i64> {
        match self.ask(legacy::Command::Increment(key.to_vec(), amount)).await? {
            legacy::Reply::Number(total) => Ok(total),
            other => Err(Error::unknown(ErrorKind::Store, format!("answered {other:?}"))),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let mut json = false;
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--json" => json = true,
            "--help" | "-h" => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            other => {
                eprintln!("unknown option {other}\n\n{HELP}");
                return ExitCode::from(2);
            }
        }
    }
    let store = LegacyStore(Arc::new(legacy::Client::start()));
    let report = conformance(store, "conformance:").await;
    if json {
        let results: Vec<_> = report
            .checks
            .iter()
            .map(|c| {
                let passed = c.verdict == Verdict::Passed;
                serde_json::json!({"area": c.area, "name": c.name, "passed": passed})
            })
            .collect();
        let failed = report.failures().count();
        let out = serde_json::json!({
            "checks": report.checks.len(), "failed": failed, "results": results,
        });
        println!("{out}");
    } else {
        println!("{report}");
    }
    if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The client that the service already has.
mod legacy {
    use std::collections::HashMap;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    type Callback = Box<dyn FnOnce(Reply) + Send>;

    pub(crate) enum Command {
        Get(Vec<u8>),
        Set(Vec<u8>, Vec<u8>, Option<Duration>),
        Remove(Vec<u8>),
        Increment(Vec<u8>, i64),
    }

    #[derive(Debug)]
    pub(crate) enum Reply {
        Value((Vec<u8>, Option<Duration>)),
        Number(i64),
        Done,
        Absent,
        NotANumber,
        TooLarge,
    }

    pub(crate) struct Client(mpsc::SyncSender<(Command, Callback)>);

    impl Client {
        #[expect(clippy::disallowed_methods, reason = "a client of the service, not of heatsink")]
        pub(crate) fn start() -> Client {
            let (tx, rx) = mpsc::sync_channel::<(Command, Callback)>(1024);
            std::thread::spawn(move || {
                let mut table = HashMap::new();
                for (command, callback) in rx {
                    callback(run(&mut table, command, Instant::now()));
                }
            });
            Client(tx)
        }

        pub(crate) fn send(&self, command: Command, callback: impl FnOnce(Reply) + Send + 'static) {
            // When the thread is gone the callback is dropped, which the adapter notices.
            let _ = self.0.send((command, Box::new(callback)));
        }
    }

    type Table = HashMap<Vec<u8>, (Vec<u8>, Option<Instant>)>;

    fn run(table: &mut Table, command: Command, now: Instant) -> Reply {
        let (Command::Get(key)
        | Command::Set(key, ..)
        | Command::Remove(key)
        | Command::Increment(key, _)) = &command;
        if table.get(key).is_some_and(|(_, until)| until.is_some_and(|t| t <= now)) {
            table.remove(key);
        }
        match command {
            Command::Get(key) => match table.get(&key) {
                Some((value, until)) => {
                    Reply::Value((value.clone(), until.map(|t| t.duration_since(now))))
                }
                None => Reply::Absent,
            },
            Command::Set(key, value, ttl) => {
                table.insert(key, (value, ttl.map(|ttl| now + ttl)));
                Reply::Done
            }
            Command::Remove(key) => table.remove(&key).map_or(Reply::Absent, |_| Reply::Done),
            Command::Increment(key, amount) => {
                let slot = table.entry(key).or_insert_with(|| (b"0".to_vec(), None));
                let old = std::str::from_utf8(&slot.0).ok().and_then(|s| s.parse::<i64>().ok());
                match old.map(|old| old.checked_add(amount)) {
                    None => Reply::NotANumber,
                    Some(None) => Reply::TooLarge,
                    Some(Some(total)) => {
                        slot.0 = total.to_string().into_bytes();
                        Reply::Number(total)
                    }
                }
            }
        }
    }
}
