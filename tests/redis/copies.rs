//! Copies on a cluster whose slots move and whose nodes are killed.

use crate::servers::cluster::{Cluster, MASTERS, home_of};
use crate::servers::run;
use heatsink::Key;
use heatsink::copies::{Copied, Reach};
use heatsink::engine::control::copies::Image;
use heatsink::store::{RedisStore, Store};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const COPIES: u16 = 5;
const IN_FLIGHT: Duration = Duration::from_secs(3);
const PROCESSES: usize = 3;

async fn process(cluster: &Cluster) -> (RedisStore, Copied) {
    let builder = RedisStore::builder(&cluster.url(0)).seed(&cluster.url(4));
    let store = builder.max_in_flight_time(IN_FLIGHT).connect().await.unwrap();
    let copied = Copied::new(store.clone(), "page", 1, COPIES).unwrap();
    (store, copied)
}

/// "writer:number"
fn parse(value: &[u8]) -> (usize, u64) {
    let text = std::str::from_utf8(value).unwrap();
    let (writer, number) = text.split_once(':').unwrap();
    (writer.parse().unwrap(), number.parse().unwrap())
}

#[derive(Default)]
struct Counts {
    reads: AtomicU64,
    read_errors: AtomicU64,
    all: AtomicU64,
    ttl: AtomicU64,
    write_errors: AtomicU64,
}

/// Each writer's numbers only grow in the base, so no reader may see one of them fall.
async fn reader(page: Copied, stop: Arc<AtomicBool>, counts: Arc<Counts>) {
    let mut newest: BTreeMap<usize, u64> = BTreeMap::new();
    while !stop.load(Relaxed) {
        match page.get().await {
            Ok(Some(value)) => {
                let (writer, number) = parse(&value);
                let before = newest.insert(writer, number).unwrap_or(0);
                assert!(number >= before, "writer {writer}: {number} after {before}");
                counts.reads.fetch_add(1, Relaxed);
            }
            Ok(None) => drop(counts.reads.fetch_add(1, Relaxed)),
            Err(_) => drop(counts.read_errors.fetch_add(1, Relaxed)),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn writer(page: Copied, me: usize, stop: Arc<AtomicBool>, counts: Arc<Counts>) {
    let mut number = 0;
    while !stop.load(Relaxed) {
        number += 1;
        let write = if number % 5 == 0 {
            page.delete().await
        } else {
            page.put(format!("{me}:{number}")).await
        };
        match write {
            Ok(Reach::All) => counts.all.fetch_add(1, Relaxed),
            Ok(Reach::Ttl) => counts.ttl.fetch_add(1, Relaxed),
            Err(_) => counts.write_errors.fetch_add(1, Relaxed),
        };
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Moves the base's slot and a copy's around the masters, and kills a master that holds copies and
/// not the base. `HEATSINK_SECONDS=60` runs it for longer.
#[test]
fn no_read_goes_back_while_slots_move_and_a_node_is_killed_and_all_copies_end_as_the_base() {
    let seconds = std::env::var("HEATSINK_SECONDS").map_or(8, |s| s.parse().unwrap());
    run(async move {
        let cluster = Arc::new(Cluster::start());
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(Counts::default()));
        let mut tasks = Vec::new();
        let mut pages = Vec::new();
        for p in 0..PROCESSES {
            let (store, page) = process(&cluster).await;
            for _ in 0..2 {
                tasks.push(tokio::spawn(reader(page.clone(), stop.clone(), counts.clone())));
            }
            if p < 2 {
                tasks.push(tokio::spawn(writer(page.clone(), p, stop.clone(), counts.clone())));
            }
            pages.push((store, page));
        }
        let base = Key::from("page").cluster_slot();
        let victim = (home_of(base) + 1) % MASTERS;
        let spare = (home_of(base) + 2) % MASTERS;
        let names = pages[0].1.names();
        let on = |node: usize| names.iter().filter(|n| home_of(n.cluster_slot()) == node).count();
        assert!(on(victim) > 0, "the killed node holds copies");
        let until = Instant::now() + Duration::from_secs(seconds) * 2 / 3;
        let mover = {
            let (cluster, home) = (cluster.clone(), home_of(base));
            move || {
                let mut moves = 0;
                let (mut from, mut to) = (home, spare);
                while Instant::now() < until || from != home {
                    cluster.move_slot(base, from, to, Duration::from_millis(150));
                    (from, to) = (to, from);
                    moves += 1;
                    std::thread::sleep(Duration::from_millis(300));
                }
                moves
            }
        };
        let moves = tokio::task::spawn_blocking(mover).await.unwrap();
        // Its replica takes over meanwhile.
        cluster.nodes[victim].kill();
        tokio::time::sleep(Duration::from_secs(seconds) / 3).await;
        stop.store(true, Relaxed);
        for task in tasks {
            task.await.unwrap();
        }
        // What was of unknown outcome is settled by then; a copy that could not be written while
        // its node was down is repaired by whoever finds it, here by us.
        tokio::time::sleep(IN_FLIGHT + Duration::from_millis(500)).await;
        let (store, page) = &pages[0];
        let limit = Instant::now() + Duration::from_secs(20);
        while page.repair().await != Reach::All {
            assert!(Instant::now() < limit, "the replica has not taken over");
        }
        let value = store.get(&Key::from("page")).await.unwrap().map(|s| s.bytes);
        for name in page.names() {
            let copy = store.get(name).await.unwrap().expect("just repaired").bytes;
            assert_eq!(Image::decode(&copy).unwrap().bytes, value, "{name}");
        }
        let get = |n: &AtomicU64| n.load(Relaxed);
        println!(
            "{moves} moves, {} reads ({} failed), {} writes reached all, {} some, {} failed",
            get(&counts.reads),
            get(&counts.read_errors),
            get(&counts.all),
            get(&counts.ttl),
            get(&counts.write_errors),
        );
        assert!(moves >= 4 && get(&counts.reads) > 1_000 && get(&counts.all) > 50);
    });
}
