//! One group used many times, and groups derived from it: no message of an earlier call is received by a later one.

use tensorwire_collective::{Algorithm, Group};
use tensorwire_fabric::FabricKind;

use super::{input, sum};
use crate::group::{algorithms, over_fabrics_and_verbs, ranks};
use crate::join_all::join_all;

over_fabrics_and_verbs! {
    multiple_algorithms,
    context_factory_run_algo,
    several_groups_at_once,
}

async fn reduced(group: &Group, count: usize, algorithm: Algorithm) {
    let mut values = input(count, group.rank(), group.size());
    group.all_reduce(&mut values).algorithm(algorithm).await.unwrap();
    assert!(values == sum(count, group.size()), "{algorithm} of {count}");
}

/// All algorithms in sequence in one group, each twice, without a barrier in between.
async fn multiple_algorithms(fabric: FabricKind) {
    for size in [2, 3, 4] {
        let ranks = ranks(fabric, size).await;
        let calls = async |group: Group| {
            for algorithm in algorithms(&group) {
                reduced(&group, 1000, algorithm).await;
                reduced(&group, 10_007, algorithm).await;
            }
        };
        ranks.each(calls).await;
        ranks.shutdown().await;
    }
}

/// Ten groups in sequence, derived from one group and from one another, each with a barrier and an all-reduce.
async fn context_factory_run_algo(fabric: FabricKind) {
    let ranks = ranks(fabric, 4).await;
    let derive = async |group: Group| {
        let mut last = group.clone();
        for at in 0..10 {
            let of = if at % 2 == 0 { &group } else { &last };
            let derived = of.derive("derived").await.unwrap();
            assert_eq!((derived.rank(), derived.size()), (group.rank(), 4));
            derived.barrier().await.unwrap();
            reduced(&derived, 1000, Algorithm::Ring).await;
            last = derived;
        }
        group.barrier().await.unwrap();
        last.close().await.unwrap();
    };
    ranks.each(derive).await;
    ranks.shutdown().await;
}

/// Calls of several groups of the same workers are in progress at the same time.
async fn several_groups_at_once(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let calls = async |group: Group| {
        let names = ["a", "b", "c", "d"];
        let derived = join_all(names.map(|name| group.derive(name)).map(IntoFuture::into_future)).await;
        let derived: Vec<Group> = derived.into_iter().map(Result::unwrap).collect();
        join_all(derived.iter().enumerate().map(async |(at, group)| {
            for round in 0..10 {
                reduced(group, 100 * at + round, Algorithm::Ring).await;
                reduced(group, 100 * at + round, Algorithm::Exchange).await;
            }
        }))
        .await;
    };
    ranks.each(calls).await;
    ranks.shutdown().await;
}
