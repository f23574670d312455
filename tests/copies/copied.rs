//! The protocol carried out on a store.

use heatsink::copies::{Copied, Form, Reach};
use heatsink::store::memory::{Fault, On, Op};
use heatsink::store::{Capability, MemoryStore, Store};
use heatsink::testing::SimRuntime;
use std::sync::Arc;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const N: u16 = 4;

fn world() -> (SimRuntime, MemoryStore) {
    let rt = SimRuntime::new(3);
    let store = MemoryStore::builder().shards(8).runtime(rt.clone());
    let store = store.latency(Duration::from_millis(1)).max_in_flight_time(2 * SECOND).build();
    (rt, store)
}

fn copied(rt: &SimRuntime, store: &MemoryStore, form: Form) -> Copied {
    Copied::with(store.clone(), "page", 1, N, form, Arc::new(rt.clone())).unwrap()
}

fn operations(store: &MemoryStore) -> u64 {
    store.counts().iter().map(|c| c.offered).sum()
}

#[test]
fn reads_are_spread_and_every_process_sees_a_put_at_once() {
    let (rt, store) = world();
    let ours = copied(&rt, &store, Form::Sandwich);
    let theirs = copied(&rt, &store, Form::Sandwich);
    for n in 0..20 {
        assert_eq!(rt.block_on(ours.put(n.to_string())).unwrap(), Reach::All);
        for reader in [&ours, &theirs] {
            for _ in 0..10 {
                assert_eq!(rt.block_on(reader.get()).unwrap().unwrap(), n.to_string());
            }
        }
    }
    let reads: Vec<u64> = ours.names().iter().map(|name| store.reads_of(name.clone())).collect();
    assert!(reads.iter().all(|n| (50..150).contains(n)), "{reads:?}");
    // Once each process had joined, the base was read by writers only.
    assert!(store.reads_of("page") <= 20 + 2);
    assert_eq!(rt.block_on(ours.delete()).unwrap(), Reach::All);
    assert_eq!(rt.block_on(theirs.get()).unwrap(), None);
    for name in ours.names() {
        assert!(store.get_now(name.clone()).is_some(), "a tombstone");
    }
}

#[test]
fn a_put_costs_what_the_table_says_and_one_without_copies_nothing_more() {
    let (rt, store) = world();
    let page = copied(&rt, &store, Form::Sandwich);
    let before = operations(&store);
    rt.block_on(page.put("x")).unwrap();
    assert_eq!(operations(&store) - before, 1 + u64::from(N) + 3);
    let plain = copied(&rt, &store, Form::TtlOnly);
    let before = operations(&store);
    rt.block_on(plain.put("x")).unwrap();
    assert_eq!(operations(&store) - before, 1);
    let hs = heatsink::Heatsink::builder(store.clone()).runtime(rt.clone()).build().unwrap();
    let before = operations(&store);
    rt.block_on(hs.put("no copies", "x")).unwrap();
    assert_eq!(operations(&store) - before, 1);
}

#[test]
fn copies_expire_no_later_than_the_value_and_are_filled_again() {
    let (rt, store) = world();
    let page = copied(&rt, &store, Form::Sandwich);
    rt.block_on(page.put_with("x", Some(SECOND))).unwrap();
    for name in page.names() {
        assert!(store.get_now(name.clone()).unwrap().ttl_left.unwrap() <= SECOND);
    }
    rt.run_for(2 * SECOND);
    assert_eq!(rt.block_on(page.get()).unwrap(), None);
    rt.block_on(page.put("y")).unwrap();
    rt.run_for(60 * SECOND);
    assert!(page.names().iter().all(|n| store.get_now(n.clone()).is_none()), "expired");
    for _ in 0..40 {
        assert_eq!(rt.block_on(page.get()).unwrap().unwrap(), "y");
        rt.run_for(SECOND / 100);
    }
    assert!(page.names().iter().all(|n| store.get_now(n.clone()).is_some()), "filled");
}

#[test]
fn a_write_behind_heatsinks_back_is_found_by_the_first_refill_and_never_goes_back() {
    let (rt, store) = world();
    let page = copied(&rt, &store, Form::Sandwich);
    rt.block_on(page.put("old")).unwrap();
    rt.block_on(store.put(&"page".into(), "new".into(), None)).unwrap();
    assert_eq!(rt.block_on(page.repair()), Reach::All);
    for _ in 0..20 {
        assert_eq!(rt.block_on(page.get()).unwrap().unwrap(), "new");
    }
}

#[test]
fn a_put_of_unknown_outcome_that_lands_late_is_settled() {
    let (rt, store) = world();
    let page = copied(&rt, &store, Form::Sandwich);
    rt.block_on(page.put("first")).unwrap();
    store.faults().next(On::Only(Op::Put), Fault::UnknownLater(SECOND));
    let answer = rt.block_on(page.put("late"));
    assert!(answer.unwrap_err().is_unknown());
    assert_eq!(rt.block_on(page.get()).unwrap().unwrap(), "first");
    rt.run_for(5 * SECOND);
    for _ in 0..20 {
        assert_eq!(rt.block_on(page.get()).unwrap().unwrap(), "late");
    }
}

#[test]
fn a_copy_that_cannot_be_written_is_told_and_read_past() {
    let (rt, store) = world();
    let page = copied(&rt, &store, Form::Sandwich);
    rt.block_on(page.put("old")).unwrap();
    let base = store.place(b"page");
    let down = page.names().iter().map(|n| store.place(n)).find(|s| *s != base).unwrap();
    store.set_down(down, true);
    assert_eq!(rt.block_on(page.put("new")).unwrap(), Reach::Ttl);
    for _ in 0..40 {
        assert_eq!(rt.block_on(page.get()).unwrap().unwrap(), "new", "a process's own put");
    }
    store.set_down(down, false);
    assert_eq!(rt.block_on(page.repair()), Reach::All);
    let other = copied(&rt, &store, Form::Sandwich);
    for _ in 0..20 {
        assert_eq!(rt.block_on(other.get()).unwrap().unwrap(), "new");
    }
}

#[test]
fn a_store_without_put_if_newer_gets_a_reduced_form_and_one_it_cannot_carry_is_refused() {
    let rt = SimRuntime::new(1);
    let mut can = Capability::all();
    can.put_if_newer = false;
    let store = MemoryStore::builder().runtime(rt.clone()).max_in_flight_time(2 * SECOND);
    let store = store.capability(can).build();
    let with = |form| Copied::with(store.clone(), "page", 1, N, form, Arc::new(rt.clone()));
    assert!(with(Form::Sandwich).is_err() && with(Form::Pair).is_err());
    assert!(Copied::new(store.clone(), "page", 1, 0).is_err());
    let twice = with(Form::DeleteTwice).unwrap();
    let reader = with(Form::DeleteTwice).unwrap();
    for n in 0..5 {
        assert_eq!(rt.block_on(twice.put(n.to_string())).unwrap(), Reach::Ttl, "not yet");
        assert_eq!(rt.block_on(twice.get()).unwrap().unwrap(), n.to_string());
        rt.run_for(4 * SECOND);
        for _ in 0..10 {
            assert_eq!(rt.block_on(reader.get()).unwrap().unwrap(), n.to_string());
            rt.run_for(SECOND / 100);
        }
    }
}
