//! A worker that dials the address of a worker with another name is refused, however often.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{ClusterSpec, Worker, WorkerError};
use tensorwire_sim::{Handle, Node, World};

use crate::common::builder;

const ELSEWHERE: &str = "/job:elsewhere/replica:0/task:0";

/// More than the sessions that one pair of workers may have.
const ATTEMPTS: u32 = 20;

async fn worker(node: &Node, name: &str, cluster: ClusterSpec) -> Worker {
    builder(node, name).cluster(cluster).start().await.unwrap()
}

async fn ask_at_the_wrong_address(handle: Handle) {
    let nodes = ["honest:1", "client:1"].map(|address| handle.start_node(address).unwrap());
    let honest = worker(&nodes[0], "/job:ps/replica:0/task:0", ClusterSpec::new()).await;
    let cluster = ClusterSpec::new().worker(ELSEWHERE, "honest:1");
    let client = worker(&nodes[1], "/job:worker/replica:0/task:0", cluster).await;
    let peer = client.peer(ELSEWHERE).unwrap();
    for _ in 0..ATTEMPTS {
        let error = peer.fetch("x").await.unwrap_err();
        assert!(matches!(&error, WorkerError::Config { field: "cluster", .. }), "{error}");
        assert!(error.to_string().contains("/job:ps/replica:0/task:0"), "{error}");
    }
    nodes[1].runtime().sleep(Duration::from_secs(1)).await;
    let sessions = nodes.each_ref().map(|node| handle.holdings(node.id()).sessions);
    assert_eq!(sessions, [0, 0]);
    // Those two may still meet.
    let met = client.set_address(honest.name(), "honest:1").unwrap();
    assert_eq!(met.list().await.unwrap(), []);
    client.shutdown().await;
    honest.shutdown().await;
}

#[test]
fn s4_a_wrong_address_makes_no_session() {
    for seed in 0..3 {
        let world = World::new(seed);
        world.run(ask_at_the_wrong_address(world.handle())).unwrap();
        world.finish().unwrap();
    }
}
