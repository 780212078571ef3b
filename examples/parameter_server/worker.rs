//! A process that computes gradients: it fetches the parameters, takes a batch of its own samples, sends the gradient.

use tensorwire::{Peer, Tensor, Worker, WorkerError};
use tensorwire_examples::{
    digits::{Batches, Digits},
    mlp::Mlp,
    training::BATCH_SIZE,
};

use crate::{
    WORKERS, children,
    failure::Failure,
    link::{Keys, builder, wire_shape, worker_name},
    options::Options,
    report::Report,
    server::{fetch_all, step_id},
    summary::Traffic,
};

/// Computes this worker's part of the steps, then waits until the launcher lets go.
pub(crate) async fn run(options: &Options, server: &str, index: usize) -> Result<(), Failure> {
    let mut parent = children::parent_lines();
    let worker = builder(&worker_name(index), options.fabric).start().await?;
    let server = worker.peer_at(server).await?;
    // The first fetch connects. Only then the server learns of this worker, so that it uses this connection too.
    fetch_all(&worker, &server).await?;
    Report::of("address", worker.address()).print();

    let training = async {
        train(&worker, &server, options, index).await?;
        traffic_with(&worker, &server).to_report().print();
        Ok::<(), WorkerError>(())
    };
    children::work_until_let_go(&mut parent, training).await?;
    worker.shutdown().await;
    Ok(())
}

async fn train(worker: &Worker, server: &Peer, options: &Options, index: usize) -> Result<(), WorkerError> {
    let keys = Keys::new(worker, index)?;
    let samples = Digits::load().training.shard(index, WORKERS);
    let mut batches = Batches::new(samples, BATCH_SIZE, options.seed.wrapping_add(index as u64));
    let mut mlp = Mlp::for_digits();
    let specs = mlp.tensors();
    let mut gradients = mlp.zero_gradients();
    for number in 0..options.steps_of(index, WORKERS) {
        let parameters = fetch_all(worker, server).await?;
        let loss = mlp.gradients(&parameters, batches.next_batch(), &mut gradients);

        let step = worker.step(step_id(index, number));
        for ((key, spec), gradient) in keys.gradients.iter().zip(&specs).zip(&gradients) {
            step.send(key, Tensor::from_values(worker.pool(), &wire_shape(spec), gradient)?)?;
        }
        step.send(&keys.loss, Tensor::from_values(worker.pool(), &[], &[loss])?)?;
        // Sending never waits. The server's answer does, so that no more than one gradient is on its way.
        step.recv(&keys.applied).await?;
        worker.cleanup(step.id());
    }
    Ok(())
}

/// What passed between this worker and the server, by the fabric's own counters.
fn traffic_with(worker: &Worker, server: &Peer) -> Traffic {
    let info = worker.peers().into_iter().find(|info| info.name == server.name());
    let fabric = info.as_ref().map(|info| info.fabric).unwrap_or_default();
    let transport =
        info.and_then(|info| info.transport).map_or_else(|| "none".to_owned(), |kind| kind.to_string());
    Traffic { sent: fabric.bytes_sent, received: fabric.bytes_received, transport }
}
