//! Tensorwire's transfer protocol: the receiver asks, the sender answers, sending is passive.
//!
//! This crate names no runtime, socket, clock or allocator. What it needs from the world are the traits of
//! [`channel`]: a [`Channel`] that writes into the peer, an [`Allocator`] for destinations and a [`Source`] of
//! values. Everything else is plain data with methods ([`credit`], [`metadata`], the request and response
//! tables) and two async fns that read like the sequence diagrams of `tensorflow-verbs.md` §3.6:
//! [`Connection::receive`] and [`Connection::respond`].
//!
//! | message | direction | type |
//! | --- | --- | --- |
//! | TENSOR_REQUEST | receiver → sender | [`TensorRequest`] |
//! | META_DATA_RESPONSE | sender → receiver | [`MetaDataResponse`] |
//! | TENSOR_RE_REQUEST | receiver → sender | [`TensorReRequest`] |
//! | ERROR_STATUS | sender → receiver | [`ErrorStatus`] |
//! | CANCEL / CANCEL_ACK | receiver ↔ sender | [`Message::Cancel`], [`Message::CancelAck`] |
//!
//! Content is one logical write whose immediate is the request index.

#![forbid(unsafe_code)]

pub mod channel;
pub mod limits;
pub mod message;
pub mod metadata;
pub mod status;

pub use channel::{Allocator, Channel, ChannelError, LentEnd, RingSpan, Source, Value};
pub use message::{
    Destination, ErrorStatus, Message, MetaDataResponse, RequestIndex, Scope, StepId, TensorReRequest,
    TensorRequest,
};
pub use metadata::{DataType, Metadata, Shape, UnknownDataType};
pub use status::{Code, Status};
