//! Versions and waits over shm, tcp and verbs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use crate::editions::{CLIENT, REQUESTS, SERVER, Two};
use crate::{
    bounded::bounded,
    fabrics::{assert_moves_over, over},
    rdma::patient,
};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Mode, Validation};
use tensorwire_rendezvous::{Tensor, Worker};

async fn all_cases(kind: FabricKind, mode: Mode, validation: Validation) {
    let start = |name| {
        let builder = over(Worker::builder(name), kind).flow(|flow| flow.mode = mode).validation(validation);
        builder.flow(|flow| flow.requests_max = REQUESTS).timeout(patient(Duration::from_secs(20))).start()
    };
    let (server, client) = (start(SERVER).await.unwrap(), start(CLIENT).await.unwrap());
    let peer = client.peer_at(server.address()).await.unwrap();
    let two = Two { server, client, peer };
    two.every_case().await;
    assert_moves_over(&two.client, kind);
    two.the_end().await;
}

fn run(kind: FabricKind, mode: Mode, validation: Validation) {
    bounded(patient(Duration::from_secs(60)), all_cases(kind, mode, validation));
}

#[test]
fn versions_and_waits_over_shm() {
    run(FabricKind::SHM, Mode::default(), Validation::Off);
    run(FabricKind::SHM, Mode::default(), Validation::Xxh3);
}

#[test]
fn versions_and_waits_over_tcp() {
    run(FabricKind::TCP, Mode::default(), Validation::Off);
    run(FabricKind::TCP, Mode::default(), Validation::Crc32c);
}

#[test]
fn versions_and_waits_in_mode_original() {
    run(FabricKind::SHM, Mode::Original, Validation::Off);
    run(FabricKind::TCP, Mode::Original, Validation::Xxh3);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn versions_and_waits_over_verbs() {
    run(FabricKind::VERBS, Mode::default(), Validation::Xxh3);
    run(FabricKind::VERBS, Mode::Original, Validation::Off);
}

/// The fetch waits, and then nobody runs the tasks of the publisher's runtime.
#[test]
fn a_publication_is_sent_by_who_publishes() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let start = |name| {
        let builder = over(Worker::builder(name), FabricKind::SHM);
        builder.timeout(patient(Duration::from_secs(20))).start()
    };
    let of_server = runtime();
    let server = of_server.block_on(start(SERVER)).unwrap();
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| {
            runtime().block_on(async {
                let client = start(CLIENT).await.unwrap();
                let peer = client.peer_at(server.address()).await.unwrap();
                let fetched = peer.fetch("awaited").wait().await.unwrap().values::<u8>();
                client.shutdown().await;
                fetched
            })
        });
        let requests =
            || server.peers().iter().map(|peer| peer.counters.received.tensor_request).sum::<u64>();
        of_server.block_on(async {
            while requests() == 0 {
                tokio::task::yield_now().await;
            }
        });
        server.publish("awaited", Tensor::from_values(server.pool(), &[1], &[7u8]).unwrap()).unwrap();
        assert_eq!(fetched.join().unwrap().unwrap(), [7]);
    });
    of_server.block_on(server.shutdown());
}
