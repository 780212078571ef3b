//! The requester's half of a connection: it posts descriptors and reaps completions.

use std::{
    collections::{HashMap, VecDeque},
    io, mem,
    os::fd::{AsFd, BorrowedFd},
};

use tensorwire_fabric::{
    FabricError, FabricKind, Immediate, PeerViolation, ReadPart, RemoteRange, RemoteRegions, SlotKey,
    WorkRequest,
};
use tensorwire_memory::{
    Block, BlockId, Buf,
    copy::{CopyReason, copy_raw},
};

use crate::{
    connection::Connection,
    frame::Frame,
    lease::Leases,
    limits::{BLOCKS_MAX, INLINE_BYTES, READS_MAX},
    reads::{Answer, Answers, Posted, Read, Reads},
    ring::{Descriptor, Source},
    sys,
};

const KIND: FabricKind = FabricKind::SHM;

/// A descriptor in the ring that is not quiet. Quiet ones have no entry.
#[derive(Debug)]
struct Entry {
    position: u64,
    purpose: Purpose,
    /// Bytes that the peer copies to execute it.
    copied: u64,
}

/// What a descriptor in the ring is for.
#[derive(Debug)]
enum Purpose {
    /// A part of an operation before its last one, or a read, which its answer completes.
    Part,
    /// It completes the operation.
    Last(Posted),
    /// It answers a read of the peer. The bytes are held until the peer has executed it.
    Answer(Buf),
}

/// What an executed descriptor returns.
#[derive(Debug)]
pub(super) enum Returned {
    /// A completion to be passed on.
    Operation(Posted),
    /// Bytes that the peer has read. The caller drops them without a lock.
    Bytes(Buf),
}

/// A descriptor that is not in the ring yet, and its bytes.
#[derive(Debug)]
struct Prepared {
    descriptor: Descriptor,
    local: Buf,
}

/// The result of an attempt to post.
#[derive(Debug)]
pub(super) enum Post {
    /// The descriptor is in the ring.
    Published,
    /// The operation waits in line, because the ring is full, or the socket that must first carry the memfd of a block.
    Waiting,
    /// This operation cannot be posted.
    Failed(FabricError),
}

/// The state of the requester's half. The peer cannot write any of it.
#[derive(Debug, Default)]
pub(super) struct Producer {
    /// Descriptors whose completion was reaped.
    completed: u64,
    /// Bytes that the peer copies to execute the descriptors in the ring.
    copied_by_peer: u64,
    /// Position after the latest descriptor that is not quiet.
    awaited: u64,
    /// End of the positions that quiet descriptors have been allowed to take.
    quiet_until: u64,
    /// Descriptors in the ring that are not quiet, oldest first.
    posted: VecDeque<Entry>,
    /// Operations that wait for the socket or the ring; at most as many as the send queue is deep.
    waiting: VecDeque<(SlotKey, WorkRequest)>,
    /// Numbers of the blocks whose memfd the peer was sent.
    blocks: HashMap<BlockId, u32>,
    leases: Leases,
    reads: Reads,
    answers: Answers,
    /// Empty between calls; reused for the descriptors of one operation.
    prepared: Vec<Prepared>,
    /// Set once. Then nothing is posted any more.
    over: Option<FabricError>,
}

impl Producer {
    /// Posts one operation, or appends it to the line.
    pub(super) fn submit(&mut self, connection: &Connection, key: SlotKey, request: &WorkRequest) -> Post {
        if let Some(error) = &self.over {
            return Post::Failed(error.clone());
        }
        let post = if self.waiting.is_empty() { self.post(connection, key, request) } else { Post::Waiting };
        if matches!(post, Post::Waiting) {
            // Later posts follow it.
            self.allow_quiet(connection, 0);
            self.waiting.push_back((key, request.clone()));
        }
        post
    }

    /// Tries to post the oldest operation in line, and returns it with the result.
    pub(super) fn retry(&mut self, connection: &Connection) -> Option<(Posted, Post)> {
        let (key, request) = self.waiting.pop_front()?;
        let post = self.post(connection, key, &request);
        let posted = Posted { key, length: request.length() };
        if matches!(post, Post::Waiting) {
            self.waiting.push_front((key, request));
        }
        Some((posted, post))
    }

    /// Removes an operation from the line, and returns whether it was there.
    pub(super) fn withdraw(&mut self, key: SlotKey) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|(waiting, _)| *waiting != key);
        self.waiting.len() < before
    }

    /// Checks that the counts are zero while no operation or answer is in the ring.
    pub(super) fn check_counts(&self) {
        let is_idle = self.posted.is_empty() && self.over.is_none();
        debug_assert!(!is_idle || self.copied_by_peer == 0 && self.answers.are_executed(), "{self:?}");
    }

    /// Descriptors whose completion was reaped.
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    /// Bytes that the peer must copy before everything in the ring is executed.
    pub(super) fn copied_by_peer(&self) -> u64 {
        self.copied_by_peer
    }

    /// Position after the latest descriptor that is not quiet. Later ones have no completions to reap.
    pub(super) fn awaited(&self) -> u64 {
        self.awaited
    }

    /// Whether operations or answers wait for the socket or for room in the ring.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.answers.waiting.is_empty()
    }

    /// Whether reads or answers wait for room in the ring or in the socket.
    pub(super) fn has_reads_waiting(&self) -> bool {
        self.reads.may_ask() || !self.answers.waiting.is_empty()
    }

    /// How many descriptors the peer has executed.
    ///
    /// # Errors
    /// [`PeerViolation::Malformed`] if the peer's count is impossible.
    pub(super) fn consumed(&self, connection: &Connection) -> Result<u64, PeerViolation> {
        let consumed = connection.peer.consumed();
        let possible = (self.completed..=connection.own.tail.next()).contains(&consumed);
        possible.then_some(consumed).ok_or(PeerViolation::Malformed)
    }

    /// Takes the next completion that ends an operation or frees bytes.
    ///
    /// # Errors
    /// [`PeerViolation::Malformed`] if the peer's count is impossible.
    pub(super) fn reap(&mut self, connection: &Connection) -> Result<Option<Returned>, PeerViolation> {
        let consumed = self.consumed(connection)?;
        while self.posted.front().is_some_and(|oldest| oldest.position < consumed) {
            let Some(Entry { position, purpose, copied }) = self.posted.pop_front() else { break };
            self.completed = position + 1;
            self.copied_by_peer -= copied;
            match purpose {
                Purpose::Last(posted) => return Ok(Some(Returned::Operation(posted))),
                Purpose::Answer(bytes) => {
                    self.answers.reaped();
                    return Ok(Some(Returned::Bytes(bytes)));
                }
                Purpose::Part => {}
            }
        }
        self.completed = consumed;
        Ok(None)
    }

    /// Allows further quiet descriptors, as far as the ring has room for them beside the room reserved for operations
    /// and answers, and takes a position for one. `None` if there is no room, or if operations that were posted earlier
    /// wait.
    pub(super) fn take_quiet(&mut self, connection: &Connection) -> Option<u64> {
        if self.over.is_some() || !self.waiting.is_empty() {
            return None;
        }
        self.forget_quiet(connection);
        let promised = u64::from(connection.core.config().send_depth + READS_MAX);
        let slots = u64::from(connection.own.slots());
        let room = slots.saturating_sub(promised);
        // The others in the ring are not quiet.
        let first = self.completed + self.posted.len() as u64;
        let tail = &connection.own.tail;
        // Reading the peer's count costs a cache line, so only some positions are allowed at a time; when there is
        // hardly any room left, the count is read for each.
        let until = (first + room.min(slots / 4)).max(tail.next() + 1).min(first + room);
        self.allow_quiet(connection, until.min(self.completed + slots));
        tail.take_quiet()
    }

    fn allow_quiet(&mut self, connection: &Connection, until: u64) {
        connection.own.tail.allow_quiet(until);
        self.quiet_until = self.quiet_until.max(until);
    }

    /// Removes the oldest descriptors, as far as they are quiet and the peer has executed them.
    fn forget_quiet(&mut self, connection: &Connection) {
        let consumed = connection.peer.consumed();
        let first_awaited =
            self.posted.front().map_or_else(|| connection.own.tail.next(), |oldest| oldest.position);
        self.completed = self.completed.max(consumed.min(first_awaited));
    }

    /// Refuses everything from now on. Operations in line end when the caller fails their slots. Returns the bytes that
    /// the peer may be reading: the caller drops them, without a lock, after it has closed the connection.
    pub(super) fn end(&mut self, connection: &Connection, error: &FabricError) -> Vec<Buf> {
        self.over = Some(error.clone());
        self.allow_quiet(connection, 0);
        mem::take(&mut self.waiting);
        mem::take(&mut self.reads);
        let posted = mem::take(&mut self.posted).into_iter().filter_map(|entry| match entry.purpose {
            Purpose::Answer(bytes) => Some(bytes),
            Purpose::Part | Purpose::Last(_) => None,
        });
        let waiting = mem::take(&mut self.answers).waiting.into_iter().map(|answer| answer.bytes);
        posted.chain(waiting).collect()
    }

    /// Checks that the peer has fewer unanswered reads than it may have.
    pub(super) fn may_answer(&self, connection: &Connection) -> Result<(), PeerViolation> {
        let room = self.answers.have_room(connection.peer.consumed());
        room.then_some(()).ok_or(PeerViolation::TooManyReads)
    }

    /// Queues the answer to a read of the peer. [`may_answer`](Self::may_answer) must have allowed it.
    pub(super) fn answer(&mut self, answer: Answer) {
        self.answers.waiting.push_back(answer);
    }

    /// This side's reads in progress.
    pub(super) fn reads(&mut self) -> &mut Reads {
        &mut self.reads
    }

    /// Posts answers and reads, as far as there is room. Returns whether anything was posted, and whether more can be
    /// posted as soon as completions are reaped.
    ///
    /// # Errors
    /// An answer cannot be posted, which ends the connection.
    pub(super) fn serve_reads(&mut self, connection: &Connection) -> Result<(bool, bool), FabricError> {
        let mut any = false;
        while self.has_room(connection, 1)
            && let Some(descriptor) = self.next_answer(connection)?
        {
            let Some(answer) = self.answers.waiting.pop_front() else { break };
            let position = connection.own.tail.take(1);
            self.answers.published(position);
            self.put_awaited(connection, position, &descriptor, Purpose::Answer(answer.bytes));
            any = true;
        }
        any |= self.ask_reads(connection);
        let returned = connection.peer.consumed() > self.completed;
        Ok((any, self.has_reads_waiting() && returned))
    }

    fn ask_reads(&mut self, connection: &Connection) -> bool {
        let mut any = false;
        while self.has_room(connection, 1)
            && let Some(descriptor) = self.reads.ask()
        {
            self.put_awaited(connection, connection.own.tail.take(1), &descriptor, Purpose::Part);
            any = true;
        }
        any
    }

    /// The descriptor of the first waiting answer; `None` while the socket has no room for its block's memfd.
    fn next_answer(&mut self, connection: &Connection) -> Result<Option<Descriptor>, FabricError> {
        let Some(Answer { tag, bytes }) = self.answers.waiting.front() else { return Ok(None) };
        let (tag, bytes) = (*tag, bytes.clone());
        let (mut index, offset, length) = (0, bytes.offset() as u64, bytes.len() as u64);
        if length > 0 {
            let (block, fd) = reachable(connection, &bytes)?;
            let Some(known) = self.share(connection, block, fd)? else { return Ok(None) };
            index = known;
        }
        let source = Source::Answer { tag, index, offset, length };
        Ok(Some(Descriptor { immediate: None, continues: false, is_quiet: false, remote: None, source }))
    }

    /// Whether `weight` more descriptors fit the ring, beside the quiet ones that other threads may post meanwhile.
    /// Operations have reserved their slots, and answers are bounded, so there is room unless completions are not
    /// reaped yet. A descriptor is overwritten only after its completion was reaped.
    fn has_room(&self, connection: &Connection, weight: u64) -> bool {
        let taken = connection.own.tail.next().max(self.quiet_until);
        taken - self.completed + weight <= u64::from(connection.own.slots())
    }

    /// Publishes a descriptor that is not quiet.
    fn put_awaited(
        &mut self,
        connection: &Connection,
        position: u64,
        descriptor: &Descriptor,
        purpose: Purpose,
    ) {
        put(connection, position, descriptor);
        let copied = descriptor.copied();
        self.awaited = position + 1;
        self.copied_by_peer += copied;
        self.posted.push_back(Entry { position, purpose, copied });
    }

    fn post(&mut self, connection: &Connection, key: SlotKey, request: &WorkRequest) -> Post {
        let posted = Posted { key, length: request.length() };
        if let Some(read) = resolve_reads(connection, posted, request).transpose() {
            return read.map_or_else(Post::Failed, |(first, rest)| {
                [first].into_iter().chain(rest).for_each(|read| self.reads.post(read));
                self.ask_reads(connection);
                Post::Published
            });
        }
        // Reused, so that most operations allocate nothing.
        let mut prepared = mem::take(&mut self.prepared);
        let result = self.prepare(connection, request, &mut prepared);
        let post = match result {
            Ok(true) => {
                self.publish(connection, posted, &prepared);
                Post::Published
            }
            Ok(false) => Post::Waiting,
            Err(error) => Post::Failed(error),
        };
        prepared.clear();
        self.prepared = prepared;
        post
    }

    /// Makes the descriptors of `request`. False if they cannot be posted yet, because the ring or the socket is full.
    fn prepare(
        &mut self,
        connection: &Connection,
        request: &WorkRequest,
        prepared: &mut Vec<Prepared>,
    ) -> Result<bool, FabricError> {
        aim(connection, request)?;
        let limit = connection.core.capabilities().piece_bytes_max;
        if !self.has_room(connection, request.weight(limit)) {
            return Ok(false);
        }
        if let WorkRequest::Lend { local, immediate } = request {
            let Some(source) = self.lent(connection, local)? else { return Ok(false) };
            let immediate = Some(immediate.0);
            let descriptor =
                Descriptor { immediate, continues: false, is_quiet: false, remote: None, source };
            prepared.push(Prepared { descriptor, local: Buf::empty() });
            return Ok(true);
        }
        for piece in request.pieces(limit) {
            let Some(source) = self.source(connection, &piece.local)? else { return Ok(false) };
            let regions = connection.core.remote_regions();
            let region = regions.aim(piece.local.len() as u64, piece.remote.as_ref())?;
            let remote = piece.remote.zip(region).map(|(range, region)| (range, region.key));
            let immediate = piece.immediate.map(|immediate| immediate.0);
            let continues = !piece.is_last;
            let descriptor = Descriptor { immediate, continues, is_quiet: false, remote, source };
            prepared.push(Prepared { descriptor, local: piece.local });
        }
        Ok(true)
    }

    /// Puts descriptors into the ring; the last one completes the operation.
    fn publish(&mut self, connection: &Connection, posted: Posted, prepared: &[Prepared]) {
        // All at once, so that nothing is posted between the pieces of a write.
        let first = connection.own.tail.take(prepared.len() as u64);
        for (position, Prepared { descriptor, local }) in (first..).zip(prepared) {
            stage(connection, position, descriptor.source, local);
            let purpose = if descriptor.continues { Purpose::Part } else { Purpose::Last(posted) };
            self.put_awaited(connection, position, descriptor, purpose);
        }
    }

    /// The source of the bytes, which must be in memory that the peer can map; `None` while the socket has no room for
    /// the block's memfd.
    fn source(&mut self, connection: &Connection, local: &Buf) -> Result<Option<Source>, FabricError> {
        if local.is_empty() {
            return Ok(Some(Source::Nothing));
        }
        let (block, fd) = reachable(connection, local)?;
        if local.len() <= INLINE_BYTES {
            return Ok(Some(Source::in_ring(local)));
        }
        let offset = local.offset() as u64;
        Ok(self.share(connection, block, fd)?.map(|index| Source::Block { index, offset }))
    }

    /// A lease of `local` and what is attached to it; `None` while the socket has no room for the block's memfd.
    fn lent(&mut self, connection: &Connection, local: &Buf) -> Result<Option<Source>, FabricError> {
        if local.is_empty() {
            return Err(FabricError::Unsupported { kind: KIND, what: "lend an empty buffer" });
        }
        let (block, fd) = reachable(connection, local)?;
        let Some(index) = self.share(connection, block, fd)? else { return Ok(None) };
        for attached in local.attached() {
            let (block, fd) = reachable(connection, &attached)?;
            if self.share(connection, block, fd)?.is_none() {
                return Ok(None);
            }
        }
        let process = connection.process.as_ref();
        let process = process.map(|process| (process, connection.catalogue.claimed_by(process)));
        let (slot, generation) = self.leases.lend(process, local.clone())?;
        let (offset, length) = (local.offset() as u64, local.len() as u64);
        Ok(Some(Source::Lent { index, offset, length, slot, generation }))
    }

    /// Leases of the memory that the peer views.
    pub(super) fn leases(&mut self) -> &mut Leases {
        &mut self.leases
    }

    /// Sends the peer the memfd of the block of `bytes`, unless it has it already.
    ///
    /// # Errors
    /// The bytes are in no block that the peer can map, or a limit is reached.
    pub(super) fn share_block_of(&mut self, connection: &Connection, bytes: &Buf) -> Result<(), FabricError> {
        if self.over.is_some() {
            return Ok(());
        }
        let (block, fd) = reachable(connection, bytes)?;
        self.share(connection, block, fd).map(drop)
    }

    /// The number under which the peer knows `block`. Sends the peer the block's memfd if this is the block's first
    /// use; `None` while the socket has no room for it.
    fn share(
        &mut self,
        connection: &Connection,
        block: &Block,
        fd: BorrowedFd<'_>,
    ) -> Result<Option<u32>, FabricError> {
        if let Some(&index) = self.blocks.get(&block.id()) {
            return Ok(Some(index));
        }
        if self.blocks.len() >= BLOCKS_MAX {
            let what = "send from more than 4096 blocks on one connection: give the pool larger blocks";
            return Err(FabricError::Unsupported { kind: KIND, what });
        }
        let index = self.blocks.len() as u32;
        let frame = Frame::Block { index, number: block.id().get(), length: block.length() as u64 };
        match sys::send(connection.socket.get_ref().as_fd(), &frame.encode(), &[fd]) {
            Ok(()) => {
                self.blocks.insert(block.id(), index);
                Ok(Some(index))
            }
            // If the peer is gone, the driver notices it at the socket and ends the operations that wait.
            Err(error) if will_be_told(&error) => Ok(None),
            Err(error) => Err(FabricError::device(KIND, "sending a block's memfd", error)),
        }
    }
}

/// Publishes a quiet write of at most [`INLINE_BYTES`], which travel in the descriptor, in a position that was taken for
/// it.
pub(super) fn put_quiet(
    connection: &Connection,
    position: u64,
    bytes: &[u8],
    remote: Option<(RemoteRange, u32)>,
    immediate: Option<Immediate>,
) {
    let source = Source::in_ring(bytes);
    stage(connection, position, source, bytes);
    let immediate = immediate.map(|immediate| immediate.0);
    put(connection, position, &Descriptor { immediate, continues: false, is_quiet: true, remote, source });
}

fn put(connection: &Connection, position: u64, descriptor: &Descriptor) {
    connection.own.set_cpu();
    connection.own.publish(position, &descriptor.encode());
}

/// Makes the checks that a NIC makes before a write leaves, for the whole operation before any piece is posted.
fn aim(connection: &Connection, request: &WorkRequest) -> Result<(), FabricError> {
    let regions = connection.core.remote_regions();
    match request {
        WorkRequest::Write { local, remote, .. } => {
            regions.aim(local.len() as u64, remote.as_ref()).map(drop)
        }
        WorkRequest::WriteVectored { segments, .. } => segments
            .iter()
            .try_for_each(|segment| regions.aim(segment.local.len() as u64, Some(&segment.remote)).map(drop)),
        _ => Ok(()),
    }
}

/// The parts of a read, each of them checked: the first, and the rest. `None` for other operations. A read of one part
/// allocates nothing here.
fn resolve_reads(
    connection: &Connection,
    posted: Posted,
    request: &WorkRequest,
) -> Result<Option<(Read, Vec<Read>)>, FabricError> {
    let mut parts = request.reads();
    let Some(first) = parts.next() else { return Ok(None) };
    let first = resolve(connection, posted, &first)?;
    let rest = parts.map(|part| resolve(connection, posted, &part)).collect::<Result<_, _>>()?;
    Ok(Some((first, rest)))
}

/// Makes the checks that a NIC makes before a read leaves.
fn resolve(connection: &Connection, posted: Posted, part: &ReadPart<'_>) -> Result<Read, FabricError> {
    let ReadPart { remote, into, is_last } = *part;
    let regions: &RemoteRegions = connection.core.remote_regions();
    let region = regions.aim(into.length(), Some(remote))?;
    let target = into.target()?;
    connection.regions.check_local(KIND, target.as_ref().map(|(block, _)| block.id()))?;
    let (posted, key) = (is_last.then_some(posted), region.map_or(0, |region| region.key));
    Ok(Read { posted, range: *remote, key, destination: target.map(|(_, target)| target) })
}

/// The block of `local` and its memfd, if the peer can map it and it is registered.
fn reachable<'buffer>(
    connection: &Connection,
    local: &'buffer Buf,
) -> Result<(&'buffer Block, BorrowedFd<'buffer>), FabricError> {
    let Some((block, fd)) = local.block().and_then(|block| Some((block, block.fd()?))) else {
        let what = "send memory that is in no pool: copy it into one first";
        return Err(FabricError::Unsupported { kind: KIND, what });
    };
    connection.regions.check_local(KIND, Some(block.id()))?;
    Ok((block, fd))
}

/// Whether the socket will become writable, or will show that the peer is gone, after this error.
fn will_be_told(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, NotConnected, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | BrokenPipe | ConnectionReset | NotConnected)
}

/// Copies a payload into the slot of `position`, which the caller has taken, if its source is the slot. Then it has at
/// most [`INLINE_BYTES`].
fn stage(connection: &Connection, position: u64, source: Source, local: &[u8]) {
    if source != Source::Inline {
        return;
    }
    let length = local.len().min(INLINE_BYTES);
    // SAFETY: the slot has room for `INLINE_BYTES` and is not published, so the peer does not read it; no other thread
    // has taken `position`, or another of the same slot before the peer executed this one; `local` is readable for its
    // length and lies in another mapping.
    unsafe {
        copy_raw(connection.own.inline_pointer(position), local.as_ptr(), length, CopyReason::ShmInline);
    };
}
