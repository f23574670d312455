//! Many tasks that call a store, and what they saw.

use crate::servers::Server;
use crate::servers::cluster::{Cluster, MASTERS};
use heatsink::store::{RedisStore, Store};
use heatsink::{Counter, Error, Key};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// No call on a healthy shard may take longer.
const STALL: Duration = Duration::from_millis(250);

/// What many tasks that call until they are stopped saw.
#[derive(Default)]
pub struct Seen {
    pub stop: AtomicBool,
    pub errors: Mutex<Vec<Error>>,
    tasks: Mutex<Vec<Arc<Task>>>,
}

/// What one task saw, on a line of its own: counting must not be what is measured.
#[derive(Default)]
#[repr(align(128))]
struct Task {
    acked: AtomicU64,
    longest_us: AtomicU64,
}

/// What adds one.
pub trait Add: Clone + Send + Sync + 'static {
    fn add_one(&self) -> impl Future<Output = Result<(), Error>> + Send;
}

impl Add for Counter {
    async fn add_one(&self) -> Result<(), Error> {
        self.add(1).await
    }
}

/// One command for each.
impl Add for (RedisStore, Key) {
    async fn add_one(&self) -> Result<(), Error> {
        self.0.add(&self.1, 1).await.map(drop)
    }
}

impl Seen {
    /// Starts `tasks` tasks, each of which calls until it is stopped.
    pub fn start<F>(
        self: &Arc<Seen>,
        tasks: usize,
        call: impl Fn(usize, u64) -> F + Clone + Send + 'static,
    ) -> Vec<tokio::task::JoinHandle<()>>
    where
        F: Future<Output = Result<(), Error>> + Send,
    {
        let start = |task| {
            let (seen, call, own) = (self.clone(), call.clone(), self.task());
            tokio::spawn(async move {
                for n in 0.. {
                    if seen.stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let start = Instant::now();
                    seen.note(&own, start, call(task, n).await);
                }
            })
        };
        (0..tasks).map(start).collect()
    }

    /// Like [`start`](Seen::start) for adds of one on a handle, which no call clones: that would
    /// be a line of memory that all tasks write.
    pub fn start_adds<A: Add>(
        self: &Arc<Seen>,
        tasks: usize,
        to: &A,
    ) -> Vec<tokio::task::JoinHandle<()>> {
        let start = |_| {
            let (seen, to, own) = (self.clone(), to.clone(), self.task());
            tokio::spawn(async move {
                while !seen.stop.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    seen.note(&own, start, to.add_one().await);
                }
            })
        };
        (0..tasks).map(start).collect()
    }

    fn task(&self) -> Arc<Task> {
        let own = Arc::<Task>::default();
        self.tasks.lock().unwrap().push(own.clone());
        own
    }

    fn note(&self, own: &Task, start: Instant, outcome: Result<(), Error>) {
        let us = u64::try_from(start.elapsed().as_micros()).unwrap();
        if us > own.longest_us.load(Ordering::Relaxed) {
            own.longest_us.store(us, Ordering::Relaxed);
        }
        match outcome {
            // Nobody else writes it.
            Ok(()) => own.acked.store(own.acked.load(Ordering::Relaxed) + 1, Ordering::Relaxed),
            Err(e) => self.errors.lock().unwrap().push(e),
        }
    }

    pub async fn stop(&self, tasks: Vec<tokio::task::JoinHandle<()>>) {
        self.stop.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.unwrap();
        }
    }

    pub fn longest(&self) -> Duration {
        let tasks = self.tasks.lock().unwrap();
        let us = tasks.iter().map(|t| t.longest_us.load(Ordering::Relaxed)).max();
        Duration::from_micros(us.unwrap_or(0))
    }

    pub fn acked(&self) -> u64 {
        self.tasks.lock().unwrap().iter().map(|t| t.acked.load(Ordering::Relaxed)).sum()
    }

    /// How many calls ended in an error that says unknown, and how many in one that says not.
    pub fn unknown_and_not_applied(&self) -> (u64, u64) {
        let errors = self.errors.lock().unwrap();
        let unknown = errors.iter().filter(|e| e.is_unknown()).count();
        (unknown as u64, (errors.len() - unknown) as u64)
    }

    #[track_caller]
    pub fn assert_smooth(&self, what: &str) -> u64 {
        self.assert_smooth_beside(what, Duration::ZERO)
    }

    /// Like [`assert_smooth`](Seen::assert_smooth) where a plain client beside it has waited too.
    #[track_caller]
    pub fn assert_smooth_beside(&self, what: &str, plain: Duration) -> u64 {
        let errors = self.errors.lock().unwrap();
        let (longest, acked) = (self.longest(), self.acked());
        println!(
            "{what}: {acked} calls, {} errors, longest {longest:?} ({plain:?} plain)",
            errors.len()
        );
        assert!(errors.is_empty(), "{what}: {} errors, first {:?}", errors.len(), errors[0]);
        assert!(longest < STALL + plain, "{what}: a call took {longest:?}");
        assert!(acked > 1000, "{what}: {acked} calls");
        acked
    }
}

/// What the machine and the servers take by themselves: a plain client that pings each in turn.
pub struct Plain {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Duration>,
}

impl Plain {
    pub fn start(cluster: &Cluster) -> Plain {
        let stop = Arc::new(AtomicBool::new(false));
        let mut controls: Vec<_> = cluster.nodes[..MASTERS].iter().map(Server::control).collect();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                for control in &mut controls {
                    let start = Instant::now();
                    let _: String = control.ask("PING");
                    longest = longest.max(start.elapsed());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            longest
        });
        Plain { stop, thread }
    }

    /// The longest answer of a server.
    pub fn longest(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
