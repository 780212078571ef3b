//! The process that holds the parameters: it publishes them, receives gradients, and publishes what they make of them.

use std::sync::{Mutex, PoisonError};

use futures::future::try_join_all;
use tensorwire::{Tensor, Worker, WorkerError};
use tensorwire_examples::{
    mlp::{Mlp, TensorSpec},
    sgd::{Sgd, SgdConfig},
};
use tokio::sync::mpsc;

use crate::{
    WORKERS, block_on, children,
    failure::Failure,
    link::{Keys, SERVER, builder, wire_shape, worker_name},
    options::{Fabric, Options},
    report::Report,
};

/// Serves until the launcher lets go.
pub(crate) async fn run(options: &Options) -> Result<(), Failure> {
    let mut parent = children::parent_lines();
    let worker = builder(SERVER, options.fabric).start().await?;
    let model = Mutex::new(Model::publish_first(&worker, options.seed)?);
    Report::of("address", worker.address()).print();

    meet_workers(&worker, &mut parent).await?;
    let training = try_join_all((0..WORKERS).map(|index| serve_worker(&worker, &model, options, index)));
    // Trained: the parameters stay here until the launcher has fetched them.
    children::work_until_let_go(&mut parent, training).await?;
    worker.shutdown().await;
    Ok(())
}

/// Learns from the launcher where the workers are.
async fn meet_workers(worker: &Worker, parent: &mut mpsc::Receiver<Report>) -> Result<(), Failure> {
    for _ in 0..WORKERS {
        let line = parent.recv().await.ok_or(Failure::LauncherGone)?;
        let address: String = line.value("worker").ok_or(Failure::LauncherGone)?;
        worker.peer_at(&address).await?;
    }
    Ok(())
}

/// Receives one worker's gradients, one step after the other, and answers each when it has been applied.
async fn serve_worker(
    worker: &Worker,
    model: &Mutex<Model>,
    options: &Options,
    index: usize,
) -> Result<(), WorkerError> {
    let keys = Keys::new(worker, index)?;
    for number in 0..options.steps_of(index, WORKERS) {
        let step = worker.step(step_id(index, number));
        let gradients = try_join_all(keys.gradients.iter().map(|key| step.recv(key))).await?;
        if number > 0 {
            // The worker has gone on, so it has the answer to its last step, and nobody will ask for it again.
            worker.cleanup(step_id(index, number - 1));
        }
        let loss = step.recv(&keys.loss).await?.values::<f32>()?;
        let applied = model.lock().unwrap_or_else(PoisonError::into_inner).apply(worker, &gradients)?;
        step.send(&keys.applied, Tensor::from_values(worker.pool(), &[], &[applied])?)?;
        let loss = loss.first().copied().unwrap_or(f32::NAN);
        Report::of("applied", applied).with("loss", loss).with("worker", worker_name(index)).print();
    }
    Ok(())
}

/// Each worker has steps of its own, so that neither waits for the other.
pub(crate) fn step_id(index: usize, number: usize) -> i64 {
    (number * WORKERS + index) as i64
}

/// The parameters, as published.
struct Model {
    specs: Vec<TensorSpec>,
    parameters: Vec<Vec<f32>>,
    updated: Vec<Vec<f32>>,
    sgd: Sgd,
    applied: u64,
}

impl Model {
    fn publish_first(worker: &Worker, seed: u64) -> Result<Self, WorkerError> {
        let mlp = Mlp::for_digits();
        let model = Self {
            specs: mlp.tensors(),
            parameters: mlp.initial_parameters(seed),
            updated: mlp.zero_gradients(),
            sgd: Sgd::new(SgdConfig::default()),
            applied: 0,
        };
        model.publish(worker)?;
        Ok(model)
    }

    /// Takes one step along `gradients` and publishes the result. Gives the number of steps taken.
    fn apply(&mut self, worker: &Worker, gradients: &[Tensor]) -> Result<u64, WorkerError> {
        for (tensor, gradient) in gradients.iter().enumerate() {
            let gradient = gradient.values()?;
            self.sgd.update(tensor, &self.parameters[tensor], &gradient, &mut self.updated[tensor]);
        }
        std::mem::swap(&mut self.parameters, &mut self.updated);
        self.applied += 1;
        self.publish(worker)?;
        Ok(self.applied)
    }

    fn publish(&self, worker: &Worker) -> Result<(), WorkerError> {
        for (spec, values) in self.specs.iter().zip(&self.parameters) {
            // Workers that are being served keep the tensor they asked for; its memory comes back after that.
            worker.publish(&spec.name, Tensor::from_values(worker.pool(), &wire_shape(spec), values)?)?;
        }
        Ok(())
    }
}

/// For a client, here the launcher: fetches the parameters from the server at `address`.
pub(crate) fn fetch_parameters(fabric: Fabric, address: &str) -> Result<Vec<Vec<f32>>, Failure> {
    block_on(async {
        let client = builder("/job:launcher/replica:0/task:0", fabric).start().await?;
        let server = client.peer_at(address).await?;
        let parameters = fetch_all(&client, &server).await;
        client.shutdown().await;
        Ok(parameters?)
    })
}

/// Fetches all parameters at once.
pub(crate) async fn fetch_all(
    worker: &Worker,
    server: &tensorwire::Peer,
) -> Result<Vec<Vec<f32>>, WorkerError> {
    let specs = Mlp::for_digits().tensors();
    let fetched = try_join_all(specs.iter().map(|spec| worker.fetch(server, &spec.name))).await?;
    fetched.iter().map(Tensor::values).collect()
}
