//! What a node's reply means: for the router, and for the caller.

use super::router::{Addr, Answer, Range};
use crate::error::{Error, ErrorKind, Retry};
use redis::{RedisError, ServerError, Value};
use std::time::Duration;

/// When a server that is full, loading or without a master may be asked again.
const LATER: Retry = Retry::After(Duration::from_millis(250));

/// What a reply of the node `from` means for the router.
pub(super) fn answer(reply: &Value, from: &Addr) -> Answer {
    let Value::ServerError(error) = reply else { return Answer::Final };
    let details = error.details().unwrap_or("");
    let mut words = details.split(' ');
    let to = |text: Option<&str>| Addr::parse(text?, from);
    match error.code() {
        "MOVED" => {
            let slot = words.next().and_then(|slot| slot.parse().ok());
            match (slot, to(words.next())) {
                (Some(slot), Some(to)) => Answer::Moved { slot, to },
                _ => Answer::Final,
            }
        }
        "ASK" => to(words.nth(1)).map_or(Answer::Final, |to| Answer::Ask { to }),
        "TRYAGAIN" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" => Answer::NotNow,
        "READONLY" => Answer::ReadOnly,
        _ => Answer::Final,
    }
}

/// True when the server does not know the script: it executed nothing.
pub(super) fn no_script(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if error.code() == "NOSCRIPT")
}

/// True when the server will never run a script for this user.
pub(super) fn scripts_refused(reply: &Value) -> bool {
    let Value::ServerError(error) = reply else { return false };
    error.code() == "NOPERM" || error.details().is_some_and(|d| d.starts_with("unknown command"))
}

/// The caller's error for an error reply. The server executes a command or answers with an error,
/// never both, so nothing was applied.
pub(super) fn refused(error: &ServerError) -> Error {
    let details = error.details().unwrap_or("");
    let (kind, what, retry) = match error.code() {
        "OOM" => (ErrorKind::Throttled, "the server's memory is full", LATER),
        "LOADING" => (ErrorKind::Throttled, "the server is loading its data", LATER),
        "BUSY" => (ErrorKind::Throttled, "the server is busy with a script", LATER),
        "READONLY" => (ErrorKind::Store, "the server is a read-only replica", LATER),
        "MASTERDOWN" => (ErrorKind::Store, "the replica has lost its master", LATER),
        "CLUSTERDOWN" => (ErrorKind::Store, "the cluster does not serve this slot", LATER),
        "NOREPLICAS" => (ErrorKind::Store, "too few replicas for a write", LATER),
        "TRYAGAIN" => (ErrorKind::Store, "the slot is on the move", Retry::Now),
        "MOVED" | "ASK" => {
            (ErrorKind::Store, "the slot is served elsewhere: connect to it as a cluster", LATER)
        }
        "NOAUTH" | "WRONGPASS" => (ErrorKind::Config, "the server refuses the login", Retry::Never),
        "NOPERM" => (ErrorKind::Config, "the user may not run this command", Retry::Never),
        "CROSSSLOT" => (ErrorKind::Config, "keys of one call in different slots", Retry::Never),
        "WRONGTYPE" => wrong_type(),
        "HSSEALED" => (ErrorKind::Sealed, "the counter is sealed", Retry::Never),
        "HSLIMIT" => (ErrorKind::Limit, "the key remembers no more ids", Retry::Never),
        "ERR" if details.contains("would overflow") => {
            (ErrorKind::Overflow, "the sum does not fit into 64 bits", Retry::Never)
        }
        "ERR" if details.contains("not an integer") => wrong_type(),
        "ERR" if details.contains("exceeds maximum allowed size") => {
            (ErrorKind::Limit, "the value is too large", Retry::Never)
        }
        _ => (ErrorKind::Store, "the server answered with an error", Retry::Never),
    };
    Error::not_applied(kind, what).with_retry(retry).with_source(RedisError::from(error.clone()))
}

fn wrong_type() -> (ErrorKind, &'static str, Retry) {
    (ErrorKind::WrongType, "the value is not a 64-bit integer or not a string", Retry::Never)
}

/// The caller's error for a command that was sent and not answered.
pub(super) fn lost(error: RedisError, write: bool) -> Error {
    let (kind, what) = if error.is_timeout() {
        (ErrorKind::Timeout, "no answer from the node in time")
    } else {
        (ErrorKind::Store, "the connection to the node was lost")
    };
    let known = if write { Error::unknown(kind, what) } else { Error::not_applied(kind, what) };
    known.with_source(error)
}

/// The caller's error for a reply of another form than the command has.
pub(super) fn unexpected(write: bool) -> Error {
    let what = "the server answered in a form that the command does not have";
    if write {
        return Error::unknown(ErrorKind::Store, what);
    }
    Error::not_applied(ErrorKind::Store, what)
}

/// A connection that could not be made has sent nothing. A wrong password stays wrong.
pub(super) fn not_connected(error: RedisError, addr: &Addr) -> Error {
    use redis::ErrorKind as Kind;
    let refused = matches!(
        error.kind(),
        Kind::AuthenticationFailed | Kind::InvalidClientConfig | Kind::RESP3NotSupported
    ) || matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM" | "NOPROTO"));
    let (kind, what) = if refused {
        (ErrorKind::Config, "the node refuses the login")
    } else {
        (ErrorKind::Store, "no connection to the node")
    };
    Error::not_applied(kind, format!("{what} {}:{}", addr.host, addr.port)).with_source(error)
}

/// Reads the reply to CLUSTER SLOTS of the node `from`.
pub(super) fn slots(reply: &Value, from: &Addr) -> Option<Vec<Range>> {
    let Value::Array(rows) = reply else { return None };
    let range = |row: &Value| {
        let Value::Array(row) = row else { return None };
        let [Value::Int(first), Value::Int(last), nodes @ ..] = row.as_slice() else {
            return None;
        };
        let mut nodes = nodes.iter().filter_map(|node| node_addr(node, from));
        let master = nodes.next()?;
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        Some(Range { first, last, master, replicas: nodes.collect() })
    };
    Some(rows.iter().filter_map(range).collect())
}

fn node_addr(node: &Value, from: &Addr) -> Option<Addr> {
    let Value::Array(fields) = node else { return None };
    let [host, Value::Int(port), ..] = fields.as_slice() else { return None };
    let host = match host {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
        Value::SimpleString(text) => text,
        _ => "",
    };
    Some(Addr::given(host, u16::try_from(*port).ok()?, from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outcome;

    /// The error reply as it comes off the wire.
    fn reply(line: &str) -> Value {
        redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap()
    }

    fn error(line: &str) -> Error {
        let Value::ServerError(e) = reply(line) else { panic!("{line} is no error") };
        refused(&e)
    }

    #[test]
    fn each_error_reply_has_its_answer() {
        let from = Addr::new("a", 1);
        let of = |line| answer(&reply(line), &from);
        let to = Addr::new("10.0.0.7", 7002);
        assert_eq!(of("MOVED 866 10.0.0.7:7002"), Answer::Moved { slot: 866, to: to.clone() });
        assert_eq!(of("ASK 866 10.0.0.7:7002"), Answer::Ask { to });
        assert_eq!(of("MOVED 866 :7002"), Answer::Moved { slot: 866, to: Addr::new("a", 7002) });
        assert_eq!(of("MOVED here"), Answer::Final);
        for line in [
            "TRYAGAIN Multiple keys request during rehashing of slot",
            "CLUSTERDOWN Hash slot not served",
            "LOADING Redis is loading the dataset in memory",
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        ] {
            assert_eq!(of(line), Answer::NotNow, "{line}");
        }
        assert_eq!(of("READONLY You can't write against a read only replica."), Answer::ReadOnly);
        for line in ["OOM command not allowed", "NOAUTH Authentication required.", "ERR nonsense"] {
            assert_eq!(of(line), Answer::Final, "{line}");
        }
        assert!(no_script(&reply("NOSCRIPT No matching script. Please use EVAL.")));
        assert!(scripts_refused(&reply("ERR unknown command 'EVALSHA', with args")));
        assert!(scripts_refused(&reply("NOPERM this user has no permissions")));
        assert!(!scripts_refused(&reply("ERR value is not an integer or out of range")));
    }

    #[test]
    fn each_error_reply_has_its_kind_and_says_not_applied() {
        for (line, kind) in [
            ("OOM command not allowed when used memory > 'maxmemory'.", ErrorKind::Throttled),
            ("LOADING Redis is loading the dataset in memory", ErrorKind::Throttled),
            ("READONLY You can't write against a read only replica.", ErrorKind::Store),
            ("CLUSTERDOWN Hash slot not served", ErrorKind::Store),
            ("NOAUTH Authentication required.", ErrorKind::Config),
            ("WRONGPASS invalid username-password pair or user is disabled.", ErrorKind::Config),
            ("NOPERM this user has no permissions to run the 'get' command", ErrorKind::Config),
            ("WRONGTYPE Operation against a key holding the wrong kind", ErrorKind::WrongType),
            ("ERR value is not an integer or out of range", ErrorKind::WrongType),
            ("ERR increment or decrement would overflow", ErrorKind::Overflow),
            ("HSSEALED the counter is sealed", ErrorKind::Sealed),
            ("ERR something new", ErrorKind::Store),
        ] {
            let e = error(line);
            assert_eq!((e.kind(), e.outcome()), (kind, Outcome::NotApplied), "{line}");
        }
    }

    #[test]
    fn cluster_slots_may_hold_names_and_nodes_without_one() {
        let from = Addr::new("seed", 6);
        let node = |host: Value, port| Value::Array(vec![host, Value::Int(port), Value::Nil]);
        let named = Value::BulkString(b"redis-a.internal".to_vec());
        let rows = Value::Array(vec![
            Value::Array(vec![Value::Int(0), Value::Int(99), node(named, 1), node(Value::Nil, 2)]),
            Value::Array(vec![Value::Int(100), Value::Int(-1), node(Value::Nil, 1)]),
            Value::Nil,
        ]);
        let a = Addr::new("redis-a.internal", 1);
        let replicas = vec![Addr::new("seed", 2)];
        let want = Range { first: 0, last: 99, master: a, replicas };
        assert_eq!(slots(&rows, &from), Some(vec![want]));
        assert_eq!(slots(&Value::Nil, &from), None);
    }
}
