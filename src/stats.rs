//! Plain numbers about one instance.

use crate::adds::AddStats;
use crate::engine::data::near::Freshness;
use crate::sample::{Sample, Seen};
use crate::shared::Shared;
use std::fmt;
use std::time::Duration;

/// Plain numbers about one instance, since it was built.
///
/// Hits are counted on samples (one request in [`sampled_one_in`](Stats::sampled_one_in), exact
/// while that is 1); everything that touched the store is counted exactly.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Requests served by the near cache within their fresh time; estimated from samples.
    pub hits_fresh: u64,
    /// Requests served by the near cache past their fresh time; estimated from samples.
    pub hits_stale: u64,
    /// Requests that went to the store or joined a load; estimated from samples.
    pub misses: u64,
    /// Loads that were started.
    pub loads: u64,
    /// Callers that shared a load of somebody else.
    pub joined: u64,
    /// Values that were not cached because a write or an invalidation overlapped their load.
    pub overlapped: u64,
    /// Loads that were given up by a dead runtime and led anew by a waiter.
    pub handed_over: u64,
    /// Outcomes that came after the time limit had closed their flight.
    pub late: u64,
    /// Loads that ran into the time limit.
    pub timed_out: u64,
    /// Callers that went to the store by themselves because a table was full.
    pub bypassed: u64,
    /// Writes that began.
    pub writes: u64,
    /// Writes that ended with an unknown outcome.
    pub writes_unknown: u64,
    /// Values that were not cached because the hot tier was full or they were too large.
    pub refused_full: u64,
    /// Values that were not cached because a newer one was there.
    pub refused_older: u64,
    /// Hot keys now.
    pub hot_keys: usize,
    /// Bytes in use by the hot tier now.
    pub near_bytes: u64,
    /// Loads under way now.
    pub loads_in_flight: usize,
    /// Keys with a load, a write or a quarantine under way now.
    pub keys_under_way: usize,
    /// Loads under way now on each shard, where the store knows its shards.
    pub loads_in_flight_by_shard: Vec<usize>,
    /// Requests of this process that reached the store, of the hottest shard over the mean of all,
    /// in the last finished window; where the store knows its shards. Alert at 1.5.
    pub hottest_over_mean_shard: Option<f64>,
    /// Keys that turned hot.
    pub promotions: u64,
    /// Keys that stopped being hot.
    pub demotions: u64,
    /// Changes between hot and not hot of the key that had the most.
    pub flips_max: u32,
    /// The longest time from a key's coming within reach of the threshold to its promotion.
    pub promoted_after_max: Duration,
    /// Detection windows that lasted much longer than planned.
    pub windows_stalled: u64,
    /// A key is hot from this many requests a second on, at the present sampling.
    pub threshold_per_sec: f64,
    /// Writes that were announced to other processes.
    pub announced: u64,
    /// Keys that were forgotten because another process announced a write.
    pub announcements_heard: u64,
    /// Times at which everything was forgotten because the stream of announcements had a gap; the
    /// first is its start.
    pub stream_gaps: u64,
    /// Turns of the driver that ended in a panic of something they called. Look for its message.
    pub driver_panics: u64,
    /// One request in this many is sampled now.
    pub sampled_one_in: u32,
    /// Samples that found the queue full.
    pub samples_dropped: u64,
    /// The greatest age at which a sampled value was served.
    pub served_age_max: Duration,
    /// Sampled served ages: entry `i` counts requests with an age below 2^`i` ms (and not below
    /// the half of it).
    pub served_age_log2_ms: [u64; 16],
    /// Adds to buffered counters; estimated from samples.
    pub adds_held: u64,
    /// The counters' own numbers; the store operations of [`AddStats::batches`] are among
    /// [`writes`](Stats::writes).
    pub adds: AddStats,
    /// The feed that this handle takes part in, if it does.
    #[cfg(feature = "feed")]
    pub feed: Option<crate::feed::FeedStats>,
}

/// What the driver adds up from samples.
#[derive(Debug, Default)]
pub(crate) struct Books {
    hits_fresh: u64,
    hits_stale: u64,
    misses: u64,
    held: u64,
    age_max: Duration,
    ages: [u64; 16],
}

impl Books {
    pub(crate) fn enter(&mut self, sample: &Sample) {
        let stands_for = u64::from(sample.one_in);
        match sample.seen {
            Seen::Hit(freshness, age) => {
                match freshness {
                    Freshness::Stale => self.hits_stale += stands_for,
                    _ => self.hits_fresh += stands_for,
                }
                self.age_max = self.age_max.max(age);
                let ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
                let bucket = (64 - ms.leading_zeros()).min(15);
                self.ages[bucket as usize] += stands_for;
            }
            Seen::Joined | Seen::Load => self.misses += stands_for,
            Seen::Held => self.held += stands_for,
            Seen::Write => {}
        }
    }
}

impl Stats {
    /// Loads and writes per request, estimated; `None` before the first request.
    #[must_use]
    pub fn store_operations_per_request(&self) -> Option<f64> {
        let reads = self.hits_fresh + self.hits_stale + self.misses;
        // A batch is one write for all of its adds, and a flush one for all that it carries.
        let combined = self.adds.adds.saturating_sub(self.adds.batches);
        let requests = reads + self.writes + combined + self.adds_held;
        let operations = self.loads + self.bypassed + self.writes + self.adds.flushes;
        (requests > 0).then(|| operations as f64 / requests as f64)
    }

    pub(crate) fn collect(shared: &Shared) -> Stats {
        let (tally, keys_under_way, loads_in_flight) = shared.tally();
        let (refused_full, refused_older) = shared.refused();
        let mut steering = shared.steering.lock();
        // What the driver has not fetched yet counts too.
        shared.take_samples(&mut steering, shared.clock.now());
        let counts = steering.counts();
        let threshold_per_sec = steering.detector().threshold_per_sec();
        let hottest_over_mean_shard = steering.shards().hottest_over_mean();
        drop(steering);
        #[cfg(feature = "feed")]
        let feed = shared.feed.lock().as_ref().and_then(std::sync::Weak::upgrade);
        #[cfg(feature = "feed")]
        let feed = feed.map(|feed| feed.numbers());
        let books = shared.books.lock();
        let stream = shared.stream.as_ref().map(|stream| stream.counts()).unwrap_or_default();
        Stats {
            announced: stream.announced,
            announcements_heard: stream.heard,
            stream_gaps: stream.gaps,
            hits_fresh: books.hits_fresh,
            hits_stale: books.hits_stale,
            misses: books.misses,
            loads: tally.loads,
            joined: tally.joined,
            overlapped: tally.overlapped,
            handed_over: tally.handed_over,
            late: tally.late,
            timed_out: tally.timed_out,
            bypassed: tally.bypassed,
            writes: tally.writes,
            writes_unknown: tally.unknown,
            refused_full,
            refused_older,
            hot_keys: shared.index.load().len(),
            near_bytes: shared.used.get(),
            loads_in_flight: loads_in_flight.all,
            loads_in_flight_by_shard: loads_in_flight.by_shard,
            hottest_over_mean_shard,
            promotions: counts.promotions,
            demotions: counts.demotions,
            flips_max: counts.flips_max,
            promoted_after_max: counts.promoted_after_max,
            windows_stalled: counts.windows_stalled,
            threshold_per_sec,
            keys_under_way,
            driver_panics: shared.driver_panics.load(std::sync::atomic::Ordering::Relaxed),
            sampled_one_in: shared.sampler.one_in(),
            samples_dropped: shared.sampler.dropped(),
            served_age_max: books.age_max,
            served_age_log2_ms: books.ages,
            adds_held: books.held,
            adds: shared.counters.tallies.read(),
            #[cfg(feature = "feed")]
            feed,
        }
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} hits ({} stale, oldest {} ms), {} misses, {} loads ({} shared by {} more callers, \
             {} overlapped by writes), {} writes ({} unknown), {} adds in {} batches, {} flushes \
             ({} failed), {} hot keys in {} bytes",
            self.hits_fresh + self.hits_stale,
            self.hits_stale,
            self.served_age_max.as_millis(),
            self.misses,
            self.loads,
            self.loads.min(self.joined),
            self.joined,
            self.overlapped,
            self.writes,
            self.writes_unknown,
            self.adds.adds,
            self.adds.batches,
            self.adds.flushes,
            self.adds.flushes_failed,
            self.hot_keys,
            self.near_bytes,
        )
    }
}
