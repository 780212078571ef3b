//! Requests to stores on a session: those of this worker, and those of the peer.

use std::{fmt, sync::Arc};

use futures::future::{Either, select};
use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::wire::control::ControlFrame;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::Session;
use crate::{error::Lost, values::end_signal::unless};

/// How many requests of a peer may wait on one session. A request counts once more for each whole [`UNIT_BYTES`] of its length.
#[doc(hidden)]
pub const STORE_WAITS_MAX: usize = 512;

const UNIT_BYTES: usize = 1 << 10;

/// A store that a worker serves to its peers.
#[doc(hidden)]
pub trait StoreService: Send + Sync + fmt::Debug + 'static {
    /// The answer to `request`. May be [`Later`](StoreAnswer::Later) only if `may_wait`; otherwise too many of the peer's requests wait
    /// already.
    ///
    /// # Errors
    /// What is wrong with the request. The peer's session ends.
    fn answer(self: Arc<Self>, request: &[u8], may_wait: bool) -> Result<StoreAnswer, &'static str>;
}

/// The answer to a request.
#[doc(hidden)]
pub enum StoreAnswer {
    /// The answer, ready to be sent.
    Now(Vec<u8>),
    /// The future returns a function that makes the answer. It is called when the answer can be sent, so that a peer that reads
    /// nothing takes the memory of one answer.
    Later(BoxFuture<'static, MakeAnswer>),
}

/// Makes an answer.
#[doc(hidden)]
pub type MakeAnswer = Box<dyn FnOnce() -> Vec<u8> + Send>;

impl fmt::Debug for StoreAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Now(_) => "Now(..)",
            Self::Later(_) => "Later(..)",
        })
    }
}

/// The peer's answer; `None` if the peer serves no store.
pub(crate) type StoreResponse = Option<Vec<u8>>;

impl Session {
    /// A number for a request to the peer's store, and the receiver of the answer.
    ///
    /// # Errors
    /// Why the session has ended.
    pub(crate) fn ask_store(&self) -> Result<(u32, oneshot::Receiver<StoreResponse>), Lost> {
        let (give, answer) = oneshot::channel();
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.clone());
        }
        let request = self.number(&mut state);
        state.asked.insert(request, give);
        Ok((request, answer))
    }

    /// Removes a request whose answer is not needed any more. Returns whether it was unanswered.
    pub(crate) fn forget_asked(&self, request: u32) -> bool {
        self.lock().asked.remove(&request).is_some()
    }

    /// Stores the answer of the peer's store.
    pub(crate) fn give_stored(&self, request: u32, response: StoreResponse) {
        if let Some(waiting) = self.lock().asked.remove(&request) {
            let _ = waiting.send(response);
        }
    }

    /// Answers a request of the peer to the store `service` of this worker.
    ///
    /// # Errors
    /// The request is no valid one, or the session is lost.
    pub(crate) async fn serve_store(
        self: &Arc<Self>,
        service: Option<Arc<dyn StoreService>>,
        (request, body): (u32, Vec<u8>),
        runtime: &dyn Runtime,
    ) -> Result<(), Lost> {
        let units = 1 + body.len() / UNIT_BYTES;
        let room = u32::try_from(units)
            .ok()
            .and_then(|units| self.waiting.clone().try_acquire_many_owned(units).ok());
        let answer = service.map(|service| service.answer(&body, room.is_some())).transpose();
        let answer = answer.map_err(|why| Lost::misbehaved(format!("the peer sent a store {why}")))?;
        let body = match (answer, room) {
            (None, _) => None,
            (Some(StoreAnswer::Now(body)), _) => Some(body),
            (Some(StoreAnswer::Later(_)), None) => return Ok(()),
            (Some(StoreAnswer::Later(answer)), Some(room)) => {
                self.answer_later(request, answer, room, runtime);
                return Ok(());
            }
        };
        // Awaited, so that this worker reads no further frames of a peer that does not read its answers.
        let sent = self.send(ControlFrame::StoreResponse { request, body }).await;
        sent.map_err(|error| Lost::gone(error.to_string()))
    }

    /// Sends `answer` when it is ready, unless the peer cancels the request or the session ends. If the peer uses a number twice,
    /// the first request ends without an answer.
    fn answer_later(
        self: &Arc<Self>,
        request: u32,
        answer: BoxFuture<'static, MakeAnswer>,
        room: OwnedSemaphorePermit,
        runtime: &dyn Runtime,
    ) {
        let (keep, cancelled) = oneshot::channel::<()>();
        self.lock().waits.insert(request, keep);
        let session = Arc::clone(self);
        let waiting = async move {
            let answered = async {
                let Either::Left((make, cancelled)) = select(answer, cancelled).await else { return };
                // Cancelling a request that waits for its turn has no effect.
                drop(cancelled);
                let _turn = session.list_turn().await;
                session.lock().waits.remove(&request);
                let _ = session.send(ControlFrame::StoreResponse { request, body: Some(make()) }).await;
            };
            unless(session.ended(), answered).await;
            drop(room);
        };
        runtime.spawn("store request", Box::pin(waiting));
    }

    /// Ends a request of the peer that waits.
    pub(crate) fn cancel_stored(&self, request: u32) {
        self.lock().waits.remove(&request);
    }
}
