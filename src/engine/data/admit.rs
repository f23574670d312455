//! Budgets: how often one key, or one tenant, may cost the store an operation.
//!
//! - **What**: one bucket a key in a table of fixed size. A call is held against the bucket of its
//!   key, then against that of its tenant, and then both are charged, or neither.
//! - **Invariant**: no key passes its own budget, whether it has a bucket of its own or not. A key
//!   that finds its set full shares the set's last bucket, and takes over what that has been
//!   charged when it gets one of its own; a bucket is forgotten only once it is full again.
//! - **Time and units**: ticks; a call costs one or more units of the budget.
//! - **Bounds**: [`WAYS`] keys a set, 256 bytes. Keys are told apart by a seeded 64-bit hash: two
//!   of a million share a bucket with a chance of one in 37 million.
//! - **Source**: the generic cell rate algorithm (ITU-T I.371, annex A) in its virtual scheduling
//!   form; the time per unit is rounded up to whole nanoseconds, so that no more is ever allowed.

use super::super::time::{Tick, nanos};
use std::time::Duration;

/// Keys of one set that have a bucket of their own.
pub const WAYS: usize = 15;

/// So many units in so much time, and how many at once.
///
/// In any span of time the store gets no more than the units of that span and one burst.
///
/// # Example
/// ```
/// # use heatsink::Budget;
/// # use std::time::Duration;
/// let busy = Budget::per_sec(500).burst(50);
/// let rare = Budget::new(10, Duration::from_secs(60));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budget {
    interval_ns: u64,
    burst: u32,
}

impl Budget {
    /// `units` in every `span`, and as many at once.
    #[must_use]
    pub fn new(units: u32, span: Duration) -> Budget {
        let interval_ns = nanos(span).div_ceil(u64::from(units.max(1))).max(1);
        Budget { interval_ns, burst: units.max(1) }
    }

    /// `units` a second, and as many at once.
    #[must_use]
    pub fn per_sec(units: u32) -> Budget {
        Budget::new(units, Duration::from_secs(1))
    }

    /// How many at once. At least 1.
    #[must_use]
    pub fn burst(mut self, units: u32) -> Budget {
        self.burst = units.max(1);
        self
    }

    /// How long a full burst takes to come back.
    #[must_use]
    pub fn span(&self) -> Duration {
        Duration::from_nanos(self.interval_ns.saturating_mul(u64::from(self.burst)))
    }

    /// Holds `cost` units against a bucket that is full again at `full_at`: when it would be full
    /// with them, or how long they have to wait.
    ///
    /// # Errors
    /// How long until the same question has another answer; [`Duration::MAX`] for more than a
    /// burst.
    #[inline]
    pub fn ask(&self, full_at: Tick, now: Tick, cost: u32) -> Result<Tick, Duration> {
        if cost > self.burst {
            return Err(Duration::MAX);
        }
        let units = self.interval_ns.saturating_mul(u64::from(cost));
        let next = full_at.max(now).0.saturating_add(units);
        let limit = now.after(self.span()).0;
        if next > limit { Err(Duration::from_nanos(next - limit)) } else { Ok(Tick(next)) }
    }
}

/// Some buckets, of keys that share no more than a place in memory.
#[derive(Clone, Debug, Default)]
pub struct Set {
    /// Zero: no key.
    ids: [u64; WAYS],
    full_at: [Tick; WAYS],
    /// The bucket of all other keys of this set.
    shared: Tick,
    /// Units that were charged here.
    charged: u64,
}

/// Which bucket of its set a key is held against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Its own.
    Own(usize),
    /// The shared one, and it gets this one of its own when it is charged.
    Free(usize),
    /// The shared one.
    Shared,
}

impl Set {
    #[inline]
    fn place(&self, id: u64, now: Tick) -> Place {
        if let Some(at) = self.ids.iter().position(|&i| i == id) {
            return Place::Own(at);
        }
        // A bucket that is full says no more than none.
        match self.full_at.iter().position(|&full_at| full_at <= now) {
            Some(at) => Place::Free(at),
            None => Place::Shared,
        }
    }

    #[inline]
    fn bucket(&self, place: Place) -> Tick {
        match place {
            Place::Own(at) => self.full_at[at],
            Place::Free(_) | Place::Shared => self.shared,
        }
    }

    #[inline]
    fn charge(&mut self, id: u64, place: Place, full_at: Tick, cost: u32) {
        self.charged += u64::from(cost);
        match place {
            Place::Own(at) => self.full_at[at] = full_at,
            Place::Free(at) => (self.ids[at], self.full_at[at]) = (id, full_at),
            Place::Shared => self.shared = full_at,
        }
    }

    /// Units that were charged to this set so far.
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// Keys with a bucket of their own that is not full.
    #[must_use]
    pub fn tracked(&self, now: Tick) -> usize {
        self.full_at.iter().filter(|full_at| **full_at > now).count()
    }
}

/// One budget that a call is held against.
#[derive(Debug)]
pub struct Ask<'a> {
    /// The set of the key or tenant.
    pub set: &'a mut Set,
    /// Its hash.
    pub id: u64,
    /// Its budget.
    pub budget: &'a Budget,
}

impl Ask<'_> {
    #[inline]
    fn check(&self, now: Tick, cost: u32) -> Result<(u64, Place, Tick), Duration> {
        // Zero stands for an empty way.
        let id = self.id.max(1);
        let place = self.set.place(id, now);
        let full_at = self.budget.ask(self.set.bucket(place), now, cost)?;
        Ok((id, place, full_at))
    }
}

/// Whose budget a call was refused by, and how long it lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The key's.
    Key(Duration),
    /// The tenant's.
    Tenant(Duration),
}

/// Holds one call against the budget of its key, then against that of its tenant, and charges both
/// or none.
///
/// # Errors
/// Whose budget refused it.
#[inline]
pub fn admit(
    now: Tick,
    cost: u32,
    key: Option<Ask<'_>>,
    tenant: Option<Ask<'_>>,
) -> Result<(), Refused> {
    let of_key = match &key {
        Some(ask) => Some(ask.check(now, cost).map_err(Refused::Key)?),
        None => None,
    };
    if let Some(ask) = tenant {
        let (id, place, full_at) = ask.check(now, cost).map_err(Refused::Tenant)?;
        ask.set.charge(id, place, full_at, cost);
    }
    if let (Some(ask), Some((id, place, full_at))) = (key, of_key) {
        ask.set.charge(id, place, full_at, cost);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use governor::clock::{Clock as _, FakeRelativeClock};
    use governor::{Quota, RateLimiter};
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::num::NonZeroU32;

    const MS: Duration = Duration::from_millis(1);

    fn one(set: &mut Set, id: u64, budget: &Budget, now: Tick) -> Result<(), Refused> {
        admit(now, 1, Some(Ask { set, id, budget }), None)
    }

    proptest! {
        /// governor is the oracle for one key.
        #[test]
        fn one_key_is_admitted_exactly_when_governor_admits_it(
            units in 1u32..2_000,
            burst in 1u32..50,
            steps in proptest::collection::vec(0u64..20_000_000, 1..200),
        ) {
            let period = Duration::from_secs(1) / units;
            let quota = Quota::with_period(period).unwrap();
            let quota = quota.allow_burst(NonZeroU32::new(burst).unwrap());
            let clock = FakeRelativeClock::default();
            let oracle = RateLimiter::direct_with_clock(quota, clock.clone());
            let budget = Budget::new(1, period).burst(burst);
            let (mut set, mut now) = (Set::default(), Tick(1_000_000_000));
            for step in steps {
                clock.advance(Duration::from_nanos(step));
                now = now.after(Duration::from_nanos(step));
                let theirs = oracle.check();
                let ours = one(&mut set, 7, &budget, now);
                prop_assert_eq!(ours.is_ok(), theirs.is_ok());
                if let (Err(Refused::Key(wait)), Err(theirs)) = (ours, theirs) {
                    prop_assert_eq!(wait, theirs.wait_time_from(clock.now()));
                }
            }
        }

        /// Whatever comes in between, and however full the set is: what one key was admitted never
        /// exceeds its own budget, in any span.
        #[test]
        fn no_key_passes_its_budget_in_a_set_that_is_far_too_small(
            calls in proptest::collection::vec((0u64..60, 0u64..8), 1..1_500),
        ) {
            let budget = Budget::new(1, 20 * MS).burst(3);
            let (mut set, mut now) = (Set::default(), Tick(1));
            let mut naive: BTreeMap<u64, Tick> = BTreeMap::new();
            for (id, step) in calls {
                now = now.after(Duration::from_millis(step));
                if one(&mut set, id + 1, &budget, now).is_ok() {
                    let own = naive.entry(id).or_default();
                    let next = budget.ask(*own, now, 1);
                    prop_assert!(next.is_ok(), "key {} passed its budget", id);
                    *own = next.unwrap();
                }
            }
        }

        /// A refused call changes nothing, whichever of the two refuses.
        #[test]
        fn a_refused_call_consumes_nothing(
            calls in proptest::collection::vec((0u64..4, 0u64..2, 0u64..30), 1..400),
        ) {
            let (of_key, of_tenant) =
                (Budget::per_sec(50).burst(4), Budget::per_sec(80).burst(6));
            let (mut keys, mut tenants, mut now) = (Set::default(), Set::default(), Tick(1));
            let mut naive: BTreeMap<(bool, u64), Tick> = BTreeMap::new();
            for (key, tenant, step) in calls {
                now = now.after(Duration::from_millis(step));
                let (k, t) = (naive.get(&(true, key)), naive.get(&(false, tenant)));
                let k = of_key.ask(k.copied().unwrap_or_default(), now, 1);
                let t = of_tenant.ask(t.copied().unwrap_or_default(), now, 1);
                let expected = match (k, t) {
                    (Err(wait), _) => Err(Refused::Key(wait)),
                    (_, Err(wait)) => Err(Refused::Tenant(wait)),
                    (Ok(k), Ok(t)) => {
                        naive.insert((true, key), k);
                        naive.insert((false, tenant), t);
                        Ok(())
                    }
                };
                let got = admit(
                    now,
                    1,
                    Some(Ask { set: &mut keys, id: key + 1, budget: &of_key }),
                    Some(Ask { set: &mut tenants, id: tenant + 1, budget: &of_tenant }),
                );
                prop_assert_eq!(got, expected);
            }
        }
    }

    #[test]
    fn a_set_is_four_lines_of_memory() {
        assert_eq!(size_of::<Set>(), 256);
    }

    #[test]
    fn more_than_a_burst_is_never_a_matter_of_waiting() {
        let budget = Budget::per_sec(10).burst(3);
        assert_eq!(budget.ask(Tick::ZERO, Tick(5), 4), Err(Duration::MAX));
        assert!(budget.ask(Tick::ZERO, Tick(5), 3).is_ok());
        assert_eq!(Budget::per_sec(0), Budget::per_sec(1));
    }

    #[test]
    fn a_key_that_leaves_the_shared_bucket_takes_its_charges_along() {
        let budget = Budget::new(1, 100 * MS).burst(2);
        let (mut set, now) = (Set::default(), Tick(1));
        for id in 1..=WAYS as u64 {
            assert_eq!(one(&mut set, id, &budget, now), Ok(()));
        }
        assert_eq!(set.tracked(now), WAYS);
        // Sixteenth: the shared bucket, twice; then a way is free and nothing is forgiven.
        assert_eq!(one(&mut set, 99, &budget, now), Ok(()));
        assert_eq!(one(&mut set, 99, &budget, now), Ok(()));
        let later = now.after(100 * MS);
        assert_eq!(one(&mut set, 99, &budget, later), Ok(()));
        assert_eq!(one(&mut set, 99, &budget, later), Err(Refused::Key(100 * MS)));
        assert_eq!(set.charged(), WAYS as u64 + 3);
    }
}
