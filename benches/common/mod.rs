//! What the benches share: rows measured in interleaved rounds at one thread and at two.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// The output of a future that is ready at once, as a hit and a buffered add are.
#[inline]
#[allow(clippy::allow_attributes, dead_code, reason = "each bench uses its part")]
pub(crate) fn poll_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => out,
        Poll::Pending => panic!("what is measured had to wait"),
    }
}

/// Millions of operations per second of one row, medians of the rounds.
pub(crate) struct Row {
    pub(crate) one: f64,
    pub(crate) two: f64,
    /// Two threads together over one thread, round by round.
    pub(crate) scaling: f64,
}

/// Measures `rows` rows in interleaved rounds; `measure` takes a row and a number of threads.
pub(crate) fn rows(rows: usize, rounds: usize, measure: impl Fn(usize, usize) -> f64) -> Vec<Row> {
    let mut seen = vec![Vec::new(); rows];
    for _ in 0..rounds {
        for (row, seen) in seen.iter_mut().enumerate() {
            let one = measure(row, 1);
            seen.push((one, measure(row, 2)));
        }
    }
    let row = |seen: &Vec<(f64, f64)>| Row {
        one: median(seen.iter().map(|s| s.0)),
        two: median(seen.iter().map(|s| s.1)),
        scaling: median(seen.iter().map(|s| s.1 / s.0)),
    };
    seen.iter().map(row).collect()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
