//! Environment variables.

use super::LaunchError;

/// An environment.
#[derive(Clone, Copy)]
pub(super) struct Variables<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// The variable's value, trimmed. `None` if it is empty, because scripts set empty variables for unknown values.
    pub(super) fn get(self, name: &str) -> Option<String> {
        let value = self.0(name)?.trim().to_owned();
        (!value.is_empty()).then_some(value)
    }
}

/// Parses the value of `variable`.
///
/// # Errors
/// [`LaunchError::NotANumber`].
pub(super) fn number(variable: &'static str, value: String, by: &'static str) -> Result<usize, LaunchError> {
    // `parse` alone would accept a sign.
    let digits = value.bytes().all(|digit| digit.is_ascii_digit());
    match value.parse() {
        Ok(number) if digits => Ok(number),
        _ => Err(LaunchError::NotANumber { variable, value, by }),
    }
}
