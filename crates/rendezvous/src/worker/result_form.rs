//! Type parameters that select what awaiting a fetch or a receive returns.

use tensorwire_memory::BufMut;
use tensorwire_protocol::DataType;

use crate::{
    peer_memory::target::Target, values::arguments::RecvArgs, worker::receive_into::ReceiveIntoError,
};

/// Awaiting returns a [`Tensor`](crate::Tensor).
#[derive(Debug)]
pub struct AsTensor {
    pub(crate) _private: (),
}

/// Awaiting returns a [`Fetched`](crate::Fetched): the tensor and its version.
#[derive(Debug)]
pub struct AsVersioned {
    pub(crate) _private: (),
}

/// Awaiting returns a [`Delivered`](crate::Delivered): the tensor with the arguments of its sender and its receiver.
#[derive(Debug)]
pub struct AsDelivered {
    pub(crate) args: RecvArgs,
}

/// Awaiting returns a [`Filled`](crate::Filled) buffer, or a [`ReceiveIntoError`] with the buffer.
#[derive(Debug)]
pub struct IntoBuffer {
    pub(crate) buffer: BufMut,
    pub(crate) dtype: Option<DataType>,
}

impl AsTensor {
    pub(crate) const fn new() -> Self {
        Self { _private: () }
    }
}

impl IntoBuffer {
    pub(crate) fn new(buffer: BufMut) -> Self {
        Self { buffer, dtype: None }
    }

    pub(crate) fn target(self) -> Target {
        Target::new(self.dtype, self.buffer)
    }

    /// The error of a receive that did not start.
    pub(crate) fn given_back(self, error: crate::WorkerError) -> ReceiveIntoError {
        ReceiveIntoError { error, buffer: Some(self.buffer) }
    }
}
