//! Tensors over gRPC between whole workers on loopback: the fallback that is there when nothing better connects.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{future::Future, sync::Arc, time::Duration};

use futures::future::join_all;
use protocol::{Code, DataType, Key, Status};
use rendezvous::{ClusterSpec, Peer, Tensor, Worker, WorkerBuilder, WorkerError};
use verbs_reactor::{FabricKind, Runtime, TokioRuntime, timeout};

const SENDER: &str = "/job:ps/replica:0/task:0";
const RECEIVER: &str = "/job:worker/replica:0/task:0";
const SENDER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const RECEIVER_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

fn bounded<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio.block_on(async {
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
        let ended = timeout(&*runtime, Duration::from_secs(60), test()).await;
        ended.expect("the test hangs");
    });
}

/// Two workers that move tensors over gRPC alone.
struct Two {
    sender: Worker,
    receiver: Worker,
    /// The sender, as the receiver knows it.
    peer: Peer,
}

impl Two {
    async fn start() -> Self {
        Self::with(|builder| builder).await
    }

    async fn with(settings: impl Fn(WorkerBuilder) -> WorkerBuilder) -> Self {
        let sender = settings(Worker::builder(SENDER).require(FabricKind::Grpc)).start().await.unwrap();
        let cluster = ClusterSpec::new().worker(SENDER, sender.address());
        let receiver = Worker::builder(RECEIVER).require(FabricKind::Grpc).cluster(cluster);
        let receiver = settings(receiver).start().await.unwrap();
        let peer = receiver.peer(SENDER).unwrap();
        Self { sender, receiver, peer }
    }

    fn key(&self, edge: &str) -> Key {
        self.receiver.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap()
    }

    fn send(&self, step: i64, edge: &str, tensor: &Tensor) {
        let key = self.sender.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap();
        self.sender.step(step).send(&key, tensor.clone()).unwrap();
    }

    fn bytes(&self, length: usize) -> Tensor {
        let values: Vec<u8> = (0..length).map(|at| (at * 31 + at / 251) as u8).collect();
        Tensor::from_values(self.sender.pool(), &[length as u64], &values).unwrap()
    }

    async fn shut_down(self) {
        self.receiver.shutdown().await;
        self.sender.shutdown().await;
    }
}

fn assert_same(one: &Tensor, other: &Tensor) {
    assert_eq!(one.metadata(), other.metadata());
    assert!(one.bytes() == other.bytes(), "the bytes of {one:?} differ");
}

#[test]
fn s7_values_of_all_kinds_arrive_whole() {
    bounded(|| async {
        let two = Two::start().await;
        let pool = two.sender.pool();
        let values = [
            two.bytes(1),
            two.bytes(0),
            two.bytes(1024),
            two.bytes(1025),
            two.bytes(1 << 20),
            two.bytes((3 << 20) + 7),
            Tensor::from_values(pool, &[], &[1.5f64]).unwrap(),
            Tensor::from_values(pool, &[2, 0, 3], &[0i32; 0]).unwrap(),
            Tensor::from_strings(pool, &[3], &["", "a", "bäume"]).unwrap(),
            Tensor::from_strings(pool, &[2], &["x".repeat(300_000), "y".repeat(5)]).unwrap(),
            Tensor::from_strings(pool, &[0], &[""; 0]).unwrap(),
            Tensor::dead(DataType::F32, &[4, 4]).unwrap(),
            Tensor::dead(DataType::String, &[1]).unwrap(),
            Tensor::from_bytes(pool, DataType::Bf16, &[1; 254], &[7, 8]).unwrap(),
        ];
        for (number, value) in values.iter().enumerate() {
            let (edge, name) = (format!("edge {number}"), format!("name {number}"));
            two.send(1, &edge, value);
            let received = two.receiver.step(1).recv(&two.key(&edge)).await.unwrap();
            assert_same(&received, value);
            two.sender.publish(&name, value.clone()).unwrap();
            let fetched = two.receiver.fetch(&two.peer, &name).await.unwrap();
            assert_same(&fetched, value);
        }
        let strings = two.receiver.fetch(&two.peer, "name 8").await.unwrap();
        assert_eq!(strings.strings().unwrap(), ["", "a", "bäume"]);
        let info = two.receiver.peers().remove(0);
        assert_eq!(info.transport, Some(FabricKind::Grpc));
        assert!(info.fabric.bytes_received > 8 << 20, "{info:?}");
        two.shut_down().await;
    });
}
