//! Masters that die or stand still.

use crate::load::Seen;
use crate::servers::cluster::{Cluster, MASTERS, home_of, until};
use crate::servers::run;
use heatsink::store::{RedisStore, Store};
use heatsink::{ErrorKind, Key, Outcome};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const VICTIM: usize = 1;
/// With the server's default every node refuses everything while one slot has no master.
const PARTIAL: [&str; 2] = ["--cluster-require-full-coverage", "no"];

async fn store(cluster: &Cluster) -> RedisStore {
    RedisStore::cluster(&[&cluster.url(0), &cluster.url(VICTIM)]).await.unwrap()
}

/// So many keys whose slots a master has at first.
fn keys_of(master: usize, n: usize) -> Vec<Key> {
    let all = (0..).map(|i| Key::from(format!("key:{i}")));
    all.filter(|k| home_of(k.cluster_slot()) == master).take(n).collect()
}

/// Adds to the keys of the victim and to those of the others, apart.
struct Load {
    sick: Arc<Seen>,
    well: Arc<Seen>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    sick_keys: Vec<Key>,
    well_keys: Vec<Key>,
}

impl Load {
    fn start(store: &RedisStore) -> Load {
        let (sick, well) = (Arc::<Seen>::default(), Arc::<Seen>::default());
        let sick_keys = keys_of(VICTIM, 32);
        let well_keys = [keys_of(0, 16), keys_of(2, 16)].concat();
        let mut tasks = Vec::new();
        for (seen, keys) in [(&sick, &sick_keys), (&well, &well_keys)] {
            let (store, keys) = (store.clone(), keys.clone());
            tasks.extend(seen.start(32, move |task, _| {
                let (store, key) = (store.clone(), keys[task].clone());
                async move {
                    let added = store.add(&key, 1).await.map(drop);
                    // Nobody retries at once for ever; and two cores are shared with the servers.
                    let pause = if added.is_err() { 20 } else { 1 };
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    added
                }
            }));
        }
        Load { sick, well, tasks, sick_keys, well_keys }
    }

    async fn stop(&mut self) {
        for seen in [&self.sick, &self.well] {
            seen.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        for task in self.tasks.drain(..) {
            task.await.unwrap();
        }
    }
}

async fn sum(store: &RedisStore, keys: &[Key]) -> u64 {
    let mut total = 0;
    for got in store.get_many(keys).await {
        let bytes = got.unwrap().map(|s| s.bytes).unwrap_or_default();
        total += String::from_utf8_lossy(&bytes).parse::<u64>().unwrap_or(0);
    }
    total
}

async fn works_again(store: &RedisStore, key: &Key) {
    let limit = Instant::now() + Duration::from_secs(15);
    while let Err(e) = store.add(key, 0).await {
        assert!(Instant::now() < limit, "{e:?}");
    }
}

#[test]
fn the_death_of_a_master_is_felt_on_its_own_shard_only_and_then_over() {
    run(async {
        let cluster = Cluster::with(&PARTIAL);
        let store = store(&cluster).await;
        let mut load = Load::start(&store);
        tokio::time::sleep(Duration::from_secs(1)).await;
        cluster.nodes[VICTIM].kill();
        works_again(&store, &load.sick_keys[0]).await;
        let before = load.sick.acked();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(load.sick.acked() > before + 100, "the shard works after its failover");
        load.stop().await;
        let (unknown, not_applied) = load.sick.unknown_and_not_applied();
        println!(
            "dead shard: {} acknowledged, {unknown} unknown, {not_applied} not applied, longest {:?}; \
             {:?}",
            load.sick.acked(),
            load.sick.longest(),
            store.stats(),
        );
        // Each call ended by its limit: 2 s of waiting, then 1 s for an answer.
        assert!(load.sick.longest() < Duration::from_millis(3300), "{:?}", load.sick.longest());
        let acked = load.well.assert_smooth("healthy shards");
        assert_eq!(sum(&store, &load.well_keys).await, acked);
        assert_eq!(store.stats().failovers, 1);
        // What is unknown may have been applied; nothing that says it was not was.
        let total = sum(&store, &load.sick_keys).await;
        assert!(total <= load.sick.acked() + unknown, "{total}");
        // All but what the replica had not heard of in the last moment.
        assert!(total + 64 >= load.sick.acked(), "{total} of {}", load.sick.acked());
    });
}

#[test]
fn acknowledged_writes_that_are_missing_are_those_the_servers_lost() {
    run(async {
        let cluster = Cluster::with(&PARTIAL);
        let store = store(&cluster).await;
        let key = keys_of(VICTIM, 1).remove(0);
        for _ in 0..100 {
            store.add(&key, 1).await.unwrap();
        }
        let (master, replica) = (&cluster.nodes[VICTIM], &cluster.nodes[MASTERS + VICTIM]);
        let mut behind = replica.control();
        let _: () = behind.ask("READONLY");
        until("the replica has them all", || {
            behind.ask::<Option<i64>>(&format!("GET {key}")) == Some(100)
        });
        let mut control = master.control();
        replica.pause();
        let _: i64 = control.ask("CLIENT KILL TYPE replica");
        let mut acked_alone = 0;
        for _ in 0..50 {
            store.add(&key, 1).await.unwrap();
            acked_alone += 1;
        }
        assert_eq!(store.add(&key, 0).await.unwrap(), 150);
        master.kill();
        replica.resume();
        works_again(&store, &key).await;
        let total = store.add(&key, 0).await.unwrap();
        assert_eq!(150 - total, acked_alone, "lost by the servers, and by nobody else");
        // The store does not hide it: it counts the failover that may have lost writes.
        until("the failover is counted", || store.stats().failovers == 1);
    });
}

/// The keys of the INCRBY commands in a server's append-only files. It writes a command there
/// before it answers it.
fn executed(dir: &Path) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    for file in std::fs::read_dir(dir.join("appendonlydir")).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let mut words = text.split("\r\n");
        while let Some(word) = words.next() {
            if word.eq_ignore_ascii_case("INCRBY") {
                // Its length, then the key.
                keys.extend(words.nth(1).map(str::to_owned));
            }
        }
    }
    keys
}

#[test]
fn of_a_killed_master_exactly_those_acknowledged_adds_are_missing_that_the_servers_lost() {
    run(async {
        let cluster = Cluster::with(&[&PARTIAL[..], &["--appendonly", "yes"]].concat());
        let store = store(&cluster).await;
        // A key for each add, all in one slot of the victim.
        let tag = keys_of(VICTIM, 1).remove(0);
        let ended = Arc::new(Mutex::new(Vec::<(String, Option<Outcome>)>::new()));
        let seen = Arc::<Seen>::default();
        let tasks = {
            let (store, ended) = (store.clone(), ended.clone());
            seen.start(32, move |task, n| {
                let (store, ended) = (store.clone(), ended.clone());
                let key = format!("{{{tag}}}{task}.{n}");
                async move {
                    let added = store.add(&Key::from(key.as_str()), 1).await;
                    let outcome = added.as_ref().err().map(|e| e.outcome());
                    ended.lock().unwrap().push((key, outcome));
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    added.map(drop)
                }
            })
        };
        let (master, replica) = (&cluster.nodes[VICTIM], &cluster.nodes[MASTERS + VICTIM]);
        tokio::time::sleep(Duration::from_millis(500)).await;
        // The replica falls behind, and the master goes on acknowledging.
        let mut control = master.control();
        replica.pause();
        let _: i64 = control.ask("CLIENT KILL TYPE replica");
        tokio::time::sleep(Duration::from_millis(200)).await;
        master.kill();
        replica.resume();
        until("the failover is counted", || store.stats().failovers == 1);
        tokio::time::sleep(Duration::from_millis(500)).await;
        seen.stop(tasks).await;

        let ended = std::mem::take(&mut *ended.lock().unwrap());
        let by_master = executed(master.dir());
        let keys: Vec<Key> = ended.iter().map(|(key, _)| Key::from(key.as_str())).collect();
        let mut there = BTreeSet::new();
        for (key, got) in keys.iter().zip(store.get_many(&keys).await) {
            if let Some(found) = got.unwrap() {
                assert_eq!(found.bytes, "1", "{key} was added twice");
                there.insert(key.to_string());
            }
        }
        let of = |outcome| ended.iter().filter(move |(_, o)| *o == outcome).map(|(key, _)| key);
        let acknowledged: BTreeSet<&String> = of(None).collect();
        let missing: Vec<_> = acknowledged.iter().filter(|key| !there.contains(**key)).collect();
        let lost: Vec<_> = acknowledged
            .iter()
            .filter(|k| by_master.contains(**k) && !there.contains(**k))
            .collect();
        println!(
            "{} acknowledged, {} of them missing; {} unknown, {} not applied; the dead master \
             had executed {}",
            acknowledged.len(),
            missing.len(),
            of(Some(Outcome::Unknown)).count(),
            of(Some(Outcome::NotApplied)).count(),
            by_master.len(),
        );
        assert_eq!(missing, lost, "missing are those that the dead master took with it");
        assert!(lost.len() > 100 && acknowledged.len() > lost.len() + 1000);
        let untrue =
            of(Some(Outcome::NotApplied)).find(|k| by_master.contains(*k) || there.contains(*k));
        assert_eq!(untrue, None, "what was said not to be applied was not");
        // No call is without an end: each key is in one of the three.
        assert_eq!(
            ended.len() as u64,
            seen.acked() + {
                let (unknown, not_applied) = seen.unknown_and_not_applied();
                unknown + not_applied
            }
        );
    });
}

#[test]
fn a_master_that_stands_still_takes_nobody_elses_callers() {
    run(async {
        let cluster = Cluster::with(&PARTIAL);
        let store = RedisStore::builder(&cluster.url(VICTIM))
            .seed(&cluster.url(0))
            .response_timeout(Duration::from_millis(200))
            .connect_timeout(Duration::from_millis(200))
            .call_timeout(Duration::from_millis(500))
            .connect()
            .await
            .unwrap();
        let mut load = Load::start(&store);
        tokio::time::sleep(Duration::from_millis(300)).await;
        // Shorter than the 1 s after which the others would replace it.
        cluster.nodes[VICTIM].pause();
        tokio::time::sleep(Duration::from_millis(700)).await;
        cluster.nodes[VICTIM].resume();
        works_again(&store, &load.sick_keys[0]).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        load.stop().await;
        let (unknown, not_applied) = load.sick.unknown_and_not_applied();
        println!("paused shard: {unknown} unknown, {not_applied} not applied");
        assert!(unknown > 0 && not_applied > 0);
        assert!(load.sick.longest() < Duration::from_millis(1000), "{:?}", load.sick.longest());
        let acked = load.well.assert_smooth("healthy shards");
        assert_eq!(sum(&store, &load.well_keys).await, acked);
        let (total, acked) = (sum(&store, &load.sick_keys).await, load.sick.acked());
        assert!((acked..=acked + unknown).contains(&total), "{total}: {acked} + {unknown}");
    });
}

#[test]
fn hedged_reads_go_on_while_their_master_stands_still_and_cost_little_before() {
    run(async {
        let cluster = Cluster::with(&PARTIAL);
        let builder = RedisStore::builder(&cluster.url(0)).cluster(true);
        let bare = builder.clone().connect().await.unwrap();
        let hedged = builder.hedged_reads(true).connect().await.unwrap();
        let key = keys_of(VICTIM, 1).remove(0);
        hedged.put(&key, "v".into(), None).await.unwrap();
        for _ in 0..2000 {
            assert_eq!(hedged.get(&key).await.unwrap().unwrap().bytes, "v");
        }
        let before = hedged.stats().hedged;
        assert!(before <= 110, "{before} of 2,000 reads were sent twice");
        cluster.nodes[VICTIM].pause();
        for _ in 0..5 {
            let start = Instant::now();
            assert_eq!(hedged.get(&key).await.unwrap().unwrap().bytes, "v");
            assert!(start.elapsed() < Duration::from_millis(250), "{:?}", start.elapsed());
        }
        let limit = Duration::from_millis(250);
        assert!(tokio::time::timeout(limit, bare.get(&key)).await.is_err());
        cluster.nodes[VICTIM].resume();
        assert!(hedged.stats().hedged >= before + 5);
    });
}

#[test]
fn a_slot_that_nobody_owns_is_named_and_served_once_somebody_does() {
    run(async {
        let cluster = Cluster::with(&PARTIAL);
        let store = store(&cluster).await;
        let key = keys_of(VICTIM, 1).remove(0);
        store.add(&key, 1).await.unwrap();
        for node in &cluster.nodes {
            let delete = format!("CLUSTER DELSLOTS {}", key.cluster_slot());
            let _: () = node.control().ask(&delete);
        }
        let e = store.add(&key, 1).await.unwrap_err();
        assert_eq!((e.kind(), e.outcome()), (ErrorKind::Store, Outcome::NotApplied), "{e:?}");
        store.add(&keys_of(0, 1)[0], 1).await.unwrap();
        let many = store.get_many(&[key.clone(), keys_of(0, 1).remove(0)]).await;
        assert!(many[0].is_err() && many[1].is_ok(), "{many:?}");
        let later = tokio::spawn({
            let (store, key) = (store.clone(), key.clone());
            async move { store.add(&key, 1).await }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        let add = format!("CLUSTER ADDSLOTS {}", key.cluster_slot());
        let _: () = cluster.nodes[VICTIM].control().ask(&add);
        assert_eq!(later.await.unwrap().unwrap(), 2);
    });
}

#[test]
fn nodes_are_found_by_name() {
    run(async {
        let cluster = Cluster::with(&[
            "--cluster-announce-hostname",
            "localhost",
            "--cluster-preferred-endpoint-type",
            "hostname",
        ]);
        let url = format!("redis://localhost:{}", cluster.nodes[0].port);
        let store = RedisStore::cluster(&[&url]).await.unwrap();
        for key in (0..MASTERS).flat_map(|master| keys_of(master, 4)) {
            assert_eq!(store.add(&key, 1).await.unwrap(), 1);
        }
    });
}
