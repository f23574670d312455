//! Which remedy fits a hot key, and how much of it.
//!
//! - **What**: a threshold per treatment. The near cache is local and cheap, so it goes by this
//!   process's own reads; copies, salt and shedding change what other processes see, so they go by
//!   the fleet's rate against what one shard can serve.
//! - **Invariant**: a decision names the numbers that it was made from, and only the near cache is
//!   ever acted on; the rest is advice.
//! - **Time and units**: rates per second; shares in permille.
//! - **Bounds**: at most one advice for reads and one for writes; no count above [`PARTS_MAX`].
//! - **Source**: the ceilings are the vendors' published limits (DynamoDB: 3,000 read and 1,000
//!   write units a partition; Firestore: about one write a second a document; Redis: what one
//!   thread serves); the rule for a busy shard is the routers' in the article on sharding, part 3.

use super::copies::size::{Demand, Refused, Sizing, size};
use std::fmt;
use std::time::Duration;

/// No advice asks for more copies or slots than this.
pub const PARTS_MAX: u32 = 4_096;

/// What one shard can serve.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ceiling {
    /// Reads a second.
    pub reads_per_sec: f64,
    /// Writes a second.
    pub writes_per_sec: f64,
    /// Whether reads and writes draw on one and the same limit.
    pub shared: bool,
}

impl Ceiling {
    /// One partition of DynamoDB.
    pub const DYNAMODB: Ceiling =
        Ceiling { reads_per_sec: 3_000.0, writes_per_sec: 1_000.0, shared: false };
    /// One Redis primary.
    pub const REDIS: Ceiling =
        Ceiling { reads_per_sec: 100_000.0, writes_per_sec: 100_000.0, shared: true };
    /// One document of Firestore; its reads have no such limit.
    pub const FIRESTORE: Ceiling =
        Ceiling { reads_per_sec: f64::INFINITY, writes_per_sec: 1.0, shared: false };
}

/// The lines between treatments.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Options {
    /// A near cache pays from this many reads a second by this process.
    pub near_reads_per_sec: f64,
    /// How long a near cache serves a value before it loads it again.
    pub near_ttl: Duration,
    /// What one shard can serve, where known. Without it there is no advice.
    pub ceiling: Option<Ceiling>,
    /// The part of a ceiling that is planned with.
    pub target_permille: u32,
    /// A shard above this part of its ceiling is busy.
    pub busy_permille: u32,
    /// A key above this share of a busy shard is treated below the shard's ceiling already.
    pub share_permille: u32,
    /// Processes that ask for the same keys as this one does.
    pub processes: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            near_reads_per_sec: 50.0,
            near_ttl: Duration::from_secs(1),
            ceiling: None,
            target_permille: 800,
            busy_permille: 700,
            share_permille: 100,
            processes: 1,
        }
    }
}

/// A rate of reads and a rate of writes.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Rates {
    /// Reads a second.
    pub reads_per_sec: f64,
    /// Writes a second.
    pub writes_per_sec: f64,
}

impl Rates {
    /// Reads and writes together.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.reads_per_sec + self.writes_per_sec
    }

    /// Which of the two makes the key hot.
    #[must_use]
    pub fn class(&self) -> Class {
        let total = self.total();
        if self.writes_per_sec <= 0.1 * total {
            Class::ReadHot
        } else if self.reads_per_sec <= 0.1 * total {
            Class::WriteHot
        } else {
            Class::Mixed
        }
    }
}

/// What a hot key is hot by. Less than a tenth of the traffic does not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// By its reads.
    ReadHot,
    /// By its writes.
    WriteHot,
    /// By both.
    Mixed,
}

/// The shard that a key lives on, where placement is known.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shard {
    /// The shard's load as a part of its ceiling.
    pub load_permille: u32,
    /// The key's share of that load.
    pub key_permille: u32,
}

/// Everything that a decision is made from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Situation {
    /// What this process asks for the key.
    pub own: Rates,
    /// Whether this process's own reads carry a near cache, with their hysteresis.
    pub near: bool,
    /// What the whole fleet asks for the key.
    pub fleet: Rates,
    /// How many processes the fleet has.
    pub processes: u32,
    /// The shard of the key.
    pub shard: Option<Shard>,
    /// Whether writes of the key combine, as those of a counter do.
    pub combines: bool,
}

impl Situation {
    /// A process that knows of no other.
    #[must_use]
    pub fn alone(own: Rates, near: bool) -> Situation {
        Situation { own, near, fleet: own, processes: 1, shard: None, combines: false }
    }
}

/// What can be done about a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Treatment {
    /// Its value is kept in the process.
    Near,
    /// Copies under other names, reads spread over them.
    Copies {
        /// How many.
        copies: u32,
    },
    /// A counter split into slots.
    Salt {
        /// How many.
        slots: u32,
    },
    /// What is above the limit is refused.
    Shed,
}

impl Treatment {
    /// The near cache.
    #[must_use]
    pub fn near() -> Treatment {
        Treatment::Near
    }
}

/// A treatment that is not acted on by itself, and why it would help.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Advice {
    /// What to do.
    pub treatment: Treatment,
    /// Why.
    pub reason: Reason,
    /// The arithmetic behind a number of copies, or behind there being none.
    pub copies: Option<Result<Sizing, Refused>>,
}

/// What to do about a key.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Decision {
    /// Serve its reads from the near cache.
    pub near: bool,
    /// Why, or why not.
    pub reason: Reason,
    /// What else would help its reads.
    pub reads: Option<Advice>,
    /// What would help its writes.
    pub writes: Option<Advice>,
}

/// The rule that fired, with its numbers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reason {
    /// This process reads the key often enough for a near cache.
    OwnReads {
        /// Its reads a second.
        reads_per_sec: f64,
        /// The line.
        at_per_sec: f64,
    },
    /// This process reads the key too rarely for a near cache.
    FewReads {
        /// Its reads a second.
        reads_per_sec: f64,
        /// The line.
        at_per_sec: f64,
    },
    /// What reaches the shard for this key alone exceeds what is planned with.
    AboveCeiling {
        /// What reaches the shard a second.
        load_per_sec: f64,
        /// What is planned with, a second.
        target_per_sec: f64,
    },
    /// The shard is busy and the key is a large part of it.
    BusyShard {
        /// The shard's load, of its ceiling.
        load_permille: u32,
        /// The key's share of that load.
        key_permille: u32,
    },
    /// Copies would not help: each takes all writes, and they alone fill what is planned with.
    WritesFillCopies {
        /// Writes a second.
        writes_per_sec: f64,
        /// What is planned with, a second.
        target_per_sec: f64,
    },
}

/// Decides. See [`Options`] for the lines.
#[must_use]
pub fn decide(options: &Options, at: &Situation) -> Decision {
    let reads_per_sec = at.own.reads_per_sec;
    let at_per_sec = options.near_reads_per_sec;
    let reason = if at.near {
        Reason::OwnReads { reads_per_sec, at_per_sec }
    } else {
        Reason::FewReads { reads_per_sec, at_per_sec }
    };
    let (mut reads, mut writes) = (None, None);
    if let Some(ceiling) = options.ceiling {
        reads = advise_reads(options, at, &ceiling);
        writes = advise_writes(options, at, &ceiling);
    }
    Decision { near: at.near, reason, reads, writes }
}

/// What is planned with, of `ceiling`, less what other keys take from the shard where known.
fn room(options: &Options, at: &Situation, ceiling: f64) -> f64 {
    let target = ceiling * f64::from(options.target_permille) / 1_000.0;
    let Some(shard) = at.shard else { return target };
    let load = ceiling * f64::from(shard.load_permille) / 1_000.0;
    let others = load * f64::from(1_000 - shard.key_permille.min(1_000)) / 1_000.0;
    (target - others).max(0.0)
}

/// Why the shard cannot carry `load` of this key, if it cannot.
fn overload(options: &Options, at: &Situation, ceiling: f64, load: f64) -> Option<Reason> {
    let target_per_sec = ceiling * f64::from(options.target_permille) / 1_000.0;
    if load > target_per_sec {
        return Some(Reason::AboveCeiling { load_per_sec: load, target_per_sec });
    }
    let Shard { load_permille, key_permille } = at.shard?;
    let busy = load_permille > options.busy_permille && key_permille > options.share_permille;
    busy.then_some(Reason::BusyShard { load_permille, key_permille })
}

fn advise_reads(options: &Options, at: &Situation, ceiling: &Ceiling) -> Option<Advice> {
    if at.fleet.class() == Class::WriteHot {
        return None;
    }
    let ttl_secs = options.near_ttl.as_secs_f64().max(1e-3);
    let cached = f64::from(at.processes) / ttl_secs;
    let asked = at.fleet.reads_per_sec;
    let load = if at.near { asked.min(cached) } else { asked };
    let reason = overload(options, at, ceiling.reads_per_sec, load)?;
    // A near cache answers a busy shard by itself, unless its refreshes are the load.
    if at.near && matches!(reason, Reason::BusyShard { .. }) && load < asked {
        return None;
    }
    let taken = if ceiling.shared { at.fleet.writes_per_sec } else { 0.0 };
    let left = room(options, at, ceiling.reads_per_sec) - taken;
    if left <= 0.0 {
        let target_per_sec = left + taken;
        let reason = Reason::WritesFillCopies { writes_per_sec: taken, target_per_sec };
        return Some(Advice { treatment: Treatment::Shed, reason, copies: None });
    }
    let copies = Some(size_copies(options, at, ceiling, taken));
    Some(Advice { treatment: Treatment::Copies { copies: parts(load, left) }, reason, copies })
}

/// The arithmetic of copies for the whole fleet.
fn size_copies(
    options: &Options,
    at: &Situation,
    ceiling: &Ceiling,
    writes_per_sec: f64,
) -> Result<Sizing, Refused> {
    size(&Demand {
        reads_per_sec: at.fleet.reads_per_sec,
        writes_per_sec,
        processes: at.processes,
        near_ttl: at.near.then_some(options.near_ttl),
        ceiling_per_sec: ceiling.reads_per_sec,
        target_permille: options.target_permille,
        // A fill may take 1 s and a call of unknown outcome 10 s: the defaults, and a quarter.
        copy_ttl: Duration::from_millis(13_750),
        load_time: Duration::from_millis(5),
    })
}

fn advise_writes(options: &Options, at: &Situation, ceiling: &Ceiling) -> Option<Advice> {
    if at.fleet.class() == Class::ReadHot && at.fleet.writes_per_sec <= ceiling.writes_per_sec {
        return None;
    }
    let load = at.fleet.writes_per_sec;
    let reason = overload(options, at, ceiling.writes_per_sec, load)?;
    let left = room(options, at, ceiling.writes_per_sec);
    let treatment = if at.combines && left > 0.0 {
        Treatment::Salt { slots: parts(load, left) }
    } else {
        Treatment::Shed
    };
    Some(Advice { treatment, reason, copies: None })
}

/// The smallest number of parts, of two or more, that brings each to `left` or below.
fn parts(load: f64, left: f64) -> u32 {
    ((load / left).ceil() as u32).clamp(2, PARTS_MAX)
}

impl fmt::Display for Treatment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Treatment::Near => f.write_str("near cache"),
            Treatment::Copies { copies } => write!(f, "{copies} copies"),
            Treatment::Salt { slots } => write!(f, "{slots} slots"),
            Treatment::Shed => f.write_str("shed"),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::OwnReads { reads_per_sec, at_per_sec } => {
                write!(f, "{reads_per_sec:.0} reads/s here, near cache from {at_per_sec:.0}/s")
            }
            Reason::FewReads { reads_per_sec, at_per_sec } => {
                write!(f, "{reads_per_sec:.0} reads/s here, no near cache below {at_per_sec:.0}/s")
            }
            Reason::AboveCeiling { load_per_sec, target_per_sec } => {
                write!(f, "{load_per_sec:.0}/s on one shard, planned for {target_per_sec:.0}/s")
            }
            Reason::BusyShard { load_permille, key_permille } => write!(
                f,
                "{:.1} % of a shard that is at {:.1} % of its ceiling",
                f64::from(*key_permille) / 10.0,
                f64::from(*load_permille) / 10.0,
            ),
            Reason::WritesFillCopies { writes_per_sec, target_per_sec } => write!(
                f,
                "{writes_per_sec:.0} writes/s on every copy, planned for {target_per_sec:.0}/s",
            ),
        }
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.treatment, self.reason)?;
        match &self.copies {
            Some(Ok(sizing)) => write!(f, " ({sizing})"),
            Some(Err(refused)) => write!(f, " ({refused})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", if self.near { "near" } else { "none" }, self.reason)?;
        for advice in [self.reads, self.writes].into_iter().flatten() {
            write!(f, "; advice: {advice}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(reads_per_sec: f64, writes_per_sec: f64) -> Rates {
        Rates { reads_per_sec, writes_per_sec }
    }

    fn with(ceiling: Ceiling) -> Options {
        Options { ceiling: Some(ceiling), ..Options::default() }
    }

    #[test]
    fn a_near_cache_needs_no_ceiling_and_gives_no_advice() {
        let own = rates(60.0, 0.0);
        let decision = decide(&Options::default(), &Situation::alone(own, true));
        assert!(decision.near && decision.reads.is_none() && decision.writes.is_none());
        assert_eq!(decision.to_string(), "near: 60 reads/s here, near cache from 50/s");
    }

    #[test]
    fn copies_are_advised_when_refreshes_alone_fill_the_shard() {
        let own = rates(5_000.0, 0.0);
        let at =
            Situation { fleet: rates(5e6, 0.0), processes: 200, ..Situation::alone(own, true) };
        assert_eq!(decide(&with(Ceiling::DYNAMODB), &at).reads, None);
        let at = Situation { processes: 5_000, ..at };
        let advice = decide(&with(Ceiling::DYNAMODB), &at).reads.unwrap();
        assert_eq!(advice.treatment, Treatment::Copies { copies: 3 });
        assert_eq!(
            advice.to_string(),
            "3 copies: 5000/s on one shard, planned for 2400/s (5000 processes ÷ 1 s = 5000 \
             reads/s behind the near caches; 3 copies = ⌈5000 ÷ (0.8 × 3000 − 0)⌉: 1667/s on the \
             shard of each, 2/s on the base's, 2400/s planned with)"
        );
    }

    #[test]
    fn writes_count_against_copies_where_the_ceiling_is_shared() {
        let fleet = rates(300_000.0, 60_000.0);
        let at = Situation { fleet, ..Situation::alone(fleet, false) };
        let advice = decide(&with(Ceiling::REDIS), &at).reads.unwrap();
        assert_eq!(advice.treatment, Treatment::Copies { copies: 15 });
        let fleet = rates(300_000.0, 90_000.0);
        let at = Situation { fleet, ..at };
        let advice = decide(&with(Ceiling::REDIS), &at).reads.unwrap();
        assert_eq!(advice.treatment, Treatment::Shed);
        assert!(matches!(advice.reason, Reason::WritesFillCopies { .. }));
    }

    #[test]
    fn only_writes_that_combine_are_salted() {
        let fleet = rates(0.0, 10_000.0);
        let at = Situation { combines: true, ..Situation::alone(fleet, false) };
        let advice = decide(&with(Ceiling::DYNAMODB), &at).writes.unwrap();
        assert_eq!(advice.treatment, Treatment::Salt { slots: 13 });
        let at = Situation { combines: false, ..at };
        let advice = decide(&with(Ceiling::DYNAMODB), &at).writes.unwrap();
        assert_eq!(advice.treatment, Treatment::Shed);
        let firestore = Situation::alone(rates(0.0, 1.5), false);
        let firestore = Situation { combines: true, ..firestore };
        let advice = decide(&with(Ceiling::FIRESTORE), &firestore).writes.unwrap();
        assert_eq!(advice.treatment, Treatment::Salt { slots: 2 });
    }

    #[test]
    fn a_large_key_on_a_busy_shard_is_treated_below_the_ceiling() {
        let fleet = rates(0.0, 400.0);
        let shard = Shard { load_permille: 750, key_permille: 533 };
        let at = Situation { shard: Some(shard), combines: true, ..Situation::alone(fleet, false) };
        let advice = decide(&with(Ceiling::DYNAMODB), &at).writes.unwrap();
        assert_eq!(advice.reason, Reason::BusyShard { load_permille: 750, key_permille: 533 });
        assert_eq!(advice.treatment, Treatment::Salt { slots: 2 });
        for (load_permille, key_permille) in [(700, 533), (750, 100)] {
            let shard = Some(Shard { load_permille, key_permille });
            assert_eq!(decide(&with(Ceiling::DYNAMODB), &Situation { shard, ..at }).writes, None);
        }
    }

    #[test]
    fn a_mixed_key_gets_one_advice_for_each_half() {
        let fleet = rates(9_000.0, 2_400.0);
        let at = Situation { combines: true, ..Situation::alone(fleet, false) };
        let decision = decide(&with(Ceiling::DYNAMODB), &at);
        assert_eq!(decision.reads.unwrap().treatment, Treatment::Copies { copies: 4 });
        assert_eq!(decision.writes.unwrap().treatment, Treatment::Salt { slots: 3 });
        assert_eq!(fleet.class(), Class::Mixed);
    }
}
