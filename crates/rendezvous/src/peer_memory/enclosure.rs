//! Protection domains: which memory of a worker a peer may write.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tensorwire_fabric::{
    Access, Domain, Fabric, FabricError, FabricKind, Prepared, QueuePairConfig, RemoteRegion,
};
use tensorwire_memory::{Block, BlockId, BlockVisitor, Granted, MemoryError, Pool, VisitError};
use tensorwire_protocol::Destination;
use tensorwire_testpoints::sync::Mutex;

use crate::{
    error::WorkerError,
    peer_memory::{pools::Pools, trust::Trust},
};

/// One fabric of this worker.
#[derive(Debug)]
pub(crate) struct LocalFabric {
    pub(crate) kind: FabricKind,
    pub(crate) reach: Vec<u8>,
    enclosures: Enclosures,
}

#[derive(Debug)]
enum Enclosures {
    /// One domain for all connections.
    Shared(Arc<Enclosure>),
    /// A new domain for each connection.
    PerConnection { fabric: Arc<dyn Fabric>, pools: Pools },
}

impl LocalFabric {
    /// Opens the shared domain, or checks that a domain for a connection can be opened.
    pub(crate) fn open(fabric: &Arc<dyn Fabric>, pools: &Pools, trust: Trust) -> Result<Self, WorkerError> {
        let kind = fabric.kind();
        let enclosures = match trust {
            Trust::Cluster => Enclosures::Shared(Enclosure::shared(&**fabric, pools)?),
            Trust::Hostile if kind == FabricKind::SHM => {
                let what = "be used under Trust::Hostile: another process could read whole blocks of memory; use tcp \
                            or verbs";
                return Err(FabricError::Unsupported { kind, what }.into());
            }
            Trust::Hostile => {
                Enclosure::own(&**fabric, pools)?.end();
                Enclosures::PerConnection { fabric: fabric.clone(), pools: pools.clone() }
            }
        };
        Ok(Self { kind, reach: fabric.reach(), enclosures })
    }

    /// The domain of a new connection.
    pub(crate) fn enclosure(&self) -> Result<Arc<Enclosure>, WorkerError> {
        match &self.enclosures {
            Enclosures::Shared(enclosure) => Ok(enclosure.clone()),
            Enclosures::PerConnection { fabric, pools } => Enclosure::own(&**fabric, pools),
        }
    }
}

/// A protection domain, with every block that its queue pairs send from or that peers write. Other memory of the worker
/// is out of the peers' reach.
#[derive(Debug)]
pub(crate) struct Enclosure {
    kind: FabricKind,
    pub(crate) regions: Arc<Regions>,
    /// The pool of message rings.
    pub(crate) ring: Pool,
    domain: Arc<dyn Domain>,
    /// The domain's epoch when the regions were read.
    epoch: Mutex<u64>,
    /// The pool that bouncing content is written into; the inner `None` after the connection has ended. `None` if the
    /// peer writes directly into the receive pool.
    bounce: Option<Mutex<Option<Pool>>>,
    /// The visitors to remove when the connection ends. Empty for a shared domain.
    registered: Mutex<Vec<Registering>>,
    pools: Pools,
}

/// A visitor that registers blocks with the domain.
#[derive(Debug)]
enum Registering {
    Pool(Pool, Arc<dyn BlockVisitor>),
    /// For the memory that users have joined.
    Users(Arc<dyn BlockVisitor>),
}

impl Enclosure {
    /// A domain that all peers share, in which content does not bounce.
    fn shared(fabric: &dyn Fabric, pools: &Pools) -> Result<Arc<Self>, WorkerError> {
        Self::open(fabric, pools, &pools.ring, None)
    }

    /// A domain of one peer, which can write its own ring and its bounce pool.
    fn own(fabric: &dyn Fabric, pools: &Pools) -> Result<Arc<Self>, WorkerError> {
        Self::open(fabric, pools, &pools.own_ring()?, Some(pools.bounce()?))
    }

    fn open(
        fabric: &dyn Fabric,
        pools: &Pools,
        ring: &Pool,
        bounce: Option<Pool>,
    ) -> Result<Arc<Self>, WorkerError> {
        let domain = fabric.open_domain()?;
        let (regions, epoch) = (Arc::default(), Mutex::new(domain.epoch()));
        let content = bounce.clone();
        let enclosure = Self {
            kind: fabric.kind(),
            regions,
            ring: ring.clone(),
            domain,
            epoch,
            bounce: bounce.map(|pool| Mutex::new(Some(pool))),
            registered: Mutex::default(),
            pools: pools.clone(),
        };
        // If a registration fails, dropping the enclosure removes the earlier ones.
        enclosure.register(&pools.source, Access::LOCAL)?;
        enclosure.register(&pools.message, Access::LOCAL)?;
        enclosure.register_users()?;
        enclosure.register(ring, Access::RING)?;
        match content {
            None => enclosure.register(&pools.receive, Access::RECEIVE)?,
            Some(bounce) => {
                enclosure.register(&bounce, Access::RECEIVE)?;
                // So that received values can be sent without a copy.
                enclosure.register(&pools.receive, Access::LOCAL)?;
            }
        }
        if !enclosure.is_bouncing() {
            // A shared domain lives as long as everything that uses it, and its drop deregisters everything at once.
            lock(&enclosure.registered).clear();
        }
        Ok(Arc::new(enclosure))
    }

    fn visitor(&self, access: Access) -> Arc<dyn BlockVisitor> {
        Arc::new(RegisterBlocks { domain: self.domain.clone(), access, regions: self.regions.clone() })
    }

    fn register(&self, pool: &Pool, access: Access) -> Result<(), MemoryError> {
        let visitor = self.visitor(access);
        pool.add_visitor(visitor.clone())?;
        lock(&self.registered).push(Registering::Pool(pool.clone(), visitor));
        Ok(())
    }

    fn register_users(&self) -> Result<(), MemoryError> {
        let given = if self.is_bouncing() { Access::LOCAL } else { Access::RECEIVE };
        let visitor = self.visitor(given);
        self.pools.user.add_visitor(visitor.clone())?;
        lock(&self.registered).push(Registering::Users(visitor));
        Ok(())
    }

    /// Prepares the local side of a connection. If this reopened the domain's device, the regions have new keys, and
    /// are read again.
    pub(crate) fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let prepared = self.domain.prepare(config)?;
        let mut epoch = lock(&self.epoch);
        let now = self.domain.epoch();
        if *epoch != now {
            self.regions.read_again(&*self.domain)?;
            *epoch = now;
        }
        Ok(prepared)
    }

    /// Grants memory of the ring pool for messages of the peer.
    pub(crate) fn lend_ring(&self, bytes: u32) -> Result<(Granted, Destination), WorkerError> {
        let granted = self.ring.try_alloc(bytes as usize)?.grant();
        let destination = self.regions.destination(&granted).ok_or(FabricError::NotRegistered {
            kind: self.kind,
            block: granted.block().map_or(0, |block| block.id().get()),
        })?;
        Ok((granted, destination))
    }

    /// Whether content bounces: the peer writes it into a separate pool, and it is copied out before it is used.
    pub(crate) fn is_bouncing(&self) -> bool {
        self.bounce.is_some()
    }

    /// The bounce pool; `None` if content does not bounce, or the connection has ended.
    pub(crate) fn bounce(&self) -> Option<Pool> {
        self.bounce.as_ref().and_then(|bounce| lock(bounce).clone())
    }

    /// Deregisters all memory. Called once the connection has ended and its queue pair is drained. Does nothing for an enclosure
    /// that all connections share.
    pub(crate) fn end(&self) {
        let Some(bounce) = &self.bounce else { return };
        let registered = std::mem::take(&mut *lock(&self.registered));
        self.let_go(registered);
        drop(lock(bounce).take());
    }

    fn let_go(&self, registered: Vec<Registering>) {
        for registering in registered {
            match registering {
                Registering::Pool(pool, visitor) => pool.remove_visitor(&visitor),
                Registering::Users(visitor) => self.pools.user.remove_visitor(&visitor),
            }
        }
    }
}

/// Deregisters what [`end`](Enclosure::end) did not, if `open` failed or the connection was never set up.
impl Drop for Enclosure {
    fn drop(&mut self) {
        let registered = std::mem::take(&mut *lock(&self.registered));
        self.let_go(registered);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The blocks that are registered with one domain.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    by_block: Mutex<BTreeMap<BlockId, Registered>>,
    /// The numbers of the blocks in `by_block` that were looked up last; 0 for none. Changed under the lock of `by_block`. Numbers of
    /// blocks are not reused.
    latest: [AtomicU64; LATEST],
}

/// Blocks whose presence is known without the lock.
const LATEST: usize = 8;

#[derive(Debug)]
struct Registered {
    block: Block,
    access: Access,
    region: RemoteRegion,
}

impl Registered {
    /// The region, if peers may write it.
    fn exported(&self) -> Option<RemoteRegion> {
        self.access.remote_write.then_some(self.region)
    }
}

impl Regions {
    /// The region of a block, if peers may write it.
    pub(crate) fn get(&self, block: BlockId) -> Option<RemoteRegion> {
        self.lock().get(&block).and_then(Registered::exported)
    }

    /// Whether the domain can send from the block.
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        let latest = self.latest_like(block);
        if latest.is_some_and(|latest| latest.load(Ordering::Acquire) == block.get()) {
            return true;
        }
        let known = self.lock();
        let is_known = known.contains_key(&block);
        if let (true, Some(latest)) = (is_known, latest) {
            latest.store(block.get(), Ordering::Release);
        }
        is_known
    }

    fn remove(&self, block: BlockId) {
        let known = {
            let mut known = self.lock();
            if let Some(latest) = self.latest_like(block) {
                latest.store(0, Ordering::Release);
            }
            known.remove(&block)
        };
        drop(known);
    }

    /// The entry that has the number of `block` if it was looked up last.
    fn latest_like(&self, block: BlockId) -> Option<&AtomicU64> {
        self.latest.get(block.get() as usize % LATEST)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<BlockId, Registered>> {
        lock(&self.by_block)
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

    /// The regions of pools that peers may write, oldest block first. There may be many of users' memory, and most peers never use one:
    /// those are announced when they are needed.
    pub(crate) fn of_pools(&self) -> Vec<RemoteRegion> {
        let known = self.lock();
        let of_pools = known.values().filter(|known| known.block.shareable());
        of_pools.filter_map(Registered::exported).collect()
    }

    /// Reads the regions of all blocks from `domain` again, after their keys have changed.
    fn read_again(&self, domain: &dyn Domain) -> Result<(), FabricError> {
        let blocks: Vec<_> = self.lock().values().map(|known| (known.block.clone(), known.access)).collect();
        for (block, access) in blocks {
            let region = domain.register(&block, access)?;
            let is_known = self.lock().get_mut(&block.id()).map(|known| known.region = region).is_some();
            if !is_known {
                // The pool has released the block in the meantime.
                domain.deregister(block.id());
            }
        }
        Ok(())
    }
}

/// Registers every block of one pool, or of users, with one domain.
#[derive(Debug)]
struct RegisterBlocks {
    domain: Arc<dyn Domain>,
    /// Of blocks that this process may write. Peers have no rights on others.
    access: Access,
    regions: Arc<Regions>,
}

impl BlockVisitor for RegisterBlocks {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        let access = if block.is_writable() { self.access } else { Access::LOCAL };
        let region = self.domain.register(block, access).map_err(|error| VisitError(Arc::new(error)))?;
        let known = Registered { block: block.clone(), access, region };
        self.regions.lock().insert(block.id(), known);
        Ok(())
    }

    fn block_removed(&self, block: &Block) {
        self.regions.remove(block.id());
        self.domain.deregister(block.id());
    }
}
