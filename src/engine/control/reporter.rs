//! What one process tells the others of its own traffic.
//!
//! - **What**: a sketch of its own beside the detector's, larger and with windows of the feed's
//!   length, so that a key is reported long before it is hot for this process alone.
//! - **Invariant**: a report's numbers bound what was sampled: nothing that it leaves out had more
//!   than its floor.
//! - **Time and units**: [`Tick`]; counts are requests (or cost) within the measured window.
//! - **Bounds**: [`COUNTERS`] counters (about 400 KiB), made when reporting starts; at most
//!   [`ENTRIES_MAX`] keys in a report. Keys of [`KEY_PREFIX_BYTES`] bytes and more are left out:
//!   processes do not hash alike, and a prefix is not a key.
//! - **Source**: the share of the threshold that is worth telling is an even share, halved: with
//!   top-ten lists three quarters of the fleet's hot keys are missed (measured over 20 clients).

use super::super::time::Tick;
use super::detect::{Sample, WEIGHT_MAX};
use super::merge::{COUNT_MAX, DURATION_MIN, Report, ReportEntry, ReportKey};
use super::sampling::ONE_IN_MAX;
use super::sketch::{KEY_PREFIX_BYTES, Observation, Sketch};

/// Counters of the sketch. Eight times the detector's: it looks for smaller rates.
pub const COUNTERS: usize = 2_048;

/// Keys in one report.
pub const ENTRIES_MAX: usize = 256;

/// Counts for reports. See the module's description.
#[derive(Clone, Debug)]
pub struct Reporter {
    sketch: Sketch,
    start: Tick,
    one_in: u32,
    too_long: u64,
}

impl Reporter {
    /// Starts to count. `seed` as in [`Sketch::new`].
    #[must_use]
    pub fn new(now: Tick, seed: u64) -> Reporter {
        Reporter { sketch: Sketch::new(COUNTERS, seed), start: now, one_in: 1, too_long: 0 }
    }

    /// Counts one sample.
    pub fn handle_sample(&mut self, sample: &Sample<'_>) {
        let one_in = sample.one_in.clamp(1, ONE_IN_MAX);
        self.one_in = self.one_in.max(one_in);
        self.sketch.observe(&Observation {
            hash: sample.hash,
            key: sample.key,
            weight: u64::from(sample.weight.clamp(1, WEIGHT_MAX)) * u64::from(one_in),
            write: sample.write,
            loaded: sample.loaded,
        });
    }

    /// Keys that were left out of reports for their length alone, each as often as it was.
    #[must_use]
    pub fn too_long(&self) -> u64 {
        self.too_long
    }

    /// The window so far as a report, and a new window. Keys at or below `floor_per_sec` are not
    /// named. `None` for a window too short to say anything.
    pub fn take(&mut self, now: Tick, floor_per_sec: f64, entries_max: usize) -> Option<Report> {
        let duration = now.since(self.start);
        if duration < DURATION_MIN {
            return None;
        }
        let at_least = floor_per_sec.max(0.0) * duration.as_secs_f64();
        let (mut entries, mut floor) = (Vec::new(), self.sketch.floor());
        for entry in self.sketch.top(usize::MAX) {
            let whole = entry.key().len() < KEY_PREFIX_BYTES;
            if whole && entries.len() < entries_max && entry.count() as f64 > at_least {
                let count = entry.count().min(COUNT_MAX);
                let error = entry.error().min(count);
                entries.push(ReportEntry {
                    key: ReportKey::new(entry.key(), entry.hash()),
                    count,
                    error,
                    writes: entry.writes().min(count - error),
                    loads: entry.loads().min(count - error),
                });
            } else {
                self.too_long += u64::from(!whole && entry.count() as f64 > at_least);
                floor = floor.max(entry.count());
            }
        }
        let report = Report {
            capacity: COUNTERS as u32,
            floor: floor.min(COUNT_MAX),
            one_in: self.one_in,
            duration,
            total: self.sketch.total().min(COUNT_MAX),
            entries,
        };
        self.sketch.clear();
        (self.start, self.one_in) = (now, 1);
        Some(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn sample(key: &[u8]) -> Sample<'_> {
        let hash = key.iter().fold(7, |h: u64, b| h.wrapping_mul(31).wrapping_add(u64::from(*b)));
        Sample { hash, key, write: false, weight: 1, loaded: true, one_in: 1 }
    }

    #[test]
    fn what_is_left_out_of_a_report_raises_its_floor() {
        let mut reporter = Reporter::new(Tick(0), 1);
        for (key, n) in [("a", 9), ("b", 5), ("c", 2)] {
            (0..n).for_each(|_| reporter.handle_sample(&sample(key.as_bytes())));
        }
        let long = [b'x'; 300];
        (0..7).for_each(|_| reporter.handle_sample(&sample(&long)));
        assert_eq!(reporter.take(Tick(0), 0.0, 9), None, "no time has passed");
        let now = Tick(0).after(Duration::from_secs(2));
        let report = reporter.take(now, 1.5, 9).unwrap();
        let named: Vec<_> =
            report.entries.iter().map(|e| (e.count, e.key.bytes.to_vec())).collect();
        assert_eq!(named, [(9, b"a".to_vec()), (5, b"b".to_vec())]);
        assert_eq!((report.floor, report.total), (7, 23), "the long key is not named either");
        assert_eq!(reporter.too_long(), 1, "and counted");
        let empty = reporter.take(now.after(Duration::from_secs(1)), 0.0, 9).unwrap();
        assert_eq!((empty.entries.len(), empty.floor, empty.total), (0, 0, 0));
    }
}
