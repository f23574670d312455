//! Tasks and timers on whichever tokio runtime the caller is in.

use super::{BoxFuture, Clock, Runtime, ThreadRuntime};
use std::sync::OnceLock;
use std::time::Duration;
use tokio::runtime::Handle;

/// Follows the caller: a task is spawned on the tokio runtime that the call is made in. Outside
/// of any, a [`ThreadRuntime`] is started on first use.
#[derive(Debug, Default)]
pub struct TokioRuntime {
    fallback: OnceLock<ThreadRuntime>,
}

impl TokioRuntime {
    /// A runtime that follows the caller.
    #[must_use]
    pub fn new() -> TokioRuntime {
        TokioRuntime::default()
    }

    fn fallback(&self) -> &ThreadRuntime {
        self.fallback.get_or_init(ThreadRuntime::new)
    }
}

impl Runtime for TokioRuntime {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        match Handle::try_current() {
            Ok(handle) => drop(handle.spawn(task)),
            Err(_) => self.fallback().spawn(task),
        }
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        // The timers are our own: a tokio runtime may have been built without `enable_time`, and
        // asking one that was panics.
        self.fallback().sleep(duration)
    }

    fn clock(&self) -> Clock {
        Clock::system()
    }
}
