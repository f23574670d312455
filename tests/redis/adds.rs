//! Adds that travel together, on real servers.

use crate::load::{Plain, Seen};
use crate::servers::cluster::Cluster;
use crate::servers::{Server, run};
use heatsink::store::{RedisStore, Store};
use heatsink::{Heatsink, Key};
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
