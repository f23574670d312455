//! What goes wrong at one node: each has its error, and nothing is applied twice.

use crate::proxy::{Harm, Proxy};
use crate::servers::{Server, run};
use heatsink::store::{Id, Once, RedisStore, Store};
use heatsink::{Error, ErrorKind, Heatsink, Key, Outcome, Treatment};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A store whose calls give up early.
async fn hasty(url: &str) -> RedisStore {
    RedisStore::builder(url)
        .response_timeout(Duration::from_millis(200))
        .connect_timeout(Duration::from_millis(200))
        .call_timeout(Duration::from_millis(400))
        .connect()
        .await
        .unwrap()
}

#[track_caller]
fn refused<T: std::fmt::Debug>(got: Result<T, Error>, kind: ErrorKind) {
    let e = got.unwrap_err();
    assert_eq!((e.kind(), e.outcome()), (kind, Outcome::NotApplied), "{e:?}");
}

/// Calls again while the answer is that nothing was applied.
async fn patiently<T, F: Future<Output = Result<T, Error>>>(call: impl Fn() -> F) -> T {
    let limit = Instant::now() + Duration::from_secs(5);
    loop {
        match call().await {
            Ok(done) => return done,
            Err(e) => assert!(!e.is_unknown() && Instant::now() < limit, "{e:?}"),
        }
    }
}

fn key() -> Key {
    Key::from("k")
}

#[test]
fn a_reply_that_is_lost_is_unknown_and_the_add_is_applied_once() {
    run(async {
        let server = Server::start(&[]);
        let proxy = Proxy::start(server.port).await;
        let store = hasty(&proxy.url()).await;
        let mut control = server.control();
        for (i, harm) in [Harm::Swallow, Harm::Close, Harm::Half].into_iter().enumerate() {
            let (key, id) = (Key::from(format!("lost:{i}")), Id::from("id"));
            assert_eq!(patiently(|| store.add(&key, 1)).await, 1);
            proxy.set(harm);
            let start = Instant::now();
            let e = store.add(&key, 1).await.unwrap_err();
            assert!(e.is_unknown(), "{harm:?}: {e:?}");
            let swallowed = harm == Harm::Swallow;
            let kind = if swallowed { ErrorKind::Timeout } else { ErrorKind::Store };
            assert_eq!(e.kind(), kind, "{e:?}");
            assert!(start.elapsed() < Duration::from_millis(500));
            // No connection can be made now, so nothing is sent.
            refused(store.add_once(&key, &id, 1).await, ErrorKind::Store);
            assert_eq!(store.get(&key).await.unwrap_err().outcome(), Outcome::NotApplied);
            proxy.set(Harm::None);
            assert_eq!(control.ask::<i64>(&format!("GET lost:{i}")), 2, "{harm:?}");
            assert_eq!(patiently(|| store.add_once(&key, &id, 1)).await, Once::Applied(3));
        }
        assert!(store.stats().lost > 0);
    });
}

#[test]
fn a_read_is_sent_again_when_its_connection_breaks() {
    run(async {
        let server = Server::start(&[]);
        let store = hasty(&server.url()).await;
        store.put(&key(), "v".into(), None).await.unwrap();
        for _ in 0..20 {
            let _: i64 = server.control().ask("CLIENT KILL TYPE normal SKIPME yes");
            assert_eq!(store.get(&key()).await.unwrap().unwrap().bytes, "v");
        }
        // An idle connection that ended is noticed before a write is sent into it.
        for i in 0..20 {
            let _: i64 = server.control().ask("CLIENT KILL TYPE normal SKIPME yes");
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert_eq!(store.add(&Key::from("n"), 1).await.unwrap(), i + 1);
        }
    });
}

#[test]
fn a_wrong_password_is_named_at_once_and_not_tried_for_long() {
    run(async {
        let server = Server::start(&["--requirepass", "secret"]);
        let at = |login: &str| format!("redis://{login}127.0.0.1:{}", server.port);
        for login in ["", ":wrong@", "nobody:secret@"] {
            let start = Instant::now();
            refused(RedisStore::connect(&at(login)).await, ErrorKind::Config);
            assert!(start.elapsed() < Duration::from_millis(500));
        }
        let store = hasty(&at(":secret@")).await;
        store.add(&key(), 1).await.unwrap();
        let client = redis::Client::open(at(":secret@")).unwrap();
        let mut conn = client.get_connection().unwrap();
        let set = |conn: &mut redis::Connection, word: &str| {
            let mut cmd = redis::cmd("CONFIG");
            cmd.arg("SET").arg("requirepass").arg(word).exec(conn).unwrap();
            redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").exec(conn).unwrap();
        };
        set(&mut conn, "changed");
        tokio::time::sleep(Duration::from_millis(20)).await;
        for _ in 0..3 {
            refused(store.add(&key(), 1).await, ErrorKind::Config);
        }
        set(&mut conn, "secret");
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(store.add(&key(), 1).await.unwrap(), 2);
    });
}

#[test]
fn full_memory_refuses_writes_whole_and_answers_reads() {
    run(async {
        let server = Server::start(&[]);
        let store = hasty(&server.url()).await;
        let (stock, once, hold) = (Key::from("stock"), Key::from("once"), Id::from("h"));
        store.put(&stock, "5".into(), None).await.unwrap();
        let _: () = server.control().ask("CONFIG SET maxmemory 1");
        refused(store.put(&key(), "v".into(), None).await, ErrorKind::Throttled);
        refused(store.add(&key(), 1).await, ErrorKind::Throttled);
        refused(store.add_once(&once, &hold, 1).await, ErrorKind::Throttled);
        refused(store.take(&stock, 1, &hold).await, ErrorKind::Throttled);
        assert_eq!(store.get(&stock).await.unwrap().unwrap().bytes, "5");
        assert_eq!(store.get(&key()).await.unwrap(), None);
        let _: () = server.control().ask("CONFIG SET maxmemory 0");
        assert_eq!(store.add_once(&once, &hold, 1).await.unwrap(), Once::Applied(1));
    });
}

#[test]
fn a_read_only_replica_refuses_and_a_call_waits_for_its_promotion() {
    run(async {
        let (master, replica) = (Server::start(&[]), Server::start(&[]));
        let _: () = replica.control().ask(&format!("REPLICAOF 127.0.0.1 {}", master.port));
        let store = hasty(&replica.url()).await;
        refused(store.add(&key(), 1).await, ErrorKind::Store);
        let patient = RedisStore::connect(&replica.url()).await.unwrap();
        let add = tokio::spawn(async move { patient.add(&key(), 1).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
        let _: () = replica.control().ask("REPLICAOF NO ONE");
        assert_eq!(add.await.unwrap().unwrap(), 1);
    });
}

#[test]
fn a_server_that_loads_is_waited_for_and_then_named() {
    run(async {
        let mut server = Server::start(&[]);
        let _: () = server.control().ask("DEBUG POPULATE 8000");
        let _: () = server.control().ask("SAVE");
        let (hasty, patient) =
            (hasty(&server.url()).await, RedisStore::connect(&server.url()).await.unwrap());
        // 8,000 keys at 60 µs and what a sleep costs are about a second.
        server.restart(&[
            "--key-load-delay",
            "60",
            "--loading-process-events-interval-bytes",
            "1024",
        ]);
        refused(hasty.add(&key(), 1).await, ErrorKind::Throttled);
        assert_eq!(patient.add(&key(), 1).await.unwrap(), 1);
        assert!(patient.get(&Key::from("key:7999")).await.unwrap().is_some());
    });
}

#[test]
fn a_paused_server_opens_the_breaker_and_applies_nothing_twice() {
    run(async {
        let server = Server::start(&[]);
        let store = hasty(&server.url()).await;
        let mut acked = 0;
        for _ in 0..10 {
            store.add(&key(), 1).await.unwrap();
            acked += 1;
        }
        server.pause();
        let (mut unknown, mut refused) = (0, 0);
        for round in 0..4 {
            let start = Instant::now();
            let adds: Vec<_> = (0..8)
                .map(|_| {
                    let store = store.clone();
                    tokio::spawn(async move { store.add(&key(), 1).await })
                })
                .collect();
            for add in adds {
                let e = add.await.unwrap().unwrap_err();
                if e.is_unknown() { unknown += 1 } else { refused += 1 }
            }
            assert!(start.elapsed() < Duration::from_millis(700), "round {round}");
        }
        server.resume();
        assert!(refused > 0, "the breaker has not opened");
        tokio::time::sleep(Duration::from_secs(1)).await;
        let total = store.add(&key(), 0).await.unwrap();
        assert!((acked..=acked + unknown).contains(&total), "{total}: {acked} + {unknown}");
    });
}

#[test]
fn more_calls_than_the_cap_are_shed_and_nothing_piles_up() {
    run(async {
        let server = Server::start(&[]);
        let store = RedisStore::builder(&server.url()).in_flight_max(8).connect().await.unwrap();
        server.pause();
        let calls: Vec<_> = (0..100)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(async move { store.add(&key(), 1).await.unwrap_err() })
            })
            .collect();
        let mut shed = 0;
        for call in calls {
            let e = call.await.unwrap();
            let full = e.kind() == ErrorKind::Shed;
            assert_eq!(e.is_unknown(), !full, "{e:?}");
            shed += usize::from(full);
        }
        server.resume();
        assert_eq!(shed, 92);
    });
}

#[test]
fn a_hundred_thousand_cancelled_calls_mix_up_no_replies() {
    run(async {
        let server = Server::start(&[]);
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let keys: Arc<Vec<Key>> = Arc::new((0..64).map(|i| Key::from(format!("c:{i}"))).collect());
        for (i, key) in keys.iter().enumerate() {
            store.put(key, format!("value {i}").into(), None).await.unwrap();
        }
        let tasks: Vec<_> = (0..64)
            .map(|task| {
                let (store, keys) = (store.clone(), keys.clone());
                tokio::spawn(async move {
                    let (mut cancelled, mut answered) = (0u32, 0u32);
                    while cancelled < 1600 {
                        // A dropped call after one poll, in the middle of it, or never.
                        let wait = [0, 0, 50, 200][(cancelled % 4) as usize];
                        let other = &keys[(task + cancelled as usize) % 64];
                        let limit = Duration::from_micros(wait);
                        match tokio::time::timeout(limit, store.get(other)).await {
                            Err(_) => cancelled += 1,
                            Ok(got) => drop(got.unwrap()),
                        }
                        if cancelled % 8 == 0 {
                            let got = store.get(&keys[task]).await.unwrap().unwrap();
                            assert_eq!(got.bytes, format!("value {task}"));
                            answered += 1;
                        }
                        if answered % 64 == 1 {
                            let many = store.get_many(&keys).await;
                            for (i, got) in many.into_iter().enumerate() {
                                assert_eq!(got.unwrap().unwrap().bytes, format!("value {i}"));
                            }
                        }
                    }
                    cancelled
                })
            })
            .collect();
        let mut cancelled = 0;
        for task in tasks {
            cancelled += task.await.unwrap();
        }
        assert!(cancelled >= 100_000, "{cancelled}");
    });
}

#[test]
fn a_cancelled_write_keeps_its_key_out_of_the_cache() {
    run(async {
        let server = Server::start(&[]);
        let store = RedisStore::builder(&server.url())
            .max_in_flight_time(Duration::from_secs(2))
            .connect()
            .await
            .unwrap();
        let hs = Heatsink::new(store).unwrap();
        hs.control().pin("k", Treatment::near()).unwrap();
        hs.put("k", "old").await.unwrap();
        let gets = || -> u64 {
            let info: String = server.control().ask("INFO commandstats");
            let line = info.lines().find_map(|l| l.strip_prefix("cmdstat_get:calls="));
            line.map_or(0, |l| l.split(',').next().unwrap().parse().unwrap())
        };
        let read = |times: u64| {
            let (hs, before) = (hs.clone(), gets());
            async move {
                for _ in 0..times {
                    hs.get("k").await.unwrap().unwrap();
                }
                before
            }
        };
        let before = read(20).await;
        assert!(gets() - before <= 1, "a hot key is read from the store once");
        server.pause();
        let put = tokio::time::timeout(Duration::from_millis(50), hs.put("k", "new")).await;
        assert!(put.is_err(), "the write is dropped while nobody answers");
        server.resume();
        let before = read(20).await;
        assert_eq!(gets() - before, 20, "a key with a write of unknown outcome was cached");
        tokio::time::sleep(Duration::from_millis(2200)).await;
        let before = read(20).await;
        assert!(gets() - before <= 1, "the write cannot land any more");
    });
}
