//! The two workers of pulls and receives.

use std::sync::Arc;

use tensorwire::{FabricKind, Runtime, Validation, Worker};

use super::{
    arguments::{BenchFabric, WaitChoice},
    error::BenchError,
    fabrics,
};

/// The second process's worker.
pub(super) const SERVER: &str = "/job:bench/replica:0/task:0";
/// The measuring process's worker.
pub(super) const PULLER: &str = "/job:bench/replica:0/task:1";

/// Starts a worker that uses `fabric` alone.
pub(super) async fn start_worker(
    name: &str,
    fabric: BenchFabric,
    (wait, validation): (WaitChoice, Validation),
    runtime: Arc<dyn Runtime>,
) -> Result<Worker, BenchError> {
    let builder = Worker::builder(name).validation(validation);
    let builder = match fabric {
        BenchFabric::Grpc => builder.require(FabricKind::Grpc),
        _ => builder.local_fabrics(vec![fabrics::open(fabric, wait, runtime)?]),
    };
    Ok(builder.start().await?)
}

/// Name of the `copy`th published tensor.
pub(super) fn tensor_name(copy: usize) -> String {
    format!("tensor {copy}")
}

/// Name of the `key`th edge of a step.
pub(super) fn edge_name(key: usize) -> String {
    format!("edge {key}")
}

/// The one device of a worker.
pub(super) fn device_of(worker: &str) -> String {
    format!("{worker}/device:CPU:0")
}
