//! What was decided in the last hour, and why.
//!
//! - **What**: decisions in the order in which they were made, for those who ask.
//! - **Invariant**: none is older than [`SPAN`] where it is read.
//! - **Time and units**: [`Tick`].
//! - **Bounds**: the cap given at the start; the oldest go first.
//! - **Source**: none; bookkeeping.

use super::super::time::Tick;
use crate::key::Key;
use std::collections::VecDeque;
use std::time::Duration;

/// How long a decision is remembered.
pub const SPAN: Duration = Duration::from_secs(3_600);

/// A decision, and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Decided {
    /// When.
    pub at: Tick,
    /// About which key.
    pub key: Key,
    /// What, and why, for people.
    pub what: String,
}

/// See the module's description.
#[derive(Clone, Debug)]
pub struct History {
    most: usize,
    all: VecDeque<Decided>,
}

impl History {
    /// Nothing has been decided. At most `most` decisions are remembered.
    #[must_use]
    pub fn new(most: usize) -> History {
        History { most, all: VecDeque::new() }
    }

    /// Remembers one.
    pub fn note(&mut self, at: Tick, key: Key, what: String) {
        let old = |d: &Decided| at.since(d.at) > SPAN;
        while self.all.len() >= self.most || self.all.front().is_some_and(old) {
            self.all.pop_front();
        }
        self.all.push_back(Decided { at, key, what });
    }

    /// Those of the last hour, oldest first.
    pub fn recent(&self, now: Tick) -> impl Iterator<Item = &Decided> {
        self.all.iter().filter(move |d| now.since(d.at) <= SPAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_an_hour_or_beyond_the_cap_is_forgotten() {
        let mut history = History::new(3);
        let at = |secs: u64| Tick(1).after(Duration::from_secs(secs));
        for secs in 0..5 {
            history.note(at(secs), "k".into(), secs.to_string());
        }
        let told = |history: &History, now| -> Vec<String> {
            history.recent(now).map(|d| d.what.clone()).collect()
        };
        assert_eq!(told(&history, at(5)), ["2", "3", "4"]);
        assert_eq!(told(&history, at(3_603)), ["3", "4"]);
        history.note(at(9_000), "k".into(), "late".into());
        assert_eq!(told(&history, at(9_000)), ["late"]);
    }
}
