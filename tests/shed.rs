//! Shedding: budgets per key and tenant, last known values, retry budgets, bulkheads.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use heatsink::runtime::BoxFuture;
use heatsink::store::memory::{Fault, On, Op};
use heatsink::store::{Capability, MemoryStore, Store};
use heatsink::testing::SimRuntime;
use heatsink::{
    Admission, Budget, Builder, Bulkhead, Detect, ErrorKind, Heatsink, Key, Limit, Limiter,
    Outcome, Put, Read, Retries, Retry, Source, Treatment,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

struct Rig {
    rt: SimRuntime,
    store: MemoryStore,
    hs: Heatsink,
}

fn rig(latency: Duration, options: impl FnOnce(Builder) -> Builder) -> Rig {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().shards(4).latency(latency).runtime(rt.clone()).build();
    let builder = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(1);
    let hs = options(builder.detect(Detect::pins_only())).build().unwrap();
    Rig { rt, store, hs }
}

fn admission(rig: Admission) -> Rig {
    self::rig(MS, |b| b.admission(rig))
}

fn operations(store: &MemoryStore) -> u64 {
    store.counts().iter().map(|c| c.offered).sum()
}

/// A tenth of a second between units, three at once.
fn small() -> Budget {
    Budget::per_sec(10).burst(3)
}

#[test]
fn a_key_that_is_asked_for_without_end_costs_the_store_its_budget_and_no_more() {
    let rig = admission(Admission::new().per_key(small()));
    let hs = rig.hs.clone();
    let rt = rig.rt.clone();
    let (ok, refused) = rig.rt.block_on(async move {
        let (mut ok, mut refused) = (0, 0);
        for _ in 0..10_000 {
            match hs.get("k").await {
                Ok(_) => ok += 1,
                Err(e) => {
                    assert_eq!((e.kind(), e.outcome()), (ErrorKind::Shed, Outcome::NotApplied));
                    assert!(matches!(e.retry(), Retry::After(d) if d <= 100 * MS), "{e:?}");
                    refused += 1;
                    rt.sleep(MS).await;
                }
            }
        }
        (ok, refused)
    });
    // Ten seconds of retries.
    assert!((98..=104).contains(&ok), "{ok} admitted, {refused} refused");
    assert_eq!(operations(&rig.store), ok);
    let stats = rig.hs.shed_stats();
    assert_eq!((stats.admitted, stats.refused_by_key), (ok, refused));
}

#[test]
fn the_hint_of_a_refusal_is_the_time_after_which_the_call_is_admitted() {
    let rig = admission(Admission::new().per_key(small()));
    (0..3).for_each(|_| rig.hs.admit("k").unwrap());
    let Retry::After(wait) = rig.hs.admit("k").unwrap_err().retry() else { panic!("a hint") };
    rig.rt.clock().advance(wait - Duration::from_nanos(1));
    assert!(rig.hs.admit("k").is_err());
    rig.rt.clock().advance(Duration::from_nanos(1));
    assert!(rig.hs.admit("k").is_ok());
}

#[test]
fn the_key_is_asked_before_the_tenant_and_a_refused_call_consumes_nothing() {
    let options = Admission::new()
        .per_key(Budget::per_sec(1).burst(5))
        .per_tenant(Budget::per_sec(1).burst(8))
        .tenant_of(|key| key.split(|byte| *byte == b':').next());
    let rig = admission(options);
    (0..5).for_each(|_| rig.hs.admit("acme:hot").unwrap());
    // Refused by their key, a hundred calls leave the tenant what it had.
    for _ in 0..100 {
        let e = rig.hs.admit("acme:hot").unwrap_err();
        assert!(e.to_string().starts_with("the key is above its budget"), "{e}");
    }
    (0..3).for_each(|_| rig.hs.admit("acme:other").unwrap());
    // Refused by the tenant, they leave the key what it had: two are left for another tenant.
    for _ in 0..100 {
        let e = rig.hs.admit("acme:other").unwrap_err();
        assert!(e.to_string().starts_with("the tenant is above its budget"), "{e}");
    }
    (0..2).for_each(|_| rig.hs.admit_for("acme:other", "guest").unwrap());
    assert!(rig.hs.admit_for("acme:other", "guest").is_err());
}

#[test]
fn every_way_to_the_store_is_held_to_the_budget() {
    let rig = admission(Admission::new().per_key(Budget::per_sec(1).burst(1)));
    let hs = rig.hs.clone();
    rig.rt.block_on(async move {
        let shed = |kind: Option<ErrorKind>| assert_eq!(kind, Some(ErrorKind::Shed));
        hs.get("a").await.unwrap();
        shed(hs.get("a").await.err().map(|e| e.kind()));
        shed(hs.put("a", "x").await.err().map(|e| e.kind()));
        shed(hs.delete("a").await.err().map(|e| e.kind()));
        shed(hs.read_with("a", |_| ()).await.err().map(|e| e.kind()));
        let load = hs.load("a", || async { Ok::<_, std::io::Error>("never") }).await;
        shed(load.err().map(|e| e.kind()));
        let many = hs.get_many(["b", "a", "c"]).await;
        assert!(many[0].is_ok() && many[2].is_ok());
        shed(many[1].as_ref().err().map(|e| e.kind()));
        hs.counter("n").add(1).await.unwrap();
        shed(hs.counter("n").add(1).await.err().map(|e| e.kind()));
        // A sum is charged to its counter.
        shed(hs.counter("n").sum().await.err().map(|e| e.kind()));
        let long = "x".repeat(70_000);
        hs.get(&long).await.unwrap();
        shed(hs.get(&long).await.err().map(|e| e.kind()));
    });
}

#[test]
fn exact_rows_are_held_to_the_budget_of_their_key_and_what_a_hold_has_can_always_be_ended() {
    let rig = admission(Admission::new().per_key(small()));
    let (hs, rt) = (rig.hs.clone(), rig.rt.clone());
    rig.rt.block_on(async move {
        let shed = |kind: Option<ErrorKind>| kind == Some(ErrorKind::Shed);
        let (stock, tokens) = (hs.stock("shoes").unwrap(), hs.tokens("seats").unwrap());
        let wallet = hs.balance("wallet").unwrap();
        stock.create(100, 2).await.unwrap();
        tokens.mint(100, 2).await.unwrap();
        wallet.open(100, 0, 2).await.unwrap();
        rt.sleep(SEC).await;
        let (mut refused, mut held) = ([0; 3], Vec::new());
        for n in 0..10 {
            let id = format!("{n}");
            match stock.take(1, &id).await {
                Ok(heatsink::Taken::Held(units)) => held.push(units),
                other => refused[0] += u32::from(shed(other.err().map(|e| e.kind()))),
            }
            let popped = tokens.pop(&id).await;
            refused[1] += u32::from(shed(popped.err().map(|e| e.kind())));
            let of_wallet = match n % 2 {
                0 => wallet.credit(1, &id).await.map(drop),
                _ => wallet.debit(1, &id).await.map(drop),
            };
            refused[2] += u32::from(shed(of_wallet.err().map(|e| e.kind())));
        }
        // Three at once, and perhaps one more in the tenth of a second that the others took. A look
        // at the stripes, for the sweep that the first credit begins, is a call of the wallet's too.
        assert!(refused.iter().all(|n| (6..=8).contains(n)), "{refused:?}");
        for units in held {
            units.confirm().await.unwrap();
        }
    });
}

#[test]
fn hits_and_callers_who_share_a_load_are_free() {
    let rig = rig(5 * MS, |b| b.admission(Admission::new().per_key(Budget::per_sec(1).burst(2))));
    rig.hs.control().pin("k", Treatment::near()).unwrap();
    let served = Arc::new(AtomicU64::new(0));
    for _ in 0..1_000 {
        let (hs, served) = (rig.hs.clone(), served.clone());
        rig.rt.spawn(async move {
            for _ in 0..10 {
                served.fetch_add(u64::from(hs.get("k").await.is_ok()), Ordering::Relaxed);
            }
        });
    }
    rig.rt.run_for(500 * MS);
    assert_eq!(served.load(Ordering::Relaxed), 10_000);
    assert_eq!(operations(&rig.store), 1);
    assert_eq!(rig.hs.shed_stats().admitted, 1);
}

#[test]
fn a_batch_of_adds_costs_one_unit() {
    let rig = rig(5 * MS, |b| b.admission(Admission::new().per_key(Budget::per_sec(1).burst(2))));
    let stored = Arc::new(AtomicU64::new(0));
    for _ in 0..100 {
        let (hs, stored) = (rig.hs.clone(), stored.clone());
        rig.rt.spawn(async move {
            if hs.counter("n").add(1).await.is_ok() {
                stored.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    rig.rt.run_for(100 * MS);
    assert_eq!(stored.load(Ordering::Relaxed), 100, "in two batches");
    let refused = rig.rt.block_on({
        let hs = rig.hs.clone();
        async move { hs.counter("n").add(1).await.unwrap_err() }
    });
    assert_eq!((refused.kind(), refused.outcome()), (ErrorKind::Shed, Outcome::NotApplied));
    let hs = rig.hs.clone();
    rig.rt.run_for(5 * SEC);
    assert_eq!(rig.rt.block_on(async move { hs.counter("n").sum().await.unwrap().total() }), 100);
}

#[test]
fn a_refused_write_voids_no_cached_value() {
    let rig = admission(Admission::new().per_key(Budget::per_sec(1).burst(1)));
    rig.hs.control().pin("k", Treatment::near()).unwrap();
    let hs = rig.hs.clone();
    rig.rt.block_on(async move {
        hs.get("k").await.unwrap();
        assert!(hs.put("k", "refused").await.is_err());
        assert_eq!(hs.try_read_with("k", |_| ()), None, "a cached absence has no bytes");
        assert_eq!(hs.get("k").await.unwrap().map(|v| v.to_vec()), None);
        let stats = hs.stats();
        assert_eq!((stats.loads, stats.writes, stats.writes_unknown), (1, 0, 0));
    });
}

#[test]
fn a_tenant_that_is_named_per_call_has_precedence() {
    let options = Admission::new()
        .per_tenant(Budget::per_sec(1).burst(1))
        .tenant_of(|key| key.split(|byte| *byte == b':').next());
    let rig = admission(options);
    let hs = rig.hs.clone();
    rig.rt.block_on(async move {
        hs.get_with("acme:1", Read::new().tenant("crawler")).await.unwrap();
        let e = hs.get_with("acme:2", Read::new().tenant("crawler")).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shed);
        hs.get("acme:3").await.unwrap();
        assert!(hs.get("acme:4").await.is_err());
        let many = hs.get_many_with(["acme:7", "acme:8"], Read::new().tenant("batch")).await;
        assert_eq!(many.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false]);
        hs.put_with("acme:5", "x", Put::new().tenant("other")).await.unwrap();
        assert!(hs.put_with("acme:6", "x", Put::new().tenant("other")).await.is_err());
    });
}

#[test]
fn the_refresh_of_a_stale_value_is_charged_to_the_tenant_that_was_named() {
    let rig = admission(Admission::new().per_tenant(Budget::per_sec(1).burst(1)));
    let keys: Vec<String> = (0..20).map(|i| format!("k{i}")).collect();
    for key in &keys {
        rig.hs.control().pin(key, Treatment::near()).unwrap();
        rig.rt.block_on(rig.hs.put(key, "v")).unwrap();
        drop(rig.rt.block_on(rig.hs.get(key)));
    }
    rig.rt.run_for(1500 * MS);
    let before = operations(&rig.store);
    for key in &keys {
        let value = rig.rt.block_on(rig.hs.get_with(key, Read::new().tenant("t"))).unwrap();
        assert_eq!(value.unwrap(), b"v");
    }
    rig.rt.run_for(100 * MS);
    assert_eq!(operations(&rig.store) - before, 1, "the tenant may cost one load");
}

#[test]
fn a_take_that_has_to_look_costs_its_budget_once() {
    let rig = admission(Admission::new().per_key(Budget::per_sec(1).burst(1)));
    let stock = rig.hs.stock("seats").unwrap();
    rig.rt.block_on(stock.create(0, 2)).unwrap();
    rig.rt.run_for(2 * SEC);
    let taken = rig.rt.block_on(stock.take(1, "buyer")).unwrap();
    assert!(matches!(taken, heatsink::Taken::SoldOut), "{taken:?}");
}

#[test]
fn events_and_resets_are_held_to_the_budget_of_their_key() {
    let rig = admission(Admission::new().per_key(small()));
    let likes = rig.hs.counter("likes");
    let made =
        (0..100).filter(|i| rig.rt.block_on(likes.add_event(format!("e{i}"), 1)).is_ok()).count();
    assert_eq!(made, 3);
    let refused = rig.rt.block_on(likes.reset()).unwrap_err();
    assert_eq!((refused.kind(), refused.outcome()), (ErrorKind::Shed, Outcome::NotApplied));
}

#[test]
fn a_write_that_may_have_been_made_stays_of_unknown_outcome_when_a_later_try_is_refused() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().shards(4).runtime(rt.clone()).build();
    let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).build().unwrap();
    let refused_after = |op, done: Fault| {
        store.faults().next(On::Only(op), done);
        store.faults().next_n(On::Only(op), 8, Fault::NotApplied);
    };
    let balance = hs.balance("wallet").unwrap();
    rt.block_on(balance.open(100, 0, 2)).unwrap();
    let stock = hs.stock("seats").unwrap();
    rt.block_on(stock.create(10, 1)).unwrap();
    type Call<'a> = heatsink::runtime::BoxFuture<'a, heatsink::Result<()>>;
    let calls: Vec<(Op, Call<'_>)> = vec![
        (Op::AddOnce, Box::pin(async { balance.credit(5, "c").await.map(drop) })),
        (Op::Take, Box::pin(async { balance.debit(5, "d").await.map(drop) })),
        (Op::Take, Box::pin(async { stock.take(1, "buyer").await.map(drop) })),
    ];
    for (op, call) in calls {
        refused_after(op, Fault::UnknownApplied);
        let error = rt.block_on(call).unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown, "{op:?}: {error}");
        store.faults().clear();
    }
}

#[test]
fn nobody_is_refused_for_the_budget_of_whoever_else_waits() {
    let rt = SimRuntime::new(1);
    let doomed = SimRuntime::with_clock(2, rt.clock());
    let store = MemoryStore::builder().shards(4).latency(80 * MS).runtime(rt.clone()).build();
    let hs = Heatsink::builder(store)
        .runtime(doomed.clone())
        .admission(Admission::new().per_tenant(Budget::per_sec(1).burst(1)))
        .build()
        .unwrap();
    let get = |tenant: &'static str, key: &'static str| {
        let (hs, said) = (hs.clone(), Arc::new(std::sync::OnceLock::new()));
        let out = said.clone();
        let call = async move {
            let got = hs.get_with(key, Read::new().tenant(tenant)).await;
            out.set(got.map(drop).map_err(|e| e.kind())).unwrap();
        };
        (call, said)
    };
    let (spent, said) = get("poor", "other");
    rt.block_on(spent);
    assert_eq!(said.get(), Some(&Ok(())));
    // The leader's runtime dies; of those who wait the first has no budget left, the second has.
    doomed.spawn(get("leader", "k").0);
    while doomed.step() {}
    let ((poor, poor_said), (rich, rich_said)) = (get("poor", "k"), get("rich", "k"));
    rt.spawn(poor);
    while rt.step() {}
    rt.spawn(rich);
    rt.run_for(10 * MS);
    assert!(poor_said.get().is_none() && rich_said.get().is_none());
    doomed.shutdown();
    rt.run_for(200 * MS);
    assert_eq!(poor_said.get(), Some(&Err(ErrorKind::Shed)));
    assert_eq!(rich_said.get(), Some(&Ok(())));
    assert_eq!(hs.stats().keys_under_way, 0);
}

#[test]
fn budgets_may_be_for_keys_on_the_hot_list_only() {
    let options = Admission::new().per_key(Budget::per_sec(1).burst(1)).hot_keys_only();
    let rig = admission(options);
    (0..100).for_each(|_| rig.hs.admit("cold").unwrap());
    (0..100).for_each(|_| rig.hs.admit("hot").unwrap());
    rig.hs.control().pin("hot", Treatment::near()).unwrap();
    rig.rt.run_for(50 * MS);
    rig.hs.admit("hot").unwrap();
    assert!(rig.hs.admit("hot").is_err());
    (0..100).for_each(|_| rig.hs.admit("cold").unwrap());
    rig.hs.control().unpin("hot");
    rig.rt.run_for(50 * MS);
    (0..100).for_each(|_| rig.hs.admit("hot").unwrap());
}

#[test]
fn observe_only_counts_what_it_would_refuse_and_refuses_nothing() {
    let rig = rig(MS, |b| {
        b.detect(Detect::new().observe_only()).admission(Admission::new().per_key(small()))
    });
    (0..100).for_each(|_| rig.hs.admit("k").unwrap());
    assert_eq!(rig.hs.shed_stats().refused_by_key, 97);
}

/// `HEATSINK_KEYS=10000000` for the long version.
#[test]
fn any_number_of_keys_takes_the_same_memory_and_a_hot_one_among_them_keeps_its_budget() {
    let keys = std::env::var("HEATSINK_KEYS").ok().and_then(|n| n.parse().ok());
    let keys: u64 = keys.unwrap_or(300_000);
    let rig = admission(Admission::new().per_key(Budget::per_sec(20).burst(5)).keys_max(65_536));
    let before = rig.hs.shed_stats().buckets_bytes;
    assert!(before < 1_300_000, "{before} bytes");
    let (mut hot, mut others) = (0, 0);
    let started = rig.rt.now();
    for i in 0..keys {
        // 100,000 calls a second, of which every tenth is for one key.
        rig.rt.clock().advance(Duration::from_micros(10));
        if i % 10 == 0 {
            hot += u64::from(rig.hs.admit("hot").is_ok());
        } else {
            others += u64::from(rig.hs.admit(i.to_le_bytes()).is_ok());
        }
    }
    let lasted = rig.rt.now().since(started).as_secs_f64();
    let budget = (20.0 * lasted) as u64 + 5;
    assert!(hot <= budget && hot + 1 >= budget, "{hot} of {budget} in {lasted} s");
    assert_eq!(rig.hs.shed_stats().buckets_bytes, before);
    println!("{keys} keys: {before} bytes of buckets, hot {hot} of {budget}, others {others}");
}

#[test]
fn under_overload_the_last_known_value_is_served_with_its_age() {
    let options = Admission::new().per_key(Budget::per_sec(1).burst(1)).freeze(10 * SEC);
    let rig = admission(options);
    rig.store.put_now("k", "first").unwrap();
    let (hs, rt, store) = (rig.hs.clone(), rig.rt.clone(), rig.store.clone());
    rig.rt.block_on(async move {
        assert_eq!(hs.get("k").await.unwrap().unwrap().source(), Source::Load);
        store.put_now("k", "second").unwrap();
        rt.sleep(500 * MS).await;
        let frozen = hs.get("k").await.unwrap().unwrap();
        assert_eq!((&frozen[..], frozen.source()), (&b"first"[..], Source::Frozen));
        assert!(frozen.age() >= 500 * MS && frozen.age() < 510 * MS);
        assert_eq!(hs.shed_stats().frozen_served, 1);
        // A caller who asks for less gets the refusal.
        let latest = hs.get_with("k", Read::latest()).await.unwrap_err();
        assert_eq!(latest.kind(), ErrorKind::Shed);
        let young = hs.get_with("k", Read::new().max_age(400 * MS)).await;
        assert!(young.is_err());
        assert!(hs.get_many(["k"]).await[0].is_ok());
        // The limit on its age holds, counted from the start of its load.
        assert!(hs.get("k").await.is_ok());
        store.faults().chance(On::Reads, 1.0, Fault::NotApplied);
        rt.sleep(12 * SEC).await;
        assert_eq!(hs.get("k").await.unwrap_err().kind(), ErrorKind::Store, "not an overload");
        assert_eq!(hs.get("k").await.unwrap_err().kind(), ErrorKind::Shed, "too old to be served");
    });
}

#[test]
fn no_value_is_frozen_past_a_write_an_invalidation_or_its_own_expiry() {
    let options = Admission::new().per_key(Budget::per_sec(1).burst(1)).freeze(60 * SEC);
    let rig = admission(options);
    let (hs, rt, store) = (rig.hs.clone(), rig.rt.clone(), rig.store.clone());
    rig.rt.block_on(async move {
        let frozen = |key: &'static str| {
            let hs = hs.clone();
            async move { hs.get(key).await.is_ok() }
        };
        for key in ["written", "gone", "prefix:1", "all"] {
            store.put_now(key, "old").unwrap();
            assert!(frozen(key).await);
            assert!(frozen(key).await, "{key}: from memory");
        }
        drop(hs.writing("written"));
        assert!(!frozen("written").await);
        hs.invalidate("gone");
        assert!(!frozen("gone").await);
        hs.invalidate_prefix("prefix:");
        assert!(!frozen("prefix:1").await);
        hs.invalidate_all();
        assert!(!frozen("all").await);
        store.put(&Key::from("short"), "x".into(), Some(100 * MS)).await.unwrap();
        assert!(frozen("short").await);
        assert!(frozen("short").await);
        rt.sleep(120 * MS).await;
        assert!(!frozen("short").await, "the store has none any more");
    });
}

#[test]
fn a_counter_freezes_at_its_last_sum() {
    let options = Admission::new().per_key(Budget::per_sec(1).burst(2)).freeze(60 * SEC);
    let rig = admission(options);
    let (hs, rt) = (rig.hs.clone(), rig.rt.clone());
    rig.rt.block_on(async move {
        let likes = hs.counter("likes");
        likes.add(41).await.unwrap();
        assert_eq!(likes.sum().await.unwrap().total(), 41);
        rt.sleep(SEC + 10 * MS).await;
        likes.add(1).await.unwrap();
        let frozen = likes.sum().await.unwrap();
        assert_eq!(frozen.total(), 41);
        assert!(frozen.age() > SEC);
        assert!(likes.sum_with(Duration::ZERO).await.is_err(), "who asks the store is refused");
    });
}

fn failing(retries: Retries, faults: impl Fn(&MemoryStore)) -> Rig {
    let rig = rig(MS, |b| b.retries(retries));
    faults(&rig.store);
    rig
}

#[test]
fn a_store_that_fails_everything_gets_no_more_extra_calls_than_the_budget() {
    // Among them the fractions that a division rounds to one.
    for permille in [0, 10, 100, 333, 400, 500, 600, 700, 900, 1_000] {
        let retries = Retries::new().permille(permille).burst(10).attempts(16);
        let rig = failing(retries, |s| s.faults().chance(On::Any, 1.0, Fault::NotApplied));
        let calls = 2_000u64;
        let hs = rig.hs.clone();
        rig.rt.block_on(async move {
            for i in 0..calls {
                let key = format!("k{}", i % 7);
                assert!(if i % 2 == 0 {
                    hs.get(&key).await.is_err()
                } else {
                    hs.put(&key, "x").await.is_err()
                });
            }
        });
        let extra = rig.store.faults().struck() - calls;
        let budget = calls * u64::from(permille) / 1_000 + 10;
        assert!(extra <= budget, "{permille}: {extra} of {budget}");
        assert!(extra + 5 >= budget * 99 / 100, "{permille}: {extra} of {budget} used");
        let stats = rig.hs.shed_stats();
        assert_eq!(stats.retries, extra);
        assert!(stats.retries_refused > 0 || permille == 1_000);
    }
}

#[test]
fn one_shard_that_fails_has_a_budget_of_its_own() {
    let rig = rig(MS, |b| b.retries(Retries::new().permille(100).burst(4).attempts(16)));
    let key = |shard: u32| {
        (0..).map(|i| format!("k{i}")).find(|k| rig.store.shard_of(k.as_bytes()) == Some(shard))
    };
    let (sick, well) = (key(0).unwrap(), key(1).unwrap());
    let (hs, store) = (rig.hs.clone(), rig.store.clone());
    rig.rt.block_on(async move {
        // The budget of the instance is full of what the healthy shard pays in; the sick shard has
        // its own burst of four and no more.
        for _ in 0..100 {
            hs.get(&well).await.unwrap();
        }
        store.faults().next_n(On::Any, 1_000, Fault::NotApplied);
        let error = hs.get(&sick).await.unwrap_err();
        assert_eq!(error.retry(), Retry::Never, "spent");
        assert_eq!(store.faults().struck(), 5);
    });
}

#[test]
fn unknown_writes_and_adds_are_never_repeated() {
    let rig = rig(MS, |b| b.retries(Retries::new().permille(1_000).burst(100)));
    let (hs, store) = (rig.hs.clone(), rig.store.clone());
    rig.rt.block_on(async move {
        for fault in [Fault::UnknownApplied, Fault::UnknownNotApplied] {
            store.faults().next(On::Writes, fault);
            assert!(hs.put("k", "x").await.unwrap_err().is_unknown());
            store.faults().next(On::Writes, fault);
            assert!(hs.counter("n").add(1).await.unwrap_err().is_unknown());
        }
        store.faults().next(On::Only(Op::Add), Fault::NotApplied);
        let error = hs.counter("n").add(1).await.unwrap_err();
        assert_eq!((error.outcome(), error.retry()), (Outcome::NotApplied, Retry::Now));
        assert_eq!(hs.shed_stats().retries, 0);
        // What is known not to be applied is.
        store.faults().next(On::Writes, Fault::NotApplied);
        hs.put("k", "y").await.unwrap();
        store.faults().next(On::Reads, Fault::NotApplied);
        let both = hs.get_many(["k", "l"]).await;
        assert!(both.iter().all(Result::is_ok), "{both:?}");
        // Two shards, each of which pays for its own.
        assert_eq!(hs.shed_stats().retries, 3);
    });
}

#[test]
fn a_spent_budget_tells_the_caller_never_for_adds_too() {
    let rig = rig(MS, |b| b.retries(Retries::new().permille(0).burst(1)));
    rig.store.faults().chance(On::Any, 1.0, Fault::NotApplied);
    let hs = rig.hs.clone();
    rig.rt.block_on(async move {
        assert_eq!(hs.counter("n").add(1).await.unwrap_err().retry(), Retry::Now);
        assert_eq!(hs.counter("n").add(1).await.unwrap_err().retry(), Retry::Never);
        assert_eq!(hs.get("k").await.unwrap_err().retry(), Retry::Never);
    });
}

fn bulkhead(latency: Duration) -> Rig {
    let options = Bulkhead::new().in_flight_max(2).queue_max(3).wait_max(50 * MS);
    rig(latency, |b| b.bulkhead(options))
}

/// A key of its own for each call, all on one shard.
fn keys_of(store: &MemoryStore, shard: u32, n: usize) -> Vec<String> {
    let all = (0..).map(|i| format!("key:{i}"));
    all.filter(|k| store.shard_of(k.as_bytes()) == Some(shard)).take(n).collect()
}

#[test]
fn a_slow_shard_holds_so_many_calls_and_its_neighbours_none() {
    let rig = bulkhead(10 * MS);
    let outcomes = Arc::new(std::sync::Mutex::new(Vec::new()));
    for key in keys_of(&rig.store, 0, 8) {
        let (hs, outcomes) = (rig.hs.clone(), outcomes.clone());
        rig.rt.spawn(async move {
            let outcome = hs.get(&key).await.map(drop).map_err(|e| (e.kind(), e.retry()));
            outcomes.lock().unwrap().push(outcome);
        });
    }
    while rig.rt.step() {}
    // Two are inside, three wait, three were refused at once.
    let refused = outcomes.lock().unwrap().clone();
    assert_eq!(refused, [Err((ErrorKind::Shed, Retry::After(50 * MS))); 3]);
    let neighbour = keys_of(&rig.store, 1, 1).remove(0);
    let (hs, started) = (rig.hs.clone(), rig.rt.now());
    rig.rt.block_on(async move { drop(hs.get(&neighbour).await.unwrap()) });
    assert_eq!(rig.rt.now().since(started), 10 * MS, "it has not waited");
    rig.rt.run_for(100 * MS);
    let all = outcomes.lock().unwrap().clone();
    assert_eq!(all.iter().filter(|o| o.is_ok()).count(), 5);
    assert_eq!(rig.rt.now().since(started), 110 * MS);
    let stats = rig.hs.shed_stats();
    assert_eq!((stats.queued, stats.refused_by_shard), (3, 3));
}

#[test]
fn a_call_that_waits_too_long_for_its_place_is_refused_and_the_place_is_not_lost() {
    let rig = bulkhead(Duration::ZERO);
    let keys = keys_of(&rig.store, 0, 6);
    rig.store.faults().next_n(On::Reads, 2, Fault::Delay(200 * MS));
    let outcomes = Arc::new(std::sync::Mutex::new(Vec::new()));
    for key in &keys[..3] {
        let key = key.clone();
        let (hs, rt, outcomes) = (rig.hs.clone(), rig.rt.clone(), outcomes.clone());
        rig.rt.spawn(async move {
            let began = rt.now();
            let outcome = hs.get(&key).await.map(drop).map_err(|e| e.kind());
            outcomes.lock().unwrap().push((outcome, rt.now().since(began)));
        });
        rig.rt.run_for(MS);
    }
    rig.rt.run_for(300 * MS);
    let all = outcomes.lock().unwrap().clone();
    assert_eq!(all[0], (Err(ErrorKind::Shed), 50 * MS));
    assert!(all[1..].iter().all(|(o, _)| o.is_ok()), "{all:?}");
    let hs = rig.hs.clone();
    rig.rt.block_on(async move {
        let many = hs.get_many(&keys).await;
        assert!(many.iter().all(Result::is_ok));
    });
}

#[test]
fn a_batch_waits_only_for_the_shard_that_is_full() {
    let rig = bulkhead(Duration::ZERO);
    let (slow, fast) = (keys_of(&rig.store, 0, 4), keys_of(&rig.store, 1, 2));
    rig.store.faults().next_n(On::Reads, 2, Fault::Delay(200 * MS));
    for key in &slow[..2] {
        let key = key.clone();
        let hs = rig.hs.clone();
        rig.rt.spawn(async move { drop(hs.get(&key).await) });
        rig.rt.run_for(MS);
    }
    let hs = rig.hs.clone();
    let asked = vec![slow[2].clone(), fast[0].clone(), slow[3].clone(), fast[1].clone()];
    let answers = rig.rt.block_on(async move { hs.get_many(&asked).await });
    let ok: Vec<bool> = answers.iter().map(Result::is_ok).collect();
    assert_eq!(ok, [false, true, false, true]);
}

type Scenario = fn(Heatsink, Vec<String>) -> BoxFuture<'static, ()>;

/// Drops `scenario` after 0, 1, 2, … polls, with two slow calls inside and others waiting; then
/// every place must be free again.
fn at_every_await(scenario: Scenario) -> usize {
    for polls in 0.. {
        let options = Bulkhead::new().in_flight_max(2).queue_max(8).wait_max(20 * MS);
        let rig = rig(3 * MS, |b| {
            b.bulkhead(options)
                .retries(Retries::new().permille(1_000).burst(1_000))
                .admission(Admission::new().per_key(Budget::per_sec(1_000_000)).freeze(SEC))
        });
        let keys = keys_of(&rig.store, 0, 8);
        rig.store.faults().chance(On::Any, 0.2, Fault::NotApplied);
        for key in &keys[..4] {
            let key = key.clone();
            let hs = rig.hs.clone();
            rig.rt.spawn(async move { drop(hs.get(&key).await) });
        }
        rig.rt.run_for(MS);
        let mut future = scenario(rig.hs.clone(), keys[4..].to_vec());
        let mut ended = false;
        for _ in 0..polls {
            ended = future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            if ended {
                break;
            }
            rig.rt.run_for(MS);
        }
        drop(future);
        rig.store.faults().clear();
        rig.rt.run_for(11 * SEC);
        assert_eq!(rig.hs.stats().keys_under_way, 0, "left behind after {polls} polls");
        // Ten rounds through two places: none was lost, and none is there twice.
        let done = Arc::new(AtomicU64::new(0));
        for key in keys_of(&rig.store, 0, 10) {
            let (hs, done) = (rig.hs.clone(), done.clone());
            rig.rt.spawn(async move {
                if hs.get(&key).await.is_ok() {
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        rig.rt.run_for(4 * MS);
        assert_eq!(done.load(Ordering::Relaxed), 2, "after {polls} polls");
        rig.rt.run_for(100 * MS);
        assert_eq!(done.load(Ordering::Relaxed), 10, "after {polls} polls");
        if ended {
            return polls;
        }
    }
    unreachable!("the loop ends when the scenario does")
}

#[test]
fn a_read_behind_a_bulkhead_may_be_dropped_at_every_await() {
    let polls = at_every_await(|hs, keys| Box::pin(async move { drop(hs.get(&keys[0]).await) }));
    assert!(polls > 4, "{polls} polls");
}

#[test]
fn a_batch_behind_a_bulkhead_may_be_dropped_at_every_await() {
    let polls = at_every_await(|hs, keys| Box::pin(async move { drop(hs.get_many(&keys).await) }));
    assert!(polls > 4, "{polls} polls");
}

#[test]
fn writes_behind_a_bulkhead_may_be_dropped_at_every_await() {
    let polls = at_every_await(|hs, keys| {
        Box::pin(async move {
            drop(hs.put(&keys[0], "x").await);
            drop(hs.delete(&keys[1]).await);
            drop(hs.counter(&keys[2]).add(1).await);
        })
    });
    assert!(polls > 8, "{polls} polls");
}

#[test]
fn options_that_contradict_each_other_are_refused_at_build() {
    let build = |f: fn(Builder) -> Builder| f(Heatsink::builder(MemoryStore::new(1))).build();
    for wrong in [
        build(|b| b.admission(Admission::new())),
        build(|b| b.admission(Admission::new().per_tenant(small()).hot_keys_only())),
        build(|b| b.admission(Admission::new().per_key(small()).keys_max(0))),
        build(|b| b.retries(Retries::new().permille(1_001))),
        build(|b| b.retries(Retries::new().attempts(0))),
        build(|b| b.bulkhead(Bulkhead::new().in_flight_max(0))),
    ] {
        assert_eq!(wrong.unwrap_err().kind(), ErrorKind::Config);
    }
}

/// Takes from several processes' parts of one limit for `span`; how many were admitted.
fn take_from_all(rt: &SimRuntime, limiters: &[Limiter], span: Duration) -> u64 {
    let taken = Arc::new(AtomicU64::new(0));
    for limiter in limiters {
        let (limiter, taken, rt2) = (limiter.clone(), taken.clone(), rt.clone());
        rt.spawn(async move {
            let end = rt2.now().after(span);
            while rt2.now() < end {
                taken.fetch_add(u64::from(limiter.try_take(1).is_ok()), Ordering::Relaxed);
                rt2.sleep(MS).await;
            }
        });
    }
    rt.run_for(span);
    taken.load(Ordering::Relaxed)
}

fn fleet(rt: &SimRuntime, store: &MemoryStore, limit: &Limit, processes: u64) -> Vec<Limiter> {
    let process = |seed| {
        let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).seed(seed).build().unwrap();
        hs.limiter("mails", limit.clone()).unwrap()
    };
    (1..=processes).map(process).collect()
}

#[test]
fn processes_share_a_limit_through_the_store() {
    let rt = SimRuntime::new(3);
    let store = MemoryStore::builder().latency(2 * MS).runtime(rt.clone()).build();
    let limit = Limit::per_sec(1_000);
    let limiters = fleet(&rt, &store, &limit, 8);
    assert_eq!(store.snapshot().len(), 0, "nothing is written unasked");
    take_from_all(&rt, &limiters, 3 * SEC);
    let taken = take_from_all(&rt, &limiters, 10 * SEC);
    assert!((9_500..=10_000 + 100).contains(&taken), "{taken} in ten seconds");
    let operations: u64 = store.counts().iter().map(|c| c.offered).sum();
    assert!(operations < 13 * 600, "{operations} for 13,000 takes");
    store.set_down(0, true);
    rt.run_for(2 * SEC);
    assert_eq!(take_from_all(&rt, &limiters, 2 * SEC), 0, "cut off, they refuse");
    store.set_down(0, false);
    rt.run_for(SEC);
    let again = take_from_all(&rt, &limiters, 5 * SEC);
    assert!((4_000..=5_500).contains(&again), "{again}");
}

#[test]
fn what_else_lies_under_the_name_of_a_limit_is_left_alone() {
    let rt = SimRuntime::new(4);
    let store = MemoryStore::builder().runtime(rt.clone()).build();
    let limiter = fleet(&rt, &store, &Limit::per_sec(1_000), 1).remove(0);
    assert!(limiter.try_take(1).is_err());
    rt.run_for(SEC);
    let record = store.snapshot().keys().next().unwrap().clone();
    store.put_now(record.clone(), "foreign").unwrap();
    rt.run_for(SEC);
    assert_eq!(take_from_all(&rt, &[limiter], 3 * SEC), 0);
    assert_eq!(store.get_now(record).unwrap().bytes, "foreign");
}

#[test]
fn a_wait_for_tokens_ends_at_its_limit_and_may_be_dropped_at_every_await() {
    for polls in 0..40 {
        let rt = SimRuntime::new(polls);
        let store = MemoryStore::builder().latency(3 * MS).runtime(rt.clone()).build();
        let limit = Limit::new(10, SEC).slack_permille(500).lease(50 * MS);
        let limiter = fleet(&rt, &store, &limit, 1).remove(0);
        let waiting = limiter.clone();
        let mut future: BoxFuture<'static, _> =
            Box::pin(async move { waiting.take(1, SEC).await.unwrap() });
        for _ in 0..polls {
            if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                break;
            }
            rt.run_for(5 * MS);
        }
        drop(future);
        let (again, rt2) = (limiter.clone(), rt.clone());
        rt.block_on(async move {
            again.take(1, SEC).await.unwrap();
            let began = rt2.now();
            let mut outcome = Ok(());
            while outcome.is_ok() {
                outcome = again.take(1, 30 * MS).await;
            }
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Shed);
            assert!(rt2.now().since(began) < 2 * SEC);
        });
        assert_eq!(limiter.try_take(1_000).unwrap_err().kind(), ErrorKind::Limit);
    }
}

#[test]
fn a_limit_that_the_store_cannot_carry_is_refused() {
    let store = MemoryStore::builder().capability(Capability::default()).build();
    let hs = Heatsink::new(store).unwrap();
    let refused = hs.limiter("mails", Limit::per_sec(1_000)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let hs = Heatsink::new(MemoryStore::new(1)).unwrap();
    assert_eq!(hs.limiter("mails", Limit::per_sec(1)).unwrap_err().kind(), ErrorKind::Config);
}
