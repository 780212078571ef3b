//! What worker 0 does besides: it gives the servers their first parameters, keeps a checkpoint, and gives that to
//! servers that have been started again.

use std::{path::PathBuf, time::Duration};

use futures::future::try_join_all;
use tensorwire::{Runtime, TokioRuntime, Worker};
use tensorwire_examples::{checkpoint::Checkpoint, mlp::TensorSpec, model::ModelKind};

use crate::{
    failure::Failure,
    link::{PAUSE, Push, Pushing, Token, at_step, velocity_at_step},
    options::Settings,
    server_link::ServerLink,
};

/// How long the servers may take to publish the last checkpoint.
const LAST_CHECKPOINT_MAX: Duration = Duration::from_secs(5);

/// The last checkpoint, in memory and, if the user wants that, in a file.
#[derive(Debug)]
pub(crate) struct Chief {
    last: Checkpoint,
    path: Option<PathBuf>,
    checkpoint_steps: u64,
    model: ModelKind,
    seed: u64,
    tensors: Vec<TensorSpec>,
}

impl Chief {
    /// Begins with the checkpoint in the file, or else with fresh parameters.
    pub(crate) fn new(settings: &Settings) -> Result<Self, Failure> {
        let (model, seed) = (settings.model, settings.flags.seed);
        let opened = model.open(seed);
        let tensors = opened.tensors();
        let path = settings.flags.checkpoint.clone();
        let read = path.as_deref().map(|path| Checkpoint::read(path, model, seed, &tensors)).transpose()?;
        let last = read.flatten().unwrap_or_else(|| Checkpoint::fresh(opened.initial_parameters(seed)));
        if last.step > 0 {
            println!("beginning at step {} of the checkpoint", last.step);
        }
        let checkpoint_steps = settings.flags.checkpoint_steps;
        Ok(Self { last, path, checkpoint_steps, model, seed, tensors })
    }

    /// Has all servers begin with the last checkpoint: one of them is new, or was started again, and what the others
    /// have does not go with that. The epoch tells gradients from before.
    pub(crate) fn restore(
        &self,
        worker: &Worker,
        links: &[ServerLink],
        tokens: &[Token],
    ) -> Result<(), Failure> {
        let epoch = tokens.iter().map(|token| token.epoch).max().unwrap_or(0) + 1;
        let push = Push { what: Pushing::Checkpoint, epoch, step: self.last.step, loss: 0.0 };
        let Checkpoint { parameters, velocities, .. } = &self.last;
        links.iter().try_for_each(|link| link.push_checkpoint(worker, push, parameters, velocities))
    }

    /// Fetches the checkpoint that the servers have published last, if it is newer than the one that is kept.
    pub(crate) async fn keep_checkpoint(
        &mut self,
        worker: &Worker,
        links: &[ServerLink],
        step: u64,
    ) -> Result<(), Failure> {
        self.keep(worker, links, step - step % self.checkpoint_steps).await.map(drop)
    }

    /// As [`keep_checkpoint`](Self::keep_checkpoint), of the end of the training. A server may still be busy with
    /// other workers' last gradients.
    pub(crate) async fn keep_last_checkpoint(
        &mut self,
        worker: &Worker,
        runtime: &TokioRuntime,
        links: &[ServerLink],
        steps: u64,
    ) -> Result<(), Failure> {
        let end = runtime.now() + LAST_CHECKPOINT_MAX;
        while !self.keep(worker, links, steps).await? && runtime.now() < end {
            runtime.sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Keeps the checkpoint of `step`; false if a server does not have it, or not any more.
    async fn keep(&mut self, worker: &Worker, links: &[ServerLink], step: u64) -> Result<bool, Failure> {
        if step <= self.last.step {
            return Ok(true);
        }
        let fetching = links.iter().map(|link| {
            link.fetch_both(worker, |piece| at_step(piece, step), |piece| velocity_at_step(piece, step))
        });
        let fetched = match try_join_all(fetching).await {
            Err(failure) if failure.is_not_found() => return Ok(false),
            fetched => fetched?,
        };
        for (link, (parameters, velocities)) in links.iter().zip(&fetched) {
            link.unpack(parameters, &mut self.last.parameters)?;
            link.unpack(velocities, &mut self.last.velocities)?;
        }
        self.last.step = step;
        if let Some(path) = &self.path {
            self.last.write(path, self.model, self.seed, &self.tensors)?;
        }
        Ok(true)
    }
}
