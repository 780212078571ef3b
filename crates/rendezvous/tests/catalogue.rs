//! Fetches out of a neighbour's catalogue. The counters of copies are the process's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{future::IntoFuture, sync::mpsc, thread, time::Duration};

use tensorwire_fabric::FabricKind;
use tensorwire_memory::copy::{CopyReason, count};
use tensorwire_protocol::{Code, DataType};
use tensorwire_rendezvous::{Sharing, Tensor, Validation, Worker, WorkerError};

use crate::{bounded::bounded, rdma::patient, two::Two};

const LARGE: usize = (1 << 20) + 5;

fn run(test: impl Future<Output = ()>) {
    bounded(patient(Duration::from_secs(60)), test);
}

impl Two {
    async fn start(validation: Validation) -> Self {
        Self::of(|name| Worker::builder(name).require(FabricKind::SHM).validation(validation)).await
    }

    /// Publishes `tensor` under `name`, and fetches it until the peer is not asked any more: until the client has the block
    /// that the server has sent. A driver that looks reads its socket rarely, so on a busy machine that takes many turns.
    async fn until_read(&self, name: &str, tensor: &Tensor) {
        self.server.publish(name, tensor.clone()).unwrap();
        while self.asks(name, tensor).await {
            tokio::task::yield_now().await;
        }
    }

    /// Publishes `tensor` under `name`. Whether the peer is asked for it each time.
    async fn is_asked_for(&self, name: &str, tensor: &Tensor) -> bool {
        self.server.publish(name, tensor.clone()).unwrap();
        let mut is_asked = true;
        for _ in 0..4 {
            is_asked &= self.asks(name, tensor).await;
            tokio::task::yield_now().await;
        }
        is_asked
    }

    /// Whether a fetch asks the peer.
    async fn asks(&self, name: &str, tensor: &Tensor) -> bool {
        let before = self.messages();
        let got = self.peer.fetch(name).await.unwrap();
        assert!(got.bytes() == tensor.bytes() && got.metadata() == tensor.metadata(), "{name}");
        self.messages() != before
    }
}

fn pattern(worker: &Worker, bytes: usize, seed: u8) -> Tensor {
    let mut buffer = worker.pool().try_alloc(bytes).unwrap();
    buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = seed.wrapping_add((at % 251) as u8));
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

fn copied() -> u64 {
    count(CopyReason::Catalogue).bytes
}

#[test]
fn tensors_of_every_kind_are_read_or_asked_for() {
    let _turn = crate::turn();
    run(async {
        let two = Two::start(Validation::Off).await;
        let pool = two.server.pool();
        for bytes in [1, 8, 47, 48, 49, 192, 193, 5000, LARGE] {
            two.until_read(&format!("of {bytes}"), &pattern(&two.server, bytes, 3)).await;
        }
        let empty = Tensor::from_values::<f32>(pool, &[0, 3], &[]).unwrap();
        let dead = Tensor::dead(DataType::F64, &[3]).unwrap();
        let strings =
            Tensor::from_strings(pool, &[2], &["one", "a string that is longer than a cell has room for"]);
        let scalar = Tensor::from_values(pool, &[], &[7.5_f64]).unwrap();
        let four = Tensor::from_values(pool, &[1, 2, 1, 2], &[1_i32, 2, 3, 4]).unwrap();
        for (name, tensor) in [
            ("empty", &empty),
            ("dead", &dead),
            ("strings", &strings.unwrap()),
            ("scalar", &scalar),
            ("four", &four),
        ] {
            two.until_read(name, tensor).await;
        }
        let scalar = two.peer.fetch("scalar").await.unwrap();
        assert_eq!(scalar.as_slice::<f64>().unwrap(), [7.5], "small tensors are aligned");
        let joined = Tensor::from_vec(two.server.user_memory(), &[100], vec![5_u8; 100]).unwrap();
        let five = Tensor::from_values(pool, &[1, 2, 1, 2, 1], &[1_i32, 2, 3, 4]).unwrap();
        let long = "x".repeat(113);
        for (name, tensor) in [("joined", &joined), ("five", &five), (&long, &four)] {
            assert!(two.is_asked_for(name, tensor).await, "{name}");
        }
        // A name goes on having its cell, whatever is published under it.
        two.until_read("five", &four).await;
        assert!(two.is_asked_for("five", &five).await);
        two.end().await;
    });
}

#[test]
fn a_reader_finds_what_is_published_now_and_its_version() {
    let _turn = crate::turn();
    run(async {
        let two = Two::start(Validation::Off).await;
        two.until_read("w", &pattern(&two.server, 5000, 0)).await;
        for round in 1..20 {
            let tensor = pattern(&two.server, if round % 2 == 0 { 5000 } else { 8 }, round);
            let version = two.server.publish("w", tensor.clone()).unwrap();
            let (before, messages) = (copied(), two.messages());
            let fetched = two.peer.fetch("w").versioned().await.unwrap();
            assert!(fetched.version == version && fetched.tensor.bytes() == tensor.bytes());
            assert_eq!((copied() - before, two.messages()), (tensor.bytes().len() as u64, messages));
        }
        let found = two.peer.fetch_many(["w", "w"]).await.unwrap();
        assert_eq!(found[0].bytes(), found[1].bytes());
        assert!(two.server.withdraw("w"));
        let nothing = two.peer.fetch("w").await.unwrap_err();
        assert!(
            matches!(&nothing, WorkerError::Remote { status, .. } if status.code == Code::NotFound),
            "{nothing}"
        );
        two.until_read("w", &pattern(&two.server, 9, 1)).await;
        // The memory of a tensor is free once it is replaced.
        let used = two.server.pool().stats().used_bytes;
        for round in 0..10 {
            two.server.publish("w", pattern(&two.server, 9, round)).unwrap();
        }
        assert_eq!(two.server.pool().stats().used_bytes, used);
        two.server.shutdown().await;
        let gone = two.peer.fetch("w").await.unwrap_err();
        assert!(!matches!(gone, WorkerError::Remote { .. }), "{gone}");
        two.client.shutdown().await;
    });
}

#[test]
fn a_list_that_waits_asks_for_its_last_name_alone() {
    let _turn = crate::turn();
    run(async {
        let (two, names) = (Two::start(Validation::Off).await, ["a", "b", "c"]);
        let publish =
            |round| names.map(|name| two.server.publish(name, pattern(&two.server, 5000, round)).unwrap());
        for name in names {
            two.until_read(name, &pattern(&two.server, 5000, 0)).await;
        }
        let mut known = publish(1)[2];
        for round in 2..5 {
            let (sent, written) = two.messages();
            let mut waits = two.peer.fetch_many(names).newer_than(known).versioned().into_future();
            assert!(futures::poll!(&mut waits).is_pending());
            assert_eq!(two.messages(), (sent + 1, written), "the request for the last");
            let latest = publish(round);
            let found = waits.await.unwrap();
            assert_eq!(two.messages().0, sent + 1, "the others are read");
            assert!(found.iter().zip(latest).all(|(found, version)| found.version == version));
            known = latest[2];
        }
        // What is published already is read.
        let (latest, messages) = (publish(5), two.messages());
        let found = two.peer.fetch_many(names).newer_than(known).versioned().await.unwrap();
        assert_eq!(two.messages(), messages);
        assert!(found.iter().zip(latest).all(|(found, version)| found.version == version));
        two.end().await;
    });
}

#[test]
fn a_tensor_is_copied_into_the_users_buffer_once() {
    let _turn = crate::turn();
    run(async {
        let two = Two::start(Validation::Off).await;
        for bytes in [8, LARGE] {
            let tensor = pattern(&two.server, bytes, 7);
            two.until_read("w", &tensor).await;
            for pool in [two.client.receive_pool(), two.client.pool()] {
                let buffer = pool.try_alloc(bytes).unwrap();
                let (given, before, messages) = (buffer.as_ptr(), copied(), two.messages());
                let filled = two.peer.fetch("w").into_buffer(buffer).dtype(DataType::U8).await.unwrap();
                assert_eq!(filled.buffer.as_ptr(), given);
                assert!(filled.bytes() == tensor.bytes() && filled.version.is_none());
                assert_eq!((copied() - before, two.messages()), (bytes as u64, messages));
            }
            let short = two.client.pool().try_alloc(bytes - 1).unwrap();
            let failed = two.peer.fetch("w").into_buffer(short).versioned().await.unwrap_err();
            assert!(matches!(failed.error, WorkerError::Mismatch { field: "length", .. }), "{failed}");
            assert_eq!(failed.buffer.map(|buffer| buffer.len()), Some(bytes - 1));
        }
        two.end().await;
    });
}

#[test]
fn contents_that_are_validated_are_asked_for() {
    let _turn = crate::turn();
    run(async {
        let two = Two::start(Validation::Xxh3).await;
        assert!(two.is_asked_for("w", &pattern(&two.server, 8, 0)).await);
        assert!(two.is_asked_for("v", &pattern(&two.server, LARGE, 0)).await);
        two.end().await;
    });
}

#[test]
fn a_view_is_read_out_of_the_catalogue_and_stays_what_it_was() {
    let _turn = crate::turn();
    run(async {
        let two = Two::start(Validation::Off).await;
        let tensor = pattern(&two.server, LARGE, 1);
        two.until_read("w", &tensor).await;
        let (before, messages) = (copied(), two.messages());
        let view = two.peer.fetch("w").sharing(Sharing::View).await.unwrap();
        assert_eq!((copied(), two.messages()), (before, messages), "neither a copy nor a message");
        assert!(view.buf().is_foreign() && view.bytes() == tensor.bytes());
        let expected = tensor.bytes().to_vec();
        drop(tensor);
        let used = || two.server.pool().stats().used_bytes;
        let one = used();
        two.server.publish("w", pattern(&two.server, 9, 2)).unwrap();
        assert!(used() > one, "the view holds the memory");
        assert!(two.server.pool().stats().retired_bytes >= LARGE as u64);
        for seed in 0..10 {
            let _other = pattern(&two.server, LARGE, seed);
            assert!(view.bytes() == expected);
        }
        drop(view);
        // The server notices by itself, without another publication.
        while two.server.pool().stats().retired_bytes > 0 {
            tokio::task::yield_now().await;
        }
        assert!(used() < one);
        two.end().await;
    });
}

#[test]
fn s1_a_view_outlives_its_connection() {
    let _turn = crate::turn();
    run(async {
        let two = Two::start(Validation::Off).await;
        let tensor = pattern(&two.server, LARGE, 1);
        two.until_read("w", &tensor).await;
        let view = two.peer.fetch("w").sharing(Sharing::View).await.unwrap();
        let expected = tensor.bytes().to_vec();
        drop(tensor);
        let pool = two.server.pool().clone();
        let Two { server, client, peer } = two;
        drop(peer);
        client.shutdown().await;
        server.shutdown().await;
        drop((client, server));
        for seed in 0..10 {
            let mut others = pool.try_alloc(LARGE).unwrap();
            others.fill(seed);
            assert!(view.bytes() == expected);
        }
        drop(view);
        while pool.stats().used_bytes > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(pool.stats().leaked_bytes, 0);
    });
}

#[test]
fn a_publisher_that_does_nothing_is_fetched_from() {
    let _turn = crate::turn();
    let (say, address) = mpsc::channel();
    let (go_on, sleeps) = mpsc::channel::<()>();
    let server = thread::spawn(move || {
        run(async {
            let server = Worker::builder("server").require(FabricKind::SHM).start().await.unwrap();
            server.publish("w", pattern(&server, LARGE, 4)).unwrap();
            say.send(server.address().to_owned()).unwrap();
            // Serves until the reader has asked once.
            while sleeps.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
            say.send(String::new()).unwrap();
            // And then blocks its runtime.
            sleeps.recv().unwrap();
            server.shutdown().await;
        });
    });
    run(async {
        let client = Worker::builder("client").require(FabricKind::SHM).start().await.unwrap();
        let peer = client.peer_at(&address.recv().unwrap()).await.unwrap();
        let expected = peer.fetch("w").await.unwrap();
        go_on.send(()).unwrap();
        address.recv().unwrap();
        for sharing in [Sharing::Copy, Sharing::View] {
            assert!(peer.fetch("w").sharing(sharing).await.unwrap().bytes() == expected.bytes());
        }
        go_on.send(()).unwrap();
        client.shutdown().await;
    });
    server.join().unwrap();
}
