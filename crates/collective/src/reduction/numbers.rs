//! The arithmetic of each element type. Loops over elements are simple, so that the compiler can vectorise them.

use half::slice::HalfFloatSliceExt as _;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Element;

use super::BLOCK_BYTES;

/// An operation on two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Sum,
    Product,
    Min,
    Max,
}

/// Elements as arrays, whose length the compiler knows in any build. A loop over slices of the same length becomes vector code only
/// if everything in it is inlined.
trait Chunked: Element {
    /// An encoded element.
    type Bytes: AsRef<[u8]> + AsMut<[u8]>;

    /// The encoded elements, without an incomplete one at the end.
    fn chunks(bytes: &[u8]) -> &[Self::Bytes];
    /// As [`chunks`](Self::chunks).
    fn chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
}

macro_rules! chunked {
    ($($element:ty)*) => {
        $(impl Chunked for $element {
            type Bytes = [u8; size_of::<$element>()];

            #[inline]
            fn chunks(bytes: &[u8]) -> &[Self::Bytes] {
                bytes.as_chunks().0
            }

            #[inline]
            fn chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes] {
                bytes.as_chunks_mut().0
            }
        })*
    };
}

chunked! { i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 [f32; 2] [f64; 2] bool half::f16 half::bf16 }

/// Numbers that can be combined.
trait Number: Chunked {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($integer:ty)*) => {
        $(impl Number for $integer {
            #[inline]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline]
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }
        })*
    };
}

integers! { i8 i16 i32 i64 u8 u16 u32 u64 }

macro_rules! floats {
    ($($float:ty)*) => {
        $(impl Number for $float {
            #[inline]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline]
            fn product(self, other: Self) -> Self {
                self * other
            }

            // NaN if one is NaN. The methods `min` and `max` would ignore it.
            #[inline]
            fn least(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }

            #[inline]
            fn greatest(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
        })*
    };
}

floats! { f32 f64 }

macro_rules! complex {
    ($($part:ty)*) => {
        $(impl Number for [$part; 2] {
            #[inline]
            fn sum(self, other: Self) -> Self {
                [self[0] + other[0], self[1] + other[1]]
            }

            #[inline]
            fn product(self, other: Self) -> Self {
                let ([a, b], [c, d]) = (self, other);
                [a * c - b * d, a * d + b * c]
            }

            // Not reached: `Reduction::check` rejects these.
            #[inline]
            fn least(self, _: Self) -> Self {
                self
            }

            #[inline]
            fn greatest(self, _: Self) -> Self {
                self
            }
        })*
    };
}

complex! { f32 f64 }

impl Number for bool {
    #[inline]
    fn sum(self, other: Self) -> Self {
        self | other
    }

    #[inline]
    fn product(self, other: Self) -> Self {
        self & other
    }

    #[inline]
    fn least(self, other: Self) -> Self {
        self & other
    }

    #[inline]
    fn greatest(self, other: Self) -> Self {
        self | other
    }
}

/// Combines each element of `into` with that of `from`. Leaves types that are not numbers unchanged.
pub(super) fn fold(operation: Operation, dtype: DataType, into: &mut [u8], from: &[u8]) {
    match dtype {
        DataType::F16 => fold_halves_as::<half::f16>(operation, into, from),
        DataType::Bf16 => fold_halves_as::<half::bf16>(operation, into, from),
        _ => combine(operation, dtype, into, None, from),
    }
}

/// Stores the combination of each element of `first` with that of `second` in `into`. Without `first`, `into` has the first
/// elements. Leaves 16-bit floats and types that are not numbers unchanged.
pub(super) fn combine(
    operation: Operation,
    dtype: DataType,
    into: &mut [u8],
    first: Option<&[u8]>,
    second: &[u8],
) {
    match dtype {
        DataType::F32 => combine_as::<f32>(operation, into, first, second),
        DataType::F64 => combine_as::<f64>(operation, into, first, second),
        DataType::I8 => combine_as::<i8>(operation, into, first, second),
        DataType::I16 => combine_as::<i16>(operation, into, first, second),
        DataType::I32 => combine_as::<i32>(operation, into, first, second),
        DataType::I64 => combine_as::<i64>(operation, into, first, second),
        DataType::U8 => combine_as::<u8>(operation, into, first, second),
        DataType::U16 => combine_as::<u16>(operation, into, first, second),
        DataType::U32 => combine_as::<u32>(operation, into, first, second),
        DataType::U64 => combine_as::<u64>(operation, into, first, second),
        DataType::Bool => combine_as::<bool>(operation, into, first, second),
        DataType::C64 => combine_as::<[f32; 2]>(operation, into, first, second),
        DataType::C128 => combine_as::<[f64; 2]>(operation, into, first, second),
        _ => {}
    }
}

fn combine_as<T: Number>(operation: Operation, into: &mut [u8], first: Option<&[u8]>, second: &[u8]) {
    match operation {
        Operation::Sum => each(into, first, second, T::sum),
        Operation::Product => each(into, first, second, T::product),
        Operation::Min => each(into, first, second, T::least),
        Operation::Max => each(into, first, second, T::greatest),
    }
}

// Inlined with its `combine`, also in builds without optimisation across codegen units.
#[inline]
fn each<T: Number>(into: &mut [u8], first: Option<&[u8]>, second: &[u8], combine: impl Fn(T, T) -> T) {
    let (into, second) = (T::chunks_mut(into), T::chunks(second));
    let decode = |bytes: &T::Bytes| T::decode(bytes.as_ref());
    match first {
        None => {
            for (target, other) in into.iter_mut().zip(second) {
                combine(decode(target), decode(other)).encode(target.as_mut());
            }
        }
        Some(first) => {
            for ((target, other), first) in into.iter_mut().zip(second).zip(T::chunks(first)) {
                combine(decode(first), decode(other)).encode(target.as_mut());
            }
        }
    }
}

/// How many 16-bit floats are converted at a time: a whole slice, for which processors have instructions.
const PIECE: usize = 128;

/// 16-bit floats.
trait Half: Chunked {
    const ZERO: Self;

    fn widen(halves: &[Self; PIECE], wide: &mut [f32; PIECE]);
    fn round(wide: &[f32; PIECE], halves: &mut [Self; PIECE]);
}

macro_rules! halves {
    ($($half:ty)*) => {
        $(impl Half for $half {
            const ZERO: Self = <$half>::ZERO;

            fn widen(halves: &[Self; PIECE], wide: &mut [f32; PIECE]) {
                halves.convert_to_f32_slice(wide);
            }

            fn round(wide: &[f32; PIECE], halves: &mut [Self; PIECE]) {
                halves.convert_from_f32_slice(wide);
            }
        })*
    };
}

halves! { half::f16 half::bf16 }

/// Up to `PIECE` elements as 32-bit floats, followed by zeros.
fn load<T: Half>(from: &[u8]) -> [f32; PIECE] {
    let (mut halves, mut wide) = ([T::ZERO; PIECE], [0.0; PIECE]);
    for (target, element) in halves.iter_mut().zip(T::chunks(from)) {
        *target = T::decode(element.as_ref());
    }
    T::widen(&halves, &mut wide);
    wide
}

/// Stores as many elements as `into` has.
fn store<T: Half>(wide: &[f32; PIECE], into: &mut [u8]) {
    let mut halves = [T::ZERO; PIECE];
    T::round(wide, &mut halves);
    for (target, half) in T::chunks_mut(into).iter_mut().zip(halves) {
        half.encode(target.as_mut());
    }
}

pub(super) fn is_half(dtype: DataType) -> bool {
    matches!(dtype, DataType::F16 | DataType::Bf16)
}

fn fold_halves_as<T: Half>(operation: Operation, into: &mut [u8], from: &[u8]) {
    for (into, from) in into.chunks_mut(BLOCK_BYTES).zip(from.chunks(BLOCK_BYTES)) {
        let wide = fold_wide::<T>(operation, [&*into, from].into_iter());
        let targets = into.chunks_mut(2 * PIECE).zip(wide);
        targets.for_each(|(target, wide)| narrow::<T>(operation, wide, target, None));
    }
}

/// As [`fold_halves`], but the combination stays in 32-bit floats, for [`narrow_halves`].
pub(super) fn widen_halves<'a>(
    operation: Operation,
    dtype: DataType,
    block: &mut [u8],
    parts: impl Iterator<Item = &'a [u8]>,
) {
    let wide = match dtype {
        DataType::Bf16 => fold_wide::<half::bf16>(operation, parts),
        _ => fold_wide::<half::f16>(operation, parts),
    };
    for (target, wide) in f32::chunks_mut(block).iter_mut().zip(wide.as_flattened()) {
        wide.encode(target.as_mut());
    }
}

/// Rounds the 32-bit floats in `from` into `into`, divided by `divisor` if there is one. They are results of [`widen_halves`], or
/// combinations of those.
pub(super) fn narrow_halves(
    operation: Operation,
    dtype: DataType,
    into: &mut [u8],
    from: &[u8],
    divisor: Option<usize>,
) {
    for (into, from) in into.chunks_mut(2 * PIECE).zip(from.chunks(4 * PIECE)) {
        let mut wide = [0.0; PIECE];
        for (wide, bytes) in wide.iter_mut().zip(f32::chunks(from)) {
            *wide = f32::decode(bytes);
        }
        match dtype {
            DataType::Bf16 => narrow::<half::bf16>(operation, wide, into, divisor),
            _ => narrow::<half::f16>(operation, wide, into, divisor),
        }
    }
}

/// Stores the combination of a block's `parts` in `block`, divided by `divisor` if there is one. Rounds once.
pub(super) fn fold_halves<'a>(
    operation: Operation,
    dtype: DataType,
    block: &mut [u8],
    parts: impl Iterator<Item = &'a [u8]>,
    divisor: Option<usize>,
) {
    match dtype {
        DataType::F16 => fold_block_of::<half::f16>(operation, block, parts, divisor),
        DataType::Bf16 => fold_block_of::<half::bf16>(operation, block, parts, divisor),
        _ => {}
    }
}

fn fold_block_of<'a, T: Half>(
    operation: Operation,
    block: &mut [u8],
    parts: impl Iterator<Item = &'a [u8]>,
    divisor: Option<usize>,
) {
    for (target, wide) in block.chunks_mut(2 * PIECE).zip(fold_wide::<T>(operation, parts)) {
        narrow::<T>(operation, wide, target, divisor);
    }
}

/// A block of 16-bit floats, as 32-bit floats that are multiplied by [`scale`].
type Wide = [[f32; PIECE]; BLOCK_BYTES / 2 / PIECE];

/// The factor of 16-bit floats while they are 32-bit floats. With 1/65,536, no sum of up to 65,536 values exceeds the range of
/// 32-bit floats, even of `bf16`, whose largest value is close to theirs. As a power of two it changes no digit of a 16-bit float.
fn scale(operation: Operation) -> f32 {
    if operation == Operation::Sum { 1.0 / 65_536.0 } else { 1.0 }
}

fn fold_wide<'a, T: Half>(operation: Operation, parts: impl Iterator<Item = &'a [u8]>) -> Wide {
    match operation {
        Operation::Sum => fold_wide_by::<T>(scale(operation), parts, f32::sum),
        Operation::Product => fold_wide_by::<T>(scale(operation), parts, f32::product),
        Operation::Min => fold_wide_by::<T>(scale(operation), parts, f32::least),
        Operation::Max => fold_wide_by::<T>(scale(operation), parts, f32::greatest),
    }
}

fn fold_wide_by<'a, T: Half>(
    scale: f32,
    mut parts: impl Iterator<Item = &'a [u8]>,
    combine: impl Fn(f32, f32) -> f32,
) -> Wide {
    let mut combined = [[0.0; PIECE]; BLOCK_BYTES / 2 / PIECE];
    let pieces =
        |part: &'a [u8]| part.chunks(2 * PIECE).map(|piece| load::<T>(piece).map(|wide| wide * scale));
    for (target, first) in combined.iter_mut().zip(pieces(parts.next().unwrap_or_default())) {
        *target = first;
    }
    for part in parts {
        for (own, other) in combined.iter_mut().zip(pieces(part)) {
            own.iter_mut().zip(other).for_each(|(own, other)| *own = combine(*own, other));
        }
    }
    combined
}

fn narrow<T: Half>(operation: Operation, mut wide: [f32; PIECE], into: &mut [u8], divisor: Option<usize>) {
    let divisor = divisor.map_or(1.0, |divisor| divisor as f32) * scale(operation);
    wide.iter_mut().for_each(|wide| *wide /= divisor);
    store::<T>(&wide, into);
}

/// Divides floats and complex numbers. Leaves other types unchanged.
pub(super) fn divide(dtype: DataType, into: &mut [u8], divisor: usize) {
    match dtype {
        DataType::F32 | DataType::C64 => divide_each(into, |number: f32| number / divisor as f32),
        DataType::F64 | DataType::C128 => divide_each(into, |number: f64| number / divisor as f64),
        DataType::F16 => divide_halves::<half::f16>(into, divisor),
        DataType::Bf16 => divide_halves::<half::bf16>(into, divisor),
        _ => {}
    }
}

fn divide_each<T: Chunked>(into: &mut [u8], divide: impl Fn(T) -> T) {
    for target in T::chunks_mut(into) {
        divide(T::decode(target.as_ref())).encode(target.as_mut());
    }
}

fn divide_halves<T: Half>(into: &mut [u8], divisor: usize) {
    for target in into.chunks_mut(2 * PIECE) {
        store::<T>(&load::<T>(target).map(|wide| wide / divisor as f32), target);
    }
}
