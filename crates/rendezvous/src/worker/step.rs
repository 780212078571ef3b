//! [`Step`]: the scope in which users send and receive values.

use std::{borrow::Cow, fmt, future::Future, pin::pin, sync::Arc, time::Duration};

use futures::future::{Either, select};
use tensorwire_fabric::timeout;
use tensorwire_memory::{BufMut, Pool};
use tensorwire_protocol::{Code, Key, Metadata, ReceiveOptions, ReceivedGuard, Scope, Status, StepId};
use tokio_util::sync::CancellationToken;

use crate::{
    connection::{DataConnection, fabric_channel::FabricChannel},
    error::{KeyEnd, PeerLoss, Transfer, TransferName, WorkerError},
    peer_memory::target::Target,
    session::known_peer::{Attempt, KnownPeer},
    values::{
        arguments::{Delivered, RecvArgs, SendArgs},
        device_copy::copy_from_host,
        steps::StepRef,
        table::{SendRefused, cancelled},
        tensor::Tensor,
        value_guard::ValueGuard,
    },
    worker::{Worker, metrics::Timed},
};

/// How long a receive with a cancelled token waits until the sender answers whether the value is available.
const ASKED_AT_ONCE: Duration = Duration::from_secs(5);

/// One step of this worker: sends and receives of different steps never mix.
///
/// [`Worker::step`] begins it. Dropping the last clone ends it: pending receives get ABORTED, values that were not
/// received are dropped, and later requests of peers are answered with ABORTED. A step from [`Worker::shared_step`]
/// does not end when it is dropped. A step belongs to the worker that began it.
///
/// ```
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// let worker = Worker::builder("/job:trainer/replica:0/task:0").start().await?;
/// let cpu = "/job:trainer/replica:0/task:0/device:CPU:0";
/// let key = worker.key(cpu, cpu, "loss")?;
///
/// let step = worker.step(1);
/// step.send(&key, Tensor::from_values(worker.pool(), &[], &[0.5f32])?)?;
/// assert_eq!(step.recv(&key).await?.values::<f32>()?, [0.5]);
/// drop(step);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "the step may end when this is dropped"]
pub struct Step {
    pub(crate) worker: Worker,
    pub(crate) id: StepId,
    /// `Err` if the step had already ended.
    live: Result<StepRef, Status>,
    /// Shared by all clones; `None` for a step from [`Worker::shared_step`].
    _end: Option<Arc<EndOnDrop>>,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step")
            .field("worker", &self.worker.name())
            .field("id", &self.id.0)
            .finish_non_exhaustive()
    }
}

/// Ends a step when it is dropped.
#[derive(Debug)]
struct EndOnDrop {
    worker: Worker,
    id: StepId,
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.worker.end_step(self.id);
    }
}

impl Worker {
    /// Begins the step with this number on this worker. From now on, requests of peers for it are served in the order
    /// in which they arrived.
    ///
    /// The step ends on this worker when the last clone of the returned [`Step`] is dropped, as with
    /// [`cleanup`](Self::cleanup). So hold it until peers have received its values, and clone it instead of calling
    /// this again with the same number. A step that has ended cannot begin again.
    pub fn step(&self, id: i64) -> Step {
        Step::begin(self, StepId(id))
    }

    /// Like [`step`](Self::step), for programs that look a step up by its number in several parts of the code: dropping
    /// the returned [`Step`] does not end it, only [`cleanup`](Self::cleanup) does. A step without a [`Step`] and
    /// without values is forgotten; a later request of a peer waits until the step begins again
    /// ([`Limits::step_init_timeout`](crate::Limits::step_init_timeout)).
    pub fn shared_step(&self, id: i64) -> Step {
        Step::share(self, StepId(id))
    }

    /// Ends a step, even if a [`Step`] of it exists: its pending receives get ABORTED, its values that were not
    /// received are dropped, and later requests for it are answered with ABORTED. Every later use of it on this worker
    /// fails with ABORTED, too, for 10 minutes or until 65,536 further steps have ended, whichever comes first. Ending
    /// a step twice has no further effect.
    pub fn cleanup(&self, step: i64) {
        self.end_step(StepId(step));
    }

    /// Ends every step that is in use or contains values, as [`cleanup`](Self::cleanup) does.
    pub fn cleanup_all(&self) {
        self.node.values().steps.live().into_iter().for_each(|step| self.end_step(step));
    }

    pub(crate) fn end_step(&self, step: StepId) {
        self.node.values().steps.cleanup(step);
        self.node.values().lost.forget(step);
        self.discard(step);
    }

    /// Releases values that were received for a step and not returned to the user.
    pub(crate) fn discard(&self, step: StepId) {
        for connection in self.node.all_peers().iter().filter_map(KnownPeer::connection) {
            connection.protocol.discard(step);
        }
    }
}

impl Step {
    /// Begins a step that ends when its last clone is dropped.
    pub(crate) fn begin(worker: &Worker, id: StepId) -> Self {
        let end = EndOnDrop { worker: worker.clone(), id };
        Self { _end: Some(Arc::new(end)), ..Self::share(worker, id) }
    }

    /// Begins a step that does not end when its clones are dropped.
    pub(crate) fn share(worker: &Worker, id: StepId) -> Self {
        let live = worker.node.values().steps.begin(id);
        Self { worker: worker.clone(), id, live, _end: None }
    }

    /// Its number.
    pub fn id(&self) -> i64 {
        self.id.0
    }

    /// Makes `tensor` available under `key`, whose source must be a device of this worker. Never waits: the value stays
    /// on this worker until its receiver requests it.
    ///
    /// # Errors
    /// [`WorkerError::Aborted`] if the step has ended or the key names another incarnation of this worker;
    /// [`WorkerError::WrongWorker`] if the source is a device of another worker; [`WorkerError::TableFull`].
    pub fn send(&self, key: &Key, tensor: Tensor) -> Result<(), WorkerError> {
        self.send_with(key, SendArgs::default(), tensor)
    }

    /// Like [`send`](Self::send), with arguments. A receiver on this worker gets `args` unchanged, with the same
    /// context object. For a receiver on another worker, a value in device memory is copied to the host first.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_with(&self, key: &Key, args: SendArgs, tensor: Tensor) -> Result<(), WorkerError> {
        self.worker.check_runs()?;
        let step = self.live()?;
        if !self.is_from_here(key)? {
            return Err(self.wrong_worker(KeyEnd::Source, key));
        }
        let values = self.worker.node.values();
        let receiver = if values.lost.is_empty() { None } else { key.destination_device().worker() };
        if let Some(status) = receiver.and_then(|receiver| values.lost.status(self.id, &receiver)) {
            return Err(self.aborted(status));
        }
        let sent = values.steps.send(step, key, args, tensor.remember_checksums());
        sent.map_err(|refused| match refused {
            SendRefused::Full { waiting, cap } => WorkerError::TableFull { waiting, cap },
            SendRefused::Aborted(status) => self.aborted(status),
        })
    }

    /// Like [`recv`](Self::recv), with `args`.
    pub(crate) async fn receive_with(
        &self,
        key: &Key,
        options: ReceiveOptions,
        limit: Duration,
        args: RecvArgs,
    ) -> Result<Delivered, WorkerError> {
        let what = || format!("receiving `{key}` of step {}", self.id.0);
        let how = Receiving::Held(options);
        let received = pin!(async move {
            let (tensor, send_args) = match self.receive_for(key, &how, Some(&args)).await? {
                HeldTensor::Own(mut held) => held.hand_out().ok_or_else(WorkerError::handed_out)?,
                HeldTensor::Peers(held) => (self.bring(key, *held, &args).await?, SendArgs::default()),
                HeldTensor::HandedOut(tensor) => (tensor, SendArgs::default()),
            };
            Ok(Delivered { tensor, send_args, recv_args: args })
        });
        self.worker.timed(Timed::Recv, limit, what, received).await
    }

    /// Copies a value of another worker to the memory that the receiver wants, if needed.
    async fn bring(
        &self,
        key: &Key,
        mut held: ReceivedGuard<FabricChannel>,
        to: &RecvArgs,
    ) -> Result<Tensor, WorkerError> {
        let copy = if to.device_context.is_some() {
            let tensor = DataConnection::shared_tensor(&mut held)?;
            copy_from_host(key, &tensor, to).await.map_err(|status| self.not_here(key, status))?
        } else {
            None
        };
        let received = held.take().ok_or_else(WorkerError::handed_out)?;
        copy.map_or_else(|| DataConnection::tensor(received), Ok)
    }

    pub(crate) async fn receive_within(
        &self,
        key: &Key,
        options: ReceiveOptions,
        limit: Duration,
    ) -> Result<Tensor, WorkerError> {
        let what = || format!("receiving `{key}` of step {}", self.id.0);
        let how = Receiving::AtOnce(options);
        let received = pin!(self.receive_for(key, &how, None));
        self.worker.timed(Timed::Recv, limit, what, received).await?.into_tensor()
    }

    /// Connects to the workers of the sources of `keys`, so that requests to the same worker are queued together and
    /// share messages.
    pub(crate) async fn connect_sources(&self, keys: impl Iterator<Item = &Key>) -> Result<(), WorkerError> {
        for source in keys.filter_map(|key| key.source_device().worker()) {
            if source != self.worker.name() {
                self.worker.node.connected(&self.worker.node.peer_by_name(&source)?).await?;
            }
        }
        Ok(())
    }

    /// Ends the step on this worker with `status`: pending and later receives and sends fail with it. The first status
    /// of several is used. Pending requests of peers are answered with it; pending receives of this worker are
    /// cancelled at their senders.
    ///
    /// A status of CANCELLED or ABORTED is marked as derived ([`Status::derived`]), so that code which merges the
    /// statuses of several workers prefers the original cause.
    pub fn abort(&self, status: &Status) {
        if let Ok(step) = &self.live {
            match status.code {
                Code::Cancelled | Code::Aborted => step.abort(&status.clone().derived()),
                _ => step.abort(status),
            }
        }
        self.worker.discard(self.id);
    }

    pub(crate) async fn receive_held(
        &self,
        key: &Key,
        how: Receiving<'_>,
    ) -> Result<HeldTensor, WorkerError> {
        self.receive_for(key, &how, None).await
    }

    async fn receive_for(
        &self,
        key: &Key,
        how: &Receiving<'_>,
        args: Option<&RecvArgs>,
    ) -> Result<HeldTensor, WorkerError> {
        let (step, is_from_here) = self.admits(key)?;
        // Rare cases are boxed, because otherwise the future of every receive would have room for them.
        if is_from_here {
            return Box::pin(self.receive_own(step, key, args)).await;
        }
        if let Some(token) = args.and_then(|args| args.cancellation.as_ref()) {
            return Box::pin(self.receive_cancellable(step, key, how, token)).await;
        }
        let scope = Scope::Step(self.id);
        let received = pin!(self.receive_from_peer(key, &scope, how));
        step.or_aborted(received).await.map_err(|status| self.aborted(status))?
    }

    /// The step's queues, and whether the source of `key` is a device of this worker.
    ///
    /// # Errors
    /// The step has ended, or `key` cannot be received here.
    pub(crate) fn admits(&self, key: &Key) -> Result<(&StepRef, bool), WorkerError> {
        let step = self.live()?;
        if !self.worker.is_own(key.destination_device()) {
            return Err(self.wrong_worker(KeyEnd::Destination, key));
        }
        Ok((step, self.is_from_here(key)?))
    }

    /// Receives from a peer, unless the token is cancelled.
    async fn receive_cancellable(
        &self,
        step: &StepRef,
        key: &Key,
        how: &Receiving<'_>,
        token: &CancellationToken,
    ) -> Result<HeldTensor, WorkerError> {
        // A value that is available takes precedence over a token that is already cancelled, and only the sender knows
        // whether one is available.
        let is_now = token.is_cancelled();
        let scope = if is_now { Scope::StepNow(self.id) } else { Scope::Step(self.id) };
        let received = pin!(self.receive_from_peer(key, &scope, how));
        let received = self.unless_cancelled(step.or_aborted(received), token, is_now).await;
        match received.map_err(|status| self.given_up(key, true, status))? {
            Err(WorkerError::Remote { status, .. }) if is_now && status == cancelled() => {
                Err(self.given_up(key, true, status))
            }
            received => received,
        }
    }

    /// The output of `receive`, unless `token` is cancelled first. If it was cancelled before, the sender is asked whether
    /// it has a value.
    async fn unless_cancelled<T>(
        &self,
        receive: impl Future<Output = Result<T, Status>>,
        token: &CancellationToken,
        is_now: bool,
    ) -> Result<T, Status> {
        if is_now {
            let asked = timeout(&**self.worker.node.runtime(), ASKED_AT_ONCE, receive).await;
            return asked.unwrap_or_else(|_| Err(cancelled()));
        }
        match select(pin!(receive), pin!(token.cancelled())).await {
            Either::Left((received, _)) => received,
            Either::Right(_) => Err(cancelled()),
        }
    }

    /// Receives from this worker's own table.
    async fn receive_own(
        &self,
        step: &StepRef,
        key: &Key,
        args: Option<&RecvArgs>,
    ) -> Result<HeldTensor, WorkerError> {
        let blank = RecvArgs::default();
        let args = args.unwrap_or(&blank);
        let token = args.cancellation.as_ref();
        let taken = step.take_unless(key, token).await;
        let mut held = ValueGuard::new(taken.map_err(|status| self.given_up(key, token.is_some(), status))?);
        held.bring(key, args).await.map_err(|status| self.not_here(key, status))?;
        Ok(HeldTensor::Own(Box::new(held)))
    }

    async fn receive_from_peer(
        &self,
        key: &Key,
        scope: &Scope,
        how: &Receiving<'_>,
    ) -> Result<HeldTensor, WorkerError> {
        let peer = self.source_of(key)?;
        loop {
            let (connection, key) = self.connection_for(&peer, key).await?;
            let transfer = Transfer { peer: peer.name(), key: &key, step: Some(self.id.0) };
            let received = match how {
                Receiving::AtOnce(options) => connection
                    .receive(scope, &transfer, options)
                    .await
                    .map(|(tensor, _)| HeldTensor::HandedOut(tensor)),
                Receiving::Held(options) => {
                    connection.receive_held(scope, &transfer, options).await.map(HeldTensor::of_peer)
                }
                Receiving::Into(target) => {
                    connection.receive_into(scope, &transfer, target).await.map(HeldTensor::of_peer)
                }
            };
            match received {
                // It was not requested: another connection has taken this one's place.
                Err(WorkerError::PeerLost { .. }) if connection.protocol.is_retired() => {}
                received => return received,
            }
        }
    }

    /// The connection to the sender of `key`, and the key with the incarnation of the sender.
    pub(crate) async fn connection_for<'key>(
        &self,
        peer: &KnownPeer,
        key: &'key Key,
    ) -> Result<(Arc<DataConnection>, Cow<'key, str>), WorkerError> {
        let connected = match peer.live_connection() {
            Some(connection) => Ok(connection),
            // Boxed, because otherwise the future of every receive would have room for this one.
            None => Box::pin(self.worker.node.connected(peer)).await,
        };
        let key = match (key.incarnation(), &connected) {
            (0, Ok(connection)) => Cow::Owned(key.text_with_incarnation(connection.peer_incarnation)),
            _ => Cow::Borrowed(key.as_str()),
        };
        // A step that a broken connection has ended stays ended after a reconnect.
        if let Some(detail) = self.worker.node.values().lost.why(self.id, peer.name()) {
            let transfer = Transfer { peer: peer.name(), key: &key, step: Some(self.id.0) };
            return Err(step_broken(transfer, (peer, connected), detail));
        }
        Ok((connected?, key))
    }

    /// The peer that sends `key`.
    pub(crate) fn source_of(&self, key: &Key) -> Result<KnownPeer, WorkerError> {
        let node = &self.worker.node;
        // Most sources are workers, not devices of theirs.
        if let Some(peer) = node.known_peer(key.source()) {
            return Ok(peer);
        }
        let source = key.source_device().worker().ok_or_else(|| WorkerError::BadKey {
            key: key.to_string(),
            problem: "its source names no worker: give job, replica and task".to_owned(),
        })?;
        node.peer_by_name(&source)
    }

    /// This step, without keeping it from ending.
    pub(crate) fn observed(&self) -> Self {
        Self { _end: None, ..self.clone() }
    }

    /// The step's queues, unless the step has ended.
    pub(crate) fn live(&self) -> Result<&StepRef, WorkerError> {
        let step = self.live.as_ref().map_err(|status| self.aborted(status.clone()))?;
        step.aborted().map_or(Ok(step), |status| Err(self.aborted(status)))
    }

    /// Whether the source of `key` is a device of this worker. An empty source counts as this worker.
    ///
    /// # Errors
    /// The key names another incarnation of this worker.
    fn is_from_here(&self, key: &Key) -> Result<bool, WorkerError> {
        if key.source().is_empty() {
            return Ok(true);
        }
        let own = self.worker.is_own(key.source_device());
        if own && key.incarnation() != 0 {
            let checked = self.worker.node.values().check_incarnation(key);
            checked.map_err(|status| self.aborted(status))?;
        }
        Ok(own)
    }

    fn wrong_worker(&self, end: KeyEnd, key: &Key) -> WorkerError {
        WorkerError::WrongWorker { end, key: key.to_string(), worker: self.worker.name().to_owned() }
    }

    pub(crate) fn aborted(&self, status: Status) -> WorkerError {
        WorkerError::Aborted { step: self.id.0, status }
    }

    /// The error of a receive that the step or its token ended.
    fn given_up(&self, key: &Key, has_token: bool, status: Status) -> WorkerError {
        if has_token && status == cancelled() {
            return WorkerError::Cancelled { transfer: self.transfer(key), status };
        }
        self.aborted(status)
    }

    /// The error of a value that cannot be copied to the memory that the receiver wants.
    fn not_here(&self, key: &Key, status: Status) -> WorkerError {
        WorkerError::Local { transfer: self.transfer(key), status }
    }

    fn transfer(&self, key: &Key) -> Box<TransferName> {
        let peer = key.source_device().worker().unwrap_or_default();
        Transfer { peer: &peer, key: key.as_str(), step: Some(self.id.0) }.name()
    }
}

/// The error of a receive of a step that a broken connection has ended.
fn step_broken(
    transfer: Transfer<'_>,
    (peer, connected): (&KnownPeer, Attempt),
    detail: String,
) -> WorkerError {
    let transport = connected.map_or("no fabric", |connection| connection.kind.name());
    let address = peer.address().unwrap_or_else(|| "an unknown address".to_owned());
    WorkerError::PeerLost {
        transfer: transfer.name(),
        address,
        transport,
        loss: PeerLoss::StepBroken,
        detail,
    }
}

/// The form in which a value is received.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Receiving<'target> {
    /// As a tensor, with these options, for a caller that returns it as soon as it has arrived.
    AtOnce(ReceiveOptions),
    /// As a tensor, with these options, for a caller that then waits for other values.
    Held(ReceiveOptions),
    /// Into the user's buffer.
    Into(&'target Target),
}

/// A value that is not returned to the user yet. If it is dropped, the next receive of its key gets the value. Its
/// contents are boxed, because a receive passes this through several futures.
pub(crate) enum HeldTensor {
    /// A value of this worker's own table.
    Own(Box<ValueGuard>),
    /// A value of a peer.
    Peers(Box<ReceivedGuard<FabricChannel>>),
    /// A value of a peer that is not held: if it is dropped, the next receive of its key does not get it.
    HandedOut(Tensor),
}

impl HeldTensor {
    fn of_peer(held: ReceivedGuard<FabricChannel>) -> Self {
        Self::Peers(Box::new(held))
    }

    /// Whether the value is the output of a branch that was not taken.
    pub(crate) fn is_dead(&self) -> bool {
        match self {
            Self::Own(held) => held.tensor().is_some_and(Tensor::is_dead),
            Self::Peers(held) => held.get().is_some_and(|received| received.metadata.is_dead),
            Self::HandedOut(tensor) => tensor.is_dead(),
        }
    }

    /// Moves the value into the buffer of `target`, with a copy if it is in other memory. If the peer may still write
    /// that buffer, memory of `pool` replaces it. A value that does not fit is not lost.
    pub(crate) async fn fill(
        &mut self,
        target: &Target,
        transfer: Transfer<'_>,
        pool: &Pool,
    ) -> Result<(Metadata, BufMut), WorkerError> {
        match self {
            Self::Peers(held) => target.fill(transfer, held, pool).await,
            Self::Own(held) => {
                let tensor = held.tensor().cloned().ok_or_else(WorkerError::handed_out)?;
                let filled = target.fill_with(transfer, tensor.metadata(), tensor.bytes()).await?;
                drop(held.hand_out());
                Ok(filled)
            }
            Self::HandedOut(tensor) => target.fill_with(transfer, tensor.metadata(), tensor.bytes()).await,
        }
    }

    pub(crate) fn into_tensor(self) -> Result<Tensor, WorkerError> {
        match self {
            Self::Own(mut held) => {
                held.hand_out().map(|(tensor, _)| tensor).ok_or_else(WorkerError::handed_out)
            }
            Self::Peers(mut held) => DataConnection::tensor(held.take().ok_or_else(WorkerError::handed_out)?),
            Self::HandedOut(tensor) => Ok(tensor),
        }
    }
}
