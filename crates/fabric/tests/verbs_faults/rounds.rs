//! Many connections one after the other, without leaks.

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{Access, Immediate, QueuePair, RemoteRange, RemoteRegion, Runtime, timeout};
use tensorwire_memory::{BlockId, Buf};

use super::{SETUP, held::Held};
use crate::contract::{
    Flavour, bounded,
    pair::{Grant, Pair, RegisteredPool, STEP_LIMIT, immediate, pattern},
    patience,
};

const ROUNDS: u32 = 100;
const BYTES: usize = 70_000;
const BLOCK: u64 = 1 << 20;

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn a_hundred_rounds_of_connect_transfer_close_leave_nothing() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let pair = Pair::new(SETUP, runtime.clone()).await;
        let pools = [&pair.left.source, &pair.left.receive, &pair.right.receive];
        // From here on none of them takes another block.
        drop(pools.map(|pool| pool.filled(BYTES, 0)));
        let exposed = Exposed::new(&pair);
        let before = Held::now();
        is_counted(&pair, &exposed, &before).await;
        is_back(&runtime, &before).await;
        for number in 1..=ROUNDS {
            let round = Round::begin(&pair).await;
            round.transfer(number, &exposed).await;
            round.end().await;
        }
        is_back(&runtime, &before).await;
        for pool in pools {
            assert_eq!((pool.pool.stats().used_bytes, pool.pool.stats().leaked_bytes), (0, 0));
        }
    });
}

/// Checks that the counts show the objects of a running round, so that they would show a leak.
async fn is_counted(pair: &Pair, exposed: &Exposed, before: &Held) {
    let round = Round::begin(pair).await;
    round.transfer(0, exposed).await;
    let held = Held::now();
    let expected = Held {
        regions: before.regions + 1,
        blocks: before.blocks + 1,
        queue_pairs: before.queue_pairs + 2,
        completion_queues: before.completion_queues + 2,
        ..held.clone()
    };
    assert_eq!(held, expected, "before: {before:?}");
    // A completion channel at each side, and the block; how many mappings a queue pair has depends on the driver.
    assert!(held.descriptors >= before.descriptors + 3, "{held:?}, before: {before:?}");
    assert!(held.queues > before.queues, "{held:?}, before: {before:?}");
    round.end().await;
}

/// Waits until the counts return to `before`: the driver of the last connection may still be running.
pub(crate) async fn is_back(runtime: &Arc<dyn Runtime>, before: &Held) {
    let back = async {
        while Held::now() != *before {
            runtime.sleep(Duration::from_millis(10)).await;
        }
    };
    let ended = timeout(&**runtime, STEP_LIMIT * patience(), back).await;
    assert!(ended.is_ok(), "now: {:?}, before: {before:?}", Held::now());
}

/// A buffer at right that left may read.
struct Exposed {
    bytes: Buf,
    region: RemoteRegion,
    _exposure: tensorwire_memory::Exposure,
    _pool: RegisteredPool,
}

impl Exposed {
    fn new(pair: &Pair) -> Self {
        let pool = RegisteredPool::new(&pair.right.domain, "readable", Access::READABLE, BLOCK);
        let bytes = pool.filled(BYTES, 5);
        let region = pool.region(bytes.block().unwrap());
        Self { _exposure: bytes.expose(), bytes, region, _pool: pool }
    }

    fn range(&self) -> RemoteRange {
        let RemoteRegion { region, generation, .. } = self.region;
        RemoteRange { region, generation, offset: self.bytes.offset() as u64, length: BYTES as u64 }
    }
}

/// A connection, with a block of right's that is registered while the connection exists.
struct Round<'a> {
    pair: &'a Pair,
    left: QueuePair,
    right: QueuePair,
    pool: RegisteredPool,
    block: BlockId,
}

impl<'a> Round<'a> {
    async fn begin(pair: &'a Pair) -> Self {
        let (left, right) = pair.connect_again().await;
        let pool = RegisteredPool::new(&pair.right.domain, "of a round", Access::RECEIVE, BLOCK);
        let block = pool.filled(1, 0).block().unwrap().id();
        Self { pair, left, right, pool, block }
    }

    /// A write into either pool, and a read.
    async fn transfer(&self, number: u32, exposed: &Exposed) {
        self.write(self.pool.grant(BYTES), number).await;
        self.write(self.pair.right.receive.grant(BYTES), number).await;
        self.left.add_remote_region(exposed.region);
        let into = self.pair.left.receive.pool.try_alloc(BYTES).unwrap();
        let read = self.pair.step("a read", self.left.read(exposed.range(), into)).await;
        assert!(read.unwrap()[..] == exposed.bytes[..]);
    }

    async fn write(&self, grant: Grant, number: u32) {
        self.left.add_remote_region(grant.region);
        let source = self.pair.left.source.filled(BYTES, number.into());
        let write = self.left.write_imm(source, grant.range, Immediate(number));
        let (written, arrival) = self.pair.step("a write", join(write, self.right.next_arrival())).await;
        written.unwrap();
        assert_eq!(immediate(arrival.unwrap()), (number, BYTES as u64));
        assert!(grant.take()[..] == pattern(BYTES, number.into())[..]);
    }

    async fn end(self) {
        self.pair.step("the closes", join(self.left.close(), self.right.close())).await;
        self.pair.right.domain.deregister(self.block);
    }
}
