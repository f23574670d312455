//! What each shard of the store gets from this process.
//!
//! - **What**: per shard, the requests of this process that reached the store, in the running
//!   window and as rates over the last finished one.
//! - **Invariant**: the rates are of one finished window and its measured duration; a shard that
//!   got nothing in it has rate zero and still counts for the mean.
//! - **Time and units**: requests (or cost) as scaled from samples; rates per second.
//! - **Bounds**: [`SHARDS_MAX`] shards; requests of others are not counted.
//! - **Source**: "hottest shard over mean shard", the number to watch in the article on sharding,
//!   part 3, there with an alert at 1.5.

use std::time::Duration;

/// Shards beyond this number are not told apart.
pub const SHARDS_MAX: usize = 4_096;

/// Loads per shard.
#[derive(Clone, Debug, Default)]
pub struct Shards {
    running: Vec<u64>,
    rates: Vec<f64>,
}

impl Shards {
    /// Counts a load of `weight` on `shard`.
    pub fn observe(&mut self, shard: u32, weight: u64) {
        let shard = shard as usize;
        if shard >= SHARDS_MAX {
            return;
        }
        if shard >= self.running.len() {
            self.running.resize(shard + 1, 0);
        }
        self.running[shard] = self.running[shard].saturating_add(weight);
    }

    /// Ends a window that lasted `duration`.
    pub fn finish_window(&mut self, duration: Duration) {
        let secs = duration.as_secs_f64().max(1e-9);
        self.rates.clear();
        self.rates.extend(self.running.iter().map(|&count| count as f64 / secs));
        self.running.fill(0);
    }

    /// Loads a second of each shard in the last finished window.
    #[must_use]
    pub fn rates(&self) -> &[f64] {
        &self.rates
    }

    /// Loads a second of one shard in the last finished window.
    #[must_use]
    pub fn rate(&self, shard: u32) -> f64 {
        self.rates.get(shard as usize).copied().unwrap_or(0.0)
    }

    /// The hottest shard over the mean of all; `None` without traffic or with fewer than two.
    #[must_use]
    pub fn hottest_over_mean(&self) -> Option<f64> {
        let sum: f64 = self.rates.iter().sum();
        let hottest = self.rates.iter().copied().fold(0.0, f64::max);
        (self.rates.len() > 1 && sum > 0.0).then(|| hottest * self.rates.len() as f64 / sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_shard_is_held_against_the_mean_of_all_that_were_ever_seen() {
        let mut shards = Shards::default();
        assert_eq!(shards.hottest_over_mean(), None);
        (0..4).for_each(|shard| shards.observe(shard, 10));
        shards.observe(1, 40);
        shards.observe(u32::MAX, 1_000_000);
        shards.finish_window(Duration::from_millis(500));
        assert_eq!(shards.rates(), [20.0, 100.0, 20.0, 20.0]);
        assert_eq!(shards.hottest_over_mean(), Some(2.5));
        shards.observe(2, 8);
        shards.finish_window(Duration::from_secs(1));
        assert_eq!((shards.rate(0), shards.rate(2), shards.rate(9)), (0.0, 8.0, 0.0));
        assert_eq!(shards.hottest_over_mean(), Some(4.0));
    }
}
