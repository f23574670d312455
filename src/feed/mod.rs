//! One hot list for many processes: those of a host through a socket, those of a fleet through the
//! store. (Feature `feed`.)
//!
//! A process alone sees its part of a key's traffic. With a feed, processes report what they see,
//! one of them adds the reports up and decides, and all obey the same versioned list within a
//! second or two. It fails safe: a list runs out by itself unless heartbeats come, on the
//! receiver's own clock, and every process goes by its own detection again.
//!
//! - [`Heatsink::serve_feed`]: the processes of one host, in a directory of their user's. One of
//!   them serves; when it ends, another takes over within milliseconds.
//! - [`follow`]: the same list for a process without any handle of heatsink, and a way to report
//!   into it. Any language can: `examples/follow.py` is 30 lines.
//! - [`Heatsink::join_fleet`]: the processes of all hosts, through a store or a [`Transport`].
//! - [`Heatsink::serve_feed_with`] with a [`Fleet`]: both; the serving process is the relay of its
//!   host.
//!
//! - [`Fleet::within`]: a fleet that is one region of a larger one. Its aggregator reports to the
//!   one above, and puts that one's list on its own.
//!
//! Nothing of this runs, and nothing is written anywhere, unless it is asked for.
//!
//! # What operators say
//!
//! An [`Order`] pins a key, sets its treatment (slots, copies, shedding, or how long a value may be
//! served), or denies it. [`Operator`] and the command `heatsink` give it on a host,
//! [`Membership::order`] in a process; where the host is part of a fleet it is the whole fleet's,
//! unless it is said to be the host's alone. A fleet's orders are one document in the store, with a
//! version; the aggregator reads it and puts what it says on the list. They hold for a day, or as
//! long as each says, seven days at most, and where a list is in force. A host's own hold until
//! they are taken back, or the last of its processes has ended.
//!
//! In order of precedence: a denial, whoever gave it; what this process's own operator has pinned
//! or scheduled ([`Control`](crate::Control)); the host's orders; the fleet's; what the fleet has
//! found, then the host, then the process. A process does only what it is set up for: slots need
//! [`Builder::salt`](crate::Builder::salt), shedding [`Builder::admission`](crate::Builder::admission),
//! and copies are always of its own making; what it leaves undone is counted in
//! [`FeedStats::unobeyed`].
//!
//! Lists of keys that are known beforehand come from a file or the store and are taken up again
//! when they change: [`Heatsink::follow_known`].
//!
//! # What is on the wire
//!
//! Lines of JSON. A follower connects to `feed.sock` and gets `{"list":{…}}` when a verdict has
//! changed, `{"beat":{…}}` when it connects and when the terms on it change, and otherwise every 0.5
//! to 2 s `{"stands":[incarnation,version,sent_ms,canary_ms]}`. It may send
//! `{"hello":{"rates":true}}` for `{"rates":{…}}` once a second, `{"report":{…}}` (or
//! `{"quiet":[process,incarnation,window,sent_ms]}` when it was asked for nothing), and for each
//! list `{"ack":{…}}` or `{"nack":{…}}`. A follower with salted counters adds `"ask":token` to its
//! greeting, is answered `{"root":[token,root]}` with the root of the registry as it was read after
//! that, and sends `{"ask":token}` for the next. Operators' commands go to `admin.sock`: `{"list":{}}`,
//! `{"explain":{"key":"post:9"}}`, `{"pin":…}`, `{"unpin":…}`, `{"deny":…}`, `{"allow":…}`,
//! `{"override":{"key":"likes:9","treatment":"salt","slots":16,"lasts_ms":60000}}`; each is answered
//! with `{"ok":…}` or `{"error":"…"}`.
//!
//! # Who may take part
//!
//! The directory is the boundary: of mode 0700, owned by this process's user, no symbolic link, and
//! never a default. Each side asks the kernel for the other's user. What is inside is input all the
//! same: [`Caps`] hold on the receiver's side, one reporter cannot make a key hot for the others
//! where there are three, and whatever is refused is counted in [`FeedStats`]. In a fleet the boundary
//! is the store's: whoever may write below the fleet's prefix may speak for any of its processes.

mod admin;
mod dir;
mod fleet;
mod group;
mod known;
mod lines;
mod local;
mod node;
mod operator;
mod options;
mod order;
mod reload;
mod roots;
mod serve;
mod stats;
mod wire;

pub use crate::engine::control::fleet::{Edition, FleetKey, FleetList};
pub use crate::engine::control::follow::{ALL_REFUSALS, Caps, Refusal};
pub use fleet::{Fleet, Membership, ThroughStore, Transport};
pub use known::Known;
pub use operator::Operator;
pub use options::Options;
pub use order::Order;
pub use reload::{KnownList, KnownSource, KnownStats};
pub use stats::FeedStats;
pub(crate) use stats::Numbers;

use crate::engine::control::detect::Sample;
use crate::engine::control::follow::Follower;
use crate::engine::control::merge::Report;
use crate::engine::control::reporter::{ENTRIES_MAX, Reporter};
use crate::engine::time::Tick;
use crate::error::{Error, Result};
use crate::heatsink::Heatsink;
use crate::runtime::{Clock, spawn_thread, wall_seed};
use ahash::RandomState;
use dir::Dir;
use local::{Handle, Local};
use node::Node;
use parking_lot::Mutex;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use tokio::sync::{oneshot, watch};

impl Heatsink {
    /// Shares the hot list with the processes of this host that call this with the same directory:
    /// all report, one serves, all obey. Runs until what is returned, or the last handle, is
    /// dropped.
    ///
    /// The directory is made, with mode 0700, if it is not there; its parent must be. A good place
    /// is below `/run` or `$XDG_RUNTIME_DIR`.
    ///
    /// # Cost
    /// A thread, a sketch of 400 KiB, less than 1 KiB/s of traffic on each socket while nothing is
    /// hot. Store operations: 0; with [`Salt`](crate::Salt) fewer than without a feed, since the
    /// serving process reads the root of the registry for all, every fifth of a lease. Where the
    /// registry has no list yet, it writes an empty one and its root, once.
    ///
    /// # Errors
    /// [`Config`](crate::ErrorKind::Config) when the directory cannot be trusted, or when this handle
    /// has a feed already.
    ///
    /// # Example
    /// ```
    /// # use heatsink::{Heatsink, store::MemoryStore};
    /// # let dir = std::env::temp_dir().join(format!("heatsink-doc-{}", std::process::id()));
    /// let hs = Heatsink::new(MemoryStore::new(8))?;
    /// let feed = hs.serve_feed(&dir)?;
    /// println!("{}", feed.stats());
    /// # drop(feed);
    /// # let _ = std::fs::remove_dir_all(dir);
    /// # Ok::<(), heatsink::Error>(())
    /// ```
    pub fn serve_feed(&self, dir: impl AsRef<Path>) -> Result<Feed> {
        self.serve_feed_with(dir, Options::new(), None)
    }

    /// Like [`serve_feed`](Heatsink::serve_feed), with options; with a fleet, whoever serves is
    /// the host's relay to it.
    ///
    /// # Errors
    /// As [`serve_feed`](Heatsink::serve_feed).
    pub fn serve_feed_with(
        &self,
        dir: impl AsRef<Path>,
        options: Options,
        fleet: Option<Fleet>,
    ) -> Result<Feed> {
        options.check()?;
        fleet.as_ref().map_or(Ok(()), Fleet::check)?;
        let dir = Dir::make(dir.as_ref(), &options.allowed)?;
        let local = Arc::new(Handle::new(self.shared(), options.report, options.obey)?);
        Feed::start(local, dir, options, fleet, self.shared().roll(), false)
    }
}

/// A process's part in its host's feed. Dropping it ends that.
#[must_use = "dropping it ends the feed"]
pub struct Feed {
    node: Arc<Node>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Feed {
    fn start(
        local: Arc<dyn Local>,
        dir: Dir,
        options: Options,
        fleet: Option<Fleet>,
        roll: u64,
        rates: bool,
    ) -> Result<Feed> {
        let failed = |e| Error::config("the feed's thread did not start").with_source(e);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let node = Arc::new(Node {
            local,
            dir,
            follower: Mutex::new(Follower::new(options.caps)),
            options,
            fleet,
            // Any language can hold 53 bits.
            id: roll >> 11,
            rates,
            counters: stats::Counters::default(),
            reports: Mutex::default(),
            relay: Mutex::default(),
            shown: watch::Sender::new(None),
            connections: AtomicU64::new(0),
        });
        let numbers: Weak<Node> = Arc::downgrade(&node);
        node.local.is_told_by(numbers);
        let (stop, stopped) = oneshot::channel();
        let running = node.clone();
        let thread = spawn_thread("heatsink-feed", move || {
            let ending = Ending(running);
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = ending.0.run() => {}
                }
            });
        });
        Ok(Feed { node, stop: Some(stop), thread: Some(thread.map_err(failed)?) })
    }

    /// The list in force.
    #[must_use]
    pub fn list(&self) -> Option<Arc<FleetList>> {
        self.node.shown.borrow().clone()
    }

    /// Plain numbers about it.
    #[must_use]
    pub fn stats(&self) -> FeedStats {
        self.node.stats()
    }

    /// The same about its part in the fleet, while this process is its host's relay.
    #[must_use]
    pub fn fleet_stats(&self) -> Option<FeedStats> {
        self.node.relay.lock().as_ref().map(|relay| relay.stats())
    }
}

/// However the thread ends: without a feed, a process goes by its own detection.
struct Ending(Arc<Node>);

impl Drop for Ending {
    fn drop(&mut self) {
        let Ending(node) = self;
        let relay = node.relay.lock().take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(relay)));
        node.stop();
        let _ = catch_unwind(AssertUnwindSafe(|| node.local.release()));
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        drop(self.stop.take());
        // On the feed's own thread (a waker that runs its task in place), it cannot wait for itself.
        let thread = self.thread.take();
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Feed({})", self.stats())
    }
}

/// For fuzzing: reads a line as every end of the feed does; the list on it, if it is one.
///
/// # Errors
/// What is no line of the feed.
#[cfg(feature = "testing")]
#[doc(hidden)]
pub fn read_line(line: &[u8]) -> std::result::Result<Option<FleetList>, Refusal> {
    use wire::Message;
    Ok(match wire::read(line)? {
        Message::List(list) | Message::Rates(list) => Some(list.read().0),
        Message::Beat(beat) => {
            let _ = Follower::new(Caps::default()).handle_heartbeat(Tick(1), 1, &beat.read());
            None
        }
        Message::Lease(lease) => {
            let _ = Follower::new(Caps::default()).handle_heartbeat(Tick(1), 1, &lease.read());
            None
        }
        other => {
            if let Some((from, _, report)) = wire::read_report(other) {
                let options = Options::new().aggregate();
                let mut group = crate::engine::control::aggregate::Aggregator::new(options);
                let _ = group.handle_report(Tick(1), from, report);
            }
            None
        }
    })
}

/// For fuzzing: the line that a list is sent as.
#[cfg(feature = "testing")]
#[doc(hidden)]
#[must_use]
pub fn write_line(list: &FleetList) -> Vec<u8> {
    wire::line(&wire::Message::List(wire::List::of(list)))
}

/// Follows the list that is served in `dir`, without a handle of heatsink.
///
/// # Errors
/// [`Config`](crate::ErrorKind::Config) when the directory is not there or cannot be trusted.
///
/// # Example
/// ```no_run
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let mut feed = heatsink::feed::follow("/run/shop/heatsink")?;
/// while let Some(list) = feed.next().await {
///     println!("{list}");
/// }
/// # Ok::<(), heatsink::Error>(()) }).unwrap();
/// ```
pub fn follow(dir: impl AsRef<Path>) -> Result<Following> {
    follow_with(dir, Options::new())
}

/// Like [`follow`], with options: which users to trust, what to accept of a list.
///
/// # Errors
/// As [`follow`].
pub fn follow_with(dir: impl AsRef<Path>, options: Options) -> Result<Following> {
    options.check()?;
    let dir = Dir::open(dir.as_ref(), &options.allowed)?;
    let (clock, seed) = (Clock::system(), wall_seed());
    let outside = Arc::new(Outside {
        hasher: RandomState::with_seeds(seed, !seed, seed.rotate_left(32), 0x5eed),
        reporter: Mutex::new(Reporter::new(clock.now(), seed)),
        clock,
    });
    let options = options.never_serve();
    let feed = Feed::start(outside.clone(), dir, options, None, seed, true)?;
    let news = feed.node.shown.subscribe();
    Ok(Following { feed, outside, news, seen: None })
}

/// Follows a list. See [`follow`].
pub struct Following {
    feed: Feed,
    outside: Arc<Outside>,
    news: watch::Receiver<Option<Arc<FleetList>>>,
    seen: Option<Edition>,
}

impl Following {
    /// The next list with other verdicts; a slow follower gets only the newest. An empty one where
    /// the list has run out. `None` when the feed has ended.
    ///
    /// # Cancel safety
    /// Dropping the future loses no change: the next call returns it.
    pub async fn next(&mut self) -> Option<Arc<FleetList>> {
        loop {
            let now = self.news.borrow_and_update().clone();
            let edition = now.as_ref().map(|list| list.edition);
            if edition != self.seen {
                self.seen = edition;
                return Some(now.unwrap_or_default());
            }
            self.news.changed().await.ok()?;
        }
    }

    /// The list in force, with present rates; `None` while there is none.
    #[must_use]
    pub fn list(&self) -> Option<Arc<FleetList>> {
        self.feed.list()
    }

    /// Reports that this process asked its store for `key`, with the others' traffic.
    pub fn observe(&self, key: impl AsRef<[u8]>, write: bool) {
        let key = key.as_ref();
        let mut hasher = self.outside.hasher.build_hasher();
        hasher.write(key);
        let hash = hasher.finish();
        let sample = Sample { hash, key, write, weight: 1, loaded: true, one_in: 1 };
        self.outside.reporter.lock().handle_sample(&sample);
    }

    /// Plain numbers about it.
    #[must_use]
    pub fn stats(&self) -> FeedStats {
        self.feed.stats()
    }
}

impl fmt::Debug for Following {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Following({})", self.stats())
    }
}

/// A process without a handle.
struct Outside {
    clock: Clock,
    hasher: RandomState,
    reporter: Mutex<Reporter>,
}

impl Local for Outside {
    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    fn take_report(&self, now: Tick, floor_per_sec: f64) -> Option<Report> {
        self.reporter.lock().take(now, floor_per_sec, ENTRIES_MAX)
    }

    fn apply(&self, _: Option<(&Arc<FleetList>, Tick)>) {}

    fn explain(&self, _: &[u8]) -> Option<String> {
        None
    }

    fn alive(&self) -> bool {
        true
    }

    fn release(&self) {}
}
