//! The memory that a peer writes messages into: the message ring, and the slots of ASK and ANSWER.

use std::sync::Arc;

use tensorwire_memory::{GrantEnd, Granted};
use tensorwire_protocol::Destination;

use crate::peer_memory::{announcer::Announcer, enclosure::Enclosure, lent::Lent};

/// A message ring, or the record slots, of a connection that is being set up. The peer may know its region. It is
/// dropped after its queue pair, or if no queue pair was connected, so that nothing can write it any more.
#[derive(Debug)]
pub(crate) struct UnusedRing(Option<Granted>);

impl UnusedRing {
    pub(crate) fn new(granted: Granted) -> Self {
        Self(Some(granted))
    }

    /// The ring, which the protocol holds until its connection is drained.
    pub(crate) fn take(mut self) -> Option<Lent> {
        self.0.take().map(Lent::ring)
    }
}

impl Drop for UnusedRing {
    fn drop(&mut self) {
        if let Some(granted) = self.0.take()
            && let Err(error) = granted.end(GrantEnd::QueuePairDrained)
        {
            log!(WARN, %error, "a message ring could not be reclaimed");
        }
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
    use tensorwire_fabric::{Fabric, TokioRuntime};
    use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
    use tensorwire_memory::{HugePages, Pool, PoolConfig};

    use super::*;
    use crate::{
        control::FrameSender,
        peer_memory::{
            enclosure::LocalFabric,
            pools::{PoolCaps, Pools},
            trust::Trust,
        },
        session::tests::Sent,
    };

    const RING_BYTES: usize = 4096;

    #[test]
    fn a_ring_that_no_connection_uses_goes_back_and_one_in_use_does_not() {
        let pool = Pool::new(PoolConfig { block_bytes: 64 << 10, ..PoolConfig::new("test") }).unwrap();
        let used = || (pool.stats().used_bytes, pool.stats().leaked_bytes);
        let ring = || UnusedRing::new(pool.try_alloc(RING_BYTES).unwrap().grant());
        drop(ring());
        assert_eq!(used(), (0, 0));
        let in_use = ring().take().unwrap();
        assert_eq!(used(), (RING_BYTES as u64, 0));
        in_use.end_drained();
        assert_eq!(used(), (0, 0));
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
            huge_pages: HugePages::Never,
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
        let [region] = maker.enclosure.regions.of_pools()[..] else { panic!("one block is enough") };
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
        assert_eq!(maker.enclosure.ring.stats().used_bytes, 0);
    }
}
