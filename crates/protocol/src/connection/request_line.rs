//! Requests in line for a message. Neighbours in line travel together.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    mem, slice,
    sync::{Arc, MutexGuard},
    task::{Context, Poll, Waker},
};

use super::{Connection, State};
use crate::{
    Channel, ChannelError, Message, Metadata, TensorRequest, Want,
    names::NameForm,
    wire::record::{RECORD_BYTES_MAX, SEVERAL_BYTES},
};

/// TENSOR_REQUESTs that are not posted, by their position in line. A task that finds some at the head of the line posts
/// them, also those of other tasks, so that a future that is not polled delays no other.
#[derive(Debug, Default)]
pub(super) struct RequestLine(BTreeMap<u64, TensorRequest>);

/// A request in line, which it leaves when dropped.
struct RequestInLine<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    request: Option<TensorRequest>,
    /// Memory of the request, until the table has it.
    lent: &'connection mut Option<C::Lent>,
    ticket: Option<u64>,
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
        let mut asking = RequestInLine { connection: self, request: Some(request), lent, ticket: None };
        poll_fn(|context| asking.poll(together, context)).await
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
        let posted = self.try_post_request(state, request)?;
        state.count_asked(slice::from_ref(request));
        Some(posted)
    }

    /// Posts requests as long as there are some at the head of the line, and credits and ring allow it.
    pub(super) fn post_requests_in_line(&self, state: &mut State<C::Lent>) -> Posted {
        // While the line is left, nobody is woken.
        let has_changed = mem::take(&mut state.is_line_left);
        let mut done = Posted { has_changed, ..Posted::default() };
        while done.end.is_none()
            && state.flow.may_try_message()
            && let Some(posted) = self.try_post_head(state, &mut done)
        {
            done.end = posted.err();
        }
        done
    }

    /// Unlocks. If the line has changed, the task that is first now is woken. A post that failed ends the connection.
    pub(super) fn settle_posted(
        &self,
        state: MutexGuard<'_, State<C::Lent>>,
        posted: Posted,
        has_changed: bool,
    ) -> Result<(), ChannelError> {
        let Posted { given, replaced, end, .. } = posted;
        if has_changed || posted.has_changed {
            self.unlock(state);
        } else {
            drop(state);
        }
        drop(replaced);
        given.into_iter().for_each(Waker::wake);
        if let Some(error) = &end {
            self.fail(&error.0);
        }
        end.map_or(Ok(()), Err)
    }

    /// Posts one message of the requests at the head of the line. `None` when there is none, or it must wait.
    fn try_post_head(
        &self,
        state: &mut State<C::Lent>,
        done: &mut Posted,
    ) -> Option<Result<(), ChannelError>> {
        let tickets = self.next_message(state);
        let requests: Vec<_> =
            tickets.iter().filter_map(|ticket| state.request_line.0.get(ticket)).cloned().collect();
        let message = message_of(requests)?;
        let posted = self.try_post(state, &message)?;
        state.count_asked(message.requests());
        done.has_changed = true;
        for ticket in tickets {
            let request = state.request_line.0.remove(&ticket);
            let Some((request, waker)) = request.zip(state.messages.leave(&mut Some(ticket))) else {
                continue;
            };
            // What its task awaits next is the reply, or the connection's end; no reply if it was given another's content.
            match state.requests.is_given(request.index) {
                true => done.given.push(waker),
                false => done.replaced.extend(state.requests.leave_waker(request.index, waker)),
            }
        }
        Some(posted)
    }

    /// The requests at the head of the line that one message takes.
    fn next_message(&self, state: &mut State<C::Lent>) -> Vec<u64> {
        let State { request_line, messages, measure, names, .. } = state;
        if request_line.0.is_empty() {
            return Vec::new();
        }
        let alone = tensorwire_testpoints::chance!("each request is sent in a message of its own");
        let most = if alone { 1 } else { self.agreed.requests_per_message as usize };
        let (mut bytes, mut fresh) = (SEVERAL_BYTES, Some(names.unassigned()));
        let mut next = Vec::new();
        for ticket in messages.tickets().take(most) {
            let Some(request) = request_line.0.get(&ticket) else { break };
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

/// What became of requests in line.
#[derive(Default)]
pub(super) struct Posted {
    /// Another one may be first now.
    has_changed: bool,
    /// Whose have the content of another. Woken without the lock.
    given: Vec<Waker>,
    /// Dropped without the lock.
    replaced: Vec<Waker>,
    /// Why the connection is over, if the last post failed.
    end: Option<ChannelError>,
}

impl<L> State<L> {
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

impl<C: Channel> RequestInLine<'_, C> {
    fn poll(&mut self, together: bool, context: &Context<'_>) -> Poll<Result<bool, ChannelError>> {
        let connection = self.connection;
        let mut state = connection.lock();
        if self.ticket.is_some_and(|ticket| !state.request_line.0.contains_key(&ticket)) {
            // Another task has posted it. The reply may have come, and counts even if the connection is over by now.
            self.ticket = None;
            return Poll::Ready(Ok(false));
        }
        if let Err(over) = state.failure() {
            return Poll::Ready(Err(over));
        }
        if let Some(request) = self.request.take() {
            let index = request.index;
            if let Some(lent) = self.lent.take() {
                state.requests.keep(index, lent);
            }
            match self.begin(&mut state, request, together, context) {
                Some(posted) => {
                    let is_alone = state.requests.may_help(index);
                    connection.unlock(state);
                    return Poll::Ready(connection.over_if_failed(posted).map(|()| is_alone));
                }
                None if together => {
                    // The others of the task are polled before the housekeeping task.
                    state.is_line_left = true;
                    let keeper = state.keeper_with_work();
                    drop(state);
                    keeper.into_iter().for_each(Waker::wake);
                    return Poll::Pending;
                }
                None => {}
            }
        }
        let posted = connection.post_requests_in_line(&mut state);
        if self.ticket.is_some_and(|ticket| state.request_line.0.contains_key(&ticket)) {
            let replaced = state.messages.wait(&mut self.ticket, context.waker());
            connection.settle_posted(state, posted, false)?;
            drop(replaced);
            return Poll::Pending;
        }
        self.ticket = None;
        Poll::Ready(connection.settle_posted(state, posted, true).map(|()| false))
    }

    /// Posts a request that has nobody before it and waits for nobody, else joins the line.
    fn begin(
        &mut self,
        state: &mut State<C::Lent>,
        request: TensorRequest,
        together: bool,
        context: &Context<'_>,
    ) -> Option<Result<(), ChannelError>> {
        if !together && let Some(posted) = self.connection.try_post_first(state, &request) {
            return Some(posted);
        }
        // A new ticket replaces no waker.
        let _ = state.messages.wait(&mut self.ticket, context.waker());
        if let Some(ticket) = self.ticket {
            state.request_line.0.insert(ticket, request);
        }
        None
    }
}

impl<C: Channel> Drop for RequestInLine<'_, C> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.connection.lock();
        let request = state.request_line.0.remove(&ticket);
        let waker = state.messages.leave(&mut self.ticket);
        self.connection.unlock(state);
        drop((request, waker));
    }
}
