//! The blocks of a domain: registered while the device is open, and remembered while it is lost.

use std::{
    collections::BTreeMap,
    fmt, mem,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak},
};

use tensorwire_memory::{Block, BlockId};

use tensorwire_fabric::{
    Access, FabricError, FabricKind, LossCause, RegionGeneration, RegionId, RemoteRegion,
};

use super::{
    ProtectionDomain, VerbsError,
    adapter::Adapter,
    error::loss,
    opened::{Child, Opened},
    paging::UserPages,
    region::MemoryRegion,
};

/// The blocks of a domain. When a lost device is opened again, its blocks are registered again, with the same numbers
/// and other keys.
pub(super) struct Registrations {
    /// Asked for the cause when a request has failed.
    adapter: Arc<Adapter>,
    generation: RegionGeneration,
    inner: RwLock<Memory>,
}

/// The fields are in the order in which they are dropped: memory is deregistered before it is unmapped.
#[derive(Default)]
struct Memory {
    /// `None` while the device is lost.
    live: Option<Live>,
    blocks: BTreeMap<BlockId, RegisteredBlock>,
    /// The number of the next region. Numbers are never reused.
    next_region: u32,
    /// Counts the devices that the blocks were registered with.
    epoch: u64,
}

/// The registrations with the open device.
struct Live {
    /// Regions, which are dropped before their protection domain. Looked up for every request.
    memory: BTreeMap<BlockId, MemoryRegion>,
    protection: Arc<ProtectionDomain>,
    opened: Weak<Opened>,
    user_pages: UserPages,
}

struct RegisteredBlock {
    block: Block,
    access: Access,
    region: RegionId,
}

impl fmt::Debug for Registrations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrations").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl Live {
    fn register(&mut self, registered: &RegisteredBlock) -> Result<(), VerbsError> {
        let RegisteredBlock { block, access, .. } = registered;
        let pages = if block.shareable() { UserPages::Pinned } else { self.user_pages };
        let memory = pages.register(|on_demand| {
            let protection = self.protection.clone();
            // SAFETY: peers can write only blocks that are registered for that. `memory` forms no slice of a range while
            // it is granted (`Granted`).
            unsafe { MemoryRegion::register(protection, block, *access, on_demand) }
        })?;
        self.memory.insert(block.id(), memory);
        Ok(())
    }
}

impl Memory {
    /// The data that a peer needs about a block. While the device is lost the key is 0; then no connection exists that
    /// could announce it.
    fn announce(&self, registered: &RegisteredBlock, generation: RegionGeneration) -> RemoteRegion {
        let memory = self.live.as_ref().and_then(|live| live.memory.get(&registered.block.id()));
        RemoteRegion {
            region: registered.region,
            generation,
            base: registered.block.base().as_ptr() as u64,
            length: registered.block.length() as u64,
            key: memory.map_or(0, |memory| memory.remote_key()),
        }
    }
}

impl Registrations {
    pub(super) fn new(adapter: Arc<Adapter>, generation: RegionGeneration) -> Self {
        Self { adapter, generation, inner: RwLock::default() }
    }

    /// The protection domain on `opened`. If there is none yet, makes it and registers all blocks.
    pub(super) fn on(self: &Arc<Self>, opened: &Arc<Opened>) -> Result<Arc<ProtectionDomain>, VerbsError> {
        let mut inner = self.write();
        if let Some(live) = inner.live.as_ref().filter(|live| live.opened.as_ptr() == Arc::as_ptr(opened)) {
            return Ok(live.protection.clone());
        }
        let protection = ProtectionDomain::new(opened.context.clone())?;
        let (memory, weak) = (BTreeMap::new(), Arc::downgrade(opened));
        let user_pages = opened.user_pages;
        let mut live = Live { memory, protection: protection.clone(), opened: weak, user_pages };
        inner.blocks.values().try_for_each(|registered| live.register(registered))?;
        let before = inner.live.replace(live);
        inner.epoch += 1;
        drop(inner);
        drop(before);
        let me: Weak<Self> = Arc::downgrade(self);
        if let Err(lost) = opened.adopt(me) {
            self.let_go();
            return Err(lost);
        }
        Ok(protection)
    }

    pub(super) fn epoch(&self) -> u64 {
        self.read().epoch
    }

    /// The error of a connection whose request failed with `cause`. If the port is down, requests may fail before there
    /// is an event, or without one, so the device is asked.
    pub(super) fn explain(&self, cause: FabricError) -> FabricError {
        match cause {
            FabricError::PeerLost { cause: LossCause::DeviceLost, kind, detail } => {
                let adapter = &self.adapter;
                let detail = match adapter.ask() {
                    Some(lost) => lost.to_string(),
                    None => format!("RDMA device {}, port {}: {detail}", adapter.device, adapter.port.number),
                };
                FabricError::PeerLost { cause: LossCause::DeviceLost, kind, detail }
            }
            FabricError::PeerLost { cause: LossCause::RetryExceeded, .. } => {
                self.adapter.ask().map_or(cause, |lost| loss(&lost))
            }
            other => other,
        }
    }

    /// The key of `block` in a work request of this domain.
    pub(super) fn local_key(&self, block: &Block) -> Result<u32, FabricError> {
        let inner = self.read();
        let registered = inner.live.as_ref().and_then(|live| live.memory.get(&block.id()));
        let missing = FabricError::NotRegistered { kind: FabricKind::VERBS, block: block.id().get() };
        registered.map(|memory| memory.local_key()).ok_or(missing)
    }

    /// Registers `block`. While the device is lost, the block is only recorded, because other fabrics need the memory.
    pub(super) fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, VerbsError> {
        let mut inner = self.write();
        if let Some(registered) = inner.blocks.get(&block.id()) {
            return Ok(inner.announce(registered, self.generation));
        }
        let registered =
            RegisteredBlock { block: block.clone(), access, region: RegionId(inner.next_region) };
        if let Some(live) = &mut inner.live {
            live.register(&registered)?;
        }
        inner.next_region = inner.next_region.wrapping_add(1);
        let announced = inner.announce(&registered, self.generation);
        inner.blocks.insert(block.id(), registered);
        Ok(announced)
    }

    pub(super) fn deregister(&self, block: BlockId) {
        let (memory, registered) = {
            let mut inner = self.write();
            let memory = inner.live.as_mut().and_then(|live| live.memory.remove(&block));
            (memory, inner.blocks.remove(&block))
        };
        // Dropped without the lock, because deregistering can take long. The memory is unmapped after that.
        drop(memory);
        drop(registered);
    }

    /// Deregisters everything.
    fn let_go(&self) {
        let live = mem::take(&mut self.write().live);
        drop(live);
    }

    fn read(&self) -> RwLockReadGuard<'_, Memory> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Memory> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Child for Registrations {
    fn device_lost(&self, _failure: &FabricError) {
        self.let_go();
    }
}
