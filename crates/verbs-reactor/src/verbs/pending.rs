//! Ranges of operations on their way into the send queue, and the work requests they become.

use std::fmt;

use crate::SlotKey;

use super::{
    doorbell::{Direction, Doorbell, LocalRange, Part, Request, Transfer, Work},
    message::Message,
};

/// How much one work request takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestLimits {
    /// Bytes.
    pub(super) piece_bytes: u32,
    /// Ranges of memory here, of a write.
    pub(super) ranges: usize,
    /// As many of a read: some devices scatter less than they gather, or nothing at all.
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

/// Adjacent bytes there, of an operation that is not completely posted yet. They are posted in steps: pieces and,
/// before the last piece of a write that tells the peer, messages that say how many bytes went before.
///
/// The bytes here lie in one range of any length, or are gathered from (scattered to) several that one work request
/// takes.
pub(super) struct Pending {
    pub(super) key: SlotKey,
    pub(super) direction: Direction,
    pub(super) local: LocalRange,
    /// Ranges that follow the first.
    pub(super) gathered: Vec<LocalRange>,
    pub(super) remote: u64,
    pub(super) remote_key: u32,
    /// Of all ranges together.
    pub(super) length: u64,
    pub(super) immediate: Option<u32>,
    /// Bytes that the operation has before these.
    pub(super) earlier: u64,
    /// The operation ends with these.
    pub(super) is_last: bool,
    /// Steps posted already.
    pub(super) posted: u64,
}

// Without the key, as keys are never shown.
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
    /// Takes `next`, which comes next in the operation, into the same work request, or gives it back.
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

    /// What the peer is told of the bytes before the last piece.
    fn extents(&self, piece_bytes: u32) -> impl Iterator<Item = Message> {
        let before = self.earlier + (self.pieces(piece_bytes) - 1) * u64::from(piece_bytes);
        let told = if self.immediate.is_some() { before } else { 0 };
        let pieces = u32::try_from(told / u64::from(piece_bytes)).unwrap_or(u32::MAX);
        // Less than a piece.
        let residue = (told % u64::from(piece_bytes)) as u32;
        let extent = (pieces > 0).then_some(Message::Extent(pieces));
        extent.into_iter().chain((residue > 0).then_some(Message::Residue(residue)))
    }

    /// Work requests that these bytes take.
    pub(super) fn steps(&self, piece_bytes: u32) -> u64 {
        // Nearly all, and divisions cost: this is asked several times for each request.
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
            // At most two.
            let message = self.extents(piece_bytes).nth((step + 1 - pieces) as usize);
            let work = Work::Message(message.unwrap_or(Message::Extent(0)));
            return doorbell.push(Request { work, part: Part::Piece, is_signaled: false }, &[]);
        }
        let from = if last { pieces - 1 } else { step } * u64::from(piece_bytes);
        let length = (self.length - from).min(u64::from(piece_bytes));
        let transfer = Transfer {
            direction: self.direction,
            length,
            // A peer says where its regions begin: a device refuses what does not lie in one.
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
