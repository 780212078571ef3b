//! Barriers: nobody goes on before all have come.

use crate::{
    call::{Call, CallKind},
    collectives::collective::Collective,
    group::{
        Group,
        dissemination::{disseminate, disseminate_acknowledged},
    },
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
        let calling = self.call(|number| Call::plain(number, CallKind::Barrier));
        Collective::new(calling, |calling| Box::pin(disseminate(calling))).opening_with_neighbours()
    }

    /// Waits until all ranks have called it, and until nobody needs anything of this rank any more, and ends the group. All clones
    /// of the group may be dropped then, and the worker may be shut down. Waits for this rank's earlier calls, which must be awaited too:
    /// before this, or at the same time. Takes twice the messages of a [`barrier`](Self::barrier).
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn close(self) -> Collective<()> {
        let calling = self.call(|number| Call::plain(number, CallKind::Close));
        Collective::new(calling, |calling| Box::pin(disseminate_acknowledged(calling)))
            .opening_with_neighbours()
    }
}
