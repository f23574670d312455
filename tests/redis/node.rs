//! One node.

use crate::servers::cluster::until;
use crate::servers::{Server, run};
use heatsink::store::{Delivery, RedisStore, Store};
use heatsink::testing::{Suite, conformance};
use heatsink::{ErrorKind, Heatsink, Key};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

async fn store(server: &Server) -> RedisStore {
    RedisStore::connect(&server.url()).await.unwrap()
}

#[test]
fn one_node_passes_the_conformance_suite() {
    run(async {
        let server = Server::start(&[]);
        let report = conformance(store(&server).await, "t:").await;
        report.assert_passed();
        assert!(report.capability.take && report.capability.publish && report.capability.seal);
        // Every key of the suite under one tag, with a second colon, and none that is whole.
        Suite::new(store(&server).await, "{t}:}{:").run().await.assert_passed();
    });
}

#[test]
fn a_wrapped_connection_passes_with_what_it_can_do() {
    run(async {
        let server = Server::start(&[]);
        let client = redis::Client::open(server.url()).unwrap();
        let conn = client.get_multiplexed_async_connection().await.unwrap();
        let store = RedisStore::wrap(conn).unwrap();
        let report = conformance(store.clone(), "t:").await;
        report.assert_passed();
        assert!(!report.capability.publish && report.capability.compare_and_set);
        server.kill();
        let key = Key::from("t:x");
        for _ in 0..3 {
            assert_eq!(store.get(&key).await.unwrap_err().kind(), ErrorKind::Store);
        }
    });
}

#[test]
fn it_is_callable_without_any_runtime_and_after_the_one_it_was_made_in() {
    let server = Server::start(&[]);
    let hs = run(async { Heatsink::new(store(&server).await).unwrap() });
    // That runtime is gone now, and this thread has none.
    let plain = heatsink::blocking::Heatsink::from(hs);
    // The connection ended with its runtime; what was sent into it is not known.
    let first = plain.put("k", "v");
    assert!(first.is_ok() || first.unwrap_err().is_unknown());
    plain.put("k", "v").unwrap();
    assert_eq!(plain.get("k").unwrap().unwrap().as_ref(), b"v");
}

#[test]
fn a_subscription_that_lost_its_connection_tells_a_gap_and_goes_on() {
    run(async {
        let server = Server::start(&[]);
        let store = store(&server).await;
        let channel = Key::from("news");
        let mut sub = store.subscribe(&channel).await.unwrap();
        store.publish(&channel, "1".into()).await.unwrap();
        assert_eq!(sub.next().await, Some(Delivery::Message("1".into())));
        let _: i64 = server.control().ask("CLIENT KILL TYPE pubsub");
        assert_eq!(sub.next().await, Some(Delivery::Gap));
        // A second gap once it is subscribed again: what was sent in between reached nobody.
        assert_eq!(sub.next().await, Some(Delivery::Gap));
        store.publish(&channel, "2".into()).await.unwrap();
        assert_eq!(sub.next().await, Some(Delivery::Message("2".into())));
        // A server that stands still is noticed by a ping that is not answered.
        server.pause();
        let gap = tokio::time::timeout(Duration::from_secs(4), sub.next()).await;
        assert_eq!(gap.unwrap(), Some(Delivery::Gap));
        server.resume();
        drop(sub);
        tokio::time::sleep(Duration::from_millis(100)).await;
        let counts: (String, i64) = server.control().ask("PUBSUB NUMSUB news");
        assert_eq!(counts.1, 0, "a dropped subscription ends");
    });
}

#[test]
fn a_slow_subscriber_hears_a_gap_and_holds_no_more_than_its_share() {
    run(async {
        let server = Server::start(&[]);
        let store = store(&server).await;
        let channel = Key::from("news");
        let mut sub = store.subscribe(&channel).await.unwrap();
        for i in 0..1500 {
            store.publish(&channel, i.to_string().into()).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(sub.next().await, Some(Delivery::Gap));
        let mut last = None;
        while last != Some(Delivery::Message("1499".into())) {
            last = sub.next().await;
        }
    });
}

#[test]
fn a_user_without_scripts_gets_a_store_that_says_so() {
    run(async {
        let server = Server::start(&[]);
        let _: () = server.control().ask("ACL SETUSER plain on >pw ~* &* +@all -@scripting");
        let url = format!("redis://plain:pw@127.0.0.1:{}", server.port);
        let report = conformance(RedisStore::connect(&url).await.unwrap(), "t:").await;
        report.assert_passed();
        assert!(!report.capability.seal && report.capability.publish);
        // Refused later: each call says so, and nothing was applied.
        let _: () = server.control().ask("ACL SETUSER plain +@scripting");
        let store = RedisStore::connect(&url).await.unwrap();
        let _: () = server.control().ask("ACL SETUSER plain -@scripting");
        let e = store.seal(&Key::from("k"), 1).await.unwrap_err();
        assert_eq!((e.kind(), e.is_unknown()), (ErrorKind::Unsupported, false));
    });
}

#[test]
fn a_node_of_a_cluster_and_options_that_need_one_are_told_apart() {
    run(async {
        let server = Server::start(&["--cluster-enabled", "yes", "--cluster-port", "0"]);
        let single = RedisStore::connect(&server.url()).await.unwrap_err();
        assert_eq!(single.kind(), ErrorKind::Config, "{single:?}");
        let plain = Server::start(&[]);
        for builder in [
            RedisStore::builder(&plain.url()).replicas(true),
            RedisStore::builder(&plain.url()).hedged_reads(true),
            RedisStore::builder(&plain.url()).in_flight_max(0),
            RedisStore::builder(&format!("{}/1", plain.url())).cluster(true),
            RedisStore::builder("no url"),
        ] {
            assert_eq!(builder.connect().await.unwrap_err().kind(), ErrorKind::Config);
        }
        let second = RedisStore::connect(&format!("{}/1", plain.url())).await.unwrap();
        second.put(&Key::from("k"), "v".into(), None).await.unwrap();
        assert_eq!(plain.control().ask::<i64>("DBSIZE"), 0, "it went to database 1");
        let nobody = RedisStore::connect("redis://127.0.0.1:1").await.unwrap_err();
        assert_eq!((nobody.kind(), nobody.is_unknown()), (ErrorKind::Store, false));
    });
}

/// Runs itself in a second process, which starts a server and is then killed.
#[test]
fn servers_end_with_the_process_that_started_them() {
    const CHILD: &str = "HEATSINK_TEST_STARTS_A_SERVER";
    if std::env::var_os(CHILD).is_some() {
        let server = Server::start(&[]);
        println!("\npid {}", server.pid());
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "node::servers_end_with_the_process_that_started_them", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pid = lines.map_while(Result::ok).find_map(|l| l.strip_prefix("pid ").map(str::to_owned));
    let lives = || Path::new("/proc").join(pid.as_ref().unwrap()).exists();
    assert!(lives());
    child.kill().unwrap();
    child.wait().unwrap();
    until("the server is gone", || !lives());
}
