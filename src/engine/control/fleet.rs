//! The hot list of more than one process, as it travels.
//!
//! - **What**: whole snapshots with an order, and heartbeats that keep one in force. Verdicts and
//!   rates travel apart: a list whose verdicts stand costs a heartbeat.
//! - **Invariant**: a list is known by (incarnation, version); of two lists the higher is in force.
//! - **Time and units**: durations count on the receiver's own clock from receipt. Wall-clock
//!   milliseconds are only compared with a minute of tolerance.
//! - **Bounds**: none here; the receiver's are in [`super::follow`].
//! - **Source**: Envoy's discovery protocol (versions, acknowledged or refused, time to live with
//!   heartbeats), for the reason given there: what a dead server has said must not stay in force.

use super::hotlist::Rule;
use super::treat::Treatment;
use crate::key::Key;
use std::fmt;
use std::time::Duration;

/// One key of the list.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct FleetKey {
    /// The key.
    pub key: Key,
    /// By whose word.
    pub rule: Rule,
    /// What every process is to do about it; `None` where nothing that a process does by itself
    /// helps.
    pub treatment: Option<Treatment>,
    /// What else would help, with its numbers.
    pub advice: Option<Treatment>,
    /// How long a value may be served from a near cache; `None` leaves it to the process.
    pub ttl: Option<Duration>,
    /// Reads a second of all processes together.
    pub reads_per_sec: f64,
    /// Writes a second of all processes together.
    pub writes_per_sec: f64,
    /// Requests a second that there were at least.
    pub lower_bound_per_sec: f64,
    /// Of these, requests a second that the store did not see: served from memory, or combined.
    pub saved_per_sec: f64,
    /// Its part of all requests, from 0 to 1.
    pub share: f64,
    /// How many processes (or relays of a host) named it.
    pub reporters: u32,
    /// For how long it has been on the list.
    pub hot_for: Duration,
    /// Why, for people.
    pub reason: String,
    /// Whether the group above has said so: the fleet of a host, the whole of a region.
    pub above: bool,
    /// When an operator's order ends, by the issuer's wall clock, in milliseconds since 1970.
    pub until_ms: Option<u64>,
}

impl FleetKey {
    /// A key without numbers: what an operator names.
    #[must_use]
    pub fn named(key: Key, rule: Rule, treatment: Treatment) -> FleetKey {
        FleetKey {
            key,
            rule,
            treatment: Some(treatment),
            advice: None,
            ttl: None,
            reads_per_sec: 0.0,
            writes_per_sec: 0.0,
            lower_bound_per_sec: 0.0,
            saved_per_sec: 0.0,
            share: 0.0,
            reporters: 0,
            hot_for: Duration::ZERO,
            reason: String::new(),
            above: false,
            until_ms: None,
        }
    }

    /// Reads and writes a second.
    #[must_use]
    pub fn total_per_sec(&self) -> f64 {
        self.reads_per_sec + self.writes_per_sec
    }
}

/// Which list: the higher one is in force.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Edition {
    /// The issuer's term: raised by every change of the issuer, and no less than the wall clock's
    /// milliseconds when it began. It fences off whoever was issuer before.
    pub incarnation: u64,
    /// Raised by every change of a verdict within the term.
    pub version: u64,
}

/// A whole list.
#[derive(Clone, PartialEq, Default, Debug)]
#[non_exhaustive]
pub struct FleetList {
    /// Who issued it.
    pub issuer: u64,
    /// Which list it is.
    pub edition: Edition,
    /// For how long it is in force, from its receipt on.
    pub ttl: Duration,
    /// When it was sent, by the issuer's wall clock, in milliseconds since 1970.
    pub sent_ms: u64,
    /// The keys, hottest first.
    pub entries: Vec<FleetKey>,
    /// Keys that no process may treat.
    pub denied: Vec<Key>,
    /// Those of them that the group above denies.
    pub denied_above: Vec<Key>,
    /// When denials end that do, by the issuer's wall clock, in milliseconds since 1970.
    pub denied_until_ms: Vec<(Key, u64)>,
}

impl FleetList {
    /// What of it the group above has said.
    #[must_use]
    pub fn from_above(&self) -> FleetList {
        FleetList {
            entries: self.entries.iter().filter(|e| e.above).cloned().collect(),
            denied: self.denied_above.clone(),
            denied_above: Vec::new(),
            denied_until_ms: Vec::new(),
            ..*self
        }
    }

    /// Leaves keys out that are longer: a receiver would refuse the whole list. How many.
    pub fn leave_out_longer(&mut self, key_bytes_max: usize) -> usize {
        let before = self.entries.len() + self.denied.len();
        let fits = |key: &Key| key.len() <= key_bytes_max;
        self.entries.retain(|e| fits(&e.key));
        self.denied.retain(fits);
        self.denied_above.retain(fits);
        self.denied_until_ms.retain(|(key, _)| fits(key));
        before - self.entries.len() - self.denied.len()
    }

    /// The entry of `key`.
    #[must_use]
    pub fn get(&self, key: impl AsRef<[u8]>) -> Option<&FleetKey> {
        self.entries.iter().find(|e| e.key.as_bytes() == key.as_ref())
    }
}

/// The list stands.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Heartbeat {
    /// Who issued the list.
    pub issuer: u64,
    /// Which list.
    pub edition: Edition,
    /// For how long it is in force from now on.
    pub ttl: Duration,
    /// When this was sent, by the issuer's wall clock, in milliseconds since 1970.
    pub sent_ms: u64,
    /// The canary: when the latest report that has come back to the issuer by the way that all
    /// reports take was sent, by its wall clock.
    pub canary_ms: u64,
    /// When to expect the next one.
    pub interval: Duration,
    /// How often to report.
    pub report_every: Duration,
    /// How often a process that is asked for nothing says so.
    pub quiet_every: Duration,
    /// Keys at or below this rate need not be reported.
    pub floor_per_sec: f64,
    /// Reports are to be left in the store: nobody hears them.
    pub reports_stored: bool,
    /// Over how many channels reports are spread.
    pub channels: u64,
}

impl fmt::Display for Edition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.incarnation, self.version)
    }
}

impl fmt::Display for FleetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (reads, writes) = (self.reads_per_sec, self.writes_per_sec);
        write!(f, "{}: {reads:.0} reads/s, {writes:.0} writes/s", self.key)?;
        match self.treatment {
            Some(treatment) => write!(f, "; {treatment} ({}", self.rule)?,
            None => write!(f, "; nothing ({}", self.rule)?,
        }
        if !self.reason.is_empty() {
            write!(f, ": {}", self.reason)?;
        }
        f.write_str(")")?;
        match self.advice {
            Some(advice) => write!(f, "; advice: {advice}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for FleetList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, s) = (self.entries.len(), if self.entries.len() == 1 { "" } else { "s" });
        write!(f, "{n} hot key{s}, version {}", self.edition)?;
        self.entries.iter().try_for_each(|entry| write!(f, "\n{entry}"))
    }
}
