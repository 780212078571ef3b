//! What a connection has to do besides its requests and responses.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use futures::{FutureExt, future::Fuse};

use super::{Connection, State, Turnstile, turn::PositionInLine};
use crate::{Channel, ChannelError, Destination, LentEnd, wire::record::Control};

/// The waker of the task that runs [`Connection::housekeeping`].
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) waker: Waker,
    /// Whether the task is in line to post a message, where it is woken when it may.
    is_in_line: bool,
}

impl<L> State<L> {
    /// Whether the housekeeping task sleeps and there is work for it.
    pub(super) fn has_keeper_work(&self) -> bool {
        let Some(keeper) = &self.keeper else { return false };
        let owes = !keeper.is_in_line && self.owes_messages();
        owes || self.is_line_left || self.requests.has_returns() || self.ring_wanted.is_some()
    }

    /// The waker of the housekeeping task, if that sleeps and there is work for it.
    pub(super) fn keeper_with_work(&mut self) -> Option<Waker> {
        if self.has_keeper_work() { self.keeper.take().map(|keeper| keeper.waker) } else { None }
    }
}

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
    /// The position of the next message in line.
    position: PositionInLine<'connection, C>,
    /// Size of the ring that is being made.
    ring_bytes: u32,
    /// Where the ring is that was made and is to be offered.
    made: Option<Destination>,
}

impl<C: Channel> Drop for Housekeeping<'_, C> {
    fn drop(&mut self) {
        // Nothing is left to a task that does not run.
        let keeper = self.connection.lock().keeper.take();
        drop(keeper);
    }
}

impl<C: Channel> Connection<C> {
    /// Sends what is owed: CANCEL for receives that were given up, CANCEL_ACK for the peer's; posts messages in line that wait for
    /// credits, or for others of their task; takes back the memory of receives that were given up; and offers the peer a larger ring when it
    /// needs one. Ends when the connection has failed. Must be kept running.
    ///
    /// # Cancel safety
    /// Dropping it while it makes a ring loses that ring; nothing else is lost, and a new call goes on where this one was.
    pub async fn housekeeping(self: Arc<Self>) {
        let position = PositionInLine::new(&self, Turnstile::Messages);
        let mut house = Housekeeping { connection: &self, position, ring_bytes: 0, made: None };
        let mut ring = pin!(Fuse::terminated());
        poll_fn(|context| house.poll(ring.as_mut(), |bytes| self.channel.make_ring(bytes).fuse(), context))
            .await;
    }
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
                Poll::Ready(None) => self.connection.lock().is_ring_growing = false,
                Poll::Pending => {}
            }
            match self.next(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(ChannelError(why))) => {
                    self.connection.fail(&why);
                    return Poll::Ready(());
                }
                Poll::Ready(Ok(Chore::Posted)) => {}
                Poll::Ready(Ok(Chore::TakeBack(lent, end))) => self.connection.channel.take_back(lent, end),
                Poll::Ready(Ok(Chore::MakeRing(bytes))) => {
                    self.ring_bytes = bytes;
                    ring.set(make(bytes));
                }
            }
        }
    }

    /// Has the connection hold a ring that was made, unless it is over: then the ring was never sent to the peer.
    fn made(&mut self, ring: C::Lent, destination: Destination) {
        let mut state = self.connection.lock();
        if state.failure().is_ok() {
            state.rings.offer(ring);
            self.made = Some(destination);
        } else {
            drop(state);
            self.connection.channel.take_back(ring, LentEnd::NeverSent);
        }
    }

    /// The next chore. An error says why the connection is over.
    fn next(&mut self, context: &Context<'_>) -> Poll<Result<Chore<C::Lent>, ChannelError>> {
        let connection = self.connection;
        let mut state = connection.lock();
        state.failure()?;
        if let Some((lent, end)) = state.requests.next_return() {
            connection.unlock(state);
            return Poll::Ready(Ok(Chore::TakeBack(lent, end)));
        }
        if let Some(bytes) = state.ring_wanted.take() {
            return Poll::Ready(Ok(Chore::MakeRing(bytes)));
        }
        let owes = self.made.is_some() || state.owes_messages();
        let has_line = state.is_line_left || state.is_message_next();
        let before = (owes || has_line).then(|| connection.post_line(&mut state));
        if owes
            && state.messages.is_turn(self.position.ticket)
            && let Some(posted) = self.post(&mut state)
        {
            let left = state.messages.leave(&mut self.position.ticket);
            connection.settle_posted(state, before.unwrap_or_default(), true)?;
            drop(left);
            return Poll::Ready(posted.map(|()| Chore::Posted));
        }
        let keeper = Keeper { waker: context.waker().clone(), is_in_line: owes };
        let replaced = state.keeper.replace(keeper);
        let Some(before) = before else {
            drop(state);
            drop(replaced);
            return Poll::Pending;
        };
        let waits = owes.then(|| state.messages.wait(&mut self.position.ticket, context.waker()));
        connection.settle_posted(state, before, false)?;
        drop((waits, replaced));
        Poll::Pending
    }

    /// Posts one message, if credits and ring allow it.
    fn post(&mut self, state: &mut State<C::Lent>) -> Option<Result<(), ChannelError>> {
        let connection = self.connection;
        let Some(ring) = self.made else { return connection.try_post_owed(state) };
        let posted = match connection.try_post_control(state, Control::RingOffer(ring)) {
            Ok(posted) => posted,
            Err(blocked) => return connection.ask(state, blocked),
        };
        self.made = None;
        state.flow.offer_ring(self.ring_bytes);
        state.counters.rings_offered += 1;
        Some(posted)
    }
}
