//! Calls of a peer's handler.

use std::{future::IntoFuture, pin::pin, sync::Arc, time::Duration};

use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::Status;
use tracing::{Instrument as _, Span};

use super::IntoTensors;
use crate::{
    error::{Transfer, WorkerError},
    values::{
        calls::{Asker, Call, Handler},
        published::check_published,
        tensor::Tensor,
        tensor_list::PackedTensors,
        traces::of_own_call,
    },
    worker::{metrics::Timed, peer::Peer},
};

/// A call of a peer's handler, made by [`Peer::call`]. Nothing is sent until it is awaited. Awaiting it returns the tensors of the answer.
#[derive(Debug)]
#[must_use = "nothing is sent until it is awaited"]
pub struct Calling<'a> {
    peer: &'a Peer,
    name: &'a str,
    arguments: Vec<Tensor>,
    limit: Duration,
}

impl Peer {
    /// Calls the handler that the peer has under `name` ([`Worker::handle`](crate::Worker::handle)) with `arguments`: no tensor (`()`), one, or
    /// several. Awaiting it returns the tensors that the handler returns. If the peer is the worker itself, no byte is copied.
    ///
    /// A call is made at most once: if the connection breaks, it is not repeated, because the handler may have run. Call again if that does no
    /// harm.
    ///
    /// # Errors
    /// Awaiting it returns [`WorkerError::Remote`] with the handler's status, with NOT_FOUND if there is no handler of this name, with
    /// RESOURCE_EXHAUSTED if the arguments are larger than the peer allows, and with INTERNAL if the handler panicked or the answer is no list
    /// of tensors; [`WorkerError::Local`] with INVALID_ARGUMENT for more than 1,024 tensors, and with RESOURCE_EXHAUSTED if there is no memory
    /// for the answer; [`WorkerError::Config`] for a name that is empty or too long; otherwise as a [`fetch`](Self::fetch).
    ///
    /// # Cancel safety
    /// Dropping the future gives the call up: the handler's future is dropped at the peer, at its next `await`. The handler may have run.
    pub fn call<'a>(&'a self, name: &'a str, arguments: impl IntoTensors) -> Calling<'a> {
        let limit = self.worker.operations.defaults.limit;
        Calling { peer: self, name, arguments: arguments.into_tensors(), limit }
    }
}

impl Calling<'_> {
    /// The deadline, including the time to connect. The handler learns how much of it is left ([`Call::time_left`]). Default: the worker's
    /// [`timeout`](crate::WorkerBuilder::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    async fn run(self) -> Result<Vec<Tensor>, WorkerError> {
        let Self { peer, name, arguments, limit } = self;
        check_published(name)?;
        let worker = &peer.worker;
        // A task that calls in a loop must yield to others, as if it had waited for the peer.
        tokio::task::coop::consume_budget().await;
        let transfer = Transfer { peer: peer.name(), key: name, step: None };
        let what = || format!("the call of {transfer}");
        let runtime = worker.node.runtime();
        let deadline = runtime.now().saturating_add(limit);
        let answered = pin!(async {
            if worker.node.is_own(&peer.known) {
                let remote = |status: Status| WorkerError::Remote { transfer: transfer.name(), status };
                let handler = worker.node.values().calls.find(name).map_err(remote)?;
                let call = Call::new(peer.name(), arguments, deadline, runtime);
                return answered_here(handler, call, of_own_call(peer.name(), name)).await.map_err(remote);
            }
            let (connection, _stay) = peer.staying_connection().await?;
            connection.call(&transfer, arguments, deadline.saturating_sub(runtime.now())).await
        });
        worker.timed(Timed::Call, limit, what, answered).await
    }
}

/// The answer to a call of this worker itself.
async fn answered_here(handler: Arc<Handler>, call: Call, span: Span) -> Result<Vec<Tensor>, Status> {
    PackedTensors::check(call.arguments())?;
    let runtime = handler.runtime().clone();
    Asker::answered(&runtime, |mut asker| async move {
        let answering = async { handler.answer(call).await }.instrument(span);
        if let Some(answer) = asker.unless_gone(pin!(answering)).await {
            asker.answer(answer);
        }
    })
    .await
}

impl<'a> IntoFuture for Calling<'a> {
    type Output = Result<Vec<Tensor>, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
