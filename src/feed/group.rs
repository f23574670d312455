//! What the serving process of a host knows: the reports of its siblings, and the list that it
//! makes of them and of the fleet's.
//!
//! All of it is bookkeeping around the engine's [`Aggregator`]; sockets are elsewhere.

use super::local::Local;
use super::options::Options;
use super::wire::{self, Beat, List, Message, Stands};
use crate::engine::control::aggregate::{Aggregator, From, NotCounted};
use crate::engine::control::blend::blend;
use crate::engine::control::fleet::{Edition, FleetKey, FleetList, Heartbeat};
use crate::engine::control::follow::Caps;
use crate::engine::control::merge::Report;
use crate::engine::time::Tick;
use crate::key::Key;
use crate::runtime::Clock;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Between two heartbeats, at least; and where what is said besides has changed.
pub(super) const BEAT: Duration = Duration::from_millis(500);

/// All followers together are told ten times a second that the list stands.
const BEAT_PER_FOLLOWER: Duration = Duration::from_millis(100);

/// Between two heartbeats, at most. Who has ended is told by the kernel at once.
const BEAT_MAX: Duration = Duration::from_secs(2);

/// What the last relay had heard from the fleet holds for so long, until the next one hears from it.
const INHERITED: Duration = Duration::from_secs(10);

/// A sibling that is asked for nothing says so this often.
const QUIET_EVERY: Duration = Duration::from_secs(10);

/// Between two lines with present rates.
const RATES: Duration = Duration::from_secs(1);

/// A list that stands is encoded anew after this: new followers get it with a present time.
const STANDS: Duration = Duration::from_secs(10);

/// The serving process's own reports.
const SELF: u64 = 0;

/// What followers are sent, whole and conflated: who is slow gets the newest only.
#[derive(Clone, Debug, Default)]
pub(super) struct Published {
    pub(super) edition: Edition,
    pub(super) list: Arc<[u8]>,
    /// A heartbeat in full, for who has not seen its terms, and the short form for the others.
    pub(super) beat: Arc<[u8]>,
    pub(super) stands: Arc<[u8]>,
    pub(super) rates: Arc<[u8]>,
    /// Raised with each heartbeat, with each change of the terms, and with each line of rates.
    pub(super) beat_seq: u64,
    pub(super) terms_seq: u64,
    pub(super) rates_seq: u64,
}

pub(super) struct Group {
    state: Mutex<State>,
    sender: watch::Sender<Published>,
    options: Options,
    clock: Clock,
    issuer: u64,
    incarnation: u64,
    /// Keys that were too long for the last list.
    unlisted: AtomicU64,
}

struct State {
    aggregator: Aggregator,
    /// The fleet's list, where this process is its host's relay, and what it wants to hear of.
    upstream: Option<Arc<FleetList>>,
    floor_above: Option<f64>,
    /// Until then the list is the one that the last relay left behind.
    inherited_until: Option<Tick>,
    /// The versions of the aggregator and of the list that was made of it.
    made_of: u64,
    version: u64,
    changed: bool,
    own_window: u64,
    beat_due: Tick,
    terms_due: Tick,
    terms: Option<Heartbeat>,
    rates_due: Tick,
    made: Tick,
    report_due: Tick,
    canary_ms: u64,
}

impl State {
    /// What is small for this host may be much for the fleet.
    fn floor_per_sec(&self) -> f64 {
        let share = self.aggregator.reporters().max(1) as f64;
        let above = self.floor_above.map_or(f64::INFINITY, |floor| floor / share);
        self.aggregator.floor_per_sec().min(above)
    }
}

impl Group {
    /// Goes on from `inherited`, as the issuer of a term that is above every one seen.
    pub(super) fn new(
        local: &dyn Local,
        options: &Options,
        issuer: u64,
        (inherited, seen): (Option<&FleetList>, Option<Edition>),
        relay: bool,
    ) -> Group {
        let (now, wall) = (local.clock().now(), local.clock().wall_ms());
        let mut aggregator = Aggregator::new(options.aggregate());
        if let Some(list) = inherited {
            aggregator.inherit(now, wall, list);
        }
        let state = State {
            aggregator,
            upstream: inherited.filter(|_| relay).map(|list| Arc::new(list.from_above())),
            inherited_until: relay.then(|| now.after(INHERITED)),
            floor_above: None,
            made_of: u64::MAX,
            version: 0,
            changed: true,
            own_window: 0,
            beat_due: now,
            terms_due: now,
            terms: None,
            rates_due: now,
            made: now,
            report_due: now,
            canary_ms: wall,
        };
        Group {
            state: Mutex::new(state),
            sender: watch::Sender::new(Published::default()),
            options: options.clone(),
            clock: local.clock(),
            issuer,
            unlisted: AtomicU64::new(0),
            incarnation: wall.max(seen.map_or(0, |s| s.incarnation.saturating_add(1))),
        }
    }

    /// What the group's processes accept of a list, by what is known here.
    pub(super) fn caps(&self) -> &Caps {
        &self.options.caps
    }

    pub(super) fn unlisted(&self) -> u64 {
        self.unlisted.load(Ordering::Relaxed)
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Published> {
        self.sender.subscribe()
    }

    /// A sibling's report.
    pub(super) fn report(&self, now: Tick, from: From, report: Report) -> Result<(), NotCounted> {
        self.state.lock().aggregator.handle_report(now, from, report)
    }

    /// A sibling is gone, and its traffic with it.
    pub(super) fn forget(&self, process: u64) {
        self.state.lock().aggregator.forget(process);
    }

    /// The fleet's list, or none.
    pub(super) fn upstream(&self, list: Option<Arc<FleetList>>) {
        let mut state = self.state.lock();
        let old = state.upstream.take();
        let at = self.clock.now();
        for (key, what) in news(old.as_deref(), list.as_deref()) {
            state.aggregator.note(at, key, what);
        }
        (state.upstream, state.inherited_until) = (list, None);
        state.changed = true;
    }

    /// What the whole host asked for, for the fleet.
    pub(super) fn host_report(&self, entries_max: usize, floor_per_sec: f64) -> Report {
        let mut state = self.state.lock();
        state.floor_above = Some(floor_per_sec);
        state.aggregator.report(entries_max, floor_per_sec)
    }

    /// Something that an operator says or asks.
    pub(super) fn operate<R>(&self, ask: impl FnOnce(&mut Aggregator) -> R) -> R {
        ask(&mut self.state.lock().aggregator)
    }

    /// What is due: the own report, the window, a new list, a heartbeat. Returns the list if it is
    /// a new one, and the heartbeat if there is one.
    pub(super) fn tick(
        &self,
        local: &dyn Local,
        followers: usize,
        rates: bool,
    ) -> (Option<FleetList>, Option<Heartbeat>) {
        let (now, wall) = (local.clock().now(), local.clock().wall_ms());
        let mut state = self.state.lock();
        if state.report_due <= now {
            state.report_due = now.after(self.options.report_every);
            let floor = state.floor_per_sec();
            drop(state);
            // Without the lock: the other side has one of its own.
            let report = local.take_report(now, floor);
            state = self.state.lock();
            if let Some(report) = report {
                state.own_window += 1;
                let (process, window) = (SELF, state.own_window);
                let from = From { process, incarnation: self.incarnation, window };
                let _ = state.aggregator.handle_report(now, from, report);
            }
            // The loop from a report to the list is closed here and now.
            state.canary_ms = wall;
        }
        state.aggregator.handle_timeout(now);
        if state.inherited_until.is_some_and(|until| until <= now) {
            state.inherited_until = None;
            state.changed |= state.upstream.take().is_some();
        }
        let new = state.changed || state.made_of != state.aggregator.version();
        if new {
            state.changed = false;
            state.made_of = state.aggregator.version();
            state.version += 1;
        }
        let beat = self.beat_if_due(&mut state, (now, wall), followers, new);
        let rates = rates && state.rates_due <= now;
        let list = (new || rates || state.made.after(STANDS) <= now).then(|| {
            state.made = now;
            self.list(&state, now, wall)
        });
        if rates {
            state.rates_due = now.after(RATES);
        }
        drop(state);
        self.publish(list.as_ref(), beat.as_ref(), rates);
        (list.filter(|_| new), beat.map(|(beat, _)| beat))
    }

    /// The list as it stands, with present rates.
    pub(super) fn now(&self, local: &dyn Local) -> FleetList {
        self.list(&self.state.lock(), local.clock().now(), local.clock().wall_ms())
    }

    /// A heartbeat, and whether it says more than that the list stands.
    fn beat_if_due(
        &self,
        state: &mut State,
        (now, wall): (Tick, u64),
        followers: usize,
        new: bool,
    ) -> Option<(Heartbeat, bool)> {
        if !new && now < state.terms_due {
            return None;
        }
        state.terms_due = now.after(BEAT);
        let followers = u32::try_from(followers).unwrap_or(u32::MAX).min(1_024);
        let interval = (BEAT_PER_FOLLOWER * followers).clamp(BEAT, BEAT_MAX);
        let beat = Heartbeat {
            issuer: self.issuer,
            edition: Edition { incarnation: self.incarnation, version: state.version },
            ttl: self.options.ttl.max(3 * interval),
            sent_ms: wall,
            canary_ms: state.canary_ms,
            interval,
            report_every: self.options.report_every,
            quiet_every: QUIET_EVERY,
            floor_per_sec: state.floor_per_sec(),
            reports_stored: false,
            channels: 1,
        };
        let Heartbeat { edition, sent_ms, canary_ms, .. } = beat;
        let terms = state.terms.map(|t| Heartbeat { edition, sent_ms, canary_ms, ..t });
        let other = terms != Some(beat);
        if !new && !other && now < state.beat_due {
            return None;
        }
        (state.beat_due, state.terms) = (now.after(interval), Some(beat));
        Some((beat, other))
    }

    /// The fleet's entries first: they know of more traffic. What an operator of this host pinned
    /// comes before them, what any operator denied is left out.
    fn list(&self, state: &State, now: Tick, wall: u64) -> FleetList {
        let (own, denied) = (state.aggregator.entries(now), state.aggregator.denied());
        let caps = &self.options.caps;
        let mut list = FleetList {
            issuer: self.issuer,
            edition: Edition { incarnation: self.incarnation, version: state.version },
            ttl: self.options.ttl,
            sent_ms: wall,
            ..blend(own, denied, state.upstream.as_deref(), caps.entries_max)
        };
        state.aggregator.say_ends(now, &mut list);
        let unlisted = list.leave_out_longer(caps.key_bytes_max);
        self.unlisted.store(unlisted as u64, Ordering::Relaxed);
        list
    }

    fn publish(&self, list: Option<&FleetList>, beat: Option<&(Heartbeat, bool)>, rates: bool) {
        if list.is_none() && beat.is_none() {
            return;
        }
        let list_line = list.map(|list| wire::line(&Message::List(List::of(list))));
        let rates_line = list.filter(|_| rates).map(|l| wire::line(&Message::Rates(List::of(l))));
        let beat_lines = beat.map(|(beat, other)| {
            let stands = wire::line(&Message::Stands(Stands::of(beat)));
            (wire::line(&Message::Beat(Beat::of(beat))), stands, *other)
        });
        self.sender.send_modify(|all| {
            if let (Some(list), Some(line)) = (list, list_line) {
                (all.edition, all.list) = (list.edition, line.into());
            }
            if let Some((beat, stands, other)) = beat_lines {
                (all.beat, all.stands) = (beat.into(), stands.into());
                all.beat_seq += 1;
                all.terms_seq += u64::from(other);
            }
            if let Some(line) = rates_line {
                all.rates = line.into();
                all.rates_seq += 1;
            }
        });
    }
}

/// What has changed for the fleet from one list to the next, for those who ask why.
fn news(old: Option<&FleetList>, new: Option<&FleetList>) -> Vec<(Key, String)> {
    let entries = |list: Option<&FleetList>| -> BTreeMap<Key, FleetKey> {
        let all = list.map_or(&[][..], |list| &list.entries);
        all.iter().map(|e| (e.key.clone(), e.clone())).collect()
    };
    let denied = |list: Option<&FleetList>| -> BTreeSet<Key> {
        list.map(|list| list.denied.iter().cloned().collect()).unwrap_or_default()
    };
    let (before, after) = (entries(old), entries(new));
    let mut all = Vec::new();
    for (key, entry) in &after {
        let how = |e: &FleetKey| (e.rule, e.treatment, e.ttl);
        if before.get(key).is_none_or(|was| how(was) != how(entry)) {
            let treatment = entry.treatment.map_or_else(|| "nothing".into(), |t| t.to_string());
            let why = if entry.reason.is_empty() { "" } else { ": " };
            all.push((
                key.clone(),
                format!("fleet: {treatment} ({}{why}{})", entry.rule, entry.reason),
            ));
        }
    }
    let over =
        if new.is_some() { "fleet: no longer on the list" } else { "fleet: no list in force" };
    let gone = before.keys().filter(|key| !after.contains_key(*key));
    all.extend(gone.map(|key| (key.clone(), over.into())));
    let (before, after) = (denied(old), denied(new));
    all.extend(after.difference(&before).map(|key| (key.clone(), "fleet: denied".into())));
    all.extend(before.difference(&after).map(|key| (key.clone(), "fleet: denied no more".into())));
    all
}
