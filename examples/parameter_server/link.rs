//! What server, workers and launcher agree on: names, and the keys of what they send.

use tensorwire::{FabricKind, Key, Worker, WorkerBuilder, WorkerError};
use tensorwire_examples::mlp::{Mlp, TensorSpec};

use crate::options::Fabric;

/// The server's name.
pub(crate) const SERVER: &str = "/job:ps/replica:0/task:0";

/// The name of worker `index`.
pub(crate) fn worker_name(index: usize) -> String {
    format!("/job:worker/replica:0/task:{index}")
}

/// Settings of a process called `name`.
pub(crate) fn builder(name: &str, fabric: Fabric) -> WorkerBuilder {
    let builder = Worker::builder(name);
    match fabric {
        Fabric::Auto => builder,
        Fabric::Shm => builder.require(FabricKind::Shm),
        Fabric::Tcp => builder.require(FabricKind::Tcp),
    }
}

/// The keys that pass between the server and one worker.
#[derive(Debug)]
pub(crate) struct Keys {
    /// One gradient for each tensor, from the worker.
    pub(crate) gradients: Vec<Key>,
    /// Mean loss of the batch, from the worker.
    pub(crate) loss: Key,
    /// How many gradients the server has applied, from the server: it answers each gradient with this.
    pub(crate) applied: Key,
}

impl Keys {
    /// Between the server and worker `index`, as seen by `own`, which is one of the two.
    pub(crate) fn new(own: &Worker, index: usize) -> Result<Self, WorkerError> {
        let (server, worker) = (device(SERVER), device(&worker_name(index)));
        let gradient =
            |tensor: &TensorSpec| own.key(&worker, &server, &format!("gradient of {}", tensor.name));
        Ok(Self {
            gradients: Mlp::for_digits().tensors().iter().map(gradient).collect::<Result<_, _>>()?,
            loss: own.key(&worker, &server, "loss")?,
            applied: own.key(&server, &worker, "applied")?,
        })
    }
}

fn device(worker: &str) -> String {
    format!("{worker}/device:CPU:0")
}

/// The shape of a tensor as the wire has it.
pub(crate) fn wire_shape(tensor: &TensorSpec) -> Vec<u64> {
    tensor.shape.iter().map(|&dimension| dimension as u64).collect()
}
