//! Ways to get rotations wrong, switched on by tests that prove that each is caught.

use super::{Salted, names, plan};
use crate::engine::control::registry::Record;
use crate::engine::control::rotation::{Step, Waits};
use crate::engine::control::salt::{Gen, Slot};
use crate::error::Result;
use crate::key::Key;
use crate::shared::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A way to get it wrong.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum SaltMutant {
    /// A generation is summed and replaced in one change, without a wait.
    FoldsInOneChange = 1,
    /// The same after a wait, during which it is still written to.
    WaitsAndFoldsInOneChange,
    /// A retired value is added to the new slots and taken from the old ones.
    MovesValues,
    /// Writers learn of a generation before readers do.
    WritersFirst,
    /// It is announced, and nobody waits for readers to know.
    NoWaitForReaders,
    /// It is summed while writers may still write to it.
    NoWaitForWriters,
    /// Slots are deleted as soon as they are retired.
    NoGrave,
    /// Writers write after the end of their leases.
    IgnoresLeases,
    /// What comes late is never looked for.
    NoSweep,
    /// Readers do not look again when they see a seal or miss a slot.
    TrustsWhatItReads,
    /// Slots are deleted while the registry may still go back to before they were retired.
    ShortGrave,
    /// An add of unknown outcome is sent again.
    AddsAgain,
    /// What is retired is added to the bare key before everybody knows.
    FoldsAtOnce,
    /// Readers do not look whether it is there already.
    IgnoresMarks,
    /// Who finds that another has changed the record overwrites it with what was summed before.
    KeepsTheSum,
}

impl Salted {
    pub(crate) fn is_broken(&self, by: SaltMutant) -> bool {
        self.broken.load(Ordering::Relaxed) == by as u8
    }

    pub(super) fn ignores_leases(&self) -> bool {
        self.is_broken(SaltMutant::IgnoresLeases)
    }

    pub(super) fn trusts_what_it_reads(&self) -> bool {
        self.is_broken(SaltMutant::TrustsWhatItReads)
    }

    pub(super) fn ignores_marks(&self) -> bool {
        self.is_broken(SaltMutant::IgnoresMarks)
    }

    pub(super) fn waits(&self) -> Waits {
        let mut waits = self.waits;
        if self.is_broken(SaltMutant::NoWaitForReaders) {
            waits.readers = Duration::ZERO;
        }
        if self.is_broken(SaltMutant::NoWaitForWriters) {
            waits.writers = Duration::ZERO;
        }
        if self.is_broken(SaltMutant::NoGrave) {
            waits.grave = Duration::ZERO;
        }
        if self.is_broken(SaltMutant::FoldsAtOnce) {
            waits.fold = waits.fold.map(|_| Duration::ZERO);
        }
        if self.is_broken(SaltMutant::ShortGrave) {
            waits.grave = waits.readers + waits.readers / 2;
        }
        waits
    }

    /// The step as it is got wrong; `None` where it is not.
    pub(super) async fn take_broken(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        record: Option<&Record>,
        salt: &plan::Salt,
        step: Step,
    ) -> Result<Option<bool>> {
        let next = match step {
            Step::Announce { k, home: false, .. } if self.is_broken(SaltMutant::WritersFirst) => {
                salt.announced(k, plan::Kind::Slots, 1, true).and_then(|s| s.switched())
            }
            Step::Switch if salt.cur.id > 0 && self.is_broken(SaltMutant::FoldsInOneChange) => {
                let total = self.total_of(shared, key, salt.cur).await?;
                salt.switched().and_then(|s| s.retired(salt.cur.id, total, true))
            }
            Step::Switch
                if salt.cur.id > 0 && self.is_broken(SaltMutant::WaitsAndFoldsInOneChange) =>
            {
                shared.runtime.sleep(self.waits.readers).await;
                let total = self.total_of(shared, key, salt.cur).await?;
                salt.switched().and_then(|s| s.retired(salt.cur.id, total, true))
            }
            Step::Retire(old) if self.is_broken(SaltMutant::MovesValues) => {
                self.move_values(shared, key, old, salt.cur).await?;
                salt.retired(old.id, 0, true)
            }
            Step::Sweep(_) if self.is_broken(SaltMutant::NoSweep) => return Ok(Some(true)),
            _ => return Ok(None),
        };
        let Some(next) = next else { return Ok(Some(false)) };
        self.put(shared, key, record, &next).await.map(Some)
    }

    async fn total_of(&self, shared: &Arc<Shared>, key: &Key, of: Gen) -> Result<i64> {
        let slots: Vec<Slot> = (0..of.k).map(|index| Slot { of, index }).collect();
        let found = self.slots_of(shared, key, &slots).await?;
        let numbers = found.into_iter().flatten().filter_map(|s| crate::counter::integer(&s.bytes));
        Ok(numbers.sum())
    }

    async fn move_values(&self, shared: &Arc<Shared>, key: &Key, from: Gen, to: Gen) -> Result<()> {
        for index in 0..from.k {
            let old = names::slot(key, Slot { of: from, index });
            let new = names::slot(key, Slot { of: to, index: index % to.k });
            let store = &shared.store;
            let Some(stored) = store.clone().get(old.clone()).await? else { continue };
            let n = crate::counter::integer(&stored.bytes).unwrap_or(0);
            store.clone().add(new, n).await?;
            store.clone().add(old, -n).await?;
        }
        Ok(())
    }
}

/// For tests: where a slot is kept.
#[doc(hidden)]
#[must_use]
pub fn slot_name(key: &Key, slot: Slot) -> Key {
    names::slot(key, slot)
}

/// For tests: where the record of a key is kept.
#[doc(hidden)]
#[must_use]
pub fn record_name(key: &Key) -> Key {
    names::Part::Record.of(key)
}

impl crate::Heatsink {
    /// For tests: gets salted counters wrong in one way.
    #[doc(hidden)]
    pub fn break_salt(&self, mutant: SaltMutant) {
        if let Some(salted) = &self.shared().salted {
            salted.broken.store(mutant as u8, Ordering::Relaxed);
        }
    }
}
