//! The errors of this layer.

use std::{fmt, time::Duration};

use tensorwire_memory::{Limit, MemoryError};
use tensorwire_protocol::{Code, Damage, Status, Validation, text::escaped};
use tensorwire_verbs_reactor::{FabricError, LossCause};

use crate::control::{ControlError, cluster::ClusterError};

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

/// Why a peer counts as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerLoss {
    /// Its process ended, or the connection to it broke.
    Gone,
    /// It answered no ping and moved no data for the liveness bound: it is stopped, its machine is overloaded, or
    /// the network drops everything.
    Unresponsive,
    /// It was shut down in order.
    Goodbye,
    /// It broke a rule, and its connection was closed for that.
    Misbehaved,
    /// This worker was shut down.
    ShutDownHere,
    /// A connection broke earlier while values of this step were under way: the step is over with this peer.
    StepBroken,
    /// It has a session with another worker of this worker's name, and refused this one.
    NameTaken,
}

impl PeerLoss {
    /// What to do.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Gone => "see whether its process still runs; once it is back, the next use connects again",
            Self::Unresponsive => {
                "see whether its process is stopped or its machine overloaded, or allow more with the setting \
                 `liveness`; the next use connects again"
            }
            Self::Goodbye => "start it again if it is still needed; the next use connects again",
            Self::Misbehaved => {
                "run the same version of Tensorwire at both ends, and report this if they are"
            }
            Self::ShutDownHere => "receive before shutting this worker down",
            Self::StepBroken => "repeat the step's values in another step",
            Self::NameTaken => "stop the other worker, or give each a name of its own",
        }
    }
}

/// One of the two ends of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyEnd {
    /// Its source, where values are sent.
    Source,
    /// Its destination, where they are received.
    Destination,
}

impl KeyEnd {
    /// What to do when the device is another worker's.
    fn remedy(self) -> &'static str {
        match self {
            Self::Source => "send on the worker that has the source device",
            Self::Destination => "receive on the worker that has the destination device",
        }
    }
}

impl std::fmt::Display for KeyEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Source => "src",
            Self::Destination => "dst",
        })
    }
}

/// The first reason why a session or connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) loss: PeerLoss,
    pub(crate) detail: String,
}

impl Lost {
    pub(crate) fn new(loss: PeerLoss, detail: impl Into<String>) -> Self {
        Self { loss, detail: detail.into() }
    }

    pub(crate) fn gone(detail: impl Into<String>) -> Self {
        Self::new(PeerLoss::Gone, detail)
    }

    pub(crate) fn misbehaved(detail: impl Into<String>) -> Self {
        Self::new(PeerLoss::Misbehaved, detail)
    }

    pub(crate) fn shut_down_here() -> Self {
        Self::new(PeerLoss::ShutDownHere, "this worker was shut down")
    }
}

impl From<FabricError> for Lost {
    fn from(error: FabricError) -> Self {
        let loss = match &error {
            FabricError::PeerLost { cause: LossCause::Unresponsive, .. } => PeerLoss::Unresponsive,
            FabricError::PeerMisbehaved { .. } | FabricError::RemoteRefused { .. } => PeerLoss::Misbehaved,
            _ => PeerLoss::Gone,
        };
        Self::new(loss, error.to_string())
    }
}

/// Why a worker's operation failed.
///
/// ```
/// use tensorwire_protocol::Code;
/// use tensorwire_rendezvous::{Tensor, Worker, WorkerError};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire_rendezvous::WorkerError> {
/// # let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// match peer.fetch("v").await {
///     Err(WorkerError::Remote { status, .. }) => assert_eq!(status.code, Code::NotFound),
///     other => panic!("{other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A setting that cannot be used.
    #[error("{field} = `{}`: {remedy}", escaped(value))]
    Config {
        /// The setting.
        field: &'static str,
        /// What it was set to.
        value: String,
        /// What to do.
        remedy: String,
    },
    /// The cluster contradicts itself, or this worker is not in it.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A name that is neither in the cluster nor connected.
    #[error(
        "worker `{}` is unknown; known: {known}. Add it to the cluster, or connect by address with peer_at",
        escaped(name)
    )]
    UnknownWorker {
        /// The name.
        name: String,
        /// The names that are known.
        known: String,
    },
    /// Another worker has the name and answers: one of the two was refused, this worker or a peer.
    #[error("the name {name} is taken: {detail}")]
    NameTaken {
        /// The name.
        name: String,
        /// Where both workers are, and what to do.
        detail: String,
    },
    /// Text that is no key or device name.
    #[error("key `{}`: {problem}", escaped(key))]
    BadKey {
        /// The text.
        key: String,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// An output of a step that comes from a branch that was not taken.
    #[error(
        "the output of `{key}` is dead: the branch that makes it was not taken; ask for outputs of taken branches"
    )]
    DeadOutput {
        /// Its key.
        key: String,
    },
    /// Bytes, shape and element type do not go together.
    #[error("tensor: {problem}")]
    InvalidTensor {
        /// What does not fit, and the remedy.
        problem: String,
    },
    /// Too many sent values wait for their receivers.
    #[error(
        "{waiting} sent values wait for their receivers, and {cap} may: receive them or clean up their steps, or allow \
         more with the setting `values_max`"
    )]
    TableFull {
        /// Values waiting.
        waiting: usize,
        /// As many may.
        cap: usize,
    },
    /// A key was used at a worker that is not the one of its device.
    #[error("Invalid rendezvous key ({end}): {key} @ {worker}; {}", end.remedy())]
    WrongWorker {
        /// Whose device it should be.
        end: KeyEnd,
        /// The key.
        key: String,
        /// The worker it was used at.
        worker: String,
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
        transfer: Box<TransferName>,
        /// Its answer.
        status: Status,
    },
    /// This end cannot receive it: no memory, or a limit that was exceeded (RESOURCE_EXHAUSTED), or a device that it
    /// can't be copied from or to (the device context's status, or INVALID_ARGUMENT).
    #[error("receiving {transfer}: {status}")]
    Local {
        /// The transfer.
        transfer: Box<TransferName>,
        /// What is exhausted or cannot be done.
        status: Status,
    },
    /// The receive's own token was cancelled before a value came. The status is marked as derived.
    #[error("receiving {transfer}: {status}")]
    Cancelled {
        /// The transfer.
        transfer: Box<TransferName>,
        /// CANCELLED.
        status: Status,
    },
    /// The value does not go into the buffer that was given for it. It is not lost: the next receive of its key gets it.
    #[error("receiving {transfer}: its {field} is {found}, but the buffer is for {expected}; {remedy}")]
    Mismatch {
        /// The transfer.
        transfer: Box<TransferName>,
        /// What differs.
        field: &'static str,
        /// What the buffer is for.
        expected: String,
        /// What the value has.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
    /// What arrived is not what was sent: its checksum differs. The connection goes on. A published tensor can be
    /// fetched again; a sent value is gone.
    #[error(
        "receiving {transfer} over {transport}: {damage}; the sender's {validation} checksum is {sent:016x}, that of \
         the bytes here is {received:016x}. Look for faulty memory, adapters or drivers at both ends and on the way"
    )]
    Corrupted {
        /// The transfer.
        transfer: Box<TransferName>,
        /// The fabric in use.
        transport: &'static str,
        /// The algorithm.
        validation: Validation,
        /// The checksum that came with the content.
        sent: u64,
        /// That of the bytes that came.
        received: u64,
        /// What was changed.
        damage: Damage,
    },
    /// The peer or the way to it is gone.
    #[error("receiving {transfer} over {transport}: the peer at {address} is lost: {detail}; {}", loss.advice())]
    PeerLost {
        /// The transfer.
        transfer: Box<TransferName>,
        /// Where the peer is, or was.
        address: String,
        /// The fabric in use.
        transport: &'static str,
        /// Why, in kind.
        loss: PeerLoss,
        /// What was seen, and what was tried.
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
    #[error(
        "no fabric connects to {peer}: {tried}; allow one that both ends can use (the setting `fabrics`), and let what is \
         between them pass TCP through: a proxy that speaks HTTP/2 carries no tensors"
    )]
    NoFabric {
        /// The peer.
        peer: String,
        /// Each fabric that was considered, and why it was not used.
        tried: String,
    },
    /// A limit of the operating system is in the way.
    #[error("{what}; {limit} is {}: {}", shown(*value), limit.remedy())]
    Limit {
        /// What failed, and where.
        what: String,
        /// The limit.
        limit: Limit,
        /// Its value; `None` where it cannot be read.
        value: Option<u64>,
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

/// As it is shown: what `main` prints of an error that it returns should be for people, and the text has all there is.
impl fmt::Debug for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl WorkerError {
    /// What kind of failure it is, in gRPC's terms: that of the status it carries, if it carries one.
    pub fn code(&self) -> Code {
        match self {
            Self::Aborted { status, .. }
            | Self::Cancelled { status, .. }
            | Self::Remote { status, .. }
            | Self::Local { status, .. } => status.code,
            Self::Config { .. }
            | Self::Cluster(_)
            | Self::BadKey { .. }
            | Self::WrongWorker { .. }
            | Self::DeadOutput { .. }
            | Self::InvalidTensor { .. }
            | Self::Mismatch { .. } => Code::InvalidArgument,
            Self::UnknownWorker { .. } => Code::NotFound,
            Self::NameTaken { .. } => Code::AlreadyExists,
            Self::TableFull { .. } | Self::Limit { .. } | Self::Memory(_) => Code::ResourceExhausted,
            Self::Corrupted { .. } => Code::DataLoss,
            Self::PeerLost { loss: PeerLoss::StepBroken, .. } | Self::ShutDown => Code::Aborted,
            Self::DeadlineExceeded { .. } => Code::DeadlineExceeded,
            Self::PeerLost { .. } | Self::NoFabric { .. } | Self::Fabric(_) | Self::Control(_) => {
                Code::Unavailable
            }
        }
    }

    /// Whether it only follows from another failure, which somebody else was told.
    pub fn is_derived(&self) -> bool {
        match self {
            Self::Aborted { status, .. }
            | Self::Cancelled { status, .. }
            | Self::Remote { status, .. }
            | Self::Local { status, .. } => status.is_derived(),
            Self::PeerLost { loss, .. } => *loss == PeerLoss::StepBroken,
            _ => false,
        }
    }

    /// Names the limit that is behind this error, if one is.
    pub(crate) fn or_limit(self) -> Self {
        match self.limit() {
            Some(limit) => Self::at_limit(self.to_string(), limit),
            None => self,
        }
    }

    /// This loss of a peer, with what was tried after it.
    pub(crate) fn and(mut self, more: &str) -> Self {
        if let Self::PeerLost { detail, .. } = &mut self {
            detail.push_str("; ");
            detail.push_str(more);
        }
        self
    }

    /// The limit of the operating system that is behind this error, if one is and it was seen here: what a peer says
    /// of its own limits is its text.
    pub(crate) fn limit(&self) -> Option<Limit> {
        match self {
            Self::Fabric(error) => error.limit(),
            Self::Control(error) => error.limit(),
            _ => None,
        }
    }

    /// A value is asked for that was handed out before.
    pub(crate) fn handed_out() -> Self {
        Self::InvalidTensor { problem: "the value was handed out before".to_owned() }
    }

    /// `what` failed at `limit`.
    pub(crate) fn at_limit(what: String, limit: Limit) -> Self {
        Self::Limit { what, limit, value: limit.value() }
    }
}

fn shown(value: Option<u64>) -> String {
    value.map_or_else(|| "not known".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use std::io;

    use tensorwire_verbs_reactor::FabricKind;

    use super::*;

    /// What the operating system answers to one file too many.
    fn too_many_files() -> io::Error {
        let number = 24;
        io::Error::from_raw_os_error(number)
    }

    #[test]
    fn e_a_limit_is_known_by_its_number_and_not_by_its_text() {
        let own = FabricError::device(FabricKind::SHM, "eventfd", too_many_files());
        let named = WorkerError::from(own).or_limit();
        assert!(matches!(named, WorkerError::Limit { limit: Limit::OpenFiles, .. }), "{named}");
        assert!(named.to_string().contains("eventfd") && named.to_string().contains("ulimit -n"), "{named}");
        // The peer's words about a limit of its own.
        let detail = too_many_files().to_string();
        assert!(detail.contains("os error 24"));
        let step = "agreeing with the peer";
        let theirs = FabricError::Connect { kind: FabricKind::TCP, step, detail };
        let kept = WorkerError::from(theirs).or_limit();
        assert!(matches!(kept, WorkerError::Fabric(_)), "{kept}");
    }
}
