//! The memory pools of a worker.

use std::sync::Arc;

use tensorwire_memory::{HugePages, MemoryError, MemoryObserver, Pool, PoolConfig, UserMemory};

/// Maximum sizes of a worker's pools, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolCaps {
    pub(crate) source_bytes: u64,
    pub(crate) receive_bytes: u64,
    pub(crate) ring_bytes: u64,
    pub(crate) message_bytes: u64,
    /// Of each bounce pool.
    pub(crate) bounce_bytes: u64,
    /// Size of the blocks in which memory is allocated.
    pub(crate) block_bytes: usize,
    /// For values. Messages and rings have blocks that are smaller than a huge page.
    pub(crate) huge_pages: HugePages,
}

/// The pools of a worker. Sources and destinations have separate maximums, so that unsent values do not starve
/// receives.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    /// For published and sent values; no remote access.
    pub(crate) source: Pool,
    /// For received values; remote write under [`Trust::Cluster`](crate::Trust::Cluster).
    pub(crate) receive: Pool,
    /// For message rings under [`Trust::Cluster`](crate::Trust::Cluster); remote write.
    pub(crate) ring: Pool,
    /// For encoded messages that are being sent; no remote access.
    pub(crate) message: Pool,
    /// Memory that users have joined or given away.
    pub(crate) user: UserMemory,
    caps: PoolCaps,
    observer: Option<Arc<dyn MemoryObserver>>,
}

/// Block size of the pools for messages and their rings. A new worker's first connection waits for such a block, of which
/// the system makes some 2 GB in a second.
const SMALL_BLOCK_BYTES: usize = 256 << 10;

/// Block size of a ring pool for one connection.
const RING_BLOCK_BYTES: usize = 64 << 10;

/// Block size of a bounce pool.
const BOUNCE_BLOCK_BYTES: usize = 1 << 20;

impl Pools {
    pub(crate) fn new(
        caps: PoolCaps,
        observer: Option<&Arc<dyn MemoryObserver>>,
    ) -> Result<Self, MemoryError> {
        let values = |name, cap_bytes| {
            let huge_pages = caps.huge_pages;
            let config = PoolConfig { huge_pages, ..config(name, cap_bytes, caps.block_bytes, observer) };
            Pool::new(config)
        };
        let pool = |name, cap_bytes, block_bytes| new_pool(name, cap_bytes, block_bytes, observer);
        let small = caps.block_bytes.min(SMALL_BLOCK_BYTES);
        Ok(Self {
            source: values("source", caps.source_bytes)?,
            receive: values("receive", caps.receive_bytes)?,
            ring: pool("ring", caps.ring_bytes, small)?,
            message: pool("message", caps.message_bytes, small)?,
            user: UserMemory::observed(observer.cloned()),
            caps,
            observer: observer.cloned(),
        })
    }

    /// The pools that all connections share, with their names.
    pub(crate) fn named(&self) -> [(&'static str, &Pool); 4] {
        [
            ("source", &self.source),
            ("receive", &self.receive),
            ("ring", &self.ring),
            ("message", &self.message),
        ]
    }

    /// A pool for the rings of one connection.
    pub(crate) fn own_ring(&self) -> Result<Pool, MemoryError> {
        let block = self.caps.block_bytes.min(RING_BLOCK_BYTES);
        new_pool("own ring", self.caps.ring_bytes, block, self.observer.as_ref())
    }

    /// A bounce pool for one connection.
    pub(crate) fn bounce(&self) -> Result<Pool, MemoryError> {
        let block = self.caps.block_bytes.min(BOUNCE_BLOCK_BYTES);
        new_pool("bounce", self.caps.bounce_bytes, block, self.observer.as_ref())
    }
}

fn new_pool(
    name: &'static str,
    cap_bytes: u64,
    block_bytes: usize,
    observer: Option<&Arc<dyn MemoryObserver>>,
) -> Result<Pool, MemoryError> {
    Pool::new(config(name, cap_bytes, block_bytes, observer))
}

fn config(
    name: &'static str,
    cap_bytes: u64,
    block_bytes: usize,
    observer: Option<&Arc<dyn MemoryObserver>>,
) -> PoolConfig {
    PoolConfig { cap_bytes, block_bytes, observer: observer.cloned(), ..PoolConfig::new(name) }
}
