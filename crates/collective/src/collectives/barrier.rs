//! Barriers: nobody goes on before all have come.

use crate::{
    call::{Call, CallKind},
    collectives::collective::Collective,
    error::GroupError,
    group::{Group, calling::Calling},
};

impl Group {
    /// Completes when all ranks have called it. Takes ⌈log₂ size⌉ messages of each rank, one after the other: the dissemination
    /// barrier (Hensgen, Finkel and Manber 1988).
    ///
    /// # Errors
    /// Awaiting it returns a [`GroupError`].
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn barrier(&self) -> Collective<()> {
        collective(self, CallKind::Barrier)
    }

    /// Waits until all ranks have called it, so that nobody needs anything of this rank any more, and ends the group. The others'
    /// clones of the group may be dropped then.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn close(self) -> Collective<()> {
        collective(&self, CallKind::Close)
    }
}

fn collective(group: &Group, kind: CallKind) -> Collective<()> {
    let calling = group.call(|number| Call::plain(number, kind));
    Collective::new(calling, |calling| Box::pin(disseminate(calling))).opening_with_neighbours()
}

/// A barrier of a call that is made for it.
pub(crate) async fn run(calling: &Calling) -> Result<(), GroupError> {
    calling.complete(true, disseminate(calling)).await
}

/// In each round, a rank tells the one twice as far behind it as in the round before that it has come, and that all of whom it has
/// heard have.
async fn disseminate(calling: &Calling) -> Result<(), GroupError> {
    let (rank, size) = (calling.rank(), calling.size());
    let mut distance = 1;
    while distance < size {
        calling.send(rank.wrapping_add(distance) % size, &[]).await?;
        calling.receive((rank + size - distance) % size, 0).await?;
        distance *= 2;
    }
    Ok(())
}
