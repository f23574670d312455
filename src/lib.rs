//! heatsink keeps one hot key from melting one shard.

pub mod blocking;
mod call;
mod cell;
mod config;
mod control;
mod driver;
pub mod engine;
mod error;
mod heatsink;
pub mod key;
mod read;
pub mod runtime;
mod sample;
mod shared;
mod stats;
pub mod store;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod typed;
mod value;

pub use config::{Builder, Loads, NearCache};
pub use control::{CachedValue, Control, Explanation, Rule, Treatment};
pub use error::{Error, ErrorKind, Outcome, Result, Retry};
pub use heatsink::{Heatsink, Put, Writing};
pub use key::Key;
pub use read::{IntoStored, Loadable, Read};
pub use stats::Stats;
pub use store::{Capability, Store};
#[cfg(feature = "json")]
pub use typed::Json;
pub use typed::{Cached, Codec, Text, Typed};
pub use value::{Source, Value};
