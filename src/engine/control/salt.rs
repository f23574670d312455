//! A counter in slots: where it is read, where it is written, and the one way in which that changes.
//!
//! - **What**: a salted counter has generations of slots. One is written to; the sum is what is
//!   retired and every slot of the generations that somebody may write to. The only change is a
//!   rotation from one generation to the next: announce, switch, retire, forget.
//! - **Invariant**: [`Salt::read_set`] of a record contains [`Salt::write_target`] of that record,
//!   of the one before it and of the one after it; an id of a generation is never used twice; a
//!   generation's slots are fixed when it is announced; a value is never moved.
//! - **Time and units**: none; counts of slots.
//! - **Bounds**: [`SLOTS_MAX`] slots a generation, [`DRAIN_MAX`] draining and [`GRAVES_MAX`] buried
//!   generations; the part of a record is below 600 bytes.
//! - **Source**: the read set of a reconfigurable register covers every configuration that a writer
//!   may still use (RAMBO, Lynch and Shvartsman 2002); the reader-first order and its failure
//!   traces are from an explicit-state model of this protocol.
//!
//! The bare key is generation 0, and the home of every later fold. What is retired goes back there
//! too, where the store can add it once and leave a mark in the same step ([`Fold`]); after that the
//! counter is a plain one again, and has no record. Unless the counter is
//! *exclusive*, it is in the read set of every record, so that whoever adds to it, a program without
//! heatsink or a process whose lease has run out, is counted at once. Of an exclusive counter it is
//! sealed and retired like any other generation.

use super::super::data::joined::Op;
use crate::key::{Key, fnv1a_32};
use std::fmt::Write;

/// Slots of one generation at most.
pub const SLOTS_MAX: u16 = 1024;

/// Generations that are no longer written to and not yet retired.
pub const DRAIN_MAX: usize = 2;

/// Generations whose sum is retired and whose slots are not yet deleted.
pub const GRAVES_MAX: usize = 4;

/// How the slots of a generation are named and chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// One slot: the bare key.
    Home,
    /// Slots under names of heatsink's own.
    Slots,
    /// The names (`key#i`) and the choice of slot (32-bit FNV-1a modulo the count) of the program
    /// in the article on hot keys. The home of such a counter is its slot 0, `key#0`, and it grows
    /// once only: the names of two generations would be the same.
    Parity,
}

/// A generation of slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gen {
    /// Never used twice for one key.
    pub id: u32,
    /// How many slots.
    pub k: u16,
    /// Names and choice.
    pub kind: Kind,
    /// Part of the names: chosen so that the slots fall on different shards.
    pub seed: u32,
}

/// The bare key.
pub const HOME: Gen = Gen { id: 0, k: 1, kind: Kind::Home, seed: 0 };

/// A retired generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grave {
    /// The generation.
    pub slots: Gen,
    /// What of its slots is in the retired sum.
    pub absorbed: i64,
    /// Its slots are sealed: no add can be late.
    pub sealed: bool,
}

/// A retired sum on its way back to the bare key. It is added there once, with a mark beside the
/// key in the same step; whoever reads looks at the mark before and after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fold {
    /// Drawn.
    pub id: u32,
    /// What is added.
    pub amount: i64,
    /// It is there for good: the mark is not looked at any more.
    pub done: bool,
}

/// One slot of one generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// The generation.
    pub of: Gen,
    /// The number of the slot, from 0.
    pub index: u16,
}

/// What the record of a salted counter says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Salt {
    /// Nobody but heatsink reads or writes the bare key.
    pub exclusive: bool,
    /// The generation that is written to.
    pub cur: Gen,
    /// The generation that is announced: read already, not yet written to.
    pub next: Option<Gen>,
    /// Whether whoever sees `next` known to all readers switches to it.
    pub armed: bool,
    /// Generations that somebody may still write to, oldest first.
    pub drain: Vec<Gen>,
    /// What retired generations came to, less what was reset.
    pub retired: i64,
    /// Retired generations, oldest first.
    pub graves: Vec<Grave>,
    /// The highest id of a generation so far.
    pub last: u32,
    /// For each generation that is announced, draining or buried, in this order: drawn when that
    /// began. A registry that has lost a change begins it again, and the mark tells.
    pub marks: Vec<u32>,
    /// What is on its way back to the bare key.
    pub fold: Option<Fold>,
    /// How the values of its slots combine. Of those that join nothing is ever retired into the
    /// record: it is joined to the bare key, which is always read, before its slots go.
    pub op: Op,
    /// When it begins again from zero, in milliseconds since 1970.
    pub expires: Option<u64>,
}

impl Salt {
    /// A counter that is not salted yet.
    #[must_use]
    pub fn new(exclusive: bool) -> Salt {
        Salt {
            exclusive,
            cur: HOME,
            next: None,
            armed: false,
            drain: Vec::new(),
            retired: 0,
            graves: Vec::new(),
            last: 0,
            marks: Vec::new(),
            fold: None,
            op: Op::Sum,
            expires: None,
        }
    }

    /// A key that is not salted yet, whose values combine like this. Only a counter can be
    /// `exclusive`: what joins is joined to the bare key.
    #[must_use]
    pub fn of(op: Op, exclusive: bool) -> Salt {
        Salt { op, ..Salt::new(exclusive && op == Op::Sum) }
    }

    /// Whether the record says no more than that there is a plain counter under the bare key.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.cur.kind == Kind::Home
            && self.next.is_none()
            && self.drain.is_empty()
            && self.graves.is_empty()
            && self.retired == 0
            && self.fold.is_none()
            && self.expires.is_none()
            && !self.exclusive
    }

    /// The generations that wait for something, and for what: 0 announced, 1 draining, 2 buried.
    fn waiting(&self) -> impl Iterator<Item = (u8, Gen)> + '_ {
        let next = self.next.iter().map(|g| (0, *g));
        let drain = self.drain.iter().map(|g| (1, *g));
        next.chain(drain).chain(self.graves.iter().map(|g| (2, g.slots)))
    }

    /// The same with their marks.
    pub fn since(&self) -> impl Iterator<Item = (u8, Gen, u32)> + '_ {
        let marks = self.marks.iter().copied().chain(std::iter::repeat(0));
        self.waiting().zip(marks).map(|((role, of), mark)| (role, of, mark))
    }

    /// The record that follows `before`: what is new in it gets this mark.
    #[must_use]
    pub fn marked(mut self, before: &Salt, mark: u32) -> Salt {
        let old: Vec<_> = before.since().collect();
        let mark_of = |(role, of): (u8, Gen)| {
            let known = old.iter().find(|(r, g, _)| (*r, *g) == (role, of));
            known.map_or(mark, |(.., mark)| *mark)
        };
        self.marks = self.waiting().map(mark_of).collect();
        self
    }

    /// Whether a rotation has begun and not ended.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        let rotates = self.next.is_some() || !self.drain.is_empty() || !self.graves.is_empty();
        rotates || self.fold.is_some()
    }

    /// What is added to the sum of the slots unless its mark stands beside the bare key.
    #[must_use]
    pub fn carried(&self) -> Option<Fold> {
        self.fold.filter(|fold| !fold.done)
    }

    /// Whether what is retired could go back to the bare key.
    #[must_use]
    pub fn may_fold(&self) -> bool {
        let home = self.cur.kind == Kind::Home && self.next.is_none() && self.drain.is_empty();
        home && !self.exclusive && self.retired != 0 && self.fold.is_none()
    }

    /// What is retired is on its way to the bare key.
    #[must_use]
    pub fn folding(&self, id: u32) -> Option<Salt> {
        let fold = Some(Fold { id, amount: self.retired, done: false });
        self.may_fold().then(|| Salt { fold, retired: 0, ..self.clone() })
    }

    /// It is there, and its mark as well.
    #[must_use]
    pub fn folded(&self) -> Option<Salt> {
        let fold = Some(Fold { done: true, ..self.carried()? });
        Some(Salt { fold, ..self.clone() })
    }

    /// Its mark is gone.
    #[must_use]
    pub fn unfolded(&self) -> Option<Salt> {
        self.fold.is_some_and(|fold| fold.done).then(|| Salt { fold: None, ..self.clone() })
    }

    /// Every slot that a sum reads, each once.
    pub fn read_set(&self) -> impl Iterator<Item = Slot> + '_ {
        let parity = |g: &Gen| g.kind == Kind::Parity;
        let parity = parity(&self.cur) || self.next.as_ref().is_some_and(parity);
        let bare = (!self.exclusive && !parity).then_some(HOME);
        let own = [Some(self.cur), self.next];
        let own = own.into_iter().flatten().chain(self.drain.iter().copied());
        // A later home is the same key as the first.
        let own = own.filter(|g| self.exclusive || g.kind != Kind::Home);
        bare.into_iter().chain(own).flat_map(|of| (0..of.k).map(move |index| Slot { of, index }))
    }

    /// Where an add goes: `pick` chooses the slot.
    #[must_use]
    pub fn write_target(&self, pick: Pick<'_>) -> Slot {
        Slot { of: self.cur, index: pick.of(&self.cur) }
    }

    /// Generations in which an event may have been counted before `cur`, oldest first.
    pub fn older(&self) -> impl Iterator<Item = Gen> + '_ {
        self.graves.iter().map(|g| g.slots).chain(self.drain.iter().copied())
    }

    /// Announces a generation: of so many slots, or the bare key again. `None` while one is
    /// announced, or too many of the old ones are still there.
    #[must_use]
    pub fn announced(&self, k: u16, kind: Kind, seed: u32, armed: bool) -> Option<Salt> {
        let useful = match kind {
            Kind::Home => self.cur.kind == Kind::Slots && !self.exclusive,
            Kind::Slots => self.cur.kind != Kind::Parity,
            Kind::Parity => self.last == 0 && !self.exclusive,
        };
        let k = if kind == Kind::Home { 1 } else { k };
        let room = self.drain.len() < DRAIN_MAX
            && self.drain.len() + self.graves.len() < GRAVES_MAX
            && (1..=SLOTS_MAX).contains(&k);
        if self.next.is_some() || !room || !useful {
            return None;
        }
        let id = self.last.checked_add(1)?;
        let next = Some(Gen { id, k, kind, seed });
        Some(Salt { next, armed, last: id, ..self.clone() })
    }

    /// Lets everybody switch to what is announced.
    #[must_use]
    pub fn armed(&self) -> Option<Salt> {
        (self.next.is_some() && !self.armed).then(|| Salt { armed: true, ..self.clone() })
    }

    /// Writes go to what was announced.
    #[must_use]
    pub fn switched(&self) -> Option<Salt> {
        let cur = self.next?;
        let mut out = Salt { cur, next: None, armed: false, ..self.clone() };
        out.leave(self.cur);
        Some(out)
    }

    /// `old` is not written to any more.
    fn leave(&mut self, old: Gen) {
        if old.kind != Kind::Home || self.exclusive {
            self.drain.push(old);
        } else {
            // The bare key is read for ever. It stays here for as long as ids are remembered.
            self.graves.push(Grave { slots: old, absorbed: 0, sealed: false });
        }
    }

    /// The slots of a draining generation came to `total`, once for all if they are sealed. `None`
    /// when it is not draining, or the sum does not fit into 64 bits.
    #[must_use]
    pub fn retired(&self, id: u32, total: i64, sealed: bool) -> Option<Salt> {
        let at = self.drain.iter().position(|g| g.id == id)?;
        let mut out = self.clone();
        out.retired = self.retired.checked_add(total)?;
        let slots = out.drain.remove(at);
        out.graves.push(Grave { slots, absorbed: total, sealed });
        Some(out)
    }

    /// Whether what is in use may be sealed: the bare key of a counter that is not exclusive never.
    #[must_use]
    pub fn may_replace(&self) -> bool {
        self.cur.kind != Kind::Home || self.exclusive
    }

    /// Without waiting for anybody: the slots of the present generation are all sealed, and came
    /// to `total`. Whoever writes there is refused, whoever reads there sees the seal.
    #[must_use]
    pub fn replaced(&self, total: i64) -> Option<Salt> {
        if !self.may_replace() {
            return None;
        }
        self.switched()?.retired(self.cur.id, total, true)
    }

    /// The slots of a retired generation now come to `total`: adds came late.
    #[must_use]
    pub fn swept(&self, id: u32, total: i64) -> Option<Salt> {
        let mut out = self.clone();
        let grave =
            out.graves.iter_mut().find(|g| g.slots.id == id && g.slots.kind != Kind::Home)?;
        let late = total.checked_sub(grave.absorbed)?;
        grave.absorbed = total;
        out.retired = self.retired.checked_add(late)?;
        Some(out)
    }

    /// The grave of a generation.
    #[must_use]
    pub fn grave(&self, id: u32) -> Option<&Grave> {
        self.graves.iter().find(|g| g.slots.id == id)
    }

    /// The slots of a retired generation are deleted.
    #[must_use]
    pub fn forgotten(&self, id: u32) -> Option<Salt> {
        let at = self.graves.iter().position(|g| g.slots.id == id)?;
        let mut out = self.clone();
        out.graves.remove(at);
        Some(out)
    }

    /// Whether its time is over at `now_ms`.
    #[must_use]
    pub fn is_expired(&self, now_ms: u64) -> bool {
        self.expires.is_some_and(|at| now_ms >= at)
    }

    /// The count begins again: what was counted up to now, `total`, is taken off.
    #[must_use]
    pub fn reset(&self, total: i64) -> Option<Salt> {
        let retired = self.retired.checked_sub(total)?;
        (self.op == Op::Sum).then(|| Salt { retired, ..self.clone() })
    }

    /// Its time is over: it begins again, and expires no more. It is a reset like any other, so that
    /// all slots, whatever is retired and what comes late vanish in one change of the record.
    #[must_use]
    pub fn expired(&self, total: i64) -> Option<Salt> {
        self.expires?;
        Some(Salt { expires: None, ..self.reset(total)? })
    }
}

impl Grave {
    /// Whether adds may still come late here, as a matter of course.
    #[must_use]
    pub fn is_swept(&self) -> bool {
        !self.sealed && self.slots.kind != Kind::Home
    }
}

/// What chooses a slot.
#[derive(Clone, Copy, Debug)]
pub enum Pick<'a> {
    /// 64 random bits.
    Random(u64),
    /// The id of an event: the same slot on every process and in every version.
    Event(&'a [u8]),
}

impl Pick<'_> {
    /// The slot of a generation.
    #[must_use]
    pub fn of(&self, slots: &Gen) -> u16 {
        let mulhi = |bits: u64| ((u128::from(bits) * u128::from(slots.k)) >> 64) as u16;
        match (self, slots.kind) {
            (Pick::Event(id), Kind::Parity) => (fnv1a_32(id) % u32::from(slots.k)) as u16,
            (Pick::Event(id), _) => mulhi(mix(fnv1a_64(id))),
            (Pick::Random(bits), _) => mulhi(*bits),
        }
    }
}

/// 64-bit FNV-1a.
pub(crate) fn fnv1a_64(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The finaliser of splitmix64: FNV's low bits alone are weak.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Gen {
    fn encode(&self) -> String {
        let kind = match self.kind {
            Kind::Home => 'h',
            Kind::Slots => 's',
            Kind::Parity => 'p',
        };
        format!("{}.{}.{kind}.{}", self.id, self.k, self.seed)
    }

    fn parse(text: &str) -> Option<Gen> {
        let mut words = text.split('.');
        let (id, k) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let kind = match words.next()? {
            "h" => Kind::Home,
            "s" => Kind::Slots,
            "p" => Kind::Parity,
            _ => return None,
        };
        let seed = words.next()?.parse().ok()?;
        let sound = words.next().is_none()
            && (1..=SLOTS_MAX).contains(&k)
            && (kind != Kind::Home || k == 1)
            && (id != 0 || kind == Kind::Home);
        sound.then_some(Gen { id, k, kind, seed })
    }
}

impl Fold {
    /// The name of its mark.
    #[must_use]
    pub fn mark(&self) -> Key {
        Key::from(format!("{:08x}", self.id))
    }

    fn parse(text: &str) -> Option<Fold> {
        let mut words = text.split('.');
        let (id, amount) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let done = match words.next()? {
            "d" => true,
            "c" => false,
            _ => return None,
        };
        words.next().is_none().then_some(Fold { id, amount, done })
    }
}

impl Grave {
    fn encode(&self) -> String {
        let sealed = if self.sealed { 's' } else { 'o' };
        format!("{}.{sealed}.{}", self.slots.encode(), self.absorbed)
    }

    fn parse(text: &str) -> Option<Grave> {
        let (rest, absorbed) = text.rsplit_once('.')?;
        let (slots, sealed) = rest.rsplit_once('.')?;
        let sealed = match sealed {
            "s" => true,
            "o" => false,
            _ => return None,
        };
        Some(Grave { slots: Gen::parse(slots)?, absorbed: absorbed.parse().ok()?, sealed })
    }
}

impl Salt {
    /// As text, for a part of a record: no spaces.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = format!("{}/{}/{}/", self.last, self.retired, self.cur.encode());
        if let Some(next) = &self.next {
            text.push_str(if self.armed { "!" } else { "?" });
            text.push_str(&next.encode());
        }
        text.push('/');
        for (i, g) in self.drain.iter().enumerate() {
            // Writing to a string does not fail.
            let _ = write!(text, "{}{}", if i > 0 { "," } else { "" }, g.encode());
        }
        text.push('/');
        for (i, g) in self.graves.iter().enumerate() {
            let _ = write!(text, "{}{}", if i > 0 { "," } else { "" }, g.encode());
        }
        text.push_str(if self.exclusive { "/x/" } else { "//" });
        for (i, mark) in self.marks.iter().enumerate() {
            let _ = write!(text, "{}{mark}", if i > 0 { "," } else { "" });
        }
        text.push('/');
        if let Some(Fold { id, amount, done }) = self.fold {
            let _ = write!(text, "{id}.{amount}.{}", if done { 'd' } else { 'c' });
        }
        let _ = write!(text, "/{}/", self.op.word());
        if let Some(at) = self.expires {
            let _ = write!(text, "{at}");
        }
        text
    }

    /// Reads it; `None` for anything that `encode` does not write.
    #[must_use]
    pub fn parse(text: &str) -> Option<Salt> {
        let mut fields = text.split('/');
        let last = fields.next()?.parse().ok()?;
        let retired = fields.next()?.parse().ok()?;
        let cur = Gen::parse(fields.next()?)?;
        let next = fields.next()?;
        let armed = next.starts_with('!');
        let next = match next {
            "" => None,
            next => Some(Gen::parse(next.strip_prefix(['!', '?'])?)?),
        };
        let many = |text: &str| text.split(',').filter(|t| !t.is_empty()).count();
        let drain = fields.next()?;
        let graves = fields.next()?;
        if many(drain) > DRAIN_MAX || many(graves) > GRAVES_MAX {
            return None;
        }
        let list = |text: &str| -> Option<Vec<Gen>> {
            text.split(',').filter(|t| !t.is_empty()).map(Gen::parse).collect()
        };
        let buried = |text: &str| -> Option<Vec<Grave>> {
            text.split(',').filter(|t| !t.is_empty()).map(Grave::parse).collect()
        };
        let (drain, graves) = (list(drain)?, buried(graves)?);
        let exclusive = match fields.next()? {
            "x" => true,
            "" => false,
            _ => return None,
        };
        let marks = fields.next()?;
        if many(marks) > 1 + DRAIN_MAX + GRAVES_MAX {
            return None;
        }
        let numbers = marks.split(',').filter(|t| !t.is_empty()).map(|t| t.parse().ok());
        let marks = numbers.collect::<Option<Vec<u32>>>()?;
        let fold = match fields.next()? {
            "" => None,
            text => Some(Fold::parse(text)?),
        };
        let op = Op::parse(fields.next()?)?;
        let expires = match fields.next()? {
            "" => None,
            text => Some(text.parse().ok()?),
        };
        let salt = Salt { exclusive, cur, next, armed, last, retired, ..Salt::new(false) };
        let salt = Salt { drain, graves, marks, fold, op, expires, ..salt };
        (fields.next().is_none() && salt.is_sound()).then_some(salt)
    }

    /// Ids differ and none is above the highest.
    fn is_sound(&self) -> bool {
        let own = [Some(self.cur), self.next].into_iter().flatten();
        let mut ids: Vec<u32> = own.chain(self.older()).map(|g| g.id).collect();
        ids.sort_unstable();
        let n = ids.len();
        ids.dedup();
        let marked = self.marks.is_empty() || self.marks.len() == self.waiting().count();
        let folds = self.fold.is_none() || !self.exclusive;
        let counts =
            self.op == Op::Sum || (!self.exclusive && self.retired == 0 && self.expires.is_none());
        marked && folds && counts && ids.len() == n && ids.last().is_none_or(|id| *id <= self.last)
    }
}

#[cfg(test)]
#[path = "salt_tests.rs"]
mod tests;
