//! What the detector promises about rates, as opposed to bounds: how many hot keys it finds, how
//! soon, and that it does not flap. Every figure is stated at full size; a debug build runs a
//! part of it.

use heatsink::engine::control::detect::{Detector, Options, Sample};
use heatsink::engine::control::merge::{Limits, Merge, Report, ReportKey};
use heatsink::engine::control::sampling::{Sampling, skip};
use heatsink::engine::control::sketch::{Observation, Sketch};
use heatsink::engine::control::verdict::Verdict;
use heatsink::engine::time::Tick;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::time::Duration;

/// `full` in a release build, `part` where the optimizer does not help.
fn sized(full: u64, part: u64) -> u64 {
    if cfg!(debug_assertions) { part } else { full }
}

fn uniform(rng: &mut impl Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// A wait until the next of events that come at random at this rate.
fn gap_nanos(rng: &mut impl Rng, per_sec: f64) -> u64 {
    (-(1.0 - uniform(rng)).ln() / per_sec * 1e9) as u64
}

fn hash(key: u64) -> u64 {
    let mut x = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    fn new(keys: usize) -> Zipf {
        let mut total = 0.0;
        let ranks = (1..=keys).map(|rank| {
            total += 1.0 / rank as f64;
            total
        });
        Zipf { cumulative: ranks.collect() }
    }

    fn draw(&self, rng: &mut impl Rng) -> u64 {
        let at = uniform(rng) * self.cumulative[self.cumulative.len() - 1];
        self.cumulative.partition_point(|c| *c < at).min(self.cumulative.len() - 1) as u64
    }
}

fn observe(sketch: &mut Sketch, key: u64) {
    let bytes = key.to_le_bytes();
    sketch.observe(&Observation {
        hash: hash(key),
        key: &bytes,
        weight: 1,
        write: false,
        loaded: true,
    });
}

/// Runs all timeouts up to `now`, as a driver that is never late. Returns the window verdicts.
fn advance(detector: &mut Detector, now: Tick) -> u64 {
    let mut verdicts = 0;
    while let Some(due) = detector.poll_timeout().filter(|due| *due <= now) {
        detector.handle_timeout(due);
        while detector.poll_verdict().is_some() {
            verdicts += 1;
        }
    }
    verdicts
}

fn sample(detector: &mut Detector, now: Tick, key: u64, loaded: bool) -> Option<Verdict> {
    let bytes = key.to_le_bytes();
    let one_in = detector.sampling();
    detector.handle_sample(
        now,
        &Sample { hash: hash(key), key: &bytes, write: false, weight: 1, loaded, one_in },
    )
}

fn detector(promote_per_sec: f64, one_in: u32, seed: u64) -> Detector {
    let sampling = Sampling::Fixed(one_in);
    Detector::new(Options { promote_per_sec, sampling, ..Options::default() }, seed)
}

#[test]
fn the_sketch_finds_the_keys_above_a_tenth_of_a_percent() {
    let zipf = Zipf::new(100_000);
    let seeds = sized(20, 4);
    let mut recall = 0.0;
    for seed in 0..seeds {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut sketch = Sketch::new(256, seed);
        let mut exact = vec![0u64; 100_000];
        for _ in 0..1_000_000 {
            let key = zipf.draw(&mut rng);
            exact[key as usize] += 1;
            observe(&mut sketch, key);
        }
        let mut found = 0;
        for entry in sketch.entries().filter(|entry| entry.lower_bound() >= 1_000) {
            let key = u64::from_le_bytes(entry.key().try_into().unwrap());
            assert!(exact[key as usize] >= 1_000, "precision must be 1");
            found += 1;
        }
        let hot = exact.iter().filter(|count| **count >= 1_000).count();
        recall += f64::from(found) / hot as f64 / seeds as f64;
        assert!(sketch.size_bytes() <= 40 * 1024);
    }
    println!("recall {recall:.4}");
    assert!(recall >= 0.99, "recall {recall:.4}");
}

#[test]
fn no_bound_is_violated_in_a_hundred_thousand_merges() {
    let window = Duration::from_secs(1);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    let mut draw = |n: u64| rng.next_u64() % n;
    for _ in 0..sized(100_000, 5_000) {
        let mut exact: BTreeMap<u64, u64> = BTreeMap::new();
        let mut reports: Vec<Report> = Vec::new();
        for _ in 0..1 + draw(5) {
            let mut sketch = Sketch::new(1 + draw(12) as usize, draw(u64::MAX));
            let keys = 1 + draw(40);
            for _ in 0..draw(120) {
                // Squared, so that some keys are frequent.
                let key = draw(keys) * draw(keys) / keys;
                observe(&mut sketch, key);
                *exact.entry(key).or_default() += 1;
            }
            reports.push(Report::of(&sketch, 1, window, 1 + draw(12) as usize));
        }
        let mut merge = Merge::new(window, Limits::default());
        reports.iter().for_each(|report| merge.add(report).unwrap());
        for (key, truth) in exact {
            match merge.get(&ReportKey::new(&key.to_le_bytes(), hash(key))) {
                Some(m) => assert!(m.lower_bound() <= truth && truth <= m.estimate),
                None => assert!(truth <= merge.floor()),
            }
        }
    }
}

#[test]
fn a_flood_of_one_hit_keys_does_not_hide_a_key_of_two_percent() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(9);
    let mut sketch = Sketch::new(256, 9);
    let (mut truth, mut unique) = (0, 1_000);
    for i in 0..1_000_000 {
        if i >= 20_000 && uniform(&mut rng) < 0.02 {
            truth += 1;
            observe(&mut sketch, 7);
        } else {
            unique += 1;
            observe(&mut sketch, unique);
        }
    }
    let top = sketch.top(1)[0];
    assert_eq!(top.key(), 7u64.to_le_bytes());
    println!("true {truth}, count {}, error {}", top.count(), top.error());
    assert!(top.lower_bound() <= truth && truth <= top.count());
    assert!(top.lower_bound() as f64 >= 0.99 * truth as f64);
}

#[test]
fn traffic_without_hot_keys_raises_no_flag() {
    for (per_sec, promote, one_in) in [(200_000.0, 1_000.0, 10), (10_000.0, 100.0, 1)] {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
        let mut detector = detector(promote, one_in, 11);
        let mut now = 0;
        for _ in 0..sized(2_000_000, 200_000) {
            now += gap_nanos(&mut rng, per_sec / f64::from(one_in));
            advance(&mut detector, Tick(now));
            let key = rng.next_u64() % 20_000;
            assert_eq!(sample(&mut detector, Tick(now), key, true), None);
        }
    }
}

/// Changes of state of a key at a constant rate, over `windows` windows of one second. Requests
/// come at random; once hot, the near cache serves nearly all of them.
fn changes(per_sec: f64, threshold: f64, one_in: u32, windows: u64, seed: u64) -> u64 {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut detector = detector(threshold, one_in, seed);
    let mut now = rng.next_u64() % 1_000_000_000;
    let mut changes = 0;
    let mut hot = false;
    let window = (100.0 * f64::from(one_in) / threshold).max(1.0);
    let end = (windows as f64 * window * 1e9) as u64;
    while now < end {
        now += gap_nanos(&mut rng, per_sec / f64::from(one_in));
        let ended = advance(&mut detector, Tick(now));
        changes += ended;
        hot = hot && ended == 0;
        let loaded = !hot || rng.next_u64().is_multiple_of(64);
        if sample(&mut detector, Tick(now), 1, loaded).is_some() {
            changes += 1;
            hot = true;
        }
    }
    changes
}

#[test]
fn a_constant_rate_changes_state_at_most_twice_in_a_thousand_windows() {
    for (threshold, one_in) in [(10_000.0, 100), (50.0, 1), (500.0, 1)] {
        let (mut worst, mut total) = (0, 0);
        for step in 0..=18u64 {
            let factor = 0.4 + 0.05 * step as f64;
            for seed in 0..sized(30, 2) {
                let seed = seed * 100 + step;
                let changes = changes(factor * threshold, threshold, one_in, 1_000, seed);
                assert!(changes <= 2, "{changes} changes at {factor:.2}, N = {one_in}, {seed}");
                worst = worst.max(changes);
                total += changes;
            }
        }
        println!("threshold {threshold}, N = {one_in}: at most {worst}, {total} in all");
    }
}

#[test]
fn a_key_steadily_below_seven_tenths_is_never_promoted() {
    for (threshold, one_in) in [(10_000.0, 100), (100.0, 1)] {
        for factor in [0.5, 0.6, 0.7] {
            let windows = sized(10_000, 1_000);
            assert_eq!(changes(factor * threshold, threshold, one_in, windows, 3), 0);
        }
    }
}

/// From the first request of a new key to its promotion, amid other traffic that has been running,
/// with requests sampled as the shell samples them.
fn seconds_to_promotion(per_sec: f64, seed: u64) -> f64 {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut detector = detector(10_000.0, 100, seed);
    let zipf = Zipf::new(10_000);
    let others = 100_000.0;
    let others_alone = 1_000_000_000 + rng.next_u64() % 1_000_000_000;
    let mut now = 0.0f64;
    loop {
        let on = now as u64 >= others_alone;
        let total = if on { others + per_sec } else { others };
        now += (f64::from(skip(&mut rng, 100)) + 1.0) * 1e9 / total;
        let tick = Tick(now as u64);
        advance(&mut detector, tick);
        let viral = on && uniform(&mut rng) < per_sec / total;
        // The most frequent keys of the others are not to be hot themselves.
        let key = if viral { 1 } else { 100 + zipf.draw(&mut rng) % 5_000 };
        if sample(&mut detector, tick, key, true).is_some() && viral {
            return (now - others_alone as f64) / 1e9;
        }
    }
}

#[test]
fn hotter_is_found_sooner() {
    for (per_sec, seconds_max) in [(200_000.0, 0.065), (20_000.0, 0.65), (12_000.0, 1.6)] {
        let mut times: Vec<f64> =
            (0..sized(100, 31)).map(|seed| seconds_to_promotion(per_sec, seed)).collect();
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "{per_sec}/s: median {median:.4} s, last {:.4} s of {seconds_max}",
            times[times.len() - 1]
        );
        assert!(median <= seconds_max, "{per_sec}/s: {median:.4} s");
    }
}
