//! Logical writes that this fabric splits.

use std::sync::Arc;

use tensorwire_fabric::{
    Fabric, FabricError, Immediate, Operation, QueuePairConfig, RemoteRange, Runtime, Segment, paged,
};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_memory::Buf;

use crate::contract::{
    Flavour, Setup, bounded,
    pair::{Grant, Pair, pattern},
};

/// The limit in these tests: small, and no multiple of a cache line.
const PIECE: usize = 1000;
const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 16, receive_depth: 16 };

fn small_pieces(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(ShmFabric::new(runtime).unwrap().with_piece_bytes(PIECE as u64))
}

fn with_pair(test: impl AsyncFn(Pair) + Send + Copy + 'static) {
    for flavour in [Flavour::CurrentThread, Flavour::TwoWorkers] {
        bounded(flavour, move |runtime| async move {
            let setup = Setup { fabric: small_pieces, peer_address: None };
            test(Pair::with_depths(setup, runtime, DEPTHS).await).await;
        });
    }
}

/// Posts one write of all bytes and returns its operation.
fn start(pair: &Pair, local: &Buf, grant: &Grant) -> Operation {
    pair.to_right.write_imm(local.clone(), grant.range, Immediate(5))
}

#[test]
fn a_write_at_and_around_the_limit_is_one_write() {
    with_pair(async |pair: Pair| {
        for length in [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 16 * PIECE - 1, 16 * PIECE] {
            let grant = pair.grant_right(length);
            let local = pair.left.source.filled(length, length as u64);
            let before = pair.to_right.stats();
            let write = start(&pair, &local, &grant);
            assert_eq!(pair.arrival_at_right().await, (5, length as u64));
            pair.step("the write", write).await.unwrap();
            let after = pair.to_right.stats();
            assert_eq!(after.operations - before.operations, 1, "{length} bytes complete once");
            assert_eq!(after.bytes_sent - before.bytes_sent, length as u64);
            assert_eq!(grant.take()[..], local[..], "{length} bytes");
        }
        assert_eq!(pair.to_left.stats().arrivals, 7, "one notification each");
    });
}

#[test]
fn a_write_of_more_pieces_than_the_send_queue_holds_is_refused_alone() {
    with_pair(async |pair: Pair| {
        let grant = pair.grant_right(16 * PIECE + 1);
        let local = pair.left.source.filled(16 * PIECE + 1, 1);
        let error = pair.step("the write", start(&pair, &local, &grant)).await.unwrap_err();
        assert!(matches!(error, FabricError::TooManyPieces { pieces: 17, depth: 16 }), "{error}");
        pair.works(&pair.to_right, &pair.to_left).await;
    });
}

#[test]
fn pieces_of_writes_that_wait_for_room_stay_together() {
    with_pair(async |pair: Pair| {
        const LENGTH: usize = 5 * PIECE + 3;
        let grants: Vec<_> = (0..12).map(|_| pair.grant_right(LENGTH)).collect();
        // Six slots each: two fit at once, the others wait inside their futures.
        let writes = grants.iter().enumerate().map(|(value, grant)| {
            let local = pair.left.source.filled(LENGTH, value as u64);
            pair.to_right.write_imm(local, grant.range, Immediate(value as u32))
        });
        let arrivals = async {
            for value in 0..12 {
                assert_eq!(pair.arrival_at_right().await, (value, LENGTH as u64));
            }
        };
        let writes = futures::future::join_all(writes);
        let (results, ()) = pair.step("all of them", futures::future::join(writes, arrivals)).await;
        results.into_iter().for_each(|result| result.unwrap());
        for (value, grant) in grants.into_iter().enumerate() {
            assert_eq!(grant.take()[..], pattern(LENGTH, value as u64)[..]);
        }
    });
}

#[test]
fn scattered_pages_are_one_write() {
    with_pair(async |pair: Pair| {
        const PAGE: usize = PIECE + 1;
        let grant = pair.grant_right(4 * PAGE);
        let local = pair.left.source.filled(3 * PAGE - 7, 3);
        let at = |page: u64| grant.range.offset + page * PAGE as u64;
        let segments = paged(&local, PAGE, grant.range, &[at(3), at(0), at(1)]).unwrap();
        let write = pair.to_right.write_vectored(segments, Some(Immediate(9)));
        assert_eq!(pair.arrival_at_right().await, (9, local.len() as u64));
        pair.step("the write", write).await.unwrap();
        let landed = grant.take();
        assert_eq!(landed[3 * PAGE..], local[..PAGE]);
        assert_eq!(landed[..PAGE], local[PAGE..2 * PAGE]);
        assert_eq!(landed[PAGE..2 * PAGE - 7], local[2 * PAGE..]);
        assert!(landed[2 * PAGE - 7..3 * PAGE].iter().all(|&byte| byte == 0));
    });
}

#[test]
fn a_vectored_write_with_one_bad_segment_posts_nothing() {
    with_pair(async |pair: Pair| {
        let grant = pair.grant_right(3000);
        let local = pair.left.source.filled(3000, 3);
        let segment = |part: std::ops::Range<usize>, remote: RemoteRange| Segment {
            local: local.slice(part).unwrap(),
            remote,
        };
        let good = segment(0..1500, grant.part(0, 1500));
        let bad = segment(1500..3000, grant.part(1500, 1499));
        let write = pair.to_right.write_vectored(vec![good, bad], Some(Immediate(1)));
        let error = pair.step("the write", write).await.unwrap_err();
        assert!(matches!(error, FabricError::LengthMismatch { local: 1500, remote: 1499 }), "{error}");
        pair.works(&pair.to_right, &pair.to_left).await;
        assert_eq!(pair.to_left.stats().arrivals, 1, "only that of the last step");
        assert_eq!(grant.take()[..], [0; 3000]);
    });
}
