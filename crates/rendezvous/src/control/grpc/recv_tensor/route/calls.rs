//! What a route asks its peer for.

use std::{
    pin::pin,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::future::{Either, join, select};
use protocol::{Code, Damage, Scope, Status, StepId, TransferError, Wanted, limits::NAME_BYTES_MAX};
use tokio::{sync::OwnedSemaphorePermit, task::coop::unconstrained};
use verbs_reactor::BoxFuture;

use super::{GrpcRoute, HeldArrival};
use crate::{
    WorkerError,
    control::grpc::recv_tensor::{
        Arrived,
        client::{Once, request, status_alone},
        kept::{Begin, StepKey},
        messages::{CancelRecvRequest, FetchTensorRequest, RecvTensorRequest},
        reading::{Fault, Place, Reader},
        served::Counts,
        service::path,
        status::{PIECES, from_grpc},
    },
    error::{Lost, TransferName},
    receive_into::Target,
};

/// How much longer the sender goes on than the receiver waits: the receiver's own deadline decides, and the sender's
/// ends what a receiver that is gone has left behind.
const GRACE: Duration = Duration::from_secs(1);

/// A value, or why there is none.
type Outcome = Result<Arrived, Fault>;

impl GrpcRoute {
    /// What the transfer names, into `target` if there is one and it fits. The sender is told the `limit`.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(crate) async fn get(
        self: &Arc<Self>,
        scope: Scope,
        transfer: &TransferName,
        target: Option<&Arc<Target>>,
        limit: Option<Duration>,
    ) -> Result<HeldArrival, WorkerError> {
        match scope {
            Scope::Step(step) => self.receive(step, transfer, target, limit).await,
            _ => self.fetch(scope, transfer, target, limit).await,
        }
    }

    /// The tensor that the peer has published under the transfer's name.
    ///
    /// # Cancel safety
    /// Cancel-safe: the call is reset, and the tensor stays published.
    async fn fetch(
        self: &Arc<Self>,
        scope: Scope,
        transfer: &TransferName,
        target: Option<&Arc<Target>>,
        limit: Option<Duration>,
    ) -> Result<HeldArrival, WorkerError> {
        check_length(transfer)?;
        // Those that wait are answered late, and must not hold up those that are not. Nothing closes the semaphores.
        let is_late = matches!(scope, Scope::Versioned(Wanted::NewerThan { .. }));
        let _room = if is_late { self.receives.acquire().await } else { self.fetches.acquire().await };
        self.check_over(transfer)?;
        let asked = Once::new(&FetchTensorRequest::new(&transfer.key, scope));
        let place = Place { pool: self.pool.clone(), target: target.cloned() };
        let mut call = pin!(self.clone().exchange(path::FETCH, asked, limit, place));
        let fetched = loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            self.check_over(transfer)?;
            match select(call.as_mut(), changed).await {
                Either::Left((fetched, _)) => break fetched,
                Either::Right(((), _)) => {}
            }
        };
        match fetched {
            Ok(value) => Ok(HeldArrival { route: self.clone(), place: None, value: Some(value) }),
            Err(fault) => Err(self.error(transfer, fault).await),
        }
    }

    /// The next value of the transfer's key in `step`.
    ///
    /// # Cancel safety
    /// Cancel-safe: a value that the sender has not sent stays there in its place, one that was sent is kept for the
    /// next receive of the key.
    async fn receive(
        self: &Arc<Self>,
        step: StepId,
        transfer: &TransferName,
        target: Option<&Arc<Target>>,
        limit: Option<Duration>,
    ) -> Result<HeldArrival, WorkerError> {
        check_length(transfer)?;
        let key = (step, transfer.key.clone());
        let (order, room) = match self.begin(&key, transfer).await? {
            Began::Ask(order, room) => (order, room),
            Began::Have(held) => return Ok(held),
        };
        let place = Place { pool: self.pool.clone(), target: target.cloned() };
        let mut call = UnderWay::new(self, key, order, room, limit, place);
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            self.check_over(transfer)?;
            if let Some((order, value)) = self.kept().take(&call.key) {
                // Of a receive that was given up: what this one asked for stays for the next.
                return Ok(call.held(order, value));
            }
            match select(call.future.as_mut(), changed).await {
                Either::Left((outcome, _)) => {
                    call.end();
                    return match outcome {
                        Ok(value) => Ok(call.held(order, value)),
                        Err(fault) => Err(self.error(transfer, fault).await),
                    };
                }
                Either::Right(((), _)) => {}
            }
        }
    }

    /// Waits for a place, and for the outcome of receives of the key that were given up.
    async fn begin(self: &Arc<Self>, key: &StepKey, transfer: &TransferName) -> Result<Began, WorkerError> {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            self.check_over(transfer)?;
            // Unconstrained: those whom tokio's budget stops would come to the line in reverse order.
            let acquiring = pin!(unconstrained(self.receives.clone().acquire_owned()));
            let room = match select(acquiring, changed.as_mut()).await {
                Either::Left((room, _)) => room.ok(),
                Either::Right(((), _)) => None,
            };
            // Without room a value may have come all the same.
            let Some(room) = room else {
                if let Some((order, value)) = self.kept().take(key) {
                    return Ok(Began::Have(self.held(key, order, value)));
                }
                continue;
            };
            let begun = self.kept().begin(key);
            match begun {
                Begin::Ask(order) => return Ok(Began::Ask(order, room)),
                Begin::Take(order, value) => return Ok(Began::Have(self.held(key, order, value))),
                Begin::Wait => {
                    drop(room);
                    changed.await;
                }
            }
        }
    }

    fn held(self: &Arc<Self>, key: &StepKey, order: u64, value: Arrived) -> HeldArrival {
        HeldArrival { route: self.clone(), place: Some((key.clone(), order)), value: Some(value) }
    }

    fn check_over(&self, transfer: &TransferName) -> Result<(), WorkerError> {
        match self.lost.get() {
            Some(lost) => Err(self.lost_error(transfer, lost.clone())),
            None => Ok(()),
        }
    }

    /// One call, from its request to its value.
    async fn exchange(
        self: Arc<Self>,
        path: &'static str,
        message: Once,
        limit: Option<Duration>,
        place: Place,
    ) -> Outcome {
        Counts::add(&self.asked.asked, 1);
        let body = self.call(path, message, limit).await?;
        let value = Reader::new(body).value(&place).await?;
        Counts::add(&self.asked.contents, 1);
        Counts::add(&self.asked.bytes, value.bytes().len());
        Ok(value)
    }

    async fn call(
        &self,
        path: &'static str,
        message: Once,
        limit: Option<Duration>,
    ) -> Result<hyper::body::Incoming, Fault> {
        let mut caller = self.caller().await.map_err(|error| Fault::Unreachable(Box::new(error)))?;
        let timeout_ms = limit.map(|limit| limit.saturating_add(GRACE).as_millis());
        let authority = self.address.as_deref().unwrap_or_default();
        let send = |order| {
            let request = request((authority, path), &self.token, timeout_ms, order, message);
            request.map(|request| caller.send_request(request)).map_err(Fault::Broken)
        };
        let answering = match path {
            path::RECV | path::RECV_STREAM => {
                let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
                let answering = send(Some(*sent + 1))?;
                *sent += 1;
                answering
            }
            _ => send(None)?,
        };
        let answered = answering.await;
        let answered = answered.map_err(|error| Fault::Broken(crate::control::grpc::dial::causes(&error)))?;
        match status_alone(&answered) {
            Some(status) => Err(Fault::Answered(status)),
            None => Ok(answered.into_body()),
        }
    }

    /// Asks for a value of a step, in pieces if it is too large for one message.
    async fn ask(
        self: Arc<Self>,
        sent: Arc<Sent>,
        key: StepKey,
        limit: Option<Duration>,
        place: Place,
    ) -> Outcome {
        let (StepId(step_id), rendezvous_key) = key.clone();
        let asked = |id: u64| {
            Once::new(&RecvTensorRequest {
                step_id,
                rendezvous_key: rendezvous_key.clone(),
                dma_ok: false,
                request_id: id.cast_signed(),
            })
        };
        // Before it counts as sent, so that nothing goes out for a receive that is given up while this waits.
        self.caller().await.map_err(|error| Fault::Unreachable(Box::new(error)))?;
        if !self.kept().is_awaited(&key) {
            // The step ended meanwhile: whoever awaits this is about to be told.
            return std::future::pending().await;
        }
        let id = sent.next(&self);
        match self.clone().exchange(path::RECV, asked(id), limit, place.clone()).await {
            Err(Fault::Answered(status)) if status.metadata().contains_key(PIECES) => {}
            outcome => return outcome,
        }
        let id = sent.next(&self);
        self.exchange(path::RECV_STREAM, asked(id), limit, place).await
    }

    /// Gives a receive up whose request was sent. Whatever comes of it is known when its answer has ended.
    fn give_up(self: &Arc<Self>, key: StepKey, order: u64, sent: Arc<Sent>, call: Call) {
        Counts::add(&self.asked.cancelled, 1);
        let route = self.clone();
        let resolving = async move {
            let cancel = CancelRecvRequest { request_id: sent.last().cast_signed() };
            let cancelling = async {
                if let Ok(body) = route.call(path::CANCEL, Once::new(&cancel), None).await {
                    let _ = Reader::new(body).nothing().await;
                }
            };
            let (outcome, ()) = join(call.future, cancelling).await;
            let is_broken = matches!(outcome, Err(Fault::Broken(_)));
            let unwanted = route.kept().resolve(&key, order, outcome.ok());
            drop(unwanted);
            drop(call.room);
            route.changed.notify_waiters();
            if is_broken {
                route.end_soon("a call broke".to_owned());
            }
        };
        self.runtime.spawn("give a receive up", Box::pin(resolving));
    }

    /// What a fault is to whoever receives.
    async fn error(&self, name: &TransferName, fault: Fault) -> WorkerError {
        let transfer = || Box::new(name.clone());
        match fault {
            Fault::Answered(status) if status.code() == tonic::Code::Unauthenticated => {
                self.end_soon(status.message().to_owned());
                self.lost_error(name, self.over().await)
            }
            Fault::Answered(status) => {
                WorkerError::Remote { transfer: transfer(), status: from_grpc(&status) }
            }
            Fault::Broken(detail) => {
                self.end_soon(detail);
                self.lost_error(name, self.over().await)
            }
            Fault::Misbehaved(rule) => {
                self.fail(&Lost::misbehaved(format!("the peer broke the rules of gRPC answers: {rule}")));
                self.lost_error(name, self.over().await)
            }
            Fault::Memory(error) => {
                let status = Status::new(Code::ResourceExhausted, error.to_string());
                WorkerError::Local { transfer: transfer(), status }
            }
            Fault::Unreachable(error) => *error,
            Fault::Corrupted { validation, sent, received } => WorkerError::Corrupted {
                transfer: transfer(),
                transport: "grpc",
                validation,
                sent,
                received,
                damage: Damage::Content,
            },
        }
    }
}

/// How a receive begins.
enum Began {
    /// Its request goes out, in this place.
    Ask(u64, OwnedSemaphorePermit),
    /// Its value is here.
    Have(HeldArrival),
}

/// Which request of a receive went out last.
#[derive(Debug, Default)]
struct Sent(AtomicU64);

impl Sent {
    /// A new number, never 0.
    fn next(&self, route: &GrpcRoute) -> u64 {
        let id = route.runtime.random().max(1);
        self.0.store(id, Ordering::Release);
        id
    }

    /// 0 if none has.
    fn last(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// A call, and the place it takes.
struct Call {
    future: BoxFuture<'static, Outcome>,
    room: OwnedSemaphorePermit,
}

/// A receive that is awaited. Dropped, it is given up.
struct UnderWay {
    route: Arc<GrpcRoute>,
    key: StepKey,
    order: u64,
    sent: Arc<Sent>,
    future: BoxFuture<'static, Outcome>,
    /// Until it has ended.
    room: Option<OwnedSemaphorePermit>,
}

impl UnderWay {
    fn new(
        route: &Arc<GrpcRoute>,
        key: StepKey,
        order: u64,
        room: OwnedSemaphorePermit,
        limit: Option<Duration>,
        place: Place,
    ) -> Self {
        let sent = Arc::<Sent>::default();
        let future = Box::pin(route.clone().ask(sent.clone(), key.clone(), limit, place));
        Self { route: route.clone(), key, order, sent, future, room: Some(room) }
    }

    fn end(&mut self) {
        if self.room.take().is_some() {
            self.route.kept().end(&self.key);
            if self.route.leaving.get().is_some() {
                self.route.changed.notify_waiters();
            }
        }
    }

    fn held(&self, order: u64, value: Arrived) -> HeldArrival {
        self.route.held(&self.key, order, value)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let is_sent = self.sent.last() != 0;
        if !is_sent || self.route.lost.get().is_some() {
            return self.end();
        }
        let Some(room) = self.room.take() else { return };
        self.route.kept().give_up(&self.key);
        let future = std::mem::replace(&mut self.future, Box::pin(std::future::pending()));
        self.route.give_up(self.key.clone(), self.order, self.sent.clone(), Call { future, room });
    }
}

/// Keys travel whole.
fn check_length(transfer: &TransferName) -> Result<(), WorkerError> {
    let length = transfer.key.len();
    if length <= NAME_BYTES_MAX {
        return Ok(());
    }
    let message = TransferError::KeyTooLong { length }.to_string();
    let status = Status::new(Code::ResourceExhausted, message);
    Err(WorkerError::Local { transfer: Box::new(transfer.clone()), status })
}
