//! From settings to a running worker.

use std::{
    net::{IpAddr, Ipv4Addr, ToSocketAddrs},
    sync::{Arc, Mutex},
    time::Duration,
};

use protocol::{DeviceName, InvalidDeviceName, wire::WireError};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{DataPort, TcpConfig, TcpFabric};
use tokio::sync::{Notify, watch};
use verbs_reactor::{
    Fabric, FabricError, FabricKind, Runtime, TokioRuntime,
    verbs::{SettingError, VerbsError, VerbsFabric, VerbsSettings},
};

use super::{GIB, KEEPALIVE_MIN, LIVENESS_MIN, OpenedFabrics, WorkerBuilder};
use crate::{
    control::{
        ControlPlane, GrpcConfig, GrpcPlane, Secret, host_and_port,
        name::{client_name, worker_name},
        secret::{read_secret_file, secret_from_environment},
    },
    error::WorkerError,
    link::{
        enclosure::LocalFabric,
        meter::Labels,
        node::Node,
        peers::Peers,
        pools::{PoolCaps, Pools},
        session_counts::SessionCounter,
    },
    log::quota::LogQuota,
    values::{Values, lost_steps::LostSteps, published::PublishedSet, steps::StepTable},
    worker::{Defaults, Worker, metrics::describe},
};

impl WorkerBuilder {
    pub(super) async fn start_within_limits(self) -> Result<Worker, WorkerError> {
        self.check_settings()?;
        let runtime = self.pick_runtime()?;
        let (name, device) = self.pick_name(&*runtime)?;
        let secret = self.pick_secret()?;
        let caps = PoolCaps {
            source_bytes: self.memory.source_bytes,
            receive_bytes: self.memory.receive_bytes,
            ring_bytes: GIB,
            message_bytes: GIB,
            bounce_bytes: self.memory.bounce_bytes,
            block_bytes: self.memory.block_bytes,
        };
        let pools = Pools::new(caps, self.observer.as_ref())?;
        let (control, accept_secret) = self.pick_control(secret.clone()).await?;
        let opened = self.open_fabrics(&runtime, &pools, control.data_port().as_ref());
        let OpenedFabrics { usable: fabrics, unavailable } = opened?;
        let incarnation = runtime.random();
        let own = self.control_runtime.or_else(|| control.runtime());
        let control_runtime = own.unwrap_or_else(|| runtime.clone());
        let values = Arc::new(Values {
            worker: name.clone(),
            device,
            incarnation,
            steps: StepTable::new(&name, self.limits.of_steps(self.duplicates), runtime.clone()),
            published: PublishedSet::new(incarnation),
            lost: LostSteps::default(),
        });
        let log = Arc::new(LogQuota::new(runtime.clone()));
        describe();
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
            parameters: self.flow.parameters(self.validation),
            connect_limit: self.limit.min(Duration::from_secs(10)),
            cluster: self.cluster,
            peers: Mutex::new(Peers::new(self.limits.peers_max)),
            met: Notify::new(),
            closing: watch::Sender::new(false),
            labels: Labels::default(),
            log,
            sessions: SessionCounter::new(self.limits.of_sessions()),
            name,
        };
        let node = Arc::new(node);
        control_runtime.spawn("accept sessions", Box::pin(node.clone().accept_sessions()));
        let defaults = Defaults { sharing: self.sharing, limit: self.limit, grace: self.grace };
        Ok(Worker::new(node, defaults))
    }

    /// The worker's name, and the same parsed.
    fn pick_name(&self, runtime: &dyn Runtime) -> Result<(String, DeviceName), WorkerError> {
        let name = match &self.name {
            Some(name) => worker_name(name).map_err(|remedy| config("name", name, &remedy))?,
            None => {
                let of_certificate = self.encryption.name(runtime.random() as u32)?;
                of_certificate.unwrap_or_else(|| client_name(runtime))
            }
        };
        self.encryption.check(&name)?;
        let device =
            name.parse().map_err(|error: InvalidDeviceName| config("name", &name, &error.to_string()))?;
        Ok((name, device))
    }

    fn check_settings(&self) -> Result<(), WorkerError> {
        self.flow.parameters(self.validation).check().map_err(|problem| match problem {
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
            ("sessions_max", self.limits.sessions_max == 0, "no peer could be talked to: use at least 1"),
            (
                "sessions_per_peer_max",
                self.limits.sessions_per_peer_max == 0,
                "no peer could be talked to: use at least 1",
            ),
            (
                "connections_per_peer_max",
                self.limits.connections_per_peer_max == 0,
                "no peer could connect here: use at least 1",
            ),
            ("peers_max", self.limits.peers_max == 0, "no peer could be talked to: use at least 1"),
            ("values_max", self.limits.values_max == 0, "nothing could be sent: use at least 1"),
            (
                "deferred_steps_max",
                self.limits.deferred_steps_max == 0,
                "no receiver could ask before its sender has begun the step: use at least 1",
            ),
            (
                "step_init_timeout",
                self.limits.step_init_timeout.is_zero(),
                "no receiver could ask before its sender has begun the step: use the longest wait you accept",
            ),
            (
                "block_bytes",
                self.memory.block_bytes == 0,
                "memory is taken in blocks: use 16777216, or at least 4096",
            ),
            (
                "source_bytes",
                self.memory.source_bytes == 0,
                "nothing could be published or sent: use at least block_bytes",
            ),
            (
                "receive_bytes",
                self.memory.receive_bytes == 0,
                "nothing could be received: use at least block_bytes",
            ),
            (
                "bounce_bytes",
                self.memory.bounce_bytes == 0,
                "nothing could be received: use at least the largest tensor's length",
            ),
        ];
        if let Some((field, _, remedy)) = needed.into_iter().find(|(_, is_zero, _)| *is_zero) {
            return Err(config(field, "0", remedy));
        }
        self.cluster.check()?;
        if self.fabrics.is_empty() && self.local_fabrics.is_none() {
            return Err(config("fabrics", "none", "no tensor could move: name some of shm, verbs and tcp"));
        }
        Ok(())
    }

    fn pick_runtime(&self) -> Result<Arc<dyn Runtime>, WorkerError> {
        let runtime: Arc<dyn Runtime> = match (&self.runtime, TokioRuntime::current()) {
            (Some(runtime), _) => runtime.clone(),
            (None, Some(runtime)) => Arc::new(runtime),
            (None, None) => {
                let remedy = "start the worker inside a tokio runtime, or give it one";
                return Err(config("runtime", "none", remedy));
            }
        };
        runtime.check_random().map_err(|error| {
            let remedy = format!(
                "it gives no random numbers, of which secrets are made ({error}): allow getrandom(2) to this process, or \
                 give it /dev/urandom"
            );
            config("runtime", &format!("{runtime:?}"), &remedy)
        })?;
        Ok(runtime)
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

    fn open_fabrics(
        &self,
        runtime: &Arc<dyn Runtime>,
        pools: &Pools,
        port: Option<&DataPort>,
    ) -> Result<OpenedFabrics, WorkerError> {
        if let Some(own) = &self.local_fabrics {
            let opened = own.iter().map(|fabric| {
                self.encryption.allow(fabric.kind(), fabric.capabilities().encrypted)?;
                LocalFabric::open(fabric, pools, self.trust)
            });
            return Ok(OpenedFabrics { usable: opened.collect::<Result<_, _>>()?, unavailable: Vec::new() });
        }
        let mut fabrics = OpenedFabrics::default();
        let rdma = self.rdma_settings()?;
        let is_chosen =
            |kind| self.is_chosen || kind == FabricKind::VERBS && rdma != VerbsSettings::default();
        for &kind in &self.fabrics {
            let opened = self.built_in(kind, runtime, &rdma, port);
            match opened.and_then(|fabric| LocalFabric::open(&fabric, pools, self.trust)) {
                Ok(fabric) => fabrics.usable.push(fabric),
                Err(error) if kind == FabricKind::TCP && self.data_bind.is_some() => return Err(error),
                Err(error) if self.required => return Err(unfit(kind, error)),
                Err(error) => {
                    if is_chosen(kind) {
                        log!(WARN, fabric = %kind, %error, "this fabric cannot be used here");
                    } else {
                        log!(DEBUG, fabric = %kind, %error, "this fabric cannot be used here");
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
        if !self.fabrics.contains(&FabricKind::VERBS) {
            return Ok(VerbsSettings::default());
        }
        let wrong = |error: SettingError| config(error.name(), error.value(), &error.to_string());
        self.rdma.check().map_err(wrong)?;
        Ok(self.rdma.clone().or(VerbsSettings::from_environment().map_err(wrong)?))
    }

    /// The tcp fabric: at the port of the control plane, unless that has none for data, or an address of its own is named.
    fn tcp(&self, runtime: &Arc<dyn Runtime>, port: Option<&DataPort>) -> Result<TcpFabric, WorkerError> {
        let own = |bind| {
            let config = TcpConfig { bind, ..TcpConfig::default() };
            self.encryption.of_tcp(TcpFabric::new(runtime.clone(), config))
        };
        if let Some(address) = &self.data_bind {
            let remedy = "use HOST:PORT with an address of this host, for instance 10.1.0.5:0";
            let wrong = || config("data_bind", address, remedy);
            let bind = host_and_port(address).ok().and_then(|parts| parts.to_socket_addrs().ok()?.next());
            return Ok(own(bind.ok_or_else(wrong)?).listen()?);
        }
        match port {
            // A plane that was given may protect its connections otherwise than this worker is to.
            Some(port) if self.control.is_none() || port.encrypts() == self.encryption.is_on() => {
                Ok(TcpFabric::at_port(runtime.clone(), TcpConfig::default(), port.clone()))
            }
            _ => {
                let ip = host_and_port(&self.bind).ok().and_then(|(host, _)| host.parse().ok());
                Ok(own((ip.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0).into()))
            }
        }
    }

    fn built_in(
        &self,
        kind: FabricKind,
        runtime: &Arc<dyn Runtime>,
        rdma: &VerbsSettings,
        port: Option<&DataPort>,
    ) -> Result<Arc<dyn Fabric>, WorkerError> {
        match kind {
            FabricKind::SHM => {
                let viewed = self.memory.viewed_bytes_per_peer_max.unwrap_or(self.memory.source_bytes / 4);
                let fabric = ShmFabric::new(runtime.clone())?.with_wait(self.wait);
                let fabric = fabric.with_lease_bytes_cap(viewed);
                Ok(Arc::new(match self.memory.imported_bytes_per_connection_max {
                    Some(cap) => fabric.with_imported_bytes_cap(cap),
                    None => fabric,
                }))
            }
            FabricKind::TCP => {
                let fabric = self.tcp(runtime, port)?;
                Ok(Arc::new(fabric.with_wait(self.wait)))
            }
            FabricKind::VERBS => {
                self.encryption.allow(kind, false)?;
                let opened = VerbsFabric::open(runtime.clone(), rdma);
                let lacking = |error: VerbsError| config("fabrics", "verbs", &error.to_string());
                Ok(Arc::new(opened.map_err(lacking)?.with_wait(self.wait)))
            }
            other => {
                let what = "be opened by a worker: use shm, verbs or tcp, or give it with local_fabrics";
                Err(FabricError::Unsupported { kind: other, what }.into())
            }
        }
    }
}

/// Why a fabric that is required cannot be used. A limit of the operating system is named as that.
fn unfit(kind: FabricKind, error: WorkerError) -> WorkerError {
    match error {
        WorkerError::Config { remedy, .. } => {
            let remedy = format!("{remedy}; or allow others with the setting `fabrics`");
            config("require", kind.name(), &remedy)
        }
        other => other,
    }
}

fn config(field: &'static str, value: &str, remedy: &str) -> WorkerError {
    WorkerError::Config { field, value: value.to_owned(), remedy: remedy.to_owned() }
}
