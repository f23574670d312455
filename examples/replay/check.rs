//! The checker: what every read must at least have seen.
//!
//! Values are version numbers. A write takes the next number of its key in the same step in which
//! it is sent, and the store takes as long for every write, so that the numbers of a key grow in
//! the order in which the store applies them.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// The age up to which a handle with the default near cache serves a hot value.
pub(crate) const STALE: Duration = Duration::from_secs(3);

#[derive(Default)]
struct Written {
    last_sent: u64,
    /// By server: the highest version whose write has returned there.
    own: HashMap<usize, u64>,
    /// Returned less than the stale limit ago, in the order of their return.
    recent: VecDeque<(u64, u64)>,
    /// The highest version returned longer ago.
    settled: u64,
}

/// Books of what has been written and what was read. Keys are numbers.
#[derive(Default)]
pub(crate) struct Checker {
    written: HashMap<usize, Written>,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) stale: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

impl Checker {
    /// The version of a write that is sent now.
    pub(crate) fn send(&mut self, key: usize) -> u64 {
        let written = self.written.entry(key).or_default();
        written.last_sent += 1;
        written.last_sent
    }

    /// A write has returned.
    pub(crate) fn returned(&mut self, key: usize, server: usize, version: u64, now_ns: u64) {
        self.writes += 1;
        let written = self.written.entry(key).or_default();
        let own = written.own.entry(server).or_default();
        *own = version.max(*own);
        written.recent.push_back((now_ns, version));
        written.settle(now_ns);
    }

    /// The oldest version that a read beginning now may return.
    pub(crate) fn floor(&mut self, key: usize, server: usize, now_ns: u64) -> u64 {
        let Some(written) = self.written.get_mut(&key) else { return 0 };
        written.settle(now_ns);
        written.settled.max(written.own.get(&server).copied().unwrap_or(0))
    }

    /// A read that had to return at least `floor` has returned `value`.
    pub(crate) fn read(&mut self, floor: u64, value: &[u8], age: Duration) {
        self.reads += 1;
        let version = std::str::from_utf8(value)
            .ok()
            .and_then(|text| text.split(':').next())
            .and_then(|number| number.parse::<u64>().ok());
        match version {
            Some(version) if version >= floor && age <= STALE => {}
            Some(_) => self.stale += 1,
            None => self.failed(format!("a value that nobody wrote: {value:?}")),
        }
    }

    pub(crate) fn failed(&mut self, why: String) {
        self.errors += 1;
        self.first_error.get_or_insert(why);
    }
}

impl Written {
    fn settle(&mut self, now_ns: u64) {
        let stale_ns = STALE.as_nanos() as u64;
        while let Some(&(at, version)) = self.recent.front()
            && at + stale_ns < now_ns
        {
            self.settled = self.settled.max(version);
            self.recent.pop_front();
        }
    }
}
