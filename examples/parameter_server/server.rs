//! A server: it has some tensors of the parameters, and moves them along the workers' gradients.

use futures::{
    StreamExt as _,
    future::{LocalBoxFuture, join_all, try_join_all},
    stream::FuturesUnordered,
};
use tensorwire::{Code, Tensor, WorkerError, sets::Snapshot};
use tensorwire_examples::{
    checkpoint,
    command_line::{Flags, Job, Role},
    mlp::TensorSpec,
    rows::Rows,
    training::descend,
};

use crate::{
    following::{BEFORE, CLOCKS, PARAMETERS, clocks},
    node::{Failure, Node, ROWS, STEP, at, copy_of, gradient_of, rows_for},
};

/// Serves until all gradients are applied; without a launcher, until the workers have gone.
pub(crate) async fn run(node: &Node, flags: &Flags, index: u32) -> Result<(), Failure> {
    let mut server = Server::start(node, flags, index).await?;
    server.serve().await?;
    if !flags.launched {
        server.wait_for_farewells().await;
    }
    Ok(())
}

struct Server<'node> {
    node: &'node Node,
    flags: &'node Flags,
    /// The tensors that this server has, and their values.
    tensors: Vec<TensorSpec>,
    values: Vec<Vec<f32>>,
    /// For each worker, how many of its gradients are applied.
    clocks: Vec<u64>,
    /// The newest version, as it was committed.
    committed: Vec<(String, Tensor)>,
}

/// What comes from a worker.
enum Come {
    /// It pulls these rows.
    Pull(u32, Rows),
    /// It pushes the gradient of these rows: a tensor for each of this server's.
    Push(u32, Rows, Vec<Tensor>),
}

impl<'node> Server<'node> {
    /// Continues from the newest copy that a worker has, which is there if this server was killed; without any, from a
    /// checkpoint; else the training is new.
    async fn start(node: &'node Node, flags: &'node Flags, index: u32) -> Result<Self, Failure> {
        let places: Vec<usize> = node.tensors_of(index).collect();
        let tensors: Vec<TensorSpec> = places.iter().map(|&place| node.tensors[place].clone()).collect();
        let (values, clocks) = if let Some(copy) = newest_copy(node, index).await? {
            let values = tensors.iter().map(|spec| {
                let tensor = copy.get(&spec.name).ok_or("a copy lacks a tensor")?;
                Ok::<_, Failure>(tensor.values()?)
            });
            (values.collect::<Result<_, _>>()?, clocks(&copy)?)
        } else {
            let (step, mut all) = match flags.restored_from() {
                Some(path) => checkpoint::read(path, &node.tensors)?,
                None => (0, node.plan.initial_parameters()),
            };
            let own = places.iter().map(|&place| std::mem::take(&mut all[place]));
            (own.collect(), vec![step; node.workers as usize])
        };
        Ok(Self { node, flags, tensors, values, clocks, committed: Vec::new() })
    }

    /// Synchronously, a version is made from one gradient of each worker, else from each gradient that comes.
    async fn serve(&mut self) -> Result<(), Failure> {
        let at_once = if self.flags.issync == 1 { self.clocks.len() } else { 1 };
        let (mut idle, mut arrived) = ((0..self.node.workers).collect::<Vec<_>>(), Vec::new());
        let mut waiting = FuturesUnordered::new();
        self.commit().await?;
        loop {
            let slowest = self.clocks.iter().min().copied().unwrap_or(0);
            let is_next = |worker: &mut u32| {
                let clock = self.clocks[*worker as usize];
                clock < self.flags.steps && clock <= slowest + self.flags.staleness
            };
            for worker in idle.extract_if(.., is_next) {
                waiting.push(self.request(worker));
            }
            match waiting.next().await.transpose()? {
                None => return Ok(()),
                Some(Come::Pull(worker, rows)) => {
                    self.answer(worker, &rows)?;
                    waiting.push(self.gradient(worker, rows));
                }
                Some(Come::Push(worker, rows, gradients)) => arrived.push((worker, rows, gradients)),
            }
            if arrived.len() == at_once {
                idle.extend(arrived.iter().map(|(worker, ..)| *worker));
                self.apply(&mut arrived)?;
                self.commit().await?;
            }
        }
    }

    /// What a worker needs or has computed next.
    fn request(&self, worker: u32) -> LocalBoxFuture<'node, Result<Come, Failure>> {
        if !self.node.is_sparse() {
            return self.gradient(worker, Rows::All);
        }
        let (node, role) = (self.node, Role { job: Job::Worker, index: worker });
        let names = [at(ROWS, self.clocks[worker as usize])];
        Box::pin(async move {
            let rows = node.fetch(role, &names).await?[0].values::<u64>()?;
            Ok(Come::Pull(worker, Rows::Some(rows.into_iter().map(|row| row as usize).collect())))
        })
    }

    /// The gradient that a worker computes next.
    fn gradient(&self, worker: u32, rows: Rows) -> LocalBoxFuture<'node, Result<Come, Failure>> {
        let (node, role, step) =
            (self.node, Role { job: Job::Worker, index: worker }, self.clocks[worker as usize]);
        let names: Vec<String> = self.tensors.iter().map(|spec| at(&gradient_of(spec), step)).collect();
        Box::pin(async move { Ok(Come::Push(worker, rows, node.fetch(role, &names).await?)) })
    }

    /// Publishes the rows that a worker pulls.
    fn answer(&self, worker: u32, rows: &Rows) -> Result<(), Failure> {
        for (spec, values) in self.tensors.iter().zip(&self.values) {
            let taken = rows.taken(spec, values).ok_or_else(|| misfit(worker, spec))?;
            let tensor = self.node.tensor(&rows.shape(spec), &taken)?;
            self.node.publish_at(&rows_for(spec, worker), self.clocks[worker as usize], tensor)?;
        }
        Ok(())
    }

    /// Moves the tensors along the gradients, each with one share of as many as there are workers. Gradients are summed in the
    /// order of the workers and not of arrival, so that the result is the same in each run.
    fn apply(&mut self, arrived: &mut Vec<(u32, Rows, Vec<Tensor>)>) -> Result<(), Failure> {
        arrived.sort_by_key(|(worker, ..)| *worker);
        let share = 1.0 / self.clocks.len() as f32;
        for (place, (spec, values)) in self.tensors.iter().zip(&mut self.values).enumerate() {
            let mut mean = vec![0.0; spec.elements()];
            for (worker, rows, gradients) in &*arrived {
                let gradient = gradients[place].as_slice::<f32>()?;
                rows.zip(spec, &mut mean, gradient, |sum, slope| *sum += slope)
                    .ok_or_else(|| misfit(*worker, spec))?;
            }
            mean.iter_mut().for_each(|sum| *sum *= share);
            descend(values, &mean, self.flags.learning_rate);
        }
        arrived.drain(..).for_each(|(worker, ..)| self.clocks[worker as usize] += 1);
        Ok(())
    }

    /// Commits the tensors as the next version: the step if all workers are at the same one, else the number of gradients.
    async fn commit(&mut self) -> Result<(), Failure> {
        let tensor = |(spec, values): (&TensorSpec, &Vec<f32>)| {
            Ok((spec.name.clone(), self.node.tensor(&Rows::All.shape(spec), values)?))
        };
        let tensors = self.tensors.iter().zip(&self.values).map(tensor);
        let mut tensors = tensors.collect::<Result<Vec<_>, WorkerError>>()?;
        let clocks = Tensor::from_values(self.node.worker.pool(), &[self.clocks.len() as u64], &self.clocks)?;
        tensors.push((CLOCKS.to_owned(), clocks));
        let before = std::mem::replace(&mut self.committed, tensors.clone());
        let version = if self.flags.issync == 1 {
            // A worker that was killed may have to repeat its last step.
            if !before.is_empty() {
                self.node.worker.set(BEFORE).commit(self.clocks[0], before).await?;
            }
            self.clocks[0]
        } else {
            self.clocks.iter().sum()
        };
        self.node.worker.set(PARAMETERS).commit(version, tensors).await?;
        Ok(self.node.publish_values(STEP, &self.clocks)?)
    }

    /// Waits until every worker has ended. No worker publishes this name, so each fetch ends with its worker.
    async fn wait_for_farewells(&self) {
        let waiting = self.node.all(Job::Worker).map(|worker| async move {
            let Ok(peer) = self.node.peer(worker) else { return };
            let _ = peer.fetch("farewell").wait().await;
        });
        join_all(waiting).await;
    }
}

/// The newest copy of what server `index` has committed, once every worker has answered.
async fn newest_copy(node: &Node, index: u32) -> Result<Option<Snapshot>, Failure> {
    let (name, workers) = (&copy_of(index), node.all(Job::Worker));
    let copies = workers.map(|worker| async move {
        let copy = node.peer(worker)?.set(name);
        let fetched = node.patiently(async || match copy.fetch().await {
            Err(WorkerError::Remote { status, .. }) if status.code == Code::NotFound => Ok(None),
            fetched => fetched.map(Some),
        });
        fetched.await
    });
    let copies = try_join_all(copies).await?;
    Ok(copies.into_iter().flatten().max_by_key(Snapshot::version))
}

fn misfit(worker: u32, spec: &TensorSpec) -> Failure {
    format!("what worker {worker} sent does not fit {spec:?}; run one version of this example everywhere")
        .into()
}
