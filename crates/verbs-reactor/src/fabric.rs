//! The fabric on an RDMA device.

use std::sync::Arc;

use tensorwire_fabric::{Capabilities, Domain, Fabric, FabricError, FabricKind, Runtime, Spinner, Wait};

use super::{
    GidEntry, GidKind, LinkLayer, Mtu, Port, Rdma, VerbsError, adapter::Adapter, domain::VerbsDomain,
    error::fabric_error, opened::piece_bytes,
};

/// RDMA on one port of one device. Connections are made on a tokio runtime with its I/O driver enabled.
///
/// When the port goes down or the device fails, all its connections end with
/// [`LossCause::DeviceLost`](tensorwire_fabric::LossCause::DeviceLost), all memory is deregistered, and the device is
/// closed, so that it can be removed. Each later connection attempt checks whether the port is active again, at most
/// once a second. If it is, the fabric opens the device again and registers all memory with it; if not, the attempt
/// fails with [`VerbsError::DeviceLost`].
#[derive(Debug)]
pub struct VerbsFabric {
    adapter: Arc<Adapter>,
    spinner: Arc<Spinner>,
}

impl VerbsFabric {
    /// Opens the device and port that `settings` name. If they name none, it chooses among the active ports of all
    /// devices:
    ///
    /// 1. by the kind of the port's best address: RoCE v2 with an IPv4 address or InfiniBand's own, then RoCE v2 with
    ///    a routable IPv6 address, then RoCE v2 with a link-local one (RoCE v1 only if it is named);
    /// 2. by the device's name, in alphabetical order;
    /// 3. by the port's number, then the address's index.
    ///
    /// The choice and the other candidates are logged at level INFO.
    ///
    /// # Errors
    /// Any [`VerbsError`]. Each names the missing part.
    pub fn open(runtime: Arc<dyn Runtime>, settings: &Rdma) -> Result<Self, VerbsError> {
        let adapter = Adapter::open(runtime, settings)?;
        Ok(Self { adapter, spinner: Spinner::new(Wait::default()) })
    }

    /// Sets how drivers wait, for domains opened after this. A driver that spins polls its completion queue. At most
    /// one driver of this fabric spins at a time.
    #[must_use]
    pub fn with_wait(mut self, wait: Wait) -> Self {
        self.spinner = Spinner::new(wait);
        self
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.adapter.device
    }

    /// The port that connections use, at the time when the device was opened.
    pub fn port(&self) -> Port {
        self.adapter.port
    }

    /// The source address of connections, at the time when the device was opened.
    pub fn source(&self) -> GidEntry {
        self.adapter.source
    }

    /// Whether users' own memory is registered without being pinned (see [`OnDemandPaging`](super::OnDemandPaging)), at
    /// the time when the device was opened.
    pub fn pages_on_demand(&self) -> bool {
        self.adapter.on_demand
    }

    /// The largest packet on this side, at the time when the device was opened.
    pub fn mtu(&self) -> Mtu {
        self.adapter.mtu
    }
}

impl Fabric for VerbsFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::VERBS
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.adapter.capabilities;
        capabilities.piece_bytes_max = piece_bytes(&self.adapter.port).into();
        capabilities
    }

    /// The kind of network, and for InfiniBand the subnet. Only connecting shows whether two RoCE ports reach each
    /// other.
    fn reach(&self) -> Vec<u8> {
        match (self.adapter.port.link, self.adapter.source.kind) {
            (LinkLayer::InfiniBand, _) => [b"infiniband-", &self.adapter.source.gid.0[..8]].concat(),
            (_, GidKind::RoceV1) => b"roce-v1".to_vec(),
            _ => b"roce-v2".to_vec(),
        }
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        let domain = VerbsDomain::new(self.adapter.clone(), self.spinner.clone())
            .map_err(|error| fabric_error(&error))?;
        Ok(Arc::new(domain))
    }
}
