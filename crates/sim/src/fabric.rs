//! The simulated fabric: domains, and queue pairs whose every step the world chooses.

use std::{
    fmt,
    future::poll_fn,
    sync::{Arc, atomic::Ordering},
};

use futures::{
    channel::oneshot,
    future::{Either, select},
};
use tensorwire_fabric::{
    Access, BoxFuture, Capabilities, ConnectParams, Connected, ConnectionData, Domain, Fabric, FabricError,
    FabricKind, Prepared, QueuePairConfig, QueuePairCore, RegionTable, RemoteRegion, Runtime,
};
use tensorwire_memory::Block;

use crate::{
    SimRuntime,
    fault::Call,
    ids::{EndpointId, NodeId},
    shared::Shared,
    state::DomainShared,
    steps::cannot_connect,
};

/// The fabric of one node.
#[derive(Debug, Clone)]
pub struct SimFabric {
    shared: Arc<Shared>,
    node: NodeId,
    kind: FabricKind,
    /// It reaches only fabrics of the same host.
    host: usize,
}

impl SimFabric {
    pub(crate) fn new(shared: Arc<Shared>, node: NodeId, kind: FabricKind, host: usize) -> Self {
        Self { shared, node, kind, host }
    }
}

impl Fabric for SimFabric {
    fn kind(&self) -> FabricKind {
        self.kind
    }

    fn capabilities(&self) -> Capabilities {
        self.shared.capabilities()
    }

    fn reach(&self) -> Vec<u8> {
        [self.shared.seed, self.host as u64].map(u64::to_le_bytes).concat()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        let runtime = SimRuntime::new(self.shared.clone(), self.node);
        let table = RegionTable::new(&runtime);
        let domain = Arc::new(DomainShared::new(self.kind, table));
        self.shared.note_domain(self.node, &domain);
        Ok(Arc::new(SimDomain { runtime, shared: self.shared.clone(), node: self.node, domain }))
    }
}

impl Shared {
    /// The capabilities of the simulated fabric, as the knobs set them.
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::WRITES;
        capabilities.vectored = self.swarm.vectored;
        capabilities.read = true;
        capabilities.lend = !self.is_network.load(Ordering::Relaxed);
        capabilities.piece_bytes_max = self.swarm.piece_bytes_max;
        capabilities
    }
}

struct SimDomain {
    runtime: SimRuntime,
    shared: Arc<Shared>,
    node: NodeId,
    domain: Arc<DomainShared>,
}

impl fmt::Debug for SimDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDomain").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Domain for SimDomain {
    fn kind(&self) -> FabricKind {
        self.domain.kind
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        self.shared.attempt(self.node, Call::Register)?;
        let region = self.domain.table.register(&self.runtime, block, access);
        self.domain.note(region.region, block.id(), access.purpose);
        Ok(region)
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        self.shared.attempt(self.node, Call::Prepare)?;
        self.shared.find_device(self.node, self.domain.kind)?;
        let core = Arc::new(QueuePairCore::new(self.domain.kind, config, self.shared.capabilities()));
        let token = self.runtime.random();
        let endpoint = self.shared.add_endpoint(self.node, self.domain.clone(), core.clone(), token);
        let end = UnconnectedEnd { shared: self.shared.clone(), endpoint, armed: true };
        Ok(Box::new(SimPrepared { end, core, token, runtime: self.runtime.clone() }))
    }
}

/// Gives a side up unless it was connected.
#[derive(Debug)]
struct UnconnectedEnd {
    shared: Arc<Shared>,
    endpoint: EndpointId,
    armed: bool,
}

impl UnconnectedEnd {
    fn was_connected(mut self) {
        self.armed = false;
    }
}

impl Drop for UnconnectedEnd {
    fn drop(&mut self) {
        if self.armed {
            self.shared.abandon(self.endpoint);
        }
    }
}

#[derive(Debug)]
struct SimPrepared {
    end: UnconnectedEnd,
    core: Arc<QueuePairCore>,
    token: u64,
    runtime: SimRuntime,
}

/// First byte of connection data.
const DATA_VERSION: u8 = 1;

/// Connection data: version, endpoint, token.
fn encode(endpoint: EndpointId, token: u64) -> ConnectionData {
    let mut bytes = vec![DATA_VERSION];
    bytes.extend_from_slice(&endpoint.0.to_le_bytes());
    bytes.extend_from_slice(&token.to_le_bytes());
    ConnectionData(bytes)
}

fn decode(data: &ConnectionData) -> Option<(EndpointId, u64)> {
    let (version, rest) = data.0.split_first()?;
    let (endpoint, token) = rest.split_first_chunk::<4>()?;
    let token = token.try_into().ok()?;
    let known = *version == DATA_VERSION;
    known.then_some((EndpointId(u32::from_le_bytes(*endpoint)), u64::from_le_bytes(token)))
}

impl Prepared for SimPrepared {
    fn connection_data(&self) -> ConnectionData {
        encode(self.end.endpoint, self.token)
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        let Self { end, core, runtime, .. } = *self;
        Box::pin(async move {
            let data = decode(&params.peer);
            let (peer, token) = data.ok_or_else(|| cannot_connect("reading the peer's data", "malformed"))?;
            let (sender, receiver) = oneshot::channel();
            end.shared.meet(end.endpoint, peer, token, params.role, sender)?;
            let answer = match select(receiver, runtime.sleep(params.limit)).await {
                Either::Left((answer, _)) => answer.map_err(|_| FabricError::Closed),
                Either::Right(((), _)) => {
                    let limit_ms = u64::try_from(params.limit.as_millis()).unwrap_or(u64::MAX);
                    Err(FabricError::ConnectTimeout { kind: FabricKind::SIM, limit_ms })
                }
            };
            // From here on the queue pair, if there is one, releases the side.
            let queue_pair = answer??;
            end.was_connected();
            // The world drives.
            let driver = Box::pin(poll_fn(move |context| core.poll_drained(context)));
            Ok(Connected { queue_pair, driver })
        })
    }
}
