//! What one process knows of the registry: which keys have a record, and for how long that holds.
//!
//! - **What**: three kinds of small values. A *record* a key, with a part for each mechanism that
//!   spreads the key. The *list* of all keys that have a record, with the version that each record
//!   has at least. The *root*: the version and the nonce of the list.
//! - **Invariant**: a lease begins before the read of the root was sent. While it lasts, every
//!   change that was published (record, then list, then root) more than a lease ago is known here:
//!   a key that is not on the list has no such record, and a record older than the list says is
//!   not used. No record is replaced by one with a lower version.
//! - **Time and units**: [`Tick`] at each call; versions count changes.
//! - **Bounds**: [`LISTED_MAX`] keys of at most [`KEY_BYTES_MAX`] bytes on the list,
//!   [`RECORD_BYTES_MAX`] bytes a record.
//! - **Source**: leases (Gray and Cheriton 1989), counted by the holder from before it asked and by
//!   the granter from after its change, on clocks that differ in rate by a bounded part.
//!
//! What waits for whom is the user's affair: where readers must learn first (a counter's next
//! generation), the wait lies between the announcement and the first write; where writers must
//! learn first (copies of a value), between the announcement and the first read. Both are
//! [`Timing::everybody_knows`] after the publication.

use super::super::time::Tick;
use super::carried;
use super::salt::Salt;
use crate::key::Key;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A record is no longer than this.
pub const RECORD_BYTES_MAX: usize = 1024;

/// Keys on the list at most, whatever the options say.
pub const LISTED_MAX: usize = 4096;

/// Longer keys have no record.
pub const KEY_BYTES_MAX: usize = 1024;

/// The durations that everybody who uses a registry agrees on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// How long what was read holds.
    pub lease: Duration,
    /// By how much the rates of two clocks differ at most, in thousandths.
    pub drift_permille: u32,
    /// How long after it was sent a write may still be applied.
    pub in_flight: Duration,
}

impl Timing {
    /// So long after a change was published nobody holds what was there before.
    #[must_use]
    pub fn everybody_knows(&self) -> Duration {
        self.lease + self.lease * self.drift_permille * 2 / 1000
    }

    /// So long after a change was published no write of who held what was there before is applied.
    #[must_use]
    pub fn writes_have_landed(&self) -> Duration {
        self.everybody_knows() + self.in_flight
    }

    /// How often a lease is renewed.
    #[must_use]
    pub fn renewal(&self) -> Duration {
        self.lease / 3
    }
}

/// Which of the records of a key.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stamp {
    /// Raised by every change.
    pub version: u64,
    /// Drawn for every change: a registry that has lost a change gives its version again.
    pub nonce: u64,
}

impl Stamp {
    /// Whether whoever has this has what `listed` tells of, or something newer.
    #[must_use]
    pub fn covers(&self, listed: &Stamp) -> bool {
        self.version > listed.version || self == listed
    }
}

/// The part of a record that a salted counter has.
pub const SALT: &str = "salt";

/// What is known of one key: a part of text for each mechanism.
#[derive(Clone, Debug)]
pub struct Record {
    /// Raised by every change.
    pub version: u64,
    /// Drawn for every change: tells who made it, should the answer be lost.
    pub nonce: u64,
    /// `(name, text)`. Parts that this version does not know are kept as they are.
    parts: Vec<(String, String)>,
    /// The part of a salted counter, once it was looked at: each add looks.
    salt: OnceLock<Option<Arc<Salt>>>,
}

impl PartialEq for Record {
    fn eq(&self, other: &Record) -> bool {
        self.stamp() == other.stamp() && self.parts == other.parts
    }
}

impl Eq for Record {}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && b != b'=')
}

impl Record {
    /// The first record of a key.
    #[must_use]
    pub fn first(nonce: u64) -> Record {
        Record::made_of(1, nonce, Vec::new())
    }

    fn made_of(version: u64, nonce: u64, parts: Vec<(String, String)>) -> Record {
        Record { version, nonce, parts, salt: OnceLock::new() }
    }

    /// What the part of a salted counter says, read once; `None` where it is unreadable or there is
    /// none.
    #[must_use]
    pub fn salt(&self) -> Option<&Arc<Salt>> {
        let parsed = || self.part(SALT).and_then(Salt::parse).map(Arc::new);
        self.salt.get_or_init(parsed).as_ref()
    }

    /// Which one it is.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        Stamp { version: self.version, nonce: self.nonce }
    }

    /// The text of a part.
    #[must_use]
    pub fn part(&self, name: &str) -> Option<&str> {
        self.parts.iter().find(|(n, _)| n == name).map(|(_, text)| text.as_str())
    }

    /// Whether there is a part besides this one.
    #[must_use]
    pub fn has_other_than(&self, name: &str) -> bool {
        self.parts.iter().any(|(n, _)| n != name)
    }

    /// The next record, with one part changed, or removed. Texts are words: printable ASCII
    /// without spaces and `=`.
    #[must_use]
    pub fn with(&self, nonce: u64, name: &str, text: Option<&str>) -> Record {
        let mut parts = self.parts.clone();
        parts.retain(|(n, _)| n != name);
        parts.extend(text.map(|text| (name.to_owned(), text.to_owned())));
        Record::made_of(self.version + 1, nonce, parts)
    }

    /// The record as bytes; `None` when it would be too long, or a part is not a word.
    #[must_use]
    pub fn encode(&self) -> Option<String> {
        let mut text = format!("hsr1 {} {:016x}", self.version, self.nonce);
        for (name, part) in &self.parts {
            if !is_word(name) || !is_word(part) {
                return None;
            }
            // Writing to a string does not fail.
            let _ = write!(text, " {name}={part}");
        }
        (text.len() <= RECORD_BYTES_MAX).then_some(text)
    }

    /// Reads a record; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Record> {
        if bytes.len() > RECORD_BYTES_MAX {
            return None;
        }
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        if words.next()? != "hsr1" {
            return None;
        }
        let version = words.next()?.parse().ok()?;
        let nonce = u64::from_str_radix(words.next()?, 16).ok()?;
        let part = |word: &str| {
            let (name, text) = word.split_once('=')?;
            (is_word(name) && is_word(text)).then(|| (name.to_owned(), text.to_owned()))
        };
        let parts = words.map(part).collect::<Option<Vec<_>>>()?;
        Some(Record::made_of(version, nonce, parts))
    }
}

/// All keys that have a record.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct List {
    /// Raised by every change.
    pub version: u64,
    /// Drawn for every change.
    pub nonce: u64,
    entries: BTreeMap<Key, Stamp>,
}

impl List {
    /// The record that `key` has at least.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Stamp> {
        self.entries.get(key).copied()
    }

    /// How many keys are on it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no key is on it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.entries.keys()
    }

    /// The list with `key` at this record; `None` when there is no room for another key.
    #[must_use]
    pub fn with(&self, nonce: u64, key: &Key, stamp: Stamp, max: usize) -> Option<List> {
        let mut next = self.clone();
        (next.version, next.nonce) = (self.version + 1, nonce);
        next.entries.insert(key.clone(), stamp);
        (next.len() <= self.len() || next.len() <= max.min(LISTED_MAX)).then_some(next)
    }

    /// The first list of a registry, with nothing on it: from then on its root tells this registry
    /// from every other.
    #[must_use]
    pub fn first(nonce: u64) -> List {
        List { version: 1, nonce, entries: BTreeMap::new() }
    }

    /// The list without `key`.
    #[must_use]
    pub fn without(&self, nonce: u64, key: &Key) -> List {
        let mut next = self.clone();
        (next.version, next.nonce) = (self.version + 1, nonce);
        next.entries.remove(key);
        next
    }

    /// The root that goes with this list.
    #[must_use]
    pub fn root(&self) -> Root {
        Root { version: self.version, nonce: self.nonce }
    }

    /// The list as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let head = format!("hsl1 {} {:016x} {}\n", self.version, self.nonce, self.len());
        let mut bytes = head.into_bytes();
        for (key, Stamp { version, nonce }) in &self.entries {
            let head = format!("{version} {nonce:016x} {}\n", key.len());
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(key);
            bytes.push(b'\n');
        }
        bytes
    }

    /// Reads a list; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<List> {
        fn line(bytes: &[u8]) -> Option<(&str, &[u8])> {
            let at = bytes.iter().take(80).position(|b| *b == b'\n')?;
            Some((std::str::from_utf8(&bytes[..at]).ok()?, &bytes[at + 1..]))
        }
        let (head, mut rest) = line(bytes)?;
        let mut words = head.split(' ');
        if words.next()? != "hsl1" {
            return None;
        }
        let version = words.next()?.parse().ok()?;
        let nonce = u64::from_str_radix(words.next()?, 16).ok()?;
        let n: usize = words.next()?.parse().ok()?;
        if words.next().is_some() || n > LISTED_MAX {
            return None;
        }
        let mut entries = BTreeMap::new();
        for _ in 0..n {
            let (head, after) = line(rest)?;
            let mut words = head.split(' ');
            let version = words.next()?.parse().ok()?;
            let nonce = u64::from_str_radix(words.next()?, 16).ok()?;
            let len: usize = words.next()?.parse().ok()?;
            if len > KEY_BYTES_MAX || after.len() <= len || after[len] != b'\n' {
                return None;
            }
            entries.insert(Key::copy(&after[..len]), Stamp { version, nonce });
            rest = &after[len + 1..];
        }
        let list = List { version, nonce, entries };
        (rest.is_empty() && list.len() == n).then_some(list)
    }
}

/// Which list is in force.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Root {
    /// Its version; zero before there was one.
    pub version: u64,
    /// Its nonce.
    pub nonce: u64,
}

impl Root {
    /// The root as bytes.
    #[must_use]
    pub fn encode(&self) -> String {
        format!("hst1 {} {:016x}", self.version, self.nonce)
    }

    /// Reads a root; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Root> {
        let mut words = std::str::from_utf8(bytes.get(..bytes.len().min(64))?).ok()?.split(' ');
        if words.next()? != "hst1" {
            return None;
        }
        let version = words.next()?.parse().ok()?;
        let nonce = u64::from_str_radix(words.next()?, 16).ok()?;
        words.next().is_none().then_some(Root { version, nonce })
    }
}

/// What is known of a key now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookup<'a> {
    /// The key has no record, until then.
    Absent(Tick),
    /// This is its record, until then.
    Record(&'a Record, Tick),
    /// It has a newer record than this, which is to be loaded. There may be none here.
    Stale(Option<&'a Record>),
    /// The lease has run out; this is the last that was known.
    Lapsed(Option<&'a Record>),
}

/// What one process knows of the registry.
#[derive(Clone, Debug)]
pub struct Catalog {
    timing: Timing,
    list: List,
    records: BTreeMap<Key, Record>,
    /// Keys with a record that have left the list since it was read: who was away when that
    /// happened knows one from before, and its slots may be gone.
    left: BTreeSet<Key>,
    /// The lease runs until then.
    until: Tick,
    /// When the last renewal that ended well was sent.
    renewed: Option<Tick>,
    /// Another process's read was the last that renewed it.
    carried: bool,
}

impl Catalog {
    /// Knows of nothing, and holds no lease.
    #[must_use]
    pub fn new(timing: Timing) -> Catalog {
        Catalog {
            timing,
            list: List::default(),
            records: BTreeMap::new(),
            left: BTreeSet::new(),
            until: Tick::ZERO,
            renewed: None,
            carried: false,
        }
    }

    /// The durations.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// What is known of `key` at `now`.
    #[must_use]
    pub fn lookup(&self, now: Tick, key: &Key) -> Lookup<'_> {
        let known = self.records.get(key);
        if now >= self.until {
            return Lookup::Lapsed(known);
        }
        match (self.list.get(key), known) {
            (None, None) => Lookup::Absent(self.until),
            (Some(listed), Some(record)) if !record.stamp().covers(&listed) => Lookup::Stale(known),
            (Some(_), None) => Lookup::Stale(None),
            (None, Some(_)) if self.has_left(key) => Lookup::Stale(known),
            (_, Some(record)) => Lookup::Record(record, self.until),
        }
    }

    /// Whether this process is to renew the lease by itself. Where another's reads renew it that is
    /// later, but early enough for a call and a part of another one.
    #[must_use]
    pub fn is_due(&self, now: Tick) -> bool {
        let lease = self.timing.lease;
        let pause = if self.carried { carried::patience(lease) } else { self.timing.renewal() };
        self.renewed.is_none_or(|at| now.since(at) >= pause)
    }

    /// The root was read by a call that was sent at `sent`. True when the lease is renewed; else
    /// the list is to be read.
    pub fn handle_root(&mut self, sent: Tick, root: Root) -> bool {
        let same = root == self.list.root();
        if same {
            self.renew(sent);
        }
        self.carried = false;
        same
    }

    /// Another process has read the root, after this one asked it to at `sent`. True when that
    /// renews the lease. Else this process reads by itself, as if it had not asked: where the root
    /// has moved, and where the lease has ended, since whoever was away looks at everything again.
    /// Before there is a list, one registry looks like another.
    pub fn handle_carried(&mut self, now: Tick, sent: Tick, root: Root) -> bool {
        let known = root == self.list.root() && root != Root::default();
        if !known || now >= self.until || sent > now {
            self.carried = false;
            return false;
        }
        let newer = self.renewed.is_some_and(|at| at < sent);
        if newer {
            self.renew(sent);
            self.carried = true;
        }
        newer
    }

    /// The list was read after the root, whose read was sent at `sent`.
    pub fn handle_list(&mut self, sent: Tick, root: Root, list: List) {
        // The list is written before the root: it is never older, unless something was lost. Should
        // it be older than the one known here, the records that are known stay known.
        if list.version >= root.version {
            let gone = self.list.entries.keys().filter(|key| !list.entries.contains_key(*key));
            self.left.extend(gone.cloned());
            self.left
                .retain(|key| !list.entries.contains_key(key) && self.records.contains_key(key));
            self.list = list;
            self.carried = false;
            self.renew(sent);
            if self.records.len() > LISTED_MAX {
                self.records.retain(|key, _| self.list.entries.contains_key(key));
                self.left.clear();
            }
        }
    }

    fn renew(&mut self, sent: Tick) {
        if self.renewed.is_none_or(|at| at <= sent) {
            self.renewed = Some(sent);
            self.until = self.until.max(sent.after(self.timing.lease));
        }
    }

    /// A record was read, or written. True unless a newer one is known.
    pub fn handle_record(&mut self, key: &Key, record: Record) -> bool {
        self.left.remove(key);
        let newer = self.records.get(key).is_none_or(|known| known.version <= record.version);
        if newer {
            self.records.insert(key.clone(), record);
        }
        newer
    }

    /// The list as it is known.
    #[must_use]
    pub fn list(&self) -> &List {
        &self.list
    }

    /// The newest record known of `key`, whether or not it may be used.
    #[must_use]
    pub fn record(&self, key: &Key) -> Option<&Record> {
        self.records.get(key)
    }

    /// Keys whose record is to be loaded, among those of which one is known; all of them, if so
    /// asked.
    pub fn stale(&self, all: bool) -> impl Iterator<Item = &Key> {
        let stale = move |(key, record): &(&Key, &Record)| {
            let behind = |listed: Stamp| !record.stamp().covers(&listed);
            all || self.has_left(key) || self.list.get(key).is_some_and(behind)
        };
        self.records.iter().filter(stale).map(|(key, _)| key)
    }

    /// Whether `key` has left the list and its record was not read since.
    #[must_use]
    pub fn has_left(&self, key: &Key) -> bool {
        self.left.contains(key)
    }

    /// Whether any record is known.
    #[must_use]
    pub fn has_records(&self) -> bool {
        !self.records.is_empty()
    }

    /// Whether the list that is in force shows this record of `key`, or a newer one.
    #[must_use]
    pub fn is_published(&self, key: &Key, stamp: Stamp) -> bool {
        self.list.get(key).is_some_and(|listed| listed.covers(&stamp))
    }

    /// When the lease ends.
    #[must_use]
    pub fn until(&self) -> Tick {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SEC: Duration = Duration::from_secs(1);
    const TIMING: Timing =
        Timing { lease: SEC, drift_permille: 20, in_flight: Duration::from_secs(2) };

    fn at(ms: u64) -> Tick {
        Tick(3_600_000_000_000).after(Duration::from_millis(ms))
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back_and_nothing_else_does(
            keys in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..20),
            noise: Vec<u8>,
        ) {
            let mut list = List::default();
            for (i, key) in keys.iter().enumerate() {
                let stamp = Stamp { version: i as u64, nonce: u64::MAX - i as u64 };
                list = list.with(i as u64, &Key::copy(key), stamp, 64).unwrap();
            }
            prop_assert_eq!(List::parse(&list.encode()), Some(list.clone()));
            let mut cut = list.encode();
            cut.pop();
            prop_assert_eq!(List::parse(&cut), None);
            prop_assert_eq!(Root::parse(list.root().encode().as_bytes()), Some(list.root()));
            prop_assert_eq!(List::parse(&noise), None);
            prop_assert_eq!(Record::parse(&noise), None);
            prop_assert_eq!(Root::parse(&noise), None);
        }
    }

    #[test]
    fn a_record_keeps_the_parts_that_it_does_not_know() {
        let record = Record::first(7).with(8, "copies", Some("1.2.3")).with(9, "salt", Some("x"));
        let record = Record::parse(record.encode().unwrap().as_bytes()).unwrap();
        let record = record.with(10, "salt", Some("y"));
        assert_eq!((record.part("copies"), record.part("salt")), (Some("1.2.3"), Some("y")));
        assert_eq!((record.version, record.nonce), (4, 10));
        assert_eq!(record.with(11, "salt", None).part("salt"), None);
        assert_eq!(record.with(11, "salt", Some("two words")).encode(), None);
        assert_eq!(record.with(11, "salt", Some(&"x".repeat(2000))).encode(), None);
    }

    #[test]
    fn a_full_list_takes_no_other_key_and_still_changes_those_it_has() {
        let (a, b) = (Key::from("a"), Key::from("b"));
        let [first, second] = [1, 5].map(|version| Stamp { version, nonce: 9 });
        let list = List::default().with(1, &a, first, 1).unwrap();
        assert_eq!(list.with(2, &b, first, 1), None);
        assert_eq!(list.with(2, &a, second, 1).unwrap().get(&a), Some(second));
        assert!(list.without(3, &a).is_empty());
    }

    #[test]
    fn a_lease_begins_before_the_root_was_asked_for() {
        let mut catalog = Catalog::new(TIMING);
        let key = Key::from("k");
        assert_eq!(catalog.lookup(at(0), &key), Lookup::Lapsed(None));
        assert!(catalog.handle_root(at(0), Root::default()), "nothing is listed yet");
        assert_eq!(catalog.lookup(at(999), &key), Lookup::Absent(at(1000)));
        assert_eq!(catalog.lookup(at(1000), &key), Lookup::Lapsed(None));
        // An answer that was overtaken takes nothing back.
        assert!(catalog.handle_root(at(500), Root::default()));
        assert!(catalog.handle_root(at(100), Root::default()));
        assert_eq!(catalog.until(), at(1500));
    }

    #[test]
    fn a_record_older_than_the_list_says_is_not_used() {
        let mut catalog = Catalog::new(TIMING);
        let key = Key::from("k");
        let first = Record::first(1).with(2, "salt", Some("a"));
        let second = first.with(3, "salt", Some("b"));
        let list = List::default().with(1, &key, first.stamp(), 9).unwrap();
        assert!(!catalog.handle_root(at(0), list.root()), "the list is to be read");
        catalog.handle_list(at(0), list.root(), list.clone());
        assert_eq!(catalog.lookup(at(1), &key), Lookup::Stale(None));
        assert!(catalog.handle_record(&key, first.clone()));
        assert_eq!(catalog.lookup(at(1), &key), Lookup::Record(&first, at(1000)));
        let list = list.with(2, &key, second.stamp(), 9).unwrap();
        catalog.handle_list(at(10), list.root(), list);
        assert_eq!(catalog.lookup(at(11), &key), Lookup::Stale(Some(&first)));
        assert_eq!(catalog.stale(false).count(), 1);
        assert!(catalog.handle_record(&key, second.clone()));
        assert!(!catalog.handle_record(&key, first), "never back");
        assert_eq!(catalog.lookup(at(11), &key), Lookup::Record(&second, at(1010)));
    }

    #[test]
    fn a_list_that_has_gone_back_takes_no_record_away() {
        let mut catalog = Catalog::new(TIMING);
        let key = Key::from("k");
        let record = Record::first(1).with(2, "salt", Some("a"));
        let old = List::default().with(1, &Key::from("x"), Stamp::default(), 9).unwrap();
        let new = old.with(2, &key, record.stamp(), 9).unwrap();
        catalog.handle_list(at(0), new.root(), new);
        catalog.handle_record(&key, record.clone());
        assert!(!catalog.handle_root(at(5), old.root()));
        catalog.handle_list(at(5), old.root(), old);
        assert_eq!(catalog.lookup(at(6), &key), Lookup::Stale(Some(&record)));
        catalog.handle_record(&key, record.clone());
        assert_eq!(catalog.lookup(at(6), &key), Lookup::Record(&record, at(1005)));
    }

    /// A process that was frozen for long comes back when the counter has gone home and its slots
    /// are deleted: a valid lease says nothing of a key that is not on the list any more.
    #[test]
    fn a_record_of_a_key_that_has_left_the_list_is_read_again_before_it_is_used() {
        let mut catalog = Catalog::new(TIMING);
        let key = Key::from("k");
        let spread = Record::first(1).with(2, "salt", Some("slots"));
        let home = spread.with(3, "salt", None);
        let listed = List::default().with(1, &key, spread.stamp(), 9).unwrap();
        catalog.handle_list(at(0), listed.root(), listed.clone());
        catalog.handle_record(&key, spread.clone());
        let left = listed.without(2, &key);
        catalog.handle_list(at(5), left.root(), left.clone());
        assert_eq!(catalog.lookup(at(6), &key), Lookup::Stale(Some(&spread)));
        assert!(catalog.has_left(&key));
        assert_eq!(catalog.stale(false).collect::<Vec<_>>(), [&key]);
        // However often the list is read.
        catalog.handle_list(at(7), left.root(), left);
        assert_eq!(catalog.lookup(at(8), &key), Lookup::Stale(Some(&spread)));
        catalog.handle_record(&key, home.clone());
        assert_eq!(catalog.lookup(at(8), &key), Lookup::Record(&home, at(1007)));
        assert!(!catalog.has_left(&key));
    }

    #[test]
    fn a_version_that_is_given_again_is_another_record() {
        let mut catalog = Catalog::new(TIMING);
        let key = Key::from("k");
        let lost = Record::first(1).with(2, "salt", Some("a"));
        let again = Record::first(1).with(3, "salt", Some("b"));
        let list = List::default().with(1, &key, lost.stamp(), 9).unwrap();
        catalog.handle_list(at(0), list.root(), list.clone());
        catalog.handle_record(&key, lost);
        assert!(!catalog.is_published(&key, again.stamp()));
        let list = list.with(2, &key, again.stamp(), 9).unwrap();
        catalog.handle_list(at(5), list.root(), list);
        assert!(matches!(catalog.lookup(at(6), &key), Lookup::Stale(Some(_))));
        assert!(catalog.handle_record(&key, again.clone()));
        assert_eq!(catalog.lookup(at(6), &key), Lookup::Record(&again, at(1005)));
    }

    #[test]
    fn a_list_older_than_its_root_renews_nothing() {
        let mut catalog = Catalog::new(TIMING);
        let list = List::default().with(1, &Key::from("x"), Stamp::default(), 9).unwrap();
        catalog.handle_list(at(0), Root { version: 5, nonce: 1 }, list);
        assert_eq!(catalog.lookup(at(1), &Key::from("k")), Lookup::Lapsed(None));
    }

    #[test]
    fn what_another_has_read_renews_a_lease_and_nothing_else_does() {
        let mut catalog = Catalog::new(TIMING);
        let list = List::first(7);
        assert!(!catalog.handle_carried(at(1), at(0), list.root()), "nothing is known yet");
        catalog.handle_list(at(0), list.root(), list.clone());
        assert!(catalog.is_due(at(334)) && !catalog.is_due(at(333)));
        assert!(catalog.handle_carried(at(300), at(200), list.root()));
        assert_eq!(catalog.until(), at(1200), "from when it was asked for");
        assert!(!catalog.is_due(at(699)) && catalog.is_due(at(700)), "half a lease is left");
        assert!(!catalog.handle_carried(at(400), at(100), list.root()), "older than the last");
        assert!(!catalog.handle_carried(at(400), at(401), list.root()), "from the future");
        assert_eq!(catalog.until(), at(1200));
        // News: the process reads as soon as it does without a sibling.
        let moved = Root { version: 2, nonce: 8 };
        assert!(catalog.handle_carried(at(450), at(400), list.root()));
        assert!(!catalog.handle_carried(at(550), at(500), moved));
        assert_eq!(catalog.until(), at(1400));
        assert!(!catalog.is_due(at(733)) && catalog.is_due(at(734)));
        // Whoever was away looks at everything again.
        assert!(!catalog.handle_carried(at(1400), at(1300), list.root()));
        assert_eq!(catalog.lookup(at(1400), &Key::from("k")), Lookup::Lapsed(None));
    }

    #[test]
    fn two_registries_without_a_list_are_not_taken_for_one_another() {
        let mut catalog = Catalog::new(TIMING);
        assert!(catalog.handle_root(at(0), Root::default()));
        assert!(!catalog.handle_carried(at(300), at(200), Root::default()));
        assert_eq!(catalog.until(), at(1000));
        assert_ne!(List::first(1).root(), List::first(2).root());
    }

    #[test]
    fn the_granter_waits_longer_than_the_slowest_holder() {
        assert_eq!(TIMING.everybody_knows(), Duration::from_millis(1040));
        assert_eq!(TIMING.writes_have_landed(), Duration::from_millis(3040));
    }
}
