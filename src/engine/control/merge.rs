//! Reports of several processes as one ranked list.
//!
//! - **What**: a report describes itself (capacity, floor, `N`, measured duration), and a merge
//!   adds reports up. A key that a reporter does not name may still have had as much as that
//!   reporter's floor.
//! - **Invariant**: `estimate - error <= observed <= estimate` for every key, named or not; the
//!   order of the reports does not matter.
//! - **Time and units**: counts are requests (or cost) within the merge's window; reports of
//!   another duration are scaled to it, outwards.
//! - **Bounds**: [`Limits`], [`COUNT_MAX`], [`DURATION_MIN`]; a report beyond them is refused whole,
//!   before anything is kept. Within them no sum saturates, so that a report can be taken out again.
//! - **Source**: Agarwal and others 2012 (summaries that merge); the floor on the wire is what
//!   ClickHouse's summaries lacked when a partly filled one was merged as if it were full.

use super::sampling::ONE_IN_MAX;
use super::sketch::{KEY_PREFIX_BYTES, Sketch};
use crate::key::short;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// No counter of a report is larger: a million millions in a window are not a service's traffic.
pub const COUNT_MAX: u64 = 1 << 40;

/// No window is shorter, so that scaling cannot blow a count up without limit.
pub const DURATION_MIN: Duration = Duration::from_millis(1);

/// One process's window.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Counters of the sketch: how many keys the report could have named.
    pub capacity: u32,
    /// No key outside `entries` had more than this.
    pub floor: u64,
    /// One sample stood for this many requests (the largest within the window).
    pub one_in: u32,
    /// How long the window was, measured.
    pub duration: Duration,
    /// Everything that was observed.
    pub total: u64,
    /// The named keys, each once.
    pub entries: Vec<ReportEntry>,
}

/// One key of a report.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReportEntry {
    /// Which key.
    pub key: ReportKey,
    /// No less than what was observed.
    pub count: u64,
    /// By how much `count` may exceed it.
    pub error: u64,
    /// The part of `count - error` that was writes.
    pub writes: u64,
    /// The part of `count - error` that reached the store.
    pub loads: u64,
}

/// A key in a report: its bytes, and where those are only a prefix, also the hash of the whole.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReportKey {
    /// The key, cut to [`KEY_PREFIX_BYTES`].
    pub bytes: Box<[u8]>,
    /// Zero for a whole key. Else reporters must hash alike for their counts to meet.
    pub hash: u64,
}

impl fmt::Debug for ReportKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReportKey(\"{}\")", short(&self.bytes))
    }
}

impl ReportKey {
    /// The key that a sketch knows by `bytes` and `hash`.
    #[must_use]
    pub fn new(bytes: &[u8], hash: u64) -> ReportKey {
        let cut = bytes.len() >= KEY_PREFIX_BYTES;
        ReportKey { bytes: bytes.into(), hash: if cut { hash } else { 0 } }
    }
}

impl Report {
    /// Of a process that was asked for nothing.
    #[must_use]
    pub fn nothing() -> Report {
        let duration = Duration::from_secs(1);
        Report { capacity: 1, floor: 0, one_in: 1, duration, total: 0, entries: Vec::new() }
    }

    /// Whether it says of every key that it was not asked for.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.total == 0 && self.floor == 0 && self.entries.is_empty()
    }

    /// The `entries_max` largest counters of a sketch. What is left out raises the floor.
    #[must_use]
    pub fn of(sketch: &Sketch, one_in: u32, duration: Duration, entries_max: usize) -> Report {
        let top = sketch.top(usize::MAX);
        let named = top.len().min(entries_max);
        let left_out = top.get(named).map_or(0, |entry| entry.count());
        let entries = top[..named].iter().map(|entry| ReportEntry {
            key: ReportKey::new(entry.key(), entry.hash()),
            count: entry.count(),
            error: entry.error(),
            writes: entry.writes(),
            loads: entry.loads(),
        });
        Report {
            capacity: sketch.capacity() as u32,
            floor: sketch.floor().max(left_out),
            one_in,
            duration,
            total: sketch.total(),
            entries: entries.collect(),
        }
    }
}

/// What a merge accepts.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Reports.
    pub reports_max: u32,
    /// Keys in one report.
    pub entries_max: u32,
    /// Different keys in all.
    pub keys_max: u32,
    /// One report weighs no more than this for one key, whatever it claims: see
    /// [`Merged::weighed`].
    pub weighed_max: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { reports_max: 4_096, entries_max: 4_096, keys_max: 65_536, weighed_max: u64::MAX }
    }
}

/// Why a report was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The merge has as many reports or different keys as it may hold.
    Full,
    /// The report names more keys than it has counters for, or than are accepted.
    TooManyEntries,
    /// A key is longer than [`KEY_PREFIX_BYTES`].
    KeyTooLong,
    /// A key is named twice.
    Repeated,
    /// Numbers that no sketch gives: an error above its count, parts above their whole, a window
    /// shorter than [`DURATION_MIN`], a count above [`COUNT_MAX`].
    Inconsistent,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refused::Full => "the merge is full",
            Refused::TooManyEntries => "too many entries in the report",
            Refused::KeyTooLong => "a key in the report is too long",
            Refused::Repeated => "a key in the report is named twice",
            Refused::Inconsistent => "the numbers of the report contradict each other",
        })
    }
}

/// One key of a merge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Merged {
    /// Which key.
    pub key: ReportKey,
    /// No less than what all reporters observed.
    pub estimate: u64,
    /// By how much `estimate` may exceed it.
    pub error: u64,
    /// The part of the lower bound that was writes.
    pub writes: u64,
    /// The part of the lower bound that reached the store.
    pub loads: u64,
    /// The lower bound with each report cut to [`Limits::weighed_max`]: what is proven where no
    /// single reporter is to be believed alone.
    pub weighed: u64,
    /// The sum of the squared weights behind the lower bound, for its margin.
    pub squares: u64,
    /// No less than what those reporters observed that named it.
    pub named: u64,
    /// How many reporters named it.
    pub reporters: u32,
}

impl Merged {
    /// No more than what all reporters observed.
    #[must_use]
    pub fn lower_bound(&self) -> u64 {
        self.estimate - self.error
    }
}

#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct Sum {
    count: u64,
    lower: u64,
    writes: u64,
    loads: u64,
    weighed: u64,
    squares: u128,
    /// The floors of those reporters that named the key.
    floors: u64,
    reporters: u32,
}

/// Adds reports up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Merge {
    window: Duration,
    keys_max: u32,
    reports_max: u32,
    entries_max: u32,
    weighed_max: u64,
    sums: BTreeMap<ReportKey, Sum>,
    floors: u64,
    total: u64,
    reports: u32,
    one_in_max: u32,
}

impl Merge {
    /// A merge whose counts are per `window`.
    #[must_use]
    pub fn new(window: Duration, limits: Limits) -> Merge {
        Merge {
            window: window.max(Duration::from_nanos(1)),
            keys_max: limits.keys_max,
            reports_max: limits.reports_max,
            entries_max: limits.entries_max,
            weighed_max: limits.weighed_max,
            sums: BTreeMap::new(),
            floors: 0,
            total: 0,
            reports: 0,
            one_in_max: 1,
        }
    }

    /// Adds one report.
    ///
    /// # Errors
    /// A report beyond the limits, or one that no sketch gives, is refused and changes nothing.
    pub fn add(&mut self, report: &Report) -> Result<(), Refused> {
        self.check(report)?;
        let floor = self.scale_up(report.floor, report);
        for entry in &report.entries {
            let part = self.part(entry, floor, report);
            let sum = self.sums.entry(entry.key.clone()).or_default();
            sum.count = sum.count.saturating_add(part.count);
            sum.lower = sum.lower.saturating_add(part.lower);
            sum.writes = sum.writes.saturating_add(part.writes);
            sum.loads = sum.loads.saturating_add(part.loads);
            sum.weighed = sum.weighed.saturating_add(part.weighed);
            sum.squares = sum.squares.saturating_add(part.squares);
            sum.floors = sum.floors.saturating_add(floor);
            sum.reporters += 1;
        }
        self.floors = self.floors.saturating_add(floor);
        self.total = self.total.saturating_add(self.scale_down(report.total, report));
        self.reports += 1;
        self.one_in_max = self.one_in_max.max(report.one_in);
        Ok(())
    }

    /// Takes out a report that was added before: what is left is as if it had never come, but for
    /// [`Merge::one_in_max`], which remembers it.
    pub fn remove(&mut self, report: &Report) {
        let floor = self.scale_up(report.floor, report);
        for entry in &report.entries {
            let part = self.part(entry, floor, report);
            let Some(sum) = self.sums.get_mut(&entry.key) else { continue };
            sum.count = sum.count.saturating_sub(part.count);
            sum.lower = sum.lower.saturating_sub(part.lower);
            sum.writes = sum.writes.saturating_sub(part.writes);
            sum.loads = sum.loads.saturating_sub(part.loads);
            sum.weighed = sum.weighed.saturating_sub(part.weighed);
            sum.squares = sum.squares.saturating_sub(part.squares);
            sum.floors = sum.floors.saturating_sub(floor);
            sum.reporters = sum.reporters.saturating_sub(1);
            if sum.reporters == 0 {
                self.sums.remove(&entry.key);
            }
        }
        self.floors = self.floors.saturating_sub(floor);
        self.total = self.total.saturating_sub(self.scale_down(report.total, report));
        self.reports = self.reports.saturating_sub(1);
    }

    /// The merge as one report, for a merge of merges: that of a host, then that of a region. Keys
    /// at or below `at_least` are left out, and raise the floor.
    #[must_use]
    pub fn report(&self, entries_max: usize, at_least: u64) -> Report {
        let mut all = self.ranked();
        let named = all.iter().take_while(|m| m.lower_bound() > at_least).count().min(entries_max);
        let left_out = all[named..].iter().map(|m| m.estimate).max().unwrap_or(0);
        all.truncate(named);
        let entry = |m: Merged| ReportEntry {
            count: m.estimate.min(COUNT_MAX),
            error: m.error.min(m.estimate.min(COUNT_MAX)),
            writes: m.writes.min(COUNT_MAX),
            loads: m.loads.min(COUNT_MAX),
            key: m.key,
        };
        Report {
            capacity: self.keys_max,
            floor: self.floors.max(left_out).min(COUNT_MAX),
            one_in: self.one_in_max,
            duration: self.window,
            total: self.total.min(COUNT_MAX),
            entries: all.into_iter().map(entry).collect(),
        }
    }

    fn part(&self, entry: &ReportEntry, floors: u64, report: &Report) -> Sum {
        let lower = self.scale_down(entry.count - entry.error, report);
        Sum {
            count: self.scale_up(entry.count, report),
            lower,
            writes: self.scale_down(entry.writes, report),
            loads: self.scale_down(entry.loads, report),
            weighed: lower.min(self.weighed_max),
            // One sample of a shorter window stands for more in the merge's.
            squares: u128::from(lower) * u128::from(report.one_in) * self.window.as_nanos()
                / report.duration.as_nanos(),
            floors,
            reporters: 1,
        }
    }

    /// All keys, the largest lower bound first; equal ones in the order of their keys.
    #[must_use]
    pub fn ranked(&self) -> Vec<Merged> {
        let mut all: Vec<Merged> =
            self.sums.iter().map(|(key, sum)| self.merged(key, sum)).collect();
        all.sort_by(|a, b| b.lower_bound().cmp(&a.lower_bound()).then_with(|| a.key.cmp(&b.key)));
        all
    }

    /// One key.
    #[must_use]
    pub fn get(&self, key: &ReportKey) -> Option<Merged> {
        self.sums.get(key).map(|sum| self.merged(key, sum))
    }

    /// No key that no report names was observed more often than this.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.floors
    }

    /// Everything that was observed.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// How many reports were added.
    #[must_use]
    pub fn reports(&self) -> u32 {
        self.reports
    }

    /// The largest `N` among the reports.
    #[must_use]
    pub fn one_in_max(&self) -> u32 {
        self.one_in_max
    }

    fn merged(&self, key: &ReportKey, sum: &Sum) -> Merged {
        let absent = self.floors.saturating_sub(sum.floors);
        let estimate = sum.count.saturating_add(absent);
        Merged {
            key: key.clone(),
            estimate,
            error: estimate.saturating_sub(sum.lower),
            writes: sum.writes,
            loads: sum.loads,
            weighed: sum.weighed,
            squares: u64::try_from(sum.squares).unwrap_or(u64::MAX),
            named: sum.count,
            reporters: sum.reporters,
        }
    }

    fn check(&self, report: &Report) -> Result<(), Refused> {
        let entries = u32::try_from(report.entries.len()).unwrap_or(u32::MAX);
        if entries > report.capacity.min(self.entries_max) {
            return Err(Refused::TooManyEntries);
        }
        let whole = report.floor.max(report.total);
        if report.duration < DURATION_MIN
            || !(1..=ONE_IN_MAX).contains(&report.one_in)
            || whole > COUNT_MAX
        {
            return Err(Refused::Inconsistent);
        }
        let mut keys: Vec<&ReportKey> = Vec::with_capacity(report.entries.len());
        for entry in &report.entries {
            if entry.key.bytes.len() > KEY_PREFIX_BYTES {
                return Err(Refused::KeyTooLong);
            }
            let lower = entry.count.checked_sub(entry.error).ok_or(Refused::Inconsistent)?;
            if entry.count > COUNT_MAX || entry.writes > lower || entry.loads > lower {
                return Err(Refused::Inconsistent);
            }
            keys.push(&entry.key);
        }
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Refused::Repeated);
        }
        let new = keys.iter().filter(|key| !self.sums.contains_key(**key)).count();
        if self.reports >= self.reports_max || self.sums.len() + new > self.keys_max as usize {
            return Err(Refused::Full);
        }
        Ok(())
    }

    /// Upper bounds are rounded up, lower ones down. What is bounded for a report of another
    /// duration is its mean over that duration.
    fn scale_up(&self, count: u64, report: &Report) -> u64 {
        scaled(count, self.window, report.duration, true)
    }

    fn scale_down(&self, count: u64, report: &Report) -> u64 {
        scaled(count, self.window, report.duration, false)
    }
}

fn scaled(count: u64, window: Duration, duration: Duration, up: bool) -> u64 {
    if window == duration {
        return count;
    }
    let (to, from) = (window.as_nanos(), duration.as_nanos());
    let product = u128::from(count).saturating_mul(to);
    let scaled = if up { product.div_ceil(from) } else { product / from };
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::sketch::Observation;
    use super::*;
    use proptest::prelude::*;

    const WINDOW: Duration = Duration::from_secs(1);

    fn sketch_of(capacity: usize, seed: u64, trace: &[(u8, u8)]) -> Sketch {
        let mut sketch = Sketch::new(capacity, seed);
        for (key, weight) in trace {
            sketch.observe(&Observation {
                hash: u64::from(*key).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                key: &[*key],
                weight: u64::from(*weight),
                write: weight % 2 == 0,
                loaded: weight % 3 == 0,
            });
        }
        sketch
    }

    /// Counters, named keys, seed, and what was observed.
    type Reporter = (usize, usize, u64, Vec<(u8, u8)>);

    fn traces() -> impl Strategy<Value = Vec<Reporter>> {
        let trace = prop::collection::vec((0u8..30, 1u8..6), 0..120);
        prop::collection::vec((1usize..10, 1usize..12, any::<u64>(), trace), 1..6)
    }

    fn report(entries: Vec<ReportEntry>) -> Report {
        Report { capacity: 4, floor: 0, one_in: 1, duration: WINDOW, total: 9, entries }
    }

    fn entry(key: &[u8], count: u64, error: u64) -> ReportEntry {
        ReportEntry { key: ReportKey::new(key, 0), count, error, writes: 0, loads: 0 }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn merged_bounds_hold_and_the_order_does_not_matter(all in traces()) {
            let reports: Vec<Report> = all
                .iter()
                .map(|(k, named, seed, trace)| {
                    Report::of(&sketch_of(*k, *seed, trace), 1, WINDOW, *named)
                })
                .collect();
            let mut forward = Merge::new(WINDOW, Limits::default());
            let mut backward = Merge::new(WINDOW, Limits::default());
            for report in &reports {
                forward.add(report).unwrap();
            }
            for report in reports.iter().rev() {
                backward.add(report).unwrap();
            }
            prop_assert_eq!(&forward, &backward);
            // The last report taken out again leaves what was there before it.
            let (last, others) = reports.split_last().unwrap();
            let mut fewer = Merge::new(WINDOW, Limits::default());
            others.iter().for_each(|report| fewer.add(report).unwrap());
            backward.remove(last);
            prop_assert_eq!(&fewer, &backward);
            // Merging the merge is merging the reports.
            let mut again = Merge::new(WINDOW, Limits::default());
            again.add(&forward.report(usize::MAX, 0)).unwrap();
            for m in forward.ranked().iter().filter(|m| m.lower_bound() > 0) {
                let twice = again.get(&m.key).unwrap();
                prop_assert_eq!((twice.estimate, twice.error), (m.estimate, m.error));
            }
            for key in 0u8..30 {
                let truth: u64 = all
                    .iter()
                    .flat_map(|(_, _, _, trace)| trace)
                    .filter(|(k, _)| *k == key)
                    .map(|(_, weight)| u64::from(*weight))
                    .sum();
                match forward.get(&ReportKey::new(&[key], 0)) {
                    Some(m) => {
                        prop_assert!(m.lower_bound() <= truth && truth <= m.estimate);
                        prop_assert!(m.writes <= truth && m.loads <= truth);
                    }
                    None => prop_assert!(truth <= forward.floor()),
                }
            }
        }
    }

    #[test]
    fn an_absent_key_costs_its_reporter_s_floor() {
        let mut merge = Merge::new(WINDOW, Limits::default());
        merge.add(&report(vec![entry(b"a", 10, 2)])).unwrap();
        merge.add(&Report { floor: 3, ..report(vec![]) }).unwrap();
        let a = merge.get(&ReportKey::new(b"a", 0)).unwrap();
        assert_eq!((a.estimate, a.error, a.lower_bound(), a.reporters), (13, 5, 8, 1));
        assert_eq!(merge.floor(), 3);
    }

    #[test]
    fn reports_of_another_duration_are_scaled_outwards() {
        let mut merge = Merge::new(WINDOW, Limits::default());
        let long = Report {
            floor: 1,
            duration: Duration::from_secs(3),
            ..report(vec![entry(b"a", 10, 2)])
        };
        merge.add(&long).unwrap();
        let a = merge.get(&ReportKey::new(b"a", 0)).unwrap();
        assert_eq!((a.estimate, a.lower_bound(), merge.floor()), (4, 2, 1));
    }

    #[test]
    fn a_report_that_no_sketch_gives_changes_nothing() {
        let mut merge = Merge::new(WINDOW, Limits { keys_max: 2, ..Limits::default() });
        let before = merge.clone();
        let many = vec![entry(b"a", 1, 0); 5];
        let long = vec![entry(&[0; KEY_PREFIX_BYTES + 1], 1, 0)];
        let distinct = vec![entry(b"a", 1, 0), entry(b"b", 1, 0), entry(b"c", 1, 0)];
        let zero = Report { duration: Duration::ZERO, ..report(vec![]) };
        for (bad, why) in [
            (report(many), Refused::TooManyEntries),
            (report(long), Refused::KeyTooLong),
            (report(vec![entry(b"a", 1, 0); 2]), Refused::Repeated),
            (report(vec![entry(b"a", 1, 2)]), Refused::Inconsistent),
            (zero, Refused::Inconsistent),
            (report(distinct), Refused::Full),
        ] {
            assert_eq!(merge.add(&bad), Err(why));
            assert_eq!(merge, before);
        }
    }

    #[test]
    fn cut_keys_meet_by_prefix_and_hash() {
        let cut = [b'x'; KEY_PREFIX_BYTES];
        assert_ne!(ReportKey::new(&cut, 1), ReportKey::new(&cut, 2));
        assert_eq!(ReportKey::new(b"short", 1), ReportKey::new(b"short", 2));
    }
}
