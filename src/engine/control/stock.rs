//! Units of one thing in buckets on different shards: the record, and the work that moves units.
//!
//! - **What**: one record a stock, replaced by compare-and-set only: how many units there have ever
//!   been, in how many buckets, and the work under way (a filling, or moves between buckets). The
//!   work is written down before it begins, and each of its steps may be repeated by anybody.
//! - **Invariant**: free + held + sold + in transit = initial, once no work is under way; never
//!   more than that, whoever crashes where. No work under way means that nothing is in transit.
//! - **Time and units**: none; units of stock.
//! - **Bounds**: 256 buckets; a work has at most one step a bucket; a record of at most 16 KiB.
//! - **Source**: escrow of a hot row in sub-rows (O'Neil, 1986); intents that are written first and
//!   carried out by idempotent steps, as a write-ahead log has them.
//!
//! A move takes the units under an id of its own, adds them under the same id, and ends its hold.
//! Two processes may carry out one move at a time, one of them long after the other. So before a
//! move that found too few units is given up, its second half is poisoned: nobody adds what a third
//! has put back.

use crate::store::{End, Ended, Id, Once, Take};
use std::fmt::Write;

/// Buckets of one stock at most.
pub const BUCKETS_MAX: usize = 256;

/// Fewer units a bucket are not evened out: what moves cannot be taken for some round trips, and
/// each of those rows is asked four times.
const WORTH_MOVING: i64 = 4;

/// Longer records are not read.
const RECORD_BYTES_MAX: usize = 16 << 10;

/// Units to be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// The bucket that loses them.
    pub from: usize,
    /// The bucket that gets them.
    pub to: usize,
    /// How many.
    pub amount: u64,
}

/// What is under way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Work {
    /// Nothing.
    None,
    /// New units, so many for each bucket.
    Fill(Vec<u64>),
    /// Units between buckets.
    Move(Vec<Move>),
}

/// The record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Raised by every new work; it names the work's steps.
    pub epoch: u64,
    /// Drawn by whoever wrote it: by it a writer recognises its own.
    pub nonce: u64,
    /// Places the buckets; constant over the life of the stock.
    pub seed: u64,
    /// Buckets; constant over the life of the stock.
    pub buckets: usize,
    /// Units that were ever filled in, those of the filling under way included.
    pub initial: u64,
    /// Of a balance, whose first bucket is its main account: what it never falls below. Its units
    /// count from there.
    pub floor: Option<i64>,
    /// What is under way.
    pub work: Work,
}

/// Equal parts of `units`, the first ones greater by one where it does not come out even.
#[must_use]
pub fn shares(units: u64, buckets: usize) -> Vec<u64> {
    let n = buckets as u64;
    (0..n).map(|i| units / n + u64::from(i < units % n)).collect()
}

impl Record {
    /// The first record of a stock; `None` when the numbers are outside the limits.
    #[must_use]
    pub fn first(units: u64, buckets: usize, seed: u64, nonce: u64) -> Option<Record> {
        let fits = (1..=BUCKETS_MAX).contains(&buckets) && i64::try_from(units).is_ok();
        let work = Work::Fill(if fits { shares(units, buckets) } else { return None });
        Some(Record { epoch: 1, nonce, seed, buckets, initial: units, floor: None, work })
    }

    /// The first record of a balance; `None` when it would begin below its floor, or when the
    /// numbers are outside the limits.
    #[must_use]
    pub fn account(
        opening: i64,
        floor: i64,
        stripes: usize,
        seed: u64,
        nonce: u64,
    ) -> Option<Record> {
        let units = opening.checked_sub(floor).and_then(|n| u64::try_from(n).ok())?;
        let buckets = stripes.checked_add(1).filter(|_| stripes > 0)?;
        let first = Record::first(units, buckets, seed, nonce)?;
        let mut parts = vec![0; buckets];
        parts[0] = units;
        Some(Record { floor: Some(floor), work: Work::Fill(parts), ..first })
    }

    /// The number of the first unit that the filling under way brings to `bucket`: the units of
    /// all fillings are counted through.
    #[must_use]
    pub fn first_number(&self, bucket: usize) -> u64 {
        let Work::Fill(parts) = &self.work else { return self.initial };
        self.initial.saturating_sub(parts.iter().skip(bucket).sum())
    }

    /// The record with `units` more to be filled in; `None` while work is under way, or when they
    /// would not fit.
    #[must_use]
    pub fn grown(&self, units: u64, nonce: u64) -> Option<Record> {
        let initial = self.initial.checked_add(units).filter(|n| i64::try_from(*n).is_ok())?;
        let work = Work::Fill(shares(units, self.buckets));
        Some(Record { initial, ..self.with(work, nonce)? })
    }

    /// The record with `moves` to be made; `None` while work is under way or when there are none.
    #[must_use]
    pub fn moving(&self, moves: Vec<Move>, nonce: u64) -> Option<Record> {
        if moves.is_empty() { None } else { self.with(Work::Move(moves), nonce) }
    }

    fn with(&self, work: Work, nonce: u64) -> Option<Record> {
        if self.work != Work::None {
            return None;
        }
        Some(Record { epoch: self.epoch + 1, nonce, work, ..self.clone() })
    }

    /// The record after all steps of its work are done.
    #[must_use]
    pub fn rested(&self, nonce: u64) -> Record {
        Record { nonce, work: Work::None, ..self.clone() }
    }

    /// The steps of the work under way, in any order.
    #[must_use]
    pub fn steps(&self) -> Vec<Step> {
        // All steps of a work have come to their end before the next work begins.
        let id = |i: usize| Id::in_turn(format!("m:{i}"), self.epoch);
        match &self.work {
            Work::None => Vec::new(),
            Work::Fill(parts) => {
                let parts = parts.iter().enumerate();
                parts.map(|(to, &amount)| Step::fill(to, amount, id(to))).collect()
            }
            Work::Move(moves) => {
                moves.iter().enumerate().map(|(i, m)| Step::carry(*m, id(i))).collect()
            }
        }
    }

    /// The record as bytes.
    #[must_use]
    pub fn encode(&self) -> String {
        let Record { epoch, nonce, seed, buckets, initial, floor, work } = self;
        let mut text = match floor {
            None => String::from("hs-stock1"),
            Some(floor) => format!("hs-account1 {floor}"),
        };
        let _ = write!(text, " {epoch} {nonce} {seed} {buckets} {initial}");
        // Writing to a string does not fail.
        match work {
            Work::None => text.push_str(" idle"),
            Work::Fill(parts) => {
                text.push_str(" fill");
                for n in parts {
                    let _ = write!(text, " {n}");
                }
            }
            Work::Move(moves) => {
                text.push_str(" move");
                for m in moves {
                    let _ = write!(text, " {}:{}:{}", m.from, m.to, m.amount);
                }
            }
        }
        text
    }

    /// Reads a record; `None` when the bytes are something else.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Record> {
        let text = std::str::from_utf8(bytes).ok().filter(|t| t.len() <= RECORD_BYTES_MAX)?;
        let mut words = text.split(' ');
        let floor = match words.next()? {
            "hs-stock1" => None,
            "hs-account1" => Some(words.next()?.parse().ok()?),
            _ => return None,
        };
        let mut number = || words.next()?.parse::<u64>().ok();
        let (epoch, nonce, seed) = (number()?, number()?, number()?);
        let (buckets, initial) = (usize::try_from(number()?).ok()?, number()?);
        let known = |b: usize| b < buckets;
        let work = match words.next()? {
            "idle" => words.next().is_none().then_some(Work::None)?,
            "fill" => {
                let parts: Option<Vec<u64>> = words.map(|w| w.parse().ok()).collect();
                Work::Fill(parts.filter(|p| p.len() == buckets)?)
            }
            "move" => {
                let moves: Option<Vec<Move>> = words.map(Move::parse).collect();
                let fit = |m: &Move| known(m.from) && known(m.to) && m.from != m.to && m.amount > 0;
                Work::Move(moves.filter(|m| !m.is_empty() && m.len() <= buckets)?)
                    .checked(|work| matches!(work, Work::Move(m) if m.iter().all(fit)))?
            }
            _ => return None,
        };
        let least = if floor.is_some() { 2 } else { 1 };
        let sound = (least..=BUCKETS_MAX).contains(&buckets) && i64::try_from(initial).is_ok();
        sound.then_some(Record { epoch, nonce, seed, buckets, initial, floor, work })
    }
}

impl Work {
    fn checked(self, holds: impl FnOnce(&Work) -> bool) -> Option<Work> {
        if holds(&self) { Some(self) } else { None }
    }
}

impl Move {
    fn parse(word: &str) -> Option<Move> {
        let mut parts = word.split(':');
        let (from, to) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let amount = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some(Move { from, to, amount })
    }
}

/// Moves that even out `levels`, the units in each bucket. Empty when no bucket is below half of
/// the mean, or when so few are left that they would be sold while they are moved.
#[must_use]
pub fn evened(levels: &[i64]) -> Vec<Move> {
    let total: u64 = levels.iter().map(|&n| n.max(0).unsigned_abs()).sum();
    let buckets = levels.len().max(1) as u64;
    let (low, high) = ((total / buckets) as i64, total.div_ceil(buckets) as i64);
    if low < WORTH_MOVING || levels.iter().all(|&n| n > low / 2) {
        return Vec::new();
    }
    let of = |keep: &dyn Fn(i64) -> i64| -> Vec<(usize, i64)> {
        let all = levels.iter().enumerate().map(|(i, &n)| (i, keep(n)));
        let mut some: Vec<_> = all.filter(|(_, n)| *n > 0).collect();
        some.sort_by_key(|(i, n)| (-n, *i));
        some
    };
    let mut surplus = of(&|n| n - high).into_iter();
    let mut have = surplus.next();
    let mut moves = Vec::new();
    for (to, mut wants) in of(&|n| low - n) {
        while wants > 0
            && moves.len() < levels.len()
            && let Some((from, left)) = have
        {
            let amount = wants.min(left);
            moves.push(Move { from, to, amount: amount.unsigned_abs() });
            wants -= amount;
            have = if left > amount { Some((from, left - amount)) } else { surplus.next() };
        }
    }
    moves
}

/// Moves of everything into bucket `to`.
#[must_use]
pub fn gathered(levels: &[i64], to: usize) -> Vec<Move> {
    let of = |(from, &n): (usize, &i64)| Move { from, to, amount: n.max(0).unsigned_abs() };
    levels.iter().enumerate().map(of).filter(|m| m.from != to && m.amount > 0).collect()
}

/// What a step asks of the store. All of it may be asked again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// Take so many units from this bucket, the step's id being the hold.
    Take(usize, u64),
    /// Add so many to this bucket, once under the step's id.
    Add(usize, u64),
    /// See to it that nobody adds to this bucket under the step's id any more.
    Poison(usize),
    /// End the step's hold on this bucket.
    End(usize, End),
}

/// What the store answered; without an answer the same is asked again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// To [`Ask::Take`].
    Took(Take),
    /// To [`Ask::Add`] and [`Ask::Poison`].
    Once(Once),
    /// To [`Ask::End`].
    Ended(Ended),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Take,
    Add,
    Poison,
    End(End),
    Done { moved: bool },
}

/// Ways to get it wrong, each of which a test must notice.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// A move adds before it takes.
    PutsFirst,
    /// A move that finds too few units is given up without poisoning its second half.
    NoPoison,
    /// A caller asks the next bucket although nobody knows whether this one has given.
    ProbesOn,
    /// Sold out is said because all buckets were empty a moment ago.
    SoldOutFromMemory,
    /// A debit is refused by one picture of the stripes.
    RefusesEarly,
    /// A debit whose answer was lost is refused like one that was never asked for.
    ForgetsDoubt,
    /// A credit whose answer was lost is made on another stripe.
    CreditsElsewhere,
}

/// One step of a work, as far as one process has got with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Its id, the same for everybody who carries it out.
    pub id: Id,
    from: Option<usize>,
    to: usize,
    amount: u64,
    phase: Phase,
    /// Only to show that the tests notice.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) broken: Option<Mutant>,
}

impl Step {
    fn new(id: Id, from: Option<usize>, to: usize, amount: u64) -> Step {
        let phase = if from.is_some() { Phase::Take } else { Phase::Add };
        Step {
            id,
            from,
            to,
            amount,
            phase,
            #[cfg(any(test, feature = "testing"))]
            broken: None,
        }
    }

    fn fill(to: usize, amount: u64, id: Id) -> Step {
        Step::new(id, None, to, amount)
    }

    fn carry(m: Move, id: Id) -> Step {
        Step::new(id, Some(m.from), m.to, m.amount)
    }

    /// Breaks a rule, to show that a test notices.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn break_by(&mut self, mutant: Option<Mutant>) {
        self.broken = mutant;
    }

    #[cfg(not(any(test, feature = "testing")))]
    pub(crate) fn break_by(&mut self, _: Option<Mutant>) {}

    #[cfg(any(test, feature = "testing"))]
    fn is_broken(&self, by: Mutant) -> bool {
        self.broken == Some(by) && self.from.is_some()
    }

    #[cfg(not(any(test, feature = "testing")))]
    const fn is_broken(&self, _: Mutant) -> bool {
        false
    }

    /// What is to be asked now; `None` when it is done.
    #[must_use]
    pub fn ask(&self) -> Option<Ask> {
        let from = self.from.unwrap_or(self.to);
        Some(match self.phase {
            Phase::Take if self.is_broken(Mutant::PutsFirst) => Ask::Add(self.to, self.amount),
            Phase::Add if self.is_broken(Mutant::PutsFirst) => Ask::Take(from, self.amount),
            Phase::Take => Ask::Take(from, self.amount),
            Phase::Add => Ask::Add(self.to, self.amount),
            Phase::Poison => Ask::Poison(self.to),
            Phase::End(end) => Ask::End(from, end),
            Phase::Done { .. } => return None,
        })
    }

    /// The store's answer to what was asked.
    pub fn heard(&mut self, answer: Answer) {
        let give_back = Phase::End(End::Back);
        self.phase = match (self.phase, answer) {
            (Phase::Take, Answer::Took(Take::Taken { .. })) => Phase::Add,
            (Phase::Take, Answer::Took(Take::Short { .. })) if self.is_broken(Mutant::NoPoison) => {
                give_back
            }
            (Phase::Take, Answer::Took(Take::Short { .. })) => Phase::Poison,
            (Phase::Take, Answer::Took(Take::Ended { .. })) => Phase::Done { moved: false },
            (Phase::Take, Answer::Once(_)) => Phase::Add,
            (Phase::Add, Answer::Took(_)) => Phase::End(End::Sold),
            (Phase::Add, Answer::Once(Once::Applied(_) | Once::Duplicate)) => match self.from {
                Some(_) => Phase::End(End::Sold),
                None => Phase::Done { moved: true },
            },
            (Phase::Add, Answer::Once(Once::Poisoned)) => give_back,
            // It had been added already: another has made the move.
            (Phase::Poison, Answer::Once(Once::Applied(_) | Once::Duplicate)) => {
                Phase::End(End::Sold)
            }
            (Phase::Poison, Answer::Once(Once::Poisoned)) => give_back,
            (Phase::End(end), Answer::Ended(_)) => Phase::Done { moved: end == End::Sold },
            (phase, _) => phase,
        };
    }

    /// The store will never do what was asked for; whether the step can be given up.
    ///
    /// A move that does not fit into its bucket goes back where it came from. Its second half is
    /// poisoned first: another may have added it before there was no room.
    pub fn refused(&mut self) -> bool {
        let gives_up = self.phase == Phase::Add && self.from.is_some();
        if gives_up {
            self.phase = Phase::Poison;
        }
        gives_up
    }

    /// Units that it moved or filled in, once it is done.
    #[must_use]
    pub fn moved(&self) -> u64 {
        if self.phase == (Phase::Done { moved: true }) { self.amount } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(work: Work) -> Record {
        let (nonce, floor) = (u64::MAX, None);
        Record { epoch: 7, nonce, seed: 3, buckets: 4, initial: 10, floor, work }
    }

    #[test]
    fn records_survive_the_way_there_and_back_and_nothing_else_is_one() {
        let moves = vec![Move { from: 0, to: 3, amount: 5 }, Move { from: 1, to: 2, amount: 1 }];
        for work in [Work::None, Work::Fill(vec![3, 3, 2, 2]), Work::Move(moves)] {
            let record = record(work);
            assert_eq!(Record::parse(record.encode().as_bytes()), Some(record));
        }
        for bad in [
            "",
            "hs-stock1",
            "hs-stock1 1 2 3 4 5",
            "hs-stock1 1 2 3 4 5 idle 6",
            "hs-stock1 1 2 3 4 5 fill 1 2 3",
            "hs-stock1 1 2 3 4 5 move",
            "hs-stock1 1 2 3 4 5 move 0:4:1",
            "hs-stock1 1 2 3 4 5 move 1:1:1",
            "hs-stock1 1 2 3 4 5 move 0:1:0",
            "hs-stock1 1 2 3 0 5 idle",
            "hs-stock1 1 2 3 257 5 idle",
            "hs-stock1 1 2 3 4 9223372036854775808 idle",
            "hs-stock2 1 2 3 4 5 idle",
        ] {
            assert_eq!(Record::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn a_balance_begins_above_its_floor_in_its_main_account() {
        let account = Record::account(-20, -50, 3, 9, 1).unwrap();
        assert_eq!((account.initial, account.buckets), (30, 4));
        assert_eq!(account.work, Work::Fill(vec![30, 0, 0, 0]));
        assert_eq!(Record::parse(account.encode().as_bytes()), Some(account));
        assert_eq!(Record::account(1, 2, 3, 9, 1), None, "below the floor");
        assert_eq!(Record::account(i64::MAX, -1, 3, 9, 1), None, "beyond 63 bits");
        assert_eq!(Record::account(1, 0, 0, 9, 1), None, "no stripes");
        assert_eq!(Record::account(1, 0, 256, 9, 1), None, "too many");
        assert_eq!(Record::parse(b"hs-account1 x 1 2 3 4 5 idle"), None);
        assert_eq!(Record::parse(b"hs-account1 0 1 2 3 1 5 idle"), None, "no stripe");
    }

    #[test]
    fn the_units_of_all_fillings_are_counted_through() {
        let first = Record::first(10, 4, 0, 0).unwrap();
        assert_eq!([0, 1, 2, 3].map(|b| first.first_number(b)), [0, 3, 6, 8]);
        let more = first.rested(0).grown(5, 0).unwrap();
        assert_eq!([0, 1, 2, 3].map(|b| more.first_number(b)), [10, 12, 13, 14]);
    }

    #[test]
    fn a_move_that_does_not_fit_goes_back_and_a_filling_does_not_give_up() {
        let mut step = Step::carry(Move { from: 0, to: 1, amount: 2 }, Id::in_turn("m:0", 7));
        assert!(!step.refused(), "nothing was taken yet");
        step.heard(Answer::Took(Take::Taken { left: 0 }));
        assert_eq!(step.ask(), Some(Ask::Add(1, 2)));
        assert!(step.refused());
        // Another may have added it while there was room.
        let mut added = step.clone();
        assert_eq!(step.ask(), Some(Ask::Poison(1)));
        step.heard(Answer::Once(Once::Poisoned));
        assert_eq!(step.ask(), Some(Ask::End(0, End::Back)));
        added.heard(Answer::Once(Once::Duplicate));
        assert_eq!(added.ask(), Some(Ask::End(0, End::Sold)));
        let mut fill = Step::fill(1, 2, Id::in_turn("m:1", 8));
        assert!(!fill.refused());
    }

    #[test]
    fn the_steps_of_a_later_work_are_later_turns_of_the_same_names() {
        let ids = |epoch| -> Vec<Id> {
            let work = Work::Fill(vec![1; 4]);
            Record { epoch, ..record(work) }.steps().into_iter().map(|s| s.id).collect()
        };
        for (old, new) in ids(7).iter().zip(ids(8)) {
            assert_eq!(old.name, new.name);
            assert!(old.turn < new.turn);
        }
    }

    #[test]
    fn one_work_at_a_time() {
        let busy = record(Work::Fill(vec![1; 4]));
        assert_eq!(busy.grown(1, 0), None);
        assert_eq!(busy.moving(vec![Move { from: 0, to: 1, amount: 1 }], 0), None);
        let idle = busy.rested(0);
        assert_eq!(idle.grown(6, 0).unwrap().work, Work::Fill(vec![2, 2, 1, 1]));
        assert_eq!(idle.moving(Vec::new(), 0), None, "no work is none");
        assert_eq!(idle.grown(u64::MAX, 0), None);
    }

    proptest! {
        #[test]
        fn evening_out_invents_nothing_and_leaves_no_bucket_poor(
            levels in prop::collection::vec(0i64..2_000, 1..40)
        ) {
            let moves = evened(&levels);
            let mut after = levels.clone();
            for m in &moves {
                after[m.from] -= m.amount as i64;
                after[m.to] += m.amount as i64;
            }
            prop_assert_eq!(after.iter().sum::<i64>(), levels.iter().sum::<i64>());
            prop_assert!(after.iter().all(|&n| n >= 0));
            prop_assert!(moves.len() <= levels.len());
            let low = levels.iter().sum::<i64>() / levels.len() as i64;
            let even = |n: i64| n >= low / 2 || low < WORTH_MOVING;
            prop_assert!(after.iter().all(|&n| even(n)), "{:?}", after);
            let all = gathered(&levels, 0);
            let sum: u64 = all.iter().map(|m| m.amount).sum();
            prop_assert_eq!(sum as i64 + levels[0], levels.iter().sum::<i64>());
        }
    }

    /// One move, carried out by two processes in every order, while the bucket it takes from may be
    /// drained and refilled at any point: all states are visited.
    mod search {
        use super::*;
        use std::collections::HashSet;

        /// Two buckets, as the store has them.
        #[derive(Clone, PartialEq, Eq, Hash, Debug)]
        struct World {
            left: [i64; 2],
            /// The move's hold: what it holds and how it ended.
            hold: Option<(u64, Option<bool>)>,
            /// `Some(true)`: added under the move's id; `Some(false)`: poisoned.
            once: Option<bool>,
            buyers: [bool; 2],
            phases: [u8; 2],
        }

        impl World {
            fn answer(&mut self, ask: Ask) -> Answer {
                match ask {
                    Ask::Take(b, n) => Answer::Took(match self.hold {
                        Some((held, Some(false))) => Take::Ended { amount: held },
                        Some(_) => Take::Taken { left: 0 },
                        None if self.left[b] < n as i64 => Take::Short { left: self.left[b] },
                        None => {
                            self.left[b] -= n as i64;
                            self.hold = Some((n, None));
                            Take::Taken { left: self.left[b] }
                        }
                    }),
                    Ask::Add(b, n) => Answer::Once(match self.once {
                        Some(true) => Once::Duplicate,
                        Some(false) => Once::Poisoned,
                        None => {
                            self.once = Some(true);
                            self.left[b] += n as i64;
                            Once::Applied(self.left[b])
                        }
                    }),
                    Ask::Poison(_) => Answer::Once(match self.once {
                        Some(true) => Once::Duplicate,
                        _ => {
                            self.once = Some(false);
                            Once::Poisoned
                        }
                    }),
                    Ask::End(b, end) => Answer::Ended(match self.hold {
                        Some((amount, Some(sold))) => {
                            let end = if sold { End::Sold } else { End::Back };
                            Ended::Before { end, amount }
                        }
                        None if end == End::Sold => Ended::Never,
                        hold => {
                            let amount = hold.map_or(0, |(n, _)| n);
                            if end == End::Back {
                                self.left[b] += amount as i64;
                            }
                            self.hold = Some((amount, Some(end == End::Sold)));
                            Ended::Now { amount }
                        }
                    }),
                }
            }

            fn code(step: &Step) -> u8 {
                match step.phase {
                    Phase::Take => 0,
                    Phase::Add => 1,
                    Phase::Poison => 2,
                    Phase::End(End::Sold) => 3,
                    Phase::End(End::Back) => 4,
                    Phase::Done { moved } => 5 + u8::from(moved),
                }
            }

            /// Units that are neither in a bucket nor with a buyer.
            fn total(&self) -> i64 {
                self.left.iter().sum::<i64>()
                    + 2 * self.buyers.iter().filter(|b| **b).count() as i64
            }
        }

        fn visit(broken: Option<Mutant>) -> Result<usize, String> {
            let step = || {
                let mut step =
                    Step::carry(Move { from: 0, to: 1, amount: 2 }, Id::in_turn("m:0", 7));
                step.broken = broken;
                step
            };
            let world =
                World { left: [2, 0], hold: None, once: None, buyers: [false; 2], phases: [0; 2] };
            let mut seen = HashSet::new();
            let mut queue = vec![(world, [step(), step()])];
            while let Some((mut world, steps)) = queue.pop() {
                world.phases = [World::code(&steps[0]), World::code(&steps[1])];
                if !seen.insert(world.clone()) {
                    continue;
                }
                if world.total() > 2 {
                    return Err(format!("units were invented: {world:?}"));
                }
                let resting = steps.iter().all(|s| s.ask().is_none());
                if resting && world.total() != 2 {
                    return Err(format!("units were lost: {world:?}"));
                }
                for i in 0..2 {
                    if let Some(ask) = steps[i].ask() {
                        // Applied, and the answer arrives; or it is lost, and the same is asked
                        // again by the next state.
                        let (mut after, mut told) = (world.clone(), steps.clone());
                        let answer = after.answer(ask);
                        queue.push((after, told.clone()));
                        told[i].heard(answer);
                        let (mut after, _) = (world.clone(), ());
                        after.answer(ask);
                        queue.push((after, told));
                    }
                    // A buyer comes, or brings back what it bought, at either bucket.
                    let mut after = world.clone();
                    if world.buyers[i] {
                        after.left[i] += 2;
                        after.buyers[i] = false;
                        queue.push((after, steps.clone()));
                    } else if world.left[i] >= 2 {
                        after.left[i] -= 2;
                        after.buyers[i] = true;
                        queue.push((after, steps.clone()));
                    }
                }
            }
            Ok(seen.len())
        }

        #[test]
        fn a_move_made_by_two_neither_loses_nor_invents_a_unit() {
            let states = visit(None).unwrap();
            assert!(states > 100, "{states}");
        }

        #[test]
        fn a_move_that_puts_first_or_gives_up_without_poison_is_caught() {
            for broken in [Mutant::PutsFirst, Mutant::NoPoison] {
                assert!(visit(Some(broken)).unwrap_err().contains("invented"), "{broken:?}");
            }
        }
    }
}
