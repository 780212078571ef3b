//! Frames in: checked as a NIC checks, and landed by the kernel in the granted memory.

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

/// Bytes of one turn: after these, others get the runtime's thread (accumulated over frames and writes).
const TURN_BYTES: usize = 256 << 10;

/// What a system call counts at least, so that a turn of tiny frames is bounded too.
const CALL_COST: usize = 1 << 10;

impl End {
    /// This side closes.
    pub(super) fn closed() -> Self {
        Self { error: FabricError::Closed, farewell: Some(Frame::Goodbye) }
    }

    /// Without a word: the stream is down, or the peer knows.
    pub(super) fn silent(error: FabricError) -> Self {
        Self { error, farewell: None }
    }

    fn lost(cause: LossCause, detail: &str) -> Self {
        Self::silent(FabricError::PeerLost { kind: FabricKind::TCP, cause, detail: detail.to_owned() })
    }

    /// Whether the stream just ended, for a reason that it does not know.
    pub(super) fn is_end_of_file(&self) -> bool {
        matches!(self.error, FabricError::PeerLost { cause: LossCause::EndOfFile, .. })
    }

    /// The peer broke a rule.
    fn violation(violation: PeerViolation) -> Self {
        let error = FabricError::PeerMisbehaved { kind: FabricKind::TCP, violation };
        Self { error, farewell: Some(Frame::Refusal(Refusal { reason: violation, depth: 0 })) }
    }

    fn not_ready(error: FabricError, depth: u32) -> Self {
        let reason = PeerViolation::ReceiverNotReady;
        Self { error, farewell: Some(Frame::Refusal(Refusal { reason, depth })) }
    }

    /// The peer says that we broke a rule.
    fn refused(refusal: Refusal) -> Self {
        let kind = FabricKind::TCP;
        Self::silent(match refusal.reason {
            PeerViolation::ReceiverNotReady => FabricError::ReceiverNotReady { kind, depth: refusal.depth },
            reason => FabricError::RemoteRefused { kind, reason },
        })
    }
}

/// Where receiving stands after a turn.
#[derive(Debug)]
pub(super) enum Received {
    /// Nothing more is there now.
    Drained,
    /// There may be more; give others a turn first.
    More,
    /// The connection is over. The receiver has stopped.
    Ended(End),
    /// It was over before; nothing was read.
    Stopped,
}

/// What a turn works with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ground<'link> {
    pub(super) socket: &'link Socket,
    pub(super) table: &'link RegionTable,
    pub(super) core: &'link QueuePairCore,
    pub(super) sender: &'link Sender,
    pub(super) reads: &'link Reads,
    pub(super) closing: &'link Closing,
}

/// The receiving half of a connection. Whoever holds it is the only one who lets the peer's bytes in.
pub(super) struct Receiver {
    header: Header,
    /// Bytes of `header` that are there.
    filled: usize,
    /// The bytes under way.
    landing: Option<Landing>,
    /// Bytes of earlier ranges of the logical write under way, which goes on with another one.
    carried: Option<u64>,
    stopped: bool,
    /// An answer or a request was posted.
    spoke: bool,
    /// Bytes that were found, and one for the end.
    finds: u64,
}

/// Bytes that are coming, whose range was checked.
struct Landing {
    /// `None` if there are none.
    target: Option<RemoteTarget>,
    /// Where they go in the target.
    offset: u64,
    /// The frame under way or last landed.
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

    /// Whether `next` is the frame that must come now.
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

    /// Goes on with `next`; `None` if it is not the frame that must come now.
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
            spoke: false,
            finds: 0,
        }
    }

    /// Lets nothing of the peer in any more. False if that was so already.
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
                    // A driver that goes shuts the socket down after it has said so: that is the reason, not what
                    // the socket gives from then on.
                    return Received::Ended(ground.closing.end_without_driver().unwrap_or(ending));
                }
            }
        }
        Received::More
    }

    /// One system call, and what follows from it.
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

    /// Payload bytes into the granted memory, and the next header behind them, if it is there, into its place.
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
        // Counted in for this one system call only: the grant may end before the next one.
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
                // What nobody asked for comes from a broken peer; so does an answer inside a logical write.
                let expected = ground.reads.expected(&answer).filter(|_| self.carried.is_none());
                let Expected { target, offset } = expected.ok_or_else(malformed)?;
                Landing::new(target, offset, body)
            }
        };
        self.landing = Some(landing);
        if body.length() == 0 { self.end_frame(ground) } else { Ok(()) }
    }

    /// Answers a read of the peer, with what it may see.
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
        self.spoke = true;
        Ok(())
    }

    /// Changes whenever bytes, or the end, were found.
    pub(super) fn finds(&self) -> u64 {
        self.finds
    }

    /// Whether something was posted since this was last asked.
    pub(super) fn spoke(&mut self) -> bool {
        std::mem::take(&mut self.spoke)
    }

    /// All payload bytes of the frame are there. If it was the last one, so is its range.
    fn end_frame(&mut self, ground: Ground<'_>) -> Result<(), End> {
        let Some(landing) = self.landing.take_if(|landing| landing.frame.is_last()) else { return Ok(()) };
        let write = match landing.frame {
            Body::Write(write) => write,
            Body::Answer(_) => {
                ground.reads.answered(ground.core);
                self.spoke |= ground.reads.ask(ground.sender);
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
            // Nobody would be told of its end: ranges of such a write are writes of their own.
            Ending::Plain if carried.is_some() => return Err(End::violation(PeerViolation::Malformed)),
            Ending::Plain => {}
        }
        Ok(())
    }
}

/// The checks of a NIC, for the whole range, before a byte of it is read.
fn begin_write(frame: WriteFrame, table: &RegionTable) -> Result<Landing, PeerViolation> {
    let target = match frame.range.length {
        // As on a NIC, a write of no bytes names no memory.
        0 => None,
        _ => Some(table.write_target(&frame.range, frame.key.0)?.0),
    };
    Ok(Landing::new(target, 0, Body::Write(frame)))
}

/// What a system call gave.
#[derive(Debug, Clone, Copy)]
struct Step {
    bytes: usize,
    /// The socket has nothing more now: it would block, or, not encrypted, gave less than was asked for.
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
