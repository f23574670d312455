//! Counters that are written in several regions, each without asking the others.
//!
//! - **What**: one lane per region, written by that region only; merging takes the greater of two
//!   lanes.
//! - **Invariant**: merging is commutative, associative and idempotent, and loses no add.
//! - **Time and units**: none.
//! - **Bounds**: 256 regions, names of 64 bytes.
//! - **Source**: G-counter and PN-counter of Shapiro, Preguiça, Baquero and Zawirski, "A
//!   comprehensive study of convergent and commutative replicated data types" (2011).

use std::collections::BTreeMap;

/// Regions of one counter at most.
pub const REGIONS_MAX: usize = 256;

/// The longest name of a region, in bytes.
pub const REGION_BYTES_MAX: usize = 64;

/// Why an add or a merge was refused; nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// A lane would not fit into 64 bits.
    Overflow,
    /// There would be too many regions, or the name of one is empty or too long.
    Region,
}

/// A counter that only grows.
///
/// A region that loses its own lane must not begin it at zero: it reads it back from any other
/// region, which holds a copy, or goes on under a new name.
///
/// # Example
/// ```
/// use heatsink::engine::data::regions::GCounter;
/// let (mut frankfurt, mut tokyo) = (GCounter::default(), GCounter::default());
/// frankfurt.add("fra", 3).unwrap();
/// tokyo.add("tyo", 4).unwrap();
/// frankfurt.merge(&tokyo).unwrap();
/// frankfurt.merge(&tokyo).unwrap(); // a repeated message changes nothing
/// assert_eq!(frankfurt.total(), 7);
/// ```
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct GCounter(BTreeMap<String, u64>);

impl GCounter {
    /// Adds `n` to the lane of `region`, which must be the caller's own.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn add(&mut self, region: &str, n: u64) -> Result<(), Refused> {
        let lane = self.0.get(region).copied().unwrap_or(0);
        let sum = lane.checked_add(n).ok_or(Refused::Overflow)?;
        self.set(region, sum)
    }

    /// Takes in one lane as another region sent it.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn merge_lane(&mut self, region: &str, total: u64) -> Result<(), Refused> {
        let lane = self.0.get(region).copied().unwrap_or(0);
        self.set(region, lane.max(total))
    }

    /// Takes in everything that `other` knows.
    ///
    /// # Errors
    /// [`Refused::Region`] when there would be too many.
    pub fn merge(&mut self, other: &GCounter) -> Result<(), Refused> {
        let new = other.0.keys().filter(|region| !self.0.contains_key(*region)).count();
        if self.0.len() + new > REGIONS_MAX {
            return Err(Refused::Region);
        }
        for (region, total) in &other.0 {
            self.merge_lane(region, *total)?;
        }
        Ok(())
    }

    /// The lanes, in the order of their regions.
    pub fn lanes(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(region, total)| (region.as_str(), *total))
    }

    /// The sum: 256 lanes of 64 bits always fit.
    #[must_use]
    pub fn total(&self) -> u128 {
        self.0.values().map(|n| u128::from(*n)).sum()
    }

    fn set(&mut self, region: &str, total: u64) -> Result<(), Refused> {
        if let Some(lane) = self.0.get_mut(region) {
            *lane = total;
            return Ok(());
        }
        if self.0.len() >= REGIONS_MAX || !(1..=REGION_BYTES_MAX).contains(&region.len()) {
            return Err(Refused::Region);
        }
        self.0.insert(region.to_owned(), total);
        Ok(())
    }
}

/// A counter that grows and shrinks: one that only grows for each direction.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PnCounter {
    up: GCounter,
    down: GCounter,
}

impl PnCounter {
    /// Adds `n` to the lanes of `region`, which must be the caller's own.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn add(&mut self, region: &str, n: i64) -> Result<(), Refused> {
        let side = if n < 0 { &mut self.down } else { &mut self.up };
        side.add(region, n.unsigned_abs())
    }

    /// Takes in everything that `other` knows.
    ///
    /// # Errors
    /// [`Refused::Region`] when there would be too many; then it may have taken in one direction,
    /// which merging again completes.
    pub fn merge(&mut self, other: &PnCounter) -> Result<(), Refused> {
        self.up.merge(&other.up)?;
        self.down.merge(&other.down)
    }

    /// What was added and what was taken away.
    #[must_use]
    pub fn sides(&self) -> (&GCounter, &GCounter) {
        (&self.up, &self.down)
    }

    /// The sum.
    #[must_use]
    pub fn total(&self) -> i128 {
        // 256 lanes of 64 bits are 72 bits.
        self.up.total() as i128 - self.down.total() as i128
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const REGIONS: [&str; 4] = ["fra", "iad", "syd", "tyo"];

    fn counter() -> impl Strategy<Value = PnCounter> {
        proptest::collection::vec((0..4usize, -50i64..50), 0..12).prop_map(|adds| {
            let mut counter = PnCounter::default();
            for (region, n) in adds {
                counter.add(REGIONS[region], n).unwrap();
            }
            counter
        })
    }

    fn merged(a: &PnCounter, b: &PnCounter) -> PnCounter {
        let mut out = a.clone();
        out.merge(b).unwrap();
        out
    }

    proptest! {
        #[test]
        fn merging_is_commutative_associative_and_idempotent(
            a in counter(), b in counter(), c in counter(),
        ) {
            prop_assert_eq!(merged(&a, &b), merged(&b, &a));
            prop_assert_eq!(merged(&merged(&a, &b), &c), merged(&a, &merged(&b, &c)));
            prop_assert_eq!(merged(&a, &a), a.clone());
            let both = merged(&a, &b);
            prop_assert_eq!(merged(&both, &a), both);
        }

        /// Regions add to their own lanes and send what they know, repeatedly, late, in any order.
        #[test]
        fn regions_that_have_heard_of_each_other_agree_on_the_sum_of_all_adds(
            steps in proptest::collection::vec((0..4usize, 0..4usize, -50i64..50, any::<bool>()), 0..80),
        ) {
            let mut all = vec![PnCounter::default(); 4];
            let mut old = all.clone();
            let mut sum = 0i128;
            for (at, from, n, adds) in steps {
                if adds {
                    all[at].add(REGIONS[at], n).unwrap();
                    sum += i128::from(n);
                } else {
                    // A message that was sent some time ago.
                    let message = std::mem::replace(&mut old[from], all[from].clone());
                    all[at].merge(&message).unwrap();
                }
            }
            let everything = all.iter().fold(PnCounter::default(), |acc, c| merged(&acc, c));
            for counter in &mut all {
                counter.merge(&everything).unwrap();
                prop_assert_eq!(&*counter, &everything);
            }
            prop_assert_eq!(everything.total(), sum);
        }

        #[test]
        fn a_counter_that_only_grows_never_shrinks_by_merging(
            a in proptest::collection::vec((0..4usize, any::<u32>()), 0..10),
            b in proptest::collection::vec((0..4usize, any::<u32>()), 0..10),
        ) {
            let build = |adds: Vec<(usize, u32)>| {
                let mut counter = GCounter::default();
                for (region, n) in adds {
                    counter.add(REGIONS[region], n.into()).unwrap();
                }
                counter
            };
            let (mut a, b) = (build(a), build(b));
            let before = a.total();
            a.merge(&b).unwrap();
            prop_assert!(a.total() >= before.max(b.total()));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_and_changes_nothing() {
        let mut counter = GCounter::default();
        counter.add("fra", u64::MAX).unwrap();
        assert_eq!(counter.add("fra", 1), Err(Refused::Overflow));
        assert_eq!(counter.add("", 1), Err(Refused::Region));
        assert_eq!(counter.add(&"x".repeat(65), 1), Err(Refused::Region));
        for i in 1..REGIONS_MAX {
            counter.add(&format!("r{i}"), 1).unwrap();
        }
        assert_eq!(counter.add("one more", 1), Err(Refused::Region));
        let mut other = GCounter::default();
        other.add("another", 1).unwrap();
        assert_eq!(counter.clone().merge(&other), Err(Refused::Region));
        assert_eq!(counter.total(), u128::from(u64::MAX) + 255);
    }
}
