//! Receives whose values arrive late never starve receives whose values are available.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use futures::{StreamExt, future::join, stream::FuturesUnordered};
use tensorwire_protocol::{DataType, Key};
use tensorwire_rendezvous::{Tensor, Worker};
use tensorwire_sim::{Handle, Node, World};

use crate::common::builder;

const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";
/// More than fits into a message.
const BYTES: usize = 16 << 10;
const POOL_TENSORS: usize = 4;
const RECEIVES: usize = 100;

async fn worker(node: &Node, name: &str, receive_bytes: usize) -> Worker {
    let builder = builder(node, name).memory(|memory| memory.receive_bytes = receive_bytes as u64);
    builder.timeout(Duration::from_secs(600)).start().await.unwrap()
}

/// Sends the values in reverse, each after the one before it has been received.
async fn produce(server: &Worker, step: i64, keys: &[Key], received: &tokio::sync::watch::Sender<usize>) {
    for (sent, number) in (0..keys.len()).rev().enumerate() {
        let mut buffer = server.pool().alloc(BYTES).await.unwrap();
        buffer.fill(number as u8);
        let tensor = Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap();
        server.shared_step(step).send(&keys[number], tensor).unwrap();
        received.subscribe().wait_for(|count| *count > sent).await.unwrap();
    }
}

async fn late_values(handle: Handle) {
    let (server_node, client_node) =
        (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
    let server = worker(&server_node, "/job:ps/replica:0/task:0", 1 << 20).await;
    let client = worker(&client_node, "/job:worker/replica:0/task:0", POOL_TENSORS * BYTES).await;
    client.peer_at("server:1").await.unwrap();
    let key = |number| server.key(SERVER_CPU, CLIENT_CPU, &format!("edge {number}")).unwrap();
    let keys: Vec<Key> = (0..RECEIVES).map(key).collect();
    for step in 0..2 {
        let received = tokio::sync::watch::Sender::new(0);
        let consume = async {
            let at_step = client.shared_step(step);
            let receive = async |number: usize| {
                let tensor = at_step.recv(&keys[number]).await.unwrap();
                assert!(tensor.bytes().iter().all(|byte| *byte == number as u8));
            };
            let mut receives: FuturesUnordered<_> = (0..keys.len()).map(receive).collect();
            while receives.next().await.is_some() {
                received.send_modify(|count| *count += 1);
            }
        };
        join(produce(&server, step, &keys, &received), consume).await;
        assert_eq!(client.receive_memory().early_bytes, 0);
    }
    client.shutdown().await;
    server.shutdown().await;
}

#[test]
fn late_values_starve_nobody() {
    for seed in 0..8 {
        let world = World::new(seed);
        world.replayed_by("half_pool");
        world.run(late_values(world.handle())).unwrap();
        world.finish().unwrap();
    }
}
