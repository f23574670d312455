//! Who is hot, and what to do about it.
//!
//! The driver thread feeds one [`steering::Steering`] with samples of the process's own traffic. Everything below it is pure and single-threaded:
//!
//! - [`sampling`]: how many requests one sample stands for, from a budget.
//! - [`sketch`]: which keys are frequent in a window, with bounds, in fixed memory.
//! - [`watch`]: keys near the threshold, counted exactly over a sliding window.
//! - [`hysteresis`]: when a count proves a key hot, when it proves it cool.
//! - [`detect`]: the windows and the verdicts, made of the parts above.
//! - [`verdict`]: what the detector says, with its numbers.
//! - [`operator`]: what the operator has said.
//! - [`steering`]: who is treated: verdicts and the operator's word in one place.
//! - [`shards`]: what each shard gets from this process.
//! - [`hotlist`]: the answer, as an operator reads it.
//! - [`treat`]: which remedy fits a hot key, with the numbers behind the choice.
//! - [`merge`]: reports of several processes as one ranked list with bounds.
//! - [`reporter`], [`aggregate`], [`fleet`], [`follow`], [`fed`]: the hot list of many processes:
//!   what each reports, what all decide together, how it travels, how it is taken up and obeyed.
//! - [`lanes`]: one writer's absolute total of a counter, and what of it is stored.
//! - [`leasing`]: a limit that many processes share.
//! - [`roster`]: who holds which lane.
//! - [`registry`]: which keys are spread over several names, as one process knows it.
//! - [`carried`]: one read of it that renews what many processes know.
//! - [`salt`]: a counter in slots, and the one way in which that changes.
//! - [`rotation`]: which step of that change is due.
//! - [`spread`]: whether the writes of a counter are combined in one place or need slots.
//! - [`totals`]: the sum of a salted counter, written by one process for all.
//! - [`sizing`]: how many slots, where they may share a shard.
//! - [`stock`]: units in buckets, and the work that moves them.
//! - [`copies`]: copies of a read-hot key on several shards.

pub mod aggregate;
pub mod blend;
pub mod carried;
pub mod copies;
pub mod detect;
pub mod fed;
pub mod fleet;
pub mod follow;
pub mod history;
pub mod hotlist;
pub mod hysteresis;
mod index;
pub mod lanes;
pub mod leasing;
pub mod merge;
pub mod operator;
pub mod orders;
pub mod registry;
pub mod reporter;
pub mod roster;
pub mod rotation;
pub mod salt;
pub mod sampling;
pub mod shards;
pub mod sizing;
pub mod sketch;
pub mod spread;
pub mod steering;
pub mod stock;
pub mod totals;
pub mod treat;
pub mod verdict;
pub mod watch;
