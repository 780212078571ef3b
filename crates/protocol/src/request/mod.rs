//! The receiver's half of a transfer.

mod admission;
mod index;
mod stash;
mod table;

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
};

use admission::Admission;
use stash::Landed;
pub(crate) use table::{Arrived, Reply, Requests};

use crate::{
    Allocator, Channel, ChannelError, Connection, Destination, LentEnd, Message, Metadata, RequestIndex,
    Scope, StepId, TensorReRequest, TensorRequest, TransferError, connection::Turnstile,
    limits::NAME_BYTES_MAX,
};

/// A value that has arrived.
#[derive(Debug)]
pub struct Received<L> {
    /// What it is.
    pub metadata: Metadata,
    /// Its bytes, complete; `None` when there are none. The receiver ends the loan with the evidence
    /// [`LentEnd::Content`].
    pub lent: Option<L>,
}

impl<L> From<Landed<L>> for Received<L> {
    fn from(Landed { metadata, lent, .. }: Landed<L>) -> Self {
        Self { metadata, lent }
    }
}

/// Why a request goes no further.
enum Stop<L> {
    Failed(TransferError),
    /// It needs no answer: the content of an earlier receive of its place was given to it.
    Given(Landed<L>),
}

impl<L> From<TransferError> for Stop<L> {
    fn from(error: TransferError) -> Self {
        Self::Failed(error)
    }
}

impl<L> From<ChannelError> for Stop<L> {
    fn from(error: ChannelError) -> Self {
        Self::Failed(error.into())
    }
}

impl<C: Channel> Connection<C> {
    /// Asks the peer for the value of `key` and waits for it (`tensorflow-verbs.md` §3.4 and §3.6). Waits
    /// first while as many requests as agreed are outstanding; receives of one key get their turn in order.
    ///
    /// # Errors
    /// [`TransferError`]; memory that `allocator` lent has been or will be taken back.
    ///
    /// # Cancel safety
    /// Cancel-safe: dropping the future gives the receive up. The connection keeps the lent memory until the peer
    /// can no longer write it. A value of a step that the peer has not written stays with it, in its place; one that
    /// is on its way is kept here for the next receive of its key, which waits until it is known which of the two
    /// it is. [`discard`](Self::discard) gives up what is kept.
    pub async fn receive<A: Allocator<Lent = C::Lent>>(
        self: &Arc<Self>,
        scope: Scope,
        key: &str,
        allocator: &A,
    ) -> Result<Received<C::Lent>, TransferError> {
        if key.len() > NAME_BYTES_MAX {
            return Err(TransferError::KeyTooLong { length: key.len() });
        }
        let key: Arc<str> = key.into();
        let request = match self.admit(scope, &key).await? {
            Admission::Request(request) => request,
            Admission::Kept(landed) => return Ok(landed.into()),
        };
        match request.pull(scope, &key, allocator).await {
            Ok(landed) | Err(Stop::Given(landed)) => Ok(landed.into()),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    /// The step is over here: contents that are kept for receives of it go back, and none is kept from now on.
    pub fn discard(&self, step: StepId) {
        loop {
            let mut state = self.lock();
            state.requests.discard(step);
            let kept = state.requests.take_kept_of(step);
            let is_last = kept.is_none();
            self.settle(state, None, kept.and_then(Landed::returned));
            if is_last {
                return;
            }
        }
    }

    /// Steps whose values may be lost with this connection: their requests or contents are under way, or it is not
    /// known yet whether the peer has them. Each once, in order.
    pub fn steps_under_way(&self) -> Vec<StepId> {
        let state = self.lock();
        let steps: std::collections::BTreeSet<_> =
            state.requests.steps().chain(state.responses.steps()).collect();
        steps.into_iter().collect()
    }

    fn known(&self, scope: Scope, key: &str) -> Option<Metadata> {
        self.lock().cache.get(scope, key)
    }

    fn remember(&self, scope: Scope, key: &str, metadata: &Metadata) {
        self.lock().cache.insert(scope, key, metadata.clone());
    }
}

/// One open request. Dropping it gives the request up.
struct Request<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    index: RequestIndex,
}

impl<C: Channel> Request<'_, C> {
    async fn pull<A: Allocator<Lent = C::Lent>>(
        &self,
        scope: Scope,
        key: &Arc<str>,
        allocator: &A,
    ) -> Result<Landed<C::Lent>, Stop<C::Lent>> {
        let known = self.connection.known(scope, key);
        let (known, destination) = self.allocate_first(allocator, scope, known).await?;
        self.ask(scope, key, known, destination).await?;
        loop {
            match self.reply().await? {
                Reply::Content(landed) => return Ok(landed),
                Reply::ErrorStatus(status) => {
                    self.take_back();
                    return Err(TransferError::Remote(status).into());
                }
                Reply::MetaDataResponse(metadata) => {
                    self.take_back();
                    self.connection.remember(scope, key, &metadata);
                    let destination = self.allocate(allocator, &metadata).await?;
                    self.ask_again(metadata, destination).await?;
                }
            }
        }
    }

    /// Memory for the first request, which says what is `known` only if it has memory for that. A published
    /// value is there or is not, so its request may wait for memory; a value of a step may be long in coming.
    async fn allocate_first<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        scope: Scope,
        known: Option<Metadata>,
    ) -> Result<(Option<Metadata>, Option<Destination>), Stop<C::Lent>> {
        let Some(metadata) = known else { return Ok((None, None)) };
        if scope == Scope::Published || metadata.byte_length == 0 {
            let destination = self.allocate(allocator, &metadata).await?;
            return Ok((Some(metadata), destination));
        }
        let early = self.unless_over(allocator.allocate_early(&metadata)).await?;
        match early.map_err(TransferError::Local)? {
            Some((lent, destination)) => {
                self.keep(lent)?;
                Ok((Some(metadata), Some(destination)))
            }
            None => Ok((None, None)),
        }
    }

    /// Memory for content of `metadata`, if there is any; kept in the table at once.
    async fn allocate<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        metadata: &Metadata,
    ) -> Result<Option<Destination>, Stop<C::Lent>> {
        if metadata.byte_length == 0 {
            return Ok(None);
        }
        let allocated = self.unless_over(allocator.allocate(metadata)).await?;
        let (lent, destination) = allocated.map_err(TransferError::Local)?;
        self.keep(lent)?;
        Ok(Some(destination))
    }

    fn keep(&self, lent: C::Lent) -> Result<(), ChannelError> {
        let mut state = self.connection.lock();
        match state.failure() {
            Ok(()) => {
                state.requests.keep(self.index, lent);
                Ok(())
            }
            Err(over) => {
                drop(state);
                self.connection.channel().take_back(lent, LentEnd::NeverSent);
                Err(over)
            }
        }
    }

    /// Sends TENSOR_REQUEST.
    async fn ask(
        &self,
        scope: Scope,
        key: &Arc<str>,
        known: Option<Metadata>,
        destination: Option<Destination>,
    ) -> Result<(), ChannelError> {
        let (index, key) = (self.index, key.clone());
        let mut expected = known.clone();
        let message = Message::TensorRequest(TensorRequest { index, scope, key, known, destination });
        self.connection.send(&message, |state| state.requests.asked(index, expected.take())).await
    }

    /// Sends TENSOR_RE_REQUEST, unless the peer has given up meanwhile.
    async fn ask_again(
        &self,
        metadata: Metadata,
        destination: Option<Destination>,
    ) -> Result<(), ChannelError> {
        let (connection, index) = (self.connection, self.index);
        let message = Message::TensorReRequest(TensorReRequest { index, destination });
        let posted = connection.turn(Turnstile::Messages, |state| {
            if !state.requests.is_told(index) {
                return Some(Ok(()));
            }
            let posted = connection.try_post(state, &message)?;
            state.requests.asked_again(index, metadata.clone());
            Some(posted)
        });
        connection.over_if_failed(posted.await?)
    }

    /// The peer's next answer. One that came before the connection's end counts.
    async fn reply(&self) -> Result<Reply<C::Lent>, ChannelError> {
        poll_fn(|context| {
            let mut state = self.connection.lock();
            let (reply, replaced) = state.requests.poll_reply(self.index, context.waker());
            let failure = state.failure();
            drop(state);
            drop(replaced);
            match (reply, failure) {
                (Poll::Ready(reply), _) => Poll::Ready(Ok(reply)),
                (Poll::Pending, Err(over)) => Poll::Ready(Err(over)),
                (Poll::Pending, Ok(())) => Poll::Pending,
            }
        })
        .await
    }

    /// Polls `future` until the connection is over, or the request needs no answer any more.
    async fn unless_over<F: Future>(&self, future: F) -> Result<F::Output, Stop<C::Lent>> {
        let mut future = pin!(future);
        poll_fn(|context| {
            let mut state = self.connection.lock();
            let failure = state.failure();
            let given = state.requests.take_given(self.index);
            let replaced = state.requests.keep_waker(self.index, context.waker());
            drop(state);
            drop(replaced);
            match (given, failure) {
                (Some(landed), _) => Poll::Ready(Err(Stop::Given(landed))),
                (None, Err(over)) => Poll::Ready(Err(over.into())),
                (None, Ok(())) => future.as_mut().poll(context).map(Ok),
            }
        })
        .await
    }

    /// Takes back memory that the peer's answer has freed.
    fn take_back(&self) {
        let ended = self.connection.lock().requests.take_ended(self.index);
        if let Some((lent, end)) = ended {
            self.connection.channel().take_back(lent, end);
        }
    }
}

impl<C: Channel> Drop for Request<'_, C> {
    fn drop(&mut self) {
        let mut state = self.connection.lock();
        let released = state.requests.release(self.index);
        // After the end nobody keeps house: what was never written goes back here, the rest in `drain`.
        let is_over = state.failure().is_err();
        let mut returned = if is_over { state.requests.next_unwanted() } else { None };
        self.connection.settle(state, None, returned.take());
        released.wake();
        let next = || if is_over { self.connection.lock().requests.next_unwanted() } else { None };
        while let Some((lent, end)) = next() {
            self.connection.channel().take_back(lent, end);
        }
    }
}
