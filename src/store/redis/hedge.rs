//! When a second read of the same value is worth sending.
//!
//! - **What**: an estimate of how long the slowest twentieth of a node's reads takes, and a budget.
//! - **Invariant**: hedges are at most a twentieth of the reads, and ten at once.
//! - **Time and units**: nanoseconds; the budget counts in twentieths of a hedge.
//! - **Bounds**: delays of 0.5 ms to 250 ms.
//! - **Source**: Dean and Barroso, "The Tail at Scale", 2013: defer the second request until the
//!   first is slower than the 95th percentile.

use std::time::Duration;

/// One hedge in so many reads.
const READS_PER_HEDGE: u32 = 20;
const BURST: u32 = 10;
pub(super) const FIRST_NS: u64 = 10_000_000;
const MIN_NS: u64 = 500_000;
const MAX_NS: u64 = 250_000_000;

/// How long a read is waited for before it is sent to a replica too.
pub(super) fn delay(estimate_ns: u64) -> Duration {
    Duration::from_nanos(estimate_ns)
}

/// The estimate of the 95th percentile after one more read: it goes up by 19 where it goes down by
/// 1, so it rests where 19 reads are faster for each that is slower. A read that was given up
/// waiting for counts as that long.
pub(super) fn estimated(estimate_ns: u64, took: Duration) -> u64 {
    let step = estimate_ns / 512;
    let slower = crate::engine::time::nanos(took) >= estimate_ns;
    let next = if slower { estimate_ns + 19 * step } else { estimate_ns - step };
    next.clamp(MIN_NS, MAX_NS)
}

/// The budget after one more read.
pub(super) fn earned(budget: u32) -> u32 {
    (budget + 1).min(BURST * READS_PER_HEDGE)
}

/// The budget after one more hedge, if it allows one.
pub(super) fn spent(budget: u32) -> Option<u32> {
    budget.checked_sub(READS_PER_HEDGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_finds_the_95th_percentile_and_follows_it() {
        for scale in [1u64, 20] {
            let mut estimate = FIRST_NS;
            // 1 to 100 times 100 µs, in an order without runs.
            for i in 0..20_000u64 {
                let took = Duration::from_micros((i * 37 % 100 + 1) * 100 * scale);
                estimate = estimated(estimate, took);
            }
            let want = 9_500_000 * scale;
            assert!((want * 8 / 10..want * 12 / 10).contains(&estimate), "{estimate} of {want}");
        }
        assert_eq!((0..100_000).fold(FIRST_NS, |e, _| estimated(e, Duration::ZERO)), MIN_NS);
        assert_eq!((0..10_000).fold(FIRST_NS, |e, _| estimated(e, Duration::MAX)), MAX_NS);
    }

    #[test]
    fn hedges_are_a_twentieth_of_the_reads_and_ten_at_once() {
        let (mut budget, mut hedges) = (0, 0);
        for _ in 0..10_000 {
            budget = earned(budget);
            if let Some(left) = spent(budget) {
                (budget, hedges) = (left, hedges + 1);
            }
        }
        assert_eq!(hedges, 500);
        budget = (0..10_000).fold(budget, |b, _| earned(b));
        assert_eq!(std::iter::successors(Some(budget), |b| spent(*b)).count() - 1, 10);
    }
}
