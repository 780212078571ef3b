//! How ranks make sure that all have come.

use tensorwire_rendezvous::{PeerLoss, WorkerError};

use super::calling::Calling;
use crate::{call::CallKind, error::GroupError};

/// Completes when all ranks do this. In each round, a rank tells the one twice as far behind it as in the round before that it has
/// come, and with that all of whom it has heard: the dissemination barrier (Hensgen, Finkel and Manber 1988).
pub(crate) async fn disseminate(calling: &Calling) -> Result<(), GroupError> {
    let (rank, size) = (calling.rank(), calling.size());
    let mut distance = 1;
    while distance < size {
        calling.send((rank + distance) % size, &[]).await?;
        match calling.receive((rank + size - distance) % size, 0).await {
            // Who has left after this call knew that all have come.
            Err(GroupError::Left { .. }) if calling.call.kind == CallKind::Close => {}
            Err(GroupError::RankLost { error, .. })
                if calling.call.kind == CallKind::Close && is_goodbye(&error) => {}
            received => drop(received?),
        }
        distance *= 2;
    }
    Ok(())
}

/// Whether the rank's worker was shut down in order.
fn is_goodbye(error: &WorkerError) -> bool {
    matches!(error, WorkerError::PeerLost { loss: PeerLoss::Goodbye, .. })
}
