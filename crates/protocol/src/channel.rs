//! What the protocol needs from the world.

use std::{future::Future, pin::pin, sync::Arc, task::Poll};

use futures::poll;

use crate::{Checksums, Destination, Metadata, Scope, Status, limits::RESULT_BYTES};

/// A contiguous part of the message ring at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSpan {
    /// First byte inside the ring.
    pub offset: u32,
    /// Length in bytes.
    pub length: u32,
}

/// A slot of [`SLOT_BYTES`](crate::limits::SLOT_BYTES) outside the ring, for one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordSlot {
    /// That of ASK.
    Ask,
    /// That of ANSWER.
    Answer,
}

/// The connection below is over; the text says why. Ends every request and response of the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ChannelError(pub String);

/// Why lent memory may be taken back (the wire's evidence that no write can still land).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LentEnd {
    /// META_DATA_RESPONSE came instead of content.
    MetaDataResponse,
    /// ERROR_STATUS came.
    ErrorStatus,
    /// CANCEL_ACK came.
    CancelAck,
    /// Content came after the receive was given up.
    Content,
    /// The request was never sent.
    NeverSent,
}

/// One connection to one peer: one-sided writes into it, and the ring that it writes into here.
///
/// Posts happen in the order of calls, and land in that order as far as an immediate can tell. The connection
/// counts what it posts and never exceeds the depths of [`credit`](crate::credit), so a post has no reason to
/// wait; where a fabric reports completions late, the channel holds posts back, in order, until they come.
///
/// Posts are made with the connection locked, so they never call back into it.
pub trait Channel: Send + Sync + 'static {
    /// Bytes of a value, kept alive by the channel until they are written.
    type Bytes: AsRef<[u8]> + Send + Sync + 'static;
    /// Destination memory, lent to the peer; or a view of the peer's, which is taken back by letting go of it.
    type Lent: Send + 'static;
    /// A content write under way; ends when its bytes may be reused.
    type Write: Future<Output = Result<(), ChannelError>> + Send + 'static;

    /// Writes an encoded message into the peer's ring: all of `bytes` over `first`, then `second` (empty unless
    /// the ring wraps inside the message), then immediate `0xFFFF_FFFF`.
    ///
    /// # Errors
    /// The connection is over.
    fn post_message(&self, first: RingSpan, second: RingSpan, bytes: &[u8]) -> Result<(), ChannelError>;

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

    /// Brings `bytes` to where they can be written from, before their write takes its place among the posts. As it
    /// stands they are there.
    ///
    /// # Errors
    /// A status for the requester, for instance RESOURCE_EXHAUSTED.
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it has taken.
    fn stage(&self, bytes: Self::Bytes) -> impl Future<Output = Result<Self::Bytes, Status>> + Send {
        async move { Ok(bytes) }
    }

    /// Starts the content write, whose immediate is `immediate`. Without bytes or destination it is a bare
    /// notification. With a `result`, that lands in the [result slot](Destination::result) of the destination before
    /// the immediate is delivered, be it by the same write, whose length then counts both, or by one before it. Posted
    /// before this returns.
    fn write_content(
        &self,
        bytes: Option<Self::Bytes>,
        destination: Option<Destination>,
        immediate: u32,
        result: Option<[u8; RESULT_BYTES]>,
    ) -> Self::Write;

    /// Whether a content has landed in memory of which the peer is not trusted to leave it alone: it is
    /// [set apart](Self::set_apart) before anyone looks at it. As it stands: never.
    fn is_exposed(lent: &Self::Lent) -> bool {
        let _ = lent;
        false
    }

    /// Copies an [exposed](Self::is_exposed) content of `bytes` bytes, and its result, to memory that the peer never could
    /// write, and ends the loan of the other. Lets other tasks have their turn.
    ///
    /// # Errors
    /// A status for the caller of the receive.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the content exposed, to be set apart later.
    fn set_apart(lent: &mut Self::Lent, bytes: u64) -> impl Future<Output = Result<(), Status>> + Send {
        let _ = (lent, bytes);
        std::future::ready(Ok(()))
    }

    /// Ends the loan of memory whose content has landed, so that the bytes which are validated can't change any more.
    /// Only where contents are validated; once for each content.
    ///
    /// # Errors
    /// A status for the caller of the receive. The memory has gone back, or is leaked and counted.
    fn settle(lent: Self::Lent) -> Result<Self::Lent, Status>;

    /// The bytes of a content that is [settled](Self::settle), at least as many as its metadata says.
    fn content(lent: &Self::Lent) -> &[u8];

    /// What lies in the result slot of a content that is [settled](Self::settle), if it has one.
    fn result(lent: &Self::Lent) -> Option<[u8; RESULT_BYTES]>;

    /// Whether [`lend_content`](Self::lend_content) may work for these bytes. As it stands: never.
    fn can_lend(&self, bytes: &Self::Bytes) -> bool {
        let _ = bytes;
        false
    }

    /// Lends `bytes` to the peer with immediate `immediate`: they stay alive and unchanged until the peer has let go
    /// of them. Posted before this returns, unless it can't be: `None`, and nothing was posted. The write ends when the
    /// peer has the loan.
    fn lend_content(&self, bytes: &Self::Bytes, immediate: u32) -> Option<Self::Write> {
        let _ = (bytes, immediate);
        None
    }

    /// Copies `into.len()` bytes of the own ring, from `offset`, out.
    ///
    /// # Errors
    /// The range leaves the ring.
    fn read_ring(&self, offset: u32, into: &mut [u8]) -> Result<(), ChannelError>;

    /// Copies the first bytes of an own slot out, at most [`SLOT_BYTES`](crate::limits::SLOT_BYTES).
    ///
    /// # Errors
    /// The connection is over.
    fn read_record(&self, slot: RecordSlot, into: &mut [u8]) -> Result<(), ChannelError>;

    /// A second own ring of `ring_bytes`, registered, announced to the peer and confirmed by it, kept beside the
    /// one in use. `None` when there is no memory: the connection goes on with the ring it has. At most one is
    /// made before [`own_ring_moved`](Self::own_ring_moved).
    ///
    /// # Cancel safety
    /// Not called again after its future was dropped.
    fn make_ring(&self, ring_bytes: u32) -> impl Future<Output = Option<Destination>> + Send;

    /// The peer has written its last byte into the own ring in use: from now on
    /// [`read_ring`](Self::read_ring) is about the ring made last, and the other's loan ends.
    fn own_ring_moved(&self);

    /// Messages posted from now on go into `ring` at the peer.
    fn move_to_ring(&self, ring: Destination);

    /// A copy of a small content, to travel inside a message.
    fn copy_out(&self, bytes: &Self::Bytes) -> Box<[u8]> {
        bytes.as_ref().into()
    }

    /// Ends the loan of memory whose request was given up or answered without content.
    fn take_back(&self, lent: Self::Lent, end: LentEnd);
}

/// Gives destinations.
pub trait Allocator: Send + Sync {
    /// The memory it lends.
    type Lent: Send + 'static;

    /// Whether a value of `metadata` is to be received at all; one that isn't stays with its sender. As it stands:
    /// always.
    ///
    /// # Errors
    /// A status for the caller of the receive.
    fn accepts(&self, metadata: &Metadata) -> Result<(), Status> {
        let _ = metadata;
        Ok(())
    }

    /// Takes back memory of a receive that goes on or has failed, whose loan has ended for `end`; gives what is not for
    /// it, which goes to [`Channel::take_back`]. As it stands: everything.
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
    /// Dropping the future gives back what it has taken.
    fn allocate(
        &self,
        metadata: &Metadata,
    ) -> impl Future<Output = Result<(Self::Lent, Destination), Status>> + Send;

    /// Memory of this end with a copy of `content`, which came inside a message. It is not lent to the peer. Never
    /// called for contents of no bytes.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    ///
    /// # Cancel safety
    /// As [`allocate`](Self::allocate).
    fn keep(
        &self,
        metadata: &Metadata,
        content: &[u8],
    ) -> impl Future<Output = Result<Self::Lent, Status>> + Send;

    /// Memory for a value of a step that the sender may not have yet, or `None`: the request then goes out
    /// without a destination, and memory is [allocated](Self::allocate) once the value is there. So receives
    /// whose values come late never starve those whose values are there; a pool gives out at most a part of
    /// itself here. As it stands: what [`allocate`](Self::allocate) gives at once.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    ///
    /// # Cancel safety
    /// Dropping the future gives back what it has taken.
    fn allocate_early(
        &self,
        metadata: &Metadata,
    ) -> impl Future<Output = Result<Option<(Self::Lent, Destination)>, Status>> + Send {
        async {
            let allocation = pin!(self.allocate(metadata));
            match poll!(allocation) {
                Poll::Ready(allocated) => allocated.map(Some),
                Poll::Pending => Ok(None),
            }
        }
    }
}

/// A value to be sent.
#[derive(Debug)]
pub struct Value<B> {
    /// What it is.
    pub metadata: Metadata,
    /// Its content; `None` when there are no bytes to send.
    pub bytes: Option<B>,
}

/// Gives values to answer requests with.
pub trait Source: Send + Sync {
    /// The bytes it gives.
    type Bytes: Send + 'static;
    /// A value that was taken out for one answer; can be put back as long as it was not written.
    type Taken: Send + 'static;

    /// Registers interest *before this returns*, so that requests are served in the order of these calls, and
    /// gives the value when there is one.
    ///
    /// # Errors
    /// The status that the requester gets: NOT_FOUND, ABORTED, CANCELLED, …
    ///
    /// # Cancel safety
    /// Dropping the future ends interest; a value it was about to give goes to the next in line.
    fn take(
        &self,
        scope: Scope,
        key: &str,
    ) -> impl Future<Output = Result<Self::Taken, Status>> + Send + 'static;

    /// What to send for `taken`.
    fn value(taken: &Self::Taken) -> Value<Self::Bytes>;

    /// Where the checksums of `taken` are remembered, if anywhere: shared by all who give the same value.
    fn checksums(taken: &Self::Taken) -> Option<Arc<Checksums>> {
        let _ = taken;
        None
    }

    /// The version of `taken`, for VERSION; only of what is published. As it stands: 0, which is none.
    fn version(taken: &Self::Taken) -> u64 {
        let _ = taken;
        0
    }

    /// Puts back a value that was taken but not written, to where it was.
    fn put_back(&self, taken: Self::Taken);
}
