//! Two workers in one process, over each real fabric.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    bounded::bounded,
    fabrics::{kinds, over, over_verbs},
    rdma::patient,
};
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime};
use tensorwire_protocol::{Code, DataType, Status};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

/// Runs `test` with a watchdog, once per fabric.
fn on_each_fabric<F: Future<Output = ()>>(test: impl Fn(FabricKind) -> F) {
    on(&[FabricKind::SHM, FabricKind::TCP], test);
}

fn on<F: Future<Output = ()>>(kinds: &'static [FabricKind], test: impl Fn(FabricKind) -> F) {
    for &kind in self::kinds(kinds) {
        bounded(patient(Duration::from_secs(60)), async { test(kind).await });
    }
}

async fn pair(kind: FabricKind) -> (Worker, Worker) {
    let start = |name| over(Worker::builder(name), kind).timeout(patient(Duration::from_secs(20))).start();
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

#[test]
fn workers_peers_and_steps_are_printed_in_a_line() {
    bounded(Duration::from_secs(60), async {
        let worker = Worker::client().start().await.unwrap();
        let peer = worker.peer_at(worker.address()).await.unwrap();
        for shown in [format!("{worker:?}"), format!("{peer:?}"), format!("{:?}", worker.step(1))] {
            assert!(shown.contains(worker.name()) && shown.len() < 400, "{shown}");
        }
        worker.shutdown().await;
    });
}

#[test]
fn a_name_above_the_limit_is_refused_here_and_the_connection_stays() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("w", pattern(&server, 8, 1)).unwrap();
        peer.fetch("w").await.unwrap();
        match peer.fetch(&"w".repeat(1025)).await {
            Err(WorkerError::Config { field, value, remedy }) => {
                assert_eq!((field, value.len()), ("published name", 1025));
                assert!(remedy.contains("1024"), "{remedy}");
            }
            other => panic!("{other:?}"),
        }
        peer.fetch("w").await.unwrap();
        end(server, client).await;
    });
}

#[test]
fn fetch_gives_the_published_bytes_of_every_size() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        for (seed, bytes) in [0usize, 1, 63, 64, 65, 4096, 1 << 20, (5 << 20) + 3].into_iter().enumerate() {
            let name = format!("tensor {bytes}");
            let sent = pattern(&server, bytes, seed as u8);
            server.publish(&name, sent.clone()).unwrap();
            for _ in 0..2 {
                let got = peer.fetch(&name).await.unwrap();
                assert_eq!(got.metadata(), sent.metadata());
                assert!(got.bytes() == sent.bytes(), "{bytes} bytes over {kind}");
            }
        }
        assert_eq!(client.peers()[0].transport, Some(kind));
        end(server, client).await;
    });
}

/// A session that is over at one side only delays the other side's shutdown until the plane's farewell of 1 s is over.
#[test]
fn shutdown_waits_for_no_timer() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("x", pattern(&server, 10, 1)).unwrap();
        peer.fetch("x").await.unwrap();
        let runtime = TokioRuntime::current().unwrap();
        let begin = runtime.now();
        client.shutdown().await;
        let took = runtime.now() - begin;
        assert!(took < Duration::from_millis(900), "{took:?}");
        server.shutdown().await;
    });
}

#[test]
fn a_step_moves_values_in_order_in_both_directions() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        client.peer_at(server.address()).await.unwrap();
        let down = client.key(SERVER_CPU, CLIENT_CPU, "weights").unwrap();
        let up = client.key(CLIENT_CPU, SERVER_CPU, "gradients").unwrap();
        let (here, there) = (client.shared_step(3), server.shared_step(3));
        for round in 0..20u32 {
            there
                .send(&down, Tensor::from_values(server.pool(), &[2], &[round, round + 1]).unwrap())
                .unwrap();
            here.send(&up, Tensor::from_values(client.pool(), &[], &[round * 2]).unwrap()).unwrap();
        }
        for round in 0..20u32 {
            assert_eq!(here.recv(&down).await.unwrap().values::<u32>().unwrap(), [round, round + 1]);
            assert_eq!(there.recv(&up).await.unwrap().values::<u32>().unwrap(), [round * 2]);
        }
        end(server, client).await;
    });
}

#[test]
fn a_receive_posted_first_waits_for_its_value() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        client.peer_at(server.address()).await.unwrap();
        let key = server.key(SERVER_CPU, CLIENT_CPU, "late").unwrap();
        let step = client.shared_step(1);
        let receive = step.recv(&key).into_future();
        let send = async {
            // The request is on its way once the server knows the peer; the value may come before or after it.
            while server.peers().is_empty() {
                tokio::task::yield_now().await;
            }
            server.shared_step(1).send(&key, pattern(&server, 1000, 9)).unwrap();
        };
        let (received, ()) = futures::join!(receive, send);
        assert!(received.unwrap().bytes() == pattern(&server, 1000, 9).bytes());
        end(server, client).await;
    });
}

#[test]
fn dead_values_and_changed_shapes_arrive_as_they_were_sent() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        client.peer_at(server.address()).await.unwrap();
        let key = server.key(SERVER_CPU, CLIENT_CPU, "branch").unwrap();
        let sent = [
            Tensor::from_values(server.pool(), &[2], &[1.0f32, 2.0]).unwrap(),
            Tensor::dead(DataType::F32, &[]).unwrap(),
            Tensor::from_values(server.pool(), &[2], &[3.0f32, 4.0]).unwrap(),
            Tensor::from_values(server.pool(), &[1, 3], &[5i64, 6, 7]).unwrap(),
        ];
        for tensor in &sent {
            server.shared_step(1).send(&key, tensor.clone()).unwrap();
        }
        for tensor in &sent {
            let got = client.shared_step(1).recv(&key).await.unwrap();
            assert_eq!(got.metadata(), tensor.metadata());
            assert_eq!(got.bytes(), tensor.bytes());
        }
        end(server, client).await;
    });
}

#[test]
fn errors_name_what_they_are_about() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        let unknown = peer.fetch("nothing").await.unwrap_err();
        assert!(matches!(&unknown, WorkerError::Remote { status, .. } if status.code == Code::NotFound));
        assert!(unknown.to_string().contains("nothing") && unknown.to_string().contains(SERVER), "{unknown}");

        let key = client.key(SERVER_CPU, CLIENT_CPU, "never").unwrap();
        let late = client.shared_step(1).recv(&key).timeout(Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(late, WorkerError::DeadlineExceeded { .. }), "{late}");

        server.cleanup(4);
        let finished = client.shared_step(4).recv(&key).await.unwrap_err();
        assert!(
            matches!(&finished, WorkerError::Remote { status, .. } if status.code == Code::Aborted),
            "{finished}"
        );

        let stale = key.with_incarnation(0xbad);
        let restarted = client.shared_step(5).recv(&stale).await.unwrap_err().to_string();
        assert!(restarted.contains("0000000000000bad"), "{restarted}");
        assert!(restarted.contains(&format!("{:016x}", server.incarnation())), "{restarted}");

        let elsewhere = client.shared_step(1).send(&key, pattern(&client, 1, 1)).unwrap_err();
        assert!(matches!(elsewhere, WorkerError::WrongWorker { .. }), "{elsewhere}");
        end(server, client).await;
    });
}

#[test]
fn a_receive_given_up_leaves_its_value_to_the_next() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        client.peer_at(server.address()).await.unwrap();
        let key = server.key(SERVER_CPU, CLIENT_CPU, "patient").unwrap();
        for _ in 0..5 {
            let gave_up = client.shared_step(1).recv(&key).timeout(Duration::from_millis(20)).await;
            assert!(matches!(gave_up, Err(WorkerError::DeadlineExceeded { .. })));
        }
        server.shared_step(1).send(&key, pattern(&server, 100, 3)).unwrap();
        let got = client.shared_step(1).recv(&key).await.unwrap();
        assert!(got.bytes() == pattern(&server, 100, 3).bytes());
        end(server, client).await;
    });
}

#[test]
fn lists_are_sorted_paged_and_carry_checksums() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        for index in (0..600u32).rev() {
            let tensor = Tensor::from_values(server.pool(), &[1], &[index]).unwrap();
            server.publish(&format!("tensor {index:03}"), tensor).unwrap();
        }
        server.withdraw("tensor 599");
        let listed = peer.list().await.unwrap();
        assert_eq!(listed.len(), 599);
        assert!(listed.iter().enumerate().all(|(index, entry)| entry.name == format!("tensor {index:03}")));
        assert!(listed.iter().all(|entry| entry.checksum.is_none()));
        let checked = peer.list().with_checksums().await.unwrap();
        let got = peer.fetch("tensor 007").await.unwrap();
        assert_eq!(checked[7].checksum, Some(twox_hash::XxHash3_64::oneshot(got.bytes())));
        end(server, client).await;
    });
}

#[test]
fn the_second_fetch_needs_no_metadata() {
    on(&[FabricKind::SHM, FabricKind::TCP], |kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, 5000, 1)).unwrap();
        peer.fetch("t").await.unwrap();
        let first = client.peers()[0].counters.received.meta_data_response;
        peer.fetch("t").await.unwrap();
        assert_eq!((first, client.peers()[0].counters.received.meta_data_response), (1, 1));
        end(server, client).await;
    });
}

#[test]
fn d_ends_that_dial_each_other_use_one_connection() {
    on_each_fabric(|kind| async move {
        for _ in 0..10 {
            let (server, client) = pair(kind).await;
            server.publish("x", pattern(&server, 1000, 1)).unwrap();
            client.publish("x", pattern(&client, 1000, 2)).unwrap();
            let (of_server, of_client) =
                futures::join!(client.peer_at(server.address()), server.peer_at(client.address()));
            let (of_server, of_client) = (of_server.unwrap(), of_client.unwrap());
            let (down, up) =
                futures::join!(of_server.fetch("x").into_future(), of_client.fetch("x").into_future());
            assert!(down.unwrap().bytes()[0] == 1 && up.unwrap().bytes()[0] == 2);
            // What one side sent is what the other received: both count the same connection.
            let (here, there) = (client.peers().remove(0), server.peers().remove(0));
            assert_eq!((here.transport, there.transport), (Some(kind), Some(kind)));
            let requests = (here.counters.sent.tensor_request, here.counters.received.tensor_request);
            assert_eq!(requests, (1, 1), "over {kind}");
            assert_eq!((there.counters.received.tensor_request, there.counters.sent.tensor_request), (1, 1));
            assert!(here.fabric.arrivals > 0 && there.fabric.arrivals > 0);
            end(server, client).await;
        }
    });
}

#[test]
fn a_peer_that_dials_is_listed_with_its_address_from_the_first() {
    bounded(Duration::from_secs(60), async {
        let server = Worker::builder(SERVER).start().await.unwrap();
        let (watched, over) = (server.clone(), Arc::new(AtomicBool::new(false)));
        let is_over = over.clone();
        let watcher = std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                watched.peers().iter().for_each(|peer| assert!(peer.address.is_some(), "{peer:?}"));
            }
        });
        for task in 0..40 {
            let name = format!("/job:worker/replica:0/task:{task}");
            let client = Worker::builder(&name).start().await.unwrap();
            client.peer_at(server.address()).await.unwrap();
            client.shutdown().await;
        }
        over.store(true, Ordering::Relaxed);
        watcher.join().unwrap();
        server.shutdown().await;
    });
}

#[test]
fn workers_without_a_common_fabric_are_told_what_was_tried_and_what_to_do() {
    on(&[FabricKind::TCP], |kind| async move {
        let start = |name, kind| Worker::builder(name).require(kind).timeout(Duration::from_secs(20)).start();
        let (server, client) =
            (start(SERVER, FabricKind::SHM).await.unwrap(), start(CLIENT, kind).await.unwrap());
        server.publish("x", pattern(&server, 1000, 1)).unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        let error = peer.fetch("x").await.unwrap_err();
        let WorkerError::NoFabric { peer, tried } = &error else { panic!("{error}") };
        assert_eq!((&peer[..], &tried[..]), (SERVER, "tcp: the peer does not offer it"));
        let text = error.to_string();
        for part in [SERVER, tried, "the setting `fabrics`", "pass TCP through"] {
            assert!(text.contains(part), "{text}");
        }
        end(server, client).await;
    });
}

/// Posts a receive from both sides, ends the step at one of them, and returns the errors of the receives.
async fn ended_step(kind: FabricKind, end_it: impl Fn(&Worker)) -> (WorkerError, WorkerError) {
    let (server, client) = pair(kind).await;
    client.peer_at(server.address()).await.unwrap();
    while server.peers().is_empty() {
        tokio::task::yield_now().await;
    }
    let down = client.key(SERVER_CPU, CLIENT_CPU, "down").unwrap();
    let up = client.key(CLIENT_CPU, SERVER_CPU, "up").unwrap();
    let (here, there) = (client.shared_step(9), server.shared_step(9));
    let begun = async {
        let requests =
            |worker: &Worker| worker.peers().first().map_or(0, |peer| peer.counters.received.tensor_request);
        while requests(&server) == 0 || requests(&client) == 0 {
            tokio::task::yield_now().await;
        }
        end_it(&client);
    };
    let (down, up, ()) = futures::join!(here.recv(&down).into_future(), there.recv(&up).into_future(), begun);
    // Another step is not concerned.
    let other = client.key(SERVER_CPU, CLIENT_CPU, "other").unwrap();
    server.shared_step(10).send(&other, pattern(&server, 10, 1)).unwrap();
    client.shared_step(10).recv(&other).await.unwrap();
    end(server, client).await;
    (down.unwrap_err(), up.unwrap_err())
}

#[test]
fn an_aborted_step_ends_its_receives_at_both_ends() {
    on_each_fabric(|kind| async move {
        let abort =
            |client: &Worker| client.shared_step(9).abort(&Status::new(Code::Cancelled, "no longer wanted"));
        let (own, peers) = ended_step(kind, abort).await;
        assert!(
            matches!(&own, WorkerError::Aborted { step: 9, status } if status.code == Code::Cancelled),
            "{own}"
        );
        let answered = matches!(&peers, WorkerError::Remote { status, .. } if status.message == "[_Derived_]no longer wanted");
        assert!(answered, "{peers}");
    });
}

#[test]
fn a_cleaned_up_step_ends_its_receives_at_both_ends() {
    on_each_fabric(|kind| async move {
        let (own, peers) = ended_step(kind, |client| client.cleanup(9)).await;
        assert!(
            matches!(&own, WorkerError::Aborted { step: 9, status } if status.code == Code::Aborted),
            "{own}"
        );
        assert!(
            matches!(&peers, WorkerError::Remote { status, .. } if status.code == Code::Aborted),
            "{peers}"
        );
    });
}

#[test]
fn killing_the_peers_worker_ends_receives_with_peer_lost() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, 10, 1)).unwrap();
        peer.fetch("t").await.unwrap();
        let key = client.key(SERVER_CPU, CLIENT_CPU, "never").unwrap();
        let step = client.shared_step(1);
        let (lost, ()) = futures::join!(step.recv(&key).into_future(), server.shutdown());
        let lost = lost.unwrap_err();
        assert!(
            matches!(&lost, WorkerError::PeerLost { .. } | WorkerError::Remote { .. }),
            "{lost} over {kind}"
        );
        assert!(peer.fetch("t").await.is_err());
        client.shutdown().await;
    });
}

#[test]
fn receive_pool_is_empty_again_after_everything_was_dropped() {
    on_each_fabric(|kind| async move {
        let (server, client) = pair(kind).await;
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("t", pattern(&server, 100_000, 1)).unwrap();
        for _ in 0..50 {
            peer.fetch("t").await.unwrap();
        }
        let memory = client.receive_memory();
        assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0), "over {kind}");
        end(server, client).await;
    });
}

over_verbs! {
    a_name_above_the_limit_is_refused_here_and_the_connection_stays
    fetch_gives_the_published_bytes_of_every_size
    shutdown_waits_for_no_timer
    a_step_moves_values_in_order_in_both_directions
    a_receive_posted_first_waits_for_its_value
    dead_values_and_changed_shapes_arrive_as_they_were_sent
    errors_name_what_they_are_about
    a_receive_given_up_leaves_its_value_to_the_next
    lists_are_sorted_paged_and_carry_checksums
    the_second_fetch_needs_no_metadata
    d_ends_that_dial_each_other_use_one_connection
    an_aborted_step_ends_its_receives_at_both_ends
    a_cleaned_up_step_ends_its_receives_at_both_ends
    killing_the_peers_worker_ends_receives_with_peer_lost
    receive_pool_is_empty_again_after_everything_was_dropped
}
