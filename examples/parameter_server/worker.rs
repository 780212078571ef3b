//! A worker: it follows the parameters and publishes its gradients.

use std::collections::BTreeSet;

use futures::future::try_join_all;
use tensorwire::{Tensor, Worker, WorkerError, sets::Snapshot};
use tensorwire_examples::{
    command_line::{Flags, Job, Role},
    report::{Progress, Trained},
    rows::Rows,
    training::Model,
};
use tokio::time::Instant;

use crate::{
    following::{BEFORE, Following, clocks, parameters},
    node::{Failure, Node, ROWS, STEP, at, copy_of, gradient_of, rows_for},
    record::Record,
};

/// Under this name a worker publishes the loss of its last batch.
pub(crate) const LOSS: &str = "loss";
/// Under this name a worker publishes at the end how many bytes it has sent and received.
pub(crate) const MOVED: &str = "bytes moved";
/// Under this name a worker publishes at the end the transport of these bytes.
pub(crate) const TRANSPORT: &str = "transport";

/// Computes gradients until the training is over. Returns the last parameters.
pub(crate) async fn run(node: &Node, flags: &Flags, index: u32) -> Result<Trained, Failure> {
    let (model, following) = (node.plan.load()?, Following::new(node)?);
    let mut worker = Learner { node, flags, index, model, following };
    let mut record = Record::new(node, flags, index)?;
    let progress = Progress::new("training", flags.steps, !flags.launched && index == 0);
    let first = worker.first_step().await?;
    let (mut step, mut loss, began) = (first, f32::NAN, Instant::now());
    let last = loop {
        let Some(versions) = worker.versions(step, record.is_due(step)).await? else {
            step = worker.go_back(step).await?;
            continue;
        };
        record.note(&mut worker.model, step, &versions, &progress).await?;
        if step >= flags.steps {
            break versions;
        }
        let Some(gradient) = worker.gradient(step, &versions).await? else {
            step = worker.go_back(step).await?;
            continue;
        };
        loss = worker.publish(step, gradient)?;
        step += 1;
        progress.show(step, loss);
    };
    let (seconds, (moved, transport)) = (began.elapsed().as_secs_f64(), traffic(&node.worker));
    node.publish_values(MOVED, &[moved])?;
    node.publish_values(TRANSPORT, transport.as_bytes())?;
    node.publish_values(LOSS, &[loss])?;
    node.publish_values(STEP, &[step])?;
    let parameters = parameters(node, &last)?.into_iter().map(<[f32]>::to_vec).collect();
    Ok(Trained { parameters, steps: step.saturating_sub(first), seconds, moved, transport })
}

struct Learner<'node> {
    node: &'node Node,
    flags: &'node Flags,
    index: u32,
    model: Model,
    following: Following<'node>,
}

/// The rows that a gradient has, the loss, and the derivatives by all parameters.
type Gradient = (Rows, f32, Vec<Vec<f32>>);

impl Learner<'_> {
    /// The step of the server that is furthest behind: it may lack the gradient of a worker that was killed meanwhile.
    async fn first_step(&self) -> Result<u64, Failure> {
        let names = [STEP.to_owned()];
        let clocks =
            try_join_all(self.node.all(Job::Ps).map(|server| self.node.fetch(server, &names))).await?;
        let own = clocks.iter().flatten().map(|clocks| self.own_clock(clocks));
        Ok(own.collect::<Result<Vec<_>, _>>()?.into_iter().min().unwrap_or(0))
    }

    fn own_clock(&self, clocks: &Tensor) -> Result<u64, WorkerError> {
        Ok(clocks.values()?.get(self.index as usize).copied().unwrap_or(0))
    }

    /// The servers' versions with all gradients that this worker computed before `step`; at the end, with those of every worker.
    /// None of the linear model, unless they `are_needed`. `None` if a server has gone back to a checkpoint before that.
    async fn versions(&mut self, step: u64, are_needed: bool) -> Result<Option<Vec<Snapshot>>, Failure> {
        let (own, is_last) = (self.index as usize, step >= self.flags.steps);
        if self.node.is_sparse() && !is_last && !are_needed {
            return Ok(Some(Vec::new()));
        }
        let went_back = |clocks: &[u64]| clocks[own] + 1 < step;
        let is_complete = |clocks: &[u64]| {
            let slowest = clocks.iter().min().copied().unwrap_or(0);
            if is_last { slowest >= self.flags.steps } else { clocks[own] >= step }
        };
        let mut versions = self.following.until(|clocks| is_complete(clocks) || went_back(clocks)).await?;
        for (server, version) in self.node.all(Job::Ps).zip(&mut versions) {
            if went_back(&clocks(version)?) {
                return Ok(None);
            }
            if self.flags.issync == 1 && version.version() > step {
                let before = self.node.peer(server)?.set(BEFORE);
                *version = self.node.patiently(async || before.fetch().await).await?;
            }
        }
        if !self.node.is_sparse() {
            self.copy(&versions).await?;
        }
        Ok(Some(versions))
    }

    /// Commits what the servers have committed. That costs nothing, because the received tensors are committed as they are: they
    /// are copies for servers that are killed.
    async fn copy(&self, versions: &[Snapshot]) -> Result<(), WorkerError> {
        for (server, version) in self.node.all(Job::Ps).zip(versions) {
            let copy = self.node.worker.set(&copy_of(server.index));
            if copy.version() < Some(version.version()) {
                copy.commit(version.version(), version.iter().map(|(name, tensor)| (name, tensor.clone())))
                    .await?;
            }
        }
        Ok(())
    }

    /// The gradient of `step`; `None` if a server has gone back to a checkpoint before that.
    async fn gradient(&mut self, step: u64, versions: &[Snapshot]) -> Result<Option<Gradient>, Failure> {
        // The step determines the samples, so a restarted worker takes the same ones.
        let batch = step * u64::from(self.node.workers) + u64::from(self.index);
        let samples = batch * Model::BATCH..(batch + 1) * Model::BATCH;
        if !self.node.is_sparse() {
            let (loss, gradient) = self.model.gradients(&parameters(self.node, versions)?, samples);
            return Ok(Some((Rows::All, loss, gradient)));
        }
        let rows = self.model.touched(samples.clone());
        Ok(self.pull(step, &rows).await?.map(|parameters| {
            let (loss, gradient) = self.model.gradients(&parameters, samples);
            (rows, loss, gradient)
        }))
    }

    /// Publishes the numbers of the rows that this worker needs, and fetches the rows, which each server then publishes. The
    /// other rows are 0.
    async fn pull(&self, step: u64, rows: &Rows) -> Result<Option<Vec<Vec<f32>>>, Failure> {
        if let Rows::Some(rows) = rows {
            let numbers: Vec<u64> = rows.iter().map(|&row| row as u64).collect();
            let tensor = Tensor::from_values(self.node.worker.pool(), &[numbers.len() as u64], &numbers)?;
            self.node.publish_at(ROWS, step, tensor)?;
        }
        let answers = try_join_all(self.node.all(Job::Ps).map(|server| self.rows_of(server, step))).await?;
        let mut parameters: Vec<_> =
            self.node.tensors.iter().map(|spec| vec![0.0; spec.elements()]).collect();
        for (server, answer) in self.node.all(Job::Ps).zip(answers) {
            let Some(answer) = answer else { return Ok(None) };
            for (place, moved) in self.node.tensors_of(server.index).zip(&answer) {
                let (spec, values) = (&self.node.tensors[place], &mut parameters[place]);
                rows.zip(spec, values, moved.as_slice()?, |value, moved| *value = moved)
                    .ok_or_else(|| format!("{server} sent other rows of {spec:?} than it was asked for"))?;
            }
        }
        Ok(Some(parameters))
    }

    /// The rows that a server publishes for this worker in `step`; `None` if it has gone back to a checkpoint before that.
    async fn rows_of(&self, server: Role, step: u64) -> Result<Option<Vec<Tensor>>, Failure> {
        let name = |place: usize| at(&rows_for(&self.node.tensors[place], self.index), step);
        let names: Vec<String> = self.node.tensors_of(server.index).map(name).collect();
        let peer = self.node.peer(server)?;
        let attempt = async || {
            if self.own_clock(&peer.fetch(STEP).await?)? + 1 < step {
                return Ok::<_, WorkerError>(None);
            }
            peer.fetch_many(&names).wait().await.map(Some)
        };
        self.node.patiently(attempt).await
    }

    /// Publishes the gradient of `step`, and that it is complete. Returns the loss.
    fn publish(&self, step: u64, (rows, loss, gradient): Gradient) -> Result<f32, Failure> {
        for (spec, slopes) in self.node.tensors.iter().zip(&gradient) {
            let taken = rows.taken(spec, slopes).ok_or("a gradient does not fit the model")?;
            let tensor = self.node.tensor(&rows.shape(spec), &taken)?;
            self.node.publish_at(&gradient_of(spec), step, tensor)?;
        }
        self.node.publish_values(LOSS, &[loss])?;
        self.node.publish_values(STEP, &[step])?;
        Ok(loss)
    }

    /// Begins again where the servers are, and withdraws what it has published for later steps.
    async fn go_back(&mut self, step: u64) -> Result<u64, Failure> {
        let names = self.node.tensors.iter().map(gradient_of).chain([ROWS.to_owned()]);
        for name in names {
            for old in step.saturating_sub(2)..=step {
                self.node.worker.withdraw(&at(&name, old));
            }
        }
        self.following = Following::new(self.node)?;
        self.first_step().await
    }
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
