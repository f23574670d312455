//! Whether the writes of a counter are combined in one place or spread over slots.
//!
//! - **What**: from what one process is asked to add, what it sends to the store, and how many
//!   processes write: what one place would have to bear, and how many slots that asks for.
//! - **Invariant**: between [`HOT_PERMILLE`] and [`COLD_PERMILLE`] of what is planned with nothing
//!   changes, so that a load near either line does not go back and forth; what is asked for brings a
//!   slot below what is planned with.
//! - **Time and units**: rates per second; parts of a target in thousandths.
//! - **Bounds**: [`Asked::slots_max`] slots.
//! - **Source**: a process has one combined add under way, so that it sends no more than one a round
//!   trip, whatever it is asked: the load of one place is at most the number of writers times that.
//!   Few writers need no slots, their combined adds are lanes enough; many do.

use std::fmt;

/// From this part of what is planned with, one place is too few.
pub const HOT_PERMILLE: f64 = 500.0;

/// From this part on slots are made ready.
pub const WARM_PERMILLE: f64 = 250.0;

/// Below this part one place will do again.
pub const COLD_PERMILLE: f64 = 100.0;

/// What is known of the writes of one counter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Asked {
    /// Adds a second that this process is asked for.
    pub adds_per_sec: f64,
    /// Writes a second in which it sends them.
    pub writes_per_sec: f64,
    /// Processes that write as this one does.
    pub writers: u32,
    /// Writes a second that one shard is planned with.
    pub target_per_sec: f64,
    /// Whether the shards are known on which slots fall: then they fall on different ones.
    pub placed: bool,
    /// Slots at most.
    pub slots_max: u16,
}

/// What that asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// One place, to which each process sends what it has combined.
    One,
    /// Whatever it is now.
    Same,
    /// One place, and so many slots made ready.
    Ready(u16),
    /// So many slots.
    Slots(u16),
}

/// The decision, with the numbers behind it. Its `Display` says both.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct Spread {
    /// What is decided.
    pub place: Place,
    /// What is known.
    pub asked: Asked,
}

impl Asked {
    /// What one place would bear of it, in thousandths of what is planned with.
    #[must_use]
    pub fn heat_permille(&self) -> f64 {
        1000.0 * self.writes_per_sec * f64::from(self.writers) / self.target_per_sec
    }

    /// How many such writers one place bears before it is hot.
    #[must_use]
    pub fn writers_borne(&self) -> f64 {
        self.target_per_sec * HOT_PERMILLE / 1000.0 / self.writes_per_sec
    }

    /// The smallest power of two that brings a slot below what is planned with, should each add come
    /// by itself; twice that where it is not known on which shards the slots fall.
    #[must_use]
    pub fn slots(&self) -> u16 {
        let all = self.adds_per_sec * f64::from(self.writers);
        let slots = (all / self.target_per_sec).ceil() * if self.placed { 1.0 } else { 2.0 };
        let max = u32::from(self.slots_max);
        let slots = (slots.clamp(2.0, f64::from(max).max(2.0)) as u32).next_power_of_two();
        slots.min(max) as u16
    }

    /// Where the writes are to go.
    #[must_use]
    pub fn decide(self) -> Spread {
        let heat = self.heat_permille();
        let needs = self.adds_per_sec * f64::from(self.writers) >= self.target_per_sec;
        let place = if needs && heat >= HOT_PERMILLE {
            Place::Slots(self.slots())
        } else if needs && heat >= WARM_PERMILLE {
            Place::Ready(self.slots())
        } else if heat < COLD_PERMILLE {
            Place::One
        } else {
            Place::Same
        };
        Spread { place, asked: self }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Asked { adds_per_sec, writes_per_sec, writers, target_per_sec, .. } = self.asked;
        let percent = self.asked.heat_permille() / 10.0;
        write!(
            f,
            "{writers} × {writes_per_sec:.0}/s carry {adds_per_sec:.0} adds/s each: {percent:.0} % \
             of the {target_per_sec:.0}/s of one place"
        )?;
        if writes_per_sec > 0.0 {
            write!(f, ", which bears {:.1} such writers", self.asked.writers_borne())?;
        }
        match self.place {
            Place::One => write!(f, "; combining is enough"),
            Place::Same => write!(f, "; left as it is"),
            Place::Ready(slots) => write!(f, "; {slots} slots are made ready"),
            Place::Slots(slots) => write!(f, "; {slots} slots"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 20,000 adds a second of each process, which a round trip of 1 ms carries in 1,000 writes.
    const ASKED: Asked = Asked {
        adds_per_sec: 20_000.0,
        writes_per_sec: 1000.0,
        writers: 1,
        target_per_sec: 4000.0,
        placed: true,
        slots_max: 1024,
    };

    #[test]
    fn few_writers_combine_many_have_slots_and_in_between_nothing_changes() {
        for (writers, writes_per_sec, want) in [
            (1, 100.0, Place::One),
            (3, 100.0, Place::One),
            (4, 100.0, Place::Same),
            (9, 100.0, Place::Same),
            (10, 100.0, Place::Ready(64)),
            (19, 100.0, Place::Ready(128)),
            (20, 100.0, Place::Slots(128)),
            (1, 399.0, Place::One),
            (1, 1000.0, Place::Ready(8)),
            (2, 1000.0, Place::Slots(16)),
            (200, 1000.0, Place::Slots(1024)),
            (1000, 1000.0, Place::Slots(1024)),
        ] {
            let asked = Asked { writers, writes_per_sec, ..ASKED };
            assert_eq!(asked.decide().place, want, "{writers} writers of {writes_per_sec}/s");
        }
    }

    #[test]
    fn what_is_asked_for_less_than_one_shard_bears_has_no_slots_however_it_is_sent() {
        let asked = Asked { adds_per_sec: 3999.0, writes_per_sec: 3999.0, ..ASKED };
        assert_eq!(asked.decide().place, Place::Same);
        let none = Asked { adds_per_sec: 0.0, writes_per_sec: 0.0, ..ASKED };
        assert_eq!(none.decide().place, Place::One);
    }

    #[test]
    fn where_shards_are_not_known_there_are_twice_as_many_slots_and_never_too_many() {
        assert_eq!((ASKED.slots(), Asked { placed: false, ..ASKED }.slots()), (8, 16));
        for slots_max in [1, 3, 100, 1024] {
            let slots = Asked { slots_max, writers: 1000, ..ASKED }.slots();
            assert!(slots >= 1 && slots <= slots_max, "{slots} of {slots_max}");
        }
    }

    /// A load that swings between the lines keeps whatever it has.
    #[test]
    fn from_slots_to_one_place_a_load_falls_to_a_fifth() {
        let hot = Asked { writers: 2, ..ASKED };
        assert!(matches!(hot.decide().place, Place::Slots(_)));
        let less = Asked { writes_per_sec: 201.0, adds_per_sec: 1000.0, ..hot };
        assert_eq!(less.decide().place, Place::Same);
        let fifth = Asked { writes_per_sec: 199.0, adds_per_sec: 1000.0, ..hot };
        assert_eq!(fifth.decide().place, Place::One);
    }

    #[test]
    fn the_arithmetic_is_said() {
        let said = Asked { writers: 8, ..ASKED }.decide().to_string();
        let want = "8 × 1000/s carry 20000 adds/s each: 200 % of the 4000/s of one place, which \
                    bears 2.0 such writers; 64 slots";
        assert_eq!(said, want);
        let none = Asked { writes_per_sec: 0.0, adds_per_sec: 0.0, ..ASKED }.decide().to_string();
        assert!(none.ends_with("0 % of the 4000/s of one place; combining is enough"), "{none}");
    }
}
