//! The promises (a) to (f) of the protocol, in every form.

use crate::world::{Counts, Profile, run};
use heatsink::engine::control::copies::Form;

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// What a seed brings: a form, and a subset of what may go wrong.
pub(crate) fn profile_of(seed: u64) -> Profile {
    const FORMS: [Form; 5] =
        [Form::Sandwich, Form::Joint, Form::Pair, Form::DeleteTwice, Form::TtlOnly];
    let mut bits = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mut bit = |one_in: u64| {
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits >> 40).is_multiple_of(one_in)
    };
    let form = FORMS[(seed % 5) as usize];
    let life = bit(2);
    Profile {
        steps: 4_000,
        life,
        copies: 2 + u16::from(bit(2)),
        writers: 2 + usize::from(bit(3)),
        readers: 2 + usize::from(bit(2)),
        deletes: bit(2),
        unknown: bit(2),
        crashes: bit(3),
        give_up: bit(4),
        foreign: bit(3),
        failover: form.versioned() && bit(5),
        copy_failover: form.versioned() && bit(6),
        rollback: life && bit(4),
        unreachable: bit(6),
        jumps: !bit(3),
        long_ttl: bit(4),
        slow: bit(4),
        restless: bit(2),
        quiet: bit(5),
        still: bit(5),
        ..Profile::new(form)
    }
}

#[test]
fn no_promise_is_broken_under_faults() {
    if let Some(seed) = env("HEATSINK_SEED") {
        let counts = run(seed, profile_of(seed)).unwrap_or_else(|wrong| panic!("{wrong}"));
        println!("seed {seed}: {counts:?}");
        return;
    }
    let mut sum = Counts::default();
    for seed in 0..env("HEATSINK_SEEDS").unwrap_or(2_000) {
        let counts = run(seed, profile_of(seed)).unwrap_or_else(|wrong| {
            panic!("{wrong}\nHEATSINK_SEED={seed} cargo test --release --test copies no_promise")
        });
        sum.reads += counts.reads;
        sum.from_copies += counts.from_copies;
        sum.all += counts.all;
        sum.ttl += counts.ttl;
        sum.unknown += counts.unknown;
        sum.fills += counts.fills;
        sum.repairs += counts.repairs;
        sum.lives += counts.lives;
        sum.failovers += counts.failovers;
    }
    println!("{sum:?}");
    // A simulation in which these do not happen proves nothing about them.
    let all = [sum.from_copies, sum.all, sum.ttl, sum.unknown, sum.fills, sum.repairs, sum.lives];
    assert!(all.iter().all(|n| *n > 10) && sum.failovers > 0, "{sum:?}");
}

#[test]
fn the_same_seed_is_the_same_run_and_another_seed_another() {
    let trace = |seed| run(seed, profile_of(seed)).unwrap_or_else(|wrong| panic!("{wrong}")).trace;
    for seed in 0..10 {
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
    }
    assert_ne!(trace(1), trace(6));
}
