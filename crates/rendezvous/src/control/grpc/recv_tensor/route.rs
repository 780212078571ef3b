//! A route over gRPC between this worker and a peer: both directions.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use memory::Pool;
use protocol::{Agreed, Counters, StepId, Validation};
use tokio::sync::{Notify, OnceCell, Semaphore, oneshot, watch};
use tonic::codegen::http::HeaderValue;
use verbs_reactor::{QueuePairStats, Runtime, timeout};

use super::{
    Arrived, CONNECTIONS_MAX, Expected, FETCHES_MAX, RECEIVES_MAX, TensorCalls, Token, TokenDigest,
    client::{self, Caller},
    kept::Kept,
    served::{Counts, Served},
};
use crate::{
    Tensor, Version, WorkerError,
    control::grpc::door::Guest,
    data::unless,
    error::{Lost, TransferName},
    meter::Meter,
    values::{PeerValues, SharedValues},
};

mod calls;

/// How long a connection's end waits for the session's, which knows why.
const VERDICT: Duration = Duration::from_millis(100);

/// What a route is made of.
pub(crate) struct RouteEnds {
    /// What the peer's calls present.
    pub(crate) expected: Expected,
    pub(crate) values: SharedValues,
    pub(crate) runtime: Arc<dyn Runtime>,
    /// Where values land.
    pub(crate) pool: Pool,
    pub(crate) peer: String,
    pub(crate) meter: Arc<Meter>,
    /// The life of the peer that it leads to.
    pub(crate) incarnation: u64,
    /// Where the peer's control plane listens, if it is known.
    pub(crate) address: Option<String>,
    /// What the peer's plane wants to see.
    pub(crate) token: Token,
    pub(crate) agreed: Agreed,
    pub(crate) connect_limit: Duration,
    /// SHA-256 of the certificate that the peer has shown on its session: its connections must show it too.
    pub(crate) certificate: Option<[u8; 32]>,
    /// Turns true when the session ends.
    pub(crate) session_over: watch::Receiver<bool>,
}

/// Moves tensors by calls, in both directions.
#[derive(Debug)]
pub(crate) struct GrpcRoute {
    me: Weak<Self>,
    pub(crate) peer_incarnation: u64,
    calls: Arc<TensorCalls>,
    pub(crate) values: Arc<PeerValues>,
    runtime: Arc<dyn Runtime>,
    pool: Pool,
    address: Option<String>,
    /// What the peer's calls present.
    own_token: TokenDigest,
    /// What calls from here present.
    token: HeaderValue,
    validation: Validation,
    connect_limit: Duration,
    certificate: Option<[u8; 32]>,
    session_over: watch::Receiver<bool>,
    caller: OnceCell<Caller>,
    receives: Arc<Semaphore>,
    fetches: Semaphore,
    kept: Mutex<Kept>,
    /// Receives whose requests went out. Locked while one does.
    sent: Mutex<u64>,
    /// Something that is kept or awaited has changed, or the route is over.
    changed: Notify,
    pub(super) served: Served,
    /// Connections that the peer's calls come by.
    guests: Mutex<Vec<Arc<Guest>>>,
    /// Why the peer said that it will end it: nothing new goes over it.
    leaving: OnceLock<Lost>,
    lost: OnceLock<Lost>,
    /// Locked while what may be lost is noted; true once it is.
    ended: Mutex<bool>,
    is_noted: AtomicBool,
    /// Ends the connection of this end.
    stop: watch::Sender<bool>,
    /// What was asked for here.
    asked: Counts,
}

impl GrpcRoute {
    /// Makes a route, which serves the peer from now on. `None` if a token cannot be shown.
    pub(crate) fn new(ends: RouteEnds) -> Option<Arc<Self>> {
        let token = ends.token.to_header()?;
        let (calls, own_token) = (ends.expected.calls.clone(), ends.expected.token);
        let receives = ends.agreed.requests_max.min(RECEIVES_MAX);
        let route = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            peer_incarnation: ends.incarnation,
            calls,
            values: Arc::new(PeerValues::new(&ends.values, &ends.peer, ends.meter)),
            runtime: ends.runtime,
            pool: ends.pool,
            address: ends.address,
            own_token,
            token,
            validation: ends.agreed.validation,
            connect_limit: ends.connect_limit,
            certificate: ends.certificate,
            session_over: ends.session_over,
            caller: OnceCell::new(),
            receives: Arc::new(Semaphore::new(receives as usize)),
            fetches: Semaphore::new(FETCHES_MAX),
            kept: Mutex::default(),
            sent: Mutex::new(0),
            changed: Notify::new(),
            served: Served::default(),
            guests: Mutex::default(),
            leaving: OnceLock::new(),
            lost: OnceLock::new(),
            ended: Mutex::new(false),
            is_noted: AtomicBool::new(false),
            stop: watch::Sender::new(false),
            asked: Counts::default(),
        });
        ends.expected.arrived(&route);
        Some(route)
    }

    /// Opens this end's connection, unless it is open.
    ///
    /// # Errors
    /// The peer's port cannot be reached.
    pub(crate) async fn connect(&self) -> Result<(), WorkerError> {
        self.caller().await.map(drop)
    }

    /// Whether it can carry no more transfers.
    pub(crate) fn is_over(&self) -> bool {
        self.lost.get().is_some() || self.leaving.get().is_some()
    }

    /// Whether what it carries is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.calls.encrypts()
    }

    /// Whether nothing more can come or go.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Whether a value is on its way to the peer.
    pub(crate) fn is_transferring(&self) -> bool {
        self.served.is_sending()
    }

    /// The peer has said why it will end it. Nothing new goes over it.
    pub(crate) fn expect_end(&self, why: &Lost) {
        self.leaving.get_or_init(|| why.clone());
    }

    /// Waits until its end is known, or nothing is under way here that the peer could still answer.
    pub(crate) async fn until_settled(&self) {
        self.until(|| (self.lost.get().is_some() || self.kept().is_idle()).then_some(())).await;
    }

    /// Waits until its end is known.
    pub(crate) async fn until_end(&self) {
        self.until(|| self.has_ended().then_some(())).await;
    }

    async fn until<T>(&self, get: impl Fn() -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(got) = get() {
                return got;
            }
            changed.await;
        }
    }

    /// Whether its end is known here, and what it may have lost is noted.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_noted.load(Ordering::Acquire)
    }

    /// Ends every transfer over it. Steps of which something was asked and not consumed, or is being sent, are over
    /// with this peer before another route can carry them on.
    pub(crate) fn fail(&self, why: &Lost) {
        let why = self.lost.get_or_init(|| self.leaving.get().unwrap_or(why).clone());
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *ended {
            return;
        }
        *ended = true;
        self.values.meter.lost(why.loss);
        let (mut steps, kept) = self.kept().end_all();
        drop(kept);
        steps.extend(self.served.steps());
        steps.sort_unstable();
        steps.dedup();
        self.values.values.lose(&self.values.peer, &steps, &why.detail);
        self.is_noted.store(true, Ordering::Release);
        drop(ended);
        tracing::debug!(peer = %self.values.peer, transport = "grpc", why = why.detail, "route over");
        self.calls.forget(&self.own_token);
        self.stop.send_replace(true);
        self.changed.notify_waiters();
    }

    /// Ends it, and hangs up on the peer.
    pub(crate) fn close(&self, why: &Lost) {
        self.fail(why);
        let guests = std::mem::take(&mut *self.guests());
        guests.iter().for_each(|guest| guest.leave());
    }

    /// What was received for `step` and not handed out goes back.
    pub(crate) fn discard(&self, step: StepId) {
        let kept = self.kept().discard(step);
        drop(kept);
        self.changed.notify_waiters();
    }

    /// What came and went.
    pub(crate) fn stats(&self) -> QueuePairStats {
        let mut stats = QueuePairStats::default();
        let served = &self.served.counts;
        stats.operations = served.contents.load(Ordering::Relaxed);
        stats.bytes_sent = served.bytes.load(Ordering::Relaxed);
        stats.arrivals = self.asked.contents.load(Ordering::Relaxed);
        stats.bytes_received = self.asked.bytes.load(Ordering::Relaxed);
        stats
    }

    /// What of it has a name in the protocol.
    pub(crate) fn counters(&self) -> Counters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut counters = Counters::default();
        counters.sent.tensor_request = read(&self.asked.asked);
        counters.sent.cancel = read(&self.asked.cancelled);
        counters.received.tensor_request = read(&self.served.counts.asked);
        counters.received.cancel = read(&self.served.counts.cancelled);
        counters.contents_sent = read(&self.served.counts.contents);
        counters
    }

    /// The peer's calls come by `guest`, too; false if it has too many connections.
    pub(in crate::control::grpc) fn admit(&self, guest: &Arc<Guest>) -> bool {
        let mut guests = self.guests();
        let is_admitted = !self.is_over() && guests.len() < CONNECTIONS_MAX;
        if is_admitted {
            guests.push(guest.clone());
        }
        is_admitted
    }

    /// Whether a connection shows the certificate that the peer has shown on its session.
    pub(super) fn is_of(&self, guest: &Guest) -> bool {
        guest.proven().map(|proven| proven.certificate) == self.certificate
    }

    /// A connection of the peer's is gone. It opens another one only for another route.
    pub(in crate::control::grpc) fn guest_gone(&self, guest: &Guest) {
        self.guests().retain(|other| !std::ptr::eq(&**other, guest));
        self.end_soon("the peer closed its connection".to_owned());
    }

    pub(super) fn validation(&self) -> Validation {
        self.validation
    }

    /// The connection broke: the route is over. If the session is over too, which knows better why, that counts.
    fn end_soon(&self, detail: String) {
        if self.lost.get().is_some() {
            return;
        }
        let Some(route) = self.me.upgrade() else { return };
        let verdict = async move {
            let over = unless(route.session_over.clone(), std::future::pending::<()>());
            let _ = timeout(&*route.runtime, VERDICT, over).await;
            // The session fails its routes itself.
            route.fail(&Lost::gone(detail));
        };
        self.runtime.spawn("grpc verdict", Box::pin(verdict));
    }

    /// Waits until the route is over, and says why. To be called when that is certain to come.
    async fn over(&self) -> Lost {
        self.until(|| self.lost.get().cloned()).await
    }

    /// The connection, opened on first use by one of those who need it.
    async fn caller(&self) -> Result<Caller, WorkerError> {
        if let Some(caller) = self.caller.get() {
            return Ok(caller.clone());
        }
        self.caller.get_or_try_init(|| self.open()).await.cloned()
    }

    /// On a task of its own: whoever awaits may do so on another runtime, and may leave.
    async fn open(&self) -> Result<Caller, WorkerError> {
        let unknown = || WorkerError::UnknownWorker {
            name: self.values.peer.clone(),
            known: "it connected from an address that nobody told".to_owned(),
        };
        let address = self.address.clone().ok_or_else(unknown)?;
        let (told, opened) = oneshot::channel();
        let (runtime, stop, limit) = (self.runtime.clone(), self.stop.subscribe(), self.connect_limit);
        let (calls, certificate) = (self.calls.clone(), self.certificate);
        let route = self.me.clone();
        let ended = Box::new(move |detail| {
            if let Some(route) = route.upgrade() {
                route.end_soon(detail);
            }
        });
        let opening = async move {
            let connecting = client::connect(&address, (&calls.security, certificate), &runtime, stop, ended);
            let opened = timeout(&*runtime, limit, connecting).await.unwrap_or_else(|_| {
                let detail = format!("no gRPC connection within {} ms", limit.as_millis());
                Err(crate::control::ControlError::Unreachable { address: address.clone(), detail })
            });
            let _ = told.send(opened);
        };
        self.runtime.spawn("grpc connect", Box::pin(opening));
        let opened = opened.await.map_err(|_| WorkerError::ShutDown)?;
        opened.map_err(WorkerError::from)
    }

    fn lost_error(&self, transfer: &TransferName, lost: Lost) -> WorkerError {
        let Lost { loss, detail } = lost;
        WorkerError::PeerLost { transfer: Box::new(transfer.clone()), transport: "grpc", loss, detail }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn guests(&self) -> MutexGuard<'_, Vec<Arc<Guest>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for GrpcRoute {
    fn drop(&mut self) {
        self.calls.forget(&self.own_token);
        let _ = self.stop.send_replace(true);
    }
}

/// A value that has come and is not handed out yet. Dropped, it is kept for the next receive of its key.
#[derive(Debug)]
pub(crate) struct HeldArrival {
    route: Arc<GrpcRoute>,
    /// What it was received for, and its place; `None` for a published tensor.
    place: Option<(super::kept::StepKey, u64)>,
    value: Option<Arrived>,
}

impl HeldArrival {
    /// The value, which stays here.
    pub(crate) fn get_mut(&mut self) -> Option<&mut Arrived> {
        self.value.as_mut()
    }

    /// Whether it comes from a branch that was not taken.
    pub(crate) fn is_dead(&self) -> bool {
        self.value.as_ref().is_some_and(|value| value.metadata.is_dead)
    }

    /// Its bytes; 0 once it is handed out.
    pub(crate) fn byte_length(&self) -> u64 {
        self.value.as_ref().map_or(0, |value| value.metadata.byte_length)
    }

    /// Which publication it is, if it was published.
    pub(crate) fn version(&self) -> Option<Version> {
        let number = self.value.as_ref()?.version?;
        Some(Version { incarnation: self.route.peer_incarnation, number })
    }

    /// The value as a tensor, which stays here too.
    pub(crate) fn shared_tensor(&mut self) -> Option<Tensor> {
        self.value.as_mut().map(Arrived::share)
    }

    /// Hands it out.
    pub(crate) fn take(&mut self) -> Option<Arrived> {
        self.value.take()
    }
}

impl Drop for HeldArrival {
    fn drop(&mut self) {
        if let (Some((key, order)), Some(value)) = (&self.place, self.value.take())
            && self.route.lost.get().is_none()
        {
            self.route.kept().put_back(key, *order, value);
            self.route.changed.notify_waiters();
        }
    }
}
