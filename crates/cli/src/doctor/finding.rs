//! One finding of doctor.

use serde::Serialize;

use super::cause::{Cause, Status};

/// A cause that applies to this machine, and its subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// The check, such as `port`.
    pub(crate) check: &'static str,
    /// The cause, such as `port.down`. Stable.
    pub(crate) cause: &'static str,
    /// The device, or device and port, that the finding is about.
    pub(crate) subject: Option<String>,
    /// How bad it is.
    pub(crate) status: Status,
    /// The finding in words.
    pub(crate) message: String,
    /// The remedy, if one is needed.
    pub(crate) remedy: Option<String>,
}

impl Finding {
    /// A finding of `cause`, with a `message` for this machine.
    pub(super) fn new(cause: &Cause, message: impl Into<String>) -> Self {
        let remedy = (!cause.remedy.is_empty()).then(|| cause.remedy.to_owned());
        let (check, message) = (cause.check(), message.into());
        Self { check, cause: cause.id, subject: None, status: cause.status, message, remedy }
    }

    /// Sets the subject.
    pub(super) fn of(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    /// Fills in a word of the remedy.
    pub(super) fn with(mut self, word: &str, value: &str) -> Self {
        self.remedy = self.remedy.map(|remedy| remedy.replace(&format!("{{{word}}}"), value));
        self
    }

    /// This finding for a device that is not needed.
    pub(super) fn at_most_a_warning(mut self) -> Self {
        self.status = self.status.min(Status::Warning);
        self
    }
}
