//! One caller's way through the buckets of a stock.
//!
//! - **What**: which bucket to ask next, what an answer means, and when nothing is left to ask.
//! - **Invariant**: a hold takes in one bucket only: a bucket that may have given is asked again,
//!   or barred, before another is asked. Sold out is said only of a picture that was taken after
//!   the call began, shows every bucket empty, and during which nothing was between buckets.
//! - **Time and units**: ticks; units of stock. What was heard of a bucket counts only for the order
//!   in which buckets are asked, and for 200 ms when they are evened out.
//! - **Bounds**: the buckets of the stock, four pictures, three attempts per question.
//! - **Source**: bucketed stock with a fixed probe order per hold; an ambiguous reply stops the
//!   walk (probing on would take twice). The fuller of two keeps the buckets level (Azar, Broder,
//!   Karlin, Upfal, 1999).

use crate::engine::control::stock::Mutant;
use crate::engine::time::Tick;
use crate::store::{End, Ended, Take};
use std::time::Duration;

/// For how long what was heard of a bucket counts when they are evened out.
const HEARD: Duration = Duration::from_millis(200);

/// Attempts at one question whose answer is lost.
const TRIES: u32 = 3;

/// Pictures one call looks at.
const LOOKS: u32 = 4;

/// What one process has heard of each bucket.
#[derive(Clone, Debug)]
pub struct Levels {
    heard: Vec<Option<(i64, Tick)>>,
    /// Units that calls of this process have asked for and not heard of.
    asked: Vec<i64>,
}

impl Levels {
    /// Nothing heard yet.
    #[must_use]
    pub fn new(buckets: usize) -> Levels {
        Levels { heard: vec![None; buckets], asked: vec![0; buckets] }
    }

    /// A call asks `bucket` for `amount` units; every ask ends with [`answered`](Levels::answered).
    pub fn asking(&mut self, bucket: usize, amount: u64) {
        if let Some(asked) = self.asked.get_mut(bucket) {
            *asked = asked.saturating_add_unsigned(amount);
        }
    }

    /// The call has its answer, or nobody waits for it any more.
    pub fn answered(&mut self, bucket: usize, amount: u64) {
        if let Some(asked) = self.asked.get_mut(bucket) {
            *asked = asked.saturating_sub_unsigned(amount);
        }
    }

    /// What is left of `level` once all who have asked have their units.
    fn spare(&self, bucket: usize, level: i64) -> i64 {
        level.saturating_sub(self.asked.get(bucket).copied().unwrap_or(0))
    }

    /// Whether more is left in bucket `a` than in `b`, as far as has been heard of both.
    fn fuller(&self, a: usize, b: usize) -> bool {
        let left = |bucket: usize| self.heard[bucket].map(|(level, _)| self.spare(bucket, level));
        left(a).zip(left(b)).is_some_and(|(a, b)| a > b)
    }

    /// `bucket` had `left` units at `now`.
    pub fn heard(&mut self, bucket: usize, left: i64, now: Tick) {
        if let Some(level) = self.heard.get_mut(bucket) {
            *level = Some((left, now));
        }
    }

    /// What is known of each bucket, as far as it is young enough.
    pub fn known(&self, now: Tick) -> impl Iterator<Item = Option<i64>> + '_ {
        let young = move |at: &Tick| now.since(*at) < HEARD;
        self.heard.iter().map(move |level| level.filter(|(_, at)| young(at)).map(|(left, _)| left))
    }
}

/// All buckets as one look found them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Picture {
    /// Nothing was between buckets while it was taken.
    pub still: bool,
    /// Counts the works that were begun.
    pub epoch: u64,
    /// Units in each bucket.
    pub levels: Vec<i64>,
}

/// What is to be done next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// Take from this bucket.
    Take(usize),
    /// Put back whatever the hold has in this bucket, and bar it there.
    Bar(usize),
    /// Take a picture, begun after now.
    Look,
    /// The end of the way.
    End(Found),
}

/// How a way ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// The hold has its units in this bucket.
    Held(usize),
    /// There is not a unit left.
    SoldOut,
    /// Units are left, but nowhere so many.
    Short(u64),
    /// The hold was put back before.
    Ended,
    /// Nobody knows whether this bucket gave.
    Unknown(usize),
    /// Units move: come back.
    Busy,
    /// Other calls have asked for what is left, or were faster each time: come back.
    Crowded,
    /// The buckets that may have some cannot be asked.
    Failed,
}

/// What was answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// To [`Next::Take`].
    Took(Take),
    /// To [`Next::Bar`].
    Barred(Ended),
    /// To [`Next::Look`]; `None` when no picture could be had.
    Saw(Option<Picture>),
    /// The question had no effect.
    NotApplied,
    /// The question may have had its effect, or may have it yet.
    Unknown,
}

/// The way of one call.
#[derive(Clone, Debug)]
pub struct Probe {
    hash: u64,
    amount: i64,
    /// Buckets to be asked, the next one last.
    rest: Vec<usize>,
    /// Buckets where the hold can take nothing any more.
    barred: Vec<usize>,
    next: Next,
    /// The bucket that may have given.
    doubt: Option<usize>,
    tries: u32,
    looks: u32,
    failed: bool,
    broken: Option<Mutant>,
}

/// The order in which `hash` asks `buckets`: a start and a stride that meets all of them.
fn order(hash: u64, buckets: usize) -> impl Iterator<Item = usize> {
    let n = buckets.max(1) as u64;
    let gcd = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let start = hash % n;
    let wanted = (hash >> 32) % n + 1;
    let stride = (wanted..=wanted + n).find(|s| gcd(*s, n) == 1).unwrap_or(1);
    (0..n).map(move |i| ((start + i * stride) % n) as usize)
}

impl Probe {
    /// The way of a hold of `amount` units whose id hashes to `hash`. `doubt` is the bucket where an
    /// earlier call of this hold ended [`Found::Unknown`].
    #[must_use]
    pub fn new(hash: u64, amount: u64, levels: &Levels, doubt: Option<usize>) -> Probe {
        let amount = i64::try_from(amount).unwrap_or(i64::MAX);
        // One that was found empty is asked again once a picture shows units there: when what was
        // heard ran out by itself, all callers would ask all buckets at that moment.
        let promising =
            |b: &usize| levels.heard[*b].is_none_or(|(level, _)| levels.spare(*b, level) >= amount);
        let mut rest: Vec<usize> = order(hash, levels.heard.len()).filter(promising).collect();
        // Of the first two the fuller one: so all of them run empty at about the same time, and the
        // last units lie in many rows.
        if let [first, second, ..] = rest[..]
            && levels.fuller(second, first)
        {
            rest.swap(0, 1);
        }
        rest.reverse();
        let mut probe = Probe {
            hash,
            amount,
            rest,
            barred: Vec::new(),
            next: Next::Look,
            doubt,
            tries: 0,
            looks: 0,
            failed: false,
            broken: None,
        };
        match doubt {
            Some(bucket) => probe.next = Next::Take(bucket),
            None => probe.go_on(),
        }
        probe
    }

    /// Breaks a rule, to show that a test notices.
    #[doc(hidden)]
    #[must_use]
    pub fn broken_by(mut self, mutant: Option<Mutant>) -> Probe {
        self.broken = mutant;
        self
    }

    /// What is to be done now.
    #[must_use]
    pub fn next(&self) -> Next {
        self.next.clone()
    }

    fn go_on(&mut self) {
        self.tries = 0;
        self.next = match self.rest.pop() {
            Some(bucket) => Next::Take(bucket),
            None if self.broken == Some(Mutant::SoldOutFromMemory) => Next::End(Found::SoldOut),
            None if self.looks < LOOKS => Next::Look,
            None => Next::End(Found::Crowded),
        };
    }

    /// What was answered to [`next`](Probe::next).
    pub fn heard(&mut self, heard: Heard, levels: &mut Levels, now: Tick) {
        match (self.next.clone(), heard) {
            (Next::Take(bucket), Heard::Took(take)) => self.took(bucket, take, levels, now),
            (Next::Take(bucket), Heard::Unknown) => {
                self.doubt = Some(bucket);
                if self.broken == Some(Mutant::ProbesOn) {
                    self.doubt = None;
                    self.go_on();
                } else {
                    self.again(Found::Unknown(bucket));
                }
            }
            (Next::Take(bucket), Heard::NotApplied) if self.doubt == Some(bucket) => {
                self.again(Found::Unknown(bucket));
            }
            (Next::Take(_), Heard::NotApplied) => {
                self.failed = true;
                self.go_on();
            }
            (Next::Bar(bucket), Heard::Barred(ended)) => {
                self.doubt = None;
                self.barred.push(bucket);
                match ended {
                    Ended::Before { end: End::Sold, .. } => self.end(Found::Held(bucket)),
                    _ => self.go_on(),
                }
            }
            (Next::Bar(bucket), Heard::NotApplied | Heard::Unknown) => {
                self.again(Found::Unknown(bucket));
            }
            (Next::Look, Heard::Saw(Some(picture))) => self.saw(&picture, levels, now),
            (Next::Look, _) => self.end(Found::Failed),
            // An answer to another question.
            (Next::Take(_) | Next::Bar(_) | Next::End(_), _) => {}
        }
    }

    fn end(&mut self, found: Found) {
        self.next = Next::End(found);
    }

    /// Asks the same once more, or gives up.
    fn again(&mut self, or: Found) {
        self.tries += 1;
        if self.tries >= TRIES {
            self.end(or);
        }
    }

    fn took(&mut self, bucket: usize, take: Take, levels: &mut Levels, now: Tick) {
        match take {
            Take::Taken { left } => {
                levels.heard(bucket, left, now);
                self.end(Found::Held(bucket));
            }
            Take::Ended { amount: 1.. } => self.end(Found::Ended),
            Take::Ended { amount: 0 } => {
                self.doubt = None;
                self.barred.push(bucket);
                self.go_on();
            }
            Take::Short { left } => {
                levels.heard(bucket, left, now);
                // An earlier question may still be on its way there.
                if self.doubt == Some(bucket) {
                    self.tries = 0;
                    self.next = Next::Bar(bucket);
                } else {
                    self.go_on();
                }
            }
        }
    }

    fn saw(&mut self, picture: &Picture, levels: &mut Levels, now: Tick) {
        self.looks += 1;
        for (bucket, &left) in picture.levels.iter().enumerate() {
            levels.heard(bucket, left, now);
        }
        let has =
            |b: &usize| picture.levels.get(*b).is_some_and(|n| levels.spare(*b, *n) >= self.amount);
        let claimed = picture.levels.iter().any(|n| *n >= self.amount);
        let rich: Vec<usize> = order(self.hash, picture.levels.len()).filter(has).collect();
        let total: u64 = picture.levels.iter().map(|&n| n.max(0).unsigned_abs()).sum();
        if rich.is_empty() {
            let found = match (picture.still, total) {
                (false, _) => Found::Busy,
                (true, _) if claimed => Found::Crowded,
                (true, 0) => Found::SoldOut,
                (true, _) => Found::Short(total),
            };
            return self.end(found);
        }
        self.rest = rich.into_iter().filter(|b| !self.barred.contains(b)).rev().collect();
        if self.rest.is_empty() {
            self.end(Found::Ended);
        } else {
            self.go_on();
        }
    }

    /// Whether a bucket may have given, or may yet.
    #[must_use]
    pub fn in_doubt(&self) -> bool {
        self.doubt.is_some()
    }

    /// Some bucket could not be asked: a picture that fails too is an error, not an answer.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const T: Tick = Tick(1_000_000_000);

    fn picture(still: bool, levels: &[i64]) -> Heard {
        Heard::Saw(Some(Picture { still, epoch: 1, levels: levels.to_vec() }))
    }

    /// Answers until the end.
    fn run(probe: &mut Probe, levels: &mut Levels, mut answer: impl FnMut(Next) -> Heard) -> Found {
        for _ in 0..10_000 {
            match probe.next() {
                Next::End(found) => return found,
                next => probe.heard(answer(next), levels, T),
            }
        }
        panic!("it never ends");
    }

    proptest! {
        #[test]
        fn every_hold_asks_every_bucket_once_in_an_order_of_its_own(hash: u64, n in 1usize..=256) {
            let mut seen: Vec<usize> = order(hash, n).collect();
            prop_assert_eq!(seen[0] as u64, hash % n as u64);
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..n).collect::<Vec<_>>());
        }

        /// Against any store: whatever it answers, the way ends, and a bucket that may have given
        /// is settled before another is asked.
        #[test]
        fn the_way_ends_and_leaves_no_doubt_behind(
            hash: u64, n in 1usize..8, amount in 1u64..3, answers in prop::collection::vec(0u8..9, 0..200)
        ) {
            let mut levels = Levels::new(n);
            let mut probe = Probe::new(hash, amount, &levels, None);
            let mut answers = answers.into_iter().chain(std::iter::repeat(0));
            let mut doubt: Option<usize> = None;
            let found = run(&mut probe, &mut levels, |next| {
                let a = answers.next().unwrap();
                match next {
                    Next::Take(b) => {
                        assert!(doubt.is_none_or(|d| d == b), "asked {b}, and {doubt:?} may have given");
                        match a {
                            1 => Heard::Took(Take::Taken { left: 1 }),
                            2 => { doubt = Some(b); Heard::Unknown }
                            3 => Heard::NotApplied,
                            4 => { doubt = None; Heard::Took(Take::Ended { amount: 0 }) }
                            _ => Heard::Took(Take::Short { left: 0 }),
                        }
                    }
                    Next::Bar(b) => {
                        assert_eq!(doubt, Some(b));
                        match a {
                            1 => Heard::Unknown,
                            2 => Heard::NotApplied,
                            _ => { doubt = None; Heard::Barred(Ended::Now { amount: 0 }) }
                        }
                    }
                    Next::Look => match a {
                        1 => Heard::Saw(None),
                        2 => picture(false, &vec![0; n]),
                        3 => picture(true, &vec![2; n]),
                        _ => picture(true, &vec![0; n]),
                    },
                    Next::End(_) => unreachable!(),
                }
            });
            if let Some(bucket) = doubt {
                prop_assert!(matches!(found, Found::Unknown(b) | Found::Held(b) if b == bucket));
            }
        }
    }

    #[test]
    fn sold_out_is_said_of_a_picture_only() {
        let mut levels = Levels::new(3);
        (0..3).for_each(|b| levels.heard(b, 0, T));
        let mut probe = Probe::new(1, 1, &levels, None);
        assert_eq!(probe.next(), Next::Look, "what was heard a moment ago proves nothing");
        probe.heard(picture(true, &[0, 1, 0]), &mut levels, T);
        assert_eq!(probe.next(), Next::Take(1));
        probe.heard(Heard::Took(Take::Short { left: 0 }), &mut levels, T);
        probe.heard(picture(false, &[0, 0, 0]), &mut levels, T);
        assert_eq!(probe.next(), Next::End(Found::Busy), "units are between buckets");
        let mut probe = Probe::new(1, 2, &levels, None);
        probe.heard(picture(true, &[1, 1, 0]), &mut levels, T);
        assert_eq!(probe.next(), Next::End(Found::Short(2)));
    }

    #[test]
    fn nobody_asks_for_units_that_others_have_asked_for() {
        let mut levels = Levels::new(2);
        (0..2).for_each(|b| levels.heard(b, 1, T));
        levels.asking(0, 1);
        let probe = Probe::new(0, 1, &levels, None);
        assert_eq!(probe.next(), Next::Take(1));
        levels.asking(1, 1);
        let mut probe = Probe::new(0, 1, &levels, None);
        assert_eq!(probe.next(), Next::Look);
        probe.heard(picture(true, &[1, 1]), &mut levels, T);
        assert_eq!(probe.next(), Next::End(Found::Crowded), "not sold out: they may fail");
        levels.answered(1, 1);
        let probe = Probe::new(0, 1, &levels, None);
        assert_eq!(probe.next(), Next::Take(1));
    }

    #[test]
    fn of_two_buckets_the_fuller_one_is_asked_and_all_run_empty_together() {
        let (buckets, each) = (16, 600);
        let mut left = vec![each; buckets];
        let mut levels = Levels::new(buckets);
        let mut hash = 1u64;
        for _ in 0..buckets as i64 * (each - 10) {
            hash = hash.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let Next::Take(b) = Probe::new(hash ^ hash >> 29, 1, &levels, None).next() else {
                panic!()
            };
            left[b] -= 1;
            levels.heard(b, left[b], T);
        }
        assert!(
            left.iter().all(|n| (5..=15).contains(n)),
            "by chance alone some lack 50: {left:?}"
        );
    }

    #[test]
    fn a_bucket_that_may_have_given_is_asked_again_and_then_barred() {
        let mut levels = Levels::new(2);
        let mut probe = Probe::new(0, 1, &levels, None);
        assert_eq!(probe.next(), Next::Take(0));
        probe.heard(Heard::Unknown, &mut levels, T);
        assert_eq!(probe.next(), Next::Take(0));
        probe.heard(Heard::Took(Take::Short { left: 0 }), &mut levels, T);
        assert_eq!(probe.next(), Next::Bar(0), "the first question may still be on its way");
        probe.heard(Heard::Barred(Ended::Now { amount: 0 }), &mut levels, T);
        assert_eq!(probe.next(), Next::Take(1));
        for _ in 0..3 {
            probe.heard(Heard::Unknown, &mut levels, T);
        }
        assert_eq!(probe.next(), Next::End(Found::Unknown(1)));
        let probe = Probe::new(0, 1, &levels, Some(1));
        assert_eq!(probe.next(), Next::Take(1), "and by the next call of the same hold first");
    }
}
