//! The steps of a worker. They are created on first use, removed with their last user, and remembered for some time
//! after their end.

mod deferral;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    ops::Deref,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use dashmap::Entry;
use deferral::{Deferral, Deferred, DeferredSteps};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{Code, Status, StepId, Take};
use tokio_util::sync::CancellationToken;

use crate::values::{
    arguments::SendArgs,
    duplicates::DuplicatePolicy,
    sharded_map::{ShardedMap, sharded_map},
    table::{CancellableTake, QueueKey, SendRefused, StepQueues, TakenValue, Watch},
    tensor::Tensor,
};

/// Maximum number of ended steps that are remembered, so that late requests are answered instead of waiting.
const TOMBSTONES_MAX: usize = 65_536;

/// Maximum time for which an ended step is remembered.
const TOMBSTONE_AGE: Duration = Duration::from_secs(600);

/// Settings of all steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepSettings {
    /// Maximum number of sent values that wait for their receivers.
    pub(crate) values_max: usize,
    /// The meaning of a second send or receive of a key.
    pub(crate) duplicates: DuplicatePolicy,
    /// Maximum number of steps that are not begun on this worker and that requests of one peer wait for.
    pub(crate) deferred_steps_max: usize,
    /// How long a request waits for its step to begin.
    pub(crate) init_timeout: Duration,
}

/// Every step of this worker.
#[derive(Debug)]
pub(crate) struct StepTable {
    shared: Arc<SharedTable>,
}

#[derive(Debug)]
struct SharedTable {
    worker: String,
    settings: StepSettings,
    runtime: Arc<dyn Runtime>,
    steps: ShardedMap<StepId, StepEntry>,
    /// The ended steps, oldest first.
    tombstones: Mutex<VecDeque<(Duration, StepId)>>,
    deferred: DeferredSteps,
    waiting_values: Arc<AtomicUsize>,
}

/// The state of a step in the table.
#[derive(Debug)]
enum StepEntry {
    Live(Arc<Live>),
    /// It has ended, at this time of the runtime's clock.
    Finished {
        at: Duration,
        /// The status of the abort, if the step was aborted and not cleaned up.
        status: Option<Status>,
    },
}

/// A step that is in use.
#[derive(Debug)]
struct Live {
    queues: Arc<StepQueues>,
    /// The number of [`StepRef`]s. It goes from zero to one only under the lock of the step's table entry, so that a
    /// step is not removed while a user is added.
    users: AtomicUsize,
    deferral: Deferral,
}

/// A reference to a step in use. When the last one is dropped, an empty step is removed.
pub(crate) struct StepRef {
    shared: Arc<SharedTable>,
    id: StepId,
    live: Arc<Live>,
}

/// A peer's request for a value of a step.
#[derive(Debug)]
pub(crate) struct Asked {
    step: StepRef,
    deferred: Option<Deferred>,
}

impl StepTable {
    /// An empty table of the worker called `worker`.
    pub(crate) fn new(worker: &str, settings: StepSettings, runtime: Arc<dyn Runtime>) -> Self {
        let shared = SharedTable {
            worker: worker.to_owned(),
            settings,
            runtime,
            steps: sharded_map(),
            tombstones: Mutex::default(),
            deferred: DeferredSteps::default(),
            waiting_values: Arc::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Begins the step on this worker, if it has not begun yet.
    ///
    /// # Errors
    /// It is finished.
    pub(crate) fn begin(&self, id: StepId) -> Result<StepRef, Status> {
        let step = self.shared.find_or_make(id)?;
        step.live.deferral.begin(&self.shared.deferred);
        Ok(step)
    }

    /// The step for a request of `peer`. The request is deferred until this worker begins the step.
    ///
    /// # Errors
    /// The step has ended or was aborted, or requests of the peer wait for too many steps.
    pub(crate) fn ask(&self, id: StepId, peer: &str) -> Result<Asked, Status> {
        let step = self.shared.find_or_make(id)?;
        if let Some(status) = step.aborted() {
            return Err(status);
        }
        let deferred = Deferred::unless_begun(&step, peer)?;
        Ok(Asked { step, deferred })
    }

    /// Drops the values of a step whose keys `is_meant`.
    pub(crate) fn drop_values(&self, id: StepId, is_meant: impl Fn(&QueueKey) -> bool) {
        let dropped = self.shared.find(id).map(|step| step.drop_values(is_meant));
        // Dropped outside the locks, because the last drop of a value frees pool memory, which may wake tasks.
        drop(dropped);
    }

    /// Gives `tensor` to the oldest receiver of `key`, or queues it.
    pub(crate) fn send(
        &self,
        step: &StepQueues,
        key: impl Into<QueueKey>,
        args: SendArgs,
        tensor: Tensor,
    ) -> Result<(), SendRefused> {
        let (waiting, cap) =
            (self.shared.waiting_values.load(Ordering::Relaxed), self.shared.settings.values_max);
        if waiting >= cap {
            return Err(SendRefused::Full { waiting, cap });
        }
        step.send(key, args, tensor).map_err(SendRefused::Aborted)
    }

    /// Ends a step: its receivers and every later use get ABORTED, and its values are dropped.
    pub(crate) fn cleanup(&self, id: StepId) {
        if let Some(live) = self.shared.finish(id) {
            live.queues.abort(&Status::new(Code::Aborted, format!("Cleanup {}", id.0)));
        }
    }

    /// The steps that are in use or contain values, sorted.
    pub(crate) fn live(&self) -> Vec<StepId> {
        let steps = self.shared.steps.iter();
        let live = steps.filter(|entry| matches!(entry.value(), StepEntry::Live(_)));
        let mut live: Vec<_> = live.map(|entry| *entry.key()).collect();
        live.sort_unstable();
        live
    }

    /// The meaning of a second send or receive of a key.
    pub(crate) fn duplicates(&self) -> DuplicatePolicy {
        self.shared.settings.duplicates
    }

    /// Ends every step with `status`.
    pub(crate) fn abort_all(&self, status: &Status) {
        for step in self.live().into_iter().filter_map(|id| self.shared.find(id)) {
            step.abort(status);
        }
    }
}

impl SharedTable {
    /// A reference to the step, which is created if needed.
    ///
    /// # Errors
    /// It is finished.
    fn find_or_make(self: &Arc<Self>, id: StepId) -> Result<StepRef, Status> {
        let mut known = self.steps.entry(id).or_insert_with(|| self.new_step());
        if let StepEntry::Finished { at, status } = known.value() {
            if self.runtime.now().saturating_sub(*at) <= TOMBSTONE_AGE {
                return Err(status.clone().unwrap_or_else(|| cleaned_up(id)));
            }
            *known = self.new_step();
        }
        match known.value() {
            StepEntry::Live(live) => Ok(self.user(id, live)),
            StepEntry::Finished { .. } => Err(cleaned_up(id)),
        }
    }

    /// A reference to the step, if it exists.
    fn find(self: &Arc<Self>, id: StepId) -> Option<StepRef> {
        match self.steps.get(&id)?.value() {
            StepEntry::Live(live) => Some(self.user(id, live)),
            StepEntry::Finished { .. } => None,
        }
    }

    fn new_step(&self) -> StepEntry {
        let queues = Arc::new(StepQueues::new(&self.waiting_values, self.settings.duplicates));
        StepEntry::Live(Arc::new(Live { queues, users: AtomicUsize::new(0), deferral: Deferral::default() }))
    }

    /// A new reference. The caller holds the lock of the step's table entry.
    fn user(self: &Arc<Self>, id: StepId, live: &Arc<Live>) -> StepRef {
        live.users.fetch_add(1, Ordering::Relaxed);
        StepRef { shared: self.clone(), id, live: live.clone() }
    }

    /// Marks a step as ended, even if it does not exist. Returns its state, which the caller aborts outside the lock.
    fn finish(&self, id: StepId) -> Option<Arc<Live>> {
        let at = self.runtime.now();
        let was = match self.steps.entry(id) {
            Entry::Occupied(mut entry) => match entry.get() {
                StepEntry::Finished { at: before, .. } if at.saturating_sub(*before) <= TOMBSTONE_AGE => {
                    return None;
                }
                known => {
                    // Later requests get the status of the abort.
                    let status = match known {
                        StepEntry::Live(live) => live.queues.aborted(),
                        StepEntry::Finished { .. } => None,
                    };
                    Some(entry.insert(StepEntry::Finished { at, status }))
                }
            },
            Entry::Vacant(entry) => {
                drop(entry.insert(StepEntry::Finished { at, status: None }));
                None
            }
        };
        self.remember(at, id);
        match was {
            Some(StepEntry::Live(live)) => Some(live),
            _ => None,
        }
    }

    /// Remembers an ended step, and forgets those that are too old or too many.
    fn remember(&self, at: Duration, id: StepId) {
        let forgotten = {
            let mut tombstones = lock(&self.tombstones);
            // Removed before the push: one element above the maximum would double the capacity of the deque.
            let many = (tombstones.len() + 1).saturating_sub(TOMBSTONES_MAX);
            let is_old = |(then, _): &&(Duration, StepId)| at.saturating_sub(*then) > TOMBSTONE_AGE;
            let old = tombstones.iter().take_while(is_old).count();
            let forgotten: Vec<_> = tombstones.drain(..many.max(old)).collect();
            tombstones.push_back((at, id));
            forgotten
        };
        for (then, id) in forgotten {
            // Unless the step has ended a second time meanwhile.
            let is_that = |known: &StepEntry| matches!(known, StepEntry::Finished { at, .. } if *at == then);
            self.steps.remove_if(&id, |_, known| is_that(known));
        }
    }

    /// Called after the last reference was dropped: removes an empty step, and marks an aborted one as ended.
    fn forget_unused(&self, id: StepId) {
        let at = self.runtime.now();
        let Entry::Occupied(mut entry) = self.steps.entry(id) else { return };
        let StepEntry::Live(live) = entry.get() else { return };
        if live.users.load(Ordering::Acquire) > 0 {
            return;
        }
        let gone = if let Some(status) = live.queues.aborted() {
            let was = entry.insert(StepEntry::Finished { at, status: Some(status) });
            drop(entry);
            self.remember(at, id);
            was
        } else if live.queues.is_unused() {
            entry.remove()
        } else {
            return;
        };
        drop(gone);
    }
}

fn cleaned_up(id: StepId) -> Status {
    Status::new(Code::Aborted, format!("step {} has been cleaned up", id.0))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StepRef {
    /// The output of `receive`, or the status of the step if the step ends first.
    pub(crate) async fn or_aborted<T>(
        &self,
        mut receive: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, Status> {
        if let Some(status) = self.aborted() {
            return Err(status);
        }
        let mut watch = Watch::new(&self.live.queues);
        poll_fn(|context| match receive.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Ok(output)),
            Poll::Pending => watch.poll_aborted(context.waker()).map(Err),
        })
        .await
    }
}

impl Deref for StepRef {
    type Target = Arc<StepQueues>;

    fn deref(&self) -> &Arc<StepQueues> {
        &self.live.queues
    }
}

impl Clone for StepRef {
    fn clone(&self) -> Self {
        self.live.users.fetch_add(1, Ordering::Relaxed);
        Self { shared: self.shared.clone(), id: self.id, live: self.live.clone() }
    }
}

impl Drop for StepRef {
    fn drop(&mut self) {
        if self.live.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.forget_unused(self.id);
        }
    }
}

impl fmt::Debug for StepRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepRef").field("id", &self.id).field("live", &self.live).finish_non_exhaustive()
    }
}

impl Asked {
    /// Takes the next value of `key`, unless `token` is cancelled; an available value takes precedence over the token.
    /// If there is none, the receiver is queued before this returns, so that requests are served in order.
    pub(crate) fn take_or_wait(
        self,
        key: impl Into<QueueKey>,
        token: Option<&CancellationToken>,
    ) -> Take<TakenOfStep, AskedTake> {
        let Self { step, deferred } = self;
        match step.take_or_wait(key.into(), token) {
            Take::Now(taken) => Take::Now(taken.map(|value| (value, step))),
            Take::Later(take) => Take::Later(AskedTake { take, deferred: deferred.map(Box::new), step }),
        }
    }
}

/// A peer's receiver in the queue of its key. The order of the fields matters if this is dropped while it waits: the
/// take must leave the queue first, because the last reference removes the step only if its queues are empty.
#[derive(Debug)]
pub(crate) struct AskedTake {
    take: CancellableTake,
    /// Boxed, because it is rare.
    deferred: Option<Box<Deferred>>,
    step: StepRef,
}

/// A value with a reference to its step, which stays in use until this is dropped.
pub(crate) type TakenOfStep = (TakenValue, StepRef);

impl AskedTake {
    /// Waits for the value.
    pub(crate) async fn wait(self) -> Result<TakenOfStep, Status> {
        let Self { take, deferred, step } = self;
        let taken = match deferred {
            Some(deferred) => deferred.until_begun(take).await,
            None => take.await,
        };
        taken.map(|taken| (taken, step))
    }
}

#[cfg(test)]
impl Asked {
    fn take(
        self,
        key: impl Into<QueueKey>,
    ) -> impl Future<Output = Result<TakenOfStep, Status>> + Send + 'static {
        let taken = self.take_or_wait(key, None);
        async {
            match taken {
                Take::Now(taken) => taken,
                Take::Later(take) => take.wait().await,
            }
        }
    }
}
