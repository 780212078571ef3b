//! How the command ends: its exit codes, and which failure has which.

use std::{fmt::Write, io, process::ExitCode};

use tensorwire::{
    Code, WorkerError,
    memory::{Limit, MemoryError},
    settings::ControlError,
};

use crate::{
    checkpoint::CheckpointError,
    failure::{BenchError, Failure},
    index::IndexError,
    output::OutputError,
    source::SourceError,
};

/// The kinds of ends, by their exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Anything without a code of its own.
    Other = 1,
    Usage = 2,
    NotFound = 3,
    Unreachable = 4,
    Refused = 5,
    NoRoom = 6,
    Damaged = 7,
}

/// All exit codes and their meanings, as `--help` and the book list them.
const TABLE: [(&str, &str); 9] = [
    ("0", "success, also if Ctrl-C or SIGTERM ended a server, a follower or `top`"),
    ("1", "another failure; `devices`, `doctor`: what is needed cannot be used"),
    ("2", "wrong usage: command line, environment variable, configuration file"),
    ("3", "not found: a file, or a tensor on the server"),
    ("4", "unreachable: the server does not answer, or shares no fabric"),
    ("5", "refused: by authentication, a limit of the server, rights on a file"),
    ("6", "no room: disk, memory, a limit of this machine or of an option, a port"),
    ("7", "damaged: a checksum differs, a file or a server's content is invalid"),
    ("128+n", "ended by signal n: 130 by Ctrl-C, 143 by SIGTERM"),
];

/// The table of exit codes at the end of a `--help`.
pub(crate) fn help() -> String {
    let mut text = "Exit status:".to_owned();
    for (code, meaning) in TABLE {
        // Writing to a String does not fail.
        let _ = write!(text, "\n  {code:<5}  {meaning}");
    }
    text
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl Failure {
    /// The exit code of a command with this failure.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Checkpoint(error) => of_checkpoint(error),
            Self::Source(error) => of_source(error),
            Self::Output(error) => of_output(error),
            Self::Worker(error) => of_worker(error),
            Self::Bench(error) => of_bench(error),
            Self::GaveUp { last, .. } => last.exit(),
            Self::Print(error) | Self::Runtime(error) | Self::Thread(error) => of_io(error),
            Self::Remove { source, .. } => of_io(source),
            Self::Memory { .. } | Self::VersionTooLarge { .. } | Self::TooLarge { .. } => Exit::NoRoom,
            Self::RoundsIntoStream { .. } | Self::JsonIntoStream { .. } | Self::FollowIntoStream { .. } => {
                Exit::Usage
            }
            #[cfg(not(feature = "tls"))]
            Self::NoTls { .. } => Exit::Usage,
            #[cfg(feature = "tls")]
            Self::Tls(_) => Exit::Refused,
            Self::NoSuchTensor { .. } | Self::NothingPublished | Self::NoChecksum { .. } => Exit::NotFound,
            Self::Restarted { .. } | Self::NotReady { .. } => Exit::Unreachable,
            Self::Layout(_) | Self::HeaderLength { .. } | Self::NoPiece { .. } | Self::Checksum { .. } => {
                Exit::Damaged
            }
            Self::Json(_)
            | Self::Unmapped { .. }
            | Self::ChangedWhileRead { .. }
            | Self::ThreadGone
            | Self::WriterGone
            | Self::NoFileType { .. }
            | Self::NewerVersion { .. }
            | Self::Changed { .. }
            | Self::Replaced { .. } => Exit::Other,
        }
    }
}

fn of_io(error: &io::Error) -> Exit {
    if Limit::of_files(error).is_some() {
        return Exit::NoRoom;
    }
    match error.kind() {
        io::ErrorKind::NotFound => Exit::NotFound,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Exit::Refused,
        io::ErrorKind::StorageFull
        | io::ErrorKind::QuotaExceeded
        | io::ErrorKind::FileTooLarge
        | io::ErrorKind::OutOfMemory => Exit::NoRoom,
        _ => Exit::Other,
    }
}

fn of_source(error: &SourceError) -> Exit {
    match error {
        SourceError::Io { source, .. } | SourceError::Index(IndexError::Io { source, .. }) => of_io(source),
        SourceError::Checkpoint(error) => of_checkpoint(error),
        SourceError::Empty { .. } => Exit::NotFound,
        SourceError::Index(_) => Exit::Damaged,
        SourceError::TensorName { .. } | SourceError::FileName { .. } | SourceError::Double { .. } => {
            Exit::Other
        }
    }
}

fn of_checkpoint(error: &CheckpointError) -> Exit {
    match error {
        CheckpointError::Io { source, .. } => of_io(source),
        CheckpointError::Kind { .. } => Exit::Usage,
        CheckpointError::Map { source, .. } => of_mapping(source),
        CheckpointError::HeaderLength { .. }
        | CheckpointError::TooShort { .. }
        | CheckpointError::Header { .. }
        | CheckpointError::HeaderText { .. }
        | CheckpointError::Length { .. } => Exit::Damaged,
    }
}

/// A file that may not be mapped is refused, unless the system has another reason.
fn of_mapping(error: &MemoryError) -> Exit {
    match error {
        MemoryError::Mapping { source, .. } | MemoryError::NoLease { source } => match of_io(source) {
            Exit::Other => Exit::Refused,
            exit => exit,
        },
        MemoryError::Limit { .. } => Exit::NoRoom,
        _ => Exit::Refused,
    }
}

fn of_output(error: &OutputError) -> Exit {
    match error {
        OutputError::Io { source, .. } => of_io(source),
        OutputError::NoName { .. } | OutputError::Kind { .. } | OutputError::NoFolder { .. } => Exit::Usage,
        OutputError::Space { .. } => Exit::NoRoom,
        OutputError::Closed | OutputError::Exists { .. } => Exit::Other,
    }
}

fn of_bench(error: &BenchError) -> Exit {
    match error {
        BenchError::NotServed { error, .. } | BenchError::Row { error, .. } => error.exit(),
        BenchError::NotBench { .. } => Exit::NotFound,
        BenchError::Busy { .. } => Exit::Refused,
        BenchError::Spawn(error) => of_io(error),
        BenchError::Version { .. } | BenchError::NoAddress => Exit::Other,
    }
}

fn of_worker(error: &WorkerError) -> Exit {
    match error {
        WorkerError::Config { .. } | WorkerError::Control(ControlError::BadAddress { .. }) => Exit::Usage,
        WorkerError::Control(ControlError::Bind { .. }) => Exit::NoRoom,
        WorkerError::Control(
            ControlError::SecretNeeded { .. }
            | ControlError::WrongSecret { .. }
            | ControlError::NoSecret { .. }
            | ControlError::SecretFile { .. }
            | ControlError::Tls { .. }
            | ControlError::NameNotProven { .. }
            | ControlError::Refused { .. },
        )
        | WorkerError::NameTaken { .. } => Exit::Refused,
        WorkerError::Control(ControlError::Misbehaved { .. } | ControlError::FrameTooLarge { .. }) => {
            Exit::Other
        }
        // A limit of the server.
        WorkerError::Remote { status, .. } if status.code == Code::ResourceExhausted => Exit::Refused,
        error => of_code(error.code()),
    }
}

fn of_code(code: Code) -> Exit {
    match code {
        Code::NotFound => Exit::NotFound,
        Code::Unavailable | Code::DeadlineExceeded | Code::Aborted => Exit::Unreachable,
        Code::PermissionDenied | Code::Unauthenticated => Exit::Refused,
        Code::ResourceExhausted => Exit::NoRoom,
        Code::DataLoss => Exit::Damaged,
        _ => Exit::Other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tensorwire::Code;

    use super::{Exit, TABLE, of_code};
    use crate::failure::Failure;

    #[test]
    fn the_book_lists_every_exit_code() {
        let page = include_str!("../../../docs/src/command.md");
        for (code, meaning) in TABLE {
            let row = format!("| {code} | {meaning} |");
            assert!(page.contains(&row), "docs/src/command.md does not have the row: {row}");
        }
    }

    #[test]
    fn damage_has_a_code_of_its_own() {
        let damage = Failure::Checksum { name: "a".to_owned(), found: 1, expected: 2 };
        assert_eq!(damage.exit(), Exit::Damaged);
        assert_eq!(of_code(Code::DataLoss), Exit::Damaged);
    }

    #[test]
    fn a_pull_that_gave_up_ends_as_its_last_attempt() {
        let last = Box::new(Failure::Restarted { address: "127.0.0.1:1".to_owned() });
        assert_eq!(Failure::GaveUp { last, limit: Duration::from_secs(1) }.exit(), Exit::Unreachable);
    }
}
