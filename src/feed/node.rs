//! One process of a host's group: it serves, or it follows whoever does.
//!
//! Who holds the lock file's lock serves; the kernel lets go of it when its process ends, however
//! it ends. A follower whose connection ends tries for the lock at once, so that a group is without
//! a server for milliseconds; the list in force runs on meanwhile.

use super::dir::{Dir, FEED};
use super::fleet;
use super::lines::Lines;
use super::local::Local;
use super::options::Options;
use super::roots::Following;
use super::serve;
use super::stats::{Counters, FeedStats, Numbers, count};
use super::wire::{self, Hello, LIST_LINE_MAX, Message, Nack, Version};
use crate::engine::control::aggregate::{self, From};
use crate::engine::control::fleet::{FleetList, Heartbeat};
use crate::engine::control::follow::{Beat, Follower, Refusal};
use crate::engine::time::{Tick, nanos};
use parking_lot::Mutex;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Between two looks at what is due.
pub(super) const TURN: Duration = Duration::from_millis(50);

/// Who does not read, or does not answer, for this long is let go.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// A server that says nothing for this long, or for five halves of what it said to expect, is not
/// one.
const SILENCE: Duration = Duration::from_secs(3);
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Between two attempts to find a server.
const RETRY: Duration = Duration::from_millis(25);

pub(super) struct Node {
    pub(super) local: Arc<dyn Local>,
    pub(super) dir: Dir,
    pub(super) options: Options,
    pub(super) fleet: Option<fleet::Fleet>,
    pub(super) id: u64,
    pub(super) rates: bool,
    pub(super) follower: Mutex<Follower>,
    pub(super) counters: Counters,
    pub(super) reports: Mutex<(aggregate::Counts, usize)>,
    /// This process's part in the fleet, while it is its host's relay.
    pub(super) relay: Mutex<Option<Arc<fleet::Membership>>>,
    /// The list in force, for those who look; `None` when there is none.
    pub(super) shown: watch::Sender<Option<Arc<FleetList>>>,
    /// Made so far, to servers.
    pub(super) connections: AtomicU64,
}

impl Numbers for Node {
    fn numbers(&self) -> FeedStats {
        self.stats()
    }

    fn lapse(&self) {
        self.local.lapse();
    }
}

impl Node {
    pub(super) fn stats(&self) -> FeedStats {
        let follower = self.follower.lock();
        let (reports, reporters) = *self.reports.lock();
        FeedStats {
            edition: follower.list().map(|l| l.edition),
            lists: follower.counts(),
            reports,
            reporters: reporters as u64,
            unobeyed: self.local.unobeyed(),
            keys_too_long: self.local.too_long(),
            ..self.counters.read()
        }
    }

    /// Runs until the process needs it no more.
    pub(super) async fn run(&self) {
        while self.local.alive() {
            let lock = if self.options.serve { self.dir.try_lead() } else { Ok(None) };
            if let Ok(Some(lock)) = lock {
                count(&self.counters.elections, 1);
                let _ = serve::run(self).await;
                drop(self.relay.lock().take());
                self.counters.leads.store(false, Ordering::Relaxed);
                drop(lock);
            } else {
                let _ = self.follow().await;
            }
            self.expire();
            let _ = timeout(RETRY, std::future::pending::<()>()).await;
        }
    }

    /// Takes up a list; whether it was a new one.
    pub(super) fn take_up(&self, list: FleetList) -> Result<bool, Refusal> {
        let clock = self.local.clock();
        let mut follower = self.follower.lock();
        let new = follower.handle_list(clock.now(), clock.wall_ms(), list)?;
        let (list, until) = (follower.list().cloned(), follower.poll_timeout());
        drop(follower);
        if new {
            self.show(list, until);
        } else if let Some(until) = until {
            self.local.keep(until);
        }
        Ok(new)
    }

    pub(super) fn heartbeat(&self, beat: &Heartbeat) -> Result<Beat, Refusal> {
        let clock = self.local.clock();
        let wall = clock.wall_ms();
        self.expire();
        self.counters.heard_canary(wall, beat.canary_ms, beat.ttl);
        let mut follower = self.follower.lock();
        let told = follower.handle_heartbeat(clock.now(), wall, beat)?;
        let until = follower.poll_timeout();
        drop(follower);
        if let Some(until) = until {
            self.local.keep(until);
        }
        Ok(told)
    }

    /// Lets go of a list that has run out.
    pub(super) fn expire(&self) {
        let over = self.follower.lock().handle_timeout(self.local.clock().now());
        if over {
            self.show(None, None);
        }
    }

    /// The feed has ended: nothing of it is in force.
    pub(super) fn stop(&self) {
        self.show(None, None);
    }

    /// Whoever obeys may run anything on the way: wakers, drops of a user's types.
    fn show(&self, list: Option<Arc<FleetList>>, until: Option<Tick>) {
        let in_force = list.as_ref().zip(until);
        let _ = catch_unwind(AssertUnwindSafe(|| self.local.apply(in_force)));
        self.shown.send_replace(list);
    }

    /// Follows whoever serves, until the connection ends.
    async fn follow(&self) -> io::Result<()> {
        let stream = timeout(PATIENCE, self.dir.connect(FEED)).await??;
        let (from, mut to) = stream.into_split();
        let mut lines = Lines::new(from, LIST_LINE_MAX);
        let mut turn = interval(TURN);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut due = Due::new(self);
        let ask = due.roots.first(&*self.local);
        let hello = Hello { pid: std::process::id(), rates: self.rates, ask };
        self.send(&mut to, &Message::Hello(hello)).await?;
        while self.local.alive() {
            tokio::select! {
                line = lines.next() => {
                    let Some(line) = line? else { return Ok(()) };
                    count(&self.counters.bytes_in, line.len() + 1);
                    due.heard = self.local.clock().now();
                    self.handle_line(&line, &mut due, &mut to).await?;
                }
                _ = turn.tick() => {
                    self.expire();
                    let now = self.local.clock().now();
                    if now.since(due.heard) > due.silence {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    if let Some(message) = due.report(self, now) {
                        self.send(&mut to, &message).await?;
                    }
                    if let Some(message) = due.roots.next(&*self.local) {
                        self.send(&mut to, &message).await?;
                    }
                }
            }
        }
        Ok(())
    }

    async fn handle_line(
        &self,
        line: &[u8],
        due: &mut Due,
        to: &mut OwnedWriteHalf,
    ) -> io::Result<()> {
        let clock = self.local.clock();
        let from = clock.worked();
        let message = match wire::read(line) {
            Ok(message) => message,
            Err(refusal) => {
                self.follower.lock().refuse(refusal);
                count(&self.counters.lines_refused, 1);
                return Err(io::ErrorKind::InvalidData.into());
            }
        };
        match message {
            Message::List(list) => {
                let edition = list.edition();
                let (list, _) = list.read();
                let answer = match self.take_up(list) {
                    Ok(new) => {
                        if new {
                            let took = nanos(clock.worked().since(from));
                            self.counters.applied_ns.store(took, Ordering::Relaxed);
                        }
                        let (incarnation, version) = (edition.incarnation, edition.version);
                        Message::Ack(Version { incarnation, version })
                    }
                    Err(refusal) => Message::Nack(Nack {
                        incarnation: edition.incarnation,
                        version: edition.version,
                        reason: refusal.to_string(),
                    }),
                };
                self.send(to, &answer).await
            }
            Message::Rates(list) => {
                let (list, _) = list.read();
                let in_force = self.follower.lock().list().map(|l| l.edition);
                if in_force == Some(list.edition) {
                    self.shown.send_replace(Some(Arc::new(list)));
                }
                Ok(())
            }
            Message::Beat(beat) => {
                let beat = beat.read();
                due.take_terms(beat);
                // A list that is missing comes by itself: each connection starts with one.
                let _ = self.heartbeat(&beat);
                Ok(())
            }
            Message::Stands(stands) => {
                if let Some(last) = &due.beat {
                    let _ = self.heartbeat(&stands.read(last));
                }
                Ok(())
            }
            Message::Root(token, root) => {
                due.roots.answered(&*self.local, &self.counters, (token, &root));
                match due.roots.next(&*self.local) {
                    Some(message) => self.send(to, &message).await,
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    async fn send(&self, to: &mut OwnedWriteHalf, message: &Message) -> io::Result<()> {
        let line = wire::line(message);
        count(&self.counters.bytes_out, line.len());
        timeout(PATIENCE, to.write_all(&line)).await?
    }
}

/// When the next report is due, and what it need not name.
struct Due {
    at: Tick,
    every: Duration,
    quiet_every: Duration,
    silence: Duration,
    floor_per_sec: f64,
    /// The last full heartbeat of this connection.
    beat: Option<Heartbeat>,
    heard: Tick,
    reported: Tick,
    window: u64,
    incarnation: u64,
    idle: u32,
    roots: Following,
}

/// A process that has no key to name says so in every so many windows only.
const IDLE_WINDOWS: u32 = 4;

impl Due {
    fn new(node: &Node) -> Due {
        let clock = node.local.clock();
        let every = node.options.report_every;
        let made = node.connections.fetch_add(1, Ordering::Relaxed);
        Due {
            at: clock.now().after(every),
            every,
            quiet_every: every * IDLE_WINDOWS,
            silence: SILENCE,
            floor_per_sec: 0.0,
            beat: None,
            heard: clock.now(),
            reported: Tick::ZERO,
            window: 0,
            incarnation: clock.wall_ms(),
            idle: 0,
            roots: Following::new(node.id ^ made.rotate_left(40), !node.options.obey),
        }
    }

    fn take_terms(&mut self, beat: Heartbeat) {
        let (most, least) = (60 * PATIENCE, Duration::from_millis(100));
        self.every = beat.report_every.clamp(least, most);
        let least = self.every * IDLE_WINDOWS;
        self.quiet_every = beat.quiet_every.clamp(least, most.max(least));
        self.silence = (beat.interval.min(SILENCE_MAX) * 5 / 2).clamp(SILENCE, SILENCE_MAX);
        self.floor_per_sec = beat.floor_per_sec;
        self.beat = Some(beat);
    }

    fn report(&mut self, node: &Node, now: Tick) -> Option<Message> {
        if now < self.at {
            return None;
        }
        self.at = now.after(self.every);
        let report = node.local.take_report(now, self.floor_per_sec)?;
        self.idle = if report.entries.is_empty() { self.idle + 1 } else { 0 };
        let pause = if report.is_nothing() { self.quiet_every } else { self.every * IDLE_WINDOWS };
        // Turns come a little early or late.
        if self.idle > 1 && now.since(self.reported) + self.every / 2 < pause {
            return None;
        }
        self.reported = now;
        self.window += 1;
        let from = From { process: 0, incarnation: self.incarnation, window: self.window };
        let sent = node.local.clock().wall_ms();
        Some(wire::report(from, sent, &report))
    }
}
