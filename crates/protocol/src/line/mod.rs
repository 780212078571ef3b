//! The line: what goes out on a connection, in order and under credits, and the rings that messages travel in.

mod chores;
mod reading;
mod rings;

use std::{mem, sync::Arc, task::Waker};

use chores::Growth;
pub(crate) use chores::Keeper;
pub(crate) use reading::ArrivalError;
use reading::Reader;
pub use rings::Rings;
use rings::RingsInUse;

use crate::{
    Agreed, Channel, ChannelError, Counters, Destination, Message, Parameters, RecordSlot, Scope,
    TensorRequest,
    after::After,
    credit::{Blocked, Flow, contents_max},
    names::{Defined, NameForm, Names},
    queue::WaitQueue,
    wire::{
        EagerResponse,
        record::{self, Control, RECORD_BYTES_MAX, SEVERAL_BYTES},
    },
};

/// How a request names its key. A list of pages is seldom requested twice, so its key gets no number.
fn form_of(request: &TensorRequest, names: &mut Names) -> NameForm {
    match request.scope {
        Scope::Pages(_) | Scope::PageWrite(_) | Scope::Arguments(_) => NameForm::Plain,
        _ => names.form(&request.key),
    }
}

/// Which queue of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    /// For a message: its turn, a credit and ring space.
    Messages,
    /// For a content: its turn, a credit and a place among the contents in flight.
    Contents,
}

/// What goes out, and the state of both rings.
///
/// A message or a content is posted at once if its queue is empty and credits and ring space suffice. Otherwise it waits in its
/// queue, and an ASK tells the peer that something is blocked:
///
/// ```text
/// new ──▶ waiting ──ANSWER, counts or acknowledgement──▶ posted
///  └────────────────────credit and ring space───────────────▲
/// ```
pub(crate) struct Line<C: Channel> {
    channel: Arc<C>,
    agreed: Agreed,
    rings: RingsInUse<C::Lent>,
    reader: Reader,
    flow: Flow,
    names: Names,
    /// What was sent and received.
    pub(crate) counters: Counters,
    /// The encoded message.
    scratch: Vec<u8>,
    /// An encoded request, to find its length.
    measure: Vec<u8>,
    /// How the requests of a message name their keys.
    forms: Vec<NameForm>,
    pub(crate) messages: WaitQueue,
    contents: WaitQueue,
    contents_in_flight: u32,
    contents_max: u32,
    /// The first content in the queue found no credit in its turn: the next credit is reserved for it.
    is_content_due: bool,
    /// No waiter is woken to post the messages at the head of the queue: the next message takes them along, or the housekeeping
    /// task posts them.
    is_queue_deferred: bool,
    /// The housekeeping task, while it sleeps.
    pub(crate) keeper: Option<Keeper>,
    pub(crate) growth: Growth,
}

impl<C: Channel> Line<C> {
    pub(crate) fn new(channel: Arc<C>, rings: Rings<C::Lent>, local: &Parameters, peer: &Parameters) -> Self {
        let (agreed, most) = (Agreed::of(local, peer), contents_max(local));
        Self {
            channel,
            agreed,
            rings: RingsInUse::new(rings),
            reader: Reader::new(local.first_ring_bytes(), agreed.names_max),
            flow: Flow::new(&agreed, peer.first_ring_bytes(), peer.ring_bytes, local.first_ring_bytes()),
            names: Names::new(agreed.names_max),
            counters: Counters::default(),
            scratch: Vec::with_capacity(RECORD_BYTES_MAX),
            measure: Vec::new(),
            forms: Vec::new(),
            messages: WaitQueue::default(),
            contents: WaitQueue::default(),
            contents_in_flight: 0,
            contents_max: if agreed.mode.is_counted() { most.min(agreed.depth) } else { most },
            is_content_due: false,
            is_queue_deferred: false,
            keeper: None,
            growth: Growth::new(local.ring_bytes),
        }
    }

    pub(crate) fn queue(&mut self, queue: Queue) -> &mut WaitQueue {
        match queue {
            Queue::Messages => &mut self.messages,
            Queue::Contents => &mut self.contents,
        }
    }

    /// What it runs on.
    pub(crate) fn channel(&self) -> &C {
        &self.channel
    }

    pub(crate) fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// Whether no message waits, so that a new one may be posted at once.
    pub(crate) fn has_no_message(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether the first waiter for a message's turn has left the message here.
    pub(crate) fn is_message_next(&self) -> bool {
        self.messages.messages().next().is_some()
    }

    /// Whether a message that waits should be tried again.
    pub(crate) fn may_try_message(&self) -> bool {
        self.flow.may_try_message()
    }

    /// Leaves the messages in the queue to the next message, or to the housekeeping task.
    pub(crate) fn defer(&mut self) {
        self.is_queue_deferred = true;
    }

    pub(crate) fn is_deferred(&self) -> bool {
        self.is_queue_deferred
    }

    /// Whether the queue was deferred, which it no longer is.
    pub(crate) fn take_deferred(&mut self) -> bool {
        mem::take(&mut self.is_queue_deferred)
    }

    /// The message to post next: the one at the head of the queue, or the requests there. Their waiters stay in the queue.
    pub(crate) fn take_message(&mut self) -> Option<Box<Message>> {
        let requests = self.requests_of_next_message();
        if requests < 2 {
            return self.messages.first_mut()?.message.take();
        }
        let messages = self.messages.messages().take(requests);
        let requests = messages.flat_map(Message::requests).cloned().collect();
        Some(Box::new(Message::TensorRequests(requests)))
    }

    /// Puts back a message that was taken and not posted.
    pub(crate) fn put_back(&mut self, message: Box<Message>) {
        if let Some(first) = self.messages.first_mut() {
            first.message.get_or_insert(message);
        }
    }

    /// The waiter at the head of the queue leaves, because its message is posted.
    pub(crate) fn leave_first(&mut self) -> Option<Waker> {
        self.messages.pop_first()?.waker
    }

    /// The number that [`Flow::posted`] gives to the last post.
    pub(crate) fn posted(&self) -> Option<u64> {
        self.flow.posted()
    }

    /// The immediates that the peer has returned.
    pub(crate) fn returned(&self) -> u64 {
        self.flow.returned()
    }

    /// Posts `message` if credits and ring space suffice; otherwise asks the peer for them. Returns whether it is posted.
    ///
    /// # Errors
    /// The connection is over.
    pub(crate) fn post(&mut self, message: &Message) -> Result<bool, ChannelError> {
        if !self.may_post()? {
            return Ok(false);
        }
        let defined = self.name_keys(message.requests());
        self.scratch.clear();
        let counted = self.flow.record_counts().map(|counts| (counts, &self.forms[..]));
        record::encode_message(counted, message, &mut self.scratch);
        let is_posted = self.post_encoded()?;
        if is_posted {
            self.counters.sent.count(message);
        } else {
            defined.into_iter().rev().for_each(|defined| self.names.take_back(defined));
        }
        Ok(is_posted)
    }

    /// As [`post`](Self::post), for META_DATA_RESPONSE with a content, which `content` appends.
    pub(crate) fn post_eager(
        &mut self,
        response: EagerResponse<'_>,
        content: impl FnOnce(&C, &mut Vec<u8>),
    ) -> Result<bool, ChannelError> {
        if !self.may_post()? {
            return Ok(false);
        }
        self.scratch.clear();
        let (length, channel) = (response.length, &*self.channel);
        record::encode_content(
            self.flow.record_counts(),
            response,
            |into| content(channel, into),
            &mut self.scratch,
        );
        let is_posted = self.post_encoded()?;
        if is_posted {
            self.counters.sent.meta_data_response += 1;
            self.counters.count_eager_sent(length);
        }
        Ok(is_posted)
    }

    /// Names the keys of `requests`, one after the other, for requests that are posted now. Returns the numbers to take back if
    /// they are not posted.
    fn name_keys(&mut self, requests: &[TensorRequest]) -> Vec<Defined> {
        self.forms.clear();
        let mut defined = Vec::new();
        for request in requests {
            let form = form_of(request, &mut self.names);
            self.forms.push(form);
            defined.extend(self.names.named(&request.key, form));
        }
        defined
    }

    /// Whether a message may be posted, ring space aside; otherwise asks the peer for a credit.
    pub(crate) fn may_post(&mut self) -> Result<bool, ChannelError> {
        if self.flow.has_ring_offer() && !self.move_ring()? {
            return Ok(false);
        }
        if self.flow.has_credit() && !self.is_credit_for_content() {
            return Ok(true);
        }
        self.ask(Blocked { wanted: 0 })?;
        Ok(false)
    }

    /// Whether messages leave the last credit to a content. Messages are woken first, so a content would otherwise wait as long as
    /// there are messages. They may not end: each receive that is given up causes a CANCEL_ACK.
    fn is_credit_for_content(&self) -> bool {
        let may_be_posted = self.contents_in_flight < self.contents_max && !self.contents.is_empty();
        self.is_content_due && may_be_posted && self.flow.is_last_credit()
    }

    /// Posts the message that was encoded last, or asks the peer for room.
    fn post_encoded(&mut self) -> Result<bool, ChannelError> {
        let blocked = self.post_scratch()?;
        match blocked {
            None => self.counters.message_bytes_sent += self.scratch.len() as u64,
            Some(blocked) => self.ask(blocked)?,
        }
        Ok(blocked.is_none())
    }

    /// Posts what was encoded last. Returns what is missing if it cannot be posted.
    fn post_scratch(&mut self) -> Result<Option<Blocked>, ChannelError> {
        match self.flow.post_message(self.scratch.len() as u32) {
            Ok(place) => {
                self.channel.post_message(self.rings.peer, place.first, place.second, &self.scratch)?;
                Ok(None)
            }
            Err(blocked) => Ok(Some(blocked)),
        }
    }

    /// Posts a message of flow control. Returns what is missing if it cannot be posted.
    fn post_control(&mut self, control: Control) -> Result<Option<Blocked>, ChannelError> {
        self.scratch.clear();
        record::encode_control(self.flow.counts(), control, &mut self.scratch);
        self.post_scratch()
    }

    /// Sends ASK unless one is unanswered. An ASK that cannot be posted ends the connection: it would stay unanswered, and no
    /// other would follow.
    fn ask(&mut self, blocked: Blocked) -> Result<(), ChannelError> {
        let Some(ask) = self.flow.ask(blocked) else { return Ok(()) };
        self.counters.asks_sent += 1;
        self.channel.post_record(RecordSlot::Ask, &record::encode_ask(ask))
    }

    /// Moves to the larger ring that the peer has offered: later messages go into it. Returns `false` if the move must wait.
    fn move_ring(&mut self) -> Result<bool, ChannelError> {
        if let Some(blocked) = self.post_control(Control::RingMoved)? {
            self.ask(blocked)?;
            return Ok(false);
        }
        self.counters.rings_moved += 1;
        if let Some(ring) = self.flow.move_ring() {
            self.rings.peer = ring;
        }
        Ok(true)
    }

    /// Stores a larger own ring, which will be offered.
    pub(crate) fn hold_ring(&mut self, ring: C::Lent) {
        self.rings.offer(ring);
    }

    /// Offers the peer a larger own ring. Returns whether the offer is posted.
    pub(crate) fn offer_ring(&mut self, ring: Destination, ring_bytes: u32) -> Result<bool, ChannelError> {
        if let Some(blocked) = self.post_control(Control::RingOffer(ring))? {
            self.ask(blocked)?;
            return Ok(false);
        }
        self.flow.offer_ring(ring_bytes);
        self.counters.rings_offered += 1;
        Ok(true)
    }

    /// After an arrival: returns the credits and ring room of what was read, if that is due and a credit and ring room suffice.
    /// Otherwise a peer that is blocked sends ASK.
    pub(crate) fn return_if_due(&mut self) -> Result<(), ChannelError> {
        if !self.flow.is_return_due()
            || tensorwire_testpoints::chance!("credits are returned only when the peer asks")
        {
            return Ok(());
        }
        let is_posted = self.post_control(Control::CountOnly)?.is_none();
        self.counters.count_only_sent += u64::from(is_posted);
        Ok(())
    }

    /// Whether a content may be posted now; otherwise asks the peer for a credit.
    pub(crate) fn may_post_content(&mut self) -> Result<bool, ChannelError> {
        if self.contents_in_flight >= self.contents_max {
            return Ok(false);
        }
        if self.flow.has_content_credit() {
            return Ok(true);
        }
        self.is_content_due = true;
        self.ask(Blocked { wanted: 0 })?;
        Ok(false)
    }

    /// A content is being posted, in its turn.
    pub(crate) fn count_content(&mut self) {
        // This succeeds: it was checked under this lock.
        let _ = self.flow.post_content();
        self.is_content_due = false;
        self.contents_in_flight += 1;
    }

    /// A content without an immediate is being posted, in its turn. It takes no credit.
    pub(crate) fn count_uncredited(&mut self) {
        self.is_content_due = false;
        self.contents_in_flight += 1;
    }

    /// The bytes of a content may be reused.
    pub(crate) fn end_content(&mut self) {
        self.contents_in_flight -= 1;
    }

    /// How many requests at the head of the queue one message takes.
    fn requests_of_next_message(&mut self) -> usize {
        let alone = tensorwire_testpoints::chance!("each request is sent in a message of its own");
        let most = if alone { 1 } else { self.agreed.requests_per_message as usize };
        let (mut bytes, mut fresh) = (SEVERAL_BYTES, Some(self.names.unassigned()));
        let mut requests = 0;
        for message in self.messages.messages().take(most) {
            let Message::TensorRequest(request) = message else { break };
            if most > 1 {
                let form = form_at_most(form_of(request, &mut self.names), &mut fresh);
                bytes += crate::wire::request_bytes(request, form, &mut self.measure);
            }
            // The first request always fits: a message of one request has no count of requests.
            if bytes > RECORD_BYTES_MAX && requests > 0 {
                break;
            }
            requests += 1;
        }
        requests
    }

    /// Wakes the first waiter of each queue if it may go on, and the housekeeping task if it has work. `owes` is whether the tables
    /// owe the peer a message, and `has_memory` whether they have memory to return.
    #[inline]
    pub(crate) fn wake_next(&mut self, owes: bool, has_memory: bool, after: &mut After<C::Lent>) {
        if !self.messages.is_empty() {
            after.wake(self.next_message());
        }
        if !self.contents.is_empty()
            && self.contents_in_flight < self.contents_max
            && self.flow.may_try_content()
        {
            after.wake(self.contents.take_first());
        }
        if self.keeper.is_some() {
            after.wake(self.keeper_with_work(owes, has_memory));
        }
    }

    /// The task of the first message, if that message may be posted. A message in the queue is left to the housekeeping task if
    /// that task sleeps; while the task is awake, it posts the queue without being woken.
    fn next_message(&mut self) -> Option<Waker> {
        if self.is_queue_deferred || !self.messages.has_sleeper() || !self.flow.may_try_message() {
            return None;
        }
        if self.keeper.is_some() && self.is_message_next() {
            self.is_queue_deferred = true;
            return None;
        }
        self.messages.take_first()
    }

    /// Wakes all tasks that wait here.
    pub(crate) fn wake_all(&mut self, after: &mut After<C::Lent>) {
        after.wake(self.messages.wakers());
        after.wake(self.contents.wakers());
        after.wake(self.keeper.take().map(|keeper| keeper.waker));
    }

    /// Takes the own rings, when nothing can be written into them any more.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = C::Lent> + use<C> {
        self.rings.drain()
    }
}

/// The longest form in which a key may be named that has `form` now, when `fresh` numbers are left before one is
/// reused, which changes the forms of those after it. Spelling the key out with a number is the longest.
fn form_at_most(form: NameForm, fresh: &mut Option<usize>) -> NameForm {
    if !matches!(form, NameForm::Number(_)) {
        *fresh = fresh.and_then(|fresh| fresh.checked_sub(1));
    }
    if fresh.is_some() { form } else { NameForm::Define(0) }
}
