//! The memory that a peer writes messages into: the message ring, and the slots of ASK and ANSWER.

use std::sync::{Arc, MutexGuard, PoisonError};

use tensorwire_memory::{GrantEnd, Granted, copy::CopyReason};
use tensorwire_protocol::{ChannelError, Destination, RecordSlot, limits::SLOT_BYTES};
use tensorwire_testpoints::sync::Mutex;

use crate::link::{announcer::Announcer, enclosure::Enclosure};

/// The offset of a slot.
pub(crate) fn slot_offset(slot: RecordSlot) -> u64 {
    match slot {
        RecordSlot::Ask => 0,
        RecordSlot::Answer => SLOT_BYTES.into(),
    }
}

/// The message ring and the slots that the peer writes. They are granted until the connection ends. A ring that a
/// larger one replaces is released when the peer has confirmed the move.
#[derive(Debug)]
pub(crate) struct OwnRing(Mutex<LentRings>);

#[derive(Debug)]
struct LentRings {
    ring: Option<Granted>,
    /// The larger ring that was offered.
    offered: Option<Granted>,
    slots: Option<Granted>,
}

impl OwnRing {
    pub(crate) fn new(ring: Granted, slots: Granted) -> Arc<Self> {
        Arc::new(Self(Mutex::new(LentRings { ring: Some(ring), offered: None, slots: Some(slots) })))
    }

    pub(crate) fn read(&self, offset: u32, into: &mut [u8]) -> Result<(), ChannelError> {
        read(self.lock().ring.as_ref(), offset as usize, into)
    }

    pub(crate) fn read_slot(&self, slot: RecordSlot, into: &mut [u8]) -> Result<(), ChannelError> {
        read(self.lock().slots.as_ref(), slot_offset(slot) as usize, into)
    }

    /// Stores a larger ring that will be offered to the peer.
    pub(crate) fn offer(&self, granted: Granted) {
        let mut lent = self.lock();
        if lent.ring.is_some() {
            lent.offered = Some(granted);
        } else {
            // The connection has ended, and this ring was never sent to the peer.
            drop(lent);
            take_back(granted, GrantEnd::NeverSent);
        }
    }

    /// The peer's last message in the old ring has arrived, and the peer writes the offered ring from now on.
    pub(crate) fn moved(&self) {
        let old = {
            let mut lent = self.lock();
            let Some(offered) = lent.offered.take() else { return };
            lent.ring.replace(offered)
        };
        if let Some(old) = old {
            take_back(old, GrantEnd::RingMoved);
        }
    }

    /// Releases all memory. The queue pair is destroyed and drained, or was never connected.
    pub(crate) fn end(&self) {
        let lent = {
            let mut lent = self.lock();
            [lent.ring.take(), lent.offered.take(), lent.slots.take()]
        };
        for granted in lent.into_iter().flatten() {
            take_back(granted, GrantEnd::QueuePairDrained);
        }
    }

    fn lock(&self) -> MutexGuard<'_, LentRings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(granted: Option<&Granted>, offset: usize, into: &mut [u8]) -> Result<(), ChannelError> {
    let granted = granted.ok_or_else(|| ChannelError("the connection is over".to_owned()))?;
    let read = granted.read_at(offset, into, CopyReason::Message);
    read.map_err(|error| ChannelError(error.to_string()))
}

fn take_back(granted: Granted, why: GrantEnd) {
    if let Err(error) = granted.end(why) {
        log!(WARN, %error, "a message ring could not be reclaimed");
    }
}

/// Allocates larger rings for one peer.
#[derive(Debug)]
pub(crate) struct RingMaker {
    pub(crate) enclosure: Arc<Enclosure>,
    pub(crate) announcer: Arc<Announcer>,
}

impl RingMaker {
    /// A ring whose region the peer has confirmed; `None` if there is no memory, or the connection has ended.
    pub(crate) async fn make(&self, ring_bytes: u32) -> Option<(Granted, Destination)> {
        let buffer = self.enclosure.ring.try_alloc(ring_bytes as usize).ok()?;
        let regions = &self.enclosure.regions;
        let region = buffer.block().and_then(|block| regions.get(block.id()))?;
        self.announcer.confirmed(region).await.ok()?;
        let granted = buffer.grant();
        let destination = regions.destination(&granted)?;
        Some((granted, destination))
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
    use tensorwire_memory::{Pool, PoolConfig};
    use tensorwire_verbs_reactor::{Fabric, TokioRuntime};

    use super::*;
    use crate::{
        control::FrameSender,
        link::{
            enclosure::LocalFabric,
            pools::{PoolCaps, Pools},
            session::tests::Sent,
            trust::Trust,
        },
    };

    const RING_BYTES: usize = 4096;

    fn pool() -> Pool {
        Pool::new(PoolConfig { block_bytes: 64 << 10, ..PoolConfig::new("test") }).unwrap()
    }

    /// Lent memory of which every byte is `byte`.
    fn lent(pool: &Pool, bytes: usize, byte: u8) -> Granted {
        let mut buffer = pool.try_alloc(bytes).unwrap();
        buffer.fill(byte);
        buffer.grant()
    }

    /// Bytes in use, and those of them that nobody will ever use again.
    fn held(pool: &Pool) -> (u64, u64) {
        let stats = pool.stats();
        (stats.used_bytes, stats.leaked_bytes)
    }

    fn rings(of: u64) -> u64 {
        of * RING_BYTES as u64
    }

    fn read(ring: &OwnRing) -> Result<u8, ChannelError> {
        let mut byte = [0];
        ring.read(RING_BYTES as u32 - 1, &mut byte).map(|()| byte[0])
    }

    #[test]
    fn a_ring_that_moved_gives_the_old_one_back() {
        let (pool, slots) = (pool(), pool());
        let ring = OwnRing::new(lent(&pool, RING_BYTES, 1), lent(&slots, RING_BYTES, 0));
        ring.moved();
        assert_eq!(read(&ring).unwrap(), 1, "none was offered");
        ring.offer(lent(&pool, RING_BYTES, 2));
        assert_eq!((read(&ring).unwrap(), held(&pool)), (1, (rings(2), 0)));
        ring.moved();
        assert_eq!((read(&ring).unwrap(), held(&pool)), (2, (rings(1), 0)));
        ring.end();
    }

    #[test]
    fn the_end_gives_all_memory_back_and_so_is_a_ring_that_comes_too_late() {
        let (pool, slots) = (pool(), pool());
        let ring = OwnRing::new(lent(&pool, RING_BYTES, 1), lent(&slots, RING_BYTES, 0));
        ring.offer(lent(&pool, RING_BYTES, 2));
        ring.end();
        assert_eq!((held(&pool), held(&slots)), ((0, 0), (0, 0)));
        ring.offer(lent(&pool, RING_BYTES, 3));
        assert_eq!(held(&pool), (0, 0), "no peer will write it");
        ring.moved();
        assert!(read(&ring).unwrap_err().0.contains("the connection is over"));
        assert!(ring.read_slot(RecordSlot::Ask, &mut [0]).is_err());
    }

    #[test]
    fn slots_lie_one_behind_the_other() {
        let slot = usize::try_from(SLOT_BYTES).unwrap();
        let (pool, slots) = (pool(), pool());
        let mut buffer = slots.try_alloc(2 * slot).unwrap();
        buffer[..slot].fill(1);
        buffer[slot..].fill(2);
        let ring = OwnRing::new(lent(&pool, RING_BYTES, 0), buffer.grant());
        for (which, byte) in [(RecordSlot::Ask, 1), (RecordSlot::Answer, 2)] {
            let mut read = vec![0; slot];
            ring.read_slot(which, &mut read).unwrap();
            assert_eq!(read, vec![byte; slot]);
        }
        ring.end();
    }

    fn maker() -> RingMaker {
        let runtime = Arc::new(TokioRuntime::current().unwrap());
        let fabric: Arc<dyn Fabric> = Arc::new(TcpFabric::new(runtime.clone(), TcpConfig::default()));
        let caps = PoolCaps {
            source_bytes: 1 << 20,
            receive_bytes: 1 << 20,
            ring_bytes: 1 << 20,
            message_bytes: 1 << 20,
            bounce_bytes: 1 << 20,
            block_bytes: 64 << 10,
        };
        let fabric = LocalFabric::open(&fabric, &Pools::new(caps, None).unwrap(), Trust::Cluster).unwrap();
        let sender: Arc<dyn FrameSender> = Arc::new(Sent::default());
        let announcer = Arc::new(Announcer::new(1, &sender, runtime, &[]));
        RingMaker { enclosure: fabric.enclosure().unwrap(), announcer }
    }

    #[tokio::test]
    async fn a_larger_ring_is_made_once_the_peer_knows_its_region() {
        let maker = maker();
        let mut making = Box::pin(maker.make(RING_BYTES as u32));
        assert!(making.as_mut().now_or_never().is_none(), "the peer has not confirmed the region");
        let [region] = maker.enclosure.regions.all()[..] else { panic!("one block is enough") };
        maker.announcer.confirm(region.region.0);
        let (granted, destination) = making.await.unwrap();
        assert_eq!((destination.region, destination.capacity), (region.region.0, RING_BYTES as u64));
        granted.end(GrantEnd::NeverSent).unwrap();
        assert!(maker.make(2 << 20).await.is_none(), "there is no memory for it");
    }

    #[tokio::test]
    async fn no_larger_ring_is_made_once_the_connection_is_over() {
        let maker = maker();
        maker.announcer.fail("it is over");
        assert!(maker.make(RING_BYTES as u32).await.is_none());
        assert_eq!(held(&maker.enclosure.ring), (0, 0));
    }
}
