//! A fabric that does what another does, and remembers who could write what.

#![allow(clippy::unwrap_used)] // test support: a failed step is a failed test

use std::sync::{Arc, Mutex};

use memory::{Block, BlockId};
use verbs_reactor::{
    Access, BoxFuture, Capabilities, ConnectParams, ConnectionData, Domain, Fabric, FabricError, FabricKind,
    Prepared, Purpose, QueuePair, QueuePairConfig, RemoteRegion,
};

#[derive(Debug)]
pub(crate) struct Spy {
    fabric: Arc<dyn Fabric>,
    seen: Arc<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    writable: Mutex<Vec<(Purpose, RemoteRegion)>>,
    queue_pairs: Mutex<Vec<QueuePair>>,
    /// Of all domains together.
    registered: Mutex<Vec<BlockId>>,
}

impl Spy {
    pub(crate) fn new(fabric: Arc<dyn Fabric>) -> Arc<Self> {
        Arc::new(Self { fabric, seen: Arc::default() })
    }

    /// All regions of its domains that peers can write, and that are for `purpose`.
    pub(crate) fn writable(&self, purpose: Purpose) -> Vec<RemoteRegion> {
        let writable = self.seen.writable.lock().unwrap();
        writable.iter().filter(|(found, _)| *found == purpose).map(|(_, region)| *region).collect()
    }

    /// All that were connected.
    pub(crate) fn queue_pairs(&self) -> Vec<QueuePair> {
        self.seen.queue_pairs.lock().unwrap().clone()
    }

    /// Blocks that its domains have, counted in each of them.
    pub(crate) fn registered(&self) -> usize {
        self.seen.registered.lock().unwrap().len()
    }
}

impl Fabric for Spy {
    fn kind(&self) -> FabricKind {
        self.fabric.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.fabric.capabilities()
    }

    fn reach(&self) -> Vec<u8> {
        self.fabric.reach()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        Ok(Arc::new(SpiedDomain { domain: self.fabric.open_domain()?, seen: self.seen.clone() }))
    }
}

#[derive(Debug)]
struct SpiedDomain {
    domain: Arc<dyn Domain>,
    seen: Arc<Seen>,
}

impl Domain for SpiedDomain {
    fn kind(&self) -> FabricKind {
        self.domain.kind()
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        let region = self.domain.register(block, access)?;
        if access.remote_write {
            self.seen.writable.lock().unwrap().push((access.purpose, region));
        }
        self.seen.registered.lock().unwrap().push(block.id());
        Ok(region)
    }

    fn deregister(&self, block: BlockId) {
        self.domain.deregister(block);
        let mut registered = self.seen.registered.lock().unwrap();
        let place = registered.iter().position(|known| *known == block).unwrap();
        registered.remove(place);
    }

    fn epoch(&self) -> u64 {
        self.domain.epoch()
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        Ok(Box::new(SpiedEnd { prepared: self.domain.prepare(config)?, seen: self.seen.clone() }))
    }
}

#[derive(Debug)]
struct SpiedEnd {
    prepared: Box<dyn Prepared>,
    seen: Arc<Seen>,
}

impl Prepared for SpiedEnd {
    fn connection_data(&self) -> ConnectionData {
        self.prepared.connection_data()
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<QueuePair, FabricError>> {
        let Self { prepared, seen } = *self;
        Box::pin(async move {
            let queue_pair = prepared.connect(params).await?;
            seen.queue_pairs.lock().unwrap().push(queue_pair.clone());
            Ok(queue_pair)
        })
    }
}
