//! Groups derived from a group, without its store.

use std::time::Duration;

use futures::future::join;
use tensorwire_collective::{Group, GroupError};
use tensorwire_fabric::FabricKind;

use super::{over_fabrics, ranks};

over_fabrics! {
    a_derived_group_outlives_the_one_that_it_is_of,
    a_failure_stays_in_its_group,
    a_subgroup_has_the_ranks_that_are_named_in_their_order,
    ranks_that_derive_different_groups_get_an_error,
    groups_that_cannot_be_derived_are_refused,
    a_derived_group_shrinks,
}

async fn sum_of_ranks(group: &Group) -> usize {
    let mut values = [group.rank() as u64; 100];
    group.all_reduce(&mut values).await.unwrap();
    values[0] as usize
}

async fn a_derived_group_outlives_the_one_that_it_is_of(fabric: FabricKind) {
    let mut ranks = ranks(fabric, 3).await;
    ranks.groups = ranks
        .each(async |group| {
            let derived = group.derive("second").await.unwrap();
            group.close().await.unwrap();
            derived
        })
        .await;
    let sums = ranks.each(async |group| {
        assert_eq!(group.name(), "second");
        sum_of_ranks(&group).await
    });
    assert_eq!(sums.await, [3; 3]);
    ranks.shutdown().await;
}

async fn a_failure_stays_in_its_group(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    ranks
        .each(async |group| {
            let (one, other) =
                join(group.derive("one").into_future(), group.derive("other").into_future()).await;
            let (one, other) = (one.unwrap(), other.unwrap());
            drop(one.barrier());
            let failed = one.barrier().await.unwrap_err();
            assert!(matches!(failed, GroupError::Over { .. }), "{failed}");
            assert_eq!(sum_of_ranks(&other).await, 1);
            assert_eq!(sum_of_ranks(&group).await, 1);
        })
        .await;
    ranks.shutdown().await;
}

async fn a_subgroup_has_the_ranks_that_are_named_in_their_order(fabric: FabricKind) {
    let ranks = ranks(fabric, 5).await;
    let got = ranks.each(async |group| {
        let odd = group.subgroup("odd", &[3, 1]).into_future();
        let even = group.subgroup("even", &[0, 2, 4]).into_future();
        let (odd, even) = join(odd, even).await;
        let (odd, even) = (odd.unwrap(), even.unwrap());
        assert_eq!(odd.is_some(), group.rank() % 2 == 1);
        assert_eq!(even.is_some(), group.rank() % 2 == 0);
        let own = odd.or(even).unwrap();
        assert_eq!(own.members().nth(own.rank()), Some(group.worker().name()));
        (own.rank(), own.size(), sum_of_ranks(&own).await)
    });
    assert_eq!(got.await, [(0, 3, 3), (1, 2, 1), (1, 3, 3), (0, 2, 1), (2, 3, 3)]);
    ranks.shutdown().await;
}

async fn ranks_that_derive_different_groups_get_an_error(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let errors = ranks.each(async |group| {
        let name = if group.rank() == 0 { "one" } else { "other" };
        group.derive(name).await.unwrap_err()
    });
    for error in errors.await {
        assert!(error.to_string().contains("all ranks must make the same calls"), "{error}");
    }
    ranks.shutdown().await;
}

async fn groups_that_cannot_be_derived_are_refused(fabric: FabricKind) {
    for (name, members, named) in
        [("", [0, 1], "name"), ("a\nb", [0, 1], "name"), ("a", [0, 0], "ranks"), ("a", [0, 2], "ranks")]
    {
        let ranks = ranks(fabric, 2).await;
        let errors = ranks.each(async |group| group.subgroup(name, &members).await.unwrap_err()).await;
        let is_named =
            |error: &GroupError| matches!(error, GroupError::Argument { field, .. } if *field == named);
        assert!(errors.iter().all(is_named), "{errors:?}");
        ranks.shutdown().await;
    }
    let ranks = ranks(fabric, 1).await;
    let error = ranks.groups[0].subgroup("a", &[]).await.unwrap_err();
    assert!(error.to_string().contains("give at least one rank"), "{error}");
    ranks.shutdown().await;
}

/// Its ranks join in the store of the group from which it is derived.
async fn a_derived_group_shrinks(fabric: FabricKind) {
    let mut ranks = super::ranks_within(fabric, 3, Duration::from_secs(20)).await;
    ranks.groups = ranks.each(async |group| group.derive("derived").await.unwrap()).await;
    let lost = ranks.workers.remove(1);
    drop(ranks.groups.remove(1));
    lost.shutdown().await;
    ranks.groups = ranks.each(async |group| group.shrink().await.unwrap()).await;
    assert_eq!(ranks.each(async |group| sum_of_ranks(&group).await).await, [1; 2]);
    ranks.shutdown().await;
}
