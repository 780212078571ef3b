//! The traits a fabric implements.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use memory::{Block, BlockId};

use crate::{
    Access, BoxFuture, FabricError, FabricKind, QueuePair, QueuePairStats, RemoteRegion, Runtime, SlotKey,
    WorkRequest,
};

/// What a fabric can and cannot do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Many ranges in one logical write.
    pub vectored: bool,
    /// One-sided reads, of one range or of many.
    pub read: bool,
    /// Views of the peer's memory without a copy.
    pub lend: bool,
    /// What travels is encrypted, and held against change, between the two ends.
    pub encrypted: bool,
    /// The largest piece a logical write is split into, in bytes.
    pub piece_bytes_max: u64,
}

impl Capabilities {
    /// Writes of one range only, unsplit.
    pub const WRITES: Self =
        Self { vectored: false, read: false, lend: false, encrypted: false, piece_bytes_max: u64::MAX };

    /// Whether `request` is among what the fabric can do.
    pub fn allow(&self, request: &WorkRequest) -> bool {
        match request {
            WorkRequest::Write { .. } => true,
            WorkRequest::WriteVectored { .. } => self.vectored,
            WorkRequest::Lend { .. } => self.lend,
            WorkRequest::Read { .. } | WorkRequest::ReadVectored { .. } => self.read,
        }
    }
}

/// A way to move bytes between processes: opens domains.
pub trait Fabric: Send + Sync + fmt::Debug + 'static {
    /// Which kind this is.
    fn kind(&self) -> FabricKind;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Two ends can use this fabric only if their reach is equal: boot id, network namespace and user for shm,
    /// empty for tcp.
    fn reach(&self) -> Vec<u8>;

    /// Opens a protection domain.
    ///
    /// # Errors
    /// [`FabricError::Device`] when the device refuses.
    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError>;
}

/// A protection domain: the memory registered with it can be used by its queue pairs only.
pub trait Domain: Send + Sync + fmt::Debug + 'static {
    /// Which kind of fabric this belongs to.
    fn kind(&self) -> FabricKind;

    /// Registers `block` (idempotent per block: once more, it tells the region that the block is). The domain keeps the block mapped as long as it lives itself.
    ///
    /// # Errors
    /// [`FabricError::Device`] when the device refuses, naming the limit to raise.
    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError>;

    /// Lets go of a block that no operation uses any more and that no peer can access: a user's memory that leaves, or
    /// any when the domain's queue pairs are closed. A domain that can't do that keeps the block for as long as it lives.
    fn deregister(&self, _block: BlockId) {}

    /// A number that changes when the device was lost and opened again: from then on blocks have other keys, and
    /// [`register`](Self::register) tells them. All connections from before are over.
    fn epoch(&self) -> u64 {
        0
    }

    /// Makes one end of a connection, with its receives posted.
    ///
    /// # Errors
    /// [`FabricError::Device`] when the device refuses.
    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError>;
}

/// Depths of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// Operations that may be outstanding at once.
    pub send_depth: u32,
    /// Immediates that may arrive before the first is taken.
    pub receive_depth: u32,
}

/// What one end must know of the other to connect: opaque, versioned, carried by the control plane.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionData(pub Vec<u8>);

impl fmt::Debug for ConnectionData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // May hold a one-use token.
        write!(f, "ConnectionData({} bytes)", self.0.len())
    }
}

/// Which end this is. The control plane decides: the end that asked for the connection dials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Opens the stream or socket, where there is one.
    Dialer,
    /// Waits for it.
    Acceptor,
}

/// How to connect a prepared end.
#[derive(Debug, Clone)]
pub struct ConnectParams {
    /// The other end's data.
    pub peer: ConnectionData,
    /// Which end this is.
    pub role: Role,
    /// Where the control connection was dialled, if this end has dialled it: for fabrics that need an address.
    pub peer_address: Option<SocketAddr>,
    /// How long it may take.
    pub limit: Duration,
}

/// One end of a connection that is not connected yet. Dropping it gives everything back.
pub trait Prepared: Send + fmt::Debug {
    /// What the other end must know.
    fn connection_data(&self) -> ConnectionData;

    /// Connects. Both ends must call this, each with the other's data. Nothing runs in the background before the
    /// [driver](Connected::driver) is polled.
    ///
    /// # Errors
    /// [`FabricError::Connect`], [`FabricError::ConnectTimeout`], [`FabricError::PeerMisbehaved`].
    ///
    /// # Cancel safety
    /// Dropping the future abandons the connection.
    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>>;
}

/// A queue pair that is connected, and the future that drives it.
pub struct Connected {
    /// The user's half.
    pub queue_pair: QueuePair,
    /// Makes progress when nobody awaits an operation. It ends once the connection is over and nothing is left to do for
    /// it. Dropping it before ends the connection.
    pub driver: BoxFuture<'static, ()>,
}

impl Connected {
    /// Drives the queue pair in a task of its own.
    pub fn spawn(self, runtime: &dyn Runtime) -> QueuePair {
        runtime.spawn("queue pair", self.driver);
        self.queue_pair
    }
}

impl fmt::Debug for Connected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connected").field("queue_pair", &self.queue_pair).finish_non_exhaustive()
    }
}

/// The fabric's half of a connected queue pair; [`QueuePair`] is the user's half. Both share a
/// [`QueuePairCore`](crate::QueuePairCore), on which the fabric reports completions, arrivals and failure.
pub trait Link: Send + Sync + fmt::Debug + 'static {
    /// Takes one operation whose slot is already reserved, in posting order. Never blocks. A failure is
    /// reported on the core like any completion. The send queue has room for all its
    /// [pieces](WorkRequest::pieces).
    fn submit(&self, key: SlotKey, request: &WorkRequest);

    /// Makes progress on behalf of whoever awaits: cheap when there is nothing to do, never blocks.
    fn drive(&self);

    /// Looks a little longer, until `is_there`, on behalf of whoever awaits an arrival, after [`drive`](Self::drive). Does
    /// nothing unless the fabric has found that looking pays off now: other tasks of this thread wait meanwhile.
    fn look(&self, _is_there: &dyn Fn() -> bool) {}

    /// Looks a little for work, on behalf of a task that awaits something of the peer's, and does what it finds; whether
    /// there was any. Does nothing unless the fabric has found that looking pays off now, and waits for no lock that is
    /// held for long.
    fn help(&self) -> bool {
        false
    }

    /// Begins the orderly end: outstanding operations end, the peer's further accesses are refused. When that
    /// is done, and nothing of the peer can touch local memory any more, the fabric calls
    /// [`QueuePairCore::mark_drained`](crate::QueuePairCore::mark_drained). Called once; also after a failure.
    fn start_close(&self);

    /// If the operation was submitted and cannot be posted yet, it fails with
    /// [`FabricError::Busy`](crate::FabricError::Busy), and is never posted. For callers that have another way.
    fn withdraw(&self, _key: SlotKey) {}

    /// The queue pair's counters, for a link whose operations are counted elsewhere. `counted` is what the core has counted.
    fn stats(&self, counted: QueuePairStats) -> QueuePairStats {
        counted
    }

    /// Lets threads go that the peer holds inside a call of this link, if it has a way to do that. Never blocks.
    fn free_threads(&self) {}
}
