//! One node.

use crate::servers::{Server, run};
use heatsink::store::{RedisStore, Store};
use heatsink::testing::{Suite, conformance};
use heatsink::{ErrorKind, Heatsink, Key};

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
