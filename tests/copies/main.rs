//! Copies of read keys: the protocol under everything that goes wrong, and each of its rules
//! missed when it is left out.
//!
//! `HEATSINK_SEEDS=100000 cargo test --release --test copies` runs more of the same.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod store;
mod world;

mod copied;
mod fleet;
mod mutants;
mod promises;
mod stream;
