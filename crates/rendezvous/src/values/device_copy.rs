//! Copies between the devices of sender and receiver.

use std::sync::Arc;

use tensorwire_protocol::{Code, DeviceName, Key, Status};

use crate::values::{
    arguments::{RecvArgs, SendArgs},
    device_context::{AllocatorAttributes, DeviceContext},
    table::Value,
    tensor::Tensor,
};

/// The memory of the sender's or the receiver's side of a value.
#[derive(Debug, Clone, Copy)]
enum MemorySide<'end> {
    Host,
    Device(&'end DeviceName, &'end Arc<dyn DeviceContext>),
}

impl<'end> MemorySide<'end> {
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

/// Copies the value to the memory that a receiver in the same process wants, by the contexts of the devices. `None` if
/// the value is shared, because both sides are on the host or on the same device.
pub(crate) async fn copy_for(key: &Key, value: &Value, to: &RecvArgs) -> Result<Option<Tensor>, Status> {
    let source = MemorySide::of_sender(key, &value.send_args);
    let destination = MemorySide::of(key.destination_device(), to.device_context.as_ref(), to.attributes);
    let gpu_compatible = value.send_args.attributes.gpu_compatible || to.attributes.gpu_compatible;
    let attributes = AllocatorAttributes { gpu_compatible, ..to.attributes };
    copied(key, &value.tensor, source, destination, attributes).await
}

/// Whether a value of `key` with these arguments is in host memory.
pub(crate) fn is_on_host(key: &Key, args: &SendArgs) -> bool {
    args.device_context.is_none() || matches!(MemorySide::of_sender(key, args), MemorySide::Host)
}

/// Copies the value to host memory, for another worker. `None` if it is in host memory.
pub(crate) async fn copy_on_host(key: &Key, value: &Value) -> Result<Option<Tensor>, Status> {
    let gpu_compatible = value.send_args.attributes.gpu_compatible;
    let attributes = AllocatorAttributes { on_host: true, gpu_compatible, nic_compatible: true };
    copied(key, &value.tensor, MemorySide::of_sender(key, &value.send_args), MemorySide::Host, attributes)
        .await
}

/// Copies a value from another worker to the memory that the receiver wants. `None` if that is host memory.
pub(crate) async fn copy_from_host(
    key: &Key,
    tensor: &Tensor,
    to: &RecvArgs,
) -> Result<Option<Tensor>, Status> {
    let destination = MemorySide::of(key.destination_device(), to.device_context.as_ref(), to.attributes);
    copied(key, tensor, MemorySide::Host, destination, to.attributes).await
}

async fn copied(
    key: &Key,
    tensor: &Tensor,
    source: MemorySide<'_>,
    destination: MemorySide<'_>,
    attributes: AllocatorAttributes,
) -> Result<Option<Tensor>, Status> {
    let is_shared = match (source, destination) {
        (MemorySide::Host, MemorySide::Host) => true,
        (MemorySide::Device(one, _), MemorySide::Device(other, _)) => one == other,
        _ => false,
    };
    if is_shared || tensor.is_dead() {
        return Ok(None);
    }
    if !tensor.dtype().is_plain() {
        let dtype = tensor.dtype();
        let message = format!(
            "`{key}`: a {dtype} tensor cannot be copied from or to a device, because its elements are not plain bytes; \
             set on_host on the side that is on a device"
        );
        return Err(Status::new(Code::InvalidArgument, message));
    }
    let mut copy = tensor.clone();
    if let MemorySide::Device(_, context) = source {
        let on_the_way = AllocatorAttributes { on_host: true, gpu_compatible: true, nic_compatible: false };
        let is_last = matches!(destination, MemorySide::Host);
        copy = context.to_host(copy, if is_last { attributes } else { on_the_way }).await?;
    }
    if let MemorySide::Device(_, context) = destination {
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
