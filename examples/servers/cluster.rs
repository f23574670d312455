//! A cluster of three masters and their replicas, started by the test.

use super::{Control, Server, free_ports};
use heatsink::Key;
use std::time::{Duration, Instant};

pub const MASTERS: usize = 3;
const TIMEOUT_ARGS: [&str; 2] = ["--cluster-node-timeout", "1000"];

/// Masters first, then the replica of each.
pub struct Cluster {
    pub nodes: Vec<Server>,
    ids: Vec<String>,
}

impl Cluster {
    pub fn start() -> Cluster {
        Cluster::with(&[])
    }

    /// Three masters with a replica each, once all agree. Measured: 2 to 3 s.
    pub fn with(args: &[&str]) -> Cluster {
        let ports = free_ports(4 * MASTERS);
        let start = |pair: &[u16]| {
            let bus = pair[1].to_string();
            let mut all = vec!["--cluster-enabled", "yes", "--cluster-port", &bus];
            all.extend(TIMEOUT_ARGS);
            all.extend(args);
            Server::at(pair[0], pair[1], &all)
        };
        let nodes: Vec<Server> = ports.chunks(2).map(start).collect();
        let mut controls: Vec<Control> = nodes.iter().map(Server::control).collect();
        let ids: Vec<String> = controls.iter_mut().map(|c| c.ask("CLUSTER MYID")).collect();
        for (i, control) in controls.iter_mut().enumerate() {
            let _: () = control.ask(&format!("CLUSTER SET-CONFIG-EPOCH {}", i + 1));
            if i < MASTERS {
                let (first, last) = (slot_at(i), slot_at(i + 1) - 1);
                let _: () = control.ask(&format!("CLUSTER ADDSLOTSRANGE {first} {last}"));
            }
        }
        for node in &nodes[1..] {
            let meet = format!("CLUSTER MEET 127.0.0.1 {} {}", node.port, node.bus);
            let _: () = controls[0].ask(&meet);
        }
        let cluster = Cluster { nodes, ids };
        cluster.wait("INFO", |info| info.contains("known_nodes:6") && info.contains("state:ok"));
        for i in 0..MASTERS {
            let control = &mut controls[MASTERS + i];
            until("the replica knows its master", || {
                control.raw(&["CLUSTER", "REPLICATE", &cluster.ids[i]]).is_ok()
            });
        }
        for master in &mut controls[..MASTERS] {
            // Until then the master holds back what it would stream.
            until("the replica is online", || {
                master.ask::<String>("INFO replication").contains("state=online")
            });
        }
        cluster.wait("INFO", |info| info.contains("state:ok"));
        // A replica that has never heard of a write is not named to clients.
        for (i, master) in controls[..MASTERS].iter_mut().enumerate() {
            let key = (0..).map(|n| format!("first:{n}"));
            let key = key.map(Key::from).find(|k| home_of(k.cluster_slot()) == i).unwrap();
            let _: () = master.ask(&format!("SET {key} x"));
            let _: () = master.ask(&format!("DEL {key}"));
        }
        for control in &mut controls {
            until("every node names the replicas", || {
                let rows: Vec<Vec<redis::Value>> = control.ask("CLUSTER SLOTS");
                rows.iter().all(|row| row.len() == 4)
            });
        }
        cluster
    }

    fn wait(&self, what: &str, ready: impl Fn(&str) -> bool) {
        let ask = format!("CLUSTER {what}");
        for node in &self.nodes {
            let mut control = node.control();
            until("the cluster agrees", || ready(&control.ask::<String>(&ask)));
        }
    }

    pub fn url(&self, node: usize) -> String {
        self.nodes[node].url()
    }

    /// Moves a slot from master to master with everything in it. The slot is open on both for
    /// `window`, in the middle of which its keys move.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize, window: Duration) {
        let (mut source, mut target) = (self.nodes[from].control(), self.nodes[to].control());
        let (from_id, to_id) = (&self.ids[from], &self.ids[to]);
        let _: () = target.ask(&format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}"));
        let _: () = source.ask(&format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}"));
        std::thread::sleep(window / 2);
        let port = self.nodes[to].port;
        loop {
            let keys: Vec<Vec<u8>> = source.ask(&format!("CLUSTER GETKEYSINSLOT {slot} 100"));
            if keys.is_empty() {
                break;
            }
            for key in keys {
                source.migrate(port, &key);
            }
        }
        std::thread::sleep(window / 2);
        let own = format!("CLUSTER SETSLOT {slot} NODE {to_id}");
        let _: () = target.ask(&own);
        let _: () = source.ask(&own);
        for other in (0..MASTERS).filter(|i| *i != from && *i != to) {
            let _: () = self.nodes[other].control().ask(&own);
        }
    }
}

fn slot_at(shard: usize) -> usize {
    (16_384 * shard).div_ceil(MASTERS)
}

/// The master that a slot is on at first.
pub fn home_of(slot: u16) -> usize {
    (0..MASTERS).rfind(|i| slot_at(*i) <= usize::from(slot)).unwrap()
}

#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < limit, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
