//! A limit that many processes share, over the store that they share.

use crate::batch::bounded;
use crate::call;
use crate::engine::control::leasing::{Lessee, Record, Settled, Terms, Without};
use crate::error::{Error, ErrorKind, Result, Retry};
use crate::heatsink::Heatsink;
use crate::key::Key;
use crate::names::Part;
use crate::shared::Shared;
use crate::sync::{AtomicBool, Mutex, Ordering};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Times that one request is tried while others write the record in between.
const TRIES: usize = 8;

/// The store forgets a limit that nobody has used for this long.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 3_600);

/// A limit that the processes of a service share. See [`Heatsink::limiter`].
///
/// # Example
/// ```
/// # use heatsink::{Limit, Without};
/// # use std::time::Duration;
/// let limit = Limit::per_sec(10_000).slack_permille(50).without(Without::SafeShare { processes: 50 });
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Limit {
    tokens: u32,
    span: Duration,
    slack_permille: u16,
    lease: Duration,
    without: Without,
}

impl Limit {
    /// `tokens` in every `span`.
    #[must_use]
    pub fn new(tokens: u32, span: Duration) -> Limit {
        let lease = Duration::from_secs(1);
        Limit { tokens, span, slack_permille: 100, lease, without: Without::Refuse }
    }

    /// `tokens` a second.
    #[must_use]
    pub fn per_sec(tokens: u32) -> Limit {
        Limit::new(tokens, Duration::from_secs(1))
    }

    /// By how many thousandths all processes together may exceed the limit in a window that is no
    /// shorter than the span; at least two tokens. The smaller, the more often each process asks
    /// the store. Default: 100.
    #[must_use]
    pub fn slack_permille(mut self, permille: u16) -> Limit {
        self.slack_permille = permille;
        self
    }

    /// How long a block of tokens is good for, and how long a new or lost record grants nothing. A
    /// process that needs tokens asks the store about twice in that time. Default: 1 s.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Limit {
        self.lease = lease;
        self
    }

    /// What becomes of calls while the store cannot be reached. Default: they are refused.
    #[must_use]
    pub fn without(mut self, choice: Without) -> Limit {
        self.without = choice;
        self
    }
}

/// One process's part of a shared limit. Made by [`Heatsink::limiter`]; clones are handles to the
/// same part.
#[derive(Clone)]
pub struct Limiter(Arc<Inner>);

struct Inner {
    hs: Heatsink,
    name: Key,
    record: Key,
    terms: Terms,
    lessee: Mutex<Lessee>,
    asking: AtomicBool,
}

impl Heatsink {
    /// This process's part of the limit under `name`. All processes that pass the same name and the
    /// same [`Limit`] over the same store share it; keep the handle, each is a part of its own.
    ///
    /// # Cost
    /// Store operations: 0 here; a read and a compare-and-set for each block of tokens, not for
    /// each call.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported): the store has no `compare_and_set`.
    /// [`Config`](ErrorKind::Config) says what is wrong with the limit.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, Limit, store::MemoryStore};
    /// # use std::time::Duration;
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let mails = hs.limiter("mails", Limit::per_sec(1_000).lease(Duration::from_millis(100)))?;
    /// mails.take(1, Duration::from_secs(5)).await?;
    /// if mails.try_take(1).is_err() { /* later */ }
    /// # Ok::<(), heatsink::Error>(()) }).unwrap();
    /// ```
    pub fn limiter(&self, name: impl AsRef<[u8]>, limit: Limit) -> Result<Limiter> {
        let shared = self.shared();
        if !shared.store.capability().compare_and_set {
            return Err(Error::unsupported("compare_and_set"));
        }
        let Limit { tokens, span, slack_permille, lease, without } = limit;
        let terms = Terms::new(tokens, span, slack_permille, lease, without);
        let terms = terms.map_err(Error::config)?;
        let name = Key::copy(name.as_ref());
        crate::adds::check_key(&name)?;
        let lessee = Mutex::new(Lessee::new(terms, shared.clock.precise()));
        let (record, asking) = (Part::Limit.of(&name), AtomicBool::new(false));
        Ok(Limiter(Arc::new(Inner { hs: self.clone(), name, record, terms, lessee, asking })))
    }
}

impl Limiter {
    /// Takes `n` tokens out of those that this process holds.
    ///
    /// # Cost
    /// Store operations: 0 on the way; a new block is asked for in the background when what is held
    /// runs low.
    ///
    /// # Errors
    /// [`Shed`](ErrorKind::Shed) with [`Retry::After`]; nothing was taken. The first call holds
    /// nothing yet. [`Limit`](ErrorKind::Limit): more than a quarter of the slack.
    pub fn try_take(&self, n: u32) -> Result<()> {
        let this = &self.0;
        if u64::from(n) > (this.terms.burst / 2).max(1) {
            let text = "more tokens than a quarter of the slack are never granted at once";
            return Err(Error::not_applied(ErrorKind::Limit, text).with_key(&this.name));
        }
        let now = this.shared().clock.precise();
        let mut lessee = this.lessee.lock();
        let taken = lessee.take(now, n);
        let wants = lessee.wants(now);
        drop(lessee);
        if wants && !this.asking.swap(true, Ordering::AcqRel) {
            let asking = Asking(this.clone());
            this.shared().runtime.spawn(Box::pin(async move { asking.0.ask().await }));
        }
        taken.map_err(|wait| {
            Error::not_applied(ErrorKind::Shed, "the shared limit is reached")
                .with_retry(Retry::After(wait))
                .with_key(&this.name)
        })
    }

    /// Like [`try_take`](Limiter::try_take), and waits up to `wait_max` for tokens.
    ///
    /// # Cancel safety
    /// A dropped call has taken nothing.
    ///
    /// # Errors
    /// As [`try_take`](Limiter::try_take), once waiting is no use within `wait_max`.
    pub async fn take(&self, n: u32, wait_max: Duration) -> Result<()> {
        let shared = self.0.shared();
        let end = shared.clock.precise().after(wait_max);
        loop {
            let Err(error) = self.try_take(n) else { return Ok(()) };
            let Retry::After(wait) = error.retry() else { return Err(error) };
            if shared.clock.precise().after(wait) > end {
                return Err(error);
            }
            shared.runtime.sleep(wait).await;
        }
    }

    /// Tokens that this process holds now.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.0.lessee.lock().held(self.0.shared().clock.precise())
    }
}

/// The one request that is under way.
struct Asking(Arc<Inner>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.asking.store(false, Ordering::Release);
    }
}

impl Inner {
    fn shared(&self) -> &Arc<Shared> {
        self.hs.shared()
    }

    /// Asks for a block.
    async fn ask(&self) {
        for _ in 0..TRIES {
            let Some(wait) = self.try_ask().await else { return };
            self.shared().runtime.sleep(wait).await;
        }
    }

    /// How long to wait before the next try, where somebody else was first.
    async fn try_ask(&self) -> Option<Duration> {
        let shared = self.shared();
        let (clock, dice) = (&shared.clock, shared.roll());
        let asked_at = clock.precise();
        let read = call::catch(shared.store.clone().get(self.record.clone()));
        let read = bounded(shared, self.terms.lease, read).await;
        let now = clock.precise();
        let Some(Ok(Ok(stored))) = read else {
            self.lessee.lock().fail(now, dice);
            return None;
        };
        let expected = stored.map(|stored| stored.bytes);
        let record = expected.as_deref().and_then(Record::decode);
        if expected.is_some() && record.is_none() {
            // Not ours: nothing is written over it.
            self.lessee.lock().fail(now, dice);
            return None;
        }
        let proposal = self.lessee.lock().propose(asked_at, now, record, dice)?;
        let value = proposal.record.encode().into();
        let ttl = Some(FORGOTTEN_AFTER.max(10 * self.terms.lease));
        let write = shared.store.clone().compare_and_set(self.record.clone(), expected, value, ttl);
        let how = match bounded(shared, self.terms.lease, call::catch(write)).await {
            Some(Ok(Ok(true))) => Settled::Won,
            Some(Ok(Ok(false))) => Settled::Lost,
            // Not known to be written: then the tokens are nobody's.
            _ => Settled::Failed,
        };
        let now = clock.precise();
        let mut lessee = self.lessee.lock();
        lessee.settle(now, &proposal, how, dice.rotate_left(32));
        (how == Settled::Lost).then(|| lessee.next_in(now))
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("name", &self.0.name).finish_non_exhaustive()
    }
}
