//! Each rule of the protocol left out, one at a time: the simulation must miss it.

use crate::world::{Profile, run};
use heatsink::engine::control::copies::Form;
use heatsink::engine::control::copies::Mutant::{self, *};

/// A small world in which a broken rule soon shows.
fn base(form: Form, mutant: Mutant) -> Profile {
    Profile { mutant: Some(mutant), deletes: false, jumps: false, ..Profile::new(form) }
}

fn living(mutant: Mutant) -> Profile {
    let restless = Profile { restless: true, jumps: true, ..base(Form::Atomic, mutant) };
    Profile { life: true, steps: 3_000, ..restless }
}

/// A mutant in its world, and the check that must see it first or second.
fn worlds() -> Vec<(Profile, &'static str)> {
    let sandwich = |m| base(Form::Sandwich, m);
    let pair = |m| base(Form::Pair, m);
    let deletes = |m| Profile { deletes: true, ..base(Form::Sandwich, m) };
    vec![
        // Writers.
        (sandwich(NoReread), "abc"),
        (sandwich(BumpFirst), "abc"),
        (Profile { crashes: true, ..sandwich(Skip) }, "abc"),
        (Profile { unknown: true, ..sandwich(UnackedCounts) }, "bc"),
        (Profile { unknown: true, ..sandwich(NoSettle) }, "b"),
        (sandwich(PlainPut), "abc"),
        (Profile { failover: true, long_ttl: true, ..pair(RefusedIsDone) }, "c"),
        (Profile { failover: true, long_ttl: true, ..pair(RefusedAgainstCell) }, "c"),
        // Deletes.
        (deletes(PhysicalDelete), "abcd"),
        (deletes(DropCell), "abcd"),
        (deletes(TombstoneMax), "abc"),
        // Readers.
        (sandwich(NoFloor), "a"),
        (sandwich(NoDigest), "a"),
        (Profile { foreign: true, ..pair(NoDigest) }, "a"),
        (pair(FloorAtStart), "a"),
        (sandwich(BaseUnchecked), "a"),
        (sandwich(LooseLabel), "abc"),
        (living(JoinOff), "ac"),
        (Profile { readers: 4, ..living(JoinOverlapping) }, "ac"),
        (Profile { readers: 4, ..living(JoinStale) }, "ac"),
        (Profile { slow: true, long_ttl: true, ..living(FloorOfAnother) }, "ace"),
        (living(BaseResultLost), "a"),
        // Fills.
        (Profile { jumps: true, slow: true, quiet: true, ..sandwich(ShortTtl) }, "acd"),
        (Profile { jumps: true, ..base(Form::Atomic, FromReplica) }, "abc"),
        (Profile { jumps: true, foreign: true, ..sandwich(FromCopy) }, "abcf"),
        (Profile { crashes: true, ..sandwich(NoHelper) }, "b"),
        // Life.
        (living(OneStep), "abc"),
        (living(NoWriterWait), "ac"),
        (Profile { quiet: true, ..living(NoRejoin) }, "ac"),
        (Profile { quiet: true, ..living(WarmBeforeWait) }, "ac"),
        (Profile { slow: true, ..living(LeaseBeforeAck) }, "ac"),
        (living(WritersLeaveFirst), "abc"),
        (living(NoReaderWait), "abc"),
        (Profile { long_ttl: true, still: true, ..living(SameNames) }, "ace"),
        (Profile { long_ttl: true, ..living(SameNamesNoCell) }, "ace"),
        (living(NoWarm), "b"),
        // Stores with get, put and delete only.
        (Profile { jumps: true, ..base(Form::DeleteTwice, OneDelete) }, "bc"),
        (base(Form::DeleteTwice, ReducedWrites), "bc"),
        (Profile { jumps: true, ..base(Form::DeleteTwice, NoFloor) }, "a"),
    ]
}

/// In how many seeds the mutant must show. Most do within ten.
const SEEDS: u64 = 30_000;

#[test]
fn every_rule_that_is_left_out_is_missed() {
    let mut missed = Vec::new();
    for (profile, checks) in worlds() {
        let found = (0..SEEDS).find_map(|seed| {
            let wrong = run(seed, profile).err()?;
            let check = wrong.split('(').nth(1)?.chars().next()?;
            checks.contains(check).then_some((seed, wrong))
        });
        match found {
            Some((seed, wrong)) => {
                let what = wrong.lines().next().unwrap_or_default();
                println!("{:?} in {:?}: after {seed} seeds: {what}", profile.mutant, profile.form);
            }
            None => missed.push((profile.mutant, profile.form)),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}

/// The same worlds with every rule kept: what shows above is the rule, not the world.
#[test]
fn the_same_worlds_without_a_mutant_keep_every_promise() {
    for (profile, _) in worlds() {
        for seed in 0..if profile.life { 400 } else { 40 } {
            let sound = Profile { mutant: None, ..profile };
            run(seed, sound).unwrap_or_else(|wrong| panic!("{wrong}"));
        }
    }
}
