//! What a receive waits for before its request: the answer to earlier cancels of its key, which may leave a content here, and
//! a free entry.

use std::{
    future::poll_fn,
    sync::{Arc, MutexGuard},
    task::{Context, Poll, Waker},
};

use super::{Asked, FirstPoll, ReceiveOptions, Request};
use crate::{
    Allocator, Channel, ChannelError, Connection, Message, Metadata, RequestIndex, Scope, TensorRequest,
    TransferError, Want,
    connection::{State, Turnstile},
    requests::{Landed, StepKey},
};

/// How a receive begins. It gets a name before it is matched on: a `match` on what a call returns keeps all of that in the
/// future until its last arm has ended.
pub(super) enum Admission<'connection, C: Channel> {
    /// With a request of its own, which may be posted already, and what is known of the value.
    Request(Request<'connection, C>, Known, Option<Asked>),
    /// Without a request: with the content of an earlier receive that was given up. Boxed, because it is rare and large.
    Kept(Arc<str>, Box<Landed<C::Lent>>),
}

/// What is known of a value.
pub(super) struct Known {
    pub(super) key: Arc<str>,
    pub(super) metadata: Arc<[Metadata]>,
}

impl<L> State<L> {
    /// What the cache has of `key`, so that nothing is allocated for a value that came before.
    fn known(&self, scope: Scope, key: &str) -> Known {
        let is_forgotten = tensorwire_testpoints::chance!("cached metadata of a value is not found");
        match self.cache.entry(scope, key).filter(|_| !is_forgotten) {
            Some((key, metadata)) => Known { key: key.clone(), metadata: metadata.clone() },
            None => Known { key: key.into(), metadata: Arc::default() },
        }
    }
}

impl<C: Channel> Connection<C> {
    /// Waits until a receive may begin. A fetch of a value that is known to be small is asked for under the same lock.
    ///
    /// # Errors
    /// [`TransferError::PeerLost`], [`TransferError::StashFull`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves both lines; nothing was taken then.
    pub(super) async fn admit<A: Allocator>(
        &self,
        scope: Scope,
        key: &str,
        allocator: &A,
        options: ReceiveOptions,
    ) -> Result<Admission<'_, C>, TransferError> {
        let Some(step) = scope.step() else {
            let opened = self.turn(Turnstile::Requests, |state, waker| {
                let index = state.requests.open(None)?;
                let known = state.known(scope, key);
                let asked = self.ask_at_once(state, (index, scope), &known, (allocator, options), waker);
                Some((index, known, asked))
            });
            let (index, known, asked) = opened.await?;
            return self.admitted(index, known, asked);
        };
        let step_key = StepKey::new(step, key.into());
        let mut receive = ReceiveInLine { connection: self, scope, step_key, ticket: None, entry: None };
        poll_fn(|context| receive.poll((allocator, options), context)).await
    }

    /// The request `index`, and whether it was posted.
    fn admitted(
        &self,
        index: RequestIndex,
        known: Known,
        asked: Option<Result<Asked, ChannelError>>,
    ) -> Result<Admission<'_, C>, TransferError> {
        let request = Request::new(self, index);
        let asked = asked.map(|asked| asked.inspect_err(|error| self.fail(&error.0))).transpose()?;
        Ok(Admission::Request(request, known, asked))
    }

    /// Whether each value that was seen is one that the allocator prefers to come inside a message.
    fn is_known_to_be_small<A: Allocator>(&self, known: &Known, allocator: &A) -> bool {
        let most = self.agreed().eager_bytes_max.into();
        let is_small = |bytes: u64| 0 < bytes && bytes <= most;
        !known.metadata.is_empty()
            && known.metadata.iter().all(|metadata| {
                is_small(metadata.byte_length)
                    && allocator.prefers_eager(metadata)
                    && allocator.accepts(metadata).is_ok()
            })
    }

    /// Posts the request for a value that is known to be small, if nobody stands before it and credits and ring allow it. A
    /// task that will not look for the reply leaves its waker under the same lock.
    fn ask_at_once<A: Allocator>(
        &self,
        state: &mut State<C::Lent>,
        (index, scope): (RequestIndex, Scope),
        known: &Known,
        (allocator, options): (&A, ReceiveOptions),
        waker: &Waker,
    ) -> Option<Result<Asked, ChannelError>> {
        if options.together || !self.is_known_to_be_small(known, allocator) {
            return None;
        }
        let (key, known) = (known.key.clone(), known.metadata.clone());
        let request = TensorRequest { index, scope, key, known, want: Want::Eager };
        let posted = self.try_post_first(state, &Message::TensorRequest(request))?;
        let first = if state.requests.may_help(index) && self.channel().may_help() {
            FirstPoll::Looks
        } else {
            // A new request has no waker that this would replace.
            let _ = state.requests.keep_waker(index, waker);
            FirstPoll::Sleeps
        };
        Some(posted.map(|()| Asked { want: Want::Eager, first }))
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
    fn poll<A: Allocator>(
        &mut self,
        asking: (&A, ReceiveOptions),
        context: &mut Context<'_>,
    ) -> Poll<Result<Admission<'connection, C>, TransferError>> {
        let connection = self.connection;
        let mut state = connection.lock();
        if let Err(over) = state.failure() {
            return Poll::Ready(Err(over.into()));
        }
        let is_first = state.requests.stash.is_first(&self.step_key, self.ticket);
        if is_first && let Some(landed) = state.requests.stash.take(&self.step_key) {
            tensorwire_testpoints::mark!("stashed content was delivered");
            // There may be room for a request now.
            self.leave_both(state);
            return Poll::Ready(Ok(Admission::Kept(self.step_key.key.clone(), Box::new(landed))));
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
            let asked =
                connection.ask_at_once(&mut state, (index, self.scope), &known, asking, context.waker());
            self.leave_both(state);
            return Poll::Ready(connection.admitted(index, known, asked));
        }
        let queue = state.queue(Turnstile::Requests);
        // A receive that must wait for a cancel's answer does not hold up those behind it.
        let replaced =
            if may_ask { queue.wait(&mut self.entry, context.waker()) } else { queue.leave(&mut self.entry) };
        let own = state.requests.stash.wait(&self.step_key, &mut self.ticket, context.waker());
        connection.settle(state, None, None);
        drop((replaced, own));
        Poll::Pending
    }

    /// Leaves both lines, unlocks, and wakes the next receive in each.
    fn leave_both(&mut self, mut state: MutexGuard<'_, State<C::Lent>>) {
        let waker = state.queue(Turnstile::Requests).leave(&mut self.entry);
        let [own, next] = state.requests.stash.leave(&self.step_key, &mut self.ticket);
        self.connection.settle(state, None, None);
        drop((waker, own));
        next.into_iter().for_each(std::task::Waker::wake);
    }
}

impl<C: Channel> Drop for ReceiveInLine<'_, C> {
    fn drop(&mut self) {
        if self.ticket.is_some() || self.entry.is_some() {
            let state = self.connection.lock();
            self.leave_both(state);
        }
    }
}
