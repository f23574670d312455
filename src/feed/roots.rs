//! The root of the registry of salted counters, read once for a host.
//!
//! A follower asks with a token, the serving process takes all tokens, *then* reads the root, and
//! sends each its token with what it read. The lease of the follower begins when it made the token,
//! so it holds however late the answer comes: who served may have been stopped at any point in
//! between. See `engine/control/carried`.
//!
//! # Who is trusted with what
//!
//! What a follower takes from an answer is that the root *was this one at some time after its
//! token*. A serving process that is slow, stopped, restarted, or behind cannot say that wrongly: a
//! token comes back only from who had it, a token that is not out is refused and counted
//! ([`FeedStats::roots_refused`](super::FeedStats::roots_refused)), a root that is not that of the
//! list in force renews nothing, nor does any root once the lease has ended. One that means another
//! registry cannot either, since roots carry a number that is drawn at random; where a registry has
//! no list yet, the serving process writes an empty one first. (Registries that are copies of one
//! another look alike: processes of one directory share one registry.)
//!
//! A serving process that *lies* can: by sending back each token with the root of old it keeps the
//! list of old in force in its followers, for as long as it serves. On a store that can seal, their
//! adds are then refused by slots that are closed, or go where they are still counted until
//! [`Salt::grave`](crate::Salt::grave) is over; elsewhere they may be missing from sums. By the kernel's
//! word it is a process of this user, or of one that was [allowed](super::Options::allow_uid): such
//! a process could as well write to the registry, or to the counters, itself. Whoever does not want
//! to rely on it is [`watch_only`](super::Options::watch_only), and reads by itself.

use super::stats::{Counters, count};
use super::wire::Message;
use crate::engine::control::carried::{Asking, Rounds};
use crate::engine::control::registry::Root;
use crate::engine::time::Tick;
use crate::feed::local::Local;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// The last read for all: whom to answer with which token, and what was read.
#[derive(Clone, Default)]
pub(super) struct Told {
    tokens: Arc<BTreeMap<u64, u64>>,
    root: Root,
}

impl Told {
    /// The answer to one follower, if it had asked.
    pub(super) fn to(&self, follower: u64) -> Option<Message> {
        let token = self.tokens.get(&follower)?;
        Some(Message::Root(*token, self.root.encode()))
    }
}

/// The serving process's side.
#[derive(Default)]
pub(super) struct Serving {
    rounds: Mutex<Rounds>,
    told: watch::Sender<Told>,
}

impl Serving {
    pub(super) fn subscribe(&self) -> watch::Receiver<Told> {
        self.told.subscribe()
    }

    pub(super) fn ask(&self, follower: u64, token: u64) {
        self.rounds.lock().ask(follower, token);
    }

    pub(super) fn forget(&self, follower: u64) {
        self.rounds.lock().forget(follower);
    }

    /// Begins to read, if it is time.
    pub(super) fn turn(&self, local: &dyn Local, counters: &Counters, reading: &mut Reading) {
        let Some((now, lease)) = local.lease() else { return };
        if self.rounds.lock().begin(now, lease) {
            count(&counters.roots_read, 1);
            reading.0 = local.read_root();
            if reading.0.is_none() {
                self.end(None);
            }
        }
    }

    /// The read has ended.
    pub(super) fn end(&self, root: Option<Root>) {
        let tokens = self.rounds.lock().end(root.is_some());
        if let Some(root) = root {
            self.told.send_replace(Told { tokens: Arc::new(tokens), root });
        }
    }
}

/// A read for all that is under way.
#[derive(Default)]
pub(super) struct Reading(Option<oneshot::Receiver<Root>>);

impl Reading {
    /// What was read, when it is; `None` if that failed. Waits for ever where nothing is read.
    ///
    /// # Cancel safety
    /// Dropped before its end, it has lost nothing.
    pub(super) async fn done(&mut self) -> Option<Root> {
        let Some(reading) = &mut self.0 else { return pending().await };
        let root = reading.await.ok();
        self.0 = None;
        root
    }
}

/// A follower's side, for one connection.
pub(super) struct Following {
    asking: Asking,
    /// Nothing is asked for.
    off: bool,
}

impl Following {
    pub(super) fn new(seed: u64, off: bool) -> Following {
        Following { asking: Asking::new(seed), off }
    }

    fn lease(&self, local: &dyn Local) -> Option<(Tick, Duration)> {
        if self.off { None } else { local.lease() }
    }

    /// The first token, which goes with the greeting.
    pub(super) fn first(&mut self, local: &dyn Local) -> Option<u64> {
        let (now, _) = self.lease(local)?;
        Some(self.asking.ask(now))
    }

    /// The next one, if it is time.
    pub(super) fn next(&mut self, local: &dyn Local) -> Option<Message> {
        let (now, lease) = self.lease(local)?;
        self.asking.is_due(now, lease).then(|| Message::Ask(self.asking.ask(now)))
    }

    /// An answer.
    pub(super) fn answered(&mut self, local: &dyn Local, counters: &Counters, told: (u64, &str)) {
        let from = self.asking.answered(told.0);
        match (from, Root::parse(told.1.as_bytes())) {
            (Some(from), Some(root)) => local.carry(from, root),
            _ => count(&counters.roots_refused, 1),
        }
    }
}
