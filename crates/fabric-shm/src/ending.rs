//! Why a connection ends: the error of this side, and the code that the peer reads.

use tensorwire_fabric::{FabricError, FabricKind, LossCause, PeerViolation};

use crate::import::ImportError;

const CLOSED: u64 = 1;
const REFUSED: u64 = 2;
const NOT_READY: u64 = 3;
const GONE: u64 = 4;

/// The word for the peer, and the error for this side's operations.
#[derive(Debug)]
pub(super) struct End {
    /// The value for this side's `closed` word; never 0.
    pub(super) code: u64,
    pub(super) error: FabricError,
}

impl End {
    /// This side closes.
    pub(super) fn closed() -> Self {
        Self { code: CLOSED, error: FabricError::Closed }
    }

    /// The peer broke a rule.
    pub(super) fn misbehaved(violation: PeerViolation) -> Self {
        let error = FabricError::PeerMisbehaved { kind: FabricKind::SHM, violation };
        Self { code: REFUSED | u64::from(violation.code()) << 8, error }
    }

    /// An immediate of the peer found no receive here.
    pub(super) fn not_ready(error: FabricError) -> Self {
        Self { code: NOT_READY, error }
    }

    /// The peer closed its socket without a reason in its `closed` word.
    pub(super) fn end_of_file(detail: &str) -> Self {
        Self { code: GONE, error: lost(LossCause::EndOfFile, detail) }
    }

    /// This side cannot continue.
    pub(super) fn failed(error: FabricError) -> Self {
        Self { code: GONE, error }
    }

    /// A system call of this side failed.
    pub(super) fn device(call: &'static str, error: std::io::Error) -> Self {
        Self { code: GONE, error: FabricError::device(FabricKind::SHM, call, error) }
    }

    /// The peer's memory cannot be mapped or made resident.
    pub(super) fn unreadable(error: std::io::Error) -> Self {
        Self::device("reading a block of the peer", error)
    }

    /// What the peer's `closed` word means. `peer_depth` is its receive depth.
    pub(super) fn from_peer(code: u64, peer_depth: u32) -> Self {
        let kind = FabricKind::SHM;
        let error = match (code & 0xFF, violation_of(code)) {
            (CLOSED, _) => lost(LossCause::ClosedByPeer, "the peer closed the queue pair"),
            (REFUSED, Some(reason)) => FabricError::RemoteRefused { kind, reason },
            (NOT_READY, _) => FabricError::ReceiverNotReady { kind, depth: peer_depth },
            (GONE, _) => lost(LossCause::Reset, "the peer gave up the connection after a failure of its own"),
            _ => return Self::misbehaved(PeerViolation::Malformed),
        };
        Self { code: GONE, error }
    }
}

impl From<PeerViolation> for End {
    fn from(violation: PeerViolation) -> Self {
        Self::misbehaved(violation)
    }
}

impl From<ImportError> for End {
    fn from(error: ImportError) -> Self {
        match error {
            ImportError::Refused(violation) => Self::misbehaved(violation),
            ImportError::System(error) => Self::device("mapping a block of the peer", error),
        }
    }
}

fn lost(cause: LossCause, detail: &str) -> FabricError {
    FabricError::PeerLost { kind: FabricKind::SHM, cause, detail: detail.to_owned() }
}

fn violation_of(code: u64) -> Option<PeerViolation> {
    PeerViolation::from_code(u8::try_from(code >> 8).ok()?)
}
