//! What of a worker's memory the peers of one protection domain may write.

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard, PoisonError},
};

use tensorwire_memory::{Block, BlockId, BlockVisitor, Granted, MemoryError, Pool, VisitError};
use tensorwire_protocol::Destination;
use tensorwire_testpoints::sync::Mutex;
use tensorwire_verbs_reactor::{
    Access, Domain, Fabric, FabricError, FabricKind, Prepared, QueuePairConfig, RemoteRegion,
};

use crate::{
    error::WorkerError,
    link::{pools::Pools, trust::Trust},
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
    /// One for all connections.
    Shared(Arc<Enclosure>),
    /// A new one for each.
    PerConnection { fabric: Arc<dyn Fabric>, pools: Pools },
}

impl LocalFabric {
    /// Opens a domain, or sees that one can be opened for each connection.
    pub(crate) fn open(fabric: &Arc<dyn Fabric>, pools: &Pools, trust: Trust) -> Result<Self, WorkerError> {
        let kind = fabric.kind();
        let enclosures = match trust {
            Trust::Cluster => Enclosures::Shared(Enclosure::shared(&**fabric, pools)?),
            Trust::Hostile if kind == FabricKind::SHM => {
                let what = "be used under Trust::Hostile: a neighbour could read whole blocks of memory; use tcp \
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

    /// What the peer of a new connection may write.
    pub(crate) fn enclosure(&self) -> Result<Arc<Enclosure>, WorkerError> {
        match &self.enclosures {
            Enclosures::Shared(enclosure) => Ok(enclosure.clone()),
            Enclosures::PerConnection { fabric, pools } => Enclosure::own(&**fabric, pools),
        }
    }
}

/// A protection domain, with every block that its queue pairs send from or are written into: memory of the same
/// worker that is not in it is out of its peers' reach.
#[derive(Debug)]
pub(crate) struct Enclosure {
    kind: FabricKind,
    pub(crate) regions: Arc<Regions>,
    /// Message rings.
    pub(crate) ring: Pool,
    domain: Arc<dyn Domain>,
    /// The domain's, when its regions were read.
    epoch: Mutex<u64>,
    /// Where content lands that is copied then; else it stays where it lands.
    bounce: Option<Mutex<Option<Pool>>>,
    /// To be let go of when this ends, if it ends before the worker.
    registered: Mutex<Vec<Registering>>,
    pools: Pools,
}

/// Blocks that a domain is handed.
#[derive(Debug)]
enum Registering {
    Pool(Pool, Arc<dyn BlockVisitor>),
    /// Of the worker's users.
    Users(Arc<dyn BlockVisitor>),
}

impl Enclosure {
    /// Of all peers together: content stays where they write it.
    fn shared(fabric: &dyn Fabric, pools: &Pools) -> Result<Arc<Self>, WorkerError> {
        Self::open(fabric, pools, &pools.ring, None)
    }

    /// Of one peer, which can write its own ring and the pool that its content bounces in.
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
        // What was registered before one is refused, its drop lets go of.
        enclosure.register(&pools.source, Access::LOCAL)?;
        enclosure.register(&pools.message, Access::LOCAL)?;
        enclosure.register_users()?;
        enclosure.register(ring, Access::RING)?;
        match content {
            None => enclosure.register(&pools.receive, Access::RECEIVE)?,
            Some(bounce) => {
                enclosure.register(&bounce, Access::RECEIVE)?;
                // Received values can be sent on from where they are.
                enclosure.register(&pools.receive, Access::LOCAL)?;
            }
        }
        if !enclosure.is_bouncing() {
            // It lives as long as anything that uses it: its domain lets go of everything at once.
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
        let visitor = self.visitor(Access::LOCAL);
        self.pools.user.add_visitor(visitor.clone())?;
        lock(&self.registered).push(Registering::Users(visitor));
        Ok(())
    }

    /// One end of a connection. Where the domain's device was opened again for it, what peers must know of the
    /// blocks is read anew.
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

    /// Memory of a ring pool for the peer's messages.
    pub(crate) fn lend_ring(&self, bytes: u32) -> Result<(Granted, Destination), WorkerError> {
        let granted = self.ring.try_alloc(bytes as usize)?.grant();
        let destination = self.regions.destination(&granted).ok_or(FabricError::NotRegistered {
            kind: self.kind,
            block: granted.block().map_or(0, |block| block.id().get()),
        })?;
        Ok((granted, destination))
    }

    /// Whether content bounces, so that nothing of the peer's is handed out of memory that it can write.
    pub(crate) fn is_bouncing(&self) -> bool {
        self.bounce.is_some()
    }

    /// The pool that content lands in to be copied; `None` when it stays where it lands, or the connection is over.
    pub(crate) fn bounce(&self) -> Option<Pool> {
        self.bounce.as_ref().and_then(|bounce| lock(bounce).clone())
    }

    /// The one connection of this enclosure is over, and its queue pair drained: the domain lets go of all memory. An
    /// enclosure of all peers stays.
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

/// Lets go of what [`end`](Enclosure::end) has not: of an enclosure that was not made whole, or whose connection never
/// stood.
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
