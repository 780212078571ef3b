//! A real side of a connection, whose peer is the bare pages and socket of a hostile process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use tensorwire_fabric::{
    Access, Capabilities, FabricKind, LatestRegions, Look, QueuePair, QueuePairConfig, QueuePairCore,
    RegionTable, RemoteRange, Runtime, TokioRuntime,
};
use tensorwire_memory::{BufMut, Granted, Pool, PoolConfig};
use tokio::io::Interest;

use crate::{
    catalogue::{NeighbourCatalogue, OwnCatalogue},
    connection::Connection,
    doorbell::Ringer,
    frame::{Address, Frame},
    import::ImportedBlocks,
    lease::{LeaseCaps, Processes},
    link::ShmLink,
    ring::{Descriptor, OwnPage, PeerPage},
    sys,
};

/// Leases that the attacker may hold.
pub(super) const LEASES: u32 = 4;
/// The limits of the attacker's leases.
const LEASE_CAPS: LeaseCaps = LeaseCaps { leases: LEASES, bytes: 1 << 20 };
/// Bytes of the attacker's memory that the victim maps.
pub(super) const IMPORTED_BYTES_MAX: u64 = 64 << 20;
const CAPABILITIES: Capabilities = {
    let mut capabilities = Capabilities::WRITES;
    capabilities.read = true;
    capabilities.lend = true;
    capabilities
};
const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 8, receive_depth: 8 };

/// A real side of a connection, the victim, and the bare pages and socket of a hostile process, the attacker. No task
/// runs: the test decides when the victim makes progress.
pub(super) struct Rig {
    pub(super) victim: QueuePair,
    pub(super) link: Arc<ShmLink>,
    pub(super) regions: Arc<RegionTable>,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) pool: Pool,
    /// The page that the attacker writes.
    pub(super) page: OwnPage,
    /// The victim's page, as the attacker sees it.
    pub(super) sees: PeerPage,
    pub(super) socket: OwnedFd,
    /// The bell that the victim rings.
    #[cfg_attr(fuzzing, allow(dead_code))] // its holder needs it, and tests count the rings
    pub(super) bell: OwnedFd,
    /// The attacker's next position.
    pub(super) tail: u64,
}

impl Rig {
    pub(super) fn new() -> Self {
        Self::with_slots(DEPTHS.send_depth)
    }

    /// A rig in which the victim's ring has `slots` slots.
    pub(super) fn with_slots(slots: u32) -> Self {
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
        let regions = Arc::new(RegionTable::new(runtime.as_ref()));
        let (own, own_fd) = OwnPage::new(slots).unwrap();
        let (page, page_fd) = OwnPage::new(DEPTHS.send_depth).unwrap();
        let name = Address::random(runtime.as_ref()).socket_name();
        let listener = sys::listen(&name, 1).unwrap();
        let socket = sys::connect(&name).unwrap();
        let accepted = sys::accept(listener.as_fd()).unwrap();
        let bell = sys::eventfd().unwrap();
        let own_slots = own.slots();
        let core = Arc::new(QueuePairCore::new(FabricKind::SHM, DEPTHS, CAPABILITIES));
        let peer = Arc::new(PeerPage::import(page_fd.as_fd(), page.slots()).unwrap());
        let (blocks, catalogue) = (Arc::<ImportedBlocks>::default(), OwnCatalogue::new(LEASE_CAPS).unwrap());
        let peer_catalogue =
            NeighbourCatalogue::import(catalogue.fd(), peer.clone(), blocks.clone()).unwrap();
        let link = Arc::new(ShmLink::new(Connection {
            core: core.clone(),
            regions: regions.clone(),
            own: Arc::new(own),
            peer,
            ringer: Arc::new(Ringer::import(bell.try_clone().unwrap()).unwrap()),
            process: sys::peer_process(socket.as_fd())
                .map(|(id, fd)| Processes::new(LEASE_CAPS).join(id, fd)),
            socket: sys::watch(accepted, Interest::READABLE | Interest::WRITABLE).unwrap(),
            peer_receive_depth: 5,
            imported_bytes_max: IMPORTED_BYTES_MAX,
            blocks,
            catalogue: Arc::new(OwnCatalogue::new(LEASE_CAPS).unwrap()),
            peer_catalogue: Arc::new(peer_catalogue),
            latest: LatestRegions::default(),
        }));
        let sees = PeerPage::import(own_fd.as_fd(), own_slots).unwrap();
        let pool = Pool::new(PoolConfig { block_bytes: 1 << 20, ..PoolConfig::new("victim") }).unwrap();
        let victim = QueuePair::new(core, link.clone());
        Self { victim, link, regions, runtime, pool, page, sees, socket, bell, tail: 0 }
    }

    /// Memory that the victim grants, with the range and key by which the attacker names it.
    pub(super) fn lend(&self, length: usize) -> (Granted, RemoteRange, u32) {
        let mut buffer: BufMut = self.pool.try_alloc(length).unwrap();
        buffer.fill(0);
        let granted = buffer.grant();
        let region = self.regions.register(self.runtime.as_ref(), granted.block().unwrap(), Access::RECEIVE);
        let range = RemoteRange {
            region: region.region,
            generation: region.generation,
            offset: granted.offset() as u64,
            length: length as u64,
        };
        (granted, range, region.key)
    }

    pub(super) fn publish(&mut self, descriptor: &Descriptor) {
        self.page.publish(self.tail, &descriptor.encode());
        self.tail += 1;
    }

    /// Sends a sealed block of `length` bytes under `index`, filled with 7.
    #[cfg_attr(fuzzing, allow(dead_code))] // fuzzed neighbours send to who has hung up, too
    pub(super) fn send_block(&self, index: u32, length: usize) {
        let fd = sealed_block(length);
        let frame = Frame::Block { index, number: index.into(), length: length as u64 }.encode();
        sys::send(self.socket.as_fd(), &frame, &[fd.as_fd()]).unwrap();
    }

    /// Lets the victim work until it is idle, within bounds.
    pub(super) fn settle(&self) -> Look {
        for _ in 0..1000 {
            match self.link.turn_or_be_woken() {
                Look::Idle | Look::InVain => return Look::Idle,
                Look::Over => return Look::Over,
                Look::Worked | Look::More | Look::Busy => {}
            }
        }
        panic!("the victim found work a thousand times");
    }
}

/// A block that follows the contract, filled with 7.
pub(super) fn sealed_block(length: usize) -> OwnedFd {
    let fd = memfd_of_sevens(length);
    sys::seal(fd.as_fd()).unwrap();
    fd
}

pub(super) fn memfd_of_sevens(length: usize) -> OwnedFd {
    use std::io::Write;
    let fd = sys::memfd(c"test-block").unwrap();
    sys::allocate(fd.as_fd(), length).unwrap();
    let mut file = std::fs::File::from(fd.try_clone().unwrap());
    file.write_all(&vec![7; length]).unwrap();
    fd
}

/// Runs `test` on a runtime, because it registers descriptors, although no task runs.
pub(super) fn on_a_runtime(test: impl FnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _guard = runtime.enter();
    test();
}
