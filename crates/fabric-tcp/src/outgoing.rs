//! Queued writes, requests and answers, and their frames.
//!
//! The progress of the front of a queue is one number: the position in its encoded form (headers and bodies). Headers
//! are encoded again from it, so the sender needs no buffer.

use std::collections::{VecDeque, vec_deque};

use tensorwire_fabric::{RegionGeneration, RegionId, RemoteRange, RemoteRegion, SlotKey};
use tensorwire_memory::Buf;

use crate::frame::{
    AnswerFrame, BODY_BYTES_MAX, Ending, Frame, HEADER_BYTES, Header, Key, ReadFrame, WriteFrame,
};

/// A whole frame in its encoded form.
pub(super) const FRAME_BYTES: u64 = HEADER_BYTES as u64 + BODY_BYTES_MAX;

/// The range of a write of no bytes.
const NOWHERE: RemoteRange =
    RemoteRange { region: RegionId(0), generation: RegionGeneration(0), offset: 0, length: 0 };

/// The range and key on the wire of a write of `bytes` bytes to `range` of `region`. A write of no bytes names no
/// region.
pub(super) fn on_the_wire(
    bytes: u64,
    range: Option<&RemoteRange>,
    region: Option<RemoteRegion>,
) -> (RemoteRange, Key) {
    match (range, region) {
        (Some(range), Some(region)) if bytes > 0 => (*range, Key(region.key)),
        _ => (NOWHERE, Key(0)),
    }
}

/// An item to send, as frames that continue each other.
#[derive(Debug)]
pub(super) struct Outgoing {
    local: Buf,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Write {
        operation: Part,
        range: RemoteRange,
        remote_key: Key,
        ending: Ending,
    },
    Request(ReadFrame),
    Answer {
        tag: u32,
    },
    /// Small writes with their headers. They were complete when they were posted.
    Copied(Vec<u8>),
}

/// An item as a part of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) key: SlotKey,
    /// Payload bytes of the whole operation.
    pub(super) bytes: u64,
    /// Whether it is the last part of the operation.
    pub(super) is_last: bool,
}

impl Outgoing {
    /// One range of a logical write, checked and resolved.
    pub(super) fn write(
        operation: Part,
        local: Buf,
        range: RemoteRange,
        remote_key: Key,
        ending: Ending,
    ) -> Self {
        Self { local, form: Form::Write { operation, range, remote_key, ending } }
    }

    /// A request for memory of the peer.
    pub(super) fn request(read: ReadFrame) -> Self {
        Self { local: Buf::empty(), form: Form::Request(read) }
    }

    /// The answer to a read of the peer.
    pub(super) fn answer(tag: u32, local: Buf) -> Self {
        Self { local, form: Form::Answer { tag } }
    }

    /// Small writes, copied to `bytes` in their encoded form.
    pub(super) fn copied(bytes: Vec<u8>) -> Self {
        Self { local: Buf::empty(), form: Form::Copied(bytes) }
    }

    /// The copied writes, if it consists of these.
    pub(super) fn copies(&mut self) -> Option<&mut Vec<u8>> {
        match &mut self.form {
            Form::Copied(bytes) => Some(bytes),
            Form::Write { .. } | Form::Request(_) | Form::Answer { .. } => None,
        }
    }

    /// The operation that it is a part of. `None` for everything but writes, and for writes that were copied.
    pub(super) fn operation(&self) -> Option<Part> {
        match self.form {
            Form::Write { operation, .. } => Some(operation),
            Form::Request(_) | Form::Answer { .. } | Form::Copied(_) => None,
        }
    }

    pub(super) fn is_answer(&self) -> bool {
        matches!(self.form, Form::Answer { .. })
    }

    /// The header of the frame of `length` bytes at `start`.
    fn header(&self, start: u64, length: u64) -> Header {
        let rest = self.length() - start;
        let frame = match &self.form {
            Form::Write { range, remote_key, ending, .. } => {
                let range = RemoteRange { offset: range.offset + start, length: rest, ..*range };
                let ending = if length == rest { *ending } else { Ending::Plain };
                Frame::Write(WriteFrame { range, key: *remote_key, length, ending })
            }
            Form::Request(read) => Frame::Read(*read),
            Form::Answer { tag } => Frame::Answer(AnswerFrame { tag: *tag, length, rest }),
            Form::Copied(_) => return [0; HEADER_BYTES],
        };
        frame.encode()
    }

    /// Payload bytes; for copied writes, encoded bytes.
    pub(super) fn length(&self) -> u64 {
        self.local.len() as u64
    }

    /// Bytes of all its frames.
    pub(super) fn encoded_length(&self) -> u64 {
        if let Form::Copied(bytes) = &self.form {
            return bytes.len() as u64;
        }
        let frames = self.length().div_ceil(BODY_BYTES_MAX).max(1);
        self.length() + frames * HEADER_BYTES as u64
    }

    /// The rest, from `position` of the encoded form on, of the frame that contains it.
    pub(super) fn piece(&self, position: u64) -> Piece<'_> {
        if let Form::Copied(bytes) = &self.form {
            let body = &bytes[position as usize..];
            return Piece { header: [0; HEADER_BYTES], header_sent: HEADER_BYTES, body };
        }
        let start = position / FRAME_BYTES * BODY_BYTES_MAX;
        let length = (self.length() - start).min(BODY_BYTES_MAX);
        let header = self.header(start, length);
        // Less than one frame, so it fits.
        let sent = (position % FRAME_BYTES) as usize;
        let body = (start as usize) + sent.saturating_sub(HEADER_BYTES)..(start + length) as usize;
        Piece { header, header_sent: sent.min(HEADER_BYTES), body: &self.local[body] }
    }
}

/// The rest of one frame.
#[derive(Debug)]
pub(super) struct Piece<'write> {
    pub(super) header: Header,
    pub(super) header_sent: usize,
    pub(super) body: &'write [u8],
}

impl Piece<'_> {
    pub(super) fn length(&self) -> usize {
        HEADER_BYTES - self.header_sent + self.body.len()
    }
}

/// The pieces of a queue whose front item is sent up to `position`.
pub(super) struct Pieces<'queue> {
    writes: vec_deque::Iter<'queue, Outgoing>,
    current: Option<&'queue Outgoing>,
    position: u64,
}

impl<'queue> Pieces<'queue> {
    pub(super) fn new(queue: &'queue VecDeque<Outgoing>, position: u64) -> Self {
        let mut writes = queue.iter();
        let current = writes.next();
        Self { writes, current, position }
    }
}

impl<'queue> Iterator for Pieces<'queue> {
    type Item = Piece<'queue>;

    fn next(&mut self) -> Option<Piece<'queue>> {
        let write = self.current?;
        let piece = write.piece(self.position);
        self.position += piece.length() as u64;
        if self.position == write.encoded_length() {
            self.current = self.writes.next();
            self.position = 0;
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_memory::{Pool, PoolConfig};

    use super::*;
    use tensorwire_fabric::Immediate;

    const RANGE: RemoteRange =
        RemoteRange { region: RegionId(1), generation: RegionGeneration(2), offset: 100, length: 0 };

    fn write(length: usize) -> Outgoing {
        let pool = Pool::new(PoolConfig { block_bytes: 4096, ..PoolConfig::new("source") }).unwrap();
        let mut local = pool.try_alloc(length).unwrap();
        for (index, byte) in local.iter_mut().enumerate() {
            *byte = (index * 7 + index / 251) as u8;
        }
        let (key, range) = (SlotKey::from_bits(0), RemoteRange { length: length as u64, ..RANGE });
        let operation = Part { key, bytes: length as u64, is_last: true };
        let ending = Ending::Immediate(Immediate(4));
        Outgoing::write(operation, local.freeze(), range, Key(3), ending)
    }

    /// The frames of `write`, encoded in the plain way.
    fn encoding(write: &Outgoing) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut bodies: Vec<_> = write.local.chunks(BODY_BYTES_MAX as usize).collect();
        if bodies.is_empty() {
            bodies.push(&[]);
        }
        let mut start = 0;
        for (index, body) in bodies.iter().enumerate() {
            let rest = write.local.len() as u64 - start;
            let range = RemoteRange { offset: 100 + start, length: rest, ..RANGE };
            let last = index + 1 == bodies.len();
            let ending = if last { Ending::Immediate(Immediate(4)) } else { Ending::Plain };
            let frame = WriteFrame { range, key: Key(3), length: body.len() as u64, ending };
            bytes.extend(Frame::Write(frame).encode());
            bytes.extend_from_slice(body);
            start += body.len() as u64;
        }
        bytes
    }

    #[test]
    fn a_write_can_go_on_from_every_position() {
        let max = BODY_BYTES_MAX as usize;
        for length in [0, 1, max - 1, max, max + 1, 2 * max, 2 * max + 77] {
            let write = write(length);
            let whole = encoding(&write);
            assert_eq!(write.encoded_length(), whole.len() as u64);
            let frame = FRAME_BYTES as usize;
            let near = |boundary: usize| boundary.saturating_sub(2)..boundary + HEADER_BYTES + 3;
            let positions = [0, frame, 2 * frame].into_iter().flat_map(near);
            for position in positions.filter(|&position| position < whole.len()) {
                let piece = write.piece(position as u64);
                let rest = [&piece.header[piece.header_sent..], piece.body].concat();
                assert_eq!(rest.len(), piece.length());
                assert!(whole[position..].starts_with(&rest), "{length} bytes at {position}");
                let end = position + rest.len();
                assert!(end == whole.len() || end % frame == 0, "{length} bytes at {position}");
            }
        }
    }

    #[test]
    fn pieces_of_a_queue_are_its_encoding() {
        let queue: VecDeque<_> = [5, 0, BODY_BYTES_MAX as usize + 3, 9].map(write).into();
        let whole: Vec<u8> = queue.iter().flat_map(encoding).collect();
        for position in [0, 1, 40, 44] {
            let pieces = Pieces::new(&queue, position)
                .flat_map(|piece| [&piece.header[piece.header_sent..], piece.body].concat());
            assert!(pieces.eq(whole[position as usize..].iter().copied()), "from {position}");
        }
    }
}
