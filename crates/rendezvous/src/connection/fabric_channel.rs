//! The protocol's channel on a queue pair.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_fabric::{
    FabricError, Immediate, Operation, QueuePair, RegionGeneration, RegionId, RemoteRange, Segment,
    WorkRequest,
};
use tensorwire_memory::{
    Block, Buf, GrantEnd, Pool,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::{
    Channel, ChannelError, Code, Destination, LentEnd, Mailbox as _, RecordSlot, ResultSlot, RingSpan,
    Status, limits::RESULT_BYTES,
};

use crate::{
    connection::{mailbox::Mailbox, pieces::Pieces},
    peer_memory::{
        import::Import,
        lent::{Lent, RESULT_SLOT, ended, evidence},
        ring::RingMaker,
    },
};

/// "A message is in your ring."
const MESSAGE: Immediate = Immediate(0xFFFF_FFFF);
/// "I have taken your message", or "an ASK or ANSWER is in its slot".
const ACKNOWLEDGEMENT: Immediate = Immediate(0xFFFF_FFFE);

/// A queue pair, and the memory that messages and contents are posted from.
#[derive(Debug)]
pub(crate) struct FabricChannel {
    pub(crate) queue_pair: QueuePair,
    pub(crate) message_pool: Pool,
    pub(crate) ring_maker: RingMaker,
    pub(crate) peer_slots: Destination,
    pub(crate) import: Import,
    /// If the fabric has boards.
    pub(crate) mailbox: Option<Mailbox>,
    pub(crate) pieces: Pieces,
}

impl FabricChannel {
    fn post(
        &self,
        local: Buf,
        remote: Option<RemoteRange>,
        immediate: Option<Immediate>,
    ) -> Result<(), ChannelError> {
        // The operation is not awaited: its slot owns the bytes, and its failure fails the connection.
        let posted = self.queue_pair.post(&WorkRequest::Write { local, remote, immediate });
        posted.map(drop).map_err(|error| lost(&error))
    }

    /// As [`post`](Self::post), for a request whose completion is awaited.
    fn post_awaited(&self, request: &WorkRequest) -> ContentWrite {
        let posted = self.queue_pair.post(request);
        posted.map_or_else(|error| ContentWrite::Refused(lost(&error)), ContentWrite::Posted)
    }

    /// As [`post`](Self::post), for bytes that may be reused when this returns.
    fn post_bytes(
        &self,
        bytes: &[u8],
        remote: RemoteRange,
        immediate: Option<Immediate>,
    ) -> Result<(), ChannelError> {
        if let Some(posted) = self.queue_pair.post_inline(bytes, Some(&remote), immediate) {
            return posted.map_err(|error| lost(&error));
        }
        let buffer = self.message_pool.try_alloc(bytes.len());
        let mut buffer = buffer.map_err(|error| ChannelError(error.to_string()))?;
        buffer.copy_from_slice(bytes);
        self.post(buffer.freeze(), Some(remote), immediate)
    }

    /// Posts a content. If it has no bytes, posts its notification only.
    fn post_content(
        &self,
        local: Buf,
        remote: Option<RemoteRange>,
        immediate: Option<Immediate>,
    ) -> ContentWrite {
        match self.queue_pair.post_inline(&local, remote.as_ref(), immediate) {
            Some(Ok(())) => ContentWrite::Done,
            Some(Err(error)) => ContentWrite::Refused(lost(&error)),
            None => self.post_awaited(&WorkRequest::Write { local, remote, immediate }),
        }
    }

    /// Checks that the send queue has room for all pieces of a content and a result. A content that does not fit is
    /// refused before any of it is posted, so that the connection and its other transfers are not affected.
    fn check_pieces(&self, bytes: u64) -> Result<(), Status> {
        let (piece, depth) =
            (self.queue_pair.capabilities().piece_bytes_max.max(1), self.queue_pair.config().send_depth);
        let most = piece.saturating_mul(depth.saturating_sub(1).into());
        if bytes <= most {
            return Ok(());
        }
        let message = format!(
            "a value of {bytes} bytes takes {} work requests of {piece} bytes over {} and may need one more, and the \
             send queue is {depth} deep: send at most {most} bytes at once, or allow more with the setting `depth`",
            bytes.div_ceil(piece),
            self.queue_pair.kind()
        );
        Err(Status::new(Code::ResourceExhausted, message))
    }

    /// Writes content and result by one vectored write if the fabric supports it, otherwise the result first.
    fn write_with_result(
        &self,
        content: Segment,
        slot: ResultSlot,
        result: &[u8; RESULT_BYTES],
        immediate: Option<Immediate>,
    ) -> ContentWrite {
        let mut record = match self.message_pool.try_alloc(RESULT_BYTES) {
            Ok(record) => record,
            Err(error) => return ContentWrite::Refused(ChannelError(error.to_string())),
        };
        record.copy_from_slice(result);
        let remote = RemoteRange {
            region: RegionId(slot.region),
            generation: RegionGeneration(slot.generation),
            offset: slot.offset,
            length: RESULT_BYTES as u64,
        };
        let record = Segment { local: record.freeze(), remote };
        if self.queue_pair.capabilities().vectored {
            let segments = Arc::from([record, content]);
            return self.post_awaited(&WorkRequest::WriteVectored { segments, immediate });
        }
        if let Err(error) = self.post(record.local, Some(record.remote), None) {
            return ContentWrite::Refused(error);
        }
        let Segment { local, remote } = content;
        self.post_awaited(&WorkRequest::Write { local, remote: Some(remote), immediate })
    }
}

fn range_of(at: Destination, offset: u64, length: u64) -> RemoteRange {
    RemoteRange {
        region: RegionId(at.region),
        generation: RegionGeneration(at.generation),
        offset: at.offset + offset,
        length,
    }
}

pub(crate) fn lost(error: &FabricError) -> ChannelError {
    ChannelError(error.to_string())
}

/// In the simulator a poll of a waiting task may find nothing.
fn help_declines() -> bool {
    tensorwire_testpoints::chance!("help declines")
}

impl Channel for FabricChannel {
    type Bytes = Buf;
    type Lent = Lent;
    type Write = ContentWrite;

    fn post_message(
        &self,
        ring: Destination,
        first: RingSpan,
        second: RingSpan,
        bytes: &[u8],
    ) -> Result<(), ChannelError> {
        let range = |span: RingSpan| range_of(ring, span.offset.into(), span.length.into());
        let Some((head, tail)) = bytes.split_at_checked(first.length as usize) else {
            return Err(ChannelError("a message is shorter than its span in the ring".to_owned()));
        };
        if tail.is_empty() {
            return self.post_bytes(head, range(first), Some(MESSAGE));
        }
        self.post_bytes(head, range(first), None)?;
        self.post_bytes(tail, range(second), Some(MESSAGE))
    }

    fn post_acknowledgement(&self) -> Result<(), ChannelError> {
        self.post(Buf::empty(), None, Some(ACKNOWLEDGEMENT))
    }

    fn post_record(&self, slot: RecordSlot, bytes: &[u8]) -> Result<(), ChannelError> {
        let remote = range_of(self.peer_slots, slot.offset(), bytes.len() as u64);
        self.post_bytes(bytes, remote, Some(ACKNOWLEDGEMENT))
    }

    async fn stage(&self, bytes: Buf) -> Result<Buf, Status> {
        self.check_pieces(bytes.len() as u64)?;
        if self.import.needs(self.queue_pair.kind(), &bytes) {
            self.import.copy_of(&bytes).await
        } else {
            Ok(bytes)
        }
    }

    async fn write_ahead(
        &self,
        bytes: &Buf,
        destination: Destination,
        piece_bytes: u32,
    ) -> Result<u64, ChannelError> {
        // Over shared memory the peer copies contents, in turns of its own and with its second core.
        if self.queue_pair.shared_memory().is_some() {
            return Ok(0);
        }
        let remote = range_of(destination, 0, bytes.len() as u64);
        let written = self.pieces.write_ahead(&self.queue_pair, bytes, remote, piece_bytes as usize);
        written.await.map_err(|error| lost(&error))
    }

    async fn write_pieces_ahead(
        &self,
        pieces: &mut Vec<(Buf, u64)>,
        destination: Destination,
        piece_bytes: u32,
    ) -> Result<(), ChannelError> {
        if self.queue_pair.shared_memory().is_some() {
            return Ok(());
        }
        let remote = |place: u64, length: u64| range_of(destination, place, length);
        let written = self.pieces.write_list_ahead(&self.queue_pair, pieces, remote, piece_bytes as usize);
        written.await.map_err(|error| lost(&error))
    }

    fn write_content(
        &self,
        bytes: Option<Buf>,
        destination: Option<(Destination, u64)>,
        immediate: Option<u32>,
        result: Option<[u8; RESULT_BYTES]>,
    ) -> ContentWrite {
        let immediate = immediate.map(Immediate);
        let (Some(whole), Some((destination, ahead))) = (bytes, destination) else {
            return self.post_content(Buf::empty(), None, immediate);
        };
        let local = whole.slice(ahead as usize..whole.len()).unwrap_or_else(Buf::empty);
        let remote = range_of(destination, ahead, local.len() as u64);
        let (Some(result), Some(slot)) = (result, destination.result) else {
            return self.post_content(local, Some(remote), immediate);
        };
        self.write_with_result(Segment { local, remote }, slot, &result, immediate)
    }

    fn check_pages(&self, pages: &[(Buf, u64)]) -> Result<(), Status> {
        let refused = |message: String| Err(Status::new(Code::FailedPrecondition, message));
        let (kind, capabilities) = (self.queue_pair.kind(), self.queue_pair.capabilities());
        if pages.len() > 1 && !capabilities.vectored {
            return refused(format!("{kind} cannot write many pages at once: request one"));
        }
        let depth = self.queue_pair.config().send_depth;
        let piece = capabilities.piece_bytes_max.max(1);
        let writes: u64 = pages.iter().map(|(page, _)| (page.len() as u64).div_ceil(piece)).sum();
        if writes > depth.into() {
            return refused(format!(
                "{} pages take {writes} work requests, and the send queue is {depth} deep",
                pages.len()
            ));
        }
        Ok(())
    }

    fn write_pages(&self, pages: Vec<(Buf, u64)>, destination: Destination, immediate: u32) -> ContentWrite {
        let segment = |(local, place): (Buf, u64)| {
            let remote = range_of(destination, place, local.len() as u64);
            Segment { local, remote }
        };
        let immediate = Some(Immediate(immediate));
        let mut segments: Vec<_> = pages.into_iter().map(segment).collect();
        let request = match segments.pop() {
            Some(Segment { local, remote }) if segments.is_empty() => {
                WorkRequest::Write { local, remote: Some(remote), immediate }
            }
            last => {
                segments.extend(last);
                WorkRequest::WriteVectored { segments: segments.into(), immediate }
            }
        };
        self.post_awaited(&request)
    }

    fn is_written(write: &ContentWrite) -> bool {
        matches!(write, ContentWrite::Done)
    }

    fn is_exposed(lent: &Lent) -> bool {
        matches!(lent, Lent::Bouncing { .. })
    }

    async fn set_apart(lent: &mut Lent, bytes: u64) -> Result<(), Status> {
        let error = |error| Status::new(Code::Internal, format!("the granted memory: {error}"));
        lent.copy_apart(bytes).await.map_err(error)?;
        lent.leave_exposed();
        Ok(())
    }

    fn settle(lent: Lent) -> Result<Lent, Status> {
        let Lent::Granted { granted, has_slot } = lent else { return Ok(lent) };
        let error = |error| Status::new(Code::Internal, format!("the granted memory: {error}"));
        let buffer = granted.end(GrantEnd::Content).map_err(error)?;
        let slot = buffer.len().checked_sub(RESULT_SLOT).filter(|_| has_slot);
        let result = slot.and_then(|at| buffer.get(at..)?.first_chunk().copied());
        Ok(Lent::Here { bytes: buffer.freeze(), result })
    }

    fn content(lent: &Lent) -> &[u8] {
        match lent {
            // Not readable: the peer may still write it.
            Lent::Granted { .. } | Lent::Bouncing { .. } | Lent::Pages(_) => &[],
            Lent::Here { bytes, .. } => bytes,
        }
    }

    fn result(lent: &Lent) -> Option<[u8; RESULT_BYTES]> {
        match lent {
            Lent::Granted { .. } | Lent::Bouncing { .. } | Lent::Pages(_) => None,
            Lent::Here { result, .. } => *result,
        }
    }

    fn can_lend(&self, bytes: &Buf) -> bool {
        // With separate domains no memory is shared with the peer: a peer that maps a block can read all of it, also
        // after the loan has ended.
        !bytes.is_empty()
            && !self.import.enclosure.is_bouncing()
            && self.queue_pair.capabilities().lend
            && bytes.block().is_some_and(Block::shareable)
    }

    fn lend_content(&self, bytes: &Buf, immediate: u32) -> Option<ContentWrite> {
        let lent = self.queue_pair.lend_now(bytes.clone(), Immediate(immediate));
        let lent = lent.inspect_err(
            |error| log!(DEBUG, %error, "copying a value, because the peer cannot get a view of it"),
        );
        lent.ok().map(ContentWrite::Posted)
    }

    fn read(&self, ring: &Lent, offset: u64, into: &mut [u8]) -> Result<(), ChannelError> {
        let Lent::Granted { granted, .. } = ring else {
            return Err(ChannelError("the own ring is not granted memory".to_owned()));
        };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        granted.read_at(offset, into, CopyReason::Message).map_err(|error| ChannelError(error.to_string()))
    }

    async fn make_ring(&self, ring_bytes: u32) -> Option<(Lent, Destination)> {
        let (granted, destination) = self.ring_maker.make(ring_bytes).await?;
        Some((Lent::ring(granted), destination))
    }

    fn may_help(&self) -> bool {
        // The simulator drives its fabric itself, so there chance decides whether a task polls.
        self.queue_pair.may_help()
            || tensorwire_testpoints::chance!("a waiting task polls for arrivals itself")
    }

    fn help(&self) -> bool {
        !help_declines() && self.queue_pair.help()
    }

    fn mailbox(&self) -> Option<&dyn tensorwire_protocol::Mailbox> {
        self.mailbox.as_ref().map(|mailbox| mailbox as _)
    }

    fn help_beside_mailbox(&self, messages: u64) -> bool {
        let Some(mailbox) = &self.mailbox else { return self.help() };
        !help_declines() && self.queue_pair.look_for_both(|| mailbox.has_next(messages))
    }

    fn found_note(&self) {
        self.queue_pair.found_on_board();
    }

    fn copy_out(&self, bytes: &Buf, into: &mut Vec<u8>) {
        let start = into.len();
        into.resize(start + bytes.len(), 0);
        if let Some(content) = into.get_mut(start..) {
            copy_bytes(content, bytes, CopyReason::Eager);
        }
    }

    fn take_back(&self, lent: Lent, end: LentEnd) {
        match lent {
            Lent::Granted { granted, .. } | Lent::Bouncing { exposed: granted, .. } => {
                drop(ended(*granted, end));
            }
            Lent::Pages(granted) => drop(evidence(end).map(|why| granted.end(why))),
            // Memory that is not granted is released by its drop.
            Lent::Here { .. } => {}
        }
    }
}

/// A pending content write.
#[pin_project::pin_project(project = ContentWriteProjection)]
pub(crate) enum ContentWrite {
    /// In a slot of the queue pair.
    Posted(#[pin] Operation),
    /// The bytes were copied. Nothing is pending.
    Done,
    /// The queue pair had failed.
    Refused(ChannelError),
}

impl Future for ContentWrite {
    type Output = Result<(), ChannelError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            ContentWriteProjection::Posted(operation) => {
                operation.poll(context).map_err(|error| lost(&error))
            }
            ContentWriteProjection::Done => Poll::Ready(Ok(())),
            ContentWriteProjection::Refused(error) => Poll::Ready(Err(error.clone())),
        }
    }
}
