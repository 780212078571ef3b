//! Devices with their own memory.

use std::{any::Any, fmt};

use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::Status;

use crate::values::tensor::Tensor;

/// Attributes of the memory that a value is in.
///
/// ```
/// use tensorwire::tensorflow::AllocatorAttributes;
///
/// let none = AllocatorAttributes::default();
/// assert!(!none.on_host && !none.gpu_compatible && !none.nic_compatible);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct AllocatorAttributes {
    /// In host memory, although the key names another device.
    pub on_host: bool,
    /// Pinned, so that a GPU can copy from and to it.
    pub gpu_compatible: bool,
    /// Registered, so that a network adapter can read and write it.
    pub nic_compatible: bool,
}

/// A stream of a device: copies between the device's memory and the host's.
///
/// A value is in device memory if its sender gives the device's context, does not set
/// [`on_host`](AllocatorAttributes::on_host), and the device in the key is not a CPU. The meaning of the bytes of such
/// a [`Tensor`] is up to the device; element type and shape must be right.
///
/// If a method returns an error, the receive fails with it, and the value is not lost.
///
/// A device that stores every byte inverted:
///
/// ```
/// use std::sync::Arc;
///
/// use tensorwire::memory::{Pool, PoolConfig};
/// use tensorwire::{Code, Key, Status};
/// use tensorwire::{Tensor, tensorflow::{AllocatorAttributes, DeviceContext, IntraProcessRendezvous, RecvArgs, SendArgs}};
/// use tensorwire::fabric::BoxFuture;
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
    /// Copies `tensor` from the device's memory into host memory with these attributes.
    fn to_host(
        &self,
        tensor: Tensor,
        attributes: AllocatorAttributes,
    ) -> BoxFuture<'_, Result<Tensor, Status>>;

    /// Copies `tensor` from host memory into the device's memory with these attributes.
    fn to_device(
        &self,
        tensor: Tensor,
        attributes: AllocatorAttributes,
    ) -> BoxFuture<'_, Result<Tensor, Status>>;
}
