//! Tensors over gRPC between whole workers on loopback: the fallback that is there when nothing better connects.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{future::Future, sync::Arc, time::Duration};

use futures::future::join_all;
use protocol::{Code, DataType, Key, Status};
use rendezvous::{
    ClusterSpec, Peer, Tensor, Validation, Worker, WorkerBuilder, WorkerError,
    control::{GrpcConfig, GrpcPlane, Secret},
};
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

#[test]
fn s7_64_mib_arrive_by_step_and_by_name() {
    bounded(|| async {
        let two = Two::start().await;
        let large = two.bytes(64 << 20);
        two.send(1, "large", &large);
        two.sender.publish("large", large.clone()).unwrap();
        let (step, key) = (two.receiver.step(1), two.key("large"));
        let (received, fetched) =
            futures::future::join(step.recv(&key), two.receiver.fetch(&two.peer, "large")).await;
        assert_same(&received.unwrap(), &large);
        assert_same(&fetched.unwrap(), &large);
        two.shut_down().await;
    });
}

/// Two workers whose gRPC messages carry at most `bytes` of a tensor.
async fn with_messages_of(bytes: usize) -> Two {
    Two::with(|builder| {
        let secret = Secret::new([7; 16]).unwrap();
        let config = GrpcConfig::new("127.0.0.1:0").secret(Some(secret.clone())).message_bytes_max(bytes);
        builder.dangerous_control_plane(Arc::new(GrpcPlane::bind(config).unwrap())).secret(secret)
    })
    .await
}

#[test]
fn s7_tensors_above_the_message_limit_come_in_pieces_and_in_order() {
    const LIMIT: usize = 64 << 10;
    bounded(|| async {
        let two = with_messages_of(LIMIT).await;
        let strings = Tensor::from_strings(two.sender.pool(), &[2], &["x".repeat(2 * LIMIT), String::new()]);
        let values = [
            two.bytes(LIMIT),
            two.bytes(LIMIT + 1),
            two.bytes(1),
            two.bytes(10 * LIMIT),
            strings.unwrap(),
            two.bytes(2 * LIMIT),
        ];
        for value in &values {
            two.send(1, "edge", value);
        }
        let (step, key) = (two.receiver.step(1), two.key("edge"));
        for value in &values {
            assert_same(&step.recv(&key).await.unwrap(), value);
        }
        for (number, value) in values.iter().enumerate() {
            two.sender.publish(&number.to_string(), value.clone()).unwrap();
            let fetched = two.receiver.fetch(&two.peer, &number.to_string()).await.unwrap();
            assert_same(&fetched, value);
        }
        two.shut_down().await;
    });
}

#[test]
fn s7_ten_thousand_outstanding_receives_complete() {
    const MANY: u32 = 10_000;
    bounded(|| async {
        let two = Two::start().await;
        let keys: Vec<Key> = (0..MANY).map(|edge| two.key(&format!("edge {edge}"))).collect();
        let step = two.receiver.step(1);
        let receiving = join_all(keys.iter().map(|key| step.recv(key)));
        let sending = async {
            let theirs = two.sender.step(1);
            for number in 0..MANY {
                let key = two.sender.key(SENDER_CPU, RECEIVER_CPU, &format!("edge {number}")).unwrap();
                let tensor = Tensor::from_values(two.sender.pool(), &[], &[number]).unwrap();
                theirs.send(&key, tensor).unwrap();
                if number % 100 == 0 {
                    tokio::task::yield_now().await;
                }
            }
        };
        let (received, ()) = futures::future::join(receiving, sending).await;
        for (number, tensor) in (0..MANY).zip(received) {
            assert_eq!(tensor.unwrap().values::<u32>().unwrap(), [number]);
        }
        two.shut_down().await;
    });
}

/// What the receiver is told when the sender refuses, over `kind`.
async fn refusals(kind: FabricKind) -> Vec<(Code, String)> {
    let two = Two::with(|builder| builder.require(kind)).await;
    let own_step = two.sender.step(9);
    own_step.abort(&Status { code: Code::DataLoss, message: "röot cause".into(), details: vec![1, 0, 255] });
    two.sender.cleanup(8);
    let key = two.key("edge");
    let stale = key.with_incarnation(0xbad);
    let step = |id| two.receiver.step(id);
    let mut told = Vec::new();
    for refused in [
        step(9).recv(&key).await,
        step(8).recv(&key).await,
        step(7).recv(&stale).await,
        two.receiver.fetch(&two.peer, "nothing").await,
    ] {
        let Err(WorkerError::Remote { status, transfer }) = refused else { panic!("{refused:?}") };
        assert_eq!(transfer.peer, SENDER);
        let message = status.message.replace(&format!("{:016x}", two.sender.incarnation()), "INCARNATION");
        told.push((status.code, format!("{message} {:?}", status.details)));
    }
    two.shut_down().await;
    told
}

#[test]
fn s7_errors_of_the_sender_are_those_of_every_other_fabric() {
    bounded(|| async {
        let told = refusals(FabricKind::Grpc).await;
        assert_eq!(told, refusals(FabricKind::Tcp).await);
        assert_eq!(told[0], (Code::DataLoss, "röot cause [1, 0, 255]".to_owned()));
        assert_eq!(
            told.iter().map(|(code, _)| *code).skip(1).collect::<Vec<_>>(),
            [Code::Aborted, Code::Aborted, Code::NotFound]
        );
    });
}

#[test]
fn s7_grpc_is_the_last_resort_and_used_in_both_directions() {
    bounded(|| async {
        // Nothing else is common to both.
        let start = |name: &str, kinds: [FabricKind; 2]| Worker::builder(name).fabrics(kinds).start();
        let one = start(SENDER, [FabricKind::Tcp, FabricKind::Grpc]).await.unwrap();
        let other = start(RECEIVER, [FabricKind::Shm, FabricKind::Grpc]).await.unwrap();
        let tensor = Tensor::from_values(one.pool(), &[3], &[1u8, 2, 3]).unwrap();
        one.publish("w", tensor.clone()).unwrap();
        other.publish("w", tensor.clone()).unwrap();
        let peer = other.peer_at(one.address()).await.unwrap();
        assert_same(&other.fetch(&peer, "w").await.unwrap(), &tensor);
        // The other direction uses the same route, by a connection of its own.
        let peer = one.peer(RECEIVER).unwrap();
        assert_same(&one.fetch(&peer, "w").await.unwrap(), &tensor);
        for worker in [&one, &other] {
            let info = worker.peers().remove(0);
            assert_eq!(info.transport, Some(FabricKind::Grpc), "{info:?}");
            assert_eq!((info.counters.sent.tensor_request, info.counters.received.tensor_request), (1, 1));
        }
        other.shutdown().await;
        one.shutdown().await;
        // Without being asked, a worker prefers anything else.
        let one = Worker::builder(SENDER).start().await.unwrap();
        let other = Worker::builder(RECEIVER).start().await.unwrap();
        let tensor = Tensor::from_values(one.pool(), &[3], &[1u8, 2, 3]).unwrap();
        one.publish("w", tensor.clone()).unwrap();
        let peer = other.peer_at(one.address()).await.unwrap();
        assert_same(&other.fetch(&peer, "w").await.unwrap(), &tensor);
        assert_ne!(other.peers().remove(0).transport, Some(FabricKind::Grpc));
        other.shutdown().await;
        one.shutdown().await;
    });
}

#[test]
fn s7_both_ends_that_dial_at_once_use_one_route() {
    bounded(|| async {
        let one = Worker::builder(SENDER).require(FabricKind::Grpc).start().await.unwrap();
        let other = Worker::builder(RECEIVER).require(FabricKind::Grpc).start().await.unwrap();
        for worker in [&one, &other] {
            worker.publish("w", Tensor::from_values(worker.pool(), &[1], &[1u8]).unwrap()).unwrap();
        }
        let (to_one, to_other) =
            futures::future::join(other.peer_at(one.address()), one.peer_at(other.address())).await;
        let (to_one, to_other) = (to_one.unwrap(), to_other.unwrap());
        for _ in 0..20 {
            let (first, second) =
                futures::future::join(other.fetch(&to_one, "w"), one.fetch(&to_other, "w")).await;
            assert_eq!((first.unwrap().bytes(), second.unwrap().bytes()), (&[1][..], &[1][..]));
        }
        other.shutdown().await;
        one.shutdown().await;
    });
}

#[test]
fn s7_a_deadline_here_gives_the_receive_up_and_the_value_to_the_next() {
    bounded(|| async {
        let two = Two::start().await;
        let (step, key) = (two.receiver.step(1), two.key("edge"));
        for round in 0..20 {
            let late = step.recv_timeout(&key, Duration::from_millis(5)).await.unwrap_err();
            assert!(matches!(late, WorkerError::DeadlineExceeded { .. }), "{late}");
            let value = Tensor::from_values(two.sender.pool(), &[], &[round]).unwrap();
            two.send(1, "edge", &value);
            assert_eq!(step.recv(&key).await.unwrap().values::<i32>().unwrap(), [round]);
        }
        two.shut_down().await;
    });
}

#[test]
fn s7_an_abort_ends_calls_that_are_out_and_stops_those_that_are_not() {
    bounded(|| async {
        let two = Two::start().await;
        let key = two.key("edge");
        let sent =
            |two: &Two| two.receiver.peers().first().map_or(0, |info| info.counters.sent.tensor_request);
        let step = two.receiver.step(1);
        let abort = async {
            while sent(&two) < 3 {
                tokio::task::yield_now().await;
            }
            step.abort(&Status::new(Code::Aborted, "enough"));
        };
        let receiving = join_all((0..3).map(|_| step.recv(&key)));
        let (ended, ()) = futures::future::join(receiving, abort).await;
        for ended in ended {
            let Err(WorkerError::Aborted { status, .. }) = ended else { panic!("{ended:?}") };
            assert!(status.message.ends_with("enough"), "{status}");
        }
        // Registered, aborted, and never sent: a receive that was made before the abort and goes on after it.
        let step = two.receiver.step(2);
        let mut early = Box::pin(step.recv(&key));
        let before = sent(&two);
        step.abort(&Status::new(Code::Aborted, "enough"));
        assert!(matches!(early.as_mut().await, Err(WorkerError::Aborted { .. })));
        assert_eq!(sent(&two), before);
        // The sender's side of the steps goes on.
        let value = two.bytes(5);
        two.send(3, "edge", &value);
        assert_same(&two.receiver.step(3).recv(&key).await.unwrap(), &value);
        two.shut_down().await;
    });
}

#[test]
fn s7_a_restarted_peer_is_another_and_its_predecessors_steps_are_over() {
    bounded(|| async {
        let two = Two::start().await;
        let key = two.key("edge");
        let (step, fresh) = (two.receiver.step(1), two.receiver.step(2));
        let lost = async {
            while two.receiver.peers().first().is_none_or(|info| info.counters.sent.tensor_request == 0) {
                tokio::task::yield_now().await;
            }
            two.sender.shutdown().await;
        };
        let (ended, ()) = futures::future::join(step.recv(&key), lost).await;
        assert!(matches!(ended, Err(WorkerError::PeerLost { .. } | WorkerError::Remote { .. })), "{ended:?}");
        let address = two.sender.address().to_owned();
        let again = Worker::builder(SENDER).require(FabricKind::Grpc).bind(address).start().await.unwrap();
        let value = Tensor::from_values(again.pool(), &[], &[5u8]).unwrap();
        let theirs = again.key(SENDER_CPU, RECEIVER_CPU, "edge").unwrap();
        again.step(2).send(&theirs, value.clone()).unwrap();
        assert_same(&fresh.recv(&key).await.unwrap(), &value);
        let stale = key.with_incarnation(two.sender.incarnation());
        let refused = fresh.recv(&stale).await.unwrap_err();
        assert!(
            matches!(&refused, WorkerError::Remote { status, .. } if status.code == Code::Aborted),
            "{refused}"
        );
        let incarnations = [two.sender.incarnation(), again.incarnation()].map(|it| format!("{it:016x}"));
        assert!(incarnations.iter().all(|it| refused.to_string().contains(it)), "{refused}");
        two.receiver.shutdown().await;
        again.shutdown().await;
    });
}

#[test]
fn s7_a_key_that_is_too_long_is_refused_here() {
    bounded(|| async {
        let two = Two::start().await;
        let key = two.key(&"e".repeat(1100));
        let refused = two.receiver.step(1).recv(&key).await.unwrap_err();
        assert!(
            matches!(&refused, WorkerError::Local { status, .. } if status.code == Code::ResourceExhausted)
        );
        assert!(refused.to_string().contains("1024"), "{refused}");
        let longest = two.key(&"e".repeat(1025 - two.key("e").to_string().len()));
        let value = two.bytes(3);
        two.sender.step(1).send(&longest.with_incarnation(two.sender.incarnation()), value.clone()).unwrap();
        assert_same(&two.receiver.step(1).recv(&longest).await.unwrap(), &value);
        two.shut_down().await;
    });
}

#[test]
fn s7_contents_are_validated_where_either_end_wants_it() {
    bounded(|| async {
        let two = Two::with(|builder| builder.validation(Validation::Xxh3)).await;
        for length in [0, 8, 4 << 20] {
            let value = two.bytes(length);
            two.sender.publish("w", value.clone()).unwrap();
            assert_same(&two.receiver.fetch(&two.peer, "w").await.unwrap(), &value);
        }
        two.shut_down().await;
    });
}

#[test]
fn s7_what_only_one_end_has_connects_nobody() {
    bounded(|| async {
        let start = Worker::builder(SENDER)
            .require(FabricKind::Grpc)
            .runtime(Arc::new(TokioRuntime::current().unwrap()));
        let worker = start.start().await.unwrap();
        // What only one end has connects nobody.
        let other = Worker::builder(RECEIVER).require(FabricKind::Tcp).start().await.unwrap();
        let peer = other.peer_at(worker.address()).await.unwrap();
        let none = other.fetch(&peer, "w").await.unwrap_err().to_string();
        assert!(none.contains("tcp: the peer does not offer it"), "{none}");
        other.shutdown().await;
        worker.shutdown().await;
    });
}
