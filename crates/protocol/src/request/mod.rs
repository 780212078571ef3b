//! The receiver's half of a transfer.

mod index;
mod table;

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
};

pub(crate) use table::{Arrived, Reply, Requests};

use crate::{
    Allocator, Channel, ChannelError, Connection, Destination, LentEnd, Message, Metadata, RequestIndex,
    Scope, TensorReRequest, TensorRequest, TransferError, connection::Turnstile, limits::NAME_BYTES_MAX,
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

impl<C: Channel> Connection<C> {
    /// Asks the peer for the value of `key` and waits for it (`tensorflow-verbs.md` §3.4 and §3.6). Waits
    /// first while as many requests as agreed are outstanding; receives get their turn in order.
    ///
    /// # Errors
    /// [`TransferError`]; memory that `allocator` lent has been or will be taken back.
    ///
    /// # Cancel safety
    /// Dropping the future gives the receive up: the connection keeps the lent memory until the peer can no
    /// longer write it, then takes it back. A value that is on its way meanwhile is lost.
    pub async fn receive<A: Allocator<Lent = C::Lent>>(
        self: &Arc<Self>,
        scope: Scope,
        key: &str,
        allocator: &A,
    ) -> Result<Received<C::Lent>, TransferError> {
        if key.len() > NAME_BYTES_MAX {
            return Err(TransferError::KeyTooLong { length: key.len() });
        }
        let request = self.open_request().await?;
        let (known, destination) = request.allocate_first(allocator, scope, self.known(scope, key)).await?;
        request.ask(scope, key, known, destination).await?;
        loop {
            match request.reply().await? {
                Reply::Content(metadata) => return Ok(Received { metadata, lent: request.finish() }),
                Reply::ErrorStatus(status) => {
                    request.take_back();
                    return Err(TransferError::Remote(status));
                }
                Reply::MetaDataResponse(metadata) => {
                    request.take_back();
                    self.remember(scope, key, &metadata);
                    let destination = request.allocate(allocator, &metadata).await?;
                    request.ask_again(metadata, destination).await?;
                }
            }
        }
    }

    async fn open_request(&self) -> Result<Request<'_, C>, TransferError> {
        let index = self.turn(Turnstile::Requests, |state| state.requests.open()).await?;
        Ok(Request { connection: self, index })
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
    /// Memory for the first request, which says what is `known` only if it has memory for that. A published
    /// value is there or is not, so its request may wait for memory; a value of a step may be long in coming.
    async fn allocate_first<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        scope: Scope,
        known: Option<Metadata>,
    ) -> Result<(Option<Metadata>, Option<Destination>), TransferError> {
        let Some(metadata) = known else { return Ok((None, None)) };
        if scope == Scope::Published || metadata.byte_length == 0 {
            let destination = self.allocate(allocator, &metadata).await?;
            return Ok((Some(metadata), destination));
        }
        match self.unless_over(allocator.allocate_early(&metadata)).await?.map_err(TransferError::Local)? {
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
    ) -> Result<Option<Destination>, TransferError> {
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
        key: &str,
        known: Option<Metadata>,
        destination: Option<Destination>,
    ) -> Result<(), ChannelError> {
        let (index, key) = (self.index, key.to_owned());
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
    async fn reply(&self) -> Result<Reply, ChannelError> {
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

    /// Polls `future` until the connection is over.
    async fn unless_over<F: Future>(&self, future: F) -> Result<F::Output, ChannelError> {
        let mut future = pin!(future);
        poll_fn(|context| {
            let mut state = self.connection.lock();
            let failure = state.failure();
            let replaced = state.requests.keep_waker(self.index, context.waker());
            drop(state);
            drop(replaced);
            match failure {
                Err(over) => Poll::Ready(Err(over)),
                Ok(()) => future.as_mut().poll(context).map(Ok),
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

    /// Takes the memory that holds the content.
    fn finish(self) -> Option<C::Lent> {
        self.connection.lock().requests.take_ended(self.index).map(|(lent, _)| lent)
    }
}

impl<C: Channel> Drop for Request<'_, C> {
    fn drop(&mut self) {
        let mut state = self.connection.lock();
        let waker = state.requests.release(self.index);
        // After the end nobody keeps house: what was never written goes back here, the rest in `drain`.
        let returned = if state.failure().is_err() { state.requests.next_return() } else { None };
        self.connection.settle(state, None, returned);
        drop(waker);
    }
}
