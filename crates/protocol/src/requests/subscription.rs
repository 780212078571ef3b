//! The receiving side of a subscription.
//!
//! ```text
//!           ┌──BUFFER_REQUEST──▶ wanted ──BUFFER_RESPONSE──┐
//! no buffer ┤                      ▲                        ▼
//!           └──────────────────────┴──BUFFER_REQUEST── granted ──TENSOR_WRITE──▶ arrived ──taken──▶ BUFFER_IDLE
//! ```
//!
//! A buffer is granted for one value. BUFFER_IDLE returns the value to the sender and grants another buffer in its place, so that the
//! caller may use the value for as long as it likes.

use std::{collections::VecDeque, task::Waker};

use super::{
    Arrived, ArrivedResult, Check, Content, Landed, Requests,
    entry::{RequestEntry, RequestPhase, StoredAnswer},
};
use crate::{
    BufferRequest, Buffers, Destination, EagerContent, LentEnd, Message, MetaDataResponse, Metadata,
    PeerMisbehaved, RequestIndex, Status, SubscriptionTerms, TensorWrite,
};

/// A value of a subscription that has arrived.
#[derive(Debug)]
pub(crate) struct SequencedValue<L> {
    /// Its version and its sequence; `None` for the content of another receive of the key that was given up.
    pub(crate) place: Option<(u64, u64)>,
    pub(crate) landed: Landed<L>,
}

/// The buffers and the values of one subscription.
#[derive(Debug)]
pub(super) struct Subscribed<L> {
    terms: SubscriptionTerms,
    /// How many values the peer may send.
    allowed: u32,
    /// How many values were taken and not returned to the peer.
    taken: u32,
    /// What the peer may write, in the order in which it does, with the size.
    granted: VecDeque<(L, u64)>,
    /// Memory that the peer does not know of.
    fresh: VecDeque<(L, Destination)>,
    /// The value in BUFFER_REQUEST, until BUFFER_RESPONSE is posted.
    wanted: Option<Metadata>,
    /// The value that the buffers were made for.
    made_for: Option<Metadata>,
    /// A view that has come before its TENSOR_WRITE, with its length.
    view: Option<(L, u64)>,
    arrived: VecDeque<SequencedValue<L>>,
    /// Memory that goes back.
    ended: Vec<(L, LentEnd)>,
}

/// Buffers that are to be allocated.
pub(crate) struct Needed {
    pub(crate) metadata: Metadata,
    pub(crate) count: usize,
    /// The peer has none, so that a value may wait for the first one.
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
        self.arrived.insert(at, SequencedValue { place: None, landed });
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
        self.view.is_some() || self.wanted.is_some()
    }

    /// The content of a value, out of its buffer if it was written there.
    fn content(&mut self, value: &MetaDataResponse) -> Result<Content<L>, PeerMisbehaved> {
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

    /// How many more buffers there should be: one for each value that the peer may send.
    fn missing(&self) -> usize {
        let values = self.allowed + if self.wanted.is_some() { 0 } else { self.taken };
        (values as usize).saturating_sub(self.granted.len() + self.fresh.len())
    }

    /// Whether half of the values were taken, or there are fewer buffers than values that the peer may send.
    fn is_return_due(&self) -> bool {
        let lacks_buffers = self.made_for.is_some() && self.granted.len() < self.allowed as usize;
        let is_half = self.taken * 2 >= self.terms.values.into();
        is_half || lacks_buffers || self.wanted.is_some() || !self.fresh.is_empty()
    }

    /// BUFFER_RESPONSE or BUFFER_IDLE, if one is possible.
    fn message(&self, index: RequestIndex) -> Option<Message> {
        let destinations = self.fresh.iter().map(|(_, destination)| *destination).collect();
        if self.wanted.is_some() {
            let response = Buffers { index, values: 0, destinations };
            return Some(Message::BufferResponse(response)).filter(|_| !self.fresh.is_empty());
        }
        // Where values need buffers, none is returned without one.
        let buffers = (self.granted.len() + self.fresh.len()) as u32;
        let values = match self.made_for {
            Some(_) => self.taken.min(buffers.saturating_sub(self.allowed)),
            None => self.taken,
        };
        let idle = Buffers { index, values: values as u8, destinations };
        Some(Message::BufferIdle(idle)).filter(|_| values > 0 || !self.fresh.is_empty())
    }

    /// The peer may use these buffers from now on.
    fn posted(&mut self, Buffers { values, destinations, .. }: &Buffers) {
        let granted = self.fresh.drain(..destinations.len().min(self.fresh.len()));
        self.granted.extend(granted.map(|(lent, destination)| (lent, destination.capacity)));
        if let Some(wanted) = self.wanted.take() {
            self.made_for = Some(wanted);
        }
        self.allowed += u32::from(*values);
        self.taken -= u32::from(*values);
    }
}

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
        let TensorWrite { version, sequence, value } = write;
        self.check_value(&value)?;
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
        let wake = self.arrived_value(value.index, SequencedValue { place, landed });
        Ok(Arrived { wake, bytes, ..Arrived::HANDLED })
    }

    /// Whether the value has a checksum and a content inside the message only where that was agreed.
    fn check_value(&self, value: &MetaDataResponse) -> Result<(), PeerMisbehaved> {
        let most = self.agreed.eager_bytes_max;
        let is_eager = |content: &EagerContent| most > 0 && content.len() as u64 <= most.into();
        if !value.content.as_ref().is_none_or(is_eager) {
            return Err(PeerMisbehaved::EagerUnasked);
        }
        if value.checksum.is_some() != self.agreed.validation.is_on() {
            return Err(PeerMisbehaved::ChecksumUnfit);
        }
        Ok(())
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

    /// Whether the peer waits for BUFFER_RESPONSE.
    pub(crate) fn wants_buffers(&mut self, index: RequestIndex) -> bool {
        self.open_subscription(index).is_some_and(|subscribed| subscribed.wanted.is_some())
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
        let metadata = subscribed.wanted.as_ref().or(subscribed.made_for.as_ref())?.clone();
        let is_urgent = subscribed.granted.is_empty() && subscribed.fresh.is_empty();
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
            Some(subscribed)
                if subscribed.wanted.as_ref().or(subscribed.made_for.as_ref()) == Some(metadata) =>
            {
                subscribed.fresh.push_back(buffer);
                None
            }
            _ => Some(buffer.0),
        }
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
