//! Keys: the bytes a service reads and writes by, and where a cluster places them.

use bytes::Bytes;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{self, AtomicBool};

/// The longest key that heatsink passes on, in bytes.
///
/// Redis allows 512 MiB and DynamoDB 2 KiB; a longer key than this is refused before it is copied
/// into any table, so that no caller can grow heatsink's memory with keys.
pub const KEY_BYTES_MAX: usize = 64 * 1024;

/// Keys up to here are kept in place: as long as fits without making [`Key`] longer than `Bytes`.
const SHORT_BYTES_MAX: usize = 23;

/// A key, as the bytes that the store knows it by. Cloning is cheap: keys of up to 23 bytes are
/// copied, without memory of their own and without a count that threads would share; longer ones
/// share their bytes.
///
/// # Example
/// ```
/// # use heatsink::Key;
/// let key = Key::from("post:9");
/// assert_eq!(key.as_bytes(), b"post:9");
/// ```
#[derive(Clone)]
pub struct Key(Held);

#[derive(Clone)]
enum Held {
    Short { len: u8, bytes: [u8; SHORT_BYTES_MAX] },
    Long(Bytes),
}

impl Key {
    /// A key that owns a copy of `bytes`.
    #[must_use]
    pub fn copy(bytes: &[u8]) -> Key {
        Key(Held::short(bytes).unwrap_or_else(|| Held::Long(Bytes::copy_from_slice(bytes))))
    }

    /// The bytes that the store knows this key by.
    #[must_use]
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            // Never longer than what is there.
            Held::Short { len, bytes } => bytes.get(..usize::from(*len)).unwrap_or_default(),
            Held::Long(bytes) => bytes,
        }
    }

    /// The key as a shared buffer.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match &self.0 {
            Held::Short { .. } => Bytes::copy_from_slice(self),
            Held::Long(bytes) => bytes.clone(),
        }
    }

    /// The Redis Cluster slot of this key: CRC16 of its hash tag, modulo 16,384.
    #[must_use]
    pub fn cluster_slot(&self) -> u16 {
        cluster_slot(self)
    }
}

impl Held {
    #[inline]
    fn short(key: &[u8]) -> Option<Held> {
        let mut bytes = [0; SHORT_BYTES_MAX];
        bytes.get_mut(..key.len())?.copy_from_slice(key);
        Some(Held::Short { len: u8::try_from(key.len()).ok()?, bytes })
    }
}

impl Default for Key {
    fn default() -> Key {
        Key::copy(&[])
    }
}

impl PartialEq for Key {
    #[inline]
    fn eq(&self, other: &Key) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Key) -> Ordering {
        self.as_bytes().cmp(other)
    }
}

impl Hash for Key {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

static REDACTED: AtomicBool = AtomicBool::new(false);

/// Hides the bytes of all keys of this process wherever heatsink prints one: errors, log events,
/// the hot list, explanations. In their place stands a number that is the same for the same key
/// within the process, and another in every process.
pub fn redact_keys(hide: bool) {
    REDACTED.store(hide, atomic::Ordering::Relaxed);
}

/// At most 64 bytes of a key, escaped: what may appear in an error or a log line.
pub(crate) fn short(key: &[u8]) -> String {
    if REDACTED.load(atomic::Ordering::Relaxed) {
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
        write!(f, "\"{}\"", short(self))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&short(self))
    }
}

impl Deref for Key {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
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
        s.into_bytes().into()
    }
}

impl From<Vec<u8>> for Key {
    fn from(s: Vec<u8>) -> Key {
        Bytes::from(s).into()
    }
}

impl From<Bytes> for Key {
    fn from(s: Bytes) -> Key {
        Key(Held::short(&s).unwrap_or(Held::Long(s)))
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
    fn a_key_is_its_bytes_however_long_and_however_it_was_made() {
        use std::collections::{BTreeSet, HashSet};
        assert_eq!(size_of::<Key>(), size_of::<Bytes>());
        let long = "0123456789".repeat(10);
        let (mut ordered, mut hashed) = (BTreeSet::new(), HashSet::new());
        for len in 0..=long.len() {
            let bytes = &long.as_bytes()[..len];
            let made = [
                Key::copy(bytes),
                Key::from(bytes),
                Key::from(bytes.to_vec()),
                Key::from(&long[..len]),
                Key::from(long[..len].to_owned()),
                Key::from(Bytes::copy_from_slice(bytes)),
            ];
            for key in made {
                assert_eq!(key.as_bytes(), bytes);
                assert_eq!(key.to_bytes(), bytes);
                assert_eq!(key.clone(), key);
                ordered.insert(key.clone());
                hashed.insert(key);
            }
        }
        assert_eq!((ordered.len(), hashed.len()), (long.len() + 1, long.len() + 1));
        assert!(ordered.iter().map(|key| key.len()).eq(0..=long.len()));
        assert_eq!(Key::default(), Key::from(""));
    }

    #[test]
    fn a_shown_key_is_escaped_and_cut() {
        let key = Key::from(vec![0u8; 1000]);
        assert!(format!("{key}").len() <= 64 * 4 + 3);
        assert_eq!(format!("{:?}", Key::from("a\n")), "\"a\\n\"");
    }
}
