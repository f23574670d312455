//! How many slots a counter needs, where its slots fall on shards at random.
//!
//! - **What**: the exact distribution of the busiest shard's number of slots when `k` slots fall
//!   on `n` shards, each on any with the same chance; from it, the smallest `k` that keeps the
//!   busiest shard below its ceiling with a given probability.
//! - **Invariant**: no simulation, no approximation: quantiles are exact up to rounding.
//! - **Time and units**: rates per second; probabilities from 0 to 1.
//! - **Bounds**: [`K_MAX`] slots; `O(k² log n)` additions.
//! - **Source**: multinomial occupancy: P(max ≤ m) = k! / nᵏ · \[xᵏ\] (Σ_{j ≤ m} xʲ / j!)ⁿ. The
//!   expected number of shards in use is n (1 − (1 − 1/n)ᵏ).

/// Slots at most.
pub const K_MAX: u32 = 1024;

/// How many different shards `k` slots are expected to fall on.
#[must_use]
pub fn distinct(k: u32, shards: u32) -> f64 {
    let n = f64::from(shards);
    n * (1.0 - (1.0 - 1.0 / n).powi(k as i32))
}

/// The probability that no shard gets more than `most` of `k` slots.
#[must_use]
pub fn busiest_at_most(k: u32, shards: u32, most: u32) -> f64 {
    let k = k.min(K_MAX) as usize;
    // Coefficients scaled by λʲ e^-λ with λ = k/n, so that they are Poisson weights, near 1.
    let rate = k as f64 / f64::from(shards.max(1));
    let mut weight = (-rate).exp();
    let mut one = Vec::with_capacity(most as usize + 1);
    for j in 0..=(most as usize).min(k) {
        one.push(weight);
        weight *= rate / (j + 1) as f64;
    }
    let all = power(&one, shards, k);
    // The sum of n Poisson variables of rate λ is k with probability e^-k kᵏ / k!.
    let log_whole = (1..=k).map(|i| (k as f64 / i as f64).ln()).sum::<f64>() - k as f64;
    let of_k = all.get(k).copied().unwrap_or(0.0);
    (of_k / log_whole.exp()).clamp(0.0, 1.0)
}

/// A polynomial to the power of `n`, up to degree `degree`.
fn power(base: &[f64], n: u32, degree: usize) -> Vec<f64> {
    let mut out = vec![1.0];
    let (mut square, mut n) = (base.to_vec(), n);
    while n > 0 {
        if n & 1 == 1 {
            out = product(&out, &square, degree);
        }
        n >>= 1;
        if n > 0 {
            square = product(&square, &square, degree);
        }
    }
    out
}

fn product(a: &[f64], b: &[f64], degree: usize) -> Vec<f64> {
    let len = (a.len() + b.len() - 1).min(degree + 1);
    let mut out = vec![0.0; len];
    for (i, x) in a.iter().enumerate().take(len) {
        for (o, y) in out[i..].iter_mut().zip(b) {
            *o += x * y;
        }
    }
    out
}

/// The smallest number that the busiest shard's slots do not exceed with probability `quantile`.
#[must_use]
pub fn busiest(k: u32, shards: u32, quantile: f64) -> u32 {
    let least = k.div_ceil(shards.max(1));
    (least..k).find(|most| busiest_at_most(k, shards, *most) >= quantile).unwrap_or(k)
}

/// What `k` slots come to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Row {
    /// Slots.
    pub k: u32,
    /// Different shards, expected.
    pub distinct: f64,
    /// Slots on the busiest shard: the median.
    pub median: u32,
    /// Slots on the busiest shard: the 95th percentile.
    pub p95: u32,
    /// What the busiest shard gets a second, at the 95th percentile.
    pub load_per_sec: f64,
}

/// The row of `k`.
#[must_use]
pub fn row(k: u32, rate_per_sec: f64, shards: u32) -> Row {
    let p95 = busiest(k, shards, 0.95);
    Row {
        k,
        distinct: distinct(k, shards),
        median: busiest(k, shards, 0.5),
        p95,
        load_per_sec: rate_per_sec * f64::from(p95) / f64::from(k),
    }
}

/// The smallest `k` whose busiest shard stays at or below `limit_per_sec` at the 95th percentile;
/// `None` when no allowed one does.
#[must_use]
pub fn smallest(rate_per_sec: f64, shards: u32, limit_per_sec: f64) -> Option<u32> {
    (1..=K_MAX).find(|k| {
        let most = (limit_per_sec * f64::from(*k) / rate_per_sec).floor();
        most >= 1.0 && busiest_at_most(*k, shards, most as u32) >= 0.95
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All kⁿ placements, counted.
    fn enumerated(k: u32, shards: u32, most: u32) -> f64 {
        let all = u64::from(shards).pow(k);
        let good = (0..all).filter(|at| {
            let (mut at, mut loads) = (*at, vec![0; shards as usize]);
            for _ in 0..k {
                loads[(at % u64::from(shards)) as usize] += 1;
                at /= u64::from(shards);
            }
            loads.into_iter().all(|l| l <= most)
        });
        good.count() as f64 / all as f64
    }

    #[test]
    fn the_distribution_is_the_one_that_counting_gives() {
        for (k, shards) in [(1, 3), (4, 3), (6, 4), (8, 3), (5, 7)] {
            for most in 1..=k {
                let (got, want) = (busiest_at_most(k, shards, most), enumerated(k, shards, most));
                assert!((got - want).abs() < 1e-9, "{k} on {shards}, {most}: {got} {want}");
            }
        }
    }

    #[test]
    fn the_figures_of_the_design_come_out() {
        assert!((distinct(80, 200) - 66.1).abs() < 0.05);
        assert_eq!(row(320, 40_000.0, 200).load_per_sec, 875.0);
        assert_eq!(row(80, 40_000.0, 200).load_per_sec, 2_000.0);
    }

    #[test]
    fn the_smallest_meets_the_target_and_one_less_does_not() {
        let k = smallest(40_000.0, 200, 900.0).unwrap();
        assert!(row(k, 40_000.0, 200).load_per_sec <= 900.0);
        assert!((1..k).all(|k| row(k, 40_000.0, 200).load_per_sec > 900.0));
        assert_eq!(smallest(1e9, 3, 1.0), None);
    }
}
