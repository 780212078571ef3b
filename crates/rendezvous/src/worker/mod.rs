//! A worker: one process of a cluster, as its users hold it.
//!
//! [`Worker`] itself imports nothing of this folder but the times of operations. What it makes (builders, peers, steps) adds the methods that
//! make it, each in its own module.

pub(crate) mod builder;
pub(crate) mod fetch;
mod gauges;
pub(crate) mod list;
mod metrics;
mod outputs;
pub(crate) mod peer;
pub(crate) mod receive;
pub(crate) mod receive_into;
pub(crate) mod result_form;
mod shutdown;
pub(crate) mod step;

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tensorwire_memory::{Pool, PoolStats, UserMemory};
use tensorwire_protocol::{Counters, DeviceName, Key, Sharing, text::check_name};
use tensorwire_verbs_reactor::{FabricKind, QueuePairStats, timeout};
use tokio::sync::watch;

use self::metrics::{Timed, Times};
use crate::{
    control::name::sought,
    error::WorkerError,
    link::{known_peer::KnownPeer, node::Node},
    values::{
        published::{Version, check_published},
        tensor::Tensor,
    },
};

/// A worker. Cheap to clone; the last clone's drop begins the shutdown without waiting for it.
///
/// ```
/// use tensorwire_rendezvous::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire_rendezvous::WorkerError> {
/// let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// server.publish("bias", Tensor::from_values(server.pool(), &[3], &[0.1f32, 0.2, 0.3])?)?;
///
/// let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// let peer = client.peer_at(server.address()).await?;
/// assert_eq!(peer.fetch("bias").await?.values::<f32>()?, [0.1, 0.2, 0.3]);
/// client.shutdown().await;
/// server.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Worker {
    pub(crate) node: Arc<Node>,
    pub(crate) operations: Arc<Operations>,
}

/// What a worker's own operations share. Its drop, with the last handle on the worker, begins the shutdown.
#[derive(Debug)]
pub(crate) struct Operations {
    node: Arc<Node>,
    pub(crate) defaults: Defaults,
    times: Times,
    /// A shutdown has begun: nothing new is accepted here.
    refusing: AtomicBool,
    /// The shutdown is done.
    closed: watch::Sender<bool>,
}

/// Settings of operations that do not name their own.
#[derive(Debug)]
pub(crate) struct Defaults {
    pub(crate) sharing: Sharing,
    pub(crate) limit: Duration,
    /// How long a shutdown waits for transfers under way.
    pub(crate) grace: Duration,
}

impl Drop for Operations {
    fn drop(&mut self) {
        self.node.closing.send_replace(true);
    }
}

/// What is known of a peer now.
///
/// ```
/// use tensorwire_rendezvous::Worker;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire_rendezvous::WorkerError> {
/// # let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// client.peer_at(server.address()).await?;
/// for peer in client.peers() {
///     println!("{} at {:?} over {:?}", peer.name, peer.address, peer.transport);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Its worker name.
    pub name: String,
    /// Its address, if known.
    pub address: Option<String>,
    /// The fabric in use; `None` while not connected.
    pub transport: Option<FabricKind>,
    /// Whether what travels over it is encrypted, by TLS; `None` while not connected. Never over shared memory, which does
    /// not leave the host.
    pub encrypted: Option<bool>,
    /// The fabrics that were considered before it, and why each is not used. Empty when the peer made the connection.
    pub not_used: Vec<String>,
    /// Its incarnation; `None` before the first session.
    pub incarnation: Option<u64>,
    /// The fabric's counters of the present connection.
    pub fabric: QueuePairStats,
    /// The protocol's counters of the present connection.
    pub counters: Counters,
}

impl Worker {
    fn new(node: Arc<Node>, defaults: Defaults) -> Self {
        let (times, refusing, closed) = (Times::new(), AtomicBool::new(false), watch::Sender::new(false));
        let operations = Operations { node: node.clone(), defaults, times, refusing, closed };
        Self { node, operations: Arc::new(operations) }
    }

    /// This worker's name.
    pub fn name(&self) -> &str {
        &self.node.name
    }

    /// Where peers reach it.
    pub fn address(&self) -> &str {
        &self.node.address
    }

    /// Tells this life of the worker from earlier ones.
    pub fn incarnation(&self) -> u64 {
        self.node.incarnation
    }

    /// Memory for values to publish and send. A value in the memory of another pool is copied here each time it is sent to
    /// another worker.
    pub fn pool(&self) -> &Pool {
        &self.node.pools.source
    }

    /// The user's own memory, to publish and send from where it lies: join it, then
    /// [`Tensor::shared`](crate::Tensor::shared). A peer that uses shared memory gets a copy, which is made in
    /// [`pool`](Self::pool) each time.
    pub fn user_memory(&self) -> &UserMemory {
        &self.node.pools.user
    }

    /// Memory that peers may write: what received values lie in. [`Fetch::into_buffer`](crate::Fetch::into_buffer) and
    /// [`Recv::into_buffer`](crate::Recv::into_buffer) fill a buffer of it without a copy. Under [`Trust::Hostile`](crate::Trust::Hostile) no peer can
    /// write it, and any buffer is filled with one copy.
    pub fn receive_pool(&self) -> &Pool {
        &self.node.pools.receive
    }

    /// What the memory for received values holds.
    pub fn receive_memory(&self) -> PoolStats {
        self.node.pools.receive.stats()
    }

    /// Publishes `tensor` under `name`, in place of an earlier one; gives its version. Receivers that are being
    /// served keep the tensor they were promised.
    ///
    /// # Errors
    /// [`WorkerError::Config`] when the name is empty or too long, or has a control character.
    pub fn publish(&self, name: &str, tensor: Tensor) -> Result<Version, WorkerError> {
        check_published(name)?;
        Ok(self.node.values.published.publish(name, tensor.remember_checksums()))
    }

    /// Withdraws a published tensor; false if there was none.
    pub fn withdraw(&self, name: &str) -> bool {
        self.node.values.published.withdraw(name)
    }

    /// The key of `edge` from `source_device` to `destination_device`
    /// (`/job:ps/replica:0/task:0/device:CPU:0`, or a worker's name where its devices need not be told apart). Of a
    /// device of this worker it names this incarnation; of a peer's, the incarnation is filled in when the key is used, so
    /// the key stays valid over restarts.
    ///
    /// # Errors
    /// [`WorkerError::BadKey`].
    pub fn key(&self, source_device: &str, destination_device: &str, edge: &str) -> Result<Key, WorkerError> {
        let bad = |problem| WorkerError::BadKey {
            key: format!("{source_device};{destination_device};{edge}"),
            problem,
        };
        check_name(edge).map_err(bad)?;
        let (source_device, destination_device) = (&*sought(source_device), &*sought(destination_device));
        let own = self.is_own(&parse_device(source_device)?);
        let incarnation = if own { self.node.incarnation } else { 0 };
        let key = Key::builder().source(source_device).incarnation(incarnation);
        let key = key.destination(destination_device).edge(edge).build();
        key.map_err(|error| bad(error.to_string()))
    }

    /// All known peers, sorted by name, with the fabric each uses.
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.node.all_peers().iter().map(info).collect()
    }

    pub(crate) fn is_own(&self, device: &DeviceName) -> bool {
        device.is_same_address_space(&self.node.values.device)
    }

    /// Whether operations of this worker's user are refused.
    pub(crate) fn is_refusing(&self) -> bool {
        self.operations.refusing.load(Ordering::Acquire) || self.node.is_closing()
    }

    /// As [`within`](Self::within); how long the operation took to give its value is recorded.
    pub(crate) async fn timed<T>(
        &self,
        timed: Timed,
        limit: Duration,
        what: impl Fn() -> String,
        operation: Pin<&mut (impl Future<Output = Result<T, WorkerError>> + ?Sized)>,
    ) -> Result<T, WorkerError> {
        let begun = self.node.runtime.now();
        let value = self.within(limit, what, operation).await?;
        self.operations.times.took(timed, self.node.runtime.now().saturating_sub(begun));
        Ok(value)
    }

    /// Takes the operation pinned: a future that is handed on by value is kept at every stage.
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        what: impl Fn() -> String,
        operation: Pin<&mut (impl Future<Output = Result<T, WorkerError>> + ?Sized)>,
    ) -> Result<T, WorkerError> {
        if self.is_refusing() {
            return Err(WorkerError::ShutDown);
        }
        let ended = timeout(&*self.node.runtime, limit, operation).await;
        ended.unwrap_or_else(|_| Err(WorkerError::DeadlineExceeded { what: what(), limit }))
    }
}

fn info(peer: &KnownPeer) -> PeerInfo {
    let connection = peer.connection();
    let live = connection.as_ref().filter(|connection| !connection.is_over());
    let (fabric, counters) = peer.figures();
    PeerInfo {
        name: peer.name().to_owned(),
        address: peer.address(),
        transport: live.map(|connection| connection.kind),
        encrypted: live.map(|connection| connection.is_encrypted()),
        not_used: live.map(|_| peer.not_used()).unwrap_or_default(),
        incarnation: peer.live_session().map(|session| session.peer.incarnation),
        fabric,
        counters,
    }
}

fn parse_device(text: &str) -> Result<DeviceName, WorkerError> {
    let parsed = text.parse::<DeviceName>();
    parsed.map_err(|error| WorkerError::BadKey { key: text.to_owned(), problem: error.to_string() })
}
