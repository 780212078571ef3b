//! Values that a fabric splits, and send queues that are too short for all their pieces.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use tensorwire_protocol::{Code, DataType};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};
use tensorwire_sim::{Handle, Node, Swarm, World};

use crate::common::builder;

/// Bytes of one work request.
const PIECE: usize = 1 << 10;

/// The send queue of the smallest queue pair of a worker: contents of mode original, two pieces of a message, an
/// acknowledgement.
const SEND_DEPTH: usize = 64 + 2 + 1;

async fn worker(node: &Node, name: &str) -> Worker {
    let builder = builder(node, name).memory(|memory| memory.block_bytes = 1 << 20);
    builder.flow(|flow| flow.depth = 4).timeout(Duration::from_secs(600)).start().await.unwrap()
}

async fn publish(server: &Worker, name: &str, bytes: usize) {
    let mut buffer = server.pool().alloc(bytes).await.unwrap();
    buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    server.publish(name, Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()).unwrap();
}

async fn short_queues(handle: Handle) {
    let (server_node, client_node) =
        (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
    let server = worker(&server_node, "/job:ps/replica:0/task:0").await;
    let client = worker(&client_node, "/job:worker/replica:0/task:0").await;
    let peer = client.peer_at("server:1").await.unwrap();
    // One slot is for a result.
    let most = PIECE * (SEND_DEPTH - 1);
    publish(&server, "fits", most).await;
    publish(&server, "too long", most + 1).await;
    publish(&server, "small", 10 * PIECE).await;
    for _ in 0..3 {
        let neighbour = async { peer.fetch("small").await };
        let (refused, neighbour) =
            futures::future::join(peer.fetch("too long").into_future(), neighbour).await;
        let error = refused.unwrap_err();
        let WorkerError::Remote { status, .. } = &error else { panic!("{error}") };
        assert_eq!(status.code, Code::ResourceExhausted);
        let (bytes, pieces) = ((most + 1).to_string(), SEND_DEPTH.to_string());
        for word in [
            bytes.as_str(),
            &format!("takes {pieces} work"),
            "67 deep",
            &most.to_string(),
            "the setting `depth`",
        ] {
            assert!(status.message.contains(word), "no `{word}`: {status}");
        }
        // Only the value that was too large has failed.
        assert_eq!(neighbour.unwrap().bytes().len(), 10 * PIECE);
        let fits = peer.fetch("fits").await.unwrap();
        assert!(fits.bytes().iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
        assert_eq!(fits.bytes().len(), most);
    }
    client.shutdown().await;
    server.shutdown().await;
}

#[test]
fn s2_values_of_more_pieces_than_the_send_queue_holds_are_refused_alone() {
    for seed in 0..10 {
        let swarm = Swarm { piece_bytes_max: PIECE as u64, ..Swarm::calm() };
        let world = World::with_swarm(seed, swarm);
        world.replayed_by("pieces");
        world.run(short_queues(world.handle())).unwrap();
    }
}
