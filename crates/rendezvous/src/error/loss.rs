//! Why peers count as lost, and connections as ended.

use tensorwire_fabric::{FabricError, FabricKind, LossCause};
use tensorwire_protocol::{Code, Status};

/// Why a peer counts as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerLoss {
    /// Its process ended, or the connection broke.
    Gone,
    /// It neither answered a ping nor moved data within the liveness bound: it is stopped, its machine is overloaded,
    /// or the network drops everything.
    Unresponsive,
    /// Its host acknowledged nothing of a data connection within the liveness bound, while its session may go on: a firewall
    /// dropped the connection, or large packets are lost on the way (a black hole of MTU).
    Unreachable,
    /// It was shut down in order.
    Goodbye,
    /// It violated the protocol, so the connection was closed.
    Misbehaved,
    /// This worker was shut down. Operations return [`WorkerError::ShutDown`](crate::WorkerError::ShutDown) instead.
    ShutDownHere,
    /// A connection broke earlier while values of this step were under way, which ended the step between the two
    /// workers.
    StepBroken,
    /// It has a session with another worker of this worker's name, and refused this worker.
    NameTaken,
}

impl PeerLoss {
    /// What to do.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Gone => "check whether its process still runs; the next use connects again",
            Self::Unresponsive => {
                "check whether its process is stopped or its machine overloaded, or allow more with the setting \
                 `liveness`; the next use connects again"
            }
            Self::Unreachable => {
                "check firewalls on the way, and its MTU: if small tensors pass and large ones do not, lower the MTU of \
                 both hosts, or set net.ipv4.tcp_mtu_probing=1; the next use connects again"
            }
            Self::Goodbye => "start it again if it is still needed; the next use connects again",
            Self::Misbehaved => {
                "run the same version of Tensorwire on both sides, and report this if they are the same"
            }
            Self::ShutDownHere => "receive before shutting this worker down",
            Self::StepBroken => "send and receive the step's values again in another step",
            Self::NameTaken => "stop the other worker, or give each worker its own name",
        }
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

    /// The reason that the peer gives for ending a connection.
    pub(crate) fn from_peer(status: &Status) -> Self {
        let why = format!("the peer ended the connection: {}", status.message);
        match status.code {
            Code::InvalidArgument => Self::misbehaved(why),
            Code::DeadlineExceeded => Self::new(PeerLoss::Unreachable, why),
            _ => Self::gone(why),
        }
    }

    /// The reason as it is sent to the peer. The code shows whether a rule was broken or the path is lost.
    pub(crate) fn status(&self) -> Status {
        let code = match self.loss {
            PeerLoss::Misbehaved => Code::InvalidArgument,
            PeerLoss::Unreachable => Code::DeadlineExceeded,
            _ => Code::Unavailable,
        };
        Status::new(code, self.detail.as_str())
    }
}

impl From<FabricError> for Lost {
    fn from(error: FabricError) -> Self {
        let loss = match &error {
            FabricError::PeerLost { cause: LossCause::Unresponsive, .. } => PeerLoss::Unresponsive,
            FabricError::PeerLost { kind, cause: LossCause::RetryExceeded, .. }
                if *kind == FabricKind::TCP =>
            {
                PeerLoss::Unreachable
            }
            FabricError::PeerMisbehaved { .. } | FabricError::RemoteRefused { .. } => PeerLoss::Misbehaved,
            _ => PeerLoss::Gone,
        };
        Self::new(loss, error.to_string())
    }
}
