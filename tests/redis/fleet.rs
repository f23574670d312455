//! The hot list of a fleet over real servers.

use crate::servers::cluster::{Cluster, until};
use crate::servers::run;
use heatsink::feed::{Fleet, Membership};
use heatsink::store::RedisStore;
use heatsink::{Heatsink, Key};
use std::time::Duration;

/// Three processes' handles over the cluster, each of which asks for one key 30 times a second.
async fn member(url: &str) -> (Heatsink, Membership) {
    let store = RedisStore::builder(url).cluster(true).connect().await.unwrap();
    let hs = Heatsink::new(store.clone()).unwrap();
    let member = hs.join_fleet(Fleet::over(store).unwrap().promote_at(60.0)).unwrap();
    let reader = hs.clone();
    tokio::spawn(async move {
        loop {
            let _ = reader.get("viral").await;
            tokio::time::sleep(Duration::from_millis(33)).await;
        }
    });
    (hs, member)
}

#[test]
fn the_list_of_a_fleet_travels_over_a_cluster_and_over_moving_slots() {
    run(async {
        let cluster = Cluster::start();
        let mut members = Vec::new();
        for node in 0..3 {
            members.push(member(&cluster.url(node)).await);
        }
        let all = |members: &[(Heatsink, Membership)]| {
            let treats = |hs: &Heatsink| hs.control().treated().contains(&"viral".into());
            members.iter().all(|(hs, _)| treats(hs))
        };
        tokio::task::block_in_place(|| until("all treat the key", || all(&members)));
        // The lease, the pushes and the reports each move to another node.
        for part in ["lease", "push.0", "reports.0"] {
            let slot = Key::from(format!("hs:feed:{part}")).cluster_slot();
            let from = crate::servers::cluster::home_of(slot);
            let to = (from + 1) % 3;
            tokio::task::block_in_place(|| {
                cluster.move_slot(slot, from, to, Duration::from_millis(200));
            });
            assert!(all(&members), "no treatment is lost: {part}");
        }
        for _ in 0..60 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(all(&members), "no treatment is lost");
        }
        assert_eq!(members.iter().filter(|(_, m)| m.stats().leads).count(), 1);
    });
}
