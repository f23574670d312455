//! Faults that the embedded store can be told to have.

use parking_lot::Mutex;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Faults that may wait in the queue; more are ignored.
const QUEUE_MAX: usize = 1 << 16;
/// Rules of chance; more are ignored.
const RULES_MAX: usize = 256;

/// An operation of the store, by the name of the trait's method.
#[expect(missing_docs, reason = "each is the method of `Store` of the same name")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    Get,
    GetMany,
    GetReplica,
    Put,
    DeleteMany,
    Add,
    CompareAndSet,
    PutIfNewer,
    Seal,
    Open,
    AddOnce,
    PoisonOnce,
    Fold,
    Folded,
    Unfold,
    ClaimLane,
    Take,
    EndHold,
    Holds,
    PushTokens,
    PopToken,
    CountTokens,
    Publish,
    Subscribe,
}

impl Op {
    /// True for an operation that changes nothing.
    #[must_use]
    pub const fn is_read(self) -> bool {
        matches!(
            self,
            Op::Get
                | Op::GetMany
                | Op::GetReplica
                | Op::Folded
                | Op::Holds
                | Op::CountTokens
                | Op::Subscribe
        )
    }
}

/// Which operations a fault strikes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum On {
    /// All of them.
    Any,
    /// Those that change nothing.
    Reads,
    /// Those that change something.
    Writes,
    /// One of the trait's methods.
    Only(Op),
}

impl On {
    fn strikes(self, op: Op) -> bool {
        match self {
            On::Any => true,
            On::Reads => op.is_read(),
            On::Writes => !op.is_read(),
            On::Only(only) => only == op,
        }
    }
}

/// What goes wrong with one call. What is said of writes holds for reads without the `Unknown`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The call takes this much longer, and then succeeds.
    Delay(Duration),
    /// An error; the write is not applied and says so.
    NotApplied,
    /// An error of unknown outcome; the write was applied.
    UnknownApplied,
    /// An error of unknown outcome; the write was not and will not be applied.
    UnknownNotApplied,
    /// An error of unknown outcome; the write is applied this much later.
    UnknownLater(Duration),
    /// The write is applied, and the call never returns.
    LostReply,
    /// Nothing is applied, and the call never returns.
    Hang,
    /// The call panics before anything is applied.
    Panic,
}

/// The handle on an embedded store's faults. Clones are handles to the same script.
///
/// # Example
/// ```
/// # use heatsink::store::memory::{Fault, MemoryStore, On, Op};
/// let store = MemoryStore::new(1);
/// store.faults().next(On::Only(Op::Get), Fault::NotApplied);
/// store.faults().chance(On::Writes, 0.01, Fault::UnknownApplied);
/// ```
#[derive(Clone)]
pub struct Faults(Arc<Inner>);

struct Inner {
    /// False while the script is empty, so that a healthy store pays one load.
    armed: AtomicBool,
    struck: AtomicU64,
    script: Mutex<Script>,
}

struct Script {
    queue: VecDeque<(On, Fault)>,
    rules: Vec<(On, f64, Fault)>,
    rng: Xoshiro256PlusPlus,
}

impl Faults {
    pub(super) fn new(seed: u64) -> Faults {
        Faults(Arc::new(Inner {
            armed: AtomicBool::new(false),
            struck: AtomicU64::new(0),
            script: Mutex::new(Script {
                queue: VecDeque::new(),
                rules: Vec::new(),
                rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            }),
        }))
    }

    /// The next operation of this kind has this fault. Calls line up, each for one operation.
    pub fn next(&self, on: On, fault: Fault) {
        self.next_n(on, 1, fault);
    }

    /// The next `n` operations of this kind have this fault.
    pub fn next_n(&self, on: On, n: usize, fault: Fault) {
        let mut script = self.0.script.lock();
        let n = n.min(QUEUE_MAX - script.queue.len());
        script.queue.extend(std::iter::repeat_n((on, fault), n));
        self.arm(&script);
    }

    /// Each operation of this kind has this fault with this probability, drawn from the seed.
    pub fn chance(&self, on: On, probability: f64, fault: Fault) {
        let mut script = self.0.script.lock();
        if script.rules.len() < RULES_MAX {
            script.rules.push((on, probability, fault));
        }
        self.arm(&script);
    }

    /// No more faults from here on. Those under way take their course.
    pub fn clear(&self) {
        let mut script = self.0.script.lock();
        script.queue.clear();
        script.rules.clear();
        self.arm(&script);
    }

    /// How many operations had a fault so far.
    #[must_use]
    pub fn struck(&self) -> u64 {
        self.0.struck.load(Ordering::Relaxed)
    }

    fn arm(&self, script: &Script) {
        let armed = !script.queue.is_empty() || !script.rules.is_empty();
        self.0.armed.store(armed, Ordering::Release);
    }

    pub(super) fn draw(&self, op: Op) -> Option<Fault> {
        if !self.0.armed.load(Ordering::Acquire) {
            return None;
        }
        let mut script = self.0.script.lock();
        let Script { queue, rules, rng } = &mut *script;
        let fault = match queue.iter().position(|(on, _)| on.strikes(op)) {
            Some(at) => queue.remove(at).map(|(_, fault)| fault),
            None => rules
                .iter()
                .find(|(on, p, _)| on.strikes(op) && unit(rng) < *p)
                .map(|(_, _, fault)| *fault),
        };
        self.arm(&script);
        if fault.is_some() {
            self.0.struck.fetch_add(1, Ordering::Relaxed);
        }
        fault
    }
}

/// A number in [0, 1), of 53 random bits.
fn unit(rng: &mut Xoshiro256PlusPlus) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let script = self.0.script.lock();
        f.debug_struct("Faults")
            .field("queued", &script.queue.len())
            .field("rules", &script.rules)
            .field("struck", &self.struck())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_faults_strike_their_kind_once_and_chances_follow_the_seed() {
        let faults = Faults::new(7);
        faults.next(On::Only(Op::Add), Fault::Hang);
        assert_eq!(faults.draw(Op::Get), None);
        assert_eq!(faults.draw(Op::Add), Some(Fault::Hang));
        assert_eq!(faults.draw(Op::Add), None);
        let run = |seed| {
            let faults = Faults::new(seed);
            faults.chance(On::Any, 0.5, Fault::Panic);
            (0..64).map(|_| faults.draw(Op::Put).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}
