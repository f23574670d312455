//! Freshness of what the near cache holds.
//!
//! - **What**: from the start of a load to the points in time at which its value stops being fresh
//!   and stops being served; and which of two values may replace the other.
//! - **Invariant**: no value is served whose age, counted from the start of its load, exceeds the
//!   stale limit or the store's own expiry.
//! - **Time and units**: ticks in nanoseconds; jitter in permille of the fresh time.
//! - **Bounds**: constant space.
//! - **Source**: RFC 5861 (stale-while-revalidate); age from request start as in rueidis; one
//!   jitter draw per fill (fxa-oauth-server#370).

use crate::engine::time::{Tick, nanos};
use crate::store::Version;
use std::time::Duration;

/// How long values live in the near cache. Shell side: `NearCache`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Age up to which a value is served without a thought.
    pub fresh: Duration,
    /// Age up to which a value may be served while it is being loaded again.
    pub stale: Duration,
    /// The fresh time of "there is no such key"; its stale limit shrinks in proportion.
    pub absent_fresh: Duration,
    /// The fresh time varies by up to this much in both directions, so that keys filled together
    /// do not expire together.
    pub jitter_permille: u16,
    /// Pause after a failed refresh, while a stale value can be served.
    pub cool_down: Duration,
    /// By how much the clock may lag behind; subtracted from every limit.
    pub resolution: Duration,
    /// A refresh begins earlier by as long as the last load took.
    pub early: bool,
    /// Refreshes begin at the process's own phase of the fresh time.
    pub phased: bool,
}

/// Until when one cached value may be served. Drawn once, when it is cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ages {
    /// When the load of the value started.
    pub started: Tick,
    /// From here on the value is stale: served, and loaded again.
    pub fresh_until: Tick,
    /// From here on the value is expired: never served.
    pub stale_until: Tick,
}

/// How a value stands at some point in time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Freshness {
    /// Younger than the fresh time.
    Fresh,
    /// Served while it is loaded again.
    Stale,
    /// Too old to be served.
    Expired,
}

impl Policy {
    /// The ages of a value whose load started at `started`.
    ///
    /// `ttl_left` is the store's own expiry as it was reported at some point after `started`, so
    /// `started + ttl_left` is no later than the true expiry. `dice` is any 64 random bits.
    #[must_use]
    pub fn ages(&self, started: Tick, ttl_left: Option<Duration>, absent: bool, dice: u64) -> Ages {
        let fresh = if absent { self.absent_fresh } else { self.fresh };
        let stale = if absent { self.absent_stale() } else { self.stale };
        let limit = ttl_left.map_or(stale, |ttl| ttl.min(stale)).saturating_sub(self.resolution);
        let jitter = if self.phased { 0 } else { self.jitter_permille };
        let fresh = jittered(fresh, jitter, dice).saturating_sub(self.resolution);
        Ages {
            started,
            fresh_until: started.after(fresh.min(limit)),
            stale_until: started.after(limit),
        }
    }

    /// `ages` with the start of the refresh moved forward, never back: by as long as the load
    /// `took`, so that the next value is there when this one stops being fresh; and to the
    /// process's own `phase` (any 64 bits that stay the same for one key in one process).
    ///
    /// When a whole fleet has forgotten a key at one instant, it loads it at one instant, and would
    /// do so again at every refresh. With phases the next refreshes are spread over half the fresh
    /// time, and those after it stay so: a phase recurs every half of it, and the one within the
    /// second half is taken.
    #[must_use]
    pub fn timed(&self, mut ages: Ages, took: Duration, phase: u64) -> Ages {
        let fresh = ages.fresh_until.since(ages.started);
        if self.phased {
            let step = nanos(self.fresh.saturating_sub(self.resolution)) / 2;
            if step > 0 {
                let first = ages.started.0.saturating_add(step);
                let past = (first.wrapping_sub(phase % step)) % step;
                ages.fresh_until = ages.fresh_until.min(Tick(first.saturating_add(step - past)));
            }
        }
        if self.early {
            ages.fresh_until = ages.fresh_until.before(took.min(fresh / 2));
        }
        ages
    }

    /// The stale limit of an absent value: as many times its fresh time as for a present one.
    fn absent_stale(&self) -> Duration {
        let ratio = nanos(self.stale) as f64 / nanos(self.fresh).max(1) as f64;
        self.absent_fresh.mul_f64(ratio.clamp(1.0, 100.0)).min(self.stale)
    }

    /// When a refresh that failed at `now` may be tried again.
    #[must_use]
    pub fn refresh_again(&self, now: Tick) -> Tick {
        now.after(self.cool_down)
    }
}

/// `base` moved by up to `permille` in both directions; the mean over all dice is `base`.
#[must_use]
pub fn jittered(base: Duration, permille: u16, dice: u64) -> Duration {
    let span = u128::from(nanos(base)) * u128::from(permille.min(1000)) / 1000;
    let offset = (u128::from(dice) * (2 * span + 1)) >> 64;
    let n = u128::from(nanos(base)) + offset - span;
    Duration::from_nanos(u64::try_from(n).unwrap_or(u64::MAX))
}

impl Ages {
    /// How the value stands at `now`.
    #[must_use]
    pub fn at(&self, now: Tick) -> Freshness {
        if now >= self.stale_until {
            Freshness::Expired
        } else if now >= self.fresh_until {
            Freshness::Stale
        } else {
            Freshness::Fresh
        }
    }
}

/// What decides between two values of one key: the order of their loads, and their versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank {
    /// The flight that loaded the value; later flights have higher numbers.
    pub flight: u64,
    /// The version the store reported.
    pub version: Option<Version>,
}

impl Rank {
    /// True when a value of this rank may stand where one of rank `other` stands now: it was
    /// loaded later, and its version is not older.
    #[must_use]
    pub fn may_replace(&self, other: &Rank) -> bool {
        let newer_or_unknown = match (self.version, other.version) {
            (Some(mine), Some(theirs)) => mine >= theirs,
            _ => true,
        };
        self.flight > other.flight && newer_or_unknown
    }
}

/// Bytes that an entry of the hot tier is charged with.
#[must_use]
pub fn charge(key_bytes: usize, value_bytes: usize, stripes: usize) -> usize {
    /// The cell, the entry and the index slot, measured on a 64-bit machine.
    const FIXED: usize = 384;
    /// One allocation of a reference count per stripe.
    const PER_STRIPE: usize = 136;
    key_bytes + value_bytes + FIXED + stripes * PER_STRIPE
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy() -> Policy {
        Policy {
            fresh: Duration::from_secs(1),
            stale: Duration::from_secs(3),
            absent_fresh: Duration::from_millis(250),
            jitter_permille: 100,
            cool_down: Duration::from_millis(200),
            resolution: Duration::from_millis(4),
            early: false,
            phased: false,
        }
    }

    proptest! {
        /// C11.
        #[test]
        fn c11_nothing_older_than_the_stale_limit_or_the_stores_expiry_is_served(
            started in 0u64..1 << 60, ttl in proptest::option::of(0u64..10_000_000_000),
            absent: bool, dice: u64, wait in 0u64..20_000_000_000, lag in 0u64..=4_000_000,
        ) {
            let p = policy();
            let ages = p.ages(Tick(started), ttl.map(Duration::from_nanos), absent, dice);
            // The clock shows up to one resolution less than the truth.
            let shown = Tick((started + wait).saturating_sub(lag));
            if ages.at(shown) != Freshness::Expired {
                prop_assert!(wait < nanos(p.stale));
                prop_assert!(ttl.is_none_or(|ttl| wait < ttl));
            }
            prop_assert!(ages.fresh_until <= ages.stale_until);
        }

        /// C12.
        #[test]
        fn c12_jitter_stays_inside_its_bounds(base in 0u64..1 << 50, dice: u64, j in 0u16..=1000) {
            let got = nanos(jittered(Duration::from_nanos(base), j, dice));
            let span = (u128::from(base) * u128::from(j) / 1000) as u64;
            prop_assert!(got >= base - span && got <= base + span);
        }
    }

    /// C12: two-sided, so that the mean time to live is the configured one (novuhq/novu#2296).
    #[test]
    fn c12_jitter_has_the_configured_mean() {
        let base = Duration::from_secs(1);
        let step = u64::MAX / 1000;
        let sum: u128 = (0..=1000).map(|i| jittered(base, 200, i * step).as_nanos()).sum();
        let mean = sum as f64 / 1001.0 / 1e9;
        assert!((mean - 1.0).abs() < 1e-3, "{mean}");
    }

    /// C15.
    #[test]
    fn c15_an_older_version_or_an_earlier_load_never_replaces_a_newer_one() {
        let rank = |flight, v: Option<u64>| Rank { flight, version: v.map(Version::seq) };
        assert!(rank(2, None).may_replace(&rank(1, None)));
        assert!(!rank(1, None).may_replace(&rank(2, None)));
        assert!(!rank(2, Some(4)).may_replace(&rank(1, Some(5))));
        assert!(rank(2, Some(5)).may_replace(&rank(1, Some(5))));
    }

    /// Loads in the busiest 10 ms of each round, of 1,000 processes that all load at one instant.
    fn peaks(policy: &Policy) -> Vec<usize> {
        let mut rng = 1u64;
        let mut draw = || {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            rng ^ (rng >> 29)
        };
        let phases: Vec<u64> = (0..1_000).map(|_| draw()).collect();
        let mut next = vec![Tick(77_000_000_000); 1_000];
        (0..5)
            .map(|_| {
                let mut buckets = std::collections::BTreeMap::<u64, usize>::new();
                for (at, phase) in next.iter_mut().zip(&phases) {
                    *buckets.entry(at.0 / 10_000_000).or_default() += 1;
                    let ages = policy.ages(*at, None, false, draw());
                    let ages = policy.timed(ages, Duration::from_millis(2), *phase);
                    assert!(ages.fresh_until > *at && ages.fresh_until <= ages.stale_until);
                    *at = ages.fresh_until;
                }
                buckets.into_values().max().unwrap()
            })
            .collect()
    }

    /// 1,000 loads over 100 buckets are 10 a bucket; after a common reload they have half the
    /// fresh time, 20 a bucket.
    #[test]
    fn a_fleet_that_reloads_together_does_so_once() {
        let phased = peaks(&Policy { phased: true, ..policy() });
        assert_eq!(phased[0], 1_000);
        assert!(phased[1..].iter().all(|peak| *peak <= 45), "{phased:?}");
        let jittered = peaks(&policy());
        assert!(jittered[1] >= 45, "without phases it takes rounds: {jittered:?}");
        let bare = peaks(&Policy { jitter_permille: 0, ..policy() });
        assert_eq!(bare, [1_000; 5]);
    }

    #[test]
    fn an_early_refresh_begins_as_much_earlier_as_the_load_took() {
        let p = Policy { early: true, jitter_permille: 0, ..policy() };
        let ages = p.ages(Tick(0), None, false, 0);
        let took = Duration::from_millis(30);
        assert_eq!(ages.fresh_until.since(p.timed(ages, took, 0).fresh_until), took);
        let slow = p.timed(ages, Duration::from_secs(9), 0);
        assert!(slow.fresh_until.0 >= ages.fresh_until.0 / 2, "never before the half of it");
        assert_eq!(policy().timed(ages, took, 5), ages);
    }

    #[test]
    fn absent_values_live_shorter() {
        let p = policy();
        let present = p.ages(Tick(0), None, false, u64::MAX / 2);
        let absent = p.ages(Tick(0), None, true, u64::MAX / 2);
        assert!(absent.fresh_until < present.fresh_until);
        assert!(absent.stale_until < present.stale_until);
    }
}
