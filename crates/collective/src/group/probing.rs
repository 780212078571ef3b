//! Whether a rank answers.

use std::time::Duration;

use tensorwire_fabric::timeout;
use tensorwire_rendezvous::{Peer, Worker, WorkerError, control::ControlError};

use super::member::Member;
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

/// Whether the worker of a record has ended. One that answers anything, also that it does not know this worker's secret, has not.
///
/// # Errors
/// An error of this rank's own worker.
pub(super) async fn is_gone(worker: &Worker, member: &Member, limit: Duration) -> Result<bool, GroupError> {
    let limit = PROBE.min(limit);
    if member.worker == worker.name() {
        // A live worker of this name refuses this one.
        let dialled = timeout(&**worker.runtime(), limit, worker.peer_at(&member.address)).await;
        return match dialled {
            Ok(Err(error)) => is_silence(error),
            Ok(Ok(_)) | Err(_) => Ok(true),
        };
    }
    let (peer, _hint) = worker.hint_address(&member.worker, &member.address)?;
    match peer.fetch(PROBED).timeout(limit).await {
        Ok(_) | Err(WorkerError::Remote { .. }) => Ok(peer.incarnation() != Some(member.incarnation)),
        Err(error) => is_silence(error),
    }
}

fn is_silence(error: WorkerError) -> Result<bool, GroupError> {
    let is_silence = matches!(
        error,
        WorkerError::DeadlineExceeded { .. }
            | WorkerError::PeerLost { .. }
            // Another worker listens there.
            | WorkerError::Config { field: "cluster", .. }
            | WorkerError::Control(ControlError::Unreachable { .. })
    );
    own_error(error).map(|()| is_silence)
}

/// # Errors
/// Returns `error` if this rank's own worker has failed, and not the peer.
pub(super) fn own_error(error: WorkerError) -> Result<(), GroupError> {
    match error {
        WorkerError::ShutDown | WorkerError::Limit { .. } => Err(error.into()),
        _ => Ok(()),
    }
}
