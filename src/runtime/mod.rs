//! What heatsink needs from the world: a place to run a task, a timer, a clock.
//!
//! This is the only folder in which a clock is read, a thread started or the global randomness
//! asked (clippy's `disallowed-methods` keeps it so). By default a [`Runtime`] follows the caller:
//! inside tokio it is tokio, elsewhere a small pool of threads that heatsink starts on first use.
//! So no handle dies with the runtime of one test or one worker.

mod clock;
#[cfg(feature = "redis")]
mod home;
mod thread;
#[cfg(feature = "tokio")]
mod tokio;

pub use clock::Clock;
pub(crate) use clock::{spawn_thread, wall_seed};
#[cfg(feature = "redis")]
pub(crate) use home::Home;
pub use thread::ThreadRuntime;
#[cfg(feature = "tokio")]
pub use tokio::TokioRuntime;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A boxed future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A place to run tasks and wait.
pub trait Runtime: Send + Sync + 'static {
    /// Runs `task` to its end, or drops it if the runtime is going away. Never blocks.
    fn spawn(&self, task: BoxFuture<'static, ()>);

    /// Completes no earlier than `duration` from now.
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;

    /// The clock that goes with the timers.
    fn clock(&self) -> Clock;
}

impl fmt::Debug for dyn Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Runtime")
    }
}

/// The runtime that follows the caller: tokio where one is running, else threads of our own.
pub(crate) fn ambient() -> Arc<dyn Runtime> {
    #[cfg(feature = "tokio")]
    return Arc::new(TokioRuntime::new());
    #[cfg(not(feature = "tokio"))]
    return Arc::new(ThreadRuntime::new());
}
