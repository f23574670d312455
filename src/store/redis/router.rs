//! Which node a command goes to, and what follows from what the node says.
//!
//! - **What**: a table from slot to shard, and the state machine of one command's redirects.
//! - **Invariant**: a write is sent again only after a node has said that it did not execute it.
//! - **Time and units**: ticks passed in; waits are durations.
//! - **Bounds**: 16,384 slots, 1,024 shards, 16 redirects a command, waits up to its deadline.
//! - **Source**: Redis Cluster specification, "Redirection and resharding".

use crate::engine::time::Tick;
use std::sync::Arc;
use std::time::Duration;

pub(super) const SLOTS: usize = 16_384;
/// The specification advises at most 1,000 nodes.
const SHARDS_MAX: usize = 1_024;
const REPLICAS_MAX: usize = 16;
/// Redirects of one command that are followed at once; then each waits first.
const REDIRECTS_MAX: u32 = 16;
/// A node that says "not yet" is asked again after 5 ms, then after twice as long each time.
const WAIT_FIRST: Duration = Duration::from_millis(5);
/// What a command may wait longer than it had to: well under the 250 ms that count as a stall.
const WAIT_MAX: Duration = Duration::from_millis(40);
const NOBODY: u16 = u16::MAX;

/// Where a node listens: a name or an address, and a port.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct Addr {
    pub(super) host: Arc<str>,
    pub(super) port: u16,
}

impl Addr {
    pub(super) fn new(host: &str, port: u16) -> Addr {
        Addr { host: host.into(), port }
    }

    /// An address as the node `from` gave it: an empty or unknown host means that node's own.
    pub(super) fn given(host: &str, port: u16, from: &Addr) -> Addr {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || host == "?" {
            return Addr { host: from.host.clone(), port };
        }
        Addr::new(host, port)
    }

    /// Reads `host:port` of a redirect that the node `from` gave.
    pub(super) fn parse(text: &str, from: &Addr) -> Option<Addr> {
        let (host, port) = text.rsplit_once(':')?;
        Some(Addr::given(host, port.parse().ok()?, from))
    }
}

/// A range of slots with the nodes that serve it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) master: Addr,
    pub(super) replicas: Vec<Addr>,
}

/// Which node serves which slot, as far as this client knows.
#[derive(Clone, Debug)]
pub(super) struct Table {
    shards: Vec<Shard>,
    owner: Vec<u16>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Shard {
    pub(super) master: Addr,
    pub(super) replicas: Vec<Addr>,
}

impl Shard {
    fn has(&self, addr: &Addr) -> bool {
        self.master == *addr || self.replicas.contains(addr)
    }
}

impl Table {
    #[cfg(test)]
    fn empty() -> Table {
        Table { shards: Vec::new(), owner: vec![NOBODY; SLOTS] }
    }

    /// One node that serves everything.
    pub(super) fn single(addr: Addr) -> Table {
        let shard = Shard { master: addr, replicas: Vec::new() };
        Table { shards: vec![shard], owner: vec![0; SLOTS] }
    }

    /// The table that a node reported, after this one. A shard keeps its number as long as one of
    /// its nodes stays, so through a failover; numbers of shards that are gone are given again.
    /// Ranges out of bounds are left out.
    pub(super) fn refreshed(&self, ranges: &[Range]) -> Table {
        let shards = self.numbered(ranges);
        let mut owner = vec![NOBODY; SLOTS];
        for range in ranges {
            let number = shards.iter().position(|s| s.master == range.master);
            let (first, last) = (usize::from(range.first), usize::from(range.last));
            if let Some(number) = number.and_then(|n| u16::try_from(n).ok())
                && first <= last
                && last < SLOTS
            {
                owner[first..=last].fill(number);
            }
        }
        Table { shards, owner }
    }

    fn numbered(&self, ranges: &[Range]) -> Vec<Shard> {
        let mut fresh: Vec<Shard> = Vec::new();
        for range in ranges {
            if fresh.len() < SHARDS_MAX && !fresh.iter().any(|s| s.master == range.master) {
                let replicas = range.replicas.iter().take(REPLICAS_MAX).cloned().collect();
                fresh.push(Shard { master: range.master.clone(), replicas });
            }
        }
        let mut places: Vec<Option<Shard>> = vec![None; self.shards.len()];
        // First those that kept their master, then those that a replica of the old one leads.
        for kept in [Shard::leads, Shard::succeeds] {
            fresh.retain(|shard| {
                let old = self
                    .shards
                    .iter()
                    .zip(&mut places)
                    .find(|(old, place)| place.is_none() && kept(shard, old));
                let Some((_, place)) = old else { return true };
                *place = Some(shard.clone());
                false
            });
        }
        let mut fresh = fresh.into_iter();
        for place in &mut places {
            if place.is_none() {
                *place = fresh.next();
            }
        }
        // A gap at the end closes; one in the middle keeps its old nodes, without slots.
        while places.last().is_some_and(Option::is_none) {
            places.pop();
        }
        let old = self.shards.iter();
        let kept = places.iter().zip(old).map(|(p, old)| p.clone().unwrap_or_else(|| old.clone()));
        kept.chain(fresh).take(SHARDS_MAX).collect()
    }

    fn number(&mut self, addr: &Addr) -> Option<u16> {
        let found = self.shards.iter().position(|s| s.master == *addr);
        let number = found.or_else(|| {
            let room = self.shards.len() < SHARDS_MAX;
            room.then(|| {
                self.shards.push(Shard { master: addr.clone(), replicas: Vec::new() });
                self.shards.len() - 1
            })
        });
        number.and_then(|n| u16::try_from(n).ok())
    }

    /// The number of the shard that owns a slot.
    pub(super) fn owner(&self, slot: u16) -> Option<usize> {
        let number = *self.owner.get(usize::from(slot))?;
        (number != NOBODY).then(|| usize::from(number))
    }

    /// Learns from a redirect that `slot` has moved; whether that was news.
    pub(super) fn moved(&mut self, slot: u16, to: &Addr) -> bool {
        if usize::from(slot) >= SLOTS || self.serves(slot, to) {
            return false;
        }
        let Some(number) = self.number(to) else { return false };
        self.owner[usize::from(slot)] = number;
        true
    }

    /// True when `addr` is the master of `slot` here.
    pub(super) fn serves(&self, slot: u16, addr: &Addr) -> bool {
        self.owner(slot).is_some_and(|n| self.shards[n].master == *addr)
    }

    /// How many shards of this table are led by one of their replicas in `next`.
    pub(super) fn failovers(&self, next: &Table) -> u64 {
        let led = |(old, new): &(&Shard, &Shard)| old.replicas.contains(&new.master);
        self.shards.iter().zip(&next.shards).filter(led).count() as u64
    }

    /// The shards by their numbers.
    pub(super) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// True when some slot has no owner.
    pub(super) fn has_hole(&self) -> bool {
        self.owner.contains(&NOBODY)
    }
}

impl Shard {
    fn leads(&self, old: &Shard) -> bool {
        self.master == old.master
    }

    fn succeeds(&self, old: &Shard) -> bool {
        old.has(&self.master) || self.has(&old.master)
    }
}

/// What came back for one command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// A reply, or an error that waiting and other nodes do not change.
    Final,
    /// The slot has moved for good.
    Moved { slot: u16, to: Addr },
    /// This once, ask that node.
    Ask { to: Addr },
    /// The node did not execute it for now: TRYAGAIN, CLUSTERDOWN, LOADING, MASTERDOWN.
    NotNow,
    /// The node did not execute it: it is a replica and no master (any more).
    ReadOnly,
    /// Nothing was sent, and soon it may be: the connection is being made again.
    Unsent,
    /// Sent, and then the connection failed or the time was up.
    Lost,
}

/// What to do about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Give the caller what came back.
    Deliver,
    /// Send it to this node, after ASKING if so.
    Send { to: Addr, asking: bool },
    /// Wait, then send it to the slot's owner of then.
    Wait(Duration),
}

/// The redirects of one command.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    write: bool,
    deadline: Tick,
    redirects: u32,
    wait: Duration,
}

impl Attempt {
    pub(super) fn new(write: bool, deadline: Tick) -> Attempt {
        Attempt { write, deadline, redirects: 0, wait: WAIT_FIRST }
    }

    /// What to do after `answer`.
    pub(super) fn next(&mut self, answer: Answer, now: Tick) -> Step {
        match answer {
            Answer::Final => Step::Deliver,
            Answer::Lost if self.write => Step::Deliver,
            Answer::Moved { to, .. } => self.redirect(to, false, now),
            Answer::Ask { to } => self.redirect(to, true, now),
            Answer::NotNow | Answer::ReadOnly | Answer::Unsent | Answer::Lost => self.pause(now),
        }
    }

    fn redirect(&mut self, to: Addr, asking: bool, now: Tick) -> Step {
        self.redirects += 1;
        if self.redirects > REDIRECTS_MAX || now >= self.deadline {
            // Two nodes that send a command back and forth disagree for a moment.
            return self.pause(now);
        }
        Step::Send { to, asking }
    }

    fn pause(&mut self, now: Tick) -> Step {
        if now.after(self.wait) >= self.deadline {
            return Step::Deliver;
        }
        let wait = self.wait;
        self.wait = (wait * 2).min(WAIT_MAX);
        Step::Wait(wait)
    }
}

/// When the table may be asked for again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    next: Tick,
    wait: Duration,
}

impl Pace {
    /// Ten moves a second are learned from their redirects; the whole table comes after them.
    const FIRST: Duration = Duration::from_millis(100);
    const MAX: Duration = Duration::from_secs(2);

    pub(super) fn new() -> Pace {
        Pace { next: Tick::ZERO, wait: Pace::FIRST }
    }

    /// How long to wait before the table is asked for, which it then is. `jitter` is a random
    /// number: the clients of one cluster must not ask together.
    pub(super) fn ask(&mut self, now: Tick, jitter: u64) -> Duration {
        let quiet = now.since(self.next) > Pace::MAX;
        let wait = if quiet { Duration::ZERO } else { self.next.since(now) };
        self.wait = if quiet { Pace::FIRST } else { (self.wait * 2).min(Pace::MAX) };
        let spread = self.wait / 2 + self.wait / 2048 * u32::try_from(jitter % 1024).unwrap_or(0);
        self.next = now.after(wait + spread);
        wait
    }

    /// True when the table is older than half a minute: replicas come and go without a redirect.
    pub(super) fn is_old(&self, now: Tick) -> bool {
        now.since(self.next) > Duration::from_secs(30)
    }

    /// A table without doubts came back: the next doubt is a new one.
    pub(super) fn settled(&mut self) {
        self.wait = Pace::FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(i: u16) -> Addr {
        Addr::new("node", i)
    }

    fn range(first: u16, last: u16, master: u16, replicas: &[u16]) -> Range {
        let replicas = replicas.iter().map(|&i| node(i)).collect();
        Range { first, last, master: node(master), replicas }
    }

    #[test]
    fn a_redirect_may_leave_out_the_host_or_hold_a_name_or_six_colons() {
        let from = Addr::new("redis-a.internal", 1);
        let parse = |text| Addr::parse(text, &from);
        assert_eq!(parse(":7001"), Some(Addr::new("redis-a.internal", 7001)));
        assert_eq!(parse("?:7001"), Some(Addr::new("redis-a.internal", 7001)));
        assert_eq!(parse("redis-b.internal:7"), Some(Addr::new("redis-b.internal", 7)));
        assert_eq!(parse("::1:7001"), Some(Addr::new("::1", 7001)));
        assert_eq!(parse("[::1]:7001"), Some(Addr::new("::1", 7001)));
        assert_eq!(parse("nonsense"), None);
    }

    #[test]
    fn a_shard_keeps_its_number_through_a_failover_and_a_reordered_report() {
        let first = Table::empty().refreshed(&[range(0, 9, 1, &[4]), range(10, 19, 2, &[5])]);
        assert_eq!((first.owner(0), first.owner(10)), (Some(0), Some(1)));
        let failed_over = first.refreshed(&[range(10, 19, 5, &[2]), range(0, 9, 1, &[4])]);
        assert_eq!((failed_over.owner(0), failed_over.owner(10)), (Some(0), Some(1)));
        assert!(failed_over.serves(10, &node(5)));
        assert_eq!((first.failovers(&failed_over), first.failovers(&first)), (1, 0));
        let emptied = failed_over.refreshed(&[range(0, 19, 5, &[2])]);
        assert_eq!((emptied.owner(0), emptied.owner(10)), (Some(1), Some(1)));
        let joined = emptied.refreshed(&[range(0, 9, 7, &[]), range(10, 19, 5, &[])]);
        assert_eq!((joined.owner(0), joined.owner(10)), (Some(0), Some(1)));
        assert_eq!(joined.shards().len(), 2);
    }

    #[test]
    fn a_table_in_doubt_is_asked_for_ever_more_rarely() {
        let (mut pace, mut now, mut asked) = (Pace::new(), Tick(3_600_000_000_000), 0);
        assert_eq!(pace.ask(now, 7), Duration::ZERO);
        let end = now.after(Duration::from_secs(20));
        while now < end {
            now = now.after(pace.ask(now, 7).max(Duration::from_millis(1)));
            asked += 1;
        }
        assert!((10..30).contains(&asked), "{asked} in 20 s");
        assert_eq!(pace.ask(now.after(Duration::from_secs(60)), 7), Duration::ZERO);
    }

    fn answers() -> impl Strategy<Value = Answer> {
        prop_oneof![
            Just(Answer::Final),
            (0..SLOTS as u16, 0..9u16).prop_map(|(slot, i)| Answer::Moved { slot, to: node(i) }),
            (0..9u16).prop_map(|i| Answer::Ask { to: node(i) }),
            Just(Answer::NotNow),
            Just(Answer::ReadOnly),
            Just(Answer::Unsent),
            Just(Answer::Lost),
        ]
    }

    proptest! {
        #[test]
        fn a_write_is_never_sent_again_once_it_may_have_been_executed(
            seen in prop::collection::vec(answers(), 1..200),
        ) {
            let mut attempt = Attempt::new(true, Tick(1_000_000_000));
            for answer in seen {
                let may_have_run = matches!(answer, Answer::Final | Answer::Lost);
                let step = attempt.next(answer, Tick(0));
                prop_assert!(!may_have_run || step == Step::Deliver);
            }
        }

        #[test]
        fn every_command_ends_by_its_deadline(
            seen in prop::collection::vec(answers(), 600..601),
            write: bool,
        ) {
            let mut now = Tick(0);
            let deadline = Tick(1_000_000_000);
            let mut attempt = Attempt::new(write, deadline);
            let (mut sends, mut ended) = (0, false);
            for answer in seen {
                match attempt.next(answer, now) {
                    Step::Deliver => { ended = true; break }
                    Step::Wait(d) => now = now.after(d),
                    Step::Send { .. } => sends += 1,
                }
            }
            prop_assert!(ended && now <= deadline && sends <= REDIRECTS_MAX);
        }

        #[test]
        fn the_table_follows_a_naive_map(
            reports in prop::collection::vec(
                prop::collection::vec((0..20_000u16, 0..20_000u16, 0..9u16, 0..9u16), 0..20), 1..4),
            moves in prop::collection::vec((0..20_000u16, 0..9u16), 0..50),
        ) {
            let (mut table, mut naive) = (Table::empty(), vec![None; SLOTS]);
            for report in &reports {
                naive.fill(None);
                for &(first, last, i, _) in report {
                    if first <= last && usize::from(last) < SLOTS {
                        naive[usize::from(first)..=usize::from(last)].fill(Some(node(i)));
                    }
                }
                let ranges: Vec<Range> =
                    report.iter().map(|&(first, last, i, r)| range(first, last, i, &[r])).collect();
                table = table.refreshed(&ranges);
            }
            for &(slot, i) in &moves {
                table.moved(slot, &node(i));
                if usize::from(slot) < SLOTS {
                    naive[usize::from(slot)] = Some(node(i));
                }
            }
            for (slot, want) in naive.iter().enumerate() {
                let owner = table.owner(slot as u16).map(|n| &table.shards()[n].master);
                prop_assert_eq!(owner, want.as_ref());
            }
            prop_assert_eq!(table.has_hole(), naive.contains(&None));
        }
    }
}
