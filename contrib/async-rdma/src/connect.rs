//! Preparing and connecting one side.

use std::{
    alloc::Layout,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_rdma::{
    Gid, LocalMr, LocalMrReadAccess, MrAccess, MrToken, QueuePairEndpoint, QueuePairEndpointBuilder, Rdma,
};
use tensorwire_fabric::{
    BoxFuture, ConnectParams, Connected, ConnectionData, FabricError, Prepared, QueuePairConfig, RegionTable,
    Runtime, timeout,
};

use crate::{
    fabric::KIND,
    frame::{SLOT, SLOTS},
    link::AsyncRdmaLink,
    pump::{Ground, Pump},
};

/// Size of an area whose content is never read: an acknowledgement is only its immediate, but the crate cannot write
/// zero bytes.
const ACKNOWLEDGEMENT: usize = 8;
const LANDING: usize = SLOTS * SLOT + ACKNOWLEDGEMENT;

const VERSION: u8 = 1;
const BYTES: usize = 39;
/// The deadline of the crate's tokens, which is checked only if the crate's agent made the region.
const FOR_EVER: Duration = Duration::from_secs(1 << 33);

/// The data that each end needs about the other. As connection data, version 1, little-endian:
///
/// | bytes | content |
/// | --- | --- |
/// | 0 | version |
/// | 1..5 | queue pair number |
/// | 5..7 | local identifier |
/// | 7..23 | GID |
/// | 23..31 | address of the landing area |
/// | 31..35 | its key |
/// | 35..39 | its access rights, as the crate has them |
#[derive(Debug, Clone, Copy, PartialEq)]
struct Endpoint {
    number: u32,
    local_identifier: u16,
    gid: [u8; 16],
    address: u64,
    key: u32,
    access: u32,
}

impl Endpoint {
    fn encode(&self) -> ConnectionData {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.push(VERSION);
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.local_identifier.to_le_bytes());
        bytes.extend(self.gid);
        bytes.extend(self.address.to_le_bytes());
        bytes.extend(self.key.to_le_bytes());
        bytes.extend(self.access.to_le_bytes());
        ConnectionData(bytes)
    }

    fn decode(data: &ConnectionData) -> Result<Self, String> {
        let bytes: &[u8; BYTES] =
            data.0.as_slice().try_into().map_err(|_| format!("{} bytes instead of {BYTES}", data.0.len()))?;
        let [version, n0, n1, n2, n3, l0, l1, rest @ ..] = *bytes;
        if version != VERSION {
            return Err(format!("the peer's version is {version}, ours is {VERSION}: run the same release"));
        }
        let (gid, rest) = rest.split_first_chunk::<16>().ok_or("no GID")?;
        let (address, rest) = rest.split_first_chunk::<8>().ok_or("no address")?;
        let (key, access) = rest.split_first_chunk::<4>().ok_or("no key")?;
        let access = access.first_chunk::<4>().ok_or("no rights")?;
        Ok(Self {
            number: u32::from_le_bytes([n0, n1, n2, n3]),
            local_identifier: u16::from_le_bytes([l0, l1]),
            gid: *gid,
            address: u64::from_le_bytes(*address),
            key: u32::from_le_bytes(*key),
            access: u32::from_le_bytes(*access),
        })
    }

    fn queue_pair(&self) -> Result<QueuePairEndpoint, FabricError> {
        QueuePairEndpointBuilder::default()
            .qp_num(self.number)
            .lid(self.local_identifier)
            .gid(Gid::from_raw(self.gid))
            .build()
            .map_err(|error| refused("reading the peer's data", error.to_string()))
    }

    /// The part of the landing area that starts `offset` bytes in.
    fn part(&self, offset: usize, len: usize) -> MrToken {
        let addr = (self.address as usize).wrapping_add(offset);
        let ddl = SystemTime::UNIX_EPOCH + FOR_EVER;
        MrToken { addr, len, rkey: self.key, ddl, access: self.access }
    }
}

fn refused(step: &'static str, detail: String) -> FabricError {
    FabricError::Connect { kind: KIND, step, detail }
}

/// A queue pair that is not connected, with its landing area.
pub(crate) struct AsyncRdmaPrepared {
    rdma: Rdma,
    landing: LocalMr,
    runtime: Arc<dyn Runtime>,
    table: Arc<RegionTable>,
    config: QueuePairConfig,
    here: Endpoint,
}

impl fmt::Debug for AsyncRdmaPrepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncRdmaPrepared").field("config", &self.config).finish_non_exhaustive()
    }
}

impl AsyncRdmaPrepared {
    pub(crate) fn new(
        rdma: Rdma,
        runtime: Arc<dyn Runtime>,
        table: Arc<RegionTable>,
        config: QueuePairConfig,
    ) -> Result<Self, FabricError> {
        let landing = allocate(&rdma, LANDING)?;
        let token = landing.token_with_timeout(Duration::ZERO);
        let token = token.ok_or_else(|| refused("naming the landing area", "no token".to_owned()))?;
        let endpoint = rdma.get_qp_endpoint();
        let here = Endpoint {
            number: *endpoint.qp_num(),
            local_identifier: *endpoint.lid(),
            gid: *endpoint.gid().as_raw(),
            address: landing.addr() as u64,
            key: token.rkey,
            access: token.access,
        };
        Ok(Self { rdma, landing, runtime, table, config, here })
    }

    async fn attach(mut self, peer: Endpoint) -> Result<Connected, FabricError> {
        let failed = |error| FabricError::device(KIND, "connecting the queue pair", error);
        self.rdma.ibv_connect(peer.queue_pair()?).await.map_err(failed)?;
        let slots = (0..SLOTS).map(|slot| Ok((allocate(&self.rdma, SLOT)?, peer.part(slot * SLOT, SLOT))));
        let slots = slots.collect::<Result<Vec<_>, FabricError>>()?;
        let acknowledgement =
            (allocate(&self.rdma, ACKNOWLEDGEMENT)?, peer.part(SLOTS * SLOT, ACKNOWLEDGEMENT));
        let (link, queue_pair) = AsyncRdmaLink::new(self.table.clone(), self.config);
        let ground = Ground {
            link,
            table: self.table,
            runtime: self.runtime.clone(),
            rdma: Arc::new(self.rdma),
            landing: Arc::new(self.landing),
        };
        let pump = Pump::new(ground, slots, acknowledgement);
        Ok(Connected { queue_pair, driver: Box::pin(pump.run()) })
    }
}

fn allocate(rdma: &Rdma, bytes: usize) -> Result<LocalMr, FabricError> {
    let layout = Layout::from_size_align(bytes, 64).map_err(std::io::Error::other);
    layout
        .and_then(|layout| rdma.alloc_local_mr(layout))
        .map_err(|error| FabricError::device(KIND, "allocating memory with async-rdma", error))
}

impl Prepared for AsyncRdmaPrepared {
    fn connection_data(&self) -> ConnectionData {
        self.here.encode()
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        Box::pin(async move {
            let peer = Endpoint::decode(&params.peer)
                .map_err(|detail| refused("reading the peer's data", detail))?;
            let runtime = self.runtime.clone();
            let limit_ms = u64::try_from(params.limit.as_millis()).unwrap_or(u64::MAX);
            let late = |_| FabricError::ConnectTimeout { kind: KIND, limit_ms };
            timeout(&*runtime, params.limit, self.attach(peer)).await.map_err(late)?
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: Endpoint = Endpoint {
        number: 0x00AB_CDEF,
        local_identifier: 3,
        gid: [9; 16],
        address: 1 << 40,
        key: 7,
        access: 15,
    };

    #[test]
    fn an_end_survives_the_control_plane() {
        assert_eq!(Endpoint::decode(&END.encode()), Ok(END));
    }

    #[test]
    fn damaged_data_are_refused_with_what_is_wrong() {
        let good = END.encode().0;
        assert!(Endpoint::decode(&ConnectionData(good[1..].to_vec())).unwrap_err().contains("bytes"));
        let other = [&[2], &good[1..]].concat();
        assert!(Endpoint::decode(&ConnectionData(other)).unwrap_err().contains("version"));
    }
}
