//! Per key, run by request threads under a small lock: the write gate, single flight, freshness.
//!
//! - [`gate`]: which loads are overlapped by a write, which may be joined, which may be cached.
//! - [`flight`]: one running load and the callers that wait for it.
//! - [`near`]: how old a cached value may be, and which of two values wins.

pub mod flight;
pub mod gate;
pub mod near;

#[cfg(test)]
mod search;
