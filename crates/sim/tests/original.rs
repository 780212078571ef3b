//! Mode `original`: whole workers exchange as many messages as TensorFlow's verbs plugin, on the simulator.
//!
//! | case | messages | acknowledgements | contents |
//! | --- | --- | --- | --- |
//! | hit (also empty and dead) | 1 | 1 | 1 |
//! | miss, change | 3 | 3 | 1 |
//! | error | 2 | 2 | 0 |

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use tensorwire_protocol::{Code, Counters, DataType, Mode};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};
use tensorwire_sim::{Handle, OperationResult, World};

use crate::common::builder;

const SENDER: &str = "/job:ps/replica:0/task:0";
const RECEIVER: &str = "/job:worker/replica:0/task:0";
const SENDER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const RECEIVER_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";
const SEEDS: u64 = 12;

/// What one transfer cost, on both sides together; messages in the order request, response, re-request, error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cost {
    messages: [u64; 4],
    acknowledgements: u64,
    contents: u64,
}

const HIT: Cost = Cost { messages: [1, 0, 0, 0], acknowledgements: 1, contents: 1 };
const MISS: Cost = Cost { messages: [1, 1, 1, 0], acknowledgements: 3, contents: 1 };
const ERROR: Cost = Cost { messages: [1, 0, 0, 1], acknowledgements: 2, contents: 0 };

/// Two workers in mode original.
struct Cluster {
    sender_node: tensorwire_sim::Node,
    receiver_node: tensorwire_sim::Node,
    sender: Worker,
    receiver: Worker,
}

async fn worker(node: &tensorwire_sim::Node, name: &str) -> Worker {
    builder(node, name).flow(|flow| flow.mode = Mode::Original).start().await.unwrap()
}

impl Cluster {
    async fn start(handle: &Handle) -> Self {
        let sender_node = handle.start_node("sender:1").unwrap();
        let receiver_node = handle.start_node("receiver:1").unwrap();
        let sender = worker(&sender_node, SENDER).await;
        let receiver = worker(&receiver_node, RECEIVER).await;
        receiver.peer_at("sender:1").await.unwrap();
        Self { sender_node, receiver_node, sender, receiver }
    }

    fn send(&self, edge: &str, tensor: &Tensor) {
        let key = self.sender.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap();
        self.sender.shared_step(1).send(&key, tensor.clone()).unwrap();
    }

    /// Receives `edge` and gives the result with what it cost, once both sides are quiet again.
    async fn receive(&self, edge: &str) -> (Result<Tensor, WorkerError>, Cost) {
        let before = self.cost();
        let operation = self.receiver_node.begin(Some(self.sender_node.address()), format!("receive {edge}"));
        let key = self.receiver.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap();
        let result = self.receiver.shared_step(1).recv(&key).await;
        operation.end(if result.is_ok() { &OperationResult::Done } else { &OperationResult::Refused });
        // The last acknowledgement may still be in flight: every sent one must have been received.
        while !self.is_quiet() {
            tick(&self.receiver_node).await;
        }
        let after = self.cost();
        let messages = std::array::from_fn(|kind| after.messages[kind] - before.messages[kind]);
        let acknowledgements = after.acknowledgements - before.acknowledgements;
        (result, Cost { messages, acknowledgements, contents: after.contents - before.contents })
    }

    fn counters(&self) -> [Counters; 2] {
        [&self.sender, &self.receiver]
            .map(|worker| worker.peers().first().map(|p| p.counters).unwrap_or_default())
    }

    fn cost(&self) -> Cost {
        let ends = self.counters();
        let sum = |count: fn(&Counters) -> u64| ends.iter().map(count).sum();
        let messages = [
            sum(|end| end.sent.tensor_request),
            sum(|end| end.sent.meta_data_response),
            sum(|end| end.sent.tensor_re_request),
            sum(|end| end.sent.error_status),
        ];
        assert_eq!(messages.iter().sum::<u64>(), sum(|end| end.sent.total()), "messages of another kind");
        Cost {
            messages,
            acknowledgements: sum(|end| end.acknowledgements_sent),
            contents: sum(|end| end.contents_sent),
        }
    }

    fn is_quiet(&self) -> bool {
        let [sender, receiver] = self.counters();
        let matches = |one: &Counters, other: &Counters| {
            one.sent.total() == other.received.total()
                && one.sent.total() == one.acknowledgements_received
                && one.contents_sent == other.contents_received
        };
        matches(&sender, &receiver) && matches(&receiver, &sender)
    }

    async fn end(self) {
        self.receiver.shutdown().await;
        self.sender.shutdown().await;
    }
}

async fn tick(node: &tensorwire_sim::Node) {
    use tensorwire_fabric::Runtime;
    node.runtime().sleep(std::time::Duration::from_micros(50)).await;
}

/// Runs `scenario` on a fresh cluster under each seed.
fn on_seeds<F: Future<Output = ()> + Send + 'static>(scenario: impl Fn(Arc<Cluster>) -> F) {
    for seed in 0..SEEDS {
        let world = World::new(seed);
        let handle = world.handle();
        let cluster = world.run(async move { Cluster::start(&handle).await }).unwrap();
        let cluster = Arc::new(cluster);
        world.run(scenario(cluster.clone())).unwrap();
        let cluster = Arc::into_inner(cluster).unwrap();
        world.run(cluster.end()).unwrap();
        world.finish().unwrap();
    }
}

fn floats(cluster: &Cluster, values: &[f32]) -> Tensor {
    Tensor::from_values(cluster.sender.pool(), &[values.len() as u64], values).unwrap()
}

#[test]
fn s3_6_a_miss_costs_three_messages_and_a_hit_one() {
    on_seeds(|cluster| async move {
        let sent = floats(&cluster, &[1.0, 2.0, 3.0]);
        for round in 0..3 {
            cluster.send("hit", &sent);
            let (got, cost) = cluster.receive("hit").await;
            assert_eq!(got.unwrap().bytes(), sent.bytes());
            assert_eq!(cost, if round == 0 { MISS } else { HIT }, "round {round}");
        }
    });
}

#[test]
fn s3_6_a_change_of_shape_or_type_costs_three_messages() {
    on_seeds(|cluster| async move {
        let first = floats(&cluster, &[1.0, 2.0]);
        let longer = floats(&cluster, &[1.0, 2.0, 3.0]);
        let other_type = Tensor::from_values(cluster.sender.pool(), &[3], &[1i32, 2, 3]).unwrap();
        for (tensor, expected) in
            [(&first, MISS), (&longer, MISS), (&longer, HIT), (&other_type, MISS), (&first, MISS)]
        {
            cluster.send("change", tensor);
            let (got, cost) = cluster.receive("change").await;
            let got = got.unwrap();
            assert_eq!((got.metadata(), got.bytes()), (tensor.metadata(), tensor.bytes()));
            assert_eq!(cost, expected);
        }
    });
}

#[test]
fn s3_6_a_dead_value_costs_a_round_trip_at_each_flip_and_a_write_of_no_bytes() {
    on_seeds(|cluster| async move {
        let live = floats(&cluster, &[1.0]);
        let dead = Tensor::dead(DataType::F32, &[]).unwrap();
        for (tensor, expected) in [(&live, MISS), (&dead, MISS), (&dead, HIT), (&live, MISS), (&live, HIT)] {
            cluster.send("dead", tensor);
            let before = cluster.counters()[0].content_bytes_sent;
            let (got, cost) = cluster.receive("dead").await;
            assert_eq!(got.unwrap().is_dead(), tensor.is_dead());
            assert_eq!(cost, expected);
            let moved = cluster.counters()[0].content_bytes_sent - before;
            assert_eq!(moved, tensor.bytes().len() as u64);
        }
    });
}

#[test]
fn s3_6_an_empty_tensor_does_the_full_exchange_without_bytes() {
    on_seeds(|cluster| async move {
        let empty = Tensor::from_values::<f32>(cluster.sender.pool(), &[0, 5], &[]).unwrap();
        for expected in [MISS, HIT] {
            cluster.send("empty", &empty);
            let (got, cost) = cluster.receive("empty").await;
            assert_eq!(got.unwrap().shape(), [0, 5]);
            assert_eq!(cost, expected);
        }
        assert_eq!(cluster.counters()[0].content_bytes_sent, 0);
    });
}

#[test]
fn s3_6_an_error_costs_two_messages_and_no_content() {
    on_seeds(|cluster| async move {
        cluster.send("known", &floats(&cluster, &[1.0]));
        cluster.receive("known").await.0.unwrap();
        cluster.sender.cleanup(1);
        let (got, cost) = cluster.receive("known").await;
        assert!(matches!(got, Err(WorkerError::Remote { status, .. }) if status.code == Code::Aborted));
        assert_eq!(cost, ERROR);
    });
}
