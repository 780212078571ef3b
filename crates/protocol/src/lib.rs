//! Tensorwire's transfer protocol: the receiver asks, the sender answers, sending is passive.

#![forbid(unsafe_code)]

pub mod channel;
pub mod credit;
pub mod error;
pub mod key;
pub mod limits;
pub mod message;
pub mod metadata;
mod request;
pub mod status;
pub mod wire;

pub use channel::{Allocator, Channel, ChannelError, LentEnd, RingSpan, Source, Value};
pub use credit::{Agreed, Depths, Mode, Parameters};
pub use error::{PeerMisbehaved, TransferError};
pub use key::{DeviceName, InvalidDeviceName, InvalidKey, Key, KeyBuilder};
pub use message::{
    Destination, ErrorStatus, Message, MetaDataResponse, RequestIndex, Scope, StepId, TensorReRequest,
    TensorRequest,
};
pub use metadata::{DataType, Metadata, MetadataCache, Shape, UnknownDataType};
pub use status::{Code, Status};
pub use wire::WireError;
