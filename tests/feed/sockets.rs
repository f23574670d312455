//! The processes of one host over real sockets. Here they are handles of one process: each has its
//! own feed, thread and connections. `examples/fleet.rs` has real processes.

use heatsink::feed::{self, Feed, Options};
use heatsink::store::MemoryStore;
use heatsink::{Heatsink, Rule};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// A directory that is removed in the end.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Dir {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, SeqCst);
        Dir(std::env::temp_dir().join(format!("heatsink-feed-{}-{n}", std::process::id())))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[track_caller]
pub fn until(limit: Duration, what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let from = Instant::now();
    while !done() {
        assert!(from.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
    from.elapsed()
}

pub const LONG: Duration = Duration::from_secs(10);

/// A handle that reads one key 30 times a second.
pub struct Process {
    pub hs: Heatsink,
    pub feed: Option<Feed>,
    stop: Arc<AtomicBool>,
}

impl Process {
    pub fn start(dir: &Path) -> Process {
        let store = MemoryStore::new(2);
        store.put_now("viral", "v").unwrap();
        let hs = Heatsink::new(store).unwrap();
        let feed = hs.serve_feed_with(dir, Options::new().promote_at(60.0), None).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (reader, stopped) = (heatsink::blocking::Heatsink::from(hs.clone()), stop.clone());
        std::thread::spawn(move || {
            while !stopped.load(SeqCst) {
                reader.get("viral").unwrap();
                std::thread::sleep(Duration::from_millis(33));
            }
        });
        Process { hs, feed: Some(feed), stop }
    }

    pub fn treats(&self) -> bool {
        self.hs.control().treated().contains(&"viral".into())
    }

    pub fn leads(&self) -> bool {
        self.feed.as_ref().is_some_and(|f| f.stats().leads)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
    }
}

pub fn ask(dir: &Path, command: &str) -> String {
    let mut stream = UnixStream::connect(dir.join("admin.sock")).unwrap();
    writeln!(stream, "{command}").unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer
}

#[test]
fn siblings_find_together_what_none_finds_alone_and_a_dead_server_is_replaced() {
    let dir = Dir::new();
    let mut processes: Vec<Process> = (0..4).map(|_| Process::start(&dir.0)).collect();
    let all = |processes: &[Process]| processes.iter().all(Process::treats);
    let took = until(LONG, "all treat the key", || all(&processes));
    println!("treated by four siblings after {took:?}");
    assert_eq!(processes.iter().filter(|p| p.leads()).count(), 1);
    let told = processes[3].hs.explain("viral").to_string();
    assert!(told.contains("hot for all processes together"), "{told}");
    // The serving process ends; nobody's treatment flaps.
    let dead = processes.iter().position(Process::leads).unwrap();
    let mut dead = processes.remove(dead);
    let flips: Vec<u64> = processes.iter().map(|p| p.hs.hot_list().version).collect();
    drop(dead.feed.take());
    let took = until(Duration::from_secs(2), "another serves", || {
        assert!(all(&processes), "no treatment is lost");
        processes.iter().any(Process::leads)
    });
    println!("taken over after {took:?}");
    assert!(!dead.treats(), "without a feed it goes by itself");
    let from = Instant::now();
    while from.elapsed() < Duration::from_secs(3) {
        assert!(all(&processes), "no treatment is lost");
        std::thread::sleep(Duration::from_millis(5));
    }
    for (p, before) in processes.iter().zip(flips) {
        let changes = p.hs.hot_list().version - before;
        assert!(changes <= 4, "{changes} changes");
    }
}

#[test]
fn a_process_without_a_handle_follows_the_list_and_reports_into_it() {
    let dir = Dir::new();
    let process = Process::start(&dir.0);
    until(LONG, "it serves", || process.leads());
    let mut following = feed::follow(&dir.0).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    // 30 a second are the process's, 60 this one's.
    let from = Instant::now();
    let mut seen = 0;
    until(LONG, "the key is hot", || {
        while f64::from(seen) < 60.0 * from.elapsed().as_secs_f64() {
            following.observe("viral", false);
            seen += 1;
        }
        following.list().is_some_and(|list| list.get("viral").is_some()) && process.treats()
    });
    stop.store(true, SeqCst);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let list = runtime.block_on(async {
        loop {
            let list = following.next().await.unwrap();
            if list.get("viral").is_some() {
                return list;
            }
        }
    });
    let entry = list.get("viral").unwrap();
    assert_eq!((entry.rule, entry.reporters), (Rule::Detected, 2), "{entry}");
    assert!(following.stats().lists.applied >= 1 && !following.stats().leads);
    drop(process);
    let rest = runtime.block_on(async { following.next().await.unwrap() });
    assert!(rest.entries.is_empty() || rest.edition != list.edition);
}

#[test]
fn an_operator_steers_all_siblings_over_a_socket_of_their_own() {
    let dir = Dir::new();
    let processes: Vec<Process> = (0..2).map(|_| Process::start(&dir.0)).collect();
    until(LONG, "one serves", || processes.iter().any(Process::leads));
    until(LONG, "both have a list", || {
        processes.iter().all(|p| p.feed.as_ref().unwrap().list().is_some())
    });
    let treated = |key: &str| {
        let key = heatsink::Key::from(key);
        processes.iter().filter(|p| p.hs.control().treated().contains(&key)).count()
    };
    assert_eq!(ask(&dir.0, r#"{"pin":{"key":"launch"}}"#), "{\"ok\":true}\n");
    until(LONG, "both treat it", || treated("launch") == 2);
    let told = processes[0].hs.explain("launch").to_string();
    assert!(told.contains("pinned by an operator"), "{told}");
    assert!(ask(&dir.0, r#"{"list":{}}"#).contains(r#""key":"launch""#));
    assert_eq!(ask(&dir.0, r#"{"deny":{"key":"launch"}}"#), "{\"ok\":true}\n");
    until(LONG, "nobody treats it", || treated("launch") == 0);
    let told = ask(&dir.0, r#"{"explain":{"key":"launch"}}"#);
    for part in ["is denied", "pinned by an operator", "denied by an operator"] {
        assert!(told.contains(part), "{told}");
    }
    assert_eq!(ask(&dir.0, r#"{"allow":{"key":"launch"}}"#), "{\"ok\":true}\n");
    assert_eq!(ask(&dir.0, r#"{"unpin":{"key":"launch"}}"#), "{\"ok\":true}\n");
    assert_eq!(ask(&dir.0, r#"{"unpin":{"key":"launch"}}"#), "{\"ok\":false}\n");
    assert!(ask(&dir.0, "nonsense").starts_with("{\"error\":"));
    // Nobody serves any more.
    let store = MemoryStore::new(1);
    drop(processes);
    assert!(UnixStream::connect(dir.0.join("admin.sock")).is_err());
    drop(store);
}

#[test]
fn a_script_of_thirty_lines_follows_the_list() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/follow.py");
    assert!(std::fs::read_to_string(&script).unwrap().lines().count() <= 30);
    let dir = Dir::new();
    let process = Process::start(&dir.0);
    until(LONG, "it serves", || process.leads());
    assert_eq!(ask(&dir.0, r#"{"pin":{"key":"launch"}}"#), "{\"ok\":true}\n");
    let out = Command::new("python3").arg(&script).arg(&dir.0).arg("launch").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && text.contains("launch") && text.contains("near"), "{text}");
    assert_eq!(process.feed.as_ref().unwrap().stats().nacks, 0);
    // Clear words when nothing listens.
    let out = Command::new("python3").arg(&script).arg(dir.0.join("no")).output().unwrap();
    assert!(!out.status.success());
    assert!(String::from_utf8(out.stderr).unwrap().contains("nobody serves"));
}

#[test]
fn a_handle_has_one_feed_and_may_have_another_after_it() {
    let dir = Dir::new();
    let store = MemoryStore::new(1);
    let hs = Heatsink::new(store.clone()).unwrap();
    let first = hs.serve_feed(&dir.0).unwrap();
    let fleet = || feed::Fleet::over(store.clone()).unwrap();
    let told = hs.join_fleet(fleet()).unwrap_err().to_string();
    assert!(told.contains("has a feed already"), "{told}");
    drop(first);
    drop(hs.join_fleet(fleet()).unwrap());
    drop(hs.join_fleet(fleet()).unwrap());
    let _again = hs.serve_feed_with(&dir.0, Options::new(), Some(fleet())).unwrap();
}

/// All twenty processes of a host, one of which serves, is the relay to the fleet, and leads it.
#[test]
fn idle_siblings_and_their_relay_send_and_hear_less_than_a_kibibyte_a_second() {
    let (dir, store) = (Dir::new(), MemoryStore::new(1));
    let idle = || {
        let hs = Heatsink::new(MemoryStore::new(1)).unwrap();
        let fleet = feed::Fleet::over(store.clone()).unwrap();
        let feed = hs.serve_feed_with(&dir.0, Options::new(), Some(fleet)).unwrap();
        (hs, feed)
    };
    let all: Vec<(Heatsink, Feed)> = (0..20).map(|_| idle()).collect();
    let relay = || all.iter().find_map(|(_, f)| f.fleet_stats());
    until(LONG, "all have a list", || all.iter().all(|(_, f)| f.list().is_some()));
    until(LONG, "the relay leads the fleet", || relay().is_some_and(|r| r.leads));
    // Two windows more, and all are known to be idle.
    std::thread::sleep(Duration::from_secs(2));
    let bytes = |s: feed::FeedStats| s.bytes_in + s.bytes_out;
    let before: Vec<u64> = all.iter().map(|(_, f)| bytes(f.stats())).collect();
    let (relay_before, from) = (relay().map_or(0, bytes), Instant::now());
    std::thread::sleep(Duration::from_secs(6));
    let per_sec = |n: u64| n as f64 / from.elapsed().as_secs_f64();
    for ((_, f), before) in all.iter().zip(before) {
        let own = per_sec(bytes(f.stats()) - before);
        if f.stats().leads {
            let fleet = per_sec(relay().map_or(0, bytes) - relay_before);
            println!("serves 19: {own:.0} bytes/s; as the fleet's aggregator {fleet:.0} bytes/s");
            assert!(fleet > 0.0 && fleet < 1_024.0, "{fleet}");
        }
        assert!(own < 1_024.0, "{own}");
    }
}

/// The host's relay passes an operator's order on to the fleet, and the host's own goes first.
#[test]
fn an_operators_order_on_one_host_reaches_the_processes_of_another() {
    let store = MemoryStore::new(1);
    let host = || {
        let dir = Dir::new();
        let hs = Heatsink::new(MemoryStore::new(1)).unwrap();
        let fleet = feed::Fleet::over(store.clone()).unwrap();
        let feed = hs.serve_feed_with(&dir.0, Options::new(), Some(fleet)).unwrap();
        (dir, hs, feed)
    };
    let hosts = [host(), host()];
    let treats = |i: usize| hosts[i].1.control().treated().contains(&"launch".into());
    until(LONG, "a relay leads the fleet", || {
        hosts.iter().any(|(_, _, f)| f.fleet_stats().is_some_and(|s| s.leads))
    });
    let mut operator = feed::Operator::connect(&hosts[0].0.0).unwrap();
    operator.pin("launch").unwrap();
    let took = until(LONG, "both hosts treat it", || treats(0) && treats(1));
    println!("an order on one host is obeyed on both after {took:?}");
    let told = feed::Operator::connect(&hosts[1].0.0).unwrap().explain("launch").unwrap();
    assert!(
        told.iter().any(|l| l.contains("fleet: near cache (pinned by an operator")),
        "{told:?}"
    );
    assert!(operator.order_host("launch", feed::Order::deny()).unwrap());
    until(LONG, "this host denies it", || !treats(0));
    assert!(treats(1), "the other one does not");
    assert!(operator.order_host("launch", feed::Order::allow()).unwrap());
    assert!(operator.unpin("launch").unwrap() && !operator.unpin("launch").unwrap());
    until(LONG, "neither host treats it", || !treats(0) && !treats(1));
    assert!(operator.pin("x".repeat(2_000)).is_err());
}

/// One host takes short keys only; another one only watches the fleet.
#[test]
fn a_relay_leaves_out_what_its_host_refuses_and_a_watching_one_passes_nothing_on() {
    let store = MemoryStore::new(1);
    let fleet = || feed::Fleet::over(store.clone()).unwrap();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
    let leader = Heatsink::new(MemoryStore::new(1)).unwrap();
    let _in = runtime.enter();
    let member = leader.join_fleet(fleet()).unwrap();
    let host = |options: Options, fleet: feed::Fleet| {
        let (dir, hs) = (Dir::new(), Heatsink::new(MemoryStore::new(1)).unwrap());
        let feed = hs.serve_feed_with(&dir.0, options, Some(fleet.never_lead())).unwrap();
        (dir, hs, feed)
    };
    let caps = feed::Caps { key_bytes_max: 16, ..feed::Caps::default() };
    let short = host(Options::new().caps(caps), fleet());
    let watches = host(Options::new(), fleet().watch_only().report_nothing());
    let (long, key) = ("x".repeat(30), heatsink::Key::from("launch"));
    runtime.block_on(async {
        member.order(&long, feed::Order::pin()).await.unwrap();
        member.order("launch", feed::Order::pin()).await.unwrap();
    });
    until(LONG, "the host obeys the rest", || short.1.control().treated() == [key.clone()]);
    until(LONG, "it is counted", || short.2.stats().keys_unlisted == 1);
    let mut operator = feed::Operator::connect(&short.0.0).unwrap();
    assert!(operator.order_host(&long, feed::Order::pin()).is_err(), "its own caps hold");
    let seen = || watches.2.fleet_stats().is_some_and(|s| s.edition == member.stats().edition);
    until(LONG, "the watching relay has the fleet's list", seen);
    until(LONG, "the leader and the first host report", || member.stats().reporters == 2);
    // Longer than an idle relay is silent.
    std::thread::sleep(Duration::from_secs(3));
    assert!(watches.1.control().treated().is_empty());
    assert_eq!(member.stats().reporters, 2);
}

#[test]
fn after_a_shutdown_the_feed_ends_and_nothing_is_treated_any_more() {
    let dir = Dir::new();
    let process = Process::start(&dir.0);
    until(LONG, "it serves", || process.leads());
    assert_eq!(ask(&dir.0, r#"{"pin":{"key":"launch"}}"#), "{\"ok\":true}\n");
    until(LONG, "it treats it", || process.hs.control().treated().contains(&"launch".into()));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(process.hs.shutdown());
    assert!(process.hs.control().treated().is_empty());
    until(LONG, "nobody serves", || UnixStream::connect(dir.0.join("admin.sock")).is_err());
    let _ = process.hs.control().pin("late", heatsink::Treatment::near());
    std::thread::sleep(Duration::from_millis(600));
    assert!(process.hs.control().treated().is_empty());
    assert!(process.feed.as_ref().unwrap().list().is_none());
}
