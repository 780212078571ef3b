//! Errors as peers get them.

use tensorwire_protocol::Status;

use super::WorkerError;

/// The status of an error that has one; otherwise its [code](WorkerError::code) and its text.
impl From<WorkerError> for Status {
    fn from(error: WorkerError) -> Self {
        match error {
            WorkerError::Aborted { status, .. }
            | WorkerError::Cancelled { status, .. }
            | WorkerError::Remote { status, .. }
            | WorkerError::Local { status, .. } => status,
            error => Self::new(error.code(), error.to_string()),
        }
    }
}
