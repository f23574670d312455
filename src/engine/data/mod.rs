//! Per key, run by request threads under a small lock: the write gate, single flight, freshness.
//!
//! - [`gate`]: which loads are overlapped by a write, which may be joined, which may be cached.
//! - [`bulkhead`]: places and a queue in front of one shard.
//! - [`debit`]: one debit of a striped balance.
//! - [`flight`]: one running load and the callers that wait for it.
//! - [`joined`]: values that combine without being counted: maxima, sets.
//! - [`near`]: how old a cached value may be, and which of two values wins.
//! - [`announce`]: what processes tell each other of their writes.
//! - [`adds`]: adds of one counter that travel together.
//! - [`admit`]: budgets per key and per tenant.
//! - [`approx`]: counting for display, one add in k.
//! - [`probe`]: one caller's way through the buckets of a stock.
//! - [`regions`]: counters that are written in several regions.
//! - [`room`]: who waits to be let in, and who is next.
//! - [`retry`]: how many retries the calls of late have earned.
//! - [`sums`]: the sum of one counter, as this process knows it.

pub mod adds;
pub mod admit;
pub mod announce;
pub mod approx;
pub mod bulkhead;
pub mod debit;
pub mod flight;
pub mod gate;
pub mod joined;
pub mod near;
pub mod probe;
pub mod regions;
pub mod retry;
pub mod room;
pub mod sums;

#[cfg(test)]
mod search;
