//! Keys: the bytes a service reads and writes by, and where a cluster places them.

use bytes::Bytes;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The longest key that heatsink passes on, in bytes.
///
/// Redis allows 512 MiB and DynamoDB 2 KiB; a longer key than this is refused before it is copied
/// into any table, so that no caller can grow heatsink's memory with keys.
pub const KEY_BYTES_MAX: usize = 64 * 1024;

/// A key, as the bytes that the store knows it by. Cloning is cheap and shares the bytes.
///
/// # Example
/// ```
/// # use heatsink::Key;
/// let key = Key::from("post:9");
/// assert_eq!(key.as_bytes(), b"post:9");
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Key(Bytes);

impl Key {
    /// A key that owns a copy of `bytes`.
    #[must_use]
    pub fn copy(bytes: &[u8]) -> Key {
        Key(Bytes::copy_from_slice(bytes))
    }

    /// The bytes that the store knows this key by.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key as a shared buffer.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        self.0.clone()
    }

    /// The Redis Cluster slot of this key: CRC16 of its hash tag, modulo 16,384.
    #[must_use]
    pub fn cluster_slot(&self) -> u16 {
        cluster_slot(&self.0)
    }
}

static REDACTED: AtomicBool = AtomicBool::new(false);

/// Hides the bytes of all keys of this process wherever heatsink prints one: errors, log events,
/// the hot list, explanations. In their place stands a number that is the same for the same key
/// within the process, and another in every process.
pub fn redact_keys(hide: bool) {
    REDACTED.store(hide, Ordering::Relaxed);
}

/// At most 64 bytes of a key, escaped: what may appear in an error or a log line.
pub(crate) fn short(key: &[u8]) -> String {
    if REDACTED.load(Ordering::Relaxed) {
        static SECRET: OnceLock<RandomState> = OnceLock::new();
        return format!("key#{:016x}", SECRET.get_or_init(RandomState::new).hash_one(key));
    }
    const SHOWN: usize = 64;
    let cut = &key[..key.len().min(SHOWN)];
    let dots = if key.len() > SHOWN { "…" } else { "" };
    format!("{}{dots}", cut.escape_ascii())
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", short(&self.0))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&short(&self.0))
    }
}

impl Deref for Key {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<&str> for Key {
    fn from(s: &str) -> Key {
        Key::copy(s.as_bytes())
    }
}

impl From<&[u8]> for Key {
    fn from(s: &[u8]) -> Key {
        Key::copy(s)
    }
}

impl From<String> for Key {
    fn from(s: String) -> Key {
        Key(s.into())
    }
}

impl From<Vec<u8>> for Key {
    fn from(s: Vec<u8>) -> Key {
        Key(s.into())
    }
}

impl From<Bytes> for Key {
    fn from(s: Bytes) -> Key {
        Key(s)
    }
}

/// The part of a key that decides its Redis Cluster slot: what stands between the first `{` and the
/// next `}`, if that is not empty; else the whole key.
///
/// Source: Redis Cluster specification, "Hash tags".
#[must_use]
pub fn hash_tag(key: &[u8]) -> &[u8] {
    let Some(open) = key.iter().position(|&b| b == b'{') else { return key };
    match key[open + 1..].iter().position(|&b| b == b'}') {
        Some(0) | None => key,
        Some(len) => &key[open + 1..open + 1 + len],
    }
}

/// The Redis Cluster slot of a key, 0 to 16,383.
#[must_use]
pub fn cluster_slot(key: &[u8]) -> u16 {
    crc16(hash_tag(key)) % 16_384
}

/// CRC-16/XMODEM: polynomial 0x1021, initial value 0, no reflection.
///
/// Source: Redis Cluster specification, appendix A.
#[must_use]
pub fn crc16(bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = crc16_table();
    bytes.iter().fold(0u16, |crc, &byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

const fn crc16_table() -> [u16; 256] {
    let mut table = [0u16; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = (i as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

/// 32-bit FNV-1a, the placement that the articles' programs use.
///
/// Source: Fowler, Noll, Vo; offset 2166136261, prime 16777619.
#[must_use]
pub fn fnv1a_32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(2_166_136_261, |h, &b| (h ^ u32::from(b)).wrapping_mul(16_777_619))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_the_redis_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(cluster_slot(b"foo"), 12_182);
        assert_eq!(cluster_slot(b"{user1000}.following"), cluster_slot(b"{user1000}.followers"));
    }

    #[test]
    fn hash_tags_follow_the_first_brace_rule() {
        assert_eq!(hash_tag(b"foo{}{bar}"), b"foo{}{bar}");
        assert_eq!(hash_tag(b"foo{{bar}}zap"), b"{bar");
        assert_eq!(hash_tag(b"foo{bar}{zap}"), b"bar");
        assert_eq!(hash_tag(b"foo{bar"), b"foo{bar");
    }

    #[test]
    fn fnv1a_matches_its_published_vectors() {
        assert_eq!(fnv1a_32(b""), 0x811c_9dc5);
        assert_eq!(fnv1a_32(b"foobar"), 0xbf9c_f968);
    }

    #[test]
    fn a_shown_key_is_escaped_and_cut() {
        let key = Key::from(vec![0u8; 1000]);
        assert!(format!("{key}").len() <= 64 * 4 + 3);
        assert_eq!(format!("{:?}", Key::from("a\n")), "\"a\\n\"");
    }
}
