//! Reports in, one list out: what a host's serving process and the fleet's aggregator decide.
//!
//! - **What**: the latest report of each reporter, merged as it arrives; the keys that the sum
//!   proves hot, with hysteresis; and what an operator has said to the whole group.
//! - **Invariant**: a report counts once, whatever is repeated or comes late; the sum holds no
//!   report of a reporter that has fallen silent; no verdict rests on one reporter alone where
//!   there are three or more.
//! - **Time and units**: [`Tick`]; rates per second; counts within [`Options::window`].
//! - **Bounds**: [`Options::limits`] (reports, keys, keys in one report), [`Options::entries_max`]
//!   hot keys, as many pins and denials, [`Options::named_max`], [`HISTORY_MAX`] decisions.
//! - **Source**: verdicts as in [`super::hysteresis`]. A key that one process alone asks for is
//!   that process's business: it finds it by itself. So no report weighs more than half of the
//!   threshold, and a false one cannot make a key hot.
//!
//! A demotion goes by what reporters named, not by the floors of those that did not: the floors
//! that they are told ([`Aggregator::floor_per_sec`]) add up to half of the threshold.

use super::super::time::Tick;
use super::fleet::{FleetKey, FleetList};
use super::history::{Decided, History};
use super::hotlist::Rule;
use super::hysteresis::{Band, Switch};
use super::merge::{Limits, Merge, Merged, Refused, Report, ReportKey};
use super::orders::{Orders, Treat};
use super::treat::{self, Class, Rates, Situation, Treatment};
use crate::key::Key;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Decisions that are remembered.
pub const HISTORY_MAX: usize = 4_096;

/// How a group decides.
#[derive(Clone, Debug)]
pub struct Options {
    /// A key that all processes together ask for at this rate is hot. Default: 1,000.
    pub promote_per_sec: f64,
    /// The lower line, as a part of the upper one. Default: 800.
    pub demote_permille: u32,
    /// Cool windows in a row before a hot key is demoted. Default: 5.
    pub demote_windows: u8,
    /// Standard deviations between a count and what it proves. Default: 1.75.
    pub z: f64,
    /// The window that reports are brought to. Default: 1 s.
    pub window: Duration,
    /// A reporter that is silent for longer is forgotten. Default: 5 s.
    pub reporter_ttl: Duration,
    /// The same for one that was asked for nothing when it last reported. Default: 30 s.
    pub quiet_ttl: Duration,
    /// Hot keys, pins, and denials, each. Default: 4,096.
    pub entries_max: usize,
    /// Named keys of all reports together, each as often as it is named. Default: 524,288, about
    /// 60 MiB.
    pub named_max: usize,
    /// What a merge accepts. Default: 4,096 reports of at most 1,024 keys, 65,536 keys in all.
    pub limits: Limits,
    /// The lines between treatments.
    pub treat: treat::Options,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            promote_per_sec: 1_000.0,
            demote_permille: 800,
            demote_windows: 5,
            z: 1.75,
            window: Duration::from_secs(1),
            reporter_ttl: Duration::from_secs(5),
            quiet_ttl: Duration::from_secs(30),
            entries_max: 4_096,
            named_max: 524_288,
            limits: Limits { entries_max: 1_024, ..Limits::default() },
            treat: treat::Options::default(),
        }
    }
}

/// Which report.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct From {
    /// The reporter.
    pub process: u64,
    /// Its life.
    pub incarnation: u64,
    /// Its window within that life.
    pub window: u64,
}

/// Why a report does not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotCounted {
    /// It has been counted already.
    Duplicate,
    /// A newer one of the same reporter has been counted.
    Late,
    /// The merge refused it.
    Refused(Refused),
}

impl fmt::Display for NotCounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotCounted::Duplicate => f.write_str("counted already"),
            NotCounted::Late => f.write_str("older than one that was counted"),
            NotCounted::Refused(refused) => write!(f, "{refused}"),
        }
    }
}

/// What has been counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Reports that were merged.
    pub merged: u64,
    /// Reports that had been counted before.
    pub duplicate: u64,
    /// Reports that came after a newer one.
    pub late: u64,
    /// Reports that the merge refused.
    pub refused: u64,
    /// Reporters that fell silent.
    pub aged_out: u64,
    /// Keys that turned hot.
    pub promotions: u64,
    /// Keys that stopped being hot.
    pub demotions: u64,
    /// Hot keys that found no room on the list.
    pub full: u64,
}

#[derive(Clone, Debug)]
struct Reporter {
    incarnation: u64,
    window: u64,
    at: Tick,
    report: Report,
}

#[derive(Clone, Debug)]
struct Hot {
    since: Tick,
    switch: Switch,
    read_hot: bool,
    last: Option<Merged>,
}

/// See the module's description.
#[derive(Clone, Debug)]
pub struct Aggregator {
    options: Options,
    merge: Merge,
    reporters: BTreeMap<u64, Reporter>,
    named: usize,
    hot: BTreeMap<Key, Hot>,
    orders: Orders,
    due: Option<Tick>,
    version: u64,
    counts: Counts,
    history: History,
    /// When this term has gone on from another's list.
    inherited: Option<Tick>,
}

impl Aggregator {
    /// Knows of nothing.
    #[must_use]
    pub fn new(options: Options) -> Aggregator {
        let half = 0.5 * options.promote_per_sec * options.window.as_secs_f64();
        let limits = Limits { weighed_max: half.max(1.0) as u64, ..options.limits };
        Aggregator {
            merge: Merge::new(options.window, limits),
            orders: Orders::new(options.entries_max),
            options,
            reporters: BTreeMap::new(),
            named: 0,
            hot: BTreeMap::new(),
            due: None,
            version: 0,
            counts: Counts::default(),
            history: History::new(HISTORY_MAX),
            inherited: None,
        }
    }

    /// Goes on where another issuer stopped: what its last list held is hot until this one knows
    /// better. What operators of the group above have ordered is that group's to say; what its own
    /// have ordered ends as they said. `wall_ms` is `now` by the wall clock.
    pub fn inherit(&mut self, now: Tick, wall_ms: u64, list: &FleetList) {
        let end = |ms: u64| now.after(Duration::from_millis(ms.saturating_sub(wall_ms)));
        self.inherited = Some(now);
        for entry in &list.entries {
            let since = now.before(entry.hot_for);
            if entry.rule == Rule::Pinned && !entry.above {
                let treatment = entry.treatment.unwrap_or(Treatment::Near);
                let until = entry.until_ms.map(end);
                let order = Treat { treatment, ttl: entry.ttl, since, until };
                self.orders.treat(entry.key.clone(), order);
            } else if self.hot.len() < self.options.entries_max {
                let read_hot = entry.treatment == Some(Treatment::Near);
                self.hot.insert(entry.key.clone(), Hot::new(since, read_hot));
            }
        }
        for key in list.denied.iter().filter(|key| !list.denied_above.contains(key)) {
            self.orders.deny(key.clone(), None);
        }
        for (key, until_ms) in &list.denied_until_ms {
            if self.orders.denies(key) {
                self.orders.deny(key.clone(), Some(end(*until_ms)));
            }
        }
        self.version += 1;
    }

    /// Notes on `list`, which is sent at `now`, when the orders of this group's own operators end.
    pub fn say_ends(&self, now: Tick, list: &mut FleetList) {
        let sent_ms = list.sent_ms;
        let end = |until: Tick| {
            let left = u64::try_from(until.since(now).as_millis()).unwrap_or(u64::MAX);
            sent_ms.saturating_add(left)
        };
        for entry in list.entries.iter_mut().filter(|e| e.rule == Rule::Pinned && !e.above) {
            let order = self.orders.get(&entry.key);
            entry.until_ms = order.and_then(|order| order.until).map(end);
        }
        let ends = list.denied.iter().filter_map(|key| {
            let until = self.orders.denied_until(key)?;
            Some((key.clone(), end(until)))
        });
        list.denied_until_ms = ends.collect();
    }

    /// Counts a report in place of the reporter's last one, and promotes what it proves.
    ///
    /// # Errors
    /// A report that does not count changes nothing but the counts. (One that comes again still
    /// shows that its reporter lives.)
    pub fn handle_report(
        &mut self,
        now: Tick,
        from: From,
        report: Report,
    ) -> Result<(), NotCounted> {
        self.due.get_or_insert_with(|| now.after(self.options.window));
        if let Some(known) = self.reporters.get(&from.process) {
            let new = (from.incarnation, from.window);
            if new == (known.incarnation, known.window) {
                self.counts.duplicate += 1;
                return Err(NotCounted::Duplicate);
            }
            if new < (known.incarnation, known.window) {
                self.counts.late += 1;
                return Err(NotCounted::Late);
            }
            self.merge.remove(&known.report);
        }
        let replaced = self.reporters.get(&from.process).map_or(0, |r| r.report.entries.len());
        let named = self.named - replaced + report.entries.len();
        let room = named <= self.options.named_max;
        let added = if room { self.merge.add(&report) } else { Err(Refused::Full) };
        if let Err(refused) = added {
            if let Some(known) = self.reporters.get(&from.process) {
                // What was there a moment ago fits again.
                let _ = self.merge.add(&known.report);
            }
            self.counts.refused += 1;
            return Err(NotCounted::Refused(refused));
        }
        self.named = named;
        self.counts.merged += 1;
        let keys: Vec<ReportKey> = report.entries.iter().map(|e| e.key.clone()).collect();
        let From { process, incarnation, window } = from;
        self.reporters.insert(process, Reporter { incarnation, window, at: now, report });
        keys.iter().for_each(|key| self.judge(now, key));
        Ok(())
    }

    /// How long a reporter may be silent from now on, and one that was asked for nothing: where
    /// reports come more rarely, longer.
    pub fn set_reporter_ttl(&mut self, ttl: Duration, quiet_ttl: Duration) {
        (self.options.reporter_ttl, self.options.quiet_ttl) = (ttl, quiet_ttl);
    }

    /// A reporter is gone, and what it reported with it.
    pub fn forget(&mut self, process: u64) {
        if let Some(gone) = self.reporters.remove(&process) {
            self.named -= gone.report.entries.len();
            self.merge.remove(&gone.report);
        }
    }

    /// Ends a window, when one is due: silent reporters are forgotten, cool keys demoted. Orders
    /// end when their time is over.
    pub fn handle_timeout(&mut self, now: Tick) {
        for (key, what) in self.orders.handle_timeout(now) {
            self.decided(now, key, what.into());
        }
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        self.due = Some(now.after(self.options.window));
        self.age_out(now);
        let band = self.band();
        let (window, few) = (self.options.window.as_secs_f64(), self.reporters.len() <= 2);
        let mut cooled = Vec::new();
        for (key, hot) in &mut self.hot {
            let merged = self.merge.get(&ReportKey::new(key, 0));
            let upper = merged.as_ref().map_or(0.0, |m| {
                if few { m.named as f64 } else { m.named.min(m.weighed + m.error) as f64 }
            });
            let squares = merged.as_ref().map_or(0.0, |m| m.squares as f64);
            let cool = band.proves_cool(upper, squares, 1.0, window);
            if let Some(m) = &merged {
                hot.read_hot = class(m) != Class::WriteHot;
            }
            hot.last = merged;
            if hot.switch.finish_window(cool, &band) {
                let below = band.down_per_sec;
                cooled.push((
                    key.clone(),
                    format!("cool: {upper:.0} in a window, below {below:.0}/s"),
                ));
            }
        }
        for (key, why) in cooled {
            self.hot.remove(&key);
            self.counts.demotions += 1;
            self.decided(now, key, why);
        }
    }

    /// When to call [`Aggregator::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Tick> {
        self.due
    }

    /// Has every process of the group keep `key` near; whether there was room.
    pub fn pin(&mut self, now: Tick, key: Key) -> bool {
        self.order(now, key, Treat::near(now))
    }

    /// Has every process of the group treat `key` as ordered; whether there was room.
    pub fn order(&mut self, now: Tick, key: Key, order: Treat) -> bool {
        let room = self.orders.treat(key.clone(), order);
        if room {
            self.decided(now, key, order.what());
        }
        room
    }

    /// Takes an order to treat `key` back; whether there was one.
    pub fn unpin(&mut self, now: Tick, key: &Key) -> bool {
        let was = self.orders.untreat(key);
        if was {
            self.decided(now, key.clone(), "pin taken back".into());
        }
        was
    }

    /// Has no process of the group treat `key`; whether there was room.
    pub fn deny(&mut self, now: Tick, key: Key, until: Option<Tick>) -> bool {
        let room = self.orders.deny(key.clone(), until);
        if room {
            self.decided(now, key, "denied by an operator".into());
        }
        room
    }

    /// Takes a denial back; whether there was one.
    pub fn allow(&mut self, now: Tick, key: &Key) -> bool {
        let was = self.orders.allow(key);
        if was {
            self.decided(now, key.clone(), "denial taken back".into());
        }
        was
    }

    /// What operators have ordered elsewhere, in place of all orders so far.
    pub fn replace_orders(&mut self, now: Tick, orders: Orders) {
        for (key, what) in self.orders.replace(orders) {
            self.decided(now, key, what);
        }
    }

    /// Remembers what was decided elsewhere, for those who ask why.
    pub fn note(&mut self, at: Tick, key: Key, what: String) {
        self.history.note(at, key, what);
    }

    /// Raised by every change of a verdict.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What has been counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Reporters that have reported lately.
    #[must_use]
    pub fn reporters(&self) -> usize {
        self.reporters.len()
    }

    /// Keys at or below this rate need not be reported: half of an even share of the threshold.
    #[must_use]
    pub fn floor_per_sec(&self) -> f64 {
        0.5 * self.options.promote_per_sec / self.reporters.len().max(1) as f64
    }

    /// All reports as one, for a merge of merges. Keys at or below `floor_per_sec` are left out.
    #[must_use]
    pub fn report(&self, entries_max: usize, floor_per_sec: f64) -> Report {
        let at_least = floor_per_sec.max(0.0) * self.options.window.as_secs_f64();
        self.merge.report(entries_max, at_least as u64)
    }

    /// The list's entries at `now`, hottest first, pinned ones before all.
    #[must_use]
    pub fn entries(&self, now: Tick) -> Vec<FleetKey> {
        let mut found: Vec<FleetKey> = self
            .hot
            .iter()
            .filter(|(key, _)| self.orders.get(key).is_none())
            .map(|(key, hot)| self.entry(now, key, hot))
            .collect();
        found.sort_by(|a, b| {
            b.total_per_sec().total_cmp(&a.total_per_sec()).then_with(|| a.key.cmp(&b.key))
        });
        let ordered = self.orders.treats().map(|(key, order)| {
            let last = self.merge.get(&ReportKey::new(key, 0));
            let numbers = Hot { last, ..Hot::new(order.since, true) };
            FleetKey {
                rule: Rule::Pinned,
                treatment: Some(order.treatment),
                ttl: order.ttl,
                reason: String::new(),
                ..self.entry(now, key, &numbers)
            }
        });
        let all = ordered.chain(found).filter(|e| !self.orders.denies(&e.key));
        all.take(self.options.entries_max).collect()
    }

    /// The keys that no process may treat.
    #[must_use]
    pub fn denied(&self) -> Vec<Key> {
        self.orders.denied().cloned().collect()
    }

    /// The sum of what was reported of `key`.
    #[must_use]
    pub fn merged(&self, key: &[u8]) -> Option<Merged> {
        self.merge.get(&ReportKey::new(key, 0))
    }

    /// What was decided in the last hour, oldest first.
    pub fn history(&self, now: Tick) -> impl Iterator<Item = &Decided> {
        self.history.recent(now)
    }

    fn band(&self) -> Band {
        let up = self.options.promote_per_sec;
        Band {
            up_per_sec: up,
            down_per_sec: up * f64::from(self.options.demote_permille) / 1_000.0,
            z: self.options.z,
            windows: self.options.demote_windows,
        }
    }

    fn judge(&mut self, now: Tick, key: &ReportKey) {
        let Some(merged) = self.merge.get(key) else { return };
        // The first two reports of a term that goes on from another's are those of a group of two
        // only if no third comes.
        let ttl = self.options.reporter_ttl;
        let settled = self.inherited.is_none_or(|at| now.since(at) >= ttl);
        let few = self.reporters.len() <= 2 && settled;
        let lower = if few { merged.lower_bound() } else { merged.weighed };
        let window = self.options.window.as_secs_f64();
        if !self.band().proves_hot(lower as f64, merged.squares as f64, window) {
            return;
        }
        let key = Key::copy(&key.bytes);
        if self.hot.contains_key(&key) {
            return;
        }
        if self.hot.len() >= self.options.entries_max {
            self.counts.full += 1;
            return;
        }
        let what = format!("hot: {}", why(&merged, &self.options));
        let read_hot = class(&merged) != Class::WriteHot;
        let hot = Hot { last: Some(merged), ..Hot::new(now, read_hot) };
        self.hot.insert(key.clone(), hot);
        self.counts.promotions += 1;
        self.decided(now, key, what);
    }

    fn age_out(&mut self, now: Tick) {
        let Options { reporter_ttl, quiet_ttl, .. } = self.options;
        let ttl = |r: &Reporter| if r.report.is_nothing() { quiet_ttl } else { reporter_ttl };
        let silent: Vec<u64> = self
            .reporters
            .iter()
            .filter(|(_, r)| now.since(r.at) > ttl(r))
            .map(|(process, _)| *process)
            .collect();
        for process in silent {
            if self.reporters.contains_key(&process) {
                self.forget(process);
                self.counts.aged_out += 1;
            }
        }
    }

    fn decided(&mut self, at: Tick, key: Key, what: String) {
        self.version += 1;
        self.note(at, key, what);
    }

    fn entry(&self, now: Tick, key: &Key, hot: &Hot) -> FleetKey {
        let window = self.options.window.as_secs_f64();
        let merged = hot.last.as_ref();
        let fleet = merged.map_or_else(Rates::default, |m| rates(m, window));
        let total = self.merge.total() as f64 / window;
        let (own, processes) = (Rates::default(), self.reporters.len() as u32);
        let near = hot.read_hot;
        let situation = Situation { own, near, fleet, processes, shard: None, combines: false };
        let decision = treat::decide(&self.options.treat, &situation);
        FleetKey {
            treatment: hot.read_hot.then_some(Treatment::Near),
            advice: decision.writes.or(decision.reads).map(|a| a.treatment),
            reads_per_sec: fleet.reads_per_sec,
            writes_per_sec: fleet.writes_per_sec,
            lower_bound_per_sec: merged.map_or(0.0, |m| m.lower_bound() as f64 / window),
            saved_per_sec: merged
                .map_or(0.0, |m| m.lower_bound().saturating_sub(m.loads) as f64 / window),
            share: if total > 0.0 { (fleet.total() / total).min(1.0) } else { 0.0 },
            reporters: merged.map_or(0, |m| m.reporters),
            hot_for: now.since(hot.since),
            reason: merged.map_or_else(String::new, |m| why(m, &self.options)),
            ..FleetKey::named(key.clone(), Rule::Detected, Treatment::Near)
        }
    }
}

impl Hot {
    fn new(since: Tick, read_hot: bool) -> Hot {
        let mut switch = Switch::default();
        switch.turn_on(since);
        Hot { since, switch, read_hot, last: None }
    }
}

fn rates(m: &Merged, window_secs: f64) -> Rates {
    let writes = m.writes.min(m.lower_bound());
    let reads = m.lower_bound() - writes;
    Rates { reads_per_sec: reads as f64 / window_secs, writes_per_sec: writes as f64 / window_secs }
}

fn class(m: &Merged) -> Class {
    rates(m, 1.0).class()
}

fn why(m: &Merged, options: &Options) -> String {
    let window = options.window.as_secs_f64();
    let per_sec = m.lower_bound() as f64 / window;
    let margin = options.z * (m.squares as f64).sqrt() / window;
    let (n, s) = (m.reporters, if m.reporters == 1 { "" } else { "s" });
    let at = options.promote_per_sec;
    format!("{per_sec:.0}/s ± {margin:.0}/s from {n} reporter{s}; hot from {at:.0}/s")
}

#[cfg(test)]
mod tests {
    use super::super::merge::ReportEntry;
    use super::*;

    fn at(ms: u64) -> Tick {
        Tick(3_600_000_000_000).after(Duration::from_millis(ms))
    }

    fn report(rates: &[(&str, u64)]) -> Report {
        let entry = |(key, count): &(&str, u64)| ReportEntry {
            key: ReportKey::new(key.as_bytes(), 0),
            count: *count,
            error: 0,
            writes: 0,
            loads: 0,
        };
        Report {
            capacity: 64,
            floor: 0,
            one_in: 1,
            duration: Duration::from_secs(1),
            total: rates.iter().map(|r| r.1).sum(),
            entries: rates.iter().map(entry).collect(),
        }
    }

    fn from(process: u64, window: u64) -> From {
        From { process, incarnation: 1, window }
    }

    fn group(up: f64) -> Aggregator {
        Aggregator::new(Options { promote_per_sec: up, ..Options::default() })
    }

    fn keys(group: &Aggregator) -> Vec<String> {
        group.entries(at(0)).iter().map(|e| e.key.to_string()).collect()
    }

    #[test]
    fn a_key_below_every_process_threshold_is_hot_for_all_together() {
        let mut group = group(100.0);
        for process in 0..3 {
            group.handle_report(at(0), from(process, 1), report(&[("a", 38)])).unwrap();
        }
        assert!(keys(&group).is_empty(), "114 less its margin");
        group.handle_report(at(1), from(3, 1), report(&[("a", 38)])).unwrap();
        assert_eq!(keys(&group), ["a"], "at the very report that proves it");
        let entry = &group.entries(at(500))[0];
        assert_eq!((entry.reads_per_sec, entry.reporters, entry.share), (152.0, 4, 1.0));
        assert_eq!(entry.reason, "152/s ± 22/s from 4 reporters; hot from 100/s");
    }

    #[test]
    fn a_report_counts_once_and_late_ones_not_at_all() {
        let mut group = group(100.0);
        group.handle_report(at(0), from(1, 5), report(&[("a", 90)])).unwrap();
        let again = |group: &mut Aggregator, f| group.handle_report(at(1), f, report(&[("a", 90)]));
        assert_eq!(again(&mut group, from(1, 5)), Err(NotCounted::Duplicate));
        assert_eq!(again(&mut group, from(1, 4)), Err(NotCounted::Late));
        let older = From { incarnation: 0, ..from(1, 9) };
        assert_eq!(again(&mut group, older), Err(NotCounted::Late));
        assert_eq!(group.merged(b"a").unwrap().lower_bound(), 90);
        again(&mut group, From { incarnation: 2, ..from(1, 0) }).unwrap();
        assert_eq!(group.merged(b"a").unwrap().lower_bound(), 90, "in place of the last one");
    }

    #[test]
    fn a_reporter_that_vanishes_ages_out_and_its_keys_cool() {
        let mut group = group(100.0);
        (0..4).for_each(|p| group.handle_report(at(0), from(p, 1), report(&[("a", 50)])).unwrap());
        assert_eq!(keys(&group), ["a"]);
        for ms in (0..14_000).step_by(100) {
            group.handle_timeout(at(ms));
        }
        assert!(keys(&group).is_empty());
        assert_eq!((group.reporters(), group.counts().aged_out), (0, 4));
        assert_eq!(group.history(at(14_000)).count(), 2);
        assert_eq!(group.history(at(14_000 + 3_600_000)).count(), 0);
    }

    #[test]
    fn one_reporter_alone_makes_no_key_hot_for_the_others() {
        let mut group = group(100.0);
        for p in 0..5 {
            let bad = report(&[("secret", 1_000_000_000)]);
            let good = report(&[("a", 28)]);
            group.handle_report(at(0), from(p, 1), if p == 4 { bad } else { good }).unwrap();
        }
        assert!(keys(&group).is_empty());
        group.handle_report(at(0), from(9, 1), report(&[("a", 40)])).unwrap();
        assert_eq!(keys(&group), ["a"]);
    }

    #[test]
    fn a_flood_of_distinct_keys_from_one_reporter_stays_within_its_bounds() {
        let options = Options { promote_per_sec: 100.0, named_max: 80, ..Options::default() };
        let mut group = Aggregator::new(options);
        for window in 0..2_000_u64 {
            let names: Vec<String> = (0..64).map(|i| format!("{window}:{i}")).collect();
            let rates: Vec<_> = names.iter().map(|n| (n.as_str(), 1_000_000)).collect();
            group.handle_report(at(window), from(1, window), report(&rates)).unwrap();
            for p in 2..5 {
                group.handle_report(at(window), from(p, window), report(&[("a", 80)])).unwrap();
            }
        }
        let full = group.handle_report(at(2_000), from(9, 1), report(&[("b", 1)]));
        assert_eq!(full, Ok(()));
        let more: Vec<String> = (0..16).map(|i| format!("more:{i}")).collect();
        let more: Vec<_> = more.iter().map(|n| (n.as_str(), 1)).collect();
        let full = group.handle_report(at(2_000), from(10, 1), report(&more));
        assert_eq!(full, Err(NotCounted::Refused(Refused::Full)));
        // The newest report of the flood, "a" and "b"; nothing of what was refused.
        assert_eq!(group.merge.ranked().len(), 66);
        // The first report stood alone.
        assert!(keys(&group).len() <= 65);
        assert!(keys(&group).contains(&"a".to_string()));
    }

    #[test]
    fn what_another_issuer_held_is_kept_until_this_one_knows_better() {
        let mut first = group(100.0);
        (0..4).for_each(|p| first.handle_report(at(0), from(p, 1), report(&[("a", 50)])).unwrap());
        first.pin(at(0), "p".into());
        first.deny(at(0), "d".into(), None);
        let mut next = group(100.0);
        let mut list = FleetList { entries: first.entries(at(100)), ..FleetList::default() };
        list.denied = vec!["d".into(), "x".into()];
        list.denied_above = vec!["x".into()];
        first.say_ends(at(100), &mut list);
        let pin = FleetKey::named("q".into(), Rule::Pinned, Treatment::Salt { slots: 8 });
        list.entries.push(FleetKey { above: true, ..pin });
        next.inherit(at(100), 0, &list);
        assert_eq!(next.denied(), first.denied());
        assert!(next.orders.get(&"q".into()).is_none() && keys(&next).contains(&"q".into()));
        next.handle_report(at(100), from(7, 1), report(&[])).unwrap();
        for ms in (100..10_000).step_by(100) {
            next.handle_timeout(at(ms));
        }
        assert_eq!(keys(&next), ["p"], "five cool windows later only the pin is left");
    }

    #[test]
    fn an_order_with_an_end_keeps_it_when_another_issuer_goes_on() {
        let mut first = group(100.0);
        let order = Treat { until: Some(at(9_000)), ..Treat::near(at(0)) };
        assert!(first.order(at(0), "p".into(), order) && first.pin(at(0), "q".into()));
        assert!(first.deny(at(0), "d".into(), Some(at(8_000))));
        let (entries, denied) = (first.entries(at(1_000)), first.denied());
        let sent_ms = 1_796_061_600_000;
        let mut list = FleetList { entries, denied, sent_ms, ..FleetList::default() };
        first.say_ends(at(1_000), &mut list);
        let mut next = group(100.0);
        // Another process, whose monotonic clock is another one.
        next.inherit(at(50_000), sent_ms + 2_000, &list);
        next.handle_timeout(at(54_999));
        assert_eq!((keys(&next), next.denied()), (vec!["p".into(), "q".into()], vec!["d".into()]));
        next.handle_timeout(at(55_000));
        assert_eq!((keys(&next), next.denied()), (vec!["p".into(), "q".into()], vec![]));
        next.handle_timeout(at(56_000));
        assert_eq!(keys(&next), ["q"]);
    }

    #[test]
    fn the_first_two_reports_after_a_take_over_make_no_key_hot_that_one_reporter_alone_names() {
        let mut next = group(100.0);
        next.inherit(at(0), 0, &FleetList::default());
        next.handle_report(at(100), from(1, 1), report(&[("mine", 500)])).unwrap();
        next.handle_report(at(200), from(2, 1), report(&[("a", 28)])).unwrap();
        assert!(keys(&next).is_empty());
        // No third one has come within the time of a reporter: it is a group of two.
        next.handle_report(at(5_000), from(1, 2), report(&[("mine", 500)])).unwrap();
        assert_eq!(keys(&next), ["mine"]);
    }

    #[test]
    fn a_denial_outranks_a_pin() {
        let mut group = group(100.0);
        assert!(group.pin(at(0), "a".into()) && group.deny(at(0), "a".into(), None));
        assert!(keys(&group).is_empty());
        assert!(group.allow(at(0), &"a".into()) && !group.allow(at(0), &"a".into()));
        assert_eq!(keys(&group), ["a"]);
        assert!(group.unpin(at(0), &"a".into()) && keys(&group).is_empty());
    }
}
