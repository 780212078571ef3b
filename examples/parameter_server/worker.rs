//! A worker: it fetches the parameters of each step and publishes its gradient.

use std::collections::BTreeSet;

use futures::future::try_join_all;
use tensorwire::{Tensor, Worker, WorkerError};
use tensorwire_examples::{
    command_line::{Flags, Job},
    report::{Progress, Trained},
    training::Model,
};
use tokio::time::Instant;

use crate::node::{Failure, Node, STEP, at, floats, gradient_at};

/// Under this name a worker publishes the loss of its last batch.
pub(crate) const LOSS: &str = "loss";
/// Under this name a worker publishes at the end how many bytes it has sent and received.
pub(crate) const MOVED: &str = "bytes moved";
/// Under this name a worker publishes at the end the transport of these bytes.
pub(crate) const TRANSPORT: &str = "transport";

/// Computes gradients until the training is over. Returns the last parameters.
pub(crate) async fn run(node: &Node, flags: &Flags, index: u32) -> Result<Trained, Failure> {
    let mut model = Model::new(flags.seed);
    let first = first_step(node).await?;
    let (progress, began) =
        (Progress::new("training", flags.steps, !flags.launched && index == 0), Instant::now());
    let mut loss = f32::NAN;
    for step in first..flags.steps {
        let parameters = fetch_and_copy(node, step).await?;
        // The step determines the samples, so a restarted worker takes the same ones.
        let batch = step * u64::from(node.workers) + u64::from(index);
        let samples = batch * Model::BATCH..(batch + 1) * Model::BATCH;
        let gradients;
        (loss, gradients) = model.gradients(&parameters, samples);
        publish(node, step, loss, &gradients)?;
        progress.show(step + 1, loss);
    }
    let parameters = fetch_and_copy(node, flags.steps).await?;
    let (seconds, (moved, transport)) = (began.elapsed().as_secs_f64(), traffic(&node.worker));
    node.publish_values(MOVED, &[moved])?;
    node.publish_values(TRANSPORT, transport.as_bytes())?;
    node.publish_values(LOSS, &[loss])?;
    node.publish_values(STEP, &[flags.steps])?;
    Ok(Trained { parameters, steps: flags.steps - first, seconds, moved, transport })
}

/// The step of the server that is furthest behind: it may lack the gradient of a worker that was killed meanwhile. The
/// others still have that step.
async fn first_step(node: &Node) -> Result<u64, Failure> {
    let names = [STEP.to_owned()];
    let steps = try_join_all(node.all(Job::Ps).map(|server| node.fetch(server, &names))).await?;
    let steps: Result<Vec<Vec<u64>>, _> = steps.iter().flatten().map(Tensor::values).collect();
    Ok(steps?.into_iter().flatten().min().unwrap_or(0))
}

/// The parameters at the beginning of `step`. Publishes the received tensors as they are, which costs nothing: they are
/// a copy for a server that was killed.
async fn fetch_and_copy(node: &Node, step: u64) -> Result<Vec<Vec<f32>>, Failure> {
    let fetched = node.fetch_parameters(step).await?;
    let parameters = floats(&fetched, &node.tensors)?;
    for (tensor, spec) in fetched.into_iter().zip(&node.tensors) {
        node.publish(at, spec, step, tensor)?;
    }
    Ok(parameters)
}

/// Publishes the results of `step`, and that it is complete.
fn publish(node: &Node, step: u64, loss: f32, gradients: &[Vec<f32>]) -> Result<(), WorkerError> {
    for (spec, gradient) in node.tensors.iter().zip(gradients) {
        node.publish(gradient_at, spec, step, node.tensor(spec, gradient)?)?;
    }
    node.publish_values(LOSS, &[loss])?;
    node.publish_values(STEP, &[step])
}

/// Bytes sent to and received from the servers, as the fabrics count them, and their transport.
fn traffic(worker: &Worker) -> (u64, String) {
    let mut servers = worker.peers();
    servers.retain(|peer| peer.name.starts_with("/job:ps/"));
    let transports: BTreeSet<_> = servers.iter().filter_map(|peer| peer.transport).collect();
    let transports: Vec<String> = transports.iter().map(ToString::to_string).collect();
    let moved = servers.iter().map(|peer| peer.fabric.bytes_sent + peer.fabric.bytes_received).sum();
    (moved, transports.join(" and "))
}
