//! The fabrics that a worker opens. Each is a feature of this crate.

#[cfg(feature = "tcp")]
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::Arc;

#[cfg(any(feature = "shm", feature = "tcp", feature = "verbs"))]
use tensorwire_fabric::Fabric;
use tensorwire_fabric::{FabricError, FabricKind, Runtime};
#[cfg(feature = "shm")]
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::DataPort;
#[cfg(feature = "tcp")]
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
#[cfg(feature = "verbs")]
use tensorwire_verbs_reactor::{Rdma, SettingError, VerbsError, VerbsFabric};

use super::{AUTO, OpenedFabrics, WorkerBuilder, start::config};
#[cfg(feature = "tcp")]
use crate::control::host_and_port;
use crate::{
    error::WorkerError,
    peer_memory::{enclosure::LocalFabric, pools::Pools},
};

impl WorkerBuilder {
    /// Requires the fabric of the cluster's protocol, unless the user has chosen fabrics.
    pub(super) fn with_fabric_of_cluster(self) -> Self {
        match self.cluster.fabric() {
            Some(kind) if !self.is_chosen => self.require(kind),
            _ => self,
        }
    }

    #[cfg_attr(not(all(feature = "shm", feature = "tcp", feature = "verbs")), allow(unused_variables))]
    pub(super) fn open_fabrics(
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
        // An invalid RDMA setting is an error even if another fabric could be used: otherwise the reason why RDMA is
        // not used would go unnoticed.
        #[cfg(feature = "verbs")]
        let rdma = self.rdma_settings()?;
        #[cfg(feature = "verbs")]
        let names_device = rdma != Rdma::default();
        #[cfg(not(feature = "verbs"))]
        let names_device = false;
        let is_chosen = |kind| self.is_chosen || kind == FabricKind::VERBS && names_device;
        for &kind in &self.fabrics {
            let opened = match kind {
                #[cfg(feature = "shm")]
                FabricKind::SHM => self.shm(runtime),
                #[cfg(feature = "tcp")]
                FabricKind::TCP => self.open_tcp(runtime, port),
                #[cfg(feature = "verbs")]
                FabricKind::VERBS => self.verbs(runtime, &rdma),
                other => Err(not_built_in(other)),
            };
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

    /// The RDMA settings of the builder and the environment.
    #[cfg(feature = "verbs")]
    fn rdma_settings(&self) -> Result<Rdma, WorkerError> {
        if !self.fabrics.contains(&FabricKind::VERBS) {
            return Ok(Rdma::default());
        }
        let wrong = |error: SettingError| config(error.name(), error.value(), &error.to_string());
        self.rdma.check().map_err(wrong)?;
        Ok(self.rdma.clone().or(Rdma::from_environment().map_err(wrong)?))
    }

    #[cfg(feature = "shm")]
    fn shm(&self, runtime: &Arc<dyn Runtime>) -> Result<Arc<dyn Fabric>, WorkerError> {
        let viewed = self.memory.viewed_bytes_per_peer_max.unwrap_or(self.memory.source_bytes / 4);
        let fabric = ShmFabric::new(runtime.clone())?.with_wait(self.wait).with_lease_bytes_cap(viewed);
        Ok(Arc::new(match self.memory.imported_bytes_per_connection_max {
            Some(cap) => fabric.with_imported_bytes_cap(cap),
            None => fabric,
        }))
    }

    #[cfg(feature = "verbs")]
    fn verbs(&self, runtime: &Arc<dyn Runtime>, rdma: &Rdma) -> Result<Arc<dyn Fabric>, WorkerError> {
        self.encryption.allow(FabricKind::VERBS, false)?;
        let opened = VerbsFabric::open(runtime.clone(), rdma);
        let lacking = |error: VerbsError| config("fabrics", "verbs", &error.to_string());
        Ok(Arc::new(opened.map_err(lacking)?.with_wait(self.wait)))
    }

    #[cfg(feature = "tcp")]
    fn open_tcp(
        &self,
        runtime: &Arc<dyn Runtime>,
        port: Option<&DataPort>,
    ) -> Result<Arc<dyn Fabric>, WorkerError> {
        Ok(Arc::new(self.tcp_at(runtime, port)?.with_wait(self.wait)))
    }

    /// The tcp fabric. It uses the port of the control plane, unless `data_bind` is set or the plane does not accept
    /// data connections.
    #[cfg(feature = "tcp")]
    fn tcp_at(&self, runtime: &Arc<dyn Runtime>, port: Option<&DataPort>) -> Result<TcpFabric, WorkerError> {
        let (congestion, silence_limit) = (self.congestion.clone(), self.liveness);
        let base = TcpConfig { congestion, silence_limit, ..TcpConfig::default() };
        let own = |bind| {
            let config = TcpConfig { bind, ..base.clone() };
            self.encryption.of_tcp(TcpFabric::new(runtime.clone(), config))
        };
        if let Some(address) = &self.data_bind {
            let remedy = "use HOST:PORT with an address of this host, for instance 10.1.0.5:0";
            let wrong = || config("data_bind", address, remedy);
            let bind = host_and_port(address).ok().and_then(|parts| parts.to_socket_addrs().ok()?.next());
            return Ok(own(bind.ok_or_else(wrong)?).listen()?);
        }
        match port {
            // A custom plane's port is used only if it encrypts exactly when this worker does.
            Some(port) if self.control.is_none() || port.encrypts() == self.encryption.is_on() => {
                Ok(TcpFabric::at_port(runtime.clone(), base.clone(), port.clone()))
            }
            _ => {
                let ip = host_and_port(&self.bind).ok().and_then(|(host, _)| host.parse().ok());
                Ok(own((ip.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), 0).into()))
            }
        }
    }
}

/// The error for a kind of fabric that a worker cannot open.
fn not_built_in(kind: FabricKind) -> WorkerError {
    if AUTO.contains(&kind) {
        let remedy = format!("this program was built without it: enable the feature `{kind}` of tensorwire");
        return config("fabrics", kind.name(), &remedy);
    }
    let what = "be opened by a worker: use shm, verbs or tcp, or give it with local_fabrics";
    FabricError::Unsupported { kind, what }.into()
}

/// The error of a required fabric that cannot be used.
fn unfit(kind: FabricKind, error: WorkerError) -> WorkerError {
    match error {
        WorkerError::Config { remedy, .. } => {
            let remedy = format!("{remedy}; or allow others with the setting `fabrics`");
            config("require", kind.name(), &remedy)
        }
        other => other,
    }
}
