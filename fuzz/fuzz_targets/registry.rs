//! Random bytes, and values that were right until something happened to them, into everything
//! that reads the registry: no panic; what is read is within its bounds, writes back as it was
//! read, and is what `encode` writes.
//!
//! `cargo run --release --bin registry -- [VALUES]` tries that many values (default 200,000) and
//! prints the seed and the value that fails.

use heatsink::Key;
use heatsink::engine::control::registry::{
    KEY_BYTES_MAX, LISTED_MAX, List, RECORD_BYTES_MAX, Record, Root, Stamp,
};
use heatsink::engine::control::salt::{DRAIN_MAX, GRAVES_MAX, Kind, SLOTS_MAX, Salt};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// What a value may be made of.
const WORDS: [&str; 22] = [
    "hsr1", "hsl1", "hst1", " ", "\n", "=", "salt", "copies", "/", ".", ",", "!", "?", "s", "h",
    "p", "x", "0", "1", "-9223372036854775808", "18446744073709551615", "0123456789abcdef",
];

fn kind(rng: &mut Xoshiro256PlusPlus) -> Kind {
    [Kind::Home, Kind::Slots, Kind::Parity][rng.next_u64() as usize % 3]
}

/// A counter after some changes, whichever of them are allowed.
fn salt(rng: &mut Xoshiro256PlusPlus) -> Salt {
    let mut salt = Salt::new(rng.next_u64().is_multiple_of(4));
    for _ in 0..rng.next_u64() % 12 {
        let (k, seed) = (rng.next_u64() as u16 % 1100, rng.next_u64() as u32);
        let (total, sealed) = (rng.next_u64() as i64 >> 3, k.is_multiple_of(2));
        let old = salt.older().next().map_or(0, |g| g.id);
        let next = match rng.next_u64() % 7 {
            0 | 1 => salt.announced(k, kind(rng), seed, sealed),
            2 => salt.switched(),
            3 => salt.drain.first().and_then(|g| salt.retired(g.id, total, sealed)),
            4 => salt.replaced(total),
            5 => salt.swept(old, total),
            _ => salt.forgotten(old),
        };
        salt = next.map_or(salt.clone(), |next| next.marked(&salt, seed));
    }
    salt
}

fn record(rng: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let text = salt(rng).encode();
    let mut record = Record::first(rng.next_u64()).with(rng.next_u64(), "salt", Some(&text));
    if rng.next_u64().is_multiple_of(2) {
        record = record.with(rng.next_u64(), "copies", Some("1.2.3"));
    }
    record.encode().map(String::into_bytes).unwrap_or_default()
}

fn list(rng: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let mut list = List::default();
    for _ in 0..rng.next_u64() % 5 {
        let mut key = vec![0; rng.next_u64() as usize % 40];
        key.iter_mut().for_each(|b| *b = rng.next_u64() as u8);
        let stamp = Stamp { version: rng.next_u64(), nonce: rng.next_u64() };
        list = list.with(rng.next_u64(), &Key::from(key), stamp, 64).unwrap_or(list);
    }
    list.encode()
}

fn value(rng: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let mut value = match rng.next_u64() % 6 {
        0 => return (0..rng.next_u64() % 64).map(|_| rng.next_u64() as u8).collect(),
        1 => {
            let n = rng.next_u64() % 24;
            let word = |_| WORDS[rng.next_u64() as usize % WORDS.len()];
            return (0..n).map(word).collect::<String>().into_bytes();
        }
        2 => list(rng),
        3 => Root { version: rng.next_u64(), nonce: rng.next_u64() }.encode().into_bytes(),
        _ => record(rng),
    };
    for _ in 0..rng.next_u64() % 4 {
        if value.is_empty() {
            break;
        }
        let at = rng.next_u64() as usize % value.len();
        match rng.next_u64() % 4 {
            0 => value[at] = rng.next_u64() as u8,
            // A digit for a digit: numbers that are as good as the right ones.
            1 => value[at] = b'0' + (rng.next_u64() % 10) as u8,
            2 => drop(value.remove(at)),
            _ => value.truncate(at),
        }
    }
    value
}

/// Whether the salted counter that a record tells of is one that may be.
fn is_sane(salt: &Salt) -> bool {
    let slots = salt.read_set().count();
    salt.drain.len() <= DRAIN_MAX
        && salt.graves.len() <= GRAVES_MAX
        && slots <= usize::from(SLOTS_MAX) * (DRAIN_MAX + 2) + 1
        && Salt::parse(&salt.encode()).as_ref() == Some(salt)
}

/// How many of the readers took it.
fn read(value: &[u8]) -> Result<u64, &'static str> {
    let mut taken = 0;
    if let Some(record) = Record::parse(value) {
        taken += 1;
        let text = record.encode().ok_or("a record that was read is not written")?;
        if text.len() > RECORD_BYTES_MAX || Record::parse(text.as_bytes()) != Some(record.clone()) {
            return Err("a record reads back otherwise");
        }
        let salt = record.part("salt").and_then(Salt::parse);
        if salt.is_some_and(|salt| !is_sane(&salt)) {
            return Err("a counter beyond its bounds");
        }
    }
    if let Some(list) = List::parse(value) {
        taken += 1;
        let bounded = list.len() <= LISTED_MAX && list.keys().all(|key| key.len() <= KEY_BYTES_MAX);
        if !bounded || List::parse(&list.encode()) != Some(list) {
            return Err("a list reads back otherwise, or is beyond its bounds");
        }
    }
    if let Some(root) = Root::parse(value) {
        taken += 1;
        if Root::parse(root.encode().as_bytes()) != Some(root) {
            return Err("a root reads back otherwise");
        }
    }
    Ok(taken)
}

fn main() {
    let values = std::env::args().nth(1).map_or(200_000, |n| n.parse().expect("a number"));
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..values / 1_000 + 1 {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        for _ in 0..1_000 {
            let value = value(&mut rng);
            match read(&value) {
                Ok(0) => refused += 1,
                Ok(n) => taken += n,
                Err(wrong) => panic!("seed {seed}: {wrong}: {}", value.escape_ascii()),
            }
        }
    }
    assert!(taken > 0 && refused > 0);
    println!("registry: {taken} values read, {refused} refused, no panic");
}
