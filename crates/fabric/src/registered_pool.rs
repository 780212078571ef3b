//! [`RegisteredPool`]: a pool for one domain.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
};

use tensorwire_memory::{Block, BlockId, BlockVisitor, MemoryError, Pool, VisitError};
use tensorwire_testpoints::sync::Mutex;

use crate::{Access, Domain, RemoteRegion};

/// A pool whose blocks are registered with one domain, for programs that use a fabric without a worker.
#[derive(Debug)]
pub struct RegisteredPool {
    /// The pool. Its blocks stay registered after this is dropped.
    pub pool: Pool,
    regions: Arc<Regions>,
}

impl RegisteredPool {
    /// Registers all present and future blocks of `pool` with `domain`. Peers have the rights `access`.
    ///
    /// # Errors
    /// A present block of the pool cannot be registered ([`Domain::register`]).
    pub fn new(pool: Pool, domain: &Arc<dyn Domain>, access: Access) -> Result<Self, MemoryError> {
        let regions = Arc::new(Regions { domain: domain.clone(), access, of_blocks: Mutex::default() });
        pool.add_visitor(regions.clone())?;
        Ok(Self { pool, regions })
    }

    /// The region of a block of the pool.
    pub fn region(&self, block: BlockId) -> Option<RemoteRegion> {
        self.regions.of_blocks.lock().unwrap_or_else(PoisonError::into_inner).get(&block).copied()
    }

    /// The regions of all blocks so far.
    pub fn regions(&self) -> Vec<RemoteRegion> {
        self.regions.of_blocks.lock().unwrap_or_else(PoisonError::into_inner).values().copied().collect()
    }
}

/// Registers each block of a pool.
#[derive(Debug)]
struct Regions {
    domain: Arc<dyn Domain>,
    access: Access,
    of_blocks: Mutex<BTreeMap<BlockId, RemoteRegion>>,
}

impl BlockVisitor for Regions {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        let region = self.domain.register(block, self.access).map_err(|error| VisitError(Arc::new(error)))?;
        self.of_blocks.lock().unwrap_or_else(PoisonError::into_inner).insert(block.id(), region);
        Ok(())
    }
}
