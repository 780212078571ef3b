//! Tensorwire's transfer protocol: the receiver asks, the sender answers, sending is passive.
//!
//! This crate names no runtime, socket, clock or allocator. Everything outside is behind the traits of
//! [`channel`]: a [`Channel`] that writes into the peer, an [`Allocator`] for destinations and a [`Source`] of
//! values.
//!
//! The state of a [`Connection`] is four machines behind one lock: the *line* (what goes out, in order and under
//! [credits](credit)), the *requests* of the receiver, the *responses* of the sender, and the *notes*, which belong to no transfer.
//! Each owns its data, its phases and its transitions. Two async functions use them, one per side of a transfer, and each reads like
//! a sequence diagram: [`Connection::receive`] and [`Connection::respond`]. The messages are in [`message`].
//!
//! Content is one logical write whose immediate is the request index. If both peers agree on a checksum, contents are
//! validated by it ([`validation`]).
//!
//! The owner of a connection does three things: it passes every arrival to [`Connection::on_immediate`], answers the requests
//! of these arrivals by [`Connection::respond`], and runs [`Connection::housekeeping`]. When the queue pair fails or is closed, the owner
//! calls [`Connection::fail`], destroys and drains the queue pair, and ends the grants that [`Connection::drain`]
//! returns.

#![forbid(unsafe_code)]

mod after;
pub mod channel;
mod connection;
mod counters;
pub mod credit;
pub mod error;
pub mod key;
pub mod limits;
mod line;
pub mod message;
pub mod metadata;
pub mod names;
mod notes;
pub mod pages;
mod queue;
mod receive;
mod repeated;
pub mod report;
mod request_index;
mod requests;
mod respond;
mod responses;
pub mod slice;
pub mod status;
pub mod text;
mod trace;
pub mod validation;
pub mod wire;

pub use channel::{
    Allocator, Channel, ChannelError, LentEnd, Mailbox, RecordSlot, RingSpan, Sequenced, Source, Take,
};
pub use connection::{ACKNOWLEDGEMENT_IMMEDIATE, Connection, MESSAGE_IMMEDIATE, NoteChannel, PutNote, Stay};
pub use counters::{Counters, Waiting};
pub use credit::{Agreed, Depths, Mode, Parameters};
pub use error::{PeerMisbehaved, TransferError, WireError};
pub use key::{DeviceName, InvalidDeviceName, InvalidKey, Key, KeyBuilder};
pub use line::Rings;
pub use message::*;
pub use metadata::{DataType, Metadata, Shape, UnknownDataType};
pub use receive::{Awaiting, Delivery, ReceiveOptions, Received, ReceivedGuard, Receiving, Subscription};
pub use request_index::RequestIndex;
pub use requests::MetadataCache;
pub use respond::{Answer, Responded};
pub use status::{Code, Status};
pub use trace::TraceContext;
pub use validation::{Checksums, Damage, UnknownValidation, Validation};
pub use wire::tensors::TensorList;
