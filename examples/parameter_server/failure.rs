//! Why the example can fail.

use std::{io, process::ExitStatus, time::Duration};

use tensorwire::WorkerError;

/// A failure of any of the processes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Failure {
    #[error("a child process can't be started: {0}")]
    Start(io::Error),
    #[error("a child process can't be told anything: {0}")]
    Pipe(io::Error),
    #[error("the {name} ended before the training did: {status}")]
    ChildEnded { name: String, status: ExitStatus },
    #[error("no child process has said anything for {} seconds", limit.as_secs())]
    Silence { limit: Duration },
    #[error("the launcher has gone")]
    LauncherGone,
    #[error("the tokio runtime can't be started: {0}")]
    Runtime(io::Error),
    #[error(transparent)]
    Worker(#[from] WorkerError),
}
