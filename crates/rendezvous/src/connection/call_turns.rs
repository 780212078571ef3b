//! What the calls of one peer may use at a time.

use std::sync::Arc;

use tensorwire_protocol::{Code, Status, limits::ARGUMENT_PULLS_MAX};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::values::calls::CallRoom;

/// The turns of a connection.
#[derive(Debug, Clone)]
pub(crate) struct CallTurns {
    /// One for each handler that runs. Handlers whose callers have given up may still run, beside as many as there may be requests.
    running: Arc<Semaphore>,
    /// One for each request of arguments.
    pulls: Arc<Semaphore>,
    /// Of all connections of the peer.
    room: Arc<CallRoom>,
}

/// What a call uses until its handler has ended and its answer was sent.
#[derive(Debug)]
pub(crate) struct CallPermits {
    _running: OwnedSemaphorePermit,
    _room: Option<OwnedSemaphorePermit>,
}

impl CallTurns {
    pub(super) fn new(requests_max: u32, room: Arc<CallRoom>) -> Self {
        let [running, pulls] =
            [requests_max as usize, ARGUMENT_PULLS_MAX].map(|turns| Arc::new(Semaphore::new(turns)));
        Self { running, pulls, room }
    }

    /// Waits until a call with so many bytes of arguments may begin. Arguments in requests need no room: the number of requests limits them.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if it never may.
    pub(super) async fn begin(&self, bytes: Option<u64>) -> Result<CallPermits, Status> {
        let ended = |_| Status::new(Code::Unavailable, "the connection is over");
        let room = match bytes {
            Some(bytes) => Some(self.room.take(bytes).await?),
            None => None,
        };
        let running = self.running.clone().acquire_owned().await.map_err(ended)?;
        Ok(CallPermits { _running: running, _room: room })
    }

    /// Waits for the turn to request arguments.
    pub(super) async fn pull(&self) -> Option<OwnedSemaphorePermit> {
        self.pulls.clone().acquire_owned().await.ok()
    }
}
