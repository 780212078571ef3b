//! What ranks of one host offer each other in an all-reduce.

use tensorwire_collective::{Algorithm, Group};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::Tensor;

use super::ranks;
use crate::join_all::join_all;

const MIB: usize = 1 << 20;

fn used(group: &Group) -> usize {
    group.worker().pool().stats().used_bytes as usize
}

/// Sums `count` numbers of each rank in place.
async fn reduce(group: &Group, algorithm: Algorithm, count: usize) {
    let (size, rank) = (group.size(), group.rank());
    let mut values: Vec<_> = (0..count).map(|at| (at * size + rank) as i64).collect();
    group.all_reduce(&mut values).algorithm(algorithm).await.unwrap();
    let sum = |at: usize| (0..size).map(|rank| (at * size + rank) as i64).sum::<i64>();
    assert!(values.iter().enumerate().all(|(at, value)| *value == sum(at)), "{count}");
}

#[tokio::test]
async fn the_next_call_frees_what_one_has_left_for_the_other_ranks() {
    let ranks = ranks(FabricKind::SHM, 3).await;
    let before: Vec<_> = ranks.groups.iter().map(used).collect();
    // The last result of a call is a part of 1 MiB.
    let kept = MIB / 3 + (64 << 10);
    for _ in 0..40 {
        ranks.each(async |group: Group| reduce(&group, Algorithm::Views, MIB / 8).await).await;
    }
    ranks
        .each(async |group: Group| {
            join_all([MIB / 8; 8].map(|count| reduce(&group, Algorithm::Views, count))).await
        })
        .await;
    ranks.each(async |group: Group| reduce(&group, Algorithm::Views, MIB / 8).await).await;
    for (group, before) in ranks.groups.iter().zip(&before) {
        assert!(used(group) <= before + kept, "{} bytes after {before}", used(group));
    }
    for algorithm in [Algorithm::Exchange, Algorithm::Views] {
        ranks
            .each(async |group: Group| {
                let tensor = Tensor::from_values(group.worker().pool(), &[1000], &[1i32; 1000]).unwrap();
                for _ in 0..3 {
                    let sum = group.all_reduce_tensors([tensor.clone()]).algorithm(algorithm).await.unwrap();
                    assert_eq!(sum.values::<i32>().unwrap(), [3; 1000]);
                }
            })
            .await;
    }
    let workers: Vec<_> = ranks.groups.iter().map(|group| group.worker().clone()).collect();
    ranks.each(async |group: Group| group.close().await.unwrap()).await;
    drop(ranks);
    let used: u64 = workers.iter().map(|worker| worker.pool().stats().used_bytes).sum();
    assert!(used <= before.iter().sum::<usize>() as u64, "{used} bytes after {before:?}");
}

#[tokio::test]
async fn a_group_without_channels_of_notes_combines_long_values() {
    let ranks = ranks(FabricKind::SHM, 9).await;
    ranks.each(async |group: Group| reduce(&group, Algorithm::Exchange, 1000).await).await;
    // Three segments, of which the last has fewer elements than there are ranks.
    ranks.each(async |group: Group| reduce(&group, Algorithm::Views, 2 * MIB / 8 + 5).await).await;
    ranks.shutdown().await;
}

#[tokio::test]
async fn a_rank_may_drop_the_group_when_its_last_call_is_complete() {
    let ranks = ranks(FabricKind::SHM, 3).await;
    let before: Vec<_> = ranks.groups.iter().map(used).collect();
    for algorithm in [Algorithm::Exchange, Algorithm::Views].repeat(20) {
        ranks
            .each(async |group: Group| {
                let derived = group.derive("short").await.unwrap();
                reduce(&derived, algorithm, 1000).await;
            })
            .await;
    }
    // Once all have left, nothing is left behind.
    for (group, before) in ranks.groups.iter().zip(before) {
        while used(group) > before {
            tokio::task::yield_now().await;
        }
    }
    ranks.shutdown().await;
}
