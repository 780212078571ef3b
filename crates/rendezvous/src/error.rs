//! The errors of workers.

mod loss;
mod status;

use std::{fmt, time::Duration};

use tensorwire_fabric::FabricError;
use tensorwire_memory::{Limit, MemoryError};
use tensorwire_protocol::{Code, Damage, Status, Validation, text::escaped};

pub(crate) use self::loss::Lost;
pub use self::loss::PeerLoss;
use crate::control::{ControlError, cluster::ClusterError};

/// The details of a status whose reason is a broken connection.
pub(crate) const BROKEN: &[u8] = b"connection broke";

/// Identifies a transfer in errors, by peer, key and step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferName {
    /// The peer's worker name.
    pub peer: String,
    /// The key or published name.
    pub key: String,
    /// The step; `None` for published tensors.
    pub step: Option<i64>,
}

/// A transfer that may fail, by peer, key and step. Only its error gets a name of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer<'a> {
    pub(crate) peer: &'a str,
    pub(crate) key: &'a str,
    /// `None` for published tensors.
    pub(crate) step: Option<i64>,
}

impl Transfer<'_> {
    /// Its name in an error.
    pub(crate) fn name(self) -> Box<TransferName> {
        let Self { peer, key, step } = self;
        Box::new(TransferName { peer: peer.to_owned(), key: key.to_owned(), step })
    }
}

impl std::fmt::Display for TransferName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { peer, key, step } = self;
        Transfer { peer, key, step: *step }.fmt(f)
    }
}

impl std::fmt::Display for Transfer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.step {
            Some(step) => write!(f, "`{}` of step {step} from {}", self.key, self.peer),
            None => write!(f, "`{}` from {}", self.key, self.peer),
        }
    }
}

/// Source or destination of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyEnd {
    /// The source, where values are sent.
    Source,
    /// The destination, where values are received.
    Destination,
}

impl KeyEnd {
    /// What to do if the device belongs to another worker.
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

/// Why a worker's operation failed.
///
/// ```
/// use tensorwire::Code;
/// use tensorwire::{Tensor, Worker, WorkerError};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
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
        /// The value of the setting.
        value: String,
        /// What to do.
        remedy: String,
    },
    /// The cluster is invalid, or this worker is not in it.
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
    /// A peer that dialled this worker gave no address to dial back, and the cluster has none.
    #[error("{peer} dialled this worker and gave no address to dial back; set one with Worker::set_address")]
    NoAddress {
        /// The peer.
        peer: String,
    },
    /// Another running worker has the name. This worker was refused, or it refused a peer.
    #[error("the name {name} is taken: {detail}")]
    NameTaken {
        /// The name.
        name: String,
        /// Where both workers are, and what to do.
        detail: String,
    },
    /// Text that is not a key or a device name.
    #[error("key `{}`: {problem}", escaped(key))]
    BadKey {
        /// The text.
        key: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// An output of a step is from a branch that was not taken.
    #[error(
        "the output of `{key}` is dead: the branch that makes it was not taken; receive only outputs of taken branches"
    )]
    DeadOutput {
        /// Its key.
        key: String,
    },
    /// Bytes, shape and element type do not match.
    #[error("tensor: {problem}")]
    InvalidTensor {
        /// What does not match, and what to do.
        problem: String,
    },
    /// Too many sent values wait for their receivers.
    #[error(
        "{waiting} sent values wait for their receivers, the maximum is {cap}: receive them or clean up their steps, or allow \
         more with the setting `values_max`"
    )]
    TableFull {
        /// How many values wait.
        waiting: usize,
        /// The maximum.
        cap: usize,
    },
    /// A key was used on a worker that does not have the key's device.
    #[error("Invalid rendezvous key ({end}): {key} @ {worker}; {}", end.remedy())]
    WrongWorker {
        /// The device of the key that must belong to this worker.
        end: KeyEnd,
        /// The key.
        key: String,
        /// The worker on which it was used.
        worker: String,
    },
    /// The step was aborted or cleaned up on this worker.
    #[error("step {step}: {status}")]
    Aborted {
        /// The step.
        step: i64,
        /// Why.
        status: Status,
    },
    /// The peer answered with an error.
    #[error("{transfer}: the peer answered {status}")]
    Remote {
        /// The transfer.
        transfer: Box<TransferName>,
        /// The peer's answer.
        status: Status,
    },
    /// This worker cannot receive the value: memory or another limit is exhausted (RESOURCE_EXHAUSTED), or a device
    /// copy failed (the status of the device context, or INVALID_ARGUMENT).
    #[error("{transfer}: {status}")]
    Local {
        /// The transfer.
        transfer: Box<TransferName>,
        /// The cause.
        status: Status,
    },
    /// The receive's own token was cancelled before a value arrived. The status is derived.
    #[error("{transfer}: {status}")]
    Cancelled {
        /// The transfer.
        transfer: Box<TransferName>,
        /// CANCELLED.
        status: Status,
    },
    /// The value does not fit the buffer. The value is not lost: the next receive of its key gets it.
    #[error("{transfer}: the value's {field} is {found}, but the buffer accepts {expected}; {remedy}")]
    Mismatch {
        /// The transfer.
        transfer: Box<TransferName>,
        /// What differs.
        field: &'static str,
        /// What the buffer accepts.
        expected: String,
        /// What the value has.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The received bytes are not the sent bytes: their checksum differs. The connection stays open. A published tensor
    /// can be fetched again; a sent value is lost.
    #[error(
        "{transfer} over {transport}: {damage}; the sender's {validation} checksum is {sent:016x}, the checksum of \
         the received bytes is {received:016x}. Check memory, adapters and drivers on both sides and on the path for faults"
    )]
    Corrupted {
        /// The transfer.
        transfer: Box<TransferName>,
        /// The fabric in use.
        transport: &'static str,
        /// The algorithm.
        validation: Validation,
        /// The sender's checksum.
        sent: u64,
        /// The checksum of the received bytes.
        received: u64,
        /// How the content differs.
        damage: Damage,
    },
    /// The peer, or the connection to it, is lost.
    #[error("{transfer} over {transport}: the peer at {address} is lost: {detail}; {}", loss.advice())]
    PeerLost {
        /// The transfer.
        transfer: Box<TransferName>,
        /// The peer's last known address.
        address: String,
        /// The fabric in use.
        transport: &'static str,
        /// The kind of loss.
        loss: PeerLoss,
        /// What was observed, and what was tried.
        detail: String,
    },
    /// The deadline passed.
    #[error("{what} took longer than {} ms; {hint}", limit.as_millis())]
    DeadlineExceeded {
        /// The operation.
        what: String,
        /// The limit.
        limit: Duration,
        /// What to look at.
        hint: &'static str,
    },
    /// No fabric works between the two workers.
    #[error(
        "no fabric connects to {peer}: {tried}; allow one that both workers can use (the setting `fabrics`), and let \
         every proxy between them pass TCP through: one that speaks only HTTP/2 carries no tensors"
    )]
    NoFabric {
        /// The peer.
        peer: String,
        /// Each fabric that was tried, with the reason why it is not used.
        tried: String,
    },
    /// The sets of this worker would hold too much memory.
    #[error(
        "with version {version} of the set `{}` the sets would hold {bytes} bytes, the maximum is {cap}: commit smaller \
         tensors, or allow more with the setting `set_bytes`",
        escaped(set)
    )]
    SetTooLarge {
        /// The set.
        set: String,
        /// The version that was refused.
        version: u64,
        /// What all sets would hold.
        bytes: u64,
        /// The maximum.
        cap: u64,
    },
    /// A version of a peer's set does not fit into this worker's receive pool.
    #[error(
        "{transfer}: version {version} takes {bytes} bytes of the receive pool, beside {held} bytes of the version that \
         this worker has, and the pool's cap is {cap} bytes: allow more with the setting `receive_bytes`"
    )]
    VersionTooLarge {
        /// The set.
        transfer: Box<TransferName>,
        /// The version.
        version: u64,
        /// What the contents take that this worker lacks.
        bytes: u64,
        /// What the version takes that a stream has returned last.
        held: u64,
        /// The pool's cap.
        cap: u64,
    },
    /// The publisher of a set has restarted, and its version is older than the one that this worker has.
    #[error(
        "following {transfer}: the publisher has restarted and went back from version {held} to {offered}; keep what you \
         have until it commits a newer version, or take what it has with Follow::accept_restart"
    )]
    WentBack {
        /// The set.
        transfer: Box<TransferName>,
        /// The version that this worker has.
        held: u64,
        /// The version that the publisher has.
        offered: u64,
    },
    /// The publisher of a set no longer has the next version, because this worker was too slow.
    #[error(
        "following {transfer}: the versions between {held} and {newest} are gone, because this worker was too slow; the \
         newest one follows. Follow with Policy::Latest if it may leave out versions"
    )]
    Superseded {
        /// The set.
        transfer: Box<TransferName>,
        /// The version that this worker has.
        held: u64,
        /// The newest version.
        newest: u64,
    },
    /// Not all peers of a sharded set have a version that some have.
    #[error(
        "the set `{}` is incomplete: {} lack {}; do they run, and do they commit the same versions?",
        escaped(set), parts.join(", "), version.map_or_else(|| "any version".to_owned(), |version| format!("version {version}"))
    )]
    Incomplete {
        /// The set.
        set: String,
        /// The newest version that a peer has; `None` if no peer has one.
        version: Option<u64>,
        /// The peers that lack it.
        parts: Vec<String>,
    },
    /// A limit of the operating system is reached.
    #[error("{what}; {limit} is {}: {}", shown(*value), limit.remedy())]
    Limit {
        /// What failed, and where.
        what: String,
        /// The limit.
        limit: Limit,
        /// Its value; `None` if it cannot be read.
        value: Option<u64>,
    },
    /// Memory cannot be allocated or registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A fabric failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The control plane failed.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// This worker was shut down.
    #[error("this worker was shut down")]
    ShutDown,
}

/// The same text as `Display`, because `main` prints a returned error with `Debug`.
impl fmt::Debug for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl WorkerError {
    /// The gRPC code of this error: that of its status, if it has one.
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
            Self::UnknownWorker { .. } | Self::NoAddress { .. } => Code::NotFound,
            Self::NameTaken { .. } => Code::AlreadyExists,
            Self::TableFull { .. }
            | Self::SetTooLarge { .. }
            | Self::VersionTooLarge { .. }
            | Self::Limit { .. }
            | Self::Memory(_) => Code::ResourceExhausted,
            Self::WentBack { .. } => Code::FailedPrecondition,
            Self::Superseded { .. } => Code::OutOfRange,
            Self::Corrupted { .. } => Code::DataLoss,
            Self::PeerLost { loss: PeerLoss::StepBroken, .. } | Self::ShutDown => Code::Aborted,
            Self::DeadlineExceeded { .. } => Code::DeadlineExceeded,
            Self::PeerLost { .. }
            | Self::NoFabric { .. }
            | Self::Fabric(_)
            | Self::Control(_)
            | Self::Incomplete { .. } => Code::Unavailable,
        }
    }

    /// Whether this error is only a consequence of another failure, which was reported elsewhere.
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

    /// Whether the step is over between the two workers because a connection between them broke while values of it were under way.
    /// Either of them may have noticed that.
    pub fn is_step_broken(&self) -> bool {
        match self {
            Self::Aborted { status, .. } | Self::Remote { status, .. } => {
                status.code == Code::Aborted && status.details == BROKEN
            }
            Self::PeerLost { loss, .. } => *loss == PeerLoss::StepBroken,
            _ => false,
        }
    }

    /// This error as [`WorkerError::Limit`], if a limit of the operating system is its cause.
    pub(crate) fn or_limit(self) -> Self {
        match self.limit() {
            Some(limit) => Self::at_limit(self.to_string(), limit),
            None => self,
        }
    }

    /// This error, for the key `key`.
    pub(crate) fn of(mut self, key: &str) -> Self {
        if let Self::Remote { transfer, .. }
        | Self::Local { transfer, .. }
        | Self::PeerLost { transfer, .. } = &mut self
        {
            key.clone_into(&mut transfer.key);
        }
        self
    }

    /// Appends what was tried after the loss of a peer.
    pub(crate) fn and(mut self, more: &str) -> Self {
        if let Self::PeerLost { detail, .. } = &mut self {
            detail.push_str("; ");
            detail.push_str(more);
        }
        self
    }

    /// The limit of the operating system that caused this error on this host. Limits on the peer's host appear only in
    /// the text.
    pub(crate) fn limit(&self) -> Option<Limit> {
        match self {
            Self::Fabric(error) => error.limit(),
            Self::Control(error) => error.limit(),
            _ => None,
        }
    }

    /// Whether this worker has dialled itself.
    pub(crate) fn is_this_worker(&self) -> bool {
        matches!(self, Self::Control(ControlError::ThisWorker { .. }))
    }

    /// The value was already returned to the user.
    pub(crate) fn handed_out() -> Self {
        Self::InvalidTensor { problem: "the value was already taken".to_owned() }
    }

    /// `what` failed at `limit`.
    pub(crate) fn at_limit(what: String, limit: Limit) -> Self {
        Self::Limit { what, limit, value: limit.value() }
    }
}

fn shown(value: Option<u64>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use std::io;

    use tensorwire_fabric::FabricKind;

    use super::*;

    /// The error of the operating system when a process has too many open files.
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
        // The peer's text about one of its own limits.
        let detail = too_many_files().to_string();
        assert!(detail.contains("os error 24"));
        let step = "agreeing with the peer";
        let theirs = FabricError::Connect { kind: FabricKind::TCP, step, detail };
        let kept = WorkerError::from(theirs).or_limit();
        assert!(matches!(kept, WorkerError::Fabric(_)), "{kept}");
    }
}
