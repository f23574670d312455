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

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests drive real threads, sockets and clocks")]
mod tests {
    use super::*;
    use crate::feed::wire::{self, Message};
    use crate::feed::{Feed, Options};
    use crate::registry::{Registry, lease_clock};
    use crate::runtime::BoxFuture;
    use crate::store::{Capability, DynStore, MemoryStore};
    use crate::{Heatsink, Key, Result, Salt, Treatment};
    use bytes::Bytes;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::DirBuilderExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
    use std::time::Instant;

    const MS: Duration = Duration::from_millis(1);
    const LEASE: Duration = Duration::from_secs(2);
    const LONG: Duration = Duration::from_secs(10);

    /// The store as a registry that counts reads of its root, and may be out of reach.
    #[derive(Clone)]
    struct Counting {
        store: Arc<dyn DynStore>,
        reads: Arc<AtomicU64>,
    }

    impl Registry for Counting {
        fn read(&self, name: &Key) -> BoxFuture<'static, Result<Option<Bytes>>> {
            if *name == crate::names::root() {
                self.reads.fetch_add(1, SeqCst);
            }
            let got = self.store.clone().get(name.clone());
            Box::pin(async move { Ok(got.await?.map(|stored| stored.bytes)) })
        }

        fn replace(
            &self,
            name: &Key,
            expected: Option<Bytes>,
            value: Bytes,
        ) -> BoxFuture<'static, Result<bool>> {
            self.store.clone().compare_and_set(name.clone(), expected, value, None)
        }
    }

    /// A directory that is removed in the end.
    struct Dir(PathBuf);

    impl Dir {
        fn new() -> Dir {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let n = NEXT.fetch_add(1, SeqCst);
            let name = format!("heatsink-roots-{}-{n}", std::process::id());
            Dir(std::env::temp_dir().join(name))
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    struct Process {
        hs: Heatsink,
        feed: Option<Feed>,
        reads: Arc<AtomicU64>,
    }

    impl Process {
        fn start(store: &MemoryStore, dir: Option<&Dir>, options: Options) -> Process {
            let reads = Arc::new(AtomicU64::new(0));
            let registry = Counting { store: Arc::new(store.clone()), reads: reads.clone() };
            let salt = Salt::new().lease(LEASE).registry(registry);
            let hs = Heatsink::builder(store.clone()).salt(salt).build().unwrap();
            let feed = dir.map(|dir| hs.serve_feed_with(&dir.0, options, None).unwrap());
            Process { hs, feed, reads }
        }

        fn leads(&self) -> bool {
            self.feed.as_ref().is_some_and(|feed| feed.stats().leads)
        }

        fn carried(&self) -> u64 {
            self.hs.salt_stats().renewals_carried
        }

        fn refused(&self) -> u64 {
            self.feed.as_ref().map_or(0, |feed| feed.stats().roots_refused)
        }

        /// How long the lease runs on.
        fn left(&self) -> Duration {
            let shared = self.hs.shared();
            let until = shared.salted.as_ref().unwrap().registrar.with(|c| c.until());
            until.since(lease_clock(&shared.clock))
        }

        /// Whether the list that this process goes by has the key.
        fn lists(&self, key: &str) -> bool {
            let salted = self.hs.shared().salted.as_ref().unwrap();
            salted.registrar.with(|c| c.list().get(&key.into()).is_some())
        }
    }

    #[track_caller]
    fn until(what: &str, mut done: impl FnMut() -> bool) -> Duration {
        let from = Instant::now();
        while !done() {
            assert!(from.elapsed() < LONG, "not within {LONG:?}: {what}");
            std::thread::sleep(2 * MS);
        }
        from.elapsed()
    }

    fn store(seal: bool) -> MemoryStore {
        let capability = Capability { seal, ..Capability::all() };
        MemoryStore::builder().shards(2).capability(capability).build()
    }

    fn reads(all: &[Process]) -> Vec<u64> {
        all.iter().map(|p| p.reads.load(SeqCst)).collect()
    }

    #[test]
    fn a_host_reads_the_root_once_for_all_and_nobodys_lease_ends() {
        let (dir, store) = (Dir::new(), store(true));
        let start = |_| Process::start(&store, Some(&dir), Options::new());
        let mut all: Vec<Process> = (0..8).map(start).collect();
        until("followers hear of the root", || all.iter().all(|p| p.leads() || p.carried() > 1));
        std::thread::sleep(LEASE / 2);
        let watched = |all: &[Process], time: Duration| {
            let from = Instant::now();
            while from.elapsed() < time {
                assert!(all.iter().all(|p| p.left() > Duration::ZERO), "a lease has ended");
                std::thread::sleep(2 * MS);
            }
        };
        let before = reads(&all);
        watched(&all, Duration::from_secs(4));
        let read: Vec<u64> = reads(&all).iter().zip(before).map(|(now, was)| now - was).collect();
        let leader = all.iter().position(Process::leads).unwrap();
        let followers = read.iter().sum::<u64>() - read[leader];
        println!("reads of the root in 4 s: {} by who serves, {followers} by 7", read[leader]);
        assert!((5..=11).contains(&read[leader]), "{read:?}");
        // A machine that stands still for a while makes a process read by itself: that is what
        // keeps its lease.
        assert!(followers <= 3, "{read:?}");
        // A change is known to everybody within a lease.
        all[(leader + 1) % 8].hs.control().pin("likes", Treatment::Salt { slots: 4 }).unwrap();
        until("the change is published", || all.iter().any(|p| p.lists("likes")));
        let took = until("it is known to all", || all.iter().all(|p| p.lists("likes")));
        println!("a change is known to all after {took:?}");
        assert!(took < LEASE, "{took:?}");
        // Whoever serves ends; another one reads for the rest.
        let dead = all.remove(leader);
        drop(dead);
        let carried: Vec<u64> = all.iter().map(Process::carried).collect();
        watched(&all, LEASE * 3 / 2);
        until("another serves", || {
            let more = all.iter().zip(&carried).filter(|(p, was)| p.carried() > **was).count();
            all.iter().any(Process::leads) && more >= 6
        });
        assert!(all.iter().all(|p| p.refused() == 0), "nothing odd was said");
    }

    /// A serving process in the hands of the test.
    struct Served {
        _dir: Dir,
        follower: Process,
        store: MemoryStore,
        lines: BufReader<UnixStream>,
        to: UnixStream,
    }

    impl Served {
        fn new(options: Options) -> Served {
            let (dir, store) = (Dir::new(), store(false));
            std::fs::DirBuilder::new().mode(0o700).create(&dir.0).unwrap();
            let listener = UnixListener::bind(dir.0.join("feed.sock")).unwrap();
            // The registry has a list: another process has salted something.
            let other = Process::start(&store, None, Options::new());
            other.hs.control().pin("likes", Treatment::Salt { slots: 4 }).unwrap();
            until("a list is published", || other.lists("likes"));
            let follower = Process::start(&store, Some(&dir), options.never_serve());
            until("the follower knows of it", || follower.lists("likes"));
            let (to, _) = listener.accept().unwrap();
            to.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let lines = BufReader::new(to.try_clone().unwrap());
            Served { _dir: dir, follower, store, lines, to }
        }

        /// The next token; none when nothing comes for a while.
        fn token(&mut self) -> Option<u64> {
            loop {
                let mut line = String::new();
                if self.lines.read_line(&mut line).is_err() || line.is_empty() {
                    return None;
                }
                match wire::read(line.as_bytes()).unwrap() {
                    Message::Hello(hello) => return hello.ask,
                    Message::Ask(token) => return Some(token),
                    _ => {}
                }
            }
        }

        fn answer(&mut self, token: u64, root: Root) {
            let line = wire::line(&Message::Root(token, root.encode()));
            self.to.write_all(&line).unwrap();
        }

        /// Shows no more than that it is there.
        fn pause(&mut self, time: Duration) {
            let from = Instant::now();
            while from.elapsed() < time {
                self.to.write_all(b"{\"stands\":[1,1,1,1]}\n").unwrap();
                std::thread::sleep(50 * MS);
            }
        }

        fn root(&self) -> Root {
            let store: Arc<dyn DynStore> = Arc::new(self.store.clone());
            let get = store.get(crate::names::root());
            let stored = tokio::runtime::Runtime::new().unwrap().block_on(get).unwrap();
            Root::parse(&stored.unwrap().bytes).unwrap()
        }

        fn until(&self) -> Tick {
            let salted = self.follower.hs.shared().salted.as_ref().unwrap();
            salted.registrar.with(|c| c.until())
        }
    }

    #[test]
    fn what_a_stalled_or_confused_server_says_renews_nothing() {
        let mut served = Served::new(Options::new());
        let first = served.token().expect("the greeting asks");
        served.answer(first, served.root());
        served.pause(200 * MS);
        let before = served.follower.refused();
        // Read, then stopped for longer than the lease, then sent: the token is not out any more.
        let token = served.token().expect("asked again");
        let root = served.root();
        let carried = served.follower.carried();
        served.pause(LEASE + 200 * MS);
        served.answer(token, root);
        until("it is refused", || served.follower.refused() == before + 1);
        assert_eq!(served.follower.carried(), carried);
        // The one that is out now, wrongly, twice, with an old root, and rightly.
        served.to.set_read_timeout(Some(300 * MS)).unwrap();
        let mut token = 0;
        while let Some(newer) = served.token() {
            token = newer;
        }
        served.answer(token ^ 1, root);
        until("never sent", || served.follower.refused() == before + 2);
        served.answer(token, Root { version: root.version - 1, nonce: 7 });
        served.answer(token, root);
        until("answered before", || served.follower.refused() == before + 3);
        assert_eq!(served.follower.carried(), carried, "none of it renewed the lease");
        // It held all the while: the process has read by itself.
        assert!(served.follower.left() > Duration::ZERO);
    }

    #[test]
    fn a_late_answer_renews_from_when_it_was_asked_for() {
        let mut served = Served::new(Options::new());
        for _ in 0..20 {
            let token = served.token().expect("asked");
            // The follower may have read by itself since; then this answer is nothing new.
            let (root, asked) = (served.root(), Instant::now());
            served.pause(300 * MS);
            let (carried, late) = (served.follower.carried(), asked.elapsed());
            served.answer(token, root);
            served.pause(50 * MS);
            if served.follower.carried() > carried {
                assert!(served.follower.left() + late <= LEASE, "{:?}", served.until());
                return;
            }
        }
        panic!("no answer was taken");
    }

    #[test]
    fn a_process_that_obeys_nothing_reads_by_itself() {
        let mut served = Served::new(Options::new().watch_only());
        assert_eq!(served.token(), None);
        until("it reads", || served.follower.reads.load(SeqCst) > 3);
        assert_eq!(served.follower.carried(), 0);
    }

    #[test]
    fn an_answer_reaches_only_who_asked() {
        let serving = Serving::default();
        let told = serving.subscribe();
        serving.ask(1, 11);
        assert!(serving.rounds.lock().begin(Tick(1), LEASE));
        serving.ask(2, 22);
        serving.end(Some(Root { version: 3, nonce: 4 }));
        assert!(matches!(told.borrow().to(1), Some(Message::Root(11, _))));
        assert!(told.borrow().to(2).is_none());
    }
}
