//! Hot keys are found by the handle, treated, told of, and let go. On virtual time.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Ceiling, Detect, Heatsink, Put, Read, Rule, Schedule, Treatment};
use std::num::NonZeroU32;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

struct Rig {
    rt: SimRuntime,
    store: MemoryStore,
    hs: Heatsink,
}

fn rig(detect: Detect) -> Rig {
    let rt = SimRuntime::new(7);
    let store = MemoryStore::builder().shards(4).latency(MS).runtime(rt.clone()).build();
    for key in ["a", "b", "m:1", "m:2"] {
        store.put_now(key, "value").unwrap();
    }
    let builder = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(7);
    let hs = builder.detect(detect).build().unwrap();
    Rig { rt, store, hs }
}

impl Rig {
    /// Reads `key` at an even `per_sec` for `span`.
    fn read(&self, key: &str, per_sec: u32, span: Duration) {
        let gap = Duration::from_secs(1) / per_sec;
        self.rt.block_on(async {
            let until = self.rt.now().after(span);
            let mut due = self.rt.now();
            while due < until {
                self.hs.get(key).await.unwrap();
                due = due.after(gap);
                self.rt.sleep(due.since(self.rt.now())).await;
            }
        });
    }

    fn turn(&self) {
        self.rt.run_for(Duration::from_millis(20));
    }
}

#[test]
fn a_hot_key_is_found_served_from_memory_and_let_go_when_it_cools() {
    let rig = rig(Detect::new());
    rig.read("a", 400, Duration::from_secs(1));
    assert_eq!(rig.hs.control().treated(), ["a".into()]);
    let before = rig.store.reads_of("a");
    assert!(before < 300, "found long before the second is over: {before}");
    rig.read("a", 400, Duration::from_secs(4));
    assert!(rig.store.reads_of("a") - before <= 6, "one read a second");
    let list = rig.hs.hot_list();
    let hot = list.get("a").unwrap();
    assert!(hot.in_force && hot.rule == Rule::Detected, "{hot}");
    assert!((300.0..500.0).contains(&hot.reads_per_sec), "demand stays counted: {hot}");
    assert!(hot.load_per_sec <= 3.0 && hot.saved > 1_000 && hot.share.unwrap() > 0.99, "{hot}");
    let told = rig.hs.explain("a").to_string();
    assert!(
        told.contains("near cache (detected)") && told.contains("near cache from 50/s"),
        "{told}"
    );
    rig.read("b", 5, Duration::from_secs(20));
    assert!(rig.hs.control().treated().is_empty(), "{}", rig.hs.hot_list());
    let told = rig.hs.explain("a").to_string();
    let decided: Vec<&str> = told.lines().filter(|line| line.contains("decided")).collect();
    assert!(decided.len() == 2 && decided[0].contains("ago: hot:"), "{told}");
    assert!(decided[1].contains("ago: not hot any more:"), "{told}");
    let stats = rig.hs.stats();
    assert_eq!((stats.promotions, stats.demotions, stats.flips_max), (1, 1, 2));
}

#[test]
fn a_key_below_the_threshold_is_left_alone() {
    let rig = rig(Detect::new());
    rig.read("a", 30, Duration::from_secs(20));
    assert!(rig.hs.hot_list().entries.is_empty());
    assert_eq!(rig.store.reads_of("a"), rig.hs.stats().loads);
    assert_eq!(rig.hs.stats().promotions, 0);
}

#[test]
fn in_observe_only_mode_nothing_is_touched_and_everything_told() {
    let rig = rig(Detect::new().observe_only());
    rig.hs.control().pin("b", Treatment::near()).unwrap();
    rig.read("a", 400, Duration::from_secs(2));
    rig.read("b", 100, Duration::from_secs(1));
    let stats = rig.hs.stats();
    assert_eq!((stats.hits_fresh, stats.hits_stale, stats.hot_keys), (0, 0, 0));
    assert_eq!(rig.store.reads_of("a") + rig.store.reads_of("b"), stats.misses, "as without it");
    let list = rig.hs.hot_list();
    assert!(list.observe_only);
    for key in ["a", "b"] {
        let entry = list.get(key).unwrap();
        assert_eq!((entry.treatment, entry.in_force), (Some(Treatment::Near), false), "{entry}");
    }
    assert!(list.to_string().contains("would be: near cache"), "{list}");
}

#[test]
fn pins_only_finds_nothing() {
    let rig = rig(Detect::pins_only());
    rig.read("a", 900, Duration::from_secs(3));
    assert!(rig.hs.hot_list().entries.is_empty());
}

#[test]
fn a_denied_key_is_found_and_never_treated() {
    let rig = rig(Detect::new());
    rig.hs.control().deny("a").unwrap();
    rig.read("a", 400, Duration::from_secs(2));
    let list = rig.hs.hot_list();
    let hot = list.get("a").unwrap();
    assert!(hot.rule == Rule::Denied && !hot.in_force, "{hot}");
    assert_eq!(rig.hs.stats().hits_fresh, 0);
    assert!(rig.hs.control().allow("a"));
    rig.turn();
    assert_eq!(rig.hs.control().treated(), ["a".into()]);
}

#[test]
fn a_schedule_treats_its_keys_before_any_traffic_and_stops_at_its_end() {
    let rig = rig(Detect::new());
    let soon = Schedule::keys(["a", "b"]).starts_in(Duration::from_secs(1));
    rig.hs.control().schedule(soon.lasts(Duration::from_secs(2))).unwrap();
    let treated = || rig.hs.control().treated().len();
    assert_eq!(treated(), 0);
    rig.rt.run_for(Duration::from_millis(1_020));
    assert_eq!(treated(), 2);
    assert_eq!(rig.hs.hot_list().get("b").unwrap().rule, Rule::Scheduled);
    rig.rt.run_for(Duration::from_millis(2_020));
    assert_eq!(treated(), 0);
}

#[test]
fn a_key_under_a_scheduled_prefix_is_treated_at_a_tenth_of_the_threshold() {
    let rig = rig(Detect::new());
    let id = rig.hs.control().schedule(Schedule::prefix("m:")).unwrap();
    rig.read("a", 20, Duration::from_secs(3));
    rig.read("m:1", 20, Duration::from_secs(3));
    let list = rig.hs.hot_list();
    assert_eq!(list.get("m:1").unwrap().rule, Rule::Scheduled, "{list}");
    assert!(list.get("a").is_none() && list.get("m:2").is_none(), "{list}");
    assert!(rig.hs.control().cancel(id));
    rig.read("b", 5, Duration::from_secs(12));
    assert!(rig.hs.hot_list().entries.is_empty(), "it goes with its schedule");
}

#[test]
fn a_write_hot_key_is_told_of_and_not_cached() {
    let rig = rig(Detect::new().ceiling(Ceiling::FIRESTORE));
    rig.rt.block_on(async {
        for i in 0..600 {
            rig.hs.put("a", i.to_string()).await.unwrap();
            rig.rt.sleep(4 * MS).await;
        }
    });
    let list = rig.hs.hot_list();
    let hot = list.get("a").unwrap();
    assert!(hot.treatment.is_none() && hot.writes_per_sec > 100.0, "{hot}");
    assert_eq!(hot.writes_advice.unwrap().treatment, Treatment::Shed, "{hot}");
    assert!(rig.hs.control().treated().is_empty());
}

#[test]
fn costs_make_a_rare_but_expensive_key_hot() {
    let rig = rig(Detect::new());
    let read = Read::new().costs(NonZeroU32::new(50).unwrap());
    rig.rt.block_on(async {
        for _ in 0..60 {
            rig.hs.get_with("a", read).await.unwrap();
            rig.hs.get("b").await.unwrap();
            let put = Put::new().costs(NonZeroU32::new(50).unwrap());
            rig.hs.put_with("m:1", "x", put).await.unwrap();
            rig.rt.sleep(100 * MS).await;
        }
    });
    let list = rig.hs.hot_list();
    assert!(
        list.get("a").is_some() && list.get("m:1").is_some() && list.get("b").is_none(),
        "{list}"
    );
}

#[test]
fn a_follower_gets_every_state_and_a_slow_one_the_newest() {
    let rig = rig(Detect::new());
    let mut changes = rig.hs.follow_hot_list().unwrap();
    let first = rig.rt.block_on(changes.next()).unwrap();
    assert!(first.entries.is_empty());
    for key in ["a", "b"] {
        rig.hs.control().pin(key, Treatment::near()).unwrap();
    }
    let newest = rig.rt.block_on(changes.next()).unwrap();
    assert_eq!(newest.entries.len(), 2, "conflated");
    assert!(newest.version > first.version);
    let hs = rig.hs.clone();
    rig.rt.spawn(async move { hs.shutdown().await });
    assert!(rig.rt.block_on(changes.next()).is_none());
    drop(changes);
    let all: Vec<_> = (0..1_024).map(|_| rig.hs.follow_hot_list().unwrap()).collect();
    assert!(rig.hs.follow_hot_list().is_err());
    drop(all);
    assert!(rig.hs.follow_hot_list().is_ok());
}

#[test]
fn reports_of_two_handles_add_up() {
    let (one, two) = (rig(Detect::new()), rig(Detect::new()));
    for rig in [&one, &two] {
        rig.read("a", 300, Duration::from_secs(5));
        rig.read("b", 5, Duration::from_secs(1));
    }
    let top = Heatsink::hottest_of([&one.hs, &two.hs], 1);
    assert_eq!(&*top[0].key.bytes, b"a");
    let single = Heatsink::hottest_of([&one.hs], 1)[0].estimate;
    assert!(top[0].estimate > single * 3 / 2, "{} of {single}", top[0].estimate);
}

#[test]
fn the_hottest_shard_is_held_against_the_mean() {
    let rig = rig(Detect::pins_only());
    for key in ["a", "b", "m:1", "m:2"] {
        rig.read(key, 20, Duration::from_secs(1));
    }
    rig.read("a", 200, Duration::from_secs(4));
    let ratio = rig.hs.stats().hottest_over_mean_shard.unwrap();
    assert!((2.0..=4.0).contains(&ratio), "{ratio}");
    let per_request = rig.hs.stats().store_operations_per_request().unwrap();
    assert!((per_request - 1.0).abs() < 0.01, "{per_request}");
}

#[test]
fn a_stalled_driver_finds_nothing_and_harms_nothing() {
    let rig = rig(Detect::new());
    rig.read("a", 400, Duration::from_secs(1));
    rig.hs.stall_driver(true);
    let before = rig.store.reads_of("a");
    rig.read("a", 400, Duration::from_secs(4));
    assert!(rig.store.reads_of("a") - before > 500, "the bare behaviour from two seconds on");
    rig.hs.stall_driver(false);
    rig.turn();
    let before = rig.store.reads_of("a");
    rig.read("a", 400, Duration::from_secs(2));
    assert!(rig.store.reads_of("a") - before <= 4);
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let build = |detect| Heatsink::builder(MemoryStore::new(1)).detect(detect).build();
    let second = Duration::from_secs(1);
    for bad in [
        Detect::new().promote_at(0.0),
        Detect::new().promote_at(f64::NAN),
        Detect::new().promote_at(-1.0),
        Detect::new().demote_permille(1_001),
        Detect::new().window(second, second / 2),
        Detect::new().window(Duration::ZERO, second),
        Detect::new().samples_per_sec(0),
        Detect::new().found_max(0),
        Detect::new().found_max(40_000),
    ] {
        let error = build(bad.clone()).map(drop).unwrap_err();
        assert_eq!(error.kind(), heatsink::ErrorKind::Config, "{bad:?}");
    }
}

#[test]
fn what_explain_tells_of_a_key_is_its_entry_on_the_hot_list() {
    let rig = rig(Detect::new());
    let control = rig.hs.control();
    control.pin("b", Treatment::near()).unwrap();
    control.pin("m:2", Treatment::near()).unwrap();
    control.deny("m:2").unwrap();
    control.schedule(Schedule::keys(["m:1"])).unwrap();
    rig.read("a", 400, Duration::from_secs(3));
    let list = rig.hs.hot_list();
    assert_eq!(list.entries.len(), 4, "{list}");
    for entry in &list.entries {
        assert_eq!(rig.hs.explain(&entry.key).hot.as_ref(), Some(entry), "{}", entry.key);
    }
    assert!(rig.hs.explain("other").hot.is_none());
}
