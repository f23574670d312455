//! The detector: samples in, verdicts out.
//!
//! - **What**: windows over a sketch, a table of watched keys over a sliding window, and the lines
//!   between hot and cool. A key is promoted at the very sample that proves its rate, in the
//!   running window or in the sliding one: hotter is found sooner.
//! - **Invariant**: a promotion's lower bound, less its margin, is at least the threshold in force
//!   times a whole window; a demotion follows only on the configured number of cool windows.
//! - **Time and units**: [`Tick`] at each call; rates per second, in requests (or in cost, where
//!   samples carry weights), scaled by what each sample stands for.
//! - **Bounds**: two sketches, the watched keys, and at most two verdicts per watched key waiting.
//! - **Source**: Valkey's live and frozen windows (a window travels with its measured duration and
//!   `N`); the sliding window is what makes the time to a verdict independent of the phase at
//!   which a key turns hot.
//!
//! A count of samples is a hard bound. A rate scaled from samples is an estimate, and says by how
//! much it may be off: [`super::verdict::Estimate::margin_per_sec`].

use super::super::time::{Tick, nanos};
use super::hysteresis::Band;
use super::merge::Report;
use super::sampling::{Control, ONE_IN_MAX, Sampling};
use super::sketch::{Entry, Observation, Sketch};
use super::treat::{self, Rates};
use super::verdict::{Estimate, Explanation, Verdict, Why, WindowRecord, finding};
use super::watch::{SUBS, Tally, Watch, Watches};
use std::collections::VecDeque;
use std::time::Duration;

/// The cost of one request is cut to this.
pub const WEIGHT_MAX: u32 = 65_536;

/// A key is watched from this part of what a promotion needs. What the sketch counted before is
/// lost where its window ends just then, so less is sooner; ten samples are still few enough keys.
const WATCH_PART: f64 = 0.1;

/// A watched key that is not hot is forgotten below this part.
const FORGET_PART: f64 = 0.05;

/// A window that lasted this many times as long as planned is flagged.
const STALLED_TIMES: f64 = 1.5;

/// How the detector decides.
#[derive(Clone, Debug)]
pub struct Options {
    /// A key that this process asks for at this rate is hot. Default: 50.
    pub promote_per_sec: f64,
    /// The lower line, as a part of the upper one. Default: 800.
    pub demote_permille: u32,
    /// Cool windows in a row before a hot key is demoted. Default: 5.
    pub demote_windows: u8,
    /// Standard deviations between a count and what it proves. Default: 1.75.
    pub z: f64,
    /// No window is shorter. Default: 1 s.
    pub window_min: Duration,
    /// No window is longer. Default: 10 s.
    pub window_max: Duration,
    /// As many samples a window make a rate worth deciding on. Default: 100.
    pub samples_min: u32,
    /// Counters of the sketch. Default: 256.
    pub counters: usize,
    /// Keys that are counted exactly, the hot ones among them. Default: 512.
    pub watched_max: usize,
    /// How many requests a sample stands for. Default: a budget of 20,000 samples a second.
    pub sampling: Sampling,
    /// The lines between treatments.
    pub treat: treat::Options,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            promote_per_sec: 50.0,
            demote_permille: 800,
            demote_windows: 5,
            z: 1.75,
            window_min: Duration::from_secs(1),
            window_max: Duration::from_secs(10),
            samples_min: 100,
            counters: 256,
            watched_max: 512,
            sampling: Sampling::default(),
            treat: treat::Options::default(),
        }
    }
}

/// One sampled request.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// A hash of the whole key.
    pub hash: u64,
    /// The key, or at least its first [`super::sketch::KEY_PREFIX_BYTES`] bytes.
    pub key: &'a [u8],
    /// A write, or else a read.
    pub write: bool,
    /// What the request costs; 1 where requests cost alike.
    pub weight: u32,
    /// Whether it reached the store, or else was served before it.
    pub loaded: bool,
    /// How many requests this sample stands for: what [`Detector::sampling`] said when it was taken.
    pub one_in: u32,
}

/// The running window.
#[derive(Clone, Debug)]
struct Running {
    start: Tick,
    planned: Duration,
    /// The running sub-window, and how many of the window have ended.
    sub_start: Tick,
    subs: usize,
    sub_requests: u64,
    samples: u64,
    requests: u64,
    dropped: u64,
    one_in_max: u32,
}

impl Running {
    fn new(start: Tick, planned: Duration, one_in: u32) -> Running {
        Running {
            start,
            planned,
            sub_start: start,
            subs: 0,
            sub_requests: 0,
            samples: 0,
            requests: 0,
            dropped: 0,
            one_in_max: one_in,
        }
    }

    fn sub_planned(&self) -> Duration {
        self.planned / SUBS as u32
    }

    /// When the running sub-window is due to end, on the window's own grid: ticks that come late
    /// do not add up.
    fn due(&self) -> Tick {
        self.start.after(self.sub_planned() * (self.subs as u32 + 1))
    }

    /// What a promotion must be proven over: the whole window, or what it has become.
    fn span_secs(&self, since: Tick, now: Tick) -> f64 {
        now.since(since).max(self.planned).as_secs_f64()
    }
}

/// Finds hot keys in samples. See the module's description.
#[derive(Clone, Debug)]
pub struct Detector {
    options: Options,
    control: Control,
    live: Sketch,
    last: Sketch,
    running: Option<Running>,
    record: Option<WindowRecord>,
    watches: Watches,
    verdicts: VecDeque<Verdict>,
}

impl Detector {
    /// A detector that has seen nothing. Options out of range are cut to it. `seed` decides which
    /// keys share a cell of the sketch's filter.
    #[must_use]
    pub fn new(options: Options, seed: u64) -> Detector {
        let options = Options {
            promote_per_sec: options.promote_per_sec.max(1e-3),
            demote_permille: options.demote_permille.min(1_000),
            demote_windows: options.demote_windows.max(1),
            z: options.z.max(0.0),
            window_min: options.window_min.max(Duration::from_millis(8)),
            samples_min: options.samples_min.max(1),
            ..options
        };
        let sketch = Sketch::new(options.counters, seed);
        Detector {
            control: Control::new(options.sampling, Tick::ZERO),
            last: sketch.clone(),
            live: sketch,
            running: None,
            record: None,
            watches: Watches::new(options.watched_max, seed),
            verdicts: VecDeque::new(),
            options,
        }
    }

    /// Starts the first window now; without this call it starts with the first sample.
    pub fn handle_start(&mut self, now: Tick) {
        if self.running.is_none() {
            self.live.clear();
            self.watches.restart(now);
            self.running = Some(Running::new(now, self.planned(), self.control.one_in()));
        }
    }

    /// Counts one sample. Returns a promotion if this sample proves one.
    pub fn handle_sample(&mut self, now: Tick, sample: &Sample<'_>) -> Option<Verdict> {
        let one_in = sample.one_in.clamp(1, ONE_IN_MAX);
        self.account(now, one_in);
        let weight = u64::from(sample.weight.clamp(1, WEIGHT_MAX)) * u64::from(one_in);
        let seen = Tally::one(weight, sample.write, sample.loaded);
        let entry = self.live.observe(&Observation {
            hash: sample.hash,
            key: sample.key,
            weight,
            write: sample.write,
            loaded: sample.loaded,
        });
        let proven = entry.map(|entry| (Tally::proven(entry), entry.stamp()));
        let band = self.band();
        let running = self.running.as_ref()?;
        let span_secs = running.span_secs(running.start, now);
        let needed = band.up_per_sec * span_secs;
        let watched = self.watches.observe(sample.hash, sample.key, seen).is_some();
        if !watched {
            let (proven, stamp) = proven.filter(|(p, _)| p.total() >= WATCH_PART * needed)?;
            let subs_ago = running.subs.saturating_sub(stamp as usize);
            self.watches.admit(now, sample.hash, sample.key, proven, subs_ago)?;
        }
        self.judge_sample(now, sample, &band, span_secs)
    }

    /// Tells of `dropped` samples that did not fit the shell's queue. They cannot be counted for
    /// any key, but they are traffic, and `N` is raised for it.
    pub fn handle_dropped(&mut self, now: Tick, dropped: u32) {
        if dropped == 0 {
            return;
        }
        let one_in = self.control.one_in();
        self.account(now, one_in);
        self.control.spend(now, dropped - 1);
        if let Some(running) = &mut self.running {
            let requests = u64::from(dropped - 1) * u64::from(one_in);
            running.samples -= 1;
            running.dropped += u64::from(dropped);
            running.requests += requests;
            running.sub_requests += requests;
        }
    }

    /// Ends what is due. Call it when [`Detector::poll_timeout`] is reached, after the samples that
    /// were taken before. A late call makes a long window, not a wrong one. Returns true when it
    /// ended a window: [`Detector::window_record`] is a new one.
    pub fn handle_timeout(&mut self, now: Tick) -> bool {
        let Some(running) = &mut self.running else { return false };
        if now < running.due() {
            return false;
        }
        self.control.raise(running.sub_requests, now.since(running.sub_start));
        running.subs += 1;
        self.live.set_stamp(running.subs as u32);
        running.sub_start = now;
        running.sub_requests = 0;
        running.one_in_max = running.one_in_max.max(self.control.one_in());
        let over = running.subs >= SUBS || now.since(running.start) >= running.planned;
        if over {
            self.close_window(now);
        }
        let planned = self.running.as_ref().map_or(self.options.window_min, |r| r.planned);
        self.watches.roll(now, FORGET_PART * self.band().up_per_sec * planned.as_secs_f64());
        over
    }

    /// When to call [`Detector::handle_timeout`]; `None` while there is no traffic and no hot key.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Tick> {
        self.running.as_ref().map(Running::due)
    }

    /// The next verdict that a finished window brought.
    pub fn poll_verdict(&mut self) -> Option<Verdict> {
        self.verdicts.pop_front()
    }

    /// `N`: one request in this many is to be sampled.
    #[must_use]
    pub fn sampling(&self) -> u32 {
        self.control.one_in()
    }

    /// The detection floor: a key below this rate does not yield enough samples to decide on.
    #[must_use]
    pub fn floor_per_sec(&self) -> f64 {
        let window = self.window().as_secs_f64();
        f64::from(self.options.samples_min) * f64::from(self.control.one_in()) / window
    }

    /// The threshold in force: the configured one, or the detection floor where that is higher.
    #[must_use]
    pub fn threshold_per_sec(&self) -> f64 {
        self.options.promote_per_sec.max(self.floor_per_sec())
    }

    /// The last finished window.
    #[must_use]
    pub fn window_record(&self) -> Option<WindowRecord> {
        self.record
    }

    /// The `n` keys with the highest estimates in the last finished window.
    #[must_use]
    pub fn top(&self, n: usize) -> Vec<Estimate> {
        let Some(record) = self.record else { return Vec::new() };
        self.last.top(n).into_iter().map(|entry| self.estimate(entry, &record)).collect()
    }

    /// The last finished window, for a merge. At most `entries_max` keys.
    #[must_use]
    pub fn report(&self, entries_max: usize) -> Option<Report> {
        let record = self.record?;
        Some(Report::of(&self.last, record.one_in, record.duration, entries_max))
    }

    /// What is known of the key with this hash.
    #[must_use]
    pub fn explain(&self, hash: u64) -> Option<Explanation> {
        let watch = self.watches.by_hash(hash);
        let entry = self.record.and_then(|r| Some((self.last.entry_by_hash(hash)?, r)));
        if watch.is_none() && entry.is_none() {
            return None;
        }
        let threshold_per_sec = self.threshold_per_sec();
        Some(Explanation {
            estimate: entry.map(|(entry, record)| self.estimate(entry, &record)),
            hot_since: watch.and_then(|w| w.hot.since()),
            near_since: watch.and_then(|w| w.near.since()),
            cool_windows: watch.map_or(0, |w| w.hot.cool_windows()),
            sliding: watch.map(|w| w.sliding().total()),
            needed: threshold_per_sec * self.window().as_secs_f64(),
            threshold_per_sec,
            floor_per_sec: self.floor_per_sec(),
        })
    }

    /// Since when the key with this hash is watched; `None` while it is not.
    #[must_use]
    pub fn watched_since(&self, hash: u64) -> Option<Tick> {
        self.watches.by_hash(hash).map(Watch::since)
    }

    /// Hashes of the keys that are hot.
    pub fn hot(&self) -> impl Iterator<Item = u64> {
        self.watches.iter().filter(|w| w.hot.is_on()).map(Watch::hash)
    }

    /// How often a key that may be hot found no room because so many are.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.watches.refused()
    }

    /// Notes one sample's worth of traffic, and starts a window if none runs.
    fn account(&mut self, now: Tick, one_in: u32) {
        self.handle_start(now);
        let Some(running) = &mut self.running else { return };
        running.samples += 1;
        running.requests += u64::from(one_in);
        running.sub_requests += u64::from(one_in);
        running.one_in_max = running.one_in_max.max(one_in);
        self.control.spend(now, 1);
    }

    /// The promotion that a sample of a watched key proves, if any.
    fn judge_sample(
        &mut self,
        now: Tick,
        sample: &Sample<'_>,
        band: &Band,
        window_secs: f64,
    ) -> Option<Verdict> {
        let running = self.running.as_ref()?;
        let sliding_secs = running.span_secs(self.watches.start(), now);
        let near = self.near_band();
        // The floor follows the samples of this key: where N has just been raised for a surge,
        // what was counted before at a smaller N proves as much as it did then.
        let (one_in_max, window) = (f64::from(running.one_in_max), running.planned.as_secs_f64());
        let floor = f64::from(self.options.samples_min) / window;
        let promote = self.options.promote_per_sec;
        let band_for = |tally: &Tally| {
            let one_in = (f64::from(tally.squares) / tally.total()).min(one_in_max);
            Band { up_per_sec: promote.max(floor * one_in), ..*band }
        };
        let watch = self.watches.get_mut(sample.hash, sample.key)?;
        if watch.hot.is_on() {
            return None;
        }
        let spans = [(watch.window(), window_secs), (watch.sliding(), sliding_secs)];
        let (tally, span_secs) = spans.into_iter().find(|(tally, span_secs)| {
            band_for(tally).proves_hot(tally.total(), f64::from(tally.squares), *span_secs)
        })?;
        let band = band_for(&tally);
        watch.hot.turn_on(now);
        // Reads that are proven to be above the lower line are enough for a key that is hot by all
        // of its traffic: asking for the upper line again would only delay the same answer.
        if f64::from(tally.reads) >= near.down_per_sec * span_secs {
            watch.near.turn_on(now);
        }
        let why = Why::Proven {
            lower: tally.total(),
            margin: band.z * f64::from(tally.squares).sqrt(),
            needed: band.up_per_sec * span_secs,
            threshold_per_sec: band.up_per_sec,
        };
        let treat = &self.options.treat;
        let one_in = self.control.one_in();
        Some(Verdict::Promote(finding(now, watch, tally, span_secs, one_in, why, band.z, treat)))
    }

    fn close_window(&mut self, now: Tick) {
        let Some(running) = self.running.take() else { return };
        let duration = now.since(running.start);
        let stalled = duration.as_secs_f64() > STALLED_TIMES * running.planned.as_secs_f64();
        self.judge_window(now, &running, duration);
        std::mem::swap(&mut self.live, &mut self.last);
        self.live.clear();
        self.watches.start_window();
        self.record = Some(WindowRecord {
            samples: running.samples,
            requests: running.requests,
            dropped: running.dropped,
            duration,
            one_in: running.one_in_max,
            floor_per_sec: f64::from(self.options.samples_min) * f64::from(running.one_in_max)
                / duration.as_secs_f64().max(1e-9),
            stalled,
        });
        self.control.lower(running.requests, duration);
        let quiet = running.requests == 0 && !self.watches.iter().any(|w| w.hot.is_on());
        if !quiet {
            self.running = Some(Running::new(now, self.planned(), self.control.one_in()));
        }
    }

    /// Demotes keys that stayed cool, and revises the treatment of those that are hot.
    fn judge_window(&mut self, now: Tick, running: &Running, duration: Duration) {
        let (hot_band, near_band) = (self.band(), self.near_band());
        let unit = f64::from(running.one_in_max);
        let span_secs = duration.as_secs_f64().max(1e-9);
        // A window that lost samples can show that a key is hot, but not that it is cool.
        let whole = running.dropped == 0;
        let treat = &self.options.treat;
        for watch in self.watches.iter_mut() {
            let known = whole && watch.since() <= running.start;
            if !watch.hot.is_on() || self.verdicts.len() >= 2 * self.options.watched_max.max(1) {
                continue;
            }
            let tally = watch.window();
            let (total, reads) = (tally.total(), f64::from(tally.reads));
            let squares = f64::from(tally.squares);
            let is_cool = |band: &Band, count: f64| {
                known && band.proves_cool(count, squares, unit, span_secs)
            };
            let was_near = watch.near.is_on();
            let cool = is_cool(&hot_band, total);
            let demoted = watch.hot.finish_window(cool, &hot_band);
            watch.near.finish_window(is_cool(&near_band, reads), &near_band);
            if demoted {
                watch.near = Default::default();
            } else if !was_near && near_band.proves_hot(reads, squares, span_secs) {
                watch.near.turn_on(now);
            }
            let why = if cool || demoted {
                let upper = hot_band.upper(total, squares, unit);
                let below = hot_band.down_per_sec * span_secs;
                Why::Cooled { upper, below, windows: hot_band.windows }
            } else {
                let margin = hot_band.z * squares.sqrt();
                let threshold_per_sec = hot_band.up_per_sec;
                let needed = threshold_per_sec * span_secs;
                Why::Proven { lower: total, margin, needed, threshold_per_sec }
            };
            if demoted || was_near != watch.near.is_on() {
                let one_in = running.one_in_max;
                let found = finding(now, watch, tally, span_secs, one_in, why, hot_band.z, treat);
                self.verdicts.push_back(match demoted {
                    true => Verdict::Demote(found),
                    false => Verdict::Treat(found),
                });
            }
        }
    }

    /// The length of the next window: until the threshold means enough samples.
    fn planned(&self) -> Duration {
        let samples = f64::from(self.options.samples_min) * f64::from(self.control.one_in());
        let secs = samples / self.options.promote_per_sec;
        // Rounded up to whole microseconds, so that exactly enough is enough.
        let wanted = Duration::from_micros((secs * 1e6).ceil() as u64);
        let max = self.options.window_max.max(self.options.window_min);
        wanted.clamp(self.options.window_min, max)
    }

    fn window(&self) -> Duration {
        self.running.as_ref().map_or_else(|| self.planned(), |running| running.planned)
    }

    /// The lines in force. The lower one follows the configured threshold and not the floor: that
    /// little can be seen at a large `N` does not make a key cool.
    fn band(&self) -> Band {
        let down = self.options.promote_per_sec * f64::from(self.options.demote_permille) / 1e3;
        self.band_of(self.threshold_per_sec(), down)
    }

    fn near_band(&self) -> Band {
        let up = self.options.treat.near_reads_per_sec;
        let down = up * f64::from(self.options.demote_permille) / 1e3;
        self.band_of(up.max(self.floor_per_sec()), down)
    }

    fn band_of(&self, up_per_sec: f64, down_per_sec: f64) -> Band {
        let windows = self.options.demote_windows;
        Band { up_per_sec, down_per_sec, z: self.options.z, windows }
    }

    fn estimate(&self, entry: &Entry, record: &WindowRecord) -> Estimate {
        let secs = (nanos(record.duration) as f64 / 1e9).max(1e-9);
        let sampled = 1.0 - 1.0 / f64::from(record.one_in);
        Estimate {
            key: entry.key().into(),
            hash: entry.hash(),
            estimate_per_sec: entry.count() as f64 / secs,
            lower_bound_per_sec: entry.lower_bound() as f64 / secs,
            margin_per_sec: self.options.z * (entry.squares() * sampled).sqrt() / secs,
            demand: Rates {
                reads_per_sec: entry.reads() as f64 / secs,
                writes_per_sec: entry.writes() as f64 / secs,
            },
            load_per_sec: entry.loads() as f64 / secs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A detector under evenly spaced requests, driven as a driver that is never late.
    struct Rig {
        detector: Detector,
        now: Tick,
        verdicts: Vec<Verdict>,
    }

    impl Rig {
        fn new(options: Options) -> Rig {
            let mut detector = Detector::new(options, 1);
            detector.handle_start(Tick::ZERO);
            Rig { detector, now: Tick::ZERO, verdicts: Vec::new() }
        }

        fn advance(&mut self, to: Tick) {
            while let Some(due) = self.detector.poll_timeout().filter(|due| *due <= to) {
                self.detector.handle_timeout(due);
                self.verdicts.extend(std::iter::from_fn(|| self.detector.poll_verdict()));
            }
            self.now = to;
        }

        fn sample(&mut self, key: u64, write: bool, loaded: bool) {
            let one_in = self.detector.sampling();
            let bytes = key.to_le_bytes();
            let sample = Sample { hash: key, key: &bytes, write, weight: 1, loaded, one_in };
            self.verdicts.extend(self.detector.handle_sample(self.now, &sample));
        }

        /// Requests of one key at a steady rate, each sampled.
        fn run(&mut self, key: u64, write: bool, per_sec: u64, secs: u64) {
            let start = self.now;
            for i in 0..per_sec * secs {
                self.advance(start.after(Duration::from_nanos(i * 1_000_000_000 / per_sec)));
                self.sample(key, write, true);
            }
            self.advance(start.after(Duration::from_secs(secs)));
        }

        fn names(&self) -> Vec<&'static str> {
            let name = |verdict: &Verdict| match verdict {
                Verdict::Promote(_) => "promote",
                Verdict::Treat(_) => "treat",
                Verdict::Demote(_) => "demote",
            };
            self.verdicts.iter().map(name).collect()
        }
    }

    #[test]
    fn a_hot_key_is_promoted_once_and_demoted_after_five_cool_windows() {
        let mut rig = Rig::new(Options::default());
        rig.run(1, false, 500, 4);
        assert_eq!(rig.names(), ["promote"]);
        let promoted = rig.verdicts[0].finding();
        assert!(promoted.at <= Tick(300_000_000), "{:?}", promoted.at);
        assert!(promoted.lower_bound_per_sec >= 50.0 && promoted.decision.near);
        assert_eq!(rig.detector.hot().collect::<Vec<_>>(), [1]);
        let stopped = rig.now;
        rig.advance(stopped.after(Duration::from_secs(60)));
        assert_eq!(rig.names(), ["promote", "demote"]);
        let demoted = rig.verdicts[1].finding();
        // Five windows of two seconds, the first of which began when the key stopped.
        assert_eq!(demoted.at.since(stopped), Duration::from_secs(10));
        assert_eq!(demoted.why.to_string(), "at most 2 against 80, 5 windows in a row");
        assert_eq!(rig.detector.poll_timeout(), None, "no traffic and no hot key: no timer");
    }

    #[test]
    fn a_key_served_from_the_near_cache_stays_hot_and_its_load_is_told_apart() {
        let mut rig = Rig::new(Options::default());
        for i in 0..20_000u64 {
            rig.advance(Tick(i * 1_000_000));
            rig.sample(1, false, i % 100 == 0);
        }
        assert_eq!(rig.names(), ["promote"]);
        let top = &rig.detector.top(1)[0];
        assert!((top.demand.reads_per_sec - 1_000.0).abs() < 1.0);
        assert!((top.load_per_sec - 10.0).abs() < 1.0);
    }

    #[test]
    fn a_write_hot_key_gains_a_near_cache_when_its_reads_grow_and_loses_it_again() {
        let mut rig = Rig::new(Options::default());
        rig.run(1, true, 500, 4);
        assert!(!rig.verdicts[0].finding().decision.near);
        for i in 0..20_000u64 {
            rig.advance(Tick(4_000_000_000 + i * 1_000_000));
            rig.sample(1, i % 2 == 0, true);
        }
        assert_eq!(rig.names(), ["promote", "treat"]);
        assert!(rig.verdicts[1].finding().decision.near);
        rig.run(1, true, 500, 20);
        assert_eq!(rig.names(), ["promote", "treat", "treat"]);
        assert!(!rig.verdicts[2].finding().decision.near);
    }

    #[test]
    fn the_window_grows_until_the_threshold_means_a_hundred_events() {
        let window = |promote_per_sec, one_in| {
            let sampling = Sampling::Fixed(one_in);
            let detector =
                Detector::new(Options { promote_per_sec, sampling, ..Options::default() }, 0);
            (detector.window(), detector.threshold_per_sec())
        };
        assert_eq!(window(10_000.0, 100), (Duration::from_secs(1), 10_000.0));
        assert_eq!(window(50.0, 1), (Duration::from_secs(2), 50.0));
        assert_eq!(window(50.0, 100), (Duration::from_secs(10), 1_000.0));
        assert_eq!(window(f64::INFINITY, 1).0, Duration::from_secs(1));
        assert_eq!(window(f64::NAN, 1).0, Duration::from_secs(10));
    }

    #[test]
    fn a_stalled_window_is_divided_by_its_real_duration_and_flagged() {
        let options = Options { promote_per_sec: 1_000.0, ..Options::default() };
        let mut rig = Rig::new(options);
        for _ in 0..3_000 {
            rig.sample(1, false, true);
        }
        let promoted_before_the_stall = rig.verdicts.len();
        assert_eq!(promoted_before_the_stall, 1);
        rig.detector.handle_timeout(Tick(5_000_000_000));
        let record = rig.detector.window_record().unwrap();
        assert!(record.stalled);
        assert_eq!(record.duration, Duration::from_secs(5));
        assert!((rig.detector.top(1)[0].estimate_per_sec - 600.0).abs() < 1e-6);
    }

    #[test]
    fn samples_that_come_after_a_stall_do_not_promote_a_slow_key() {
        let options = Options { promote_per_sec: 1_000.0, ..Options::default() };
        let mut rig = Rig::new(options);
        rig.now = Tick(10_000_000_000);
        for _ in 0..6_000 {
            rig.sample(1, false, true);
        }
        assert_eq!(rig.names(), [""; 0]);
    }

    #[test]
    fn n_follows_the_budget_and_returns_to_one() {
        let sampling = Sampling::Budget { per_sec: 1_000 };
        let mut rig = Rig::new(Options { sampling, ..Options::default() });
        let mut skipped = 0;
        let mut taken = 0u64;
        for i in 0..400_000u64 {
            rig.advance(Tick(i * 10_000));
            skipped += 1;
            if skipped >= rig.detector.sampling() {
                skipped = 0;
                taken += 1;
                rig.sample(i % 1_000, false, true);
            }
        }
        assert!((100..=112).contains(&rig.detector.sampling()), "{}", rig.detector.sampling());
        assert!(taken <= 8_000, "four seconds, and the surge at their beginning: {taken}");
        let record = rig.detector.window_record().unwrap();
        assert!((record.requests as f64 / record.duration.as_secs_f64() - 1e5).abs() < 1e4);
        rig.run(7, false, 10, 60);
        assert_eq!(rig.detector.sampling(), 1);
    }

    #[test]
    fn dropped_samples_raise_n_and_never_demote() {
        let sampling = Sampling::Budget { per_sec: 1_000 };
        let mut rig = Rig::new(Options { sampling, ..Options::default() });
        rig.run(1, false, 500, 4);
        for second in 4..40u64 {
            rig.advance(Tick(second * 1_000_000_000));
            rig.detector.handle_dropped(rig.now, 5_000);
        }
        assert!(rig.detector.sampling() > 1);
        assert!(rig.detector.window_record().unwrap().dropped > 0);
        assert_eq!(rig.names(), ["promote"]);
    }

    #[test]
    fn the_rate_at_which_little_is_seen_does_not_demote() {
        // At N = 100 a key of 300/s is below the floor, and still above the configured line.
        let mut rig = Rig::new(Options::default());
        rig.run(1, false, 300, 4);
        rig.detector.control = Control::new(Sampling::Fixed(100), Tick::ZERO);
        let start = rig.now;
        for i in 0..600u64 {
            rig.advance(start.after(Duration::from_nanos(i * 333_333_333)));
            rig.sample(1, false, true);
        }
        assert!(rig.detector.floor_per_sec() > 300.0);
        assert_eq!(rig.names(), ["promote"]);
    }

    #[test]
    fn explain_shows_what_was_seen_and_what_was_needed() {
        let mut rig = Rig::new(Options::default());
        rig.run(1, false, 500, 4);
        rig.run(2, false, 20, 2);
        let hot = rig.detector.explain(1).unwrap();
        assert!(hot.hot_since.is_some() && hot.near_since.is_some());
        let cold = rig.detector.explain(2).unwrap();
        assert_eq!((cold.hot_since, cold.needed), (None, 100.0));
        assert!((cold.estimate.unwrap().estimate_per_sec - 20.0).abs() < 1.0);
        assert_eq!(rig.detector.explain(3), None);
    }

    #[test]
    fn a_report_describes_itself() {
        let mut rig = Rig::new(Options::default());
        rig.run(1, false, 500, 2);
        let report = rig.detector.report(10).unwrap();
        assert_eq!((report.capacity, report.floor, report.one_in), (256, 0, 1));
        assert_eq!(report.duration, Duration::from_secs(2));
        assert_eq!((report.total, report.entries[0].count), (1_000, 1_000));
    }

    #[test]
    fn weights_count_as_cost() {
        let mut rig = Rig::new(Options::default());
        for i in 0..200u64 {
            rig.advance(Tick(i * 100_000_000));
            let sample =
                Sample { hash: 1, key: b"big", write: false, weight: 40, loaded: true, one_in: 1 };
            rig.verdicts.extend(rig.detector.handle_sample(rig.now, &sample));
        }
        assert_eq!(rig.names(), ["promote"]);
    }
}
