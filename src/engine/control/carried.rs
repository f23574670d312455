//! One read of the registry's root that renews the leases of many processes.
//!
//! - **What**: a process [asks](Asking) with a token, and keeps the tick at which it did. Whoever
//!   reads for all takes the tokens that wait, *then* reads, and sends each its token with the root
//!   ([`Rounds`]). The lease of each begins at the tick of its token.
//! - **Invariant**: a root that comes with a token was read after the token was made, whatever
//!   became of either on the way: delayed, repeated, sent to another process. So a lease begins
//!   before the read was sent, as with a read of one's own.
//! - **Time and units**: [`Tick`] of the lease clock, of one process each; no tick leaves it.
//! - **Bounds**: one token that is out per process that asks; one that waits for each of them.
//! - **Source**: leases (Gray and Cheriton 1989); the token is a request's number, as in any call
//!   whose answer may be late.

use super::super::time::Tick;
use super::salt::mix;
use std::collections::BTreeMap;
use std::time::Duration;

/// Between two reads for all, at least, and so the shortest time in which a token comes back.
const PACE_LEAST: Duration = Duration::from_millis(200);

/// An answer that takes this long is given up, and the process has read by itself.
#[must_use]
pub fn patience(lease: Duration) -> Duration {
    lease / 2
}

/// Between two reads for all. A token is as old when its answer comes, and the next answer comes
/// as much later: two of them are less than [`patience`].
#[must_use]
pub fn pace(lease: Duration) -> Duration {
    (lease / 5).max(PACE_LEAST)
}

/// A process that has another read for it.
#[derive(Clone, Debug)]
pub struct Asking {
    seed: u64,
    made: u64,
    /// The token that is out, and when it was made.
    out: Option<(u64, Tick)>,
    /// The other side has answered before: it understands.
    answers: bool,
}

impl Asking {
    /// Has not asked yet. Tokens of two seeds differ.
    #[must_use]
    pub fn new(seed: u64) -> Asking {
        Asking { seed: mix(seed), made: 0, out: None, answers: false }
    }

    /// A new token, made now. An answer to the one before renews nothing any more.
    pub fn ask(&mut self, now: Tick) -> u64 {
        self.made += 1;
        // Any language can hold 53 bits.
        let token = mix(self.seed.wrapping_add(self.made)) >> 11;
        self.out = Some((token, now));
        token
    }

    /// Whether to ask: the last answer has come, or does not. Whoever never answers is asked once.
    #[must_use]
    pub fn is_due(&self, now: Tick, lease: Duration) -> bool {
        let waits = |(_, at): (u64, Tick)| now.since(at) < patience(lease);
        self.answers && !self.out.is_some_and(waits)
    }

    /// An answer came: when its token was made. `None` for a token that is not out: not this
    /// process's, of another connection, given up, or answered before.
    pub fn answered(&mut self, token: u64) -> Option<Tick> {
        self.answers = true;
        self.out.take_if(|(out, _)| *out == token).map(|(_, at)| at)
    }
}

/// A process that reads for others.
#[derive(Clone, Default, Debug)]
pub struct Rounds {
    /// The newest token of each who asks.
    waiting: BTreeMap<u64, u64>,
    /// Those that were taken before the read that is under way was sent.
    taken: Option<BTreeMap<u64, u64>>,
    begun: Option<Tick>,
}

impl Rounds {
    /// `from` asks.
    pub fn ask(&mut self, from: u64, token: u64) {
        self.waiting.insert(from, token);
    }

    /// `from` is gone.
    pub fn forget(&mut self, from: u64) {
        self.waiting.remove(&from);
    }

    /// Whether the root is to be read now. All tokens that wait are taken; who asks from here on
    /// waits for the next read.
    pub fn begin(&mut self, now: Tick, lease: Duration) -> bool {
        let rests = self.begun.is_some_and(|at| now.since(at) < pace(lease));
        if self.taken.is_some() || self.waiting.is_empty() || rests {
            return false;
        }
        self.taken = Some(std::mem::take(&mut self.waiting));
        self.begun = Some(now);
        true
    }

    /// The read has ended: whom to answer, and with which token. After one that failed nobody, and
    /// the tokens wait for the next.
    pub fn end(&mut self, read: bool) -> BTreeMap<u64, u64> {
        let taken = self.taken.take().unwrap_or_default();
        if read {
            return taken;
        }
        for (from, token) in taken {
            self.waiting.entry(from).or_insert(token);
        }
        BTreeMap::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(2);

    fn at(ms: u64) -> Tick {
        Tick(3_600_000_000_000).after(Duration::from_millis(ms))
    }

    #[test]
    fn a_token_that_was_not_sent_or_was_answered_or_given_up_renews_nothing() {
        let mut process = Asking::new(1);
        let token = process.ask(at(0));
        assert_eq!(process.answered(token ^ 1), None, "not sent");
        assert_eq!(Asking::new(1).answered(token), None, "of another connection");
        assert_eq!(Asking::new(2).ask(at(0)).abs_diff(token).min(1), 1, "tokens differ");
        assert_eq!(process.answered(token), Some(at(0)));
        assert_eq!(process.answered(token), None, "answered before");
        let old = process.ask(at(10));
        assert!(!process.is_due(at(1_009), LEASE), "it waits for the answer");
        assert!(process.is_due(at(1_010), LEASE), "it does not come");
        let new = process.ask(at(1_010));
        assert_eq!(process.answered(old), None, "given up");
        assert_eq!(process.answered(new), Some(at(1_010)));
    }

    #[test]
    fn who_never_answers_is_asked_once() {
        let mut process = Asking::new(1);
        process.ask(at(0));
        assert!(!process.is_due(at(1_000_000), LEASE));
    }

    #[test]
    fn one_read_answers_all_who_asked_before_it_and_none_who_asked_after() {
        let mut rounds = Rounds::default();
        assert!(!rounds.begin(at(0), LEASE), "nobody asks");
        (0..9).for_each(|from| rounds.ask(from, 100 + from));
        rounds.ask(3, 200);
        assert!(rounds.begin(at(0), LEASE));
        rounds.ask(4, 300);
        assert!(!rounds.begin(at(5_000), LEASE), "one read at a time");
        let told = rounds.end(true);
        assert_eq!(told.len(), 9);
        assert_eq!((told[&3], told[&4]), (200, 104), "the newest that was there before the read");
        assert!(!rounds.begin(at(399), LEASE) && rounds.begin(at(400), LEASE));
        rounds.ask(4, 400);
        assert!(rounds.end(false).is_empty(), "it failed");
        assert!(rounds.begin(at(800), LEASE));
        assert_eq!(rounds.end(true), BTreeMap::from([(4, 400)]));
        rounds.ask(5, 1);
        rounds.forget(5);
        assert!(!rounds.begin(at(9_000), LEASE));
    }

    #[test]
    fn two_rounds_in_a_row_end_before_a_process_reads_by_itself() {
        for secs in [2, 6, 60, 600] {
            let lease = Duration::from_secs(secs);
            // A round begins one turn of 50 ms late at most.
            assert!(2 * (pace(lease) + Duration::from_millis(50)) < patience(lease));
        }
    }

    /// Everything goes wrong that can between three processes and one that reads for them, which
    /// may stop at any point: tokens and answers come late, twice, never, or to another, and
    /// connections begin anew. What is renewed in vain: leases that begin after the root was
    /// replaced.
    fn simulate(seed: u64, reads_first: bool) -> (u64, u64) {
        let mut drawn = seed;
        let mut draw = |n: u64| {
            drawn = drawn.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(drawn) % n
        };
        let (mut now, mut root, mut replaced) = (0, 0, vec![u64::MAX]);
        let mut processes: Vec<Asking> = (0..3).map(|i| Asking::new(seed ^ (i << 40))).collect();
        let (mut rounds, mut read) = (Rounds::default(), None);
        let (mut asked, mut answers) = (Vec::new(), Vec::new());
        let (mut good, mut bad) = (0, 0);
        for step in 0..1_500 {
            now += 1 + draw(40);
            let who = draw(3);
            match draw(9) {
                0 => {
                    replaced[root] = now;
                    replaced.push(u64::MAX);
                    root += 1;
                }
                1 | 2 => {
                    let process = &mut processes[who as usize];
                    if process.is_due(at(now), LEASE) || draw(4) == 0 {
                        asked.push((who, process.ask(at(now))));
                    }
                }
                3 | 4 if !asked.is_empty() => {
                    let mut late = |n: usize| n - 1 - draw(n.min(6) as u64) as usize;
                    let (from, token) = asked[late(asked.len())];
                    rounds.ask(from, token);
                }
                5 => {
                    let early = root;
                    if read.is_none() && rounds.begin(at(now), LEASE) {
                        read = Some(None);
                    }
                    // The mutant holds on to what it has read before it took the tokens.
                    if reads_first && read == Some(None) {
                        read = Some(Some(early.saturating_sub(1)));
                    }
                }
                6 if read == Some(None) => read = Some(Some(root)),
                7 if matches!(read, Some(Some(_))) => {
                    let Some(Some(root)) = read.take() else { continue };
                    let told = rounds.end(draw(5) > 0);
                    answers.extend(told.into_iter().map(|(to, token)| (to, token, root)));
                }
                8 if !answers.is_empty() => {
                    let mut late = |n: usize| n - 1 - draw(n.min(6) as u64) as usize;
                    let (to, token, root) = answers[late(answers.len())];
                    let to = if draw(6) == 0 { draw(3) } else { to };
                    if let Some(from) = processes[to as usize].answered(token) {
                        let sound = at(replaced[root]) > from;
                        (good, bad) = (good + u64::from(sound), bad + u64::from(!sound));
                    }
                }
                _ if draw(30) == 0 => {
                    processes[who as usize] = Asking::new(seed ^ (who << 40) ^ (step << 20));
                }
                _ => {}
            }
        }
        (good, bad)
    }

    #[test]
    fn no_lease_begins_after_the_root_it_was_renewed_by_was_replaced() {
        let runs: Vec<_> = (0..400).map(|seed| simulate(seed, false)).collect();
        let renewed = runs.iter().map(|run| run.0).sum::<u64>();
        assert!(renewed > 1_000, "leases are renewed: {renewed}");
        assert!(runs.iter().all(|run| run.1 == 0), "{runs:?}");
        let caught = (0..400).filter(|seed| simulate(*seed, true).1 > 0).count();
        assert!(caught > 100, "reading before the tokens are taken would be found: {caught}");
    }
}
