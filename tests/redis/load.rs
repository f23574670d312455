//! Many tasks that call a store, and what they saw.

use crate::servers::Server;
use crate::servers::cluster::{Cluster, MASTERS};
use heatsink::Error;
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
    pub acked: AtomicU64,
    pub longest_us: AtomicU64,
    pub errors: Mutex<Vec<Error>>,
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
            let (seen, call) = (self.clone(), call.clone());
            tokio::spawn(async move {
                for n in 0.. {
                    if seen.stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let start = Instant::now();
                    match call(task, n).await {
                        Ok(()) => drop(seen.acked.fetch_add(1, Ordering::Relaxed)),
                        Err(e) => seen.errors.lock().unwrap().push(e),
                    }
                    let us = u64::try_from(start.elapsed().as_micros()).unwrap();
                    seen.longest_us.fetch_max(us, Ordering::Relaxed);
                }
            })
        };
        (0..tasks).map(start).collect()
    }

    pub async fn stop(&self, tasks: Vec<tokio::task::JoinHandle<()>>) {
        self.stop.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.unwrap();
        }
    }

    pub fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.load(Ordering::Relaxed))
    }

    pub fn acked(&self) -> u64 {
        self.acked.load(Ordering::Relaxed)
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
