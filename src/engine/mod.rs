//! The engine decides, the shell acts.
//!
//! Nothing in this folder reads a clock, does IO, starts a thread, takes a lock, awaits, or asks
//! the global randomness: time and randomness are arguments, decisions are return values. That is
//! what makes it possible to search all its states and to replay any run from a seed.
//! `tests/tidy.rs` keeps it so.
//!
//! - [`data`]: per key, run by request threads under a small lock. May this load be joined, may
//!   its result be cached?
//! - [`control`]: who is hot and what to do about it. Single-threaded, run by the driver.

pub mod control;
pub mod data;
pub mod time;
