//! The hot list of a host and of a fleet.
#![cfg(feature = "feed")]
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    unreachable_pub,
    reason = "tests drive real threads, clocks and processes, and fail by panicking"
)]
#![allow(clippy::allow_attributes, reason = "not every module needs each of them")]

mod budget;
#[cfg(feature = "cli")]
mod cli;
mod fleet;
mod hostile;
mod sizes;
mod sockets;
