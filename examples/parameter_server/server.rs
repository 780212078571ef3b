//! A server: it holds some tensors of the parameters, and moves them along the workers' gradients.

use futures::future::{join_all, try_join_all};
use tensorwire::{Code, WorkerError};
use tensorwire_examples::{
    command_line::{Flags, Job, Role},
    mlp::TensorSpec,
    training::{Model, descend},
};

use crate::node::{Failure, Node, STEP, at, floats, gradient_at};

/// Serves step after step. Ends when the last parameters are published; without a launcher, when the workers have gone.
pub(crate) async fn run(node: &Node, flags: &Flags, index: u32) -> Result<(), Failure> {
    let tensors = node.tensors_of(index).map(|place| node.tensors[place].clone()).collect();
    let server = Server { node, tensors };
    let (mut step, mut values) = match server.newest_copy().await? {
        Some(copy) => copy,
        None => (0, server.fresh(flags.seed, index)),
    };
    loop {
        server.publish(step, &values)?;
        if step == flags.steps {
            break;
        }
        let gradients = server.mean_gradients(step).await?;
        for (values, gradient) in values.iter_mut().zip(&gradients) {
            descend(values, gradient, flags.learning_rate);
        }
        step += 1;
    }
    if !flags.launched {
        server.wait_for_farewells().await;
    }
    Ok(())
}

struct Server<'node> {
    node: &'node Node,
    /// The tensors that this server holds.
    tensors: Vec<TensorSpec>,
}

impl Server<'_> {
    fn fresh(&self, seed: u64, index: u32) -> Vec<Vec<f32>> {
        let mut all = Model::new(seed).initial_parameters();
        self.node.tensors_of(index).map(|place| std::mem::take(&mut all[place])).collect()
    }

    /// Step and tensors of the worker that is furthest, once every worker has answered. Workers have copies if this
    /// server was restarted; without any, the training is new.
    async fn newest_copy(&self) -> Result<Option<(u64, Vec<Vec<f32>>)>, Failure> {
        let asking = self
            .node
            .all(Job::Worker)
            .map(|worker| async move { self.node.patiently(async || self.copy_at(worker).await).await });
        let copies = try_join_all(asking).await?;
        Ok(copies.into_iter().flatten().max_by_key(|(step, _)| *step))
    }

    async fn copy_at(&self, worker: Role) -> Result<Option<(u64, Vec<Vec<f32>>)>, WorkerError> {
        let peer = self.node.peer(worker)?;
        let step = match peer.fetch(STEP).await {
            Err(WorkerError::Remote { status, .. }) if status.code == Code::NotFound => return Ok(None),
            fetched => fetched?.values::<u64>()?.first().copied().unwrap_or(0),
        };
        let names: Vec<String> = self.tensors.iter().map(|tensor| at(tensor, step)).collect();
        let values = floats(&peer.fetch_many(&names).await?, &self.tensors)?;
        Ok(Some((step, values)))
    }

    /// Publishes the tensors at the beginning of `step`, and that it is reached.
    fn publish(&self, step: u64, values: &[Vec<f32>]) -> Result<(), WorkerError> {
        for (spec, values) in self.tensors.iter().zip(values) {
            self.node.publish(at, spec, step, self.node.tensor(spec, values)?)?;
        }
        self.node.publish_values(STEP, &[step])
    }

    /// The mean of all workers' gradients for each tensor, summed in the order of the workers and not of arrival, so
    /// that the result is the same in each run.
    async fn mean_gradients(&self, step: u64) -> Result<Vec<Vec<f32>>, Failure> {
        let names: Vec<String> = self.tensors.iter().map(|tensor| gradient_at(tensor, step)).collect();
        let fetching = self.node.all(Job::Worker).map(|worker| self.node.fetch(worker, &names));
        let fetched = try_join_all(fetching).await?;
        let mut means: Vec<_> = self.tensors.iter().map(|tensor| vec![0.0; tensor.elements()]).collect();
        for gradients in &fetched {
            for (mean, gradient) in means.iter_mut().zip(floats(gradients, &self.tensors)?) {
                mean.iter_mut().zip(gradient).for_each(|(mean, slope)| *mean += slope);
            }
        }
        let share = 1.0 / fetched.len() as f32;
        means.iter_mut().flatten().for_each(|mean| *mean *= share);
        Ok(means)
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
