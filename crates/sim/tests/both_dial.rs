//! Two workers that dial each other at the same moment use one connection.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use futures::future::join;
use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{Peer, Tensor, Worker};
use tensorwire_sim::{Fault, Handle, Node, World};

use crate::common::builder;

const LEFT: &str = "/job:a/replica:0/task:0";
const RIGHT: &str = "/job:b/replica:0/task:0";

async fn worker(node: &Node, name: &str) -> Worker {
    let worker = builder(node, name).start().await.unwrap();
    worker.publish("x", Tensor::from_values(worker.pool(), &[1], &[7u32]).unwrap()).unwrap();
    worker
}

async fn fetch(peer: &Peer) {
    let fetched = peer.fetch("x").await.unwrap();
    assert_eq!(fetched.values::<u32>().unwrap(), [7]);
}

/// Requests sent and received over the connection that `worker` has.
fn requests(worker: &Worker) -> (u64, u64) {
    let counters = worker.peers().remove(0).counters;
    (counters.sent.tensor_request, counters.received.tensor_request)
}

async fn both_dial(handle: Handle) {
    let (left_node, right_node) =
        (handle.start_node("left:1").unwrap(), handle.start_node("right:1").unwrap());
    let (left, right) = (worker(&left_node, LEFT).await, worker(&right_node, RIGHT).await);
    let (to_right, to_left) = join(left.peer_at("right:1"), right.peer_at("left:1")).await;
    let (to_right, to_left) = (to_right.unwrap(), to_left.unwrap());
    for round in 0..4 {
        if round > 0 {
            handle.inject(Fault::LoseLink(left_node.id(), right_node.id()));
            // Until both sides have seen it, a fetch may still fail.
            left_node.runtime().sleep(handle.swarm().detection_max * 3).await;
        }
        join(fetch(&to_right), fetch(&to_left)).await;
        assert_eq!((requests(&left), requests(&right)), ((1, 1), (1, 1)), "round {round}");
    }
    join(left.shutdown(), right.shutdown()).await;
}

#[test]
fn d_ends_that_dial_each_other_use_one_connection() {
    for seed in 0..60 {
        let world = World::new(seed);
        world.replayed_by("both_dial");
        world.run(both_dial(world.handle())).unwrap();
        world.finish().unwrap();
    }
}
