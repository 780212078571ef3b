//! Making a worker.

mod encryption;
mod start;

use std::{path::PathBuf, sync::Arc, time::Duration};

use memory::MemoryObserver;
use protocol::{Mode, Sharing, Validation, wire::control::Parameters};
use verbs_reactor::{Fabric, FabricKind, Runtime, Wait, verbs::VerbsSettings};

use self::encryption::Encryption;
use crate::{
    ClusterSpec, DuplicatePolicy, Trust, Worker, WorkerError,
    control::{ControlPlane, Secret},
    enclosure::LocalFabric,
    sessions::SessionCaps,
    steps::StepSettings,
};

/// Settings of a [`Worker`]. The defaults are right for a worker on one host; a worker that other hosts reach
/// needs [`bind`](Self::bind) and a secret.
///
/// ```
/// use std::time::Duration;
///
/// use rendezvous::Worker;
/// use verbs_reactor::FabricKind;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
/// let worker = Worker::builder("/job:worker/replica:0/task:0")
///     .bind("127.0.0.1:0")
///     .fabrics([FabricKind::Tcp])
///     .timeout(Duration::from_secs(5))
///     .receive_bytes(1 << 30)
///     .start()
///     .await?;
/// assert_eq!(worker.name(), "/job:worker/replica:0/task:0");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct WorkerBuilder {
    name: String,
    bind: String,
    cluster: ClusterSpec,
    fabrics: Vec<FabricKind>,
    /// The user named them.
    is_chosen: bool,
    required: bool,
    rdma: VerbsSettings,
    encryption: Encryption,
    secret: Option<Secret>,
    secret_file: Option<PathBuf>,
    source_bytes: u64,
    receive_bytes: u64,
    block_bytes: usize,
    trust: Trust,
    bounce_bytes: u64,
    sharing: Sharing,
    viewed_bytes: Option<u64>,
    limit: Duration,
    grace: Duration,
    liveness: Duration,
    wait: Wait,
    parameters: Parameters,
    step_settings: StepSettings,
    session_caps: SessionCaps,
    peers_max: usize,
    runtime: Option<Arc<dyn Runtime>>,
    control_runtime: Option<Arc<dyn Runtime>>,
    local_fabrics: Option<Vec<Arc<dyn Fabric>>>,
    control: Option<Arc<dyn ControlPlane>>,
    observer: Option<Arc<dyn MemoryObserver>>,
}

const GIB: u64 = 1 << 30;

/// Fabrics in order of preference, where the user names none.
const AUTO: [FabricKind; 4] = [FabricKind::Shm, FabricKind::Verbs, FabricKind::Tcp, FabricKind::Grpc];

/// Least time between the transport's own pings.
const KEEPALIVE_MIN: Duration = Duration::from_secs(10);

/// Least liveness bound: below it, a peer that is only scheduled late would count as lost.
const LIVENESS_MIN: Duration = Duration::from_millis(100);

/// The fabrics that work here, in order of preference, and why the others do not.
#[derive(Debug, Default)]
struct OpenedFabrics {
    usable: Vec<LocalFabric>,
    unavailable: Vec<(FabricKind, String)>,
    /// How many of them are preferred to gRPC, if that is wanted.
    grpc_place: Option<usize>,
}

impl WorkerBuilder {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            bind: "127.0.0.1:0".to_owned(),
            cluster: ClusterSpec::new(),
            fabrics: AUTO.to_vec(),
            is_chosen: false,
            required: false,
            rdma: VerbsSettings::default(),
            encryption: Encryption::default(),
            secret: None,
            secret_file: None,
            source_bytes: 64 * GIB,
            receive_bytes: 64 * GIB,
            block_bytes: 16 << 20,
            trust: Trust::default(),
            bounce_bytes: GIB,
            sharing: Sharing::Copy,
            viewed_bytes: None,
            limit: Duration::from_secs(60),
            grace: Duration::from_secs(1),
            liveness: Duration::from_secs(30),
            wait: Wait::default(),
            parameters: Parameters {
                mode: Mode::Counted,
                depth: 256,
                ring_bytes: 256 << 10,
                requests_max: 256,
                contents_max: 64,
                names_max: 1024,
                eager_bytes_max: protocol::limits::EAGER_BYTES_MAX,
                requests_per_message: 128,
                validation: Validation::Off,
            },
            step_settings: StepSettings {
                values_max: 1 << 20,
                duplicates: DuplicatePolicy::default(),
                deferred_steps_max: 1024,
                init_timeout: Duration::from_secs(60),
            },
            session_caps: SessionCaps { in_all: 1024, of_a_peer: 8, connections_of_a_peer: 16 },
            peers_max: 4096,
            runtime: None,
            control_runtime: None,
            local_fabrics: None,
            control: None,
            observer: None,
        }
    }

    /// Where the control plane listens, `host:port`. Default `127.0.0.1:0`: loopback, any free port. Anything
    /// that other hosts reach needs a secret, or TLS.
    #[must_use]
    pub fn bind(mut self, address: impl Into<String>) -> Self {
        self.bind = address.into();
        self
    }

    /// The other workers, for [`Worker::peer`] and for receives by key.
    #[must_use]
    pub fn cluster(mut self, cluster: ClusterSpec) -> Self {
        self.cluster = cluster;
        self
    }

    /// The fabrics to try, best first. Default: shm for peers on the same host, then verbs where there is an RDMA device,
    /// then tcp, then grpc. Which one a peer uses, and why none before it, is logged once and told by [`Worker::peers`].
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

    /// Which RDMA device to use and how, where verbs is among the fabrics. What these settings leave open the
    /// environment may say (`TENSORWIRE_RDMA_…`, else the variables of TensorFlow's verbs plugin, see
    /// [`VerbsSettings::from_variables`]), and the rest is chosen (see
    /// [`VerbsFabric::open`](verbs_reactor::verbs::VerbsFabric::open)).
    #[must_use]
    pub fn verbs(mut self, settings: VerbsSettings) -> Self {
        self.rdma = settings;
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

    /// Cap of the memory for values that are published and sent, in bytes. Memory is taken as it is needed.
    /// Default 64 GiB.
    #[must_use]
    pub fn source_bytes(mut self, cap: u64) -> Self {
        self.source_bytes = cap;
        self
    }

    /// Cap of the memory that received values take, in bytes; at the cap receives wait. Default 64 GiB.
    #[must_use]
    pub fn receive_bytes(mut self, cap: u64) -> Self {
        self.receive_bytes = cap;
        self
    }

    /// Memory is taken in blocks of this many bytes, which are resident from then on; a larger tensor gets a
    /// block of its own. Default 16 MiB.
    #[must_use]
    pub fn block_bytes(mut self, bytes: usize) -> Self {
        self.block_bytes = bytes;
        self
    }

    /// What peers are taken for. Default [`Trust::Cluster`].
    #[must_use]
    pub fn trust(mut self, trust: Trust) -> Self {
        self.trust = trust;
        self
    }

    /// Under [`Trust::Hostile`], cap of the memory that one connection's peer may be lent for values at once, in bytes;
    /// at the cap receives wait, and a value that is longer cannot be received. Memory is taken as it is needed, and
    /// let go of with the connection. Default 1 GiB.
    #[must_use]
    pub fn bounce_bytes(mut self, cap: u64) -> Self {
        self.bounce_bytes = cap;
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

    /// Memory of this worker that one other process may view at once over shared memory, in bytes; above it, it gets
    /// copies. A process that never lets go of its views pins no more. Default a quarter of
    /// [`source_bytes`](Self::source_bytes).
    #[must_use]
    pub fn viewed_bytes_per_peer_max(mut self, bytes: u64) -> Self {
        self.viewed_bytes = Some(bytes);
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

    /// How messages flow. Default [`Mode::Counted`]; [`Mode::Original`] is the protocol of TensorFlow's verbs
    /// plugin, one message in flight per direction.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.parameters.mode = mode;
        self
    }

    /// Receives that may be outstanding at one peer; further ones wait. Default 256. In
    /// mode original each costs one queue-pair receive.
    #[must_use]
    pub fn requests_max(mut self, requests: u32) -> Self {
        self.parameters.requests_max = requests;
        self
    }

    /// Messages and values that may be on their way from one peer at once, counted with two of the protocol's own:
    /// the receives that each connection posts. 4 to 4096, default 256; the smaller of both ends' holds.
    #[must_use]
    pub fn depth(mut self, receives: u32) -> Self {
        self.parameters.depth = receives;
        self
    }

    /// Values that may be on their way to one peer at once. Default 64.
    #[must_use]
    pub fn contents_max(mut self, contents: u32) -> Self {
        self.parameters.contents_max = contents;
        self
    }

    /// Longest tensor that travels inside a message when its receiver does not know its shape, in bytes; what both
    /// ends allow holds. It saves a round trip and costs a copy at each end. Default and most 4096; 0 for none.
    #[must_use]
    pub fn eager_bytes_max(mut self, bytes: u32) -> Self {
        self.parameters.eager_bytes_max = bytes;
        self
    }

    /// Requests that one message may carry when several tensors are asked for at once
    /// ([`Step::recv_many`](crate::Step::recv_many), [`Worker::fetch_many`](crate::Worker::fetch_many)), 1 to 512; the
    /// smaller of both ends' holds. Default 128.
    #[must_use]
    pub fn requests_per_message(mut self, requests: u32) -> Self {
        self.parameters.requests_per_message = requests;
        self
    }

    /// Validates the contents of tensors end to end by a checksum: what was changed on the way, by an adapter, a driver
    /// or memory, ends its receive with [`WorkerError::Corrupted`](crate::WorkerError::Corrupted). Of the wishes of two
    /// workers the stronger holds, so it is enough to set it at one. Costs a pass over the bytes at each end: at the
    /// sender once per tensor, at the receiver each time. Default [`Validation::Off`].
    #[must_use]
    pub fn validation(mut self, validation: Validation) -> Self {
        self.parameters.validation = validation;
        self
    }

    /// Bytes up to which each peer's message ring here may grow; it begins with 16 KiB. Default 256 KiB.
    #[must_use]
    pub fn ring_bytes(mut self, bytes: u32) -> Self {
        self.parameters.ring_bytes = bytes;
        self
    }

    /// Sent values that may wait for their receivers. Default 1 Mi.
    #[must_use]
    pub fn values_max(mut self, values: usize) -> Self {
        self.step_settings.values_max = values;
        self
    }

    /// How long a peer's request for a value of a step waits for this worker to begin the step with
    /// [`Worker::step`](crate::Worker::step); then its receive ends with DEADLINE_EXCEEDED, and the text says what to
    /// do. Default 60 s.
    #[must_use]
    pub fn step_init_timeout(mut self, limit: Duration) -> Self {
        self.step_settings.init_timeout = limit;
        self
    }

    /// Steps that this worker has not begun, and that requests of one peer may wait for at once: a peer may name any
    /// step. A request for one more ends with RESOURCE_EXHAUSTED. Default 1024.
    #[must_use]
    pub fn deferred_steps_max(mut self, steps: usize) -> Self {
        self.step_settings.deferred_steps_max = steps;
        self
    }

    /// What a second send or receive of a key of a step means here: of values that are sent on this worker, also where
    /// peers receive them. Default [`DuplicatePolicy::Queue`].
    #[must_use]
    pub fn duplicates(mut self, policy: DuplicatePolicy) -> Self {
        self.step_settings.duplicates = policy;
        self
    }

    /// Control sessions, dialled and accepted, that may be open at once; one more is refused. Two workers have one,
    /// or two when each dialled the other. Default 1024.
    #[must_use]
    pub fn sessions_max(mut self, sessions: usize) -> Self {
        self.session_caps.in_all = sessions;
        self
    }

    /// Control sessions that may be open at once with workers of one name; one more is refused. More than two are
    /// left over from a peer that was restarted, until their end is noticed. Default 8.
    #[must_use]
    pub fn sessions_per_peer_max(mut self, sessions: usize) -> Self {
        self.session_caps.of_a_peer = sessions;
        self
    }

    /// Data connections that workers of one name may have set up at once, over all of their sessions; one more is
    /// refused. Two workers have one; more are left over from connections whose end has not been noticed. One session
    /// may have 16. Default 16.
    #[must_use]
    pub fn connections_per_peer_max(mut self, connections: usize) -> Self {
        self.session_caps.connections_of_a_peer = connections;
        self
    }

    /// Peers that may be known at once beside those of the cluster and those whose address was given; the one noted
    /// longest ago that nobody uses makes room for another, and without one its session is refused. Default 4096.
    #[must_use]
    pub fn peers_max(mut self, peers: usize) -> Self {
        self.peers_max = peers;
        self
    }

    /// The runtime to spawn on. Default: the tokio runtime this is started on.
    #[must_use]
    pub fn runtime(mut self, runtime: Arc<dyn Runtime>) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// The runtime to serve control sessions on. Default: a thread of its own, so that peers' pings are answered
    /// while user code blocks the runtime that tensors move on.
    #[must_use]
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
    pub fn dangerous_control_plane(mut self, control: Arc<dyn ControlPlane>) -> Self {
        self.control = Some(control);
        self
    }

    /// Watches who owns which memory.
    #[must_use]
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
