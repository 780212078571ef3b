//! The command line, and what it means.

mod faults;
mod flags;
mod settings;

pub(crate) use self::{
    faults::{AtStep, Fault, RoleName},
    flags::{Flags, with_dashes},
    settings::{Mode, Role, Settings},
};

/// An option with a value that can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--{option} = `{value}`: {remedy}")]
pub(crate) struct BadOption {
    option: &'static str,
    value: String,
    remedy: String,
}

impl BadOption {
    fn new(option: &'static str, value: &impl ToString, remedy: impl Into<String>) -> Self {
        Self { option, value: value.to_string(), remedy: remedy.into() }
    }
}
