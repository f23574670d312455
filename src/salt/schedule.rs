//! Counters that are salted by a schedule: before the push goes out, until it is over.

use super::Salted;
use crate::engine::control::operator::SCHEDULES_MAX;
use crate::engine::time::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::registry::lease_clock;
use crate::shared::Shared;
use std::sync::Arc;
use std::time::Duration;

/// Numbers of schedules of this kind have this bit, those of the near cache do not.
const OF_SALT: u64 = 1 << 63;

/// The schedules that wait or are in force.
#[derive(Default)]
pub(super) struct Planned {
    all: Vec<Plan>,
    last: u64,
}

struct Plan {
    number: u64,
    keys: Vec<Key>,
    slots: u16,
    from: Tick,
    until: Tick,
    begun: bool,
}

impl Salted {
    /// Pins `keys` to `slots` from `starts_in` on, for `lasts`. The number takes it back.
    pub(crate) fn schedule(
        &self,
        shared: &Shared,
        (keys, slots): (Vec<Key>, u16),
        starts_in: Duration,
        lasts: Duration,
    ) -> Result<u64> {
        let from = lease_clock(&shared.clock).after(starts_in);
        let mut planned = self.planned.lock();
        if planned.all.len() >= SCHEDULES_MAX {
            let text = format!("no more than {SCHEDULES_MAX} schedules can wait");
            return Err(Error::not_applied(ErrorKind::Limit, text));
        }
        planned.last += 1;
        let number = planned.last | OF_SALT;
        let until = from.after(lasts);
        planned.all.push(Plan { number, keys, slots, from, until, begun: false });
        Ok(number)
    }

    /// Takes a schedule back, and its pins; whether it was there still.
    pub(crate) fn cancel(&self, shared: &Arc<Shared>, number: u64) -> bool {
        let mut planned = self.planned.lock();
        let Some(at) = planned.all.iter().position(|plan| plan.number == number) else {
            return false;
        };
        let plan = planned.all.swap_remove(at);
        drop(planned);
        if plan.begun {
            plan.keys.iter().for_each(|key| drop_pin(self, shared, key));
        }
        true
    }

    /// Begins and ends what is due.
    pub(super) fn keep_schedules(&self, shared: &Arc<Shared>, now: Tick) {
        let mut planned = self.planned.lock();
        if planned.all.is_empty() {
            return;
        }
        let mut begin = Vec::new();
        for plan in planned.all.iter_mut().filter(|plan| !plan.begun && plan.from <= now) {
            plan.begun = true;
            begin.extend(plan.keys.iter().map(|key| (key.clone(), plan.slots)));
        }
        let over = |plan: &mut Plan| plan.until <= now;
        let end: Vec<Key> = planned.all.extract_if(.., over).flat_map(|plan| plan.keys).collect();
        drop(planned);
        for (key, slots) in begin {
            self.pin(shared, &key, Some(slots));
        }
        end.iter().for_each(|key| drop_pin(self, shared, key));
    }
}

fn drop_pin(salted: &Salted, shared: &Arc<Shared>, key: &Key) {
    salted.pin(shared, key, None);
}
