//! Per key, run by request threads under a small lock: the write gate, single flight, freshness.
