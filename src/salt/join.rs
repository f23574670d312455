//! Some calls at a time, each bounded.

use crate::runtime::BoxFuture;
use std::future::poll_fn;
use std::task::Poll;

/// Calls of one step that are under way at a time.
const AT_A_TIME: usize = 32;

/// What each of `calls` comes to, in their order. Panics are the callers' to catch.
pub(super) async fn all<T>(calls: impl Iterator<Item = BoxFuture<'static, T>>) -> Vec<T> {
    let mut calls = calls.fuse();
    let mut out = Vec::new();
    loop {
        let mut some: Vec<_> = calls.by_ref().take(AT_A_TIME).map(Err).collect();
        if some.is_empty() {
            return out;
        }
        poll_fn(|cx| {
            let mut pending = false;
            for call in &mut some {
                if let Err(future) = call {
                    match future.as_mut().poll(cx) {
                        Poll::Ready(value) => *call = Ok(value),
                        Poll::Pending => pending = true,
                    }
                }
            }
            if pending { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        out.extend(some.into_iter().filter_map(Result::ok));
    }
}
