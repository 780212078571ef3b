//! A fabric alone: two connected queue pairs in one process.

#![allow(clippy::expect_used)] // a benchmark that cannot run stops

use std::{sync::Arc, time::Duration};

use tensorwire_fabric::{
    Access, ConnectParams, Domain, Fabric, Immediate, QueuePair, QueuePairConfig, RegisteredPool,
    RemoteRange, Role, Runtime,
};
use tensorwire_memory::{Buf, Granted, Pool, PoolConfig};

/// Depths of the queue pairs.
pub const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 64, receive_depth: 256 };

/// Bytes of a write.
const SMALL: usize = 8;

/// Two connected queue pairs of one process, and a write of 8 bytes from the first to the second.
#[derive(Debug)]
pub struct FabricPair {
    writer: QueuePair,
    reader: QueuePair,
    bytes: Buf,
    target: RemoteRange,
    _granted: Granted,
    _domains: [Arc<dyn Domain>; 2],
}

impl FabricPair {
    /// Connects two domains of `fabric`.
    pub async fn connect(fabric: &dyn Fabric, runtime: &dyn Runtime) -> Self {
        let domains = [(); 2].map(|()| fabric.open_domain().expect("a domain"));
        let pool = |domain, access| {
            let pool = Pool::new(PoolConfig::new("bench")).expect("a pool");
            RegisteredPool::new(pool, domain, access).expect("a pool")
        };
        let (source, receive) = (pool(&domains[0], Access::LOCAL), pool(&domains[1], Access::RECEIVE));
        let bytes = source.pool.try_alloc(SMALL).expect("a buffer").freeze();
        let granted = receive.pool.try_alloc(SMALL).expect("a buffer").grant();
        let ends = domains.each_ref().map(|domain| domain.prepare(DEPTHS).expect("a side"));
        let data = ends.each_ref().map(|end| end.connection_data());
        let [first, second] = ends;
        let limit = Duration::from_secs(10);
        let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit };
        let [first_data, second_data] = data;
        let (writer, reader) = futures::join!(
            first.connect(params(second_data, Role::Dialer)),
            second.connect(params(first_data, Role::Acceptor))
        );
        let [writer, reader] =
            [writer, reader].map(|connected| connected.expect("a connection").spawn(runtime));
        let region = granted.block().and_then(|block| receive.region(block.id())).expect("a region");
        writer.add_remote_region(region);
        let (region, generation) = (region.region, region.generation);
        let target =
            RemoteRange { region, generation, offset: granted.offset() as u64, length: SMALL as u64 };
        Self { writer, reader, bytes, target, _granted: granted, _domains: domains }
    }

    /// Writes, takes the arrival, and takes the completion.
    pub async fn write(&self) {
        let write = self.writer.write_imm(self.bytes.clone(), self.target, Immediate(7));
        self.reader.next_arrival().await.expect("an arrival");
        write.await.expect("a completion");
    }

    /// Sends a write that is complete when it is posted, and takes the arrival: half a round trip.
    pub async fn write_inline(&self) {
        let posted = self.writer.post_inline(&self.bytes, Some(&self.target), Some(Immediate(7)));
        posted.expect("room").expect("a write");
        self.reader.next_arrival().await.expect("an arrival");
    }
}
