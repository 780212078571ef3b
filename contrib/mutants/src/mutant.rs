//! What a mutant is.

use std::fmt;

/// One change of the source.
#[derive(Debug, Clone)]
pub(crate) struct Mutant {
    /// By which it is switched on.
    pub(crate) number: usize,
    /// Its file, from the repository's root.
    pub(crate) file: String,
    pub(crate) line: usize,
    /// The function that it is in, with its type.
    pub(crate) function: String,
    /// What it changes.
    pub(crate) what: String,
}

impl Mutant {
    /// By which it is found again when lines or numbers have moved.
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
