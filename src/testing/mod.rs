//! For tests: a virtual-time executor, a seeded simulation, checkers, and the store conformance
//! suite. Feature `testing`.

pub mod executor;

pub use executor::SimRuntime;
