//! A sale on a real server: eight processes sell one stock, half of them are killed in the middle
//! of it, and every unit is accounted for.
//!
//! `HEATSINK_SALES=20` runs twenty sales; by default two.

use crate::servers::cluster::until;
use crate::servers::{Server, run};
use heatsink::store::{End, RedisStore, Store};
use heatsink::{Fate, Heatsink, Key, Stock, Taken};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const CHILD: &str = "HEATSINK_TEST_SELLS_AT";
const TEST: &str = "stock::half_of_the_sellers_are_killed_and_every_unit_is_accounted_for";
const PROCESSES: usize = 8;
const UNITS: u64 = 10_000;
const BUCKETS: usize = 16;
/// Buyers of one process at a time.
const BUYERS: usize = 8;

/// One process of the service: its buyers buy until they are told that nothing is left. It says
/// which sales were acknowledged.
fn sell(target: &str) {
    let [url, key, process] = target.split(' ').collect::<Vec<_>>()[..] else { panic!("{target}") };
    // The test harness has begun a line.
    println!();
    crate::servers::runtime().block_on(async {
        let hs = Heatsink::new(RedisStore::connect(url).await.unwrap()).unwrap();
        let stock = hs.stock(key).unwrap();
        let buyers =
            (0..BUYERS).map(|b| tokio::spawn(buyer(stock.clone(), format!("{process}.{b}"))));
        for buyer in buyers.collect::<Vec<_>>() {
            buyer.await.unwrap();
        }
    });
}

/// Of ten holds five are sold, two put back, and three left to whoever reconciles.
async fn buyer(stock: Stock, name: String) {
    for n in 0u64.. {
        let hold = format!("{name}.{n}");
        match stock.take(1 + u64::from(n % 16 == 5), &hold).await {
            Ok(Taken::Held(held)) => match n % 10 {
                0..5 => {
                    held.confirm().await.unwrap();
                    println!("sold {hold}");
                }
                5..7 => held.put_back().await.unwrap(),
                _ => {}
            },
            Ok(Taken::SoldOut) => return,
            Ok(Taken::Short { .. }) => {}
            Ok(Taken::Ended) => panic!("{hold} was never put back"),
            // Units are being moved.
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
        match n % 64 {
            9 => drop(stock.rebalance().await),
            41 if n % 512 == 41 => drop(stock.gather().await),
            _ => {}
        }
    }
}

/// Sales that were acknowledged, of all processes.
type Told = Arc<Mutex<BTreeSet<String>>>;

fn start(target: &str, process: usize, told: &Told) -> (Child, std::thread::JoinHandle<()>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(CHILD, format!("{target} p{process}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    let told = told.clone();
    let reader = std::thread::spawn(move || {
        for line in said.lines().map_while(std::result::Result::ok) {
            if let Some(hold) = line.strip_prefix("sold ") {
                told.lock().unwrap().insert(hold.to_owned());
            }
        }
    });
    (child, reader)
}

/// Eight processes, four of which are killed once so many sales have been told.
fn sale(target: &str, kill_at: usize) -> BTreeSet<String> {
    let told = Told::default();
    let mut all: Vec<_> = (0..PROCESSES).map(|p| start(target, p, &told)).collect();
    let limit = Instant::now() + Duration::from_secs(60);
    while told.lock().unwrap().len() < kill_at {
        assert!(Instant::now() < limit, "{} sales in a minute", told.lock().unwrap().len());
        std::thread::sleep(Duration::from_millis(1));
    }
    for (child, _) in &mut all[..PROCESSES / 2] {
        assert!(child.try_wait().unwrap().is_none(), "the sale was over before anybody died");
        child.kill().unwrap();
    }
    for (i, (mut child, reader)) in all.into_iter().enumerate() {
        let ended = child.wait().unwrap();
        assert_eq!(ended.success(), i >= PROCESSES / 2, "process {i}: {ended}");
        reader.join().unwrap();
    }
    Arc::try_unwrap(told).unwrap().into_inner().unwrap()
}

/// Every hold that the store has as sold, with its units, past the books.
async fn sold(store: &RedisStore, buckets: &[String]) -> (BTreeSet<String>, u64) {
    let (mut ids, mut units) = (BTreeSet::new(), 0);
    for bucket in buckets {
        let (bucket, mut page) = (Key::from(bucket.as_str()), None);
        loop {
            let holds = store.holds(&bucket, page).await.unwrap();
            for hold in holds.page.into_iter().filter(|h| h.ended == Some(End::Sold)) {
                // The others are moves between buckets.
                let id = String::from_utf8(hold.id.to_vec()).unwrap();
                if let Some(id) = id.strip_prefix("h:")
                    && ids.insert(id.to_owned())
                {
                    units += hold.amount;
                }
            }
            page = holds.next;
            if page.is_none() {
                break;
            }
        }
    }
    (ids, units)
}

#[test]
fn half_of_the_sellers_are_killed_and_every_unit_is_accounted_for() {
    if let Some(target) = std::env::var_os(CHILD) {
        return sell(target.to_str().unwrap());
    }
    let sales = std::env::var("HEATSINK_SALES").map_or(2, |n| n.parse().unwrap());
    run(async {
        let server = Server::start(&[]);
        let mut control = server.control();
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let hs = Heatsink::new(store.clone()).unwrap();
        for n in 0..sales {
            let key = format!("sku{n}");
            let stock = hs.stock(&key).unwrap();
            assert!(stock.create(UNITS, BUCKETS).await.unwrap());
            let began = Instant::now();
            // From early in the sale to near its end.
            let kill_at = 200 + n * 2_800 / 20 * if sales > 2 { 1 } else { 10 };
            let target = format!("{} {key}", server.url());
            let told = tokio::task::spawn_blocking(move || sale(&target, kill_at)).await.unwrap();
            // What the dead had sent has been executed by then.
            until("their connections are gone", || {
                control.ask::<String>("CLIENT LIST").lines().count() <= 2
            });
            let before = stock.accounts().await.unwrap();
            let used = before.free + before.held + before.sold + before.in_transit;
            assert!(used <= UNITS, "more than there ever were: {before}");
            let mut job = stock.reconciler();
            let books = job.pass(|_| Fate::Keep).await.unwrap();
            assert!(books.balance() && books.initial == UNITS, "{books}");
            assert_eq!((books.in_transit, books.doubled), (0, 0), "{books}");
            let mut buckets: Vec<String> = control.ask(&format!("KEYS *units.*:{key}"));
            // Without what stands beside them.
            buckets.retain(|name| !name.contains('\u{1}'));
            assert_eq!(buckets.len(), BUCKETS);
            let (ids, units) = sold(&store, &buckets).await;
            assert_eq!(units, books.sold, "a hold is sold in one bucket");
            assert!(units <= UNITS, "oversold");
            assert!(told.is_subset(&ids), "an acknowledged sale is missing");
            // Nobody comes back for the rest.
            let after = job.pass(|_| Fate::Back).await.unwrap();
            assert_eq!((after.held, after.free + after.sold), (0, UNITS), "{after}");
            assert_eq!(after.sold, books.sold);
            println!(
                "sale {n}: {:?}, killed after {kill_at} sales; {before}; after reconcile {books}; {} sales \
                 acknowledged, {} stored; all put back: {after}",
                began.elapsed(),
                told.len(),
                ids.len()
            );
        }
    });
}
