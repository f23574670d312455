//! Tokens and balances on a real server: processes that are killed in the middle, and books that
//! are exact after it.

use crate::servers::cluster::until;
use crate::servers::{Control, Server, run};
use heatsink::store::RedisStore;
use heatsink::{Balance, Debited, Fate, Heatsink, Popping, Tokens};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const CHILD: &str = "HEATSINK_TEST_POOL_AT";
const TOKENS_TEST: &str = "pools::processes_are_killed_and_every_token_is_in_one_place";
const BALANCE_TEST: &str = "pools::processes_are_killed_and_the_balance_is_exact_to_the_cent";
const PROCESSES: usize = 4;
/// Tasks of one process.
const TASKS: usize = 8;

const TOKENS: u64 = 3_000;
const OPENING: i64 = 500;
const FLOOR: i64 = -200;
/// Credits and debits of one task.
const ROUNDS: u64 = 120;

/// Lines that the processes have said.
type Said = Arc<Mutex<Vec<String>>>;

struct Members(Vec<(Child, JoinHandle<()>)>);

impl Members {
    fn start(test: &str, url: &str, said: &Said) -> Members {
        let start = |process: usize| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env(CHILD, format!("{url} p{process}"))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let said = said.clone();
            let reader = std::thread::spawn(move || {
                for line in lines.map_while(std::result::Result::ok) {
                    said.lock().unwrap().push(line);
                }
            });
            (child, reader)
        };
        Members((0..PROCESSES).map(start).collect())
    }

    /// Kills half of them once so many lines were said, and waits for the others.
    fn kill_half(mut self, said: &Said, at: usize, mut watch: impl FnMut()) {
        let limit = Instant::now() + Duration::from_secs(60);
        while said.lock().unwrap().len() < at {
            assert!(Instant::now() < limit, "{} lines in a minute", said.lock().unwrap().len());
            watch();
            std::thread::sleep(Duration::from_millis(1));
        }
        for (child, _) in &mut self.0[..PROCESSES / 2] {
            assert!(child.try_wait().unwrap().is_none(), "it was over before anybody died");
            child.kill().unwrap();
        }
        while self.0.iter_mut().any(|(child, _)| child.try_wait().unwrap().is_none()) {
            watch();
            std::thread::sleep(Duration::from_millis(1));
        }
        for (i, (mut child, reader)) in self.0.into_iter().enumerate() {
            let ended = child.wait().unwrap();
            assert_eq!(ended.success(), i >= PROCESSES / 2, "process {i}: {ended}");
            reader.join().unwrap();
        }
    }
}

/// One process: its tasks, each with a name of its own.
fn member<H: Clone + Send + 'static, F>(
    target: &str,
    handle: impl FnOnce(&Heatsink) -> H,
    task: impl Fn(H, String) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let (url, process) = target.split_once(' ').unwrap();
    // The test harness has begun a line.
    println!();
    crate::servers::runtime().block_on(async {
        let hs = Heatsink::new(RedisStore::connect(url).await.unwrap()).unwrap();
        let handle = handle(&hs);
        let tasks =
            (0..TASKS).map(|t| tokio::spawn(task(handle.clone(), format!("{process}.{t}"))));
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
}

fn connections_gone(control: &mut Control) {
    // What the dead had sent has been executed by then.
    until("their connections are gone", || {
        control.ask::<String>("CLIENT LIST").lines().count() <= 2
    });
}

async fn pop(tokens: Tokens, name: String) {
    for n in 0u64.. {
        match tokens.pop(format!("{name}.{n}")).await {
            Ok(Popping::Token(token)) => match n % 10 {
                0..5 => {
                    token.confirm().await.unwrap();
                    println!("used {}", token.number());
                }
                5..8 => token.put_back().await.unwrap(),
                _ => {}
            },
            Ok(Popping::NoneLeft) => return,
            Ok(Popping::Ended) => panic!("{name}.{n} was never put back"),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

#[test]
fn processes_are_killed_and_every_token_is_in_one_place() {
    if let Some(target) = std::env::var_os(CHILD) {
        return member(target.to_str().unwrap(), |hs| hs.tokens("hall").unwrap(), pop);
    }
    run(async {
        let server = Server::start(&[]);
        let mut control = server.control();
        let hs = Heatsink::new(RedisStore::connect(&server.url()).await.unwrap()).unwrap();
        let tokens = hs.tokens("hall").unwrap();
        assert!(tokens.mint(TOKENS, 8).await.unwrap());
        let said = Said::default();
        let members = Members::start(TOKENS_TEST, &server.url(), &said);
        let heard = said.clone();
        tokio::task::spawn_blocking(move || members.kill_half(&heard, 400, || {})).await.unwrap();
        connections_gone(&mut control);
        let used: Vec<u64> = said
            .lock()
            .unwrap()
            .iter()
            .filter_map(|line| line.strip_prefix("used ")?.parse().ok())
            .collect();
        let different: BTreeSet<u64> = used.iter().copied().collect();
        assert_eq!(different.len(), used.len(), "a token was used twice");
        let mut job = tokens.reconciler();
        let books = job.pass(|_| Fate::Keep).await.unwrap();
        assert!(books.balance() && books.initial == TOKENS, "{books}");
        assert_eq!((books.in_transit, books.doubled), (0, 0), "{books}");
        // Past the books: every number once, in a list or with a hold.
        let mut all = Vec::new();
        let names: Vec<String> = control.ask("KEYS {hs:*}*list.*:hall");
        for name in &names {
            if control.words::<String>(&["TYPE", name]) == "list" {
                all.extend(control.words::<Vec<u64>>(&["LRANGE", name, "0", "-1"]));
            }
        }
        let holds: Vec<String> = control.ask("KEYS *\u{1}hs:hold*");
        for name in holds.iter().filter(|name| name.contains("list.")) {
            let states: Vec<String> = control.words(&["HVALS", name]);
            all.extend(states.iter().filter_map(|s| s.split(':').nth(3)?.parse::<u64>().ok()));
        }
        all.sort_unstable();
        assert_eq!(all, (0..TOKENS).collect::<Vec<_>>(), "every token in one place");
        let after = job.pass(|_| Fate::Back).await.unwrap();
        assert_eq!((after.held, after.free + after.sold), (0, TOKENS), "{after}");
        assert!(after.sold >= used.len() as u64);
        println!("{books}; {} uses acknowledged; all put back: {after}", used.len());
    });
}

async fn trade(balance: Balance, name: String) {
    for n in 0..ROUNDS {
        let (amount, id) = (1 + n % 9, format!("{name}.{n}"));
        println!("c {amount} {id}");
        // The same twice: it counts once.
        for _ in 0..1 + n % 2 {
            balance.credit(amount, format!("c{id}")).await.unwrap();
        }
        let amount = 1 + n % 10;
        println!("d {amount} {id}");
        match balance.debit(amount, format!("d{id}")).await {
            Ok(Debited::Made) => println!("m {amount} {id}"),
            Ok(Debited::Short { balance }) => {
                assert!(balance - FLOOR < amount as i64, "{amount} of {balance} was refused");
            }
            other => drop(other),
        }
    }
}

#[test]
fn processes_are_killed_and_the_balance_is_exact_to_the_cent() {
    if let Some(target) = std::env::var_os(CHILD) {
        return member(target.to_str().unwrap(), |hs| hs.balance("wallet").unwrap(), trade);
    }
    run(async {
        let server = Server::start(&[]);
        let hs = Heatsink::new(RedisStore::connect(&server.url()).await.unwrap()).unwrap();
        let wallet = hs.balance("wallet").unwrap();
        assert!(wallet.open(OPENING, FLOOR, 4).await.unwrap());
        let said = Said::default();
        let members = Members::start(BALANCE_TEST, &server.url(), &said);
        let (heard, mut control) = (said.clone(), server.control());
        let control = tokio::task::spawn_blocking(move || {
            let rows: Vec<String> = control.ask("KEYS *}stripe.*:wallet");
            members.kill_half(&heard, 1_500, || {
                for row in rows.iter().filter(|row| !row.contains('\u{1}')) {
                    let level: i64 = control.words(&["GET", row]);
                    assert!(level >= 0, "{row}: {level}, below the floor");
                }
            });
            control
        });
        let mut control = control.await.unwrap();
        connections_gone(&mut control);
        let mut all: BTreeMap<char, BTreeMap<String, u64>> = BTreeMap::new();
        for line in said.lock().unwrap().iter() {
            let mut words = line.split(' ');
            if let (Some(kind @ ("c" | "d" | "m")), Some(amount), Some(id)) =
                (words.next(), words.next(), words.next())
            {
                let of_kind = all.entry(kind.chars().next().unwrap()).or_default();
                of_kind.insert(id.into(), amount.parse().unwrap());
            }
        }
        let (credits, debits, made) = (&all[&'c'], &all[&'d'], &all[&'m']);
        // What the dead have announced is asked again under the same id, or called off.
        let mut late = 0;
        for (id, amount) in credits {
            late += u64::from(wallet.credit(*amount, format!("c{id}")).await.unwrap());
        }
        let mut off = 0;
        for id in debits.keys().filter(|id| !made.contains_key(*id)) {
            off += u64::from(wallet.reverse(format!("d{id}")).await.unwrap());
        }
        let sum = |of: &BTreeMap<String, u64>| of.values().sum::<u64>() as i64;
        let total = wallet.total().await.unwrap().total();
        assert_eq!(total, OPENING + sum(credits) - sum(made));
        assert!(late + off <= (PROCESSES / 2 * TASKS) as u64, "{late} credits, {off} debits");
        println!(
            "{} credits, {} of {} debits made: {total} cents; the dead left {late} credits to be made \
             and {off} debits to be reversed",
            credits.len(),
            made.len(),
            debits.len()
        );
    });
}

/// What stands beside a row may not grow with the sweeps: a busy account would be refused one day.
#[test]
fn a_balance_is_swept_for_ever_and_remembers_one_sweep_of_a_stripe() {
    const STRIPES: usize = 4;
    const SWEEPS: u64 = 200;
    run(async {
        let server = Server::start(&[]);
        let ids_max = 70;
        let store = RedisStore::builder(&server.url()).ids_max(ids_max).connect().await.unwrap();
        let balance = Heatsink::new(store).unwrap().balance("till").unwrap();
        balance.open(0, 0, STRIPES).await.unwrap();
        let mut swept = 0;
        for n in 0..SWEEPS {
            balance.credit(1, format!("credit:{n}")).await.unwrap();
            swept += balance.sweep().await.unwrap();
        }
        assert!(swept > 2 * ids_max as u64, "{swept} units were swept: the test proves nothing");
        assert_eq!(balance.total().await.unwrap().total(), SWEEPS as i64);
        let mut control = server.control();
        let marks: Vec<String> = control.ask("KEYS *.turn*");
        assert!(!marks.is_empty());
        for name in marks {
            let len: usize = control.ask(&format!("HLEN {name}"));
            let ttl: i64 = control.ask(&format!("PTTL {name}"));
            assert!(len <= STRIPES + 1, "{len} marks beside {name:?}");
            assert_eq!(ttl, -1, "the last turn is never forgotten");
        }
    });
}

/// A filling that nobody finished is found again when the ids of its time are forgotten.
#[test]
fn units_are_filled_in_once_however_late_the_filling_is_found() {
    run(async {
        let server = Server::start(&[]);
        let kept = Duration::from_millis(50);
        let store = RedisStore::builder(&server.url()).ids_kept(kept).connect().await.unwrap();
        let hs = Heatsink::new(store).unwrap();
        let (units, tokens) = (hs.stock("units").unwrap(), hs.tokens("tokens").unwrap());
        units.create(40, 4).await.unwrap();
        tokens.mint(40, 4).await.unwrap();
        let mut control = server.control();
        let mut records: Vec<String> = control.ask("KEYS *stock:units");
        records.extend(control.ask::<Vec<String>>("KEYS *tokens:tokens"));
        assert_eq!(records.len(), 2, "{records:?}");
        for name in &records {
            let record: String = control.ask(&format!("GET {name}"));
            assert!(record.ends_with(" idle"), "{record}");
            // As it was before whoever filled in could say so.
            let undone = record.replace(" idle", " fill 10 10 10 10");
            let _: () = control.words(&["SET", name, &undone]);
        }
        tokio::time::sleep(3 * kept).await;
        for books in [
            units.reconciler().pass(|_| Fate::Keep).await.unwrap(),
            tokens.reconciler().pass(|_| Fate::Keep).await.unwrap(),
        ] {
            assert_eq!((books.initial, books.free), (40, 40), "{books}");
        }
    });
}
