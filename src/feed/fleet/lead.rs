//! The aggregator: reports in, verdicts out, the lease kept.

use super::member::{CHANNELS, Inbox, KEPT, Member, QUIET_MAX, read_beat, read_ids, report_slot};
use super::region::Region;
use super::words::Words;
use crate::engine::control::aggregate::{Aggregator, From};
use crate::engine::control::blend::blend;
use crate::engine::control::fleet::{Edition, FleetList, Heartbeat};
use crate::engine::control::merge::Report;
use crate::engine::time::Tick;
use crate::feed::stats::count;
use crate::feed::wire::{self, List, Message, REPORT_LINE_MAX};
use crate::store::Delivery;
use bytes::Bytes;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

/// Between two attempts to subscribe.
const RETRY: Duration = Duration::from_secs(1);

/// The stored list is written again after this: it must outlive its time in the store.
const WRITTEN: Duration = Duration::from_secs(20);

/// Reports, and heartbeats, that a whole fleet sends or hears a second.
const EACH_PER_SEC: u32 = 500;

/// Bytes of lists that a whole fleet hears a second.
const BYTES_PER_SEC: f64 = 8.0 * 1024.0 * 1024.0;

/// Signs of life of all processes that are asked for nothing, a second.
const QUIET_PER_SEC: u32 = 3;

/// The reports that are left in the store are looked for in every so many intervals only, where
/// none were found the last time and every report can be heard.
const STORED_INTERVALS: u32 = 4;

/// Between two looks at the store that somebody asks for.
const LOOK_LEAST: Duration = Duration::from_millis(200);

/// Who cannot renew for this many intervals does not lead.
const UNPROVEN_INTERVALS: u32 = 3;

pub(super) struct Lead {
    incarnation: u64,
    aggregator: Aggregator,
    subs: Vec<Inbox>,
    /// How many of them are in use.
    channels: u64,
    /// The one that is asked first, so that none starves the others.
    turn: usize,
    subscribe_due: Tick,
    stored_due: Tick,
    looked: Tick,
    /// Reports were found in the store the last time.
    stored: bool,
    /// The operators' orders that are on the list, as they are stored. Their version alone does not
    /// tell: a store that fails over may lose one, and another takes its number.
    ordered: Option<Option<Bytes>>,
    lease: Bytes,
    proven: Tick,
    beat_due: Tick,
    push_due: Tick,
    /// When the present list was put into the store; `None` if that has not succeeded.
    written: Option<Tick>,
    /// The present list has not been pushed.
    pending: bool,
    made_of: u64,
    version: u64,
    canary_ms: u64,
    list: FleetList,
    interval: Duration,
    /// Where this fleet is one region of another.
    region: Option<Region>,
    /// What the region's last aggregator had heard from above, and until when that holds.
    inherited: Option<(FleetList, Tick)>,
}

impl Lead {
    pub(super) fn new(
        member: &Member,
        incarnation: u64,
        lease: Bytes,
        inherited: Option<&FleetList>,
        region: Option<Region>,
    ) -> Lead {
        let now = member.clock.now();
        let mut aggregator = Aggregator::new(member.fleet.aggregate());
        if let Some(list) = inherited {
            aggregator.inherit(now, member.clock.wall_ms(), list);
        }
        Lead {
            incarnation,
            aggregator,
            subs: (0..CHANNELS).map(|_| Inbox::default()).collect(),
            channels: 1,
            turn: 0,
            subscribe_due: now,
            stored_due: now,
            looked: Tick::ZERO,
            stored: false,
            ordered: None,
            lease,
            proven: now,
            beat_due: now,
            push_due: now,
            written: None,
            pending: false,
            made_of: u64::MAX,
            version: 0,
            canary_ms: member.clock.wall_ms(),
            list: FleetList::default(),
            interval: member.fleet.interval,
            region,
            inherited: inherited.map(|list| (list.from_above(), now.after(member.fleet.ttl))),
        }
    }

    pub(super) fn poll_reports(&mut self, cx: &mut Context<'_>) -> Poll<Option<Delivery>> {
        let n = self.subs.len();
        for i in 0..n {
            let at = (self.turn + i) % n;
            if let Poll::Ready(delivery) = self.subs[at].poll(cx) {
                self.turn = at + 1;
                return Poll::Ready(delivery);
            }
        }
        Poll::Pending
    }

    pub(super) fn report(
        &mut self,
        own: u64,
        now: Tick,
        (from, sent_ms, report): (From, u64, Report),
    ) {
        if from.process == own {
            self.canary_ms = self.canary_ms.max(sent_ms);
        }
        let _ = self.aggregator.handle_report(now, from, report);
    }

    /// What is due. `None` when this process leads no more.
    pub(super) async fn turn(mut self, member: &mut Member) -> Option<Lead> {
        let now = member.clock.now();
        if self.subscribe_due <= now {
            self.subscribe_due = now.after(RETRY);
            self.subscribe(member).await;
        }
        if self.stored_due <= now {
            self.looked = now;
            self.read_stored(member).await;
            let seldom = !self.stored && self.hears_all();
            let pause = self.interval * if seldom { STORED_INTERVALS } else { 1 };
            self.stored_due = now.after(pause);
        }
        self.aggregator.handle_timeout(now);
        *member.shown.reports.lock() = (self.aggregator.counts(), self.aggregator.reporters());
        if self.inherited.take_if(|(_, until)| *until <= now).is_some() {
            self.made_of = u64::MAX;
        }
        let changed = self.push_due <= now
            && (self.made_of != self.aggregator.version()
                || self.region.as_ref().is_some_and(Region::take_change));
        if changed || self.beat_due <= now {
            return self.issue(member, changed).await;
        }
        Some(self)
    }

    async fn subscribe(&mut self, member: &Member) {
        for bucket in 0..self.channels {
            let sub = &mut self.subs[bucket as usize];
            if !sub.is_open() {
                let channel = member.fleet.name(&format!("reports.{bucket}"));
                let transport = member.fleet.transport.clone();
                sub.set(member.call(transport.subscribe(channel)).await.ok());
            }
        }
    }

    /// Something has been put into the store: not to be waited for. Whoever says so all the time
    /// has it read five times a second.
    pub(super) fn look_now(&mut self) {
        self.stored_due = self.stored_due.min(self.looked.after(LOOK_LEAST));
    }

    /// What operators have ordered, from here on.
    fn take_orders(&mut self, member: &Member, value: Option<Bytes>) {
        if self.ordered.as_ref() == Some(&value) {
            return;
        }
        let (now, wall) = (member.clock.now(), member.clock.wall_ms());
        match Words::read(value.as_deref()) {
            Ok(words) => {
                self.ordered = Some(value);
                self.aggregator.replace_orders(now, words.orders(now, wall));
            }
            // The last readable ones stand.
            Err(_) => count(&member.shown.counters.lines_refused, 1),
        }
    }

    /// Reads what operators have ordered, and the reports of those who could not publish them.
    async fn read_stored(&mut self, member: &Member) {
        let buckets = (0..CHANNELS).map(|b| member.fleet.name(&format!("stored.{b}")));
        let slots = std::iter::once(member.fleet.name("orders")).chain(buckets).collect();
        let transport = member.fleet.transport.clone();
        let Ok(all) = member.call(async { Ok(transport.get_many(slots).await) }).await else {
            return;
        };
        let mut all = all.into_iter();
        if let Some(Ok(orders)) = all.next() {
            self.take_orders(member, orders);
        }
        let all = all.flatten().flatten();
        let ids: Vec<u64> = all.flat_map(|value| read_ids(Some(&value))).collect();
        self.stored = !ids.is_empty();
        for some in ids.chunks(256) {
            let slots = some.iter().map(|id| report_slot(&member.fleet, *id)).collect();
            let Ok(all) = member.call(async { Ok(transport.get_many(slots).await) }).await else {
                return;
            };
            let now = member.clock.now();
            for line in all.into_iter().flatten().flatten() {
                if line.len() <= REPORT_LINE_MAX
                    && let Some(report) = wire::read(&line).ok().and_then(wire::read_report)
                {
                    self.report(member.reporter(), now, report);
                }
            }
        }
    }

    /// Renews the lease, and only then tells the others.
    async fn issue(mut self, member: &mut Member, changed: bool) -> Option<Lead> {
        let (now, wall) = (member.clock.now(), member.clock.wall_ms());
        let reporters = u32::try_from(self.aggregator.reporters()).unwrap_or(u32::MAX).max(1);
        let quiet_every = self.pace(member.fleet.interval, reporters);
        self.beat_due = now.after(self.interval);
        self.spread(member, reporters).await;
        let floor_above = self.region.as_ref().map(|region| {
            region.report(&self.aggregator);
            region.floor_per_sec(reporters)
        });
        if changed {
            self.made_of = self.aggregator.version();
            self.version += 1;
            self.list = self.list_now(member, now, wall);
            (self.written, self.pending) = (None, true);
        }
        let beat = Heartbeat {
            issuer: member.id,
            edition: Edition { incarnation: self.incarnation, version: self.version },
            ttl: member.fleet.ttl.max(6 * self.interval),
            sent_ms: wall,
            canary_ms: self.canary_ms,
            interval: self.interval,
            report_every: self.interval,
            quiet_every,
            floor_per_sec: self
                .aggregator
                .floor_per_sec()
                .min(floor_above.unwrap_or(f64::INFINITY)),
            channels: self.channels,
            reports_stored: !self.hears_all(),
        };
        let line = wire::line(&Message::List(List::of(&self.list)));
        if self.written.is_none_or(|at| at.after(WRITTEN) <= now) {
            let slot = member.fleet.name(&format!("list.{}", self.incarnation));
            let put = member.fleet.transport.put(slot, line.clone().into(), KEPT);
            if member.call(put).await.is_ok() {
                self.written = Some(now);
            }
        }
        match self.renew(member, &beat).await {
            None => {
                member.stepped_down();
                return None;
            }
            // Not proven now: nothing is said, and what is new is said later.
            Some(false) => return Some(self),
            Some(true) => {}
        }
        if member.in_force() != Some(self.list.edition) {
            member.take_up(FleetList { sent_ms: wall, ..self.list.clone() });
        }
        if std::mem::take(&mut self.pending) {
            let pause = line.len() as f64 * f64::from(reporters) / BYTES_PER_SEC;
            self.push_due = now.after(Duration::from_secs_f64(pause.min(600.0)));
            publish(member, &line).await;
        }
        let wall = member.clock.wall_ms();
        let _ = member.follow(&beat);
        member.shown.counters.heard_canary(wall, self.canary_ms, beat.ttl);
        member.take_terms(&beat);
        publish(member, &member.lease_line(&beat)).await;
        Some(self)
    }

    /// How often who reports from now on; that of the quiet ones is returned.
    fn pace(&mut self, least: Duration, reporters: u32) -> Duration {
        let by_size = Duration::from_secs(1) * reporters / EACH_PER_SEC;
        self.interval = least.max(by_size);
        let quiet = Duration::from_secs(1) * reporters / QUIET_PER_SEC;
        let quiet_every = quiet.clamp(4 * self.interval, QUIET_MAX);
        let ttl = Duration::from_secs(5).max(4 * self.interval);
        self.aggregator.set_reporter_ttl(ttl, ttl.max(3 * quiet_every));
        quiet_every
    }

    /// What is in force from now on.
    fn list_now(&self, member: &Member, now: Tick, wall: u64) -> FleetList {
        let (own, denied) = (self.aggregator.entries(now), self.aggregator.denied());
        let above = self.region.as_ref().map(Region::list);
        let left_behind = self.inherited.as_ref().map(|(list, _)| list);
        let above = above.as_ref().and_then(|list| list.as_deref().or(left_behind));
        let caps = &member.fleet.caps;
        let mut list = FleetList {
            issuer: member.id,
            edition: Edition { incarnation: self.incarnation, version: self.version },
            ttl: member.fleet.ttl.max(6 * self.interval),
            sent_ms: wall,
            ..blend(own, denied, above, caps.entries_max)
        };
        self.aggregator.say_ends(now, &mut list);
        let unlisted = list.leave_out_longer(caps.key_bytes_max);
        member.shown.counters.keys_unlisted.store(unlisted as u64, Ordering::Relaxed);
        list
    }

    fn hears_all(&self) -> bool {
        self.subs.iter().take(self.channels as usize).all(Inbox::is_open)
    }

    /// A large fleet reports on more channels.
    async fn spread(&mut self, member: &Member, reporters: u32) {
        let channels = match reporters {
            0..32 => 1,
            64.. => CHANNELS,
            _ => self.channels,
        };
        if channels != self.channels {
            self.channels = channels;
            // Before anybody is sent there.
            self.subscribe(member).await;
        }
    }

    /// `Some(true)`: this process leads. `Some(false)`: not known now. `None`: it does not.
    async fn renew(&mut self, member: &Member, beat: &Heartbeat) -> Option<bool> {
        let slot = member.fleet.name("lease");
        let next = Bytes::from(member.lease_line(beat));
        let transport = member.fleet.transport.clone();
        let (old, new) = (self.lease.clone(), next.clone());
        let set = transport.compare_and_set(slot.clone(), Some(old), new, KEPT);
        if let Ok(true) = member.call(set).await {
            (self.lease, self.proven) = (next, member.clock.now());
            return Some(true);
        }
        // What is there decides: the outcome may have been unknown, now or the last time.
        let got = async { transport.get_many(vec![slot]).await.pop().unwrap_or(Ok(None)) };
        match member.call(got).await {
            Ok(Some(lease)) => {
                let (mine, now) = (is_mine(&lease, beat), member.clock.now());
                if mine {
                    (self.lease, self.proven) = (lease, now);
                }
                mine.then_some(true)
            }
            Ok(None) => None,
            Err(_) => {
                let limit = self.interval * UNPROVEN_INTERVALS;
                (member.clock.now().since(self.proven) < limit).then_some(false)
            }
        }
    }
}

fn is_mine(lease: &[u8], beat: &Heartbeat) -> bool {
    read_beat(lease).is_some_and(|there| {
        there.issuer == beat.issuer && there.edition.incarnation == beat.edition.incarnation
    })
}

async fn publish(member: &Member, line: &[u8]) {
    let (channel, line) = (member.fleet.name("push"), Bytes::copy_from_slice(line));
    let _ = member.call(member.fleet.transport.publish(channel, line)).await;
}
