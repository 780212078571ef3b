//! Two processes of a world with memory and a connection between them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{
    Access, Arrival, ConnectParams, Domain, Fabric, QueuePair, QueuePairConfig, RegisteredPool, RemoteRange,
    RemoteRegion, Role,
};
use tensorwire_memory::{Buf, GrantEnd, Granted, Pool, PoolConfig};
use tensorwire_rendezvous::{Worker, WorkerBuilder};
use tensorwire_sim::{Handle, Node};

/// One process: a domain, a pool to send from and a pool to receive into.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) handle: Handle,
    pub(crate) node: Node,
    pub(crate) domain: Arc<dyn Domain>,
    pub(crate) source: Pool,
    pub(crate) receive: Pool,
    registered: RegisteredPool,
}

/// Memory granted to the peer.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) granted: Granted,
    pub(crate) range: RemoteRange,
    pub(crate) region: RemoteRegion,
}

impl Lent {
    /// The content, after it has arrived.
    pub(crate) fn take(self) -> Buf {
        self.granted.end(GrantEnd::Content).unwrap().freeze()
    }
}

impl Side {
    pub(crate) fn new(handle: &Handle, address: &str) -> Arc<Self> {
        let node = handle.start_node(address).unwrap();
        let domain = node.fabric().open_domain().unwrap();
        let config =
            |name| PoolConfig { block_bytes: 64 << 10, cap_bytes: 256 << 10, ..PoolConfig::new(name) };
        let source = node.pool(config("source")).unwrap();
        let receive = node.pool(config("receive")).unwrap();
        RegisteredPool::new(source.clone(), &domain, Access::LOCAL).unwrap();
        let access = Access { remote_read: true, ..Access::RECEIVE };
        let registered = RegisteredPool::new(receive.clone(), &domain, access).unwrap();
        Arc::new(Self { handle: handle.clone(), node, domain, source, receive, registered })
    }

    /// Registers the blocks of a further pool of this process, for local use.
    pub(crate) fn register(&self, pool: &Pool) {
        RegisteredPool::new(pool.clone(), &self.domain, Access::LOCAL).unwrap();
    }

    /// A frozen buffer with the content of `transfer`.
    pub(crate) async fn filled(&self, length: usize, transfer: u64) -> Buf {
        let mut buffer = self.source.alloc(length).await.unwrap();
        self.handle.pattern().fill(transfer, &mut buffer);
        buffer.freeze()
    }

    /// Grants a buffer without clearing it.
    pub(crate) async fn lend(&self, length: usize) -> Lent {
        let granted = self.receive.alloc(length).await.unwrap().grant();
        let region = self.registered.region(granted.block().unwrap().id()).unwrap();
        let range = RemoteRange {
            region: region.region,
            generation: region.generation,
            offset: granted.offset() as u64,
            length: length as u64,
        };
        Lent { granted, range, region }
    }

    /// Grants a buffer and announces it to `writer`.
    pub(crate) async fn lend_to(&self, writer: &QueuePair, length: usize) -> Lent {
        let lent = self.lend(length).await;
        writer.add_remote_region(lent.region);
        lent
    }
}

/// Connects two sides.
pub(crate) async fn connect(left: &Side, right: &Side, depths: QueuePairConfig) -> (QueuePair, QueuePair) {
    let (dialer, acceptor) = (left.domain.prepare(depths).unwrap(), right.domain.prepare(depths).unwrap());
    let limit = Duration::from_secs(10);
    let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit };
    let dial = params(acceptor.connection_data(), Role::Dialer);
    let accept = params(dialer.connection_data(), Role::Acceptor);
    let (dialed, accepted) = join(dialer.connect(dial), acceptor.connect(accept)).await;
    let [dialed, accepted] = [(left, dialed), (right, accepted)]
        .map(|(side, connected)| connected.unwrap().spawn(&*side.node.runtime()));
    (dialed, accepted)
}

/// Two connected processes, left writing to right.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) left: Arc<Side>,
    pub(crate) right: Arc<Side>,
    pub(crate) to_right: QueuePair,
    pub(crate) to_left: QueuePair,
}

pub(crate) async fn pair(handle: &Handle, depths: QueuePairConfig) -> Pair {
    let (left, right) = (Side::new(handle, "left:1"), Side::new(handle, "right:1"));
    let (to_right, to_left) = connect(&left, &right, depths).await;
    Pair { left, right, to_right, to_left }
}

/// The value and length of an arrival.
pub(crate) fn immediate(arrival: Arrival) -> (u32, u64) {
    match arrival {
        Arrival::Immediate { immediate, length } => (immediate.0, length),
        other => panic!("not an immediate: {other:?}"),
    }
}

/// A worker in the process `node`, on the world's runtime, fabric and control plane, with 8 MiB to send from and 8 MiB to
/// receive into.
pub(crate) fn builder(node: &Node, name: &str) -> WorkerBuilder {
    within(node, Worker::builder(name)).memory(|memory| {
        memory.source_bytes = 8 << 20;
        memory.receive_bytes = 8 << 20;
        memory.block_bytes = 64 << 10;
    })
}

/// Puts a worker into the process `node`.
pub(crate) fn within(node: &Node, worker: WorkerBuilder) -> WorkerBuilder {
    let worker = worker.runtime(node.runtime()).observer(node.observer());
    worker.local_fabrics(vec![node.fabric()]).dangerous_control_plane(node.control_plane())
}
