//! Which counters are salted without anybody's word: those of which more is asked than one shard is
//! planned to take, and whose adds, combined as they are, still take a large part of it. Combined
//! adds are self-clocking: what they cost never shows by how much they would exceed the shard.

use super::Salted;
use super::coordinator::Automatic;
use crate::adds::Cell;
use crate::engine::control::rotation::Want;
use crate::engine::control::spread::{Asked, Place};
use crate::engine::control::treat::Ceiling;
use crate::engine::time::Tick;
use crate::key::Key;
use crate::registry::lease_clock;
use crate::shared::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Between two looks at the hot list.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Cold looks in a row before slots are given up: 15 s.
const COLD_LOOKS: u32 = 150;

impl Salted {
    /// A look at the hot counters, now and then.
    pub(super) fn look_at_traffic(&self, shared: &Arc<Shared>) {
        let ceiling = shared.options.steering.detect.treat.ceiling;
        let Some(ceiling) = ceiling.filter(|_| self.options.automatic) else { return };
        if shared.options.steering.observe_only {
            return;
        }
        let now = lease_clock(&shared.clock);
        let last = Tick(self.looked.load(Ordering::Relaxed));
        if now.since(last) < LOOK_EVERY {
            return;
        }
        self.looked.store(now.0, Ordering::Relaxed);
        let hot = shared.steering.lock().hot_list(shared.clock.now()).entries;
        let mut seen = Vec::new();
        for entry in hot.iter().filter(|e| e.writes_per_sec > 0.0) {
            let Some(cell) = shared.counters.known_cell(shared.hash(&entry.key), &entry.key) else {
                continue;
            };
            seen.push(entry.key.clone());
            self.weigh(shared, &cell, now, &ceiling);
        }
        self.cool_down(shared, &seen, now);
    }

    /// One hot counter: what its combined adds cost, against what a shard can take.
    fn weigh(&self, shared: &Arc<Shared>, cell: &Cell, now: Tick, ceiling: &Ceiling) {
        let Some([adds_per_sec, writes_per_sec]) = self.rates_of(cell, now) else { return };
        let permille = f64::from(shared.options.steering.detect.treat.target_permille);
        // A feed knows better than the options where more processes write than they say.
        let steering = shared.steering.lock();
        let named = steering.fed.as_ref().and_then(|fed| fed.reporters(&cell.key));
        drop(steering);
        let spread = Asked {
            adds_per_sec,
            writes_per_sec,
            writers: self.options.processes.max(named.unwrap_or(0)),
            target_per_sec: ceiling.writes_per_sec * permille / 1000.0,
            placed: shared.store.shard_of(&cell.key).is_some(),
            slots_max: self.options.slots_max,
        };
        let spread = spread.decide();
        let want = match spread.place {
            Place::Slots(k) if self.may_seal_home() => Some(Want::AtOnce(k)),
            Place::Slots(k) => Some(Want::Slots(k)),
            Place::Ready(k) => Some(Want::Ready(k)),
            Place::One | Place::Same => None,
        };
        let cold = spread.place == Place::One;
        self.automatic(shared, &cell.key, now, Automatic { want, cold, spread: Some(spread) });
    }

    /// Counters that are not on the list any more are cold.
    fn cool_down(&self, shared: &Arc<Shared>, seen: &[Key], now: Tick) {
        for key in self.automatic_keys() {
            if !seen.contains(&key) {
                self.automatic(
                    shared,
                    &key,
                    now,
                    Automatic { want: None, cold: true, spread: None },
                );
            }
        }
    }

    /// Cold for long enough.
    pub(super) fn is_over(looks: u32) -> bool {
        looks >= COLD_LOOKS
    }
}
