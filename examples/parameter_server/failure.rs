//! Why the example can fail.

use std::{io, process::ExitStatus, time::Duration};

use tensorwire::{ClusterError, Code, WorkerError, control::ControlError};
use tensorwire_examples::{checkpoint::CheckpointError, tickets::TooStale};

use crate::options::BadOption;

/// A failure of any of the processes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Failure {
    #[error(transparent)]
    Option(#[from] BadOption),
    #[error("--ps-hosts and --worker-hosts: {0}")]
    Cluster(#[from] ClusterError),
    #[error("a child process can't be started: {0}")]
    Start(io::Error),
    #[error("a child process can't be told anything: {0}")]
    Pipe(io::Error),
    #[error("gRPC: {0}")]
    Grpc(String),
    #[error("the {name} ended before the training did: {status}")]
    ChildEnded { name: String, status: ExitStatus },
    #[error("no child process has said anything for {} seconds", limit.as_secs())]
    Silence { limit: Duration },
    #[error("no free ports were found on 127.0.0.1 from {first} to {last}; end a program that listens there")]
    NoPorts { first: u16, last: u16 },
    #[error("the launcher has gone")]
    LauncherGone,
    #[error("the tokio runtime can't be started: {0}")]
    Runtime(io::Error),
    #[error(
        "a message of {from} is not understood: {problem}; run the same version of this example everywhere"
    )]
    Message { from: String, problem: String },
    #[error("the servers are not at the same point of the training yet")]
    OutOfStep,
    #[error("given up after {} seconds without progress: {last}", patience.as_secs())]
    Patience { patience: Duration, last: Box<Failure> },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Stale(#[from] TooStale),
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

impl Failure {
    /// Whether it passes: a peer that is not there may be started, or started again.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::OutOfStep => true,
            Self::Worker(error) => is_transient(error),
            _ => false,
        }
    }

    /// Whether it says that something is not there any more, or not yet.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Worker(WorkerError::Remote { status, .. }) if status.code == Code::NotFound)
    }
}

fn is_transient(error: &WorkerError) -> bool {
    match error {
        WorkerError::Control(error) => !matches!(
            error,
            ControlError::Bind { .. }
                | ControlError::BadAddress { .. }
                | ControlError::SecretNeeded { .. }
                | ControlError::SecretFile { .. }
                | ControlError::WrongSecret { .. }
        ),
        // Sessions of a peer's former lives are given up in a moment.
        WorkerError::Config { field, .. } => field.starts_with("sessions"),
        WorkerError::PeerLost { .. }
        | WorkerError::NoFabric { .. }
        | WorkerError::Fabric(_)
        | WorkerError::Aborted { .. }
        | WorkerError::Remote { .. }
        | WorkerError::DeadlineExceeded { .. } => true,
        _ => false,
    }
}
