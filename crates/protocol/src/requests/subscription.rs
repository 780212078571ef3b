//! The receiving side of subscriptions: what arrives for them, and what goes back to the peer.

use std::task::Waker;

use super::{
    Arrived, ArrivedResult, Check, Content, Landed, Requests,
    entry::{RequestEntry, RequestPhase, StoredAnswer},
    subscribed::{Needed, SequencedValue, Subscribed},
};
use crate::{
    BufferRequest, Buffers, Destination, LentEnd, Message, Metadata, PeerMisbehaved, RequestIndex, Status,
    SubscriptionTerms, TensorWrite,
};

impl<L> RequestEntry<L> {
    fn is_subscribed(&self) -> Result<bool, PeerMisbehaved> {
        match self.phase {
            RequestPhase::Subscribed => Ok(true),
            RequestPhase::Answered => Ok(false),
            _ => Err(PeerMisbehaved::SubscriptionUnasked),
        }
    }
}

impl<L> Requests<L> {
    /// BUFFER_REQUEST came: the peer writes no buffer until it gets others.
    pub(crate) fn buffer_request(&mut self, request: BufferRequest) -> ArrivedResult<L> {
        let BufferRequest { index, metadata } = request;
        let Some(entry) = self.entry(index) else { return Ok(Arrived::IGNORED) };
        if !entry.is_subscribed()? {
            return Ok(Arrived::IGNORED);
        }
        let wake = entry.waker.take();
        let Some(subscribed) = &mut entry.subscribed else { return Ok(Arrived::IGNORED) };
        if subscribed.wanted.is_some() || subscribed.allowed == 0 {
            return Err(PeerMisbehaved::SubscriptionUnasked);
        }
        subscribed.end_buffers(LentEnd::MetaDataResponse);
        subscribed.wanted = Some(metadata);
        self.queue_returns(index);
        Ok(Arrived { wake, ..Arrived::HANDLED })
    }

    /// TENSOR_WRITE came.
    pub(crate) fn tensor_write(&mut self, write: TensorWrite) -> ArrivedResult<L> {
        let TensorWrite { version, sequence, began, value } = write;
        self.check_response(&value, true)?;
        let number = self.landed + 1;
        let Some(entry) = self.entry(value.index) else { return Ok(Arrived::IGNORED) };
        if !entry.is_subscribed()? {
            return Ok(Arrived::IGNORED);
        }
        let Some(subscribed) = &mut entry.subscribed else { return Ok(Arrived::IGNORED) };
        if subscribed.wanted.is_some() {
            // The peer waits for BUFFER_RESPONSE.
            return Err(PeerMisbehaved::SubscriptionUnasked);
        }
        subscribed.allowed = subscribed.allowed.checked_sub(1).ok_or(PeerMisbehaved::SubscriptionOverrun)?;
        let content = subscribed.content(&value)?;
        let is_written = matches!(content, Content::Lent(_)) && !value.loan_follows;
        let bytes = if is_written { value.metadata.byte_length } else { 0 };
        let check = value.checksum.map_or(Check::None, Check::InMessage);
        let landed = Landed { number, metadata: value.metadata, content, check };
        self.landed = number;
        let place = Some((version, sequence));
        let wake = self.arrived_value(value.index, SequencedValue { place, began, landed });
        Ok(Arrived { wake, bytes, ..Arrived::HANDLED })
    }

    /// Stores a value for the task that awaits it; without one, it goes to the next receive of its key, or its memory goes back.
    fn arrived_value(&mut self, index: RequestIndex, value: SequencedValue<L>) -> Option<Waker> {
        let entry = self.entry(index)?;
        let step_key = entry.step_key_to_stash();
        let subscribed = entry.subscribed.as_mut()?;
        if entry.is_awaited {
            subscribed.arrived.push_back(value);
            return entry.waker.take();
        }
        if let Some(step_key) = step_key {
            return self.stash_or_give(step_key, value.landed);
        }
        subscribed.give_back(value.landed);
        self.queue_returns(index);
        None
    }

    /// A view of `length` bytes has come, before its TENSOR_WRITE.
    pub(super) fn subscribed_view(
        &mut self,
        index: RequestIndex,
        length: u64,
        lent: &mut Option<L>,
    ) -> Result<(), PeerMisbehaved> {
        let entry = self.entry(index);
        let subscribed = entry.and_then(|entry| entry.subscribed.as_mut());
        let subscribed = subscribed.filter(|subscribed| subscribed.terms.view && subscribed.view.is_none());
        let subscribed = subscribed.ok_or(PeerMisbehaved::LoanUnasked)?;
        subscribed.view = lent.take().map(|lent| (lent, length));
        Ok(())
    }

    /// The peer has ended the subscription, or has acknowledged its end: nothing more comes for it.
    pub(super) fn end_subscription(&mut self, index: RequestIndex, end: LentEnd) {
        if let Some(entry) = self.entry(index)
            && let Some(subscribed) = &mut entry.subscribed
        {
            entry.phase = RequestPhase::Answered;
            subscribed.wanted = None;
            subscribed.end_buffers(end);
            self.queue_returns(index);
        }
    }

    /// Nobody takes the values any more. Those that have arrived go to the next receives of their key, or their memory goes back.
    pub(super) fn leave_subscription(&mut self, index: RequestIndex) -> Vec<Waker> {
        let Some(entry) = self.entry(index) else { return Vec::new() };
        let step_key = entry.step_key_to_stash();
        let Some(subscribed) = &mut entry.subscribed else { return Vec::new() };
        if tensorwire_testpoints::planted!("a subscription's memory is freed while the peer may write it") {
            subscribed.end_buffers(LentEnd::CancelAck);
        }
        let fresh = std::mem::take(&mut subscribed.fresh);
        subscribed.ended.extend(fresh.into_iter().map(|(lent, _)| (lent, LentEnd::NeverSent)));
        let arrived = subscribed.take_arrived();
        match step_key {
            Some(step_key) => arrived
                .into_iter()
                .filter_map(|value| self.stash_or_give(step_key.clone(), value.landed))
                .collect(),
            None => {
                arrived.into_iter().for_each(|value| subscribed.give_back(value.landed));
                Vec::new()
            }
        }
    }

    /// Has the housekeeping task return the memory of an entry.
    fn queue_returns(&mut self, index: RequestIndex) {
        let Some(entry) = self.entry(index) else { return };
        if entry.has_unwanted() && !std::mem::replace(&mut entry.is_returning, true) {
            self.returns.push_back(index.slot() as u32);
        }
    }

    fn subscribed(&mut self, index: RequestIndex) -> Option<&mut Subscribed<L>> {
        self.entry(index)?.subscribed.as_deref_mut()
    }

    /// The subscription, while the peer may send values.
    fn open_subscription(&mut self, index: RequestIndex) -> Option<&mut Subscribed<L>> {
        let entry = self.entry(index).filter(|entry| matches!(entry.phase, RequestPhase::Subscribed));
        entry?.subscribed.as_deref_mut()
    }

    /// The request, which was not posted, will be a subscription. It keeps a content that it was given meanwhile.
    pub(crate) fn subscribe(&mut self, index: RequestIndex, terms: SubscriptionTerms) {
        if let Some(entry) = self.entry(index) {
            let mut subscribed = Subscribed::new(terms);
            entry.given.take().into_iter().for_each(|given| subscribed.give(given));
            entry.subscribed = Some(Box::new(subscribed));
        }
    }

    /// Whether TENSOR_REQUEST was not posted.
    pub(crate) fn is_unsent(&mut self, index: RequestIndex) -> bool {
        self.entry(index).is_some_and(|entry| matches!(entry.phase, RequestPhase::Unsent))
    }

    /// Takes the oldest value of the subscription that has arrived.
    pub(crate) fn take_value(&mut self, index: RequestIndex) -> Option<SequencedValue<L>> {
        let subscribed = self.subscribed(index)?;
        let value = subscribed.arrived.pop_front()?;
        subscribed.taken += u32::from(value.place.is_some());
        Some(value)
    }

    /// Whether a value has arrived.
    pub(crate) fn has_value(&mut self, index: RequestIndex) -> bool {
        self.subscribed(index).is_some_and(|subscribed| subscribed.has_arrived())
    }

    /// Whether the peer waits for buffers, and none is made.
    pub(crate) fn wants_buffers(&mut self, index: RequestIndex) -> bool {
        let wants =
            |subscribed: &mut Subscribed<L>| subscribed.wanted.is_some() && subscribed.fresh.is_empty();
        self.open_subscription(index).is_some_and(wants)
    }

    /// Why the peer has ended the subscription, once its values are taken.
    pub(crate) fn subscription_end(&mut self, index: RequestIndex) -> Option<Status> {
        match self.entry(index)?.reply.as_ref()? {
            StoredAnswer::ErrorStatus(status) => Some(status.clone()),
            StoredAnswer::Content { .. } | StoredAnswer::MetaDataResponse(_) => None,
        }
    }

    /// The buffers to allocate.
    pub(crate) fn needed_buffers(&mut self, index: RequestIndex) -> Option<Needed> {
        let subscribed = self.open_subscription(index)?;
        let metadata = subscribed.buffers_for()?.clone();
        let is_urgent = subscribed.wanted.is_some() && subscribed.fresh.is_empty();
        Some(Needed { metadata, count: subscribed.missing(), is_urgent }).filter(|needed| needed.count > 0)
    }

    /// Whether a message to the peer is due. Until then it may send another value, and has a buffer for that.
    pub(crate) fn is_return_due(&mut self, index: RequestIndex) -> bool {
        self.open_subscription(index).is_some_and(|subscribed| subscribed.is_return_due())
    }

    /// Stores memory for a value of `metadata`. Returns it if the peer wants other memory by now, or the subscription is over.
    pub(crate) fn store_buffer(
        &mut self,
        index: RequestIndex,
        metadata: &Metadata,
        buffer: (L, Destination),
    ) -> Option<L> {
        match self.open_subscription(index) {
            Some(subscribed) if subscribed.buffers_for() == Some(metadata) => {
                subscribed.fresh.push_back(buffer);
                None
            }
            _ => Some(buffer.0),
        }
    }

    /// Has the housekeeping task post BUFFER_RESPONSE or BUFFER_IDLE.
    pub(crate) fn owe_buffers(&mut self, index: RequestIndex) {
        if !self.owed_buffers.contains(&index) {
            self.owed_buffers.push_back(index);
        }
    }

    pub(crate) fn owes_buffers(&self) -> bool {
        !self.owed_buffers.is_empty()
    }

    /// The next message that a subscription owes. It is owed until [`owed_buffers_posted`](Self::owed_buffers_posted).
    pub(crate) fn next_buffers(&mut self) -> Option<Message> {
        while let Some(index) = self.owed_buffers.front().copied() {
            let message = self.buffers_message(index);
            if message.is_some() {
                return message;
            }
            // It was posted meanwhile, or the subscription is over.
            self.owed_buffers.pop_front();
        }
        None
    }

    pub(crate) fn owed_buffers_posted(&mut self) {
        self.owed_buffers.pop_front();
    }

    /// BUFFER_RESPONSE or BUFFER_IDLE, if one is possible.
    pub(crate) fn buffers_message(&mut self, index: RequestIndex) -> Option<Message> {
        self.open_subscription(index)?.message(index)
    }

    /// BUFFER_RESPONSE or BUFFER_IDLE is being posted.
    pub(crate) fn buffers_posted(&mut self, buffers: &Buffers) {
        if let Some(subscribed) = self.subscribed(buffers.index) {
            subscribed.posted(buffers);
        }
    }
}
