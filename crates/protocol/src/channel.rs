//! The traits through which the protocol posts writes, takes memory and gets values.

use std::{future::Future, sync::Arc};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::BoxStream};

use crate::{
    Checksums, Code, Destination, Metadata, Note, Scope, Status, SubscriptionTerms, TensorRequest,
    limits::{RESULT_BYTES, SLOT_BYTES},
};

/// A contiguous part of the message ring at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSpan {
    /// First byte inside the ring.
    pub offset: u32,
    /// Length in bytes.
    pub length: u32,
}

/// A slot of [`SLOT_BYTES`] outside the ring, for one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordSlot {
    /// The slot of ASK.
    Ask,
    /// The slot of ANSWER.
    Answer,
}

impl RecordSlot {
    /// The slot's first byte in the memory of both slots.
    pub fn offset(self) -> u64 {
        match self {
            Self::Ask => 0,
            Self::Answer => SLOT_BYTES.into(),
        }
    }
}

/// The connection below is over, for the reason in the text. Ends every request and response of the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ChannelError(pub String);

/// Why granted memory may be taken back: the evidence on the wire that no write can still land.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LentEnd {
    /// META_DATA_RESPONSE came instead of content, or BUFFER_REQUEST for larger memory.
    MetaDataResponse,
    /// ERROR_STATUS came.
    ErrorStatus,
    /// CANCEL_ACK came.
    CancelAck,
    /// Content came after the receive was given up.
    Content,
    /// The request was never sent, or the ring never offered.
    NeverSent,
    /// The peer has left the ring for a larger one.
    RingMoved,
}

/// One connection to one peer: one-sided writes into it, and the ring that it writes into here.
///
/// Posts happen in the order of calls, and land in that order as far as an immediate can tell. The connection
/// counts what it posts and never exceeds the depths of [`credit`](crate::credit), so a post need not wait for the peer.
/// Where a fabric reports completions late, the channel holds posts back, in order, until the completions come.
///
/// Posts are made with the connection locked, so an implementation must not call back into it.
pub trait Channel: Send + Sync + 'static {
    /// Bytes of a value, kept alive by the channel until they are written.
    type Bytes: AsRef<[u8]> + Clone + Send + Sync + 'static;
    /// Destination memory, granted to the peer; or a view of the peer's memory, which is taken back by dropping it.
    type Lent: Send + 'static;
    /// A content write under way; ends when its bytes may be reused.
    type Write: Future<Output = Result<(), ChannelError>> + Send + 'static;

    /// Writes an encoded message into `ring` at the peer, with immediate `0xFFFF_FFFF`. `bytes` fill the span `first` and then the
    /// span `second`, which is empty unless the ring wraps inside the message.
    ///
    /// # Errors
    /// The connection is over.
    fn post_message(
        &self,
        ring: Destination,
        first: RingSpan,
        second: RingSpan,
        bytes: &[u8],
    ) -> Result<(), ChannelError>;

    /// Posts a bare notification with immediate `0xFFFF_FFFE`: the message in flight was taken. Only in mode
    /// original.
    ///
    /// # Errors
    /// The connection is over.
    fn post_acknowledgement(&self) -> Result<(), ChannelError>;

    /// Writes a flow control record into its slot at the peer, with immediate `0xFFFF_FFFE`. Only in mode
    /// counted.
    ///
    /// # Errors
    /// The connection is over.
    fn post_record(&self, slot: RecordSlot, bytes: &[u8]) -> Result<(), ChannelError>;

    /// Makes `bytes` sendable before their write is posted: bytes in memory that the fabric cannot send from are copied to memory
    /// that it can. Default: returns `bytes` unchanged.
    ///
    /// # Errors
    /// A status for the requester, for instance RESOURCE_EXHAUSTED.
    ///
    /// # Cancel safety
    /// Dropping the future frees the memory that it has taken.
    fn stage(&self, bytes: Self::Bytes) -> impl Future<Output = Result<Self::Bytes, Status>> + Send {
        async move { Ok(bytes) }
    }

    /// Writes all pieces of `piece_bytes` of a longer content but the last to their destination, before the content's turn to be posted
    /// comes. Returns how many bytes from its beginning are posted: whatever is posted later lands after them. Default: none of them.
    ///
    /// # Errors
    /// The connection is over.
    ///
    /// # Cancel safety
    /// What was posted when the future is dropped still lands, before everything that is posted later.
    fn write_ahead(
        &self,
        bytes: &Self::Bytes,
        destination: Destination,
        piece_bytes: u32,
    ) -> impl Future<Output = Result<u64, ChannelError>> + Send {
        let _ = (bytes, destination, piece_bytes);
        std::future::ready(Ok(0))
    }

    /// As [`write_ahead`](Self::write_ahead), for a content that consists of pieces without gaps between them, each with its place. What was
    /// posted is taken out of `pieces`. Default: none of it.
    ///
    /// # Errors
    /// The connection is over.
    ///
    /// # Cancel safety
    /// As [`write_ahead`](Self::write_ahead).
    fn write_pieces_ahead(
        &self,
        pieces: &mut Vec<(Self::Bytes, u64)>,
        destination: Destination,
        piece_bytes: u32,
    ) -> impl Future<Output = Result<(), ChannelError>> + Send {
        let _ = (pieces, destination, piece_bytes);
        std::future::ready(Ok(()))
    }

    /// Posts the content write, whose immediate is `immediate`, before this returns. `destination` names the bytes that were [written
    /// ahead](Self::write_ahead), too; this write has the others. Without bytes or destination it is a
    /// bare notification. Without an immediate a message that is posted later says that the content has landed. A `result` lands in the
    /// [result slot](Destination::result) of the destination before the immediate is delivered: by the same write, whose length then
    /// counts both, or by a write before it.
    fn write_content(
        &self,
        bytes: Option<Self::Bytes>,
        destination: Option<(Destination, u64)>,
        immediate: Option<u32>,
        result: Option<[u8; RESULT_BYTES]>,
    ) -> Self::Write;

    /// Checks that [`write_pages`](Self::write_pages) can post these pages as one write.
    ///
    /// # Errors
    /// A status for the requester. Default: UNIMPLEMENTED.
    fn check_pages(&self, pages: &[(Self::Bytes, u64)]) -> Result<(), Status> {
        let _ = pages;
        Err(Status::new(Code::Unimplemented, "this sender writes no pages"))
    }

    /// Posts a content that consists of pages, as one logical write whose immediate is `immediate`, before this returns. Each page has its
    /// place, relative to the destination. Called only with pages that were [checked](Self::check_pages). Default: posts the notification.
    fn write_pages(
        &self,
        pages: Vec<(Self::Bytes, u64)>,
        destination: Destination,
        immediate: u32,
    ) -> Self::Write {
        let _ = (pages, destination);
        self.write_content(None, None, Some(immediate), None)
    }

    /// Whether a write that was just posted has already ended, because its bytes were copied. Default: `false`.
    fn is_written(write: &Self::Write) -> bool {
        let _ = write;
        false
    }

    /// Whether a content has landed in memory that an untrusted peer may still write. Such a content is [copied](Self::set_apart)
    /// before it is read. Default: `false`.
    fn is_exposed(lent: &Self::Lent) -> bool {
        let _ = lent;
        false
    }

    /// Copies an [exposed](Self::is_exposed) content of `bytes` bytes, and its result, to memory that the peer never could
    /// write, and ends the grant of the exposed memory. Yields to other tasks between pieces.
    ///
    /// # Errors
    /// A status for the caller of the receive.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the content exposed, to be copied later.
    fn set_apart(lent: &mut Self::Lent, bytes: u64) -> impl Future<Output = Result<(), Status>> + Send {
        let _ = (lent, bytes);
        std::future::ready(Ok(()))
    }

    /// Ends the grant of memory whose content has landed, so that the bytes cannot change after they were validated.
    /// Called only where contents are validated, once for each content.
    ///
    /// # Errors
    /// A status for the caller of the receive. The memory is back in its pool, or is leaked and counted.
    fn settle(lent: Self::Lent) -> Result<Self::Lent, Status>;

    /// The bytes of a content that is [settled](Self::settle), at least as many as its metadata declares.
    fn content(lent: &Self::Lent) -> &[u8];

    /// The bytes of the result slot of a content that is [settled](Self::settle), if it has one.
    fn result(lent: &Self::Lent) -> Option<[u8; RESULT_BYTES]>;

    /// Whether [`lend_content`](Self::lend_content) may work for these bytes. Default: `false`.
    fn can_lend(&self, bytes: &Self::Bytes) -> bool {
        let _ = bytes;
        false
    }

    /// Posts a loan of `bytes` with immediate `immediate` before this returns. The bytes stay alive and unchanged until the peer
    /// releases them. Returns `None` if the loan cannot be posted now; then nothing was posted. The write ends when the peer has
    /// the loan.
    fn lend_content(&self, bytes: &Self::Bytes, immediate: u32) -> Option<Self::Write> {
        let _ = (bytes, immediate);
        None
    }

    /// Copies `into.len()` bytes of an own ring or of the own slots, from `offset` on, into `into`. Called with the connection
    /// locked, so that no two tasks read the same message.
    ///
    /// # Errors
    /// The range leaves the memory.
    fn read(&self, ring: &Self::Lent, offset: u64, into: &mut [u8]) -> Result<(), ChannelError>;

    /// Makes a second own ring of `ring_bytes` besides the ring in use: it is registered, announced to the peer, and confirmed by
    /// the peer. Returns `None` when there is no memory; then the connection continues with the ring in use. At most one is made
    /// before the peer has left the ring in use, which is then [taken back](Self::take_back).
    ///
    /// # Cancel safety
    /// The connection does not call this again after it has dropped the future.
    fn make_ring(&self, ring_bytes: u32) -> impl Future<Output = Option<(Self::Lent, Destination)>> + Send;

    /// Whether [`help`](Self::help) may find anything now. Default: `false`.
    fn may_help(&self) -> bool {
        false
    }

    /// Polls briefly for the arrival that the calling task waits for, and processes it, where that pays. Returns whether
    /// anything was processed. Called without locks, after
    /// [`may_help`](Self::may_help). Default: does nothing and returns `false`.
    fn help(&self) -> bool {
        false
    }

    /// The mailbox, between two workers of one host. Default: there is none.
    fn mailbox(&self) -> Option<&dyn Mailbox> {
        None
    }

    /// As [`help`](Self::help), for what may also come into the mailbox after `messages` notes by message. That ends the polling, too.
    fn help_beside_mailbox(&self, messages: u64) -> bool {
        let _ = messages;
        self.help()
    }

    /// Called when a task has found its note in the mailbox, with the connection locked.
    fn found_note(&self) {}

    /// Appends a small content to `into`, to travel inside a message. Called with the connection locked.
    fn copy_out(&self, bytes: &Self::Bytes, into: &mut Vec<u8>) {
        into.extend_from_slice(bytes.as_ref());
    }

    /// Ends the grant of memory whose request was given up or answered without content.
    fn take_back(&self, lent: Self::Lent, end: LentEnd);
}

/// Where notes travel between two workers of one host. `put`, `take` and `park` are called with the connection locked.
pub trait Mailbox: Send + Sync {
    /// Puts a note of `parts` for the peer into a lane of a channel. It follows `messages` notes by message. False if there is no room for
    /// it.
    fn put(&self, place: (u64, u16), parts: &[&[u8]], messages: u64) -> bool;

    /// Whether the peer's next note is here and follows `messages` notes by message.
    fn has_next(&self, messages: u64) -> bool;

    /// Takes the note that [`has_next`](Self::has_next) finds.
    fn take(&self, messages: u64) -> Option<Note>;

    /// Has the peer wake this side for its next note in a lane. The caller looks once more.
    fn park(&self, lane: u16);

    /// Whether the peer seems to have parked a lane.
    fn is_parked(&self, lane: u16) -> bool;

    /// Whether the peer has parked a lane and must be woken for what was put. True once for each time that it parks.
    fn must_wake(&self, lane: u16) -> bool;
}

/// Allocates destinations.
pub trait Allocator: Send + Sync {
    /// The memory that it allocates.
    type Lent: Send + 'static;

    /// Whether to receive a value of `metadata` at all. A refused value stays at its sender. May be called with the connection
    /// locked. Default: every value is received.
    ///
    /// # Errors
    /// A status for the caller of the receive.
    fn accepts(&self, metadata: &Metadata) -> Result<(), Status> {
        let _ = metadata;
        Ok(())
    }

    /// The metadata that the value has if its sender is honest, where that is known and not
    /// [remembered](crate::MetadataCache) by key. Called with the connection locked. Default: `None`.
    fn expected(&self) -> Option<&Arc<[Metadata]>> {
        None
    }

    /// The arguments of a [call](Scope::Call), for its request. Default: `None`, because other requests have none.
    fn arguments(&self) -> Option<Arc<[u8]>> {
        None
    }

    /// Takes back memory that was offered for a receive and is not needed; `end` is the evidence with which its grant
    /// ended. Returns memory that is not this allocator's, which then goes to [`Channel::take_back`]. Default: returns it.
    fn take_back(&self, lent: Self::Lent, end: LentEnd) -> Option<Self::Lent> {
        let _ = end;
        Some(lent)
    }

    /// Memory for content of `metadata`, registered, announced to the peer and confirmed by it. Never called
    /// for contents of no bytes. The destination has a [result slot](Destination::result) exactly if the connection
    /// [wants them](crate::Agreed::has_result_slots).
    ///
    /// # Errors
    /// A status for the caller of the receive, for instance RESOURCE_EXHAUSTED.
    ///
    /// # Cancel safety
    /// Dropping the future frees the memory that it has taken.
    fn allocate(
        &self,
        metadata: &Metadata,
    ) -> impl Future<Output = Result<(Self::Lent, Destination), Status>> + Send;

    /// Whether a value that is known to have `metadata` should come inside a message, which needs no granted memory. Called with
    /// the connection locked, and only for values that are small enough for a message. Default: `false`.
    fn prefers_eager(&self, metadata: &Metadata) -> bool {
        let _ = metadata;
        false
    }

    /// Memory with a copy of `content`, which came inside a message. It is not granted to the peer.
    fn copy_eager(&self, metadata: &Metadata, content: &[u8]) -> Self::Lent;

    /// Memory for a value of a step that the sender may not have yet. With `None` the request has no destination, and memory is
    /// [allocated](Self::allocate) once the sender has the value. A pool gives out at most a part of its memory here, so that
    /// receives whose values come late cannot starve receives whose values exist. Default: returns what
    /// [`allocate`](Self::allocate) returns.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    fn allocate_early(&self, metadata: &Metadata) -> Result<Option<(Self::Lent, Destination)>, Status> {
        self.allocate(metadata).now_or_never().transpose()
    }
}

/// What a source has for a request.
#[derive(Debug)]
pub enum Take<T, F> {
    /// A value, or why there is none.
    Now(Result<T, Status>),
    /// The future of a value.
    Later(F),
}

/// A value of a subscription.
#[derive(Debug)]
pub struct Sequenced<T> {
    /// The value.
    pub taken: T,
    /// How many values there were under the key, this one included.
    pub sequence: u64,
    /// The version of the first of these, if they have versions.
    pub began: u64,
}

/// The values that requests are answered with.
pub trait Source: Send + Sync {
    /// The bytes of its values.
    type Bytes: Send + 'static;
    /// A value that was taken out for one answer. It can be put back as long as it was not written.
    type Taken: Send + 'static;
    /// The future of a value that does not exist yet. It returns the value, or the status of why none will come. Dropping the
    /// future withdraws the request from the source; a value that it was about to return goes to the next request in line.
    type Taking: Future<Output = Result<Self::Taken, Status>> + Send + Unpin + 'static;

    /// The values of a subscription, from now on, in order, each taken when the stream is polled. The stream ends with a status, or
    /// when it is dropped. Default: subscriptions are refused.
    fn subscribe(
        self: &Arc<Self>,
        (scope, key): (Scope, &Arc<str>),
        terms: SubscriptionTerms,
    ) -> BoxStream<'static, Result<Sequenced<Self::Taken>, Status>>
    where
        Self: Sized,
    {
        let _ = (scope, key, terms);
        let refused = Status::new(Code::Unimplemented, "this sender has no subscriptions");
        futures::stream::iter([Err(refused)]).boxed()
    }

    /// Takes the value if there is one. Otherwise registers interest *before this returns*, so that requests are served in
    /// the order of these calls.
    ///
    /// # Errors
    /// The status that the requester gets: NOT_FOUND, ABORTED, CANCELLED, …
    fn take(&self, request: &TensorRequest) -> Take<Self::Taken, Self::Taking>;

    /// The delay before a request is refused, for a peer that has many requests refused. Until then the request counts as
    /// outstanding, even if the peer cancels it. Called once for each request that gets no value, without the connection's lock.
    /// Default: `None`, which refuses the request at once.
    fn before_refusal(&self) -> Option<BoxFuture<'static, ()>> {
        None
    }

    /// Element type and shape of `taken`.
    fn metadata(taken: &Self::Taken) -> &Metadata;

    /// The content of `taken`; `None` when there are no bytes to send.
    fn bytes(taken: &Self::Taken) -> Option<&Self::Bytes>;

    /// The content of `taken` if it consists of several pieces, such as pages, each with its place in the receiver's memory, in bytes. It has
    /// no [bytes](Self::bytes) then. Default: it does not.
    fn pages(taken: &Self::Taken) -> Option<Vec<(Self::Bytes, u64)>> {
        let _ = taken;
        None
    }

    /// Where the checksums of `taken` are remembered, if anywhere: shared by all sources of the same value.
    fn checksums(taken: &Self::Taken) -> Option<Arc<Checksums>> {
        let _ = taken;
        None
    }

    /// The version of `taken`, for VERSION; only published values have one. Default: 0, which is none.
    fn version(taken: &Self::Taken) -> u64 {
        let _ = taken;
        0
    }

    /// Puts back a value that was taken but not written, to its old position.
    fn put_back(&self, taken: Self::Taken);
}
