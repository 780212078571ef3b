//! Reductions against a scalar reference.

use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;
use tensorwire_collective::reduction::{Combine, Reduction, ReductionError};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Element;

fn bytes<T: Element>(values: &[T]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(values)];
    bytes.chunks_exact_mut(size_of::<T>()).zip(values).for_each(|(place, value)| value.encode(place));
    bytes
}

fn values<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::decode).collect()
}

fn folded<T: Element>(reduction: &Reduction, own: &[T], other: &[T]) -> Vec<T> {
    let mut own = bytes(own);
    reduction.fold(T::DTYPE, &mut own, &bytes(other)).unwrap();
    values(&own)
}

fn all_folded<T: Element>(reduction: &Reduction, inputs: &[Vec<T>]) -> Vec<T> {
    let inputs: Vec<_> = inputs.iter().map(|input| bytes(input)).collect();
    let mut into = vec![1; inputs[0].len()];
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    reduction.fold_all(T::DTYPE, &mut into, &inputs).unwrap();
    values(&into)
}

macro_rules! integers_wrap_around {
    ($($name:ident $integer:ty,)*) => {
        proptest! {
            $(#[test]
            fn $name(pairs: Vec<($integer, $integer)>) {
                let (own, other): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
                let check = |reduction, expected: fn($integer, $integer) -> $integer| {
                    let expected: Vec<_> = pairs.iter().map(|&(own, other)| expected(own, other)).collect();
                    assert_eq!(folded(&reduction, &own, &other), expected);
                    if !own.is_empty() {
                        assert_eq!(all_folded(&reduction, &[own.clone(), other.clone()]), expected);
                    }
                };
                check(Reduction::Sum, <$integer>::wrapping_add);
                check(Reduction::Product, <$integer>::wrapping_mul);
                check(Reduction::Min, <$integer as Ord>::min);
                check(Reduction::Max, <$integer as Ord>::max);
            })*
        }
    };
}

integers_wrap_around! {
    i8_wrap_around i8, i16_wrap_around i16, i32_wrap_around i32, i64_wrap_around i64,
    u8_wrap_around u8, u16_wrap_around u16, u32_wrap_around u32, u64_wrap_around u64,
}

proptest! {
    #[test]
    fn floats_are_combined_as_their_type_does(pairs in prop::collection::vec((-1e6f64..1e6, -1e6f64..1e6), 0..3000)) {
        let (own, other): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
        let of = |expected: fn(f64, f64) -> f64| pairs.iter().map(|&(own, other)| expected(own, other)).collect::<Vec<_>>();
        assert_eq!(folded(&Reduction::Sum, &own, &other), of(|own, other| own + other));
        assert_eq!(folded(&Reduction::Product, &own, &other), of(|own, other| own * other));
        assert_eq!(folded(&Reduction::Min, &own, &other), of(f64::min));
        assert_eq!(folded(&Reduction::Max, &own, &other), of(f64::max));
    }

    #[test]
    fn many_halves_are_rounded_once(inputs in prop::collection::vec(prop::collection::vec(-100f32..100.0, 5000), 1..9)) {
        let wide = |at: usize| inputs.iter().map(|input| f16::from_f32(input[at]).to_f32()).fold(0.0, |sum, value| sum + value);
        let halves: Vec<Vec<f16>> = inputs.iter().map(|input| input.iter().copied().map(f16::from_f32).collect()).collect();
        let sums = all_folded(&Reduction::Sum, &halves);
        let means = all_folded(&Reduction::Mean, &halves);
        for at in 0..5000 {
            assert_eq!(sums[at], f16::from_f32(wide(at)));
            assert_eq!(means[at], f16::from_f32(wide(at) / inputs.len() as f32));
        }
    }
}

#[test]
fn a_mean_of_halves_does_not_overflow_where_the_sum_does() {
    let inputs = vec![vec![f16::from_f32(60_000.0)]; 4];
    assert_eq!(all_folded(&Reduction::Mean, &inputs), [f16::from_f32(60_000.0)]);
    assert_eq!(all_folded(&Reduction::Sum, &inputs), [f16::INFINITY]);
    let inputs = vec![vec![bf16::from_f32(1.5)], vec![bf16::from_f32(2.5)]];
    assert_eq!(all_folded(&Reduction::Mean, &inputs), [bf16::from_f32(2.0)]);
    assert_eq!(folded(&Reduction::Max, &inputs[0], &inputs[1]), [bf16::from_f32(2.5)]);
}

#[test]
fn nan_is_the_least_and_the_greatest() {
    let (own, other) = ([f32::NAN, 1.0, f32::INFINITY, -0.5], [1.0, f32::NAN, 1.0, f32::NEG_INFINITY]);
    for reduction in [Reduction::Min, Reduction::Max] {
        let got = folded(&reduction, &own, &other);
        assert!(got[0].is_nan() && got[1].is_nan(), "{reduction:?}");
    }
    assert_eq!(folded(&Reduction::Min, &own, &other)[2..], [1.0, f32::NEG_INFINITY]);
    assert_eq!(folded(&Reduction::Max, &own, &other)[2..], [f32::INFINITY, -0.5]);
}

#[test]
fn bools_and_complex_numbers() {
    let (own, other) = ([false, false, true, true], [false, true, false, true]);
    for reduction in [Reduction::Sum, Reduction::Max] {
        assert_eq!(folded(&reduction, &own, &other), [false, true, true, true]);
    }
    for reduction in [Reduction::Product, Reduction::Min] {
        assert_eq!(folded(&reduction, &own, &other), [false, false, false, true]);
    }
    assert_eq!(folded(&Reduction::Product, &[[1.0f32, 2.0]], &[[3.0, 4.0]]), [[-5.0, 10.0]]);
    assert_eq!(all_folded(&Reduction::Mean, &[vec![[1.0f64, 2.0]], vec![[3.0, 4.0]]]), [[2.0, 3.0]]);
}

#[test]
fn memory_need_not_be_aligned() {
    let (mut own, other) = (vec![0; 17], bytes(&[1.5f64, 2.5]));
    own[1..].copy_from_slice(&bytes(&[1.0f64, 2.0]));
    Reduction::Sum.fold(DataType::F64, &mut own[1..], &other).unwrap();
    assert_eq!(values::<f64>(&own[1..]), [2.5, 4.5]);
}

#[test]
fn what_cannot_be_combined_is_refused() {
    let refused = [
        (Reduction::Sum, DataType::String),
        (Reduction::Sum, DataType::F8E4M3),
        (Reduction::Min, DataType::C64),
        (Reduction::Max, DataType::C128),
        (Reduction::Mean, DataType::I32),
        (Reduction::Mean, DataType::Bool),
    ];
    for (reduction, dtype) in refused {
        let error = reduction.check(dtype).unwrap_err();
        assert!(matches!(&error, ReductionError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(dtype.name()), "{error}");
        assert_eq!(reduction.fold(dtype, &mut [0; 16], &[0; 16]).unwrap_err(), error);
    }
}

#[derive(Debug)]
struct Or;

impl Combine for Or {
    fn combine(&self, dtype: DataType, into: &mut [u8], from: &[u8]) -> Result<(), String> {
        if dtype != DataType::U8 {
            return Err(format!("no bits: {dtype}"));
        }
        into.iter_mut().zip(from).for_each(|(into, from)| *into |= from);
        Ok(())
    }
}

#[test]
fn a_users_function_combines() {
    let reduction = Reduction::User(Arc::new(Or));
    assert_eq!(all_folded(&reduction, &[vec![1u8, 2], vec![4, 2], vec![8, 0]]), [13, 2]);
    let refused = reduction.fold(DataType::I32, &mut [0; 4], &[0; 4]).unwrap_err();
    assert_eq!(refused, ReductionError::User { why: "no bits: i32".to_owned() });
}
