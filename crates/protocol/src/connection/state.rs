//! The state of a connection: its machines, and the operations that concern several of them.

use std::{collections::BTreeSet, sync::Arc, task::Waker};

use smallvec::SmallVec;

use crate::{
    Channel, ChannelError, Counters, Message, MetaDataResponse, Parameters, PeerMisbehaved, RequestIndex,
    Rings, StepId, TensorRequest, TensorWrite,
    after::After,
    line::{ArrivalError, Line},
    notes::NoteChannels,
    requests::{Arrived, ArrivedResult, Requests},
    responses::Responses,
    wire::{EagerResponse, record::Record},
};

/// Everything that requests and responses share. Locked briefly: never across an await, a wake-up or a return
/// of memory.
pub(crate) struct State<C: Channel> {
    failure: Option<Failure>,
    /// No receive is admitted any more: this side uses another connection.
    is_retired: bool,
    /// How many operations of several requests need the connection. It is not retired before they end.
    pub(super) stays: usize,
    pub(crate) line: Line<C>,
    pub(crate) requests: Requests<C::Lent>,
    pub(crate) responses: Responses,
    pub(crate) notes: NoteChannels,
}

struct Failure {
    why: String,
    /// Steps that were under way. Stored, because each task that the failure wakes gives its requests up.
    steps: BTreeSet<StepId>,
}

/// Requests of a message that were opened, in order. Usually one.
pub(super) type Opened = SmallVec<[TensorRequest; 1]>;

impl<C: Channel> State<C> {
    pub(super) fn new(channel: Arc<C>, rings: Rings<C::Lent>, local: &Parameters, peer: &Parameters) -> Self {
        let line = Line::new(channel, rings, local, peer);
        let agreed = line.agreed();
        Self {
            failure: None,
            is_retired: false,
            stays: 0,
            line,
            requests: Requests::new(agreed),
            responses: Responses::new(agreed),
            notes: NoteChannels::default(),
        }
    }

    pub(crate) fn failure(&self) -> Result<(), ChannelError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(ChannelError(failure.why.clone())))
    }

    /// Whether a receive may begin.
    ///
    /// # Errors
    /// The connection is over or retired.
    pub(crate) fn admits(&self) -> Result<(), ChannelError> {
        self.failure()?;
        let is_retired = || ChannelError("the connection is retired: another one is in use".to_owned());
        if self.is_retired { Err(is_retired()) } else { Ok(()) }
    }

    pub(super) fn is_retired(&self) -> bool {
        self.is_retired
    }

    /// See [`Connection::retire`](super::Connection::retire).
    pub(super) fn retire(&mut self) -> bool {
        self.is_retired |=
            self.failure.is_none() && self.stays == 0 && self.notes.is_empty() && self.requests.may_move();
        self.is_retired
    }

    /// The steps that are under way now, and those that were when the connection failed.
    pub(super) fn steps_under_way(&self) -> BTreeSet<StepId> {
        let now = self.requests.steps().chain(self.responses.steps());
        let at_end = self.failure.iter().flat_map(|failure| &failure.steps).copied();
        at_end.chain(now).collect()
    }

    /// Ends the connection, and wakes all tasks that wait for anything. The first reason stays.
    pub(crate) fn fail(&mut self, why: &str, after: &mut After<C::Lent>) {
        if self.failure.is_some() {
            return;
        }
        self.take_last_mail(after);
        self.failure = Some(Failure { why: why.to_owned(), steps: self.steps_under_way() });
        after.wake(self.requests.wakers());
        after.wake(self.responses.wakers());
        after.wake(self.notes.wakers());
        self.line.wake_all(after);
        after.leave_queues();
    }

    /// Ends the connection because of an arrival. Returns an error if the peer caused it.
    pub(super) fn end(
        &mut self,
        error: ArrivalError,
        after: &mut After<C::Lent>,
    ) -> Result<(), PeerMisbehaved> {
        let (rule, why) = match error {
            ArrivalError::Lost(error) => {
                self.fail(&error.0, after);
                return Ok(());
            }
            ArrivalError::Malformed(error) => {
                let rule = PeerMisbehaved::Malformed;
                (rule, format!("{rule}: {error}"))
            }
            ArrivalError::Broken(rule) => (rule, rule.to_string()),
        };
        self.fail(&why, after);
        Err(rule)
    }

    /// Wakes the first task of each queue if it may go on, and the housekeeping task if it has work.
    #[inline]
    pub(super) fn wake_next(&mut self, after: &mut After<C::Lent>) {
        self.requests.wake_next(after);
        self.line.wake_next(self.owes_messages(), self.requests.has_returns(), after);
    }

    /// Whether the tables owe the peer a message.
    pub(crate) fn owes_messages(&self) -> bool {
        let by_requests = self.requests.has_cancels() || self.requests.owes_buffers();
        self.notes.owed_wake_up().is_some() || self.responses.has_owed() || by_requests
    }

    /// Posts `message` if credits and ring space suffice, and changes the state of its request. Otherwise asks the peer for them.
    /// Returns whether it is posted.
    ///
    /// # Errors
    /// The connection is over.
    pub(crate) fn post(&mut self, message: &Message) -> Result<bool, ChannelError> {
        if let Message::TensorReRequest(request) = message
            && !self.requests.is_described(request.index)
        {
            // The peer has given up meanwhile.
            return Ok(true);
        }
        if !self.line.post(message)? {
            return Ok(false);
        }
        match message {
            Message::TensorRequest(request) => self.requests.asked(request),
            Message::TensorRequests(requests) => {
                requests.iter().for_each(|request| self.requests.asked(request));
            }
            Message::TensorReRequest(request) => self.requests.asked_again(request.index),
            Message::Cancel(index) => self.requests.cancel_posted(*index),
            Message::MetaDataResponse(response) if !response.loan_follows => {
                self.responses.described(response.index, response.metadata.byte_length);
            }
            Message::ErrorStatus(error) => self.responses.answered(error.index),
            Message::BufferRequest(request) => self.responses.buffers_requested(request),
            Message::BufferResponse(buffers) | Message::BufferIdle(buffers) => {
                self.requests.buffers_posted(buffers);
            }
            Message::TensorWrite(write) => {
                if let Some(content) = &write.value.content {
                    self.line.counters.count_eager_sent(content.len() as u64);
                }
                self.responses.value_sent(write.value.index, self.line.posted());
            }
            Message::MetaDataResponse(_) | Message::CancelAck(_) | Message::Version(_) | Message::Note(_) => {
            }
        }
        Ok(true)
    }

    /// As [`post`](Self::post), for META_DATA_RESPONSE with a content, which answers the request.
    pub(crate) fn post_eager(
        &mut self,
        response: EagerResponse<'_>,
        bytes: Option<&C::Bytes>,
    ) -> Result<bool, ChannelError> {
        let index = response.index;
        let is_posted = self.line.post_eager(response, |channel, into| {
            bytes.into_iter().for_each(|bytes| channel.copy_out(bytes, into));
        })?;
        if is_posted {
            self.responses.wrote(index, self.line.posted());
            self.responses.answered(index);
        }
        Ok(is_posted)
    }

    /// Runs `post` if no message waits before it. Returns whether it has posted.
    ///
    /// # Errors
    /// The connection is over.
    pub(crate) fn post_now(
        &mut self,
        after: &mut After<C::Lent>,
        post: impl FnOnce(&mut Self) -> Result<bool, ChannelError>,
    ) -> Result<bool, ChannelError> {
        self.failure()?;
        let has_changed = self.post_queue(after)?;
        let is_posted = self.line.has_no_message() && post(self)?;
        after.wakes_queues = has_changed || is_posted;
        Ok(is_posted)
    }

    /// Posts a message that the tables owe the peer, if there is one. Returns `false` if it must wait.
    pub(crate) fn post_owed(&mut self) -> Result<bool, ChannelError> {
        if self.notes.owed_wake_up().is_some() {
            return self.post_wake_up();
        }
        if let Some(message) = self.responses.next_owed() {
            let is_posted = self.post(&message)?;
            if is_posted {
                self.responses.owed_posted();
            }
            return Ok(is_posted);
        }
        if let Some(message) = self.requests.next_buffers() {
            let is_posted = self.post(&message)?;
            if is_posted {
                self.requests.owed_buffers_posted();
            }
            return Ok(is_posted);
        }
        self.requests.next_cancel().map_or(Ok(true), |index| self.post(&Message::Cancel(index)))
    }

    /// Posts messages from the head of the queue while credits and ring space suffice. Returns whether another waiter may be first
    /// now.
    pub(crate) fn post_queue(&mut self, after: &mut After<C::Lent>) -> Result<bool, ChannelError> {
        let was_deferred = self.line.take_deferred();
        let mut has_changed = false;
        while self.line.may_try_message() && self.post_first(after)? {
            has_changed = true;
        }
        // While the queue was deferred, no waiter was woken. A message that must wait is deferred again when something changes.
        Ok(has_changed || was_deferred && !self.line.is_message_next())
    }

    /// Posts one message: the one at the head of the queue, or several requests there. Returns `false` when there is none, or it
    /// must wait.
    fn post_first(&mut self, after: &mut After<C::Lent>) -> Result<bool, ChannelError> {
        // This check comes before anything is allocated for the message.
        if !self.line.is_message_next() || !self.line.may_post()? {
            return Ok(false);
        }
        let Some(message) = self.line.take_message() else { return Ok(false) };
        if !self.post(&message)? {
            self.line.put_back(message);
            return Ok(false);
        }
        let requests = message.requests();
        for at in 0..requests.len().max(1) {
            let waker = self.line.leave_first();
            match requests.get(at) {
                // The request's task next awaits the reply, or the connection's end. A request that was given another's content
                // gets no reply.
                Some(request) if !self.requests.is_given(request.index) => {
                    after.drop(waker.and_then(|waker| self.requests.hand_over_waker(request.index, waker)));
                }
                _ => after.wake(waker),
            }
        }
        Ok(true)
    }

    /// A message has arrived, of which `written` bytes were written last. Returns the requests that it opens.
    #[inline]
    pub(super) fn on_message(
        &mut self,
        written: u64,
        after: &mut After<C::Lent>,
    ) -> Result<Opened, ArrivalError> {
        let record = self.line.read_record(written)?;
        self.responses.taken_in(self.line.returned());
        match record {
            Record::Message(message) => {
                self.line.return_if_due()?;
                self.act(message, after)
            }
            Record::Control(control) => {
                self.line.on_control(control, after)?;
                Ok(Opened::new())
            }
        }
    }

    #[inline(always)]
    fn act(&mut self, message: Message, after: &mut After<C::Lent>) -> Result<Opened, ArrivalError> {
        let mut opened = Opened::new();
        match message {
            Message::TensorRequest(request) => {
                self.responses.open(&request)?;
                opened.push(request);
            }
            Message::TensorRequests(requests) => {
                tensorwire_testpoints::mark!("several keys in one message");
                requests.iter().try_for_each(|request| self.responses.open(request))?;
                opened = requests.into();
            }
            Message::TensorReRequest(request) => {
                let task = self.responses.re_request(request.index, request.destination)?;
                self.concern(task, after);
            }
            Message::Cancel(index) => after.wake(self.responses.cancel(index)?),
            Message::Note(note) => self.on_note(note, after)?,
            Message::MetaDataResponse(response) => self.on_meta_data_response(response, after)?,
            Message::ErrorStatus(error) => {
                let arrived = self.requests.error_status(error.index, error.status)?;
                self.on_answer(arrived, after);
            }
            Message::CancelAck(index) => {
                let arrived = self.requests.cancel_ack(index)?;
                self.on_answer(arrived, after);
            }
            Message::Version(notice) => {
                let arrived = self.requests.version_came(notice)?;
                self.on_answer(arrived, after);
            }
            Message::BufferRequest(request) => {
                let arrived = self.requests.buffer_request(request)?;
                self.on_answer(arrived, after);
            }
            Message::TensorWrite(write) => self.on_tensor_write(write, after)?,
            Message::BufferResponse(buffers) => {
                let task = self.responses.buffers_named(buffers)?;
                self.concern(task, after);
            }
            Message::BufferIdle(buffers) => {
                let task = self.responses.values_returned(buffers)?;
                self.concern(task, after);
            }
        }
        Ok(opened)
    }

    fn on_tensor_write(
        &mut self,
        write: TensorWrite,
        after: &mut After<C::Lent>,
    ) -> Result<(), PeerMisbehaved> {
        let eager = write.value.content.as_ref().map(|content| content.len() as u64);
        let arrived = self.requests.tensor_write(write)?;
        if arrived.bytes > 0 {
            self.line.counters.count_content(arrived.bytes);
        }
        self.on_answer_with(eager, arrived, after);
        Ok(())
    }

    fn on_meta_data_response(
        &mut self,
        response: MetaDataResponse,
        after: &mut After<C::Lent>,
    ) -> Result<(), PeerMisbehaved> {
        let eager = response.content.as_ref().map(|content| content.len() as u64);
        let arrived = self.requests.meta_data_response(response)?;
        self.on_answer_with(eager, arrived, after);
        Ok(())
    }

    /// As [`on_answer`](Self::on_answer), for a message with a content of so many bytes.
    fn on_answer_with(&mut self, eager: Option<u64>, arrived: Arrived<C::Lent>, after: &mut After<C::Lent>) {
        if let Some(bytes) = eager.filter(|_| !arrived.is_ignored) {
            self.line.counters.count_eager(bytes);
        }
        self.on_answer(arrived, after);
    }

    /// An acknowledgement, ASK or ANSWER has arrived.
    pub(super) fn on_return(&mut self, length: u64) -> Result<(), ArrivalError> {
        self.line.on_return(length)?;
        self.responses.taken_in(self.line.returned());
        Ok(())
    }

    /// A content has arrived, written or as a loan. `answer` passes it to its request, and `count` counts its bytes.
    pub(super) fn on_content(
        &mut self,
        after: &mut After<C::Lent>,
        answer: impl FnOnce(&mut Requests<C::Lent>) -> ArrivedResult<C::Lent>,
        count: impl FnOnce(&mut Counters, u64),
    ) -> Result<(), ArrivalError> {
        self.line.on_content()?;
        let arrived = answer(&mut self.requests)?;
        if !arrived.is_ignored {
            count(&mut self.line.counters, arrived.bytes);
        }
        self.on_answer(arrived, after);
        Ok(())
    }

    /// Counts an answer that no request waits for, and passes its effects on.
    fn on_answer(&mut self, arrived: Arrived<C::Lent>, after: &mut After<C::Lent>) {
        self.line.counters.ignored += u64::from(arrived.is_ignored);
        after.wake(arrived.wake);
        after.wake(arrived.next);
        after.take_back(arrived.returned);
    }

    /// Wakes the tasks that a message concerns. With `None` the message concerns nothing, and is counted as ignored.
    pub(super) fn concern(
        &mut self,
        tasks: Option<impl IntoIterator<Item = Waker>>,
        after: &mut After<C::Lent>,
    ) {
        match tasks {
            Some(wakers) => after.wake(wakers),
            None => self.line.counters.ignored += 1,
        }
    }

    /// The content of request `index` is being posted, in its turn.
    pub(crate) fn count_content(&mut self, index: RequestIndex) {
        self.line.count_content();
        self.responses.wrote(index, self.line.posted());
    }

    /// A content without an immediate is being posted for the subscription `index`, in its turn.
    pub(crate) fn count_uncredited(&mut self, index: RequestIndex, bytes: u64) {
        self.line.count_uncredited();
        self.responses.writes(index);
        self.line.counters.count_content_sent(bytes);
    }

    /// A content is being lent to the subscription `index`, in its turn.
    pub(crate) fn count_lent(&mut self, index: RequestIndex, bytes: u64) {
        self.line.count_content();
        self.responses.writes(index);
        self.line.counters.count_loan_sent(bytes);
    }

    /// The bytes of a content of the subscription `index` may be reused.
    pub(crate) fn end_value(&mut self, index: RequestIndex) {
        self.line.end_content();
        self.responses.written_out(index);
    }

    /// The bytes of the content of request `index` may be reused.
    pub(crate) fn end_content(&mut self, index: RequestIndex) {
        self.line.end_content();
        self.responses.answered(index);
    }
}
