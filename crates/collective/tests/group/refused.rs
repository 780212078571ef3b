//! Calls with wrong arguments: each rank refuses what it knows to be wrong by itself, and the group goes on.

use std::{future::IntoFuture as _, time::Duration};

use futures::join;
use tensorwire_collective::{CALLS_UNDER_WAY, Group, GroupError, Reduction};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Tensor;

use super::{over_fabrics, ranks, ranks_within, tensor, values};
use crate::join_all::join_all;

over_fabrics! {
    wrong_arguments_of_all_ranks_change_nothing,
    a_call_that_is_refused_behind_a_later_one_passes_its_turn,
    a_rank_that_is_refused_alone_may_call_again,
    a_rank_that_is_refused_alone_and_goes_on_is_an_error_of_all,
    a_rank_that_is_refused_alone_and_makes_no_call_is_named_by_the_timeout,
}

async fn sum(group: &Group) {
    let mut own = [1i32];
    group.all_reduce(&mut own).await.unwrap();
    assert_eq!(own, [group.size() as i32]);
}

/// Every call with arguments that its documentation forbids.
async fn wrong_calls(group: &Group) -> Vec<GroupError> {
    let (size, last) = (group.size(), group.size() - 1);
    let own = || tensor(group, &[1, 2]);
    let pool = group.worker().pool();
    let text = || Tensor::from_strings(pool, &[1], &["a"]).unwrap();
    let eight_bits = || Tensor::new(pool.try_alloc(2).unwrap(), DataType::F8E5M2, &[2]).unwrap();
    let mean = Reduction::Mean;
    vec![
        group.all_reduce(&mut [1i32; 3]).reduction(mean.clone()).await.unwrap_err(),
        group.all_reduce(&mut [1u8; 30_000]).reduction(mean.clone()).await.unwrap_err(),
        group.all_reduce(&mut [[1f32; 2]]).reduction(Reduction::Max).await.unwrap_err(),
        group.all_reduce(&mut [1i16]).reduction(mean.clone()).reduction(Reduction::Sum).await.unwrap_err(),
        group.reduce(0, &mut [1i64]).reduction(mean.clone()).await.unwrap_err(),
        group.reduce(size, &mut [1f32]).await.unwrap_err(),
        group.reduce_scatter(&mut [1f32; 9], &vec![1; size]).await.unwrap_err(),
        group.reduce_scatter(&mut [1f32; 1], &[1]).await.unwrap_err(),
        group.reduce_scatter(&mut [1f32; 1], &vec![usize::MAX; size]).await.unwrap_err(),
        group.all_reduce_tensors([]).await.unwrap_err(),
        group.all_reduce_tensors([own()]).reduction(mean.clone()).await.unwrap_err(),
        group.all_reduce_tensors([own(), tensor(group, &[1])]).await.unwrap_err(),
        group.all_reduce_tensors([text()]).await.unwrap_err(),
        group.all_reduce_tensors([eight_bits()]).await.unwrap_err(),
        group.broadcast(size, None).await.unwrap_err(),
        group.broadcast(last, (group.rank() != last).then(own)).await.unwrap_err(),
        group.gather(size, own()).await.unwrap_err(),
        group.scatter(size, None).await.unwrap_err(),
        group.scatter(last, (group.rank() != last).then(|| vec![own(); size])).await.unwrap_err(),
        group.all_to_all(vec![own(); size + 1]).await.unwrap_err(),
        group.derive("").await.unwrap_err(),
        group.subgroup("a", &[0, 0]).await.unwrap_err(),
        group.subgroup("a", &[]).await.unwrap_err(),
        group.subgroup("a", &[size]).await.unwrap_err(),
    ]
}

async fn wrong_arguments_of_all_ranks_change_nothing(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    ranks
        .each(async |group| {
            // More often than there are lanes.
            for _ in 0..2 {
                for (at, error) in wrong_calls(&group).await.into_iter().enumerate() {
                    let is_typed = matches!(error, GroupError::Argument { .. } | GroupError::Reduction(_));
                    assert!(is_typed, "{at}: {error}");
                }
                assert!(group.failure().is_none());
                sum(&group).await;
            }
            assert_eq!(
                values(&group.broadcast(1, (group.rank() == 1).then(|| tensor(&group, &[4]))).await.unwrap()),
                [4]
            );
            drop(group.all_reduce(&mut [1i32; 3]).reduction(Reduction::Mean));
            sum(&group).await;
        })
        .await;
    ranks.shutdown().await;
}

async fn a_call_that_is_refused_behind_a_later_one_passes_its_turn(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    ranks
        .each(async |group| {
            for _ in 0..=CALLS_UNDER_WAY {
                let mut own = [1i32; 40];
                let first = group.all_reduce(&mut own);
                let later = group.barrier();
                let (refused, done) = join!(first.reduction(Reduction::Mean), later.into_future());
                assert!(matches!(refused, Err(GroupError::Reduction(_))), "{refused:?}");
                done.unwrap();
            }
            sum(&group).await;
            join_all((0..40).map(|_| group.barrier().into_future()))
                .await
                .into_iter()
                .for_each(Result::unwrap);
        })
        .await;
    ranks.shutdown().await;
}

async fn a_rank_that_is_refused_alone_may_call_again(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    ranks
        .each(async |group| {
            if group.rank() == 1 {
                let wrong = group.all_reduce(&mut [1i32]).reduction(Reduction::Mean).await;
                assert!(matches!(wrong, Err(GroupError::Reduction(_))), "{wrong:?}");
            }
            sum(&group).await;
        })
        .await;
    ranks.shutdown().await;
}

async fn a_rank_that_is_refused_alone_and_goes_on_is_an_error_of_all(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let errors = ranks.each(async |group| {
        if group.rank() != 1 {
            return group.all_reduce(&mut [1i32; 2]).await.unwrap_err();
        }
        group.all_reduce(&mut [1i32; 2]).reduction(Reduction::Mean).await.unwrap_err();
        group.barrier().await.unwrap_err()
    });
    for error in errors.await {
        assert!(error.to_string().contains("all ranks must make the same calls"), "{error}");
    }
    ranks.shutdown().await;
}

async fn a_rank_that_is_refused_alone_and_makes_no_call_is_named_by_the_timeout(fabric: FabricKind) {
    const SHORT: Duration = Duration::from_millis(300);
    let ranks = ranks_within(fabric, 2, Duration::from_secs(20)).await;
    let errors = ranks.each(async |group| {
        let mut own = [1i32; 2];
        let call = group.all_reduce(&mut own).timeout(SHORT);
        let call = if group.rank() == 1 { call.reduction(Reduction::Mean) } else { call };
        call.await.unwrap_err()
    });
    let errors = errors.await;
    assert!(matches!(&errors[0], GroupError::TimedOut { silent, .. } if *silent == [1]), "{}", errors[0]);
    assert!(matches!(errors[1], GroupError::Reduction(_)), "{}", errors[1]);
    ranks.shutdown().await;
}
