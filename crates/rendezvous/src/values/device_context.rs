//! Devices whose memory is not the host's.

use std::{any::Any, fmt};

use tensorwire_protocol::Status;
use tensorwire_verbs_reactor::BoxFuture;

use crate::values::tensor::Tensor;

/// Demands on the memory that a value lies in.
///
/// ```
/// use tensorwire_rendezvous::AllocatorAttributes;
///
/// let none = AllocatorAttributes::default();
/// assert!(!none.on_host && !none.gpu_compatible && !none.nic_compatible);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct AllocatorAttributes {
    /// In host memory, although the device is another.
    pub on_host: bool,
    /// A GPU can copy from and to it: it is pinned.
    pub gpu_compatible: bool,
    /// A network adapter can read and write it: it is registered.
    pub nic_compatible: bool,
}

/// A stream of a device: copies between the device's memory and the host's.
///
/// A value belongs to a device's memory if its sender names the device's context, does not say
/// [`on_host`](AllocatorAttributes::on_host), and the device in the key is no CPU. What a [`Tensor`] in such memory
/// holds as its bytes is the device's own matter, as long as element type and shape are right.
///
/// Errors are what the receive fails with; the value is not lost then.
///
/// A device whose memory keeps every byte inverted:
///
/// ```
/// use std::sync::Arc;
///
/// use tensorwire_memory::{Pool, PoolConfig};
/// use tensorwire_protocol::{Code, Key, Status};
/// use tensorwire_rendezvous::{AllocatorAttributes, DeviceContext, IntraProcessRendezvous, RecvArgs, SendArgs, Tensor};
/// use tensorwire_verbs_reactor::BoxFuture;
///
/// #[derive(Debug)]
/// struct Inverting(Pool);
///
/// impl Inverting {
///     fn invert(&self, tensor: &Tensor) -> Result<Tensor, Status> {
///         let bytes: Vec<u8> = tensor.bytes().iter().map(|byte| !byte).collect();
///         let copy = Tensor::from_bytes(&self.0, tensor.dtype(), tensor.shape(), &bytes);
///         copy.map_err(|error| Status::new(Code::ResourceExhausted, error.to_string()))
///     }
/// }
///
/// impl DeviceContext for Inverting {
///     fn to_host(&self, tensor: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
///         Box::pin(async move { self.invert(&tensor) })
///     }
///
///     fn to_device(&self, tensor: Tensor, _: AllocatorAttributes) -> BoxFuture<'_, Result<Tensor, Status>> {
///         Box::pin(async move { self.invert(&tensor) })
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("example") })?;
/// let device = Arc::new(Inverting(pool.clone()));
/// let key = Key::builder().source("/job:a/replica:0/task:0/device:CPU:0");
/// let key = key.destination("/job:a/replica:0/task:0/device:GPU:0").edge("x").build()?;
///
/// let rendezvous = IntraProcessRendezvous::new();
/// rendezvous.send(&key, SendArgs::default(), Tensor::from_values(&pool, &[2], &[0u8, 7])?)?;
/// let args = RecvArgs { device_context: Some(device), ..RecvArgs::default() };
/// assert_eq!(rendezvous.recv(&key, args).await?.tensor.bytes(), [255, 248]);
/// # Ok(())
/// # }
/// ```
pub trait DeviceContext: Any + fmt::Debug + Send + Sync {
    /// Copies `tensor`, which lies in the device's memory, into host memory of these attributes.
    fn to_host(
        &self,
        tensor: Tensor,
        attributes: AllocatorAttributes,
    ) -> BoxFuture<'_, Result<Tensor, Status>>;

    /// Copies `tensor`, which lies in host memory, into the device's memory of these attributes.
    fn to_device(
        &self,
        tensor: Tensor,
        attributes: AllocatorAttributes,
    ) -> BoxFuture<'_, Result<Tensor, Status>>;
}
