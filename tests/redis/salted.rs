//! A salted counter on a real cluster: eight writer processes, a coordinator that is killed every
//! few seconds while it grows, shrinks and folds the counter, and slots that move meanwhile.
//!
//! `HEATSINK_SECONDS=60` runs for a minute instead of the default eight seconds.

use crate::servers::cluster::{Cluster, MASTERS, home_of};
use crate::servers::run;
use heatsink::store::RedisStore;
use heatsink::{Heatsink, Key, Outcome, Salt, Treatment};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

const KEY: &str = "post:9:likes";
const WRITERS: usize = 8;
const TASKS: usize = 8;
/// The role of a process that this test has started from its own binary, and where its cluster is.
const ROLE: &str = "HEATSINK_SALTED_ROLE";
const URL: &str = "HEATSINK_SALTED_URL";
const THIS: &str = "salted::no_acknowledged_add_is_missing_while_a_counter_rotates_on_a_cluster";

fn salt() -> Salt {
    let ms = Duration::from_millis;
    let salt = Salt::new().lease(ms(500)).timeout(ms(160)).in_flight(ms(200)).grave(ms(2000));
    salt.cooldown(Duration::ZERO).pins_only()
}

async fn connect(urls: &str) -> Heatsink {
    let urls: Vec<&str> = urls.split(' ').collect();
    let store = RedisStore::cluster(&urls).await.unwrap();
    Heatsink::builder(store).salt(salt()).build().unwrap()
}

/// A process of this test's binary in a role. It ends when its standard input does.
fn start(role: &str, urls: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([THIS, "--exact", "--nocapture"])
        .env(ROLE, role)
        .env(URL, urls)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Set when the parent wants no more, or is gone.
fn end_of_input() -> Arc<AtomicBool> {
    let over = Arc::new(AtomicBool::new(false));
    let set = over.clone();
    std::thread::spawn(move || {
        drop(std::io::stdin().read(&mut [0]));
        set.store(true, Ordering::Relaxed);
    });
    over
}

/// Adds as fast as it can, and says at the end what became of it.
async fn write(urls: &str) {
    let (hs, over) = (connect(urls).await, end_of_input());
    let (acked, unknown) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let tasks = (0..TASKS).map(|_| {
        let (counter, over) = (hs.counter(KEY), over.clone());
        let (acked, unknown) = (acked.clone(), unknown.clone());
        tokio::spawn(async move {
            while !over.load(Ordering::Relaxed) {
                match counter.add(1).await {
                    Ok(()) => drop(acked.fetch_add(1, Ordering::Relaxed)),
                    Err(e) => {
                        let may_be = e.outcome() == Outcome::Unknown;
                        unknown.fetch_add(may_be.into(), Ordering::Relaxed);
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let (acked, unknown) = (acked.load(Ordering::Relaxed), unknown.load(Ordering::Relaxed));
    println!("\nwriter {acked} {unknown}");
}

/// Grows, shrinks and folds the counter until it is killed.
async fn rotate(urls: &str) {
    let (hs, over) = (connect(urls).await, end_of_input());
    for slots in [8u32, 2, 16, 1, 4].into_iter().cycle() {
        if slots == 1 {
            hs.control().unpin(KEY);
        } else {
            hs.control().pin(KEY, Treatment::Salt { slots }).unwrap();
        }
        let limit = Instant::now() + Duration::from_secs(3);
        while Instant::now() < limit {
            let at = hs.explain(KEY).salting.map_or(1, |s| u32::from(s.slots));
            if over.load(Ordering::Relaxed) {
                return;
            }
            if at == slots {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Moves slots that hold parts of the counter, or the registry, around the masters.
fn move_slots(cluster: &Cluster, stop: &AtomicBool) -> usize {
    let mut at: BTreeMap<u16, usize> = BTreeMap::new();
    let mut moves = 0;
    let mut names = vec![Key::from(KEY), Key::from("{hs:registry}root")];
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let found: Vec<Vec<u8>> =
            cluster.nodes[turn % MASTERS].control().words(&["KEYS", "*slot.*"]);
        names.truncate(2);
        names.extend(found.first().map(|name| Key::copy(name)));
        let slot = names[turn % names.len()].cluster_slot();
        let from = *at.entry(slot).or_insert_with(|| home_of(slot));
        let to = (from + 1) % MASTERS;
        cluster.move_slot(slot, from, to, Duration::from_millis(200));
        at.insert(slot, to);
        moves += 1;
    }
    moves
}

struct Ended {
    acked: i64,
    unknown: i64,
}

fn end(mut writer: Child) -> Ended {
    drop(writer.stdin.take());
    let lines = BufReader::new(writer.stdout.take().unwrap()).lines().map_while(Result::ok);
    // To its end, or the writer could not say that it has ended well.
    let lines: Vec<String> = lines.collect();
    let said = lines.iter().find_map(|line| line.strip_prefix("writer "));
    assert!(writer.wait().unwrap().success(), "{lines:?}");
    let said = said.expect("a writer says what it has done");
    let numbers: Vec<i64> = said.split(' ').map(|n| n.parse().unwrap()).collect();
    Ended { acked: numbers[0], unknown: numbers[1] }
}

#[test]
fn no_acknowledged_add_is_missing_while_a_counter_rotates_on_a_cluster() {
    if let Ok(role) = std::env::var(ROLE) {
        let urls = std::env::var(URL).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(async {
            if role == "writer" { write(&urls).await } else { rotate(&urls).await }
        });
    }
    let seconds = std::env::var("HEATSINK_SECONDS").map_or(8, |text| text.parse().unwrap());
    run(async {
        let cluster = Arc::new(Cluster::start());
        let urls = format!("{} {}", cluster.url(0), cluster.url(1));
        let hs = connect(&urls).await;
        let writers: Vec<Child> = (0..WRITERS).map(|_| start("writer", &urls)).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let mover = {
            let (cluster, stop) = (cluster.clone(), stop.clone());
            tokio::task::spawn_blocking(move || move_slots(&cluster, &stop))
        };
        let (until, mut kills) = (Instant::now() + Duration::from_secs(seconds), 0);
        let counter = hs.grow_only(KEY);
        let (mut shown, mut sums) = (0, 0);
        while Instant::now() < until {
            let mut coordinator = start("coordinator", &urls);
            let killed = Instant::now() + Duration::from_millis(2500);
            while Instant::now() < killed.min(until) {
                if let Ok(sum) = counter.sum_with(Duration::ZERO).await {
                    assert!(sum.total() >= shown);
                    (shown, sums) = (sum.total(), sums + 1);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            // SIGKILL, in the middle of whatever it is doing.
            coordinator.kill().unwrap();
            coordinator.wait().unwrap();
            kills += 1;
        }
        stop.store(true, Ordering::Relaxed);
        let moves = mover.await.unwrap();
        let ended: Vec<Ended> = writers.into_iter().map(end).collect();
        let acked: i64 = ended.iter().map(|e| e.acked).sum();
        let unknown: i64 = ended.iter().map(|e| e.unknown).sum();
        let sum = counter.sum_with(Duration::ZERO).await.unwrap().total();
        let rotations = hs.explain(KEY).salting.map_or(0, |s| s.generation);
        let (stats, regressed) = (hs.salt_stats(), hs.add_stats().sums_regressed);
        println!(
            "{seconds} s: {acked} acknowledged, {unknown} unknown, sum {sum}; {rotations} rotations, \
             {kills} coordinators killed, {moves} slots moved, {sums} sums read; {stats:?}"
        );
        assert!(acked <= sum && sum <= acked + unknown, "{acked} <= {sum} <= {acked} + {unknown}");
        assert!(acked > 5_000 && moves >= 4 && kills >= 3, "too little has happened");
        assert!(u64::from(rotations) >= seconds / 4, "{rotations} rotations");
        assert_eq!((stats.lost, stats.slots_missing, regressed), (0, 0, 0));
    });
}
