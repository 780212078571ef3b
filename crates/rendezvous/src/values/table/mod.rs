//! Matching of sends and receives of a step: in order for each key, without blocking the sender.

mod queue_key;
mod queues;
mod take;
mod waiters;
mod watch;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Waker,
};

use tensorwire_protocol::{Code, Status, Take as NowOrLater};
use tokio_util::sync::CancellationToken;

pub(crate) use self::{
    queue_key::QueueKey,
    take::{CancellableTake, Take},
    watch::Watch,
};
use self::{
    queues::{Found, Offered, Queues},
    take::TakeState,
    waiters::{Look, WaiterEntry, WaiterIndex},
};
use crate::values::{arguments::SendArgs, duplicates::DuplicatePolicy, tensor::Tensor};

/// A value with its sender's arguments.
#[derive(Debug, Clone)]
pub(crate) struct Value {
    pub(crate) tensor: Tensor,
    pub(crate) send_args: SendArgs,
    /// The position among all values of the step.
    sequence: u64,
}

/// A value taken out of the queues for one receiver.
#[derive(Debug)]
pub(crate) struct TakenValue {
    pub(crate) value: Value,
    step: Arc<StepQueues>,
    key: QueueKey,
}

impl TakenValue {
    /// Returns the value to its position in the queue.
    pub(crate) fn put_back(self) {
        self.step.put_back(&self.key, self.value);
    }
}

/// The queues of values and receivers of one step.
#[derive(Debug)]
pub(crate) struct StepQueues {
    inner: Mutex<LockedQueues>,
    /// Set by the abort under the lock, and read without it.
    is_aborted: AtomicBool,
    waiting_values: Arc<AtomicUsize>,
    duplicates: DuplicatePolicy,
}

#[derive(Debug, Default)]
struct LockedQueues {
    aborted: Option<Status>,
    /// Grows with every value of the step. It orders values that are put back, even after their queue was removed and
    /// created again.
    next_sequence: u64,
    queues: Queues,
}

/// The status of a receiver whose step was dropped.
pub(crate) fn dropped() -> Status {
    Status::new(Code::Aborted, "the step was dropped")
}

/// The status of a receive that its token cancelled.
pub(crate) fn cancelled() -> Status {
    Status::new(Code::Cancelled, "RecvAsync is cancelled.").derived()
}

fn duplicated(what: &str, key: &QueueKey) -> Status {
    Status::new(Code::Aborted, format!("Duplicated {what}: {key}"))
}

/// The reason why a value was not accepted.
#[derive(Debug)]
pub(crate) enum SendRefused {
    /// Too many values wait.
    Full {
        waiting: usize,
        cap: usize,
    },
    Aborted(Status),
}

impl StepQueues {
    /// Empty queues. Their values are also counted in `waiting_values`.
    pub(crate) fn new(waiting_values: &Arc<AtomicUsize>, duplicates: DuplicatePolicy) -> Self {
        let waiting_values = waiting_values.clone();
        Self { inner: Mutex::default(), is_aborted: AtomicBool::new(false), waiting_values, duplicates }
    }

    /// The status of the abort, if the step was aborted.
    pub(crate) fn aborted(&self) -> Option<Status> {
        if self.is_aborted.load(Ordering::Acquire) { self.lock().aborted.clone() } else { None }
    }

    /// Whether there are no values and no receivers, and the step was not aborted.
    pub(crate) fn is_unused(&self) -> bool {
        let inner = self.lock();
        inner.aborted.is_none() && inner.queues.is_empty()
    }

    /// Takes the next value of `key`. The receiver is queued before this returns.
    #[cfg(test)]
    pub(crate) fn take(self: &Arc<Self>, key: impl Into<QueueKey>) -> Take {
        Take::new(self, key.into(), None)
    }

    /// Takes the next value of `key`, unless `token` is cancelled. The receiver is queued before this returns.
    pub(crate) fn take_unless(
        self: &Arc<Self>,
        key: impl Into<QueueKey>,
        token: Option<&CancellationToken>,
    ) -> CancellableTake {
        CancellableTake::new(Take::new(self, key.into(), token), token)
    }

    /// Like [`take_unless`](Self::take_unless), without a future if the value is available or can never be.
    pub(crate) fn take_or_wait(
        self: &Arc<Self>,
        key: QueueKey,
        token: Option<&CancellationToken>,
    ) -> NowOrLater<TakenValue, CancellableTake> {
        match self.register(&key, token) {
            TakeState::Ready(ready) => {
                NowOrLater::Now(ready.map(|value| TakenValue { value, step: self.clone(), key }))
            }
            state => {
                let take = Take { step: self.clone(), key, state };
                NowOrLater::Later(CancellableTake::new(take, token))
            }
        }
    }

    /// Takes the next value of `key`, if one is available.
    pub(crate) fn take_now(self: &Arc<Self>, key: impl Into<QueueKey>) -> Result<Option<TakenValue>, Status> {
        let key = key.into();
        let mut inner = self.lock();
        if let Some(status) = &inner.aborted {
            return Err(status.clone());
        }
        let taken = inner.queues.pop(self.duplicates, &key);
        drop(inner);
        Ok(taken.map(|value| TakenValue { value: self.popped(value), step: self.clone(), key }))
    }

    fn register(&self, key: &QueueKey, token: Option<&CancellationToken>) -> TakeState {
        let mut inner = self.lock();
        if let Some(status) = &inner.aborted {
            return TakeState::Ready(Err(status.clone()));
        }
        match inner.queues.receive(self.duplicates, key, token) {
            Found::Value(value) => TakeState::Ready(Ok(self.popped(value))),
            Found::Waits(place) => TakeState::Waiting(place),
            Found::Cancelled => TakeState::Ready(Err(cancelled())),
            Found::Duplicate => TakeState::Ready(Err(duplicated("recv", key))),
        }
    }

    fn popped(&self, value: Value) -> Value {
        if self.duplicates != DuplicatePolicy::Tolerate {
            self.waiting_values.fetch_sub(1, Ordering::Relaxed);
        }
        value
    }

    /// Gives `tensor` to the oldest receiver of `key`, or queues it.
    pub(crate) fn send(
        &self,
        key: impl Into<QueueKey>,
        send_args: SendArgs,
        tensor: Tensor,
    ) -> Result<(), Status> {
        let key = &key.into();
        let mut inner = self.lock();
        if let Some(status) = &inner.aborted {
            return Err(status.clone());
        }
        if inner.queues.would_duplicate(self.duplicates, key) {
            return Err(duplicated("send", key));
        }
        let sequence = inner.next_sequence;
        inner.next_sequence += 1;
        self.offer(inner, key, Value { tensor, send_args, sequence });
        Ok(())
    }

    /// Gives a returned value to the oldest receiver, or queues it by its sequence number.
    fn put_back(&self, key: &QueueKey, value: Value) {
        tensorwire_testpoints::mark!("an undelivered value was queued again");
        let inner = self.lock();
        // With `Tolerate`, taking a value does not remove it from the queue.
        if inner.aborted.is_none() && self.duplicates != DuplicatePolicy::Tolerate {
            self.offer(inner, key, value);
        }
    }

    fn offer(&self, mut inner: MutexGuard<'_, LockedQueues>, key: &QueueKey, value: Value) {
        let Offered { given_to, queued } = inner.queues.offer(self.duplicates, key, value);
        self.waiting_values.fetch_add(usize::from(queued), Ordering::Relaxed);
        drop(inner);
        given_to.wake();
    }

    /// Ends the step with `status`, unless it was aborted before.
    pub(crate) fn abort(&self, status: &Status) {
        let ended = {
            let mut inner = self.lock();
            if inner.aborted.is_some() {
                return;
            }
            inner.aborted = Some(status.clone());
            self.is_aborted.store(true, Ordering::Release);
            inner.queues.end()
        };
        self.waiting_values.fetch_sub(ended.values.len(), Ordering::Relaxed);
        ended.waiting.into_iter().for_each(waiters::Waiter::wake);
    }

    /// Removes the values whose keys `is_meant`. The caller drops them, outside its own locks.
    pub(crate) fn drop_values(&self, is_meant: impl Fn(&QueueKey) -> bool) -> Vec<Value> {
        let dropped = self.lock().queues.drain(is_meant);
        self.waiting_values.fetch_sub(dropped.len(), Ordering::Relaxed);
        dropped
    }

    /// The result of the wait of the receiver `place`, if the wait has ended. Then this frees its entry.
    fn look(&self, place: WaiterIndex, waker: &Waker) -> Option<WaiterEntry<Value>> {
        let look = self.lock().queues.look(place, waker);
        match look {
            Look::Waits(_replaced) => None,
            Look::Ended(entry) => Some(entry),
        }
    }

    /// Removes the receiver `place` of `key`, and returns its entry.
    fn leave(&self, key: &QueueKey, place: WaiterIndex) -> WaiterEntry<Value> {
        self.lock().queues.leave(key, place)
    }

    fn lock(&self) -> MutexGuard<'_, LockedQueues> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
