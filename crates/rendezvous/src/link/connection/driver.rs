//! The one task of a data connection, and what others may do in its place.
//!
//! `docs/src/connection.md` says what it does in a poll, in which order, and where its wake-ups come from.

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

/// Arrivals that are handed on in one go, before other tasks have their turn.
const ARRIVALS_PER_GO: usize = 64;

/// Goes at arrivals in one poll of the task.
const GOES_PER_POLL: usize = 4;

type Work = BoxFuture<'static, ()>;

/// What the task and those who help it share.
pub(crate) struct Pump {
    /// Held while arrivals are handed on, so that they are handed on in order; only ever tried. Why the connection is
    /// over, once the peer has broken the protocol.
    over: Mutex<Option<Lost>>,
    /// That is known.
    is_over: AtomicBool,
    /// The task found the lock taken and wants to be woken when it is free.
    is_contended: AtomicBool,
    /// Futures for the task to run; `None` once it runs none any more.
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

/// What a go at the arrivals came to.
enum Go {
    /// There were no more.
    Done,
    /// There may be more.
    More,
    /// The peer broke the protocol.
    Over(Lost),
}

impl Pump {
    /// Has the task run `work` to its end; gives it back if the task runs nothing any more.
    pub(crate) fn run(&self, work: Work) -> Result<(), Work> {
        self.add(work)?;
        self.task.wake();
        Ok(())
    }

    /// As [`run`](Self::run), from inside the pump: who holds that sees to it that the task is polled.
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
    /// Looks for what a task waits for, in that task, if the fabric finds that this pays now, and does what there is to
    /// do. Whether there was anything. Never waits for a lock that is held for long.
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

    /// Hands arrivals on, for a while. `None` if another thread is at it.
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
        // Pairs with the fence in `pump_or_be_woken`: who found the lock taken meanwhile relies on us.
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

    /// As [`pump`](Self::pump), for the task: after `None`, whoever is at it wakes the task.
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

    /// Hands one arrival to the protocol, and answers the requests in it.
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

    /// Answers `request` here if its value is there and may be sent; else the task goes on with the answer.
    fn respond(&self, request: TensorRequest) {
        let step = request.scope.step().map(|step| step.0);
        let span = send_span(&self.values.peer, &request.key, step, self.kind);
        let response = self.protocol.respond(request, &self.values).instrument(span);
        // A device's code may panic, which ends that answer alone.
        let mut response: Work = Box::pin(AssertUnwindSafe(response).catch_unwind().map(drop));
        let is_later = tensorwire_testpoints::chance!("the first poll of an answer is left to the task");
        // Nobody needs to be woken for this poll: the task polls again, and leaves its waker.
        let mut nobody = Context::from_waker(Waker::noop());
        if is_later || response.as_mut().poll(&mut nobody).is_pending() {
            // After the end nothing is answered any more.
            drop(self.pump.add(response));
        }
    }
}

/// Runs until the connection is over, everything has gone back, and nobody views memory that was lent over it.
pub(crate) struct Driver {
    /// `None` once it has nothing to do any more but what the fabric has.
    connection: Option<Arc<DataConnection>>,
    /// Arrivals are taken.
    is_open: bool,
    fabric: Fuse<Work>,
    /// Answers that wait, messages that are owed, and in the end the end.
    work: FuturesUnordered<Work>,
    runtime: Arc<dyn Runtime>,
}

impl Driver {
    pub(crate) fn new(connection: Arc<DataConnection>, fabric: Work, runtime: Arc<dyn Runtime>) -> Self {
        let work = FuturesUnordered::new();
        work.push(connection.clone().keep_house().boxed());
        Self { connection: Some(connection), is_open: true, fabric: fabric.fuse(), work, runtime }
    }

    /// Runs what can go on.
    fn work(&mut self, context: &mut Context<'_>) {
        if let Some(connection) = self.connection.as_ref().filter(|connection| connection.pump.has_work()) {
            self.work.extend(connection.pump.take_work());
        }
        while let Poll::Ready(Some(())) = self.work.poll_next_unpin(context) {}
    }

    /// Takes arrivals and does what comes of them, until there are none and the fabric will wake this task for the next,
    /// or others are to have their turn.
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

    /// No arrival is taken any more.
    fn end(&mut self, end: impl Future<Output = ()> + Send + 'static) {
        self.is_open = false;
        self.work.push(end.boxed());
    }

    /// Lets go of the connection when nothing is left to run for it.
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
        // Before the fabric: it may look for more for a while.
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
        // These may hold the connection, which holds them.
        let waiting = self.connection.as_ref().and_then(|connection| connection.pump.lock_work().take());
        drop(waiting);
    }
}
