//! A limit that many processes share, by leasing tokens from a record in the store.
//!
//! - **What**: the record is a bucket that fills at the pace of the limit. A process takes a block
//!   of tokens out of it by one compare-and-set and spends them by itself until they expire. The
//!   bucket has a timeline of its own, which nobody's wall clock moves: whoever writes the record
//!   moves it on by what has passed, on that process's clock, since that process read it.
//! - **Invariant**: tokens are spent when they are granted, whatever becomes of them. The timeline
//!   never runs ahead of true time. It may fall behind, while those who know it best are cut off,
//!   and catch up at once. So the grants of any span are at most the limit's share of it and two
//!   full buckets, which is why the bucket holds half of the slack; or a quarter, where processes
//!   that are cut off have a safe share, which is the other half. A new record starts empty and grants nothing for one lease, by when every
//!   block of the old one has expired.
//! - **Time and units**: ticks of the process, nanoseconds of the record's timeline, whole tokens.
//! - **Bounds**: two blocks, a few words; one request under way.
//! - **Source**: capacity leases, learning mode and the choices without a centre are doorman's; the
//!   bucket is that of [`admit`](super::super::data::admit).

use super::super::time::{Tick, nanos};
use std::time::Duration;

/// The pace of the record is slower than the limit by this, so that no clock that runs fast by less
/// makes it faster.
const DRIFT_PERMILLE: u64 = 1;

/// A write that was lost to others is tried again within so many round trips, as a power of two.
const LOSSES_MAX: u32 = 6;

/// What a process does while it has had no answer from the store for one lease, or while a new
/// record does not grant yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Without {
    /// It refuses. The limit holds.
    Refuse,
    /// It admits its part of a quarter of the slack. The limit holds, with its slack.
    SafeShare {
        /// How many processes share the limit at most.
        processes: u32,
    },
    /// It admits everything. The limit does not hold.
    Admit,
}

/// How much, and how exactly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Nanoseconds of the timeline per token.
    pub interval_ns: u64,
    /// Tokens that the bucket holds.
    pub burst: u64,
    /// How long a block is good for.
    pub lease: Duration,
    /// What becomes of calls without the centre.
    pub without: Without,
    /// Nanoseconds per token of a safe share.
    pub share_interval_ns: u64,
}

impl Terms {
    /// `tokens` in every `span`, exceeded by no more than `slack_permille`, in any window that is
    /// no shorter than `span`.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn new(
        tokens: u32,
        span: Duration,
        slack_permille: u16,
        lease: Duration,
        without: Without,
    ) -> Result<Terms, &'static str> {
        let (tokens, span_ns) = (u64::from(tokens), nanos(span));
        let slack = tokens * u64::from(slack_permille) / 1_000;
        if tokens == 0 || span_ns == 0 || lease.is_zero() {
            return Err("a shared limit needs tokens, a span and a lease above zero");
        }
        if slack < 2 {
            return Err("the slack of a shared limit is less than two tokens");
        }
        let (mut share_interval_ns, mut burst) = (u64::MAX, slack / 2);
        if let Without::SafeShare { processes } = without {
            let processes = u64::from(processes.max(1));
            burst = slack / 4;
            if burst < processes {
                return Err("a quarter of the slack is less than one token a process");
            }
            // One at once and one every so often: half of the slack, in a span.
            share_interval_ns = span_ns.saturating_mul(processes).div_ceil(burst);
        }
        let interval_ns = span_ns.saturating_mul(1_000 + DRIFT_PERMILLE).div_ceil(tokens * 1_000);
        Ok(Terms { interval_ns: interval_ns.max(1), burst, lease, without, share_interval_ns })
    }

    fn span_of(&self, tokens: u64) -> u64 {
        self.interval_ns.saturating_mul(tokens)
    }

    /// Between two requests of a process whose demand is met.
    fn hold(&self) -> Duration {
        self.lease / 2
    }
}

/// What the store holds for one limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Differs from record to record.
    pub nonce: u64,
    /// Rises with every write.
    pub version: u64,
    /// How far the timeline has come.
    pub now_ns: u64,
    /// When the bucket is full, on the timeline.
    pub full_at_ns: u64,
    /// Before this nothing is granted.
    pub opens_at_ns: u64,
}

impl Record {
    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> String {
        let Record { nonce, version, now_ns, full_at_ns, opens_at_ns } = self;
        format!("hs-limit-1 {nonce} {version} {now_ns} {full_at_ns} {opens_at_ns}")
    }

    /// `None` for anything else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Record> {
        let mut words = std::str::from_utf8(bytes).ok()?.strip_prefix("hs-limit-1 ")?.split(' ');
        let mut number = || words.next()?.parse().ok();
        let record = Record {
            nonce: number()?,
            version: number()?,
            now_ns: number()?,
            full_at_ns: number()?,
            opens_at_ns: number()?,
        };
        words.next().is_none().then_some(record)
    }
}

/// Tokens that were granted together.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Block {
    tokens: u64,
    until: Tick,
}

/// A point of the timeline that has certainly passed at a tick of this process.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    nonce: u64,
    at: Tick,
    now_ns: u64,
}

/// One process's part of one limit.
#[derive(Clone, Debug)]
pub struct Lessee {
    terms: Terms,
    blocks: [Block; 2],
    anchor: Option<Anchor>,
    seen: Option<(u64, u64)>,
    /// Tokens that the last call was refused for want of.
    short_of: u64,
    /// Tokens asked for since `counted_at`, granted or not.
    asked: u64,
    counted_at: Tick,
    demand_per_sec: f64,
    round_trip: Duration,
    /// From the first request for a block to the block, on average, and since when the next is
    /// asked for.
    obtained_in: Duration,
    asking_since: Option<Tick>,
    gap: Duration,
    /// Writes in a row that somebody else was ahead of.
    losses: u32,
    /// Of what the demand would take, in thousandths.
    size_permille: u64,
    next_at: Tick,
    answered_at: Tick,
    learning: bool,
    share_full_at: Tick,
}

/// A write of the record, and what it grants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proposal {
    /// The record to write.
    pub record: Record,
    /// Tokens that are granted if it is written.
    pub tokens: u64,
    sent_at: Tick,
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settled {
    /// The record was written.
    Won,
    /// Somebody else had written it meanwhile.
    Lost,
    /// The store failed, or nobody knows. What was granted, if it was, is nobody's.
    Failed,
}

impl Lessee {
    /// A process that holds nothing yet.
    #[must_use]
    pub fn new(terms: Terms, now: Tick) -> Lessee {
        Lessee {
            terms,
            blocks: [Block::default(); 2],
            anchor: None,
            seen: None,
            short_of: 0,
            asked: 0,
            counted_at: now,
            demand_per_sec: 0.0,
            round_trip: Duration::ZERO,
            obtained_in: Duration::ZERO,
            asking_since: None,
            gap: Duration::ZERO,
            losses: 0,
            size_permille: 1_000,
            next_at: now,
            answered_at: now,
            learning: false,
            share_full_at: now,
        }
    }

    /// Tokens that it holds.
    #[must_use]
    pub fn held(&self, now: Tick) -> u64 {
        self.blocks.iter().filter(|b| b.until > now).map(|b| b.tokens).sum()
    }

    /// Spends `n` tokens.
    ///
    /// # Errors
    /// How long until it is worth asking again.
    pub fn take(&mut self, now: Tick, n: u32) -> Result<(), Duration> {
        self.asked = self.asked.saturating_add(u64::from(n));
        let mut left = u64::from(n);
        if self.held(now) >= left {
            self.short_of = 0;
            for at in 0..2 {
                if self.blocks[at].until > now {
                    let taken = left.min(self.blocks[at].tokens);
                    self.blocks[at].tokens -= taken;
                    left -= taken;
                }
            }
            return Ok(());
        }
        self.short_of = left;
        let cut_off = now.since(self.answered_at) > self.terms.lease;
        match self.terms.without {
            Without::Admit if cut_off => return Ok(()),
            Without::SafeShare { .. } if cut_off || self.learning => {
                let wait = self.take_share(now, n);
                if wait.is_zero() {
                    return Ok(());
                }
            }
            _ => {}
        }
        let wait = self.next_at.since(now) + self.round_trip;
        Err(wait.clamp(Duration::from_millis(1), self.terms.lease))
    }

    /// Zero when it was admitted.
    fn take_share(&mut self, now: Tick, n: u32) -> Duration {
        let interval = self.terms.share_interval_ns;
        let wait = self.share_full_at.since(now);
        if wait.is_zero() {
            self.share_full_at = Tick(now.0.saturating_add(interval.saturating_mul(n.into())));
        }
        wait
    }

    /// Whether a request should be sent now.
    #[must_use]
    pub fn wants(&self, now: Tick) -> bool {
        let until_next = (2 * self.obtained_in).min(self.terms.hold() / 2).as_secs_f64();
        let enough = until_next * self.demand_per_sec;
        let held = self.held(now);
        now >= self.next_at && self.asked > 0 && (held < self.short_of || held as f64 <= enough)
    }

    /// How long until the next request may be sent.
    #[must_use]
    pub fn next_in(&self, now: Tick) -> Duration {
        self.next_at.since(now)
    }

    /// What to write, given the record that was read between `asked_at` and `now`; `None` to write
    /// nothing. `dice` are random bits.
    pub fn propose(
        &mut self,
        asked_at: Tick,
        now: Tick,
        record: Option<Record>,
        dice: u64,
    ) -> Option<Proposal> {
        self.answered_at = now;
        self.round_trip = average(self.round_trip, now.since(asked_at));
        self.asking_since.get_or_insert(asked_at);
        let Some(record) = record.filter(|r| self.is_sound(r)) else {
            return Some(self.begin(now, dice));
        };
        // Not when it was asked for: what passed before the answer was made is in it already.
        self.learn(now, &record);
        let now_ns = self.timeline(now);
        self.learning = now_ns < record.opens_at_ns;
        if self.learning {
            self.next_at = now.after(Duration::from_nanos(record.opens_at_ns - now_ns));
            return None;
        }
        let wanted = self.wanted(now);
        // Never longer than one bucket takes, also where somebody has written other terms.
        let empty = now_ns.saturating_add(self.terms.span_of(self.terms.burst));
        let full_at = record.full_at_ns.clamp(now_ns, empty);
        let room = empty - full_at;
        let tokens = wanted.min(room / self.terms.interval_ns);
        self.pace(tokens >= wanted, wanted);
        if tokens == 0 {
            self.back_off(now, dice);
            return None;
        }
        let record = Record {
            version: record.version + 1,
            now_ns,
            full_at_ns: full_at.saturating_add(self.terms.span_of(tokens)),
            ..record
        };
        Some(Proposal { record, tokens, sent_at: now })
    }

    /// The request has ended.
    pub fn settle(&mut self, now: Tick, proposal: &Proposal, how: Settled, dice: u64) {
        match how {
            Settled::Won => {
                self.answered_at = now;
                self.learn(now, &proposal.record);
                let until = proposal.sent_at.after(self.terms.lease);
                self.hold(now, proposal.tokens, until);
                let since = self.asking_since.take().unwrap_or(now);
                self.obtained_in = average(self.obtained_in, now.since(since));
                self.losses = 0;
                self.next_at = now.after(self.gap);
                if proposal.tokens == 0 {
                    self.learning = true;
                    self.next_at = now.after(self.terms.lease);
                }
            }
            Settled::Lost => {
                // Whoever comes in between makes one lose; drawn apart, one of them wins.
                self.answered_at = now;
                self.losses = (self.losses + 1).min(LOSSES_MAX);
                let span = (self.round_trip * (1 << self.losses)).min(self.terms.hold());
                self.next_at = now.after(span * (dice % 1_001) as u32 / 1_000);
            }
            Settled::Failed => self.fail(now, dice),
        }
    }

    /// The record could not be read.
    pub fn fail(&mut self, now: Tick, dice: u64) {
        self.gap = self.gap.max(self.terms.hold() / 4);
        self.back_off(now, dice);
    }

    /// Whether a record can be gone on with: it has not gone back, as after a fail-over that lost
    /// writes, and nobody has written into it what no process writes.
    fn is_sound(&self, r: &Record) -> bool {
        const MOST: u64 = 1 << 62;
        let regressed = self.seen.is_some_and(|(nonce, v)| nonce == r.nonce && r.version < v);
        let opens_in = r.opens_at_ns.saturating_sub(r.now_ns);
        !regressed && r.version < MOST && r.now_ns < MOST && opens_in <= nanos(self.terms.lease)
    }

    /// A record that starts empty, closed for one lease.
    fn begin(&mut self, now: Tick, dice: u64) -> Proposal {
        let record = Record {
            nonce: dice,
            version: 1,
            now_ns: 0,
            full_at_ns: self.terms.span_of(self.terms.burst),
            opens_at_ns: nanos(self.terms.lease),
        };
        Proposal { record, tokens: 0, sent_at: now }
    }

    fn learn(&mut self, at: Tick, record: &Record) {
        self.seen = Some((record.nonce, record.version));
        let better = self
            .anchor
            .is_none_or(|a| a.nonce != record.nonce || self.timeline(at) < record.now_ns);
        if better {
            self.anchor = Some(Anchor { nonce: record.nonce, at, now_ns: record.now_ns });
        }
    }

    /// How far the timeline has certainly come.
    fn timeline(&self, now: Tick) -> u64 {
        self.anchor.map_or(0, |a| a.now_ns.saturating_add(nanos(now.since(a.at))))
    }

    /// Tokens that would meet the demand until the next request.
    fn wanted(&mut self, now: Tick) -> u64 {
        let elapsed = now.since(self.counted_at);
        if elapsed > self.terms.hold() / 8 {
            let fresh = self.asked as f64 / elapsed.as_secs_f64();
            self.demand_per_sec = if self.demand_per_sec == 0.0 {
                fresh
            } else {
                0.5 * self.demand_per_sec + 0.5 * fresh
            };
            (self.asked, self.counted_at) = (0, now);
        }
        let until = self.terms.hold().max(2 * self.obtained_in).as_secs_f64();
        let tokens = self.demand_per_sec * until * self.size_permille as f64 / 1_000.0;
        let short_of = self.short_of.saturating_sub(self.held(now));
        // A whole bucket for one would leave nothing for the others.
        let most = (self.terms.burst / 4).max(short_of).min(self.terms.burst / 2);
        (tokens as u64).max(short_of).clamp(1, most.max(1))
    }

    /// A request that is not met in full halves the block and spaces the requests out; one that is
    /// does the opposite.
    fn pace(&mut self, met: bool, wanted: u64) {
        if met {
            self.size_permille = (self.size_permille * 2).min(1_000);
            self.gap /= 2;
        } else {
            self.size_permille = (self.size_permille / 2).max(500);
            let refilled = Duration::from_nanos(self.terms.span_of(wanted));
            self.gap = (self.gap * 3 / 2).max(refilled).min(self.terms.hold());
        }
    }

    /// The next request comes later, at a time drawn at random.
    fn back_off(&mut self, now: Tick, dice: u64) {
        self.gap = (self.gap * 2).max(self.round_trip).min(self.terms.hold());
        let part = 500 + dice % 501;
        self.next_at = now.after(self.gap * part as u32 / 1_000);
    }

    fn hold(&mut self, now: Tick, tokens: u64, until: Tick) {
        for expired in self.blocks.iter_mut().filter(|b| b.until <= now) {
            expired.tokens = 0;
        }
        let [first, second] = &mut self.blocks;
        if first.tokens == 0 {
            *first = std::mem::take(second);
        }
        if second.tokens == 0 {
            *second = Block { tokens, until };
        } else {
            *second = Block { tokens: second.tokens + tokens, until: until.min(second.until) };
        }
    }
}

fn average(old: Duration, new: Duration) -> Duration {
    if old.is_zero() { new } else { (old * 3 + new) / 4 }
}

#[cfg(test)]
#[path = "leasing_sim.rs"]
mod sim;
