//! All-reduces: every algorithm, every number of ranks, short, long and empty values.

use half::f16;
use tensorwire_collective::{Algorithm, Group, Reduction};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::Element;
use zerocopy::FromBytes;

use super::{COUNTS, FEW_COUNTS, SIZES, input, sum, tensor, values};
use crate::group::{algorithms, over_fabrics_and_verbs, possible, ranks};

over_fabrics_and_verbs! {
    allreduce_ring,
    allreduce_ring_chunked,
    allreduce_halving_doubling,
    allreduce_doubling,
    allreduce_exchange,
    allreduce_default,
    allreduce_local,
    allreduce_several_inputs,
    allreduce_element_functions,
    half_precision,
}

async fn reduced<T: Element + FromBytes>(
    group: &Group,
    mut values: Vec<T>,
    reduction: Reduction,
    algorithm: Option<Algorithm>,
) -> Vec<T> {
    let call = group.all_reduce(&mut values).reduction(reduction);
    let call = algorithm.into_iter().fold(call, |call, algorithm| call.algorithm(algorithm));
    call.await.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
    values
}

/// Every rank has the sum, for each number of elements and of ranks.
async fn sums(
    fabric: FabricKind,
    sizes: impl IntoIterator<Item = usize>,
    counts: &[usize],
    algorithm: Option<Algorithm>,
) {
    for size in possible(fabric, sizes) {
        let ranks = ranks(fabric, size).await;
        for &count in counts {
            let got = ranks.each(async |group| {
                let values = input(count, group.rank(), size);
                reduced(&group, values, Reduction::Sum, algorithm).await
            });
            let expected = sum(count, size);
            assert!(got.await.iter().all(|got| *got == expected), "{size} ranks, {count} elements");
        }
        ranks.shutdown().await;
    }
}

async fn allreduce_ring(fabric: FabricKind) {
    sums(fabric, 1..=16, &COUNTS, Some(Algorithm::Ring)).await;
}

/// Several segments in each part, the last of them shorter.
async fn allreduce_ring_chunked(fabric: FabricKind) {
    sums(fabric, 2..=4, &[300_007, 400_000], Some(Algorithm::Ring)).await;
}

async fn allreduce_halving_doubling(fabric: FabricKind) {
    sums(fabric, (1..=9).chain([13, 16, 24]), &COUNTS, Some(Algorithm::HalvingDoubling)).await;
}

/// Powers of two, three and four.
async fn allreduce_doubling(fabric: FabricKind) {
    sums(fabric, [1, 2, 3, 4, 8, 9, 16, 27], &COUNTS, Some(Algorithm::Doubling)).await;
}

async fn allreduce_exchange(fabric: FabricKind) {
    sums(fabric, [1, 2, 3, 5, 8, 16], &COUNTS, Some(Algorithm::Exchange)).await;
}

/// On one host, the ranks read each other's memory in place.
async fn allreduce_default(fabric: FabricKind) {
    sums(fabric, SIZES, &COUNTS, None).await;
}

/// One rank alone, with every algorithm.
async fn allreduce_local(fabric: FabricKind) {
    for algorithm in Algorithm::ALL {
        sums(fabric, [1], &COUNTS, Some(algorithm)).await;
    }
}

/// Each rank passes several tensors, which do not change. The result is as if as many ranks passed one each.
async fn allreduce_several_inputs(fabric: FabricKind) {
    for (size, inputs) in [(1, 2), (2, 1), (2, 3), (3, 2), (5, 2)] {
        let ranks = ranks(fabric, size).await;
        let usable = algorithms(&ranks.groups[0]);
        for (algorithm, count) in
            usable.map(Some).chain([None]).flat_map(|algorithm| FEW_COUNTS.map(|count| (algorithm, count)))
        {
            let got = ranks.each(async |group| {
                let given = |at| input(count, group.rank() * inputs + at, size * inputs);
                let tensors: Vec<_> = (0..inputs).map(|at| tensor(&group, &given(at))).collect();
                let call = group.all_reduce_tensors(tensors.clone());
                let call = algorithm.into_iter().fold(call, |call, algorithm| call.algorithm(algorithm));
                let reduced = call.await.unwrap_or_else(|error| panic!("{algorithm:?}: {error}"));
                assert!(tensors.iter().enumerate().all(|(at, kept)| values(kept) == given(at)));
                assert_eq!(reduced.shape(), [count as u64]);
                values(&reduced)
            });
            let expected = sum(count, size * inputs);
            assert!(
                got.await.iter().all(|got| *got == expected),
                "{algorithm:?}, {size} ranks, {inputs} inputs, {count} elements"
            );
        }
        ranks.shutdown().await;
    }
}

async fn allreduce_element_functions(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    for (reduction, expected) in [
        (Reduction::Sum, [1 + 3 + 5, 2 + 4 + 6]),
        (Reduction::Product, [3 * 5, 2 * 4 * 6]),
        (Reduction::Min, [1, 2]),
        (Reduction::Max, [5, 6]),
    ] {
        for algorithm in algorithms(&ranks.groups[0]) {
            let got = ranks.each(async |group| {
                let own = [1, 2].map(|value| value + 2 * group.rank() as i32);
                let integers = reduced(&group, own.to_vec(), reduction.clone(), Some(algorithm)).await;
                let floats = own.iter().map(|value| f64::from(*value)).collect();
                let floats = reduced(&group, floats, reduction.clone(), Some(algorithm)).await;
                (integers, floats)
            });
            for (integers, floats) in got.await {
                assert_eq!(integers, expected, "{reduction:?}, {algorithm}");
                assert_eq!(floats, expected.map(f64::from), "{reduction:?}, {algorithm}");
            }
        }
    }
    ranks.shutdown().await;
}

/// Gloo's tolerance: a thousandth.
async fn half_precision(fabric: FabricKind) {
    for size in [2, 3, 4] {
        let ranks = ranks(fabric, size).await;
        for algorithm in [Some(Algorithm::Exchange), Some(Algorithm::HalvingDoubling), None] {
            for count in [1, 100, 1000] {
                let halves = |rank: usize| -> Vec<f16> {
                    (0..count).map(|at| f16::from_f32((at * size + rank) as f32 / 100.0)).collect()
                };
                let got = ranks
                    .each(async |group| {
                        reduced(&group, halves(group.rank()), Reduction::Sum, algorithm).await
                    })
                    .await;
                let inputs: Vec<_> = (0..size).map(halves).collect();
                for (at, value) in got.iter().flat_map(|got| got.iter().enumerate()) {
                    let exact: f32 = inputs.iter().map(|input| input[at].to_f32()).sum();
                    assert!((value.to_f32() - exact).abs() <= exact * 1e-3, "{at}: {value} for {exact}");
                }
            }
        }
        ranks.shutdown().await;
    }
}
