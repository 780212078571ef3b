//! The target's half: executes the peer's writes as a NIC would.

use std::{
    io, mem,
    os::fd::AsFd,
    sync::{Arc, MutexGuard, PoisonError},
};

use tensorwire_fabric::{Arrival, FabricError, Immediate, LatestTargets, PeerViolation, RemoteRange};
use tensorwire_memory::{
    Buf, Limit,
    copy::{CopyReason, copy_raw},
};
use tensorwire_testpoints::sync::Mutex;

use crate::{
    connection::Connection,
    copying::{Begun, Copying, Payload, Turn, reason},
    ending::End,
    frame::Frame,
    helper::HelpedCopy,
    import::ImportedBlock,
    limits::{BATCH_DESCRIPTORS, BATCH_FRAMES, BLOCKS_MAX, CHUNK_BYTES, UNREPORTED_MAX},
    loan::{HeldLease, Loan},
    producer::Producer,
    reads::Answer,
    ring::{Descriptor, Source},
    sys,
};

/// The result of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// There was nothing to execute.
    Idle,
    /// Everything was executed.
    Worked,
    /// The round's budget is used up; there may be more.
    More,
}

/// The state of the target's half. Only the task that has its lock accesses local memory on behalf of the peer.
#[derive(Debug, Default)]
pub(super) struct Target {
    /// Position of the next descriptor.
    head: u64,
    /// The value of `head` that the peer knows.
    reported: u64,
    /// The descriptor that is being executed.
    current: Option<Execution>,
    /// The regions that the peer wrote most recently.
    latest: LatestTargets,
    /// Bytes of the finished pieces of the logical write in progress.
    landed: u64,
    copying: Copying,
    /// The peer's blocks, in the order it sent them.
    blocks: Vec<Arc<ImportedBlock>>,
    /// The bytes of all imported blocks.
    imported: u64,
    /// Set once. Then nothing is executed any more.
    over: bool,
    /// Whether reads were requested or answered since this was last checked.
    reads: bool,
    /// Whether descriptors whose completion the peer may wait for were executed since this was last checked.
    is_awaited: bool,
}

#[derive(Debug)]
struct Execution {
    immediate: Option<u32>,
    continues: bool,
    is_quiet: bool,
    job: Option<Job>,
    length: u64,
    /// The descriptors that follow this one, and whose payloads are copied with its own.
    gathered: Vec<Descriptor>,
    /// Set if the copy belongs to a read, not to a write of the peer.
    read: Option<Side>,
}

/// The side that issued a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// The peer, which gets an answer.
    Peer,
    /// This side, which receives the answer.
    Own,
}

/// A piece of work that takes time.
#[derive(Debug)]
enum Job {
    Copy(Payload),
    /// A copy that a second core shares.
    Shared(HelpedCopy),
    View(View),
}

/// A view of the peer's memory that is being made resident.
#[derive(Debug)]
struct View {
    index: u32,
    offset: usize,
    length: usize,
    slot: u32,
    generation: u64,
}

impl Target {
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// Stops executing for good, and drops the blocks of the peer.
    pub(super) fn end(&mut self, connection: &Connection) {
        self.over = true;
        self.current = None;
        self.blocks = Vec::new();
        connection.blocks.clear();
        self.latest = LatestTargets::default();
    }

    /// Executes descriptors for about [`CHUNK_BYTES`] of payload and returns their completions.
    pub(super) fn run(
        &mut self,
        connection: &Connection,
        producer: &Mutex<Producer>,
    ) -> Result<Progress, End> {
        let before = self.head;
        let result = self.execute_batch(connection, producer);
        if self.head != before {
            connection.own.set_cpu();
            self.report(connection);
        }
        match result? {
            true => Ok(Progress::More),
            false if self.head != before => Ok(Progress::Worked),
            false => {
                self.copying.pause();
                Ok(Progress::Idle)
            }
        }
    }

    /// Stores the count of executed descriptors, if the peer may wait for it, or may soon need the room in its ring.
    /// Otherwise nothing is stored, because each store takes the cache line from the peer, which polls it.
    fn report(&mut self, connection: &Connection) {
        let unreported = self.head - self.reported;
        if self.is_awaited || unreported >= UNREPORTED_MAX {
            connection.own.set_consumed(self.head);
            self.reported = self.head;
        }
    }

    /// Whether reads were requested or answered since the last call.
    pub(super) fn take_reads(&mut self) -> bool {
        mem::take(&mut self.reads)
    }

    /// Whether descriptors were executed, since the last call, whose completion the peer may wait for.
    pub(super) fn take_awaited(&mut self) -> bool {
        mem::take(&mut self.is_awaited)
    }

    /// Descriptors executed so far.
    pub(super) fn executed(&self) -> u64 {
        self.head
    }

    /// Receives what the peer sent on the socket: descriptors of its blocks, or the end of the stream. Returns
    /// whether there may be more.
    pub(super) fn read_frames(&mut self, connection: &Connection) -> Result<bool, End> {
        for _ in 0..BATCH_FRAMES {
            if !self.read_frame(connection)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Executes one batch. Returns whether there may be more to do at once.
    fn execute_batch(&mut self, connection: &Connection, producer: &Mutex<Producer>) -> Result<bool, End> {
        let mut budget = CHUNK_BYTES;
        for _ in 0..BATCH_DESCRIPTORS {
            if self.current.is_none() {
                let Some(descriptor) = connection.peer.descriptor(self.head)? else { return Ok(false) };
                if descriptor.is_at_once() {
                    self.execute(connection, &descriptor)?;
                    continue;
                }
                self.current = Some(self.begin(connection, producer, descriptor)?);
            }
            let is_done = self.go_on(connection, producer, &mut budget)?;
            if !is_done || budget == 0 {
                return Ok(true);
            }
        }
        Ok(true)
    }

    /// Executes some more of the current descriptor, within `budget`. Returns whether it is done.
    // A separate function, because long work needs many values on the stack, and a short message none of them.
    #[inline(never)]
    fn go_on(
        &mut self,
        connection: &Connection,
        producer: &Mutex<Producer>,
        budget: &mut usize,
    ) -> Result<bool, End> {
        let Some(mut execution) = self.current.take() else { return Ok(true) };
        if let Some(job) = &mut execution.job {
            let (bytes, is_done) = self.advance(connection, job, *budget)?;
            *budget = budget.saturating_sub(bytes);
            if !is_done {
                self.current = Some(execution);
                return Ok(false);
            }
        }
        self.is_awaited |= !execution.is_quiet || execution.gathered.iter().any(|piece| !piece.is_quiet);
        self.finish(connection, producer, &execution)?;
        Ok(true)
    }

    /// Checks a descriptor as a NIC would, before any memory is accessed.
    #[inline(never)]
    fn begin(
        &mut self,
        connection: &Connection,
        producer: &Mutex<Producer>,
        descriptor: Descriptor,
    ) -> Result<Execution, End> {
        let mut execution = Execution {
            immediate: descriptor.immediate,
            continues: descriptor.continues,
            is_quiet: descriptor.is_quiet,
            job: None,
            length: descriptor.length(),
            gathered: Vec::new(),
            read: None,
        };
        match descriptor.source {
            Source::Asked { tag } => {
                answer(connection, producer, &descriptor, tag)?;
                execution.read = Some(Side::Peer);
                return Ok(execution);
            }
            Source::Answer { tag, index, offset, length } => {
                let destination = lock(producer).reads().expected(tag, length)?;
                execution.read = Some(Side::Own);
                if let Some(destination) = destination.filter(|_| length > 0) {
                    let payload = Payload::new((index, offset), destination, CopyReason::ShmRead);
                    self.begin_copy(connection, payload, &mut execution)?;
                }
                return Ok(execution);
            }
            _ => {}
        }
        if let Source::Lent { index, offset, length, slot, generation } = descriptor.source {
            if !self.block(connection, index)?.covers(offset, length) {
                return Err(PeerViolation::OutOfBounds.into());
            }
            // `covers` has shown that both fit the address space.
            let (offset, length) = (offset as usize, length as usize);
            execution.job = Some(Job::View(View { index, offset, length, slot, generation }));
            return Ok(execution);
        }
        if let (Source::Block { index, offset }, Some((range, key))) = (descriptor.source, descriptor.remote)
        {
            let (destination, purpose) = self.latest.write_target(&connection.regions, &range, key)?;
            let payload = Payload::new((index, offset), destination, reason(purpose));
            self.begin_copy(connection, payload, &mut execution)?;
        }
        Ok(execution)
    }

    /// Executes a descriptor whose payload is in the ring, with the same checks.
    fn execute(&mut self, connection: &Connection, descriptor: &Descriptor) -> Result<(), End> {
        if let Some((range, key)) = &descriptor.remote {
            self.copy_out_of_ring(connection, &descriptor.source, range, *key)?;
        }
        self.is_awaited |= !descriptor.is_quiet;
        check_open(connection)?;
        self.end_piece(connection, descriptor.length(), descriptor.continues, descriptor.immediate)
    }

    /// Copies a payload that is in the ring, which is at most [`INLINE_BYTES`](crate::limits::INLINE_BYTES).
    fn copy_out_of_ring(
        &mut self,
        connection: &Connection,
        source: &Source,
        range: &RemoteRange,
        key: u32,
    ) -> Result<(), PeerViolation> {
        let short;
        let source = match source {
            Source::Short(words) => {
                short = *words;
                short.as_ptr().cast()
            }
            _ => connection.peer.inline_pointer(self.head),
        };
        self.latest.write(&connection.regions, range, key, |access, purpose| {
            if access.length() == 0 {
                return;
            }
            // SAFETY: `source` is readable for `access.length()` bytes: the decoder has checked the length against the room
            // in the descriptor or in the slot, and a write without a payload has no length. `access` covers as many bytes of a live
            // grant that no slice of this process aliases, in another mapping. The peer may change the slot meanwhile:
            // `execute` checks its `closed` word before the arrival is passed on.
            unsafe { copy_raw(access.pointer(), source, access.length(), reason(purpose)) };
        })
    }

    /// Begins to copy a payload of the peer's memory.
    fn begin_copy(
        &mut self,
        connection: &Connection,
        payload: Payload,
        execution: &mut Execution,
    ) -> Result<(), End> {
        if !payload.is_inside(self.block(connection, payload.block())?) {
            return Err(PeerViolation::OutOfBounds.into());
        }
        let (head, continues, blocks) = (self.head, execution.continues, &self.blocks);
        let mut turn = Turn { connection, head, continues, latest: &mut self.latest, blocks };
        execution.job = Some(match self.copying.begin(payload, &mut turn) {
            Begun::Alone(payload) => Job::Copy(payload),
            Begun::Shared(shared, gathered) => {
                execution.gathered = gathered;
                Job::Shared(shared)
            }
        });
        Ok(())
    }

    /// The peer's block with this number. The peer sends a block before the descriptor that names it, so a missing
    /// block is still in the socket.
    fn block(&mut self, connection: &Connection, index: u32) -> Result<&ImportedBlock, End> {
        let index = index as usize;
        while index >= self.blocks.len() && self.read_frame(connection)? {}
        self.blocks.get(index).map(|block| &**block).ok_or_else(|| PeerViolation::Malformed.into())
    }

    /// Continues `job` for about `limit` bytes. Returns how many they were, and whether it is done.
    fn advance(
        &mut self,
        connection: &Connection,
        job: &mut Job,
        limit: usize,
    ) -> Result<(usize, bool), End> {
        match job {
            Job::Shared(copy) => Ok(copy.steps(limit)?),
            Job::Copy(copy) => {
                let bytes = copy.copy(self.block(connection, copy.block())?, limit)?;
                Ok((bytes, copy.is_done()))
            }
            Job::View(view) => {
                let block = self.block(connection, view.index)?;
                let populated = block.populate(view.offset, view.length, limit);
                populated.map_err(End::unreadable)
            }
        }
    }

    /// Passes the arrival on, if the peer has not closed yet, and moves to the next descriptor.
    fn finish(
        &mut self,
        connection: &Connection,
        producer: &Mutex<Producer>,
        execution: &Execution,
    ) -> Result<(), End> {
        check_open(connection)?;
        if let (Some(Job::View(view)), Some(immediate)) = (&execution.job, execution.immediate) {
            return self.hand_over(connection, view, Immediate(immediate));
        }
        if let Some(side) = execution.read {
            // Before this side may request another read: the peer counts unanswered reads by what this side has
            // executed.
            connection.own.set_consumed(self.head + 1);
            self.reported = self.head + 1;
            let read = (side == Side::Own).then(|| lock(producer).reads().answered()).flatten();
            if let Some(read) = read {
                connection.core.complete(read.key, read.length, Ok(()));
            }
            self.reads = true;
            self.head += 1;
            return Ok(());
        }
        self.end_piece(connection, execution.length, execution.continues, execution.immediate)?;
        for piece in &execution.gathered {
            self.end_piece(connection, piece.length(), piece.continues, piece.immediate)?;
        }
        Ok(())
    }

    /// Passes on the arrival of a write whose last piece has landed, and moves to the next descriptor.
    fn end_piece(
        &mut self,
        connection: &Connection,
        length: u64,
        continues: bool,
        immediate: Option<u32>,
    ) -> Result<(), End> {
        connection.core.count_received(length);
        self.landed = self.landed.saturating_add(length);
        if !continues {
            let length = mem::take(&mut self.landed);
            if let Some(immediate) = immediate {
                let arrival = Arrival::Immediate { immediate: Immediate(immediate), length };
                connection.core.deliver(arrival).map_err(End::not_ready)?;
            }
        }
        self.head += 1;
        Ok(())
    }

    /// Passes the user a view of the peer's memory.
    fn hand_over(&mut self, connection: &Connection, view: &View, immediate: Immediate) -> Result<(), End> {
        let mapping = self.block(connection, view.index)?.mapping().map_err(End::unreadable)?.clone();
        let lease = Arc::new(held(connection, view.slot, view.generation));
        let loan = Loan::new(mapping, (view.offset, view.length), lease);
        let buffer = Buf::foreign(Arc::new(loan));
        // A view that cannot be delivered is released by its drop.
        connection.core.deliver(Arrival::Loan { immediate, buffer }).map_err(End::not_ready)?;
        self.head += 1;
        Ok(())
    }

    /// Declines, when the connection is over, the loans that were not executed.
    pub(super) fn decline_loans(&self, connection: &Connection) {
        // The ring bounds the loop. A slot that is published out of order ends it.
        for position in self.head..self.head.saturating_add(u64::from(connection.peer.slots())) {
            let Ok(Some(descriptor)) = connection.peer.descriptor(position) else { return };
            if let Source::Lent { slot, generation, .. } = descriptor.source {
                drop(held(connection, slot, generation));
            }
        }
    }

    /// Reads one frame. Returns false when there is none.
    fn read_frame(&mut self, connection: &Connection) -> Result<bool, End> {
        let packet = match sys::receive(connection.socket.get_ref().as_fd()) {
            Ok(packet) => packet,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) if Limit::of_files(&error).is_some() => {
                return Err(End::device("receiving the descriptor of a block of the peer", error));
            }
            Err(error) => return Err(ended(connection, &format!("the socket broke: {error}"))),
        };
        if packet.length == 0 {
            return Err(ended(connection, "its socket is closed: its process has ended"));
        }
        let frame = Frame::decode(packet.bytes.get(..packet.length).unwrap_or_default())?;
        let (Frame::Block { index, number, length }, Ok([fd])) = (frame, <[_; 1]>::try_from(packet.fds))
        else {
            return Err(PeerViolation::Malformed.into());
        };
        if packet.truncated || index as usize != self.blocks.len() || self.blocks.len() >= BLOCKS_MAX {
            return Err(PeerViolation::Malformed.into());
        }
        let (shared, most) = (self.imported.saturating_add(length), connection.imported_bytes_max);
        if shared > most {
            return Err(End::failed(FabricError::ImportedBytesExhausted { shared, most }));
        }
        let block = Arc::new(ImportedBlock::new(fd, length)?);
        if !connection.blocks.insert(number, block.clone()) {
            return Err(PeerViolation::Malformed.into());
        }
        self.blocks.push(block);
        self.imported = shared;
        Ok(true)
    }
}

/// Checks that the peer has not closed yet, so that bytes copied out of its memory are valid.
fn check_open(connection: &Connection) -> Result<(), End> {
    match connection.peer.closed() {
        0 => Ok(()),
        closed => Err(End::from_peer(closed, connection.peer_receive_depth)),
    }
}

fn lock(producer: &Mutex<Producer>) -> MutexGuard<'_, Producer> {
    producer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks a read of the peer as a NIC does, and queues its answer. A read of no bytes needs no check.
fn answer(
    connection: &Connection,
    producer: &Mutex<Producer>,
    descriptor: &Descriptor,
    tag: u32,
) -> Result<(), End> {
    let (range, key) = descriptor.remote.ok_or(PeerViolation::Malformed)?;
    lock(producer).may_answer(connection)?;
    let bytes = match range.length {
        0 => Buf::empty(),
        _ => connection.regions.read_source(&range, key)?,
    };
    lock(producer).answer(Answer { tag, bytes });
    Ok(())
}

fn held(connection: &Connection, slot: u32, generation: u64) -> HeldLease {
    let (own, peer) = (connection.own.clone(), connection.peer.clone());
    let counted = connection.peer_catalogue.claims().cloned();
    let (ringer, blocks) = (connection.ringer.clone(), connection.blocks.clone());
    HeldLease { own, peer, ringer, slot, generation, counted, blocks }
}

/// The end of a connection whose socket the peer has closed. If the peer left a reason, that is the error.
pub(super) fn ended(connection: &Connection, detail: &str) -> End {
    match connection.peer.closed() {
        0 => End::end_of_file(detail),
        code => End::from_peer(code, connection.peer_receive_depth),
    }
}
