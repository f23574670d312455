//! What each thread keeps of the hot values it read last.
//!
//! Finding a cell and loading what it shows costs two look-ups and four atomic operations. A
//! thread keeps its own handle of the values it read last instead, and a handle knows when it has
//! been retired: whoever replaces or clears what a cell shows says so before anybody can rely on
//! it, under the lock of the stripe. So a kept handle is as good as the cell itself.
//!
//! What a thread keeps of a value that is gone stays in memory until another takes its slot: at
//! most [`SLOTS`] values of [`BYTES_MAX`] per thread. Larger values are not kept.

use crate::cell::Handle;
use crate::sync::thread_local;
use std::cell::Cell;
use std::sync::Arc;

/// Values per thread; a power of two.
const SLOTS: usize = 32;

/// A larger value is not kept: reading it costs more than finding it.
pub(crate) const BYTES_MAX: usize = 4096;

thread_local! {
    static KEPT: [Cell<Option<Arc<Handle>>>; SLOTS] = const { [const { Cell::new(None) }; SLOTS] };
}

/// Takes out what is kept in the slot of `hash`, if it is what `is_it` wants. It is out while in
/// use: what the caller's closure calls may come here again.
#[inline]
pub(crate) fn take(hash: u64, is_it: impl FnOnce(&Handle) -> bool) -> Option<Arc<Handle>> {
    // A thread that is ending has given its slots back.
    let slot = KEPT.try_with(|slots| {
        let slot = &slots[slot_of(hash)];
        let handle = slot.take()?;
        if is_it(&handle) {
            return Some(handle);
        }
        slot.set(Some(handle));
        None
    });
    slot.ok().flatten()
}

/// Keeps `handle`; what was in its slot goes.
#[inline]
pub(crate) fn keep(hash: u64, handle: Arc<Handle>) {
    let _ = KEPT.try_with(|slots| slots[slot_of(hash)].set(Some(handle)));
}

#[inline]
fn slot_of(hash: u64) -> usize {
    (hash >> 40) as usize & (SLOTS - 1)
}
