//! Calls that fail: every rank gets a typed error, in bounded time.

use std::time::Duration;

use futures::join;
use tensorwire_collective::{Algorithm, CALLS_UNDER_WAY, CallKind, GroupError, Reduction};
use tensorwire_fabric::FabricKind;

use super::{Ranks, over_fabrics, ranks, ranks_within};
use crate::join_all::join_all;

over_fabrics! {
    ranks_that_call_different_things_get_an_error_that_names_both,
    ranks_that_give_different_numbers_of_elements_get_an_error,
    a_short_call_that_differs_is_an_error_also_after_many_that_did_not,
    a_rank_that_does_not_call_is_named_by_the_timeout,
    a_call_that_is_dropped_ends_the_group_for_all,
    a_lost_rank_ends_the_group_for_all,
    the_origin_of_an_end_is_the_rank_that_is_lost,
    a_call_that_waits_for_its_turn_learns_that_the_group_is_over,
    ranks_that_are_closed_may_go_at_once,
    a_group_is_closed_once_earlier_calls_are_complete,
    other_roots_and_other_parts_are_errors,
}

const SHORT: Duration = Duration::from_millis(300);

async fn ranks_that_call_different_things_get_an_error_that_names_both(fabric: FabricKind) {
    for size in [2, 3, 5] {
        let ranks = ranks(fabric, size).await;
        let errors = ranks.each(async |group| match group.rank() {
            1 => group.barrier().await.unwrap_err(),
            _ => group.all_reduce(&mut [1.0f32; 5000]).await.unwrap_err(),
        });
        let errors = errors.await;
        let named = errors.iter().filter(|error| match error {
            GroupError::Mismatch { own, theirs, .. } => {
                let kinds = [own.kind, theirs.kind];
                kinds.contains(&CallKind::Barrier) && kinds.contains(&CallKind::AllReduce)
            }
            _ => false,
        });
        assert!(named.count() > 0, "{errors:?}");
        for error in &errors {
            assert!(matches!(error, GroupError::Mismatch { .. } | GroupError::Over { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("barrier #1") && text.contains("all_reduce #1 of 5000 x f32"), "{text}");
        }
        ranks.shutdown().await;
    }
}

async fn ranks_that_give_different_numbers_of_elements_get_an_error(fabric: FabricKind) {
    for (count, reduction) in [(1000, Reduction::Sum), (1, Reduction::Max)] {
        let ranks = ranks(fabric, 3).await;
        let errors = ranks.each(async |group| {
            let mut values = vec![1i32; if group.rank() == 2 { count } else { 1 }];
            let reduction = if group.rank() == 2 { reduction.clone() } else { Reduction::Sum };
            group.all_reduce(&mut values).reduction(reduction).await.unwrap_err()
        });
        for error in errors.await {
            assert!(error.to_string().contains("all ranks must make the same calls"), "{error}");
        }
        ranks.shutdown().await;
    }
}

/// Once the ranks have met, short calls are exchanged at once where they can be: then the last rank finds what differs in its first
/// poll.
async fn a_short_call_that_differs_is_an_error_also_after_many_that_did_not(fabric: FabricKind) {
    for (size, last_count, last_reduction) in
        [(2, 1, Reduction::Max), (2, 2, Reduction::Sum), (3, 1, Reduction::Max)]
    {
        let ranks = ranks(fabric, size).await;
        let errors = ranks.each(async |group| {
            for _ in 0..20 {
                group.all_reduce(&mut [1i32]).await.unwrap();
            }
            let is_last = group.rank() + 1 == size;
            let mut values = vec![1i32; if is_last { last_count } else { 1 }];
            let reduction = if is_last { last_reduction.clone() } else { Reduction::Sum };
            group.all_reduce(&mut values).reduction(reduction).await.unwrap_err()
        });
        for error in errors.await {
            assert!(error.to_string().contains("all ranks must make the same calls"), "{error}");
        }
        ranks.shutdown().await;
    }
}

async fn a_rank_that_does_not_call_is_named_by_the_timeout(fabric: FabricKind) {
    let ranks = ranks_within(fabric, 3, Duration::from_secs(20)).await;
    let runtime = ranks.workers[0].runtime().clone();
    let begun = runtime.now();
    let errors = ranks.each(async |group| match group.rank() {
        2 => None,
        _ => group.all_reduce(&mut [1.0f32; 5000]).timeout(SHORT).await.err(),
    });
    let errors: Vec<_> = errors.await.into_iter().flatten().collect();
    assert_eq!(errors.len(), 2);
    assert!(runtime.now() - begun < 10 * SHORT, "{:?}", runtime.now() - begun);
    let named = |error: &GroupError| matches!(error, GroupError::TimedOut { silent, .. } if *silent == [2]);
    assert!(errors.iter().any(named), "{errors:?}");
    // The rank that did not call gets the error when it calls.
    let late = ranks.groups[2].barrier().await.unwrap_err();
    assert!(matches!(late, GroupError::Over { .. } | GroupError::Mismatch { .. }), "{late}");
    ranks.shutdown().await;
}

async fn a_call_that_is_dropped_ends_the_group_for_all(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let errors = ranks.each(async |group| match group.rank() {
        1 => {
            drop(group.barrier());
            group.failure().unwrap()
        }
        _ => group.barrier().await.unwrap_err(),
    });
    for error in errors.await {
        match error {
            GroupError::Over { rank: Some(1), why } => assert!(why.contains("given up"), "{why}"),
            other => panic!("{other}"),
        }
    }
    let later = ranks.groups[0].barrier().await.unwrap_err();
    assert!(matches!(later, GroupError::Over { rank: Some(1), .. }), "{later}");
    ranks.shutdown().await;
}

async fn a_lost_rank_ends_the_group_for_all(fabric: FabricKind) {
    let mut ranks = ranks(fabric, 4).await;
    let lost = ranks.workers.pop().unwrap();
    drop(ranks.groups.pop());
    let ((), errors) = join!(lost.shutdown(), ranks.each(async |group| group.barrier().await.unwrap_err()));
    for error in errors {
        let is_named = matches!(
            error,
            GroupError::RankLost { rank: 3, .. } | GroupError::Left { rank: 3, .. } | GroupError::Over { .. }
        );
        assert!(is_named, "{error}");
        assert!(error.to_string().contains("rank 3"), "{error}");
    }
    ranks.shutdown().await;
}

/// All ranks report the one that is lost, and none that only passed the end on.
async fn the_origin_of_an_end_is_the_rank_that_is_lost(fabric: FabricKind) {
    let mut ranks = ranks(fabric, 6).await;
    let lost = ranks.workers.pop().unwrap();
    drop(ranks.groups.pop());
    lost.shutdown().await;
    // Rank 2 neither sends to rank 5 nor waits for it, and is not even connected to it: it gets the end from another rank.
    let errors = ranks.each(async |group| {
        group.all_reduce(&mut [1f32; 5000]).algorithm(Algorithm::Ring).await.unwrap_err()
    });
    for error in errors.await {
        let (GroupError::RankLost { rank, .. }
        | GroupError::Left { rank, .. }
        | GroupError::Over { rank: Some(rank), .. }) = error
        else {
            panic!("{error}")
        };
        assert_eq!(rank, 5);
    }
    for later in ranks.each(async |group| group.barrier().await.unwrap_err()).await {
        assert!(matches!(later, GroupError::Over { rank: Some(5), .. }), "{later}");
    }
    ranks.shutdown().await;
}

async fn a_call_that_waits_for_its_turn_learns_that_the_group_is_over(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    // Rank 1 makes no call, so the first call cannot complete, and the last waits for its lane.
    let group = ranks.groups[0].clone();
    let mut calls: Vec<_> = (0..=CALLS_UNDER_WAY).map(|_| group.barrier()).collect();
    let last = calls.pop().unwrap();
    let end = async {
        ranks.workers[0].runtime().sleep(Duration::from_millis(20)).await;
        drop(calls);
    };
    let (error, ()) = join!(async { last.await.unwrap_err() }, end);
    assert!(error.to_string().contains("given up"), "{error}");
    ranks.shutdown().await;
}

async fn ranks_that_are_closed_may_go_at_once(fabric: FabricKind) {
    for size in [2, 3, 5, 8] {
        let Ranks { workers, groups } = ranks(fabric, size).await;
        let closing = groups.into_iter().zip(&workers).map(async |(group, worker)| {
            group.close().await.unwrap();
            worker.shutdown().await;
        });
        join_all(closing).await;
    }
}

async fn other_roots_and_other_parts_are_errors(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let errors = ranks.each(async |group| group.reduce(group.rank(), &mut [1u8; 9]).await.unwrap_err());
    for error in errors.await {
        assert!(error.to_string().contains("all ranks must make the same calls"), "{error}");
    }
    ranks.shutdown().await;
    let ranks = super::ranks(fabric, 2).await;
    let errors = ranks.each(async |group| {
        let counts = if group.rank() == 0 { [9, 0] } else { [0, 9] };
        group.reduce_scatter(&mut [1u8; 9], &counts).await.unwrap_err()
    });
    for error in errors.await {
        assert!(error.to_string().contains("all ranks must make the same calls"), "{error}");
    }
    ranks.shutdown().await;
}

async fn a_group_is_closed_once_earlier_calls_are_complete(fabric: FabricKind) {
    let Ranks { workers, groups } = ranks(fabric, 3).await;
    let closing = groups.into_iter().zip(&workers).map(async |(group, worker)| {
        let earlier = [group.barrier(), group.barrier()];
        let rank = group.rank() as u64;
        let earlier = async {
            // In another lane, where the close would have completed long before.
            worker.runtime().sleep(Duration::from_millis(30 * rank)).await;
            for call in earlier {
                call.await.unwrap();
            }
        };
        let close = async {
            group.close().await.unwrap();
            worker.shutdown().await;
        };
        join!(earlier, close)
    });
    join_all(closing).await;
}
