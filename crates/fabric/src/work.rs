//! Work requests, which a queue pair posts, and arrivals, which it receives.

use std::sync::Arc;

use tensorwire_memory::Buf;

use crate::{FabricError, FabricKind, ReadDestination, RemoteRange};

/// The 32-bit value that travels with a write and tells the target what landed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Immediate(pub u32);

/// One contiguous part of a vectored write.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The bytes.
    pub local: Buf,
    /// Destination of the bytes; as long as `local`.
    pub remote: RemoteRange,
}

/// One contiguous part of a vectored read.
#[derive(Debug, Clone)]
pub struct ReadSegment {
    /// Where the bytes are.
    pub remote: RemoteRange,
    /// Destination of the bytes; as long as `remote`.
    pub into: ReadDestination,
}

/// One part of a read. See [`WorkRequest::reads`].
#[derive(Debug, Clone, Copy)]
pub struct ReadPart<'request> {
    /// Where the bytes are.
    pub remote: &'request RemoteRange,
    /// Where they go.
    pub into: &'request ReadDestination,
    /// This is the last part.
    pub is_last: bool,
}

impl WorkRequest {
    /// The error for an operation that the fabric's [`Capabilities`](crate::Capabilities) rule out. A queue pair
    /// refuses such an operation before the fabric gets it.
    pub fn unsupported(&self, kind: FabricKind) -> FabricError {
        let what = match self {
            Self::Write { .. } => "write",
            Self::WriteVectored { .. } => "write many ranges at once",
            Self::Lend { .. } => "lend memory without a copy",
            Self::Read { .. } => "read the peer's memory",
            Self::ReadVectored { .. } => "read many ranges at once",
        };
        FabricError::Unsupported { kind, what }
    }
}

/// One operation for a queue pair. Owns its local bytes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum WorkRequest {
    /// A one-sided write of `local` to `remote`, with a notification if `immediate` is given. It is one
    /// *logical* write: the fabric may split it, and the immediate arrives after all of its bytes.
    Write {
        /// The bytes.
        local: Buf,
        /// Where they go; `None` (with an empty `local`) for a notification without bytes.
        remote: Option<RemoteRange>,
        /// The value that the target gets with the notification.
        immediate: Option<Immediate>,
    },
    /// Many ranges, one completion, one notification: one logical write like [`Write`](Self::Write). The notification's
    /// length is the sum over all segments.
    WriteVectored {
        /// The parts, in the order they are written.
        segments: Arc<[Segment]>,
        /// The value that the target gets with the notification.
        immediate: Option<Immediate>,
    },
    /// Hands `local` to the peer without a copy: the peer gets a read-only view of the bytes under a lease
    /// ([`Arrival::Loan`]). Completes when the peer has the view; the bytes stay alive and unchanged until the lease
    /// ends. Needs [`Capabilities::lend`](crate::Capabilities::lend).
    Lend {
        /// The bytes; not empty.
        local: Buf,
        /// The value that the target gets with the notification.
        immediate: Immediate,
    },
    /// A one-sided read of `remote`, whose bytes the peer must have [exposed](tensorwire_memory::Buf::expose) in a
    /// region with the read right. The peer is not notified. Needs [`Capabilities::read`](crate::Capabilities::read).
    Read {
        /// Where the bytes are.
        remote: RemoteRange,
        /// Destination of the bytes; as long as `remote`.
        into: ReadDestination,
    },
    /// Many reads, one completion. Needs [`Capabilities::read`](crate::Capabilities::read).
    ReadVectored {
        /// The parts, in the order in which the peer is asked for them.
        segments: Arc<[ReadSegment]>,
    },
}

impl WorkRequest {
    /// The value that the target gets with the notification, if the operation notifies it.
    pub fn immediate(&self) -> Option<Immediate> {
        match self {
            Self::Write { immediate, .. } | Self::WriteVectored { immediate, .. } => *immediate,
            Self::Lend { immediate, .. } => Some(*immediate),
            Self::Read { .. } | Self::ReadVectored { .. } => None,
        }
    }

    /// Payload bytes of the operation.
    pub fn length(&self) -> u64 {
        match self {
            Self::Write { local, .. } | Self::Lend { local, .. } => local.len() as u64,
            Self::WriteVectored { segments, .. } => {
                segments.iter().map(|segment| segment.local.len() as u64).sum()
            }
            Self::Read { into, .. } => into.length(),
            Self::ReadVectored { segments } => segments.iter().map(|segment| segment.into.length()).sum(),
        }
    }

    /// The operation's weight in the send queue: how many work requests it takes on a fabric that splits after
    /// `piece_bytes_max` bytes. At least one.
    pub fn weight(&self, piece_bytes_max: u64) -> u64 {
        let pieces = |length: u64| length.div_ceil(piece_bytes_max.max(1)).max(1);
        match self {
            Self::Write { local, .. } => pieces(local.len() as u64),
            Self::WriteVectored { segments, .. } => {
                segments.iter().map(|segment| pieces(segment.local.len() as u64)).sum::<u64>().max(1)
            }
            Self::Lend { .. } => 1,
            Self::Read { into, .. } => pieces(into.length()),
            Self::ReadVectored { segments } => {
                segments.iter().map(|segment| pieces(segment.into.length())).sum::<u64>().max(1)
            }
        }
    }

    /// The parts of a read, in the order a fabric asks for them; none for other operations. A vectored read without
    /// segments has none either: it is posted as its one empty [piece](Self::pieces).
    pub fn reads(&self) -> impl Iterator<Item = ReadPart<'_>> {
        let (one, many) = match self {
            Self::Read { remote, into } => (Some((remote, into)), &[][..]),
            Self::ReadVectored { segments } => (None, &segments[..]),
            _ => (None, &[][..]),
        };
        let count = usize::from(one.is_some()) + many.len();
        let all = one.into_iter().chain(many.iter().map(|segment| (&segment.remote, &segment.into)));
        all.zip(1..).map(move |((remote, into), nth)| ReadPart { remote, into, is_last: nth == count })
    }

    /// The pieces of a write, in the order a fabric posts them; none for other operations. Only the last piece carries
    /// the immediate. A vectored write or read without segments has one piece, which moves nothing.
    pub fn pieces(&self, piece_bytes_max: u64) -> Pieces<'_> {
        let (parts, immediate) = match self {
            Self::Write { local, remote, immediate } => (Parts::One(Some((local, *remote))), *immediate),
            // Without segments it is only a notification.
            Self::WriteVectored { segments, immediate } if segments.is_empty() => (Parts::Bare, *immediate),
            Self::WriteVectored { segments, immediate } => (Parts::Many(segments), *immediate),
            Self::ReadVectored { segments } if segments.is_empty() => (Parts::Bare, None),
            Self::Lend { .. } | Self::Read { .. } | Self::ReadVectored { .. } => (Parts::One(None), None),
        };
        Pieces { parts, immediate, offset: 0, piece_bytes_max: piece_bytes_max.max(1) }
    }
}

/// One piece of a logical write: what a fabric posts as one work request.
#[derive(Debug, Clone)]
pub struct Piece {
    /// The bytes.
    pub local: Buf,
    /// Where they go; `None` for a notification without bytes.
    pub remote: Option<RemoteRange>,
    /// The value that the target gets with the notification; only the last piece has one.
    pub immediate: Option<Immediate>,
    /// This is the last piece.
    pub is_last: bool,
}

#[derive(Debug, Clone)]
enum Parts<'request> {
    Bare,
    One(Option<(&'request Buf, Option<RemoteRange>)>),
    Many(&'request [Segment]),
}

/// The pieces of a logical write. See [`WorkRequest::pieces`].
#[derive(Debug, Clone)]
pub struct Pieces<'request> {
    parts: Parts<'request>,
    immediate: Option<Immediate>,
    /// Where the next piece starts in the first of `parts`.
    offset: u64,
    piece_bytes_max: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let (local, remote) = match &self.parts {
            Parts::Bare => {
                self.parts = Parts::One(None);
                let immediate = self.immediate;
                return Some(Piece { local: Buf::empty(), remote: None, immediate, is_last: true });
            }
            Parts::One(part) => (*part)?,
            Parts::Many(segments) => segments.first().map(|first| (&first.local, Some(first.remote)))?,
        };
        let rest = (local.len() as u64).saturating_sub(self.offset);
        let length = rest.min(self.piece_bytes_max);
        let remote = remote.map(|range| RemoteRange {
            offset: range.offset.saturating_add(self.offset),
            // If `local` and `remote` differ in length, the last piece keeps the difference: a later check refuses it.
            length: if rest == length { range.length.saturating_sub(self.offset) } else { length },
            ..range
        });
        let start = self.offset as usize;
        let local = local.slice(start..start + length as usize)?;
        self.offset += length;
        if rest == length {
            self.offset = 0;
            self.parts = match &self.parts {
                Parts::Bare | Parts::One(_) => Parts::One(None),
                Parts::Many(segments) => Parts::Many(&segments[1..]),
            };
        }
        let is_last = matches!(self.parts, Parts::One(None) | Parts::Many([]));
        Some(Piece { local, remote, immediate: self.immediate.filter(|_| is_last), is_last })
    }
}

/// The segments of a paged write: page `n` of `local` goes to offset `pages[n]` of `region`. The block tables of
/// key-value caches are such lists of offsets. The last page may be short.
///
/// # Errors
/// [`FabricError::LengthMismatch`] when `pages` and the pages of `local` differ in number.
pub fn paged(
    local: &Buf,
    page_bytes: usize,
    region: RemoteRange,
    pages: &[u64],
) -> Result<Arc<[Segment]>, FabricError> {
    let page_bytes = page_bytes.max(1);
    let mismatch = || FabricError::LengthMismatch {
        local: local.len() as u64,
        remote: (pages.len() as u64).saturating_mul(page_bytes as u64),
    };
    if local.len().div_ceil(page_bytes) != pages.len() {
        return Err(mismatch());
    }
    let segment = |(page, &offset): (usize, &u64)| {
        let start = page * page_bytes;
        let part = local.slice(start..local.len().min(start + page_bytes))?;
        let remote = RemoteRange { offset, length: part.len() as u64, ..region };
        Some(Segment { local: part, remote })
    };
    pages.iter().enumerate().map(segment).collect::<Option<Arc<[_]>>>().ok_or_else(mismatch)
}

/// An operation of the peer that notifies this side.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Arrival {
    /// A write with immediate has landed completely, and all earlier writes of its queue pair too.
    Immediate {
        /// The value.
        immediate: Immediate,
        /// Number of bytes of the whole logical write.
        length: u64,
    },
    /// The peer lends bytes without a copy. All earlier writes of its queue pair have landed.
    Loan {
        /// The value.
        immediate: Immediate,
        /// The peer's bytes, read-only. Dropping the last clone ends the lease.
        buffer: Buf,
    },
}

impl PartialEq for Arrival {
    /// Loans are equal when their bytes are.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Immediate { immediate, length },
                Self::Immediate { immediate: other_immediate, length: other_length },
            ) => immediate == other_immediate && length == other_length,
            (
                Self::Loan { immediate, buffer },
                Self::Loan { immediate: other_immediate, buffer: other_buffer },
            ) => immediate == other_immediate && buffer[..] == other_buffer[..],
            _ => false,
        }
    }
}

impl Eq for Arrival {}

#[cfg(test)]
mod tests {
    use tensorwire_memory::{Pool, PoolConfig};

    use super::*;
    use crate::{RegionGeneration, RegionId};

    const REGION: RemoteRange =
        RemoteRange { region: RegionId(3), generation: RegionGeneration(7), offset: 100, length: 0 };

    fn buffer(length: usize) -> Buf {
        Pool::new(PoolConfig::new("test")).unwrap().try_alloc(length).unwrap().freeze()
    }

    fn write(length: usize, immediate: Option<u32>) -> WorkRequest {
        let remote = RemoteRange { length: length as u64, ..REGION };
        let immediate = immediate.map(Immediate);
        WorkRequest::Write { local: buffer(length), remote: Some(remote), immediate }
    }

    fn shape(request: &WorkRequest, limit: u64) -> Vec<(u64, u64, bool)> {
        let pieces = request.pieces(limit).map(|piece| {
            let range = piece.remote.unwrap();
            assert_eq!(piece.local.len() as u64, range.length);
            assert_eq!(piece.immediate.is_some(), piece.is_last);
            (range.offset, range.length, piece.is_last)
        });
        pieces.collect()
    }

    #[test]
    fn write_is_split_at_the_limit_and_only_the_last_piece_tells() {
        assert_eq!(shape(&write(63, Some(1)), 64), [(100, 63, true)]);
        assert_eq!(shape(&write(64, Some(1)), 64), [(100, 64, true)]);
        assert_eq!(shape(&write(65, Some(1)), 64), [(100, 64, false), (164, 1, true)]);
        assert_eq!(shape(&write(0, Some(1)), 64), [(100, 0, true)]);
        for (length, weight) in [(0, 1), (63, 1), (64, 1), (65, 2), (640, 10), (641, 11)] {
            assert_eq!(write(length, None).weight(64), weight, "{length}");
        }
    }

    #[test]
    fn vectored_write_has_the_pieces_of_every_segment() {
        let local = buffer(200);
        let segments = paged(&local, 90, REGION, &[0, 1000, 500]).unwrap();
        let request = WorkRequest::WriteVectored { segments, immediate: Some(Immediate(1)) };
        assert_eq!((request.length(), request.weight(64)), (200, 5));
        let expected =
            [(0, 64, false), (64, 26, false), (1000, 64, false), (1064, 26, false), (500, 20, true)];
        assert_eq!(shape(&request, 64), expected);
    }

    #[test]
    fn notification_is_one_piece_and_a_loan_none() {
        let notify = WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(Immediate(1)) };
        let pieces: Vec<_> = notify.pieces(64).collect();
        assert!(pieces[0].remote.is_none() && pieces[0].is_last && pieces.len() == 1);
        let lend = WorkRequest::Lend { local: buffer(1000), immediate: Immediate(1) };
        assert_eq!((lend.weight(64), lend.pieces(64).count()), (1, 0));
    }

    #[test]
    fn pages_that_do_not_match_the_buffer_are_refused() {
        let error = paged(&buffer(200), 90, REGION, &[0, 1000]).unwrap_err();
        assert!(matches!(error, FabricError::LengthMismatch { local: 200, remote: 180 }));
    }
}
