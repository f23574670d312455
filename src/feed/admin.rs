//! Operators' commands: one JSON object to a line, one answer to each.
//!
//! `{"list":{}}`, `{"explain":{"key":"post:9"}}`, `{"pin":…}`, `{"unpin":…}`, `{"deny":…}`,
//! `{"allow":…}`, `{"override":{"key":"likes:9","treatment":"salt","slots":16}}`; answered with
//! `{"ok":…}` or `{"error":"…"}`. An order is the whole fleet's where the host is part of one, and
//! `"host":true` is not said; `"lasts_ms":…` ends it.

use super::fleet::Membership;
use super::group::Group;
use super::lines::Lines;
use super::local::Local;
use super::node::PATIENCE;
use super::order::{Order, Stored};
use super::wire::{List, WireKey, treatment_of};
use crate::key::Key;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The longest command.
const COMMAND_MAX: usize = 16 << 10;

/// What an operator may say.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    List {},
    Explain { key: WireKey },
    Pin(Said),
    Unpin(Said),
    Deny(Said),
    Allow(Said),
    Override(Said),
}

/// An order, as it is said.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Said {
    pub(crate) key: WireKey,
    /// On this host only.
    #[serde(default)]
    pub(crate) host: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lasts_ms: Option<u64>,
    #[serde(flatten)]
    pub(crate) how: Stored,
}

impl Said {
    /// With what an override says.
    fn order(&self, order: Order) -> Order {
        match self.lasts_ms {
            Some(ms) => order.lasts(Duration::from_millis(ms)),
            None => order,
        }
    }

    fn set(&self) -> Result<Order, String> {
        let named =
            self.how.treatment.and_then(|t| treatment_of(t, self.how.copies, self.how.slots));
        let set = Order::set(named.ok_or("which treatment, and of how many parts?")?);
        Ok(match self.how.ttl_ms {
            Some(ms) => set.ttl(Duration::from_millis(ms)),
            None => set,
        })
    }
}

pub(super) async fn serve(
    stream: UnixStream,
    group: &Group,
    local: &Arc<dyn Local>,
    fleet: Option<&Membership>,
) -> io::Result<()> {
    let (from, mut to) = stream.into_split();
    let mut lines = Lines::new(from, COMMAND_MAX);
    while let Some(line) = lines.next().await? {
        let answer = match serde_json::from_slice::<Command>(&line) {
            Ok(command) => answer(command, group, local, fleet).await,
            Err(e) => Err(format!("not a command: {e}")),
        };
        let answer = match answer {
            Ok(value) => json!({ "ok": value }),
            Err(text) => json!({ "error": text }),
        };
        let mut line = answer.to_string().into_bytes();
        line.push(b'\n');
        timeout(PATIENCE, to.write_all(&line)).await??;
    }
    Ok(())
}

async fn answer(
    command: Command,
    group: &Group,
    local: &Arc<dyn Local>,
    fleet: Option<&Membership>,
) -> Result<Value, String> {
    let (said, order) = match command {
        Command::List {} => {
            let list = List::of(&group.now(&**local));
            return serde_json::to_value(list).map_err(|e| e.to_string());
        }
        Command::Explain { key } => {
            let key = Key::from(key.0);
            Order::pin().check(&key, group.caps())?;
            return Ok(json!(explain(&key, group, local)));
        }
        Command::Pin(said) => (said, Order::pin()),
        Command::Unpin(said) => (said, Order::unpin()),
        Command::Deny(said) => (said, Order::deny()),
        Command::Allow(said) => (said, Order::allow()),
        Command::Override(said) => {
            let set = said.set()?;
            (said, set)
        }
    };
    let order = said.order(order);
    let key = Key::copy(&said.key.0);
    order.check(&key, group.caps())?;
    let Some(fleet) = fleet.filter(|_| !said.host) else {
        let now = local.clock().now();
        let told = group.operate(|all| order.tell(all, now, key));
        return told.map(|was| json!(was)).ok_or_else(|| "no more room".into());
    };
    let ordered = timeout(PATIENCE, fleet.order(&key, order)).await;
    let ordered = ordered.map_err(|_| "the fleet did not answer; it may have heard".to_string())?;
    ordered.map(|was| json!(was)).map_err(|e| format!("the fleet was not told: {e}"))
}

/// What the group knows of `key`, what the serving process does with it, and what was decided of
/// it in the last hour.
fn explain(key: &Key, group: &Group, local: &Arc<dyn Local>) -> Vec<String> {
    let now = local.clock().now();
    let list = group.now(&**local);
    let mut lines = vec![match list.get(key) {
        Some(entry) => format!("all processes: {entry}"),
        None if list.denied.contains(key) => format!("all processes: {key} is denied"),
        None => format!("all processes: {key} is not on the list"),
    }];
    lines.extend(local.explain(key).map(|text| format!("the serving process: {text}")));
    let decided: Vec<String> = group.operate(|all| {
        let of_key = all.history(now).filter(|d| d.key == *key);
        of_key.map(|d| format!("{} s ago: {}", now.since(d.at).as_secs(), d.what)).collect()
    });
    lines.extend(decided);
    lines
}
