//! What the two ends of a transfer say beside the key.

use std::sync::Arc;

pub use tokio_util::sync::CancellationToken;

use crate::values::{
    device_context::{AllocatorAttributes, DeviceContext},
    tensor::Tensor,
};

/// What a sender says beside key and value. The default is right for values in host memory.
///
/// ```
/// use tensorwire_rendezvous::{AllocatorAttributes, SendArgs};
///
/// let pinned = AllocatorAttributes { gpu_compatible: true, ..AllocatorAttributes::default() };
/// let args = SendArgs { attributes: pinned, ..SendArgs::default() };
/// assert!(args.device_context.is_none());
/// ```
#[derive(Debug, Clone, Default)]
pub struct SendArgs {
    /// The device that the value lies on. `None`: in host memory.
    pub device_context: Option<Arc<dyn DeviceContext>>,
    /// The memory that the value lies in.
    pub attributes: AllocatorAttributes,
}

/// What a receiver says beside the key. The default is right for values that are wanted in host memory.
///
/// ```
/// use tensorwire_rendezvous::{CancellationToken, RecvArgs};
///
/// let token = CancellationToken::new();
/// let args = RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() };
/// token.cancel();
/// assert!(args.cancellation.is_some_and(|token| token.is_cancelled()));
/// ```
#[derive(Debug, Clone, Default)]
pub struct RecvArgs {
    /// The device that the value is wanted on. `None`: in host memory.
    pub device_context: Option<Arc<dyn DeviceContext>>,
    /// The memory that the value is wanted in.
    pub attributes: AllocatorAttributes,
    /// Ends the receive with CANCELLED while it waits. A value that is there already wins, whatever the token says.
    pub cancellation: Option<CancellationToken>,
}

/// A value as it was received, with what both ends said ([`LocalRendezvous::recv`](crate::LocalRendezvous::recv),
/// [`Recv::with`](crate::Recv::with)).
///
/// ```
/// use tensorwire_rendezvous::Delivered;
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
    /// The sender's own arguments, with its very context object; blank if the value comes from another worker.
    pub send_args: SendArgs,
    /// The receiver's, as given.
    pub recv_args: RecvArgs,
}
