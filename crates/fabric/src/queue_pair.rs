//! The user's half of a connected queue pair.

mod boards;
mod reads;

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use tensorwire_memory::{Buf, BufMut};

use crate::{
    Arrival, ArrivalSink, Capabilities, Effort, FabricError, FabricKind, Immediate, Link, Look,
    OfferedCatalogue, QueuePairConfig, QueuePairCore, QueuePairStats, ReadDestination, ReadSegment, RegionId,
    RemoteRange, RemoteRegion, Segment, SharedMemory, SlotKey, Together, WorkRequest,
    link::peer_is_here,
    slot::{LinePosition, Reserve},
};

pub use reads::{ReadOperation, VectoredReadOperation};

/// A connected queue pair. Cheap to clone; all clones share one connection.
///
/// Dropping the last clone begins to close it and does not wait; [`close`](Self::close) waits.
#[derive(Debug, Clone)]
pub struct QueuePair {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    core: Arc<QueuePairCore>,
    link: Arc<dyn Link>,
    closing: AtomicBool,
}

impl Shared {
    fn start_close(&self) {
        if !self.closing.swap(true, Ordering::AcqRel) {
            self.core.fail_arrivals(&FabricError::Closed);
            self.link.start_close();
        }
    }
}

impl Shared {
    /// Checks that `request` can ever be posted. Returns how many work requests it takes.
    fn check(&self, request: &WorkRequest) -> Result<u64, FabricError> {
        let capabilities = self.core.capabilities();
        if !capabilities.allow(request) {
            return Err(request.unsupported(self.core.kind()));
        }
        match request {
            WorkRequest::WriteVectored { segments, .. } => self.core.remote_regions().aim_all(segments)?,
            WorkRequest::ReadVectored { segments } => self.core.remote_regions().aim_all_reads(segments)?,
            WorkRequest::Write { .. } | WorkRequest::Lend { .. } | WorkRequest::Read { .. } => {}
        }
        Ok(request.weight(capabilities.piece_bytes_max))
    }

    /// Makes progress on behalf of a task that waits. Returns whether queued arrivals went to the sink.
    fn drive(&self) -> bool {
        self.link.progress(Effort::BeforeSleep);
        self.core.hand_on()
    }

    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        self.core.help().asks();
        self.link.submit(key, request);
    }

    fn help(&self, look: impl FnMut() -> Look) -> bool {
        self.core.help().find(|| peer_is_here(&*self.link), look)
    }

    /// Submits queued posts for which there is room.
    fn submit_line(&self) {
        let slots = self.core.slots();
        if slots.waiting() == 0 {
            return;
        }
        while let Some((key, request)) = slots.next_in_line() {
            self.submit(key, &request);
            slots.submitted();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.start_close();
    }
}

impl QueuePair {
    /// Joins the two halves. For fabrics.
    pub fn new(core: Arc<QueuePairCore>, link: Arc<dyn Link>) -> Self {
        Self { shared: Arc::new(Shared { core, link, closing: AtomicBool::new(false) }) }
    }

    /// The kind of the fabric.
    pub fn kind(&self) -> FabricKind {
        self.shared.core.kind()
    }

    /// The depths.
    pub fn config(&self) -> QueuePairConfig {
        self.shared.core.config()
    }

    /// The fabric's counters.
    pub fn stats(&self) -> QueuePairStats {
        self.shared.link.stats(self.shared.core.stats())
    }

    /// The failure that ended the connection, if it is over.
    pub fn failure(&self) -> Option<FabricError> {
        self.shared.core.failure()
    }

    /// Whether the connection is over.
    pub fn has_failed(&self) -> bool {
        self.shared.core.has_failed()
    }

    /// Writes `local` to `remote` without a notification at the peer. If the send queue has room and no earlier
    /// operation waits for room, this posts in the order of calls: at once, or, where posting several together costs
    /// less, no later than when an outstanding operation completes or a task awaits this queue pair, or when the last
    /// [`together`](Self::together) ends. Otherwise the operation waits for room from its first poll on. Operations get room in the order in which they began to wait.
    /// One that waits and is not polled any more blocks those behind it until it is dropped.
    ///
    /// # Errors
    /// Every [`FabricError`]. The local bytes may be reused after any of them.
    ///
    /// # Cancel safety
    /// Dropping the future discards the result. A posted write continues and keeps its bytes alive. A write that
    /// still waits for a slot is never posted.
    pub fn write(&self, local: Buf, remote: RemoteRange) -> Operation {
        self.start(WorkRequest::Write { local, remote: Some(remote), immediate: None })
    }

    /// Writes `local` to `remote`. The peer gets `immediate` after the last byte has landed.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Cancel safety
    /// As [`write`](Self::write).
    pub fn write_imm(&self, local: Buf, remote: RemoteRange, immediate: Immediate) -> Operation {
        self.start(WorkRequest::Write { local, remote: Some(remote), immediate: Some(immediate) })
    }

    /// Writes every segment's bytes to its range, as one logical write: one completion, and one notification if
    /// `immediate` is given. See [`paged`](crate::paged) for pages of one buffer.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`FabricError::TooManyPieces`] if the send queue could never hold it,
    /// [`FabricError::Unsupported`] where [`Capabilities::vectored`] is false.
    ///
    /// # Cancel safety
    /// As [`write`](Self::write).
    pub fn write_vectored(
        &self,
        segments: impl Into<Arc<[Segment]>>,
        immediate: Option<Immediate>,
    ) -> Operation {
        self.start(WorkRequest::WriteVectored { segments: segments.into(), immediate })
    }

    /// Gives the peer a view of `local`, and of the buffers [attached](tensorwire_memory::BufMut::freeze_with) to it, without a copy
    /// ([`Arrival::Loan`]). Completes when the peer has the view. The
    /// bytes stay alive and unchanged until the peer's lease ends.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`FabricError::LeasesExhausted`] when the peer's process has as many loans as it
    /// may, [`FabricError::Unsupported`] where [`Capabilities::lend`] is false.
    ///
    /// # Cancel safety
    /// As [`write`](Self::write).
    pub fn lend(&self, local: Buf, immediate: Immediate) -> Operation {
        self.start(WorkRequest::Lend { local, immediate })
    }

    /// Like [`lend`](Self::lend), posted now or not at all. If the fabric refuses it, this returns the error, and the
    /// peer gets nothing.
    ///
    /// # Errors
    /// [`FabricError::SendQueueFull`], [`FabricError::Busy`], and those of [`lend`](Self::lend).
    pub fn lend_now(&self, local: Buf, immediate: Immediate) -> Result<Operation, FabricError> {
        let mut operation = self.post_now(&WorkRequest::Lend { local, immediate })?;
        if let State::Posted(key) = &operation.state {
            self.shared.link.withdraw(*key);
        }
        match operation.take_refusal() {
            Some(refusal) => Err(refusal),
            None => Ok(operation),
        }
    }

    /// Reads `remote`, which the peer has [exposed](tensorwire_memory::Buf::expose) in a region with
    /// [`Access::remote_read`](crate::Access::remote_read), into `into`, and returns it. The peer gets no
    /// notification.
    ///
    /// The read sees at least what the peer's memory contained when the read was posted. Whether it sees writes that
    /// are posted after it and before its completion is undefined.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`FabricError::Unsupported`] where [`Capabilities::read`] is false. After an error
    /// `into` has returned to its pool.
    ///
    /// # Cancel safety
    /// As [`write`](Self::write): a posted read owns its destination until it completes.
    pub fn read(&self, remote: RemoteRange, into: BufMut) -> ReadOperation {
        let into = ReadDestination::new(into);
        let operation = self.start(WorkRequest::Read { remote, into: into.clone() });
        ReadOperation::new(operation, into, self.kind())
    }

    /// Reads each range of the peer's memory into the buffer beside it, as one operation with one completion, and
    /// returns the buffers in the same order. The ranges may lie in several regions, overlap and be empty. Adjacent
    /// ranges become one request with a scatter list where the fabric supports that: see
    /// [`scattered`](crate::scattered) for one range into many buffers.
    ///
    /// If this side finds a segment invalid, the operation fails and nothing is posted. Each segment counts in the
    /// send queue as a separate [`read`](Self::read).
    ///
    /// # Errors
    /// As [`read`](Self::read); [`FabricError::TooManyPieces`] if the send queue could never hold it,
    /// [`FabricError::Unsupported`] where [`Capabilities::read`] is false. After an error all buffers have returned
    /// to their pools; their contents are undefined.
    ///
    /// # Cancel safety
    /// As [`read`](Self::read): a posted read owns all its buffers until it completes.
    pub fn read_vectored(
        &self,
        segments: impl IntoIterator<Item = (RemoteRange, BufMut)>,
    ) -> VectoredReadOperation {
        let segment = |(remote, into)| ReadSegment { remote, into: ReadDestination::new(into) };
        let segments: Arc<[ReadSegment]> = segments.into_iter().map(segment).collect();
        let operation = self.start(WorkRequest::ReadVectored { segments: segments.clone() });
        VectoredReadOperation::new(operation, segments, self.kind())
    }

    /// What the fabric can do.
    pub fn capabilities(&self) -> Capabilities {
        self.shared.core.capabilities()
    }

    /// Sends the peer `immediate`, which arrives after everything posted before has landed.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Cancel safety
    /// As [`write`](Self::write).
    pub fn notify(&self, immediate: Immediate) -> Operation {
        self.start(WorkRequest::Write { local: Buf::empty(), remote: None, immediate: Some(immediate) })
    }

    /// Posts `request` now or not at all. For callers that count their own operations.
    ///
    /// # Errors
    /// [`FabricError::SendQueueFull`], or the queue pair's failure.
    pub fn post_now(&self, request: &WorkRequest) -> Result<Operation, FabricError> {
        let weight = self.shared.check(request)?;
        match self.shared.core.slots().reserve(request, weight) {
            Reserve::Reserved(key) => {
                self.shared.submit(key, request);
                Ok(self.operation(State::Posted(key)))
            }
            Reserve::InLine(_) | Reserve::Full => {
                Err(FabricError::SendQueueFull { depth: self.config().send_depth })
            }
            Reserve::Failed(failure) => Err(failure),
        }
    }

    /// Posts `request` now, or when there is room for it, in the order of calls. The task that
    /// [drives](Self::poll_progress) this queue pair posts the waiting ones, and so does any task that awaits an
    /// operation of it. For callers that count their own operations.
    ///
    /// # Errors
    /// [`FabricError::SendQueueFull`] if as many requests wait as the send queue is deep, or the queue pair's
    /// failure.
    ///
    /// # Cancel safety
    /// Dropping the operation discards the result. The request is posted all the same.
    pub fn post(&self, request: &WorkRequest) -> Result<Operation, FabricError> {
        let core = &self.shared.core;
        let weight = self.shared.check(request)?;
        match core.slots().post(request, weight) {
            Reserve::Reserved(key) => {
                self.shared.submit(key, request);
                Ok(self.operation(State::Posted(key)))
            }
            Reserve::InLine(key) => {
                core.wake_consumer();
                Ok(self.operation(State::Posted(key)))
            }
            Reserve::Full => Err(FabricError::SendQueueFull { depth: self.config().send_depth }),
            Reserve::Failed(failure) => Err(failure),
        }
    }

    /// Writes `bytes` to `remote`, sends the peer `immediate`, or both. The operation is posted and complete when
    /// this returns. `None` if that is not possible now, because the fabric cannot copy this many bytes, or has no
    /// room; then nothing was posted. For callers that count their own operations.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[inline]
    pub fn post_inline(
        &self,
        bytes: &[u8],
        remote: Option<&RemoteRange>,
        immediate: Option<Immediate>,
    ) -> Option<Result<(), FabricError>> {
        let Shared { core, link, closing } = &*self.shared;
        if core.has_failed() || closing.load(Ordering::Acquire) || core.slots().waiting() > 0 {
            return None;
        }
        let posted = link.submit_inline(bytes, remote, immediate);
        if let Some(Ok(())) = posted {
            core.help().asks();
        }
        posted
    }

    /// Operations that are posted while the returned guard lives may be sent together when it is dropped. For a task
    /// that posts several operations and awaits none of them meanwhile.
    pub fn together(&self) -> Together<'_> {
        Together::new(&*self.shared.link)
    }

    /// The next arrival, in the peer's posting order. One consumer at a time.
    ///
    /// # Errors
    /// The connection's failure, after all earlier arrivals have been taken.
    ///
    /// # Cancel safety
    /// Cancel-safe: an arrival is taken only by the poll that returns it.
    pub fn next_arrival(&self) -> NextArrival<'_> {
        NextArrival { shared: &self.shared }
    }

    /// Passes arrivals to `sink` from now on, instead of to [`next_arrival`](Self::next_arrival). The task that finds
    /// an arrival calls the sink at once. The task that drives the queue pair calls
    /// [`poll_progress`](Self::poll_progress). A second call has no effect. A sink must not keep the queue pair
    /// alive.
    pub fn set_sink(&self, sink: Arc<dyn ArrivalSink>) {
        self.shared.core.set_sink(sink);
    }

    /// Makes progress on behalf of the task that drives a queue pair with a [sink](Self::set_sink). Ready when arrivals
    /// went to the sink, because more may follow. Also submits posts for which there is room now.
    ///
    /// # Errors
    /// The connection's failure, after the sink has taken all earlier arrivals.
    pub fn poll_progress(&self, context: &Context<'_>) -> Poll<Result<(), FabricError>> {
        let core = &self.shared.core;
        let before = core.arrived();
        // Also posts the requests that wait for the next call to the device.
        let has_handed_on = self.shared.drive();
        let polled = core.poll_inbound(context);
        // The waker is registered with the core before this check, so a post that is queued later wakes this task.
        if core.slots().waiting() > 0 {
            core.slots().leave_poster(context.waker());
            self.shared.submit_line();
        }
        match polled {
            Poll::Ready(Err(failure)) => Poll::Ready(Err(failure)),
            _ if has_handed_on || core.arrived() != before => Poll::Ready(Ok(())),
            // Another task passes on the queued arrivals.
            Poll::Ready(Ok(())) => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Whether [`help`](Self::help) may find anything now.
    pub fn may_help(&self) -> bool {
        self.shared.core.help().is_allowed()
    }

    /// Polls the fabric for a few microseconds and does the work it finds, if polling pays off now. Returns whether
    /// it found any. Arrivals go to the [sink](Self::set_sink).
    pub fn help(&self) -> bool {
        self.shared.core.hand_on() || self.shared.help(|| self.shared.link.progress(Effort::Poll))
    }

    /// Whether this fabric's tasks ever poll: not if it always sleeps at once.
    pub fn polls(&self) -> bool {
        self.shared.core.help().polls()
    }

    /// Polls the fabric once and does the work it finds, whether or not polling pays off now. Returns whether it found any.
    /// For a caller that lets other processes run between two polls.
    pub fn poll_once(&self) -> bool {
        let Shared { core, link, .. } = &*self.shared;
        core.hand_on() || matches!(link.progress(Effort::Poll), Look::Worked | Look::More)
    }

    /// Makes a region of the peer usable in writes.
    pub fn add_remote_region(&self, region: RemoteRegion) {
        self.shared.core.remote_regions().add(region);
    }

    /// The number of the peer's regions that are known. Each takes memory, so a caller that adds regions which a peer
    /// announces must enforce a limit.
    pub fn remote_region_count(&self) -> usize {
        self.shared.core.remote_regions().count()
    }

    /// Removes a region of the peer.
    pub fn remove_remote_region(&self, region: RegionId) {
        self.shared.core.remote_regions().remove(region);
    }

    /// Closes the connection and waits until every operation has ended and the peer cannot access local memory.
    /// Grants that were made through it may then end with
    /// [`GrantEnd::QueuePairDrained`](tensorwire_memory::GrantEnd::QueuePairDrained). Outstanding operations fail
    /// with [`FabricError::Closed`] unless they complete first.
    ///
    /// # Cancel safety
    /// Cancel-safe: the close continues, and another call waits for it.
    pub async fn close(&self) {
        self.shared.start_close();
        poll_fn(|context| {
            self.shared.drive();
            self.shared.core.poll_drained(context)
        })
        .await;
    }

    /// This side's catalogue, for use on this connection; `None` if the fabric has none.
    pub fn catalogue(&self) -> Option<OfferedCatalogue> {
        let link = &self.shared.link;
        let catalogue = link.shared_memory()?.catalogue()?;
        Some(OfferedCatalogue::new(catalogue, link.clone()))
    }

    /// The operations that only a fabric that maps memory between processes has: the peer's catalogue, boards, and
    /// blocked threads.
    pub fn shared_memory(&self) -> Option<&dyn SharedMemory> {
        self.shared.link.shared_memory()
    }

    fn start(&self, request: WorkRequest) -> Operation {
        let weight = match self.shared.check(&request) {
            Ok(weight) => weight,
            Err(error) => return self.operation(State::Failed(error)),
        };
        match self.shared.core.slots().reserve(&request, weight) {
            Reserve::Reserved(key) => {
                self.shared.submit(key, &request);
                self.operation(State::Posted(key))
            }
            Reserve::InLine(_) | Reserve::Full => {
                self.operation(State::Waiting { request, weight, position: LinePosition::default() })
            }
            Reserve::Failed(failure) => self.operation(State::Failed(failure)),
        }
    }

    fn operation(&self, state: State) -> Operation {
        Operation { shared: self.shared.clone(), state }
    }
}

/// A handle on the slot of an operation.
///
/// Dropping it discards the result and does not stop the operation.
#[derive(Debug)]
#[must_use = "a write that still waits for a slot is posted only when polled"]
pub struct Operation {
    shared: Arc<Shared>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// No slot was free, or earlier operations wait for one.
    Waiting { request: WorkRequest, weight: u64, position: LinePosition },
    /// The slot owns the buffers.
    Posted(SlotKey),
    /// The queue pair had failed before.
    Failed(FabricError),
    /// The result was returned.
    Finished,
}

impl Operation {
    /// Takes the error, if the operation has failed already.
    fn take_refusal(&mut self) -> Option<FabricError> {
        let State::Posted(key) = &self.state else { return None };
        let refusal = self.shared.core.slots().take_refusal(*key)?;
        self.state = State::Finished;
        Some(refusal)
    }

    /// Takes the result, if it is known already. Then there is no need to drive the link.
    fn take_done(&mut self) -> Option<Result<(), FabricError>> {
        let State::Posted(key) = &self.state else { return None };
        let result = self.shared.core.slots().take_done(*key)?;
        self.state = State::Finished;
        Some(result)
    }

    /// Posts a waiting request if a slot is free now.
    fn try_post(&mut self, context: &Context<'_>) -> Poll<()> {
        let State::Waiting { request, weight, position } = &mut self.state else { return Poll::Ready(()) };
        let slots = self.shared.core.slots();
        self.state = match slots.reserve_or_wait(request, *weight, position, context.waker()) {
            Reserve::Reserved(key) => {
                self.shared.submit(key, request);
                State::Posted(key)
            }
            Reserve::InLine(_) | Reserve::Full => return Poll::Pending,
            Reserve::Failed(failure) => State::Failed(failure),
        };
        Poll::Ready(())
    }
}

impl Future for Operation {
    type Output = Result<(), FabricError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(result) = self.take_done() {
            return Poll::Ready(result);
        }
        self.shared.drive();
        self.shared.submit_line();
        if self.try_post(context).is_pending() {
            return Poll::Pending;
        }
        let result = match &self.state {
            State::Posted(key) => match self.shared.core.slots().poll_done(*key, context) {
                Poll::Ready(result) => result,
                Poll::Pending => return Poll::Pending,
            },
            State::Failed(failure) => Err(failure.clone()),
            State::Waiting { .. } | State::Finished => Err(FabricError::Closed),
        };
        self.state = State::Finished;
        Poll::Ready(result)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let slots = self.shared.core.slots();
        match &mut self.state {
            State::Posted(key) => slots.ignore(*key),
            State::Waiting { position, .. } => slots.leave(position),
            State::Failed(_) | State::Finished => {}
        }
    }
}

/// The future of [`QueuePair::next_arrival`].
#[derive(Debug)]
pub struct NextArrival<'queue_pair> {
    shared: &'queue_pair Shared,
}

impl Future for NextArrival<'_> {
    type Output = Result<Arrival, FabricError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Shared { core, link, .. } = self.shared;
        // The queue is bounded, so the link is driven again after at most its depth of arrivals.
        if let Some(arrival) = core.take_arrival() {
            return Poll::Ready(Ok(arrival));
        }
        link.progress(Effort::BeforeSleep);
        // Before a waker is registered, so that an arrival that is found here wakes no task.
        if core.help().awaits_answer() {
            while !core.has_arrival() && self.shared.help(|| link.progress(Effort::Poll)) {}
        }
        core.poll_arrival(context)
    }
}
