//! What a fleet costs its store, counted by simulation: 1,000 relays of hosts with 20 processes
//! each, on virtual time.

#![cfg(feature = "testing")]

use super::*;
use crate::engine::control::merge::{ReportEntry, ReportKey};
use crate::runtime::BoxFuture;
use crate::store::{Delivery, MemoryStore, Subscription};
use crate::testing::SimRuntime;
use bytes::Bytes;
use std::collections::BTreeMap;

/// Counts each operation, and each delivery, at the key or the channel that it goes to.
struct Counting {
    through: ThroughStore<MemoryStore>,
    counts: Arc<Mutex<BTreeMap<Key, (u64, u64)>>>,
    subscribers: Arc<Mutex<BTreeMap<Key, u64>>>,
}

/// A subscription that is counted for as long as it lives.
struct Counted(Box<dyn Subscription>, Key, Arc<Mutex<BTreeMap<Key, u64>>>);

impl Subscription for Counted {
    fn next(&mut self) -> BoxFuture<'_, Option<Delivery>> {
        self.0.next()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(n) = self.2.lock().get_mut(&self.1) {
            *n -= 1;
        }
    }
}

impl Counting {
    fn note(&self, name: &Key, operations: u64, bytes: usize) {
        let mut counts = self.counts.lock();
        let at = counts.entry(name.clone()).or_default();
        (at.0, at.1) = (at.0 + operations, at.1 + operations * bytes as u64);
    }
}

impl Transport for Counting {
    fn get_many(&self, slots: Vec<Key>) -> BoxFuture<'_, Vec<Result<Option<Bytes>>>> {
        slots.iter().for_each(|slot| self.note(slot, 1, 0));
        self.through.get_many(slots)
    }

    fn put(&self, slot: Key, value: Bytes, ttl: Duration) -> BoxFuture<'_, Result<()>> {
        self.note(&slot, 1, value.len());
        self.through.put(slot, value, ttl)
    }

    fn compare_and_set(
        &self,
        slot: Key,
        expected: Option<Bytes>,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'_, Result<bool>> {
        self.note(&slot, 1, value.len());
        self.through.compare_and_set(slot, expected, value, ttl)
    }

    fn publish(&self, channel: Key, message: Bytes) -> BoxFuture<'_, Result<()>> {
        let deliveries = self.subscribers.lock().get(&channel).copied().unwrap_or(0);
        self.note(&channel, 1 + deliveries, message.len());
        self.through.publish(channel, message)
    }

    fn subscribe(&self, channel: Key) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            let inner = self.through.subscribe(channel.clone()).await?;
            *self.subscribers.lock().entry(channel.clone()).or_default() += 1;
            let counted = Counted(inner, channel, self.subscribers.clone());
            Ok(Box::new(counted) as Box<dyn Subscription>)
        })
    }
}

/// A relay whose host asks for 64 keys, one of them 10 times a second; or for nothing.
struct Host(Clock, bool);

impl Local for Host {
    fn clock(&self) -> Clock {
        self.0.clone()
    }

    fn take_report(&self, _: Tick, _: f64) -> Option<Report> {
        if !self.1 {
            return Some(Report::nothing());
        }
        let entry = |i: u64| {
            let key = ReportKey::new(format!("post:{i}").as_bytes(), 0);
            let count = if i == 0 { 10 } else { 1 };
            ReportEntry { key, count, error: 0, writes: 0, loads: 0 }
        };
        let (capacity, duration) = (64, Duration::from_secs(1));
        let entries = (0..64).map(entry).collect();
        Some(Report { capacity, floor: 0, one_in: 1, duration, total: 73, entries })
    }

    fn apply(&self, _: Option<(&Arc<FleetList>, Tick)>) {}

    fn explain(&self, _: &[u8]) -> Option<String> {
        None
    }

    fn alive(&self) -> bool {
        true
    }

    fn release(&self) {}
}

/// A fleet of so many relays.
struct Rig {
    rt: SimRuntime,
    counts: Arc<Mutex<BTreeMap<Key, (u64, u64)>>>,
    members: Vec<Membership>,
}

impl Rig {
    fn new(hosts: u64, busy: bool) -> Rig {
        let rt = SimRuntime::new(hosts);
        let store = MemoryStore::builder().shards(1).runtime(rt.clone()).build();
        let counts = Arc::new(Mutex::default());
        let transport = Counting {
            through: ThroughStore::new(store).unwrap(),
            counts: counts.clone(),
            subscribers: Arc::default(),
        };
        let fleet = Fleet::by(transport).promote_at(3.0 * hosts as f64);
        let member = |i: u64| {
            let local = Arc::new(Host(rt.clock(), busy));
            let roll = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            start(fleet.clone(), local, Arc::new(rt.clone()), roll, None)
        };
        let members = (0..hosts).map(member).collect();
        Rig { rt, counts, members }
    }

    fn stats(&self) -> Vec<FeedStats> {
        self.members.iter().map(Membership::stats).collect()
    }
}

/// What a name in the store is for, in the words of the table.
fn role(name: &Key) -> &'static str {
    let name = name.to_string();
    match name.trim_start_matches("hs:feed:") {
        n if n.starts_with("reports.") => "reports",
        "push" => "heartbeats and lists",
        "lease" => "lease",
        n if n.starts_with("list.") => "the list as it is stored",
        _ => "orders, and who could not publish",
    }
}

/// The busiest key or channel, and all together, in operations a second; how many hosts obey.
fn run(hosts: u64) -> (f64, f64, u64) {
    let Rig { rt, counts, members } = &Rig::new(hosts, true);
    rt.run_for(Duration::from_secs(8));
    counts.lock().clear();
    const SECS: f64 = 10.0;
    rt.run_for(Duration::from_secs_f64(SECS));
    let counts = counts.lock();
    let busiest = counts.values().map(|c| c.0).max().unwrap_or(0) as f64 / SECS;
    let all = counts.values().map(|c| c.0).sum::<u64>() as f64 / SECS;
    let mut roles: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for (name, (n, bytes)) in counts.iter() {
        let of = roles.entry(role(name)).or_default();
        (of.0, of.1) = (of.0 + *n as f64 / SECS, of.1 + *bytes as f64 / SECS);
    }
    let obey = members.iter().filter(|m| m.list().is_some_and(|l| l.get("post:0").is_some()));
    let obey = obey.count() as u64;
    println!(
        "{hosts} hosts, {} processes: {all:.1}/s, the busiest name {busiest:.1}/s",
        hosts * 20
    );
    for (role, (n, bytes)) in roles {
        println!("  {role:<34} {n:>7.1}/s {:>9.1} KiB/s", bytes / 1024.0);
    }
    assert_eq!(members.iter().filter(|m| m.stats().leads).count(), 1);
    (busiest, all, obey)
}

#[test]
fn no_control_key_is_a_hot_key_at_twenty_thousand_processes() {
    let ceiling = Ceiling::REDIS.reads_per_sec;
    for hosts in [1, 100, 1_000] {
        let (busiest, all, obey) = run(hosts);
        assert_eq!(obey, hosts, "all obey within 18 s of their start");
        assert!(busiest <= 0.01 * ceiling, "{busiest}");
        // On two shards and more, none has more than half of all.
        assert!(all / 2.0 <= 0.01 * ceiling, "{all}");
    }
}

/// Relays and the one of them that leads, whatever the size of the fleet.
#[test]
fn an_idle_fleet_costs_each_of_its_processes_less_than_a_kibibyte_a_second() {
    // The longest silence of 1,000 takes six minutes of virtual time.
    let all = std::env::var_os("HEATSINK_FLEET").is_some();
    for (hosts, secs) in [(4, 30), (100, 70), (250, 170), (1_000, 700)] {
        if hosts == 1_000 && !all {
            continue;
        }
        let rig = Rig::new(hosts, false);
        rig.rt.run_for(Duration::from_secs(20));
        let before = rig.stats();
        rig.rt.run_for(Duration::from_secs(secs));
        let mut most = [0, 0];
        for (now, before) in rig.stats().iter().zip(before) {
            let bytes = |s: &FeedStats| s.bytes_in + s.bytes_out;
            let at = &mut most[usize::from(now.leads)];
            *at = (*at).max((bytes(now) - bytes(&before)) / secs);
        }
        println!("{hosts:>6} relays: each {} bytes/s, the aggregator {} bytes/s", most[0], most[1]);
        assert!(most[1] > 0 && most.iter().all(|n| *n < 1_024), "{most:?}");
    }
}
