//! The hot list: the keys that stand out, what is done about each, and why.
//!
//! - **What**: plain numbers that can be printed, compared and passed on.
//! - **Invariant**: hottest first; a key stands in it once; a denied key is never in force.
//! - **Time and units**: rates per second over the last finished window (for a key found within
//!   the running one, over the span that proved it); durations.
//! - **Bounds**: the watched keys of the detector, the pins and the scheduled keys, all of which
//!   are capped.
//! - **Source**: the fields that an operator asks for first, after Valkey's hot-key report.

use super::treat::{Advice, Reason, Treatment};
use super::verdict::WindowRecord;
use crate::key::Key;
use std::fmt;
use std::time::Duration;

/// By whose word a key is treated, or not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// Nobody has said anything.
    None,
    /// The detector found it.
    Detected,
    /// It is on a schedule that is in force.
    Scheduled,
    /// It is on the list of the host or the fleet: all processes together ask for it often enough.
    Fed,
    /// An operator pinned it.
    Pinned,
    /// An operator denied it.
    Denied,
}

/// One key of the list.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct HotKey {
    /// The key.
    pub key: Key,
    /// By whose word.
    pub rule: Rule,
    /// What is done about it, or would be if it were in force.
    pub treatment: Option<Treatment>,
    /// Whether the treatment is acted on: not in observe-only mode, not for a denied key, and not
    /// beyond the greatest number of hot keys.
    pub in_force: bool,
    /// For how long it has been on the list.
    pub hot_for: Duration,
    /// Reads a second that the service asked for.
    pub reads_per_sec: f64,
    /// Writes a second that the service asked for.
    pub writes_per_sec: f64,
    /// Requests a second that it had at least, as far as sampling can tell.
    pub lower_bound_per_sec: f64,
    /// Requests a second that reached the store.
    pub load_per_sec: f64,
    /// Whether a whole window has passed since it came on the list. Until then the rates are those
    /// that proved it hot, which is less than what it has now.
    pub settled: bool,
    /// Its part of all requests of this process in the last window, from 0 to 1; `None` until it
    /// has settled.
    pub share: Option<f64>,
    /// The rule that fired, with its numbers; `None` for a key that only an operator named.
    pub reason: Option<Reason>,
    /// What else would help its reads.
    pub reads_advice: Option<Advice>,
    /// What would help its writes.
    pub writes_advice: Option<Advice>,
    /// Store operations that were saved since it is on the list, estimated.
    pub saved: u64,
    /// Requests a second of all processes together, where a list is followed that names the key.
    pub fleet_per_sec: Option<f64>,
}

/// The hot keys of one process. See [`Heatsink::hot_list`](crate::Heatsink::hot_list).
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct HotList {
    /// Raised by every change of who is on the list and of what is done about a key.
    pub version: u64,
    /// Nothing on it is acted on: see [`Detect::observe_only`](crate::Detect::observe_only).
    pub observe_only: bool,
    /// The threshold in force, in requests a second.
    pub threshold_per_sec: f64,
    /// No slower key can be decided on at the present sampling.
    pub floor_per_sec: f64,
    /// The last finished window.
    pub window: Option<WindowRecord>,
    /// The keys, hottest first.
    pub entries: Vec<HotKey>,
}

impl HotKey {
    /// Reads and writes a second.
    #[must_use]
    pub fn total_per_sec(&self) -> f64 {
        self.reads_per_sec + self.writes_per_sec
    }
}

impl HotList {
    /// The entry of `key`.
    #[must_use]
    pub fn get(&self, key: impl AsRef<[u8]>) -> Option<&HotKey> {
        self.entries.iter().find(|e| e.key.as_bytes() == key.as_ref())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::None => "no rule",
            Rule::Detected => "detected",
            Rule::Scheduled => "scheduled",
            Rule::Fed => "hot for all processes together",
            Rule::Pinned => "pinned by an operator",
            Rule::Denied => "denied by an operator",
        })
    }
}

impl fmt::Display for HotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let so_far = if self.settled { "" } else { "so far at least " };
        let (reads, writes) = (self.reads_per_sec, self.writes_per_sec);
        write!(f, "{}: {so_far}{reads:.0} reads/s, {writes:.0} writes/s", self.key)?;
        if let Some(share) = self.share {
            let load = self.load_per_sec;
            write!(f, " ({:.1} % of the requests), {load:.0}/s reach the store", 100.0 * share)?;
        }
        if let Some(fleet) = self.fleet_per_sec {
            write!(f, ", {fleet:.0}/s in all processes")?;
        }
        f.write_str("; ")?;
        match (self.treatment, self.in_force) {
            (Some(treatment), true) => write!(f, "{treatment}")?,
            (Some(treatment), false) => write!(f, "would be: {treatment}")?,
            (None, _) => f.write_str("nothing")?,
        }
        write!(f, " ({}", self.rule)?;
        if let Some(reason) = &self.reason {
            write!(f, ": {reason}")?;
        }
        f.write_str(")")?;
        for advice in [self.reads_advice, self.writes_advice].into_iter().flatten() {
            write!(f, "; advice: {advice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for HotList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, s) = (self.entries.len(), if self.entries.len() == 1 { "" } else { "s" });
        write!(f, "{n} hot key{s}, threshold {:.0}/s", self.threshold_per_sec)?;
        if self.observe_only {
            f.write_str(" (observe only)")?;
        }
        self.entries.iter().try_for_each(|entry| write!(f, "\n{entry}"))
    }
}
