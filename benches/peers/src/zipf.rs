//! Keys as Zipf's law has them: the n-th comes 1/n times as often as the first.

#[derive(Clone, Debug)]
pub struct Zipf {
    below: Vec<f64>,
    state: u64,
}

impl Zipf {
    #[must_use]
    pub fn new(keys: u32, seed: u64) -> Zipf {
        let mut sum = 0.0;
        let below = (1..=keys)
            .map(|n| {
                sum += 1.0 / f64::from(n);
                sum
            })
            .collect();
        Zipf { below, state: seed.wrapping_mul(2).wrapping_add(1) }
    }

    /// A number of [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.state ^ (self.state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The rank of the next key, from 0.
    pub fn draw(&mut self) -> usize {
        let at = self.uniform() * self.below.last().copied().unwrap_or_default();
        self.below.partition_point(|below| *below < at)
    }
}
