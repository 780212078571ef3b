//! [`IntraProcessRendezvous`]: the rendezvous of several devices in one process.

use std::{future::Future, time::Duration};

use tensorwire_protocol::{Key, Status};

use crate::{
    compat::local::{LocalConfig, LocalRendezvous},
    values::{
        arguments::{Delivered, RecvArgs, SendArgs},
        tensor::Tensor,
        value_guard::deliver,
    },
};

/// A [`LocalRendezvous`] for several devices. If source and destination of a key have different memory, the value is
/// copied by their [`DeviceContext`](crate::DeviceContext)s before it is delivered. If both are on the host or on the
/// same device, it is shared.
///
/// The copy has the receiver's memory attributes, and is [`gpu_compatible`] if the sender's memory is. Only plain
/// elements can be copied. Cheap to clone: all clones are the same rendezvous.
///
/// Source and destination on the host ([`DeviceContext`](crate::DeviceContext) has an example with a device):
///
/// ```
/// use tensorwire::memory::{Pool, PoolConfig};
/// use tensorwire::Key;
/// use tensorwire::{Tensor, tensorflow::{IntraProcessRendezvous, RecvArgs, SendArgs}};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("example") })?;
/// let rendezvous = IntraProcessRendezvous::new();
/// let key = Key::builder().source("/CPU:0").destination("/CPU:1").edge("x").build()?;
/// let sent = Tensor::from_values(&pool, &[2], &[1.0f32, 2.0])?;
/// rendezvous.send(&key, SendArgs::default(), sent.clone())?;
/// let got = rendezvous.recv(&key, RecvArgs::default()).await?.tensor;
/// assert!(std::ptr::eq(got.bytes(), sent.bytes()));
/// # Ok(())
/// # }
/// ```
///
/// [`gpu_compatible`]: crate::AllocatorAttributes::gpu_compatible
#[derive(Debug, Clone, Default)]
pub struct IntraProcessRendezvous {
    local: LocalRendezvous,
}

impl IntraProcessRendezvous {
    /// With the default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// With these settings.
    pub fn with_config(config: LocalConfig) -> Self {
        Self { local: LocalRendezvous::with_config(config) }
    }

    /// As [`LocalRendezvous::send`].
    ///
    /// # Errors
    /// As [`LocalRendezvous::send`].
    pub fn send(&self, key: &Key, args: SendArgs, tensor: Tensor) -> Result<(), Status> {
        self.local.send(key, args, tensor)
    }

    /// As [`LocalRendezvous::recv`], with the value in the memory that `args` describe.
    ///
    /// # Errors
    /// As [`LocalRendezvous::recv`]; INVALID_ARGUMENT if the value must be copied and its elements are not plain bytes;
    /// the error of a device context. In the last two cases the next receive of the key gets the value.
    ///
    /// # Cancel safety
    /// As [`LocalRendezvous::recv`], also while the value is copied.
    pub fn recv(
        &self,
        key: &Key,
        args: RecvArgs,
    ) -> impl Future<Output = Result<Delivered, Status>> + Send + use<> {
        let take = self.local.step().take_unless(key.as_str(), args.cancellation.as_ref());
        let key = key.clone();
        async move { deliver(&key, take.await?, args).await }
    }

    /// As [`recv`](Self::recv), within `limit`.
    ///
    /// # Errors
    /// As [`recv`](Self::recv) and [`LocalRendezvous::recv_timeout`].
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv).
    pub async fn recv_timeout(
        &self,
        key: &Key,
        args: RecvArgs,
        limit: Duration,
    ) -> Result<Delivered, Status> {
        self.local.within(key, limit, self.recv(key, args)).await
    }

    /// As [`LocalRendezvous::abort`].
    pub fn abort(&self, status: &Status) {
        self.local.abort(status);
    }

    /// As [`LocalRendezvous::aborted`].
    pub fn aborted(&self) -> Option<Status> {
        self.local.aborted()
    }
}
