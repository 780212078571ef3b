//! How elements of several ranks are combined.

mod numbers;

use std::{fmt, sync::Arc};

use smallvec::SmallVec;
use tensorwire_memory::copy::{CopyReason, copy_bytes};
use tensorwire_protocol::DataType;

use self::numbers::{Operation, combine, divide, fold, fold_halves, is_half, narrow_halves, widen_halves};

/// How many bytes are combined at a time, so that the result stays in the first cache while all inputs pass.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// How elements are combined.
///
/// | reduction | integers | floats | complex | bool |
/// | --- | --- | --- | --- | --- |
/// | `Sum`, `Product` | wrap around | yes | yes | or, and |
/// | `Min`, `Max` | yes | NaN if one is NaN | rejected | and, or |
/// | `Mean` | rejected | yes | yes | rejected |
///
/// The values of 16-bit floats are added and multiplied as 32-bit floats, and the result of all ranks is rounded once, after the
/// division of a mean. Only a product may leave the range of 32-bit floats before it is complete. Other floats and complex numbers
/// are combined in their own precision, and a mean is divided at the end: it is infinite if the sum exceeds the largest number of
/// its type. The order depends on the algorithm, so their results may differ in the last bits. 8-bit floats and strings are
/// rejected.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum Reduction {
    /// The sum.
    #[default]
    Sum,
    /// The product.
    Product,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
    /// The sum divided by the number of ranks, or of all tensors if each rank gives several.
    Mean,
    /// A function of the user.
    User(Arc<dyn Combine>),
}

/// A function that combines elements. It must be associative and commutative, because the order depends on the algorithm.
pub trait Combine: Send + Sync + fmt::Debug {
    /// Combines each element of `into` with that of `from`. Both have the same number of elements of type `dtype`, in the
    /// machine's byte order. They may be unaligned.
    ///
    /// # Errors
    /// The reason why the elements cannot be combined. It ends the group.
    fn combine(&self, dtype: DataType, into: &mut [u8], from: &[u8]) -> Result<(), String>;
}

/// Why elements cannot be combined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReductionError {
    /// This reduction cannot combine this type.
    #[error("{reduction} of {dtype}: {remedy}")]
    Unsupported {
        /// The reduction's name.
        reduction: &'static str,
        /// The element type.
        dtype: DataType,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The user's function failed.
    #[error("the function that combines elements failed: {why}")]
    User {
        /// Its error.
        why: String,
    },
}

const NAMES: [&str; 6] = ["sum", "product", "min", "max", "mean", "a function"];

/// The name of the reduction with this number.
pub(crate) fn name_of_number(number: u8) -> Option<&'static str> {
    NAMES.get(usize::from(number).checked_sub(1)?).copied()
}

impl Reduction {
    /// Its number in a [`Call`](crate::Call).
    pub(crate) fn number(&self) -> u8 {
        match self {
            Self::Sum => 1,
            Self::Product => 2,
            Self::Min => 3,
            Self::Max => 4,
            Self::Mean => 5,
            Self::User(_) => 6,
        }
    }

    fn operation(&self) -> Result<Operation, &Arc<dyn Combine>> {
        Ok(match self {
            Self::Sum | Self::Mean => Operation::Sum,
            Self::Product => Operation::Product,
            Self::Min => Operation::Min,
            Self::Max => Operation::Max,
            Self::User(function) => return Err(function),
        })
    }

    /// Checks that this reduction can combine elements of `dtype`.
    ///
    /// # Errors
    /// [`ReductionError::Unsupported`].
    pub fn check(&self, dtype: DataType) -> Result<(), ReductionError> {
        let is_complex = matches!(dtype, DataType::C64 | DataType::C128);
        let is_float =
            is_complex || matches!(dtype, DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64);
        let remedy = match (self, dtype) {
            (_, DataType::String) => "strings are not numbers: use `gather`",
            (Self::User(_), _) => return Ok(()),
            (_, DataType::F8E5M2 | DataType::F8E4M3) => "convert them to a wider type first",
            (Self::Min | Self::Max, _) if is_complex => "complex numbers have no order",
            (Self::Mean, _) if !is_float => "take the sum, and divide it as you need",
            _ => return Ok(()),
        };
        let reduction = name_of_number(self.number()).unwrap_or_default();
        Err(ReductionError::Unsupported { reduction, dtype, remedy })
    }

    /// Combines each element of `into` with that of `from`, which has the same length.
    ///
    /// # Errors
    /// [`ReductionError`].
    pub fn fold(&self, dtype: DataType, into: &mut [u8], from: &[u8]) -> Result<(), ReductionError> {
        self.check(dtype)?;
        match self.operation() {
            Ok(operation) => fold(operation, dtype, into, from),
            Err(function) => {
                function.combine(dtype, into, from).map_err(|why| ReductionError::User { why })?;
            }
        }
        Ok(())
    }

    /// As [`fold`](Self::fold), in the other order: `from` is of lower ranks.
    pub(crate) fn fold_lower(
        &self,
        dtype: DataType,
        into: &mut [u8],
        from: &[u8],
    ) -> Result<(), ReductionError> {
        for (into, from) in into.chunks_mut(BLOCK_BYTES).zip(from.chunks(BLOCK_BYTES)) {
            let own = SmallVec::<[u8; 256]>::from_slice(into);
            self.fold_into(dtype, into, from, &own)?;
        }
        Ok(())
    }

    /// Stores the combination of all `inputs`, in their order, in `into`. All have the same length. A mean is complete after
    /// this.
    ///
    /// # Errors
    /// [`ReductionError`].
    pub fn fold_all(&self, dtype: DataType, into: &mut [u8], inputs: &[&[u8]]) -> Result<(), ReductionError> {
        self.fold_inputs(dtype, into, inputs, matches!(self, Self::Mean).then_some(inputs.len()))
    }

    /// As [`fold`](Self::fold) of `own`, which does not change: stores the combination in `into`.
    ///
    /// # Errors
    /// [`ReductionError`].
    pub fn fold_into(
        &self,
        dtype: DataType,
        into: &mut [u8],
        own: &[u8],
        from: &[u8],
    ) -> Result<(), ReductionError> {
        self.fold_inputs(dtype, into, &[own, from], None)
    }

    /// Divides the combination by `divisor`, if there is one.
    fn fold_inputs(
        &self,
        dtype: DataType,
        into: &mut [u8],
        inputs: &[&[u8]],
        divisor: Option<usize>,
    ) -> Result<(), ReductionError> {
        self.check(dtype)?;
        for (number, block) in into.chunks_mut(BLOCK_BYTES).enumerate() {
            let at = number * BLOCK_BYTES..number * BLOCK_BYTES + block.len();
            let parts = inputs.iter().map(|input| input.get(at.clone()).unwrap_or_default());
            match self.operation() {
                Ok(operation) if is_half(dtype) => fold_halves(operation, dtype, block, parts, divisor),
                _ => self.fold_block(dtype, block, parts, divisor)?,
            }
        }
        Ok(())
    }

    fn fold_block<'a>(
        &self,
        dtype: DataType,
        block: &mut [u8],
        mut parts: impl Iterator<Item = &'a [u8]>,
        divisor: Option<usize>,
    ) -> Result<(), ReductionError> {
        let first = parts.next().unwrap_or_default();
        match (self.operation(), parts.next()) {
            (Ok(operation), Some(second)) => combine(operation, dtype, block, Some(first), second),
            (_, second) => {
                let length = block.len().min(first.len());
                copy_bytes(&mut block[..length], &first[..length], CopyReason::Local);
                second.map_or(Ok(()), |second| self.fold(dtype, block, second))?;
            }
        }
        parts.try_for_each(|part| self.fold(dtype, block, part))?;
        if let Some(divisor) = divisor {
            divide(dtype, block, divisor);
        }
        Ok(())
    }

    /// Whether values of this type must not be rounded before the combination of all is complete.
    pub(crate) fn rounds_once(&self, dtype: DataType) -> bool {
        is_half(dtype) && matches!(self, Self::Sum | Self::Product | Self::Mean)
    }

    /// As [`fold_all`](Self::fold_all) for values that are [rounded once](Self::rounds_once), but the combination is not yet rounded
    /// nor divided: it has 32-bit floats, which [`wide`](Self::wide) combines and [`narrow`](Self::narrow) completes.
    pub(crate) fn widen(&self, dtype: DataType, into: &mut [u8], inputs: &[&[u8]]) {
        let Ok(operation) = self.operation() else { return };
        for (number, block) in into.chunks_mut(2 * BLOCK_BYTES).enumerate() {
            let at = number * BLOCK_BYTES..number * BLOCK_BYTES + block.len() / 2;
            let parts = inputs.iter().map(|input| input.get(at.clone()).unwrap_or_default());
            widen_halves(operation, dtype, block, parts);
        }
    }

    /// How the results of [`widen`](Self::widen) are combined: as numbers of type [`DataType::F32`].
    pub(crate) fn wide(&self) -> &'static Self {
        static SUM: Reduction = Reduction::Sum;
        static PRODUCT: Reduction = Reduction::Product;
        if matches!(self, Self::Product) { &PRODUCT } else { &SUM }
    }

    /// Completes a combination of `values` values that began with [`widen`](Self::widen).
    pub(crate) fn narrow(&self, dtype: DataType, into: &mut [u8], wide: &[u8], values: usize) {
        if let Ok(operation) = self.operation() {
            let divisor = matches!(self, Self::Mean).then_some(values);
            narrow_halves(operation, dtype, into, wide, divisor);
        }
    }

    /// Divides the sum of `ranks` values, if this is a mean.
    pub fn finish(&self, dtype: DataType, into: &mut [u8], ranks: usize) {
        if matches!(self, Self::Mean) {
            divide(dtype, into, ranks);
        }
    }
}
