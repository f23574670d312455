//! Adds that travel together, on real servers.

use crate::load::{Plain, Seen};
use crate::servers::cluster::Cluster;
use crate::servers::{Server, run};
use heatsink::store::{RedisStore, Store};
use heatsink::{Heatsink, Key, Salt, Treatment};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TASKS: usize = 256;
const SPAN: Duration = Duration::from_secs(2);

/// How many commands of a name the server has served.
fn served(server: &Server, command: &str) -> u64 {
    let stats: String = server.control().ask("INFO commandstats");
    let line = stats.lines().find_map(|l| l.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |l| l.split(',').next().unwrap().parse().unwrap())
}

#[test]
fn adds_of_one_key_are_all_counted_and_one_command_is_under_way_at_a_time() {
    run(async {
        let server = Server::start(&[]);
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let hs = Heatsink::new(store.clone()).unwrap();
        let bare = Arc::new(Seen::default());
        let tasks = bare.start_adds(TASKS, &(store.clone(), Key::from("bare")));
        tokio::time::sleep(SPAN).await;
        bare.stop(tasks).await;
        let one_by_one = bare.assert_smooth("one INCRBY per add");

        let before = served(&server, "incrby");
        let (seen, start) = (Arc::new(Seen::default()), Instant::now());
        let tasks = seen.start_adds(TASKS, &hs.counter("likes"));
        tokio::time::sleep(SPAN).await;
        seen.stop(tasks).await;
        let took = start.elapsed();
        let acked = seen.assert_smooth("coalesced adds");
        let commands = served(&server, "incrby") - before;
        println!("{commands} commands, {:.1} adds each", acked as f64 / commands as f64);
        assert_eq!(u64::try_from(store.add(&"likes".into(), 0).await.unwrap()).unwrap(), acked);
        assert_eq!(hs.add_stats().batches, commands, "no command is repeated");
        // One at a time: they fit into the span end to end, each at least a loopback round trip.
        let shortest = Duration::from_micros(20);
        assert!(commands < (took.as_nanos() / shortest.as_nanos()) as u64);
        assert!(acked > 10 * commands, "{acked} adds in {commands} commands");
        println!("{:.1} times one INCRBY per add", acked as f64 / one_by_one as f64);
    });
}

#[test]
fn coalesced_adds_stay_exact_while_their_slot_moves() {
    run(async {
        let cluster = Arc::new(Cluster::start());
        let store = RedisStore::cluster(&[&cluster.url(0)]).await.unwrap();
        let hs = Heatsink::new(store.clone()).unwrap();
        let key = Key::from("{moving}:likes");
        let (seen, plain) = (Arc::new(Seen::default()), Plain::start(&cluster));
        let tasks = seen.start_adds(TASKS, &hs.counter(&key));
        crate::moves::moves(&cluster, key.cluster_slot()).await;
        seen.stop(tasks).await;
        let acked = seen.assert_smooth_beside("coalesced adds", plain.longest());
        assert_eq!(u64::try_from(store.add(&key, 0).await.unwrap()).unwrap(), acked);
    });
}

#[test]
fn maxima_and_sets_rotate_on_a_server_and_end_in_the_bare_key() {
    run(async {
        let server = Server::start(&[]);
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let ms = Duration::from_millis;
        let salt = Salt::new().lease(ms(400)).timeout(ms(130)).grave(ms(1000)).pins_only();
        let build = || Heatsink::builder(store.clone()).salt(salt.clone()).build().unwrap();
        let (hs, other) = (build(), build());
        let (max, set) = (hs.max("best"), hs.union("badges"));
        let pin = |slots| {
            for key in ["best", "badges"] {
                hs.control().pin(key, Treatment::Salt { slots }).unwrap();
            }
        };
        let mut given = 0i64;
        for slots in [8, 4, 16, 0] {
            if slots == 0 {
                assert!(["best", "badges"].map(|key| hs.control().unpin(key)) == [true; 2]);
            } else {
                pin(slots);
            }
            let until = Instant::now() + ms(1500);
            while Instant::now() < until {
                given += 1;
                max.offer(given).await.unwrap();
                // The same from two processes, and bytes that look like a seal.
                let member =
                    [&(given % 500).to_string().into_bytes(), &b"\x01hs-seal:7"[..]].concat();
                set.insert(&member).await.unwrap();
                other.union("badges").insert(&member).await.unwrap();
                tokio::time::sleep(ms(2)).await;
            }
            let seen = other.max("best").value_with(Duration::ZERO).await.unwrap();
            assert_eq!(seen.value(), Some(given), "{slots} slots");
            let seen = other.union("badges").members_with(Duration::ZERO).await.unwrap();
            assert_eq!(seen.len() as i64, given.min(500), "{slots} slots");
        }
        tokio::time::sleep(ms(5000)).await;
        let bare = store.get(&Key::from("best")).await.unwrap().unwrap();
        assert_eq!(bare.bytes, given.to_string());
        let keys: Vec<String> = server.control().ask("KEYS *slot.*");
        assert!(keys.is_empty(), "{keys:?}");
        assert!(hs.salt_stats().retired >= 4, "{:?}", hs.salt_stats());
    });
}
