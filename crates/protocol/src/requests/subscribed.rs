//! The buffers and the values of one subscription at its receiver.
//!
//! ```text
//!           ┌──BUFFER_REQUEST──▶ wanted ──BUFFER_RESPONSE──┐
//! no buffer ┤                      ▲                        ▼
//!           └──────────────────────┴──BUFFER_REQUEST── granted ──TENSOR_WRITE──▶ arrived ──taken──▶ BUFFER_IDLE
//! ```
//!
//! A buffer is granted for one value. BUFFER_IDLE returns the value to the sender and grants another buffer in its place, so that the
//! caller may use the value for as long as it likes.

use std::collections::VecDeque;

use super::stash::{Content, Landed};
use crate::{
    Buffers, Destination, LentEnd, Message, MetaDataResponse, Metadata, PeerMisbehaved, RequestIndex,
    SubscriptionTerms,
};

/// A value of a subscription that has arrived.
#[derive(Debug)]
pub(crate) struct SequencedValue<L> {
    /// Its version and its sequence; `None` for the content of another receive of the key that was given up.
    pub(crate) place: Option<(u64, u64)>,
    /// The version of the first value that the sequence counts.
    pub(crate) began: u64,
    pub(crate) landed: Landed<L>,
}

/// The buffers and the values of one subscription.
#[derive(Debug)]
pub(super) struct Subscribed<L> {
    pub(super) terms: SubscriptionTerms,
    /// How many values the peer may send.
    pub(super) allowed: u32,
    /// How many values were taken and not returned to the peer.
    pub(super) taken: u32,
    /// What the peer may write, in the order in which it does, with the size.
    pub(super) granted: VecDeque<(L, u64)>,
    /// Memory that the peer does not know of.
    pub(super) fresh: VecDeque<(L, Destination)>,
    /// The value in BUFFER_REQUEST, until BUFFER_RESPONSE is posted.
    pub(super) wanted: Option<Metadata>,
    /// The value that the buffers were made for.
    pub(super) made_for: Option<Metadata>,
    /// A view that has come before its TENSOR_WRITE, with its length.
    pub(super) view: Option<(L, u64)>,
    pub(super) arrived: VecDeque<SequencedValue<L>>,
    /// Memory that goes back.
    pub(super) ended: Vec<(L, LentEnd)>,
}

/// Buffers that are to be allocated.
pub(crate) struct Needed {
    pub(crate) metadata: Metadata,
    pub(crate) count: usize,
    /// A value waits for the first one.
    pub(crate) is_urgent: bool,
}

impl<L> Subscribed<L> {
    pub(super) fn new(terms: SubscriptionTerms) -> Self {
        Self {
            terms,
            allowed: terms.values.into(),
            taken: 0,
            granted: VecDeque::new(),
            fresh: VecDeque::new(),
            wanted: None,
            made_for: None,
            view: None,
            arrived: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    pub(super) fn take_ended(&mut self) -> Option<(L, LentEnd)> {
        self.ended.pop()
    }

    /// Whether nothing is left of its memory.
    pub(super) fn is_empty(&self) -> bool {
        let has_none = self.granted.is_empty() && self.fresh.is_empty() && self.view.is_none();
        has_none && self.arrived.is_empty() && !self.has_ended()
    }

    /// Whether a value has arrived.
    pub(super) fn has_arrived(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Stores the content of another receive of the key, in the order of arrival. It is not returned to the peer.
    pub(super) fn give(&mut self, landed: Landed<L>) {
        let at = self.arrived.partition_point(|value| value.landed.number < landed.number);
        self.arrived.insert(at, SequencedValue { place: None, began: 0, landed });
    }

    /// The peer writes no buffer any more, for the reason `end`.
    pub(super) fn end_buffers(&mut self, end: LentEnd) {
        self.ended.extend(self.granted.drain(..).map(|(lent, _)| (lent, end)));
        self.ended.extend(self.fresh.drain(..).map(|(lent, _)| (lent, LentEnd::NeverSent)));
        self.ended.extend(self.view.take().map(|(lent, _)| (lent, LentEnd::Content)));
    }

    /// The values that nobody takes any more.
    pub(super) fn take_arrived(&mut self) -> VecDeque<SequencedValue<L>> {
        std::mem::take(&mut self.arrived)
    }

    pub(super) fn give_back(&mut self, landed: Landed<L>) {
        self.ended.extend(landed.returned());
    }

    /// All its memory, when no write can land any more. Values stay if they `are_wanted`.
    pub(super) fn drain(&mut self, are_wanted: bool) -> Vec<L> {
        self.end_buffers(LentEnd::Content);
        if !are_wanted {
            let arrived = self.take_arrived();
            arrived.into_iter().for_each(|value| self.give_back(value.landed));
        }
        self.ended.drain(..).map(|(lent, _)| lent).collect()
    }

    pub(super) fn is_announced(&self) -> bool {
        self.view.is_some()
    }

    /// The content of a value, out of its buffer if it was written there.
    pub(super) fn content(&mut self, value: &MetaDataResponse) -> Result<Content<L>, PeerMisbehaved> {
        let bytes = value.metadata.byte_length;
        if value.loan_follows {
            let (lent, length) = self.view.take().ok_or(PeerMisbehaved::LoanUnasked)?;
            return if length == bytes {
                Ok(Content::Lent(lent))
            } else {
                self.ended.push((lent, LentEnd::Content));
                Err(PeerMisbehaved::ContentLength)
            };
        }
        if let Some(eager) = &value.content {
            return Ok(if eager.is_empty() { Content::None } else { Content::Eager(eager.clone()) });
        }
        if bytes == 0 {
            return Ok(Content::None);
        }
        match self.granted.front() {
            Some((_, capacity)) if *capacity >= bytes => {}
            Some(_) => return Err(PeerMisbehaved::ContentLength),
            None => return Err(PeerMisbehaved::ContentUnasked),
        }
        Ok(self.granted.pop_front().map(|(lent, _)| lent).into())
    }

    /// The value that buffers are to be made for.
    pub(super) fn buffers_for(&self) -> Option<&Metadata> {
        self.wanted.as_ref().or(self.made_for.as_ref())
    }

    /// How many more buffers there should be: one for each value that the peer may send.
    pub(super) fn missing(&self) -> usize {
        let values = self.allowed + if self.wanted.is_some() { 0 } else { self.taken };
        (values as usize).saturating_sub(self.granted.len() + self.fresh.len())
    }

    /// Whether half of the values were taken, or there are fewer buffers than values that the peer may send.
    pub(super) fn is_return_due(&self) -> bool {
        let lacks_buffers = self.made_for.is_some() && self.granted.len() < self.allowed as usize;
        let is_half = self.taken * 2 >= self.terms.values.into();
        is_half || lacks_buffers || self.wanted.is_some() || !self.fresh.is_empty()
    }

    /// BUFFER_RESPONSE or BUFFER_IDLE, if one is possible.
    pub(super) fn message(&self, index: RequestIndex) -> Option<Message> {
        let destinations = self.fresh.iter().map(|(_, destination)| *destination).collect();
        if self.wanted.is_some() {
            let response = Buffers { index, values: 0, destinations };
            return Some(Message::BufferResponse(response)).filter(|_| !self.fresh.is_empty());
        }
        // Without a buffer for it the next value comes after BUFFER_REQUEST.
        let idle = Buffers { index, values: self.taken as u8, destinations };
        Some(Message::BufferIdle(idle)).filter(|_| self.taken > 0 || !self.fresh.is_empty())
    }

    /// The peer may use these buffers from now on.
    pub(super) fn posted(&mut self, Buffers { values, destinations, .. }: &Buffers) {
        let granted = self.fresh.drain(..destinations.len().min(self.fresh.len()));
        self.granted.extend(granted.map(|(lent, destination)| (lent, destination.capacity)));
        if let Some(wanted) = self.wanted.take() {
            self.made_for = Some(wanted);
        }
        self.allowed += u32::from(*values);
        self.taken -= u32::from(*values);
    }
}
