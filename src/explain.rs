//! What heatsink does with one key, and why, for people.

use crate::engine::control::hotlist::{HotKey, Rule};
use crate::engine::control::spread::Spread;
use crate::engine::control::treat::Treatment;
use crate::engine::control::verdict::Explanation as Detected;
use crate::engine::data::near::Freshness;
use crate::key::Key;
use crate::salt::Salting;
use std::fmt;
use std::time::Duration;

/// What the near cache holds of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CachedValue {
    /// Age, counted from the start of the load.
    pub age: Duration,
    /// Whether it is fresh or stale.
    pub freshness: Freshness,
    /// The size of the value; `None` for a cached absence.
    pub bytes: Option<usize>,
}

/// What heatsink does with a key, and why. Its `Display` is a table for people, a fact a line:
///
/// ```text
/// post:9: near cache (detected)
///   why      403 reads/s here, near cache from 50/s
///   traffic  402 reads/s and 0 writes/s (at least 380/s), of which 1/s reached the store
///   cached   11 bytes, Fresh, 640 ms old
///   saved    1604 store operations in 4 s
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// The key.
    pub key: Key,
    /// What is done for it; `None`: it is served like by the bare client, with single flight.
    pub treatment: Option<Treatment>,
    /// By whose word.
    pub rule: Rule,
    /// Its entry on the hot list, with the rule that fired and what was saved.
    pub hot: Option<HotKey>,
    /// What the detector has counted, and what it holds that against.
    pub detected: Option<Detected>,
    /// What the near cache holds of it now.
    pub cached: Option<CachedValue>,
    /// Writes of it under way in this process.
    pub writes_active: u32,
    /// For how long a write of unknown outcome still keeps it from being cached.
    pub uncacheable_for: Duration,
    /// The shard that owns it, where the store knows.
    pub shard: Option<u32>,
    /// Over which slots it is spread, for a salted counter.
    pub salting: Option<Salting>,
    /// Whether its writes need slots, for a hot counter that may be salted by its traffic.
    pub spread: Option<Spread>,
    /// What was decided of it by its traffic in the last hour, how long ago and why, oldest first.
    pub decided: Vec<(Duration, String)>,
}

/// One line of the table.
fn fact(f: &mut fmt::Formatter<'_>, name: &str, text: fmt::Arguments<'_>) -> fmt::Result {
    write!(f, "\n  {name:<8} {text}")
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.treatment, self.rule) {
            (Some(treatment), rule) => write!(f, "{}: {treatment} ({rule})", self.key)?,
            (None, Rule::None) => write!(f, "{}: left to the store", self.key)?,
            (None, rule) => write!(f, "{}: left to the store ({rule})", self.key)?,
        }
        self.write_traffic(f)?;
        self.write_state(f)?;
        if let Some(salting) = &self.salting {
            fact(f, "slots", format_args!("{salting}"))?;
        }
        if let Some(spread) = &self.spread {
            fact(f, "writers", format_args!("{spread}"))?;
        }
        for (ago, what) in &self.decided {
            fact(f, "decided", format_args!("{} s ago: {what}", ago.as_secs()))?;
        }
        let Some(hot) = &self.hot else { return Ok(()) };
        for advice in [hot.reads_advice, hot.writes_advice].into_iter().flatten() {
            fact(f, "advice", format_args!("{advice}"))?;
        }
        let secs = hot.hot_for.as_secs();
        fact(f, "saved", format_args!("{} store operations in {secs} s", hot.saved))
    }
}

impl Explanation {
    /// What was seen, and which rule fired.
    fn write_traffic(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(HotKey { reason: Some(reason), in_force, treatment, .. }) = &self.hot {
            let idle = if !in_force && treatment.is_some() { "; not in force" } else { "" };
            fact(f, "why", format_args!("{reason}{idle}"))?;
        }
        let Some(seen) = &self.detected else {
            return fact(f, "traffic", format_args!("too little to be counted"));
        };
        let hot_from = seen.threshold_per_sec;
        let Some(rate) = &seen.estimate else {
            return fact(f, "traffic", format_args!("none yet; hot from {hot_from:.0}/s"));
        };
        let (reads, writes) = (rate.demand.reads_per_sec, rate.demand.writes_per_sec);
        let (least, load) = (rate.lower_bound_per_sec, rate.load_per_sec);
        fact(
            f,
            "traffic",
            format_args!(
                "{reads:.0} reads/s and {writes:.0} writes/s (at least {least:.0}/s), of which \
                 {load:.0}/s reached the store; hot from {hot_from:.0}/s"
            ),
        )
    }

    /// What is held of it now, and what keeps it from being held.
    fn write_state(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(shard) = self.shard {
            fact(f, "shard", format_args!("{shard}"))?;
        }
        match &self.cached {
            Some(CachedValue { age, freshness, bytes: Some(bytes) }) => {
                let ms = age.as_millis();
                fact(f, "cached", format_args!("{bytes} bytes, {freshness:?}, {ms} ms old"))?;
            }
            Some(CachedValue { age, .. }) => {
                let ms = age.as_millis();
                fact(f, "cached", format_args!("that there is no value, {ms} ms ago"))?;
            }
            None => fact(f, "cached", format_args!("nothing"))?,
        }
        if self.writes_active > 0 {
            fact(f, "writes", format_args!("{} under way", self.writes_active))?;
        }
        if !self.uncacheable_for.is_zero() {
            let ms = self.uncacheable_for.as_millis();
            let why = "a write of unknown outcome may still land";
            fact(f, "barred", format_args!("not cached for {ms} ms: {why}"))?;
        }
        Ok(())
    }
}
