//! The encoding of frames, which precede contents, and of receipts.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

/// The length of an encoded [`Frame`].
pub(super) const FRAME_BYTES: usize = size_of::<Encoded>();

/// The length of an encoded receipt.
pub(super) const RECEIPT_BYTES: usize = size_of::<Encoded>();

/// The first bytes of a frame or receipt. They change with the format.
const MAGIC: u32 = 0x5457_5002;

/// The first bytes of a write. They change with its format.
const PUT_MAGIC: u64 = 0x5457_5003;

/// A queue of messages of one kind to one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    /// Messages with this tag.
    Tag(u64),
    /// Messages of the buffers of this slot.
    Slot(u64),
}

impl Lane {
    /// The key of its messages.
    pub(super) fn key(self) -> String {
        match self {
            Self::Tag(tag) => format!("tag {tag:x}"),
            Self::Slot(slot) => format!("slot {slot:x}"),
        }
    }
}

/// What a rank did with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Receipt {
    /// It has received it.
    Taken,
    /// The message exceeds its destination, which has this many bytes.
    Outside(u64),
    /// The destination was dropped.
    Gone,
}

/// The frame before the content of a message to a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// For a receive buffer, at the offset `at`. The send buffer has `whole` bytes.
    Content { at: u64, whole: u64 },
    /// The send buffer was dropped.
    End,
}

pub(super) fn encode_receipt(lane: Lane, receipt: Receipt) -> [u8; RECEIPT_BYTES] {
    let (kind, number) = match lane {
        Lane::Tag(tag) => (1, tag),
        Lane::Slot(slot) => (2, slot),
    };
    let (code, bytes) = match receipt {
        Receipt::Taken => (1, 0),
        Receipt::Outside(bytes) => (2, bytes),
        Receipt::Gone => (3, 0),
    };
    encode(kind << 8 | code, number, bytes)
}

/// `None` if it is of another version or invalid.
pub(super) fn decode_receipt(bytes: &[u8]) -> Option<(Lane, Receipt)> {
    let (kind, number, length) = decode(bytes)?;
    let lane = match kind >> 8 {
        1 => Lane::Tag(number),
        2 => Lane::Slot(number),
        _ => return None,
    };
    let receipt = match kind & 0xff {
        1 => Receipt::Taken,
        2 => Receipt::Outside(length),
        3 => Receipt::Gone,
        _ => return None,
    };
    Some((lane, receipt))
}

impl Frame {
    pub(super) fn encode(self) -> [u8; FRAME_BYTES] {
        match self {
            Self::Content { at, whole } => encode(1, at, whole),
            Self::End => encode(2, 0, 0),
        }
    }

    /// The frame and the content after it. `None` if it is of another version or invalid.
    pub(super) fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (frame, content) = bytes.split_at_checked(FRAME_BYTES)?;
        let frame = match decode(frame)? {
            (1, at, whole) => Self::Content { at, whole },
            (2, 0, 0) => Self::End,
            _ => return None,
        };
        Some((frame, content))
    }
}

/// A write to an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Put {
    /// The number of the export.
    pub(super) export: u64,
    /// Where the content begins in it.
    pub(super) at: u64,
    /// Later writes of a rank have higher ones.
    pub(super) number: u64,
    /// The bytes of the content.
    pub(super) length: u64,
    /// The number under which the writer has published the content; 0 if the content follows.
    pub(super) source: u64,
}

impl Put {
    pub(super) fn encode(self) -> [u8; size_of::<EncodedPut>()] {
        let Self { export, at, number, length, source } = self;
        let numbers = [export, at, number, length, source].map(U64::new);
        zerocopy::transmute!(EncodedPut { magic: PUT_MAGIC.into(), numbers })
    }

    /// The write, and the content after it. `None` if it is of another version or invalid.
    pub(super) fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (EncodedPut { magic, numbers }, content) = EncodedPut::ref_from_prefix(bytes).ok()?;
        let [export, at, number, length, source] = numbers.map(U64::get);
        let put = Self { export, at, number, length, source };
        let follows = if source == 0 { length } else { 0 };
        (*magic == PUT_MAGIC && content.len() as u64 == follows).then_some((put, content))
    }
}

/// An encoded write.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct EncodedPut {
    magic: U64,
    numbers: [U64; 5],
}

/// An encoded frame or receipt.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Encoded {
    magic: U32,
    kind: U32,
    first: U64,
    second: U64,
}

fn encode(kind: u32, first: u64, second: u64) -> [u8; size_of::<Encoded>()] {
    let encoded =
        Encoded { magic: MAGIC.into(), kind: kind.into(), first: first.into(), second: second.into() };
    zerocopy::transmute!(encoded)
}

fn decode(bytes: &[u8]) -> Option<(u32, u64, u64)> {
    let encoded = Encoded::ref_from_bytes(bytes).ok().filter(|encoded| encoded.magic == MAGIC)?;
    Some((encoded.kind.get(), encoded.first.get(), encoded.second.get()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receipts_and_frames_survive_their_encoding() {
        for lane in [Lane::Tag(u64::MAX), Lane::Slot(7)] {
            for receipt in [Receipt::Taken, Receipt::Outside(u64::MAX), Receipt::Gone] {
                assert_eq!(decode_receipt(&encode_receipt(lane, receipt)), Some((lane, receipt)));
            }
        }
        for frame in [Frame::Content { at: 1, whole: u64::MAX }, Frame::End] {
            let mut bytes = frame.encode().to_vec();
            bytes.extend([5, 6]);
            assert_eq!(Frame::decode(&bytes), Some((frame, &[5, 6][..])));
        }
        let put = Put { export: 3, at: u64::MAX, number: 9, length: 2, source: 0 };
        let elsewhere = Put { source: 7, ..put };
        for (put, content) in [(put, &[5, 6][..]), (elsewhere, &[])] {
            let bytes = [&put.encode()[..], content].concat();
            assert_eq!(Put::decode(&bytes), Some((put, content)));
            assert_eq!(Put::decode(&[&bytes[..], &[1]].concat()), None, "content of another length");
        }
    }

    #[test]
    fn what_is_none_of_them_is_refused() {
        let frame = Frame::End.encode();
        assert_eq!(Frame::decode(&frame[..FRAME_BYTES - 1]), None);
        assert_eq!(decode_receipt(&frame), None);
        assert_eq!(Put::decode(&[0; 64]), None);
        for at in [0, 4, 5, 8] {
            let mut bytes = frame;
            bytes[at] ^= 0x80;
            assert_eq!(Frame::decode(&bytes), None, "byte {at}");
        }
    }
}
