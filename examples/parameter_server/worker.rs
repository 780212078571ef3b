//! A process that computes gradients: it fetches the parameters, takes its part of the samples, sends the gradients.

use std::{ops::Range, time::Duration};

use futures::future::{join_all, try_join_all};
use tensorwire::{ClusterSpec, Runtime, Tensor, TokioRuntime, Worker};
use tensorwire_examples::{model::Model, shards::Piece};

use crate::{
    chief::Chief,
    children::Parent,
    failure::Failure,
    link::{CHIEF, LIFE, PAUSE, Push, Pushing, Token, at_step, latest, process},
    options::{Mode, RoleName, Settings},
    report::Report,
    server::runtime,
    server_link::ServerLink,
    summary::{Summary, Traffic},
};

/// Computes gradients until the training is over; with a launcher, waits until that lets go.
pub(crate) async fn run(settings: &Settings, index: usize, cluster: &ClusterSpec) -> Result<(), Failure> {
    let parent = Parent::of(settings);
    let chief = (index == CHIEF).then(|| Chief::new(settings)).transpose()?;
    let worker = process(RoleName::Worker(index), cluster, settings)?.start().await?;
    Report::of("address", worker.address()).print();
    let mut trainer = Trainer::new(worker.clone(), settings, index, chief)?;
    let trained = parent.work_until_let_go(trainer.train()).await;
    worker.shutdown().await;
    trained
}

struct Trainer<'run> {
    worker: Worker,
    runtime: TokioRuntime,
    settings: &'run Settings,
    index: usize,
    /// Of each server.
    pieces: Vec<Vec<Piece>>,
    model: Box<dyn Model>,
    parameters: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
    chief: Option<Chief>,
    life: i64,
    /// When something was last achieved.
    progress: Duration,
}

impl<'run> Trainer<'run> {
    fn new(
        worker: Worker,
        settings: &'run Settings,
        index: usize,
        chief: Option<Chief>,
    ) -> Result<Self, Failure> {
        let model = settings.model.open(settings.flags.seed);
        let runtime = runtime()?;
        Ok(Self {
            // Differs from those of this process's former lives.
            life: (worker.incarnation() >> 2) as i64,
            progress: runtime.now(),
            parameters: model.zeros(),
            gradients: model.zeros(),
            pieces: settings.pieces(),
            worker,
            runtime,
            settings,
            index,
            model,
            chief,
        })
    }

    /// Lives until the training is over. Whatever breaks meanwhile, the next life begins where the servers are.
    async fn train(&mut self) -> Result<(), Failure> {
        loop {
            let failure = match self.live().await {
                Ok(()) => return Ok(()),
                Err(failure) if failure.is_transient() => failure,
                Err(failure) => return Err(failure),
            };
            tracing::info!(%failure, "once more");
            self.worker.cleanup(self.life);
            self.life += 1;
            let patience = Duration::from_secs(self.settings.flags.patience);
            if self.runtime.now() - self.progress > patience {
                return Err(Failure::Patience { patience, last: Box::new(failure) });
            }
            self.runtime.sleep(PAUSE).await;
        }
    }

    /// Trains with the servers as they are.
    async fn live(&mut self) -> Result<(), Failure> {
        let life = Tensor::from_values(self.worker.pool(), &[1], &[self.life as u64])?;
        self.worker.publish(LIFE, life)?;
        let links = self.links()?;
        loop {
            let tokens = try_join_all(links.iter().map(ServerLink::token)).await?;
            self.progress = self.runtime.now();
            let Some(token) = self.agreed(&tokens) else {
                let Some(chief) = &self.chief else { return Err(Failure::OutOfStep) };
                chief.restore(&self.worker, &links, &tokens)?;
                continue;
            };
            if token.step >= self.settings.steps {
                return self.finish(&links).await;
            }
            if let Some(chief) = &mut self.chief {
                chief.keep_checkpoint(&self.worker, &links, token.step).await?;
            }
            self.step(&links, token).await?;
        }
    }

    /// The ways to all servers. They are connected on first use.
    fn links(&self) -> Result<Vec<ServerLink>, Failure> {
        let life = self.worker.step(self.life);
        let link = |(server, pieces): (usize, &Vec<Piece>)| {
            ServerLink::new(&self.worker, &life, server, self.index, pieces)
        };
        self.pieces.iter().enumerate().map(link).collect()
    }

    /// What the servers want next; `None` if they are not in the same epoch, or one has no parameters.
    fn agreed(&self, tokens: &[Token]) -> Option<Token> {
        let first = *tokens.first()?;
        if first.epoch == 0 || tokens.iter().any(|token| token.epoch != first.epoch) {
            return None;
        }
        match self.settings.mode {
            // One may still miss gradients that another has.
            Mode::Sync { .. } => tokens.iter().copied().min_by_key(|token| token.step),
            // The first hands out the steps.
            Mode::Async { .. } => Some(first),
        }
    }

    async fn step(&mut self, links: &[ServerLink], token: Token) -> Result<(), Failure> {
        let Token { epoch, step } = token;
        match self.settings.mode {
            Mode::Sync { .. } => self.fetch(links, |piece| at_step(piece, step)).await?,
            Mode::Async { .. } => self.fetch(links, latest).await?,
        }
        self.validate(step);
        let loss = self.model.gradients(&self.parameters, self.samples(step), &mut self.gradients);
        if self.settings.flags.delay > 0 {
            self.runtime.sleep(Duration::from_millis(self.settings.flags.delay)).await;
        }
        let push = Push { what: Pushing::Gradients, epoch, step, loss };
        links.iter().try_for_each(|link| link.push_gradients(&self.worker, push, &self.gradients))
    }

    async fn fetch(&mut self, links: &[ServerLink], name: impl Fn(&Piece) -> String) -> Result<(), Failure> {
        let fetched = try_join_all(links.iter().map(|link| link.fetch(&self.worker, &name))).await?;
        for (link, tensors) in links.iter().zip(&fetched) {
            link.unpack(tensors, &mut self.parameters)?;
        }
        Ok(())
    }

    /// The samples of this worker in `step`.
    fn samples(&self, step: u64) -> Range<u64> {
        let batch = self.settings.model.batch_size();
        let number = match self.settings.mode {
            // With backup workers, the samples of those that came late are left out.
            Mode::Sync { .. } => step * self.settings.workers as u64 + self.index as u64,
            Mode::Async { .. } => step,
        };
        number * batch..(number + 1) * batch
    }

    /// The chief tells now and then how good the parameters are.
    fn validate(&mut self, step: u64) {
        let interval = self.settings.flags.steps_to_validate;
        if self.chief.is_some() && step > 0 && step.is_multiple_of(interval) {
            let quality = self.model.quality(&self.parameters);
            println!("step {step:<8} {quality}");
        }
    }

    /// The training is over. The chief keeps the last checkpoint; before it has said goodbye, no other worker hears
    /// that it is over.
    async fn finish(&mut self, links: &[ServerLink]) -> Result<(), Failure> {
        if let Some(chief) = &mut self.chief {
            chief.keep_last_checkpoint(&self.worker, &self.runtime, links, self.settings.steps).await?;
        }
        let prints = self.chief.is_some() && !self.settings.flags.launched;
        if prints {
            self.fetch(links, latest).await?;
        }
        let traffic = Traffic::of(&self.worker);
        for link in links {
            link.push(&self.worker, Push { what: Pushing::Goodbye, epoch: 0, step: 0, loss: 0.0 })?;
        }
        // Whether a server answers or has gone: it has taken the goodbye, or does not need it.
        join_all(links.iter().map(ServerLink::token)).await;
        if prints {
            println!("{}", Summary::of(self.settings, &self.parameters));
        }
        traffic.to_report().print();
        Ok(())
    }
}
