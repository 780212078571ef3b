//! Repeated fetches of one published tensor.

use std::{sync::Arc, time::Duration};

use tensorwire_memory::BufMut;
use tensorwire_protocol::Sharing;

use super::{Settings, run, run_into, transfer};
use crate::{
    error::{Transfer, WorkerError},
    values::tensor::Tensor,
    worker::{
        peer::Peer,
        receive_into::{Filled, ReceiveIntoError},
        result_form::IntoBuffer,
    },
};

/// A published tensor of a peer, made by [`Peer::tensor`], for loops that fetch it many times. Cheap to clone. It stays
/// valid when the connection or the peer is restarted, and when the tensor is replaced or withdrawn.
///
/// Name and options are checked once, and a fetch allocates no future: [`fetch_into`](Self::fetch_into) allocates
/// nothing if the tensor is in the peer's catalogue.
///
/// ```
/// use std::time::Duration;
///
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// # let server = Worker::builder("ps").start().await?;
/// # server.publish("w", Tensor::from_values(server.pool(), &[4], &[1u8, 2, 3, 4])?)?;
/// # let client = Worker::client().start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// let weights = peer.tensor("w")?.timeout(Duration::from_secs(5));
/// let mut buffer = client.receive_pool().alloc(4).await?;
/// for _ in 0..3 {
///     let filled = weights.fetch_into(buffer).await?;
///     assert_eq!(filled.bytes(), [1, 2, 3, 4]);
///     buffer = filled.buffer;
/// }
/// assert_eq!(weights.fetch().await?.values::<u8>()?, [1, 2, 3, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct RemoteTensor {
    peer: Peer,
    name: Arc<str>,
    settings: Settings,
}

impl RemoteTensor {
    /// The name under which the peer publishes the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The peer.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The deadline of each fetch, like [`Fetch::timeout`](super::Fetch::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.settings.limit = limit;
        self
    }

    /// Whether [`fetch`](Self::fetch) requests a view or a copy, like [`Fetch::sharing`](super::Fetch::sharing).
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.settings.sharing = sharing;
        self
    }

    /// Fetches the present version of the tensor.
    ///
    /// # Errors
    /// As [`Peer::fetch`].
    ///
    /// # Cancel safety
    /// As [`Peer::fetch`].
    pub async fn fetch(&self) -> Result<Tensor, WorkerError> {
        run(&self.peer, &self.transfer(), &self.settings).await.map(|(tensor, _)| tensor)
    }

    /// Fetches the tensor into `buffer`, like [`Fetch::into_buffer`](super::Fetch::into_buffer).
    ///
    /// # Errors
    /// As there.
    ///
    /// # Cancel safety
    /// As there.
    pub async fn fetch_into(&self, buffer: BufMut) -> Result<Filled, ReceiveIntoError> {
        run_into(&self.peer, self.transfer(), self.settings, IntoBuffer::new(buffer)).await
    }

    fn transfer(&self) -> Transfer<'_> {
        Transfer { peer: self.peer.name(), key: &self.name, step: None }
    }
}

impl Peer {
    /// The tensor that the peer publishes under `name`, now or later, for loops that fetch it many times. Nothing is sent.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if the name cannot be published.
    pub fn tensor(&self, name: &str) -> Result<RemoteTensor, WorkerError> {
        transfer(self, name)?;
        Ok(RemoteTensor { peer: self.clone(), name: name.into(), settings: Settings::of(&self.worker) })
    }
}
