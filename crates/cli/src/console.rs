//! What the command prints, and where.

use std::io::Write;

use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::{
    failure::Failure,
    print,
    progress::{self, StatusLine},
};

/// What the command prints, and where. Results and errors are always printed.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Console {
    /// Print JSON for programs, and nothing else, on standard output; messages go to standard error.
    #[arg(long, env = "TENSORWIRE_JSON")]
    pub(crate) json: bool,
    /// Print no progress and no information. Results, warnings and errors are still printed.
    #[arg(short, long, env = "TENSORWIRE_QUIET")]
    pub(crate) quiet: bool,
}

impl Console {
    /// Prints information for people, in whole lines. Text that cannot be written is dropped.
    pub(crate) fn say(self, text: &str) {
        match self {
            Self { json: false, quiet: false } => drop(print(text)),
            _ => self.say_aside(text),
        }
    }

    /// The same, on standard error even without JSON.
    pub(crate) fn say_aside(self, text: &str) {
        if !self.quiet {
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }

    /// Prints `event` as one line of JSON, if JSON is wanted. A line that cannot be written is dropped.
    pub(crate) fn event(self, event: &impl Serialize) {
        if let (true, Ok(line)) = (self.json, serde_json::to_string(event)) {
            let _ = print(&format!("{line}\n"));
        }
    }

    /// A bar on standard error for `bytes` bytes; `what` is shown before it, and the message after it.
    pub(crate) fn byte_bar(self, what: &str, bytes: u64) -> ProgressBar {
        if self.quiet { ProgressBar::hidden() } else { progress::byte_bar(what, bytes) }
    }

    /// A line on standard error for work of unknown duration. Dropping it removes the line.
    pub(crate) fn phase(self, what: &str) -> Option<StatusLine> {
        (!self.quiet).then(|| progress::phase(what))
    }
}

/// A document of JSON, as text.
pub(crate) fn document(value: &impl Serialize) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(value).map_err(Failure::Json)? + "\n")
}
