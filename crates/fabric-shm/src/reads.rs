//! One-sided reads.
//!
//! 1. The reader posts a descriptor that names the target's bytes.
//! 2. The target checks it as a NIC does, and answers with a descriptor that names the block and offset of the bytes.
//! 3. The reader copies them out of its read-only mapping of that block, reads the target's `closed` word as after
//!    any copy, and completes the read.
//!
//! Every page still has one writer, and the bytes are copied once, by the process that uses them. The target leaves the
//! bytes unchanged until the reader has executed the answer or the connection is closed. If the target dies or closes,
//! the read fails; it never completes with bytes that had changed.
//!
//! A side has at most [`READS_MAX`] reads unanswered; further ones wait at the reader. A ring has room for the answers
//! beside the operations of its own side.

use std::{collections::VecDeque, fmt};

use tensorwire_fabric::{PeerViolation, RemoteRange, SlotKey};
use tensorwire_memory::{Buf, RemoteTarget};

use crate::{
    limits::READS_MAX,
    ring::{Descriptor, Source},
};

/// An operation that the peer has not executed yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    pub(super) key: SlotKey,
    pub(super) length: u64,
}

/// A read of the peer's memory that passed the checks of its range and of its destination.
pub(super) struct Read {
    /// The operation that its answer completes; `None` if more parts of the operation follow.
    pub(super) posted: Option<Posted>,
    pub(super) range: RemoteRange,
    pub(super) key: u32,
    /// `None` if the read is of no bytes.
    pub(super) destination: Option<RemoteTarget>,
}

// Without the key: keys are never logged.
impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Read")
            .field("posted", &self.posted)
            .field("range", &self.range)
            .field("destination", &self.destination)
            .finish_non_exhaustive()
    }
}

/// This side's reads that are not complete.
#[derive(Debug, Default)]
pub(super) struct Reads {
    /// Reads that are not in the ring yet. The slots of operations bound their number.
    queued: VecDeque<Read>,
    /// Reads in the ring, in the order of their answers; at most [`READS_MAX`].
    asked: VecDeque<Read>,
    /// Tag of the first of `asked`.
    first: u32,
}

impl Reads {
    pub(super) fn post(&mut self, read: Read) {
        self.queued.push_back(read);
    }

    /// Whether a read waits that may be posted now.
    pub(super) fn may_ask(&self) -> bool {
        !self.queued.is_empty() && self.asked.len() < READS_MAX as usize
    }

    /// The descriptor of the next read, which then counts as posted.
    pub(super) fn ask(&mut self) -> Option<Descriptor> {
        if !self.may_ask() {
            return None;
        }
        let read = self.queued.pop_front()?;
        let tag = self.first.wrapping_add(self.asked.len() as u32);
        let remote = Some((read.range, read.key));
        self.asked.push_back(read);
        Some(Descriptor {
            immediate: None,
            continues: false,
            is_quiet: false,
            remote,
            source: Source::Asked { tag },
        })
    }

    /// The destination of the answer with `tag` and `length`; `None` if the read is of no bytes.
    ///
    /// # Errors
    /// [`PeerViolation::Malformed`] for an answer to any read but the oldest.
    pub(super) fn expected(&self, tag: u32, length: u64) -> Result<Option<RemoteTarget>, PeerViolation> {
        let next = self.asked.front().filter(|read| self.first == tag && read.range.length == length);
        Ok(next.ok_or(PeerViolation::Malformed)?.destination.clone())
    }

    /// Records the answer to the oldest read. Returns the operation that this completes, if it was the operation's last
    /// part.
    pub(super) fn answered(&mut self) -> Option<Posted> {
        let read = self.asked.pop_front()?;
        self.first = self.first.wrapping_add(1);
        read.posted
    }
}

/// The answer to a read of the peer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) tag: u32,
    pub(super) bytes: Buf,
}

/// This side's answers to the peer's reads, until the peer has executed them.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Answers that are not in the ring yet, because the ring is full, or the socket that must carry the memfd of a
    /// block.
    pub(super) waiting: VecDeque<Answer>,
    /// Positions of the answers in the ring.
    positions: VecDeque<u64>,
}

impl Answers {
    /// Whether the peer, which has executed `consumed` of our descriptors, may request one more answer.
    pub(super) fn have_room(&self, consumed: u64) -> bool {
        let open = self.positions.iter().rev().take_while(|position| **position >= consumed).count();
        open + self.waiting.len() < READS_MAX as usize
    }

    pub(super) fn published(&mut self, position: u64) {
        self.positions.push_back(position);
    }

    /// Whether no answer is in the ring.
    pub(super) fn are_executed(&self) -> bool {
        self.positions.is_empty()
    }

    /// Removes the oldest answer in the ring, which was executed and reaped.
    pub(super) fn reaped(&mut self) {
        self.positions.pop_front();
    }
}
