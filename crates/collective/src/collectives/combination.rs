//! How the elements of a call are combined: the reduction and their type.

use tensorwire_protocol::DataType;

use crate::{error::GroupError, reduction::Reduction};

/// The reduction of a call, and its elements.
pub(super) struct Combination<'a> {
    pub(super) reduction: &'a Reduction,
    pub(super) dtype: DataType,
    /// The length of an element in bytes.
    pub(super) width: usize,
}

impl<'a> Combination<'a> {
    pub(super) fn of(reduction: &'a Reduction, dtype: DataType) -> Self {
        Self { reduction, dtype, width: (dtype.bits() / 8) as usize }
    }
}

impl Combination<'_> {
    /// Whether elements must not be rounded before the combination of all is complete.
    pub(super) fn rounds_once(&self) -> bool {
        self.reduction.rounds_once(self.dtype)
    }

    /// How the elements that [`Reduction::widen`] gives are combined.
    pub(super) fn wide(&self) -> Combination<'static> {
        Combination::of(self.reduction.wide(), DataType::F32)
    }

    /// Stores the combination of all `inputs`, in their order, in `into`.
    pub(super) fn fold_all(&self, into: &mut [u8], inputs: &[&[u8]]) -> Result<(), GroupError> {
        Ok(self.reduction.fold_all(self.dtype, into, inputs)?)
    }
}
