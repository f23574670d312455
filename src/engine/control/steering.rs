//! Who is treated: what the detector finds and what the operator says, in one place.
//!
//! - **What**: the detector with its verdicts in force, the shards, and the operator's pins,
//!   denials and schedules; out come the keys to be treated, the hot list and events.
//! - **Invariant**: a denied key is never treated; a pinned one always is, unless denied; in
//!   observe-only mode nothing is. A list from outside adds keys and denials, and takes away none
//!   of this process's own word; nothing of it is in force after its time.
//! - **Time and units**: [`Tick`] at each call; rates per second; weights in requests (or in cost).
//! - **Bounds**: [`Options::keys_max`] treated keys, the operator's among them; [`FLIPS_MAX`]; one found key per watched one, and
//!   [`EVENTS_MAX`] events that wait.
//! - **Source**: quinn-proto's shape: `handle_…` takes, `poll_…` gives.

mod listing;

use super::super::time::Tick;
use super::detect::{self, Detector, Sample};
use super::fed::Fed;
use super::fleet::FleetList;
use super::history::{Decided, History};
use super::hotlist::Rule;
use super::merge::Report;
use super::operator::Operator;
use super::reporter::{self, Reporter};
use super::shards::Shards;
use super::sketch::prefix;
use super::treat::{self, Decision, Rates, Shard, Situation, Treatment};
use super::verdict::{Estimate, Explanation, Finding, Verdict};
use crate::key::Key;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Keys whose changes of state are counted one by one.
pub const FLIPS_MAX: usize = 4_096;

/// Events that wait for the shell; older ones are dropped first.
pub const EVENTS_MAX: usize = 4_096;

/// Decisions that are remembered.
pub const HISTORY_MAX: usize = 1_024;

/// How the parts are set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// How hot keys are found.
    pub detect: detect::Options,
    /// Keys that may be treated at a time.
    pub keys_max: usize,
    /// Finds and tells, and treats nothing.
    pub observe_only: bool,
}

/// Something that changed.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A key turned hot, how long after it came within reach of the threshold.
    Promoted(Key, Rule, Finding, Duration),
    /// A hot key gained or lost its near cache.
    Treated(Key, Finding),
    /// A key is no longer hot.
    Demoted(Key, Finding),
}

/// What has been counted since the start.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Counts {
    /// Keys that turned hot.
    pub promotions: u64,
    /// Keys that stopped being hot.
    pub demotions: u64,
    /// Changes of state of the key that had the most.
    pub flips_max: u32,
    /// The longest time from a key's coming within reach of the threshold to its promotion.
    pub promoted_after_max: Duration,
    /// Finished windows.
    pub windows: u64,
    /// Windows that lasted much longer than planned.
    pub windows_stalled: u64,
}

/// A key that stands on the list by its traffic.
#[derive(Clone, Debug)]
struct Found {
    key: Key,
    shard: Option<u32>,
    by_schedule: bool,
    since: Tick,
    near: bool,
    demand: Rates,
    /// The rates are those of a whole window.
    settled: bool,
    lower_bound_per_sec: f64,
    load_per_sec: f64,
    decision: Decision,
    saved: f64,
}

/// A key as the detector knows it.
type Id = (u64, Box<[u8]>);

/// See the module's description.
#[derive(Clone, Debug)]
pub struct Steering {
    options: Options,
    detector: Detector,
    shards: Shards,
    operator: Operator,
    /// Both only where a feed was asked for.
    reporter: Option<Box<Reporter>>,
    pub(crate) fed: Option<Box<Fed>>,
    has_feed: bool,
    feeds: u64,
    found: BTreeMap<Id, Found>,
    flips: BTreeMap<u64, u32>,
    counts: Counts,
    events: VecDeque<Event>,
    history: History,
    version: u64,
    changed: bool,
    lapsed: bool,
}

impl Steering {
    /// Knows of nothing. `seed` as in [`Detector::new`].
    #[must_use]
    pub fn new(options: Options, seed: u64) -> Steering {
        Steering {
            detector: Detector::new(options.detect.clone(), seed),
            operator: Operator::new(options.keys_max),
            options,
            reporter: None,
            fed: None,
            has_feed: false,
            feeds: 0,
            shards: Shards::default(),
            found: BTreeMap::new(),
            flips: BTreeMap::new(),
            counts: Counts::default(),
            events: VecDeque::new(),
            history: History::new(HISTORY_MAX),
            version: 0,
            changed: false,
            lapsed: false,
        }
    }

    /// Counts one sample. `sample.key` is the whole key; `shard` is where it lives, if known.
    pub fn handle_sample(&mut self, now: Tick, sample: &Sample<'_>, shard: Option<u32>) {
        if let Some(shard) = shard.filter(|_| sample.loaded) {
            let weight = u64::from(sample.weight.clamp(1, detect::WEIGHT_MAX));
            self.shards.observe(shard, weight * u64::from(sample.one_in));
        }
        if let Some(reporter) = &mut self.reporter {
            reporter.handle_sample(sample);
        }
        let verdict = self.detector.handle_sample(now, sample);
        if let Some(Verdict::Promote(finding)) = verdict {
            self.promote(Key::copy(sample.key), shard, finding);
        } else if self.operator.expects(sample.key) {
            self.promote_early(now, sample, shard);
        }
    }

    /// Tells of samples that found the queue full.
    pub fn handle_dropped(&mut self, now: Tick, dropped: u32) {
        self.detector.handle_dropped(now, dropped);
    }

    /// Ends the windows and moves the schedules that are due at [`Steering::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Tick) {
        if self.operator.handle_timeout(now) {
            self.touch();
        }
        if self.fed.take_if(|fed| fed.until <= now).is_some() {
            self.lapsed = true;
            self.touch();
        }
        let finished = self.detector.handle_timeout(now);
        while let Some(verdict) = self.detector.poll_verdict() {
            self.handle_verdict(verdict);
        }
        if finished {
            self.finish_window(now);
        }
    }

    /// When to call [`Steering::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Tick> {
        let fed = self.fed.as_ref().map(|fed| fed.until);
        let own = self.operator.poll_timeout().into_iter().chain(self.detector.poll_timeout());
        own.chain(fed).min()
    }

    /// The next event, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Steering::treated`] may have changed since this was last asked.
    pub fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// One request in this many is to be sampled.
    #[must_use]
    pub fn sampling(&self) -> u32 {
        self.detector.sampling()
    }

    /// The detector.
    #[must_use]
    pub fn detector(&self) -> &Detector {
        &self.detector
    }

    /// The shards.
    #[must_use]
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// What has been counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The version of the hot list.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The last finished window, for a merge with those of other handles or processes.
    #[must_use]
    pub fn report(&self, entries_max: usize) -> Option<Report> {
        self.detector.report(entries_max)
    }

    /// A feed begins; its number, or `None` when there is one already.
    pub fn begin_feed(&mut self) -> Option<u64> {
        if self.has_feed {
            return None;
        }
        (self.has_feed, self.feeds) = (true, self.feeds + 1);
        Some(self.feeds)
    }

    /// The feed has ended, and what it brought with it.
    pub fn end_feed(&mut self, now: Tick, feed: u64) {
        self.obey(now, feed, None, |_| 0);
        if feed == self.feeds {
            (self.has_feed, self.reporter) = (false, None);
        }
    }

    /// Counts for reports from now on.
    pub fn start_reports(&mut self, now: Tick, seed: u64) {
        self.reporter.get_or_insert_with(|| Box::new(Reporter::new(now, seed)));
    }

    /// What was counted since the last report; see [`Reporter::take`].
    pub fn take_report(&mut self, now: Tick, floor_per_sec: f64) -> Option<Report> {
        self.reporter.as_mut()?.take(now, floor_per_sec, reporter::ENTRIES_MAX)
    }

    /// See [`Reporter::too_long`].
    #[must_use]
    pub fn too_long(&self) -> u64 {
        self.reporter.as_ref().map_or(0, |reporter| reporter.too_long())
    }

    /// Obeys `list` until its time is over, or no list at all. `hash` hashes keys as samples are. What a feed
    /// says that has ended is not heard.
    pub fn obey(
        &mut self,
        now: Tick,
        feed: u64,
        list: Option<(&FleetList, Tick)>,
        hash: impl Fn(&Key) -> u64,
    ) {
        if !self.has_feed || feed != self.feeds || (self.fed.is_none() && list.is_none()) {
            return;
        }
        let had = self.fed.take();
        self.fed = list.map(|(list, until)| {
            let mut next = had.unwrap_or_default().next(now, list, hash);
            next.until = until;
            Box::new(next)
        });
        self.touch();
    }

    /// The list in force stays so until then.
    pub fn keep(&mut self, feed: u64, until: Tick) {
        if let Some(fed) = self.fed.as_mut().filter(|_| feed == self.feeds) {
            fed.until = fed.until.max(until);
        }
    }

    /// Whether a list has run out here since this was last asked, before its feed let it go.
    pub fn take_lapse(&mut self) -> bool {
        std::mem::take(&mut self.lapsed)
    }

    /// Passes on what the operator says; `now` starts and ends the schedules that are due.
    pub fn operate<R>(&mut self, now: Tick, say: impl FnOnce(&mut Operator) -> R) -> R {
        let out = say(&mut self.operator);
        self.operator.handle_timeout(now);
        self.touch();
        out
    }

    /// The keys to be treated: pinned, scheduled, found; never more than allowed.
    #[must_use]
    pub fn treated(&self) -> Vec<Key> {
        if self.options.observe_only {
            return Vec::new();
        }
        let named = self.operator.treated().map(|(key, _)| key);
        // The operator of all processes has it treated in another way.
        let otherwise = |key: &Key| {
            let fed = self.fed.as_ref().and_then(|fed| fed.get(key));
            fed.is_some_and(|f| f.rule == Rule::Pinned && f.treatment != Some(Treatment::Near))
                && !self.operator.expects(key)
        };
        let found = self.found.values().filter(|f| f.near && !otherwise(&f.key)).map(|f| &f.key);
        let mut seen = BTreeSet::new();
        let mut own: Vec<&Key> = named.chain(found).filter(|k| seen.insert(*k)).collect();
        // The keys of a list are different ones, and may be many.
        let fed = self.fed.iter().flat_map(|fed| fed.keys());
        let fed = fed.filter(|(_, f)| f.treatment == Some(Treatment::Near)).map(|(key, _)| key);
        own.extend(fed.filter(|key| !seen.contains(*key)));
        own.retain(|key| !self.denies(key));
        own.into_iter().take(self.options.keys_max).cloned().collect()
    }

    /// The keys that stand on the list, whatever is done about them; some may come twice.
    pub fn listed(&self) -> impl Iterator<Item = &Key> {
        let named = self.operator.treated().map(|(key, _)| key);
        let fed = self.fed.iter().flat_map(|fed| fed.keys()).map(|(key, _)| key);
        named.chain(self.found.values().map(|f| &f.key)).chain(fed)
    }

    /// By whose word `key` is treated, or not.
    #[must_use]
    pub fn rule(&self, key: &Key, hash: u64) -> Rule {
        let fed = self.fed.as_ref().and_then(|fed| fed.rule(key));
        match (self.operator.rule(key), self.found.get(&id(hash, key))) {
            _ if self.denies(key) => Rule::Denied,
            (Rule::None, Some(found)) if found.by_schedule => Rule::Scheduled,
            (Rule::None, Some(_)) if fed != Some(Rule::Pinned) => Rule::Detected,
            (Rule::None, _) => fed.unwrap_or(Rule::None),
            (said, _) => said,
        }
    }

    /// Whether nobody may treat `key`, by the word of an operator here or of the list.
    pub(crate) fn denies(&self, key: &Key) -> bool {
        self.operator.denies(key) || self.fed.as_ref().is_some_and(|fed| fed.denies(key))
    }

    fn fed_rate(&self, key: &Key) -> Option<f64> {
        self.fed.as_ref()?.rate(key)
    }

    /// What the detector knows of the key with this hash.
    #[must_use]
    pub fn explain(&self, hash: u64) -> Option<Explanation> {
        self.detector.explain(hash)
    }

    /// What was decided by traffic in the last hour, oldest first.
    pub fn history(&self, now: Tick) -> impl Iterator<Item = &Decided> {
        self.history.recent(now)
    }

    fn touch(&mut self) {
        self.version += 1;
        self.changed = true;
    }

    fn promote(&mut self, key: Key, shard: Option<u32>, finding: Finding) {
        self.counts.promotions += 1;
        let watched = self.detector.watched_since(finding.hash).unwrap_or(finding.at);
        let after = finding.at.since(watched);
        self.counts.promoted_after_max = self.counts.promoted_after_max.max(after);
        self.count_flip(finding.hash);
        let id = id(finding.hash, &key);
        let decision = self.decide(shard, finding.demand, finding.load_per_sec, &finding.decision);
        let earlier = self.found.remove(&id);
        self.found.insert(
            id,
            Found {
                key: key.clone(),
                shard,
                by_schedule: false,
                since: earlier.as_ref().map_or(finding.at, |f| f.since),
                // What a schedule has treated stays so until it is over or the key cools.
                near: finding.decision.near || earlier.as_ref().is_some_and(|f| f.near),
                demand: finding.demand,
                settled: false,
                lower_bound_per_sec: finding.lower_bound_per_sec,
                load_per_sec: finding.load_per_sec,
                decision,
                saved: earlier.map_or(0.0, |f| f.saved),
            },
        );
        self.tell(Event::Promoted(key, Rule::Detected, finding, after));
    }

    /// A key under a scheduled prefix is treated as soon as the detector watches it.
    fn promote_early(&mut self, now: Tick, sample: &Sample<'_>, shard: Option<u32>) {
        let id = id(sample.hash, sample.key);
        if self.found.contains_key(&id) || self.detector.watched_since(sample.hash).is_none() {
            return;
        }
        let situation = Situation::alone(Rates::default(), true);
        let found = Found {
            key: Key::copy(sample.key),
            shard,
            by_schedule: true,
            since: now,
            near: true,
            demand: Rates::default(),
            settled: false,
            lower_bound_per_sec: 0.0,
            load_per_sec: 0.0,
            decision: treat::decide(&self.options.detect.treat, &situation),
            saved: 0.0,
        };
        self.found.insert(id, found);
        self.touch();
    }

    fn handle_verdict(&mut self, verdict: Verdict) {
        match verdict {
            // Windows prove no promotion: the samples within them did.
            Verdict::Promote(finding) => {
                let key = Key::copy(&finding.key);
                self.promote(key, None, finding);
            }
            Verdict::Treat(finding) => {
                let Some(found) = self.found.get_mut(&id(finding.hash, &finding.key)) else {
                    return;
                };
                found.near = finding.decision.near;
                found.decision = finding.decision;
                let key = found.key.clone();
                self.tell(Event::Treated(key, finding));
            }
            Verdict::Demote(finding) => {
                let Some(found) = self.found.remove(&id(finding.hash, &finding.key)) else {
                    return;
                };
                self.counts.demotions += 1;
                self.count_flip(finding.hash);
                self.tell(Event::Demoted(found.key, finding));
            }
        }
    }

    fn tell(&mut self, event: Event) {
        let (key, finding, what) = match &event {
            Event::Promoted(key, _, finding, _) => (key, finding, "hot"),
            Event::Treated(key, finding) if finding.decision.near => (key, finding, "near cache"),
            Event::Treated(key, finding) => (key, finding, "no near cache"),
            Event::Demoted(key, finding) => (key, finding, "not hot any more"),
        };
        self.history.note(finding.at, key.clone(), format!("{what}: {}", finding.why));
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
        self.touch();
    }

    fn count_flip(&mut self, hash: u64) {
        if self.flips.len() >= FLIPS_MAX && !self.flips.contains_key(&hash) {
            self.flips.retain(|_, flips| *flips > 1);
            if self.flips.len() >= FLIPS_MAX {
                return;
            }
        }
        let flips = self.flips.entry(hash).or_default();
        *flips += 1;
        self.counts.flips_max = self.counts.flips_max.max(*flips);
    }

    /// Brings the numbers on the list up to the window that has just ended.
    fn finish_window(&mut self, now: Tick) {
        let Some(record) = self.detector.window_record() else { return };
        self.counts.windows += 1;
        self.counts.windows_stalled += u64::from(record.stalled);
        self.shards.finish_window(record.duration);
        let detector = &self.detector;
        for pin in self.operator.pins_mut() {
            let estimate = detector.explain(pin.hash).and_then(|e| e.estimate);
            pin.saved += estimate.map_or(0.0, |e| saved(&e, record.duration));
        }
        for (key, fed) in self.fed.iter_mut().flat_map(|fed| fed.keys_mut()) {
            // What this process has found too is counted there.
            if !self.found.contains_key(&id(fed.named.hash, key)) {
                let estimate = detector.explain(fed.named.hash).and_then(|e| e.estimate);
                fed.named.saved += estimate.map_or(0.0, |e| saved(&e, record.duration));
            }
        }
        let ids: Vec<Id> = self.found.keys().cloned().collect();
        for id in ids {
            self.refresh(now, &id, record.duration);
        }
    }

    fn refresh(&mut self, now: Tick, id: &Id, window: Duration) {
        let explained = self.detector.explain(id.0);
        let Some(found) = self.found.get(id) else { return };
        let hot = explained.as_ref().is_some_and(|e| e.hot_since.is_some());
        let named = self.operator.expects(&found.key);
        if found.by_schedule && !hot && (explained.is_none() || !named) {
            self.found.remove(id);
            self.touch();
            return;
        }
        // A key that was found within this window keeps the rates that proved it.
        let estimate = explained.and_then(|e| e.estimate).filter(|_| found.since < now);
        let Some(estimate) = estimate else { return };
        let demand = estimate.demand;
        let decision = self.decide(found.shard, demand, estimate.load_per_sec, &found.decision);
        let Some(found) = self.found.get_mut(id) else { return };
        found.demand = demand;
        found.settled = now.since(found.since) >= window;
        found.load_per_sec = estimate.load_per_sec;
        found.lower_bound_per_sec =
            (estimate.lower_bound_per_sec - estimate.margin_per_sec).max(0.0);
        found.decision = decision;
        found.saved += saved(&estimate, window);
    }

    /// The decision with what is known of the key's shard.
    fn decide(&self, shard: Option<u32>, own: Rates, load: f64, last: &Decision) -> Decision {
        let options = &self.options.detect.treat;
        let shard = shard.zip(options.ceiling).map(|(shard, ceiling)| {
            let rate = self.shards.rate(shard);
            let limit = ceiling.reads_per_sec.min(ceiling.writes_per_sec).max(1e-9);
            let permille = |part: f64| (1_000.0 * part).clamp(0.0, 1e6) as u32;
            Shard {
                load_permille: permille(rate / limit),
                key_permille: if rate > 0.0 { permille((load / rate).min(1.0)) } else { 0 },
            }
        });
        let n = f64::from(options.processes);
        let fleet =
            Rates { reads_per_sec: own.reads_per_sec * n, writes_per_sec: own.writes_per_sec * n };
        let processes = options.processes;
        let alone = Situation::alone(own, last.near);
        treat::decide(options, &Situation { shard, fleet, processes, ..alone })
    }
}

fn id(hash: u64, key: &[u8]) -> Id {
    (hash, prefix(key).into())
}

/// Requests of a key that did not reach the store in the last finished window.
fn saved(estimate: &Estimate, window: Duration) -> f64 {
    (estimate.demand.total() - estimate.load_per_sec).max(0.0) * window.as_secs_f64()
}
