//! The futures that wait for a value.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_protocol::Status;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::{
    QueueKey, StepQueues, TakenValue, Value, cancelled, dropped,
    waiters::{WaiterEntry, WaiterIndex},
};

/// Waits for a value.
///
/// Dropping it removes the receiver from the queue. A value that it was already given returns to its position.
#[derive(Debug)]
pub(crate) struct Take {
    pub(super) step: Arc<StepQueues>,
    pub(super) key: QueueKey,
    pub(super) state: TakeState,
}

#[derive(Debug)]
pub(super) enum TakeState {
    /// The value was available, or the receive failed.
    Ready(Result<Value, Status>),
    Waiting(WaiterIndex),
    /// The value was returned.
    Over,
}

impl Take {
    /// The receiver is queued before this returns, unless a value is available or `token` is cancelled.
    pub(super) fn new(step: &Arc<StepQueues>, key: QueueKey, token: Option<&CancellationToken>) -> Self {
        Self { step: step.clone(), state: step.register(&key, token), key }
    }

    fn is_waiting(&self) -> bool {
        matches!(self.state, TakeState::Waiting(_))
    }

    fn taken(&self, value: Value) -> TakenValue {
        TakenValue { value, step: self.step.clone(), key: self.key.clone() }
    }

    fn ended(&self, how: WaiterEntry<Value>) -> Result<TakenValue, Status> {
        match how {
            WaiterEntry::Given(value) => Ok(self.taken(value)),
            WaiterEntry::Aborted => Err(self.step.aborted().unwrap_or_else(dropped)),
            WaiterEntry::Waiting(_) | WaiterEntry::Cancelled { .. } | WaiterEntry::Free { .. } => {
                Err(cancelled())
            }
        }
    }

    /// Ends the wait, unless the receiver was given a value.
    fn cancel(&mut self) -> Result<TakenValue, Status> {
        match mem::replace(&mut self.state, TakeState::Over) {
            TakeState::Ready(ready) => ready.map(|value| self.taken(value)),
            TakeState::Waiting(place) => self.ended(self.step.leave(&self.key, place)),
            TakeState::Over => Err(cancelled()),
        }
    }
}

impl Future for Take {
    type Output = Result<TakenValue, Status>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match mem::replace(&mut self.state, TakeState::Over) {
            TakeState::Ready(ready) => Poll::Ready(ready.map(|value| self.taken(value))),
            TakeState::Over => Poll::Ready(Err(dropped())),
            TakeState::Waiting(place) => match self.step.look(place, context.waker()) {
                Some(ended) => Poll::Ready(self.ended(ended)),
                None => {
                    self.state = TakeState::Waiting(place);
                    Poll::Pending
                }
            },
        }
    }
}

impl Drop for Take {
    fn drop(&mut self) {
        match mem::replace(&mut self.state, TakeState::Over) {
            TakeState::Ready(Ok(value)) => self.step.put_back(&self.key, value),
            TakeState::Waiting(place) => {
                if let WaiterEntry::Given(value) = self.step.leave(&self.key, place) {
                    self.step.put_back(&self.key, value);
                }
            }
            TakeState::Ready(Err(_)) | TakeState::Over => {}
        }
    }
}

/// A [`Take`] that a token can cancel. An available value takes precedence.
pub(crate) struct CancellableTake {
    take: Take,
    /// Boxed, so that the future is `Unpin`. `None` unless the receive has to wait and has a token.
    cancellation: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl CancellableTake {
    pub(super) fn new(take: Take, token: Option<&CancellationToken>) -> Self {
        let token = token.filter(|_| take.is_waiting());
        Self { cancellation: token.map(|token| Box::pin(token.clone().cancelled_owned())), take }
    }
}

impl fmt::Debug for CancellableTake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.take.fmt(f)
    }
}

impl Future for CancellableTake {
    type Output = Result<TakenValue, Status>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Poll::Ready(taken) = Pin::new(&mut this.take).poll(context) {
            // Dropped before the value is returned, because its receiver may drop the token.
            this.cancellation = None;
            return Poll::Ready(taken);
        }
        let Some(cancellation) = &mut this.cancellation else { return Poll::Pending };
        if cancellation.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        this.cancellation = None;
        Poll::Ready(this.take.cancel())
    }
}
