//! Reductions: every rank gets the result that one process would compute.

use half::f16;
use tensorwire_collective::{Algorithm, Group, GroupError, Reduction};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Tensor;

use super::{algorithms, over_fabrics, ranks};

over_fabrics! {
    all_algorithms_give_every_element_of_every_rank_once,
    long_values_travel_in_segments,
    values_larger_than_the_caches_are_combined,
    a_reduction_to_a_root_gives_it_the_result,
    each_rank_gets_its_part,
    all_ranks_have_the_same_bits,
    several_algorithms_in_a_row_share_a_group,
    a_mean_of_tensors_is_that_of_all_tensors,
    tensors_that_are_unlike_are_refused,
    tensors_and_values_are_different_calls,
    tensors_of_other_shapes_are_different_calls,
    tensors_outside_the_pool_are_combined,
}

/// Element `at` of `rank`, by Gloo's rule: a lost, duplicated or misplaced element changes a result.
pub(super) fn value(at: usize, rank: usize, size: usize) -> i64 {
    (at * size + rank) as i64
}

pub(super) fn input(count: usize, rank: usize, size: usize) -> Vec<i64> {
    (0..count).map(|at| value(at, rank, size)).collect()
}

pub(super) fn sum(count: usize, size: usize) -> Vec<i64> {
    (0..count).map(|at| (0..size).map(|rank| value(at, rank, size)).sum()).collect()
}

/// Those that can be named, and the default.
fn choices(group: &Group) -> impl Iterator<Item = Option<Algorithm>> + use<> {
    algorithms(group).map(Some).chain([None])
}

async fn all_reduced(group: Group, count: usize, algorithm: Option<Algorithm>) -> Vec<i64> {
    let mut values = input(count, group.rank(), group.size());
    let call = group.all_reduce(&mut values);
    let call = match algorithm {
        Some(algorithm) => call.algorithm(algorithm),
        None => call,
    };
    call.await.unwrap_or_else(|error| panic!("{algorithm:?} of {count}: {error}"));
    values
}

async fn all_algorithms_give_every_element_of_every_rank_once(fabric: FabricKind) {
    for size in [1, 2, 3, 4, 5, 8] {
        let ranks = ranks(fabric, size).await;
        for algorithm in choices(&ranks.groups[0]) {
            for count in [0, 1, 4, 13, 64, 1000, 10_007] {
                let got = ranks.each(|group| all_reduced(group, count, algorithm)).await;
                let expected = sum(count, size);
                assert!(
                    got.iter().all(|got| *got == expected),
                    "{algorithm:?}, {size} ranks, {count} elements"
                );
            }
        }
        ranks.shutdown().await;
    }
}

async fn long_values_travel_in_segments(fabric: FabricKind) {
    // More than two segments of each algorithm that has segments, the last one shorter.
    let count = (5 << 20) / 8 + 3;
    for size in [2, 3] {
        let ranks = ranks(fabric, size).await;
        for algorithm in choices(&ranks.groups[0]) {
            let got = ranks.each(|group| all_reduced(group, count, algorithm)).await;
            let expected = sum(count, size);
            assert!(got.iter().all(|got| *got == expected), "{algorithm:?}, {size} ranks");
        }
        ranks.shutdown().await;
    }
}

/// Their results are written past the caches.
async fn values_larger_than_the_caches_are_combined(fabric: FabricKind) {
    let (count, size) = ((16 << 20) / 8 + 3, 2);
    let ranks = ranks(fabric, size).await;
    let expected = sum(count, size);
    let got = ranks.each(|group| all_reduced(group, count, None)).await;
    assert!(got.iter().all(|got| *got == expected), "values");
    let got = ranks.each(async |group| {
        let own = input(count, group.rank(), size);
        let own = Tensor::from_values(group.worker().pool(), &[count as u64], &own).unwrap();
        group.all_reduce_tensors([own]).await.unwrap()
    });
    assert!(got.await.iter().all(|got| got.values::<i64>().unwrap() == expected), "tensors");
    ranks.shutdown().await;
}

async fn a_reduction_to_a_root_gives_it_the_result(fabric: FabricKind) {
    for size in [1, 2, 3, 6] {
        let ranks = ranks(fabric, size).await;
        for root in 0..size {
            for count in [0, 1, 7, 100, 100_003] {
                let got = ranks.each(async |group| {
                    let mut values = input(count, group.rank(), size);
                    group.reduce(root, &mut values).await.unwrap();
                    values
                });
                assert!(got.await[root] == sum(count, size), "{size} ranks, root {root}, {count} elements");
            }
        }
        ranks.shutdown().await;
    }
}

/// The part of this rank. `counts` has the number of elements of all ranks' parts.
pub(super) async fn part(group: Group, counts: &[usize]) -> Vec<i64> {
    let mut values = input(counts.iter().sum(), group.rank(), group.size());
    group.reduce_scatter(&mut values, counts).await.unwrap();
    let begin: usize = counts[..group.rank()].iter().sum();
    values[begin..begin + counts[group.rank()]].to_vec()
}

async fn each_rank_gets_its_part(fabric: FabricKind) {
    for size in [1, 2, 3, 5] {
        let ranks = ranks(fabric, size).await;
        for unit in [0, 1, 500] {
            // The first part is empty.
            let counts: Vec<usize> = (0..size).map(|rank| rank * unit).collect();
            let count = counts.iter().sum();
            let got = ranks.each(async |group| part(group, &counts).await);
            assert!(got.await.concat() == sum(count, size), "{size} ranks, {unit}");
        }
        ranks.shutdown().await;
    }
}

async fn all_ranks_have_the_same_bits(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    for algorithm in choices(&ranks.groups[0]) {
        for count in [5, 5000] {
            let got = ranks.each(async |group| {
                let thirds = (0..count).map(|at| 1.0 / (at + 3 * group.rank() + 1) as f32);
                let mut values: Vec<f16> = thirds.map(f16::from_f32).collect();
                let call = group.all_reduce(&mut values).reduction(Reduction::Mean);
                let call = algorithm.into_iter().fold(call, |call, algorithm| call.algorithm(algorithm));
                call.await.unwrap();
                values
            });
            let got = got.await;
            assert!(got.windows(2).all(|two| two[0] == two[1]), "{algorithm:?}");
            for (at, value) in got[0].iter().enumerate() {
                let mean = (0..3).map(|rank| 1.0 / (at + 3 * rank + 1) as f32).sum::<f32>() / 3.0;
                assert!(
                    (value.to_f32() - mean).abs() <= mean * 2e-3,
                    "{algorithm:?}, {at}: {value} for {mean}"
                );
            }
        }
    }
    ranks.shutdown().await;
}

async fn several_algorithms_in_a_row_share_a_group(fabric: FabricKind) {
    let ranks = ranks(fabric, 4).await;
    let algorithms: Vec<_> = choices(&ranks.groups[0]).collect();
    let got = ranks.each(async |group| {
        let mut got = Vec::new();
        for algorithm in algorithms.iter().chain(&algorithms) {
            got.push(all_reduced(group.clone(), 777, *algorithm).await);
            group.barrier().await.unwrap();
        }
        got
    });
    assert!(got.await.iter().flatten().all(|got| *got == sum(777, 4)));
    ranks.shutdown().await;
}

async fn a_mean_of_tensors_is_that_of_all_tensors(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let got = ranks.each(async |group| {
        let own = [0.0, 1.0].map(|at| 2.0 * group.rank() as f32 + at);
        let tensor = |value| Tensor::from_values(group.worker().pool(), &[600, 2], &[value; 1200]).unwrap();
        let mean = group.all_reduce_tensors(own.map(tensor)).reduction(Reduction::Mean).await.unwrap();
        assert_eq!(mean.shape(), [600, 2]);
        mean.values::<f32>().unwrap()
    });
    assert!(got.await.concat().iter().all(|mean| *mean == 1.5));
    ranks.shutdown().await;
}

async fn tensors_that_are_unlike_are_refused(fabric: FabricKind) {
    let tensor = |group: &Group, shape: &[u64]| {
        let values = vec![1.0f64; shape.iter().product::<u64>() as usize];
        Tensor::from_values(group.worker().pool(), shape, &values).unwrap()
    };
    for given in ["none", "shapes", "types", "dead"] {
        let ranks = ranks(fabric, 2).await;
        let errors = ranks.each(async |group| {
            let first = tensor(&group, &[2, 3]);
            let inputs = match given {
                "none" => Vec::new(),
                "shapes" => vec![first, tensor(&group, &[3, 2])],
                "types" => {
                    vec![first, Tensor::from_values(group.worker().pool(), &[2, 3], &[1i64; 6]).unwrap()]
                }
                _ => vec![Tensor::dead(DataType::F64, &[2, 3]).unwrap()],
            };
            group.all_reduce_tensors(inputs).await.unwrap_err()
        });
        let errors = errors.await;
        let is_named = |error: &GroupError| matches!(error, GroupError::Argument { field: "inputs", .. });
        assert!(errors.iter().all(is_named), "{given}: {errors:?}");
        ranks.shutdown().await;
    }
}

async fn tensors_of_other_shapes_are_different_calls(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let errors = ranks.each(async |group| {
        let shape = if group.rank() == 0 { [2, 3] } else { [3, 2] };
        let own = Tensor::from_values(group.worker().pool(), &shape, &[1i64; 6]).unwrap();
        group.all_reduce_tensors([own]).await.unwrap_err()
    });
    let errors = errors.await;
    assert!(errors.iter().any(|error| matches!(error, GroupError::Mismatch { .. })), "{errors:?}");
    ranks.shutdown().await;
}

/// Tensors in memory that others cannot map, and views of another rank's.
async fn tensors_outside_the_pool_are_combined(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let got = ranks.each(async |group| {
        let own = input(50_000, group.rank(), 3);
        let own = Tensor::from_vec(group.worker().user_memory(), &[50_000], own).unwrap();
        let sum = group.all_reduce_tensors([own.clone()]).await.unwrap();
        let all = group.all_gather(own).await.unwrap();
        let again = group.all_reduce_tensors([all[(group.rank() + 1) % 3].clone()]).await.unwrap();
        [sum, again].map(|sum| sum.values::<i64>().unwrap())
    });
    assert!(got.await.iter().flatten().all(|got| *got == sum(50_000, 3)));
    ranks.shutdown().await;
}

async fn tensors_and_values_are_different_calls(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let errors = ranks.each(async |group| {
        let mut own = [1i64; 5000];
        match group.rank() {
            0 => group.all_reduce(&mut own).await.unwrap_err(),
            _ => {
                let own = Tensor::from_values(group.worker().pool(), &[5000], &own).unwrap();
                group.all_reduce_tensors([own]).await.unwrap_err()
            }
        }
    });
    let errors = errors.await;
    assert!(errors.iter().any(|error| matches!(error, GroupError::Mismatch { .. })), "{errors:?}");
    ranks.shutdown().await;
}
