//! Connections that break under fetches, peers that are restarted and move, and orderly ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use futures::future::join;
use tensorwire_fabric::Runtime;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{PeerLoss, Tensor, Worker, WorkerError};
use tensorwire_sim::{Completions, Fault, Handle, Node, World};

use crate::common::builder;

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const BYTES: usize = 40_000;

async fn worker(node: &Node, name: &str) -> Worker {
    builder(node, name).flow(|flow| flow.ring_bytes = 8 << 10).start().await.unwrap()
}

fn on_seeds(seeds: u64, scenario: impl AsyncFn(Handle)) {
    for seed in 0..seeds {
        let world = World::new(seed);
        world.replayed_by("life");
        world.run(scenario(world.handle())).unwrap();
        world.finish().unwrap();
    }
}

fn publish(handle: &Handle, worker: &Worker, transfer: u64) {
    let mut buffer = worker.pool().try_alloc(BYTES).unwrap();
    handle.pattern().fill(transfer, &mut buffer);
    worker.publish("x", Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()).unwrap();
}

#[test]
fn d_a_fetch_is_made_again_when_its_link_breaks() {
    on_seeds(30, async |handle: Handle| {
        let (server_node, client_node) =
            (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
        let (server, client) = (worker(&server_node, SERVER).await, worker(&client_node, CLIENT).await);
        let peer = client.peer_at("server:1").await.unwrap();
        let seen = handle.swarm().detection_max * 3 + Duration::from_millis(1);
        for round in 0..12 {
            publish(&handle, &server, round);
            // At once, while the value is being requested, and while it is in flight.
            let delay = Duration::from_micros(20 * (round % 6));
            handle.inject_after(delay, Fault::LoseLink(server_node.id(), client_node.id()));
            let fetched = match round % 3 {
                0 => peer.fetch("x").await,
                1 => peer.fetch_many(["x", "x"]).await.map(|mut tensors| tensors.remove(1)),
                _ => {
                    let buffer = client.receive_pool().alloc(BYTES).await.unwrap();
                    let filled = peer.fetch("x").into_buffer(buffer).dtype(DataType::U8).await;
                    filled.map(tensorwire_rendezvous::Filled::into_tensor).map_err(WorkerError::from)
                }
            };
            let tensor = fetched.unwrap_or_else(|error| panic!("round {round}: {error}"));
            handle.verify(round, tensor.bytes());
            // So that each fetch has one loss.
            client_node.runtime().sleep(seen).await;
        }
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn d_a_fetch_is_not_made_again_with_another_life_of_the_peer() {
    on_seeds(30, async |handle: Handle| {
        let (server_node, client_node) =
            (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
        let (_server, client) = (worker(&server_node, SERVER).await, worker(&client_node, CLIENT).await);
        let peer = client.peer_at("server:1").await.unwrap();
        assert!(peer.fetch("x").await.is_err());
        let restart = async {
            client_node.runtime().sleep(Duration::from_millis(5)).await;
            server_node.crash();
            let again = handle.start_node("server:1").unwrap();
            let server = worker(&again, SERVER).await;
            publish(&handle, &server, 1);
            server
        };
        let (fetched, server) = join(peer.fetch("x").wait().into_future(), restart).await;
        match fetched {
            Err(WorkerError::PeerLost { loss: PeerLoss::Gone, detail, .. }) => {
                let told = detail.contains("restarted") || detail.contains("reconnecting failed");
                assert!(told, "{detail}");
            }
            other => panic!("{other:?}"),
        }
        // Only the user repeats the fetch once more.
        client_node.runtime().sleep(handle.swarm().detection_max * 3).await;
        handle.verify(1, peer.fetch("x").await.unwrap().bytes());
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn d_a_peer_that_comes_back_elsewhere_is_used_again() {
    on_seeds(20, async |handle: Handle| {
        let (server_node, client_node) =
            (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
        let (server, client) = (worker(&server_node, SERVER).await, worker(&client_node, CLIENT).await);
        let peer = client.peer_at("server:1").await.unwrap();
        publish(&handle, &server, 0);
        handle.verify(0, peer.fetch("x").await.unwrap().bytes());
        let seen = handle.swarm().detection_max * 3 + Duration::from_millis(1);
        let mut lives = vec![(server_node, server)];
        for life in 1..4 {
            lives.last().unwrap().0.crash();
            client_node.runtime().sleep(seen).await;
            let error = peer.fetch("x").await.unwrap_err();
            assert!(matches!(error, WorkerError::Control(_)), "{error}");
            let address = format!("server:{}", 1 + life);
            let node = handle.start_node(&address).unwrap();
            let server = worker(&node, SERVER).await;
            publish(&handle, &server, life);
            if life % 2 == 0 {
                client.set_address(SERVER, &address).unwrap();
            } else {
                // It announces its address when it connects. The answer shows that the announcement was read.
                let back = server.peer_at("client:1").await.unwrap();
                back.list().await.unwrap();
            }
            handle.verify(life, peer.fetch("x").await.unwrap().bytes());
            assert_eq!(peer.address().as_deref(), Some(address.as_str()));
            lives.push((node, server));
        }
        client.shutdown().await;
        lives.last().unwrap().1.shutdown().await;
    });
}

#[test]
fn what_is_on_its_way_arrives_when_its_sender_is_shut_down() {
    on_seeds(40, async |handle: Handle| {
        let (server_node, client_node) =
            (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
        let (server, client) = (worker(&server_node, SERVER).await, worker(&client_node, CLIENT).await);
        let peer = client.peer_at("server:1").await.unwrap();
        publish(&handle, &server, 7);
        // With the metadata known, the content answers the request.
        if handle.seed().is_multiple_of(2) {
            peer.fetch("x").await.unwrap();
        }
        let sent = |server: &Worker| {
            let counters = server.peers().first().map(|peer| peer.counters).unwrap_or_default();
            counters.contents_sent + counters.sent.meta_data_response
        };
        let before = sent(&server);
        let shutdown = async {
            while sent(&server) == before {
                server_node.runtime().sleep(Duration::from_micros(1)).await;
            }
            join(server.shutdown(), server.join()).await;
        };
        let (fetched, ()) = join(peer.fetch("x").into_future(), shutdown).await;
        match fetched {
            Ok(tensor) => handle.verify(7, tensor.bytes()),
            // A fabric whose completions come before delivery may lose what it still has when it is closed. The reason
            // is known nevertheless, however slow the control connection is.
            Err(WorkerError::PeerLost { loss: PeerLoss::Goodbye, .. })
                if handle.swarm().completions != Completions::AfterDelivery => {}
            Err(error) => panic!("{error}"),
        }
        let itself = server.peer(server.name()).unwrap();
        assert!(matches!(itself.fetch("x").await, Err(WorkerError::ShutDown)));
        client.shutdown().await;
    });
}
