//! Calls of one peer that are being answered here.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::Poll,
};

use futures::task::AtomicWaker;
use protocol::{Scope, Source, StepId};
use tonic::Status;

use super::{
    CALLS_MAX,
    answer::{Answer, Form, Offered},
    route::GrpcRoute,
    status::to_grpc,
    turns::{Turn, Turns},
};
use crate::values::PeerValues;

/// The calls of one peer that are being answered.
#[derive(Debug, Default)]
pub(super) struct Served {
    calls: Mutex<Vec<Arc<Call>>>,
    pub(super) turns: Arc<Turns>,
    /// Values that were taken and have not left.
    sending: AtomicUsize,
    pub(super) counts: Counts,
}

/// What was done so far.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Requests.
    pub(super) asked: AtomicU64,
    /// Requests that were given up.
    pub(super) cancelled: AtomicU64,
    /// Values.
    pub(super) contents: AtomicU64,
    /// Their bytes; of answers, with headers.
    pub(super) bytes: AtomicU64,
}

impl Counts {
    pub(super) fn add(counter: &AtomicU64, more: usize) {
        counter.fetch_add(more as u64, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Call {
    /// 0 if it has none.
    id: u64,
    step: Option<StepId>,
    is_cancelled: AtomicBool,
    waker: AtomicWaker,
}

impl Served {
    /// Gives the call with this number up; false if there is none.
    pub(super) fn cancel(&self, id: u64) -> bool {
        let call = self.lock().iter().find(|call| call.id == id).cloned();
        let Some(call) = call else { return false };
        Counts::add(&self.counts.cancelled, 1);
        call.is_cancelled.store(true, Ordering::Release);
        call.waker.wake();
        true
    }

    /// Whether values that were taken have not left.
    pub(super) fn is_sending(&self) -> bool {
        self.sending.load(Ordering::Acquire) > 0
    }

    /// How many calls are being answered.
    #[cfg(test)]
    pub(super) fn unanswered(&self) -> usize {
        self.lock().len()
    }

    /// Steps whose values may be under way.
    pub(super) fn steps(&self) -> Vec<StepId> {
        self.lock().iter().filter_map(|call| call.step).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Call>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that counts as being answered until this is dropped.
#[derive(Debug)]
pub(super) struct InService {
    route: Arc<GrpcRoute>,
    call: Arc<Call>,
}

impl InService {
    /// Begins to answer a call.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED when the peer has as many outstanding as it may.
    fn begin(route: &Arc<GrpcRoute>, id: u64, scope: Scope) -> Result<Self, Status> {
        let step = match scope {
            Scope::Step(step) => Some(step),
            _ => None,
        };
        let call =
            Arc::new(Call { id, step, is_cancelled: AtomicBool::new(false), waker: AtomicWaker::new() });
        let mut calls = route.served.lock();
        if calls.len() >= CALLS_MAX {
            let message = format!("{CALLS_MAX} calls of this worker are unanswered; wait for one of them");
            return Err(Status::resource_exhausted(message));
        }
        calls.push(call.clone());
        drop(calls);
        Counts::add(&route.served.counts.asked, 1);
        Ok(Self { route: route.clone(), call })
    }

    pub(super) fn values(&self) -> &PeerValues {
        &self.route.values
    }

    /// Whether the way to the peer is broken.
    pub(super) fn is_lost(&self) -> bool {
        self.route.is_lost()
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.call.is_cancelled.load(Ordering::Acquire)
    }

    /// A value was taken to be sent; it is by the end of that.
    pub(super) fn sending(&self, begins: bool) {
        let sending = &self.route.served.sending;
        if begins {
            sending.fetch_add(1, Ordering::AcqRel)
        } else {
            sending.fetch_sub(1, Ordering::AcqRel)
        };
    }

    /// What is sent.
    pub(super) fn counts(&self) -> &Counts {
        &self.route.served.counts
    }

    /// What `future` gives, unless the call is given up first.
    async fn unless_cancelled<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        poll_fn(|context| {
            self.call.waker.register(context.waker());
            if self.is_cancelled() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(context).map(Some)
        })
        .await
    }
}

impl Drop for InService {
    fn drop(&mut self) {
        let mut calls = self.route.served.lock();
        if let Some(place) = calls.iter().position(|call| Arc::ptr_eq(call, &self.call)) {
            calls.swap_remove(place);
        }
    }
}

/// Answers a request for `key`: waits for its turn among the caller's, which ends when it waits for the value.
///
/// # Errors
/// The sender's status, CANCELLED when the call was given up, and those of the call itself.
///
/// # Cancel safety
/// Cancel-safe: a value that was taken goes back to its place.
pub(super) async fn answer(
    route: Arc<GrpcRoute>,
    (id, scope, key): (u64, Scope, String),
    turn: Option<Turn>,
    form: Form,
) -> Result<Answer, Status> {
    let service = InService::begin(&route, id, scope)?;
    if let Some(turn) = &turn {
        service.unless_cancelled(turn.comes()).await.ok_or_else(given_up)?;
    }
    let taking = route.values.take(scope, &key);
    drop(turn);
    let taken = service.unless_cancelled(taking).await.ok_or_else(given_up)?;
    let taken = taken.map_err(|status| to_grpc(&status))?;
    Answer::new(Offered::new(service, taken), form)
}

/// The answer to a receive that was given up before it had its value.
pub(super) fn given_up() -> Status {
    Status::cancelled("the receive was given up; the value stays where it was")
}
