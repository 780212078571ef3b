//! [`Wait`]: an operation with a time limit that is not yet awaited. [`AbortHandle`] ends one.

use std::{
    fmt,
    future::{IntoFuture, pending, ready},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::future::{Either, select};
use tensorwire_fabric::{BoxFuture, timeout};
use tokio::sync::Notify;

use super::Pairs;
use crate::{call::Call, error::GroupError};

/// An operation between ranks. Nothing happens until it is awaited. It ends with its result or a [`GroupError`], at the latest
/// after its [`timeout`](Self::timeout). An error ends neither the group nor later operations.
#[must_use = "nothing happens until it is awaited"]
pub struct Wait<'a, T> {
    pairs: Arc<Pairs>,
    call: Call,
    /// The ranks that it waits for; one of them suffices.
    ranks: Vec<usize>,
    limit: Duration,
    abort: Option<AbortHandle>,
    work: BoxFuture<'a, Result<T, GroupError>>,
}

impl<'a, T: Send + 'a> Wait<'a, T> {
    pub(super) fn new(
        pairs: &Arc<Pairs>,
        call: Call,
        ranks: Vec<usize>,
        work: impl Future<Output = Result<T, GroupError>> + Send + 'a,
    ) -> Self {
        let limit = pairs.core.limit;
        Self { pairs: pairs.clone(), call, ranks, limit, abort: None, work: Box::pin(work) }
    }

    /// An operation that fails with `error`.
    pub(super) fn failed(pairs: &Arc<Pairs>, call: Call, error: GroupError) -> Self {
        Self::new(pairs, call, Vec::new(), ready(Err(error)))
    }

    /// The time limit, counted from when it is awaited. Default: the group's [`timeout`](crate::Group::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Lets `handle` end this operation.
    pub fn abort_by(mut self, handle: &AbortHandle) -> Self {
        self.abort = Some(handle.clone());
        self
    }

    async fn run(self) -> Result<T, GroupError> {
        let Self { pairs, call, ranks, limit, abort, work } = self;
        let core = &pairs.core;
        let over = core.over.borrow().clone();
        if let Some(over) = over {
            return Err(over);
        }
        let (ended, aborted) = (pin!(core.ended()), pin!(requested(abort)));
        // `work` is polled first: a message that has arrived is returned even if the group has ended or the handle was used.
        let done = timeout(core.runtime(), limit, select(work, select(ended, aborted))).await;
        match done {
            // If the group is over, its error explains that of the operation.
            Ok(Either::Left((Err(error), _))) => Err(core.over.borrow().clone().unwrap_or(error)),
            Ok(Either::Left((done, _))) => done,
            Ok(Either::Right((Either::Left((over, _)), _))) => Err(over),
            Ok(Either::Right((Either::Right(_), _))) => Err(GroupError::Aborted { call: Box::new(call) }),
            Err(_) => Err(GroupError::TimedOut {
                call: Box::new(call),
                limit,
                waiting_for: ranks.clone(),
                silent: ranks,
            }),
        }
    }
}

impl<T> fmt::Debug for Wait<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wait({}, ranks {:?})", self.call, self.ranks)
    }
}

impl<'a, T: Send + 'a> IntoFuture for Wait<'a, T> {
    type Output = Result<T, GroupError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// Ends one operation from elsewhere, as Gloo's `abortWaitSend` and `abortWaitRecv` do. Cheap to clone.
///
/// ```no_run
/// use tensorwire::collective::{Group, GroupError, pair::AbortHandle};
///
/// # async fn example(group: Group) -> Result<(), GroupError> {
/// let handle = AbortHandle::new();
/// let waiting = group.recv(1, 7).abort_by(&handle);
/// handle.abort();
/// assert!(matches!(waiting.await, Err(GroupError::Aborted { .. })));
/// // A later operation with the handle waits again.
/// let message = group.recv(1, 7).abort_by(&handle).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct AbortHandle {
    requests: Arc<Notify>,
}

impl AbortHandle {
    /// A new handle, not yet used.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends one operation that waits with this handle, with [`GroupError::Aborted`]. If none waits, the next one that would wait
    /// ends at once. Several calls before that count as one.
    pub fn abort(&self) {
        self.requests.notify_one();
    }
}

/// Completes when `handle` ends one operation.
async fn requested(handle: Option<AbortHandle>) {
    match handle {
        Some(handle) => handle.requests.notified().await,
        None => pending().await,
    }
}
