//! How many requests one sample stands for.
//!
//! - **What**: the distance between samples, and the choice of its mean, `N`, from a budget of
//!   samples per second.
//! - **Invariant**: at a steady rate, `N` settles and yields no more samples than the budget; `N`
//!   is 1 wherever the budget allows it.
//! - **Time and units**: requests and samples per second, over durations that the caller measured.
//! - **Bounds**: `N` up to [`ONE_IN_MAX`].
//! - **Source**: Vitter 1987, skipping between samples; a fixed stride aliases with periodic
//!   traffic (a key that comes once in 100 requests is never, or always, on a stride of 100).

use super::super::time::Tick;
use rand_xoshiro::rand_core::Rng;
use std::time::Duration;

/// One sample never stands for more requests than this.
pub const ONE_IN_MAX: u32 = 65_536;

/// Traffic must fall to this share of what the present `N` was chosen for before `N` is lowered,
/// so that a rate at the edge does not move it every window.
const LOWER_AT: f64 = 0.9;

/// The budget is an average over this many seconds: what was saved up may be spent in a burst.
const BURST_SECS: f64 = 3.0;

/// How `N` is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sampling {
    /// At most about this many samples a second.
    Budget {
        /// Samples a second, for the whole process.
        per_sec: u32,
    },
    /// Always one sample in this many requests.
    Fixed(u32),
}

impl Default for Sampling {
    /// 20,000 samples a second: at 100 ns each, a five-hundredth of one core.
    fn default() -> Sampling {
        Sampling::Budget { per_sec: 20_000 }
    }
}

/// How many requests to let pass before the next one that is sampled, if one in `one_in` is, on
/// average. Every request is sampled with the same probability, independently of all others.
///
/// # Cost
/// One random number and one logarithm per sample; the requests between cost a decrement.
pub fn skip(rng: &mut impl Rng, one_in: u32) -> u32 {
    if one_in <= 1 {
        return 0;
    }
    // In (0, 1]: the logarithm is finite, and the longest skip is 37 times the mean.
    let uniform = ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let miss = 1.0 - 1.0 / f64::from(one_in.min(ONE_IN_MAX));
    (uniform.ln() / miss.ln()) as u32
}

/// The choice of `N`.
///
/// The budget is an average over three seconds, not a limit on every moment: a burst is when hot
/// keys show, and reading it coarsely would miss them to save some milliseconds of one core.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    mode: Sampling,
    one_in: u32,
    /// Samples that may still come at once: at most what [`BURST_SECS`] bring.
    tokens: f64,
    tokens_at: Tick,
    /// Requests a second, averaged over about [`BURST_SECS`].
    rate: f64,
}

impl Control {
    pub(crate) fn new(mode: Sampling, now: Tick) -> Control {
        let (one_in, tokens) = match mode {
            Sampling::Budget { per_sec } => (1, BURST_SECS * f64::from(per_sec.max(1))),
            Sampling::Fixed(n) => (n.clamp(1, ONE_IN_MAX), 0.0),
        };
        Control { mode, one_in, tokens, tokens_at: now, rate: 0.0 }
    }

    pub(crate) fn one_in(&self) -> u32 {
        self.one_in
    }

    /// Takes note of `samples` samples, and doubles `N` when the saved budget is spent, and again at
    /// each quarter of a second's worth: a surge must not fill the shell's queue until a
    /// span ends. Called at every sample.
    pub(crate) fn spend(&mut self, now: Tick, samples: u32) {
        let Sampling::Budget { per_sec } = self.mode else { return };
        let per_sec = f64::from(per_sec.max(1));
        let earned = now.since(self.tokens_at).as_secs_f64() * per_sec;
        self.tokens_at = self.tokens_at.max(now);
        self.tokens = (self.tokens + earned).min(BURST_SECS * per_sec) - f64::from(samples);
        // What came at twice the `N` would have been half as many samples, so half the debt goes.
        while self.tokens < 0.0 && self.one_in < ONE_IN_MAX {
            self.one_in = self.one_in.saturating_mul(2).min(ONE_IN_MAX);
            self.tokens = per_sec / 4.0 + self.tokens / 2.0;
        }
        self.tokens = self.tokens.max(0.0);
    }

    /// Raises `N` if the rate, of which `requests` within `span` are the latest part, does not fit
    /// the budget.
    pub(crate) fn raise(&mut self, requests: u64, span: Duration) {
        let secs = span.as_secs_f64().max(1e-9);
        self.rate += (requests as f64 / secs - self.rate) * (secs / BURST_SECS).min(1.0);
        self.one_in = self.one_in.max(self.needed(self.rate));
    }

    /// Lowers `N` if `requests` within `span` fit the budget with a smaller one.
    pub(crate) fn lower(&mut self, requests: u64, span: Duration) {
        let rate = requests as f64 / span.as_secs_f64().max(1e-9);
        self.one_in = self.one_in.min(self.needed(rate / LOWER_AT));
    }

    fn needed(&self, rate: f64) -> u32 {
        match self.mode {
            Sampling::Fixed(_) => self.one_in,
            Sampling::Budget { per_sec } => {
                ((rate / f64::from(per_sec.max(1))).ceil() as u32).clamp(1, ONE_IN_MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_xoshiro::Xoshiro256PlusPlus;
    use rand_xoshiro::rand_core::SeedableRng;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn skips_have_the_mean_and_spread_of_independent_sampling() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for one_in in [1u32, 2, 10, 100, 1_000] {
            let n = 40_000;
            let skips: Vec<f64> = (0..n).map(|_| f64::from(skip(&mut rng, one_in))).collect();
            let mean = skips.iter().sum::<f64>() / f64::from(n);
            let var = skips.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / f64::from(n);
            let expected = f64::from(one_in) - 1.0;
            let spread = (expected * f64::from(one_in)).sqrt();
            assert!((mean - expected).abs() <= 0.03 * expected, "{one_in}: mean {mean}");
            assert!((var.sqrt() - spread).abs() <= 0.05 * spread, "{one_in}: sd {}", var.sqrt());
        }
    }

    #[test]
    fn every_request_is_sampled_below_the_budget() {
        let mut control = Control::new(Sampling::default(), Tick::ZERO);
        (0..100).for_each(|_| control.raise(20_000, SECOND));
        assert_eq!(control.one_in(), 1);
        (0..100).for_each(|_| control.raise(20_001, SECOND));
        assert_eq!(control.one_in(), 2);
    }

    #[test]
    fn a_rate_at_the_edge_does_not_move_n_every_window() {
        let mut control = Control::new(Sampling::default(), Tick::ZERO);
        let mut changes = 0;
        (0..30).for_each(|_| control.raise(200_000, SECOND));
        for window in 0..1_000u64 {
            let before = control.one_in();
            let requests = 200_000 + (window * 7_919) % 10_000 - 5_000;
            control.raise(requests, SECOND);
            control.lower(requests, SECOND);
            changes += u32::from(control.one_in() != before);
        }
        assert!(changes <= 2, "{changes}");
        assert_eq!(control.one_in(), 11);
    }

    #[test]
    fn a_burst_is_read_in_full_from_the_saved_budget_and_a_surge_raises_n_at_once() {
        let mut control = Control::new(Sampling::Budget { per_sec: 1_000 }, Tick::ZERO);
        (0..3_000).for_each(|_| control.spend(Tick(1), 1));
        assert_eq!(control.one_in(), 1);
        control.spend(Tick(1), 1);
        assert_eq!(control.one_in(), 2);
        (0..251).for_each(|_| control.spend(Tick(2), 1));
        assert_eq!(control.one_in(), 4);
    }

    #[test]
    fn a_fixed_n_stays() {
        let mut fixed = Control::new(Sampling::Fixed(7), Tick::ZERO);
        fixed.spend(Tick(1), u32::MAX);
        fixed.raise(u64::MAX, SECOND);
        fixed.lower(0, SECOND);
        assert_eq!(fixed.one_in(), 7);
    }
}
