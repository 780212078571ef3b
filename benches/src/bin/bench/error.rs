//! Errors of benchmarks.

use std::{io, path::PathBuf, time::Duration};

use tensorwire::{
    WorkerError,
    collective::{GroupError, store::StoreError},
    fabric::FabricError,
    memory::MemoryError,
};
use tensorwire_verbs_reactor::{SettingError, VerbsError};

/// A failure of `tensorwire-bench`; its text is what the user sees.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BenchError {
    #[error("{field} {value}: this build can't do that: {remedy}")]
    NotInThisBuild { field: &'static str, value: String, remedy: &'static str },
    #[error("--cpus {value}: this process may run on {allowed} CPU: give it more, or use --cpus one or free")]
    Cpus { value: &'static str, allowed: usize },
    #[error("another process can't be started: {0}")]
    Spawn(io::Error),
    #[error("the other process has ended in the middle of a measurement ({during})")]
    PeerGone { during: &'static str },
    #[error("the other process did not answer within {limit:?} ({during})")]
    PeerSilent { during: &'static str, limit: Duration },
    #[error("rank {rank}: {error}")]
    Rank { rank: usize, error: Box<BenchError> },
    #[error("the collective gives rank {rank} a wrong result at {at}: {what}")]
    WrongResult { rank: usize, at: usize, what: String },
    #[error(transparent)]
    Group(Box<GroupError>),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the other process failed: {0}")]
    PeerFailed(String),
    #[error("the other process sent an unexpected message: {0}")]
    Unexpected(String),
    #[error("{call}: {source}")]
    System { call: &'static str, source: io::Error },
    #[error(transparent)]
    Fabric(#[from] FabricError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Worker(Box<WorkerError>),
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("`{program}`, which RDMA is measured against, is not on the PATH: {remedy}")]
    NoPerftest { program: &'static str, remedy: &'static str },
    #[error("{program}, which RDMA is measured against, has failed: {what}")]
    Perftest { program: &'static str, what: String },
    #[error("{program}, which RDMA is measured against, has ended well without a figure in its report")]
    NoFigure { program: &'static str },
    #[error("{}: the chart can't be written: {source}", file.display())]
    Plot { file: PathBuf, source: io::Error },
    #[error("a result can't be written: {0}")]
    Output(io::Error),
}

impl BenchError {
    /// Whether a process did not answer in time.
    pub(super) fn is_silence(&self) -> bool {
        match self {
            Self::PeerSilent { .. } => true,
            Self::Rank { error, .. } => error.is_silence(),
            _ => false,
        }
    }
}

impl From<WorkerError> for BenchError {
    fn from(error: WorkerError) -> Self {
        // Boxed, because it is several times as large as all other variants.
        Self::Worker(Box::new(error))
    }
}

impl From<GroupError> for BenchError {
    fn from(error: GroupError) -> Self {
        Self::Group(Box::new(error))
    }
}

/// Names the call that failed.
pub(super) fn system<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> BenchError {
    move |source| BenchError::System { call, source: source.into() }
}
