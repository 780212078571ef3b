//! Whether a rank answers.

use std::time::Duration;

use tensorwire_rendezvous::{Peer, WorkerError};

use crate::error::GroupError;

/// How long a rank may take to answer before it counts as lost.
const PROBE: Duration = Duration::from_secs(2);

/// The name of a tensor that no worker publishes: a rank that says so is alive.
const PROBED: &str = "tensorwire: is this rank alive?";

/// Whether this incarnation of a worker answers.
///
/// # Errors
/// This rank's own worker cannot ask.
pub(super) async fn is_alive(peer: &Peer, incarnation: u64, limit: Duration) -> Result<bool, GroupError> {
    match peer.fetch(PROBED).timeout(PROBE.min(limit)).await {
        // Another process may have its name by now.
        Ok(_) | Err(WorkerError::Remote { .. }) => Ok(peer.incarnation() == Some(incarnation)),
        Err(error) => others_error(error).map(|()| false),
    }
}

/// # Errors
/// The error is one of this rank's own worker.
pub(super) fn others_error(error: WorkerError) -> Result<(), GroupError> {
    match error {
        WorkerError::ShutDown | WorkerError::Limit { .. } => Err(error.into()),
        _ => Ok(()),
    }
}
