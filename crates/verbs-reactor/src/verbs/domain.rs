//! Protection domains: registered blocks, and queue pairs that may use them.

use std::{
    collections::HashMap,
    fmt,
    future::poll_fn,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering},
    },
};

use memory::{Block, BlockId};

use crate::{
    Access, BoxFuture, ConnectParams, ConnectionData, Domain, FabricError, FabricKind, Prepared, QueuePair,
    QueuePairConfig, QueuePairCore, RegionGeneration, RegionId, RemoteRegion, Role, timeout,
};

use super::{
    Endpoint, ProtectionDomain, VerbsError,
    completion::CompletionQueue,
    driver::Driver,
    endpoint::sequence,
    error::fabric_error,
    fabric::{CAPABILITIES, Shared},
    link::VerbsLink,
    message::SIGNALS,
    queue_pair::RawQueuePair,
    region::MemoryRegion,
    send::SendSide,
    tag::SLOTS_MAX,
};

/// A protection domain of the device.
#[derive(Debug)]
pub(super) struct VerbsDomain {
    registrations: Arc<Registrations>,
}

/// What the domain and its queue pairs share.
#[derive(Debug)]
pub(super) struct Registrations {
    shared: Arc<Shared>,
    protection: Arc<ProtectionDomain>,
    generation: RegionGeneration,
    regions: RwLock<HashMap<BlockId, Registered>>,
    /// Numbers are never used again.
    next_region: AtomicU32,
}

/// In this order: the device lets go of the memory before it is unmapped.
#[derive(Debug)]
struct Registered {
    memory: MemoryRegion,
    block: Block,
    region: RegionId,
}

impl VerbsDomain {
    pub(super) fn new(shared: Arc<Shared>) -> Result<Self, VerbsError> {
        let protection = ProtectionDomain::new(shared.context.clone())?;
        let generation = RegionGeneration(sequence(shared.runtime.random()));
        let (regions, next_region) = (RwLock::default(), AtomicU32::new(0));
        let registrations = Registrations { shared, protection, generation, regions, next_region };
        Ok(Self { registrations: Arc::new(registrations) })
    }
}

impl Registrations {
    /// Names `block` in a work request of this domain.
    pub(super) fn local_key(&self, block: &Block) -> Result<u32, FabricError> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let registered = regions.get(&block.id());
        let missing = FabricError::NotRegistered { kind: FabricKind::Verbs, block: block.id().get() };
        registered.map(|registered| registered.memory.local_key()).ok_or(missing)
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, VerbsError> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(registered) = regions.get(&block.id()) {
            return Ok(self.announce(registered));
        }
        let protection = self.protection.clone();
        // SAFETY: `Registered` keeps the block mapped for longer than its registration. Peers can write only
        // blocks registered for that, of which nobody here forms a slice while it is granted (`Granted`).
        let memory =
            unsafe { MemoryRegion::register(protection, block.base(), block.length(), access.remote_write) }?;
        let region = RegionId(self.next_region.fetch_add(1, Ordering::Relaxed));
        let registered = Registered { memory, block: block.clone(), region };
        let announced = self.announce(&registered);
        regions.insert(block.id(), registered);
        Ok(announced)
    }

    fn deregister(&self, block: BlockId) {
        let gone = self.regions.write().unwrap_or_else(PoisonError::into_inner).remove(&block);
        // Without the lock: the device is told, which can take long.
        drop(gone);
    }

    fn announce(&self, registered: &Registered) -> RemoteRegion {
        RemoteRegion {
            region: registered.region,
            generation: self.generation,
            base: registered.block.base().as_ptr() as u64,
            length: registered.block.length() as u64,
            key: registered.memory.remote_key(),
        }
    }

    /// Whether the device has room for a queue pair of these depths.
    fn check(&self, config: QueuePairConfig) -> Result<(), FabricError> {
        let limits = &self.shared.limits;
        let (send, receive) = entries(config);
        let refused = |what: &str, wanted: u32, limit: u32| {
            let detail = format!(
                "{config:?} needs {what} of {wanted} entries, and the limit of RDMA device {} is {limit}: use \
                 smaller depths",
                self.shared.context.name()
            );
            Err(FabricError::device(FabricKind::Verbs, "making a queue pair", std::io::Error::other(detail)))
        };
        if send > limits.work_requests.min(SLOTS_MAX) {
            return refused("a send queue", send, limits.work_requests);
        }
        if receive > limits.work_requests {
            return refused("a receive queue", receive, limits.work_requests);
        }
        match send.saturating_add(receive) {
            both if both > limits.completions => refused("a completion queue", both, limits.completions),
            _ => Ok(()),
        }
    }

    fn prepare(self: &Arc<Self>, config: QueuePairConfig) -> Result<VerbsPrepared, VerbsError> {
        let shared = &self.shared;
        let (send, receive) = entries(config);
        let completions =
            CompletionQueue::new(shared.context.clone(), send + receive, shared.counters.clone())?;
        let counters = shared.counters.clone();
        let queue_pair =
            RawQueuePair::new(self.protection.clone(), completions.clone(), send, receive, counters)?;
        queue_pair.initialize(shared.port.number)?;
        queue_pair.post_receives(receive as usize).map_err(|refused| refused.error)?;
        let here = Endpoint {
            link: shared.port.link,
            mtu: shared.port.mtu,
            local_identifier: shared.port.local_identifier,
            number: queue_pair.number(),
            sequence: sequence(shared.runtime.random()),
            piece_bytes: shared.piece_bytes(),
            gid: shared.source.gid,
            reads: shared.reads_served(),
        };
        Ok(VerbsPrepared { queue_pair, completions, registrations: self.clone(), config, here })
    }
}

/// Entries of the send and the receive queue: one for each operation, and for each signal. An immediate may take
/// three receives, its own and those of the two messages which say how long its write was.
fn entries(config: QueuePairConfig) -> (u32, u32) {
    let receives = config.receive_depth.saturating_mul(3);
    (config.send_depth.saturating_add(SIGNALS), receives.saturating_add(SIGNALS))
}

impl Domain for VerbsDomain {
    fn kind(&self) -> FabricKind {
        FabricKind::Verbs
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        self.registrations.register(block, access).map_err(|error| fabric_error(&error))
    }

    fn deregister(&self, block: BlockId) {
        self.registrations.deregister(block);
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        self.registrations.check(config)?;
        let prepared = self.registrations.prepare(config).map_err(|error| fabric_error(&error))?;
        Ok(Box::new(prepared))
    }
}

/// A queue pair with its receives posted, not connected yet.
struct VerbsPrepared {
    queue_pair: RawQueuePair,
    completions: Arc<CompletionQueue>,
    registrations: Arc<Registrations>,
    config: QueuePairConfig,
    here: Endpoint,
}

impl fmt::Debug for VerbsPrepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsPrepared").field("queue_pair", &self.queue_pair).finish_non_exhaustive()
    }
}

impl VerbsPrepared {
    /// Moves the queue pair to where it sends and receives.
    fn attach(&self, peer: &ConnectionData) -> Result<Endpoint, FabricError> {
        let kind = FabricKind::Verbs;
        let shared = &self.registrations.shared;
        let peer = Endpoint::decode(peer).map_err(|detail| FabricError::Connect {
            kind,
            step: "reading the peer's connection data",
            detail,
        })?;
        if peer.link != self.here.link {
            let detail = format!("the peer's port is {:?}, ours is {:?}", peer.link, self.here.link);
            return Err(FabricError::Connect { kind, step: "comparing the two ports", detail });
        }
        let port = shared.port.number;
        let result = self.queue_pair.connect(&self.here, shared.source.index, port, &peer, &shared.timing);
        result.map(|()| peer).map_err(|error| FabricError::Connect {
            kind,
            step: "finding the way to the peer",
            detail: format!("{error}; is {} reachable from {}?", peer.gid, self.here.gid),
        })
    }

    fn into_link(self, peer: &Endpoint) -> (Arc<QueuePairCore>, Arc<VerbsLink>) {
        let core = Arc::new(QueuePairCore::new(FabricKind::Verbs, self.config, CAPABILITIES));
        let (send, (_, receive)) = (self.config.send_depth, entries(self.config));
        let send = SendSide::new(self.queue_pair, receive as usize, send as usize, self.here.piece_bytes);
        let link = VerbsLink::new(core.clone(), self.registrations, self.completions, send, peer.piece_bytes);
        (core, Arc::new(link))
    }
}

impl Prepared for VerbsPrepared {
    fn connection_data(&self) -> ConnectionData {
        self.here.encode()
    }

    /// The dialer greets, which needs the acceptor's `connect` to have begun within the device's retry time (see
    /// [`Timing`](super::Timing)); the acceptor waits for the greeting.
    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<QueuePair, FabricError>> {
        Box::pin(async move {
            let peer = self.attach(&params.peer)?;
            let shared = self.registrations.shared.clone();
            let runtime = shared.runtime.clone();
            let (core, link) = self.into_link(&peer);
            let driver = Driver::new(link.clone(), runtime.clone(), shared.spinner.clone())?;
            runtime.spawn("verbs connection", Box::pin(driver.run()));
            // From here on dropping this value ends the connection.
            let queue_pair = QueuePair::new(core, link.clone());
            if params.role == Role::Dialer {
                link.greet();
            }
            let established = poll_fn(|context| link.poll_established(context));
            match timeout(&*runtime, params.limit, established).await {
                Ok(result) => result.map(|()| queue_pair).map_err(|failure| FabricError::Connect {
                    kind: FabricKind::Verbs,
                    step: "greeting the peer",
                    detail: failure.to_string(),
                }),
                Err(_) => Err(FabricError::ConnectTimeout {
                    kind: FabricKind::Verbs,
                    limit_ms: u64::try_from(params.limit.as_millis()).unwrap_or(u64::MAX),
                }),
            }
        })
    }
}
