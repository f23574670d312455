//! Which counters are salted without anybody's word: those of which more is asked than one shard is
//! planned to take, and whose adds, combined as they are, still take a large part of it. Combined
//! adds are self-clocking: what they cost never shows by how much they would exceed the shard.

use super::Salted;
use super::coordinator::Automatic;
use crate::adds::Cell;
use crate::engine::control::rotation::Want;
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

/// A load above this part of what is planned with is hot, in thousandths.
const HOT_PERMILLE: f64 = 500.0;

/// From this part on the slots are made ready.
const WARM_PERMILLE: f64 = 250.0;

/// A counter below this part of what is planned with is cold.
const COLD_PERMILLE: f64 = 100.0;

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

    /// One hot counter: the operations that its combined adds cost, against what a shard can take.
    fn weigh(&self, shared: &Arc<Shared>, cell: &Cell, now: Tick, ceiling: &Ceiling) {
        let Some(rates) = self.rates_of(cell, now) else { return };
        let [asked, load] = rates.map(|rate| rate * f64::from(self.options.processes));
        let permille = f64::from(shared.options.steering.detect.treat.target_permille);
        let target = ceiling.writes_per_sec * permille / 1000.0;
        let heat = 1000.0 * load / target;
        let k = self.slots_for(shared, &cell.key, asked, target);
        let want = if asked < target {
            None
        } else if heat >= HOT_PERMILLE {
            Some(if self.may_seal_home() { Want::AtOnce(k) } else { Want::Slots(k) })
        } else if heat >= WARM_PERMILLE {
            Some(Want::Ready(k))
        } else {
            None
        };
        self.automatic(shared, &cell.key, now, Automatic { want, cold: heat < COLD_PERMILLE });
    }

    /// The smallest power of two that brings a slot below what is planned with; twice that where
    /// it is not known on which shards the slots fall.
    fn slots_for(&self, shared: &Shared, key: &Key, asked: f64, target: f64) -> u16 {
        let placed = shared.store.shard_of(key).is_some();
        let slots = (asked / target).ceil() * if placed { 1.0 } else { 2.0 };
        let max = u32::from(self.options.slots_max);
        let slots = (slots.clamp(2.0, f64::from(max)) as u32).next_power_of_two();
        slots.min(max) as u16
    }

    /// Counters that are not on the list any more are cold.
    fn cool_down(&self, shared: &Arc<Shared>, seen: &[Key], now: Tick) {
        for key in self.automatic_keys() {
            if !seen.contains(&key) {
                self.automatic(shared, &key, now, Automatic { want: None, cold: true });
            }
        }
    }

    /// Cold for long enough.
    pub(super) fn is_over(looks: u32) -> bool {
        looks >= COLD_LOOKS
    }
}
