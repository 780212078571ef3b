//! Errors of the commands.

use std::{io, path::PathBuf, time::Duration};

use tensorwire::{Code, WorkerError, memory::MemoryError};

use crate::{
    checkpoint::CheckpointError,
    header::{HEADER_BYTES_MAX, HEADER_NAME},
    layout::LayoutError,
    output::OutputError,
    source::SourceError,
};

/// A failure of a command; its text is what the user sees.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Failure {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{}", in_options(.0))]
    Worker(Box<WorkerError>),
    #[error("--memory = `{memory}`: {}", in_memory_option(.problem))]
    Memory { memory: u64, problem: MemoryError },
    #[error(
        "--memory = `{memory}`: version {version} of the files needs {bytes} bytes, beside {held} bytes of the version before: \
         raise the option's value"
    )]
    VersionTooLarge { memory: u64, version: u64, bytes: u64, held: u64 },
    #[error(transparent)]
    Bench(#[from] BenchError),
    #[error("the output can't be written: {0}")]
    Print(io::Error),
    #[error("the output can't be made: {0}")]
    Json(serde_json::Error),
    #[error("the tokio runtime can't be started: {0}")]
    Runtime(io::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("--output = `{path}`: it is no file, so it takes one round: leave --repeat out")]
    RoundsIntoStream { path: PathBuf },
    #[error(
        "--output = `{path}`: it is no file, and --json needs standard output: leave --json out, or name a file"
    )]
    JsonIntoStream { path: PathBuf },
    #[error(
        "{path}: another process wants to change the file, and it could not be copied into memory before: {problem}; \
         serve it again, or without --mmap"
    )]
    Unmapped { path: PathBuf, problem: String },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("{path}: it was changed while it was read: serve it again, when it is complete")]
    ChangedWhileRead { path: PathBuf },
    #[error("--output = `{path}`: it is no file and no folder, which --follow needs: name one")]
    FollowIntoStream { path: PathBuf },
    #[error("{path}: the server has this file no more, but it can't be removed: {source}")]
    Remove { path: PathBuf, source: io::Error },
    #[error("a thread can't be started: {0}")]
    Thread(io::Error),
    #[error("the thread that reads or writes the files has ended early")]
    ThreadGone,
    #[error("the thread that verifies and writes the tensors has ended early")]
    WriterGone,
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
    #[error(
        "the server at {address} publishes a file header (`{HEADER_NAME}`) of {bytes} bytes, and one has at most \
         {HEADER_BYTES_MAX}: pull from `tensorwire serve`"
    )]
    HeaderLength { address: String, bytes: u64 },
    #[error(
        "the server's set has no `{name}`, which the header of a file has: it is not from tensorwire serve"
    )]
    NoPiece { name: String },
    #[error(
        "`{name}` has element type {dtype}, which safetensors has no name for: pull without --output, or without it"
    )]
    NoFileType { name: String, dtype: tensorwire::DataType },
    #[error("the server at {address} was restarted while it was pulled from: pull again, or with --retry")]
    Restarted { address: String },
    #[error(
        "the server at {address} has read newer files meanwhile: pull again, or follow them with --follow"
    )]
    NewerVersion { address: String },
    #[error("the server at {address} is still reading its files")]
    NotReady { address: String },
    #[error("the file that the server at {address} serves is another than before: pull again")]
    Changed { address: String },
    #[error("{last}; the pull did not get on within {} s (--retry)", limit.as_secs())]
    GaveUp { last: Box<Failure>, limit: Duration },
    #[error("`{name}` came with {found} bytes instead of {expected}: the server has replaced it; pull again")]
    Replaced { name: String, found: u64, expected: u64 },
    #[error("`{name}` arrived damaged: its checksum is {found:016x}, the server's is {expected:016x}")]
    Checksum { name: String, found: u64, expected: u64 },
    #[error("the server has no checksum of `{name}`: pull without --verify, or from a newer server")]
    NoChecksum { name: String },
}

/// Errors of a benchmark, besides those of workers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BenchError {
    #[error("{address}: {error}; a benchmark needs `tensorwire bench --serve {address}` on that host")]
    NotServed { address: String, error: Box<Failure> },
    #[error(
        "{address}: {name} listens there, which serves no benchmark: run `tensorwire bench --serve` on that host"
    )]
    NotBench { address: String, name: String },
    #[error("{address}: another benchmark is running with it ({error}): try again when that has ended")]
    Busy { address: String, error: Box<Failure> },
    #[error("{address}: tensorwire {theirs} is there, and {ours} here: use one version on both hosts")]
    Version { address: String, theirs: String, ours: &'static str },
    #[error("{row}: {error}")]
    Row { row: String, error: Box<Failure> },
    #[error("the second process can't be started: {0}")]
    Spawn(std::io::Error),
    #[error("the second process ended without an address: its own error is above")]
    NoAddress,
}

impl Failure {
    /// Whether the server is gone or still starting, so that it may be reachable later.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Worker(error) => matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded),
            Self::Restarted { .. } | Self::NotReady { .. } => true,
            _ => false,
        }
    }

    /// Whether the server did not answer in time. It may never answer.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Worker(error) if error.code() == Code::DeadlineExceeded)
    }
}

impl From<WorkerError> for Failure {
    fn from(error: WorkerError) -> Self {
        // Boxed, because it is several times as large as all other variants.
        Self::Worker(Box::new(error))
    }
}

/// Names of settings in errors of the library, and the corresponding options of the command line.
const OPTIONS: [(&str, &str); 9] = [
    ("the setting `receive_bytes` allows", "--memory allows"),
    ("require = `", "--fabric = `"),
    ("the setting `liveness`", "--liveness"),
    ("; or allow others with the setting `fabrics`", "; or take another with --fabric"),
    ("the setting `fabrics`", "--fabric"),
    ("the setting `tls`", "--tls-cert"),
    ("`tls_names` at AnyMember", "--tls-names any-member"),
    (", or allow unencrypted tensors with the setting `require_encryption` at false", ""),
    ("Trust::Hostile", "--trust hostile"),
];

/// Words of errors about the receive pool, and the corresponding words for `--memory`, which sets its cap and block size.
const MEMORY_OPTION: [(&str, &str); 3] = [
    ("the pool's cap", "the option's value"),
    ("give the pool smaller blocks", "lower the option's value"),
    (", or give the pool larger blocks", ""),
];

fn in_options(error: &WorkerError) -> String {
    in_words_of(&OPTIONS, error)
}

fn in_memory_option(problem: &MemoryError) -> String {
    in_words_of(&MEMORY_OPTION, problem)
}

/// The text of `error`, with the first of each pair of `words` replaced by the second.
fn in_words_of(words: &[(&str, &str)], error: &impl ToString) -> String {
    words.iter().fold(error.to_string(), |text, (library, option)| text.replace(library, option))
}

#[cfg(test)]
mod tests {
    use tensorwire::{
        WorkerError,
        memory::{Limit, MemoryError},
    };

    use super::Failure;

    #[test]
    fn a_missing_fabric_is_told_with_the_option() {
        let error = WorkerError::NoFabric { peer: "ps".to_owned(), tried: "tcp: no".to_owned() };
        let message = Failure::from(error).to_string();
        assert!(message.contains("(--fabric)") && !message.contains("setting"), "{message}");
    }

    #[test]
    fn too_much_memory_is_told_with_the_option_and_its_value() {
        for limit in [Limit::SystemMemory, Limit::FileSize, Limit::Mappings] {
            let problem = MemoryError::Limit { pool: "receive", bytes: 512, limit, value: Some(100) };
            let message = Failure::Memory { memory: 1024, problem }.to_string();
            assert!(message.starts_with("--memory = `1024`: ") && !message.contains("pool"), "{message}");
        }
    }
}
