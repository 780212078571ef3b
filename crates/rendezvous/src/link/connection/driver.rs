//! The driver of a data connection: its only task, and the parts of its work that other tasks may do.
//!
//! `docs/src/connection.md` describes a poll of the task, and the sources of its wake-ups.

use std::{
    future::Future,
    mem,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering, fence},
    },
    task::{Context, Poll, Waker},
};

use futures::{
    FutureExt, StreamExt,
    future::{Fuse, FusedFuture},
    stream::FuturesUnordered,
    task::AtomicWaker,
};
use tensorwire_protocol::TensorRequest;
use tensorwire_testpoints::sync::Mutex;
use tensorwire_verbs_reactor::{Arrival, BoxFuture, Runtime};
use tracing::Instrument as _;

use crate::{
    error::Lost,
    link::{connection::DataConnection, loan::Lent, meter::send_span},
};

/// Maximum number of arrivals that are processed before the lock is released.
const ARRIVALS_PER_GO: usize = 64;

/// How many times one poll of the task processes arrivals before it yields.
const GOES_PER_POLL: usize = 4;

type Work = BoxFuture<'static, ()>;

/// The state that the connection's task shares with tasks that help it.
pub(crate) struct Pump {
    /// Locked while arrivals are processed, so that they are processed in order. Only `try_lock` is used. Contains the
    /// reason once the peer has broken the protocol.
    over: Mutex<Option<Lost>>,
    /// That is known.
    is_over: AtomicBool,
    /// The task found `over` locked, and must be woken when it is unlocked.
    is_contended: AtomicBool,
    /// Futures for the task to run; `None` once the task runs no more.
    work: Mutex<Option<Vec<Work>>>,
    /// There are some in `work`.
    has_work: AtomicBool,
    task: AtomicWaker,
}

impl std::fmt::Debug for Pump {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pump").field("over", &self.over).finish_non_exhaustive()
    }
}

impl Default for Pump {
    fn default() -> Self {
        let work = Mutex::new(Some(Vec::new()));
        Self {
            over: Mutex::default(),
            is_over: AtomicBool::new(false),
            is_contended: AtomicBool::new(false),
            work,
            has_work: AtomicBool::new(false),
            task: AtomicWaker::new(),
        }
    }
}

/// The result of processing arrivals.
enum Go {
    /// All arrivals were processed.
    Done,
    /// There may be more.
    More,
    /// The peer broke the protocol.
    Over(Lost),
}

impl Pump {
    /// Lets the task run `work`. Returns it as the error if the task runs no more futures.
    pub(crate) fn run(&self, work: Work) -> Result<(), Work> {
        self.add(work)?;
        self.task.wake();
        Ok(())
    }

    /// As [`run`](Self::run), called while `over` is locked. The owner of the lock makes sure that the task is polled.
    fn add(&self, work: Work) -> Result<(), Work> {
        match &mut *self.lock_work() {
            Some(waiting) => waiting.push(work),
            None => return Err(work),
        }
        self.has_work.store(true, Ordering::Release);
        Ok(())
    }

    fn has_work(&self) -> bool {
        self.has_work.load(Ordering::Acquire)
    }

    /// Takes the futures for the task to run.
    fn take_work(&self) -> Vec<Work> {
        let mut work = self.lock_work();
        self.has_work.store(false, Ordering::Relaxed);
        work.as_mut().map(mem::take).unwrap_or_default()
    }

    fn lock_work(&self) -> MutexGuard<'_, Option<Vec<Work>>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DataConnection {
    /// Polls the fabric and processes arrivals in the calling task, which waits for a reply, if the fabric considers
    /// this worthwhile now. Returns whether there was anything to do. Never waits for a lock that is held for long.
    pub(crate) fn help(&self) -> bool {
        // In a simulated world nothing has to be found.
        let is_chosen = !self.queue_pair.may_help();
        let has_found = is_chosen || self.queue_pair.help();
        if has_found && !tensorwire_testpoints::chance!("help declines") {
            let is_left = !matches!(self.pump(), Some(Go::Done));
            if is_left || self.pump.has_work() {
                self.pump.task.wake();
            }
        }
        has_found && !is_chosen
    }

    /// Processes arrivals, up to a limit. `None` if another thread is processing them.
    fn pump(&self) -> Option<Go> {
        if tensorwire_testpoints::chance!("the pump is taken") {
            self.pump.task.wake();
            return None;
        }
        let go = {
            let mut over = match self.pump.over.try_lock() {
                Ok(over) => over,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            self.take_arrivals(&mut over)
        };
        // Pairs with the fence in `pump_or_be_woken`. If the task found the lock taken in the meantime, it relies on
        // this wake-up.
        fence(Ordering::SeqCst);
        if self.pump.is_contended.load(Ordering::Relaxed) {
            self.pump.is_contended.store(false, Ordering::Relaxed);
            self.pump.task.wake();
        }
        Some(go)
    }

    /// Whether [`pump`](Self::pump) may find anything.
    fn may_pump(&self) -> bool {
        self.queue_pair.has_arrivals() || self.pump.is_over.load(Ordering::Acquire)
    }

    /// As [`pump`](Self::pump), for the connection's task: after `None`, the owner of the lock wakes the task.
    fn pump_or_be_woken(&self) -> Option<Go> {
        self.pump().or_else(|| {
            self.pump.is_contended.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            self.pump()
        })
    }

    fn take_arrivals(&self, over: &mut Option<Lost>) -> Go {
        if let Some(lost) = over {
            return Go::Over(lost.clone());
        }
        for _ in 0..ARRIVALS_PER_GO {
            let Some(arrival) = self.queue_pair.take_arrival() else { return Go::Done };
            if let Err(lost) = self.take(arrival) {
                *over = Some(lost.clone());
                self.pump.is_over.store(true, Ordering::Release);
                self.pump.task.wake();
                return Go::Over(lost);
            }
        }
        Go::More
    }

    /// Passes one arrival to the protocol, and answers the requests in it.
    fn take(&self, arrival: Arrival) -> Result<(), Lost> {
        let taken = match arrival {
            Arrival::Immediate { immediate, length } => self.protocol.on_immediate(immediate.0, length),
            Arrival::Loan { immediate, buffer } => {
                let length = buffer.len() as u64;
                self.protocol.on_loan(immediate.0, length, Lent::view(buffer)).map(|()| None)
            }
            other => {
                let detail = format!("an arrival of a kind this version does not know: {other:?}");
                return Err(Lost::misbehaved(detail));
            }
        };
        match taken {
            Ok(requests) => requests.into_iter().flatten().for_each(|request| self.respond(request)),
            Err(misbehaved) => {
                if let Some(left_out) = self.meter.log.line(&self.values.peer) {
                    let peer = &self.values.peer;
                    log!(WARN, %peer, %misbehaved, left_out, "closing the connection of a misbehaving peer");
                }
                return Err(Lost::misbehaved(format!("the peer broke the protocol: {misbehaved}")));
            }
        }
        Ok(())
    }

    /// Answers `request` here if its value is available and can be sent at once. Otherwise the task completes the
    /// answer.
    fn respond(&self, request: TensorRequest) {
        let step = request.scope.step().map(|step| step.0);
        let span = send_span(&self.values.peer, &request.key, step, self.kind);
        let response = self.protocol.respond(request, &self.values).instrument(span);
        // A panic in a device context's code ends only this answer.
        let mut response: Work = Box::pin(AssertUnwindSafe(response).catch_unwind().map(drop));
        let is_later = tensorwire_testpoints::chance!("the first poll of an answer is left to the task");
        // This poll needs no waker: if it is pending, the task polls again with its own.
        let mut nobody = Context::from_waker(Waker::noop());
        if is_later || response.as_mut().poll(&mut nobody).is_pending() {
            // After the end of the connection the answer is dropped.
            drop(self.pump.add(response));
        }
    }
}

/// The connection's task. Completes when the connection has ended, all memory is released, and no view of memory that
/// was lent over the connection exists.
pub(crate) struct Driver {
    /// `None` once only the fabric's driver is left to run.
    connection: Option<Arc<DataConnection>>,
    /// Whether arrivals are still processed.
    is_open: bool,
    fabric: Fuse<Work>,
    /// Pending answers, housekeeping, and at last the end of the connection.
    work: FuturesUnordered<Work>,
    runtime: Arc<dyn Runtime>,
}

impl Driver {
    pub(crate) fn new(connection: Arc<DataConnection>, fabric: Work, runtime: Arc<dyn Runtime>) -> Self {
        let work = FuturesUnordered::new();
        work.push(connection.clone().keep_house().boxed());
        Self { connection: Some(connection), is_open: true, fabric: fabric.fuse(), work, runtime }
    }

    /// Polls all futures that can make progress.
    fn work(&mut self, context: &mut Context<'_>) {
        if let Some(connection) = self.connection.as_ref().filter(|connection| connection.pump.has_work()) {
            self.work.extend(connection.pump.take_work());
        }
        while let Poll::Ready(Some(())) = self.work.poll_next_unpin(context) {}
    }

    /// Processes arrivals until there are none and the fabric will wake this task for the next one, or until the task
    /// must yield.
    fn take_arrivals(&mut self, context: &mut Context<'_>) {
        for _ in 0..GOES_PER_POLL {
            let Some(connection) = self.connection.clone().filter(|_| self.is_open) else { return };
            if connection.may_pump() && !self.pump(&connection, context) {
                return;
            }
            match connection.queue_pair.poll_arrivals(context) {
                Poll::Pending => return,
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(failure)) => {
                    // A helper may still be handing on the last ones.
                    if self.pump(&connection, context) {
                        self.end(connection.clone().end(Err(failure), self.runtime.clone()));
                        self.work(context);
                    }
                    return;
                }
            }
        }
        context.waker().wake_by_ref();
    }

    /// Hands on what there is, and does what comes of it. False if others are at it, or if no more is to be taken.
    fn pump(&mut self, connection: &Arc<DataConnection>, context: &mut Context<'_>) -> bool {
        let go = connection.pump_or_be_woken();
        let is_mine = go.is_some();
        if let Some(Go::Over(lost)) = go {
            self.end(connection.clone().end(Ok(lost), self.runtime.clone()));
        }
        self.work(context);
        is_mine && self.is_open
    }

    /// Stops processing arrivals, and runs `end`.
    fn end(&mut self, end: impl Future<Output = ()> + Send + 'static) {
        self.is_open = false;
        self.work.push(end.boxed());
    }

    /// Drops the reference to the connection when nothing is left to run for it.
    fn let_go(&mut self) {
        let Some(connection) = &self.connection else { return };
        if self.is_open || !self.work.is_empty() {
            return;
        }
        let mut waiting = connection.pump.lock_work();
        if waiting.as_ref().is_none_or(Vec::is_empty) {
            *waiting = None;
            drop(waiting);
            self.connection = None;
        }
    }
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(connection) = &self.connection {
            connection.pump.task.register(context.waker());
        }
        // Before the fabric's driver, which may poll for a while.
        self.work(context);
        if !self.fabric.is_terminated() {
            let _over = self.fabric.poll_unpin(context);
        }
        self.take_arrivals(context);
        self.let_go();
        if self.connection.is_none() && self.fabric.is_terminated() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Breaks the cycle: the futures may hold the connection, which holds them.
        let waiting = self.connection.as_ref().and_then(|connection| connection.pump.lock_work().take());
        drop(waiting);
    }
}
