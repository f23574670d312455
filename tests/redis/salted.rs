//! A salted counter on a real cluster: eight writer processes, a coordinator that is killed every
//! few seconds while it grows, shrinks and folds the counter, and slots that move meanwhile. And a
//! master that dies and takes with it what its replica had not heard of.
//!
//! `HEATSINK_SECONDS=60` runs for a minute instead of the default eight seconds.

use crate::servers::cluster::{Cluster, MASTERS, home_of, until};
use crate::servers::{Server, run};
use heatsink::store::RedisStore;
use heatsink::{Heatsink, Key, Outcome, Salt, Treatment};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
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

/// The sum, once every slot answers.
async fn whole_sum(hs: &Heatsink) -> i64 {
    let limit = Instant::now() + Duration::from_secs(10);
    loop {
        match hs.counter(KEY).sum_with(Duration::ZERO).await {
            Ok(sum) if sum.behind() == 0 => return sum.total(),
            other => assert!(Instant::now() < limit, "{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Grows, shrinks and folds the counter until it is killed.
async fn rotate(urls: &str, through: &[u32]) {
    let (hs, over) = (connect(urls).await, end_of_input());
    for &slots in through.iter().cycle() {
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
            match role.as_str() {
                "writer" => write(&urls).await,
                "eight slots" => rotate(&urls, &[8]).await,
                _ => rotate(&urls, &[8, 2, 16, 1, 4]).await,
            }
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
        let (over, mut kills) = (Instant::now() + Duration::from_secs(seconds), 0);
        let counter = hs.grow_only(KEY);
        let (mut shown, mut sums) = (0, 0);
        while Instant::now() < over {
            let mut coordinator = start("coordinator", &urls);
            let killed = Instant::now() + Duration::from_millis(2500);
            while Instant::now() < killed.min(over) {
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
        let sum = whole_sum(&hs).await;
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

/// What the counters in a server's append-only files come to, by name, at its end. It writes a
/// command there before it answers it.
fn counters_in(dir: &Path) -> BTreeMap<String, i64> {
    let mut values = BTreeMap::new();
    let mut files: Vec<_> = std::fs::read_dir(dir.join("appendonlydir")).unwrap().collect();
    files.sort_by_key(|file| file.as_ref().unwrap().file_name());
    for file in files {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let mut words = text.split("\r\n");
        while let Some(word) = words.next() {
            // A command is the number of its words, and each word follows its length.
            let Some(Ok(n)) = word.strip_prefix('*').map(str::parse::<usize>) else { continue };
            let command: Vec<&str> = (0..n).filter_map(|_| words.nth(1)).collect();
            match command[..] {
                [verb, name, amount] if verb.eq_ignore_ascii_case("INCRBY") => {
                    let value: &mut i64 = values.entry(name.to_owned()).or_default();
                    *value += amount.parse::<i64>().unwrap();
                }
                [verb, ref names @ ..]
                    if verb.eq_ignore_ascii_case("DEL") || verb.eq_ignore_ascii_case("UNLINK") =>
                {
                    values.retain(|name: &String, _| !names.contains(&name.as_str()));
                }
                _ => {}
            }
        }
    }
    values.retain(|name, _| name == KEY || name.contains("slot."));
    values
}

/// What the replica of a dead master holds of those counters, before it takes over.
fn counters_of(replica: &Server) -> BTreeMap<String, i64> {
    let mut control = replica.control();
    let _: () = control.ask("READONLY");
    let mut names: Vec<String> = control.words(&["KEYS", "*slot.*"]);
    names.push(KEY.to_owned());
    let number = |text: Option<String>| {
        let text = text.unwrap_or_default();
        // A sealed counter is its digits and the seal.
        let digits: String = text.chars().take_while(|c| *c == '-' || c.is_ascii_digit()).collect();
        digits.parse().unwrap_or(0)
    };
    let held = |name: &String| {
        // The bare key may be another master's.
        let text = control.raw(&["GET", name]).ok();
        number(text.and_then(|text| redis::from_redis_value(text).ok()))
    };
    let held: Vec<i64> = names.iter().map(held).collect();
    names.into_iter().zip(held).collect()
}

/// What a dead master took with it, asked before the replica takes over.
fn lost_between(master: &Server, replica: &Server) -> i64 {
    let mut link = replica.control();
    until("the replica has heard all that it will", || {
        link.ask::<String>("INFO replication").contains("master_link_status:down")
    });
    let has = counters_of(replica);
    let gone = |(name, n): (&String, &i64)| (n - has.get(name).unwrap_or(&0)).max(0);
    counters_in(master.dir()).iter().map(gone).sum()
}

/// The master that holds neither the registry nor the record: a failover loses adds, not rotations.
fn victim() -> usize {
    let names = [Key::from("{hs:registry}root"), heatsink::record_name(&Key::from(KEY))];
    let homes = names.map(|name| home_of(name.cluster_slot()));
    (0..MASTERS).find(|master| !homes.contains(master)).unwrap()
}

#[test]
fn a_failover_loses_no_more_of_a_salted_counter_than_the_servers_lost_and_it_is_told() {
    run(async {
        let args = ["--cluster-require-full-coverage", "no", "--appendonly", "yes"];
        let (cluster, victim) = (Cluster::with(&args), victim());
        let (master, replica) = (&cluster.nodes[victim], &cluster.nodes[MASTERS + victim]);
        let urls = format!("{} {}", cluster.url(victim), cluster.url((victim + 1) % MASTERS));
        let store = RedisStore::cluster(&urls.split(' ').collect::<Vec<_>>()).await.unwrap();
        let hs = Heatsink::builder(store.clone()).salt(salt()).build().unwrap();
        let counter = hs.grow_only(KEY);
        let writers: Vec<Child> = (0..WRITERS).map(|_| start("writer", &urls)).collect();
        let mut coordinator = start("coordinator", &urls);
        let mut shown = 0;
        let mut read_for = async |ms: u64| {
            let until = Instant::now() + Duration::from_millis(ms);
            while Instant::now() < until {
                if let Ok(sum) = counter.sum_with(Duration::ZERO).await {
                    assert!(sum.total() >= shown, "{} after {shown}", sum.total());
                    shown = sum.total();
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        read_for(2000).await;
        coordinator.kill().unwrap();
        coordinator.wait().unwrap();
        // All writers in slots on all masters, so that this one has something to lose.
        let mut pinned = start("eight slots", &urls);
        let limit = Instant::now() + Duration::from_secs(15);
        while hs.explain(KEY).salting.is_none_or(|s| (s.slots, s.in_rotation) != (8, 0)) {
            assert!(Instant::now() < limit, "{}", hs.explain(KEY));
            read_for(50).await;
        }
        pinned.kill().unwrap();
        pinned.wait().unwrap();
        // The replica falls behind, and the master goes on acknowledging. It does not take over
        // before it was asked what it has: what came after that would hide what was lost.
        let mut control = master.control();
        let mut behind = replica.control();
        let _: () = behind.ask("CONFIG SET cluster-replica-no-failover yes");
        replica.pause();
        let _: i64 = control.ask("CLIENT KILL TYPE replica");
        read_for(250).await;
        master.kill();
        replica.resume();
        coordinator = start("coordinator", &urls);
        let lost = lost_between(master, replica);
        let _: () = behind.ask("CONFIG SET cluster-replica-no-failover no");
        let limit = Instant::now() + Duration::from_secs(15);
        while store.stats().failovers == 0 && Instant::now() < limit {
            read_for(100).await;
        }
        read_for(1500).await;
        coordinator.kill().unwrap();
        coordinator.wait().unwrap();
        let ended: Vec<Ended> = writers.into_iter().map(end).collect();
        let acked: i64 = ended.iter().map(|e| e.acked).sum();
        let unknown: i64 = ended.iter().map(|e| e.unknown).sum();
        let sum = whole_sum(&hs).await;
        let (stats, regressed) = (hs.salt_stats(), hs.add_stats().sums_regressed);
        println!(
            "failover: {acked} acknowledged, {unknown} unknown, sum {sum}; the servers lost {lost}, \
             {} missing; {regressed} sums had gone back, {stats:?}",
            acked - sum
        );
        assert!(acked > 2_000 && lost > 0, "too little has happened");
        assert!(sum <= acked + unknown, "{sum} <= {acked} + {unknown}");
        assert!(acked - sum <= lost, "{} are missing, and the servers lost {lost}", acked - sum);
        // It is told: by the store, and by whoever had seen what is gone.
        assert_eq!(store.stats().failovers, 1);
        assert!(regressed > 0 || stats.slots_lost > 0);
        assert!(stats.slots_lost <= lost.unsigned_abs(), "{} of {lost}", stats.slots_lost);
    });
}
