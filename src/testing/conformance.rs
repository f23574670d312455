//! The store conformance suite: proves in one test that a store keeps the promises of
//! [`Store`], the required ones and those its [`Capability`] names.
//!
//! A store's author runs it against a real instance:
//! ```
//! # use heatsink::store::MemoryStore;
//! # use heatsink::testing::conformance;
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
//! let report = conformance(MemoryStore::new(3), "conformance:").await;
//! report.assert_passed();
//! # });
//! ```

macro_rules! checks {
    ($report:ident, $cx:ident, $area:literal: $($name:literal => $check:path),+ $(,)?) => {
        $( $report.check($cx, $area, $name, $check).await; )+
    };
}

mod checks;
mod once;
mod optional;
mod signals;
mod stock;
mod tokens;

use crate::runtime::{Runtime, ambient};
use crate::store::{Capability, Id, Store};
use crate::{Error, Key};
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Runs every check on `store`, under keys that begin with `prefix`, on the caller's runtime.
///
/// No key under `prefix` may exist: an id of `add_once` once used stays used. The suite deletes
/// the plain keys that it wrote.
pub async fn conformance(store: impl Store, prefix: &str) -> Report {
    Suite::new(store, prefix).run().await
}

/// The conformance suite with its options.
#[must_use]
pub struct Suite<S> {
    store: Arc<S>,
    prefix: String,
    runtime: Arc<dyn Runtime>,
    timeout: Duration,
    ttl: Duration,
}

impl<S: Store> Suite<S> {
    /// A suite over `store` whose keys begin with `prefix`.
    pub fn new(store: S, prefix: &str) -> Suite<S> {
        Suite {
            store: Arc::new(store),
            prefix: prefix.into(),
            runtime: ambient(),
            timeout: Duration::from_secs(10),
            ttl: Duration::from_millis(400),
        }
    }

    /// Where the suite's tasks run and its waits are spent. Default: the caller's runtime.
    pub fn runtime(mut self, runtime: impl Runtime) -> Self {
        self.runtime = Arc::new(runtime);
        self
    }

    /// How long one check may take; then it has failed. Default: 10 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The time to live that the checks of expiry use. Larger for a store with a coarse clock.
    /// Default: 400 ms.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Runs every check, one after the other.
    pub async fn run(self) -> Report {
        let cx = Cx {
            store: self.store,
            prefix: self.prefix,
            runtime: self.runtime,
            ttl: self.ttl,
            area: "",
        };
        let mut report =
            Report { capability: cx.store.capability(), checks: Vec::new(), timeout: self.timeout };
        checks::run(&cx, &mut report).await;
        optional::run(&cx, &mut report).await;
        report
    }
}

impl<S> fmt::Debug for Suite<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Suite").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// What came of one check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The store keeps this promise.
    Passed,
    /// It does not; what was seen.
    Failed(String),
}

/// One check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Check {
    /// The promise, as a sentence.
    pub name: &'static str,
    /// The operation or capability that it belongs to.
    pub area: &'static str,
    /// What came of it.
    pub verdict: Verdict,
}

/// What came of a run of the suite. Prints as a table.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Report {
    /// What the store said it can do.
    pub capability: Capability,
    /// The checks, in the order in which they ran.
    pub checks: Vec<Check>,
    timeout: Duration,
}

impl Report {
    /// The checks that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|c| c.verdict != Verdict::Passed)
    }

    /// True when all checks passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.failures().next().is_none()
    }

    /// Panics with the table when a check failed.
    ///
    /// # Panics
    /// When a check failed.
    pub fn assert_passed(&self) {
        assert!(self.passed(), "the store breaks its promises:\n{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wide = self.checks.iter().map(|c| c.area.len()).max().unwrap_or(0);
        for check in &self.checks {
            let (mark, seen) = match &check.verdict {
                Verdict::Passed => ("ok    ", String::new()),
                Verdict::Failed(why) => ("FAILED", format!("\n{:>w$}{why}", "", w = wide + 10)),
            };
            writeln!(f, "{mark}  {:wide$}  {}{seen}", check.area, check.name)?;
        }
        let failed = self.failures().count();
        write!(f, "{} checks, {failed} failed", self.checks.len())
    }
}

/// What a check works with.
struct Cx<S> {
    store: Arc<S>,
    prefix: String,
    runtime: Arc<dyn Runtime>,
    ttl: Duration,
    area: &'static str,
}

impl<S> Clone for Cx<S> {
    fn clone(&self) -> Self {
        Cx {
            store: self.store.clone(),
            prefix: self.prefix.clone(),
            runtime: self.runtime.clone(),
            ttl: self.ttl,
            area: self.area,
        }
    }
}

/// What a check returns: what was seen where the promise was broken.
type Seen = Result<(), String>;

impl<S: Store> Cx<S> {
    fn key(&self, name: &str) -> Key {
        Key::from(format!("{}{}:{name}", self.prefix, self.area))
    }

    fn id(&self, name: &str) -> Id {
        self.key(name).into()
    }

    async fn sleep(&self, duration: Duration) {
        self.runtime.sleep(duration).await;
    }

    /// The bytes under a key.
    async fn bytes(&self, key: &Key) -> Result<Option<bytes::Bytes>, String> {
        Ok(ok("get", self.store.get(key).await)?.map(|s| s.bytes))
    }

    /// Runs `n` tasks on the runtime and waits for all of them.
    async fn together<T: Send + 'static, F>(
        &self,
        n: usize,
        task: impl Fn(Cx<S>, usize) -> F,
    ) -> Result<Vec<T>, String>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let done = Arc::new(parking_lot::Mutex::new((Vec::new(), None::<std::task::Waker>)));
        for i in 0..n {
            let (work, done) = (task(self.clone(), i), done.clone());
            self.runtime.spawn(Box::pin(async move {
                let out = work.await;
                let mut done = done.lock();
                done.0.push(out);
                let waker = done.1.take();
                drop(done);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }));
        }
        std::future::poll_fn(|cx| {
            let mut done = done.lock();
            if done.0.len() == n {
                return Poll::Ready(Ok(std::mem::take(&mut done.0)));
            }
            done.1 = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl Report {
    /// Runs one check with its time limit; a panic of the store is a failure, not the end.
    async fn check<S: Store, F>(
        &mut self,
        cx: &Cx<S>,
        area: &'static str,
        name: &'static str,
        check: impl FnOnce(Cx<S>) -> F,
    ) where
        F: Future<Output = Seen> + Send,
    {
        let cx = Cx { area, ..cx.clone() };
        let mut limit = cx.runtime.sleep(self.timeout);
        let mut work = pin!(check(cx));
        let seen = std::future::poll_fn(|task| {
            let polled = std::panic::catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(task)));
            match polled {
                Err(_) => Poll::Ready(Err("the store panicked".into())),
                Ok(Poll::Ready(seen)) => Poll::Ready(seen),
                Ok(Poll::Pending) => Pin::new(&mut limit)
                    .poll(task)
                    .map(|()| Err(format!("no answer within {:?}", self.timeout))),
            }
        })
        .await;
        let verdict = seen.map_or_else(Verdict::Failed, |()| Verdict::Passed);
        self.checks.push(Check { name, area, verdict });
    }
}

fn ok<T>(what: &str, result: Result<T, Error>) -> Result<T, String> {
    result.map_err(|e| format!("{what} failed: {e:?}"))
}

fn same<T: PartialEq + fmt::Debug>(what: &str, got: &T, want: &T) -> Seen {
    if got == want {
        return Ok(());
    }
    let cut = |v: &T| format!("{v:?}").chars().take(200).collect::<String>();
    Err(format!("{what}: got {}, want {}", cut(got), cut(want)))
}

/// An error of this kind that says that nothing was applied.
fn refused<T: fmt::Debug>(what: &str, got: Result<T, Error>, kind: crate::ErrorKind) -> Seen {
    match got {
        Err(e) if e.kind() == kind && !e.is_unknown() => Ok(()),
        other => Err(format!("{what}: got {other:?}, want {kind:?}, not applied")),
    }
}
