//! The stream's frames; the table is in the module's documentation.

use std::fmt;

use tensorwire_fabric::{Immediate, PeerViolation, RegionGeneration, RegionId, RemoteRange};

/// Bytes of every header.
pub(super) const HEADER_BYTES: usize = 40;

/// The most payload bytes of one frame. A goodbye or a refusal never waits for more than these.
pub(super) const BODY_BYTES_MAX: u64 = 1 << 20;

const KIND_WRITE: u8 = 1;
const KIND_WRITE_IMMEDIATE: u8 = 2;
const KIND_GOODBYE: u8 = 3;
const KIND_REFUSAL: u8 = 4;
const KIND_SEGMENT: u8 = 5;
const KIND_READ: u8 = 6;
const KIND_ANSWER: u8 = 7;

/// The most unanswered reads in each direction. A peer that requests more breaks the protocol.
pub(super) const READS_MAX: u32 = 16;

/// The most bytes of one read. A longer one is requested in parts, with other traffic between the answers.
pub(super) const READ_BYTES_MAX: u64 = 4 << 20;

/// An encoded header.
pub(super) type Header = [u8; HEADER_BYTES];

/// A region's key. `Debug` leaves it out, because keys are never logged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Key(pub(super) u32);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// A header's meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// Payload follows.
    Write(WriteFrame),
    /// Requests memory. Reads are answered in order.
    Read(ReadFrame),
    /// The bytes of a read follow.
    Answer(AnswerFrame),
    /// The orderly end of this direction.
    Goodbye,
    /// The end of the connection, because the peer broke a rule.
    Refusal(Refusal),
}

/// One frame of a logical write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WriteFrame {
    /// The target of the logical write, from this frame to its end.
    pub(super) range: RemoteRange,
    /// The region's key.
    pub(super) key: Key,
    /// Payload bytes in this frame.
    pub(super) length: u64,
    /// What follows the range's last byte. Set on its last frame only.
    pub(super) ending: Ending,
}

/// What follows a range's last byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// Nothing, or this is not the last frame.
    Plain,
    /// The target's user gets this immediate.
    Immediate(Immediate),
    /// The next range of the same logical write.
    Segment,
}

impl WriteFrame {
    /// Whether the range ends with this frame.
    pub(super) fn is_last(&self) -> bool {
        self.length == self.range.length
    }
}

/// A one-sided read of at most [`READ_BYTES_MAX`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadFrame {
    pub(super) range: RemoteRange,
    pub(super) key: Key,
    /// The answer carries the same tag.
    pub(super) tag: u32,
}

/// One frame of the answer to a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AnswerFrame {
    pub(super) tag: u32,
    /// Payload bytes in this frame.
    pub(super) length: u64,
    /// Bytes of the answer from this frame to its end.
    pub(super) rest: u64,
}

/// Why the target ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The rule that was broken.
    pub(super) reason: PeerViolation,
    /// The receive depth, when it ran out; else 0.
    pub(super) depth: u32,
}

impl Frame {
    pub(super) fn encode(&self) -> Header {
        let mut fields = Fields::default();
        match self {
            Self::Write(write) => fields.set_write(write),
            Self::Read(read) => {
                fields.kind = KIND_READ;
                fields.immediate = read.tag;
                fields.set_range(&read.range, read.key);
            }
            Self::Answer(answer) => {
                fields.kind = KIND_ANSWER;
                fields.immediate = answer.tag;
                // At most `BODY_BYTES_MAX`.
                fields.length = answer.length as u32;
                fields.rest = answer.rest;
            }
            Self::Goodbye => fields.kind = KIND_GOODBYE,
            Self::Refusal(refusal) => {
                fields.kind = KIND_REFUSAL;
                fields.reason = refusal.reason.code();
                fields.immediate = refusal.depth;
            }
        }
        fields.encode()
    }

    /// # Errors
    /// [`PeerViolation::Malformed`] for every header that [`encode`](Self::encode) does not produce.
    pub(super) fn decode(header: &Header) -> Result<Self, PeerViolation> {
        let fields = Fields::decode(header).ok_or(PeerViolation::Malformed)?;
        let frame = match fields.kind {
            KIND_WRITE | KIND_WRITE_IMMEDIATE | KIND_SEGMENT => {
                // An equivalent of the check below, because most frames are writes, and encoding them again would
                // double the cost.
                let immediate = if fields.kind == KIND_WRITE_IMMEDIATE { 0 } else { fields.immediate };
                let is_exact = header[1..4] == [0; 3] && immediate == 0;
                return fields.write().filter(|_| is_exact).ok_or(PeerViolation::Malformed);
            }
            KIND_READ => fields.read(),
            KIND_ANSWER => fields.answer(),
            KIND_GOODBYE => Some(Self::Goodbye),
            KIND_REFUSAL => PeerViolation::from_code(fields.reason)
                .map(|reason| Self::Refusal(Refusal { reason, depth: fields.immediate })),
            _ => None,
        };
        // Each meaning has exactly one encoding: fields that a kind does not use are zero.
        frame.filter(|frame| frame.encode() == *header).ok_or(PeerViolation::Malformed)
    }
}

#[derive(Default)]
struct Fields {
    kind: u8,
    reason: u8,
    region: u32,
    generation: u32,
    key: u32,
    immediate: u32,
    length: u32,
    offset: u64,
    rest: u64,
}

impl Fields {
    fn set_write(&mut self, write: &WriteFrame) {
        (self.kind, self.immediate) = match write.ending {
            Ending::Plain => (KIND_WRITE, 0),
            Ending::Immediate(Immediate(value)) => (KIND_WRITE_IMMEDIATE, value),
            Ending::Segment => (KIND_SEGMENT, 0),
        };
        // At most `BODY_BYTES_MAX`.
        self.length = write.length as u32;
        self.set_range(&write.range, write.key);
    }

    fn set_range(&mut self, range: &RemoteRange, key: Key) {
        self.region = range.region.0;
        self.generation = range.generation.0;
        self.key = key.0;
        self.offset = range.offset;
        self.rest = range.length;
    }

    fn range(&self) -> RemoteRange {
        RemoteRange {
            region: RegionId(self.region),
            generation: RegionGeneration(self.generation),
            offset: self.offset,
            length: self.rest,
        }
    }

    fn read(&self) -> Option<Frame> {
        let read = ReadFrame { range: self.range(), key: Key(self.key), tag: self.immediate };
        (self.rest <= READ_BYTES_MAX).then_some(Frame::Read(read))
    }

    fn answer(&self) -> Option<Frame> {
        let length = u64::from(self.length);
        let answer = AnswerFrame { tag: self.immediate, length, rest: self.rest };
        let fits = length <= BODY_BYTES_MAX && length <= self.rest && self.rest <= READ_BYTES_MAX;
        (fits && (length > 0 || self.rest == 0)).then_some(Frame::Answer(answer))
    }

    fn write(&self) -> Option<Frame> {
        let length = u64::from(self.length);
        let range = self.range();
        let ending = match self.kind {
            KIND_WRITE_IMMEDIATE => Ending::Immediate(Immediate(self.immediate)),
            KIND_SEGMENT => Ending::Segment,
            _ => Ending::Plain,
        };
        let write = WriteFrame { range, key: Key(self.key), length, ending };
        let fits = length <= BODY_BYTES_MAX && length <= self.rest;
        // Refuses an empty frame that promises more: a peer could keep this side busy without progress.
        let advances = length > 0 || self.rest == 0;
        let ends = write.is_last() || ending == Ending::Plain;
        (fits && advances && ends).then_some(Frame::Write(write))
    }

    fn encode(&self) -> Header {
        let mut header = [0; HEADER_BYTES];
        header[0] = self.kind;
        header[1] = self.reason;
        header[4..8].copy_from_slice(&self.region.to_le_bytes());
        header[8..12].copy_from_slice(&self.generation.to_le_bytes());
        header[12..16].copy_from_slice(&self.key.to_le_bytes());
        header[16..20].copy_from_slice(&self.immediate.to_le_bytes());
        header[20..24].copy_from_slice(&self.length.to_le_bytes());
        header[24..32].copy_from_slice(&self.offset.to_le_bytes());
        header[32..40].copy_from_slice(&self.rest.to_le_bytes());
        header
    }

    fn decode(header: &Header) -> Option<Self> {
        let mut rest = header.as_slice();
        let [kind, reason] = take(&mut rest)?;
        let [_, _] = take(&mut rest)?;
        Some(Self {
            kind,
            reason,
            region: u32::from_le_bytes(take(&mut rest)?),
            generation: u32::from_le_bytes(take(&mut rest)?),
            key: u32::from_le_bytes(take(&mut rest)?),
            immediate: u32::from_le_bytes(take(&mut rest)?),
            length: u32::from_le_bytes(take(&mut rest)?),
            offset: u64::from_le_bytes(take(&mut rest)?),
            rest: u64::from_le_bytes(take(&mut rest)?),
        })
    }
}

/// The next `N` bytes, if there are as many.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = bytes.split_first_chunk::<N>()?;
    *bytes = tail;
    Some(*head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(length: u64, rest: u64, immediate: Option<u32>) -> Frame {
        let ending = immediate.map_or(Ending::Plain, |value| Ending::Immediate(Immediate(value)));
        write_frame(length, rest, ending)
    }

    fn read(length: u64) -> Frame {
        let Frame::Write(WriteFrame { range, key, .. }) = write(0, length, None) else { unreachable!() };
        Frame::Read(ReadFrame { range, key, tag: 0x0A0B_0C0D })
    }

    fn write_frame(length: u64, rest: u64, ending: Ending) -> Frame {
        let range = RemoteRange {
            region: RegionId(7),
            generation: RegionGeneration(0xA1B2_C3D4),
            offset: 0x0102_0304_0506_0708,
            length: rest,
        };
        Frame::Write(WriteFrame { range, key: Key(0xFEED_F00D), length, ending })
    }

    #[test]
    fn every_frame_survives_the_wire() {
        let mut frames = vec![
            write(0, 0, None),
            write(0, 0, Some(9)),
            write(5, 5, Some(u32::MAX)),
            write(BODY_BYTES_MAX, u64::MAX, None),
            write(BODY_BYTES_MAX, BODY_BYTES_MAX, Some(0)),
            write_frame(0, 0, Ending::Segment),
            write_frame(9, 9, Ending::Segment),
            Frame::Goodbye,
            read(0),
            read(READ_BYTES_MAX),
            Frame::Answer(AnswerFrame { tag: 7, length: 0, rest: 0 }),
            Frame::Answer(AnswerFrame { tag: 7, length: BODY_BYTES_MAX, rest: READ_BYTES_MAX }),
        ];
        frames.extend(PeerViolation::ALL.map(|reason| Frame::Refusal(Refusal { reason, depth: 3 })));
        for frame in frames {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
    }

    #[test]
    fn impossible_frames_are_malformed() {
        let impossible = [
            write(BODY_BYTES_MAX + 1, u64::MAX, None).encode(),
            write(2, 1, None).encode(),
            write(0, 1, None).encode(),
            write(1, 2, Some(1)).encode(),
            write_frame(1, 2, Ending::Segment).encode(),
            read(READ_BYTES_MAX + 1).encode(),
            Frame::Answer(AnswerFrame { tag: 1, length: 0, rest: 1 }).encode(),
            Frame::Answer(AnswerFrame { tag: 1, length: 2, rest: 1 }).encode(),
            Frame::Answer(AnswerFrame { tag: 1, length: 1, rest: READ_BYTES_MAX + 1 }).encode(),
            [0; HEADER_BYTES],
            [0xFF; HEADER_BYTES],
        ];
        for header in impossible {
            assert_eq!(Frame::decode(&header), Err(PeerViolation::Malformed), "{header:?}");
        }
    }

    #[test]
    fn a_bit_in_an_unused_field_is_malformed() {
        let unused = [
            (Frame::Goodbye, 1..HEADER_BYTES),
            (write(1, 1, None), 1..4),
            (read(1), 1..4),
            (read(1), 20..24),
            (Frame::Answer(AnswerFrame { tag: 1, length: 1, rest: 1 }), 1..16),
            (Frame::Answer(AnswerFrame { tag: 1, length: 1, rest: 1 }), 24..32),
            (write(1, 1, None), 16..20),
            (write_frame(1, 1, Ending::Segment), 16..20),
            (Frame::Refusal(Refusal { reason: PeerViolation::NotGranted, depth: 0 }), 20..HEADER_BYTES),
        ];
        for (frame, bytes) in unused {
            for index in bytes {
                let mut header = frame.encode();
                header[index] ^= 0x40;
                assert_eq!(Frame::decode(&header), Err(PeerViolation::Malformed), "{frame:?} byte {index}");
            }
        }
    }

    #[test]
    fn keys_are_not_printed() {
        let shown = format!("{:?}", write(1, 1, None));
        assert!(!shown.contains(&0xFEED_F00D_u32.to_string()), "{shown}");
    }
}
