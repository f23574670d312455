//! heatsink and the caches behind one interface, for the questions that are about behaviour.

use heatsink::{Heatsink, NearCache, Text, Treatment, store::MemoryStore};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The one key that all questions are about.
pub const KEY: &str = "k";
/// Keys of the question about room.
pub const ROOM: usize = 100;
const LONG: Duration = Duration::from_secs(3600);

/// A load of the value of [`KEY`], or of the key that it was asked for.
pub type Load = Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;

/// A cache that loads what it does not have.
pub trait Peer: Clone + Send + Sync + 'static {
    const NAME: &'static str;

    /// With a time to live, if it knows one.
    fn new(ttl: Duration) -> Self;
    /// What is cached under [`KEY`], or what `load` brings.
    fn read(&self, load: Load) -> impl Future<Output = Result<String, String>> + Send {
        self.read_key(KEY, load)
    }
    fn read_key(
        &self,
        key: &str,
        load: Load,
    ) -> impl Future<Output = Result<String, String>> + Send;
    /// What a writer calls after it has written, so that nobody sees what was there before.
    fn remove(&self) -> impl Future<Output = ()> + Send;
    /// The same by putting the new value there; or what there is in its place.
    fn insert(&self, new: &str) -> impl Future<Output = ()> + Send;
    /// Everything goes.
    fn clear(&self);
    /// Everything goes that a condition holds for; false where there is no such call.
    fn remove_where(&self) -> bool;
    /// What a writer calls whose write has timed out: it may still land.
    fn write_unknown(&self) -> impl Future<Output = ()> + Send {
        self.remove()
    }
    /// Two calls of different form for the one key; `None` where there is one form only.
    fn two_forms(&self, load: impl Fn() -> Load + Send) -> impl Future<Output = Option<()>> + Send;
    /// Whether entries have a time to live.
    const HAS_TTL: bool;
}

#[derive(Clone)]
pub struct Heat(Heatsink);

impl Peer for Heat {
    const NAME: &'static str = "heatsink";
    const HAS_TTL: bool = true;

    fn new(ttl: Duration) -> Heat {
        let near =
            NearCache::new().fresh(ttl).stale(ttl).absent(ttl.min(Duration::from_millis(50)));
        let hs = Heatsink::builder(MemoryStore::new(1)).near(near).build().expect("options");
        let keys = (0..ROOM).map(|i| format!("{KEY}{i}")).chain([KEY.to_owned()]);
        hs.control().pin_all(keys, Treatment::near()).expect("room for the pins");
        Heat(hs)
    }

    async fn read_key(&self, key: &str, load: Load) -> Result<String, String> {
        let value = self.0.load(key, move || load).await.map_err(|e| e.to_string())?;
        Ok(String::from_utf8_lossy(&value).into_owned())
    }

    async fn remove(&self) {
        self.0.invalidate(KEY);
    }

    async fn insert(&self, _: &str) {
        // A key that a loader brings is not put: its writer says that it has written.
        self.0.writing(KEY).done();
    }

    fn clear(&self) {
        self.0.invalidate_all();
    }

    fn remove_where(&self) -> bool {
        self.0.invalidate_prefix("");
        true
    }

    async fn write_unknown(&self) {
        drop(self.0.writing(KEY));
    }

    async fn two_forms(&self, load: impl Fn() -> Load + Send) -> Option<()> {
        let (first, second) = (load(), load());
        let typed = self.0.typed::<String, _>(Text);
        let both = tokio::join!(self.0.load(KEY, move || first), typed.load(KEY, move || second));
        both.0.ok().and(both.1.ok()).map(drop)
    }
}

#[derive(Clone)]
pub struct Moka(moka::future::Cache<String, String>);

impl Peer for Moka {
    const NAME: &'static str = "moka";
    const HAS_TTL: bool = true;

    fn new(ttl: Duration) -> Moka {
        let cache = moka::future::Cache::builder().max_capacity(ROOM as u64).time_to_live(ttl);
        Moka(cache.support_invalidation_closures().build())
    }

    async fn read_key(&self, key: &str, load: Load) -> Result<String, String> {
        self.0.try_get_with(key.to_owned(), load).await.map_err(|e| e.to_string())
    }

    async fn remove(&self) {
        self.0.invalidate(KEY).await;
    }

    async fn insert(&self, new: &str) {
        self.0.insert(KEY.to_owned(), new.to_owned()).await;
    }

    fn clear(&self) {
        self.0.invalidate_all();
    }

    fn remove_where(&self) -> bool {
        self.0.invalidate_entries_if(|_, _| true).is_ok()
    }

    async fn two_forms(&self, load: impl Fn() -> Load + Send) -> Option<()> {
        let (first, second) = (load(), load());
        let first = async move { first.await.unwrap_or_default() };
        let get = self.0.get_with(KEY.to_owned(), first);
        let both = tokio::join!(get, self.0.try_get_with(KEY.to_owned(), second));
        both.1.ok().map(drop)
    }
}

#[derive(Clone)]
pub struct Quick(Arc<quick_cache::sync::Cache<String, String>>);

impl Peer for Quick {
    const NAME: &'static str = "quick_cache";
    const HAS_TTL: bool = false;

    fn new(_: Duration) -> Quick {
        Quick(Arc::new(quick_cache::sync::Cache::new(ROOM)))
    }

    async fn read_key(&self, key: &str, load: Load) -> Result<String, String> {
        self.0.get_or_insert_async(key, load).await
    }

    async fn remove(&self) {
        self.0.remove(KEY);
    }

    async fn insert(&self, new: &str) {
        self.0.insert(KEY.to_owned(), new.to_owned());
    }

    fn clear(&self) {
        self.0.clear();
    }

    fn remove_where(&self) -> bool {
        self.0.retain(|_, _| false);
        true
    }

    async fn two_forms(&self, load: impl Fn() -> Load + Send) -> Option<()> {
        let (first, second) = (load(), load());
        let guard = async {
            if let Err(guard) = self.0.get_value_or_guard_async(KEY).await {
                let _ = guard.insert(second.await.unwrap_or_default());
            }
        };
        tokio::join!(self.0.get_or_insert_async(KEY, first), guard).0.ok().map(drop)
    }
}

#[derive(Clone)]
pub struct Foyer(foyer_memory::Cache<String, String>);

impl Peer for Foyer {
    const NAME: &'static str = "foyer";
    const HAS_TTL: bool = false;

    fn new(_: Duration) -> Foyer {
        Foyer(foyer_memory::CacheBuilder::new(ROOM).with_shards(1).build())
    }

    async fn read_key(&self, key: &str, load: Load) -> Result<String, String> {
        let load = async move { load.await.map_err(std::io::Error::other) };
        let entry = self.0.get_or_fetch(key, || load).await.map_err(|e| e.to_string())?;
        Ok(entry.value().clone())
    }

    async fn remove(&self) {
        self.0.remove(KEY);
    }

    async fn insert(&self, new: &str) {
        self.0.insert(KEY.to_owned(), new.to_owned());
    }

    fn clear(&self) {
        self.0.clear();
    }

    fn remove_where(&self) -> bool {
        false
    }

    async fn two_forms(&self, _: impl Fn() -> Load + Send) -> Option<()> {
        None
    }
}

/// What the loads read, and how many there were.
#[derive(Clone, Default)]
pub struct Source(Arc<Inner>);

#[derive(Default)]
struct Inner {
    value: parking_lot::Mutex<String>,
    loads: AtomicU32,
}

impl Source {
    #[must_use]
    pub fn holding(value: &str) -> Source {
        let source = Source::default();
        source.set(value);
        source
    }

    pub fn set(&self, value: &str) {
        *self.0.value.lock() = value.to_owned();
    }

    #[must_use]
    pub fn loads(&self) -> u32 {
        self.0.loads.load(Ordering::SeqCst)
    }

    /// A load that reads the value when it starts and brings it when `then` has ended.
    #[must_use]
    pub fn load_then(&self, then: impl Future<Output = ()> + Send + 'static) -> Load {
        let source = self.clone();
        Box::pin(async move {
            let value = source.begin();
            then.await;
            Ok(value)
        })
    }

    /// Counts a load and reads the value.
    #[must_use]
    pub fn begin(&self) -> String {
        self.0.loads.fetch_add(1, Ordering::SeqCst);
        self.0.value.lock().clone()
    }

    /// A load that takes `time` and fails.
    #[must_use]
    pub fn failing(&self, time: Duration) -> Load {
        let source = self.clone();
        Box::pin(async move {
            drop(source.begin());
            tokio::time::sleep(time).await;
            Err("the store is down".to_owned())
        })
    }

    /// A load that takes `time` and panics.
    #[must_use]
    pub fn panicking(&self, time: Duration) -> Load {
        let source = self.clone();
        Box::pin(async move {
            drop(source.begin());
            tokio::time::sleep(time).await;
            panic!("a load that panics, as the question wants it")
        })
    }

    /// One that takes no time.
    #[must_use]
    pub fn load(&self) -> Load {
        self.load_then(std::future::ready(()))
    }
}

/// Long enough for any question.
#[must_use]
pub fn fresh<P: Peer>() -> P {
    P::new(LONG)
}

/// A runtime of two workers.
#[must_use]
pub fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime")
}
