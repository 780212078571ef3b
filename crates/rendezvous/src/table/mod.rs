//! Where sends and receives of a step meet: FIFO per key, never blocking the sender.

use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use protocol::{Code, Status};
use tokio::sync::{oneshot, watch};

use crate::Tensor;

/// A value taken out of the table for one receiver.
#[derive(Debug)]
pub(crate) struct TakenValue {
    pub(crate) tensor: Tensor,
    step: Arc<Step>,
    key: String,
    sequence: u64,
}

/// One step's queues.
#[derive(Debug)]
pub(crate) struct Step {
    inner: Mutex<StepInner>,
    /// Turns true with the abort.
    ended: watch::Sender<bool>,
    waiting_values: Arc<AtomicUsize>,
}

/// The step went away under a receiver.
pub(crate) fn dropped() -> Status {
    Status::new(Code::Aborted, "the step was dropped")
}

#[derive(Debug, Default)]
struct StepInner {
    aborted: Option<Status>,
    /// Grows with every value of the step, so that a value put back finds its place even after its queue was
    /// emptied and made anew.
    next_sequence: u64,
    queues: BTreeMap<String, Queue>,
}

/// The values or the receivers of one key; never both at once.
#[derive(Debug, Default)]
struct Queue {
    values: VecDeque<(u64, Tensor)>,
    receivers: VecDeque<oneshot::Sender<Result<(u64, Tensor), Status>>>,
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

impl Step {
    /// A step whose values are counted in `waiting_values` too.
    pub(crate) fn new(waiting_values: &Arc<AtomicUsize>) -> Self {
        let waiting_values = waiting_values.clone();
        Self { inner: Mutex::default(), ended: watch::Sender::new(false), waiting_values }
    }

    /// Why it is over, if it is.
    pub(crate) fn aborted(&self) -> Option<Status> {
        self.lock().aborted.clone()
    }

    /// Turns true with the abort.
    pub(crate) fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    /// Whether it holds nothing, not even the status of an abort.
    pub(crate) fn is_unused(&self) -> bool {
        self.lock().is_unused()
    }

    /// Interest in the next value of `key`, registered before this returns.
    pub(crate) fn take(self: &Arc<Self>, key: &str) -> Take {
        let (give, receiver) = oneshot::channel();
        let mut inner = self.lock();
        if let Some(status) = &inner.aborted {
            let _ = give.send(Err(status.clone()));
        } else {
            match inner.pop(key) {
                Some(value) => {
                    self.waiting_values.fetch_sub(1, Ordering::Relaxed);
                    let _ = give.send(Ok(value));
                }
                None => inner.queues.entry(key.to_owned()).or_default().receivers.push_back(give),
            }
        }
        drop(inner);
        Take { step: self.clone(), key: key.to_owned(), receiver: Some(receiver) }
    }

    /// Hands `tensor` to the oldest receiver of `key`, or queues it.
    pub(crate) fn send(&self, key: &str, tensor: Tensor) -> Result<(), Status> {
        let mut inner = self.lock();
        if let Some(status) = &inner.aborted {
            return Err(status.clone());
        }
        let sequence = inner.next_sequence;
        inner.next_sequence += 1;
        self.give(&mut inner, key, (sequence, tensor));
        Ok(())
    }

    /// Puts a value back to its place by sequence number, or gives it to the oldest receiver.
    pub(crate) fn put_back(&self, key: &str, sequence: u64, tensor: Tensor) {
        let mut inner = self.lock();
        if inner.aborted.is_none() {
            self.give(&mut inner, key, (sequence, tensor));
        }
    }

    /// To the oldest receiver that still waits, else into the queue at its place.
    ///
    /// Sending on a oneshot wakes the receiver's task; it does not run it, so the lock may be held.
    fn give(&self, inner: &mut StepInner, key: &str, mut value: (u64, Tensor)) {
        let queue = inner.queues.entry(key.to_owned()).or_default();
        while let Some(receiver) = queue.receivers.pop_front() {
            match receiver.send(Ok(value)) {
                Err(Ok(back)) => value = back,
                Ok(()) | Err(Err(_)) => return inner.forget_if_empty(key),
            }
        }
        let place = queue.values.partition_point(|(queued, _)| *queued < value.0);
        queue.values.insert(place, value);
        self.waiting_values.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends this step with `status`; the first status stays.
    pub(crate) fn abort(&self, status: &Status) {
        let queues = {
            let mut inner = self.lock();
            if inner.aborted.is_some() {
                return;
            }
            inner.aborted = Some(status.clone());
            std::mem::take(&mut inner.queues)
        };
        self.ended.send_replace(true);
        for (_, queue) in queues {
            self.waiting_values.fetch_sub(queue.values.len(), Ordering::Relaxed);
            for receiver in queue.receivers {
                let _ = receiver.send(Err(status.clone()));
            }
        }
    }

    /// Takes the values out whose keys `is_meant`.
    pub(crate) fn drop_values(&self, is_meant: impl Fn(&str) -> bool) -> Vec<(u64, Tensor)> {
        let mut inner = self.lock();
        let mut dropped = Vec::new();
        for (_, queue) in inner.queues.iter_mut().filter(|(key, _)| is_meant(key)) {
            dropped.extend(queue.values.drain(..));
        }
        inner.queues.retain(|_, queue| !queue.values.is_empty() || !queue.receivers.is_empty());
        self.waiting_values.fetch_sub(dropped.len(), Ordering::Relaxed);
        dropped
    }

    fn lock(&self) -> MutexGuard<'_, StepInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StepInner {
    fn is_unused(&self) -> bool {
        self.aborted.is_none() && self.queues.is_empty()
    }

    fn pop(&mut self, key: &str) -> Option<(u64, Tensor)> {
        let value = self.queues.get_mut(key)?.values.pop_front()?;
        self.forget_if_empty(key);
        Some(value)
    }

    /// Receivers that were given up leave the queue at once: peers can give up as many as they like.
    fn forget_closed(&mut self, key: &str) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.receivers.retain(|receiver| !receiver.is_closed());
            self.forget_if_empty(key);
        }
    }

    fn forget_if_empty(&mut self, key: &str) {
        if self.queues.get(key).is_some_and(|queue| queue.values.is_empty() && queue.receivers.is_empty()) {
            self.queues.remove(key);
        }
    }
}

/// Waits for a value.
///
/// Dropping it ends interest; a value already given to it goes back to its place.
#[derive(Debug)]
pub(crate) struct Take {
    step: Arc<Step>,
    key: String,
    receiver: Option<oneshot::Receiver<Result<(u64, Tensor), Status>>>,
}

impl Future for Take {
    type Output = Result<TakenValue, Status>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(receiver) = &mut self.receiver else { return Poll::Ready(Err(dropped())) };
        let Poll::Ready(answer) = Pin::new(receiver).poll(context) else { return Poll::Pending };
        self.receiver = None;
        let (sequence, tensor) = match answer {
            Ok(Ok(value)) => value,
            Ok(Err(status)) => return Poll::Ready(Err(status)),
            Err(_) => return Poll::Ready(Err(dropped())),
        };
        Poll::Ready(Ok(TakenValue { tensor, step: self.step.clone(), key: self.key.clone(), sequence }))
    }
}

impl Drop for Take {
    fn drop(&mut self) {
        let Some(mut receiver) = self.receiver.take() else { return };
        receiver.close();
        match receiver.try_recv() {
            Ok(Ok((sequence, tensor))) => self.step.put_back(&self.key, sequence, tensor),
            Ok(Err(_)) => {}
            Err(_) => self.step.lock().forget_closed(&self.key),
        }
    }
}

impl TakenValue {
    /// Puts the value back to where it was.
    pub(crate) fn put_back(self) {
        self.step.put_back(&self.key, self.sequence, self.tensor);
    }
}

#[cfg(test)]
mod tests;
