//! Arrays of other crates as tensors, and tensors as arrays: without a copy, and through workers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bytes;
#[cfg(feature = "dlpack")]
mod dlpack;
#[cfg(feature = "ndarray")]
mod ndarray;
#[cfg(feature = "safetensors")]
mod safetensors;

use std::{fmt::Debug, time::Duration};

use crate::{bounded::bounded, fabrics::over, rdma::patient, two::Two};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};

/// Runs `test` over shared memory and over TCP, with a watchdog.
fn on_each_fabric(test: impl AsyncFn(Two)) {
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        bounded(patient(Duration::from_secs(60)), async {
            test(Two::of(|name| over(Worker::builder(name), kind)).await).await;
        });
    }
}

/// The tensor that `make` makes of memory of the worker is published, and fetched over shared memory and over TCP.
fn arrives(make: impl Fn(&Worker) -> Tensor) {
    on_each_fabric(async |two| {
        let sent = make(&two.server);
        two.server.publish("array", sent.clone()).unwrap();
        let got = two.peer.fetch("array").await.unwrap();
        assert_eq!(got.metadata(), sent.metadata());
        assert!(got.bytes() == sent.bytes());
        two.end().await;
    });
}

/// What the error says is wrong with the tensor.
fn problem<T: Debug>(result: Result<T, WorkerError>) -> String {
    match result {
        Err(WorkerError::InvalidTensor { problem }) => problem,
        other => panic!("{other:?}"),
    }
}
