//! Received frames. They are checked as a NIC does, and the kernel copies their payload into the granted memory.

use std::io;

use futures::task::AtomicWaker;
use tensorwire_fabric::{
    Arrival, FabricError, FabricKind, LatestTargets, LossCause, PeerViolation, QueuePairCore, RegionTable,
    RemoteRange,
};
use tensorwire_memory::{Buf, RemoteAccess, RemoteTarget};

use crate::{
    ahead::Ahead,
    closing::Closing,
    frame::{AnswerFrame, Ending, Frame, HEADER_BYTES, Header, ReadFrame, Refusal, WriteFrame},
    outgoing::Outgoing,
    reads::{Expected, Reads},
    sender::{End, Sender},
    socket::{Socket, loss},
};

/// The bytes of one turn, over all frames and writes. After them, other tasks get the runtime's thread.
const TURN_BYTES: usize = 1 << 20;

/// The most payload bytes of one system call. The kernel acknowledges bytes that arrive during a call only after it.
const CALL_BYTES: u64 = 256 << 10;

/// Maximum number of bytes of a payload that must arrive before readiness announces them. More would delay the copying.
const ANNOUNCED_BYTES_MAX: u64 = 128 << 10;

/// Minimum number of bytes for which readiness waits; fewer are announced as they arrive.
const ANNOUNCED_BYTES_MIN: u64 = 64 << 10;

/// The minimum cost, in bytes, of a system call, a header or a payload, so that a turn of tiny frames is bounded, too.
const STEP_COST: usize = 4 << 10;

impl End {
    /// The end because this side closes.
    pub(super) fn closed() -> Self {
        Self { error: FabricError::Closed, farewell: Some(Frame::Goodbye) }
    }

    /// An end without a farewell: the stream is down, or the peer knows the reason.
    pub(super) fn silent(error: FabricError) -> Self {
        Self { error, farewell: None }
    }

    fn lost(cause: LossCause, detail: &str) -> Self {
        Self::silent(FabricError::PeerLost { kind: FabricKind::TCP, cause, detail: detail.to_owned() })
    }

    /// Whether the stream ended without a reason.
    pub(super) fn is_end_of_file(&self) -> bool {
        matches!(self.error, FabricError::PeerLost { cause: LossCause::EndOfFile, .. })
    }

    /// The end because the peer broke a rule.
    fn violation(violation: PeerViolation) -> Self {
        let error = FabricError::PeerMisbehaved { kind: FabricKind::TCP, violation };
        Self { error, farewell: Some(Frame::Refusal(Refusal { reason: violation, depth: 0 })) }
    }

    fn not_ready(error: FabricError, depth: u32) -> Self {
        let reason = PeerViolation::ReceiverNotReady;
        Self { error, farewell: Some(Frame::Refusal(Refusal { reason, depth })) }
    }

    /// The end because the peer reports that this side broke a rule.
    fn refused(refusal: Refusal) -> Self {
        let kind = FabricKind::TCP;
        Self::silent(match refusal.reason {
            PeerViolation::ReceiverNotReady => FabricError::ReceiverNotReady { kind, depth: refusal.depth },
            reason => FabricError::RemoteRefused { kind, reason },
        })
    }
}

/// The state of receiving after a turn.
#[derive(Debug)]
pub(super) enum Received {
    /// Nothing more has arrived yet.
    Drained,
    /// There may be more. Other tasks get a turn first.
    More,
    /// The connection is over. The receiver has stopped.
    Ended(End),
    /// The connection was over already. Nothing was read.
    Stopped,
}

/// The parts of the connection that a turn uses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ground<'link> {
    pub(super) socket: &'link Socket,
    pub(super) table: &'link RegionTable,
    pub(super) core: &'link QueuePairCore,
    pub(super) sender: &'link Sender,
    pub(super) reads: &'link Reads,
    pub(super) closing: &'link Closing,
    pub(super) driver: &'link AtomicWaker,
}

impl Ground<'_> {
    /// Sends together the posts that result from handling the latest frames.
    fn flush(&self) {
        self.sender.flush(self.socket, self.core, self.driver);
    }
}

/// The receiving half of a connection. Only the task that has locked it receives bytes of the peer.
pub(super) struct Receiver {
    /// Bytes that were read and not handled.
    ahead: Ahead,
    /// The payload that is being received.
    landing: Option<Landing>,
    /// The regions that the peer wrote most recently.
    latest: LatestTargets,
    /// Bytes of the earlier ranges of the current logical write, if it continues with another range.
    carried: Option<u64>,
    stopped: bool,
    /// The number of bytes from which on readiness announces them.
    announced_from: u64,
    /// Changes whenever bytes are received or handled, and with the end.
    finds: u64,
}

/// A payload that is being received, whose range was checked.
struct Landing {
    /// `None` if there are none.
    target: Option<RemoteTarget>,
    /// The offset of the payload in the target.
    offset: u64,
    /// The current frame, or the last one that landed.
    frame: Body,
    /// Payload bytes of that frame that have landed.
    landed: u64,
    /// Payload bytes of earlier frames.
    before: u64,
}

/// A frame that payload follows.
#[derive(Debug, Clone, Copy)]
enum Body {
    Write(WriteFrame),
    Answer(AnswerFrame),
}

impl Body {
    fn length(&self) -> u64 {
        match self {
            Self::Write(write) => write.length,
            Self::Answer(answer) => answer.length,
        }
    }

    fn is_last(&self) -> bool {
        match self {
            Self::Write(write) => write.is_last(),
            Self::Answer(answer) => answer.length == answer.rest,
        }
    }

    /// Whether `next` is the frame that must follow.
    fn is_continued_by(&self, next: &Self) -> bool {
        match (self, next) {
            (Self::Write(write), Self::Write(next)) => {
                // The whole range was checked when it began: this cannot overflow.
                let expected = RemoteRange {
                    offset: write.range.offset + write.length,
                    length: write.range.length - write.length,
                    ..write.range
                };
                next.range == expected && next.key == write.key
            }
            (Self::Answer(answer), Self::Answer(next)) => {
                next.tag == answer.tag && next.rest == answer.rest - answer.length
            }
            (Self::Write(_), Self::Answer(_)) | (Self::Answer(_), Self::Write(_)) => false,
        }
    }
}

impl Landing {
    fn new(target: Option<RemoteTarget>, offset: u64, frame: Body) -> Self {
        Self { target, offset, frame, landed: 0, before: 0 }
    }

    fn frame_left(&self) -> u64 {
        self.frame.length() - self.landed
    }

    fn landed_in_all(&self) -> u64 {
        self.before + self.landed
    }

    /// The next `bytes` bytes of the granted memory.
    fn access(&self, bytes: u64) -> Result<RemoteAccess<'_>, End> {
        let target = self.target.as_ref().ok_or_else(malformed)?;
        let length = usize::try_from(bytes).map_err(|_| malformed())?;
        let offset = usize::try_from(self.offset + self.landed_in_all()).map_err(|_| malformed())?;
        target.access(offset, length).map_err(|_| End::violation(PeerViolation::NotGranted))
    }

    /// Continues with `next`. `None` if it is not the frame that must follow.
    fn continued_by(&self, next: Body) -> Option<Self> {
        let before = self.landed_in_all();
        let rest = Self { before, ..Self::new(self.target.clone(), self.offset, next) };
        self.frame.is_continued_by(&next).then_some(rest)
    }
}

impl Receiver {
    pub(super) fn new() -> Self {
        Self {
            ahead: Ahead::new(),
            landing: None,
            latest: LatestTargets::default(),
            carried: None,
            stopped: false,
            announced_from: 1,
            finds: 0,
        }
    }

    /// Stops receiving. Returns false if it was stopped before.
    pub(super) fn stop(&mut self) -> bool {
        (self.landing, self.latest) = (None, LatestTargets::default());
        !std::mem::replace(&mut self.stopped, true)
    }

    /// Whether bytes were read that a turn has not handled. No readiness announces them.
    pub(super) fn holds_bytes(&self) -> bool {
        !self.stopped && !self.ahead.is_empty()
    }

    /// One turn of receiving.
    pub(super) fn turn(&mut self, ground: Ground<'_>) -> Received {
        if self.stopped {
            return Received::Stopped;
        }
        let received = self.steps(ground).unwrap_or_else(|ending| {
            self.finds = self.finds.wrapping_add(1);
            self.stop();
            // A driver that is dropped records that before it shuts the socket down. So that is the reason, and not the
            // later results of the socket.
            Received::Ended(ground.closing.end_without_driver().unwrap_or(ending))
        });
        self.announce(ground.socket);
        received
    }

    /// During a long payload, lets readiness announce many bytes at once, so that not each segment wakes the driver. It
    /// waits for at most half of the missing bytes, because copying should overlap with the arrival of the end, and
    /// because an encrypted stream may withhold a record.
    fn announce(&mut self, socket: &Socket) {
        let left = self.landing.as_ref().map_or(0, Landing::frame_left);
        let from = match left / 2 {
            ANNOUNCED_BYTES_MAX.. => ANNOUNCED_BYTES_MAX,
            ANNOUNCED_BYTES_MIN.. => ANNOUNCED_BYTES_MIN,
            _ => 1,
        };
        // If the system refuses, each segment wakes the driver.
        if from != self.announced_from && socket.announce_from(from as libc::c_int).is_ok() {
            self.announced_from = from;
        }
    }

    fn steps(&mut self, ground: Ground<'_>) -> Result<Received, End> {
        let (mut left, mut drained) = (TURN_BYTES, false);
        let mut has_bytes = !self.ahead.is_empty();
        loop {
            if has_bytes {
                let held = ground.sender.gathering().held();
                let handled = self.handle(ground, &mut left);
                drop(held);
                ground.flush();
                handled?;
            }
            if drained && (left > 0 || self.ahead.is_empty()) {
                return Ok(Received::Drained);
            }
            if left == 0 {
                return Ok(Received::More);
            }
            if let Some(end) = ground.closing.end() {
                return Err(end);
            }
            let step = self.read(ground)?;
            self.finds = self.finds.wrapping_add(step.bytes as u64);
            (has_bytes, drained) = (step.bytes > 0, step.drained);
            left = left.saturating_sub(step.bytes.max(STEP_COST));
        }
    }

    /// Handles bytes that were read ahead, until more bytes are needed or the turn's budget is used up.
    fn handle(&mut self, ground: Ground<'_>, left: &mut usize) -> Result<(), End> {
        while *left > 0 {
            if let Some(end) = ground.closing.end() {
                return Err(end);
            }
            if self.is_in_body() {
                if self.ahead.is_empty() {
                    return Ok(());
                }
                self.land_ahead(ground)?;
            } else {
                let Some(header) = self.ahead.take_header() else { return Ok(()) };
                self.begin_frame(&header, ground)?;
            }
            self.finds = self.finds.wrapping_add(1);
            *left = left.saturating_sub(STEP_COST);
        }
        Ok(())
    }

    fn is_in_body(&self) -> bool {
        self.landing.as_ref().is_some_and(|landing| landing.frame_left() > 0)
    }

    /// Makes one system call, after all bytes read so far are handled, except for a part of a header.
    fn read(&mut self, ground: Ground<'_>) -> Result<Step, End> {
        if self.is_in_body() {
            return self.read_body(ground);
        }
        let room = self.ahead.room();
        let requested = room.len();
        let step = Step::of("recv", requested, ground.socket.receive(room), ground.socket)?;
        self.ahead.filled(step.bytes);
        Ok(step)
    }

    /// Receives payload bytes into the granted memory, and then the following bytes, if they have arrived: the next
    /// header of the same range, or any others.
    fn read_body(&mut self, ground: Ground<'_>) -> Result<Step, End> {
        let landing = self.landing.as_mut().ok_or_else(malformed)?;
        let wanted = landing.frame_left().min(CALL_BYTES);
        let room = self.ahead.room();
        let following = match landing.frame {
            _ if wanted < landing.frame_left() => 0,
            frame if frame.is_last() => room.len(),
            _ => HEADER_BYTES,
        };
        let next = &mut room[..following];
        // The access lasts for this system call only: the grant may end before the next one.
        let access = landing.access(wanted)?;
        let requested = access.length() + next.len();
        let read = ground.socket.receive_into(&access, next);
        drop(access);
        let step = Step::of("recvmsg", requested, read, ground.socket)?;
        let landed = (step.bytes as u64).min(wanted);
        self.ahead.filled(step.bytes - landed as usize);
        self.landed(landed, ground)?;
        Ok(step)
    }

    /// Copies payload bytes that were read ahead into the granted memory.
    fn land_ahead(&mut self, ground: Ground<'_>) -> Result<(), End> {
        let landing = self.landing.as_mut().ok_or_else(malformed)?;
        let wanted = landing.frame_left().min(self.ahead.payload() as u64);
        let access = landing.access(wanted)?;
        self.ahead.copy_out(&access);
        drop(access);
        self.landed(wanted, ground)
    }

    /// Records that `bytes` more of the current frame have landed.
    fn landed(&mut self, bytes: u64, ground: Ground<'_>) -> Result<(), End> {
        let landing = self.landing.as_mut().ok_or_else(malformed)?;
        landing.landed += bytes;
        if matches!(landing.frame, Body::Write(_)) {
            ground.core.count_received(bytes);
        }
        if landing.frame_left() == 0 { self.end_frame(ground) } else { Ok(()) }
    }

    fn begin_frame(&mut self, header: &Header, ground: Ground<'_>) -> Result<(), End> {
        let body = match Frame::decode(header).map_err(End::violation)? {
            Frame::Write(write) => Body::Write(write),
            Frame::Answer(answer) => Body::Answer(answer),
            Frame::Read(read) => return self.answer(&read, ground),
            Frame::Goodbye => return Err(End::lost(LossCause::ClosedByPeer, "the peer closed it")),
            Frame::Refusal(refusal) => return Err(End::refused(refusal)),
        };
        let landing = match (&self.landing, body) {
            (Some(landing), body) => landing.continued_by(body).ok_or_else(malformed)?,
            (None, Body::Write(write)) if self.is_here(&write) => return self.take_small(write, ground),
            (None, Body::Write(write)) => self.begin_write(write, ground.table).map_err(End::violation)?,
            (None, Body::Answer(answer)) => {
                // A peer that answers without a request, or inside a logical write, is broken.
                let expected = ground.reads.expected(&answer).filter(|_| self.carried.is_none());
                let Expected { target, offset } = expected.ok_or_else(malformed)?;
                Landing::new(target, offset, body)
            }
        };
        self.landing = Some(landing);
        if body.length() == 0 { self.end_frame(ground) } else { Ok(()) }
    }

    /// Whether all bytes of a range were read with its header.
    fn is_here(&self, write: &WriteFrame) -> bool {
        write.is_last() && 0 < write.length && write.length <= self.ahead.payload() as u64
    }

    /// Handles a write [that is here](Self::is_here).
    fn take_small(&mut self, write: WriteFrame, ground: Ground<'_>) -> Result<(), End> {
        let Self { latest, ahead, .. } = self;
        let landed =
            latest.write(ground.table, &write.range, write.key.0, |access, _| ahead.copy_out(access));
        landed.map_err(End::violation)?;
        ground.core.count_received(write.length);
        self.end_write(write, write.length, ground)
    }

    /// Checks the whole range as a NIC does, before a byte of it is received.
    fn begin_write(&mut self, frame: WriteFrame, table: &RegionTable) -> Result<Landing, PeerViolation> {
        let target = match frame.range.length {
            // As on a NIC, a write of no bytes names no memory.
            0 => None,
            _ => Some(self.latest.write_target(table, &frame.range, frame.key.0)?.0),
        };
        Ok(Landing::new(target, 0, Body::Write(frame)))
    }

    /// Answers a read of the peer, if it may read that range.
    fn answer(&mut self, read: &ReadFrame, ground: Ground<'_>) -> Result<(), End> {
        if self.landing.is_some() || self.carried.is_some() {
            return Err(End::violation(PeerViolation::Malformed));
        }
        let source = match read.range.length {
            // As for a write of no bytes.
            0 => Buf::empty(),
            _ => ground.table.read_source(&read.range, read.key.0).map_err(End::violation)?,
        };
        if !ground.sender.answer(Outgoing::answer(read.tag, source)) {
            return Err(End::violation(PeerViolation::TooManyReads));
        }
        Ok(())
    }

    /// A number that changes whenever bytes were received or handled, and with the end.
    pub(super) fn finds(&self) -> u64 {
        self.finds
    }

    /// Handles a frame whose payload bytes have all arrived. If it was the last frame of its range, the range is
    /// complete.
    fn end_frame(&mut self, ground: Ground<'_>) -> Result<(), End> {
        let Some(landing) = self.landing.take_if(|landing| landing.frame.is_last()) else { return Ok(()) };
        match landing.frame {
            Body::Write(write) => self.end_write(write, landing.landed_in_all(), ground),
            Body::Answer(_) => {
                ground.reads.answered(ground.core);
                ground.reads.ask(ground.sender);
                Ok(())
            }
        }
    }

    /// Handles the end of a range, all of whose `landed` bytes have arrived.
    fn end_write(&mut self, write: WriteFrame, landed: u64, ground: Ground<'_>) -> Result<(), End> {
        let carried = self.carried.take();
        let length = carried.unwrap_or(0).saturating_add(landed);
        match write.ending {
            Ending::Segment => self.carried = Some(length),
            Ending::Immediate(immediate) => {
                let depth = ground.core.config().receive_depth;
                let arrival = Arrival::Immediate { immediate, length };
                ground.core.deliver(arrival).map_err(|error| End::not_ready(error, depth))?;
            }
            // A logical write without an immediate has one range only, so this one must not continue another.
            Ending::Plain if carried.is_some() => return Err(End::violation(PeerViolation::Malformed)),
            Ending::Plain => {}
        }
        Ok(())
    }
}

fn malformed() -> End {
    End::violation(PeerViolation::Malformed)
}

/// The result of a system call.
#[derive(Debug, Clone, Copy)]
struct Step {
    bytes: usize,
    /// Whether the socket has nothing more now: it would block, or it is not encrypted and returned less than
    /// requested.
    drained: bool,
}

impl Step {
    fn of(
        call: &'static str,
        requested: usize,
        answer: io::Result<usize>,
        socket: &Socket,
    ) -> Result<Self, End> {
        match answer {
            Ok(0) => Err(End::lost(LossCause::EndOfFile, "its stream ended without a goodbye")),
            Ok(bytes) => Ok(Self { bytes, drained: bytes < requested && socket.short_reads_drain() }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Self { bytes: 0, drained: true }),
            Err(error) => Err(End::silent(loss(call, error))),
        }
    }
}
