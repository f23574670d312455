//! The tokio runtime that a store's connections live on.

use super::{BoxFuture, spawn_thread};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

/// Where connections live: the runtime in which the store was made, for as long as it runs, and
/// then a thread of our own. So a store outlives the runtime of one test or one worker, and can be
/// called from a plain thread.
#[derive(Clone, Debug)]
pub(crate) struct Home(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    handle: Mutex<Handle>,
    own: Mutex<Option<oneshot::Sender<()>>>,
}

impl Home {
    /// The runtime of the caller; outside of any, a thread of our own.
    pub(crate) fn here() -> std::io::Result<Home> {
        let (handle, own) = match Handle::try_current() {
            Ok(handle) => (handle, None),
            Err(_) => start().map(|(handle, stop)| (handle, Some(stop)))?,
        };
        Ok(Home(Arc::new(Inner { handle: Mutex::new(handle), own: Mutex::new(own) })))
    }

    /// Runs `task` at home; if that has shut down, on a thread of our own from now on. The handle
    /// aborts the task.
    pub(crate) fn spawn(&self, task: BoxFuture<'static, ()>) -> AbortHandle {
        let mut handle = self.0.handle.lock();
        // A runtime that has shut down ends every task at once, even one that never would.
        let probe = handle.spawn(std::future::pending::<()>());
        let gone = probe.is_finished();
        probe.abort();
        if gone && let Ok((next, stop)) = start() {
            *handle = next;
            *self.0.own.lock() = Some(stop);
        }
        handle.spawn(task).abort_handle()
    }

    /// Polls `future` where tokio's timers and sockets can be reached: in the caller's runtime,
    /// and outside of any in this one.
    pub(crate) async fn inside<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        std::future::poll_fn(|cx| self.poll_inside(future.as_mut(), cx)).await
    }

    fn poll_inside<F: Future>(&self, future: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<F::Output> {
        // Whether this is a task is asked first: that touches nothing that threads share.
        if tokio::task::try_id().is_some() || Handle::try_current().is_ok() {
            return future.poll(cx);
        }
        let handle = self.0.handle.lock().clone();
        let _entered = handle.enter();
        future.poll(cx)
    }
}

/// A runtime on a thread of its own, which ends when the sender is dropped.
fn start() -> std::io::Result<(Handle, oneshot::Sender<()>)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let (stop, stopped) = oneshot::channel();
    drop(spawn_thread("heatsink-store", move || {
        let _ = runtime.block_on(stopped);
    })?);
    Ok((handle, stop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{Runtime, ThreadRuntime};
    use std::time::Duration;

    #[test]
    fn a_home_outlives_the_runtime_it_was_made_in() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let home = runtime.block_on(async { Home::here().unwrap() });
        drop(runtime);
        for _ in 0..2 {
            let (tx, rx) = std::sync::mpsc::channel();
            home.spawn(Box::pin(async move { tx.send(1).unwrap() }));
            assert_eq!(rx.recv_timeout(Duration::from_secs(5)), Ok(1));
        }
    }

    #[test]
    fn timers_of_tokio_work_on_a_plain_thread() {
        let home = Home::here().unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        let plain = ThreadRuntime::new();
        plain.spawn(Box::pin(async move {
            let never = std::future::pending::<()>();
            let slow = async { tokio::time::timeout(Duration::from_millis(5), never).await };
            tx.send(home.inside(slow).await.is_err()).unwrap();
        }));
        assert_eq!(rx.recv_timeout(Duration::from_secs(5)), Ok(true));
    }
}
