//! Received frames. They are checked as a NIC does, and the kernel copies their payload into the granted memory.

use std::io;

use tensorwire_memory::{Buf, RemoteTarget};
use tensorwire_verbs_reactor::{
    Arrival, FabricError, FabricKind, LossCause, PeerViolation, QueuePairCore, RegionTable, RemoteRange,
};

use crate::{
    closing::Closing,
    frame::{AnswerFrame, Ending, Frame, HEADER_BYTES, Header, ReadFrame, Refusal, WriteFrame},
    outgoing::Outgoing,
    reads::{Expected, Reads},
    sender::{End, Sender},
    socket::{Socket, loss},
};

/// The bytes of one turn, over all frames and writes. After them, other tasks get the runtime's thread.
const TURN_BYTES: usize = 256 << 10;

/// The least that a system call counts as, in bytes, so that a turn of tiny frames is bounded too.
const CALL_COST: usize = 1 << 10;

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
    /// Nothing more has come yet.
    Drained,
    /// There may be more. Other tasks get a turn first.
    More,
    /// The connection is over. The receiver has stopped.
    Ended(End),
    /// The connection was over before. Nothing was read.
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
}

/// The receiving half of a connection. Only the task that has locked it receives bytes of the peer.
pub(super) struct Receiver {
    header: Header,
    /// Bytes of `header` that have arrived.
    filled: usize,
    /// The payload that is being received.
    landing: Option<Landing>,
    /// Bytes of the earlier ranges of the current logical write, if it continues with another range.
    carried: Option<u64>,
    stopped: bool,
    /// Whether an answer or a request was posted.
    has_posted: bool,
    /// Bytes that were received, plus one for the end.
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
            header: [0; HEADER_BYTES],
            filled: 0,
            landing: None,
            carried: None,
            stopped: false,
            has_posted: false,
            finds: 0,
        }
    }

    /// Stops receiving. Returns false if it was stopped before.
    pub(super) fn stop(&mut self) -> bool {
        self.landing = None;
        !std::mem::replace(&mut self.stopped, true)
    }

    /// One turn of receiving.
    pub(super) fn turn(&mut self, ground: Ground<'_>) -> Received {
        if self.stopped {
            return Received::Stopped;
        }
        let mut left = TURN_BYTES;
        while left > 0 {
            match self.step(ground, left) {
                Ok(Step { bytes, drained }) => {
                    self.finds = self.finds.wrapping_add(bytes as u64);
                    if drained {
                        return Received::Drained;
                    }
                    left = left.saturating_sub(bytes.max(CALL_COST));
                }
                Err(ending) => {
                    self.finds = self.finds.wrapping_add(1);
                    self.stop();
                    // A driver that is dropped records that before it shuts the socket down. So that is the reason,
                    // not what the socket returns from then on.
                    return Received::Ended(ground.closing.end_without_driver().unwrap_or(ending));
                }
            }
        }
        Received::More
    }

    /// One system call, and the handling of its bytes.
    fn step(&mut self, ground: Ground<'_>, limit: usize) -> Result<Step, End> {
        if let Some(end) = ground.closing.end() {
            return Err(end);
        }
        let in_body = self.landing.as_ref().is_some_and(|landing| landing.frame_left() > 0);
        let step = if in_body { self.read_body(ground, limit)? } else { self.read_header(ground)? };
        if self.filled == HEADER_BYTES {
            self.filled = 0;
            self.begin_frame(ground)?;
        }
        Ok(step)
    }

    fn read_header(&mut self, ground: Ground<'_>) -> Result<Step, End> {
        let wanted = &mut self.header[self.filled..];
        let requested = wanted.len();
        let step = Step::of("recv", requested, ground.socket.receive(wanted), ground.socket)?;
        self.filled += step.bytes;
        Ok(step)
    }

    /// Receives payload bytes into the granted memory, and the next header behind them, if it has come, into
    /// `header`.
    fn read_body(&mut self, ground: Ground<'_>, limit: usize) -> Result<Step, End> {
        let malformed = || End::violation(PeerViolation::Malformed);
        let not_granted = |_| End::violation(PeerViolation::NotGranted);
        let landing = self.landing.as_mut().ok_or_else(malformed)?;
        let target = landing.target.as_ref().ok_or_else(malformed)?;
        let left = usize::try_from(landing.frame_left()).map_err(|_| malformed())?;
        let offset = usize::try_from(landing.offset + landing.landed_in_all()).map_err(|_| malformed())?;
        let wanted = left.min(limit);
        let next = if wanted == left { &mut self.header[..] } else { &mut [] };
        let requested = wanted + next.len();
        // The access lasts for this system call only: the grant may end before the next one.
        let access = target.access(offset, wanted).map_err(not_granted)?;
        let read = ground.socket.receive_into(&access, next);
        drop(access);
        let step = Step::of("recvmsg", requested, read, ground.socket)?;
        let landed = step.bytes.min(wanted) as u64;
        landing.landed += landed;
        if matches!(landing.frame, Body::Write(_)) {
            ground.core.count_received(landed);
        }
        if landing.frame_left() == 0 {
            self.filled = step.bytes - wanted;
            self.end_frame(ground)?;
        }
        Ok(step)
    }

    fn begin_frame(&mut self, ground: Ground<'_>) -> Result<(), End> {
        let malformed = || End::violation(PeerViolation::Malformed);
        let body = match Frame::decode(&self.header).map_err(End::violation)? {
            Frame::Write(write) => Body::Write(write),
            Frame::Answer(answer) => Body::Answer(answer),
            Frame::Read(read) => return self.answer(&read, ground),
            Frame::Goodbye => return Err(End::lost(LossCause::ClosedByPeer, "the peer closed it")),
            Frame::Refusal(refusal) => return Err(End::refused(refusal)),
        };
        let landing = match (&self.landing, body) {
            (Some(landing), body) => landing.continued_by(body).ok_or_else(malformed)?,
            (None, Body::Write(write)) => begin_write(write, ground.table).map_err(End::violation)?,
            (None, Body::Answer(answer)) => {
                // An answer without a request comes from a broken peer; so does one inside a logical write.
                let expected = ground.reads.expected(&answer).filter(|_| self.carried.is_none());
                let Expected { target, offset } = expected.ok_or_else(malformed)?;
                Landing::new(target, offset, body)
            }
        };
        self.landing = Some(landing);
        if body.length() == 0 { self.end_frame(ground) } else { Ok(()) }
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
        self.has_posted = true;
        Ok(())
    }

    /// A number that changes whenever bytes, or the end, were received.
    pub(super) fn finds(&self) -> u64 {
        self.finds
    }

    /// Whether something was posted since the last call.
    pub(super) fn has_posted(&mut self) -> bool {
        std::mem::take(&mut self.has_posted)
    }

    /// Handles a frame whose payload bytes have all arrived. If it was the last frame of its range, the range is
    /// complete.
    fn end_frame(&mut self, ground: Ground<'_>) -> Result<(), End> {
        let Some(landing) = self.landing.take_if(|landing| landing.frame.is_last()) else { return Ok(()) };
        let write = match landing.frame {
            Body::Write(write) => write,
            Body::Answer(_) => {
                ground.reads.answered(ground.core);
                self.has_posted |= ground.reads.ask(ground.sender);
                return Ok(());
            }
        };
        let carried = self.carried.take();
        let length = carried.unwrap_or(0).saturating_add(landing.landed_in_all());
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

/// Checks the whole range as a NIC does, before a byte of it is received.
fn begin_write(frame: WriteFrame, table: &RegionTable) -> Result<Landing, PeerViolation> {
    let target = match frame.range.length {
        // As on a NIC, a write of no bytes names no memory.
        0 => None,
        _ => Some(table.write_target(&frame.range, frame.key.0)?.0),
    };
    Ok(Landing::new(target, 0, Body::Write(frame)))
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
