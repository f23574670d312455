//! A member of the fleet: reports, follows the list, and takes the lease when nobody holds it.

use super::lead::Lead;
use super::region::Region;
use super::{Fleet, Shown};
use crate::engine::control::aggregate::From;
use crate::engine::control::fleet::{Edition, FleetList, Heartbeat};
use crate::engine::control::follow::{Beat, Refusal};
use crate::engine::control::merge::Report;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::feed::local::Local;
use crate::feed::stats::count;
use crate::feed::wire::{self, LIST_LINE_MAX, Lease, Message, REPORT_LINE_MAX};
use crate::key::Key;
use crate::runtime::{Clock, Runtime};
use crate::store::{Delivery, Subscription};
use bytes::Bytes;
use parking_lot::Mutex;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

/// Between two looks at what is due.
const TURN: Duration = Duration::from_millis(50);

/// A call to the transport may take this long.
const PATIENCE: Duration = Duration::from_millis(700);

/// Between two attempts to subscribe.
const RETRY: Duration = Duration::from_secs(1);

/// Channels for reports in a large fleet: each has a hash slot of its own. A small one has one.
pub(super) const CHANNELS: u64 = 4;

/// A lease that has not moved for this many intervals is nobody's.
const LEASE_INTERVALS: u32 = 3;

/// What is left in the store outlives its writer by this much.
pub(super) const KEPT: Duration = Duration::from_secs(60);

/// A process that has no key to name says so in every so many windows only.
const IDLE_WINDOWS: u32 = 4;

/// An aggregator without traffic of its own sends its canary in every so many.
const CANARY_WINDOWS: u32 = 2;

/// Between two signs of life of a process that is asked for nothing, at most.
pub(super) const QUIET_MAX: Duration = Duration::from_secs(400);

/// Reporters of one bucket that cannot publish.
pub(super) const STORED_MAX: usize = 1_024;

/// A subscription, or none yet. The lock is there only so that it may be shared; nobody waits.
#[derive(Default)]
pub(super) struct Inbox(Mutex<Option<Box<dyn Subscription>>>);

impl Inbox {
    pub(super) fn is_open(&self) -> bool {
        self.0.lock().is_some()
    }

    pub(super) fn set(&mut self, to: Option<Box<dyn Subscription>>) {
        *self.0.get_mut() = to;
    }

    /// The next delivery; `None` when the subscription has just ended.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Delivery>> {
        let inside = self.0.get_mut();
        let Some(sub) = inside else { return Poll::Pending };
        let polled = sub.next().as_mut().poll(cx);
        if matches!(polled, Poll::Ready(None)) {
            *inside = None;
        }
        polled
    }
}

pub(super) struct Member {
    pub(super) fleet: Fleet,
    pub(super) id: u64,
    /// As whom it reports.
    reporter: u64,
    pub(super) clock: Clock,
    pub(super) shown: Arc<Shown>,
    local: Arc<dyn Local>,
    runtime: Arc<dyn Runtime>,
    push: Inbox,
    channels: u64,
    subscribe_due: Tick,
    /// The last sign of an aggregator.
    heard: Tick,
    interval: Duration,
    poll_due: Tick,
    lease: Option<Bytes>,
    jitter: Duration,
    report_due: Tick,
    report_every: Duration,
    quiet_every: Duration,
    reported: Tick,
    floor_per_sec: f64,
    reports_stored: bool,
    listed_until: Tick,
    window: u64,
    idle: u32,
    incarnation: u64,
    lead: Option<Lead>,
}

/// Where a delivery came from.
enum Way {
    Push,
    Reports,
}

impl Member {
    pub(super) fn new(
        fleet: Fleet,
        local: Arc<dyn Local>,
        runtime: Arc<dyn Runtime>,
        shown: Arc<Shown>,
        (id, reporter): (u64, u64),
    ) -> Member {
        let clock = local.clock();
        let (now, interval) = (clock.now(), fleet.interval);
        Member {
            id,
            reporter,
            shown,
            local,
            runtime,
            push: Inbox::default(),
            channels: 1,
            subscribe_due: now,
            heard: now,
            interval,
            // Hosts that start together do not all ask at once.
            poll_due: now.after(Duration::from_micros(id % 250_000)),
            lease: None,
            // Members that hear nothing do not all reach for the lease at once.
            jitter: Duration::from_micros(id % 300_000),
            report_due: now.after(interval / 2 + Duration::from_micros(id % 250_000)),
            report_every: interval,
            quiet_every: interval * IDLE_WINDOWS,
            reported: Tick::ZERO,
            floor_per_sec: 0.0,
            reports_stored: false,
            listed_until: Tick::ZERO,
            window: 0,
            idle: 0,
            incarnation: clock.wall_ms(),
            lead: None,
            clock,
            fleet,
        }
    }

    pub(super) async fn run(mut self) {
        while self.shown.alive.load(Ordering::Acquire) && self.local.alive() {
            match self.wait().await {
                Some((Way::Push, Some(Delivery::Message(line)))) => self.heard_push(&line).await,
                Some((Way::Push, Some(Delivery::Gap))) => self.poll_due = self.clock.now(),
                Some((Way::Reports, Some(Delivery::Message(line)))) => self.heard_report(&line),
                // A subscription that has ended is made anew in its turn.
                Some((_, _)) | None => {}
            }
            self.turn().await;
        }
    }

    /// The next delivery, or `None` after a turn's time.
    async fn wait(&mut self) -> Option<(Way, Option<Delivery>)> {
        let mut turn = self.runtime.sleep(TURN);
        poll_fn(|cx| {
            if let Poll::Ready(delivery) = self.push.poll(cx) {
                return Poll::Ready(Some((Way::Push, delivery)));
            }
            if let Some(lead) = &mut self.lead
                && let Poll::Ready(delivery) = lead.poll_reports(cx)
            {
                return Poll::Ready(Some((Way::Reports, delivery)));
            }
            turn.as_mut().poll(cx).map(|()| None)
        })
        .await
    }

    async fn turn(&mut self) {
        let now = self.clock.now();
        // What an aggregator would hear there is its own.
        if self.lead.is_none() && !self.push.is_open() && self.subscribe_due <= now {
            self.subscribe_due = now.after(RETRY);
            let channel = self.fleet.name("push");
            let transport = self.fleet.transport.clone();
            let sub = self.call(transport.subscribe(channel)).await.ok();
            self.push.set(sub);
        }
        self.expire();
        if self.report_due <= now {
            self.report(now).await;
        }
        match self.lead.take() {
            Some(lead) => self.lead = lead.turn(self).await,
            None => self.watch(self.clock.now()).await,
        }
    }

    /// Looks at the lease where no push has come.
    async fn watch(&mut self, now: Tick) {
        let silent = now.since(self.heard);
        let due = silent > self.interval * 3 / 2 || self.lease.is_none();
        if !due || self.poll_due > now {
            return;
        }
        self.poll_due = now.after(self.interval);
        let transport = self.fleet.transport.clone();
        let slot = vec![self.fleet.name("lease")];
        let got = self.call(async { transport.get_many(slot).await.pop().unwrap_or(Ok(None)) });
        let Ok(lease) = got.await else { return };
        let now = self.clock.now();
        let moved = lease.is_some() && lease != self.lease;
        self.lease.clone_from(&lease);
        if let Some(beat) = lease.as_deref().and_then(read_beat) {
            if beat.issuer == self.id && self.fleet.lead {
                if beat.edition.version == 0 {
                    // An election whose outcome was not known had been won.
                    self.begin_to_lead(beat.edition.incarnation, lease.unwrap_or_default()).await;
                } else {
                    // Its own term, which it could not prove any more. The next one begins with a
                    // number of its own, since the versions begin again.
                    self.elect(lease, Duration::MAX).await;
                }
                return;
            }
            if moved {
                self.heartbeat(&beat).await;
                return;
            }
        } else if lease.is_none() && self.shown.follower.lock().list().is_none() {
            // Nobody has ever led, or not for long.
            self.elect(None, silent).await;
            return;
        }
        if now.since(self.heard) > self.interval * LEASE_INTERVALS + self.jitter {
            self.elect(lease, silent).await;
        }
    }

    /// Reaches for the lease.
    async fn elect(&mut self, lease: Option<Bytes>, silent: Duration) {
        if !self.fleet.lead || silent < self.jitter {
            // Not before its turn; look again soon.
            self.poll_due = self.clock.now().after(TURN);
            return;
        }
        let before = lease.as_deref().and_then(read_beat).map_or(0, |b| b.edition.incarnation);
        let seen = self.shown.follower.lock().seen().map_or(0, |e| e.incarnation);
        let incarnation = self.clock.wall_ms().max(before.max(seen).saturating_add(1));
        let edition = Edition { incarnation, version: 0 };
        let mine = Bytes::from(self.lease_line(&self.first_beat(edition)));
        let transport = self.fleet.transport.clone();
        let slot = self.fleet.name("lease");
        let taken = transport.compare_and_set(slot, lease, mine.clone(), KEPT);
        match self.call(taken).await {
            Ok(true) => self.begin_to_lead(incarnation, mine).await,
            // Somebody was faster, or the outcome is not known: the lease will tell.
            Ok(false) | Err(_) => self.poll_due = self.clock.now(),
        }
    }

    async fn begin_to_lead(&mut self, incarnation: u64, lease: Bytes) {
        let inherited = self.shown.follower.lock().list().cloned();
        count(&self.shown.counters.elections, 1);
        self.shown.counters.leads.store(true, Ordering::Relaxed);
        self.lease = Some(lease.clone());
        self.push.set(None);
        let region = self.fleet.above.as_ref();
        let region = region.map(|above| Region::join(above, &self.clock, &self.runtime, self.id));
        self.lead = Some(Lead::new(self, incarnation, lease, inherited.as_deref(), region));
    }

    /// Somebody else leads, or this process cannot prove any more that it does.
    pub(super) fn stepped_down(&mut self) {
        self.shown.counters.leads.store(false, Ordering::Relaxed);
        self.heard = self.clock.now();
        (self.poll_due, self.subscribe_due) = (self.heard, self.heard);
    }

    async fn heard_push(&mut self, line: &Bytes) {
        let message = if line.len() > LIST_LINE_MAX { None } else { wire::read(line).ok() };
        match message {
            Some(Message::List(list)) => {
                let (list, _) = list.read();
                if list.issuer != self.id && self.take_up(list) {
                    self.heard = self.clock.now();
                }
            }
            Some(Message::Lease(lease)) => {
                let beat = lease.read();
                if beat.issuer != self.id {
                    self.heartbeat(&beat).await;
                }
            }
            _ => {
                self.shown.follower.lock().refuse(crate::feed::Refusal::Malformed);
                count(&self.shown.counters.lines_refused, 1);
            }
        }
    }

    /// The aggregator lives; what it holds and this process does not is fetched.
    async fn heartbeat(&mut self, beat: &Heartbeat) {
        let wall = self.clock.wall_ms();
        let Ok(told) = self.follow(beat) else { return };
        let now = self.clock.now();
        let (least, most) = (self.fleet.interval, Duration::from_secs(60));
        (self.heard, self.interval) = (now, beat.interval.clamp(least, most));
        self.take_terms(beat);
        self.shown.counters.heard_canary(wall, beat.canary_ms, beat.ttl);
        if told == Beat::Extended || beat.edition.version == 0 {
            return;
        }
        let name = format!("list.{}", beat.edition.incarnation);
        let slot = vec![self.fleet.name(&name)];
        let transport = self.fleet.transport.clone();
        let got = self.call(async { transport.get_many(slot).await.pop().unwrap_or(Ok(None)) });
        let Ok(Some(line)) = got.await else { return };
        if line.len() <= LIST_LINE_MAX
            && let Ok(Message::List(list)) = wire::read(&line)
        {
            let (list, _) = list.read();
            self.take_up(FleetList { sent_ms: beat.sent_ms, ..list });
        }
    }

    /// Takes up a list; false when it was refused.
    pub(super) fn take_up(&mut self, list: FleetList) -> bool {
        let mut follower = self.shown.follower.lock();
        let taken = follower.handle_list(self.clock.now(), self.clock.wall_ms(), list);
        let (now, until) = (follower.list().cloned(), follower.poll_timeout());
        drop(follower);
        if taken == Ok(true) {
            self.obey(now, until);
        } else if let Some(until) = until {
            self.local.keep(until);
        }
        taken.is_ok()
    }

    /// What a heartbeat means for the list in force.
    pub(super) fn follow(&self, beat: &Heartbeat) -> std::result::Result<Beat, Refusal> {
        self.expire();
        let mut follower = self.shown.follower.lock();
        let told = follower.handle_heartbeat(self.clock.now(), self.clock.wall_ms(), beat)?;
        let until = follower.poll_timeout();
        drop(follower);
        if let Some(until) = until {
            self.local.keep(until);
        }
        Ok(told)
    }

    pub(super) fn in_force(&self) -> Option<Edition> {
        self.shown.follower.lock().list().map(|list| list.edition)
    }

    /// Lets go of a list that has run out.
    fn expire(&self) {
        let over = self.shown.follower.lock().handle_timeout(self.clock.now());
        if over {
            self.obey(None, None);
        }
    }

    fn obey(&self, list: Option<Arc<FleetList>>, until: Option<Tick>) {
        // Whoever obeys may run anything on the way: wakers, drops of a user's types.
        let in_force = list.as_ref().zip(until);
        let _ = catch_unwind(AssertUnwindSafe(|| self.local.apply(in_force)));
        self.shown.list.send_replace(list);
    }

    fn heard_report(&mut self, line: &Bytes) {
        let now = self.clock.now();
        let read = if line.len() > REPORT_LINE_MAX { None } else { wire::read(line).ok() };
        if let (Some(Message::Ordered(_)), Some(lead)) = (&read, &mut self.lead) {
            lead.look_now();
            return;
        }
        match (read.and_then(wire::read_report), &mut self.lead) {
            (Some(report), Some(lead)) => lead.report(self.reporter, now, report),
            _ => count(&self.shown.counters.lines_refused, 1),
        }
    }

    /// Tells the aggregator what was asked for here. Its own report goes the same way, and tells
    /// it that the way is open.
    async fn report(&mut self, now: Tick) {
        self.report_due = now.after(self.report_every);
        let report = self.local.take_report(now, self.floor_per_sec);
        let report = match (report, &self.lead) {
            (Some(report), _) => report,
            (None, Some(_)) => Report::nothing(),
            (None, None) => return,
        };
        self.idle = if report.entries.is_empty() { self.idle + 1 } else { 0 };
        let pause = match (&self.lead, report.is_nothing()) {
            (Some(_), _) => self.report_every * CANARY_WINDOWS,
            (None, true) => self.quiet_every,
            (None, false) if self.report_every > Duration::from_secs(1) => self.report_every,
            (None, false) => self.report_every * IDLE_WINDOWS,
        };
        // Turns come a little early or late.
        if self.idle > 1 && now.since(self.reported) + self.report_every / 2 < pause {
            return;
        }
        self.reported = now;
        self.window += 1;
        let from =
            From { process: self.reporter, incarnation: self.incarnation, window: self.window };
        let line = Bytes::from(wire::line(&wire::report(from, self.clock.wall_ms(), &report)));
        let bucket = self.id % CHANNELS;
        let transport = self.fleet.transport.clone();
        let channel = self.fleet.name(&format!("reports.{}", self.id % self.channels));
        let sent = self.call(transport.publish(channel, line.clone())).await;
        if sent.is_ok() && !self.reports_stored {
            return;
        }
        let slot = self.fleet.name(&format!("report.{:x}", self.id));
        let _ = self.call(transport.put(slot, line, KEPT)).await;
        if self.listed_until <= now && self.be_listed(bucket).await.is_ok() {
            self.listed_until = now.after(KEPT / 2);
        }
    }

    /// Puts this reporter into its bucket's list of those whose reports are to be read.
    async fn be_listed(&mut self, bucket: u64) -> Result<()> {
        let slot = self.fleet.name(&format!("stored.{bucket}"));
        let transport = self.fleet.transport.clone();
        for _ in 0..4 {
            let slots = vec![slot.clone()];
            let got =
                self.call(async { transport.get_many(slots).await.pop().unwrap_or(Ok(None)) });
            let before = got.await?;
            let mut ids = read_ids(before.as_deref());
            ids.retain(|id| *id != self.id);
            ids.insert(0, self.id);
            ids.truncate(STORED_MAX);
            let after = Bytes::from(serde_json::to_vec(&ids).unwrap_or_default());
            let set = transport.compare_and_set(slot.clone(), before, after, KEPT);
            if self.call(set).await? {
                return Ok(());
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "too many want to be listed"))
    }

    /// A call to the transport, with a limit to its time; failures are counted.
    pub(super) async fn call<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        let (mut call, mut limit) = (pin!(call), self.runtime.sleep(PATIENCE));
        let out = poll_fn(|cx| match call.as_mut().poll(cx) {
            Poll::Ready(out) => Poll::Ready(out),
            Poll::Pending => limit
                .as_mut()
                .poll(cx)
                .map(|()| Err(Error::unknown(ErrorKind::Timeout, "the transport took too long"))),
        })
        .await;
        count(&self.shown.counters.transport_errors, usize::from(out.is_err()));
        out
    }

    /// As whom it reports.
    pub(super) fn reporter(&self) -> u64 {
        self.reporter
    }

    /// How often, what and where to report.
    pub(super) fn take_terms(&mut self, beat: &Heartbeat) {
        let (least, most) = (self.fleet.interval, Duration::from_secs(60));
        self.report_every = beat.report_every.clamp(least, most);
        self.quiet_every = beat.quiet_every.clamp(self.report_every, QUIET_MAX);
        (self.floor_per_sec, self.reports_stored) = (beat.floor_per_sec, beat.reports_stored);
        self.channels = beat.channels.clamp(1, CHANNELS);
    }

    pub(super) fn lease_line(&self, beat: &Heartbeat) -> Vec<u8> {
        wire::line(&Message::Lease(Lease::of(beat)))
    }

    fn first_beat(&self, edition: Edition) -> Heartbeat {
        Heartbeat {
            issuer: self.id,
            edition,
            ttl: self.fleet.ttl,
            sent_ms: self.clock.wall_ms(),
            canary_ms: self.clock.wall_ms(),
            interval: self.fleet.interval,
            report_every: self.fleet.interval,
            quiet_every: self.fleet.interval * IDLE_WINDOWS,
            floor_per_sec: 0.0,
            reports_stored: false,
            channels: 1,
        }
    }
}

/// However it ends, also with the runtime that it runs on: nothing of the fleet's is in force.
impl Drop for Member {
    fn drop(&mut self) {
        self.obey(None, None);
        let _ = catch_unwind(AssertUnwindSafe(|| self.local.release()));
    }
}

pub(super) fn read_beat(line: &[u8]) -> Option<Heartbeat> {
    match wire::read(line) {
        Ok(Message::Lease(lease)) => Some(lease.read()),
        _ => None,
    }
}

/// Ids of a bucket; nothing where it cannot be read.
pub(super) fn read_ids(value: Option<&[u8]>) -> Vec<u64> {
    let short = value.filter(|v| v.len() <= STORED_MAX * 24);
    let ids: Vec<u64> = short.and_then(|v| serde_json::from_slice(v).ok()).unwrap_or_default();
    ids.into_iter().take(STORED_MAX).collect()
}

/// The slot of a reporter's stored report.
pub(super) fn report_slot(fleet: &Fleet, id: u64) -> Key {
    fleet.name(&format!("report.{id:x}"))
}
