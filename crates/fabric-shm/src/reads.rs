//! One-sided reads.
//!
//! A read is a descriptor that names the peer's bytes. The *target* checks it as a NIC would and answers with a
//! descriptor of its own that says where in its blocks the bytes are; the reader copies them out of its read-only
//! mapping into memory that only it writes, looks at the target's `closed` word as after any copy, and completes. So
//! every page keeps its one writer, the bytes are copied once, by the process that wants them in its cache, and a
//! target that dies, stops or closes ends the read and never tears it: the target keeps the bytes until the reader
//! has executed the answer, or the connection is closed.
//!
//! A peer has at most [`READS_MAX`] reads unanswered; further ones wait at the reader. Rings have room for the
//! answers beside the operations of their own side.

use std::{collections::VecDeque, fmt};

use tensorwire_memory::{Buf, RemoteTarget};
use tensorwire_verbs_reactor::{PeerViolation, RemoteRange, SlotKey};

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

/// A read of the peer's memory, checked and resolved.
pub(super) struct Read {
    /// What its answer completes; `None` for an earlier part of an operation.
    pub(super) posted: Option<Posted>,
    pub(super) range: RemoteRange,
    pub(super) key: u32,
    /// `None` if it is empty.
    pub(super) destination: Option<RemoteTarget>,
}

// Without the key, as keys are never shown.
impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Read")
            .field("posted", &self.posted)
            .field("range", &self.range)
            .field("destination", &self.destination)
            .finish_non_exhaustive()
    }
}

/// The reads of this side that are not over.
#[derive(Debug, Default)]
pub(super) struct Reads {
    /// Not asked for yet. Bounded by the slots of operations.
    queued: VecDeque<Read>,
    /// In the order in which they are answered, at most [`READS_MAX`].
    asked: VecDeque<Read>,
    /// Tag of the first of `asked`.
    first: u32,
}

impl Reads {
    pub(super) fn post(&mut self, read: Read) {
        self.queued.push_back(read);
    }

    /// Whether there is a read that could be asked for.
    pub(super) fn may_ask(&self) -> bool {
        !self.queued.is_empty() && self.asked.len() < READS_MAX as usize
    }

    /// The descriptor that asks for the next read, which counts as asked for from here on.
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

    /// Where the answer of `length` bytes under `tag` goes.
    pub(super) fn expected(&self, tag: u32, length: u64) -> Result<Option<RemoteTarget>, PeerViolation> {
        let next = self.asked.front().filter(|read| self.first == tag && read.range.length == length);
        Ok(next.ok_or(PeerViolation::Malformed)?.destination.clone())
    }

    /// The next answer is executed: the operation that it completes, if it is its last.
    pub(super) fn answered(&mut self) -> Option<Posted> {
        let read = self.asked.pop_front()?;
        self.first = self.first.wrapping_add(1);
        read.posted
    }
}

/// What a read of the peer gets.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) tag: u32,
    pub(super) bytes: Buf,
}

/// This side's answers to reads of the peer that the peer has not executed.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Not in the ring yet: there is no room in it, or none in the socket that must carry a block's descriptor.
    pub(super) waiting: VecDeque<Answer>,
    /// Positions of those in the ring.
    positions: VecDeque<u64>,
}

impl Answers {
    /// Whether the peer, which has executed `consumed` of our descriptors, may have one more.
    pub(super) fn have_room(&self, consumed: u64) -> bool {
        let open = self.positions.iter().rev().take_while(|position| **position >= consumed).count();
        open + self.waiting.len() < READS_MAX as usize
    }

    pub(super) fn published(&mut self, position: u64) {
        self.positions.push_back(position);
    }

    /// The oldest one in the ring was reaped.
    pub(super) fn reaped(&mut self) {
        self.positions.pop_front();
    }
}
