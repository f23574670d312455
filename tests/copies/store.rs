//! The store of the simulation: one key with its cells and copies, and what the checks know of it.

use bytes::Bytes;
use heatsink::engine::control::copies::read::Copy;
use heatsink::engine::control::copies::snapshot::Seen;
use heatsink::engine::control::copies::write::Kept;
use heatsink::engine::control::copies::{Image, Mutant, Plan, Set};
use heatsink::engine::time::Tick;
use std::collections::BTreeMap;

pub(crate) const MS: u64 = 1_000_000;

pub(crate) fn at(ms: u64) -> Tick {
    Tick(ms * MS)
}

/// One operation as the store gets it.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Put (or delete) the base; with a generation, bump its cell in the same step.
    Base {
        value: Option<u64>,
        pair: Option<u64>,
    },
    Bump {
        generation: u64,
        by: u64,
    },
    Cell {
        generation: u64,
    },
    GetBase,
    Both {
        generation: u64,
    },
    GetCopy {
        generation: u64,
        i: u16,
    },
    PutCopy {
        generation: u64,
        i: u16,
        image: Image,
        life: u64,
    },
    EraseCopy {
        generation: u64,
        i: u16,
    },
    Load,
}

impl Op {
    pub(crate) fn is_read(&self) -> bool {
        matches!(
            self,
            Op::Cell { .. } | Op::GetBase | Op::Both { .. } | Op::GetCopy { .. } | Op::Load
        )
    }

    /// Served by the shard of the base.
    pub(crate) fn on_base(&self) -> bool {
        !matches!(self, Op::GetCopy { .. } | Op::PutCopy { .. } | Op::EraseCopy { .. } | Op::Load)
    }
}

/// What it answered.
#[derive(Clone, Debug)]
pub(crate) enum Got {
    Base { seq: u64, cell: Option<u64> },
    Cell(u64),
    Seen(Seen),
    Copy(Copy, u64),
    Kept(Kept),
    Record(Record),
}

/// The registry's record of the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub(crate) version: u64,
    pub(crate) set: Option<Set>,
    /// Which announcement this is, whatever the generation says.
    pub(crate) life: u64,
}

#[derive(Clone, Debug)]
struct Held {
    image: Image,
    life: u64,
    expires: u64,
}

/// Base and cells, as they fail over together.
#[derive(Clone, Default, Debug)]
pub(crate) struct BaseShard {
    pub(crate) base: Option<u64>,
    /// The number of the operation that left it so.
    seq: u64,
    cells: BTreeMap<u64, u64>,
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) shard: BaseShard,
    /// Earlier states of it, for a failover and a lagging replica.
    past: Vec<(u64, BaseShard)>,
    pub(crate) down_until: u64,
    copies: BTreeMap<(u64, u16), Held>,
    /// What copies held before their last write.
    before: BTreeMap<(u64, u16), Option<Held>>,
    pub(crate) record: Record,
    pub(crate) records: Vec<Record>,
    rolled_back: bool,
    /// When each base operation was applied, in order; its value, or none for a delete.
    pub(crate) history: Vec<(u64, Option<u64>)>,
    /// Numbers between these, exclusive, were taken away by a failover.
    pub(crate) lost: Option<(u64, u64)>,
    pub(crate) ttl: u64,
}

pub(crate) fn bytes(value: u64) -> Bytes {
    Bytes::from(value.to_string())
}

impl Store {
    /// The base holds value 0, the first operation; nothing is number 0.
    pub(crate) fn new(ttl: u64) -> Store {
        let record = Record { version: 1, set: None, life: 0 };
        Store {
            shard: BaseShard { base: Some(0), seq: 1, cells: BTreeMap::new() },
            past: Vec::new(),
            down_until: 0,
            copies: BTreeMap::new(),
            before: BTreeMap::new(),
            record,
            records: vec![record],
            rolled_back: false,
            history: vec![(0, None), (0, Some(0))],
            lost: None,
            ttl,
        }
    }

    pub(crate) fn open(&mut self, set: Set) {
        self.shard.cells.insert(set.generation, 1);
        self.change(Some(set), true);
    }

    /// A change of the record.
    pub(crate) fn change(&mut self, set: Option<Set>, new_life: bool) {
        let life = self.record.life + u64::from(new_life);
        self.record = Record { version: self.record.version + 1, set, life };
        self.records.push(self.record);
    }

    /// The registry loses its last change; once in a run, since nothing is promised beyond that.
    pub(crate) fn roll_back(&mut self) {
        if self.records.len() < 2 || std::mem::replace(&mut self.rolled_back, true) {
            return;
        }
        self.records.pop();
        let (version, life) = (self.record.version + 1, self.record.life);
        let old = self.records.last().copied().unwrap();
        // A later announcement is another life, whichever record it follows.
        self.record = Record { version, set: old.set, life: life.max(old.life) };
        if old.set.is_none() {
            self.record.life = life;
        }
        *self.records.last_mut().unwrap() = self.record;
    }

    pub(crate) fn drop_cell(&mut self, generation: u64) {
        self.shard.cells.remove(&generation);
    }

    fn cell(&self, generation: u64) -> u64 {
        self.shard.cells.get(&generation).copied().unwrap_or(0)
    }

    fn live(&self, key: (u64, u16), now: u64) -> Option<&Held> {
        self.copies.get(&key).filter(|held| held.expires > now)
    }

    /// Copies that hold something else than the base does.
    pub(crate) fn astray(&self, set: Set, now: u64) -> Vec<u16> {
        let base = self.shard.base.map(bytes);
        let held = |i| self.live((set.generation, i), now).map(|h| h.image.bytes.clone());
        (0..set.readers).filter(|i| held(*i).is_some_and(|h| h != base)).collect()
    }

    /// The number of the operation that wrote this; of the newest delete for "none": the kindest
    /// reading, since nobody can tell which it was.
    pub(crate) fn seq_of(&self, value: Option<u64>) -> Option<u64> {
        self.history.iter().rposition(|(_, held)| *held == value).map(|seq| seq as u64)
    }

    /// The number of the operation that left the base as it is.
    pub(crate) fn seq(&self) -> u64 {
        self.shard.seq
    }

    pub(crate) fn is_lost(&self, seq: u64) -> bool {
        self.lost.is_some_and(|(kept, until)| seq > kept && seq < until)
    }

    pub(crate) fn put_directly(&mut self, now: u64, value: Option<u64>) -> u64 {
        self.past.push((now, self.shard.clone()));
        if self.past.len() > 8 {
            self.past.remove(0);
        }
        let seq = self.history.len() as u64;
        (self.shard.base, self.shard.seq) = (value, seq);
        self.history.push((now, self.shard.base));
        seq
    }

    /// The base's shard goes back to an earlier state, with its cells; it takes a while.
    pub(crate) fn fail_over(&mut self, now: u64, takes: u64, draw: u64) -> bool {
        if self.past.is_empty() {
            return false;
        }
        let at = (draw % self.past.len() as u64) as usize;
        let (_, old) = self.past[at].clone();
        self.past.truncate(at);
        self.lost = Some((old.seq, self.history.len() as u64));
        self.shard = old;
        self.down_until = now + takes;
        true
    }

    /// A copy's shard loses the last write of one copy.
    pub(crate) fn lose_copy(&mut self, draw: u64) {
        let keys: Vec<_> = self.before.keys().copied().collect();
        if keys.is_empty() {
            return;
        }
        let key = keys[(draw % keys.len() as u64) as usize];
        match self.before.remove(&key).flatten() {
            Some(held) => drop(self.copies.insert(key, held)),
            None => drop(self.copies.remove(&key)),
        }
    }

    /// A copy goes before its time.
    pub(crate) fn evict(&mut self, draw: u64) {
        let keys: Vec<_> = self.copies.keys().copied().collect();
        if !keys.is_empty() {
            self.copies.remove(&keys[(draw % keys.len() as u64) as usize]);
        }
    }

    /// Applies one operation. `None`: the shard is down.
    pub(crate) fn apply(&mut self, plan: &Plan, op: &Op, now: u64, replica: bool) -> Option<Got> {
        if op.on_base() && now < self.down_until {
            return None;
        }
        let lag = |s: &Store| s.past.last().map_or_else(|| s.shard.clone(), |(_, old)| old.clone());
        Some(match op {
            Op::Base { value, pair } => {
                let seq = self.put_directly(now, *value);
                if value.is_none() && plan.mutant == Some(Mutant::DropCell) {
                    self.shard.cells.clear();
                }
                let cell = pair.map(|generation| {
                    let cell = self.shard.cells.entry(generation).or_default();
                    *cell += 1;
                    *cell
                });
                Got::Base { seq, cell }
            }
            Op::Bump { generation, by } => {
                let cell = self.shard.cells.entry(*generation).or_default();
                *cell += by;
                Got::Cell(*cell)
            }
            Op::Cell { generation } => Got::Seen(Seen::Cell(self.cell(*generation))),
            Op::GetBase => Got::Seen(Seen::Base(self.shard.base.map(bytes))),
            Op::Both { generation } if replica => {
                let old = lag(self);
                let cell = old.cells.get(generation).copied().unwrap_or(0);
                Got::Seen(Seen::Both(cell, old.base.map(bytes)))
            }
            Op::Both { generation } => {
                Got::Seen(Seen::Both(self.cell(*generation), self.shard.base.map(bytes)))
            }
            Op::GetCopy { generation, i } => match self.live((*generation, *i), now) {
                Some(held) => Got::Copy(Copy::Image(held.image.clone()), held.life),
                None => Got::Copy(Copy::Missing, 0),
            },
            Op::PutCopy { generation, i, image, life } => {
                Got::Kept(self.put_copy(plan, (*generation, *i), image, *life, now))
            }
            Op::EraseCopy { generation, i } => {
                self.copies.remove(&(*generation, *i));
                Got::Kept(Kept::This)
            }
            Op::Load => Got::Record(self.record),
        })
    }

    fn put_copy(
        &mut self,
        plan: &Plan,
        key: (u64, u16),
        image: &Image,
        life: u64,
        now: u64,
    ) -> Kept {
        let mut image = image.clone();
        let tombstone = image.bytes.is_none();
        if tombstone && plan.mutant == Some(Mutant::TombstoneMax) {
            image.label.version = u64::MAX / 2;
        }
        let blind = plan.mutant == Some(Mutant::PlainPut) || !plan.form.versioned();
        if let Some(held) = self.live(key, now)
            && held.image.label.version >= image.label.version
            && !blind
        {
            return Kept::Refused(held.image.label);
        }
        let old = self.copies.remove(&key);
        self.before.insert(key, old);
        if !(tombstone && plan.mutant == Some(Mutant::PhysicalDelete)) {
            self.copies.insert(key, Held { image, life, expires: now + self.ttl });
        }
        Kept::This
    }
}
