//! The cost of each kind of transfer over shm, tcp and verbs, by whole workers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{sync::Arc, time::Duration};

use crate::tables::{RECEIVER, SENDER, Two};
use crate::{
    bounded::bounded,
    fabrics::{assert_moves_over, over},
    rdma::patient,
};
use tensorwire_fabric::{FabricKind, TokioRuntime};
use tensorwire_protocol::{Mode, Validation};
use tensorwire_rendezvous::Worker;

async fn all_cases(kind: FabricKind, mode: Mode, validation: Validation) {
    let start = |name| {
        let builder = over(Worker::builder(name), kind).flow(|flow| flow.mode = mode).validation(validation);
        builder.timeout(patient(Duration::from_secs(20))).start()
    };
    let (sender, receiver) = (start(SENDER).await.unwrap(), start(RECEIVER).await.unwrap());
    receiver.peer_at(sender.address()).await.unwrap();
    let two = Two { sender, receiver, runtime: Arc::new(TokioRuntime::current().unwrap()), mode, validation };
    two.all_cases().await;
    assert_moves_over(&two.receiver, kind);
    assert_moves_over(&two.sender, kind);
    two.receiver.shutdown().await;
    two.sender.shutdown().await;
}

fn run(kind: FabricKind, mode: Mode, validation: Validation) {
    bounded(patient(Duration::from_secs(60)), all_cases(kind, mode, validation));
}

#[test]
fn s3_6_every_case_costs_what_the_original_does_over_shm() {
    run(FabricKind::SHM, Mode::Original, Validation::Off);
}

#[test]
fn s3_6_every_case_costs_what_the_original_does_over_tcp() {
    run(FabricKind::TCP, Mode::Original, Validation::Off);
}

#[test]
fn s3_6_every_case_costs_what_the_table_says_over_shm() {
    run(FabricKind::SHM, Mode::default(), Validation::Off);
}

#[test]
fn s3_6_every_case_costs_what_the_table_says_over_tcp() {
    run(FabricKind::TCP, Mode::default(), Validation::Off);
}

#[test]
fn s3_11_a_validated_case_costs_what_the_original_does_over_shm() {
    run(FabricKind::SHM, Mode::Original, Validation::Crc32c);
}

#[test]
fn s3_11_a_validated_case_costs_what_the_original_does_over_tcp() {
    run(FabricKind::TCP, Mode::Original, Validation::Xxh3);
}

#[test]
fn s3_11_a_validated_case_costs_what_the_table_says_over_shm() {
    run(FabricKind::SHM, Mode::default(), Validation::Xxh3);
}

#[test]
fn s3_11_a_validated_case_costs_what_the_table_says_over_tcp() {
    run(FabricKind::TCP, Mode::default(), Validation::Crc32c);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn s3_6_every_case_costs_what_the_original_does_over_verbs() {
    run(FabricKind::VERBS, Mode::Original, Validation::Off);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn s3_6_every_case_costs_what_the_table_says_over_verbs() {
    run(FabricKind::VERBS, Mode::default(), Validation::Off);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn s3_11_a_validated_case_costs_what_the_original_does_over_verbs() {
    run(FabricKind::VERBS, Mode::Original, Validation::Xxh3);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn s3_11_a_validated_case_costs_what_the_table_says_over_verbs() {
    run(FabricKind::VERBS, Mode::default(), Validation::Crc32c);
}
