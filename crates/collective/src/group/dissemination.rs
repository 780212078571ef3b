//! How ranks make sure that all have come.

use super::calling::Calling;
use crate::error::GroupError;

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
