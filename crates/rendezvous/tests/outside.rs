//! Futures of a worker that are awaited where no tokio runtime is, and runtimes that lack a driver.

use std::{future::IntoFuture, pin::pin, sync::mpsc, thread, time::Duration};

use futures::FutureExt;
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};
use tokio::runtime::{Builder, Runtime};

use crate::block_on::block_on;

const LIMIT: Duration = Duration::from_secs(30);

/// Runs `test` on a thread outside of tokio, and gives it a runtime to start workers on.
fn outside(test: impl FnOnce(&Runtime) + Send + 'static) {
    let (done, over) = mpsc::channel();
    let tested = thread::spawn(move || {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        test(&runtime);
        done.send(()).unwrap();
    });
    if over.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("not done within {LIMIT:?}");
    }
    tested.join().unwrap();
}

fn tensor(worker: &Worker) -> Tensor {
    Tensor::from_values(worker.pool(), &[1], &[7_u8]).unwrap()
}

/// Awaits `future` outside of tokio, and does `meanwhile` after it was polled for the first time.
fn awaited<F: IntoFuture<Output = Result<T, WorkerError>>, T>(
    name: &str,
    future: F,
    meanwhile: impl FnOnce(),
) -> T {
    let mut future = pin!(future.into_future());
    let ended = match future.as_mut().now_or_never() {
        Some(ended) => {
            meanwhile();
            ended
        }
        None => {
            meanwhile();
            block_on(future)
        }
    };
    ended.unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn nothing() {}

#[test]
fn every_future_of_a_worker_may_be_awaited_outside_of_tokio() {
    outside(|runtime| {
        for kind in [FabricKind::SHM, FabricKind::TCP] {
            let start = |name| runtime.block_on(Worker::builder(name).fabrics([kind]).start()).unwrap();
            let (server, client) = (start("server"), start("client"));
            let peer = awaited("peer_at", client.peer_at(server.address()), nothing);
            let back = awaited("wait_for_peer", server.wait_for_peer("client"), nothing);
            awaited("connect", peer.connect(), nothing);
            let publish = |name| server.publish(name, tensor(&server)).map(drop).unwrap();
            awaited("fetch", peer.fetch("one").wait(), || publish("one"));
            let version = awaited("versioned", peer.fetch("one").versioned(), nothing).version;
            awaited("newer_than", peer.fetch("one").newer_than(version), || publish("one"));
            let buffer = client.receive_pool().try_alloc(1).unwrap();
            block_on(peer.fetch("one").into_buffer(buffer)).unwrap();
            awaited("fetch_many", peer.fetch_many(["two", "three"]).wait(), || {
                ["two", "three"].into_iter().for_each(publish);
            });
            assert_eq!(awaited("list", peer.list(), nothing).len(), 3);
            let remote = peer.tensor("two").unwrap();
            awaited("tensor", remote.fetch(), nothing);
            let buffer = client.receive_pool().try_alloc(1).unwrap();
            block_on(remote.fetch_into(buffer)).unwrap();
            let offer = server.offer(tensor(&server));
            awaited("fetch_offered", peer.fetch_offered(offer.ticket(), LIMIT), nothing);

            let (sending, receiving) = (server.step(1), client.step(1));
            let send = |name| sending.to(&back).send(name, tensor(&server)).unwrap();
            awaited("recv", receiving.from(&peer).recv("a"), || send("a"));
            awaited("recv_many", receiving.from(&peer).recv_many(["b", "c"]), || {
                ["b", "c"].into_iter().for_each(send);
            });
            let key = server.key(server.name(), client.name(), "d").unwrap();
            awaited("recv_outputs", receiving.recv_outputs(std::slice::from_ref(&key)), || {
                sending.send(&key, tensor(&server)).unwrap();
            });
            let there = awaited("notes", peer.notes(1, 1), nothing);
            let here = awaited("notes", back.notes(1, 1), nothing);
            awaited("Notes::recv", there.recv(0), || {
                awaited("Notes::send", here.send(0, &[b"note"]), nothing);
            });

            let other = client.clone();
            let joined = thread::spawn(move || block_on(other.join()));
            block_on(client.shutdown());
            joined.join().unwrap();
            block_on(server.shutdown());
        }
    });
}

#[test]
fn a_worker_starts_only_on_a_runtime_that_has_what_it_needs() {
    let refused = |runtime: Option<Runtime>| {
        let started = Worker::client().start();
        let error = match runtime {
            Some(runtime) => runtime.block_on(started).unwrap_err(),
            None => block_on(started).unwrap_err(),
        };
        let WorkerError::Config { field: "runtime", remedy, .. } = error else { panic!("{error}") };
        remedy
    };
    assert!(refused(None).contains("inside a tokio runtime"));
    let only_time = Builder::new_current_thread().enable_time().build().unwrap();
    let only_io = Builder::new_current_thread().enable_io().build().unwrap();
    for (runtime, driver) in [(only_time, "io driver"), (only_io, "time driver")] {
        let remedy = refused(Some(runtime));
        assert!(remedy.contains(driver) && remedy.contains("enable_all"), "{remedy}");
    }
}
