//! Records and rotations at random, against what each must promise.
//!
//! - **What**: the property tests of [`super`].
//! - **Invariant**: a reader of any record in force finds what a writer of any may write.
//! - **Time and units**: none.
//! - **Bounds**: 80 steps a case.
//! - **Source**: rules K1 to K8 of the protocol.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug)]
enum Step {
    Announce(u16, bool),
    Home,
    Arm,
    Switch,
    Retire(usize, i32, bool),
    Replace(i32),
    Sweep(usize, i32),
    Forget(usize),
    Reset(i32),
    Expires,
    Expire(i32),
    BeginFold,
    EndFold,
    ForgetFold,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1..40u16, any::<bool>()).prop_map(|(k, a)| Step::Announce(k, a)),
        1 => Just(Step::Home),
        1 => Just(Step::Arm),
        4 => Just(Step::Switch),
        3 => (0..2usize, any::<i32>(), any::<bool>()).prop_map(|(i, n, s)| Step::Retire(i, n, s)),
        1 => any::<i32>().prop_map(Step::Replace),
        1 => (0..4usize, any::<i32>()).prop_map(|(i, n)| Step::Sweep(i, n)),
        3 => (0..4usize).prop_map(Step::Forget),
        1 => any::<i32>().prop_map(Step::Reset),
        1 => Just(Step::Expires),
        1 => any::<i32>().prop_map(Step::Expire),
        2 => Just(Step::BeginFold),
        1 => Just(Step::EndFold),
        1 => Just(Step::ForgetFold),
    ];
    proptest::collection::vec(step, 0..80)
}

fn apply(salt: &Salt, step: Step) -> Option<Salt> {
    match step {
        Step::Announce(k, armed) => salt.announced(k, Kind::Slots, 7, armed),
        Step::Home => salt.announced(1, Kind::Home, 0, true),
        Step::Arm => salt.armed(),
        Step::Switch => salt.switched(),
        Step::Retire(i, n, s) => salt.retired(salt.drain.get(i)?.id, n.into(), s),
        Step::Replace(n) => salt.replaced(n.into()),
        Step::Sweep(i, n) => salt.swept(salt.graves.get(i)?.slots.id, n.into()),
        Step::Forget(i) => salt.forgotten(salt.graves.get(i)?.slots.id),
        Step::Reset(n) => salt.reset(n.into()),
        Step::Expires => Some(Salt { expires: Some(u64::MAX), ..salt.clone() }),
        Step::Expire(n) => salt.expired(n.into()),
        Step::BeginFold => salt.folding(7),
        Step::EndFold => salt.folded(),
        Step::ForgetFold => salt.unfolded(),
    }
}

/// The keys that a reader with this record asks for.
fn read(salt: &Salt) -> BTreeSet<(u32, u16)> {
    salt.read_set().map(place).collect()
}

/// All homes are one key.
fn place(slot: Slot) -> (u32, u16) {
    (if slot.of.kind == Kind::Home { 0 } else { slot.of.id }, slot.index)
}

/// Whether this step is taken only when no process holds an older record than the present one.
fn waits(step: Step) -> bool {
    matches!(step, Step::Switch | Step::Retire(..) | Step::Forget(_))
}

proptest! {
    /// Leases overlap for two records that follow each other, and for more where nothing waits in
    /// between: a reader of either finds what a writer of the other writes. A step that ends the
    /// writing of a generation waits first until everybody has the record before it, or seals it.
    #[test]
    fn a_reader_finds_what_a_writer_of_any_record_in_force_may_write(
        steps in steps(), exclusive: bool,
    ) {
        let mut salt = Salt::new(exclusive);
        // The records that some lease may still be of.
        let mut leased = vec![salt.clone()];
        for step in steps {
            if waits(step) {
                leased = vec![salt.clone()];
            }
            let Some(next) = apply(&salt, step) else { continue };
            salt = next;
            if matches!(step, Step::Replace(_)) {
                // Writers of older records are refused, readers see the seal and look again.
                leased.clear();
            }
            leased.push(salt.clone());
            for reader in &leased {
                for writer in &leased {
                    for pick in [0, u64::MAX / 2, u64::MAX] {
                        let target = writer.write_target(Pick::Random(pick));
                        prop_assert!(read(reader).contains(&place(target)),
                            "{:?} of {writer:?} is not read under {reader:?}", target);
                    }
                }
            }
        }
    }

    /// Every record is within its bounds, reads back, reads each key once, and no id comes twice.
    #[test]
    fn records_stay_small_and_ids_are_never_used_again(steps in steps(), exclusive: bool) {
        let mut salt = Salt::new(exclusive);
        let mut ids = BTreeSet::from([0]);
        for step in steps {
            let before = salt.clone();
            let Some(next) = apply(&salt, step) else { continue };
            salt = next.marked(&before, u32::MAX);
            if let (None, Some(new)) = (before.next, salt.next) {
                prop_assert!(ids.insert(new.id), "id {} again", new.id);
            }
            prop_assert!(salt.drain.len() <= DRAIN_MAX && salt.graves.len() <= GRAVES_MAX);
            let text = salt.encode();
            prop_assert!(text.len() < 600, "{} bytes", text.len());
            prop_assert_eq!(Salt::parse(&text), Some(salt.clone()));
            let all: Vec<_> = salt.read_set().map(place).collect();
            prop_assert_eq!(all.len(), read(&salt).len());
            prop_assert!(exclusive || read(&salt).contains(&(0, 0)));
        }
    }

    /// Whatever is under way, an expiry changes what the record adds and nothing that anybody writes
    /// to or reads.
    #[test]
    fn an_expiry_is_one_change_of_the_record_and_moves_no_slot(steps in steps(), total: i32) {
        let mut salt = Salt::new(false);
        for step in steps {
            salt = apply(&salt, step).unwrap_or(salt);
        }
        salt.expires = None;
        let timed = Salt { expires: Some(50), ..salt.clone() };
        prop_assert!(!timed.is_expired(49) && timed.is_expired(50) && !timed.is_plain());
        let Some(over) = timed.expired(total.into()) else { return Ok(()) };
        prop_assert_eq!(over.expires, None);
        prop_assert_eq!(salt.retired - over.retired, i64::from(total));
        prop_assert!(over.read_set().eq(salt.read_set()));
        prop_assert_eq!(Salt { retired: salt.retired, ..over }, salt);
    }

    #[test]
    fn text_from_anywhere_does_not_panic(text: String) {
        if let Some(salt) = Salt::parse(&text) {
            prop_assert_eq!(salt.encode(), text);
        }
    }
}

#[test]
fn what_is_retired_is_what_leaves_the_read_set() {
    let salt = Salt::new(false).announced(4, Kind::Slots, 0, true).unwrap().switched().unwrap();
    let salt = salt.announced(8, Kind::Slots, 0, true).unwrap().switched().unwrap();
    let before = read(&salt);
    let after = salt.retired(1, 40, true).unwrap();
    let gone: Vec<_> = before.difference(&read(&after)).copied().collect();
    assert_eq!(gone, [(1, 0), (1, 1), (1, 2), (1, 3)]);
    assert_eq!(after.retired, salt.retired + 40);
}

#[test]
fn the_bare_key_is_read_for_ever_unless_it_is_exclusive() {
    let home = |exclusive: bool| {
        let salt = Salt::new(exclusive).announced(4, Kind::Slots, 0, true).unwrap();
        let salt = salt.switched().unwrap();
        let drained = salt.drain.len();
        let salt = if exclusive { salt.retired(0, 9, true).unwrap() } else { salt };
        (drained, read(&salt).contains(&(0, 0)), salt.retired)
    };
    assert_eq!(home(false), (0, true, 0));
    assert_eq!(home(true), (1, false, 9));
}

#[test]
fn a_bare_key_that_others_use_is_never_replaced_without_a_wait() {
    let salt = Salt::new(false).announced(4, Kind::Slots, 0, true).unwrap();
    assert_eq!(salt.replaced(9), None);
    let salt = Salt::new(true).announced(4, Kind::Slots, 0, true).unwrap();
    assert_eq!(salt.replaced(9).unwrap().retired, 9);
}

#[test]
fn the_slot_of_an_event_does_not_change_from_version_to_version() {
    let slots = Gen { id: 1, k: 32, kind: Kind::Slots, seed: 0 };
    let parity = Gen { kind: Kind::Parity, ..slots };
    let of = |g: &Gen| ["like:0", "like:1", "like:2"].map(|id| Pick::Event(id.as_bytes()).of(g));
    assert_eq!(of(&slots), [27, 26, 31]);
    assert_eq!(
        of(&parity),
        ["like:0", "like:1", "like:2"].map(|id| { (fnv1a_32(id.as_bytes()) % 32) as u16 })
    );
}
