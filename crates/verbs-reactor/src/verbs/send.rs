//! The posting half of a connection: the device's queue pair, and how far the connection is.

use std::{time::Duration, vec::Drain};

use crate::SlotKey;

use super::{
    VerbsError,
    message::Message,
    pending::Pending,
    queue_pair::RawQueuePair,
    round_trip::RoundTrip,
    send_queue::{Ended, Outcome, SendQueue},
    submissions::Worker,
};

/// How far a connection is. It only ever moves down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Takes work.
    Open,
    /// The farewell is posted, behind all work that was; nothing more is.
    Leaving,
    /// The queue pair is in its error state, and everything outstanding is on its way back.
    Down,
    /// Nothing is outstanding, and the queue pair is destroyed.
    Drained,
}

/// Behind the link's lock.
#[derive(Debug)]
pub(super) struct SendSide {
    /// `None` once drained.
    pub(super) queue_pair: Option<RawQueuePair>,
    pub(super) phase: Phase,
    /// Receives posted and not back.
    receives: usize,
    queue: SendQueue,
    round_trip: RoundTrip,
}

impl SendSide {
    pub(super) fn new(
        queue_pair: RawQueuePair,
        receives: usize,
        queue: SendQueue,
        round_trip: RoundTrip,
    ) -> Self {
        Self { queue_pair: Some(queue_pair), phase: Phase::Open, receives, queue, round_trip }
    }

    /// What the device takes for a round trip by itself, as far as it is known.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.round_trip.shortest()
    }

    /// Whether a completion of the send queue is to come.
    pub(super) fn is_sending(&self) -> bool {
        self.queue.outstanding() > 0
    }

    /// Posts one of the messages that frame the connection; room is reserved for them.
    pub(super) fn signal(&mut self, message: Message) -> Result<(), VerbsError> {
        let Some(queue_pair) = &self.queue_pair else { return Ok(()) };
        let first = self.queue.next_sequence();
        self.queue.fill_signal(message);
        // SAFETY: a message has no local bytes.
        let result = unsafe { queue_pair.post(self.queue.doorbell(), first) };
        result.map_err(|refused| refused.error)?;
        self.queue.accept(1);
        Ok(())
    }

    /// Posts receives in place of `count` that came back.
    pub(super) fn replace_receives(&mut self, count: usize) -> Result<(), VerbsError> {
        self.receives = self.receives.saturating_sub(count);
        let Some(queue_pair) = &self.queue_pair else { return Ok(()) };
        if count == 0 || self.phase != Phase::Open {
            return Ok(());
        }
        let result = queue_pair.post_receives(count);
        self.receives += result.as_ref().map_or_else(|refused| refused.posted, |()| count);
        result.map_err(|refused| refused.error)
    }

    /// Counts what came back with one work request of the send queue.
    pub(super) fn returned(&mut self, sequence: u64, outcome: Outcome, ended: &mut Vec<Ended>) {
        self.queue.returned(sequence, outcome, ended);
        self.round_trip.returned(sequence);
    }

    /// Nothing is outstanding any more.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.outstanding() == 0 && self.receives == 0
    }

    /// Takes the operations that have not ended, for a queue pair that is destroyed.
    pub(super) fn take_unfinished(&mut self) -> Vec<SlotKey> {
        self.queue.take_unfinished()
    }
}

impl Worker for SendSide {
    type Work = Pending;
    type Error = VerbsError;

    /// When something is outstanding, its completion has the rest posted.
    fn takes_work(&self, at_once: bool) -> bool {
        self.phase == Phase::Open && (at_once || self.queue.outstanding() == 0)
    }

    fn take(&mut self, submitted: Drain<'_, Pending>) {
        self.queue.push(submitted);
    }

    /// Posts what there is room for.
    fn work(&mut self) -> Result<(), VerbsError> {
        let Some(queue_pair) = self.queue_pair.as_ref().filter(|_| self.phase == Phase::Open) else {
            return Ok(());
        };
        while self.queue.fill() {
            let first = self.queue.next_sequence();
            let is_alone = self.queue.outstanding() == 0;
            self.round_trip.posts(first, self.queue.doorbell(), is_alone);
            // SAFETY: each request belongs to a slot, which owns the bytes and completes only when it has
            // come back or the queue pair is destroyed; the bytes' block is registered as long as the domain
            // lives, which the queue pair keeps.
            let result = unsafe { queue_pair.post(self.queue.doorbell(), first) };
            let all = self.queue.doorbell().len();
            self.queue.accept(result.as_ref().map_or_else(|refused| refused.posted, |()| all));
            result.map_err(|refused| refused.error)?;
        }
        Ok(())
    }
}
