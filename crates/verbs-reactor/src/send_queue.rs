//! The bookkeeping of a send queue: waiting and posted requests, and the operations that a completion ends. It needs no
//! device.

use std::collections::VecDeque;

use tensorwire_fabric::SlotKey;

use super::{
    doorbell::{Doorbell, Part, Request, Work},
    message::Message,
    pending::{Pending, RequestLimits},
};

/// How a work request completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendStatus {
    /// It was executed, and so were all earlier ones.
    Done,
    /// It is the first that failed. All earlier ones were executed.
    Failed,
    /// It was flushed, because the queue pair had failed. Whether it was executed is unknown.
    Flushed,
}

/// An operation or message that a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// An operation, with its bytes.
    Operation { key: SlotKey, bytes: u64, is_done: bool },
    /// One of the connection's own messages.
    Signal { message: Message, is_done: bool },
}

/// The state of a send queue.
#[derive(Debug)]
pub(super) struct SendQueue {
    /// Entries that operations may still take. Entries for the connection's own messages are reserved beside them.
    room: usize,
    limits: RequestLimits,
    /// Ranges to be posted, in order. Bounded by the slots.
    pending: VecDeque<Pending>,
    /// Requests that are posted and not complete, in order. A completion ends all requests up to its own.
    posted: VecDeque<Part>,
    /// The number of the first of `posted`.
    first: u64,
    doorbell: Doorbell,
}

impl SendQueue {
    pub(super) fn new(depth: usize, limits: RequestLimits) -> Self {
        Self {
            room: depth,
            limits,
            pending: VecDeque::new(),
            posted: VecDeque::new(),
            first: 0,
            doorbell: Doorbell::new(),
        }
    }

    pub(super) fn push(&mut self, ranges: impl IntoIterator<Item = Pending>) {
        self.pending.extend(ranges);
    }

    /// How many requests are posted and not complete.
    pub(super) fn outstanding(&self) -> usize {
        self.posted.len()
    }

    /// The number of the next request to be posted.
    pub(super) fn next_sequence(&self) -> u64 {
        self.first + self.posted.len() as u64
    }

    /// The requests to post now.
    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Fills the doorbell with pending requests, as far as there is room. Returns whether it has any.
    pub(super) fn fill(&mut self) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        self.doorbell.begin(self.room);
        let piece_bytes = self.limits.piece_bytes;
        'full: for range in &self.pending {
            for step in range.posted..range.steps(piece_bytes) {
                if !range.step(step, piece_bytes, &mut self.doorbell) {
                    break 'full;
                }
            }
        }
        self.doorbell.mark_signals();
        !self.doorbell.is_empty()
    }

    /// Puts one of the connection's own messages into the doorbell; room is reserved for them.
    pub(super) fn fill_signal(&mut self, message: Message) {
        self.doorbell.begin(1);
        let request =
            Request { work: Work::Message(message), part: Part::Signal(message), is_signaled: true };
        self.doorbell.push(request, &[]);
    }

    /// Records that the first `count` requests of the doorbell are posted.
    pub(super) fn accept(&mut self, count: usize) {
        for (request, _) in self.doorbell.requests().take(count) {
            self.posted.push_back(request.part);
            if matches!(request.part, Part::Signal(_)) {
                continue;
            }
            self.room = self.room.saturating_sub(1);
            if let Some(range) = self.pending.front_mut() {
                range.posted += 1;
                if range.posted == range.steps(self.limits.piece_bytes) {
                    self.pending.pop_front();
                }
            }
        }
    }

    /// Handles the completion of request number `sequence`, and adds everything that it ended to `ended`. A number that
    /// is not outstanding is ignored.
    pub(super) fn returned(&mut self, sequence: u64, status: SendStatus, ended: &mut Vec<Ended>) {
        let index = sequence.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        let Some(index) = index.filter(|&index| index < self.posted.len()) else { return };
        self.first += index as u64 + 1;
        for (position, part) in self.posted.drain(..=index).enumerate() {
            let is_done = match status {
                SendStatus::Done => true,
                SendStatus::Failed => position < index,
                SendStatus::Flushed => false,
            };
            if let Part::Signal(message) = part {
                ended.push(Ended::Signal { message, is_done });
                continue;
            }
            self.room += 1;
            if let Part::End { key, bytes } = part {
                ended.push(Ended::Operation { key, bytes, is_done });
            }
        }
    }

    /// Takes the operations that have not ended, before the queue pair is destroyed.
    pub(super) fn take_unfinished(&mut self) -> Vec<SlotKey> {
        let key = |part| match part {
            Part::End { key, .. } => Some(key),
            Part::Piece | Part::Signal(_) => None,
        };
        let posted = self.posted.drain(..).filter_map(key);
        posted.chain(self.pending.drain(..).filter(|range| range.is_last).map(|range| range.key)).collect()
    }
}

#[cfg(test)]
mod tests;
