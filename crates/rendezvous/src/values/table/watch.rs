//! Waiting for the end of a step.

use std::task::{Poll, Waker};

use tensorwire_protocol::Status;

use super::{
    StepQueues,
    waiters::{Look, WaiterIndex},
};

/// A task that is woken if the step is aborted. The step knows it from the first poll until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch<'step> {
    step: &'step StepQueues,
    place: Option<WaiterIndex>,
}

impl<'step> Watch<'step> {
    pub(crate) fn new(step: &'step StepQueues) -> Self {
        Self { step, place: None }
    }

    /// The status of the abort. Until then `waker` is stored.
    pub(crate) fn poll_aborted(&mut self, waker: &Waker) -> Poll<Status> {
        let mut inner = self.step.lock();
        if let Some(status) = &inner.aborted {
            return Poll::Ready(status.clone());
        }
        let look = inner.queues.watch(&mut self.place, waker);
        drop(inner);
        // Dropped outside the lock, because a waker's drop may run foreign code.
        if let Look::Waits(replaced) = look {
            drop(replaced);
        }
        Poll::Pending
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            let left = self.step.lock().queues.stop_watching(place);
            drop(left);
        }
    }
}
