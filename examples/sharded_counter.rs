//! The program of the article on hot keys: a like counter that is promoted from one slot to 32.
//!
//! 8 shards, 20,000 likes before the promotion and 180,000 after it, then 100,000 reads within 10
//! seconds. First with the article's own names and choice of slot, where the figures are the
//! article's to the digit; then with heatsink's, which fall evenly on the shards. Between the two
//! halves the fleet learns of the slots in the way it does in production: announce, wait, switch.

use heatsink::store::MemoryStore;
use heatsink::store::memory::Placement;
use heatsink::testing::SimRuntime;
use heatsink::{Counter, Heatsink, Redelivery, Salt, Treatment};
use serde_json::json;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "\
A like counter that is promoted from one slot to 32, on virtual time, in a second or two.
Exit status 1 when a figure is not the article's.

usage: sharded_counter [--json]
  --json   one JSON object on stdout, nothing else
  --help   this text";

const KEY: &str = "post:42:likes";
const SHARDS: usize = 8;
const SLOTS: u32 = 32;
const BEFORE: u64 = 20_000;
const ALL: u64 = 200_000;
const READS: u32 = 100_000;

type Fail = Box<dyn std::error::Error + Send + Sync>;

struct Run {
    rt: SimRuntime,
    store: MemoryStore,
    hs: Heatsink,
    likes: Counter,
}

impl Run {
    fn new(salt: Salt) -> Result<Run, Fail> {
        let rt = SimRuntime::new(42);
        let store = MemoryStore::builder().shards(SHARDS).placement(Placement::Fnv1a);
        let store = store.runtime(rt.clone()).build();
        let hs =
            Heatsink::builder(store.clone()).runtime(rt.clone()).seed(42).salt(salt).build()?;
        let likes = hs.counter(KEY);
        Ok(Run { rt, store, hs, likes })
    }

    fn writes(&self) -> Vec<u64> {
        self.store.counts().iter().map(|shard| shard.writes).collect()
    }

    /// The likes of a range; what each shard had to write for them.
    fn like(&self, range: std::ops::Range<u64>) -> Result<Vec<u64>, Fail> {
        let before = self.writes();
        self.rt.block_on(async {
            for i in range {
                let (id, sent_once) = (format!("like:{i}"), Redelivery::SentOnce);
                self.likes.add_event_with(id, 1, sent_once).await?;
            }
            Ok::<(), heatsink::Error>(())
        })?;
        Ok(self.writes().iter().zip(before).map(|(after, before)| after - before).collect())
    }

    /// Asks for 32 slots, and waits until they are in use. Returns how long that took.
    fn promote(&self) -> Result<Duration, Fail> {
        let began = self.rt.now();
        self.hs.control().pin(KEY, Treatment::Salt { slots: SLOTS })?;
        for _ in 0..1000 {
            self.rt.run_for(Duration::from_millis(10));
            let salting = self.hs.explain(KEY).salting;
            if salting.is_some_and(|s| u32::from(s.slots) == SLOTS && s.in_rotation == 0) {
                return Ok(self.rt.now().since(began));
            }
        }
        Err(format!("not promoted: {}", self.hs.explain(KEY)).into())
    }

    /// 100,000 reads of the sum, spread over 10 seconds; the reads of slots that they cost.
    fn read(&self) -> Result<u64, Fail> {
        let names: Vec<String> = (0..SLOTS).map(|i| format!("{KEY}#{i}")).collect();
        let slot_reads = || names.iter().map(|n| self.store.reads_of(n.as_str())).sum::<u64>();
        let before = slot_reads();
        for _ in 0..READS {
            self.rt.block_on(self.likes.sum())?;
            self.rt.run_for(Duration::from_micros(100));
        }
        Ok(slot_reads() - before)
    }

    fn count(&self) -> Result<i64, Fail> {
        self.rt.run_for(Duration::from_secs(50));
        Ok(self.rt.block_on(self.likes.sum())?.total())
    }
}

fn run(json: bool) -> Result<ExitCode, Fail> {
    let article = Run::new(Salt::new().parity())?;
    let one_slot = article.like(0..BEFORE)?;
    let took = article.promote()?;
    let slots_32 = article.like(BEFORE..ALL)?;
    let slot_reads = article.read()?;
    let count = article.count()?;

    let own = Run::new(Salt::new())?;
    own.like(0..BEFORE)?;
    own.promote()?;
    let spread = own.like(BEFORE..ALL)?;
    let mean = spread.iter().sum::<u64>() as f64 / SHARDS as f64;
    let busiest = spread.iter().copied().max().unwrap_or(0) as f64 / mean;
    let own_count = own.count()?;

    if json {
        let figures = json!({
            "one_slot": one_slot,
            "slots_32": slots_32,
            "slot_reads": slot_reads,
            "count": count,
            "default_busiest_over_mean": busiest,
        });
        println!("{figures}");
    } else {
        println!("1 slot: writes per shard {one_slot:?}");
        println!("promoted in {:.1} s; {}", took.as_secs_f64(), article.hs.explain(KEY));
        println!("32 slots: writes per shard {slots_32:?}");
        println!("{READS} reads cost {slot_reads} slot reads");
        println!("count = {count}");
        println!("heatsink's own names: writes per shard {spread:?}, busiest / mean {busiest:.3}");
    }
    let right = one_slot == [20_000, 0, 0, 0, 0, 0, 0, 0]
        && slots_32 == [28_098, 22_478, 22_552, 28_131, 16_839, 22_545, 22_484, 16_873]
        && slot_reads == 320
        && (count, own_count) == (200_000, 200_000)
        && busiest <= 1.10;
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    let mut json = false;
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--json" => json = true,
            "--help" => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            other => {
                eprintln!("sharded_counter: unknown argument {other:?}\n\n{HELP}");
                return ExitCode::from(2);
            }
        }
    }
    run(json).unwrap_or_else(|error| {
        eprintln!("sharded_counter: {error}");
        ExitCode::FAILURE
    })
}
