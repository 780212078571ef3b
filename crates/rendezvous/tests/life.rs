//! Peers that move, transports that are chosen, and orderly ends, over shm, tcp and verbs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::Future, time::Duration};

use crate::{
    bounded::bounded,
    fabrics::{kinds, over, over_verbs},
    rdma::patient,
};
use futures::future::join;
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{ClusterSpec, Tensor, Worker, WorkerBuilder, WorkerError};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const DEVICE: &str = "/job:ps/replica:0/task:0/device:CPU:0";

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    bounded(patient(Duration::from_secs(60)), async { test().await });
}

fn on_each_fabric<F: Future<Output = ()>>(test: impl Fn(FabricKind) -> F) {
    kinds(&[FabricKind::SHM, FabricKind::TCP]).iter().for_each(|&kind| run(|| test(kind)));
}

fn builder(kind: FabricKind, name: &str) -> WorkerBuilder {
    over(Worker::builder(name), kind).timeout(patient(Duration::from_secs(20)))
}

fn filled(worker: &Worker, bytes: usize, fill: u8) -> Tensor {
    let mut buffer = worker.pool().try_alloc(bytes).unwrap();
    buffer.fill(fill);
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

#[test]
fn what_is_on_its_way_arrives_when_its_sender_is_shut_down() {
    const BYTES: usize = 96 << 20;
    on_each_fabric(|kind| async move {
        let server =
            builder(kind, SERVER).shutdown_grace(patient(Duration::from_secs(15))).start().await.unwrap();
        let client = builder(kind, CLIENT).start().await.unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("x", filled(&server, BYTES, 7)).unwrap();
        let runtime = TokioRuntime::current().unwrap();
        let shutdown = async {
            while server.peers().first().is_none_or(|peer| peer.counters.sent.meta_data_response == 0) {
                runtime.sleep(Duration::from_micros(100)).await;
            }
            join(server.shutdown(), server.join()).await;
            let key = server.key(DEVICE, DEVICE, "e").unwrap();
            let sent = server.shared_step(1).send(&key, filled(&server, 1, 1));
            assert!(matches!(sent, Err(WorkerError::ShutDown)), "{sent:?}");
        };
        let (fetched, ()) = join(peer.fetch("x").into_future(), shutdown).await;
        let fetched = fetched.unwrap_or_else(|error| panic!("over {kind}: {error}"));
        assert!(fetched.bytes().iter().all(|byte| *byte == 7));
        client.shutdown().await;
    });
}

#[test]
fn join_ends_with_a_shutdown_through_another_handle() {
    run(|| async {
        let server = builder(FabricKind::TCP, SERVER).start().await.unwrap();
        let other = server.clone();
        let (mut polled, runtime) = (false, TokioRuntime::current().unwrap());
        let ending = async {
            runtime.sleep(Duration::from_millis(5)).await;
            polled = true;
            other.shutdown().await;
        };
        join(server.join(), ending).await;
        assert!(polled);
        // Later calls find it done.
        server.join().await;
        server.shutdown().await;
    });
}

#[test]
fn d_a_peer_restarted_on_another_port_is_used_again() {
    on_each_fabric(|kind| async move {
        let client = builder(kind, CLIENT).start().await.unwrap();
        let mut known = None;
        for life in 0..4 {
            let server = builder(kind, SERVER).start().await.unwrap();
            server.publish("x", filled(&server, 5000, life)).unwrap();
            match life {
                0 => known = Some(client.peer_at(server.address()).await.unwrap()),
                1 => drop(client.set_address(SERVER, server.address()).unwrap()),
                2 => {
                    // It announces its address when it connects. The answer shows that the announcement was read.
                    let back = server.peer_at(client.address()).await.unwrap();
                    back.list().await.unwrap();
                }
                _ => drop(client.peer_at(server.address()).await.unwrap()),
            }
            let peer = known.as_ref().unwrap();
            assert_eq!(peer.fetch("x").await.unwrap().bytes(), [life; 5000]);
            server.shutdown().await;
        }
        client.shutdown().await;
    });
}

#[test]
fn the_cluster_says_where_a_peer_is_when_what_was_learnt_fails() {
    run(|| async {
        let server = builder(FabricKind::TCP, SERVER).start().await.unwrap();
        let cluster = ClusterSpec::new().worker(SERVER, server.address());
        let client = builder(FabricKind::TCP, CLIENT).cluster(cluster).start().await.unwrap();
        // Nobody listens there.
        let peer = client.set_address(SERVER, "127.0.0.1:1").unwrap();
        server.publish("x", filled(&server, 10, 1)).unwrap();
        assert_eq!(peer.fetch("x").await.unwrap().bytes(), [1; 10]);
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn e_an_address_that_is_none_and_a_cluster_that_contradicts_itself_are_named() {
    run(|| async {
        let worker = builder(FabricKind::TCP, SERVER).start().await.unwrap();
        for (name, address, parts) in [
            (CLIENT, "here", ["`here`", "HOST:PORT"]),
            ("the client", "h:1", ["`the client`", "/job:ps/replica:0/task:1"]),
            (SERVER, "h:1", [SERVER, "itself"]),
        ] {
            let error = worker.set_address(name, address).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        worker.shutdown().await;
        let cluster = ClusterSpec::new().hosts("ps", "a:1,a:1");
        let refused = builder(FabricKind::TCP, SERVER).cluster(cluster).start().await.unwrap_err();
        assert!(matches!(refused, WorkerError::Cluster(_)), "{refused}");
        assert!(refused.to_string().contains("`a:1`"), "{refused}");
        let cluster = ClusterSpec::new().hosts("ps", "127.0.0.1:1");
        let unknown = Worker::builder_for_task(cluster, "ps", 1).unwrap_err().to_string();
        assert!(unknown.contains("task 1") && unknown.contains("`ps`"), "{unknown}");
    });
}

#[test]
fn e_verbs_is_required_where_there_is_no_device() {
    run(|| async {
        match Worker::builder(SERVER).require(FabricKind::VERBS).start().await {
            Err(WorkerError::Config { field, value, remedy }) => {
                assert_eq!((field, value.as_str()), ("require", "verbs"));
                assert!(remedy.contains("the setting `fabrics`"), "{remedy}");
            }
            Err(other) => panic!("{other}"),
            // There is one.
            Ok(worker) => worker.shutdown().await,
        }
    });
}

#[test]
fn peers_tell_which_fabrics_are_not_used_and_why() {
    run(|| async {
        let server = Worker::builder(SERVER).fabrics([FabricKind::TCP]).start().await.unwrap();
        let client = Worker::builder(CLIENT).start().await.unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        server.publish("x", filled(&server, 10, 1)).unwrap();
        peer.fetch("x").await.unwrap();
        let info = client.peers().remove(0);
        assert_eq!(info.transport, Some(FabricKind::TCP));
        let why = |kind: &str| info.not_used.iter().find(|why| why.starts_with(kind)).cloned();
        assert!(why("shm").is_some_and(|why| why.contains("does not offer")), "{:?}", info.not_used);
        assert!(why("verbs").is_some_and(|why| why.len() > 10), "{:?}", info.not_used);
        client.shutdown().await;
        server.shutdown().await;
    });
}

over_verbs! {
    what_is_on_its_way_arrives_when_its_sender_is_shut_down
    d_a_peer_restarted_on_another_port_is_used_again
}
