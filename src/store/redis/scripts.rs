//! The scripts, the names beside a key, and the two forms in which heatsink's own values stand in Redis.
//!
//! A user's values are plain strings. A value that was put by version, or a lane, begins with
//! [`FRAME`], its version in 32 hexadecimal digits, and then its bytes: one key, so that expiry and
//! eviction take version and value together. A sealed counter is its digits followed by [`SEAL`]
//! and the tag, so that `INCRBY` refuses by itself.

use super::reply::list;
use crate::key::Key;
pub(super) use crate::names::beside;
use crate::store::{End, Hold, Holds, Id, Stored, Version};
use bytes::Bytes;
use redis::{Cmd, Value};
use std::time::Duration;

/// Begins a value that carries a version.
const FRAME: &[u8] = b"\x01hsv:";
/// Follows the digits of a sealed counter.
const SEAL: &[u8] = b"\x01hs-seal:";
const VERSION_LEN: usize = 32;
const TAG_LEN: usize = 16;
/// Digits of the longest 64-bit integer with its sign.
const DIGITS_MAX: usize = 20;

pub(super) fn version_hex(v: Version) -> String {
    format!("{:016x}{:016x}", v.incarnation, v.seq)
}

pub(super) fn parse_version(hex: &[u8]) -> Option<Version> {
    let hex = std::str::from_utf8(hex).ok().filter(|h| h.len() == VERSION_LEN)?;
    let half = |s| u64::from_str_radix(s, 16).ok();
    Some(Version { incarnation: half(&hex[..16])?, seq: half(&hex[16..])? })
}

/// True for the raw bytes of a sealed counter.
pub(super) fn sealed(bytes: &[u8]) -> bool {
    unsealed_len(bytes).is_some()
}

fn unsealed_len(bytes: &[u8]) -> Option<usize> {
    let n = bytes.len().checked_sub(SEAL.len() + TAG_LEN).filter(|n| *n <= DIGITS_MAX)?;
    (n > 0 && bytes[n..].starts_with(SEAL)).then_some(n)
}

/// A value as it is handed out: without frame and seal.
pub(super) fn stored(bytes: Vec<u8>, ttl_left: Option<Duration>) -> Stored {
    let bytes = Bytes::from(bytes);
    if let Some(rest) = bytes.strip_prefix(FRAME)
        && let Some(hex) = rest.get(..VERSION_LEN)
        && let Some(version) = parse_version(hex)
    {
        let bytes = bytes.slice(FRAME.len() + VERSION_LEN..);
        return Stored { bytes, ttl_left, version: Some(version), sealed: false };
    }
    let digits = unsealed_len(&bytes);
    let bytes = digits.map_or_else(|| bytes.clone(), |n| bytes.slice(..n));
    Stored { bytes, ttl_left, version: None, sealed: digits.is_some() }
}

/// One script: its text and the name that the server knows it by.
#[derive(Debug)]
pub(super) struct Script {
    code: &'static str,
    hash: String,
}

impl Script {
    fn new(code: &'static str) -> Script {
        Script { code, hash: redis::Script::new(code).get_hash().into() }
    }

    /// The command that runs it: by its name, or with its text for a server that forgot it.
    pub(super) fn cmd(&self, by_name: bool, keys: &[&[u8]], args: &[&[u8]]) -> Cmd {
        let mut cmd = redis::cmd(if by_name { "EVALSHA" } else { "EVAL" });
        cmd.arg(if by_name { self.hash.as_str() } else { self.code });
        cmd.arg(keys.len()).arg(keys).arg(args);
        cmd
    }
}

/// All scripts of a store.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) compare_and_set: Script,
    pub(super) put_if_newer: Script,
    pub(super) claim_lane: Script,
    pub(super) seal: Script,
    pub(super) open: Script,
    pub(super) add_once: Script,
    pub(super) poison_once: Script,
    pub(super) fold: Script,
    pub(super) take: Script,
    pub(super) end_hold: Script,
    pub(super) push_tokens: Script,
    pub(super) pop_token: Script,
}

impl Scripts {
    pub(super) fn new() -> Scripts {
        Scripts {
            compare_and_set: Script::new(COMPARE_AND_SET),
            put_if_newer: Script::new(PUT_IF_NEWER),
            claim_lane: Script::new(CLAIM_LANE),
            seal: Script::new(SEAL_COUNTER),
            open: Script::new(OPEN_COUNTER),
            add_once: Script::new(ADD_ONCE),
            poison_once: Script::new(POISON_ONCE),
            fold: Script::new(FOLD),
            take: Script::new(TAKE),
            end_hold: Script::new(END_HOLD),
            push_tokens: Script::new(PUSH_TOKENS),
            pop_token: Script::new(POP_TOKEN),
        }
    }
}

/// KEYS 1 value; ARGV expected, new, ttl in ms or "".
const COMPARE_AND_SET: &str = r"
local old = redis.call('GET', KEYS[1])
if old and string.sub(old, 1, 5) == '\1hsv:' then old = string.sub(old, 38) end
if old ~= ARGV[1] then return 0 end
if ARGV[3] == '' then redis.call('SET', KEYS[1], ARGV[2])
else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return 1";

/// KEYS 1 value; ARGV version, bytes, ttl in ms or "". Versions are compared eight digits at a
/// time: a number of Lua is exact up to 53 bits, and its string order follows the locale.
const PUT_IF_NEWER: &str = r"
local old = redis.call('GETRANGE', KEYS[1], 0, 36)
if string.sub(old, 1, 5) == '\1hsv:' then
  local newer = false
  for i = 0, 3 do
    local was = tonumber(string.sub(old, 6 + 8 * i, 13 + 8 * i), 16)
    local is = tonumber(string.sub(ARGV[1], 1 + 8 * i, 8 + 8 * i), 16)
    if is > was then newer = true break end
    if is < was then break end
  end
  if not newer then return 0 end
end
local value = '\1hsv:' .. ARGV[1] .. ARGV[2]
if ARGV[3] == '' then redis.call('SET', KEYS[1], value)
else redis.call('SET', KEYS[1], value, 'PX', ARGV[3]) end
return 1";

/// KEYS 1 lane. Raises the upper half of the version, in two steps of 32 bits.
const CLAIM_LANE: &str = r"
local old = redis.call('GET', KEYS[1]) or ''
local hi, lo = 0, 0
if string.sub(old, 1, 5) == '\1hsv:' then
  hi = tonumber(string.sub(old, 6, 13), 16)
  lo = tonumber(string.sub(old, 14, 21), 16)
  old = string.sub(old, 38)
end
lo = lo + 1
if lo == 4294967296 then hi = hi + 1 lo = 0 end
local version = string.format('%08x%08x', hi, lo) .. '0000000000000000'
redis.call('SET', KEYS[1], '\1hsv:' .. version .. old, 'KEEPTTL')
return {version, old}";

/// KEYS 1 counter; ARGV tag in 16 hexadecimal digits.
const SEAL_COUNTER: &str = r"
local old = redis.call('GET', KEYS[1])
if old then
  local digits, tag = string.match(old, '^(%-?%d+)\1hs%-seal:(%x+)$')
  if digits then
    if tag == ARGV[1] then return digits end
    return redis.error_reply('HSSEALED the counter is sealed')
  end
end
local total = redis.pcall('INCRBY', KEYS[1], 0)
if type(total) == 'table' then return total end
local digits = redis.call('GET', KEYS[1])
redis.call('APPEND', KEYS[1], '\1hs-seal:' .. ARGV[1])
return digits";

/// KEYS 1 counter; ARGV tag.
const OPEN_COUNTER: &str = r"
local old = redis.call('GET', KEYS[1]) or ''
local digits, tag = string.match(old, '^(%-?%d+)\1hs%-seal:(%x+)$')
if tag ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], digits, 'KEEPTTL')
return 1";

// An id with a turn stands in a hash of its own, which does not expire, with the turn's 20 digits
// before its state. Twenty digits compare as text like the numbers that they are.

/// KEYS 1 counter, 2 ids; ARGV id, amount, how long ids are kept in ms, how many, turn or "".
const ADD_ONCE: &str = r"
local was, turn = redis.call('HGET', KEYS[2], ARGV[1]), ARGV[5]
local state = was
if was and turn ~= '' then
  local of = string.sub(was, 1, 20)
  if turn < of then return {'applied'} end
  state = turn == of and string.sub(was, 21)
end
if state then return {state} end
if not was and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[4]) then
  return redis.error_reply('HSLIMIT the key remembers no more ids')
end
local total = redis.pcall('INCRBY', KEYS[1], ARGV[2])
if type(total) == 'table' then return total end
redis.call('HSET', KEYS[2], ARGV[1], turn .. 'applied')
if turn == '' then redis.call('PEXPIRE', KEYS[2], ARGV[3]) end
return {'now', redis.call('GET', KEYS[1])}";

/// KEYS 1 ids; ARGV id, how long ids are kept in ms, how many, turn or "".
const POISON_ONCE: &str = r"
local was, turn = redis.call('HGET', KEYS[1], ARGV[1]), ARGV[4]
local state = was
if was and turn ~= '' then
  local of = string.sub(was, 1, 20)
  if turn < of then return 'poisoned' end
  state = turn == of and string.sub(was, 21)
end
if state == 'applied' then return state end
if not was and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
  return redis.error_reply('HSLIMIT the key remembers no more ids')
end
redis.call('HSET', KEYS[1], ARGV[1], turn .. 'poisoned')
if turn == '' then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 'poisoned'";

/// KEYS 1 counter, 2 marks; ARGV id, amount. Marks are never forgotten by themselves.
const FOLD: &str = r"
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 0 end
local total = redis.pcall('INCRBY', KEYS[1], ARGV[2])
if type(total) == 'table' then return total end
redis.call('HSET', KEYS[2], ARGV[1], '1')
return 1";

/// KEYS 1 stock, 2 holds; ARGV hold, amount or "" for more than fits, how long holds are kept in
/// ms, how many, turn or "". A hold stands as `state:amount:left`; its states are o(pen), s(old),
/// b(ack). One that is open although its turn is over stays, under a name with its turn.
const TAKE: &str = r"
local known, turn = redis.call('HGET', KEYS[2], ARGV[1]), ARGV[5]
local was, over = known, false
if known and turn ~= '' then
  local of = string.sub(known, 1, 20)
  if turn < of then return {2, '0'} end
  was, over = turn == of and string.sub(known, 21), turn ~= of and of
end
if was then
  local state, amount, left = string.match(was, '^(%a):(%d+):(%d+)$')
  if state == 'b' then return {2, amount} end
  return {1, left}
end
local have = redis.call('GET', KEYS[1])
if not have then return {0, '0'} end
local same = redis.pcall('INCRBY', KEYS[1], 0)
if type(same) == 'table' then return same end
if ARGV[2] == '' or string.sub(have, 1, 1) == '-' then return {0, have} end
if not known and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[4]) then
  return redis.error_reply('HSLIMIT the key remembers no more holds')
end
redis.call('DECRBY', KEYS[1], ARGV[2])
local left = redis.call('GET', KEYS[1])
if string.sub(left, 1, 1) == '-' then
  redis.call('INCRBY', KEYS[1], ARGV[2])
  return {0, have}
end
if over and string.sub(known, 21, 21) == 'o' then
  redis.call('HSET', KEYS[2], ARGV[1] .. '.' .. over, known)
end
redis.call('HSET', KEYS[2], ARGV[1], turn .. 'o:' .. ARGV[2] .. ':' .. left)
if turn == '' then redis.call('PEXPIRE', KEYS[2], ARGV[3]) end
return {1, left}";

/// KEYS 1 list, 2 ids; ARGV batch, how many ids are kept, turn or "", tokens. Batches are not
/// forgotten: whoever finds a filling left undone, however late, must not fill in again.
const PUSH_TOKENS: &str = r"
local was, turn = redis.call('HGET', KEYS[2], ARGV[1]), ARGV[3]
if was and (turn == '' or turn <= string.sub(was, 1, 20)) then return 0 end
if not was and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[2]) then
  return redis.error_reply('HSLIMIT the key remembers no more ids')
end
for i = 4, #ARGV do
  local pushed = redis.pcall('RPUSH', KEYS[1], ARGV[i])
  if type(pushed) == 'table' then return pushed end
end
redis.call('HSET', KEYS[2], ARGV[1], turn .. 'applied')
return 1";

/// KEYS 1 list, 2 holds; ARGV hold, how long holds are kept in ms, how many, turn or "". A hold
/// stands as `state:1:left:token`.
const POP_TOKEN: &str = r"
local known, turn = redis.call('HGET', KEYS[2], ARGV[1]), ARGV[4]
local was, over = known, false
if known and turn ~= '' then
  local of = string.sub(known, 1, 20)
  if turn < of then return {2, '0', ''} end
  was, over = turn == of and string.sub(known, 21), turn ~= of and of
end
if was then
  local state, amount, left, token = string.match(was, '^(%a):(%d+):(%d+):?(.*)$')
  if state == 'b' then return {2, amount, ''} end
  return {1, left, token}
end
if not known and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[3]) then
  return redis.error_reply('HSLIMIT the key remembers no more holds')
end
local token = redis.pcall('LPOP', KEYS[1])
if not token then return {0, '0', ''} end
if type(token) == 'table' then return token end
local left = tostring(redis.call('LLEN', KEYS[1]))
if over and string.sub(known, 21, 21) == 'o' then
  redis.call('HSET', KEYS[2], ARGV[1] .. '.' .. over, known)
end
redis.call('HSET', KEYS[2], ARGV[1], turn .. 'o:1:' .. left .. ':' .. token)
if turn == '' then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
return {1, left, token}";

/// KEYS 1 stock or list, 2 holds; ARGV hold, s or b, how long holds are kept in ms, how many, turn or
/// "". Returns 0 (never), 1 (now) or 2 (before), the amount, and how it ended before.
const END_HOLD: &str = r"
local known, turn = redis.call('HGET', KEYS[2], ARGV[1]), ARGV[5]
local was, over = known, false
if known and turn ~= '' then
  local of = string.sub(known, 1, 20)
  if turn < of then return {2, '0', ARGV[2]} end
  was, over = turn == of and string.sub(known, 21), turn ~= of and of
end
if not was then
  if ARGV[2] == 's' then return {0, '0', ''} end
  if not known and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[4]) then
    return redis.error_reply('HSLIMIT the key remembers no more holds')
  end
  was = 'o:0:0'
end
local state, amount, left, token = string.match(was, '^(%a):(%d+):(%d+)(.*)$')
if state ~= 'o' then return {2, amount, state} end
if ARGV[2] == 'b' and amount ~= '0' then
  local total
  if token == '' then total = redis.pcall('INCRBY', KEYS[1], amount)
  else total = redis.pcall('RPUSH', KEYS[1], string.sub(token, 2)) end
  if type(total) == 'table' then return total end
  token = ''
end
if over and string.sub(known, 21, 21) == 'o' then
  redis.call('HSET', KEYS[2], ARGV[1] .. '.' .. over, known)
end
redis.call('HSET', KEYS[2], ARGV[1], turn .. ARGV[2] .. ':' .. amount .. ':' .. left .. token)
if turn == '' then redis.call('PEXPIRE', KEYS[2], ARGV[3]) end
return {1, amount, ''}";

/// The digits of an id's turn, as the scripts expect them.
pub(super) fn turn(id: &Id) -> String {
    id.turn.map_or_else(String::new, |turn| format!("{turn:020}"))
}

/// The hash in which `id` is remembered beside `key`: `what`, or what is never forgotten.
pub(super) fn ids(key: &[u8], what: &str, id: &Id) -> Vec<u8> {
    match id.turn {
        None => beside(key, what),
        Some(_) => beside(key, &format!("{what}.turn")),
    }
}

/// A page of holds: first those with a name alone, then those with a turn.
pub(super) fn page(reply: &Value, turns: bool) -> Option<Holds> {
    let [Value::BulkString(next), found] = list(reply) else { return None };
    let next = match (next == b"0", turns) {
        (true, true) => None,
        (true, false) => Some(Bytes::from_static(b"t0")),
        (false, true) => Some([&b"t"[..], next].concat().into()),
        (false, false) => Some(Bytes::copy_from_slice(next)),
    };
    let pairs = list(found).chunks_exact(2).map(|pair| match pair {
        [Value::BulkString(id), Value::BulkString(state)] if turns => {
            hold(id, state.get(TURN_DIGITS..)?)
        }
        [Value::BulkString(id), Value::BulkString(state)] => hold(id, state),
        _ => None,
    });
    Some(Holds { page: pairs.collect::<Option<Vec<Hold>>>()?, next })
}

/// Digits before the state of an id with a turn.
const TURN_DIGITS: usize = 20;

/// A hold as it stands in the hash.
fn hold(id: &[u8], state: &[u8]) -> Option<Hold> {
    // A token may be any bytes.
    let mut parts = state.splitn(4, |byte| *byte == b':');
    let mut text = || std::str::from_utf8(parts.next()?).ok();
    let ended = end(text()?)?;
    let amount = text()?.parse().ok()?;
    text()?;
    let token = parts.next().map(Bytes::copy_from_slice);
    Some(Hold { id: Key::copy(id), amount, ended, token })
}

/// A state's letter; `None` within for an open hold.
#[expect(clippy::option_option, reason = "no letter, and a letter that says open, differ")]
pub(super) fn end(letter: &str) -> Option<Option<End>> {
    match letter {
        "o" => Some(None),
        "s" => Some(Some(End::Sold)),
        "b" => Some(Some(End::Back)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key;

    #[test]
    fn frames_and_seals_are_taken_off_and_nothing_else_is() {
        let version = Version { incarnation: 3, seq: u64::MAX };
        let framed = [FRAME, version_hex(version).as_bytes(), b"x\0y"].concat();
        let got = stored(framed, None);
        assert_eq!((got.bytes.as_ref(), got.version), (&b"x\0y"[..], Some(version)));
        let got = stored([b"-12", SEAL, b"00000000000000ff"].concat(), None);
        assert_eq!(got.bytes, "-12");
        for plain in [&b""[..], b"hello", b"12", FRAME, SEAL, b"\x01hsv:zz"] {
            assert_eq!(stored(plain.to_vec(), None).bytes, plain);
        }
    }
    #[test]
    fn what_stands_beside_a_key_is_in_its_slot_and_no_two_keys_share_it() {
        let keys = ["post:9", "{post:9}:likes", "a{b", "a}b", "foo{}{bar}", "{}", "", "x{y}z}"];
        let mut seen = std::collections::BTreeSet::new();
        for key in keys.map(str::as_bytes) {
            for what in ["once", "hold"] {
                let name = beside(key, what);
                assert_eq!(key::cluster_slot(&name), key::cluster_slot(key), "{key:?}");
                assert!(seen.insert(name));
            }
        }
    }
}
