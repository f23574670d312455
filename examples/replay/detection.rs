//! Was every hot key found, and nothing else? The list of each server against the exact counts.

use crate::run::scatter;
use crate::trace::Trace;
use heatsink::{Detect, HotList, Key};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

/// A threshold means at least this many events in a window.
const EVENTS_PER_WINDOW: f64 = 100.0;
/// Never shorter than the detector's default.
const WINDOW_MIN_S: f64 = 1.0;
/// A key that is asked for this many times the threshold has to be on the list in time.
const MUST_BE_FOUND: f64 = 1.5;
/// A key that stays below this part of it must not be promoted.
const MUST_NOT_BE_FOUND: f64 = 0.7;
/// The driver looks at its samples this often: what has happened by the end of a window it knows
/// one look later.
pub(crate) const LOOK: Duration = Duration::from_millis(10);

/// What a server knew of a key at the end of a window.
#[derive(Clone, Default)]
pub(crate) struct Seen {
    pub(crate) estimate: f64,
    pub(crate) lower_bound: f64,
    pub(crate) treatment: Option<String>,
}

/// The exact side of the comparison, and what the lists said.
pub(crate) struct Detection {
    threshold: f64,
    window: Duration,
    windows: u64,
    /// Requests by server, window and key.
    exact: HashMap<(usize, u64, usize), u64>,
    ids: HashMap<Key, usize>,
    /// The lists at the ends of the windows.
    lists: HashMap<(usize, u64, usize), Seen>,
    /// Who was on a server's list when it changed last.
    on_list: Vec<HashSet<Key>>,
    /// When which key was promoted by which server, in nanoseconds since the start.
    promotions: Vec<(usize, u64, usize)>,
    changes: BTreeMap<(usize, usize), u64>,
}

/// What it comes to.
pub(crate) struct Verdict {
    pub(crate) threshold: f64,
    pub(crate) window_s: f64,
    pub(crate) hot_key_windows: u64,
    pub(crate) missed: u64,
    pub(crate) false_promotions: u64,
    pub(crate) promotions: u64,
    pub(crate) state_changes_max: u64,
    pub(crate) rate_error_mean: f64,
}

impl Detection {
    /// For a trace on its timetable and a threshold in requests a second of one server.
    pub(crate) fn new(trace: &Trace, servers: usize, threshold: f64) -> Detection {
        let window_s = (EVENTS_PER_WINDOW / threshold).max(WINDOW_MIN_S);
        let window = Duration::from_secs_f64(window_s);
        let ns = window.as_nanos() as u64;
        let mut exact = HashMap::new();
        for (i, row) in trace.rows.iter().enumerate() {
            let server = (scatter(i as u64) % servers as u64) as usize;
            *exact.entry((server, row.at_ns() / ns, row.key())).or_default() += 1;
        }
        Detection {
            threshold,
            window,
            windows: trace.rows.last().map_or(0, |row| row.at_ns() / ns + 1),
            exact,
            ids: trace.keys.iter().cloned().zip(0..).collect(),
            lists: HashMap::new(),
            on_list: vec![HashSet::new(); servers],
            promotions: Vec::new(),
            changes: BTreeMap::new(),
        }
    }

    /// How the servers are built: the threshold, and windows long enough for it.
    pub(crate) fn options(&self) -> Detect {
        Detect::new().promote_at(self.threshold).window(self.window, self.window)
    }

    /// How long the windows are, and how many.
    pub(crate) fn windows(&self) -> (Duration, u64) {
        (self.window, self.windows)
    }

    /// A server's list has changed.
    pub(crate) fn changed(&mut self, server: usize, at_ns: u64, list: &HotList) {
        let now: HashSet<Key> = list.entries.iter().map(|e| e.key.clone()).collect();
        for key in now.symmetric_difference(&self.on_list[server]) {
            let Some(&id) = self.ids.get(key) else { continue };
            *self.changes.entry((server, id)).or_default() += 1;
            if now.contains(key) {
                self.promotions.push((server, at_ns, id));
            }
        }
        self.on_list[server] = now;
    }

    /// A server's list at the end of a window.
    pub(crate) fn window_ended(&mut self, server: usize, window: u64, list: &HotList) {
        for entry in &list.entries {
            let Some(&id) = self.ids.get(&entry.key) else { continue };
            let seen = Seen {
                estimate: entry.total_per_sec(),
                lower_bound: entry.lower_bound_per_sec,
                treatment: entry.treatment.map(|t| t.to_string()),
            };
            self.lists.insert((server, window, id), seen);
        }
    }

    fn rate(&self, count: u64) -> f64 {
        count as f64 / self.window.as_secs_f64()
    }

    fn exact_rate(&self, server: usize, window: u64, key: usize) -> f64 {
        self.rate(self.exact.get(&(server, window, key)).copied().unwrap_or(0))
    }

    /// A key at the end of its hottest window: its exact rate, and what its server knew.
    pub(crate) fn at_its_hottest(&self, key: usize) -> (f64, Seen) {
        let all = self.exact.iter().filter(|((_, _, k), _)| *k == key);
        let Some((at, count)) = all.max_by_key(|((s, w, _), count)| (**count, *s, *w)) else {
            return (0.0, Seen::default());
        };
        (self.rate(*count), self.lists.get(at).cloned().unwrap_or_default())
    }

    pub(crate) fn verdict(&self) -> Verdict {
        let (mut hot, mut missed, mut errors) = (0, 0, Vec::new());
        for (at, count) in &self.exact {
            let rate = self.rate(*count);
            let seen = self.lists.get(at);
            hot += u64::from(rate >= self.threshold);
            missed += u64::from(rate >= MUST_BE_FOUND * self.threshold && seen.is_none());
            if let Some(seen) = seen.filter(|_| rate >= self.threshold) {
                errors.push((seen.estimate - rate).abs() / rate);
            }
        }
        let ns = self.window.as_nanos() as u64;
        let cold = MUST_NOT_BE_FOUND * self.threshold;
        let is_false = |&&(server, at_ns, key): &&(usize, u64, usize)| {
            let window = at_ns / ns;
            let before = window.checked_sub(1).map_or(0.0, |w| self.exact_rate(server, w, key));
            before < cold && self.exact_rate(server, window, key) < cold
        };
        Verdict {
            threshold: self.threshold,
            window_s: self.window.as_secs_f64(),
            hot_key_windows: hot,
            missed,
            false_promotions: self.promotions.iter().filter(is_false).count() as u64,
            promotions: self.promotions.len() as u64,
            state_changes_max: self.changes.values().copied().max().unwrap_or(0),
            rate_error_mean: (errors.iter().sum::<f64>() + 0.0) / errors.len().max(1) as f64,
        }
    }
}
