//! What the contract tests share: a handle on virtual time, and a loader that can be steered.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "test code; each binary uses its part"
)]
#![allow(clippy::allow_attributes, reason = "an expectation would fail where all is used")]

use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Heatsink, NearCache, Result, Treatment, Value};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A handle over an embedded store on virtual time, with the key `k` pinned.
pub struct Rig {
    pub rt: SimRuntime,
    pub store: MemoryStore,
    pub hs: Heatsink,
}

impl Rig {
    pub fn new(seed: u64) -> Rig {
        Rig::with(seed, NearCache::new())
    }

    pub fn with(seed: u64, near: NearCache) -> Rig {
        Rig::over(seed, near, Duration::ZERO)
    }

    /// A store whose operations take this long.
    pub fn slow(seed: u64, latency: Duration) -> Rig {
        Rig::over(seed, NearCache::new(), latency)
    }

    fn over(seed: u64, near: NearCache, latency: Duration) -> Rig {
        let rt = SimRuntime::new(seed);
        let store = MemoryStore::builder().shards(4).runtime(rt.clone()).seed(seed);
        let store = store.latency(latency).build();
        let hs = Heatsink::builder(store.clone())
            .runtime(rt.clone())
            .seed(seed)
            .near(near)
            .build()
            .unwrap();
        hs.control().pin("k", Treatment::near()).unwrap();
        Rig { rt, store, hs }
    }

    /// Spawns a task; its result can be taken once it is done.
    pub fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Out<T> {
        let out = Out(Arc::new(Mutex::new(None)));
        let to = out.0.clone();
        self.rt.spawn(async move {
            let result = task.await;
            *to.lock().unwrap() = Some(result);
        });
        out
    }

    /// Spawns a load of `k`.
    pub fn spawn_load(&self, source: &Source) -> Out<String> {
        let (hs, source) = (self.hs.clone(), source.clone());
        self.spawn(async move {
            let value = hs.load("k", source.loader()).await.unwrap();
            String::from_utf8(value.to_vec()).unwrap()
        })
    }
}

/// What a spawned task returns.
pub struct Out<T>(Arc<Mutex<Option<T>>>);

impl<T> Out<T> {
    #[track_caller]
    pub fn take(&self) -> T {
        self.0.lock().unwrap().take().expect("the task has not ended, or was taken before")
    }

    #[track_caller]
    pub fn after(&self, rt: &SimRuntime, wait: Duration) -> T {
        rt.run_for(wait);
        self.take()
    }
}

/// A source of truth behind a loader: it is read when the load starts, and answers later.
#[derive(Clone)]
pub struct Source {
    rt: SimRuntime,
    takes: Duration,
    value: Arc<AtomicU64>,
    runs: Arc<AtomicU64>,
    fails: Arc<AtomicBool>,
}

impl Source {
    pub fn new(rt: &SimRuntime, takes: Duration) -> Source {
        Source {
            rt: rt.clone(),
            takes,
            value: Arc::default(),
            runs: Arc::default(),
            fails: Arc::default(),
        }
    }

    pub fn set(&self, value: u64) {
        self.value.store(value, Ordering::SeqCst);
    }

    pub fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::SeqCst);
    }

    /// How many loads were started.
    pub fn runs(&self) -> u64 {
        self.runs.load(Ordering::SeqCst)
    }

    pub fn loader(
        &self,
    ) -> impl FnOnce() -> std::pin::Pin<
        Box<dyn Future<Output = std::result::Result<String, std::io::Error>> + Send>,
    > + Send
    + 'static {
        let this = self.clone();
        move || {
            Box::pin(async move {
                this.runs.fetch_add(1, Ordering::SeqCst);
                let value = this.value.load(Ordering::SeqCst);
                this.rt.sleep(this.takes).await;
                if this.fails.load(Ordering::SeqCst) {
                    return Err(std::io::Error::other("the source is down"));
                }
                Ok(value.to_string())
            })
        }
    }
}

/// The text of a value that must be there.
#[track_caller]
pub fn bytes_of(value: Result<Option<Value>>) -> String {
    String::from_utf8(value.unwrap().expect("a value").to_vec()).unwrap()
}
