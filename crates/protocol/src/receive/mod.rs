//! The receiving side of a transfer.

mod admission;
mod held;
mod receiving;
mod validate;

use std::{
    future::{Future, poll_fn},
    mem,
    pin::pin,
    sync::{Arc, MutexGuard},
    task::{Context, Poll},
};

use futures::FutureExt as _;

use crate::{
    Agreed, Allocator, Channel, ChannelError, Checksums, Connection, Destination, LentEnd, Metadata, Mode,
    RequestIndex, Scope, Sharing, StepId, TensorReRequest, TensorRequest, TransferError, Want,
    connection::{State, Waiting},
    requests::{Check, Content, Landed, Reply},
};
use admission::Known;
pub use held::ReceivedGuard;
pub use receiving::Receiving;

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
    /// Alone: a poll may look for the reply.
    #[default]
    Alone,
    /// Beside sends or other receives: a poll never looks for the reply, which would hold these up.
    Beside,
    /// With other receives that it polls one after the other. Their requests share as few messages as possible: such a request is
    /// posted with the next message, or else by the connection's housekeeping.
    Together,
}

impl ReceiveOptions {
    /// Whether polls may look for the reply.
    fn may_look(self) -> bool {
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
    /// Its step and key and its number in the order of arrival, with which it goes back if it is not used.
    origin: Option<(StepId, Arc<str>, u64)>,
    check: Check,
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
        Receiving::new(self, scope, key, (allocator, options))
    }

    /// The step is over here: memory of contents that are held for its receives goes back, and none is held from now on.
    pub fn discard(&self, step: StepId) {
        loop {
            let mut state = self.lock();
            state.requests.discard(step);
            let kept = state.requests.take_stashed_of(step);
            let is_last = kept.is_none();
            self.settle(state, None, kept.and_then(Landed::returned));
            if is_last {
                return;
            }
        }
    }

    /// Steps whose values may be lost with this connection: their requests or contents are under way, or it is not known
    /// whether the peer has them. After the connection has [failed](Self::fail), the steps at the time of the failure.
    /// Each once, in order.
    pub fn steps_under_way(&self) -> Vec<StepId> {
        self.lock().steps_under_way().into_iter().collect()
    }

    fn remember(&self, scope: Scope, key: &Arc<str>, metadata: &Metadata) {
        self.lock().cache.insert(scope, key, metadata.clone());
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
    let origin = scope.step().map(|step| (step, key, number));
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
    /// It sleeps: its waker was left as the request was posted.
    Sleeps,
    /// It looks whether the reply has come.
    Asks,
}

/// One open request. Dropping it gives the request up.
struct Request<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    index: RequestIndex,
    /// That of the value, if it was asked for and the value has come.
    version: Option<u64>,
    /// The table has let go of it.
    is_released: bool,
    /// Whether polls may look for the reply.
    may_look: bool,
}

/// What a request asks for first, and memory for that, of which the table does not know yet.
struct First<L> {
    known: Arc<[Metadata]>,
    want: Want,
    lent: Option<L>,
}

/// An answer, and memory that it did not need.
type Answered<L> = (Reply<L>, Option<(L, LentEnd)>);

impl<'connection, C: Channel> Request<'connection, C> {
    fn new(connection: &'connection Connection<C>, index: RequestIndex) -> Self {
        Self { connection, index, version: None, is_released: false, may_look: true }
    }

    /// The content, of a request whose value the peer has described, or has asked with `first`.
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

    /// Remembers what an answer tells of the value, and takes back the memory that it did not need.
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
                    self.connection.remember(scope, &known.key, &landed.metadata);
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
                self.connection.remember(scope, &known.key, &metadata);
                Ok(Next::Described(metadata))
            }
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
        Ok(self.ask_again(metadata, destination).await?)
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
        let request = TensorRequest { index: self.index, scope, key: key.clone(), known, want };
        // The table has the memory from the first poll on, unless the connection is over.
        let sent = self.connection.send_request(request, &mut lent, is_together).await;
        if let Some(lent) = lent {
            self.end_loan(allocator, lent, LentEnd::NeverSent);
        }
        Ok((is_view, if sent? { FirstPoll::Looks } else { FirstPoll::Asks }))
    }

    /// Whether to ask for a view. A value that is known to be small is copied, because that costs less.
    fn is_view(&self, sharing: Sharing, known: &[Metadata]) -> bool {
        let Agreed { mode, eager_bytes_max, .. } = self.connection.agreed();
        let largest = known.iter().map(|metadata| metadata.byte_length).max();
        let is_small = largest.is_some_and(|largest| largest <= eager_bytes_max.into());
        sharing == Sharing::View && mode != Mode::Original && !is_small
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

    /// The table holds `lent` from now on.
    fn store_memory<A: Allocator<Lent = C::Lent>>(
        &self,
        allocator: &A,
        lent: C::Lent,
    ) -> Result<(), ChannelError> {
        let mut state = self.connection.lock();
        match state.failure() {
            Ok(()) => {
                state.requests.store_memory(self.index, lent);
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
        let request = TensorReRequest { index: self.index, destination };
        self.connection.send_in_line(Waiting::ReRequest(request, metadata)).await
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
        // Before the waker is left: a reply that this task finds itself wakes nobody. One that comes later finds the
        // waker, which is left under the lock that replies are kept under.
        let is_first = matches!(first, FirstPoll::Looks) && connection.channel().may_help();
        let mut may_find = self.may_look && (!is_first || connection.channel().help());
        let mut state = connection.lock();
        while may_find && state.requests.may_help(self.index) && connection.channel().may_help() {
            drop(state);
            may_find = connection.channel().help();
            state = connection.lock();
        }
        if let Some(reply) = state.requests.take_reply(self.index) {
            return Poll::Ready(Ok(self.answered(state, scope, reply)));
        }
        let replaced = state.requests.store_waker(self.index, context.waker());
        let failure = state.failure();
        drop(state);
        drop(replaced);
        failure?;
        if tensorwire_testpoints::chance!("a receive is woken without a reason") {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// After a content the request is over.
    fn answered(
        &mut self,
        mut state: MutexGuard<'_, State<C::Lent>>,
        scope: Scope,
        reply: Reply<C::Lent>,
    ) -> Answered<C::Lent> {
        if !matches!(reply, Reply::Content(_)) {
            return (reply, None);
        }
        let unneeded = state.requests.take_unneeded(self.index);
        if scope.is_versioned() {
            self.version = state.requests.version(self.index);
        }
        if state.failure().is_err() {
            return (reply, unneeded);
        }
        self.is_released = true;
        let released = state.requests.release(self.index);
        self.connection.unlock(state);
        released.wake();
        (reply, unneeded)
    }

    /// Polls `future` until the connection is over, or the request needs no answer any more.
    async fn unless_over<F: Future>(&self, future: F) -> Result<F::Output, Stop<C::Lent>> {
        let mut future = pin!(future);
        poll_fn(|context| {
            // What need not be waited for needs no waker: whoever uses it finds out whether the connection is over.
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            let mut state = self.connection.lock();
            let failure = state.failure();
            let given = state.requests.take_given(self.index);
            let replaced = state.requests.store_waker(self.index, context.waker());
            drop(state);
            drop(replaced);
            match (given, failure) {
                (Some(landed), _) => Poll::Ready(Err(Stop::Given(landed))),
                (None, Err(over)) => Poll::Ready(Err(over.into())),
                (None, Ok(())) => Poll::Pending,
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
        if self.is_released {
            return;
        }
        let mut state = self.connection.lock();
        let released = state.requests.release(self.index);
        // After the connection's end `housekeeping` no longer runs: memory that was never written goes back here, the rest in
        // `drain`.
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

/// Those of the `known` metadata that the receive accepts.
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
