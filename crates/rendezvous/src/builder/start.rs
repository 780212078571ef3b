//! From settings to a running worker.

use std::{
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Duration,
};

use protocol::{DeviceName, wire::WireError};
use tokio::sync::{Notify, watch};
use verbs_reactor::{
    Fabric, FabricError, FabricKind, Runtime, TokioRuntime,
    shm::ShmFabric,
    tcp::{TcpConfig, TcpFabric},
    verbs::{SettingError, VerbsError, VerbsFabric, VerbsSettings},
};

use super::{GIB, KEEPALIVE_MIN, LIVENESS_MIN, OpenedFabrics, WorkerBuilder};
use crate::{
    Worker, WorkerError,
    control::{
        ControlPlane, GrpcConfig, GrpcPlane, Secret,
        secret::{read_secret_file, secret_from_environment},
    },
    enclosure::LocalFabric,
    grpc_set_up::GrpcOffer,
    log_quota::LogQuota,
    lost::LostSteps,
    meter::Labels,
    node::Node,
    peers::Peers,
    pools::{PoolCaps, Pools},
    published::PublishedSet,
    sessions::SessionCounts,
    steps::StepTable,
    values::{Values, worker_device},
};

impl WorkerBuilder {
    pub(super) async fn start_within_limits(self) -> Result<Worker, WorkerError> {
        let device = self.check_settings()?;
        let runtime = self.pick_runtime()?;
        let secret = self.pick_secret()?;
        let caps = PoolCaps {
            source_bytes: self.source_bytes,
            receive_bytes: self.receive_bytes,
            ring_bytes: GIB,
            message_bytes: GIB,
            bounce_bytes: self.bounce_bytes,
            block_bytes: self.block_bytes,
        };
        let pools = Pools::new(caps, self.observer.as_ref())?;
        let mut opened = self.open_fabrics(&runtime, &pools)?;
        let (control, accept_secret) = self.pick_control(secret.clone()).await?;
        let grpc = self.pick_grpc(&*control, &mut opened)?;
        let OpenedFabrics { usable: fabrics, unavailable, .. } = opened;
        let incarnation = runtime.random();
        let own = self.control_runtime.or_else(|| control.runtime());
        let control_runtime = own.unwrap_or_else(|| runtime.clone());
        let values = Arc::new(Values {
            worker: self.name.clone(),
            device,
            incarnation,
            steps: StepTable::new(&self.name, self.step_settings, runtime.clone()),
            published: PublishedSet::new(incarnation),
            lost: LostSteps::default(),
        });
        let log = Arc::new(LogQuota::new(runtime.clone()));
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
            grpc,
            unavailable,
            pools,
            values,
            parameters: self.parameters,
            sharing: self.sharing,
            limit: self.limit,
            connect_limit: self.limit.min(Duration::from_secs(10)),
            cluster: self.cluster,
            peers: Mutex::new(Peers::new(self.peers_max)),
            met: Notify::new(),
            refusing: AtomicBool::new(false),
            closing: watch::Sender::new(false),
            closed: watch::Sender::new(false),
            labels: Labels::default(),
            log,
            grace: self.grace,
            sessions: watch::Sender::new(SessionCounts::default()),
            session_caps: self.session_caps,
            name: self.name,
        };
        let node = Arc::new(node);
        control_runtime.spawn("accept sessions", Box::pin(node.clone().accept_sessions()));
        Ok(Worker::new(node))
    }

    /// Gives the worker's name, parsed.
    fn check_settings(&self) -> Result<DeviceName, WorkerError> {
        let device = worker_device(&self.name);
        let device = device.map_err(|status| config("name", &self.name, &status.message))?;
        self.encryption.check(&self.name)?;
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
            (
                "connections_per_peer_max",
                self.session_caps.connections_of_a_peer == 0,
                "no peer could connect here: use at least 1",
            ),
            ("peers_max", self.peers_max == 0, "no peer could be talked to: use at least 1"),
            ("values_max", self.step_settings.values_max == 0, "nothing could be sent: use at least 1"),
            (
                "deferred_steps_max",
                self.step_settings.deferred_steps_max == 0,
                "no receiver could ask before its sender has begun the step: use at least 1",
            ),
            (
                "step_init_timeout",
                self.step_settings.init_timeout.is_zero(),
                "no receiver could ask before its sender has begun the step: use the longest wait you accept",
            ),
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
            (
                "bounce_bytes",
                self.bounce_bytes == 0,
                "nothing could be received: use at least the largest tensor's length",
            ),
        ];
        if let Some((field, _, remedy)) = needed.into_iter().find(|(_, is_zero, _)| *is_zero) {
            return Err(config(field, "0", remedy));
        }
        self.cluster.check()?;
        if self.fabrics.is_empty() && self.local_fabrics.is_none() {
            return Err(config("fabrics", "none", "no tensor could move: name some of shm, tcp and grpc"));
        }
        Ok(device)
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
        let plane = GrpcPlane::bind(self.encryption.of_plane(config))?;
        let accept = plane.secret().cloned();
        Ok((Arc::new(plane), accept))
    }

    fn open_fabrics(&self, runtime: &Arc<dyn Runtime>, pools: &Pools) -> Result<OpenedFabrics, WorkerError> {
        if let Some(own) = &self.local_fabrics {
            let opened = own.iter().map(|fabric| {
                self.encryption.allow(fabric.kind(), fabric.capabilities().encrypted)?;
                LocalFabric::open(fabric, pools, self.trust)
            });
            return Ok(OpenedFabrics { usable: opened.collect::<Result<_, _>>()?, ..Default::default() });
        }
        let mut fabrics = OpenedFabrics::default();
        let rdma = self.rdma_settings()?;
        let is_chosen =
            |kind| self.is_chosen || kind == FabricKind::Verbs && rdma != VerbsSettings::default();
        for &kind in &self.fabrics {
            if kind == FabricKind::Grpc {
                fabrics.grpc_place = Some(fabrics.usable.len());
                continue;
            }
            let opened = self.built_in(kind, runtime, &rdma);
            match opened.and_then(|fabric| LocalFabric::open(&fabric, pools, self.trust)) {
                Ok(fabric) => fabrics.usable.push(fabric),
                Err(error) if self.required => return Err(unfit(kind, error)),
                Err(error) => {
                    if is_chosen(kind) {
                        tracing::warn!(fabric = %kind, %error, "this fabric cannot be used here");
                    } else {
                        tracing::debug!(fabric = %kind, %error, "this fabric cannot be used here");
                    }
                    fabrics.unavailable.push((kind, error.to_string()));
                }
            }
        }
        Ok(fabrics)
    }

    /// What the builder and the environment say. A setting that cannot be is an error also where another fabric
    /// would do: else nobody would see why RDMA is not used.
    fn rdma_settings(&self) -> Result<VerbsSettings, WorkerError> {
        if !self.fabrics.contains(&FabricKind::Verbs) {
            return Ok(VerbsSettings::default());
        }
        let wrong = |error: SettingError| config(error.name(), error.value(), &error.to_string());
        self.rdma.check().map_err(wrong)?;
        Ok(self.rdma.clone().or(VerbsSettings::from_environment().map_err(wrong)?))
    }

    /// Whether tensors may move over the control plane's own calls.
    fn pick_grpc(
        &self,
        control: &dyn ControlPlane,
        fabrics: &mut OpenedFabrics,
    ) -> Result<Option<GrpcOffer>, WorkerError> {
        let Some(place) = fabrics.grpc_place else { return Ok(None) };
        if let Some(calls) = control.tensor_calls() {
            return Ok(Some(GrpcOffer { calls, place }));
        }
        let what = "be used: the control plane that was given carries no tensors; use a GrpcPlane";
        let error = FabricError::Unsupported { kind: FabricKind::Grpc, what };
        if self.required {
            return Err(error.into());
        }
        fabrics.unavailable.push((FabricKind::Grpc, error.to_string()));
        Ok(None)
    }

    fn built_in(
        &self,
        kind: FabricKind,
        runtime: &Arc<dyn Runtime>,
        rdma: &VerbsSettings,
    ) -> Result<Arc<dyn Fabric>, WorkerError> {
        match kind {
            FabricKind::Shm => {
                let viewed = self.viewed_bytes.unwrap_or(self.source_bytes / 4);
                let fabric = ShmFabric::new(runtime.clone())?.with_wait(self.wait);
                Ok(Arc::new(fabric.with_lease_bytes_cap(viewed)))
            }
            FabricKind::Tcp => {
                let host = self.bind.rsplit_once(':').map_or(self.bind.as_str(), |(host, _)| host);
                let ip = host.trim_matches(['[', ']']).parse().ok();
                let ip = ip.unwrap_or(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));
                let config = TcpConfig { bind: ip, ..TcpConfig::default() };
                let fabric = self.encryption.of_tcp(TcpFabric::new(runtime.clone(), config));
                Ok(Arc::new(fabric.with_wait(self.wait)))
            }
            FabricKind::Verbs => {
                self.encryption.allow(kind, false)?;
                let opened = VerbsFabric::open(runtime.clone(), rdma);
                let lacking = |error: VerbsError| config("fabrics", "verbs", &error.to_string());
                Ok(Arc::new(opened.map_err(lacking)?.with_wait(self.wait)))
            }
            other => {
                let what =
                    "be opened by a worker: use shm, verbs, tcp or grpc, or give it with local_fabrics";
                Err(FabricError::Unsupported { kind: other, what }.into())
            }
        }
    }
}

/// Why a fabric that is required cannot be used. A limit of the operating system is named as that.
fn unfit(kind: FabricKind, error: WorkerError) -> WorkerError {
    match error {
        WorkerError::Config { remedy, .. } => {
            let remedy = format!("{remedy}; or allow others with WorkerBuilder::fabrics");
            config("require", kind.name(), &remedy)
        }
        other => other,
    }
}

fn config(field: &'static str, value: &str, remedy: &str) -> WorkerError {
    WorkerError::Config { field, value: value.to_owned(), remedy: remedy.to_owned() }
}
