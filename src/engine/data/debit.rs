//! One debit of a striped balance.
//!
//! - **What**: what to ask next, what an answer means, and when a debit may be refused.
//! - **Invariant**: units leave the main account only by a conditional take, so it is never below
//!   the floor. A debit is refused only if at some moment of its call the main account and all
//!   stripes together had too little: what the main account had then, and the stripes had later,
//!   is not enough, and from a picture before to that one after it no sweep was under way. One that
//!   may have been made is asked again or barred, never refused.
//! - **Time and units**: none; the balance's smallest unit, above the floor.
//! - **Bounds**: eight pictures, three attempts per question.
//! - **Source**: escrow of a hot row in sub-rows (O'Neil, 1986). Within one epoch a stripe only
//!   grows, so that a later look at the stripes bounds what they had; a bound holds where a snapshot
//!   (Afek et al., 1993) would need credits to pause.

use crate::engine::control::stock::Mutant;
use crate::store::{End, Ended, Take};

/// Attempts at one question whose answer is lost.
const TRIES: u32 = 3;

/// Pictures one debit looks at.
const LOOKS: u32 = 8;

/// What is to be done next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Take from the main account.
    Take,
    /// Put back whatever the debit has taken, and bar it.
    Bar,
    /// Take a picture, begun after now.
    Look,
    /// Bring what lies on the stripes to the main account, and finish what others have begun.
    Sweep,
    /// The end.
    End(Found),
}

/// How a debit ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// It is made.
    Made,
    /// Too little was there; so much was, or less.
    Short(i64),
    /// It was reversed before, or barred: it takes nothing any more.
    Ended,
    /// Nobody knows whether it was made.
    Unknown,
    /// Credits came and went too fast to tell.
    Crowded,
    /// The store cannot be asked.
    Failed,
}

/// What was answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// To [`Next::Take`].
    Took(Take),
    /// To [`Next::Bar`].
    Barred(Ended),
    /// To [`Next::Look`]: whether nothing was between accounts, under which epoch, and what lay on
    /// the stripes.
    Saw {
        /// Nothing was under way.
        still: bool,
        /// Counts the sweeps.
        epoch: u64,
        /// On all stripes together.
        stripes: i64,
    },
    /// To [`Next::Sweep`].
    Swept,
    /// The question had no effect.
    NotApplied,
    /// The question may have had its effect, or may have it yet.
    Unknown,
}

/// One debit.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Debit {
    next: Step,
    amount: i64,
    /// It may have been made.
    doubt: bool,
    /// The epoch of the last picture, if nothing was under way then.
    still: Option<u64>,
    /// What the main account had when it last refused; once the debit is refused, with the stripes.
    left: i64,
    tries: u32,
    looks: u32,
    broken: Option<Broken>,
}

/// [`Next`], as it is kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Step {
    Take,
    Bar,
    Look,
    Sweep,
    End(How),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum How {
    Made,
    Short,
    Ended,
    Unknown,
    Crowded,
    Failed,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Broken {
    RefusesEarly,
    ForgetsDoubt,
}

impl Debit {
    /// A debit; `doubt` when an earlier call of the same id ended [`Found::Unknown`].
    #[must_use]
    pub fn new(amount: u64, doubt: bool) -> Debit {
        Debit {
            next: Step::Take,
            amount: i64::try_from(amount).unwrap_or(i64::MAX),
            doubt,
            still: None,
            left: 0,
            tries: 0,
            looks: 0,
            broken: None,
        }
    }

    /// Breaks a rule, to show that a test notices.
    #[doc(hidden)]
    #[must_use]
    pub fn broken_by(mut self, mutant: Option<Mutant>) -> Debit {
        self.broken = match mutant {
            Some(Mutant::RefusesEarly) => Some(Broken::RefusesEarly),
            Some(Mutant::ForgetsDoubt) => Some(Broken::ForgetsDoubt),
            _ => None,
        };
        self
    }

    /// What is to be done now.
    #[must_use]
    pub fn next(&self) -> Next {
        match self.next {
            Step::Take => Next::Take,
            Step::Bar => Next::Bar,
            Step::Look => Next::Look,
            Step::Sweep => Next::Sweep,
            Step::End(how) => Next::End(match how {
                How::Made => Found::Made,
                How::Short => Found::Short(self.left),
                How::Ended => Found::Ended,
                How::Unknown => Found::Unknown,
                How::Crowded => Found::Crowded,
                How::Failed => Found::Failed,
            }),
        }
    }

    /// Whether it may have been made, or may be yet.
    #[must_use]
    pub fn in_doubt(&self) -> bool {
        self.doubt
    }

    fn go(&mut self, next: Step) {
        self.tries = 0;
        self.next = next;
    }

    fn end(&mut self, how: How) {
        self.next = Step::End(how);
    }

    /// Asks the same once more, or gives up.
    fn again(&mut self) {
        self.tries += 1;
        if self.tries >= TRIES {
            self.end(How::Unknown);
        }
    }

    /// What was answered to [`next`](Debit::next).
    pub fn heard(&mut self, heard: Heard) {
        match (self.next, heard) {
            (Step::Take, Heard::Took(take)) => self.took(take),
            (Step::Take, Heard::Unknown) => {
                self.doubt = self.broken != Some(Broken::ForgetsDoubt);
                self.again();
            }
            (Step::Take | Step::Bar, Heard::NotApplied) if self.doubt => self.again(),
            (Step::Bar, Heard::Unknown) => self.again(),
            (Step::Bar, Heard::Barred(Ended::Before { end: End::Sold, .. })) => self.end(How::Made),
            (Step::Bar, Heard::Barred(_)) => self.end(How::Ended),
            (Step::Look, Heard::Saw { still, epoch, stripes }) => {
                self.saw(still.then_some(epoch), stripes);
            }
            (Step::Sweep, Heard::Swept) => self.go(Step::Take),
            (Step::Take | Step::Bar | Step::Look | Step::Sweep, Heard::NotApplied)
            | (Step::Look | Step::Sweep, Heard::Unknown) => self.end(How::Failed),
            // An answer to another question.
            _ => {}
        }
    }

    fn took(&mut self, take: Take) {
        match take {
            Take::Taken { .. } => self.end(How::Made),
            Take::Ended { .. } => self.end(How::Ended),
            // An earlier question may still be on its way.
            Take::Short { .. } if self.doubt => self.go(Step::Bar),
            Take::Short { left } => {
                self.left = left;
                self.go(Step::Look);
            }
        }
    }

    fn saw(&mut self, epoch: Option<u64>, stripes: i64) {
        self.looks += 1;
        let most = self.left.saturating_add(stripes);
        let lacks = epoch.is_some() && most < self.amount;
        let proven = epoch == self.still || self.broken == Some(Broken::RefusesEarly);
        if lacks && proven {
            self.left = most;
            return self.end(How::Short);
        }
        self.still = epoch;
        if self.looks >= LOOKS {
            return self.end(How::Crowded);
        }
        self.go(if lacks { Step::Take } else { Step::Sweep });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// One debit of 2 against a main account and two stripes, while credits of 1 arrive, another
    /// debit and its reversal pass and stripes are swept, at every point; a picture reads one account
    /// at a time. All states are visited.
    #[derive(Clone, PartialEq, Eq, Hash, Debug)]
    struct World {
        main: i64,
        stripes: [i64; 2],
        /// Under way, from the main account's point of view.
        moving: i64,
        epoch: u64,
        credits: u8,
        /// The other debit: to come, made, reversed.
        other: u8,
        /// What the debit has taken.
        taken: bool,
        barred: bool,
        /// Questions whose answer was lost and that may still arrive.
        late: u8,
        /// The picture that is being taken: its next account, epoch, sum.
        picture: Option<(usize, Option<u64>, i64)>,
        /// At some moment since the call began too little was there.
        was_short: bool,
    }

    impl World {
        fn total(&self) -> i64 {
            self.main + self.moving + self.stripes.iter().sum::<i64>()
        }

        fn take(&mut self) -> Take {
            if self.barred {
                return Take::Ended { amount: 0 };
            }
            if self.taken {
                return Take::Taken { left: 0 };
            }
            if self.main < 2 {
                return Take::Short { left: self.main };
            }
            self.main -= 2;
            self.taken = true;
            Take::Taken { left: self.main }
        }
    }

    /// What others do meanwhile.
    fn others(w: &World) -> Vec<World> {
        let mut all = Vec::new();
        let mut then = |may: bool, change: &dyn Fn(&mut World)| {
            if may {
                let mut w = w.clone();
                change(&mut w);
                all.push(w);
            }
        };
        for s in 0..2 {
            then(w.credits > 0, &|w| {
                w.credits -= 1;
                w.stripes[s] += 1;
            });
            then(w.stripes[s] > 0 && w.moving == 0 && w.epoch < 4, &|w| {
                w.epoch += 1;
                w.moving = std::mem::take(&mut w.stripes[s]);
            });
        }
        then(w.moving > 0, &|w| w.main += std::mem::take(&mut w.moving));
        then(w.other == 0 && w.main > 0, &|w| {
            w.main -= 1;
            w.other = 1;
        });
        then(w.other == 1, &|w| {
            w.main += 1;
            w.other = 2;
        });
        then(w.late > 0, &|w| {
            w.late -= 1;
            let _ = w.take();
        });
        all
    }

    /// What the debit does next, in every way it may turn out.
    fn own(w: &World, debit: &Debit) -> Vec<(World, Debit)> {
        let mut all = Vec::new();
        let told = |w: World, heard: Heard| {
            let mut debit = debit.clone();
            debit.heard(heard);
            (w, debit)
        };
        match debit.next() {
            Next::Take => {
                let mut after = w.clone();
                let take = after.take();
                all.push(told(after.clone(), Heard::Took(take)));
                all.push(told(after, Heard::Unknown));
                if w.late < 1 {
                    all.push(told(World { late: w.late + 1, ..w.clone() }, Heard::Unknown));
                }
                all.push(told(w.clone(), Heard::NotApplied));
            }
            Next::Bar => {
                let mut after = w.clone();
                let amount = if std::mem::take(&mut after.taken) { 2 } else { 0 };
                after.main += amount as i64;
                after.barred = true;
                all.push(told(after, Heard::Barred(Ended::Now { amount })));
                all.push(told(w.clone(), Heard::Unknown));
            }
            Next::Look => {
                let still = (w.moving == 0).then_some(w.epoch);
                let (at, epoch, sum) = w.picture.unwrap_or((0, still, 0));
                if at < 2 {
                    let picture = Some((at + 1, epoch, sum + w.stripes[at]));
                    all.push((World { picture, ..w.clone() }, debit.clone()));
                } else {
                    let still = epoch.is_some() && epoch == still;
                    let saw = Heard::Saw { still, epoch: epoch.unwrap_or(0), stripes: sum };
                    all.push(told(World { picture: None, ..w.clone() }, saw));
                }
            }
            Next::Sweep => {
                let mut after = w.clone();
                after.main = after.total();
                (after.moving, after.stripes, after.epoch) = (0, [0, 0], w.epoch + 1);
                all.push(told(after, Heard::Swept));
            }
            Next::End(_) => {}
        }
        all
    }

    fn visit(broken: Option<Mutant>) -> Result<usize, String> {
        let begin = |main, other| World {
            main,
            stripes: [0, 0],
            moving: 0,
            epoch: 0,
            credits: 3,
            other,
            taken: false,
            barred: false,
            late: 0,
            picture: None,
            was_short: false,
        };
        let mut queue: Vec<_> = [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1)]
            .map(|(main, other)| (begin(main, other), Debit::new(2, false).broken_by(broken)))
            .to_vec();
        let mut seen = HashSet::new();
        while let Some((mut w, debit)) = queue.pop() {
            w.was_short |= w.total() < 2;
            if !seen.insert((w.clone(), debit.clone())) {
                continue;
            }
            if w.main < 0 {
                return Err(format!("below the floor: {w:?}"));
            }
            if let Next::End(found) = debit.next() {
                let wrong = match found {
                    Found::Short(_) => w.taken || !w.was_short,
                    Found::Made => !w.taken,
                    Found::Ended | Found::Failed => w.taken,
                    Found::Crowded | Found::Unknown => false,
                };
                if wrong {
                    return Err(format!("{found:?}: {w:?}"));
                }
            }
            let theirs = others(&w).into_iter().map(|w| (w, debit.clone()));
            queue.extend(theirs);
            queue.extend(own(&w, &debit));
        }
        Ok(seen.len())
    }

    #[test]
    fn a_debit_is_refused_only_if_too_little_was_there_and_never_if_it_was_made() {
        let states = visit(None).unwrap();
        println!("{states} states");
        assert!(states > 10_000, "{states}");
    }

    #[test]
    fn a_refusal_by_one_picture_and_one_that_forgets_a_lost_answer_are_caught() {
        for broken in [Mutant::RefusesEarly, Mutant::ForgetsDoubt] {
            let wrong = visit(Some(broken)).unwrap_err();
            let refused = wrong.starts_with("Short") || wrong.starts_with("Failed");
            assert!(refused, "{broken:?}: {wrong}");
        }
    }
}
