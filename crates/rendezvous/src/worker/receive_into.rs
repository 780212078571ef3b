//! Values received into a user's buffer.

use std::fmt;

use tensorwire_memory::BufMut;
use tensorwire_protocol::Metadata;

use crate::{
    error::WorkerError,
    values::{published::Version, tensor::Tensor},
};

/// A buffer with the value that was received into it.
///
/// ```
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// # let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// let buffer = client.receive_pool().alloc(16).await?;
/// let filled = peer.fetch("w").into_buffer(buffer).await.map_err(|failed| failed.error)?;
/// assert_eq!(filled.bytes(), [1, 2, 3, 4]);
/// let _for_the_next_one = filled.buffer;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Filled {
    /// Element type, shape and length of the value, whose bytes are at the start of the buffer.
    pub metadata: Metadata,
    /// The buffer.
    pub buffer: BufMut,
    /// The version, if a published tensor was fetched with `versioned`, `wait` or `newer_than`.
    pub version: Option<Version>,
}

impl Filled {
    /// The value's bytes.
    pub fn bytes(&self) -> &[u8] {
        let length = usize::try_from(self.metadata.byte_length).unwrap_or(usize::MAX);
        self.buffer.get(..length).unwrap_or(&self.buffer)
    }

    /// The value as a tensor, without a copy. The buffer returns to its pool when the last clone of the tensor is
    /// dropped.
    pub fn into_tensor(self) -> Tensor {
        let length = self.bytes().len();
        let whole = self.buffer.freeze();
        Tensor::received(self.metadata, whole.slice(0..length).unwrap_or(whole), None)
    }
}

/// The error of a receive into a buffer, with the buffer.
#[derive(Debug)]
#[non_exhaustive]
pub struct ReceiveIntoError {
    /// The cause.
    pub error: WorkerError,
    /// The buffer; `None` if the peer may still write it. Then it returns to its pool as soon as the peer no longer
    /// can.
    pub buffer: Option<BufMut>,
}

impl fmt::Display for ReceiveIntoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ReceiveIntoError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<ReceiveIntoError> for WorkerError {
    fn from(failed: ReceiveIntoError) -> Self {
        failed.error
    }
}
