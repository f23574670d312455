//! Random lines, and lines that were right until something happened to them, into both ends of
//! the feed: no panic, and nothing in force beyond a receiver's caps.
//!
//! `cargo run --release --bin frames -- [LINES]` tries that many lines (default 200,000) and
//! prints the seed and the line that fails.

use heatsink::Key;
use heatsink::engine::control::follow::{Caps, Follower};
use heatsink::engine::time::Tick;
use heatsink::feed::{self, FleetKey, FleetList};
use heatsink::{Rule, Treatment};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use std::time::Duration;

const WALL: u64 = 1_800_000_000_000;

/// What a line may be made of.
const WORDS: [&str; 29] = [
    "{\"lease\":[",
    "{\"stands\":[1,2,3,4]}",
    "{\"quiet\":[1,2,3,4]}",
    "{\"ordered\":9}",
    "]}",
    "{\"list\":",
    "{\"beat\":",
    "{\"report\":",
    "{\"hello\":",
    "{\"nack\":",
    "{",
    "}",
    "[",
    "]",
    "\"entries\":",
    "\"key\":",
    "\"hex\":",
    "\"issuer\":",
    "\"incarnation\":",
    "\"version\":",
    "\"ttl_ms\":",
    "18446744073709551615",
    "-1",
    "1e999",
    "null",
    "\"ff\"",
    ",",
    "\"near\"",
    "65535",
];

fn right(rng: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let mut list = FleetList::default();
    list.issuer = 1;
    list.edition.incarnation = WALL - rng.next_u64() % 1_000;
    list.edition.version = rng.next_u64() % 8;
    list.ttl = Duration::from_millis(rng.next_u64() % 9_000);
    list.sent_ms = WALL;
    for i in 0..rng.next_u64() % 6 {
        let treatment = match rng.next_u64() % 3 {
            0 => Treatment::Salt { slots: rng.next_u64() as u32 % 70_000 },
            1 => Treatment::Copies { copies: rng.next_u64() as u32 % 300 },
            _ => Treatment::Near,
        };
        let mut bytes = vec![0; rng.next_u64() as usize % 1_100];
        bytes.iter_mut().for_each(|b| *b = rng.next_u64() as u8);
        bytes.push(i as u8);
        list.entries.push(FleetKey::named(Key::from(bytes), Rule::Detected, treatment));
    }
    feed::write_line(&list)
}

fn line(rng: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    match rng.next_u64() % 4 {
        0 => (0..rng.next_u64() % 64).map(|_| rng.next_u64() as u8).collect(),
        1 => {
            let n = rng.next_u64() % 24;
            let word = |_| WORDS[rng.next_u64() as usize % WORDS.len()];
            (0..n).map(word).collect::<String>().into_bytes()
        }
        n => {
            let mut line = right(rng);
            for _ in 0..(n - 2) * (rng.next_u64() % 6) {
                // An edit may have taken the last byte.
                if line.is_empty() {
                    break;
                }
                let at = rng.next_u64() as usize % line.len();
                match rng.next_u64() % 3 {
                    0 => line[at] = rng.next_u64() as u8,
                    1 => drop(line.remove(at)),
                    _ => line.truncate(at.max(1)),
                }
            }
            line
        }
    }
}

fn main() {
    let lines = std::env::args().nth(1).map_or(200_000, |n| n.parse().expect("a number of lines"));
    let caps = Caps::default();
    let (mut applied, mut refused) = (0, 0);
    for seed in 0..lines / 1_000 + 1 {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut follower = Follower::new(caps);
        for step in 0..1_000_u64 {
            let line = line(&mut rng);
            let now = Tick(1_000_000_000 * (1 + step));
            let Ok(Some(list)) = feed::read_line(&line) else {
                refused += 1;
                continue;
            };
            match follower.handle_list(now, WALL, list) {
                Ok(_) => applied += 1,
                Err(_) => refused += 1,
            }
            let Some(list) = follower.list() else { continue };
            let until = follower.poll_timeout().expect("it is in force");
            let sane = list.entries.len() <= caps.entries_max
                && list.entries.iter().all(|e| e.key.len() <= caps.key_bytes_max)
                && list.entries.iter().all(|e| match e.treatment {
                    Some(Treatment::Salt { slots }) => slots <= caps.parts_max,
                    Some(Treatment::Copies { copies }) => copies <= caps.parts_max,
                    _ => true,
                })
                && until > now
                && until <= now.after(caps.ttl_max);
            assert!(sane, "seed {seed}, step {step}: {}", line.escape_ascii());
        }
    }
    assert!(applied > 0 && refused > 0);
    println!("frames: {applied} lists applied, {refused} lines refused, no panic");
}
