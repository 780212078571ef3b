//! The driver of a data connection: its only task, and the sink of arrivals.
//!
//! `docs/src/connection.md` describes a poll of the task, and the sources of its wake-ups.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
};

use futures::{
    FutureExt,
    future::{Fuse, FusedFuture},
};
use tensorwire_fabric::{Arrival, ArrivalSink, BoxFuture, Runtime};
use tensorwire_protocol::{Responded, TensorRequest};
use tracing::Instrument as _;

use crate::{
    connection::{DataConnection, meter::send_span},
    error::Lost,
    peer_memory::lent::Lent,
};

/// How many times one poll of the task looks for arrivals before it yields.
const ROUNDS_PER_POLL: usize = 4;

/// What the task runs.
pub(crate) type Work = BoxFuture<'static, ()>;

/// The protocol as the queue pair's sink. The reference is weak, because the connection owns the queue pair.
#[derive(Debug)]
pub(crate) struct Arrivals(pub(crate) Weak<DataConnection>);

impl ArrivalSink for Arrivals {
    /// Called while the lock of the fabric's receiving side is held. The order of locks is: that one, the protocol's,
    /// that of the published tensors, those of posting.
    fn arrived(&self, arrival: Arrival) -> bool {
        let Some(connection) = self.0.upgrade().filter(|connection| connection.broken.get().is_none()) else {
            return false;
        };
        connection.take(arrival).unwrap_or_else(|lost| {
            let _first = connection.broken.set(lost);
            connection.entries.wake();
            false
        })
    }
}

impl DataConnection {
    /// Passes one arrival to the protocol, and answers the requests in it. Returns whether there were some, and all are
    /// answered.
    fn take(&self, arrival: Arrival) -> Result<bool, Lost> {
        let (mut requests, mut answered) = (0, 0);
        let taken = match arrival {
            Arrival::Immediate { immediate, length } => {
                let requested = |request| {
                    requests += 1;
                    answered += u32::from(self.respond(request));
                };
                self.protocol.on_immediate(immediate.0, length, requested)
            }
            Arrival::Loan { immediate, buffer } => {
                let length = buffer.len() as u64;
                self.protocol.on_loan(immediate.0, length, Lent::view(buffer))
            }
            other => {
                let detail = format!("an arrival of a kind this version does not know: {other:?}");
                return Err(Lost::misbehaved(detail));
            }
        };
        match taken {
            Ok(()) => Ok(requests > 0 && answered == requests),
            Err(misbehaved) => {
                if let Some(left_out) = self.meter.log.line(&self.values.peer) {
                    let peer = &self.values.peer;
                    log!(WARN, %peer, %misbehaved, left_out, "closing the connection of a misbehaving peer");
                }
                Err(Lost::misbehaved(format!("the peer broke the protocol: {misbehaved}")))
            }
        }
    }

    /// Answers `request` here as far as that needs no waiting. What waits becomes an entry of the task. Returns whether the request
    /// is answered.
    fn respond(&self, request: TensorRequest) -> bool {
        let step = request.scope.step().map(|step| step.0);
        let span = send_span(&self.values.peer, &request.key, step, self.kind);
        let responding = || span.in_scope(|| self.protocol.respond(request, &self.values));
        // A panic in the code of a user's memory fails this answer only.
        let responded = catch_unwind(AssertUnwindSafe(responding)).unwrap_or(Responded::Sent);
        let Responded::Waiting(answer) = responded else { return true };
        let answering = AssertUnwindSafe(answer.run().instrument(span));
        let entry: Work = Box::pin(answering.catch_unwind().map(drop));
        // If the connection has ended, the answer is dropped.
        if tensorwire_testpoints::chance!("the first poll of an answer is left to the connection's task") {
            drop(self.entries.add_unpolled(entry));
            return false;
        }
        self.entries.add(entry).unwrap_or(false)
    }
}

/// The connection's task. Completes when the connection has ended, all memory is released, and the peer has dropped
/// all views of memory of this side.
pub(crate) struct Driver {
    /// `None` once only the fabric's driver still runs.
    connection: Option<Arc<DataConnection>>,
    /// False once the connection has begun to end.
    is_open: bool,
    fabric: Fuse<Work>,
    /// Wakes this task for what it polls itself, as its entries do: not during a poll.
    rings: Waker,
    runtime: Arc<dyn Runtime>,
}

impl Driver {
    pub(crate) fn new(connection: Arc<DataConnection>, fabric: Work, runtime: Arc<dyn Runtime>) -> Self {
        let rings = connection.entries.waker();
        add(&connection, connection.clone().keep_house().boxed());
        Self { connection: Some(connection), is_open: true, fabric: fabric.fuse(), rings, runtime }
    }

    /// Polls the entries that were woken. What they post leaves together.
    fn work(&self) {
        let Some(connection) = &self.connection else { return };
        // What was woken until now is polled here, so it need not wake the task.
        connection.entries.begin_poll();
        let _together = connection.queue_pair.together();
        connection.entries.poll_woken();
    }

    /// Polls woken entries and for arrivals, until there are none and the fabric will wake this task for the next
    /// one, or until the task must yield.
    fn make_progress(&mut self, context: &mut Context<'_>) {
        for _ in 0..ROUNDS_PER_POLL {
            self.work();
            let Some(connection) = self.connection.clone().filter(|_| self.is_open) else { return };
            if let Some(lost) = connection.broken.get().cloned() {
                self.end(connection.end(Ok(lost), self.runtime.clone()));
                continue;
            }
            match connection.queue_pair.poll_progress(&Context::from_waker(&self.rings)) {
                Poll::Ready(Err(failure)) => self.end(connection.end(Err(failure), self.runtime.clone())),
                // As if it had rung after this look: then the end of the poll wakes the task.
                _ if connection.entries.has_more()
                    && tensorwire_testpoints::chance!(
                        "what rings during a poll is left to the end of the poll"
                    ) =>
                {
                    return;
                }
                Poll::Pending if connection.entries.has_more() => {}
                Poll::Pending => return,
                Poll::Ready(Ok(())) => {}
            }
        }
        context.waker().wake_by_ref();
    }

    /// Runs `end` as the closing of the connection.
    fn end(&mut self, end: impl Future<Output = ()> + Send + 'static) {
        self.is_open = false;
        if let Some(connection) = &self.connection {
            add(connection, end.boxed());
        }
    }

    /// Drops the reference to the connection when nothing is left to run for it.
    fn let_go(&mut self) {
        if !self.is_open {
            self.connection.take_if(|connection| connection.entries.close_if_empty());
        }
    }

    /// From now on a woken entry and a failure of the connection wake the task.
    fn arm(&self, context: &Context<'_>) {
        let Some(connection) = &self.connection else { return };
        let is_lost = tensorwire_testpoints::planted!("work that is queued during a poll wakes no task")
            && connection.entries.has_woken();
        if connection.entries.end_poll(context.waker()) && !is_lost {
            context.waker().wake_by_ref();
        }
    }
}

/// Adds an entry of the task, which has not ended.
fn add(connection: &DataConnection, work: Work) {
    drop(connection.entries.add_unpolled(work));
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // Before the fabric's driver, which may poll for a while.
        self.work();
        if !self.fabric.is_terminated() {
            let _over = self.fabric.poll_unpin(context);
        }
        self.make_progress(context);
        self.let_go();
        self.arm(context);
        if self.connection.is_none() && self.fabric.is_terminated() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Breaks a reference cycle: the entries may hold the connection, which holds them.
        let left = self.connection.as_ref().map(|connection| connection.entries.close());
        drop(left);
    }
}

#[cfg(test)]
mod tests;
