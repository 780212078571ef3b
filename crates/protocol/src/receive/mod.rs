//! The receiving side of a transfer.

mod admission;
mod guard;
mod receiving;
mod subscription;
mod validate;

use std::{
    future::{Future, poll_fn},
    mem,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::FutureExt as _;

use crate::{
    Agreed, Allocator, Channel, ChannelError, Checksums, Connection, Destination, LentEnd, Message, Metadata,
    RequestIndex, Scope, Sharing, StepId, TensorReRequest, TensorRequest, TransferError, Want,
    after::After,
    connection::{Asking, State, send, send_request},
    requests::{Check, Content, Landed, Reply},
};
use admission::{Known, Terms};
pub use guard::ReceivedGuard;
pub use receiving::Receiving;
pub use subscription::{Delivery, Subscription};

/// Options of a receive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiveOptions {
    /// A copy of the value, or a view of the peer's memory where that is possible.
    pub sharing: Sharing,
    /// How its task awaits it.
    pub awaiting: Awaiting,
}

/// How a task awaits a receive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Awaiting {
    /// Alone: its polls may poll the fabric for the reply.
    #[default]
    Alone,
    /// Beside sends or other receives: its polls never poll the fabric, which would delay the others.
    Beside,
    /// With other receives that it polls one after the other. Their requests share as few messages as possible: such a request is
    /// posted with the next message, or else by the connection's housekeeping.
    Together,
}

impl ReceiveOptions {
    /// Whether polls may poll the fabric for the reply.
    fn may_poll(self) -> bool {
        self.awaiting != Awaiting::Beside
    }
}

impl From<Sharing> for ReceiveOptions {
    fn from(sharing: Sharing) -> Self {
        Self { sharing, awaiting: Awaiting::Alone }
    }
}

/// A value that has arrived.
#[derive(Debug)]
pub struct Received<L> {
    /// Its element type and shape.
    pub metadata: Metadata,
    /// Its bytes, complete; `None` when there are none. The receiver ends the grant with the evidence
    /// [`LentEnd::Content`].
    pub lent: Option<L>,
    /// Its checksum, if it was validated, so that it need not be computed again when the value is sent on.
    pub checksums: Option<Arc<Checksums>>,
    /// Its version, if that was asked for ([`Scope::Versioned`]).
    pub version: Option<u64>,
    /// `None` for a published value.
    origin: Option<Origin>,
    check: Check,
}

/// Where a value of a step goes back to if it is not used.
#[derive(Debug)]
struct Origin {
    step: StepId,
    key: Arc<str>,
    /// Its number in the order of arrival.
    number: u64,
}

/// Why a request ends without an answer of its own.
enum Stop<L> {
    Failed(TransferError),
    /// It got the content of an earlier receive of its key.
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
    /// Asks the peer for the value of `key` and waits for it. First waits while as many requests as agreed are
    /// outstanding; receives of one key proceed in order.
    ///
    /// # Errors
    /// [`TransferError`]; memory of `allocator` has been or will be taken back.
    ///
    /// # Cancel safety
    /// Cancel-safe: dropping the future gives the receive up. The connection holds the granted memory until the
    /// peer can no longer write it. A value of a step that the peer has not written stays in the peer's queue; one that is
    /// on its way is held here for the next receive of its key, which waits until it is known which of the two it is.
    /// [`discard`](Self::discard) drops values that are held.
    pub async fn receive<A: Allocator<Lent = C::Lent>>(
        self: &Arc<Self>,
        scope: Scope,
        key: &str,
        allocator: &A,
    ) -> Result<Received<C::Lent>, TransferError> {
        self.receive_with(scope, key, allocator, ReceiveOptions::default()).await
    }

    /// As [`receive`](Self::receive), with `options`.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    ///
    /// # Cancel safety
    /// As [`receive`](Self::receive); a view that is on its way is held like a content.
    pub fn receive_with<'a, A: Allocator<Lent = C::Lent>>(
        self: &'a Arc<Self>,
        scope: Scope,
        key: &'a str,
        allocator: &'a A,
        options: ReceiveOptions,
    ) -> Receiving<'a, C, A> {
        Receiving::new(self, scope, key, Terms { allocator, options })
    }

    /// Ends the step on this side. The memory of contents that are held for its receives is returned, and none of its contents is
    /// held from now on.
    pub fn discard(&self, step: StepId) {
        let take_back = || {
            self.change(|state, after| {
                state.requests.discard(step);
                let stashed = state.requests.take_stashed_of(step)?;
                after.take_back(stashed.returned());
                Some(())
            })
        };
        while take_back().is_some() {}
    }
}

/// A value that has arrived, for its receive: with a copy of its content if that came inside a message.
fn handed_out<A: Allocator>(
    (scope, key): (Scope, Arc<str>),
    landed: Landed<A::Lent>,
    version: Option<u64>,
    allocator: &A,
) -> Received<A::Lent> {
    let Landed { number, metadata, content, check } = landed;
    let origin = scope.step().map(|step| Origin { step, key, number });
    let lent = match content {
        Content::None => None,
        Content::Lent(lent) => Some(lent),
        Content::Eager(bytes) => Some(allocator.copy_eager(&metadata, &bytes)),
    };
    Received { metadata, lent, checksums: None, version, origin, check }
}

/// What an answer leads to.
enum Next<L> {
    Landed(Landed<L>),
    /// The value has these metadata, and needs memory.
    Described(Metadata),
}

/// How a task waits for the reply to a request that it has just posted.
enum FirstPoll {
    /// It polls for the reply before it takes the lock: there was no other request.
    Looks,
    /// It sleeps: its waker was stored when the request was posted.
    Sleeps,
    /// It checks whether the reply has come.
    Asks,
}

/// One open request. Dropping it gives the request up.
struct Request<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    index: RequestIndex,
    /// The version of the value, if it was asked for and the value has come.
    version: Option<u64>,
    /// The table no longer has the request.
    is_released: bool,
    /// Whether polls may poll the fabric for the reply.
    may_poll: bool,
}

/// What a request asks for first, and the memory for it, which the table does not have yet.
struct First<L> {
    known: Arc<[Metadata]>,
    want: Want,
    lent: Option<L>,
}

/// An answer, and memory that it did not need.
type Answered<L> = (Reply<L>, Option<(L, LentEnd)>);

impl<'connection, C: Channel> Request<'connection, C> {
    fn new(connection: &'connection Connection<C>, index: RequestIndex, may_poll: bool) -> Self {
        Self { connection, index, version: None, is_released: false, may_poll }
    }

    /// Gets the content of the request. `described` has the metadata if the peer has described the value already, and `first` is
    /// how the task waits for the reply.
    async fn pull<A: Allocator<Lent = C::Lent>>(
        &mut self,
        (scope, known): (Scope, &Known),
        mut described: Option<Metadata>,
        (is_view, mut first): (bool, FirstPoll),
        allocator: &A,
    ) -> Result<Landed<C::Lent>, Stop<C::Lent>> {
        loop {
            if let Some(metadata) = described.take() {
                self.go_on(metadata, allocator).await?;
            }
            let answered = poll_fn(|context| self.poll_reply(scope, &mut first, context)).await?;
            match self.follow(answered, (scope, known), is_view, allocator)? {
                Next::Landed(landed) => return Ok(landed),
                Next::Described(metadata) => described = Some(metadata),
            }
        }
    }

    /// Remembers the metadata in an answer, and takes back the memory that the answer did not need.
    #[inline(always)] // because otherwise the content is moved once more
    fn follow<A: Allocator<Lent = C::Lent>>(
        &self,
        (reply, unneeded): Answered<C::Lent>,
        (scope, known): (Scope, &Known),
        is_view: bool,
        allocator: &A,
    ) -> Result<Next<C::Lent>, TransferError> {
        match reply {
            Reply::Content(landed) => {
                let may_be_new = is_view || matches!(landed.content, Content::Eager(_) | Content::None);
                if may_be_new && !known.metadata.contains(&landed.metadata) {
                    self.remember(scope, &known.key, &landed.metadata);
                }
                if let Some((lent, end)) = unneeded {
                    self.end_loan(allocator, lent, end);
                }
                Ok(Next::Landed(landed))
            }
            Reply::ErrorStatus(status) => {
                self.take_back(allocator);
                Err(TransferError::Remote(status))
            }
            Reply::MetaDataResponse(metadata) => {
                self.take_back(allocator);
                self.remember(scope, &known.key, &metadata);
                Ok(Next::Described(metadata))
            }
        }
    }

    fn remember(&self, scope: Scope, key: &Arc<str>, metadata: &Metadata) {
        if scope.is_remembered() {
            self.connection.lock().requests.cache.insert(scope, key, metadata.clone());
        }
    }

    /// Names memory for a content of `metadata`, which the peer has announced.
    async fn go_on<A: Allocator<Lent = C::Lent>>(
        &self,
        metadata: Metadata,
        allocator: &A,
    ) -> Result<(), Stop<C::Lent>> {
        allocator.accepts(&metadata).map_err(TransferError::Local)?;
        let allocated = self.allocate(allocator, &metadata).await?;
        let destination = allocated.as_ref().map(|(_, destination)| *destination);
        if let Some((lent, _)) = allocated {
            self.store_memory(allocator, lent)?;
        }
        let request = TensorReRequest { index: self.index, destination };
        Ok(send(self.connection, Message::TensorReRequest(request)).await?)
    }

    /// Sends TENSOR_REQUEST, with memory for the content where that can be granted before. Returns whether it asks for a view.
    async fn ask<A: Allocator<Lent = C::Lent>>(
        &self,
        (scope, key): (Scope, &Arc<str>),
        known: Arc<[Metadata]>,
        allocator: &A,
        options: ReceiveOptions,
    ) -> Result<(bool, FirstPoll), Stop<C::Lent>> {
        let known = accepted(known, allocator);
        let is_together = options.awaiting == Awaiting::Together;
        let First { known, want, mut lent } = if self.is_view(options.sharing, &known) {
            First { known, want: Want::View, lent: None }
        } else {
            let known = if is_together { of_like_size(known) } else { known };
            self.allocate_first(allocator, scope, known).await?
        };
        let is_view = want == Want::View;
        let (index, key, arguments) = (self.index, key.clone(), allocator.arguments());
        let request = TensorRequest { index, scope, key, known, want, arguments };
        let request = Some(Message::TensorRequest(request));
        // The table has the memory from the first poll on, unless the connection is over.
        let asking = Asking { index: self.index, request, lent: &mut lent, together: is_together };
        let sent = send_request(self.connection, asking).await;
        if let Some(lent) = lent {
            self.end_loan(allocator, lent, LentEnd::NeverSent);
        }
        Ok((is_view, if sent? { FirstPoll::Looks } else { FirstPoll::Asks }))
    }

    /// Whether to ask for a view. A value that is known to be small is copied, because that costs less.
    fn is_view(&self, sharing: Sharing, known: &[Metadata]) -> bool {
        let Agreed { is_extended, eager_bytes_max, .. } = self.connection.agreed();
        let largest = known.iter().map(|metadata| metadata.byte_length).max();
        let is_small = largest.is_some_and(|largest| largest <= eager_bytes_max.into());
        sharing == Sharing::View && is_extended && !is_small
    }

    /// How the first request wants its content. It names `known` metadata only if it has memory for the largest of them, or
    /// needs none: where no memory can be granted before, small contents can come inside a message. The request for a
    /// published value is answered at once, so it may wait for memory; a value of a step, or a newer version, may take
    /// long to come.
    async fn allocate_first<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        scope: Scope,
        known: Arc<[Metadata]>,
    ) -> Result<First<C::Lent>, Stop<C::Lent>> {
        let first = |known, allocated: Option<(C::Lent, Destination)>| {
            let (lent, destination) = allocated.unzip();
            First { known, want: Want::Write(destination), lent }
        };
        let largest = known.iter().max_by_key(|metadata| metadata.byte_length);
        let Some(metadata) = largest.filter(|metadata| metadata.byte_length > 0) else {
            return Ok(first(known, None));
        };
        let is_small = metadata.byte_length <= self.connection.agreed().eager_bytes_max.into();
        if is_small && allocator.prefers_eager(metadata) {
            return Ok(First { known, want: Want::Eager, lent: None });
        }
        if scope.is_immediate() && !is_small {
            let allocated = self.allocate(allocator, metadata).await?;
            return Ok(first(known, allocated));
        }
        let early = allocator.allocate_early(metadata);
        Ok(match early.map_err(TransferError::Local)? {
            None if is_small => First { known, want: Want::Eager, lent: None },
            None => first(Arc::default(), None),
            some => first(known, some),
        })
    }

    /// Memory for content of `metadata`, if there is any.
    async fn allocate<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        metadata: &Metadata,
    ) -> Result<Option<(C::Lent, Destination)>, Stop<C::Lent>> {
        if metadata.byte_length == 0 {
            return Ok(None);
        }
        let allocated = match allocator.allocate(metadata).now_or_never() {
            Some(allocated) => allocated,
            // Boxed, because otherwise the future of every receive has room for this one.
            None => Box::pin(self.unless_over(allocator.allocate(metadata))).await?,
        };
        Ok(Some(allocated.map_err(TransferError::Local)?))
    }

    /// Stores `lent` in the table.
    fn store_memory<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        lent: C::Lent,
    ) -> Result<(), ChannelError> {
        let mut lent = Some(lent);
        let stored = self.connection.change(|state, _| {
            state.failure()?;
            if let Some(lent) = lent.take() {
                state.requests.store_memory(self.index, lent);
            }
            Ok(())
        });
        if let Some(lent) = lent {
            self.end_loan(allocator, lent, LentEnd::NeverSent);
        }
        stored
    }

    /// The peer's next answer, and memory that it did not need. An answer that came before the connection failed counts.
    fn poll_reply(
        &mut self,
        scope: Scope,
        first: &mut FirstPoll,
        context: &Context<'_>,
    ) -> Poll<Result<Answered<C::Lent>, ChannelError>> {
        let connection = self.connection;
        let first = mem::replace(first, FirstPoll::Asks);
        if matches!(first, FirstPoll::Sleeps) {
            return Poll::Pending;
        }
        // The fabric is polled before the waker is stored: a reply that this task finds itself wakes no task. A later reply finds
        // the waker, which is stored under the lock that replies are stored under.
        let is_first = matches!(first, FirstPoll::Looks) && connection.channel().may_help();
        let mut may_find = self.may_poll && (!is_first || connection.channel().help());
        loop {
            let polled = connection.change(|state, after| {
                if may_find && state.requests.may_help(self.index) && connection.channel().may_help() {
                    after.leave_queues();
                    return None;
                }
                Some(self.take_reply(scope, state, after, context))
            });
            match polled {
                Some(polled) => return polled,
                None => may_find = connection.channel().help(),
            }
        }
    }

    fn take_reply(
        &mut self,
        scope: Scope,
        state: &mut State<C>,
        after: &mut After<C::Lent>,
        context: &Context<'_>,
    ) -> Poll<Result<Answered<C::Lent>, ChannelError>> {
        if let Some(reply) = state.requests.take_reply(self.index) {
            return Poll::Ready(Ok(self.answered(scope, reply, state, after)));
        }
        after.drop(state.requests.store_waker(self.index, context.waker()));
        after.leave_queues();
        state.failure()?;
        if tensorwire_testpoints::chance!("a receive is woken without a reason") {
            after.wake([context.waker().clone()]);
        }
        Poll::Pending
    }

    /// After a content the request is over.
    fn answered(
        &mut self,
        scope: Scope,
        reply: Reply<C::Lent>,
        state: &mut State<C>,
        after: &mut After<C::Lent>,
    ) -> Answered<C::Lent> {
        if !matches!(reply, Reply::Content(_)) {
            return (reply, None);
        }
        let unneeded = state.requests.take_unneeded(self.index);
        if scope.is_versioned() {
            self.version = state.requests.version(self.index);
        }
        if state.failure().is_ok() {
            self.is_released = true;
            state.requests.release(self.index, after);
        }
        (reply, unneeded)
    }

    /// Polls `future` until the connection is over, or the request needs no answer any more.
    async fn unless_over<F: Future>(&self, future: F) -> Result<F::Output, Stop<C::Lent>> {
        let mut future = pin!(future);
        poll_fn(|context| {
            // A future that is ready needs no waker: using its output shows whether the connection is over.
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            self.connection.change(|state, after| {
                after.leave_queues();
                after.drop(state.requests.store_waker(self.index, context.waker()));
                if let Some(landed) = state.requests.take_given(self.index) {
                    return Poll::Ready(Err(Stop::Given(landed)));
                }
                state.failure()?;
                Poll::Pending
            })
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
        end_loan(self.connection, allocator, lent, end);
    }
}

/// Takes memory back whose grant has ended, for the reason `end`.
fn end_loan<C: Channel, A: Allocator<Lent = C::Lent>>(
    connection: &Connection<C>,
    allocator: &A,
    lent: C::Lent,
    end: LentEnd,
) {
    if let Some(lent) = allocator.take_back(lent, end) {
        connection.channel().take_back(lent, end);
    }
}

impl<C: Channel> Drop for Request<'_, C> {
    fn drop(&mut self) {
        if !self.is_released {
            give_up(self.connection, self.index);
        }
    }
}

/// Gives a request up. After the connection's end `housekeeping` no longer runs: memory that was never written goes back here, the rest
/// in `drain`.
fn give_up<C: Channel>(connection: &Connection<C>, index: RequestIndex) {
    let unwanted = |state: &mut State<C>, after: &mut After<C::Lent>| {
        let unwanted = if state.failure().is_err() { state.requests.next_unwanted() } else { None };
        let has_more = unwanted.is_some();
        after.take_back(unwanted);
        has_more
    };
    let mut has_more = connection.change(|state, after| {
        state.requests.release(index, after);
        unwanted(state, after)
    });
    while has_more {
        has_more = connection.change(unwanted);
    }
}

/// The metadata of `known` that the receive accepts.
fn accepted<A: Allocator>(known: Arc<[Metadata]>, allocator: &A) -> Arc<[Metadata]> {
    those(known, |metadata| allocator.accepts(metadata).is_ok())
}

/// The metadata of `known` that fill at least half of the memory for the largest of them, or need none. Each value of one call
/// holds its memory until the last has come, while other receives wait for memory: a small value must not hold memory for
/// a large one.
fn of_like_size(known: Arc<[Metadata]>) -> Arc<[Metadata]> {
    let largest = known.iter().map(|metadata| metadata.byte_length).max().unwrap_or_default();
    those(known, |metadata| metadata.byte_length == 0 || metadata.byte_length >= largest / 2)
}

/// The metadata of `known` for which `are` holds. Nothing is copied if it holds for all.
fn those(known: Arc<[Metadata]>, are: impl Fn(&Metadata) -> bool) -> Arc<[Metadata]> {
    if known.iter().all(&are) {
        return known;
    }
    known.iter().filter(|metadata| are(metadata)).cloned().collect()
}
