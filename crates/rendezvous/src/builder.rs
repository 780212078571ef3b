//! Making a worker.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use memory::MemoryObserver;
use protocol::{
    Mode, Sharing, Validation,
    wire::{WireError, control::Parameters},
};
use tokio::sync::watch;
use verbs_reactor::{
    Fabric, FabricError, FabricKind, Runtime, TokioRuntime, Wait,
    shm::ShmFabric,
    tcp::{TcpConfig, TcpFabric},
};

use crate::{
    ClusterSpec, Worker, WorkerError,
    control::{
        ControlPlane, GrpcConfig, GrpcPlane, Secret,
        secret::{read_secret_file, secret_from_environment},
    },
    lost::LostSteps,
    node::{Node, Peers},
    pools::{LocalFabric, PoolCaps, Pools},
    published::PublishedSet,
    sessions::{SessionCaps, SessionCounts},
    table::StepTable,
    values::{Values, worker_device},
};

/// Settings of a [`Worker`]. The defaults are right for a worker on one host; a worker that other hosts reach
/// needs [`bind`](Self::bind) and a secret.
#[derive(Debug, Clone)]
pub struct WorkerBuilder {
    name: String,
    bind: String,
    cluster: ClusterSpec,
    fabrics: Vec<FabricKind>,
    required: bool,
    secret: Option<Secret>,
    secret_file: Option<PathBuf>,
    source_bytes: u64,
    receive_bytes: u64,
    block_bytes: usize,
    sharing: Sharing,
    limit: Duration,
    liveness: Duration,
    wait: Wait,
    parameters: Parameters,
    values_max: usize,
    session_caps: SessionCaps,
    runtime: Option<Arc<dyn Runtime>>,
    control_runtime: Option<Arc<dyn Runtime>>,
    local_fabrics: Option<Vec<Arc<dyn Fabric>>>,
    control: Option<Arc<dyn ControlPlane>>,
    observer: Option<Arc<dyn MemoryObserver>>,
}

const GIB: u64 = 1 << 30;

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

impl WorkerBuilder {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            bind: "127.0.0.1:0".to_owned(),
            cluster: ClusterSpec::new(),
            fabrics: vec![FabricKind::Shm, FabricKind::Tcp],
            required: false,
            secret: None,
            secret_file: None,
            source_bytes: 64 * GIB,
            receive_bytes: 64 * GIB,
            block_bytes: 16 << 20,
            sharing: Sharing::Copy,
            limit: Duration::from_secs(60),
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
            values_max: 1 << 20,
            session_caps: SessionCaps { in_all: 1024, of_a_peer: 8 },
            runtime: None,
            control_runtime: None,
            local_fabrics: None,
            control: None,
            observer: None,
        }
    }

    /// Where the control plane listens, `host:port`. Default `127.0.0.1:0`: loopback, any free port. Anything
    /// that other hosts reach needs a secret.
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

    /// The fabrics to try, best first. Default: shm, tcp. Which one a peer uses is logged once and told by
    /// [`Worker::peers`].
    #[must_use]
    pub fn fabrics(mut self, kinds: impl IntoIterator<Item = FabricKind>) -> Self {
        self.fabrics = kinds.into_iter().collect();
        self.required = false;
        self
    }

    /// Exactly this fabric: if it cannot be used, that is an error, not a fallback.
    #[must_use]
    pub fn require(mut self, kind: FabricKind) -> Self {
        self.fabrics = vec![kind];
        self.required = true;
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
        self.values_max = values;
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

    async fn start_within_limits(self) -> Result<Worker, WorkerError> {
        self.check_settings()?;
        let runtime = self.pick_runtime()?;
        let secret = self.pick_secret()?;
        let caps = PoolCaps {
            source_bytes: self.source_bytes,
            receive_bytes: self.receive_bytes,
            ring_bytes: GIB,
            message_bytes: GIB,
            block_bytes: self.block_bytes,
        };
        let pools = Pools::new(caps, self.observer.as_ref())?;
        let OpenedFabrics { usable: fabrics, unavailable } = self.open_fabrics(&runtime, &pools)?;
        let (control, accept_secret) = self.pick_control(secret.clone()).await?;
        let incarnation = runtime.random();
        let own = self.control_runtime.or_else(|| control.runtime());
        let control_runtime = own.unwrap_or_else(|| runtime.clone());
        let values = Arc::new(Values {
            worker: self.name.clone(),
            incarnation,
            steps: StepTable::new(self.values_max),
            published: PublishedSet::new(),
            lost: LostSteps::default(),
        });
        let node = Node {
            incarnation,
            address: control.local_address(),
            runtime,
            control_runtime: control_runtime.clone(),
            liveness: self.liveness,
            control,
            secret,
            accept_secret,
            fabrics,
            unavailable,
            pools,
            values,
            parameters: self.parameters,
            sharing: self.sharing,
            limit: self.limit,
            connect_limit: self.limit.min(Duration::from_secs(10)),
            cluster: self.cluster,
            peers: Mutex::new(Peers::default()),
            closing: watch::Sender::new(false),
            sessions: watch::Sender::new(SessionCounts::default()),
            session_caps: self.session_caps,
            name: self.name,
        };
        let node = Arc::new(node);
        control_runtime.spawn("accept sessions", Box::pin(node.clone().accept_sessions()));
        Ok(Worker::new(node))
    }

    fn check_settings(&self) -> Result<(), WorkerError> {
        worker_device(&self.name).map_err(|status| config("name", &self.name, &status.message))?;
        self.parameters.check().map_err(|problem| match problem {
            WireError::OutOfRange { field, value, minimum, maximum } => {
                config(field, &value.to_string(), &format!("use {minimum} to {maximum}"))
            }
            other => config("parameters", "as set", &other.to_string()),
        })?;
        if self.liveness < LIVENESS_MIN {
            let remedy = "use at least 100 ms: a peer that is only scheduled late would count as lost";
            return Err(config("liveness", &format!("{:?}", self.liveness), remedy));
        }
        let needed = [
            (
                "timeout",
                self.limit.is_zero(),
                "every operation would fail at once: use the longest wait you accept",
            ),
            ("sessions_max", self.session_caps.in_all == 0, "no peer could be talked to: use at least 1"),
            (
                "sessions_per_peer_max",
                self.session_caps.of_a_peer == 0,
                "no peer could be talked to: use at least 1",
            ),
            ("values_max", self.values_max == 0, "nothing could be sent: use at least 1"),
            (
                "block_bytes",
                self.block_bytes == 0,
                "memory is taken in blocks: use 16777216, or at least 4096",
            ),
            (
                "source_bytes",
                self.source_bytes == 0,
                "nothing could be published or sent: use at least block_bytes",
            ),
            ("receive_bytes", self.receive_bytes == 0, "nothing could be received: use at least block_bytes"),
        ];
        if let Some((field, _, remedy)) = needed.into_iter().find(|(_, is_zero, _)| *is_zero) {
            return Err(config(field, "0", remedy));
        }
        if self.fabrics.is_empty() && self.local_fabrics.is_none() {
            return Err(config("fabrics", "none", "no tensor could move: name shm, tcp or both"));
        }
        Ok(())
    }

    fn pick_runtime(&self) -> Result<Arc<dyn Runtime>, WorkerError> {
        if let Some(runtime) = &self.runtime {
            return Ok(runtime.clone());
        }
        let runtime = TokioRuntime::current();
        let remedy = "start the worker inside a tokio runtime, or give it one";
        Ok(Arc::new(runtime.ok_or_else(|| config("runtime", "none", remedy))?))
    }

    fn pick_secret(&self) -> Result<Option<Secret>, WorkerError> {
        if let Some(secret) = &self.secret {
            return Ok(Some(secret.clone()));
        }
        if let Some(path) = &self.secret_file {
            return Ok(Some(read_secret_file(path)?));
        }
        Ok(if self.control.is_none() { secret_from_environment()? } else { None })
    }

    async fn pick_control(
        &self,
        secret: Option<Secret>,
    ) -> Result<(Arc<dyn ControlPlane>, Option<Secret>), WorkerError> {
        if let Some(control) = &self.control {
            let accept = match secret {
                Some(secret) => Some(secret),
                None => control.ambient_secret(&control.local_address()).await?,
            };
            return Ok((control.clone(), accept));
        }
        // The worker's own pings decide; the transport's are for sessions that are not served yet.
        let keepalive = self.liveness.max(KEEPALIVE_MIN);
        let config = GrpcConfig::new(self.bind.clone()).secret(secret).keepalive(keepalive, keepalive);
        let plane = GrpcPlane::bind(config)?;
        let accept = plane.secret().cloned();
        Ok((Arc::new(plane), accept))
    }

    fn open_fabrics(&self, runtime: &Arc<dyn Runtime>, pools: &Pools) -> Result<OpenedFabrics, WorkerError> {
        if let Some(own) = &self.local_fabrics {
            let opened = own.iter().map(|fabric| LocalFabric::open(&**fabric, pools));
            return Ok(OpenedFabrics { usable: opened.collect::<Result<_, _>>()?, unavailable: Vec::new() });
        }
        let mut fabrics = OpenedFabrics::default();
        for &kind in &self.fabrics {
            match self.built_in(kind, runtime).and_then(|fabric| LocalFabric::open(&*fabric, pools)) {
                Ok(fabric) => fabrics.usable.push(fabric),
                Err(error) if self.required => return Err(error),
                Err(error) => {
                    tracing::warn!(fabric = %kind, %error, "this fabric cannot be used here");
                    fabrics.unavailable.push((kind, error.to_string()));
                }
            }
        }
        Ok(fabrics)
    }

    fn built_in(&self, kind: FabricKind, runtime: &Arc<dyn Runtime>) -> Result<Arc<dyn Fabric>, WorkerError> {
        match kind {
            FabricKind::Shm => Ok(Arc::new(ShmFabric::new(runtime.clone())?.with_wait(self.wait))),
            FabricKind::Tcp => {
                let host = self.bind.rsplit_once(':').map_or(self.bind.as_str(), |(host, _)| host);
                let ip = host.trim_matches(['[', ']']).parse().ok();
                let ip = ip.unwrap_or(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));
                let config = TcpConfig { bind: ip, ..TcpConfig::default() };
                Ok(Arc::new(TcpFabric::new(runtime.clone(), config).with_wait(self.wait)))
            }
            other => {
                Err(FabricError::Unsupported { kind: other, what: "be used by a worker yet: use shm or tcp" }
                    .into())
            }
        }
    }
}

fn config(field: &'static str, value: &str, remedy: &str) -> WorkerError {
    WorkerError::Config { field, value: value.to_owned(), remedy: remedy.to_owned() }
}
