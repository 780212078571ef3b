//! A fabric that does what another does, while somebody watches.

#![allow(unreachable_pub)] // each test binary compiles this as its own module

use std::{fmt::Debug, sync::Arc};

use tensorwire_fabric::{
    Access, BoxFuture, Capabilities, ConnectParams, Connected, ConnectionData, Domain, Fabric, FabricError,
    FabricKind, Prepared, QueuePair, QueuePairConfig, RemoteRegion,
};
use tensorwire_memory::{Block, BlockId};

/// Is called at each step of a fabric, and may lead peers elsewhere.
pub trait Watcher: Debug + Send + Sync + 'static {
    /// A domain has the block.
    fn registered(&self, _block: BlockId, _access: Access, _region: RemoteRegion) {}

    /// A domain has let go of it.
    fn deregistered(&self, _block: BlockId) {}

    /// The local side of a connection is about to be prepared, unless this fails.
    fn preparing(&self) -> Result<(), FabricError> {
        Ok(())
    }

    /// The connection data that the peer gets and connects by.
    fn connection_data(self: Arc<Self>, data: ConnectionData) -> ConnectionData {
        data
    }

    /// A connection stands.
    fn connected(&self, _queue_pair: &QueuePair) {}
}

/// Wraps a fabric, a domain, or a prepared side that is not connected.
#[derive(Debug)]
pub struct Watched<T, W> {
    inner: T,
    watcher: Arc<W>,
}

/// `fabric`, watched by `watcher`.
pub fn watched<W: Watcher>(fabric: Arc<dyn Fabric>, watcher: &Arc<W>) -> Arc<dyn Fabric> {
    Arc::new(Watched { inner: fabric, watcher: watcher.clone() })
}

impl<W: Watcher> Fabric for Watched<Arc<dyn Fabric>, W> {
    fn kind(&self) -> FabricKind {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn reach(&self) -> Vec<u8> {
        self.inner.reach()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        Ok(Arc::new(Watched { inner: self.inner.open_domain()?, watcher: self.watcher.clone() }))
    }
}

impl<W: Watcher> Domain for Watched<Arc<dyn Domain>, W> {
    fn kind(&self) -> FabricKind {
        self.inner.kind()
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        let region = self.inner.register(block, access)?;
        self.watcher.registered(block.id(), access, region);
        Ok(region)
    }

    fn deregister(&self, block: BlockId) {
        self.inner.deregister(block);
        self.watcher.deregistered(block);
    }

    fn epoch(&self) -> u64 {
        self.inner.epoch()
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        self.watcher.preparing()?;
        Ok(Box::new(Watched { inner: self.inner.prepare(config)?, watcher: self.watcher.clone() }))
    }
}

impl<W: Watcher> Prepared for Watched<Box<dyn Prepared>, W> {
    fn connection_data(&self) -> ConnectionData {
        self.watcher.clone().connection_data(self.inner.connection_data())
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        let Self { inner, watcher } = *self;
        Box::pin(async move {
            let connected = inner.connect(params).await?;
            watcher.connected(&connected.queue_pair);
            Ok(connected)
        })
    }
}
