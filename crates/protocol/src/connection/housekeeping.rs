//! What a connection has to do besides its requests and responses.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll},
};

use futures::{FutureExt, future::Fuse};

use super::{Connection, State, sending::Position};
use crate::{
    Channel, ChannelError, Destination, LentEnd,
    after::After,
    line::{Keeper, Queue},
};

/// What is to be done next.
enum Chore<L> {
    /// A message was posted; there may be more.
    Posted,
    /// Memory goes back.
    TakeBack(L, LentEnd),
    /// A larger ring is to be made.
    MakeRing(u32),
}

struct Housekeeping<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    /// The position of the next message in the queue.
    position: Position<'connection, C>,
    /// Size of the ring that is being made.
    ring_bytes: u32,
    /// The ring that was made and will be offered.
    made: Option<Destination>,
}

impl<C: Channel> Drop for Housekeeping<'_, C> {
    fn drop(&mut self) {
        // This task no longer runs, so no work may be left to it.
        let keeper = self.connection.lock().line.keeper.take();
        drop(keeper);
    }
}

/// See [`Connection::housekeeping`].
pub(crate) async fn housekeeping<C: Channel>(connection: &Connection<C>) {
    let position = Position::new(connection, Queue::Messages);
    let mut house = Housekeeping { connection, position, ring_bytes: 0, made: None };
    let mut ring = pin!(Fuse::terminated());
    let make = |bytes| connection.channel().make_ring(bytes).fuse();
    poll_fn(|context| house.poll(ring.as_mut(), make, context)).await;
}

impl<C: Channel> Housekeeping<'_, C> {
    /// Ready once the connection is over.
    fn poll<F: Future<Output = Option<(C::Lent, Destination)>>>(
        &mut self,
        mut ring: Pin<&mut Fuse<F>>,
        make: impl Fn(u32) -> Fuse<F>,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        loop {
            match ring.as_mut().poll(context) {
                Poll::Ready(Some((ring, destination))) => self.made(ring, destination),
                Poll::Ready(None) => self.connection.lock().line.growth.end(),
                Poll::Pending => {}
            }
            let connection = self.connection;
            match connection.poll_change(|state, after| self.next(state, after, context)) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(ChannelError(_))) => return Poll::Ready(()),
                Poll::Ready(Ok(Chore::Posted)) => {}
                Poll::Ready(Ok(Chore::TakeBack(lent, end))) => connection.channel().take_back(lent, end),
                Poll::Ready(Ok(Chore::MakeRing(bytes))) => {
                    self.ring_bytes = bytes;
                    ring.set(make(bytes));
                }
            }
        }
    }

    /// Has the connection hold a ring that was made, unless it is over: then the ring was never sent to the peer.
    fn made(&mut self, ring: C::Lent, destination: Destination) {
        self.connection.change(|state, after| match state.failure() {
            Ok(()) => {
                state.line.hold_ring(ring);
                self.made = Some(destination);
            }
            Err(_) => after.take_back(Some((ring, LentEnd::NeverSent))),
        });
    }

    /// The next chore. An error has the reason why the connection is over.
    fn next(
        &mut self,
        state: &mut State<C>,
        after: &mut After<C::Lent>,
        context: &Context<'_>,
    ) -> Result<Poll<Chore<C::Lent>>, ChannelError> {
        state.failure()?;
        if let Some((lent, end)) = state.requests.next_return() {
            return Ok(Poll::Ready(Chore::TakeBack(lent, end)));
        }
        if let Some(bytes) = state.line.growth.take() {
            return Ok(Poll::Ready(Chore::MakeRing(bytes)));
        }
        let owes = self.made.is_some() || state.owes_messages();
        let has_queue = state.line.is_deferred() || state.line.is_message_next();
        let has_changed = (owes || has_queue) && state.post_queue(after)?;
        if owes && state.line.messages.is_turn(self.position.ticket) && self.post(state)? {
            let left = state.line.messages.leave(&mut self.position.ticket);
            after.drop(left.and_then(|left| left.waker));
            return Ok(Poll::Ready(Chore::Posted));
        }
        let keeper = Keeper { waker: context.waker().clone(), is_in_queue: owes };
        after.drop(state.line.keeper.replace(keeper).map(|keeper| keeper.waker));
        if owes {
            after.drop(state.line.messages.wait(&mut self.position.ticket, context.waker()));
        }
        after.wakes_queues = has_changed;
        Ok(Poll::Pending)
    }

    /// Posts one message, if credits and ring space suffice.
    fn post(&mut self, state: &mut State<C>) -> Result<bool, ChannelError> {
        let Some(ring) = self.made else { return state.post_owed() };
        let is_posted = state.line.offer_ring(ring, self.ring_bytes)?;
        if is_posted {
            self.made = None;
        }
        Ok(is_posted)
    }
}
