//! The messages of the ring. Encoding lives in `wire`, and so do all checks of lengths and enums.

use std::sync::Arc;

use crate::{Metadata, Status};

/// One execution of the user's program; sends and receives of different steps never mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub i64);

/// Names one request of one connection and direction; also the immediate of its content. Classifies an
/// arrival, protects nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestIndex(pub u32);

/// Where the sender looks for the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Among the sends of a step; the value is taken.
    Step(StepId),
    /// Among the published tensors; the value stays.
    Published,
    /// As [`Published`](Self::Published), and VERSION comes before the answer.
    Versioned(Wanted),
}

impl Scope {
    /// Whether the value is there when the request comes, or the request fails at once.
    pub(crate) fn is_immediate(self) -> bool {
        matches!(self, Self::Published | Self::Versioned(Wanted::Now))
    }

    pub(crate) fn is_versioned(self) -> bool {
        matches!(self, Self::Versioned(_))
    }
}

/// Which version of a published tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// The one that there is now.
    Now,
    /// The one that there is once it is newer than this: of another life of its publisher, or of a greater number.
    NewerThan {
        /// The life of the publisher; 0 is that of none, so any version is newer.
        incarnation: u64,
        /// The number.
        version: u64,
    },
}

/// A range of the receiver's memory, lent to the sender for one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The receiver's region.
    pub region: u32,
    /// Its generation.
    pub generation: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes lent.
    pub capacity: u64,
    /// Where the content's [result](crate::validation) goes; exactly when contents are validated in mode counted.
    pub result: Option<ResultSlot>,
}

/// [`RESULT_SLOT_BYTES`](crate::limits::RESULT_SLOT_BYTES) of the receiver's memory, lent with a destination and
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
    /// What the receiver has seen the value to be, at most four; the destination fits each of these.
    pub known: Arc<[Metadata]>,
    /// How the content is to come.
    pub want: Want,
}

/// How a receiver wants the content of a value that is among the known ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Written into this destination, with the request index as immediate; two bits of it name which of the known
    /// metadata the value has. `None` when none of them has bytes.
    Write(Option<Destination>),
    /// Inside META_DATA_RESPONSE.
    Eager,
    /// Lent: the sender's own bytes, read-only, with the immediate of a write. The sender may lend values of other
    /// metadata too, of which it tells first; where it can't lend, it answers as if nothing were known.
    View,
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

/// META_DATA_RESPONSE: the value is none of the known ones, or its content is here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaDataResponse {
    /// The request.
    pub index: RequestIndex,
    /// What the value is.
    pub metadata: Metadata,
    /// The whole content, if it travels with its metadata; the request is answered then.
    pub content: Option<Box<[u8]>>,
    /// The content will be lent, without a TENSOR_RE_REQUEST. Only where the request asked for a view, and never with
    /// content. If the loan fails after all, a META_DATA_RESPONSE without this follows.
    pub loan_follows: bool,
    /// That of the content, when contents are validated: if it is here, is to be lent, or in mode original. See
    /// [`validation`](crate::validation).
    pub checksum: Option<u64>,
}

/// VERSION: comes before the answer to a request of [`Scope::Versioned`], and is about the value of that answer. Ends no
/// grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionTold {
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

/// ERROR_STATUS: there will be no content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorStatus {
    /// The request.
    pub index: RequestIndex,
    /// Why.
    pub status: Status,
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
    Version(VersionTold),
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

/// The requests that came in one message: at least one, in the sender's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requested {
    first: TensorRequest,
    others: Vec<TensorRequest>,
}

impl Requested {
    /// `None` when there are none.
    pub(crate) fn several(requests: Vec<TensorRequest>) -> Option<Self> {
        let mut requests = requests.into_iter();
        let first = requests.next()?;
        Some(Self { first, others: requests.collect() })
    }
}

impl From<TensorRequest> for Requested {
    fn from(first: TensorRequest) -> Self {
        Self { first, others: Vec::new() }
    }
}

impl IntoIterator for Requested {
    type Item = TensorRequest;
    type IntoIter = std::iter::Chain<std::iter::Once<TensorRequest>, std::vec::IntoIter<TensorRequest>>;

    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self.first).chain(self.others)
    }
}
