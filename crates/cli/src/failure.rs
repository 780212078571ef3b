//! Why a command can fail.

use std::{io, path::PathBuf};

use safetensors::SafeTensorError;
use tensorwire::WorkerError;

use crate::{bench::BenchError, checkpoint::CheckpointError, header::HEADER_NAME};

/// A failure of a command; its text is what the user sees.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Failure {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Worker(Box<WorkerError>),
    #[error(transparent)]
    Bench(#[from] BenchError),
    #[error("the output can't be written: {0}")]
    Print(io::Error),
    #[error("the output can't be made: {0}")]
    Json(serde_json::Error),
    #[error("the tokio runtime can't be started: {0}")]
    Runtime(io::Error),
    #[error("{path}: {source}")]
    Output { path: PathBuf, source: io::Error },
    #[error("the thread that takes the tensors has ended early")]
    WriterGone,
    #[error("a tensor of the file is called `{HEADER_NAME}`, which the server itself publishes: rename it")]
    ReservedName,
    #[error(
        "{option} = `{value}`: this program was built without TLS: build it with --features tls, or leave the option and \
         the variable {variable} out"
    )]
    #[cfg(not(feature = "tls"))]
    NoTls { option: &'static str, value: String, variable: &'static str },
    #[error(transparent)]
    #[cfg(feature = "tls")]
    Tls(#[from] tensorwire::tls::TlsError),
    #[error("`{name}` takes {bytes} bytes, more than this machine can address")]
    TooLarge { name: String, bytes: u64 },
    #[error("the server at {address} has no tensor {missing}; it has {known}")]
    NoSuchTensor { address: String, missing: String, known: String },
    #[error("the server has published nothing that could be pulled")]
    NothingPublished,
    #[error("what the server publishes does not make a safetensors file: {0}")]
    Header(SafeTensorError),
    #[error("the server's file header is not UTF-8: its `{HEADER_NAME}` is not from tensorwire serve")]
    HeaderText,
    #[error(
        "`{name}` has element type {dtype}, which safetensors has no name for: pull without --output, or without it"
    )]
    NoFileType { name: String, dtype: tensorwire::DataType },
    #[error("`{name}` came with {found} bytes instead of {expected}: the server has replaced it; pull again")]
    Replaced { name: String, found: u64, expected: u64 },
    #[error("`{name}` arrived damaged: its checksum is {found:016x}, the server's is {expected:016x}")]
    Checksum { name: String, found: u64, expected: u64 },
    #[error("the server tells no checksum of `{name}`: pull without --verify, or from a newer server")]
    NoChecksum { name: String },
}

impl From<WorkerError> for Failure {
    fn from(error: WorkerError) -> Self {
        // Boxed, since it is several times as large as everything else here.
        Self::Worker(Box::new(error))
    }
}
