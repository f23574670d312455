//! What each thread keeps of the hot values it read last.
//!
//! Finding a cell and loading what it shows costs a hash, two look-ups and four atomic operations. A
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

/// Takes out what is kept in the slot of `key`, if it is what `is_it` wants. It is out while in
/// use: what the caller's closure calls may come here again.
#[inline]
pub(crate) fn take(key: &[u8], is_it: impl FnOnce(&Handle) -> bool) -> Option<Arc<Handle>> {
    // A thread that is ending has given its slots back.
    let slot = KEPT.try_with(|slots| {
        let slot = &slots[slot_of(key)];
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
pub(crate) fn keep(key: &[u8], handle: Arc<Handle>) {
    let _ = KEPT.try_with(|slots| slots[slot_of(key)].set(Some(handle)));
}

/// Two keys of one slot take turns; no more depends on it. So a mix of the last bytes is enough,
/// where keys of one kind differ.
#[inline]
fn slot_of(key: &[u8]) -> usize {
    let tail = match (key.last_chunk::<8>(), key.last_chunk::<4>()) {
        (Some(tail), _) => u64::from_le_bytes(*tail),
        (_, Some(tail)) => u64::from(u32::from_le_bytes(*tail)),
        _ => key.last().copied().map_or(0, u64::from),
    };
    (tail.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SLOTS.trailing_zeros())) as usize
}
