//! The two workers of pulls and receives.

use serde::{Deserialize, Serialize};
use tensorwire::{Worker, settings::Validation};

use super::{error::BenchError, fabrics::Opened};

/// The second process's worker.
pub(super) const SERVER: &str = "/job:bench/replica:0/task:0";
/// The measuring process's worker.
pub(super) const PULLER: &str = "/job:bench/replica:0/task:1";

/// Starts a worker that uses only one fabric.
pub(super) async fn start_worker(
    name: &str,
    opened: &Opened,
    validation: Validation,
) -> Result<Worker, BenchError> {
    let builder = Worker::builder(name).validation(validation);
    Ok(builder.local_fabrics(vec![opened.fabric.clone()]).start().await?)
}

/// Name of the `number`th worker that connects.
pub(super) fn client_name(number: u64) -> String {
    format!("/job:bench/replica:{number}/task:1")
}

/// Name of the `copy`th published tensor.
pub(super) fn tensor_name(copy: usize) -> String {
    format!("tensor {copy}")
}

/// The names of published tensors.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum Names {
    /// The names of [`tensor_name`].
    Short,
    /// Names that are too long for a catalogue, so that each pull asks the other process.
    InNoCatalogue,
}

impl Names {
    /// Name of the `copy`th published tensor.
    pub(super) fn of(self, copy: usize) -> String {
        match self {
            Self::Short => tensor_name(copy),
            Self::InNoCatalogue => format!("{:x<128}", tensor_name(copy)),
        }
    }
}

/// Name of the `key`th edge of a step.
pub(super) fn edge_name(key: usize) -> String {
    format!("edge {key}")
}

/// The one device of a worker.
pub(super) fn device_of(worker: &str) -> String {
    format!("{worker}/device:CPU:0")
}
