//! The handlers of this worker, and the arguments of its own calls.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    sync::{Arc, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use futures::{
    channel::oneshot,
    future::{Either, select},
};
use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::{Code, Status};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::values::{pending::Pending, tensor::Tensor, tensor_list::PackedTensors, traces::Traces};

/// A call of a peer, for the handler.
#[derive(Debug)]
pub struct Call {
    peer: String,
    arguments: Vec<Tensor>,
    runtime: Arc<dyn Runtime>,
    /// When the caller stops waiting.
    deadline: Duration,
}

impl Call {
    /// A call whose caller stops waiting at `deadline`, a time of `runtime`.
    pub(crate) fn new(
        peer: &str,
        arguments: Vec<Tensor>,
        deadline: Duration,
        runtime: &Arc<dyn Runtime>,
    ) -> Self {
        Self { peer: peer.to_owned(), arguments, runtime: runtime.clone(), deadline }
    }

    /// The caller's name.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The arguments, in the order of the caller.
    pub fn arguments(&self) -> &[Tensor] {
        &self.arguments
    }

    /// The arguments, to be kept. Those that are kept after the call do not count towards
    /// [`Limits::call_bytes`](crate::Limits::call_bytes).
    pub fn into_arguments(self) -> Vec<Tensor> {
        self.arguments
    }

    /// How long the caller still waits for the answer, by the [`timeout`](crate::calls::Calling::timeout) of its call. Zero when it waits no
    /// longer; then the handler's future is dropped. It does not show that the caller has dropped the call or is lost.
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_sub(self.runtime.now())
    }
}

pub(crate) type Answering = BoxFuture<'static, Result<Vec<Tensor>, Status>>;

/// Answers calls of one name.
pub(crate) struct Handler {
    answer: Box<dyn Fn(Call) -> Answering + Send + Sync>,
    runtime: Arc<dyn Runtime>,
}

impl fmt::Debug for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handler").finish_non_exhaustive()
    }
}

impl Handler {
    pub(crate) fn new(
        answer: impl Fn(Call) -> Answering + Send + Sync + 'static,
        runtime: Arc<dyn Runtime>,
    ) -> Arc<Self> {
        Arc::new(Self { answer: Box::new(answer), runtime })
    }

    /// The runtime on which it runs.
    pub(crate) fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    /// Begins to answer `call`.
    pub(crate) fn answer(&self, call: Call) -> Answering {
        (self.answer)(call)
    }
}

/// The way from a task to the future that awaits its answer.
#[derive(Debug)]
pub(crate) struct Asker<T>(oneshot::Sender<Result<T, Status>>);

impl<T: Send + 'static> Asker<T> {
    /// Awaits what `task` answers, in a task of its own.
    ///
    /// # Errors
    /// What it answers; INTERNAL if it panics.
    ///
    /// # Cancel safety
    /// Dropping the future tells the task, which ends when it runs next, or as soon as it may.
    pub(crate) async fn answered<Task>(
        runtime: &Arc<dyn Runtime>,
        task: impl FnOnce(Self) -> Task,
    ) -> Result<T, Status>
    where
        Task: Future<Output = ()> + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        runtime.spawn("call", Box::pin(task(Self(sender))));
        let panicked = |_| Status::new(Code::Internal, "the handler panicked, or its runtime has ended");
        receiver.await.map_err(panicked)?
    }

    /// The output of `future`, which is dropped when nobody waits any more. `None` then.
    pub(crate) async fn unless_gone<F: Future + Unpin>(&mut self, future: F) -> Option<F::Output> {
        if self.0.is_canceled() {
            return None;
        }
        match select(future, self.0.cancellation()).await {
            Either::Left((output, _)) => Some(output),
            Either::Right((_, future)) => {
                if tensorwire_testpoints::planted!("the handler of a call that was given up goes on") {
                    future.await;
                }
                None
            }
        }
    }

    /// Passes the answer on.
    pub(crate) fn answer(self, answer: Result<T, Status>) {
        // Nobody may wait any more.
        drop(self.0.send(answer));
    }
}

/// The bytes that the arguments of one peer's calls hold.
#[derive(Debug)]
pub(crate) struct CallRoom {
    free: Arc<Semaphore>,
    bytes_max: u64,
}

/// What one permit of [`CallRoom::free`] stands for.
const PERMIT_BYTES: u64 = 1024;

impl CallRoom {
    fn new(bytes_max: u64) -> Self {
        let permits = usize::try_from(bytes_max.div_ceil(PERMIT_BYTES)).unwrap_or(usize::MAX);
        Self { free: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))), bytes_max }
    }

    /// Waits until the peer's calls may hold so many bytes more.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if they never may.
    pub(crate) async fn take(&self, bytes: u64) -> Result<OwnedSemaphorePermit, Status> {
        let most = self.bytes_max;
        let exhausted = || {
            let message = format!(
                "the arguments have {bytes} bytes, and the calls of one worker may hold {most}: send less at a time, or \
                 allow more with the setting `call_bytes`"
            );
            Status::new(Code::ResourceExhausted, message)
        };
        let permits = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).ok().filter(|_| bytes <= most);
        let permits = permits.ok_or_else(exhausted)?;
        self.free.clone().acquire_many_owned(permits).await.map_err(|_| exhausted())
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Calls {
    handlers: Mutex<BTreeMap<Arc<str>, Arc<Handler>>>,
    /// The arguments of this worker's calls, which peers request.
    pub(crate) arguments: Pending<PackedTensors>,
    pub(crate) traces: Traces,
    /// By the names of peers that are connected.
    rooms: Mutex<BTreeMap<String, Weak<CallRoom>>>,
    bytes_max: u64,
}

impl Calls {
    /// `bytes_max` is how many bytes the arguments of one peer's calls may hold.
    pub(crate) fn new(bytes_max: u64, traces: Traces) -> Self {
        let (handlers, arguments, rooms) = (Mutex::default(), Pending::default(), Mutex::default());
        Self { handlers, arguments, traces, rooms, bytes_max }
    }

    /// What all connections of `peer` share.
    pub(crate) fn room(&self, peer: &str) -> Arc<CallRoom> {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(room) = rooms.get(peer).and_then(Weak::upgrade) {
            return room;
        }
        rooms.retain(|_, room| room.strong_count() > 0);
        let room = Arc::new(CallRoom::new(self.bytes_max));
        rooms.insert(peer.to_owned(), Arc::downgrade(&room));
        room
    }

    /// Has `handler` answer calls of `name`. False if the name has a handler.
    pub(crate) fn add(&self, name: Arc<str>, handler: Arc<Handler>) -> bool {
        match self.handlers().entry(name) {
            Entry::Occupied(_) => false,
            Entry::Vacant(vacant) => {
                vacant.insert(handler);
                true
            }
        }
    }

    pub(crate) fn remove(&self, name: &str) {
        let removed = self.handlers().remove(name);
        drop(removed);
    }

    /// The handler of calls of `name`.
    ///
    /// # Errors
    /// NOT_FOUND.
    pub(crate) fn find(&self, name: &str) -> Result<Arc<Handler>, Status> {
        let found = self.handlers().get(name).cloned();
        found.ok_or_else(|| {
            let message = format!("no handler answers calls of `{name}`: call one that the peer has");
            Status::new(Code::NotFound, message)
        })
    }

    fn handlers(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Arc<Handler>>> {
        self.handlers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn room_is_of_a_peer_and_all_of_it_can_be_taken() {
        let calls = Calls::new(2500, Traces::default());
        let (room, other) = (calls.room("one"), calls.room("two"));
        let all = calls.room("one").take(2500).now_or_never().unwrap().unwrap();
        assert!(room.take(1).now_or_never().is_none());
        assert!(other.take(2500).now_or_never().is_some());
        drop(all);
        assert!(room.take(2500).now_or_never().is_some());
        let refused = room.take(2501).now_or_never().unwrap().unwrap_err();
        assert_eq!(refused.code, Code::ResourceExhausted);
        drop((room, other));
        calls.room("three");
        assert_eq!(calls.rooms.lock().unwrap().len(), 1);
    }
}
