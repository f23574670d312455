//! What the detector says.
//!
//! - **What**: verdicts, window records, estimates and explanations: plain numbers that can be
//!   printed and compared.
//! - **Invariant**: every verdict names the count that it was made from and what that was held
//!   against.
//! - **Time and units**: [`Tick`]; rates per second, in requests (or in cost).
//! - **Bounds**: a key of at most [`super::sketch::KEY_PREFIX_BYTES`] per verdict.
//! - **Source**: Valkey's window record (samples, measured duration and ratio travel together).

use super::super::time::Tick;
use super::treat::{self, Decision, Rates, Situation};
use super::watch::{Tally, Watch};
use crate::key::short;
use std::fmt;
use std::time::Duration;

/// A finished window.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WindowRecord {
    /// Samples taken.
    pub samples: u64,
    /// Requests that they and the dropped ones stand for.
    pub requests: u64,
    /// Samples that the shell had to drop.
    pub dropped: u64,
    /// How long it was, measured.
    pub duration: Duration,
    /// The largest `N` in it.
    pub one_in: u32,
    /// The detection floor: no slower key can be decided on.
    pub floor_per_sec: f64,
    /// Whether it lasted much longer than planned. Its rates are still right: they are divided by
    /// the measured duration.
    pub stalled: bool,
}

/// What is known of one key's rate in the last finished window.
#[derive(Clone, PartialEq)]
pub struct Estimate {
    /// The key, cut as in the sketch.
    pub key: Box<[u8]>,
    /// The hash that it came with.
    pub hash: u64,
    /// The sampled count, scaled. No less than the samples of this key.
    pub estimate_per_sec: f64,
    /// The sampled count less the sketch's error, scaled. No more than the samples of this key.
    pub lower_bound_per_sec: f64,
    /// By how much sampling may have put both off. Zero where every request is counted.
    pub margin_per_sec: f64,
    /// The part of the lower bound that was reads, and that was writes.
    pub demand: Rates,
    /// The part of the lower bound that reached the store.
    pub load_per_sec: f64,
}

/// What a verdict was made from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Why {
    /// The count, less its margin, reached what a whole window at the threshold brings.
    Proven {
        /// The count.
        lower: f64,
        /// Its margin.
        margin: f64,
        /// What was needed.
        needed: f64,
        /// The threshold in force.
        threshold_per_sec: f64,
    },
    /// The count, with its margin, stayed below the lower line.
    Cooled {
        /// The count with its margin.
        upper: f64,
        /// What it stayed below.
        below: f64,
        /// In how many windows in a row.
        windows: u8,
    },
}

/// The key of a verdict, and the numbers behind it.
#[derive(Clone, PartialEq)]
pub struct Finding {
    /// The key, cut as in the sketch.
    pub key: Box<[u8]>,
    /// The hash that it came with.
    pub hash: u64,
    /// What was asked for, as a rate over the span that proves it. For a key that has just turned
    /// hot this is less than its present rate.
    pub demand: Rates,
    /// What reached the store.
    pub load_per_sec: f64,
    /// The demand less its margin.
    pub lower_bound_per_sec: f64,
    /// One sample stands for this many requests.
    pub one_in: u32,
    /// When.
    pub at: Tick,
    /// Why.
    pub why: Why,
    /// What to do about the key.
    pub decision: Decision,
}

/// What changed.
#[derive(Clone, PartialEq, Debug)]
pub enum Verdict {
    /// A key turned hot.
    Promote(Finding),
    /// A hot key's treatment changed: it gained or lost its near cache.
    Treat(Finding),
    /// A key is no longer hot.
    Demote(Finding),
}

impl Verdict {
    /// The numbers behind it.
    #[must_use]
    pub fn finding(&self) -> &Finding {
        match self {
            Verdict::Promote(f) | Verdict::Treat(f) | Verdict::Demote(f) => f,
        }
    }
}

/// What the detector knows of one key, for `explain`.
#[derive(Clone, PartialEq, Debug)]
pub struct Explanation {
    /// Its rate in the last finished window, if the sketch held it there.
    pub estimate: Option<Estimate>,
    /// Since when it is hot.
    pub hot_since: Option<Tick>,
    /// Since when its reads carry a near cache.
    pub near_since: Option<Tick>,
    /// Cool windows in a row so far.
    pub cool_windows: u8,
    /// The count of the sliding window, if the key is watched.
    pub sliding: Option<f64>,
    /// What the sliding window must reach, with a margin.
    pub needed: f64,
    /// The threshold in force.
    pub threshold_per_sec: f64,
    /// The detection floor.
    pub floor_per_sec: f64,
}

/// The finding on a watched key that brought `tally` in `span_secs`.
#[expect(clippy::too_many_arguments, reason = "every argument is a number that the finding shows")]
pub(crate) fn finding(
    at: Tick,
    watch: &Watch,
    tally: Tally,
    span_secs: f64,
    one_in: u32,
    why: Why,
    z: f64,
    treat: &treat::Options,
) -> Finding {
    let demand = Rates {
        reads_per_sec: f64::from(tally.reads) / span_secs,
        writes_per_sec: f64::from(tally.writes) / span_secs,
    };
    let margin = z * f64::from(tally.squares).sqrt();
    Finding {
        key: watch.key().into(),
        hash: watch.hash(),
        demand,
        load_per_sec: f64::from(tally.loads) / span_secs,
        lower_bound_per_sec: ((tally.total() - margin) / span_secs).max(0.0),
        one_in,
        at,
        why,
        decision: treat::decide(treat, &Situation::alone(demand, watch.near.is_on())),
    }
}

impl fmt::Debug for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Estimate")
            .field("key", &short(&self.key))
            .field("estimate_per_sec", &self.estimate_per_sec)
            .field("lower_bound_per_sec", &self.lower_bound_per_sec)
            .field("margin_per_sec", &self.margin_per_sec)
            .field("demand", &self.demand)
            .field("load_per_sec", &self.load_per_sec)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Finding")
            .field("key", &short(&self.key))
            .field("demand", &self.demand)
            .field("load_per_sec", &self.load_per_sec)
            .field("why", &self.why)
            .field("decision", &self.decision)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Proven { lower, margin, needed, threshold_per_sec } => write!(
                f,
                "{lower:.0} less {margin:.0} against {needed:.0}, a window at \
                 {threshold_per_sec:.0}/s",
            ),
            Why::Cooled { upper, below, windows } => {
                write!(f, "at most {upper:.0} against {below:.0}, {windows} windows in a row")
            }
        }
    }
}
