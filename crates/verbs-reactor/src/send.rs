//! The posting half of a connection: the device's queue pair and the connection's phase.

use std::{time::Duration, vec::Drain};

use tensorwire_fabric::SlotKey;

use super::{
    VerbsError,
    message::Message,
    pending::Pending,
    queue_pair::RawQueuePair,
    round_trip::RoundTrip,
    send_queue::{Ended, SendQueue, SendStatus},
    submissions::Worker,
};

/// The phase of a connection. A connection goes through them in this order, and may skip some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Operations are posted.
    Open,
    /// The farewell is posted, after all operations; nothing else is posted.
    Leaving,
    /// The queue pair is in its error state, and everything outstanding completes as flushed.
    Down,
    /// Nothing is outstanding, and the queue pair is destroyed.
    Drained,
}

/// The queue pair and everything that posting needs. The link's lock protects it.
#[derive(Debug)]
pub(super) struct SendSide {
    /// `None` once drained.
    pub(super) queue_pair: Option<RawQueuePair>,
    pub(super) phase: Phase,
    /// Receives that are posted and not complete.
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

    /// The device's round-trip time; `None` if it is not known yet.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.round_trip.shortest()
    }

    /// Whether a completion of the send queue is still to come.
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

    /// Posts `count` receives to replace as many that have completed.
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

    /// Handles the completion of one work request of the send queue.
    pub(super) fn returned(&mut self, sequence: u64, status: SendStatus, ended: &mut Vec<Ended>) {
        self.queue.returned(sequence, status, ended);
        self.round_trip.returned(sequence);
    }

    /// Whether nothing is outstanding any more.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.outstanding() == 0 && self.receives == 0
    }

    /// Takes the operations that have not ended, before the queue pair is destroyed.
    pub(super) fn take_unfinished(&mut self) -> Vec<SlotKey> {
        self.queue.take_unfinished()
    }
}

impl Worker for SendSide {
    type Work = Pending;
    type Error = VerbsError;

    /// While work is outstanding, new work waits: a completion posts it.
    fn takes_work(&self, at_once: bool) -> bool {
        self.phase == Phase::Open && (at_once || self.queue.outstanding() == 0)
    }

    fn take(&mut self, submitted: Drain<'_, Pending>) {
        self.queue.push(submitted);
    }

    /// Posts as much as there is room for.
    fn work(&mut self) -> Result<(), VerbsError> {
        let Some(queue_pair) = self.queue_pair.as_ref().filter(|_| self.phase == Phase::Open) else {
            return Ok(());
        };
        while self.queue.fill() {
            let first = self.queue.next_sequence();
            let is_alone = self.queue.outstanding() == 0;
            self.round_trip.posts(first, self.queue.doorbell(), is_alone);
            // SAFETY: each request belongs to a slot, which owns the bytes. The slot completes only when the request
            // has completed or the queue pair is destroyed. The bytes' block is registered as long as the domain lives,
            // and the queue pair keeps the domain.
            let result = unsafe { queue_pair.post(self.queue.doorbell(), first) };
            let all = self.queue.doorbell().len();
            self.queue.accept(result.as_ref().map_or_else(|refused| refused.posted, |()| all));
            result.map_err(|refused| refused.error)?;
        }
        Ok(())
    }
}
