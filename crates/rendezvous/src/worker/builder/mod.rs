//! Making a worker.

mod encryption;
mod fabrics;
mod settings;
mod start;

use std::{path::PathBuf, sync::Arc, time::Duration};

use tensorwire_memory::MemoryObserver;
use tensorwire_protocol::{Sharing, Validation};
#[cfg(feature = "verbs")]
use tensorwire_verbs_reactor::verbs::Rdma;
use tensorwire_verbs_reactor::{Fabric, FabricKind, Runtime, Wait};

use self::encryption::Encryption;
pub use self::settings::{Flow, Limits, Memory};
use crate::{
    control::{
        ControlPlane, Secret,
        cluster::{ClusterSpec, TfConfig},
    },
    error::WorkerError,
    link::{enclosure::LocalFabric, trust::Trust},
    values::duplicates::DuplicatePolicy,
    worker::Worker,
};

/// Settings of a [`Worker`]. The defaults are right for a worker on one host; a worker that other hosts reach
/// needs [`bind`](Self::bind) and a secret.
///
/// ```
/// use std::time::Duration;
///
/// use tensorwire_rendezvous::Worker;
/// use tensorwire_verbs_reactor::FabricKind;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire_rendezvous::WorkerError> {
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
    data_bind: Option<String>,
    cluster: ClusterSpec,
    fabrics: Vec<FabricKind>,
    /// The user named them.
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
    trust: Trust,
    sharing: Sharing,
    validation: Validation,
    duplicates: DuplicatePolicy,
    limit: Duration,
    grace: Duration,
    liveness: Duration,
    wait: Wait,
    runtime: Option<Arc<dyn Runtime>>,
    control_runtime: Option<Arc<dyn Runtime>>,
    local_fabrics: Option<Vec<Arc<dyn Fabric>>>,
    control: Option<Arc<dyn ControlPlane>>,
    observer: Option<Arc<dyn MemoryObserver>>,
}

const GIB: u64 = 1 << 30;

/// Fabrics in order of preference, where the user names none.
const AUTO: [FabricKind; 3] = [FabricKind::SHM, FabricKind::VERBS, FabricKind::TCP];

/// Least time between the transport's own pings.
const KEEPALIVE_MIN: Duration = Duration::from_secs(10);

/// Least liveness bound: below it, a peer that is only scheduled late would count as lost.
const LIVENESS_MIN: Duration = Duration::from_millis(100);

/// The fabrics that work here, in order of preference, and why the others do not.
#[derive(Debug, Default)]
struct OpenedFabrics {
    usable: Vec<LocalFabric>,
    unavailable: Vec<(FabricKind, String)>,
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
    /// use tensorwire_rendezvous::Worker;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire_rendezvous::WorkerError> {
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
}

impl TfConfig {
    /// Settings for the worker that this process is.
    ///
    /// # Errors
    /// [`WorkerError::Cluster`] when no task is named.
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
            trust: Trust::default(),
            sharing: Sharing::Copy,
            validation: Validation::Off,
            duplicates: DuplicatePolicy::default(),
            limit: Duration::from_secs(60),
            grace: Duration::from_secs(1),
            liveness: Duration::from_secs(30),
            wait: Wait::default(),
            runtime: None,
            control_runtime: None,
            local_fabrics: None,
            control: None,
            observer: None,
        }
    }

    /// Where this worker listens, `host:port`, for control sessions and for data connections over tcp: it is the one port to
    /// open in a firewall. Default `127.0.0.1:0`: loopback, any free port. Anything that other hosts reach needs a secret, or
    /// TLS.
    #[must_use]
    pub fn bind(mut self, address: impl Into<String>) -> Self {
        self.bind = address.into();
        self
    }

    /// A port of its own for data connections over tcp, `host:port`: for instance on a faster network than the one that
    /// [`bind`](Self::bind) is on. Peers that dial this worker must reach it there, too. Default: none, data connections come
    /// in at the port of [`bind`](Self::bind).
    #[must_use]
    pub fn data_bind(mut self, address: impl Into<String>) -> Self {
        self.data_bind = Some(address.into());
        self
    }

    /// The other workers, for [`Worker::peer`] and for receives by key.
    #[must_use]
    pub fn cluster(mut self, cluster: ClusterSpec) -> Self {
        self.cluster = cluster;
        self
    }

    /// The fabrics to try, best first. Default: shm for peers on the same host, then verbs where there is an RDMA device,
    /// then tcp. Which one a peer uses, and why none before it, is logged once and told by [`Worker::peers`].
    #[must_use]
    pub fn fabrics(mut self, kinds: impl IntoIterator<Item = FabricKind>) -> Self {
        self.fabrics = kinds.into_iter().collect();
        (self.is_chosen, self.required) = (true, false);
        self
    }

    /// Exactly this fabric: if it cannot be used, that is an error, not a fallback.
    #[must_use]
    pub fn require(mut self, kind: FabricKind) -> Self {
        self.fabrics = vec![kind];
        (self.is_chosen, self.required) = (true, true);
        self
    }

    /// Which RDMA device to use and how, where verbs is among the fabrics: `set` changes what differs from the defaults. What these
    /// settings leave open the environment may say (`TENSORWIRE_RDMA_…`, else the variables of TensorFlow's verbs plugin, see
    /// [`Rdma::from_variables`]), and the rest is chosen (see [`VerbsFabric::open`](tensorwire_verbs_reactor::verbs::VerbsFabric::open)).
    ///
    /// ```
    /// use tensorwire_rendezvous::Worker;
    ///
    /// let builder = Worker::builder("ps").rdma(|rdma| rdma.device = Some("mlx5_0".to_owned()));
    /// ```
    #[cfg(feature = "verbs")]
    #[must_use]
    pub fn rdma(mut self, set: impl FnOnce(&mut Rdma)) -> Self {
        set(&mut self.rdma);
        self
    }

    /// The secret that all workers of the cluster share. Default: the file that `TENSORWIRE_SECRET_FILE` names,
    /// else on loopback one that is handed over to processes of the same user.
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

    /// Memory that this worker takes: `set` changes what differs from the defaults.
    ///
    /// ```
    /// use tensorwire_rendezvous::Worker;
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

    /// How much peers and steps may take of this worker: `set` changes what differs from the defaults.
    #[must_use]
    pub fn limits(mut self, set: impl FnOnce(&mut Limits)) -> Self {
        set(&mut self.limits);
        self
    }

    /// How messages and values flow: `set` changes what differs from the defaults.
    #[must_use]
    pub fn flow(mut self, set: impl FnOnce(&mut Flow)) -> Self {
        set(&mut self.flow);
        self
    }

    /// What peers are taken for. Default [`Trust::Cluster`].
    #[must_use]
    pub fn trust(mut self, trust: Trust) -> Self {
        self.trust = trust;
        self
    }

    /// How values come that are received without naming it. Default [`Sharing::Copy`]. With [`Sharing::View`] a large
    /// value of a peer on the same host is a read-only view of that peer's memory, where shared memory is used: no copy,
    /// and the peer can't reuse that memory until the tensor and its clones are dropped here. Elsewhere, and where the
    /// peer can't lend, it is a copy.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Deadline of every operation that does not name its own. Default 60 s.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// How long [`Worker::shutdown`] waits for values that are on their way. Default 1 s.
    #[must_use]
    pub fn shutdown_grace(mut self, limit: Duration) -> Self {
        self.grace = limit;
        self
    }

    /// How long a peer may neither answer a ping on its control session nor move data, before it counts as lost and
    /// everything in flight with it ends. Idle peers are pinged a few times in this span. Default 30 s, at least
    /// 0.1 s. A peer whose user code blocks its runtime still answers.
    #[must_use]
    pub fn liveness(mut self, limit: Duration) -> Self {
        self.liveness = limit;
        self
    }

    /// How the built-in fabrics wait for the peer. Default [`Wait::Adaptive`]: some microseconds of looking again, then
    /// sleep.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self
    }

    /// Validates the contents of tensors end to end by a checksum: what was changed on the way, by an adapter, a driver
    /// or memory, ends its receive with [`WorkerError::Corrupted`]. Of the wishes of two
    /// workers the stronger holds, so it is enough to set it at one. Costs a pass over the bytes at each end: at the
    /// sender once per tensor, at the receiver each time. Default [`Validation::Off`].
    #[must_use]
    pub fn validation(mut self, validation: Validation) -> Self {
        self.validation = validation;
        self
    }

    /// What a second send or receive of a key of a step means here: of values that are sent on this worker, also where
    /// peers receive them. Default [`DuplicatePolicy::Queue`].
    #[must_use]
    pub fn duplicates(mut self, policy: DuplicatePolicy) -> Self {
        self.duplicates = policy;
        self
    }

    /// The runtime to spawn on. Default: the tokio runtime this is started on.
    #[must_use]
    #[doc(hidden)]
    pub fn runtime(mut self, runtime: Arc<dyn Runtime>) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// The runtime to serve control sessions on. Default: a thread of its own, so that peers' pings are answered
    /// while user code blocks the runtime that tensors move on.
    #[must_use]
    #[doc(hidden)]
    pub fn control_runtime(mut self, runtime: Arc<dyn Runtime>) -> Self {
        self.control_runtime = Some(runtime);
        self
    }

    /// Fabrics of your own, instead of the built-in ones; in this order.
    #[must_use]
    pub fn local_fabrics(mut self, fabrics: Vec<Arc<dyn Fabric>>) -> Self {
        self.local_fabrics = Some(fabrics);
        self
    }

    /// A control plane of your own, instead of gRPC. Unless a [`secret`](Self::secret) is set too, peers must
    /// know what the plane's `ambient_secret` tells; if that is nothing, they are not authenticated, and the
    /// plane must vouch for them.
    #[must_use]
    #[doc(hidden)]
    pub fn dangerous_control_plane(mut self, control: Arc<dyn ControlPlane>) -> Self {
        self.control = Some(control);
        self
    }

    /// Watches who owns which memory.
    #[must_use]
    #[doc(hidden)]
    pub fn observer(mut self, observer: Arc<dyn MemoryObserver>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Starts the worker: it listens, and connects to peers on first use.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for a setting that cannot be used, [`WorkerError::Control`] when the address
    /// cannot be bound, [`WorkerError::Fabric`] when a required fabric cannot be opened, [`WorkerError::Limit`]
    /// when a limit of the operating system is behind one of these.
    ///
    /// # Cancel safety
    /// Dropping the future gives everything back.
    pub async fn start(self) -> Result<Worker, WorkerError> {
        self.start_within_limits().await.map_err(WorkerError::or_limit)
    }
}
