//! Whether a rank answers.

use std::time::Duration;

use tensorwire_rendezvous::{Peer, WorkerError};

use crate::error::GroupError;

/// How long a rank may take to answer a probe before it counts as lost.
const PROBE: Duration = Duration::from_secs(2);

/// The name of a tensor that no worker publishes. A rank that answers that it has none is alive.
const PROBED: &str = "tensorwire: is this rank alive?";

/// Whether this incarnation of a worker answers.
///
/// # Errors
/// An error of this rank's own worker.
pub(super) async fn is_alive(peer: &Peer, incarnation: u64, limit: Duration) -> Result<bool, GroupError> {
    match peer.fetch(PROBED).timeout(PROBE.min(limit)).await {
        // The answer may come from a later process with the same name.
        Ok(_) | Err(WorkerError::Remote { .. }) => Ok(peer.incarnation() == Some(incarnation)),
        Err(error) => own_error(error).map(|()| false),
    }
}

/// # Errors
/// Returns `error` if this rank's own worker has failed, and not the peer.
pub(super) fn own_error(error: WorkerError) -> Result<(), GroupError> {
    match error {
        WorkerError::ShutDown | WorkerError::Limit { .. } => Err(error.into()),
        _ => Ok(()),
    }
}
