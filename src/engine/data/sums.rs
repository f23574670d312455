//! The sum of one counter, as this process knows it.
//!
//! - **What**: the newest sum that was loaded, and the greatest one that was shown.
//! - **Invariant**: a sum is served only within the age that the caller accepts, counted from the
//!   start of its load; with a floor, no caller is shown less than an earlier one was. Something is
//!   said to be lost only if the load that found less began after the greater sum was shown: one
//!   that began earlier may end later, and is right.
//! - **Time and units**: ticks.
//! - **Bounds**: a few words; for a counter in slots, as many as it has slots.
//! - **Source**: intermediate-value linearizability (Rinberg and Keidar, 2020): a sum is any value
//!   between the count at its start and the count at its end.

use crate::engine::time::Tick;
use std::collections::BTreeMap;
use std::time::Duration;

/// What is known of one sum.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Known {
    newest: Option<(i64, Tick)>,
    /// The greatest sum that was shown, and when it first was.
    floor: Option<(i64, Tick)>,
    /// What began before then is of the count before it began again.
    since: Tick,
}

/// What a counter that only grows shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shown {
    /// Never less than before.
    pub total: i64,
    /// By how much the store has less than it had.
    pub lost: u64,
}

impl Known {
    /// The sum and when its load started, if it is younger than `max_age`.
    #[must_use]
    pub fn serve(&self, now: Tick, max_age: Duration) -> Option<(i64, Tick)> {
        self.newest.filter(|(_, started)| now.since(*started) < max_age)
    }

    /// A load that started at `started` brought `total`. The newest start wins.
    pub fn learn(&mut self, total: i64, started: Tick) {
        if started >= self.since && self.newest.is_none_or(|(_, newest)| started >= newest) {
            self.newest = Some((total, started));
        }
    }

    /// The counter has begun again from zero by `now`.
    pub fn forget(&mut self, now: Tick) {
        *self = Known { since: now, ..Known::default() };
    }

    /// What a counter that only grows shows at `now` of a load that started at `started` and
    /// brought `total`: never less than before. A total of which a part is older than the load is
    /// taken for one of a load that `started` at zero.
    pub fn raise(&mut self, total: i64, started: Tick, now: Tick) -> Shown {
        let before = started < self.since && started > Tick::ZERO;
        match self.floor {
            None if before => Shown { total, lost: 0 },
            Some((floor, _)) if before && total > floor => Shown { total, lost: 0 },
            Some((floor, at)) if total < floor => {
                let lost = if started > at { floor.abs_diff(total) } else { 0 };
                Shown { total: floor, lost }
            }
            Some((floor, _)) if total == floor => Shown { total, lost: 0 },
            _ => {
                self.floor = Some((total, now));
                Shown { total, lost: 0 }
            }
        }
    }
}

/// The total of a counter that one process writes for all, as this process knows it.
///
/// Of totals and sums the one that began last is served, so that none is of an older count than one
/// before. Totals follow one another: each began after the last was written. A sum and a total may
/// overlap; of these the later must have begun when the earlier was known.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Latest {
    best: Option<Best>,
    /// When the total was last asked for, and whether there was one.
    looked: Option<(Tick, bool)>,
    /// What began before then is of the count before it began again.
    since: Tick,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Best {
    total: i64,
    /// When its sum began, at the latest.
    began: Tick,
    /// When it was first known here.
    known: Tick,
    written: bool,
}

/// What is served without asking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Serve {
    /// This, of a sum that began then.
    Total(i64, Tick),
    /// There is no total: a sum that began after this.
    Sum(Tick),
    /// The total is to be read.
    Look,
}

impl Latest {
    /// What is served at `now` of what is younger than `max_age`.
    #[must_use]
    pub fn serve(&self, now: Tick, max_age: Duration) -> Serve {
        let young = |at: Tick| now.since(at) < max_age;
        let Some((_, there)) = self.looked.filter(|(at, _)| young(*at)) else { return Serve::Look };
        match self.best {
            // However old the best is: the total that is there is older still.
            Some(best) if there || young(best.began) => Serve::Total(best.total, best.began),
            best => Serve::Sum(best.map_or(Tick::ZERO, |best| best.known)),
        }
    }

    /// A read that began at `looked` and ended at `now` found a total whose sum began at the time
    /// given, or none.
    pub fn learn(&mut self, found: Option<(i64, Tick)>, looked: Tick, now: Tick) {
        let found = found.filter(|(_, began)| *began >= self.since);
        if self.looked.is_none_or(|(at, _)| at <= looked) {
            self.looked = Some((looked, found.is_some()));
        }
        if let Some((total, began)) = found {
            let written = true;
            let later = |best: Best| began >= if best.written { best.began } else { best.known };
            if self.best.is_none_or(later) {
                self.best = Some(Best { total, began, known: now, written });
            }
        }
    }

    /// A sum was known at `now` that began at `began`.
    pub fn learn_sum(&mut self, total: i64, began: Tick, now: Tick) {
        let later = |best: Best| began >= best.known;
        if began >= self.since && self.best.is_none_or(later) {
            self.best = Some(Best { total, began, known: now, written: false });
        }
    }

    /// The counter has begun again from zero by `now`.
    pub fn forget(&mut self, now: Tick) {
        *self = Latest { since: now, ..Latest::default() };
    }
}

/// The slots of a counter, as they were last seen: for when one of them does not answer. And what
/// one of them has lost does not show in a sum where others have grown by more meanwhile.
#[derive(Clone, Default, Debug)]
pub struct Parts {
    seen: BTreeMap<(u32, u16), (i64, Tick)>,
}

impl Parts {
    /// A load that started at `started` and ended at `now` brought these values, by generation and
    /// number. By how much some are less than they had been when it started.
    /// Of a slot that did not answer (`None`) the last value stays.
    pub fn see(&mut self, started: Tick, now: Tick, found: &[((u32, u16), Option<i64>)]) -> u64 {
        let mut lost = 0u64;
        let mut seen = BTreeMap::new();
        for (slot, value) in found {
            let Some(value) = value else {
                seen.extend(self.seen.get(slot).map(|known| (*slot, *known)));
                continue;
            };
            let now_known = match self.seen.get(slot) {
                Some((known, at)) if started <= *at => (*known, *at),
                Some((known, _)) => {
                    if value < known {
                        lost = lost.saturating_add(known.abs_diff(*value));
                    }
                    (*value, now)
                }
                None => (*value, now),
            };
            seen.insert(*slot, now_known);
        }
        self.seen = seen;
        lost
    }

    /// What a slot held when it was last seen.
    #[must_use]
    pub fn value(&self, slot: (u32, u16)) -> Option<i64> {
        self.seen.get(&slot).map(|(value, _)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_holds_less_than_before_has_lost_it_whatever_the_others_do() {
        let mut parts = Parts::default();
        assert_eq!(parts.see(Tick(1), Tick(2), &[((1, 0), Some(5)), ((1, 1), Some(7))]), 0);
        assert_eq!(parts.see(Tick(3), Tick(4), &[((1, 0), Some(3)), ((1, 1), Some(70))]), 2);
        assert_eq!(
            parts.see(Tick(5), Tick(6), &[((1, 0), Some(3)), ((1, 1), Some(70))]),
            0,
            "once"
        );
        // One that began before the last ended says nothing of a loss.
        assert_eq!(parts.see(Tick(4), Tick(7), &[((1, 0), Some(1)), ((1, 1), Some(71))]), 0);
        // One that does not answer is as it was.
        assert_eq!(parts.see(Tick(8), Tick(8), &[((1, 0), None), ((1, 1), Some(72))]), 0);
        assert_eq!((parts.value((1, 0)), parts.value((1, 1))), (Some(3), Some(72)));
        // Retired slots are not looked at any more.
        assert_eq!(parts.see(Tick(9), Tick(9), &[((2, 0), Some(0))]), 0);
        assert_eq!(parts.see(Tick(10), Tick(11), &[((1, 0), Some(0)), ((2, 0), Some(0))]), 0);
    }

    #[test]
    fn a_load_that_started_earlier_and_ended_later_changes_nothing() {
        let mut known = Known::default();
        known.learn(7, Tick(20));
        known.learn(5, Tick(10));
        assert_eq!(known.serve(Tick(21), Duration::from_nanos(2)), Some((7, Tick(20))));
        assert_eq!(known.serve(Tick(22), Duration::from_nanos(2)), None);
    }

    #[test]
    fn what_began_before_the_count_began_again_is_not_kept() {
        let mut known = Known::default();
        known.raise(9, Tick(1), Tick(2));
        known.forget(Tick(10));
        known.learn(9, Tick(9));
        assert_eq!(known.serve(Tick(11), Duration::MAX), None);
        assert_eq!(known.raise(9, Tick(9), Tick(11)).total, 9, "it was on its way");
        assert_eq!(known.raise(1, Tick(10), Tick(12)), Shown { total: 1, lost: 0 });
    }

    const TTL: Duration = Duration::from_nanos(10);

    #[test]
    fn no_total_is_of_an_older_count_than_one_that_was_served() {
        let mut latest = Latest::default();
        assert_eq!(latest.serve(Tick(100), TTL), Serve::Look);
        // A sum was served, and then a total is found that began before it.
        latest.learn_sum(150, Tick(100), Tick(105));
        latest.learn(Some((110, Tick(98))), Tick(106), Tick(107));
        assert_eq!(latest.serve(Tick(108), TTL), Serve::Total(150, Tick(100)));
        // One that overlaps it is not known to be newer; the next is.
        latest.learn(Some((140, Tick(103))), Tick(117), Tick(118));
        assert_eq!(latest.serve(Tick(119), TTL), Serve::Total(150, Tick(100)));
        latest.learn(Some((170, Tick(120))), Tick(130), Tick(131));
        assert_eq!(latest.serve(Tick(132), TTL), Serve::Total(170, Tick(120)));
        // A read that was overtaken changes nothing.
        latest.learn(Some((160, Tick(115))), Tick(125), Tick(133));
        assert_eq!(latest.serve(Tick(134), TTL), Serve::Total(170, Tick(120)));
        assert_eq!(latest.serve(Tick(140), TTL), Serve::Look);
        // Without a total a sum is served that began after what was served.
        latest.learn(None, Tick(141), Tick(142));
        assert_eq!(latest.serve(Tick(143), TTL), Serve::Sum(Tick(131)));
    }

    #[test]
    fn that_there_is_no_total_is_remembered_and_a_total_from_before_a_reset_is_not() {
        let mut latest = Latest::default();
        latest.learn(None, Tick(100), Tick(101));
        assert_eq!(latest.serve(Tick(109), TTL), Serve::Sum(Tick::ZERO));
        latest.learn_sum(5, Tick(102), Tick(103));
        assert_eq!(latest.serve(Tick(109), TTL), Serve::Total(5, Tick(102)));
        assert_eq!(latest.serve(Tick(110), TTL), Serve::Look);
        latest.forget(Tick(120));
        latest.learn(Some((9, Tick(119))), Tick(121), Tick(122));
        latest.learn_sum(9, Tick(118), Tick(123));
        assert_eq!(latest.serve(Tick(124), TTL), Serve::Sum(Tick::ZERO));
        latest.learn(Some((1, Tick(121))), Tick(125), Tick(126));
        assert_eq!(latest.serve(Tick(127), TTL), Serve::Total(1, Tick(121)));
    }

    #[test]
    fn a_floor_never_sinks() {
        let mut known = Known::default();
        let loads = [(5, 10), (9, 20), (7, 30), (12, 40)];
        let shown = loads.map(|(total, at)| known.raise(total, Tick(at), Tick(at + 1)).total);
        assert_eq!(shown, [5, 9, 9, 12]);
    }

    #[test]
    fn less_is_a_loss_only_if_it_was_asked_for_after_more_was_shown() {
        let mut known = Known::default();
        assert_eq!(known.raise(9, Tick(10), Tick(20)), Shown { total: 9, lost: 0 });
        let overtaken = known.raise(7, Tick(5), Tick(30));
        assert_eq!(overtaken, Shown { total: 9, lost: 0 }, "began earlier and ended later");
        let same = known.raise(7, Tick(20), Tick(30));
        assert_eq!(same, Shown { total: 9, lost: 0 }, "the clock cannot tell which was first");
        assert_eq!(known.raise(7, Tick(21), Tick(30)), Shown { total: 9, lost: 2 });
        assert_eq!(known.raise(9, Tick(31), Tick(32)), Shown { total: 9, lost: 0 }, "made good");
    }
}
