//! The fabric and its domains.

use std::sync::Arc;

use async_rdma::{ConnectionType, MRManageStrategy, MTU, Rdma, RdmaBuilder};
use tensorwire_memory::{Block, BlockId};
use tensorwire_fabric::{
    Access, Capabilities, Domain, Fabric, FabricError, FabricKind, Prepared, QueuePairConfig, RegionTable,
    RemoteRegion, Runtime,
};

use crate::connect::AsyncRdmaPrepared;

/// Work requests of one connection: frames, an acknowledgement, and a farewell.
const SEND_REQUESTS: u32 = 32;
/// The crate keeps ten receives posted, regardless of this number.
const RECEIVE_REQUESTS: u32 = 32;
const COMPLETIONS: u32 = 128;
/// 4.096 µs · 2¹⁴, six times: a lost peer is noticed in less than two seconds.
const ACKNOWLEDGEMENT_TIMEOUT: u8 = 14;
const RETRIES: u8 = 6;

/// Not `verbs`: the two fabrics have different wire formats, so they cannot connect to each other.
pub(crate) const KIND: FabricKind = FabricKind::new("async-rdma");

/// This fabric splits writes internally: a frame takes no place in the send queue.
pub(crate) const CAPABILITIES: Capabilities = {
    let mut capabilities = Capabilities::WRITES;
    capabilities.vectored = true;
    capabilities
};

/// The largest packet of a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PathMtu {
    /// 1024 bytes, which every port supports.
    #[default]
    Bytes1024,
    /// 4096 bytes.
    Bytes4096,
}

/// The settings of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The device's name; by default the first.
    pub device: Option<String>,
    /// The index of the port's address that connections use. Default 1: on RoCE usually the IPv4 address.
    pub gid_index: usize,
    /// The largest packet. The crate does not ask the port.
    pub mtu: PathMtu,
}

impl Default for Settings {
    fn default() -> Self {
        Self { device: None, gid_index: 1, mtu: PathMtu::default() }
    }
}

/// RDMA on one device through async-rdma. Queue pairs are prepared and connected on a tokio runtime.
#[derive(Debug)]
pub struct AsyncRdmaFabric {
    runtime: Arc<dyn Runtime>,
    settings: Settings,
}

impl AsyncRdmaFabric {
    /// A fabric whose connections are driven on `runtime`. The crate's builder opens the device again for each
    /// connection.
    pub fn new(runtime: Arc<dyn Runtime>, settings: Settings) -> Self {
        Self { runtime, settings }
    }
}

impl Fabric for AsyncRdmaFabric {
    fn kind(&self) -> FabricKind {
        KIND
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn reach(&self) -> Vec<u8> {
        b"async-rdma".to_vec()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        let table = Arc::new(RegionTable::new(&*self.runtime));
        Ok(Arc::new(AsyncRdmaDomain {
            runtime: self.runtime.clone(),
            settings: self.settings.clone(),
            table,
        }))
    }
}

/// Regions are checked in software: the device knows only the landing areas.
#[derive(Debug)]
struct AsyncRdmaDomain {
    runtime: Arc<dyn Runtime>,
    settings: Settings,
    table: Arc<RegionTable>,
}

impl Domain for AsyncRdmaDomain {
    fn kind(&self) -> FabricKind {
        KIND
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        Ok(self.table.register(&*self.runtime, block, access))
    }

    fn deregister(&self, block: BlockId) {
        self.table.deregister(block);
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let rdma = open(&self.settings)?;
        let prepared = AsyncRdmaPrepared::new(rdma, self.runtime.clone(), self.table.clone(), config)?;
        Ok(Box::new(prepared))
    }
}

fn open(settings: &Settings) -> Result<Rdma, FabricError> {
    let mtu = match settings.mtu {
        PathMtu::Bytes1024 => MTU::MTU1024,
        PathMtu::Bytes4096 => MTU::MTU4096,
    };
    let builder = RdmaBuilder::default()
        .set_conn_type(ConnectionType::RCIBV)
        // The crate's other allocator, jemalloc with an arena for each connection, fails an assertion once two
        // connections allocate on one thread: the thread's cache hands out memory of one arena for the other.
        .set_mr_strategy(MRManageStrategy::Raw)
        .set_gid_index(settings.gid_index)
        .set_mtu(mtu)
        .set_cq_size(COMPLETIONS)
        .set_qp_max_send_wr(SEND_REQUESTS)
        .set_qp_max_recv_wr(RECEIVE_REQUESTS)
        .set_timeout(ACKNOWLEDGEMENT_TIMEOUT)
        .set_retry_cnt(RETRIES);
    let builder = match &settings.device {
        Some(device) => builder.set_dev(device),
        None => builder,
    };
    builder.build().map_err(|error| {
        let what = "opening the RDMA device with async-rdma";
        FabricError::device(KIND, what, error)
    })
}
