//! User code in the middle of heatsink: the drop of a user's type, a waker, a closure, the store's
//! `shard_of`. It may call heatsink again, and it may panic; nothing hangs, nothing dies.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests drive real threads and clocks, and fail by panicking"
)]

use bytes::Bytes;
use heatsink::store::{MemoryStore, Store, Stored, Version};
use heatsink::testing::SimRuntime;
use heatsink::{
    Codec, Detect, Heatsink, Key, NearCache, Read, Result, Schedule, Treatment, blocking,
};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

const MS: Duration = Duration::from_millis(1);

struct Parked(std::thread::Thread);

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(f: F) -> F::Output {
    let mut f = pin!(f);
    let w = Waker::from(Arc::new(Parked(std::thread::current())));
    let mut cx = Context::from_waker(&w);
    loop {
        match f.as_mut().poll(&mut cx) {
            Poll::Ready(o) => return o,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Runs on a thread; fails if it does not end in 5 s.
#[track_caller]
fn ends<T: Send + 'static>(what: &str, f: impl FnOnce() -> T + Send + 'static) -> T {
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = tx.send(f());
    });
    match rx.recv_timeout(Duration::from_secs(5)) {
        Ok(t) => t,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("HANG: {what}"),
        Err(e) => panic!("PANIC in {what}: {e}"),
    }
}

type Hook = Arc<dyn Fn() + Send + Sync>;
struct Noisy(Hook);
impl Drop for Noisy {
    fn drop(&mut self) {
        (self.0)();
    }
}
#[derive(Clone)]
struct NoisyCodec(Hook);
impl Codec<Noisy> for NoisyCodec {
    fn encode(&self, _: &Noisy) -> Result<Bytes> {
        Ok(Bytes::from_static(b"n"))
    }
    fn decode(&self, _: &[u8]) -> Result<Noisy> {
        Ok(Noisy(self.0.clone()))
    }
}

fn plain() -> Heatsink {
    Heatsink::builder(MemoryStore::new(4)).detect(Detect::pins_only()).build().unwrap()
}

#[test]
fn a_cached_value_whose_drop_calls_heatsink_may_be_unpinned() {
    ends("unpin, Drop calls hs.hot_list()", || {
        let hs = plain();
        let h2 = hs.clone();
        let hook: Hook = Arc::new(move || drop(h2.hot_list()));
        hs.control().pin("k", Treatment::near()).unwrap();
        let t = hs.typed::<Noisy, _>(NoisyCodec(hook));
        let th = t.clone();
        let h3 = hs.clone();
        std::thread::spawn(move || {
            block_on(h3.put("k", "v")).unwrap();
            drop(block_on(th.get("k")).unwrap());
        })
        .join()
        .unwrap();
        hs.control().unpin("k");
    });
}

struct Holds(
    #[expect(dead_code, reason = "what counts is its drop")]
    Mutex<Option<heatsink::HotListChanges>>,
);
impl Wake for Holds {
    fn wake(self: Arc<Self>) {}
}
fn follower_in_a_waker(drop_it: bool) {
    let hs = plain();
    let mut a = hs.follow_hot_list().unwrap();
    let b = hs.follow_hot_list().unwrap();
    let holds = Arc::new(Holds(Mutex::new(Some(b))));
    let waker = Waker::from(holds);
    let mut cx = Context::from_waker(&waker);
    assert!(pin!(a.next()).poll(&mut cx).is_ready());
    assert!(pin!(a.next()).poll(&mut cx).is_pending());
    drop(waker); // the seat holds the last one now, as of a task that has been given up
    if drop_it {
        drop(a);
    } else {
        let mut cx = Context::from_waker(Waker::noop());
        assert!(pin!(a.next()).poll(&mut cx).is_pending());
    }
}

#[test]
fn a_follower_whose_waker_owns_another_may_be_dropped() {
    ends("drop follower", || follower_in_a_waker(true));
}

#[test]
fn a_follower_may_be_polled_with_another_waker() {
    ends("poll follower again", || follower_in_a_waker(false));
}

#[test]
fn a_panicking_closure_does_not_take_the_refresh_with_it() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().runtime(rt.clone()).build();
    let near = NearCache::new().fresh(Duration::from_secs(1)).stale(Duration::from_secs(3600));
    let hs = Heatsink::builder(store.clone()).runtime(rt.clone()).near(near).build().unwrap();
    hs.control().pin("k", Treatment::near()).unwrap();
    let h = hs.clone();
    rt.block_on(async move {
        h.put("k", "old").await.unwrap();
        h.get("k").await.unwrap();
        h.get("k").await.unwrap();
    });
    let loads = hs.stats().loads;
    rt.run_for(Duration::from_secs(2));
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        hs.try_read_with("k", |_| panic!("user"))
    }));
    assert!(caught.is_err());
    for _ in 0..600 {
        rt.run_for(Duration::from_secs(1));
        assert!(hs.try_read_with("k", <[u8]>::len).is_some());
    }
    rt.run_for(Duration::from_secs(1));
    let s = hs.stats();
    assert!(s.loads > loads, "no refresh in 600 s of reads: {s:?}");
}

#[test]
fn redacted_keys_stay_hidden_in_every_form() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().runtime(rt.clone()).build();
    let hs = Heatsink::builder(store).runtime(rt.clone()).build().unwrap();
    let key = "user:ann@example.com";
    heatsink::key::redact_keys(true);
    let h = hs.clone();
    let r2 = rt.clone();
    rt.block_on(async move {
        for _ in 0..3000 {
            let _ = h.get(key).await;
            r2.sleep(Duration::from_millis(1)).await;
        }
    });
    let bytes = key.as_bytes().iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
    let leaks = |text: String| text.contains(key) || text.contains(&bytes) || text.contains("ann@");
    let e = hs.explain(key);
    let l = hs.hot_list();
    let r = hs.report();
    let all = [
        ("explain Display", leaks(e.to_string())),
        ("explain Debug", leaks(format!("{e:?}"))),
        ("hot list Display", leaks(l.to_string())),
        ("hot list Debug", leaks(format!("{l:?}"))),
        ("report Debug", leaks(format!("{r:?}"))),
        ("hottest_of Debug", leaks(format!("{:?}", Heatsink::hottest_of([&hs], 5)))),
        ("stats", leaks(format!("{:?}", hs.stats()))),
    ];
    heatsink::key::redact_keys(false);
    assert!(l.entries.iter().any(|e| e.key == key.into()), "hot");
    assert!(all.iter().all(|(_, l)| !l), "{all:?}");
}

#[test]
fn a_thread_may_end_while_it_keeps_a_value_whose_drop_reads() {
    if std::env::var("HEATSINK_THREAD_END").is_ok() {
        let hs = plain();
        hs.control().pin("k", Treatment::near()).unwrap();
        block_on(hs.put("k", "v")).unwrap();
        let h2 = hs.clone();
        let hook: Hook = Arc::new(move || {
            let _ = block_on(h2.get("another"));
        });
        let t = hs.typed::<Noisy, _>(NoisyCodec(hook));
        let th = t.clone();
        // Fills the cache and decodes.
        let first = block_on(th.get("k")).unwrap();
        drop(first);
        let h3 = hs.clone();
        let (tx, rx) = mpsc::channel::<()>();
        let (tx2, rx2) = mpsc::channel::<()>();
        let j = std::thread::spawn(move || {
            // hit first: what this thread keeps
            assert!(h3.try_read_with("k", |_| ()).is_some());
            // then a load on this thread
            let _ = block_on(h3.get("missing"));
            tx2.send(()).unwrap();
            rx.recv().unwrap();
        });
        rx2.recv().unwrap();
        hs.invalidate("k");
        // this thread's own kept handle, if any, goes
        hs.control().pin("z", Treatment::near()).unwrap();
        tx.send(()).unwrap();
        let _ = j.join();
        println!("the thread has ended");
        return;
    }
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_thread_may_end_while_it_keeps_a_value_whose_drop_reads",
            "--nocapture",
        ])
        .env("HEATSINK_THREAD_END", "1")
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(text.contains("the thread has ended"), "{:?} {text}", out.status);
}

#[derive(Clone)]
struct Hooked(Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>, heatsink::runtime::ThreadRuntime);
impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooked")
    }
}
impl heatsink::runtime::Runtime for Hooked {
    fn spawn(&self, task: heatsink::runtime::BoxFuture<'static, ()>) {
        self.1.spawn(task)
    }
    fn sleep(&self, d: Duration) -> heatsink::runtime::BoxFuture<'static, ()> {
        if let Some(h) = self.0.get() {
            h();
        }
        self.1.sleep(d)
    }
    fn clock(&self) -> heatsink::runtime::Clock {
        self.1.clock()
    }
}
#[test]
fn a_kept_value_is_not_dropped_under_a_lock() {
    ends("begin() under the gate's lock drops a kept value", move || {
        let rt = Hooked(Arc::default(), heatsink::runtime::ThreadRuntime::new());
        let hs = Heatsink::builder(MemoryStore::new(4))
            .runtime(rt.clone())
            .detect(Detect::pins_only())
            .build()
            .unwrap();
        // same last 8 bytes: the same slot of what a thread keeps
        let (a, b) = ("a-12345678", "b-12345678");
        hs.control().pin_all([a, b], Treatment::near()).unwrap();
        block_on(hs.put(a, "v")).unwrap();
        block_on(hs.put(b, "v")).unwrap();
        let h2 = hs.clone();
        let hook: Hook = Arc::new(move || h2.invalidate(b));
        let t = hs.typed::<Noisy, _>(NoisyCodec(hook));
        // load elsewhere so that nobody else keeps it
        std::thread::spawn(move || drop(block_on(t.get(a)).unwrap())).join().unwrap();
        assert!(hs.try_read_with(a, |_| ()).is_some()); // this thread keeps it
        let h3 = hs.clone();
        std::thread::spawn(move || h3.invalidate(a)).join().unwrap(); // the last one now
        let h4 = hs.clone();
        let _ = rt.0.set(Box::new(move || {
            // stands for: another thread's load of b lands between the look and the lock
            let h = h4.clone();
            std::thread::spawn(move || block_on(h.get(b)).unwrap()).join().unwrap();
        }));
        let read = Read::new().deadline(Duration::from_secs(60));
        assert!(block_on(hs.get_with(b, read)).unwrap().is_some());
    });
}

struct Lagging {
    gets: AtomicU64,
    shard_panics: bool,
}

impl Store for Lagging {
    async fn get(&self, _: &Key) -> Result<Option<Stored>> {
        let n = self.gets.fetch_add(1, Ordering::SeqCst);
        let v = match n {
            0 => 10,
            1 => 9,
            n => 10 + n,
        };
        Ok(Some(Stored { version: Some(Version::seq(v)), ..Stored::new(v.to_string()) }))
    }
    async fn get_many(&self, k: &[Key]) -> Vec<Result<Option<Stored>>> {
        let mut v = Vec::new();
        for k in k {
            v.push(self.get(k).await);
        }
        v
    }
    async fn put(&self, _: &Key, _: Bytes, _: Option<Duration>) -> Result<()> {
        Ok(())
    }
    async fn delete_many(&self, k: &[Key]) -> Vec<Result<bool>> {
        k.iter().map(|_| Ok(true)).collect()
    }
    async fn add(&self, _: &Key, a: i64) -> Result<i64> {
        Ok(a)
    }
    fn shard_of(&self, k: &[u8]) -> Option<u32> {
        assert!(!(self.shard_panics && k == b"boom"), "a store that panics");
        Some(0)
    }
}

#[test]
fn an_older_version_does_not_end_all_refreshes() {
    let rt = SimRuntime::new(1);
    let near = NearCache::new().fresh(Duration::from_secs(1)).stale(Duration::from_secs(3600));
    let store = Lagging { gets: AtomicU64::new(0), shard_panics: false };
    let hs = Heatsink::builder(store).runtime(rt.clone()).near(near).build().unwrap();
    hs.control().pin("k", Treatment::near()).unwrap();
    let h = hs.clone();
    rt.block_on(async move {
        h.get("k").await.unwrap();
    });
    for _ in 0..600 {
        rt.run_for(Duration::from_secs(1));
        let h = hs.clone();
        rt.block_on(async move {
            h.get("k").await.unwrap();
        });
    }
    let s = hs.stats();
    assert!(
        s.loads > 10,
        "10 minutes of reads, {} loads, refused_older {}, oldest {:?}",
        s.loads,
        s.refused_older,
        s.served_age_max
    );
}

#[test]
fn a_panic_on_the_drivers_thread_costs_one_turn() {
    let store = Lagging { gets: AtomicU64::new(5), shard_panics: true };
    let hs = Heatsink::builder(store).build().unwrap();
    let b = blocking::Heatsink::from(hs.clone());
    hs.control().pin("k", Treatment::near()).unwrap();
    b.get("k").unwrap();
    assert!(hs.try_read_with("k", |_| ()).is_some());
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| b.get("boom")));
    std::thread::sleep(Duration::from_secs(4));
    b.get("k").unwrap();
    b.get("k").unwrap();
    assert!(
        hs.try_read_with("k", |_| ()).is_some(),
        "the driver is dead, the near cache is off for good"
    );
}

/// A waker that runs its task in place, on the driver's thread, and shuts down.
struct Inline(Mutex<Option<Heatsink>>, AtomicU64);
impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        if std::thread::current().name() != Some("heatsink-driver") {
            return;
        }
        let hs = self.0.lock().unwrap().take();
        if let Some(hs) = hs {
            self.1.store(1, Ordering::SeqCst);
            blocking::Heatsink::from(hs).shutdown();
            self.1.store(2, Ordering::SeqCst);
        }
    }
}
#[test]
fn a_waker_may_shut_down_on_the_drivers_thread() {
    let hs = Heatsink::builder(MemoryStore::new(4)).build().unwrap();
    let inline = Arc::new(Inline(Mutex::new(Some(hs.clone())), AtomicU64::new(0)));
    let mut a = hs.follow_hot_list().unwrap();
    hs.control().schedule(Schedule::keys(["x"]).starts_in(Duration::from_millis(300))).unwrap();
    let waker = Waker::from(inline.clone());
    let mut cx = Context::from_waker(&waker);
    assert!(pin!(a.next()).poll(&mut cx).is_ready());
    assert!(pin!(a.next()).poll(&mut cx).is_pending());
    let t = Instant::now();
    while t.elapsed() < Duration::from_secs(3) && inline.1.load(Ordering::SeqCst) < 2 {
        std::thread::sleep(20 * MS);
    }
    assert_eq!(inline.1.load(Ordering::SeqCst), 2, "1: began and did not return; 0: never woken");
}

/// One waiter's waker panics: do the others get their outcome?
struct Bomb;
impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("a waker that panics");
    }
}
#[test]
fn a_waker_that_panics_keeps_nobody_else_waiting() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().runtime(rt.clone()).latency(5 * MS).build();
    let hs =
        Heatsink::builder(store).runtime(rt.clone()).detect(Detect::pins_only()).build().unwrap();
    let h = hs.clone();
    rt.spawn(async move {
        let _ = h.get("k").await;
    });
    rt.run_for(MS);
    let (h1, h2) = (hs.clone(), hs.clone());
    let mut one = Box::pin(async move { h1.get("k").await });
    let mut two = Box::pin(async move { h2.get("k").await });
    let bomb = Waker::from(Arc::new(Bomb));
    assert!(one.as_mut().poll(&mut Context::from_waker(&bomb)).is_pending());
    assert!(two.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rt.run_for(20 * MS)));
    println!("run_for panicked: {}", r.is_err());
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        rt.run_for(Duration::from_secs(120))
    }));
    println!("now {:?}, in flight {}", rt.now(), hs.stats().loads_in_flight);
    assert!(
        two.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready(),
        "the other caller waits for ever"
    );
}

#[test]
fn an_age_limit_of_for_ever_is_refused_at_build() {
    for near in [
        NearCache::new().stale(Duration::MAX).absent(Duration::MAX),
        NearCache::new().fresh(Duration::MAX).stale(Duration::MAX),
    ] {
        let built = Heatsink::builder(MemoryStore::new(4)).near(near).build();
        assert_eq!(built.map(drop).unwrap_err().kind(), heatsink::ErrorKind::Config);
    }
    let year = Duration::from_secs(365 * 86_400);
    let near = NearCache::new().fresh(9 * year).stale(10 * year).absent(10 * year);
    let near = near.jitter_permille(1000);
    let hs = Heatsink::builder(MemoryStore::new(4)).near(near).seed(u64::MAX).build().unwrap();
    hs.control().pin("k", Treatment::near()).unwrap();
    assert!(block_on(hs.get("k")).unwrap().is_none());
}
