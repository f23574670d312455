//! Numbers about a feed.

use crate::engine::control::aggregate;
use crate::engine::control::fleet::Edition;
use crate::engine::control::follow::{self, ALL_REFUSALS};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Plain numbers about one feed of this process, since it was started.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct FeedStats {
    /// Whether this process serves its group now, or is the fleet's aggregator.
    pub leads: bool,
    /// The list in force.
    pub edition: Option<Edition>,
    /// Lists: applied, expired, refused (by [`ALL_REFUSALS`]), and entries skipped.
    pub lists: follow::Counts,
    /// Reports: merged, and not counted, and why. While this process leads.
    pub reports: aggregate::Counts,
    /// Reporters that have reported lately. While this process leads.
    pub reporters: u64,
    /// From the sending of a report to the list that it was part of, as measured with the canary;
    /// on two machines as exact as their wall clocks.
    pub delay: Duration,
    /// What the feed's thread worked from the last byte of the list that was applied last to its
    /// being in force. The request path waits for none of it.
    pub applied_in: Duration,
    /// Followers that were refused: of another user, or too many.
    pub peers_refused: u64,
    /// Connections that were ended for a line that was too long, or that was no line of the feed.
    pub lines_refused: u64,
    /// Messages beyond a follower's allowance, passed over.
    pub throttled: u64,
    /// Followers that did not read for a second, and were let go.
    pub slow: u64,
    /// Lists that followers have refused.
    pub nacks: u64,
    /// Bytes that this process read: lines of a socket; names and values of a fleet's transport.
    pub bytes_in: u64,
    /// Bytes that this process sent, counted alike.
    pub bytes_out: u64,
    /// Reads of the registry's root, of salted counters, that this process made for its followers
    /// and itself.
    pub roots_read: u64,
    /// Roots of the registry that came with a token that was not out: never sent here, given up,
    /// or answered before. They renew nothing.
    pub roots_refused: u64,
    /// Calls to the transport that failed.
    pub transport_errors: u64,
    /// How often this process has come to lead.
    pub elections: u64,
    /// Keys of the list in force whose treatment this process is not set up for: slots without
    /// [`Salt`](crate::Salt), and copies, which are always of a process's own making.
    pub unobeyed: u64,
    /// Keys that this process left out of its reports for their length alone, each as often as it
    /// did: from 128 bytes on, a key is known beyond its process only when an operator names it.
    pub keys_too_long: u64,
    /// Keys that were left out of the last list that this process has issued: longer than
    /// [`Caps::key_bytes_max`](super::Caps::key_bytes_max), which would have the others refuse all
    /// of it.
    pub keys_unlisted: u64,
}

impl fmt::Display for FeedStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = if self.leads { "leads" } else { "follows" };
        write!(f, "{role}, ")?;
        match self.edition {
            Some(edition) => write!(f, "list {edition}")?,
            None => f.write_str("no list in force")?,
        }
        write!(f, ", {} applied, {} expired", self.lists.applied, self.lists.expired)?;
        for (refusal, n) in ALL_REFUSALS.iter().zip(self.lists.refused).filter(|(_, n)| *n > 0) {
            write!(f, ", {n} refused ({refusal})")?;
        }
        Ok(())
    }
}

/// Whoever runs a feed, asked for its numbers.
pub(crate) trait Numbers: Send + Sync {
    fn numbers(&self) -> FeedStats;

    /// The time of the list in force is over, whether or not the feed has noticed.
    fn lapse(&self);
}

/// What is counted where it happens.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) leads: AtomicBool,
    pub(crate) delay_ms: AtomicU64,
    /// The canary that the delay was measured with.
    canary_ms: AtomicU64,
    pub(crate) applied_ns: AtomicU64,
    pub(crate) peers_refused: AtomicU64,
    pub(crate) lines_refused: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) slow: AtomicU64,
    pub(crate) nacks: AtomicU64,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) roots_read: AtomicU64,
    pub(crate) roots_refused: AtomicU64,
    pub(crate) transport_errors: AtomicU64,
    pub(crate) elections: AtomicU64,
    pub(crate) keys_unlisted: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

impl Counters {
    /// A canary has come round; the same again once its time is over is one that has stopped.
    pub(crate) fn heard_canary(&self, wall_ms: u64, canary_ms: u64, ttl: Duration) {
        let age = wall_ms.saturating_sub(canary_ms);
        let new = self.canary_ms.swap(canary_ms, Ordering::Relaxed) != canary_ms;
        if new || u128::from(age) > ttl.as_millis() {
            self.delay_ms.store(age, Ordering::Relaxed);
        }
    }

    pub(crate) fn read(&self) -> FeedStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FeedStats {
            leads: self.leads.load(Ordering::Relaxed),
            delay: Duration::from_millis(get(&self.delay_ms)),
            applied_in: Duration::from_nanos(get(&self.applied_ns)),
            peers_refused: get(&self.peers_refused),
            lines_refused: get(&self.lines_refused),
            throttled: get(&self.throttled),
            slow: get(&self.slow),
            nacks: get(&self.nacks),
            bytes_in: get(&self.bytes_in),
            bytes_out: get(&self.bytes_out),
            roots_read: get(&self.roots_read),
            roots_refused: get(&self.roots_refused),
            transport_errors: get(&self.transport_errors),
            elections: get(&self.elections),
            keys_unlisted: get(&self.keys_unlisted),
            ..FeedStats::default()
        }
    }
}
