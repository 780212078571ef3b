//! Receives whose values come late never starve those whose values are there.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use crate::{bounded::bounded, fabrics::over, rdma::patient};
use futures::{StreamExt, future::join, stream::FuturesUnordered};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{DataType, Key};
use tensorwire_rendezvous::{Tensor, Worker};
use tokio::sync::watch;

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

/// Too much to travel within a message.
const BYTES: usize = 64 << 10;
const POOL_TENSORS: usize = 4;
const RECEIVES: usize = 100;

async fn pair(kind: FabricKind) -> (Worker, Worker) {
    let start = |name| over(Worker::builder(name), kind).timeout(patient(Duration::from_secs(50)));
    let client = start(CLIENT).memory(|memory| {
        memory.block_bytes = POOL_TENSORS * BYTES;
        memory.receive_bytes = (POOL_TENSORS * BYTES) as u64;
    });
    (start(SERVER).start().await.unwrap(), client.start().await.unwrap())
}

fn value(server: &Worker, number: usize) -> Tensor {
    let mut buffer = server.pool().try_alloc(BYTES).unwrap();
    buffer.fill(number as u8);
    Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()
}

/// Sends the values in reverse, each after the one before it has been received.
async fn produce(server: &Worker, step: i64, keys: &[Key], mut received: watch::Receiver<usize>) {
    for (sent, number) in (0..keys.len()).rev().enumerate() {
        server.shared_step(step).send(&keys[number], value(server, number)).unwrap();
        received.wait_for(|count| *count > sent).await.unwrap();
    }
}

/// Asks for all values in order, and drops each as it arrives.
async fn consume(client: &Worker, step: i64, keys: &[Key], received: watch::Sender<usize>) {
    let step = client.shared_step(step);
    let receive = async |number: usize| {
        let tensor = step.recv(&keys[number]).await.unwrap();
        assert!(tensor.bytes().len() == BYTES && tensor.bytes().iter().all(|byte| *byte == number as u8));
    };
    let mut receives: FuturesUnordered<_> = (0..keys.len()).map(receive).collect();
    while receives.next().await.is_some() {
        received.send_modify(|count| *count += 1);
    }
}

fn late_values_starve_nobody(kind: FabricKind) {
    let test = async {
        let (server, client) = pair(kind).await;
        client.peer_at(server.address()).await.unwrap();
        let key = |number| server.key(SERVER_CPU, CLIENT_CPU, &format!("edge {number}")).unwrap();
        let keys: Vec<Key> = (0..RECEIVES).map(key).collect();
        // The first time the metadata is unknown, so no memory is granted early; from then on it is.
        for step in 0..3 {
            let (tell, received) = watch::channel(0);
            join(produce(&server, step, &keys, received), consume(&client, step, &keys, tell)).await;
            let memory = client.receive_memory();
            assert_eq!((memory.used_bytes, memory.early_bytes, memory.leaked_bytes), (0, 0, 0));
        }
        client.shutdown().await;
        server.shutdown().await;
    };
    // If receives of late values starve those whose values are there, it hangs.
    bounded(patient(Duration::from_secs(60)), test);
}

#[test]
fn late_values_starve_nobody_over_shm() {
    late_values_starve_nobody(FabricKind::SHM);
}

#[test]
fn late_values_starve_nobody_over_tcp() {
    late_values_starve_nobody(FabricKind::TCP);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn late_values_starve_nobody_over_verbs() {
    late_values_starve_nobody(FabricKind::VERBS);
}
