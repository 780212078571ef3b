//! How each rank learns that all others have come.

use futures::future::try_join_all;
use tensorwire_rendezvous::{PeerLoss, WorkerError};

use super::calling::{Calling, Ranks};
use crate::error::GroupError;

/// The acknowledgement of a message. Not empty, because a note has bytes.
const RECEIVED: [u8; 1] = [1];

/// Completes when all ranks have called it. A message means that its sender and all ranks of which it has received have come.
pub(crate) async fn meet_all(calling: &Calling) -> Result<(), GroupError> {
    for round in calling.rounds() {
        if round.sends {
            calling.send(round.with, &[]).await?;
        }
        if round.arrival.is_some() {
            calling.receive(round.with, 0).await?;
        }
    }
    Ok(())
}

/// As [`meet_all`], and completes once the ranks to which this one sent have acknowledged it, because a rank that leaves drops
/// messages that others still wait for. A rank acknowledges once `meet_all` is complete. A rank that has left acknowledges nothing,
/// and needs no acknowledgement.
pub(crate) async fn meet_all_acknowledged(calling: &Calling) -> Result<(), GroupError> {
    meet_all(calling).await?;
    let acknowledged = calling.rounds().map(|round| async move {
        if round.arrival.is_some() {
            unless_gone(calling.send_beside_header(round.with, &RECEIVED).await)?;
        }
        if round.sends {
            unless_gone(calling.receive_beside_header(round.with, RECEIVED.len()).await.map(drop))?;
        }
        Ok(())
    });
    try_join_all(acknowledged).await.map(drop)
}

/// The ranks with which this one has messages in [`meet_all`] and in any call that travels by doubling.
pub(crate) fn peers(calling: &Calling) -> Ranks {
    calling.rounds().map(|round| round.with).collect()
}

/// Ignores the error if the other rank has left or its connection has ended.
fn unless_gone(done: Result<(), GroupError>) -> Result<(), GroupError> {
    match done {
        Err(GroupError::Left { .. }) => Ok(()),
        Err(GroupError::RankLost { error, .. }) if has_parted(&error) => Ok(()),
        done => done,
    }
}

/// Whether the rank's worker shut down in order, or its connection ended before the receive was requested.
fn has_parted(error: &WorkerError) -> bool {
    matches!(error, WorkerError::PeerLost { loss: PeerLoss::Goodbye | PeerLoss::StepBroken, .. })
}
