//! Who is hot, and what to do about it.
//!
//! The driver thread owns one [`detect::Detector`] and feeds it samples of the process's own
//! traffic. Everything below it is pure and single-threaded:
//!
//! - [`sampling`]: how many requests one sample stands for, from a budget.
//! - [`sketch`]: which keys are frequent in a window, with bounds, in fixed memory.
//! - [`watch`]: keys near the threshold, counted exactly over a sliding window.
//! - [`hysteresis`]: when a count proves a key hot, when it proves it cool.
//! - [`detect`]: the windows and the verdicts, made of the parts above.
//! - [`verdict`]: what the detector says, with its numbers.
//! - [`treat`]: which remedy fits a hot key, with the numbers behind the choice.
//! - [`merge`]: reports of several processes as one ranked list with bounds.
//! - [`lanes`]: one writer's absolute total of a counter, and what of it is stored.
//! - [`roster`]: who holds which lane.

pub mod detect;
pub mod hysteresis;
mod index;
pub mod lanes;
pub mod merge;
pub mod roster;
pub mod sampling;
pub mod sketch;
pub mod treat;
pub mod verdict;
pub mod watch;
