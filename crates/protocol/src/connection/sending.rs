//! Futures that wait for their turn: of a message, a request, a content.

use std::{
    future::poll_fn,
    task::{Context, Poll, Waker},
};

use super::{Connection, State};
use crate::{Channel, ChannelError, Message, RequestIndex, after::After, line::Queue};

/// A position in a queue, given up when dropped, together with the message that waits there.
pub(super) struct Position<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    queue: Queue,
    pub(super) ticket: Option<u64>,
}

impl<'connection, C: Channel> Position<'connection, C> {
    /// None yet.
    pub(super) fn new(connection: &'connection Connection<C>, queue: Queue) -> Self {
        Self { connection, queue, ticket: None }
    }

    /// Waits until `attempt` returns a value. `attempt` runs under the connection's lock, and changes nothing when it returns
    /// none.
    async fn turn<T>(
        &mut self,
        mut attempt: impl FnMut(&mut State<C>) -> Result<Option<T>, ChannelError>,
    ) -> Result<T, ChannelError> {
        poll_fn(|context| {
            self.connection.poll_change(|state, after| {
                state.failure()?;
                let posts = self.queue == Queue::Messages && state.post_queue(after)?;
                if state.line.queue(self.queue).is_turn(self.ticket)
                    && let Some(value) = attempt(state)?
                {
                    let left = state.line.queue(self.queue).leave(&mut self.ticket);
                    after.drop(left.and_then(|left| left.waker));
                    return Ok(Poll::Ready(value));
                }
                after.drop(state.line.queue(self.queue).wait(&mut self.ticket, context.waker()));
                after.wakes_queues = posts;
                Ok(Poll::Pending)
            })
        })
        .await
    }

    /// Whether the message was in the queue and was posted, by any task.
    fn is_posted(&mut self, state: &State<C>) -> bool {
        self.ticket.take_if(|ticket| !state.line.messages.contains(*ticket)).is_some()
    }

    /// Posts a message that has none before it; otherwise the message joins the queue.
    fn begin(&mut self, message: Message, state: &mut State<C>, waker: &Waker) -> Result<bool, ChannelError> {
        let is_posted = state.line.messages.is_turn(None) && state.post(&message)?;
        if !is_posted {
            self.ticket = Some(state.line.messages.join(waker, Some(Box::new(message))));
        }
        Ok(is_posted)
    }

    /// Posts what may be posted of the queue, in which the message stays if it was not posted.
    fn go_on(
        &mut self,
        state: &mut State<C>,
        after: &mut After<C::Lent>,
        waker: &Waker,
    ) -> Result<Poll<()>, ChannelError> {
        let has_changed = state.post_queue(after)?;
        if self.is_posted(state) {
            return Ok(Poll::Ready(()));
        }
        after.drop(state.line.messages.wait(&mut self.ticket, waker));
        after.wakes_queues = has_changed;
        Ok(Poll::Pending)
    }
}

impl<C: Channel> Drop for Position<'_, C> {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            let left =
                self.connection.change(|state, _| state.line.queue(self.queue).leave(&mut self.ticket));
            drop(left);
        }
    }
}

/// Sends `message` when it is its turn.
///
/// # Errors
/// The connection is over.
///
/// # Cancel safety
/// A message that is not posted when the future is dropped never will be.
pub(crate) async fn send<C: Channel>(
    connection: &Connection<C>,
    message: Message,
) -> Result<(), ChannelError> {
    let mut position = Position::new(connection, Queue::Messages);
    let mut message = Some(message);
    poll_fn(|context| {
        connection.poll_change(|state, after| {
            if position.is_posted(state) {
                return Ok(Poll::Ready(()));
            }
            state.failure()?;
            if let Some(message) = message.take()
                && position.begin(message, state, context.waker())?
            {
                return Ok(Poll::Ready(()));
            }
            position.go_on(state, after, context.waker())
        })
    })
    .await
}

/// A request that is to be sent.
pub(crate) struct Asking<'a, L> {
    pub(crate) index: RequestIndex,
    pub(crate) request: Option<Message>,
    /// Memory of the request, until the table has it.
    pub(crate) lent: &'a mut Option<L>,
    /// Whether the others of its task take their positions before it is posted.
    pub(crate) together: bool,
}

/// Has the table hold the request's memory, unless the connection is over, and sends TENSOR_REQUEST when it is its turn, in one message
/// with others that are next to it in the queue. Returns whether there was no other request, so that its task may poll for the
/// reply. If another task posts it, this one is woken by the reply.
///
/// # Cancel safety
/// A request that is not posted when the future is dropped never will be.
pub(crate) async fn send_request<C: Channel>(
    connection: &Connection<C>,
    mut asking: Asking<'_, C::Lent>,
) -> Result<bool, ChannelError> {
    let mut position = Position::new(connection, Queue::Messages);
    poll_fn(|context| {
        connection.poll_change(|state, after| asking.poll(&mut position, state, after, context))
    })
    .await
}

impl<L> Asking<'_, L> {
    fn poll<C: Channel<Lent = L>>(
        &mut self,
        position: &mut Position<'_, C>,
        state: &mut State<C>,
        after: &mut After<L>,
        context: &Context<'_>,
    ) -> Result<Poll<bool>, ChannelError> {
        if position.is_posted(state) {
            // The reply may have come, and counts even if the connection is over by now.
            return Ok(Poll::Ready(false));
        }
        state.failure()?;
        if let Some(request) = self.request.take() {
            if let Some(lent) = self.lent.take() {
                state.requests.store_memory(self.index, lent);
            }
            if self.together {
                // The others of the task are polled before the housekeeping task.
                position.ticket = Some(state.line.messages.join(context.waker(), Some(Box::new(request))));
                state.line.defer();
                return Ok(Poll::Pending);
            }
            if position.begin(request, state, context.waker())? {
                return Ok(Poll::Ready(state.requests.may_help(self.index)));
            }
        }
        Ok(position.go_on(state, after, context.waker())?.map(|()| false))
    }
}

/// Runs `post` as soon as it is a message's turn, until `post` has posted it.
///
/// # Errors
/// The connection is over.
///
/// # Cancel safety
/// Dropping the future gives the position in the queue up; nothing was posted then.
pub(crate) async fn message_turn<C: Channel>(
    connection: &Connection<C>,
    mut post: impl FnMut(&mut State<C>) -> Result<bool, ChannelError>,
) -> Result<(), ChannelError> {
    let mut position = Position::new(connection, Queue::Messages);
    position.turn(|state| Ok(post(state)?.then_some(()))).await
}

/// Runs `post` as soon as it is its turn and a content may be posted.
///
/// # Errors
/// The connection is over.
///
/// # Cancel safety
/// As [`message_turn`].
pub(crate) async fn content_turn<C: Channel, T>(
    connection: &Connection<C>,
    mut post: impl FnMut(&mut State<C>) -> T,
) -> Result<T, ChannelError> {
    let mut position = Position::new(connection, Queue::Contents);
    position.turn(|state| Ok(state.line.may_post_content()?.then(|| post(state)))).await
}
