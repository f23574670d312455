//! Each rule of the protocol left out, one at a time: the simulation must miss it.

use crate::store::at;
use crate::world::{Profile, run};
use heatsink::engine::control::copies::Mutant::{self, *};
use heatsink::engine::control::copies::read::{Copy, Floor, Get, Step};
use heatsink::engine::control::copies::snapshot::{Look, Seen};
use heatsink::engine::control::copies::{Form, Image, Plan, Set};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

/// A small world in which a broken rule soon shows.
fn base(form: Form, mutant: Mutant) -> Profile {
    Profile { mutant: Some(mutant), deletes: false, jumps: false, ..Profile::new(form) }
}

fn living(mutant: Mutant) -> Profile {
    let restless = Profile { restless: true, jumps: true, ..base(Form::Joint, mutant) };
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
        (Profile { slow: true, quiet: true, steps: 1_500, ..sandwich(ShortTtl) }, "acd"),
        (Profile { jumps: true, ..base(Form::Joint, FromReplica) }, "abc"),
        (Profile { jumps: true, foreign: true, ..sandwich(FromCopy) }, "abcf"),
        (Profile { crashes: true, ..sandwich(NoHelper) }, "b"),
        // Life.
        (living(OneStep), "abc"),
        (living(NoWriterWait), "ac"),
        (Profile { writers: 3, quiet: true, ..living(WarmBeforeWait) }, "ac"),
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
    let only = std::env::var("HEATSINK_MUTANT").ok();
    for (profile, checks) in worlds() {
        if only
            .as_ref()
            .is_some_and(|o| Some(o) != profile.mutant.map(|m| format!("{m:?}")).as_ref())
        {
            continue;
        }
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

/// E4, as the model found it: writer 0 knows of two copies and has put B, number 2, on copy 1;
/// writer 1 knows of one and completes C on copy 0. Opened, a process whose floor is B's would take
/// copy 1 for current.
#[test]
fn a_process_joins_again_when_the_set_grows() {
    let set = |readers| Set { generation: 1, writers: 2, readers };
    let returned = |mutant| {
        let plan = Plan { mutant, ..Plan::new(Form::Joint, MS * 15, MS * 20) };
        let mut floor = Floor::new();
        floor.learn(&plan, Some(set(1)), at(0));
        let b = Image::new(2, Some("B".into()), at(1));
        let mark = floor.mark(at(1));
        assert!(floor.take_base(&plan, 1, b.label, mark) && floor.joined());
        floor.learn(&plan, Some(set(2)), at(50));
        // All random bits set: the last copy.
        let mut get = Get::new(&floor, Some(set(2)), at(60), u64::MAX);
        let now = (at(60), Some(set(2)));
        match get.poll(&plan, now.0) {
            Step::Copy(1, 1) => get.handle_copy(&plan, &mut floor, now, Copy::Image(b)),
            Step::Look(1, Look::Both) => {
                let seen = Seen::Both(3, Some("C".into()));
                get.handle_look(&plan, &mut floor, now, seen);
            }
            other => panic!("{other:?}"),
        }
        let Step::Done(Some(value)) = get.poll(&plan, now.0) else { panic!("nothing returned") };
        value
    };
    assert_eq!(returned(None), "C");
    assert_eq!(returned(Some(NoRejoin)), "B", "the mutant goes back behind C");
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
