//! Going on without ranks that are lost.

use std::time::Duration;

use futures::join;
use tensorwire_collective::{Group, GroupError};
use tensorwire_fabric::FabricKind;

use super::{over_fabrics, ranks_within};

over_fabrics! {
    those_that_are_left_go_on_with_the_right_result,
    a_group_may_shrink_again_and_to_one,
    a_rank_that_comes_too_late_is_left_out,
    the_first_rank_may_be_the_one_that_answers_and_does_not_come,
    clones_of_one_rank_shrink_to_one_group,
    a_rank_whose_worker_is_shut_down_does_not_go_on_alone,
}

const LIMIT: Duration = Duration::from_secs(20);

pub(super) async fn sum_of_ranks(group: &Group) -> i32 {
    let mut values = [group.rank() as i32; 100];
    group.all_reduce(&mut values).await.unwrap();
    assert!(values.iter().all(|value| *value == values[0]));
    values[0]
}

async fn those_that_are_left_go_on_with_the_right_result(fabric: FabricKind) {
    for lost in 0..4 {
        let mut ranks = ranks_within(fabric, 4, LIMIT).await;
        let worker = ranks.workers.remove(lost);
        drop(ranks.groups.remove(lost));
        let left = ranks.each(async |group| {
            group.barrier().await.unwrap_err();
            group.shrink().await.unwrap()
        });
        let ((), left) = join!(worker.shutdown(), left);
        ranks.groups = left;
        for (rank, group) in ranks.groups.iter().enumerate() {
            assert_eq!((group.rank(), group.size(), group.generation()), (rank, 3, 1), "without {lost}");
        }
        assert_eq!(ranks.each(async |group| sum_of_ranks(&group).await).await, [3, 3, 3]);
        ranks.shutdown().await;
    }
}

async fn a_group_may_shrink_again_and_to_one(fabric: FabricKind) {
    let mut ranks = ranks_within(fabric, 3, LIMIT).await;
    for left in [2, 1] {
        let worker = ranks.workers.remove(0);
        drop(ranks.groups.remove(0));
        let shrunk = ranks.each(async |group| group.shrink().await.unwrap());
        let ((), shrunk) = join!(worker.shutdown(), shrunk);
        ranks.groups = shrunk;
        let sum: i32 = (0..left).sum();
        assert_eq!(ranks.each(async |group| sum_of_ranks(&group).await).await, vec![sum; left as usize]);
    }
    ranks.shutdown().await;
}

async fn a_rank_that_comes_too_late_is_left_out(fabric: FabricKind) {
    let ranks = ranks_within(fabric, 3, Duration::from_secs(1)).await;
    let shrunk = ranks.each(async |group| match group.rank() {
        2 => None,
        _ => Some(group.shrink().await.unwrap().size()),
    });
    assert_eq!(shrunk.await, [Some(2), Some(2), None], "it answers, but does not come");
    let late = ranks.groups[2].shrink().await.unwrap_err();
    assert!(matches!(late, GroupError::LeftOut { rank: 2, .. }), "{late}");
    ranks.shutdown().await;
}

/// The ranks behind it do not lead at the same time when its time is over.
async fn the_first_rank_may_be_the_one_that_answers_and_does_not_come(fabric: FabricKind) {
    for size in [3, 5] {
        let ranks = ranks_within(fabric, size, Duration::from_secs(1)).await;
        let shrunk = ranks.each(async |group| match group.rank() {
            0 => None,
            _ => Some(group.shrink().await.map(|group| group.size())),
        });
        let shrunk = shrunk.await;
        let expected = |rank: usize| (rank > 0).then_some(size - 1);
        let sizes = shrunk.into_iter().map(|shrunk| shrunk.map(|shrunk| shrunk.unwrap()));
        assert!(sizes.eq((0..size).map(expected)), "{size} ranks");
        ranks.shutdown().await;
    }
}

async fn clones_of_one_rank_shrink_to_one_group(fabric: FabricKind) {
    let ranks = ranks_within(fabric, 2, LIMIT).await;
    let sums = ranks.each(async |group| {
        let (one, other) = join!(group.shrink(), group.shrink());
        let (one, other) = (one.unwrap(), other.unwrap());
        let mut values = [[1u32]; 2];
        let [first, second] = &mut values;
        let (first, second) = (one.all_reduce(first), other.all_reduce(second));
        let (first, second) = join!(first, second);
        first.unwrap();
        second.unwrap();
        values
    });
    assert_eq!(sums.await, [[[2], [2]]; 2]);
    ranks.shutdown().await;
}

async fn a_rank_whose_worker_is_shut_down_does_not_go_on_alone(fabric: FabricKind) {
    let ranks = ranks_within(fabric, 3, LIMIT).await;
    ranks.workers[0].shutdown().await;
    let shrunk = ranks.each(async |group| group.shrink().await.map(|group| group.size()));
    let shrunk = shrunk.await;
    assert!(shrunk[0].is_err(), "{shrunk:?}");
    assert!(shrunk[1..].iter().all(|size| *size.as_ref().unwrap() == 2), "{shrunk:?}");
    ranks.shutdown().await;
}
