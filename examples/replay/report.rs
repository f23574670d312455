//! What is said at the end: for people and for programs.

use crate::detection::{Seen, Verdict};
use crate::run::Outcome;
use crate::trace::{Trace, Uses};
use serde_json::json;
use std::fmt;

const BAR: usize = 40;
/// Shards that get a bar each.
const BARS_MAX: usize = 32;

/// One of the most used keys.
struct Top {
    key: String,
    uses: Uses,
    to_store: u64,
    /// At the end of its hottest window: its exact rate, and what its server knew.
    hottest: Option<(f64, Seen)>,
}

pub(crate) struct Report {
    outcome: Outcome,
    distinct_keys: usize,
    reads: u64,
    writes: u64,
    top: Vec<Top>,
    verdict: Option<Verdict>,
    malformed: u64,
    malformed_first: Vec<(u64, String)>,
    out_of_order: u64,
    skipped_s: f64,
}

/// The hottest of the shards over their mean; 0 when there is nothing to compare.
fn hottest_over_mean(shards: &[u64]) -> f64 {
    let total: u64 = shards.iter().sum();
    let hottest = shards.iter().copied().max().unwrap_or(0);
    if total == 0 { 0.0 } else { hottest as f64 * shards.len() as f64 / total as f64 }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

impl Report {
    pub(crate) fn new(trace: &Trace, outcome: Outcome, skipped_s: f64) -> Report {
        let key = |k: usize| String::from_utf8_lossy(trace.keys[k].as_bytes()).into_owned();
        let top = |k: usize, to_store: u64| {
            let hottest = outcome.detection.as_ref().map(|d| d.at_its_hottest(k));
            Top { key: key(k), uses: trace.uses[k], to_store, hottest }
        };
        Report {
            distinct_keys: trace.keys.len(),
            reads: trace.uses.iter().map(|u| u.reads).sum(),
            writes: trace.uses.iter().map(|u| u.writes).sum(),
            top: outcome.top.iter().map(|&(k, n)| top(k, n)).collect(),
            verdict: outcome.detection.as_ref().map(|d| d.verdict()),
            malformed: trace.malformed,
            malformed_first: trace.malformed_first.clone(),
            out_of_order: trace.out_of_order,
            skipped_s,
            outcome,
        }
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.outcome.checker.stale == 0 && self.outcome.checker.errors == 0
    }

    pub(crate) fn json(&self) -> String {
        let o = &self.outcome;
        let top = self.top.iter().map(|top| {
            let mut out = json!({
                "key": top.key,
                "reads": top.uses.reads,
                "writes": top.uses.writes,
                "reads_to_store": top.to_store,
            });
            if let Some((exact, seen)) = &top.hottest {
                out["exact"] = json!(exact);
                out["estimate"] = json!(seen.estimate);
                out["lower_bound"] = json!(seen.lower_bound);
                out["treatment"] = json!(seen.treatment);
            }
            out
        });
        let mut out = json!({
            "requests": self.reads + self.writes,
            "distinct_keys": self.distinct_keys,
            "reads": self.reads,
            "reads_to_store": o.reads_to_store,
            "writes": self.writes,
            "writes_to_store": o.writes_to_store,
            "stale_reads": o.checker.stale,
            "errors": o.checker.errors,
            "hottest_over_mean_before": hottest_over_mean(&o.before),
            "hottest_over_mean_after": hottest_over_mean(&o.after),
            "malformed_rows": self.malformed,
            "rows_out_of_order": self.out_of_order,
            "pinned_keys": o.pinned,
            "virtual_seconds": o.virtual_s,
            "idle_seconds_cut": self.skipped_s,
            "top": top.collect::<Vec<_>>(),
        });
        if let Some(v) = &self.verdict {
            out["threshold_per_sec"] = json!(v.threshold);
            out["window_s"] = json!(v.window_s);
            out["hot_key_windows"] = json!(v.hot_key_windows);
            out["missed"] = json!(v.missed);
            out["false_promotions"] = json!(v.false_promotions);
            out["promotions"] = json!(v.promotions);
            out["state_changes_max_per_key"] = json!(v.state_changes_max);
            out["rate_error_mean"] = json!(v.rate_error_mean);
        }
        out.to_string()
    }

    fn detected(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(v) = &self.verdict else { return Ok(()) };
        writeln!(f, "threshold     {:10.1}  requests/s, windows of {} s", v.threshold, v.window_s)?;
        let share = percent(v.missed, v.hot_key_windows);
        writeln!(
            f,
            "hot key-windows{:9}  {} missed at 1.5 times the threshold, {share:.1} %",
            v.hot_key_windows, v.missed
        )?;
        writeln!(
            f,
            "promotions    {:10}  {} false, at most {} changes of one key",
            v.promotions, v.false_promotions, v.state_changes_max
        )?;
        writeln!(f, "rates         {:10.1}  % off on the mean", 100.0 * v.rate_error_mean)
    }

    fn shards(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = (&self.outcome.before, &self.outcome.after);
        let max = before.iter().chain(after).copied().max().unwrap_or(0).max(1);
        let bar = |n: u64| "#".repeat((n as f64 * BAR as f64 / max as f64).ceil() as usize);
        writeln!(f, "\noperations per shard, before and after")?;
        for (i, (&b, &a)) in before.iter().zip(after).enumerate().take(BARS_MAX) {
            writeln!(f, "  {i:5}  before {b:10} {}", bar(b))?;
            writeln!(f, "         after  {a:10} {}", bar(a))?;
        }
        if before.len() > BARS_MAX {
            writeln!(f, "  and {} more shards", before.len() - BARS_MAX)?;
        }
        let (b, a) = (hottest_over_mean(before), hottest_over_mean(after));
        writeln!(f, "  hottest over mean: {b:.2} before, {a:.2} after")
    }

    fn keys(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{:>10} {:>10} {:>14}  key", "reads", "writes", "reads to store")?;
        for top in &self.top {
            let shown: String = top.key.chars().take(80).flat_map(char::escape_debug).collect();
            let Top { uses, to_store, hottest, .. } = top;
            write!(f, "{:10} {:10} {to_store:14}  {shown}", uses.reads, uses.writes)?;
            if let Some((exact, seen)) = hottest {
                let treatment = seen.treatment.as_deref().unwrap_or("nothing");
                write!(f, "  at its hottest {exact:.0}/s, taken for {:.0}/s: ", seen.estimate)?;
                f.write_str(treatment)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let o = &self.outcome;
        let requests = self.reads + self.writes;
        writeln!(f, "requests      {requests:10}  of {} keys", self.distinct_keys)?;
        writeln!(f, "virtual time  {:10.0}  s, {:.0} idle s cut", o.virtual_s, self.skipped_s)?;
        writeln!(f, "pinned keys   {:10}", o.pinned)?;
        self.detected(f)?;
        let share = percent(o.reads_to_store, self.reads);
        writeln!(
            f,
            "reads         {:10}  {} to the store, {share:.1} %",
            self.reads, o.reads_to_store
        )?;
        writeln!(f, "writes        {:10}  {} to the store", self.writes, o.writes_to_store)?;
        writeln!(f, "stale reads   {:10}", o.checker.stale)?;
        write!(f, "errors        {:10}", o.checker.errors)?;
        match &o.checker.first_error {
            Some(why) => writeln!(f, "  the first: {why}")?,
            None => writeln!(f)?,
        }
        writeln!(f, "malformed rows{:10}  left out", self.malformed)?;
        for (line, why) in &self.malformed_first {
            writeln!(f, "  line {line}: {why}")?;
        }
        if self.out_of_order > 0 {
            writeln!(f, "rows sorted   {:10}  were out of time order", self.out_of_order)?;
        }
        self.shards(f)?;
        self.keys(f)
    }
}
