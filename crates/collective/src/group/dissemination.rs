//! Dissemination: how each rank learns that all others have come.

use futures::future::try_join_all;
use tensorwire_rendezvous::{PeerLoss, WorkerError};

use super::calling::Calling;
use crate::error::GroupError;

/// The acknowledgement of a message. Not empty, because an empty content is not sent.
const RECEIVED: [u8; 1] = [1];

/// Completes when all ranks have called it: the dissemination barrier (Hensgen, Finkel and Manber 1988). In each round a rank
/// sends to the rank twice as far ahead as in the round before. Its message means that it and all ranks of which it has received
/// have come.
pub(crate) async fn disseminate(calling: &Calling) -> Result<(), GroupError> {
    let (rank, size) = (calling.rank(), calling.size());
    let mut distance = 1;
    while distance < size {
        calling.send((rank + distance) % size, &[]).await?;
        calling.receive((rank + size - distance) % size, 0).await?;
        distance *= 2;
    }
    Ok(())
}

/// As [`disseminate`], and completes once the ranks to which this one sent have acknowledged it, because a rank that leaves drops
/// messages that others still wait for. A rank acknowledges once `disseminate` is complete. A rank that has left acknowledges
/// nothing, and needs no acknowledgement.
pub(crate) async fn disseminate_acknowledged(calling: &Calling) -> Result<(), GroupError> {
    disseminate(calling).await?;
    let (rank, size) = (calling.rank(), calling.size());
    let distances = std::iter::successors(Some(1), |distance| Some(distance * 2));
    let acknowledged = distances.take_while(|distance| *distance < size).map(|distance| async move {
        unless_gone(calling.send((rank + size - distance) % size, &RECEIVED).await)?;
        unless_gone(calling.receive((rank + distance) % size, RECEIVED.len()).await.map(drop))
    });
    try_join_all(acknowledged).await.map(drop)
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
