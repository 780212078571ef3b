//! Where sends and receives of a step meet: in order for each key, never blocking the sender.

mod queues;
mod take;
mod waiters;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::Waker,
};

use tensorwire_protocol::{Code, Status};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) use self::take::{CancellableTake, Take};
use self::{
    queues::{Found, Offered, Queues},
    take::TakeState,
    waiters::{Look, WaiterEntry, WaiterIndex},
};
use crate::values::{arguments::SendArgs, duplicates::DuplicatePolicy, tensor::Tensor};

/// A value, and what its sender said of it.
#[derive(Debug, Clone)]
pub(crate) struct Value {
    pub(crate) tensor: Tensor,
    pub(crate) send_args: SendArgs,
    /// Its place among the values of the step.
    sequence: u64,
}

/// A value taken out of the table for one receiver.
#[derive(Debug)]
pub(crate) struct TakenValue {
    pub(crate) value: Value,
    step: Arc<StepQueues>,
    key: Arc<str>,
}

impl TakenValue {
    /// Puts the value back to where it was.
    pub(crate) fn put_back(self) {
        self.step.put_back(&self.key, self.value);
    }
}

/// One step's queues.
#[derive(Debug)]
pub(crate) struct StepQueues {
    inner: Mutex<LockedQueues>,
    /// Turns true with the abort.
    ended: watch::Sender<bool>,
    waiting_values: Arc<AtomicUsize>,
    duplicates: DuplicatePolicy,
}

#[derive(Debug, Default)]
struct LockedQueues {
    aborted: Option<Status>,
    /// Grows with every value of the step, so that a value put back finds its place even after its queue was
    /// emptied and made anew.
    next_sequence: u64,
    queues: Queues,
}

/// The step went away under a receiver.
pub(crate) fn dropped() -> Status {
    Status::new(Code::Aborted, "the step was dropped")
}

/// A receive was given up by its token.
pub(crate) fn cancelled() -> Status {
    Status::new(Code::Cancelled, "RecvAsync is cancelled.").derived()
}

fn duplicated(what: &str, key: &str) -> Status {
    Status::new(Code::Aborted, format!("Duplicated {what}: {key}"))
}

/// Why a value was not accepted.
#[derive(Debug)]
pub(crate) enum SendRefused {
    /// So many values wait already, of so many that may.
    Full {
        waiting: usize,
        cap: usize,
    },
    Aborted(Status),
}

impl StepQueues {
    /// A step whose values are counted in `waiting_values` too.
    pub(crate) fn new(waiting_values: &Arc<AtomicUsize>, duplicates: DuplicatePolicy) -> Self {
        let waiting_values = waiting_values.clone();
        Self { inner: Mutex::default(), ended: watch::Sender::new(false), waiting_values, duplicates }
    }

    /// Why it is over, if it is.
    pub(crate) fn aborted(&self) -> Option<Status> {
        self.lock().aborted.clone()
    }

    /// Turns true with the abort.
    pub(crate) fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    /// Whether nothing was sent, nobody waits, and it isn't over.
    pub(crate) fn is_unused(&self) -> bool {
        let inner = self.lock();
        inner.aborted.is_none() && inner.queues.is_empty()
    }

    /// Interest in the next value of `key`, registered before this returns.
    #[cfg(test)]
    pub(crate) fn take(self: &Arc<Self>, key: &str) -> Take {
        Take::new(self, self.register(key, None))
    }

    /// Interest in the next value of `key` until `token` is cancelled, registered before this returns.
    pub(crate) fn take_unless(
        self: &Arc<Self>,
        key: &str,
        token: Option<&CancellationToken>,
    ) -> CancellableTake {
        CancellableTake::new(Take::new(self, self.register(key, token)), token)
    }

    /// The next value of `key`, if it is there.
    pub(crate) fn take_now(self: &Arc<Self>, key: &str) -> Result<Option<TakenValue>, Status> {
        let mut inner = self.lock();
        if let Some(status) = &inner.aborted {
            return Err(status.clone());
        }
        let taken = inner.queues.pop(self.duplicates, key);
        drop(inner);
        Ok(taken.map(|taken| self.popped(taken)).map(|(key, value)| TakenValue {
            value,
            step: self.clone(),
            key,
        }))
    }

    fn register(&self, key: &str, token: Option<&CancellationToken>) -> TakeState {
        let mut inner = self.lock();
        if let Some(status) = &inner.aborted {
            return TakeState::Ready(Err(status.clone()));
        }
        match inner.queues.receive(self.duplicates, key, token) {
            Found::Value(key, value) => TakeState::Ready(Ok(self.popped((key, value)))),
            Found::Waits(key, place) => TakeState::Waiting(key, place),
            Found::Cancelled => TakeState::Ready(Err(cancelled())),
            Found::Duplicate => TakeState::Ready(Err(duplicated("recv", key))),
        }
    }

    fn popped(&self, taken: (Arc<str>, Value)) -> (Arc<str>, Value) {
        if self.duplicates != DuplicatePolicy::Tolerate {
            self.waiting_values.fetch_sub(1, Ordering::Relaxed);
        }
        taken
    }

    /// Hands `tensor` to the oldest receiver of `key`, or queues it.
    pub(crate) fn send(&self, key: &str, send_args: SendArgs, tensor: Tensor) -> Result<(), Status> {
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

    /// Puts a value back to its place by sequence number, or gives it to the oldest receiver.
    fn put_back(&self, key: &str, value: Value) {
        tensorwire_testpoints::mark!("a value was put back");
        let inner = self.lock();
        // What is tolerated to be received again is still there.
        if inner.aborted.is_none() && self.duplicates != DuplicatePolicy::Tolerate {
            self.offer(inner, key, value);
        }
    }

    fn offer(&self, mut inner: MutexGuard<'_, LockedQueues>, key: &str, value: Value) {
        let Offered { given_to, queued } = inner.queues.offer(self.duplicates, key, value);
        self.waiting_values.fetch_add(usize::from(queued), Ordering::Relaxed);
        drop(inner);
        given_to.wake();
    }

    /// Ends this step with `status`; the first status stays.
    pub(crate) fn abort(&self, status: &Status) {
        let ended = {
            let mut inner = self.lock();
            if inner.aborted.is_some() {
                return;
            }
            inner.aborted = Some(status.clone());
            inner.queues.end()
        };
        self.waiting_values.fetch_sub(ended.values.len(), Ordering::Relaxed);
        self.ended.send_replace(true);
        ended.waiting.into_iter().for_each(waiters::Waiter::wake);
    }

    /// Drops the values whose keys `is_meant`; they are given out to be dropped outside other locks too.
    pub(crate) fn drop_values(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Value> {
        let dropped = self.lock().queues.drain(is_meant);
        self.waiting_values.fetch_sub(dropped.len(), Ordering::Relaxed);
        dropped
    }

    /// How the waiting of the receiver at `place` ended, if it has: then the place is free.
    fn look(&self, place: WaiterIndex, waker: &Waker) -> Option<WaiterEntry> {
        let look = self.lock().queues.look(place, waker);
        match look {
            Look::Waits(_replaced) => None,
            Look::Ended(entry) => Some(entry),
        }
    }

    /// The receiver at `place` waits no longer for `key`.
    fn leave(&self, key: &str, place: WaiterIndex) -> WaiterEntry {
        self.lock().queues.leave(key, place)
    }

    fn lock(&self) -> MutexGuard<'_, LockedQueues> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
