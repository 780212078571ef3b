//! The sending side of a subscription: each value is taken when it may be sent, and TENSOR_WRITE follows its content.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use futures::{StreamExt as _, stream::BoxStream};

use super::{Ended, Response, TakenValue, check_value, length_of};
use crate::{
    BufferRequest, Channel, Code, Destination, EagerContent, Message, MetaDataResponse, Metadata, Sequenced,
    Source, Status, SubscriptionTerms, TensorWrite,
    connection::{content_turn, message_turn, send},
    responses::Room,
};

/// The values of a subscription.
pub(super) type Values<S> = BoxStream<'static, Result<Sequenced<<S as Source>::Taken>, Status>>;

/// A content that is being written or lent.
struct Underway<C: Channel, S: Source> {
    write: Pin<Box<C::Write>>,
    /// The value, once it belongs to the peer.
    taken: Option<TakenValue<S>>,
}

/// The contents that are under way, oldest first.
struct Writes<C: Channel, S: Source>(VecDeque<Underway<C, S>>);

impl<C: Channel, S: Source> Writes<C, S> {
    fn push(&mut self, write: C::Write) {
        self.0.push_back(Underway { write: Box::pin(write), taken: None });
    }
}

/// How the peer gets a content.
enum Way {
    InMessage(EagerContent),
    Lent,
    /// Or there are no bytes.
    Written,
}

/// Why the value was not sent.
enum Unsent {
    /// The peer has cancelled, or the connection is over.
    Ended,
    /// The sender cannot send it.
    Refused(Status),
}

impl From<Ended> for Unsent {
    fn from(_: Ended) -> Self {
        Self::Ended
    }
}

/// A value with bytes.
struct Described<'value, B> {
    metadata: &'value Metadata,
    bytes: Option<&'value B>,
}

impl<C: Channel> Response<C> {
    /// Sends the values until there are no more. Returns the status with which the subscription ends.
    ///
    /// # Errors
    /// The peer has cancelled, or the connection is over.
    pub(super) async fn send_values<S: Source<Bytes = C::Bytes>>(
        &self,
        (terms, mut values): (SubscriptionTerms, Values<S>),
        source: &Arc<S>,
    ) -> Result<Status, Ended> {
        let mut writes = Writes::<C, S>(VecDeque::new());
        let unsent = loop {
            let next = match self.next_value::<S>(&mut values, &mut writes).await {
                Ok(next) => next,
                Err(unsent) => break unsent,
            };
            let taken = TakenValue::new(source.clone(), next.taken);
            if let Err(unsent) =
                self.send_value(terms, (taken, (next.sequence, next.began)), &mut writes).await
            {
                break unsent;
            }
        };
        drop(values);
        // The end of the subscription follows its contents.
        self.unless_over(pin!(poll_fn(|context| self.poll_writes(&mut writes, context)))).await?;
        match unsent {
            Unsent::Ended => Err(Ended),
            Unsent::Refused(status) => Ok(status),
        }
    }

    /// The next value, once the peer may be sent one.
    async fn next_value<S: Source>(
        &self,
        values: &mut Values<S>,
        writes: &mut Writes<C, S>,
    ) -> Result<Sequenced<S::Taken>, Unsent> {
        self.beside(writes, pin!(self.until_allowed())).await?;
        let next = self.beside(writes, pin!(values.next())).await?;
        let ended = || Err(Status::new(Code::Cancelled, "the sender has no more values"));
        next.unwrap_or_else(ended).map_err(Unsent::Refused)
    }

    /// Polls `future` until the peer cancels or the connection is over, and the writes beside it.
    async fn beside<S: Source, F: Future>(
        &self,
        writes: &mut Writes<C, S>,
        mut future: Pin<&mut F>,
    ) -> Result<F::Output, Ended> {
        let both = poll_fn(|context| {
            let _ = self.poll_writes(writes, context);
            future.as_mut().poll(context)
        });
        self.unless_cancelled(pin!(both)).await
    }

    /// Ready when no write is under way.
    fn poll_writes<S: Source>(&self, writes: &mut Writes<C, S>, context: &mut Context<'_>) -> Poll<()> {
        while let Some(Underway { write, taken }) = writes.0.front_mut() {
            let Poll::Ready(result) = write.as_mut().poll(context) else { return Poll::Pending };
            taken.iter_mut().for_each(TakenValue::dispose);
            writes.0.pop_front();
            match result {
                Ok(()) => self.connection.change(|state, _| state.end_value(self.index)),
                Err(error) => self.connection.fail(&error.0),
            }
        }
        Poll::Ready(())
    }

    /// Waits until the peer has returned a value.
    async fn until_allowed(&self) {
        poll_fn(|context| {
            let (may, replaced) = self.connection.lock().responses.may_send(self.index, context.waker());
            drop(replaced);
            if may { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    async fn send_value<S: Source<Bytes = C::Bytes>>(
        &self,
        terms: SubscriptionTerms,
        (mut taken, (sequence, began)): (TakenValue<S>, (u64, u64)),
        writes: &mut Writes<C, S>,
    ) -> Result<(), Unsent> {
        let Some((metadata, bytes)) = taken.value() else { return Ok(()) };
        if let Err(status) = check_value(&metadata, length_of(bytes.as_ref()) == metadata.byte_length) {
            taken.dispose();
            return Err(Unsent::Refused(status));
        }
        let checksum = self.checksum(taken.checksums(), bytes.as_ref()).await?;
        let described = Described { metadata: &metadata, bytes: bytes.as_ref() };
        let way = self.content(terms, described, writes).await?;
        let (content, loan_follows) = match way {
            Way::InMessage(content) => (Some(content), false),
            Way::Lent => (None, true),
            Way::Written => (None, false),
        };
        let value = MetaDataResponse { index: self.index, metadata, content, loan_follows, checksum };
        let write = TensorWrite { version: taken.version(), sequence, began, value };
        self.beside(writes, pin!(self.announce(write))).await??;
        // From here on the value belongs to the peer; its memory is held until the bytes are written.
        taken.source = None;
        // The newest write is the value's, unless it has ended.
        match writes.0.back_mut().filter(|newest| newest.taken.is_none()) {
            Some(newest) => newest.taken = Some(taken),
            None => taken.dispose(),
        }
        Ok(())
    }

    /// Has the peer get the content of a value.
    async fn content<S: Source<Bytes = C::Bytes>>(
        &self,
        terms: SubscriptionTerms,
        Described { metadata, bytes }: Described<'_, C::Bytes>,
        writes: &mut Writes<C, S>,
    ) -> Result<Way, Unsent> {
        let channel = self.connection.channel();
        let Some(bytes) = bytes.filter(|_| metadata.byte_length > 0) else { return Ok(Way::Written) };
        if self.connection.agreed().is_eager(metadata) {
            let mut content = Vec::new();
            channel.copy_out(bytes, &mut content);
            content.truncate(metadata.byte_length as usize);
            return Ok(Way::InMessage(content.into()));
        }
        if terms.view
            && channel.can_lend(bytes)
            && self.lend_value(metadata.byte_length, bytes, writes).await?
        {
            return Ok(Way::Lent);
        }
        let staged = self.beside(writes, pin!(channel.stage(bytes.clone()))).await?;
        let staged = staged.map_err(Unsent::Refused)?;
        let destination = self.buffer(metadata, writes).await?;
        self.write_buffer((metadata.byte_length, staged), destination, writes).await?;
        Ok(Way::Written)
    }

    /// Lends a value. False if that is not possible now.
    async fn lend_value<S: Source<Bytes = C::Bytes>>(
        &self,
        length: u64,
        bytes: &C::Bytes,
        writes: &mut Writes<C, S>,
    ) -> Result<bool, Ended> {
        let (connection, index) = (&self.connection, self.index);
        let lent = content_turn(&**connection, |state| {
            if !state.responses.may_write(index) {
                return Err(Ended);
            }
            let write = connection.channel().lend_content(bytes, index.immediate(0));
            if write.is_some() {
                state.count_lent(index, length);
            }
            Ok(write)
        });
        let write = self.beside(writes, pin!(lent)).await?.map_err(|_| Ended)??;
        let is_lent = write.is_some();
        write.into_iter().for_each(|write| writes.push(write));
        Ok(is_lent)
    }

    /// A buffer of the peer for a value of `metadata`, which is requested if there is none.
    async fn buffer<S: Source>(
        &self,
        metadata: &Metadata,
        writes: &mut Writes<C, S>,
    ) -> Result<Destination, Ended> {
        loop {
            let room = poll_fn(|context| {
                let mut state = self.connection.lock();
                let (room, replaced) =
                    state.responses.room(self.index, metadata.byte_length, context.waker());
                drop(state);
                drop(replaced);
                if room == Room::Later { Poll::Pending } else { Poll::Ready(room) }
            });
            if let Room::Buffer(destination) = self.beside(writes, pin!(room)).await? {
                return Ok(destination);
            }
            let request = BufferRequest { index: self.index, metadata: metadata.clone() };
            let sent = send(&*self.connection, Message::BufferRequest(request));
            self.beside(writes, pin!(sent)).await?.map_err(|_| Ended)?;
        }
    }

    /// Writes the content into a buffer, without an immediate.
    async fn write_buffer<S: Source<Bytes = C::Bytes>>(
        &self,
        (length, bytes): (u64, C::Bytes),
        destination: Destination,
        writes: &mut Writes<C, S>,
    ) -> Result<(), Ended> {
        let (connection, index) = (&self.connection, self.index);
        let written = self.write_ahead(Some(&bytes), Some(destination));
        let ahead = self.beside(writes, pin!(written)).await??;
        let mut bytes = Some(bytes);
        let written = content_turn(&**connection, |state| {
            state.responses.may_write(index).then(|| {
                state.count_uncredited(index, length);
                connection.channel().write_content(bytes.take(), Some((destination, ahead)), None, None)
            })
        });
        let write = self.beside(writes, pin!(written)).await?.map_err(|_| Ended)?.ok_or(Ended)?;
        writes.push(write);
        Ok(())
    }

    /// Sends TENSOR_WRITE, unless the peer has cancelled.
    async fn announce(&self, write: TensorWrite) -> Result<(), Ended> {
        let message = Message::TensorWrite(write);
        let mut is_wanted = true;
        message_turn(&*self.connection, |state| {
            is_wanted = state.responses.may_write(self.index);
            if is_wanted { state.post(&message) } else { Ok(true) }
        })
        .await
        .map_err(|_| Ended)?;
        if is_wanted { Ok(()) } else { Err(Ended) }
    }
}
