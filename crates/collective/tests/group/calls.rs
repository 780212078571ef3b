//! Calls that move tensors, and barriers.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use futures::future::join;
use tensorwire_fabric::FabricKind;

use super::{Ranks, over_fabrics, ranks, tensor, values};
use crate::join_all::join_all;

over_fabrics! {
    a_broadcast_gives_all_ranks_the_roots_tensor,
    gathers_give_the_tensors_of_all_ranks_in_their_order,
    a_scatter_gives_each_rank_its_tensor,
    an_all_to_all_transposes,
    nobody_leaves_a_barrier_before_all_have_come,
    several_calls_are_under_way_at_once,
    short_calls_of_all_lanes_follow_each_other_for_long,
    short_calls_of_a_lane_keep_their_order_whichever_is_polled_first,
    many_calls_one_after_the_other_keep_nothing,
}

async fn a_broadcast_gives_all_ranks_the_roots_tensor(fabric: FabricKind) {
    for size in [1, 2, 3, 5, 8] {
        let ranks = ranks(fabric, size).await;
        for root in 0..size {
            for length in [0, 1, 1000, 100_000] {
                let sent: Vec<i32> = (0..length).map(|value| value * 7 + root as i32).collect();
                let got = ranks.each(async |group| {
                    let given = (group.rank() == root).then(|| tensor(&group, &sent));
                    values(&group.broadcast(root, given).await.unwrap())
                });
                assert!(
                    got.await.iter().all(|got| *got == sent),
                    "{size} ranks, root {root}, {length} values"
                );
            }
        }
        ranks.shutdown().await;
    }
}

async fn gathers_give_the_tensors_of_all_ranks_in_their_order(fabric: FabricKind) {
    for size in [1, 2, 3, 4, 7] {
        let ranks = ranks(fabric, size).await;
        // Of different lengths, one of them empty.
        let of = |rank: usize| vec![rank as i32; rank * 1000];
        let all: Vec<Vec<i32>> = (0..size).map(of).collect();
        let got = ranks.each(async |group| {
            let gathered = group.all_gather(tensor(&group, &of(group.rank()))).await.unwrap();
            gathered.iter().map(values).collect::<Vec<_>>()
        });
        assert!(got.await.iter().all(|got| *got == all));
        for root in 0..size {
            let got = ranks.each(async |group| {
                let gathered = group.gather(root, tensor(&group, &of(group.rank()))).await.unwrap();
                gathered.map(|gathered| gathered.iter().map(values).collect::<Vec<_>>())
            });
            for (rank, got) in got.await.into_iter().enumerate() {
                assert_eq!(got, (rank == root).then(|| all.clone()));
            }
        }
        ranks.shutdown().await;
    }
}

async fn a_scatter_gives_each_rank_its_tensor(fabric: FabricKind) {
    for size in [1, 2, 5] {
        let ranks = ranks(fabric, size).await;
        for root in 0..size {
            let of = |rank: usize| vec![(root * 100 + rank) as i32; rank * 700];
            let got = ranks.each(async |group| {
                let given =
                    (group.rank() == root).then(|| (0..size).map(|rank| tensor(&group, &of(rank))).collect());
                values(&group.scatter(root, given).await.unwrap())
            });
            for (rank, got) in got.await.into_iter().enumerate() {
                assert_eq!(got, of(rank));
            }
        }
        ranks.shutdown().await;
    }
}

async fn an_all_to_all_transposes(fabric: FabricKind) {
    for size in [1, 2, 3, 8] {
        let ranks = ranks(fabric, size).await;
        let of = |from: usize, to: usize| vec![(from * 10 + to) as i32; (from + to) * 300];
        let got = ranks.each(async |group| {
            let given = (0..size).map(|to| tensor(&group, &of(group.rank(), to))).collect();
            let got = group.all_to_all(given).await.unwrap();
            got.iter().map(values).collect::<Vec<_>>()
        });
        for (rank, got) in got.await.into_iter().enumerate() {
            assert_eq!(got, (0..size).map(|from| of(from, rank)).collect::<Vec<_>>());
        }
        ranks.shutdown().await;
    }
}

async fn nobody_leaves_a_barrier_before_all_have_come(fabric: FabricKind) {
    for size in [1, 2, 3, 6] {
        let ranks = ranks(fabric, size).await;
        for late in 0..size {
            let come = AtomicUsize::new(0);
            ranks
                .each(async |group| {
                    if group.rank() == late {
                        tokio::task::yield_now().await;
                        group.worker().runtime().sleep(Duration::from_millis(10)).await;
                    }
                    come.fetch_add(1, Ordering::SeqCst);
                    group.barrier().await.unwrap();
                    assert_eq!(come.load(Ordering::SeqCst), size, "rank {late} is late");
                })
                .await;
        }
        ranks.each(async |group| group.close().await.unwrap()).await;
        ranks.shutdown().await;
    }
}

/// Each lane carries hundreds of calls, whose notes travel in the mailbox where there is one. Those of the longer ones between them do not.
async fn short_calls_of_all_lanes_follow_each_other_for_long(fabric: FabricKind) {
    const ROUNDS: i64 = 625;
    for size in [2, 3] {
        let ranks = ranks(fabric, size).await;
        ranks
            .each(async |group| {
                let rank = group.rank() as i64;
                for round in 0..ROUNDS {
                    let length = if round % 50 == 49 { 100 } else { 1 };
                    let mut values: Vec<_> =
                        (0..16).map(|call| vec![round * 16 + call + rank; length]).collect();
                    let calls: Vec<_> = values.iter_mut().map(|values| group.all_reduce(values)).collect();
                    let done = join_all(calls).await;
                    done.into_iter().for_each(|done| done.unwrap());
                    let size = size as i64;
                    for (call, values) in (0..).zip(values) {
                        let sum = (round * 16 + call) * size + size * (size - 1) / 2;
                        assert!(values.iter().all(|value| *value == sum), "{values:?} instead of {sum}");
                    }
                }
            })
            .await;
        ranks.shutdown().await;
    }
}

async fn several_calls_are_under_way_at_once(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    ranks
        .each(async |group| {
            // More than may be in progress, awaited in another order than invoked.
            let mut calls: Vec<_> =
                (0..40).map(|call| group.all_gather(tensor(&group, &[call, group.rank() as i32]))).collect();
            let barrier = group.barrier();
            calls.rotate_left(group.rank());
            let (gathered, barrier) =
                join(join_all(calls.into_iter().map(|call| async move { call.await })), barrier_of(barrier))
                    .await;
            barrier.unwrap();
            for (at, gathered) in gathered.into_iter().enumerate() {
                let call = ((at + group.rank()) % 40) as i32;
                let got: Vec<_> = gathered.unwrap().iter().map(values).collect();
                assert_eq!(got, [[call, 0], [call, 1], [call, 2]]);
            }
        })
        .await;
    ranks.shutdown().await;
}

async fn barrier_of(
    barrier: tensorwire_collective::Collective<()>,
) -> Result<(), tensorwire_collective::GroupError> {
    barrier.await
}

/// The second rank polls the later calls of each lane first: they wait for their turn, though their notes could be exchanged at once.
async fn short_calls_of_a_lane_keep_their_order_whichever_is_polled_first(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    ranks
        .each(async |group| {
            group.all_reduce(&mut [0i64]).await.unwrap();
            for round in 0..20 {
                let mut values: Vec<_> = (0..48).map(|call| [round * 48 + call]).collect();
                let mut calls: Vec<_> = values.iter_mut().map(|value| group.all_reduce(value)).collect();
                if group.rank() == 1 {
                    calls.reverse();
                }
                join_all(calls).await.into_iter().for_each(|done| done.unwrap());
                assert!((0..).zip(&values).all(|(call, value)| *value == [2 * (round * 48 + call)]));
            }
        })
        .await;
    ranks.shutdown().await;
}

async fn many_calls_one_after_the_other_keep_nothing(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let call = async |group: tensorwire_collective::Group| {
        for _ in 0..500 {
            group.barrier().await.unwrap();
        }
        group.worker().pool().stats()
    };
    let before = ranks.each(call).await;
    let after = ranks.each(call).await;
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before.block_bytes, after.block_bytes, "memory for messages");
    }
    ranks.shutdown().await;
}

/// Messages that all ranks have sent to each other.
fn messages(ranks: &Ranks) -> u64 {
    let peers = ranks.groups.iter().flat_map(|group| group.worker().peers());
    peers.map(|peer| peer.counters.sent.note + peer.counters.sent.tensor_request).sum()
}

#[tokio::test]
async fn a_short_call_takes_messages_with_the_logarithm_of_the_ranks() {
    for rounds in 1..=4u32 {
        let size = 1usize << rounds;
        let ranks = ranks(FabricKind::TCP, size).await;
        // In the first calls the ranks connect.
        for call in 0..3 {
            let before = messages(&ranks);
            ranks.each(async |group| group.all_reduce(&mut [1f32; 256]).await.unwrap()).await;
            let between = messages(&ranks);
            ranks.each(async |group| group.barrier().await.unwrap()).await;
            let after = messages(&ranks);
            if call > 0 {
                let expected = size as u64 * u64::from(rounds);
                assert_eq!(after - between, expected, "a barrier of {size} ranks");
                assert_eq!(between - before, expected, "an all-reduce of {size} ranks");
            }
        }
        ranks.shutdown().await;
    }
}
