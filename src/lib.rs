#![doc = include_str!("../README.md")]
//!
//! # Map of the modules
//!
//! - [`Heatsink`]: the handle a service calls; [`blocking`] for plain threads, [`Typed`] for types.
//! - [`Counter`], [`Buffered`]: adds that combine; [`Adds`]: their options.
//! - [`Stock`], [`Tokens`]: units that are sold once each; [`WaitingRoom`] in front of them;
//!   [`Balance`]: credits and debits, never below a floor.
//! - [`Admission`], [`Retries`], [`Bulkhead`]: shedding what is left; off unless asked for.
//! - [`Limiter`]: a limit that many processes share.
//! - [`store`]: what heatsink needs from a store, and the embedded one.
//! - [`Salt`]: counters spread over slots that grow and shrink; [`Registry`]: where that is written.
//! - [`HotList`]: who is hot; [`Control`]: pins, denials, schedules, [`Explanation`]; [`Stats`]:
//!   plain numbers.
//! - `feed` (feature `feed`): one hot list for the processes of a host and of a fleet.
//! - [`copies`]: copies of one known read-hot key on several shards.
//! - [`stream`]: writes announced from process to process.
//! - [`engine`]: the decisions, pure: no clock, lock, thread or await. *The engine decides, the
//!   shell acts.*
//! - [`runtime`]: the only place that reads clocks and starts threads.
//! - `testing` (feature `testing`): virtual time, simulation, the conformance suite.
//!
//! # Dependencies of the default build
//!
//! | crate | why |
//! |---|---|
//! | ahash | hash of a key in 3 ns, seeded |
//! | arc-swap | a hit reads snapshots without a lock |
//! | bytes | the buffer type that clients already use |
//! | crossbeam-channel | samples to the driver, bounded |
//! | hashbrown | a table that looks up by hash and predicate |
//! | parking_lot | locks of one byte without poisoning |
//! | rand_xoshiro | seeded randomness that replays |
//! | rustix | the coarse clock, without `unsafe` |
//! | tokio (feature) | tasks where the caller runs |
//! | serde, serde_json (features `json`, `feed`) | values, and the feed's lines, as JSON |
//! | metrics, tracing (features) | numbers and events to whatever the service has installed |

mod adds;
mod batch;
pub mod blocking;
mod bridge;
mod buffer;
mod buffered;
mod call;
mod cell;
mod config;
mod control;
pub mod copies;
mod counter;
mod driver;
pub mod engine;
mod error;
mod explain;
#[cfg(feature = "feed")]
pub mod feed;
mod flusher;
mod heatsink;
mod hotlist;
mod joined;
mod kept;
pub mod key;
mod lanes;
mod many;
mod names;
mod read;
mod registry;
pub mod runtime;
mod salt;
mod sample;
mod shared;
mod shed;
mod stats;
mod stock;
pub mod store;
pub mod stream;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod typed;
mod upkeep;
mod value;
mod write;

#[cfg(feature = "testing")]
#[doc(hidden)]
pub use adds::Mutant;
pub use adds::{AddStats, Adds, AtCap};
pub use buffered::Buffered;
pub use config::{Builder, Detect, Loads, NearCache};
pub use control::{Control, Schedule};
pub use counter::{Approximate, Counter, Estimate, GrowOnly, Sum};
pub use engine::control::hotlist::{HotKey, HotList, Rule};
pub use engine::control::leasing::Without;
pub use engine::control::spread::Spread;
pub use engine::control::treat::{Ceiling, Treatment};
pub use engine::data::admit::Budget;
pub use engine::data::approx::rounded;
pub use error::{Error, ErrorKind, Outcome, Result, Retry};
pub use explain::{CachedValue, Explanation};
pub use heatsink::Heatsink;
pub use hotlist::HotListChanges;
pub use joined::{Extreme, Members, Reading, Union};
pub use key::Key;
pub use lanes::Parts;
pub use read::{IntoStored, Loadable, Read};
pub use registry::Registry;
pub use salt::{Counted, Redelivery, Salt, SaltStats, Salting};
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use salt::{SaltMutant, record_name, slot_name};
pub use shed::ShedStats;
pub use shed::limit::{Limit, Limiter};
pub use shed::options::{Admission, Bulkhead, Retries};
pub use stats::Stats;
pub use stock::{
    Accounts, Balance, Debited, Fate, Held, HeldToken, OpenHold, Popping, Reconciler, Stock, Taken,
    Tokens, WaitingRoom, WaitingTicket,
};
pub use store::{Capability, Store};
pub use stream::Invalidations;
#[cfg(feature = "json")]
pub use typed::Json;
pub use typed::{Cached, Codec, Text, Typed};
pub use value::{Source, Value};
pub use write::{Put, Writing};
