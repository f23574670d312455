//! Small rates in big fleets, by simulation of the reports and the verdicts alone.

use heatsink::engine::control::aggregate::{Aggregator, From, Options};
use heatsink::engine::control::detect::Sample;
use heatsink::engine::control::merge::{Limits, Merge, Report, ReportKey};
use heatsink::engine::control::reporter::{ENTRIES_MAX, Reporter};
use heatsink::engine::time::Tick;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::time::Duration;

const WINDOW: Duration = Duration::from_secs(1);
const KEYS: usize = 100_000;
/// Processes of one host.
const HOST: usize = 20;
/// Samples a second of one process.
const BUDGET: usize = 20_000;

/// Zipf(1.0) over 100,000 keys, as in the measurements that the detector rests on.
struct Zipf {
    below: Vec<f64>,
    names: Vec<String>,
}

impl Zipf {
    fn new() -> Zipf {
        let mut sum = 0.0;
        let mut below: Vec<f64> = (1..=KEYS)
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        below.iter_mut().for_each(|b| *b /= sum);
        Zipf { below, names: (0..KEYS).map(|i| format!("post:{i}")).collect() }
    }

    fn draw(&self, rng: &mut Xoshiro256PlusPlus) -> usize {
        let u = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        self.below.partition_point(|b| *b < u).min(KEYS - 1)
    }

    fn share(&self, key: usize) -> f64 {
        self.below[key] - if key == 0 { 0.0 } else { self.below[key - 1] }
    }
}

/// One process's window of `requests`, sampled within its budget; `truth` counts all of them.
fn window(
    zipf: &Zipf,
    rng: &mut Xoshiro256PlusPlus,
    reporter: &mut Reporter,
    (requests, budget, at): (usize, usize, Tick),
    floor_per_sec: f64,
    truth: &mut [u32],
) -> Report {
    let one_in = requests.div_ceil(budget).max(1) as u32;
    for _ in 0..requests {
        let key = zipf.draw(rng);
        truth[key] += 1;
        if one_in > 1 && !rng.next_u64().is_multiple_of(u64::from(one_in)) {
            continue;
        }
        let hash = (key as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (key, weight) = (zipf.names[key].as_bytes(), 1);
        let sample = Sample { hash, key, write: false, weight, loaded: true, one_in };
        reporter.handle_sample(&sample);
    }
    reporter.take(at, floor_per_sec, ENTRIES_MAX).unwrap()
}

struct Row {
    processes: usize,
    missed: usize,
    hot: usize,
    wrong: usize,
    found_in: u32,
}

/// The fleet's verdicts after two windows: over relays where there is more than one host.
fn run(zipf: &Zipf, processes: usize, requests: usize) -> Row {
    let up = 0.002 * requests as f64;
    let options = Options { promote_per_sec: up, ..Options::default() };
    let mut fleet = Aggregator::new(options);
    let hosts = processes.div_ceil(HOST);
    let (mut rng, mut now) = (Xoshiro256PlusPlus::seed_from_u64(7), Tick(1_000_000_000));
    // One sketch for all, one process after the other: it has a clock of its own.
    let mut clock = now;
    let mut reporter = Reporter::new(clock, 1);
    let mut truth = vec![0; KEYS];
    let hot: Vec<usize> = (0..KEYS).take_while(|k| zipf.share(*k) >= 0.0025).collect();
    let (mut missed, mut wrong, mut found_in) = (hot.len(), 0, 0);
    for w in 1..=2_u64 {
        let floor = 0.5 * up / hosts as f64;
        now = now.after(WINDOW);
        for host in 0..hosts {
            let of_host = HOST.min(processes - host * HOST);
            let mut merge = Merge::new(WINDOW, Limits::default());
            for process in 0..of_host {
                clock = clock.after(WINDOW);
                let whole = (requests / processes, BUDGET, clock);
                let floor = floor / of_host as f64;
                let report = window(zipf, &mut rng, &mut reporter, whole, floor, &mut truth);
                let from = From { process: process as u64, incarnation: 1, window: w };
                if hosts == 1 {
                    fleet.handle_report(now, from, report).unwrap();
                } else {
                    merge.add(&report).unwrap();
                }
            }
            if hosts > 1 {
                let from = From { process: host as u64, incarnation: 1, window: w };
                let report = merge.report(ENTRIES_MAX, floor as u64);
                fleet.handle_report(now, from, report).unwrap();
            }
        }
        fleet.handle_timeout(now);
        let list = fleet.entries(now);
        let on = |k: &usize| list.iter().any(|e| e.key == zipf.names[*k].as_str().into());
        missed = hot.iter().filter(|k| !on(k)).count();
        if missed == 0 && found_in == 0 {
            found_in = w as u32;
        }
        let cold = (0..KEYS).filter(|k| zipf.share(*k) < 0.0016).take(2_000);
        wrong = cold.filter(on).count();
    }
    Row { processes, missed, hot: hot.len(), wrong, found_in }
}

/// `HEATSINK_REQUESTS` makes the fleet ask for more a second.
#[test]
fn small_rates_in_big_fleets_are_found_within_two_windows() {
    let asked = std::env::var("HEATSINK_REQUESTS").ok().and_then(|n| n.parse().ok());
    let requests = asked.unwrap_or(1_000_000);
    let zipf = Zipf::new();
    println!("processes  hot keys  missed  false  windows");
    for processes in [1, 20, 200, 2_000, 20_000] {
        let row = run(&zipf, processes, requests);
        let found = if row.found_in == 0 { "-".into() } else { row.found_in.to_string() };
        let Row { processes, hot, missed, wrong, .. } = row;
        println!("{processes:>9}  {hot:>8}  {missed:>6}  {wrong:>5}  {found:>7}");
        assert_eq!(wrong, 0, "{processes} processes");
        // One process that is asked a million times a second samples one request in 50: what has
        // fewer than 100 samples in a window is below its detection floor.
        assert!(processes == 1 || missed == 0, "{processes} processes: {missed} missed");
    }
}

/// The rule of the table in the detector's measurements: no less than 0.2 % by the lower bound.
#[test]
fn fleet_detection_is_precise_and_misses_few_at_20_and_100_clients() {
    let zipf = Zipf::new();
    for clients in [20, 100] {
        let requests = 1_000_000;
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(clients as u64);
        let mut truth = vec![0; KEYS];
        let mut merge = Merge::new(WINDOW, Limits::default());
        let now = Tick(1_000_000_000).after(WINDOW);
        for _ in 0..clients {
            let mut reporter = Reporter::new(now.before(WINDOW), 3);
            let whole = (requests / clients, usize::MAX, now);
            // Half of an even share of the threshold.
            let floor = 0.5 * 0.002 * requests as f64 / clients as f64;
            merge.add(&window(&zipf, &mut rng, &mut reporter, whole, floor, &mut truth)).unwrap();
        }
        let line = requests as u32 / 500;
        let hot: Vec<usize> = (0..KEYS).filter(|k| truth[*k] >= line).collect();
        let mut right = 0;
        let flagged = merge.ranked().iter().filter(|m| m.lower_bound() >= u64::from(line)).count();
        for key in &hot {
            let merged = merge.get(&ReportKey::new(zipf.names[*key].as_bytes(), 0));
            let Some(m) = merged else { continue };
            assert!(
                m.lower_bound() <= u64::from(truth[*key]) && u64::from(truth[*key]) <= m.estimate
            );
            right += usize::from(m.lower_bound() >= u64::from(line));
        }
        let (precision, recall) = (right as f64 / flagged as f64, right as f64 / hot.len() as f64);
        println!(
            "{clients} clients: precision {precision:.2}, recall {recall:.2} of {}",
            hot.len()
        );
        assert!(precision == 1.0 && recall >= 0.95, "{clients}: {precision} {recall}");
    }
}
