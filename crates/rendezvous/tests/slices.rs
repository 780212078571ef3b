//! Slices of published tensors and of sets, over shm and tcp, between workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::single_range_in_vec_init)] // tensors of one dimension

use std::ops::Range;

use futures::future::join_all;
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Code, DataType, Sharing};
use tensorwire_rendezvous::{Peer, Tensor, Worker, WorkerError};

use crate::{
    fabrics::{assert_moves_over, kinds, over_verbs},
    sets::{SET, USUAL, on, run, wire_bytes},
    two::Two,
};

/// A tensor whose elements are their places.
fn places(worker: &Worker, shape: &[u64]) -> Tensor {
    let values: Vec<u32> = (0..shape.iter().product::<u64>() as u32).collect();
    Tensor::from_values(worker.pool(), shape, &values).unwrap()
}

/// The places of the elements of a slice, of which each dimension follows the one before.
fn expected(shape: &[u64], ranges: &[Range<u64>]) -> Vec<u32> {
    shape.iter().zip(ranges).fold(vec![0], |before, (&length, range)| {
        let rows =
            before.iter().flat_map(|&row| range.clone().map(move |at| row * length as u32 + at as u32));
        rows.collect()
    })
}

/// A range that ends before it begins.
fn reversed() -> Range<u64> {
    Range { start: 3, end: 2 }
}

fn is_config(error: &WorkerError, part: &str) -> bool {
    matches!(error, WorkerError::Config { field: "ranges", .. }) && error.to_string().contains(part)
}

fn is_not_found(error: &WorkerError) -> bool {
    let (WorkerError::Remote { status, .. } | WorkerError::Local { status, .. }) = error else {
        return false;
    };
    status.code == Code::NotFound
}

const SHAPES: [&[u64]; 4] = [&[60, 50], &[7, 5, 90], &[4000], &[]];

/// Slices of the shapes: rows, columns, boxes of three dimensions, whole tensors, and none of the elements.
fn slices() -> Vec<(usize, Vec<Range<u64>>)> {
    vec![
        (0, vec![10..20, 0..50]),
        (0, vec![59..60, 3..4]),
        (0, vec![0..60, 7..9]),
        (0, vec![1..60, 0..49]),
        (0, vec![0..60, 0..50]),
        (0, vec![60..60, 0..50]),
        (0, vec![5..9, 17..17]),
        (1, vec![2..3, 0..5, 0..90]),
        (1, vec![0..7, 4..5, 0..90]),
        (1, vec![1..6, 1..4, 20..70]),
        (1, vec![3..4, 2..4, 0..90]),
        (1, vec![0..7, 0..5, 89..90]),
        (2, vec![1000..3000]),
        (3, vec![]),
    ]
}

/// Names with brackets, too.
fn name(place: usize) -> String {
    format!("w[{place}]")
}

/// Publishes the tensors, and commits them.
async fn offer(worker: &Worker) {
    let tensors = SHAPES.iter().enumerate().map(|(place, shape)| (name(place), places(worker, shape)));
    let tensors: Vec<_> = tensors.collect();
    worker.set(SET).commit(7, tensors.clone()).await.unwrap();
    for (name, tensor) in tensors {
        worker.publish(&name, tensor).unwrap();
    }
}

async fn check(peer: &Peer, kind: Option<FabricKind>) {
    for (place, ranges) in slices() {
        let shape = SHAPES[place];
        let published = peer.fetch_slice(&name(place), &ranges).await.unwrap();
        let (version, of_set) = peer.set(SET).fetch_slice(&name(place), &ranges).await.unwrap();
        let copied = peer.set(SET).sharing(Sharing::Copy).fetch_slice(&name(place), &ranges).await.unwrap();
        assert_eq!(version, 7);
        for tensor in [&published, &of_set, &copied.1] {
            assert_eq!(tensor.values::<u32>().unwrap(), expected(shape, &ranges), "{place} {ranges:?}");
            let lengths: Vec<_> = ranges.iter().map(|range| range.end - range.start).collect();
            assert_eq!((tensor.shape(), tensor.dtype()), (&*lengths, DataType::U32));
        }
        if kind == Some(FabricKind::SHM) && place == 0 && ranges == [10..20, 0..50] {
            assert!(of_set.buf().is_foreign(), "rows are a view");
        }
    }
}

/// Programs spawn fetches.
fn assert_may_move(_: impl Send) {}

#[test]
fn a_slice_has_the_elements_of_its_ranges() {
    for kind in kinds(USUAL) {
        run(async {
            let two = Two::of(|name| on(*kind, name)).await;
            offer(&two.server).await;
            check(&two.peer, Some(*kind)).await;
            assert_may_move(two.peer.fetch_slice("w", &[]));
            assert_may_move(two.peer.set(SET).fetch_slice("w", &[]));
            assert_may_move(two.peer.set(SET).fetch());
            check(&two.server.peer(two.server.name()).unwrap(), None).await;
            assert_moves_over(&two.client, *kind);
            two.end().await;
        });
    }
}

#[test]
fn ranges_that_a_tensor_does_not_have_are_refused_by_name_and_value() {
    for kind in kinds(USUAL) {
        run(async {
            let two = Two::of(|name| on(*kind, name)).await;
            offer(&two.server).await;
            let strings = Tensor::from_strings(two.server.pool(), &[3], &["x", "yz", ""]).unwrap();
            two.server.publish("strings", strings.clone()).unwrap();
            two.server.set("texts").commit(1, [("strings", strings)]).await.unwrap();
            let own = two.server.peer(two.server.name()).unwrap();
            let long = "n".repeat(1020);
            for peer in [&two.peer, &own] {
                let set = peer.set(SET);
                let bad = [
                    (vec![0..61, 0..50], "exceeds dimension 0, which has 60 elements"),
                    (vec![0..60, 49..51], "[0:60,49:51]"),
                    (vec![0..60], "1 ranges do not fit a tensor of 2 dimensions"),
                    (vec![0..1, reversed()], "3..2 of dimension 1 ends before it begins"),
                ];
                for (ranges, part) in bad {
                    let published = peer.fetch_slice(&name(0), &ranges).await.unwrap_err();
                    assert!(is_config(&published, part), "{published}");
                    let of_set = set.fetch_slice(&name(0), &ranges).await.unwrap_err();
                    assert!(is_config(&of_set, part), "{of_set}");
                }
                let published = peer.fetch_slice("strings", &[0..1]).await.unwrap_err();
                assert!(is_config(&published, "take the whole tensor"), "{published}");
                let of_set = peer.set("texts").fetch_slice("strings", &[0..1]).await.unwrap_err();
                assert!(is_config(&of_set, "take the whole tensor"), "{of_set}");
                assert!(is_config(
                    &peer.fetch_slice(&long, &[0..9]).await.unwrap_err(),
                    "1024 bytes together"
                ));
                assert!(is_not_found(&peer.fetch_slice("none", &[0..1]).await.unwrap_err()));
                assert!(is_not_found(&set.fetch_slice("none", &[0..1]).await.unwrap_err()));
                assert!(is_not_found(&peer.set("none").fetch_slice("w", &[0..1]).await.unwrap_err()));
                // Everything goes on.
                assert!(peer.fetch_slice(&name(0), &[0..1, 0..1]).await.is_ok());
            }
            two.end().await;
        });
    }
}

#[test]
fn between_hosts_only_the_slice_is_moved() {
    run(async {
        let two = Two::of(|name| on(FabricKind::TCP, name)).await;
        let tensor = places(&two.server, &[500, 1000]);
        two.server.publish("w", tensor.clone()).unwrap();
        two.server.set(SET).commit(1, [("w", tensor)]).await.unwrap();
        assert!(two.peer.fetch_slice("w", &[0..1, 0..1]).await.is_ok());
        for ranges in [[100..150, 0..1000], [0..500, 300..400], [0..0, 0..1000]] {
            let bytes = 4 * ranges.iter().map(|range| range.end - range.start).product::<u64>();
            let before = wire_bytes(&two);
            two.peer.fetch_slice("w", &ranges).await.unwrap();
            let moved = wire_bytes(&two) - before;
            assert!((bytes..bytes + 2048).contains(&moved), "{moved} bytes for {bytes}");
            let before = wire_bytes(&two);
            two.peer.set(SET).fetch_slice("w", &ranges).await.unwrap();
            let moved = wire_bytes(&two) - before;
            assert!((bytes..bytes + 2048).contains(&moved), "{moved} bytes for {bytes} of a set");
        }
        two.end().await;
    });
}

/// Bytes of a slice, and of the pool of the publisher, which has no room for three.
const SLICE: u64 = 1 << 20;
const POOL: u64 = 5 << 20;

#[test]
fn s4_slices_that_are_gathered_take_turns_in_the_publishers_pool() {
    run(async {
        let server =
            on(FabricKind::TCP, "server").memory(|memory| memory.source_bytes = POOL).start().await.unwrap();
        // The tensor is in memory of its own.
        let values = vec![7_u8; 4 * SLICE as usize];
        let tensor = Tensor::from_vec(server.user_memory(), &[2048, 2048], values).unwrap();
        server.publish("w", tensor).unwrap();
        let large = Tensor::from_vec(server.user_memory(), &[4096, 2048], vec![1_u8; 8 << 20]).unwrap();
        server.publish("large", large).unwrap();
        let held = server.pool().try_alloc(POOL as usize / 2).unwrap();
        let client = on(FabricKind::TCP, "client").start().await.unwrap();
        let peer = client.peer_at(server.address()).await.unwrap();
        let columns = [0..2048, 512..1024];
        let fetches = (0..20).map(|_| peer.fetch_slice("w", &columns));
        for fetched in join_all(fetches).await {
            assert!(fetched.unwrap().bytes().iter().all(|byte| *byte == 7));
        }
        drop(held);
        let refused = peer.fetch_slice("large", &[0..4096, 0..2047]).await.unwrap_err();
        let is_exhausted =
            matches!(&refused, WorkerError::Remote { status, .. } if status.code == Code::ResourceExhausted);
        assert!(is_exhausted, "{refused}");
        assert!(peer.fetch_slice("w", &columns).await.is_ok());
        while server.pool().stats().used_bytes > 0 {
            tokio::task::yield_now().await;
        }
        client.shutdown().await;
        server.shutdown().await;
    });
}

over_verbs! { a_slice_has_the_elements_of_its_ranges }
