//! The sum of a salted counter, written to a key of its own by one process.
//!
//! - **What**: what is written, and whether this process writes next.
//! - **Invariant**: who writes has read what is there before it sums up, and replaces exactly that.
//!   So each total is of a sum that began after the last one was written, whoever writes, and a
//!   counter that only grows never goes back.
//! - **Time and units**: durations; a total holds for [`LIVES`] intervals.
//! - **Bounds**: one line of text below 100 bytes.
//! - **Source**: a lease (Gray and Cheriton 1989) whose end is the expiry of the value itself.

use super::super::time::Tick;
use crate::key::Key;
use std::collections::BTreeMap;
use std::time::Duration;

/// A total expires after so many intervals: until then nobody else writes it.
pub const LIVES: u32 = 4;

/// Who finds another's looks again after so many intervals.
const RESTS: u32 = 3;

/// What is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// The sum.
    pub sum: i64,
    /// Who writes it.
    pub by: u64,
    /// How often it is written.
    pub every: Duration,
}

/// What to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// Sum up, and replace what was found.
    Write,
    /// It is another's; look again after this.
    Rest(Duration),
}

/// What `me` does who has found this. `None`: there is nothing. What cannot be read is somebody
/// else's, and stays.
#[must_use]
pub fn turn(found: Option<Option<&Written>>, me: u64, every: Duration) -> Turn {
    match found {
        None => Turn::Write,
        Some(Some(written)) if written.by == me => Turn::Write,
        Some(_) => Turn::Rest(every * RESTS),
    }
}

/// Of all that are due at `now`, those that have waited longest.
#[must_use]
pub fn overdue(due: &BTreeMap<Key, Tick>, now: Tick, max: usize) -> Vec<Key> {
    let mut late: Vec<_> = due.iter().filter(|(_, at)| **at <= now).collect();
    late.sort_by_key(|(_, at)| **at);
    late.into_iter().take(max).map(|(key, _)| key.clone()).collect()
}

/// How long a value is kept that is written this long after its sum began: it is as old then.
#[must_use]
pub fn lives(every: Duration, elapsed: Duration) -> Duration {
    (every * LIVES).saturating_sub(elapsed)
}

impl Written {
    /// As text.
    #[must_use]
    pub fn encode(&self) -> String {
        format!("hst1 {} {:016x} {}", self.sum, self.by, self.every.as_millis())
    }

    /// Reads it; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Written> {
        let mut words = std::str::from_utf8(bytes.get(..bytes.len().min(100))?).ok()?.split(' ');
        if words.next()? != "hst1" {
            return None;
        }
        let sum = words.next()?.parse().ok()?;
        let by = u64::from_str_radix(words.next()?, 16).ok()?;
        let every = Duration::from_millis(u64::from(words.next()?.parse::<u32>().ok()?));
        words.next().is_none().then_some(Written { sum, by, every })
    }

    /// How long ago its sum began, of a value that the store still keeps for `left`, but for the time
    /// that it took on its way there; where the store does not say, as long as can be.
    #[must_use]
    pub fn age(&self, left: Option<Duration>) -> Duration {
        (self.every * LIVES).saturating_sub(left.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEC: Duration = Duration::from_secs(1);

    #[test]
    fn one_writes_and_the_others_rest_until_it_is_gone() {
        let mine = Written { sum: 5, by: 1, every: SEC };
        for (found, me, want) in [
            (None, 1, Turn::Write),
            (Some(Some(&mine)), 1, Turn::Write),
            (Some(Some(&mine)), 2, Turn::Rest(3 * SEC)),
            (Some(None), 2, Turn::Rest(3 * SEC)),
        ] {
            assert_eq!(turn(found, me, SEC), want, "{found:?} as {me}");
        }
    }

    #[test]
    fn a_value_is_as_old_as_its_sum_when_it_is_written() {
        let written = Written { sum: 5, by: 1, every: SEC };
        let late = SEC * 7 / 10;
        assert_eq!(written.age(Some(lives(SEC, late))), late);
        assert_eq!(lives(SEC, 9 * SEC), Duration::ZERO);
    }

    #[test]
    fn those_that_have_waited_longest_come_first_wherever_they_stand_in_the_list() {
        let keys: Vec<Key> = (0..100).map(|i| Key::from(format!("{i:03}"))).collect();
        let mut due: BTreeMap<Key, Tick> = keys.iter().map(|k| (k.clone(), Tick(1))).collect();
        let mut begun = std::collections::BTreeSet::new();
        // As many as are begun are due again at once.
        for now in 1..=10 {
            for key in overdue(&due, Tick(now), 10) {
                due.insert(key.clone(), Tick(now + 1));
                begun.insert(key);
            }
        }
        assert_eq!(begun.len(), 100);
        assert!(overdue(&due, Tick(1), 10).is_empty());
    }

    #[test]
    fn what_is_written_reads_back_and_nothing_else_does() {
        let written = Written { sum: -5, by: u64::MAX, every: SEC };
        let text = written.encode();
        assert_eq!(Written::parse(text.as_bytes()), Some(written));
        for wrong in ["", "5", "hst1 5 1", "hst2 5 1 1", "hst1 5 1 1 1", "hst1 5 1 99999999999"] {
            assert_eq!(Written::parse(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(written.age(Some(3 * SEC)), SEC);
        assert_eq!(written.age(None), 4 * SEC);
    }
}
