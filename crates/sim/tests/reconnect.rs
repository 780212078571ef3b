//! A session outlives any number of its data connections.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{Tensor, Worker};
use tensorwire_sim::{Fault, Handle, Node, World};

use crate::common::builder;

/// More than a session may have at once.
const LOSSES: u32 = 70;

async fn worker(node: &Node, name: &str) -> Worker {
    builder(node, name)
        .flow(|flow| {
            flow.depth = 4;
            flow.requests_max = 2;
            flow.contents_max = 2;
            flow.ring_bytes = 8 << 10;
        })
        .start()
        .await
        .unwrap()
}

async fn lose_and_fetch(handle: Handle) {
    let (server_node, client_node) =
        (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
    let server = worker(&server_node, "/job:ps/replica:0/task:0").await;
    let client = worker(&client_node, "/job:worker/replica:0/task:0").await;
    let peer = client.peer_at("server:1").await.unwrap();
    server.publish("x", Tensor::from_values(server.pool(), &[3], &[1u32, 2, 3]).unwrap()).unwrap();
    peer.fetch("x").await.unwrap();
    for loss in 0..LOSSES {
        handle.inject(Fault::LoseLink(server_node.id(), client_node.id()));
        // Until both sides have seen it, a fetch may still fail.
        client_node.runtime().sleep(handle.swarm().detection_max * 2 + Duration::from_millis(1)).await;
        let fetched = peer.fetch("x").await;
        let fetched = fetched.unwrap_or_else(|error| panic!("after {} lost links: {error}", loss + 1));
        assert_eq!(fetched.values::<u32>().unwrap(), [1, 2, 3]);
    }
    client.shutdown().await;
    server.shutdown().await;
}

#[test]
fn a_link_may_be_lost_more_often_than_a_session_has_connections() {
    for seed in 0..3 {
        let world = World::new(seed);
        world.run(lose_and_fetch(world.handle())).unwrap();
        world.finish().unwrap();
    }
}
