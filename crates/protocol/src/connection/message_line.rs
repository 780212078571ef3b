//! Messages in line whose futures a user may leave unpolled: requests, and notes. Neighbouring requests travel together.
//!
//! When credits come, the line is *left* to whoever posts next, or else to the housekeeping task, which runs later than the tasks
//! that are about to join the line. So many requests share a message, and none depends on a future of a user being polled.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    mem, slice,
    sync::{Arc, MutexGuard},
    task::{Context, Poll, Waker},
};

use super::{Connection, State};
use crate::{
    Channel, ChannelError, Message, Metadata, TensorReRequest, TensorRequest, Want,
    names::NameForm,
    wire::record::{RECORD_BYTES_MAX, SEVERAL_BYTES},
};

/// Messages that are not posted, by their position in line. A task that finds some at the head of the line posts them, also those of
/// other tasks, so that a future that is not polled delays no other.
#[derive(Debug, Default)]
pub(super) struct MessageLine(BTreeMap<u64, Waiting>);

/// A message in line.
#[derive(Debug)]
pub(crate) enum Waiting {
    /// TENSOR_REQUEST.
    Request(TensorRequest),
    /// TENSOR_RE_REQUEST for a value of these metadata. Not sent if the peer has given up meanwhile.
    ReRequest(TensorReRequest, Metadata),
    /// A note.
    Note(Message),
}

/// A position in line, which its message leaves when dropped.
struct MessageInLine<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    ticket: Option<u64>,
}

/// A request in line.
struct RequestInLine<'connection, C: Channel> {
    line: MessageInLine<'connection, C>,
    request: Option<TensorRequest>,
    /// Memory of the request, until the table has it.
    lent: &'connection mut Option<C::Lent>,
}

impl<C: Channel> Connection<C> {
    /// Has the table hold `lent`, unless the connection is over, and sends TENSOR_REQUEST when it is its turn, in one message
    /// with others that stand next to it in line. One that goes `together` with others of its task lets these take their
    /// positions first. Returns whether there was no other request, so that its task may poll for the reply. If another task
    /// posts it, this one is woken by the reply.
    ///
    /// # Cancel safety
    /// A request that is not posted when the future is dropped never will be.
    pub(crate) async fn send_request(
        &self,
        request: TensorRequest,
        lent: &mut Option<C::Lent>,
        together: bool,
    ) -> Result<bool, ChannelError> {
        let line = MessageInLine { connection: self, ticket: None };
        let mut asking = RequestInLine { line, request: Some(request), lent };
        poll_fn(|context| asking.poll(together, context)).await
    }

    /// Sends `message` when it is its turn.
    ///
    /// # Cancel safety
    /// A message that is not posted when the future is dropped never will be.
    pub(crate) async fn send_in_line(&self, message: Waiting) -> Result<(), ChannelError> {
        let mut line = MessageInLine { connection: self, ticket: None };
        let mut message = Some(message);
        poll_fn(|context| {
            let mut state = self.lock();
            if line.is_posted(&state) {
                return Poll::Ready(Ok(()));
            }
            state.failure()?;
            if let Some(posted) = message.take().and_then(|message| line.begin(&mut state, message, context))
            {
                self.unlock(state);
                return Poll::Ready(self.over_if_failed(posted));
            }
            line.go_on(state, context)
        })
        .await
    }

    /// Posts a request if nobody stands in line for a message, and credits and ring allow it.
    pub(crate) fn try_post_first(
        &self,
        state: &mut State<C::Lent>,
        request: &TensorRequest,
    ) -> Option<Result<(), ChannelError>> {
        if !state.messages.is_turn(None) {
            return None;
        }
        self.try_post_alone(state, request)
    }

    /// Posts a request in a message of its own, if credits and ring allow it.
    fn try_post_alone(
        &self,
        state: &mut State<C::Lent>,
        request: &TensorRequest,
    ) -> Option<Result<(), ChannelError>> {
        let posted = self.try_post_request(state, request)?;
        state.count_asked(slice::from_ref(request));
        Some(posted)
    }

    /// Posts messages as long as there are some at the head of the line, and credits and ring allow it.
    pub(super) fn post_line(&self, state: &mut State<C::Lent>) -> Posted {
        let was_left = mem::take(&mut state.is_line_left);
        let mut done = Posted::default();
        while done.end.is_none()
            && state.flow.may_try_message()
            && let Some(posted) = self.try_post_head(state, &mut done)
        {
            done.has_changed = true;
            done.end = posted.err();
        }
        // While the line was left, nobody was woken. A message that must wait is left again when something changes.
        done.has_changed |= was_left && !state.is_message_next();
        done
    }

    /// Unlocks. If the line has changed, the task that is first now is woken. A post that failed ends the connection.
    pub(super) fn settle_posted(
        &self,
        state: MutexGuard<'_, State<C::Lent>>,
        posted: Posted,
        has_changed: bool,
    ) -> Result<(), ChannelError> {
        let Posted { given, replaced, end, has_changed: has_posted } = posted;
        if has_changed || has_posted {
            self.unlock(state);
        } else {
            drop(state);
        }
        drop(replaced);
        given.into_iter().for_each(Waker::wake);
        end.map_or(Ok(()), |error| self.over_if_failed(Err(error)))
    }

    /// Posts one message: the one at the head of the line, or the requests there. `None` when there is none, or it must wait.
    fn try_post_head(
        &self,
        state: &mut State<C::Lent>,
        done: &mut Posted,
    ) -> Option<Result<(), ChannelError>> {
        let first = state.messages.tickets().next()?;
        match state.message_line.0.get(&first)? {
            Waiting::Request(_) => self.try_post_requests(state, done),
            Waiting::ReRequest(..) | Waiting::Note(_) => {
                let message = state.message_line.0.remove(&first)?;
                let Some(posted) = self.try_post_waiting(state, &message) else {
                    state.message_line.0.insert(first, message);
                    return None;
                };
                done.given.extend(state.messages.leave(&mut Some(first)));
                Some(posted)
            }
        }
    }

    /// Posts one message if credits and ring allow it now.
    fn try_post_waiting(
        &self,
        state: &mut State<C::Lent>,
        message: &Waiting,
    ) -> Option<Result<(), ChannelError>> {
        match message {
            Waiting::Request(request) => self.try_post_alone(state, request),
            Waiting::ReRequest(request, metadata) => {
                if !state.requests.is_described(request.index) {
                    return Some(Ok(()));
                }
                let posted = self.try_post(state, &Message::TensorReRequest(request.clone()))?;
                state.requests.asked_again(request.index, metadata.clone());
                Some(posted)
            }
            Waiting::Note(note) => self.try_post(state, note),
        }
    }

    /// Posts one message of the requests at the head of the line.
    fn try_post_requests(
        &self,
        state: &mut State<C::Lent>,
        done: &mut Posted,
    ) -> Option<Result<(), ChannelError>> {
        // Before anything is allocated for it.
        if let Err(error) = self.may_post(state)? {
            return Some(Err(error));
        }
        let tickets = self.next_message(state);
        let requests: Vec<_> =
            tickets.iter().filter_map(|ticket| state.message_line.request(*ticket)).cloned().collect();
        let message = message_of(requests)?;
        let posted = self.try_post(state, &message)?;
        state.count_asked(message.requests());
        for (ticket, request) in tickets.into_iter().zip(message.requests()) {
            state.message_line.0.remove(&ticket);
            let Some(waker) = state.messages.leave(&mut Some(ticket)) else { continue };
            // What its task awaits next is the reply, or the connection's end; no reply if it was given another's content.
            match state.requests.is_given(request.index) {
                true => done.given.push(waker),
                false => done.replaced.extend(state.requests.hand_over_waker(request.index, waker)),
            }
        }
        Some(posted)
    }

    /// The requests at the head of the line that one message takes.
    fn next_message(&self, state: &mut State<C::Lent>) -> Vec<u64> {
        let State { message_line, messages, measure, names, .. } = state;
        let alone = tensorwire_testpoints::chance!("each request is sent in a message of its own");
        let most = if alone { 1 } else { self.agreed.requests_per_message as usize };
        let (mut bytes, mut fresh) = (SEVERAL_BYTES, Some(names.unassigned()));
        let mut next = Vec::new();
        for ticket in messages.tickets().take(most) {
            let Some(request) = message_line.request(ticket) else { break };
            if most > 1 {
                let form = form_at_most(names.form(&request.key), &mut fresh);
                bytes += crate::wire::request_bytes(request, form, measure);
            }
            // The first always fits: alone it needs no number of requests.
            if bytes > RECORD_BYTES_MAX && !next.is_empty() {
                break;
            }
            next.push(ticket);
        }
        next
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

impl MessageLine {
    fn request(&self, ticket: u64) -> Option<&TensorRequest> {
        match self.0.get(&ticket)? {
            Waiting::Request(request) => Some(request),
            Waiting::ReRequest(..) | Waiting::Note(_) => None,
        }
    }
}

/// What became of messages in line.
#[derive(Default)]
pub(super) struct Posted {
    /// Another one may be first now.
    has_changed: bool,
    /// Of tasks whose message was posted, and whose request has the content of another. Woken without the lock.
    given: Vec<Waker>,
    /// Dropped without the lock.
    replaced: Vec<Waker>,
    /// Why the connection is over, if the last post failed.
    end: Option<ChannelError>,
}

impl<L> State<L> {
    /// Whether the first in line is a message, and not a task.
    pub(super) fn is_message_next(&self) -> bool {
        self.messages.tickets().next().is_some_and(|ticket| self.message_line.0.contains_key(&ticket))
    }

    /// `requests` are being posted.
    fn count_asked(&mut self, requests: &[TensorRequest]) {
        for request in requests {
            let (is_view, is_versioned) = (request.want == Want::View, request.scope.is_versioned());
            self.requests.asked(request.index, expected(request), is_view, is_versioned);
        }
    }
}

/// One request or several in one message.
fn message_of(mut requests: Vec<TensorRequest>) -> Option<Message> {
    match requests.len() {
        0 => None,
        1 => requests.pop().map(Message::TensorRequest),
        _ => Some(Message::TensorRequests(requests)),
    }
}

/// What may be written.
fn expected(request: &TensorRequest) -> Option<Arc<[Metadata]>> {
    if request.want == Want::Eager { None } else { Some(request.known.clone()) }
}

impl<C: Channel> MessageInLine<'_, C> {
    /// Whether it was in line and was posted, by whichever task.
    fn is_posted(&mut self, state: &State<C::Lent>) -> bool {
        self.ticket.take_if(|ticket| !state.message_line.0.contains_key(ticket)).is_some()
    }

    /// Posts a message that has nobody before it, else joins the line.
    fn begin(
        &mut self,
        state: &mut State<C::Lent>,
        message: Waiting,
        context: &Context<'_>,
    ) -> Option<Result<(), ChannelError>> {
        if state.messages.is_turn(None)
            && let Some(posted) = self.connection.try_post_waiting(state, &message)
        {
            return Some(posted);
        }
        self.join(state, message, context);
        None
    }

    fn join(&mut self, state: &mut State<C::Lent>, message: Waiting, context: &Context<'_>) {
        // A new ticket replaces no waker.
        let _ = state.messages.wait(&mut self.ticket, context.waker());
        if let Some(ticket) = self.ticket {
            state.message_line.0.insert(ticket, message);
        }
    }

    /// Posts what may be posted of the line, in which the message stays if it was not posted.
    fn go_on(
        &mut self,
        mut state: MutexGuard<'_, State<C::Lent>>,
        context: &Context<'_>,
    ) -> Poll<Result<(), ChannelError>> {
        let posted = self.connection.post_line(&mut state);
        if !self.is_posted(&state) {
            let replaced = state.messages.wait(&mut self.ticket, context.waker());
            self.connection.settle_posted(state, posted, false)?;
            drop(replaced);
            return Poll::Pending;
        }
        Poll::Ready(self.connection.settle_posted(state, posted, true))
    }
}

impl<C: Channel> RequestInLine<'_, C> {
    fn poll(&mut self, together: bool, context: &Context<'_>) -> Poll<Result<bool, ChannelError>> {
        let connection = self.line.connection;
        let mut state = connection.lock();
        if self.line.is_posted(&state) {
            // The reply may have come, and counts even if the connection is over by now.
            return Poll::Ready(Ok(false));
        }
        if let Err(over) = state.failure() {
            return Poll::Ready(Err(over));
        }
        if let Some(request) = self.request.take() {
            let index = request.index;
            if let Some(lent) = self.lent.take() {
                state.requests.store_memory(index, lent);
            }
            if together {
                // The others of the task are polled before the housekeeping task.
                self.line.join(&mut state, Waiting::Request(request), context);
                state.is_line_left = true;
                let keeper = state.keeper_with_work();
                drop(state);
                keeper.into_iter().for_each(Waker::wake);
                return Poll::Pending;
            }
            if let Some(posted) = self.line.begin(&mut state, Waiting::Request(request), context) {
                let is_alone = state.requests.may_help(index);
                connection.unlock(state);
                return Poll::Ready(connection.over_if_failed(posted).map(|()| is_alone));
            }
        }
        self.line.go_on(state, context).map_ok(|()| false)
    }
}

impl<C: Channel> Drop for MessageInLine<'_, C> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.connection.lock();
        let message = state.message_line.0.remove(&ticket);
        let waker = state.messages.leave(&mut self.ticket);
        self.connection.unlock(state);
        drop((message, waker));
    }
}
