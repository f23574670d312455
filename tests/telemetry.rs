//! Numbers and events reach what the service has installed, and carry no key they must not.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use heatsink::key::redact_keys;
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Detect, Heatsink, Key};
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, KeyName, Metadata, Recorder};
use metrics::{SharedString, Unit};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};

type Seen = Arc<Mutex<BTreeMap<String, f64>>>;

#[derive(Clone, Default)]
struct Numbers(Seen);

struct Cell(String, Seen);

impl CounterFn for Cell {
    fn increment(&self, _: u64) {}
    fn absolute(&self, value: u64) {
        self.1.lock().unwrap().insert(self.0.clone(), value as f64);
    }
}

impl GaugeFn for Cell {
    fn increment(&self, _: f64) {}
    fn decrement(&self, _: f64) {}
    fn set(&self, value: f64) {
        self.1.lock().unwrap().insert(self.0.clone(), value);
    }
}

impl Numbers {
    fn cell(&self, key: &metrics::Key) -> Arc<Cell> {
        let labels = key.labels().map(|l| format!(" {}={}", l.key(), l.value()));
        Arc::new(Cell(format!("{}{}", key.name(), labels.collect::<String>()), self.0.clone()))
    }
}

impl Recorder for Numbers {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &metrics::Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.cell(key))
    }
    fn register_gauge(&self, key: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.cell(key))
    }
    fn register_histogram(&self, _: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "heatsink"
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// One hot key for a while, then none; what was told of it.
fn story() -> (BTreeMap<String, f64>, Vec<String>) {
    let (numbers, lines) = (Numbers::default(), Lines::default());
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).build();
    store.put_now("user:ada@example.org", "x").unwrap();
    let play = || {
        let hs = Heatsink::builder(store).runtime(rt.clone()).detect(Detect::new()).build();
        let hs = hs.unwrap();
        rt.block_on(async {
            for _ in 0..400 {
                hs.get("user:ada@example.org").await.unwrap();
                rt.sleep(Duration::from_millis(5)).await;
            }
            rt.sleep(Duration::from_secs(20)).await;
        });
    };
    metrics::with_local_recorder(&numbers, || {
        tracing::subscriber::with_default(lines.clone(), play);
    });
    let numbers = numbers.0.lock().unwrap().clone();
    let lines = lines.0.lock().unwrap().clone();
    (numbers, lines)
}

#[test]
fn numbers_and_events_are_told_and_keys_are_hidden_where_they_must_be() {
    let (numbers, lines) = story();
    for name in [
        "heatsink_hits_total freshness=fresh",
        "heatsink_misses_total",
        "heatsink_loads_total",
        "heatsink_loads_overlapped_total",
        "heatsink_writes_unknown_total",
        "heatsink_promotions_total",
        "heatsink_demotions_total",
        "heatsink_flips_max",
        "heatsink_promoted_after_max_seconds",
        "heatsink_served_age_max_seconds",
        "heatsink_store_operations_per_request",
        "heatsink_hottest_over_mean_shard",
        "heatsink_threshold_per_second",
    ] {
        assert!(numbers.contains_key(name), "{name} is not told: {numbers:?}");
    }
    assert_eq!(numbers["heatsink_promotions_total"], 1.0);
    assert!(numbers["heatsink_hits_total freshness=fresh"] > 200.0);
    assert!(!numbers.keys().any(|name| name.contains("ada")), "no key in a label");
    assert!(lines[0].contains("hot key promoted") && lines[0].contains("user:ada"), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("hot key demoted")), "{lines:?}");

    redact_keys(true);
    let (_, lines) = story();
    assert!(!lines.is_empty() && lines.iter().all(|line| !line.contains("ada")), "{lines:?}");
    let key = Key::from("user:ada@example.org");
    assert!(key.to_string().starts_with("key#") && format!("{key:?}") == format!("\"{key}\""));
    assert_ne!(key.to_string(), Key::from("user:bob@example.org").to_string());
    let error = heatsink::Error::unknown(heatsink::ErrorKind::Store, "reset").with_key(&key);
    assert!(!error.to_string().contains("ada"), "{error}");
    redact_keys(false);
    assert_eq!(key.to_string(), "user:ada@example.org");
}

#[cfg(feature = "feed")]
#[test]
fn the_feeds_numbers_are_told_too_and_no_key_is_in_a_label() {
    use heatsink::feed::{Fleet, Order};
    let numbers = Numbers::default();
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).build();
    metrics::with_local_recorder(&numbers, || {
        let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).build().unwrap();
        assert!(hs.stats().feed.is_none());
        let member = hs.join_fleet(Fleet::over(store).unwrap()).unwrap();
        rt.run_for(Duration::from_secs(4));
        rt.block_on(member.order("user:ada@example.org", Order::pin())).unwrap();
        // Numbers are told at the end of a window, which needs traffic.
        for _ in 0..400 {
            rt.block_on(hs.get("user:ada@example.org")).unwrap();
            rt.run_for(Duration::from_millis(10));
        }
        let feed = hs.stats().feed.unwrap();
        assert!(feed.leads && feed.lists.applied > 0, "{feed}");
        drop(member);
        rt.run_for(Duration::from_secs(1));
        assert!(hs.stats().feed.is_none(), "it has ended");
    });
    let numbers = numbers.0.lock().unwrap().clone();
    for (name, least) in [
        ("heatsink_feed_leads", 1.0),
        ("heatsink_feed_list_in_force", 1.0),
        ("heatsink_feed_lists_applied_total", 1.0),
        ("heatsink_feed_lists_refused_total why=expired", 0.0),
        ("heatsink_feed_reports_total", 1.0),
        ("heatsink_feed_bytes_out_total", 100.0),
    ] {
        let told = numbers.get(name).copied().unwrap_or(-1.0);
        assert!(told >= least, "{name}: {told}: {numbers:?}");
    }
    assert!(!numbers.keys().any(|name| name.contains("ada")), "no key in a label");
}
