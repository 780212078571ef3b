//! What servers and workers agree on: names, keys, and the two small messages that pass between them.
//!
//! A worker and a server meet in a *life*: a step of tensorwire whose number the worker chooses and publishes under
//! [`LIFE`]. Whatever breaks, the worker begins another life, and nothing of the former one is mistaken for it.

use std::time::Duration;
use tensorwire::{ClusterSpec, Key, Pool, Tensor, Worker, WorkerBuilder, WorkerError};
use tensorwire_examples::shards::Piece;

use crate::{
    failure::Failure,
    options::{RoleName, Settings},
};

/// The worker that keeps the checkpoint.
pub(crate) const CHIEF: usize = 0;
/// Under this name a worker publishes the number of its life.
pub(crate) const LIFE: &str = "life";
/// How long a process waits for another that is there: workers may compute for long.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);
/// How long to wait before a peer that was not there is tried again.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);

/// Settings of one process of the cluster.
pub(crate) fn process(
    role: RoleName,
    cluster: &ClusterSpec,
    settings: &Settings,
) -> Result<WorkerBuilder, WorkerError> {
    let builder = Worker::builder_for_task(cluster.clone(), role.job(), role.index() as u32)?;
    Ok(configured(builder, settings))
}

/// What the flags say of how tensors travel.
pub(crate) fn configured(builder: WorkerBuilder, settings: &Settings) -> WorkerBuilder {
    let mut builder = builder.timeout(WAIT_MAX);
    if let Some(kind) = settings.flags.fabric.required() {
        builder = builder.require(kind);
    }
    match &settings.flags.secret_file {
        Some(path) => builder.secret_file(path),
        None => builder,
    }
}

/// Under this name a server publishes a piece as it is now.
pub(crate) fn latest(piece: &Piece) -> String {
    piece.name.clone()
}

/// Under this name a server publishes a piece as it is at the beginning of `step`.
pub(crate) fn at_step(piece: &Piece, step: u64) -> String {
    format!("{}@{step}", piece.name)
}

/// Under this name a server publishes the velocities of a piece at the beginning of `step`, for the checkpoint.
pub(crate) fn velocity_at_step(piece: &Piece, step: u64) -> String {
    format!("velocity/{}@{step}", piece.name)
}

/// The shape of a piece as the wire has it.
pub(crate) fn wire_shape(piece: &Piece) -> Vec<u64> {
    piece.shape.iter().map(|&dimension| dimension as u64).collect()
}

/// The keys that pass between one server and one worker.
#[derive(Debug)]
pub(crate) struct Keys {
    /// A [`Push`], from the worker.
    pub(crate) push: Key,
    /// The gradients of the server's pieces, from the worker.
    pub(crate) gradients: Vec<Key>,
    /// The parameters that the server is to begin with, from the chief.
    pub(crate) parameters: Vec<Key>,
    /// The velocities that the server is to begin with, from the chief.
    pub(crate) velocities: Vec<Key>,
    /// A [`Token`], from the server: it answers each push.
    pub(crate) token: Key,
}

impl Keys {
    /// Between `server` and `worker`, as seen by `own`, which is one of the two.
    pub(crate) fn new(
        own: &Worker,
        server: usize,
        worker: usize,
        pieces: &[Piece],
    ) -> Result<Self, WorkerError> {
        let server = device(RoleName::Server(server));
        let worker = device(RoleName::Worker(worker));
        let of_pieces = |what: &str| -> Result<Vec<Key>, WorkerError> {
            pieces.iter().map(|piece| own.key(&worker, &server, &format!("{what} {}", piece.name))).collect()
        };
        Ok(Self {
            push: own.key(&worker, &server, "push")?,
            gradients: of_pieces("gradient of")?,
            parameters: of_pieces("parameters of")?,
            velocities: of_pieces("velocities of")?,
            token: own.key(&server, &worker, "token")?,
        })
    }
}

fn device(role: RoleName) -> String {
    format!("{}/device:CPU:0", role.worker_name())
}

/// What a worker sends first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Push {
    pub(crate) what: Pushing,
    /// Which beginning of the training it belongs to: the chief counts them up when it restores a checkpoint.
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    pub(crate) loss: f32,
}

/// What follows a [`Push`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushing {
    /// The gradients of a step.
    Gradients,
    /// Parameters and velocities to begin with.
    Checkpoint,
    /// Nothing: the worker is done.
    Goodbye,
}

const PUSHINGS: [Pushing; 3] = [Pushing::Gradients, Pushing::Checkpoint, Pushing::Goodbye];

impl Push {
    pub(crate) fn to_tensor(self, pool: &Pool) -> Result<Tensor, WorkerError> {
        let words = [self.what as u64, self.epoch, self.step, u64::from(self.loss.to_bits())];
        Tensor::from_values(pool, &[words.len() as u64], &words)
    }

    pub(crate) fn from_tensor(tensor: &Tensor, from: &str) -> Result<Self, Failure> {
        let [what, epoch, step, loss] = words(tensor, from)?;
        let known = usize::try_from(what).ok().and_then(|what| PUSHINGS.get(what)).copied();
        let what = known.ok_or_else(|| not_understood(from, format!("{what} is nothing that is pushed")))?;
        Ok(Self { what, epoch, step, loss: f32::from_bits(loss as u32) })
    }
}

/// A server's word to a worker: what comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    /// 0 while the server has no parameters.
    pub(crate) epoch: u64,
    /// The step to compute; the number of all steps when they are done.
    pub(crate) step: u64,
}

impl Token {
    pub(crate) fn to_tensor(self, pool: &Pool) -> Result<Tensor, WorkerError> {
        Tensor::from_values(pool, &[2], &[self.epoch, self.step])
    }

    pub(crate) fn from_tensor(tensor: &Tensor, from: &str) -> Result<Self, Failure> {
        let [epoch, step] = words(tensor, from)?;
        Ok(Self { epoch, step })
    }
}

/// The values of a small message.
pub(crate) fn words<const N: usize>(tensor: &Tensor, from: &str) -> Result<[u64; N], Failure> {
    let values = tensor.values::<u64>().map_err(|error| not_understood(from, error.to_string()))?;
    values
        .try_into()
        .map_err(|values: Vec<u64>| not_understood(from, format!("it has {} words, not {N}", values.len())))
}

fn not_understood(from: &str, problem: String) -> Failure {
    Failure::Message { from: from.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use tensorwire::{Tensor, Worker};

    use super::{Push, Pushing, Token};

    #[tokio::test]
    async fn messages_are_read_as_they_were_written_and_others_are_refused() {
        let worker = Worker::builder("/job:ps/replica:0/task:0").start().await.unwrap();
        let pool = worker.pool();
        for what in [Pushing::Gradients, Pushing::Checkpoint, Pushing::Goodbye] {
            let push = Push { what, epoch: 3, step: u64::MAX, loss: -0.25 };
            assert_eq!(Push::from_tensor(&push.to_tensor(pool).unwrap(), "w").unwrap(), push);
        }
        let token = Token { epoch: 1, step: 7 };
        assert_eq!(Token::from_tensor(&token.to_tensor(pool).unwrap(), "ps").unwrap(), token);

        let unknown = Tensor::from_values(pool, &[4], &[3u64, 0, 0, 0]).unwrap();
        let error = Push::from_tensor(&unknown, "worker 1").unwrap_err().to_string();
        assert!(error.contains("worker 1") && error.contains("3 is nothing that is pushed"), "{error}");
        let short = Tensor::from_values(pool, &[1], &[3u64]).unwrap();
        let error = Token::from_tensor(&short, "ps 0").unwrap_err().to_string();
        assert!(error.contains("it has 1 words, not 2"), "{error}");
        let floats = Tensor::from_values(pool, &[2], &[1.0f32, 2.0]).unwrap();
        assert!(Token::from_tensor(&floats, "ps 0").is_err());
        worker.shutdown().await;
    }
}
