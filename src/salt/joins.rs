//! Values that join, in the slots of a key: each is replaced by compare-and-set, which can be
//! repeated, and seals a slot in any store. What retired slots held is joined to the bare key.

use super::{SUM_TRIES, Salted, View, count, gone, join};
use crate::adds::Cell;
use crate::batch::bounded;
use crate::call;
use crate::engine::control::salt::{self as plan, Gen, Kind, Pick, Slot};
use crate::engine::data::joined::{JOINED_BYTES_MAX, Joined, MEMBERS_MAX, Op, SET_BYTES_MAX};
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::registry::lease_clock;
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use crate::store::{DynStore, Stored};
use std::sync::Arc;

/// Attempts to replace a value that others replace too: each that fails was another's success.
const RAISE_TRIES: usize = 64;

/// Where a value is joined.
#[derive(Clone, Copy)]
pub(super) struct At {
    /// The bare key, which has no seal.
    pub(super) bare: bool,
    /// It is made where it is not there.
    pub(super) create: bool,
    /// No more than who adds may leave there.
    pub(super) capped: bool,
}

const HOME: At = At { bare: true, create: true, capped: true };

/// Joins `value` to the bare key of a counter that is not salted.
pub(crate) async fn add_plain(shared: &Arc<Shared>, key: &Key, value: Joined) -> Result<()> {
    let work = raise(shared.store.clone(), key.clone(), value, HOME);
    match bounded(shared, shared.options.loads.timeout, call::catch(work)).await {
        Some(Ok(answer)) => answer.map(drop),
        Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
        None => Err(Error::unknown(ErrorKind::Timeout, "the store did not answer in time")),
    }
}

/// What a key holds that is not salted.
pub(crate) async fn read_plain(store: Arc<dyn DynStore>, key: &Key, op: Op) -> Result<Joined> {
    let stored = store.get(key.clone()).await?;
    place(op, key, true, stored.as_ref()).map(|at| at.0)
}

/// A value in its place, and whether that is sealed; nothing where there is nothing.
fn place(op: Op, key: &Key, bare: bool, stored: Option<&Stored>) -> Result<(Joined, bool)> {
    let found = match stored {
        None => Joined::empty(op).map(|empty| (empty, false)),
        Some(stored) if bare => Joined::parse(op, &stored.bytes).map(|value| (value, false)),
        Some(stored) => Joined::parse_slot(op, &stored.bytes).map(|at| (at.value, at.sealed)),
    };
    found.ok_or_else(|| {
        let text = format!("the value is not that of a {}", op.word());
        Error::not_applied(ErrorKind::WrongType, text).with_key(key)
    })
}

/// Joins `value` to what is under `name`; whether that is more now. A slot that is sealed, or gone
/// and not to be made, says `Sealed`.
fn raise(
    store: Arc<dyn DynStore>,
    name: Key,
    value: Joined,
    at: At,
) -> BoxFuture<'static, Result<bool>> {
    Box::pin(async move {
        let text = "the value changes faster than it can be replaced";
        let (mut failed, mut doubt) = (Error::not_applied(ErrorKind::Store, text), false);
        for _ in 0..RAISE_TRIES {
            match raise_once(&store, &name, &value, at).await {
                Ok(Some(more)) => return Ok(more),
                Ok(None) => {}
                // Harmless to send again: it is there or it is not. But whatever comes then, this
                // one may have been applied, or may still be.
                Err(error) if error.is_unknown() => (failed, doubt) = (error, true),
                Err(error) => return Err(error.after(doubt)),
            }
        }
        Err(failed.after(doubt))
    })
}

/// One attempt of [`raise`]; `None` when another was first.
async fn raise_once(
    store: &Arc<dyn DynStore>,
    name: &Key,
    value: &Joined,
    at: At,
) -> Result<Option<bool>> {
    let stored = store.clone().get(name.clone()).await;
    let stored = stored.map_err(|e| e.with_outcome(Outcome::NotApplied))?;
    let (mut now, sealed) = place(value.op(), name, at.bare, stored.as_ref())?;
    if sealed || (stored.is_none() && !at.create) {
        return Err(Error::not_applied(ErrorKind::Sealed, "the slot is sealed").with_key(name));
    }
    let more = now.join(value);
    if !more && (stored.is_some() || at.bare) {
        return Ok(Some(false));
    }
    let room = if at.capped { now.has_room() } else { now.size() <= JOINED_BYTES_MAX };
    if !room {
        let text = if at.capped {
            format!("the set would hold more than {MEMBERS_MAX} members or {SET_BYTES_MAX} bytes")
        } else {
            format!("the set would hold more than {JOINED_BYTES_MAX} bytes in one place")
        };
        return Err(Error::not_applied(ErrorKind::Limit, text).with_key(name));
    }
    let bytes = if at.bare { now.encode() } else { Some(now.encode_slot(false)) };
    let Some(bytes) = bytes else { return Ok(Some(false)) };
    let (was, ttl) = stored.map_or((None, None), |s| (Some(s.bytes), s.ttl_left));
    let done = store.clone().compare_and_set(name.clone(), was, bytes, ttl).await?;
    Ok(done.then_some(more))
}

/// Seals a slot; what it holds, for good.
fn seal(store: Arc<dyn DynStore>, name: Key, op: Op) -> BoxFuture<'static, Result<Joined>> {
    Box::pin(async move {
        for _ in 0..RAISE_TRIES {
            let stored = store.clone().get(name.clone()).await?;
            let (value, sealed) = place(op, &name, false, stored.as_ref())?;
            if sealed {
                return Ok(value);
            }
            let (was, bytes) = (stored.map(|s| s.bytes), value.encode_slot(true));
            match store.clone().compare_and_set(name.clone(), was, bytes, None).await {
                Ok(true) => return Ok(value),
                // Whether it is sealed is read back.
                Err(error) if !error.is_unknown() => return Err(error),
                Ok(false) | Err(_) => {}
            }
        }
        Err(Error::not_applied(ErrorKind::Store, "the slot changes faster than it can be sealed"))
    })
}

impl Salted {
    /// Joins a value, made of so many calls, to the key of `cell`, wherever that is now.
    pub(crate) async fn join(
        &self,
        shared: &Arc<Shared>,
        cell: &Arc<Cell>,
        (value, calls): (Joined, u64),
    ) -> Result<()> {
        cell.weigh(calls);
        let store = &shared.store;
        // A member has a slot of its own: it is stored once, whoever adds it.
        let member = match &value {
            Joined::Union(set) => set.first().cloned(),
            Joined::Max(_) | Joined::Min(_) => None,
        };
        let pick = |_| match &member {
            Some(member) => Pick::Event(member),
            None => Pick::Random(shared.roll()),
        };
        // A slot that is gone is made again by who has looked at the record since.
        let send = |name: Key, bare: bool, again: bool| {
            let at = At { bare, create: bare || again, capped: true };
            raise(store.clone(), name, value.clone(), at)
        };
        self.sent(shared, (&cell.key, cell.op), pick, send).await.map(drop)
    }

    /// What all slots of `cell` hold together: whatever was acknowledged before is in it, but for
    /// what came to slots that do not answer since they were last seen; and how many those are.
    pub(crate) async fn joined(&self, shared: &Arc<Shared>, cell: &Cell) -> Result<(Joined, u16)> {
        for _ in 0..SUM_TRIES {
            let view = self.view(shared, &cell.key, cell.op).await?;
            if let Some(found) = self.joined_by(shared, cell, &view).await? {
                return Ok(found);
            }
            count(&self.tallies.sums_again, 1);
        }
        Err(Error::not_applied(ErrorKind::Store, "the key changes faster than it can be read"))
    }

    /// The same under a record; `None` when that is not in force any more.
    async fn joined_by(
        &self,
        shared: &Arc<Shared>,
        cell: &Cell,
        view: &View,
    ) -> Result<Option<(Joined, u16)>> {
        let (slots, by, until) = match view {
            View::Plain(until) => (vec![Slot { of: plan::HOME, index: 0 }], None, *until),
            View::Salted(plan, by, until) => (plan.read_set().collect(), Some(*by), *until),
        };
        let known = cell.joined.lock().clone().map(|known| known.value);
        let longest = shared.options.loads.timeout;
        let spared = known.is_some() && slots.len() > 1;
        let limit = if spared { longest.min(self.options.timeout) } else { longest };
        let mut sum = Joined::empty(cell.op).ok_or_else(gone)?;
        let (mut doubtful, mut missing, mut behind) = (false, 0, 0u16);
        let answers = self.answers_of(shared, &cell.key, &slots, limit).await;
        for (slot, answer) in slots.iter().zip(answers) {
            let stored = match answer {
                Ok(stored) => stored,
                Err(_) if spared && usize::from(behind) + 1 < slots.len() => {
                    behind += 1;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let bare = slot.of.kind == Kind::Home;
            missing += u64::from(stored.is_none() && !bare);
            let (value, sealed) = place(cell.op, &cell.key, bare, stored.as_ref())?;
            doubtful |= sealed;
            sum.join(&value);
        }
        if behind > 0
            && let Some(known) = known
        {
            sum.join(&known);
        }
        let now = lease_clock(&shared.clock).after(shared.clock.resolution());
        if now < until && !doubtful && missing == 0 {
            return Ok(Some((sum, behind)));
        }
        // The record is the same before and after: it was so all the time.
        let after = self.registrar.load(shared, &cell.key).await?;
        if by.is_none() || after.map(|record| (record.version, record.nonce)) != by {
            return Ok(None);
        }
        count(&self.tallies.slots_missing, missing);
        Ok(Some((sum, behind)))
    }

    /// Refuses to seal what would not fit into the bare key then. Room for another set is left to
    /// what comes meanwhile.
    pub(super) async fn fits_home(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        (op, of): (Op, Gen),
    ) -> Result<()> {
        if op != Op::Union {
            return Ok(());
        }
        let mut slots: Vec<Slot> = (0..of.k).map(|index| Slot { of, index }).collect();
        slots.push(Slot { of: plan::HOME, index: 0 });
        let mut sum = Joined::empty(op).ok_or_else(gone)?;
        for (slot, stored) in slots.iter().zip(self.slots_of(shared, key, &slots).await?) {
            let bare = slot.of.kind == Kind::Home;
            sum.join(&place(op, key, bare, stored.as_ref())?.0);
        }
        if sum.size() + SET_BYTES_MAX > JOINED_BYTES_MAX {
            let text = format!("the set has about {} bytes: it stays spread", sum.size());
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(key));
        }
        Ok(())
    }

    /// Seals the slots of a generation, and joins what they held to the bare key.
    pub(super) async fn bring_home(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        (op, of): (Op, Gen),
    ) -> Result<()> {
        let seal = |index| seal(shared.store.clone(), self.name(key, Slot { of, index }), op);
        let values = join::all((0..of.k).map(|i| self.asking(shared, seal(i)))).await;
        self.join_home(shared, key, op, values.into_iter()).await.map(drop)
    }

    /// What deleted slots still hold is in the bare key; whether it was there before.
    pub(super) async fn is_home(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        (op, of): (Op, Gen),
    ) -> Result<bool> {
        let slots: Vec<Slot> = (0..of.k).map(|index| Slot { of, index }).collect();
        let read = self.slots_of(shared, key, &slots).await?;
        let values = read.iter().map(|stored| Ok(place(op, key, false, stored.as_ref())?.0));
        let late = self.join_home(shared, key, op, values).await?;
        count(&self.tallies.late, u64::from(late));
        Ok(!late)
    }

    async fn join_home(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        op: Op,
        values: impl Iterator<Item = Result<Joined>>,
    ) -> Result<bool> {
        let mut sum = Joined::empty(op).ok_or_else(gone)?;
        for value in values {
            sum.join(&value?);
        }
        let at = At { capped: false, ..HOME };
        self.ask(shared, raise(shared.store.clone(), key.clone(), sum, at)).await
    }

    /// Makes the slots of a generation.
    pub(super) async fn open_places(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        (op, of): (Op, Gen),
    ) -> Result<()> {
        let at = At { bare: false, create: true, capped: false };
        let empty = Joined::empty(op).ok_or_else(gone)?;
        let open = |index| {
            let name = self.name(key, Slot { of, index });
            raise(shared.store.clone(), name, empty.clone(), at)
        };
        let opened = join::all((0..of.k).map(|i| self.asking(shared, open(i)))).await;
        opened.into_iter().collect::<Result<Vec<_>>>().map(drop)
    }

    /// How the values of `key` combine, by the handle that this process has of it.
    pub(super) fn op_of(shared: &Shared, key: &Key) -> Op {
        shared.counters.known_cell(shared.hash(key), key).map_or(Op::Sum, |cell| cell.op)
    }

    /// The record that this process would begin with.
    pub(super) fn first_plan(&self, shared: &Shared, key: &Key) -> plan::Salt {
        plan::Salt::of(Salted::op_of(shared, key), self.options.exclusive)
    }

    /// Refuses what does not combine as the record says.
    pub(super) fn check_op(plan: &plan::Salt, key: &Key, op: Op) -> Result<()> {
        if plan.op == op || plan.last == 0 || plan.is_plain() {
            return Ok(());
        }
        let text = format!("the key is salted as a {}: call {}", plan.op.word(), call_of(plan.op));
        Err(Error::not_applied(ErrorKind::WrongType, text).with_key(key))
    }
}

/// The call that is right for a key.
pub(super) fn call_of(op: Op) -> &'static str {
    match op {
        Op::Sum => "Heatsink::counter(key)",
        Op::Max => "Heatsink::max(key)",
        Op::Min => "Heatsink::min(key)",
        Op::Union => "Heatsink::union(key)",
    }
}
