//! The sending side of a transfer.

mod paged;
mod subscribed;

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Poll, Waker},
};

use subscribed::Values;

use crate::{
    Agreed, Channel, Checksums, Code, Connection, Destination, ErrorStatus, Message, MetaDataResponse,
    Metadata, RequestIndex, Source, Status, SubscriptionTerms, Take, TensorRequest, VersionNotice, Want,
    connection::{content_turn, message_turn, send},
    responses::ResponseState,
    validation::encode_result,
    wire::{self, EagerResponse},
};

/// The response cannot continue: the peer has sent CANCEL, or the connection is over.
struct Ended;

/// A source's answer to a request. Its value goes back to the source unless it is written.
type Taking<S> = Take<TakenValue<S>, <S as Source>::Taking>;

/// What a request asks for.
enum Asked<S: Source> {
    /// One value.
    One(Taking<S>),
    /// All values from now on.
    Each(SubscriptionTerms, Values<S>),
}

impl<C: Channel> Connection<C> {
    /// Answers `request`, which [`on_immediate`](Self::on_immediate) passed on. The source is asked before this returns, so that
    /// requests are served in the order of these calls. A value that the source has now is sent now, if it travels inside a message
    /// and the message can be posted. Otherwise the answer waits.
    ///
    /// # Cancel safety
    /// Dropping an answer or its future puts a value that was not written back and answers the request with CANCELLED. If
    /// the content is being written, the write continues and counts among the contents under way until the connection ends.
    pub fn respond<S: Source<Bytes = C::Bytes> + 'static>(
        self: &Arc<Self>,
        request: TensorRequest,
        source: &Arc<S>,
    ) -> Responded<C, S> {
        if let Want::Each(terms) = request.want {
            let values = source.subscribe((request.scope, &request.key), terms);
            return self.waiting(request, source, Asked::Each(terms, values));
        }
        let taken = source.take(&request);
        if let Take::Now(Ok(value)) = &taken
            && self.agreed().may_answer_now(&request, S::metadata(value), S::bytes(value))
        {
            let (metadata, bytes) = (S::metadata(value), S::bytes(value));
            let content = EagerResponse::new(request.index, metadata, None);
            let sent = self
                .try_change(|state, after| state.post_now(after, |state| state.post_eager(content, bytes)));
            if sent == Ok(true) {
                return Responded::Sent;
            }
        }
        let taking = match taken {
            Take::Now(taken) => Take::Now(taken.map(|taken| TakenValue::new(source.clone(), taken))),
            Take::Later(taking) => Take::Later(taking),
        };
        self.waiting(request, source, Asked::One(taking))
    }

    fn waiting<S: Source<Bytes = C::Bytes>>(
        self: &Arc<Self>,
        request: TensorRequest,
        source: &Arc<S>,
        asked: Asked<S>,
    ) -> Responded<C, S> {
        let response = Response { connection: self.clone(), index: request.index, is_closed: false };
        Responded::Waiting(Box::new(Answer { response, request, source: source.clone(), asked }))
    }
}

impl Agreed {
    /// Whether a value that the source has answers `request` by one message with the content.
    fn may_answer_now(
        &self,
        request: &TensorRequest,
        metadata: &Metadata,
        bytes: Option<&impl AsRef<[u8]>>,
    ) -> bool {
        length_of(bytes) == metadata.byte_length
            && !request.scope.is_versioned()
            && !self.validation.is_on()
            && !self.is_written(request, metadata)
            && self.is_eager(metadata)
            && wire::check_metadata(metadata).is_ok()
    }

    /// Whether the value has known metadata and a destination, or needs none.
    fn is_written(&self, request: &TensorRequest, metadata: &Metadata) -> bool {
        let may_be = match request.want {
            Want::Write(_) => true,
            Want::View => metadata.byte_length == 0,
            Want::Eager | Want::Each(_) => false,
        };
        may_be && !self.describes_first() && request.known.contains(metadata)
    }

    /// Whether the content may travel inside META_DATA_RESPONSE.
    fn is_eager(&self, metadata: &Metadata) -> bool {
        let most = self.eager_bytes_max;
        let is_small = most > 0 && metadata.byte_length <= most.into();
        is_small && !tensorwire_testpoints::chance!("small content is not sent eagerly")
    }
}

/// How far a request is answered.
#[derive(Debug)]
pub enum Responded<C: Channel, S: Source> {
    /// It is answered.
    Sent,
    /// The answer waits, or needs more than one message: it must be [run](Answer::run).
    Waiting(Box<Answer<C, S>>),
}

/// The answer to one request, which [`run`](Self::run) sends.
pub struct Answer<C: Channel, S: Source> {
    response: Response<C>,
    request: TensorRequest,
    source: Arc<S>,
    asked: Asked<S>,
}

impl<C: Channel, S: Source> fmt::Debug for Answer<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("request", &self.request).finish_non_exhaustive()
    }
}

impl<C: Channel, S: Source<Bytes = C::Bytes>> Answer<C, S> {
    /// Sends the value when the source has it, or why it cannot be sent. The future must be run, for instance by spawning
    /// it.
    pub fn run(self) -> impl Future<Output = ()> + use<C, S> {
        let Self { mut response, request, source, asked } = self;
        // A block, because a function would store its parameters twice.
        async move {
            let taken = match asked {
                Asked::Each(terms, values) => {
                    let sent = Box::pin(response.send_values((terms, values), &source)).await;
                    match sent {
                        Ok(status) => Err((status, source)),
                        Err(Ended) => return,
                    }
                }
                Asked::One(Take::Now(taken)) => taken.map_err(|status| (status, source)),
                Asked::One(Take::Later(mut taking)) => {
                    match response.unless_cancelled(Pin::new(&mut taking)).await {
                        Ok(Ok(taken)) => Ok(TakenValue::new(source, taken)),
                        Ok(Err(status)) => Err((status, source)),
                        Err(Ended) => return,
                    }
                }
            };
            match taken {
                Ok(mut taken) => response.answer(&request, &mut taken).await,
                Err((status, source)) => {
                    // A CANCEL does not shorten the delay: otherwise a peer that cancels would have its next request refused
                    // sooner.
                    if let Some(mut turn) = source.before_refusal()
                        && response.unless_over(Pin::new(&mut turn)).await.is_err()
                    {
                        return;
                    }
                    response.refuse(status).await;
                }
            }
        }
    }
}

/// The result of posting a loan.
enum Lending<W> {
    /// It is posted.
    Posted(W),
    /// It cannot be posted; nothing was.
    Refused,
}

/// One open response. If it is dropped, the peer still gets an answer: ERROR_STATUS or CANCEL_ACK.
struct Response<C: Channel> {
    connection: Arc<Connection<C>>,
    index: RequestIndex,
    /// The table no longer has the response.
    is_closed: bool,
}

impl<C: Channel> Response<C> {
    /// Sends the value, or why it cannot be sent.
    async fn answer<S: Source<Bytes = C::Bytes>>(
        &mut self,
        request: &TensorRequest,
        taken: &mut TakenValue<S>,
    ) {
        let Some((metadata, bytes)) = taken.value() else { return };
        if let Some(pages) = taken.pages() {
            return self.write_pages(request, &metadata, pages, taken).await;
        }
        if let Err(status) = check_value(&metadata, bytes.is_some()) {
            taken.dispose();
            return self.refuse(status).await;
        }
        if request.scope.is_versioned() && self.send_version(taken.version()).await.is_err() {
            return;
        }
        let Ok(checksum) = self.checksum(taken.checksums(), bytes.as_ref()).await else { return };
        let known = if self.connection.agreed().describes_first() { &[] } else { &*request.known };
        let which = known.iter().position(|known| *known == metadata);
        let (which, destination) = match (which, request.want) {
            (Some(which), Want::Write(destination)) => (which, destination),
            (Some(which), Want::View) if metadata.byte_length == 0 => (which, None),
            _ if self.connection.agreed().is_eager(&metadata) => {
                return self.send_eagerly(metadata, bytes, checksum, taken).await;
            }
            (which, want) => {
                if want == Want::View {
                    match self.lend(which, &metadata, checksum, bytes.as_ref()).await {
                        Ok(Lending::Posted(write)) => return self.finish(write, taken).await,
                        Ok(Lending::Refused) => {}
                        Err(Ended) => return,
                    }
                }
                match self.describe_and_wait(&metadata, checksum).await {
                    Ok(destination) => (0, destination),
                    Err(Ended) => return,
                }
            }
        };
        let destination = destination.filter(|_| metadata.byte_length > 0);
        self.write((metadata.byte_length, checksum), bytes, (which, destination), taken).await;
    }

    /// The checksum of the value, if contents are validated: the remembered one, else computed piece by piece and
    /// remembered.
    async fn checksum(
        &self,
        checksums: Option<Arc<Checksums>>,
        bytes: Option<&C::Bytes>,
    ) -> Result<Option<u64>, Ended> {
        let validation = self.connection.agreed().validation;
        if !validation.is_on() {
            return Ok(None);
        }
        let checksums = checksums.unwrap_or_default();
        let content = bytes.map(AsRef::as_ref).unwrap_or_default();
        let summed = poll_fn(|context| match checksums.go_on(validation, content) {
            Some(summed) => Poll::Ready(summed),
            None => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        });
        let (checksum, is_computed) = self.unless_cancelled(pin!(summed)).await?;
        self.connection.lock().line.counters.checksums_computed += u64::from(is_computed);
        Ok(checksum)
    }

    /// Sends VERSION. It arrives before everything that is posted later.
    async fn send_version(&self, version: u64) -> Result<(), Ended> {
        let message = Message::Version(VersionNotice { index: self.index, version });
        let sent = send(&*self.connection, message);
        self.unless_cancelled(pin!(sent)).await?.map_err(|_| Ended)
    }

    /// Sends ERROR_STATUS.
    async fn refuse(&self, status: Status) {
        let message = Message::ErrorStatus(ErrorStatus { index: self.index, status });
        let sent = send(&*self.connection, message);
        let _: Result<_, Ended> = self.unless_cancelled(pin!(sent)).await;
    }

    /// Sends META_DATA_RESPONSE with the content, which answers the request.
    async fn send_eagerly<S: Source>(
        &mut self,
        metadata: Metadata,
        bytes: Option<C::Bytes>,
        checksum: Option<u64>,
        taken: &mut TakenValue<S>,
    ) {
        if length_of(bytes.as_ref()) != metadata.byte_length {
            taken.put_back();
            return self.refuse(Status::new(Code::Internal, "the sender's value has too few bytes")).await;
        }
        let content = EagerResponse::new(self.index, &metadata, checksum);
        let sent = message_turn(&*self.connection, |state| state.post_eager(content, bytes.as_ref()));
        if let Ok(Ok(())) = self.unless_cancelled(pin!(sent)).await {
            self.is_closed = true;
            taken.dispose();
        }
    }

    /// Sends META_DATA_RESPONSE, which either asks for TENSOR_RE_REQUEST or announces a loan.
    async fn describe(
        &self,
        metadata: &Metadata,
        checksum: Option<u64>,
        loan_follows: bool,
    ) -> Result<(), Ended> {
        let (index, metadata) = (self.index, metadata.clone());
        // A written content carries its own checksum, in mode counted.
        let checksum = checksum.filter(|_| loan_follows || self.connection.agreed().describes_first());
        let response = MetaDataResponse { index, metadata, content: None, loan_follows, checksum };
        let message = Message::MetaDataResponse(response);
        let sent = send(&*self.connection, message);
        self.unless_cancelled(pin!(sent)).await?.map_err(|_| Ended)
    }

    /// Posts the content as a loan when it is its turn, if that is possible. `which` is the number of its known metadata. If
    /// it has none of these, or has a checksum, META_DATA_RESPONSE precedes the loan.
    async fn lend(
        &self,
        which: Option<usize>,
        metadata: &Metadata,
        checksum: Option<u64>,
        bytes: Option<&C::Bytes>,
    ) -> Result<Lending<C::Write>, Ended> {
        let (connection, index) = (&self.connection, self.index);
        let lendable = bytes.filter(|bytes| connection.channel().can_lend(bytes));
        let Some(bytes) =
            lendable.filter(|_| !tensorwire_testpoints::chance!("a value that could be loaned is sent"))
        else {
            return Ok(Lending::Refused);
        };
        let which = which.filter(|_| checksum.is_none());
        if which.is_none() {
            self.describe(metadata, checksum, true).await?;
        }
        let posted = content_turn(&**connection, |state| {
            if !state.responses.may_write(index) {
                return Err(Ended);
            }
            let immediate = index.immediate(which.unwrap_or(0));
            let Some(write) = connection.channel().lend_content(bytes, immediate) else {
                return Ok(Lending::Refused);
            };
            state.responses.start_writing(index);
            state.count_content(index);
            state.line.counters.count_loan_sent(metadata.byte_length);
            Ok(Lending::Posted(write))
        });
        self.unless_cancelled(pin!(posted)).await?.map_err(|_| Ended)?
    }

    /// Sends META_DATA_RESPONSE and waits for TENSOR_RE_REQUEST.
    async fn describe_and_wait(
        &self,
        metadata: &Metadata,
        checksum: Option<u64>,
    ) -> Result<Option<Destination>, Ended> {
        self.describe(metadata, checksum, false).await?;
        self.re_request().await
    }

    async fn re_request(&self) -> Result<Option<Destination>, Ended> {
        poll_fn(|context| match self.watch(context.waker()) {
            Ok(ResponseState::ReRequested(destination)) => Poll::Ready(Ok(destination)),
            Ok(ResponseState::Open) => Poll::Pending,
            Ok(ResponseState::Cancelled) | Err(Ended) => Poll::Ready(Err(Ended)),
        })
        .await
    }

    /// Writes the content when it is its turn, and waits until its bytes may be reused.
    async fn write<S: Source>(
        &mut self,
        (length, checksum): (u64, Option<u64>),
        bytes: Option<C::Bytes>,
        (which, destination): (usize, Option<Destination>),
        taken: &mut TakenValue<S>,
    ) {
        let (connection, index) = (self.connection.clone(), self.index);
        let mut bytes = bytes.filter(|_| length > 0);
        let slot = destination.and_then(|destination| destination.result);
        let validation = connection.agreed().validation;
        let result = checksum.filter(|_| slot.is_some()).map(|sum| encode_result(validation, length, sum));
        if let Some(unstaged) = bytes.take() {
            let staged = self.unless_cancelled(pin!(connection.channel().stage(unstaged))).await;
            match staged {
                Ok(Ok(staged)) => bytes = Some(staged),
                Ok(Err(status)) => return self.refuse(status).await,
                Err(Ended) => return,
            }
        }
        let Ok(ahead) = self.write_ahead(bytes.as_ref(), destination).await else { return };
        let destination = destination.map(|destination| (destination, ahead));
        let channel = connection.channel();
        let immediate = Some(index.immediate(which));
        self.post(length, taken, || channel.write_content(bytes.take(), destination, immediate, result))
            .await;
    }

    /// Has `write` post the content, of `length` bytes, when it is its turn, and waits until its bytes may be reused.
    async fn post<S: Source>(
        &mut self,
        length: u64,
        taken: &mut TakenValue<S>,
        mut write: impl FnMut() -> C::Write,
    ) {
        let (connection, index) = (&self.connection, self.index);
        let posted = content_turn(&**connection, |state| {
            state.responses.start_writing(index).then(|| {
                state.count_content(index);
                state.line.counters.count_content_sent(length);
                let write = write();
                if !C::is_written(&write) {
                    return Some(write);
                }
                state.end_content(index);
                None
            })
        });
        let posted = self.unless_cancelled(pin!(posted)).await;
        match posted {
            Ok(Ok(Some(Some(write)))) => self.finish(write, taken).await,
            Ok(Ok(Some(None))) => {
                self.is_closed = true;
                taken.dispose();
            }
            Ok(Ok(None) | Err(_)) | Err(Ended) => {}
        }
    }

    /// Writes a part of a long content before its turn comes, and returns its length. If the peer cancels meanwhile, the acknowledgement is
    /// posted after that part, so it reaches the peer when that has landed.
    async fn write_ahead(
        &self,
        bytes: Option<&C::Bytes>,
        destination: Option<Destination>,
    ) -> Result<u64, Ended> {
        let Some((bytes, destination)) = bytes.zip(destination) else { return Ok(0) };
        let write = |piece| self.connection.channel().write_ahead(bytes, destination, piece);
        self.posted_ahead(length_of(Some(bytes)), write).await.map(Option::unwrap_or_default)
    }

    /// Waits until the posted content is written.
    async fn finish<S: Source>(&mut self, write: C::Write, taken: &mut TakenValue<S>) {
        let (connection, index) = (self.connection.clone(), self.index);
        if tensorwire_testpoints::planted!("a cancel is acknowledged before the write is done") {
            let written = self.unless_cancelled(pin!(write)).await;
            if let Ok(Ok(())) = written {
                taken.dispose();
                connection.change(|state, _| state.end_content(index));
            }
            return;
        }
        // From here on the value belongs to the peer; its memory is held until the bytes are written.
        taken.source = None;
        let result = self.unless_over(pin!(write)).await;
        taken.dispose();
        match result {
            Ok(Ok(())) => {
                connection.change(|state, _| state.end_content(index));
                self.is_closed = true;
            }
            Ok(Err(error)) => connection.fail(&error.0),
            Err(Ended) => {}
        }
    }

    /// Polls `future` until the peer cancels or the connection is over. The caller pins it, because a future that is passed by
    /// value is stored twice.
    async fn unless_cancelled<F: Future>(&self, mut future: Pin<&mut F>) -> Result<F::Output, Ended> {
        poll_fn(|context| {
            // If the future is ready, no waker is stored: the caller checks the state again under the lock under which it posts.
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            match self.watch(context.waker()) {
                Ok(ResponseState::Cancelled) | Err(Ended) => Poll::Ready(Err(Ended)),
                Ok(_) => Poll::Pending,
            }
        })
        .await
    }

    /// Polls `future` until the connection is over: a posted write cannot be cancelled.
    async fn unless_over<F: Future>(&self, mut future: Pin<&mut F>) -> Result<F::Output, Ended> {
        poll_fn(|context| {
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            match self.watch(context.waker()) {
                Err(Ended) => Poll::Ready(Err(Ended)),
                Ok(_) => Poll::Pending,
            }
        })
        .await
    }

    /// The state of the response, unless the connection is over. `waker` is woken when the state changes.
    fn watch(&self, waker: &Waker) -> Result<ResponseState, Ended> {
        let mut state = self.connection.lock();
        let is_over = state.failure().is_err();
        let (response, replaced) = state.responses.watch(self.index, waker);
        drop(state);
        drop(replaced);
        if is_over { Err(Ended) } else { Ok(response) }
    }
}

impl<C: Channel> Drop for Response<C> {
    fn drop(&mut self) {
        if self.is_closed {
            return;
        }
        self.connection.change(|state, after| after.drop(state.responses.close(self.index, false)));
    }
}

/// A value that goes back to its source unless it is written.
struct TakenValue<S: Source> {
    /// `None` once the value belongs to the peer.
    source: Option<Arc<S>>,
    taken: Option<S::Taken>,
}

impl<S: Source> TakenValue<S> {
    fn new(source: Arc<S>, taken: S::Taken) -> Self {
        Self { source: Some(source), taken: Some(taken) }
    }

    fn value(&self) -> Option<(Metadata, Option<S::Bytes>)>
    where
        S::Bytes: Clone,
    {
        self.taken.as_ref().map(|taken| (S::metadata(taken).clone(), S::bytes(taken).cloned()))
    }

    fn pages(&self) -> Option<Vec<(S::Bytes, u64)>> {
        self.taken.as_ref().and_then(S::pages)
    }

    fn checksums(&self) -> Option<Arc<Checksums>> {
        self.taken.as_ref().and_then(S::checksums)
    }

    fn version(&self) -> u64 {
        self.taken.as_ref().map_or(0, S::version)
    }

    /// Drops the value, which will not go back.
    fn dispose(&mut self) {
        self.source = None;
        self.taken = None;
    }

    fn put_back(&mut self) {
        if let (Some(source), Some(taken)) = (&self.source, self.taken.take()) {
            source.put_back(taken);
        }
    }
}

impl<S: Source> Drop for TakenValue<S> {
    fn drop(&mut self) {
        self.put_back();
    }
}

/// The bytes of a content.
fn length_of<B: AsRef<[u8]>>(bytes: Option<&B>) -> u64 {
    bytes.map_or(0, |bytes| bytes.as_ref().len() as u64)
}

/// Checks whether a value can be sent. If not, returns the status for the requester.
fn check_value(metadata: &Metadata, has_bytes: bool) -> Result<(), Status> {
    if let Err(error) = wire::check_metadata(metadata) {
        return Err(Status::new(Code::Internal, format!("the sender's value cannot travel: {error}")));
    }
    if metadata.byte_length > 0 && !has_bytes {
        return Err(Status::new(Code::Internal, "the sender's value has no bytes"));
    }
    Ok(())
}
