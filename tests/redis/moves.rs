//! Slots that move while they are used.

use crate::load::{Plain, Seen};
use crate::servers::cluster::{Cluster, MASTERS, home_of};
use crate::servers::run;
use heatsink::Key;
use heatsink::store::{Delivery, Id, Once, RedisStore, Store, Take};
use heatsink::testing::conformance;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const MOVES: usize = 10;
const WINDOW: Duration = Duration::from_millis(300);

async fn store(cluster: &Cluster) -> RedisStore {
    RedisStore::cluster(&[&cluster.url(0), &cluster.url(4)]).await.unwrap()
}

/// Moves a slot around the masters, ten times, each with an ASK window.
pub async fn moves(cluster: &Arc<Cluster>, slot: u16) {
    let cluster = cluster.clone();
    let mover = move || {
        let mut at = home_of(slot);
        for _ in 0..MOVES {
            let to = (at + 1) % 3;
            cluster.move_slot(slot, at, to, WINDOW);
            at = to;
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    tokio::task::spawn_blocking(mover).await.unwrap();
}

#[test]
fn a_cluster_passes_the_conformance_suite() {
    run(async {
        let cluster = Cluster::start();
        let urls = [cluster.url(0), cluster.url(1)];
        let builder = RedisStore::builder(&urls[0]).seed(&urls[1]).replicas(true);
        let report = conformance(builder.connect().await.unwrap(), "t:").await;
        report.assert_passed();
        assert!(report.capability.replicas && report.capability.shard_of);
        let reads = |node: usize| {
            let stats: String = cluster.nodes[node].control().ask("INFO commandstats");
            stats.contains("cmdstat_get:")
        };
        assert!((MASTERS..2 * MASTERS).any(reads), "no replica was read");
    });
}

#[test]
fn no_increment_is_lost_or_doubled_and_none_stalls_while_slots_move() {
    run(async {
        let cluster = Arc::new(Cluster::start());
        let store = store(&cluster).await;
        let key = Key::from("{moving}:likes");
        let still: Vec<Key> = (0..16).map(|i| Key::from(format!("still:{i}"))).collect();
        let (seen, plain) = (Arc::new(Seen::default()), Plain::start(&cluster));
        let tasks = {
            let (store, key, still) = (store.clone(), key.clone(), still.clone());
            seen.start(512, move |task, n| {
                let (store, key) = (store.clone(), key.clone());
                // Every other call is for the moving slot.
                let at = if n % 2 == 0 { key } else { still[task % 16].clone() };
                async move { store.add(&at, 1).await.map(drop) }
            })
        };
        moves(&cluster, key.cluster_slot()).await;
        seen.stop(tasks).await;
        let acked = seen.assert_smooth_beside("increments", plain.longest());
        let mut total = 0;
        for key in still.iter().chain([&key]) {
            total += store.add(key, 0).await.unwrap();
        }
        assert_eq!(u64::try_from(total).unwrap(), acked);
        let stats = store.stats();
        assert!(stats.asked > 1000 && stats.moved > 0 && stats.lost == 0, "{stats:?}");
    });
}

#[test]
fn reads_batches_and_scripts_go_on_while_slots_move() {
    run(async {
        let cluster = Arc::new(Cluster::start());
        let store = store(&cluster).await;
        let keys: Vec<Key> = (0..8).map(|i| Key::from(format!("{{moving}}:{i}"))).collect();
        for (i, key) in keys.iter().enumerate() {
            store.put(key, i.to_string().into(), None).await.unwrap();
        }
        let (stock, once) = (Key::from("{moving}:stock"), Key::from("{moving}:once"));
        // What stands beside a counter is made by its first call.
        store.put(&stock, "1000000000".into(), None).await.unwrap();
        let first = Id::from("first");
        store.take(&stock, 1, &first).await.unwrap();
        store.add_once(&once, &first, 1).await.unwrap();
        let (seen, plain) = (Arc::new(Seen::default()), Plain::start(&cluster));
        let tasks = {
            let (store, keys) = (store.clone(), keys.clone());
            let (stock, once) = (stock.clone(), once.clone());
            seen.start(128, move |task, n| {
                let (store, keys) = (store.clone(), keys.clone());
                let (stock, once) = (stock.clone(), once.clone());
                let id = Id::from(&*format!("{task}.{n}"));
                async move {
                    match n % 5 {
                        0 => {
                            let got = store.get(&keys[task % 8]).await?;
                            assert_eq!(got.unwrap().bytes, (task % 8).to_string());
                        }
                        1 => {
                            for (i, got) in store.get_many(&keys).await.into_iter().enumerate() {
                                assert_eq!(got?.unwrap().bytes, i.to_string());
                            }
                        }
                        2 => {
                            let (key, same) = (&keys[task % 8], (task % 8).to_string());
                            let was = Some(same.clone().into());
                            assert!(store.compare_and_set(key, was, same.into(), None).await?);
                        }
                        3 => {
                            let took = store.take(&stock, 1, &id).await?;
                            assert!(matches!(took, Take::Taken { .. }));
                        }
                        _ => {
                            let added = store.add_once(&once, &id, 1).await?;
                            assert!(matches!(added, Once::Applied(_)));
                        }
                    }
                    Ok(())
                }
            })
        };
        moves(&cluster, keys[0].cluster_slot()).await;
        seen.stop(tasks).await;
        seen.assert_smooth_beside("reads, batches and scripts", plain.longest());
        assert!(store.stats().asked > 1000, "{:?}", store.stats());
    });
}

#[test]
fn a_subscription_follows_its_slot() {
    run(async {
        let cluster = Arc::new(Cluster::start());
        let store = store(&cluster).await;
        let channel = Key::from("news");
        let mut sub = store.subscribe(&channel).await.unwrap();
        let mover = cluster.clone();
        let moved = tokio::task::spawn_blocking(move || {
            let (slot, at) = (channel.cluster_slot(), home_of(channel.cluster_slot()));
            mover.move_slot(slot, at, (at + 1) % 3, Duration::from_millis(100));
            channel
        });
        let channel = moved.await.unwrap();
        // Every message is heard, or a gap is in its place.
        let (mut gaps, mut heard) = (0, 0);
        for i in 0..40 {
            store.publish(&channel, i.to_string().into()).await.unwrap();
            let next = tokio::time::timeout(Duration::from_millis(50), sub.next()).await;
            match next {
                Ok(Some(Delivery::Gap)) => gaps += 1,
                Ok(Some(Delivery::Message(_))) => heard += 1,
                Ok(None) => panic!("the subscription ended"),
                Err(_) => {}
            }
        }
        assert!(gaps > 0 && heard > 20, "{gaps} gaps, {heard} heard");
    });
}

#[test]
fn nothing_is_lost_while_redis_cli_moves_two_thousand_slots() {
    run(async {
        let cluster = Arc::new(Cluster::start());
        let store = store(&cluster).await;
        let keys: Vec<Key> = (0..2000).map(|i| Key::from(format!("key:{i}"))).collect();
        let (seen, plain) = (Arc::new(Seen::default()), Plain::start(&cluster));
        let tasks = {
            let (store, keys) = (store.clone(), keys.clone());
            seen.start(128, move |task, n| {
                let store = store.clone();
                let key = keys[(task * 31 + n as usize) % keys.len()].clone();
                async move { store.add(&key, 1).await.map(drop) }
            })
        };
        let port = cluster.nodes[0].port;
        let reshard = move || {
            let id = |node: usize| cluster.nodes[node].control().ask::<String>("CLUSTER MYID");
            let (from, to) = (id(0), id(2));
            let done = Command::new("redis-cli")
                .args(["--cluster", "reshard", &format!("127.0.0.1:{port}")])
                .args(["--cluster-from", &from, "--cluster-to", &to])
                .args(["--cluster-slots", "2000", "--cluster-yes"])
                .output()
                .unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
            cluster
        };
        let cluster = tokio::task::spawn_blocking(reshard).await.unwrap();
        seen.stop(tasks).await;
        let acked = seen.assert_smooth_beside("increments while 2,000 slots move", plain.longest());
        let mut total = 0;
        for got in store.get_many(&keys).await {
            let digits = got.unwrap().map(|s| String::from_utf8(s.bytes.to_vec()).unwrap());
            total += digits.map_or(0, |d| d.parse::<u64>().unwrap());
        }
        assert_eq!(total, acked);
        drop(cluster);
    });
}
