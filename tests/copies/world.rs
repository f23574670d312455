//! The world of the simulation: processes with readers, writers and fills over one key, the life
//! of its set, and everything that goes wrong. One seed is one order of events.
//!
//! The protocol is the engine's own; the world carries out its steps. A call is sent, applied
//! and answered at three points in time; a call that was given up is applied within `IN_FLIGHT`
//! of its sending, or never.

use crate::store::{Got, MS, Op, Record, Store, at, bytes};
use bytes::Bytes;
use heatsink::engine::control::copies::life;
use heatsink::engine::control::copies::read::{self, Copy, Floor, Get};
use heatsink::engine::control::copies::snapshot::{Look, Seen};
use heatsink::engine::control::copies::write::{self, Known, Write};
use heatsink::engine::control::copies::{Answer, Form, Mutant, Plan, Reach, Set};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::time::Duration;

const PROCESSES: usize = 2;
/// How long an operation waits for its answer.
const OP: u64 = 12;
const IN_FLIGHT: u64 = 20;
const FILL: u64 = 15;
const LEASE: u64 = 60;

/// What may happen in one world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    pub(crate) form: Form,
    pub(crate) mutant: Option<Mutant>,
    pub(crate) steps: u32,
    /// The set is made, grown, narrowed and closed; otherwise it is open all the time.
    pub(crate) life: bool,
    pub(crate) copies: u16,
    pub(crate) writers: usize,
    pub(crate) readers: usize,
    pub(crate) deletes: bool,
    pub(crate) unknown: bool,
    pub(crate) crashes: bool,
    pub(crate) give_up: bool,
    pub(crate) foreign: bool,
    pub(crate) failover: bool,
    pub(crate) copy_failover: bool,
    pub(crate) rollback: bool,
    pub(crate) unreachable: bool,
    /// Time passes in jumps, so that leases lapse and copies expire.
    pub(crate) jumps: bool,
    /// Copies outlive everything.
    pub(crate) long_ttl: bool,
    /// Copy reads and puts of the base take their time.
    pub(crate) slow: bool,
    /// The set changes often.
    pub(crate) restless: bool,
    /// There are few reads.
    pub(crate) quiet: bool,
    /// There are few writes.
    pub(crate) still: bool,
}

impl Profile {
    pub(crate) fn new(form: Form) -> Profile {
        Profile {
            form,
            mutant: None,
            steps: 400,
            life: false,
            copies: 2,
            writers: 2,
            readers: 2,
            deletes: true,
            unknown: false,
            crashes: false,
            give_up: false,
            foreign: false,
            failover: false,
            copy_failover: false,
            rollback: false,
            unreachable: false,
            jumps: true,
            long_ttl: false,
            slow: false,
            restless: false,
            quiet: false,
            still: false,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Writer(u64),
    Reader(u64),
    Fill(usize, u64, u16),
    Loader(usize),
    /// Given up by whoever sent it.
    Nobody,
}

#[derive(Debug)]
struct Call {
    owner: Owner,
    op: Op,
    sent: u64,
    got: Option<Got>,
    answered: bool,
}

struct Writer {
    id: u64,
    process: usize,
    write: Write,
    value: Option<u64>,
    /// The number of its base operation, once applied.
    own: Option<u64>,
    returned: bool,
    waits_for_lease: bool,
    wake: u64,
    life: u64,
    /// A repair: by the coordinator, before it opens the set.
    warms: bool,
    repair: bool,
}

struct Reader {
    id: u64,
    process: usize,
    get: Get,
    low: u64,
    floor: u64,
    joined: bool,
    /// What the base held when the read began.
    base: u64,
    started: u64,
    life: u64,
    copy_life: u64,
}

struct Process {
    floor: Floor,
    lease: Option<Record>,
    until: u64,
    last: Option<Set>,
    loading: bool,
    load_sent: u64,
    newest: u64,
    filling: Vec<(u64, u16)>,
    helping: bool,
}

/// What has happened, to see that a run means something.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Counts {
    pub(crate) reads: u64,
    pub(crate) from_copies: u64,
    pub(crate) all: u64,
    pub(crate) ttl: u64,
    pub(crate) unknown: u64,
    pub(crate) fills: u64,
    pub(crate) repairs: u64,
    pub(crate) lives: u64,
    pub(crate) failovers: u64,
    pub(crate) trace: u64,
}

pub(crate) struct World {
    profile: Profile,
    plan: Plan,
    rng: Xoshiro256PlusPlus,
    now: u64,
    store: Store,
    calls: Vec<Call>,
    writers: Vec<Writer>,
    readers: Vec<Reader>,
    processes: Vec<Process>,
    ids: u64,
    values: u64,
    /// The newest operation that was said to have reached all.
    done: u64,
    want: u16,
    record_since: u64,
    seen_version: u64,
    warmed: bool,
    warming: bool,
    /// Something that convergence without a helper is not promised after.
    dirty: bool,
    /// Something that convergence is not promised after at all.
    void: bool,
    ends: bool,
    /// Prints what happens: `HEATSINK_TRACE=1`.
    told: bool,
    pub(crate) counts: Counts,
    wrong: Option<String>,
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

impl World {
    pub(crate) fn new(seed: u64, profile: Profile) -> World {
        let mut plan = Plan::new(profile.form, ms(FILL), ms(IN_FLIGHT));
        (plan.mutant, plan.rounds_max) = (profile.mutant, 100_000);
        if profile.long_ttl {
            plan.ttl = ms(600);
        }
        let ttl = plan.ttl.as_millis() as u64;
        let process = || Process {
            floor: Floor::new(),
            lease: None,
            until: 0,
            last: None,
            loading: false,
            load_sent: 0,
            newest: 0,
            filling: Vec::new(),
            helping: false,
        };
        let mut world = World {
            profile,
            plan,
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            now: 1,
            store: Store::new(ttl),
            calls: Vec::new(),
            writers: Vec::new(),
            readers: Vec::new(),
            processes: (0..PROCESSES).map(|_| process()).collect(),
            ids: 0,
            values: 0,
            done: 0,
            want: 0,
            record_since: 0,
            seen_version: 0,
            warmed: false,
            warming: false,
            dirty: false,
            void: false,
            ends: false,
            told: std::env::var("HEATSINK_TRACE").is_ok(),
            counts: Counts::default(),
            wrong: None,
        };
        if !profile.life {
            let n = profile.copies;
            world.store.open(Set { generation: 1, writers: n, readers: n });
        }
        world
    }

    fn draw(&mut self, bound: u64) -> u64 {
        ((u128::from(self.rng.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    fn broken(&self, by: Mutant) -> bool {
        self.profile.mutant == Some(by)
    }

    fn tick(&self) -> heatsink::engine::time::Tick {
        at(self.now)
    }

    fn fail(&mut self, check: char, text: String) {
        let now = self.now;
        self.wrong.get_or_insert_with(|| format!("({check}) at {now} ms: {text}"));
    }

    /// The set of a lease that is valid now; notes when it has lapsed.
    fn lease(&mut self, p: usize) -> Option<Record> {
        let process = &mut self.processes[p];
        if process.lease.is_some() && self.now >= process.until {
            process.lease = None;
            process.floor.lapse();
        }
        process.lease
    }

    fn set(&mut self, p: usize) -> Option<Set> {
        self.lease(p).and_then(|record| record.set)
    }

    fn send(&mut self, owner: Owner, op: Op) {
        let sent = self.now;
        self.calls.push(Call { owner, op, sent, got: None, answered: false });
    }

    fn load(&mut self, p: usize) {
        if !self.processes[p].loading {
            (self.processes[p].loading, self.processes[p].load_sent) = (true, self.now);
            self.send(Owner::Loader(p), Op::Load);
        }
    }

    // ------------------------------------------------------------ starting

    fn start_writer(&mut self, p: usize) {
        let delete = self.profile.deletes && self.draw(3) == 0;
        self.values += 1;
        let value = (!delete).then_some(self.values);
        let under = self.set(p);
        let life = self.lease(p).map_or(0, |r| r.life);
        if under.is_none() && self.broken(Mutant::LeaseBeforeAck) && self.lease(p).is_none() {
            return self.load(p);
        }
        let write = Write::new(value.map(bytes), under);
        self.push_writer(p, write, value, life, (false, false));
    }

    fn push_writer(
        &mut self,
        process: usize,
        write: Write,
        value: Option<u64>,
        life: u64,
        (repair, warms): (bool, bool),
    ) {
        self.ids += 1;
        let id = self.ids;
        self.writers.push(Writer {
            id,
            process,
            write,
            value,
            own: None,
            returned: repair,
            waits_for_lease: false,
            wake: 0,
            life,
            warms,
            repair,
        });
        self.drive_writer(id);
    }

    fn start_reader(&mut self, p: usize) {
        let (set, dice) = (self.set(p), self.rng.next_u64());
        let life = self.lease(p).map_or(0, |r| r.life);
        let get = Get::new(&self.processes[p].floor, set, self.tick(), dice);
        self.ids += 1;
        let id = self.ids;
        // A copy whose shard has lost its last write may hide a write until its lifetime is over.
        let low = if self.profile.copy_failover { 0 } else { self.done };
        let floor = self.processes[p].newest;
        let (started, joined) = (self.now, self.processes[p].floor.joined());
        self.readers.push(Reader {
            id,
            joined,
            base: self.store.seq(),
            process: p,
            get,
            low,
            floor,
            started,
            life,
            copy_life: 0,
        });
        self.drive_reader(id);
    }

    // ------------------------------------------------------------ driving

    fn drive_writer(&mut self, id: u64) {
        loop {
            let Some(k) = self.writers.iter().position(|w| w.id == id) else { return };
            let now = self.tick();
            let plan = self.plan;
            let step = self.writers[k].write.poll(&plan, now);
            let p = self.writers[k].process;
            let op = match step {
                write::Step::Base => Op::Base { value: self.writers[k].value, pair: None },
                write::Step::BaseAndBump(generation) => {
                    Op::Base { value: self.writers[k].value, pair: Some(generation) }
                }
                write::Step::Bump(generation, by) => Op::Bump { generation, by },
                write::Step::Look(generation, look) => look_op(generation, look),
                write::Step::Lease => {
                    if self.profile.unreachable && self.draw(8) == 0 {
                        let last = self.processes[p].last;
                        self.writers[k].write.handle_lease(&plan, now, Known::Unreachable(last));
                        self.dirty = true;
                        self.void |= last != self.store.record.set;
                        continue;
                    }
                    let Some(record) = self.lease(p) else {
                        self.writers[k].waits_for_lease = true;
                        return self.load(p);
                    };
                    self.writers[k].life = record.life;
                    self.writers[k].write.handle_lease(&plan, now, Known::Leased(record.set));
                    continue;
                }
                write::Step::Spread(generation) => {
                    let w = &self.writers[k];
                    let Some(image) = w.write.image().cloned() else { return };
                    let life = w.life;
                    let todo: Vec<u16> = w.write.todo().collect();
                    for i in todo {
                        if !self.under_way(id, i) {
                            let image = image.clone();
                            self.send(
                                Owner::Writer(id),
                                Op::PutCopy { generation, i, image, life },
                            );
                        }
                    }
                    return;
                }
                write::Step::Erase(generation) => {
                    let todo: Vec<u16> = self.writers[k].write.todo().collect();
                    for i in todo {
                        if !self.under_way(id, i) {
                            self.send(Owner::Writer(id), Op::EraseCopy { generation, i });
                        }
                    }
                    return;
                }
                write::Step::WaitUntil(until) => {
                    self.writers[k].wake = until.0.div_ceil(MS);
                    return self.answer_writer(k);
                }
                write::Step::Done => {
                    self.answer_writer(k);
                    return self.end_writer(k);
                }
            };
            return self.send(Owner::Writer(id), op);
        }
    }

    /// Whether a write of copy `i` by this writer is under way.
    fn under_way(&self, id: u64, copy: u16) -> bool {
        self.calls.iter().any(|c| {
            c.owner == Owner::Writer(id)
                && matches!(c.op, Op::PutCopy { i, .. } | Op::EraseCopy { i, .. } if i == copy)
        })
    }

    /// The caller hears how far its write has come.
    fn answer_writer(&mut self, k: usize) {
        if self.writers[k].returned {
            return;
        }
        self.writers[k].returned = true;
        let w = &self.writers[k];
        let (p, own) = (w.process, w.own);
        match w.write.outcome() {
            Answer::Unknown => self.counts.unknown += 1,
            Answer::NotApplied => {}
            Answer::Applied(reach) => {
                let label = w.write.label();
                let process = &mut self.processes[p];
                if !self.plan.form.versioned() {
                    process.floor.forget();
                } else if let Some((generation, label)) = label {
                    process.floor.raise(generation, label);
                }
                let visible = reach == Reach::All || label.is_some();
                let visible = visible || !self.plan.form.versioned();
                if let Some(own) = own.filter(|own| visible && !self.store.is_lost(*own)) {
                    self.processes[p].newest = self.processes[p].newest.max(own);
                }
                self.counts.ttl += u64::from(reach == Reach::Ttl);
            }
        }
    }

    fn end_writer(&mut self, k: usize) {
        let w = self.writers.swap_remove(k);
        self.abandon(Owner::Writer(w.id));
        let all = w.write.outcome() == Answer::Applied(Reach::All);
        if w.repair {
            self.processes[w.process].helping &= w.warms;
            if w.warms {
                self.warming = false;
                self.warmed = all;
            }
            return;
        }
        if all && let Some(own) = w.own.filter(|own| !self.store.is_lost(*own)) {
            self.counts.all += 1;
            self.done = self.done.max(own);
        }
        self.dirty |= w.write.outcome() == Answer::Applied(Reach::Ttl);
    }

    fn drive_reader(&mut self, id: u64) {
        let Some(k) = self.readers.iter().position(|r| r.id == id) else { return };
        let now = self.tick();
        let plan = self.plan;
        let op = match self.readers[k].get.poll(&plan, now) {
            read::Step::Copy(generation, i) => Op::GetCopy { generation, i },
            read::Step::Look(generation, look) => look_op(generation, look),
            read::Step::Plain => Op::GetBase,
            read::Step::Failed => {
                self.readers.swap_remove(k);
                return;
            }
            read::Step::Done(value) => return self.end_reader(k, value),
        };
        self.send(Owner::Reader(id), op);
    }

    fn end_reader(&mut self, k: usize, value: Option<Bytes>) {
        let r = self.readers.swap_remove(k);
        self.check(&r, value.as_ref());
        let plan = self.plan;
        let p = r.process;
        if let Some(set) = r.get.wants_help(&plan)
            && !self.processes[p].helping
        {
            self.processes[p].helping = true;
            self.counts.repairs += 1;
            self.push_writer(p, Write::repair(set), None, r.life, (true, false));
        }
        if let Some((generation, i, image)) = r.get.fill(&plan)
            && !self.processes[p].filling.contains(&(generation, i))
            && image.young(&plan, self.tick())
        {
            let mut image = image.clone();
            if self.broken(Mutant::FromCopy)
                && let Some(Got::Copy(Copy::Image(other), _)) =
                    self.store.apply(&plan, &Op::GetCopy { generation, i: i ^ 1 }, self.now, false)
            {
                image = other;
            }
            self.counts.fills += 1;
            let filled = image.bytes.as_ref().map(number);
            if self.store.seq_of(filled).is_some_and(|seq| seq < r.base && !self.store.is_lost(seq))
            {
                self.fail('f', format!("a fill writes {filled:?}, which was old when it began"));
            }
            self.processes[p].filling.push((generation, i));
            let life = r.life;
            self.send(Owner::Fill(p, generation, i), Op::PutCopy { generation, i, image, life });
        }
    }

    /// The checks (a), (c), (d), (e), (f) on one read.
    fn check(&mut self, r: &Reader, value: Option<&Bytes>) {
        self.counts.reads += 1;
        if self.told {
            println!(
                "{} READ {} p{} {value:?} floor {:?}",
                self.now, r.id, r.process, self.processes[r.process].floor
            );
        }
        let got = self.store.seq_of(value.map(number)).expect("the base never held it");
        self.counts.trace = (self.counts.trace ^ got).wrapping_mul(0x100_0000_01b3);
        let p = r.process;
        let strong = !self.profile.life && r.joined;
        let floor = if strong { self.processes[p].newest } else { r.floor };
        let lost = self.store.is_lost(got);
        let next = self.store.history.get(got as usize + 1).map_or(u64::MAX, |(at, _)| *at);
        let stale = r.started.saturating_sub(next);
        let bound = FILL + IN_FLIGHT + self.plan.ttl.as_millis() as u64;
        let low = r.low.min(self.done);
        let lost_and_replaced = lost && self.store.lost.is_some_and(|(_, until)| low >= until);
        if got < low && !lost || lost_and_replaced {
            let check = if self.store.history[low as usize].1.is_none() { 'd' } else { 'c' };
            let since = r.started;
            self.fail(
                check,
                format!("process {p}, read since {since}: {got} after {low} was done"),
            );
        } else if got < floor && !lost && (strong || r.floor <= self.processes[p].newest) {
            self.fail('a', format!("process {p} read {got} after it had read {floor}"));
        } else if r.copy_life != 0 && r.life != 0 && r.copy_life != r.life {
            self.fail('e', format!("{got} of life {} in life {}", r.copy_life, r.life));
        } else if !lost && self.store.lost.is_none() && stale > bound {
            self.fail('f', format!("{got}, stale for {stale} ms"));
        }
        if !lost {
            // The next reader is held against the oldest delete that it can have been.
            let newest = self.processes[p].newest;
            let history = self.store.history.iter().enumerate().skip(newest as usize);
            let oldest = history.map(|(i, (_, held))| (i as u64, held));
            let oldest = oldest.into_iter().find(|(_, h)| h.is_none()).map(|(i, _)| i);
            let got = if value.is_none() { oldest.unwrap_or(0) } else { got };
            self.processes[p].newest = newest.max(got);
        }
        self.counts.from_copies += u64::from(r.copy_life != 0);
    }
}

fn number(value: &Bytes) -> u64 {
    std::str::from_utf8(value).unwrap().parse().unwrap()
}

fn look_op(generation: u64, look: Look) -> Op {
    match look {
        Look::Cell => Op::Cell { generation },
        Look::Base => Op::GetBase,
        Look::Both => Op::Both { generation },
    }
}

#[path = "events.rs"]
mod events;
pub(crate) use events::run;
