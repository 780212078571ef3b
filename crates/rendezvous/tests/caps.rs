//! What may be set, what peers may have at once, and what becomes of more.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::Future, time::Duration};

use rendezvous::{Tensor, Worker, WorkerBuilder, WorkerError};
use verbs_reactor::{FabricKind, TokioRuntime, timeout};

const SERVER: &str = "/job:ps/replica:0/task:0";
const LIMIT: Duration = Duration::from_secs(30);

fn bounded<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio.block_on(async {
        let ended = timeout(&TokioRuntime::current().unwrap(), LIMIT, test()).await;
        ended.unwrap_or_else(|_| panic!("the test hangs"));
    });
}

async fn server(sessions_max: usize) -> Worker {
    let builder = Worker::builder(SERVER).require(FabricKind::Tcp).sessions_max(sessions_max);
    let server = builder.start().await.unwrap();
    server.publish("x", Tensor::from_values(server.pool(), &[1], &[5u32]).unwrap()).unwrap();
    server
}

async fn fetch(client: &Worker, address: &str) -> Result<(), String> {
    let peer = client.peer_at(address).await.map_err(|error| error.to_string())?;
    let fetched = client.fetch(&peer, "x").await.map_err(|error| error.to_string())?;
    assert_eq!(fetched.values::<u32>().unwrap(), [5]);
    Ok(())
}

#[test]
fn e_sessions_beyond_the_cap_are_refused_by_name_until_there_is_room() {
    bounded(|| async {
        let server = server(2).await;
        let mut clients = Vec::new();
        for task in 0..3 {
            let name = format!("/job:client/replica:0/task:{task}");
            clients.push(Worker::builder(&name).require(FabricKind::Tcp).start().await.unwrap());
        }
        fetch(&clients[0], server.address()).await.unwrap();
        fetch(&clients[1], server.address()).await.unwrap();
        let refused = fetch(&clients[2], server.address()).await.unwrap_err();
        for word in ["ResourceExhausted", SERVER, "2 sessions are open", "sessions_max"] {
            assert!(refused.contains(word), "no `{word}`: {refused}");
        }
        // The others are not concerned, and one that leaves makes room.
        fetch(&clients[1], server.address()).await.unwrap();
        clients[0].shutdown().await;
        while fetch(&clients[2], server.address()).await.is_err() {
            tokio::task::yield_now().await;
        }
        clients[2].shutdown().await;
        clients[1].shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn settings_that_cannot_be_used_are_named_with_value_and_remedy() {
    bounded(|| async {
        let zero = Duration::ZERO;
        type Setting = fn(WorkerBuilder, Duration) -> WorkerBuilder;
        let refused: [(&str, &str, Setting); 10] = [
            ("liveness", "0ns", |builder, zero| builder.liveness(zero)),
            ("timeout", "0", |builder, zero| builder.timeout(zero)),
            ("sessions_max", "0", |builder, _| builder.sessions_max(0)),
            ("values_max", "0", |builder, _| builder.values_max(0)),
            ("block_bytes", "0", |builder, _| builder.block_bytes(0)),
            ("source_bytes", "0", |builder, _| builder.source_bytes(0)),
            ("receive_bytes", "0", |builder, _| builder.receive_bytes(0)),
            ("requests_max", "0", |builder, _| builder.requests_max(0)),
            ("ring_bytes", "1", |builder, _| builder.ring_bytes(1)),
            ("fabrics", "none", |builder, _| builder.fabrics([])),
        ];
        for (name, wrong, set) in refused {
            let error = set(Worker::builder(SERVER), zero).start().await.map(drop).unwrap_err();
            let named = matches!(&error, WorkerError::Config { field, value, .. } if *field == name && value == wrong);
            assert!(named, "{name}: {error}");
        }
    });
}
