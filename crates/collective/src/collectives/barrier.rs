//! Barriers: no rank goes on before all have called them.

use crate::{
    call::{Call, CallKind},
    collectives::collective::Collective,
    group::{
        Group,
        barrier::{meet_all, meet_all_acknowledged},
    },
};

impl Group {
    /// Completes when all ranks have called it. They send at most size · ⌈log₂ size⌉ messages in all (Hensgen, Finkel and Manber
    /// 1988).
    ///
    /// # Errors
    /// Awaiting it returns a [`GroupError`](crate::GroupError).
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn barrier(&self) -> Collective<()> {
        let calling = self.call(|number| Call::plain(number, CallKind::Barrier));
        Collective::meeting_all(calling, |calling| Box::pin(meet_all(calling)))
    }

    /// Completes when all ranks have called it and no rank needs anything more from this one. The group is over then: all its
    /// clones may be dropped, and the worker may be shut down. Waits for this rank's earlier calls, which must be awaited before
    /// this or at the same time. Takes twice as many messages as a [`barrier`](Self::barrier).
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn close(self) -> Collective<()> {
        let calling = self.call(|number| Call::plain(number, CallKind::Close));
        Collective::meeting_all(calling, |calling| Box::pin(meet_all_acknowledged(calling)))
    }
}
