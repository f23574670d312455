//! An embedded store of several shards, for examples, tests and simulations.

/// placeholder
#[derive(Debug)]
pub struct MemoryStore;
