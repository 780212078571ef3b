//! The device's limits.

use futures::future::{join, join_all};
use tensorwire_fabric::{Access, FabricError, Immediate, QueuePairConfig, RemoteRange, Wait};
use tensorwire_verbs_reactor::Rdma;

use super::{MADE, SETUP, asked_so_far, prepare};
use crate::contract::{
    Flavour, bounded,
    pair::{DEPTHS, Pair, RegisteredPool, immediate, pattern},
};

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn forty_connections_of_one_device_all_move_bytes() {
    const BYTES: usize = 100_000;
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let pair = Pair::new(SETUP, runtime).await;
        let connections = join_all((0..40).map(|_| pair.connect_again())).await;
        let pair = &pair;
        let moves = connections.iter().zip(0_u32..).map(|((left_end, right_end), index)| async move {
            for round in 0..3 {
                let seed = u64::from(index * 3 + round);
                let grant = pair.right.receive.grant(BYTES);
                left_end.add_remote_region(grant.region);
                let source = pair.left.source.filled(BYTES, seed);
                let write = left_end.write_imm(source, grant.range, Immediate(index));
                let (written, arrival) = futures::join!(write, right_end.next_arrival());
                written.unwrap();
                assert_eq!(immediate(arrival.unwrap()), (index, BYTES as u64));
                assert!(grant.take()[..] == pattern(BYTES, seed)[..], "connection {index}");
            }
        });
        pair.step("the moves", join_all(moves)).await;
        // Memory is registered once, however many queue pairs use it.
        let grant = pair.right.receive.grant(BYTES);
        let again = pair.right.domain.register(grant.granted.block().unwrap(), Access::RECEIVE).unwrap();
        assert_eq!(again, grant.region);
        drop(grant.take());
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn writes_and_reads_around_the_message_limit_arrive_whole() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(SETUP, runtime).await;
        let limit = MADE.with_borrow(|made| made[0].port().message_bytes as usize);
        let mut operations = 0;
        let around = [limit - 1, limit, limit + 1].into_iter().filter(|&bytes| bytes < 64 << 20);
        for bytes in around.chain([64 << 20]) {
            let pieces = bytes.div_ceil(limit) as u64;
            let before = asked_so_far();
            write(&pair, bytes).await;
            let after = asked_so_far();
            // Pieces, and a message that announces those before the last.
            assert_eq!(after.requests - before.requests, pieces + u64::from(pieces > 1), "{bytes} bytes");
            assert_eq!(after.signals - before.signals, after.posts - before.posts, "one a call");
            read(&pair, bytes).await;
            assert_eq!(asked_so_far().requests - after.requests, pieces, "{bytes} bytes");
            operations += 2;
            assert_eq!(pair.to_right.stats().operations, operations, "a split one counts once");
        }
    });
}

async fn write(pair: &Pair, bytes: usize) {
    let grant = pair.grant_right(bytes);
    let write = pair.to_right.write_imm(pair.left.source.filled(bytes, 3), grant.range, Immediate(7));
    let (written, arrival) = pair.step("a write", join(write, pair.to_left.next_arrival())).await;
    written.unwrap();
    assert_eq!(immediate(arrival.unwrap()), (7, bytes as u64));
    assert!(grant.take()[..] == pattern(bytes, 3)[..], "{bytes} bytes");
}

async fn read(pair: &Pair, bytes: usize) {
    let readable = RegisteredPool::new(&pair.right.domain, "readable", Access::READABLE, 128 << 20);
    let source = readable.filled(bytes, 4);
    let _exposure = source.expose();
    let region = readable.region(source.block().unwrap());
    pair.to_right.add_remote_region(region);
    let range = RemoteRange {
        region: region.region,
        generation: region.generation,
        offset: source.offset() as u64,
        length: bytes as u64,
    };
    let read = pair.to_right.read(range, pair.left.receive.pool.try_alloc(bytes).unwrap());
    assert!(pair.step("a read", read).await.unwrap()[..] == source[..], "{bytes} bytes");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn a_send_queue_may_be_shallower_than_the_operations_under_way() {
    const DEEP: QueuePairConfig = QueuePairConfig { send_depth: 200, receive_depth: 200 };
    bounded(Flavour::CurrentThread, |runtime| async move {
        prepare(Rdma { queue_depth: Some(8), ..Rdma::default() }, Wait::default());
        let pair = Pair::with_depths(SETUP, runtime, DEEP).await;
        let grant = pair.grant_right(200 * 100);
        let write = |index: u32| {
            let range = grant.part(u64::from(index) * 100, 100);
            pair.to_right.write_imm(pair.left.source.filled(100, index.into()), range, Immediate(index))
        };
        let writes: Vec<_> = (0..200).map(write).collect();
        for result in pair.step("the writes", join_all(writes)).await {
            result.unwrap();
        }
        for index in 0..200 {
            assert_eq!(pair.arrival_at_right().await, (index, 100));
        }
        let landed = grant.take();
        assert!((0..200).all(|index| landed[index * 100..][..100] == pattern(100, index as u64)[..]));
    });
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn depths_over_the_devices_limits_are_refused_by_name() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(SETUP, runtime).await;
        for receive_depth in [u32::MAX / 4, u32::MAX] {
            let depths = QueuePairConfig { receive_depth, ..DEPTHS };
            let error = pair.left.domain.prepare(depths).unwrap_err();
            assert!(matches!(error, FabricError::Device { .. }), "unexpected: {error}");
            let text = error.to_string();
            for part in ["receive queue", "limit", "smaller depths", &receive_depth.to_string()] {
                assert!(text.contains(part), "`{part}` is missing: {text}");
            }
        }
        pair.works(&pair.to_right, &pair.to_left).await;
    });
}
