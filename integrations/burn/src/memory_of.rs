//! Memory of tensors that a back end on the CPU lets others read. burn itself only hands out copies.

use burn::tensor::{Tensor, kind::Basic};

#[cfg(feature = "flex")]
pub(crate) use flex::{Kind, in_place};

/// What `read` returns for the elements of `tensor`, if they can be read where they are.
#[cfg(not(feature = "flex"))]
pub(crate) fn in_place<const D: usize, K: Kind, R>(
    _: &Tensor<D, K>,
    _: impl FnOnce(&[u8]) -> R,
) -> Option<R> {
    None
}

/// A kind of tensor.
#[cfg(not(feature = "flex"))]
pub(crate) trait Kind: Basic + 'static {}

#[cfg(not(feature = "flex"))]
impl<K: Basic + 'static> Kind for K {}

#[cfg(feature = "flex")]
mod flex {
    use burn::{
        backend::{BackendTypes, Flex},
        tensor::BackendPrimitive,
    };

    use super::{Basic, Tensor};

    /// The back end's tensors, of every kind.
    type FlexTensor = <Flex as BackendTypes>::FloatTensorPrimitive;

    /// A kind of tensor.
    pub(crate) trait Kind: Basic + BackendPrimitive<Flex, Primitive = FlexTensor> + 'static {}

    impl<K: Basic + BackendPrimitive<Flex, Primitive = FlexTensor> + 'static> Kind for K {}

    /// What `read` returns for the elements of `tensor`, if they can be read where they are.
    pub(crate) fn in_place<const D: usize, K: Kind, R>(
        tensor: &Tensor<D, K>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Option<R> {
        let tensor = tensor.clone().try_into_primitive::<Flex>().ok()?;
        let width = tensor.dtype().size();
        let (start, end) = tensor.layout().contiguous_offsets()?;
        tensor.bytes().get(start * width..end * width).map(read)
    }
}
