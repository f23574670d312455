//! heatsink keeps one hot key from melting one shard.

pub mod engine;
mod error;
pub mod key;
pub mod runtime;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, ErrorKind, Outcome, Result, Retry};
pub use key::Key;
pub use store::{Capability, Store};
