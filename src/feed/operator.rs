//! An operator's hand on a feed, from any process of the same user.

use super::admin::{Command, Said};
use super::dir::{ADMIN, Dir};
use super::lines::Lines;
use super::node::PATIENCE;
use super::order::{Order, Stored};
use super::wire::{LIST_LINE_MAX, List, WireKey};
use crate::engine::control::fleet::FleetList;
use crate::error::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::io;
use std::path::Path;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// What an operator may say to whoever serves a feed, and ask of it. It blocks the thread; a call
/// takes 3 s at most.
///
/// # Example
/// ```no_run
/// let mut operator = heatsink::feed::Operator::connect("/run/shop/heatsink")?;
/// operator.pin("post:9")?;
/// println!("{}", operator.explain("post:9")?.join("\n"));
/// # Ok::<(), heatsink::Error>(())
/// ```
pub struct Operator {
    runtime: Runtime,
    lines: Lines<OwnedReadHalf>,
    to: OwnedWriteHalf,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Ok(Value),
    Error(String),
}

impl Operator {
    /// Connects to whoever serves the feed in `dir`.
    ///
    /// # Errors
    /// [`Config`](ErrorKind::Config) when the directory cannot be trusted,
    /// [`Closed`](ErrorKind::Closed) when nobody serves.
    pub fn connect(dir: impl AsRef<Path>) -> Result<Operator> {
        let dir = dir.as_ref();
        let checked = Dir::open(dir, &[])?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| lost(dir, e))?;
        let stream = runtime.block_on(async { timeout(PATIENCE, checked.connect(ADMIN)).await? });
        let (from, to) = stream.map_err(|e| lost(dir, e))?.into_split();
        Ok(Operator { runtime, lines: Lines::new(from, 2 * LIST_LINE_MAX), to })
    }

    /// The list as it stands, with present rates.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) when the serving process has ended.
    pub fn list(&mut self) -> Result<FleetList> {
        let value = self.ask(&Command::List {})?;
        let list: List = serde_json::from_value(value).map_err(|e| odd().with_source(e))?;
        Ok(list.read().0)
    }

    /// What is known of `key`, and what was decided of it in the last hour, oldest first.
    ///
    /// # Errors
    /// As [`list`](Operator::list).
    pub fn explain(&mut self, key: impl AsRef<[u8]>) -> Result<Vec<String>> {
        let value = self.ask(&Command::Explain { key: wire(key) })?;
        serde_json::from_value(value).map_err(|e| odd().with_source(e))
    }

    /// Has every process keep `key` near: of the fleet where the host is part of one, else of the
    /// host.
    ///
    /// # Errors
    /// [`Limit`](ErrorKind::Limit) when it was refused; as [`list`](Operator::list).
    pub fn pin(&mut self, key: impl AsRef<[u8]>) -> Result<()> {
        self.order(key, Order::pin()).map(drop)
    }

    /// Takes a pin back; whether there was one.
    ///
    /// # Errors
    /// As [`pin`](Operator::pin).
    pub fn unpin(&mut self, key: impl AsRef<[u8]>) -> Result<bool> {
        self.order(key, Order::unpin())
    }

    /// Has no process treat `key`.
    ///
    /// # Errors
    /// As [`pin`](Operator::pin).
    pub fn deny(&mut self, key: impl AsRef<[u8]>) -> Result<()> {
        self.order(key, Order::deny()).map(drop)
    }

    /// Takes a denial back; whether there was one.
    ///
    /// # Errors
    /// As [`pin`](Operator::pin).
    pub fn allow(&mut self, key: impl AsRef<[u8]>) -> Result<bool> {
        self.order(key, Order::allow())
    }

    /// Orders anything, in the fleet where the host is part of one, else on the host; whether there
    /// was something to take back.
    ///
    /// # Errors
    /// As [`pin`](Operator::pin).
    pub fn order(&mut self, key: impl AsRef<[u8]>, order: Order) -> Result<bool> {
        self.say(key, order, false)
    }

    /// Like [`order`](Operator::order), on this host only. What the fleet is ordered holds beside
    /// it; a denial of either outranks all else, and for one key the host's order goes first.
    ///
    /// # Errors
    /// As [`pin`](Operator::pin).
    pub fn order_host(&mut self, key: impl AsRef<[u8]>, order: Order) -> Result<bool> {
        self.say(key, order, true)
    }

    fn say(&mut self, key: impl AsRef<[u8]>, order: Order, host: bool) -> Result<bool> {
        let lasts_ms = order.span().map(super::wire::ms);
        let how = order.stored(0, 0);
        let said = |how| Said { key: wire(key), host, lasts_ms, how };
        let command = match (how, order.is_about_denial()) {
            (Some(how), false) => Command::Override(said(how)),
            (None, false) => Command::Unpin(said(Stored::default())),
            (Some(how), true) => Command::Deny(said(how)),
            (None, true) => Command::Allow(said(Stored::default())),
        };
        self.ask(&command).map(|was| was == true)
    }

    fn ask(&mut self, command: &Command) -> Result<Value> {
        let mut line = serde_json::to_vec(command).map_err(|e| odd().with_source(e))?;
        line.push(b'\n');
        let (lines, to) = (&mut self.lines, &mut self.to);
        let answer: io::Result<Option<Vec<u8>>> = self.runtime.block_on(async {
            timeout(PATIENCE, to.write_all(&line)).await??;
            timeout(2 * PATIENCE, lines.next()).await?
        });
        let ended = "the serving process has ended the connection";
        let closed = || Error::unknown(ErrorKind::Closed, ended);
        let line = answer.map_err(|e| closed().with_source(e))?.ok_or_else(closed)?;
        match serde_json::from_slice(&line) {
            Ok(Answer::Ok(value)) => Ok(value),
            Ok(Answer::Error(text)) => Err(Error::not_applied(ErrorKind::Limit, text)),
            Err(e) => Err(odd().with_source(e)),
        }
    }
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Operator")
    }
}

fn wire(key: impl AsRef<[u8]>) -> WireKey {
    WireKey(key.as_ref().to_vec())
}

fn odd() -> Error {
    Error::unknown(ErrorKind::Codec, "the answer is none of this version's")
}

fn lost(dir: &Path, e: io::Error) -> Error {
    let text = format!("nobody serves a feed in {}", dir.display());
    Error::not_applied(ErrorKind::Closed, text).with_source(e)
}
