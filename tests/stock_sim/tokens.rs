//! Tokens under crashes and lost replies: minted once, each with one hold at a time, used once.

use crate::fleet::{Fleet, MS, Process, add, get, seeds};
use heatsink::engine::control::stock::Mutant;
use heatsink::{Fate, Outcome, Popping, Tokens};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Default, Debug)]
struct Seen {
    popped: AtomicU64,
    none_left: AtomicU64,
    unknown: AtomicU64,
    resolved: AtomicU64,
    put_back: AtomicU64,
    deaths: AtomicU64,
}

struct World {
    fleet: Arc<Fleet>,
    tokens: u64,
    lists: usize,
    mutant: Option<Mutant>,
    /// Which hold is known to have which token, unless it has begun to put it back.
    owners: Mutex<BTreeMap<u64, String>>,
    used: Mutex<BTreeSet<u64>>,
    seen: Seen,
}

impl World {
    fn handle(&self, process: &Process) -> Tokens {
        let tokens = process.hs.tokens("hall").unwrap();
        if let Some(mutant) = self.mutant {
            tokens.break_by(mutant);
        }
        tokens
    }

    fn process(self: &Arc<Self>) -> Process {
        let process = self.fleet.spawn();
        let tokens = self.handle(&process);
        for _ in 0..1 + self.fleet.rt.draw(4) {
            let (world, tokens, rt) = (self.clone(), tokens.clone(), process.rt.clone());
            process.rt.spawn(async move {
                while world.fleet.more() {
                    world.buy(&tokens).await;
                    rt.sleep(MS * world.fleet.rt.draw(20) as u32).await;
                }
            });
        }
        process
    }

    fn got(&self, number: u64, hold: &str) {
        let mut owners = self.owners.lock().unwrap();
        match owners.insert(number, hold.into()) {
            Some(other) if other != hold => {
                self.fleet.fail(format!("{other} has token {number}, and {hold} is given it"));
            }
            _ if number >= self.tokens => self.fleet.fail(format!("{number} was never minted")),
            _ => {}
        }
    }

    async fn buy(&self, tokens: &Tokens) {
        let rt = &self.fleet.rt;
        let hold = format!("h{}", self.fleet.next_id.fetch_add(1, Ordering::Relaxed));
        let mut asked = 0;
        let token = loop {
            match tokens.pop(&hold).await {
                Ok(Popping::Token(token)) => {
                    add(&self.seen.resolved, u64::from(asked > 0));
                    break token;
                }
                Ok(Popping::NoneLeft) => return add(&self.seen.none_left, 1),
                Ok(Popping::Ended) if self.fleet.disturbed() => return,
                Ok(Popping::Ended) => return self.fleet.fail(format!("{hold} was never ended")),
                Err(e) if e.outcome() == Outcome::Unknown && asked < 3 => {
                    add(&self.seen.unknown, 1);
                    asked += 1;
                    if rt.draw(4) == 0 {
                        return;
                    }
                }
                Err(_) => return,
            }
        };
        add(&self.seen.popped, 1);
        self.got(token.number(), &hold);
        if rt.draw(6) == 0 {
            match tokens.pop(&hold).await {
                Ok(Popping::Token(again)) if again.number() == token.number() => {}
                Err(_) => {}
                other => self.fleet.fail(format!("{hold} has {token:?} and is told {other:?}")),
            }
        }
        match rt.draw(10) {
            0..4 => {
                let confirmed = token.confirm().await.is_ok();
                if confirmed {
                    self.used.lock().unwrap().insert(token.number());
                }
            }
            4..8 => {
                self.owners.lock().unwrap().remove(&token.number());
                for _ in 0..1 + rt.draw(3) {
                    add(&self.seen.put_back, u64::from(token.put_back().await.is_ok()));
                }
            }
            // Abandoned.
            _ => {}
        }
    }

    /// Minted by several at a time, some of which die, while faults strike.
    fn open(self: &Arc<Self>) {
        let mut all: Vec<Process> = (0..2).map(|_| self.fleet.spawn()).collect();
        for process in &all {
            let (world, tokens) = (self.clone(), self.handle(process));
            process.rt.spawn(async move { drop(tokens.mint(world.tokens, world.lists).await) });
        }
        self.fleet.arm();
        let until = self.fleet.rt.now().after(MS * self.fleet.rt.draw(400) as u32);
        self.fleet.drive(&mut all, until, &|| {});
        all.drain(..).for_each(|p| p.rt.shutdown());
        let world = self.clone();
        self.fleet.alone(|hs| async move {
            let tokens = hs.tokens("hall").unwrap();
            for _ in 0..100 {
                if tokens.mint(world.tokens, world.lists).await.is_ok() {
                    return;
                }
            }
            world.fleet.fail("they could not be minted".into());
        });
    }

    /// At rest every token is in one place, and all of them can be used up.
    fn close(self: &Arc<Self>) {
        let world = self.clone();
        self.fleet.alone(|hs| async move {
            let tokens = hs.tokens("hall").unwrap();
            let fail = |text| world.fleet.fail(text);
            let mut job = tokens.reconciler();
            let books = job.pass(|_| Fate::Keep).await.unwrap();
            if !books.balance() || books.in_transit + books.doubled > 0 {
                fail(format!("{books}"));
            }
            if books.initial != world.tokens {
                fail(format!("{} were minted: {books}", world.tokens));
            }
            let after = job.pass(|_| Fate::Back).await.unwrap();
            if after.held > 0 || after.free + after.sold != world.tokens {
                fail(format!("after all was put back: {after}"));
            }
            let mut rest = BTreeSet::new();
            for n in 0..after.free {
                match tokens.pop(format!("last{n}")).await.unwrap() {
                    Popping::Token(token) => drop(rest.insert(token.number())),
                    other => return fail(format!("{n} of {}: {other:?}", after.free)),
                }
            }
            let used = world.used.lock().unwrap().clone();
            if rest.len() as u64 != after.free || !rest.is_disjoint(&used) {
                fail(format!("{} different tokens of {after}; used: {used:?}", rest.len()));
            }
            if !matches!(tokens.pop("nobody").await.unwrap(), Popping::NoneLeft) {
                fail("nothing is left".into());
            }
        });
    }
}

fn run(seed: u64, mutant: Option<Mutant>) -> Result<Arc<World>, String> {
    let fleet = Fleet::new(seed, 200);
    let world = Arc::new(World {
        tokens: 5 + fleet.rt.draw(80),
        lists: [1, 2, 3, 8][fleet.rt.draw(4) as usize],
        mutant,
        owners: Mutex::default(),
        used: Mutex::default(),
        seen: Seen::default(),
        fleet,
    });
    world.open();
    if !world.fleet.failed() {
        world.fleet.storm(&|| world.process(), &|| {});
    }
    if !world.fleet.failed() {
        world.close();
    }
    world.fleet.verdict(seed, "tokens")?;
    Ok(world)
}

#[test]
fn every_token_has_one_holder_and_is_used_once() {
    let sum = Seen::default();
    for seed in seeds(60) {
        let world = run(seed, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        add(&world.seen.deaths, get(&world.fleet.deaths));
        let (to, from) = (&sum, &world.seen);
        for (to, from) in [
            (&to.popped, &from.popped),
            (&to.none_left, &from.none_left),
            (&to.unknown, &from.unknown),
            (&to.resolved, &from.resolved),
            (&to.put_back, &from.put_back),
            (&to.deaths, &from.deaths),
        ] {
            add(to, get(from));
        }
    }
    println!("{sum:?}");
    if seeds(60).count() > 20 {
        // A simulation in which these do not happen proves nothing about them.
        let all = [&sum.popped, &sum.none_left, &sum.unknown, &sum.resolved, &sum.put_back];
        assert!(all.iter().chain(&[&sum.deaths]).all(|n| get(n) > 0), "{sum:?}");
    }
}

#[test]
fn a_hold_that_asks_the_next_list_in_doubt_is_caught() {
    let caught = AtomicBool::new(false);
    for seed in 0..60 {
        caught.fetch_or(run(seed, Some(Mutant::ProbesOn)).is_err(), Ordering::Relaxed);
    }
    assert!(caught.load(Ordering::Relaxed));
}
