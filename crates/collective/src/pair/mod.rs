//! Operations between two ranks of a group, outside the collectives: tagged messages, buffers of fixed length, and memory that is
//! read and written by a key.
//!
//! They use a step of their own, separate from the calls. An operation that fails, times out or is dropped does not end the
//! group. The loss of a rank ends only the operations with that rank.
//!
//! | module | what it contains |
//! | --- | --- |
//! | `wait` | the time limit and the abort of an operation |
//! | `tagged` | tagged messages, from one rank or from any |
//! | `sending`, `receiving` | buffers that two ranks bind to a slot |
//! | `exporting`, `writing` | memory that is read and written by a key |
//! | `receipts` | how a sender learns that a message was received |
//! | `slots` | the slots in use |
//! | `wire` | the encoding of frames and receipts |

mod exporting;
mod receipts;
mod receiving;
mod sending;
mod slots;
mod tagged;
mod wait;
mod wire;
mod writing;

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize},
    },
    time::Duration,
};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::{Sharing, Status};
use tensorwire_rendezvous::{Peer, Step, Tensor, Worker, WorkerError, calls::Handling};
use tokio::sync::{Semaphore, watch};

use self::{exporting::Exports, receipts::Outgoing, slots::Slots};
pub use self::{
    exporting::{Export, ExportKey, KEY_BYTES},
    receiving::{AHEAD, RECV_BUFFERS_MAX, RecvBuffer},
    sending::{SENDS_UNDER_WAY, SendBuffer},
    tagged::{Message, Sent, Source},
    wait::{AbortHandle, Wait},
};
pub(crate) use self::{
    exporting::{export, get},
    receiving::recv_buffer,
    sending::send_buffer,
    tagged::{recv, recv_into, send},
    writing::put,
};
use crate::{call::hash, error::GroupError};

/// A hundred years: the limit of receives inside an operation with its own limit, and of receives that last as long as the group.
const NO_LIMIT: Duration = Duration::from_secs(100 * 365 * 86_400);

/// One rank's operations with other ranks, shared by the group and by the user's buffers, sends and exports. Background tasks
/// hold only its core, and end when this is dropped.
pub(crate) struct Pairs {
    core: Arc<Core>,
    /// From the first export on.
    accepting: Mutex<Option<Handling>>,
}

impl Pairs {
    /// The operations of `rank` in a group whose calls use the step `calls`.
    pub(crate) fn new(worker: &Worker, peers: &[Peer], rank: usize, calls: i64, limit: Duration) -> Self {
        let number = (hash(calls.to_le_bytes().into_iter().chain(*b"pairs")) >> 1) as i64;
        let core = Core {
            worker: worker.clone(),
            peers: peers.to_vec(),
            rank,
            limit,
            step: worker.step(number),
            over: watch::Sender::new(None),
            outgoing: peers.iter().map(|_| Mutex::default()).collect(),
            turn: AtomicUsize::new(0),
            slots: Mutex::default(),
            exports: Exports::default(),
            writing: peers.iter().map(|_| Semaphore::new(1)).collect(),
            writes: AtomicU64::new(0),
        };
        Self { core: Arc::new(core), accepting: Mutex::default() }
    }

    /// Ends all operations with `error`. Other ranks that wait for this one receive `status`.
    pub(crate) fn end(&self, error: &GroupError, status: &Status) {
        self.core.over(error);
        self.core.step.abort(status);
    }
}

impl fmt::Debug for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pairs").field("rank", &self.core.rank).finish_non_exhaustive()
    }
}

/// Ends the background tasks. The step ends with the last of them.
impl Drop for Pairs {
    fn drop(&mut self) {
        self.core
            .over(&GroupError::Over { rank: Some(self.core.rank), why: "the group was left".to_owned() });
    }
}

/// A rank, and what its operations share.
struct Core {
    worker: Worker,
    /// One for each rank. That of this rank is its own worker.
    peers: Vec<Peer>,
    rank: usize,
    /// The time limit of an operation that sets none.
    limit: Duration,
    step: Step,
    /// Why the group is over, if it is.
    over: watch::Sender<Option<GroupError>>,
    /// For each rank, the sent messages without a receipt.
    outgoing: Vec<Mutex<Outgoing>>,
    /// The first rank that the next receive from several ranks requests from.
    turn: AtomicUsize,
    slots: Mutex<Slots>,
    exports: Exports,
    /// For each rank, one permit: for this rank's write to an export there.
    writing: Vec<Semaphore>,
    /// The number of the last write.
    writes: AtomicU64,
}

impl Core {
    fn runtime(&self) -> &dyn Runtime {
        &**self.worker.runtime()
    }

    fn peer(&self, rank: usize) -> Result<&Peer, GroupError> {
        self.peers.get(rank).ok_or_else(|| GroupError::no_such_rank("rank", rank, self.peers.len()))
    }

    /// The next message that `from` sends under `key`.
    async fn next(&self, from: &Peer, key: &str) -> Result<Tensor, WorkerError> {
        self.step.from(from).recv(key).timeout(NO_LIMIT).sharing(Sharing::View).await
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all operations with `error`, unless they have ended before.
    fn over(&self, error: &GroupError) {
        self.over.send_if_modified(|over| {
            let is_first = over.is_none();
            over.get_or_insert_with(|| error.clone());
            is_first
        });
    }

    /// Completes when all operations end.
    async fn ended(&self) -> GroupError {
        let mut over = self.over.subscribe();
        // Cannot fail: the sender lives as long as `self`.
        let ended = over.wait_for(Option::is_some).await.ok().and_then(|over| over.clone());
        ended.unwrap_or(GroupError::Over { rank: None, why: String::new() })
    }

    /// Runs `task` in the background until it is done or all operations end.
    fn spawn(self: &Arc<Self>, name: &'static str, task: BoxFuture<'static, ()>) {
        let core = self.clone();
        let until_end = async move {
            futures::future::select(task, std::pin::pin!(core.ended())).await;
        };
        self.worker.runtime().spawn(name, Box::pin(until_end));
    }
}
