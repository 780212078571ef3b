//! The errors of this layer. All are cheap to clone, because one failure ends many operations.

use std::{io, sync::Arc};

use tensorwire_memory::Limit;

use crate::{FabricKind, RegionId};

/// Why a connection ended although this side did not close it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossCause {
    /// The peer's stream or socket was closed, as when its process ends.
    EndOfFile,
    /// The peer's host reset the connection.
    Reset,
    /// The NIC's retries ran out.
    RetryExceeded,
    /// The peer did not answer within the liveness bound.
    Unresponsive,
    /// The peer closed the connection in an orderly way.
    ClosedByPeer,
    /// The local device went away.
    DeviceLost,
    /// Bytes of an encrypted connection were changed, repeated or removed on the way. None of them was delivered.
    Tampered,
}

/// A rule of the fabric contract that a peer broke. Each variant is one rule and one metric, and has no payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum PeerViolation {
    /// A frame, descriptor or handshake that cannot be parsed.
    #[error("malformed frame")]
    Malformed,
    /// A region number or generation that is not registered.
    #[error("access to an unknown or outdated region")]
    UnknownRegion,
    /// The region's key does not match.
    #[error("wrong region key")]
    WrongKey,
    /// The range leaves the region.
    #[error("access outside the region")]
    OutOfBounds,
    /// The region does not allow this kind of access.
    #[error("access right missing")]
    NoRight,
    /// The range is registered but not granted now.
    #[error("access to memory that is not granted")]
    NotGranted,
    /// The range is registered but not exposed to reads now.
    #[error("read of memory that is not exposed")]
    NotExposed,
    /// More reads at once than the target's limit.
    #[error("more one-sided reads at once than are answered")]
    TooManyReads,
    /// More immediates than receives.
    #[error("an immediate came although no receive was posted")]
    ReceiverNotReady,
    /// A source block without the seals, the size or the pages it must have.
    #[error("a shared block is not sealed as it must be, or has another size or holes")]
    UnsealedBlock,
    /// A token that was never issued, or already used.
    #[error("wrong or used connection token")]
    BadToken,
    /// The peer of a data connection shows another certificate than the worker of the control session.
    #[error("another certificate than that of the worker of the control session")]
    WrongCertificate,
}

impl PeerViolation {
    /// All rules, in the order of their codes.
    pub const ALL: [Self; 12] = [
        Self::Malformed,
        Self::UnknownRegion,
        Self::WrongKey,
        Self::OutOfBounds,
        Self::NoRight,
        Self::NotGranted,
        Self::ReceiverNotReady,
        Self::UnsealedBlock,
        Self::BadToken,
        Self::NotExposed,
        Self::TooManyReads,
        Self::WrongCertificate,
    ];

    /// The number that a fabric sends to the peer that broke this rule. A rule's number never changes.
    pub const fn code(self) -> u8 {
        match self {
            Self::Malformed => 1,
            Self::UnknownRegion => 2,
            Self::WrongKey => 3,
            Self::OutOfBounds => 4,
            Self::NoRight => 5,
            Self::NotGranted => 6,
            Self::ReceiverNotReady => 7,
            Self::UnsealedBlock => 8,
            Self::BadToken => 9,
            Self::NotExposed => 10,
            Self::TooManyReads => 11,
            Self::WrongCertificate => 12,
        }
    }

    /// The rule of this [code](Self::code).
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.code() == code)
    }
}

/// Why a fabric operation failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The peer, or the network to it, is gone.
    #[error("{kind}: the connection to the peer is lost ({cause:?}): {detail}")]
    PeerLost {
        /// The fabric.
        kind: FabricKind,
        /// What was seen.
        cause: LossCause,
        /// The text of the operating system or device.
        detail: String,
    },
    /// The peer refused our access; the connection is down.
    #[error("{kind}: the peer refused an access ({reason}); the range was never granted, or no longer")]
    RemoteRefused {
        /// The fabric.
        kind: FabricKind,
        /// The rule that the access broke.
        reason: PeerViolation,
    },
    /// The peer broke a rule; the connection was closed.
    #[error("{kind}: the peer broke the fabric contract: {violation}; the connection was closed")]
    PeerMisbehaved {
        /// The fabric.
        kind: FabricKind,
        /// The rule.
        violation: PeerViolation,
    },
    /// An immediate found no posted receive: credits are wrong somewhere.
    #[error(
        "{kind}: an immediate found no posted receive (receive depth {depth}); this is a bug in the flow control"
    )]
    ReceiverNotReady {
        /// The fabric.
        kind: FabricKind,
        /// The queue pair's receive depth.
        depth: u32,
    },
    /// This side has closed the queue pair.
    #[error("the queue pair was closed")]
    Closed,
    /// A caller that counts its own operations posted one too many.
    #[error("the send queue is full ({depth} operations are outstanding)")]
    SendQueueFull {
        /// The queue pair's send depth.
        depth: u32,
    },
    /// An operation that can never fit into the send queue.
    #[error(
        "the operation takes {pieces} work requests, the send queue is {depth} deep: write less at once, or give \
         the queue pair a deeper send queue"
    )]
    TooManyPieces {
        /// Pieces of the operation.
        pieces: u64,
        /// The queue pair's send depth.
        depth: u32,
    },
    /// A buffer whose block is not registered with this queue pair's domain.
    #[error(
        "block {block} is not registered with this {kind} domain: allocate from a pool whose blocks are registered with the domain"
    )]
    NotRegistered {
        /// The fabric.
        kind: FabricKind,
        /// The block's number.
        block: u64,
    },
    /// This queue pair does not know the peer's region.
    #[error("region {region:?} of the peer is not known on this queue pair, or its generation is outdated")]
    UnknownRemoteRegion {
        /// The region.
        region: RegionId,
    },
    /// The local and the remote range differ in length, or the remote one leaves the region.
    #[error("a write of {local} bytes does not fit the remote range of {remote} bytes")]
    LengthMismatch {
        /// Bytes of the local buffer.
        local: u64,
        /// Bytes of the remote range.
        remote: u64,
    },
    /// Two segments of a vectored write name the same byte of the peer.
    #[error(
        "two segments of one vectored write overlap in region {region:?} at offset {offset}, and the order in \
         which they land is undefined: name each byte once"
    )]
    OverlappingSegments {
        /// The region.
        region: RegionId,
        /// Where the second one starts.
        offset: u64,
    },
    /// The peer's process holds as many of our loans as it may: send a copy instead.
    #[error("the peer holds {open} of at most {cap} views of this process's memory: send a copy")]
    LeasesExhausted {
        /// Open and retired leases of that process.
        open: u32,
        /// The cap.
        cap: u32,
    },
    /// The peer's process holds as many bytes of our loans as it may: send a copy instead.
    #[error(
        "the peer holds views of {held} bytes of this process's memory, and with {wanted} more it would have more than \
         {cap}: send a copy"
    )]
    LeasedBytesExhausted {
        /// Bytes of open and retired leases of that process.
        held: u64,
        /// Bytes of one more loan.
        wanted: u64,
        /// The cap.
        cap: u64,
    },
    /// The peer shares more memory over one connection than this side maps; the connection was closed.
    #[error(
        "shm: the peer shares {shared} bytes of its memory over one connection, and this side maps at most {most}: \
         allow more with imported_bytes_per_connection_max"
    )]
    ImportedBytesExhausted {
        /// Bytes of all blocks of that connection, including the one that is refused.
        shared: u64,
        /// The cap.
        most: u64,
    },
    /// The operation is not possible now: the peer has not processed earlier ones.
    #[error("{kind} cannot {what} now: the peer is busy; try again later, or send a copy")]
    Busy {
        /// The fabric.
        kind: FabricKind,
        /// The operation.
        what: &'static str,
    },
    /// The fabric cannot do this.
    #[error("{kind} cannot {what}")]
    Unsupported {
        /// The fabric.
        kind: FabricKind,
        /// The operation.
        what: &'static str,
    },
    /// Setting up a connection failed.
    #[error("{kind}: cannot connect: {step} failed: {detail}")]
    Connect {
        /// The fabric.
        kind: FabricKind,
        /// The step that failed.
        step: &'static str,
        /// What was seen, and what to do.
        detail: String,
    },
    /// A limit of the operating system keeps a connection from being set up.
    #[error("{kind}: cannot connect: {step} failed: {detail}")]
    Limit {
        /// The fabric.
        kind: FabricKind,
        /// The step that failed.
        step: &'static str,
        /// What was seen, and what to do.
        detail: String,
        /// The limit.
        limit: Limit,
    },
    /// The peer did not answer in time.
    #[error("{kind}: connecting took longer than {limit_ms} ms; is the peer alive and reachable?")]
    ConnectTimeout {
        /// The fabric.
        kind: FabricKind,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// A call on the device or the operating system failed.
    #[error("{kind}: {call} failed: {source}")]
    Device {
        /// The fabric.
        kind: FabricKind,
        /// The call.
        call: &'static str,
        /// The answer.
        source: Arc<io::Error>,
    },
}

impl FabricError {
    /// A failed call of the operating system or device.
    pub fn device(kind: FabricKind, call: &'static str, source: io::Error) -> Self {
        Self::Device { kind, call, source: Arc::new(source) }
    }

    /// The error for a step of connecting that the operating system refused. `detail` is what was seen, and what to do.
    pub fn refused(kind: FabricKind, step: &'static str, error: &io::Error, detail: String) -> Self {
        match Limit::of_files(error) {
            Some(limit) => Self::Limit { kind, step, detail, limit },
            None => Self::Connect { kind, step, detail },
        }
    }

    /// The limit of this process or host that caused the error, if one did.
    pub fn limit(&self) -> Option<Limit> {
        match self {
            Self::Limit { limit, .. } => Some(*limit),
            Self::Device { source, .. } => Limit::of_files(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PeerViolation;

    #[test]
    fn every_violation_has_its_own_code() {
        for (rule, code) in PeerViolation::ALL.into_iter().zip(1..) {
            assert_eq!(rule.code(), code);
            assert_eq!(PeerViolation::from_code(code), Some(rule));
        }
        assert_eq!(PeerViolation::from_code(0), None);
    }
}
