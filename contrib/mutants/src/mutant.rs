//! A mutant.

use std::fmt;

/// One change of the source.
#[derive(Debug, Clone)]
pub(crate) struct Mutant {
    /// The number that switches it on.
    pub(crate) number: usize,
    /// Its file, from the repository's root.
    pub(crate) file: String,
    pub(crate) line: usize,
    /// The function that it is in, with its type.
    pub(crate) function: String,
    /// The change.
    pub(crate) what: String,
}

impl Mutant {
    /// A key that stays the same when lines or numbers change.
    pub(crate) fn key(&self) -> String {
        format!("{} {}: {}", self.file, self.function, self.what)
    }
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, file, line, function, what } = self;
        write!(f, "mutant {number} at {file}:{line} {function}: {what}")
    }
}
