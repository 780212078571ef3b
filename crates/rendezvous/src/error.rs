//! The errors of this layer.

use std::time::Duration;

use memory::MemoryError;
use protocol::Status;
use verbs_reactor::FabricError;

use crate::control::ControlError;

/// Names a transfer in errors: which peer, which key, which step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferName {
    /// The peer's worker name.
    pub peer: String,
    /// The key or published name.
    pub key: String,
    /// The step; `None` for published tensors.
    pub step: Option<i64>,
}

impl std::fmt::Display for TransferName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.step {
            Some(step) => write!(f, "`{}` of step {step} from {}", self.key, self.peer),
            None => write!(f, "`{}` from {}", self.key, self.peer),
        }
    }
}

/// Why a worker's operation failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A setting that cannot be used.
    #[error("{field} = `{value}`: {remedy}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What it was set to.
        value: String,
        /// What to do.
        remedy: String,
    },
    /// A name that is neither in the cluster nor connected.
    #[error(
        "worker `{name}` is unknown; known: {known}. Add it to the cluster, or connect by address with peer_at"
    )]
    UnknownWorker {
        /// The name.
        name: String,
        /// The names that are known.
        known: String,
    },
    /// Text that is no key or device name.
    #[error("key `{key}`: {problem}")]
    BadKey {
        /// The text.
        key: String,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// Bytes, shape and element type do not go together.
    #[error("tensor: {problem}")]
    InvalidTensor {
        /// What does not fit, and the remedy.
        problem: String,
    },
    /// Too many sent values wait for their receivers.
    #[error(
        "{waiting} sent values wait for their receivers; receive or clean up steps, or raise the table's cap"
    )]
    TableFull {
        /// Values waiting.
        waiting: usize,
    },
    /// The step was aborted or cleaned up here.
    #[error("step {step}: {status}")]
    Aborted {
        /// The step.
        step: i64,
        /// Why.
        status: Status,
    },
    /// The sender answered with an error.
    #[error("receiving {transfer}: the sender answered {status}")]
    Remote {
        /// The transfer.
        transfer: TransferName,
        /// Its answer.
        status: Status,
    },
    /// The peer or the way to it is gone.
    #[error("receiving {transfer} over {transport}: the peer is lost: {detail}")]
    PeerLost {
        /// The transfer.
        transfer: TransferName,
        /// The fabric in use.
        transport: String,
        /// What was seen.
        detail: String,
    },
    /// The time ran out.
    #[error("{what} took longer than {} ms; is the sender running, and does it send this key?", limit.as_millis())]
    DeadlineExceeded {
        /// The operation.
        what: String,
        /// The limit.
        limit: Duration,
    },
    /// No fabric works between the two workers.
    #[error("no fabric connects to {peer}: {tried}")]
    NoFabric {
        /// The peer.
        peer: String,
        /// Each fabric that was considered, and why it was not used.
        tried: String,
    },
    /// Memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A fabric.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The control plane.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// This worker was shut down.
    #[error("this worker was shut down")]
    ShutDown,
}
