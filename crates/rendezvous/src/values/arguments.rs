//! The arguments of senders and receivers: devices, memory attributes and cancellation.

use std::sync::Arc;

pub use tokio_util::sync::CancellationToken;

use crate::values::{
    device_context::{AllocatorAttributes, DeviceContext},
    tensor::Tensor,
};

/// The arguments of a send besides key and value. The default is right for values in host memory.
///
/// ```
/// use tensorwire::tensorflow::{AllocatorAttributes, SendArgs};
///
/// let pinned = AllocatorAttributes { gpu_compatible: true, ..AllocatorAttributes::default() };
/// let args = SendArgs { attributes: pinned, ..SendArgs::default() };
/// assert!(args.device_context.is_none());
/// ```
#[derive(Debug, Clone, Default)]
pub struct SendArgs {
    /// The device that the value is on; `None` for host memory.
    pub device_context: Option<Arc<dyn DeviceContext>>,
    /// Attributes of the memory that the value is in.
    pub attributes: AllocatorAttributes,
}

/// The arguments of a receive besides the key. The default is right for values that are wanted in host memory.
///
/// ```
/// use tensorwire::tensorflow::{CancellationToken, RecvArgs};
///
/// let token = CancellationToken::new();
/// let args = RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() };
/// token.cancel();
/// assert!(args.cancellation.is_some_and(|token| token.is_cancelled()));
/// ```
#[derive(Debug, Clone, Default)]
pub struct RecvArgs {
    /// The device that the value is wanted on; `None` for host memory.
    pub device_context: Option<Arc<dyn DeviceContext>>,
    /// Attributes of the memory that the value is wanted in.
    pub attributes: AllocatorAttributes,
    /// Ends the receive with CANCELLED while it waits. A value that is already available is received even if the token
    /// is cancelled.
    pub cancellation: Option<CancellationToken>,
}

/// A received value with the arguments of its sender and its receiver
/// ([`LocalRendezvous::recv`](crate::LocalRendezvous::recv), [`Recv::with`](crate::Recv::with)).
///
/// ```
/// use tensorwire::Delivered;
///
/// /// Whether the sender had the value in memory that a GPU can copy from.
/// fn came_pinned(delivered: &Delivered) -> bool {
///     delivered.send_args.attributes.gpu_compatible
/// }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Delivered {
    /// The value.
    pub tensor: Tensor,
    /// The arguments of the sender, with the same context object; the default if the value comes from another worker.
    pub send_args: SendArgs,
    /// The arguments of the receiver.
    pub recv_args: RecvArgs,
}
