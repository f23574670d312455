//! Exhaustive search of the gate: every interleaving of two readers, one writer and the faults.
//!
//! Alphabet: a reader arrives, a load reads the store, a load ends, a load panics, a caller is
//! cancelled, a runtime dies under a load, a write begins, is applied, is acknowledged, its
//! acknowledgement is lost, it lands late, an invalidation, time passes. Each at most
//! [`Budget::of_each`] times and at most [`Budget::faults`] faults together; the search runs until no
//! event is left and prints the depth it reached.
//!
//! Checked in every state: what is cached is exactly what the store holds; no caller gets a value
//! from before a write that was acknowledged before it came; at most two loads run; nobody waits
//! for a load that nobody runs.

use super::flight::{FlightId, WaiterId};
use super::gate::{Arrival, FLIGHTS_PER_KEY, Gate, Landing, Limits, Want, WriteSlot};
use crate::engine::time::Tick;
use crate::error::Outcome;
use crate::key::Key;
use std::collections::HashSet;
use std::hash::Hash;
use std::time::Duration;

const HASH: u64 = 7;
const QUARANTINE: Duration = Duration::from_nanos(10);
const LIMITS: Limits = Limits { records: 4, waiters: 8 };

/// A part that the shell could forget; each must be caught.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mutant {
    None,
    /// Caches whatever a load brings.
    IgnoresTheGate,
    /// Tells the gate of a write only when it is acknowledged.
    BeginsLate,
    /// Tells the gate that the write has ended before it has.
    EndsEarly,
    /// Treats an unknown outcome as not applied.
    NoQuarantine,
    /// Lets callers join a load that an invalidation has voided.
    JoinsVoided,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Load {
    flight: FlightId,
    /// What it read from the store, once it has.
    read: Option<u32>,
    /// The caller that polls it; `None` once it has moved to a spawned task.
    leader: Option<usize>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Reader {
    /// Its place in the gate and the floor it may not fall below, while it waits.
    waiting: Option<(WaiterId, u32)>,
    /// It has been told to lead and has not begun.
    told: Option<FlightId>,
    calls: u8,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Write {
    No,
    Sent(Option<WriteSlot>),
    Applied(Option<WriteSlot>, u32),
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    gate: Gate<usize>,
    now: Tick,
    /// The position of the store's history: one per applied write. Values are positions.
    store: u32,
    /// Position of the latest write that was acknowledged.
    acked: u32,
    cached: Option<u32>,
    loads: Vec<Load>,
    readers: [Reader; 2],
    write: Write,
    /// Writes whose acknowledgement was lost before they were applied.
    lost: u8,
    left: Left,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Left {
    arrivals: u8,
    writes: u8,
    losses: u8,
    invalidations: u8,
    cancels: u8,
    deaths: u8,
    panics: u8,
    times: u8,
    /// Losses, invalidations, cancels, deaths, panics and jumps of time together.
    faults: u8,
}

impl Left {
    fn may(&self, of_this: u8) -> bool {
        of_this > 0 && self.faults > 0
    }

    fn fault(&mut self, which: impl Fn(&mut Left) -> &mut u8) {
        *which(self) -= 1;
        self.faults -= 1;
    }
}

struct Budget {
    /// How often each event may happen.
    of_each: u8,
    /// How many faults there may be together.
    faults: u8,
}

struct Search {
    seen: HashSet<u64>,
    /// Events on the longest path.
    depth: usize,
    violation: Option<String>,
}

fn rank<T: Ord>(values: &mut Vec<T>) {
    values.sort_unstable();
    values.dedup();
}

fn key() -> Key {
    Key::from("k")
}

impl World {
    fn new(budget: &Budget) -> World {
        let n = budget.of_each;
        let reader = Reader { waiting: None, told: None, calls: 0 };
        World {
            gate: Gate::default(),
            now: Tick(100),
            store: 0,
            acked: 0,
            cached: None,
            loads: Vec::new(),
            readers: [reader.clone(), reader],
            write: Write::No,
            lost: 0,
            left: Left {
                arrivals: n,
                writes: n,
                losses: n,
                invalidations: n,
                cancels: n,
                deaths: n,
                panics: n,
                times: n,
                faults: budget.faults,
            },
        }
    }

    /// A hash of what matters of this state: ids and store positions count by their order only.
    fn fingerprint(&self) -> u64 {
        let mut w = self.clone();
        let mut ids = w.gate.ids();
        ids.extend(w.readers.iter().filter_map(|r| r.told));
        ids.extend(w.loads.iter().map(|l| l.flight));
        rank(&mut ids);
        let id = |x: u64| ids.partition_point(|&y| y < x) as u64;
        w.gate.renumber(&id, ids.len() as u64);
        let mut positions = vec![w.store, w.acked];
        positions.extend(w.cached);
        positions.extend(w.loads.iter().filter_map(|l| l.read));
        positions.extend(w.readers.iter().filter_map(|r| r.waiting.map(|(_, floor)| floor)));
        if let Write::Applied(_, p) = w.write {
            positions.push(p);
        }
        rank(&mut positions);
        let position = |x: u32| positions.partition_point(|&y| y < x) as u32;
        for load in &mut w.loads {
            load.flight = id(load.flight);
            load.read = load.read.map(position);
        }
        for reader in &mut w.readers {
            reader.told = reader.told.map(id);
            reader.waiting = reader.waiting.map(|(i, floor)| (id(i), position(floor)));
        }
        if let Write::Applied(_, p) = &mut w.write {
            *p = position(*p);
        }
        (w.store, w.acked) = (position(w.store), position(w.acked));
        w.cached = w.cached.map(position);
        ahash::RandomState::with_seeds(1, 2, 3, 4).hash_one(&w)
    }

    /// The states that one event leads to, with its name.
    fn successors(&self, mutant: Mutant) -> Vec<(String, Result<World, String>)> {
        let mut out = Vec::new();
        let mut push = |name: String, f: &dyn Fn(&mut World) -> Result<(), String>| {
            let mut w = self.clone();
            let result = f(&mut w).and_then(|()| w.check()).map(|()| w);
            out.push((name, result));
        };
        for r in 0..2 {
            let reader = &self.readers[r];
            let idle = reader.waiting.is_none() && reader.told.is_none();
            if idle && reader.calls < self.left.arrivals {
                push(format!("arrive {r}"), &|w| w.arrive(r));
            }
            if reader.told.is_some() {
                push(format!("lead {r}"), &|w| w.begin_told(r));
            }
            if !idle && self.left.may(self.left.cancels) {
                push(format!("cancel {r}"), &|w| w.cancel(r));
            }
        }
        for i in 0..self.loads.len() {
            if self.loads[i].read.is_none() {
                push(format!("read {i}"), &|w| {
                    w.loads[i].read = Some(w.store);
                    Ok(())
                });
            } else {
                push(format!("land {i}"), &|w| w.land(i, false, mutant));
            }
            if self.left.may(self.left.panics) {
                push(format!("panic {i}"), &|w| w.land(i, true, mutant));
            }
            if self.left.may(self.left.deaths) {
                push(format!("death {i}"), &|w| w.die(i));
            }
        }
        self.writer(mutant, &mut push);
        out
    }

    #[expect(
        clippy::too_many_lines,
        clippy::type_complexity,
        reason = "one arm per event of the alphabet"
    )]
    fn writer(
        &self,
        mutant: Mutant,
        push: &mut dyn FnMut(String, &dyn Fn(&mut World) -> Result<(), String>),
    ) {
        match self.write {
            Write::No if self.left.writes > 0 => push("write".into(), &|w| {
                w.left.writes -= 1;
                w.cached = None;
                let slot = (mutant != Mutant::BeginsLate)
                    .then(|| w.gate.begin_write(HASH, &key(), w.now, &LIMITS));
                w.write = Write::Sent(slot);
                if mutant == Mutant::EndsEarly {
                    w.end_write(slot, None, QUARANTINE);
                }
                Ok(())
            }),
            Write::No => {}
            Write::Sent(slot) => {
                push("apply".into(), &|w| {
                    w.store += 1;
                    w.write = Write::Applied(slot, w.store);
                    Ok(())
                });
                if self.left.may(self.left.losses) {
                    push("lose".into(), &|w| {
                        w.left.fault(|l| &mut l.losses);
                        w.lost += 1;
                        w.write = Write::No;
                        w.lose(slot, mutant);
                        Ok(())
                    });
                }
            }
            Write::Applied(slot, position) => {
                push("ack".into(), &|w| {
                    w.write = Write::No;
                    w.acked = position;
                    if mutant != Mutant::EndsEarly {
                        w.end_write(slot, None, QUARANTINE);
                    }
                    w.cached = None;
                    Ok(())
                });
                if self.left.may(self.left.losses) {
                    push("lose ack".into(), &|w| {
                        w.left.fault(|l| &mut l.losses);
                        w.write = Write::No;
                        w.lose(slot, mutant);
                        Ok(())
                    });
                }
            }
        }
        if self.lost > 0 {
            push("land late".into(), &|w| {
                w.lost -= 1;
                w.store += 1;
                Ok(())
            });
        }
        if self.left.may(self.left.invalidations) {
            push("invalidate".into(), &|w| {
                w.left.fault(|l| &mut l.invalidations);
                w.cached = None;
                if mutant != Mutant::JoinsVoided {
                    w.gate.invalidate(HASH, b"k");
                }
                // Somebody else wrote before the caller invalidated: everybody must see it now.
                w.store += 1;
                w.acked = w.store;
                Ok(())
            });
        }
        // A lost write lands within the quarantine or never: time passes only without one.
        if self.left.may(self.left.times) && self.lost == 0 {
            push("time".into(), &|w| {
                w.left.fault(|l| &mut l.times);
                w.now = w.now.after(QUARANTINE);
                w.cached = None;
                w.gate.sweep(w.now);
                Ok(())
            });
        }
    }

    fn lose(&mut self, slot: Option<WriteSlot>, mutant: Mutant) {
        let quarantine = if mutant == Mutant::NoQuarantine { Duration::ZERO } else { QUARANTINE };
        if mutant != Mutant::EndsEarly {
            self.end_write(slot, Some(Outcome::Unknown), quarantine);
        }
        self.cached = None;
    }

    fn end_write(&mut self, slot: Option<WriteSlot>, outcome: Option<Outcome>, q: Duration) {
        let slot = slot.unwrap_or_else(|| self.gate.begin_write(HASH, &key(), self.now, &LIMITS));
        self.gate.end_write((HASH, b"k"), slot, outcome, self.now, q);
    }

    fn arrive(&mut self, r: usize) -> Result<(), String> {
        self.readers[r].calls += 1;
        let floor = self.acked;
        if let Some(value) = self.cached {
            return if value >= floor { Ok(()) } else { Err(format!("hit {value} < {floor}")) };
        }
        let want = Want { not_before: Tick::ZERO };
        match self.gate.arrive((HASH, &key()), (self.now, 0), want, r, &LIMITS) {
            Arrival::Lead(flight, id) => {
                self.readers[r].waiting = Some((id, floor));
                self.loads.push(Load { flight, read: None, leader: Some(r) });
            }
            Arrival::Wait(id) => self.readers[r].waiting = Some((id, floor)),
            Arrival::Bypass => return Err("bypass with room left".into()),
        }
        Ok(())
    }

    fn begin_told(&mut self, r: usize) -> Result<(), String> {
        if let Some(flight) = self.readers[r].told.take() {
            self.loads.push(Load { flight, read: None, leader: Some(r) });
        }
        Ok(())
    }

    fn tell(&mut self, next: Option<(FlightId, usize)>) -> Result<(), String> {
        let Some((flight, r)) = next else { return Ok(()) };
        if self.readers[r].waiting.is_none() || self.readers[r].told.is_some() {
            return Err(format!("reader {r} told to lead out of turn"));
        }
        self.readers[r].told = Some(flight);
        Ok(())
    }

    fn land(&mut self, i: usize, panicked: bool, mutant: Mutant) -> Result<(), String> {
        if panicked {
            self.left.fault(|l| &mut l.panics);
        }
        let load = self.loads.remove(i);
        let landing: Option<Landing<usize>> =
            self.gate.land(HASH, b"k", load.flight, (self.now, 0));
        let Some(landing) = landing else { return Err("a flight vanished".into()) };
        let value = load.read.unwrap_or_default();
        if !panicked && (landing.publish || mutant == Mutant::IgnoresTheGate) {
            self.cached = Some(value);
        }
        for r in landing.waiters {
            let Some((_, floor)) = self.readers[r].waiting.take() else {
                return Err(format!("reader {r} answered twice"));
            };
            if !panicked && value < floor {
                return Err(format!("reader {r} got {value}, floor {floor}"));
            }
        }
        self.tell(landing.next)
    }

    /// The caller's future is dropped. A leader's load moves to a task; one that was told and has
    /// not begun hands on.
    fn cancel(&mut self, r: usize) -> Result<(), String> {
        self.left.fault(|l| &mut l.cancels);
        let told = self.readers[r].told.take();
        if let Some((id, _)) = self.readers[r].waiting.take() {
            self.gate.leave(HASH, b"k", id, self.now);
        }
        for load in &mut self.loads {
            if load.leader == Some(r) {
                load.leader = None;
            }
        }
        match told {
            Some(flight) => {
                let next = self.gate.abandon(HASH, b"k", flight, (self.now, 0));
                self.tell(next)
            }
            None => Ok(()),
        }
    }

    /// The runtime under a load dies: its caller, if there is one, goes with it.
    fn die(&mut self, i: usize) -> Result<(), String> {
        self.left.fault(|l| &mut l.deaths);
        let load = self.loads.remove(i);
        if let Some(r) = load.leader
            && let Some((id, _)) = self.readers[r].waiting.take()
        {
            self.gate.leave(HASH, b"k", id, self.now);
        }
        let next = self.gate.abandon(HASH, b"k", load.flight, (self.now, 0));
        self.tell(next)
    }

    fn check(&self) -> Result<(), String> {
        if let Some(value) = self.cached
            && value != self.store
        {
            return Err(format!("cached {value}, the store holds {}", self.store));
        }
        let in_flight: usize = self.gate.loading().map(|(_, n)| n).sum();
        if in_flight > FLIGHTS_PER_KEY {
            return Err(format!("{in_flight} loads of one key"));
        }
        let told = self.readers.iter().filter(|r| r.told.is_some()).count();
        if in_flight != self.loads.len() + told {
            return Err("a flight without a load, or two leaders of one".into());
        }
        let waiting = self.readers.iter().any(|r| r.waiting.is_some());
        if waiting && self.loads.is_empty() && told == 0 {
            return Err("somebody waits for a load that nobody runs".into());
        }
        Ok(())
    }
}

impl Search {
    fn run(budget: &Budget, mutant: Mutant) -> Search {
        let mut search = Search { seen: HashSet::new(), depth: 0, violation: None };
        // Depth first: one frame per event on the path to the state at hand.
        let mut path: Vec<String> = Vec::new();
        let mut frames = vec![World::new(budget).successors(mutant)];
        while let Some(frame) = frames.last_mut() {
            let Some((name, next)) = frame.pop() else {
                frames.pop();
                path.pop();
                continue;
            };
            match next {
                Err(why) => {
                    search.violation = Some(format!("{why} after {path:?}, {name}"));
                    return search;
                }
                Ok(next) => {
                    if search.seen.insert(next.fingerprint()) {
                        path.push(name);
                        search.depth = search.depth.max(path.len());
                        frames.push(next.successors(mutant));
                    }
                }
            }
        }
        search
    }
}

#[test]
fn every_interleaving_of_two_readers_and_a_writer_keeps_the_contract() {
    let budget = Budget { of_each: 2, faults: if cfg!(debug_assertions) { 1 } else { 3 } };
    let search = Search::run(&budget, Mutant::None);
    println!("{} states, depth {}", search.seen.len(), search.depth);
    assert_eq!(search.violation, None);
    assert!(search.seen.len() > 10_000, "{} states", search.seen.len());
}

#[test]
fn a_shell_that_forgets_a_part_of_the_protocol_is_caught() {
    for mutant in [
        Mutant::IgnoresTheGate,
        Mutant::BeginsLate,
        Mutant::EndsEarly,
        Mutant::NoQuarantine,
        Mutant::JoinsVoided,
    ] {
        let search = Search::run(&Budget { of_each: 1, faults: 6 }, mutant);
        assert!(search.violation.is_some(), "{mutant:?} was not caught");
    }
}
