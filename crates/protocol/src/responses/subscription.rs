//! The sending side of a subscription.
//!
//! ```text
//! none ──BUFFER_REQUEST──▶ requested ──BUFFER_RESPONSE──▶ idle ──content, TENSOR_WRITE──▶ busy ──BUFFER_IDLE──▶ idle
//!                              ▲                           │
//!                              └───────BUFFER_REQUEST──────┘
//! ```
//!
//! A busy buffer is the peer's. BUFFER_IDLE names one in its place.

use std::{collections::VecDeque, task::Waker};

use super::{ResponseEntry, Responses};
use crate::{BufferRequest, Buffers, Destination, PeerMisbehaved, RequestIndex, SubscriptionTerms};

/// What the sender of one subscription may use.
#[derive(Debug)]
pub(super) struct Subscribed {
    terms: SubscriptionTerms,
    /// How many values may be sent.
    allowed: u32,
    /// The buffers, in the order in which they are used.
    buffers: VecDeque<Destination>,
    /// The value that the buffers were requested for has so many bytes. 0 if none were.
    capacity: u64,
    /// BUFFER_REQUEST was posted, and BUFFER_RESPONSE did not come.
    is_requested: bool,
    /// Contents whose writes are under way.
    writing: u32,
}

/// Where the next value of a subscription goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// Into this buffer.
    Buffer(Destination),
    /// Into one that was requested.
    Later,
    /// The buffers are too small, or there are none.
    TooSmall,
}

impl Subscribed {
    pub(super) fn new(terms: SubscriptionTerms) -> Self {
        Self {
            terms,
            allowed: terms.values.into(),
            buffers: VecDeque::new(),
            capacity: 0,
            is_requested: false,
            writing: 0,
        }
    }

    /// Whether a content is being written. A value that waits for a buffer goes back to its source if the connection ends.
    pub(super) fn is_transferring(&self) -> bool {
        self.writing > 0
    }

    /// Adds buffers for a value of the requested size.
    fn add(&mut self, destinations: impl IntoIterator<Item = Destination>) -> Result<(), PeerMisbehaved> {
        for destination in destinations {
            if destination.capacity < self.capacity {
                return Err(PeerMisbehaved::DestinationMismatch);
            }
            if self.buffers.len() >= self.terms.values.into() {
                return Err(PeerMisbehaved::SubscriptionOverrun);
            }
            self.buffers.push_back(destination);
        }
        Ok(())
    }
}

/// The task that waits for a message, if it concerns a subscription.
type Concerned = Result<Option<Option<Waker>>, PeerMisbehaved>;

impl Responses {
    fn subscribed(&mut self, index: RequestIndex) -> Option<&mut Subscribed> {
        self.entries.get_mut(&index)?.subscribed.as_deref_mut()
    }

    /// BUFFER_RESPONSE came. `None`: the index is unknown.
    pub(crate) fn buffers_named(&mut self, buffers: Buffers) -> Concerned {
        self.on_buffers(buffers, |subscribed, Buffers { values, destinations, .. }| {
            if !std::mem::take(&mut subscribed.is_requested) || destinations.is_empty() || values > 0 {
                return Err(PeerMisbehaved::SubscriptionUnasked);
            }
            subscribed.add(destinations)
        })
    }

    /// BUFFER_IDLE came. `None`: the index is unknown.
    pub(crate) fn values_returned(&mut self, buffers: Buffers) -> Concerned {
        self.on_buffers(buffers, |subscribed, Buffers { values, destinations, .. }| {
            subscribed.allowed += u32::from(values);
            if subscribed.allowed > subscribed.terms.values.into() {
                return Err(PeerMisbehaved::SubscriptionOverrun);
            }
            if subscribed.capacity == 0 && !destinations.is_empty() {
                return Err(PeerMisbehaved::SubscriptionUnasked);
            }
            // It was sent before the peer had BUFFER_REQUEST: these buffers are too small.
            if subscribed.is_requested { Ok(()) } else { subscribed.add(destinations) }
        })
    }

    fn on_buffers(
        &mut self,
        buffers: Buffers,
        act: impl FnOnce(&mut Subscribed, Buffers) -> Result<(), PeerMisbehaved>,
    ) -> Concerned {
        buffers.destinations.iter().try_for_each(|destination| self.check_result_slot(Some(*destination)))?;
        let Some(entry) = self.entries.get_mut(&buffers.index) else { return Ok(None) };
        let Some(subscribed) = &mut entry.subscribed else { return Err(PeerMisbehaved::SubscriptionUnasked) };
        act(subscribed, buffers)?;
        Ok(Some(entry.waker.take()))
    }

    /// Whether the subscription may send a value now. Stores `waker` for a change and returns the waker that it replaces.
    pub(crate) fn may_send(&mut self, index: RequestIndex, waker: &Waker) -> (bool, Option<Waker>) {
        let Some(entry) = self.entries.get_mut(&index) else { return (false, None) };
        let may = entry.subscribed.as_ref().is_some_and(|subscribed| subscribed.allowed > 0);
        (may, entry.waker.replace(waker.clone()))
    }

    /// Where a value of `bytes` bytes goes. Takes the buffer. Stores `waker` as [`may_send`](Self::may_send) does.
    pub(crate) fn room(&mut self, index: RequestIndex, bytes: u64, waker: &Waker) -> (Room, Option<Waker>) {
        let Some(ResponseEntry { subscribed: Some(subscribed), waker: stored, .. }) =
            self.entries.get_mut(&index)
        else {
            return (Room::Later, None);
        };
        if subscribed.is_requested {
            return (Room::Later, stored.replace(waker.clone()));
        }
        if subscribed.capacity < bytes {
            return (Room::TooSmall, None);
        }
        if tensorwire_testpoints::planted!("a buffer of a subscription is written twice")
            && let Some(buffer) = subscribed.buffers.front()
        {
            return (Room::Buffer(*buffer), None);
        }
        match subscribed.buffers.pop_front() {
            Some(buffer) => (Room::Buffer(buffer), None),
            // The peer has lacked memory. It makes room for a value that waits.
            None => (Room::TooSmall, None),
        }
    }

    /// BUFFER_REQUEST is being posted.
    pub(crate) fn buffers_requested(&mut self, request: &BufferRequest) {
        if let Some(subscribed) = self.subscribed(request.index) {
            subscribed.buffers.clear();
            subscribed.capacity = request.metadata.byte_length;
            subscribed.is_requested = true;
        }
    }

    /// TENSOR_WRITE is being posted. The peer has read it once it has returned `returned` immediates.
    pub(crate) fn value_sent(&mut self, index: RequestIndex, returned: Option<u64>) {
        if let Some(subscribed) = self.subscribed(index) {
            subscribed.allowed = subscribed.allowed.saturating_sub(1);
        }
        // In mode original the list has one entry for the subscription.
        if returned.is_some() || self.written.iter().all(|written| written.slot != index.slot()) {
            self.wrote(index, returned);
        }
    }

    /// A content of the subscription is being posted.
    pub(crate) fn writes(&mut self, index: RequestIndex) {
        if let Some(subscribed) = self.subscribed(index) {
            subscribed.writing += 1;
        }
    }

    /// The bytes of one of its contents may be reused.
    pub(crate) fn written_out(&mut self, index: RequestIndex) {
        if let Some(subscribed) = self.subscribed(index) {
            subscribed.writing = subscribed.writing.saturating_sub(1);
        }
    }
}
