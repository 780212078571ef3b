//! Barriers: nobody goes on before all have come.

use crate::{
    call::{Call, CallKind},
    collectives::collective::Collective,
    group::{Group, dissemination::disseminate},
};

impl Group {
    /// Completes when all ranks have called it. Takes ⌈log₂ size⌉ messages of each rank, one after the other: the dissemination
    /// barrier (Hensgen, Finkel and Manber 1988).
    ///
    /// # Errors
    /// Awaiting it returns a [`GroupError`](crate::GroupError).
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
