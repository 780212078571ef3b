//! What the line leaves to the housekeeping task.

use std::task::Waker;

use super::Line;
use crate::{Channel, credit::Flow};

/// The waker of the task that runs [`housekeeping`](crate::Connection::housekeeping).
pub(crate) struct Keeper {
    pub(crate) waker: Waker,
    /// Whether the task waits in the queue of messages, which wakes it when it may post.
    pub(crate) is_in_queue: bool,
}

/// The growth of the own ring.
pub(crate) struct Growth {
    bytes_max: u32,
    /// Size of the larger ring that is to be made for the peer.
    wanted: Option<u32>,
    /// One is being made, or offered and not moved to.
    is_growing: bool,
}

impl Growth {
    pub(crate) fn new(bytes_max: u32) -> Self {
        Self { bytes_max, wanted: None, is_growing: false }
    }

    /// The peer has asked for room for a message of `wanted` bytes.
    pub(crate) fn on_ask(&mut self, flow: &Flow, wanted: u32) {
        if !self.is_growing {
            self.wanted = flow.growth(wanted, self.bytes_max);
            self.is_growing = self.wanted.is_some();
        }
    }

    /// The size of the ring to make, once.
    pub(crate) fn take(&mut self) -> Option<u32> {
        self.wanted.take()
    }

    /// The peer has moved to the larger ring, or none was made.
    pub(crate) fn end(&mut self) {
        self.is_growing = false;
    }
}

impl<C: Channel> Line<C> {
    /// The waker of the housekeeping task, if that sleeps and there is work for it.
    pub(crate) fn keeper_with_work(&mut self, owes: bool, has_memory: bool) -> Option<Waker> {
        let keeper = self.keeper.as_ref()?;
        let has_work = owes && !keeper.is_in_queue
            || has_memory
            || self.is_queue_deferred
            || self.growth.wanted.is_some();
        if has_work { self.keeper.take().map(|keeper| keeper.waker) } else { None }
    }
}
