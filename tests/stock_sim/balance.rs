//! Balances under crashes and lost replies: every credit and debit counts once, the main account is
//! never below its floor, and at rest the balance is exact to the unit.

use crate::fleet::{Fleet, MS, Process, add, get, seeds};
use heatsink::engine::control::stock::Mutant;
use heatsink::store::MemoryStore;
use heatsink::{Balance, Debited, Heatsink, Key};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Default, Debug)]
struct Seen {
    credits: AtomicU64,
    debits: AtomicU64,
    short: AtomicU64,
    unknown: AtomicU64,
    reversed: AtomicU64,
    swept: AtomicU64,
    deaths: AtomicU64,
}

/// What is known of a debit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// Asked for; made or not.
    Maybe,
    Made,
    /// Refused, for good.
    Not,
    /// Its reversal was asked for; reversed or not.
    Going,
    Reversed,
}

#[derive(Default)]
struct Books {
    credits: BTreeMap<String, u64>,
    debits: BTreeMap<String, (u64, Fate)>,
    /// The sum of all credits, and that of the debits that are known to be made.
    credited: u64,
    made: u64,
}

impl Books {
    fn credit(&mut self, id: &str, amount: u64) {
        self.credited += amount;
        self.credits.insert(id.into(), amount);
    }

    fn debit(&mut self, id: &str, amount: u64, fate: Fate) {
        let counts = |fate: Fate| if fate == Fate::Made { amount } else { 0 };
        let before = self.debits.insert(id.into(), (amount, fate));
        self.made += counts(fate);
        self.made -= before.map_or(0, |(_, fate)| counts(fate));
    }
}

struct World {
    fleet: Arc<Fleet>,
    opening: i64,
    floor: i64,
    stripes: usize,
    mutant: Option<Mutant>,
    books: Mutex<Books>,
    /// The main account and the stripes.
    rows: Mutex<Vec<Key>>,
    seen: Seen,
}

impl World {
    fn handle(&self, process: &Process) -> Balance {
        let balance = process.hs.balance("wallet").unwrap();
        if let Some(mutant) = self.mutant {
            balance.break_by(mutant);
        }
        balance
    }

    fn process(self: &Arc<Self>) -> Process {
        let process = self.fleet.spawn();
        let balance = self.handle(&process);
        for _ in 0..1 + self.fleet.rt.draw(4) {
            let (world, balance, rt) = (self.clone(), balance.clone(), process.rt.clone());
            process.rt.spawn(async move {
                while world.fleet.more() {
                    match world.fleet.rt.draw(12) {
                        0..5 => world.credit(&balance).await,
                        5..11 => world.debit(&balance).await,
                        _ => add(&world.seen.swept, balance.sweep().await.unwrap_or(0)),
                    }
                    rt.sleep(MS * world.fleet.rt.draw(20) as u32).await;
                }
            });
        }
        process
    }

    fn id(&self, kind: &str) -> String {
        format!("{kind}{}", self.fleet.next_id.fetch_add(1, Ordering::Relaxed))
    }

    async fn credit(&self, balance: &Balance) {
        let (id, amount) = (self.id("c"), 1 + self.fleet.rt.draw(9));
        self.books.lock().unwrap().credit(&id, amount);
        // Whatever comes of it, the same id is asked again in the end.
        for _ in 0..1 + self.fleet.rt.draw(2) {
            match balance.credit(amount, &id).await {
                Ok(_) => add(&self.seen.credits, 1),
                Err(_) => add(&self.seen.unknown, 1),
            }
        }
    }

    async fn debit(&self, balance: &Balance) {
        let (id, amount) = (self.id("d"), 1 + self.fleet.rt.draw(14));
        let note = |fate| self.books.lock().unwrap().debit(&id, amount, fate);
        note(Fate::Maybe);
        match balance.debit(amount, &id).await {
            Ok(Debited::Made) => {
                note(Fate::Made);
                add(&self.seen.debits, 1);
            }
            Ok(Debited::Short { balance }) => {
                note(Fate::Not);
                add(&self.seen.short, 1);
                if balance - self.floor >= amount as i64 {
                    self.fleet.fail(format!("{id} of {amount} was refused with {balance}"));
                }
            }
            Ok(Debited::Ended) => {
                note(Fate::Not);
                if !self.fleet.disturbed() {
                    self.fleet.fail(format!("{id} was never ended"));
                }
            }
            Err(_) => return add(&self.seen.unknown, 1),
        }
        if self.books.lock().unwrap().debits[&id].1 == Fate::Made && self.fleet.rt.draw(4) == 0 {
            note(Fate::Going);
            for _ in 0..1 + self.fleet.rt.draw(2) {
                match balance.reverse(&id).await {
                    Ok(true) => {
                        note(Fate::Reversed);
                        add(&self.seen.reversed, 1);
                    }
                    Ok(false) => self.fleet.fail(format!("{id} was made and is not reversed")),
                    Err(_) => {}
                }
            }
        }
    }

    /// What the rows hold, above the floor; the main account first.
    fn levels(&self) -> Vec<i64> {
        let level = |key: &Key| {
            let bytes = self.fleet.store.get_now(key.clone()).map(|s| s.bytes);
            bytes.map_or(0, |b| std::str::from_utf8(&b).unwrap().parse().unwrap())
        };
        self.rows.lock().unwrap().iter().map(level).collect()
    }

    fn check(&self) {
        let levels = self.levels();
        if levels.iter().any(|level| *level < 0) {
            self.fleet.fail(format!("below the floor: {levels:?}"));
        }
        let books = self.books.lock().unwrap();
        let most = self.opening - self.floor + books.credited as i64 - books.made as i64;
        if levels.iter().sum::<i64>() > most {
            self.fleet.fail(format!("{levels:?} in the rows, {most} at most"));
        }
    }

    fn open(self: &Arc<Self>) {
        let world = self.clone();
        self.fleet.alone(|hs| async move {
            let balance = hs.balance("wallet").unwrap();
            assert!(balance.open(world.opening, world.floor, world.stripes).await.unwrap());
            assert!(!balance.open(7, 0, 3).await.unwrap(), "an account is opened once");
            assert_eq!(balance.total().await.unwrap().total(), world.opening);
        });
        let rows = self.fleet.store.snapshot().into_keys();
        let mut rows: Vec<Key> = rows.filter(|key| key.to_string().contains("}stripe.")).collect();
        rows.sort_by_key(|key| !key.to_string().contains(".0:"));
        assert_eq!(rows.len(), self.stripes + 1);
        *self.rows.lock().unwrap() = rows;
        self.fleet.arm();
    }

    /// At rest: what nobody knew is asked again under the same id, and the sum is exact.
    fn close(self: &Arc<Self>) {
        let world = self.clone();
        self.fleet.alone(|hs| async move {
            let balance = hs.balance("wallet").unwrap();
            let (credits, debits) = {
                let books = world.books.lock().unwrap();
                (books.credits.clone(), books.debits.clone())
            };
            let mut want = world.opening;
            for (id, amount) in &credits {
                balance.credit(*amount, id).await.unwrap();
                want += *amount as i64;
            }
            let before: i64 = world.levels().iter().sum::<i64>() + world.floor;
            for (id, (amount, fate)) in &debits {
                let made = match fate {
                    Fate::Made => true,
                    Fate::Not | Fate::Reversed => false,
                    Fate::Maybe => balance.debit(*amount, id).await.unwrap() == Debited::Made,
                    Fate::Going => {
                        assert!(balance.reverse(id).await.unwrap());
                        false
                    }
                };
                want -= if made { *amount as i64 } else { 0 };
            }
            let total = balance.total().await.unwrap().total();
            if total != want {
                world.fleet.fail(format!("{total}, not {want}; {before} before; {debits:?}"));
            }
            let above = (total - world.floor) as u64;
            if above > 0 && balance.debit(above, "all").await.unwrap() != Debited::Made {
                world.fleet.fail(format!("{above} are there"));
            }
            let short = Debited::Short { balance: world.floor };
            if balance.debit(1, "more").await.unwrap() != short {
                world.fleet.fail("nothing is left above the floor".into());
            }
            balance.credit(1, "and again").await.unwrap();
            if balance.debit(1, "more").await.unwrap() != Debited::Made {
                world.fleet.fail("a refused debit may be asked for again".into());
            }
        });
    }
}

fn run(seed: u64, mutant: Option<Mutant>) -> Result<Arc<World>, String> {
    let fleet = Fleet::new(seed, 200);
    let floor = -(fleet.rt.draw(30) as i64);
    let world = Arc::new(World {
        opening: floor + fleet.rt.draw(40) as i64,
        floor,
        stripes: [1, 2, 4, 8][fleet.rt.draw(4) as usize],
        mutant,
        books: Mutex::default(),
        rows: Mutex::default(),
        seen: Seen::default(),
        fleet,
    });
    world.open();
    if !world.fleet.failed() {
        world.fleet.storm(&|| world.process(), &|| world.check());
    }
    if !world.fleet.failed() {
        world.close();
    }
    world.fleet.verdict(seed, "balance")?;
    Ok(world)
}

#[test]
fn every_credit_and_debit_counts_once_and_never_below_the_floor() {
    let sum = Seen::default();
    for seed in seeds(60) {
        let world = run(seed, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        add(&world.seen.deaths, get(&world.fleet.deaths));
        let (to, from) = (&sum, &world.seen);
        for (to, from) in [
            (&to.credits, &from.credits),
            (&to.debits, &from.debits),
            (&to.short, &from.short),
            (&to.unknown, &from.unknown),
            (&to.reversed, &from.reversed),
            (&to.swept, &from.swept),
            (&to.deaths, &from.deaths),
        ] {
            add(to, get(from));
        }
    }
    println!("{sum:?}");
    if seeds(60).count() > 20 {
        // A simulation in which these do not happen proves nothing about them.
        let all = [&sum.credits, &sum.debits, &sum.short, &sum.unknown, &sum.reversed, &sum.swept];
        assert!(all.iter().chain(&[&sum.deaths]).all(|n| get(n) > 0), "{sum:?}");
    }
}

#[test]
fn each_way_to_get_a_balance_wrong_is_caught() {
    // The search in `engine/data/debit` visits what a debit alone can get wrong.
    for mutant in [Mutant::CreditsElsewhere, Mutant::PutsFirst] {
        let caught = (0..60).filter(|seed| run(*seed, Some(mutant)).is_err()).count();
        println!("{mutant:?}: caught in {caught} of 60 seeds");
        assert!(caught > 0, "{mutant:?}");
    }
}

/// The main account is nearly full. What does not fit stays on its stripe, and moves when it fits.
#[test]
fn a_credit_that_the_main_account_has_no_room_for_waits_on_its_stripe() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let hs = Heatsink::new(MemoryStore::new(4)).unwrap();
        let vault = hs.balance("vault").unwrap();
        vault.open(i64::MAX - 10, 0, 1).await.unwrap();
        vault.credit(25, "credit").await.unwrap();
        for _ in 0..3 {
            assert_eq!(vault.sweep().await.unwrap(), 0);
        }
        assert_eq!(vault.debit(20, "small").await.unwrap(), Debited::Made);
        assert_eq!(vault.total().await.unwrap().total(), i64::MAX - 5);
        // More than the main account had: the credit has to be moved.
        let all = (i64::MAX - 5).unsigned_abs();
        assert_eq!(vault.debit(all, "large").await.unwrap(), Debited::Made);
        assert_eq!(vault.total().await.unwrap().total(), 0);
    });
}
