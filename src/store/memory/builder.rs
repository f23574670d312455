//! How an embedded store is built.

use super::*;

/// Builds a [`MemoryStore`]. Made by [`MemoryStore::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct MemoryStoreBuilder {
    pub(super) shards: usize,
    pub(super) runtime: Option<Arc<dyn Runtime>>,
    pub(super) options: Options,
}

impl MemoryStoreBuilder {
    /// How many shards there are, 1 to 16,384. Default: 1.
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards.clamp(1, SHARDS_MAX);
        self
    }

    /// How keys are placed on shards. Default: [`Placement::ClusterSlots`].
    pub fn placement(mut self, placement: Placement) -> Self {
        self.options.placement = placement;
        self
    }

    /// What the store says it can do, and can. Default: everything.
    pub fn capability(mut self, capability: Capability) -> Self {
        self.options.capability = capability;
        self
    }

    /// The most operations that one shard serves in a second. Default: no ceiling.
    pub fn ceiling(mut self, rate_per_sec: u32) -> Self {
        self.options.service = Some(Duration::from_secs(1) / rate_per_sec.max(1));
        self
    }

    /// The longest wait in a shard's queue; beyond it the shard refuses. Default: 100 ms.
    pub fn queue_max(mut self, wait: Duration) -> Self {
        self.options.queue_max = wait;
        self
    }

    /// What every operation takes there and back, besides the queue. Default: nothing.
    pub fn latency(mut self, round_trip: Duration) -> Self {
        self.options.latency = round_trip;
        self
    }

    /// How far replicas are behind. Default: not at all.
    pub fn replica_lag(mut self, lag: Duration) -> Self {
        self.options.replica_lag = lag;
        self
    }

    /// Whether operations are counted key by key too, for up to 65,536 keys a shard. Default: yes.
    pub fn count_keys(mut self, count: bool) -> Self {
        self.options.count_keys = count;
        self
    }

    /// The most bytes that one shard holds; then it refuses writes. Default: 1 GiB.
    pub fn shard_bytes_max(mut self, size_bytes: usize) -> Self {
        self.options.shard_bytes_max = size_bytes;
        self
    }

    /// What [`Store::max_in_flight_time`] answers. Default: 10 s.
    pub fn max_in_flight_time(mut self, time: Duration) -> Self {
        self.options.max_in_flight_time = time;
        self
    }

    /// The seed of the [`Faults`]. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.options.seed = seed;
        self
    }

    /// Whose clock and timers the store lives by. Default: the caller's.
    pub fn runtime(mut self, runtime: impl Runtime) -> Self {
        self.runtime = Some(Arc::new(runtime));
        self
    }

    /// The store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        let runtime = self.runtime.unwrap_or_else(ambient);
        let o = self.options;
        let shard = || Mutex::new(Shard::new(o.shard_bytes_max, o.replica_lag));
        MemoryStore {
            inner: Arc::new(Inner {
                shards: (0..self.shards).map(|_| shard()).collect(),
                channels: Channels::default(),
                faults: Faults::new(o.seed),
                clock: runtime.clock(),
                runtime,
                options: o,
            }),
        }
    }
}
