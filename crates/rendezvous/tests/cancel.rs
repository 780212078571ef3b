//! Receives that are given up, and several that are wanted together: nothing is lost, doubled or out of order.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::Future, time::Duration};

use crate::{
    bounded::bounded,
    fabrics::{kinds, over, over_verbs},
    rdma::patient,
};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Code, Key, Status};
use tensorwire_rendezvous::{CancellationToken, RecvArgs, Tensor, Worker, WorkerError};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

/// Runs `test` with a watchdog, once per fabric.
fn on_each_fabric<F: Future<Output = ()>>(test: impl Fn(FabricKind) -> F) {
    for &kind in kinds(&[FabricKind::SHM, FabricKind::TCP]) {
        bounded(patient(Duration::from_secs(55)), async { test(kind).await });
    }
}

/// Two workers that know each other, and the key of an edge from the server to the client.
async fn pair(kind: FabricKind) -> (Worker, Worker, Key) {
    let start = |name| over(Worker::builder(name), kind).timeout(patient(Duration::from_secs(20))).start();
    let (server, client) = (start(SERVER).await.unwrap(), start(CLIENT).await.unwrap());
    client.peer_at(server.address()).await.unwrap();
    let key = client.key(SERVER_CPU, CLIENT_CPU, "edge").unwrap();
    (server, client, key)
}

async fn end(server: Worker, client: Worker) {
    client.shutdown().await;
    // The connection's own task returns the granted memory.
    for _ in 0..100_000 {
        if client.receive_memory().used_bytes == 0 {
            break;
        }
        tokio::task::yield_now().await;
    }
    let memory = client.receive_memory();
    assert_eq!((memory.used_bytes, memory.leaked_bytes), (0, 0));
    server.shutdown().await;
}

/// A tensor of `length` numbers that begins with `number`.
fn numbered(worker: &Worker, number: u32, length: u64) -> Tensor {
    let mut values = vec![0; length as usize];
    values[0] = number;
    Tensor::from_values(worker.pool(), &[length], &values).unwrap()
}

fn number(tensor: &Tensor) -> u32 {
    tensor.values::<u32>().unwrap()[0]
}

/// Lets other tasks run `turns` times.
async fn turns(turns: u64) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}

#[test]
fn s3_select_in_a_loop_around_recv_loses_and_doubles_nothing() {
    on_each_fabric(|kind| async move {
        let rounds = match kind {
            // The device may be an emulated one.
            FabricKind::VERBS => 3_000,
            _ => 40_000,
        };
        let (server, client, key) = pair(kind).await;
        let (here, there) = (client.shared_step(1), server.shared_step(1));
        let (mut sent, mut received, mut random) = (0u32, 0u32, 7u64);
        for _ in 0..rounds {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let draw = |bound: u64, bits: u32| (random >> bits) % bound;
            if sent - received < 3 && draw(3, 33) == 0 {
                let length = [1, 1, 7, 3000][draw(4, 40) as usize];
                there.send(&key, numbered(&server, sent, length)).unwrap();
                sent += 1;
            }
            tokio::select! {
                biased;
                () = turns(draw(12, 50)) => {}
                tensor = here.recv(&key).into_future() => {
                    assert_eq!(number(&tensor.unwrap()), received, "over {kind}");
                    received += 1;
                }
            }
        }
        while received < sent {
            assert_eq!(number(&here.recv(&key).await.unwrap()), received);
            received += 1;
        }
        let counters = client.peers()[0].counters;
        // On a machine that is busy most are given up before they are asked for, and a call takes many rounds.
        let least = rounds / 1000;
        assert!(u64::from(received) > least && counters.sent.cancel > least, "{received} values, {counters}");
        end(server, client).await;
    });
}

#[test]
fn a_value_kept_for_a_step_goes_back_when_the_step_ends() {
    on_each_fabric(|kind| async move {
        let (server, client, key) = pair(kind).await;
        for step in 0..200 {
            for value in 0..3 {
                server.shared_step(step).send(&key, numbered(&server, value, 2000)).unwrap();
            }
            tokio::select! {
                biased;
                () = turns(step as u64 % 40) => {}
                tensor = async {
                    client.shared_step(step).recv(&key).await.unwrap();
                    client.shared_step(step).recv(&key).await
                } => assert_eq!(number(&tensor.unwrap()), 1),
            }
            match step % 2 {
                0 => client.cleanup(step),
                _ => client.shared_step(step).abort(&Status::new(Code::Aborted, "enough")),
            }
            server.cleanup(step);
        }
        end(server, client).await;
    });
}

#[test]
fn s2_9_11_an_abort_ends_a_receive_from_a_peer() {
    on_each_fabric(|kind| async move {
        let (server, client, key) = pair(kind).await;
        let step = client.shared_step(1);
        let abort = async {
            while client.peers()[0].transport.is_none() {
                tokio::task::yield_now().await;
            }
            step.abort(&Status::new(Code::Aborted, "enough"));
        };
        let (aborted, ()) = futures::join!(step.recv(&key).into_future(), abort);
        assert!(
            matches!(aborted, Err(WorkerError::Aborted { status, .. }) if status.message == "[_Derived_]enough")
        );
        assert!(matches!(step.recv(&key).await, Err(WorkerError::Aborted { .. })));
        end(server, client).await;
    });
}

#[test]
fn s2_5_a_value_that_is_there_wins_over_a_cancelled_token_here_and_at_a_peer() {
    on_each_fabric(|kind| async move {
        let (server, client, key) = pair(kind).await;
        let own = client.key(CLIENT_CPU, CLIENT_CPU, "own").unwrap();
        let token = CancellationToken::new();
        token.cancel();
        let args = || RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() };
        let step = client.shared_step(1);
        for value in 0..3 {
            server.shared_step(1).send(&key, numbered(&server, value, 1 + 3000 * u64::from(value))).unwrap();
            step.send(&own, numbered(&client, value, 1)).unwrap();
        }
        for key in [&key, &own] {
            for value in 0..3 {
                let received = step.recv(key).with(args()).await;
                assert_eq!(number(&received.unwrap().tensor), value, "over {kind}");
            }
            let ended = step.recv(key).with(args()).await;
            assert!(matches!(ended, Err(WorkerError::Cancelled { .. })), "over {kind}: {ended:?}");
        }
        end(server, client).await;
    });
}

#[test]
fn recv_many_gives_values_in_the_order_of_the_keys() {
    on_each_fabric(|kind| async move {
        let (server, client, _) = pair(kind).await;
        let edges: Vec<Key> = (0..600u32)
            .map(|edge| client.key(SERVER_CPU, CLIENT_CPU, &format!("edge {}", edge / 2)).unwrap())
            .collect();
        let own = client.key(CLIENT_CPU, CLIENT_CPU, "own").unwrap();
        for (value, key) in (0..).zip(&edges) {
            server
                .shared_step(1)
                .send(key, numbered(&server, value, 1 + u64::from(value % 5) * 700))
                .unwrap();
        }
        client.shared_step(1).send(&own, numbered(&client, 600, 1)).unwrap();
        let keys: Vec<Key> = edges.into_iter().chain([own]).collect();
        let received = client.shared_step(1).recv_many(&keys).await.unwrap();
        assert_eq!(
            received.iter().map(number).collect::<Vec<_>>(),
            (0..=600).collect::<Vec<_>>(),
            "over {kind}"
        );
        drop(received);
        end(server, client).await;
    });
}

#[test]
fn recv_many_that_fails_or_is_given_up_loses_nothing() {
    on_each_fabric(|kind| async move {
        let (server, client, key) = pair(kind).await;
        let never = client.key(SERVER_CPU, CLIENT_CPU, "never").unwrap();
        let own = client.key(CLIENT_CPU, CLIENT_CPU, "own").unwrap();
        let step = client.shared_step(1);
        for value in 0..3 {
            server.shared_step(1).send(&key, numbered(&server, value, 900)).unwrap();
            step.send(&own, numbered(&client, value, 1)).unwrap();
        }
        let all = [key.clone(), own.clone(), never, key.clone()];
        for patience in (0..100).chain([10_000]) {
            tokio::select! {
                biased;
                () = turns(patience) => {}
                received = step.recv_many(&all).into_future() => panic!("{received:?}"),
            }
        }
        let stale = key.with_incarnation(0xbad);
        let failed =
            step.recv_many(&[key.clone(), own.clone(), stale.clone()]).await.unwrap_err().to_string();
        assert!(failed.contains(&stale.to_string()), "{failed}");
        for value in 0..3 {
            assert_eq!(number(&step.recv(&key).await.unwrap()), value);
            assert_eq!(number(&step.recv(&own).await.unwrap()), value);
        }
        end(server, client).await;
    });
}

#[test]
fn fetch_many_gives_tensors_in_the_order_of_the_names_and_an_error_names_one() {
    on_each_fabric(|kind| async move {
        let (server, client, _) = pair(kind).await;
        let peer = client.peer(SERVER).unwrap();
        let names: Vec<String> = (0..300).map(|name| format!("tensor {name}")).collect();
        for (value, name) in (0..).zip(&names) {
            server.publish(name, numbered(&server, value, 10 + u64::from(value))).unwrap();
        }
        for _ in 0..2 {
            let fetched = peer.fetch_many(&names).await.unwrap();
            assert_eq!(fetched.iter().map(number).collect::<Vec<_>>(), (0..300).collect::<Vec<_>>());
        }
        let failed = peer.fetch_many(["tensor 1", "nothing"]).await.unwrap_err().to_string();
        assert!(failed.contains("nothing"), "{failed}");
        end(server, client).await;
    });
}

#[test]
fn a_small_tensors_first_fetch_costs_one_round_trip() {
    on_each_fabric(|kind| async move {
        let (server, client, _) = pair(kind).await;
        let peer = client.peer(SERVER).unwrap();
        server.publish("small", numbered(&server, 1, 1024)).unwrap();
        server.publish("larger", numbered(&server, 2, 1025)).unwrap();
        assert_eq!(number(&peer.fetch("small").await.unwrap()), 1);
        let counters = client.peers()[0].counters;
        assert_eq!((counters.sent.tensor_request, counters.sent.tensor_re_request), (1, 0));
        assert_eq!((counters.eager_received, counters.eager_bytes_received), (1, 4096));
        assert_eq!(number(&peer.fetch("larger").await.unwrap()), 2);
        let counters = client.peers()[0].counters;
        assert_eq!((counters.sent.tensor_request, counters.sent.tensor_re_request), (2, 1));
        end(server, client).await;
    });
}

#[test]
fn strings_travel_as_they_are() {
    on_each_fabric(|kind| async move {
        let (server, client, key) = pair(kind).await;
        let long = "x".repeat(10_000);
        let tensors: [&[&str]; 4] = [&["", "a", "\u{e4}\0"], &[], &[&long, "b"], &["c", "d"]];
        for strings in tensors {
            let tensor = Tensor::from_strings(server.pool(), &[strings.len() as u64], strings).unwrap();
            server.shared_step(1).send(&key, tensor).unwrap();
        }
        for strings in tensors {
            let got = client.shared_step(1).recv(&key).await.unwrap();
            assert_eq!((got.dtype().name(), got.shape()), ("string", &[strings.len() as u64][..]));
            assert_eq!(got.strings().unwrap(), strings);
            assert!(got.values::<u8>().is_err());
        }
        assert!(Tensor::from_strings(server.pool(), &[2], &["one"]).is_err());
        end(server, client).await;
    });
}

over_verbs! {
    s3_select_in_a_loop_around_recv_loses_and_doubles_nothing
    a_value_kept_for_a_step_goes_back_when_the_step_ends
    s2_9_11_an_abort_ends_a_receive_from_a_peer
    s2_5_a_value_that_is_there_wins_over_a_cancelled_token_here_and_at_a_peer
    recv_many_gives_values_in_the_order_of_the_keys
    recv_many_that_fails_or_is_given_up_loses_nothing
    fetch_many_gives_tensors_in_the_order_of_the_names_and_an_error_names_one
    a_small_tensors_first_fetch_costs_one_round_trip
    strings_travel_as_they_are
}
