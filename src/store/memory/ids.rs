//! What the embedded store remembers beside a key: ids that counted, holds, tokens.

use super::shard::{Map, map};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::store::{End, Id};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Ids of `add_once` and holds of `take` that one key remembers.
const IDS_MAX: usize = 1 << 20;

/// What a key remembers beside its value. It outlives a delete: an id that counted, counted.
#[derive(Debug)]
pub(super) struct Ids {
    pub(super) once: Map<OnceState>,
    /// Ids with a turn: the last turn of each.
    pub(super) steps: Map<(u64, OnceState)>,
    pub(super) folds: BTreeSet<Key>,
    pub(super) holds: BTreeMap<Key, HoldState>,
    /// Holds with a turn: the last turn of each.
    pub(super) step_holds: BTreeMap<Key, (u64, HoldState)>,
    pub(super) tokens: VecDeque<Bytes>,
}

impl Default for Ids {
    fn default() -> Ids {
        Ids {
            once: map(),
            steps: map(),
            folds: BTreeSet::new(),
            holds: BTreeMap::new(),
            step_holds: BTreeMap::new(),
            tokens: VecDeque::new(),
        }
    }
}

impl Ids {
    /// What became of `id`.
    pub(super) fn state(&self, id: &Id) -> Known<OnceState> {
        match id.turn {
            None => self.once.get(&id.name).copied().map_or(Known::Nothing, Known::Now),
            Some(turn) => of_turn(self.steps.get(&id.name), turn),
        }
    }

    pub(super) fn hold(&self, id: &Id) -> Known<HoldState> {
        match id.turn {
            None => self.holds.get(&id.name).cloned().map_or(Known::Nothing, Known::Now),
            Some(turn) => of_turn(self.step_holds.get(&id.name), turn),
        }
    }

    /// An error when a new id would be one too many.
    pub(super) fn room(&self, key: &Key, id: &Id) -> Result<()> {
        room(if id.turn.is_some() { self.steps.len() } else { self.once.len() }, key)
    }

    /// An error when a new hold would be one too many.
    pub(super) fn room_to_hold(&self, key: &Key, id: &Id) -> Result<()> {
        room(if id.turn.is_some() { self.step_holds.len() } else { self.holds.len() }, key)
    }

    pub(super) fn remember(&mut self, id: &Id, state: OnceState) {
        match id.turn {
            None => drop(self.once.insert(id.name.clone(), state)),
            Some(turn) => drop(self.steps.insert(id.name.clone(), (turn, state))),
        }
    }

    pub(super) fn set_hold(&mut self, id: &Id, state: HoldState) {
        let Some(turn) = id.turn else {
            self.holds.insert(id.name.clone(), state);
            return;
        };
        // Open although its turn is over: it stays in the books.
        if let Some((of, left)) = self.step_holds.insert(id.name.clone(), (turn, state))
            && of < turn
            && left.ended.is_none()
        {
            let name = [id.name.as_bytes(), b".", of.to_string().as_bytes()].concat();
            self.step_holds.insert(name.into(), (of, left));
        }
    }
}

/// What is known of an id.
pub(super) enum Known<T> {
    Nothing,
    Now(T),
    /// Its turn is over.
    Over,
}

fn of_turn<T: Clone>(last: Option<&(u64, T)>, turn: u64) -> Known<T> {
    match last {
        Some((of, _)) if *of > turn => Known::Over,
        Some((of, state)) if *of == turn => Known::Now(state.clone()),
        _ => Known::Nothing,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OnceState {
    Applied,
    Poisoned,
}

#[derive(Clone, Debug)]
pub(super) struct HoldState {
    pub(super) amount: u64,
    /// What was left when it took.
    pub(super) left: i64,
    pub(super) ended: Option<End>,
    pub(super) token: Option<Bytes>,
}

pub(super) fn room(used: usize, key: &Key) -> Result<()> {
    if used < IDS_MAX {
        return Ok(());
    }
    Err(Error::not_applied(ErrorKind::Limit, "the key remembers no more ids").with_key(key))
}
