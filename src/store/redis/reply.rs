//! What replies say.

use super::{answer, scripts};
use crate::error::Result;
use crate::store::{Once, Stored};
use redis::Value;
use std::time::Duration;

/// A reply that is no error.
pub(super) fn checked(reply: Value) -> Result<Value> {
    match reply {
        Value::ServerError(e) => Err(answer::refused(&e)),
        reply => Ok(reply),
    }
}

/// The value in the reply to GET.
pub(super) fn bare(reply: Value) -> Result<Option<Stored>> {
    match checked(reply)? {
        Value::BulkString(bytes) => Ok(Some(scripts::stored(bytes, None))),
        Value::Nil => Ok(None),
        _ => Err(answer::unexpected(false)),
    }
}

/// The value in the replies to GET and PTTL.
pub(super) fn value(replies: Vec<Value>) -> Result<Option<Stored>> {
    let mut replies = replies.into_iter();
    let Some(stored) = replies.next().map(bare).transpose()?.flatten() else { return Ok(None) };
    let ttl_left = match replies.next().map(checked).transpose()? {
        Some(Value::Int(ms @ 0..)) => Some(Duration::from_millis(ms.unsigned_abs())),
        // It expired in between.
        Some(Value::Int(-2)) => Some(Duration::ZERO),
        _ => None,
    };
    Ok(Some(Stored { ttl_left, ..stored }))
}

pub(super) fn int(reply: &Value) -> Option<i64> {
    match reply {
        Value::Int(n) => Some(*n),
        Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
        Value::SimpleString(digits) => digits.parse().ok(),
        _ => None,
    }
}

pub(super) fn yes(reply: &Value) -> Result<bool> {
    int(reply).map(|n| n != 0).ok_or_else(|| answer::unexpected(true))
}

pub(super) fn total(reply: &Value) -> Result<i64> {
    int(reply).ok_or_else(|| answer::unexpected(true))
}

pub(super) fn list(reply: &Value) -> &[Value] {
    if let Value::Array(items) = reply { items } else { &[] }
}

pub(super) fn text(reply: &Value) -> Option<&str> {
    if let Value::BulkString(bytes) = reply { std::str::from_utf8(bytes).ok() } else { None }
}

pub(super) fn units(reply: &Value) -> Result<u64> {
    text(reply).and_then(|n| n.parse().ok()).ok_or_else(|| answer::unexpected(true))
}

pub(super) fn once(reply: &Value) -> Result<Once> {
    let word = |v: &Value| match v {
        Value::BulkString(b) => String::from_utf8_lossy(b).into_owned(),
        _ => String::new(),
    };
    match (list(reply), word(reply).as_str()) {
        ([now, left], _) if word(now) == "now" => Ok(Once::Applied(total(left)?)),
        ([was], _) if word(was) == "applied" => Ok(Once::Duplicate),
        ([was], _) if word(was) == "poisoned" => Ok(Once::Poisoned),
        (_, "applied") => Ok(Once::Duplicate),
        (_, "poisoned") => Ok(Once::Poisoned),
        _ => Err(answer::unexpected(true)),
    }
}
