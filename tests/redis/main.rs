//! `RedisStore` against real servers, which these tests start themselves.
#![cfg(feature = "redis")]
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    unreachable_pub,
    reason = "tests drive real threads, clocks and processes, and fail by panicking"
)]
#![allow(clippy::allow_attributes, reason = "not every module needs each of them")]

mod adds;
mod copies;
mod failover;
mod faults;
#[cfg(feature = "feed")]
mod fleet;
mod flushes;
mod load;
mod moves;
mod node;
mod pools;
mod proxy;
mod salted;
#[path = "../../examples/servers/mod.rs"]
mod servers;
mod stock;
#[cfg(feature = "redis-tls")]
mod tls;
