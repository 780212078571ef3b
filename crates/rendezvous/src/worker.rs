//! A worker: one process of a cluster.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use memory::{Pool, PoolStats, UserMemory};
use protocol::{Counters, DeviceName, Key, StepId};
use verbs_reactor::{FabricKind, QueuePairStats, timeout};

use crate::{
    ClusterSpec, Peer, Published, Step, Tensor, TfConfig, Version, WorkerBuilder, WorkerError,
    connect::Meant,
    error::{Lost, TransferName},
    fetch::check_name,
    listed::{LIST_BYTES_MAX, ListRefused, ListSoFar},
    node::Node,
    route::Route,
};

/// A worker. Cheap to clone; the last clone's drop begins the shutdown without waiting for it.
///
/// ```
/// use rendezvous::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
/// let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// server.publish("bias", Tensor::from_values(server.pool(), &[3], &[0.1f32, 0.2, 0.3])?)?;
///
/// let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// let peer = client.peer_at(server.address()).await?;
/// assert_eq!(client.fetch(&peer, "bias").await?.values::<f32>()?, [0.1, 0.2, 0.3]);
/// client.shutdown().await;
/// server.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Worker {
    pub(crate) node: Arc<Node>,
    _closer: Arc<Closer>,
}

/// Begins the shutdown when the last handle is gone.
#[derive(Debug)]
struct Closer(Arc<Node>);

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.closing.send_replace(true);
    }
}

/// What is known of a peer now.
///
/// ```
/// use rendezvous::Worker;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
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
    /// Settings for a worker called `name`, for instance `/job:ps/replica:0/task:0`.
    pub fn builder(name: &str) -> WorkerBuilder {
        WorkerBuilder::new(name)
    }

    /// Settings for task `task` of `job` in `cluster`: its name, the cluster, and to listen on the address that the
    /// cluster says.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] when the cluster contradicts itself or has no such task.
    pub fn builder_for_task(
        cluster: ClusterSpec,
        job: &str,
        task: u32,
    ) -> Result<WorkerBuilder, WorkerError> {
        cluster.check()?;
        let address = cluster.task_address(job, task)?.to_owned();
        Ok(WorkerBuilder::new(&ClusterSpec::worker_name(job, task)).bind(address).cluster(cluster))
    }

    /// Settings for the task that the environment variable [`TF_CONFIG`](crate::TF_CONFIG) says this process is.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] when it is not set, describes no cluster or no task, or its cluster contradicts itself.
    pub fn builder_from_tf_config() -> Result<WorkerBuilder, WorkerError> {
        TfConfig::from_environment()?.builder()
    }

    pub(crate) fn new(node: Arc<Node>) -> Self {
        Self { _closer: Arc::new(Closer(node.clone())), node }
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

    /// Memory that peers may write: what received values lie in. [`fetch_into`](Self::fetch_into) and
    /// [`Step::recv_into`] fill a buffer of it without a copy. Under [`Trust::Hostile`](crate::Trust::Hostile) no peer can
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
    /// [`WorkerError::Config`] when the name is empty or too long.
    pub fn publish(&self, name: &str, tensor: Tensor) -> Result<Version, WorkerError> {
        check_name(name)?;
        Ok(self.node.values.published.publish(name, tensor.remember_checksums()))
    }

    /// Withdraws a published tensor; false if there was none.
    pub fn withdraw(&self, name: &str) -> bool {
        self.node.values.published.withdraw(name)
    }

    /// The peer called `name`: of the cluster, or one that has connected. Does not connect.
    ///
    /// # Errors
    /// [`WorkerError::UnknownWorker`].
    pub fn peer(&self, name: &str) -> Result<Peer, WorkerError> {
        self.node.peer_by_name(name)
    }

    /// The peer that listens on `address` (`host:port`). Asks it for its name unless that is known already.
    ///
    /// # Errors
    /// [`WorkerError::Control`] when it cannot be reached or does not share the secret, [`WorkerError::Limit`]
    /// when this process may open no more files.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn peer_at(&self, address: &str) -> Result<Peer, WorkerError> {
        if let Some(peer) = self.node.peer_by_address(address) {
            return Ok(peer);
        }
        Ok(self.node.dial(address, Meant::Host).await.map_err(WorkerError::or_limit)?.1)
    }

    /// The peer called `name`, as soon as it is connected with this worker: for a service whose clients come by
    /// themselves. Does not connect; waits at most for the worker's default timeout.
    ///
    /// # Errors
    /// [`WorkerError::DeadlineExceeded`], [`WorkerError::ShutDown`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn wait_for_peer(&self, name: &str) -> Result<Peer, WorkerError> {
        let met = async {
            loop {
                let mut more = pin!(self.node.met.notified());
                more.as_mut().enable();
                if let Some(peer) = self.node.known_peer(name).filter(|peer| peer.live_session().is_some()) {
                    return Ok(peer);
                }
                more.await;
            }
        };
        self.within(self.node.limit, || format!("waiting for {name} to connect"), pin!(met)).await
    }

    /// Says that the worker `name` listens on `address` (`host:port`): one that is in no cluster, or that has moved. A
    /// connection that stands stays; the next one goes there, or else to where the cluster says.
    ///
    /// A peer that was restarted elsewhere and connects here says itself where it listens.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] for a name or an address that is none, [`WorkerError::Config`] for this worker's own name.
    pub fn set_address(&self, name: &str, address: &str) -> Result<Peer, WorkerError> {
        ClusterSpec::new().worker(name, address).check()?;
        if name == self.node.name {
            let remedy = "that is this worker itself: name a peer".to_owned();
            return Err(WorkerError::Config { field: "name", value: name.to_owned(), remedy });
        }
        self.node.name_peer(name, address)
    }

    /// What `peer` has published, sorted by name.
    ///
    /// # Errors
    /// [`WorkerError::Control`], [`WorkerError::PeerLost`], [`WorkerError::DeadlineExceeded`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn list(&self, peer: &Peer) -> Result<Vec<Published>, WorkerError> {
        self.list_pages(peer, false).await
    }

    /// As [`list`](Self::list), with the XXH3-64 of each tensor's bytes, which the peer computes now.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn list_with_checksums(&self, peer: &Peer) -> Result<Vec<Published>, WorkerError> {
        self.list_pages(peer, true).await
    }

    /// The key of `edge` from `source_device` to `destination_device`
    /// (`/job:ps/replica:0/task:0/device:CPU:0`). Of a device of this worker it names this incarnation; of a
    /// peer's, the incarnation is filled in when the key is used, so the key stays valid over restarts.
    ///
    /// # Errors
    /// [`WorkerError::BadKey`].
    pub fn key(&self, source_device: &str, destination_device: &str, edge: &str) -> Result<Key, WorkerError> {
        let own = self.is_own(&parse_device(source_device)?);
        let incarnation = if own { self.node.incarnation } else { 0 };
        let key = Key::builder().source(source_device).incarnation(incarnation);
        let key = key.destination(destination_device).edge(edge).build();
        key.map_err(|error| WorkerError::BadKey {
            key: format!("{source_device};{destination_device};{edge}"),
            problem: error.to_string(),
        })
    }

    /// The step with this number, which begins here with this call: requests that peers have made for it are served
    /// from now on, in the order in which they came. A step stays as long as a [`Step`] of it or a value in it does, and
    /// a finished one (see [`cleanup`](Self::cleanup)) does not begin again.
    pub fn step(&self, id: i64) -> Step {
        Step::begin(self, StepId(id))
    }

    /// Ends a step: its pending receives get ABORTED, its unreceived values are dropped, and a late request for
    /// it is answered with ABORTED. So is every later use of it here, for 10 minutes or until 65,536 further steps are
    /// finished, whichever comes first.
    pub fn cleanup(&self, step: i64) {
        self.end_step(StepId(step));
    }

    /// Ends every step that is in use or holds values, as [`cleanup`](Self::cleanup) does.
    pub fn cleanup_all(&self) {
        self.node.values.steps.live().into_iter().for_each(|step| self.end_step(step));
    }

    fn end_step(&self, step: StepId) {
        self.node.values.steps.cleanup(step);
        self.node.values.lost.forget(step);
        self.discard(step);
    }

    /// What was received for a step and not handed out goes back.
    pub(crate) fn discard(&self, step: StepId) {
        for connection in self.node.all_peers().iter().filter_map(Peer::connection) {
            connection.discard(step);
        }
    }

    /// All known peers, sorted by name, with the fabric each uses.
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.node.all_peers().iter().map(info).collect()
    }

    pub(crate) fn is_own(&self, device: &DeviceName) -> bool {
        device.is_same_address_space(&self.node.values.device)
    }

    async fn list_pages(&self, peer: &Peer, with_checksums: bool) -> Result<Vec<Published>, WorkerError> {
        let session = self.node.session(peer).await?;
        let transfer =
            || Box::new(TransferName { peer: peer.name().to_owned(), key: "list".to_owned(), step: None });
        let lost = |_| {
            let Lost { loss, detail } = session.lost();
            WorkerError::PeerLost { transfer: transfer(), transport: "control plane", loss, detail }
        };
        let pages = async {
            let mut list = ListSoFar::new(LIST_BYTES_MAX);
            loop {
                let (request, page) = session.ask_list().map_err(lost)?;
                let after = list.last_name();
                let ask =
                    protocol::wire::control::ControlFrame::ListRequest { request, after, with_checksums };
                session.send(ask).await?;
                let page = page.await.map_err(|_| lost(String::new()))?;
                let more = page.more && !page.entries.is_empty();
                match list.take(page.entries, session.peer.incarnation) {
                    Ok(()) => {}
                    Err(ListRefused::Disordered) => {
                        session.condemn(Lost::misbehaved("the peer's list is not in the order of names"));
                        return Err(lost(String::new()));
                    }
                    Err(ListRefused::TooLong(status)) => {
                        return Err(WorkerError::Local { transfer: transfer(), status });
                    }
                }
                if !more {
                    return Ok(list.entries);
                }
            }
        };
        let what = || format!("listing what {} has published", peer.name());
        self.within(self.node.limit, what, pin!(pages)).await
    }

    /// Takes the operation pinned: a future that is handed on by value is kept at every stage.
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        what: impl Fn() -> String,
        operation: Pin<&mut (impl Future<Output = Result<T, WorkerError>> + ?Sized)>,
    ) -> Result<T, WorkerError> {
        if self.node.is_refusing() {
            return Err(WorkerError::ShutDown);
        }
        let ended = timeout(&*self.node.runtime, limit, operation).await;
        ended.unwrap_or_else(|_| Err(WorkerError::DeadlineExceeded { what: what(), limit }))
    }
}

fn info(peer: &Peer) -> PeerInfo {
    let connection = peer.connection();
    let live = connection.as_ref().filter(|connection| !connection.is_over());
    let (fabric, counters) = peer.figures();
    PeerInfo {
        name: peer.name().to_owned(),
        address: peer.address(),
        transport: live.map(Route::kind),
        encrypted: live.map(Route::is_encrypted),
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
