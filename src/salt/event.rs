//! Events: adds with an id, which pins the slot.

use super::{ADD_TRIES, Salted, View, count};
use crate::adds::Cell;
use crate::batch::bounded;
use crate::call;
use crate::engine::control::salt::{self as plan, Gen, Kind, Pick};
use crate::engine::data::joined::Op;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::Key;
use crate::runtime::BoxFuture;
use crate::shared::Shared;
use crate::store::Once;
use std::sync::Arc;

/// Attempts to send what counts once however often it arrives.
const ONCE_TRIES: u32 = 4;

/// What becomes of an event that is delivered twice, or whose answer is lost.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Redelivery {
    /// It counts once. Needs [`add_once`](crate::Capability::add_once) of the store, which
    /// remembers ids for as long as it says, and for at least
    /// [`Salt::grave`](crate::Salt::grave) here.
    #[default]
    CountsOnce,
    /// It is sent once, and not again when the outcome is unknown. Delivered twice by the caller,
    /// it counts twice.
    SentOnce,
    /// It is sent again until the store says that it has it, a few times at most. It may count more
    /// than once.
    SentUntilStored,
}

/// Whether an event was counted by this call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// Yes.
    Now,
    /// An earlier delivery had been counted.
    Before,
}

/// Adds an event to the counter of `cell`.
pub(crate) async fn add_event(
    shared: &Arc<Shared>,
    cell: &Arc<Cell>,
    (id, amount): (Key, i64),
    redelivery: Redelivery,
) -> Result<Counted> {
    if shared.salted.is_some() {
        cell.weigh(1);
    }
    match redelivery {
        Redelivery::CountsOnce => once(shared, &cell.key, &id, amount).await,
        Redelivery::SentOnce => send(shared, cell, &id, amount).await.map(|()| Counted::Now),
        Redelivery::SentUntilStored => {
            let (mut tries, mut doubt) = (ONCE_TRIES, false);
            loop {
                tries -= 1;
                match send(shared, cell, &id, amount).await {
                    Err(error) if error.is_unknown() && tries > 0 => doubt = true,
                    answer => return answer.map(|()| Counted::Now).map_err(|e| e.after(doubt)),
                }
            }
        }
    }
}

async fn send(shared: &Arc<Shared>, cell: &Arc<Cell>, id: &Key, amount: i64) -> Result<()> {
    let store = shared.store.clone();
    let add =
        |name: Key, _, _| -> BoxFuture<'static, Result<i64>> { store.clone().add(name, amount) };
    match &shared.salted {
        Some(salted) => {
            let pick = |_| Pick::Event(id);
            salted.sent(shared, (&cell.key, Op::Sum), pick, add).await.map(drop)
        }
        None => asked(shared, add(cell.key.clone(), true, false)).await.map(drop),
    }
}

async fn asked<T>(shared: &Arc<Shared>, work: BoxFuture<'static, Result<T>>) -> Result<T> {
    match bounded(shared, shared.options.loads.timeout, call::catch(work)).await {
        Some(Ok(answer)) => answer,
        Some(Err(panic)) => Err(panic.with_outcome(Outcome::Unknown)),
        None => Err(Error::unknown(ErrorKind::Timeout, "the store did not answer in time")),
    }
}

/// The same call again while its outcome is unknown: it counts once.
async fn settled(
    shared: &Arc<Shared>,
    work: impl Fn() -> BoxFuture<'static, Result<Once>>,
) -> Result<Once> {
    let (mut tries, mut doubt) = (ONCE_TRIES, false);
    loop {
        tries -= 1;
        match asked(shared, work()).await {
            Err(error) if error.is_unknown() && tries > 0 => doubt = true,
            answer => return answer.map_err(|e| e.after(doubt)),
        }
    }
}

async fn once(shared: &Arc<Shared>, key: &Key, id: &Key, amount: i64) -> Result<Counted> {
    if !shared.store.capability().add_once {
        return Err(Error::unsupported("add_once"));
    }
    let Some(salted) = &shared.salted else {
        let store = &shared.store;
        let add = || store.clone().add_once(key.clone(), id.clone().into(), amount);
        return match settled(shared, add).await? {
            Once::Applied(_) => Ok(Counted::Now),
            Once::Duplicate => Ok(Counted::Before),
            Once::Poisoned => Err(poisoned()),
        };
    };
    salted.once(shared, key, id, amount).await
}

fn poisoned() -> Error {
    Error::not_applied(ErrorKind::Store, "the event counts elsewhere: a salted counter's bare key")
}

impl Salted {
    /// Applying an event in a generation needs that it can no longer be applied in any older one.
    /// So of all deliveries, wherever and under whatever record, one is applied.
    async fn once(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        id: &Key,
        amount: i64,
    ) -> Result<Counted> {
        if self.options.parity {
            let text = "with Salt::parity the slots of two generations share names";
            return Err(Error::not_applied(ErrorKind::Unsupported, text));
        }
        for attempt in 0..ADD_TRIES {
            let (cur, mut older) = match self.view(shared, key, Op::Sum).await? {
                View::Plain(_) => (plan::HOME, Vec::new()),
                View::Salted(plan, ..) => (plan.cur, plan.older().collect::<Vec<Gen>>()),
            };
            older.sort_by_key(|g| g.id);
            let store = &shared.store;
            for of in older {
                let (name, id) = self.event_name(key, id, of);
                let poison = || store.clone().poison_once(name.clone(), id.clone().into());
                if settled(shared, poison).await? == Once::Duplicate {
                    return Ok(Counted::Before);
                }
            }
            let (name, id) = self.event_name(key, id, cur);
            let add = || store.clone().add_once(name.clone(), id.clone().into(), amount);
            match settled(shared, add).await {
                Ok(Once::Applied(_)) => return Ok(Counted::Now),
                Ok(Once::Duplicate) => return Ok(Counted::Before),
                // Another delivery knows of a newer generation.
                Ok(Once::Poisoned) => {}
                Err(e) if e.kind() == ErrorKind::Sealed && !e.is_unknown() => {
                    count(&self.tallies.resent, 1);
                    if attempt > super::HELP_AFTER {
                        self.finish(shared, key).await?;
                    }
                }
                Err(error) => return Err(error),
            }
            self.registrar.load(shared, key).await?;
            if attempt > 0 {
                let pause = std::time::Duration::from_millis(1 << attempt.min(6));
                shared.runtime.sleep(pause).await;
            }
        }
        Err(poisoned())
    }

    /// The slot of an event in a generation, and the name under which it is remembered there. All
    /// homes are one key, so each remembers ids of its own.
    fn event_name(&self, key: &Key, id: &Key, of: Gen) -> (Key, Key) {
        let slot = plan::Slot { of, index: Pick::Event(id).of(&of) };
        let remembered = match (of.kind, of.id) {
            (Kind::Home, 1..) => Key::from([id, &b"@"[..], of.id.to_string().as_bytes()].concat()),
            _ => id.clone(),
        };
        (self.name(key, slot), remembered)
    }
}
