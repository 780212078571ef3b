//! The messages of the ring, and the table of their kinds. Encoding is in `wire`, and so are all checks of lengths and enums.

use std::{fmt, num::NonZeroU64, sync::Arc};

use smallvec::SmallVec;

use crate::{Metadata, RequestIndex, Status, TraceContext};

/// One execution of the user's program; sends and receives of different steps never mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub i64);

/// Where the sender looks for the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Among the values sent in a step; the value is taken.
    Step(StepId),
    /// As [`Step`](Self::Step), but the receiver does not wait: without a value the answer is CANCELLED.
    StepNow(StepId),
    /// Among the published tensors; the value stays.
    Published,
    /// As [`Published`](Self::Published), with VERSION before the answer.
    Versioned(Wanted),
    /// Among the offered tensors, which have numbers instead of names; the value stays. The key is not used.
    Offered(Offered),
    /// Among the sets: the head of a version of the set that the key names. It stays.
    Set(Wanted),
    /// A content of a version of the set that the key names. It stays.
    SetContent(SetContent),
    /// As [`Published`](Self::Published), of which the key names a [slice](crate::slice::Slice).
    Slice,
    /// As [`SetContent`](Self::SetContent), of which the key names a slice.
    SetSlice(SetContent),
    /// Among the exposed arenas: the [pages](crate::pages::PageMoves) that the key names, which stay; without pages, the size of the arena.
    /// With a number, the pages of the sender's own write of this number instead, to which the receiver was asked to make room.
    Pages(Option<NonZeroU64>),
    /// Asks the sender to request the pages of a write. The key names the arena and the pages. The answer has no bytes, and comes when the
    /// pages are there.
    PageWrite(PageWrite),
    /// Calls the handler that the key names. The answer is a [list of tensors](crate::TensorList).
    Call(CallTerms),
    /// Among the arguments of calls that the sender has made: a [list of tensors](crate::TensorList), which is taken.
    Arguments(NonZeroU64),
}

/// What a call says besides the name of its handler and the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallTerms {
    /// How long the caller waits for the answer, in milliseconds. The largest number stands for every longer time, too.
    pub limit_ms: u32,
    /// The arguments, if the other side is to request them. `None` if they are in the request.
    pub offered: Option<OfferedArguments>,
    /// The caller's span, which that of the handler continues.
    pub trace: Option<TraceContext>,
}

/// Arguments of a call, which are too long for its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OfferedArguments {
    /// The number with which they are requested.
    pub number: NonZeroU64,
    /// Bytes of their list.
    pub bytes: u64,
}

/// A write of pages, which waits at the receiver until the sender requests them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageWrite {
    /// Its number, with which the pages are requested.
    pub number: NonZeroU64,
    /// What the sender's program gets once the pages are there.
    pub note: Option<u64>,
}

/// Identifies a content of a version of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SetContent {
    /// The edition of the version. No other version of any set of any incarnation has the same one.
    pub edition: u64,
    /// The number of the content in the version, less than 2³¹.
    pub number: u32,
    /// Whether the receiver needs no further content of the version.
    pub is_last: bool,
}

/// Identifies an offered tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Offered {
    /// The incarnation of the worker that offers it.
    pub incarnation: u64,
    /// The edition. No other offer of the incarnation has the same one.
    pub edition: u64,
    /// Its place among the worker's offers, which a later offer may have again.
    pub cell: u32,
}

impl Scope {
    /// Whether the request fails at once if the value is not there.
    pub(crate) fn is_immediate(self) -> bool {
        matches!(
            self,
            Self::Published
                | Self::Versioned(Wanted::Now)
                | Self::Offered(_)
                | Self::Set(Wanted::Now)
                | Self::SetContent(_)
                | Self::Slice
                | Self::SetSlice(_)
                | Self::Pages(_)
                | Self::Arguments(_)
        )
    }

    /// Whether the request contains the arguments of a call.
    pub(crate) fn has_arguments(self) -> bool {
        matches!(self, Self::Call(CallTerms { offered: None, .. }))
    }

    /// Whether the peer has asked for the request: it gets an answer at once, and may be made beyond the agreed number of requests.
    pub(crate) fn is_pull(self) -> bool {
        matches!(self, Self::Pages(Some(_)) | Self::Arguments(_))
    }

    /// The step, for a value of one.
    pub fn step(self) -> Option<StepId> {
        match self {
            Self::Step(step) | Self::StepNow(step) => Some(step),
            Self::Published
            | Self::Versioned(_)
            | Self::Offered(_)
            | Self::Set(_)
            | Self::SetContent(_)
            | Self::Slice
            | Self::SetSlice(_)
            | Self::Pages(_)
            | Self::PageWrite(_)
            | Self::Call(_)
            | Self::Arguments(_) => None,
        }
    }

    pub(crate) fn is_versioned(self) -> bool {
        matches!(self, Self::Versioned(_))
    }

    /// Whether the metadata of values is remembered by key. Contents of sets have one key and different metadata. Lists of pages are seldom
    /// requested twice.
    pub(crate) fn is_remembered(self) -> bool {
        !matches!(
            self,
            Self::Set(_)
                | Self::SetContent(_)
                | Self::SetSlice(_)
                | Self::Pages(_)
                | Self::PageWrite(_)
                | Self::Arguments(_)
        )
    }
}

/// Which version of a published tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// The present one.
    Now,
    /// The first one that is newer than this: of another incarnation of its publisher, or with a greater number.
    NewerThan {
        /// The incarnation of the publisher; 0 is none, so any version is newer.
        incarnation: u64,
        /// The number.
        version: u64,
    },
}

impl Wanted {
    /// Whether version `number` of a publisher's `incarnation` is wanted.
    pub fn is_met_by(self, incarnation: u64, number: u64) -> bool {
        match self {
            Self::Now => true,
            Self::NewerThan { incarnation: known, version } => incarnation != known || number > version,
        }
    }
}

/// A range of the receiver's memory, granted to the sender for one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The receiver's region.
    pub region: u32,
    /// Its generation.
    pub generation: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes granted.
    pub capacity: u64,
    /// Where the content's [result](crate::validation) goes. Present exactly when contents are validated in mode counted.
    pub result: Option<ResultSlot>,
}

/// [`RESULT_SLOT_BYTES`](crate::limits::RESULT_SLOT_BYTES) of the receiver's memory, granted with a destination and
/// outside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResultSlot {
    /// The receiver's region.
    pub region: u32,
    /// Its generation.
    pub generation: u32,
    /// First byte.
    pub offset: u64,
}

/// TENSOR_REQUEST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRequest {
    /// The request.
    pub index: RequestIndex,
    /// Where to look.
    pub scope: Scope,
    /// The key or published name.
    pub key: Arc<str>,
    /// Metadata that the receiver has seen for this key, at most four; the destination is large enough for each.
    pub known: Arc<[Metadata]>,
    /// How the receiver wants the content.
    pub want: Want,
    /// The arguments of a call, encoded, of at most [`EAGER_BYTES_MAX`](crate::limits::EAGER_BYTES_MAX) bytes. Present exactly for a
    /// [call](Scope::Call) that offers none.
    pub arguments: Option<Arc<[u8]>>,
}

/// How a receiver wants the content of a value whose metadata it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Written into this destination, with the request index as immediate; two bits of it name which of the known
    /// metadata the value has. `None` when none of them has bytes.
    Write(Option<Destination>),
    /// Inside META_DATA_RESPONSE.
    Eager,
    /// As a loan: the sender's own bytes, read-only, with the immediate of a write. The sender may also lend a value of
    /// other metadata, which it announces first. A sender that cannot lend answers as if no metadata were known.
    View,
    /// All values from now on, until the request is cancelled: a subscription. It names no metadata.
    Each(SubscriptionTerms),
}

/// The terms of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubscriptionTerms {
    /// How many values the sender may send before the receiver returns one, at least 1 and at most
    /// [`SUBSCRIPTION_VALUES_MAX`](crate::limits::SUBSCRIPTION_VALUES_MAX).
    pub values: u8,
    /// Whether the receiver wants every value; otherwise the newest one whenever a value may be sent.
    pub every: bool,
    /// Whether the receiver wants views of the sender's memory.
    pub view: bool,
}

/// Whether a receiver wants its own copy of a value, or the sender's bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sharing {
    /// Its own copy. The sender's memory is free as soon as that is made.
    #[default]
    Copy,
    /// A read-only view of the sender's bytes where the connection allows it, else a copy. The sender's memory stays in
    /// use until the view is gone.
    View,
}

/// A content inside a message. A short one needs no allocation.
pub type EagerContent = SmallVec<[u8; 64]>;

/// META_DATA_RESPONSE: the value has none of the known metadata, or its content is in this message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaDataResponse {
    /// The request.
    pub index: RequestIndex,
    /// Element type and shape of the value.
    pub metadata: Metadata,
    /// The whole content, if it travels with its metadata; the request is answered then.
    pub content: Option<EagerContent>,
    /// A loan of the content follows, without a TENSOR_RE_REQUEST. Only if the request asked for a view, and never with
    /// content. If the loan fails, a META_DATA_RESPONSE without this follows.
    pub loan_follows: bool,
    /// The content's checksum, when contents are validated: if the content is in this message or will be lent, and in
    /// mode original. See [`validation`](crate::validation).
    pub checksum: Option<u64>,
}

/// VERSION: comes before the answer to a request of [`Scope::Versioned`] and has the version of that answer's value. It
/// ends no grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionNotice {
    /// The request.
    pub index: RequestIndex,
    /// The version.
    pub version: u64,
}

/// TENSOR_RE_REQUEST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorReRequest {
    /// The request.
    pub index: RequestIndex,
    /// Where the content may go; `None` for contents of no bytes.
    pub destination: Option<Destination>,
}

/// BUFFER_REQUEST: the next value of a subscription fits none of its buffers. The sender writes none of them any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferRequest {
    /// The subscription.
    pub index: RequestIndex,
    /// Element type and shape of the value, which has bytes.
    pub metadata: Metadata,
}

/// BUFFER_RESPONSE and BUFFER_IDLE: what the sender of a subscription may use from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffers {
    /// The subscription.
    pub index: RequestIndex,
    /// How many more values may be sent. None are returned by BUFFER_RESPONSE.
    pub values: u8,
    /// Buffers for one value each, which the sender uses in this order. With BUFFER_RESPONSE they are the only ones. The sender ignores
    /// those of a BUFFER_IDLE that comes between its BUFFER_REQUEST and the BUFFER_RESPONSE.
    pub destinations: SmallVec<[Destination; 2]>,
}

/// TENSOR_WRITE: a value of a subscription is complete. Its content is in this message, or was posted before: written into the oldest
/// buffer, or as a loan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorWrite {
    /// The version, if it is a published value.
    pub version: u64,
    /// How many values there were under the key, this one included: grows by more than one if values were left out.
    pub sequence: u64,
    /// The version of the first of these: greater than that of an earlier value if the count has begun anew.
    pub began: u64,
    /// The value. `loan_follows` says that it was lent.
    pub value: MetaDataResponse,
}

/// ERROR_STATUS: there will be no content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorStatus {
    /// The request.
    pub index: RequestIndex,
    /// Why.
    pub status: Status,
}

/// NOTE: a short message that no request asked for. Nothing answers it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The channel, which both sides have opened. A note of a channel that is not open is ignored.
    pub channel: u64,
    /// The lane of the channel. Notes of one lane keep their order. A note for [every lane](crate::limits::NOTE_EVERY_LANE) arrives
    /// in each lane.
    pub lane: u16,
    /// Its content, of at most [`NOTE_BYTES_MAX`](crate::limits::NOTE_BYTES_MAX) bytes.
    pub bytes: EagerContent,
}

/// Generates the kind on the wire, the name and the counter of the messages of each row.
macro_rules! messages {
    ($($(#[$doc:meta])+ $counter:ident: $KIND:ident = $number:literal $variant:ident
        $(, $OTHER:ident = $other_number:literal $other:ident)?;)+) => {
        /// The first byte of each message, after its length and counts.
        pub(crate) mod kind {
            $(pub(crate) const $KIND: u8 = $number;
            $(pub(crate) const $OTHER: u8 = $other_number;)?)+
        }

        impl Message {
            /// Its name in the book.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) $(| Self::$other(_))? => stringify!($KIND),)+
                }
            }

            pub(crate) fn kind(&self) -> u8 {
                match self {
                    $(Self::$variant(_) => $number, $(Self::$other(_) => $other_number,)?)+
                }
            }
        }

        /// Messages by kind.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct MessageCounts {
            $($(#[$doc])+ pub $counter: u64,)+
        }

        impl MessageCounts {
            /// Of all kinds together.
            pub fn total(&self) -> u64 {
                [$(self.$counter),+].into_iter().sum()
            }

            pub(crate) fn count(&mut self, message: &Message) {
                *match message {
                    $(Message::$variant(_) $(| Message::$other(_))? => &mut self.$counter,)+
                } += 1;
            }
        }

        impl fmt::Display for MessageCounts {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} messages", self.total())?;
                let mut separator = " (";
                for (name, count) in [$((stringify!($KIND), self.$counter)),+] {
                    if count > 0 {
                        write!(f, "{separator}{name} {count}")?;
                        separator = ", ";
                    }
                }
                if separator == ", " { f.write_str(")") } else { Ok(()) }
            }
        }
    };
}

messages! {
    /// TENSOR_REQUEST, with however many keys.
    tensor_request: TENSOR_REQUEST = 1 TensorRequest, TENSOR_REQUESTS = 7 TensorRequests;
    /// META_DATA_RESPONSE.
    meta_data_response: META_DATA_RESPONSE = 2 MetaDataResponse;
    /// TENSOR_RE_REQUEST.
    tensor_re_request: TENSOR_RE_REQUEST = 3 TensorReRequest;
    /// ERROR_STATUS.
    error_status: ERROR_STATUS = 4 ErrorStatus;
    /// CANCEL.
    cancel: CANCEL = 5 Cancel;
    /// CANCEL_ACK.
    cancel_ack: CANCEL_ACK = 6 CancelAck;
    /// VERSION.
    version: VERSION = 8 Version;
    /// NOTE.
    note: NOTE = 9 Note;
    /// BUFFER_REQUEST.
    buffer_request: BUFFER_REQUEST = 10 BufferRequest;
    /// BUFFER_RESPONSE.
    buffer_response: BUFFER_RESPONSE = 11 BufferResponse;
    /// BUFFER_IDLE.
    buffer_idle: BUFFER_IDLE = 12 BufferIdle;
    /// TENSOR_WRITE.
    tensor_write: TENSOR_WRITE = 13 TensorWrite;
}

/// A message of the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// Receiver → sender.
    TensorRequest(TensorRequest),
    /// Receiver → sender: TENSOR_REQUEST with several keys, at least two. Each is answered as if it had come alone.
    TensorRequests(Vec<TensorRequest>),
    /// Sender → receiver.
    MetaDataResponse(MetaDataResponse),
    /// Receiver → sender.
    TensorReRequest(TensorReRequest),
    /// Sender → receiver.
    ErrorStatus(ErrorStatus),
    /// Receiver → sender: the receive was given up. Always answered by `CancelAck`.
    Cancel(RequestIndex),
    /// Sender → receiver: no write of the request is posted or in flight any more.
    CancelAck(RequestIndex),
    /// Sender → receiver: the version of the value that will be the answer.
    Version(VersionNotice),
    /// Either side → the other.
    Note(Note),
    /// Sender → receiver: a subscription needs buffers.
    BufferRequest(BufferRequest),
    /// Receiver → sender: its buffers.
    BufferResponse(Buffers),
    /// Receiver → sender: further values, and buffers for them.
    BufferIdle(Buffers),
    /// Sender → receiver: a value of a subscription.
    TensorWrite(TensorWrite),
}

impl Message {
    /// The requests that it carries.
    pub fn requests(&self) -> &[TensorRequest] {
        match self {
            Self::TensorRequest(request) => std::slice::from_ref(request),
            Self::TensorRequests(requests) => requests,
            _ => &[],
        }
    }
}
