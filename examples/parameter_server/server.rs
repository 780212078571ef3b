//! A process that holds parameters: it publishes them, receives gradients, and publishes what they make of them.

mod state;

use std::{
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::future::{Either, select, try_join_all};
use tensorwire::{ClusterSpec, DataType, Fetched, Runtime, Step, Tensor, TokioRuntime, Version, Worker};
use tensorwire_examples::shards::Piece;
use tokio::sync::watch;

use self::state::State;
use crate::{
    children::Parent,
    failure::Failure,
    link::{CHIEF, Keys, LIFE, PAUSE, Push, Pushing, Token, process, wire_shape, words},
    options::{RoleName, Settings},
    report::Report,
};

/// Serves until the training is over and the workers have gone; with a launcher, until that lets go.
pub(crate) async fn run(settings: &Settings, index: usize, cluster: &ClusterSpec) -> Result<(), Failure> {
    let mut parent = Parent::of(settings);
    let worker = process(RoleName::Server(index), cluster, settings)?.start().await?;
    Report::of("address", worker.address()).print();
    let server = Server::new(worker, settings, index, parent.is_there())?;
    let serving = try_join_all((0..settings.workers).map(|worker| server.serve(worker)));
    let served = match parent.unless_gone(serving).await {
        Some(served) => served.map(drop),
        None if server.state().is_finished() => Ok(()),
        None => Err(Failure::LauncherGone),
    };
    server.worker.shutdown().await;
    served
}

struct Server {
    worker: Worker,
    runtime: TokioRuntime,
    index: usize,
    pieces: Vec<Piece>,
    /// A launcher says when it is time to end, and starts workers again until then.
    is_launched: bool,
    state: Mutex<State>,
    /// Told when a worker that waits for its token may go on.
    changed: watch::Sender<()>,
    /// The chief has said goodbye.
    is_over: watch::Sender<bool>,
}

impl Server {
    fn new(worker: Worker, settings: &Settings, index: usize, is_launched: bool) -> Result<Self, Failure> {
        let pieces = settings.pieces().swap_remove(index);
        let state = Mutex::new(State::new(settings, index, pieces.clone()));
        let (changed, is_over) = (watch::Sender::new(()), watch::Sender::new(false));
        let runtime = runtime()?;
        Ok(Self { worker, runtime, index, pieces, is_launched, state, changed, is_over })
    }

    /// Serves one worker, from life to life, until it says goodbye, or is not there when the training is over.
    async fn serve(&self, worker: usize) -> Result<(), Failure> {
        let mut former = None;
        loop {
            let Some(met) = self.unless_over(self.meet(worker, former)).await else { return Ok(()) };
            let (life, version) = met?;
            former = Some(version);
            let life = self.worker.step(life);
            let attended = self.attend(worker, &life).await;
            self.worker.cleanup(life.id());
            self.state().leave(worker);
            self.changed.send_replace(());
            match attended {
                Err(failure) if failure.is_transient() => {
                    tracing::info!(worker, %failure, "a worker is lost");
                }
                Ok(()) if self.is_launched => {}
                ended => return ended,
            }
        }
    }

    /// Waits until the worker is there, in another life than its `former` one.
    async fn meet(&self, worker: usize, former: Option<Version>) -> Result<(i64, Version), Failure> {
        loop {
            match self.next_life(worker, former).await {
                Err(failure) if failure.is_transient() => tracing::debug!(worker, %failure, "not there"),
                met => return met,
            }
            self.runtime.sleep(PAUSE).await;
        }
    }

    async fn next_life(&self, worker: usize, former: Option<Version>) -> Result<(i64, Version), Failure> {
        let peer = self.worker.peer(&RoleName::Worker(worker).worker_name())?;
        let life = self.worker.fetch(&peer, LIFE).versioned();
        let Fetched { tensor, version, .. } = match former {
            // A process that was started again counts as newer.
            Some(former) => life.newer_than(former).await?,
            None => life.wait().await?,
        };
        words(&tensor, peer.name()).map(|[life]| (life as i64, version))
    }

    /// One life: tells the worker what to do, takes what it computed, and so on.
    async fn attend(&self, worker: usize, life: &Step) -> Result<(), Failure> {
        let keys = Keys::new(&self.worker, self.index, worker, &self.pieces)?;
        let from = RoleName::Worker(worker).worker_name();
        self.state().join(worker);
        loop {
            let push = pin!(life.recv(&keys.push));
            // The push can't come before the token. But if the worker ends its life meanwhile, this receive ends too.
            let push = match select(pin!(self.token_for(worker)), push).await {
                Either::Left((token, push)) => {
                    life.send(&keys.token, token.to_tensor(self.worker.pool())?)?;
                    push.await
                }
                Either::Right((push, _)) => push,
            };
            let push = Push::from_tensor(&push?, &from)?;
            match push.what {
                Pushing::Gradients => {
                    let gradients = life.recv_many(&keys.gradients).await?;
                    self.check(&gradients, &from)?;
                    self.state().take_gradients(&self.worker, worker, push, gradients)?;
                }
                Pushing::Checkpoint => {
                    let values = life.recv_many(&keys.parameters).await?;
                    let velocities = life.recv_many(&keys.velocities).await?;
                    self.check(&values, &from)?;
                    self.check(&velocities, &from)?;
                    self.state().restore(&self.worker, push, &values, &velocities)?;
                }
                Pushing::Goodbye => {
                    self.state().note_goodbye(worker);
                    if worker == CHIEF && !self.is_launched {
                        self.is_over.send_replace(true);
                    }
                    return Ok(());
                }
            }
            self.changed.send_replace(());
        }
    }

    /// Whether `tensors` go with this server's pieces.
    fn check(&self, tensors: &[Tensor], from: &str) -> Result<(), Failure> {
        for (piece, tensor) in self.pieces.iter().zip(tensors) {
            if tensor.dtype() != DataType::F32 || tensor.shape() != wire_shape(piece) {
                let problem = format!("{tensor:?} came for {}, which is {:?}", piece.name, piece.shape);
                return Err(Failure::Message { from: from.to_owned(), problem });
            }
        }
        Ok(())
    }

    /// What the worker is to do next, when it may do it.
    async fn token_for(&self, worker: usize) -> Token {
        let mut changed = self.changed.subscribe();
        loop {
            let token = self.state().token_for(worker);
            if let Some(token) = token {
                return token;
            }
            // The sender is this server's own.
            let _ = changed.changed().await;
        }
    }

    /// `future`, unless the training is over first.
    async fn unless_over<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut over = self.is_over.subscribe();
        tokio::select! {
            biased;
            output = future => Some(output),
            _ = over.wait_for(|over| *over) => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The runtime this process runs on, which has the clock.
pub(crate) fn runtime() -> Result<TokioRuntime, Failure> {
    let outside = || Failure::Runtime(std::io::Error::other("called outside a runtime"));
    TokioRuntime::current().ok_or_else(outside)
}

/// The floats of each tensor.
fn floats(tensors: &[Tensor]) -> Result<Vec<Vec<f32>>, Failure> {
    Ok(tensors.iter().map(Tensor::values).collect::<Result<_, _>>()?)
}
