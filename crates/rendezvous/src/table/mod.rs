//! Where sends and receives of a step meet: FIFO per key, never blocking the sender.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use protocol::{Code, Status, StepId};
use tokio::sync::{oneshot, watch};

use crate::{
    Tensor,
    data::unless,
    sharded::{FixedHasher, ShardedMap, sharded_map},
};

/// Finished steps that are remembered, so that a late request is answered instead of waiting for ever.
const TOMBSTONES_MAX: usize = 65_536;

/// A value taken out of the table for one receiver.
#[derive(Debug)]
pub(crate) struct TakenValue {
    pub(crate) tensor: Tensor,
    step: Arc<Step>,
    key: String,
    sequence: u64,
}

/// Every step of this worker.
#[derive(Debug)]
pub(crate) struct StepTable {
    steps: ShardedMap<StepId, Arc<Step>>,
    finished: Mutex<Tombstones>,
    waiting_values: Arc<AtomicUsize>,
    cap: usize,
}

#[derive(Debug, Default)]
struct Tombstones {
    known: HashSet<StepId, FixedHasher>,
    order: VecDeque<StepId>,
}

/// One step's queues.
#[derive(Debug)]
pub(crate) struct Step {
    inner: Mutex<StepInner>,
    /// Turns true with the abort.
    ended: watch::Sender<bool>,
    waiting_values: Arc<AtomicUsize>,
}

/// A step for the time of a receive from another worker, which leaves no trace in the table.
#[derive(Debug)]
pub(crate) struct Watched<'table> {
    table: &'table StepTable,
    id: StepId,
    step: Option<Arc<Step>>,
}

impl Watched<'_> {
    /// What `receive` gives, unless the step ends first: then why.
    pub(crate) async fn or_aborted<T>(
        &self,
        receive: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Status> {
        let Some(step) = &self.step else { return Ok(receive.await) };
        let received = unless(step.ended.subscribe(), receive).await;
        received.ok_or_else(|| step.lock().aborted.clone().unwrap_or_else(dropped))
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.step = None;
        let unused = |step: &Arc<Step>| Arc::strong_count(step) == 1 && step.lock().is_unused();
        self.table.steps.remove_if(&self.id, |_, step| unused(step));
    }
}

fn dropped() -> Status {
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
    Full { waiting: usize },
    Aborted(Status),
}

impl StepTable {
    /// A table that holds at most `cap` values that nobody has received yet.
    pub(crate) fn new(cap: usize) -> Self {
        Self { steps: sharded_map(), finished: Mutex::default(), waiting_values: Arc::default(), cap }
    }

    /// The step, made on first use; a finished one answers ABORTED.
    pub(crate) fn step(&self, id: StepId) -> Result<Arc<Step>, Status> {
        if self.finished().known.contains(&id) {
            return Err(Status::new(Code::Aborted, format!("step {} has been cleaned up", id.0)));
        }
        let make = || {
            let waiting_values = self.waiting_values.clone();
            Arc::new(Step { inner: Mutex::default(), ended: watch::Sender::new(false), waiting_values })
        };
        Ok(self.steps.entry(id).or_insert_with(make).clone())
    }

    /// Drops the values of a step whose keys `is_meant`.
    pub(crate) fn drop_values(&self, id: StepId, is_meant: impl Fn(&str) -> bool) {
        let step = self.steps.get(&id).map(|entry| entry.value().clone());
        let dropped = step.map(|step| step.drop_values(is_meant));
        // Outside the locks: the last drop of a value gives memory back, which may wake.
        drop(dropped);
    }

    /// The step, for a receive from another worker.
    pub(crate) fn watch(&self, id: StepId) -> Result<Watched<'_>, Status> {
        let step = self.step(id)?;
        let aborted = step.lock().aborted.clone();
        let watched = Watched { table: self, id, step: Some(step) };
        aborted.map_or(Ok(watched), Err)
    }

    /// Hands `tensor` to the oldest receiver of `key`, or queues it.
    pub(crate) fn send(&self, step: &Step, key: &str, tensor: Tensor) -> Result<(), SendRefused> {
        let waiting = self.waiting_values.load(Ordering::Relaxed);
        if waiting >= self.cap {
            return Err(SendRefused::Full { waiting });
        }
        step.send(key, tensor).map_err(SendRefused::Aborted)
    }

    /// Ends a step: receivers get ABORTED, values are dropped, and so ends every later use.
    pub(crate) fn cleanup(&self, id: StepId) {
        {
            let mut finished = self.finished();
            if finished.known.insert(id) {
                finished.order.push_back(id);
            }
            if finished.order.len() > TOMBSTONES_MAX
                && let Some(oldest) = finished.order.pop_front()
            {
                finished.known.remove(&oldest);
            }
        }
        if let Some((_, step)) = self.steps.remove(&id) {
            step.abort(&Status::new(Code::Aborted, format!("Cleanup {}", id.0)));
        }
    }

    /// Ends every step with `status`.
    pub(crate) fn abort_all(&self, status: &Status) {
        let mut steps: Vec<_> =
            self.steps.iter().map(|entry| (*entry.key(), entry.value().clone())).collect();
        steps.sort_by_key(|(id, _)| *id);
        for (_, step) in steps {
            step.abort(status);
        }
    }

    fn finished(&self) -> MutexGuard<'_, Tombstones> {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Step {
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

    fn send(&self, key: &str, tensor: Tensor) -> Result<(), Status> {
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

    fn drop_values(&self, is_meant: impl Fn(&str) -> bool) -> Vec<(u64, Tensor)> {
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
        if let Ok(Ok((sequence, tensor))) = receiver.try_recv() {
            self.step.put_back(&self.key, sequence, tensor);
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
