//! For tests: a virtual-time executor, a seeded simulation, checkers, and the store conformance
//! suite. Feature `testing`.

mod conformance;
pub mod executor;

pub use conformance::{Check, Report, Suite, Verdict, conformance};
pub use executor::SimRuntime;
