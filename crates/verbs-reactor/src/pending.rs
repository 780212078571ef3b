//! Ranges of operations that are not completely posted, and the work requests that they become.

use std::fmt;

use tensorwire_fabric::SlotKey;

use super::{
    doorbell::{Direction, Doorbell, LocalRange, Part, Request, Transfer, Work},
    message::Message,
};

/// The limits of one work request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestLimits {
    /// Bytes.
    pub(super) piece_bytes: u32,
    /// Local ranges of a write.
    pub(super) ranges: usize,
    /// Local ranges of a read: some devices scatter to fewer ranges than they gather from, or to only one.
    pub(super) read_ranges: usize,
}

impl RequestLimits {
    fn ranges(&self, direction: Direction) -> usize {
        match direction {
            Direction::Write => self.ranges,
            Direction::Read => self.read_ranges,
        }
    }
}

/// A contiguous remote range of an operation that is not completely posted yet. It is posted in steps, each of which is
/// one work request: the pieces and, before the last piece of a write with immediate, messages that carry the number of
/// bytes before that piece.
///
/// The local bytes lie in one range of any length, or in several that fit one work request.
pub(super) struct Pending {
    pub(super) key: SlotKey,
    pub(super) direction: Direction,
    pub(super) local: LocalRange,
    /// Local ranges after the first.
    pub(super) gathered: Vec<LocalRange>,
    pub(super) remote: u64,
    pub(super) remote_key: u32,
    /// Bytes of all local ranges together.
    pub(super) length: u64,
    pub(super) immediate: Option<u32>,
    /// Bytes of the operation before this range.
    pub(super) earlier: u64,
    /// Whether this is the operation's last range.
    pub(super) is_last: bool,
    /// How many steps are posted already.
    pub(super) posted: u64,
}

// Without the key: keys are never logged.
impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("key", &self.key)
            .field("direction", &self.direction)
            .field("local", &self.local)
            .field("gathered", &self.gathered)
            .field("remote", &self.remote)
            .field("length", &self.length)
            .field("immediate", &self.immediate)
            .field("earlier", &self.earlier)
            .field("is_last", &self.is_last)
            .field("posted", &self.posted)
            .finish_non_exhaustive()
    }
}

impl Pending {
    /// Merges `next`, the operation's next range, into this one. Returns it if one work request cannot hold both.
    pub(super) fn gather(&mut self, next: Self, limits: &RequestLimits) -> Option<Self> {
        let (is_last, immediate) = (next.is_last, next.immediate);
        if self.length == 0 {
            *self = next;
        } else if next.length > 0 {
            let is_adjacent =
                self.remote_key == next.remote_key && self.remote.wrapping_add(self.length) == next.remote;
            let fits = self.length + next.length <= u64::from(limits.piece_bytes)
                && self.gathered.len() + 1 < limits.ranges(self.direction);
            if !is_adjacent || !fits {
                return Some(next);
            }
            self.length += next.length;
            self.gathered.push(next.local);
        }
        (self.is_last, self.immediate) = (is_last, immediate);
        None
    }

    fn pieces(&self, piece_bytes: u32) -> u64 {
        if self.length <= u64::from(piece_bytes) { 1 } else { self.length.div_ceil(u64::from(piece_bytes)) }
    }

    /// The messages that carry the number of bytes before the last piece; none without an immediate.
    fn extents(&self, piece_bytes: u32) -> impl Iterator<Item = Message> {
        let before = self.earlier + (self.pieces(piece_bytes) - 1) * u64::from(piece_bytes);
        let announced = if self.immediate.is_some() { before } else { 0 };
        let pieces = u32::try_from(announced / u64::from(piece_bytes)).unwrap_or(u32::MAX);
        // The residue is less than a piece, so it fits.
        let residue = (announced % u64::from(piece_bytes)) as u32;
        let extent = (pieces > 0).then_some(Message::Extent(pieces));
        extent.into_iter().chain((residue > 0).then_some(Message::Residue(residue)))
    }

    /// How many steps this range takes.
    pub(super) fn steps(&self, piece_bytes: u32) -> u64 {
        // The common case, without a division: this is called several times for each request.
        if self.earlier == 0 && self.length <= u64::from(piece_bytes) {
            return 1;
        }
        self.pieces(piece_bytes) + self.extents(piece_bytes).count() as u64
    }

    /// Adds a step to `doorbell`, if it has room.
    pub(super) fn step(&self, step: u64, piece_bytes: u32, doorbell: &mut Doorbell) -> bool {
        let (pieces, steps) = (self.pieces(piece_bytes), self.steps(piece_bytes));
        let last = step + 1 == steps;
        if !last && step + 1 >= pieces {
            // A range has at most two messages.
            let message = self.extents(piece_bytes).nth((step + 1 - pieces) as usize);
            let work = Work::Message(message.unwrap_or(Message::Extent(0)));
            return doorbell.push(Request { work, part: Part::Piece, is_signaled: false }, &[]);
        }
        let from = if last { pieces - 1 } else { step } * u64::from(piece_bytes);
        let length = (self.length - from).min(u64::from(piece_bytes));
        let transfer = Transfer {
            direction: self.direction,
            length,
            // The base comes from the peer, so the sum may wrap. The device refuses an address outside the region.
            remote: self.remote.wrapping_add(from),
            remote_key: self.remote_key,
            immediate: self.immediate.filter(|_| last),
        };
        let part = if last && self.is_last {
            Part::End { key: self.key, bytes: self.earlier + self.length }
        } else {
            Part::Piece
        };
        let request = Request { work: Work::Transfer(transfer), part, is_signaled: false };
        if self.gathered.is_empty() {
            let range = [LocalRange { address: self.local.address + from, length, ..self.local }];
            doorbell.push(request, range.get(..usize::from(length > 0)).unwrap_or_default())
        } else {
            doorbell.push_gathered(request, &self.local, &self.gathered)
        }
    }
}
