//! What a receive waits for before its request: the answer to earlier cancels of its key, which may leave a content here, and
//! a free entry.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use super::{Known, Request};
use crate::{
    Channel, Connection, Scope, TransferError,
    connection::Turnstile,
    requests::{Landed, StepKey},
};

/// How a receive begins.
pub(super) enum Admission<'connection, C: Channel> {
    /// With a request of its own, and what is known of the value.
    Request(Request<'connection, C>, Known),
    /// Without a request: with the content of an earlier receive that was given up.
    Kept(Arc<str>, Landed<C::Lent>),
}

impl<C: Channel> Connection<C> {
    /// Waits until a receive may begin.
    ///
    /// # Errors
    /// [`TransferError::PeerLost`], [`TransferError::StashFull`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves both lines; nothing was taken then.
    pub(super) async fn admit(&self, scope: Scope, key: &str) -> Result<Admission<'_, C>, TransferError> {
        let Some(step) = scope.step() else {
            let opened = self.turn(Turnstile::Requests, |state| {
                let index = state.requests.open(None)?;
                Some((index, state.known(scope, key)))
            });
            let (index, known) = opened.await?;
            return Ok(Admission::Request(Request::new(self, index), known));
        };
        let step_key = StepKey { step, key: key.into() };
        let mut receive = ReceiveInLine { connection: self, scope, step_key, ticket: None, entry: None };
        poll_fn(|context| receive.poll(context)).await
    }
}

/// Two positions in line, given up when dropped: one among the receives of the key, for a content or the answer to a cancel,
/// and, once first there, one for a free entry.
struct ReceiveInLine<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    scope: Scope,
    step_key: StepKey,
    ticket: Option<u64>,
    entry: Option<u64>,
}

impl<'connection, C: Channel> ReceiveInLine<'connection, C> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Admission<'connection, C>, TransferError>> {
        let connection = self.connection;
        let mut state = connection.lock();
        if let Err(over) = state.failure() {
            return Poll::Ready(Err(over.into()));
        }
        let is_first = state.requests.stash.is_first(&self.step_key, self.ticket);
        if is_first && let Some(landed) = state.requests.stash.take(&self.step_key) {
            tensorwire_testpoints::mark!("a kept content was handed out");
            // There may be room for a request now.
            connection.settle(state, None, None);
            self.leave();
            return Poll::Ready(Ok(Admission::Kept(self.step_key.key.clone(), landed)));
        }
        let may_ask = is_first && !state.requests.is_unresolved(&self.step_key);
        if may_ask && let Some(kept) = state.requests.kept_in_excess() {
            return Poll::Ready(Err(TransferError::StashFull { kept }));
        }
        let queue = state.queue(Turnstile::Requests);
        if may_ask
            && queue.is_turn(self.entry)
            && let Some(index) = state.requests.open(Some(self.step_key.clone()))
        {
            let known = state.known(self.scope, &self.step_key.key);
            drop(state);
            let request = Request::new(connection, index);
            self.leave();
            return Poll::Ready(Ok(Admission::Request(request, known)));
        }
        let queue = state.queue(Turnstile::Requests);
        // A receive that must wait for a cancel's answer does not hold up those behind it.
        let replaced =
            if may_ask { queue.wait(&mut self.entry, context.waker()) } else { queue.leave(&mut self.entry) };
        state.requests.stash.stand(&self.step_key, &mut self.ticket);
        let own = state.requests.stash.wait(&self.step_key, self.ticket, context.waker());
        connection.settle(state, None, None);
        drop((replaced, own));
        Poll::Pending
    }

    /// Leaves both lines and wakes the next receive in each.
    fn leave(&mut self) {
        if self.ticket.is_none() && self.entry.is_none() {
            return;
        }
        let mut state = self.connection.lock();
        let waker = state.queue(Turnstile::Requests).leave(&mut self.entry);
        let [own, next] = state.requests.stash.leave(&self.step_key, &mut self.ticket);
        self.connection.settle(state, None, None);
        drop((waker, own));
        next.into_iter().for_each(std::task::Waker::wake);
    }
}

impl<C: Channel> Drop for ReceiveInLine<'_, C> {
    fn drop(&mut self) {
        self.leave();
    }
}
