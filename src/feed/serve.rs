//! The serving process of a host's group: followers in, reports in, one list out.
//!
//! Everything that a follower can make it do is capped: followers, the length of a line, messages
//! a second, and the time that a follower may take to read.

use super::admin;
use super::dir::{ADMIN, FEED};
use super::fleet;
use super::group::{Group, Published};
use super::lines::Lines;
use super::node::{Node, PATIENCE, TURN};
use super::roots::{Reading, Serving};
use super::stats::count;
use super::wire::{self, Message, REPORT_LINE_MAX};
use crate::engine::control::aggregate::From;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// Messages that a follower may send a second, and how many it may save up.
const MESSAGES_PER_SEC: f64 = 20.0;
const MESSAGES_BURST: f64 = 40.0;

/// Operators' connections at a time.
const OPERATORS_MAX: usize = 16;

/// Serves for as long as the process lives and its sockets do.
pub(super) async fn run(node: &Node) -> io::Result<()> {
    let feed = node.dir.listen(FEED)?;
    let operators = node.dir.listen(ADMIN)?;
    // From here on it answers.
    node.counters.leads.store(true, Ordering::Relaxed);
    let (inherited, seen) = {
        let follower = node.follower.lock();
        (follower.list().cloned(), follower.seen())
    };
    let local = node.local.clone();
    let relays = node.fleet.as_ref().is_some_and(|fleet| fleet.obey);
    let inherited = (inherited.as_deref(), seen);
    let group = Arc::new(Group::new(&*local, &node.options, node.id, inherited, relays));
    let mut tasks: JoinSet<()> = JoinSet::new();
    // Followers are tasks of their own; they share what outlives this call only through `group`.
    let shared = Arc::new(Conns::new(node));
    let relay = node.fleet.clone().map(|options| Arc::new(fleet::relay(&group, &local, options)));
    node.relay.lock().clone_from(&relay);
    let (mut made, mut turn, mut reading) = (0_u64, interval(TURN), Reading::default());
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while node.local.alive() {
        tokio::select! {
            accepted = feed.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let full = shared.followers.load(Ordering::Relaxed) >= node.options.followers_max;
                if full || !node.dir.admits(&stream) {
                    count(&node.counters.peers_refused, 1);
                    continue;
                }
                made += 1;
                shared.followers.fetch_add(1, Ordering::Relaxed);
                let (group, shared, local) = (group.clone(), shared.clone(), local.clone());
                let follower = Conn { id: made, group, shared, local };
                tasks.spawn(async move { let _ = follower.run(stream).await; });
            }
            accepted = operators.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let full = shared.operators.load(Ordering::Relaxed) >= OPERATORS_MAX;
                if full || !node.dir.admits(&stream) {
                    count(&node.counters.peers_refused, 1);
                    continue;
                }
                shared.operators.fetch_add(1, Ordering::Relaxed);
                let (group, shared, local) = (group.clone(), shared.clone(), local.clone());
                let relay = relay.clone();
                tasks.spawn(async move {
                    let _ = admin::serve(stream, &group, &local, relay.as_deref()).await;
                    shared.operators.fetch_sub(1, Ordering::Relaxed);
                });
            }
            root = reading.done() => shared.roots.end(root),
            _ = turn.tick() => {
                shared.roots.turn(&*local, &node.counters, &mut reading);
                let rates = shared.rates.load(Ordering::Relaxed) > 0;
                let followers = shared.followers.load(Ordering::Relaxed);
                let (list, beat) = group.tick(&*local, followers, rates);
                if let Some(list) = list {
                    let _ = node.take_up(list);
                }
                if let Some(beat) = beat {
                    let _ = node.heartbeat(&beat);
                }
                node.expire();
                *node.reports.lock() = group.operate(|all| (all.counts(), all.reporters()));
                node.counters.keys_unlisted.store(group.unlisted(), Ordering::Relaxed);
                shared.settle(node);
                while tasks.try_join_next().is_some() {}
            }
        }
    }
    Ok(())
}

/// What the connections count together, until the node is told.
struct Conns {
    followers: AtomicUsize,
    operators: AtomicUsize,
    rates: AtomicUsize,
    counts: super::stats::Counters,
    roots: Serving,
}

impl Conns {
    fn new(_node: &Node) -> Conns {
        Conns {
            followers: AtomicUsize::new(0),
            operators: AtomicUsize::new(0),
            rates: AtomicUsize::new(0),
            counts: super::stats::Counters::default(),
            roots: Serving::default(),
        }
    }

    fn settle(&self, node: &Node) {
        let (from, to) = (&self.counts, &node.counters);
        for (from, to) in [
            (&from.lines_refused, &to.lines_refused),
            (&from.throttled, &to.throttled),
            (&from.slow, &to.slow),
            (&from.nacks, &to.nacks),
            (&from.bytes_in, &to.bytes_in),
            (&from.bytes_out, &to.bytes_out),
        ] {
            to.fetch_add(from.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// One follower.
struct Conn {
    id: u64,
    group: Arc<Group>,
    shared: Arc<Conns>,
    local: Arc<dyn super::local::Local>,
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.shared.followers.fetch_sub(1, Ordering::Relaxed);
        self.group.forget(self.id);
        self.shared.roots.forget(self.id);
    }
}

/// What a follower has been sent, and what it asked for.
#[derive(Default)]
struct Sent {
    edition: crate::engine::control::fleet::Edition,
    rates_seq: u64,
    beat_seq: u64,
    terms_seq: u64,
    wants_rates: bool,
}

impl Conn {
    async fn run(&self, stream: UnixStream) -> io::Result<()> {
        let (from, mut to) = stream.into_split();
        let mut lines = Lines::new(from, REPORT_LINE_MAX);
        let (mut news, mut told) = (self.group.subscribe(), self.shared.roots.subscribe());
        let mut sent = Sent::default();
        let (mut allowance, mut filled) = (MESSAGES_BURST, Instant::now());
        news.mark_changed();
        let out = loop {
            tokio::select! {
                changed = news.changed() => {
                    if changed.is_err() {
                        break Ok(());
                    }
                    let all = news.borrow_and_update().clone();
                    if let Err(e) = self.pass_on(&all, &mut sent, &mut to).await {
                        count(&self.shared.counts.slow, usize::from(e.kind() == io::ErrorKind::TimedOut));
                        break Err(e);
                    }
                }
                changed = told.changed() => {
                    if changed.is_err() {
                        break Ok(());
                    }
                    let answer = told.borrow_and_update().to(self.id);
                    if let Some(answer) = answer
                        && let Err(e) = self.send(&mut to, &wire::line(&answer)).await
                    {
                        count(&self.shared.counts.slow, usize::from(e.kind() == io::ErrorKind::TimedOut));
                        break Err(e);
                    }
                }
                line = lines.next() => {
                    let line = match line {
                        Ok(Some(line)) => line,
                        Ok(None) => break Ok(()),
                        Err(e) => {
                            let long = e.kind() == io::ErrorKind::InvalidData;
                            count(&self.shared.counts.lines_refused, usize::from(long));
                            break Err(e);
                        }
                    };
                    count(&self.shared.counts.bytes_in, line.len() + 1);
                    let now = Instant::now();
                    allowance += MESSAGES_PER_SEC * (now - filled).as_secs_f64();
                    (allowance, filled) = (allowance.min(MESSAGES_BURST), now);
                    if allowance < 1.0 {
                        count(&self.shared.counts.throttled, 1);
                        continue;
                    }
                    allowance -= 1.0;
                    if !self.handle(&line, &mut sent) {
                        count(&self.shared.counts.lines_refused, 1);
                        break Err(io::ErrorKind::InvalidData.into());
                    }
                }
            }
        };
        if sent.wants_rates {
            self.shared.rates.fetch_sub(1, Ordering::Relaxed);
        }
        out
    }

    /// False for a line that is none of the feed's.
    fn handle(&self, line: &[u8], sent: &mut Sent) -> bool {
        match wire::read(line) {
            Ok(Message::Hello(hello)) => {
                if let Some(token) = hello.ask {
                    self.shared.roots.ask(self.id, token);
                }
                if hello.rates && !sent.wants_rates {
                    sent.wants_rates = true;
                    self.shared.rates.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok(Message::Ask(token)) => self.shared.roots.ask(self.id, token),
            Ok(Message::Nack(_)) => count(&self.shared.counts.nacks, 1),
            Ok(message) => {
                if let Some((from, _, report)) = wire::read_report(message) {
                    // Who it is, this end of the connection knows better.
                    let from = From { process: self.id, ..from };
                    let _ = self.group.report(self.local.clock().now(), from, report);
                }
            }
            Err(_) => return false,
        }
        true
    }

    async fn pass_on(
        &self,
        all: &Published,
        sent: &mut Sent,
        to: &mut OwnedWriteHalf,
    ) -> io::Result<()> {
        if all.edition > sent.edition {
            self.send(to, &all.list).await?;
            sent.edition = all.edition;
        }
        if all.beat_seq > sent.beat_seq {
            let known = all.terms_seq == sent.terms_seq;
            self.send(to, if known { &all.stands } else { &all.beat }).await?;
            (sent.beat_seq, sent.terms_seq) = (all.beat_seq, all.terms_seq);
        }
        if sent.wants_rates && all.rates_seq > sent.rates_seq {
            self.send(to, &all.rates).await?;
            sent.rates_seq = all.rates_seq;
        }
        Ok(())
    }

    async fn send(&self, to: &mut OwnedWriteHalf, line: &[u8]) -> io::Result<()> {
        count(&self.shared.counts.bytes_out, line.len());
        timeout(PATIENCE, to.write_all(line)).await?
    }
}
