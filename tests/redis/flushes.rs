//! Flushes of buffered counters on a real server: processes that are killed in the middle of one,
//! and flushes that are repeated, doubled and late.

use crate::servers::cluster::until;
use crate::servers::{Server, run};
use bytes::Bytes;
use heatsink::store::{Capability, RedisStore, Store, Stored, Version};
use heatsink::{Adds, Buffered, Error, ErrorKind, Heatsink, Key, Result};
use std::collections::BTreeSet;
use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::pin::pin;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

const CHILD: &str = "HEATSINK_TEST_FLUSHES_TO";
const DEATHS: usize = 100;
/// Lives of a process on one counter.
const LIVES: usize = 4;

/// A store that says what it is about to do and what it has done, and waits each time until it may
/// go on.
struct Told(RedisStore);

impl Told {
    /// Three steps: not sent; sent and not answered; answered and not yet known to the caller.
    async fn steps<T>(&self, what: &str, call: impl Future<Output = T>) -> T {
        step(&format!("{what} before"));
        let mut call = pin!(call);
        let first = std::future::poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
        // For the connection's task to write it.
        tokio::time::sleep(Duration::from_millis(1)).await;
        step(&format!("{what} sent"));
        let answer = match first {
            Poll::Ready(answer) => answer,
            Poll::Pending => call.await,
        };
        step(&format!("{what} after"));
        answer
    }
}

/// Tells the parent, and waits for its word. One step at a time: a flush has no two at once.
fn step(what: &str) {
    tokio::task::block_in_place(|| {
        println!("step {what}");
        let mut word = [0];
        std::io::stdin().read_exact(&mut word).unwrap();
    });
}

impl Store for Told {
    fn capability(&self) -> Capability {
        self.0.capability()
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>> {
        self.steps("get", self.0.get(key)).await
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        self.0.get_many(keys).await
    }

    async fn put(&self, key: &Key, value: Bytes, ttl: Option<Duration>) -> Result<()> {
        self.0.put(key, value, ttl).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        self.0.delete_many(keys).await
    }

    async fn add(&self, key: &Key, amount: i64) -> Result<i64> {
        self.steps("add", self.0.add(key, amount)).await
    }

    async fn compare_and_set(
        &self,
        key: &Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> Result<bool> {
        self.steps("compare_and_set", self.0.compare_and_set(key, expected, value, ttl)).await
    }

    async fn put_if_newer(
        &self,
        key: &Key,
        version: Version,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> Result<bool> {
        self.steps("put_if_newer", self.0.put_if_newer(key, version, value, ttl)).await
    }

    async fn claim_lane(&self, key: &Key) -> Result<Stored> {
        self.steps("claim_lane", self.0.claim_lane(key)).await
    }
}

/// The process that dies: it says what it adds before it does, and what a flush has acknowledged.
fn live(target: &str) {
    let (url, key) = target.split_once(' ').unwrap();
    // The test harness has begun a line.
    println!();
    let adds = Adds::new().writer("mortal").flush_every(Duration::from_secs(3600));
    crate::servers::runtime().block_on(async {
        let store = Told(RedisStore::connect(url).await.unwrap());
        let hs = Heatsink::builder(store).adds(adds).build().unwrap();
        let likes = hs.buffered(key).unwrap();
        for n in 1.. {
            println!("adds {n}");
            likes.add(n).await.unwrap();
            likes.flush().await.unwrap();
            println!("flushed");
        }
    });
}

/// What the parent heard from a life before it ended it.
struct Life {
    acknowledged: i64,
    announced: i64,
    died_at: String,
}

/// Lets a process take so many steps, and kills it in the middle of the next.
fn kill_after(steps: usize, target: &str) -> Life {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "flushes::a_process_killed_in_any_step_of_a_flush_loses_what_was_not_acknowledged_and_counts_nothing_twice"])
        .arg("--nocapture")
        .env(CHILD, target)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut go: ChildStdin = child.stdin.take().unwrap();
    let said: BufReader<ChildStdout> = BufReader::new(child.stdout.take().unwrap());
    let mut life = Life { acknowledged: 0, announced: 0, died_at: String::new() };
    let mut taken = 0;
    for line in said.lines().map_while(std::result::Result::ok) {
        if let Some(n) = line.strip_prefix("adds ") {
            life.announced += n.parse::<i64>().unwrap();
        } else if line == "flushed" {
            life.acknowledged = life.announced;
        } else if let Some(what) = line.strip_prefix("step ") {
            if taken == steps {
                what.clone_into(&mut life.died_at);
                break;
            }
            taken += 1;
            go.write_all(b"\n").unwrap();
        }
    }
    assert!(!life.died_at.is_empty(), "the process ended by itself after {taken} steps");
    child.kill().unwrap();
    child.wait().unwrap();
    life
}

#[test]
fn a_process_killed_in_any_step_of_a_flush_loses_what_was_not_acknowledged_and_counts_nothing_twice()
 {
    if let Some(target) = std::env::var_os(CHILD) {
        return live(target.to_str().unwrap());
    }
    run(async {
        let server = Server::start(&[]);
        let hs = Heatsink::new(RedisStore::connect(&server.url()).await.unwrap()).unwrap();
        let mut control = server.control();
        let clients = |control: &mut crate::servers::Control| {
            control.ask::<String>("CLIENT LIST").lines().count()
        };
        let (mut died_at, mut unacknowledged, mut survived) = (BTreeSet::new(), 0, 0);
        let mut at = (String::new(), 0);
        for death in 0..DEATHS {
            let (counter, life) = (death / LIVES, death % LIVES);
            // The first life makes the record and takes the lane; the others come back to it.
            let steps = if life == 0 { counter } else { (LIVES * counter + life * 7) % 18 };
            let key = format!("likes:{counter}");
            if at.0 != key {
                at = (key.clone(), 0);
            }
            let target = format!("{} {key}", server.url());
            let killed = tokio::task::spawn_blocking(move || kill_after(steps, &target));
            let killed = killed.await.unwrap();
            // What the dead process had sent has been executed by then.
            until("its connection is gone", || clients(&mut control) <= 2);
            let likes = hs.buffered(&key).unwrap();
            let total = likes.sum_with(Duration::ZERO).await.unwrap().total();
            let (least, most) = (at.1 + killed.acknowledged, at.1 + killed.announced);
            assert!(
                (least..=most).contains(&total),
                "killed at {}, step {steps} of life {life}: {total}, not {least} to {most}",
                killed.died_at
            );
            unacknowledged += usize::from(most > least);
            survived += usize::from(most > least && total == most);
            died_at.insert(killed.died_at);
            at.1 = total;
        }
        println!(
            "{DEATHS} deaths, {unacknowledged} in a flush, {survived} of which had been stored"
        );
        for what in ["get", "compare_and_set", "claim_lane", "put_if_newer"] {
            for when in ["before", "sent", "after"] {
                assert!(died_at.contains(&format!("{what} {when}")), "none died {when} {what}");
            }
        }
        assert!(survived > 0 && survived < unacknowledged, "both fates were seen");
        // Each counter is still in the one lane of its writer.
        let lanes: Vec<String> = control.ask("KEYS *lane.*");
        assert!(lanes.len() <= DEATHS / LIVES, "{lanes:?}");
    });
}

/// A store whose flushes are harmed.
#[derive(Clone)]
struct Harmed {
    store: RedisStore,
    harm: Arc<Mutex<Harm>>,
}

#[derive(Default)]
struct Harm {
    /// So many flushes end unknown: sent in turn, or held back.
    unknown: u32,
    /// Each flush is sent twice.
    twice: bool,
    held_back: Vec<(Key, Version, Bytes)>,
    sent: u32,
}

impl Harmed {
    async fn flush(&self, key: &Key, version: Version, value: Bytes) -> Result<bool> {
        self.harm.lock().unwrap().sent += 1;
        self.store.put_if_newer(key, version, value, None).await
    }
}

impl Store for Harmed {
    fn capability(&self) -> Capability {
        self.store.capability()
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>> {
        self.store.get(key).await
    }

    async fn get_many(&self, keys: &[Key]) -> Vec<Result<Option<Stored>>> {
        self.store.get_many(keys).await
    }

    async fn put(&self, key: &Key, value: Bytes, ttl: Option<Duration>) -> Result<()> {
        self.store.put(key, value, ttl).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Vec<Result<bool>> {
        self.store.delete_many(keys).await
    }

    async fn add(&self, key: &Key, amount: i64) -> Result<i64> {
        self.store.add(key, amount).await
    }

    async fn compare_and_set(
        &self,
        key: &Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Option<Duration>,
    ) -> Result<bool> {
        self.store.compare_and_set(key, expected, value, ttl).await
    }

    async fn put_if_newer(
        &self,
        key: &Key,
        version: Version,
        value: Bytes,
        _: Option<Duration>,
    ) -> Result<bool> {
        let (unknown, twice) = {
            let mut harm = self.harm.lock().unwrap();
            let unknown = harm.unknown;
            harm.unknown = unknown.saturating_sub(1);
            if unknown > 0 {
                harm.held_back.push((key.clone(), version, value.clone()));
            }
            (unknown, harm.twice)
        };
        // Every other one is not sent at all, and comes late.
        if unknown % 2 == 0 {
            let first = self.flush(key, version, value.clone()).await;
            if twice {
                assert!(!self.flush(key, version, value).await?, "the second changes nothing");
            }
            if unknown == 0 {
                return first;
            }
        }
        Err(Error::unknown(ErrorKind::Timeout, "the test lost the answer"))
    }

    async fn claim_lane(&self, key: &Key) -> Result<Stored> {
        self.store.claim_lane(key).await
    }
}

#[test]
fn a_flush_that_is_repeated_doubled_or_late_changes_nothing() {
    run(async {
        let server = Server::start(&[]);
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let store = Harmed { store, harm: Arc::default() };
        let every = Duration::from_millis(10);
        let adds = Adds::new().writer("a").flush_every(every);
        let hs = Heatsink::builder(store.clone()).adds(adds).build().unwrap();
        let likes = hs.buffered("likes").unwrap();
        let total = async |likes: &Buffered| likes.sum_with(Duration::ZERO).await.unwrap().total();

        likes.add(5).await.unwrap();
        likes.flush().await.unwrap();
        // Ten times in a row nobody hears what became of it.
        store.harm.lock().unwrap().unknown = 10;
        likes.add(7).await.unwrap();
        likes.flush().await.unwrap();
        assert_eq!(
            (total(&likes).await, likes.pending()),
            (12, 0),
            "tried ten times and once more"
        );
        assert_eq!(store.harm.lock().unwrap().held_back.len(), 10);

        store.harm.lock().unwrap().twice = true;
        for n in 1..=20 {
            likes.add(n).await.unwrap();
            likes.flush().await.unwrap();
        }
        assert_eq!(total(&likes).await, 222);

        // All that was ever held back arrives after newer ones, in either order.
        let late = std::mem::take(&mut store.harm.lock().unwrap().held_back);
        for (key, version, value) in late.iter().chain(late.iter().rev()) {
            assert!(!store.flush(key, *version, value.clone()).await.unwrap());
        }
        assert_eq!(total(&likes).await, 222);
        assert!(store.harm.lock().unwrap().sent >= 5 + 2 * 20 + 20);
        hs.shutdown().await;
    });
}
