//! A simulation of a shared limit: processes, one record, a network that delays, loses and splits.
//!
//! - **What**: 50 processes that want more than the limit allows, in steps of a millisecond.
//! - **Invariant**: checked after each run, in every window no shorter than the span: grants and
//!   safe shares are at most the limit with its slack; spent tokens likewise, of the window and one
//!   lease.
//! - **Time and units**: milliseconds of true time; each process has a clock of its own offset and
//!   rate.
//! - **Bounds**: `HEATSINK_SEEDS` seeds, 12 by default.
//! - **Source**: the scenarios are those of doorman's simulator: loss of the centre, restarts of it
//!   and of processes, spikes; and partitions, pauses and lost replies.

use super::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const PROCESSES: usize = 50;
const LIMIT: u64 = 5_000;
const SPAN_MS: u64 = 1_000;
const SLACK_PERMILLE: u16 = 100;
const LEASE: Duration = Duration::from_secs(1);

/// Ways to get it wrong; each must be caught.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutant {
    /// A new record starts full and open.
    NoLearning,
    /// The timeline is counted from when the record was asked for.
    AnchorAtSend,
    /// Blocks never expire.
    NoExpiry,
    /// The bucket is forgotten when the record is written.
    NoCharge,
}

#[derive(Clone, Copy, Default)]
struct Faults {
    partitions: bool,
    /// One in so many milliseconds; zero for never.
    centre_restarts: u64,
    process_restarts: bool,
    pauses: bool,
    lost_replies: bool,
}

impl Faults {
    fn all() -> Faults {
        Faults {
            partitions: true,
            centre_restarts: 8_000,
            process_restarts: true,
            pauses: true,
            lost_replies: true,
        }
    }
}

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A request under way, with the true times at which it reaches the store and is answered.
enum Phase {
    Idle,
    Read {
        asked_at: Tick,
        arrives: u64,
        replies: u64,
        seen: Option<Option<Record>>,
    },
    Write {
        expected: Option<Record>,
        proposal: Proposal,
        arrives: u64,
        replies: u64,
        won: Option<bool>,
    },
}

struct Process {
    lessee: Lessee,
    phase: Phase,
    offset_ns: u64,
    /// Parts in a million by which its clock is fast, and 500.
    drift: u64,
    cut_off_until: u64,
    paused_until: u64,
    /// Takes a millisecond, in thousandths.
    demand_permille: u64,
    owed_permille: u64,
}

impl Process {
    fn clock(&self, now_ms: u64) -> Tick {
        Tick(self.offset_ns + now_ms * (MS + self.drift - 500))
    }
}

#[derive(Default)]
struct Log {
    /// True time in ms, tokens: what the record granted and what safe shares admitted.
    grants: Vec<(u64, u64)>,
    spent: Vec<(u64, u64)>,
    writes: u64,
    conflicts: u64,
}

struct World {
    dice: Dice,
    terms: Terms,
    faults: Faults,
    mutant: Option<Mutant>,
    record: Option<Record>,
    processes: Vec<Process>,
    log: Log,
    centre_down_until: u64,
}

impl World {
    fn new(seed: u64, without: Without, faults: Faults, demand_permille: u64) -> World {
        let mut dice = Dice(seed);
        let span = Duration::from_millis(SPAN_MS);
        let terms = Terms::new(LIMIT as u32, span, SLACK_PERMILLE, LEASE, without).unwrap();
        let processes = (0..PROCESSES)
            .map(|_| {
                let offset_ns = dice.below(1 << 50);
                Process {
                    lessee: Lessee::new(terms, Tick(offset_ns)),
                    phase: Phase::Idle,
                    offset_ns,
                    drift: dice.below(1_001),
                    cut_off_until: 0,
                    paused_until: 0,
                    demand_permille,
                    owed_permille: 0,
                }
            })
            .collect();
        World {
            dice,
            terms,
            faults,
            mutant: None,
            record: None,
            processes,
            log: Log::default(),
            centre_down_until: 0,
        }
    }

    fn run(&mut self, to_ms: u64) {
        for now in 0..to_ms {
            self.misbehave(now);
            let first = self.dice.below(PROCESSES as u64) as usize;
            for i in 0..PROCESSES {
                self.step((first + i) % PROCESSES, now);
            }
        }
    }

    fn misbehave(&mut self, now: u64) {
        let often = self.faults.centre_restarts;
        if often > 0 && self.dice.one_in(often) {
            self.record = None;
            self.centre_down_until = now + self.dice.below(often / 4 + 1);
        }
        let at = self.dice.below(PROCESSES as u64) as usize;
        if self.faults.partitions && self.dice.one_in(300) {
            self.processes[at].cut_off_until = now + self.dice.below(6_000);
        }
        if self.faults.partitions && self.dice.one_in(20_000) {
            self.processes.iter_mut().step_by(2).for_each(|p| p.cut_off_until = now + 5_000);
        }
        if self.faults.process_restarts && self.dice.one_in(400) {
            let local = self.processes[at].clock(now);
            self.processes[at].lessee = Lessee::new(self.terms, local);
            self.processes[at].phase = Phase::Idle;
        }
        if self.faults.pauses && self.dice.one_in(500) {
            self.processes[at].paused_until = now + self.dice.below(4_000);
        }
    }

    fn reachable(&self, i: usize, now: u64) -> bool {
        now >= self.processes[i].cut_off_until && now >= self.centre_down_until
    }

    fn step(&mut self, i: usize, now: u64) {
        self.serve(i, now);
        if now < self.processes[i].paused_until {
            return;
        }
        self.answer(i, now);
        let local = self.processes[i].clock(now);
        let process = &mut self.processes[i];
        process.owed_permille += process.demand_permille;
        while process.owed_permille >= 1_000 {
            process.owed_permille -= 1_000;
            let held = process.lessee.held(local);
            if process.lessee.take(local, 1).is_ok() {
                self.log.spent.push((now, 1));
                if held == 0 {
                    // A safe share: no record has granted it.
                    self.log.grants.push((now, 1));
                }
            }
        }
        if matches!(process.phase, Phase::Idle) && process.lessee.wants(local) {
            let (arrives, replies) = self.travel(now);
            let asked_at = local;
            self.processes[i].phase = Phase::Read { asked_at, arrives, replies, seen: None };
        }
    }

    fn travel(&mut self, now: u64) -> (u64, u64) {
        let arrives = now + 1 + self.dice.below(3);
        (arrives, arrives + 1 + self.dice.below(3))
    }

    /// The store's side of a request.
    fn serve(&mut self, i: usize, now: u64) {
        let reachable = self.reachable(i, now);
        match &mut self.processes[i].phase {
            Phase::Read { arrives, seen, .. } if *arrives == now && reachable => {
                *seen = Some(self.record);
            }
            Phase::Write { expected, proposal, arrives, won, .. }
                if *arrives == now && reachable =>
            {
                let wins = *expected == self.record;
                *won = Some(wins);
                if wins {
                    self.record = Some(proposal.record);
                    self.log.grants.push((now, proposal.tokens));
                    self.log.writes += 1;
                } else {
                    self.log.conflicts += 1;
                }
            }
            _ => {}
        }
    }

    /// The process's side of an answer, or of its absence.
    fn answer(&mut self, i: usize, now: u64) {
        let (local, roll) = (self.processes[i].clock(now), self.dice.next());
        let lost = self.faults.lost_replies && self.dice.one_in(50);
        let reachable = self.reachable(i, now) && !lost;
        let mutant = self.mutant;
        let (arrives, replies) = self.travel(now);
        let process = &mut self.processes[i];
        match std::mem::replace(&mut process.phase, Phase::Idle) {
            Phase::Read { asked_at, replies: due, seen, .. } if due <= now => {
                let Some(expected) = seen.filter(|_| reachable) else {
                    return process.lessee.fail(local, roll);
                };
                if let Some(record) = expected.filter(|_| mutant == Some(Mutant::AnchorAtSend)) {
                    process.lessee.learn(asked_at, &record);
                }
                let proposal = process.lessee.propose(asked_at, local, expected, roll);
                let Some(mut proposal) = proposal else { return };
                if mutant == Some(Mutant::NoLearning) && proposal.tokens == 0 {
                    (proposal.record.full_at_ns, proposal.record.opens_at_ns) = (0, 0);
                }
                if mutant == Some(Mutant::NoCharge) && proposal.tokens > 0 {
                    proposal.record.full_at_ns = expected.map_or(0, |r| r.full_at_ns);
                }
                process.phase = Phase::Write { expected, proposal, arrives, replies, won: None };
            }
            Phase::Write { mut proposal, replies: due, won, .. } if due <= now => {
                let how = match won.filter(|_| reachable) {
                    Some(true) => Settled::Won,
                    Some(false) => Settled::Lost,
                    None => Settled::Failed,
                };
                if mutant == Some(Mutant::NoExpiry) {
                    proposal.sent_at = Tick::MAX;
                }
                process.lessee.settle(local, &proposal, how, roll);
            }
            under_way => process.phase = under_way,
        }
    }
}

/// The window, of all that are at least so long, in which `log` most exceeds `allowed`: by how much.
fn worst(log: &[(u64, u64)], least_ms: u64, allowed: impl Fn(u64) -> f64) -> f64 {
    let mut log = log.to_vec();
    log.sort_unstable();
    let mut worst = f64::MIN;
    for window in [1_000, 1_250, 1_500, 1_750, 2_000, 3_000, 5_000, 10_000] {
        let (mut from, mut sum) = (0, 0);
        for &(at, tokens) in &log {
            sum += tokens;
            while log[from].0 + window.max(least_ms) <= at {
                sum -= log[from].1;
                from += 1;
            }
            worst = worst.max(sum as f64 - allowed(window.max(least_ms)));
        }
    }
    worst
}

fn allowed(window_ms: u64) -> f64 {
    let per_ms = LIMIT as f64 / SPAN_MS as f64;
    per_ms * window_ms as f64 * (1_000.0 + f64::from(SLACK_PERMILLE)) / 1_000.0
}

fn total(log: &[(u64, u64)], from: u64, to: u64) -> f64 {
    log.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, n)| *n as f64).sum()
}

fn seeds() -> u64 {
    std::env::var("HEATSINK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(12)
}

/// By how much the worst window of a run exceeds what is allowed: of grants, of spent tokens.
fn excess(world: &World) -> (f64, f64) {
    let lease = LEASE.as_millis() as u64;
    let spent = worst(&world.log.spent, SPAN_MS, |w| allowed(w + lease));
    (worst(&world.log.grants, SPAN_MS, allowed), spent)
}

#[test]
fn grants_never_exceed_the_limit_and_its_slack_whatever_fails() {
    let share = Without::SafeShare { processes: PROCESSES as u32 };
    for seed in 0..seeds() {
        for without in [Without::Refuse, share] {
            let mut world = World::new(seed, without, Faults::all(), 400);
            world.run(40_000);
            let (grants, spent) = excess(&world);
            assert!(grants <= 0.0, "seed {seed}, {without:?}: {grants} above");
            assert!(spent <= 0.0, "seed {seed}, {without:?}: {spent} spent above");
            assert!(world.log.writes > 100, "seed {seed}: the run grants something");
        }
    }
}

#[test]
fn what_is_allowed_is_used_in_steady_state() {
    // Thousandths of a take per process and millisecond: four times the limit, little above it, and
    // ten processes that want it all.
    for (seed, demand, hungry) in
        [(1, 400, PROCESSES), (2, 110, PROCESSES), (3, 2_000, 10), (4, 9_000, 1)]
    {
        let mut world = World::new(seed, Without::Refuse, Faults::default(), demand);
        world.processes[hungry..].iter_mut().for_each(|p| p.demand_permille = 0);
        world.run(30_000);
        let spent = total(&world.log.spent, 5_000, 30_000) / (25.0 * LIMIT as f64);
        let (grants, _) = excess(&world);
        println!(
            "{hungry} processes at {demand}: {:.1} % used, {:.0} writes/s, {:.0} conflicts/s, worst \
             window {:.0} below what is allowed",
            100.0 * spent,
            world.log.writes as f64 / 30.0,
            world.log.conflicts as f64 / 30.0,
            -grants,
        );
        assert!(spent >= 0.95, "{hungry} processes at {demand}: {spent}");
        assert!(grants <= 0.0);
    }
}

#[test]
fn less_demand_than_the_limit_is_met() {
    let mut world = World::new(5, Without::Refuse, Faults::default(), 50);
    world.run(20_000);
    let asked = 15.0 * 50.0 * PROCESSES as f64;
    let spent = total(&world.log.spent, 5_000, 20_000);
    assert!(spent >= 0.98 * asked, "{spent} of {asked}");
}

#[test]
fn cut_off_processes_refuse_or_admit_as_they_were_told() {
    let share = Without::SafeShare { processes: PROCESSES as u32 };
    for (without, least, most) in
        [(Without::Refuse, 0.0, 0.0), (share, 0.9, 1.1), (Without::Admit, 100.0, f64::MAX)]
    {
        let mut world = World::new(6, without, Faults::default(), 400);
        world.run(5_000);
        world.processes.iter_mut().for_each(|p| p.cut_off_until = u64::MAX);
        let mut later = std::mem::take(&mut world.log);
        for now in 5_000..15_000 {
            (0..PROCESSES).for_each(|i| world.step(i, now));
        }
        std::mem::swap(&mut later, &mut world.log);
        // After the blocks have expired; a quarter of the slack is 125 tokens a second.
        let spent = total(&later.spent, 8_000, 15_000) / 7.0 / 125.0;
        assert!((least..=most).contains(&spent), "{without:?}: {spent}");
    }
}

#[test]
fn every_way_to_get_it_wrong_is_caught() {
    for mutant in [Mutant::NoLearning, Mutant::AnchorAtSend, Mutant::NoExpiry, Mutant::NoCharge] {
        let caught = (0..40).any(|seed| {
            let mut faults = Faults::all();
            if mutant == Mutant::NoLearning {
                // One soon after the other, and nothing else: this is what it is for.
                faults = Faults { centre_restarts: 100, ..Faults::default() };
            }
            let mut world = World::new(seed, Without::Refuse, faults, 400);
            world.mutant = Some(mutant);
            world.run(40_000);
            let (grants, spent) = excess(&world);
            grants > 0.0 || spent > 0.0
        });
        assert!(caught, "{mutant:?} was not caught");
    }
}

#[test]
fn a_record_that_goes_back_is_begun_anew() {
    let terms = Terms::new(1_000, Duration::from_secs(1), 100, LEASE, Without::Refuse).unwrap();
    let mut lessee = Lessee::new(terms, Tick(1));
    let old = Record { nonce: 7, version: 3, now_ns: 10, full_at_ns: 10, opens_at_ns: 0 };
    lessee.take(Tick(1), 1).unwrap_err();
    let won = lessee.propose(Tick(1), Tick(2), Some(old), 9).unwrap();
    assert!(won.tokens > 0 && won.record.version == 4);
    lessee.settle(Tick(3), &won, Settled::Won, 9);
    let again = lessee.propose(Tick(3), Tick(4), Some(old), 9).unwrap();
    assert_eq!((again.tokens, again.record.nonce, again.record.version), (0, 9, 1));
    assert!(again.record.opens_at_ns > 0);
}

#[test]
fn a_record_reads_back_and_nothing_else_does() {
    let record = Record { nonce: 1, version: 2, now_ns: 3, full_at_ns: u64::MAX, opens_at_ns: 5 };
    assert_eq!(Record::decode(record.encode().as_bytes()), Some(record));
    for wrong in ["", "hs-limit-1 1 2 3 4", "hs-limit-1 1 2 3 4 5 6", "hs-limit-1 1 2 3 4 -5", "9"]
    {
        assert_eq!(Record::decode(wrong.as_bytes()), None, "{wrong}");
    }
}

proptest! {
    /// Whatever lies under the name: no panic, no more than a bucket, and in the end it grants.
    #[test]
    fn any_record_is_gone_on_with_or_begun_anew(
        version: u64,
        now_ns: u64,
        full_at_ns: u64,
        opens_at_ns: u64,
        wait_ms in 0u64..10_000,
    ) {
        let terms = Terms::new(1_000, Duration::from_secs(1), 100, LEASE, Without::Refuse).unwrap();
        let mut now = Tick(1_000_000_000);
        let mut lessee = Lessee::new(terms, now);
        let mut record = Some(Record { nonce: 7, version, now_ns, full_at_ns, opens_at_ns });
        let mut granted = false;
        for roll in 0..4 {
            let _ = lessee.take(now, 1);
            now = now.after(Duration::from_millis(1));
            if let Some(proposal) = lessee.propose(now, now, record, roll) {
                prop_assert!(proposal.tokens <= terms.burst);
                granted |= proposal.tokens > 0;
                record = Some(proposal.record);
                lessee.settle(now, &proposal, Settled::Won, roll);
            }
            now = now.after(LEASE + Duration::from_millis(wait_ms));
        }
        prop_assert!(granted);
    }
}

#[test]
fn terms_that_cannot_hold_are_refused() {
    let second = Duration::from_secs(1);
    assert!(Terms::new(10, second, 100, LEASE, Without::Refuse).is_err());
    assert!(Terms::new(0, second, 500, LEASE, Without::Refuse).is_err());
    let share = Without::SafeShare { processes: 50 };
    assert!(Terms::new(1_900, second, 100, LEASE, share).is_err());
    assert!(Terms::new(2_000, second, 100, LEASE, share).is_ok());
    assert!(Terms::new(1_000, second, 100, LEASE, Without::Refuse).is_ok());
}
