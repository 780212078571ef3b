//! Requests for steps that this worker has not begun. They wait for a limited time, and their number is limited.

use std::{collections::BTreeMap, fmt, future::Future, pin::pin, sync::Mutex};

use futures::future::{Either, select};
use tensorwire_protocol::{Code, Status};

use super::{StepRef, lock};

/// The requests that wait until one step begins.
#[derive(Debug)]
pub(super) struct Deferral {
    /// By peer, the number of requests; `None` once the step has begun.
    waiting: Mutex<Option<BTreeMap<String, usize>>>,
}

impl Default for Deferral {
    fn default() -> Self {
        Self { waiting: Mutex::new(Some(BTreeMap::new())) }
    }
}

/// By peer, the number of steps that its requests wait for.
#[derive(Debug, Default)]
pub(super) struct DeferredSteps(Mutex<BTreeMap<String, usize>>);

impl DeferredSteps {
    /// Counts one more step of `peer`. False if it has `most` already.
    fn add(&self, peer: &str, most: usize) -> bool {
        let mut steps = lock(&self.0);
        let count = steps.get(peer).copied().unwrap_or_default();
        if count < most {
            steps.insert(peer.to_owned(), count + 1);
        }
        count < most
    }

    fn remove(&self, peer: &str) {
        let mut steps = lock(&self.0);
        if let Some(count) = steps.get_mut(peer) {
            *count -= 1;
            if *count == 0 {
                steps.remove(peer);
            }
        }
    }
}

impl Deferral {
    pub(super) fn begin(&self, steps: &DeferredSteps) {
        let waited = lock(&self.waiting).take();
        for peer in waited.iter().flat_map(BTreeMap::keys) {
            steps.remove(peer);
        }
    }

    pub(super) fn has_begun(&self) -> bool {
        lock(&self.waiting).is_none()
    }
}

/// A request that waits until its step begins.
pub(super) struct Deferred {
    step: StepRef,
    peer: String,
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred").field("step", &self.step.id).field("peer", &self.peer).finish()
    }
}

impl Deferred {
    /// Registers a request of `peer` for a value of `step`; `None` if the step has begun.
    ///
    /// # Errors
    /// Requests of the peer wait for too many steps.
    pub(super) fn unless_begun(step: &StepRef, peer: &str) -> Result<Option<Self>, Status> {
        let shared = &step.shared;
        let mut waiting = lock(&step.live.deferral.waiting);
        let Some(waiting) = waiting.as_mut() else { return Ok(None) };
        let most = shared.settings.deferred_steps_max;
        if !waiting.contains_key(peer) && !shared.deferred.add(peer, most) {
            let message = format!(
                "requests of {peer} wait for {most} steps that {} has not begun: begin them there with Worker::step, or \
                 allow more with the setting `deferred_steps_max`",
                shared.worker
            );
            return Err(Status::new(Code::ResourceExhausted, message));
        }
        *waiting.entry(peer.to_owned()).or_default() += 1;
        Ok(Some(Self { step: step.clone(), peer: peer.to_owned() }))
    }

    /// The output of `take`. Fails if neither `take` completes nor the step begins within the time limit.
    pub(super) async fn until_begun<T>(
        self,
        take: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let shared = &self.step.shared;
        let limit = shared.settings.init_timeout;
        let take = pin!(take);
        match select(take, shared.runtime.sleep(limit)).await {
            Either::Left((taken, _)) => taken,
            Either::Right(((), take)) if self.step.live.deferral.has_begun() => take.await,
            Either::Right(_) => {
                let message = format!(
                    "{} has not begun step {} within {} ms of this request: call Worker::step({}) there, or allow more \
                     time with the setting `step_init_timeout`",
                    shared.worker,
                    self.step.id.0,
                    limit.as_millis(),
                    self.step.id.0
                );
                Err(Status::new(Code::DeadlineExceeded, message))
            }
        }
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        let mut waiting = lock(&self.step.live.deferral.waiting);
        let Some(requests) = waiting.as_mut() else { return };
        if let Some(count) = requests.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                requests.remove(&self.peer);
                self.step.shared.deferred.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
impl DeferredSteps {
    /// How many steps requests of `peer` wait for.
    pub(super) fn count(&self, peer: &str) -> usize {
        lock(&self.0).get(peer).copied().unwrap_or_default()
    }

    /// The number of peers with counted steps.
    pub(super) fn peers(&self) -> usize {
        lock(&self.0).len()
    }
}
