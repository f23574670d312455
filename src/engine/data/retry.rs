//! How many retries the calls of late have earned.
//!
//! - **What**: every call pays in a part of a retry, every retry takes out a whole one.
//! - **Invariant**: over any span, retries ≤ ratio × calls + burst. What is paid in beyond a burst
//!   is not kept.
//! - **Time and units**: none; thousandths of a retry, in whole numbers. A budget without a clock
//!   can be neither late nor early.
//! - **Bounds**: one word.
//! - **Source**: Google SRE book, "Handling Overload" (retries per client at 10 %); in place of the
//!   windows and the division `1 / percent` that make 0.6 behave as 1.0 in tower (issue 857).

/// How much is paid in, and how much is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Thousandths of a retry that a call pays in.
    pub permille: u16,
    /// Retries that are kept at most, and that a budget begins with.
    pub burst: u32,
}

impl Terms {
    /// A budget that nothing has been taken from.
    #[must_use]
    pub const fn full(self) -> u64 {
        self.burst as u64 * 1_000
    }

    /// What is kept after a call.
    #[must_use]
    pub fn deposit(self, kept: u64) -> u64 {
        (kept + u64::from(self.permille)).min(self.full())
    }

    /// What is left after a retry, if there is enough for one.
    #[must_use]
    pub const fn withdraw(self, kept: u64) -> Option<u64> {
        kept.checked_sub(1_000)
    }

    /// What is kept after a retry that was not made after all.
    #[must_use]
    pub fn give_back(self, kept: u64) -> u64 {
        (kept + 1_000).min(self.full())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Retries that a client gets for `calls` calls, all of which fail and are retried as often as
    /// the budget allows.
    fn retries(terms: Terms, calls: u64) -> u64 {
        let (mut kept, mut retries) = (terms.full(), 0);
        for _ in 0..calls {
            kept = terms.deposit(kept);
            while let Some(left) = terms.withdraw(kept) {
                (kept, retries) = (left, retries + 1);
            }
        }
        retries
    }

    #[test]
    fn every_ratio_gives_what_it_says_also_those_that_a_division_rounds() {
        for permille in 1..=1_000u16 {
            let terms = Terms { permille, burst: 10 };
            let calls = 10_000;
            let earned = calls * u64::from(permille) / 1_000;
            let got = retries(terms, calls);
            // The first call pays into a budget that is full.
            assert!(got <= earned + 10, "{permille}: {got}");
            assert!(got + 1 >= earned + 10, "{permille}: {got} of {}", earned + 10);
        }
    }

    proptest! {
        #[test]
        fn in_any_span_retries_are_at_most_the_ratio_of_its_calls_and_one_burst(
            permille in 0u16..=1_000,
            burst in 0u32..20,
            steps in proptest::collection::vec((any::<bool>(), any::<bool>()), 1..400),
        ) {
            let terms = Terms { permille, burst };
            let mut kept = terms.full();
            let mut log = vec![(0u64, 0u64)];
            let (mut calls, mut made) = (0, 0);
            for (call, back) in steps {
                if call {
                    calls += 1;
                    kept = terms.deposit(kept);
                } else if let Some(left) = terms.withdraw(kept) {
                    kept = left;
                    if back { kept = terms.give_back(kept) } else { made += 1 }
                }
                log.push((calls, made));
            }
            for (i, from) in log.iter().enumerate() {
                for to in &log[i..] {
                    let (calls, made) = (to.0 - from.0, to.1 - from.1);
                    prop_assert!(
                        1_000 * made <= calls * u64::from(permille) + 1_000 * u64::from(burst)
                    );
                }
            }
        }
    }
}
