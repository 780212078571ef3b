//! [`Worker`]: one process of a cluster, as users hold it.
//!
//! `Worker` imports nothing of this folder except the times of operations. Methods that return a builder, a peer or a
//! step are defined in the module of that type.

pub(crate) mod builder;
mod deadline;
pub(crate) mod fetch;
mod gauges;
mod joining;
pub(crate) mod list;
pub(crate) mod metrics;
pub(crate) mod notes;
pub(crate) mod offer;
mod outputs;
pub(crate) mod peer;
pub(crate) mod receive;
pub(crate) mod receive_into;
pub(crate) mod result_form;
mod shutdown;
pub(crate) mod step;
pub(crate) mod store;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tensorwire_fabric::{FabricKind, QueuePairStats, Runtime};
use tensorwire_memory::{Pool, PoolStats, UserMemory};
use tensorwire_protocol::{Counters, DeviceName, Key, Sharing, text::check_name};
use tokio::sync::watch;

use self::metrics::{Timed, Times};
use crate::{
    control::name::sought,
    error::WorkerError,
    session::{known_peer::KnownPeer, node::Node},
    values::{
        duplicates::DuplicatePolicy,
        end_signal::unless,
        published::{Version, check_published},
        tensor::Tensor,
    },
};

/// A worker. Cheap to clone. Dropping the last clone starts the shutdown without waiting for it.
///
/// ```
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
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
#[derive(Clone)]
pub struct Worker {
    pub(crate) node: Arc<Node>,
    pub(crate) operations: Arc<Operations>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("name", &self.name())
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}

/// State shared by all clones of a worker. Dropping it, with the last clone, starts the shutdown.
#[derive(Debug)]
pub(crate) struct Operations {
    node: Arc<Node>,
    pub(crate) defaults: Defaults,
    times: Times,
    /// A shutdown has started: new operations are refused.
    refusing: AtomicBool,
    /// The shutdown is complete.
    closed: watch::Sender<bool>,
}

/// Settings for operations that do not set their own.
#[derive(Debug)]
pub(crate) struct Defaults {
    pub(crate) sharing: Sharing,
    pub(crate) limit: Duration,
    /// Whether peers prove their names, by certificates.
    pub(crate) proves_names: bool,
    /// How long a shutdown waits for transfers under way.
    pub(crate) grace: Duration,
}

impl Drop for Operations {
    fn drop(&mut self) {
        self.node.begin_closing();
    }
}

/// The current state of a peer.
///
/// ```
/// use tensorwire::Worker;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
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
    /// Whether TLS encrypts the connection; `None` while not connected. Shared memory is never encrypted, because it
    /// does not leave the host.
    pub encrypted: Option<bool>,
    /// The fabrics that were tried before it, each with the reason why it is not used. Empty if the peer made the
    /// connection.
    pub not_used: Vec<String>,
    /// Its incarnation; `None` before the first session.
    pub incarnation: Option<u64>,
    /// The fabric's counters for the current connection, or for the last one.
    pub fabric: QueuePairStats,
    /// The protocol's counters for the current connection, or for the last one.
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
        self.node.name()
    }

    /// The address that peers dial, `host:port`.
    pub fn address(&self) -> &str {
        self.node.address()
    }

    /// A random number that changes with each start of the worker.
    pub fn incarnation(&self) -> u64 {
        self.node.incarnation()
    }

    /// The runtime that this worker runs on: its tasks, its time and its random numbers.
    pub fn runtime(&self) -> &Arc<dyn Runtime> {
        self.node.runtime()
    }

    /// The fabrics that this worker offers, in its order of preference, each with its
    /// [reach](tensorwire_fabric::Fabric::reach). Two workers can use a fabric that both offer with the same reach.
    pub fn offered_fabrics(&self) -> Vec<(FabricKind, Vec<u8>)> {
        self.node.fabrics().iter().map(|fabric| (fabric.kind, fabric.reach.clone())).collect()
    }

    /// The meaning of a second send or receive of a key
    /// ([`WorkerBuilder::duplicates`](crate::WorkerBuilder::duplicates)).
    pub fn duplicates(&self) -> DuplicatePolicy {
        self.node.values().steps.duplicates()
    }

    /// How many receives may be outstanding at one peer ([`Flow::requests_max`](crate::Flow::requests_max)). Of the settings of two
    /// workers, the smaller applies.
    pub fn requests_max(&self) -> u32 {
        self.node.requests_max()
    }

    /// The pool for values to publish and send. A value in another pool is copied into this one each time it is sent to
    /// another worker.
    pub fn pool(&self) -> &Pool {
        &self.node.pools().source
    }

    /// Registers your own memory, so that values are published and sent from it without a copy: join it, then make a
    /// tensor with [`Tensor::shared`](crate::Tensor::shared). A peer connected over shared memory gets a copy, made in
    /// [`pool`](Self::pool) for each transfer. Memory that you give away for writing becomes an arena by
    /// [`arena_of`](Self::arena_of).
    pub fn user_memory(&self) -> &UserMemory {
        &self.node.pools().user
    }

    /// The pool for received values, which peers may write. [`Fetch::into_buffer`](crate::Fetch::into_buffer) and
    /// [`Recv::into_buffer`](crate::Recv::into_buffer) fill a buffer of it without a copy. Under
    /// [`Trust::Hostile`](crate::Trust::Hostile) no peer can write it, and every buffer is filled by one copy.
    pub fn receive_pool(&self) -> &Pool {
        &self.node.pools().receive
    }

    /// How much of the pool for received values is in use.
    pub fn receive_memory(&self) -> PoolStats {
        self.node.pools().receive.stats()
    }

    /// Publishes `tensor` under `name`, replaces an earlier one, and returns the version. A fetch whose answer is under
    /// way still gets the earlier tensor.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if the name is empty, too long or contains a control character; [`WorkerError::ShutDown`].
    pub fn publish(&self, name: &str, tensor: Tensor) -> Result<Version, WorkerError> {
        check_published(name)?;
        self.check_runs()?;
        Ok(self.node.values().published.publish(name, tensor.remember_checksums()))
    }

    /// As [`publish`](Self::publish), once every [subscription](crate::Peer::subscribe) that wants
    /// [`Every`](crate::sets::Policy::Every) version has taken the version before: it was taken to be sent. So a subscriber that is slow
    /// slows the publisher down, and misses no version unless its connection breaks or the tensor is [withdrawn](Self::withdraw). A
    /// subscriber whose connection breaks is no longer waited for.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is published if the future is dropped.
    pub async fn publish_in_turn(&self, name: &str, tensor: Tensor) -> Result<Version, WorkerError> {
        check_published(name)?;
        self.check_runs()?;
        let turn = unless(self.node.closing(), self.node.values().published.turn(name)).await;
        let _turn = turn.ok_or(WorkerError::ShutDown)?;
        // The subscribers may be gone because this worker was shut down meanwhile.
        self.publish(name, tensor)
    }

    /// The tensor that is published under `name`.
    #[doc(hidden)]
    pub fn published(&self, name: &str) -> Option<Tensor> {
        self.node.values().published.get(name).map(|edition| edition.tensor)
    }

    /// Publishes the next version of a tensor with `content` in place of its bytes from `at` on, without a copy of the rest. False,
    /// and nothing has changed, if it is not published, anything else has its memory (a clone, a view, an answer under way), or `content`
    /// is longer than 1 MiB: no fetch is answered meanwhile.
    #[doc(hidden)]
    pub fn overwrite(&self, name: &str, at: usize, content: &[u8]) -> bool {
        self.node.values().published.overwrite(name, at, content)
    }

    /// Withdraws a published tensor. Returns false if nothing was published under `name`.
    pub fn withdraw(&self, name: &str) -> bool {
        self.node.values().published.withdraw(name)
    }

    /// The key of `edge` from `source_device` to `destination_device` (`/job:ps/replica:0/task:0/device:CPU:0`, or a
    /// worker's name if its devices need not be distinguished). If the source is a device of this worker, the key names
    /// this incarnation. If it is a peer's, the incarnation is filled in when the key is used, so the key stays valid
    /// when the peer restarts.
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
        let incarnation = if own { self.node.incarnation() } else { 0 };
        let key = Key::builder().source(source_device).incarnation(incarnation);
        let key = key.destination(destination_device).edge(edge).build();
        key.map_err(|error| bad(error.to_string()))
    }

    /// The peers, sorted by name, with the fabric that each uses: connected peers, peers that this worker has dialled,
    /// peers that the user has named (in the cluster, or by an address), and peers with a [`Peer`](crate::Peer). The
    /// list does not contain a peer that dialled this worker and left.
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.node.present_peers().iter().map(info).collect()
    }

    pub(crate) fn is_own(&self, device: &DeviceName) -> bool {
        device.is_same_address_space(&self.node.values().device)
    }

    /// Whether new operations are refused, because a shutdown has started. The node closes only after this was set, or after
    /// the last worker was dropped.
    pub(crate) fn is_refusing(&self) -> bool {
        self.operations.refusing.load(Ordering::Acquire)
    }

    /// # Errors
    /// [`WorkerError::ShutDown`] if new operations are refused.
    pub(crate) fn check_runs(&self) -> Result<(), WorkerError> {
        if self.is_refusing() { Err(WorkerError::ShutDown) } else { Ok(()) }
    }

    /// Runs `operation`, which does not wait. Records its time if it was successful.
    pub(crate) fn timed_at_once<T>(&self, timed: Timed, operation: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.is_refusing() {
            return None;
        }
        let (times, clock) = (&self.operations.times, &**self.node.runtime());
        let begun = times.begin(clock);
        let value = operation()?;
        times.end(timed, begun, clock);
        Some(value)
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
