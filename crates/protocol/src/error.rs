//! Errors of a transfer and of its messages, and the rules of the protocol that a peer can break.

use crate::{
    ChannelError, Damage, Status, Validation,
    limits::{NAME_BYTES_MAX, STASH_MAX},
};

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
    /// The allocator could not give a destination.
    #[error("no memory for the value: {0}")]
    Local(Status),
    /// The bytes that arrived differ from those that were sent. The connection continues. A published value can be fetched again; a
    /// value of a step is lost.
    #[error(
        "{damage}: the sender's {validation} checksum is {sent:016x}, that of the received bytes {received:016x}"
    )]
    Corrupted {
        /// The algorithm.
        validation: Validation,
        /// The checksum that came with the content.
        sent: u64,
        /// The checksum of the bytes that came.
        received: u64,
        /// What was changed.
        damage: Damage,
    },
    /// Too many contents are held for receives that were given up.
    #[error(
        "{stashed} values of receives that were given up are held for the next receives of their keys, and the limit is \
         {STASH_MAX}: receive them, or end their steps"
    )]
    StashFull {
        /// Contents that are held.
        stashed: usize,
    },
    /// The key cannot travel: it is too long.
    #[error("the key has {length} bytes of UTF-8, the limit is {NAME_BYTES_MAX}: shorten it")]
    KeyTooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// The key cannot travel: it would act on the terminal or log that shows it.
    #[error("the key `{shown}` is no name: {}", crate::text::REMEDY)]
    KeyActive {
        /// The key, escaped.
        shown: String,
    },
}

impl TransferError {
    pub(crate) fn gone() -> Self {
        Self::PeerLost { reason: "the value is gone".to_owned() }
    }
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
    /// The bytes in the ring are no message.
    #[error("the peer wrote a message that cannot be decoded")]
    Malformed,
    /// An immediate that is neither a marker nor a request index.
    #[error("the peer used a reserved immediate")]
    ReservedImmediate,
    /// A key's number that was not agreed or not defined.
    #[error("the peer named a key by an undefined number")]
    UnknownName,
    /// An immediate of flow control with the length of neither ASK nor ANSWER.
    #[error("the peer sent a flow control record that is neither ASK nor ANSWER")]
    UnknownRecord,
    /// Counts above what was sent, or lower than before.
    #[error("the peer returned more credits or ring bytes than were used")]
    ReturnedTooMuch,
    /// More messages and contents than the peer had credits for.
    #[error("the peer sent more than it had credits for")]
    Overrun,
    /// An ASK though the last one was not answered.
    #[error("the peer sent ASK before it had the ANSWER to the last one")]
    AskedTwice,
    /// An ANSWER without an ASK.
    #[error("the peer sent ANSWER without an ASK")]
    AnswerWithoutAsk,
    /// An ANSWER that leaves out what was posted before its ASK.
    #[error("the peer's ANSWER does not return what was sent before the ASK")]
    AnswerShort,
    /// A ring offered while another offer is open.
    #[error("the peer offered a second ring before the first was used")]
    RingOfferedTwice,
    /// A ring offered that is no larger, or larger than agreed.
    #[error("the peer offered a ring of a size that was not agreed")]
    RingOfferUnfit,
    /// RING_MOVED without an offer.
    #[error("the peer moved to a ring that was never offered")]
    RingMoveUnasked,
    /// An acknowledgement without a message in flight.
    #[error("the peer acknowledged a message that was never sent")]
    AcknowledgementUnasked,
    /// An answer to a request that was not sent yet.
    #[error("the peer answered a request that was never sent")]
    AnswerUnasked,
    /// Content for a request that named no destination.
    #[error("the peer sent content that no request allowed")]
    ContentUnasked,
    /// Content whose length differs from the metadata.
    #[error("the peer sent content of the wrong length")]
    ContentLength,
    /// META_DATA_RESPONSE with more content than agreed.
    #[error("the peer sent more content inside a message than was agreed")]
    EagerUnasked,
    /// META_DATA_RESPONSE with a checksum that was not agreed, or without one that was.
    #[error("the peer sent META_DATA_RESPONSE with or without a checksum against the agreement")]
    ChecksumUnfit,
    /// A destination with a result slot that was not agreed, or without one that was.
    #[error("the peer named a destination with or without a result slot against the agreement")]
    ResultSlotUnfit,
    /// VERSION where it was not asked for, twice, or after the answer.
    #[error("the peer sent VERSION where none was due")]
    VersionUnasked,
    /// An answer with a value to a request for a version, without VERSION.
    #[error("the peer answered a request for a version without it")]
    VersionMissing,
    /// A loan, or the announcement of one, where no view was asked for.
    #[error("the peer lent memory that no request asked for")]
    LoanUnasked,
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
    /// A note of a lane that its channel does not have, or more notes than a lane may hold.
    #[error("the peer sent a note for which its channel has no lane or no room")]
    NoteUnfit,
    /// A message of a subscription for a request that is none, or where none of its kind was due.
    #[error("the peer sent a message of a subscription where none was due")]
    SubscriptionUnasked,
    /// More values or buffers of a subscription than its terms allow.
    #[error("the peer exceeded the terms of a subscription")]
    SubscriptionOverrun,
    /// More requests and cancels outstanding than agreed.
    #[error("the peer has more requests outstanding than agreed")]
    Flood,
}

/// Why bytes are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The frame ends early.
    #[error("the frame ends inside its {field}")]
    Truncated {
        /// The field.
        field: &'static str,
    },
    /// The frame has bytes after its last field.
    #[error("the frame goes on for {bytes} bytes after its last field")]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// A length is above its limit.
    #[error("{field} is {length}, the limit is {limit}")]
    TooLong {
        /// The field.
        field: &'static str,
        /// Its value.
        length: usize,
        /// What is allowed.
        limit: usize,
    },
    /// An enum has no such value.
    #[error("{field} has the unknown value {value}; is the peer of a newer version?")]
    Unknown {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A text is not UTF-8.
    #[error("{field} is not UTF-8")]
    NotUtf8 {
        /// The field.
        field: &'static str,
    },
    /// A name with characters that affect the terminal or log that shows it.
    #[error("{field} `{shown}` is no name: {}", crate::text::REMEDY)]
    ActiveCharacter {
        /// The field.
        field: &'static str,
        /// The name, escaped.
        shown: String,
    },
    /// A field contradicts another one.
    #[error("{field} contradicts the fields before it")]
    Inconsistent {
        /// The field.
        field: &'static str,
    },
    /// A key's number that was not agreed or not defined.
    #[error("no key has the number {0}")]
    UnknownName(u16),
    /// A request index that is never one.
    #[error("{0:#x} is never a request index")]
    ReservedIndex(u32),
    /// A number that must lie within a range.
    #[error("{field} is {value}, it must be {minimum} to {maximum}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// Smallest allowed.
        minimum: u32,
        /// Largest allowed.
        maximum: u32,
    },
    /// The two peers have different versions.
    #[error("the peer uses wire version {peer}, this side {own}: run the same release on both")]
    Version {
        /// Theirs.
        peer: u16,
        /// Ours.
        own: u16,
    },
}
