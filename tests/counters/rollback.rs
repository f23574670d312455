//! What a registry that fails over and has lost its last change may not do to a salted counter.

use super::MS;
use bytes::Bytes;
use heatsink::runtime::BoxFuture;
use heatsink::store::{Capability, MemoryStore, Store};
use heatsink::testing::SimRuntime;
use heatsink::{Error, ErrorKind, Heatsink, Key, Registry, Result, Salt, Treatment};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const ROOT: &str = "{hs:registry}root";
const LIST: &str = "{hs:registry}list";

/// The registry in the store, without one of its values while that is cut off.
struct Partial {
    store: MemoryStore,
    without: Key,
    cut: Arc<AtomicBool>,
}

impl Registry for Partial {
    fn read(&self, name: &Key) -> BoxFuture<'static, Result<Option<Bytes>>> {
        let (store, name) = (self.store.clone(), name.clone());
        let cut = self.cut.load(Ordering::Relaxed) && name == self.without;
        Box::pin(async move {
            if cut {
                return Err(Error::not_applied(ErrorKind::Store, "this cannot be read"));
            }
            Ok(store.get(&name).await?.map(|stored| stored.bytes))
        })
    }

    fn replace(
        &self,
        name: &Key,
        expected: Option<Bytes>,
        value: Bytes,
    ) -> BoxFuture<'static, Result<bool>> {
        let (store, name) = (self.store.clone(), name.clone());
        Box::pin(async move { store.compare_and_set(&name, expected, value, None).await })
    }
}

/// Two processes on a store that cannot seal. While both are cut off, the first cannot read the
/// root, and the second not the record.
struct Pair {
    rt: SimRuntime,
    store: MemoryStore,
    cut: Arc<AtomicBool>,
    hs: [Heatsink; 2],
}

impl Pair {
    fn new(seed: u64) -> Pair {
        let rt = SimRuntime::new(seed);
        let mut can = Capability::all();
        can.seal = false;
        let store = MemoryStore::builder().latency(MS).capability(can).runtime(rt.clone()).build();
        let cut = Arc::new(AtomicBool::new(false));
        let build = |of: u64, without: Key| {
            let registry = Partial { store: store.clone(), without, cut: cut.clone() };
            let salt = Salt::new().lease(400 * MS).timeout(100 * MS).in_flight(300 * MS);
            let salt = salt.grave(Duration::from_secs(3)).registry(registry).pins_only();
            let builder = Heatsink::builder(store.clone()).salt(salt).runtime(rt.clone());
            builder.seed(2 * seed + of).build().unwrap()
        };
        let record = heatsink::record_name(&Key::from("likes"));
        let hs = [build(0, Key::from(ROOT)), build(1, record)];
        Pair { rt, store, cut, hs }
    }

    fn bytes(&self, name: &str) -> Option<Bytes> {
        self.store.get_now(name).map(|stored| stored.bytes)
    }

    /// Runs until `done`, with one add by the second process every 5 ms.
    fn adding_until(&self, given: &mut i64, mut done: impl FnMut(&Pair) -> bool) {
        for _ in 0..4000 {
            if done(self) {
                return;
            }
            self.rt.block_on(self.hs[1].counter("likes").add(1)).unwrap();
            *given += 1;
            self.rt.run_for(5 * MS);
        }
        panic!("{}", self.hs[0].explain("likes"));
    }

    fn is_at(&self, slots: u16) -> bool {
        let salting = self.hs[0].explain("likes").salting;
        salting.is_some_and(|s| (s.slots, s.in_rotation) == (slots, 0))
    }
}

/// Whether the second process had not heard of the switch when the registry lost it.
fn the_list_loses_a_switch(seed: u64) -> bool {
    let pair = Pair::new(seed);
    let mut given = 0;
    pair.hs[0].control().pin("likes", Treatment::Salt { slots: 4 }).unwrap();
    pair.adding_until(&mut given, |pair| pair.is_at(4));
    pair.hs[0].control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    let at = |hs: &Heatsink| hs.explain("likes").salting.unwrap().slots;
    let (mut list, mut root) = (None, None);
    pair.adding_until(&mut given, |pair| {
        let switched = at(&pair.hs[0]) == 8;
        if !switched {
            (list, root) = (pair.bytes(LIST), pair.bytes(ROOT));
        }
        switched
    });
    // The switch is published. Then the registry fails over, and the list has lost it; and the
    // process that waits to retire the old slots cannot renew its lease, where it would see that.
    for _ in 0..1000 {
        if pair.bytes(ROOT) != root {
            break;
        }
        pair.rt.run_for(Duration::from_micros(500));
    }
    pair.rt.run_for(3 * MS);
    assert!(pair.bytes(ROOT) != root && pair.bytes(LIST) != list, "the switch is published");
    let unheard = at(&pair.hs[1]) == 4;
    pair.store.put_now(LIST, list.unwrap()).unwrap();
    pair.cut.store(true, Ordering::Relaxed);
    // Without seals nothing refuses the adds of the other process, which go to the old slots.
    let until = pair.rt.now().after(Duration::from_secs(2));
    pair.adding_until(&mut given, |pair| pair.rt.now() >= until);
    pair.cut.store(false, Ordering::Relaxed);
    for _ in 0..200 {
        pair.rt.run_for(10 * MS);
        for hs in &pair.hs {
            let sum = pair.rt.block_on(hs.counter("likes").sum_with(Duration::ZERO)).unwrap();
            assert_eq!(sum.total(), given, "seed {seed}: every acknowledged add, at every moment");
        }
    }
    pair.adding_until(&mut given, |pair| pair.is_at(8));
    assert_eq!(pair.hs[0].salt_stats().late + pair.hs[1].salt_stats().late, 0, "seed {seed}");
    unheard
}

#[test]
fn a_generation_is_retired_only_if_everybody_still_knows_that_it_is_to_be() {
    let unheard = (11..16).filter(|seed| the_list_loses_a_switch(*seed)).count();
    assert!(unheard > 0, "in none of the runs there was something to lose");
}

#[test]
fn adds_that_met_slots_whose_seal_a_failover_lost_are_found_before_the_slots_go() {
    let rt = SimRuntime::new(12);
    let store = MemoryStore::builder().latency(MS).runtime(rt.clone()).build();
    let build = |seed: u64| {
        let salt = Salt::new().exclusive().grave(Duration::from_secs(5)).pins_only();
        let builder = Heatsink::builder(store.clone()).salt(salt).runtime(rt.clone());
        builder.seed(seed).build().unwrap()
    };
    let (hs, other) = (build(1), build(2));
    let sum =
        |hs: &Heatsink| rt.block_on(hs.counter("likes").sum_with(Duration::ZERO)).unwrap().total();
    hs.control().pin("likes", Treatment::Salt { slots: 4 }).unwrap();
    rt.run_for(Duration::from_secs(5));
    for _ in 0..40 {
        rt.block_on(other.counter("likes").add(1)).unwrap();
    }
    assert_eq!((sum(&hs), sum(&other)), (40, 40));
    // At once: the four slots are sealed, and the other process is not told yet.
    hs.control().pin("likes", Treatment::Salt { slots: 8 }).unwrap();
    while hs.explain("likes").salting.unwrap().slots != 8 {
        rt.run_for(MS);
    }
    let sealed =
        store.snapshot().into_iter().filter(|(name, _)| name.to_string().contains("slot."));
    for (name, digits) in sealed.filter(|(name, _)| store.get_now(name.clone()).unwrap().sealed) {
        store.put_now(name, digits).unwrap();
    }
    for _ in 0..10 {
        rt.block_on(other.counter("likes").add(1)).unwrap();
    }
    rt.run_for(Duration::from_secs(20));
    assert_eq!((sum(&hs), sum(&other)), (50, 50));
    assert!(hs.salt_stats().late + other.salt_stats().late > 0, "some met no seal");
}
