//! What each thread keeps of the hot values it read last.
//!
//! Finding a cell and loading what it shows costs a hash, two look-ups and four atomic operations. A
//! thread keeps its own handle of the values it read last instead, and a handle knows when it has
//! been retired: whoever replaces or clears what a cell shows says so before anybody can rely on
//! it, under the lock of the stripe. So a kept handle is as good as the cell itself.
//!
//! What a thread keeps of a value that is gone stays in memory until another takes its slot, or
//! until one of the thread's next look-ups comes by: at most [`SETS`] times [`WAYS`] values of
//! [`BYTES_MAX`] per thread. Larger values are not kept.

use crate::cell::Handle;
use crate::sync::thread_local;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Sets per thread; a power of two.
const SETS: usize = 128;

/// Values per set: two keys that fall together do not push each other out.
const WAYS: usize = 2;

/// A larger value is not kept: reading it costs more than finding it.
pub(crate) const BYTES_MAX: usize = 2048;

type Slot = RefCell<Option<Arc<Handle>>>;

struct Slots {
    sets: [[Slot; WAYS]; SETS],
    /// The set that is looked through for what is gone when the next value is kept.
    swept: Cell<usize>,
}

thread_local! {
    static KEPT: Slots = const {
        Slots {
            sets: [const { [const { RefCell::new(None) }; WAYS] }; SETS],
            swept: Cell::new(0),
        }
    };
}

/// What `f` makes of what is kept in the set of `key`: it is asked one by one, until it has taken
/// one. What it calls may come here again; meanwhile the slot stays as it is.
#[inline(always)]
pub(crate) fn with<R>(key: &[u8], mut f: impl FnMut(&Arc<Handle>) -> Option<R>) -> Option<R> {
    // A thread that is ending has given its slots back.
    let taken = KEPT.try_with(|slots| {
        slots.sets[set_of(key)].iter().find_map(|slot| f(slot.try_borrow().ok()?.as_ref()?))
    });
    taken.ok().flatten()
}

/// Keeps `handle`; of its set, the one that came before the others goes.
pub(crate) fn keep(key: &[u8], handle: Arc<Handle>) {
    let gone = KEPT.try_with(|slots| {
        let mut handle = Some(handle);
        for slot in &slots.sets[set_of(key)] {
            // In use further up this stack: it stays.
            let Ok(mut slot) = slot.try_borrow_mut() else { continue };
            handle = std::mem::replace(&mut *slot, handle);
            if handle.as_ref().is_none_or(|h| h.is_retired()) {
                break;
            }
        }
        let swept = slots.swept.get();
        slots.swept.set((swept + 1) % SETS);
        let sweep = |slot: &Slot| slot.try_borrow_mut().ok()?.take_if(|h| h.is_retired());
        (handle, slots.sets[swept].each_ref().map(sweep))
    });
    // What goes may be the last of a user's type, whose drop may come here again.
    drop(gone);
}

/// More keys than a set holds take turns; no more depends on it. So a mix of the last bytes is
/// enough, where keys of one kind differ.
#[inline(always)]
fn set_of(key: &[u8]) -> usize {
    let tail = match (key.last_chunk::<8>(), key.last_chunk::<4>()) {
        (Some(tail), _) => u64::from_le_bytes(*tail),
        (_, Some(tail)) => u64::from(u32::from_le_bytes(*tail)),
        _ => key.last().copied().map_or(0, u64::from),
    };
    (tail.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SETS.trailing_zeros())) as usize
}
