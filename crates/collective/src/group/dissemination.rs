//! How ranks make sure that all have come.

use futures::future::try_join_all;
use tensorwire_rendezvous::{PeerLoss, WorkerError};

use super::calling::Calling;
use crate::error::GroupError;

/// What a rank tells those of which it has heard when it needs nothing any more. An empty message is not sent.
const RECEIVED: [u8; 1] = [1];

/// Completes when all ranks do this. In each round, a rank tells the one twice as far behind it as in the round before that it has
/// come, and with that all of whom it has heard: the dissemination barrier (Hensgen, Finkel and Manber 1988).
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

/// As [`disseminate`], and completes once the ranks that this one told have received that: whoever leaves earlier takes messages with
/// it that others still wait for. They say so once they have heard of all. One that has left itself says nothing, and needs
/// nothing any more.
pub(crate) async fn part(calling: &Calling) -> Result<(), GroupError> {
    disseminate(calling).await?;
    let (rank, size) = (calling.rank(), calling.size());
    let distances = std::iter::successors(Some(1), |distance| Some(distance * 2));
    let told = distances.take_while(|distance| *distance < size).map(|distance| async move {
        unless_gone(calling.send((rank + size - distance) % size, &RECEIVED).await)?;
        unless_gone(calling.receive((rank + distance) % size, RECEIVED.len()).await.map(drop))
    });
    try_join_all(told).await.map(drop)
}

/// Nothing, if the other rank has left, or its connection has ended.
fn unless_gone(done: Result<(), GroupError>) -> Result<(), GroupError> {
    match done {
        Err(GroupError::Left { .. }) => Ok(()),
        Err(GroupError::RankLost { error, .. }) if has_parted(&error) => Ok(()),
        done => done,
    }
}

/// Whether the rank's worker was shut down in order, or the connection ended before this was asked for.
fn has_parted(error: &WorkerError) -> bool {
    matches!(error, WorkerError::PeerLost { loss: PeerLoss::Goodbye | PeerLoss::StepBroken, .. })
}
