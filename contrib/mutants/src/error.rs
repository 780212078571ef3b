//! Errors that end a run.

use std::{io, path::PathBuf};

/// The reason why there is no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {source}")]
    Syntax { path: String, source: syn::Error },
    #[error(
        "{0} is in none of the groups of contrib/mutants/plan.txt: name a file that one of them has, or add it there"
    )]
    Unplanned(String),
    #[error(
        "plan.txt, line {0}: expected `PATH...: PACKAGE/TARGET...`, TARGET being `lib` or an integration test"
    )]
    Plan(usize),
    #[error("{list}: no mutant is `{key}`: correct the entry or delete it")]
    Unknown { list: PathBuf, key: String },
    #[error("{list}: `{key}` has no reason: say in an indented line below it why it is harmless")]
    Unreasoned { list: PathBuf, key: String },
    #[error("{command} ended with {status}: run it in {place} to see why")]
    Command { command: String, status: String, place: PathBuf },
    #[error("the copy with mutants does not compile, and no mutant stands where the compiler points:\n{0}")]
    Build(String),
    #[error("{0}")]
    Unclean(String),
}

/// Names the file in an I/O error.
pub(crate) fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error::Io { path, source }
}
