//! Views of a peer's tensors, between two workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::Future, time::Duration};

use crate::bounded::bounded;
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Counters, DataType, Mode};
use tensorwire_rendezvous::{Sharing, Tensor, Worker};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";
const BYTES: usize = (1 << 20) + 5;
/// Looks at what another task brings about, at most.
const LOOKS: usize = 100_000;

/// Runs `test` with a watchdog.
fn run(test: impl Future<Output = ()>) {
    bounded(Duration::from_secs(55), test);
}

async fn pair(kind: FabricKind, sharing: Sharing) -> (Worker, Worker) {
    let start =
        |name| Worker::builder(name).require(kind).timeout(Duration::from_secs(20)).sharing(sharing).start();
    (start(SERVER).await.unwrap(), start(CLIENT).await.unwrap())
}

async fn end(server: Worker, client: Worker) {
    client.shutdown().await;
    server.shutdown().await;
}

fn pattern(worker: &Worker, bytes: usize, seed: u8) -> Tensor {
    let mut buffer = worker.pool().try_alloc(bytes).unwrap();
    for (index, byte) in buffer.iter_mut().enumerate() {
        *byte = seed.wrapping_add((index % 251) as u8);
    }
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

fn is_pattern(tensor: &Tensor, seed: u8) -> bool {
    tensor.bytes().iter().enumerate().all(|(index, &byte)| byte == seed.wrapping_add((index % 251) as u8))
}

fn counters(worker: &Worker) -> Counters {
    worker.peers()[0].counters
}

/// Waits until `is_so`.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if is_so() {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("it never came about: {what}");
}

#[test]
fn a_view_is_the_peers_memory_which_comes_back_when_the_view_is_gone() {
    run(async {
        let (server, client) = pair(FabricKind::SHM, Sharing::Copy).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        // Too long for a catalogue, so that each view is asked for.
        let asked = "t".repeat(113);
        server.publish(&asked, pattern(&server, BYTES, 3)).unwrap();
        let used = server.pool().stats().used_bytes;
        let view = peer.fetch(&asked).sharing(Sharing::View).await.unwrap();
        let again = peer.fetch(&asked).sharing(Sharing::View).await.unwrap();
        assert!(view.buf().is_foreign() && is_pattern(&view, 3) && is_pattern(&again, 3));
        assert_eq!(view.metadata(), again.metadata());
        let seen = counters(&client);
        assert_eq!((seen.loans_received, seen.loan_bytes_received), (2, 2 * BYTES as u64));
        assert_eq!((seen.sent.tensor_re_request, seen.received.meta_data_response), (0, 1));
        assert_eq!(counters(&server).loans_sent, 2);
        assert_eq!(client.receive_memory().used_bytes, 0);
        // The peer's tensor is replaced, and the views stay as they were.
        server.publish(&asked, pattern(&server, BYTES, 9)).unwrap();
        assert!(is_pattern(&view, 3) && is_pattern(&again, 3));
        assert!(server.pool().stats().used_bytes >= 2 * used, "the lent tensor is still there");
        let part = view.clone();
        drop((view, again));
        assert!(is_pattern(&part, 3));
        drop(part);
        // The lender learns of it with the next traffic.
        let newer = peer.fetch(&asked).sharing(Sharing::View).await.unwrap();
        assert!(is_pattern(&newer, 9));
        until("the replaced tensor is given back", || server.pool().stats().used_bytes == used).await;
        end(server, client).await;
    });
}

#[test]
fn a_full_pool_gets_back_what_was_viewed() {
    run(async {
        let start = |name| Worker::builder(name).require(FabricKind::SHM).timeout(Duration::from_secs(20));
        let server = start(SERVER)
            .memory(|memory| {
                memory.block_bytes = 2 << 20;
                memory.source_bytes = 2 << 20;
            })
            .start()
            .await
            .unwrap();
        let client = start(CLIENT).start().await.unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, 2 << 20, 1)).unwrap();
        let view = peer.fetch("t").sharing(Sharing::View).await.unwrap();
        assert!(server.withdraw("t"));
        assert!(server.pool().try_alloc(2 << 20).is_err(), "the view keeps the memory");
        let (next, ()) = futures::join!(server.pool().alloc(2 << 20), async {
            until("someone waits for memory", || server.pool().stats().waiting == 1).await;
            drop(view);
        });
        assert_eq!(next.unwrap().len(), 2 << 20);
        end(server, client).await;
    });
}

#[test]
fn a_view_outlives_the_connection_and_the_peer() {
    run(async {
        let (server, client) = pair(FabricKind::SHM, Sharing::View).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, BYTES, 5)).unwrap();
        let view = peer.fetch("t").await.unwrap();
        assert!(view.buf().is_foreign());
        server.withdraw("t");
        server.shutdown().await;
        assert!(is_pattern(&view, 5));
        drop(server);
        client.shutdown().await;
        assert!(is_pattern(&view, 5));
    });
}

#[test]
fn values_of_a_step_come_as_views_in_order() {
    run(async {
        let (server, client) = pair(FabricKind::SHM, Sharing::View).await;
        client.peer_at(server.address()).await.unwrap();
        let key = client.key(SERVER_CPU, CLIENT_CPU, "edge").unwrap();
        let (here, there) = (client.shared_step(1), server.shared_step(1));
        for (seed, bytes) in [BYTES, 10, 0, BYTES, 2 * BYTES, 4097].into_iter().enumerate() {
            there.send(&key, pattern(&server, bytes, seed as u8)).unwrap();
        }
        for (seed, bytes) in [BYTES, 10, 0, BYTES, 2 * BYTES].into_iter().enumerate() {
            let got = here.recv(&key).await.unwrap();
            assert_eq!(got.bytes().len(), bytes);
            assert!(is_pattern(&got, seed as u8));
            // A short one is a copy on the heap.
            assert_eq!(got.buf().is_foreign(), bytes > 0, "{bytes}");
        }
        assert_eq!(counters(&client).loans_received, 3, "the long ones are views");
        let copy = here.recv(&key).sharing(Sharing::Copy).await.unwrap();
        assert!(is_pattern(&copy, 5) && !copy.buf().is_foreign());
        end(server, client).await;
    });
}

#[test]
fn a_receive_of_a_view_that_is_given_up_loses_nothing() {
    run(async {
        let (server, client) = pair(FabricKind::SHM, Sharing::View).await;
        client.peer_at(server.address()).await.unwrap();
        let key = client.key(SERVER_CPU, CLIENT_CPU, "edge").unwrap();
        let (here, there) = (client.shared_step(1), server.shared_step(1));
        let (mut sent, mut received, mut turns) = (0u8, 0u8, 0usize);
        while received < 200 {
            if sent < 200 && sent - received < 3 {
                there.send(&key, pattern(&server, 5000, sent)).unwrap();
                sent += 1;
            }
            turns = (turns * 5 + 3) % 17;
            tokio::select! {
                biased;
                () = async { for _ in 0..turns { tokio::task::yield_now().await; } } => {}
                tensor = here.recv(&key).into_future() => {
                    assert!(is_pattern(&tensor.unwrap(), received));
                    received += 1;
                }
            }
        }
        end(server, client).await;
    });
}

#[test]
fn what_cannot_be_lent_is_copied() {
    // Over tcp.
    run(async {
        let (server, client) = pair(FabricKind::TCP, Sharing::View).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, BYTES, 5)).unwrap();
        for _ in 0..2 {
            let got = peer.fetch("t").await.unwrap();
            assert!(is_pattern(&got, 5) && !got.buf().is_foreign());
        }
        assert_eq!((counters(&client).loans_received, counters(&client).contents_received), (0, 2));
        end(server, client).await;
    });
    // A view of someone else's memory, published anew.
    run(async {
        let (server, client) = pair(FabricKind::SHM, Sharing::View).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, BYTES, 5)).unwrap();
        let view = peer.fetch("t").await.unwrap();
        client.publish("t", view).unwrap();
        let back = server.peer_at(client.address()).await.unwrap();
        let got = back.fetch("t").await.unwrap();
        assert!(is_pattern(&got, 5) && !got.buf().is_foreign());
        drop(got);
        end(server, client).await;
    });
    // In mode original.
    run(async {
        let start =
            |name| Worker::builder(name).require(FabricKind::SHM).flow(|flow| flow.mode = Mode::Original);
        let server = start(SERVER).start().await.unwrap();
        let client = start(CLIENT).sharing(Sharing::View).start().await.unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, BYTES, 5)).unwrap();
        let got = peer.fetch("t").await.unwrap();
        assert!(is_pattern(&got, 5) && !got.buf().is_foreign());
        end(server, client).await;
    });
}

#[test]
fn a_lender_at_its_cap_sends_copies_until_views_are_dropped() {
    /// More than one connection may hold.
    const MANY: usize = 20_000;
    run(async {
        let (server, client) = pair(FabricKind::SHM, Sharing::View).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, 5000, 5)).unwrap();
        let mut views = Vec::new();
        let copy = loop {
            assert!(views.len() < MANY, "it lends without end");
            let got = peer.fetch("t").await.unwrap();
            assert!(is_pattern(&got, 5));
            if !got.buf().is_foreign() {
                break got;
            }
            views.push(got);
        };
        drop((copy, views));
        let got = peer.fetch("t").await.unwrap();
        assert!(got.buf().is_foreign() && is_pattern(&got, 5), "it lends again");
        end(server, client).await;
    });
}
