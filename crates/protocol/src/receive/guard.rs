//! Values that have arrived and are not returned yet, because others of the same call are missing.

use std::{fmt, sync::Arc};

use super::{Origin, Received};
use crate::{
    Channel, Connection, LentEnd, StepId,
    requests::{Landed, StepKey},
};

/// Owns a received value that was not returned to the caller yet, because other values of the same call are missing.
/// Dropping the guard passes the value of a step to the next receive of its key.
pub struct ReceivedGuard<C: Channel> {
    pub(super) connection: Arc<Connection<C>>,
    /// The step of the value, if it is one of a step.
    step: Option<StepId>,
    pub(super) received: Option<Received<C::Lent>>,
}

impl<C: Channel> fmt::Debug for ReceivedGuard<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedGuard").finish_non_exhaustive()
    }
}

impl<C: Channel> ReceivedGuard<C> {
    /// The value, until it is taken.
    pub fn get(&self) -> Option<&Received<C::Lent>> {
        self.received.as_ref()
    }

    /// As [`get`](Self::get), mutable, so that its bytes can be moved.
    pub fn get_mut(&mut self) -> Option<&mut Received<C::Lent>> {
        self.received.as_mut()
    }

    /// Takes the value out, once.
    pub fn take(&mut self) -> Option<Received<C::Lent>> {
        self.received.take()
    }
}

impl<C: Channel> Drop for ReceivedGuard<C> {
    fn drop(&mut self) {
        self.connection.change(|state, after| {
            if let Some(step) = self.step {
                state.requests.let_go(step);
            }
            let Some(received) = self.received.take() else { return };
            let Received { metadata, lent, origin, check, .. } = received;
            match origin.filter(|_| state.failure().is_ok()) {
                Some(Origin { step, key, number }) => {
                    let landed = Landed { number, metadata, content: lent.into(), check };
                    after.wake(state.requests.stash_or_give(StepKey::new(step, key), landed));
                }
                None => after.take_back(lent.map(|lent| (lent, LentEnd::Content))),
            }
        });
    }
}

impl<C: Channel> Connection<C> {
    /// Holds a received value until the others of its call have come.
    pub fn hold(self: &Arc<Self>, received: Received<C::Lent>) -> ReceivedGuard<C> {
        let step = received.origin.as_ref().map(|origin| origin.step);
        if let Some(step) = step {
            self.lock().requests.hold(step);
        }
        ReceivedGuard { connection: self.clone(), step, received: Some(received) }
    }
}
