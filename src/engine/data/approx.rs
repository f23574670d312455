//! Counting for display: one add in k is made, by k.
//!
//! - **What**: draws whether an add is made, and says how far off the sum may be.
//! - **Invariant**: the expected sum is the true count, and its standard error is the one stated.
//! - **Time and units**: whole adds.
//! - **Bounds**: none needed; nothing is kept.
//! - **Source**: Morris (1978), with a fixed probability; the variance of a binomial count.

/// What an add of one comes to: `one_in`, with probability 1/`one_in`, else nothing. `dice` is any
/// 64 random bits.
#[must_use]
pub fn draw(one_in: u32, dice: u64) -> Option<i64> {
    let k = one_in.max(1);
    // Multiply-high: the share of dice that fall into the first of k equal parts.
    let part = (u128::from(dice) * u128::from(k)) >> 64;
    (part == 0).then_some(i64::from(k))
}

/// The standard error of a sum of such adds: k times the deviation of a binomial count of n adds
/// with probability 1/k is √(n·(k − 1)), and the sum is the best guess at n.
#[must_use]
pub fn standard_error(total: i64, one_in: u32) -> f64 {
    (total.max(0) as f64 * f64::from(one_in.max(1) - 1)).sqrt()
}

/// A count in few characters, as people read it: `950`, `1.2K`, `87K`, `1.2M`. Rounds towards
/// zero, so that a milestone is never shown early.
///
/// # Example
/// ```
/// assert_eq!(heatsink::rounded(1_234_567), "1.2M");
/// ```
#[must_use]
pub fn rounded(count: i64) -> String {
    const UNITS: [(u64, char); 6] = [
        (1_000_000_000_000_000_000, 'E'),
        (1_000_000_000_000_000, 'P'),
        (1_000_000_000_000, 'T'),
        (1_000_000_000, 'B'),
        (1_000_000, 'M'),
        (1_000, 'K'),
    ];
    let n = count.unsigned_abs();
    let sign = if count < 0 { "-" } else { "" };
    let Some((unit, letter)) = UNITS.into_iter().find(|(unit, _)| n >= *unit) else {
        return format!("{sign}{n}");
    };
    let (whole, tenth) = (n / unit, n % unit / (unit / 10));
    if whole >= 10 || tenth == 0 {
        return format!("{sign}{whole}{letter}");
    }
    format!("{sign}{whole}.{tenth}{letter}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// splitmix64.
    fn dice(i: u64) -> u64 {
        let mut z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    #[test]
    fn the_error_stated_is_the_error_made() {
        for one_in in [1, 2, 10, 100] {
            let (runs, adds) = (400u64, 5_000u64);
            let mut squares = 0.0;
            let mut mean = 0.0;
            for run in 0..runs {
                let seed = |i| dice(run * adds + i + 1);
                let total: i64 = (0..adds).filter_map(|i| draw(one_in, seed(i))).sum();
                let off = total as f64 - adds as f64;
                squares += off * off / runs as f64;
                mean += off / runs as f64;
            }
            let stated = standard_error(adds as i64, one_in);
            assert!((squares.sqrt() - stated).abs() <= 0.1 * stated, "1 in {one_in}");
            assert!(mean.abs() <= 4.0 * stated / (runs as f64).sqrt(), "1 in {one_in}: {mean}");
        }
    }

    #[test]
    fn a_count_is_shown_in_few_characters_and_never_early() {
        for (count, shown) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1K"),
            (1_999, "1.9K"),
            (9_999, "9.9K"),
            (10_999, "10K"),
            (999_999, "999K"),
            (1_234_567, "1.2M"),
            (-1_234_567, "-1.2M"),
            (i64::MAX, "9.2E"),
            (i64::MIN, "-9.2E"),
        ] {
            assert_eq!(rounded(count), shown);
        }
    }
}
