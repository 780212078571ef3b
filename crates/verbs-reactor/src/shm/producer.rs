//! The requester's half: posts descriptors, reaps completions.

use std::{
    collections::{HashMap, VecDeque},
    io, mem,
    os::fd::{AsFd, BorrowedFd},
};

use memory::{
    Block, BlockId, Buf,
    copy::{CopyReason, copy_raw},
};

use crate::{FabricError, FabricKind, PeerViolation, SlotKey, WorkRequest};

use super::{
    connection::Connection,
    frame::Frame,
    lease::Leases,
    limits::{BATCH_COMPLETIONS, BLOCKS_MAX, INLINE_BYTES},
    ring::{Descriptor, Source},
    sys,
};

const KIND: FabricKind = FabricKind::Shm;

/// An operation that the peer has not executed yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    pub(super) key: SlotKey,
    pub(super) length: u64,
}

/// A descriptor that is not in the ring yet, and its bytes.
#[derive(Debug)]
struct Prepared {
    descriptor: Descriptor,
    local: Buf,
}

/// What became of an attempt to post.
#[derive(Debug)]
pub(super) enum Post {
    /// The descriptor is in the ring.
    Published,
    /// The socket that must carry a block's descriptor first is full for now: the operation waits in line.
    Waiting,
    /// This operation cannot be posted.
    Failed(FabricError),
}

/// Up to [`BATCH_COMPLETIONS`] completions.
pub(super) type Reaped = ([Option<Posted>; BATCH_COMPLETIONS], bool);

/// The state of the requester's half. All of it is this side's own.
#[derive(Debug, Default)]
pub(super) struct Producer {
    /// Position of the next descriptor.
    tail: u64,
    /// Descriptors whose completion was reaped.
    completed: u64,
    /// Descriptors in the ring, oldest first; the operation that each one completes, if any.
    posted: VecDeque<Option<Posted>>,
    /// Operations that wait for the socket, at most as many as the send queue is deep.
    waiting: VecDeque<(SlotKey, WorkRequest)>,
    /// Numbers of the blocks that the peer was sent.
    blocks: HashMap<BlockId, u32>,
    leases: Leases,
    /// Room for the descriptors of one operation, empty between calls.
    prepared: Vec<Prepared>,
    /// Set once: nothing is posted any more.
    over: Option<FabricError>,
}

impl Producer {
    /// Posts one operation, or puts it in line behind those that wait.
    pub(super) fn submit(&mut self, connection: &Connection, key: SlotKey, request: &WorkRequest) -> Post {
        if let Some(error) = &self.over {
            return Post::Failed(error.clone());
        }
        let post = if self.waiting.is_empty() { self.post(connection, key, request) } else { Post::Waiting };
        if matches!(post, Post::Waiting) {
            self.waiting.push_back((key, request.clone()));
        }
        post
    }

    /// Posts the oldest operation that waits for the socket, and gives it with the outcome.
    pub(super) fn retry(&mut self, connection: &Connection) -> Option<(Posted, Post)> {
        let (key, request) = self.waiting.pop_front()?;
        let post = self.post(connection, key, &request);
        let posted = Posted { key, length: request.length() };
        if matches!(post, Post::Waiting) {
            self.waiting.push_front((key, request));
        }
        Some((posted, post))
    }

    /// Takes an operation out of the line; whether it stood there.
    pub(super) fn withdraw(&mut self, key: SlotKey) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|(waiting, _)| *waiting != key);
        self.waiting.len() < before
    }

    /// Descriptors whose completion was reaped.
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    /// Whether operations wait for the socket.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes completions that the peer has returned; the flag says that there may be more.
    pub(super) fn reap(&mut self, connection: &Connection) -> Result<Reaped, PeerViolation> {
        let mut reaped = [None; BATCH_COMPLETIONS];
        let consumed = connection.peer.consumed();
        if consumed < self.completed || consumed > self.tail {
            return Err(PeerViolation::Malformed);
        }
        let ready = consumed - self.completed;
        for (entry, _) in reaped.iter_mut().zip(0..ready) {
            *entry = self.posted.pop_front().flatten();
            self.completed += 1;
        }
        Ok((reaped, consumed > self.completed))
    }

    /// Refuses everything from now on; what waits in line is ended by whoever fails the slots.
    pub(super) fn end(&mut self, error: &FabricError) {
        self.over = Some(error.clone());
        mem::take(&mut self.waiting);
    }

    fn post(&mut self, connection: &Connection, key: SlotKey, request: &WorkRequest) -> Post {
        // Kept between calls for its memory.
        let mut prepared = mem::take(&mut self.prepared);
        let result = self.prepare(connection, request, &mut prepared);
        let post = match result {
            Ok(true) => {
                self.publish(connection, Posted { key, length: request.length() }, &prepared);
                Post::Published
            }
            Ok(false) => Post::Waiting,
            Err(error) => Post::Failed(error),
        };
        prepared.clear();
        self.prepared = prepared;
        post
    }

    /// Makes the descriptors of `request`, all of them or none. False when they can't be posted yet.
    fn prepare(
        &mut self,
        connection: &Connection,
        request: &WorkRequest,
        prepared: &mut Vec<Prepared>,
    ) -> Result<bool, FabricError> {
        aim(connection, request)?;
        let limit = connection.core.capabilities().piece_bytes_max;
        // Can't be while slots are reserved first, but never overwrite a descriptor.
        if self.tail - self.completed + request.weight(limit) > u64::from(connection.own.slots()) {
            return Ok(false);
        }
        if let WorkRequest::Lend { local, immediate } = request {
            let Some(source) = self.lent(connection, local)? else { return Ok(false) };
            let immediate = Some(immediate.0);
            let descriptor = Descriptor { immediate, continues: false, remote: None, source };
            prepared.push(Prepared { descriptor, local: Buf::empty() });
            return Ok(true);
        }
        for piece in request.pieces(limit) {
            let Some(source) = self.source(connection, &piece.local)? else { return Ok(false) };
            let regions = connection.core.remote_regions();
            let region = regions.aim(piece.local.len() as u64, piece.remote.as_ref())?;
            let remote = piece.remote.zip(region).map(|(range, region)| (range, region.key));
            let immediate = piece.immediate.map(|immediate| immediate.0);
            let descriptor = Descriptor { immediate, continues: !piece.is_last, remote, source };
            prepared.push(Prepared { descriptor, local: piece.local });
        }
        Ok(true)
    }

    /// Puts descriptors into the ring; the last one completes the operation.
    fn publish(&mut self, connection: &Connection, posted: Posted, prepared: &[Prepared]) {
        connection.own.set_cpu();
        for Prepared { descriptor, local } in prepared {
            if descriptor.source == Source::Inline {
                stage(connection, self.tail, local);
            }
            connection.own.publish(self.tail, &descriptor.encode());
            self.tail += 1;
            self.posted.push_back((!descriptor.continues).then_some(posted));
        }
    }

    /// Where the peer finds the bytes, which must lie in memory that it can map; `None` while the socket has no room
    /// for the block's descriptor.
    fn source(&mut self, connection: &Connection, local: &Buf) -> Result<Option<Source>, FabricError> {
        if local.is_empty() {
            return Ok(Some(Source::Nothing));
        }
        let (block, fd) = reachable(connection, local)?;
        if local.len() <= INLINE_BYTES {
            return Ok(Some(Source::Inline));
        }
        let offset = local.offset() as u64;
        Ok(self.share(connection, block, fd)?.map(|index| Source::Block { index, offset }))
    }

    /// A lease of `local`; `None` while the socket has no room for the block's descriptor.
    fn lent(&mut self, connection: &Connection, local: &Buf) -> Result<Option<Source>, FabricError> {
        if local.is_empty() {
            return Err(FabricError::Unsupported { kind: KIND, what: "lend an empty buffer" });
        }
        let (block, fd) = reachable(connection, local)?;
        let Some(index) = self.share(connection, block, fd)? else { return Ok(None) };
        let (slot, generation) = self.leases.lend(connection.process.as_ref(), local.clone())?;
        let (offset, length) = (local.offset() as u64, local.len() as u64);
        Ok(Some(Source::Lent { index, offset, length, slot, generation }))
    }

    /// What the peer views.
    pub(super) fn leases(&mut self) -> &mut Leases {
        &mut self.leases
    }

    /// The number under which the peer knows `block`, which it is sent first if need be.
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
        let frame = Frame::Block { index, length: block.length() as u64 };
        match sys::send(connection.socket.get_ref().as_fd(), &frame.encode(), &[fd]) {
            Ok(()) => {
                self.blocks.insert(block.id(), index);
                Ok(Some(index))
            }
            // A peer that is gone is seen by the driver, which ends the operations that wait.
            Err(error) if will_be_told(&error) => Ok(None),
            Err(error) => Err(FabricError::device(KIND, "sending a block's descriptor", error)),
        }
    }
}

/// The checks that a NIC makes before a write leaves, of the whole operation before any of its pieces.
fn aim(connection: &Connection, request: &WorkRequest) -> Result<(), FabricError> {
    let regions = connection.core.remote_regions();
    match request {
        WorkRequest::Write { local, remote, .. } => {
            regions.aim(local.len() as u64, remote.as_ref()).map(drop)
        }
        WorkRequest::WriteVectored { segments, .. } => segments
            .iter()
            .try_for_each(|segment| regions.aim(segment.local.len() as u64, Some(&segment.remote)).map(drop)),
        WorkRequest::Lend { .. } => Ok(()),
        WorkRequest::Read { .. } => Err(request.unsupported(KIND)),
    }
}

/// The block of `local`, if the peer can map it and the domain knows it.
fn reachable<'buffer>(
    connection: &Connection,
    local: &'buffer Buf,
) -> Result<(&'buffer Block, BorrowedFd<'buffer>), FabricError> {
    let Some((block, fd)) = local.block().and_then(|block| Some((block, block.fd()?))) else {
        let what = "send memory that is in no pool: copy it into one first";
        return Err(FabricError::Unsupported { kind: KIND, what });
    };
    if !connection.regions.contains(block.id()) {
        return Err(FabricError::NotRegistered { kind: KIND, block: block.id().get() });
    }
    Ok((block, fd))
}

/// Whether the socket will show readiness or its end after this error.
fn will_be_told(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, NotConnected, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | BrokenPipe | ConnectionReset | NotConnected)
}

/// Puts a tiny payload into the slot of `position`.
fn stage(connection: &Connection, position: u64, local: &Buf) {
    let length = local.len().min(INLINE_BYTES);
    // SAFETY: the slot has room for `INLINE_BYTES` and is not published, so nobody reads it; `local` is readable
    // for its length and lies in another mapping.
    unsafe {
        copy_raw(connection.own.inline_pointer(position), local.as_ptr(), length, CopyReason::ShmInline);
    };
}
