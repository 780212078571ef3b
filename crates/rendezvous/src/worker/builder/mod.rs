//! [`WorkerBuilder`]: the settings of a worker, and starting it.

mod encryption;
mod fabrics;
mod settings;
mod start;

use std::{path::PathBuf, sync::Arc, time::Duration};

use tensorwire_fabric::{Fabric, FabricKind, Runtime, Wait};
use tensorwire_fabric_tcp::Congestion;
use tensorwire_memory::MemoryObserver;
use tensorwire_protocol::{Sharing, Validation};
#[cfg(feature = "verbs")]
use tensorwire_verbs_reactor::Rdma;

use self::encryption::Encryption;
pub use self::settings::{Flow, Limits, Memory, Tcp};
use crate::{
    control::{
        ControlPlane, Secret,
        cluster::{ClusterSpec, TfConfig},
    },
    error::WorkerError,
    peer_memory::{enclosure::LocalFabric, trust::Trust},
    values::{duplicates::DuplicatePolicy, traces::Traces},
    worker::Worker,
};

/// Settings of a [`Worker`]. The defaults are right for workers on one host. A worker that other hosts reach needs
/// [`bind`](Self::bind), and a secret or TLS.
///
/// ```
/// use std::time::Duration;
///
/// use tensorwire::Worker;
/// use tensorwire::FabricKind;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// let worker = Worker::builder("/job:worker/replica:0/task:0")
///     .bind("127.0.0.1:0")
///     .fabrics([FabricKind::TCP])
///     .timeout(Duration::from_secs(5))
///     .memory(|memory| memory.receive_bytes = 1 << 30)
///     .start()
///     .await?;
/// assert_eq!(worker.name(), "/job:worker/replica:0/task:0");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct WorkerBuilder {
    /// `None` for a client.
    name: Option<String>,
    bind: String,
    /// The address of the store that rank 0 serves. It overrides `bind`.
    store_address: Option<String>,
    data_bind: Option<String>,
    cluster: ClusterSpec,
    fabrics: Vec<FabricKind>,
    /// The user set `fabrics`.
    is_chosen: bool,
    required: bool,
    #[cfg(feature = "verbs")]
    rdma: Rdma,
    encryption: Encryption,
    secret: Option<Secret>,
    secret_file: Option<PathBuf>,
    memory: Memory,
    limits: Limits,
    flow: Flow,
    tcp: Tcp,
    /// The congestion control of `tcp`. The listener and the fabric share it, so that a refusal is logged once.
    congestion: Congestion,
    trust: Trust,
    sharing: Sharing,
    validation: Validation,
    set_bytes: Option<u64>,
    duplicates: DuplicatePolicy,
    limit: Duration,
    grace: Duration,
    liveness: Duration,
    wait: Wait,
    traces: Traces,
    runtime: Option<Arc<dyn Runtime>>,
    local_fabrics: Option<Vec<Arc<dyn Fabric>>>,
    control: Option<Arc<dyn ControlPlane>>,
    observer: Option<Arc<dyn MemoryObserver>>,
}

const GIB: u64 = 1 << 30;

/// The default of `fabrics`, in order of preference.
const AUTO: [FabricKind; 3] = [FabricKind::SHM, FabricKind::VERBS, FabricKind::TCP];

/// Minimum interval between HTTP/2 keepalive pings.
const KEEPALIVE_MIN: Duration = Duration::from_secs(10);

/// How long a peer may take at most to answer while a worker connects to it.
const DIAL_MAX: Duration = Duration::from_secs(10);

/// Minimum liveness bound. With a shorter one, a peer that is merely scheduled late would count as lost.
const LIVENESS_MIN: Duration = Duration::from_millis(100);

/// The fabrics that work on this host, in order of preference, and the reasons why others do not.
#[derive(Debug, Default)]
struct OpenedFabrics {
    usable: Vec<LocalFabric>,
    unavailable: Vec<(FabricKind, String)>,
}

impl Worker {
    /// Settings for a worker called `name`: `/job:ps/replica:0/task:0`, or the short form `ps` of the same name.
    ///
    /// A name is used by one running worker at a time: while it answers, peers refuse another worker of this name with
    /// [`WorkerError::NameTaken`].
    pub fn builder(name: &str) -> WorkerBuilder {
        WorkerBuilder::new(Some(name))
    }

    /// Settings for a worker that other workers do not address by name, for instance one that only fetches. It gets a
    /// unique name such as `/job:client_4711_9f86d081884c7d65/replica:0/task:0`. Under TLS it gets the name in its
    /// certificate, with a random task number if the certificate is valid for all tasks of a job.
    ///
    /// ```
    /// use tensorwire::Worker;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// let (one, other) = (Worker::client().start().await?, Worker::client().start().await?);
    /// assert!(one.name().starts_with("/job:client_") && one.name() != other.name());
    /// # Ok(())
    /// # }
    /// ```
    pub fn client() -> WorkerBuilder {
        WorkerBuilder::new(None)
    }

    /// Settings for task `task` of `job` in `cluster`: the task's name, the cluster, and the task's address to listen
    /// on.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] if the cluster is invalid or has no such task.
    pub fn builder_for_task(
        cluster: ClusterSpec,
        job: &str,
        task: u32,
    ) -> Result<WorkerBuilder, WorkerError> {
        cluster.check()?;
        let address = cluster.task_address(job, task)?.to_owned();
        Ok(Self::builder(&ClusterSpec::worker_name(job, task)).bind(address).cluster(cluster))
    }

    /// Settings for the task of this process in the environment variable [`TF_CONFIG`](crate::TF_CONFIG).
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] if the variable is not set, has no valid cluster, or has no task.
    pub fn builder_from_tf_config() -> Result<WorkerBuilder, WorkerError> {
        TfConfig::from_environment()?.builder()
    }
}

impl TfConfig {
    /// Settings for the worker of this process.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] if it has no task.
    pub fn builder(self) -> Result<WorkerBuilder, WorkerError> {
        let (cluster, job, task) = self.into_task()?;
        Worker::builder_for_task(cluster, &job, task)
    }
}

impl WorkerBuilder {
    fn new(name: Option<&str>) -> Self {
        Self {
            name: name.map(str::to_owned),
            bind: "127.0.0.1:0".to_owned(),
            store_address: None,
            data_bind: None,
            cluster: ClusterSpec::new(),
            fabrics: AUTO.to_vec(),
            is_chosen: false,
            required: false,
            #[cfg(feature = "verbs")]
            rdma: Rdma::default(),
            encryption: Encryption::default(),
            secret: None,
            secret_file: None,
            memory: Memory::default(),
            limits: Limits::default(),
            flow: Flow::default(),
            tcp: Tcp::default(),
            congestion: Congestion::default(),
            trust: Trust::default(),
            sharing: Sharing::Copy,
            validation: Validation::Off,
            set_bytes: None,
            duplicates: DuplicatePolicy::default(),
            limit: Duration::from_secs(60),
            grace: Duration::from_secs(1),
            liveness: Duration::from_secs(30),
            wait: Wait::default(),
            traces: Traces::default(),
            runtime: None,
            local_fabrics: None,
            control: None,
            observer: None,
        }
    }

    /// The address, `host:port`, to listen on for control sessions and for data connections over tcp. It is the only
    /// port to open in a firewall. Default `127.0.0.1:0`: loopback, any free port. An address that other hosts reach
    /// needs a secret or TLS.
    #[must_use]
    pub fn bind(mut self, address: impl Into<String>) -> Self {
        self.bind = address.into();
        self
    }

    /// Listens on the address of the store that rank 0 serves, instead of [`bind`](Self::bind). Without a secret or TLS
    /// it listens on loopback with the same port. For the crate of groups.
    #[doc(hidden)]
    #[must_use]
    pub fn store_address(mut self, address: impl Into<String>) -> Self {
        self.store_address = Some(address.into());
        self
    }

    /// A separate address, `host:port`, for data connections over tcp, for instance on a faster network than that of
    /// [`bind`](Self::bind). Peers that dial this worker must reach both. Default: none; data connections use the port
    /// of [`bind`](Self::bind).
    #[must_use]
    pub fn data_bind(mut self, address: impl Into<String>) -> Self {
        self.data_bind = Some(address.into());
        self
    }

    /// The other workers, for [`Worker::peer`] and for receives by key. If the cluster has a
    /// [protocol](ClusterSpec::protocol), the worker requires its fabric, unless [`fabrics`](Self::fabrics) or
    /// [`require`](Self::require) names others.
    #[must_use]
    pub fn cluster(mut self, cluster: ClusterSpec) -> Self {
        self.cluster = cluster;
        self
    }

    /// The fabrics to try, in order of preference. Default: shm for peers on the same host, then verbs if there is an
    /// RDMA device, then tcp. The fabric in use for a peer, and the reasons against those before it, are logged once
    /// and shown by [`Worker::peers`].
    #[must_use]
    pub fn fabrics(mut self, kinds: impl IntoIterator<Item = FabricKind>) -> Self {
        self.fabrics = kinds.into_iter().collect();
        (self.is_chosen, self.required) = (true, false);
        self
    }

    /// Uses only this fabric. It is an error if it cannot be used.
    #[must_use]
    pub fn require(mut self, kind: FabricKind) -> Self {
        self.fabrics = vec![kind];
        (self.is_chosen, self.required) = (true, true);
        self
    }

    /// The RDMA device and its settings, if verbs is among the fabrics: `set` changes the settings that differ from the
    /// defaults. Settings that are not given here come from the environment (`TENSORWIRE_RDMA_…`, or the variables of
    /// TensorFlow's verbs plugin, see [`Rdma::from_variables`]). The device and port are otherwise chosen among the
    /// active ports of all devices.
    ///
    /// ```
    /// use tensorwire::Worker;
    ///
    /// let builder = Worker::builder("ps").rdma(|rdma| rdma.device = Some("mlx5_0".to_owned()));
    /// ```
    #[cfg(feature = "verbs")]
    #[must_use]
    pub fn rdma(mut self, set: impl FnOnce(&mut Rdma)) -> Self {
        set(&mut self.rdma);
        self
    }

    /// The secret that all workers of the cluster share. Default: the content of the file in `TENSORWIRE_SECRET_FILE`;
    /// without that variable, on loopback, a random one that processes of the same user exchange automatically.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Reads the secret from this file.
    #[must_use]
    pub fn secret_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.secret_file = Some(path.into());
        self
    }

    /// Sets how much memory this worker uses: `set` changes the settings that differ from the defaults.
    ///
    /// ```
    /// use tensorwire::Worker;
    ///
    /// let builder = Worker::builder("ps").memory(|memory| {
    ///     memory.source_bytes = 8 << 30;
    ///     memory.receive_bytes = 1 << 30;
    /// });
    /// ```
    #[must_use]
    pub fn memory(mut self, set: impl FnOnce(&mut Memory)) -> Self {
        set(&mut self.memory);
        self
    }

    /// Sets limits for peers and steps: `set` changes the settings that differ from the defaults.
    #[must_use]
    pub fn limits(mut self, set: impl FnOnce(&mut Limits)) -> Self {
        set(&mut self.limits);
        self
    }

    /// Sets the flow of messages and values: `set` changes the settings that differ from the defaults.
    #[must_use]
    pub fn flow(mut self, set: impl FnOnce(&mut Flow)) -> Self {
        set(&mut self.flow);
        self
    }

    /// Sets how streams of tcp send: `set` changes the settings that differ from the defaults.
    ///
    /// ```
    /// use tensorwire::Worker;
    ///
    /// let builder = Worker::builder("ps").tcp(|tcp| tcp.congestion = Some("reno".to_owned()));
    /// ```
    #[must_use]
    pub fn tcp(mut self, set: impl FnOnce(&mut Tcp)) -> Self {
        set(&mut self.tcp);
        self.congestion = self.tcp.congestion.clone().map(Congestion::named).unwrap_or_default();
        self
    }

    /// How far peers are trusted. Default [`Trust::Cluster`].
    #[must_use]
    pub fn trust(mut self, trust: Trust) -> Self {
        self.trust = trust;
        self
    }

    /// Whether receives and fetches request a copy or a view by default. Default [`Sharing::Copy`]. With
    /// [`Sharing::View`], a large value from a peer on the same host is a read-only view of the peer's memory, if
    /// shared memory is used. A view needs no copy, but the peer cannot reuse that memory until the tensor and its
    /// clones are dropped here. If a view is not possible, the value is copied.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Deadline of every operation that does not set its own. Default 60 s.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// How long [`Worker::shutdown`] waits for transfers under way. Default 1 s.
    #[must_use]
    pub fn shutdown_grace(mut self, limit: Duration) -> Self {
        self.grace = limit;
        self
    }

    /// How long a peer may neither answer a ping on its control session nor move data before it counts as lost and all
    /// transfers with it fail. A silent peer is pinged several times within this bound. Default 30 s, at least 0.1 s. A
    /// peer whose user code blocks its runtime still answers pings. A worker that is dialled must answer within this bound, too,
    /// and within 10 s.
    #[must_use]
    pub fn liveness(mut self, limit: Duration) -> Self {
        self.liveness = limit;
        self
    }

    /// How the built-in fabrics wait for the peer. Default [`Wait::Adaptive`]: poll for some microseconds, then sleep.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self
    }

    /// Passes the spans of callers on to the handlers that answer them, and continues those of peers; without it, and without the feature
    /// `trace`, a call belongs to no trace of another process. Under [`Trust::Hostile`] those of peers are not continued: a peer could put
    /// its calls into any trace.
    #[cfg(feature = "trace")]
    #[must_use]
    pub fn propagator(mut self, propagator: impl crate::calls::Propagator) -> Self {
        self.traces.propagator = Some(Arc::new(propagator));
        self
    }

    /// Validates the content of tensors end to end by a checksum. Content that an adapter, a driver or faulty memory
    /// has changed fails its receive with [`WorkerError::Corrupted`]. Of the settings of two workers, the stronger
    /// applies. It costs a pass over the bytes: at the sender once per tensor, at the receiver each time. Default
    /// [`Validation::Off`].
    #[must_use]
    pub fn validation(mut self, validation: Validation) -> Self {
        self.validation = validation;
        self
    }

    /// Maximum memory that the [sets](crate::sets) of this worker hold together, in bytes: the newest version of each, the version
    /// before it, and their encoded deltas. A commit above it is refused. Default:
    /// [`source_bytes`](Memory::source_bytes).
    #[must_use]
    pub fn set_bytes(mut self, most: u64) -> Self {
        self.set_bytes = Some(most);
        self
    }

    /// The meaning of a second send or receive of a key within a step, for values that are sent on this worker, even if
    /// peers receive them. Default [`DuplicatePolicy::Queue`].
    #[must_use]
    pub fn duplicates(mut self, policy: DuplicatePolicy) -> Self {
        self.duplicates = policy;
        self
    }

    /// The runtime to spawn tasks on. Default: the tokio runtime that `start` is called on.
    #[cfg(feature = "simulation")]
    #[must_use]
    pub fn runtime(mut self, runtime: Arc<dyn Runtime>) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Custom fabrics instead of the built-in ones, in order of preference.
    #[must_use]
    pub fn local_fabrics(mut self, fabrics: Vec<Arc<dyn Fabric>>) -> Self {
        self.local_fabrics = Some(fabrics);
        self
    }

    /// A custom control plane instead of gRPC. Unless a [`secret`](Self::secret) is set, peers must prove the secret
    /// that the plane's `ambient_secret` returns. If it returns none, peers are not authenticated by this worker, and
    /// the plane must do so.
    #[cfg(feature = "simulation")]
    #[must_use]
    #[doc(hidden)]
    pub fn dangerous_control_plane(mut self, control: Arc<dyn ControlPlane>) -> Self {
        self.control = Some(control);
        self
    }

    /// Observes the ownership of memory.
    #[cfg(feature = "simulation")]
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn MemoryObserver>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Starts the worker, on a tokio runtime with its io and time drivers. It listens at once, and connects to peers on first
    /// use. While that runtime runs, the futures of the worker may be awaited on any executor.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for an invalid setting, [`WorkerError::Control`] if the address cannot be bound,
    /// [`WorkerError::Fabric`] if a required fabric cannot be opened, [`WorkerError::Limit`] if a limit of the
    /// operating system is the cause of one of these.
    ///
    /// # Cancel safety
    /// Dropping the future releases everything.
    pub async fn start(self) -> Result<Worker, WorkerError> {
        self.with_fabric_of_cluster().start_within_limits().await.map_err(WorkerError::or_limit)
    }
}
