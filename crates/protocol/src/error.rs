//! What can go wrong, one enum per layer.

use crate::{ChannelError, Status, limits::NAME_BYTES_MAX};

/// Why a receive has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer answered with ERROR_STATUS.
    #[error("the sender answered: {0}")]
    Remote(Status),
    /// The connection is over. Whether the peer has sent the value is unknown.
    #[error("the connection is over: {reason}")]
    PeerLost {
        /// Why.
        reason: String,
    },
    /// The allocator gave no destination.
    #[error("no memory for the value: {0}")]
    Local(Status),
    /// The key cannot travel.
    #[error("the key has {length} bytes of UTF-8, the limit is {NAME_BYTES_MAX}: shorten it")]
    KeyTooLong {
        /// Its length in bytes.
        length: usize,
    },
}

impl From<ChannelError> for TransferError {
    fn from(error: ChannelError) -> Self {
        Self::PeerLost { reason: error.0 }
    }
}

/// A rule of the protocol that the peer broke. Its connection is over; nothing else is affected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum PeerMisbehaved {
    /// What lies in the ring is no message.
    #[error("the peer wrote a message that cannot be decoded")]
    Malformed,
    /// An immediate that is neither a marker nor a request index.
    #[error("the peer used a reserved immediate")]
    ReservedImmediate,
    /// An acknowledgement without a message in flight.
    #[error("the peer acknowledged a message that was never sent")]
    AcknowledgementUnasked,
    /// An answer to a request that was not sent yet.
    #[error("the peer answered a request that was never sent")]
    AnswerUnasked,
    /// Content for a request that gave it nowhere to go.
    #[error("the peer sent content that no request allowed")]
    ContentUnasked,
    /// Content of another length than the metadata says.
    #[error("the peer sent content of the wrong length")]
    ContentLength,
    /// A second META_DATA_RESPONSE to one request.
    #[error("the peer sent META_DATA_RESPONSE twice for one request")]
    MetaDataTwice,
    /// A CANCEL_ACK without CANCEL.
    #[error("the peer acknowledged a cancel that was never sent")]
    CancelAckUnasked,
    /// A TENSOR_REQUEST with the index of one that is being answered.
    #[error("the peer used the index of an open request again")]
    DuplicateRequest,
    /// A TENSOR_RE_REQUEST without META_DATA_RESPONSE, a second one, or one after CANCEL.
    #[error("the peer sent TENSOR_RE_REQUEST where none was due")]
    ReRequestUnasked,
    /// A TENSOR_RE_REQUEST whose destination does not fit the value.
    #[error("the peer's destination does not fit the value")]
    DestinationMismatch,
    /// A second CANCEL of one request.
    #[error("the peer cancelled a request twice")]
    DuplicateCancel,
    /// More requests and cancels outstanding than agreed.
    #[error("the peer has more requests outstanding than agreed")]
    Flood,
}
