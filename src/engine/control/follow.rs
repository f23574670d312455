//! A list from outside: taken up, kept in force, let go.
//!
//! - **What**: the receiver's side of the feed. A list is input, whoever sent it: it is checked
//!   against the receiver's own caps before it replaces the last good one.
//! - **Invariant**: what is refused changes nothing; of two lists the higher edition is in force;
//!   nothing is in force after its time.
//! - **Time and units**: [`Tick`] of the receiver; a time to live counts from receipt. Wall-clock
//!   milliseconds are compared with [`Caps::skew`] of tolerance.
//! - **Bounds**: [`Caps`].
//! - **Source**: Envoy (the last good configuration stays); the order of editions is that of
//!   fencing tokens.

use super::super::time::Tick;
use super::fleet::{Edition, FleetKey, FleetList, Heartbeat};
use super::treat::Treatment;
use crate::key::Key;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a receiver accepts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Caps {
    /// Keys on a list, and as many denied ones. Default: 4,096.
    pub entries_max: usize,
    /// Bytes of a key. Default: 1,024.
    pub key_bytes_max: usize,
    /// No list stays in force for longer without a heartbeat; a longer time is cut. Default: 60 s.
    pub ttl_max: Duration,
    /// Copies or slots of one key; an entry that asks for more is skipped. Default: 256.
    pub parts_max: u32,
    /// By how much wall clocks may differ. Default: 60 s.
    pub skew: Duration,
}

impl Default for Caps {
    fn default() -> Caps {
        Caps {
            entries_max: 4_096,
            key_bytes_max: 1_024,
            ttl_max: Duration::from_secs(60),
            parts_max: 256,
            skew: Duration::from_secs(60),
        }
    }
}

/// Why a list or a heartbeat was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// More keys than the receiver takes.
    TooManyEntries,
    /// A key is longer than the receiver takes.
    KeyTooLong,
    /// A key stands in it twice.
    Repeated,
    /// A higher edition is, or was, in force; or another issuer sent the same one.
    Older,
    /// Its term, or its time of sending, lies ahead of the receiver's wall clock.
    FromTheFuture,
    /// Its time had passed when it came.
    Expired,
    /// A rate that is no number, or below zero.
    Inconsistent,
    /// It could not be read at all.
    Malformed,
}

/// How many refusals there are.
pub const REFUSALS: usize = 8;

/// All of them, in the order of [`Counts::refused`].
pub const ALL_REFUSALS: [Refusal; REFUSALS] = [
    Refusal::TooManyEntries,
    Refusal::KeyTooLong,
    Refusal::Repeated,
    Refusal::Older,
    Refusal::FromTheFuture,
    Refusal::Expired,
    Refusal::Inconsistent,
    Refusal::Malformed,
];

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::TooManyEntries => "too many entries",
            Refusal::KeyTooLong => "a key is too long",
            Refusal::Repeated => "a key is named twice",
            Refusal::Older => "older than the list in force",
            Refusal::FromTheFuture => "from the future",
            Refusal::Expired => "expired",
            Refusal::Inconsistent => "a rate is no number",
            Refusal::Malformed => "malformed",
        })
    }
}

/// What a heartbeat meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beat {
    /// The list in force stays so.
    Extended,
    /// There is a list that this receiver has not seen.
    Missing,
}

/// What has been counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Lists that came into force.
    pub applied: u64,
    /// Lists that ran out.
    pub expired: u64,
    /// Lists and heartbeats that were refused, by [`ALL_REFUSALS`].
    pub refused: [u64; REFUSALS],
    /// Entries that were left out of a list that was taken otherwise.
    pub skipped: u64,
}

#[derive(Clone, Debug)]
struct InForce {
    until: Tick,
    canary_ms: u64,
    canary_at: Tick,
    list: Arc<FleetList>,
}

/// Follows a list. See the module's description.
#[derive(Clone, Debug)]
pub struct Follower {
    caps: Caps,
    now: Option<InForce>,
    /// The highest edition seen, and by whom; forgotten a while after it has run out, so that
    /// nobody can block the feed for good with one list.
    seen: Option<(Edition, u64, Tick)>,
    counts: Counts,
}

impl Follower {
    /// Nothing is in force.
    #[must_use]
    pub fn new(caps: Caps) -> Follower {
        Follower { caps, now: None, seen: None, counts: Counts::default() }
    }

    /// Takes up `list`; whether what is in force has changed. `wall_ms` is the receiver's wall
    /// clock.
    ///
    /// # Errors
    /// A refused list changes nothing, and is counted.
    pub fn handle_list(
        &mut self,
        now: Tick,
        wall_ms: u64,
        list: FleetList,
    ) -> Result<bool, Refusal> {
        self.handle_timeout(now);
        self.check(&list)
            .and_then(|()| self.check_time(list.edition, list.sent_ms, list.ttl, wall_ms))
            .and_then(|()| self.check_order(list.edition, list.issuer))
            .map_err(|refusal| self.refuse(refusal))?;
        let ttl = list.ttl.min(self.caps.ttl_max);
        // A new list of the same term does not make up for a canary that has stopped.
        let term = list.edition.incarnation;
        let earlier = self.now.as_ref().filter(|n| n.list.edition.incarnation == term);
        let (canary_ms, canary_at) = earlier.map_or((0, now), |n| (n.canary_ms, n.canary_at));
        let until = now.after(ttl).min(canary_at.after(2 * ttl));
        if until <= now {
            return Err(self.refuse(Refusal::Expired));
        }
        self.note(now, list.edition, list.issuer);
        if let Some(same) = self.now.as_mut().filter(|n| n.list.edition == list.edition) {
            same.until = same.until.max(until);
            return Ok(false);
        }
        let list = self.without_what_we_cannot_do(list);
        self.counts.applied += 1;
        self.now = Some(InForce { until, canary_ms, canary_at, list: Arc::new(list) });
        Ok(true)
    }

    /// Keeps the list in force, if it is this one.
    ///
    /// # Errors
    /// As [`Follower::handle_list`].
    pub fn handle_heartbeat(
        &mut self,
        now: Tick,
        wall_ms: u64,
        beat: &Heartbeat,
    ) -> Result<Beat, Refusal> {
        self.handle_timeout(now);
        self.check_time(beat.edition, beat.sent_ms, beat.ttl, wall_ms)
            .and_then(|()| self.check_order(beat.edition, beat.issuer))
            .map_err(|refusal| self.refuse(refusal))?;
        self.note(now, beat.edition, beat.issuer);
        let ttl = beat.ttl.min(self.caps.ttl_max);
        let Some(in_force) = self.now.as_mut().filter(|n| n.list.edition == beat.edition) else {
            return Ok(Beat::Missing);
        };
        if beat.canary_ms > in_force.canary_ms {
            (in_force.canary_ms, in_force.canary_at) = (beat.canary_ms, now);
        }
        // An issuer that nobody's reports reach any more may not keep its list in force.
        let until = now.after(ttl).min(in_force.canary_at.after(2 * ttl));
        in_force.until = in_force.until.max(until);
        Ok(Beat::Extended)
    }

    /// Lets go what has run out; whether something had.
    pub fn handle_timeout(&mut self, now: Tick) -> bool {
        let over = self.now.as_ref().is_some_and(|n| n.until <= now);
        if over {
            self.counts.expired += 1;
            self.now = None;
        }
        if self.seen.is_some_and(|(_, _, until)| until <= now) {
            self.seen = None;
        }
        over
    }

    /// When the list in force runs out.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Tick> {
        self.now.as_ref().map(|n| n.until)
    }

    /// The list in force.
    #[must_use]
    pub fn list(&self) -> Option<&Arc<FleetList>> {
        self.now.as_ref().map(|n| &n.list)
    }

    /// The highest edition seen lately, in force or not.
    #[must_use]
    pub fn seen(&self) -> Option<Edition> {
        self.seen.map(|(edition, _, _)| edition)
    }

    /// What has been counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Counts what never became a list.
    pub fn refuse(&mut self, refusal: Refusal) -> Refusal {
        let at = ALL_REFUSALS.iter().position(|r| *r == refusal).unwrap_or(0);
        self.counts.refused[at] += 1;
        refusal
    }

    fn note(&mut self, now: Tick, edition: Edition, issuer: u64) {
        self.seen = Some((edition, issuer, now.after(3 * self.caps.ttl_max)));
    }

    fn check_order(&self, edition: Edition, issuer: u64) -> Result<(), Refusal> {
        match self.seen {
            Some((seen, by, _)) if edition < seen || (edition == seen && issuer != by) => {
                Err(Refusal::Older)
            }
            _ => Ok(()),
        }
    }

    fn check_time(
        &self,
        edition: Edition,
        sent_ms: u64,
        ttl: Duration,
        wall_ms: u64,
    ) -> Result<(), Refusal> {
        let skew = self.caps.skew.as_millis() as u64;
        if edition.incarnation.max(sent_ms) > wall_ms.saturating_add(skew) {
            return Err(Refusal::FromTheFuture);
        }
        let ttl_ms = ttl.min(self.caps.ttl_max).as_millis() as u64;
        let over = sent_ms.saturating_add(ttl_ms).saturating_add(skew) < wall_ms;
        if over || ttl.is_zero() { Err(Refusal::Expired) } else { Ok(()) }
    }

    fn check(&self, list: &FleetList) -> Result<(), Refusal> {
        let caps = &self.caps;
        if list.entries.len() > caps.entries_max || list.denied.len() > caps.entries_max {
            return Err(Refusal::TooManyEntries);
        }
        let mut seen = BTreeSet::new();
        for entry in &list.entries {
            if entry.key.len() > caps.key_bytes_max {
                return Err(Refusal::KeyTooLong);
            }
            let rates = [
                entry.reads_per_sec,
                entry.writes_per_sec,
                entry.lower_bound_per_sec,
                entry.saved_per_sec,
                entry.share,
            ];
            if rates.iter().any(|r| !r.is_finite() || *r < 0.0) {
                return Err(Refusal::Inconsistent);
            }
            if !seen.insert(entry.key.as_bytes()) {
                return Err(Refusal::Repeated);
            }
        }
        let long = |key: &Key| key.len() > caps.key_bytes_max;
        if list.denied_above.len().max(list.denied_until_ms.len()) > caps.entries_max {
            return Err(Refusal::TooManyEntries);
        }
        let ends = list.denied_until_ms.iter().map(|(key, _)| key);
        if list.denied.iter().chain(&list.denied_above).chain(ends).any(long) {
            Err(Refusal::KeyTooLong)
        } else {
            Ok(())
        }
    }

    fn without_what_we_cannot_do(&mut self, mut list: FleetList) -> FleetList {
        let (most, before) = (self.caps.parts_max, list.entries.len());
        let parts = |treatment: Option<Treatment>| match treatment {
            Some(Treatment::Copies { copies: n } | Treatment::Salt { slots: n }) => n,
            _ => 1,
        };
        let sane = |e: &FleetKey| (1..=most).contains(&parts(e.treatment));
        list.entries.retain(sane);
        list.entries.iter_mut().for_each(|e| {
            e.advice = e.advice.filter(|a| (1..=most).contains(&parts(Some(*a))));
            e.ttl = e.ttl.map(|ttl| ttl.min(self.caps.ttl_max));
            e.reason.truncate(e.reason.floor_char_boundary(200));
        });
        self.counts.skipped += (before - list.entries.len()) as u64;
        list
    }
}

#[cfg(test)]
mod tests {
    use super::super::hotlist::Rule;
    use super::*;
    use proptest::prelude::*;

    const WALL: u64 = 1_700_000_000_000;
    const S: Duration = Duration::from_secs(1);

    fn at(ms: u64) -> Tick {
        Tick(3_600_000_000_000).after(Duration::from_millis(ms))
    }

    fn list(incarnation: u64, version: u64, keys: &[&str]) -> FleetList {
        let near = |k: &&str| FleetKey::named(Key::from(*k), Rule::Detected, Treatment::Near);
        FleetList {
            issuer: incarnation,
            edition: Edition { incarnation, version },
            ttl: 5 * S,
            sent_ms: WALL,
            entries: keys.iter().map(near).collect(),
            denied: Vec::new(),
            ..FleetList::default()
        }
    }

    fn beat(incarnation: u64, version: u64) -> Heartbeat {
        Heartbeat {
            issuer: incarnation,
            edition: Edition { incarnation, version },
            ttl: 5 * S,
            sent_ms: WALL,
            canary_ms: 0,
            interval: S,
            report_every: S,
            quiet_every: S,
            floor_per_sec: 0.0,
            reports_stored: false,
            channels: 1,
        }
    }

    #[test]
    fn a_list_runs_out_on_the_receivers_own_clock_unless_heartbeats_come() {
        let mut follower = Follower::new(Caps::default());
        assert_eq!(follower.handle_list(at(0), WALL, list(1, 1, &["a"])), Ok(true));
        assert!(!follower.handle_timeout(at(4_999)));
        let alive = Heartbeat { canary_ms: 1, ..beat(1, 1) };
        assert_eq!(follower.handle_heartbeat(at(4_999), WALL, &alive), Ok(Beat::Extended));
        assert!(!follower.handle_timeout(at(9_998)) && follower.handle_timeout(at(9_999)));
        assert!(follower.list().is_none());
        assert_eq!(follower.handle_heartbeat(at(9_999), WALL, &alive), Ok(Beat::Missing));
    }

    #[test]
    fn an_issuer_that_hears_no_reports_cannot_keep_its_list_in_force() {
        let mut follower = Follower::new(Caps::default());
        follower.handle_list(at(0), WALL, list(1, 1, &["a"])).unwrap();
        let mut over = false;
        for ms in (0..20_000).step_by(500) {
            over |= follower.handle_timeout(at(ms));
            let beat =
                Heartbeat { canary_ms: if ms < 3_000 { ms + 1 } else { 3_000 }, ..beat(1, 1) };
            let _ = follower.handle_heartbeat(at(ms), WALL, &beat);
        }
        assert!(over);
    }

    #[test]
    fn the_higher_edition_is_in_force_whatever_comes_late() {
        let mut follower = Follower::new(Caps::default());
        follower.handle_list(at(0), WALL, list(2, 1, &["a"])).unwrap();
        for older in [list(1, 9, &["b"]), list(2, 0, &["b"])] {
            assert_eq!(follower.handle_list(at(1), WALL, older), Err(Refusal::Older));
        }
        let usurper = FleetList { issuer: 77, ..list(2, 1, &["b"]) };
        assert_eq!(follower.handle_list(at(1), WALL, usurper), Err(Refusal::Older));
        assert_eq!(follower.handle_list(at(2), WALL, list(2, 1, &["a"])), Ok(false), "again");
        assert_eq!(follower.handle_list(at(3), WALL, list(3, 0, &["c"])), Ok(true));
        assert_eq!(follower.list().unwrap().entries[0].key, "c".into());
        assert_eq!(follower.counts().refused[3], 3);
    }

    #[test]
    fn a_list_from_the_future_or_the_past_is_refused_and_blocks_nothing() {
        let mut follower = Follower::new(Caps::default());
        follower.handle_list(at(0), WALL, list(1, 1, &["a"])).unwrap();
        let future = list(u64::MAX, u64::MAX, &["b"]);
        assert_eq!(follower.handle_list(at(1), WALL, future), Err(Refusal::FromTheFuture));
        let sent_ms = WALL + 61_000;
        let ahead = FleetList { sent_ms, ..list(1, 2, &["b"]) };
        assert_eq!(follower.handle_list(at(1), WALL, ahead), Err(Refusal::FromTheFuture));
        let late = FleetList { sent_ms: WALL - 66_000, ..list(1, 2, &["b"]) };
        assert_eq!(follower.handle_list(at(1), WALL, late), Err(Refusal::Expired));
        let zero = FleetList { ttl: Duration::ZERO, ..list(1, 2, &["b"]) };
        assert_eq!(follower.handle_list(at(1), WALL, zero), Err(Refusal::Expired));
        assert_eq!(follower.list().unwrap().entries[0].key, "a".into());
        assert_eq!(follower.handle_list(at(1), WALL, list(1, 2, &["b"])), Ok(true));
        // The highest version of all blocks its term for as long as order is remembered, no more.
        follower.handle_list(at(2), WALL, list(1, u64::MAX, &["c"])).unwrap();
        assert_eq!(follower.handle_list(at(3), WALL, list(1, 3, &["d"])), Err(Refusal::Older));
        assert_eq!(follower.handle_list(at(190_000), WALL, list(1, 3, &["d"])), Ok(true));
    }

    #[test]
    fn the_receivers_caps_hold_whatever_a_list_asks_for() {
        let caps = Caps { entries_max: 2, key_bytes_max: 8, ..Caps::default() };
        let mut follower = Follower::new(caps);
        follower.handle_list(at(0), WALL, list(1, 1, &["a"])).unwrap();
        let refused = |follower: &mut Follower, list| {
            let refusal = follower.handle_list(at(1), WALL, list).unwrap_err();
            assert_eq!(follower.list().unwrap().edition.version, 1, "the last good list stays");
            refusal
        };
        let long = "x".repeat(9);
        assert_eq!(refused(&mut follower, list(1, 2, &["a", "b", "c"])), Refusal::TooManyEntries);
        assert_eq!(refused(&mut follower, list(1, 2, &[&long])), Refusal::KeyTooLong);
        assert_eq!(refused(&mut follower, list(1, 2, &["a", "a"])), Refusal::Repeated);
        let mut odd = list(1, 2, &["a"]);
        odd.entries[0].reads_per_sec = f64::NAN;
        assert_eq!(refused(&mut follower, odd), Refusal::Inconsistent);
        let mut bomb = list(1, 2, &["a", "b"]);
        bomb.entries[0].treatment = Some(Treatment::Salt { slots: 65_535 });
        bomb.entries[1].advice = Some(Treatment::Copies { copies: 0 });
        bomb.ttl = Duration::from_secs(1_000_000);
        assert_eq!(follower.handle_list(at(1), WALL, bomb), Ok(true));
        let now = follower.list().unwrap();
        assert_eq!((now.entries.len(), now.entries[0].advice), (1, None));
        assert_eq!(follower.poll_timeout(), Some(at(60_001)));
        assert_eq!(follower.counts().skipped, 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn editions_in_force_only_rise_within_the_memory(
            steps in prop::collection::vec((0u64..4, 0u64..4, 0u64..2_900, any::<bool>()), 1..60),
        ) {
            let mut follower = Follower::new(Caps::default());
            let (mut ms, mut highest) = (0, None);
            for (incarnation, version, wait, whole) in steps {
                ms += wait;
                let known = follower.seen();
                if whole {
                    let _ = follower.handle_list(at(ms), WALL, list(incarnation, version, &["k"]));
                } else {
                    let _ = follower.handle_heartbeat(at(ms), WALL, &beat(incarnation, version));
                }
                prop_assert!(follower.seen() >= known);
                if let Some(list) = follower.list() {
                    prop_assert!(highest <= Some(list.edition));
                    highest = Some(list.edition);
                    prop_assert!(follower.poll_timeout().unwrap() > at(ms));
                }
            }
        }
    }
}
