//! One side of a queue pair with its memory: both processes have one.

use std::{collections::VecDeque, mem, sync::Arc, time::Duration};

use tensorwire::fabric::FabricError;
use tensorwire_fabric::{
    Access, ConnectParams, ConnectionData, Domain, Immediate, Operation, Prepared, QueuePair,
    QueuePairConfig, RegionGeneration, RegionId, RegisteredPool, RemoteRange, RemoteRegion, Role,
    TokioRuntime,
};
use tensorwire_memory::{Buf, Granted, MemoryError, Pool, PoolConfig};

use super::{control::SideData, error::BenchError, fabrics::Opened, limits::perftest::WRITES_OPEN};

const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 64, receive_depth: 1024 };
/// Bytes of each of the writes that together move one value: the same as a segment of the ring algorithm.
const PIECE_BYTES: usize = 256 << 10;
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// One side before it is connected.
#[derive(Debug)]
pub(super) struct Unconnected {
    prepared: Box<dyn Prepared>,
    source: Pool,
    granted: Granted,
    data: SideData,
    // The domain's regions live as long as the domain.
    domain: Arc<dyn Domain>,
}

/// A connected side: writes `bytes` bytes into memory that the other process has granted.
#[derive(Debug)]
pub(super) struct Side {
    queue_pair: QueuePair,
    payload: Buf,
    target: RemoteRange,
    _granted: Granted,
    _domain: Arc<dyn Domain>,
}

impl Unconnected {
    /// Makes one side for writes of `bytes` bytes, with its memory registered.
    pub(super) fn prepare(opened: &Opened, bytes: usize) -> Result<Self, BenchError> {
        let domain = opened.fabric.open_domain()?;
        let source = registered(&domain, Access::LOCAL, bytes)?.pool;
        let receive = registered(&domain, Access::RECEIVE, bytes)?;
        let mut buffer = receive.pool.try_alloc(bytes)?;
        buffer.fill(1);
        let granted = buffer.grant();
        let region =
            granted.block().and_then(|block| receive.region(block.id())).ok_or(FabricError::Closed)?;
        let prepared = domain.prepare(DEPTHS)?;
        let data = SideData {
            connection: prepared.connection_data().0,
            region: region.region.0,
            generation: region.generation.0,
            region_bytes: region.length,
            base: region.base,
            key: region.key,
            offset: granted.offset() as u64,
        };
        Ok(Self { prepared, source, granted, data, domain })
    }

    /// The data that the other side needs.
    pub(super) fn data(&self) -> SideData {
        self.data.clone()
    }

    /// Connects to the side that `peer` describes.
    pub(super) async fn connect(self, peer: SideData, role: Role) -> Result<Side, BenchError> {
        let runtime =
            TokioRuntime::current().ok_or_else(|| BenchError::Unexpected("no runtime".to_owned()))?;
        let params = ConnectParams {
            peer: ConnectionData(peer.connection),
            role,
            peer_address: None,
            limit: CONNECT_LIMIT,
        };
        let queue_pair = self.prepared.connect(params).await?.spawn(&runtime);
        let (region, generation) = (RegionId(peer.region), RegionGeneration(peer.generation));
        queue_pair.add_remote_region(RemoteRegion {
            region,
            generation,
            base: peer.base,
            length: peer.region_bytes,
            key: peer.key,
        });
        let bytes = self.granted.length();
        let mut payload = self.source.try_alloc(bytes)?;
        payload.fill(7);
        let target = RemoteRange { region, generation, offset: peer.offset, length: bytes as u64 };
        let payload = payload.freeze();
        Ok(Side { queue_pair, payload, target, _granted: self.granted, _domain: self.domain })
    }
}

impl Side {
    /// Bytes of a write.
    pub(super) fn bytes(&self) -> usize {
        self.payload.len()
    }

    /// Starts one write with immediate.
    pub(super) fn write(&self) -> Operation {
        self.queue_pair.write_imm(self.payload.clone(), self.target, Immediate(1))
    }

    /// Like [`write`](Self::write). `None` if the write is complete already, because the fabric has copied the bytes.
    fn write_inline(&self) -> Option<Operation> {
        match self.queue_pair.post_inline(&self.payload, Some(&self.target), Some(Immediate(1))) {
            Some(Ok(())) => None,
            // The write fails for the same reason.
            Some(Err(_)) | None => Some(self.write()),
        }
    }

    /// Writes, and waits for the answer.
    pub(super) async fn round_trip(&self) -> Result<(), BenchError> {
        let write = self.write_inline();
        self.arrival().await?;
        // The write is complete by now, because its answer has come.
        match write {
            Some(write) => Ok(write.await?),
            None => Ok(()),
        }
    }

    /// Writes `count` times, as many under way as perftest has; only the last one has an immediate. Calls `ended` at
    /// the end of each.
    pub(super) async fn write_many(&self, count: u64, mut ended: impl FnMut()) -> Result<(), BenchError> {
        let quietly = || self.queue_pair.write(self.payload.clone(), self.target);
        let writes = (1..=count).map(|number| if number == count { self.write() } else { quietly() });
        windowed(writes, &mut ended).await
    }

    /// Writes all bytes `count` times in pieces, while the other side does the same, and ends when both have finished.
    pub(super) async fn write_both_ways(&self, count: u64) -> Result<(), BenchError> {
        let writes = (0..count).flat_map(|_| self.pieces());
        windowed(writes, &mut || {}).await?;
        self.meet().await
    }

    /// Starts a write without immediate of each piece.
    fn pieces(&self) -> impl Iterator<Item = Operation> + '_ {
        (0..self.bytes()).step_by(PIECE_BYTES).filter_map(|start| {
            let piece = self.payload.slice(start..self.bytes().min(start + PIECE_BYTES))?;
            let (offset, length) = (self.target.offset + start as u64, piece.len() as u64);
            Some(self.queue_pair.write(piece, RemoteRange { offset, length, ..self.target }))
        })
    }

    /// Waits until the other side calls this, too.
    pub(super) async fn meet(&self) -> Result<(), BenchError> {
        self.queue_pair.notify(Immediate(1)).await?;
        self.arrival().await
    }

    /// Waits for one write of the other side.
    pub(super) async fn arrival(&self) -> Result<(), BenchError> {
        self.queue_pair.next_arrival().await?;
        Ok(())
    }

    /// Answers each of `count` writes with a write.
    pub(super) async fn echo(&self, count: u64) -> Result<(), BenchError> {
        let mut previous: Option<Operation> = None;
        for _ in 0..count {
            self.arrival().await?;
            // The write is complete by now, because its answer has come.
            if let Some(previous) = mem::replace(&mut previous, self.write_inline()) {
                previous.await?;
            }
        }
        // The last write is not awaited: over some fabrics it completes only when the other process polls again, and that
        // process may wait for this one first.
        Ok(())
    }

    /// Takes `count` writes, then answers one.
    pub(super) async fn take(&self, count: u64) -> Result<(), BenchError> {
        for _ in 0..count {
            self.arrival().await?;
        }
        // Posted at once, because nothing else is outstanding. Not awaited, for the reason in `echo`.
        drop(self.queue_pair.notify(Immediate(2)));
        Ok(())
    }
}

/// Awaits `writes`, as many under way as perftest has, and calls `ended` at the end of each.
async fn windowed(
    writes: impl Iterator<Item = Operation>,
    ended: &mut impl FnMut(),
) -> Result<(), BenchError> {
    let mut open = VecDeque::<Operation>::with_capacity(WRITES_OPEN as usize);
    for write in writes {
        open.push_back(write);
        if open.len() as u64 == WRITES_OPEN
            && let Some(oldest) = open.pop_front()
        {
            oldest.await?;
            ended();
        }
    }
    for rest in open {
        rest.await?;
        ended();
    }
    Ok(())
}

/// A pool of one block for a buffer of `bytes` bytes.
fn registered(domain: &Arc<dyn Domain>, access: Access, bytes: usize) -> Result<RegisteredPool, MemoryError> {
    let config = PoolConfig { block_bytes: bytes, ..PoolConfig::new("measured") };
    let cap_bytes = config.cap_bytes.max(2 * bytes as u64);
    RegisteredPool::new(Pool::new(PoolConfig { cap_bytes, ..config })?, domain, access)
}
