//! heatsink next to the crates that do a part of its work, in one run each.
//!
//! Every run has a control that shares nothing between threads, and is void unless the control
//! gains at least 1.8 from the second thread. A bench goes on until it has five valid runs, or says
//! that it could not and exits with status 1.

pub mod caches;
#[path = "../../common/mod.rs"]
mod common;
pub mod report;
pub mod zipf;
