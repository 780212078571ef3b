//! The fabric's objects: fabric, domain, prepared end.

use std::{
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    sync::{Arc, OnceLock},
};

use tensorwire_fabric::{
    Access, BoxFuture, Capabilities, ConnectParams, Connected, ConnectionData, Domain, Driver, Fabric,
    FabricError, FabricKind, LatestRegions, Patience, Prepared, QueuePair, QueuePairConfig, QueuePairCore,
    RegionTable, RemoteRegion, Runtime, Spinner, Wait,
};
use tensorwire_memory::{Block, BlockId, check_own_user_is_certain};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    catalogue::{Claims, OwnCatalogue},
    connection::Connection,
    driver::ShmDriven,
    frame::Address,
    handshake::{self, Imported, Offer},
    import::ImportError,
    lease::{LeaseCaps, PeerProcess, Processes},
    limits::{DEPTH_MAX, LEASES_PER_PROCESS, QUIET_MIN, READS_MAX},
    link::ShmLink,
    ring::{OwnPage, PeerPage},
    sys,
};

const KIND: FabricKind = FabricKind::SHM;

/// The largest piece of a logical write. The same as on verbs, so that both split a write alike.
const PIECE_BYTES_MAX: u64 = 1 << 30;

const CAPABILITIES: Capabilities = {
    let mut capabilities = Capabilities::WRITES;
    capabilities.vectored = true;
    capabilities.read = true;
    capabilities.lend = true;
    capabilities.piece_bytes_max = PIECE_BYTES_MAX;
    capabilities
};

/// The default limits of one process's views.
const LEASE_CAPS: LeaseCaps = LeaseCaps { leases: LEASES_PER_PROCESS, bytes: u64::MAX };

/// Candidates that may wait to be accepted. One is expected.
const BACKLOG: i32 = 8;

/// Shared memory between processes of one host, one network namespace and one user.
#[derive(Debug)]
pub struct ShmFabric {
    runtime: Arc<dyn Runtime>,
    reach: Vec<u8>,
    capabilities: Capabilities,
    spinner: Arc<Spinner>,
    processes: Arc<Processes>,
    imported_bytes_max: u64,
}

impl ShmFabric {
    /// Checks that the kernel can do what this fabric needs. `runtime` runs the drivers of its connections; it
    /// and the runtime that connections are awaited on must be tokio with IO enabled.
    ///
    /// # Errors
    /// [`FabricError::Device`] when sealed memfds or pre-faulted mappings can't be had (Linux before 5.14), when
    /// the host's identity can't be read, or when this process's user cannot be told from others in its user namespace.
    pub fn new(runtime: Arc<dyn Runtime>) -> Result<Self, FabricError> {
        let reach = reach().map_err(device("reading the host's identity"))?;
        probe()?;
        Ok(Self {
            runtime,
            reach,
            capabilities: CAPABILITIES,
            spinner: Spinner::new(Wait::default()),
            processes: Arc::new(Processes::new(LEASE_CAPS)),
            imported_bytes_max: sys::host_bytes(),
        })
    }

    /// Splits logical writes into pieces of at most `bytes` bytes (at least 1; default 1 GiB). Each piece takes
    /// one entry of the send queue.
    #[must_use]
    pub fn with_piece_bytes(mut self, bytes: u64) -> Self {
        self.capabilities.piece_bytes_max = bytes.max(1);
        self
    }

    /// How many views of this process's memory another process may hold, through all its connections together, ended
    /// ones included (default 4096, also the most per connection). One more fails with
    /// [`FabricError::LeasesExhausted`].
    #[must_use]
    pub fn with_lease_cap(mut self, cap: u32) -> Self {
        self.processes = Arc::new(Processes::new(LeaseCaps { leases: cap, ..self.processes.caps() }));
        self
    }

    /// How many bytes those views may have together (default: any number). A view that would exceed them fails with
    /// [`FabricError::LeasedBytesExhausted`], so that a process that holds views forever pins no more than that of this
    /// process's memory.
    #[must_use]
    pub fn with_lease_bytes_cap(mut self, cap: u64) -> Self {
        self.processes = Arc::new(Processes::new(LeaseCaps { bytes: cap, ..self.processes.caps() }));
        self
    }

    /// How many bytes of its memory a peer may share over one connection (default: what the host has, with swap). A peer
    /// that shares more loses the connection ([`FabricError::ImportedBytesExhausted`]). Reading shared memory costs this
    /// process page tables: a 512th of what is read, with small pages.
    #[must_use]
    pub fn with_imported_bytes_cap(mut self, cap: u64) -> Self {
        self.imported_bytes_max = cap;
        self
    }

    /// Shares memory only with fabrics of the same name, as if the others were on other hosts (default: no name). Tests
    /// and benchmarks use it to simulate several hosts on one. Call it once.
    #[must_use]
    pub fn with_host(mut self, name: &str) -> Self {
        self.reach.extend_from_slice(format!(":host {name}").as_bytes());
        self
    }

    /// How drivers wait. At most one driver of this fabric spins at a time; clones of connections share theirs.
    #[must_use]
    pub fn with_wait(mut self, wait: Wait) -> Self {
        self.spinner = Spinner::new(wait);
        self
    }
}

fn device(call: &'static str) -> impl FnOnce(io::Error) -> FabricError {
    move |error| FabricError::device(KIND, call, error)
}

/// Tries the parts of a connection: this process shares a page set with itself.
fn probe() -> Result<(), FabricError> {
    use std::os::fd::AsFd;
    let (own, fd) =
        OwnPage::new(1).map_err(device("making a sealed memfd with resident pages (Linux 5.14 or newer)"))?;
    match PeerPage::import(fd.as_fd(), own.slots()) {
        Ok(_) => Ok(()),
        Err(ImportError::System(error)) => Err(device("mapping a sealed memfd")(error)),
        Err(ImportError::Refused(violation)) => Err(device("sealing a memfd")(io::Error::other(violation))),
    }
}

/// What two sides must have in common: the running kernel, the network namespace (of abstract socket names), the user,
/// and the user namespace (of the user's number).
fn reach() -> io::Result<Vec<u8>> {
    check_own_user_is_certain().map_err(io::Error::other)?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let net = std::fs::metadata("/proc/self/ns/net")?;
    let user = std::fs::metadata("/proc/self/ns/user")?;
    let (boot, uid) = (boot.trim(), rustix::process::geteuid().as_raw());
    let reach = format!("shm:{boot}:net{}.{}:user{}.{uid}", net.dev(), net.ino(), user.ino());
    Ok(reach.into_bytes())
}

impl Fabric for ShmFabric {
    fn kind(&self) -> FabricKind {
        KIND
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reach(&self) -> Vec<u8> {
        self.reach.clone()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        let regions = Arc::new(RegionTable::new(self.runtime.as_ref()));
        let domain = ShmDomain {
            runtime: self.runtime.clone(),
            regions,
            capabilities: self.capabilities,
            spinner: self.spinner.clone(),
            processes: self.processes.clone(),
            imported_bytes_max: self.imported_bytes_max,
            catalogue: Arc::default(),
        };
        Ok(Arc::new(domain))
    }
}

/// The parts of the fabric and of its regions that connections need. Each connection has a copy.
#[derive(Debug, Clone)]
struct ShmDomain {
    runtime: Arc<dyn Runtime>,
    regions: Arc<RegionTable>,
    capabilities: Capabilities,
    spinner: Arc<Spinner>,
    processes: Arc<Processes>,
    imported_bytes_max: u64,
    /// Made for the first connection.
    catalogue: Arc<OnceLock<Arc<OwnCatalogue>>>,
}

impl ShmDomain {
    fn catalogue(&self) -> Result<Arc<OwnCatalogue>, FabricError> {
        if let Some(catalogue) = self.catalogue.get() {
            return Ok(catalogue.clone());
        }
        let made = Arc::new(OwnCatalogue::new(self.processes.caps()).map_err(device("making a catalogue"))?);
        // If two are made at the same time, one is used.
        Ok(self.catalogue.get_or_init(|| made).clone())
    }
}

impl Domain for ShmDomain {
    fn kind(&self) -> FabricKind {
        KIND
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        // A peer can read only what it can map, and users' memory cannot be mapped: that right is dropped.
        let access = Access { remote_read: access.remote_read && block.shareable(), ..access };
        Ok(self.regions.register(self.runtime.as_ref(), block, access))
    }

    fn deregister(&self, block: BlockId) {
        self.regions.deregister(block);
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        if config.send_depth == 0 || config.send_depth > DEPTH_MAX || config.receive_depth == 0 {
            let what =
                "make this queue pair: the send depth must be 1 to 65536, the receive depth at least 1";
            return Err(FabricError::Unsupported { kind: KIND, what });
        }
        let address = Address::random(self.runtime.as_ref());
        let listener = sys::listen(&address.socket_name(), BACKLOG).map_err(device("listen"))?;
        let (page, page_fd) =
            OwnPage::new(config.send_depth + READS_MAX + QUIET_MIN).map_err(device("memfd_create"))?;
        let bell = sys::eventfd().map_err(device("eventfd"))?;
        let catalogue = self.catalogue()?;
        let offer = Offer { address, config, listener, page, page_fd, bell, catalogue };
        Ok(Box::new(ShmPrepared { domain: self.clone(), offer }))
    }
}

/// A prepared side, which listens already.
#[derive(Debug)]
struct ShmPrepared {
    domain: ShmDomain,
    offer: Offer,
}

impl Prepared for ShmPrepared {
    fn connection_data(&self) -> ConnectionData {
        self.offer.address.encode()
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        Box::pin(self.establish(params))
    }
}

impl ShmPrepared {
    async fn establish(self: Box<Self>, params: ConnectParams) -> Result<Connected, FabricError> {
        let refused = |step, error: &io::Error| FabricError::refused(KIND, step, error, error.to_string());
        if let Err(error) = tokio::runtime::Handle::try_current() {
            let detail = format!("{error}: await this on a tokio runtime");
            return Err(FabricError::Connect { kind: KIND, step: "finding the reactor", detail });
        }
        let Self { domain, offer } = *self;
        let ShmDomain { runtime, regions, capabilities, spinner, processes, imported_bytes_max, .. } = domain;
        let accepted = handshake::establish(&runtime, &offer, &params).await?;
        let Imported { page, ringer, blocks, catalogue } = accepted.shared;
        let bell = sys::watch(offer.bell, Interest::READABLE)
            .map_err(|error| refused("registering the doorbell", &error))?;
        let process = accepted.process.map(|(id, pidfd)| processes.join(id, pidfd));
        let death = watch_death(process.as_deref())
            .map_err(|error| refused("watching the peer's process", &error))?;
        let core = Arc::new(QueuePairCore::new(KIND, offer.config, capabilities));
        let (own, ringer) = (Arc::new(offer.page), Arc::new(ringer));
        let catalogue = catalogue.with_claims(Claims::new(own.clone(), page.clone(), ringer.clone()));
        let link = Arc::new(ShmLink::new(Connection {
            core: core.clone(),
            regions,
            own,
            peer: page,
            ringer,
            socket: accepted.socket,
            process,
            peer_receive_depth: accepted.receive_depth,
            imported_bytes_max,
            blocks,
            catalogue: offer.catalogue,
            peer_catalogue: Arc::new(catalogue),
            latest: LatestRegions::default(),
        }));
        let patience = Patience::new(spinner, runtime.clone());
        let driver = Box::pin(Driver::new(ShmDriven::new(link.clone(), bell, death), patience));
        Ok(Connected { queue_pair: QueuePair::new(core, link), driver })
    }
}

/// A descriptor of its own for each connection, because a reactor registers a descriptor only once.
fn watch_death(process: Option<&PeerProcess>) -> io::Result<Option<AsyncFd<OwnedFd>>> {
    let pidfd = process.map(|process| process.pidfd().try_clone()).transpose()?;
    pidfd.map(|pidfd| sys::watch(pidfd, Interest::READABLE)).transpose()
}
