//! Twenty thousand processes that each load one key once a second.

use bytes::Bytes;
use heatsink::engine::control::copies::read::{Copy, Floor, Get, Step};
use heatsink::engine::control::copies::size::{Demand, place, size};
use heatsink::engine::control::copies::snapshot::{Look, Seen};
use heatsink::engine::control::copies::{Form, Image, Plan, Set};
use heatsink::engine::control::treat::Ceiling;
use heatsink::engine::time::Tick;
use heatsink::key::cluster_slot;
use heatsink::store::MemoryStore;
use heatsink::testing::SimRuntime;
use heatsink::{Detect, Heatsink, NearCache};
use std::time::Duration;

const PROCESSES: usize = 20_000;
const SHARDS: u32 = 16;
const CEILING: f64 = 3_000.0;
const SECOND: u64 = 1_000_000_000;

fn shard_of(name: &str) -> u32 {
    u32::from(cluster_slot(name.as_bytes())) * SHARDS / 16_384
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Loads a second on each shard, in each of `seconds`, once the processes have joined.
fn loads(set: Option<Set>, name: impl Fn(u64, u16) -> String, seconds: u64) -> Vec<Vec<u64>> {
    let plan = Plan::new(Form::Joint, Duration::from_secs(1), Duration::from_secs(10));
    let image = Image::new(1, Some(Bytes::from("value")), Tick(1));
    let mut floors = vec![Floor::new(); PROCESSES];
    floors.iter_mut().for_each(|floor| floor.learn(&plan, set, Tick(0)));
    let mut per_second = vec![vec![0; SHARDS as usize]; seconds as usize];
    for second in 0..seconds {
        for (p, floor) in floors.iter_mut().enumerate() {
            // Each at its own phase of the second.
            let now = Tick(1 + second * SECOND + mix(p as u64) % SECOND);
            let mut get = Get::new(floor, set, now, mix(p as u64 ^ second << 32));
            loop {
                let at = match get.poll(&plan, now) {
                    Step::Done(_) | Step::Failed => break,
                    Step::Copy(generation, i) => {
                        get.handle_copy(&plan, floor, (now, set), Copy::Image(image.clone()));
                        shard_of(&name(generation, i))
                    }
                    Step::Look(_, look) => {
                        assert_eq!(look, Look::Both);
                        let seen = Seen::Both(1, image.bytes.clone());
                        get.handle_look(&plan, floor, (now, set), seen);
                        shard_of("post:9")
                    }
                    Step::Plain => {
                        per_second[second as usize][shard_of("post:9") as usize] += 1;
                        break;
                    }
                };
                per_second[second as usize][at as usize] += 1;
            }
        }
    }
    per_second
}

fn hottest(per_second: &[Vec<u64>]) -> u64 {
    per_second.iter().flatten().copied().max().unwrap()
}

#[test]
fn no_shard_is_above_its_ceiling_under_twenty_thousand_processes() {
    let sizing = size(&Demand {
        reads_per_sec: 2e6,
        writes_per_sec: 1.0,
        processes: PROCESSES as u32,
        near_ttl: Some(Duration::from_secs(1)),
        ceiling_per_sec: CEILING,
        target_permille: 800,
        copy_ttl: Duration::from_secs(14),
        load_time: Duration::from_millis(5),
    })
    .unwrap();
    let name = |generation: u64, i: u16| {
        format!("{{hs:{:016x}}}c{i}:post:9", mix(generation ^ (u64::from(i) + 1)))
    };
    let mut state = 1;
    let draw = || {
        state += 1;
        mix(state)
    };
    let placed = place(sizing.copies, shard_of("post:9"), |g, i| shard_of(&name(g, i)), draw);
    assert_eq!((placed.busiest, placed.on_base), (1, 0), "on distinct shards, none on the base's");
    let n = sizing.copies;
    let set = Set { generation: placed.generation, writers: n, readers: n };
    let bare = hottest(&loads(None, name, 3));
    let with = loads(Some(set), name, 11);
    // In the first second each process joins, by one look at the base.
    let steady = hottest(&with[1..]);
    println!("{sizing}\nhottest shard: {bare}/s bare, {steady}/s with copies");
    assert_eq!(bare, PROCESSES as u64);
    assert!(steady as f64 <= CEILING, "{steady}/s on one shard");
}

#[test]
fn explain_prints_the_arithmetic() {
    let rt = SimRuntime::new(1);
    let store = MemoryStore::builder().shards(16).runtime(rt.clone()).build();
    store.put_now("post:9", "value").unwrap();
    let detect = Detect::new().ceiling(Ceiling::DYNAMODB).processes(PROCESSES as u32);
    let hs = Heatsink::builder(store)
        .runtime(rt.clone())
        .near(NearCache::new())
        .detect(detect)
        .seed(1)
        .build()
        .unwrap();
    for _ in 0..3_000 {
        rt.block_on(hs.get("post:9")).unwrap();
        rt.run_for(Duration::from_millis(1));
    }
    let told = hs.explain("post:9").to_string();
    let sum = "20000 processes ÷ 1 s = 20000 reads/s behind the near caches; 9 copies = ⌈20000 ÷ \
               (0.8 × 3000 − 0)⌉: 2222/s on the shard of each";
    assert!(told.contains(sum), "{told}");
}
