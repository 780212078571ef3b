//! A worker's memory, and the fabrics it is registered with.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use memory::{
    Block, BlockId, BlockVisitor, Granted, MemoryError, MemoryObserver, Pool, PoolConfig, UserMemory,
    VisitError,
};
use protocol::Destination;
use verbs_reactor::{
    Access, Domain, Fabric, FabricError, FabricKind, Prepared, QueuePairConfig, RemoteRegion,
};

use crate::WorkerError;

/// Caps of a worker's pools, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolCaps {
    pub(crate) source_bytes: u64,
    pub(crate) receive_bytes: u64,
    pub(crate) ring_bytes: u64,
    pub(crate) message_bytes: u64,
    /// Size of the blocks in which memory is taken.
    pub(crate) block_bytes: usize,
}

/// The pools of a worker. Sources and destinations have caps of their own, so that unsent values never starve
/// receives.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    /// What is published and sent; no remote access.
    pub(crate) source: Pool,
    /// Where content lands; remote write.
    pub(crate) receive: Pool,
    /// Message rings; remote write.
    pub(crate) ring: Pool,
    /// Encoded messages under way; no remote access.
    pub(crate) message: Pool,
    /// What users have joined; no remote access.
    pub(crate) user: UserMemory,
}

const SMALL_BLOCK_BYTES: usize = 1 << 20;

impl Pools {
    pub(crate) fn new(
        caps: PoolCaps,
        observer: Option<&Arc<dyn MemoryObserver>>,
    ) -> Result<Self, MemoryError> {
        let pool = |name, cap_bytes, block_bytes| {
            let observer = observer.cloned();
            Pool::new(PoolConfig { cap_bytes, block_bytes, observer, ..PoolConfig::new(name) })
        };
        let small = caps.block_bytes.min(SMALL_BLOCK_BYTES);
        Ok(Self {
            source: pool("source", caps.source_bytes, caps.block_bytes)?,
            receive: pool("receive", caps.receive_bytes, caps.block_bytes)?,
            ring: pool("ring", caps.ring_bytes, small)?,
            message: pool("message", caps.message_bytes, small)?,
            user: UserMemory::new(),
        })
    }
}

/// One fabric of this worker, with every pool block registered in its domain.
#[derive(Debug)]
pub(crate) struct LocalFabric {
    pub(crate) kind: FabricKind,
    pub(crate) reach: Vec<u8>,
    pub(crate) domain: Arc<dyn Domain>,
    pub(crate) regions: Arc<Regions>,
    /// The domain's, when its regions were read.
    epoch: Mutex<u64>,
}

impl LocalFabric {
    /// Opens a domain and registers the blocks of `pools` with it, present and future.
    pub(crate) fn open(fabric: &dyn Fabric, pools: &Pools) -> Result<Self, WorkerError> {
        let domain = fabric.open_domain()?;
        let regions = Arc::new(Regions::default());
        let visitor =
            |access| Arc::new(RegisterBlocks { domain: domain.clone(), access, regions: regions.clone() });
        pools.source.add_visitor(visitor(Access::LOCAL))?;
        pools.message.add_visitor(visitor(Access::LOCAL))?;
        pools.user.add_visitor(visitor(Access::LOCAL))?;
        pools.receive.add_visitor(visitor(Access::RECEIVE))?;
        pools.ring.add_visitor(visitor(Access::RING))?;
        let epoch = Mutex::new(domain.epoch());
        Ok(Self { kind: fabric.kind(), reach: fabric.reach(), domain, regions, epoch })
    }

    /// One end of a connection. Where the domain's device was opened again for it, what peers must know of the
    /// blocks is read anew.
    pub(crate) fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let prepared = self.domain.prepare(config)?;
        let mut epoch = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.domain.epoch();
        if *epoch != now {
            self.regions.read_again(&*self.domain)?;
            *epoch = now;
        }
        Ok(prepared)
    }
}

/// The blocks that are registered with one domain.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    by_block: Mutex<BTreeMap<BlockId, Registered>>,
}

#[derive(Debug)]
struct Registered {
    block: Block,
    access: Access,
    region: RemoteRegion,
}

impl Registered {
    /// The region, where peers may write.
    fn exported(&self) -> Option<RemoteRegion> {
        self.access.remote_write.then_some(self.region)
    }
}

impl Regions {
    /// The region of a block that peers may write.
    pub(crate) fn get(&self, block: BlockId) -> Option<RemoteRegion> {
        self.lock().get(&block).and_then(Registered::exported)
    }

    /// Whether the domain can send from the block.
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.lock().contains_key(&block)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<BlockId, Registered>> {
        self.by_block.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a peer may write `granted`, whose block is registered.
    pub(crate) fn destination(&self, granted: &Granted) -> Option<Destination> {
        let region = granted.block().and_then(|block| self.get(block.id()))?;
        Some(Destination {
            region: region.region.0,
            generation: region.generation.0,
            offset: granted.offset() as u64,
            capacity: granted.length() as u64,
            result: None,
        })
    }

    /// All that peers may write, oldest block first.
    pub(crate) fn all(&self) -> Vec<RemoteRegion> {
        self.lock().values().filter_map(Registered::exported).collect()
    }

    /// Asks `domain` for the regions of its blocks, which have other keys than before.
    fn read_again(&self, domain: &dyn Domain) -> Result<(), FabricError> {
        let blocks: Vec<_> = self.lock().values().map(|known| (known.block.clone(), known.access)).collect();
        for (block, access) in blocks {
            let region = domain.register(&block, access)?;
            let is_known = self.lock().get_mut(&block.id()).map(|known| known.region = region).is_some();
            if !is_known {
                // The pool has given it up meanwhile.
                domain.deregister(block.id());
            }
        }
        Ok(())
    }
}

/// Registers every block of one pool with one domain.
#[derive(Debug)]
struct RegisterBlocks {
    domain: Arc<dyn Domain>,
    access: Access,
    regions: Arc<Regions>,
}

impl BlockVisitor for RegisterBlocks {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        let region = self.domain.register(block, self.access).map_err(|error| VisitError(Arc::new(error)))?;
        let known = Registered { block: block.clone(), access: self.access, region };
        self.regions.lock().insert(block.id(), known);
        Ok(())
    }

    fn block_removed(&self, block: &Block) {
        let known = self.regions.lock().remove(&block.id());
        drop(known);
        self.domain.deregister(block.id());
    }
}
