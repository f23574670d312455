//! Operators' commands: one JSON object to a line, one answer to each.
//!
//! `{"list":{}}`, `{"explain":{"key":"post:9"}}`, `{"pin":…}`, `{"unpin":…}`, `{"deny":…}`,
//! `{"allow":…}`; answered with `{"ok":…}` or `{"error":"…"}`.

use super::group::Group;
use super::local::Local;
use super::node::PATIENCE;
use super::wire::{Lines, List, WireKey};
use crate::engine::control::follow::Caps;
use crate::key::Key;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io;
use std::sync::Arc;
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
    Pin { key: WireKey },
    Unpin { key: WireKey },
    Deny { key: WireKey },
    Allow { key: WireKey },
}

pub(super) async fn serve(
    stream: UnixStream,
    group: &Group,
    local: &Arc<dyn Local>,
) -> io::Result<()> {
    let (from, mut to) = stream.into_split();
    let mut lines = Lines::new(from, COMMAND_MAX);
    while let Some(line) = lines.next().await? {
        let answer = match serde_json::from_slice::<Command>(&line) {
            Ok(command) => answer(command, group, local),
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

fn answer(command: Command, group: &Group, local: &Arc<dyn Local>) -> Result<Value, String> {
    let now = local.clock().now();
    let whole = |key: WireKey| {
        let most = Caps::default().key_bytes_max;
        let n = key.0.len();
        if n <= most {
            Ok(Key::from(key.0))
        } else {
            Err(format!("a key of {n} bytes is too long"))
        }
    };
    let room = |room: bool| if room { Ok(json!(true)) } else { Err("no more room".to_string()) };
    match command {
        Command::List {} => {
            serde_json::to_value(List::of(&group.now(&**local))).map_err(|e| e.to_string())
        }
        Command::Explain { key } => Ok(json!(explain(&whole(key)?, group, local))),
        Command::Pin { key } => {
            let key = whole(key)?;
            room(group.operate(|all| all.pin(now, key)))
        }
        Command::Unpin { key } => {
            let key = whole(key)?;
            Ok(json!(group.operate(|all| all.unpin(now, &key))))
        }
        Command::Deny { key } => {
            let key = whole(key)?;
            room(group.operate(|all| all.deny(now, key)))
        }
        Command::Allow { key } => {
            let key = whole(key)?;
            Ok(json!(group.operate(|all| all.allow(now, &key))))
        }
    }
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
