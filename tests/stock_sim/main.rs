//! Stock, tokens and balances on virtual time: what they promise under crashes and lost replies, and
//! how fast the last units sell.
//!
//! `HEATSINK_SEEDS=N` runs more seeds than the default, `HEATSINK_SEED=S` one. The long run:
//!
//! `HEATSINK_SEEDS=2000 cargo test --release --features testing --test stock_sim`
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::allow_attributes, reason = "not every module needs each of them")]

mod balance;
mod fleet;
mod sale;
mod tail;
mod tokens;

/// A number from the environment.
fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}
