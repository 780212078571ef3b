//! Tensors of bytes, and bytes of tensors.

use std::sync::Arc;

use bytes::Bytes;
use tensorwire_memory::{ForeignMemory, UserMemory};
use tensorwire_protocol::DataType;

use crate::{Tensor, WorkerError};

impl From<Tensor> for Bytes {
    /// The bytes of the elements, row-major and little-endian, as [`Tensor::bytes`]. Copies nothing: the `Bytes` keeps the tensor's memory.
    fn from(tensor: Tensor) -> Self {
        Self::from(tensor.buf().clone())
    }
}

impl Tensor {
    /// Makes a tensor of `bytes` without a copy: of `bytes::Bytes`, a `Vec<u8>`, a [`Mapping`](tensorwire_memory::Mapping) of a file, or
    /// another owner of memory. They contain the elements in row-major order, little-endian, and may begin at any address.
    ///
    /// They become part of `memory`, the [`user_memory`](crate::Worker::user_memory) of the worker that publishes or sends the tensor, as
    /// with [`from_vec`](Self::from_vec), and are dropped with the last clone of the tensor.
    ///
    /// ```
    /// use tensorwire::{DataType, Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let worker = Worker::client().start().await?;
    /// let body = vec![7u8; 1024]; // for instance of an HTTP request, as bytes::Bytes
    /// let tensor = Tensor::from_owned_bytes(worker.user_memory(), DataType::F32, &[16, 16], body)?;
    /// assert_eq!(tensor.bytes(), [7; 1024]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`WorkerError::Memory`] if an RDMA device refuses the memory. Then `bytes` are dropped.
    pub fn from_owned_bytes(
        memory: &UserMemory,
        dtype: DataType,
        shape: &[u64],
        bytes: impl ForeignMemory + 'static,
    ) -> Result<Self, WorkerError> {
        Self::shared(memory.buffer_of(Arc::new(bytes))?, dtype, shape)
    }
}
