//! Devices whose memory is not the host's, and copies between the two ends of a transfer in one process.

use std::{any::Any, fmt, sync::Arc};

use protocol::{Code, DeviceName, Key, Status};
use verbs_reactor::BoxFuture;

use crate::{AllocatorAttributes, RecvArgs, SendArgs, Tensor, table::Value};

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
/// use memory::{Pool, PoolConfig};
/// use protocol::{Code, Key, Status};
/// use rendezvous::{AllocatorAttributes, DeviceContext, IntraProcessRendezvous, RecvArgs, SendArgs, Tensor};
/// use verbs_reactor::BoxFuture;
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

/// Where one end has a value.
#[derive(Debug, Clone, Copy)]
enum Place<'end> {
    Host,
    Device(&'end DeviceName, &'end Arc<dyn DeviceContext>),
}

impl<'end> Place<'end> {
    fn of(
        device: &'end DeviceName,
        context: Option<&'end Arc<dyn DeviceContext>>,
        attributes: AllocatorAttributes,
    ) -> Self {
        let is_cpu = device.device_type.as_deref() == Some("CPU");
        match context {
            Some(context) if !attributes.on_host && !is_cpu => Self::Device(device, context),
            _ => Self::Host,
        }
    }

    fn of_sender(key: &'end Key, args: &'end SendArgs) -> Self {
        Self::of(key.source_device(), args.device_context.as_ref(), args.attributes)
    }
}

/// A copy of the value where its receiver in the same process wants it, made by the contexts of the devices involved.
/// `None` where the value is shared: both ends are on the host, or on the same device.
pub(crate) async fn copy_for(key: &Key, value: &Value, to: &RecvArgs) -> Result<Option<Tensor>, Status> {
    let source = Place::of_sender(key, &value.send_args);
    let destination = Place::of(key.destination_device(), to.device_context.as_ref(), to.attributes);
    let gpu_compatible = value.send_args.attributes.gpu_compatible || to.attributes.gpu_compatible;
    let attributes = AllocatorAttributes { gpu_compatible, ..to.attributes };
    copied(key, &value.tensor, source, destination, attributes).await
}

/// A copy of the value in host memory, for another worker. `None` if that is where it is.
pub(crate) async fn copy_on_host(key: &Key, value: &Value) -> Result<Option<Tensor>, Status> {
    let gpu_compatible = value.send_args.attributes.gpu_compatible;
    let attributes = AllocatorAttributes { on_host: true, gpu_compatible, nic_compatible: true };
    copied(key, &value.tensor, Place::of_sender(key, &value.send_args), Place::Host, attributes).await
}

/// A copy of a value that came from another worker, where its receiver wants it. `None` if that is host memory.
pub(crate) async fn copy_from_host(
    key: &Key,
    tensor: &Tensor,
    to: &RecvArgs,
) -> Result<Option<Tensor>, Status> {
    let destination = Place::of(key.destination_device(), to.device_context.as_ref(), to.attributes);
    copied(key, tensor, Place::Host, destination, to.attributes).await
}

async fn copied(
    key: &Key,
    tensor: &Tensor,
    source: Place<'_>,
    destination: Place<'_>,
    attributes: AllocatorAttributes,
) -> Result<Option<Tensor>, Status> {
    let is_shared = match (source, destination) {
        (Place::Host, Place::Host) => true,
        (Place::Device(one, _), Place::Device(other, _)) => one == other,
        _ => false,
    };
    if is_shared || tensor.is_dead() {
        return Ok(None);
    }
    if !tensor.dtype().is_plain() {
        let dtype = tensor.dtype();
        let message = format!(
            "`{key}`: a {dtype} tensor may not be copied from or to a device, because its elements are no plain bytes; \
             say on_host at the end that is on a device"
        );
        return Err(Status::new(Code::InvalidArgument, message));
    }
    let mut copy = tensor.clone();
    if let Place::Device(_, context) = source {
        let on_the_way = AllocatorAttributes { on_host: true, gpu_compatible: true, nic_compatible: false };
        let is_last = matches!(destination, Place::Host);
        copy = context.to_host(copy, if is_last { attributes } else { on_the_way }).await?;
    }
    if let Place::Device(_, context) = destination {
        copy = context.to_device(copy, attributes).await?;
    }
    if copy.metadata() != tensor.metadata() {
        let message = format!(
            "`{key}`: a device context made {copy:?} of {tensor:?}; a copy must keep element type and shape"
        );
        return Err(Status::new(Code::Internal, message));
    }
    Ok(Some(copy))
}
