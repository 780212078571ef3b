//! The receiving side of a subscription.

use std::{
    fmt,
    future::{Future as _, poll_fn},
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{
    FutureExt as _,
    future::{Either, FusedFuture as _},
};

use super::{
    Awaiting, ReceiveOptions, Received,
    admission::{Admission, Terms, WaitingReceive},
    end_loan, give_up, handed_out,
    validate::validate,
};
use crate::{
    Allocator, Channel, Connection, LentEnd, Message, RequestIndex, Scope, Sharing, SubscriptionTerms,
    TensorRequest, TransferError, Want,
    connection::send,
    requests::{Needed, SequencedValue},
};

/// A value of a subscription.
#[derive(Debug)]
pub struct Delivery<L> {
    /// The value, with its version.
    pub received: Received<L>,
    /// How many values there were under the key, this one included. `None` for the content of another receive of the key that was given
    /// up, and for a value whose validation was given up.
    pub sequence: Option<u64>,
    /// The version of the first of these, if they have versions.
    pub began: u64,
}

/// The values that the peer has under one key, from the first call of [`next`](Self::next) on. The peer sends as many values ahead as the
/// terms allow; each call returns one, and lets the peer send another.
///
/// Dropping it ends the subscription. Values of a step that have arrived go to the next receives of their key.
pub struct Subscription<C: Channel> {
    connection: Arc<Connection<C>>,
    scope: Scope,
    key: Arc<str>,
    terms: SubscriptionTerms,
    /// Its request, once it is opened.
    index: Option<RequestIndex>,
}

impl<C: Channel> fmt::Debug for Subscription<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, key, terms, index, .. } = self;
        let mut shown = f.debug_struct("Subscription");
        shown.field("scope", scope).field("key", key).field("terms", terms).field("index", index);
        shown.finish_non_exhaustive()
    }
}

impl<C: Channel> Drop for Subscription<C> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            give_up(&self.connection, index);
        }
    }
}

impl<C: Channel> Connection<C> {
    /// Subscribes to the values of `key`: those that are sent in a step, or the versions of a published value that are newer than that of
    /// the `scope`. Nothing is sent before the first call of [`Subscription::next`].
    pub fn subscribe(
        self: &Arc<Self>,
        scope: Scope,
        key: Arc<str>,
        terms: SubscriptionTerms,
    ) -> Subscription<C> {
        let terms = SubscriptionTerms { view: terms.view && self.agreed().is_extended, ..terms };
        Subscription { connection: self.clone(), scope, key, terms, index: None }
    }
}

impl<C: Channel> Subscription<C> {
    /// The next value. `allocator` must be the same in each call.
    ///
    /// # Errors
    /// [`TransferError`]. The subscription is over, except after [`TransferError::Corrupted`], which stands for one value.
    ///
    /// # Cancel safety
    /// If the future is dropped while a value is validated, the value is lost, unless it is one of a step. Otherwise nothing is.
    pub async fn next<A: Allocator<Lent = C::Lent>>(
        &mut self,
        allocator: &A,
    ) -> Result<Delivery<C::Lent>, TransferError> {
        let index = match self.index {
            Some(index) => index,
            None => match self.begin(allocator).await? {
                Either::Left(index) => index,
                Either::Right(received) => return Ok(Delivery { received, sequence: None, began: 0 }),
            },
        };
        loop {
            let value = self.connection.lock().requests.take_value(index);
            if let Some(value) = value {
                return self.deliver(index, value, allocator).await;
            }
            let is_unsent = self.connection.lock().requests.is_unsent(index);
            if is_unsent {
                self.ask(index).await?;
            } else {
                self.more(index, allocator).await?;
            }
        }
    }

    /// Hands a value out, and returns those that were taken to the peer if that is due.
    async fn deliver<A: Allocator<Lent = C::Lent>>(
        &self,
        index: RequestIndex,
        SequencedValue { place, began, landed }: SequencedValue<C::Lent>,
        allocator: &A,
    ) -> Result<Delivery<C::Lent>, TransferError> {
        let is_due = self.connection.lock().requests.is_return_due(index);
        if is_due {
            let _ = self.give_back(index, allocator).now_or_never();
        }
        let (version, sequence) = place.unzip();
        let received = handed_out((self.scope, self.key.clone()), landed, version, allocator);
        let received = validate(&self.connection, received).await?;
        Ok(Delivery { received, sequence, began })
    }

    /// Opens the request, unless an earlier receive of the key has left its content here.
    async fn begin<A: Allocator<Lent = C::Lent>>(
        &mut self,
        allocator: &A,
    ) -> Result<Either<RequestIndex, Received<C::Lent>>, TransferError> {
        let connection = self.connection.clone();
        // The request is posted later, and not with others.
        let options = ReceiveOptions { sharing: Sharing::Copy, awaiting: Awaiting::Together };
        let terms = Terms { allocator, options };
        let mut waiting = WaitingReceive::new(&connection, self.scope);
        let admission = poll_fn(|context| waiting.poll(&self.key, terms, context.waker())).await?;
        match admission {
            Admission::Request { index, .. } => {
                self.index = Some(index);
                connection.lock().requests.subscribe(index, self.terms);
                Ok(Either::Left(index))
            }
            Admission::Stashed(key, landed) => {
                let received = handed_out((self.scope, key), *landed, None, allocator);
                validate(&connection, received).await.map(Either::Right)
            }
        }
    }

    async fn ask(&self, index: RequestIndex) -> Result<(), TransferError> {
        let (scope, key, want) = (self.scope, self.key.clone(), Want::Each(self.terms));
        let request = TensorRequest { index, scope, key, known: Arc::default(), want, arguments: None };
        Ok(send(&*self.connection, Message::TensorRequest(request)).await?)
    }

    /// Waits for an arrival, and meanwhile lets the peer send more if that is due.
    async fn more<A: Allocator<Lent = C::Lent>>(
        &self,
        index: RequestIndex,
        allocator: &A,
    ) -> Result<(), TransferError> {
        let is_due = self.connection.lock().requests.is_return_due(index);
        let give_back = async { if is_due { self.give_back(index, allocator).await } else { Ok(()) } };
        let mut giving = pin!(give_back.fuse());
        poll_fn(|context| {
            if let Poll::Ready(Err(error)) = giving.as_mut().poll(context) {
                // A value that has arrived is handed out first.
                let has_value = self.connection.lock().requests.has_value(index);
                return Poll::Ready(if has_value { Ok(()) } else { Err(error) });
            }
            self.poll_arrival(index, giving.is_terminated(), context)
        })
        .await
    }

    /// Ready when a value has arrived, or the peer wants buffers and none are being made.
    fn poll_arrival(
        &self,
        index: RequestIndex,
        may_make: bool,
        context: &Context<'_>,
    ) -> Poll<Result<(), TransferError>> {
        self.connection.change(|state, after| {
            after.leave_queues();
            if state.requests.has_value(index) || may_make && state.requests.wants_buffers(index) {
                return Poll::Ready(Ok(()));
            }
            if let Some(status) = state.requests.subscription_end(index) {
                return Poll::Ready(Err(TransferError::Remote(status)));
            }
            after.drop(state.requests.store_waker(index, context.waker()));
            match state.failure() {
                Ok(()) => Poll::Pending,
                Err(error) => Poll::Ready(Err(error.into())),
            }
        })
    }

    /// Returns the values that were taken to the peer, with buffers in the places of theirs, or names the buffers that the peer wants.
    ///
    /// # Cancel safety
    /// Cancel-safe: a later call goes on.
    async fn give_back<A: Allocator<Lent = C::Lent>>(
        &self,
        index: RequestIndex,
        allocator: &A,
    ) -> Result<(), TransferError> {
        let needed = self.connection.lock().requests.needed_buffers(index);
        if let Some(needed) = needed {
            self.allocate(index, needed, allocator).await?;
        }
        // If it must wait, the housekeeping task posts it: a subscription that is not polled holds no position in the queue.
        let posted = self.connection.try_change(|state, after| {
            let is_posted = state.post_now(after, |state| {
                let message = state.requests.buffers_message(index);
                message.map_or(Ok(true), |message| state.post(&message))
            })?;
            if !is_posted {
                state.requests.owe_buffers(index);
                after.wakes_queues = true;
            }
            Ok(())
        });
        Ok(posted?)
    }

    /// Allocates buffers. The peer waits for the first one if it has none; the others must leave memory to values that exist.
    async fn allocate<A: Allocator<Lent = C::Lent>>(
        &self,
        index: RequestIndex,
        Needed { metadata, count, is_urgent }: Needed,
        allocator: &A,
    ) -> Result<(), TransferError> {
        allocator.accepts(&metadata).map_err(TransferError::Local)?;
        for number in 0..count {
            let buffer = if is_urgent && number == 0 {
                Some(allocator.allocate(&metadata).await)
            } else {
                allocator.allocate_early(&metadata).transpose()
            };
            let Some(buffer) = buffer else { return Ok(()) };
            let buffer = buffer.map_err(TransferError::Local)?;
            let refused = self.connection.lock().requests.store_buffer(index, &metadata, buffer);
            if let Some(lent) = refused {
                end_loan(&self.connection, allocator, lent, LentEnd::NeverSent);
                return Ok(());
            }
        }
        Ok(())
    }
}
