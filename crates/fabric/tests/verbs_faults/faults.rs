//! Queue pairs that fail, and others that must not fail with them.

use futures::future::{join, join_all};
use tensorwire_fabric::{
    Access, FabricError, Immediate, QueuePair, QueuePairConfig, RemoteRange, RemoteRegion,
};
use tensorwire_memory::BlockId;

use super::SETUP;
use crate::contract::{
    Flavour, bounded,
    pair::{Grant, Pair, RegisteredPool, end_of},
};

const DEEP: QueuePairConfig = QueuePairConfig { send_depth: 64, receive_depth: 64 };

fn is_refused<T>(result: &Result<T, FabricError>) -> bool {
    matches!(result, Err(FabricError::RemoteRefused { .. }))
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_verbs_64_queued_writes_end_once_each_with_the_cause() {
    for flavour in [Flavour::CurrentThread, Flavour::TwoWorkers] {
        bounded(flavour, |runtime| async move {
            let pair = Pair::with_depths(SETUP, runtime, DEEP).await;
            for bad in [0, 1, 20, 63] {
                let (left_end, right_end) = pair.connect_with(DEEP).await;
                let good = pair.right.receive.grant(4096);
                left_end.add_remote_region(good.region);
                let claim = RemoteRegion { key: good.region.key ^ 1, region: other(&good), ..good.region };
                left_end.add_remote_region(claim);
                let wrong = RemoteRange { region: claim.region, ..good.range };
                let write = |index: u32| {
                    let range = if index == bad { wrong } else { good.range };
                    left_end.write_imm(pair.left.source.filled(4096, 9), range, Immediate(index))
                };
                let writes: Vec<_> = (0..64).map(write).collect();
                let results = pair.step("the writes", join_all(writes)).await;
                for (index, result) in results.iter().enumerate() {
                    let expected = if index < bad as usize { result.is_ok() } else { is_refused(result) };
                    assert!(expected, "write {index} of 64, with {bad} bad: {result:?}");
                }
                assert_eq!(pair.left.source.pool.stats().used_bytes, 0, "a buffer was kept");
                let arrived = arrived(&pair, &right_end).await;
                assert_eq!(arrived, (0..bad).collect::<Vec<_>>());
                assert!(matches!(end_of(&pair.runtime, &left_end).await, FabricError::RemoteRefused { .. }));
                pair.step("the closes", join(left_end.close(), right_end.close())).await;
                drop(good.take());
            }
            pair.works(&pair.to_right, &pair.to_left).await;
        });
    }
}

fn other(grant: &Grant) -> tensorwire_fabric::RegionId {
    tensorwire_fabric::RegionId(grant.region.region.0 + 1000)
}

/// The immediates that arrive before the connection ends.
async fn arrived(pair: &Pair, queue_pair: &QueuePair) -> Vec<u32> {
    let mut values = Vec::new();
    while let Ok(arrival) = pair.step("an arrival or the end", queue_pair.next_arrival()).await {
        values.push(crate::contract::pair::immediate(arrival).0);
    }
    values
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_verbs_stale_and_foreign_keys_end_one_connection_only() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let pair = Pair::new(SETUP, runtime.clone()).await;
        let both = Access { remote_read: true, ..Access::RECEIVE };
        let stale = RegisteredPool::new(&pair.right.domain, "stale", both, 1 << 20);
        let grant = stale.grant(4096);
        pair.right.domain.deregister(block_of(&grant));
        refused(&pair, &grant).await;
        drop(grant.take());

        let other = (SETUP.fabric)(runtime.clone()).open_domain().unwrap();
        let foreign = RegisteredPool::new(&other, "foreign", both, 1 << 20);
        let grant = foreign.grant(4096);
        refused(&pair, &grant).await;
        drop(grant.take());
        let key_of_left = RegisteredPool::new(&pair.left.domain, "left's own", both, 1 << 20);
        let grant = key_of_left.grant(4096);
        let key = grant.region.key;
        drop(grant.take());
        let mut strange = pair.right.receive.grant(4096);
        if strange.region.key != key {
            strange.region.key = key;
            refused(&pair, &strange).await;
        }
        drop(strange.take());
    });
}

fn block_of(grant: &Grant) -> BlockId {
    grant.granted.block().unwrap().id()
}

/// Writes to `grant` and reads of it are refused, each on a connection of its own, while another one moves bytes.
async fn refused(pair: &Pair, grant: &Grant) {
    let before = grant.bytes();
    for reads in [false, true] {
        let (left_end, right_end) = pair.connect_again().await;
        left_end.add_remote_region(grant.region);
        let operation = async {
            if reads {
                let into = pair.left.receive.pool.try_alloc(4096).unwrap();
                left_end.read(grant.range, into).await.map(drop)
            } else {
                left_end.write_imm(pair.left.source.filled(4096, 1), grant.range, Immediate(1)).await
            }
        };
        let both = join(operation, pair.works(&pair.to_right, &pair.to_left));
        let (result, ()) = pair.step("the operation", both).await;
        assert!(is_refused(&result), "reads: {reads}, {result:?}");
        let (left, right) = join(end_of(&pair.runtime, &left_end), end_of(&pair.runtime, &right_end)).await;
        assert!(matches!(left, FabricError::RemoteRefused { .. }), "{left}");
        assert!(
            matches!(right, FabricError::PeerMisbehaved { .. } | FabricError::PeerLost { .. }),
            "the target reported: {right}"
        );
        assert_eq!(
            (grant.bytes(), right_end.stats().bytes_received),
            (before.clone(), 0),
            "memory was touched"
        );
        pair.works(&pair.to_right, &pair.to_left).await;
    }
}
