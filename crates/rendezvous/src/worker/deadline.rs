//! Operations with a deadline.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tensorwire_fabric::BoxFuture;

use crate::{
    connection::DataConnection,
    error::WorkerError,
    worker::{Worker, metrics::Timed},
};

/// An operation with a deadline. It is pinned by the caller, because passing a future by value would embed a copy of it
/// in each calling future. A future type and not an `async fn`, for the same reason: thousands may be under way.
pub(crate) struct Within<'a, Operation: ?Sized, What> {
    worker: &'a Worker,
    limit: Duration,
    /// Describes it in the error of a passed deadline.
    what: What,
    hint: &'static str,
    operation: Pin<&'a mut Operation>,
    /// The metric and the time of its start, if a recorder is installed.
    recorded: Option<(Timed, Duration)>,
    /// Made when the operation has to wait; most operations need no timer.
    timer: Option<BoxFuture<'static, ()>>,
}

impl Worker {
    /// Like [`within`](Self::within), but records the time of a successful operation.
    pub(crate) fn timed<'a, Operation: ?Sized, What>(
        &'a self,
        timed: Timed,
        limit: Duration,
        what: What,
        operation: Pin<&'a mut Operation>,
    ) -> Within<'a, Operation, What> {
        let begun = self.operations.times.begin(&**self.node.runtime());
        let recorded = begun.map(|begun| (timed, begun));
        let hint = match timed {
            Timed::Fetch | Timed::FetchMany => "does the peer run, and does it publish this name?",
            Timed::Pages => "does the peer run, and does its program read its notes?",
            Timed::Call => "does the peer run, and does its handler answer in time?",
            Timed::Recv | Timed::RecvMany => "is the sender running, and does it send this key?",
        };
        Within { recorded, ..self.within(limit, what, hint, operation) }
    }

    /// Awaits `operation` for at most `limit`. `hint` names what the user should check if it is late.
    pub(crate) fn within<'a, Operation: ?Sized, What>(
        &'a self,
        limit: Duration,
        what: What,
        hint: &'static str,
        operation: Pin<&'a mut Operation>,
    ) -> Within<'a, Operation, What> {
        Within { worker: self, limit, what, hint, operation, recorded: None, timer: None }
    }

    /// The error of a passed deadline. Names each data connection that has stalled, because that may be the cause.
    fn late(&self, what: String, limit: Duration, hint: &'static str) -> WorkerError {
        let stalls = self.node.all_peers().into_iter().filter_map(|peer| peer.find(DataConnection::stall));
        let what = stalls.fold(what, |what, stall| format!("{what} ({stall})"));
        WorkerError::DeadlineExceeded { what, limit, hint }
    }
}

impl<Operation, What, Value> Future for Within<'_, Operation, What>
where
    Operation: Future<Output = Result<Value, WorkerError>> + ?Sized,
    What: Fn() -> String + Unpin,
{
    type Output = Result<Value, WorkerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let (times, runtime) = (&this.worker.operations.times, &**this.worker.node.runtime());
        // An operation that has a timer was under way before the shutdown.
        if this.timer.is_none() && this.worker.is_refusing() {
            return Poll::Ready(Err(WorkerError::ShutDown));
        }
        if let Poll::Ready(ended) = this.operation.as_mut().poll(context) {
            if let (Ok(_), Some((timed, begun))) = (&ended, this.recorded) {
                times.end(timed, Some(begun), runtime);
            }
            return Poll::Ready(ended);
        }
        let timer = this.timer.get_or_insert_with(|| runtime.sleep(this.limit));
        let late = || this.worker.late((this.what)(), this.limit, this.hint);
        timer.as_mut().poll(context).map(|()| Err(late()))
    }
}
