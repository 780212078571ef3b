//! The traits a fabric implements.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use tensorwire_memory::{Block, BlockId};

use crate::{
    Access, BoxFuture, Capabilities, FabricError, FabricKind, QueuePair, QueuePairConfig, RemoteRegion,
    Runtime,
};

/// A way to move bytes between processes: opens domains.
pub trait Fabric: Send + Sync + fmt::Debug + 'static {
    /// The fabric's kind.
    fn kind(&self) -> FabricKind;

    /// The fabric's capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Two sides can use this fabric only if their reach is equal. Over shm that is boot id, network namespace and user;
    /// over tcp it is empty.
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

    /// Registers `block`. Registering a block again returns its existing region. The domain keeps the block mapped for as long
    /// as the domain lives.
    ///
    /// # Errors
    /// [`FabricError::Device`] when the device refuses, naming the limit to raise.
    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError>;

    /// Forgets a block that no operation uses and no peer can access any more: withdrawn memory of a user, or any block
    /// once the domain's queue pairs are closed. A domain that cannot forget a block keeps it for as long as the domain
    /// lives.
    fn deregister(&self, _block: BlockId) {}

    /// A number that changes when the device was lost and opened again. From then on blocks have other keys, which
    /// [`register`](Self::register) returns, and all earlier connections are over.
    fn epoch(&self) -> u64 {
        0
    }

    /// Makes one side of a connection, with its receives posted.
    ///
    /// # Errors
    /// [`FabricError::Device`] when the device refuses.
    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError>;
}

/// The data that one side needs about the other to connect: opaque, versioned, carried by the control plane.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionData(pub Vec<u8>);

impl fmt::Debug for ConnectionData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // May hold a one-use token.
        write!(f, "ConnectionData({} bytes)", self.0.len())
    }
}

/// Which side this is. The control plane decides: the side that asked for the connection dials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Opens the stream or socket, where there is one.
    Dialer,
    /// Waits for the dialler's stream or socket.
    Acceptor,
}

/// How to connect a prepared side.
#[derive(Debug, Clone)]
pub struct ConnectParams {
    /// The peer's data.
    pub peer: ConnectionData,
    /// Which side this is.
    pub role: Role,
    /// The address of the control connection, if this side has dialled it. For fabrics that need an address.
    pub peer_address: Option<SocketAddr>,
    /// How long connecting may take.
    pub limit: Duration,
}

/// One side of a connection that is not connected yet. Dropping it releases everything.
pub trait Prepared: Send + fmt::Debug {
    /// The data that the peer needs.
    fn connection_data(&self) -> ConnectionData;

    /// Connects. Both sides must call this, each with the other's data. Nothing runs in the background before the
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
    /// Makes progress when no task awaits an operation. It ends once the connection is over and nothing is left to do for
    /// it. Dropping it earlier ends the connection.
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
