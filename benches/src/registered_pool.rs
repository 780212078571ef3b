//! A pool for one fabric alone, for writes between two queue pairs.

use std::sync::{Arc, Mutex, PoisonError};

use tensorwire_fabric::{Access, Domain, RemoteRegion};
use tensorwire_memory::{Block, BlockVisitor, MemoryError, Pool, PoolConfig, VisitError};

/// A pool whose blocks are registered with a domain.
#[derive(Debug)]
pub struct RegisteredPool {
    /// The pool.
    pub pool: Pool,
    regions: Arc<Regions>,
}

impl RegisteredPool {
    /// A pool with the settings `config`. Peers have the rights `access`.
    ///
    /// # Errors
    /// The settings are wrong.
    pub fn new(domain: &Arc<dyn Domain>, access: Access, config: PoolConfig) -> Result<Self, MemoryError> {
        let pool = Pool::new(config)?;
        let regions = Arc::new(Regions { domain: domain.clone(), access, last: Mutex::default() });
        pool.add_visitor(regions.clone())?;
        Ok(Self { pool, regions })
    }

    /// The remote region of the newest block.
    pub fn region(&self) -> Option<RemoteRegion> {
        *self.regions.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Registers each block of a pool, and remembers the last.
#[derive(Debug)]
struct Regions {
    domain: Arc<dyn Domain>,
    access: Access,
    last: Mutex<Option<RemoteRegion>>,
}

impl BlockVisitor for Regions {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        let region = self.domain.register(block, self.access).map_err(|error| VisitError(Arc::new(error)))?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(region);
        Ok(())
    }
}
