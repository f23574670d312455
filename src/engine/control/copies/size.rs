//! How many copies a key needs, and where they should lie.
//!
//! - **What**: the number from demand and ceiling, with its arithmetic; a generation whose names
//!   fall on distinct shards.
//! - **Invariant**: no shard is planned above its target, or copies are refused with the reason.
//! - **Time and units**: operations per second.
//! - **Bounds**: [`COPIES_MAX`] copies; [`PLACE_TRIES`] generations looked at.
//! - **Source**: `research/copies.md` section 9: `N = ⌈R ÷ (0.8 C − W)⌉`; each copy takes all
//!   writes, and the base four operations a write and the fills.

use super::COPIES_MAX;
use std::fmt;
use std::time::Duration;

/// Generations that are looked at for a good placement.
pub const PLACE_TRIES: u32 = 4_096;

/// What the fleet asks of one key, and what a shard gives.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Demand {
    /// Reads a second that the fleet's callers make.
    pub reads_per_sec: f64,
    /// Writes a second.
    pub writes_per_sec: f64,
    /// Processes.
    pub processes: u32,
    /// How long each serves a value before it loads it again; none: it does not keep it.
    pub near_ttl: Option<Duration>,
    /// What one shard can serve a second.
    pub ceiling_per_sec: f64,
    /// The part of it that is planned with.
    pub target_permille: u32,
    /// How long a copy lives.
    pub copy_ttl: Duration,
    /// How long a load takes: while a copy is missing, its readers go to the base for so long.
    pub load_time: Duration,
}

/// A number of copies, with the numbers that it comes from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sizing {
    /// What it was made from.
    pub demand: Demand,
    /// Reads a second that get past the near caches.
    pub reads_per_sec: f64,
    /// What is planned with on one shard, a second.
    pub target_per_sec: f64,
    /// Copies.
    pub copies: u16,
    /// Operations a second on the shard of one copy.
    pub per_copy: f64,
    /// Operations a second on the shard of the base.
    pub on_base: f64,
}

/// Why there should be no copies.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Refused {
    /// One shard carries the reads.
    NotNeeded(Sizing),
    /// Each copy takes all writes, and they alone fill what is planned with.
    WritesFillCopies(Sizing),
    /// What writes and fills cost on the base's shard is more than is planned with.
    BaseFull(Sizing),
    /// More than [`COPIES_MAX`] would be needed.
    TooMany(Sizing),
}

/// How many copies.
///
/// # Errors
/// Why none, with the same numbers.
pub fn size(demand: &Demand) -> Result<Sizing, Refused> {
    let near = demand.near_ttl.map(|ttl| f64::from(demand.processes) / secs(ttl));
    let reads = near.map_or(demand.reads_per_sec, |near| near.min(demand.reads_per_sec));
    let target = demand.ceiling_per_sec * f64::from(demand.target_permille) / 1_000.0;
    let writes = demand.writes_per_sec;
    let mut sizing = Sizing {
        demand: *demand,
        reads_per_sec: reads,
        target_per_sec: target,
        copies: 0,
        per_copy: 0.0,
        on_base: reads + writes,
    };
    if sizing.on_base <= target {
        return Err(Refused::NotNeeded(sizing));
    }
    let left = target - writes;
    if left <= 0.0 {
        return Err(Refused::WritesFillCopies(sizing));
    }
    let copies = (reads / left).ceil().max(2.0);
    if copies > f64::from(COPIES_MAX) {
        return Err(Refused::TooMany(sizing));
    }
    // A copy is missing once a lifetime; whoever asks for it until it is filled asks the base.
    let asking = (reads / copies * secs(demand.load_time)).min(f64::from(demand.processes));
    let fills = copies * asking.max(1.0) / secs(demand.copy_ttl);
    sizing.copies = copies as u16;
    sizing.per_copy = reads / copies + writes;
    sizing.on_base = 4.0 * writes + fills;
    if sizing.on_base > target { Err(Refused::BaseFull(sizing)) } else { Ok(sizing) }
}

fn secs(d: Duration) -> f64 {
    d.as_secs_f64().max(1e-3)
}

/// A generation and how its names fall.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The generation.
    pub generation: u64,
    /// Copies on the shard that holds most of them.
    pub busiest: u16,
    /// Copies on the base's shard.
    pub on_base: u16,
}

/// The best of [`PLACE_TRIES`] generations: no copy on the base's shard, then as few as possible
/// on any one. `shard` says where the copy with this number of this generation would lie; `draw`
/// gives 64 random bits.
pub fn place(
    copies: u16,
    base: u32,
    mut shard: impl FnMut(u64, u16) -> u32,
    mut draw: impl FnMut() -> u64,
) -> Placed {
    let mut best: Option<Placed> = None;
    let mut on: Vec<u32> = Vec::with_capacity(usize::from(copies));
    for _ in 0..PLACE_TRIES {
        let generation = draw();
        on.clear();
        on.extend((0..copies).map(|i| shard(generation, i)));
        on.sort_unstable();
        let busiest = on.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(0) as u16;
        let on_base = on.iter().filter(|s| **s == base).count() as u16;
        let placed = Placed { generation, busiest, on_base };
        if best.is_none_or(|b| (on_base, busiest) < (b.on_base, b.busiest)) {
            best = Some(placed);
        }
        if (on_base, busiest) == (0, 1) {
            break;
        }
    }
    best.unwrap_or_else(|| Placed { generation: draw(), busiest: copies, on_base: copies })
}

impl fmt::Display for Sizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &self.demand;
        match d.near_ttl {
            Some(ttl) if self.reads_per_sec < d.reads_per_sec => write!(
                f,
                "{} processes ÷ {} s = {:.0} reads/s behind the near caches",
                d.processes,
                ttl.as_secs_f64(),
                self.reads_per_sec
            )?,
            _ => write!(f, "{:.0} reads/s", self.reads_per_sec)?,
        }
        let part = f64::from(d.target_permille) / 1_000.0;
        let (ceiling, writes) = (d.ceiling_per_sec, d.writes_per_sec);
        if self.copies == 0 {
            return write!(
                f,
                ", {writes:.0} writes/s; planned with {part} × {ceiling:.0} = {:.0}/s a shard",
                self.target_per_sec
            );
        }
        write!(
            f,
            "; {} copies = ⌈{:.0} ÷ ({part} × {ceiling:.0} − {writes:.0})⌉: {:.0}/s on the shard of \
             each, {:.0}/s on the base's, {:.0}/s planned with",
            self.copies, self.reads_per_sec, self.per_copy, self.on_base, self.target_per_sec,
        )
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::NotNeeded(s) => write!(f, "no copies: one shard carries it: {s}"),
            Refused::WritesFillCopies(s) => {
                write!(f, "no copies: each takes all writes, which fill it: {s}")
            }
            Refused::BaseFull(s) => {
                write!(f, "no copies: writes and fills would fill the base's shard: {s}")
            }
            Refused::TooMany(s) => write!(f, "no copies: more than {COPIES_MAX} needed: {s}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn demand(processes: u32, writes: f64) -> Demand {
        Demand {
            reads_per_sec: 2e6,
            writes_per_sec: writes,
            processes,
            near_ttl: Some(Duration::from_secs(1)),
            ceiling_per_sec: 3_000.0,
            target_permille: 800,
            copy_ttl: Duration::from_secs(14),
            load_time: Duration::from_millis(5),
        }
    }

    #[test]
    fn twenty_thousand_processes_need_nine_copies_of_a_partition_of_three_thousand() {
        let sizing = size(&demand(20_000, 0.0)).unwrap();
        assert_eq!(sizing.copies, 9);
        assert_eq!(
            sizing.to_string(),
            "20000 processes ÷ 1 s = 20000 reads/s behind the near caches; 9 copies = ⌈20000 ÷ \
             (0.8 × 3000 − 0)⌉: 2222/s on the shard of each, 7/s on the base's, 2400/s planned with"
        );
    }

    #[test]
    fn a_small_fleet_needs_none_and_a_written_key_gets_none() {
        assert!(matches!(size(&demand(200, 0.0)), Err(Refused::NotNeeded(_))));
        assert!(matches!(size(&demand(20_000, 2_400.0)), Err(Refused::WritesFillCopies(_))));
        assert!(matches!(size(&demand(20_000, 650.0)), Err(Refused::BaseFull(_))));
        assert!(matches!(size(&demand(4_000_000, 0.0)), Err(Refused::TooMany(_))));
        let told = size(&demand(20_000, 2_400.0)).unwrap_err().to_string();
        assert!(told.contains("2400 writes/s; planned with 0.8 × 3000 = 2400/s"), "{told}");
    }

    proptest! {
        #[test]
        fn what_is_allowed_stays_below_the_target_everywhere(
            processes in 1u32..1_000_000, writes in 0.0f64..3_000.0, ceiling in 10.0f64..1e6,
        ) {
            let demand = Demand { ceiling_per_sec: ceiling, ..demand(processes, writes) };
            if let Ok(s) = size(&demand) {
                prop_assert!(s.per_copy <= s.target_per_sec * (1.0 + 1e-9));
                prop_assert!(s.on_base <= s.target_per_sec);
                prop_assert!(s.copies >= 2);
            }
        }
    }

    #[test]
    fn copies_fall_on_distinct_shards_and_none_on_the_bases() {
        let mut state = 7u64;
        let draw = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state ^ (state >> 31)
        };
        let shard = |generation: u64, i: u16| {
            let z = (generation ^ (u64::from(i) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 60) as u32
        };
        let placed = place(9, 3, shard, draw);
        assert_eq!((placed.busiest, placed.on_base), (1, 0));
    }
}
