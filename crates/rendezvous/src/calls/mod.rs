//! Calls: a peer's function of tensors, answered by a handler.
//!
//! [`Worker::handle`](crate::Worker::handle) has a function answer the calls of any peer, also of clients whose names this worker does not know.
//! [`Peer::call`](crate::Peer::call) sends tensors to a handler and awaits the tensors that it returns.
//!
//! ```
//! use tensorwire::{Tensor, Worker, WorkerError};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), WorkerError> {
//! let server = Worker::builder("embeddings").start().await?;
//! let pool = server.pool().clone();
//! let _handling = server.handle("double", move |call| {
//!     let pool = pool.clone();
//!     async move {
//!         let [values] = call.arguments() else {
//!             return Err(WorkerError::InvalidTensor { problem: "give one tensor".to_owned() });
//!         };
//!         let doubled: Vec<f32> = values.as_slice::<f32>()?.iter().map(|value| 2.0 * value).collect();
//!         Tensor::from_values(&pool, values.shape(), &doubled)
//!     }
//! })?;
//!
//! let client = Worker::client().start().await?;
//! let peer = client.peer_at(server.address()).await?;
//! let values = Tensor::from_values(client.pool(), &[2], &[1.0f32, 2.5])?;
//! let answer = peer.call("double", values).await?;
//! assert_eq!(answer[0].as_slice::<f32>()?, [2.0, 5.0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Memory
//! Up to 4 KiB, arguments are in the request and answers in its response. Longer ones are written into granted memory of the receive pool, like
//! fetched tensors: all tensors of a call by one write, which takes no copy, except over fabrics that cannot write several pieces at once and
//! where contents are validated; there it takes one. The arguments that the calls of one peer hold at a time are limited by
//! [`Limits::call_bytes`](crate::Limits::call_bytes); further calls wait.

mod calling;

use std::{fmt, future::Future, sync::Arc};

use tensorwire_protocol::Status;

pub use self::calling::Calling;
pub use crate::values::calls::Call;
#[cfg(feature = "trace")]
pub use crate::values::traces::Propagator;
use crate::{
    error::WorkerError,
    values::{SharedValues, calls::Handler, published::check_published, tensor::Tensor},
    worker::Worker,
};
#[cfg(feature = "trace")]
pub use tensorwire_protocol::TraceContext;

/// What calls take and handlers return: no tensor, one, or several.
pub trait IntoTensors {
    /// The tensors, in order.
    fn into_tensors(self) -> Vec<Tensor>;
}

impl IntoTensors for () {
    fn into_tensors(self) -> Vec<Tensor> {
        Vec::new()
    }
}

impl IntoTensors for Tensor {
    fn into_tensors(self) -> Vec<Tensor> {
        vec![self]
    }
}

impl IntoTensors for Vec<Tensor> {
    fn into_tensors(self) -> Vec<Tensor> {
        self
    }
}

impl<const N: usize> IntoTensors for [Tensor; N] {
    fn into_tensors(self) -> Vec<Tensor> {
        self.into()
    }
}

impl Worker {
    /// Has `handler` answer calls of `name`, until the returned value is dropped. Names of handlers are a name space of their own.
    ///
    /// The handler runs once for each call, in a task of its own on the worker's runtime; several run at the same time. What blocks a
    /// thread belongs in `tokio::task::spawn_blocking`. When the caller waits no longer (its deadline has passed, it has dropped the call, or
    /// it is lost), the handler's future is dropped at its next `await`. Work that it has given to another thread goes on.
    ///
    /// An error reaches the caller as [`WorkerError::Remote`] with the [`Status`]: its code, its message, and its details, in which programs may
    /// encode what they like. A handler that panics answers with INTERNAL.
    ///
    /// One peer may have [`requests_max`](crate::Flow::requests_max) calls under way; further ones wait at the peer. Errors cost the caller
    /// nothing, so one peer gets 5,000 of them a second; further ones wait.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for a name that is empty, too long, or has a handler.
    pub fn handle<Answering, Answer, Error>(
        &self,
        name: &str,
        handler: impl Fn(Call) -> Answering + Send + Sync + 'static,
    ) -> Result<Handling, WorkerError>
    where
        Answering: Future<Output = Result<Answer, Error>> + Send + 'static,
        Answer: IntoTensors,
        Error: Into<Status>,
    {
        self.check_runs()?;
        check_published(name)?;
        let answer = move |call| {
            let answering = handler(call);
            let answer = async move { answering.await.map(IntoTensors::into_tensors).map_err(Into::into) };
            Box::pin(answer) as _
        };
        let (values, name) = (self.node.values().clone(), Arc::<str>::from(name));
        let handler = Handler::new(answer, self.node.runtime().clone());
        if values.calls.add(name.clone(), handler) {
            return Ok(Handling { values, name });
        }
        let remedy = "another handler answers calls of it: choose another name, or drop that one".to_owned();
        Err(WorkerError::Config { field: "name of a handler", value: name.to_string(), remedy })
    }
}

/// Has a handler answer calls, made by [`Worker::handle`]. After it is dropped, further calls fail with NOT_FOUND; those under way go on.
/// `let _ = worker.handle(..)` drops it at once: bind it to a name.
///
/// [`Worker::shutdown`] does not wait for handlers. It waits for answers that are on their way, for at most the
/// [`shutdown_grace`](crate::WorkerBuilder::shutdown_grace). Then the futures of the handlers that answer peers are dropped, and their callers get
/// [`WorkerError::PeerLost`].
#[must_use = "calls are answered only while this exists"]
pub struct Handling {
    values: SharedValues,
    name: Arc<str>,
}

impl fmt::Debug for Handling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handling").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Handling {
    fn drop(&mut self) {
        self.values.calls.remove(&self.name);
    }
}
