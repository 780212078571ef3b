//! Floats near the bounds of their types: what ranks compute, beside what one process computes.

use std::fmt;

use half::{bf16, f16};
use tensorwire_collective::{Algorithm, Group, Reduction};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Element, Tensor};
use zerocopy::FromBytes;

use super::{Ranks, algorithms, hosts::ranks_on, over_fabrics, ranks};

over_fabrics! {
    f16_is_rounded_once_by_every_algorithm,
    bf16_is_rounded_once_by_every_algorithm,
    f32_has_its_own_precision_by_every_algorithm,
    f64_has_its_own_precision_by_every_algorithm,
    a_mean_of_numbers_near_the_largest_of_16_bits_is_finite,
    long_values_are_rounded_once,
}

/// Values that come at once, with the call header, and on their own.
const COUNTS: [usize; 3] = [9, 700, 5_000];

const REDUCTIONS: [Reduction; 5] =
    [Reduction::Sum, Reduction::Mean, Reduction::Product, Reduction::Min, Reduction::Max];

trait Float: Element + FromBytes + Copy + fmt::Debug + Send + Sync + 'static {
    const LARGEST: Self;
    const LEAST_NORMAL: Self;
    /// The least number above zero.
    const LEAST: Self;
    /// Whether results must be those of 64-bit floats, rounded once.
    const IS_ROUNDED_ONCE: bool;

    fn of(number: f64) -> Self;
    fn wide(self) -> f64;
    /// The number of steps to another number.
    fn ulps(self, other: Self) -> u64;
}

macro_rules! floats {
    ($($float:ident $bits:ident $is_rounded_once:literal $of:expr, $least:expr;)*) => {
        $(impl Float for $float {
            const LARGEST: Self = $float::MAX;
            const LEAST_NORMAL: Self = $float::MIN_POSITIVE;
            const LEAST: Self = $least;
            const IS_ROUNDED_ONCE: bool = $is_rounded_once;

            fn of(number: f64) -> Self {
                $of(number)
            }

            fn wide(self) -> f64 {
                f64::from(self)
            }

            fn ulps(self, other: Self) -> u64 {
                let place = |number: Self| {
                    let size = i128::from(number.to_bits() & ($bits::MAX >> 1));
                    if number.is_sign_negative() { -size } else { size }
                };
                if self.is_nan() || other.is_nan() {
                    return if self.is_nan() == other.is_nan() { 0 } else { u64::MAX };
                }
                (place(self) - place(other)).unsigned_abs() as u64
            }
        })*
    };
}

floats! {
    f16 u16 true f16::from_f64, f16::from_bits(1);
    bf16 u16 true bf16::from_f64, bf16::from_bits(1);
    f32 u32 false |number| number as f32, f32::from_bits(1);
    f64 u64 false |number| number, f64::from_bits(1);
}

/// Element `at` of `rank`.
fn value<T: Float>(reduction: &Reduction, at: usize, rank: usize, size: usize) -> T {
    let (largest, nth) = (T::LARGEST.wide(), rank as f64);
    let is_product = matches!(reduction, Reduction::Product);
    if is_product && rank > 0 {
        return T::of(1.0 - nth / 8.0);
    }
    T::of(match at % 9 {
        0 => largest,
        1 => -largest,
        2 => largest * (1.0 - nth / 64.0),
        // Overflows in between in the order of the ranks, and is the largest at the end.
        3 if T::IS_ROUNDED_ONCE && size % 2 == 1 && rank % 2 == 1 => -largest,
        3 if T::IS_ROUNDED_ONCE => largest,
        4 => largest / size as f64,
        5 => T::LEAST.wide() * (nth + 1.0),
        6 => T::LEAST_NORMAL.wide() * (1.0 + nth / 8.0),
        7 => 1.0 + nth / 3.0 + at as f64 / 1e5,
        _ => (nth + 0.7) * (1.0 + at as f64 / 1e3),
    })
}

/// What one process computes: in 64-bit floats, or in the type's own.
fn expected<T: Float>(reduction: &Reduction, values: &[T]) -> T {
    let round = |number: f64| if T::IS_ROUNDED_ONCE { number } else { T::of(number).wide() };
    let wide = values.iter().map(|value| value.wide());
    let combined = wide.reduce(|one, other| match reduction {
        Reduction::Product => round(one * other),
        Reduction::Min => one.min(other),
        Reduction::Max => one.max(other),
        _ => round(one + other),
    });
    let ranks = if matches!(reduction, Reduction::Mean) { values.len() as f64 } else { 1.0 };
    T::of(combined.unwrap() / ranks)
}

fn input<T: Float>(reduction: &Reduction, count: usize, rank: usize, size: usize) -> Vec<T> {
    (0..count).map(|at| value(reduction, at, rank, size)).collect()
}

/// `got` is element `from` and later ones of a result of `values` values.
fn check<T: Float>(got: &[T], from: usize, reduction: &Reduction, values: usize, what: &str) {
    // Each step of another order is rounded in another way.
    let limit = if T::IS_ROUNDED_ONCE { 1 } else { values as u64 };
    for (at, got) in (from..).zip(got) {
        let mut inputs = [T::LEAST; 8];
        let inputs = &mut inputs[..values];
        inputs.iter_mut().enumerate().for_each(|(rank, input)| *input = value(reduction, at, rank, values));
        let expected = expected(reduction, inputs);
        let ulps = got.ulps(expected);
        assert!(
            ulps <= limit,
            "{what}: element {at} of {inputs:?} is {got:?}, {ulps} steps from {expected:?}"
        );
    }
}

/// All calls that combine, with every reduction and algorithm.
async fn every_call<T: Float>(ranks: &Ranks, counts: &[usize]) {
    let choices: Vec<_> = algorithms(&ranks.groups[0]).map(Some).chain([None]).collect();
    ranks
        .each(async |group| {
            for reduction in &REDUCTIONS {
                for count in counts.iter().copied() {
                    for algorithm in &choices {
                        all_reduces::<T>(&group, reduction, count, *algorithm).await;
                    }
                    to_some::<T>(&group, reduction, count).await;
                }
            }
        })
        .await;
}

async fn all_reduces<T: Float>(
    group: &Group,
    reduction: &Reduction,
    count: usize,
    algorithm: Option<Algorithm>,
) {
    let (rank, size) = (group.rank(), group.size());
    let what = format!("{reduction:?} of {count} on {size} by {algorithm:?}");
    let mut values: Vec<T> = input(reduction, count, rank, size);
    let call = group.all_reduce(&mut values).reduction(reduction.clone());
    let call = algorithm.into_iter().fold(call, |call, algorithm| call.algorithm(algorithm));
    call.await.unwrap_or_else(|error| panic!("{what}: {error}"));
    check(&values, 0, reduction, size, &what);
    for each in [1, 2] {
        let tensor = |at: usize| {
            let values: Vec<T> = input(reduction, count, rank * each + at, size * each);
            Tensor::from_values(group.worker().pool(), &[count as u64], &values).unwrap()
        };
        let call = group.all_reduce_tensors((0..each).map(tensor)).reduction(reduction.clone());
        let call = algorithm.into_iter().fold(call, |call, algorithm| call.algorithm(algorithm));
        let got = call.await.unwrap_or_else(|error| panic!("{what}: {error}")).values::<T>().unwrap();
        // A mean of means overflows later, and its two divisions are rounded.
        if each == 1 || T::IS_ROUNDED_ONCE || !matches!(reduction, Reduction::Mean) {
            check(&got, 0, reduction, size * each, &format!("{what}, {each} tensors"));
        }
    }
}

async fn to_some<T: Float>(group: &Group, reduction: &Reduction, count: usize) {
    let (rank, size) = (group.rank(), group.size());
    let root = size - 1;
    let mut values: Vec<T> = input(reduction, count, rank, size);
    group.reduce(root, &mut values).reduction(reduction.clone()).await.unwrap();
    if rank == root {
        check(&values, 0, reduction, size, &format!("{reduction:?} of {count} to one of {size}"));
    }
    let (part, rest) = (count / size, count % size);
    let counts: Vec<usize> = (0..size).map(|rank| part + if rank == 0 { rest } else { 0 }).collect();
    let mut values: Vec<T> = input(reduction, count, rank, size);
    group.reduce_scatter(&mut values, &counts).reduction(reduction.clone()).await.unwrap();
    let from = counts[..rank].iter().sum();
    check(
        &values[from..from + counts[rank]],
        from,
        reduction,
        size,
        &format!("{reduction:?}, parts of {count}"),
    );
}

async fn everywhere<T: Float>(fabric: FabricKind) {
    for size in [1, 2, 3, 4] {
        let ranks = ranks(fabric, size).await;
        every_call::<T>(&ranks, &COUNTS).await;
        ranks.shutdown().await;
    }
}

async fn f16_is_rounded_once_by_every_algorithm(fabric: FabricKind) {
    everywhere::<f16>(fabric).await;
}

async fn bf16_is_rounded_once_by_every_algorithm(fabric: FabricKind) {
    everywhere::<bf16>(fabric).await;
}

async fn f32_has_its_own_precision_by_every_algorithm(fabric: FabricKind) {
    everywhere::<f32>(fabric).await;
}

async fn f64_has_its_own_precision_by_every_algorithm(fabric: FabricKind) {
    everywhere::<f64>(fabric).await;
}

/// Ranks of some hosts pass on 32-bit floats.
#[tokio::test]
async fn all_types_are_combined_across_hosts() {
    for hosts in ["aab", "abab"] {
        let ranks = ranks_on(hosts).await;
        every_call::<f16>(&ranks, &COUNTS).await;
        every_call::<bf16>(&ranks, &COUNTS).await;
        every_call::<f32>(&ranks, &COUNTS).await;
        ranks.shutdown().await;
    }
}

async fn a_mean_of_numbers_near_the_largest_of_16_bits_is_finite(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let means = ranks.each(async |group| {
        let mut values = vec![f16::from_f32(60_000.0); 40_000];
        group.all_reduce(&mut values).reduction(Reduction::Mean).await.unwrap();
        let mut of_32_bits = vec![f32::MAX; 40_000];
        group.all_reduce(&mut of_32_bits).reduction(Reduction::Mean).await.unwrap();
        assert!(of_32_bits.iter().all(|mean| mean.is_infinite()), "the sum exceeds their own type");
        values
    });
    assert!(means.await.concat().iter().all(|mean| *mean == f16::from_f32(60_000.0)));
    ranks.shutdown().await;
}

/// Several segments for each rank.
async fn long_values_are_rounded_once(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let done = ranks.each(async |group| all_reduces::<f16>(&group, &Reduction::Mean, 900_001, None).await);
    done.await;
    let done = ranks.each(async |group| to_some::<bf16>(&group, &Reduction::Sum, 900_001).await);
    done.await;
    ranks.shutdown().await;
}
