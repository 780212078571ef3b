//! Tensors of the arrays of other crates, and the other way round.
//!
//! | from | to | copies | feature | if it is refused |
//! | --- | --- | --- | --- | --- |
//! | `bytes::Bytes`, `Vec<u8>`, a mapped file | `Tensor::from_owned_bytes` | 0 | – | give as many bytes as the shape takes |
//! | tensor | `bytes::Bytes::from` | 0 | – | never |
//! | `ndarray::Array` in row-major order | `Tensor::from_array` | 0 | `ndarray` | `Tensor::copy_of_array` |
//! | any array or view of `ndarray` | `Tensor::copy_of_array` | 1 | `ndarray` | a larger `source_bytes`, if the pool is full |
//! | tensor | `Tensor::as_array` | 0 | `ndarray` | read unaligned elements with `Tensor::values` |
//! | safetensors file in a buffer | `Tensor::from_safetensors` | 0 | `safetensors` | publish the bytes of a tensor of another type as U8 |
//! | tensor, snapshot of a set | `Tensor::as_safetensors`, `Snapshot::as_safetensors` | 0 | `safetensors` | write the elements as a type that the format has |
//! | DLPack tensor on the CPU, in row-major order | `Tensor::from_dlpack` | 0 | `dlpack` | copy it to the CPU, or make it contiguous, first |
//! | tensor | `Tensor::to_dlpack`, `Tensor::to_unversioned_dlpack` | 0 | `dlpack` | string tensors have no such type: send them as strings |
//!
//! Memory that becomes a tensor without a copy is part of a worker's [`user_memory`](crate::Worker::user_memory), and its owner lives until
//! the last clone of the tensor is dropped. TCP and RDMA send from it directly. Each time a peer on shared memory receives the tensor, its
//! bytes are first copied into [`Worker::pool`](crate::Worker::pool).

mod bytes;
#[cfg(feature = "dlpack")]
mod dlpack;
#[cfg(feature = "ndarray")]
mod ndarray;
#[cfg(feature = "safetensors")]
mod safetensors;

#[cfg(feature = "safetensors")]
pub use self::safetensors::{from_safetensors_dtype, safetensors_dtype};

#[cfg(any(feature = "ndarray", feature = "safetensors", feature = "dlpack"))]
use crate::{Tensor, WorkerError};

/// The error for a tensor that `problem` keeps from being converted.
#[cfg(any(feature = "ndarray", feature = "safetensors", feature = "dlpack"))]
fn invalid(problem: String) -> WorkerError {
    WorkerError::InvalidTensor { problem }
}

/// Refuses the value of a branch that was not taken, which has a shape but no elements.
#[cfg(any(feature = "ndarray", feature = "safetensors", feature = "dlpack"))]
fn check_has_elements(tensor: &Tensor) -> Result<(), WorkerError> {
    if tensor.is_dead() {
        let problem =
            "it is the value of a branch that was not taken and has no elements; look at is_dead() first";
        return Err(invalid(problem.to_owned()));
    }
    Ok(())
}
