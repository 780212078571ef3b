//! The receiver's half of a transfer.

mod admission;
mod entry;
mod index;
mod stash;
mod table;
mod validate;

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
};

use admission::Admission;
use stash::{Check, Content, Landed, Place};
pub(crate) use table::{Arrived, Reply, Requests};

use crate::{
    Agreed, Allocator, Channel, ChannelError, Checksums, Connection, Destination, LentEnd, Message, Metadata,
    Mode, RequestIndex, Scope, Sharing, StepId, TensorReRequest, TensorRequest, TransferError, Want,
    connection::Turnstile, limits::NAME_BYTES_MAX,
};

/// How a value is received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Manner {
    /// As an own copy; or as a view of the peer's memory, if that is possible.
    pub sharing: Sharing,
    /// One of several that one task asks for now, polled one after the other: their requests travel in as few messages
    /// as they fit. Such a request goes out when its future is polled for the second time, or with the next message.
    pub together: bool,
}

impl From<Sharing> for Manner {
    fn from(sharing: Sharing) -> Self {
        Self { sharing, together: false }
    }
}

/// A value that has arrived.
#[derive(Debug)]
pub struct Received<L> {
    /// What it is.
    pub metadata: Metadata,
    /// Its bytes, complete; `None` when there are none. The receiver ends the loan with the evidence
    /// [`LentEnd::Content`].
    pub lent: Option<L>,
    /// Its checksum, if it was validated: to be remembered beside it when it is sent on.
    pub checksums: Option<Arc<Checksums>>,
    /// Its version, if that was asked for ([`Scope::Versioned`]).
    pub version: Option<u64>,
    /// Its place and number, for the case that it is not used after all.
    origin: Option<(Place, u64)>,
    check: Check,
}

/// A received value that is not handed out yet: one of several that are wanted together. Dropping it gives a value of a
/// step to the next receive of its key.
pub struct Held<C: Channel> {
    connection: Arc<Connection<C>>,
    received: Option<Received<C::Lent>>,
}

impl<C: Channel> std::fmt::Debug for Held<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").finish_non_exhaustive()
    }
}

impl<C: Channel> Held<C> {
    /// The value, until it is handed out.
    pub fn get(&self) -> Option<&Received<C::Lent>> {
        self.received.as_ref()
    }

    /// As [`get`](Self::get), to settle where its bytes are.
    pub fn get_mut(&mut self) -> Option<&mut Received<C::Lent>> {
        self.received.as_mut()
    }

    /// Hands the value out; once.
    pub fn take(&mut self) -> Option<Received<C::Lent>> {
        self.received.take()
    }
}

impl<C: Channel> Drop for Held<C> {
    fn drop(&mut self) {
        let mut state = self.connection.lock();
        state.requests.forget_kept();
        let Some(Received { metadata, lent, origin, check, .. }) = self.received.take() else { return };
        let is_over = state.failure().is_err();
        match origin.filter(|_| !is_over) {
            Some((place, number)) => {
                let landed = Landed { number, metadata, content: lent.into(), check };
                let next = state.requests.stash_or_give(place, landed);
                self.connection.settle(state, next, None);
            }
            None => self.connection.settle(state, None, lent.map(|lent| (lent, LentEnd::Content))),
        }
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
        self.receive_with(scope, key, allocator, Manner::default()).await
    }

    /// As [`receive`](Self::receive), in another [`Manner`].
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    ///
    /// # Cancel safety
    /// As [`receive`](Self::receive); a view that is on its way is kept like a content.
    pub async fn receive_with<A: Allocator<Lent = C::Lent>>(
        self: &Arc<Self>,
        scope: Scope,
        key: &str,
        allocator: &A,
        manner: Manner,
    ) -> Result<Received<C::Lent>, TransferError> {
        if key.len() > NAME_BYTES_MAX {
            return Err(TransferError::KeyTooLong { length: key.len() });
        }
        let key: Arc<str> = key.into();
        let request = match self.admit(scope, &key).await? {
            Admission::Request(request) => request,
            Admission::Kept(landed) => return self.hand_out(scope, &key, landed, allocator).await,
        };
        let pulled = request.pull(scope, &key, allocator, manner).await;
        let version = if scope.is_versioned() { self.lock().requests.version(request.index) } else { None };
        drop(request);
        match pulled {
            Ok(landed) | Err(Stop::Given(landed)) => {
                let received = self.hand_out(scope, &key, landed, allocator).await?;
                Ok(Received { version, ..received })
            }
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    /// Brings an eager content into memory; until then it still belongs to its place.
    async fn hand_out<A: Allocator<Lent = C::Lent>>(
        self: &Arc<Self>,
        scope: Scope,
        key: &Arc<str>,
        landed: Landed<C::Lent>,
        allocator: &A,
    ) -> Result<Received<C::Lent>, TransferError> {
        let Landed { number, metadata, content, check } = landed;
        let place = Place::of(scope, key);
        let Content::Eager(bytes) = content else {
            let origin = place.map(|place| (place, number));
            let lent = content.lent();
            let received = Received { metadata, lent, checksums: None, version: None, origin, check };
            return self.validated(received).await;
        };
        let mut kept = Kept { connection: self, place, number, value: Some((metadata, bytes)), check };
        kept.reserve();
        let Some((metadata, bytes)) = &kept.value else { return Err(TransferError::gone()) };
        let lent = allocator.keep(metadata, bytes).await.map_err(TransferError::Local)?;
        let Some((metadata, _)) = kept.value.take() else { return Err(TransferError::gone()) };
        let origin = kept.place.take().map(|place| (place, number));
        let lent = Some(lent);
        self.validated(Received { metadata, lent, checksums: None, version: None, origin, check }).await
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
    /// known yet whether the peer has them. Once it has [failed](Self::fail), all for which that was so then, whatever has
    /// become of their requests since. Each once, in order.
    pub fn steps_under_way(&self) -> Vec<StepId> {
        self.lock().steps_under_way().into_iter().collect()
    }

    /// Keeps a received value until others are there too.
    pub fn hold(self: &Arc<Self>, received: Received<C::Lent>) -> Held<C> {
        self.lock().requests.reserve_kept();
        Held { connection: self.clone(), received: Some(received) }
    }

    fn known(&self, scope: Scope, key: &str) -> Arc<[Metadata]> {
        if testpoints::chance!("what is known of a value is forgotten") {
            return Arc::default();
        }
        self.lock().cache.get(scope, key)
    }

    fn remember(&self, scope: Scope, key: &Arc<str>, metadata: &Metadata) {
        self.lock().cache.insert(scope, key, metadata.clone());
    }
}

/// An eager content that waits for memory. Dropping it keeps a value of a step for the next receive.
struct Kept<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    place: Option<Place>,
    number: u64,
    value: Option<(Metadata, Box<[u8]>)>,
    check: Check,
}

impl<C: Channel> Kept<'_, C> {
    /// From now on it finds room in the stash.
    fn reserve(&self) {
        self.connection.lock().requests.reserve_kept();
    }
}

impl<C: Channel> Drop for Kept<'_, C> {
    fn drop(&mut self) {
        let mut state = self.connection.lock();
        state.requests.forget_kept();
        let next = match (self.place.take(), self.value.take()) {
            (Some(place), Some((metadata, bytes))) => {
                let content = Content::Eager(bytes);
                let landed = Landed { number: self.number, metadata, content, check: self.check };
                state.requests.stash_or_give(place, landed)
            }
            _ => None,
        };
        self.connection.settle(state, next, None);
    }
}

/// Those of the `known` metadata that the receive accepts.
fn accepted<A: Allocator>(known: Arc<[Metadata]>, allocator: &A) -> Arc<[Metadata]> {
    those(known, |metadata| allocator.accepts(metadata).is_ok())
}

/// Those of `known` that fill at least half of memory for the largest of them, or need none. Of several values that are wanted
/// together each keeps its memory until the last has come, while others wait for memory: they must not hold much more than
/// they are.
fn of_like_size(known: Arc<[Metadata]>) -> Arc<[Metadata]> {
    let largest = known.iter().map(|metadata| metadata.byte_length).max().unwrap_or_default();
    those(known, |metadata| metadata.byte_length == 0 || metadata.byte_length >= largest / 2)
}

/// Those of `known` of which `are` holds; nothing is copied where that is so of all.
fn those(known: Arc<[Metadata]>, are: impl Fn(&Metadata) -> bool) -> Arc<[Metadata]> {
    if known.iter().all(&are) {
        return known;
    }
    known.iter().filter(|metadata| are(metadata)).cloned().collect()
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
        manner: Manner,
    ) -> Result<Landed<C::Lent>, Stop<C::Lent>> {
        let known = accepted(self.connection.known(scope, key), allocator);
        let (known, want) = if self.is_view(manner.sharing, &known) {
            (known, Want::View)
        } else {
            let known = if manner.together { of_like_size(known) } else { known };
            self.allocate_first(allocator, scope, known).await?
        };
        let request = TensorRequest { index: self.index, scope, key: key.clone(), known, want };
        self.connection.send_request(request, manner.together).await?;
        loop {
            match self.reply().await? {
                Reply::Content(landed) => {
                    // What came with its metadata.
                    if want == Want::View || matches!(landed.content, Content::Eager(_) | Content::None) {
                        self.connection.remember(scope, key, &landed.metadata);
                    }
                    let unneeded = self.connection.lock().requests.take_unneeded(self.index);
                    if let Some((lent, end)) = unneeded {
                        self.end_loan(allocator, lent, end);
                    }
                    return Ok(landed);
                }
                Reply::ErrorStatus(status) => {
                    self.take_back(allocator);
                    return Err(TransferError::Remote(status).into());
                }
                Reply::MetaDataResponse(metadata) => {
                    self.take_back(allocator);
                    self.connection.remember(scope, key, &metadata);
                    allocator.accepts(&metadata).map_err(TransferError::Local)?;
                    let destination = self.allocate(allocator, &metadata).await?;
                    self.ask_again(metadata, destination).await?;
                }
            }
        }
    }

    /// Whether to ask for a view. What is known to be small is copied: that costs less.
    fn is_view(&self, sharing: Sharing, known: &[Metadata]) -> bool {
        let Agreed { mode, eager_bytes_max, .. } = self.connection.agreed();
        let largest = known.iter().map(|metadata| metadata.byte_length).max();
        let is_small = largest.is_some_and(|largest| largest <= eager_bytes_max.into());
        sharing == Sharing::View && mode != Mode::Original && !is_small
    }

    /// How the first request wants its content. It says what is `known` only if it has memory for the largest of that,
    /// or needs none: small contents can come inside a message where there is no memory to lend before. A published
    /// value is there or is not, so its request may wait for memory; a value of a step, or a newer version, may be long
    /// in coming.
    async fn allocate_first<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        scope: Scope,
        known: Arc<[Metadata]>,
    ) -> Result<(Arc<[Metadata]>, Want), Stop<C::Lent>> {
        let largest = known.iter().max_by_key(|metadata| metadata.byte_length);
        let Some(metadata) = largest.filter(|metadata| metadata.byte_length > 0) else {
            return Ok((known, Want::Write(None)));
        };
        let is_small = metadata.byte_length <= self.connection.agreed().eager_bytes_max.into();
        if scope.is_immediate() && !is_small {
            let destination = self.allocate(allocator, metadata).await?;
            return Ok((known, Want::Write(destination)));
        }
        let early = self.unless_over(allocator.allocate_early(metadata)).await?;
        match early.map_err(TransferError::Local)? {
            Some((lent, destination)) => {
                self.keep(allocator, lent)?;
                Ok((known, Want::Write(Some(destination))))
            }
            None if is_small => Ok((known, Want::Eager)),
            None => Ok((Arc::default(), Want::Write(None))),
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
        self.keep(allocator, lent)?;
        Ok(Some(destination))
    }

    fn keep<A: Allocator<Lent = C::Lent>>(&self, allocator: &A, lent: C::Lent) -> Result<(), ChannelError> {
        let mut state = self.connection.lock();
        match state.failure() {
            Ok(()) => {
                state.requests.keep(self.index, lent);
                Ok(())
            }
            Err(over) => {
                drop(state);
                self.end_loan(allocator, lent, LentEnd::NeverSent);
                Err(over)
            }
        }
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
                (Poll::Pending, Ok(())) => {
                    if testpoints::chance!("a receive is woken for nothing") {
                        context.waker().wake_by_ref();
                    }
                    Poll::Pending
                }
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
    fn take_back<A: Allocator<Lent = C::Lent>>(&self, allocator: &A) {
        let ended = self.connection.lock().requests.take_ended(self.index);
        if let Some((lent, end)) = ended {
            self.end_loan(allocator, lent, end);
        }
    }

    fn end_loan<A: Allocator<Lent = C::Lent>>(&self, allocator: &A, lent: C::Lent, end: LentEnd) {
        if let Some(lent) = allocator.take_back(lent, end) {
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
