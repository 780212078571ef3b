//! A step of a worker: what users send and receive in.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::future::{Either, select, try_join_all};
use protocol::{Code, Held, Key, Manner, Scope, Sharing, Status, StepId};

use crate::{
    Delivered, KeyEnd, RecvArgs, SendArgs, Tensor, Worker, WorkerError,
    control::{Arrived, HeldArrival},
    data::DataConnection,
    device_context::copy_from_host,
    error::{PeerLoss, TransferName},
    fabric_channel::FabricChannel,
    held_value::HeldValue,
    receive_into::Target,
    steps::StepRef,
    table::{SendRefused, cancelled},
};

/// One step of this worker: sends and receives of different steps never mix.
///
/// [`Worker::step`] begins it. While a `Step` of it is kept, peers' requests wait in it for as long as their receivers
/// like; a step that nobody keeps and that holds no value is forgotten, and a request for it waits for it to begin again
/// ([`WorkerBuilder::step_init_timeout`](crate::WorkerBuilder::step_init_timeout)). Every step belongs to the one worker
/// that it was begun with.
///
/// ```
/// use rendezvous::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
/// let worker = Worker::builder("/job:trainer/replica:0/task:0").start().await?;
/// let cpu = "/job:trainer/replica:0/task:0/device:CPU:0";
/// let key = worker.key(cpu, cpu, "loss")?;
///
/// let step = worker.step(1);
/// step.send(&key, Tensor::from_values(worker.pool(), &[], &[0.5f32])?)?;
/// assert_eq!(step.recv(&key).await?.values::<f32>()?, [0.5]);
/// worker.cleanup(1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Step {
    pub(crate) worker: Worker,
    pub(crate) id: StepId,
    /// Or why it had been finished before.
    live: Result<StepRef, Status>,
}

impl Step {
    pub(crate) fn begin(worker: &Worker, id: StepId) -> Self {
        let live = worker.node.values.steps.begin(id);
        Self { worker: worker.clone(), id, live }
    }

    /// Its number.
    pub fn id(&self) -> i64 {
        self.id.0
    }

    /// Makes `tensor` available under `key`, whose source must be a device of this worker. Never waits: the
    /// value stays here until its receiver asks.
    ///
    /// # Errors
    /// [`WorkerError::Aborted`] when the step is over, or the key names another life of this worker;
    /// [`WorkerError::WrongWorker`] when the source is elsewhere; [`WorkerError::TableFull`].
    pub fn send(&self, key: &Key, tensor: Tensor) -> Result<(), WorkerError> {
        self.send_with(key, SendArgs::default(), tensor)
    }

    /// As [`send`](Self::send), with more to say. A receiver on this worker gets `args` as they are, with the very
    /// context object; for one on another worker a value in device memory is copied to the host first.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_with(&self, key: &Key, args: SendArgs, tensor: Tensor) -> Result<(), WorkerError> {
        if self.worker.node.is_refusing() {
            return Err(WorkerError::ShutDown);
        }
        let step = self.live()?;
        if !self.is_from_here(key)? {
            return Err(self.wrong_worker(KeyEnd::Source, key));
        }
        let values = &self.worker.node.values;
        let receiver = if values.lost.is_empty() { None } else { key.destination_device().worker() };
        if let Some(status) = receiver.and_then(|receiver| values.lost.status(self.id, &receiver)) {
            return Err(self.aborted(status));
        }
        let sent = values.steps.send(step, &key.table_key(), args, tensor.remember_checksums());
        sent.map_err(|refused| match refused {
            SendRefused::Full { waiting, cap } => WorkerError::TableFull { waiting, cap },
            SendRefused::Aborted(status) => self.aborted(status),
        })
    }

    /// The next value under `key`, from the worker of its source device; from this worker's own table, without
    /// a copy, when that is itself.
    ///
    /// # Errors
    /// [`WorkerError::WrongWorker`] when the destination is not a device of this worker; [`WorkerError::Remote`] with
    /// the sender's status, also when the key names another life of it; [`WorkerError::PeerLost`],
    /// [`WorkerError::Aborted`], [`WorkerError::DeadlineExceeded`] after the worker's default timeout.
    ///
    /// # Cancel safety
    /// Cancel-safe: in a loop around `select!`, nothing is lost, doubled or out of order. Dropping the future gives
    /// the receive up: the sender is told, and a value that it has not written yet stays there in its place. One
    /// that is being written is kept here, in the receive's own memory, for the next receive of the key; that waits
    /// until it is known which of the two it is. Of several receives of a key that are outstanding at once when one
    /// of them is dropped, any may get the value. Kept values end with the step.
    ///
    /// If the connection breaks while values of the step are under way, the step is over with this peer at both
    /// ends, for good: later receives fail with [`WorkerError::PeerLost`] too.
    pub async fn recv(&self, key: &Key) -> Result<Tensor, WorkerError> {
        self.recv_timeout(key, self.worker.node.limit).await
    }

    /// As [`recv`](Self::recv), within `limit`.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv).
    pub async fn recv_timeout(&self, key: &Key, limit: Duration) -> Result<Tensor, WorkerError> {
        self.receive_within(key, self.worker.node.sharing.into(), limit).await
    }

    /// As [`recv`](Self::recv), with this [`Sharing`] instead of the worker's ([`WorkerBuilder::sharing`](crate::WorkerBuilder::sharing)).
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv). A value that is kept for the next receive of its key is what that one gets, view or copy.
    pub async fn recv_as(&self, key: &Key, sharing: Sharing) -> Result<Tensor, WorkerError> {
        self.receive_within(key, sharing.into(), self.worker.node.limit).await
    }

    /// As [`recv`](Self::recv), with more to say: where the value is wanted, and a token that ends the receive while it
    /// waits. From a sender on this worker it comes with what that said; from another worker with blank
    /// [`SendArgs`].
    ///
    /// A value that is wanted on another kind of memory than it is on is copied by the device contexts of the two ends
    /// ([`DeviceContext`](crate::DeviceContext)).
    ///
    /// ```
    /// use rendezvous::{CancellationToken, RecvArgs, Worker, WorkerError};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), WorkerError> {
    /// let worker = Worker::builder("/job:a/replica:0/task:0").start().await?;
    /// let cpu = "/job:a/replica:0/task:0/device:CPU:0";
    /// let key = worker.key(cpu, cpu, "never sent")?;
    ///
    /// let token = CancellationToken::new();
    /// let args = RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() };
    /// token.cancel();
    /// let received = worker.step(1).recv_with(&key, args).await;
    /// assert!(matches!(received, Err(WorkerError::Cancelled { .. })));
    /// # worker.shutdown().await;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`recv`](Self::recv); [`WorkerError::Cancelled`], derived, when the token is or gets cancelled while the
    /// receive waits; [`WorkerError::Local`] when the value can't be copied to where it is wanted, which the next
    /// receive of the key gets then.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv), also while the value is copied.
    pub async fn recv_with(&self, key: &Key, args: RecvArgs) -> Result<Delivered, WorkerError> {
        let what = || format!("receiving `{key}` of step {}", self.id.0);
        let how = Receiving::As(self.worker.node.sharing.into());
        let received = pin!(async move {
            let limit = self.worker.node.limit;
            let (tensor, send_args) = match self.receive_for(key, how, &args, limit).await? {
                HeldTensor::Own(mut held) => held.hand_out().ok_or_else(handed_out)?,
                HeldTensor::Peers(held) => (self.bring(key, held, &args).await?, SendArgs::default()),
                HeldTensor::Grpc(held) => (self.bring_arrived(key, held, &args).await?, SendArgs::default()),
            };
            Ok(Delivered { tensor, send_args, recv_args: args })
        });
        self.worker.within(self.worker.node.limit, what, received).await
    }

    /// Hands out a value of another worker where it is wanted.
    async fn bring(
        &self,
        key: &Key,
        mut held: Held<FabricChannel>,
        to: &RecvArgs,
    ) -> Result<Tensor, WorkerError> {
        let copy = if to.device_context.is_some() {
            let tensor = DataConnection::shared_tensor(&mut held)?;
            copy_from_host(key, &tensor, to).await.map_err(|status| self.not_here(key, status))?
        } else {
            None
        };
        let received = held.take().ok_or_else(handed_out)?;
        copy.map_or_else(|| DataConnection::tensor(received), Ok)
    }

    /// As [`bring`](Self::bring), with a value that came over gRPC.
    async fn bring_arrived(
        &self,
        key: &Key,
        mut held: HeldArrival,
        to: &RecvArgs,
    ) -> Result<Tensor, WorkerError> {
        if to.device_context.is_none() {
            return held.take().map(Arrived::into_tensor).ok_or_else(handed_out);
        }
        let tensor = held.shared_tensor().ok_or_else(handed_out)?;
        let copy = copy_from_host(key, &tensor, to).await.map_err(|status| self.not_here(key, status))?;
        drop(held.take());
        Ok(copy.unwrap_or(tensor))
    }

    async fn receive_within(
        &self,
        key: &Key,
        manner: Manner,
        limit: Duration,
    ) -> Result<Tensor, WorkerError> {
        let what = || format!("receiving `{key}` of step {}", self.id.0);
        let received = pin!(async {
            let blank = RecvArgs::default();
            self.receive_for(key, Receiving::As(manner), &blank, limit).await?.into_tensor()
        });
        self.worker.within(limit, what, received).await
    }

    /// The next value under each of `keys`, in their order. All are asked for at once, each worker in as few messages as
    /// its keys fit ([`WorkerBuilder::requests_per_message`](crate::WorkerBuilder::requests_per_message)); they may come from different workers, and a key may occur
    /// more than once.
    ///
    /// # Memory
    /// Values that have come stay in the receive pool while the others are waited for. So all that is wanted together at a
    /// time must fit into it ([`WorkerBuilder::receive_bytes`](crate::WorkerBuilder::receive_bytes)), with as much beside as
    /// the largest of other values: else some of it may wait for memory until the deadline. A value takes at most twice its
    /// bytes meanwhile.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), for the first key whose receive fails; the error names it. Values of other keys that
    /// have come are kept for the next receives of these.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv): a value that has come for one of the keys is not lost when the future is dropped.
    pub async fn recv_many(&self, keys: &[Key]) -> Result<Vec<Tensor>, WorkerError> {
        let what = || format!("receiving {} keys of step {}", keys.len(), self.id.0);
        let held = pin!(async {
            self.connect_sources(keys.iter()).await?;
            let manner = Manner { sharing: self.worker.node.sharing, together: true };
            try_join_all(keys.iter().map(|key| self.receive_held(key, Receiving::As(manner)))).await
        });
        let held = self.worker.within(self.worker.node.limit, what, held).await?;
        held.into_iter().map(HeldTensor::into_tensor).collect()
    }

    /// Connects to the workers that have the sources of `keys`, so that requests for several find each other.
    pub(crate) async fn connect_sources(&self, keys: impl Iterator<Item = &Key>) -> Result<(), WorkerError> {
        for source in keys.filter_map(|key| key.source_device().worker()) {
            if source != self.worker.name() {
                self.worker.peer(&source)?.connected(&self.worker.node).await?;
            }
        }
        Ok(())
    }

    /// Ends the step here with `status`: pending and later receives and sends fail with it; of several, the first stays.
    /// Receives of this step that peers have posted here get it as the sender's answer; those posted from here are given
    /// up, and their senders told.
    ///
    /// A status of CANCELLED or ABORTED is marked as one that follows from another, so that whoever merges statuses
    /// prefers its cause ([`Status::derived`]).
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
        self.receive_for(key, how, &RecvArgs::default(), self.worker.node.limit).await
    }

    /// `limit` is told to the sender, where it can be; the caller keeps it.
    async fn receive_for(
        &self,
        key: &Key,
        how: Receiving<'_>,
        args: &RecvArgs,
        limit: Duration,
    ) -> Result<HeldTensor, WorkerError> {
        let step = self.live()?;
        if !self.worker.is_own(key.destination_device()) {
            return Err(self.wrong_worker(KeyEnd::Destination, key));
        }
        if self.is_from_here(key)? {
            let taken = step.take_unless(&key.table_key(), args.cancellation.as_ref()).await;
            let mut held = HeldValue::new(taken.map_err(|status| self.given_up(key, args, status))?);
            held.bring(key, args).await.map_err(|status| self.not_here(key, status))?;
            return Ok(HeldTensor::Own(held));
        }
        let received = pin!(self.receive_from_peer(key, how, limit));
        let received = pin!(step.or_aborted(received));
        let received = match &args.cancellation {
            Some(token) if token.is_cancelled() => Err(cancelled()),
            Some(token) => match select(received, pin!(token.cancelled())).await {
                Either::Left((received, _)) => received,
                Either::Right(_) => Err(cancelled()),
            },
            None => received.await,
        };
        received.map_err(|status| self.given_up(key, args, status))?
    }

    async fn receive_from_peer(
        &self,
        key: &Key,
        how: Receiving<'_>,
        limit: Duration,
    ) -> Result<HeldTensor, WorkerError> {
        let source = key.source_device().worker().ok_or_else(|| WorkerError::BadKey {
            key: key.to_string(),
            problem: "its source names no worker: give job, replica and task".to_owned(),
        })?;
        let peer = self.worker.peer(&source)?;
        let connected = peer.connected(&self.worker.node).await;
        let key = match (key.incarnation(), &connected) {
            (0, Ok(connection)) => key.with_incarnation(connection.peer_incarnation()).to_string(),
            _ => key.to_string(),
        };
        let transfer = TransferName { peer: peer.name().to_owned(), key, step: Some(self.id.0) };
        // A step that is over with the peer is so whether or not there is a way to it again.
        if let Some(detail) = self.worker.node.values.lost.why(self.id, peer.name()) {
            let transport = connected.map_or("no fabric", |connection| connection.kind().name());
            let loss = PeerLoss::StepBroken;
            return Err(WorkerError::PeerLost { transfer: Box::new(transfer), transport, loss, detail });
        }
        let connection = connected?;
        let scope = Scope::Step(self.id);
        match how {
            Receiving::As(manner) => connection.receive_held(scope, &transfer, manner, limit).await,
            Receiving::Into(target) => connection.receive_into(scope, &transfer, target, Some(limit)).await,
        }
    }

    /// What holds its queues, unless it is over.
    fn live(&self) -> Result<&StepRef, WorkerError> {
        let step = self.live.as_ref().map_err(|status| self.aborted(status.clone()))?;
        step.aborted().map_or(Ok(step), |status| Err(self.aborted(status)))
    }

    /// Whether the source of `key` is a device of this worker, or not named, which means the same.
    ///
    /// # Errors
    /// The key names another life of this worker.
    fn is_from_here(&self, key: &Key) -> Result<bool, WorkerError> {
        if key.source().is_empty() {
            return Ok(true);
        }
        let own = self.worker.is_own(key.source_device());
        if own && key.incarnation() != 0 {
            let checked = self.worker.node.values.check_incarnation(key);
            checked.map_err(|status| self.aborted(status))?;
        }
        Ok(own)
    }

    fn wrong_worker(&self, end: KeyEnd, key: &Key) -> WorkerError {
        WorkerError::WrongWorker { end, key: key.to_string(), worker: self.worker.name().to_owned() }
    }

    fn aborted(&self, status: Status) -> WorkerError {
        WorkerError::Aborted { step: self.id.0, status }
    }

    /// The end of a receive that waited: by the step, or by its token.
    fn given_up(&self, key: &Key, args: &RecvArgs, status: Status) -> WorkerError {
        if args.cancellation.is_some() && status == cancelled() {
            return WorkerError::Cancelled { transfer: Box::new(self.transfer(key)), status };
        }
        self.aborted(status)
    }

    /// The value can't be brought to where it is wanted.
    fn not_here(&self, key: &Key, status: Status) -> WorkerError {
        WorkerError::Local { transfer: Box::new(self.transfer(key)), status }
    }

    fn transfer(&self, key: &Key) -> TransferName {
        let peer = key.source_device().worker().unwrap_or_default();
        TransferName { peer, key: key.to_string(), step: Some(self.id.0) }
    }
}

/// How a value is received.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Receiving<'target> {
    /// As a tensor.
    As(Manner),
    /// Into the user's buffer.
    Into(&'target Arc<Target>),
}

/// A value that is not handed out yet. Dropping it gives it to the next receive of its key.
pub(crate) enum HeldTensor {
    /// Of this worker's own table.
    Own(HeldValue),
    /// Of a peer.
    Peers(Held<FabricChannel>),
    /// Of a peer, over gRPC.
    Grpc(HeldArrival),
}

impl HeldTensor {
    /// Whether it comes from a branch that was not taken.
    pub(crate) fn is_dead(&self) -> bool {
        match self {
            Self::Own(held) => held.tensor().is_some_and(Tensor::is_dead),
            Self::Peers(held) => held.get().is_some_and(|received| received.metadata.is_dead),
            Self::Grpc(held) => held.is_dead(),
        }
    }

    pub(crate) fn into_tensor(self) -> Result<Tensor, WorkerError> {
        match self {
            Self::Own(mut held) => held.hand_out().map(|(tensor, _)| tensor).ok_or_else(handed_out),
            Self::Peers(mut held) => DataConnection::tensor(held.take().ok_or_else(handed_out)?),
            Self::Grpc(mut held) => held.take().map(Arrived::into_tensor).ok_or_else(handed_out),
        }
    }
}

pub(crate) fn handed_out() -> WorkerError {
    WorkerError::InvalidTensor { problem: "the value was handed out before".to_owned() }
}
