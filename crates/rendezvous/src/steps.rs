//! The steps of a worker: made on use, ended by cleanup, remembered for a while.

use std::{
    collections::{HashSet, VecDeque},
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use protocol::{Code, Status, StepId};

use crate::{
    DuplicatePolicy, SendArgs, Tensor,
    data::unless,
    sharded::{FixedHasher, ShardedMap, sharded_map},
    table::{SendRefused, Step, dropped},
};

/// Finished steps that are remembered, so that a late request is answered instead of waiting for ever.
const TOMBSTONES_MAX: usize = 65_536;

/// Every step of this worker.
#[derive(Debug)]
pub(crate) struct StepTable {
    steps: ShardedMap<StepId, Arc<Step>>,
    finished: Mutex<Tombstones>,
    waiting_values: Arc<AtomicUsize>,
    cap: usize,
    duplicates: DuplicatePolicy,
}

#[derive(Debug, Default)]
struct Tombstones {
    known: HashSet<StepId, FixedHasher>,
    order: VecDeque<StepId>,
}

impl StepTable {
    /// A table that holds at most `cap` values that nobody has received yet.
    pub(crate) fn new(cap: usize, duplicates: DuplicatePolicy) -> Self {
        let waiting_values = Arc::default();
        Self { steps: sharded_map(), finished: Mutex::default(), waiting_values, cap, duplicates }
    }

    /// The step, made on first use; a finished one answers ABORTED.
    pub(crate) fn step(&self, id: StepId) -> Result<Arc<Step>, Status> {
        if self.finished().known.contains(&id) {
            return Err(Status::new(Code::Aborted, format!("step {} has been cleaned up", id.0)));
        }
        let make = || Arc::new(Step::new(&self.waiting_values, self.duplicates));
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
        let aborted = step.aborted();
        let watched = Watched { table: self, id, step: Some(step) };
        aborted.map_or(Ok(watched), Err)
    }

    /// Hands `tensor` to the oldest receiver of `key`, or queues it.
    pub(crate) fn send(
        &self,
        step: &Step,
        key: &str,
        args: SendArgs,
        tensor: Tensor,
    ) -> Result<(), SendRefused> {
        let waiting = self.waiting_values.load(Ordering::Relaxed);
        if waiting >= self.cap {
            return Err(SendRefused::Full { waiting });
        }
        step.send(key, args, tensor).map_err(SendRefused::Aborted)
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
        let received = unless(step.ended(), receive).await;
        received.ok_or_else(|| step.aborted().unwrap_or_else(dropped))
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.step = None;
        let unused = |step: &Arc<Step>| Arc::strong_count(step) == 1 && step.is_unused();
        self.table.steps.remove_if(&self.id, |_, step| unused(step));
    }
}
