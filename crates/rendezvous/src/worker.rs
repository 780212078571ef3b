//! A worker: one process of a cluster.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use memory::{Pool, PoolStats, UserMemory};
use protocol::{Counters, DeviceName, Key, StepId, text::check_name};
use verbs_reactor::{FabricKind, QueuePairStats, timeout};

use crate::{
    ClusterSpec, Peer, Step, Tensor, TfConfig, Version, WorkerBuilder, WorkerError, connect::Meant,
    described::Timed, fetch::check_published, name::sought, node::Node, peer::KnownPeer,
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
/// assert_eq!(peer.fetch("bias").await?.values::<f32>()?, [0.1, 0.2, 0.3]);
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
    /// Settings for a worker called `name`: `/job:ps/replica:0/task:0`, or plainly `ps`, which means the same.
    ///
    /// No two workers that live at once can have one name: while the first answers, peers refuse the other with
    /// [`WorkerError::NameTaken`].
    pub fn builder(name: &str) -> WorkerBuilder {
        WorkerBuilder::new(Some(name))
    }

    /// Settings for a worker that nobody looks for by name: it fetches, and needs no name of its own. It is given one
    /// that no other has, such as `/job:client_4711_9f86d081884c7d65/replica:0/task:0`; under TLS the one that its
    /// certificate names, with a random number where that is for all tasks of a job.
    ///
    /// ```
    /// use rendezvous::Worker;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), rendezvous::WorkerError> {
    /// let (one, other) = (Worker::client().start().await?, Worker::client().start().await?);
    /// assert!(one.name().starts_with("/job:client_") && one.name() != other.name());
    /// # Ok(())
    /// # }
    /// ```
    pub fn client() -> WorkerBuilder {
        WorkerBuilder::new(None)
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
        Ok(Self::builder(&ClusterSpec::worker_name(job, task)).bind(address).cluster(cluster))
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

    /// The peer called `name`: of the cluster, or one that has connected. Does not connect. The own name gives this
    /// worker itself, whose tensors are fetched without a connection.
    ///
    /// # Errors
    /// [`WorkerError::UnknownWorker`].
    pub fn peer(&self, name: &str) -> Result<Peer, WorkerError> {
        Ok(Peer::new(self, self.node.peer_by_name(&sought(name))?))
    }

    /// The peer that listens on `address` (`host:port`). Asks it for its name unless that is known already, or the
    /// address is this worker's own.
    ///
    /// # Errors
    /// [`WorkerError::Control`] when it cannot be reached or does not share the secret, [`WorkerError::Limit`]
    /// when this process may open no more files, [`WorkerError::NameTaken`] when its name is that of another worker that
    /// is connected and answers.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn peer_at(&self, address: &str) -> Result<Peer, WorkerError> {
        if let Some(peer) = self.node.peer_by_address(address) {
            return Ok(Peer::new(self, peer));
        }
        let (_, known) = self.node.dial(address, Meant::Host).await.map_err(WorkerError::or_limit)?;
        Ok(Peer::new(self, known))
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
        let name = &*sought(name);
        let met = async {
            loop {
                let mut more = pin!(self.node.met.notified());
                more.as_mut().enable();
                if let Some(peer) = self.node.met_peer(name) {
                    return Ok(Peer::new(self, peer));
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
        let name = sought(name);
        if name == self.node.name {
            let remedy = "that is this worker itself: name a peer".to_owned();
            return Err(WorkerError::Config { field: "name", value: name, remedy });
        }
        Ok(Peer::new(self, self.node.name_peer(&name, address)?))
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

    /// The step with this number, which begins here with this call: requests that peers have made for it are served
    /// from now on, in the order in which they came.
    ///
    /// It ends here when the last clone of the answer is dropped, as by [`cleanup`](Self::cleanup). So keep it until
    /// peers have received what was sent in it, and clone it instead of asking for the same number again. A step that
    /// has ended does not begin again.
    pub fn step(&self, id: i64) -> Step {
        Step::begin(self, StepId(id))
    }

    /// As [`step`](Self::step), for programs that find a step by its number at several places: dropping the answer does
    /// not end it, [`cleanup`](Self::cleanup) does. A step that nobody keeps and that holds no value is forgotten; a
    /// request for it waits until it begins again ([`Limits::step_init_timeout`](crate::Limits::step_init_timeout)).
    pub fn shared_step(&self, id: i64) -> Step {
        Step::share(self, StepId(id))
    }

    /// Ends a step, whoever keeps it: its pending receives get ABORTED, its unreceived values are dropped, and a late
    /// request for it is answered with ABORTED. So is every later use of it here, for 10 minutes or until 65,536 further
    /// steps are finished, whichever comes first. Ending it once more changes nothing.
    pub fn cleanup(&self, step: i64) {
        self.end_step(StepId(step));
    }

    /// Ends every step that is in use or holds values, as [`cleanup`](Self::cleanup) does.
    pub fn cleanup_all(&self) {
        self.node.values.steps.live().into_iter().for_each(|step| self.end_step(step));
    }

    pub(crate) fn end_step(&self, step: StepId) {
        self.node.values.steps.cleanup(step);
        self.node.values.lost.forget(step);
        self.discard(step);
    }

    /// What was received for a step and not handed out goes back.
    pub(crate) fn discard(&self, step: StepId) {
        for connection in self.node.all_peers().iter().filter_map(KnownPeer::connection) {
            connection.protocol.discard(step);
        }
    }

    /// All known peers, sorted by name, with the fabric each uses.
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.node.all_peers().iter().map(info).collect()
    }

    pub(crate) fn is_own(&self, device: &DeviceName) -> bool {
        device.is_same_address_space(&self.node.values.device)
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
        self.node.times.took(timed, self.node.runtime.now().saturating_sub(begun));
        Ok(value)
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
